//! What happened to sandboxes without a command, until the coordinator knows.
//!
//! The control stream has no acknowledgement of its own for events, and a message handed to a connection that
//! breaks may or may not have arrived. So an event is sent again over the next link: it is dropped when a
//! registration follows over which it could be sent a second time, and the registration itself lists what runs.
//! A coordinator takes an event by sandbox id and epoch, so that a second copy changes nothing.
//!
//! Bounded: beyond [`EVENTS_MAX`] the oldest are dropped with a warning. What is lost is the reason, not the fact:
//! the sandbox is missing from the next registration.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use cloister_api::host::SandboxEvent;
use tokio::sync::Notify;

/// Most events kept.
const EVENTS_MAX: usize = 4096;

/// Events that wait for a link, or for the proof that one carried them.
#[derive(Default)]
pub(crate) struct Events {
    kept: Mutex<VecDeque<Kept>>,
    added: Notify,
}

struct Kept {
    event: SandboxEvent,
    /// Links it was sent over: the last one, and how many.
    sent_on: Option<u64>,
    times: u32,
}

impl Events {
    /// Keeps an event and wakes the link.
    pub(crate) fn push(&self, event: SandboxEvent) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() >= EVENTS_MAX {
            kept.pop_front();
            tracing::warn!(kept = EVENTS_MAX, "the oldest sandbox event was dropped");
        }
        kept.push_back(Kept { event, sent_on: None, times: 0 });
        drop(kept);
        self.added.notify_one();
    }

    /// The coordinator has taken the registration of this link: drops what was sent over two links before it.
    pub(crate) fn registered(&self, link: u64) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.retain(|kept| kept.times < 2 || kept.sent_on == Some(link));
        drop(kept);
        self.added.notify_one();
    }

    /// Returns what was not sent over this link yet, and counts it as sent.
    pub(crate) fn take_unsent(&self, link: u64) -> Vec<SandboxEvent> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let unsent = kept.iter_mut().filter(|kept| kept.sent_on != Some(link));
        unsent
            .map(|kept| {
                kept.sent_on = Some(link);
                kept.times += 1;
                kept.event.clone()
            })
            .collect()
    }

    /// Waits until there may be something to take; one waiter at a time.
    ///
    /// # Cancel safety
    ///
    /// May be dropped and called again.
    pub(crate) async fn added(&self) {
        self.added.notified().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(id: &str) -> SandboxEvent {
        SandboxEvent { sandbox_id: id.to_owned(), ..SandboxEvent::default() }
    }

    fn ids(events: Vec<SandboxEvent>) -> Vec<String> {
        events.into_iter().map(|event| event.sandbox_id).collect()
    }

    #[test]
    fn an_event_goes_out_again_over_the_next_link_and_then_no_more() {
        let events = Events::default();
        events.push(event("a"));
        events.registered(1);
        assert_eq!(ids(events.take_unsent(1)), ["a"]);
        assert!(events.take_unsent(1).is_empty());
        events.push(event("b"));
        events.registered(2);
        assert_eq!(ids(events.take_unsent(2)), ["a", "b"]);
        events.registered(3);
        assert_eq!(ids(events.take_unsent(3)), ["b"]);
        events.registered(4);
        assert!(events.take_unsent(4).is_empty());
    }

    #[test]
    fn the_number_kept_is_bounded() {
        let events = Events::default();
        for index in 0..=EVENTS_MAX {
            events.push(event(&index.to_string()));
        }
        let kept = ids(events.take_unsent(1));
        assert_eq!(kept.len(), EVENTS_MAX);
        assert_eq!(kept.first().map(String::as_str), Some("1"));
    }
}
