//! The link to a coordinator: dialled from here, kept for ever.
//!
//! ```text
//!  dial ─► Register ─► Registered ─► serve ──► broken ──► pause (grows, jittered) ─► dial
//!                                     │
//!            writer: answers, heartbeats, events        one task
//!            reader: commands and streams               one task, which only hands on
//! ```
//!
//! The reader takes a message, gives it a place in its session's line and a task of its own, and reads on: no
//! command can hold up another session's, and none can hold up a heartbeat. Answers go through one bounded queue
//! to the writer. Full means that the coordinator does not read: the commands wait with their answers, and the
//! writer gives the link up after [`SEND_TIMEOUT`].
//!
//! What runs when a link breaks runs on; its answer is lost and is had by asking again.

use std::collections::HashMap;
use std::convert::Infallible;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cloister_api::connection::{Connection, ConnectionError, Endpoint, MAX_CONCURRENT_STREAMS};
use cloister_api::convert::capabilities_to_proto;
use cloister_api::host::{
    Command, CommandResult, ControlRequest, ControlResponseView, Heartbeat, HostErrorKind,
    HostLinkServiceClient, OpenStream, Register, Registered, control_request, control_response,
};
use cloister_service::{CancellationToken, OnCancel, OnError, TaskKind, error_chain};
use cloister_types::{Capability, SessionId};
use connectrpc::client::{BidiRecvHalf, BidiSendHalf, CallOptions, ClientTransport, SharedHttp2Connection};
use connectrpc::{ConnectError, ErrorCode};
use futures::FutureExt as _;
use secrecy::{ExposeSecret as _, SecretString};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, timeout};

use crate::agent::Agent;
use crate::fault::POINTS;
use crate::refusal::Refusal;
use crate::stream::StreamTask;

/// First pause before a broken link is dialled again; doubles up to [`REDIAL_MAX`].
const REDIAL: Duration = Duration::from_millis(50);
/// Longest pause before a broken link is dialled again.
const REDIAL_MAX: Duration = Duration::from_secs(5);
/// How long a coordinator may take to answer a registration.
const REGISTER_TIMEOUT: Duration = Duration::from_secs(20);
/// How long a message may wait for the connection to take it.
const SEND_TIMEOUT: Duration = Duration::from_secs(30);
/// Commands in progress over one link; more are answered `EXHAUSTED`.
const COMMANDS_MAX: u32 = 1024;
/// Answers that wait for the writer.
const ANSWERS_QUEUED: usize = 256;
/// Byte streams over one link: what the connection's windows are made for, less the control stream and some that
/// only say no.
const STREAMS_MAX: u32 = MAX_CONCURRENT_STREAMS - 15;
/// How long a stop waits for commands that change something.
const COMMANDS_GRACE: Duration = Duration::from_secs(20);
/// How long a stop waits for the last answers to be taken.
const FLUSH_GRACE: Duration = Duration::from_secs(2);
/// A coordinator that gives no interval, and the bounds of what it may give.
const HEARTBEAT_DEFAULT: Duration = Duration::from_secs(5);
const HEARTBEAT_MIN: Duration = Duration::from_millis(50);
const HEARTBEAT_MAX: Duration = Duration::from_secs(60);

const COMMAND: TaskKind = TaskKind::new("command", OnCancel::Wait, OnError::Log);
const STREAM: TaskKind = TaskKind::new("stream", OnCancel::Wait, OnError::Log);

type Sending = BidiSendHalf<ControlRequest>;
type Receiving =
    BidiRecvHalf<<SharedHttp2Connection as ClientTransport>::ResponseBody, ControlResponseView<'static>>;

