//! What every backend does, in the terms of DESIGN: create, exec, stop, adopt, remove.
//!
//! A [`Backend`] belongs to one host agent. It keeps nothing that cannot be found again: after the process is
//! killed, a new one calls [`Backend::adopt`] and gets back every sandbox that still runs.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use cloister_types::exec::{ExecRecord, TerminalSize};
use cloister_types::session::Reason;
use cloister_types::{
    BackendKind, Capability, ChannelTarget, ExecId, ExecSpec, IsolationFact, Limits, OutputFrame, SandboxId,
    SessionId,
};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncWrite};

/// What a sandbox is made from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SandboxSpec {
    /// The session it is an instance of; its layer and output are kept under this id.
    pub session_id: SessionId,
    /// This instance.
    pub sandbox_id: SandboxId,
    /// How it is isolated.
    pub backend: BackendKind,
    /// `host`.
    pub image: String,
    /// What it may use.
    pub limits: Limits,
    /// The name it sees as its own.
    pub hostname: String,
}

/// How long one step of making a sandbox took.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepTiming {
    /// Stable name, for example `mounts`.
    pub step: String,
    /// Wall time.
    pub elapsed: Duration,
}

/// A sandbox that was just made.
#[derive(Clone)]
pub struct Created {
    /// The running sandbox.
    pub sandbox: Arc<dyn Sandbox>,
    /// What is true of it, read inside.
    pub facts: Vec<IsolationFact>,
    /// Where the time went.
    pub timings: Vec<StepTiming>,
}

/// That a sandbox has ended, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gone {
    /// The session.
    pub session_id: SessionId,
    /// The instance that ended.
    pub sandbox_id: SandboxId,
    /// `Requested` after a stop, `OutOfMemory`, `SandboxGone`, `HostRebooted`, `DiskError` when files were lost.
    pub reason: Reason,
    /// One sentence for people.
    pub message: String,
}

/// What a host keeps of a session beside a running sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptSession {
    /// Whether the layer is where the next sandbox looks for it. A layer in memory is kept as promised: not at all.
    pub has_layer: bool,
    /// How the latest sandbox ended, if one has; on disk, so that it outlives whoever was to be told.
    pub last_end: Option<Gone>,
}

/// Why something could not be done to a sandbox.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// No such session, sandbox or exec here.
    #[error("{0} is not on this host")]
    NotFound(String),
    /// The same id or request id came with another payload.
    #[error("{0} was used before with another payload")]
    Conflict(String),
    /// Nothing in the sandbox listens there.
    #[error("nothing in the sandbox listens on port {0}")]
    PortClosed(u16),
    /// It can never be done as asked.
    #[error("{0}")]
    Invalid(String),
    /// The sandbox has ended.
    #[error("sandbox `{0}` is not running")]
    NotRunning(SandboxId),
    /// A resource of the host is used up.
    #[error("the host has no {0} left")]
    Exhausted(String),
    /// A step of making or ending a sandbox failed.
    #[error("{operation} failed")]
    Failed {
        /// The step, as a verb and its object.
        operation: String,
        /// What it printed or returned.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl SandboxError {
    /// Returns a failure of `operation` with its cause.
    pub fn failed(
        operation: impl Into<String>,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Self::Failed { operation: operation.into(), source: source.into() }
    }

    /// Returns whether asking again may help.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Exhausted(_) | Self::Failed { .. } => true,
            Self::NotFound(_)
            | Self::Conflict(_)
            | Self::PortClosed(_)
            | Self::Invalid(_)
            | Self::NotRunning(_) => false,
        }
    }
}

