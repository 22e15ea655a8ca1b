//! Proves: pause, resume and delete do what the table says; deletion is accepted in every state; each transitional
//! state has a deadline edge.

use cloister_types::session::{Reason, transition};

use super::*;
use crate::test_support::host_registration;

#[tokio::test]
async fn pause_gives_capacity_back_and_resume_takes_it_on_the_same_host() {
    let test = store!();
    test.host("a", ByteCount::mib(100)).await;
    let session = test.active("one").await;
    let requested = test.pause(&session.id, "pause").await;
    let op = requested.op.unwrap();
    assert_eq!((op.kind, op.session.state), (OpKind::Pause, SessionState::Pausing));
    assert!(op.epoch > session.epoch, "a new claim, a new epoch");
    assert!(test.pause(&session.id, "pause-2").await.repeated, "it is on its way");
    let paused = test.finish(&op, SessionEvent::PauseDone).await;
    assert_eq!((paused.state, paused.reason), (SessionState::Paused, Some(Reason::Requested)));
    assert_eq!(test.store.list_hosts().await.unwrap()[0].sandboxes, 0);

    // Somebody else takes the room: the session stays paused and says why; the request id is not used up.
    let other = test.active("other").await;
    let Resumed::Refused(refused) = test.resume(&session.id, "resume").await else {
        panic!("it was resumed")
    };
    assert_eq!((refused.state, refused.reason), (SessionState::Paused, Some(Reason::NoCapacity)));
    assert_eq!(refused.message, "cannot resume on its host: 1 host out of memory");
    let deleted = test.delete(&other.id, "delete").await;
    test.finish(&deleted.op.unwrap(), SessionEvent::Removed).await;
    let Resumed::Accepted(resumed) = test.resume(&session.id, "resume").await else {
        panic!("there is room")
    };
    let op = resumed.op.unwrap();
    assert_eq!((op.kind, op.session.state), (OpKind::Start, SessionState::Resuming));
    assert_eq!(op.session.host_id, session.host_id);
    assert_ne!(op.session.sandbox_id, session.sandbox_id, "a sandbox is never started twice");
    assert_eq!(test.started(&op).await.state, SessionState::Active);
    let Resumed::Accepted(again) = test.resume(&session.id, "resume").await else {
        panic!("the first answer")
    };
    assert!(again.repeated);
    assert_eq!(
        test.kinds(&session.id).await,
        [
            "session.created",
            "session.starting",
            "session.active",
            "session.pausing",
            "session.paused",
            "session.resume_refused",
            "session.resuming",
            "session.active",
        ]
    );
}

#[tokio::test]
async fn a_resume_waits_behind_a_session_that_was_queued_for_its_host() {
    let test = store!();
    test.host("a", ByteCount::mib(250)).await;
    let paused = test.paused("one").await;
    let running = test.active("two").await;
    let queued = test.create_one("three", &session_params(ByteCount::mib(200))).await;
    assert_eq!(queued.session.state, SessionState::Queued);
    let Resumed::Refused(refused) = test.resume(&paused.id, "resume").await else { panic!("it overtook") };
    assert_eq!(refused.message, "cannot resume on its host: 1 host wanted by earlier sessions");
    test.delete(&running.id, "delete").await;
    assert_eq!(test.store.admit_queued(&holder(), 10).await.unwrap().ops.len(), 1);
}

#[tokio::test]
async fn a_resume_on_a_host_that_is_gone_is_refused_with_the_reason() {
    let test = store!();
    test.host("a", ByteCount::gib(1)).await;
    let paused = test.paused("one").await;
    test.clock.advance(SECOND * 60);
    assert_eq!(test.store.mark_lost_hosts(SECOND * 5).await.unwrap().len(), 1);
    let Resumed::Refused(refused) = test.resume(&paused.id, "resume").await else { panic!("it was resumed") };
    assert_eq!(refused.reason, Some(Reason::NoHost));
    assert_eq!(refused.message, "cannot resume on its host: 1 host not connected");
}

