//! Proves: a session is found by what people call it, and pages neither repeat nor hide.

use cloister_types::OrganizationId;

use super::*;

#[tokio::test]
async fn a_session_is_found_by_id_prefix_and_name_and_an_ambiguous_prefix_says_so() {
    let test = store!();
    test.host("a", ByteCount::gib(10)).await;
    let organization = &test.bootstrap.organization_id;
    let params = CreateSession { name: Some("web".to_owned()), ..session_params(ByteCount::mib(100)) };
    let first = test.create_one("one", &params).await.session;
    let second = test.create_one("two", &session_params(ByteCount::mib(100))).await.session;
    let resolve = |reference: String| {
        let store = &test.store;
        async move { store.resolve_session(organization, &reference).await }
    };
    assert_eq!(resolve("web".to_owned()).await.unwrap().id, first.id);
    assert_eq!(resolve(second.id.to_string()).await.unwrap().id, second.id);
    let shared = first
        .id
        .as_str()
        .bytes()
        .zip(second.id.as_str().bytes())
        .take_while(|(left, right)| left == right)
        .count();
    assert_eq!(resolve(first.id.as_str()[..=shared].to_owned()).await.unwrap().id, first.id);
    assert_eq!(resolve(first.id.as_str()[4..=shared].to_owned()).await.unwrap().id, first.id);
    let error = resolve(first.id.as_str()[..shared].to_owned()).await.unwrap_err();
    assert!(matches!(&error, StoreError::Ambiguous { candidates, .. } if candidates.len() == 2), "{error}");
    for nothing in ["", "w", "nobody", "ses_", "%", "ses_%", "'; DROP TABLE sessions; --", "we\0b"] {
        let result = resolve(nothing.to_owned()).await;
        assert!(matches!(result, Err(StoreError::NotFound { .. })), "`{nothing}`: {result:?}");
    }
    let stranger = OrganizationId::generate();
    let foreign = test.store.resolve_session(&stranger, first.id.as_str()).await;
    assert!(matches!(foreign, Err(StoreError::NotFound { .. })), "another organization's");
    let op = test.delete(&first.id, "delete").await.op.unwrap();
    test.finish(&op, SessionEvent::Removed).await;
    assert!(matches!(resolve("web".to_owned()).await, Err(StoreError::NotFound { .. })));
    assert_eq!(resolve(first.id.to_string()).await.unwrap().state, SessionState::Deleted);
    assert_eq!(resolve(first.id.as_str()[..shared].to_owned()).await.unwrap().id, second.id);
}

#[tokio::test]
async fn pages_go_on_after_the_last_session_whatever_happens_meanwhile() {
    let test = store!();
    test.host("a", ByteCount::gib(10)).await;
    let organization = &test.bootstrap.organization_id;
    let mut made = Vec::new();
    for index in 0..7 {
        let labels = BTreeMap::from([("parity".to_owned(), (index % 2).to_string())]);
        let params = CreateSession { labels, ..session_params(ByteCount::mib(20)) };
        made.push(test.create_one(&format!("c{index}"), &params).await.session.id);
    }
    let all = SessionFilter::default();
    let page = test.store.list_sessions(organization, &all, 3, None).await.unwrap();
    let ids = |page: &SessionPage| page.sessions.iter().map(|session| session.id.clone()).collect::<Vec<_>>();
    assert_eq!(ids(&page), [made[6].clone(), made[5].clone(), made[4].clone()]);
    // One comes, one goes.
    test.create_one("new", &session_params(ByteCount::mib(20))).await;
    let op = test.delete(&made[5], "delete").await.op.unwrap();
    test.finish(&op, SessionEvent::Removed).await;
    let second =
        test.store.list_sessions(organization, &all, 4, page.next_page_token.as_deref()).await.unwrap();
    assert_eq!(ids(&second), [made[3].clone(), made[2].clone(), made[1].clone(), made[0].clone()]);
    assert_eq!(second.next_page_token, None, "exactly the last page");

    let odd =
        SessionFilter { labels: BTreeMap::from([("parity".to_owned(), "1".to_owned())]), states: vec![] };
    let page = test.store.list_sessions(organization, &odd, 100, None).await.unwrap();
    assert_eq!(ids(&page), [made[3].clone(), made[1].clone()], "the deleted one is not shown");
    let odd_deleted = SessionFilter { states: vec![SessionState::Deleted], ..odd };
    let page = test.store.list_sessions(organization, &odd_deleted, 100, None).await.unwrap();
    assert_eq!(ids(&page), [made[5].clone()]);
    let bad = test.store.list_sessions(organization, &all, 10, Some("ses_x")).await;
    assert!(matches!(bad, Err(StoreError::PageToken)));
}

#[tokio::test]
async fn what_a_hostile_guest_calls_itself_is_kept_without_nul_and_bounded() {
    let test = store!();
    test.host("a\0b", ByteCount::gib(1)).await;
    let op = test.create_one("one", &session_params(ByteCount::mib(100))).await.op.unwrap();
    let hostile = IsolationFact { name: "kernel\0".to_owned(), value: "x".repeat(1_000_000) };
    let params = TransitionParams {
        epoch: Some(op.epoch),
        op_id: Some(op.id.clone()),
        started: Some(StartedFacts { facts: vec![hostile; 1000], ..facts() }),
        message: "\0".to_owned(),
        ..TransitionParams::new(op.session.id.clone(), SessionEvent::Started)
    };
    let session = test.store.commit_transition(&params).await.unwrap();
    assert_eq!((session.facts.len(), session.message.as_str()), (256, "\u{fffd}"));
    assert_eq!((session.facts[0].name.as_str(), session.facts[0].value.len()), ("kernel\u{fffd}", 4096));
    let gone = TransitionParams {
        message: "killed\0".repeat(10_000),
        ..TransitionParams::new(session.id.clone(), SessionEvent::SandboxGone)
    };
    assert_eq!(test.store.commit_transition(&gone).await.unwrap().message.chars().count(), 4096);
    test.store.append_session_event(&session.id, "session.note", "a\0b").await.unwrap();
    assert!(matches!(test.store.resolve_host("a\0b").await, Err(StoreError::NotFound { .. })));
}

#[tokio::test]
async fn events_are_read_from_a_cursor_and_notes_change_no_state() {
    let test = store!();
    test.host("a", ByteCount::gib(1)).await;
    let session = test.active("one").await;
    let cursor = test.store.append_session_event(&session.id, "session.note", "no network").await.unwrap();
    assert_eq!(cursor, 4);
    let events = test.store.session_events_after(&session.id, 2, 10).await.unwrap();
    assert_eq!(events.iter().map(|event| event.cursor).collect::<Vec<_>>(), [3, 4]);
    assert_eq!((events[1].state, events[1].message.as_str()), (SessionState::Active, "no network"));
    assert_eq!(test.store.session_events_after(&session.id, 0, 1).await.unwrap().len(), 1);
    assert!(test.store.session_events_after(&session.id, 4, 10).await.unwrap().is_empty());
    let missing = test.store.append_session_event(&SessionId::generate(), "session.note", "").await;
    assert!(matches!(missing, Err(StoreError::NotFound { .. })));
}
