//! The writable layer: attached in the shim's own mount namespace, and given its directories at first use.
//!
//! The layer outlives sandboxes: a paused session comes back on it. Its top directory is never visible inside; each
//! of [`DIRECTORIES`] is bound to its place in the root. Once a guest has run, everything below those directories is
//! hostile: a link may stand where a directory was. So the builder writes into them only while the marker is missing,
//! which says that no guest has run yet; later it only opens them without following links. The one thing it changes
//! later is the sandbox's name in `/etc`, by [`etc::rename_host`].

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, Gid, Mode, OFlags, Uid, chownat, fchmod, mkdirat, openat};
use rustix::io::Errno;

use super::error::{BuildError, StepContext};
use super::mounts;
use super::{loop_device, owner};
use crate::etc;
use crate::shim::config::{Defence, DiskConfig, ShimConfig};

/// Directories of the layer, bound to the same names in the root, with their modes.
pub(super) const DIRECTORIES: &[(&str, u32)] = &[
    ("etc", 0o755),
    ("home", 0o755),
    ("root", 0o700),
    ("tmp", 0o1777),
    ("var", 0o755),
    ("workspace", 0o1777),
];

/// Directories below those, made at first use.
const SUBDIRECTORIES: &[(&str, u32)] = &[
    ("var/cache", 0o755),
    ("var/lib", 0o755),
    ("var/local", 0o755),
    ("var/log", 0o755),
    ("var/mail", 0o755),
    ("var/opt", 0o755),
    ("var/spool", 0o755),
    ("var/tmp", 0o1777),
];

/// Written last at first use; holds the first host id of the owner range.
const MARKER: &str = ".cloister-layer";

/// Holds the name that is in the layer's `/etc`.
const HOSTNAME: &str = ".cloister-hostname";

/// Mounts the layer at `mount_point` in the calling process's mount namespace, and returns its root directory.
pub(super) fn mount(config: &ShimConfig, mount_point: &Path) -> Result<OwnedFd, BuildError> {
    let limited = !config.defences_off.contains(&Defence::DiskLimit);
    let attributes = mounts::layer_attributes(&config.defences_off);
    let target = mounts::open_path(mount_point).step_at("open layer mount point", mount_point)?;
    match &config.disk {
        DiskConfig::Loop { image } if limited => {
            let device = loop_device::attach_image(image)?;
            let source = device.path.to_str().expect("made from digits");
            let filesystem = mounts::make_filesystem("ext4", &[("source", source)], attributes)
                .step_at("mount disk image", image)?;
            mounts::attach(filesystem.as_fd(), target.as_fd()).step_at("attach layer", mount_point)?;
        }
        DiskConfig::Directory { path } => {
            let tree = mounts::clone_tree(rustix::fs::CWD, path, attributes, false)
                .step_at("bind layer directory", path)?;
            mounts::attach(tree.as_fd(), target.as_fd()).step_at("attach layer", mount_point)?;
        }
        DiskConfig::Tmpfs { bytes } => {
            let size = if limited { bytes.to_string() } else { "0".to_owned() };
            let options = [("size", size.as_str()), ("mode", "0700")];
            let filesystem =
                mounts::make_filesystem("tmpfs", &options, attributes).step("mount layer tmpfs")?;
            mounts::attach(filesystem.as_fd(), target.as_fd()).step_at("attach layer", mount_point)?;
        }
        // Without the limit the layer is the mount point's own directory, on the host's filesystem.
        DiskConfig::Loop { .. } => {
            let tree = mounts::clone_tree(rustix::fs::CWD, mount_point, attributes, false)
                .step_at("bind layer directory", mount_point)?;
            mounts::attach(tree.as_fd(), target.as_fd()).step_at("attach layer", mount_point)?;
        }
    }
    open_directory(rustix::fs::CWD, mount_point).step_at("open layer", mount_point)
}