#[tokio::test]
async fn delete_reaches_deleted_from_every_state() {
    let test = store!();
    test.host("a", ByteCount::gib(100)).await;
    for state in SessionState::ALL.iter().copied() {
        let name = state.as_str().replace('_', "-");
        let id = in_state(&test, state, &name).await;
        assert_eq!(test.state(&id).await, state, "the test did not get there");
        let before = test.store.session(&id).await.unwrap();
        let requested = test.delete(&id, &format!("delete-{name}")).await;
        let again = test.delete(&id, &format!("delete-{name}")).await;
        assert!(again.repeated && again.op.is_none());
        match state {
            SessionState::Deleted => assert!(requested.repeated),
            SessionState::Deleting => {
                assert!(requested.repeated);
                test.store.pass_deadlines(10).await.unwrap();
            }
            _ => {
                let op = requested.op.expect("something to do");
                assert!(op.epoch > before.epoch, "the running operation is fenced off");
                assert_eq!(requested.session.state, SessionState::Deleting);
                test.finish(&op, SessionEvent::Removed).await;
            }
        }
        if state == SessionState::Deleting {
            let op = test.store.claim_due_ops(&holder(), 100).await.unwrap();
            assert!(op.is_empty(), "it is leased");
            test.clock.advance(SECOND * 61);
            assert_eq!(test.store.pass_deadlines(10).await.unwrap().len(), 1);
            let mut ops = test.store.claim_due_ops(&holder(), 100).await.unwrap();
            test.finish(&ops.pop().unwrap(), SessionEvent::Removed).await;
        }
        assert_eq!(test.state(&id).await, SessionState::Deleted);
        assert_eq!(test.kinds(&id).await.last().unwrap(), "session.deleted");
    }
    assert_eq!(test.store.list_hosts().await.unwrap()[0].sandboxes, 0);
    assert!(test.store.claim_due_ops(&holder(), 100).await.unwrap().is_empty());
}

/// Brings a new session into a state by the operations that lead there.
async fn in_state(test: &TestStore, state: SessionState, name: &str) -> SessionId {
    let small = session_params(ByteCount::mib(100));
    match state {
        SessionState::Pending => {
            // No operation leaves one there; a row of an older version might be.
            let id = Box::pin(in_state(test, SessionState::Queued, name)).await;
            let mut connection = test.connection().await;
            sqlx::query("UPDATE sessions SET state = 'pending', queue_seq = NULL WHERE id = $1")
                .bind(id.as_str())
                .execute(&mut connection)
                .await
                .unwrap();
            id
        }
        SessionState::Queued => {
            // One that is too large for every host waits where none was connected when it came.
            let mut connection = test.connection().await;
            let connect = async |connection: &mut sqlx::PgConnection, connected: bool| {
                let update = sqlx::query("UPDATE hosts SET connected = $1").bind(connected);
                update.execute(connection).await.unwrap();
            };
            connect(&mut connection, false).await;
            let id = test.create_one(name, &session_params(ByteCount::gib(500))).await.session.id;
            connect(&mut connection, true).await;
            id
        }
        SessionState::Starting => test.create_one(name, &small).await.session.id,
        SessionState::Active => test.active(name).await.id,
        SessionState::Pausing => {
            let id = test.active(name).await.id;
            test.pause(&id, &format!("{name}-p")).await;
            id
        }
        SessionState::Paused => test.paused(name).await.id,
        SessionState::Resuming => {
            let id = test.paused(name).await.id;
            assert!(matches!(test.resume(&id, &format!("{name}-r")).await, Resumed::Accepted(_)));
            id
        }
        SessionState::HostLost => {
            let id = test.active(name).await.id;
            test.store
                .commit_transition(&TransitionParams::new(id.clone(), SessionEvent::HostLost))
                .await
                .unwrap();
            id
        }
        SessionState::Failed => {
            let op = test.create_one(name, &small).await.op.unwrap();
            test.finish(&op, SessionEvent::StartFailed).await.id
        }
        SessionState::Deleting => {
            let id = test.active(name).await.id;
            test.delete(&id, &format!("{name}-d")).await;
            id
        }
        SessionState::Deleted => {
            let id = Box::pin(in_state(test, SessionState::Deleting, name)).await;
            test.store
                .commit_transition(&TransitionParams::new(id.clone(), SessionEvent::Removed))
                .await
                .unwrap();
            id
        }
    }
}

