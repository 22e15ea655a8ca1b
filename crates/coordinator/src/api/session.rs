//! `SessionsService`.

use buffa::Message as _;
use cloister_api::app::{
    CreateSessionRequest, CreateSessionResponse, DeleteSessionRequest, DeleteSessionResponse,
    GetSessionRequest, GetSessionResponse, ListSessionsRequest, ListSessionsResponse, PauseSessionRequest,
    PauseSessionResponse, ResumeSessionRequest, ResumeSessionResponse, Session, SessionEvent,
    SessionsService,
};
use cloister_api::convert::{
    facts_to_proto, isolation_from_proto, isolation_to_proto, limits_from_proto, limits_to_proto,
    session_state_from_proto, session_state_to_proto, timestamp_to_proto,
};
use cloister_types::session::Reason;
use cloister_types::{BackendKind, Isolation, Limits};
use connectrpc::{RequestContext, Response, ServiceRequest, ServiceResult};
use serde_json::json;

use super::{Api, SESSION_WAIT_MAX, field};
use crate::app::Resource;
use crate::db::{CreateSession, PayloadHash, SessionEventRecord, SessionFilter, SessionRecord};
use crate::error::AppError;

/// The only image of this version.
const IMAGE: &str = "host";
/// Most bytes of the sessions on one page: what a client takes of an answer is more, what it shows in JSON is larger.
const PAGE_MAX_BYTES: usize = 1024 * 1024;
/// Most states of a filter: each once.
const STATES_MAX: usize = 16;

#[allow(refining_impl_trait, reason = "the generated trait hides the response type; naming it is clearer")]
impl SessionsService for Api {
    async fn create_session(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, CreateSessionRequest>,
    ) -> ServiceResult<CreateSessionResponse> {
        let request = request.to_owned_message();
        let authorized = self.authorize(&ctx, &request.request_id, Resource::OwnOrganization)?;
        field::request_id(&request.request_id)?;
        let params = create_params(&request)?;
        let payload = create_payload(&params);
        let wait = field::wait(request.wait_ms, SESSION_WAIT_MAX);
        let session = self.app.create_session(&authorized, &payload, &params, wait).await?;
        Response::ok(CreateSessionResponse {
            session: session_to_proto(&session).into(),
            ..Default::default()
        })
    }

    async fn get_session(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, GetSessionRequest>,
    ) -> ServiceResult<GetSessionResponse> {
        let request = request.to_owned_message();
        let authorized = self.authorize(&ctx, "", Resource::OwnOrganization)?;
        let reference = field::reference("session", &request.session)?;
        let session = self.app.get_session(&authorized, reference).await?;
        Response::ok(GetSessionResponse { session: session_to_proto(&session).into(), ..Default::default() })
    }

    async fn list_sessions(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, ListSessionsRequest>,
    ) -> ServiceResult<ListSessionsResponse> {
        let request = request.to_owned_message();
        let authorized = self.authorize(&ctx, "", Resource::OwnOrganization)?;
        if request.states.len() > STATES_MAX {
            return Err(AppError::field("states", format!("more than {STATES_MAX} states")).into());
        }
        let states = request
            .states
            .iter()
            .map(|state| session_state_from_proto("states", *state))
            .collect::<Result<_, _>>()
            .map_err(AppError::from)?;
        let filter = SessionFilter { labels: field::labels(&request.labels)?, states };
        let size = field::page_size(request.page_size)?;
        let token = field::page_token(&request.page_token)?;
        let page = self.app.list_sessions(&authorized, &filter, size, token).await?;
        let mut answer = ListSessionsResponse {
            next_page_token: page.next_page_token.unwrap_or_default(),
            ..Default::default()
        };
        let mut room = PAGE_MAX_BYTES;
        for session in page.sessions.iter().map(session_to_proto) {
            let bytes = usize::try_from(session.encoded_len()).unwrap_or(usize::MAX);
            // At least one, whatever its labels.
            if bytes > room && !answer.sessions.is_empty() {
                let last = answer.sessions.last().map(|session| session.id.clone());
                answer.next_page_token = last.unwrap_or_default();
                break;
            }
            room = room.saturating_sub(bytes);
            answer.sessions.push(session);
        }
        Response::ok(answer)
    }

    async fn delete_session(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, DeleteSessionRequest>,
    ) -> ServiceResult<DeleteSessionResponse> {
        let request = request.to_owned_message();
        let authorized = self.authorize(&ctx, &request.request_id, Resource::OwnOrganization)?;
        field::request_id(&request.request_id)?;
        let reference = field::reference("session", &request.session)?;
        let payload = PayloadHash::of("session.delete", reference.as_bytes());
        let wait = field::wait(request.wait_ms, SESSION_WAIT_MAX);
        let session = self.app.delete_session(&authorized, &payload, reference, wait).await?;
        Response::ok(DeleteSessionResponse {
            session: session_to_proto(&session).into(),
            ..Default::default()
        })
    }

