//! Proves what ARCHITECTURE says of the host link: a host registers and comes back, an old epoch is refused also
//! after a restart, everything can be asked twice, nothing waits for a slow command, and no event is lost.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::support::backend::HeldBackend;
use crate::support::coordinator::{Coordinator, kind_of};
use crate::support::{Host, Machine, config, create, start, until};
use cloister_api::common::CapabilityStatus;
use cloister_api::connection::HOST_WIRE_VERSION;
use cloister_api::host::command_result::Result as Answer;
use cloister_api::host::{
    GetExec, HostErrorKind, ListExecs, Registered, RemoveSandbox, SignalExec, StopSandbox, WaitExec,
    WriteStdin,
};
use cloister_host::{DataDirError, HostError};
use cloister_types::session::Reason;
use cloister_types::{BackendKind, ExecId, SandboxId, SessionId};

#[tokio::test]
async fn a_host_registers_beats_and_comes_back_after_a_cut() {
    let mut machine = Machine::new(BackendKind::Sim).await;
    let (host, mut link) = machine.start().await;
    let first = link.register.clone();
    assert!(first.host_id.starts_with("hst_"), "{first:?}");
    assert_eq!(first.name, "test-host");
    assert_eq!((first.wire_version, first.memory_bytes), (HOST_WIRE_VERSION, 1 << 30));
    assert!(!first.boot_id.is_empty() && first.cpu_millis > 0 && first.disk_bytes > 0);
    assert_eq!(first.capabilities[0].name, "backend.sim");
    assert_eq!(first.capabilities[0].status.as_known(), Some(CapabilityStatus::Ok));
    link.beats(3).await;

    machine.coordinator.cut();
    let link = machine.coordinator.link().await;
    assert_eq!(link.register.host_id, first.host_id);
    host.stop_with(link).await.unwrap();
}

#[tokio::test]
async fn a_wrong_token_is_no_end_and_a_dropped_link_neither() {
    let directory = tempfile::tempdir().unwrap();
    let mut coordinator = Coordinator::start().await;
    let mut wrong = config(&directory, &coordinator);
    wrong.token = "wrong".to_owned().into();
    let host = Host::start(wrong, HeldBackend::new(BackendKind::Sim));
    // A second host with the right token gets through meanwhile; the first one is still there to be stopped.
    let other = tempfile::tempdir().unwrap();
    let right = Host::start(config(&other, &coordinator), HeldBackend::new(BackendKind::Sim));
    drop(coordinator.link().await);
    let mut link = coordinator.link().await;
    link.beats(1).await;
    host.stop().await.unwrap();
    right.stop_with(link).await.unwrap();
}

#[tokio::test]
async fn an_older_epoch_is_refused_also_by_the_next_agent() {
    let mut machine = Machine::new(BackendKind::Sim).await;
    let (session, sandbox) = (SessionId::generate(), SandboxId::generate());
    let (host, mut link) = machine.start().await;
    link.ask(&session, 5, create(&sandbox)).await.unwrap();
    let error = link.ask(&session, 4, StopSandbox::default()).await.unwrap_err();
    assert_eq!(kind_of(&error), HostErrorKind::Fenced);
    assert!(error.message.contains("epoch 4") && error.message.contains('5'), "{}", error.message);
    assert!(machine.backend.sandbox(&session).is_some(), "a fenced stop had an effect");
    host.stop_with(link).await.unwrap();
    assert!(machine.backend.sandbox(&session).is_some(), "a sandbox did not outlive its agent");

    let (host, mut link) = machine.start().await;
    let report = &link.register.sandboxes[0];
    assert_eq!(
        (report.session_id.as_str(), report.sandbox_id.as_str()),
        (session.as_str(), sandbox.as_str())
    );
    assert_eq!((report.epoch, report.running), (5, true));
    let error = link.ask(&session, 4, RemoveSandbox::default()).await.unwrap_err();
    assert_eq!(kind_of(&error), HostErrorKind::Fenced);
    // The same owner goes on, and after a removal the old one still cannot make it again.
    link.ask(&session, 6, RemoveSandbox::default()).await.unwrap();
    let error = link.ask(&session, 5, create(&sandbox)).await.unwrap_err();
    assert_eq!(kind_of(&error), HostErrorKind::Fenced);
    assert!(machine.backend.sandbox(&session).is_none());
    host.stop_with(link).await.unwrap();
}

