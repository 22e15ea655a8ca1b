//! The sender: walks a tree and says what is in it.

use std::cmp::Ordering;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;

use cloister_api::guest::{self, FileInfo, FileKind};
use rustix::fs::{Dir, Mode, OFlags, SeekFrom, fstat, openat, seek};
use rustix::io::Errno;

use super::error::words;
use super::info::{self, modified_ns};
use super::part::{errno_of, hash_from, hash_zeros};
use super::path::{self, DEPTH_MAX, join};
use super::{FileLink, FilesError, Progress, Report};
use crate::frames::{Body, FrameError};

/// A file from this size on is worth a question what is there already.
const RESUMABLE_BYTES: u64 = 8 * 1024 * 1024;
/// Bytes of one piece.
const PIECE_BYTES: usize = 128 * 1024;
/// The receiver is listened to after this many entries, which keeps what it says from filling the stream.
const LISTEN_ENTRIES: u64 = 16;

/// Sends one tree.
pub struct Sender<'a> {
    link: &'a mut FileLink,
    /// What an earlier transfer has written, up to this path.
    after: Option<Vec<u8>>,
    progress: Progress<'a>,
    report: Report,
    /// Entries that were sent.
    sent: u64,
    piece: Vec<u8>,
}

impl<'a> Sender<'a> {
    /// Returns a sender to `link`, whose other end is a receiver by now. What stands up to `after` in the tree's order is left
    /// out, but for the directories on the way to it, which get their modes and times again.
    pub fn new(link: &'a mut FileLink, after: Option<Vec<u8>>, progress: Progress<'a>) -> Self {
        Self { link, after, progress, report: Report::default(), sent: 0, piece: vec![0; PIECE_BYTES] }
    }

    /// Sends what `top` is, a file or a directory, under the path `announced`, and waits until all of it is in its place.
    ///
    /// # Errors
    ///
    /// The stream broke or the receiver gave up. One path that cannot be read is a problem of the report.
    pub fn run(mut self, top: OwnedFd, announced: &[u8]) -> Result<Report, FilesError> {
        self.opened(top, announced, 0)?;
        self.link.queue(guest::TransferEnd::default())?;
        loop {
            let body = self.link.expect()?;
            if let Body::TransferEnd(end) = body {
                self.report.entries = end.entries;
                (self.progress)(&self.report);
                return Ok(self.report);
            }
            self.hear(body)?;
        }
    }

    fn entry(
        &mut self,
        dir: BorrowedFd<'_>,
        name: &CStr,
        path: &[u8],
        depth: usize,
    ) -> Result<(), FilesError> {
        if self.sent.is_multiple_of(LISTEN_ENTRIES) {
            self.listen()?;
        }
        if self.is_written(path) {
            return Ok(());
        }
        let info = match info::info_of(dir, name) {
            Ok(info) => info,
            Err(errno) => return self.problem(path, &words(errno)),
        };
        let is_last_written = self.after.as_deref() == Some(path);
        match info.kind.as_known() {
            Some(FileKind::FILE_KIND_FILE | FileKind::FILE_KIND_SYMLINK) if is_last_written => Ok(()),
            Some(FileKind::FILE_KIND_SYMLINK) => self.announce(path, info, false),
            Some(FileKind::FILE_KIND_FILE | FileKind::FILE_KIND_DIRECTORY) => {
                // Without waiting: a pipe may have been put in the file's place.
                let flags =
                    OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
                match openat(dir, name, flags, Mode::empty()) {
                    Ok(fd) => self.opened(fd, path, depth),
                    Err(errno) => self.problem(path, &words(errno)),
                }
            }
            _ => self.problem(path, "a device, a pipe or a socket is not copied"),
        }
    }

    fn opened(&mut self, fd: OwnedFd, path: &[u8], depth: usize) -> Result<(), FilesError> {
        let stat = match fstat(&fd) {
            Ok(stat) => stat,
            Err(errno) => return self.problem(path, &words(errno)),
        };
        let info = info::from_stat(&stat);
        match info.kind.as_known() {
            Some(FileKind::FILE_KIND_FILE) => self.file(path, info, info::may_have_holes(&stat), fd.into()),
            Some(FileKind::FILE_KIND_DIRECTORY) => self.directory(path, info, &fd, depth),
            _ => self.problem(path, "a device, a pipe or a socket is not copied"),
        }
    }

    fn directory(
        &mut self,
        path: &[u8],
        info: FileInfo,
        fd: &OwnedFd,
        depth: usize,
    ) -> Result<(), FilesError> {
        if depth >= DEPTH_MAX {
            return self.problem(path, "more than 256 directories deep");
        }
        let names = match names_in(fd) {
            Ok(names) => names,
            Err(errno) => return self.problem(path, &words(errno)),
        };
        self.announce(path, info, false)?;
        for name in names {
            self.entry(fd.as_fd(), &name, &join(path, name.to_bytes()), depth + 1)?;
        }
        Ok(())
    }

    fn file(
        &mut self,
        path: &[u8],
        info: FileInfo,
        may_have_holes: bool,
        mut file: File,
    ) -> Result<(), FilesError> {
        let size = info.size;
        let modified = info.modified_unix_ns;
        let resumable = size >= RESUMABLE_BYTES;
        self.announce(path, info, resumable)?;
        let mut hasher = blake3::Hasher::new();
        let mut offset = 0;
        if resumable && !self.resume(&mut file, &mut hasher, &mut offset, size)? {
            return Ok(());
        }
        match self.content(&file, &mut hasher, offset, size, may_have_holes)? {
            Ok(()) => {
                let hash = hasher.finalize().as_bytes().to_vec();
                self.link.queue(guest::FileEnd { hash, ..guest::FileEnd::default() })?;
                if fstat(&file).is_ok_and(|stat| modified_ns(&stat) != modified) {
                    return self.problem(path, "changed while it was read");
                }
                Ok(())
            }
            // The receiver tells it as a problem.
            Err(aborted) => self.link.queue(guest::FileEnd { aborted, ..guest::FileEnd::default() }),
        }
    }

