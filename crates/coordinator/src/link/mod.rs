//! The link to host agents: commands and byte streams to hosts that dialled us.
//!
//! ```text
//!  app, reconcile                link                          host agent
//!  HostLinks::command ──► Link.outbound (64) ──► Control stream ──► runs it
//!        ▲                                                              │
//!        └── oneshot ◄── Link.pending[id] ◄── reader task ◄─────────────┘ CommandResult
//!
//!  HostLinks::open_stream ──► OpenStream{one-time id} ──► host dials Stream(id)
//!        ▲                                                     │
//!        └── HostStream ◄── waiting[id] ◄──────────────────────┘
//! ```
//!
//! Invariants:
//! - One link a host: a second registration closes the first, whose commands under way fail.
//! - Whoever waits has a deadline; when a link closes, everything that waits on it fails at once.
//! - A byte stream is handed to its consumer as it came: nothing is read ahead, so HTTP/2 windows are the whole
//!   buffer, and a slow consumer slows the program.
//! - What a host sends is checked here or by the consumer; a host can fail its own sessions only.

mod service;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cloister_api::host::command::Command as CommandKind;
use cloister_api::host::command_result::Result as ResultKind;
use cloister_api::host::control_response::Message;
use cloister_api::host::{
    CloseStream, Command, CommandResult, ControlResponse, HostErrorKind, OpenStream, StreamRequest,
    StreamResponse,
};
use cloister_service::CancellationToken;
use cloister_types::{HostId, SessionId};
use connectrpc::InboundStream;
use tokio::sync::{mpsc, oneshot, watch};

pub(crate) use service::{LinkService, first_message};

use crate::error::{self, AppError};
use crate::metrics;

/// Commands that may wait for the control stream; when it is full the caller waits, within its deadline.
const OUTBOUND_MESSAGES: usize = 64;
/// How long a host has to open a byte stream.
const OPEN_STREAM_DEADLINE: Duration = Duration::from_secs(10);
/// How long a call waits for a host that is about to come back.
const RECONNECT_PATIENCE: Duration = Duration::from_secs(2);

/// Why a host did not do what it was asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LinkError {
    /// It has no link to this coordinator.
    #[error("host `{0}` is not connected")]
    NotConnected(HostId),
    /// Its link closed meanwhile: whether it was done is not known. Everything asked of a host can be asked again.
    #[error("the link to host `{0}` closed meanwhile")]
    Lost(HostId),
    /// It did not answer in time; the same holds.
    #[error("host `{host_id}` did not answer within {after:?}")]
    Timeout {
        /// The host.
        host_id: HostId,
        /// How long was waited.
        after: Duration,
    },
    /// It refused or failed.
    #[error("host: {message}")]
    Refused {
        /// How.
        kind: HostErrorKind,
        /// Its words.
        message: String,
    },
    /// It answered something else than what was asked for.
    #[error("host `{0}` sent an answer that does not fit the command")]
    Malformed(HostId),
}

impl LinkError {
    /// Returns whether asking again may help.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::NotConnected(_) | Self::Lost(_) | Self::Timeout { .. } => true,
            Self::Refused { kind, .. } => {
                matches!(
                    *kind,
                    HostErrorKind::Internal | HostErrorKind::Exhausted | HostErrorKind::Unspecified
                )
            }
            Self::Malformed(_) => false,
        }
    }

    /// Returns the kind of a refusal.
    pub fn refusal(&self) -> Option<HostErrorKind> {
        match self {
            Self::Refused { kind, .. } => Some(*kind),
            Self::NotConnected(_) | Self::Lost(_) | Self::Timeout { .. } | Self::Malformed(_) => None,
        }
    }
}

impl From<LinkError> for AppError {
    fn from(link: LinkError) -> Self {
        let code = match &link {
            LinkError::NotConnected(_) | LinkError::Lost(_) => &error::HOST_NOT_CONNECTED,
            LinkError::Timeout { .. } => &error::HOST_TIMEOUT,
            LinkError::Malformed(_) => &error::HOST_FAILED,
            LinkError::Refused { kind, .. } => match *kind {
                HostErrorKind::Fenced => &error::CONFLICT,
                HostErrorKind::NotFound => &error::EXEC_NOT_FOUND,
                HostErrorKind::Invalid => &error::INVALID_FIELD,
                HostErrorKind::Conflict => &error::EXEC_CONFLICT,
                HostErrorKind::NotRunning => &error::SANDBOX_NOT_RUNNING,
                HostErrorKind::Exhausted => &error::HOST_EXHAUSTED,
                // Told by the session: only what makes a sandbox is answered so.
                HostErrorKind::LayerMissing => &error::SANDBOX_NOT_RUNNING,
                HostErrorKind::Internal | HostErrorKind::Unspecified => &error::HOST_FAILED,
            },
        };
        // The host's own words, without the chain of whose words they are.
        let message = match link {
            LinkError::Refused { message, .. } if !message.is_empty() => message,
            other => other.to_string(),
        };
        Self::new(code, message)
    }
}

