//! The sandbox's `/proc`, without what it tells about the machine or lets anybody change.
//!
//! Mounted by the child that becomes pid 1, because only a member of the process namespace can, but while it is still
//! host root and outside of any user namespace. So these masks are locked with the rest of the tree, and since the
//! process namespace belongs to the host's user namespace, no capability inside can mount a second `/proc` without them.

use std::os::fd::{AsFd, BorrowedFd};

use rustix::fs::CWD;
use rustix::io::Errno;
use rustix::mount::MountAttrFlags;

use super::mounts::{self, READ_ONLY};

/// Files that show the host's memory, keys, addresses or log, or are a switch of the whole machine; they read as empty.
const MASKED_FILES: &[&str] = &[
    "config.gz",
    "kallsyms",
    "kcore",
    "key-users",
    "keys",
    "kmsg",
    "kpagecgroup",
    "kpagecount",
    "kpageflags",
    "latency_stats",
    "modules",
    "pagetypeinfo",
    "sched_debug",
    "slabinfo",
    "sysrq-trigger",
    "timer_list",
    "timer_stats",
    "vmallocinfo",
];
/// Directories about the machine's hardware; they read as empty.
const MASKED_DIRECTORIES: &[&str] = &["acpi", "asound", "driver", "scsi"];
/// Trees with switches among what programs need to read.
const READ_ONLY_TREES: &[&str] = &["bus", "fs", "irq", "mtrr", "sys", "tty"];

/// Mounts `/proc` of the calling process's own process namespace below `root`; masked, unless a control experiment leaves
/// that off.
///
/// # Errors
///
/// The file concerned and what the kernel said.
pub(super) fn mount(root: BorrowedFd<'_>, is_masked: bool) -> Result<(), (String, Errno)> {
    let at = |name: &str| {
        let name = format!("/proc/{name}");
        move |error| (name, error)
    };
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    let filesystem = mounts::make_filesystem("proc", &[], attributes).map_err(at(""))?;
    let place = mounts::open_beneath(root, "proc").map_err(at(""))?;
    mounts::attach(filesystem.as_fd(), place.as_fd()).map_err(at(""))?;
    if is_masked { mask(root) } else { Ok(()) }
}

/// Binds the host's own `/proc` below `root`: what stands in when the process namespace is left off.
#[cfg(debug_assertions)]
pub(super) fn bind_host(root: BorrowedFd<'_>) -> Result<(), (String, Errno)> {
    let at = |error| ("/proc".to_owned(), error);
    let tree = mounts::clone_tree(CWD, "/proc", MountAttrFlags::MOUNT_ATTR_NOSUID, true).map_err(at)?;
    let place = mounts::open_beneath(root, "proc").map_err(at)?;
    mounts::attach(tree.as_fd(), place.as_fd()).map_err(at)
}

fn mask(root: BorrowedFd<'_>) -> Result<(), (String, Errno)> {
    let proc_root = mounts::open_beneath(root, "proc").map_err(|error| ("/proc".to_owned(), error))?;
    let no_exec = READ_ONLY | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    for name in READ_ONLY_TREES {
        cover(proc_root.as_fd(), name, || mounts::clone_tree(proc_root.as_fd(), name, no_exec, true))?;
    }
    for name in MASKED_FILES {
        cover(proc_root.as_fd(), name, || mounts::clone_tree(CWD, "/dev/null", mounts::DEVICE, false))?;
    }
    for name in MASKED_DIRECTORIES {
        let options = [("size", "4096"), ("nr_inodes", "1"), ("mode", "0555")];
        cover(proc_root.as_fd(), name, || mounts::make_filesystem("tmpfs", &options, no_exec))?;
    }
    Ok(())
}

/// Attaches what `make` returns onto `name`; a kernel built without that file has nothing to cover.
fn cover(
    proc_root: BorrowedFd<'_>,
    name: &str,
    make: impl FnOnce() -> Result<std::os::fd::OwnedFd, Errno>,
) -> Result<(), (String, Errno)> {
    let at = |error| (format!("/proc/{name}"), error);
    let place = match mounts::open_beneath(proc_root, name) {
        Ok(place) => place,
        Err(Errno::NOENT) => return Ok(()),
        Err(error) => return Err(at(error)),
    };
    let tree = make().map_err(at)?;
    mounts::attach(tree.as_fd(), place.as_fd()).map_err(at)
}
