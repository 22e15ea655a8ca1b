//! One byte stream: an exec's output to the coordinator, its input back, in an RPC of its own.
//!
//! ```text
//!  OpenStream ─► open the RPC ─► opened ─► [start the exec] ─► exec ─► frame … frame ─► exit | end | error
//!                                                  input, signals, sizes ◄─ coordinator
//! ```
//!
//! - A frame is asked of the sandbox only when the one before it was taken by the connection, so that a reader
//!   that stops reading stops the program; what waits here is at most the client's queue of 32 frames of 64 KiB.
//! - The last message is always an exit, an end or an error. The call is then held until the coordinator ends
//!   it: dropping it earlier would cut off what is still on its way.
//! - A consumer that is gone ends the reading, never the program.
//! - Input is applied in order, with one exception: a program that does not read its standard input cannot hold
//!   back its signals for longer than [`SIGNAL_PATIENCE`].

use std::sync::Arc;
use std::time::Duration;

use cloister_api::common;
use cloister_api::convert::{exec_to_proto, output_frame_to_proto, terminal_size_from_proto};
use cloister_api::host::{
    HostErrorKind, HostLinkServiceClient, OpenStream, StreamEnd, StreamOpened, StreamRequest,
    StreamResponseView, WriteStdin, stream_request, stream_response,
};
use cloister_sandbox::backend::{OutputReader, Sandbox, SandboxError};
use cloister_service::CancellationToken;
use cloister_types::exec::{ExecRecord, TerminalSize};
use cloister_types::{ExecId, OutputFrame, SessionId};
use connectrpc::client::{BidiRecvHalf, BidiSendHalf, CallOptions, ClientTransport, SharedHttp2Connection};
use tokio::sync::{mpsc, watch};

use crate::agent::Agent;
use crate::channel;
use crate::fault::POINTS;
use crate::refusal::Refusal;
use crate::turns::Turn;

/// How long a signal waits for the input before it to be read.
const SIGNAL_PATIENCE: Duration = Duration::from_millis(250);
/// Messages of input, of up to 1 MiB, that wait for the program; the connection's window holds up what follows.
const INPUT_QUEUED: usize = 2;
/// How often a reader that was cut is opened again without having got any further.
const REOPEN_MAX: u32 = 3;
/// How long a sandbox that cut its reader may take until it counts as ended.
const GONE_PATIENCE: Duration = Duration::from_secs(5);
/// How long a last error may take to be handed to the connection.
const LAST_WORD_PATIENCE: Duration = Duration::from_secs(5);

pub(crate) type Sending = BidiSendHalf<StreamRequest>;
pub(crate) type Receiving =
    BidiRecvHalf<<SharedHttp2Connection as ClientTransport>::ResponseBody, StreamResponseView<'static>>;

/// What a stream is served with.
pub(crate) struct StreamTask {
    pub(crate) agent: Arc<Agent>,
    pub(crate) client: HostLinkServiceClient<SharedHttp2Connection>,
    pub(crate) open: OpenStream,
    /// The session's turn, or why the stream only says no.
    pub(crate) turn: Result<Turn, Refusal>,
    /// Cancelled when the link is gone, or the consumer.
    pub(crate) closed: CancellationToken,
}

/// Why no more frames are sent.
pub(crate) enum Cut {
    /// Nobody takes them.
    ConsumerGone,
    /// They cannot be had; said as the last message.
    Failed(Refusal),
}

impl From<Refusal> for Cut {
    fn from(refusal: Refusal) -> Self {
        Self::Failed(refusal)
    }
}

impl StreamTask {
    /// Serves the stream to its end.
    pub(crate) async fn run(self) {
        let stopping = self.agent.tasks.token();
        let closed = self.closed.clone();
        let options = CallOptions::default().with_compress(false);
        let (mut sending, mut receiving) = match self.client.stream_with_options(options).await {
            Ok(stream) => stream.into_split(),
            Err(error) => {
                tracing::debug!(stream_id = self.open.stream_id, error = %error, "stream cannot be opened");
                return;
            }
        };
        let outcome = tokio::select! {
            outcome = self.serve(&mut sending, &mut receiving) => outcome,
            () = closed.cancelled() => return,
        };
        match outcome {
            Ok(()) => {}
            Err(Cut::ConsumerGone) => return,
            Err(Cut::Failed(refusal)) => {
                let last = send(&mut sending, refusal.into_proto());
                if !matches!(tokio::time::timeout(LAST_WORD_PATIENCE, last).await, Ok(Ok(()))) {
                    return;
                }
            }
        }
        sending.close_send();
        let taken = async { while let Ok(Some(_)) = receiving.message().await {} };
        let stopped = async {
            stopping.cancelled().await;
            tokio::time::sleep(LAST_WORD_PATIENCE).await;
        };
        tokio::select! {
            () = taken => {}
            () = closed.cancelled() => {}
            () = stopped => {}
        }
    }

