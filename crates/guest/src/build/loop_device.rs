//! Attaches a disk image to a free loop device that the kernel takes away again by itself.
//!
//! `LO_FLAGS_AUTOCLEAR` detaches the image when the last user is gone. The users are the descriptor returned here and,
//! later, the mounts of the filesystem; those live in mount namespaces that end with the sandbox's processes. So the
//! device needs no undo, not even after kill -9.

#![expect(unsafe_code, reason = "loop devices are driven by ioctl")]

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;

use super::error::{BuildError, StepContext};
use super::mounts::last_errno;

// include/uapi/linux/loop.h
const LOOP_CTL_GET_FREE: libc::Ioctl = 0x4C82;
const LOOP_CONFIGURE: libc::Ioctl = 0x4C0A;
const LO_FLAGS_AUTOCLEAR: u32 = 4;
/// Others on the machine may take the device that we were just told is free. Each loser asks again, and each round has a
/// winner, so the bound is far above the sandboxes that one host starts at once; it only keeps a shim from asking forever.
const ATTEMPTS: u32 = 512;

/// `struct loop_config`, with `struct loop_info64` flattened into it.
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
    reserved: [u64; 8],
}

/// A loop device with an image attached, kept alive by the descriptor.
#[derive(Debug)]
pub(super) struct LoopDevice {
    /// `/dev/loopN`
    pub(super) path: PathBuf,
    /// Holds the device until something is mounted from it.
    _device: OwnedFd,
}

/// Attaches `image` to a free loop device.
///
/// # Errors
///
/// `EBUSY` when every attempt lost the race for a device; whatever opening the image or a device gave.
pub(super) fn attach_image(image: &Path) -> Result<LoopDevice, BuildError> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let file = open(image, flags, Mode::empty()).step_at("open disk image", image)?;
    let control_path = Path::new("/dev/loop-control");
    let control = open(control_path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        .step_at("open loop control", control_path)?;
    let config = configuration(&file, image)?;
    for _ in 0..ATTEMPTS {
        // SAFETY: the ioctl takes no argument and the descriptor is open.
        // JUSTIFICATION: loop control has no other interface.
        let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) };
        if number < 0 {
            return Err(last_errno()).step("find free loop device");
        }
        let path = PathBuf::from(format!("/dev/loop{number}"));
        let device =
            open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).step_at("open loop device", &path)?;
        // SAFETY: both descriptors are open, and `config` is the structure that this ioctl reads.
        // JUSTIFICATION: one call attaches and configures, so that a crash in between leaves nothing.
        let result = unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE, &raw const config) };
        if result == 0 {
            return Ok(LoopDevice { path, _device: device });
        }
        match last_errno() {
            Errno::BUSY => {}
            other => return Err(other).step_at("attach disk image", image),
        }
    }
    Err(Errno::BUSY).step_at("attach disk image", image)
}

fn configuration(file: &OwnedFd, image: &Path) -> Result<LoopConfig, BuildError> {
    let fd =
        u32::try_from(file.as_raw_fd()).map_err(|_| BuildError::new("attach disk image", Errno::BADF))?;
    let mut file_name = [0; 64];
    // The end of the path tells sandboxes apart in `losetup`; the last byte stays NUL.
    let name = image.as_os_str().as_bytes();
    let tail = &name[name.len().saturating_sub(file_name.len() - 1)..];
    file_name[..tail.len()].copy_from_slice(tail);
    Ok(LoopConfig {
        fd,
        block_size: 0,
        device: 0,
        inode: 0,
        rdevice: 0,
        offset: 0,
        size_limit: 0,
        number: 0,
        encrypt_type: 0,
        encrypt_key_size: 0,
        flags: LO_FLAGS_AUTOCLEAR,
        file_name,
        crypt_name: [0; 64],
        encrypt_key: [0; 32],
        init: [0; 2],
        reserved: [0; 8],
    })
}

#[cfg(test)]
mod tests {
    use super::LoopConfig;

    #[test]
    fn loop_config_has_the_size_the_kernel_reads() {
        // 8 bytes of header, `sizeof(struct loop_info64)` = 232, 64 bytes reserved.
        assert_eq!(size_of::<LoopConfig>(), 304);
    }
}
