//! Making, finding again, stopping and removing sandboxes.

use std::time::Duration;

use cloister_types::session::Reason;
use cloister_types::{BackendKind, ByteCount, ExitReason, SandboxId};

use super::{Fixture, Output, Program, Subject, sandbox_spec, small_limits, within};
use crate::backend::{SandboxError, SandboxSpec};

/// Time a program has to end by itself.
const GRACE: Duration = Duration::from_secs(1);

pub(super) async fn create_reports_facts_and_timings(subject: &dyn Subject) {
    let backend = subject.backend();
    let spec = sandbox_spec(subject, small_limits());
    let created = within("a sandbox", backend.create(&spec)).await.expect("create");
    assert_eq!(*created.sandbox.spec(), spec);
    assert!(!created.facts.is_empty() && created.facts.iter().all(|fact| !fact.name.is_empty()));
    assert!(!created.timings.is_empty());
    let sessions = backend.sessions().await.expect("list sessions");
    let listed = sessions.iter().find(|(id, _)| *id == spec.session_id).expect("the session is listed");
    assert!(listed.1.as_ref().is_some_and(|sandbox| *sandbox.spec() == spec));
    backend.remove(&spec.session_id).await.expect("remove");
}

pub(super) async fn create_is_idempotent_for_an_equal_spec(subject: &dyn Subject) {
    let fixture = Fixture::new(subject).await;
    let exec_id = fixture.start(&Program::Sleep(600)).await;
    let again =
        within("the same sandbox", fixture.backend.create(&fixture.spec)).await.expect("create again");
    let record = again.sandbox.exec(&exec_id).await.expect("the exec is in the same sandbox");
    assert_eq!(record.exit, None);
    assert!(!again.facts.is_empty());
    fixture.end().await;
}

pub(super) async fn create_with_another_spec_conflicts(subject: &dyn Subject) {
    let fixture = Fixture::new(subject).await;
    let others = [
        SandboxSpec { sandbox_id: SandboxId::generate(), ..fixture.spec.clone() },
        SandboxSpec { hostname: "other".to_owned(), ..fixture.spec.clone() },
    ];
    for other in others {
        match fixture.backend.create(&other).await {
            Err(SandboxError::Conflict(_)) => {}
            Err(error) => panic!("not a conflict: {error}"),
            Ok(_) => panic!("a session got a second sandbox"),
        }
    }
    assert_eq!(fixture.run(&Program::Exit(0)).await.0.code, 0);
    fixture.end().await;
}

pub(super) async fn unknown_image_and_wrong_limits_are_refused(subject: &dyn Subject) {
    let backend = subject.backend();
    let good = sandbox_spec(subject, small_limits());
    let mut limits = small_limits();
    limits.memory = ByteCount(1);
    let wrong =
        [SandboxSpec { image: "nosuch".to_owned(), ..good.clone() }, SandboxSpec { limits, ..good.clone() }];
    for spec in wrong {
        match backend.create(&spec).await {
            Err(SandboxError::Invalid(_)) => {}
            Err(error) => panic!("not invalid: {error}"),
            Ok(_) => panic!("{spec:?} was accepted"),
        }
    }
    let sessions = backend.sessions().await.expect("list sessions");
    assert!(sessions.iter().all(|(id, _)| *id != good.session_id), "a refused create left a session");
}

pub(super) async fn a_backend_that_is_not_offered_is_refused(subject: &dyn Subject) {
    let backend = subject.backend();
    let offered = backend.kinds();
    assert!(offered.contains(&subject.kind()), "{offered:?}");
    for kind in BackendKind::ALL.into_iter().filter(|kind| !offered.contains(kind)) {
        let spec = SandboxSpec { backend: kind, ..sandbox_spec(subject, small_limits()) };
        match backend.create(&spec).await {
            Err(SandboxError::Invalid(message)) => assert!(message.contains(kind.as_str()), "{message}"),
            Err(error) => panic!("not invalid: {error}"),
            Ok(_) => panic!("`{kind}` was made as something else"),
        }
        let sessions = backend.sessions().await.expect("list sessions");
        assert!(sessions.iter().all(|(id, _)| *id != spec.session_id), "a refused create left a session");
    }
}

