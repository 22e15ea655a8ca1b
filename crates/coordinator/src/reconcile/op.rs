//! Executing operations: one command to the session's host, and the commit of what came of it.
//!
//! ```text
//!  claimed ──► command(epoch) ──► done ─────────────► commit the event ──► done
//!                 │    ▲            refused for good ► commit the failure ─► done
//!                 │    └─ again ◄── trouble ─────────► retry later, the claim is given back
//!                 └─ meanwhile the lease is renewed; lost ► stop, somebody else has it
//! ```
//!
//! Every command can be sent again (hosts are idempotent by sandbox id) and carries the epoch of the claim, so that a
//! crash anywhere is answered by claiming again: the host refuses the older epoch, the store the older result.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cloister_api::convert::{facts_from_proto, isolation_from_proto, limits_to_proto};
use cloister_api::host::command_result::Result as ResultKind;
use cloister_api::host::{CreateSandbox, HostErrorKind, RemoveSandbox, SandboxCreated, StopSandbox};
use cloister_service::{OnCancel, OnError, TaskKind, TaskRegistry};
use cloister_types::session::{Reason, SessionEvent, SessionState};
use cloister_types::{HostId, Isolation};
use tokio::sync::{Semaphore, oneshot};

use crate::db::{
    ClaimedOp, LeaseHolder, OpKind, SessionRecord, StartedFacts, Store, StoreError, TransitionParams,
};
use crate::link::{HostLinks, LinkError};
use crate::metrics;

/// Time between SIGTERM and SIGKILL for the work of a sandbox that is stopped, in milliseconds.
pub(super) const STOP_GRACE: u64 = 2000;
/// Operations that one coordinator executes at one time.
const OPS_AT_ONCE: usize = 128;
/// How long a host may take to make a sandbox; the store's deadline of the step is longer.
const CREATE_DEADLINE: Duration = Duration::from_secs(45);
const STOP_DEADLINE: Duration = Duration::from_secs(30);
const REMOVE_DEADLINE: Duration = Duration::from_secs(45);
/// The lease is renewed this often: a third of its duration of 15 s.
const RENEWAL: Duration = Duration::from_secs(5);
/// Attempts at a start that the host itself fails at, before the session fails.
const START_ATTEMPTS: u32 = 3;
const RETRY_FIRST: Duration = Duration::from_millis(200);
const RETRY_MAX: Duration = Duration::from_secs(10);
/// Attempts to commit an outcome while the store is away; afterwards the lease runs out and somebody claims again.
const COMMIT_ATTEMPTS: u32 = 5;

const EXECUTE: TaskKind = TaskKind::new("op", OnCancel::Wait, OnError::Log);

/// Executes operations. Cheap to clone.
#[derive(Clone)]
pub(crate) struct OpExecutor {
    store: Store,
    links: HostLinks,
    holder: LeaseHolder,
    tasks: TaskRegistry,
    slots: Arc<Semaphore>,
}

/// What came of an attempt.
enum Outcome {
    /// The session moved on.
    Committed(Box<SessionRecord>),
    /// To be tried again.
    Retry(String),
    /// Somebody else has it, or it is no longer wanted.
    Gone,
}

impl OpExecutor {
    pub(crate) fn new(store: Store, links: HostLinks, holder: LeaseHolder, tasks: TaskRegistry) -> Self {
        Self { store, links, holder, tasks, slots: Arc::new(Semaphore::new(OPS_AT_ONCE)) }
    }

    /// Returns how many more operations can be executed now.
    pub(crate) fn room(&self) -> u32 {
        u32::try_from(self.slots.available_permits()).unwrap_or(u32::MAX)
    }

    /// Waits until an operation has ended.
    pub(crate) async fn wait_for_room(&self) {
        // The semaphore is never closed; were it, there would be nothing to wait for.
        drop(self.slots.acquire().await);
    }

