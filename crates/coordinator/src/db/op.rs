//! Multi-step operations on sessions: who executes them, and how often they were tried.
//!
//! A session has at most one unfinished operation. Whoever claims it gets a lease and a new epoch; a holder that
//! lost its lease is refused here (`Conflict`) and, by the epoch, on the host.

use std::str::FromStr;
use std::time::Duration;

use chrono::{DateTime, Utc};
use cloister_types::{OpId, SessionId};
use serde::{Deserialize, Serialize};

use sqlx::PgConnection;

use super::fault::{after_commit, before_commit, commit};
use super::session::{parse_word, session_query};
use super::store::{Failure, storable, to_i64, to_seconds};
use super::{SessionRecord, Store, StoreError};

/// Who holds leases: one coordinator process. Text that is unique among all that ever ran.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct LeaseHolder(pub String);

impl LeaseHolder {
    /// Returns a holder that no other process has.
    pub fn generate() -> Self {
        Self(format!("coordinator-{}", uuid::Uuid::now_v7()))
    }
}

/// What an operation does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum OpKind {
    /// Makes the sandbox, on the kept layer when there is one (create and resume).
    Start,
    /// Stops the sandbox and keeps the layer.
    Pause,
    /// Removes everything.
    Delete,
}

/// Where an operation stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum OpState {
    /// To be claimed from `not_before` on.
    Pending,
    /// Claimed; belongs to its holder until the lease runs out.
    Running,
    /// Its session moved on.
    Done,
    /// Another operation took its place.
    Superseded,
}

/// An operation that the caller holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimedOp {
    /// Its id.
    pub id: OpId,
    /// What it does.
    pub kind: OpKind,
    /// The epoch of this claim: the session's, sent with every effect.
    pub epoch: u64,
    /// How often it was claimed, this time included.
    pub attempts: u32,
    /// What went wrong last time; empty at first.
    pub last_error: String,
    /// Until when it is the caller's.
    pub lease_expires_at: DateTime<Utc>,
    /// The session as of the claim.
    pub session: SessionRecord,
}

impl Store {
    /// Claims up to `limit` operations that are due: pending ones whose `not_before` has come, and running ones
    /// whose lease ran out. Each claim bumps the session's epoch. Several coordinators may call it at once.
    ///
    /// # Errors
    ///
    /// [`StoreError::Unavailable`].
    pub async fn claim_due_ops(
        &self,
        holder: &LeaseHolder,
        limit: u32,
    ) -> Result<Vec<ClaimedOp>, StoreError> {
        self.observe("claim_due_ops", async {
            let mut tx = self.pool.begin().await?;
            // Sessions are locked before their operations, as everywhere; one that somebody changes right now is
            // left for the next run. Reads `session_ops_due`.
            let due = sqlx::query!(
                r#"SELECT o.id, s.id AS session_id
                   FROM session_ops o JOIN sessions s ON s.id = o.session_id
                   WHERE o.state IN ('pending', 'running')
                     AND coalesce(o.lease_expires_at, o.not_before) <= cloister_now()
                   ORDER BY coalesce(o.lease_expires_at, o.not_before) LIMIT $1
                   FOR UPDATE OF s SKIP LOCKED"#,
                i64::from(limit),
            )
            .fetch_all(&mut *tx)
            .await?;
            let mut claimed = Vec::with_capacity(due.len());
            for op in due {
                // The look was older than the lock: `claim` looks again.
                if let Some(op) =
                    claim(&mut tx, holder, self.config.op_lease, &op.session_id, Some(&op.id)).await?
                {
                    claimed.push(op);
                }
            }
            commit(tx, "claim_ops").await?;
            Ok(claimed)
        })
        .await
    }

    /// Returns when the next pending operation becomes due or the next lease runs out, for the reconciler's timer.
    ///
    /// # Errors
    ///
    /// [`StoreError::Unavailable`].
    pub async fn next_op_due_in(&self) -> Result<Option<Duration>, StoreError> {
        self.observe("next_op_due_in", async {
            // Reads the first entry of `session_ops_due`.
            let seconds = sqlx::query_scalar!(
                r#"SELECT extract(epoch FROM coalesce(lease_expires_at, not_before) - cloister_now())::float8
                       AS "seconds!"
                   FROM session_ops WHERE state IN ('pending', 'running')
                   ORDER BY coalesce(lease_expires_at, not_before) LIMIT 1"#,
            )
            .fetch_optional(&self.pool)
            .await?;
            Ok(seconds.map(|seconds| Duration::try_from_secs_f64(seconds).unwrap_or(Duration::ZERO)))
        })
        .await
    }

