//! Creating a session: request id, name, admission, first operation, events and audit row in one transaction.

use std::collections::BTreeMap;
use std::time::Duration;

use cloister_types::session::{Action, Reason, SessionEvent, SessionState, transition};
use cloister_types::{
    BackendKind, ByteCount, CpuMillis, HostId, Isolation, Limits, OpId, SandboxId, SessionId,
};
use sqlx::PgConnection;
use sqlx::types::Json;

use super::admission::{
    Decision, Demand, HostView, Refusal, TooLarge, backends_of, decide, not_offered, too_large,
};
use super::fault::commit;
use super::idempotency::first_answer;
use super::op::OpKind;
use super::session::{parse_optional, parse_word, read, session_query};
use super::store::{Failure, to_i64, to_seconds};
use super::{AdmissionPolicy, host};
use super::{AuditContext, ClaimedOp, LeaseHolder, PayloadHash, SessionRecord, Store, StoreError};

/// What to create; checked by the caller ([`cloister_types::name`], [`Limits::validate`]).
#[derive(Debug, Clone)]
pub struct CreateSession {
    /// Unique among the organization's undeleted sessions, when given.
    pub name: Option<String>,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// `host` in this version.
    pub image: String,
    /// What the sandbox may use.
    pub limits: Limits,
    /// `None` is `auto`: the strongest that the chosen host offers, never `sim`.
    pub backend: Option<BackendKind>,
    /// The least isolation to accept.
    pub isolation_floor: Isolation,
    /// When to delete it by itself.
    pub ttl: Option<Duration>,
}

/// The answer to [`Store::create_session`].
#[derive(Debug, Clone)]
pub struct Created {
    /// The session: `starting`, or `queued` with its reason; when repeated, as it is now.
    pub session: SessionRecord,
    /// The operation that starts it, already claimed by the caller: execute it without waiting for a reconciler.
    pub op: Option<ClaimedOp>,
    /// The request id was seen before.
    pub repeated: bool,
}

impl Store {
    /// Creates a session and places it, or queues it with the reason.
    ///
    /// Placement never promises more than a host's capacity, and never overtakes a queued session that waits for the
    /// same host. When no host is connected or none is large enough the session is queued with `no_host`.
    ///
    /// # Errors
    ///
    /// [`StoreError::NotOffered`] when hosts are connected but none is strong enough, [`StoreError::TooLarge`] when none is
    /// large enough, [`StoreError::NameTaken`],
    /// [`StoreError::IdempotencyMismatch`], [`StoreError::Unavailable`].
    pub async fn create_session(
        &self,
        context: &AuditContext,
        payload: &PayloadHash,
        holder: &LeaseHolder,
        params: &CreateSession,
    ) -> Result<Created, StoreError> {
        let created = self.observe("create_session", self.try_create(context, payload, holder, params)).await;
        match created {
            Ok(Some(created)) => Ok(created),
            Ok(None) => self.repeated_create(context, payload).await,
            Err(StoreError::Database { source: sqlx::Error::Database(error), .. })
                if error.constraint() == Some("sessions_live_name_key") =>
            {
                let name = params.name.clone().unwrap_or_default();
                let holder = self.resolve_session(&context.organization_id, &name).await;
                let holder =
                    holder.map_or_else(|_| "another session".to_owned(), |session| session.id.into());
                Err(StoreError::NameTaken { kind: "session", name, holder })
            }
            Err(error) => Err(error),
        }
    }
}

impl Store {
    /// One transaction, one synchronous commit; `None` when the request id was used before.
    async fn try_create(
        &self,
        context: &AuditContext,
        payload: &PayloadHash,
        holder: &LeaseHolder,
        params: &CreateSession,
    ) -> Result<Option<Created>, Failure> {
        let id = SessionId::generate();
        let mut tx = self.pool.begin().await?;
        if !claim_key_and_hosts(&mut tx, context, payload, &id).await? {
            return Ok(None);
        }
        let (hosts, queue) = views(&mut tx, self.config.admission).await?;
        let demand = Demand { backend: params.backend, floor: params.isolation_floor, limits: params.limits };
        if let Some(offered) = not_offered(&demand, &hosts) {
            return Err(StoreError::NotOffered {
                floor: params.isolation_floor,
                backend: params.backend.map(|kind| kind.as_str().to_owned()),
                offered,
            }
            .into());
        }
        if let Some(TooLarge { resource, asked, most }) = too_large(&demand, &hosts) {
            return Err(StoreError::TooLarge { resource, asked, most }.into());
        }
        let waiting = if queue { waiting_demands(&mut tx).await? } else { Vec::new() };
        let created = match decide(&demand, &hosts, &waiting) {
            Decision::Place { host, backend } => {
                let placed = transition(SessionState::Pending, SessionEvent::Place)?;
                debug_assert_eq!(placed.actions, [Action::StartOp]);
                let at = (&hosts[host].id, backend);
                let session =
                    insert_placed(&mut tx, context, holder, self.config.op_lease, &id, params, at).await?;
                debug_assert_eq!(session.session.state, placed.state);
                Created { session: session.session.clone(), op: Some(session), repeated: false }
            }
            Decision::Queue(refusal) => {
                let queued = transition(SessionState::Pending, SessionEvent::Enqueue)?;
                let session = insert_queued(&mut tx, context, &id, params, &refusal).await?;
                debug_assert_eq!(session.state, queued.state);
                Created { session, op: None, repeated: false }
            }
        };
        commit(tx, "create_session").await?;
        Ok(Some(created))
    }

