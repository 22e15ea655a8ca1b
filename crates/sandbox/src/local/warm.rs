//! Sandboxes that are ready before anybody asks: a create then only says whose one is.
//!
//! ```text
//!  needs_one ─► make: built as every other, below <data>/warm, for a session id that nobody has
//!                 │
//!                 ▼        take                              claim
//!               ready ───────────► session.json, intent ─► limits ─► directories renamed ─► shim told ─► the session's
//!                 │ too old, another disk size, the agent stops
//!                 ▼
//!               reaped
//! ```
//!
//! Loop devices, control groups and mounts take locks that the whole machine shares, and a fresh process must be started
//! and scheduled: that is nearly all of a create, and none of it depends on who asks. What does: limits of memory,
//! processors and processes (written to the groups), the name (set by the shim), and the size of the disk (a warm
//! sandbox has one; the size that was asked for last is kept ready).
//!
//! What must hold:
//!
//! - No program runs in a warm sandbox, and it is claimed once.
//! - At every moment an intent in the sandbox's directory names all that it has. Half-way through a claim that intent
//!   lies below `warm` still, or names a shim that does not know its new id: either is reaped by the next adoption, and
//!   the create, which was never answered, is asked again.
//! - Warm sandboxes do not outlive their agent: the next one reaps them. They are cheap, and keeping them would need a
//!   second way to adopt.
//! - They are made only while no create is in progress.

use std::collections::{BTreeSet, VecDeque};
use std::fs;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cloister_guest::client::Client;
use cloister_guest::shim::config::CONFIG_FILE;
use cloister_types::{BackendKind, ByteCount, IsolationFact, Limits, SandboxId, SessionId};
use tokio::sync::{Notify, OwnedMutexGuard};

use super::create::{Steps, Taken, Undo, disk_error};
use super::sandbox::LocalSandbox;
use super::{Inner, LocalBackend, blocking, chain, children, kernel, reap, unix_ms};
use crate::backend::{Created, SandboxError, SandboxSpec};
use crate::fault::POINTS;
use crate::intent::{INTENT_FILE, Intent, SESSION_FILE, SessionRecord, read_record, write_record};
use crate::layout;

/// How long one may wait for its session. It shows files of the host as they were when it was made: an update of the
/// host's certificates or libraries must reach new sessions.
const AGE_MAX: Duration = Duration::from_secs(600);
/// How long a shim may take to say that it knows its session.
const CLAIM_DEADLINE: Duration = Duration::from_secs(5);
/// The name of a sandbox that nobody has.
const HOSTNAME: &str = "warm";

/// What is ready, and what it should be.
pub(super) struct WarmPool {
    state: Mutex<State>,
    changed: Notify,
}

struct State {
    target: usize,
    /// The size of disk that was asked for last.
    disk: ByteCount,
    /// Oldest first.
    ready: VecDeque<Warm>,
    /// Every one that this process makes, keeps or hands out: an adoption must leave them alone.
    held: BTreeSet<SandboxId>,
    making: usize,
    creating: usize,
}

/// A sandbox that is ready.
pub(super) struct Warm {
    intent: Intent,
    made: Instant,
}

impl State {
    fn is_useful(&self, warm: &Warm) -> bool {
        warm.intent.limits.disk == self.disk && warm.made.elapsed() < AGE_MAX
    }

    fn is_short(&self) -> bool {
        let useful = self.ready.iter().filter(|warm| self.is_useful(warm)).count();
        self.creating == 0 && useful + self.making < self.target
    }

    /// Returns how long it takes until the oldest is too old.
    fn ages_in(&self) -> Option<Duration> {
        self.ready.iter().map(|warm| AGE_MAX.saturating_sub(warm.made.elapsed())).min()
    }
}

/// A create in progress.
pub(super) struct HeldBack<'a>(&'a WarmPool);

impl Drop for HeldBack<'_> {
    fn drop(&mut self) {
        self.0.lock().creating -= 1;
        self.0.changed.notify_waiters();
    }
}

/// One that is being made.
struct Making<'a> {
    pool: &'a WarmPool,
    sandbox_id: SandboxId,
    is_kept: bool,
}

