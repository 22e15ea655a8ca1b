//! The server's process: spawned or adopted, watched through a pidfd, and told from every other process.

use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::process::Child;

use super::account::Account;
use super::binaries::Binaries;
use super::{PostgresConfig, PostgresError};

/// Between the start of a process and the second that it writes into the pid file: exec, configuration, and the
/// rounding of both.
const START_TOLERANCE_SECS: u64 = 10;

/// Takes the supervisor's lock, which ends with the process.
pub(super) fn lock(path: &Path) -> Result<File, PostgresError> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).map_err(|error| PostgresError::file("create", parent, error))?;
    }
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(path)
        .map_err(|error| PostgresError::file("open", path, error))?;
    match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(PostgresError::Locked { path: path.to_owned() }),
        Err(errno) => Err(PostgresError::file("lock", path, errno.into())),
    }
}

/// What `postmaster.pid` says (format: `miscadmin.h` of PostgreSQL 15, `LOCK_FILE_LINE_*`).
#[derive(Debug, Clone)]
pub(super) struct PidFile {
    pub(super) pid: u32,
    /// When the server began, in seconds since the epoch.
    pub(super) started_secs: u64,
    pub(super) socket_directory: Option<PathBuf>,
    pub(super) ready: bool,
}

impl PidFile {
    pub(super) fn read(data_dir: &Path) -> Option<Self> {
        let text = fs::read_to_string(data_dir.join("postmaster.pid")).ok()?;
        let lines: Vec<&str> = text.lines().map(str::trim).collect();
        Some(Self {
            pid: lines.first()?.parse().ok()?,
            started_secs: lines.get(2).and_then(|line| line.parse().ok()).unwrap_or(0),
            socket_directory: lines.get(4).filter(|line| !line.is_empty()).map(PathBuf::from),
            ready: lines.get(7).is_some_and(|line| *line == "ready"),
        })
    }
}

/// What tells one process from every other, earlier or later: recorded when the server is spawned.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ServerIdentity {
    pid: u32,
    /// Of this boot of the machine.
    boot_id: String,
    /// Start time in clock ticks since boot: field 22 of `/proc/<pid>/stat` (proc(5)).
    start_ticks: u64,
}

impl ServerIdentity {
    /// Returns the identity of a living process.
    pub(super) fn of(pid: u32) -> Result<Self, PostgresError> {
        let path = PathBuf::from(format!("/proc/{pid}/stat"));
        let start_ticks = start_ticks(pid).ok_or_else(|| {
            PostgresError::file("read", &path, std::io::Error::from(std::io::ErrorKind::NotFound))
        })?;
        let boot_path = Path::new("/proc/sys/kernel/random/boot_id");
        let boot_id =
            fs::read_to_string(boot_path).map_err(|error| PostgresError::file("read", boot_path, error))?;
        Ok(Self { pid, boot_id: boot_id.trim().to_owned(), start_ticks })
    }

    pub(super) fn read(path: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(path).ok()?).ok()
    }

    pub(super) fn write(&self, path: &Path) -> Result<(), PostgresError> {
        let text = serde_json::to_vec(self).expect("an identity has only strings and numbers");
        let new = path.with_extension("json.new");
        fs::write(&new, text).map_err(|error| PostgresError::file("write", &new, error))?;
        fs::rename(&new, path).map_err(|error| PostgresError::file("replace", path, error))
    }
}

fn stat_fields(pid: u32) -> Option<Vec<String>> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the name in parentheses and may hold anything, parentheses and spaces too.
    let (_, rest) = text.rsplit_once(')')?;
    Some(rest.split_whitespace().map(str::to_owned).collect())
}

fn start_ticks(pid: u32) -> Option<u64> {
    // The rest begins with field 3.
    stat_fields(pid)?.get(22 - 3)?.parse().ok()
}

/// Returns whether a process with this pid runs; one that ended and was not waited for does not.
pub(super) fn is_alive(pid: u32) -> bool {
    stat_fields(pid).is_some_and(|fields| fields.first().is_some_and(|state| state != "Z" && state != "X"))
}

/// Returns when a process started, in seconds since the epoch.
fn started_secs(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string("/proc/stat").ok()?;
    let boot: u64 = stat.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()?;
    Some(boot + start_ticks(pid)? / rustix::param::clock_ticks_per_second())
}

/// Removes the lock files of a server that is not there.
pub(super) fn remove_stale_lock_files(
    config: &PostgresConfig,
    socket_name: &str,
) -> Result<(), PostgresError> {
    for path in [config.data_dir.join("postmaster.pid"), config.run_dir.join(format!("{socket_name}.lock"))] {
        match fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(PostgresError::file("remove", &path, error));
            }
            _ => {}
        }
    }
    Ok(())
}

/// A running server.
#[derive(Debug)]
pub(super) struct Server {
    pid: u32,
    pidfd: OwnedFd,
    /// When it is our child it must be waited for, or it stays as a zombie.
    child: Option<Child>,
}

/// Waits for the end of a process without owning it.
#[derive(Debug)]
pub(super) struct Ender {
    pidfd: AsyncFd<OwnedFd>,
}

