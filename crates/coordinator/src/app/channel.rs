//! Channels: bytes between a caller and a sandbox's files or ports. What they mean is between those two.
//!
//! ```text
//!  caller ──data──► pump (a task) ──► host ──► sandbox
//!         ◄──data── this stream   ◄── host ◄──
//! ```
//!
//! A caller that ends its direction ends it for the sandbox too; one that goes away drops the host's stream, which closes
//! the channel. The stream is complete only with its last message.

use cloister_api::host::channel_target::Target as ChannelKind;
use cloister_api::host::stream_request::Message;
use cloister_api::host::stream_response::Message as ToHost;
use cloister_api::host::{ChannelEnd, ChannelTarget, HostErrorKind, OpenStream, StreamResponse};
use cloister_service::task::AbortOnDrop;
use cloister_service::{CancellationToken, OnCancel, OnError, TaskKind, TaskRegistry};
use cloister_types::HostId;
use connectrpc::ConnectError;
use futures::{Stream, StreamExt as _};
use tokio::sync::{mpsc, oneshot};

use super::relay::refused;
use super::{App, Authorized};
use crate::error::{self, AppError};
use crate::link::{HostStream, LinkError};

/// Most bytes of one message.
const DATA_MAX_BYTES: usize = 1024 * 1024;
const PUMP: TaskKind = TaskKind::new("channel input", OnCancel::Abort, OnError::Log);

/// What a caller gets of a channel.
#[derive(Debug)]
pub(crate) enum Carried {
    /// First.
    Ready,
    /// Then bytes.
    Data(Vec<u8>),
    /// Last.
    Done,
}

/// An open channel.
pub(crate) struct ChannelRelay {
    host_id: HostId,
    stream: HostStream,
    stopping: CancellationToken,
    tasks: TaskRegistry,
}

impl App {
    /// Opens a channel into a session's sandbox.
    pub(crate) async fn open_channel(
        &self,
        authorized: &Authorized,
        reference: &str,
        to: impl Into<ChannelKind>,
    ) -> Result<ChannelRelay, AppError> {
        let target = self.exec_target(authorized, reference).await?;
        let kind = to.into();
        let is_port = matches!(kind, ChannelKind::Port(_));
        let open = OpenStream {
            session_id: target.session_id.to_string(),
            channel: ChannelTarget { target: Some(kind), ..Default::default() }.into(),
            ..Default::default()
        };
        let stream = self.links.open_stream(&target.host_id, open).await?;
        let mut relay = ChannelRelay {
            host_id: target.host_id,
            stream,
            stopping: self.stopping(),
            tasks: self.tasks.clone(),
        };
        match relay.next().await? {
            Some(Message::ChannelOpened(_)) => Ok(relay),
            Some(Message::Error(refusal)) => match refusal.kind.as_known() {
                Some(HostErrorKind::NotFound) if is_port => Err(AppError::new(
                    &error::PORT_CLOSED,
                    refusal.message.chars().take(256).collect::<String>(),
                )),
                _ => Err(refused(*refusal).into()),
            },
            _ => Err(LinkError::Malformed(relay.host_id).into()),
        }
    }
}

impl ChannelRelay {
    async fn next(&mut self) -> Result<Option<Message>, AppError> {
        let message = tokio::select! {
            biased;
            message = self.stream.requests.next() => message,
            () = self.stopping.cancelled() => {
                return Err(AppError::new(&error::STOPPING, "the coordinator is stopping"));
            }
        };
        match message {
            Some(Ok(message)) => Ok(message.to_owned_message().message),
            Some(Err(_)) | None => Err(AppError::new(
                &error::STREAM_CUT,
                format!("the channel through host `{}` was cut", self.host_id),
            )
            .with_remedy("open it again; a copy of files goes on where it was cut")),
        }
    }

    /// Returns what comes out of the channel, while `input` goes into it.
    pub(crate) fn run(
        self,
        input: impl Stream<Item = Result<Vec<u8>, ConnectError>> + Send + 'static,
    ) -> impl Stream<Item = Result<Carried, ConnectError>> + Send {
        struct Running {
            relay: ChannelRelay,
            is_ready: bool,
            ended: bool,
            refused: Option<oneshot::Receiver<ConnectError>>,
            _pump: AbortOnDrop,
        }
        let (report, refused) = oneshot::channel();
        let responses = self.stream.responses.clone();
        let task = self.tasks.spawn(PUMP, async move {
            if let Err(error) = pump(input, responses).await {
                // Nobody listens any more when the channel has ended: nor does it matter then.
                let _ = report.send(error);
            }
            Ok::<(), std::convert::Infallible>(())
        });
        let running = Running {
            relay: self,
            is_ready: false,
            ended: false,
            refused: Some(refused),
            _pump: task.abort_on_drop(),
        };
        futures::stream::unfold(running, |mut running| async move {
            if running.ended {
                return None;
            }
            if !running.is_ready {
                running.is_ready = true;
                return Some((Ok(Carried::Ready), running));
            }
            let item = loop {
                let Some(refused) = running.refused.as_mut() else { break running.relay.carried().await };
                tokio::select! {
                    biased;
                    item = running.relay.carried() => break item,
                    error = refused => {
                        running.refused = None;
                        if let Ok(error) = error {
                            break Err(error);
                        }
                    }
                }
            };
            running.ended = !matches!(item, Ok(Carried::Data(_)));
            Some((item, running))
        })
    }

    async fn carried(&mut self) -> Result<Carried, ConnectError> {
        match self.next().await? {
            Some(Message::Data(data)) if data.len() <= DATA_MAX_BYTES => Ok(Carried::Data(data)),
            Some(Message::DataEnd(_)) => Ok(Carried::Done),
            Some(Message::Error(error)) => Err(AppError::from(refused(*error)).into()),
            _ => Err(AppError::from(LinkError::Malformed(self.host_id.clone())).into()),
        }
    }
}

/// Carries a caller's bytes to the host until the caller sends no more.
async fn pump(
    input: impl Stream<Item = Result<Vec<u8>, ConnectError>> + Send,
    responses: mpsc::Sender<StreamResponse>,
) -> Result<(), ConnectError> {
    let mut input = std::pin::pin!(input);
    let to_host = |message| StreamResponse { message: Some(message), ..Default::default() };
    while let Some(data) = input.next().await {
        let data = data?;
        if data.len() > DATA_MAX_BYTES {
            return Err(AppError::field("data", "at most 1 MiB at a time").into());
        }
        if responses.send(to_host(ToHost::Data(data))).await.is_err() {
            return Ok(());
        }
    }
    let _ = responses.send(to_host(ChannelEnd::default().into())).await;
    Ok(())
}