/// The sandboxes of one data directory, isolated in one or several ways.
#[async_trait]
pub trait Backend: Send + Sync + 'static {
    /// The ways to isolate that it offers, strongest first.
    fn kinds(&self) -> Vec<BackendKind>;

    /// Tries what one of its kinds needs, by making a sandbox through [`create`](Self::create) and running a command in
    /// it within a deadline. The first entry is `backend.<kind>`; the rest are its parts.
    async fn probe(&self, kind: BackendKind) -> Vec<Capability>;

    /// Makes and starts a sandbox; on the session's kept layer when there is one. A second call with an equal
    /// spec returns the first sandbox.
    ///
    /// # Errors
    ///
    /// Nothing is left behind on an error.
    async fn create(&self, spec: &SandboxSpec) -> Result<Created, SandboxError>;

    /// Waits until a sandbox should be made ready for a session to come; for ever where none are kept ready.
    ///
    /// # Cancel safety
    ///
    /// May be dropped and called again.
    async fn needs_warm(&self) {
        std::future::pending().await
    }

    /// Makes one sandbox that a later [`create`](Self::create) only has to take. Does nothing where none are kept.
    ///
    /// # Errors
    ///
    /// Nothing is left behind, and creates go on without it.
    async fn make_warm(&self) -> Result<(), SandboxError> {
        Ok(())
    }

    /// Takes down every sandbox that is nobody's, and makes no more.
    ///
    /// # Errors
    ///
    /// When something is left; the next [`adopt`](Self::adopt) takes it down.
    async fn drop_warm(&self) -> Result<(), SandboxError> {
        Ok(())
    }

    /// Finds what an earlier process left: returns the sandboxes that still run, and what became of the others
    /// after reaping them. Touches nothing that no intent of this data directory names.
    ///
    /// # Errors
    ///
    /// When the data directory cannot be read.
    async fn adopt(&self) -> Result<(Vec<Arc<dyn Sandbox>>, Vec<Gone>), SandboxError>;

    /// Returns what is kept of a session; `None` when it is not here.
    ///
    /// # Errors
    ///
    /// When it cannot be read.
    async fn kept_session(&self, session_id: &SessionId) -> Result<Option<KeptSession>, SandboxError>;

    /// Removes a session from this host: its sandbox if one runs, its layer, its output. Succeeds when there is
    /// nothing.
    ///
    /// # Errors
    ///
    /// When something is left; calling again goes on.
    async fn remove(&self, session_id: &SessionId) -> Result<(), SandboxError>;

    /// Returns every session that has a layer here, with the running sandbox if there is one.
    ///
    /// # Errors
    ///
    /// When the data directory cannot be read.
    async fn sessions(&self) -> Result<Vec<(SessionId, Option<Arc<dyn Sandbox>>)>, SandboxError>;

    /// Reads the execs of a session whose sandbox does not run, oldest first.
    ///
    /// # Errors
    ///
    /// [`SandboxError::NotFound`] when the session is not here.
    async fn ended_execs(&self, session_id: &SessionId) -> Result<Vec<ExecRecord>, SandboxError>;

    /// Reads kept output of a session whose sandbox does not run.
    ///
    /// # Errors
    ///
    /// [`SandboxError::NotFound`] when the session or exec is not here.
    async fn ended_output(
        &self,
        session_id: &SessionId,
        exec_id: &ExecId,
        from_offset: u64,
    ) -> Result<Box<dyn OutputReader>, SandboxError>;
}

