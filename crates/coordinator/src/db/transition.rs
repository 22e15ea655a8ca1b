//! The one place where a session's state changes.

use cloister_types::session::{Action, IllegalTransition, Reason, SessionEvent, SessionState, transition};
use cloister_types::{BackendKind, HostId, Isolation, IsolationFact, OpId, SandboxId, SessionId};
use sqlx::PgConnection;
use sqlx::types::Json;

use super::fault::{after_commit, before_commit, commit};
use super::op::{OpKind, insert_pending};
use super::session::{lock, session_query};
use super::store::{Failure, storable, to_i64, to_seconds};
use super::{SessionRecord, Store, StoreError};

/// Most facts of one sandbox that are kept.
const FACTS_MAX: usize = 256;

/// What a started sandbox told about itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StartedFacts {
    /// The isolation it has.
    pub isolation: Isolation,
    /// What was read inside.
    pub facts: Vec<IsolationFact>,
    /// Whether it has a network beyond its loopback.
    pub network: bool,
}

/// Something that happened to a session.
#[derive(Debug, Clone)]
pub struct TransitionParams {
    /// To which session.
    pub session_id: SessionId,
    /// What happened.
    pub event: SessionEvent,
    /// The epoch under which it was done; another one is a `Conflict`. `None` for facts that hold under any epoch.
    pub epoch: Option<u64>,
    /// The operation whose result it is: it must still be the session's unfinished one, else `Conflict`.
    pub op_id: Option<OpId>,
    /// The sandbox it is about: another current one is a `Conflict` (a late report about an earlier sandbox).
    pub sandbox_id: Option<SandboxId>,
    /// The highest epoch that the host had seen when it happened. One that is lower than the epoch of the session's last
    /// start is a `Conflict`: it was about an attempt at this sandbox that was made again since.
    pub seen_epoch: Option<u64>,
    /// Why.
    pub reason: Option<Reason>,
    /// The same for people, with what to do; empty when there is nothing to say.
    pub message: String,
    /// With [`SessionEvent::Started`].
    pub started: Option<StartedFacts>,
}

impl TransitionParams {
    /// Returns an event without any condition or explanation; set the fields that apply.
    pub fn new(session_id: SessionId, event: SessionEvent) -> Self {
        Self {
            session_id,
            event,
            epoch: None,
            op_id: None,
            sandbox_id: None,
            seen_epoch: None,
            reason: None,
            message: String::new(),
            started: None,
        }
    }
}

impl Store {
    /// Applies an event: state, event row, operations and notice in one transaction. `Started` is one round trip.
    ///
    /// Operations that follow (`PauseOp`, `DeleteOp`, `StartOp`) are written pending: a reconciler claims them.
    /// What people ask for goes through [`Store::request_pause`] and its like; `Place`, `Enqueue` and `Resume` need
    /// admission and are refused here ([`Store::admit_queued`], [`Store::request_resume`]).
    ///
    /// # Errors
    ///
    /// [`StoreError::Illegal`] when the state does not take the event: drop a late report, tell a caller.
    /// [`StoreError::Conflict`] when epoch, op or sandbox moved on. [`StoreError::NotFound`],
    /// [`StoreError::Unavailable`].
    pub async fn commit_transition(&self, params: &TransitionParams) -> Result<SessionRecord, StoreError> {
        self.observe("commit_transition", async {
            match params.event {
                SessionEvent::Place | SessionEvent::Enqueue | SessionEvent::Resume => {
                    let session = self.session(&params.session_id).await?;
                    return Err(IllegalTransition { state: session.state, event: params.event }.into());
                }
                SessionEvent::Started => {
                    if let Some(session) = self.commit_started(params).await? {
                        return Ok(session);
                    }
                    // It did not apply: the long way says why.
                }
                SessionEvent::StartFailed
                | SessionEvent::Pause
                | SessionEvent::PauseDone
                | SessionEvent::SandboxGone
                | SessionEvent::HostLost
                | SessionEvent::HostFound
                | SessionEvent::DeadlinePassed
                | SessionEvent::Delete
                | SessionEvent::Removed => {}
            }
            let mut tx = self.pool.begin().await?;
            let session = lock(&mut tx, &params.session_id).await?;
            let changed = apply(&mut tx, &session, params).await?;
            commit(tx, "transition").await?;
            Ok(changed)
        })
        .await
    }
}

/// Where a session goes with `place` or `resume`.
#[derive(Debug, Clone)]
pub(super) struct Placement {
    pub(super) host_id: HostId,
    pub(super) sandbox_id: SandboxId,
    pub(super) backend: BackendKind,
}

