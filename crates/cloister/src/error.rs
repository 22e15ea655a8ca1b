//! What goes wrong on the command line, and what a person can do about it.
//!
//! Every failure ends here: `main` prints `error: …`, then `hint: …` when there is a remedy, and exits with
//! [`CliError::exit_code`]. Errors of the API keep their code (`CL1003`) and the remedy that the coordinator
//! sent; errors of this machine carry a hint of their own. Nothing is printed where it happens.

use std::io;

use cloister_api::app;
use cloister_api::connection::{error_detail, is_unanswered};
use connectrpc::{ConnectError, ErrorCode};

/// Exit code of a command that failed (other than `run` and `exec`).
pub(crate) const EXIT_FAILED: u8 = 1;
/// Exit code of a command line that makes no sense.
pub(crate) const EXIT_USAGE: u8 = 2;
/// Exit code of `status` when nothing runs.
pub(crate) const EXIT_NOT_RUNNING: u8 = 3;
/// Exit code of `run` and `exec` when Cloister itself failed.
pub(crate) const EXIT_CLOISTER: u8 = 125;
/// Exit code after Ctrl-C, as shells report it.
pub(crate) const EXIT_INTERRUPTED: u8 = 130;
/// Exit code when standard output was closed by its reader, as shells report `SIGPIPE`.
pub(crate) const EXIT_BROKEN_PIPE: u8 = 141;

/// Why a command did not do what it was asked to.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CliError {
    /// The coordinator refused or failed a call.
    #[error("{message}")]
    Api {
        /// The code of the protocol, for example `not_found`.
        code: ErrorCode,
        /// What the coordinator said.
        message: String,
        /// Its code, remedy and field, where it sent them.
        detail: Option<Box<app::ErrorDetail>>,
    },
    /// No answer at all.
    #[error("cannot reach the coordinator at `{endpoint}`: {reason}")]
    Unreachable {
        /// Where it was looked for.
        endpoint: String,
        /// The last cause.
        reason: String,
    },
    /// It was reached, and did not answer before the call's deadline.
    #[error("the coordinator at `{endpoint}` did not answer in time")]
    NoAnswer {
        /// Where it is.
        endpoint: String,
    },
    /// Something on this machine is not as it must be; the hint says what to do.
    #[error("{message}")]
    Refused {
        /// What is wrong.
        message: String,
        /// What to do; empty when there is nothing.
        hint: String,
    },
    /// A file, process or socket of this machine.
    #[error("cannot {action}: {source}")]
    Io {
        /// Verb and object, for example ``read `/etc/passwd` ``.
        action: String,
        /// What the system said.
        source: io::Error,
    },
    /// Ctrl-C while waiting.
    #[error("interrupted")]
    Interrupted,
    /// The reader of standard output is gone.
    #[error("standard output was closed")]
    BrokenPipe,
    /// `run` or `exec` failed for this reason; only the exit code differs from the reason's own.
    #[error(transparent)]
    Work(Box<CliError>),
}

impl CliError {
    /// Returns a refusal with its remedy.
    pub(crate) fn refused(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Refused { message: message.into(), hint: hint.into() }
    }

    /// Returns a function that names what was being done when the system refused.
    pub(crate) fn io(action: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let action = action.into();
        move |source| {
            if source.kind() == io::ErrorKind::BrokenPipe {
                Self::BrokenPipe
            } else {
                Self::Io { action, source }
            }
        }
    }

    /// Returns the error of `run` and `exec`, whose own failures exit with 125.
    pub(crate) fn of_work(self) -> Self {
        match self {
            Self::Work(_) | Self::Interrupted | Self::BrokenPipe => self,
            other => Self::Work(Box::new(other)),
        }
    }

