//! Files that are being written, beside the place they are for.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::os::fd::{AsFd as _, BorrowedFd};

use cloister_api::guest::FileInfo;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, fstat, openat, unlinkat};
use rustix::io::Errno;

/// Bytes of a name that are kept in its part's name, so that this fits too.
const NAME_KEPT_BYTES: usize = 200;
/// What is hashed at once.
const PIECE_BYTES: usize = 256 * 1024;

/// A file on its way to its place.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) name: CString,
    pub(super) file: File,
    pub(super) hasher: blake3::Hasher,
    /// Bytes that were hashed: where the next come.
    pub(super) offset: u64,
}

impl Part {
    /// Opens the part of the file `name`. With `kept`, what an earlier transfer of the same file left is taken up.
    pub(super) fn open(dir: BorrowedFd<'_>, name: &CStr, info: &FileInfo, kept: bool) -> Result<Self, Errno> {
        let part_name = part_name(name, info);
        if kept && let Some(part) = Self::take_up(dir, &part_name, info)? {
            return Ok(part);
        }
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR;
        let file = match openat(dir, &part_name, flags, mode) {
            Err(Errno::EXIST) => {
                // Left by a transfer that was killed, or planted.
                unlinkat(dir, &part_name, AtFlags::empty())?;
                openat(dir, &part_name, flags, mode)?
            }
            other => other?,
        };
        Ok(Self { name: part_name, file: file.into(), hasher: blake3::Hasher::new(), offset: 0 })
    }

    fn take_up(dir: BorrowedFd<'_>, name: &CStr, info: &FileInfo) -> Result<Option<Self>, Errno> {
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let Ok(file) = openat(dir, name, flags, Mode::empty()) else { return Ok(None) };
        let stat = fstat(&file)?;
        // Where others may make files too, one may have been laid out for this: its owner could change it afterwards.
        let is_ours = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
            && stat.st_nlink == 1
            && stat.st_uid == rustix::process::geteuid().as_raw();
        let length = u64::try_from(stat.st_size).unwrap_or(u64::MAX);
        if !is_ours || length == 0 || length > info.size {
            return Ok(None);
        }
        let mut part =
            Self { name: name.to_owned(), file: file.into(), hasher: blake3::Hasher::new(), offset: 0 };
        // A file that is cut off meanwhile is only shorter.
        part.offset = hash_from(&mut part.file, &mut part.hasher, length).map_err(errno_of)?;
        Ok(Some(part))
    }

    /// Goes on at `offset`, which is where it stands or the beginning.
    pub(super) fn start(&mut self, offset: u64) -> Result<bool, Errno> {
        if offset == self.offset {
            return Ok(true);
        }
        if offset != 0 {
            return Ok(false);
        }
        rustix::fs::ftruncate(&self.file, 0)?;
        self.hasher.reset();
        self.offset = 0;
        Ok(true)
    }

    /// Adds bytes; what lies between is a hole.
    pub(super) fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), Errno> {
        hash_zeros(&mut self.hasher, offset.saturating_sub(self.offset));
        std::os::unix::fs::FileExt::write_all_at(&self.file, data, offset).map_err(errno_of)?;
        self.hasher.update(data);
        self.offset = offset + u64::try_from(data.len()).unwrap_or(0);
        Ok(())
    }

    /// Gives the file its whole length.
    pub(super) fn complete(&mut self, size: u64) -> Result<blake3::Hash, Errno> {
        hash_zeros(&mut self.hasher, size.saturating_sub(self.offset));
        self.offset = size;
        rustix::fs::ftruncate(&self.file, size)?;
        Ok(self.hasher.finalize())
    }

    /// Removes it.
    pub(super) fn discard(self, dir: BorrowedFd<'_>) {
        // What stays is taken up or removed by the next transfer of the file.
        let _ = unlinkat(dir.as_fd(), &self.name, AtFlags::empty());
    }
}

/// Returns the name of a file's part, which says which content it is the beginning of: whoever copies the same again takes it
/// up or replaces it, so that a copy which was killed leaves one at most.
fn part_name(name: &CStr, info: &FileInfo) -> CString {
    let name = name.to_bytes();
    let mut key = blake3::Hasher::new();
    key.update(name);
    key.update(&info.size.to_le_bytes());
    key.update(&info.modified_unix_ns.to_le_bytes());
    let mut part = Vec::with_capacity(NAME_KEPT_BYTES + 32);
    part.push(b'.');
    part.extend_from_slice(&name[..name.len().min(NAME_KEPT_BYTES)]);
    part.extend_from_slice(b".cloister-");
    part.extend_from_slice(&key.finalize().to_hex().as_bytes()[..16]);
    CString::new(part).expect("a name without NUL and letters")
}

/// Hashes a file from its beginning, at most `length` bytes; returns how many there were.
pub(super) fn hash_from(file: &mut File, hasher: &mut blake3::Hasher, length: u64) -> std::io::Result<u64> {
    file.seek(SeekFrom::Start(0))?;
    let mut piece = vec![0; PIECE_BYTES];
    let mut from = file.take(length);
    let mut hashed = 0;
    loop {
        let count = from.read(&mut piece)?;
        if count == 0 {
            return Ok(hashed);
        }
        hasher.update(&piece[..count]);
        hashed += u64::try_from(count).unwrap_or(0);
    }
}

/// Hashes a hole.
pub(super) fn hash_zeros(hasher: &mut blake3::Hasher, mut length: u64) {
    static ZEROS: [u8; 64 * 1024] = [0; 64 * 1024];
    while length > 0 {
        let piece = usize::try_from(length).unwrap_or(usize::MAX).min(ZEROS.len());
        hasher.update(&ZEROS[..piece]);
        length -= u64::try_from(piece).unwrap_or(length);
    }
}

pub(super) fn errno_of(error: std::io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}
