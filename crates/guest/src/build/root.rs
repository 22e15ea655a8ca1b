//! The sandbox's root, built at a mount point in the shim's own mount namespace before any user namespace exists.
//!
//! A small tmpfs holds the skeleton and is made read-only at the end; onto it go read-only views of the host's system
//! directories, the layer's writable directories, device nodes, terminals, shared memory, and `/run`. All of it is
//! copied into the sandbox's mount namespace when that becomes less privileged, which is what locks it: nobody inside
//! can take a mount away, make it writable, or look beneath (see `mount_namespaces(7)`, "Restrictions").

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, OFlags, fchmod, fchown, mkdirat, openat, symlinkat};
use rustix::io::Errno;
use rustix::mount::MountAttrFlags;

use super::error::{BuildError, StepContext};
use super::mounts::{self, DEVICE, READ_ONLY, WRITABLE};
use super::{gvisor, layer, owner};
use crate::etc;
use crate::shim::config::{KernelConfig, ShimConfig};

/// Empty places that the standards name and nothing is put into.
const EMPTY_DIRECTORIES: &[&str] = &["mnt", "opt", "proc", "srv"];
/// System directories that are links into `/usr` on a merged system, and directories on others.
const SYSTEM_DIRECTORIES: &[&str] = &["bin", "lib", "lib32", "lib64", "libx32", "sbin"];
/// Devices with no state that one sandbox could share with another, except the host's entropy.
const DEVICES: &[&str] = &["full", "null", "random", "tty", "urandom", "zero"];
const DEVICE_LINKS: &[(&str, &str)] = &[
    ("dev/fd", "/proc/self/fd"),
    ("dev/ptmx", "pts/ptmx"),
    ("dev/stderr", "/proc/self/fd/2"),
    ("dev/stdin", "/proc/self/fd/0"),
    ("dev/stdout", "/proc/self/fd/1"),
];
/// The group `tty` of the synthesised `/etc/group`, which owns terminals.
const TTY_GROUP: u32 = 5;
/// Terminals of one sandbox. All of them share 3072 of the host's (`kernel.pty.max` less its reserve).
const TERMINALS_MAX: &str = "64";
/// Bound of `/dev/shm`, as for `/run` on top of the memory limit that its pages count against; four times what
/// container engines give by default, because browsers and data loaders run out of that.
const SHM_BYTES: &str = "268435456";
const RUN_BYTES: &str = "16777216";
/// Inodes are kernel memory, so they are bounded apart from bytes.
const TMPFS_INODES: &str = "65536";

/// Builds the root at `mount_point` around the writable `layer`, and returns the root directory.
pub(super) fn build(
    config: &ShimConfig,
    mount_point: &Path,
    layer: BorrowedFd<'_>,
) -> Result<OwnedFd, BuildError> {
    let base = config.id_base.to_string();
    let options = [
        ("size", "1048576"),
        ("nr_inodes", "1024"),
        ("mode", "0755"),
        ("uid", base.as_str()),
        ("gid", base.as_str()),
    ];
    let target = mounts::open_path(mount_point).step_at("open root mount point", mount_point)?;
    let skeleton = mounts::make_filesystem("tmpfs", &options, WRITABLE).step("make root tmpfs")?;
    mounts::attach(skeleton.as_fd(), target.as_fd()).step_at("attach root", mount_point)?;
    let root = openat(CWD, mount_point, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .step_at("open root", mount_point)?;

    let builder = Builder { root: root.as_fd(), id_base: config.id_base };
    builder.system()?;
    builder.writable(layer, mounts::layer_attributes(&config.defences_off))?;
    builder.etc()?;
    match config.kernel {
        KernelConfig::Host => {
            builder.run()?;
            builder.devices()?;
        }
        // The sentry makes its own devices, and its own memory filesystems.
        KernelConfig::Gvisor { .. } => builder.sentry_places()?,
    }
    for name in EMPTY_DIRECTORIES {
        builder.directory(name, 0o755).step_at("make root directory", name)?;
    }
    mounts::set_attributes(root.as_fd(), READ_ONLY, false).step_at("make root read-only", mount_point)?;
    Ok(root)
}

struct Builder<'a> {
    root: BorrowedFd<'a>,
    id_base: u32,
}