/// One running sandbox. Dropping the handle ends nothing.
#[async_trait]
pub trait Sandbox: Send + Sync + 'static {
    /// What it was made from.
    fn spec(&self) -> &SandboxSpec;

    /// Starts a program. The same request id with an equal spec returns the exec of the first call, whatever
    /// `exec_id` says.
    ///
    /// # Errors
    ///
    /// A program that cannot be started is no error: its exec ends as `NotStarted`.
    async fn start_exec(
        &self,
        exec_id: &ExecId,
        request_id: &str,
        spec: &ExecSpec,
    ) -> Result<ExecRecord, SandboxError>;

    /// Returns one exec.
    ///
    /// # Errors
    ///
    /// [`SandboxError::NotFound`].
    async fn exec(&self, exec_id: &ExecId) -> Result<ExecRecord, SandboxError>;

    /// Returns all execs, oldest first.
    ///
    /// # Errors
    ///
    /// When the sandbox does not answer.
    async fn execs(&self) -> Result<Vec<ExecRecord>, SandboxError>;

    /// Writes to standard input at an offset, returns the next offset. Bytes already written are skipped; a hole is
    /// [`SandboxError::Invalid`]. Waits while the program does not read.
    ///
    /// # Errors
    ///
    /// [`SandboxError::NotFound`], or `Invalid` when standard input is closed.
    async fn write_stdin(
        &self,
        exec_id: &ExecId,
        offset: u64,
        data: &[u8],
        eof: bool,
    ) -> Result<u64, SandboxError>;

    /// Types into the exec's terminal, after whatever was typed before; `end` types the end of input after it. Waits
    /// while the program does not read. Not safe to repeat.
    ///
    /// # Errors
    ///
    /// [`SandboxError::NotFound`], or `Invalid` for an exec without a terminal or that has ended.
    async fn type_input(&self, exec_id: &ExecId, data: &[u8], end: bool) -> Result<(), SandboxError>;

    /// Gives the exec's terminal another size. An exec that has ended is no error.
    ///
    /// # Errors
    ///
    /// [`SandboxError::NotFound`], or `Invalid` for an exec without a terminal.
    async fn resize(&self, exec_id: &ExecId, size: TerminalSize) -> Result<(), SandboxError>;

    /// Sends a signal to the exec's process group. An exec that has ended is no error.
    ///
    /// # Errors
    ///
    /// [`SandboxError::NotFound`], or `Invalid` for a number that is no signal.
    async fn signal(&self, exec_id: &ExecId, signal: i32) -> Result<(), SandboxError>;

    /// Waits until the exec has ended, at most `wait`; returns it either way.
    ///
    /// # Errors
    ///
    /// [`SandboxError::NotFound`].
    async fn wait_exec(&self, exec_id: &ExecId, wait: Duration) -> Result<ExecRecord, SandboxError>;

    /// Reads output from an offset on. With `no_follow` it ends with [`OutputFrame::End`] at the newest byte.
    ///
    /// # Errors
    ///
    /// [`SandboxError::NotFound`].
    async fn read_output(
        &self,
        exec_id: &ExecId,
        from_offset: u64,
        no_follow: bool,
    ) -> Result<Box<dyn OutputReader>, SandboxError>;

    /// Starts a program and reads its output from the beginning: what [`start_exec`](Self::start_exec) and
    /// [`read_output`](Self::read_output) do, in one exchange where the backend can.
    ///
    /// # Errors
    ///
    /// As both.
    async fn start_and_read(
        &self,
        exec_id: &ExecId,
        request_id: &str,
        spec: &ExecSpec,
    ) -> Result<(ExecRecord, Box<dyn OutputReader>), SandboxError> {
        let exec = self.start_exec(exec_id, request_id, spec).await?;
        let reader = self.read_output(&exec.exec_id, 0, false).await?;
        Ok((exec, reader))
    }

    /// Opens a channel to the sandbox's files or to a port. What comes through it is the sandbox's word: hostile.
    ///
    /// # Errors
    ///
    /// [`SandboxError::PortClosed`] when nothing listens on the port, `Invalid` for a user that does not exist and from a
    /// backend that has no channels.
    async fn open_channel(&self, target: &ChannelTarget) -> Result<Channel, SandboxError> {
        let _ = target;
        Err(SandboxError::Invalid("this backend opens no channels".to_owned()))
    }

    /// Ends the sandbox (SIGTERM, `grace`, SIGKILL) and keeps layer and output. Succeeds when it has ended.
    ///
    /// # Errors
    ///
    /// When something of it still runs.
    async fn stop(&self, grace: Duration) -> Result<(), SandboxError>;

    /// Waits until the sandbox has ended and everything of it but layer and output is released.
    ///
    /// # Cancel safety
    ///
    /// May be dropped and called again.
    async fn wait_gone(&self) -> Gone;
}

/// Both directions of a channel; the end of one leaves the other open.
pub type Channel = Box<dyn ByteStream>;

/// Bytes both ways.
pub trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> ByteStream for T {}

/// Frames of one exec's output, in order. A reader that is not asked gives backpressure to the program.
#[async_trait]
pub trait OutputReader: Send {
    /// Returns the next frame; `None` only after [`OutputFrame::Exit`] or [`OutputFrame::End`].
    ///
    /// # Errors
    ///
    /// The stream was cut; reading again from the last offset goes on.
    async fn next(&mut self) -> Result<Option<OutputFrame>, SandboxError>;
}

/// Where a backend keeps things on this machine.
#[derive(Debug, Clone)]
pub struct HostPaths {
    /// Layers, intents, output; survives a reboot.
    pub data_dir: PathBuf,
    /// Sockets; does not.
    pub run_dir: PathBuf,
}
