//! The host agent's side of a shim's socket: one method a request, each over a connection of its own.
//!
//! A [`Client`] is a path and a deadline; it holds no connection, so that a shim which was adopted after a restart is
//! talked to like one that was just started. A dead shim is told from a slow one: nobody listens
//! ([`ClientError::Gone`]) is certain, because a shim's socket does not outlive it.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cloister_api::guest::{self, ErrorKind};
use cloister_types::exec::{ExecRecord, TerminalSize};
use cloister_types::{ExecId, ExecSpec, OutputFrame};
use tokio::time::timeout;

use crate::connection::{Connection, OpenError};
use crate::convert::{self, ConvertError};
use crate::frames::{Body, FrameError};
use crate::shim::config::SandboxExitRecord;

/// Most bytes of one `WriteStdin`.
const STDIN_FRAME_BYTES: usize = 64 * 1024;

/// Why a shim did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody listens at the socket, or there is none: the shim is dead.
    #[error("no shim serves `{0}`")]
    Gone(PathBuf),
    /// The socket cannot be dialled.
    #[error("connect to `{socket}`")]
    Connect {
        /// The socket.
        socket: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// No answer in time.
    #[error("the shim at `{socket}` did not answer within {} ms", after.as_millis())]
    Deadline {
        /// The socket.
        socket: PathBuf,
        /// How long was waited.
        after: Duration,
    },
    /// The connection broke or carried nonsense; asking again goes on.
    #[error("talk to the shim")]
    Frame(#[from] FrameError),
    /// An answer that means nothing.
    #[error("read the shim's answer")]
    Convert(#[from] ConvertError),
    /// No such exec; says which.
    #[error("{0} is not in this sandbox")]
    NotFound(String),
    /// It can never be done as asked.
    #[error("{0}")]
    Invalid(String),
    /// The request id or exec id was used before with another payload; says which.
    #[error("{0} was used before with another payload")]
    Conflict(String),
    /// The sandbox has ended.
    #[error("{0}")]
    NotRunning(String),
    /// A bound is reached.
    #[error("{0}")]
    Exhausted(String),
    /// The shim or the guest agent failed.
    #[error("{0}")]
    Internal(String),
}

impl ClientError {
    pub(crate) fn from_wire(error: guest::Error) -> Self {
        let message = error.message;
        match error.kind.as_known() {
            Some(ErrorKind::ERROR_KIND_NOT_FOUND) => Self::NotFound(message),
            Some(ErrorKind::ERROR_KIND_INVALID) => Self::Invalid(message),
            Some(ErrorKind::ERROR_KIND_CONFLICT) => Self::Conflict(message),
            Some(ErrorKind::ERROR_KIND_NOT_RUNNING) => Self::NotRunning(message),
            Some(ErrorKind::ERROR_KIND_EXHAUSTED) => Self::Exhausted(message),
            Some(ErrorKind::ERROR_KIND_INTERNAL | ErrorKind::ERROR_KIND_UNSPECIFIED) | None => {
                Self::Internal(message)
            }
        }
    }

    /// Returns whether the shim is dead for certain.
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Gone(_))
    }
}

/// What a shim says about its sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SandboxReport {
    /// Name and value of each isolation fact.
    pub facts: Vec<(String, String)>,
    /// Each step of making it, with its time.
    pub timings: Vec<(String, Duration)>,
}

/// Asks one shim.
#[derive(Debug, Clone)]
pub struct Client {
    socket: PathBuf,
    sandbox_id: String,
    deadline: Duration,
}

impl Client {
    /// Returns a client of the shim that serves `socket` for the sandbox with this id. An answer that does not
    /// depend on what the program does has to come within `deadline`.
    pub fn new(socket: impl Into<PathBuf>, sandbox_id: impl Into<String>, deadline: Duration) -> Self {
        Self { socket: socket.into(), sandbox_id: sandbox_id.into(), deadline }
    }

