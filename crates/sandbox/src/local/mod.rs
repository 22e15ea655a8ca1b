//! Sandboxes of this machine, each beside a shim: `namespace`, the host's own kernel behind namespaces, seccomp, Landlock and
//! control groups; `gvisor`, a kernel of its own in user space. They share everything here but [`kernel`].
//!
//! ```text
//!  create:  intent ─► cgroups ─► layer ─► shim (posix_spawn) ─► its one line ─► serving
//!                                          │ anything fails or the caller goes away
//!                                          ▼
//!                                         undo: the same code that reaps after a crash
//!
//!  create, when a warm one is there: session and sandbox directories renamed ─► shim told whose it is
//!
//!  end:     stop | pid 1 dies | shim dies ─► kill what is in the groups ─► groups removed ─► layer detached
//!                                            ─► exec records sealed ─► sandbox directory removed ─► Gone
//! ```
//!
//! The kernel and the data directory hold all state: the map of sandboxes here is a cache of handles that
//! [`adopt`](crate::Backend::adopt) fills again after a restart. What must hold:
//!
//! - Per session one thing happens at a time (an async lock per session id); sessions do not wait for each other.
//! - Every step that takes something comes after the intent that names it; every step of taking down succeeds when there
//!   is nothing to take down. So a crash anywhere is repaired by running [`reap`] again.
//! - Processes are killed only while they are members of this sandbox's control groups, or when their command line is
//!   this sandbox's shim.

mod children;
mod create;
mod kernel;
mod lifecycle;
mod probe;
mod reap;
pub mod runsc;
mod sandbox;
mod warm;

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;
use cloister_guest::shim::config::Defence;
use cloister_guest::spool::{self, EndedReader};
use cloister_types::exec::ExecRecord;
use cloister_types::{BackendKind, Capability, ExecId, SandboxId, SessionId};

use crate::backend::{
    Backend, Created, Gone, HostPaths, KeptSession, OutputReader, Sandbox, SandboxError, SandboxSpec,
};
use crate::cgroup::{self, CgroupDriver, GroupSet};
use crate::disk::DiskDriver;
use crate::guest_binary;
use crate::id_range::IdRangeAllocator;
use crate::intent;
use sandbox::{LocalSandbox, SpoolOutput};
use warm::WarmPool;

/// How a host wants its sandboxes.
#[derive(Debug, Clone)]
pub struct LocalConfig {
    /// Where things are kept.
    pub paths: HostPaths,
    /// Whether sandboxes behind namespaces are made.
    pub offers_namespace: bool,
    /// The `runsc` that makes sandboxes on gVisor; without one, none are made.
    pub runsc: Option<PathBuf>,
    /// Most bytes of output kept for each exec.
    pub spool_max_bytes: u64,
    /// Most bytes of output kept for all execs of a session.
    pub session_spool_max_bytes: u64,
    /// Most execs kept for each sandbox.
    pub execs_max: u32,
    /// Whether a layer may be in memory where nothing else can be limited; it then ends with its sandbox.
    pub allow_tmpfs: bool,
    /// Environment of every exec.
    pub env: BTreeMap<String, String>,
    /// Directory of an exec that names none.
    pub cwd: String,
    /// Sandboxes that are kept ready for sessions to come; 0 makes each only when it is asked for.
    pub warm_sandboxes: usize,
    /// Defences left off, for the controls of hostile tests; refused by a guest built without debug assertions.
    pub defences_off: Vec<Defence>,
}