    /// Ends the leases of a holder that is known to be dead, so that its operations are due at once; returns how many.
    /// A wrong belief does no harm: whoever claims gets a new epoch, by which the holder is refused.
    ///
    /// # Errors
    ///
    /// [`StoreError::Unavailable`].
    pub async fn end_leases(&self, holder: &LeaseHolder) -> Result<u64, StoreError> {
        self.observe("end_leases", async {
            // Reads the unfinished ones of `session_ops_due`.
            let ended = sqlx::query!(
                "UPDATE session_ops SET lease_expires_at = cloister_now(), generation = generation + 1
                 WHERE lease_holder = $1 AND state = 'running' AND lease_expires_at > cloister_now()",
                holder.0,
            )
            .execute(&self.pool)
            .await?;
            Ok(ended.rows_affected())
        })
        .await
    }

    /// Extends the lease of a claimed operation.
    ///
    /// # Errors
    ///
    /// [`StoreError::Conflict`] when it is no longer the holder's (claimed again, superseded, done): stop all effects.
    pub async fn renew_op_lease(
        &self,
        holder: &LeaseHolder,
        op: &ClaimedOp,
    ) -> Result<DateTime<Utc>, StoreError> {
        self.observe("renew_op_lease", async {
            // Reads `session_ops_pkey`. The epoch tells this claim from a later one of the same holder.
            let renewed = sqlx::query_scalar!(
                r#"UPDATE session_ops SET lease_expires_at = cloister_now() + make_interval(secs => $4),
                       generation = generation + 1
                   WHERE id = $1 AND lease_holder = $2 AND epoch = $3 AND state = 'running'
                   RETURNING lease_expires_at AS "lease_expires_at!""#,
                op.id.as_str(),
                holder.0,
                to_i64(op.epoch),
                to_seconds(self.config.op_lease),
            )
            .fetch_optional(&self.pool)
            .await?;
            Ok(renewed.ok_or_else(|| StoreError::Conflict { kind: "op", id: op.id.to_string() })?)
        })
        .await
    }

    /// Gives a claimed operation back, to be tried again after `delay`.
    ///
    /// # Errors
    ///
    /// [`StoreError::Conflict`] when it is no longer the holder's: there is nothing to give back.
    pub async fn retry_op_later(
        &self,
        holder: &LeaseHolder,
        op: &ClaimedOp,
        delay: Duration,
        error: &str,
    ) -> Result<(), StoreError> {
        self.observe("retry_op_later", async {
            before_commit("retry_op");
            // Reads `session_ops_pkey`.
            let written = sqlx::query!(
                "WITH o AS (
                     UPDATE session_ops SET state = 'pending', lease_holder = NULL, lease_expires_at = NULL,
                         not_before = cloister_now() + make_interval(secs => $4), last_error = $5,
                         generation = generation + 1
                     WHERE id = $1 AND lease_holder = $2 AND epoch = $3 AND state = 'running'
                     RETURNING session_id)
                 SELECT pg_notify('cloister_changes', o.session_id) FROM o",
                op.id.as_str(),
                holder.0,
                to_i64(op.epoch),
                to_seconds(delay),
                storable(error),
            )
            .fetch_optional(&self.pool)
            .await?;
            after_commit("retry_op");
            written.ok_or_else(|| StoreError::Conflict { kind: "op", id: op.id.to_string() })?;
            Ok(())
        })
        .await
    }

    /// Makes the pending operations of a host's sessions due at once: called when the host connects.
    ///
    /// # Errors
    ///
    /// [`StoreError::Unavailable`].
    pub async fn hasten_ops_of_host(
        &self,
        host_id: &cloister_types::HostId,
    ) -> Result<Vec<SessionId>, StoreError> {
        self.observe("hasten_ops_of_host", async {
            // Reads `sessions_by_host` and `session_ops_unfinished_key`.
            let rows = sqlx::query_scalar!(
                r#"WITH o AS (
                       UPDATE session_ops SET not_before = cloister_now(), generation = session_ops.generation + 1
                       FROM sessions s
                       WHERE s.host_id = $1 AND s.state <> 'deleted' AND session_ops.session_id = s.id
                         AND session_ops.state = 'pending' AND session_ops.not_before > cloister_now()
                       RETURNING session_ops.session_id),
                   notice AS (SELECT o.session_id, pg_notify('cloister_changes', o.session_id) FROM o)
                   SELECT session_id AS "session_id!" FROM notice"#,
                host_id.as_str(),
            )
            .fetch_all(&self.pool)
            .await?;
            let ids = rows.iter().map(|id| parse_word("session_ops", id, "session_id", id));
            Ok(ids.collect::<Result<Vec<_>, _>>()?)
        })
        .await
    }
}

