//! Where everything of this host lies, as functions of ids: see "Files of a host" in ARCHITECTURE.md.
//!
//! A directory is removed in two steps, so that a crash between them leaves nothing that looks alive: it is renamed to
//! a tombstone (`.removing-<name>`), then emptied. [`sweep_tombstones`] goes on with what a crash left.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::LazyLock;

use cloister_types::{ExecId, SandboxId, SessionId};

use crate::backend::HostPaths;
use crate::fault::POINTS;

/// In a session's directory: how its latest sandbox ended.
pub(crate) const ENDED_FILE: &str = "ended.json";
const TOMBSTONE: &str = ".removing-";
const UNFINISHED: &str = ".unfinished-";
/// Characters of an id that name its socket: the random end of the id, 80 bits, keeps paths below 108 bytes.
const SOCKET_NAME_LEN: usize = 16;

impl HostPaths {
    /// Returns the paths of what nobody owns yet: the same tree, one level down.
    #[must_use]
    pub fn warm(&self) -> Self {
        Self { data_dir: self.data_dir.join("warm"), run_dir: self.run_dir.clone() }
    }

    /// Returns the directory that holds one directory per sandbox.
    pub fn sandboxes_dir(&self) -> PathBuf {
        self.data_dir.join("sandboxes")
    }

    /// Returns the directory that holds one directory per session.
    pub fn sessions_dir(&self) -> PathBuf {
        self.data_dir.join("sessions")
    }

    /// Returns one sandbox's directory.
    pub fn sandbox_dir(&self, id: &SandboxId) -> PathBuf {
        self.sandboxes_dir().join(id.as_str())
    }

    /// Returns one session's directory.
    pub fn session_dir(&self, id: &SessionId) -> PathBuf {
        self.sessions_dir().join(id.as_str())
    }

    /// Returns the directory that holds one directory per exec of a session.
    pub fn execs_dir(&self, id: &SessionId) -> PathBuf {
        self.session_dir(id).join("execs")
    }

    /// Returns one exec's directory.
    pub fn exec_dir(&self, session: &SessionId, exec: &ExecId) -> PathBuf {
        self.execs_dir(session).join(exec.as_str())
    }

    /// Returns the socket of a sandbox's shim.
    pub fn shim_socket(&self, id: &SandboxId) -> PathBuf {
        let text = id.as_str();
        self.run_dir.join("s").join(format!("{}.sock", &text[text.len() - SOCKET_NAME_LEN..]))
    }

    /// Makes the directories that everything else lies in, readable by root alone.
    ///
    /// # Errors
    ///
    /// When one cannot be made.
    pub fn ensure(&self) -> io::Result<()> {
        let warm = self.warm();
        for directory in [
            self.sandboxes_dir(),
            self.sessions_dir(),
            warm.sandboxes_dir(),
            warm.sessions_dir(),
            self.run_dir.join("s"),
        ] {
            ensure_private_dir(&directory)?;
        }
        Ok(())
    }

    /// Returns a short name for this data directory, the same each time: sets the control groups of several hosts on
    /// one machine apart.
    ///
    /// # Errors
    ///
    /// When the directory does not exist.
    pub fn instance(&self) -> io::Result<String> {
        let path = fs::canonicalize(&self.data_dir)?;
        Ok(blake3::hash(path.as_os_str().as_encoded_bytes()).to_hex()[..12].to_owned())
    }
}

/// Makes a directory, and those above it, that only its owner may enter. What is there already stays as it is.
///
/// # Errors
///
/// When it cannot be made.
pub fn ensure_private_dir(path: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Returns the ids that name directories in `directory`; none when it does not exist. Other names are passed over.
///
/// # Errors
///
/// When the directory cannot be read.
pub fn ids_in<I: FromStr + Ord>(directory: &Path) -> io::Result<Vec<I>> {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut ids = Vec::new();
    for entry in entries {
        if let Some(id) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) {
            ids.push(id);
        }
    }
    ids.sort();
    Ok(ids)
}

