//! Proves what ARCHITECTURE says of byte streams: all bytes in order, backpressure to the program, an explicit
//! end always, and a consumer that goes ends the reading but not the program.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::support::backend::HeldBackend;
use crate::support::coordinator::{Coordinator, LinkPeer, StreamPeer, kind_of};
use crate::support::{Host, config, create, start, until};
use cloister_api::common::{ExecSpec, ExitReason, TerminalSize, output_frame::Frame};
use cloister_api::host::stream_request::Message;
use cloister_api::host::{
    GetExec, HostErrorKind, OpenStream, ResizeExec, SignalExec, StopSandbox, WriteStdin,
};
use cloister_types::session::Reason;
use cloister_types::{BackendKind, ExecId, SandboxId, SessionId};
use tempfile::TempDir;

struct Setup {
    _directory: TempDir,
    coordinator: Coordinator,
    backend: Arc<HeldBackend>,
    session: SessionId,
    host: Host,
    link: LinkPeer,
}

async fn setup() -> Setup {
    let directory = tempfile::tempdir().unwrap();
    let mut coordinator = Coordinator::start().await;
    let backend = HeldBackend::new(BackendKind::Sim);
    let host = Host::start(config(&directory, &coordinator), backend.clone());
    let mut link = coordinator.link().await;
    let session = SessionId::generate();
    link.ask(&session, 1, create(&SandboxId::generate())).await.unwrap();
    Setup { _directory: directory, coordinator, backend, session, host, link }
}

impl Setup {
    async fn open(&mut self, open: OpenStream) -> StreamPeer {
        let id = ExecId::generate().to_string();
        let open = OpenStream { stream_id: id.clone(), session_id: self.session.to_string(), ..open };
        self.link.open(open).await;
        self.coordinator.stream(&id).await
    }

    async fn run(&mut self, exec: &ExecId, argv: &[&str], stdin: bool) -> StreamPeer {
        let open = OpenStream { start: start(exec, argv, stdin).into(), ..Default::default() };
        let mut stream = self.open(open).await;
        let Some(Message::Exec(started)) = stream.next().await else { panic!("the exec comes first") };
        assert_eq!(started.id, exec.as_str());
        stream
    }

    async fn read(&mut self, exec: &ExecId, from_offset: u64, no_follow: bool) -> StreamPeer {
        let open = OpenStream { exec_id: exec.to_string(), from_offset, no_follow, ..Default::default() };
        let mut stream = self.open(open).await;
        let Some(Message::Exec(found)) = stream.next().await else { panic!("the exec comes first") };
        assert_eq!(found.id, exec.as_str());
        stream
    }
}

/// Reads to the last message: the bytes and what ended them. Nothing may follow it.
async fn drain(stream: &mut StreamPeer, mut offset: u64) -> (Vec<u8>, Message) {
    let mut bytes = Vec::new();
    loop {
        match stream.next().await.expect("a stream never ends without its last message") {
            Message::Frame(frame) => match frame.frame.clone().expect("never empty") {
                Frame::Data(data) => {
                    assert_eq!(data.offset, offset, "a hole or a repetition");
                    offset += u64::try_from(data.data.len()).unwrap();
                    bytes.extend_from_slice(&data.data);
                }
                Frame::Gap(gap) => panic!("nothing is lost here: {gap:?}"),
                Frame::Exit(_) => {
                    assert!(stream.next().await.is_none(), "something follows the exit");
                    return (bytes, Message::Frame(frame));
                }
            },
            last => {
                assert!(stream.next().await.is_none(), "something follows the last message");
                return (bytes, last);
            }
        }
    }
}

fn exit_of(last: &Message) -> cloister_api::common::ExecExit {
    match last {
        Message::Frame(frame) => match &frame.frame {
            Some(Frame::Exit(exit)) => exit.as_ref().clone(),
            other => panic!("no exit: {other:?}"),
        },
        other => panic!("no exit: {other:?}"),
    }
}

fn stdin(offset: u64, data: &str, eof: bool) -> WriteStdin {
    WriteStdin { offset, data: data.as_bytes().to_vec(), eof, ..Default::default() }
}

#[tokio::test]
async fn a_reader_that_stops_stops_the_program_and_nothing_else() {
    let mut setup = setup().await;
    let exec = ExecId::generate();
    let frames = 1024u64;
    let total = frames * 64 * 1024;
    let mut stream = setup.run(&exec, &["count", &total.to_string()], false).await;
    // Other work over the same connection goes on while this stream stands still.
    for _ in 0..50 {
        let get = GetExec { exec_id: exec.to_string(), ..Default::default() };
        setup.link.ask(&setup.session.clone(), 1, get).await.unwrap();
    }
    setup.link.beats(4).await;
    let asked = setup.backend.exec(&setup.session, &exec).asked.load(Ordering::SeqCst);
    assert!((1..100).contains(&asked), "{asked} of {frames} frames were asked for though nobody reads");

    let (bytes, last) = drain(&mut stream, 0).await;
    assert_eq!(u64::try_from(bytes.len()).unwrap(), total);
    let exit = exit_of(&last);
    assert_eq!((exit.reason.as_known(), exit.code), (Some(ExitReason::Exited), 0));
    assert_eq!(exit.output_bytes, total);
    setup.host.stop_with(setup.link).await.unwrap();
}