impl Drop for Making<'_> {
    fn drop(&mut self) {
        let mut state = self.pool.lock();
        state.making -= 1;
        if !self.is_kept {
            state.held.remove(&self.sandbox_id);
        }
        drop(state);
        self.pool.changed.notify_waiters();
    }
}

impl WarmPool {
    pub(super) fn new(target: usize) -> Self {
        let state = State {
            target,
            disk: Limits::DEFAULT.disk,
            ready: VecDeque::new(),
            held: BTreeSet::new(),
            making: 0,
            creating: 0,
        };
        Self { state: Mutex::new(state), changed: Notify::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets nothing be made until the guard is dropped.
    pub(super) fn hold_back(&self) -> HeldBack<'_> {
        self.lock().creating += 1;
        HeldBack(self)
    }

    /// Waits until one should be made.
    pub(super) async fn needs_one(&self) {
        loop {
            let changed = self.changed.notified();
            let (is_short, ages_in) = {
                let state = self.lock();
                (state.is_short(), state.ages_in())
            };
            if is_short {
                return;
            }
            match ages_in {
                Some(time) => drop(tokio::time::timeout(time, changed).await),
                None => changed.await,
            }
        }
    }

    /// Takes one with this size of disk, if there is one; more of that size are made from now on.
    fn take(&self, disk: ByteCount) -> Option<Warm> {
        let mut state = self.lock();
        state.disk = disk;
        let index = state.ready.iter().position(|warm| state.is_useful(warm));
        let taken = index.and_then(|index| state.ready.remove(index));
        drop(state);
        self.changed.notify_waiters();
        taken
    }

    fn begin(&self) -> (Making<'_>, ByteCount) {
        let sandbox_id = SandboxId::generate();
        let mut state = self.lock();
        state.making += 1;
        state.held.insert(sandbox_id.clone());
        (Making { pool: self, sandbox_id, is_kept: false }, state.disk)
    }

    /// Puts one that was made to the others; returns those that are of no use any more.
    fn put(&self, mut making: Making<'_>, intent: Intent) -> Vec<Warm> {
        let mut state = self.lock();
        making.is_kept = true;
        state.ready.push_back(Warm { intent, made: Instant::now() });
        let (useful, useless): (VecDeque<_>, VecDeque<_>) = std::mem::take(&mut state.ready)
            .into_iter()
            .partition(|warm| state.target > 0 && state.is_useful(warm));
        state.ready = useful;
        useless.into()
    }

    fn let_go(&self, sandbox_id: &SandboxId) {
        self.lock().held.remove(sandbox_id);
    }
}

impl LocalBackend {
    /// Keeps sandboxes ready for sessions with this size of disk, until a create asks for another.
    pub fn warm_for(&self, disk: ByteCount) {
        self.inner.warm.lock().disk = disk;
        self.inner.warm.changed.notify_waiters();
    }

    /// Returns a warm sandbox for `spec`. A session that has a layer needs one around that layer.
    pub(super) fn take_warm(&self, spec: &SandboxSpec) -> Option<Warm> {
        if spec.backend != BackendKind::Namespace || self.inner.paths().session_dir(&spec.session_id).exists()
        {
            return None;
        }
        self.inner.warm.take(spec.limits.disk)
    }

    /// Makes a warm sandbox the one of `spec`.
    pub(super) async fn claim(
        &self,
        spec: &SandboxSpec,
        warm: Warm,
        guard: OwnedMutexGuard<()>,
    ) -> Result<Created, SandboxError> {
        let inner = Arc::clone(&self.inner);
        let wanted = spec.clone();
        let moved = blocking("claim a warm sandbox", move || {
            let warm_id = warm.intent.sandbox_id.clone();
            let moved = give(&inner, &wanted, &warm.intent, guard);
            inner.warm.let_go(&warm_id);
            moved
        });
        let Moved { undo, intent, client, mut steps } = moved.await?;
        let paths = self.inner.paths();
        let sandbox_dir = paths.sandbox_dir(&spec.sandbox_id);
        let exec_dir = paths.execs_dir(&spec.session_id);
        let claimed = client.claim(spec.sandbox_id.as_str(), &spec.hostname, &sandbox_dir, &exec_dir);
        let report = match claimed.await {
            Ok(report) => report,
            Err(error) => {
                undo.run().await;
                return Err(SandboxError::failed("claim a warm sandbox", error));
            }
        };
        POINTS.reach("warm_after_claim");
        steps.done("claim");
        undo.keep();
        let sandbox = Arc::new(LocalSandbox::new(Arc::clone(&self.inner), intent));
        self.inner.keep(&sandbox);
        let mut facts: Vec<_> =
            report.facts.into_iter().map(|(name, value)| IsolationFact { name, value }).collect();
        facts.push(warm_fact(true));
        Ok(Created { sandbox, facts, timings: steps.timings })
    }

