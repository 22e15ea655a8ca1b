//! What every long-running role does around its work, so that a role's own code is only its work.
//!
//! - [`task`]: the registry through which every task is spawned. A [`task::TaskKind`] says what a cancellation and
//!   a failure mean, and a shutdown waits for what must end well.
//! - [`shutdown`]: one token from signals to tasks.
//! - [`telemetry`]: log lines on standard error, for people or as JSON.
//! - [`config`]: variables declared once with their documentation; every problem of a configuration is reported
//!   together, before anything is bound or touched.
//!
//! Data flows one way: `main` reads the configuration, starts telemetry, makes a registry, and runs the role with
//! the registry until its token is cancelled or a task fails that the role cannot live without.

pub mod config;
pub mod shutdown;
pub mod task;
pub mod telemetry;

pub use config::{ConfigError, ConfigReader, EnvVar, Environment};
pub use task::{OnCancel, OnError, TaskHandle, TaskKind, TaskRegistry};
pub use tokio_util::sync::CancellationToken;

/// Returns an error and all of its sources as one line, outermost first.
pub fn error_chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut line = error.to_string();
    let mut source = error.source();
    while let Some(inner) = source {
        line.push_str(": ");
        line.push_str(&inner.to_string());
        source = inner.source();
    }
    line
}
