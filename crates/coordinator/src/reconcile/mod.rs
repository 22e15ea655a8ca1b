//! Background work: each reconciler reads what is wanted and what is, does a bounded amount, and can be run again.
//!
//! ```text
//!  Change (notify) ─┐
//!  due time ────────┼──► drive: run_once() until it has nothing more ──► OpExecutor (effects on hosts)
//!  fallback timer ──┘
//! ```
//!
//! Invariants:
//! - `run_once` takes no input, may run twice and on two coordinators, and returns what it did.
//! - A notice only makes it run sooner: due times come from the store, so that a lost notice costs one fallback
//!   interval at most, and nothing when something else has a due time.
//! - An operation belongs to whoever claimed it, for as long as its lease is renewed (`op.rs`).

mod op;
mod queue;

use std::future::Future;
use std::time::Duration;

use cloister_service::{CancellationToken, OnCancel, OnError, TaskKind, TaskRegistry};
use futures::FutureExt as _;

pub(crate) use op::OpExecutor;
pub(crate) use queue::{Deadlines, LostHosts, Ops, Pruning, Queue};

use crate::db::{Change, ChangeFeed, StoreError};

/// Pause after a run that the store refused.
const TROUBLE_PAUSE: Duration = Duration::from_millis(500);
/// Shortest pause between runs that a due time asks for, so that a due time in the past cannot spin.
const LEAST_PAUSE: Duration = Duration::from_millis(20);

/// What a run did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Status {
    /// There is more: run again at once.
    More,
    /// There is nothing more until a change, the fallback timer, or this long from now.
    Idle(Option<Duration>),
}

/// Work that is done over and over.
pub(crate) trait Reconciler: Send + Sync + 'static {
    /// Its task.
    const KIND: TaskKind;

    /// How long it waits after a change before it runs, so that a burst of changes makes one run and the run does not
    /// compete with the call that made the change.
    const SETTLE: Duration;

    /// Does a bounded amount of work.
    fn run_once(&self) -> impl Future<Output = Result<Status, StoreError>> + Send;

    /// Returns whether a change can have made work for it.
    fn wakes_on(&self, change: &Change) -> bool;
}

/// The kind of every reconciler: it ends between two runs, and is made again when it fails.
pub(crate) const fn kind(name: &'static str) -> TaskKind {
    TaskKind::new(name, OnCancel::Wait, OnError::Restart)
}

/// Runs a reconciler until the coordinator stops.
pub(crate) fn spawn<R: Reconciler>(
    tasks: &TaskRegistry,
    feed: &ChangeFeed,
    fallback: Duration,
    reconciler: R,
) {
    let reconciler = std::sync::Arc::new(reconciler);
    let feed = feed.clone();
    let token = tasks.token();
    tasks.spawn_restarting(R::KIND, move || {
        let (reconciler, feed, token) = (reconciler.clone(), feed.clone(), token.clone());
        async move { drive(&*reconciler, &feed, fallback, &token).await }
    });
}

async fn drive<R: Reconciler>(
    reconciler: &R,
    feed: &ChangeFeed,
    fallback: Duration,
    token: &CancellationToken,
) -> Result<(), std::convert::Infallible> {
    // Subscribed before the first run: what happens during a run makes another one.
    let mut changes = feed.subscribe();
    while !token.is_cancelled() {
        // What was told so far is covered by the run that follows.
        while changes.recv().now_or_never().flatten().is_some() {}
        let pause = match reconciler.run_once().await {
            Ok(Status::More) => continue,
            Ok(Status::Idle(due)) => {
                due.map_or(fallback, |due| due.clamp(LEAST_PAUSE, fallback.max(LEAST_PAUSE)))
            }
            Err(error) => {
                tracing::warn!(task = R::KIND.name, error = %cloister_service::error_chain(&error), "reconciler runs again later");
                TROUBLE_PAUSE
            }
        };
        let woken = async {
            loop {
                match changes.recv().await {
                    Some(change) if reconciler.wakes_on(&change) => {
                        break tokio::time::sleep(R::SETTLE).await;
                    }
                    Some(_) => {}
                    None => std::future::pending().await,
                }
            }
        };
        tokio::select! {
            () = token.cancelled() => {}
            () = woken => {}
            () = tokio::time::sleep(pause) => {}
        }
    }
    Ok(())
}
