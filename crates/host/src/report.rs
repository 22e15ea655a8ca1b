//! What a host reports when it registers: each session that is here, whether its sandbox runs, and how it ended if not.
//!
//! All of it comes from the backends and the disk, so that the report is right whatever was killed before: the reason of
//! an end that no event told any more is in it.

use std::collections::BTreeMap;

use cloister_api::host::SandboxReport;
use cloister_sandbox::backend::Backend;
use cloister_service::error_chain;
use cloister_types::{SandboxId, SessionId};

use crate::epochs::Epochs;

/// A report in the making.
pub(crate) struct Report<'a> {
    epochs: &'a Epochs,
    sandboxes: BTreeMap<SessionId, SandboxReport>,
}

impl<'a> Report<'a> {
    pub(crate) fn new(epochs: &'a Epochs) -> Self {
        Self { epochs, sandboxes: BTreeMap::new() }
    }

    /// Adds a sandbox that runs.
    pub(crate) fn running(&mut self, session_id: &SessionId, sandbox_id: &SandboxId) {
        let report = SandboxReport {
            session_id: session_id.to_string(),
            sandbox_id: sandbox_id.to_string(),
            epoch: self.epochs.highest(session_id),
            running: true,
            ..Default::default()
        };
        self.sandboxes.insert(session_id.clone(), report);
    }

    /// Adds the sessions that a backend keeps and that do not run.
    pub(crate) async fn kept(&mut self, backend: &dyn Backend) {
        let sessions = match backend.sessions().await {
            Ok(sessions) => sessions,
            // What runs is known without it; the layers of paused sessions go unreported this time.
            Err(error) => {
                let error = error_chain(&error);
                tracing::warn!(error, "the kept sessions cannot be listed");
                return;
            }
        };
        for (session_id, _) in sessions {
            if self.sandboxes.contains_key(&session_id) {
                continue;
            }
            let end = match backend.kept_session(&session_id).await {
                Ok(kept) => kept.and_then(|kept| kept.last_end),
                Err(error) => {
                    tracing::debug!(session_id = %session_id, error = error_chain(&error), "how its sandbox ended is not known");
                    None
                }
            };
            let mut report = SandboxReport {
                session_id: session_id.to_string(),
                epoch: self.epochs.highest(&session_id),
                ..Default::default()
            };
            if let Some(end) = end {
                report.sandbox_id = end.sandbox_id.to_string();
                report.ended_reason = end.reason.to_string();
                report.ended_message = end.message;
            }
            self.sandboxes.insert(session_id, report);
        }
    }

    pub(crate) fn into_sandboxes(self) -> Vec<SandboxReport> {
        self.sandboxes.into_values().collect()
    }
}