#[tokio::test]
async fn create_stop_and_remove_can_be_asked_twice() {
    let mut machine = Machine::new(BackendKind::Sim).await;
    let (session, sandbox) = (SessionId::generate(), SandboxId::generate());
    let (host, mut link) = machine.start().await;

    let first = link.ask(&session, 1, create(&sandbox)).await.unwrap();
    let Answer::Created(created) = &first else { panic!("{first:?}") };
    assert_eq!(created.facts[0].name, "kernel");
    assert_eq!(created.timings.last().unwrap().step, "memory");
    assert_eq!(link.ask(&session, 1, create(&sandbox)).await.unwrap(), first);
    assert_eq!(machine.backend.called(), [format!("create {sandbox}")]);
    let mut other = create(&sandbox);
    other.hostname = "other".to_owned();
    let error = link.ask(&session, 1, other).await.unwrap_err();
    assert_eq!(kind_of(&error), HostErrorKind::Conflict);

    let stop = StopSandbox { sandbox_id: sandbox.to_string(), ..Default::default() };
    // A stop of another sandbox of the session leaves this one alone.
    let late = StopSandbox { sandbox_id: SandboxId::generate().to_string(), ..Default::default() };
    link.ask(&session, 2, late).await.unwrap();
    assert!(machine.backend.sandbox(&session).is_some());
    for _ in 0..2 {
        assert!(matches!(link.ask(&session, 2, stop.clone()).await.unwrap(), Answer::Stopped(_)));
    }
    for _ in 0..2 {
        assert!(matches!(link.ask(&session, 3, RemoveSandbox::default()).await.unwrap(), Answer::Removed(_)));
    }
    // What was asked for is no event.
    assert!(link.beats(3).await.is_empty());
    let unknown = SessionId::generate();
    assert!(matches!(link.ask(&unknown, 1, RemoveSandbox::default()).await.unwrap(), Answer::Removed(_)));
    host.stop_with(link).await.unwrap();
}

#[tokio::test]
async fn a_successor_takes_the_place_of_a_sandbox_whose_answer_was_lost() {
    let mut machine = Machine::new(BackendKind::Sim).await;
    let (session, lost, successor) = (SessionId::generate(), SandboxId::generate(), SandboxId::generate());
    let (host, mut link) = machine.start().await;
    link.ask(&session, 1, create(&lost)).await.unwrap();
    link.ask(&session, 2, create(&successor)).await.unwrap();
    let running = machine.backend.sandbox(&session).expect("one runs");
    assert_eq!(cloister_sandbox::backend::Sandbox::spec(running.as_ref()).sandbox_id, successor);
    host.stop_with(link).await.unwrap();
}

#[tokio::test]
async fn nothing_waits_for_a_slow_command_but_its_own_session() {
    let mut machine = Machine::new(BackendKind::Sim).await;
    let (slow, quick) = (SessionId::generate(), SessionId::generate());
    let (slow_box, quick_box) = (SandboxId::generate(), SandboxId::generate());
    let gate = machine.backend.hold(&slow);
    let (host, mut link) = machine.start().await;

    let creating = link.command(&slow, 1, create(&slow_box)).await;
    let removing = link.command(&slow, 2, RemoveSandbox::default()).await;
    link.ask(&quick, 1, create(&quick_box)).await.unwrap();
    let error =
        link.ask(&quick, 1, GetExec { exec_id: ExecId::generate().to_string(), ..Default::default() }).await;
    assert_eq!(kind_of(&error.unwrap_err()), HostErrorKind::NotFound);
    link.beats(2).await;
    assert!(!link.has_result(creating) && !link.has_result(removing));
    let removed = format!("remove {slow}");
    assert!(!machine.backend.called().contains(&removed), "a removal overtook the creation before it");

    gate.add_permits(1);
    link.result(creating).await.unwrap();
    link.result(removing).await.unwrap();
    assert_eq!(machine.backend.called().last(), Some(&removed));
    assert!(machine.backend.sandbox(&slow).is_none());
    host.stop_with(link).await.unwrap();
}

