//! Starting programs, and how they end.

use std::collections::BTreeMap;
use std::time::Duration;

use cloister_types::{ExecId, ExecSpec, ExitReason};

use super::{Fixture, Program, Subject, within};
use crate::backend::SandboxError;

pub(super) async fn exit_codes_arrive(subject: &dyn Subject) {
    let fixture = Fixture::new(subject).await;
    for code in [0, 1, 42, 255] {
        let exec_id = fixture.start(&Program::Exit(code)).await;
        let record = fixture.wait(&exec_id).await;
        let exit = record.exit.expect("it has ended");
        assert_eq!((exit.reason, exit.code, exit.signal), (ExitReason::Exited, code, None));
        assert!(record.pid > 0 && exit.exited_unix_ms >= record.started_unix_ms);
        assert!(!exit.pids_limit_hit && !exit.disk_full);
    }
    fixture.end().await;
}

pub(super) async fn a_signal_is_reported_as_one(subject: &dyn Subject) {
    let fixture = Fixture::new(subject).await;
    for signal in [9, 15] {
        let exit = fixture.run(&Program::Die(signal)).await.0;
        assert_eq!((exit.reason, exit.code, exit.signal), (ExitReason::Signaled, 128 + signal, Some(signal)));
    }
    fixture.end().await;
}

pub(super) async fn a_program_that_is_missing_is_not_started(subject: &dyn Subject) {
    let fixture = Fixture::new(subject).await;
    let (exit, output) = fixture.run(&Program::Missing).await;
    assert_eq!((exit.reason, exit.code), (ExitReason::NotStarted, 127), "{exit:?}");
    assert!(!exit.message.is_empty(), "why it was not started is not said");
    assert_eq!(output.stdout, b"");
    fixture.end().await;
}

pub(super) async fn a_spec_that_cannot_run_is_refused(subject: &dyn Subject) {
    let fixture = Fixture::new(subject).await;
    let good = fixture.exec_spec(&Program::Exit(0));
    let wrong = [
        ExecSpec { argv: Vec::new(), ..good.clone() },
        ExecSpec { argv: vec!["a\0b".to_owned()], ..good.clone() },
        ExecSpec { cwd: Some("relative".to_owned()), ..good.clone() },
        ExecSpec { env: BTreeMap::from([("a=b".to_owned(), String::new())]), ..good },
    ];
    for spec in wrong {
        let exec_id = ExecId::generate();
        let refused = fixture.sandbox.start_exec(&exec_id, exec_id.as_str(), &spec).await;
        assert!(matches!(refused, Err(SandboxError::Invalid(_))), "{refused:?}");
    }
    assert_eq!(fixture.sandbox.execs().await.expect("list execs"), []);
    fixture.end().await;
}

pub(super) async fn environment_directory_and_user_are_set(subject: &dyn Subject) {
    let fixture = Fixture::new(subject).await;
    let value = "a b\"c'$d\tä";
    let spec = ExecSpec {
        env: BTreeMap::from([("CLOISTER_TEST".to_owned(), value.to_owned())]),
        ..fixture.exec_spec(&Program::PrintEnv("CLOISTER_TEST".to_owned()))
    };
    assert_eq!(fixture.run_spec(spec).await.1.text(), format!("{value}\n"));
    let spec = ExecSpec { cwd: Some("/tmp".to_owned()), ..fixture.exec_spec(&Program::PrintDirectory) };
    assert_eq!(fixture.run_spec(spec).await.1.text(), "/tmp\n");
    for user in ["0", "1000"] {
        let spec = ExecSpec { user: Some(user.to_owned()), ..fixture.exec_spec(&Program::PrintUser) };
        let (exit, output) = fixture.run_spec(spec).await;
        assert_eq!((exit.code, output.text()), (0, format!("{user}\n")), "{exit:?}");
    }
    fixture.end().await;
}

