//! The private PostgreSQL of one machine: found, initialised, supervised, and found again after a crash.
//!
//! ```text
//!  start ──► lock ──► binaries, account, cluster ──► a server of ours runs already? ──yes──► adopt
//!                                                             │ no                             │
//!                                                             └──► spawn ──► ready ◄───────────┘
//!  supervise: ended ──► spawn again, later each time      cancelled ──► fast shutdown, wait
//! ```
//!
//! The server listens on a unix socket only; there is no port and no password. Who connects is proven by the kernel
//! (`peer`): the server's account, the supervisor's, and when that is root the account `cloister`, whose group alone
//! gets through the socket's directory.
//!
//! **When the supervisor is killed** the server lives on, on purpose (no `PR_SET_PDEATHSIG`): the next supervisor
//! adopts it, so that a crash of the coordinator costs no recovery. What is adopted is proven: the process of the pid
//! file has the start time that was recorded when it was spawned, runs `postgres`, has the cluster as its working
//! directory, and answers with the cluster's system identifier. A process that merely has the pid is never touched.
//! The server ends with a clean shutdown of its supervisor, or with the machine.
//!
//! Files: `<data_dir>` is the cluster; beside it stand `<data_dir>.lock` (held by the living supervisor) and
//! `<data_dir>.server.json` (who was spawned). `<data_dir>.new` is an initialisation that did not finish; it is
//! thrown away.

mod account;
mod binaries;
mod cluster;
mod error;
mod process;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions as _, Connection as _};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use self::account::Account;
use self::binaries::Binaries;
pub use self::error::PostgresError;
use self::process::{PidFile, Server, ServerIdentity};

/// Longest path of a unix socket (`sun_path` of unix(7), without the final NUL).
const SOCKET_PATH_MAX: usize = 107;
/// Name of the socket in its directory.
const SOCKET_NAME: &str = ".s.PGSQL.5432";
/// The role that owns the database; it is no superuser.
const ROLE: &str = "cloister";
/// The role of initialisation and of the questions to the server about itself.
const ADMIN_ROLE: &str = "postgres";
/// How long a server may take until it accepts connections: crash recovery after a long run is the slow case.
const READY_TIMEOUT: Duration = Duration::from_secs(120);
/// How long a fast shutdown may take before it becomes an immediate one.
const STOP_TIMEOUT: Duration = Duration::from_secs(30);
/// Pause before the first restart; doubled each time.
const RESTART_DELAY: Duration = Duration::from_millis(100);
/// Longest pause before a restart.
const RESTART_DELAY_MAX: Duration = Duration::from_secs(10);
/// Period of looks at files that others write.
const LOOK_PERIOD: Duration = Duration::from_millis(5);

/// Where the cluster lives and who runs it.
#[derive(Debug, Clone)]
pub struct PostgresConfig {
    /// The cluster's directory; made when missing. Its parent must exist, and the account must be able to reach it.
    pub data_dir: PathBuf,
    /// Directory of the socket and of nothing else; made when missing. The socket's path must fit in 107 bytes.
    pub run_dir: PathBuf,
    /// The account that runs the server when we are root; created when missing. Ignored when we are not root.
    pub system_user: String,
    /// `fsync=off`, for tests only: a crash of the machine loses the cluster.
    pub fast_and_unsafe: bool,
}

impl PostgresConfig {
    /// Returns the settings of a cluster that keeps what it acknowledged.
    pub fn new(data_dir: impl Into<PathBuf>, run_dir: impl Into<PathBuf>) -> Self {
        Self {
            data_dir: data_dir.into(),
            run_dir: run_dir.into(),
            system_user: "cloister-postgres".to_owned(),
            fast_and_unsafe: false,
        }
    }

    fn beside(&self, suffix: &str) -> PathBuf {
        let mut path = self.data_dir.clone().into_os_string();
        path.push(suffix);
        PathBuf::from(path)
    }

    fn options(&self, role: &str, database: &str) -> PgConnectOptions {
        PgConnectOptions::new_without_pgpass()
            .socket(&self.run_dir)
            .port(5432)
            .username(role)
            .database(database)
    }
}

/// The supervised server.
#[derive(Debug)]
pub struct PrivatePostgres {
    config: PostgresConfig,
    binaries: Binaries,
    account: Account,
    server: Server,
    started: Instant,
    adopted: bool,
    restarts: watch::Sender<u32>,
    /// Held until the end: two supervisors of one cluster would restart each other's server.
    _lock: File,
}