    pub(super) async fn make_warm_sandbox(&self) -> Result<(), SandboxError> {
        let (making, disk) = self.inner.warm.begin();
        let spec = SandboxSpec {
            session_id: SessionId::generate(),
            sandbox_id: making.sandbox_id.clone(),
            backend: BackendKind::Namespace,
            image: "host".to_owned(),
            limits: Limits { disk, ..Limits::DEFAULT },
            hostname: HOSTNAME.to_owned(),
        };
        let guard = self.inner.session_lock(&spec.session_id).lock_owned().await;
        let built = self.build(self.inner.paths().warm(), &spec, guard).await?;
        let useless = self.inner.warm.put(making, built.intent);
        self.discard(useless).await
    }

    pub(super) async fn drop_warm_sandboxes(&self) -> Result<(), SandboxError> {
        let ready = {
            let mut state = self.inner.warm.lock();
            state.target = 0;
            std::mem::take(&mut state.ready)
        };
        self.discard(ready.into()).await
    }

    async fn discard(&self, warm: Vec<Warm>) -> Result<(), SandboxError> {
        for warm in warm {
            let inner = Arc::clone(&self.inner);
            blocking("discard a warm sandbox", move || {
                let discarded = take_down(&inner, &warm.intent);
                inner.warm.let_go(&warm.intent.sandbox_id);
                discarded
            })
            .await?;
        }
        Ok(())
    }