/// A byte stream that a host opened.
pub struct HostStream {
    /// What the host sends. It may end at any time: only a final frame says that it is complete.
    pub requests: InboundStream<StreamRequest>,
    /// To the host; when all senders are dropped the host ends the stream.
    pub responses: mpsc::Sender<StreamResponse>,
    /// Tells the host when the stream is dropped.
    _close: CloseOnDrop,
}

/// Tells a host that a stream's consumer has gone.
struct CloseOnDrop {
    outbound: mpsc::Sender<ControlResponse>,
    stream_id: String,
}

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        let close = CloseStream { stream_id: std::mem::take(&mut self.stream_id), ..Default::default() };
        // Without a link the host ends its streams by itself. With a full one it learns from the stream's own end, unless
        // that stands behind bytes that nobody takes.
        let _ = self.outbound.try_send(ControlResponse { message: Some(close.into()), ..Default::default() });
    }
}

impl std::fmt::Debug for HostStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostStream").finish_non_exhaustive()
    }
}

/// The links of this coordinator. Cheap to clone.
#[derive(Clone, Default)]
pub struct HostLinks {
    inner: Arc<Inner>,
}

impl std::fmt::Debug for HostLinks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostLinks").field("hosts", &self.connected()).finish()
    }
}

#[derive(Default)]
struct Inner {
    links: Mutex<HashMap<HostId, Arc<Link>>>,
    waiting: Mutex<HashMap<String, Waiter>>,
    changed: watch::Sender<u64>,
}

/// Where a stream goes that a host opens.
type Waiter = oneshot::Sender<(InboundStream<StreamRequest>, mpsc::Sender<StreamResponse>)>;

/// One link.
struct Link {
    host_id: HostId,
    /// From the store: later registrations have higher ones.
    link_epoch: u64,
    outbound: mpsc::Sender<ControlResponse>,
    pending: Mutex<HashMap<u64, oneshot::Sender<CommandResult>>>,
    next_command: AtomicU64,
    closed: CancellationToken,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Removes a map entry however its waiter ends.
struct RemoveOnDrop<F: FnMut()>(F);

impl<F: FnMut()> Drop for RemoveOnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

impl Link {
    fn complete(&self, result: CommandResult) {
        let waiter = lock(&self.pending).remove(&result.id);
        match waiter {
            // A waiter that gave up meanwhile needs no answer.
            Some(waiter) => drop(waiter.send(result)),
            None => tracing::debug!(host_id = %self.host_id, command = result.id, "late answer"),
        }
    }
}

impl HostLinks {
    /// Returns the hosts with a link.
    pub fn connected(&self) -> Vec<HostId> {
        lock(&self.inner.links).keys().cloned().collect()
    }

    /// Returns whether a host has a link.
    pub fn is_connected(&self, host_id: &HostId) -> bool {
        lock(&self.inner.links).contains_key(host_id)
    }

    /// Ends the link of a host, if it has one: the host dials again, if it still is there.
    fn end(&self, host_id: &HostId) {
        if let Some(link) = lock(&self.inner.links).get(host_id) {
            link.closed.cancel();
        }
    }

    fn install(&self, link: Arc<Link>) {
        let mut links = lock(&self.inner.links);
        // Two registrations can arrive here in the other order than in the store: the store's order decides.
        if links.get(&link.host_id).is_some_and(|current| current.link_epoch > link.link_epoch) {
            link.closed.cancel();
            return;
        }
        if let Some(replaced) = links.insert(link.host_id.clone(), link) {
            tracing::info!(host_id = %replaced.host_id, "link replaced");
            replaced.closed.cancel();
        }
        self.changed(&links);
    }

    fn uninstall(&self, link: &Arc<Link>) {
        link.closed.cancel();
        lock(&link.pending).clear();
        let mut links = lock(&self.inner.links);
        if links.get(&link.host_id).is_some_and(|current| Arc::ptr_eq(current, link)) {
            links.remove(&link.host_id);
        }
        self.changed(&links);
    }

    fn changed(&self, links: &HashMap<HostId, Arc<Link>>) {
        metrics::host_links(u32::try_from(links.len()).unwrap_or(u32::MAX));
        self.inner.changed.send_modify(|count| *count = count.wrapping_add(1));
    }

    /// Returns the link of a host, waiting a moment for one that is about to come back.
    async fn link(&self, host_id: &HostId) -> Result<Arc<Link>, LinkError> {
        let mut changed = self.inner.changed.subscribe();
        let find =
            || lock(&self.inner.links).get(host_id).filter(|link| !link.closed.is_cancelled()).cloned();
        let wait = async {
            loop {
                changed.borrow_and_update();
                if let Some(link) = find() {
                    return link;
                }
                if changed.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
            }
        };
        tokio::time::timeout(RECONNECT_PATIENCE, wait)
            .await
            .map_err(|_| LinkError::NotConnected(host_id.clone()))
    }

