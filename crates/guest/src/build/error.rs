//! Why a sandbox could not be built: the step, the file, and what the kernel said.

use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

/// Why a sandbox could not be built. Nothing is left of it.
#[derive(Debug, thiserror::Error)]
#[error("{step} failed{}", path.as_ref().map(|path| format!(" at `{}`", path.display())).unwrap_or_default())]
pub struct BuildError {
    /// The step, as a verb and its object; what `ShimReport::Failed` names.
    pub step: String,
    /// The file concerned.
    pub path: Option<PathBuf>,
    /// What the kernel said.
    #[source]
    pub source: Errno,
}

impl BuildError {
    /// Returns a failure of `step` that concerns no file.
    pub(super) fn new(step: &str, source: Errno) -> Self {
        Self { step: step.to_owned(), path: None, source }
    }
}

/// Names the step (and the file) of an error that a system call returned.
pub(super) trait StepContext<T> {
    /// The error becomes one of `step`.
    fn step(self, step: &str) -> Result<T, BuildError>;
    /// The error becomes one of `step` at `path`.
    fn step_at(self, step: &str, path: impl AsRef<Path>) -> Result<T, BuildError>;
}

impl<T> StepContext<T> for Result<T, Errno> {
    fn step(self, step: &str) -> Result<T, BuildError> {
        self.map_err(|source| BuildError::new(step, source))
    }

    fn step_at(self, step: &str, path: impl AsRef<Path>) -> Result<T, BuildError> {
        self.map_err(|source| BuildError {
            step: step.to_owned(),
            path: Some(path.as_ref().to_owned()),
            source,
        })
    }
}

impl<T> StepContext<T> for io::Result<T> {
    fn step(self, step: &str) -> Result<T, BuildError> {
        self.map_err(|error| errno_of(&error)).step(step)
    }

    fn step_at(self, step: &str, path: impl AsRef<Path>) -> Result<T, BuildError> {
        self.map_err(|error| errno_of(&error)).step_at(step, path)
    }
}

/// Returns the error number of `error`; `EIO` for one that std made up itself (an early end of file).
fn errno_of(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}
