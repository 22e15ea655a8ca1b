//! Trees of files, carried between a sandbox and whoever works with it.
//!
//! Two roles speak over one stream, either of them at either end: the [`Sender`] walks a tree, the [`Receiver`] puts it in
//! its place. Inside, [`serve`] runs in a process of its own, forked from pid 1 and hardened like a program of that
//! user; so it reaches what such a program reaches, and nothing resolves outside the sandbox's root. Outside, the command
//! line plays the other role, to which everything that comes is hostile.
//!
//! ```text
//!  sender                               receiver
//!  FileEntry{path, kind, mode, …} ────►  directory or link: made; file: a part file beside its place
//!           (large file)          ◄────  FileResume{offset, hash of what an earlier transfer left}
//!  FileStart{offset}              ────►
//!  FileData{offset, bytes} …      ────►  holes stay holes
//!  FileEnd{BLAKE3}                ────►  the hash agrees: mode, time, renamed into its place
//!                                 ◄────  FilesWritten{path}, now and then
//!  TransferEnd                    ────►
//!                                 ◄────  TransferEnd: all of it is in its place
//! ```
//!
//! What holds:
//! - A file appears under its name whole or not at all.
//! - What cannot be read or written is a [`FileProblem`](cloister_api::guest::FileProblem) of its path, and the rest goes on.
//! - Memory does not grow with the size of a file or the number of entries; only a directory's names are held at once.
//! - Below the directory that was asked for no symbolic link is followed, by either role.

mod error;
mod info;
mod link;
mod part;
mod path;
mod receive;
mod root;
mod send;
mod serve;

pub use self::error::FilesError;
pub use self::link::FileLink;
pub use self::receive::{Receiver, ReceiverOptions};
pub use self::root::Root;
pub use self::send::Sender;
pub use self::serve::serve;

use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

/// Most problems that are kept with their words; further ones are counted.
const PROBLEMS_KEPT: usize = 100;

/// Something about one path that did not end a transfer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Relative to the tree.
    pub path: Vec<u8>,
    /// Why.
    pub message: String,
}

/// What a transfer did, so far or in all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Entries that are in their place.
    pub entries: u64,
    /// Bytes of content that were carried, holes and what was there already not counted.
    pub bytes: u64,
    /// Bytes that an earlier transfer had left.
    pub resumed_bytes: u64,
    /// The first of what went wrong, of both sides.
    pub problems: Vec<Problem>,
    /// How much went wrong.
    pub problem_count: u64,
    /// The last path that is known to be in its place with everything before it.
    pub written: Option<Vec<u8>>,
}

impl Report {
    fn note(&mut self, path: &[u8], message: impl Into<String>) {
        self.problem_count += 1;
        if self.problems.len() < PROBLEMS_KEPT {
            let message: String = message.into().chars().take(512).collect();
            self.problems.push(Problem { path: path.to_vec(), message });
        }
    }
}

/// Is told how far a transfer is.
pub type Progress<'a> = &'a mut dyn FnMut(&Report);

/// Returns the bytes of a path.
pub fn path_bytes(path: &Path) -> &[u8] {
    path.as_os_str().as_bytes()
}

#[cfg(test)]
mod tests;
