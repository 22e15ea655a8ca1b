//! What callers are told when something goes wrong: one table of codes, one error type.
//!
//! Every error of the app API has a [`Code`] with a page in `docs/errors/`, a remedy, and the field that is wrong
//! when one is. Log lines are written where an error is consumed: those that an operator must see
//! ([`AppError::is_ours`]) by the interceptor that turns them into answers, none for a caller's mistakes.

use std::error::Error as StdError;

use cloister_api::app::ErrorDetail as DetailMessage;
use cloister_api::convert::ConvertError;
use connectrpc::{ConnectError, ErrorCode, ErrorDetail};

use crate::db::StoreError;

/// A row of the table: stable, documented, and always the same status.
#[derive(Debug, PartialEq, Eq)]
pub struct Code {
    /// `CL…`, the name of the page.
    pub code: &'static str,
    /// The status that gRPC and Connect have for it.
    pub status: ErrorCode,
    /// What it means, in a few words.
    pub title: &'static str,
    /// What the caller can do, when the place that fails knows nothing better.
    pub remedy: &'static str,
}

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $status:ident, $title:literal, $remedy:literal;)*) => {
        $($(#[$doc])* pub const $name: Code =
            Code { code: $code, status: ErrorCode::$status, title: $title, remedy: $remedy };)*
        /// Every code.
        pub const CODES: &[&Code] = &[$(&$name,)*];
    };
}

codes! {
    /// No bearer, or one that is unknown, expired or revoked.
    UNAUTHENTICATED = "CL1001", Unauthenticated, "the call carries no valid token",
        "send `authorization: Bearer TOKEN` with a token from `cloister token create`";
    /// The caller is known and may not do this.
    PERMISSION_DENIED = "CL1002", PermissionDenied, "the caller may not do this",
        "use the token of somebody who may, or ask them";
    /// A field has a value that is not accepted.
    INVALID_FIELD = "CL1003", InvalidArgument, "a field of the request is not accepted",
        "correct the field that is named and send the request again";
    /// A JSON field that the request does not have.
    UNKNOWN_FIELD = "CL1004", InvalidArgument, "the request has a JSON field that does not exist",
        "correct the name of the field; nothing was done";
    /// No session has this id, prefix or name.
    SESSION_NOT_FOUND = "CL1005", NotFound, "no such session",
        "`cloister session list` shows what there is";
    /// A prefix that fits several.
    AMBIGUOUS = "CL1006", InvalidArgument, "the reference fits more than one object",
        "give more characters of the id, or the whole id";
    /// The name belongs to another.
    NAME_TAKEN = "CL1007", AlreadyExists, "the name is taken",
        "choose another name, or delete the object that has it";
    /// The request id was used for something else.
    REQUEST_ID_REUSED = "CL1008", AlreadyExists, "the request id was used before with another payload",
        "use a new request id for a new request";
    /// The state of the session does not allow it.
    WRONG_STATE = "CL1009", FailedPrecondition, "the session's state does not allow it",
        "wait until the session is in a state that does; `cloister session get` shows it";
    /// No host has this id, prefix or name.
    HOST_NOT_FOUND = "CL1010", NotFound, "no such host", "`cloister host list` shows what there is";
    /// The session's host has no link to this coordinator.
    HOST_NOT_CONNECTED = "CL1011", Unavailable, "the session's host is not connected",
        "wait until it is; `cloister host list` shows it, and its log says why";
    /// No exec has this id in this session.
    EXEC_NOT_FOUND = "CL1012", NotFound, "no such exec in this session", "`cloister ps` shows what there is";
    /// The sandbox is not running.
    SANDBOX_NOT_RUNNING = "CL1013", FailedPrecondition, "the session has no running sandbox",
        "resume the session, then try again";
    /// No host offers isolation this strong.
    ISOLATION_NOT_OFFERED = "CL1014", FailedPrecondition, "no host offers isolation this strong",
        "ask for less isolation, or add a host that offers it; `cloister doctor` says why one does not";
    /// No token has this id or name.
    TOKEN_NOT_FOUND = "CL1015", NotFound, "no such token", "`cloister token list` shows what there is";
    /// The database does not answer.
    STORE_UNAVAILABLE = "CL1016", Unavailable, "the database does not answer",
        "try again in a moment; with the same request id nothing is done twice";
    /// The host failed at it.
    HOST_FAILED = "CL1017", Internal, "the host failed",
        "try again; if it fails again the host's log says why";
    /// A stream ended before its last frame.
    STREAM_CUT = "CL1018", Unavailable, "the stream was cut before its end",
        "take it up again at the next offset; the exec was not touched";
    /// A resource of the host is used up.
    HOST_EXHAUSTED = "CL1019", ResourceExhausted, "a resource of the host is used up",
        "end other work on that host, or ask for less";
    /// The host did not answer in time.
    HOST_TIMEOUT = "CL1020", DeadlineExceeded, "the host did not answer in time",
        "try again; with the same request id nothing is done twice. `cloister host list` shows whether it is connected";
    /// A host agent of another age.
    WIRE_VERSION = "CL1021", FailedPrecondition, "the host agent's protocol version is not served",
        "upgrade the host agent or the coordinator, so that they are at most one version apart";
    /// The coordinator is stopping.
    STOPPING = "CL1022", Unavailable, "the coordinator is stopping",
        "connect again: another one, or the same after its restart, goes on";
    /// Somebody else changed the object meanwhile.
    CONFLICT = "CL1023", Aborted, "the object was changed by somebody else meanwhile",
        "read it again and decide anew";
    /// The host has seen another payload under this id.
    EXEC_CONFLICT = "CL1024", AlreadyExists, "the request id was used before for another exec",
        "use a new request id for a new exec";
    /// A page token of another server or age.
    PAGE_TOKEN = "CL1025", InvalidArgument, "the page token is not one of this server's",
        "list again from the first page";
    /// A message on a stream that does not belong there.
    PROTOCOL = "CL1026", InvalidArgument, "a message on the stream does not belong there",
        "send `start` first, then `stdin` and `signal`";
    /// The database's disk is full.
    STORE_FULL = "CL1027", ResourceExhausted, "the database has no room on its disk",
        "free room on the disk of the database (`df`), then try again; nothing needs to be restarted";
    /// Nobody listens in the sandbox.
    PORT_CLOSED = "CL1028", FailedPrecondition, "nothing in the sandbox listens on the port",
        "start the program that listens, on the sandbox's loopback address or on all, and try again";
    /// A defect of this program.
    INTERNAL = "CL1099", Internal, "the coordinator failed",
        "report it with the coordinator's log lines of that time";
}