    /// Sends a command to a host and returns its answer.
    ///
    /// # Errors
    ///
    /// [`LinkError`]; every command can be sent again.
    ///
    /// # Cancel safety
    ///
    /// May be dropped: the host may do it all the same.
    pub async fn command(
        &self,
        host_id: &HostId,
        session_id: &SessionId,
        epoch: u64,
        command: impl Into<CommandKind>,
        deadline: Duration,
    ) -> Result<ResultKind, LinkError> {
        let started = Instant::now();
        let command = command.into();
        let kind = command_kind(&command);
        let link = self.link(host_id).await?;
        let id = link.next_command.fetch_add(1, Ordering::Relaxed);
        let (sender, receiver) = oneshot::channel();
        lock(&link.pending).insert(id, sender);
        let _entry = RemoveOnDrop(|| drop(lock(&link.pending).remove(&id)));
        let message = ControlResponse {
            message: Some(
                Command {
                    id,
                    epoch,
                    session_id: session_id.to_string(),
                    command: Some(command),
                    ..Default::default()
                }
                .into(),
            ),
            ..Default::default()
        };
        let exchange = async {
            link.outbound.send(message).await.map_err(|_| LinkError::Lost(host_id.clone()))?;
            receiver.await.map_err(|_| LinkError::Lost(host_id.clone()))
        };
        let result = tokio::select! {
            biased;
            result = tokio::time::timeout(deadline, exchange) => match result {
                Ok(result) => result?,
                Err(_) => return Err(LinkError::Timeout { host_id: host_id.clone(), after: deadline }),
            },
            () = link.closed.cancelled() => return Err(LinkError::Lost(host_id.clone())),
        };
        metrics::host_command(kind, started.elapsed());
        match result.result {
            Some(ResultKind::Error(error)) => Err(LinkError::Refused {
                kind: error.kind.as_known().unwrap_or(HostErrorKind::Internal),
                message: error.message.chars().take(1024).collect(),
            }),
            Some(result) => Ok(result),
            None => Err(LinkError::Malformed(host_id.clone())),
        }
    }

    /// Sends a command that takes back what is no longer wanted. A host that is away is told when it registers; one that
    /// is there and fails at it would never be told again, so its link is ended: it registers, and its report decides.
    pub async fn take_back(
        &self,
        host_id: &HostId,
        session_id: &SessionId,
        epoch: u64,
        command: impl Into<CommandKind>,
        deadline: Duration,
    ) {
        let Err(error) = self.command(host_id, session_id, epoch, command, deadline).await else { return };
        match error.refusal() {
            // A newer epoch means that somebody else decides.
            None | Some(HostErrorKind::Fenced | HostErrorKind::NotFound | HostErrorKind::NotRunning) => {
                tracing::debug!(session_id = %session_id, host_id = %host_id, error = %error, "the host learns it when it registers");
            }
            Some(_) => {
                tracing::warn!(session_id = %session_id, host_id = %host_id, error = %error, "the host has to register again, since it could not take back what was given up");
                self.end(host_id);
            }
        }
    }

    /// Asks a host to open a byte stream and returns it. `request.stream_id` is filled in here.
    ///
    /// # Errors
    ///
    /// [`LinkError`]; can be asked again.
    pub async fn open_stream(
        &self,
        host_id: &HostId,
        mut request: OpenStream,
    ) -> Result<HostStream, LinkError> {
        let link = self.link(host_id).await?;
        let stream_id = format!("{:032x}", rand::random::<u128>());
        let (sender, receiver) = oneshot::channel();
        lock(&self.inner.waiting).insert(stream_id.clone(), sender);
        let _entry = RemoveOnDrop(|| drop(lock(&self.inner.waiting).remove(&stream_id)));
        request.stream_id.clone_from(&stream_id);
        // From here on: a host that is slow to open it learns that nobody waits any more.
        let close = CloseOnDrop { outbound: link.outbound.clone(), stream_id: stream_id.clone() };
        let message =
            ControlResponse { message: Some(Message::OpenStream(Box::new(request))), ..Default::default() };
        let exchange = async {
            link.outbound.send(message).await.map_err(|_| LinkError::Lost(host_id.clone()))?;
            receiver.await.map_err(|_| LinkError::Lost(host_id.clone()))
        };
        tokio::select! {
            biased;
            result = tokio::time::timeout(OPEN_STREAM_DEADLINE, exchange) => match result {
                Ok(result) => result.map(|(requests, responses)| HostStream { requests, responses, _close: close }),
                Err(_) => {
                    Err(LinkError::Timeout { host_id: host_id.clone(), after: OPEN_STREAM_DEADLINE })
                }
            },
            () = link.closed.cancelled() => Err(LinkError::Lost(host_id.clone())),
        }
    }

    fn claim(&self, stream_id: &str) -> Option<Waiter> {
        lock(&self.inner.waiting).remove(stream_id)
    }
}

fn command_kind(command: &CommandKind) -> &'static str {
    match command {
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
    }
}