#[tokio::test]
async fn commands_beyond_the_bound_are_refused_at_once() {
    let mut machine = Machine::new(BackendKind::Sim).await;
    let (slow, other) = (SessionId::generate(), SessionId::generate());
    let gate = machine.backend.hold(&slow);
    let (host, mut link) = machine.start().await;
    let mut waiting = vec![link.command(&slow, 1, create(&SandboxId::generate())).await];
    while waiting.len() < 1024 {
        waiting.push(link.command(&slow, 1, StopSandbox::default()).await);
    }
    let error = link.ask(&other, 1, RemoveSandbox::default()).await.unwrap_err();
    assert_eq!(kind_of(&error), HostErrorKind::Exhausted);
    assert!(!waiting.iter().any(|id| link.has_result(*id)));
    gate.add_permits(1);
    for id in waiting {
        link.result(id).await.unwrap();
    }
    link.ask(&other, 1, RemoveSandbox::default()).await.unwrap();
    host.stop_with(link).await.unwrap();
}

#[tokio::test]
async fn a_stop_waits_for_a_creation_and_its_answer_goes_out() {
    let mut machine = Machine::new(BackendKind::Sim).await;
    let (session, sandbox) = (SessionId::generate(), SandboxId::generate());
    let gate = machine.backend.hold(&session);
    let (host, mut link) = machine.start().await;
    let creating = link.command(&session, 1, create(&sandbox)).await;
    until("the creation began", || !machine.backend.called().is_empty()).await;
    let (stopped, answered) = tokio::join!(host.stop(), async {
        link.beats(1).await;
        gate.add_permits(1);
        let answered = link.result(creating).await;
        while link.take().await.is_some() {}
        answered
    });
    stopped.unwrap();
    assert!(matches!(answered.unwrap(), Answer::Created(_)));
    assert!(machine.backend.sandbox(&session).is_some());
}

#[tokio::test]
async fn execs_are_found_while_the_sandbox_runs_and_after() {
    let mut machine = Machine::new(BackendKind::Sim).await;
    let (session, sandbox, exec) = (SessionId::generate(), SandboxId::generate(), ExecId::generate());
    let (host, mut link) = machine.start().await;
    let error = link.ask(&session, 1, start(&exec, &["cat"], true)).await.unwrap_err();
    assert_eq!(kind_of(&error), HostErrorKind::NotRunning);
    link.ask(&session, 1, create(&sandbox)).await.unwrap();
    let error = link.ask(&session, 1, start(&exec, &[], true)).await.unwrap_err();
    assert_eq!(kind_of(&error), HostErrorKind::Invalid);

    let Answer::Exec(started) = link.ask(&session, 1, start(&exec, &["cat"], true)).await.unwrap() else {
        panic!("no exec")
    };
    assert_eq!((started.id.as_str(), started.pid), (exec.as_str(), 7));
    // The same request under another id is the first exec; with another spec it is refused.
    let mut again = start(&ExecId::generate(), &["cat"], true);
    again.request_id = start(&exec, &["cat"], true).request_id;
    let Answer::Exec(found) = link.ask(&session, 1, again.clone()).await.unwrap() else { panic!("no exec") };
    assert_eq!(found.id, exec.as_str());
    again.spec = start(&exec, &["hold"], true).spec;
    let error = link.ask(&session, 1, again).await.unwrap_err();
    assert_eq!(kind_of(&error), HostErrorKind::Conflict);

    let waiting = WaitExec { exec_id: exec.to_string(), wait_ms: 60_000, ..Default::default() };
    let waiting = link.command(&session, 1, waiting).await;
    let write = |offset, data: &str, eof| WriteStdin {
        exec_id: exec.to_string(),
        offset,
        data: data.as_bytes().to_vec(),
        eof,
        ..Default::default()
    };
    for offset in [0, 0] {
        let Answer::StdinWritten(written) = link.ask(&session, 1, write(offset, "abc", false)).await.unwrap()
        else {
            panic!("no offset")
        };
        assert_eq!(written.next_offset, 3);
    }
    let error = link.ask(&session, 1, write(9, "x", false)).await.unwrap_err();
    assert_eq!(kind_of(&error), HostErrorKind::Invalid);
    link.ask(&session, 1, write(3, "", true)).await.unwrap();
    let Answer::Exec(ended) = link.result(waiting).await.unwrap() else { panic!("no exec") };
    assert_eq!(ended.exit.output_bytes, 3);

    link.ask(&session, 2, StopSandbox::default()).await.unwrap();
    let get = GetExec { exec_id: exec.to_string(), ..Default::default() };
    let Answer::Exec(kept) = link.ask(&session, 2, get).await.unwrap() else { panic!("no exec") };
    assert_eq!(kept.exit, ended.exit);
    let Answer::Execs(list) = link.ask(&session, 2, ListExecs::default()).await.unwrap() else {
        panic!("no list")
    };
    assert_eq!(list.execs.len(), 1);
    let signal = SignalExec { exec_id: exec.to_string(), signal: 15, ..Default::default() };
    link.ask(&session, 2, signal).await.unwrap();
    let error = link.ask(&session, 2, write(3, "x", false)).await.unwrap_err();
    assert_eq!(kind_of(&error), HostErrorKind::NotRunning);
    host.stop_with(link).await.unwrap();
}