impl LocalConfig {
    /// Returns what a host has that says nothing else.
    pub fn new(paths: HostPaths) -> Self {
        let env = [
            ("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
            ("HOME", "/root"),
            ("LANG", "C.UTF-8"),
        ];
        Self {
            paths,
            offers_namespace: true,
            runsc: None,
            spool_max_bytes: 16 * 1024 * 1024,
            session_spool_max_bytes: 256 * 1024 * 1024,
            execs_max: 1024,
            allow_tmpfs: false,
            env: env.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
            cwd: "/workspace".to_owned(),
            warm_sandboxes: 0,
            defences_off: Vec::new(),
        }
    }
}

impl LocalConfig {
    /// Returns what is offered, strongest first.
    fn kinds(&self) -> Vec<BackendKind> {
        let gvisor = self.runsc.is_some().then_some(BackendKind::Gvisor);
        let namespace = self.offers_namespace.then_some(BackendKind::Namespace);
        gvisor.into_iter().chain(namespace).collect()
    }
}

/// Sandboxes of one data directory.
#[derive(Clone)]
pub struct LocalBackend {
    inner: Arc<Inner>,
}

struct Inner {
    config: LocalConfig,
    guest: PathBuf,
    instance: String,
    boot_id: String,
    /// The reason why there is none goes to the probe and to every refused create.
    cgroups: Result<Box<dyn CgroupDriver>, String>,
    disk: DiskDriver,
    ids: IdRangeAllocator,
    warm: WarmPool,
    sandboxes: Mutex<HashMap<SessionId, Arc<LocalSandbox>>>,
    locks: Mutex<HashMap<SessionId, Weak<tokio::sync::Mutex<()>>>>,
}

impl LocalBackend {
    /// Opens a data directory: makes what is missing, installs the guest binary, finds out what the machine has. It
    /// reads files and starts `mkfs.ext4 -V`, so that it belongs on a thread that may block.
    ///
    /// # Errors
    ///
    /// When the directories cannot be made or written. What a sandbox needs and the machine lacks is no error here
    /// but in [`probe`](Backend::probe) and [`create`](Backend::create).
    pub fn open(config: LocalConfig) -> Result<Self, SandboxError> {
        let paths = &config.paths;
        paths.ensure().map_err(|error| SandboxError::failed("make the host's directories", error))?;
        let guest = guest_binary::install(&paths.data_dir)
            .map_err(|error| SandboxError::failed("install the guest binary", error))?;
        let instance =
            paths.instance().map_err(|error| SandboxError::failed("find the data directory", error))?;
        let boot_id = intent::boot_id().map_err(|error| SandboxError::failed("read the boot id", error))?;
        let cgroups = cgroup::detect().map_err(|error| chain(&error));
        let inner = Inner {
            guest,
            instance,
            boot_id,
            cgroups,
            disk: DiskDriver::detect(&paths.data_dir, config.allow_tmpfs),
            ids: IdRangeAllocator::new(paths.clone()),
            warm: WarmPool::new(if config.offers_namespace { config.warm_sandboxes } else { 0 }),
            sandboxes: Mutex::default(),
            locks: Mutex::default(),
            config,
        };
        Ok(Self { inner: Arc::new(inner) })
    }
}

impl Inner {
    fn paths(&self) -> &HostPaths {
        &self.config.paths
    }

    fn cgroups(&self) -> Result<&dyn CgroupDriver, SandboxError> {
        match &self.cgroups {
            Ok(driver) => Ok(driver.as_ref()),
            Err(reason) => Err(SandboxError::failed("find control groups", reason.clone())),
        }
    }

    /// Returns the control groups of a sandbox with this id; none on a machine without.
    fn plan_groups(&self, sandbox_id: &SandboxId) -> Option<GroupSet> {
        self.cgroups.as_ref().ok().map(|driver| driver.plan(&self.instance, sandbox_id.as_str()))
    }

    /// Returns the lock under which a session's sandbox is made and removed.
    fn session_lock(&self, session_id: &SessionId) -> Arc<tokio::sync::Mutex<()>> {
        let mut locks = self.locks.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lock) = locks.get(session_id).and_then(Weak::upgrade) {
            return lock;
        }
        locks.retain(|_, lock| lock.strong_count() > 0);
        let lock = Arc::new(tokio::sync::Mutex::new(()));
        locks.insert(session_id.clone(), Arc::downgrade(&lock));
        lock
    }

    fn sandbox_of(&self, session_id: &SessionId) -> Option<Arc<LocalSandbox>> {
        self.sandboxes.lock().unwrap_or_else(PoisonError::into_inner).get(session_id).cloned()
    }

    fn keep(&self, sandbox: &Arc<LocalSandbox>) {
        let mut sandboxes = self.sandboxes.lock().unwrap_or_else(PoisonError::into_inner);
        sandboxes.insert(sandbox.spec().session_id.clone(), Arc::clone(sandbox));
    }

    /// Drops the handle of a sandbox that has ended, unless the session has another one by now.
    fn forget(&self, spec: &SandboxSpec) {
        let mut sandboxes = self.sandboxes.lock().unwrap_or_else(PoisonError::into_inner);
        if sandboxes.get(&spec.session_id).is_some_and(|kept| kept.spec().sandbox_id == spec.sandbox_id) {
            sandboxes.remove(&spec.session_id);
        }
    }
}

#[async_trait]
impl Backend for LocalBackend {
    fn kinds(&self) -> Vec<BackendKind> {
        self.inner.config.kinds()
    }

