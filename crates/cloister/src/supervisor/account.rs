//! The system accounts of children that need no privilege.
//!
//! A child is started as root and becomes its account by itself, before it has a second thread or has read
//! anything: so the program need not lie where that account could read it.

use std::fmt;
use std::path::Path;
use std::process::Command;
use std::str::FromStr;

use nix::unistd::{Gid, Uid, User, chown, setgid, setgroups, setuid};

use crate::error::CliError;

/// The account of the coordinator.
pub(crate) const COORDINATOR_USER: &str = "cloister";
/// The account of the private PostgreSQL.
pub(crate) const POSTGRES_USER: &str = "cloister-postgres";

/// Who a child runs as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Account {
    /// Numeric user.
    pub(crate) uid: Uid,
    /// Its own group.
    pub(crate) gid: Gid,
}

impl fmt::Display for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.uid, self.gid)
    }
}

impl FromStr for Account {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let error = || format!("`{text}` is not `UID:GID`");
        let (uid, gid) = text.split_once(':').ok_or_else(error)?;
        let number = |text: &str| text.parse::<u32>().map_err(|_| error());
        Ok(Self { uid: Uid::from_raw(number(uid)?), gid: Gid::from_raw(number(gid)?) })
    }
}

impl Account {
    /// Turns this process into one of the account, for good: no program it starts can gain privileges again.
    ///
    /// # Errors
    ///
    /// [`CliError::Io`]; the process must not go on.
    pub(crate) fn become_it(self) -> Result<(), CliError> {
        setgroups(&[self.gid])
            .and_then(|()| setgid(self.gid))
            .and_then(|()| setuid(self.uid))
            .map_err(|errno| CliError::io(format!("become account {self}"))(errno.into()))?;
        rustix::thread::set_no_new_privs(true)
            .map_err(|errno| CliError::io("give up privileges")(errno.into()))
    }
}

/// Returns a system account, made when it is missing.
///
/// # Errors
///
/// [`CliError::Refused`] with the command that makes it by hand.
pub(crate) fn ensure(name: &str) -> Result<Account, CliError> {
    if let Some(account) = find(name)? {
        return check(name, account);
    }
    let arguments = [
        "--system",
        "--user-group",
        "--no-create-home",
        "--home-dir",
        "/nonexistent",
        "--shell",
        "/usr/sbin/nologin",
    ];
    let by_hand = || format!("make it by hand: `useradd {} {name}`", arguments.join(" "));
    let output = Command::new("useradd").args(arguments).arg(name).output().map_err(|error| {
        CliError::refused(
            format!("the system account `{name}` is missing and `useradd` does not run: {error}"),
            by_hand(),
        )
    })?;
    // Two installations may start at one time: what counts is that the account is there.
    match find(name)? {
        Some(account) => check(name, account),
        None => Err(CliError::refused(
            format!(
                "the system account `{name}` cannot be made: {}",
                crate::terminal::one_line(String::from_utf8_lossy(&output.stderr).trim())
            ),
            by_hand(),
        )),
    }
}

fn check(name: &str, account: Account) -> Result<Account, CliError> {
    if account.uid.is_root() {
        return Err(CliError::refused(
            format!("the account `{name}` is root"),
            "give that account a uid of its own",
        ));
    }
    Ok(account)
}

fn find(name: &str) -> Result<Option<Account>, CliError> {
    match User::from_name(name) {
        Ok(user) => Ok(user.map(|user| Account { uid: user.uid, gid: user.gid })),
        Err(errno) => Err(CliError::io(format!("look up the account `{name}`"))(errno.into())),
    }
}

/// Gives a directory to an account.
///
/// # Errors
///
/// [`CliError::Io`] naming the directory.
pub(crate) fn give(path: &Path, account: Account) -> Result<(), CliError> {
    chown(path, Some(account.uid), Some(account.gid))
        .map_err(|errno| CliError::io(format!("give `{}` to its account", path.display()))(errno.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_is_no_account_for_a_child() {
        let error = ensure("root").unwrap_err();
        assert!(error.to_string().contains("is root"), "{error}");
        assert_eq!(find("no-such-account-here").unwrap(), None);
    }

    #[test]
    fn an_account_is_written_as_numbers() {
        let account = Account { uid: Uid::from_raw(7), gid: Gid::from_raw(8) };
        assert_eq!(account.to_string().parse(), Ok(account));
        for bad in ["", "7", "7:", "a:b", "-1:0"] {
            assert!(bad.parse::<Account>().is_err(), "`{bad}` was accepted");
        }
    }
}
