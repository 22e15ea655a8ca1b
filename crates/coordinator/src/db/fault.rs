//! Points at which a test can kill this process: before and after every commit of the store.
//!
//! In a release build there are none. In others a point looks for the file that `CLOISTER_FAULT_FILE` names: when its
//! text is the point's name the file is removed and the process gets SIGKILL, once, so that the restarted process goes
//! on. A test writes the file, waits until it is gone, and then asserts that everything converged.

use sqlx::{Postgres, Transaction};

/// Every operation that commits; its points are `before_commit_<operation>` and `after_commit_<operation>`.
pub const COMMITS: &[&str] = &[
    "create_session",
    "request",
    "resume",
    "resume_refused",
    "started",
    "transition",
    "claim_ops",
    "retry_op",
    "admit_queued",
    "expire_ttl",
    "pass_deadlines",
    "mark_lost_hosts",
    "register_host",
    "reconcile_report",
    "begin_exec",
    "create_token",
    "revoke_token",
    "bootstrap",
    "cordon_host",
    "prune",
];

/// Commits a transaction between its two points.
pub(super) async fn commit(
    tx: Transaction<'_, Postgres>,
    operation: &'static str,
) -> Result<(), sqlx::Error> {
    before_commit(operation);
    tx.commit().await?;
    after_commit(operation);
    Ok(())
}

/// The point before a commit, for a statement that is its own transaction.
pub(super) fn before_commit(operation: &'static str) {
    reach("before_commit", operation);
}

/// The point after a commit.
pub(super) fn after_commit(operation: &'static str) {
    reach("after_commit", operation);
}

#[cfg(any(test, debug_assertions))]
fn reach(side: &str, operation: &'static str) {
    use std::ffi::OsString;
    use std::sync::OnceLock;

    static FILE: OnceLock<Option<OsString>> = OnceLock::new();
    assert!(COMMITS.contains(&operation), "`{operation}` is not listed");
    let Some(file) = FILE.get_or_init(|| std::env::var_os("CLOISTER_FAULT_FILE")) else { return };
    let wanted = std::fs::read_to_string(file).unwrap_or_default();
    if wanted.trim().strip_prefix(side).and_then(|rest| rest.strip_prefix('_')) == Some(operation) {
        // Whoever removes the file is the one that dies: two points reached at once kill once.
        if std::fs::remove_file(file).is_ok() {
            let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        }
    }
}

#[cfg(not(any(test, debug_assertions)))]
fn reach(_side: &str, _operation: &'static str) {}
