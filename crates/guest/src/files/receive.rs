//! The receiver: puts what a sender says in its place. Everything it is told is checked as if the sender were hostile.

use std::ffi::{CStr, CString};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use cloister_api::guest::{self, FileInfo, FileKind};
use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, RenameFlags, fchmod, mkdirat, openat, renameat, renameat_with, statat,
    symlinkat, unlinkat,
};
use rustix::io::Errno;

use super::error::words;
use super::info::{self, MODE_BITS, is};
use super::part::Part;
use super::path;
use super::{FileLink, FilesError, Progress, Report};
use crate::frames::{Body, FrameError};

/// The sender is told how far it is after this many entries or bytes.
const TOLD_ENTRIES: u64 = 256;
const TOLD_BYTES: u64 = 8 * 1024 * 1024;

/// How entries are put in their place.
#[derive(Debug, Clone)]
pub struct ReceiverOptions {
    /// Where the tree itself comes to stand below the directory; empty is the directory.
    pub top: Vec<u8>,
    /// Files that are there are kept, and told as problems.
    pub keep_existing: bool,
    /// Mode bits that are taken over.
    pub mode_mask: u32,
}

impl Default for ReceiverOptions {
    fn default() -> Self {
        Self { top: Vec::new(), keep_existing: false, mode_mask: MODE_BITS }
    }
}

/// Receives one tree.
pub struct Receiver<'a> {
    link: &'a mut FileLink,
    options: ReceiverOptions,
    progress: Progress<'a>,
    report: Report,
    /// The directory that was asked for, and those below it on the way to the newest entry.
    root: OwnedFd,
    open: Vec<OpenDirectory>,
    /// An entry that was not made: what is below it cannot be made either.
    lost: Option<Vec<u8>>,
    told: (u64, u64),
}

struct OpenDirectory {
    name: CString,
    fd: OwnedFd,
    /// What it gets when nothing more comes into it.
    finally: Option<(u32, i64)>,
}

/// What became of an entry.
enum Placed {
    Done,
    /// A file's content is to be read, under this name.
    Content(CString),
}

impl<'a> Receiver<'a> {
    /// Returns a receiver into the directory `root`.
    pub fn new(
        link: &'a mut FileLink,
        root: OwnedFd,
        options: ReceiverOptions,
        progress: Progress<'a>,
    ) -> Self {
        Self {
            link,
            options,
            progress,
            report: Report::default(),
            root,
            open: Vec::new(),
            lost: None,
            told: (0, 0),
        }
    }

    /// Receives until the sender has no more.
    ///
    /// # Errors
    ///
    /// The stream broke, or the sender says what makes no sense. One path that cannot be made is a problem of the report.
    pub fn run(mut self) -> Result<Report, FilesError> {
        loop {
            match self.link.expect()? {
                Body::FileEntry(entry) => self.entry(*entry)?,
                Body::FileProblem(problem) => self.report.note(&problem.path, problem.message),
                Body::TransferEnd(_) => break,
                _ => return Err(FrameError::Unexpected("an entry or the end").into()),
            }
        }
        self.leave(0);
        let entries = self.report.entries;
        self.link.queue(guest::TransferEnd { entries, ..guest::TransferEnd::default() })?;
        self.link.flush()?;
        (self.progress)(&self.report);
        Ok(self.report)
    }

    fn entry(&mut self, entry: guest::FileEntry) -> Result<(), FilesError> {
        let Some(info) = entry.info.as_option() else {
            return Err(FrameError::Unexpected("an entry with its information").into());
        };
        let is_file = is(info, FileKind::FILE_KIND_FILE);
        let placed = self.place(&entry.path, info);
        let path = &entry.path;
        match placed {
            Ok(Placed::Done) => {}
            Ok(Placed::Content(name)) => {
                if !self.file(path, &name, info, entry.resumable)? {
                    return Ok(());
                }
            }
            Err(why) => {
                if self.lost.as_ref().is_none_or(|lost| !path::is_below(path, lost)) {
                    self.problem(path, &why)?;
                    self.lost = Some(path.clone());
                }
                return if is_file { self.pass_over(entry.resumable) } else { Ok(()) };
            }
        }
        self.report.entries += 1;
        self.report.written = Some(entry.path);
        self.tell()
    }