#[tokio::test]
async fn what_happens_while_the_link_is_down_is_told_after() {
    let mut machine = Machine::new(BackendKind::Sim).await;
    let (session, sandbox) = (SessionId::generate(), SandboxId::generate());
    let (host, mut link) = machine.start().await;
    link.ask(&session, 3, create(&sandbox)).await.unwrap();
    drop(link);
    machine.coordinator.cut();
    let waiting = machine.coordinator.dialled().await;
    machine.backend.kill(&session, Reason::OutOfMemory);
    // The registration may have been written before the end or after; the event comes either way.
    waiting.accept(Registered { heartbeat_interval_ms: 50, ..Default::default() }).await;
    let mut link = waiting;
    let event = link.event().await;
    assert_eq!(
        (event.kind.as_str(), event.reason.as_str(), event.epoch),
        ("sandbox_gone", "out_of_memory", 3)
    );
    assert_eq!((event.session_id.as_str(), event.sandbox_id.as_str()), (session.as_str(), sandbox.as_str()));
    assert!(event.at.is_set());

    // Whether it arrived is not known to the host: it comes once more over the next link, then no more.
    machine.coordinator.cut();
    let mut link = machine.coordinator.link().await;
    assert!(link.register.sandboxes.iter().all(|report| !report.running));
    assert_eq!(link.event().await.sandbox_id, sandbox.as_str());
    machine.coordinator.cut();
    let mut link = machine.coordinator.link().await;
    assert!(link.beats(2).await.is_empty());
    host.stop_with(link).await.unwrap();
}

#[tokio::test]
async fn what_died_without_an_agent_is_reported_by_the_next() {
    let mut machine = Machine::new(BackendKind::Sim).await;
    let (dead, alive) = (SessionId::generate(), SessionId::generate());
    let (host, mut link) = machine.start().await;
    link.ask(&dead, 7, create(&SandboxId::generate())).await.unwrap();
    let kept = SandboxId::generate();
    link.ask(&alive, 8, create(&kept)).await.unwrap();
    host.stop_with(link).await.unwrap();
    machine.backend.kill_unseen(&dead);

    let (host, mut link) = machine.start().await;
    let event = link.event().await;
    assert_eq!(
        (event.session_id.as_str(), event.reason.as_str(), event.epoch),
        (dead.as_str(), "host_rebooted", 7)
    );
    // An adopted sandbox is watched like one that was made here, once, also when it is asked for again.
    link.ask(&alive, 8, create(&kept)).await.unwrap();
    machine.backend.kill(&alive, Reason::SandboxGone);
    assert_eq!(link.event().await.session_id, alive.as_str());
    assert!(link.beats(2).await.is_empty());
    host.stop_with(link).await.unwrap();
}

