//! The system call filter: an allow-list, installed once in pid 1 and inherited by every exec.
//!
//! [`table`] says what is allowed, refused, or decided by arguments; [`program`] turns that into a search tree of classic
//! BPF, so that a call costs a handful of comparisons instead of hundreds, and loading costs little. A call that the table
//! does not name, so every call newer than it, answers `ENOSYS`, by which programs fall back to older ones.
//!
//! What the filter must stop because nothing else does: io_uring, userfaultfd, perf, keyrings, bpf, exotic socket families,
//! and typing into a terminal (`TIOCSTI`). The rest of what it refuses is stopped a second time by the user namespace,
//! Landlock or dropped capabilities.

#![expect(unsafe_code, reason = "seccomp(2) has no safe wrapper")]

mod program;
mod table;

use rustix::io::Errno;

use self::program::Instruction;
use super::last_errno;

/// `struct sock_fprog` of include/uapi/linux/filter.h.
#[repr(C)]
struct Program {
    length: u16,
    instructions: *const Instruction,
}

/// Installs the filter for this process and everything it starts. Needs no_new_privs or the capability to do without.
pub(super) fn install() -> Result<(), Errno> {
    let instructions = program::compile(&table::rules());
    let program = Program {
        length: u16::try_from(instructions.len()).map_err(|_| Errno::TOOBIG)?,
        instructions: instructions.as_ptr(),
    };
    // SAFETY: `program` points to `length` instructions that live until the call has copied them.
    // JUSTIFICATION: there is no safe wrapper.
    let result =
        unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0_u32, &raw const program) };
    if result == 0 { Ok(()) } else { Err(last_errno()) }
}
