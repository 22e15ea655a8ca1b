//! Starting, serving and stopping a coordinator.
//!
//! Order: bind, so that a taken port fails before anything is touched; the database; the schema and the owner; the
//! reconcilers; serving. Stopping goes the other way round, with the database last.

use std::io::{self, Read as _, Seek as _, Write as _};
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cloister_service::task::{ShutdownError, TaskFailure};
use cloister_service::{CancellationToken, OnCancel, OnError, TaskKind, TaskRegistry};
use secrecy::{ExposeSecret as _, SecretString};
use tokio::time::Instant;

use crate::api;
use crate::app::App;
use crate::app::authenticate::Authenticator;
use crate::app::authorize::Principal;
use crate::config::{Config, Database};
use crate::db::{ChangeFeed, LeaseHolder, Store, StoreConfig, StoreError, TokenHash};
use crate::link::{HostLinks, LinkService};
use crate::metrics::Metrics;
use crate::postgres::{PostgresConfig, PostgresError, PrivatePostgres};
use crate::reconcile::{self, Deadlines, LostHosts, OpExecutor, Ops, Pruning, Queue};
use crate::server::{self, BindError, Listeners};

/// File of the owner's token in the data directory.
const OWNER_TOKEN_FILE: &str = "owner-token";
/// File with the lease holder of the coordinator that uses the data directory, and its lock.
const INCARNATION_FILE: &str = "lease-holder";

const POSTGRES: TaskKind = TaskKind::new("postgres", OnCancel::Wait, OnError::Exit);
const FEED: TaskKind = TaskKind::new("change feed", OnCancel::Wait, OnError::Exit);

