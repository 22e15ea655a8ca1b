//! Proves promise 3 for one host: after sandboxes were made, used and killed in every way, the kernel's state and the
//! directories are what they were. The comparison asks the kernel, never our own records.
#![cfg(debug_assertions)]
#![expect(clippy::print_stdout, reason = "a skipped test says so")]

use std::collections::BTreeSet;
use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cloister_sandbox::conformance::clean_up;
use cloister_sandbox::local::{LocalBackend, LocalConfig};
use cloister_sandbox::{Backend, Created, HostPaths, SandboxSpec};
use cloister_types::session::Reason;
use cloister_types::{BackendKind, ByteCount, CpuMillis, ExecId, ExecSpec, Limits, SandboxId, SessionId};
use rustix::process::{Pid, PidfdFlags, Signal};

const PATIENCE: Duration = Duration::from_secs(20);

/// Everything of the kernel that a sandbox takes and that names this test's directory, instance or processes.
#[derive(Debug, Clone, PartialEq, Eq)]
struct KernelState {
    processes: BTreeSet<String>,
    groups: BTreeSet<PathBuf>,
    mounts: BTreeSet<String>,
    namespaces: usize,
    loops: BTreeSet<String>,
    sockets: BTreeSet<String>,
    files: BTreeSet<PathBuf>,
}

/// What to look for: this test's own things among those of others that run at the same time.
struct Sweep {
    root: PathBuf,
    instance: String,
    /// Every sandbox that was made.
    made: Vec<SandboxId>,
}

impl Sweep {
    fn look(&self) -> KernelState {
        let root = self.root.display().to_string();
        let mut processes = BTreeSet::new();
        let mut namespaces = BTreeSet::new();
        let mut mounts = BTreeSet::new();
        for entry in fs::read_dir("/proc").expect("read /proc").flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
                continue;
            };
            let text = |file: &str| fs::read(entry.path().join(file)).unwrap_or_default();
            let command_line = String::from_utf8_lossy(&text("cmdline")).replace('\0', " ");
            let status = String::from_utf8_lossy(&text("status")).into_owned();
            let groups = String::from_utf8_lossy(&text("cgroup")).into_owned();
            let parent = format!("PPid:\t{}\n", std::process::id());
            let is_child = status.contains(&parent);
            let is_member =
                groups.contains(&self.instance) || self.made.iter().any(|id| groups.contains(id.as_str()));
            // A zombie has neither command line nor group, and is somebody's child.
            if is_child || is_member || (command_line.contains(&root) && pid != std::process::id()) {
                let state = status.lines().find(|line| line.starts_with("State")).unwrap_or("State: gone");
                processes.insert(format!("{pid} {command_line} {state}"));
                if let Ok(link) = fs::read_link(entry.path().join("ns/net")) {
                    namespaces.insert(link);
                }
            }
            let table = String::from_utf8_lossy(&text("mountinfo")).into_owned();
            mounts.extend(table.lines().filter(|line| line.contains(&root)).map(str::to_owned));
        }
        KernelState {
            processes,
            groups: groups_of(&self.instance),
            mounts,
            namespaces: namespaces.len(),
            loops: loops_below(&self.root),
            sockets: fs::read_to_string("/proc/net/unix")
                .expect("read the table of sockets")
                .lines()
                .filter(|line| line.contains(&root))
                .map(str::to_owned)
                .collect(),
            files: files_below(&self.root),
        }
    }

    /// Waits until the kernel's state is `expected`, and fails with what is left.
    async fn expect(&self, what: &str, expected: &KernelState) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let state = self.look();
            if state == *expected {
                return;
            }
            assert!(Instant::now() < deadline, "after {what}:\n{state:#?}\nexpected:\n{expected:#?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// Returns the control groups of an instance in every hierarchy.
fn groups_of(instance: &str) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    let mut left = vec![PathBuf::from("/sys/fs/cgroup")];
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                if entry.path().to_string_lossy().contains(instance) {
                    found.insert(entry.path());
                }
                left.push(entry.path());
            }
        }
    }
    found
}

