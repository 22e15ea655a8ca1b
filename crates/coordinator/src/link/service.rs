//! The side of the link that hosts dial.
//!
//! A control stream lives as long as its reader task. Registration comes first and in this order, so that nothing
//! is asked of a host before it knows what to forget, and no operation finds its host missing: enter the host in the
//! store, compare its report, queue `Registered`, make the link visible, hasten the host's operations.

use std::sync::Arc;
use std::time::Duration;

use cloister_api::connection::HOST_WIRE_VERSION;
use cloister_api::convert::capabilities_from_proto;
use cloister_api::host::control_request::Message as Inbound;
use cloister_api::host::stream_request::Message as StreamInbound;
use cloister_api::host::{
    ControlRequest, ControlResponse, HostLinkService, Register, Registered, SandboxEvent, StopSandbox,
    StreamRequest, StreamResponse,
};
use cloister_service::{CancellationToken, OnCancel, OnError, TaskKind, TaskRegistry};
use cloister_types::name::validate_name;
use cloister_types::session::{Reason, SessionEvent, SessionState};
use cloister_types::{ByteCount, CpuMillis, HostId};
use connectrpc::{ConnectError, InboundStream, RequestContext, Response, ServiceResult, ServiceStream};
use futures::{Stream, StreamExt as _};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::{HostLinks, Link, OUTBOUND_MESSAGES};
use crate::db::{
    Change, ChangeFeed, HostCapacity, HostRegistration, ReportCause, SandboxReport, StaleSandbox, Store,
    StoreError, TransitionParams,
};
use crate::error::{self, AppError};

/// How long a host may take for the first message of a stream.
const FIRST_MESSAGE_DEADLINE: Duration = Duration::from_secs(10);
/// Messages to a host that may wait on a byte stream; standard input beyond them waits at its sender.
const STREAM_MESSAGES: usize = 2;
/// Most capabilities and sandboxes that a host may report.
const REPORT_MAX: usize = 16_384;
/// How long a sandbox's end waits for the step under way to commit.
const EVENT_PATIENCE: Duration = Duration::from_secs(60);
const STOP_GRACE: Duration = Duration::from_secs(2);
const STOP_DEADLINE: Duration = Duration::from_secs(30);

const READER: TaskKind = TaskKind::new("host link", OnCancel::Wait, OnError::Log);
const EVENT: TaskKind = TaskKind::new("sandbox event", OnCancel::Abort, OnError::Log);
const STOP_STALE: TaskKind = TaskKind::new("stop stale sandbox", OnCancel::Abort, OnError::Log);

/// Serves `HostLinkService`.
pub(crate) struct LinkService {
    pub(crate) store: Store,
    pub(crate) feed: ChangeFeed,
    pub(crate) links: HostLinks,
    pub(crate) tasks: TaskRegistry,
    pub(crate) heartbeat: Duration,
}

#[allow(refining_impl_trait, reason = "the generated trait hides the response type; naming it is clearer")]
impl HostLinkService for LinkService {
    async fn control(
        &self,
        _ctx: RequestContext,
        mut requests: InboundStream<ControlRequest>,
    ) -> ServiceResult<ServiceStream<ControlResponse>> {
        let first = first_message(&mut requests).await?.to_owned_message();
        let Some(Inbound::Register(register)) = first.message else {
            return Err(AppError::new(
                &error::PROTOCOL,
                "the first message of the control stream is `register`",
            )
            .into());
        };
        if register.stopping {
            let answer = self.register_stopping(&register).await.map_err(ConnectError::from)?;
            return Ok(Response::new(Box::pin(futures::stream::once(async { Ok(answer) }))));
        }
        let (link, receiver) = self.register(&register).await.map_err(ConnectError::from)?;
        let closed = link.closed.clone();
        self.tasks.spawn(
            READER,
            read(
                self.store.clone(),
                self.links.clone(),
                self.tasks.clone(),
                self.feed.clone(),
                Reader { link, requests, silence: self.heartbeat * 3 },
            ),
        );
        let ended = futures::stream::once(async {
            Err(AppError::new(&error::STOPPING, "this link was replaced or closed by the coordinator").into())
        });
        let stream = ReceiverStream::new(receiver).map(Ok).take_until(closed.cancelled_owned()).chain(ended);
        Ok(Response::new(Box::pin(stream)))
    }

