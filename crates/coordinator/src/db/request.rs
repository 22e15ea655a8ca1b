//! What people ask of a session that exists: pause, resume, delete.
//!
//! Each takes a reference (id, unique prefix, name), so that a repeated request id finds its first answer even when
//! the name no longer leads anywhere.

use cloister_types::SandboxId;
use cloister_types::session::{Reason, SessionEvent, SessionState, transition};
use sqlx::PgConnection;

use super::admission::{Decision, Demand, HostView, decide};
use super::audit::insert_audit;
use super::create::{locked_views, waiting_demands};
use super::event;
use super::fault::commit;
use super::idempotency::{claim_key, first_answer};
use super::op::claim;
use super::session::{lock, read, resolve};
use super::store::Failure;
use super::transition::{Placement, apply, apply_placed};
use super::{
    AuditContext, ClaimedOp, LeaseHolder, PayloadHash, SessionRecord, Store, StoreError, TransitionParams,
};

/// The answer to a request.
#[derive(Debug, Clone)]
pub struct Requested {
    /// The session after it; when repeated, as it is now.
    pub session: SessionRecord,
    /// The operation that does it, already claimed by the caller; `None` when there is nothing (more) to do.
    pub op: Option<ClaimedOp>,
    /// The request id was seen before, or the session was already on its way there.
    pub repeated: bool,
}

/// The answer to [`Store::request_resume`].
#[derive(Debug, Clone)]
#[expect(clippy::large_enum_variant, reason = "made once a request and taken apart at once")]
pub enum Resumed {
    /// It is on its way (or was already).
    Accepted(Requested),
    /// Its host has no room or is not connected: it stays paused, and its reason and message say so. The request id
    /// is not used up.
    Refused(SessionRecord),
}

impl Store {
    /// Asks for a pause. A session that is pausing or paused is answered as it is.
    ///
    /// # Errors
    ///
    /// [`StoreError::NotFound`], [`StoreError::Ambiguous`], [`StoreError::IdempotencyMismatch`],
    /// [`StoreError::Illegal`] in every other state but `active`, [`StoreError::Unavailable`].
    pub async fn request_pause(
        &self,
        context: &AuditContext,
        payload: &PayloadHash,
        holder: &LeaseHolder,
        reference: &str,
    ) -> Result<Requested, StoreError> {
        let request = Request { context, payload, holder, reference, event: SessionEvent::Pause };
        self.observe("request_pause", self.request(&request, &[SessionState::Pausing, SessionState::Paused]))
            .await
    }

    /// Asks to go on, on the host that has the layer, with a new sandbox id. A session that is resuming or active is
    /// answered as it is.
    ///
    /// # Errors
    ///
    /// As [`Store::request_pause`], with [`StoreError::Illegal`] in every other state but `paused`.
    pub async fn request_resume(
        &self,
        context: &AuditContext,
        payload: &PayloadHash,
        holder: &LeaseHolder,
        reference: &str,
    ) -> Result<Resumed, StoreError> {
        let request = Request { context, payload, holder, reference, event: SessionEvent::Resume };
        self.observe("request_resume", self.resume(&request)).await
    }

    /// Accepts a deletion in every state: supersedes a running operation, bumps the epoch, gives the capacity back.
    /// A session that is deleting or deleted is answered as it is.
    ///
    /// # Errors
    ///
    /// [`StoreError::NotFound`], [`StoreError::Ambiguous`], [`StoreError::IdempotencyMismatch`],
    /// [`StoreError::Unavailable`].
    pub async fn request_delete(
        &self,
        context: &AuditContext,
        payload: &PayloadHash,
        holder: &LeaseHolder,
        reference: &str,
    ) -> Result<Requested, StoreError> {
        let request = Request { context, payload, holder, reference, event: SessionEvent::Delete };
        self.observe(
            "request_delete",
            self.request(&request, &[SessionState::Deleting, SessionState::Deleted]),
        )
        .await
    }
}

/// Who asks for what, with what makes the call idempotent.
struct Request<'a> {
    context: &'a AuditContext,
    payload: &'a PayloadHash,
    holder: &'a LeaseHolder,
    reference: &'a str,
    event: SessionEvent,
}

/// What a request met.
enum Met {
    /// The request id was seen before, or there is nothing (more) to do.
    Already(SessionRecord),
    /// The session, locked, with the request id written.
    Session(SessionRecord),
}

