//! The sandboxes of this host: which run, who watches them, and what the coordinator is told.
//!
//! [`Agent`] holds nothing that a restart cannot find again: the backends' own records say which sandboxes live,
//! the epochs are in a file, and what became of a sandbox while no agent ran comes out of the adoption.
//!
//! ```text
//!  adopt ──┐                        ┌── stop, remove (by command: no event)
//!          ▼                        ▼
//!  create ─► live (one watcher each) ─► gone by itself ─► event ─► link
//! ```
//!
//! Invariant: a session has at most one entry in the table, and whoever changes it holds the session's turn;
//! only the watcher of a sandbox removes an entry without a turn, and only its own.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cloister_api::connection::HOST_WIRE_VERSION;
use cloister_api::convert::{capabilities_to_proto, timestamp_to_proto};
use cloister_api::host::{Register, SandboxCreated, SandboxEvent};
use cloister_sandbox::backend::{Backend, Gone, Sandbox};
use cloister_service::{OnCancel, OnError, TaskKind, TaskRegistry, error_chain};
use cloister_types::{Capability, Clock, HostId, SessionId, SystemClock};
use tokio::sync::{Semaphore, watch};

use crate::HostError;
use crate::backends::{Backends, PROBE_AGAIN};
use crate::config::HostConfig;
use crate::data_dir::DataDir;
use crate::epochs::Epochs;
use crate::events::Events;
use crate::fault::POINTS;
use crate::machine::{self, Capacity};
use crate::report::Report;
use crate::turns::Turns;

const WATCH: TaskKind = TaskKind::new("watch-sandbox", OnCancel::Abort, OnError::Log);
const WARM: TaskKind = TaskKind::new("warm-sandboxes", OnCancel::Wait, OnError::Log);
const PROBE: TaskKind = TaskKind::new("probe-backends", OnCancel::Abort, OnError::Log);

/// Pause after a sandbox could not be made ready; doubles up to [`WARM_AGAIN_MAX`].
const WARM_AGAIN: Duration = Duration::from_secs(1);
/// Longest such pause.
const WARM_AGAIN_MAX: Duration = Duration::from_secs(60);

/// The state of a running host agent.
pub(crate) struct Agent {
    host_id: HostId,
    name: String,
    boot_id: String,
    capacity: Capacity,
    clock: Arc<dyn Clock>,
    live: Mutex<BTreeMap<SessionId, Live>>,
    pub(crate) backends: Backends,
    pub(crate) epochs: Epochs,
    pub(crate) turns: Turns,
    pub(crate) events: Events,
    pub(crate) tasks: TaskRegistry,
    /// Sandboxes that are being made at one time. More would only make each of them later: the work is the
    /// processor's.
    pub(crate) creating: Semaphore,
}

/// A running sandbox.
#[derive(Clone)]
pub(crate) struct Live {
    pub(crate) sandbox: Arc<dyn Sandbox>,
    /// What its creation was answered with; unset for an adopted one.
    pub(crate) answer: Option<SandboxCreated>,
    /// Its end was asked for, and whoever asked is told by the answer.
    pub(crate) ending: Arc<AtomicBool>,
}

impl Agent {
    /// Adopts what runs and probes the backends.
    pub(crate) async fn start(
        config: &HostConfig,
        data_dir: &DataDir,
        backends: Vec<Arc<dyn Backend>>,
        tasks: TaskRegistry,
    ) -> Result<Arc<Self>, HostError> {
        let (directory, path, given) =
            (config.paths.data_dir.clone(), data_dir.file("epochs"), config.capacity);
        let read = move || {
            let epochs = Epochs::open(&path).map_err(|source| HostError::Epochs { path, source })?;
            let failed = |source| HostError::Machine { source };
            let capacity = Capacity::measure(&directory, given).map_err(failed)?;
            let boot_id = machine::boot_id().map_err(failed)?;
            Ok::<_, HostError>((epochs, capacity, boot_id))
        };
        let (epochs, capacity, boot_id) = crate::blocking(read).await?;
        let parallel = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let agent = Arc::new(Self {
            backends: Backends::new(backends),
            host_id: data_dir.host_id().clone(),
            name: config.name.clone(),
            boot_id,
            capacity,
            clock: Arc::new(SystemClock),
            live: Mutex::default(),
            epochs,
            turns: Turns::default(),
            events: Events::default(),
            tasks,
            creating: Semaphore::new(parallel * 2),
        });
        agent.adopt().await?;
        POINTS.reach("host_after_adoption");
        agent.backends.probe().await;
        if !agent.backends.all_work() {
            let this = Arc::clone(&agent);
            agent.tasks.spawn(PROBE, async move {
                let token = this.tasks.token();
                while !this.backends.all_work() {
                    tokio::select! {
                        () = tokio::time::sleep(PROBE_AGAIN) => {}
                        () = token.cancelled() => break,
                    }
                    this.backends.probe().await;
                }
                Ok::<(), Infallible>(())
            });
        }
        for index in 0..agent.backends.all().len() {
            let this = Arc::clone(&agent);
            agent.tasks.spawn(WARM, async move {
                this.keep_warm(index).await;
                Ok::<(), Infallible>(())
            });
        }
        Ok(agent)
    }

