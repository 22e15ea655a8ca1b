//! Proves the exec claims: output arrives and ends with an exit; a cut stream is an error; input and signals get
//! through; a slow or leaving caller stops the host; paused sessions answer reads.

use std::sync::atomic::Ordering;
use std::time::Duration;

use cloister_api::app::attach_exec_request::Request;
use cloister_api::app::attach_exec_response::Response;
use cloister_api::app::{
    AttachExecRequest, AttachStart, AttachStdin, GetExecRequest, ListExecsRequest, PauseSessionRequest,
    ReadOutputRequest, ResizeExecRequest, Session, SignalExecRequest, StartExecRequest, WaitExecRequest,
    WriteStdinRequest,
};
use cloister_api::common::output_frame::Frame;
use cloister_api::common::{ExecExit, ExecSpec, ExecState, ExitReason, OutputFrame, TerminalSize};
use cloister_api::connection::Connection;
use connectrpc::{ConnectError, ErrorCode};

use super::host::FakeHost;
use super::support::{SOON, TestCoordinator, active_session, assert_code, spec};

const GIB: u64 = 1 << 30;

/// A coordinator with one host and an active session on it.
struct Scene {
    coordinator: TestCoordinator,
    host: FakeHost,
    owner: Connection,
    session: Session,
}

impl Scene {
    /// Sets it up; `None` after a `SKIP:` line.
    async fn start() -> Option<Self> {
        let coordinator = TestCoordinator::start().await?;
        let host = FakeHost::connect(&coordinator, 8 << 30).await;
        let owner = coordinator.owner().await;
        let session = active_session(&owner, "c1").await;
        Some(Self { coordinator, host, owner, session })
    }
}

fn start(request_id: &str, session: &str, argv: &[&str]) -> StartExecRequest {
    StartExecRequest {
        request_id: request_id.to_owned(),
        session: session.to_owned(),
        spec: spec(argv).into(),
        ..Default::default()
    }
}

fn attach(request_id: &str, session: &str, argv: &[&str]) -> AttachExecRequest {
    let start = AttachStart {
        request_id: request_id.to_owned(),
        session: session.to_owned(),
        spec: spec(argv).into(),
        ..Default::default()
    };
    AttachExecRequest { request: Some(start.into()), ..Default::default() }
}

fn stdin(offset: u64, data: &[u8], eof: bool) -> AttachExecRequest {
    let stdin = AttachStdin { offset, data: data.to_vec(), eof, ..Default::default() };
    AttachExecRequest { request: Some(stdin.into()), ..Default::default() }
}

/// Collects bytes until the exit.
fn collect(frame: OutputFrame, bytes: &mut Vec<u8>) -> Option<ExecExit> {
    match frame.frame.expect("a frame") {
        Frame::Data(data) => {
            assert_eq!(data.offset, u64::try_from(bytes.len()).unwrap());
            bytes.extend_from_slice(&data.data);
            None
        }
        Frame::Gap(gap) => panic!("a gap: {gap:?}"),
        Frame::Exit(exit) => Some(*exit),
    }
}

async fn read(
    connection: &Connection,
    request: ReadOutputRequest,
) -> Result<(Vec<u8>, Option<ExecExit>), ConnectError> {
    let mut stream = connection.streams().read_output(request).await?;
    let mut bytes = Vec::new();
    let mut exit = None;
    while let Some(message) = stream.message().await? {
        let frame = message.to_owned_message().frame.into_option().expect("a frame");
        assert!(exit.is_none(), "a frame after the exit");
        exit = collect(frame, &mut bytes);
    }
    Ok((bytes, exit))
}

