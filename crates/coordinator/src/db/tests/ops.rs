//! Proves: an operation has one holder at a time, and everybody else is refused.

use futures::future::join_all;

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_expired_lease_is_claimed_once_with_a_higher_epoch_and_the_old_holder_is_refused() {
    let test = store!();
    test.host("a", ByteCount::gib(1)).await;
    let created = test.create_one("one", &session_params(ByteCount::mib(100))).await;
    let old = created.op.unwrap();
    assert!(test.store.claim_due_ops(&holder(), 10).await.unwrap().is_empty(), "the creator holds it");
    assert!(test.store.next_op_due_in().await.unwrap().unwrap() > SECOND * 10);
    test.clock.advance(SECOND * 16);
    let others: Vec<LeaseHolder> = (0..8).map(|index| LeaseHolder(format!("other-{index}"))).collect();
    let claims = join_all(others.iter().map(|other| test.store.claim_due_ops(other, 10))).await;
    let claims: Vec<(usize, ClaimedOp)> = claims
        .into_iter()
        .enumerate()
        .flat_map(|(index, ops)| ops.unwrap().into_iter().map(move |op| (index, op)))
        .collect();
    assert_eq!(claims.len(), 1, "claimed once by eight");
    let (index, new) = &claims[0];
    assert_eq!((&new.id, new.attempts, new.epoch), (&old.id, 2, old.epoch + 1));
    assert_eq!(new.session.epoch, new.epoch);

    // The old holder wakes up.
    let is_conflict = |result: Result<(), StoreError>| matches!(result, Err(StoreError::Conflict { .. }));
    assert!(is_conflict(test.store.renew_op_lease(&holder(), &old).await.map(|_| ())));
    assert!(is_conflict(test.store.retry_op_later(&holder(), &old, SECOND, "late").await));
    let late = TransitionParams {
        epoch: Some(old.epoch),
        op_id: Some(old.id.clone()),
        started: Some(facts()),
        ..TransitionParams::new(old.session.id.clone(), SessionEvent::Started)
    };
    assert!(is_conflict(test.store.commit_transition(&late).await.map(|_| ())));
    assert_eq!(test.state(&old.session.id).await, SessionState::Starting);

    let renewed = test.store.renew_op_lease(&others[*index], new).await.unwrap();
    assert!(renewed >= new.lease_expires_at);
    assert_eq!(test.started(new).await.state, SessionState::Active);
    assert!(is_conflict(test.store.renew_op_lease(&others[*index], new).await.map(|_| ())), "it is done");
}

#[tokio::test]
async fn a_retried_operation_waits_keeps_its_error_and_is_hastened_when_its_host_comes() {
    let test = store!();
    let (host, _) = test.host("a", ByteCount::gib(1)).await;
    let op = test.create_one("one", &session_params(ByteCount::mib(100))).await.op.unwrap();
    test.store.retry_op_later(&holder(), &op, SECOND * 30, "host is not connected").await.unwrap();
    assert!(test.store.claim_due_ops(&holder(), 10).await.unwrap().is_empty());
    let due = test.store.next_op_due_in().await.unwrap().unwrap();
    assert!(due > SECOND * 25 && due <= SECOND * 30, "{due:?}");
    assert_eq!(test.store.hasten_ops_of_host(&host).await.unwrap(), std::slice::from_ref(&op.session.id));
    let ops = test.store.claim_due_ops(&holder(), 10).await.unwrap();
    assert_eq!(ops.len(), 1);
    assert_eq!((ops[0].attempts, ops[0].last_error.as_str()), (2, "host is not connected"));
    assert!(test.store.hasten_ops_of_host(&host).await.unwrap().is_empty(), "it is claimed");
}

#[tokio::test]
async fn what_a_dead_coordinator_had_in_hand_is_due_at_once() {
    let test = store!();
    test.host("a", ByteCount::gib(1)).await;
    let mine = test.create_one("mine", &session_params(ByteCount::mib(100))).await.op.unwrap();
    assert_eq!(test.store.end_leases(&LeaseHolder("another".to_owned())).await.unwrap(), 0);
    assert!(test.store.claim_due_ops(&holder(), 10).await.unwrap().is_empty());
    assert_eq!(test.store.end_leases(&holder()).await.unwrap(), 1);
    let next = LeaseHolder("next".to_owned());
    let claimed = test.store.claim_due_ops(&next, 10).await.unwrap();
    assert_eq!(claimed.iter().map(|op| &op.id).collect::<Vec<_>>(), [&mine.id]);
    // Were it alive after all, it would be told.
    let late = test.store.renew_op_lease(&holder(), &mine).await;
    assert!(matches!(late, Err(StoreError::Conflict { .. })));
    assert_eq!(test.started(&claimed[0]).await.state, SessionState::Active);
}

