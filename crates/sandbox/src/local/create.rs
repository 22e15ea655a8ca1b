//! Making one sandbox: everything on the host's side up to the shim's one line, and the way back.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cloister_guest::shim::config::{
    CONFIG_FILE, CgroupConfig, DiskConfig, RootConfig, ShimConfig, ShimReport,
};
use cloister_types::{BackendKind, IsolationFact};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::net::unix::pipe;
use tokio::sync::OwnedMutexGuard;

use super::sandbox::LocalSandbox;
use super::warm::warm_fact;
use super::{Inner, LocalBackend, blocking, chain, children, kernel, reap, unix_ms};
use crate::backend::{Created, HostPaths, SandboxError, SandboxSpec, StepTiming};
use crate::cgroup::JoinFiles;
use crate::disk::DiskError;
use crate::fault::POINTS;
use crate::id_range::{IdRangeError, ensure_session_dir};
use crate::intent::{INTENT_FILE, Intent, SESSION_FILE, SessionRecord, read_record, write_record};
use crate::layout;

/// How long a shim may take to build its sandbox. It needs milliseconds; a machine that is busy with fifty at once,
/// some seconds.
const REPORT_DEADLINE: Duration = Duration::from_secs(30);
/// Most bytes of a shim's line.
const REPORT_MAX_BYTES: u64 = 256 * 1024;
/// Most characters of a shim's own messages that go into an error.
const LOG_TAIL_CHARS: usize = 400;

impl LocalBackend {
    pub(super) async fn create_sandbox(&self, spec: &SandboxSpec) -> Result<Created, SandboxError> {
        check_spec(spec, &self.inner.config.kinds())?;
        // What is asked for now comes before what is made ready for later.
        let _first = self.inner.warm.hold_back();
        let mut guard = self.inner.session_lock(&spec.session_id).lock_owned().await;
        if let Some(created) = self.running_instead(spec).await? {
            return Ok(created);
        }
        if let Some(warm) = self.take_warm(spec) {
            match self.claim(spec, warm, guard).await {
                Ok(created) => return Ok(created),
                Err(error) => {
                    tracing::warn!(session_id = %spec.session_id, error = %chain(&error), "a warm sandbox could not be used; making another");
                }
            }
            guard = self.inner.session_lock(&spec.session_id).lock_owned().await;
            if let Some(created) = self.running_instead(spec).await? {
                return Ok(created);
            }
        }
        let built = self.build(self.inner.paths().clone(), spec, guard).await?;
        let sandbox = Arc::new(LocalSandbox::new(Arc::clone(&self.inner), built.intent));
        self.inner.keep(&sandbox);
        let mut facts = built.facts;
        facts.push(warm_fact(false));
        Ok(Created { sandbox, facts, timings: built.timings })
    }

    /// Builds a sandbox below `paths`, from its intent to the shim's word that it runs.
    pub(super) async fn build(
        &self,
        paths: HostPaths,
        spec: &SandboxSpec,
        guard: OwnedMutexGuard<()>,
    ) -> Result<Built, SandboxError> {
        let mut steps = Steps::new();
        let inner = Arc::clone(&self.inner);
        let wanted = spec.clone();
        let prepared = blocking("prepare sandbox", move || prepare(&inner, paths, &wanted, guard)).await?;
        let Prepared { undo, timings, stdout, log } = prepared;
        steps.timings = timings;
        steps.restart();
        match wait_for_report(stdout, &log).await {
            Ok((facts, timings)) => {
                steps.done("shim");
                POINTS.reach("sandbox_after_report");
                if let Err(error) = self.limit(undo.intent()).await {
                    undo.run().await;
                    return Err(error);
                }
                steps.done("limits");
                steps.timings.extend(timings);
                Ok(Built { intent: undo.keep(), facts, timings: steps.timings })
            }
            Err(error) => {
                undo.run().await;
                Err(error)
            }
        }
    }

