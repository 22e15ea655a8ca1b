//! A "sandbox" that isolates nothing: the guest agent as a plain child, so that everything but the isolation can be
//! tested without privileges. Not in release builds.

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixListener;
use std::process::{Command, Stdio};

use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, PidfdFlags};

use super::config::ShimConfig;
use crate::build::StartedSandbox;
use crate::harden::{AgentConfig, GuestKernel};

/// Starts this program's `agent` mode without any defence.
pub(super) fn start(config: &ShimConfig) -> io::Result<StartedSandbox> {
    let guest_socket = config.sandbox_dir.join("guest.sock");
    let listener = OwnedFd::from(UnixListener::bind(&guest_socket)?);
    // As the builder does it: high, and inherited.
    let inherited = rustix::io::fcntl_dupfd_cloexec(&listener, 100)?;
    rustix::io::fcntl_setfd(&inherited, rustix::io::FdFlags::empty())?;
    let agent = AgentConfig {
        sandbox_id: config.sandbox_id.clone(),
        listener_fd: inherited.as_raw_fd(),
        work_join_fds: Vec::new(),
        process_count_fds: None,
        env: config.env.clone(),
        cwd: config.cwd.clone(),
        id_count: config.id_count,
        kernel: GuestKernel::Host,
        defences_off: Vec::new(),
    };
    let file = config.sandbox_dir.join("agent.json");
    std::fs::write(&file, serde_json::to_vec(&agent)?)?;
    let mut child = Command::new("/proc/self/exe");
    let child = child
        .arg("agent")
        .arg("--unhardened")
        .arg(&file)
        .stdin(Stdio::null())
        // The report has one writer: its reader waits for the end.
        .stdout(Stdio::null())
        .spawn()?;
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidData)?;
    let layer = rustix::fs::open(&config.sandbox_dir, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    Ok(StartedSandbox {
        pid,
        pidfd: rustix::process::pidfd_open(pid, PidfdFlags::empty())?,
        guest_socket,
        layer_fd: layer,
        shares_name: false,
        timings: Vec::new(),
    })
}
