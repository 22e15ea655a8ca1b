//! A host agent that does what the test says.
//!
//! It keeps sessions and execs in memory and answers every command as the link's contract has it. Programs are chosen
//! by `argv[0]`: `echo` prints its arguments and ends; `cat` gives its input back; `sleep` waits for a signal; `flood`
//! prints for ever; `cut` prints and ends the stream without an exit; `lie` sends offsets out of order. Faults are
//! switches.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use cloister_api::common::{self, Exec, ExecExit, ExecSpec, ExecState, ExitReason, OutputData, OutputStream};
use cloister_api::connection::{Connection, HOST_WIRE_VERSION};
use cloister_api::host::command::Command as CommandKind;
use cloister_api::host::command_result::Result as ResultKind;
use cloister_api::host::control_response::Message as ToHost;
use cloister_api::host::stream_response::Message as StreamToHost;
use cloister_api::host::{
    ChannelEnd, ChannelOpened, ChannelTarget, Command, CommandResult, ControlRequest, ExecList, Heartbeat,
    HostError, HostErrorKind, OpenStream, Register, Resized, SandboxCreated, SandboxEvent, SandboxRemoved,
    SandboxReport, SandboxStopped, Signaled, StdinWritten, StreamEnd, StreamOpened, StreamRequest,
    StreamResponseView, channel_target,
};
use cloister_service::{TaskHandle, TaskRegistry};
use cloister_types::HostId;
use connectrpc::client::{BidiRecvHalf, ClientTransport, SharedHttp2Connection};
use tokio::sync::{mpsc, oneshot, watch};

use super::support::{HOST_TOKEN, SOON, TASK, TestCoordinator};

/// What the fake host has.
#[derive(Default)]
pub(super) struct HostState {
    /// By session.
    pub(super) sandboxes: BTreeMap<String, FakeSandbox>,
    /// By id.
    pub(super) execs: BTreeMap<String, FakeExec>,
    /// Every command, as `session kind epoch`.
    pub(super) commands: Vec<String>,
    pub(super) removed: Vec<String>,
}

#[derive(Debug, Clone)]
pub(super) struct FakeSandbox {
    pub(super) sandbox_id: String,
    pub(super) epoch: u64,
    pub(super) running: bool,
}

pub(super) struct FakeExec {
    pub(super) exec: Exec,
    request_id: String,
    input: Vec<u8>,
    eof: bool,
    changed: watch::Sender<u64>,
}

/// Switches.
#[derive(Default)]
pub(super) struct Faults {
    /// Commands other than reads are never answered.
    pub(super) silent: AtomicBool,
    /// Refuse to make sandboxes with this.
    pub(super) refuse_create: Mutex<Option<(HostErrorKind, String)>>,
    /// Fail at removing.
    pub(super) refuse_remove: AtomicBool,
    /// A stop finds that the disk did not take everything.
    pub(super) disk_error: AtomicBool,
    /// Claim this isolation for new sandboxes.
    pub(super) weak: AtomicBool,
}

/// A host agent.
pub(super) struct FakeHost {
    pub(super) id: HostId,
    pub(super) state: Arc<Mutex<HostState>>,
    pub(super) faults: Arc<Faults>,
    /// Bytes that `flood` has handed to its stream.
    pub(super) flooded: Arc<AtomicU64>,
    /// Streams that ended because the coordinator let go.
    pub(super) let_go: watch::Receiver<u64>,
    let_go_sender: watch::Sender<u64>,
    events: mpsc::Sender<ControlRequest>,
    task: TaskHandle,
    memory_bytes: u64,
}

impl FakeHost {
    pub(super) async fn connect(coordinator: &TestCoordinator, memory_bytes: u64) -> Self {
        let state = Arc::new(Mutex::new(HostState::default()));
        Self::connect_as(coordinator, HostId::generate(), state, memory_bytes).await
    }

