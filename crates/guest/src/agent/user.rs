//! Who an exec runs as: names resolved from the sandbox's own `/etc/passwd` and `/etc/group`, read as plain files so
//! that nothing of the host's name services is asked.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// Most bytes read of either file.
const FILE_MAX_BYTES: u64 = 1024 * 1024;
/// Most supplementary groups; the defences refuse more.
const GROUPS_MAX: usize = 64;

/// Ids as the sandbox sees them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct User {
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) groups: Vec<u32>,
    /// The home directory, where the user has an entry.
    pub(super) home: Option<String>,
}

/// Resolves `NAME|UID[:GROUP|GID]` with the files below `etc`.
///
/// # Errors
///
/// A sentence for people when a name is not there.
pub(super) fn resolve(text: &str, etc: &Path) -> Result<User, String> {
    let (user, group) = match text.split_once(':') {
        Some((user, group)) => (user, Some(group)),
        None => (text, None),
    };
    let passwd = read(&etc.join("passwd"))?;
    let number = parse_id(user);
    let entry = passwd.lines().filter_map(PasswdEntry::parse).find(|entry| match number {
        Some(uid) => entry.uid == uid,
        None => entry.name == user,
    });
    let uid = match (&entry, number) {
        (Some(entry), _) => entry.uid,
        (None, Some(uid)) => uid,
        (None, None) => return Err(format!("the sandbox has no user `{}`", shown(user))),
    };
    let mut gid = entry.as_ref().map_or(0, |entry| entry.gid);
    let mut groups = Vec::new();
    let needs_groups =
        group.is_some_and(|group| parse_id(group).is_none()) || (group.is_none() && entry.is_some());
    let file = if needs_groups { read(&etc.join("group"))? } else { String::new() };
    let entries = || file.lines().filter_map(GroupEntry::parse);
    match group {
        Some(group) => {
            gid = parse_id(group)
                .or_else(|| entries().find(|entry| entry.name == group).map(|entry| entry.gid))
                .ok_or_else(|| format!("the sandbox has no group `{}`", shown(group)))?;
        }
        // As a login does it; an explicit group stands alone.
        None => {
            if let Some(entry) = &entry {
                groups = entries()
                    .filter(|group| group.members.split(',').any(|member| member == entry.name))
                    .map(|group| group.gid)
                    .take(GROUPS_MAX)
                    .collect();
            }
        }
    }
    Ok(User { uid, gid, groups, home: entry.map(|entry| entry.home.to_owned()) })
}

struct PasswdEntry<'a> {
    name: &'a str,
    uid: u32,
    gid: u32,
    home: &'a str,
}

impl<'a> PasswdEntry<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let mut fields = line.split(':');
        let name = fields.next().filter(|name| !name.is_empty())?;
        let uid = parse_id(fields.nth(1)?)?;
        let gid = parse_id(fields.next()?)?;
        Some(Self { name, uid, gid, home: fields.nth(1)? })
    }
}

struct GroupEntry<'a> {
    name: &'a str,
    gid: u32,
    members: &'a str,
}

impl<'a> GroupEntry<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let mut fields = line.split(':');
        let name = fields.next().filter(|name| !name.is_empty())?;
        Some(Self { name, gid: parse_id(fields.nth(1)?)?, members: fields.next()? })
    }
}

/// Returns a decimal id; `-1` and the like are no ids for the kernel.
fn parse_id(text: &str) -> Option<u32> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    digits.then(|| text.parse().ok()).flatten().filter(|id| *id != u32::MAX)
}

/// Reads a file; a missing one is empty, bytes that are no text are passed over.
fn read(path: &Path) -> Result<String, String> {
    let mut bytes = Vec::new();
    let read = open_regular(path).and_then(|file| file.take(FILE_MAX_BYTES).read_to_end(&mut bytes));
    match read {
        Ok(_) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        Err(error) => Err(format!("`{}` cannot be read: {error}", path.display())),
    }
}

/// Opens a file of the sandbox without waiting: its root may have put a pipe there, on which this process, which serves
/// everybody in the sandbox, would stand still.
fn open_regular(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other("it is no regular file")) }
}

fn shown(text: &str) -> String {
    text.chars().take(64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn etc() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(
            dir.path().join("passwd"),
            "root:x:0:0:root:/root:/bin/sh\nbroken\nme:x:1000:1001:,,,:/home/me:/bin/sh\n:x:5:5::/:\n",
        )
        .unwrap();
        std::fs::write(
            dir.path().join("group"),
            "root:x:0:\nme:x:1001:\nwheel:x:10:root,me\nkvm:x:11:you,me\n",
        )
        .unwrap();
        dir
    }

    fn ids(text: &str) -> (u32, u32, Vec<u32>) {
        let user = resolve(text, etc().path()).unwrap();
        (user.uid, user.gid, user.groups)
    }

    #[test]
    fn names_and_numbers_resolve_from_the_files() {
        assert_eq!(ids("me"), (1000, 1001, vec![10, 11]));
        assert_eq!(ids("1000"), (1000, 1001, vec![10, 11]));
        assert_eq!(ids("me:wheel"), (1000, 10, vec![]));
        assert_eq!(ids("me:77"), (1000, 77, vec![]));
        assert_eq!(ids("4242"), (4242, 0, vec![]));
        assert_eq!(resolve("me", etc().path()).unwrap().home.as_deref(), Some("/home/me"));
        assert_eq!(resolve("4242", etc().path()).unwrap().home, None);
    }

    #[test]
    fn a_pipe_in_the_place_of_a_file_is_an_answer_not_a_wait() {
        let etc = etc();
        let passwd = etc.path().join("passwd");
        std::fs::remove_file(&passwd).unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, &passwd, rustix::fs::Mode::RWXU).unwrap();
        let error = resolve("me", etc.path()).unwrap_err();
        assert!(error.contains("no regular file"), "{error}");
        // A device waits as well, or never ends.
        std::fs::remove_file(&passwd).unwrap();
        std::os::unix::fs::symlink("/dev/zero", &passwd).unwrap();
        assert!(resolve("me", etc.path()).is_err());
    }

    #[test]
    fn what_is_not_there_is_said() {
        for text in ["nobody", "", ":", "me:none", "me:", "-1", "4294967295", "+5", "broken"] {
            assert!(resolve(text, etc().path()).is_err(), "`{text}` was resolved");
        }
        let empty = tempfile::tempdir().unwrap();
        assert_eq!(resolve("7:8", empty.path()).map(|user| (user.uid, user.gid)), Ok((7, 8)));
        assert!(resolve("root", empty.path()).is_err());
    }
}