    /// Asks what the receiver has of the file, and goes on there if it is the file's beginning. Returns whether the receiver
    /// wants the file at all.
    fn resume(
        &mut self,
        file: &mut File,
        hasher: &mut blake3::Hasher,
        offset: &mut u64,
        size: u64,
    ) -> Result<bool, FilesError> {
        let kept = loop {
            match self.link.expect()? {
                Body::FileResume(kept) => break kept,
                // It cannot write the file, and has said so.
                Body::FileDone(_) => return Ok(false),
                body => self.hear(body)?,
            }
        };
        if kept.offset > 0 && kept.offset <= size {
            let mut own = blake3::Hasher::new();
            // What cannot be read here cannot be read below either, where it is told.
            let read = hash_from(file, &mut own, kept.offset).unwrap_or(0);
            if read == kept.offset && own.finalize().as_bytes().as_slice() == kept.hash {
                *hasher = own;
                *offset = kept.offset;
                self.report.resumed_bytes += kept.offset;
            }
        }
        self.link.queue(guest::FileStart { offset: *offset, ..guest::FileStart::default() })?;
        Ok(true)
    }

    /// Sends a file's bytes, as many as were announced. The inner error says why they cannot be had.
    fn content(
        &mut self,
        file: &File,
        hasher: &mut blake3::Hasher,
        from: u64,
        size: u64,
        may_have_holes: bool,
    ) -> Result<Result<(), String>, FilesError> {
        let mut offset = from;
        while offset < size {
            let (data, end) = if may_have_holes { segment(file, offset, size) } else { (offset, size) };
            hash_zeros(hasher, data - offset);
            offset = data;
            while offset < end {
                let wanted = usize::try_from(end - offset).unwrap_or(usize::MAX).min(PIECE_BYTES);
                let count = match file.read_at(&mut self.piece[..wanted], offset) {
                    Ok(0) => return Ok(Err("became shorter while it was read".to_owned())),
                    Ok(count) => count,
                    Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                    Err(error) => return Ok(Err(words(errno_of(error)))),
                };
                let data = &self.piece[..count];
                hasher.update(data);
                let length = u64::try_from(count).unwrap_or(0);
                let data = guest::FileData { offset, data: data.to_vec(), ..guest::FileData::default() };
                self.link.queue(data)?;
                self.report.bytes += length;
                (self.progress)(&self.report);
                self.listen()?;
                offset += length;
            }
        }
        if size == 0 && file.read_at(&mut self.piece[..1], 0).unwrap_or(0) > 0 {
            // As in `/proc`, where a file has no size before it is read.
            return Ok(Err("has no size before it is read: take what a program prints of it".to_owned()));
        }
        Ok(Ok(()))
    }

    fn announce(&mut self, path: &[u8], info: FileInfo, resumable: bool) -> Result<(), FilesError> {
        self.sent += 1;
        let entry = guest::FileEntry {
            path: path.to_vec(),
            info: info.into(),
            resumable,
            ..guest::FileEntry::default()
        };
        self.link.queue(entry)
    }

    fn problem(&mut self, path: &[u8], message: &str) -> Result<(), FilesError> {
        self.report.note(path, message);
        let problem = guest::FileProblem {
            path: path.to_vec(),
            message: message.to_owned(),
            ..guest::FileProblem::default()
        };
        self.link.queue(problem)
    }

    /// Returns whether an earlier transfer has written `path` with all that is below it.
    fn is_written(&self, path: &[u8]) -> bool {
        let Some(after) = &self.after else { return false };
        // The directories on the way to it are not complete.
        path::order(path, after) == Ordering::Less && !path::is_below(after, path)
    }

    fn listen(&mut self) -> Result<(), FilesError> {
        while let Some(body) = self.link.try_next()? {
            self.hear(body)?;
        }
        Ok(())
    }

    fn hear(&mut self, body: Body) -> Result<(), FilesError> {
        match body {
            Body::FileProblem(problem) => self.report.note(&problem.path, problem.message),
            Body::FilesWritten(written) => {
                self.report.entries = written.entries;
                self.report.written = Some(written.path);
                (self.progress)(&self.report);
            }
            _ => return Err(FrameError::Unexpected("a problem or how far it is").into()),
        }
        Ok(())
    }
}

/// Returns the next bytes that are no hole, at or after `offset`; where there is none, the end.
fn segment(file: &File, offset: u64, size: u64) -> (u64, u64) {
    match seek(file, SeekFrom::Data(offset)) {
        Ok(data) if data >= size => (size, size),
        Ok(data) => (data, seek(file, SeekFrom::Hole(data)).map_or(size, |hole| hole.clamp(data + 1, size))),
        // Nothing but a hole follows.
        Err(Errno::NXIO) => (size, size),
        // A filesystem that does not know.
        Err(_) => (offset, size),
    }
}

/// Returns the names in a directory, in the order of their bytes.
fn names_in(fd: &OwnedFd) -> Result<Vec<CString>, Errno> {
    let mut names = Vec::new();
    for entry in Dir::read_from(fd)? {
        let entry = entry?;
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            names.push(entry.file_name().to_owned());
        }
    }
    names.sort_unstable();
    Ok(names)
}