    /// Connects as a host that has been here before.
    pub(super) async fn connect_as(
        coordinator: &TestCoordinator,
        id: HostId,
        state: Arc<Mutex<HostState>>,
        memory_bytes: u64,
    ) -> Self {
        let connection = coordinator.connect(HOST_TOKEN).await;
        let (events, queued) = mpsc::channel(64);
        let (registered, wait) = oneshot::channel();
        let (let_go_sender, let_go) = watch::channel(0);
        let faults = Arc::new(Faults::default());
        let flooded = Arc::new(AtomicU64::new(0));
        let runner = Runner {
            connection,
            tasks: coordinator.tasks.clone(),
            state: Arc::clone(&state),
            faults: Arc::clone(&faults),
            flooded: Arc::clone(&flooded),
            let_go: let_go_sender.clone(),
            events: events.clone(),
        };
        let register = register(&id, &state.lock().expect("lock"), memory_bytes);
        let task = coordinator.tasks.spawn(TASK, async move {
            runner.run(register, queued, registered).await;
            Ok::<(), String>(())
        });
        tokio::time::timeout(SOON, wait).await.expect("registers in time").expect("registers");
        Self { id, state, faults, flooded, let_go, let_go_sender, events, task, memory_bytes }
    }

    /// Cuts the link, as a kill does.
    pub(super) fn disconnect(&self) {
        self.task.abort();
    }

    /// Stops all sandboxes and tells so over a link of its own, as `cloister down` does; returns when that was taken.
    pub(super) async fn shut_down(&self, coordinator: &TestCoordinator) {
        self.disconnect();
        let register = {
            let mut state = self.state();
            state.sandboxes.values_mut().for_each(|sandbox| sandbox.running = false);
            Register { stopping: true, ..register(&self.id, &state, 0) }
        };
        let connection = coordinator.connect(HOST_TOKEN).await;
        let stream = connection.host_link().control().await.expect("open the control stream");
        let (mut send, mut receive) = stream.into_split();
        let first = ControlRequest { message: Some(register.into()), ..Default::default() };
        send.send(first).await.expect("send `register`");
        let answer = receive.message().await.expect("an answer").expect("an answer").to_owned_message();
        assert!(matches!(answer.message, Some(ToHost::Registered(_))), "{answer:?}");
        assert!(receive.message().await.expect("an end").is_none());
    }

    /// Waits until the coordinator has ended the link.
    pub(super) async fn link_ended(&self) {
        self.events.closed().await;
    }

    pub(super) async fn reconnect(self, coordinator: &TestCoordinator) -> Self {
        self.task.abort();
        drop(self.let_go_sender);
        Self::connect_as(coordinator, self.id, self.state, self.memory_bytes).await
    }

    pub(super) fn state(&self) -> MutexGuard<'_, HostState> {
        self.state.lock().expect("lock")
    }

    /// Tells that a sandbox ended.
    pub(super) async fn sandbox_gone(&self, session_id: &str, reason: &str) {
        let sandbox = {
            let mut state = self.state();
            let sandbox = state.sandboxes.get_mut(session_id).expect("it has one");
            sandbox.running = false;
            sandbox.clone()
        };
        let event = SandboxEvent {
            session_id: session_id.to_owned(),
            sandbox_id: sandbox.sandbox_id,
            epoch: sandbox.epoch,
            kind: "sandbox_gone".to_owned(),
            reason: reason.to_owned(),
            message: "it ended".to_owned(),
            ..Default::default()
        };
        let message = ControlRequest { message: Some(event.into()), ..Default::default() };
        self.events.send(message).await.expect("the host runs");
    }

    pub(super) async fn heartbeat(&self) {
        let message = ControlRequest { message: Some(Heartbeat::default().into()), ..Default::default() };
        self.events.send(message).await.expect("the host runs");
    }
}

fn register(id: &HostId, state: &HostState, memory_bytes: u64) -> Register {
    let capability = |name: &str| common::Capability {
        name: name.to_owned(),
        status: common::CapabilityStatus::Ok.into(),
        ..Default::default()
    };
    Register {
        host_id: id.to_string(),
        name: format!("fake-{}", &id.as_str()[id.as_str().len() - 6..]),
        version: "0.1.0".to_owned(),
        wire_version: HOST_WIRE_VERSION,
        boot_id: "boot-1".to_owned(),
        capabilities: vec![capability("backend.namespace"), capability("backend.sim")],
        memory_bytes,
        cpu_millis: 64_000,
        disk_bytes: 1 << 40,
        sandboxes: state
            .sandboxes
            .iter()
            .map(|(session_id, sandbox)| SandboxReport {
                session_id: session_id.clone(),
                // As real hosts: a layer alone does not say which sandbox it was of.
                sandbox_id: if sandbox.running { sandbox.sandbox_id.clone() } else { String::new() },
                epoch: sandbox.epoch,
                running: sandbox.running,
                ..Default::default()
            })
            .collect(),
        ..Default::default()
    }
}

