//! The gate in front of every RPC: no body is read for a caller that nobody knows.
//!
//! ```text
//!  /cloister.app.v1.*     a person's or machine's bearer  ──► Arc<Principal> in the request
//!  /cloister.host.v1.*    a host agent's bearer; refused when none is configured
//!  health, reflection     open
//!  anything else          open, and nothing is there
//! ```
//!
//! The two kinds of bearers never work in each other's place.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use connectrpc::ConnectError;
use http::HeaderMap;
use http::header::AUTHORIZATION;

use crate::app::authenticate::Authenticator;
use crate::db::TokenHash;
use crate::error::{self, AppError};

const APP_PREFIX: &str = "/cloister.app.v1.";
const HOST_PREFIX: &str = "/cloister.host.v1.";

/// Lets a request through with its principal, or answers it.
pub(crate) async fn gate(
    State(authenticator): State<Arc<Authenticator>>,
    mut request: Request,
    next: Next,
) -> Response {
    let path = request.uri().path();
    let result = if path.starts_with(APP_PREFIX) {
        app(&authenticator, &mut request).await
    } else if path.starts_with(HOST_PREFIX) {
        host(&authenticator, request.headers())
    } else {
        Ok(())
    };
    match result {
        Ok(()) => next.run(request).await,
        Err(error) => ConnectError::from(error).into_http_response(request.headers()).map(Body::new),
    }
}

async fn app(authenticator: &Authenticator, request: &mut Request) -> Result<(), AppError> {
    let bearer = bearer(request.headers())?;
    match authenticator.caller(bearer).await? {
        Some(principal) => {
            let token = TokenHash::of(bearer);
            request.extensions_mut().insert(principal);
            // For streams, which outlast this look.
            request.extensions_mut().insert(token);
            Ok(())
        }
        None => Err(revoked()),
    }
}

fn host(authenticator: &Authenticator, headers: &HeaderMap) -> Result<(), AppError> {
    if authenticator.is_host(bearer(headers)?) {
        Ok(())
    } else {
        Err(unauthenticated("the token is no host agent's").with_remedy(
            "give the host agent one of the bearers in the coordinator's `CLOISTER_AUTH_TOKENS`",
        ))
    }
}

fn bearer(headers: &HeaderMap) -> Result<&str, AppError> {
    let value = headers.get(AUTHORIZATION).ok_or_else(|| unauthenticated("the call carries no token"))?;
    value
        .to_str()
        .ok()
        .and_then(|text| text.split_once(' '))
        .filter(|(scheme, token)| scheme.eq_ignore_ascii_case("bearer") && !token.is_empty())
        .map(|(_, token)| token.trim())
        .ok_or_else(|| unauthenticated("the `authorization` header is not of the form `Bearer TOKEN`"))
}

/// Returns what a caller is told whose token is none, or none any more.
pub(crate) fn revoked() -> AppError {
    unauthenticated("the token is unknown, expired or revoked")
}

fn unauthenticated(message: &str) -> AppError {
    AppError::new(&error::UNAUTHENTICATED, message)
}
