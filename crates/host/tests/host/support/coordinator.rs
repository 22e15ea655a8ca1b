//! A coordinator that does what a test says: it serves the real host link on a real port.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cloister_api::connection::{CONNECTION_WINDOW_BYTES, MAX_CONCURRENT_STREAMS, STREAM_WINDOW_BYTES};
use cloister_api::host::{
    Command, CommandResult, ControlRequest, ControlResponse, HostError, HostErrorKind, HostLinkService,
    OpenStream, Register, Registered, SandboxEvent, StreamRequest, StreamResponse, command, command_result,
    control_request, control_response, stream_request, stream_response,
};
use cloister_service::{OnCancel, OnError, TaskHandle, TaskKind, TaskRegistry};
use cloister_types::SessionId;
use connectrpc::{
    ConnectError, InboundStream, RequestContext, Response, Router, ServiceResult, ServiceStream,
};
use futures::StreamExt as _;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

/// Longest wait for anything that has to happen.
pub(crate) const SOON: Duration = Duration::from_secs(20);

const ACCEPT: TaskKind = TaskKind::new("accept", OnCancel::Abort, OnError::Log);
const SERVE: TaskKind = TaskKind::new("serve", OnCancel::Abort, OnError::Log);

pub(crate) const TOKEN: &str = "token-of-a-host";

/// A coordinator on a port of its own.
pub(crate) struct Coordinator {
    pub(crate) address: std::net::SocketAddr,
    links: mpsc::UnboundedReceiver<LinkPeer>,
    streams: mpsc::UnboundedReceiver<StreamPeer>,
    early: BTreeMap<String, StreamPeer>,
    connections: Arc<Mutex<Vec<TaskHandle>>>,
    _tasks: TaskRegistry,
}

/// The coordinator's end of one control stream.
pub(crate) struct LinkPeer {
    pub(crate) register: Register,
    requests: InboundStream<ControlRequest>,
    responses: mpsc::Sender<Result<ControlResponse, ConnectError>>,
    results: BTreeMap<u64, CommandResult>,
    events: Vec<SandboxEvent>,
    pub(crate) heartbeats: usize,
    pub(crate) capability_changes: Vec<Vec<cloister_api::common::Capability>>,
    next_id: u64,
}

/// The coordinator's end of one byte stream.
pub(crate) struct StreamPeer {
    pub(crate) id: String,
    requests: InboundStream<StreamRequest>,
    responses: mpsc::Sender<Result<StreamResponse, ConnectError>>,
}

struct Service {
    links: mpsc::UnboundedSender<LinkPeer>,
    streams: mpsc::UnboundedSender<StreamPeer>,
}

#[allow(refining_impl_trait, reason = "the plain type says what the test sends")]
impl HostLinkService for Service {
    async fn control(
        &self,
        ctx: RequestContext,
        mut requests: InboundStream<ControlRequest>,
    ) -> ServiceResult<ServiceStream<ControlResponse>> {
        let bearer = ctx.header("authorization").and_then(|value| value.to_str().ok());
        if bearer != Some(&format!("Bearer {TOKEN}")) {
            return Err(ConnectError::unauthenticated("no such token"));
        }
        let first = requests.next().await.ok_or_else(|| ConnectError::invalid_argument("nothing came"))??;
        let Some(control_request::Message::Register(register)) = first.to_owned_message().message else {
            return Err(ConnectError::invalid_argument("the first message is no registration"));
        };
        let (responses, queue) = mpsc::channel(1024);
        let peer = LinkPeer {
            register: *register,
            requests,
            responses,
            results: BTreeMap::new(),
            events: Vec::new(),
            heartbeats: 0,
            capability_changes: Vec::new(),
            next_id: 1,
        };
        self.links.send(peer).map_err(|_| ConnectError::unavailable("the test has ended"))?;
        Ok(Response::new(Box::pin(ReceiverStream::new(queue))))
    }

    async fn stream(
        &self,
        _ctx: RequestContext,
        mut requests: InboundStream<StreamRequest>,
    ) -> ServiceResult<ServiceStream<StreamResponse>> {
        let first = requests.next().await.ok_or_else(|| ConnectError::invalid_argument("nothing came"))??;
        let Some(stream_request::Message::Opened(opened)) = first.to_owned_message().message else {
            return Err(ConnectError::invalid_argument("the first message names no stream"));
        };
        let (responses, queue) = mpsc::channel(1024);
        let peer = StreamPeer { id: opened.stream_id, requests, responses };
        self.streams.send(peer).map_err(|_| ConnectError::unavailable("the test has ended"))?;
        Ok(Response::new(Box::pin(ReceiverStream::new(queue))))
    }
}

async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(SOON, future).await {
        Ok(value) => value,
        Err(_) => panic!("{what} did not happen within {SOON:?}"),
    }
}