#[derive(Clone)]
struct Runner {
    connection: Connection,
    tasks: TaskRegistry,
    state: Arc<Mutex<HostState>>,
    faults: Arc<Faults>,
    flooded: Arc<AtomicU64>,
    let_go: watch::Sender<u64>,
    events: mpsc::Sender<ControlRequest>,
}

impl Runner {
    async fn run(
        self,
        register: Register,
        mut queued: mpsc::Receiver<ControlRequest>,
        registered: oneshot::Sender<()>,
    ) {
        let mut registered = Some(registered);
        let stream = self.connection.host_link().control().await.expect("open the control stream");
        let (mut send, mut receive) = stream.into_split();
        let first = ControlRequest { message: Some(register.into()), ..Default::default() };
        send.send(first).await.expect("send `register`");
        loop {
            tokio::select! {
                message = receive.message() => match message {
                    Ok(Some(message)) => match message.to_owned_message().message {
                        Some(ToHost::Registered(answer)) => {
                            {
                                let mut state = self.state.lock().expect("lock");
                                for session_id in &answer.remove_session_ids {
                                    state.sandboxes.remove(session_id);
                                    state.removed.push(session_id.clone());
                                }
                            }
                            if let Some(registered) = registered.take() {
                                let _ = registered.send(());
                            }
                        }
                        Some(ToHost::Command(command)) => {
                            let runner = self.clone();
                            self.tasks.spawn(TASK, async move {
                                runner.command(*command).await;
                                Ok::<(), String>(())
                            });
                        }
                        // It reads whatever comes, so that the end of each stream reaches it.
                        Some(ToHost::CloseStream(_)) => {}
                        Some(ToHost::OpenStream(open)) => {
                            let runner = self.clone();
                            self.tasks.spawn(TASK, async move {
                                runner.stream(*open).await;
                                Ok::<(), String>(())
                            });
                        }
                        None => panic!("an empty message from the coordinator"),
                    },
                    Ok(None) | Err(_) => return,
                },
                event = queued.recv() => match event {
                    Some(event) => if send.send(event).await.is_err() { return },
                    None => return,
                },
            }
        }
    }

    async fn command(&self, command: Command) {
        let id = command.id;
        let Some(result) = self.answer(command).await else { return };
        let result = CommandResult { id, result: Some(result), ..Default::default() };
        let message = ControlRequest { message: Some(result.into()), ..Default::default() };
        let _ = self.events.send(message).await;
    }

