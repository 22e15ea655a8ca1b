//! Pid 1 of a gVisor sandbox: its configuration is a file, its listener and its limit on processes are its own to make.
//!
//! The kernel here is the sentry's. It has no Landlock; everything else of [`crate::harden`] it takes like the host's,
//! and our system call filter is needed: without it programs could make user namespaces and mounts inside.

use std::fs;
use std::os::fd::{AsRawFd as _, IntoRawFd as _, OwnedFd, RawFd};
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, mount_remount, unmount};
use serde::{Deserialize, Serialize};

use super::{AgentError, Hardening, run};
use crate::harden::{self, AgentConfig, CONFIG_FD};
use crate::shim::config::Defence;

/// Where the sentry shows its own control groups.
const CGROUPS: &str = "/sys/fs/cgroup";

/// What pid 1 of a gVisor sandbox reads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SentryConfig {
    /// As for any sandbox; its descriptors are filled in here.
    pub(crate) agent: AgentConfig,
    /// Where to listen.
    pub(crate) socket: PathBuf,
    /// Most processes of the work.
    pub(crate) pids: u32,
}

/// Serves as pid 1 of a gVisor sandbox until a stop. Returns only on an error.
///
/// # Errors
///
/// [`AgentError`]: nothing was accepted, and the process must exit.
pub fn run_on_sentry(path: &Path) -> Result<std::convert::Infallible, AgentError> {
    run(harden_on_sentry(path)?, Hardening::Full)
}

/// Prepares what the builder of a `namespace` sandbox leaves, and hardens this process.
///
/// # Errors
///
/// [`AgentError`]: the process must exit.
pub fn harden_on_sentry(path: &Path) -> Result<AgentConfig, AgentError> {
    let bytes = fs::read(path).map_err(AgentError::start("read the configuration"))?;
    let config: SentryConfig = serde_json::from_slice(&bytes)
        .map_err(std::io::Error::from)
        .map_err(AgentError::start("read the configuration"))?;
    let mut agent = config.agent;
    harden::check_defences_off(&agent.defences_off)
        .map_err(|errno| AgentError::start("leave defences off")(errno.into()))?;
    if !agent.defences_off.contains(&Defence::PidsCgroup) {
        let (join, counts) = limit_processes(config.pids).map_err(AgentError::start("limit processes"))?;
        agent.work_join_fds = vec![join];
        agent.process_count_fds = Some(counts);
    }
    make_run_lock().map_err(AgentError::start("make `/run/lock`"))?;
    open_devices().map_err(|errno| AgentError::start("open devices")(errno.into()))?;
    cover_control_groups().map_err(|errno| AgentError::start("cover control groups")(errno.into()))?;
    harden::become_agent_user()?;
    // As its own user, so that nobody else in the sandbox may touch it.
    agent.listener_fd = listen(&config.socket).map_err(AgentError::start("listen"))?;
    harden::pid1_apply(&agent)?;
    harden::prepare_exec(&agent, 0, 0, &[])?;
    Ok(agent)
}

fn make_run_lock() -> std::io::Result<()> {
    let lock = Path::new("/run/lock");
    match fs::DirBuilder::new().mode(0o1777).create(lock) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => Err(error),
        _ => fs::set_permissions(lock, fs::Permissions::from_mode(0o1777)),
    }
}

/// Makes the work's group among the sentry's own, and returns the descriptor by which a process joins it, and those of how
/// many are in it and may be.
fn limit_processes(pids: u32) -> std::io::Result<(RawFd, (RawFd, RawFd))> {
    let group = Path::new(CGROUPS).join("pids/work");
    fs::create_dir(&group)?;
    fs::write(group.join("pids.max"), pids.to_string())?;
    let join = fs::OpenOptions::new().write(true).open(group.join("cgroup.procs"))?;
    let count = |name: &str| park(fs::File::open(group.join(name))?.into());
    Ok((park(join.into())?, (count("pids.current")?, count("pids.max")?)))
}

/// Makes `/dev` writable where nothing could be written to a device otherwise: the gVisor of 2024 takes a read-only mount for
/// one of its devices too. What root inside does to the nodes then, it does to its own programs.
fn open_devices() -> Result<(), Errno> {
    match rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
        Err(Errno::ROFS) => mount_remount("/dev", MountFlags::NOSUID, ""),
        other => other.map(drop),
    }
}

/// Takes the control groups away: root inside could raise its limit, or leave. The open descriptor goes on working.
fn cover_control_groups() -> Result<(), Errno> {
    unmount(Path::new(CGROUPS).join("pids"), UnmountFlags::DETACH)?;
    mount("none", CGROUPS, "tmpfs", MountFlags::RDONLY, None)
}

fn listen(socket: &Path) -> std::io::Result<RawFd> {
    // Of an earlier sandbox of the session.
    match fs::remove_file(socket) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(socket)?;
    fs::set_permissions(socket, fs::Permissions::from_mode(0o600))?;
    park(listener.into())
}

/// Moves a descriptor above what an exec uses, where the configuration has its descriptors.
fn park(fd: OwnedFd) -> std::io::Result<RawFd> {
    let parked = rustix::io::fcntl_dupfd_cloexec(&fd, CONFIG_FD + 1)?;
    debug_assert!(parked.as_raw_fd() > CONFIG_FD);
    // Whoever takes it by its number owns it from then on.
    Ok(parked.into_raw_fd())
}