pub(super) async fn stop_keeps_the_layer_for_the_next_sandbox(subject: &dyn Subject) {
    let mut fixture = Fixture::new(subject).await;
    let path = "/workspace/kept".to_owned();
    let written = fixture.run(&Program::WriteFile(path.clone(), "still here".to_owned())).await;
    assert_eq!(written.0.code, 0, "{written:?}");
    within("the stop", fixture.sandbox.stop(GRACE)).await.expect("stop");
    let gone = within("the end", fixture.sandbox.wait_gone()).await;
    assert_eq!((gone.reason, &gone.sandbox_id), (Reason::Requested, &fixture.spec.sandbox_id));
    let sessions = fixture.backend.sessions().await.expect("list sessions");
    let listed = sessions.iter().find(|(id, _)| *id == fixture.spec.session_id).expect("the session is kept");
    assert!(listed.1.is_none(), "a stopped sandbox is listed as running");
    fixture.spec.sandbox_id = SandboxId::generate();
    let created =
        within("the next sandbox", fixture.backend.create(&fixture.spec)).await.expect("create again");
    fixture.sandbox = created.sandbox;
    let (exit, output) = fixture.run(&Program::ReadFile(path)).await;
    assert_eq!((exit.code, output.text()), (0, "still here".to_owned()));
    fixture.end().await;
}

pub(super) async fn stop_of_a_stopped_sandbox_succeeds(subject: &dyn Subject) {
    let fixture = Fixture::new(subject).await;
    let (first, second) = tokio::join!(fixture.sandbox.stop(GRACE), fixture.sandbox.stop(GRACE));
    first.expect("stop");
    second.expect("stop at the same time");
    fixture.sandbox.stop(GRACE).await.expect("stop again");
    assert_eq!(within("the end", fixture.sandbox.wait_gone()).await.reason, Reason::Requested);
    fixture.end().await;
}

pub(super) async fn requests_to_a_stopped_sandbox_say_so(subject: &dyn Subject) {
    let fixture = Fixture::new(subject).await;
    fixture.sandbox.stop(GRACE).await.expect("stop");
    let exec_id = cloister_types::ExecId::generate();
    let spec = fixture.exec_spec(&Program::Exit(0));
    let refused = fixture.sandbox.start_exec(&exec_id, "r", &spec).await;
    assert!(matches!(refused, Err(SandboxError::NotRunning(_))), "{refused:?}");
    let refused = fixture.sandbox.execs().await;
    assert!(matches!(refused, Err(SandboxError::NotRunning(_))), "{refused:?}");
    fixture.end().await;
}

pub(super) async fn two_sessions_live_side_by_side(subject: &dyn Subject) {
    let (first, second) = tokio::join!(Fixture::new(subject), Fixture::new(subject));
    let path = "/workspace/own".to_owned();
    assert_eq!(first.run(&Program::WriteFile(path.clone(), "first".to_owned())).await.0.code, 0);
    assert_ne!(second.run(&Program::ReadFile(path)).await.0.code, 0, "one session sees the other's file");
    first.end().await;
    assert_eq!(second.run(&Program::Exit(3)).await.0.code, 3);
    second.end().await;
}

pub(super) async fn a_second_backend_adopts_a_running_sandbox(subject: &dyn Subject) {
    let fixture = Fixture::new(subject).await;
    let spec = cloister_types::ExecSpec {
        stdin: true,
        ..fixture.exec_spec(&Program::EchoReadEcho("before".to_owned(), "after".to_owned()))
    };
    let exec_id = fixture.start_spec(spec).await;
    let second = subject.second_backend();
    let (adopted, gone) = within("the adoption", second.adopt()).await.expect("adopt");
    assert_eq!(gone, [], "something that runs was reported gone");
    let adopted: Vec<_> =
        adopted.into_iter().filter(|sandbox| sandbox.spec().session_id == fixture.spec.session_id).collect();
    let [sandbox] = adopted.as_slice() else { panic!("{} sandboxes were adopted", adopted.len()) };
    assert_eq!(*sandbox.spec(), fixture.spec);
    sandbox.write_stdin(&exec_id, 0, b"go\n", true).await.expect("write through the adopted handle");
    let reader = sandbox.read_output(&exec_id, 0, false).await.expect("read through the adopted handle");
    let output = Output::collect(reader, 0).await;
    assert_eq!(output.text(), "before\nafter\n");
    within("the stop", sandbox.stop(GRACE)).await.expect("stop the adopted sandbox");
    // The first one learns of it.
    let gone = within("the end", fixture.sandbox.wait_gone()).await;
    assert_eq!(gone.sandbox_id, fixture.spec.sandbox_id);
    fixture.end().await;
}

