//! What ties a process to whoever started it, cut.

#![expect(unsafe_code, reason = "signal dispositions and descriptors 0 to 2 have no safe form")]

use rustix::fs::{Mode, OFlags};

/// Leaves the starter's session and ignores what is sent to groups.
pub(super) fn detach() {
    // Refused only to a leader of a group, which is as detached as it gets.
    let _ = rustix::process::setsid();
    rustix::process::umask(Mode::from_raw_mode(0o077));
    for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM, libc::SIGPIPE] {
        // SAFETY: ignoring a signal runs no code of ours.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}

/// Puts `/dev/null` at the standard descriptors, so that a reader of the starter's pipes sees their end.
pub(super) fn let_go() {
    let Ok(null) = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) else {
        return;
    };
    for standard in 0..=2 {
        // SAFETY: nothing of this process owns the standard descriptors; both numbers are valid.
        unsafe { libc::dup2(std::os::fd::AsRawFd::as_raw_fd(&null), standard) };
    }
}
