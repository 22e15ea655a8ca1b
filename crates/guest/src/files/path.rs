//! Paths of entries: relative, of plain names, compared name by name.

use std::cmp::Ordering;
use std::ffi::CString;

/// Most bytes of a path, as Linux has it.
const PATH_MAX_BYTES: usize = 4096;
/// Most bytes of a name, as Linux has it.
const NAME_MAX_BYTES: usize = 255;
/// Most names of a path. Each open directory on the way to it is a descriptor.
pub(super) const DEPTH_MAX: usize = 256;

/// Returns the names of an entry's path; none for the tree itself.
///
/// # Errors
///
/// What is wrong with it: whatever could lead anywhere but down.
pub(super) fn names(path: &[u8]) -> Result<Vec<CString>, &'static str> {
    if path.is_empty() {
        return Ok(Vec::new());
    }
    if path.len() > PATH_MAX_BYTES {
        return Err("the path is longer than 4096 bytes");
    }
    let names: Vec<CString> = path.split(|byte| *byte == b'/').map(name).collect::<Result<_, _>>()?;
    if names.len() > DEPTH_MAX {
        return Err("the path has more than 256 names");
    }
    Ok(names)
}

/// Returns one name.
///
/// # Errors
///
/// What is wrong with it.
pub(super) fn name(bytes: &[u8]) -> Result<CString, &'static str> {
    match bytes {
        b"" => Err("a name is empty"),
        b"." | b".." => Err("a name is `.` or `..`"),
        _ if bytes.len() > NAME_MAX_BYTES => Err("a name is longer than 255 bytes"),
        _ if bytes.contains(&b'/') => Err("a name has a `/`"),
        _ => CString::new(bytes).map_err(|_| "a name has a NUL byte"),
    }
}

/// Returns the path of `name` below `path`.
pub(super) fn join(path: &[u8], name: &[u8]) -> Vec<u8> {
    match (path, name) {
        (b"", name) => name.to_vec(),
        (path, b"") => path.to_vec(),
        (path, name) => [path, b"/", name].concat(),
    }
}

/// Returns whether `path` is `directory` or below it.
pub(super) fn is_below(path: &[u8], directory: &[u8]) -> bool {
    directory.is_empty()
        || path.strip_prefix(directory).is_some_and(|rest| rest.is_empty() || rest.starts_with(b"/"))
}

/// Compares two paths in the order in which a tree is sent.
pub(super) fn order(one: &[u8], other: &[u8]) -> Ordering {
    one.split(|byte| *byte == b'/').cmp(other.split(|byte| *byte == b'/'))
}
