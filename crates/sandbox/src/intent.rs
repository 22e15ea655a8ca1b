//! What is written down before anything is taken, and what a session keeps.
//!
//! The intent of a sandbox names everything that its creation will take: the id range, the control groups, the
//! socket, the layer. Whoever finds it after a crash can therefore take all of it down again, whether the crash came
//! before the first or after the last step. It carries the boot id: under another one, nothing of it can be left in
//! the kernel. Intents need not survive a reboot and are not synced; a session's record must, and is.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use cloister_guest::shim::config::DiskConfig;
use cloister_types::{BackendKind, Limits, SandboxId, SessionId};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::backend::SandboxSpec;
use crate::cgroup::GroupSet;
use crate::id_range::IdRange;
use crate::layout::unfinished_name;

/// Name of the intent in a sandbox's directory.
pub const INTENT_FILE: &str = "intent.json";
/// Name of the record in a session's directory.
pub const SESSION_FILE: &str = "session.json";

/// Why a record could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The file could not be written.
    #[error("write `{}`", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Its error.
        #[source]
        source: io::Error,
    },
    /// The file could not be read.
    #[error("read `{}`", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Its error.
        #[source]
        source: io::Error,
    },
    /// The file does not hold what it should.
    #[error("understand `{}`", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        #[source]
        source: serde_json::Error,
    },
}

/// Everything that one sandbox takes, written before it is taken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Intent {
    /// The session.
    pub session_id: SessionId,
    /// The instance.
    pub sandbox_id: SandboxId,
    /// The kernel it was made under.
    pub boot_id: String,
    /// How it is isolated.
    #[serde(default = "only_kind_once")]
    pub backend: BackendKind,
    /// `host`.
    pub image: String,
    /// What it may use.
    pub limits: Limits,
    /// Its name for itself.
    pub hostname: String,
    /// Its users, as the host numbers them.
    pub ids: IdRange,
    /// Its control groups.
    pub groups: GroupSet,
    /// Where its shim listens.
    pub socket: PathBuf,
    /// Its writable layer.
    pub disk: DiskConfig,
    /// The shim's executable.
    pub guest: PathBuf,
    /// The configuration that the shim was started with, where it is not the one in the sandbox's directory: the
    /// sandbox was warm and had other names then.
    #[serde(default)]
    pub shim_config: Option<PathBuf>,
    /// Milliseconds since the Unix epoch.
    pub created_unix_ms: u64,
}

impl Intent {
    /// Returns what the sandbox was asked to be.
    pub fn spec(&self) -> SandboxSpec {
        SandboxSpec {
            session_id: self.session_id.clone(),
            sandbox_id: self.sandbox_id.clone(),
            backend: self.backend,
            image: self.image.clone(),
            limits: self.limits,
            hostname: self.hostname.clone(),
        }
    }
}

/// Intents of versions that had one kind do not name it.
fn only_kind_once() -> BackendKind {
    BackendKind::Namespace
}

/// What a session keeps on its host between sandboxes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionRecord {
    /// The session.
    pub session_id: SessionId,
    /// Its users, the same in each of its sandboxes: the layer's files belong to them.
    pub ids: IdRange,
    /// The limits of its newest sandbox.
    pub limits: Limits,
}

/// Returns this boot's id, which changes with each start of the kernel (proc(5), `kernel/random/boot_id`).
///
/// # Errors
///
/// When `/proc` cannot be read.
pub fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

/// Writes a record so that a reader sees the old one, the new one, and nothing between. With `durable`, it is on
/// the disk when this returns.
///
/// # Errors
///
/// [`RecordError::Write`]; the old record is unchanged.
pub fn write_record<T: Serialize>(path: &Path, record: &T, durable: bool) -> Result<(), RecordError> {
    let error = |source| RecordError::Write { path: path.to_path_buf(), source };
    let bytes = serde_json::to_vec_pretty(record)
        .map_err(|source| RecordError::Parse { path: path.to_path_buf(), source })?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temporary = path.with_file_name(unfinished_name(&name));
    let written = fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&temporary)
        .and_then(|mut file| {
            file.write_all(&bytes)?;
            if durable { file.sync_all() } else { Ok(()) }
        })
        .and_then(|()| fs::rename(&temporary, path))
        .and_then(|()| match path.parent() {
            Some(parent) if durable => fs::File::open(parent)?.sync_all(),
            _ => Ok(()),
        });
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written.map_err(error)
}

/// Reads a record; `None` when there is none.
///
/// # Errors
///
/// [`RecordError::Read`] and [`RecordError::Parse`].
pub fn read_record<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, RecordError> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(RecordError::Read { path: path.to_path_buf(), source }),
    };
    serde_json::from_slice(&bytes)
        .map(Some)
        .map_err(|source| RecordError::Parse { path: path.to_path_buf(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_intent_of_a_version_with_one_kind_is_of_that_kind() {
        let sandbox_id = SandboxId::generate();
        let intent = Intent {
            session_id: SessionId::generate(),
            sandbox_id: sandbox_id.clone(),
            boot_id: String::new(),
            backend: BackendKind::Gvisor,
            image: "host".to_owned(),
            limits: Limits::DEFAULT,
            hostname: "h".to_owned(),
            ids: IdRange { base: 1, count: 2 },
            groups: GroupSet { hierarchies: Vec::new() },
            socket: "/s".into(),
            disk: DiskConfig::Tmpfs { bytes: 1 },
            guest: "/g".into(),
            shim_config: None,
            created_unix_ms: 0,
        };
        let mut json = serde_json::to_value(&intent).unwrap();
        assert_eq!(
            serde_json::from_value::<Intent>(json.clone()).unwrap().spec().backend,
            BackendKind::Gvisor
        );
        json.as_object_mut().unwrap().remove("backend");
        assert_eq!(serde_json::from_value::<Intent>(json).unwrap().spec().backend, BackendKind::Namespace);
    }

    #[test]
    fn a_record_is_replaced_whole_and_leaves_no_temporary_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(SESSION_FILE);
        assert_eq!(read_record::<SessionRecord>(&path).unwrap(), None);
        let mut record = SessionRecord {
            session_id: SessionId::generate(),
            ids: IdRange { base: 1, count: 2 },
            limits: Limits::DEFAULT,
        };
        write_record(&path, &record, true).unwrap();
        record.ids.count = 7;
        write_record(&path, &record, false).unwrap();
        assert_eq!(read_record(&path).unwrap(), Some(record));
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn half_a_record_is_an_error_with_its_path() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(INTENT_FILE);
        fs::write(&path, "{\"session_id\":").unwrap();
        let error = read_record::<Intent>(&path).unwrap_err();
        assert!(matches!(&error, RecordError::Parse { .. }) && error.to_string().contains(INTENT_FILE));
    }
}