    /// Executes an operation that the caller claimed. The receiver gets the session when it moved on, and is dropped
    /// when it did not.
    pub(crate) fn spawn(&self, op: ClaimedOp) -> oneshot::Receiver<SessionRecord> {
        let (sender, receiver) = oneshot::channel();
        let executor = self.clone();
        self.tasks.spawn(EXECUTE, async move {
            // One that a caller committed runs at once even when all slots are taken: the claim is already its.
            let _slot = executor.slots.try_acquire().ok();
            if let Some(session) = executor.execute(op).await {
                // Whoever asked may have gone.
                let _ = sender.send(session);
            }
            Ok::<(), std::convert::Infallible>(())
        });
        receiver
    }

    /// Makes one attempt at an operation.
    async fn execute(&self, op: ClaimedOp) -> Option<SessionRecord> {
        let started = Instant::now();
        let stopping = self.tasks.token();
        let outcome = tokio::select! {
            outcome = self.attempt(&op) => outcome,
            () = self.lease_lost(&op) => Outcome::Gone,
            // The claim is given back, so that another coordinator need not wait for the lease to run out.
            () = stopping.cancelled() => Outcome::Retry("the coordinator is stopping".to_owned()),
        };
        let word = match &outcome {
            Outcome::Committed(_) => "done",
            Outcome::Retry(_) => "retry",
            Outcome::Gone => "gone",
        };
        metrics::op(kind_word(op.kind), word, started.elapsed());
        match outcome {
            Outcome::Committed(session) => {
                tracing::info!(
                    session_id = %session.id,
                    op = kind_word(op.kind),
                    state = %session.state,
                    lease_epoch = op.epoch,
                    attempt = op.attempts,
                    elapsed_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX),
                    "session moved on"
                );
                Some(*session)
            }
            Outcome::Retry(error) => {
                self.retry(&op, &error, stopping.is_cancelled()).await;
                None
            }
            Outcome::Gone => {
                tracing::debug!(session_id = %op.session.id, op = kind_word(op.kind), lease_epoch = op.epoch, "operation is somebody else's");
                None
            }
        }
    }

    /// Renews the lease until it is lost.
    async fn lease_lost(&self, op: &ClaimedOp) {
        loop {
            tokio::time::sleep(RENEWAL).await;
            match self.store.renew_op_lease(&self.holder, op).await {
                Ok(_) => {}
                Err(error) if error.is_retryable() => {
                    tracing::warn!(session_id = %op.session.id, error = %cloister_service::error_chain(&error), "lease was not renewed");
                }
                Err(_) => return,
            }
        }
    }

    async fn retry(&self, op: &ClaimedOp, error: &str, at_once: bool) {
        let delay = if at_once { Duration::ZERO } else { backoff(op.attempts) };
        tracing::debug!(session_id = %op.session.id, op = kind_word(op.kind), attempt = op.attempts, error, "operation is tried again later");
        // A deletion that waits for its host says so in the log that people watch, once for each new reason.
        if op.kind == OpKind::Delete && op.last_error != error && !at_once {
            let message = format!("the deletion waits: {error}");
            if let Err(error) =
                self.store.append_session_event(&op.session.id, "session.delete_waiting", &message).await
            {
                tracing::debug!(session_id = %op.session.id, error = %error, "note was not written");
            }
        }
        match self.store.retry_op_later(&self.holder, op, delay, error).await {
            Ok(()) | Err(StoreError::Conflict { .. }) => {}
            // The lease runs out by itself.
            Err(error) => {
                tracing::warn!(session_id = %op.session.id, error = %cloister_service::error_chain(&error), "claim was not given back");
            }
        }
    }

    async fn attempt(&self, op: &ClaimedOp) -> Outcome {
        match op.kind {
            OpKind::Start => self.start(op).await,
            OpKind::Pause => self.pause(op).await,
            OpKind::Delete => self.delete(op).await,
        }
    }

    async fn start(&self, op: &ClaimedOp) -> Outcome {
        let session = &op.session;
        let (Some(host_id), Some(sandbox_id), Some(backend)) =
            (&session.host_id, &session.sandbox_id, session.backend)
        else {
            return self.start_failed(op, "the session was placed without a host, sandbox or backend").await;
        };
        let create = CreateSandbox {
            sandbox_id: sandbox_id.to_string(),
            image: session.image.clone(),
            backend: backend.as_str().to_owned(),
            limits: limits_to_proto(&session.limits).into(),
            hostname: session.name.clone().unwrap_or_else(|| session.id.to_string().replace('_', "-")),
            resumes: session.state == SessionState::Resuming,
            ..Default::default()
        };
        match self.links.command(host_id, &session.id, op.epoch, create, CREATE_DEADLINE).await {
            Ok(ResultKind::Created(created)) => match started_facts(&created, session.isolation_floor) {
                Ok(facts) => {
                    let params =
                        TransitionParams { started: Some(facts), ..result_of(op, SessionEvent::Started) };
                    self.commit(op, params).await
                }
                Err(message) => {
                    let outcome = self.start_failed(op, &message).await;
                    self.remove_leftovers(op, host_id, &outcome).await;
                    outcome
                }
            },
            Ok(_) => Outcome::Retry(LinkError::Malformed(host_id.clone()).to_string()),
            Err(error) if error.refusal() == Some(HostErrorKind::Fenced) => Outcome::Gone,
            Err(error) if error.refusal() == Some(HostErrorKind::LayerMissing) => {
                self.start_failed_by(op, Reason::LayerMissing, &error.to_string()).await
            }
            // What only the host can say no to is final; a host that fails gets a few attempts; a host that is away
            // has until the step's deadline, which the store keeps.
            Err(error)
                if error.is_retryable() && (error.refusal().is_none() || op.attempts < START_ATTEMPTS) =>
            {
                Outcome::Retry(error.to_string())
            }
            Err(error) => {
                let outcome = self.start_failed(op, &error.to_string()).await;
                self.remove_leftovers(op, host_id, &outcome).await;
                outcome
            }
        }
    }

    async fn start_failed(&self, op: &ClaimedOp, message: &str) -> Outcome {
        self.start_failed_by(op, Reason::StartFailed, message).await
    }

    async fn start_failed_by(&self, op: &ClaimedOp, reason: Reason, message: &str) -> Outcome {
        tracing::warn!(session_id = %op.session.id, error = message, "start failed");
        let params = TransitionParams {
            reason: Some(reason),
            message: message.to_owned(),
            ..result_of(op, SessionEvent::StartFailed)
        };
        self.commit(op, params).await
    }

    /// A session that failed keeps nothing on its host. One that could not be resumed keeps its layer.
    async fn remove_leftovers(&self, op: &ClaimedOp, host_id: &HostId, outcome: &Outcome) {
        let Outcome::Committed(session) = outcome else { return };
        if session.state != SessionState::Failed {
            return;
        }
        let remove = RemoveSandbox::default();
        self.links.take_back(host_id, &session.id, op.epoch, remove, REMOVE_DEADLINE).await;
    }

    async fn pause(&self, op: &ClaimedOp) -> Outcome {
        let (Some(host_id), Some(sandbox_id)) = (&op.session.host_id, &op.session.sandbox_id) else {
            return self.commit(op, result_of(op, SessionEvent::PauseDone)).await;
        };
        let stop =
            StopSandbox { sandbox_id: sandbox_id.to_string(), grace_ms: STOP_GRACE, ..Default::default() };
        match self.links.command(host_id, &op.session.id, op.epoch, stop, STOP_DEADLINE).await {
            Ok(answer) => {
                let mut params = result_of(op, SessionEvent::PauseDone);
                // A stop that went as asked says nothing new; lost files do.
                if let ResultKind::Stopped(stopped) = answer
                    && stopped.reason == Reason::DiskError.as_str()
                {
                    params.reason = Some(Reason::DiskError);
                    params.message = stopped.message.chars().take(1024).collect();
                }
                self.commit(op, params).await
            }
            Err(error) => match error.refusal() {
                // Nothing is left to stop.
                Some(HostErrorKind::NotFound | HostErrorKind::NotRunning) => {
                    self.commit(op, result_of(op, SessionEvent::PauseDone)).await
                }
                Some(HostErrorKind::Fenced) => Outcome::Gone,
                _ => Outcome::Retry(error.to_string()),
            },
        }
    }

    async fn delete(&self, op: &ClaimedOp) -> Outcome {
        let Some(host_id) = &op.session.host_id else {
            return self.commit(op, result_of(op, SessionEvent::Removed)).await;
        };
        let remove = RemoveSandbox::default();
        match self.links.command(host_id, &op.session.id, op.epoch, remove, REMOVE_DEADLINE).await {
            Ok(_) => self.commit(op, result_of(op, SessionEvent::Removed)).await,
            Err(error) => match error.refusal() {
                Some(HostErrorKind::NotFound) => self.commit(op, result_of(op, SessionEvent::Removed)).await,
                Some(HostErrorKind::Fenced) => Outcome::Gone,
                _ => Outcome::Retry(error.to_string()),
            },
        }
    }

    async fn commit(&self, op: &ClaimedOp, params: TransitionParams) -> Outcome {
        let mut attempts = 0;
        loop {
            attempts += 1;
            match self.store.commit_transition(&params).await {
                Ok(session) => return Outcome::Committed(Box::new(session)),
                Err(error) if error.is_retryable() && attempts < COMMIT_ATTEMPTS => {
                    tokio::time::sleep(backoff(attempts)).await;
                }
                Err(error) if error.is_retryable() => return Outcome::Retry(error.to_string()),
                Err(StoreError::Conflict { .. } | StoreError::Illegal(_) | StoreError::NotFound { .. }) => {
                    return Outcome::Gone;
                }
                Err(error) => {
                    tracing::error!(session_id = %op.session.id, error = %cloister_service::error_chain(&error), "outcome was not stored");
                    return Outcome::Retry(error.to_string());
                }
            }
        }
    }
}

