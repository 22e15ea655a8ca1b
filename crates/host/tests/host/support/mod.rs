//! What the tests of the host agent share.

pub(crate) mod backend;
pub(crate) mod coordinator;

use std::sync::Arc;

use cloister_api::host::{CreateSandbox, StartExec};
use cloister_host::config;
use cloister_host::{HostConfig, HostError};
use cloister_sandbox::backend::Backend;
use cloister_service::{
    CancellationToken, Environment, OnCancel, OnError, TaskHandle, TaskKind, TaskRegistry,
};
use cloister_types::{BackendKind, ExecId, SandboxId};
use tempfile::TempDir;
use tokio::sync::oneshot;

use self::backend::HeldBackend;
use self::coordinator::{Coordinator, LinkPeer, SOON, TOKEN};

const AGENT: TaskKind = TaskKind::new("agent", OnCancel::Wait, OnError::Log);

/// A host agent in this process.
pub(crate) struct Host {
    shutdown: CancellationToken,
    ended: oneshot::Receiver<Result<(), HostError>>,
    task: TaskHandle,
    _tasks: TaskRegistry,
}

/// What a host agent has around it: a directory, a coordinator to dial, and a backend in the test's hand.
pub(crate) struct Machine {
    pub(crate) directory: TempDir,
    pub(crate) coordinator: Coordinator,
    pub(crate) backend: Arc<HeldBackend>,
}

impl Machine {
    pub(crate) async fn new(kind: BackendKind) -> Self {
        Self {
            directory: tempfile::tempdir().expect("a directory"),
            coordinator: Coordinator::start().await,
            backend: HeldBackend::new(kind),
        }
    }

    pub(crate) fn config(&self) -> HostConfig {
        config(&self.directory, &self.coordinator)
    }

    /// Starts a host agent here, the first or the next one, and accepts its link.
    pub(crate) async fn start(&mut self) -> (Host, LinkPeer) {
        let host = Host::start(self.config(), self.backend.clone());
        let link = self.coordinator.link().await;
        (host, link)
    }
}

/// Returns the configuration of a host that dials this coordinator.
pub(crate) fn config(directory: &TempDir, coordinator: &Coordinator) -> HostConfig {
    let environment = Environment::of([
        (config::COORDINATOR_ENDPOINT.name, format!("http://{}", coordinator.address)),
        (config::COORDINATOR_TOKEN.name, TOKEN.to_owned()),
        (config::DATA_DIR.name, directory.path().join("data").display().to_string()),
        (config::RUN_DIR.name, directory.path().join("run").display().to_string()),
        (config::SANDBOX_BACKEND.name, "sim".to_owned()),
        (config::HOST_NAME.name, "test-host".to_owned()),
        (config::HOST_MEMORY_BYTES.name, "1G".to_owned()),
    ]);
    HostConfig::read(&environment).expect("a configuration without problems")
}

impl Host {
    /// Starts one on a backend of the test.
    pub(crate) fn start(config: HostConfig, backend: Arc<dyn Backend>) -> Self {
        Self::spawn(|token| cloister_host::run_with(config, vec![backend], token))
    }

    /// Starts one on the backends that it opens itself.
    pub(crate) fn start_real(config: HostConfig) -> Self {
        Self::spawn(|token| cloister_host::run(config, token))
    }

    fn spawn<F>(run: impl FnOnce(CancellationToken) -> F) -> Self
    where
        F: Future<Output = Result<(), HostError>> + Send + 'static,
    {
        let (tasks, shutdown) = (TaskRegistry::new(), CancellationToken::new());
        let (report, ended) = oneshot::channel();
        let running = run(shutdown.clone());
        let task = tasks.spawn(AGENT, async move {
            let _ = report.send(running.await);
            Ok::<(), std::convert::Infallible>(())
        });
        Self { shutdown, ended, task, _tasks: tasks }
    }

    /// Ends it at whatever it is doing.
    pub(crate) async fn kill(self) {
        self.task.abort();
        until("the agent is gone", || self.task.is_finished()).await;
    }

    /// Stops it as SIGTERM does.
    pub(crate) async fn stop(self) -> Result<(), HostError> {
        self.shutdown.cancel();
        self.ended().await
    }

    /// Stops it, and ends the link as a coordinator does when the host has said its last.
    pub(crate) async fn stop_with(self, mut link: LinkPeer) -> Result<(), HostError> {
        let (ended, ()) = tokio::join!(self.stop(), async move { while link.take().await.is_some() {} });
        ended
    }

    /// Waits until it has ended by itself.
    pub(crate) async fn ended(self) -> Result<(), HostError> {
        tokio::time::timeout(SOON, self.ended).await.expect("it ends soon").expect("it reports")
    }
}

pub(crate) fn create(sandbox_id: &SandboxId) -> CreateSandbox {
    CreateSandbox {
        sandbox_id: sandbox_id.to_string(),
        image: "host".to_owned(),
        hostname: "box".to_owned(),
        ..Default::default()
    }
}

pub(crate) fn start(exec_id: &ExecId, argv: &[&str], stdin: bool) -> StartExec {
    let spec = cloister_api::common::ExecSpec {
        argv: argv.iter().map(|text| (*text).to_owned()).collect(),
        stdin,
        ..Default::default()
    };
    StartExec {
        exec_id: exec_id.to_string(),
        request_id: format!("request-{exec_id}"),
        spec: spec.into(),
        ..Default::default()
    }
}

/// Waits until a condition holds.
pub(crate) async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = tokio::time::Instant::now() + SOON;
    while !holds() {
        assert!(tokio::time::Instant::now() < deadline, "{what}: not within {SOON:?}");
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    }
}