impl Coordinator {
    pub(crate) async fn start() -> Self {
        let tasks = TaskRegistry::new();
        let (links, link_queue) = mpsc::unbounded_channel();
        let (streams, stream_queue) = mpsc::unbounded_channel();
        let router = Router::new().add_service(Arc::new(Service { links, streams }));
        let service = router.into_axum_service();
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let connections = Arc::new(Mutex::new(Vec::new()));
        let (all, spawner) = (Arc::clone(&connections), tasks.clone());
        tasks.spawn(ACCEPT, async move {
            loop {
                let (socket, _) = listener.accept().await?;
                let service = TowerToHyperService::new(service.clone());
                let handle = spawner.spawn(SERVE, async move {
                    let mut builder = Builder::new(TokioExecutor::new());
                    builder
                        .http2()
                        .initial_stream_window_size(STREAM_WINDOW_BYTES)
                        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
                        .max_concurrent_streams(MAX_CONCURRENT_STREAMS);
                    let _ = builder.serve_connection(TokioIo::new(socket), service).await;
                    Ok::<(), Infallible>(())
                });
                all.lock().unwrap().push(handle);
            }
            #[expect(unreachable_code, reason = "gives the task its error type")]
            Ok::<(), std::io::Error>(())
        });
        Self {
            address,
            links: link_queue,
            streams: stream_queue,
            early: BTreeMap::new(),
            connections,
            _tasks: tasks,
        }
    }

    /// Breaks every connection as a cut cable would.
    pub(crate) fn cut(&self) {
        for connection in self.connections.lock().unwrap().drain(..) {
            connection.abort();
        }
    }

    /// Waits for a host to dial, and keeps it waiting for its answer.
    pub(crate) async fn dialled(&mut self) -> LinkPeer {
        soon("a registration", self.links.recv()).await.expect("the service lives")
    }

    /// Waits for a host to dial and accepts it.
    pub(crate) async fn link(&mut self) -> LinkPeer {
        let peer = self.dialled().await;
        peer.accept(Registered { heartbeat_interval_ms: 50, ..Default::default() }).await;
        peer
    }

    /// Waits for a host to dial and answers it, for one that does not stay.
    pub(crate) async fn accept_once(&mut self) {
        drop(self.link().await);
    }

    /// Waits for the stream of this id.
    pub(crate) async fn stream(&mut self, id: &str) -> StreamPeer {
        loop {
            if let Some(peer) = self.early.remove(id) {
                return peer;
            }
            let peer = soon("a stream", self.streams.recv()).await.expect("the service lives");
            self.early.insert(peer.id.clone(), peer);
        }
    }
}

impl LinkPeer {
    pub(crate) async fn accept(&self, registered: Registered) {
        self.send(registered).await;
    }

    async fn send(&self, message: impl Into<control_response::Message>) {
        let response = ControlResponse { message: Some(message.into()), ..Default::default() };
        self.responses.send(Ok(response)).await.expect("the link lives");
    }

    /// Sends a command and returns its id.
    pub(crate) async fn command(
        &mut self,
        session_id: &SessionId,
        epoch: u64,
        command: impl Into<command::Command>,
    ) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        self.send(Command {
            id,
            epoch,
            session_id: session_id.to_string(),
            command: Some(command.into()),
            ..Default::default()
        })
        .await;
        id
    }

    pub(crate) async fn open(&self, open: OpenStream) {
        self.send(open).await;
    }

    /// Takes one message of the host; `None` when the host closed the link.
    pub(crate) async fn take(&mut self) -> Option<()> {
        let message = soon("a message of the host", self.requests.next()).await?.ok()?;
        match message.to_owned_message().message.expect("never empty") {
            control_request::Message::Register(_) => panic!("a second registration on one link"),
            control_request::Message::Heartbeat(heartbeat) => {
                self.heartbeats += 1;
                if heartbeat.capabilities_changed {
                    self.capability_changes.push(heartbeat.capabilities);
                }
            }
            control_request::Message::Result(result) => {
                assert!(self.results.insert(result.id, *result).is_none(), "two answers to one command");
            }
            control_request::Message::Event(event) => self.events.push(*event),
        }
        Some(())
    }

    pub(crate) fn has_result(&self, id: u64) -> bool {
        self.results.contains_key(&id)
    }

    /// Waits for the answer to a command.
    pub(crate) async fn result(&mut self, id: u64) -> Result<command_result::Result, HostError> {
        loop {
            if let Some(result) = self.results.remove(&id) {
                return match result.result.expect("never empty") {
                    command_result::Result::Error(error) => Err(*error),
                    other => Ok(other),
                };
            }
            self.take().await.expect("the link lives");
        }
    }

    /// Sends a command and waits for its answer.
    pub(crate) async fn ask(
        &mut self,
        session_id: &SessionId,
        epoch: u64,
        command: impl Into<command::Command>,
    ) -> Result<command_result::Result, HostError> {
        let id = self.command(session_id, epoch, command).await;
        self.result(id).await
    }

    /// Waits for an event.
    pub(crate) async fn event(&mut self) -> SandboxEvent {
        while self.events.is_empty() {
            self.take().await.expect("the link lives");
        }
        self.events.remove(0)
    }

    /// Waits until this many heartbeats more have come; returns the events that came before.
    pub(crate) async fn beats(&mut self, count: usize) -> Vec<SandboxEvent> {
        let until = self.heartbeats + count;
        while self.heartbeats < until {
            self.take().await.expect("the link lives");
        }
        std::mem::take(&mut self.events)
    }
}

impl StreamPeer {
    /// Returns the next message; `None` at the end of the stream.
    pub(crate) async fn next(&mut self) -> Option<stream_request::Message> {
        let message = soon("a message of the stream", self.requests.next()).await?.ok()?;
        message.to_owned_message().message
    }

    pub(crate) async fn send(&self, message: impl Into<stream_response::Message>) {
        let response = StreamResponse { message: Some(message.into()), ..Default::default() };
        self.responses.send(Ok(response)).await.expect("the stream lives");
    }
}

pub(crate) fn kind_of(error: &HostError) -> HostErrorKind {
    error.kind.as_known().expect("a known kind")
}