pub(super) async fn a_second_backend_reports_nothing_after_a_stop(subject: &dyn Subject) {
    let fixture = Fixture::new(subject).await;
    within("the stop", fixture.sandbox.stop(GRACE)).await.expect("stop");
    let (adopted, gone) = subject.second_backend().adopt().await.expect("adopt");
    assert!(adopted.iter().all(|sandbox| sandbox.spec().session_id != fixture.spec.session_id));
    assert_eq!(gone, []);
    fixture.end().await;
}

pub(super) async fn how_a_sandbox_ended_is_kept_with_its_layer(subject: &dyn Subject) {
    let fixture = Fixture::new(subject).await;
    let session_id = fixture.spec.session_id.clone();
    let kept = fixture.backend.kept_session(&session_id).await.expect("look").expect("it is here");
    assert_eq!((kept.has_layer, kept.last_end), (true, None));
    within("the stop", fixture.sandbox.stop(GRACE)).await.expect("stop");
    // For whoever comes after the one that was told.
    let second = subject.second_backend();
    let kept = second.kept_session(&session_id).await.expect("look").expect("it is here");
    let gone = kept.last_end.expect("it has ended");
    assert!(kept.has_layer);
    assert_eq!((gone.sandbox_id, gone.reason), (fixture.spec.sandbox_id.clone(), Reason::Requested));
    fixture.end().await;
    assert_eq!(second.kept_session(&session_id).await.expect("look"), None);
}

pub(super) async fn remove_works_from_every_state(subject: &dyn Subject) {
    let backend = subject.backend();
    let never = sandbox_spec(subject, small_limits());
    backend.remove(&never.session_id).await.expect("remove what never was");
    // Running, with work in it.
    let running = Fixture::new(subject).await;
    running.start(&Program::Sleep(600)).await;
    let handle = running.sandbox.clone();
    running.end().await;
    within("the end", handle.wait_gone()).await;
    // Stopped.
    let stopped = Fixture::new(subject).await;
    stopped.sandbox.stop(GRACE).await.expect("stop");
    let session_id = stopped.spec.session_id.clone();
    stopped.end().await;
    // Removed.
    backend.remove(&session_id).await.expect("remove again");
    let missing = backend.ended_execs(&session_id).await;
    assert!(matches!(missing, Err(SandboxError::NotFound(_))), "{missing:?}");
}

pub(super) async fn ended_execs_and_output_are_kept_after_a_stop(subject: &dyn Subject) {
    let fixture = Fixture::new(subject).await;
    let done = fixture.start(&Program::Echo("kept".to_owned())).await;
    assert_eq!(fixture.exit(&done).await.code, 0);
    let cut = fixture.start(&Program::EchoAndSleep("cut".to_owned(), 600)).await;
    fixture.wait_for_output(&cut).await;
    within("the stop", fixture.sandbox.stop(Duration::ZERO)).await.expect("stop");
    let session = &fixture.spec.session_id;
    let execs = fixture.backend.ended_execs(session).await.expect("list ended execs");
    let ids: Vec<_> = execs.iter().map(|exec| exec.exec_id.clone()).collect();
    assert_eq!(ids, [done.clone(), cut.clone()]);
    let exit = execs[1].exit.as_ref().expect("an exec of a stopped sandbox has ended");
    assert!(
        matches!(exit.reason, ExitReason::SandboxGone | ExitReason::Signaled),
        "the exec ended as {:?}",
        exit.reason
    );
    for (exec_id, text) in [(done, "kept\n"), (cut, "cut\n")] {
        let reader = fixture.backend.ended_output(session, &exec_id, 0).await.expect("read ended output");
        let output = Output::collect(reader, 0).await;
        assert_eq!(output.text(), text);
        assert!(output.exit.is_some(), "the stream of an ended exec has no exit");
    }
    fixture.end().await;
}
