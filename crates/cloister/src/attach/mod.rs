//! One exec seen from here: its output streamed out, our input streamed in, our signals passed on.
//!
//! ```text
//!  stdin ─ thread ─► WriteStdin(offset)       every chunk is repeated until the answer covers it   (input)
//!  keys, size ────► AttachExec(stdin, resize) of a terminal; the detach keys end the watching      (keyboard)
//!  Ctrl-C ────────► SignalExec
//!  AttachExec(start) ─► frames ─► stdout, stderr
//!        ▲ cut           │
//!        └── AttachExec(exec id, next offset), with pauses, a few times
//! ```
//!
//! Only an exit frame ends this well. A stream that ends without one was cut: it is taken up again at the next
//! offset, so that output is printed once and in order. Input goes in calls of its own, whose answers say how
//! far it got, so that a cut loses none of it and repeats none.

mod input;
pub(crate) mod keyboard;

use std::collections::VecDeque;
use std::io;
use std::time::Duration;

use cloister_api::app::attach_exec_request::Request;
use cloister_api::app::attach_exec_response::Response;
use cloister_api::app::{AttachExecRequest, AttachExecResponse, AttachStart, AttachStdin, SignalExecRequest};
use cloister_api::common::output_frame::Frame;
use cloister_api::common::{Exec, ExecExit, ExecSpec, OutputFrame, OutputStream};
use connectrpc::client::CallOptions;
use connectrpc::{ConnectError, ErrorCode};
use tokio::io::AsyncWriteExt;
use tokio::sync::watch;

use self::keyboard::{Keyboard, Typed};
use crate::client::{self, Client};
use crate::error::CliError;
use crate::interrupt::Interrupts;
use crate::terminal::Terminal;

/// Pauses before a cut stream is taken up again; they start over whenever output arrived.
const REATTACH_PAUSES_MS: [u64; 6] = [50, 200, 500, 1000, 2000, 4000];
/// Things typed that are kept while the stream is cut.
const TYPED_MAX: usize = 64;
/// `SIGPIPE`: what a program gets whose output nobody reads.
const SIGPIPE: i32 = 13;

/// What the person at the keyboard asked for while the command ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Interrupt {
    /// Pass this signal on.
    Forward(i32),
    /// Stop waiting.
    Leave,
}

/// How watching an exec came to its end.
#[derive(Debug)]
pub(crate) enum Ended {
    /// The exec has ended.
    Exit(Box<ExecExit>),
    /// The detach keys were typed; the exec runs on.
    Detached,
}

/// Streams an exec to its end.
pub(crate) struct Attachment<'a> {
    client: &'a Client,
    terminal: Terminal,
    session: String,
    request_id: String,
    spec: ExecSpec,
    stdin: bool,
    next_offset: u64,
    exec: Option<Exec>,
    /// A signal that came before the exec had started: sent as soon as it has.
    held_signal: Option<i32>,
    /// Of an exec with a terminal.
    keyboard: Option<Keyboard>,
    /// What was typed while there was nowhere to send it.
    typed: VecDeque<Typed>,
}

enum Step {
    Ended(Ended),
    Cut(ConnectError),
}

impl<'a> Attachment<'a> {
    /// Prepares to run `spec` in `session`.
    pub(crate) fn new(client: &'a Client, terminal: Terminal, session: &str, spec: ExecSpec) -> Self {
        Self {
            client,
            terminal,
            session: session.to_owned(),
            request_id: client::request_id(),
            stdin: spec.stdin,
            spec,
            next_offset: 0,
            exec: None,
            held_signal: None,
            keyboard: None,
            typed: VecDeque::new(),
        }
    }

    /// Prepares to watch an exec that was started before, from an offset on.
    pub(crate) fn existing(
        client: &'a Client,
        terminal: Terminal,
        session: &str,
        exec: Exec,
        next_offset: u64,
    ) -> Self {
        let spec = ExecSpec::default();
        Self { exec: Some(exec), next_offset, ..Self::new(client, terminal, session, spec) }
    }

    /// Passes on what is typed here, as to a terminal.
    pub(crate) fn with_keyboard(self, keyboard: Option<Keyboard>) -> Self {
        // Input that is typed has no offsets.
        let stdin = self.stdin && keyboard.is_none() && self.spec.terminal.is_unset();
        Self { keyboard, stdin, ..self }
    }

