//! Bearers that are made once and kept.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rand::TryRng;
use rand::rngs::SysRng;

use crate::error::CliError;

/// Random bytes of a bearer: 256 bits.
const BEARER_BYTES: usize = 32;

/// Returns the bearer in a file, made (mode 0600) when it is not there.
///
/// # Errors
///
/// [`CliError`] when the file cannot be read or made, or is empty.
pub(crate) fn ensure(path: &Path) -> Result<String, CliError> {
    let action = || format!("read the token in `{}`", path.display());
    match fs::read_to_string(path) {
        Ok(text) if text.trim().is_empty() => Err(CliError::refused(
            format!("`{}` is empty", path.display()),
            "restore the file, or remove it to have a new token made",
        )),
        Ok(text) => Ok(text.trim().to_owned()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => make(path),
        Err(error) => Err(CliError::io(action())(error)),
    }
}

fn make(path: &Path) -> Result<String, CliError> {
    let mut bytes = [0_u8; BEARER_BYTES];
    SysRng.try_fill_bytes(&mut bytes).map_err(|error| {
        CliError::refused(
            format!("the kernel gave no randomness: {error}"),
            "check `getrandom` on this machine",
        )
    })?;
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let bearer = format!("clo_{hex}");
    // Written beside and moved: a crash leaves no half token behind.
    let new = path.with_extension("new");
    OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&new)
        .and_then(|mut file| writeln!(file, "{bearer}").and_then(|()| file.sync_all()))
        .and_then(|()| fs::rename(&new, path))
        .map_err(CliError::io(format!("write the token in `{}`", path.display())))?;
    Ok(bearer)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_bearer_is_made_once_private_and_long() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("owner");
        let bearer = ensure(&path).unwrap();
        assert_eq!(bearer.len(), 4 + 2 * BEARER_BYTES);
        assert_eq!(ensure(&path).unwrap(), bearer);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_ne!(ensure(&directory.path().join("host")).unwrap(), bearer);
        fs::write(&path, "\n").unwrap();
        assert!(ensure(&path).is_err());
    }
}
