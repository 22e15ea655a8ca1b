//! The operations on a real PostgreSQL, one database per test. What the other modules' tests assume of the store is
//! proven here: nothing is promised twice, nobody is overtaken, a stale holder is refused, a lost notice costs a
//! rescan.

mod crash;
mod create;
mod feed;
mod hosts;
mod identity;
mod lifecycle;
mod ops;
mod schema;
mod sessions;

use std::collections::BTreeMap;
use std::time::Duration;

use cloister_types::session::{SessionEvent, SessionState};
use cloister_types::{ByteCount, Isolation, IsolationFact, Limits, SessionId};

use super::*;
use crate::test_support::TestStore;

/// Returns a store, or ends the test after its `SKIP:` line.
macro_rules! store {
    () => {
        match crate::test_support::TestStore::create().await {
            Some(store) => store,
            None => return,
        }
    };
}
use store;

fn holder() -> LeaseHolder {
    LeaseHolder("coordinator-a".to_owned())
}

fn session_params(memory: ByteCount) -> CreateSession {
    CreateSession {
        name: None,
        labels: BTreeMap::new(),
        image: "host".to_owned(),
        limits: Limits { memory, disk: ByteCount::mib(64), ..Limits::DEFAULT },
        backend: None,
        isolation_floor: Isolation::Container,
        ttl: None,
    }
}

fn payload(text: &str) -> PayloadHash {
    PayloadHash::of("test", text.as_bytes())
}

fn facts() -> StartedFacts {
    StartedFacts {
        isolation: Isolation::Container,
        facts: vec![IsolationFact { name: "landlock_abi".to_owned(), value: "3".to_owned() }],
        network: false,
    }
}

impl TestStore {
    async fn create_one(&self, request_id: &str, params: &CreateSession) -> Created {
        let context = self.context("session.create", request_id);
        self.store
            .create_session(&context, &payload("create"), &holder(), params)
            .await
            .expect("create a session")
    }

    async fn started(&self, op: &ClaimedOp) -> SessionRecord {
        let params = TransitionParams {
            epoch: Some(op.epoch),
            op_id: Some(op.id.clone()),
            sandbox_id: op.session.sandbox_id.clone(),
            started: Some(facts()),
            ..TransitionParams::new(op.session.id.clone(), SessionEvent::Started)
        };
        self.store.commit_transition(&params).await.expect("commit the start")
    }

    /// Returns a session with a running sandbox of 100 MiB.
    async fn active(&self, request_id: &str) -> SessionRecord {
        let created = self.create_one(request_id, &session_params(ByteCount::mib(100))).await;
        self.started(&created.op.expect("it was placed")).await
    }

    async fn finish(&self, op: &ClaimedOp, event: SessionEvent) -> SessionRecord {
        let params = TransitionParams {
            epoch: Some(op.epoch),
            op_id: Some(op.id.clone()),
            ..TransitionParams::new(op.session.id.clone(), event)
        };
        self.store.commit_transition(&params).await.expect("finish an operation")
    }

    async fn pause(&self, id: &SessionId, request_id: &str) -> Requested {
        let context = self.context("session.pause", request_id);
        self.store
            .request_pause(&context, &payload("pause"), &holder(), id.as_str())
            .await
            .expect("ask for a pause")
    }

    async fn delete(&self, id: &SessionId, request_id: &str) -> Requested {
        let context = self.context("session.delete", request_id);
        self.store
            .request_delete(&context, &payload("delete"), &holder(), id.as_str())
            .await
            .expect("ask to delete")
    }

    async fn resume(&self, id: &SessionId, request_id: &str) -> Resumed {
        let context = self.context("session.resume", request_id);
        self.store
            .request_resume(&context, &payload("resume"), &holder(), id.as_str())
            .await
            .expect("ask to resume")
    }

    async fn paused(&self, request_id: &str) -> SessionRecord {
        let session = self.active(request_id).await;
        let op = self.pause(&session.id, &format!("{request_id}-pause")).await.op.expect("a pause to do");
        self.finish(&op, SessionEvent::PauseDone).await
    }

    async fn kinds(&self, id: &SessionId) -> Vec<String> {
        let events = self.store.session_events_after(id, 0, 1000).await.expect("read the log");
        let cursors: Vec<u64> = events.iter().map(|event| event.cursor).collect();
        let expected: Vec<u64> = (1..=u64::try_from(events.len()).unwrap()).collect();
        assert_eq!(cursors, expected, "the log has holes");
        events.into_iter().map(|event| event.kind).collect()
    }

    async fn state(&self, id: &SessionId) -> SessionState {
        self.store.session(id).await.expect("read a session").state
    }

    /// Asserts that no host has promised more than it has.
    async fn assert_not_oversubscribed(&self) {
        for host in self.store.list_hosts().await.expect("list hosts") {
            assert!(
                host.allocated.memory <= host.capacity.memory,
                "host {} promised too much: {host:?}",
                host.name
            );
        }
    }
}

const SECOND: Duration = Duration::from_secs(1);