    /// Returns the exec once it is known to have started.
    pub(crate) fn exec(&self) -> Option<&Exec> {
        self.exec.as_ref()
    }

    /// Streams until the exit record, or until the detach keys are typed.
    ///
    /// # Errors
    ///
    /// [`CliError::Interrupted`] when `interrupts` said to leave, [`CliError::BrokenPipe`] when nobody reads our
    /// output (the program was sent `SIGPIPE`), else why the stream could not be taken up again.
    pub(crate) async fn run(&mut self, interrupts: &mut Interrupts) -> Result<Ended, CliError> {
        if self.keyboard.is_some() {
            interrupts.leave_on_hangup();
        }
        let (started, is_started) = watch::channel(None);
        let terminal = self.terminal;
        let mut is_pumping = self.stdin;
        let input = input::pump(self.client, self.session.clone(), is_started);
        let output = self.output(interrupts, &started);
        tokio::pin!(input, output);
        loop {
            tokio::select! {
                result = &mut output => return result,
                result = &mut input, if is_pumping => {
                    is_pumping = false;
                    if let Err(error) = result {
                        terminal.warn(format!("standard input is not passed on any more: {error}"));
                    }
                }
            }
        }
    }

    /// Streams output until the exit record, taking it up again after cuts.
    async fn output(
        &mut self,
        interrupts: &mut Interrupts,
        started: &watch::Sender<Option<String>>,
    ) -> Result<Ended, CliError> {
        let mut cuts = 0;
        loop {
            let offset_before = self.next_offset;
            let cut = match self.stream(interrupts, started).await {
                Ok(Step::Ended(ended)) => return Ok(ended),
                Ok(Step::Cut(error)) => error,
                Err(CliError::BrokenPipe) => {
                    // As locally: the program learns that nobody reads. Whether it heard does not change our end.
                    let _ = self.signal(SIGPIPE).await;
                    return Err(CliError::BrokenPipe);
                }
                Err(error) => return Err(error),
            };
            if self.next_offset > offset_before {
                cuts = 0;
            }
            let Some(pause) = REATTACH_PAUSES_MS.get(cuts).filter(|_| is_cut(&cut)) else {
                return Err(self.client.error(&cut));
            };
            cuts += 1;
            let pause = tokio::time::sleep(Duration::from_millis(*pause));
            tokio::pin!(pause);
            loop {
                tokio::select! {
                    () = &mut pause => break,
                    interrupt = interrupts.next() => match interrupt {
                        Interrupt::Leave => return Err(CliError::Interrupted),
                        Interrupt::Forward(signal) => self.hold(signal),
                    },
                    typed = next_typed(&mut self.keyboard), if self.typed.len() < TYPED_MAX => match typed? {
                        Typed::Detach => return Ok(Ended::Detached),
                        typed => self.typed.push_back(typed),
                    }
                }
            }
        }
    }