pub(super) async fn an_exec_has_its_own_descriptors_only(subject: &dyn Subject) {
    let fixture = Fixture::new(subject).await;
    // What the guest agent has open for these must not be seen by the next.
    for _ in 0..4 {
        let cat = fixture.start_spec(ExecSpec { stdin: true, ..fixture.exec_spec(&Program::Cat) }).await;
        fixture.sandbox.write_stdin(&cat, 0, b"x", false).await.expect("write");
    }
    let (exit, output) = fixture.run(&Program::PrintDescriptors).await;
    assert_eq!((exit.code, output.text().as_str()), (0, "0\n1\n2\n"));
    fixture.end().await;
}

pub(super) async fn start_is_idempotent_by_request_id(subject: &dyn Subject) {
    let fixture = Fixture::new(subject).await;
    let spec = fixture.exec_spec(&Program::EchoAndSleep("once".to_owned(), 600));
    let first = ExecId::generate();
    let started = fixture.sandbox.start_exec(&first, "request-1", &spec).await.expect("start");
    assert_eq!((&started.exec_id, started.request_id.as_str()), (&first, "request-1"));
    let again =
        fixture.sandbox.start_exec(&ExecId::generate(), "request-1", &spec).await.expect("start again");
    assert_eq!((again.exec_id, again.pid), (first, started.pid));
    assert_eq!(fixture.sandbox.execs().await.expect("list execs").len(), 1);
    fixture.end().await;
}

pub(super) async fn start_with_another_payload_conflicts(subject: &dyn Subject) {
    let fixture = Fixture::new(subject).await;
    let spec = fixture.exec_spec(&Program::Exit(0));
    let other = fixture.exec_spec(&Program::Exit(1));
    let exec_id = ExecId::generate();
    fixture.sandbox.start_exec(&exec_id, "request-1", &spec).await.expect("start");
    let conflict = fixture.sandbox.start_exec(&ExecId::generate(), "request-1", &other).await;
    assert!(matches!(conflict, Err(SandboxError::Conflict(_))), "{conflict:?}");
    let conflict = fixture.sandbox.start_exec(&exec_id, "request-2", &spec).await;
    assert!(matches!(conflict, Err(SandboxError::Conflict(_))), "{conflict:?}");
    assert_eq!(fixture.sandbox.execs().await.expect("list execs").len(), 1);
    fixture.end().await;
}

pub(super) async fn execs_are_listed_oldest_first(subject: &dyn Subject) {
    let fixture = Fixture::new(subject).await;
    let mut started = Vec::new();
    for code in 0..5 {
        started.push(fixture.start(&Program::Exit(code)).await);
    }
    started.push(fixture.start(&Program::Sleep(600)).await);
    for exec_id in &started[..5] {
        fixture.wait(exec_id).await;
    }
    let execs = fixture.sandbox.execs().await.expect("list execs");
    let listed: Vec<_> = execs.iter().map(|exec| exec.exec_id.clone()).collect();
    assert_eq!(listed, started);
    let codes: Vec<_> = execs.iter().map(|exec| exec.exit.as_ref().map(|exit| exit.code)).collect();
    assert_eq!(codes, [Some(0), Some(1), Some(2), Some(3), Some(4), None]);
    assert_eq!(execs[5].spec, fixture.exec_spec(&Program::Sleep(600)));
    fixture.end().await;
}

pub(super) async fn wait_returns_a_running_exec_at_its_deadline(subject: &dyn Subject) {
    let fixture = Fixture::new(subject).await;
    let exec_id = fixture.start(&Program::Sleep(600)).await;
    let wait = Duration::from_millis(50);
    let waited = async { tokio::join!(fixture.sandbox.wait_exec(&exec_id, wait), subject.elapse(wait)).0 };
    assert_eq!(within("a wait that ends", waited).await.expect("wait").exit, None);
    fixture.end().await;
}

