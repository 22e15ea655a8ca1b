//! Log lines of a role, on standard error.
//!
//! `RUST_LOG` filters as everywhere; the default shows `info` of our own crates and `warn` of the rest. Colours
//! are used only on a terminal. Fields have fixed names (see `docs/concepts/words.md`): a value is a field, never
//! part of the message.

use std::io::IsTerminal as _;
use std::str::FromStr;

use tracing_subscriber::EnvFilter;

use crate::config::EnvVar;

/// How log lines look.
pub const LOG_FORMAT: EnvVar = EnvVar {
    name: "CLOISTER_LOG_FORMAT",
    doc: "How log lines look: `text` for people, `json` for machines.",
    default: Some("text"),
    unit: None,
    since: "0.1.0",
};

const DEFAULT_FILTER: &str = "warn,cloister=info,cloister_api=info,cloister_coordinator=info,cloister_host=info,\
     cloister_sandbox=info,cloister_service=info";

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// A word that is no log format.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not one of `text`, `json`")]
pub struct LogFormatError(String);

impl FromStr for LogFormat {
    type Err = LogFormatError;

    fn from_str(text: &str) -> Result<Self, LogFormatError> {
        match text {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            other => Err(LogFormatError(other.chars().take(64).collect())),
        }
    }
}

/// Why log lines cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// `RUST_LOG` does not parse.
    #[error("`RUST_LOG` is not a filter")]
    Filter(#[source] tracing_subscriber::filter::ParseError),
    /// Something else in this process has set them up already.
    #[error("log lines were set up twice")]
    Twice,
}

/// Sends log lines of this process to standard error from now on.
///
/// # Errors
///
/// [`TelemetryError`]; nothing was changed.
pub fn init(format: LogFormat) -> Result<(), TelemetryError> {
    let filter = match std::env::var("RUST_LOG") {
        Ok(text) if !text.is_empty() => EnvFilter::try_new(text).map_err(TelemetryError::Filter)?,
        _ => EnvFilter::new(DEFAULT_FILTER),
    };
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let result = match format {
        LogFormat::Text => builder.with_ansi(std::io::stderr().is_terminal()).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
    result.map_err(|_| TelemetryError::Twice)
}