impl Store {
    /// The second commit of the create path, in one round trip: `None` when the row is not as expected.
    /// Reads `sessions_pkey` and `session_ops_pkey`.
    async fn commit_started(&self, params: &TransitionParams) -> Result<Option<SessionRecord>, Failure> {
        let (Some(epoch), Some(op_id), Some(started)) = (params.epoch, &params.op_id, &params.started) else {
            return Ok(None);
        };
        // The rule decides; here is only written down from which states it leads to the same place.
        let from: Vec<String> = SessionState::ALL
            .iter()
            .filter(|state| {
                transition(**state, SessionEvent::Started)
                    .is_ok_and(|to| to.state == SessionState::Active && to.actions == [Action::FinishOp])
            })
            .map(|state| state.as_str().to_owned())
            .collect();
        before_commit("started");
        let row = session_query!(
            "WITH s AS (
                 UPDATE sessions SET state = 'active', reason = NULL, message = $5, isolation = $6, facts = $7,
                     network = $8, deadline_at = NULL, updated_at = cloister_now(), generation = generation + 1,
                     last_cursor = last_cursor + 1
                 WHERE id = $1 AND state = ANY($2) AND epoch = $3
                   AND ($4::text IS NULL OR sandbox_id = $4)
                   AND EXISTS (SELECT 1 FROM session_ops o
                               WHERE o.id = $9 AND o.session_id = $1 AND o.state IN ('pending', 'running'))
                 RETURNING *),
             finished AS (
                 UPDATE session_ops o SET state = 'done', finished_at = cloister_now(), lease_holder = NULL,
                     lease_expires_at = NULL, generation = o.generation + 1
                 FROM s WHERE o.session_id = s.id AND o.state IN ('pending', 'running')),
             event AS (
                 INSERT INTO session_events (session_id, cursor, kind, state, message)
                 SELECT s.id, s.last_cursor, 'session.active', s.state, s.message FROM s),
             notice AS (SELECT pg_notify('cloister_changes', s.id) FROM s)
             SELECT ",
            " FROM s, notice",
            params.session_id.as_str(),
            &from[..],
            to_i64(epoch),
            params.sandbox_id.as_ref().map(SandboxId::as_str),
            storable(&params.message),
            started.isolation.as_str(),
            Json(storable_facts(started)) as _,
            started.network,
            op_id.as_str(),
        )
        .fetch_optional(&self.pool)
        .await?;
        after_commit("started");
        Ok(row.map(SessionRecord::try_from).transpose()?)
    }
}

/// Applies an event to a session whose row the transaction holds.
pub(super) async fn apply(
    connection: &mut PgConnection,
    session: &SessionRecord,
    params: &TransitionParams,
) -> Result<SessionRecord, Failure> {
    apply_placed(connection, session, params, None).await
}

