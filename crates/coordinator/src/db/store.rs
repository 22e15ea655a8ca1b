//! The handle on the store: its connections, its settings, and what every operation shares.

use std::future::Future;
use std::time::{Duration, Instant};

use cloister_types::session::IllegalTransition;
use sqlx::migrate::Migrator;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};

use super::{AdmissionPolicy, LeaseHolder, StoreError};

/// The migrations that this version was built with.
pub(super) static MIGRATOR: Migrator = sqlx::migrate!();

/// Longest run of one statement: every query here has an index and a bound, so that a longer one is a defect or a
/// server in trouble.
const STATEMENT_TIMEOUT: &str = "10s";
/// Longest wait for a row that another transaction holds.
const LOCK_TIMEOUT: &str = "5s";
/// Longest pause inside a transaction: a coordinator that was stopped must not keep hosts locked.
const IDLE_IN_TRANSACTION_TIMEOUT: &str = "10s";

/// Longest that a database may take to answer a probe.
const ANSWER_DEADLINE: Duration = Duration::from_secs(2);

/// A connection that was used this shortly ago is taken for alive: a ping costs each operation a round trip. When the
/// server was restarted within that time a caller sees [`StoreError::Unavailable`] once.
const TRUSTED_IDLE: Duration = Duration::from_millis(500);

/// Settings of a [`Store`].
#[derive(Debug, Clone)]
pub struct StoreConfig {
    /// Most connections at one time; one of them listens for changes.
    pub max_connections: u32,
    /// How long an operation waits for a free connection before [`StoreError::Unavailable`].
    pub acquire_timeout: Duration,
    /// How long a claimed operation belongs to its holder without a renewal. Renew at a third of it. On loss the
    /// holder stops its effects; an observer may claim the operation again, with a higher epoch.
    pub op_lease: Duration,
    /// How much of a host's capacity sessions may be promised.
    pub admission: AdmissionPolicy,
    /// Sets the time of `cloister_now()` in tests.
    #[cfg(any(test, debug_assertions))]
    pub clock: Option<crate::test_support::StoreClock>,
}

impl Default for StoreConfig {
    fn default() -> Self {
        Self {
            // More only spread the same work over more server processes, each with caches of its own to fill.
            max_connections: 8,
            acquire_timeout: Duration::from_secs(5),
            op_lease: Duration::from_secs(15),
            admission: AdmissionPolicy::default(),
            #[cfg(any(test, debug_assertions))]
            clock: None,
        }
    }
}

/// The store. Cheap to clone; all clones share the connections.
#[derive(Debug, Clone)]
pub struct Store {
    pub(super) pool: sqlx::PgPool,
    /// The name of this process among the coordinators; each of its connections carries it.
    pub(super) holder: LeaseHolder,
    pub(super) config: StoreConfig,
}

/// What stops an operation half-way: its transaction is rolled back.
pub(super) enum Failure {
    /// A statement failed.
    Sql(sqlx::Error),
    /// The operation itself says no.
    Typed(StoreError),
}

impl From<sqlx::Error> for Failure {
    fn from(error: sqlx::Error) -> Self {
        Self::Sql(error)
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        Self::Typed(error)
    }
}

impl From<IllegalTransition> for Failure {
    fn from(error: IllegalTransition) -> Self {
        Self::Typed(error.into())
    }
}

impl Store {
    /// Connects, and brings the schema to this version under an advisory lock (two coordinators may start at once).
    ///
    /// # Errors
    ///
    /// [`StoreError::Connect`] when the server does not answer or lets nobody in, [`StoreError::Migrate`] when the database is of
    /// a later release or a migration failed (it is rolled back).
    pub async fn connect(options: PgConnectOptions, config: StoreConfig) -> Result<Self, StoreError> {
        let holder = LeaseHolder::generate();
        // A migration may take longer than any statement of ours, so it runs on a connection without our timeouts. It comes
        // first: the pool would say of a server that is not there only that it waited.
        let connecting = sqlx::ConnectOptions::connect(&options);
        let mut connection = tokio::time::timeout(config.acquire_timeout, connecting)
            .await
            .unwrap_or(Err(sqlx::Error::PoolTimedOut))
            .map_err(|source| StoreError::Connect { server: server_text(&options), source })?;
        let migrated = MIGRATOR.run_direct(None, &mut connection, false).await;
        // The lock goes with the connection: close it in either case.
        let closed = sqlx::Connection::close(connection).await;
        migrated.map_err(StoreError::Migrate)?;
        closed.map_err(|error| StoreError::from_sqlx("connect", error))?;
        let pool = pool_options(&config, &holder).connect_with(options).await;
        let pool = pool.map_err(|error| StoreError::from_sqlx("connect", error))?;
        Ok(Self { pool, holder, config })
    }

    /// Returns as whom this process holds leases and links.
    pub fn holder(&self) -> &LeaseHolder {
        &self.holder
    }

