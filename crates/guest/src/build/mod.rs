//! Builds one sandbox and starts its pid 1, behind namespaces as below or on gVisor ([`gvisor`]): everything between a
//! [`ShimConfig`] and a guest agent that runs.
//!
//! ```text
//!   shim, host root                                  child
//!   ── open cgroup files, executable, listener
//!   ── join or make the network namespace
//!   ── own mount namespace, private; own uts namespace, so that the name can be set later
//!   ── layer: loop device → ext4 → mount             (autoclear: goes with the namespace)
//!   ── root: tmpfs, /usr, layer, /etc, /dev
//!   ── clone3(pid, mount, ipc)                  ──▶  join the agent's cgroup, /proc with masks
//!                                                    pivot_root, detach the host's root
//!                                                    unshare(user, mount, cgroup): the tree is now locked
//!   ── write uid_map, gid_map                   ◀─▶  the agent's own user; dies with the shim
//!   ── end of file on the link: exec'd          ◀──  execveat(this program, "agent")
//! ```
//!
//! Invariants:
//!
//! - The mount tree, `/proc` and its masks included, is complete before the user namespace exists. Process, ipc, uts and
//!   network namespaces belong to the host's user namespace, so that root inside has no capability over any of them.
//! - Nothing needs undoing: mounts and loop device live in namespaces that end with their processes, and the child dies
//!   with the shim. Only the listener's file and two empty mount points are names on the host.
//! - No step is optional. A kernel that lacks something makes an error that names the step.
//!
//! The calling process must have one thread: the child is a raw clone, and `unshare` acts on the calling thread only.

#![expect(unsafe_code, reason = "clone3 and unshare have no safe wrappers")]

mod child;
mod error;
pub(crate) mod gvisor;
pub(crate) mod layer;
mod link;
mod loop_device;
mod mounts;
mod network;
mod proc_mount;
mod process;
mod root;

use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{CWD, MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, memfd_create, open, unlinkat};
use rustix::io::Errno;
use rustix::mount::{MountPropagationFlags, UnmountFlags, mount_change, unmount};
use rustix::process::{Pid, chdir};
use rustix::thread::{Gid, Uid, UnshareFlags, unshare_unsafe};

pub use self::error::BuildError;
use self::error::StepContext;
use crate::etc;
use crate::fault::POINTS;
use crate::harden::{self, AgentConfig, CONFIG_FD, GuestKernel};
use crate::shim::config::{Defence, KernelConfig, ShimConfig};

/// Number at which pid 1 finds its listener; its cgroup files follow.
const LISTENER_FD: RawFd = CONFIG_FD + 1;
/// Longest path that fits a unix address.
const SOCKET_PATH_MAX_BYTES: usize = 107;

/// A sandbox whose pid 1 has been started in mode `agent`.
#[derive(Debug)]
pub struct StartedSandbox {
    /// Pid 1, as the shim sees it; its child, to be reaped by the shim.
    pub pid: Pid,
    /// The same process as a pidfd (close-on-exec).
    pub pidfd: OwnedFd,
    /// Where the guest agent listens. Bound by the builder, so that a dial may come at once; on gVisor the agent binds it
    /// itself, a little later.
    pub guest_socket: PathBuf,
    /// Root directory of the writable layer, for `fstatvfs`.
    pub layer_fd: OwnedFd,
    /// The calling process has the sandbox's own name, and can change it.
    pub shares_name: bool,
    /// Step and wall time, in order.
    pub timings: Vec<(String, Duration)>,
}

/// Builds the sandbox of `config` and starts its pid 1.
///
/// Call as host root, single-threaded, before any async runtime, at most once in a process: the calling process moves
/// to its own mount namespace and to the sandbox's network namespace. Keep the process alive: pid 1 dies with it.
///
/// # Errors
///
/// The step that failed; processes, mounts and loop devices of the attempt are gone by then.
pub fn build_and_start(config: &ShimConfig) -> Result<StartedSandbox, BuildError> {
    check(config)?;
    check_single_thread()?;
    let mut timer = StepTimer::start();
    let mount_points = MountPoints::new(&config.sandbox_dir)?;
    let guest_socket = config.guest_socket();
    let result = build(config, &mount_points, &guest_socket, &mut timer);
    if result.is_err() {
        mount_points.clear();
        if config.kernel != KernelConfig::Host {
            gvisor::clear(&config.sandbox_dir);
        }
        // Its absence is what was wanted.
        let _ = unlinkat(CWD, &guest_socket, rustix::fs::AtFlags::empty());
    }
    let (child, layer_fd) = result?;
    POINTS.reach("shim_after_pid_1");
    Ok(StartedSandbox {
        pid: child.pid,
        pidfd: child.pidfd,
        guest_socket,
        layer_fd,
        shares_name: config.kernel == KernelConfig::Host,
        timings: timer.steps,
    })
}

