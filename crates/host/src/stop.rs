//! Shutting a host down: its sandboxes stop, and the coordinator is told.
//!
//! A host agent that ends leaves its sandboxes running. `cloister down` wants them stopped, with nobody left who would
//! tell the coordinator: so this makes one registration of its own, which says that the host is shut down and what is
//! left on it. The coordinator answers when the sessions are paused. When it cannot be reached, the host's next
//! registration brings the same.

use std::sync::Arc;
use std::time::Duration;

use cloister_api::connection::HOST_WIRE_VERSION;
use cloister_api::host::Register;
use cloister_sandbox::backend::Backend;
use cloister_service::error_chain;
use futures::StreamExt as _;

use crate::config::HostConfig;
use crate::data_dir::DataDir;
use crate::epochs::Epochs;
use crate::report::Report;
use crate::{HostError, blocking, link, machine, own, own_and_open};

/// Time between SIGTERM and SIGKILL when all sandboxes are stopped.
const STOP_ALL_GRACE: Duration = Duration::from_secs(5);
/// Sandboxes that are stopped at one time.
const STOP_ALL_PARALLEL: usize = 16;
/// How long the coordinator may take to be told.
const REPORT_TIMEOUT: Duration = Duration::from_secs(10);

/// Stops every sandbox of a data directory whose host agent does not run, keeps layers and output, and tells the
/// coordinator that the host is shut down. Returns how many were stopped.
///
/// # Errors
///
/// [`HostError::DataDir`] when an agent runs on it: stop that one first. [`HostError::Stop`] names what still
/// runs; the others were stopped. A coordinator that cannot be told is no error.
pub async fn stop_all(config: HostConfig) -> Result<usize, HostError> {
    let (data_dir, backends) = own_and_open(&config).await?;
    stop_in(&config, &data_dir, backends).await
}

/// Like [`stop_all`], on backends that the caller has opened.
///
/// # Errors
///
/// As [`stop_all`].
pub async fn stop_all_with(config: HostConfig, backends: Vec<Arc<dyn Backend>>) -> Result<usize, HostError> {
    let data_dir = own(&config).await?;
    stop_in(&config, &data_dir, backends).await
}

async fn stop_in(
    config: &HostConfig,
    data_dir: &DataDir,
    backends: Vec<Arc<dyn Backend>>,
) -> Result<usize, HostError> {
    let (mut stopped, mut failed, mut left) = (0, Vec::new(), Vec::new());
    for backend in &backends {
        let adopt = |source| HostError::Adopt { source };
        let (running, _gone) = backend.adopt().await.map_err(adopt)?;
        let outcomes = futures::stream::iter(running)
            .map(|sandbox| async move {
                let outcome = sandbox.stop(STOP_ALL_GRACE).await;
                outcome.map_err(|error| (sandbox.spec().clone(), error_chain(&error)))
            })
            .buffer_unordered(STOP_ALL_PARALLEL)
            .collect::<Vec<_>>()
            .await;
        for outcome in outcomes {
            match outcome {
                Ok(()) => stopped += 1,
                Err((spec, error)) => {
                    failed.push(format!("`{}`: {error}", spec.sandbox_id));
                    left.push(spec);
                }
            }
        }
    }
    let path = data_dir.file("epochs");
    let read = move || {
        let epochs = Epochs::open(&path).map_err(|source| HostError::Epochs { path, source })?;
        let boot_id = machine::boot_id().map_err(|source| HostError::Machine { source })?;
        Ok((epochs, boot_id))
    };
    let (epochs, boot_id) = blocking(read).await?;
    let mut report = Report::new(&epochs);
    for spec in &left {
        report.running(&spec.session_id, &spec.sandbox_id);
    }
    for backend in &backends {
        report.kept(backend.as_ref()).await;
    }
    let register = Register {
        host_id: data_dir.host_id().to_string(),
        name: config.name.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        wire_version: HOST_WIRE_VERSION,
        boot_id,
        sandboxes: report.into_sandboxes(),
        stopping: true,
        ..Default::default()
    };
    let told = link::register_once(&config.endpoint, &config.token, register);
    match tokio::time::timeout(REPORT_TIMEOUT, told).await {
        Ok(Ok(())) => tracing::info!(stopped, "the coordinator knows that the host is shut down"),
        Ok(Err(error)) => {
            tracing::warn!(error, "the coordinator was not told; it learns at the next start");
        }
        Err(_) => tracing::warn!("the coordinator did not answer in time; it learns at the next start"),
    }
    if failed.is_empty() { Ok(stopped) } else { Err(HostError::Stop(failed)) }
}