#[tokio::test]
async fn every_transitional_state_is_given_up_at_its_deadline_and_no_other() {
    let test = store!();
    test.host("a", ByteCount::gib(100)).await;
    for state in SessionState::ALL.iter().copied() {
        let name = state.as_str().replace('_', "-");
        let id = in_state(&test, state, &name).await;
        if state == SessionState::Pending {
            let mut connection = test.connection().await;
            sqlx::query(
                "UPDATE sessions SET deadline_at = cloister_now() + interval '10 seconds' WHERE id = $1",
            )
            .bind(id.as_str())
            .execute(&mut connection)
            .await
            .unwrap();
        }
        let before = test.store.session(&id).await.unwrap();
        assert_eq!(before.deadline_at.is_some(), state.deadline().is_some(), "{state}");
        assert!(test.store.pass_deadlines(10).await.unwrap().is_empty(), "{state} was given up at once");
        test.clock.advance(state.deadline().unwrap_or(SECOND * 3600) + SECOND);
        let passed = test.store.pass_deadlines(10).await.unwrap();
        let Some(_) = state.deadline() else {
            assert!(passed.is_empty(), "{state} may last");
            continue;
        };
        assert_eq!(passed.len(), 1, "{state}");
        assert_eq!(passed[0].from, state);
        let after = &passed[0].session;
        assert_eq!(after.state, transition(state, SessionEvent::DeadlinePassed).unwrap().state);
        let reason = if after.state == state { before.reason } else { Some(Reason::DeadlineExceeded) };
        assert_eq!(after.reason, reason, "{state}");
        assert!(after.epoch > before.epoch, "the late step is fenced off");
        if state != SessionState::Pausing {
            // Out of the way of the next state's look.
            test.store
                .commit_transition(&TransitionParams::new(id.clone(), SessionEvent::Delete))
                .await
                .unwrap();
        }
        test.store.commit_transition(&TransitionParams::new(id.clone(), SessionEvent::Delete)).await.unwrap();
        test.store.commit_transition(&TransitionParams::new(id, SessionEvent::Removed)).await.unwrap();
    }
}

#[tokio::test]
async fn a_pause_that_lasts_too_long_starts_over_on_a_host_that_answers_and_waits_for_one_that_does_not() {
    let test = store!();
    let (host, _) = test.host("a", ByteCount::gib(1)).await;
    let session = test.active("one").await;
    let first = test.pause(&session.id, "pause").await.op.expect("a pause to do");
    test.clock.advance(SECOND * 61);
    let passed = test.store.pass_deadlines(10).await.unwrap();
    let after = &passed[0].session;
    assert_eq!((after.state, after.reason), (SessionState::Pausing, Some(Reason::Requested)));
    assert!(after.epoch > first.epoch, "the late stop is fenced off");
    let late = TransitionParams {
        epoch: Some(first.epoch),
        op_id: Some(first.id.clone()),
        ..TransitionParams::new(session.id.clone(), SessionEvent::PauseDone)
    };
    assert!(matches!(test.store.commit_transition(&late).await, Err(StoreError::Conflict { .. })));
    let claim = async {
        loop {
            // The refused step's transaction may hold the row until its rollback arrives: then it is passed over.
            match test.store.claim_due_ops(&holder(), 10).await.unwrap().pop() {
                Some(op) => return op,
                None => tokio::task::yield_now().await,
            }
        }
    };
    let again = tokio::time::timeout(SECOND * 30, claim).await.expect("the host is asked again");
    assert_eq!((again.kind, &again.session.id), (OpKind::Pause, &session.id));

    // Nobody answers: only then is it not known whether the sandbox runs.
    test.clock.advance(SECOND * 61);
    assert_eq!(test.store.mark_lost_hosts(SECOND * 5).await.unwrap().len(), 1);
    let passed = test.store.pass_deadlines(10).await.unwrap();
    let after = &passed[0].session;
    assert_eq!((after.state, after.reason), (SessionState::HostLost, Some(Reason::DeadlineExceeded)));
    assert!(after.epoch > again.epoch, "the late stop is fenced off");
    assert!(test.store.claim_due_ops(&holder(), 10).await.unwrap().is_empty(), "nothing is under way");

    // The host's report decides.
    let host = HostRegistration { id: host, ..host_registration(ByteCount::gib(1)) };
    let link = test.store.register_host(&host).await.unwrap();
    let kept = SandboxReport {
        session_id: session.id.clone(),
        sandbox_id: None,
        epoch: after.epoch,
        running: false,
        ended: None,
    };
    let cause = ReportCause::Connected;
    let outcome = test.store.reconcile_report(&host.id, link.link_epoch, cause, &[kept]).await.unwrap();
    assert_eq!(outcome.gone, std::slice::from_ref(&session.id));
    assert_eq!(test.state(&session.id).await, SessionState::Paused);
}