/// What went wrong, as a caller is told.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct AppError {
    /// The row of the table.
    pub code: &'static Code,
    /// One sentence, with the values.
    pub message: String,
    /// The request field that is wrong; empty when none is.
    pub field: String,
    /// What to do; the code's own when `None`.
    pub remedy: Option<String>,
    /// The cause, for the log only.
    #[source]
    pub source: Option<Box<dyn StdError + Send + Sync>>,
}

impl AppError {
    /// Returns an error with the remedy of its code.
    pub fn new(code: &'static Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), field: String::new(), remedy: None, source: None }
    }

    /// Returns an error about a field.
    pub fn field(field: impl Into<String>, message: impl ToString) -> Self {
        Self { field: field.into(), ..Self::new(&INVALID_FIELD, message.to_string()) }
    }

    /// Returns this error with another remedy.
    pub fn with_remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = Some(remedy.into());
        self
    }

    /// Returns this error with its cause, which goes to the log and not to the caller.
    pub fn with_source(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// Returns whether an operator must see it: everything that is neither the caller's mistake nor passing.
    pub fn is_ours(&self) -> bool {
        self.code.status == ErrorCode::Internal
    }
}

impl From<AppError> for ConnectError {
    fn from(error: AppError) -> Self {
        if error.is_ours() {
            tracing::error!(code = error.code.code, error = %cloister_service::error_chain(&error), "a call failed");
        }
        let remedy = error.remedy.unwrap_or_else(|| error.code.remedy.to_owned());
        let message = DetailMessage {
            code: error.code.code.to_owned(),
            remedy: remedy.clone(),
            field: error.field.clone(),
            ..Default::default()
        };
        let mut detail = ErrorDetail::from_message("cloister.app.v1.ErrorDetail", &message);
        // People with curl cannot read the encoded form.
        detail.debug =
            Some(serde_json::json!({ "code": error.code.code, "remedy": remedy, "field": error.field }));
        Self::new(error.code.status, error.message).with_detail(detail)
    }
}