    /// Takes down the warm sandboxes of an earlier process, and those whose claim a crash cut.
    pub(super) async fn discard_left_warm(&self) -> Result<(), SandboxError> {
        let inner = Arc::clone(&self.inner);
        blocking("discard warm sandboxes", move || {
            let paths = inner.paths().warm();
            let failed = |error| SandboxError::failed("list warm sandboxes", error);
            reap::sweep(&paths, |id| inner.plan_groups(id)).map_err(failed)?;
            let held = inner.warm.lock().held.clone();
            let mut sessions = BTreeSet::new();
            for sandbox_id in layout::ids_in::<SandboxId>(&paths.sandboxes_dir()).map_err(failed)? {
                let file = paths.sandbox_dir(&sandbox_id).join(INTENT_FILE);
                let intent = match read_record::<Intent>(&file) {
                    Ok(Some(intent)) => intent,
                    // One that was just begun.
                    Ok(None) => continue,
                    Err(error) => {
                        tracing::error!(%sandbox_id, error = %chain(&error), "the intent of a warm sandbox cannot be read; it is left alone");
                        continue;
                    }
                };
                if held.contains(&sandbox_id) {
                    sessions.insert(intent.session_id);
                    continue;
                }
                // A claim that was cut has written the new names already; the directory has the old one.
                take_down(&inner, &Intent { sandbox_id, ..intent })?;
            }
            for session_id in layout::ids_in::<SessionId>(&paths.sessions_dir()).map_err(failed)? {
                if !sessions.contains(&session_id) && held.is_empty() {
                    layout::remove_dir(&paths.session_dir(&session_id)).map_err(failed)?;
                }
            }
            Ok(())
        })
        .await
    }
}

/// Returns the fact that says how a sandbox came to be.
pub(super) fn warm_fact(was_warm: bool) -> IsolationFact {
    IsolationFact { name: "made_ready_before".to_owned(), value: was_warm.to_string() }
}

/// Takes down a warm sandbox with its layer.
fn take_down(inner: &Inner, intent: &Intent) -> Result<(), SandboxError> {
    let paths = inner.paths().warm();
    reap::reap(&paths, intent, &inner.boot_id, true, None)?;
    layout::remove_dir(&paths.session_dir(&intent.session_id))
        .map_err(|error| SandboxError::failed("remove a warm sandbox's layer", error))
}

/// A warm sandbox whose directories are its session's.
struct Moved {
    undo: Undo,
    intent: Intent,
    client: Client,
    steps: Steps,
}

/// Moves everything of a warm sandbox to its session. On an error nothing of it is left.
fn give(
    inner: &Arc<Inner>,
    spec: &SandboxSpec,
    warm: &Intent,
    guard: OwnedMutexGuard<()>,
) -> Result<Moved, SandboxError> {
    let mut steps = Steps::new();
    let client = Client::new(&warm.socket, warm.sandbox_id.as_str(), CLAIM_DEADLINE);
    match rename(inner, spec, warm) {
        Ok(intent) => {
            steps.done("warm");
            let taken = Taken {
                inner: Arc::clone(inner),
                paths: inner.paths().clone(),
                intent: intent.clone(),
                is_new_session: true,
                _guard: guard,
            };
            Ok(Moved { undo: taken.undo(), intent, client, steps })
        }
        Err(error) => {
            if let Err(error) = take_down(inner, warm) {
                tracing::warn!(sandbox_id = %warm.sandbox_id, error = %chain(&error), "a warm sandbox is still here");
            }
            // The session had no directory before.
            if let Err(error) = layout::remove_dir(&inner.paths().session_dir(&spec.session_id)) {
                tracing::warn!(session_id = %spec.session_id, %error, "a session that never was is still here");
            }
            Err(error)
        }
    }
}

/// Writes down whose the sandbox is, then makes it so; the renamed sandbox directory is the last step.
fn rename(inner: &Inner, spec: &SandboxSpec, warm: &Intent) -> Result<Intent, SandboxError> {
    let (from, to) = (inner.paths().warm(), inner.paths());
    let record = |error| SandboxError::failed("write down whose a warm sandbox is", error);
    let failed = |error| SandboxError::failed("move a warm sandbox to its session", error);
    let session_dir = to.session_dir(&spec.session_id);
    let intent = Intent {
        session_id: spec.session_id.clone(),
        sandbox_id: spec.sandbox_id.clone(),
        image: spec.image.clone(),
        limits: spec.limits,
        hostname: spec.hostname.clone(),
        disk: inner.disk.plan(&session_dir, spec.limits.disk).map_err(disk_error)?,
        shim_config: Some(from.sandbox_dir(&warm.sandbox_id).join(CONFIG_FILE)),
        created_unix_ms: unix_ms(),
        ..warm.clone()
    };
    let session = SessionRecord { session_id: spec.session_id.clone(), ids: warm.ids, limits: spec.limits };
    // The range is on the disk since the sandbox was made: what a power failure can undo here is the new owner.
    write_record(&from.session_dir(&warm.session_id).join(SESSION_FILE), &session, false).map_err(record)?;
    POINTS.reach("warm_after_record");
    write_record(&from.sandbox_dir(&warm.sandbox_id).join(INTENT_FILE), &intent, false).map_err(record)?;
    POINTS.reach("warm_after_intent");
    let limits = kernel::group_limits(spec.backend, &spec.limits);
    if limits != kernel::group_limits(warm.backend, &warm.limits) {
        let limited = inner.cgroups()?.limit(&warm.groups, &limits);
        limited.map_err(|error| SandboxError::failed("limit a warm sandbox", error))?;
    }
    fs::rename(from.session_dir(&warm.session_id), &session_dir).map_err(failed)?;
    POINTS.reach("warm_after_session_rename");
    fs::rename(from.sandbox_dir(&warm.sandbox_id), to.sandbox_dir(&spec.sandbox_id)).map_err(failed)?;
    POINTS.reach("warm_after_sandbox_rename");
    children::rename(&warm.sandbox_id, &spec.sandbox_id);
    Ok(intent)
}