    /// Keeps a backend's sandboxes ready until the agent stops, and leaves none behind.
    async fn keep_warm(&self, index: usize) {
        let backend = &self.backends.all()[index];
        let stopping = self.tasks.token();
        let mut pause = WARM_AGAIN;
        loop {
            tokio::select! {
                () = stopping.cancelled() => break,
                () = backend.needs_warm() => {}
            }
            // One that is being made is finished: half of one would be the next adoption's work.
            let Err(error) = backend.make_warm().await else {
                pause = WARM_AGAIN;
                continue;
            };
            tracing::warn!(error = error_chain(&error), "no sandbox could be made ready");
            tokio::select! {
                () = stopping.cancelled() => break,
                () = tokio::time::sleep(pause) => {}
            }
            pause = (pause * 2).min(WARM_AGAIN_MAX);
        }
        if let Err(error) = backend.drop_warm().await {
            tracing::warn!(error = error_chain(&error), "a ready sandbox is left to the next agent");
        }
    }

    async fn adopt(self: &Arc<Self>) -> Result<(), HostError> {
        let mut present = BTreeSet::new();
        for backend in self.backends.all() {
            let failed = |source| HostError::Adopt { source };
            let (running, gone) = backend.adopt().await.map_err(failed)?;
            for sandbox in running {
                let spec = sandbox.spec();
                tracing::info!(
                    session_id = %spec.session_id, sandbox_id = %spec.sandbox_id, backend = %spec.backend,
                    "sandbox adopted"
                );
                self.insert(sandbox, None);
            }
            for gone in gone {
                self.report_gone(&gone);
            }
            let sessions = backend.sessions().await.map_err(failed)?;
            present.extend(sessions.into_iter().map(|(session_id, _)| session_id));
        }
        self.epochs.set_present(&present);
        Ok(())
    }

    /// Keeps a running sandbox and watches it, in the place of an earlier handle of the session if there is one.
    pub(crate) fn insert(self: &Arc<Self>, sandbox: Arc<dyn Sandbox>, answer: Option<SandboxCreated>) {
        let ending = Arc::new(AtomicBool::new(false));
        let live = Live { sandbox: Arc::clone(&sandbox), answer, ending: Arc::clone(&ending) };
        self.live().insert(sandbox.spec().session_id.clone(), live);
        let this = Arc::clone(self);
        self.tasks.spawn(WATCH, async move {
            let token = this.tasks.token();
            let gone = tokio::select! {
                gone = sandbox.wait_gone() => gone,
                () = token.cancelled() => return Ok::<(), Infallible>(()),
            };
            // Whoever took it out of the table before knows of its end.
            if this.forget(&sandbox) && !ending.load(Ordering::SeqCst) {
                this.report_gone(&gone);
            }
            Ok(())
        });
    }

    /// Returns the running sandbox of a session.
    pub(crate) fn find(&self, session_id: &SessionId) -> Option<Live> {
        self.live().get(session_id).cloned()
    }

    /// Drops a sandbox that has ended from the table; returns whether it was there, and not another one in its
    /// place.
    pub(crate) fn forget(&self, sandbox: &Arc<dyn Sandbox>) -> bool {
        let session_id = &sandbox.spec().session_id;
        let mut live = self.live();
        let found = live.get(session_id).is_some_and(|entry| Arc::ptr_eq(&entry.sandbox, sandbox));
        if found {
            live.remove(session_id);
        }
        found
    }

    fn report_gone(&self, gone: &Gone) {
        POINTS.reach("host_before_event");
        let epoch = self.epochs.highest(&gone.session_id);
        tracing::info!(
            session_id = %gone.session_id, sandbox_id = %gone.sandbox_id, reason = %gone.reason,
            message = gone.message, "sandbox gone"
        );
        self.events.push(SandboxEvent {
            session_id: gone.session_id.to_string(),
            sandbox_id: gone.sandbox_id.to_string(),
            epoch,
            kind: "sandbox_gone".to_owned(),
            reason: gone.reason.to_string(),
            message: gone.message.clone(),
            at: timestamp_to_proto(self.clock.now()).into(),
            ..Default::default()
        });
    }

    /// Returns what the host can do, now and on every change.
    pub(crate) fn capabilities(&self) -> watch::Receiver<Vec<Capability>> {
        self.backends.capabilities()
    }

    /// Returns the first message of a link: who this is, what it can do, and what lives here now.
    pub(crate) async fn registration(&self, capabilities: &[Capability]) -> Register {
        let mut report = Report::new(&self.epochs);
        let live = self.live().clone();
        for (session_id, entry) in &live {
            report.running(session_id, &entry.sandbox.spec().sandbox_id);
        }
        for backend in self.backends.all() {
            report.kept(backend.as_ref()).await;
        }
        Register {
            host_id: self.host_id.to_string(),
            name: self.name.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            wire_version: HOST_WIRE_VERSION,
            boot_id: self.boot_id.clone(),
            capabilities: capabilities_to_proto(capabilities),
            memory_bytes: self.capacity.memory.0,
            cpu_millis: self.capacity.cpus.0,
            disk_bytes: self.capacity.disk.0,
            sandboxes: report.into_sandboxes(),
            ..Default::default()
        }
    }

    fn live(&self) -> std::sync::MutexGuard<'_, BTreeMap<SessionId, Live>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