    async fn pause_session(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, PauseSessionRequest>,
    ) -> ServiceResult<PauseSessionResponse> {
        let request = request.to_owned_message();
        let authorized = self.authorize(&ctx, &request.request_id, Resource::OwnOrganization)?;
        field::request_id(&request.request_id)?;
        let reference = field::reference("session", &request.session)?;
        let payload = PayloadHash::of("session.pause", reference.as_bytes());
        let wait = field::wait(request.wait_ms, SESSION_WAIT_MAX);
        let session = self.app.pause_session(&authorized, &payload, reference, wait).await?;
        Response::ok(PauseSessionResponse {
            session: session_to_proto(&session).into(),
            ..Default::default()
        })
    }

    async fn resume_session(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, ResumeSessionRequest>,
    ) -> ServiceResult<ResumeSessionResponse> {
        let request = request.to_owned_message();
        let authorized = self.authorize(&ctx, &request.request_id, Resource::OwnOrganization)?;
        field::request_id(&request.request_id)?;
        let reference = field::reference("session", &request.session)?;
        let payload = PayloadHash::of("session.resume", reference.as_bytes());
        let wait = field::wait(request.wait_ms, SESSION_WAIT_MAX);
        let session = self.app.resume_session(&authorized, &payload, reference, wait).await?;
        Response::ok(ResumeSessionResponse {
            session: session_to_proto(&session).into(),
            ..Default::default()
        })
    }
}

fn create_params(request: &CreateSessionRequest) -> Result<CreateSession, AppError> {
    let image = match request.image.as_str() {
        "" | IMAGE => IMAGE.to_owned(),
        other => {
            let shown: String = other.chars().filter(|c| !c.is_control()).take(64).collect();
            return Err(AppError::field(
                "image",
                format!("`{shown}` is no image: this version has `{IMAGE}` only"),
            ));
        }
    };
    let backend = match request.backend.as_str() {
        "" | "auto" => None,
        word => Some(word.parse::<BackendKind>().map_err(|error| {
            AppError::field("backend", error)
                .with_remedy("use `auto`, or the name of a backend that a host offers")
        })?),
    };
    let limits = limits_from_proto(&request.limits, &Limits::DEFAULT)
        .validate()
        .map_err(|error| AppError::field(limit_field(error.field), error))?;
    Ok(CreateSession {
        name: field::optional_name(&request.name)?,
        labels: field::labels(&request.labels)?,
        image,
        limits,
        backend,
        isolation_floor: isolation_from_proto("isolation_floor", request.isolation_floor)?
            .unwrap_or_else(|| Isolation::default_floor(backend)),
        ttl: field::ttl(request.ttl_ms)?,
    })
}

/// The field of the message for a field of the value.
fn limit_field(field: &str) -> &'static str {
    match field {
        "memory" => "limits.memory_bytes",
        "cpus" => "limits.cpu_millis",
        "pids" => "limits.pids",
        _ => "limits.disk_bytes",
    }
}

/// The same request gives the same bytes on every coordinator: maps are sorted, defaults are filled in, and what
/// only says how long to wait is left out.
fn create_payload(params: &CreateSession) -> PayloadHash {
    let payload = json!([
        params.name,
        params.labels.iter().collect::<Vec<_>>(),
        params.image,
        [
            params.limits.memory.0,
            u64::from(params.limits.cpus.0),
            u64::from(params.limits.pids),
            params.limits.disk.0
        ],
        params.backend.map(BackendKind::as_str),
        params.isolation_floor.as_str(),
        params.ttl.map(|ttl| u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX)),
    ]);
    PayloadHash::of("session.create", payload.to_string().as_bytes())
}

fn reason_word(reason: Option<Reason>) -> String {
    reason.map(|reason| reason.as_str().to_owned()).unwrap_or_default()
}

/// Returns a session as a message.
pub(super) fn session_to_proto(session: &SessionRecord) -> Session {
    let text = |id: Option<String>| id.unwrap_or_default();
    Session {
        id: session.id.to_string(),
        name: text(session.name.clone()),
        labels: session.labels.iter().map(|(key, value)| (key.clone(), value.clone())).collect(),
        state: session_state_to_proto(session.state).into(),
        reason: reason_word(session.reason),
        message: session.message.clone(),
        image: session.image.clone(),
        limits: limits_to_proto(&session.limits).into(),
        isolation: session.isolation.map(isolation_to_proto).unwrap_or_default().into(),
        isolation_floor: isolation_to_proto(session.isolation_floor).into(),
        backend: text(session.backend.map(|backend| backend.as_str().to_owned())),
        host_id: text(session.host_id.as_ref().map(ToString::to_string)),
        sandbox_id: text(session.sandbox_id.as_ref().map(ToString::to_string)),
        facts: facts_to_proto(&session.facts),
        network: session.network,
        generation: session.generation,
        created_at: timestamp_to_proto(session.created_at).into(),
        updated_at: timestamp_to_proto(session.updated_at).into(),
        expires_at: session.expires_at.map(timestamp_to_proto).into(),
        ..Default::default()
    }
}

/// Returns an event as a message.
pub(super) fn event_to_proto(event: &SessionEventRecord) -> SessionEvent {
    SessionEvent {
        cursor: event.cursor,
        session_id: event.session_id.to_string(),
        kind: event.kind.clone(),
        state: session_state_to_proto(event.state).into(),
        reason: reason_word(event.reason),
        message: event.message.clone(),
        at: timestamp_to_proto(event.at).into(),
        ..Default::default()
    }
}
