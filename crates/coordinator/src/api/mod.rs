//! The app API: messages in, messages out.
//!
//! ```text
//!  auth (tower)  ──► observe (interceptor) ──► handler ──► App
//!  who calls         unknown JSON fields,      checks the     decides and acts
//!                    metrics, span             form of fields
//! ```
//!
//! A handler turns a message into checked values, asks for authorization of the RPC's action, and calls one verb. It
//! holds no rule about objects. Every text of a caller is bounded and free of control characters before it goes on.

mod audit;
pub(crate) mod auth;
mod exec;
mod field;
mod health;
mod host;
mod observe;
mod session;
mod stream;
mod token;

use std::sync::Arc;
use std::time::Duration;

use cloister_api::app::{
    AUDIT_SERVICE_SERVICE_NAME, EXECS_SERVICE_SERVICE_NAME, HOSTS_SERVICE_SERVICE_NAME,
    SESSIONS_SERVICE_SERVICE_NAME, STREAMS_SERVICE_SERVICE_NAME, TOKENS_SERVICE_SERVICE_NAME,
};
use cloister_api::connection::MAX_MESSAGE_BYTES;
use connectrpc::{
    CompressionPolicy, CompressionRegistry, ConnectRpcService, DeadlinePolicy, Limits, RequestContext, Router,
};
use connectrpc_health::{HealthExt as _, HealthService, apply_request_limits, request_limits};
use connectrpc_reflection::Reflector;

use self::health::Health;
use crate::app::authorize::{Origin, authorize};
use crate::app::{Action, App, Authorized, Principal, Resource};
use crate::db::Store;
use crate::error::{self, AppError};
use crate::link::LinkService;

/// Longest that a caller can make a call last; waits are capped below it.
const CALL_DEADLINE: Duration = Duration::from_secs(90);
/// Longest wait of a session call.
pub(crate) const SESSION_WAIT_MAX: Duration = Duration::from_secs(60);
/// Longest wait for an exec's end.
pub(crate) const EXEC_WAIT_MAX: Duration = Duration::from_secs(30);

/// The services of the app API that health and reflection name.
pub(crate) const SERVICES: [&str; 6] = [
    SESSIONS_SERVICE_SERVICE_NAME,
    EXECS_SERVICE_SERVICE_NAME,
    STREAMS_SERVICE_SERVICE_NAME,
    HOSTS_SERVICE_SERVICE_NAME,
    TOKENS_SERVICE_SERVICE_NAME,
    AUDIT_SERVICE_SERVICE_NAME,
];

/// The handlers.
pub(crate) struct Api {
    app: Arc<App>,
}

/// Where a call comes from; set by the server for each connection.
#[derive(Debug, Clone)]
pub(crate) struct Peer(pub(crate) Arc<str>);

impl Api {
    /// Asks whether the caller of `ctx` may do the RPC's action.
    fn authorize(
        &self,
        ctx: &RequestContext,
        request_id: &str,
        resource: Resource<'_>,
    ) -> Result<Authorized, AppError> {
        let principal = ctx
            .extensions()
            .get::<Arc<Principal>>()
            .ok_or_else(|| AppError::new(&error::UNAUTHENTICATED, error::UNAUTHENTICATED.title))?;
        let action = ctx
            .path()
            .and_then(Action::of_rpc)
            .ok_or_else(|| AppError::new(&error::INTERNAL, "the call has no action"))?;
        let source = ctx.extensions().get::<Peer>().map(|peer| peer.0.to_string()).unwrap_or_default();
        authorize(principal, action, resource, Origin { request_id: request_id.to_owned(), source })
    }
}

/// Returns everything that speaks Connect, gRPC and gRPC-Web on the port.
///
/// # Errors
///
/// The compiled-in descriptors cannot be read: a defect of the build.
pub(crate) fn service(
    app: Arc<App>,
    link: Arc<LinkService>,
    store: Store,
) -> Result<ConnectRpcService, connectrpc_reflection::ReflectionError> {
    let api = Arc::new(Api { app });
    let router = Router::new();
    let router = cloister_api::app::SessionsServiceExt::register(Arc::clone(&api), router);
    let router = cloister_api::app::ExecsServiceExt::register(Arc::clone(&api), router);
    let router = cloister_api::app::StreamsServiceExt::register(Arc::clone(&api), router);
    let router = cloister_api::app::HostsServiceExt::register(Arc::clone(&api), router);
    let router = cloister_api::app::TokensServiceExt::register(Arc::clone(&api), router);
    let router = cloister_api::app::AuditServiceExt::register(api, router);
    let router = cloister_api::host::HostLinkServiceExt::register(link, router);
    let health = Arc::new(HealthService::new(Health::new(store)));
    let router = apply_request_limits(health.register(router), request_limits());
    let reflector = Reflector::from_descriptor_set_bytes(cloister_api::FILE_DESCRIPTOR_SET)?;
    let router = connectrpc_reflection::install(router, reflector);
    let limits = Limits::default()
        .with_max_message_size(MAX_MESSAGE_BYTES)
        .with_max_request_body_size(MAX_MESSAGE_BYTES);
    let deadlines = DeadlinePolicy::new()
        .with_min(Duration::from_millis(10))
        .with_max(CALL_DEADLINE)
        .with_default_timeout(CALL_DEADLINE);
    Ok(ConnectRpcService::new(router)
        .with_limits(limits)
        .with_deadline_policy(deadlines)
        // A compressor would let the producer of a stalled stream run far ahead.
        .with_compression(CompressionRegistry::new())
        .with_compression_policy(CompressionPolicy::disabled())
        .with_interceptor(observe::Observe))
}