    /// Gives the groups of a sandbox the limits of its intent. Until it runs, nothing but our own programs are in them,
    /// and those are not held up: a hundredth of a processor would make each start take half a second.
    pub(super) async fn limit(&self, intent: &Intent) -> Result<(), SandboxError> {
        let inner = Arc::clone(&self.inner);
        let (groups, limits) = (intent.groups.clone(), kernel::group_limits(intent.backend, &intent.limits));
        blocking("limit sandbox", move || {
            let limited = inner.cgroups()?.limit(&groups, &limits);
            limited.map_err(|error| SandboxError::failed("limit sandbox", error))
        })
        .await
    }

    /// Returns the sandbox that runs already, when it is the one that is asked for. What is dead is taken down.
    async fn running_instead(&self, spec: &SandboxSpec) -> Result<Option<Created>, SandboxError> {
        let running = match self.inner.sandbox_of(&spec.session_id) {
            Some(sandbox) => Some(sandbox),
            // A new session has nothing to look for; one with a directory may have what nobody adopted yet.
            None if self.inner.paths().session_dir(&spec.session_id).exists() => {
                self.find_unadopted(&spec.session_id).await?
            }
            None => None,
        };
        let Some(sandbox) = running else { return Ok(None) };
        if !sandbox.is_alive() {
            sandbox.release().await?;
            return Ok(None);
        }
        if sandbox.is_for(spec) {
            return sandbox.created().await.map(Some);
        }
        Err(SandboxError::Conflict(format!("session `{}`", spec.session_id)))
    }
}

fn check_spec(spec: &SandboxSpec, kinds: &[BackendKind]) -> Result<(), SandboxError> {
    if !kinds.contains(&spec.backend) {
        return Err(SandboxError::Invalid(format!("backend `{}` is not offered here", spec.backend)));
    }
    if spec.image != "host" {
        let image: String = spec.image.chars().take(64).collect();
        return Err(SandboxError::Invalid(format!("image `{image}` is not known: this version has `host`")));
    }
    let is_hostname = (1..=63).contains(&spec.hostname.len())
        && spec.hostname.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
    if !is_hostname {
        return Err(SandboxError::Invalid("the hostname is not 1 to 63 of `A-Z a-z 0-9 -`".to_owned()));
    }
    spec.limits.validate().map(drop).map_err(|error| SandboxError::Invalid(error.to_string()))
}

/// A sandbox that was built.
pub(super) struct Built {
    pub(super) intent: Intent,
    facts: Vec<IsolationFact>,
    timings: Vec<StepTiming>,
}

/// Measures steps one after the other.
pub(super) struct Steps {
    since: Instant,
    pub(super) timings: Vec<StepTiming>,
}

impl Steps {
    pub(super) fn new() -> Self {
        Self { since: Instant::now(), timings: Vec::new() }
    }

    fn restart(&mut self) {
        self.since = Instant::now();
    }

    pub(super) fn done(&mut self, step: &str) {
        self.timings.push(StepTiming { step: step.to_owned(), elapsed: self.since.elapsed() });
        self.restart();
    }
}

/// What is taken so far, and how to give it back. Dropping it unfinished (the caller went away) takes everything down on
/// a thread of its own, which keeps the session locked meanwhile.
pub(super) struct Undo {
    armed: Option<Taken>,
}

pub(super) struct Taken {
    pub(super) inner: Arc<Inner>,
    /// Below which it lies.
    pub(super) paths: HostPaths,
    pub(super) intent: Intent,
    /// The session has nothing but what this call made.
    pub(super) is_new_session: bool,
    pub(super) _guard: OwnedMutexGuard<()>,
}

impl Taken {
    /// Returns the duty to take it down unless it is kept.
    pub(super) fn undo(self) -> Undo {
        Undo { armed: Some(self) }
    }

    pub(super) fn take_down(&self) {
        let paths = &self.paths;
        // A shim in the middle of its work would go on taking what is given back here.
        children::kill(&self.intent.sandbox_id);
        if let Err(error) = reap::reap(paths, &self.intent, &self.inner.boot_id, true, None) {
            tracing::warn!(sandbox_id = %self.intent.sandbox_id, error = %chain(&error), "undo of a create is not complete");
            return;
        }
        if self.is_new_session
            && let Err(error) = layout::remove_dir(&paths.session_dir(&self.intent.session_id))
        {
            tracing::warn!(session_id = %self.intent.session_id, %error, "a session that never was is still here");
        }
    }
}