    /// Streams once, until the exit record or the cut.
    async fn stream(
        &mut self,
        interrupts: &mut Interrupts,
        started: &watch::Sender<Option<String>>,
    ) -> Result<Step, CliError> {
        let mut start = AttachStart {
            request_id: self.request_id.clone(),
            session: self.session.clone(),
            from_offset: self.next_offset,
            ..Default::default()
        };
        match &self.exec {
            Some(exec) => start.exec_id.clone_from(&exec.id),
            // Again with the same request id, should the first answer have been lost: it starts nothing twice.
            None => start.spec = self.spec.clone().into(),
        }
        let streams = self.client.api().streams();
        let stream = match streams.attach_exec_with_options(CallOptions::default()).await {
            Ok(stream) => stream,
            Err(error) => return Ok(Step::Cut(error)),
        };
        // The sending half stays open to the end: closing it would say that nobody is attached any more.
        let (mut sender, mut receiver) = stream.into_split();
        let first = AttachExecRequest { request: Some(Request::from(start)), ..Default::default() };
        // The receiving half knows why, when the server has closed the stream.
        let _ = sender.send(first).await;
        // The size may have changed while nobody was attached, and another viewer may have had another one.
        if let Some(size) = self.keyboard.as_ref().and_then(Keyboard::size) {
            let _ = sender.send(Typed::Size(size).into_request()).await;
        }
        loop {
            while let Some(typed) = self.typed.pop_front() {
                let _ = sender.send(typed.into_request()).await;
            }
            tokio::select! {
                message = receiver.message() => match message {
                    Ok(Some(message)) => {
                        if let Some(exit) = self.handle(message.to_owned_message()).await? {
                            return Ok(Step::Ended(Ended::Exit(Box::new(exit))));
                        }
                        if let Some(exec) = &self.exec {
                            started.send_if_modified(|id| {
                                let is_new = id.is_none();
                                *id = Some(exec.id.clone());
                                is_new
                            });
                        }
                        self.send_held().await;
                    }
                    Ok(None) => return Ok(Step::Cut(ConnectError::unavailable("the stream ended without an exit record"))),
                    Err(error) => return Ok(Step::Cut(error)),
                },
                interrupt = interrupts.next() => match interrupt {
                    Interrupt::Leave => return Err(CliError::Interrupted),
                    Interrupt::Forward(signal) => {
                        self.hold(signal);
                        self.send_held().await;
                    }
                },
                typed = next_typed(&mut self.keyboard) => match typed? {
                    Typed::Detach => return Ok(Step::Ended(Ended::Detached)),
                    typed => self.typed.push_back(typed),
                },
            }
        }
    }

    /// Prints what arrived; returns the exit record if it was that.
    async fn handle(&mut self, message: AttachExecResponse) -> Result<Option<ExecExit>, CliError> {
        let is_repeat = self.exec.is_some() && matches!(message.response, Some(Response::Started(_)));
        if self.terminal.json && !is_repeat {
            self.terminal.json_line(&message)?;
        }
        match message.response {
            Some(Response::Started(exec)) => {
                self.exec = Some(*exec);
                Ok(None)
            }
            Some(Response::Frame(frame)) => {
                let frame = *frame;
                if self.terminal.json {
                    advance(&frame, &mut self.next_offset);
                    return Ok(exit_of(frame));
                }
                print_frame(self.terminal, frame, &mut self.next_offset).await
            }
            None => Ok(None),
        }
    }

    /// Keeps a signal for the exec. Says so while there is none yet, because it may run before the signal arrives.
    fn hold(&mut self, signal: i32) {
        self.held_signal = Some(signal);
        if self.exec.is_none() {
            self.terminal.note(
                "cloister: the command has not started; the signal is sent when it has, once more stops waiting",
            );
        }
    }

    /// Sends what is kept, once there is an exec to send it to.
    async fn send_held(&mut self) {
        if self.exec.is_none() {
            return;
        }
        if let Some(signal) = self.held_signal.take()
            && let Err(error) = self.signal(signal).await
        {
            self.terminal.warn(format!("the signal did not arrive: {error}"));
        }
    }

    /// Sends a signal to the exec, once it has started.
    async fn signal(&self, signal: i32) -> Result<(), CliError> {
        let Some(exec) = &self.exec else { return Ok(()) };
        let request = SignalExecRequest {
            session: self.session.clone(),
            exec_id: exec.id.clone(),
            signal,
            ..Default::default()
        };
        let execs = self.client.api().execs();
        self.client
            .call(&client::quick(), || execs.signal_exec_with_options(request.clone(), client::quick()))
            .await
            .map(|_| ())
    }
}

/// Returns what is typed next; never where nobody types.
async fn next_typed(keyboard: &mut Option<Keyboard>) -> Result<Typed, CliError> {
    match keyboard {
        Some(keyboard) => keyboard.next().await,
        None => std::future::pending().await,
    }
}

impl Typed {
    /// Returns the message that carries it.
    fn into_request(self) -> AttachExecRequest {
        let typed = |data, eof| AttachStdin { data, eof, append: true, ..Default::default() };
        let request = match self {
            Self::Bytes(data) => Request::from(typed(data, false)),
            Self::End | Self::Detach => Request::from(typed(Vec::new(), true)),
            Self::Size(size) => Request::from(size),
        };
        AttachExecRequest { request: Some(request), ..Default::default() }
    }
}