/// Why a coordinator does not run.
#[derive(Debug, thiserror::Error)]
pub enum CoordinatorError {
    /// Nothing can be served.
    #[error("cannot listen")]
    Bind(#[from] BindError),
    /// The address of the port is not known.
    #[error("cannot read the address of the port")]
    Address(#[source] io::Error),
    /// The owner's token cannot be read or made.
    #[error("cannot read or make the owner's token at `{}`", path.display())]
    OwnerToken {
        /// Its file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The file that says who used the data directory cannot be read or written.
    #[error("cannot read or write `{}`", path.display())]
    Incarnation {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The private database cannot be had.
    #[error("cannot start the private PostgreSQL")]
    Postgres(#[from] PostgresError),
    /// The store cannot be opened.
    #[error("cannot open the store")]
    Store(#[from] StoreError),
    /// The compiled-in descriptors are broken: a defect of the build.
    #[error("cannot read the compiled-in protocol descriptors")]
    Reflection(#[from] connectrpc_reflection::ReflectionError),
    /// The owner does not exist although the store was opened: a defect.
    #[error("the owner's token does not work right after it was stored")]
    Owner,
    /// A task that the coordinator cannot live without.
    #[error(transparent)]
    Task(#[from] TaskFailure),
    /// Something did not end in time.
    #[error(transparent)]
    Shutdown(#[from] ShutdownError),
}

/// A coordinator that serves.
#[derive(Debug, Clone)]
pub struct Listening {
    /// The API's address, with the port that the kernel chose.
    pub address: SocketAddr,
    /// The unix socket, when there is one.
    pub socket: Option<PathBuf>,
    /// The bearer of the default organization's owner.
    pub owner_token: SecretString,
}

/// Runs a coordinator until `shutdown` is cancelled.
///
/// # Errors
///
/// [`CoordinatorError`]: it could not start, or had to stop. What it had begun is taken up by the next one.
pub async fn run(config: Config, shutdown: CancellationToken) -> Result<(), CoordinatorError> {
    run_with(config, shutdown, |_| {}).await
}

/// The same, and calls `ready` once everything is served.
///
/// # Errors
///
/// As [`run`].
pub async fn run_with(
    config: Config,
    shutdown: CancellationToken,
    ready: impl FnOnce(Listening),
) -> Result<(), CoordinatorError> {
    let listeners = Listeners::bind(config.listen, config.socket.as_deref()).await?;
    // The database outlives everything that uses it: its task has a registry, and a token, of its own.
    let database = TaskRegistry::new();
    let result = match open_database(&config, &database).await {
        Ok(store) => {
            let result = serve(&config, shutdown, listeners, &store, &database, ready).await;
            store.close().await;
            result
        }
        Err(error) => Err(error),
    };
    let ended = database.shutdown(config.shutdown_grace).await;
    result?;
    Ok(ended?)
}

async fn open_database(config: &Config, tasks: &TaskRegistry) -> Result<Store, CoordinatorError> {
    let options = match &config.database {
        Database::Outside(options) => options.as_ref().clone(),
        Database::Private => {
            let postgres = PrivatePostgres::start(PostgresConfig::new(
                config.data_dir.join("postgres"),
                config.run_dir.join("pg"),
            ))
            .await?;
            let options = postgres.connect_options();
            let token = tasks.token();
            tasks.spawn(POSTGRES, async move { postgres.supervise(token).await });
            options
        }
    };
    Ok(Store::connect(options, StoreConfig::default()).await?)
}

async fn serve(
    config: &Config,
    shutdown: CancellationToken,
    listeners: Listeners,
    store: &Store,
    database: &TaskRegistry,
    ready: impl FnOnce(Listening),
) -> Result<(), CoordinatorError> {
    let tasks = TaskRegistry::with_token(shutdown.child_token());
    let address = listeners.address().map_err(CoordinatorError::Address)?;
    let owner_token = owner_token(config)?;
    let hash = TokenHash::of(owner_token.expose_secret());
    store.bootstrap(&hash).await?;
    let owner = store.authenticate(&hash).await?.ok_or(CoordinatorError::Owner)?;

    let (feed, runner) = ChangeFeed::new(store.clone(), config.fallback_poll);
    let feed_token = tasks.token();
    tasks.spawn(FEED, async move { runner.run(feed_token).await });
    let links = HostLinks::default();
    let holder = store.holder().clone();
    // Held until this process ends, however it ends.
    let _incarnation = take_over(config, store, &holder).await?;
    let executor = OpExecutor::new(store.clone(), links.clone(), holder.clone(), tasks.clone());
    let authenticator = Arc::new(Authenticator::new(
        store.clone(),
        &Principal::from(owner),
        &config.app_tokens,
        &config.auth_tokens,
    ));
    let app = Arc::new(App::new(
        store.clone(),
        links.clone(),
        feed.clone(),
        executor.clone(),
        holder.clone(),
        tasks.clone(),
        Arc::clone(&authenticator),
    ));
    let link = Arc::new(LinkService {
        store: store.clone(),
        feed: feed.clone(),
        links: links.clone(),
        tasks: tasks.clone(),
        heartbeat: config.heartbeat,
    });
    let service = api::service(app, link, store.clone())?;
    let router = server::router(service, authenticator, store.clone(), Metrics::install());

    let fallback = config.fallback_poll;
    let ops = Ops { store: store.clone(), holder: holder.clone(), executor: executor.clone() };
    reconcile::spawn(&tasks, &feed, fallback, ops);
    reconcile::spawn(&tasks, &feed, fallback, Queue { store: store.clone(), holder, executor });
    reconcile::spawn(
        &tasks,
        &feed,
        fallback,
        Deadlines { store: store.clone(), links, tasks: tasks.clone() },
    );
    let hosts = LostHosts { store: store.clone(), heartbeat: config.heartbeat, started: Instant::now() };
    reconcile::spawn(&tasks, &feed, fallback, hosts);
    reconcile::spawn(&tasks, &feed, fallback, Pruning { store: store.clone() });

    if config.auth_tokens.is_empty() {
        tracing::warn!("`CLOISTER_AUTH_TOKENS` is empty: no host can connect");
    }
    listeners.serve(&tasks, router);
    tracing::info!(address = %address, "coordinator serves");
    ready(Listening { address, socket: config.socket.clone(), owner_token });

    let failure = tokio::select! {
        () = shutdown.cancelled() => None,
        failure = tasks.failed() => Some(failure),
        failure = database.failed() => Some(failure),
    };
    tracing::info!("coordinator stops");
    let ended = tasks.shutdown(config.shutdown_grace).await;
    match failure {
        Some(failure) => Err(failure.into()),
        None => Ok(ended?),
    }
}

/// Takes the place of the coordinator that used this data directory before. A lock proves that it is dead, so that what
/// it had in hand need not wait for its leases to run out. Where another one lives on the same directory the two share
/// the store like any others, and nothing is returned.
async fn take_over(
    config: &Config,
    store: &Store,
    holder: &LeaseHolder,
) -> Result<Option<std::fs::File>, CoordinatorError> {
    let path = config.data_dir.join(INCARNATION_FILE);
    let failed = |source| CoordinatorError::Incarnation { path: path.clone(), source };
    std::fs::create_dir_all(&config.data_dir).map_err(failed)?;
    let mut options = std::fs::OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    let mut file = options.open(&path).map_err(failed)?;
    match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
        Err(errno) => return Err(failed(errno.into())),
    }
    let mut predecessor = String::new();
    file.read_to_string(&mut predecessor).map_err(failed)?;
    // Before the name is replaced: a crash between the two only does it again.
    if !predecessor.is_empty() {
        let ended = store.end_leases(&LeaseHolder(predecessor)).await?;
        if ended > 0 {
            tracing::info!(
                operations = ended,
                "the operations of the coordinator before this one are taken over"
            );
        }
    }
    // All names have the same length. One that a power cut tears is nobody's, and its leases run out.
    file.rewind().and_then(|()| file.write_all(holder.0.as_bytes())).map_err(failed)?;
    Ok(Some(file))
}

/// Returns the owner's bearer: the configured one, or the one in the data directory, made at the first start.
fn owner_token(config: &Config) -> Result<SecretString, CoordinatorError> {
    if let Some(token) = &config.owner_token {
        return Ok(token.clone());
    }
    let path = config.data_dir.join(OWNER_TOKEN_FILE);
    let failed = |source| CoordinatorError::OwnerToken { path: path.clone(), source };
    match std::fs::read_to_string(&path) {
        Ok(text) if text.trim().len() >= 32 => return Ok(SecretString::from(text.trim().to_owned())),
        // A file that a crash left half-written holds no token that anybody has.
        Ok(_) => std::fs::remove_file(&path).map_err(failed)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(failed(error)),
    }
    let token = format!("clt_{:032x}{:032x}", rand::random::<u128>(), rand::random::<u128>());
    write_secret(&path, &token).map_err(failed)?;
    Ok(SecretString::from(token))
}

/// Writes a file that only its owner can read, whole or not at all.
fn write_secret(path: &Path, text: &str) -> io::Result<()> {
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent)?;
    }
    let temporary = path.with_extension("new");
    let _ = std::fs::remove_file(&temporary);
    let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
    file.write_all(text.as_bytes())?;
    file.write_all(b"\n")?;
    file.sync_all()?;
    std::fs::rename(&temporary, path)
}