impl Undo {
    /// Returns what is to be taken down.
    fn intent(&self) -> &Intent {
        &self.armed.as_ref().expect("an undo is kept or run once").intent
    }

    /// Ends the guard's duty: the sandbox runs.
    pub(super) fn keep(mut self) -> Intent {
        self.armed.take().expect("an undo is kept or run once").intent
    }

    pub(super) async fn run(mut self) {
        if let Some(taken) = self.armed.take() {
            // A failure is logged inside, and the intent stays on disk for the next one.
            let _ = tokio::task::spawn_blocking(move || taken.take_down()).await;
        }
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        if let Some(taken) = self.armed.take() {
            let thread = std::thread::Builder::new().name("cloister-undo".to_owned());
            if let Err(error) = thread.spawn(move || taken.take_down()) {
                // The intent is on disk: the next adoption reaps it.
                tracing::warn!(%error, "no thread to undo a create with");
            }
        }
    }
}

struct Prepared {
    undo: Undo,
    timings: Vec<StepTiming>,
    /// Where the shim's line comes from.
    stdout: ChildStdout,
    /// Where it writes everything else.
    log: PathBuf,
}

/// Takes what a sandbox needs, after writing down what that is. On an error everything is given back.
fn prepare(
    inner: &Arc<Inner>,
    paths: HostPaths,
    spec: &SandboxSpec,
    guard: OwnedMutexGuard<()>,
) -> Result<Prepared, SandboxError> {
    let mut steps = Steps::new();
    let cgroups = inner.cgroups()?;
    let session_dir = paths.session_dir(&spec.session_id);
    let disk = inner.disk.plan(&session_dir, spec.limits.disk).map_err(disk_error)?;
    let is_new_session = ensure_session_dir(&session_dir)
        .map_err(|error| SandboxError::failed("make the session's directory", error))?;
    POINTS.reach("sandbox_after_session_dir");
    let ids = record_session(inner, &paths, spec);
    let ids = match ids {
        Ok(ids) => ids,
        Err(error) => {
            if is_new_session {
                // Nothing else is in it.
                let _ = layout::remove_dir(&session_dir);
            }
            return Err(error);
        }
    };
    POINTS.reach("sandbox_after_session_record");
    let intent = Intent {
        session_id: spec.session_id.clone(),
        sandbox_id: spec.sandbox_id.clone(),
        boot_id: inner.boot_id.clone(),
        backend: spec.backend,
        image: spec.image.clone(),
        limits: spec.limits,
        hostname: spec.hostname.clone(),
        ids,
        groups: cgroups.plan(&inner.instance, spec.sandbox_id.as_str()),
        socket: paths.shim_socket(&spec.sandbox_id),
        disk,
        guest: inner.guest.clone(),
        shim_config: None,
        created_unix_ms: unix_ms(),
    };
    let taken = Taken { inner: Arc::clone(inner), paths, intent, is_new_session, _guard: guard };
    match take(inner, &taken.paths, &taken.intent, cgroups, &mut steps) {
        Ok((stdout, log)) => {
            if is_new_session {
                // The layer outlives a reboot, and its files belong to this range.
                if let Err(error) = sync_session(&session_dir) {
                    taken.take_down();
                    return Err(SandboxError::failed("record the session", error));
                }
                steps.done("record");
            }
            Ok(Prepared { undo: taken.undo(), timings: steps.timings, stdout, log })
        }
        Err(error) => {
            taken.take_down();
            Err(error)
        }
    }
}

/// Waits until a session's record and the names above it are on the disk.
fn sync_session(session_dir: &Path) -> io::Result<()> {
    fs::File::open(session_dir.join(SESSION_FILE))?.sync_all()?;
    fs::File::open(session_dir)?.sync_all()?;
    session_dir.parent().map_or(Ok(()), |parent| fs::File::open(parent)?.sync_all())
}