fn output(session: &str, exec_id: &str) -> ReadOutputRequest {
    ReadOutputRequest { session: session.to_owned(), exec_id: exec_id.to_owned(), ..Default::default() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_exec_starts_once_for_a_request_id_and_its_output_ends_with_the_exit() {
    let Some(Scene { coordinator: _coordinator, host: _host, owner, session }) = Scene::start().await else {
        return;
    };
    let first =
        owner.execs().start_exec(start("e1", &session.id, &["echo", "hello", "world"])).await.expect("start");
    let exec = first.into_owned().exec.into_option().unwrap();
    assert_eq!(exec.session_id, session.id);
    let again = owner
        .execs()
        .start_exec(start("e1", &session.id, &["echo", "hello", "world"]))
        .await
        .expect("repeat");
    assert_eq!(again.into_owned().exec.id, exec.id);
    let other = owner.execs().start_exec(start("e1", &session.id, &["echo", "other"])).await;
    assert_code(other, "CL1024", ErrorCode::AlreadyExists);

    let (bytes, exit) = read(&owner, output(&session.id, &exec.id)).await.expect("read");
    assert_eq!(bytes, b"hello world");
    let exit = exit.expect("the stream ends with the exit");
    assert_eq!(exit.reason, ExitReason::Exited);

    let wait = WaitExecRequest {
        session: session.id.clone(),
        exec_id: exec.id.clone(),
        wait_ms: 20_000,
        ..Default::default()
    };
    let waited = owner.execs().wait_exec(wait).await.expect("wait").into_owned().exec;
    assert_eq!(waited.state, ExecState::Exited);
    let list = ListExecsRequest { session: session.id.clone(), ..Default::default() };
    assert_eq!(owner.execs().list_execs(list).await.expect("list").into_owned().execs.len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_stream_starts_feeds_and_reads_an_exec() {
    let Some(Scene { coordinator: _coordinator, host: _host, owner, session }) = Scene::start().await else {
        return;
    };
    let stream = owner.streams().attach_exec().await.expect("attach");
    let (mut send, mut receive) = stream.into_split();
    send.send(attach("a1", &session.id, &["cat"])).await.expect("start");
    let first = receive.message().await.expect("an answer").expect("a first message").to_owned_message();
    assert!(matches!(first.response, Some(Response::Started(_))), "{first:?}");
    let input: Vec<u8> = (0..300_000u32).map(|n| u8::try_from(n % 251).unwrap()).collect();
    let (left, right) = input.split_at(150_000);
    send.send(stdin(0, left, false)).await.expect("write");
    send.send(stdin(150_000, right, true)).await.expect("write");
    let mut bytes = Vec::new();
    let mut exit = None;
    while let Some(message) = receive.message().await.expect("the stream ends well") {
        match message.to_owned_message().response {
            Some(Response::Frame(frame)) => exit = collect(*frame, &mut bytes),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(bytes, input);
    assert_eq!(exit.expect("an exit").reason, ExitReason::Exited);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn signals_end_an_exec_on_its_stream_and_by_a_call() {
    let Some(Scene { coordinator: _coordinator, host: _host, owner, session }) = Scene::start().await else {
        return;
    };
    let stream = owner.streams().attach_exec().await.expect("attach");
    let (mut send, mut receive) = stream.into_split();
    send.send(attach("a1", &session.id, &["sleep"])).await.expect("start");
    receive.message().await.expect("an answer").expect("a first message");
    send.send(AttachExecRequest { request: Some(Request::Signal(15)), ..Default::default() })
        .await
        .expect("signal");
    let last = receive.message().await.expect("well").expect("the exit").to_owned_message();
    let Some(Response::Frame(frame)) = last.response else { panic!("no frame") };
    assert_eq!(collect(*frame, &mut Vec::new()).expect("the exit").signal, 15);

    let exec = owner
        .execs()
        .start_exec(start("e1", &session.id, &["sleep"]))
        .await
        .expect("start")
        .into_owned()
        .exec;
    let signal = SignalExecRequest {
        session: session.id.clone(),
        exec_id: exec.id.clone(),
        signal: 9,
        ..Default::default()
    };
    owner.execs().signal_exec(signal).await.expect("signal");
    let (_, exit) = read(&owner, output(&session.id, &exec.id)).await.expect("read");
    assert_eq!(exit.expect("the exit").code, 137);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_several_type_and_a_new_size_reach_the_host_in_order() {
    let Some(Scene { coordinator: _coordinator, host: _host, owner, session }) = Scene::start().await else {
        return;
    };
    let size = |rows, columns| TerminalSize { rows, columns, ..Default::default() };
    let mut started = start("e1", &session.id, &["cat"]);
    started.spec = ExecSpec { terminal: size(24, 80).into(), ..started.spec.into_option().unwrap() }.into();
    let exec = owner.execs().start_exec(started).await.expect("start").into_owned().exec;
    assert_eq!(exec.spec.terminal.columns, 80);
    let typed =
        |data: &[u8], eof| AttachStdin { data: data.to_vec(), eof, append: true, ..Default::default() };
    let take_up = AttachStart { session: session.id.clone(), exec_id: exec.id.clone(), ..Default::default() };
    let stream = owner.streams().attach_exec().await.expect("attach");
    let (mut send, mut receive) = stream.into_split();
    let requests = [
        Request::from(take_up),
        Request::from(typed(b"one ", false)),
        Request::from(size(30, 100)),
        Request::from(typed(b"two", false)),
    ];
    for request in requests {
        send.send(AttachExecRequest { request: Some(request), ..Default::default() }).await.expect("send");
    }
    let mut bytes = Vec::new();
    while !bytes.ends_with(b"two") {
        let message = receive.message().await.expect("well").expect("more").to_owned_message();
        if let Some(Response::Frame(frame)) = message.response {
            assert!(collect(*frame, &mut bytes).is_none());
        }
    }
    // And by calls, as another viewer would.
    let resize = ResizeExecRequest {
        session: session.id.clone(),
        exec_id: exec.id.clone(),
        size: size(50, 200).into(),
        ..Default::default()
    };
    owner.execs().resize_exec(resize.clone()).await.expect("resize");
    let write = WriteStdinRequest {
        session: session.id.clone(),
        exec_id: exec.id.clone(),
        data: b"three".to_vec(),
        append: true,
        eof: true,
        ..Default::default()
    };
    owner.execs().write_stdin(write).await.expect("type");
    let (bytes, exit) = read(&owner, output(&session.id, &exec.id)).await.expect("read");
    let text = String::from_utf8(bytes).unwrap();
    assert_eq!((text.as_str(), exit.is_some()), ("one [100x30]two[200x50]three", true));

    for (rows, columns) in [(0, 80), (24, 0), (4097, 1), (1, u32::MAX)] {
        let wrong = ResizeExecRequest { size: size(rows, columns).into(), ..resize.clone() };
        assert_code(owner.execs().resize_exec(wrong).await, "CL1003", ErrorCode::InvalidArgument);
        let mut wrong = start("e2", &session.id, &["cat"]);
        wrong.spec =
            ExecSpec { terminal: size(rows, columns).into(), ..wrong.spec.into_option().unwrap() }.into();
        assert_code(owner.execs().start_exec(wrong).await, "CL1003", ErrorCode::InvalidArgument);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_without_an_exit_is_an_error_that_says_where_to_go_on() {
    let Some(Scene { coordinator: _coordinator, host, owner, session }) = Scene::start().await else {
        return;
    };
    let exec =
        owner.execs().start_exec(start("e1", &session.id, &["cut"])).await.expect("start").into_owned().exec;
    let error = read(&owner, output(&session.id, &exec.id)).await.expect_err("it was cut");
    assert!(error.to_string().contains("offset 4"), "{error}");
    assert_code::<()>(Err(error), "CL1018", ErrorCode::Unavailable);
    // The same on the stream that started it.
    let stream = owner.streams().attach_exec().await.expect("attach");
    let (mut send, mut receive) = stream.into_split();
    send.send(attach("a1", &session.id, &["cut"])).await.expect("start");
    let error = loop {
        match receive.message().await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("a clean end without an exit"),
            Err(error) => break error,
        }
    };
    assert_code::<()>(Err(error), "CL1018", ErrorCode::Unavailable);
    // And when the host goes away.
    let sleeping = owner
        .execs()
        .start_exec(start("e2", &session.id, &["flood"]))
        .await
        .expect("start")
        .into_owned()
        .exec;
    let mut stream = owner.streams().read_output(output(&session.id, &sleeping.id)).await.expect("read");
    stream.message().await.expect("a first frame").expect("a frame");
    host.disconnect();
    drop(host);
    let lying = owner.execs().start_exec(start("e3", &session.id, &["lie"])).await;
    assert_code(lying, "CL1011", ErrorCode::Unavailable);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_out_of_order_are_refused() {
    let Some(Scene { coordinator: _coordinator, host: _host, owner, session }) = Scene::start().await else {
        return;
    };
    let exec =
        owner.execs().start_exec(start("e1", &session.id, &["lie"])).await.expect("start").into_owned().exec;
    let result = read(&owner, output(&session.id, &exec.id)).await;
    assert_code(result, "CL1017", ErrorCode::Internal);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_caller_slows_the_host_and_a_leaving_one_ends_the_stream() {
    let Some(coordinator) = TestCoordinator::start().await else { return };
    let mut host = FakeHost::connect(&coordinator, 8 * GIB).await;
    let owner = coordinator.owner().await;
    let session = active_session(&owner, "c1").await;
    let exec = owner
        .execs()
        .start_exec(start("e1", &session.id, &["flood"]))
        .await
        .expect("start")
        .into_owned()
        .exec;
    let mut stream = owner.streams().read_output(output(&session.id, &exec.id)).await.expect("read");
    stream.message().await.expect("a first frame").expect("a frame");
    // Nobody reads: the host comes to a halt within the windows of both connections and the sender's queue.
    let mut last = 0;
    let halted = async {
        loop {
            tokio::time::sleep(Duration::from_millis(300)).await;
            let now = host.flooded.load(Ordering::SeqCst);
            if now == last && now > 0 {
                return now;
            }
            last = now;
        }
    };
    let halted = tokio::time::timeout(SOON, halted).await.expect("the host comes to a halt");
    assert!(halted < 8 << 20, "{halted} bytes went ahead of a reader that does not read");
    // Other calls are not blocked by it.
    let quick = active_session(&owner, "c2");
    tokio::time::timeout(Duration::from_secs(5), quick).await.expect("not blocked");
    drop(stream);
    tokio::time::timeout(SOON, host.let_go.wait_for(|count| *count > 0))
        .await
        .expect("the host is let go")
        .expect("the host runs");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_paused_session_answers_reads_and_refuses_new_execs_with_the_remedy() {
    let Some(Scene { coordinator: _coordinator, host: _host, owner, session }) = Scene::start().await else {
        return;
    };
    let exec = owner
        .execs()
        .start_exec(start("e1", &session.id, &["echo", "kept"]))
        .await
        .expect("start")
        .into_owned()
        .exec;
    let pause = PauseSessionRequest {
        request_id: "p1".to_owned(),
        session: session.id.clone(),
        wait_ms: 20_000,
        ..Default::default()
    };
    owner.sessions().pause_session(pause).await.expect("pause");
    let (bytes, exit) = read(&owner, output(&session.id, &exec.id)).await.expect("read");
    assert_eq!((bytes.as_slice(), exit.is_some()), (b"kept".as_slice(), true));
    let refused = owner.execs().start_exec(start("e2", &session.id, &["echo"])).await;
    assert_code(refused, "CL1013", ErrorCode::FailedPrecondition);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn input_by_calls_is_written_once_and_a_reader_that_does_not_follow_ends() {
    let Some(Scene { coordinator: _coordinator, host: _host, owner, session }) = Scene::start().await else {
        return;
    };
    let exec =
        owner.execs().start_exec(start("e1", &session.id, &["cat"])).await.expect("start").into_owned().exec;
    let write = |offset, data: &[u8], eof| WriteStdinRequest {
        session: session.id.clone(),
        exec_id: exec.id.clone(),
        offset,
        data: data.to_vec(),
        eof,
        ..Default::default()
    };
    for _ in 0..2 {
        let next = owner.execs().write_stdin(write(0, b"abc", false)).await.expect("write").into_owned();
        assert_eq!(next.next_offset, 3);
    }
    owner.execs().write_stdin(write(3, b"def", true)).await.expect("write");
    let (bytes, exit) = read(&owner, output(&session.id, &exec.id)).await.expect("read");
    assert_eq!((bytes.as_slice(), exit.is_some()), (b"abcdef".as_slice(), true));

    let sleeping = owner
        .execs()
        .start_exec(start("e2", &session.id, &["sleep"]))
        .await
        .expect("start")
        .into_owned()
        .exec;
    let no_follow = ReadOutputRequest { no_follow: true, ..output(&session.id, &sleeping.id) };
    let (bytes, exit) = read(&owner, no_follow).await.expect("it ends by itself");
    assert_eq!((bytes.len(), exit), (0, None));
    let missing = GetExecRequest {
        session: session.id.clone(),
        exec_id: cloister_types::ExecId::generate().to_string(),
        ..Default::default()
    };
    assert_code(owner.execs().get_exec(missing).await, "CL1012", ErrorCode::NotFound);
}