impl Builder<'_> {
    /// `/usr` with everything mounted below it, and what the host links to it.
    fn system(&self) -> Result<(), BuildError> {
        const STEP: &str = "bind system directory";
        self.view("/usr", "usr", READ_ONLY).step_at(STEP, "/usr")?;
        for name in SYSTEM_DIRECTORIES {
            let host = Path::new("/").join(name);
            let Ok(metadata) = std::fs::symlink_metadata(&host) else { continue };
            if metadata.is_symlink() {
                let target = std::fs::read_link(&host).step_at(STEP, &host)?;
                symlinkat(target, self.root, *name).step_at(STEP, &host)?;
            } else if metadata.is_dir() {
                self.view(&host, name, READ_ONLY).step_at(STEP, &host)?;
            }
        }
        Ok(())
    }

    /// The layer's directories.
    fn writable(&self, layer: BorrowedFd<'_>, attributes: MountAttrFlags) -> Result<(), BuildError> {
        const STEP: &str = "bind writable directory";
        for (name, _) in layer::DIRECTORIES {
            let tree = mounts::clone_tree(layer, name, attributes, false).step_at(STEP, name)?;
            self.directory(name, 0o755).step_at(STEP, name)?;
            self.attach(tree.as_fd(), name).step_at(STEP, name)?;
        }
        Ok(())
    }

    /// What runsc mounts over, and the places of what is ours.
    fn sentry_places(&self) -> Result<(), BuildError> {
        const STEP: &str = "make place of the sentry";
        let own = gvisor::PLACE.trim_start_matches('/');
        for name in ["dev", "run", "sys", own, &format!("{own}/link")] {
            self.directory(name, 0o755).step_at(STEP, name)?;
        }
        for name in ["guest", "agent.json"] {
            let path = format!("{own}/{name}");
            let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
            let file = openat(self.root, &path, flags, Mode::from_raw_mode(0o644)).step_at(STEP, &path)?;
            let (uid, gid) = owner(self.id_base, 0);
            fchown(file, Some(uid), Some(gid)).step_at(STEP, &path)?;
        }
        Ok(())
    }

    fn run(&self) -> Result<(), BuildError> {
        self.tmpfs("run", RUN_BYTES, "0755", WRITABLE).step_at("mount tmpfs", "/run")?;
        let lock = mounts::open_beneath(self.root, "run").step_at("mount tmpfs", "/run")?;
        layer::make_directory(lock.as_fd(), "lock", 0o1777, self.id_base, 0)
            .step_at("mount tmpfs", "/run/lock")
    }

    /// Read-only views in `/etc`, each where its place still is what first use made: the sandbox owns `/etc`, and may
    /// have put something of its own there.
    fn etc(&self) -> Result<(), BuildError> {
        const STEP: &str = "bind host file in /etc";
        let directory = mounts::open_beneath(self.root, "etc").step_at(STEP, "/etc")?;
        for name in etc::HOST_VIEWS {
            let host = Path::new("/etc").join(name);
            let Ok(metadata) = std::fs::symlink_metadata(&host) else { continue };
            if metadata.is_symlink() {
                continue;
            }
            let Ok(place) = mounts::open_beneath(directory.as_fd(), name) else { continue };
            let kind =
                FileType::from_raw_mode(rustix::fs::fstat(place.as_fd()).step_at(STEP, &host)?.st_mode);
            if metadata.is_dir() != (kind == FileType::Directory) || kind == FileType::Symlink {
                continue;
            }
            let tree = mounts::clone_tree(CWD, &host, READ_ONLY, metadata.is_dir()).step_at(STEP, &host)?;
            mounts::attach(tree.as_fd(), place.as_fd()).step_at(STEP, &host)?;
        }
        Ok(())
    }

    fn devices(&self) -> Result<(), BuildError> {
        const STEP: &str = "make device";
        for name in ["dev", "dev/pts", "dev/shm"] {
            self.directory(name, 0o755).step_at(STEP, name)?;
        }
        for name in DEVICES {
            let host = Path::new("/dev").join(name);
            let place = openat(
                self.root,
                format!("dev/{name}"),
                OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC,
                Mode::from_raw_mode(0o644),
            )
            .step_at(STEP, &host)?;
            let node = mounts::clone_tree(CWD, &host, DEVICE, false).step_at(STEP, &host)?;
            mounts::attach(node.as_fd(), place.as_fd()).step_at(STEP, &host)?;
        }
        for (name, target) in DEVICE_LINKS {
            symlinkat(*target, self.root, *name).step_at(STEP, name)?;
        }
        let group = self.id_base.saturating_add(TTY_GROUP).to_string();
        let options =
            [("mode", "0620"), ("ptmxmode", "0666"), ("gid", group.as_str()), ("max", TERMINALS_MAX)];
        let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NOEXEC;
        let terminals =
            mounts::make_filesystem("devpts", &options, attributes).step_at("mount devpts", "/dev/pts")?;
        self.attach(terminals.as_fd(), "dev/pts").step_at("mount devpts", "/dev/pts")?;
        self.tmpfs("dev/shm", SHM_BYTES, "1777", WRITABLE).step_at("mount tmpfs", "/dev/shm")
    }

    /// Mounts a bounded tmpfs that belongs to root of the sandbox, making its mount point.
    fn tmpfs(&self, path: &str, bytes: &str, mode: &str, attributes: MountAttrFlags) -> Result<(), Errno> {
        let base = self.id_base.to_string();
        let options = [
            ("size", bytes),
            ("nr_inodes", TMPFS_INODES),
            ("mode", mode),
            ("uid", base.as_str()),
            ("gid", base.as_str()),
        ];
        self.directory(path, 0o755)?;
        let filesystem = mounts::make_filesystem("tmpfs", &options, attributes)?;
        self.attach(filesystem.as_fd(), path)
    }

    /// Binds the host's `source` with everything mounted below it, making its mount point.
    fn view(&self, source: impl AsRef<Path>, name: &str, attributes: MountAttrFlags) -> Result<(), Errno> {
        let tree = mounts::clone_tree(CWD, source, attributes, true)?;
        self.directory(name, 0o755)?;
        self.attach(tree.as_fd(), name)
    }

    fn attach(&self, mount: BorrowedFd<'_>, name: &str) -> Result<(), Errno> {
        let place = mounts::open_beneath(self.root, name)?;
        mounts::attach(mount, place.as_fd())
    }

    fn directory(&self, path: &str, mode: u32) -> Result<(), Errno> {
        match mkdirat(self.root, path, Mode::from_raw_mode(mode)) {
            Ok(()) => {}
            Err(Errno::EXIST) => return Ok(()),
            Err(error) => return Err(error),
        }
        let directory =
            openat(self.root, path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        let (uid, gid) = owner(self.id_base, 0);
        fchown(directory.as_fd(), Some(uid), Some(gid))?;
        // The shim's umask may have taken bits away.
        fchmod(directory.as_fd(), Mode::from_raw_mode(mode))
    }
}
