//! Who a sandbox is: its id, its name, and where its files are. A warm sandbox gets all of that after it was built.
//!
//! ```text
//!  warm: built, pid 1 answers, no program ever ran ──► ClaimSandbox ──► an ordinary sandbox, for good
//! ```
//!
//! What must hold: a sandbox is claimed at most once, and not after it has run anything, so that nothing of one session
//! is ever seen by another. The host agent has moved the directories before it asks; a claim only tells the shim. The
//! guest agent keeps the id that it was started with, which nobody but its shim uses.

use std::io;
use std::path::PathBuf;

use cloister_api::guest::{self, ErrorKind};

use super::config::ShimConfig;
use super::exec_table::Refusal;
use super::lifecycle::Shim;
use crate::build::layer;
use crate::fault::POINTS;

/// The name of the fact that a claim changes.
const HOSTNAME_FACT: &str = "hostname";

/// Who the sandbox is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Identity {
    /// The id that diallers have to know.
    pub(super) sandbox_id: String,
    /// Holds `lock`, `exit.json` and the guest's socket.
    pub(super) sandbox_dir: PathBuf,
    /// Holds a directory per exec.
    pub(super) exec_dir: PathBuf,
    /// It may run programs.
    pub(super) is_claimed: bool,
}

impl Identity {
    /// Returns what a sandbox is built as.
    pub(super) fn of(config: &ShimConfig) -> Self {
        Self {
            sandbox_id: config.sandbox_id.clone(),
            sandbox_dir: config.sandbox_dir.clone(),
            exec_dir: config.exec_dir.clone(),
            is_claimed: !config.warm,
        }
    }
}

/// Gives a warm sandbox its identity. Runs without a pause, so that no exec starts in the middle of it.
///
/// # Errors
///
/// `CONFLICT` for one that has its identity already, `NOT_RUNNING` for one that is ending; a failure in the middle
/// leaves a sandbox that is still nobody's and of no more use.
pub(super) fn claim(shim: &Shim, request: &guest::ClaimSandbox) -> Result<(), Refusal> {
    if shim.identity.borrow().is_claimed {
        return Err(Refusal::new(ErrorKind::Conflict, "the sandbox's claim"));
    }
    if shim.is_stopping() || shim.has_ended() {
        return Err(Refusal::new(ErrorKind::NotRunning, "the sandbox is ending"));
    }
    let hostname = &request.hostname;
    if hostname.is_empty() || hostname.len() > 64 || hostname.contains(|sign: char| sign.is_whitespace()) {
        return Err(Refusal::new(
            ErrorKind::Invalid,
            "the hostname is not 1 to 64 characters without spaces",
        ));
    }
    let failed = |what: &str| {
        let what = what.to_owned();
        move |error: io::Error| Refusal::new(ErrorKind::Internal, format!("{what}: {error}"))
    };
    if !shim.shares_name {
        // A sandbox without a namespace of its own, as some tests have it, must not rename the machine.
        return Err(Refusal::new(ErrorKind::Invalid, "the sandbox has no name of its own"));
    }
    rustix::system::sethostname(hostname.as_bytes())
        .map_err(|error| failed("set the hostname")(error.into()))?;
    shim.counters
        .with_layer(|layer| layer::take_name(layer, hostname, shim.config.id_base))
        .map_err(|error| failed("write the hostname")(error.into()))?;
    for (name, value) in shim.facts.borrow_mut().iter_mut() {
        if name == HOSTNAME_FACT {
            value.clone_from(hostname);
        }
    }
    *shim.identity.borrow_mut() = Identity {
        sandbox_id: request.sandbox_id.clone(),
        sandbox_dir: PathBuf::from(&request.sandbox_dir),
        exec_dir: PathBuf::from(&request.exec_dir),
        is_claimed: true,
    };
    POINTS.reach("shim_after_claim");
    Ok(())
}