fn loops_below(root: &Path) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir("/sys/block").expect("read block devices").flatten() {
        let backing = fs::read_to_string(entry.path().join("loop/backing_file")).unwrap_or_default();
        if backing.starts_with(&root.display().to_string()) {
            found.insert(format!("{} {}", entry.path().display(), backing.trim()));
        }
    }
    found
}

fn files_below(root: &Path) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    let mut left = vec![root.to_path_buf()];
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
            found.insert(entry.path());
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                left.push(entry.path());
            }
        }
    }
    found
}

/// One test at a time: each looks at all children of this process.
static ALONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

struct Host {
    _alone: tokio::sync::MutexGuard<'static, ()>,
    config: LocalConfig,
    sweep: Sweep,
    before: KernelState,
    _directory: tempfile::TempDir,
}

impl Drop for Host {
    fn drop(&mut self) {
        clean_up(&self.config.paths);
    }
}

impl Host {
    /// Returns a host that has made one sandbox before, so that what is made once per host is there; `None`, after
    /// saying so, where there can be none.
    async fn new() -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            println!("SKIP: the namespace backend needs root");
            return None;
        }
        let alone = ALONE.lock().await;
        let directory = tempfile::tempdir().expect("make a temporary directory");
        let root = fs::canonicalize(directory.path()).expect("resolve the temporary directory");
        let paths = HostPaths { data_dir: root.join("data"), run_dir: root.join("run") };
        let config = LocalConfig::new(paths.clone());
        let backend = open(&config);
        let instance = format!("cloister-{}", paths.instance().expect("name the instance"));
        let mut sweep = Sweep { root, instance, made: Vec::new() };
        let warm = create(&backend, &mut sweep).await;
        backend.remove(&warm.sandbox.spec().session_id).await.expect("remove the first session");
        drop(warm);
        drop(backend);
        let before = sweep.look();
        assert!(
            before.processes.is_empty() && before.groups.is_empty() && before.mounts.is_empty(),
            "{before:#?}"
        );
        assert!(before.loops.is_empty() && before.sockets.is_empty(), "{before:#?}");
        Some(Self { _alone: alone, config, sweep, before, _directory: directory })
    }
}

fn open(config: &LocalConfig) -> LocalBackend {
    LocalBackend::open(config.clone()).expect("open the backend")
}

fn spec() -> SandboxSpec {
    SandboxSpec {
        session_id: SessionId::generate(),
        sandbox_id: SandboxId::generate(),
        backend: BackendKind::Namespace,
        image: "host".to_owned(),
        limits: Limits {
            memory: ByteCount::mib(64),
            cpus: CpuMillis(1000),
            pids: 64,
            disk: ByteCount::mib(32),
        },
        hostname: "leaks".to_owned(),
    }
}

async fn create(backend: &LocalBackend, sweep: &mut Sweep) -> Created {
    let spec = spec();
    sweep.made.push(spec.sandbox_id.clone());
    backend.create(&spec).await.expect("create a sandbox")
}

async fn start_work(created: &Created) {
    for script in [
        "sleep 600",
        "sh -c 'sleep 600' & (setsid sleep 600 &) ; sleep 600",
        "head -c 5M /dev/zero > /workspace/f; sleep 600",
    ] {
        let exec_id = ExecId::generate();
        let argv = ["sh", "-c", script].map(str::to_owned).to_vec();
        let spec = ExecSpec { argv, ..ExecSpec::default() };
        created.sandbox.start_exec(&exec_id, exec_id.as_str(), &spec).await.expect("start work");
    }
}

fn kill(pid: i32) {
    let pid = Pid::from_raw(pid).expect("a process number");
    let pinned = rustix::process::pidfd_open(pid, PidfdFlags::empty()).expect("the process is there");
    rustix::process::pidfd_send_signal(pinned.as_fd(), Signal::KILL).expect("kill it");
}

