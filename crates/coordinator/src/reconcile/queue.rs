//! The reconcilers: due operations, the queue, deadlines and expiry, lost hosts, old rows.

use std::time::Duration;

use cloister_api::host::{RemoveSandbox, StopSandbox};
use cloister_service::{OnCancel, OnError, TaskKind, TaskRegistry};
use cloister_types::SessionState;
use tokio::time::Instant;

use super::op::{OpExecutor, STOP_GRACE};
use super::{Reconciler, Status, kind};
use crate::db::{Change, DeadlinePassed, LeaseHolder, Store, StoreError};
use crate::link::HostLinks;

/// Most sessions that one run of the queue or the deadlines looks at.
const MAX_SESSIONS_PER_ACTIVATION: u32 = 32;
/// Pause before another look at work that is due and that somebody else has in hand.
const CONTENDED_PAUSE: Duration = Duration::from_millis(100);
/// How long finished things are kept.
const KEPT: Duration = Duration::from_secs(7 * 24 * 3600);
/// Most rows that one run removes.
const MAX_ROWS_PER_ACTIVATION: u32 = 1000;
const PRUNE_INTERVAL: Duration = Duration::from_secs(3600);
const CLEAN_UP_DEADLINE: Duration = Duration::from_secs(30);
const CLEAN_UP: TaskKind = TaskKind::new("clean up after deadline", OnCancel::Abort, OnError::Log);

/// Claims operations that are due: new ones, those to be tried again, those whose executor died.
pub(crate) struct Ops {
    pub(crate) store: Store,
    pub(crate) holder: LeaseHolder,
    pub(crate) executor: OpExecutor,
}

impl Reconciler for Ops {
    const KIND: TaskKind = kind("reconcile ops");
    const SETTLE: Duration = Duration::from_millis(10);

    async fn run_once(&self) -> Result<Status, StoreError> {
        // One look tells whether there is anything to claim; mostly whoever wrote an operation executes it.
        match self.store.next_op_due_in().await? {
            Some(due) if due.is_zero() => {}
            later => return Ok(Status::Idle(later)),
        }
        // Only what can be executed at once is claimed: a claim that waits would run out its lease.
        let room = self.executor.room();
        if room == 0 {
            self.executor.wait_for_room().await;
            return Ok(Status::More);
        }
        let ops = self.store.claim_due_ops(&self.holder, room).await?;
        // Nothing claimed although something is due: another coordinator has it, or its session is being changed.
        let contended = ops.is_empty();
        for op in ops {
            drop(self.executor.spawn(op));
        }
        Ok(if contended { Status::Idle(Some(CONTENDED_PAUSE)) } else { Status::More })
    }

    fn wakes_on(&self, change: &Change) -> bool {
        matches!(change, Change::Session(_) | Change::Rescan)
    }
}

/// Places queued sessions, first in first out.
pub(crate) struct Queue {
    pub(crate) store: Store,
    pub(crate) holder: LeaseHolder,
    pub(crate) executor: OpExecutor,
}

impl Reconciler for Queue {
    const KIND: TaskKind = kind("reconcile queue");
    const SETTLE: Duration = Duration::from_millis(10);

    async fn run_once(&self) -> Result<Status, StoreError> {
        let admitted = self.store.admit_queued(&self.holder, MAX_SESSIONS_PER_ACTIVATION).await?;
        for op in admitted.ops {
            tracing::info!(session_id = %op.session.id, "session placed from the queue");
            drop(self.executor.spawn(op));
        }
        Ok(if admitted.more { Status::More } else { Status::Idle(None) })
    }

    fn wakes_on(&self, _change: &Change) -> bool {
        true
    }
}

/// Gives up steps that last too long, and deletes sessions whose time is over.
pub(crate) struct Deadlines {
    pub(crate) store: Store,
    pub(crate) links: HostLinks,
    pub(crate) tasks: TaskRegistry,
}