    /// Makes a directory or a link, or finds the directory of a file.
    fn place(&mut self, path: &[u8], info: &FileInfo) -> Result<Placed, String> {
        let mut names = path::names(&self.options.top).map_err(str::to_owned)?;
        names.extend(path::names(path)?);
        let kind = info.kind.as_known();
        let Some(last) = names.pop() else {
            // The tree is the directory that was asked for, which stays as it is.
            return match kind {
                Some(FileKind::FILE_KIND_DIRECTORY) => Ok(Placed::Done),
                _ => Err("a file has no name to be put under".to_owned()),
            };
        };
        self.enter(&names).map_err(words)?;
        match kind {
            Some(FileKind::FILE_KIND_DIRECTORY) => {
                self.directory(last, info).map_err(words)?;
                Ok(Placed::Done)
            }
            Some(FileKind::FILE_KIND_SYMLINK) => {
                self.symlink(&last, info).map_err(words)?;
                Ok(Placed::Done)
            }
            Some(FileKind::FILE_KIND_FILE) => Ok(Placed::Content(last)),
            _ => Err("a device, a pipe or a socket is not copied".to_owned()),
        }
    }

    /// Makes the open directories those of `names`.
    fn enter(&mut self, names: &[CString]) -> Result<(), Errno> {
        let common = self.open.iter().zip(names).take_while(|(open, name)| open.name == **name).count();
        self.leave(common);
        for name in &names[common..] {
            let fd = open_directory(self.directory_fd(), name)?;
            self.open.push(OpenDirectory { name: name.clone(), fd, finally: None });
        }
        Ok(())
    }

    /// Closes directories until `count` are open; each gets its mode and time.
    fn leave(&mut self, count: usize) {
        while self.open.len() > count {
            let Some(left) = self.open.pop() else { return };
            let Some((mode, modified)) = left.finally else { continue };
            let done = fchmod(&left.fd, Mode::from_raw_mode(mode))
                .and_then(|()| info::set_modified(&left.fd, modified));
            if let Err(errno) = done {
                self.report.note(left.name.to_bytes(), format!("its mode and time: {}", words(errno)));
            }
        }
    }