#[tokio::test]
async fn input_and_output_of_one_program_share_a_stream() {
    let mut setup = setup().await;
    let exec = ExecId::generate();
    let mut stream = setup.run(&exec, &["cat"], true).await;
    stream.send(stdin(0, "one ", false)).await;
    stream.send(stdin(4, "two", false)).await;
    // A repetition after a lost connection is skipped.
    stream.send(stdin(4, "two", false)).await;
    stream.send(stdin(7, "!", true)).await;
    let (bytes, last) = drain(&mut stream, 0).await;
    assert_eq!(bytes, b"one two!");
    assert_eq!(exit_of(&last).code, 0);

    // A second process takes the output up in the middle.
    let mut stream = setup.read(&exec, 4, false).await;
    let (bytes, last) = drain(&mut stream, 4).await;
    assert_eq!(bytes, b"two!");
    assert_eq!(exit_of(&last).output_bytes, 8);
    setup.host.stop_with(setup.link).await.unwrap();
}

#[tokio::test]
async fn a_hole_in_the_input_is_an_error_and_a_closed_input_is_none() {
    let mut setup = setup().await;
    let holed = ExecId::generate();
    let mut stream = setup.run(&holed, &["cat"], true).await;
    stream.send(stdin(5, "late", false)).await;
    let (_, last) = drain(&mut stream, 0).await;
    let Message::Error(error) = last else { panic!("{last:?}") };
    assert_eq!(kind_of(&error), HostErrorKind::Invalid);
    assert!(error.message.contains("next offset is 0"), "{}", error.message);

    let closed = ExecId::generate();
    let mut stream = setup.run(&closed, &["hold"], false).await;
    stream.send(stdin(0, "", false)).await;
    stream.send(SignalExec { signal: 15, ..Default::default() }).await;
    let (_, last) = drain(&mut stream, 0).await;
    assert_eq!(exit_of(&last).code, 143);
    setup.host.stop_with(setup.link).await.unwrap();
}

#[tokio::test]
async fn a_program_that_does_not_read_cannot_hold_back_its_signals() {
    let mut setup = setup().await;
    let exec = ExecId::generate();
    let mut stream = setup.run(&exec, &["hold"], true).await;
    stream.send(stdin(0, "never read", false)).await;
    stream.send(SignalExec { signal: 2, ..Default::default() }).await;
    let (_, last) = drain(&mut stream, 0).await;
    assert_eq!(exit_of(&last).reason.as_known(), Some(ExitReason::Signaled));
    setup.host.stop_with(setup.link).await.unwrap();
}

#[tokio::test]
async fn a_terminal_takes_input_without_offsets_and_sizes_after_it() {
    let mut setup = setup().await;
    let exec = ExecId::generate();
    let size = TerminalSize { rows: 30, columns: 100, ..Default::default() };
    let mut begin = start(&exec, &["cat"], false);
    begin.spec = ExecSpec { terminal: size.clone().into(), ..begin.spec.into_option().unwrap() }.into();
    let session = setup.session.clone();
    setup.link.ask(&session, 1, begin).await.unwrap();
    let typed = |data: &str, eof| WriteStdin { append: true, ..stdin(0, data, eof) };
    let mut stream = setup.read(&exec, 0, false).await;
    stream.send(typed("one ", false)).await;
    stream.send(ResizeExec { size: size.into(), ..Default::default() }).await;
    stream.send(typed("two", true)).await;
    let (bytes, last) = drain(&mut stream, 0).await;
    // A size waits for the input before it, for a while; input waits for no size.
    let text = String::from_utf8(bytes).unwrap();
    let possible = ["one 100x30\ntwo", "one two100x30\n", "one two"];
    assert!(possible.contains(&text.as_str()), "{text:?}");
    assert_eq!(exit_of(&last).code, 0);

    let plain = ExecId::generate();
    let mut stream = setup.run(&plain, &["cat"], true).await;
    stream.send(typed("x", false)).await;
    let (_, last) = drain(&mut stream, 0).await;
    let Message::Error(error) = last else { panic!("{last:?}") };
    assert_eq!(kind_of(&error), HostErrorKind::Invalid);
    setup.host.stop_with(setup.link).await.unwrap();
}