impl Reconciler for Deadlines {
    const KIND: TaskKind = kind("reconcile deadlines");
    const SETTLE: Duration = Duration::from_millis(200);

    async fn run_once(&self) -> Result<Status, StoreError> {
        match self.store.next_deadline_in().await? {
            Some(due) if due.is_zero() => {}
            later => return Ok(Status::Idle(later)),
        }
        let passed = self.store.pass_deadlines(MAX_SESSIONS_PER_ACTIVATION).await?;
        let expired = self.store.expire_ttl(MAX_SESSIONS_PER_ACTIVATION).await?;
        let contended = passed.is_empty() && expired.is_empty();
        for deadline in passed {
            tracing::warn!(session_id = %deadline.session.id, from = %deadline.from, to = %deadline.session.state, "a step was given up");
            self.clean_up(deadline);
        }
        for session_id in expired {
            tracing::info!(session_id = %session_id, "session expired");
        }
        Ok(if contended { Status::Idle(Some(CONTENDED_PAUSE)) } else { Status::More })
    }

    fn wakes_on(&self, change: &Change) -> bool {
        matches!(change, Change::Session(_) | Change::Rescan)
    }
}

impl Deadlines {
    /// Tells the host what it no longer needs to do. When it is not there it learns it when it registers.
    fn clean_up(&self, deadline: DeadlinePassed) {
        let links = self.links.clone();
        let session = deadline.session;
        let Some(host_id) = session.host_id.clone() else { return };
        self.tasks.spawn(CLEAN_UP, async move {
            match (deadline.from, session.sandbox_id) {
                (SessionState::Starting, _) => {
                    let remove = RemoveSandbox::default();
                    links.take_back(&host_id, &session.id, session.epoch, remove, CLEAN_UP_DEADLINE).await;
                }
                (SessionState::Resuming, Some(sandbox_id)) => {
                    let stop = StopSandbox {
                        sandbox_id: sandbox_id.to_string(),
                        grace_ms: STOP_GRACE,
                        ..Default::default()
                    };
                    links.take_back(&host_id, &session.id, session.epoch, stop, CLEAN_UP_DEADLINE).await;
                }
                // Started over, or nothing that a host has.
                _ => {}
            }
            Ok::<(), std::convert::Infallible>(())
        });
    }
}

/// Declares hosts lost that miss three heartbeats.
pub(crate) struct LostHosts {
    pub(crate) store: Store,
    pub(crate) heartbeat: Duration,
    /// A coordinator that just started has heard nobody yet.
    pub(crate) started: Instant,
}

impl Reconciler for LostHosts {
    const KIND: TaskKind = kind("reconcile hosts");
    const SETTLE: Duration = Duration::ZERO;

    async fn run_once(&self) -> Result<Status, StoreError> {
        let patience = (self.heartbeat * 3).saturating_sub(self.started.elapsed());
        if !patience.is_zero() {
            return Ok(Status::Idle(Some(patience)));
        }
        for lost in self.store.mark_lost_hosts(self.heartbeat).await? {
            tracing::warn!(host_id = %lost.host_id, sessions = lost.sessions.len(), "host lost");
        }
        Ok(Status::Idle(Some(self.heartbeat)))
    }

    fn wakes_on(&self, _change: &Change) -> bool {
        false
    }
}

/// Removes what nobody asks for any more.
pub(crate) struct Pruning {
    pub(crate) store: Store,
}

impl Reconciler for Pruning {
    const KIND: TaskKind = kind("prune");
    const SETTLE: Duration = Duration::ZERO;

    async fn run_once(&self) -> Result<Status, StoreError> {
        let removed = self.store.prune(KEPT, MAX_ROWS_PER_ACTIVATION).await?;
        let full = removed >= u64::from(MAX_ROWS_PER_ACTIVATION);
        Ok(if full { Status::More } else { Status::Idle(Some(PRUNE_INTERVAL)) })
    }

    fn wakes_on(&self, _change: &Change) -> bool {
        false
    }
}
