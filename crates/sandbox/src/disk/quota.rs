//! Project quotas of the filesystem that holds the data directory (ext4 with `prjquota`).
//!
//! Every file below a session's layer directory carries the session's project number, inherited from the directory, and
//! the kernel counts by it. Sources: quotactl(2), ioctl_fsgetxattr(2).
#![expect(
    unsafe_code,
    reason = "neither rustix nor nix has quotactl or the extended attributes of files by ioctl"
)]

use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use cloister_types::{ByteCount, Capability};

use super::DiskError;

const NAME: &str = "disk.quota";
/// `PRJQUOTA` of `linux/quota.h`.
const PROJECT_QUOTA: libc::c_int = 2;
/// Bytes of a block in which limits are given (`QIF_DQBLKSIZE`).
const QUOTA_BLOCK_BYTES: u64 = 1024;
/// `FS_XFLAG_PROJINHERIT` of `linux/fs.h`.
const INHERIT_PROJECT: u32 = 0x200;
/// `FS_IOC_FSGETXATTR` and `FS_IOC_FSSETXATTR` of `linux/fs.h`.
const GET_ATTRIBUTES: libc::c_ulong = 0x801c_581f;
const SET_ATTRIBUTES: libc::c_ulong = 0x401c_5820;

/// `struct fsxattr` of `linux/fs.h`.
#[repr(C)]
#[derive(Debug, Default)]
struct FileAttributes {
    flags: u32,
    extent_size: u32,
    extents: u32,
    project: u32,
    cow_extent_size: u32,
    padding: [u8; 8],
}

/// Asks the kernel whether the filesystem counts by project.
pub(super) fn probe(data_dir: &Path) -> Capability {
    let remedy = "not needed where `disk.loop` works; else mount the data directory's ext4 with `prjquota`";
    let device = match device_of(data_dir) {
        Ok(device) => device,
        Err(error) => {
            return Capability::failed(
                NAME,
                format!("find the device of the data directory: {error}"),
                remedy,
            );
        }
    };
    let mut format = 0_u32;
    match quotactl(libc::Q_GETFMT, &device, 0, (&raw mut format).cast()) {
        Ok(()) => Capability::ok(NAME, format!("`{}` has project quotas", device.display())),
        Err(error) => {
            Capability::failed(NAME, format!("project quotas of `{}`: {error}", device.display()), remedy)
        }
    }
}

/// Limits what is below `directory` to `limit`, counted as project number `project`.
pub(super) fn limit(directory: &Path, project: u32, limit: ByteCount) -> Result<(), DiskError> {
    let device =
        device_of(directory).map_err(|error| DiskError::io("find the device of", directory, error))?;
    set_project(directory, project)
        .map_err(|error| DiskError::io("give a project number to", directory, error))?;
    // SAFETY: all fields are integers, for which zero is a value.
    let mut quota: libc::dqblk = unsafe { std::mem::zeroed() };
    quota.dqb_bhardlimit = limit.0.div_ceil(QUOTA_BLOCK_BYTES);
    quota.dqb_bsoftlimit = quota.dqb_bhardlimit;
    quota.dqb_valid = libc::QIF_BLIMITS;
    let project = libc::c_int::try_from(project)
        .map_err(|_| DiskError::io("limit", directory, io::Error::from(io::ErrorKind::InvalidInput)))?;
    quotactl(libc::Q_SETQUOTA, &device, project, (&raw mut quota).cast())
        .map_err(|error| DiskError::io("limit", directory, error))
}

fn set_project(directory: &Path, project: u32) -> io::Result<()> {
    let file = File::open(directory)?;
    let mut attributes = FileAttributes::default();
    // SAFETY: the descriptor is open, and the pointer is to a live struct of the size that the request has encoded.
    if unsafe { libc::ioctl(file.as_raw_fd(), GET_ATTRIBUTES, &raw mut attributes) } != 0 {
        return Err(io::Error::last_os_error());
    }
    attributes.project = project;
    attributes.flags |= INHERIT_PROJECT;
    // SAFETY: as above; the kernel only reads the struct.
    if unsafe { libc::ioctl(file.as_raw_fd(), SET_ATTRIBUTES, &raw const attributes) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn quotactl(
    command: libc::c_int,
    device: &Path,
    id: libc::c_int,
    argument: *mut libc::c_char,
) -> io::Result<()> {
    let device = CString::new(device.as_os_str().as_bytes())?;
    let command = libc::QCMD(command, PROJECT_QUOTA);
    // SAFETY: `device` is a string that ends with NUL, and every caller passes what its command reads or writes.
    if unsafe { libc::quotactl(command, device.as_ptr(), id, argument) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Returns the block device of the filesystem that holds `path`.
fn device_of(path: &Path) -> io::Result<PathBuf> {
    let device = fs::metadata(path)?.dev();
    let number = format!("{}:{}", libc::major(device), libc::minor(device));
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let source = mounts.lines().find_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        (left.split(' ').nth(2)? == number).then(|| right.split(' ').nth(1))?
    });
    match source {
        Some(source) if source.starts_with('/') => Ok(PathBuf::from(source)),
        _ => Err(io::Error::new(io::ErrorKind::Unsupported, format!("device {number} is no block device"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_have_the_size_that_the_requests_encode() {
        assert_eq!(std::mem::size_of::<FileAttributes>(), 0x1c);
    }

    #[test]
    fn a_filesystem_without_project_quota_says_which_and_why() {
        let directory = tempfile::tempdir().unwrap();
        let probe = probe(directory.path());
        if probe.is_ok() {
            limit(directory.path(), 12_345, ByteCount::mib(1)).unwrap();
            let written = fs::write(directory.path().join("large"), vec![1_u8; 3 << 20]);
            assert!(written.is_err(), "3 MiB fit into a quota of 1 MiB");
        } else {
            assert!(!probe.detail.is_empty() && !probe.remedy.is_empty(), "{probe:?}");
            assert!(limit(directory.path(), 12_345, ByteCount::mib(1)).is_err());
        }
    }
}
