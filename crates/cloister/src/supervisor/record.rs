//! Which `up` runs: its lock and what it says about itself.
//!
//! The lock is the truth: the kernel drops it with the process. `up.json` tells everybody else where things are;
//! it may be of a process that was killed, which its pid and start time tell.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use crate::error::CliError;
use crate::supervisor::layout::Layout;

/// What `up.json` says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct UpRecord {
    /// Version of the program that runs.
    pub(crate) version: String,
    /// The supervisor.
    pub(crate) pid: i32,
    /// Field 22 of its `/proc/PID/stat`, which tells it from a later process with its pid.
    pub(crate) start_ticks: u64,
    /// Whether commands can be run.
    pub(crate) ready: bool,
    /// URL of the API.
    pub(crate) endpoint: String,
    /// What must survive.
    pub(crate) data_dir: PathBuf,
    /// Sockets.
    pub(crate) run_dir: PathBuf,
    /// Logs.
    pub(crate) logs_dir: PathBuf,
    /// `private` or `outside`.
    pub(crate) database: String,
    /// Name of the client context that was written.
    pub(crate) context: String,
    /// The roles.
    pub(crate) roles: Vec<RoleRecord>,
}

/// One supervised child.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct RoleRecord {
    /// `postgres`, `coordinator` or `host`.
    pub(crate) name: String,
    /// Its process; unset while it is being restarted.
    pub(crate) pid: Option<i32>,
    /// How often it was started again.
    pub(crate) restarts: u32,
}

impl UpRecord {
    /// Returns where the private database has its socket; none with one from outside.
    pub(crate) fn database_socket_dir(&self) -> Option<PathBuf> {
        let layout = Layout { data: self.data_dir.clone(), run: self.run_dir.clone() };
        (self.database == "private").then(|| layout.run_of("postgres"))
    }

    /// Reads what the last `up` said; nothing when there was none.
    ///
    /// # Errors
    ///
    /// [`CliError`] when the file is there and cannot be read.
    pub(crate) fn load(layout: &Layout) -> Result<Option<Self>, CliError> {
        let path = layout.record();
        match fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map(Some).map_err(|error| {
                CliError::refused(format!("`{}` makes no sense: {error}", path.display()), "remove the file")
            }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(CliError::io(format!("read `{}`", path.display()))(error)),
        }
    }

    /// Writes it for everybody to read.
    ///
    /// # Errors
    ///
    /// [`CliError::Io`].
    pub(crate) fn save(&self, layout: &Layout) -> Result<(), CliError> {
        let path = layout.record();
        let new = path.with_extension("json.new");
        let text = serde_json::to_vec_pretty(self).expect("a record has string keys only");
        fs::write(&new, text)
            .and_then(|()| fs::set_permissions(&new, fs::Permissions::from_mode(0o644)))
            .and_then(|()| fs::rename(&new, &path))
            .map_err(CliError::io(format!("write `{}`", path.display())))
    }

    /// Checks that the run directory is not in use with another data directory.
    ///
    /// # Errors
    ///
    /// [`CliError::Refused`] naming the other one.
    pub(crate) fn must_be_of(&self, layout: &Layout) -> Result<(), CliError> {
        if self.data_dir == layout.data || !self.is_alive() {
            return Ok(());
        }
        Err(CliError::refused(
            format!(
                "the run directory `{}` is that of the `cloister up` on `{}` (process {})",
                layout.run.display(),
                self.data_dir.display(),
                self.pid
            ),
            format!(
                "the two belong together: `--data-dir {} --run-dir {}` names that one; another needs its own of both, and its own `--listen` and `--context`",
                self.data_dir.display(),
                layout.run.display()
            ),
        ))
    }

    /// Returns whether the process that wrote it lives.
    pub(crate) fn is_alive(&self) -> bool {
        start_ticks(self.pid) == Some(self.start_ticks)
    }
}

/// Returns when a process started, in clock ticks since boot; nothing when it is gone or a zombie.
pub(crate) fn start_ticks(pid: i32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name may hold anything: fields are counted from its closing parenthesis, where field 3 follows.
    let fields: Vec<&str> = stat.get(stat.rfind(')')? + 1..)?.split_whitespace().collect();
    if matches!(fields.first(), Some(&"Z" | &"X")) {
        return None;
    }
    fields.get(19)?.parse().ok()
}

/// The lock of a running `up`; dropped with the process.
#[derive(Debug)]
pub(crate) struct UpLock {
    _file: File,
}

impl UpLock {
    /// Takes the lock of these directories.
    ///
    /// # Errors
    ///
    /// [`CliError::Refused`] naming the process that has it.
    pub(crate) fn take(layout: &Layout) -> Result<Self, CliError> {
        let path = layout.lock();
        match try_lock(&path).map_err(CliError::io(format!("lock `{}`", path.display())))? {
            Ok(file) => Ok(Self { _file: file }),
            Err(owner) => Err(CliError::refused(
                format!("`cloister up` runs already on `{}` as process {owner}", layout.data.display()),
                "stop it with `cloister down`, or give this one its own `--data-dir`, `--run-dir` and `--listen`",
            )),
        }
    }
}

fn try_lock(path: &Path) -> io::Result<Result<File, String>> {
    let mut file =
        OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {
            file.set_len(0)?;
            file.rewind()?;
            write!(file, "{}", std::process::id())?;
            Ok(Ok(file))
        }
        Err(rustix::io::Errno::WOULDBLOCK) => {
            let mut owner = String::new();
            file.take(32).read_to_string(&mut owner)?;
            Ok(Err(if owner.is_empty() { "(just starting)".to_owned() } else { owner }))
        }
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(directory: &Path) -> Layout {
        Layout { data: directory.to_owned(), run: directory.to_owned() }
    }

    #[test]
    fn a_second_lock_names_the_process_that_has_the_first() {
        let directory = tempfile::tempdir().unwrap();
        let layout = layout(directory.path());
        let first = UpLock::take(&layout).unwrap();
        let error = UpLock::take(&layout).unwrap_err();
        assert!(error.to_string().contains(&format!("process {}", std::process::id())), "{error}");
        drop(first);
        UpLock::take(&layout).unwrap();
    }

    #[test]
    fn a_record_of_a_dead_process_is_not_alive() {
        let directory = tempfile::tempdir().unwrap();
        let layout = layout(directory.path());
        assert_eq!(UpRecord::load(&layout).unwrap(), None);
        let pid = i32::try_from(std::process::id()).unwrap();
        let mut record = UpRecord {
            version: "0".into(),
            pid,
            start_ticks: start_ticks(pid).unwrap(),
            ready: true,
            endpoint: "http://127.0.0.1:1".into(),
            data_dir: "/d".into(),
            run_dir: "/r".into(),
            logs_dir: "/l".into(),
            database: "private".into(),
            context: "local".into(),
            roles: vec![RoleRecord { name: "host".into(), pid: None, restarts: 2 }],
        };
        record.save(&layout).unwrap();
        assert_eq!(UpRecord::load(&layout).unwrap().as_ref(), Some(&record));
        assert!(record.is_alive());
        let error = record.must_be_of(&layout).unwrap_err();
        assert!(error.to_string().contains("`/d`"), "{error}");
        record.must_be_of(&Layout { data: "/d".into(), run: "/r".into() }).unwrap();
        record.start_ticks += 1;
        assert!(!record.is_alive());
        record.must_be_of(&layout).unwrap();
        fs::write(layout.record(), "{").unwrap();
        assert!(UpRecord::load(&layout).is_err());
    }
}