impl From<ConvertError> for AppError {
    fn from(error: ConvertError) -> Self {
        Self::field(error.field, error.message)
    }
}

impl From<StoreError> for AppError {
    fn from(error: StoreError) -> Self {
        let message = error.to_string();
        let code = match &error {
            StoreError::NotFound { kind: "session", .. } => &SESSION_NOT_FOUND,
            StoreError::NotFound { kind: "host", .. } => &HOST_NOT_FOUND,
            StoreError::NotFound { kind: "token", .. } => &TOKEN_NOT_FOUND,
            StoreError::Ambiguous { .. } => &AMBIGUOUS,
            StoreError::NameTaken { .. } => &NAME_TAKEN,
            StoreError::IdempotencyMismatch { .. } => &REQUEST_ID_REUSED,
            StoreError::Conflict { .. } => &CONFLICT,
            StoreError::Illegal(_) => &WRONG_STATE,
            StoreError::NotOffered { backend: Some(_), .. } => {
                return Self::new(&ISOLATION_NOT_OFFERED, message).with_remedy(
                    "leave the backend out, or name one that is offered; a host agent offers what its `CLOISTER_SANDBOX_BACKEND` says (`cloister up --backend`)",
                );
            }
            StoreError::NotOffered { .. } => &ISOLATION_NOT_OFFERED,
            StoreError::TooLarge { .. } => {
                return Self::new(&INVALID_FIELD, message).with_remedy("ask for less, or add a larger host");
            }
            StoreError::PageToken => &PAGE_TOKEN,
            StoreError::Unavailable { .. } => {
                tracing::warn!(error = %cloister_service::error_chain(&error), "the store did not answer");
                if error.is_disk_full() {
                    return Self::new(&STORE_FULL, STORE_FULL.title);
                }
                &STORE_UNAVAILABLE
            }
            StoreError::NotFound { .. }
            | StoreError::Connect { .. }
            | StoreError::Database { .. }
            | StoreError::Corrupt { .. }
            | StoreError::Migrate(_) => {
                return Self::new(&INTERNAL, "the coordinator failed at its store").with_source(error);
            }
        };
        Self::new(code, message)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Proves the claim of `docs/errors/`: every code has a page, and every page a code.
    #[test]
    fn every_code_has_a_page_and_every_page_a_code() {
        let directory = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/errors");
        let codes: BTreeSet<String> = CODES.iter().map(|code| code.code.to_owned()).collect();
        assert_eq!(codes.len(), CODES.len(), "a code is used twice");
        for code in CODES {
            let page = std::fs::read_to_string(directory.join(format!("{}.md", code.code)))
                .unwrap_or_else(|error| panic!("no page for {}: {error}", code.code));
            assert!(
                page.starts_with(&format!("# {}: {}\n", code.code, code.title)),
                "{}: wrong title",
                code.code
            );
        }
        for entry in std::fs::read_dir(&directory).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            if let Some(code) = name.strip_suffix(".md")
                && code.starts_with("CL1")
            {
                assert!(codes.contains(code), "`{name}` has no code");
            }
        }
    }

    #[test]
    fn an_answer_carries_code_remedy_and_field() {
        let error = ConnectError::from(AppError::field("limits.pids", "too few"));
        assert_eq!(error.code, ErrorCode::InvalidArgument);
        let json: serde_json::Value = serde_json::from_slice(&error.to_json()).unwrap();
        assert_eq!(json["details"][0]["type"], "cloister.app.v1.ErrorDetail");
        assert_eq!(json["details"][0]["debug"]["code"], "CL1003");
        assert_eq!(json["details"][0]["debug"]["field"], "limits.pids");
    }
}
