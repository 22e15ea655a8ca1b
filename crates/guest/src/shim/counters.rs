//! What the kernel counted against a sandbox's limits: how an exec's end is told from a limit's doing.
//!
//! The counts are the whole sandbox's, not an exec's. So an exec is said to have died of the memory limit when the
//! kernel killed somebody at that limit while it ran *and* it ended by SIGKILL, or returned what a shell returns for
//! a child that did. A kill that it survived, the process limit and the disk are reported beside the exit and do not
//! change it.
//!
//! For the disk there is no count: no kernel counter says that a write was refused. The layer is looked at when an exec
//! ends, and a full one is reported to an exec that failed; one that succeeded has nothing to be explained.

use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use super::config::CgroupConfig;

/// Free bytes below which the layer counts as full, unless a 64th of it is less. A refused write leaves what it asked
/// for in one piece: after `dd bs=1M` on ext4, 400 to 560 KiB stayed free.
const FULL_BELOW_BYTES: u64 = 1024 * 1024;

/// The counts at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) oom_kills: u64,
    pub(super) pids_limit_hits: u64,
}

/// Where the counts are read, kept open: an exec reads them twice.
pub(super) struct Counters {
    oom: Option<File>,
    pids: Option<File>,
    layer: OwnedFd,
}

impl Counters {
    /// Opens the files of `cgroup`; one that is not there counts nothing.
    pub(super) fn open(cgroup: &CgroupConfig, layer: OwnedFd) -> Self {
        let open =
            |path: &Option<std::path::PathBuf>| path.as_deref().and_then(|path: &Path| File::open(path).ok());
        Self { oom: open(&cgroup.oom_file), pids: open(&cgroup.pids_file), layer }
    }

    /// Does something with the top directory of the writable layer.
    pub(super) fn with_layer<T>(&self, work: impl FnOnce(BorrowedFd<'_>) -> T) -> T {
        work(self.layer.as_fd())
    }

    pub(super) fn read(&self) -> Counts {
        Counts {
            oom_kills: self.oom.as_ref().map_or(0, |file| count(file, "oom_kill")),
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
}

fn is_full(size_bytes: u64, free_bytes: u64) -> bool {
    free_bytes < FULL_BELOW_BYTES.min(size_bytes / 64)
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
        assert!(!is_full(64 * MIB, MIB));
        assert!(!is_full(1024 * MIB, MIB));
        // A small layer is not full while a fair part of it is free.
        assert!(!is_full(16 * MIB, 300 * 1024));
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
