//! The cluster's files: made once, atomically; settings written at each start.

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::path::Path;

use super::account::Account;
use super::binaries::Binaries;
use super::{ADMIN_ROLE, PostgresConfig, PostgresError, ROLE};

/// Most bytes of the server's own words that go into an error.
const LOG_SHOWN_BYTES: usize = 2000;
/// Least room for a start, in MiB: the server may need a new file of its write-ahead log (16) before it frees an old one.
const ROOM_MIB: u64 = 32;

/// Ensures the socket's directory. When we are root, a coordinator that gave its privileges up must get through to the
/// socket: its account's group may, or everybody as long as that account does not exist yet. `peer` decides who gets in.
pub(super) fn ensure_socket_directory(
    config: &PostgresConfig,
    account: &Account,
) -> Result<(), PostgresError> {
    let path = &config.run_dir;
    ensure_private_directory(path, account)?;
    ensure_reachable(path, account)?;
    if !account.switch {
        return Ok(());
    }
    let mode = match account.client_gid {
        Some(gid) => {
            chown(path, None, Some(gid))
                .map_err(|error| PostgresError::file("change the group of", path, error))?;
            0o710
        }
        None => 0o711,
    };
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
        .map_err(|error| PostgresError::file("change the mode of", path, error))
}

/// Ensures the cluster. `initdb` works in a directory beside it, which then takes its place, so that a crash leaves
/// either no cluster or a whole one.
pub(super) async fn ensure_initialized(
    config: &PostgresConfig,
    binaries: &Binaries,
    account: &Account,
) -> Result<(), PostgresError> {
    let data = &config.data_dir;
    ensure_reachable(data, account)?;
    if data.join("PG_VERSION").exists() {
        return Ok(());
    }
    match fs::read_dir(data) {
        Ok(mut entries) => {
            if entries.next().is_some() {
                return Err(PostgresError::NotACluster { path: data.clone() });
            }
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(PostgresError::file("read", data, error)),
    }
    let new = config.beside(".new");
    match fs::remove_dir_all(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(PostgresError::file("remove", &new, error));
        }
        _ => {}
    }
    ensure_private_directory(&new, account)?;
    let mut command = account.command(&binaries.program("initdb"));
    command.args([
        "--auth-local=peer",
        "--auth-host=reject",
        "--encoding=UTF8",
        "--locale=C",
        "--data-checksums",
    ]);
    command.arg(format!("--username={ADMIN_ROLE}")).arg("-D").arg(&new);
    if config.fast_and_unsafe {
        command.arg("--no-sync");
    }
    let output = command
        .output()
        .await
        .map_err(|error| PostgresError::Program { program: "initdb", output: error.to_string() })?;
    if !output.status.success() {
        let output = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(PostgresError::Program { program: "initdb", output });
    }
    let settings = new.join("postgresql.conf");
    let mut text =
        fs::read_to_string(&settings).map_err(|error| PostgresError::file("read", &settings, error))?;
    text.push_str("\ninclude 'cloister.conf'\n");
    write_owned(&settings, &text, account)?;
    // rename(2) replaces an empty directory.
    fs::rename(&new, data).map_err(|error| PostgresError::file("rename", &new, error))?;
    tracing::info!(path = %data.display(), version = binaries.major, "initialised the private PostgreSQL");
    Ok(())
}

/// Writes what decides how the server runs and who may connect. Later starts may have other settings.
pub(super) fn write_settings(config: &PostgresConfig, account: &Account) -> Result<(), PostgresError> {
    let data = &config.data_dir;
    let mut settings = format!(
        "# Written by cloister at each start.\n\
         listen_addresses = ''\n\
         unix_socket_directories = '{}'\n\
         # The directory keeps others out, and `peer` asks the kernel who it is.\n\
         unix_socket_permissions = 0777\n\
         max_connections = 100\n\
         shared_buffers = '64MB'\n\
         wal_level = minimal\n\
         max_wal_senders = 0\n\
         max_wal_size = '256MB'\n\
         # Bounded on disk: one file a weekday, each begun anew a week later.\n\
         logging_collector = on\n\
         log_directory = 'log'\n\
         log_filename = 'postgresql-%a.log'\n\
         log_rotation_age = '1d'\n\
         log_rotation_size = 0\n\
         log_truncate_on_rotation = on\n\
         log_line_prefix = '%m [%p] '\n",
        config.run_dir.display().to_string().replace('\'', "''"),
    );
    if config.fast_and_unsafe {
        settings.push_str("fsync = off\nfull_page_writes = off\nautovacuum_naptime = '5min'\n");
    }
    write_owned(&data.join("cloister.conf"), &settings, account)?;
    let access = format!(
        "# Written by cloister at each start.\n\
         local all {ROLE} peer map=cloister\n\
         local all {ADMIN_ROLE} peer map=cloister\n"
    );
    write_owned(&data.join("pg_hba.conf"), &access, account)?;
    let mut names = vec![account.name.as_str()];
    if account.own_name != account.name {
        names.push(&account.own_name);
    }
    let mut map = String::from("# Written by cloister at each start.\n");
    for name in &names {
        for role in [ROLE, ADMIN_ROLE] {
            map.push_str(&format!("cloister \"{name}\" {role}\n"));
        }
    }
    if account.switch && !names.contains(&ROLE) {
        map.push_str(&format!("cloister \"{ROLE}\" {ROLE}\n"));
    }
    write_owned(&data.join("pg_ident.conf"), &map, account)
}

