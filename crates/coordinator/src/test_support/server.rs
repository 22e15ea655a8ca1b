//! The server that all test processes share.

use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::{FlockOperation, flock};
use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions as _, Connection as _};
use tokio::sync::OnceCell;

use crate::db::{Store, StoreConfig};
use crate::postgres::{PostgresConfig, PostgresError, PrivatePostgres};

/// The database that the others are copied from.
const TEMPLATE: &str = "cloister_test_template";
/// The account of Debian's package: tests make no accounts.
const SERVER_USER: &str = "postgres";

/// The running server.
pub(super) struct SharedServer {
    options: PgConnectOptions,
    /// Says that this process uses the server, until it ends.
    _user: File,
}

/// Returns the server, started by whoever comes first; `None` after a `SKIP:` line.
pub(super) async fn shared() -> Option<&'static SharedServer> {
    static SERVER: OnceCell<Option<SharedServer>> = OnceCell::const_new();
    SERVER.get_or_init(SharedServer::start).await.as_ref()
}

/// Returns settings of a throw-away cluster for tests.
pub(crate) fn test_config(directory: &Path) -> PostgresConfig {
    PostgresConfig {
        system_user: SERVER_USER.to_owned(),
        fast_and_unsafe: true,
        ..PostgresConfig::new(directory.join("data"), directory.join("run"))
    }
}

fn open_lock(path: &Path) -> File {
    File::options().create(true).truncate(false).write(true).open(path).expect("open a lock file")
}

impl SharedServer {
    async fn start() -> Option<Self> {
        let directory = PathBuf::from(format!("/tmp/cloister-tests-{}", rustix::process::getuid().as_raw()));
        fs::create_dir_all(&directory).expect("create the directory of the test server");
        let metadata = fs::symlink_metadata(&directory).expect("look at the directory of the test server");
        let own = rustix::process::getuid().as_raw();
        assert!(metadata.is_dir() && metadata.uid() == own, "{} is somebody else's", directory.display());
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o711)).expect("open the directory");
        let (starting, user) =
            (open_lock(&directory.join("starting.lock")), open_lock(&directory.join("users.lock")));
        let locked = tokio::task::spawn_blocking(move || {
            // In this order: the watchdog holds `users.lock` while the server of an earlier run shuts down.
            flock(&starting, FlockOperation::LockExclusive)?;
            flock(&user, FlockOperation::LockShared)?;
            Ok::<_, rustix::io::Errno>((starting, user))
        });
        let (starting, user) =
            locked.await.expect("lock files are not cancelled").expect("lock the test server");
        let server = match PrivatePostgres::start(test_config(&directory)).await {
            Ok(server) => server,
            Err(PostgresError::NotInstalled { .. }) => {
                #[expect(clippy::print_stdout, reason = "a skipped test says so where people look")]
                {
                    println!("SKIP: PostgreSQL is not installed");
                }
                return None;
            }
            Err(error) => panic!("cannot start the test server: {error}"),
        };
        let shared = Self { options: server.connect_options(), _user: user };
        if !server.adopted() {
            shared.watch(&directory, server.pid());
            shared.remove_old_databases().await;
            shared.create_template().await;
        }
        // First the supervisor's own lock, or the next process finds the data directory taken.
        drop(server);
        drop(starting);
        Some(shared)
    }

    pub(super) fn options(&self, database: &str) -> PgConnectOptions {
        self.options.clone().database(database)
    }

    pub(super) async fn create_database(&self, name: &str) {
        // Names are made here; the strategy copies files, which without fsync is the fast one.
        self.execute(&format!("CREATE DATABASE {name} TEMPLATE {TEMPLATE} STRATEGY file_copy")).await;
    }

    /// Stops the server and removes its files once no test process is left, however the last one ended.
    #[expect(clippy::zombie_processes, reason = "it outlives this process by design")]
    fn watch(&self, directory: &Path, pid: u32) {
        // The server removes its pid file last. The bound is for one that was killed and could not.
        let script = r#"[ "$(head -n 1 "$2/data/postmaster.pid")" = "$1" ] && kill -INT "$1"; i=0; while [ -e "$2/data/postmaster.pid" ] && [ $i -lt 200 ]; do
            sleep 0.05; i=$((i + 1)); done; rm -rf "$2/data" "$2/run""#;
        let watchdog = Command::new("flock")
            .arg("--exclusive")
            .arg(directory.join("users.lock"))
            .args(["sh", "-c", script, "watchdog", &pid.to_string()])
            .arg(directory)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn();
        watchdog.expect("start the watchdog of the test server");
    }

    async fn remove_old_databases(&self) {
        let mut connection = self.options.connect().await.expect("connect to the test server");
        let names: Vec<String> = sqlx::query_scalar(
            "SELECT datname FROM pg_database WHERE datname LIKE 'test\\_%' OR datname = $1",
        )
        .bind(TEMPLATE)
        .fetch_all(&mut connection)
        .await
        .expect("list databases");
        connection.close().await.expect("disconnect");
        for name in names {
            self.execute(&format!("DROP DATABASE {name} WITH (FORCE)")).await;
        }
    }

    async fn create_template(&self) {
        self.execute(&format!("CREATE DATABASE {TEMPLATE}")).await;
        let config = StoreConfig { max_connections: 2, ..StoreConfig::default() };
        let store = Store::connect(self.options(TEMPLATE), config).await.expect("migrate the template");
        store.close().await;
    }

    async fn execute(&self, statement: &str) {
        let mut connection = self.options.connect().await.expect("connect to the test server");
        // Statements about databases take no parameters, and their names are made in this file.
        sqlx::query(sqlx::AssertSqlSafe(statement)).execute(&mut connection).await.expect("execute");
        connection.close().await.expect("disconnect");
    }
}
