//! Proves: capacity is never promised twice, the queue is first in first out, a request id gives the first answer.

use cloister_types::session::Reason;
use futures::future::join_all;

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn parallel_creates_never_promise_more_than_a_host_has() {
    let test = store!();
    test.host("a", ByteCount::mib(450)).await;
    test.host("b", ByteCount::mib(350)).await;
    let params = session_params(ByteCount::mib(100));
    let created = join_all((0..20).map(|index| {
        let (test, params) = (&test, &params);
        async move { test.create_one(&format!("create-{index}"), params).await }
    }))
    .await;
    let placed = created.iter().filter(|created| created.session.state == SessionState::Starting).count();
    assert_eq!(placed, 7, "four fit on one host and three on the other");
    assert!(
        created
            .iter()
            .all(|created| created.op.is_some() == (created.session.state == SessionState::Starting))
    );
    for created in created.iter().filter(|created| created.op.is_none()) {
        assert_eq!(created.session.state, SessionState::Queued);
        assert_eq!(created.session.reason, Some(Reason::NoCapacity));
        assert!(created.session.message.contains("2 hosts"), "{}", created.session.message);
        assert_eq!(test.kinds(&created.session.id).await, ["session.created", "session.queued"]);
    }
    test.assert_not_oversubscribed().await;
    // Nothing fits, so nothing is admitted; then one goes and one comes.
    assert!(test.store.admit_queued(&holder(), 100).await.unwrap().ops.is_empty());
    let first = created.iter().find(|created| created.op.is_some()).unwrap();
    test.delete(&first.session.id, "delete-first").await;
    let other = LeaseHolder("b".to_owned());
    let others = join_all((0..5).map(|_| test.store.admit_queued(&other, 100))).await;
    let admitted: usize = others.into_iter().map(|admitted| admitted.unwrap().ops.len()).sum();
    assert_eq!(admitted, 1, "five coordinators admit one session once");
    test.assert_not_oversubscribed().await;
}

#[tokio::test]
async fn nobody_overtakes_an_earlier_queued_session_and_the_queue_is_admitted_in_order() {
    let test = store!();
    // One that no host could ever run waits for a host, and is in nobody's way.
    let giant = test.create_one("giant", &session_params(ByteCount::gib(100))).await;
    assert_eq!(giant.session.reason, Some(Reason::NoHost));
    test.host("a", ByteCount::mib(300)).await;
    let running = test.create_one("running", &session_params(ByteCount::mib(200))).await;
    let large = test.create_one("large", &session_params(ByteCount::mib(250))).await;
    // It would fit, and waits all the same.
    let small = test.create_one("small", &session_params(ByteCount::mib(50))).await;
    let smaller = test.create_one("smaller", &session_params(ByteCount::mib(20))).await;
    assert_eq!(large.session.message, "1 host out of memory");
    assert_eq!(small.session.message, "1 host wanted by earlier sessions");
    // With hosts there, the same is refused, since waiting would not help.
    let params = session_params(ByteCount::gib(100));
    let context = test.context("session.create", "second-giant");
    let refused = test.store.create_session(&context, &payload("second-giant"), &holder(), &params).await;
    assert_eq!(
        refused.map(|_| ()).unwrap_err().to_string(),
        "no host can hold 100 GiB of memory: the most is 300 MiB"
    );
    assert!(test.store.admit_queued(&holder(), 10).await.unwrap().ops.is_empty());

    test.delete(&running.session.id, "delete").await;
    let first = test.store.admit_queued(&holder(), 1).await.unwrap();
    assert!(first.ops.len() == 1 && first.ops[0].session.id == large.session.id);
    assert!(first.more);
    let rest = test.store.admit_queued(&holder(), 10).await.unwrap();
    let admitted: Vec<_> = rest.ops.iter().map(|op| op.session.id.clone()).collect();
    assert_eq!(admitted, [small.session.id], "300 MiB hold 250 and 50");
    assert!(!rest.more);
    let waiting = test.store.session(&smaller.session.id).await.unwrap();
    assert_eq!((waiting.state, waiting.message.as_str()), (SessionState::Queued, "1 host out of memory"));
    assert_eq!(
        test.kinds(&large.session.id).await,
        ["session.created", "session.queued", "session.starting"]
    );
    let placed = &first.ops[0];
    assert_eq!(placed.session.backend.map(|kind| kind.as_str()), Some("namespace"));
    assert_eq!((placed.attempts, placed.kind), (1, OpKind::Start));
    test.assert_not_oversubscribed().await;
}

