//! The directory that is `/` to whoever asks.

use std::ffi::CString;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, openat, openat2, statat};
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

    /// Opens the directory that `path` stands in, and returns it with the last name; no name for the root itself.
    pub(super) fn open_parent(&self, path: &[u8]) -> Result<(OwnedFd, Option<CString>), Errno> {
        let end = path.iter().rposition(|byte| *byte != b'/').map_or(0, |at| at + 1);
        let path = &path[..end];
        let begin = path.iter().rposition(|byte| *byte == b'/').map_or(0, |at| at + 1);
        let (parent, name) = path.split_at(begin);
        let directory = OFlags::PATH | OFlags::DIRECTORY;
        match name {
            // What such a name stands for is found by resolving it.
            b"" | b"." | b".." => Ok((self.open(path, directory)?, None)),
            name => {
                let name = CString::new(name).map_err(|_| Errno::INVAL)?;
                Ok((self.open(parent, directory)?, Some(name)))
            }
        }
    }

    /// Opens the directory at `path`, and makes what is missing of it.
    pub(super) fn ensure_directory(&self, path: &[u8]) -> Result<OwnedFd, Errno> {
        let directory = OFlags::PATH | OFlags::DIRECTORY;
        let mut made: Vec<u8> = b"/".to_vec();
        match self.open(path, directory) {
            Err(Errno::NOENT) => {}
            other => return other,
        }
        for name in path.split(|byte| *byte == b'/').filter(|name| !name.is_empty()) {
            let (parent, last) =
                (self.open(&made, directory)?, CString::new(name).map_err(|_| Errno::INVAL)?);
            if name != b"." && name != b".." && statat(&parent, &last, AtFlags::SYMLINK_NOFOLLOW).is_err() {
                match rustix::fs::mkdirat(parent.as_fd(), &last, Mode::from_raw_mode(0o755)) {
                    Ok(()) | Err(Errno::EXIST) => {}
                    Err(errno) => return Err(errno),
                }
            }
            made.extend_from_slice(name);
            made.push(b'/');
        }
        self.open(path, directory)
    }
}

fn open_directory(path: &Path) -> Result<OwnedFd, Errno> {
    openat(CWD, path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
}
