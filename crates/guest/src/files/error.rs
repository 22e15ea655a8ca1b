//! Why a whole transfer ends.

use std::io;

use cloister_api::guest::{self, ErrorKind};
use rustix::io::Errno;

use crate::frames::FrameError;

/// Why a request was refused or a transfer cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    /// The stream was cut, or carries what does not belong there.
    #[error("the stream of files broke")]
    Link(#[from] FrameError),
    /// The other side refused.
    #[error("{message}")]
    Refused {
        /// How.
        kind: ErrorKind,
        /// Its words.
        message: String,
    },
    /// The kernel refused a request as a whole; the next one may be made.
    #[error("{operation}: {}", words(*errno))]
    Kernel {
        /// What was tried, with its path.
        operation: String,
        /// How.
        errno: Errno,
    },
}

impl FilesError {
    pub(super) fn kernel(operation: impl Into<String>) -> impl FnOnce(Errno) -> Self {
        move |errno| Self::Kernel { operation: operation.into(), errno }
    }

    pub(super) fn refused(error: guest::Error) -> Self {
        let kind = error.kind.as_known().unwrap_or(ErrorKind::ERROR_KIND_INTERNAL);
        Self::Refused { kind, message: error.message.chars().take(1024).collect() }
    }

    /// Returns how a refusal is told to the other side.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Link(_) => ErrorKind::ERROR_KIND_INVALID,
            Self::Refused { kind, .. } => *kind,
            Self::Kernel { errno, .. } => match *errno {
                Errno::NOENT => ErrorKind::ERROR_KIND_NOT_FOUND,
                Errno::NOSPC | Errno::DQUOT | Errno::MFILE | Errno::NFILE | Errno::NOMEM => {
                    ErrorKind::ERROR_KIND_EXHAUSTED
                }
                Errno::IO => ErrorKind::ERROR_KIND_INTERNAL,
                _ => ErrorKind::ERROR_KIND_INVALID,
            },
        }
    }

    /// Returns whether another transfer may go on where this one was cut.
    pub fn is_cut(&self) -> bool {
        matches!(
            self,
            Self::Link(FrameError::Read(_) | FrameError::Write(_) | FrameError::Torn | FrameError::Closed)
        )
    }
}

/// Returns the words for an error number.
pub(super) fn words(errno: Errno) -> String {
    let text = io::Error::from(errno).to_string();
    match text.split_once(" (os error") {
        Some((words, _)) => words.to_owned(),
        None => text,
    }
}
