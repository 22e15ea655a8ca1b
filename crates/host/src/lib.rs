//! The host agent: makes sandboxes on one machine for a coordinator that it dials.
//!
//! ```text
//!            control stream                     ┌─► turn of the session ─► commands ─┐
//!  coordinator ◄────────► link ── reader ───────┤                                    ├─► Backend, Sandbox
//!            one RPC per stream                 └─► stream (exec output and input) ──┘
//!                          ▲                                                         │
//!                          └── writer ◄── answers, heartbeats, events ◄── watchers ◄─┘
//! ```
//!
//! Start order: own the data directory, adopt what an earlier agent left running, probe the backends, then keep a
//! link. Nothing listens. The link is dialled again for ever; what happens meanwhile is told after.
//!
//! Invariants:
//! - An effect happens only with an epoch that is not lower than any seen, and the epoch is on disk before it
//!   (`epochs`).
//! - What is done to one session is done in the order it arrived; sessions never wait for each other (`turns`).
//! - Sandboxes belong to their shims: the agent may be killed at any point, and the next one finds them.
//! - A byte stream ends with an exit, an end or an error, never in silence (`stream`).
//!
//! What it does not do: decide what should run. The coordinator's store is the only authority on that.

mod agent;
mod backends;
mod channel;
mod commands;
pub mod config;
mod data_dir;
mod epochs;
mod events;
pub mod fault;
mod link;
mod machine;
mod refusal;
mod report;
mod stop;
mod stream;
mod turns;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use cloister_sandbox::backend::{Backend, SandboxError};
use cloister_service::{CancellationToken, TaskRegistry, error_chain};

use crate::agent::Agent;
pub use crate::config::{BackendChoice, HostConfig};
use crate::data_dir::DataDir;
pub use crate::data_dir::DataDirError;
use crate::link::Link;
pub use crate::machine::{Capacity, CapacityOverride};
pub use crate::stop::{stop_all, stop_all_with};

/// How long a stop waits for tasks to end by themselves.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(30);

/// Why a host agent does not run.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The data directory cannot be owned.
    #[error(transparent)]
    DataDir(#[from] DataDirError),
    /// A backend cannot even be asked what it can do.
    #[error("open the data directory")]
    OpenBackend {
        /// What happened.
        #[source]
        source: SandboxError,
    },
    /// What an earlier agent left cannot be found.
    #[error("adopt sandboxes")]
    Adopt {
        /// What happened.
        #[source]
        source: SandboxError,
    },
    /// The epochs cannot be read, so that no old owner could be refused.
    #[error("read epochs from `{path}`")]
    Epochs {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: std::io::Error,
    },
    /// The machine does not say what it has.
    #[error("read capacity of the machine")]
    Machine {
        /// What the kernel said.
        #[source]
        source: std::io::Error,
    },
    /// Work on a thread of its own was lost.
    #[error("run blocking work")]
    Blocking(#[source] tokio::task::JoinError),
    /// Some sandboxes still run after all were to be stopped.
    #[error("stop sandboxes: {}", .0.join("; "))]
    Stop(Vec<String>),
}

/// Runs a host agent until `shutdown` is cancelled. Sandboxes run on after it.
///
/// # Errors
///
/// [`HostError`]: it could not start, or cannot go on. A coordinator that cannot be reached is no error.
///
/// # Cancel safety
///
/// Dropping it is like a kill: the next agent adopts what runs. A command in progress still ends.
pub async fn run(config: HostConfig, shutdown: CancellationToken) -> Result<(), HostError> {
    let (data_dir, backends) = own_and_open(&config).await?;
    serve(config, data_dir, backends, shutdown).await
}

/// Like [`run`], on backends that the caller has opened: how tests put faults below a real agent.
///
/// # Errors
///
/// As [`run`].
pub async fn run_with(
    config: HostConfig,
    backends: Vec<Arc<dyn Backend>>,
    shutdown: CancellationToken,
) -> Result<(), HostError> {
    let data_dir = own(&config).await?;
    serve(config, data_dir, backends, shutdown).await
}

async fn serve(
    config: HostConfig,
    data_dir: DataDir,
    backends: Vec<Arc<dyn Backend>>,
    shutdown: CancellationToken,
) -> Result<(), HostError> {
    // Ends with this future, also when it is dropped.
    let token = shutdown.child_token();
    let _cancelled = token.clone().drop_guard();
    let tasks = TaskRegistry::with_token(token);
    let agent = tokio::select! {
        agent = Agent::start(&config, &data_dir, backends, tasks.clone()) => agent?,
        // What a probe leaves behind, the next adoption reaps.
        () = shutdown.cancelled() => return Ok(()),
    };
    // No kind of task here ends the role: each is one command, one stream or one watcher.
    Link::new(agent, config.endpoint, config.token).run().await;
    if let Err(error) = tasks.shutdown(SHUTDOWN_GRACE).await {
        tracing::warn!(error = error_chain(&error), "tasks were dropped");
    }
    // Another agent may own it from here on.
    drop(data_dir);
    Ok(())
}

async fn own(config: &HostConfig) -> Result<DataDir, HostError> {
    let paths = config.paths.clone();
    blocking(move || Ok(DataDir::open(&paths)?)).await
}

/// Opening a backend writes to the data directory, which therefore has its owner first.
async fn own_and_open(config: &HostConfig) -> Result<(DataDir, Vec<Arc<dyn Backend>>), HostError> {
    let config = config.clone();
    blocking(move || {
        let data_dir = DataDir::open(&config.paths)?;
        Ok((data_dir, backends::open(&config)?))
    })
    .await
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, HostError> + Send + 'static,
) -> Result<T, HostError> {
    tokio::task::spawn_blocking(work).await.map_err(HostError::Blocking)?
}