impl OpKind {
    /// Every kind.
    pub const ALL: [Self; 3] = [Self::Start, Self::Pause, Self::Delete];

    /// Returns the word used in the store.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Pause => "pause",
            Self::Delete => "delete",
        }
    }
}

impl FromStr for OpKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|kind| kind.as_str() == text)
            .ok_or_else(|| format!("`{text}` is not a kind of operation"))
    }
}

impl OpState {
    /// Every state.
    pub const ALL: [Self; 4] = [Self::Pending, Self::Running, Self::Done, Self::Superseded];

    /// Returns the word used in the store.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Running => "running",
            Self::Done => "done",
            Self::Superseded => "superseded",
        }
    }
}

/// Writes an operation that anybody may claim at once. The caller holds the session and ended its earlier one.
pub(super) async fn insert_pending(
    connection: &mut PgConnection,
    session: &SessionRecord,
    kind: OpKind,
) -> Result<OpId, Failure> {
    let id = OpId::generate();
    sqlx::query!(
        "INSERT INTO session_ops (id, session_id, kind, state, epoch) VALUES ($1, $2, $3, 'pending', $4)",
        id.as_str(),
        session.id.as_str(),
        kind.as_str(),
        to_i64(session.epoch),
    )
    .execute(connection)
    .await?;
    Ok(id)
}

/// Claims the unfinished operation of a session that the transaction holds: new epoch, new lease. With `only_due`
/// set it must be that one and still be due. `None` when there is nothing to claim. Reads
/// `session_ops_unfinished_key` and `sessions_pkey`.
pub(super) async fn claim(
    connection: &mut PgConnection,
    holder: &LeaseHolder,
    lease: Duration,
    session_id: &str,
    only_due: Option<&str>,
) -> Result<Option<ClaimedOp>, Failure> {
    let op = sqlx::query!(
        r#"UPDATE session_ops o SET state = 'running', epoch = s.epoch + 1, attempts = o.attempts + 1,
               lease_holder = $2, lease_expires_at = cloister_now() + make_interval(secs => $3),
               generation = o.generation + 1
           FROM sessions s
           WHERE s.id = o.session_id AND o.session_id = $1 AND o.state IN ('pending', 'running')
             AND ($4::text IS NULL
                  OR (o.id = $4 AND coalesce(o.lease_expires_at, o.not_before) <= cloister_now()))
           RETURNING o.id, o.kind, o.epoch, o.attempts, o.last_error, o.lease_expires_at AS "lease_expires_at!""#,
        session_id,
        holder.0,
        to_seconds(lease),
        only_due,
    )
    .fetch_optional(&mut *connection)
    .await?;
    let Some(op) = op else { return Ok(None) };
    let row = session_query!(
        "WITH s AS (UPDATE sessions SET epoch = $2, generation = generation + 1 WHERE id = $1 RETURNING *) SELECT ",
        " FROM s",
        session_id,
        op.epoch,
    )
    .fetch_one(connection)
    .await?;
    Ok(Some(ClaimedOp {
        kind: parse_word("session_ops", &op.id, "kind", &op.kind)?,
        id: parse_word("session_ops", &op.id, "id", &op.id)?,
        epoch: op.epoch.unsigned_abs(),
        attempts: u32::try_from(op.attempts).unwrap_or(u32::MAX),
        last_error: op.last_error,
        lease_expires_at: op.lease_expires_at,
        session: SessionRecord::try_from(row)?,
    }))
}