    async fn serve(self, sending: &mut Sending, receiving: &mut Receiving) -> Result<(), Cut> {
        let opened = StreamOpened { stream_id: self.open.stream_id.clone(), ..Default::default() };
        send(sending, opened).await?;
        POINTS.reach("host_after_stream_opened");
        let session_id: SessionId = self.open.session_id.parse().map_err(Refusal::from)?;
        let turn = self.turn?.taken().await;
        let found = self.agent.find(&session_id);
        drop(turn);
        if let Some(target) = self.open.channel.as_option() {
            let target = channel::target(target)?;
            let sandbox = match found {
                Some(live) => live.sandbox,
                None => {
                    let message = format!("session `{session_id}` has no running sandbox");
                    return Err(Refusal::new(HostErrorKind::NotRunning, message).into());
                }
            };
            let stopping = self.agent.tasks.token();
            return tokio::select! {
                outcome = channel::serve(sandbox.as_ref(), &target, sending, receiving) => outcome,
                () = stopping.cancelled() => Err(Refusal::stopping().into()),
            };
        }
        let sandbox = found.as_ref().map(|live| Arc::clone(&live.sandbox));
        let (exec, reader) = match self.open.start.as_option() {
            // When this is cut off half-way, the same request finds what it started.
            Some(start) if self.open.from_offset == 0 && !self.open.no_follow => {
                let (exec, reader) = self.agent.start_and_read(&session_id, found, start).await?;
                (exec, Some(reader))
            }
            Some(start) => (self.agent.start_exec(&session_id, found, start).await?, None),
            None => {
                let exec_id: ExecId = self.open.exec_id.parse().map_err(Refusal::from)?;
                (self.agent.exec(&session_id, &exec_id).await?, None)
            }
        };
        let exec_id = exec.exec_id.clone();
        let source = Source {
            agent: &self.agent,
            session_id,
            exec_id: exec_id.clone(),
            sandbox: sandbox.clone(),
            next_offset: self.open.from_offset,
            no_follow: self.open.no_follow,
        };
        let stopping = self.agent.tasks.token();
        tokio::select! {
            outcome = source.pump(&exec, reader, sending) => outcome,
            cut = take_input(receiving, sandbox, exec_id) => Err(cut),
            () = stopping.cancelled() => Err(Refusal::stopping().into()),
        }
    }
}

pub(crate) async fn send(
    sending: &mut Sending,
    message: impl Into<stream_request::Message>,
) -> Result<(), Cut> {
    let request = StreamRequest { message: Some(message.into()), ..Default::default() };
    sending.send(request).await.map_err(|_| Cut::ConsumerGone)
}

/// Where the frames come from.
struct Source<'a> {
    agent: &'a Agent,
    session_id: SessionId,
    exec_id: ExecId,
    sandbox: Option<Arc<dyn Sandbox>>,
    next_offset: u64,
    no_follow: bool,
}

impl Source<'_> {
    /// Sends the exec and its frames until the last one.
    async fn pump(
        mut self,
        exec: &ExecRecord,
        reader: Option<Box<dyn OutputReader>>,
        sending: &mut Sending,
    ) -> Result<(), Cut> {
        let exec: common::Exec = exec_to_proto(&self.session_id, exec);
        send(sending, exec).await?;
        let mut reopened = 0;
        let mut reader = match reader {
            Some(reader) => reader,
            None => self.open().await?,
        };
        loop {
            let frame = match reader.next().await {
                Ok(Some(frame)) => frame,
                Ok(None) => {
                    return Err(Refusal::new(
                        HostErrorKind::Internal,
                        format!("the output of exec `{}` ended without an exit record", self.exec_id),
                    )
                    .into());
                }
                Err(error) if reopened < REOPEN_MAX => {
                    tracing::debug!(
                        exec_id = %self.exec_id, offset = self.next_offset,
                        error = cloister_service::error_chain(&error), "output was cut, reading on"
                    );
                    reopened += 1;
                    self.note_end().await;
                    reader = self.open().await?;
                    continue;
                }
                Err(error) => return Err(Refusal::from(error).into()),
            };
            match &frame {
                OutputFrame::Data { offset, data, .. } => {
                    reopened = 0;
                    let length = u64::try_from(data.len()).unwrap_or(u64::MAX);
                    self.next_offset = offset.saturating_add(length);
                }
                OutputFrame::Gap { to, .. } => self.next_offset = *to,
                OutputFrame::Exit(_) => {}
                OutputFrame::End { next_offset } => {
                    return send(sending, StreamEnd { next_offset: *next_offset, ..Default::default() })
                        .await;
                }
            }
            let last = matches!(frame, OutputFrame::Exit(_));
            if let Some(frame) = output_frame_to_proto(frame) {
                send(sending, frame).await?;
            }
            if last {
                return Ok(());
            }
        }
    }

    async fn open(&self) -> Result<Box<dyn OutputReader>, Refusal> {
        if let Some(sandbox) = &self.sandbox {
            match sandbox.read_output(&self.exec_id, self.next_offset, self.no_follow).await {
                // It may be of an earlier sandbox, or the sandbox is just ending.
                Err(SandboxError::NotFound(_) | SandboxError::NotRunning(_)) => {}
                other => return Ok(other?),
            }
        }
        let backend = self.agent.kept(&self.session_id).await?;
        Ok(backend.ended_output(&self.session_id, &self.exec_id, self.next_offset).await?)
    }

    /// A reader that is cut mostly means that the sandbox is ending: then its record is what to read.
    async fn note_end(&mut self) {
        if let Some(sandbox) = &self.sandbox
            && tokio::time::timeout(GONE_PATIENCE, sandbox.wait_gone()).await.is_ok()
        {
            self.sandbox = None;
        }
    }
}

