//! What is known of a file, between the kernel's form and the wire's.

use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd};

use cloister_api::guest::{FileInfo, FileKind};
use rustix::fs::{AtFlags, FileType, Stat, Timespec, Timestamps, UTIME_OMIT, readlinkat, statat};
use rustix::io::Errno;

/// Permission bits with set-id and sticky bits.
pub(super) const MODE_BITS: u32 = 0o7777;
const NANOS: i64 = 1_000_000_000;
const SECTOR_BYTES: u64 = 512;

/// Returns what is at `name` in `dir`, a link as itself.
///
/// # Errors
///
/// The kernel's.
pub(super) fn info_of(dir: BorrowedFd<'_>, name: &CStr) -> Result<FileInfo, Errno> {
    let stat = statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)?;
    let mut info = from_stat(&stat);
    if is(&info, FileKind::FILE_KIND_SYMLINK) {
        info.link_target = readlinkat(dir, name, Vec::new())?.into_bytes();
    }
    Ok(info)
}

pub(super) fn from_stat(stat: &Stat) -> FileInfo {
    let kind = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => FileKind::FILE_KIND_FILE,
        FileType::Directory => FileKind::FILE_KIND_DIRECTORY,
        FileType::Symlink => FileKind::FILE_KIND_SYMLINK,
        _ => FileKind::FILE_KIND_OTHER,
    };
    FileInfo {
        kind: kind.into(),
        mode: stat.st_mode & MODE_BITS,
        size: u64::try_from(stat.st_size).unwrap_or(0),
        modified_unix_ns: modified_ns(stat),
        ..FileInfo::default()
    }
}

/// Returns whether less of the file is on the disk than it is long.
pub(super) fn may_have_holes(stat: &Stat) -> bool {
    let on_disk = u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(SECTOR_BYTES);
    on_disk < u64::try_from(stat.st_size).unwrap_or(0)
}

pub(super) fn modified_ns(stat: &Stat) -> i64 {
    let nanos = i64::try_from(stat.st_mtime_nsec).unwrap_or(0);
    stat.st_mtime.saturating_mul(NANOS).saturating_add(nanos)
}

pub(super) fn is(info: &FileInfo, kind: FileKind) -> bool {
    info.kind.as_known() == Some(kind)
}

/// Sets the time of the last change, and no other.
pub(super) fn set_modified(file: impl AsFd, unix_ns: i64) -> Result<(), Errno> {
    rustix::fs::futimens(file, &timestamps(unix_ns))
}

fn timestamps(unix_ns: i64) -> Timestamps {
    Timestamps {
        last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
        last_modification: Timespec { tv_sec: unix_ns.div_euclid(NANOS), tv_nsec: unix_ns.rem_euclid(NANOS) },
    }
}

/// As [`set_modified`], of a link itself.
pub(super) fn set_link_modified(dir: BorrowedFd<'_>, name: &CStr, unix_ns: i64) -> Result<(), Errno> {
    rustix::fs::utimensat(dir, name, &timestamps(unix_ns), AtFlags::SYMLINK_NOFOLLOW)
}