/// Gives the layer its directories and files if no guest has run on it. Returns whether it did.
pub(super) fn ensure_content(layer: BorrowedFd<'_>, config: &ShimConfig) -> Result<bool, BuildError> {
    const STEP: &str = "prepare layer";
    match openat(layer, MARKER, OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW, Mode::empty()) {
        Ok(marker) => {
            let text = std::io::read_to_string(std::fs::File::from(marker)).step_at(STEP, MARKER)?;
            // Files of another range would belong to nobody inside, or to another session outside.
            if text.trim() != config.id_base.to_string() {
                return Err(Errno::PERM).step_at("check owner of layer", MARKER);
            }
            // A layer that is full, or in which the guest put something in the way, keeps what it has: that must not
            // keep a session from its resume.
            let _ = take_name(layer, &config.hostname, config.id_base);
            return Ok(false);
        }
        Err(Errno::NOENT) => {}
        Err(error) => return Err(error).step_at(STEP, MARKER),
    }
    for (name, mode) in DIRECTORIES.iter().chain(SUBDIRECTORIES) {
        make_directory(layer, name, *mode, config.id_base, 0).step_at(STEP, name)?;
    }
    make_directory(layer, etc::USER_HOME_IN_LAYER, 0o755, config.id_base, etc::USER_ID)
        .step_at(STEP, "home")?;
    for (name, target) in [("var/run", "/run"), ("var/lock", "/run/lock")] {
        make_symlink(layer, name, target, config.id_base).step_at(STEP, name)?;
    }
    let directory = open_directory(layer, "etc").step_at(STEP, "etc")?;
    etc::write(directory.as_fd(), config).map_err(|error| BuildError {
        step: "write /etc".to_owned(),
        path: Some(error.path),
        source: error.source,
    })?;
    write_file(layer, HOSTNAME, config.hostname.as_bytes(), 0o600, Uid::ROOT.as_raw())
        .step_at(STEP, HOSTNAME)?;
    write_file(layer, MARKER, config.id_base.to_string().as_bytes(), 0o600, Uid::ROOT.as_raw())
        .step_at(STEP, MARKER)?;
    Ok(true)
}

/// Brings the layer's `/etc` to the name that its sandbox has now.
pub(crate) fn take_name(layer: BorrowedFd<'_>, hostname: &str, id_base: u32) -> Result<(), Errno> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let written = openat(layer, HOSTNAME, flags, Mode::empty())
        .ok()
        .and_then(|file| std::io::read_to_string(std::fs::File::from(file)).ok());
    if written.as_deref() == Some(hostname) {
        return Ok(());
    }
    let directory = open_directory(layer, "etc")?;
    etc::rename_host(directory.as_fd(), hostname, id_base)?;
    write_file(layer, HOSTNAME, hostname.as_bytes(), 0o600, Uid::ROOT.as_raw())
}

/// Makes a directory of the sandbox's user `id`; one that an interrupted first use left is taken over.
pub(crate) fn make_directory(
    parent: BorrowedFd<'_>,
    path: &str,
    mode: u32,
    id_base: u32,
    id: u32,
) -> Result<(), Errno> {
    match mkdirat(parent, path, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(error) => return Err(error),
    }
    let directory = open_directory(parent, path)?;
    let (uid, gid) = owner(id_base, id);
    rustix::fs::fchown(directory.as_fd(), Some(uid), Some(gid))?;
    fchmod(directory.as_fd(), Mode::from_raw_mode(mode))
}

/// Makes a file with `content` that belongs to host uid `owner_id`; one that an interrupted first use left is replaced.
pub(crate) fn write_file(
    parent: BorrowedFd<'_>,
    path: &str,
    content: &[u8],
    mode: u32,
    owner_id: u32,
) -> Result<(), Errno> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let file = openat(parent, path, flags, Mode::from_raw_mode(mode))?;
    // The shim's umask has taken bits away.
    fchmod(file.as_fd(), Mode::from_raw_mode(mode))?;
    let mut rest = content;
    while !rest.is_empty() {
        let written = rustix::io::write(file.as_fd(), rest)?;
        rest = &rest[written..];
    }
    if owner_id != 0 {
        rustix::fs::fchown(file.as_fd(), Some(Uid::from_raw(owner_id)), Some(Gid::from_raw(owner_id)))?;
    }
    Ok(())
}

/// Makes a link that belongs to root of the sandbox; an existing one is left.
pub(crate) fn make_symlink(
    parent: BorrowedFd<'_>,
    path: &str,
    target: impl AsRef<Path>,
    id_base: u32,
) -> Result<(), Errno> {
    match rustix::fs::symlinkat(target.as_ref(), parent, path) {
        Ok(()) => {
            let (uid, gid) = owner(id_base, 0);
            chownat(parent, path, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)
        }
        Err(Errno::EXIST) => Ok(()),
        Err(error) => Err(error),
    }
}

fn open_directory(parent: BorrowedFd<'_>, path: impl AsRef<Path>) -> Result<OwnedFd, Errno> {
    openat(
        parent,
        path.as_ref(),
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW,
        Mode::empty(),
    )
}