fn result_of(op: &ClaimedOp, event: SessionEvent) -> TransitionParams {
    TransitionParams {
        epoch: Some(op.epoch),
        op_id: Some(op.id.clone()),
        ..TransitionParams::new(op.session.id.clone(), event)
    }
}

/// Reads what the sandbox told, and refuses one that is weaker than what was asked for.
fn started_facts(created: &SandboxCreated, floor: Isolation) -> Result<StartedFacts, String> {
    let isolation = isolation_from_proto("created.isolation", created.isolation)
        .map_err(|error| error.to_string())?
        .unwrap_or(Isolation::None);
    if !isolation.satisfies(floor) {
        return Err(format!("the host made a sandbox with isolation `{isolation}`, weaker than `{floor}`"));
    }
    let facts = facts_from_proto(&created.facts);
    let network = facts.iter().any(|fact| fact.name == "network" && fact.value != "none");
    Ok(StartedFacts { isolation, facts, network })
}

fn kind_word(kind: OpKind) -> &'static str {
    match kind {
        OpKind::Start => "start",
        OpKind::Pause => "pause",
        OpKind::Delete => "delete",
    }
}

/// Doubles with each attempt up to a bound, less up to a quarter by chance, so that what failed together does not come
/// back together.
fn backoff(attempts: u32) -> Duration {
    let doubled = RETRY_FIRST.saturating_mul(2u32.saturating_pow(attempts.saturating_sub(1).min(16)));
    let full = doubled.min(RETRY_MAX);
    let chance = u32::from(rand::random::<u8>());
    full - full * chance / 1024
}

#[cfg(test)]
mod tests {
    use cloister_api::common;

    use super::*;

    #[test]
    fn a_weaker_sandbox_than_asked_for_is_refused() {
        let created = |isolation: common::Isolation| SandboxCreated {
            isolation: isolation.into(),
            ..Default::default()
        };
        assert!(started_facts(&created(common::Isolation::Container), Isolation::Container).is_ok());
        assert!(started_facts(&created(common::Isolation::None), Isolation::Container).is_err());
        assert!(started_facts(&SandboxCreated::default(), Isolation::Container).is_err());
    }

    #[test]
    fn retries_back_off_within_bounds() {
        for attempts in 0..100 {
            let delay = backoff(attempts);
            assert!(delay <= RETRY_MAX && delay >= RETRY_FIRST / 2, "{attempts}: {delay:?}");
        }
    }
}