    /// Returns the error of a call, without looking at where it went.
    pub(crate) fn from_connect(endpoint: &str, error: &ConnectError) -> Self {
        let detail = error_detail(error);
        if is_unanswered(error) {
            return Self::Unreachable { endpoint: endpoint.to_owned(), reason: chain(error) };
        }
        if error.code == ErrorCode::DeadlineExceeded && detail.is_none() {
            return Self::NoAnswer { endpoint: endpoint.to_owned() };
        }
        let message = error.message.clone().unwrap_or_else(|| error.code.as_str().replace('_', " "));
        let field = detail.as_ref().map_or("", |detail| detail.field.as_str());
        let message = match flag_of(field) {
            Some(flag) => format!("`{flag}`: {message}"),
            None if message.contains(field) => message,
            None => format!("`{field}`: {message}"),
        };
        Self::Api { code: error.code, message, detail: detail.map(Box::new) }
    }

    /// Returns whether the coordinator does not know what was named.
    pub(crate) fn is_not_found(&self) -> bool {
        matches!(self, Self::Api { code: ErrorCode::NotFound, .. })
    }

    /// Returns the exit code of the process.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Work(_) => EXIT_CLOISTER,
            Self::Interrupted => EXIT_INTERRUPTED,
            Self::BrokenPipe => EXIT_BROKEN_PIPE,
            Self::Api { .. }
            | Self::Unreachable { .. }
            | Self::NoAnswer { .. }
            | Self::Refused { .. }
            | Self::Io { .. } => EXIT_FAILED,
        }
    }

    /// Returns the stable code that has a page in the documentation, when there is one.
    pub(crate) fn code(&self) -> Option<&str> {
        match self {
            Self::Api { detail: Some(detail), .. } if !detail.code.is_empty() => Some(&detail.code),
            Self::Work(inner) => inner.code(),
            _ => None,
        }
    }

    /// Returns what a person can do about it.
    pub(crate) fn hint(&self) -> Option<String> {
        match self {
            Self::Api { code: ErrorCode::Unauthenticated, .. } => {
                Some("the token is missing, revoked or expired: check `cloister context show`, or set CLOISTER_TOKEN".into())
            }
            // What the API says to a program is of no use here.
            Self::Api { detail: Some(detail), .. } if detail.code == INVALID_FIELD && is_general(&detail.remedy) => {
                Some(match detail.field.as_str() {
                    "exec_id" | "start.exec_id" => "`cloister ps SESSION` shows the execs that there are".into(),
                    _ => "`--help` of the command says what is accepted".into(),
                })
            }
            Self::Api { detail: Some(detail), .. } if !detail.remedy.is_empty() => Some(detail.remedy.clone()),
            Self::Unreachable { .. } => Some(format!(
                "start it with `{}cloister up --detach`, or name one that runs: `cloister context add`, or CLOISTER_ENDPOINT; `cloister doctor` says more",
                sudo()
            )),
            Self::NoAnswer { .. } => Some(
                "whether it was done is not known: look with `cloister session list`. `cloister doctor` and the coordinator's log say what hangs"
                    .into(),
            ),
            Self::Refused { hint, .. } if !hint.is_empty() => Some(hint.clone()),
            Self::Io { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
                Some(format!(
                    "run the command as {}the user who owns the file",
                    if sudo().is_empty() { "" } else { "root (with `sudo`), or as " }
                ))
            }
            Self::Work(inner) => inner.hint(),
            _ => None,
        }
    }

    /// Returns the form that `--json` prints on standard error.
    pub(crate) fn to_json(&self) -> serde_json::Value {
        let inner = if let Self::Work(inner) = self { inner } else { self };
        let kind = match inner {
            Self::Api { code, .. } => code.as_str(),
            Self::Unreachable { .. } => "unreachable",
            Self::NoAnswer { .. } => "no_answer",
            Self::Refused { .. } => "refused",
            Self::Io { .. } => "io",
            Self::Interrupted => "interrupted",
            Self::BrokenPipe => "broken_pipe",
            Self::Work(_) => "failed",
        };
        let field = match inner {
            Self::Api { detail: Some(detail), .. } => detail.field.clone(),
            _ => String::new(),
        };
        serde_json::json!({"error": {
            "kind": kind,
            "code": self.code().unwrap_or_default(),
            "message": self.to_string(),
            "hint": self.hint().unwrap_or_default(),
            "field": field,
            "exitCode": self.exit_code(),
        }})
    }
}

