//! Finding the program that starts gVisor.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use rustix::fs::Access;

const NAME: &str = "runsc";
/// Where it is looked for after this program's directory and `PATH`: a service often has a short one.
const PLACES: [&str; 3] = ["/usr/local/bin", "/usr/bin", "/usr/local/sbin"];

/// Returns the `runsc` that is named, or the first beside this program, in `PATH` and in the usual places. A named one is returned as it is, so
/// that a wrong name is told and not passed over.
pub fn find(named: Option<&OsStr>) -> Option<PathBuf> {
    if let Some(named) = named.filter(|named| !named.is_empty()) {
        return Some(PathBuf::from(named));
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let own = std::env::current_exe().ok().and_then(|file| Some(file.parent()?.to_path_buf()));
    let places = own.into_iter().chain(std::env::split_paths(&path)).chain(PLACES.map(PathBuf::from));
    places.map(|place| place.join(NAME)).find(|file| file.is_absolute() && is_program(file))
}

fn is_program(file: &Path) -> bool {
    file.is_file() && rustix::fs::access(file, Access::EXEC_OK).is_ok()
}