    /// Returns the path of the socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Starts a program. The same request id with an equal spec returns the exec of the first call.
    ///
    /// # Errors
    ///
    /// [`ClientError::Conflict`], [`ClientError::Exhausted`], [`ClientError::Invalid`].
    pub async fn start_exec(
        &self,
        exec_id: &ExecId,
        request_id: &str,
        spec: &ExecSpec,
    ) -> Result<ExecRecord, ClientError> {
        let answer = self.ask(start_to_wire(exec_id, request_id, spec)).await?;
        expect_exec(answer)
    }

    /// Starts a program and reads its output over the same connection: one exchange where
    /// [`start_exec`](Self::start_exec) and [`read_output`](Self::read_output) take two.
    ///
    /// # Errors
    ///
    /// As [`start_exec`](Self::start_exec).
    pub async fn start_and_read(
        &self,
        exec_id: &ExecId,
        request_id: &str,
        spec: &ExecSpec,
    ) -> Result<(ExecRecord, OutputReader), ClientError> {
        let start = start_to_wire(exec_id, request_id, spec);
        let attach = guest::AttachExec {
            exec_id: exec_id.to_string(),
            start: start.into(),
            ..guest::AttachExec::default()
        };
        self.attach(attach).await
    }

    /// Returns one exec.
    ///
    /// # Errors
    ///
    /// [`ClientError::NotFound`].
    pub async fn exec(&self, exec_id: &ExecId) -> Result<ExecRecord, ClientError> {
        let request = guest::GetExec { exec_id: exec_id.to_string(), ..guest::GetExec::default() };
        expect_exec(self.ask(request).await?)
    }

    /// Returns all execs, oldest first.
    ///
    /// # Errors
    ///
    /// When the shim does not answer.
    pub async fn execs(&self) -> Result<Vec<ExecRecord>, ClientError> {
        let mut connection = self.dial(guest::ListExecs::default()).await?;
        let mut execs = Vec::new();
        loop {
            match self.within(answer(&mut connection)).await? {
                Body::ExecList(list) => {
                    for exec in list.execs {
                        execs.push(convert::record_from_wire(exec)?);
                    }
                }
                Body::End(_) => return Ok(execs),
                other => return Err(unexpected(other, "`ExecList` or `End`")),
            }
        }
    }

    /// Sends a signal to an exec's process group; an exec that has ended is no error.
    ///
    /// # Errors
    ///
    /// [`ClientError::NotFound`], or [`ClientError::Invalid`] for a number that is no signal.
    pub async fn signal(&self, exec_id: &ExecId, signal: i32) -> Result<(), ClientError> {
        let request =
            guest::SignalExec { exec_id: exec_id.to_string(), signal, ..guest::SignalExec::default() };
        match self.ask(request).await? {
            Body::Signaled(_) => Ok(()),
            other => Err(unexpected(other, "`Signaled`")),
        }
    }

    /// Gives the exec's terminal another size; an exec that has ended is no error.
    ///
    /// # Errors
    ///
    /// [`ClientError::NotFound`], or [`ClientError::Invalid`] for an exec without a terminal.
    pub async fn resize(&self, exec_id: &ExecId, size: TerminalSize) -> Result<(), ClientError> {
        let request = guest::ResizeExec {
            exec_id: exec_id.to_string(),
            size: convert::terminal_size_to_wire(size).into(),
            ..guest::ResizeExec::default()
        };
        match self.ask(request).await? {
            Body::Resized(_) => Ok(()),
            other => Err(unexpected(other, "`Resized`")),
        }
    }