/// The API's code for a field with a value that is not accepted.
const INVALID_FIELD: &str = "CL1003";

/// Returns whether a remedy is the one for every field.
fn is_general(remedy: &str) -> bool {
    remedy.starts_with("correct the field")
}

/// Returns the flag that sets a field of the API.
fn flag_of(field: &str) -> Option<&'static str> {
    let field = field.strip_prefix("start.").unwrap_or(field);
    Some(match field.strip_prefix("spec.").unwrap_or(field) {
        "cwd" => "--workdir",
        "user" => "--user",
        "env" => "--env",
        "timeout_ms" => "--timeout",
        "no_output_timeout_ms" => "--no-output-timeout",
        "limits.memory_bytes" => "--memory",
        "limits.cpu_millis" => "--cpus",
        "limits.pids" => "--pids",
        "limits.disk_bytes" => "--disk",
        "labels" => "--label",
        "backend" => "--backend",
        "isolation_floor" => "--isolation",
        "from_offset" => "--from",
        _ => return None,
    })
}

/// Returns what goes before a command that needs root; nothing for root.
pub(crate) fn sudo() -> &'static str {
    if rustix::process::geteuid().is_root() { "" } else { "sudo " }
}

/// Returns an error and its causes in one line, without saying anything twice.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let more = cause.to_string();
        if !text.contains(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {

    use connectrpc::ErrorDetail;

    use super::*;

    #[test]
    fn remedy_and_code_of_the_coordinator_are_shown() {
        let detail = app::ErrorDetail {
            code: "CL1003".into(),
            remedy: "ask for less memory".into(),
            field: "limits.memory_bytes".into(),
            ..Default::default()
        };
        let error = ConnectError::invalid_argument("too much")
            .with_detail(ErrorDetail::from_message("cloister.app.v1.ErrorDetail", &detail));
        let error = CliError::from_connect("http://x", &error);
        assert_eq!(error.to_string(), "`--memory`: too much");
        assert_eq!(error.code(), Some("CL1003"));
        assert_eq!(error.hint().as_deref(), Some("ask for less memory"));
        assert_eq!(error.exit_code(), EXIT_FAILED);
        let error = error.of_work();
        assert_eq!(error.exit_code(), EXIT_CLOISTER);
        assert_eq!(error.code(), Some("CL1003"));
        assert_eq!(error.to_json()["error"]["field"], "limits.memory_bytes");
        assert_eq!(error.to_json()["error"]["kind"], "invalid_argument");
    }

    #[test]
    fn a_deadline_of_our_own_is_told_from_one_of_the_coordinator() {
        let late = ConnectError::deadline_exceeded("client-side deadline exceeded");
        let error = CliError::from_connect("http://x", &late);
        assert_eq!(error.to_string(), "the coordinator at `http://x` did not answer in time");
        assert!(error.hint().is_some_and(|hint| hint.contains("session list")));
        assert_eq!(error.to_json()["error"]["kind"], "no_answer");
        let detail = app::ErrorDetail { code: "CL1020".into(), ..Default::default() };
        let told = late.with_detail(ErrorDetail::from_message("cloister.app.v1.ErrorDetail", &detail));
        assert_eq!(CliError::from_connect("http://x", &told).code(), Some("CL1020"));
    }

    #[test]
    fn no_answer_names_the_endpoint() {
        let error = CliError::from_connect("http://127.0.0.1:1", &ConnectError::unavailable("refused"));
        assert!(error.to_string().contains("http://127.0.0.1:1"), "{error}");
        assert!(error.hint().is_some_and(|hint| hint.contains("cloister up")));
        // The connection broke between the headers of an answer and its end.
        let torn =
            CliError::from_connect("http://x", &ConnectError::internal("failed to read response body"));
        assert!(matches!(torn, CliError::Unreachable { .. }), "{torn:?}");
    }
}
