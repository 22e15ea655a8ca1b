//! The simulated machine: sessions, sandboxes, a clock that only moves when told to, and switches for faults.
//!
//! A [`SimMachine`] outlives the [`SimBackend`](super::SimBackend)s that use it, as a real machine outlives the host
//! agent: a second backend on the same machine adopts what the first one left. All state is behind one lock that is
//! never held across an await; a counter that is bumped on each change wakes whoever waits for one.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use cloister_types::session::Reason;
use cloister_types::{Clock, ExecId, ExitReason, Limits, SandboxId, SessionId};
use tokio::sync::watch;

use super::exec::{SimExec, World};
use crate::backend::{Gone, SandboxError, SandboxSpec};

/// Virtual time zero: 2026-01-01T00:00:00Z.
const EPOCH_UNIX_MS: u64 = 1_767_225_600_000;
/// Kept output of an exec, unless told otherwise.
const SPOOL_MAX_BYTES: u64 = 16 * 1024 * 1024;

/// What is made to go wrong.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SimFaults {
    /// Creating a sandbox fails at this step.
    pub fail_create_at: Option<String>,
    /// Creating a sandbox finds this resource used up.
    pub exhausted: Option<String>,
    /// Creating a sandbox takes this much virtual time.
    pub slow_create: Duration,
    /// Stopping a sandbox fails.
    pub fail_stop: bool,
    /// Removing a session fails.
    pub fail_remove: bool,
    /// Every stream of output is cut after this many frames.
    pub cut_output_after_frames: Option<u64>,
    /// The probe reports that the backend does not work.
    pub fail_probe: bool,
}

pub(super) struct Running {
    pub(super) spec: SandboxSpec,
}

#[derive(Default)]
pub(super) struct SimSession {
    pub(super) limits: Option<Limits>,
    pub(super) files: BTreeMap<String, Vec<u8>>,
    pub(super) filled: BTreeMap<String, u64>,
    pub(super) running: Option<Running>,
    pub(super) execs: Vec<SimExec>,
}

impl SimSession {
    pub(super) fn exec(&mut self, id: &ExecId) -> Option<&mut SimExec> {
        self.execs.iter_mut().find(|exec| exec.record.exec_id == *id)
    }

    /// Runs `act` on one exec, with what its program can see.
    pub(super) fn with_exec<T>(
        &mut self,
        index: usize,
        now: Duration,
        spool_max_bytes: u64,
        act: impl FnOnce(&mut SimExec, &mut World<'_>) -> T,
    ) -> Option<T> {
        let limits = self.limits.unwrap_or(Limits::DEFAULT);
        let mut world = World {
            now,
            limits: &limits,
            files: &mut self.files,
            filled: &mut self.filled,
            spool_max_bytes,
            epoch_unix_ms: EPOCH_UNIX_MS,
        };
        self.execs.get_mut(index).map(|exec| act(exec, &mut world))
    }
}

pub(super) struct State {
    now: Duration,
    pub(super) sessions: BTreeMap<SessionId, SimSession>,
    pub(super) gone: BTreeMap<SandboxId, Gone>,
    /// Ended while nobody may have looked: what the next adoption reports.
    pub(super) unreported: Vec<SandboxId>,
    pub(super) faults: SimFaults,
    pub(super) spool_max_bytes: u64,
    pub(super) next_reader: u64,
}

struct Shared {
    state: Mutex<State>,
    changes: watch::Sender<u64>,
    /// Set when virtual time follows the machine's.
    real_time_from: Option<Instant>,
}

/// A simulated machine; clones are the same one.
#[derive(Clone)]
pub struct SimMachine(Arc<Shared>);

impl Default for SimMachine {
    fn default() -> Self {
        Self::new()
    }
}

impl SimMachine {
    /// Returns a machine whose clock stands still until [`advance`](Self::advance) moves it.
    pub fn new() -> Self {
        Self::with_time(None)
    }

    /// Returns a machine whose clock runs with the real one, for people who try the simulation by hand.
    pub fn in_real_time() -> Self {
        Self::with_time(Some(Instant::now()))
    }

    fn with_time(real_time_from: Option<Instant>) -> Self {
        let state = State {
            now: Duration::ZERO,
            sessions: BTreeMap::new(),
            gone: BTreeMap::new(),
            unreported: Vec::new(),
            faults: SimFaults::default(),
            spool_max_bytes: SPOOL_MAX_BYTES,
            next_reader: 0,
        };
        Self(Arc::new(Shared { state: Mutex::new(state), changes: watch::Sender::new(0), real_time_from }))
    }

    /// Sets how many bytes of output are kept for each exec.
    pub fn set_spool_max_bytes(&self, bytes: u64) {
        self.lock().spool_max_bytes = bytes;
    }

    /// Moves the clock; everything that was due happens, in order.
    pub fn advance(&self, time: Duration) {
        let mut state = self.lock();
        let target = state.now + time;
        state.run_until(target);
        drop(state);
        self.changed();
    }

    /// Changes what goes wrong from now on.
    pub fn set_faults(&self, change: impl FnOnce(&mut SimFaults)) {
        change(&mut self.lock().faults);
        self.changed();
    }

    /// Ends a session's sandbox as a crash would. Returns whether there was one.
    pub fn lose_sandbox(&self, session_id: &SessionId, reason: Reason, message: &str) -> bool {
        let lost = self.lock().end_sandbox(session_id, reason, message);
        self.changed();
        lost
    }