#[tokio::test]
async fn a_request_id_gives_the_first_answer_after_a_crash_and_refuses_another_payload() {
    let test = store!();
    test.host("a", ByteCount::gib(10)).await;
    let params = session_params(ByteCount::mib(100));
    let first = test.create_one("same", &params).await;
    // Another coordinator after the first one was killed.
    let other = test.another().await;
    let context = test.context("session.create", "same");
    let again = other.create_session(&context, &payload("create"), &holder(), &params).await.unwrap();
    assert!(again.repeated && again.op.is_none());
    assert_eq!(again.session.id, first.session.id);
    let error = other.create_session(&context, &payload("other"), &holder(), &params).await.unwrap_err();
    assert!(matches!(error, StoreError::IdempotencyMismatch { .. }), "{error}");
    let page = test
        .store
        .list_sessions(&test.bootstrap.organization_id, &SessionFilter::default(), 100, None)
        .await
        .unwrap();
    assert_eq!(page.sessions.len(), 1);
    // A refusal uses no request id up.
    let impossible = CreateSession { isolation_floor: Isolation::Microvm, ..params.clone() };
    let context = test.context("session.create", "later");
    let error = test.store.create_session(&context, &payload("x"), &holder(), &impossible).await.unwrap_err();
    assert!(
        matches!(&error, StoreError::NotOffered { offered, .. } if offered == &["sim", "namespace"]),
        "{error}"
    );
    test.store.create_session(&context, &payload("y"), &holder(), &params).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn one_request_id_sent_many_times_at_once_makes_one_session() {
    let test = store!();
    test.host("a", ByteCount::gib(10)).await;
    let params = session_params(ByteCount::mib(100));
    let created = join_all((0..12).map(|_| test.create_one("same", &params))).await;
    assert_eq!(created.iter().filter(|created| !created.repeated).count(), 1);
    assert!(created.iter().all(|other| other.session.id == created[0].session.id));
}

#[tokio::test]
async fn a_name_belongs_to_one_undeleted_session() {
    let test = store!();
    test.host("a", ByteCount::gib(10)).await;
    let params = CreateSession { name: Some("web".to_owned()), ..session_params(ByteCount::mib(100)) };
    let first = test.create_one("first", &params).await;
    let context = test.context("session.create", "second");
    let error =
        test.store.create_session(&context, &payload("create"), &holder(), &params).await.unwrap_err();
    assert!(
        matches!(&error, StoreError::NameTaken { holder, .. } if holder == first.session.id.as_str()),
        "{error}"
    );
    let deleted = test.delete(&first.session.id, "delete").await;
    test.finish(&deleted.op.unwrap(), SessionEvent::Removed).await;
    let second = test.create_one("second", &params).await;
    assert!(!second.repeated, "the refused request left no key");
}

#[tokio::test]
async fn without_a_host_a_session_waits_for_one() {
    let test = store!();
    let created = test.create_one("early", &session_params(ByteCount::mib(100))).await;
    assert_eq!(created.session.reason, Some(Reason::NoHost));
    assert_eq!(created.session.message, "no host is registered: start one with `cloister host`");
    test.host("a", ByteCount::gib(1)).await;
    let admitted = test.store.admit_queued(&holder(), 10).await.unwrap();
    assert_eq!(admitted.ops.len(), 1);
    assert_eq!(test.started(&admitted.ops[0]).await.state, SessionState::Active);
}

#[tokio::test]
async fn create_and_start_are_the_whole_path_with_audit_and_log() {
    let test = store!();
    test.host("a", ByteCount::gib(1)).await;
    let session = test.active("one").await;
    assert_eq!(session.state, SessionState::Active);
    assert_eq!(
        (session.isolation, session.facts.len(), session.network),
        (Some(Isolation::Container), 1, false)
    );
    assert_eq!((session.reason, session.deadline_at), (None, None));
    assert_eq!(test.kinds(&session.id).await, ["session.created", "session.starting", "session.active"]);
    let audit =
        test.store.list_audit(&test.bootstrap.organization_id, Some(session.id.as_str()), 10, None).await;
    let entries = audit.unwrap().entries;
    assert_eq!(entries.len(), 1);
    assert_eq!((entries[0].action.as_str(), entries[0].request_id.as_str()), ("session.create", "one"));
    assert!(test.store.claim_due_ops(&holder(), 10).await.unwrap().is_empty(), "the start is done");
}