impl PrivatePostgres {
    /// Starts the server or adopts the one of a killed predecessor, and returns when it accepts connections.
    ///
    /// # Errors
    ///
    /// See [`PostgresError`]; each says what to do.
    pub async fn start(config: PostgresConfig) -> Result<Self, PostgresError> {
        let socket = config.run_dir.join(SOCKET_NAME);
        if socket.as_os_str().len() > SOCKET_PATH_MAX {
            return Err(PostgresError::SocketPath { path: socket, most: SOCKET_PATH_MAX });
        }
        let config = PostgresConfig {
            data_dir: absolute(&config.data_dir)?,
            run_dir: absolute(&config.run_dir)?,
            ..config
        };
        let lock = process::lock(&config.beside(".lock"))?;
        cluster::ensure_room(&config.data_dir)?;
        let account = Account::ensure(&config.system_user).await?;
        let binaries = Binaries::for_cluster(&config.data_dir).await?;
        cluster::ensure_socket_directory(&config, &account)?;
        cluster::ensure_initialized(&config, &binaries, &account).await?;
        cluster::write_settings(&config, &account)?;
        let (server, adopted) = match adopt(&config, &binaries).await? {
            Some(server) => (server, true),
            None => (start_server(&config, &binaries, &account).await?, false),
        };
        ensure_database(&config).await?;
        tracing::info!(pid = server.pid(), adopted, version = binaries.major, "private PostgreSQL is ready");
        let restarts = watch::Sender::new(0);
        Ok(Self {
            config,
            binaries,
            account,
            server,
            started: Instant::now(),
            adopted,
            restarts,
            _lock: lock,
        })
    }

    /// Returns how to connect: as a role that owns the database `cloister` and is no superuser.
    pub fn connect_options(&self) -> PgConnectOptions {
        self.config.options(ROLE, ROLE)
    }

    /// Returns the server's process id.
    pub fn pid(&self) -> u32 {
        self.server.pid()
    }

    /// Returns whether the server was running already.
    pub fn adopted(&self) -> bool {
        self.adopted
    }

    /// Returns how often the server was started again, from now on.
    pub fn restarts(&self) -> watch::Receiver<u32> {
        self.restarts.subscribe()
    }

    /// Watches the server and starts it again when it ends, until `cancel`; then shuts it down cleanly (fast mode).
    /// Give it to the task registry. Dropped before its end, it leaves the server running, to be adopted.
    ///
    /// # Errors
    ///
    /// [`PostgresError::Stop`] when the shutdown failed. A server that cannot be started again is tried for ever.
    pub async fn supervise(mut self, cancel: CancellationToken) -> Result<(), PostgresError> {
        let mut delay = RESTART_DELAY;
        loop {
            tokio::select! {
                () = cancel.cancelled() => {
                    self.server.stop(STOP_TIMEOUT).await?;
                    let _ = std::fs::remove_file(self.config.beside(".server.json"));
                    tracing::info!("private PostgreSQL is stopped");
                    return Ok(());
                }
                status = self.server.ended() => {
                    tracing::warn!(pid = self.server.pid(), status, "private PostgreSQL ended; starting it again");
                }
            }
            // `delay` is twice the pause before this start: one that ran longer than it was waited for was well.
            if self.started.elapsed() > delay / 2 {
                delay = RESTART_DELAY;
            }
            loop {
                tokio::select! {
                    () = cancel.cancelled() => return Ok(()),
                    () = tokio::time::sleep(delay) => {}
                }
                delay = (delay * 2).min(RESTART_DELAY_MAX);
                // Not raced against `cancel`: a server that is half started would be left behind. It is bounded.
                match start_server(&self.config, &self.binaries, &self.account).await {
                    Ok(server) => {
                        tracing::info!(pid = server.pid(), "private PostgreSQL is ready again");
                        self.server = server;
                        self.started = Instant::now();
                        self.restarts.send_modify(|restarts| *restarts += 1);
                        break;
                    }
                    Err(error) => {
                        tracing::error!(error = %error, "cannot start private PostgreSQL; trying again")
                    }
                }
            }
        }
    }
}

fn absolute(path: &Path) -> Result<PathBuf, PostgresError> {
    std::path::absolute(path).map_err(|source| PostgresError::file("find", path, source))
}