    /// Ends every sandbox as a restart of the machine would.
    pub fn reboot(&self) {
        let mut state = self.lock();
        let sessions: Vec<SessionId> = state.sessions.keys().cloned().collect();
        for session in sessions {
            state.end_sandbox(&session, Reason::HostRebooted, "the machine was started again");
        }
        drop(state);
        self.changed();
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        let mut state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(start) = self.0.real_time_from {
            let now = start.elapsed();
            state.run_until(now);
        }
        state
    }

    pub(super) fn changed(&self) {
        self.0.changes.send_modify(|count| *count += 1);
    }

    /// Returns a view of the changes; take it before looking at the state, so that none is missed.
    pub(super) fn watch(&self) -> watch::Receiver<u64> {
        self.0.changes.subscribe()
    }

    /// Waits for a change after `seen`, or for the next thing that time alone brings.
    pub(super) async fn wait(&self, seen: &mut watch::Receiver<u64>, until: Option<Duration>) {
        let next = {
            let state = self.lock();
            let timer = state.next_timer().map(|(at, ..)| at);
            [timer, until].into_iter().flatten().min().map(|at| at.saturating_sub(state.now))
        };
        match next {
            Some(pause) if self.0.real_time_from.is_some() => {
                tokio::select! {
                    _ = seen.changed() => {}
                    () = tokio::time::sleep(pause) => self.changed(),
                }
            }
            // The sender lives in `self`, so that this cannot fail.
            _ => drop(seen.changed().await),
        }
    }
}

impl Clock for SimMachine {
    fn now(&self) -> DateTime<Utc> {
        let millis = EPOCH_UNIX_MS + u64::try_from(self.lock().now.as_millis()).unwrap_or(u64::MAX);
        i64::try_from(millis).ok().and_then(DateTime::from_timestamp_millis).unwrap_or_default()
    }
}

impl State {
    pub(super) fn now(&self) -> Duration {
        self.now
    }

    pub(super) fn unix_ms(&self) -> u64 {
        EPOCH_UNIX_MS + u64::try_from(self.now.as_millis()).unwrap_or(u64::MAX)
    }

    fn next_timer(&self) -> Option<(Duration, super::exec::Timer, SessionId, usize)> {
        self.sessions
            .iter()
            .flat_map(|(id, session)| {
                session.execs.iter().enumerate().map(move |(index, exec)| (id, index, exec))
            })
            .filter_map(|(id, index, exec)| {
                exec.next_timer().map(|(at, timer)| (at, timer, id.clone(), index))
            })
            .min_by_key(|(at, ..)| *at)
    }

    fn run_until(&mut self, target: Duration) {
        while let Some((at, timer, session_id, index)) = self.next_timer() {
            if at > target {
                break;
            }
            self.now = self.now.max(at);
            let (now, bound) = (self.now, self.spool_max_bytes);
            if let Some(session) = self.sessions.get_mut(&session_id) {
                session.with_exec(index, now, bound, |exec, world| exec.fire(timer, world));
            }
        }
        self.now = self.now.max(target);
    }

    /// Ends a session's sandbox with everything in it.
    pub(super) fn end_sandbox(&mut self, session_id: &SessionId, reason: Reason, message: &str) -> bool {
        let (now, bound) = (self.now, self.spool_max_bytes);
        let Some(session) = self.sessions.get_mut(session_id) else { return false };
        let Some(running) = session.running.take() else { return false };
        for index in 0..session.execs.len() {
            session.with_exec(index, now, bound, |exec, world| {
                exec.end(ExitReason::SandboxGone, 137, None, "the sandbox ended first".to_owned(), world);
            });
        }
        let sandbox_id = running.spec.sandbox_id;
        let gone = Gone {
            session_id: session_id.clone(),
            sandbox_id: sandbox_id.clone(),
            reason,
            message: message.to_owned(),
        };
        self.gone.insert(sandbox_id.clone(), gone);
        self.unreported.push(sandbox_id);
        true
    }

    /// Returns the session of a running sandbox.
    pub(super) fn running(&mut self, spec: &SandboxSpec) -> Result<&mut SimSession, SandboxError> {
        self.sessions
            .get_mut(&spec.session_id)
            .filter(|session| {
                session.running.as_ref().is_some_and(|running| running.spec.sandbox_id == spec.sandbox_id)
            })
            .ok_or_else(|| SandboxError::NotRunning(spec.sandbox_id.clone()))
    }

    /// Runs `act` on one exec of a running sandbox and lets its program go on.
    pub(super) fn on_exec<T>(
        &mut self,
        spec: &SandboxSpec,
        exec_id: &ExecId,
        act: impl FnOnce(&mut SimExec, &mut World<'_>) -> T,
    ) -> Result<T, SandboxError> {
        let (now, bound) = (self.now, self.spool_max_bytes);
        let session = self.running(spec)?;
        let index = session.execs.iter().position(|exec| exec.record.exec_id == *exec_id);
        index
            .and_then(|index| {
                session.with_exec(index, now, bound, |exec, world| {
                    let result = act(exec, world);
                    exec.pump(world);
                    result
                })
            })
            .ok_or_else(|| SandboxError::NotFound(format!("exec `{exec_id}`")))
    }
}