/// Writes the session's record, or checks the one that is there, and returns its range of ids.
fn record_session(
    inner: &Inner,
    paths: &HostPaths,
    spec: &SandboxSpec,
) -> Result<crate::id_range::IdRange, SandboxError> {
    let file = paths.session_dir(&spec.session_id).join(SESSION_FILE);
    let failed = |error| SandboxError::failed("record the session", error);
    let kept: Option<SessionRecord> = read_record(&file).map_err(failed)?;
    if let Some(mut kept) = kept {
        if kept.limits != spec.limits {
            kept.limits = spec.limits;
            write_record(&file, &kept, true).map_err(failed)?;
        }
        return Ok(kept.ids);
    }
    inner
        .ids
        .ensure(&spec.session_id, |ids| {
            let record = SessionRecord { session_id: spec.session_id.clone(), ids, limits: spec.limits };
            // It is made durable while the shim builds.
            write_record(&file, &record, false)
        })
        .map_err(|error| match error {
            IdRangeError::Exhausted => SandboxError::Exhausted("ranges of user ids".to_owned()),
            error => SandboxError::failed("give the session its user ids", error),
        })
}

fn take(
    inner: &Inner,
    paths: &HostPaths,
    intent: &Intent,
    cgroups: &dyn crate::cgroup::CgroupDriver,
    steps: &mut Steps,
) -> Result<(ChildStdout, PathBuf), SandboxError> {
    let directory = paths.sandbox_dir(&intent.sandbox_id);
    let _making = children::Making::begin(&intent.sandbox_id);
    layout::ensure_private_dir(&directory)
        .map_err(|error| SandboxError::failed("make the sandbox's directory", error))?;
    POINTS.reach("sandbox_after_sandbox_dir");
    write_record(&directory.join(INTENT_FILE), intent, false)
        .map_err(|error| SandboxError::failed("write the intent", error))?;
    steps.done("intent");
    POINTS.reach("sandbox_after_intent");
    let files = cgroups
        .create(&intent.groups, &kernel::group_limits(intent.backend, &intent.limits).unhurried())
        .map_err(|error| SandboxError::failed("make control groups", error))?;
    steps.done("cgroups");
    POINTS.reach("sandbox_after_cgroups");
    inner.disk.ensure_layer(&intent.disk, intent.limits.disk, intent.ids.base).map_err(disk_error)?;
    let execs = paths.execs_dir(&intent.session_id);
    layout::ensure_private_dir(&execs)
        .map_err(|error| SandboxError::failed("make the directory of execs", error))?;
    steps.done("layer");
    POINTS.reach("sandbox_after_layer");
    let config = shim_config(inner, paths, intent, files)?;
    write_record(&directory.join(CONFIG_FILE), &config, false)
        .map_err(|error| SandboxError::failed("write the shim's configuration", error))?;
    POINTS.reach("sandbox_after_shim_config");
    let log = directory.join("shim.log");
    let stdout = spawn(inner, intent, &directory, &log)
        .map_err(|error| SandboxError::failed("start the shim", error))?;
    steps.done("spawn");
    POINTS.reach("sandbox_after_spawn");
    Ok((stdout, log))
}

pub(super) fn disk_error(error: DiskError) -> SandboxError {
    let is_full = |source: &io::Error| source.kind() == io::ErrorKind::StorageFull;
    match &error {
        DiskError::CannotShrink { .. } => SandboxError::Invalid(error.to_string()),
        DiskError::Io { source, .. } if is_full(source) => SandboxError::Exhausted("disk space".to_owned()),
        _ => SandboxError::failed("make the layer", error),
    }
}