pub(super) async fn signals_reach_the_program(subject: &dyn Subject) {
    let fixture = Fixture::new(subject).await;
    for signal in [2, 15, 9] {
        let exec_id = fixture.start(&Program::EchoAndSleep("ready".to_owned(), 600)).await;
        fixture.wait_for_output(&exec_id).await;
        fixture.sandbox.signal(&exec_id, signal).await.expect("signal");
        let exit = fixture.exit(&exec_id).await;
        assert_eq!((exit.reason, exit.signal), (ExitReason::Signaled, Some(signal)));
        fixture.sandbox.signal(&exec_id, signal).await.expect("signal what has ended");
    }
    fixture.end().await;
}

pub(super) async fn a_number_that_is_no_signal_is_refused(subject: &dyn Subject) {
    let fixture = Fixture::new(subject).await;
    let exec_id = fixture.start(&Program::Sleep(600)).await;
    for signal in [-1, 0, 65, i32::MAX] {
        let refused = fixture.sandbox.signal(&exec_id, signal).await;
        assert!(matches!(refused, Err(SandboxError::Invalid(_))), "signal {signal}: {refused:?}");
    }
    assert_eq!(fixture.sandbox.exec(&exec_id).await.expect("look").exit, None);
    fixture.end().await;
}

pub(super) async fn what_is_not_there_is_not_found(subject: &dyn Subject) {
    let fixture = Fixture::new(subject).await;
    let nobody = ExecId::generate();
    let sandbox = &fixture.sandbox;
    let answers = [
        sandbox.exec(&nobody).await.map(drop),
        sandbox.wait_exec(&nobody, Duration::ZERO).await.map(drop),
        sandbox.signal(&nobody, 15).await,
        sandbox.write_stdin(&nobody, 0, b"x", false).await.map(drop),
        sandbox.read_output(&nobody, 0, true).await.map(drop),
    ];
    for answer in answers {
        assert!(matches!(answer, Err(SandboxError::NotFound(_))), "{answer:?}");
    }
    fixture.end().await;
}

pub(super) async fn timeout_ends_the_exec_and_keeps_its_output(subject: &dyn Subject) {
    let fixture = Fixture::new(subject).await;
    let spec = ExecSpec {
        timeout: Some(Duration::from_millis(400)),
        ..fixture.exec_spec(&Program::EchoAndSleep("said before".to_owned(), 600))
    };
    let exec_id = fixture.start_spec(spec).await;
    fixture.wait_for_output(&exec_id).await;
    subject.elapse(Duration::from_millis(500)).await;
    let output = fixture.read(&exec_id, 0).await;
    let exit = output.exit.as_ref().expect("a followed stream ends with an exit");
    assert_eq!(exit.reason, ExitReason::Timeout, "{exit:?}");
    assert_eq!(output.text(), "said before\n");
    assert!(!exit.message.is_empty());
    fixture.end().await;
}

pub(super) async fn silence_timeout_ends_only_a_silent_exec(subject: &dyn Subject) {
    let fixture = Fixture::new(subject).await;
    let limit = Some(Duration::from_millis(400));
    let silent = fixture
        .start_spec(ExecSpec {
            no_output_timeout: limit,
            ..fixture.exec_spec(&Program::EchoAndSleep("once".to_owned(), 600))
        })
        .await;
    let quick = fixture
        .start_spec(ExecSpec { no_output_timeout: limit, ..fixture.exec_spec(&Program::Exit(7)) })
        .await;
    assert_eq!(fixture.exit(&quick).await.code, 7);
    fixture.wait_for_output(&silent).await;
    subject.elapse(Duration::from_millis(500)).await;
    let output = fixture.read(&silent, 0).await;
    let exit = output.exit.as_ref().expect("a followed stream ends with an exit");
    assert_eq!((exit.reason, output.text().as_str()), (ExitReason::NoOutputTimeout, "once\n"));
    fixture.end().await;
}

impl Fixture<'_> {
    /// Waits until an exec has printed something.
    pub(super) async fn wait_for_output(&self, exec_id: &ExecId) {
        let mut reader = self.sandbox.read_output(exec_id, 0, false).await.expect("read output");
        let frame = within("the first output", reader.next()).await.expect("read a frame");
        assert!(matches!(frame, Some(cloister_types::OutputFrame::Data { .. })), "{frame:?}");
    }
}