    /// Answers when the database does: for `/readyz`.
    ///
    /// # Errors
    ///
    /// [`StoreError::Unavailable`].
    pub async fn ping(&self) -> Result<(), StoreError> {
        self.observe("ping", async {
            sqlx::query_scalar!(r#"SELECT 1 AS "one!""#).fetch_one(&self.pool).await?;
            Ok(())
        })
        .await
    }

    /// Returns whether the database answers within two seconds: for probes.
    pub async fn answers(&self) -> bool {
        matches!(tokio::time::timeout(ANSWER_DEADLINE, self.ping()).await, Ok(Ok(())))
    }

    /// Closes all connections after the operations under way.
    pub async fn close(&self) {
        self.pool.close().await;
    }

    /// Runs one operation: its name goes into the metrics and into the errors of its statements.
    pub(super) async fn observe<T>(
        &self,
        operation: &'static str,
        work: impl Future<Output = Result<T, Failure>> + Send,
    ) -> Result<T, StoreError> {
        let started = Instant::now();
        let result = work.await.map_err(|failure| match failure {
            Failure::Sql(source) => StoreError::from_sqlx(operation, source),
            Failure::Typed(error) => error,
        });
        let outcome = match &result {
            Ok(_) => "ok",
            Err(StoreError::Unavailable { .. }) => "unavailable",
            Err(
                StoreError::Connect { .. }
                | StoreError::Database { .. }
                | StoreError::Corrupt { .. }
                | StoreError::Migrate(_),
            ) => "failed",
            Err(_) => "refused",
        };
        metrics::histogram!("cloister_coordinator_db_operation_seconds", "operation" => operation, "outcome" => outcome)
            .record(started.elapsed().as_secs_f64());
        result
    }
}

/// Returns where a server is, without anything secret.
fn server_text(options: &PgConnectOptions) -> String {
    let database = options.get_database().unwrap_or_default();
    match options.get_socket() {
        Some(socket) => format!("{}, database `{database}`", socket.display()),
        None => format!("{}:{}, database `{database}`", options.get_host(), options.get_port()),
    }
}

fn pool_options(config: &StoreConfig, holder: &LeaseHolder) -> PgPoolOptions {
    let holder = holder.0.clone();
    #[cfg(any(test, debug_assertions))]
    let (fresh_clock, idle_clock) = (config.clock.clone(), config.clock.clone());
    PgPoolOptions::new()
        .min_connections(2)
        .max_connections(config.max_connections.max(2))
        .acquire_timeout(config.acquire_timeout)
        // `before_acquire` does it, where it is worth its round trip.
        .test_before_acquire(false)
        .after_connect(move |connection, _| {
            #[cfg(any(test, debug_assertions))]
            let clock = fresh_clock.clone();
            let holder = holder.clone();
            Box::pin(async move {
                // A dynamic statement: SET takes no parameters, and these are constants. Every statement of ours finds
                // its rows by an index whatever its parameters are: a plan for each of them costs more than it runs.
                sqlx::query(
                    "SELECT set_config('statement_timeout', $1, false), set_config('lock_timeout', $2, false), \
                     set_config('idle_in_transaction_session_timeout', $3, false), \
                     set_config('application_name', $4, false), \
                     set_config('plan_cache_mode', 'force_generic_plan', false)",
                )
                .bind(STATEMENT_TIMEOUT)
                .bind(LOCK_TIMEOUT)
                .bind(IDLE_IN_TRANSACTION_TIMEOUT)
                .bind(holder)
                .execute(&mut *connection)
                .await?;
                #[cfg(any(test, debug_assertions))]
                if let Some(clock) = clock {
                    clock.apply(connection).await?;
                }
                Ok(())
            })
        })
        .before_acquire(move |connection, metadata| {
            #[cfg(any(test, debug_assertions))]
            let clock = idle_clock.clone();
            Box::pin(async move {
                #[cfg(any(test, debug_assertions))]
                if let Some(clock) = clock {
                    clock.apply(connection).await?;
                    return Ok(true);
                }
                if metadata.idle_for > TRUSTED_IDLE {
                    // An error here closes the connection, and the pool takes another.
                    sqlx::Connection::ping(connection).await?;
                }
                Ok(true)
            })
        })
}

/// Most characters of a text that a host or a guest chose.
const FOREIGN_TEXT_MAX_LEN: usize = 4096;

/// Returns a text that a host or a guest chose, as PostgreSQL takes it: it knows no NUL, and one row must not grow
/// without bound.
pub(super) fn storable(text: &str) -> String {
    text.chars()
        .take(FOREIGN_TEXT_MAX_LEN)
        .map(|letter| if letter == '\0' { '\u{fffd}' } else { letter })
        .collect()
}

/// Returns a quantity of the domain as the store keeps it. Everything that comes here is far below the limit.
pub(super) fn to_i64(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// Returns a duration as the seconds that `make_interval` takes.
pub(super) fn to_seconds(duration: Duration) -> f64 {
    duration.as_secs_f64()
}