impl Ender {
    /// Returns when the process has ended. Cancel safe.
    pub(super) async fn ended(&mut self) {
        // A pidfd is readable once its process is dead (pidfd_open(2)). An error of the reactor ends the wait too:
        // the caller looks at the process next.
        let _ = self.pidfd.ready(Interest::READABLE).await;
    }
}

fn open_pidfd(pid: u32) -> Option<OwnedFd> {
    let pid = Pid::from_raw(i32::try_from(pid).ok()?)?;
    pidfd_open(pid, PidfdFlags::empty()).ok()
}

impl Server {
    /// Spawns the server in a process group of its own, so that Ctrl-C in our terminal is ours to handle.
    pub(super) fn spawn(
        config: &PostgresConfig,
        binaries: &Binaries,
        account: &Account,
    ) -> Result<Self, PostgresError> {
        let log_path = config.beside(".startup.log");
        let log = File::create(&log_path).map_err(|error| PostgresError::file("create", &log_path, error))?;
        let errors = log.try_clone().map_err(|error| PostgresError::file("share", &log_path, error))?;
        let fail =
            |error: std::io::Error| PostgresError::Program { program: "postgres", output: error.to_string() };
        let child = account
            .command(&binaries.program("postgres"))
            .arg("-D")
            .arg(&config.data_dir)
            .stdout(log)
            .stderr(errors)
            .process_group(0)
            .spawn()
            .map_err(fail)?;
        // The child is not waited for yet, so that its pid cannot belong to anybody else.
        let pid = child.id().ok_or_else(|| fail(std::io::Error::from(std::io::ErrorKind::NotFound)))?;
        let pidfd = open_pidfd(pid).ok_or_else(|| fail(std::io::Error::last_os_error()))?;
        Ok(Self { pid, pidfd, child: Some(child) })
    }

    /// Finds the server that the pid file names, when it is one of ours; `None` for every other process.
    pub(super) fn find(
        pid_file: &PidFile,
        recorded: Option<&ServerIdentity>,
        data_dir: &Path,
    ) -> Option<Self> {
        // The descriptor first: whatever is checked afterwards is true of the process that it holds, or that process
        // is dead and signals to it go nowhere.
        let pidfd = open_pidfd(pid_file.pid)?;
        if !is_alive(pid_file.pid) {
            return None;
        }
        let same_start = match recorded {
            Some(recorded) if recorded.pid == pid_file.pid => {
                ServerIdentity::of(pid_file.pid).is_ok_and(|found| found == *recorded)
            }
            // Killed between the spawn and the record: the second that the server wrote itself.
            _ => started_secs(pid_file.pid)
                .is_some_and(|started| started.abs_diff(pid_file.started_secs) <= START_TOLERANCE_SECS),
        };
        let proc = PathBuf::from(format!("/proc/{}", pid_file.pid));
        let runs_postgres = fs::read_link(proc.join("exe")).is_ok_and(|exe| {
            // An upgrade of the package leaves ` (deleted)` behind.
            let name = exe.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            name.strip_suffix(" (deleted)").unwrap_or(name) == "postgres"
        });
        let in_cluster = match (fs::read_link(proc.join("cwd")), fs::canonicalize(data_dir)) {
            (Ok(cwd), Ok(data)) => cwd == data,
            _ => false,
        };
        (same_start && runs_postgres && in_cluster).then_some(Self { pid: pid_file.pid, pidfd, child: None })
    }

    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    /// Returns a watch on the process.
    pub(super) fn watch(&self) -> Result<Ender, PostgresError> {
        #[expect(
            deprecated,
            reason = "an OwnedFd is one descriptor for life, all that the `unsafe` successor asks for"
        )]
        let watched =
            self.pidfd.try_clone().and_then(|pidfd| AsyncFd::with_interest(pidfd, Interest::READABLE));
        let pidfd = watched.map_err(|error| PostgresError::file("watch", Path::new("pidfd"), error))?;
        Ok(Ender { pidfd })
    }

    /// Waits for the end, and says how it ended when that can be known. Cancel safe.
    pub(super) async fn ended(&mut self) -> String {
        if let Ok(mut ender) = self.watch() {
            ender.ended().await;
        }
        let Some(child) = &mut self.child else { return "unknown: it was not our child".to_owned() };
        match child.wait().await {
            Ok(status) => match (status.code(), status.signal()) {
                (Some(code), _) => format!("exit code {code}"),
                (None, Some(signal)) => format!("signal {signal}"),
                (None, None) => "unknown".to_owned(),
            },
            Err(error) => format!("unknown: {error}"),
        }
    }

    /// Shuts the server down: fast (SIGINT: transactions are rolled back), and after `timeout` immediately (SIGQUIT:
    /// the next start recovers).
    pub(super) async fn stop(&mut self, timeout: Duration) -> Result<(), PostgresError> {
        for signal in [Signal::INT, Signal::QUIT] {
            if pidfd_send_signal(&self.pidfd, signal).is_err() {
                // It is dead: nothing to stop, but a child is still to be waited for.
                self.ended().await;
                return Ok(());
            }
            if tokio::time::timeout(timeout, self.ended()).await.is_ok() {
                return Ok(());
            }
        }
        Err(PostgresError::Stop { pid: self.pid })
    }
}
