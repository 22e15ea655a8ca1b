//! Pid 1: reads its configuration, then hardens itself before it accepts anything.

#![expect(unsafe_code, reason = "takes over inherited descriptors and closes the rest")]

use std::fs::File;
use std::os::fd::{FromRawFd, RawFd};

use rustix::io::Errno;
use rustix::process::{
    DumpableBehavior, Resource, Rlimit, set_child_subreaper, set_dumpable_behavior, setrlimit,
};
use rustix::thread::{
    CapabilitySet, CapabilitySets, Gid, Uid, capabilities, clear_ambient_capability_set, set_capabilities,
    set_keep_capabilities, set_no_new_privs, set_thread_groups, set_thread_res_gid, set_thread_res_uid,
};

use super::{
    AGENT_ID, AgentConfig, CONFIG_FD, GuestKernel, HardenError, check_defences_off, last_errno, seccomp,
};
use crate::shim::config::Defence;

/// All that pid 1 needs once it serves: starting programs as other users, and ending them.
const KEPT: CapabilitySet = CapabilitySet::SETUID.union(CapabilitySet::SETGID).union(CapabilitySet::KILL);

/// Reads the [`AgentConfig`] that the builder left at [`CONFIG_FD`], and closes that descriptor. Call once, first.
///
/// # Errors
///
/// When the descriptor is missing, its content is not a config, or a release build is told to leave a defence off.
pub fn load_agent_config() -> Result<AgentConfig, HardenError> {
    const STEP: &str = "read agent config";
    // SAFETY: fcntl on a number is harmless whether or not it is open.
    // JUSTIFICATION: the number must be known to be open before it is owned.
    if unsafe { libc::fcntl(CONFIG_FD, libc::F_GETFD) } < 0 {
        return Err(HardenError::new(STEP, last_errno()));
    }
    // SAFETY: open, and by the contract of this function nobody else has taken it.
    // JUSTIFICATION: an inherited descriptor has no other way into a value.
    let file = unsafe { File::from_raw_fd(CONFIG_FD) };
    // The shim's writes moved the offset that this descriptor shares with its own.
    let length = file.metadata().map_err(|error| HardenError::new(STEP, error))?.len();
    let mut json = vec![0; usize::try_from(length).map_err(|error| HardenError::new(STEP, error))?];
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut json, 0)
        .map_err(|error| HardenError::new(STEP, error))?;
    let config: AgentConfig = serde_json::from_slice(&json).map_err(|error| HardenError::new(STEP, error))?;
    check_defences_off(&config.defences_off)
        .map_err(|errno| HardenError::new("leave defences off", errno))?;
    Ok(config)
}

/// Hardens pid 1 itself, before it accepts anything; single-threaded, before any async runtime.
///
/// Afterwards only the standard descriptors and those of `config` are open, each of the latter close-on-exec.
///
/// # Errors
///
/// Any defence that cannot be put up; pid 1 must then exit.
pub fn pid1_apply(config: &AgentConfig) -> Result<(), HardenError> {
    let step = |step| move |errno: Errno| HardenError::new(step, errno);
    close_others(config).map_err(step("close unknown descriptors"))?;
    rustix::thread::set_name(c"cloister-guest").map_err(step("set process name"))?;
    set_limits().map_err(step("set resource limits"))?;
    if config.is_off(Defence::PidNamespace) {
        set_child_subreaper(Some(rustix::process::getpid())).map_err(step("become subreaper"))?;
    }
    if !config.is_off(Defence::Capabilities) {
        empty_bounding_set().map_err(step("empty bounding set"))?;
    }
    if !config.is_off(Defence::NoNewPrivileges) {
        set_no_new_privs(true).map_err(step("set no_new_privs"))?;
    }
    if !config.is_off(Defence::Seccomp) {
        seccomp::install().map_err(step("install system call filter"))?;
    }
    if !config.is_off(Defence::Capabilities) {
        drop_capabilities(config).map_err(step("drop capabilities"))?;
    }
    // Changing credentials resets it, so last.
    set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(step("become undumpable"))
}