/// Why a link ended.
#[derive(Debug, thiserror::Error)]
enum LinkError {
    #[error(transparent)]
    Dial(#[from] ConnectionError),
    #[error("speak with the coordinator")]
    Call(#[source] ConnectError),
    #[error("the coordinator did not answer the registration within {} seconds", REGISTER_TIMEOUT.as_secs())]
    NotRegistered,
    #[error("the coordinator answered the registration with something else")]
    Unexpected,
    #[error("the coordinator took no message for {} seconds", SEND_TIMEOUT.as_secs())]
    Stalled,
    #[error("the coordinator closed the link")]
    Closed,
}

impl LinkError {
    /// Returns what a person can do about it, if that is known.
    fn hint(&self) -> &'static str {
        match self {
            Self::Call(error)
                if matches!(error.code, ErrorCode::Unauthenticated | ErrorCode::PermissionDenied) =>
            {
                "check `CLOISTER_COORDINATOR_TOKEN`: the coordinator does not accept it for a host"
            }
            Self::Dial(_) => {
                "check that the coordinator runs and that `CLOISTER_COORDINATOR_ENDPOINT` names it"
            }
            _ => "",
        }
    }
}

/// The owner of the link.
pub(crate) struct Link {
    agent: Arc<Agent>,
    endpoint: Endpoint,
    token: SecretString,
}

/// What tasks of one link share.
#[derive(Clone)]
struct Live {
    answers: mpsc::Sender<ControlRequest>,
    client: HostLinkServiceClient<SharedHttp2Connection>,
    closed: CancellationToken,
    commands: Arc<Semaphore>,
    streams: Arc<Semaphore>,
    open: OpenStreams,
}

/// What cancels each stream that is open over a link, by its id.
type OpenStreams = Arc<Mutex<HashMap<String, CancellationToken>>>;

/// How the reader ended.
enum ReadEnd {
    Closed,
    Stopping,
}

impl Link {
    pub(crate) fn new(agent: Arc<Agent>, endpoint: Endpoint, token: SecretString) -> Self {
        Self { agent, endpoint, token }
    }

    /// Keeps a link until the role stops.
    pub(crate) async fn run(&self) {
        let stopping = self.agent.tasks.token();
        let mut pause = REDIAL;
        let mut quiet = false;
        for number in 1u64.. {
            let mut registered = false;
            let outcome = self.serve(number, &mut registered).await;
            if stopping.is_cancelled() {
                return;
            }
            if registered {
                (pause, quiet) = (REDIAL, false);
            }
            if let Err(error) = outcome {
                let (text, hint) = (error_chain(&error), error.hint());
                // One line for a streak: an unreachable coordinator is one fact, however long it lasts.
                if quiet {
                    tracing::debug!(error = text, attempt = number, "still no link to the coordinator");
                } else {
                    tracing::warn!(endpoint = %self.endpoint, error = text, hint, "no link to the coordinator");
                }
                quiet = true;
            }
            let jittered = pause.mul_f64(rand::random_range(0.5..1.0));
            tokio::select! {
                () = stopping.cancelled() => return,
                () = tokio::time::sleep(jittered) => {}
            }
            pause = (pause * 2).min(REDIAL_MAX);
        }
    }

    async fn serve(&self, number: u64, registered: &mut bool) -> Result<(), LinkError> {
        let stopping = self.agent.tasks.token();
        let mut capabilities = self.agent.capabilities();
        let established = async {
            let connection = Connection::dial(&self.endpoint, Some(self.token.expose_secret())).await?;
            let client = connection.host_link();
            let options = CallOptions::default().with_compress(false);
            let control = client.control_with_options(options).await.map_err(LinkError::Call)?;
            let (mut sending, mut receiving) = control.into_split();
            let known = capabilities.borrow_and_update().clone();
            let register = self.agent.registration(&known).await;
            // A refusal is told by the other half.
            let _ = send(&mut sending, register).await;
            let first = timeout(REGISTER_TIMEOUT, receiving.message()).await;
            let first = first.map_err(|_| LinkError::NotRegistered)?.map_err(LinkError::Call)?;
            match first.ok_or(LinkError::Closed)?.to_owned_message().message {
                Some(control_response::Message::Registered(answer)) => {
                    Ok((client, sending, receiving, *answer))
                }
                Some(_) | None => Err(LinkError::Unexpected),
            }
        };
        let (client, sending, mut receiving, answer) = tokio::select! {
            established = established => established?,
            () = stopping.cancelled() => return Ok(()),
        };
        *registered = true;
        POINTS.reach("host_after_registration");
        let interval = heartbeat_interval(&answer);
        let interval_ms = u64::try_from(interval.as_millis()).unwrap_or(u64::MAX);
        tracing::info!(endpoint = %self.endpoint, interval_ms, "registered with the coordinator");
        self.agent.events.registered(number);
        self.remove_deleted(&answer);

        let (answers, queue) = mpsc::channel(ANSWERS_QUEUED);
        let closed = CancellationToken::new();
        let _closed_with_the_link = closed.clone().drop_guard();
        let live = Live {
            answers,
            client,
            closed,
            commands: Arc::new(Semaphore::new(COMMANDS_MAX as usize)),
            streams: Arc::new(Semaphore::new(STREAMS_MAX as usize)),
            open: OpenStreams::default(),
        };
        let mut writer = std::pin::pin!(self.write(sending, queue, interval, capabilities, number));
        tokio::select! {
            outcome = &mut writer => return outcome.and(Err(LinkError::Closed)),
            end = self.read(&mut receiving, live) => match end? {
                ReadEnd::Closed => return Err(LinkError::Closed),
                ReadEnd::Stopping => {}
            },
        }
        // The queue has no more senders: the writer ends when it is empty, and the coordinator then ends the call.
        let flushed = async {
            writer.await?;
            while receiving.message().await.map_err(LinkError::Call)?.is_some() {}
            Ok(())
        };
        timeout(FLUSH_GRACE, flushed).await.unwrap_or(Ok(()))
    }

