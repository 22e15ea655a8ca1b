//! Who runs the server: a system account when we are root (PostgreSQL refuses root), else ourselves.
//!
//! Beside it and us, the account `cloister` may connect as the role of the same name: a coordinator needs no privilege.

use std::path::Path;

use nix::unistd::{Uid, User};
use tokio::process::Command;

use super::{PostgresError, ROLE};

/// An account with an entry in the user database, as `initdb` wants it.
#[derive(Debug, Clone)]
pub(super) struct Account {
    pub(super) name: String,
    pub(super) uid: u32,
    pub(super) gid: u32,
    /// We are root and give up our rights before the server starts.
    pub(super) switch: bool,
    /// Our own name, under which we connect.
    pub(super) own_name: String,
    /// The group of the account with the role's name, when it exists: a coordinator without privileges connects as it.
    pub(super) client_gid: Option<u32>,
}

impl Account {
    /// Returns the account that runs the server, and creates it when it is missing and we may.
    pub(super) async fn ensure(system_user: &str) -> Result<Self, PostgresError> {
        let own = Uid::effective();
        let own_name = by_uid(own)?;
        let client_gid = by_name(ROLE)?.map(|user| user.gid.as_raw());
        if !own.is_root() {
            let uid = own.as_raw();
            let gid = nix::unistd::Gid::effective().as_raw();
            return Ok(Self { name: own_name.clone(), uid, gid, switch: false, own_name, client_gid });
        }
        let user = match by_name(system_user)? {
            Some(user) => user,
            None => {
                create(system_user).await?;
                by_name(system_user)?.ok_or_else(|| PostgresError::Account {
                    user: system_user.to_owned(),
                    problem: "`useradd` succeeded and the user is not there".to_owned(),
                })?
            }
        };
        Ok(Self {
            name: user.name,
            uid: user.uid.as_raw(),
            gid: user.gid.as_raw(),
            switch: true,
            own_name,
            client_gid,
        })
    }

    /// Returns a command that runs `program` as the account, without a way back to more rights.
    pub(super) fn command(&self, program: &Path) -> Command {
        let mut command = if self.switch {
            let mut command = Command::new("setpriv");
            command.args(["--reuid", &self.uid.to_string(), "--regid", &self.gid.to_string()]);
            command.args(["--clear-groups", "--no-new-privs", "--"]).arg(program);
            command
        } else {
            Command::new(program)
        };
        // Nothing of our environment decides how the server runs (PGDATA, PGOPTIONS, locale).
        command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("LC_ALL", "C").current_dir("/");
        command.stdin(std::process::Stdio::null());
        command
    }
}

fn by_name(name: &str) -> Result<Option<User>, PostgresError> {
    User::from_name(name)
        .map_err(|errno| PostgresError::Account { user: name.to_owned(), problem: errno.desc().to_owned() })
}

fn by_uid(uid: Uid) -> Result<String, PostgresError> {
    let problem =
        |problem: &str| PostgresError::Account { user: uid.to_string(), problem: problem.to_owned() };
    let user = User::from_uid(uid).map_err(|errno| problem(errno.desc()))?;
    Ok(user
        .ok_or_else(|| problem("this uid has no entry in the user database, and PostgreSQL needs one"))?
        .name)
}

async fn create(name: &str) -> Result<(), PostgresError> {
    let fail = |problem: String| PostgresError::Account { user: name.to_owned(), problem };
    let output = Command::new("useradd")
        .args(["--system", "--user-group", "--no-create-home", "--home-dir", "/nonexistent"])
        .args(["--shell", "/usr/sbin/nologin", "--comment", "Cloister's private PostgreSQL", name])
        .output()
        .await
        .map_err(|error| fail(format!("`useradd`: {error}")))?;
    if output.status.success() {
        tracing::info!(user = name, "created the system user");
        Ok(())
    } else {
        Err(fail(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
    }
}
