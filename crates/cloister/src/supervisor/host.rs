//! The host agent of `up`: how it is started, what the coordinator knows of it, and stopping its sandboxes without it.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::time::Duration;

use cloister_api::app::{Host, ListHostsRequest};
use cloister_host::HostConfig;
use cloister_service::Environment;

use crate::client::{self, Client};
use crate::context::Target;
use crate::error::CliError;
use crate::supervisor::child::ChildSpec;
use crate::supervisor::layout::Layout;
use crate::supervisor::{OWN_PROGRAM, STOP_GRACE, role, role_arguments, token};

/// How long stopping all sandboxes, and telling the coordinator, may take.
const SANDBOXES_GRACE: Duration = Duration::from_secs(60);

/// Returns the host of this machine as the coordinator knows it; `None` when it does not.
///
/// # Errors
///
/// What the coordinator answered.
pub(crate) async fn own_host(layout: &Layout, owner: &Target) -> Result<Option<Host>, CliError> {
    let file = layout.data_of("host").join("host.json");
    // Not there before the first start of a host agent.
    let Ok(bytes) = std::fs::read(file) else { return Ok(None) };
    let file: serde_json::Value = serde_json::from_slice(&bytes).unwrap_or_default();
    let client = Client::connect_once(owner).await?;
    let hosts = client.api().hosts();
    let answer = hosts.list_hosts_with_options(ListHostsRequest::default(), client::quick()).await;
    let hosts = answer.map_err(|error| client.error(&error))?.into_owned().hosts;
    Ok(hosts.into_iter().find(|host| file["host_id"] == host.id.as_str()))
}

/// Checks the configuration that the host agent will have, without starting anything.
///
/// # Errors
///
/// Every problem of it together.
pub(crate) fn check_configuration(layout: &Layout, backend: &str) -> Result<(), CliError> {
    let spec = host_spec(layout, backend)?;
    let own = std::env::vars_os().filter(|(name, _)| !spec.unset.iter().any(|unset| name == unset));
    let set = spec.set.into_iter().map(|(name, value)| (OsString::from(name), value));
    let pairs = own
        .chain(set)
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    HostConfig::read(&Environment::of(pairs)).map(drop).map_err(role::configuration)
}

/// Returns how the host agent of these directories is started.
///
/// # Errors
///
/// [`CliError`] when its token cannot be read.
pub(crate) fn host_spec(layout: &Layout, backend: &str) -> Result<ChildSpec, CliError> {
    let host_token = token::ensure(&layout.tokens().join("host"))?;
    let mut endpoint = OsString::from("unix://");
    endpoint.push(layout.link_socket());
    Ok(ChildSpec {
        name: "host",
        program: OWN_PROGRAM.into(),
        shown_as: "cloister",
        arguments: role_arguments("host", None),
        set: vec![
            ("CLOISTER_COORDINATOR_ENDPOINT", endpoint),
            ("CLOISTER_COORDINATOR_TOKEN", host_token.into()),
            ("CLOISTER_DATA_DIR", layout.data_of("host").into()),
            ("CLOISTER_RUN_DIR", layout.run_of("host").into()),
            ("CLOISTER_SANDBOX_BACKEND", backend.into()),
        ],
        unset: &[
            "DATABASE_URL",
            "CLOISTER_TOKEN",
            "CLOISTER_ENDPOINT",
            "CLOISTER_CONTEXT",
            "CLOISTER_CONFIG",
        ],
        logs: layout.logs(),
        grace: STOP_GRACE,
    })
}

/// Returns the processes of sandboxes of these directories that run: their shims, which live as long as they do.
pub(crate) fn running_shims(layout: &Layout) -> Vec<i32> {
    let directory = layout.data_of("host");
    let is_shim = |pid: &i32| {
        let command = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let mut arguments = command.split(|byte| *byte == 0).skip(1);
        arguments.next() == Some(b"shim")
            && arguments.any(|argument| Path::new(OsStr::from_bytes(argument)).starts_with(&directory))
    };
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(is_shim).collect()
}

/// Stops all sandboxes of a host agent that does not run.
pub(crate) async fn stop_sandboxes(mut spec: ChildSpec) {
    spec.arguments.push("--stop-sandboxes".into());
    match spec.spawn() {
        Ok(mut child) => match tokio::time::timeout(SANDBOXES_GRACE, child.wait()).await {
            Ok(Ok(status)) if status.success() => {}
            Ok(status) => {
                tracing::warn!(?status, "some sandboxes were not stopped; the host agent's log says which")
            }
            Err(_) => {
                tracing::warn!("sandboxes did not stop in time; the next `up` takes them over");
                let _ = child.kill().await;
            }
        },
        Err(error) => tracing::warn!(%error, "sandboxes were not stopped"),
    }
}
