//! What the kernel counted against a sandbox's limits: how an exec's end is told from a limit's doing.
//!
//! The counts are the whole sandbox's, not an exec's. So an exec is said to have died of the memory limit when the
//! kernel killed somebody at that limit while it ran *and* it ended by SIGKILL, or returned what a shell returns for
//! a child that did. A kill that it survived, the process limit and the disk are reported beside the exit and do not
//! change it.
//!
//! For a full disk there is no count: no kernel counter says that a write was refused. The layer is looked at when an exec
//! ends, and a full one is reported to an exec that failed; one that succeeded has nothing to be explained.
//!
//! A disk that breaks below the layer (the host's own is full, or fails) is counted by the layer's filesystem where that
//! met it itself (`/sys/fs/ext4/<device>/errors_count`). File data that was lost on the way out is told by `syncfs`
//! alone, which writes everything out and so is asked for only once the sandbox has ended; before, a host's disk without
//! room under an image that takes its room as it is written is told as well.

use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use super::config::{DiskConfig, ShimConfig};

/// Free bytes below which the layer counts as full, unless a 40th of it is less. A refused write leaves what it asked
/// for in one piece: after `dd bs=1M` on ext4, 400 to 560 KiB stayed free, also of the 25 MiB that a layer of 32 MiB has.
const FULL_BELOW_BYTES: u64 = 1024 * 1024;

/// What a host's disk cannot place any more when it has less than this.
const NO_ROOM_BYTES: u64 = 64 * 1024;

/// The counts at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) oom_kills: u64,
    /// Kills in the guest agent's own group, which no program can cause.
    pub(super) agent_oom_kills: u64,
    pub(super) pids_limit_hits: u64,
}

/// Where the counts are read, kept open: an exec reads them twice.
pub(super) struct Counters {
    oom: Option<File>,
    /// The same for the guest agent's own group.
    agent_oom: Option<File>,
    pids: Option<File>,
    layer: OwnedFd,
    /// Where the layer's filesystem counts its errors, and how many it had at the start.
    errors: Option<(File, u64)>,
    /// The directory of a sparse image.
    below: Option<File>,
}

impl Counters {
    /// Opens the files of the control groups; one that is not there counts nothing.
    pub(super) fn open(config: &ShimConfig, layer: OwnedFd) -> Self {
        let cgroup = &config.cgroup;
        let open =
            |path: &Option<std::path::PathBuf>| path.as_deref().and_then(|path: &Path| File::open(path).ok());
        let errors = errors_file(&layer).map(|file| {
            let before = number(&file);
            (file, before)
        });
        let below = match &config.disk {
            DiskConfig::Loop { image } => image.parent().and_then(|directory| File::open(directory).ok()),
            DiskConfig::Directory { .. } | DiskConfig::Tmpfs { .. } => None,
        };
        let agent_oom_file = cgroup.oom_file.as_deref().and_then(agent_sibling);
        Self {
            oom: open(&cgroup.oom_file),
            agent_oom: open(&agent_oom_file),
            pids: open(&cgroup.pids_file),
            layer,
            errors,
            below,
        }
    }

    /// Does something with the top directory of the writable layer.
    pub(super) fn with_layer<T>(&self, work: impl FnOnce(BorrowedFd<'_>) -> T) -> T {
        work(self.layer.as_fd())
    }

    pub(super) fn read(&self) -> Counts {
        Counts {
            oom_kills: self.oom.as_ref().map_or(0, |file| count(file, "oom_kill")),
            agent_oom_kills: self.agent_oom.as_ref().map_or(0, |file| count(file, "oom_kill")),
            pids_limit_hits: self.pids.as_ref().map_or(0, |file| count(file, "max")),
        }
    }

    /// Returns whether the writable layer has no room left, for bytes or for files.
    pub(super) fn disk_full(&self) -> bool {
        let Ok(stat) = rustix::fs::fstatvfs(&self.layer) else { return false };
        let free = stat.f_bavail.saturating_mul(stat.f_frsize);
        let size = stat.f_blocks.saturating_mul(stat.f_frsize);
        is_full(size, free) || (stat.f_files > 0 && stat.f_favail == 0)
    }

    /// Returns whether what is being written may be lost: the host's disk has no room for it, or failed.
    pub(super) fn disk_error(&self) -> bool {
        self.layer_failed() || self.below.as_ref().is_some_and(has_no_room)
    }

    /// Returns whether the layer's filesystem has met an error of its disk since the sandbox started.
    pub(super) fn layer_failed(&self) -> bool {
        self.errors.as_ref().is_some_and(|(file, before)| number(file) > *before)
    }

    /// Returns another descriptor of the layer, with which it is written out.
    pub(super) fn layer(&self) -> std::io::Result<OwnedFd> {
        self.layer.try_clone()
    }
}

fn has_no_room(directory: &File) -> bool {
    // What is kept back for root is room: images are written by the kernel.
    rustix::fs::fstatvfs(directory)
        .is_ok_and(|stat| stat.f_bfree.saturating_mul(stat.f_frsize) < NO_ROOM_BYTES)
}

/// Opens the file in which the filesystem of `layer` counts its errors; of a filesystem that is not ext4 there is none.
fn errors_file(layer: &OwnedFd) -> Option<File> {
    let device = rustix::fs::fstat(layer).ok()?.st_dev;
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let link = std::fs::read_link(format!("/sys/dev/block/{major}:{minor}")).ok()?;
    File::open(Path::new("/sys/fs/ext4").join(link.file_name()?).join("errors_count")).ok()
}

/// Returns the number that is all of a file; 0 when there is none.
fn number(file: &File) -> u64 {
    let mut buffer = [0; 32];
    let length = file.read_at(&mut buffer, 0).unwrap_or(0);
    String::from_utf8_lossy(&buffer[..length]).trim().parse().unwrap_or(0)
}

/// Returns the file of the guest agent's group that `work`'s file has its name from: the groups are siblings.
fn agent_sibling(work: &Path) -> Option<PathBuf> {
    Some(work.parent()?.parent()?.join("agent").join(work.file_name()?))
}

fn is_full(size_bytes: u64, free_bytes: u64) -> bool {
    free_bytes < FULL_BELOW_BYTES.min(size_bytes / 40)
}

/// Returns the number in the line `key N`; 0 when there is none.
fn count(file: &File, key: &str) -> u64 {
    let mut buffer = [0; 1024];
    let length = file.read_at(&mut buffer, 0).unwrap_or(0);
    let text = String::from_utf8_lossy(&buffer[..length]);
    let value = |line: &str| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok();
    text.lines().find_map(value).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_is_full_when_a_large_write_no_longer_fits() {
        const MIB: u64 = 1 << 20;
        assert!(is_full(64 * MIB, 560 * 1024));
        assert!(is_full(25_844 * 1024, 555 * 1024));
        assert!(!is_full(64 * MIB, MIB));
        assert!(!is_full(1024 * MIB, MIB));
        // A small layer is not full while a fair part of it is free.
        assert!(!is_full(16 * MIB, 500 * 1024));
        assert!(is_full(16 * MIB, 0));
    }

    #[test]
    fn counts_are_found_by_their_key() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("memory.oom_control");
        std::fs::write(&path, "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n").unwrap();
        let file = File::open(&path).unwrap();
        assert_eq!(count(&file, "oom_kill"), 3);
        assert_eq!(count(&file, "max"), 0);
        std::fs::write(&path, "max 12\nmax.imposed 4\n").unwrap();
        assert_eq!(count(&File::open(&path).unwrap(), "max"), 12);
    }
}
