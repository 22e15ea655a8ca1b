//! The sandbox's network namespace: a prepared one is joined, or a fresh one gets its loopback.
//!
//! Joined by the shim while it is still host root, so that the namespace is owned by the host's user namespace: root
//! inside holds no capability over it, whatever it regains.

#![expect(unsafe_code, reason = "interface flags are set by ioctl")]

use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;

use rustix::fs::{Mode, OFlags, open};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

use super::error::{BuildError, StepContext};
use super::mounts::last_errno;

/// Moves the calling process to the namespace at `prepared`, or to a fresh one with loopback up.
pub(super) fn join(prepared: Option<&Path>) -> Result<(), BuildError> {
    match prepared {
        Some(path) => {
            let namespace = open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
                .step_at("open network namespace", path)?;
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
                .step_at("join network namespace", path)?;
        }
        None => {
            // SAFETY: only CLONE_FILES makes unsharing unsafe; this changes where new sockets are made.
            // JUSTIFICATION: rustix marks the whole call unsafe.
            unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.step("make network namespace")?;
            bring_loopback_up()?;
        }
    }
    // No capability is left inside to bind a low port; in a namespace of its own there is nobody to protect from it.
    let low_ports = "/proc/sys/net/ipv4/ip_unprivileged_port_start";
    std::fs::write(low_ports, "0").step_at("open low ports", low_ports)
}

fn bring_loopback_up() -> Result<(), BuildError> {
    const STEP: &str = "bring loopback up";
    let socket =
        socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None).step(STEP)?;
    // SAFETY: all-zero bytes are a valid `ifreq`: integers and byte arrays only.
    // JUSTIFICATION: the structure has a union that has no other constructor.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (slot, byte) in request.ifr_name.iter_mut().zip(*b"lo") {
        *slot = libc::c_char::try_from(byte).expect("ASCII fits a C char");
    }
    request.ifr_ifru.ifru_flags = libc::c_short::try_from(libc::IFF_UP).expect("IFF_UP is 1");
    // SAFETY: the socket is open and `request` is the structure that SIOCSIFFLAGS reads.
    // JUSTIFICATION: two lines instead of a netlink client.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) };
    if result == 0 { Ok(()) } else { Err(last_errno()).step(STEP) }
}
