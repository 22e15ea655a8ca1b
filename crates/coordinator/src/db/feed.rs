//! Telling the rest of the program what changed, through LISTEN.
//!
//! A notice is a hint: what is true is in the tables. When the listening connection breaks, what was sent meanwhile is
//! lost, so subscribers are told to look at everything ([`Change::Rescan`]); the same on a fallback timer.

use std::time::Duration;

use cloister_types::{HostId, SessionId};
use sqlx::postgres::PgListener;
use tokio::sync::broadcast;
use tokio_util::sync::CancellationToken;

use super::{Store, StoreError};

/// Where every operation tells what it changed.
const CHANNEL: &str = "cloister_changes";
/// Pause before the next attempt to listen.
const RECONNECT_DELAY: Duration = Duration::from_millis(200);

/// What may have changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// This session.
    Session(SessionId),
    /// This host.
    Host(HostId),
    /// Anything: look at everything.
    Rescan,
}

/// Hands out subscriptions. Cheap to clone.
#[derive(Debug, Clone)]
pub struct ChangeFeed {
    sender: broadcast::Sender<Change>,
}

/// One subscription.
#[derive(Debug)]
pub struct ChangeReceiver {
    receiver: broadcast::Receiver<Change>,
}

/// Owns the listening connection; give [`ChangeFeedRunner::run`] to the task registry.
#[derive(Debug)]
pub struct ChangeFeedRunner {
    store: Store,
    sender: broadcast::Sender<Change>,
    fallback_interval: Duration,
}

impl ChangeFeed {
    /// Returns a feed and the task that drives it. A [`Change::Rescan`] is sent at least every `fallback_interval`.
    pub fn new(store: Store, fallback_interval: Duration) -> (Self, ChangeFeedRunner) {
        let (sender, _) = broadcast::channel(4096);
        (Self { sender: sender.clone() }, ChangeFeedRunner { store, sender, fallback_interval })
    }

    /// Returns a subscription to what happens from now on. Subscribe first, then read the store.
    pub fn subscribe(&self) -> ChangeReceiver {
        ChangeReceiver { receiver: self.sender.subscribe() }
    }
}

impl ChangeReceiver {
    /// Waits for the next change; [`Change::Rescan`] when this subscriber was too slow to see each; `None` when the
    /// runner has ended.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: a change is not lost when the future is dropped.
    pub async fn recv(&mut self) -> Option<Change> {
        match self.receiver.recv().await {
            Ok(change) => Some(change),
            Err(broadcast::error::RecvError::Lagged(_)) => Some(Change::Rescan),
            Err(broadcast::error::RecvError::Closed) => None,
        }
    }
}

impl ChangeFeedRunner {
    /// Listens until cancelled; connects again by itself, and sends [`Change::Rescan`] each time it did.
    ///
    /// # Errors
    ///
    /// None that a restart would not repeat: trouble with the connection is logged and retried.
    pub async fn run(self, cancel: CancellationToken) -> Result<(), StoreError> {
        loop {
            tokio::select! {
                () = cancel.cancelled() => return Ok(()),
                ended = self.listen() => {
                    if let Err(error) = ended {
                        if matches!(error, sqlx::Error::PoolClosed) {
                            return Ok(());
                        }
                        tracing::warn!(error = %error, "cannot listen for changes; trying again");
                    }
                }
            }
            self.send(Change::Rescan);
            tokio::select! {
                () = cancel.cancelled() => return Ok(()),
                () = tokio::time::sleep(RECONNECT_DELAY) => {}
            }
        }
    }
}

impl ChangeFeedRunner {
    /// Listens on one connection until it breaks. It is one of the pool's, so that it is counted among them.
    async fn listen(&self) -> Result<(), sqlx::Error> {
        let mut listener = PgListener::connect_with(&self.store.pool).await?;
        listener.listen(CHANNEL).await?;
        // What happened before the connection listened.
        self.send(Change::Rescan);
        loop {
            match tokio::time::timeout(self.fallback_interval, listener.try_recv()).await {
                Ok(Ok(Some(notice))) => self.send(parse(notice.payload())),
                // The connection broke and was replaced: what was sent in between is lost.
                Ok(Ok(None)) => {
                    tracing::info!("the listening connection was replaced; looking at everything");
                    self.send(Change::Rescan);
                }
                Ok(Err(error)) => return Err(error),
                Err(_) => self.send(Change::Rescan),
            }
        }
    }

    fn send(&self, change: Change) {
        // Nobody subscribed: nobody to tell.
        let _ = self.sender.send(change);
    }
}

/// Returns what a payload says; one that says nothing known makes everybody look.
fn parse(payload: &str) -> Change {
    if let Ok(id) = payload.parse() {
        Change::Session(id)
    } else if let Ok(id) = payload.parse() {
        Change::Host(id)
    } else {
        Change::Rescan
    }
}
