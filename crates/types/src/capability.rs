//! What a host can do, found by trying it.

use serde::{Deserialize, Serialize};

/// One capability of a host with the evidence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capability {
    /// Stable name, for example `backend.namespace` or `disk.loop`.
    pub name: String,
    /// Whether it works.
    pub status: CapabilityStatus,
    /// What was tried and what came of it.
    pub detail: String,
    /// What an operator can do about a failure; empty otherwise.
    pub remedy: String,
}

/// The outcome of a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CapabilityStatus {
    /// Tried, and it worked.
    Ok,
    /// Tried, and it did not work: `detail` says how, `remedy` what to do.
    Failed,
    /// Makes no sense on this host.
    NotApplicable,
}

impl Capability {
    /// Returns a capability that works.
    pub fn ok(name: impl Into<String>, detail: impl Into<String>) -> Self {
        Self { name: name.into(), status: CapabilityStatus::Ok, detail: detail.into(), remedy: String::new() }
    }

    /// Returns a capability that was tried and failed.
    pub fn failed(name: impl Into<String>, detail: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            status: CapabilityStatus::Failed,
            detail: detail.into(),
            remedy: remedy.into(),
        }
    }

    /// Returns a capability that does not concern this host.
    pub fn not_applicable(name: impl Into<String>, detail: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            status: CapabilityStatus::NotApplicable,
            detail: detail.into(),
            remedy: String::new(),
        }
    }

    /// Returns whether it works.
    pub fn is_ok(&self) -> bool {
        self.status == CapabilityStatus::Ok
    }
}