#[tokio::test]
async fn a_session_whose_time_ran_out_is_deleted_in_every_state() {
    let test = store!();
    test.host("a", ByteCount::gib(1)).await;
    let params = CreateSession { ttl: Some(SECOND * 30), ..session_params(ByteCount::mib(100)) };
    let running = test.create_one("one", &params).await;
    let queued = test
        .create_one(
            "two",
            &CreateSession {
                limits: Limits { memory: ByteCount::mib(1000), ..params.limits },
                ..params.clone()
            },
        )
        .await;
    assert!(test.store.expire_ttl(10).await.unwrap().is_empty());
    assert!(test.store.next_deadline_in().await.unwrap().is_some_and(|wait| wait <= SECOND * 30));
    test.clock.advance(SECOND * 31);
    let mut expired = test.store.expire_ttl(10).await.unwrap();
    expired.sort();
    assert_eq!(expired, [running.session.id.clone(), queued.session.id]);
    assert!(test.store.expire_ttl(10).await.unwrap().is_empty(), "once");
    let ops = test.store.claim_due_ops(&holder(), 10).await.unwrap();
    assert_eq!(ops.len(), 2);
    assert!(ops.iter().all(|op| op.kind == OpKind::Delete));
    let session = test.store.session(&running.session.id).await.unwrap();
    assert_eq!(session.reason, Some(Reason::Expired));
    let audit =
        test.store.list_audit(&session.organization_id, Some(session.id.as_str()), 1, None).await.unwrap();
    assert_eq!(audit.entries[0].principal, "system");
}

#[tokio::test]
async fn what_the_state_does_not_take_changes_nothing() {
    let test = store!();
    test.host("a", ByteCount::gib(1)).await;
    let created = test.create_one("one", &session_params(ByteCount::mib(100))).await;
    let before = test.store.session(&created.session.id).await.unwrap();
    for event in SessionEvent::ALL.iter().copied() {
        let params = TransitionParams::new(before.id.clone(), event);
        if transition(before.state, event).is_ok() && event != SessionEvent::Place {
            continue;
        }
        let error = test.store.commit_transition(&params).await.unwrap_err();
        assert!(matches!(error, StoreError::Illegal(_)), "{event}: {error}");
    }
    let context = test.context("session.pause", "pause");
    let error =
        test.store.request_pause(&context, &payload("p"), &holder(), before.id.as_str()).await.unwrap_err();
    assert!(matches!(error, StoreError::Illegal(_)), "{error}");
    assert_eq!(test.store.session(&before.id).await.unwrap(), before);
}

#[tokio::test]
async fn old_deleted_sessions_and_request_ids_are_pruned() {
    let test = store!();
    test.host("a", ByteCount::gib(1)).await;
    let deleted = in_state(&test, SessionState::Deleted, "gone").await;
    let kept = test.active("kept").await;
    assert_eq!(test.store.prune(SECOND * 3600, 100).await.unwrap(), 0);
    test.clock.advance(SECOND * 7200);
    assert!(test.store.prune(SECOND * 3600, 100).await.unwrap() > 1);
    assert!(matches!(test.store.session(&deleted).await, Err(StoreError::NotFound { .. })));
    assert_eq!(test.state(&kept.id).await, SessionState::Active);
}