    async fn answer(&self, command: Command) -> Option<ResultKind> {
        let refused = |kind: HostErrorKind, message: &str| {
            Some(HostError { kind: kind.into(), message: message.to_owned(), ..Default::default() }.into())
        };
        let session_id = command.session_id.clone();
        let kind = command.command.expect("a command has a kind");
        let word = match &kind {
            CommandKind::Create(_) => "create",
            CommandKind::Stop(_) => "stop",
            CommandKind::Remove(_) => "remove",
            CommandKind::StartExec(_) => "start_exec",
            CommandKind::GetExec(_) => "get_exec",
            CommandKind::ListExecs(_) => "list_execs",
            CommandKind::WriteStdin(_) => "write_stdin",
            CommandKind::SignalExec(_) => "signal_exec",
            CommandKind::ResizeExec(_) => "resize_exec",
            CommandKind::WaitExec(_) => "wait_exec",
        };
        {
            let mut state = self.state.lock().expect("lock");
            state.commands.push(format!("{session_id} {word} {}", command.epoch));
            if let Some(sandbox) = state.sandboxes.get_mut(&session_id) {
                if command.epoch < sandbox.epoch {
                    return refused(HostErrorKind::Fenced, "a newer epoch was seen");
                }
                sandbox.epoch = command.epoch;
            }
        }
        let effect = matches!(kind, CommandKind::Create(_) | CommandKind::Stop(_) | CommandKind::Remove(_));
        if effect && self.faults.silent.load(Ordering::SeqCst) {
            return None;
        }
        match kind {
            CommandKind::Create(create) => {
                let is_here = self.state.lock().expect("lock").sandboxes.contains_key(&session_id);
                if create.resumes && !is_here {
                    return refused(HostErrorKind::LayerMissing, "its files are gone");
                }
                if let Some((kind, message)) = self.faults.refuse_create.lock().expect("lock").clone() {
                    return refused(kind, &message);
                }
                let sandbox = FakeSandbox {
                    sandbox_id: create.sandbox_id.clone(),
                    epoch: command.epoch,
                    running: true,
                };
                self.state.lock().expect("lock").sandboxes.insert(session_id, sandbox);
                let isolation = if self.faults.weak.load(Ordering::SeqCst) {
                    common::Isolation::None
                } else {
                    common::Isolation::Container
                };
                let fact = common::IsolationFact {
                    name: "landlock_abi".to_owned(),
                    value: "3".to_owned(),
                    ..Default::default()
                };
                Some(
                    SandboxCreated { isolation: isolation.into(), facts: vec![fact], ..Default::default() }
                        .into(),
                )
            }
            CommandKind::Stop(stop) => {
                let mut state = self.state.lock().expect("lock");
                match state.sandboxes.get_mut(&session_id) {
                    Some(sandbox) if sandbox.sandbox_id == stop.sandbox_id => {
                        sandbox.running = false;
                        let mut stopped = SandboxStopped::default();
                        if self.faults.disk_error.load(Ordering::SeqCst) {
                            stopped.reason = "disk_error".to_owned();
                            stopped.message = "make room".to_owned();
                        }
                        Some(stopped.into())
                    }
                    _ => refused(HostErrorKind::NotFound, "no such sandbox"),
                }
            }
            CommandKind::Remove(_) if self.faults.refuse_remove.load(Ordering::SeqCst) => {
                refused(HostErrorKind::Internal, "the layer is busy")
            }
            CommandKind::Remove(_) => {
                let mut state = self.state.lock().expect("lock");
                state.sandboxes.remove(&session_id);
                state.removed.push(session_id);
                Some(SandboxRemoved::default().into())
            }
            CommandKind::StartExec(start) => {
                let exec = self.start_exec(&session_id, &start.exec_id, &start.request_id, &start.spec);
                match exec {
                    Ok(exec) => Some(exec.into()),
                    Err(error) => Some(error.into()),
                }
            }
            CommandKind::GetExec(get) => self.exec_answer(&session_id, &get.exec_id),
            CommandKind::WaitExec(wait) => {
                let changed = self
                    .state
                    .lock()
                    .expect("lock")
                    .execs
                    .get(&wait.exec_id)
                    .map(|exec| exec.changed.subscribe());
                if let Some(mut changed) = changed {
                    let ended = async {
                        loop {
                            changed.borrow_and_update();
                            let state = self.exec(&wait.exec_id).map(|exec| exec.exit.is_set());
                            if state == Some(true) || changed.changed().await.is_err() {
                                return;
                            }
                        }
                    };
                    let _ = tokio::time::timeout(Duration::from_millis(wait.wait_ms), ended).await;
                }
                self.exec_answer(&session_id, &wait.exec_id)
            }
            CommandKind::ListExecs(_) => {
                let state = self.state.lock().expect("lock");
                let execs = state
                    .execs
                    .values()
                    .filter(|exec| exec.exec.session_id == session_id)
                    .map(|exec| exec.exec.clone())
                    .collect();
                Some(ExecList { execs, ..Default::default() }.into())
            }
            CommandKind::WriteStdin(write) => {
                match self.write(
                    &write.exec_id,
                    (!write.append).then_some(write.offset),
                    &write.data,
                    write.eof,
                ) {
                    Some(next_offset) => Some(StdinWritten { next_offset, ..Default::default() }.into()),
                    None => refused(HostErrorKind::NotFound, "no such exec"),
                }
            }
            CommandKind::ResizeExec(resize) => match self.resize(&resize.exec_id, &resize.size) {
                Some(_) => Some(Resized::default().into()),
                None => refused(HostErrorKind::NotFound, "no such exec"),
            },
            CommandKind::SignalExec(signal) => {
                if self.signal(&signal.exec_id, signal.signal) {
                    Some(Signaled::default().into())
                } else {
                    refused(HostErrorKind::NotFound, "no such exec")
                }
            }
        }
    }