    /// Types into the exec's terminal, after whatever was typed before; `end` types the end of input after it. Waits
    /// while the program does not read. Not safe to repeat.
    ///
    /// # Errors
    ///
    /// [`ClientError::NotFound`], or [`ClientError::Invalid`] for an exec without a terminal or that has ended.
    pub async fn type_input(&self, exec_id: &ExecId, data: &[u8], end: bool) -> Result<(), ClientError> {
        let exec_id = exec_id.to_string();
        let mut pieces = data.chunks(STDIN_FRAME_BYTES).peekable();
        let first = pieces.next().unwrap_or_default();
        let write = |piece: &[u8], eof: bool| guest::WriteStdin {
            exec_id: exec_id.clone(),
            data: piece.to_vec(),
            eof,
            append: true,
            ..guest::WriteStdin::default()
        };
        let mut connection = self.dial(write(first, end && pieces.peek().is_none())).await?;
        stdin_written(&mut connection).await?;
        while let Some(piece) = pieces.next() {
            connection.writer.send(write(piece, end && pieces.peek().is_none())).await?;
            stdin_written(&mut connection).await?;
        }
        Ok(())
    }

    /// Writes to standard input at an offset and returns the next offset. Waits while the program does not read.
    ///
    /// # Errors
    ///
    /// [`ClientError::NotFound`], or [`ClientError::Invalid`] for a hole and for a closed standard input.
    pub async fn write_stdin(
        &self,
        exec_id: &ExecId,
        offset: u64,
        data: &[u8],
        eof: bool,
    ) -> Result<u64, ClientError> {
        let exec_id = exec_id.to_string();
        let mut pieces = data.chunks(STDIN_FRAME_BYTES).peekable();
        let first = pieces.next().unwrap_or_default();
        let write = |offset: u64, piece: &[u8], eof: bool| guest::WriteStdin {
            exec_id: exec_id.clone(),
            offset,
            data: piece.to_vec(),
            eof,
            ..guest::WriteStdin::default()
        };
        let mut connection = self.dial(write(offset, first, eof && pieces.peek().is_none())).await?;
        let mut next_offset = stdin_written(&mut connection).await?;
        let mut sent = offset.saturating_add(u64::try_from(first.len()).unwrap_or(u64::MAX));
        while let Some(piece) = pieces.next() {
            connection.writer.send(write(sent, piece, eof && pieces.peek().is_none())).await?;
            next_offset = stdin_written(&mut connection).await?;
            sent = sent.saturating_add(u64::try_from(piece.len()).unwrap_or(u64::MAX));
        }
        Ok(next_offset)
    }

    /// Waits until the exec has ended, at most `wait`; returns it either way.
    ///
    /// # Errors
    ///
    /// [`ClientError::NotFound`].
    pub async fn wait_exec(&self, exec_id: &ExecId, wait: Duration) -> Result<ExecRecord, ClientError> {
        let request = guest::WaitExec {
            exec_id: exec_id.to_string(),
            wait_ms: convert::millis_to_wire(wait),
            ..guest::WaitExec::default()
        };
        let mut connection = self.dial(request).await?;
        let after = wait.saturating_add(self.deadline);
        let ended = timeout(after, answer(&mut connection))
            .await
            .map_err(|_| ClientError::Deadline { socket: self.socket.clone(), after })?;
        expect_exec(ended?)
    }

    /// Reads output from an offset on. While the reader is held, output that it has not read stops the program once
    /// the spool is full.
    ///
    /// # Errors
    ///
    /// [`ClientError::NotFound`], or [`ClientError::Invalid`] for an offset beyond the newest byte.
    pub async fn read_output(
        &self,
        exec_id: &ExecId,
        from_offset: u64,
        no_follow: bool,
    ) -> Result<OutputReader, ClientError> {
        let attach = guest::AttachExec {
            exec_id: exec_id.to_string(),
            from_offset,
            no_follow,
            ..guest::AttachExec::default()
        };
        Ok(self.attach(attach).await?.1)
    }

    /// Gives a warm sandbox its identity and returns its facts; this client knows it by its old id. `sandbox_dir` and
    /// `exec_dir` are where its directories are by now. A second claim is a [`ClientError::Conflict`].
    ///
    /// # Errors
    ///
    /// The sandbox is of no more use then, whoever it belongs to.
    pub async fn claim(
        &self,
        sandbox_id: &str,
        hostname: &str,
        sandbox_dir: &Path,
        exec_dir: &Path,
    ) -> Result<SandboxReport, ClientError> {
        let claim = guest::ClaimSandbox {
            sandbox_id: sandbox_id.to_owned(),
            hostname: hostname.to_owned(),
            sandbox_dir: sandbox_dir.to_string_lossy().into_owned(),
            exec_dir: exec_dir.to_string_lossy().into_owned(),
            ..guest::ClaimSandbox::default()
        };
        expect_sandbox(self.ask(claim).await?)
    }

