//! A real store for tests: one private server for all test processes of a user, one database per test.
//!
//! [`TestStore::create`] copies a template that was migrated once. The server runs without fsync under the temporary
//! directory. It lives as long as any test process: each holds a shared lock, and a small shell waits for the
//! exclusive one and then removes the server, whichever way the tests ended.

mod clock;
pub(crate) mod server;

use std::sync::atomic::{AtomicU32, Ordering};

pub use clock::StoreClock;
use cloister_types::{ByteCount, Capability, CpuMillis, HostId};
use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions as _, PgConnection};

use crate::db::{AuditContext, Bootstrap, HostCapacity, HostRegistration, Store, StoreConfig, TokenHash};

/// A store on a database of its own, with its time in the test's hand.
#[derive(Debug)]
pub struct TestStore {
    /// The store, bootstrapped.
    pub store: Store,
    /// Its time.
    pub clock: StoreClock,
    /// The default organization and its owner.
    pub bootstrap: Bootstrap,
    options: PgConnectOptions,
    config: StoreConfig,
}

impl TestStore {
    /// Returns a store with the default settings, or prints a line that starts with `SKIP:` and returns `None` when
    /// there is no PostgreSQL.
    ///
    /// # Panics
    ///
    /// When PostgreSQL is there and does not work.
    pub async fn create() -> Option<Self> {
        Self::create_with(|_| {}).await
    }

    /// As [`TestStore::create`], with other settings.
    ///
    /// # Panics
    ///
    /// When PostgreSQL is there and does not work.
    pub async fn create_with(change: impl FnOnce(&mut StoreConfig)) -> Option<Self> {
        let options = Self::create_database().await?;
        let clock = StoreClock::default();
        let mut config =
            StoreConfig { max_connections: 24, clock: Some(clock.clone()), ..StoreConfig::default() };
        change(&mut config);
        let store = Store::connect(options.clone(), config.clone()).await.expect("connect to a new database");
        let bootstrap =
            store.bootstrap(&TokenHash::of("test-owner")).await.expect("bootstrap a new database");
        Some(Self { store, clock, bootstrap, options, config })
    }

    /// Returns how to connect to a new migrated database, or `None` after a `SKIP:` line.
    ///
    /// # Panics
    ///
    /// When PostgreSQL is there and does not work.
    pub async fn create_database() -> Option<PgConnectOptions> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let server = server::shared().await?;
        let name = format!("test_{}_{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        server.create_database(&name).await;
        Some(server.options(&name))
    }

    /// Returns a second store on the same database, as another coordinator would have.
    ///
    /// # Panics
    ///
    /// When it cannot connect.
    pub async fn another(&self) -> Store {
        Store::connect(self.options.clone(), self.config.clone()).await.expect("connect a second time")
    }

    /// Returns a connection of its own, for what no operation does.
    ///
    /// # Panics
    ///
    /// When it cannot connect.
    pub async fn connection(&self) -> PgConnection {
        self.options.connect().await.expect("connect beside the store")
    }

    /// Returns how to connect to this database.
    pub fn options(&self) -> PgConnectOptions {
        self.options.clone()
    }

    /// Returns a context of the owner with a request id.
    pub fn context(&self, action: &str, request_id: &str) -> AuditContext {
        AuditContext {
            organization_id: self.bootstrap.organization_id.clone(),
            user_id: self.bootstrap.user_id.clone(),
            principal: format!("{}/{}", self.bootstrap.user_id, self.bootstrap.token_id),
            action: action.to_owned(),
            request_id: request_id.to_owned(),
            source: "127.0.0.1:1".to_owned(),
        }
    }

    /// Registers a host with both backends and this much memory, and returns its id and link epoch.
    ///
    /// # Panics
    ///
    /// When the store fails.
    pub async fn host(&self, name: &str, memory: ByteCount) -> (HostId, u64) {
        let host = HostRegistration { name: name.to_owned(), ..host_registration(memory) };
        let registered = self.store.register_host(&host).await.expect("register a host");
        (host.id, registered.link_epoch)
    }
}

/// Returns a registration with both backends, 64 CPUs and 1000 GiB of disk.
pub fn host_registration(memory: ByteCount) -> HostRegistration {
    HostRegistration {
        id: HostId::generate(),
        name: "host".to_owned(),
        version: "0.1.0".to_owned(),
        wire_version: 1,
        boot_id: "boot-1".to_owned(),
        capabilities: vec![
            Capability::ok("backend.namespace", "started and ran a command"),
            Capability::ok("backend.sim", "simulated"),
        ],
        capacity: HostCapacity { memory, cpus: CpuMillis(64_000), disk: ByteCount::gib(1000) },
    }
}