#[tokio::test]
async fn an_end_that_was_seen_before_the_sandbox_was_made_again_changes_nothing() {
    let test = store!();
    test.host("a", ByteCount::gib(1)).await;
    let first = test.create_one("one", &session_params(ByteCount::mib(100))).await.op.unwrap();
    let gone = |seen_epoch| TransitionParams {
        sandbox_id: first.session.sandbox_id.clone(),
        seen_epoch: Some(seen_epoch),
        ..TransitionParams::new(first.session.id.clone(), SessionEvent::SandboxGone)
    };
    // The host lost what it had made, and told so; the operation is done again meanwhile.
    test.store.end_leases(&holder()).await.unwrap();
    let second = test.store.claim_due_ops(&holder(), 1).await.unwrap().pop().unwrap();
    assert_eq!(second.session.sandbox_id, first.session.sandbox_id);
    let early = test.store.commit_transition(&gone(first.epoch)).await;
    assert!(matches!(early, Err(StoreError::Conflict { .. })), "{early:?}");
    test.started(&second).await;
    let late = test.store.commit_transition(&gone(first.epoch)).await;
    assert!(matches!(late, Err(StoreError::Conflict { .. })), "{late:?}");
    // This one is about the sandbox that runs.
    let ended = test.store.commit_transition(&gone(second.epoch)).await.unwrap();
    assert_eq!(ended.state, SessionState::Paused);
}

#[tokio::test]
async fn a_deletion_takes_the_running_operations_place() {
    let test = store!();
    test.host("a", ByteCount::gib(1)).await;
    let start = test.create_one("one", &session_params(ByteCount::mib(100))).await.op.unwrap();
    let delete = test.delete(&start.session.id, "delete").await.op.unwrap();
    assert_ne!(delete.id, start.id);
    // The start ends late, and changes nothing.
    let late = TransitionParams {
        epoch: Some(start.epoch),
        op_id: Some(start.id.clone()),
        started: Some(facts()),
        ..TransitionParams::new(start.session.id.clone(), SessionEvent::Started)
    };
    assert!(matches!(test.store.commit_transition(&late).await, Err(StoreError::Conflict { .. })));
    // Even when only the operation tells them apart.
    let late = TransitionParams { epoch: None, event: SessionEvent::Removed, ..late };
    assert!(matches!(test.store.commit_transition(&late).await, Err(StoreError::Conflict { .. })));
    assert_eq!(test.finish(&delete, SessionEvent::Removed).await.state, SessionState::Deleted);
    let mut connection = test.connection().await;
    let states: Vec<String> = sqlx::query_scalar("SELECT state FROM session_ops ORDER BY id")
        .fetch_all(&mut connection)
        .await
        .unwrap();
    assert_eq!(states, ["superseded", "done"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn two_coordinators_in_a_race_leave_every_session_where_its_log_says() {
    let test = store!();
    test.host("a", ByteCount::mib(500)).await;
    let other = test.another().await;
    let params = session_params(ByteCount::mib(100));
    join_all((0..16).map(|index| {
        let (test, other, params) = (&test, &other, &params);
        async move {
            let id = test.create_one(&format!("c{index}"), params).await.session.id;
            let (mine, theirs) = (holder(), LeaseHolder("b".to_owned()));
            // Deleted, admitted, claimed and given up at once, by two.
            let delete = async { test.delete(&id, &format!("d{index}")).await };
            let (_, admitted, claimed, passed) = tokio::join!(
                delete,
                other.admit_queued(&theirs, 3),
                test.store.claim_due_ops(&mine, 3),
                other.pass_deadlines(3),
            );
            admitted.unwrap();
            claimed.unwrap();
            passed.unwrap();
        }
    }))
    .await;
    test.assert_not_oversubscribed().await;
    test.clock.advance(SECOND * 20);
    loop {
        let ops = test.store.claim_due_ops(&holder(), 100).await.unwrap();
        if ops.is_empty() {
            break;
        }
        for op in ops {
            assert_eq!(op.kind, OpKind::Delete);
            test.finish(&op, SessionEvent::Removed).await;
        }
    }
    let filter = SessionFilter { states: vec![SessionState::Deleted], ..SessionFilter::default() };
    let page = test.store.list_sessions(&test.bootstrap.organization_id, &filter, 100, None).await.unwrap();
    assert_eq!(page.sessions.len(), 16);
    for session in page.sessions {
        assert_eq!(test.kinds(&session.id).await.last().unwrap(), "session.deleted");
    }
}