/// Finds a server that a killed supervisor left running. One that listens elsewhere than we want is shut down.
async fn adopt(config: &PostgresConfig, binaries: &Binaries) -> Result<Option<Server>, PostgresError> {
    let Some(pid_file) = PidFile::read(&config.data_dir) else { return Ok(None) };
    let recorded = ServerIdentity::read(&config.beside(".server.json"));
    let Some(mut server) = Server::find(&pid_file, recorded.as_ref(), &config.data_dir) else {
        // Not ours, whoever it is: PostgreSQL itself tells a dead pid from a living one, but takes a living process
        // of its own account for a server. It still refuses while any backend holds the cluster's shared memory.
        if process::is_alive(pid_file.pid) {
            tracing::warn!(pid = pid_file.pid, "the pid file names a foreign process; removing the file");
            process::remove_stale_lock_files(config, SOCKET_NAME)?;
        }
        return Ok(None);
    };
    if pid_file.socket_directory.as_deref() != Some(config.run_dir.as_path()) {
        tracing::info!(
            pid = server.pid(),
            "the server of an earlier run has its socket elsewhere; restarting it"
        );
        server.stop(STOP_TIMEOUT).await?;
        return Ok(None);
    }
    wait_ready(config, &mut server).await?;
    let expected = binaries.system_identifier(&config.data_dir).await?;
    let found = system_identifier(config).await?;
    if found != expected {
        return Err(PostgresError::OtherCluster { expected, found, path: config.run_dir.clone() });
    }
    Ok(Some(server))
}

/// Spawns a server and waits until it accepts connections. One that ends at once is tried again for a while: backends
/// of a killed predecessor may still finish their queries, and hold the shared memory until then.
async fn start_server(
    config: &PostgresConfig,
    binaries: &Binaries,
    account: &Account,
) -> Result<Server, PostgresError> {
    let deadline = Instant::now() + READY_TIMEOUT;
    let mut delay = RESTART_DELAY;
    loop {
        let mut server = Server::spawn(config, binaries, account)?;
        ServerIdentity::of(server.pid())?.write(&config.beside(".server.json"))?;
        match wait_ready(config, &mut server).await {
            Ok(()) => return Ok(server),
            Err(PostgresError::NotReady { log }) => {
                let is_waiting_for_backends = log.contains("pre-existing shared memory block");
                if !is_waiting_for_backends || Instant::now() > deadline {
                    return Err(PostgresError::NotReady { log });
                }
                tracing::info!("backends of the killed server still run; waiting for them");
                tokio::time::sleep(delay).await;
                delay = (delay * 2).min(RESTART_DELAY_MAX);
            }
            Err(error) => return Err(error),
        }
    }
}

/// Waits for line 8 of the pid file: asking by connecting would fill the log with refused connections.
async fn wait_ready(config: &PostgresConfig, server: &mut Server) -> Result<(), PostgresError> {
    let ready = async {
        loop {
            let pid_file = PidFile::read(&config.data_dir);
            if pid_file.is_some_and(|file| file.pid == server.pid() && file.ready) {
                return;
            }
            tokio::time::sleep(LOOK_PERIOD).await;
        }
    };
    let mut ender = server.watch()?;
    tokio::select! {
        () = ready => Ok(()),
        () = ender.ended() => Err(PostgresError::NotReady { log: cluster::startup_log(config) }),
        () = tokio::time::sleep(READY_TIMEOUT) => {
            Err(PostgresError::Slow { seconds: READY_TIMEOUT.as_secs(), log: cluster::startup_log(config) })
        }
    }
}

async fn system_identifier(config: &PostgresConfig) -> Result<String, PostgresError> {
    let connect = async {
        let mut connection = config.options(ADMIN_ROLE, "postgres").connect().await?;
        let identifier: String =
            sqlx::query_scalar("SELECT system_identifier::text FROM pg_control_system()")
                .fetch_one(&mut connection)
                .await?;
        connection.close().await?;
        Ok(identifier)
    };
    connect.await.map_err(PostgresError::Ask)
}

/// Ensures the role and its database; each step may have been done before a crash.
async fn ensure_database(config: &PostgresConfig) -> Result<(), PostgresError> {
    let ensure = async {
        let mut connection = config.options(ADMIN_ROLE, "postgres").connect().await?;
        let role: Option<i32> = sqlx::query_scalar("SELECT 1 FROM pg_roles WHERE rolname = 'cloister'")
            .fetch_optional(&mut connection)
            .await?;
        if role.is_none() {
            sqlx::query("CREATE ROLE cloister LOGIN CREATEDB").execute(&mut connection).await?;
        }
        let database: Option<i32> =
            sqlx::query_scalar("SELECT 1 FROM pg_database WHERE datname = 'cloister'")
                .fetch_optional(&mut connection)
                .await?;
        if database.is_none() {
            sqlx::query("CREATE DATABASE cloister OWNER cloister").execute(&mut connection).await?;
        }
        connection.close().await
    };
    ensure.await.map_err(PostgresError::Ask)
}

#[cfg(test)]
mod tests;