/// As [`apply`], with where the session goes. An operation that follows is written pending.
pub(super) async fn apply_placed(
    connection: &mut PgConnection,
    session: &SessionRecord,
    params: &TransitionParams,
    placement: Option<&Placement>,
) -> Result<SessionRecord, Failure> {
    let conflict = || StoreError::Conflict { kind: "session", id: session.id.to_string() };
    if params.epoch.is_some_and(|epoch| epoch != session.epoch)
        || params.sandbox_id.as_ref().is_some_and(|id| session.sandbox_id.as_ref() != Some(id))
    {
        return Err(conflict().into());
    }
    if let Some(seen_epoch) = params.seen_epoch {
        // Reads `session_ops_by_session`.
        let started = sqlx::query_scalar!(
            "SELECT max(epoch) FROM session_ops WHERE session_id = $1 AND kind = 'start'",
            session.id.as_str(),
        )
        .fetch_one(&mut *connection)
        .await?;
        if started.is_some_and(|started| seen_epoch < started.unsigned_abs()) {
            return Err(conflict().into());
        }
    }
    let next = transition(session.state, params.event)?;
    if let Some(op_id) = &params.op_id {
        // Reads `session_ops_pkey`; the session's lock keeps it from ending meanwhile.
        let unfinished = sqlx::query_scalar!(
            r#"SELECT true AS "unfinished!" FROM session_ops
               WHERE id = $1 AND session_id = $2 AND state IN ('pending', 'running')"#,
            op_id.as_str(),
            session.id.as_str(),
        )
        .fetch_optional(&mut *connection)
        .await?;
        if unfinished.is_none() {
            return Err(StoreError::Conflict { kind: "op", id: op_id.to_string() }.into());
        }
    }
    let mut new_op = None;
    let mut op_ends = None;
    for action in next.actions {
        match action {
            Action::StartOp => new_op = Some(OpKind::Start),
            Action::PauseOp => new_op = Some(OpKind::Pause),
            Action::DeleteOp => new_op = Some(OpKind::Delete),
            Action::FinishOp => op_ends = Some("done"),
            // Capacity is the sum over the states that hold it: leaving such a state gives it back, and the notice
            // wakes the queue.
            Action::ReleaseCapacity => {}
        }
    }
    if new_op.is_some() {
        op_ends = Some("superseded");
    }
    if next.state == session.state && next.actions.is_empty() {
        return Ok(session.clone());
    }
    // Whoever acted until now may no longer: a new operation, or a step that was given up.
    let gives_up = params.event == SessionEvent::DeadlinePassed
        || (params.event == SessionEvent::HostLost && op_ends.is_some());
    let epoch_step = i64::from(new_op.is_some() || gives_up);
    let (reason, message) = explain(session, params);
    let started = params.started.as_ref();
    let changed = session_query!(
        "WITH s AS (
             UPDATE sessions SET state = $3, reason = $4, message = $5, epoch = epoch + $6,
                 generation = generation + 1, last_cursor = last_cursor + 1, updated_at = cloister_now(),
                 deadline_at = cloister_now() + make_interval(secs => $7),
                 queue_seq = CASE WHEN $3 = 'queued' THEN coalesce(queue_seq, nextval('session_queue_seq')) END,
                 host_id = coalesce($8, host_id), sandbox_id = coalesce($9, sandbox_id),
                 backend = coalesce($10, backend), isolation = coalesce($11, isolation),
                 facts = coalesce($12, facts), network = coalesce($13, network)
             WHERE id = $1 AND generation = $2 RETURNING *),
         ended AS (
             UPDATE session_ops o SET state = $14, finished_at = cloister_now(), lease_holder = NULL,
                 lease_expires_at = NULL, generation = o.generation + 1
             FROM s WHERE $14::text IS NOT NULL AND o.session_id = s.id AND o.state IN ('pending', 'running')),
         event AS (
             INSERT INTO session_events (session_id, cursor, kind, state, reason, message)
             SELECT s.id, s.last_cursor, 'session.' || s.state, s.state, s.reason, s.message FROM s),
         notice AS (SELECT pg_notify('cloister_changes', s.id) FROM s)
         SELECT ",
        " FROM s, notice",
        session.id.as_str(),
        to_i64(session.generation),
        next.state.as_str(),
        reason.map(Reason::as_str),
        message,
        epoch_step,
        next.state.deadline().map(to_seconds),
        placement.map(|placement| placement.host_id.as_str()),
        placement.map(|placement| placement.sandbox_id.as_str()),
        placement.map(|placement| placement.backend.as_str()),
        started.map(|started| started.isolation.as_str()),
        started.map(|started| Json(storable_facts(started))) as _,
        started.map(|started| started.network),
        op_ends,
    )
    .fetch_optional(&mut *connection)
    .await?;
    let changed = SessionRecord::try_from(changed.ok_or_else(conflict)?)?;
    if let Some(kind) = new_op {
        insert_pending(connection, &changed, kind).await?;
    }
    Ok(changed)
}

/// Facts are read inside a sandbox: the guest may have chosen them.
fn storable_facts(started: &StartedFacts) -> Vec<IsolationFact> {
    let facts = started.facts.iter().take(FACTS_MAX);
    facts.map(|fact| IsolationFact { name: storable(&fact.name), value: storable(&fact.value) }).collect()
}

/// Returns reason and message of a session after an event: what was given, else what the event means by itself.
fn explain(session: &SessionRecord, params: &TransitionParams) -> (Option<Reason>, String) {
    let by_event = match params.event {
        SessionEvent::Place | SessionEvent::Started | SessionEvent::HostFound => None,
        SessionEvent::Enqueue => Some(Reason::NoCapacity),
        SessionEvent::StartFailed => Some(Reason::StartFailed),
        SessionEvent::Pause | SessionEvent::Resume | SessionEvent::Delete => Some(Reason::Requested),
        SessionEvent::SandboxGone => Some(Reason::SandboxGone),
        SessionEvent::HostLost => Some(Reason::HostUnreachable),
        SessionEvent::DeadlinePassed => Some(Reason::DeadlineExceeded),
        // The end of what was begun keeps the reason of its beginning.
        SessionEvent::PauseDone | SessionEvent::Removed => session.reason,
    };
    (params.reason.or(by_event), storable(&params.message))
}
