//! Channels: bytes between a caller and a sandbox's files or ports. What they mean is between those two.
//!
//! ```text
//!  caller ──data──► pump (a task) ──► host ──► sandbox
//!         ◄──data── this stream   ◄── host ◄──
//! ```
//!
//! Either direction may end before the other: the stream stays until both have. A caller that goes away drops the host's
//! stream, which closes the channel. Without the word that the sandbox's direction is complete, it was cut.

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
    /// Then the word that they are all.
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
            next: Next,
            /// Told when the caller has sent its last byte, or something that cannot go on.
            input_ended: oneshot::Receiver<Result<(), ConnectError>>,
            has_input: bool,
            _pump: AbortOnDrop,
        }
        enum Next {
            Ready,
            Bytes,
            /// The sandbox has ended its direction; the host ends the call when the other has ended too.
            Input,
            Nothing,
        }
        let (report, input_ended) = oneshot::channel();
        let responses = self.stream.responses.clone();
        let task = self.tasks.spawn(PUMP, async move {
            // Nobody listens any more when the caller has gone: nor does it matter then.
            let _ = report.send(pump(input, responses).await);
            Ok::<(), std::convert::Infallible>(())
        });
        let running = Running {
            relay: self,
            next: Next::Ready,
            input_ended,
            has_input: true,
            _pump: task.abort_on_drop(),
        };
        futures::stream::unfold(running, |mut running| async move {
            let item = loop {
                match running.next {
                    Next::Ready => break Ok(Carried::Ready),
                    Next::Nothing => return None,
                    Next::Bytes | Next::Input => {}
                }
                tokio::select! {
                    biased;
                    item = running.relay.carried() => match item {
                        // The host has handed on the last of the input, or cannot. Not before: dropping its stream cuts off
                        // what is on the way.
                        Ok(_) | Err(_) if matches!(running.next, Next::Input) => return None,
                        item => break item,
                    },
                    ended = &mut running.input_ended, if running.has_input => {
                        running.has_input = false;
                        if let Ok(Err(error)) = ended {
                            break Err(error);
                        }
                    }
                }
            };
            running.next = match item {
                Ok(Carried::Ready | Carried::Data(_)) => Next::Bytes,
                Ok(Carried::Done) => Next::Input,
                Err(_) => Next::Nothing,
            };
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