impl Store {
    /// Pause and delete: they need nothing but the session.
    async fn request(&self, request: &Request<'_>, already: &[SessionState]) -> Result<Requested, Failure> {
        let mut tx = self.pool.begin().await?;
        let session = match meet(&mut tx, request, already).await? {
            Met::Already(session) => {
                // The request id is worth keeping, whatever it met.
                commit(tx, "request").await?;
                return Ok(Requested { session, op: None, repeated: true });
            }
            Met::Session(session) => session,
        };
        let changed =
            apply(&mut tx, &session, &TransitionParams::new(session.id.clone(), request.event)).await?;
        insert_audit(&mut tx, request.context, session.id.as_str()).await?;
        let op = claim(&mut tx, request.holder, self.config.op_lease, changed.id.as_str(), None).await?;
        commit(tx, "request").await?;
        let session = op.as_ref().map_or(changed, |op| op.session.clone());
        Ok(Requested { session, op, repeated: false })
    }

    async fn resume(&self, request: &Request<'_>) -> Result<Resumed, Failure> {
        let mut tx = self.pool.begin().await?;
        // Hosts before sessions, as everywhere; whether they are needed is not known yet.
        let hosts = locked_views(&mut tx, self.config.admission).await?;
        let waiting = waiting_demands(&mut tx).await?;
        let session = match meet(&mut tx, request, &[SessionState::Resuming, SessionState::Active]).await? {
            Met::Already(session) => {
                commit(tx, "resume").await?;
                return Ok(Resumed::Accepted(Requested { session, op: None, repeated: true }));
            }
            Met::Session(session) => session,
        };
        transition(session.state, SessionEvent::Resume)?;
        // The layer is on one host, and it was made by one backend.
        let demand =
            Demand { backend: session.backend, floor: session.isolation_floor, limits: session.limits };
        let own: Vec<HostView> =
            hosts.into_iter().filter(|host| session.host_id.as_ref() == Some(&host.id)).collect();
        let backend = match decide(&demand, &own, &waiting) {
            Decision::Place { backend, .. } => backend,
            Decision::Queue(refusal) => {
                // The request id must not stick to a refusal: the same call may succeed later.
                tx.rollback().await?;
                let message = format!("cannot resume on its host: {refusal}");
                return Ok(Resumed::Refused(self.note_refusal(&session, refusal.reason(), &message).await?));
            }
        };
        let host_id =
            own.into_iter().next().map(|host| host.id).expect("placed on the only host of the snapshot");
        let placement = Placement { host_id, sandbox_id: SandboxId::generate(), backend };
        let params = TransitionParams::new(session.id.clone(), SessionEvent::Resume);
        let changed = apply_placed(&mut tx, &session, &params, Some(&placement)).await?;
        insert_audit(&mut tx, request.context, session.id.as_str()).await?;
        let op = claim(&mut tx, request.holder, self.config.op_lease, changed.id.as_str(), None).await?;
        commit(tx, "resume").await?;
        let session = op.as_ref().map_or(changed, |op| op.session.clone());
        Ok(Resumed::Accepted(Requested { session, op, repeated: false }))
    }

    /// Keeps why a session stays paused, with an entry in its log. Reads `sessions_pkey`.
    async fn note_refusal(
        &self,
        session: &SessionRecord,
        reason: Reason,
        message: &str,
    ) -> Result<SessionRecord, Failure> {
        let mut tx = self.pool.begin().await?;
        let now = lock(&mut tx, &session.id).await?;
        if now.state != SessionState::Paused {
            return Ok(now);
        }
        sqlx::query!(
            "UPDATE sessions SET reason = $2, message = $3, updated_at = cloister_now() WHERE id = $1",
            session.id.as_str(),
            reason.as_str(),
            message,
        )
        .execute(&mut *tx)
        .await?;
        event::append(&mut tx, &session.id, "session.resume_refused", Some(reason), message).await?;
        let noted = lock(&mut tx, &session.id).await?;
        commit(tx, "resume_refused").await?;
        Ok(noted)
    }
}

/// Finds the session of a request, writes the request id and locks the row. Locks in the order of the module doc.
async fn meet(
    connection: &mut PgConnection,
    request: &Request<'_>,
    already: &[SessionState],
) -> Result<Met, Failure> {
    let id = match first_answer(connection, request.context, request.payload).await? {
        Some(id) => id,
        None => {
            let session = resolve(connection, &request.context.organization_id, request.reference).await?;
            if claim_key(connection, request.context, request.payload, session.id.as_str()).await? {
                let session = lock(connection, &session.id).await?;
                return Ok(if already.contains(&session.state) {
                    Met::Already(session)
                } else {
                    Met::Session(session)
                });
            }
            // Another call with this request id ended while this one waited for it.
            let id = first_answer(connection, request.context, request.payload).await?;
            id.ok_or_else(|| StoreError::Conflict {
                kind: "request",
                id: request.context.request_id.clone(),
            })?
        }
    };
    let session = read(connection, &id).await?;
    Ok(Met::Already(session.ok_or_else(|| StoreError::not_found("session", &id))?))
}
