//! Bounded work for the reconcilers: queue, deadlines, expiry, lost hosts. Each is safe to run twice and on several
//! coordinators at once.

use std::time::Duration;

use cloister_types::session::{Reason, SessionEvent, SessionState};
use cloister_types::{HostId, SandboxId, SessionId};

use sqlx::PgConnection;

use super::admission::{Decision, Demand, decide};
use super::create::locked_views;
use super::fault::commit;
use super::host::notify;
use super::op::claim;
use super::session::{parse_word, session_query};
use super::store::{Failure, to_seconds};
use super::transition::{Placement, apply, apply_placed};
use super::{ClaimedOp, LeaseHolder, SessionRecord, Store, StoreError, TransitionParams};

/// Missed heartbeats after which a host counts as lost.
const HEARTBEATS_MISSED: f64 = 3.0;
/// Queued sessions that one run looks at. What stands further back waits for an earlier one to move.
const QUEUE_LOOK_MAX: i64 = 1000;

/// The answer to [`Store::admit_queued`].
#[derive(Debug, Clone, Default)]
pub struct Admitted {
    /// Sessions that were placed, with their start operation already claimed by the caller.
    pub ops: Vec<ClaimedOp>,
    /// Whether the bound was reached: run again at once.
    pub more: bool,
}

/// A step that was given up.
#[derive(Debug, Clone)]
pub struct DeadlinePassed {
    /// The state that lasted too long.
    pub from: SessionState,
    /// The session after it. From `starting` it is `failed`, and its host may hold a sandbox that nobody wants: send
    /// a removal with this record's epoch. From `resuming` it is `paused`, and its host may run one: send a stop. From
    /// `pausing` it is `pausing` again, with a new operation, or `host_lost` when its host is.
    pub session: SessionRecord,
}

/// A host that stopped answering.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LostHost {
    /// The host.
    pub host_id: HostId,
    /// Its sessions that went from `active` to `host_lost`.
    pub sessions: Vec<SessionId>,
}

