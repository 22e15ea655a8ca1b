//! Proves: the private server comes back after a crash of its own, survives one of its supervisor and is adopted,
//! and no process is touched for its pid alone.

use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use super::*;
use crate::test_support::server::test_config;

const DEADLINE: Duration = Duration::from_secs(60);

struct Place {
    directory: TempDir,
}

impl Place {
    fn new() -> Self {
        let directory = tempfile::Builder::new().prefix("cl-pg-").tempdir_in("/tmp").unwrap();
        std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o711)).unwrap();
        Self { directory }
    }

    fn config(&self) -> PostgresConfig {
        test_config(self.directory.path())
    }

    async fn start(&self) -> Option<PrivatePostgres> {
        match PrivatePostgres::start(self.config()).await {
            Err(PostgresError::NotInstalled { .. }) => {
                println!("SKIP: PostgreSQL is not installed");
                None
            }
            other => Some(other.expect("start the server")),
        }
    }
}

async fn stop(postgres: PrivatePostgres) {
    let cancel = CancellationToken::new();
    cancel.cancel();
    postgres.supervise(cancel).await.expect("stop the server");
}

fn signal(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(i32::try_from(pid).unwrap()).unwrap(), signal).unwrap();
}

async fn query(options: &PgConnectOptions) -> Result<String, sqlx::Error> {
    let mut connection = options.connect().await?;
    let value = sqlx::query_scalar(
        "SELECT current_database() || ' ' || current_user || ' ' || \
        (SELECT rolsuper FROM pg_roles WHERE rolname = current_user)",
    )
    .fetch_one(&mut connection)
    .await;
    connection.close().await?;
    value
}

async fn until<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(value) = look().await {
            return value;
        }
        assert!(started.elapsed() < DEADLINE, "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn a_new_cluster_serves_one_database_to_a_role_without_superuser_and_stops_cleanly() {
    let place = Place::new();
    let Some(postgres) = place.start().await else { return };
    let (pid, options) = (postgres.pid(), postgres.connect_options());
    assert!(!postgres.adopted());
    assert_eq!(query(&options).await.unwrap(), "cloister cloister false");
    let error = PrivatePostgres::start(place.config()).await.expect_err("a second supervisor");
    assert!(matches!(error, PostgresError::Locked { .. }), "{error}");
    stop(postgres).await;
    assert!(!process::is_alive(pid));
    assert!(!place.config().data_dir.join("postmaster.pid").exists());
    // What was there is found again.
    let postgres = place.start().await.unwrap();
    assert!(!postgres.adopted());
    assert_eq!(query(&options).await.unwrap(), "cloister cloister false");
    stop(postgres).await;
}

#[tokio::test]
async fn a_killed_server_is_started_again() {
    let place = Place::new();
    let Some(postgres) = place.start().await else { return };
    let (pid, options) = (postgres.pid(), postgres.connect_options());
    let cancel = CancellationToken::new();
    let watch = async {
        signal(pid, Signal::KILL);
        let file = until("another server is ready", async || {
            PidFile::read(&place.config().data_dir).filter(|file| file.pid != pid && file.ready)
        })
        .await;
        assert_eq!(query(&options).await.unwrap(), "cloister cloister false");
        cancel.cancel();
        file.pid
    };
    let (supervised, second) = tokio::join!(postgres.supervise(cancel.clone()), watch);
    supervised.unwrap();
    assert!(!process::is_alive(pid) && !process::is_alive(second));
}

/// Not a test of its own: the body of the supervisor that `a_killed_supervisors_server_is_adopted` kills.
#[tokio::test]
async fn supervisor_process() {
    let Some(directory) = std::env::var_os("CLOISTER_TEST_SUPERVISOR_DIR") else { return };
    let postgres = PrivatePostgres::start(test_config(Path::new(&directory))).await.unwrap();
    std::fs::write(Path::new(&directory).join("started"), postgres.pid().to_string()).unwrap();
    postgres.supervise(CancellationToken::new()).await.unwrap();
}

