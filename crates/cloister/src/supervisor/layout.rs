//! Where `cloister up` keeps everything.
//!
//! ```text
//! <data>/            root, 0711: others may pass through to what is theirs
//!   up.lock          held by the running `up`; its pid inside
//!   tokens/          root, 0700: the owner's bearer and the host agent's
//!   logs/            root, 0700: one log per child, rotated
//!   postgres/        the private cluster, of its own account
//!   coordinator/     of the coordinator's account
//!   host/            the host agent's data: sandboxes and sessions
//! <run>/             root, 0711
//!   up.json          what runs and where (no secrets), mode 0644
//!   postgres/  coordinator/  host/     sockets of each
//! ```

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

use clap::Args;

use crate::error::CliError;

/// Longest run directory: the longest socket path below it (35 bytes) must fit in the kernel's 107.
const RUN_DIR_MAX_BYTES: usize = 72;

/// The two directories of one installation.
#[derive(Debug, Clone, Args)]
pub(crate) struct LayoutArgs {
    /// Directory of everything that must survive
    #[arg(
        long,
        value_name = "DIR",
        env = "CLOISTER_DATA_DIR",
        hide_env_values = true,
        default_value = USUAL_DATA_DIR
    )]
    pub(crate) data_dir: PathBuf,
    /// Directory of sockets and of `up.json`
    #[arg(
        long,
        value_name = "DIR",
        env = "CLOISTER_RUN_DIR",
        hide_env_values = true,
        default_value = USUAL_RUN_DIR
    )]
    pub(crate) run_dir: PathBuf,
}

/// Paths below the two directories.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    /// What must survive.
    pub(crate) data: PathBuf,
    /// Sockets.
    pub(crate) run: PathBuf,
}

/// Where everything that must survive is unless another place is named.
const USUAL_DATA_DIR: &str = "/var/lib/cloister";
/// Where sockets are unless another place is named.
const USUAL_RUN_DIR: &str = "/run/cloister";

impl LayoutArgs {
    /// Returns the absolute paths.
    ///
    /// # Errors
    ///
    /// [`CliError::Refused`] naming the flag that does not work.
    pub(crate) fn layout(&self) -> Result<Layout, CliError> {
        let absolute = |path: &Path, flag: &str| {
            std::path::absolute(path).map_err(CliError::io(format!("use `{flag} {}`", path.display())))
        };
        let layout = Layout {
            data: absolute(&self.data_dir, "--data-dir")?,
            run: absolute(&self.run_dir, "--run-dir")?,
        };
        let length = layout.run.as_os_str().as_bytes().len();
        if length > RUN_DIR_MAX_BYTES {
            return Err(CliError::refused(
                format!("the run directory `{}` has {length} bytes", layout.run.display()),
                format!(
                    "give `--run-dir` a path of at most {RUN_DIR_MAX_BYTES} bytes: socket paths are short"
                ),
            ));
        }
        if layout.data.starts_with(&layout.run) || layout.run.starts_with(&layout.data) {
            return Err(CliError::refused(
                "the data and run directories lie in one another",
                "give `--data-dir` and `--run-dir` directories of their own",
            ));
        }
        Ok(layout)
    }
}

impl Layout {
    /// Returns the usual places.
    pub(crate) fn usual() -> Self {
        Self { data: USUAL_DATA_DIR.into(), run: USUAL_RUN_DIR.into() }
    }

    /// The lock of the running `up`.
    pub(crate) fn lock(&self) -> PathBuf {
        self.data.join("up.lock")
    }

    /// What runs.
    pub(crate) fn record(&self) -> PathBuf {
        self.run.join("up.json")
    }

    /// Logs of the children.
    pub(crate) fn logs(&self) -> PathBuf {
        self.data.join("logs")
    }

    /// Bearers.
    pub(crate) fn tokens(&self) -> PathBuf {
        self.data.join("tokens")
    }

    /// Data of one role.
    pub(crate) fn data_of(&self, role: &str) -> PathBuf {
        self.data.join(role)
    }

    /// Sockets of one role.
    pub(crate) fn run_of(&self, role: &str) -> PathBuf {
        self.run.join(role)
    }

    /// Where the coordinator and the host agent meet.
    pub(crate) fn link_socket(&self) -> PathBuf {
        self.run_of("coordinator").join("link.sock")
    }

    /// Makes the directories that belong to `up` itself.
    ///
    /// # Errors
    ///
    /// [`CliError::Io`] naming the directory.
    pub(crate) fn make(&self) -> Result<(), CliError> {
        make_directory(&self.data, 0o711)?;
        make_directory(&self.run, 0o711)?;
        make_directory(&self.logs(), 0o700)?;
        make_directory(&self.tokens(), 0o700)
    }
}

/// Makes a directory with its parents and gives it this mode.
///
/// # Errors
///
/// [`CliError::Io`] naming the directory.
pub(crate) fn make_directory(path: &Path, mode: u32) -> Result<(), CliError> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(path)
        .and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(mode)))
        .map_err(CliError::io(format!("make directory `{}`", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_that_cannot_work_are_refused_with_the_flag() {
        let layout =
            |data: &str, run: &str| LayoutArgs { data_dir: data.into(), run_dir: run.into() }.layout();
        assert!(layout("/a", "/b").is_ok());
        let error = layout("/a", &format!("/{}", "b".repeat(90))).unwrap_err();
        assert!(error.hint().is_some_and(|hint| hint.contains("--run-dir")), "{error}");
        assert!(layout("/a", "/a/run").is_err());
        assert!(layout("relative", "/b").is_ok_and(|layout| layout.data.is_absolute()));
    }
}