impl Store {
    /// Places up to `limit` queued sessions, first in first out, and refreshes the reasons
    /// of those it looked at. Run it on every change of a session or host, and on the timer.
    ///
    /// # Errors
    ///
    /// [`StoreError::Unavailable`].
    pub async fn admit_queued(&self, holder: &LeaseHolder, limit: u32) -> Result<Admitted, StoreError> {
        self.observe("admit_queued", async {
            let mut admitted = Admitted::default();
            // Every change of a session or host comes here, and almost always nobody waits: that must not lock the
            // hosts, which creates need. Whoever is queued after this look gives notice. Reads `sessions_queue_key`.
            let waits = sqlx::query_scalar!(
                r#"SELECT EXISTS (SELECT FROM sessions WHERE state = 'queued') AS "waits!""#,
            )
            .fetch_one(&self.pool)
            .await?;
            if !waits {
                return Ok(admitted);
            }
            let mut tx = self.pool.begin().await?;
            let mut hosts = locked_views(&mut tx, self.config.admission).await?;
            // Reads `sessions_queue_key`.
            let queue = session_query!(
                "SELECT ",
                " FROM sessions s WHERE s.state = 'queued' ORDER BY s.queue_seq LIMIT $1 FOR UPDATE",
                QUEUE_LOOK_MAX,
            )
            .fetch_all(&mut *tx)
            .await?;
            let mut waiting = Vec::new();
            for row in queue {
                let session = SessionRecord::try_from(row)?;
                let demand = Demand {
                    backend: session.requested_backend,
                    floor: session.isolation_floor,
                    limits: session.limits,
                };
                match decide(&demand, &hosts, &waiting) {
                    Decision::Place { .. } if admitted.ops.len() >= usize::try_from(limit).unwrap_or(usize::MAX) => {
                        admitted.more = true;
                        break;
                    }
                    Decision::Place { host, backend } => {
                        hosts[host].allocate(&session.limits);
                        let placement = Placement {
                            host_id: hosts[host].id.clone(),
                            sandbox_id: SandboxId::generate(),
                            backend,
                        };
                        let params = TransitionParams::new(session.id.clone(), SessionEvent::Place);
                        apply_placed(&mut tx, &session, &params, Some(&placement)).await?;
                        let op = claim(&mut tx, holder, self.config.op_lease, session.id.as_str(), None).await?;
                        admitted.ops.extend(op);
                    }
                    Decision::Queue(refusal) => {
                        if session.reason != Some(refusal.reason()) || session.message != refusal.to_string() {
                            // Only where it changed, else this run's own notice would start the next.
                            sqlx::query!(
                                "WITH s AS (
                                     UPDATE sessions SET reason = $2, message = $3, updated_at = cloister_now(),
                                         generation = generation + 1
                                     WHERE id = $1 RETURNING id)
                                 SELECT pg_notify('cloister_changes', s.id) FROM s",
                                session.id.as_str(),
                                refusal.reason().as_str(),
                                refusal.to_string(),
                            )
                            .fetch_one(&mut *tx)
                            .await?;
                        }
                        if !waiting.contains(&demand) {
                            waiting.push(demand);
                        }
                    }
                }
            }
            commit(tx, "admit_queued").await?;
            Ok(admitted)
        })
        .await
    }

    /// Starts the deletion of up to `limit` sessions whose time to live ran out, and returns them. Their operations
    /// are pending.
    ///
    /// # Errors
    ///
    /// [`StoreError::Unavailable`].
    pub async fn expire_ttl(&self, limit: u32) -> Result<Vec<SessionId>, StoreError> {
        self.observe("expire_ttl", async {
            let mut tx = self.pool.begin().await?;
            // Reads `sessions_by_expiry`.
            let rows = session_query!(
                "SELECT ",
                " FROM sessions s
                  WHERE s.expires_at <= cloister_now() AND s.state NOT IN ('deleting', 'deleted')
                  ORDER BY s.expires_at LIMIT $1 FOR UPDATE SKIP LOCKED",
                i64::from(limit),
            )
            .fetch_all(&mut *tx)
            .await?;
            if rows.is_empty() {
                return Ok(Vec::new());
            }
            let mut expired = Vec::with_capacity(rows.len());
            for row in rows {
                let session = SessionRecord::try_from(row)?;
                let params = TransitionParams {
                    reason: Some(Reason::Expired),
                    message: "its time to live ran out".to_owned(),
                    ..TransitionParams::new(session.id.clone(), SessionEvent::Delete)
                };
                let session = apply(&mut tx, &session, &params).await?;
                sqlx::query!(
                    "INSERT INTO audit_log (organization_id, principal, action, resource, request_id, source)
                     VALUES ($1, 'system', 'session.expire', $2, '', '')",
                    session.organization_id.as_str(),
                    session.id.as_str(),
                )
                .execute(&mut *tx)
                .await?;
                expired.push(session.id);
            }
            commit(tx, "expire_ttl").await?;
            Ok(expired)
        })
        .await
    }

    /// Applies `deadline_passed` to up to `limit` sessions whose step lasted too long, and `host_lost` to a pause whose
    /// host does not answer. Each gets a new epoch, so that the late step is refused on its host.
    ///
    /// # Errors
    ///
    /// [`StoreError::Unavailable`].
    pub async fn pass_deadlines(&self, limit: u32) -> Result<Vec<DeadlinePassed>, StoreError> {
        self.observe("pass_deadlines", async {
            let mut tx = self.pool.begin().await?;
            // Reads `sessions_by_deadline`.
            let rows = session_query!(
                "SELECT ",
                " FROM sessions s WHERE s.deadline_at <= cloister_now()
                  ORDER BY s.deadline_at LIMIT $1 FOR UPDATE SKIP LOCKED",
                i64::from(limit),
            )
            .fetch_all(&mut *tx)
            .await?;
            if rows.is_empty() {
                return Ok(Vec::new());
            }
            let mut passed = Vec::with_capacity(rows.len());
            for row in rows {
                let before = SessionRecord::try_from(row)?;
                let lasted = before.state.deadline().unwrap_or_default().as_secs();
                let event = match before.state {
                    SessionState::Pausing if !answers(&mut tx, before.host_id.as_ref()).await? => {
                        SessionEvent::HostLost
                    }
                    _ => SessionEvent::DeadlinePassed,
                };
                let starts_over = event == SessionEvent::DeadlinePassed
                    && matches!(before.state, SessionState::Pausing | SessionState::Deleting);
                let params = TransitionParams {
                    // What starts over is still done for the reason it was begun for.
                    reason: if starts_over { before.reason } else { Some(Reason::DeadlineExceeded) },
                    message: format!("it was `{}` for more than {lasted} s", before.state),
                    ..TransitionParams::new(before.id.clone(), event)
                };
                let session = apply(&mut tx, &before, &params).await?;
                passed.push(DeadlinePassed { from: before.state, session });
            }
            commit(tx, "pass_deadlines").await?;
            Ok(passed)
        })
        .await
    }

    /// Declares hosts lost that were silent for three heartbeat intervals. A coordinator that just started has heard
    /// nobody: it waits three intervals before its first call.
    ///
    /// # Errors
    ///
    /// [`StoreError::Unavailable`].
    pub async fn mark_lost_hosts(&self, heartbeat_interval: Duration) -> Result<Vec<LostHost>, StoreError> {
        self.observe("mark_lost_hosts", async {
            let mut tx = self.pool.begin().await?;
            // Reads `hosts_by_heartbeat`.
            let hosts = sqlx::query_scalar!(
                "WITH silent AS (
                     SELECT id FROM hosts
                     WHERE connected AND last_heartbeat_at < cloister_now() - make_interval(secs => $1)
                     ORDER BY id FOR NO KEY UPDATE)
                 UPDATE hosts SET connected = false, generation = generation + 1
                 WHERE id IN (SELECT id FROM silent) RETURNING id",
                to_seconds(heartbeat_interval) * HEARTBEATS_MISSED,
            )
            .fetch_all(&mut *tx)
            .await?;
            if hosts.is_empty() {
                return Ok(Vec::new());
            }
            let mut lost = Vec::with_capacity(hosts.len());
            for host in hosts {
                // Reads `sessions_by_host`.
                let rows = session_query!(
                    "SELECT ",
                    " FROM sessions s WHERE s.host_id = $1 AND s.state = 'active' ORDER BY s.id FOR UPDATE",
                    host,
                )
                .fetch_all(&mut *tx)
                .await?;
                let mut sessions = Vec::with_capacity(rows.len());
                for row in rows {
                    let session = SessionRecord::try_from(row)?;
                    let message =
                        format!("host `{host}` missed its heartbeats; it goes on when the host is back");
                    let params = TransitionParams {
                        message,
                        ..TransitionParams::new(session.id.clone(), SessionEvent::HostLost)
                    };
                    sessions.push(apply(&mut tx, &session, &params).await?.id);
                }
                notify(&mut tx, &host).await?;
                lost.push(LostHost { host_id: parse_word("hosts", &host, "id", &host)?, sessions });
            }
            commit(tx, "mark_lost_hosts").await?;
            Ok(lost)
        })
        .await
    }

    /// Returns how long until the next deadline or expiry, for the reconciler's timer; `None` when there is none.
    ///
    /// # Errors
    ///
    /// [`StoreError::Unavailable`].
    pub async fn next_deadline_in(&self) -> Result<Option<Duration>, StoreError> {
        self.observe("next_deadline_in", async {
            // Reads the first entries of `sessions_by_deadline` and `sessions_by_expiry`.
            let seconds = sqlx::query_scalar!(
                "SELECT extract(epoch FROM least(
                     (SELECT min(deadline_at) FROM sessions WHERE deadline_at IS NOT NULL),
                     (SELECT min(expires_at) FROM sessions
                      WHERE expires_at IS NOT NULL AND state NOT IN ('deleting', 'deleted'))) - cloister_now())::float8",
            )
            .fetch_one(&self.pool)
            .await?;
            Ok(seconds.map(|seconds| Duration::try_from_secs_f64(seconds).unwrap_or(Duration::ZERO)))
        })
        .await
    }

    /// Removes up to `limit` request ids older than `age` and finished operations and events of sessions deleted
    /// longer ago than that. Returns how many rows went.
    ///
    /// # Errors
    ///
    /// [`StoreError::Unavailable`].
    pub async fn prune(&self, age: Duration, limit: u32) -> Result<u64, StoreError> {
        self.observe("prune", async {
            let mut tx = self.pool.begin().await?;
            let age = to_seconds(age);
            // Reads `idempotency_keys_by_time`.
            let keys = sqlx::query!(
                "DELETE FROM idempotency_keys WHERE (user_id, request_id) IN (
                     SELECT user_id, request_id FROM idempotency_keys
                     WHERE created_at < cloister_now() - make_interval(secs => $1) ORDER BY created_at LIMIT $2)",
                age,
                i64::from(limit),
            )
            .execute(&mut *tx)
            .await?
            .rows_affected();
            // Reads `sessions_deleted_by_time`.
            let sessions = sqlx::query_scalar!(
                "SELECT id FROM sessions
                 WHERE state = 'deleted' AND updated_at < cloister_now() - make_interval(secs => $1)
                 ORDER BY updated_at LIMIT $2 FOR UPDATE SKIP LOCKED",
                age,
                i64::from(limit),
            )
            .fetch_all(&mut *tx)
            .await?;
            sqlx::query!("DELETE FROM session_events WHERE session_id = ANY($1)", &sessions[..]).execute(&mut *tx).await?;
            sqlx::query!("DELETE FROM session_ops WHERE session_id = ANY($1)", &sessions[..]).execute(&mut *tx).await?;
            let gone =
                sqlx::query!("DELETE FROM sessions WHERE id = ANY($1)", &sessions[..]).execute(&mut *tx).await?;
            commit(tx, "prune").await?;
            Ok(keys + gone.rows_affected())
        })
        .await
    }
}

/// Returns whether a session's host has not missed its heartbeats. One that comes back right after is not missed: its
/// report waits for the session's lock, which the caller holds. Reads `hosts_pkey`.
async fn answers(connection: &mut PgConnection, host_id: Option<&HostId>) -> Result<bool, Failure> {
    let connected =
        sqlx::query_scalar!("SELECT connected FROM hosts WHERE id = $1", host_id.map(HostId::as_str))
            .fetch_optional(connection)
            .await?;
    Ok(connected.unwrap_or(false))
}