#[tokio::test]
async fn deleted_sessions_are_removed_at_registration() {
    let mut machine = Machine::new(BackendKind::Sim).await;
    let session = SessionId::generate();
    let (host, mut link) = machine.start().await;
    link.ask(&session, 1, create(&SandboxId::generate())).await.unwrap();
    machine.coordinator.cut();
    let mut link = machine.coordinator.dialled().await;
    let remove_session_ids = vec![session.to_string(), "nonsense".to_owned()];
    link.accept(Registered { heartbeat_interval_ms: 50, remove_session_ids, ..Default::default() }).await;
    until("the session is gone", || machine.backend.sandbox(&session).is_none()).await;
    assert!(link.beats(2).await.is_empty());
    host.stop_with(link).await.unwrap();
}

#[tokio::test]
async fn a_second_agent_on_the_same_directory_is_refused() {
    let mut machine = Machine::new(BackendKind::Sim).await;
    let session = SessionId::generate();
    let (first, mut link) = machine.start().await;
    link.ask(&session, 1, create(&SandboxId::generate())).await.unwrap();
    let second = Host::start(machine.config(), HeldBackend::new(BackendKind::Sim));
    let error = second.ended().await.unwrap_err();
    assert!(matches!(error, HostError::DataDir(DataDirError::InUse { .. })), "{error}");
    // `down` asks for the agent to be stopped first, and then ends every sandbox and keeps the layers.
    let (config, backend) = (machine.config(), machine.backend.clone());
    let stop_all = || cloister_host::stop_all_with(config.clone(), vec![backend.clone() as Arc<_>]);
    assert!(matches!(stop_all().await, Err(HostError::DataDir(DataDirError::InUse { .. }))));
    assert!(machine.backend.sandbox(&session).is_some());
    first.stop_with(link).await.unwrap();
    let (stopped, ()) = tokio::join!(stop_all(), machine.coordinator.accept_once());
    assert_eq!(stopped.unwrap(), 1);
    assert!(!machine.backend.called().iter().any(|call| call.starts_with("remove")));
}

#[tokio::test]
async fn without_a_backend_that_works_a_host_registers_and_refuses_with_the_reason() {
    let mut machine = Machine::new(BackendKind::Namespace).await;
    machine.backend.broken.store(true, Ordering::SeqCst);
    let (host, mut link) = machine.start().await;
    let capability = &link.register.capabilities[0];
    assert_eq!(capability.status.as_known(), Some(CapabilityStatus::Failed));
    assert_eq!(capability.remedy, "set user.max_user_namespaces");
    for backend in ["", "auto", "namespace", "sim"] {
        let mut create = create(&SandboxId::generate());
        create.backend = backend.to_owned();
        let error = link.ask(&SessionId::generate(), 1, create).await.unwrap_err();
        assert_eq!(kind_of(&error), HostErrorKind::Invalid);
        let reason =
            if backend == "sim" { "does not serve backend `sim`" } else { "user namespaces are off" };
        assert!(error.message.contains(reason), "{}", error.message);
    }
    assert!(machine.backend.called().is_empty());
    host.stop_with(link).await.unwrap();
}

#[tokio::test]
async fn execs_of_any_size_are_listed_without_breaking_the_link() {
    let mut machine = Machine::new(BackendKind::Sim).await;
    let session = SessionId::generate();
    let (host, mut link) = machine.start().await;
    link.ask(&session, 1, create(&SandboxId::generate())).await.unwrap();
    let long = "\u{e4}".repeat(450_000);
    for _ in 0..12 {
        link.ask(&session, 1, start(&ExecId::generate(), &["hold", "short", &long, "unseen"], true))
            .await
            .unwrap();
    }
    let Answer::Execs(list) = link.ask(&session, 1, ListExecs::default()).await.unwrap() else {
        panic!("no list")
    };
    assert_eq!(list.execs.len(), 12);
    for exec in &list.execs {
        let [first, second, cut] = &exec.spec.argv[..] else { panic!("{:?}", exec.spec.argv.len()) };
        assert_eq!((first.as_str(), second.as_str()), ("hold", "short"));
        assert!(cut.len() < 256 && cut.ends_with('…'), "{cut}");
    }
    let get = GetExec { exec_id: list.execs[0].id.clone(), ..Default::default() };
    let Answer::Exec(whole) = link.ask(&session, 1, get).await.unwrap() else { panic!("no exec") };
    assert_eq!(whole.spec.argv[2], long);
    host.stop_with(link).await.unwrap();
}