/// Returns the end of what the server printed before its log was open, and of that log.
pub(super) fn startup_log(config: &PostgresConfig) -> String {
    let mut text = fs::read_to_string(config.beside(".startup.log")).unwrap_or_default();
    let newest =
        fs::read_dir(config.data_dir.join("log")).into_iter().flatten().flatten().max_by_key(|entry| {
            entry.metadata().and_then(|metadata| metadata.modified()).unwrap_or(std::time::UNIX_EPOCH)
        });
    if let Some(newest) = newest {
        text.push_str(&String::from_utf8_lossy(&fs::read(newest.path()).unwrap_or_default()));
    }
    let mut from = text.len().saturating_sub(LOG_SHOWN_BYTES);
    while !text.is_char_boundary(from) {
        from += 1;
    }
    text[from..].trim().to_owned()
}

/// Checks that the disk has room: a server without it ends at its start, and cannot even say so in its log.
pub(super) fn ensure_room(data: &Path) -> Result<(), PostgresError> {
    // Not there before the first start.
    let there = data.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    let disk = rustix::fs::statvfs(there)
        .map_err(|errno| PostgresError::file("look at the disk of", there, errno.into()))?;
    let free_mib = disk.f_bavail.saturating_mul(disk.f_frsize) >> 20;
    if free_mib < ROOM_MIB {
        return Err(PostgresError::NoRoom { path: there.to_owned(), free_mib, least_mib: ROOM_MIB });
    }
    Ok(())
}

fn ensure_private_directory(path: &Path, account: &Account) -> Result<(), PostgresError> {
    fs::create_dir_all(path).map_err(|error| PostgresError::file("create", path, error))?;
    if account.switch {
        chown(path, Some(account.uid), Some(account.gid))
            .map_err(|error| PostgresError::file("change the owner of", path, error))?;
    }
    fs::set_permissions(path, fs::Permissions::from_mode(0o700))
        .map_err(|error| PostgresError::file("change the mode of", path, error))
}

fn write_owned(path: &Path, text: &str, account: &Account) -> Result<(), PostgresError> {
    let new = path.with_extension("new");
    fs::write(&new, text).map_err(|error| PostgresError::file("write", &new, error))?;
    if account.switch {
        chown(&new, Some(account.uid), Some(account.gid))
            .map_err(|error| PostgresError::file("change the owner of", &new, error))?;
    }
    fs::set_permissions(&new, fs::Permissions::from_mode(0o600))
        .map_err(|error| PostgresError::file("change the mode of", &new, error))?;
    fs::rename(&new, path).map_err(|error| PostgresError::file("replace", path, error))
}

/// Checks the directories above the cluster: `initdb` would only say that it was denied, not where.
fn ensure_reachable(data: &Path, account: &Account) -> Result<(), PostgresError> {
    if !account.switch {
        return Ok(());
    }
    for ancestor in data.ancestors().skip(1) {
        let Ok(metadata) = fs::metadata(ancestor) else { continue };
        let mode = metadata.mode();
        let allowed = if metadata.uid() == account.uid {
            mode & 0o100
        } else if metadata.gid() == account.gid {
            mode & 0o010
        } else {
            mode & 0o001
        };
        if allowed == 0 {
            return Err(PostgresError::Unreachable { user: account.name.clone(), path: ancestor.to_owned() });
        }
    }
    Ok(())
}