    async fn probe(&self, kind: BackendKind) -> Vec<Capability> {
        probe::probe(self, kind).await
    }

    async fn create(&self, spec: &SandboxSpec) -> Result<Created, SandboxError> {
        self.create_sandbox(spec).await
    }

    async fn needs_warm(&self) {
        self.inner.warm.needs_one().await;
    }

    async fn make_warm(&self) -> Result<(), SandboxError> {
        self.make_warm_sandbox().await
    }

    async fn drop_warm(&self) -> Result<(), SandboxError> {
        self.drop_warm_sandboxes().await
    }

    async fn adopt(&self) -> Result<(Vec<Arc<dyn Sandbox>>, Vec<Gone>), SandboxError> {
        let (sandboxes, gone) = self.adopt_all().await?;
        Ok((sandboxes.into_iter().map(|sandbox| sandbox as Arc<dyn Sandbox>).collect(), gone))
    }

    async fn kept_session(&self, session_id: &SessionId) -> Result<Option<KeptSession>, SandboxError> {
        let (inner, directory) = (Arc::clone(&self.inner), self.inner.paths().session_dir(session_id));
        blocking("look at a session", move || {
            if !directory.is_dir() {
                return Ok(None);
            }
            let failed = |error| SandboxError::failed("read how a sandbox ended", error);
            let last_end = intent::read_record(&directory.join(crate::layout::ENDED_FILE)).map_err(failed)?;
            Ok(Some(KeptSession { has_layer: inner.disk.has_layer(&directory), last_end }))
        })
        .await
    }

    async fn remove(&self, session_id: &SessionId) -> Result<(), SandboxError> {
        self.remove_session(session_id).await
    }

    async fn sessions(&self) -> Result<Vec<(SessionId, Option<Arc<dyn Sandbox>>)>, SandboxError> {
        let directory = self.inner.paths().sessions_dir();
        let ids: Vec<SessionId> = blocking("list sessions", move || {
            crate::layout::ids_in(&directory).map_err(|error| SandboxError::failed("list sessions", error))
        })
        .await?;
        let entry = |id: SessionId| {
            let sandbox = self.inner.sandbox_of(&id).filter(|sandbox| !sandbox.is_released());
            (id, sandbox.map(|sandbox| sandbox as Arc<dyn Sandbox>))
        };
        Ok(ids.into_iter().map(entry).collect())
    }

    async fn ended_execs(&self, session_id: &SessionId) -> Result<Vec<ExecRecord>, SandboxError> {
        self.require_session(session_id).await?;
        let directory = self.inner.paths().execs_dir(session_id);
        blocking("list execs", move || {
            spool::read_records(&directory).map_err(|error| SandboxError::failed("list execs", error))
        })
        .await
    }

    async fn ended_output(
        &self,
        session_id: &SessionId,
        exec_id: &ExecId,
        from_offset: u64,
    ) -> Result<Box<dyn OutputReader>, SandboxError> {
        self.require_session(session_id).await?;
        let directory = self.inner.paths().exec_dir(session_id, exec_id);
        Ok(Box::new(open_output(directory, exec_id, from_offset).await?))
    }
}

/// Opens the kept output of an exec that no shim serves.
async fn open_output(
    directory: PathBuf,
    exec_id: &ExecId,
    from_offset: u64,
) -> Result<SpoolOutput, SandboxError> {
    let exec = exec_id.clone();
    let reader = blocking("open output", move || {
        let record = read_exec(&directory, &exec)?;
        Ok(EndedReader::new(&directory, from_offset, record.exit))
    })
    .await?;
    Ok(SpoolOutput::new(reader))
}

/// Reads the record of one exec from its directory.
fn read_exec(directory: &std::path::Path, exec_id: &ExecId) -> Result<ExecRecord, SandboxError> {
    spool::read_record(directory).map_err(|error| match error {
        spool::RecordError::NotFound(_) => SandboxError::NotFound(format!("exec `{exec_id}`")),
        error => SandboxError::failed("read exec", error),
    })
}

/// Runs work that blocks on a thread for such.
async fn blocking<T: Send + 'static>(
    operation: &'static str,
    work: impl FnOnce() -> Result<T, SandboxError> + Send + 'static,
) -> Result<T, SandboxError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        // The runtime shuts down, or the work panicked.
        Err(error) => Err(SandboxError::failed(operation, error)),
    }
}

/// Returns an error with everything that caused it, on one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

fn unix_ms() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or(Duration::ZERO);
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
