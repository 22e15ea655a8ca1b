//! Programs on a terminal.

use cloister_types::exec::TerminalSize;
use cloister_types::{ExecSpec, ExitReason};

use super::{Fixture, Program, Subject, within};
use crate::backend::SandboxError;

const SMALL: TerminalSize = TerminalSize { rows: 7, columns: 41 };
const LARGE: TerminalSize = TerminalSize { rows: 50, columns: 200 };

impl Fixture<'_> {
    fn on_terminal(&self, program: &Program) -> ExecSpec {
        ExecSpec { terminal: Some(SMALL), ..self.exec_spec(program) }
    }
}

pub(super) async fn a_terminal_has_its_size_from_the_first_byte(subject: &dyn Subject) {
    let fixture = Fixture::new(subject).await;
    let (exit, output) = fixture.run_spec(fixture.on_terminal(&Program::PrintSize(None))).await;
    assert_eq!((exit.code, output.text().as_str()), (0, "7 41\r\n"), "{exit:?}");
    fixture.end().await;
}

pub(super) async fn a_terminal_is_one_stream_and_takes_what_several_type(subject: &dyn Subject) {
    let fixture = Fixture::new(subject).await;
    let both = Program::EchoBoth("out".to_owned(), "err".to_owned());
    let (_, output) = fixture.run_spec(fixture.on_terminal(&both)).await;
    assert!(output.stderr.is_empty(), "a terminal has no standard error of its own");
    assert_eq!(output.text().replace('\r', ""), "out\nerr\n");

    let exec_id = fixture.start_spec(fixture.on_terminal(&Program::Cat)).await;
    let other = subject.backend();
    let (adopted, _) = within("adoption", other.adopt()).await.expect("adopt");
    let second = adopted.into_iter().find(|sandbox| *sandbox.spec() == fixture.spec).expect("it runs");
    fixture.sandbox.type_input(&exec_id, b"one ", false).await.expect("type");
    second.type_input(&exec_id, b"two\n", false).await.expect("type as another");
    fixture.sandbox.type_input(&exec_id, b"", true).await.expect("type the end");
    let output = fixture.read(&exec_id, 0).await;
    assert_eq!(output.exit.as_ref().map(|exit| exit.code), Some(0));
    assert!(output.text().ends_with("one two\r\n") || output.text() == "one two\n", "{:?}", output.text());
    fixture.end().await;
}

pub(super) async fn a_new_size_reaches_the_program(subject: &dyn Subject) {
    let fixture = Fixture::new(subject).await;
    let program = Program::PrintSize(Some("ready".to_owned()));
    let exec_id = fixture.start_spec(fixture.on_terminal(&program)).await;
    fixture.wait_for_output(&exec_id).await;
    fixture.sandbox.resize(&exec_id, LARGE).await.expect("resize");
    fixture.sandbox.type_input(&exec_id, b"go\n", false).await.expect("type");
    let output = fixture.read(&exec_id, 0).await;
    assert!(output.text().ends_with("50 200\r\n"), "{:?}", output.text());
    fixture.sandbox.resize(&exec_id, SMALL).await.expect("resize what has ended");
    fixture.end().await;
}

pub(super) async fn ctrl_c_and_ctrl_d_are_typed(subject: &dyn Subject) {
    let fixture = Fixture::new(subject).await;
    let program = Program::EchoAndSleep("ready".to_owned(), 600);
    let sleeps = fixture.start_spec(fixture.on_terminal(&program)).await;
    fixture.wait_for_output(&sleeps).await;
    fixture.sandbox.type_input(&sleeps, b"\x03", false).await.expect("type Ctrl-C");
    let exit = fixture.exit(&sleeps).await;
    assert_eq!((exit.reason, exit.signal), (ExitReason::Signaled, Some(2)), "{exit:?}");

    let reads = fixture.start_spec(fixture.on_terminal(&Program::Cat)).await;
    fixture.sandbox.type_input(&reads, b"line\n\x04", false).await.expect("type Ctrl-D");
    assert_eq!(fixture.exit(&reads).await.code, 0);
    let late = fixture.sandbox.type_input(&reads, b"x", false).await;
    assert!(matches!(late, Err(SandboxError::Invalid(_))), "{late:?}");
    fixture.end().await;
}

pub(super) async fn an_exec_without_a_terminal_has_none(subject: &dyn Subject) {
    let fixture = Fixture::new(subject).await;
    let exec_id = fixture.start_spec(ExecSpec { stdin: true, ..fixture.exec_spec(&Program::Cat) }).await;
    let refused = [
        fixture.sandbox.resize(&exec_id, LARGE).await,
        fixture.sandbox.type_input(&exec_id, b"x", false).await,
    ];
    for answer in refused {
        assert!(matches!(answer, Err(SandboxError::Invalid(_))), "{answer:?}");
    }
    assert_eq!(fixture.sandbox.exec(&exec_id).await.expect("look").exit, None);
    fixture.end().await;
}
