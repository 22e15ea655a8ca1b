//! The new mount API in the few forms the builder needs: clone a tree, set its attributes, attach it; make a
//! filesystem, attach it.
//!
//! Everything works on descriptors. A mount gets its attributes while it is detached, so that there is no moment at
//! which it can be seen with fewer; and a target below a directory that the sandbox wrote itself is opened without
//! following any link, so that nothing is ever attached outside of the sandbox's root.

#![expect(unsafe_code, reason = "mount_setattr has no safe wrapper")]

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat, openat2};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, fsconfig_create,
    fsconfig_set_string, fsmount, fsopen, move_mount, open_tree,
};

use crate::shim::config::Defence;

/// What every read-only view of the host's files gets.
pub(super) const READ_ONLY: MountAttrFlags = MountAttrFlags::MOUNT_ATTR_RDONLY
    .union(MountAttrFlags::MOUNT_ATTR_NOSUID)
    .union(MountAttrFlags::MOUNT_ATTR_NODEV);

/// What every place that the sandbox may write gets.
pub(super) const WRITABLE: MountAttrFlags =
    MountAttrFlags::MOUNT_ATTR_NOSUID.union(MountAttrFlags::MOUNT_ATTR_NODEV);

/// Returns what a place of the layer gets: [`WRITABLE`], unless a control experiment leaves the flags off.
pub(super) fn layer_attributes(defences_off: &[Defence]) -> MountAttrFlags {
    if defences_off.contains(&Defence::MountFlags) { MountAttrFlags::empty() } else { WRITABLE }
}

/// What a device node gets: read-only refuses changing the node, not writing to the device.
pub(super) const DEVICE: MountAttrFlags = MountAttrFlags::MOUNT_ATTR_RDONLY
    .union(MountAttrFlags::MOUNT_ATTR_NOSUID)
    .union(MountAttrFlags::MOUNT_ATTR_NOEXEC);

/// The argument of `mount_setattr(2)` (include/uapi/linux/mount.h, `struct mount_attr`).
#[repr(C)]
struct MountAttr {
    attr_set: u64,
    attr_clr: u64,
    propagation: u64,
    userns_fd: u64,
}

/// Sets `attributes` on the detached or attached mount `mount`, with all mounts below when `recursive`, and lets nothing
/// that is mounted on the host later appear in it.
pub(super) fn set_attributes(
    mount: BorrowedFd<'_>,
    attributes: MountAttrFlags,
    recursive: bool,
) -> Result<(), Errno> {
    let argument = MountAttr {
        attr_set: u64::from(attributes.bits()),
        attr_clr: 0,
        propagation: libc::MS_PRIVATE,
        userns_fd: 0,
    };
    let flags = libc::AT_EMPTY_PATH | if recursive { libc::AT_RECURSIVE } else { 0 };
    // SAFETY: the descriptor is open for the call, the path is a NUL-terminated empty string, and the kernel reads
    // exactly the 32 bytes of `argument`.
    // JUSTIFICATION: `remount,bind` is not recursive and leaves submounts writable; rustix has no `mount_setattr`.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            flags,
            &raw const argument,
            size_of::<MountAttr>(),
        )
    };
    if result == 0 { Ok(()) } else { Err(last_errno()) }
}

/// Returns the error number of the system call that has just failed.
pub(super) fn last_errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// Clones the mount at `path` (with what is mounted below when `recursive`), detached and with `attributes`.
pub(super) fn clone_tree(
    directory: BorrowedFd<'_>,
    path: impl AsRef<Path>,
    attributes: MountAttrFlags,
    recursive: bool,
) -> Result<OwnedFd, Errno> {
    let mut flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    if recursive {
        flags |= OpenTreeFlags::AT_RECURSIVE;
    }
    let tree = open_tree(directory, path.as_ref(), flags)?;
    set_attributes(tree.as_fd(), attributes, recursive)?;
    Ok(tree)
}

/// Attaches the detached mount `mount` onto the file or directory `target`.
pub(super) fn attach(mount: BorrowedFd<'_>, target: BorrowedFd<'_>) -> Result<(), Errno> {
    move_mount(
        mount,
        c"",
        target,
        c"",
        MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH,
    )
}

/// Makes a filesystem of type `kind` with `options`, detached and with `attributes`.
pub(super) fn make_filesystem(
    kind: &str,
    options: &[(&str, &str)],
    attributes: MountAttrFlags,
) -> Result<OwnedFd, Errno> {
    let context = fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (key, value) in options {
        fsconfig_set_string(context.as_fd(), *key, *value)?;
    }
    fsconfig_create(context.as_fd())?;
    fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)
}

/// Opens `path` below `root` as something to attach to or work in, following no link and leaving `root` never.
pub(super) fn open_beneath(root: BorrowedFd<'_>, path: impl AsRef<Path>) -> Result<OwnedFd, Errno> {
    openat2(
        root,
        path.as_ref(),
        OFlags::PATH | OFlags::CLOEXEC | OFlags::NOFOLLOW,
        Mode::empty(),
        ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS,
    )
}

/// Opens a file or directory of the host as a descriptor to attach to.
pub(super) fn open_path(path: impl AsRef<Path>) -> Result<OwnedFd, Errno> {
    openat(CWD, path.as_ref(), OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
}
