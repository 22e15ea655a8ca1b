//! The guest binary that this build carries: the shim beside each sandbox and the agent inside it.
//!
//! It is one static executable, built by `build.rs` and embedded. A host agent writes it under a name that holds its
//! digest, so that an upgrade never replaces the file that running sandboxes were started from.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::layout::unfinished_name;

/// The executable.
static BYTES: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/cloister-guest"));

/// Hexadecimal digits of the digest that are part of the file's name: 64 bits tell versions apart.
const NAME_DIGITS: usize = 16;

/// Returns the BLAKE3 digest of the binary, in hexadecimal.
pub fn digest() -> &'static str {
    env!("CLOISTER_GUEST_DIGEST")
}

/// Returns how many bytes it has.
pub fn size_bytes() -> usize {
    BYTES.len()
}

/// Makes sure that `<data_dir>/bin/cloister-guest-<digest>` is there, executable and whole, and returns its path.
///
/// # Errors
///
/// When the file cannot be read or written; nothing half-written is ever visible under the name.
pub fn install(data_dir: &Path) -> io::Result<PathBuf> {
    let directory = data_dir.join("bin");
    fs::create_dir_all(&directory)?;
    let path = directory.join(format!("cloister-guest-{}", &digest()[..NAME_DIGITS]));
    if is_whole(&path)? {
        return Ok(path);
    }
    let temporary = directory.join(unfinished_name("cloister-guest"));
    let written = fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o755)
        .open(&temporary)
        .and_then(|mut file| {
            file.write_all(BYTES)?;
            // The umask may have taken bits away.
            file.set_permissions(fs::Permissions::from_mode(0o755))
        })
        .and_then(|()| fs::rename(&temporary, &path));
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written.map(|()| path)
}

/// Returns whether the file has these very bytes; a half-written or altered one is written anew.
fn is_whole(path: &Path) -> io::Result<bool> {
    match fs::metadata(path) {
        Ok(metadata) if metadata.permissions().mode() & 0o777 == 0o755 => Ok(fs::read(path)? == BYTES),
        Ok(_) => Ok(false),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn installed_binary_has_the_digest_of_its_name_and_runs() {
        let directory = tempfile::tempdir().unwrap();
        let path = install(directory.path()).unwrap();
        assert_eq!(blake3::hash(&fs::read(&path).unwrap()).to_hex().as_str(), digest());
        assert_eq!(install(directory.path()).unwrap(), path);
        // Without a mode it says what it wants, which proves that it is an executable of this machine.
        let output = std::process::Command::new(&path).output().unwrap();
        assert!(!output.status.success());
        assert_eq!(fs::read_dir(directory.path().join("bin")).unwrap().count(), 1);
    }

    #[test]
    fn an_altered_binary_is_written_anew() {
        let directory = tempfile::tempdir().unwrap();
        let path = install(directory.path()).unwrap();
        fs::write(&path, b"#!/bin/sh\n").unwrap();
        install(directory.path()).unwrap();
        assert_eq!(blake3::hash(&fs::read(&path).unwrap()).to_hex().as_str(), digest());
    }
}
