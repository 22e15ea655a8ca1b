//! Proves the session engine's claims through the API: create, queue and admit, idempotency, pause, resume, delete in
//! every state, lost and returning hosts, failed starts, watching, crash of the coordinator. Fallback polling is at one
//! hour throughout, so that notices and due times must be enough.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use cloister_api::app::{
    CreateSessionRequest, DeleteSessionRequest, ListAuditRequest, ListSessionsRequest, PauseSessionRequest,
    ResumeSessionRequest, SessionState, WatchSessionRequest,
};
use cloister_api::common;
use cloister_api::host::HostErrorKind;
use connectrpc::ErrorCode;

use super::host::FakeHost;
use super::support::{SOON, TestCoordinator, active_session, assert_code, create, get, labels, until};

const GIB: u64 = 1 << 30;

fn resume(request_id: &str, session: &str) -> ResumeSessionRequest {
    ResumeSessionRequest {
        request_id: request_id.to_owned(),
        session: session.to_owned(),
        wait_ms: 20_000,
        ..Default::default()
    }
}

fn delete(request_id: &str, session: &str) -> DeleteSessionRequest {
    DeleteSessionRequest {
        request_id: request_id.to_owned(),
        session: session.to_owned(),
        wait_ms: 20_000,
        ..Default::default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_is_created_paused_resumed_and_deleted_and_its_log_and_audit_say_so() {
    let Some(coordinator) = TestCoordinator::start().await else { return };
    let host = FakeHost::connect(&coordinator, 8 * GIB).await;
    let owner = coordinator.owner().await;
    let request = CreateSessionRequest {
        name: "web".to_owned(),
        labels: labels(&[("team", "a")]).into_iter().collect(),
        ..create("c1")
    };
    let session = owner
        .sessions()
        .create_session(request)
        .await
        .expect("create")
        .into_owned()
        .session
        .into_option()
        .unwrap();
    assert_eq!(session.state, SessionState::Active);
    assert_eq!(session.host_id, host.id.as_str());
    assert_eq!(session.backend, "namespace");
    assert_eq!(session.isolation, common::Isolation::Container);
    assert_eq!(session.facts[0].name, "landlock_abi");
    assert_eq!(session.limits.memory_bytes, 512 << 20);

    let pause = PauseSessionRequest {
        request_id: "p1".to_owned(),
        session: "web".to_owned(),
        wait_ms: 20_000,
        ..Default::default()
    };
    let paused = owner.sessions().pause_session(pause).await.expect("pause").into_owned().session;
    assert_eq!(paused.state, SessionState::Paused);
    assert!(!host.state().sandboxes[&session.id].running);

    let resume = ResumeSessionRequest {
        request_id: "r1".to_owned(),
        session: session.id[..12].to_owned(),
        wait_ms: 20_000,
        ..Default::default()
    };
    let resumed = owner.sessions().resume_session(resume).await.expect("resume").into_owned().session;
    assert_eq!(resumed.state, SessionState::Active);
    assert_ne!(resumed.sandbox_id, session.sandbox_id, "a resumed session has a new sandbox");

    let deleted =
        owner.sessions().delete_session(delete("d1", "web")).await.expect("delete").into_owned().session;
    assert_eq!(deleted.state, SessionState::Deleted);
    assert!(host.state().sandboxes.is_empty());

    let watch = WatchSessionRequest { session: session.id.clone(), ..Default::default() };
    let mut stream = owner.streams().watch_session(watch).await.expect("watch");
    let mut states = Vec::new();
    while let Some(message) = stream.message().await.expect("the watch ends well") {
        let event = message.to_owned_message().event.into_option().expect("an event");
        states.push((event.cursor, event.state.as_known().expect("a known state")));
    }
    assert!(states.windows(2).all(|pair| pair[1].0 == pair[0].0 + 1), "{states:?}");
    let mut seen: Vec<SessionState> = states.iter().map(|(_, state)| *state).collect();
    seen.dedup();
    let expected = [
        SessionState::Starting,
        SessionState::Active,
        SessionState::Pausing,
        SessionState::Paused,
        SessionState::Resuming,
        SessionState::Active,
        SessionState::Deleting,
        SessionState::Deleted,
    ];
    assert!(seen.ends_with(&expected), "{seen:?}");

    let audit = owner
        .audit()
        .list_audit(ListAuditRequest { resource: session.id.clone(), ..Default::default() })
        .await
        .expect("audit")
        .into_owned();
    let actions: Vec<&str> = audit.entries.iter().map(|entry| entry.action.as_str()).collect();
    assert_eq!(actions, ["session.delete", "session.resume", "session.pause", "session.create"]);
    assert!(audit.entries.iter().all(|entry| !entry.principal.is_empty() && entry.source == "127.0.0.1"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_host_a_session_is_queued_with_the_reason_and_admitted_when_one_comes() {
    let Some(coordinator) = TestCoordinator::start().await else { return };
    let owner = coordinator.owner().await;
    let answer = owner.sessions().create_session(create("c1")).await.expect("create").into_owned();
    assert_eq!(answer.session.state, SessionState::Queued);
    assert_eq!(answer.session.reason, "no_host");
    let id = answer.session.id.clone();
    let _host = FakeHost::connect(&coordinator, 8 * GIB).await;
    until(&owner, &id, SessionState::Active).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_host_queues_and_a_deletion_admits_the_next_in_order() {
    let Some(coordinator) = TestCoordinator::start().await else { return };
    let _host = FakeHost::connect(&coordinator, GIB).await;
    let owner = coordinator.owner().await;
    let first = active_session(&owner, "c1").await;
    active_session(&owner, "c2").await;
    let mut queued = Vec::new();
    for request_id in ["c3", "c4"] {
        let answer = owner.sessions().create_session(create(request_id)).await.expect("create").into_owned();
        assert_eq!(answer.session.state, SessionState::Queued);
        assert_eq!(answer.session.reason, "no_capacity", "{}", answer.session.message);
        queued.push(answer.session.id.clone());
    }
    owner.sessions().delete_session(delete("d1", &first.id)).await.expect("delete");
    until(&owner, &queued[0], SessionState::Active).await;
    assert_eq!(get(&owner, &queued[1]).await.state, SessionState::Queued);
    owner.sessions().delete_session(delete("d2", &queued[0])).await.expect("delete");
    until(&owner, &queued[1], SessionState::Active).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_id_returns_its_first_answer_and_refuses_another_payload() {
    let Some(coordinator) = TestCoordinator::start().await else { return };
    let _host = FakeHost::connect(&coordinator, 8 * GIB).await;
    let owner = coordinator.owner().await;
    let labelled = |request_id: &str| CreateSessionRequest {
        labels: labels(&[("a", "1"), ("b", "2"), ("c", "3"), ("d", "4")]).into_iter().collect(),
        ..create(request_id)
    };
    let first = owner.sessions().create_session(labelled("same")).await.expect("create").into_owned();
    for wait_ms in [0, 5, 20_000] {
        let again = CreateSessionRequest { wait_ms, ..labelled("same") };
        let again = owner.sessions().create_session(again).await.expect("repeat").into_owned();
        assert_eq!(again.session.id, first.session.id);
    }
    let other = CreateSessionRequest { name: "other".to_owned(), ..labelled("same") };
    assert_code(owner.sessions().create_session(other).await, "CL1008", ErrorCode::AlreadyExists);
    let all =
        owner.sessions().list_sessions(ListSessionsRequest::default()).await.expect("list").into_owned();
    assert_eq!(all.sessions.len(), 1);

    let named = |request_id: &str| CreateSessionRequest { name: "web".to_owned(), ..create(request_id) };
    owner.sessions().create_session(named("n1")).await.expect("create");
    assert_code(owner.sessions().create_session(named("n2")).await, "CL1007", ErrorCode::AlreadyExists);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_start_says_why_and_a_weaker_sandbox_is_refused() {
    let Some(coordinator) = TestCoordinator::start().await else { return };
    let host = FakeHost::connect(&coordinator, 8 * GIB).await;
    let owner = coordinator.owner().await;
    *host.faults.refuse_create.lock().unwrap() =
        Some((HostErrorKind::Invalid, "no such image here".to_owned()));
    let failed = owner.sessions().create_session(create("c1")).await.expect("create").into_owned().session;
    assert_eq!(failed.state, SessionState::Failed);
    assert_eq!(failed.reason, "start_failed");
    assert!(failed.message.contains("no such image here"), "{}", failed.message);

    *host.faults.refuse_create.lock().unwrap() = None;
    host.faults.weak.store(true, Ordering::SeqCst);
    let failed = owner.sessions().create_session(create("c2")).await.expect("create").into_owned().session;
    assert_eq!(failed.state, SessionState::Failed, "who says nothing gets a container or nothing");
    assert_eq!(failed.isolation_floor, common::Isolation::Container);
    assert!(failed.message.contains("weaker"), "{}", failed.message);
    let id = failed.id.clone();
    tokio::time::timeout(SOON, async {
        while !host.state().removed.contains(&id) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await
    .expect("what the weak sandbox left is removed");

    let named = CreateSessionRequest { backend: "sim".to_owned(), ..create("c4") };
    let named = owner.sessions().create_session(named).await.expect("create").into_owned().session;
    assert_eq!((named.state.as_known(), named.isolation_floor.as_known()), {
        (Some(SessionState::Active), Some(common::Isolation::None))
    });

    let impossible =
        CreateSessionRequest { isolation_floor: common::Isolation::Microvm.into(), ..create("c3") };
    assert_code(owner.sessions().create_session(impossible).await, "CL1014", ErrorCode::FailedPrecondition);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connected_host_that_cannot_take_back_a_failed_start_is_told_again() {
    let Some(coordinator) = TestCoordinator::start().await else { return };
    let host = FakeHost::connect(&coordinator, 8 * GIB).await;
    let owner = coordinator.owner().await;
    host.faults.weak.store(true, Ordering::SeqCst);
    host.faults.refuse_remove.store(true, Ordering::SeqCst);
    let failed = owner.sessions().create_session(create("c1")).await.expect("create").into_owned().session;
    assert_eq!(failed.state, SessionState::Failed);
    let id = failed.id.clone();
    assert!(host.state().sandboxes.contains_key(&id), "it could not be removed");
    tokio::time::timeout(SOON, host.link_ended()).await.expect("its link is ended, so that it registers");
    let host = host.reconnect(&coordinator).await;
    assert!(host.state().removed.contains(&id), "its report was answered with what to remove");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_resume_without_its_files_fails_by_name_and_the_session_can_be_deleted() {
    let Some(coordinator) = TestCoordinator::start().await else { return };
    let host = FakeHost::connect(&coordinator, 8 * GIB).await;
    let owner = coordinator.owner().await;
    let id = active_session(&owner, "c1").await.id;
    let pause = PauseSessionRequest {
        request_id: "p1".to_owned(),
        session: id.clone(),
        wait_ms: 20_000,
        ..Default::default()
    };
    owner.sessions().pause_session(pause).await.expect("pause");
    assert!(host.state().sandboxes.remove(&id).is_some(), "somebody removes the layer by hand");
    let resume = resume("r1", &id);
    let after = owner.sessions().resume_session(resume).await.expect("resume").into_owned().session;
    assert_eq!(
        (after.state.as_known(), after.reason.as_str()),
        (Some(SessionState::Paused), "layer_missing")
    );
    assert!(after.message.contains("its files are gone"), "{}", after.message);
    assert!(!host.state().sandboxes.contains_key(&id), "an empty one was made in its place");
    owner.sessions().delete_session(delete("d1", &id)).await.expect("delete");
    until(&owner, &id, SessionState::Deleted).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_is_shut_down_pauses_its_sessions_at_once() {
    let Some(coordinator) = TestCoordinator::start().await else { return };
    let host = FakeHost::connect(&coordinator, 8 * GIB).await;
    let owner = coordinator.owner().await;
    let id = active_session(&owner, "c1").await.id;
    host.shut_down(&coordinator).await;
    let after = get(&owner, &id).await;
    assert_eq!((after.state.as_known(), after.reason.as_str()), (Some(SessionState::Paused), "host_stopped"));
    let host = host.reconnect(&coordinator).await;
    let after = owner.sessions().resume_session(resume("r1", &id)).await.expect("resume");
    let after = after.into_owned().session;
    assert_eq!(after.state, SessionState::Active, "{}", after.message);
    drop(host);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pause_that_lost_files_says_so() {
    let Some(coordinator) = TestCoordinator::start().await else { return };
    let host = FakeHost::connect(&coordinator, 8 * GIB).await;
    let owner = coordinator.owner().await;
    let id = active_session(&owner, "c1").await.id;
    for (request, is_broken, reason, message) in
        [("p1", true, "disk_error", "make room"), ("p2", false, "requested", "")]
    {
        host.faults.disk_error.store(is_broken, Ordering::SeqCst);
        let pause = PauseSessionRequest {
            session: id.clone(),
            request_id: request.to_owned(),
            wait_ms: 5000,
            ..Default::default()
        };
        owner.sessions().pause_session(pause).await.expect("pause");
        let after = get(&owner, &id).await;
        assert_eq!(after.state, SessionState::Paused, "{}", after.message);
        assert_eq!((after.reason.as_str(), after.message.as_str()), (reason, message));
        owner.sessions().resume_session(resume(&format!("r-{request}"), &id)).await.expect("resume");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_fails_gets_a_few_attempts() {
    let Some(coordinator) = TestCoordinator::start().await else { return };
    let host = FakeHost::connect(&coordinator, 8 * GIB).await;
    let owner = coordinator.owner().await;
    *host.faults.refuse_create.lock().unwrap() = Some((HostErrorKind::Internal, "hiccup".to_owned()));
    let request = CreateSessionRequest { wait_ms: 0, ..create("c1") };
    let id = owner.sessions().create_session(request).await.expect("create").into_owned().session.id.clone();
    tokio::time::timeout(SOON, async {
        while !host.state().commands.iter().any(|command| command.contains("create")) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .expect("it is asked once");
    *host.faults.refuse_create.lock().unwrap() = None;
    until(&owner, &id, SessionState::Active).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deletion_waits_for_its_host_says_so_and_converges() {
    let Some(coordinator) = TestCoordinator::start().await else { return };
    let host = FakeHost::connect(&coordinator, 8 * GIB).await;
    let owner = coordinator.owner().await;
    let session = active_session(&owner, "c1").await;
    host.disconnect();
    let request = DeleteSessionRequest { wait_ms: 0, ..delete("d1", &session.id) };
    let deleting = owner.sessions().delete_session(request).await.expect("delete").into_owned().session;
    assert_eq!(deleting.state, SessionState::Deleting);
    // The log says what it waits for.
    let watch = WatchSessionRequest { session: session.id.clone(), ..Default::default() };
    let mut stream = owner.streams().watch_session(watch).await.expect("watch");
    let waiting = async {
        while let Some(message) = stream.message().await.expect("watch") {
            let event = message.to_owned_message().event.into_option().expect("an event");
            if event.kind == "session.delete_waiting" {
                return event.message;
            }
        }
        panic!("the watch ended");
    };
    let message = tokio::time::timeout(SOON, waiting).await.expect("it says so in time");
    assert!(message.contains("is not connected"), "{message}");
    let host = host.reconnect(&coordinator).await;
    until(&owner, &session.id, SessionState::Deleted).await;
    assert!(host.state().sandboxes.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_queued_session_is_deleted_without_any_host() {
    let Some(coordinator) = TestCoordinator::start().await else { return };
    let owner = coordinator.owner().await;
    let session = owner.sessions().create_session(create("c1")).await.expect("create").into_owned().session;
    let deleted = owner
        .sessions()
        .delete_session(delete("d1", &session.id))
        .await
        .expect("delete")
        .into_owned()
        .session;
    assert_eq!(deleted.state, SessionState::Deleted);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_sandbox_pauses_its_session_and_a_report_finds_what_was_missed() {
    let Some(coordinator) = TestCoordinator::start().await else { return };
    let host = FakeHost::connect(&coordinator, 8 * GIB).await;
    let owner = coordinator.owner().await;
    let first = active_session(&owner, "c1").await;
    let second = active_session(&owner, "c2").await;
    host.sandbox_gone(&first.id, "out_of_memory").await;
    let paused = until(&owner, &first.id, SessionState::Paused).await;
    assert_eq!(paused.reason, "out_of_memory");
    // The second one dies while the link is down.
    host.disconnect();
    host.state().sandboxes.get_mut(&second.id).unwrap().running = false;
    let host = host.reconnect(&coordinator).await;
    until(&owner, &second.id, SessionState::Paused).await;
    host.heartbeat().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_link_of_a_host_replaces_the_first() {
    let Some(coordinator) = TestCoordinator::start().await else { return };
    let first = FakeHost::connect(&coordinator, 8 * GIB).await;
    let owner = coordinator.owner().await;
    let session = active_session(&owner, "c1").await;
    let second =
        FakeHost::connect_as(&coordinator, first.id.clone(), Arc::clone(&first.state), 8 * GIB).await;
    assert_eq!(get(&owner, &session.id).await.state, SessionState::Active);
    active_session(&owner, "c2").await;
    drop(second);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operation_goes_on_after_its_coordinator_stopped() {
    let Some(mut coordinator) = TestCoordinator::start().await else { return };
    let host = FakeHost::connect(&coordinator, 8 * GIB).await;
    let owner = coordinator.owner().await;
    host.faults.silent.store(true, Ordering::SeqCst);
    let request = CreateSessionRequest { wait_ms: 0, ..create("c1") };
    let session = owner.sessions().create_session(request).await.expect("create").into_owned().session;
    tokio::time::timeout(SOON, async {
        while host.state().commands.is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .expect("the host is asked");
    coordinator.stop().await;
    let next = TestCoordinator::start_on(coordinator.options.clone(), |_| {}).await;
    let host = FakeHost::connect_as(&next, host.id.clone(), Arc::clone(&host.state), 8 * GIB).await;
    let owner = next.owner().await;
    until(&owner, &session.id, SessionState::Active).await;
    // Each claim had a higher epoch.
    let epochs: Vec<u64> = host
        .state()
        .commands
        .iter()
        .map(|command| command.rsplit(' ').next().unwrap().parse().unwrap())
        .collect();
    assert!(epochs.len() >= 2 && epochs.is_sorted_by(|a, b| a < b), "{epochs:?}");
    // The same request id finds the first answer there too.
    let again = owner.sessions().create_session(create("c1")).await.expect("repeat").into_owned();
    assert_eq!(again.session.id, session.id);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_is_deleted_when_its_time_is_over() {
    let Some(coordinator) = TestCoordinator::start().await else { return };
    let _host = FakeHost::connect(&coordinator, 8 * GIB).await;
    let owner = coordinator.owner().await;
    let request = CreateSessionRequest { ttl_ms: 1500, ..create("c1") };
    let session = owner.sessions().create_session(request).await.expect("create").into_owned().session;
    assert_eq!(session.state, SessionState::Active);
    until(&owner, &session.id, SessionState::Deleted).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_host_is_lost_and_found_again() {
    let Some(coordinator) =
        TestCoordinator::start_with(|config| config.heartbeat = Duration::from_secs(1)).await
    else {
        return;
    };
    let host = FakeHost::connect(&coordinator, 8 * GIB).await;
    let owner = coordinator.owner().await;
    let session = active_session(&owner, "c1").await;
    let lost = until(&owner, &session.id, SessionState::HostLost).await;
    assert_eq!(lost.reason, "host_unreachable");
    let _host = host.reconnect(&coordinator).await;
    until(&owner, &session.id, SessionState::Active).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_and_filters_show_each_session_once() {
    let Some(coordinator) = TestCoordinator::start().await else { return };
    let owner = coordinator.owner().await;
    for index in 0..7 {
        let request = CreateSessionRequest {
            labels: labels(&[("even", if index % 2 == 0 { "yes" } else { "no" })]).into_iter().collect(),
            wait_ms: 0,
            ..create(&format!("c{index}"))
        };
        owner.sessions().create_session(request).await.expect("create");
    }
    let mut seen = Vec::new();
    let mut page_token = String::new();
    loop {
        let request =
            ListSessionsRequest { page_size: 3, page_token: page_token.clone(), ..Default::default() };
        let page = owner.sessions().list_sessions(request).await.expect("list").into_owned();
        seen.extend(page.sessions.iter().map(|session| session.id.clone()));
        page_token = page.next_page_token;
        if page_token.is_empty() {
            break;
        }
    }
    assert_eq!(seen.len(), 7);
    assert!(seen.is_sorted_by(|a, b| a > b), "newest first: {seen:?}");
    let request = ListSessionsRequest {
        labels: labels(&[("even", "yes")]).into_iter().collect(),
        states: vec![SessionState::Queued.into()],
        ..Default::default()
    };
    let even = owner.sessions().list_sessions(request).await.expect("list").into_owned();
    assert_eq!(even.sessions.len(), 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_page_of_large_sessions_is_one_that_a_client_takes() {
    let Some(coordinator) = TestCoordinator::start().await else { return };
    let owner = coordinator.owner().await;
    let labels: HashMap<String, String> =
        (0..64).map(|index| (format!("k{index}"), "\u{1f980}".repeat(255))).collect();
    let mut made = Vec::new();
    for index in 0..80 {
        let request = CreateSessionRequest {
            labels: labels.clone().into_iter().collect(),
            wait_ms: 0,
            ..create(&format!("c{index}"))
        };
        made.push(
            owner.sessions().create_session(request).await.expect("create").into_owned().session.id.clone(),
        );
    }
    let (mut listed, mut page_token, mut pages) = (Vec::new(), String::new(), 0);
    loop {
        let request = ListSessionsRequest { page_size: 500, page_token, ..Default::default() };
        let page = owner.sessions().list_sessions(request).await.expect("a page").into_owned();
        listed.extend(page.sessions.iter().map(|session| session.id.clone()));
        pages += 1;
        page_token = page.next_page_token;
        if page_token.is_empty() {
            break;
        }
    }
    made.reverse();
    assert!(listed == made, "{} of {} in {pages} pages", listed.len(), made.len());
    assert!(pages > 4, "{pages} pages of 5 MiB");
}