    async fn repeated_create(
        &self,
        context: &AuditContext,
        payload: &PayloadHash,
    ) -> Result<Created, StoreError> {
        self.observe("repeated_create", async {
            let mut connection = self.pool.acquire().await?;
            let conflict = || StoreError::Conflict { kind: "request", id: context.request_id.clone() };
            // The key was there and is gone: the first attempt was rolled back while this one waited.
            let id = first_answer(&mut connection, context, payload).await?.ok_or_else(conflict)?;
            let session = read(&mut connection, &id).await?;
            let session = session.ok_or_else(|| StoreError::not_found("session", &id))?;
            Ok(Created { session, op: None, repeated: true })
        })
        .await
    }
}

/// Writes the request's key and locks the connected hosts in one round trip, in this order; returns whether the key is
/// new. See [`claim_key`](super::idempotency::claim_key) and [`host::lock_connected`] for each.
async fn claim_key_and_hosts(
    connection: &mut PgConnection,
    context: &AuditContext,
    payload: &PayloadHash,
    id: &SessionId,
) -> Result<bool, Failure> {
    let row = sqlx::query!(
        r#"WITH key AS (
               INSERT INTO idempotency_keys (user_id, request_id, payload_hash, resource_id) VALUES ($1, $2, $3, $4)
               ON CONFLICT DO NOTHING RETURNING request_id),
           locked AS (SELECT h.id FROM hosts h WHERE h.connected ORDER BY h.id FOR NO KEY UPDATE)
           SELECT (SELECT count(*) FROM key) AS "keys!", (SELECT count(*) FROM locked) AS "hosts!""#,
        context.user_id.as_str(),
        context.request_id,
        &payload.0[..],
        id.as_str(),
    )
    .fetch_one(connection)
    .await?;
    Ok(row.keys == 1)
}

/// Returns every host as admission sees it, with the connected ones locked until the transaction ends.
pub(super) async fn locked_views(
    connection: &mut PgConnection,
    policy: AdmissionPolicy,
) -> Result<Vec<HostView>, Failure> {
    host::lock_connected(connection).await?;
    Ok(views(connection, policy).await?.0)
}

/// Returns every host as admission sees it, and whether any session is queued. The caller holds the locks.
async fn views(
    connection: &mut PgConnection,
    policy: AdmissionPolicy,
) -> Result<(Vec<HostView>, bool), Failure> {
    let (hosts, queue) = host::read_all(connection).await?;
    let views = hosts.into_iter().map(|host| HostView {
        id: host.id,
        connected: host.connected,
        cordoned: host.cordoned,
        backends: backends_of(&host.capabilities),
        promisable: policy.promisable(host.capacity),
        allocated: host.allocated,
    });
    Ok((views.collect(), queue))
}

/// Returns what the queue waits for: of sessions that ask for the same backend and floor only the smallest limits
/// count, since the question is which hosts any of them could use. Reads `sessions_queue_key`.
pub(super) async fn waiting_demands(connection: &mut PgConnection) -> Result<Vec<Demand>, Failure> {
    let rows = sqlx::query!(
        r#"SELECT requested_backend, isolation_floor, min(memory_bytes) AS "memory_bytes!",
                  min(cpu_millis) AS "cpu_millis!", min(disk_bytes) AS "disk_bytes!"
           FROM sessions WHERE state = 'queued' GROUP BY requested_backend, isolation_floor"#,
    )
    .fetch_all(connection)
    .await?;
    let demands = rows.into_iter().map(|row| {
        Ok(Demand {
            backend: parse_optional(
                "sessions",
                "queued",
                "requested_backend",
                row.requested_backend.as_deref(),
            )?,
            floor: parse_word("sessions", "queued", "isolation_floor", &row.isolation_floor)?,
            limits: Limits {
                memory: ByteCount(row.memory_bytes.unsigned_abs()),
                cpus: CpuMillis(u32::try_from(row.cpu_millis).unwrap_or(u32::MAX)),
                pids: Limits::MINIMUM.pids,
                disk: ByteCount(row.disk_bytes.unsigned_abs()),
            },
        })
    });
    demands.collect()
}