    /// Returns the facts and timings of the sandbox.
    ///
    /// # Errors
    ///
    /// When the shim does not answer.
    pub async fn sandbox(&self) -> Result<SandboxReport, ClientError> {
        expect_sandbox(self.ask(guest::GetSandbox::default()).await?)
    }

    /// Starts to watch the sandbox.
    ///
    /// # Errors
    ///
    /// When the shim does not answer.
    pub async fn watch(&self) -> Result<(SandboxReport, SandboxWatch), ClientError> {
        let mut connection = self.dial(guest::WatchSandbox::default()).await?;
        let report = expect_sandbox(self.within(answer(&mut connection)).await?)?;
        Ok((report, SandboxWatch { connection }))
    }

    /// Ends the sandbox: SIGTERM, `grace`, SIGKILL. Returns how it ended.
    ///
    /// # Errors
    ///
    /// [`ClientError::Gone`] when it has ended before and its shim with it.
    pub async fn stop(&self, grace: Duration) -> Result<SandboxExitRecord, ClientError> {
        let request =
            guest::StopSandbox { grace_ms: convert::millis_to_wire(grace), ..guest::StopSandbox::default() };
        let mut connection = self.dial(request).await?;
        let after = grace.saturating_add(self.deadline);
        let ended = timeout(after, answer(&mut connection))
            .await
            .map_err(|_| ClientError::Deadline { socket: self.socket.clone(), after })?;
        expect_sandbox_exit(ended?)
    }

    async fn attach(&self, attach: guest::AttachExec) -> Result<(ExecRecord, OutputReader), ClientError> {
        let position = attach.from_offset;
        let mut connection = self.dial(attach).await?;
        let record = expect_exec(self.within(answer(&mut connection)).await?)?;
        Ok((record, OutputReader { connection, position, done: false }))
    }

    async fn ask(&self, request: impl Into<Body>) -> Result<Body, ClientError> {
        let mut connection = self.dial(request).await?;
        self.within(answer(&mut connection)).await
    }

    /// Connects, greets and sends the request; the answer is the next frame.
    async fn dial(&self, request: impl Into<Body>) -> Result<Connection, ClientError> {
        self.within(async {
            Connection::open(&self.socket, &self.sandbox_id, request).await.map_err(|error| match error {
                OpenError::Connect(source) => match source.kind() {
                    io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                        ClientError::Gone(self.socket.clone())
                    }
                    _ => ClientError::Connect { socket: self.socket.clone(), source },
                },
                OpenError::Refused(refusal) => ClientError::from_wire(refusal),
                OpenError::Frame(error) => error.into(),
            })
        })
        .await
    }

    async fn within<T>(
        &self,
        answer: impl Future<Output = Result<T, ClientError>>,
    ) -> Result<T, ClientError> {
        timeout(self.deadline, answer)
            .await
            .map_err(|_| ClientError::Deadline { socket: self.socket.clone(), after: self.deadline })?
    }
}

async fn answer(connection: &mut Connection) -> Result<Body, ClientError> {
    match connection.reader.expect().await? {
        Body::Error(error) => Err(ClientError::from_wire(*error)),
        body => Ok(body),
    }
}

async fn stdin_written(connection: &mut Connection) -> Result<u64, ClientError> {
    match answer(connection).await? {
        Body::StdinWritten(written) => Ok(written.next_offset),
        other => Err(unexpected(other, "`StdinWritten`")),
    }
}

/// Reads an exec's output in order. Dropping it lets the program go on without a reader.
#[derive(Debug)]
pub struct OutputReader {
    connection: Connection,
    position: u64,
    done: bool,
}