/// What a program gets that is no input.
enum Aside {
    Signal(i32),
    Size(TerminalSize),
}

/// Applies what the coordinator sends. Returns only when the consumer is gone or the input cannot be applied.
async fn take_input(receiving: &mut Receiving, sandbox: Option<Arc<dyn Sandbox>>, exec_id: ExecId) -> Cut {
    let (stdin, mut writes) = mpsc::channel::<Box<WriteStdin>>(INPUT_QUEUED);
    let (signals, mut raised) = mpsc::channel::<(Aside, u64)>(INPUT_QUEUED);
    let (applied, written) = watch::channel(0u64);

    let receive = async {
        let mut count = 0u64;
        loop {
            match receiving.message().await {
                Ok(Some(message)) => match message.to_owned_message().message {
                    Some(stream_response::Message::Stdin(write)) => {
                        count += 1;
                        let _ = stdin.send(write).await;
                    }
                    Some(stream_response::Message::Signal(signal)) => {
                        let _ = signals.send((Aside::Signal(signal.signal), count)).await;
                    }
                    Some(stream_response::Message::Resize(resize)) => {
                        match terminal_size_from_proto(&resize.size) {
                            Ok(size) => drop(signals.send((Aside::Size(size), count)).await),
                            Err(error) => return Cut::Failed(error.into()),
                        }
                    }
                    // Bytes of a channel, which this is not.
                    Some(stream_response::Message::Data(_) | stream_response::Message::DataEnd(_)) | None => {
                    }
                },
                // The coordinator holds its side for as long as it reads: whether it ends it or breaks it, the
                // call is over.
                Ok(None) | Err(_) => return Cut::ConsumerGone,
            }
        }
    };
    let Some(sandbox) = sandbox else {
        // The program has ended and takes no input: what still comes is read and dropped.
        let discard = async {
            loop {
                tokio::select! {
                    _ = writes.recv() => {}
                    _ = raised.recv() => {}
                }
            }
        };
        return tokio::select! { cut = receive => cut, cut = discard => cut };
    };
    let write = async {
        let mut closed = false;
        while let Some(write) = writes.recv().await {
            if !closed {
                closed = match write_stdin(sandbox.as_ref(), &exec_id, &write).await {
                    Ok(closed) => closed,
                    Err(refusal) => return Cut::Failed(refusal),
                };
            }
            applied.send_modify(|count| *count += 1);
        }
        std::future::pending().await
    };
    let signal = async {
        let mut written = written;
        while let Some((aside, after)) = raised.recv().await {
            let _ = tokio::time::timeout(SIGNAL_PATIENCE, written.wait_for(|count| *count >= after)).await;
            let applied = match aside {
                Aside::Signal(signal) => sandbox.signal(&exec_id, signal).await,
                Aside::Size(size) => sandbox.resize(&exec_id, size).await,
            };
            match applied {
                // The output says how it ended.
                Ok(()) | Err(SandboxError::NotRunning(_) | SandboxError::NotFound(_)) => {}
                Err(error) => return Cut::Failed(error.into()),
            }
        }
        std::future::pending().await
    };
    tokio::select! {
        cut = receive => cut,
        cut = write => cut,
        cut = signal => cut,
    }
}

/// Writes once; returns whether standard input is closed, so that nothing more need be tried.
async fn write_stdin(sandbox: &dyn Sandbox, exec_id: &ExecId, write: &WriteStdin) -> Result<bool, Refusal> {
    let written = if write.append {
        // A terminal stays open after an end that was typed.
        sandbox.type_input(exec_id, &write.data, write.eof).await.map(|()| false)
    } else {
        sandbox.write_stdin(exec_id, write.offset, &write.data, write.eof).await.map(|_| write.eof)
    };
    match written {
        Ok(closed) => Ok(closed),
        // The output says how it ended.
        Err(SandboxError::NotRunning(_) | SandboxError::NotFound(_)) => Ok(true),
        // A program may close its input and go on. That is no error of the stream, but a hole in the input is,
        // and only an input that is still open takes an empty write.
        Err(SandboxError::Invalid(message)) => match sandbox.write_stdin(exec_id, 0, &[], false).await {
            Ok(next_offset) => Err(Refusal::invalid(format!("{message} (the next offset is {next_offset})"))),
            Err(_) => Ok(true),
        },
        Err(error) => Err(error.into()),
    }
}