/// Writes a placed session with its events, its audit row and its start operation, which the caller holds already.
async fn insert_placed(
    connection: &mut PgConnection,
    context: &AuditContext,
    holder: &LeaseHolder,
    lease: Duration,
    id: &SessionId,
    params: &CreateSession,
    (host_id, backend): (&HostId, BackendKind),
) -> Result<ClaimedOp, Failure> {
    let op_id = OpId::generate();
    let sandbox_id = SandboxId::generate();
    let row = session_query!(
        "WITH s AS (
             INSERT INTO sessions (id, organization_id, name, labels, state, image, memory_bytes, cpu_millis, pids,
                 disk_bytes, requested_backend, isolation_floor, backend, host_id, sandbox_id, last_cursor,
                 expires_at, deadline_at)
             VALUES ($1, $2, $3, $4, 'starting', $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, 2,
                 cloister_now() + make_interval(secs => $15), cloister_now() + make_interval(secs => $16))
             RETURNING *),
         event AS (
             INSERT INTO session_events (session_id, cursor, kind, state)
             SELECT s.id, 1, 'session.created', 'pending' FROM s
             UNION ALL SELECT s.id, 2, 'session.starting', 'starting' FROM s),
         op AS (
             INSERT INTO session_ops (id, session_id, kind, state, epoch, attempts, lease_holder, lease_expires_at)
             SELECT $17, s.id, 'start', 'running', s.epoch, 1, $18, cloister_now() + make_interval(secs => $19)
             FROM s),
         audit AS (
             INSERT INTO audit_log (organization_id, principal, action, resource, request_id, source)
             SELECT $2, $20, $21, s.id, $22, $23 FROM s),
         notice AS (SELECT pg_notify('cloister_changes', s.id) FROM s)
         SELECT ",
        " FROM s, notice",
        id.as_str(),
        context.organization_id.as_str(),
        params.name,
        Json(&params.labels) as _,
        params.image,
        to_i64(params.limits.memory.0),
        i64::from(params.limits.cpus.0),
        i64::from(params.limits.pids),
        to_i64(params.limits.disk.0),
        params.backend.map(BackendKind::as_str),
        params.isolation_floor.as_str(),
        backend.as_str(),
        host_id.as_str(),
        sandbox_id.as_str(),
        params.ttl.map(to_seconds),
        SessionState::Starting.deadline().map(to_seconds),
        op_id.as_str(),
        holder.0,
        to_seconds(lease),
        context.principal,
        context.action,
        context.request_id,
        context.source,
    )
    .fetch_one(connection)
    .await?;
    let session = SessionRecord::try_from(row)?;
    Ok(ClaimedOp {
        id: op_id,
        kind: OpKind::Start,
        epoch: session.epoch,
        attempts: 1,
        last_error: String::new(),
        lease_expires_at: session.created_at + lease,
        session,
    })
}

/// Writes a session that waits, with its events and its audit row.
async fn insert_queued(
    connection: &mut PgConnection,
    context: &AuditContext,
    id: &SessionId,
    params: &CreateSession,
    refusal: &Refusal,
) -> Result<SessionRecord, Failure> {
    let row = session_query!(
        "WITH s AS (
             INSERT INTO sessions (id, organization_id, name, labels, state, reason, message, image, memory_bytes,
                 cpu_millis, pids, disk_bytes, requested_backend, isolation_floor, last_cursor, queue_seq, expires_at)
             VALUES ($1, $2, $3, $4, 'queued', $5, $6, $7, $8, $9, $10, $11, $12, $13, 2,
                 nextval('session_queue_seq'), cloister_now() + make_interval(secs => $14))
             RETURNING *),
         event AS (
             INSERT INTO session_events (session_id, cursor, kind, state, reason, message)
             SELECT s.id, 1, 'session.created', 'pending', NULL, '' FROM s
             UNION ALL SELECT s.id, 2, 'session.queued', 'queued', s.reason, s.message FROM s),
         audit AS (
             INSERT INTO audit_log (organization_id, principal, action, resource, request_id, source)
             SELECT $2, $15, $16, s.id, $17, $18 FROM s),
         notice AS (SELECT pg_notify('cloister_changes', s.id) FROM s)
         SELECT ",
        " FROM s, notice",
        id.as_str(),
        context.organization_id.as_str(),
        params.name,
        Json(&params.labels) as _,
        Reason::as_str(refusal.reason()),
        refusal.to_string(),
        params.image,
        to_i64(params.limits.memory.0),
        i64::from(params.limits.cpus.0),
        i64::from(params.limits.pids),
        to_i64(params.limits.disk.0),
        params.backend.map(BackendKind::as_str),
        params.isolation_floor.as_str(),
        params.ttl.map(to_seconds),
        context.principal,
        context.action,
        context.request_id,
        context.source,
    )
    .fetch_one(connection)
    .await?;
    Ok(SessionRecord::try_from(row)?)
}
