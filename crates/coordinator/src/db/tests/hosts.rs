//! Proves: a silent host is declared lost, and its report puts every session where it really is.

use cloister_types::session::Reason;
use cloister_types::{Capability, HostId, SandboxId};

use super::*;
use crate::test_support::host_registration;

fn report(session: &SessionRecord, running: bool) -> SandboxReport {
    SandboxReport {
        session_id: session.id.clone(),
        // A host that has only the layer left does not know which sandbox it was.
        sandbox_id: running.then(|| session.sandbox_id.clone().unwrap()),
        epoch: session.epoch,
        running,
        ended: None,
    }
}

#[tokio::test]
async fn a_silent_host_is_lost_once_and_its_heartbeat_is_refused_until_it_registers() {
    let test = store!();
    let registration = host_registration(ByteCount::gib(1));
    let first = test.store.register_host(&registration).await.unwrap();
    assert!(!first.rebooted);
    let session = test.active("one").await;
    let starting = test.create_one("two", &session_params(ByteCount::mib(100))).await.session;
    test.clock.advance(SECOND * 14);
    test.store.heartbeat_host(&registration.id, first.link_epoch, None).await.unwrap();
    test.clock.advance(SECOND * 14);
    assert!(test.store.mark_lost_hosts(SECOND * 5).await.unwrap().is_empty(), "two heartbeats are not three");
    test.clock.advance(SECOND * 2);
    let lost = test.store.mark_lost_hosts(SECOND * 5).await.unwrap();
    assert_eq!(lost, [LostHost { host_id: registration.id.clone(), sessions: vec![session.id.clone()] }]);
    assert!(test.store.mark_lost_hosts(SECOND * 5).await.unwrap().is_empty(), "once");
    let lost = test.store.session(&session.id).await.unwrap();
    assert_eq!((lost.state, lost.reason), (SessionState::HostLost, Some(Reason::HostUnreachable)));
    assert_eq!(test.state(&starting.id).await, SessionState::Starting, "its deadline decides");
    assert!(!test.store.list_hosts().await.unwrap()[0].connected);
    let late = test.store.heartbeat_host(&registration.id, first.link_epoch, None).await;
    assert!(matches!(late, Err(StoreError::Conflict { .. })));

    // It was only slow: the sandbox still runs.
    let second = test.store.register_host(&registration).await.unwrap();
    assert!(second.link_epoch > first.link_epoch && !second.rebooted);
    let reports = [report(&session, true)];
    let outdated = test
        .store
        .reconcile_report(&registration.id, first.link_epoch, ReportCause::Connected, &reports)
        .await;
    assert!(matches!(outdated, Err(StoreError::Conflict { .. })));
    let outcome = test
        .store
        .reconcile_report(&registration.id, second.link_epoch, ReportCause::Connected, &reports)
        .await
        .unwrap();
    assert_eq!(outcome, ReportOutcome { found: vec![session.id.clone()], ..ReportOutcome::default() });
    assert_eq!(test.state(&session.id).await, SessionState::Active);
    let again = test
        .store
        .reconcile_report(&registration.id, second.link_epoch, ReportCause::Connected, &reports)
        .await
        .unwrap();
    assert_eq!(again, ReportOutcome::default(), "the second run changes nothing");
}

