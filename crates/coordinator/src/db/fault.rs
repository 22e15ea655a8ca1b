//! Points at which a test can kill this process: before and after every commit of the store.
//!
//! How a point is armed is the matter of [`cloister_fault`]; a release build has none.

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

fn reach(side: &str, operation: &'static str) {
    if cfg!(debug_assertions) {
        assert!(COMMITS.contains(&operation), "`{operation}` is not listed");
        cloister_fault::reach(&format!("{side}_{operation}"));
    }
}