/// Removes a directory with everything in it; from the first moment on it is no longer found under its name. Succeeds
/// when there is none.
///
/// # Errors
///
/// When something is left; [`sweep_tombstones`] goes on.
pub fn remove_dir(path: &Path) -> io::Result<()> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name().and_then(|name| name.to_str())) else {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    };
    let tombstone = parent.join(format!("{TOMBSTONE}{name}"));
    match fs::rename(path, &tombstone) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        // A tombstone of the same name was left by a crash: empty it first.
        Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {
            remove_tree(&tombstone)?;
            match fs::rename(path, &tombstone) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Err(error) => return Err(error),
    }
    POINTS.reach("sandbox_after_tombstone");
    remove_tree(&tombstone)
}

/// Goes on removing what [`remove_dir`] did not finish in `directory`.
///
/// # Errors
///
/// When something is left.
pub fn sweep_tombstones(directory: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    for entry in entries {
        let entry = entry?;
        if entry.file_name().to_str().is_some_and(|name| name.starts_with(TOMBSTONE)) {
            remove_tree(&entry.path())?;
        }
    }
    Ok(())
}

/// Returns the name under which this process writes a file that gets `name` once it is whole.
pub fn unfinished_name(name: &str) -> String {
    format!("{}{:016x}-{name}", unfinished_prefix(), rand::random::<u64>())
}

/// Returns how the names begin that this process gives. Not by its number: in a container each one has the same.
fn unfinished_prefix() -> String {
    static PROCESS: LazyLock<u64> = LazyLock::new(rand::random);
    format!("{UNFINISHED}{:016x}-", *PROCESS)
}

/// Removes the files in `directory` that other processes left unfinished.
///
/// # Errors
///
/// When the directory cannot be read or something is left.
pub fn sweep_unfinished(directory: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    let own = unfinished_prefix();
    for entry in entries {
        let entry = entry?;
        let is_left = |name: &str| name.starts_with(UNFINISHED) && !name.starts_with(&own);
        if entry.file_name().to_str().is_some_and(is_left) {
            remove_file(&entry.path())?;
        }
    }
    Ok(())
}

fn remove_tree(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Removes a file. Succeeds when there is none.
///
/// # Errors
///
/// When it is still there.
pub fn remove_file(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_of_ids_made_in_the_same_millisecond_differ_and_are_short() {
        let paths = HostPaths { data_dir: "/d".into(), run_dir: "/run/cloister".into() };
        let (first, second) = (SandboxId::generate(), SandboxId::generate());
        assert_ne!(paths.shim_socket(&first), paths.shim_socket(&second));
        assert!(paths.shim_socket(&first).as_os_str().len() < 50);
    }

    #[test]
    fn what_another_process_left_unfinished_goes_and_ones_own_stays() {
        let root = tempfile::tempdir().unwrap();
        let own = root.path().join(unfinished_name("image"));
        let foreign = root.path().join(".unfinished-0-0000000000000000-image");
        for path in [&own, &foreign, &root.path().join("image")] {
            fs::write(path, "x").unwrap();
        }
        sweep_unfinished(root.path()).unwrap();
        assert!(own.exists() && !foreign.exists() && root.path().join("image").exists());
        sweep_unfinished(&root.path().join("absent")).unwrap();
    }

    #[test]
    fn a_removal_that_a_crash_cut_is_finished_and_others_are_not_touched() {
        let root = tempfile::tempdir().unwrap();
        let id = SandboxId::generate();
        let directory = root.path().join(id.as_str());
        let left = root.path().join(format!(".removing-{id}"));
        for path in [&directory, &left, &root.path().join("foreign")] {
            fs::create_dir(path).unwrap();
            fs::write(path.join("file"), "x").unwrap();
        }
        assert_eq!(ids_in::<SandboxId>(root.path()).unwrap(), [id]);
        remove_dir(&directory).unwrap();
        assert!(!left.exists() && !directory.exists());
        fs::create_dir(&left).unwrap();
        sweep_tombstones(root.path()).unwrap();
        assert!(!left.exists() && root.path().join("foreign/file").exists());
        remove_dir(&directory).unwrap();
    }
}