/// Returns whether an error means that the stream was cut rather than refused.
pub(crate) fn is_cut(error: &ConnectError) -> bool {
    matches!(
        error.code,
        ErrorCode::Unavailable
            | ErrorCode::Internal
            | ErrorCode::Unknown
            | ErrorCode::Canceled
            | ErrorCode::Aborted
            | ErrorCode::DeadlineExceeded
    )
}

/// Moves the next offset behind a frame.
pub(crate) fn advance(frame: &OutputFrame, next_offset: &mut u64) {
    match &frame.frame {
        Some(Frame::Data(data)) => {
            let length = u64::try_from(data.data.len()).expect("a length fits 64 bits");
            *next_offset = (*next_offset).max(data.offset.saturating_add(length));
        }
        Some(Frame::Gap(gap)) => *next_offset = (*next_offset).max(gap.to),
        Some(Frame::Exit(_)) | None => {}
    }
}

/// Returns the exit record if the frame is one.
pub(crate) fn exit_of(frame: OutputFrame) -> Option<ExecExit> {
    match frame.frame {
        Some(Frame::Exit(exit)) => Some(*exit),
        Some(Frame::Data(_) | Frame::Gap(_)) | None => None,
    }
}

/// Writes a frame to standard output or error; bytes before `next_offset` were printed already and are skipped.
///
/// # Errors
///
/// [`CliError::BrokenPipe`] when standard output is closed.
pub(crate) async fn print_frame(
    terminal: Terminal,
    frame: OutputFrame,
    next_offset: &mut u64,
) -> Result<Option<ExecExit>, CliError> {
    let seen = *next_offset;
    advance(&frame, next_offset);
    match frame.frame {
        Some(Frame::Data(data)) => {
            let skip =
                usize::try_from(seen.saturating_sub(data.offset)).unwrap_or(usize::MAX).min(data.data.len());
            let bytes = &data.data[skip..];
            let written = if data.stream.as_known() == Some(OutputStream::Stderr) {
                write_all(tokio::io::stderr(), bytes).await
            } else {
                write_all(tokio::io::stdout(), bytes).await
            };
            written.map_err(CliError::io("write standard output"))?;
            Ok(None)
        }
        Some(Frame::Gap(gap)) => {
            let missing = gap.to.saturating_sub(gap.from);
            terminal.warn(format!(
                "{missing} bytes of output are no longer kept (offsets {} to {})",
                gap.from, gap.to
            ));
            Ok(None)
        }
        Some(Frame::Exit(exit)) => Ok(Some(*exit)),
        None => Ok(None),
    }
}

async fn write_all(mut to: impl tokio::io::AsyncWrite + Unpin, bytes: &[u8]) -> io::Result<()> {
    to.write_all(bytes).await?;
    to.flush().await
}

#[cfg(test)]
mod tests {
    use cloister_api::common::{OutputData, OutputGap};

    use super::*;

    fn frame(frame: impl Into<Frame>) -> OutputFrame {
        OutputFrame { frame: Some(frame.into()), ..Default::default() }
    }

    #[test]
    fn next_offset_only_grows() {
        let mut next = 0;
        advance(&frame(OutputData { offset: 0, data: b"hello".to_vec(), ..Default::default() }), &mut next);
        assert_eq!(next, 5);
        advance(&frame(OutputData { offset: 2, data: b"l".to_vec(), ..Default::default() }), &mut next);
        assert_eq!(next, 5);
        advance(&frame(OutputGap { from: 5, to: 100, ..Default::default() }), &mut next);
        assert_eq!(next, 100);
        advance(
            &frame(OutputData { offset: u64::MAX, data: b"xy".to_vec(), ..Default::default() }),
            &mut next,
        );
        assert_eq!(next, u64::MAX);
    }

    #[test]
    fn a_refusal_is_not_taken_for_a_cut() {
        assert!(is_cut(&ConnectError::unavailable("gone")));
        assert!(is_cut(&ConnectError::internal("no end of stream")));
        assert!(!is_cut(&ConnectError::invalid_argument("no")));
        assert!(!is_cut(&ConnectError::not_found("no")));
        assert!(!is_cut(&ConnectError::failed_precondition("paused")));
        assert!(!is_cut(&ConnectError::unauthenticated("who")));
    }
}
