//! The socket pair between the shim and the child that becomes pid 1, from the clone to the child's exec.
//!
//! ```text
//!   child                                  shim
//!   joins cgroups, mounts /proc, pivots
//!   unshares the user namespace
//!   NeedsMaps                        ──▶   writes uid_map, gid_map
//!                                    ◀──   one byte: go on
//!   becomes the agent's user, parks descriptors
//!   execs: its end closes            ──▶   end of file: success
//! ```
//!
//! `Failed` may come instead of anything. Each message is one packet. The shim keeps its end open until the exec, which
//! is how the child can tell that the shim still lives after it asked the kernel to die with it.

#![expect(unsafe_code, reason = "poll on one descriptor")]

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};
use serde::{Deserialize, Serialize};

use super::mounts::last_errno;

/// Longest message: a step, a path and two numbers.
const MESSAGE_MAX_BYTES: usize = 8192;

/// What the child says.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum ChildMessage {
    /// A step is done.
    Step {
        /// Its name.
        step: String,
        /// Its wall time.
        elapsed_ns: u64,
    },
    /// The child is in its user namespace and waits.
    NeedsMaps,
    /// The keeper's sandbox runs.
    Started,
    /// The child gives up and exits.
    Failed {
        /// What it tried.
        step: String,
        /// On which file.
        path: Option<String>,
        /// What the kernel said.
        errno: i32,
    },
}

/// Makes both ends: the shim's, then the child's.
pub(super) fn pair() -> Result<(OwnedFd, OwnedFd), Errno> {
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
}

/// Sends one message to the shim.
pub(super) fn say(link: BorrowedFd<'_>, message: &ChildMessage) -> Result<(), Errno> {
    let bytes = serde_json::to_vec(message).map_err(|_| Errno::INVAL)?;
    send(link, &bytes, SendFlags::NOSIGNAL).map(|_| ())
}

/// Receives one message of the child; `None` when it has exec'd or died.
pub(super) fn hear(link: BorrowedFd<'_>) -> Result<Option<ChildMessage>, Errno> {
    let mut buffer = [0_u8; MESSAGE_MAX_BYTES];
    let length = loop {
        match recv(link, &mut buffer[..], RecvFlags::empty()) {
            Ok((length, _)) => break length,
            Err(Errno::INTR) => {}
            // The child died with an unread byte of ours in its queue.
            Err(Errno::CONNRESET) => return Ok(None),
            Err(error) => return Err(error),
        }
    };
    if length == 0 {
        return Ok(None);
    }
    serde_json::from_slice(&buffer[..length]).map(Some).map_err(|_| Errno::BADMSG)
}

/// Tells the child that its maps are written.
pub(super) fn release(link: BorrowedFd<'_>) -> Result<(), Errno> {
    send(link, b"g", SendFlags::NOSIGNAL).map(|_| ())
}

/// Waits for [`release`]; an error when the shim died instead.
pub(super) fn wait_for_release(link: BorrowedFd<'_>) -> Result<(), Errno> {
    let mut buffer = [0_u8; 1];
    loop {
        match recv(link, &mut buffer[..], RecvFlags::empty()) {
            Ok((1, _)) => return Ok(()),
            Ok(_) => return Err(Errno::PIPE),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
}

/// Returns whether the shim has closed its end, which it does only by dying.
pub(super) fn is_abandoned(link: BorrowedFd<'_>) -> Result<bool, Errno> {
    let mut poll = libc::pollfd { fd: link.as_fd().as_raw_fd(), events: 0, revents: 0 };
    // SAFETY: `poll` is one valid pollfd and the descriptor is open.
    // JUSTIFICATION: the child runs between clone and exec, where one plain call is easiest to reason about.
    let result = unsafe { libc::poll(&raw mut poll, 1, 0) };
    if result < 0 {
        return Err(last_errno());
    }
    Ok(poll.revents & libc::POLLHUP != 0)
}