#[tokio::test]
async fn a_report_puts_every_session_where_it_really_is() {
    let test = store!();
    let registration = host_registration(ByteCount::gib(10));
    test.store.register_host(&registration).await.unwrap();
    let kept = test.active("kept").await;
    let gone = test.active("gone").await;
    let replaced = test.active("replaced").await;
    let paused = test.paused("paused").await;
    let pausing = test.active("pausing").await;
    test.pause(&pausing.id, "pausing-pause").await;
    let starting = test.create_one("starting", &session_params(ByteCount::mib(100))).await.session;
    let failed_op = test.create_one("failed", &session_params(ByteCount::mib(100))).await.op.unwrap();
    let failed = test.finish(&failed_op, SessionEvent::StartFailed).await;
    let deleted = test.active("deleted").await;
    let op = test.delete(&deleted.id, "delete").await.op.unwrap();
    test.finish(&op, SessionEvent::Removed).await;
    let unknown = SandboxReport {
        session_id: SessionId::generate(),
        sandbox_id: Some(SandboxId::generate()),
        epoch: 1,
        running: true,
        ended: None,
    };
    let reports = [
        report(&kept, true),
        report(&gone, false),
        SandboxReport { sandbox_id: Some(SandboxId::generate()), ..report(&replaced, true) },
        report(&paused, true),
        report(&failed, true),
        report(&deleted, true),
        unknown.clone(),
    ];
    let rebooted = crate::db::HostRegistration { boot_id: "boot-2".to_owned(), ..registration };
    let link = test.store.register_host(&rebooted).await.unwrap();
    assert!(link.rebooted);
    let mut outcome = test
        .store
        .reconcile_report(&rebooted.id, link.link_epoch, ReportCause::Rebooted, &reports)
        .await
        .unwrap();
    outcome.remove.sort();
    let mut remove = vec![failed.id.clone(), deleted.id.clone(), unknown.session_id];
    remove.sort();
    assert_eq!(outcome.remove, remove);
    let mut gone_ids = vec![gone.id.clone(), replaced.id.clone(), pausing.id.clone()];
    gone_ids.sort();
    outcome.gone.sort();
    assert_eq!(outcome.gone, gone_ids);
    let stopped: Vec<_> = outcome.stop.iter().map(|stale| stale.session_id.clone()).collect();
    assert_eq!(stopped, [replaced.id.clone(), paused.id.clone()]);
    assert!(outcome.found.is_empty());
    assert_eq!(test.state(&kept.id).await, SessionState::Active);
    let gone = test.store.session(&gone.id).await.unwrap();
    assert_eq!((gone.state, gone.reason), (SessionState::Paused, Some(Reason::HostRebooted)));
    assert_eq!(test.state(&pausing.id).await, SessionState::Paused);
    assert_eq!(test.state(&starting.id).await, SessionState::Starting, "its operation decides");
    let events = test.store.session_events_after(&gone.id, 3, 10).await.unwrap();
    assert_eq!(events[0].reason, Some(Reason::HostRebooted));
}

#[tokio::test]
async fn a_late_report_about_an_earlier_sandbox_is_refused() {
    let test = store!();
    test.host("a", ByteCount::gib(1)).await;
    let session = test.active("one").await;
    let params = TransitionParams {
        sandbox_id: Some(SandboxId::generate()),
        ..TransitionParams::new(session.id.clone(), SessionEvent::SandboxGone)
    };
    assert!(matches!(test.store.commit_transition(&params).await, Err(StoreError::Conflict { .. })));
    let params = TransitionParams {
        sandbox_id: session.sandbox_id.clone(),
        reason: Some(Reason::OutOfMemory),
        message: "it used more than 100 MiB".to_owned(),
        ..params
    };
    let paused = test.store.commit_transition(&params).await.unwrap();
    assert_eq!((paused.state, paused.reason), (SessionState::Paused, Some(Reason::OutOfMemory)));
    assert!(matches!(test.store.commit_transition(&params).await, Err(StoreError::Illegal(_))), "once");
}

#[tokio::test]
async fn hosts_are_listed_with_what_they_promised_and_found_by_id_prefix_and_name() {
    let test = store!();
    let (a, link) = test.host("alpha", ByteCount::gib(1)).await;
    let (b, _) = test.host("beta", ByteCount::gib(1)).await;
    test.active("one").await;
    test.active("two").await;
    let hosts = test.store.list_hosts().await.unwrap();
    assert_eq!(hosts.iter().map(|host| host.name.as_str()).collect::<Vec<_>>(), ["alpha", "beta"]);
    assert_eq!(hosts[0].allocated.memory, ByteCount::mib(200), "best fit fills one");
    assert_eq!((hosts[0].sandboxes, hosts[1].sandboxes), (2, 0));
    assert_eq!(test.store.resolve_host("beta").await.unwrap().id, b);
    assert_eq!(test.store.resolve_host(a.as_str()).await.unwrap().name, "alpha");
    assert!(matches!(test.store.resolve_host("gamma").await, Err(StoreError::NotFound { .. })));
    let shared: String =
        a.as_str().chars().zip(b.as_str().chars()).take_while(|(x, y)| x == y).map(|(x, _)| x).collect();
    assert!(matches!(test.store.resolve_host(&shared).await, Err(StoreError::Ambiguous { .. })));

    test.store.cordon_host(&a, true).await.unwrap();
    let third = test.active("three").await;
    assert_eq!(third.host_id, Some(b.clone()), "the fuller host is cordoned");
    let failed = [Capability::failed("backend.namespace", "no user namespaces", "allow them")];
    test.store.heartbeat_host(&a, link, Some(&failed)).await.unwrap();
    assert_eq!(test.store.resolve_host("alpha").await.unwrap().capabilities, failed);
    let missing = test.store.cordon_host(&HostId::generate(), true).await;
    assert!(matches!(missing, Err(StoreError::NotFound { .. })));
}