fn shim_config(
    inner: &Inner,
    paths: &HostPaths,
    intent: &Intent,
    files: JoinFiles,
) -> Result<ShimConfig, SandboxError> {
    Ok(ShimConfig {
        sandbox_id: intent.sandbox_id.to_string(),
        hostname: intent.hostname.clone(),
        sandbox_dir: paths.sandbox_dir(&intent.sandbox_id),
        exec_dir: paths.execs_dir(&intent.session_id),
        socket: intent.socket.clone(),
        id_base: intent.ids.base,
        id_count: intent.ids.count,
        cgroup: CgroupConfig {
            agent_join: files.agent,
            work_join: files.work,
            oom_file: Some(files.oom_file),
            pids_file: Some(files.pids_file),
        },
        netns: None,
        disk: match &intent.disk {
            DiskConfig::Loop { image } => DiskConfig::Loop { image: image.clone() },
            DiskConfig::Directory { path } => DiskConfig::Directory { path: path.clone() },
            DiskConfig::Tmpfs { bytes } => DiskConfig::Tmpfs { bytes: *bytes },
        },
        root: RootConfig::Host,
        kernel: kernel::config(intent.backend, inner.config.runsc.as_deref(), &intent.limits)?,
        env: inner.config.env.clone(),
        cwd: inner.config.cwd.clone(),
        spool_max_bytes: inner.config.spool_max_bytes,
        session_spool_max_bytes: inner.config.session_spool_max_bytes,
        execs_max: inner.config.execs_max,
        warm: paths.data_dir != inner.paths().data_dir,
        defences_off: inner.config.defences_off.clone(),
        fault_file: cloister_fault::file(),
    })
}

/// Starts the shim. Without `pre_exec` and the like the standard library uses posix_spawn, whose cost does not grow with
/// this process's memory.
fn spawn(inner: &Inner, intent: &Intent, directory: &Path, log: &Path) -> io::Result<ChildStdout> {
    let log = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(log)?;
    let mut child = Command::new(&inner.guest)
        .args(["shim", "--config"])
        .arg(directory.join(CONFIG_FILE))
        .current_dir("/")
        .env_clear()
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log)
        .spawn()?;
    let stdout = child.stdout.take().expect("standard output is piped");
    children::keep(&intent.sandbox_id, child);
    Ok(stdout)
}

/// Waits for the shim's line; on an error the caller undoes what there is.
async fn wait_for_report(
    stdout: ChildStdout,
    log: &Path,
) -> Result<(Vec<IsolationFact>, Vec<StepTiming>), SandboxError> {
    match tokio::time::timeout(REPORT_DEADLINE, read_report(stdout)).await {
        Ok(Ok(Some(ShimReport::Ready { facts, timings }))) => {
            let facts = facts.into_iter().map(|(name, value)| IsolationFact { name, value }).collect();
            let timings = timings
                .into_iter()
                .map(|(step, micros)| StepTiming { step, elapsed: Duration::from_micros(micros) })
                .collect();
            Ok((facts, timings))
        }
        Ok(Ok(Some(ShimReport::Failed { step, message }))) => {
            Err(SandboxError::failed(format!("sandbox step `{step}`"), message))
        }
        Ok(Ok(None)) => {
            let message = format!("the shim ended without a word{}", tail(log));
            Err(SandboxError::failed("start the sandbox", message))
        }
        Ok(Err(error)) => Err(SandboxError::failed("read the shim's line", error)),
        Err(_) => {
            let seconds = REPORT_DEADLINE.as_secs();
            let message = format!("the shim said nothing within {seconds} s{}", tail(log));
            Err(SandboxError::failed("start the sandbox", message))
        }
    }
}

async fn read_report(stdout: ChildStdout) -> io::Result<Option<ShimReport>> {
    let stdout = pipe::Receiver::from_owned_fd(OwnedFd::from(stdout))?;
    let mut line = String::new();
    let count = BufReader::new(stdout.take(REPORT_MAX_BYTES)).read_line(&mut line).await?;
    if count == 0 {
        return Ok(None);
    }
    serde_json::from_str(&line).map(Some).map_err(io::Error::from)
}

/// Returns the end of what a shim wrote to its log, ready to be put behind a message.
fn tail(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let text = text.trim();
    let skip = text.chars().count().saturating_sub(LOG_TAIL_CHARS);
    let end: String = text.chars().skip(skip).collect();
    if end.is_empty() { String::new() } else { format!(": {end}") }
}