#[tokio::test]
async fn a_killed_supervisors_server_is_adopted() {
    let place = Place::new();
    // Initialised here, so that the other process has nothing slow to do.
    let Some(postgres) = place.start().await else { return };
    stop(postgres).await;
    let mut supervisor = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "postgres::tests::supervisor_process"])
        .env("CLOISTER_TEST_SUPERVISOR_DIR", place.directory.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let started = place.directory.path().join("started");
    let pid: u32 = until("the other supervisor has started", async || {
        std::fs::read_to_string(&started).ok().and_then(|text| text.parse().ok())
    })
    .await;
    let held = PrivatePostgres::start(place.config()).await.expect_err("the cluster is supervised");
    assert!(matches!(held, PostgresError::Locked { .. }), "{held}");
    supervisor.kill().unwrap();
    supervisor.wait().unwrap();
    assert!(process::is_alive(pid), "the server ended with its supervisor");
    let postgres = place.start().await.unwrap();
    assert!(postgres.adopted());
    assert_eq!(postgres.pid(), pid);
    assert_eq!(query(&postgres.connect_options()).await.unwrap(), "cloister cloister false");
    // An adopted server is watched and replaced like a child.
    let cancel = CancellationToken::new();
    let watch = async {
        signal(pid, Signal::KILL);
        until("another server is ready", async || {
            PidFile::read(&place.config().data_dir).filter(|file| file.pid != pid && file.ready)
        })
        .await;
        cancel.cancel();
    };
    let (supervised, ()) = tokio::join!(postgres.supervise(cancel.clone()), watch);
    supervised.unwrap();
}

#[tokio::test]
async fn a_foreign_process_with_the_recorded_pid_is_not_touched() {
    let place = Place::new();
    let Some(postgres) = place.start().await else { return };
    let (pid, account) = (postgres.pid(), postgres.account.clone());
    let pid_file = std::fs::read_to_string(place.config().data_dir.join("postmaster.pid")).unwrap();
    // A crash: neither server nor supervisor could tidy up.
    signal(pid, Signal::KILL);
    until("the server is dead", async || (!process::is_alive(pid)).then_some(())).await;
    drop(postgres);
    // Its pid was given to somebody else, of the server's own account and in its directory: the worst case.
    let mut foreign = Command::new("sleep");
    foreign.arg("600").current_dir(&place.config().data_dir);
    if account.switch {
        foreign.uid(account.uid).gid(account.gid);
    }
    let mut foreign = foreign.spawn().unwrap();
    let stolen = pid_file.replacen(&pid.to_string(), &foreign.id().to_string(), 1);
    std::fs::write(place.config().data_dir.join("postmaster.pid"), stolen).unwrap();
    let record = ServerIdentity::of(foreign.id()).unwrap();
    record.write(&place.config().beside(".server.json")).unwrap();

    let postgres = place.start().await.unwrap();
    assert!(!postgres.adopted());
    assert_ne!(postgres.pid(), foreign.id());
    assert_eq!(query(&postgres.connect_options()).await.unwrap(), "cloister cloister false");
    stop(postgres).await;
    assert!(foreign.try_wait().unwrap().is_none(), "the foreign process was ended");
    foreign.kill().unwrap();
    foreign.wait().unwrap();
}

#[tokio::test]
async fn a_server_with_another_start_time_is_not_adopted() {
    let place = Place::new();
    let Some(postgres) = place.start().await else { return };
    let data_dir = place.config().data_dir;
    let pid_file = PidFile::read(&data_dir).unwrap();
    let identity = ServerIdentity::of(postgres.pid()).unwrap();
    assert!(Server::find(&pid_file, Some(&identity), &data_dir).is_some());
    assert!(Server::find(&pid_file, None, &data_dir).is_some(), "the pid file's own second is enough");
    let mut other = serde_json::to_value(&identity).unwrap();
    other["start_ticks"] = 1.into();
    let other = serde_json::from_value(other).unwrap();
    assert!(Server::find(&pid_file, Some(&other), &data_dir).is_none());
    let later = PidFile { started_secs: pid_file.started_secs + 3600, ..pid_file.clone() };
    assert!(Server::find(&later, None, &data_dir).is_none());
    assert!(Server::find(&pid_file, Some(&identity), place.directory.path()).is_none(), "another cluster");
    stop(postgres).await;
}