    /// Writes answers, heartbeats and events until there are no more senders of answers.
    async fn write(
        &self,
        mut sending: Sending,
        mut queue: mpsc::Receiver<ControlRequest>,
        interval: Duration,
        mut capabilities: watch::Receiver<Vec<Capability>>,
        number: u64,
    ) -> Result<(), LinkError> {
        let mut beat = tokio::time::interval_at(Instant::now() + interval, interval);
        beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                answer = queue.recv() => match answer {
                    Some(answer) => send_request(&mut sending, answer).await?,
                    None => {
                        sending.close_send();
                        return Ok(());
                    }
                },
                _ = beat.tick() => send(&mut sending, Heartbeat::default()).await?,
                Ok(()) = capabilities.changed() => {
                    let heartbeat = Heartbeat {
                        capabilities: capabilities_to_proto(&capabilities.borrow_and_update()),
                        capabilities_changed: true,
                        ..Default::default()
                    };
                    send(&mut sending, heartbeat).await?;
                }
                () = self.agent.events.added() => {
                    for event in self.agent.events.take_unsent(number) {
                        send(&mut sending, event).await?;
                    }
                }
            }
        }
    }

    /// Hands on what the coordinator sends, until it ends the link or the role stops. In the second case the
    /// commands that change something have ended when this returns.
    async fn read(&self, receiving: &mut Receiving, live: Live) -> Result<ReadEnd, LinkError> {
        let stopping = self.agent.tasks.token();
        loop {
            let message = tokio::select! {
                message = receiving.message() => message.map_err(LinkError::Call)?,
                () = stopping.cancelled() => break,
            };
            let Some(message) = message else { return Ok(ReadEnd::Closed) };
            match message.to_owned_message().message {
                Some(control_response::Message::Command(command)) => {
                    self.accept_command(*command, &live).await
                }
                Some(control_response::Message::OpenStream(open)) => self.accept_stream(*open, &live),
                Some(control_response::Message::CloseStream(close)) => {
                    if let Some(consumer_gone) = lock(&live.open).get(&close.stream_id) {
                        consumer_gone.cancel();
                    }
                }
                Some(control_response::Message::Registered(_)) => {}
                None => tracing::debug!("a message of a newer coordinator is ignored"),
            }
        }
        let all = live.commands.acquire_many(COMMANDS_MAX);
        if timeout(COMMANDS_GRACE, all).await.is_err() {
            tracing::warn!("commands are still in progress; their answers are lost");
        }
        Ok(ReadEnd::Stopping)
    }

    async fn accept_command(&self, command: Command, live: &Live) {
        let id = command.id;
        let refuse = |refusal: Refusal| {
            let result =
                CommandResult { id, result: Some(refusal.into_proto().into()), ..Default::default() };
            request(result)
        };
        let session_id: SessionId = match command.session_id.parse() {
            Ok(session_id) => session_id,
            Err(error) => {
                let _ = live.answers.send(refuse(Refusal::invalid(error))).await;
                return;
            }
        };
        let Ok(permit) = Arc::clone(&live.commands).try_acquire_owned() else {
            let message = format!("this host already works on {COMMANDS_MAX} commands");
            let _ = live.answers.send(refuse(Refusal::new(HostErrorKind::Exhausted, message))).await;
            return;
        };
        let turn = self.agent.turns.queue(&session_id);
        let (agent, answers) = (Arc::clone(&self.agent), live.answers.clone());
        self.agent.tasks.spawn(COMMAND, async move {
            let result = AssertUnwindSafe(agent.execute(command, turn)).catch_unwind().await;
            let result = result.unwrap_or_else(|_| CommandResult {
                id,
                result: Some(
                    Refusal::new(HostErrorKind::Internal, "the command panicked").into_proto().into(),
                ),
                ..Default::default()
            });
            POINTS.reach("host_before_answer");
            // Without a link nobody waits for it.
            let _ = answers.send(request(result)).await;
            drop(answers);
            drop(permit);
            Ok::<(), Infallible>(())
        });
    }

    fn accept_stream(&self, open: OpenStream, live: &Live) {
        let permit = Arc::clone(&live.streams).try_acquire_owned().ok();
        let turn = match (&permit, open.session_id.parse::<SessionId>()) {
            (Some(_), Ok(session_id)) => Ok(self.agent.turns.queue(&session_id)),
            (_, Err(error)) => Err(Refusal::invalid(error)),
            (None, _) => Err(Refusal::new(
                HostErrorKind::Exhausted,
                format!("this host already serves {STREAMS_MAX} streams over this link"),
            )),
        };
        let closed = live.closed.child_token();
        let (stream_id, streams) = (open.stream_id.clone(), Arc::clone(&live.open));
        lock(&streams).insert(stream_id.clone(), closed.clone());
        let task =
            StreamTask { agent: Arc::clone(&self.agent), client: live.client.clone(), open, turn, closed };
        self.agent.tasks.spawn(STREAM, async move {
            task.run().await;
            lock(&streams).remove(&stream_id);
            drop(permit);
            Ok::<(), Infallible>(())
        });
    }

    /// Removes what the coordinator knows to be deleted. Its list comes again with the next registration, so that
    /// a failure is only logged.
    fn remove_deleted(&self, answer: &Registered) {
        for text in &answer.remove_session_ids {
            let Ok(session_id) = text.parse::<SessionId>() else {
                tracing::warn!(session_id = text, "the coordinator named a deleted session that is no id");
                continue;
            };
            let turn = self.agent.turns.queue(&session_id);
            let agent = Arc::clone(&self.agent);
            self.agent.tasks.spawn(COMMAND, async move {
                let _turn = turn.taken().await;
                if let Err(refusal) = agent.remove(&session_id).await {
                    tracing::warn!(session_id = %session_id, error = refusal.message, "deleted session stays");
                }
                Ok::<(), Infallible>(())
            });
        }
    }
}

