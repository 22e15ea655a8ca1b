//! What is counted, and how it is shown: `cloister_coordinator_*` in the Prometheus text format.
//!
//! Labels come from closed sets (RPC paths of our own services, status words, op kinds), never from ids.

use std::sync::OnceLock;
use std::time::Duration;

use cloister_api::access::rpc_access;
use metrics::{counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};

const REQUESTS: &str = "cloister_coordinator_requests_total";
const REQUEST_SECONDS: &str = "cloister_coordinator_request_seconds";
const OPS: &str = "cloister_coordinator_ops_total";
const OP_SECONDS: &str = "cloister_coordinator_op_seconds";
const HOST_LINKS: &str = "cloister_coordinator_host_links";
const HOST_COMMAND_SECONDS: &str = "cloister_coordinator_host_command_seconds";

/// Shows the metrics of this process.
#[derive(Clone)]
pub struct Metrics {
    handle: PrometheusHandle,
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl Metrics {
    /// Counts from now on. One recorder serves every coordinator of a process, so that tests can run many.
    pub fn install() -> Self {
        static HANDLE: OnceLock<PrometheusHandle> = OnceLock::new();
        let handle = HANDLE.get_or_init(|| {
            let recorder = PrometheusBuilder::new().build_recorder();
            let handle = recorder.handle();
            if metrics::set_global_recorder(recorder).is_err() {
                tracing::warn!("another recorder counts in this process: `/metrics` stays empty");
            }
            describe_counter!(REQUESTS, "Calls of the API by RPC and status.");
            describe_histogram!(
                REQUEST_SECONDS,
                "Time from a call's message to its answer, or to a stream's start."
            );
            describe_counter!(OPS, "Operations on sessions by kind and outcome.");
            describe_histogram!(OP_SECONDS, "Time that an attempt at an operation took.");
            describe_gauge!(HOST_LINKS, "Hosts with a link to this coordinator.");
            describe_histogram!(HOST_COMMAND_SECONDS, "Time from a command to a host's answer.");
            handle
        });
        Self { handle: handle.clone() }
    }

    /// Returns the text that `/metrics` answers.
    pub fn render(&self) -> String {
        self.handle.run_upkeep();
        self.handle.render()
    }
}

pub(crate) fn request(path: &str, status: &'static str, elapsed: Duration) {
    // A path that is no RPC of ours comes from the caller: it must not become a label.
    let rpc = rpc_access(path).map_or("other", |access| access.path);
    counter!(REQUESTS, "rpc" => rpc, "status" => status).increment(1);
    histogram!(REQUEST_SECONDS, "rpc" => rpc).record(elapsed.as_secs_f64());
}

pub(crate) fn op(kind: &'static str, outcome: &'static str, elapsed: Duration) {
    counter!(OPS, "kind" => kind, "outcome" => outcome).increment(1);
    histogram!(OP_SECONDS, "kind" => kind).record(elapsed.as_secs_f64());
}

pub(crate) fn host_links(count: u32) {
    gauge!(HOST_LINKS).set(f64::from(count));
}

pub(crate) fn host_command(kind: &'static str, elapsed: Duration) {
    histogram!(HOST_COMMAND_SECONDS, "command" => kind).record(elapsed.as_secs_f64());
}
