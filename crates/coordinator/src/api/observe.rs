//! Around every call: unknown JSON fields are refused, errors of the runtime get our detail, and what came of it is
//! counted.
//!
//! The runtime would ignore a field that it does not know, and take a list for a message. Here the raw JSON of every
//! message, unary or on a stream, is compared with the table generated out of `proto/` before it is decoded.

use std::time::Instant;

use cloister_api::access::rpc_access;
use cloister_api::connection::error_detail;
use cloister_api::json::{FaultKind, fault};
use cloister_service::config::nearest;
use connectrpc::interceptor::{Next, NextStream, StreamRequest, StreamResponse, UnaryRequest, UnaryResponse};
use connectrpc::{CodecFormat, ConnectError, ErrorCode, Interceptor, Payload, PayloadStream};
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
        let result = result.map_err(with_detail);
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
        let result = next.run(request, inbound).instrument(span).await.map_err(with_detail);
        count(&path, result.as_ref().err(), started);
        result
    }
}

fn count(path: &str, error: Option<&ConnectError>, started: Instant) {
    let status = error.map_or("ok", |error| error.code.as_str());
    metrics::request(path, status, started.elapsed());
}

/// Gives a request that the runtime could not decode the detail that every error carries.
fn with_detail(error: ConnectError) -> ConnectError {
    if error.code != ErrorCode::InvalidArgument || error_detail(&error).is_some() {
        return error;
    }
    AppError::new(&error::INVALID_FIELD, error.message.unwrap_or_default()).into()
}

fn check(path: &str, payload: &Payload) -> Result<(), ConnectError> {
    if payload.format() != CodecFormat::Json {
        return Ok(());
    }
    let Some(access) = rpc_access(path) else { return Ok(()) };
    // A body that is no JSON is the decoder's to refuse.
    let Ok(value) = serde_json::from_slice::<serde_json::Value>(payload.bytes()) else { return Ok(()) };
    let Some(fault) = fault(access.request, &value) else { return Ok(()) };
    let (code, message) = match &fault.kind {
        FaultKind::UnknownField { name, accepted } => {
            let hint = match nearest(name, accepted.iter().copied()) {
                Some(near) => format!("did you mean `{near}`?"),
                None if accepted.is_empty() => "this message has no fields".to_owned(),
                None => format!("there are: {}", accepted.join(", ")),
            };
            (&error::UNKNOWN_FIELD, format!("the request has no field `{}`; {hint}", fault.path))
        }
        FaultKind::NoObject if fault.path.is_empty() => {
            (&error::INVALID_FIELD, "the request is not a JSON object".to_owned())
        }
        FaultKind::NoObject => (&error::INVALID_FIELD, format!("`{}` is not a JSON object", fault.path)),
    };
    Err(AppError { field: fault.path, ..AppError::new(code, message) }.into())
}