    fn start_exec(
        &self,
        session_id: &str,
        exec_id: &str,
        request_id: &str,
        spec: &ExecSpec,
    ) -> Result<Exec, HostError> {
        let mut state = self.state.lock().expect("lock");
        let refused = |kind: HostErrorKind, message: &str| HostError {
            kind: kind.into(),
            message: message.to_owned(),
            ..Default::default()
        };
        if !state.sandboxes.get(session_id).is_some_and(|sandbox| sandbox.running) {
            return Err(refused(HostErrorKind::NotRunning, "the sandbox is not running"));
        }
        let same = |exec: &&FakeExec| exec.exec.session_id == session_id && exec.request_id == request_id;
        if let Some(first) = state.execs.values().find(same) {
            return if first.exec.spec.as_option() == Some(spec) {
                Ok(first.exec.clone())
            } else {
                Err(refused(HostErrorKind::Conflict, "the request id was used for another exec"))
            };
        }
        let exec = Exec {
            id: exec_id.to_owned(),
            session_id: session_id.to_owned(),
            spec: spec.clone().into(),
            state: ExecState::Running.into(),
            pid: 7,
            ..Default::default()
        };
        let fake = FakeExec {
            exec: exec.clone(),
            request_id: request_id.to_owned(),
            input: Vec::new(),
            eof: false,
            changed: watch::channel(0).0,
        };
        state.execs.insert(exec_id.to_owned(), fake);
        Ok(exec)
    }

    fn exec(&self, exec_id: &str) -> Option<Exec> {
        self.state.lock().expect("lock").execs.get(exec_id).map(|exec| exec.exec.clone())
    }

    fn exec_answer(&self, session_id: &str, exec_id: &str) -> Option<ResultKind> {
        match self.exec(exec_id).filter(|exec| exec.session_id == session_id) {
            Some(exec) => Some(exec.into()),
            None => Some(
                HostError {
                    kind: HostErrorKind::NotFound.into(),
                    message: "no such exec".to_owned(),
                    ..Default::default()
                }
                .into(),
            ),
        }
    }

    /// A new size is seen among the input.
    fn resize(&self, exec_id: &str, size: &common::TerminalSize) -> Option<u64> {
        self.write(exec_id, None, format!("[{}x{}]", size.columns, size.rows).as_bytes(), false)
    }

    fn write(&self, exec_id: &str, offset: Option<u64>, data: &[u8], eof: bool) -> Option<u64> {
        let mut state = self.state.lock().expect("lock");
        let exec = state.execs.get_mut(exec_id)?;
        let have = u64::try_from(exec.input.len()).expect("a length");
        let skip =
            usize::try_from(have.saturating_sub(offset.unwrap_or(have))).expect("a length").min(data.len());
        exec.input.extend_from_slice(&data[skip..]);
        exec.eof |= eof;
        exec.changed.send_modify(|count| *count += 1);
        Some(u64::try_from(exec.input.len()).expect("a length"))
    }

    fn signal(&self, exec_id: &str, signal: i32) -> bool {
        let exit = ExecExit {
            reason: ExitReason::Signaled.into(),
            code: 128 + signal,
            signal,
            ..Default::default()
        };
        self.end(exec_id, exit)
    }

    fn end(&self, exec_id: &str, exit: ExecExit) -> bool {
        let mut state = self.state.lock().expect("lock");
        let Some(exec) = state.execs.get_mut(exec_id) else { return false };
        if exec.exec.exit.is_unset() {
            exec.exec.exit = exit.into();
            exec.exec.state = ExecState::Exited.into();
        }
        exec.changed.send_modify(|count| *count += 1);
        true
    }