    async fn stream(
        &self,
        _ctx: RequestContext,
        mut requests: InboundStream<StreamRequest>,
    ) -> ServiceResult<ServiceStream<StreamResponse>> {
        let first = first_message(&mut requests).await?.to_owned_message();
        let Some(StreamInbound::Opened(opened)) = first.message else {
            return Err(
                AppError::new(&error::PROTOCOL, "the first message of a byte stream is `opened`").into()
            );
        };
        let waiter = self.links.claim(&opened.stream_id).ok_or_else(|| {
            AppError::new(&error::STREAM_CUT, "nobody waits for a stream with this id any more")
                .with_remedy("drop the stream")
        })?;
        let (responses, receiver) = mpsc::channel(STREAM_MESSAGES);
        if waiter.send((requests, responses)).is_err() {
            return Err(AppError::new(&error::STREAM_CUT, "the consumer of the stream has gone").into());
        }
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver).map(Ok))))
    }
}

/// Returns the first message of a stream, which must come soon.
pub(crate) async fn first_message<M>(
    messages: &mut (impl Stream<Item = Result<M, ConnectError>> + Unpin),
) -> Result<M, ConnectError> {
    match tokio::time::timeout(FIRST_MESSAGE_DEADLINE, messages.next()).await {
        Ok(Some(message)) => message,
        Ok(None) => Err(AppError::new(&error::PROTOCOL, "the stream ended before its first message").into()),
        Err(_) => Err(AppError::new(&error::PROTOCOL, "the first message did not come in time").into()),
    }
}

impl LinkService {
    async fn register(
        &self,
        register: &Register,
    ) -> Result<(Arc<Link>, mpsc::Receiver<ControlResponse>), AppError> {
        let registration = registration(register)?;
        let sandboxes = sandbox_reports(register)?;
        let host_id = registration.id.clone();
        let registered = self.store.register_host(&registration).await?;
        let cause = if registered.rebooted { ReportCause::Rebooted } else { ReportCause::Connected };
        let outcome = self.store.reconcile_report(&host_id, registered.link_epoch, cause, &sandboxes).await?;
        let (outbound, receiver) = mpsc::channel(OUTBOUND_MESSAGES);
        let answer = Registered {
            heartbeat_interval_ms: u64::try_from(self.heartbeat.as_millis()).unwrap_or(u64::MAX),
            remove_session_ids: outcome.remove.iter().map(ToString::to_string).collect(),
            ..Default::default()
        };
        outbound
            .try_send(ControlResponse { message: Some(answer.into()), ..Default::default() })
            .expect("the channel is new and its receiver is held here");
        let link = Arc::new(Link {
            host_id: host_id.clone(),
            link_epoch: registered.link_epoch,
            outbound,
            pending: std::sync::Mutex::default(),
            next_command: std::sync::atomic::AtomicU64::new(1),
            closed: CancellationToken::new(),
        });
        self.links.install(Arc::clone(&link));
        tracing::info!(
            host_id = %host_id,
            name = registration.name,
            sandboxes = sandboxes.len(),
            removed = outcome.remove.len(),
            gone = outcome.gone.len(),
            found = outcome.found.len(),
            "host connected"
        );
        // Work that waited for this host need not wait for its timer. The link stands either way.
        if let Err(error) = self.store.hasten_ops_of_host(&host_id).await {
            tracing::warn!(host_id = %host_id, error = %cloister_service::error_chain(&error), "operations wait for their timer");
        }
        for stale in outcome.stop {
            self.tasks.spawn(STOP_STALE, stop_stale(self.links.clone(), host_id.clone(), stale));
        }
        Ok((link, receiver))
    }
}

impl LinkService {
    /// Takes the last report of a host that is shut down; its sessions are paused when this returns.
    async fn register_stopping(&self, register: &Register) -> Result<ControlResponse, AppError> {
        let host_id = registration(register)?.id;
        let sandboxes = sandbox_reports(register)?;
        let link_epoch = self.store.begin_host_stop(&host_id).await?;
        self.links.end(&host_id);
        let outcome =
            self.store.reconcile_report(&host_id, link_epoch, ReportCause::Stopped, &sandboxes).await?;
        self.store.end_host_stop(&host_id, link_epoch).await?;
        tracing::info!(host_id = %host_id, gone = outcome.gone.len(), "host shut down");
        Ok(ControlResponse { message: Some(Registered::default().into()), ..Default::default() })
    }
}

