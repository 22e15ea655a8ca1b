//! Clones the child, writes its id maps when it asks, and waits until it has exec'd.

#![expect(unsafe_code, reason = "clone3 has no safe wrapper")]

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, pidfd_send_signal, waitid};

use super::StepTimer;
use super::child::ChildPlan;
use super::error::{BuildError, StepContext};
use super::gvisor::keeper;
use super::link::{self, ChildMessage};
use super::mounts::last_errno;
use crate::shim::config::{Defence, ShimConfig};

/// A child that has exec'd the guest agent.
#[derive(Debug)]
pub(super) struct ChildProcess {
    pub(super) pid: Pid,
    pub(super) pidfd: OwnedFd,
}

/// Clones the child, lets it run `plan`, and returns when it has become the guest agent.
///
/// # Errors
///
/// The child's failing step or our own; the child is dead and reaped by then.
pub(super) fn start(
    plan: ChildPlan<'_>,
    link: OwnedFd,
    config: &ShimConfig,
    timer: &mut StepTimer,
) -> Result<ChildProcess, BuildError> {
    let mut flags = libc::CLONE_NEWNS | libc::CLONE_NEWIPC | libc::CLONE_PIDFD;
    if !config.defences_off.contains(&Defence::PidNamespace) {
        flags |= libc::CLONE_NEWPID;
    }
    let Some(child) = clone_process(flags).step("clone pid 1")? else {
        // The child's copy of the shim's end would hide the shim's death from it.
        drop(link);
        plan.run()
    };
    drop(plan);
    timer.done("clone");
    match follow(&child, &link, config, timer) {
        Ok(()) => Ok(child),
        Err(error) => {
            end(&child);
            Err(error)
        }
    }
}

/// Clones the keeper of a gVisor sandbox, and returns when that runs.
///
/// # Errors
///
/// The keeper's failing step or our own; the keeper is dead and reaped by then, and everything in its namespace with it.
pub(super) fn start_keeper(
    plan: keeper::Plan<'_>,
    link: OwnedFd,
    timer: &mut StepTimer,
) -> Result<ChildProcess, BuildError> {
    let flags = libc::CLONE_NEWNS | libc::CLONE_NEWPID | libc::CLONE_PIDFD;
    let Some(child) = clone_process(flags).step("clone the keeper")? else {
        // The child's copy of the shim's end would hide the shim's death from it.
        drop(link);
        plan.run()
    };
    drop(plan);
    timer.done("clone");
    match follow_keeper(&link, timer) {
        Ok(()) => Ok(child),
        Err(error) => {
            end(&child);
            Err(error)
        }
    }
}

fn follow_keeper(link: &OwnedFd, timer: &mut StepTimer) -> Result<(), BuildError> {
    loop {
        match link::hear(link.as_fd()).step("hear from the keeper")? {
            Some(ChildMessage::Step { step, elapsed_ns }) => {
                timer.add(step, Duration::from_nanos(elapsed_ns))
            }
            Some(ChildMessage::Started) => return Ok(()),
            Some(ChildMessage::Failed { step, path, errno }) => {
                return Err(BuildError {
                    step,
                    path: path.map(Into::into),
                    source: Errno::from_raw_os_error(errno),
                });
            }
            Some(ChildMessage::NeedsMaps) => return Err(Errno::BADMSG).step("hear from the keeper"),
            None => return Err(Errno::CHILD).step("start runsc"),
        }
    }
}

/// Ends a child that is of no use. It may have exited by itself already; either way it is gone after the wait.
fn end(child: &ChildProcess) {
    let _ = pidfd_send_signal(child.pidfd.as_fd(), Signal::KILL);
    while let Err(Errno::INTR) = waitid(WaitId::PidFd(child.pidfd.as_fd()), WaitIdOptions::EXITED) {}
}

fn follow(
    child: &ChildProcess,
    link: &OwnedFd,
    config: &ShimConfig,
    timer: &mut StepTimer,
) -> Result<(), BuildError> {
    let mut is_mapped = false;
    loop {
        match link::hear(link.as_fd()).step("hear from child")? {
            Some(ChildMessage::Step { step, elapsed_ns }) => {
                timer.add(step, Duration::from_nanos(elapsed_ns));
            }
            Some(ChildMessage::NeedsMaps) => {
                if !config.defences_off.contains(&Defence::UserNamespace) {
                    write_maps(child.pid, config)?;
                }
                link::release(link.as_fd()).step("release child")?;
                is_mapped = true;
                timer.done("id_maps");
            }
            Some(ChildMessage::Started) => return Err(Errno::BADMSG).step("hear from child"),
            Some(ChildMessage::Failed { step, path, errno }) => {
                return Err(BuildError {
                    step,
                    path: path.map(Into::into),
                    source: Errno::from_raw_os_error(errno),
                });
            }
            None if is_mapped && !has_exited(child) => {
                timer.done("exec");
                return Ok(());
            }
            // Killed before it could say anything: by the memory limit of its cgroup, or by somebody.
            None => return Err(Errno::CHILD).step("start guest agent"),
        }
    }
}

fn has_exited(child: &ChildProcess) -> bool {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    !matches!(waitid(WaitId::PidFd(child.pidfd.as_fd()), options), Ok(None))
}

/// Maps ids `0..id_count` inside to the sandbox's own range. Written by host root, so `setgroups` stays allowed.
fn write_maps(pid: Pid, config: &ShimConfig) -> Result<(), BuildError> {
    let map = format!("0 {} {}\n", config.id_base, config.id_count);
    for name in ["uid_map", "gid_map"] {
        let path = format!("/proc/{}/{name}", pid.as_raw_nonzero());
        std::fs::write(&path, &map).step_at("write id map", &path)?;
    }
    Ok(())
}

/// `struct clone_args` of clone3(2), its first version with 64 bytes.
#[repr(C)]
#[derive(Default)]
struct CloneArgs {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
}

/// Clones this process like `fork`, with `flags`. Returns `None` in the child.
fn clone_process(flags: libc::c_int) -> Result<Option<ChildProcess>, Errno> {
    let mut pidfd: libc::c_int = -1;
    let arguments = CloneArgs {
        flags: u64::from(flags.unsigned_abs()),
        pidfd: u64::try_from((&raw mut pidfd).expose_provenance()).map_err(|_| Errno::INVAL)?,
        exit_signal: u64::from(libc::SIGCHLD.unsigned_abs()),
        ..CloneArgs::default()
    };
    // SAFETY: without CLONE_VM the child runs on a copy of this memory, as after `fork`; the process has one thread, so
    // no lock of the allocator can be held by another; `arguments` and `pidfd` outlive the call.
    // JUSTIFICATION: `fork` cannot make namespaces, and unsharing before it would move the shim itself.
    let result = unsafe { libc::syscall(libc::SYS_clone3, &raw const arguments, size_of::<CloneArgs>()) };
    match result {
        0 => Ok(None),
        raw if raw > 0 => {
            let pid = i32::try_from(raw).ok().and_then(Pid::from_raw).ok_or(Errno::INVAL)?;
            // SAFETY: the kernel has just made this descriptor for us, close-on-exec, and nobody else has it.
            // JUSTIFICATION: it comes back as a bare number.
            let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
            debug_assert!(pidfd.as_raw_fd() >= 0);
            Ok(Some(ChildProcess { pid, pidfd }))
        }
        _ => Err(last_errno()),
    }
}