    /// Opens a byte stream and plays the exec's program on it.
    async fn stream(&self, open: OpenStream) {
        let stream = self.connection.host_link().stream().await.expect("open a stream");
        let (mut send, mut receive) = stream.into_split();
        let message = |message: cloister_api::host::stream_request::Message| StreamRequest {
            message: Some(message),
            ..Default::default()
        };
        let opened = StreamOpened { stream_id: open.stream_id.clone(), ..Default::default() };
        send.send(message(opened.into())).await.expect("send `opened`");
        if let Some(target) = open.channel.as_option() {
            return channel(target, &mut send, &mut receive).await;
        }
        let exec = match open.start.as_option() {
            Some(start) => self.start_exec(&open.session_id, &start.exec_id, &start.request_id, &start.spec),
            None => self.exec(&open.exec_id).ok_or_else(|| HostError {
                kind: HostErrorKind::NotFound.into(),
                message: "no such exec".to_owned(),
                ..Default::default()
            }),
        };
        let exec = match exec {
            Ok(exec) => exec,
            Err(error) => {
                let _ = send.send(message(error.into())).await;
                // Read until the coordinator lets go, so that the error is not overtaken by a reset.
                while let Ok(Some(_)) = receive.message().await {}
                return;
            }
        };
        let _ = send.send(message(exec.clone().into())).await;
        let let_go = self.let_go.clone();
        let runner = self.clone();
        let exec_id = exec.id.clone();
        let reader = async move {
            while let Ok(Some(received)) = receive.message().await {
                match received.to_owned_message().message {
                    Some(StreamToHost::Stdin(stdin)) => {
                        let offset = (!stdin.append).then_some(stdin.offset);
                        runner.write(&exec_id, offset, &stdin.data, stdin.eof);
                    }
                    Some(StreamToHost::Resize(resize)) => {
                        runner.resize(&exec_id, &resize.size);
                    }
                    Some(StreamToHost::Signal(signal)) => {
                        runner.signal(&exec_id, signal.signal);
                    }
                    Some(StreamToHost::Data(_) | StreamToHost::DataEnd(_)) => {
                        panic!("bytes of a channel on an exec's stream")
                    }
                    None => panic!("an empty message on a stream"),
                }
            }
        };
        let player = self.play(&exec, open.from_offset, open.no_follow, &mut send);
        tokio::select! {
            () = reader => let_go.send_modify(|count| *count += 1),
            // A flood ends only when it is let go, which either half of the stream may see first.
            () = player => {
                if exec.spec.argv[0] == "flood" {
                    let_go.send_modify(|count| *count += 1);
                }
            }
        }
    }