impl OutputReader {
    /// Returns the offset of the next byte: where to go on after an error.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Returns the next frame; `None` only after [`OutputFrame::Exit`] or [`OutputFrame::End`].
    ///
    /// # Errors
    ///
    /// The stream was cut, or was not contiguous; reading again from [`position`](Self::position) goes on.
    ///
    /// # Cancel safety
    ///
    /// May be dropped and called again.
    pub async fn next(&mut self) -> Result<Option<OutputFrame>, ClientError> {
        if self.done {
            return Ok(None);
        }
        let frame = match answer(&mut self.connection).await? {
            Body::Output(output) => {
                self.check_offset(output.offset)?;
                self.position += u64::try_from(output.data.len()).unwrap_or(u64::MAX);
                OutputFrame::Data {
                    stream: convert::stream_from_wire(output.stream)?,
                    offset: output.offset,
                    data: output.data,
                }
            }
            Body::Gap(gap) => {
                self.check_offset(gap.from)?;
                if gap.to <= gap.from {
                    return Err(FrameError::Unexpected("a gap that goes forward").into());
                }
                self.position = gap.to;
                OutputFrame::Gap { from: gap.from, to: gap.to }
            }
            Body::Exit(exit) => {
                self.done = true;
                OutputFrame::Exit(convert::exit_from_wire(*exit)?)
            }
            Body::End(end) => {
                self.done = true;
                OutputFrame::End { next_offset: end.next_offset }
            }
            other => return Err(unexpected(other, "output, a gap or an end")),
        };
        Ok(Some(frame))
    }

    fn check_offset(&self, offset: u64) -> Result<(), ClientError> {
        if offset == self.position {
            Ok(())
        } else {
            Err(FrameError::Unexpected("output that follows what came before").into())
        }
    }
}

/// Waits for a sandbox's end.
#[derive(Debug)]
pub struct SandboxWatch {
    connection: Connection,
}

impl SandboxWatch {
    /// Waits until the sandbox has ended.
    ///
    /// # Errors
    ///
    /// The shim went away without saying how: `exit.json` tells, or is missing because it was killed.
    ///
    /// # Cancel safety
    ///
    /// May be dropped and called again.
    pub async fn wait(&mut self) -> Result<SandboxExitRecord, ClientError> {
        expect_sandbox_exit(answer(&mut self.connection).await?)
    }
}

fn start_to_wire(exec_id: &ExecId, request_id: &str, spec: &ExecSpec) -> guest::StartExec {
    guest::StartExec {
        exec_id: exec_id.to_string(),
        request_id: request_id.to_owned(),
        spec: convert::spec_to_wire(spec).into(),
        ..guest::StartExec::default()
    }
}

fn expect_exec(body: Body) -> Result<ExecRecord, ClientError> {
    match body {
        Body::Exec(exec) => Ok(convert::record_from_wire(*exec)?),
        other => Err(unexpected(other, "`Exec`")),
    }
}

fn expect_sandbox(body: Body) -> Result<SandboxReport, ClientError> {
    match body {
        Body::Sandbox(sandbox) => Ok(SandboxReport {
            facts: sandbox.facts.into_iter().map(|fact| (fact.name, fact.value)).collect(),
            timings: sandbox
                .timings
                .into_iter()
                .map(|timing| (timing.step, Duration::from_micros(timing.elapsed_us)))
                .collect(),
        }),
        other => Err(unexpected(other, "`Sandbox`")),
    }
}

fn expect_sandbox_exit(body: Body) -> Result<SandboxExitRecord, ClientError> {
    match body {
        Body::SandboxExit(exit) => Ok(SandboxExitRecord {
            reason: exit.reason,
            message: exit.message,
            status: exit.status,
            exited_unix_ms: exit.exited_unix_ms,
        }),
        other => Err(unexpected(other, "`SandboxExit`")),
    }
}

fn unexpected(body: Body, expected: &'static str) -> ClientError {
    match body {
        Body::Error(error) => ClientError::from_wire(*error),
        _ => FrameError::Unexpected(expected).into(),
    }
}
