//! Byte streams between a caller and a host: nothing is kept here, so the slower end sets the pace.
//!
//! Output ends in exactly one of three ways: the exit frame (or, for a reader that does not follow, the host's word
//! that this is all), a typed error, or the caller's leaving. A host stream that simply ends is
//! [`error::STREAM_CUT`] with the offset to go on from, never success. Dropping a relay drops the host's stream with it,
//! which ends the host's reading; the exec goes on.
//!
//! Input runs in a task of its own that ends with the relay, so that a program that does not read keeps neither
//! output nor signals from flowing.

use cloister_api::app::AttachExecRequest;
use cloister_api::app::attach_exec_request::Request;
use cloister_api::common::output_frame::Frame;
use cloister_api::common::{Exec, OutputFrame, TerminalSize};
use cloister_api::host::stream_request::Message;
use cloister_api::host::{HostError, HostErrorKind, ResizeExec, SignalExec, StreamResponse, WriteStdin};
use cloister_service::task::AbortOnDrop;
use cloister_service::{CancellationToken, OnCancel, OnError, TaskKind, TaskRegistry};
use cloister_types::HostId;
use cloister_types::exec::OUTPUT_FRAME_MAX_BYTES;
use connectrpc::InboundStream;
use futures::StreamExt as _;
use tokio::sync::{mpsc, oneshot};

use crate::error::{self, AppError};
use crate::link::{HostStream, LinkError};

/// Most bytes of one write to standard input.
pub(crate) const STDIN_MAX_BYTES: usize = 1024 * 1024;
const INPUT: TaskKind = TaskKind::new("exec input", OnCancel::Abort, OnError::Log);

/// The output of an exec on its way to a caller.
pub(crate) struct OutputRelay {
    host_id: HostId,
    stream: HostStream,
    /// The first offset that was not relayed yet.
    next_offset: u64,
    no_follow: bool,
    stopping: CancellationToken,
    ended: bool,
}

enum Step {
    Exec(Box<Exec>),
    Frame(OutputFrame),
    End,
}

impl OutputRelay {
    pub(crate) fn new(
        host_id: HostId,
        stream: HostStream,
        next_offset: u64,
        no_follow: bool,
        stopping: CancellationToken,
    ) -> Self {
        Self { host_id, stream, next_offset, no_follow, stopping, ended: false }
    }

    /// Returns the next frame; `None` after the last one of a complete stream.
    ///
    /// # Errors
    ///
    /// The stream is not complete. Nothing follows.
    pub(crate) async fn next(&mut self) -> Option<Result<OutputFrame, AppError>> {
        loop {
            if self.ended {
                return None;
            }
            match self.step().await {
                // The exec comes first; a reader does not ask for it.
                Ok(Step::Exec(_)) => {}
                Ok(Step::Frame(frame)) => {
                    self.ended = matches!(frame.frame, Some(Frame::Exit(_)));
                    return Some(Ok(frame));
                }
                Ok(Step::End) => {
                    self.ended = true;
                    return None;
                }
                Err(error) => {
                    self.ended = true;
                    return Some(Err(error));
                }
            }
        }
    }

    async fn step(&mut self) -> Result<Step, AppError> {
        let message = tokio::select! {
            biased;
            message = self.stream.requests.next() => message,
            () = self.stopping.cancelled() => {
                return Err(AppError::new(&error::STOPPING, "the coordinator is stopping")
                    .with_remedy(format!("take the output up again at offset {}", self.next_offset)));
            }
        };
        let message = match message {
            Some(Ok(message)) => message.to_owned_message().message,
            Some(Err(_)) | None => return Err(self.cut()),
        };
        match message {
            Some(Message::Exec(exec)) => Ok(Step::Exec(exec)),
            Some(Message::Frame(frame)) => {
                self.check(&frame)?;
                Ok(Step::Frame(*frame))
            }
            Some(Message::Error(error)) => Err(refused(*error).into()),
            Some(Message::End(_)) if self.no_follow => Ok(Step::End),
            Some(
                Message::End(_)
                | Message::Opened(_)
                | Message::ChannelOpened(_)
                | Message::Data(_)
                | Message::DataEnd(_),
            )
            | None => Err(self.malformed()),
        }
    }

    /// Checks what a caller relies on: frames of bounded size, in order, each with a meaning.
    fn check(&mut self, frame: &OutputFrame) -> Result<(), AppError> {
        match &frame.frame {
            Some(Frame::Data(data)) => {
                if data.data.len() > OUTPUT_FRAME_MAX_BYTES || data.offset != self.next_offset {
                    return Err(self.malformed());
                }
                let length = u64::try_from(data.data.len()).unwrap_or(u64::MAX);
                self.next_offset = self.next_offset.saturating_add(length);
            }
            Some(Frame::Gap(gap)) => {
                if gap.from != self.next_offset || gap.to <= gap.from {
                    return Err(self.malformed());
                }
                self.next_offset = gap.to;
            }
            Some(Frame::Exit(exit)) => {
                if exit.reason.to_i32() == 0 {
                    return Err(self.malformed());
                }
            }
            None => return Err(self.malformed()),
        }
        Ok(())
    }

    fn cut(&self) -> AppError {
        AppError::new(
            &error::STREAM_CUT,
            format!("the stream from host `{}` was cut at offset {}", self.host_id, self.next_offset),
        )
        .with_remedy(format!("take it up again at offset {}; the exec was not touched", self.next_offset))
    }

