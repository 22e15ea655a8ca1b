//! Around every call: unknown JSON fields are refused, and what came of it is counted.
//!
//! The runtime would ignore a field that it does not know. Here the raw JSON of every message, unary or on a stream,
//! is compared with the table generated out of `proto/` before it is decoded.

use std::time::Instant;

use cloister_api::access::rpc_access;
use cloister_api::json::unknown_field;
use cloister_service::config::nearest;
use connectrpc::interceptor::{Next, NextStream, StreamRequest, StreamResponse, UnaryRequest, UnaryResponse};
use connectrpc::{CodecFormat, ConnectError, Interceptor, Payload, PayloadStream};
use futures::StreamExt as _;
use tracing::Instrument as _;

use crate::error::{self, AppError};
use crate::metrics;

/// The interceptor.
pub(super) struct Observe;

#[connectrpc::async_trait]
impl Interceptor for Observe {
    async fn intercept_unary(
        &self,
        request: UnaryRequest,
        next: Next<'_>,
    ) -> Result<UnaryResponse, ConnectError> {
        let started = Instant::now();
        let path = request.ctx.path().unwrap_or_default().to_owned();
        let span = tracing::info_span!("rpc", rpc = %path);
        let result = match check(&path, &request.payload) {
            Ok(()) => next.run(request).instrument(span).await,
            Err(error) => Err(error),
        };
        count(&path, result.as_ref().err(), started);
        result
    }

    async fn intercept_streaming(
        &self,
        request: StreamRequest,
        inbound: PayloadStream,
        next: NextStream<'_>,
    ) -> Result<StreamResponse, ConnectError> {
        let started = Instant::now();
        let path = request.ctx.path().unwrap_or_default().to_owned();
        let span = tracing::info_span!("rpc", rpc = %path);
        let checked_path = path.clone();
        let inbound: PayloadStream = Box::pin(inbound.map(move |payload| {
            let payload = payload?;
            check(&checked_path, &payload)?;
            Ok(payload)
        }));
        let result = next.run(request, inbound).instrument(span).await;
        count(&path, result.as_ref().err(), started);
        result
    }
}

fn count(path: &str, error: Option<&ConnectError>, started: Instant) {
    let status = error.map_or("ok", |error| error.code.as_str());
    metrics::request(path, status, started.elapsed());
}

fn check(path: &str, payload: &Payload) -> Result<(), ConnectError> {
    if payload.format() != CodecFormat::Json {
        return Ok(());
    }
    let Some(access) = rpc_access(path) else { return Ok(()) };
    // A body that is no JSON is the decoder's to refuse.
    let Ok(value) = serde_json::from_slice::<serde_json::Value>(payload.bytes()) else { return Ok(()) };
    let Some(unknown) = unknown_field(access.request, &value) else { return Ok(()) };
    let hint = match nearest(&unknown.name, unknown.accepted.iter().copied()) {
        Some(near) => format!("did you mean `{near}`?"),
        None if unknown.accepted.is_empty() => "this message has no fields".to_owned(),
        None => format!("there are: {}", unknown.accepted.join(", ")),
    };
    Err(AppError {
        field: unknown.path.clone(),
        ..AppError::new(&error::UNKNOWN_FIELD, format!("the request has no field `{}`; {hint}", unknown.path))
    }
    .into())
}