fn build(
    config: &ShimConfig,
    mount_points: &MountPoints,
    guest_socket: &Path,
    timer: &mut StepTimer,
) -> Result<(process::ChildProcess, OwnedFd), BuildError> {
    let is_off = |defence| config.defences_off.contains(&defence);
    let executable = open("/proc/self/exe", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .step_at("open own executable", "/proc/self/exe")?;
    let null = open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        .step_at("open null device", "/dev/null")?;
    let process_count = open_process_count(config)?;
    let agent_join = open_join_files(config, &config.cgroup.agent_join)?;
    let work_join = open_join_files(config, &config.cgroup.work_join)?;
    timer.done("open");

    if !is_off(Defence::NetworkNamespace) {
        network::join(config.netns.as_deref())?;
        timer.done("network");
    }

    // SAFETY: only CLONE_FILES makes unsharing unsafe; the process has one thread.
    // JUSTIFICATION: rustix marks the whole call unsafe.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS | UnshareFlags::NEWUTS) }.step("make mount namespace")?;
    // Nothing of ours gets out; what the host unmounts goes here as well, so that no sandbox keeps its filesystems in use.
    mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)
        .step("make mounts private")?;
    timer.done("mount_namespace");
    POINTS.reach("shim_after_mount_namespace");

    let layer_fd = layer::mount(config, &mount_points.layer)?;
    timer.done("layer");
    POINTS.reach("shim_after_layer");
    layer::ensure_content(layer_fd.as_fd(), config)?;
    timer.done("layer_content");
    let root = root::build(config, &mount_points.root, layer_fd.as_fd())?;
    timer.done("root");
    POINTS.reach("shim_after_root");

    if let KernelConfig::Gvisor { runsc, memory_bytes, pids } = &config.kernel {
        let gvisor = gvisor::Gvisor {
            runsc,
            memory_bytes: *memory_bytes,
            pids: *pids,
            own_join: agent_join,
            join: work_join,
        };
        let keeper = gvisor::start(gvisor, config, &mount_points.root, timer)?;
        return Ok((keeper, layer_fd));
    }
    let listener = bind_listener(guest_socket)?;
    let (agent_config, mut inherited) = agent_config(config, &work_join, process_count.as_ref())?;
    inherited.push((listener.as_fd(), LISTENER_FD));
    inherited.push((agent_config.as_fd(), CONFIG_FD));
    let (link, child_link) = link::pair().step("make link to child")?;
    rustix::process::fchdir(root.as_fd()).step("enter root")?;
    let plan = child::ChildPlan {
        link: child_link,
        executable,
        null,
        agent_join,
        inherited,
        hostname: &config.hostname,
        id_base: config.id_base,
        defences_off: &config.defences_off,
    };
    let started = process::start(plan, link, config, timer);
    chdir("/").step("leave root")?;
    Ok((started?, layer_fd))
}

/// Refuses what could only give a weaker or a broken sandbox.
fn check(config: &ShimConfig) -> Result<(), BuildError> {
    harden::check_defences_off(&config.defences_off)
        .map_err(|errno| BuildError::new("leave defences off", errno))?;
    if !rustix::process::geteuid().is_root() {
        return Err(BuildError::new("build as root", Errno::PERM));
    }
    let reaches_nobody = config.id_count > etc::NOBODY_ID;
    let fits = config.id_base.checked_add(config.id_count).is_some_and(|end| end < u32::MAX);
    if config.id_base == 0 || !reaches_nobody || !fits {
        return Err(BuildError::new("check id range", Errno::INVAL));
    }
    if config.hostname.is_empty()
        || config.hostname.len() > 64
        || config.hostname.contains(char::is_whitespace)
    {
        return Err(BuildError::new("check hostname", Errno::INVAL));
    }
    if config.kernel == KernelConfig::Host && !config.defences_off.contains(&Defence::Landlock) {
        harden::landlock_abi().map_err(|errno| BuildError::new("require Landlock", errno))?;
    }
    Ok(())
}

/// Refuses a process with more than one thread: the child would run on a copy of locks that others hold.
fn check_single_thread() -> Result<(), BuildError> {
    const STEP: &str = "check for a single thread";
    let threads = std::fs::read_dir("/proc/self/task").step_at(STEP, "/proc/self/task")?.count();
    if threads == 1 { Ok(()) } else { Err(BuildError::new(STEP, Errno::BUSY)) }
}

/// Opens the files by which a process joins cgroups, while they can still be reached.
fn open_join_files(config: &ShimConfig, paths: &[PathBuf]) -> Result<Vec<OwnedFd>, BuildError> {
    paths
        .iter()
        .filter(|path| !is_switched_off(config, path))
        .map(|path| {
            open(path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty()).step_at("open cgroup file", path)
        })
        .collect()
}

