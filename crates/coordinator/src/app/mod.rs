//! What callers may do, apart from how they ask for it.
//!
//! ```text
//!  api/ (messages) ──► authorize(principal, action, resource) ──► Authorized ──► App::verb(&Authorized, …) ──► db, link
//! ```
//!
//! Every verb takes an [`Authorized`], which only [`authorize::authorize`] can make: a handler cannot reach the store
//! around it. `api/` checks the form of what it passes on; rules about objects are here or in the store.
//! Names of files are the nouns of `api/` and `db/`.

pub(crate) mod audit;
pub(crate) mod authenticate;
pub mod authorize;
pub(crate) mod channel;
pub(crate) mod exec;
pub(crate) mod host;
pub(crate) mod relay;
pub(crate) mod session;
pub(crate) mod token;

use std::sync::Arc;

use cloister_service::{CancellationToken, TaskRegistry};

use crate::app::authenticate::Authenticator;
use crate::db::{ChangeFeed, LeaseHolder, Store, TokenHash};
use crate::link::HostLinks;
use crate::reconcile::OpExecutor;

pub use authorize::{Action, Authorized, Principal, Resource};

/// The verbs of the app API.
pub(crate) struct App {
    store: Store,
    links: HostLinks,
    feed: ChangeFeed,
    executor: OpExecutor,
    holder: LeaseHolder,
    tasks: TaskRegistry,
    authenticator: Arc<Authenticator>,
}

impl App {
    pub(crate) fn new(
        store: Store,
        links: HostLinks,
        feed: ChangeFeed,
        executor: OpExecutor,
        holder: LeaseHolder,
        tasks: TaskRegistry,
        authenticator: Arc<Authenticator>,
    ) -> Self {
        Self { store, links, feed, executor, holder, tasks, authenticator }
    }

    /// Waits until a caller's token is revoked or has expired; for streams.
    pub(crate) fn until_revoked(&self, token: TokenHash) -> impl Future<Output = ()> + Send + 'static {
        let authenticator = Arc::clone(&self.authenticator);
        async move { authenticator.until_revoked(token).await }
    }

    /// Cancelled when the coordinator stops: streams end with a reason then.
    fn stopping(&self) -> CancellationToken {
        self.tasks.token()
    }
}
