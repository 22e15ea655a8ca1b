//! The last steps of a forked child before it becomes the user's program.

#![expect(unsafe_code, reason = "runs between fork and exec")]

use std::os::fd::RawFd;

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{
    CapabilitySet, CapabilitySets, Gid, Uid, set_capabilities, set_no_new_privs, set_thread_groups,
    set_thread_res_gid, set_thread_res_uid,
};

use super::{AGENT_ID, AgentConfig, GuestKernel, HardenError, landlock_domain, last_errno};
use crate::shim::config::Defence;

/// Most open files of a process, where the host allows as many.
const OPEN_FILES_HARD: u64 = 65_536;
/// What a program starts with: beyond this number `select` writes past its set.
const OPEN_FILES_SOFT: u64 = 1024;
/// Most supplementary groups of an exec.
const GROUPS_MAX: usize = 64;

/// Everything a forked child needs to become an exec, allocated and opened before the fork. Reusable.
#[derive(Debug)]
pub struct PreparedExec {
    uid: Uid,
    gid: Gid,
    groups: Vec<Gid>,
    work_join_fds: Vec<RawFd>,
    process_count_fds: Option<(RawFd, RawFd)>,
    kernel: GuestKernel,
    /// `None` on gVisor, and when a control experiment leaves Landlock off.
    ruleset_fd: Option<RawFd>,
    open_files: Rlimit,
    sets_no_new_privs: bool,
    drops_capabilities: bool,
}

/// Returns the hard limit of open files: ours, or the host's where that is lower (raising it takes a capability there).
pub(super) fn open_files_hard() -> u64 {
    getrlimit(Resource::Nofile).maximum.map_or(OPEN_FILES_HARD, |maximum| maximum.min(OPEN_FILES_HARD))
}

/// Prepares an exec as `uid`, `gid` and supplementary `groups` (ids as the sandbox sees them). The Landlock ruleset is
/// made at the first call and kept for the life of the process.
///
/// # Errors
///
/// An id outside of `0..id_count`, the guest agent's own id, more than 64 groups, or a kernel without the required Landlock.
pub fn prepare_exec(
    config: &AgentConfig,
    uid: u32,
    gid: u32,
    groups: &[u32],
) -> Result<PreparedExec, HardenError> {
    if groups.len() > GROUPS_MAX {
        return Err(HardenError::new("check groups", "more than 64 supplementary groups"));
    }
    for id in [uid, gid].iter().chain(groups) {
        if *id >= config.id_count {
            let message = format!("id {id} is not among the {} ids of the sandbox", config.id_count);
            return Err(HardenError::new("check ids", message));
        }
        if *id == AGENT_ID {
            return Err(HardenError::new("check ids", format!("id {AGENT_ID} is the guest agent's own")));
        }
    }
    let hard = open_files_hard();
    let ruleset_fd = if config.has_landlock() { Some(landlock_domain::shared_ruleset()?) } else { None };
    Ok(PreparedExec {
        uid: Uid::from_raw(uid),
        gid: Gid::from_raw(gid),
        groups: groups.iter().map(|id| Gid::from_raw(*id)).collect(),
        work_join_fds: config.work_join_fds.clone(),
        process_count_fds: config.process_count_fds,
        kernel: config.kernel,
        ruleset_fd,
        open_files: Rlimit { current: Some(OPEN_FILES_SOFT.min(hard)), maximum: Some(hard) },
        sets_no_new_privs: !config.is_off(Defence::NoNewPrivileges),
        drops_capabilities: !config.is_off(Defence::Capabilities),
    })
}

/// Turns the calling forked child into a hardened one: joins the work's cgroups, sets no_new_privs, enters the Landlock
/// domain, switches user, drops every capability, empties the signal mask, restores `SIGPIPE`, and marks every descriptor
/// from 3 up close-on-exec. Set up standard descriptors and session before, the working directory after (so that it is
/// checked as that user), then `execve`. Nothing may be skipped: on an error the child must `_exit`.
///
/// # Errors
///
/// The first call that failed. `EAGAIN` means that the sandbox has as many processes as it may.
///
/// # Safety
///
/// Only in a freshly forked, single-threaded child of pid 1. Async-signal-safe: it neither allocates nor locks.
pub unsafe fn apply_exec(prepared: &PreparedExec) -> Result<(), Errno> {
    for fd in &prepared.work_join_fds {
        // SAFETY: writes one byte of a constant to an inherited descriptor that pid 1 keeps open for life.
        // JUSTIFICATION: pid 1 holds them as numbers, as they came.
        if unsafe { libc::write(*fd, c"0".as_ptr().cast(), 1) } != 1 {
            return Err(last_errno());
        }
    }
    if let Some((current, max)) = prepared.process_count_fds
        && let (Some(current), Some(max)) = (read_count(current), read_count(max))
        && current > max
    {
        // The kernel refuses a fork beyond the limit, and never a process that moves in.
        return Err(Errno::AGAIN);
    }
    setrlimit(Resource::Nofile, prepared.open_files)?;
    if prepared.sets_no_new_privs {
        set_no_new_privs(true)?;
    }
    if let Some(fd) = prepared.ruleset_fd {
        landlock_domain::restrict_self(fd)?;
    }
    set_thread_groups(&prepared.groups)?;
    set_thread_res_gid(prepared.gid, prepared.gid, prepared.gid)?;
    set_thread_res_uid(prepared.uid, prepared.uid, prepared.uid)?;
    if prepared.drops_capabilities {
        let none = CapabilitySet::empty();
        // An empty inheritable set empties the ambient one.
        set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })?;
    }
    reset_signals()?;
    // SAFETY: marks descriptors close-on-exec, and closes none.
    // JUSTIFICATION: there is no safe wrapper.
    let marked = unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
    match if marked == 0 { Ok(()) } else { Err(last_errno()) } {
        // The gVisor of 2024 can only close them. Each was opened with the mark; this is a second look, and one that goes
        // through the numbers one by one takes 80 ms there.
        Err(Errno::INVAL) if prepared.kernel == GuestKernel::Gvisor => Ok(()),
        other => other,
    }
}

/// Handlers go with the exec; an ignored `SIGPIPE` (Rust's runtime) and the mask would not.
fn reset_signals() -> Result<(), Errno> {
    // SAFETY: all-zero bytes are a valid signal set, which the next call initialises anyway; all three calls are
    // async-signal-safe (signal-safety(7)) and get valid pointers.
    // JUSTIFICATION: rustix leaves signal sets to libc.
    let result = unsafe {
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut())
    };
    if result == 0 { Ok(()) } else { Err(last_errno()) }
}

/// Reads a count of a control group; `None` for the word `max`, and for what cannot be read. Neither allocates nor locks.
fn read_count(fd: RawFd) -> Option<u64> {
    let mut buffer = [0_u8; 32];
    // SAFETY: the buffer is plain memory of this frame, and the call writes at most its length.
    // JUSTIFICATION: pid 1 holds the files as numbers, as they came, for life.
    let length = unsafe { libc::pread(fd, buffer.as_mut_ptr().cast(), buffer.len(), 0) };
    let text = buffer.get(..usize::try_from(length).ok()?)?;
    let digits = text.iter().take_while(|byte| byte.is_ascii_digit());
    let mut count: Option<u64> = None;
    for digit in digits {
        count = Some(count.unwrap_or(0).saturating_mul(10).saturating_add(u64::from(digit - b'0')));
    }
    count
}