/// Registers, and ends the link when the coordinator has answered.
///
/// # Errors
///
/// Why it could not be told, as text for the log.
pub(crate) async fn register_once(
    endpoint: &Endpoint,
    token: &SecretString,
    register: Register,
) -> Result<(), String> {
    let told = async {
        let connection = Connection::dial(endpoint, Some(token.expose_secret())).await?;
        let options = CallOptions::default().with_compress(false);
        let client = connection.host_link();
        let control = client.control_with_options(options).await.map_err(LinkError::Call)?;
        let (mut sending, mut receiving) = control.into_split();
        // A refusal is told by the other half.
        let _ = send(&mut sending, register).await;
        let first = receiving.message().await.map_err(LinkError::Call)?.ok_or(LinkError::Closed)?;
        match first.to_owned_message().message {
            Some(control_response::Message::Registered(_)) => Ok(()),
            Some(_) | None => Err(LinkError::Unexpected),
        }
    };
    told.await.map_err(|error: LinkError| error_chain(&error))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn heartbeat_interval(answer: &Registered) -> Duration {
    match answer.heartbeat_interval_ms {
        0 => HEARTBEAT_DEFAULT,
        given => Duration::from_millis(given).clamp(HEARTBEAT_MIN, HEARTBEAT_MAX),
    }
}

fn request(message: impl Into<control_request::Message>) -> ControlRequest {
    ControlRequest { message: Some(message.into()), ..Default::default() }
}

async fn send(sending: &mut Sending, message: impl Into<control_request::Message>) -> Result<(), LinkError> {
    send_request(sending, request(message)).await
}

async fn send_request(sending: &mut Sending, request: ControlRequest) -> Result<(), LinkError> {
    match timeout(SEND_TIMEOUT, sending.send(request)).await {
        Ok(sent) => sent.map_err(LinkError::Call),
        Err(_) => Err(LinkError::Stalled),
    }
}
