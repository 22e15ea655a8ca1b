//! The Landlock domain that every exec enters and pid 1 does not.
//!
//! Handled is every file access right of the kernel's ABI up to [`KNOWN_ABI`], an explicit set: a newer kernel's rights
//! are taken up by a change here, tested. Everything below `/` may be read and executed; writing, making, removing, linking
//! and truncating only below [`WRITABLE`]; never granted anywhere is making device nodes. A domain forbids all changes of
//! the mount tree and tracing anything outside of it. From ABI 6 on it also confines abstract sockets to the domain.
//!
//! Signals are left to user ids, although a domain could confine them too: the execs of a sandbox are one machine's
//! programs, and one that is told to stop another must be able to. Pid 1 is another user's, and none of the work has a
//! capability (ADR 0008).
//!
//! TCP ports are not handled: there is no "all ports" rule, and the network namespace decides what can be reached.

#![expect(unsafe_code, reason = "Landlock's system calls have no async-signal-safe wrapper")]

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::OnceLock;

use landlock::{
    ABI, Access, AccessFs, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, Scope,
};
use rustix::io::Errno;

use super::{HardenError, last_errno};

/// The least ABI that a sandbox is started with (Linux 5.19, so Debian 12's 6.1 has it). The first ABI cannot allow
/// renaming between directories, which no build tool survives.
pub const REQUIRED_ABI: u32 = 2;
/// The newest ABI whose rights are used.
const KNOWN_ABI: u32 = 7;

/// Where files may be made and changed.
const WRITABLE: &[&str] = &["/dev/shm", "/etc", "/home", "/root", "/run", "/tmp", "/var", "/workspace"];

/// Returns the kernel's Landlock ABI, at least [`REQUIRED_ABI`].
///
/// # Errors
///
/// `ENOSYS` or `EOPNOTSUPP` from a kernel that has none or has it switched off; `EOPNOTSUPP` for one that is too old.
pub fn landlock_abi() -> Result<u32, Errno> {
    const VERSION: libc::c_ulong = 1;
    // SAFETY: with this flag the call takes no attributes and returns a number.
    // JUSTIFICATION: the crate hides the version it found.
    let result = unsafe {
        libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<libc::c_void>(), 0_usize, VERSION)
    };
    if result < 0 {
        return Err(last_errno());
    }
    match u32::try_from(result) {
        Ok(abi) if abi >= REQUIRED_ABI => Ok(abi),
        _ => Err(Errno::OPNOTSUPP),
    }
}

/// Returns the ruleset of all execs, made at the first call. The descriptor stays open for the life of the process.
pub(super) fn shared_ruleset() -> Result<RawFd, HardenError> {
    static RULESET: OnceLock<OwnedFd> = OnceLock::new();
    if let Some(ruleset) = RULESET.get() {
        return Ok(ruleset.as_raw_fd());
    }
    let made = make_ruleset()?;
    Ok(RULESET.get_or_init(|| made).as_raw_fd())
}

fn make_ruleset() -> Result<OwnedFd, HardenError> {
    const STEP: &str = "make Landlock ruleset";
    let abi = landlock_abi().map_err(|errno| HardenError::new("require Landlock", errno))?.min(KNOWN_ABI);
    let abi = ABI::from(i32::try_from(abi).expect("at most 7"));
    let all = AccessFs::from_all(abi);
    let read = AccessFs::Execute | AccessFs::ReadFile | AccessFs::ReadDir;
    let devices = AccessFs::MakeChar | AccessFs::MakeBlock | AccessFs::IoctlDev;
    // The intersection drops what this ABI does not have, which a hard requirement would refuse.
    let change = (AccessFs::WriteFile | AccessFs::Truncate) & all;
    let rules = std::iter::once(("/", read))
        .chain(WRITABLE.iter().map(|path| (*path, all & !devices)))
        .chain([("/dev", (change | AccessFs::IoctlDev) & all), ("/proc", change)]);

    let failed = |error: landlock::RulesetError| HardenError::new(STEP, error);
    let mut ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(all)
        .map_err(failed)?;
    let scopes: BitFlags<Scope> = Scope::from_all(abi) & Scope::AbstractUnixSocket;
    if !scopes.is_empty() {
        ruleset = ruleset.scope(scopes).map_err(failed)?;
    }
    let mut created = ruleset.create().map_err(failed)?;
    for (path, access) in rules {
        let directory = PathFd::new(path).map_err(|error| HardenError::new(STEP, error))?;
        created = created.add_rule(PathBeneath::new(directory, access)).map_err(failed)?;
    }
    Option::<OwnedFd>::from(created)
        .ok_or_else(|| HardenError::new(STEP, "the kernel took the ruleset without making one"))
}

/// Enters the domain of the ruleset at `fd`; for good, and for everything started later. Async-signal-safe.
pub(super) fn restrict_self(fd: RawFd) -> Result<(), Errno> {
    // SAFETY: takes a descriptor number and flags, and touches no memory.
    // JUSTIFICATION: the crate's form allocates and sets no_new_privs by itself.
    let result = unsafe { libc::syscall(libc::SYS_landlock_restrict_self, fd, 0_u32) };
    if result == 0 { Ok(()) } else { Err(last_errno()) }
}
