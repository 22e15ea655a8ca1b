//! What was asked of an exec and how it ended, as files in its spool.

use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use cloister_types::exec::ExecRecord;
use cloister_types::{ExecId, ExecSpec, Exit, ExitReason};
use serde::{Deserialize, Serialize};

use super::Reader;

const SPEC_FILE: &str = "spec.json";
const EXIT_FILE: &str = "exit.json";

/// Why a record could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// There is none.
    #[error("no record at `{0}`")]
    NotFound(PathBuf),
    /// The file cannot be read.
    #[error("read `{path}`")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file cannot be written.
    #[error("write `{path}`")]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is not what was written.
    #[error("parse `{path}`")]
    Parse {
        /// The file.
        path: PathBuf,
        /// Why.
        source: serde_json::Error,
    },
}

impl RecordError {
    /// Returns whether the disk has no room for a record.
    pub fn is_disk_full(&self) -> bool {
        matches!(self, Self::Write { source, .. } if source.kind() == io::ErrorKind::StorageFull)
    }
}

/// `spec.json`: on the disk before the program is started.
#[derive(Debug, Serialize, Deserialize)]
struct SpecFile {
    exec_id: ExecId,
    request_id: String,
    spec: ExecSpec,
    started_unix_ms: u64,
}

/// `exit.json`.
#[derive(Debug, Serialize, Deserialize)]
struct ExitFile {
    pid: u32,
    exit: Exit,
}

/// Writes what was asked; `record` needs no pid yet.
///
/// # Errors
///
/// [`RecordError::Write`].
pub fn write_spec(dir: &Path, record: &ExecRecord) -> Result<(), RecordError> {
    let file = SpecFile {
        exec_id: record.exec_id.clone(),
        request_id: record.request_id.clone(),
        spec: record.spec.clone(),
        started_unix_ms: record.started_unix_ms,
    };
    write_json(dir.join(SPEC_FILE), &file)
}

/// Writes how it ended.
///
/// # Errors
///
/// [`RecordError::Write`].
pub fn write_exit(dir: &Path, pid: u32, exit: &Exit) -> Result<(), RecordError> {
    write_json(dir.join(EXIT_FILE), &ExitFile { pid, exit: exit.clone() })
}

/// Reads the record of the exec whose spool is `dir`. Without an exit file it runs still or its shim died: then the
/// pid is 0.
///
/// # Errors
///
/// [`RecordError::NotFound`] when there is no such exec.
pub fn read_record(dir: &Path) -> Result<ExecRecord, RecordError> {
    let spec: SpecFile = read_json(dir.join(SPEC_FILE))?;
    let ended: Option<ExitFile> = match read_json(dir.join(EXIT_FILE)) {
        Ok(exit) => Some(exit),
        Err(RecordError::NotFound(_)) => None,
        Err(error) => return Err(error),
    };
    let (pid, exit) = ended.map_or((0, None), |ended| (ended.pid, Some(ended.exit)));
    Ok(ExecRecord {
        exec_id: spec.exec_id,
        request_id: spec.request_id,
        spec: spec.spec,
        pid,
        started_unix_ms: spec.started_unix_ms,
        exit,
    })
}

/// Reads the records of every exec below `exec_dir`, oldest first. What is no exec's directory, or was torn by a
/// power cut (nothing here is synced), is passed over.
///
/// # Errors
///
/// When the directory or a record cannot be read.
pub fn read_records(exec_dir: &Path) -> Result<Vec<ExecRecord>, RecordError> {
    let read = |source| RecordError::Read { path: exec_dir.to_owned(), source };
    let entries = match std::fs::read_dir(exec_dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(read(error)),
    };
    let mut records = Vec::new();
    for entry in entries {
        let entry = entry.map_err(read)?;
        if entry.file_name().to_str().is_none_or(|name| name.parse::<ExecId>().is_err()) {
            continue;
        }
        match read_record(&entry.path()) {
            Ok(record) => records.push(record),
            Err(RecordError::NotFound(_) | RecordError::Parse { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    records.sort_by(|a, b| (a.started_unix_ms, &a.exec_id).cmp(&(b.started_unix_ms, &b.exec_id)));
    Ok(records)
}

/// Gives an exec whose sandbox is gone its exit record, if it has none, and returns the whole record.
///
/// # Errors
///
/// [`RecordError`].
pub fn seal(dir: &Path, message: &str, now_unix_ms: u64) -> Result<ExecRecord, RecordError> {
    let mut record = read_record(dir)?;
    if record.exit.is_none() {
        let exit = Exit {
            reason: ExitReason::SandboxGone,
            code: 137,
            signal: None,
            message: message.to_owned(),
            output_bytes: newest_offset(dir)?,
            exited_unix_ms: now_unix_ms,
            pids_limit_hit: false,
            disk_full: false,
            memory_limit_hit: false,
            output_lost: false,
            disk_error: false,
        };
        write_exit(dir, record.pid, &exit)?;
        record.exit = Some(exit);
    }
    Ok(record)
}

/// Returns the offset after the last whole record.
fn newest_offset(dir: &Path) -> Result<u64, RecordError> {
    let mut reader = Reader::new(dir, 0);
    while reader.next(None).map_err(|source| RecordError::Read { path: dir.to_owned(), source })?.is_some() {}
    Ok(reader.position())
}

/// Writes beside the file and renames, so that a reader sees all or nothing.
fn write_json(path: PathBuf, value: &impl Serialize) -> Result<(), RecordError> {
    let write = || -> io::Result<()> {
        let unfinished = path.with_extension("tmp");
        let bytes = serde_json::to_vec(value)?;
        let mut file =
            OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&unfinished)?;
        file.write_all(&bytes)?;
        std::fs::rename(&unfinished, &path)
    };
    write().map_err(|source| RecordError::Write { path: path.clone(), source })
}

fn read_json<T: for<'a> Deserialize<'a>>(path: PathBuf) -> Result<T, RecordError> {
    let bytes = match std::fs::read(&path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(RecordError::NotFound(path)),
        Err(source) => return Err(RecordError::Read { path, source }),
    };
    serde_json::from_slice(&bytes).map_err(|source| RecordError::Parse { path, source })
}