    async fn play(
        &self,
        exec: &Exec,
        from_offset: u64,
        no_follow: bool,
        send: &mut connectrpc::BidiSendHalf<StreamRequest>,
    ) {
        let argv = &exec.spec.argv;
        let data = |offset: u64, data: Vec<u8>| StreamRequest {
            message: Some(
                common::OutputFrame {
                    frame: Some(
                        OutputData {
                            stream: OutputStream::Stdout.into(),
                            offset,
                            data,
                            ..Default::default()
                        }
                        .into(),
                    ),
                    ..Default::default()
                }
                .into(),
            ),
            ..Default::default()
        };
        let mut offset = from_offset;
        let text = |bytes: &[u8], from: u64| {
            let from = usize::try_from(from).expect("an offset").min(bytes.len());
            bytes[from..].to_vec()
        };
        match argv[0].as_str() {
            "flood" => loop {
                let chunk = vec![b'x'; 64 * 1024];
                let length = u64::try_from(chunk.len()).expect("a length");
                if send.send(data(offset, chunk)).await.is_err() {
                    return;
                }
                offset += length;
                self.flooded.fetch_add(length, Ordering::SeqCst);
            },
            "cat" => loop {
                let (input, eof, mut changed) = {
                    let state = self.state.lock().expect("lock");
                    let exec = &state.execs[&exec.id];
                    (text(&exec.input, offset), exec.eof || exec.exec.exit.is_set(), exec.changed.subscribe())
                };
                if !input.is_empty() {
                    let length = u64::try_from(input.len()).expect("a length");
                    for chunk in input.chunks(64 * 1024) {
                        if send.send(data(offset, chunk.to_vec())).await.is_err() {
                            return;
                        }
                        offset += u64::try_from(chunk.len()).expect("a length");
                    }
                    debug_assert!(length > 0);
                    continue;
                }
                if eof {
                    break;
                }
                let state = self.state.lock().expect("lock").execs[&exec.id].input.len();
                if u64::try_from(state).expect("a length") == offset {
                    let _ = tokio::time::timeout(Duration::from_millis(100), changed.changed()).await;
                }
            },
            "sleep" => {
                if no_follow {
                    let end = StreamEnd { next_offset: offset, ..Default::default() };
                    let _ =
                        send.send(StreamRequest { message: Some(end.into()), ..Default::default() }).await;
                    send.close_send();
                    std::future::pending::<()>().await;
                }
                let mut changed = self.state.lock().expect("lock").execs[&exec.id].changed.subscribe();
                while self.exec(&exec.id).is_some_and(|exec| exec.exit.is_unset()) {
                    let _ = changed.changed().await;
                }
            }
            "cut" => {
                let _ = send.send(data(offset, text(b"half", offset))).await;
                send.close_send();
                // Dropping the stream now could reset it before the coordinator has read what was sent.
                std::future::pending::<()>().await;
            }
            "lie" => {
                // Offsets that go backwards.
                let _ = send.send(data(offset + 10, b"x".to_vec())).await;
                std::future::pending::<()>().await;
            }
            _ => {
                let output = text(argv[1..].join(" ").as_bytes(), offset);
                let length = u64::try_from(output.len()).expect("a length");
                if length > 0 {
                    let _ = send.send(data(offset, output)).await;
                }
                offset += length;
            }
        }
        let exit = ExecExit { reason: ExitReason::Exited.into(), output_bytes: offset, ..Default::default() };
        self.end(&exec.id, exit);
        let exit = self.exec(&exec.id).expect("it is there").exit;
        let frame = common::OutputFrame { frame: exit.into_option().map(Into::into), ..Default::default() };
        let _ = send.send(StreamRequest { message: Some(frame.into()), ..Default::default() }).await;
        send.close_send();
        // The stream ends when the coordinator lets go.
        std::future::pending::<()>().await;
    }
}

type HostReceiving =
    BidiRecvHalf<<SharedHttp2Connection as ClientTransport>::ResponseBody, StreamResponseView<'static>>;

/// The port that sends a little and breaks.
pub(crate) const BREAKS: u32 = 9;
/// The port where nobody listens.
pub(crate) const CLOSED: u32 = 10;

/// Echoes what comes until its end, and ends then; two ports do something else.
async fn channel(
    target: &ChannelTarget,
    send: &mut connectrpc::BidiSendHalf<StreamRequest>,
    receive: &mut HostReceiving,
) {
    use cloister_api::host::stream_request::Message;
    let message = |message: Message| StreamRequest { message: Some(message), ..Default::default() };
    let port = match &target.target {
        Some(channel_target::Target::Port(port)) => port.port,
        _ => 0,
    };
    if port == CLOSED {
        let error = HostError {
            kind: HostErrorKind::NotFound.into(),
            message: "nothing listens on port 10".to_owned(),
            ..Default::default()
        };
        let _ = send.send(message(error.into())).await;
        while let Ok(Some(_)) = receive.message().await {}
        return;
    }
    let _ = send.send(message(ChannelOpened::default().into())).await;
    if port == BREAKS {
        let _ = send.send(message(Message::Data(b"half".to_vec()))).await;
        // An orderly end of the call that is none of the channel; a reset would overtake the bytes.
        send.close_send();
        while let Ok(Some(_)) = receive.message().await {}
        return;
    }
    while let Ok(Some(received)) = receive.message().await {
        match received.to_owned_message().message {
            Some(StreamToHost::Data(data)) => drop(send.send(message(Message::Data(data))).await),
            Some(StreamToHost::DataEnd(_)) => {
                let _ = send.send(message(ChannelEnd::default().into())).await;
                send.close_send();
            }
            other => panic!("{other:?} on a channel"),
        }
    }
}