    fn malformed(&self) -> AppError {
        tracing::warn!(host_id = %self.host_id, next_offset = self.next_offset, "a frame that does not belong on an output stream");
        LinkError::Malformed(self.host_id.clone()).into()
    }
}

pub(super) fn refused(error: HostError) -> LinkError {
    LinkError::Refused {
        kind: error.kind.as_known().unwrap_or(HostErrorKind::Internal),
        message: error.message.chars().take(1024).collect(),
    }
}

/// An exec with its output, and its input still to be connected.
pub(crate) struct Attachment {
    exec: Exec,
    relay: OutputRelay,
    tasks: TaskRegistry,
}

/// What an attached caller gets.
pub(crate) enum Attached {
    /// First.
    Started(Box<Exec>),
    /// Then the output.
    Frame(OutputFrame),
}

impl Attachment {
    /// Waits for the host's word on which exec this is.
    pub(crate) async fn open(mut relay: OutputRelay, tasks: TaskRegistry) -> Result<Self, AppError> {
        match relay.step().await? {
            Step::Exec(exec) => Ok(Self { exec: *exec, relay, tasks }),
            Step::Frame(_) | Step::End => Err(relay.malformed()),
        }
    }

    /// Returns the exec and its output as one stream, while the caller's messages go to the host.
    pub(crate) fn run(
        self,
        input: InboundStream<AttachExecRequest>,
    ) -> impl futures::Stream<Item = Result<Attached, AppError>> + Send {
        struct Running {
            started: Option<Exec>,
            relay: OutputRelay,
            /// Yields when the caller sent something that cannot go on.
            refused: Option<oneshot::Receiver<AppError>>,
            _input: AbortOnDrop,
        }
        let (report, refused) = oneshot::channel();
        let exec_id = self.exec.id.clone();
        let responses = self.relay.stream.responses.clone();
        let task = self.tasks.spawn(INPUT, async move {
            if let Err(error) = pump(exec_id, input, responses).await {
                // Nobody listens any more when the output has ended: nor does it matter then.
                let _ = report.send(error);
            }
            Ok::<(), std::convert::Infallible>(())
        });
        let running = Running {
            started: Some(self.exec),
            relay: self.relay,
            refused: Some(refused),
            _input: task.abort_on_drop(),
        };
        futures::stream::unfold(running, |mut running| async move {
            if let Some(exec) = running.started.take() {
                return Some((Ok(Attached::Started(Box::new(exec))), running));
            }
            loop {
                let Some(refused) = running.refused.as_mut() else {
                    let item = running.relay.next().await?;
                    return Some((item.map(Attached::Frame), running));
                };
                tokio::select! {
                    biased;
                    item = running.relay.next() => {
                        return item.map(|item| (item.map(Attached::Frame), running));
                    }
                    error = refused => {
                        running.refused = None;
                        if let Ok(error) = error {
                            running.relay.ended = true;
                            return Some((Err(error), running));
                        }
                    }
                }
            }
        })
    }
}

/// Carries a caller's messages to the host until the caller sends no more. That is not the end of standard input:
/// only `eof` is.
async fn pump(
    exec_id: String,
    mut input: InboundStream<AttachExecRequest>,
    responses: mpsc::Sender<StreamResponse>,
) -> Result<(), AppError> {
    while let Some(Ok(message)) = input.next().await {
        let message: cloister_api::host::stream_response::Message = match message.to_owned_message().request {
            Some(Request::Stdin(stdin)) => {
                if stdin.data.len() > STDIN_MAX_BYTES {
                    return Err(AppError::field("stdin.data", "at most 1 MiB at a time"));
                }
                let stdin = *stdin;
                WriteStdin {
                    exec_id: exec_id.clone(),
                    offset: stdin.offset,
                    data: stdin.data,
                    eof: stdin.eof,
                    append: stdin.append,
                    ..Default::default()
                }
                .into()
            }
            Some(Request::Signal(signal)) => {
                check_signal("signal", signal)?;
                SignalExec { exec_id: exec_id.clone(), signal, ..Default::default() }.into()
            }
            Some(Request::Resize(size)) => {
                check_size("resize", &size)?;
                ResizeExec { exec_id: exec_id.clone(), size: (*size).into(), ..Default::default() }.into()
            }
            Some(Request::Start(_)) => {
                return Err(AppError::new(&error::PROTOCOL, "`start` may only be the first message"));
            }
            None => return Err(AppError::new(&error::PROTOCOL, "a message on the stream is empty")),
        };
        let response = StreamResponse { message: Some(message), ..Default::default() };
        if responses.send(response).await.is_err() {
            break;
        }
    }
    Ok(())
}

/// Checks a terminal's size.
///
/// # Errors
///
/// No terminal has it.
pub(crate) fn check_size(field: &str, size: &TerminalSize) -> Result<(), AppError> {
    cloister_types::exec::TerminalSize::new(size.rows, size.columns)
        .map(drop)
        .map_err(|error| AppError::field(field, error))
}

/// Checks a signal number.
///
/// # Errors
///
/// It is none.
pub(crate) fn check_signal(field: &str, signal: i32) -> Result<(), AppError> {
    if (1..=64).contains(&signal) {
        Ok(())
    } else {
        Err(AppError::field(field, format!("`{signal}` is no signal: accepted is 1 to 64")))
    }
}