#[tokio::test]
async fn a_consumer_that_goes_ends_the_reading_not_the_program() {
    let mut setup = setup().await;
    let exec = ExecId::generate();
    let stream = setup.run(&exec, &["cat"], true).await;
    let program = setup.backend.exec(&setup.session, &exec);
    until("a reader is there", || program.readers.load(Ordering::SeqCst) == 1).await;
    // It prints nothing: the reading ends all the same.
    drop(stream);
    let session = setup.session.clone();
    until("the reader is gone", || program.readers.load(Ordering::SeqCst) == 0).await;
    for write in [stdin(0, "abc", false), stdin(3, "def", true)] {
        let write = WriteStdin { exec_id: exec.to_string(), ..write };
        setup.link.ask(&session, 1, write).await.unwrap();
    }
    let (bytes, last) = drain(&mut setup.read(&exec, 0, false).await, 0).await;
    assert_eq!((bytes.as_slice(), exit_of(&last).code), (b"abcdef".as_slice(), 0));
    setup.host.stop_with(setup.link).await.unwrap();
}

#[tokio::test]
async fn reading_without_following_ends_with_the_next_offset() {
    let mut setup = setup().await;
    let exec = ExecId::generate();
    let session = setup.session.clone();
    setup.link.ask(&session, 1, start(&exec, &["cat"], true)).await.unwrap();
    let write = WriteStdin { exec_id: exec.to_string(), ..stdin(0, "abc", false) };
    setup.link.ask(&session, 1, write).await.unwrap();
    let (bytes, last) = drain(&mut setup.read(&exec, 1, true).await, 1).await;
    let Message::End(end) = last else { panic!("{last:?}") };
    assert_eq!((bytes.as_slice(), end.next_offset), (b"bc".as_slice(), 3));
    setup.host.stop_with(setup.link).await.unwrap();
}

#[tokio::test]
async fn the_end_of_a_sandbox_is_the_exit_of_its_programs() {
    let mut setup = setup().await;
    let exec = ExecId::generate();
    let mut stream = setup.run(&exec, &["cat"], true).await;
    stream.send(stdin(0, "abc", false)).await;
    let Some(Message::Frame(_)) = stream.next().await else { panic!("output comes") };
    setup.backend.kill(&setup.session, Reason::SandboxGone);
    let (bytes, last) = drain(&mut stream, 3).await;
    assert!(bytes.is_empty());
    assert_eq!(exit_of(&last).reason.as_known(), Some(ExitReason::SandboxGone));

    // Its output is still there.
    let (bytes, last) = drain(&mut setup.read(&exec, 0, false).await, 0).await;
    assert_eq!(bytes, b"abc");
    assert_eq!(exit_of(&last).reason.as_known(), Some(ExitReason::SandboxGone));
    setup.host.stop_with(setup.link).await.unwrap();
}

#[tokio::test]
async fn what_cannot_be_streamed_is_said_so() {
    let mut setup = setup().await;
    let open = OpenStream { exec_id: ExecId::generate().to_string(), ..Default::default() };
    let (_, last) = drain(&mut setup.open(open).await, 0).await;
    let Message::Error(error) = last else { panic!("{last:?}") };
    assert_eq!(kind_of(&error), HostErrorKind::NotFound);

    let session = setup.session.clone();
    setup.link.ask(&session, 1, StopSandbox::default()).await.unwrap();
    let open = OpenStream { start: start(&ExecId::generate(), &["cat"], true).into(), ..Default::default() };
    let (_, last) = drain(&mut setup.open(open).await, 0).await;
    let Message::Error(error) = last else { panic!("{last:?}") };
    assert_eq!(kind_of(&error), HostErrorKind::NotRunning);

    setup.session = SessionId::generate();
    let id = "a-stream".to_owned();
    setup
        .link
        .open(OpenStream { stream_id: id.clone(), session_id: "nonsense".to_owned(), ..Default::default() })
        .await;
    let (_, last) = drain(&mut setup.coordinator.stream(&id).await, 0).await;
    let Message::Error(error) = last else { panic!("{last:?}") };
    assert_eq!(kind_of(&error), HostErrorKind::Invalid);
    setup.host.stop_with(setup.link).await.unwrap();
}

#[tokio::test]
async fn a_stop_of_the_agent_ends_streams_with_a_word_and_no_program() {
    let mut setup = setup().await;
    let exec = ExecId::generate();
    let mut stream = setup.run(&exec, &["hold"], false).await;
    let (stopped, (_, last)) = tokio::join!(setup.host.stop_with(setup.link), drain(&mut stream, 0));
    stopped.unwrap();
    let Message::Error(error) = last else { panic!("{last:?}") };
    assert_eq!(kind_of(&error), HostErrorKind::Internal);
    assert!(error.message.contains("stopping"), "{}", error.message);
    assert!(setup.backend.sandbox(&setup.session).is_some());
}