fn registration(register: &Register) -> Result<HostRegistration, AppError> {
    let oldest = HOST_WIRE_VERSION.saturating_sub(1).max(1);
    if !(oldest..=HOST_WIRE_VERSION).contains(&register.wire_version) {
        return Err(AppError::new(
            &error::WIRE_VERSION,
            format!(
                "host agent speaks version {} of the link: this coordinator serves {oldest} to {HOST_WIRE_VERSION}",
                register.wire_version
            ),
        ));
    }
    let id: HostId = register.host_id.parse().map_err(|error| AppError::field("host_id", error))?;
    validate_name(&register.name).map_err(|error| AppError::field("name", error))?;
    if register.capabilities.len() > REPORT_MAX || register.sandboxes.len() > REPORT_MAX {
        return Err(AppError::field("sandboxes", format!("more than {REPORT_MAX} entries")));
    }
    if register.boot_id.is_empty() || register.boot_id.len() > 128 || register.version.len() > 128 {
        return Err(AppError::field("boot_id", "1 to 128 characters are accepted"));
    }
    Ok(HostRegistration {
        id,
        name: register.name.clone(),
        version: register.version.clone(),
        wire_version: register.wire_version,
        boot_id: register.boot_id.clone(),
        capabilities: capabilities_from_proto(&register.capabilities),
        capacity: HostCapacity {
            memory: ByteCount(register.memory_bytes),
            cpus: CpuMillis(register.cpu_millis),
            disk: ByteCount(register.disk_bytes),
        },
    })
}

fn sandbox_reports(register: &Register) -> Result<Vec<SandboxReport>, AppError> {
    register
        .sandboxes
        .iter()
        .map(|report| {
            Ok(SandboxReport {
                session_id: report
                    .session_id
                    .parse()
                    .map_err(|error| AppError::field("sandboxes.session_id", error))?,
                sandbox_id: match report.sandbox_id.as_str() {
                    // Only the layer of a stopped sandbox is there.
                    "" if !report.running => None,
                    id => Some(id.parse().map_err(|error| AppError::field("sandboxes.sandbox_id", error))?),
                },
                epoch: report.epoch,
                running: report.running,
                ended: ended(report),
            })
        })
        .collect()
}

/// Returns how a reported sandbox ended; `None` when the host does not say, or not in a word of ours.
fn ended(report: &cloister_api::host::SandboxReport) -> Option<(Reason, String)> {
    let reason = report.ended_reason.parse().ok()?;
    let message = report.ended_message.chars().take(1024).collect();
    match reason {
        Reason::Requested
        | Reason::OutOfMemory
        | Reason::SandboxGone
        | Reason::HostRestarted
        | Reason::HostRebooted
        | Reason::DiskError => Some((reason, message)),
        Reason::NoCapacity
        | Reason::NoHost
        | Reason::StartFailed
        | Reason::DeadlineExceeded
        | Reason::HostUnreachable
        | Reason::Expired
        | Reason::HostStopped
        | Reason::LayerMissing => None,
    }
}

struct Reader {
    link: Arc<Link>,
    requests: InboundStream<ControlRequest>,
    silence: Duration,
}

/// Takes the link down however its reader ends.
struct Uninstall {
    links: HostLinks,
    link: Arc<Link>,
}

impl Drop for Uninstall {
    fn drop(&mut self) {
        self.links.uninstall(&self.link);
        tracing::info!(host_id = %self.link.host_id, "host disconnected");
    }
}

async fn read(
    store: Store,
    links: HostLinks,
    tasks: TaskRegistry,
    feed: ChangeFeed,
    mut reader: Reader,
) -> Result<(), std::convert::Infallible> {
    let link = Arc::clone(&reader.link);
    let stopping = tasks.token();
    let uninstall = Uninstall { links: links.clone(), link: Arc::clone(&link) };
    loop {
        let message = tokio::select! {
            biased;
            () = link.closed.cancelled() => break,
            () = stopping.cancelled() => break,
            () = link.outbound.closed() => break,
            message = tokio::time::timeout(reader.silence, reader.requests.next()) => message,
        };
        let message = match message {
            Ok(Some(Ok(message))) => message.to_owned_message(),
            Ok(Some(Err(error))) => {
                tracing::debug!(host_id = %link.host_id, error = %error, "control stream failed");
                break;
            }
            Ok(None) => break,
            Err(_) => {
                tracing::warn!(host_id = %link.host_id, silence_ms = u64::try_from(reader.silence.as_millis()).unwrap_or(u64::MAX), "host missed its heartbeats");
                break;
            }
        };
        match message.message {
            Some(Inbound::Result(result)) => link.complete(*result),
            Some(Inbound::Heartbeat(heartbeat)) => {
                let capabilities =
                    heartbeat.capabilities_changed.then(|| capabilities_from_proto(&heartbeat.capabilities));
                match store.heartbeat_host(&link.host_id, link.link_epoch, capabilities.as_deref()).await {
                    Ok(()) => {}
                    // Declared lost, or registered elsewhere: it must register anew.
                    Err(StoreError::Conflict { .. }) => break,
                    Err(error) => {
                        tracing::warn!(host_id = %link.host_id, error = %cloister_service::error_chain(&error), "heartbeat was not stored");
                    }
                }
            }
            Some(Inbound::Event(event)) => {
                tasks.spawn(EVENT, sandbox_event(store.clone(), feed.clone(), link.host_id.clone(), *event));
            }
            Some(Inbound::Register(_)) | None => {
                tracing::warn!(host_id = %link.host_id, "a message that does not belong on a control stream");
                break;
            }
        }
    }
    drop(uninstall);
    // For what other coordinators show; this one knows by itself.
    if let Err(error) = store.release_host_link(&link.host_id, link.link_epoch).await {
        tracing::debug!(host_id = %link.host_id, error = %error, "the link's end was not stored");
    }
    Ok(())
}

