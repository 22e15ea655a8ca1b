//! The data directory of a host agent: its lock and the host's id.
//!
//! One agent at a time owns a data directory, by a lock on `<data>/host.lock` that the kernel drops with the
//! process; shims do not inherit it. The id in `<data>/host.json` is made once and never changes: it is what the
//! coordinator knows the machine by.

use std::fs::{DirBuilder, File};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use cloister_sandbox::backend::HostPaths;
use cloister_types::HostId;
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use crate::fault::POINTS;

/// Why a data directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DataDirError {
    /// Another host agent runs on it.
    #[error(
        "data directory `{path}` belongs to another host agent ({owner}): stop that one, or give this one a \
         directory of its own with `CLOISTER_DATA_DIR`"
    )]
    InUse {
        /// The directory.
        path: PathBuf,
        /// What the other one wrote about itself.
        owner: String,
    },
    /// A file in it cannot be read or written.
    #[error("{operation} `{path}`")]
    Io {
        /// Verb and object.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// `host.json` is not what a host agent writes.
    #[error("read host id from `{path}`: restore the file, or remove it to register as a new host")]
    HostFile {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        #[source]
        source: serde_json::Error,
    },
}

/// An owned data directory. The lock is held until this is dropped.
#[derive(Debug)]
pub(crate) struct DataDir {
    paths: HostPaths,
    host_id: HostId,
    _lock: File,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct HostFile {
    host_id: HostId,
}

impl DataDir {
    /// Makes the directories, takes the lock, reads or makes the host's id. Blocks.
    pub(crate) fn open(paths: &HostPaths) -> Result<Self, DataDirError> {
        let failed = |operation, path: &Path| {
            let path = path.to_owned();
            move |source| DataDirError::Io { operation, path, source }
        };
        for directory in [&paths.data_dir, &paths.run_dir] {
            // Others may pass through, to the few sockets that are meant for them, and list nothing.
            let mut builder = DirBuilder::new();
            builder.recursive(true).mode(0o711);
            builder.create(directory).map_err(failed("make directory", directory))?;
        }
        let lock_path = paths.data_dir.join("host.lock");
        let mut lock = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&lock_path)
            .map_err(failed("open lock", &lock_path))?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let mut owner = String::new();
                let _ = lock.take(256).read_to_string(&mut owner);
                let owner = if owner.trim().is_empty() { "it is just starting" } else { owner.trim() };
                return Err(DataDirError::InUse { path: paths.data_dir.clone(), owner: owner.to_owned() });
            }
            Err(errno) => return Err(failed("take lock", &lock_path)(errno.into())),
        }
        let describe = |lock: &mut File| {
            lock.set_len(0)?;
            lock.rewind()?;
            write!(lock, "process {}", std::process::id())
        };
        describe(&mut lock).map_err(failed("write lock", &lock_path))?;

        let host_path = paths.data_dir.join("host.json");
        let host_id = match std::fs::read(&host_path) {
            Ok(bytes) => {
                let file: HostFile = serde_json::from_slice(&bytes)
                    .map_err(|source| DataDirError::HostFile { path: host_path.clone(), source })?;
                file.host_id
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let file = HostFile { host_id: HostId::generate() };
                let mut bytes = serde_json::to_vec_pretty(&file).expect("an id serialises");
                bytes.push(b'\n');
                write_atomically(&host_path, &bytes).map_err(failed("write", &host_path))?;
                file.host_id
            }
            Err(error) => return Err(failed("read", &host_path)(error)),
        };
        Ok(Self { paths: paths.clone(), host_id, _lock: lock })
    }

    /// Returns the host's id.
    pub(crate) fn host_id(&self) -> &HostId {
        &self.host_id
    }

    /// Returns where a file of the host agent is.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.paths.data_dir.join(name)
    }
}

/// Writes a file so that after a crash it has either its old content or all of the new.
pub(crate) fn write_atomically(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let directory = path.parent().ok_or_else(|| io::Error::other("a file has a directory"))?;
    let mut name = path.file_name().ok_or_else(|| io::Error::other("a file has a name"))?.to_owned();
    name.push(".new");
    let temporary = directory.join(name);
    let mut file = File::options().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    POINTS.reach("host_before_file_rename");
    std::fs::rename(&temporary, path)?;
    File::open(directory)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(directory: &Path) -> HostPaths {
        HostPaths { data_dir: directory.join("data"), run_dir: directory.join("run") }
    }

    #[test]
    fn a_second_agent_on_the_same_directory_is_refused_by_name() {
        let directory = tempfile::tempdir().expect("temporary directory");
        let paths = paths(directory.path());
        let first = DataDir::open(&paths).expect("the first");
        let error = DataDir::open(&paths).expect_err("the second");
        let message = error.to_string();
        assert!(message.contains(&format!("process {}", std::process::id())), "{message}");
        assert!(message.contains(&paths.data_dir.display().to_string()), "{message}");
        drop(first);
        DataDir::open(&paths).expect("free again");
    }

    #[test]
    fn the_host_id_is_made_once_and_a_broken_file_is_not_replaced() {
        let directory = tempfile::tempdir().expect("temporary directory");
        let paths = paths(directory.path());
        let host_id = DataDir::open(&paths).expect("made").host_id().clone();
        assert_eq!(DataDir::open(&paths).expect("found").host_id(), &host_id);
        let file = paths.data_dir.join("host.json");
        std::fs::write(&file, "{}").expect("break it");
        assert!(matches!(DataDir::open(&paths), Err(DataDirError::HostFile { .. })));
        assert_eq!(std::fs::read_to_string(&file).expect("still there"), "{}");
    }
}
