//! Which backends this host has, and what their probes found.
//!
//! A probe makes a sandbox through the production path and runs a command in it, which is the only proof that
//! counts. A backend keeps what passed for this program and this boot; a failure is never kept and is tried again
//! while the agent runs, since an operator may have removed its cause.
//!
//! A host without a working backend registers all the same: its capabilities say what is missing, and it refuses
//! to make sandboxes with that reason. Nothing falls back to a weaker backend.

use std::sync::Arc;
use std::time::Duration;

use cloister_sandbox::backend::Backend;
use cloister_sandbox::namespace::{NamespaceBackend, NamespaceConfig};
use cloister_sandbox::sim::{SimBackend, SimMachine};
use cloister_types::{BackendKind, Capability, SessionId};
use tokio::sync::watch;

use crate::HostError;
use crate::config::{BackendChoice, HostConfig};
use crate::refusal::Refusal;

/// Longest time a probe may take before it counts as failed.
const PROBE_DEADLINE: Duration = Duration::from_secs(60);
/// Pause between probes of a backend that failed.
pub(crate) const PROBE_AGAIN: Duration = Duration::from_secs(60);

/// The backends of this host, strongest first, and what they can do.
pub(crate) struct Backends {
    all: Vec<Arc<dyn Backend>>,
    capabilities: watch::Sender<Vec<Capability>>,
}

/// Opens the backends that a host is configured for. Blocks.
pub(crate) fn open(config: &HostConfig) -> Result<Vec<Arc<dyn Backend>>, HostError> {
    let kind = match config.backend {
        // The strongest of this version. `sim` is not among what `auto` picks from.
        BackendChoice::Auto => BackendKind::Namespace,
        BackendChoice::Only(kind) => kind,
    };
    let backend: Arc<dyn Backend> = match kind {
        BackendKind::Namespace => {
            let mut namespace = NamespaceConfig::new(config.paths.clone());
            namespace.spool_max_bytes = config.exec_spool.0;
            namespace.session_spool_max_bytes = config.session_spool.0;
            namespace.warm_sandboxes = config.warm_sandboxes;
            let open = NamespaceBackend::open(namespace);
            Arc::new(open.map_err(|source| HostError::OpenBackend { backend: kind, source })?)
        }
        BackendKind::Sim => {
            let machine = SimMachine::in_real_time();
            machine.set_spool_max_bytes(config.exec_spool.0);
            Arc::new(SimBackend::new(machine))
        }
    };
    Ok(vec![backend])
}

fn capability_name(kind: BackendKind) -> String {
    format!("backend.{kind}")
}

impl Backends {
    pub(crate) fn new(mut all: Vec<Arc<dyn Backend>>) -> Self {
        all.sort_by_key(|backend| std::cmp::Reverse(backend.kind()));
        Self { all, capabilities: watch::Sender::new(Vec::new()) }
    }

    /// Returns all of them, strongest first.
    pub(crate) fn all(&self) -> &[Arc<dyn Backend>] {
        &self.all
    }

    /// Returns what the host can do, now and on every change.
    pub(crate) fn capabilities(&self) -> watch::Receiver<Vec<Capability>> {
        self.capabilities.subscribe()
    }

    /// Returns whether every backend works.
    pub(crate) fn all_work(&self) -> bool {
        let capabilities = self.capabilities.borrow();
        self.all.iter().all(|backend| works(&capabilities, backend.kind()))
    }

    /// Probes every backend and tells who watches when something changed.
    pub(crate) async fn probe(&self) {
        let mut now = Vec::new();
        for backend in &self.all {
            now.extend(self.probe_one(backend.as_ref()).await);
        }
        if now.is_empty() {
            now.push(Capability::failed(
                "backend.none",
                "no backend was opened",
                "set `CLOISTER_SANDBOX_BACKEND` to one that this machine can run",
            ));
        }
        self.capabilities.send_if_modified(|capabilities| {
            let changed = *capabilities != now;
            *capabilities = now;
            changed
        });
    }

    async fn probe_one(&self, backend: &dyn Backend) -> Vec<Capability> {
        let kind = backend.kind();
        let started = tokio::time::Instant::now();
        let capabilities = match tokio::time::timeout(PROBE_DEADLINE, backend.probe()).await {
            Ok(capabilities) if !capabilities.is_empty() => capabilities,
            Ok(_) => {
                vec![Capability::failed(capability_name(kind), "the probe found nothing", "report this")]
            }
            Err(_) => vec![Capability::failed(
                capability_name(kind),
                format!("the probe did not end within {} seconds", PROBE_DEADLINE.as_secs()),
                "look at the log of the host agent for the step that hangs",
            )],
        };
        let elapsed_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
        if works(&capabilities, kind) {
            tracing::info!(backend = %kind, elapsed_ms, "backend works");
        } else {
            for failed in capabilities.iter().filter(|entry| !entry.is_ok()) {
                tracing::warn!(
                    backend = %kind, capability = failed.name, detail = failed.detail, remedy = failed.remedy,
                    "backend does not work here"
                );
            }
        }
        capabilities
    }

    /// Returns the backend that a request names; empty or `auto` is the strongest that works.
    ///
    /// # Errors
    ///
    /// None works, the named one does not, or this host does not serve it: the reason is in the message.
    pub(crate) fn pick(&self, requested: &str) -> Result<&Arc<dyn Backend>, Refusal> {
        let capabilities = self.capabilities.borrow();
        if matches!(requested, "" | "auto") {
            return self.all.iter().find(|backend| works(&capabilities, backend.kind())).ok_or_else(|| {
                Refusal::invalid(format!("no backend of this host works: {}", failures(&capabilities)))
            });
        }
        let kind: BackendKind = requested.parse().map_err(Refusal::invalid)?;
        let backend = self.all.iter().find(|backend| backend.kind() == kind).ok_or_else(|| {
            let served: Vec<&str> = self.all.iter().map(|backend| backend.kind().as_str()).collect();
            Refusal::invalid(format!(
                "this host does not serve backend `{kind}`, only `{}`",
                served.join("`, `")
            ))
        })?;
        if works(&capabilities, kind) {
            Ok(backend)
        } else {
            Err(Refusal::invalid(format!(
                "backend `{kind}` does not work on this host: {}",
                failures(&capabilities)
            )))
        }
    }

    /// Returns the backend that keeps something of this session, with its sandbox if one runs.
    pub(crate) async fn keeper(&self, session_id: &SessionId) -> Result<Option<&Arc<dyn Backend>>, Refusal> {
        if let [only] = self.all.as_slice() {
            return Ok(Some(only));
        }
        for backend in &self.all {
            let sessions = backend.sessions().await?;
            if sessions.iter().any(|(kept, _)| kept == session_id) {
                return Ok(Some(backend));
            }
        }
        Ok(None)
    }
}

fn works(capabilities: &[Capability], kind: BackendKind) -> bool {
    let name = capability_name(kind);
    capabilities.iter().any(|entry| entry.name == name && entry.is_ok())
}

fn failures(capabilities: &[Capability]) -> String {
    let failed: Vec<String> = capabilities
        .iter()
        .filter(|entry| entry.status == cloister_types::CapabilityStatus::Failed)
        .map(|entry| match entry.remedy.as_str() {
            "" => format!("{}: {}", entry.name, entry.detail),
            remedy => format!("{}: {} ({remedy})", entry.name, entry.detail),
        })
        .collect();
    if failed.is_empty() { "it was not probed yet".to_owned() } else { failed.join("; ") }
}