#[tokio::test]
async fn a_dead_coordinators_host_is_not_shown_as_connected_and_still_gets_sessions() {
    let test = store!();
    let dead = test.another().await;
    let registration = host_registration(ByteCount::gib(1));
    dead.register_host(&registration).await.unwrap();
    let shown = async || test.store.resolve_host(&registration.name).await.unwrap().connected;
    assert!(shown().await, "another coordinator, which lives, holds the link");
    assert!(test.store.list_hosts().await.unwrap()[0].connected);
    dead.close().await;
    let ends = async {
        while shown().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(SECOND * 10, ends).await.expect("it is not connected once its coordinator is gone");
    assert!(!test.store.list_hosts().await.unwrap()[0].connected);
    // Its heartbeats are not missed yet: what it will do in a moment is not refused now.
    let session = test.create_one("one", &session_params(ByteCount::mib(100))).await.session;
    assert_eq!(session.state, SessionState::Starting);
    let link = test.store.register_host(&registration).await.unwrap();
    assert!(shown().await);
    test.store.release_host_link(&registration.id, link.link_epoch - 1).await.unwrap();
    assert!(shown().await, "the end of an earlier link says nothing about this one");
    test.store.release_host_link(&registration.id, link.link_epoch).await.unwrap();
    assert!(!shown().await);
}

#[tokio::test]
async fn a_report_that_knows_how_a_sandbox_ended_gives_the_reason() {
    let test = store!();
    let registration = host_registration(ByteCount::gib(10));
    test.store.register_host(&registration).await.unwrap();
    let ended = |session: &SessionRecord, reason| SandboxReport {
        sandbox_id: session.sandbox_id.clone(),
        ended: Some((reason, "as the disk has it".to_owned())),
        ..report(session, false)
    };
    let hungry = test.active("hungry").await;
    let stopped = test.active("stopped").await;
    let pausing = test.active("pausing").await;
    test.pause(&pausing.id, "pausing-pause").await;
    let earlier = test.active("earlier").await;
    let reports = [
        ended(&hungry, Reason::OutOfMemory),
        ended(&stopped, Reason::Requested),
        ended(&pausing, Reason::Requested),
        // Of an earlier sandbox of the session: it says nothing about this one.
        SandboxReport { sandbox_id: Some(SandboxId::generate()), ..ended(&earlier, Reason::OutOfMemory) },
    ];
    let link = test.store.register_host(&registration).await.unwrap();
    let cause = ReportCause::Connected;
    test.store.reconcile_report(&registration.id, link.link_epoch, cause, &reports).await.unwrap();
    let expected = [
        (&hungry, Reason::OutOfMemory),
        (&stopped, Reason::HostStopped),
        (&pausing, Reason::Requested),
        (&earlier, Reason::HostRestarted),
    ];
    for (session, reason) in expected {
        let after = test.store.session(&session.id).await.unwrap();
        assert_eq!((after.state, after.reason), (SessionState::Paused, Some(reason)), "{}", after.message);
    }
    assert_eq!(test.store.session(&hungry.id).await.unwrap().message, "as the disk has it");
}

#[tokio::test]
async fn a_host_that_is_shut_down_leaves_its_sessions_paused_and_gets_no_more() {
    let test = store!();
    let registration = host_registration(ByteCount::gib(1));
    let unknown = test.store.begin_host_stop(&registration.id).await;
    assert!(matches!(unknown, Err(StoreError::NotFound { .. })));
    let link = test.store.register_host(&registration).await.unwrap();
    let session = test.active("one").await;
    // Also when its heartbeats were missed by then.
    test.clock.advance(SECOND * 60);
    assert_eq!(test.store.mark_lost_hosts(SECOND * 5).await.unwrap().len(), 1);
    let last = test.store.begin_host_stop(&registration.id).await.unwrap();
    let late = test.store.heartbeat_host(&registration.id, link.link_epoch, None).await;
    assert!(matches!(late, Err(StoreError::Conflict { .. })));
    let reports = [report(&session, false)];
    test.store.reconcile_report(&registration.id, last, ReportCause::Stopped, &reports).await.unwrap();
    test.store.end_host_stop(&registration.id, last).await.unwrap();
    let after = test.store.session(&session.id).await.unwrap();
    assert_eq!((after.state, after.reason), (SessionState::Paused, Some(Reason::HostStopped)));
    let host = &test.store.list_hosts().await.unwrap()[0];
    assert!(!host.connected);
    assert_eq!(host.capabilities, registration.capabilities, "what it can do is not forgotten");
    assert_eq!(
        test.create_one("two", &session_params(ByteCount::mib(1))).await.session.state,
        SessionState::Queued
    );
}