#[tokio::test]
async fn an_interrupted_initialisation_is_thrown_away_and_a_foreign_directory_is_left_alone() {
    let place = Place::new();
    let config = place.config();
    std::fs::create_dir_all(config.beside(".new").join("base")).unwrap();
    let Some(postgres) = place.start().await else { return };
    assert!(!config.beside(".new").exists());
    stop(postgres).await;

    let foreign = Place::new();
    std::fs::create_dir_all(foreign.config().data_dir.join("photos")).unwrap();
    let error = PrivatePostgres::start(foreign.config()).await.expect_err("not a cluster");
    assert!(matches!(error, PostgresError::NotACluster { .. }), "{error}");
    assert!(foreign.config().data_dir.join("photos").exists());
}

#[tokio::test]
async fn a_newer_cluster_and_a_long_socket_path_are_refused_with_what_to_do() {
    let place = Place::new();
    std::fs::create_dir_all(&place.config().data_dir).unwrap();
    std::fs::write(place.config().data_dir.join("PG_VERSION"), "99\n").unwrap();
    let error = PrivatePostgres::start(place.config()).await.expect_err("a newer cluster");
    if !matches!(error, PostgresError::NotInstalled { .. }) {
        assert!(error.to_string().contains("install `postgresql-99`"), "{error}");
    }
    let config = PostgresConfig { run_dir: place.directory.path().join("r".repeat(100)), ..place.config() };
    let error = PrivatePostgres::start(config).await.expect_err("a path that the kernel does not take");
    assert!(matches!(error, PostgresError::SocketPath { .. }), "{error}");
}

#[tokio::test]
async fn a_directory_that_the_account_cannot_enter_is_named() {
    let place = Place::new();
    if !nix::unistd::Uid::effective().is_root() {
        println!("SKIP: only root gives the server to another account");
        return;
    }
    std::fs::set_permissions(place.directory.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
    match PrivatePostgres::start(place.config()).await {
        Err(PostgresError::Unreachable { path, .. }) => assert_eq!(path, place.directory.path()),
        Err(PostgresError::NotInstalled { .. }) => println!("SKIP: PostgreSQL is not installed"),
        other => panic!("it was not refused: {other:?}"),
    }
}

#[tokio::test]
async fn the_coordinators_account_may_connect_and_no_other() {
    let place = Place::new();
    if !nix::unistd::Uid::effective().is_root() {
        println!("SKIP: only root can become other accounts");
        return;
    }
    let Some(postgres) = place.start().await else { return };
    let connects = |user: &str, role: &str| {
        let output = Command::new("setpriv")
            .args(["--reuid", user, "--regid", user, "--clear-groups", "--", "psql", "-w", "-h"])
            .arg(place.config().run_dir)
            .args(["-U", role, "-d", "cloister", "-Atc", "SELECT 1"])
            .env("HOME", "/nonexistent")
            .output()
            .expect("run psql");
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    // No account of that name may exist on this machine; then nothing can be shown of it.
    if nix::unistd::User::from_name(ROLE).unwrap().is_some() {
        assert!(connects(ROLE, ROLE).0, "{}", connects(ROLE, ROLE).1);
        assert!(!connects(ROLE, ADMIN_ROLE).0, "a coordinator is no superuser");
    } else {
        println!("SKIP: there is no account `{ROLE}`");
    }
    for role in [ROLE, ADMIN_ROLE] {
        assert!(!connects("daemon", role).0, "a stranger connected as `{role}`");
    }
    stop(postgres).await;
}

#[test]
fn a_disk_without_room_is_named_before_a_server_ends_on_it() {
    let error = super::cluster::ensure_room(std::path::Path::new("/proc/not/there")).unwrap_err();
    assert!(error.to_string().contains("`/proc` has 0 MiB free"), "{error}");
    assert!(error.hint().contains("df"), "{}", error.hint());
    super::cluster::ensure_room(std::path::Path::new("/tmp/not/there")).unwrap();
}