/// Returns the process of a sandbox's shim: the one whose command line names its configuration.
fn shim_of(config: &LocalConfig, id: &SandboxId) -> i32 {
    let wanted = config.paths.sandbox_dir(id).join("shim.json").display().to_string();
    let found = fs::read_dir("/proc").expect("read /proc").flatten().find_map(|entry| {
        let command_line = fs::read(entry.path().join("cmdline")).ok()?;
        let is_shim = String::from_utf8_lossy(&command_line).split('\0').any(|argument| argument == wanted);
        is_shim.then(|| entry.file_name().to_str()?.parse().ok())?
    });
    found.expect("the shim runs")
}

/// Returns pid 1 of a sandbox: the child of its shim.
fn pid_1_of(config: &LocalConfig, id: &SandboxId) -> i32 {
    let shim = shim_of(config, id);
    let children = fs::read_to_string(format!("/proc/{shim}/task/{shim}/children")).expect("list children");
    children.split_whitespace().next().and_then(|pid| pid.parse().ok()).expect("the shim has a child")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stop_and_remove_leave_nothing() {
    let Some(mut host) = Host::new().await else { return };
    let backend = open(&host.config);
    for _ in 0..3 {
        let created = create(&backend, &mut host.sweep).await;
        start_work(&created).await;
        created.sandbox.stop(Duration::from_millis(200)).await.expect("stop");
        backend.remove(&created.sandbox.spec().session_id).await.expect("remove");
    }
    host.sweep.expect("stop and remove", &host.before).await;
    // Without a stop, and several at once.
    let mut all = Vec::new();
    for _ in 0..4 {
        let created = create(&backend, &mut host.sweep).await;
        start_work(&created).await;
        all.push(created.sandbox.spec().session_id.clone());
    }
    let removed = all.iter().map(|session_id| backend.remove(session_id));
    for result in futures::future::join_all(removed).await {
        result.expect("remove");
    }
    host.sweep.expect("removing running sandboxes", &host.before).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_sandbox_leaves_only_its_session() {
    let Some(mut host) = Host::new().await else { return };
    let backend = open(&host.config);
    let created = create(&backend, &mut host.sweep).await;
    start_work(&created).await;
    created.sandbox.stop(Duration::ZERO).await.expect("stop");
    let mut state = host.sweep.look();
    let session_dir = host.config.paths.session_dir(&created.sandbox.spec().session_id);
    assert!(state.files.contains(&session_dir.join("layer.img")), "the layer is not kept");
    state.files.retain(|path| !path.starts_with(&session_dir));
    assert_eq!(state, host.before);
    backend.remove(&created.sandbox.spec().session_id).await.expect("remove");
    host.sweep.expect("the removal", &host.before).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_shim_takes_its_sandbox_with_it() {
    let Some(mut host) = Host::new().await else { return };
    let backend = open(&host.config);
    let created = create(&backend, &mut host.sweep).await;
    start_work(&created).await;
    let spec = created.sandbox.spec().clone();
    kill(shim_of(&host.config, &spec.sandbox_id));
    let gone = tokio::time::timeout(PATIENCE, created.sandbox.wait_gone()).await.expect("the end is noticed");
    assert_eq!((gone.reason, &gone.sandbox_id), (Reason::SandboxGone, &spec.sandbox_id));
    let execs = backend.ended_execs(&spec.session_id).await.expect("list execs");
    assert_eq!(execs.len(), 3);
    assert!(execs.iter().all(|exec| exec.exit.is_some()), "an exec of a dead sandbox has no exit");
    backend.remove(&spec.session_id).await.expect("remove");
    host.sweep.expect("kill -9 of the shim", &host.before).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_pid_1_ends_the_sandbox() {
    let Some(mut host) = Host::new().await else { return };
    let backend = open(&host.config);
    let created = create(&backend, &mut host.sweep).await;
    start_work(&created).await;
    let spec = created.sandbox.spec().clone();
    kill(pid_1_of(&host.config, &spec.sandbox_id));
    let gone = tokio::time::timeout(PATIENCE, created.sandbox.wait_gone()).await.expect("the end is noticed");
    assert_eq!(gone.reason, Reason::SandboxGone, "{}", gone.message);
    backend.remove(&spec.session_id).await.expect("remove");
    host.sweep.expect("kill -9 of pid 1", &host.before).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backend_that_went_away_is_cleaned_up_after_by_the_next() {
    let Some(mut host) = Host::new().await else { return };
    let backend = open(&host.config);
    let (running, dead) = (create(&backend, &mut host.sweep).await, create(&backend, &mut host.sweep).await);
    start_work(&running).await;
    start_work(&dead).await;
    let (running, dead) = (running.sandbox.spec().clone(), dead.sandbox.spec().clone());
    drop(backend);
    kill(shim_of(&host.config, &dead.sandbox_id));
    let next = open(&host.config);
    // What is foreign to this data directory's intents stays as it is.
    let foreign = host.config.paths.sandboxes_dir().join("not-a-sandbox");
    fs::create_dir(&foreign).expect("make a foreign directory");
    let (adopted, gone) = next.adopt().await.expect("adopt");
    assert!(foreign.exists());
    fs::remove_dir(&foreign).expect("remove the foreign directory");
    let adopted: Vec<_> = adopted.iter().map(|sandbox| sandbox.spec().clone()).collect();
    assert_eq!(adopted, std::slice::from_ref(&running));
    let gone: Vec<_> = gone.into_iter().map(|gone| (gone.sandbox_id, gone.reason)).collect();
    assert_eq!(gone, [(dead.sandbox_id.clone(), Reason::SandboxGone)]);
    next.remove(&running.session_id).await.expect("remove what was adopted");
    next.remove(&dead.session_id).await.expect("remove what was reaped");
    host.sweep.expect("adoption and removal", &host.before).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_create_that_is_given_up_or_fails_leaves_nothing() {
    let Some(mut host) = Host::new().await else { return };
    let backend = open(&host.config);
    for micros in [50, 500, 1_500, 3_000, 6_000, 12_000] {
        let spec = spec();
        host.sweep.made.push(spec.sandbox_id.clone());
        // The caller goes away at some moment; when it was too late, the sandbox is there.
        let _ = tokio::time::timeout(Duration::from_micros(micros), backend.create(&spec)).await;
        backend.remove(&spec.session_id).await.expect("remove");
    }
    host.sweep.expect("creates that were given up", &host.before).await;
    // A guest that cannot be started.
    let spec = spec();
    let guest = fs::read_dir(host.config.paths.data_dir.join("bin"))
        .expect("list")
        .flatten()
        .next()
        .expect("a guest")
        .path();
    let aside = guest.with_extension("aside");
    fs::rename(&guest, &aside).expect("move the guest away");
    assert!(backend.create(&spec).await.is_err(), "a sandbox without a guest");
    fs::rename(&aside, &guest).expect("move the guest back");
    host.sweep.expect("a create that failed", &host.before).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_probe_proves_the_backend_and_leaves_only_its_record() {
    let Some(host) = Host::new().await else { return };
    let backend = open(&host.config);
    let capabilities = backend.probe(BackendKind::Namespace).await;
    let first = capabilities.first().expect("the backend itself");
    assert_eq!(first.name, "backend.namespace");
    assert!(first.is_ok(), "{capabilities:#?}");
    for name in ["cgroup.memory", "cgroup.cpu", "cgroup.pids", "landlock", "seccomp"] {
        assert!(capabilities.iter().any(|one| one.name == name && one.is_ok()), "{name}: {capabilities:#?}");
    }
    assert_eq!(
        open(&host.config).probe(BackendKind::Namespace).await,
        capabilities,
        "the outcome is not kept"
    );
    let mut expected = host.before.clone();
    expected.files.insert(host.config.paths.data_dir.join("probe-namespace.json"));
    // The probe's layer has a size of its own.
    expected.files.extend(
        host.sweep.look().files.into_iter().filter(|path| path.to_string_lossy().contains("/templates/")),
    );
    host.sweep.expect("the probe", &expected).await;
}
