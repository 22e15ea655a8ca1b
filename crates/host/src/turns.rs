//! Turns: what is done to one session is done in the order in which it arrived.
//!
//! The reader of the control stream queues a [`Turn`] for each message as it reads it and hands the message to a
//! task of its own, so that a slow command holds up its own session and nothing else. A command that changes a
//! session's sandbox keeps its turn until it is done; one that only needs the sandbox lets go of it as soon as it
//! has found it.
//!
//! Invariant: the place in the line is taken in [`Turns::queue`], not when the turn is first waited for.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use cloister_types::SessionId;
use futures::FutureExt as _;
use tokio::sync::OwnedMutexGuard;

/// Entries of sessions that nobody waits for are dropped when there are this many.
const SWEEP_AT: usize = 1024;

type Line = tokio::sync::Mutex<()>;

/// The lines of all sessions.
#[derive(Default)]
pub(crate) struct Turns {
    lines: Mutex<HashMap<SessionId, Weak<Line>>>,
}

/// A place in one session's line. Dropping it gives the place up.
pub(crate) struct Turn {
    state: State,
}

enum State {
    Taken(OwnedMutexGuard<()>),
    Waiting(Pin<Box<dyn Future<Output = OwnedMutexGuard<()>> + Send>>),
}

impl Turns {
    /// Takes the next place in the session's line. Never waits.
    pub(crate) fn queue(&self, session_id: &SessionId) -> Turn {
        let line = {
            let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(line) = lines.get(session_id).and_then(Weak::upgrade) {
                line
            } else {
                if lines.len() >= SWEEP_AT {
                    lines.retain(|_, line| line.strong_count() > 0);
                }
                let line = Arc::new(Line::new(()));
                lines.insert(session_id.clone(), Arc::downgrade(&line));
                line
            }
        };
        let mut waiting: Pin<Box<dyn Future<Output = _> + Send>> = Box::pin(line.lock_owned());
        // The lock is fair and its line is entered at the first poll.
        let state = match waiting.as_mut().now_or_never() {
            Some(guard) => State::Taken(guard),
            None => State::Waiting(waiting),
        };
        Turn { state }
    }
}

impl Turn {
    /// Waits until everything that was queued before has let go.
    ///
    /// # Cancel safety
    ///
    /// Dropping it gives the place up.
    pub(crate) async fn taken(self) -> OwnedMutexGuard<()> {
        match self.state {
            State::Taken(guard) => guard,
            State::Waiting(waiting) => waiting.await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn turns_come_in_the_order_of_the_queue_not_of_the_waiting() {
        let turns = Turns::default();
        let session_id = SessionId::generate();
        let first = turns.queue(&session_id);
        let second = turns.queue(&session_id);
        let third = turns.queue(&session_id);
        let order = Mutex::new(Vec::new());
        let run = async |turn: Turn, name: &'static str| {
            let _turn = turn.taken().await;
            tokio::task::yield_now().await;
            order.lock().expect("no panic").push(name);
        };
        // The third is polled first.
        tokio::join!(run(third, "third"), run(second, "second"), run(first, "first"));
        assert_eq!(*order.lock().expect("no panic"), ["first", "second", "third"]);
    }

    #[tokio::test]
    async fn sessions_do_not_wait_for_each_other_and_a_dropped_place_is_given_up() {
        let turns = Turns::default();
        let (one, other) = (SessionId::generate(), SessionId::generate());
        let held = turns.queue(&one).taken().await;
        let waiting = turns.queue(&one);
        assert!(matches!(waiting.state, State::Waiting(_)));
        let _other = turns.queue(&other).taken().await;
        let last = turns.queue(&one);
        drop(waiting);
        drop(held);
        let _last = last.taken().await;
    }
}