/// Closes everything but standard descriptors and what `config` names; marks the latter close-on-exec.
fn close_others(config: &AgentConfig) -> Result<(), Errno> {
    let mut kept: Vec<RawFd> = config.work_join_fds.clone();
    kept.push(config.listener_fd);
    kept.extend(config.process_count_fds.into_iter().flat_map(|(current, max)| [current, max]));
    kept.sort_unstable();
    let mut next = 3;
    for fd in kept {
        if fd > next {
            close_range(next, fd - 1)?;
        }
        // SAFETY: sets a flag of a descriptor number; no memory is involved.
        // JUSTIFICATION: the descriptors are owned by whoever takes them from the config later.
        if unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
            return Err(last_errno());
        }
        next = fd + 1;
    }
    close_range(next, RawFd::MAX)
}

/// Closes every descriptor of a range. The gVisor of 2024 takes no number above `i32::MAX`.
pub(crate) fn close_range(first: RawFd, last: RawFd) -> Result<(), Errno> {
    // SAFETY: the process has just started, or was just forked and uses nothing of its parent's: no value that is used owns a
    // descriptor in the range.
    // JUSTIFICATION: what was inherited by mistake is only known by number.
    let result = unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
    if result == 0 { Ok(()) } else { Err(last_errno()) }
}

/// No core files (they would go to the host's handler), and open files bounded far below what the host has in all.
fn set_limits() -> Result<(), Errno> {
    setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })?;
    let limit = Some(super::exec::open_files_hard());
    setrlimit(Resource::Nofile, Rlimit { current: limit, maximum: limit })
}

/// Takes every capability out of the bounding set, so that no exec can gain one, whoever it runs as.
fn empty_bounding_set() -> Result<(), Errno> {
    for capability in 0..64_u32 {
        // SAFETY: this prctl takes a number and touches no memory.
        // JUSTIFICATION: rustix names the capabilities it knows; a newer kernel may have more.
        if unsafe { libc::prctl(libc::PR_CAPBSET_DROP, libc::c_ulong::from(capability), 0, 0, 0) } < 0 {
            return match last_errno() {
                // Beyond the last that the kernel has.
                Errno::INVAL if capability > 0 => Ok(()),
                other => Err(other),
            };
        }
    }
    Ok(())
}

fn drop_capabilities(config: &AgentConfig) -> Result<(), Errno> {
    match clear_ambient_capability_set() {
        // The gVisor of 2024 has no ambient set, and so nothing to clear.
        Err(Errno::INVAL) if config.kernel == GuestKernel::Gvisor => {}
        other => other?,
    }
    let mut kept = KEPT;
    if config.is_off(Defence::NoNewPrivileges) {
        // Landlock asks for one or the other.
        kept |= CapabilitySet::SYS_ADMIN;
    }
    set_capabilities(
        None,
        CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() },
    )
}

/// Switches to the guest agent's own user and keeps every capability: what [`pid1_apply`] still needs. On gVisor pid 1
/// starts as root; elsewhere the builder has done this outside.
///
/// # Errors
///
/// The call that failed.
pub(crate) fn become_agent_user() -> Result<(), HardenError> {
    let step = |errno: Errno| HardenError::new("become the guest agent's user", errno);
    let (uid, gid) = (Uid::from_raw(AGENT_ID), Gid::from_raw(AGENT_ID));
    set_keep_capabilities(true).map_err(step)?;
    set_thread_groups(&[]).map_err(step)?;
    set_thread_res_gid(gid, gid, gid).map_err(step)?;
    set_thread_res_uid(uid, uid, uid).map_err(step)?;
    let mut sets = capabilities(None).map_err(step)?;
    sets.effective = sets.permitted;
    set_capabilities(None, sets).map_err(step)
}
