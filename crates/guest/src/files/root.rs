//! The directory that is `/` to whoever asks.

use std::ffi::CString;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat, openat2};
use rustix::io::Errno;

/// How often a path is resolved again that was renamed meanwhile.
const RACES_MAX: u32 = 128;

/// A directory out of which no path leads.
#[derive(Debug)]
pub struct Root {
    dir: OwnedFd,
    /// It is the calling process's own root, which confines by itself.
    is_own: bool,
}

impl Root {
    /// Opens the root of the calling process.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn own() -> Result<Self, Errno> {
        Ok(Self { dir: open_directory(Path::new("/"))?, is_own: true })
    }

    /// Opens a directory as a root.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn at(path: &Path) -> Result<Self, Errno> {
        Ok(Self { dir: open_directory(path)?, is_own: false })
    }

    /// Opens what `path` leads to, links followed inside the root only.
    pub(super) fn open(&self, path: &[u8], flags: OFlags) -> Result<OwnedFd, Errno> {
        let relative = path.iter().position(|byte| *byte != b'/').map_or(&b"."[..], |at| &path[at..]);
        let relative = CString::new(relative).map_err(|_| Errno::INVAL)?;
        let flags = flags | OFlags::CLOEXEC;
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        for _ in 0..RACES_MAX {
            match openat2(&self.dir, &relative, flags, Mode::empty(), resolve) {
                // Something was renamed while the kernel looked whether it leads outside.
                Err(Errno::AGAIN) => {}
                // gVisor has no such call; the process's own root holds all the same.
                Err(Errno::NOSYS) if self.is_own => {
                    return openat(&self.dir, &relative, flags, Mode::empty());
                }
                other => return other,
            }
        }
        Err(Errno::AGAIN)
    }
}

fn open_directory(path: &Path) -> Result<OwnedFd, Errno> {
    openat(CWD, path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
}