/// Opens the files in which the work's processes and their limit are counted, if there are any.
fn open_process_count(config: &ShimConfig) -> Result<Option<[OwnedFd; 2]>, BuildError> {
    let Some(events) = config.cgroup.pids_file.as_ref().filter(|path| !is_switched_off(config, path)) else {
        return Ok(None);
    };
    let open_one = |name: &str| {
        let path = events.with_file_name(name);
        open(&path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).step_at("open cgroup file", path)
    };
    Ok(Some([open_one("pids.current")?, open_one("pids.max")?]))
}

/// Whether the hierarchy of `path` is one that a control experiment leaves off. With cgroup v2 there is one hierarchy
/// for all, and whoever makes the groups for the experiment leaves the limit away instead.
fn is_switched_off(config: &ShimConfig, path: &Path) -> bool {
    [(Defence::MemoryCgroup, "memory"), (Defence::PidsCgroup, "pids")].iter().any(|(defence, controller)| {
        config.defences_off.contains(defence)
            && path.components().any(|part| part.as_os_str().to_str() == Some(controller))
    })
}

fn bind_listener(path: &Path) -> Result<UnixListener, BuildError> {
    const STEP: &str = "bind guest socket";
    if path.as_os_str().len() > SOCKET_PATH_MAX_BYTES {
        return Err(Errno::NAMETOOLONG).step_at(STEP, path);
    }
    match unlinkat(CWD, path, rustix::fs::AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(error) => return Err(error).step_at(STEP, path),
    }
    let listener = UnixListener::bind(path).step_at(STEP, path)?;
    rustix::fs::chmod(path, Mode::RUSR | Mode::WUSR).step_at(STEP, path)?;
    Ok(listener)
}

/// Returns the sealed configuration of pid 1, and where its cgroup files go.
fn agent_config<'a>(
    config: &ShimConfig,
    work_join: &'a [OwnedFd],
    process_count: Option<&'a [OwnedFd; 2]>,
) -> Result<(OwnedFd, Vec<(std::os::fd::BorrowedFd<'a>, RawFd)>), BuildError> {
    const STEP: &str = "write agent config";
    let files = work_join.iter().chain(process_count.into_iter().flatten());
    let inherited: Vec<_> =
        files.zip(LISTENER_FD + 1..).map(|(file, number)| (file.as_fd(), number)).collect();
    let numbers: Vec<RawFd> = inherited.iter().map(|(_, number)| *number).collect();
    let (work_join_fds, counts) = numbers.split_at(work_join.len());
    let agent = AgentConfig {
        sandbox_id: config.sandbox_id.clone(),
        listener_fd: LISTENER_FD,
        work_join_fds: work_join_fds.to_vec(),
        process_count_fds: counts.first().copied().zip(counts.get(1).copied()),
        env: config.env.clone(),
        cwd: config.cwd.clone(),
        id_count: config.id_count,
        kernel: GuestKernel::Host,
        defences_off: config.defences_off.clone(),
    };
    let file =
        memfd_create("cloister-agent-config", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).step(STEP)?;
    let json = serde_json::to_vec(&agent).map_err(|_| BuildError::new(STEP, Errno::INVAL))?;
    std::io::Write::write_all(&mut std::fs::File::from(file.try_clone().step(STEP)?), &json).step(STEP)?;
    let seals = SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
    fcntl_add_seals(file.as_fd(), seals).step(STEP)?;
    Ok((file, inherited))
}

/// Returns the host ids of the sandbox's user and group `id`.
pub(crate) fn owner(id_base: u32, id: u32) -> (Uid, Gid) {
    let id = id_base.saturating_add(id);
    (Uid::from_raw(id), Gid::from_raw(id))
}

/// Where the shim mounts; visible in its own mount namespace only.
struct MountPoints {
    layer: PathBuf,
    root: PathBuf,
}

impl MountPoints {
    fn new(sandbox_dir: &Path) -> Result<Self, BuildError> {
        let points = Self { layer: sandbox_dir.join("layer"), root: sandbox_dir.join("root") };
        for point in [&points.layer, &points.root] {
            match rustix::fs::mkdir(point, Mode::RWXU) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(error).step_at("make mount point", point),
            }
        }
        Ok(points)
    }

    /// Takes away what a failed build has mounted so far. In the shim's namespace only, so that a failure before that
    /// existed finds nothing to take away and must not touch the host's.
    fn clear(&self) {
        for point in [&self.root, &self.layer] {
            // Not mounted is what was wanted.
            let _ = unmount(point, UnmountFlags::DETACH);
            let _ = rustix::fs::rmdir(point);
        }
    }
}

/// Wall time of each step since the last.
#[derive(Debug)]
struct StepTimer {
    last: Instant,
    steps: Vec<(String, Duration)>,
}

impl StepTimer {
    fn start() -> Self {
        Self { last: Instant::now(), steps: Vec::new() }
    }

    fn done(&mut self, step: &str) {
        self.steps.push((step.to_owned(), self.last.elapsed()));
        self.last = Instant::now();
    }

    fn add(&mut self, step: String, elapsed: Duration) {
        self.steps.push((step, elapsed));
        self.last = Instant::now();
    }
}
