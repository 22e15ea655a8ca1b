//! Proves: only a live token speaks for its user, and every mutation is in the audit log.

use super::*;

#[tokio::test]
async fn the_owner_exists_from_the_start_and_its_token_follows_the_file() {
    let test = store!();
    let owner = test.store.authenticate(&TokenHash::of("test-owner")).await.unwrap().expect("the owner");
    assert_eq!((owner.organization_name.as_str(), owner.user_name.as_str()), ("default", "owner"));
    assert_eq!(owner.token_id, test.bootstrap.token_id);
    let again = test.another().await.bootstrap(&TokenHash::of("rotated")).await.unwrap();
    assert_eq!(again, test.bootstrap);
    assert_eq!(test.store.authenticate(&TokenHash::of("test-owner")).await.unwrap(), None);
    assert!(test.store.authenticate(&TokenHash::of("rotated")).await.unwrap().is_some());
    assert_eq!(test.store.authenticate(&TokenHash::of("")).await.unwrap(), None);
}

#[tokio::test]
async fn a_token_ends_by_expiry_or_revocation_and_its_request_id_never_makes_two() {
    let test = store!();
    let create = |request: &'static str, name: &'static str, secret: &'static str, ttl| {
        let context = test.context("token.create", request);
        let store = &test.store;
        async move { store.create_token(&context, &payload(name), name, &TokenHash::of(secret), ttl).await }
    };
    let first = create("r1", "ci", "secret-1", Some(SECOND * 60)).await.unwrap();
    assert!(!first.repeated);
    let repeated = create("r1", "ci", "secret-other", Some(SECOND * 60)).await.unwrap();
    assert!(repeated.repeated);
    assert_eq!(repeated.token.id, first.token.id);
    assert_eq!(test.store.authenticate(&TokenHash::of("secret-other")).await.unwrap(), None);
    assert!(matches!(create("r1", "other", "x", None).await, Err(StoreError::IdempotencyMismatch { .. })));
    let taken = create("r2", "ci", "secret-2", None).await.unwrap_err();
    assert!(
        matches!(&taken, StoreError::NameTaken { holder, .. } if holder == first.token.id.as_str()),
        "{taken}"
    );

    let bearer = TokenHash::of("secret-1");
    assert!(test.store.authenticate(&bearer).await.unwrap().is_some());
    let used = test.store.list_tokens(&test.bootstrap.user_id).await.unwrap();
    assert!(used.iter().find(|token| token.id == first.token.id).unwrap().last_used_at.is_some());
    test.clock.advance(SECOND * 61);
    assert_eq!(test.store.authenticate(&bearer).await.unwrap(), None, "it expired");
    // An expired token gives its name back.
    let second = create("r3", "ci", "secret-3", None).await.unwrap();
    let context = test.context("token.revoke", "r4");
    let revoked = test.store.revoke_token(&context, &payload("revoke"), "ci").await.unwrap();
    assert_eq!(revoked.id, second.token.id);
    assert!(revoked.revoked_at.is_some());
    assert_eq!(test.store.authenticate(&TokenHash::of("secret-3")).await.unwrap(), None);
    let again = test.store.revoke_token(&context, &payload("revoke"), "ci").await.unwrap();
    assert_eq!(again, revoked);
    let missing = test.store.revoke_token(&test.context("token.revoke", "r5"), &payload("x"), "nobody").await;
    assert!(matches!(missing, Err(StoreError::NotFound { .. })));
    let names: Vec<String> = test
        .store
        .list_tokens(&test.bootstrap.user_id)
        .await
        .unwrap()
        .into_iter()
        .map(|token| token.name)
        .collect();
    assert_eq!(names, ["ci", "ci", "local-owner"]);
    let audit = test.store.list_audit(&test.bootstrap.organization_id, None, 10, None).await.unwrap();
    let actions: Vec<String> = audit.entries.into_iter().map(|entry| entry.action).collect();
    assert_eq!(actions, ["token.revoke", "token.create", "token.create"], "once each, newest first");
}

#[tokio::test]
async fn an_exec_is_audited_exactly_when_its_session_runs() {
    let test = store!();
    test.host("a", ByteCount::gib(1)).await;
    let params = CreateSession { name: Some("web".to_owned()), ..session_params(ByteCount::mib(100)) };
    let op = test.create_one("one", &params).await.op.unwrap();
    let context = test.context("exec.start", "exec-1");
    let before = test.store.begin_exec(&context, "web").await.unwrap();
    assert_eq!(before.state, SessionState::Starting);
    let session = test.started(&op).await;
    let id = session.id.as_str();
    for reference in [id, "web", &id[..id.len() - 1], &id[4..]] {
        let target = test.store.begin_exec(&context, reference).await.unwrap();
        assert_eq!(target.session_id, session.id);
        assert_eq!((target.state, target.epoch), (SessionState::Active, session.epoch));
        assert_eq!(
            (target.host_id, target.sandbox_id, target.backend),
            (session.host_id.clone(), session.sandbox_id.clone(), session.backend)
        );
    }
    let missing = test.store.begin_exec(&context, "nothing").await;
    assert!(matches!(missing, Err(StoreError::NotFound { .. })));
    let page = test.store.list_audit(&session.organization_id, Some(id), 3, None).await.unwrap();
    assert!(page.entries.iter().all(|entry| entry.action == "exec.start"));
    let rest = test
        .store
        .list_audit(&session.organization_id, Some(id), 3, page.next_page_token.as_deref())
        .await
        .unwrap();
    let rest: Vec<String> = rest.entries.into_iter().map(|entry| entry.action).collect();
    assert_eq!(rest, ["exec.start", "session.create"], "four execs ran, the refused one left nothing");
    test.store.append_audit(&context, "hst_x").await.unwrap();
    let noted = test.store.list_audit(&session.organization_id, Some("hst_x"), 3, None).await.unwrap();
    assert_eq!(noted.entries.len(), 1);
    let bad = test.store.list_audit(&session.organization_id, None, 3, Some("x")).await;
    assert!(matches!(bad, Err(StoreError::PageToken)));
}