    fn directory_fd(&self) -> BorrowedFd<'_> {
        self.open.last().map_or(self.root.as_fd(), |open| open.fd.as_fd())
    }

    fn directory(&mut self, name: CString, info: &FileInfo) -> Result<(), Errno> {
        let dir = self.directory_fd();
        match mkdirat(dir, &name, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno),
        }
        let fd = open_directory(dir, &name)?;
        let finally = Some((info.mode & self.options.mode_mask, info.modified_unix_ns));
        self.open.push(OpenDirectory { name, fd, finally });
        Ok(())
    }

    fn symlink(&self, name: &CStr, info: &FileInfo) -> Result<(), Errno> {
        let dir = self.directory_fd();
        if info.link_target.is_empty() || info.link_target.contains(&0) {
            return Err(Errno::INVAL);
        }
        match symlinkat(info.link_target.as_slice(), dir, name) {
            Err(Errno::EXIST) if !self.options.keep_existing => {
                // A directory is not removed for a link.
                unlinkat(dir, name, AtFlags::empty())?;
                symlinkat(info.link_target.as_slice(), dir, name)?;
            }
            other => other?,
        }
        // Some filesystems keep no time of links.
        let _ = info::set_link_modified(dir, name, info.modified_unix_ns);
        Ok(())
    }

    /// Reads a file's content into its place; returns whether it is there.
    fn file(
        &mut self,
        path: &[u8],
        name: &CStr,
        info: &FileInfo,
        resumable: bool,
    ) -> Result<bool, FilesError> {
        let opened = self
            .check_place(name)
            .and_then(|()| Part::open(self.directory_fd(), name, info, resumable).map_err(words));
        let mut part = match opened {
            Ok(part) => part,
            Err(why) => {
                self.problem(path, &why)?;
                self.pass_over(resumable)?;
                return Ok(false);
            }
        };
        if resumable {
            let kept = guest::FileResume {
                offset: part.offset,
                hash: part.hasher.finalize().as_bytes().to_vec(),
                ..guest::FileResume::default()
            };
            self.link.queue(kept)?;
            self.link.flush()?;
            let Body::FileStart(start) = self.link.expect()? else {
                return Err(FrameError::Unexpected("where the file goes on").into());
            };
            let kept = part.offset;
            // The sender has gone on: there is no way to tell this file's failure alone.
            if !part.start(start.offset).map_err(|errno| FrameError::Write(errno.into()))? {
                return Err(FrameError::Unexpected("the offset that was offered, or zero").into());
            }
            self.report.resumed_bytes += if start.offset == 0 { 0 } else { kept };
        }
        let complete = match self.content(&mut part, info) {
            Ok(complete) => complete,
            Err(cut) => {
                if !resumable {
                    part.discard(self.directory_fd());
                }
                return Err(cut);
            }
        };
        let dir = self.directory_fd();
        let placed = complete.and_then(|()| {
            let put = || {
                fchmod(&part.file, Mode::from_raw_mode(info.mode & self.options.mode_mask))?;
                info::set_modified(&part.file, info.modified_unix_ns)?;
                if self.options.keep_existing {
                    renameat_with(dir, &part.name, dir, name, RenameFlags::NOREPLACE)
                } else {
                    renameat(dir, &part.name, dir, name)
                }
            };
            put().map_err(words)
        });
        match placed {
            Ok(()) => Ok(true),
            Err(why) => {
                part.discard(dir);
                self.problem(path, &why)?;
                Ok(false)
            }
        }
    }

    /// Refuses a place that the file cannot take, before its content comes.
    fn check_place(&self, name: &CStr) -> Result<(), String> {
        match statat(self.directory_fd(), name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Directory => {
                Err("a directory is there".to_owned())
            }
            Ok(_) if self.options.keep_existing => Err("it is there already".to_owned()),
            Ok(_) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(words(errno)),
        }
    }

    /// Reads a file's content to its end. The inner error says why it cannot be used.
    fn content(&mut self, part: &mut Part, info: &FileInfo) -> Result<Result<(), String>, FilesError> {
        let mut failed: Option<String> = None;
        loop {
            match self.link.expect()? {
                Body::FileData(data) => {
                    let length = u64::try_from(data.data.len()).unwrap_or(u64::MAX);
                    let end = data.offset.saturating_add(length);
                    if length == 0 || end > info.size || (failed.is_none() && data.offset < part.offset) {
                        return Err(FrameError::Unexpected("bytes of the file, in order").into());
                    }
                    if failed.is_none()
                        && let Err(errno) = part.write(data.offset, &data.data)
                    {
                        // What still comes is read and dropped.
                        failed = Some(words(errno));
                    }
                    self.report.bytes += length;
                    (self.progress)(&self.report);
                    self.tell()?;
                }
                Body::FileEnd(end) => {
                    if let Some(why) = failed {
                        return Ok(Err(why));
                    }
                    if !end.aborted.is_empty() {
                        return Ok(Err(end.aborted));
                    }
                    return Ok(match part.complete(info.size) {
                        Ok(hash) if hash.as_bytes().as_slice() == end.hash => Ok(()),
                        Ok(_) => Err("its content arrived changed: copy it again".to_owned()),
                        Err(errno) => Err(words(errno)),
                    });
                }
                _ => return Err(FrameError::Unexpected("bytes of the file or its end").into()),
            }
        }
    }

    /// Reads the content of a file that is not wanted.
    fn pass_over(&mut self, resumable: bool) -> Result<(), FilesError> {
        if resumable {
            // The sender waits for an answer, and leaves the file out.
            self.link.queue(guest::FileDone::default())?;
            return self.link.flush();
        }
        loop {
            match self.link.expect()? {
                Body::FileData(_) => {}
                Body::FileEnd(_) => return Ok(()),
                _ => return Err(FrameError::Unexpected("bytes of the file or its end").into()),
            }
        }
    }

    fn problem(&mut self, path: &[u8], message: &str) -> Result<(), FilesError> {
        self.report.note(path, message);
        let problem = guest::FileProblem {
            path: path.to_vec(),
            message: message.to_owned(),
            ..guest::FileProblem::default()
        };
        self.link.queue(problem)?;
        self.link.flush()
    }

    /// Tells the sender how far it is, now and then.
    fn tell(&mut self) -> Result<(), FilesError> {
        (self.progress)(&self.report);
        let (entries, bytes) = (self.report.entries, self.report.bytes);
        if entries < self.told.0 + TOLD_ENTRIES && bytes < self.told.1 + TOLD_BYTES {
            return Ok(());
        }
        self.told = (entries, bytes);
        let Some(path) = self.report.written.clone() else { return Ok(()) };
        self.link.queue(guest::FilesWritten { path, entries, ..guest::FilesWritten::default() })?;
        self.link.flush()
    }
}

/// Opens a directory, never through a link.
fn open_directory(dir: BorrowedFd<'_>, name: &CStr) -> Result<OwnedFd, Errno> {
    openat(dir, name, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
}