/// Commits the end of a sandbox. When the step that made it has not been committed yet, the event waits for it: it
/// must not be dropped, or the session would stay active without a sandbox.
async fn sandbox_event(
    store: Store,
    feed: ChangeFeed,
    host_id: HostId,
    event: SandboxEvent,
) -> Result<(), AppError> {
    let session_id = event.session_id.parse().map_err(|error| AppError::field("event.session_id", error))?;
    let sandbox_id = event.sandbox_id.parse().map_err(|error| AppError::field("event.sandbox_id", error))?;
    if event.kind != "sandbox_gone" {
        tracing::warn!(host_id = %host_id, kind = event.kind, "an event of a later version was dropped");
        return Ok(());
    }
    let reason = match event.reason.as_str() {
        "out_of_memory" => Reason::OutOfMemory,
        "reboot" | "host_rebooted" => Reason::HostRebooted,
        "host_restarted" => Reason::HostRestarted,
        _ => Reason::SandboxGone,
    };
    let params = TransitionParams {
        sandbox_id: Some(sandbox_id),
        seen_epoch: Some(event.epoch),
        reason: Some(reason),
        message: event.message.chars().take(1024).collect(),
        ..TransitionParams::new(session_id, SessionEvent::SandboxGone)
    };
    let mut changes = feed.subscribe();
    let commit = async {
        loop {
            match store.commit_transition(&params).await {
                Ok(session) => {
                    tracing::info!(session_id = %session.id, sandbox_id = event.sandbox_id, reason = %reason, "sandbox gone");
                    return Ok(());
                }
                Err(StoreError::Illegal(illegal))
                    if matches!(illegal.state, SessionState::Starting | SessionState::Resuming) => {}
                // It is about an earlier sandbox, or the session moved on: nothing to tell.
                Err(StoreError::Illegal(_) | StoreError::Conflict { .. } | StoreError::NotFound { .. }) => {
                    return Ok(());
                }
                Err(error) if error.is_retryable() => tokio::time::sleep(Duration::from_millis(200)).await,
                Err(error) => return Err(AppError::from(error)),
            }
            loop {
                match tokio::time::timeout(Duration::from_secs(1), changes.recv()).await {
                    Ok(Some(Change::Session(id))) if id != params.session_id => {}
                    Ok(Some(Change::Host(_))) => {}
                    Ok(Some(Change::Session(_) | Change::Rescan)) | Err(_) => break,
                    Ok(None) => return Ok(()),
                }
            }
        }
    };
    tokio::time::timeout(EVENT_PATIENCE, commit).await.unwrap_or(Ok(()))
}

async fn stop_stale(links: HostLinks, host_id: HostId, stale: StaleSandbox) -> Result<(), AppError> {
    let stop = StopSandbox {
        sandbox_id: stale.sandbox_id.to_string(),
        grace_ms: u64::try_from(STOP_GRACE.as_millis()).unwrap_or(u64::MAX),
        ..Default::default()
    };
    match links.command(&host_id, &stale.session_id, stale.epoch, stop, STOP_DEADLINE).await {
        Ok(_) => Ok(()),
        // The host reports again when it connects again, and a newer epoch means that somebody else decides.
        Err(error) => {
            tracing::debug!(host_id = %host_id, session_id = %stale.session_id, error = %error, "stale sandbox was not stopped");
            Ok(())
        }
    }
}
