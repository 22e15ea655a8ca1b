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
use cloister_sandbox::local::{LocalBackend, LocalConfig};
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
    if config.backend == BackendChoice::Only(BackendKind::Sim) {
        // It is not among what `auto` picks from.
        let machine = SimMachine::in_real_time();
        machine.set_spool_max_bytes(config.exec_spool.0);
        return Ok(vec![Arc::new(SimBackend::new(machine))]);
    }
    let mut local = LocalConfig::new(config.paths.clone());
    local.spool_max_bytes = config.exec_spool.0;
    local.session_spool_max_bytes = config.session_spool.0;
    local.warm_sandboxes = config.warm_sandboxes;
    local.offers_namespace = config.backend != BackendChoice::Only(BackendKind::Gvisor);
    local.runsc.clone_from(&config.runsc);
    Ok(vec![Arc::new(LocalBackend::open(local).map_err(|source| HostError::OpenBackend { source })?)])
}

/// Says why a kind is not among those that are offered.
fn not_offered(kind: BackendKind) -> Capability {
    let (detail, remedy) = match kind {
        BackendKind::Gvisor => (
            "there is no `runsc`, or `CLOISTER_SANDBOX_BACKEND` names another backend",
            "for stronger isolation build it with `just gvisor`, or name it with `CLOISTER_RUNSC`",
        ),
        BackendKind::Namespace | BackendKind::Sim => ("`CLOISTER_SANDBOX_BACKEND` names another backend", ""),
    };
    Capability { remedy: remedy.to_owned(), ..Capability::not_applicable(capability_name(kind), detail) }
}

fn capability_name(kind: BackendKind) -> String {
    format!("backend.{kind}")
}

impl Backends {
    pub(crate) fn new(all: Vec<Arc<dyn Backend>>) -> Self {
        Self { all, capabilities: watch::Sender::new(Vec::new()) }
    }

    /// Returns all of them.
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
        self.offered().iter().all(|(_, kind)| works(&capabilities, *kind))
    }

    /// Returns every way to isolate that this host offers, strongest first.
    fn offered(&self) -> Vec<(&Arc<dyn Backend>, BackendKind)> {
        let each =
            |backend| Backend::kinds(Arc::as_ref(backend)).into_iter().map(move |kind| (backend, kind));
        let mut all: Vec<_> = self.all.iter().flat_map(each).collect();
        all.sort_by_key(|(_, kind)| std::cmp::Reverse(*kind));
        all
    }

    /// Probes every backend and tells who watches when something changed.
    pub(crate) async fn probe(&self) {
        let mut now: Vec<Capability> = Vec::new();
        for (backend, kind) in self.offered() {
            for found in self.probe_one(backend.as_ref(), kind).await {
                // What several kinds need (control groups, disks) is found once.
                if now.iter().all(|known| known.name != found.name) {
                    now.push(found);
                }
            }
        }
        let offers = |kind: BackendKind| self.offered().iter().any(|(_, offered)| *offered == kind);
        if !now.is_empty() && !offers(BackendKind::Sim) {
            for kind in BackendKind::ALL.into_iter().rev().filter(|kind| *kind > BackendKind::Sim) {
                if !offers(kind) {
                    now.push(not_offered(kind));
                }
            }
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

    async fn probe_one(&self, backend: &dyn Backend, kind: BackendKind) -> Vec<Capability> {
        let started = tokio::time::Instant::now();
        let capabilities = match tokio::time::timeout(PROBE_DEADLINE, backend.probe(kind)).await {
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

    /// Returns the kind that a request names; `None` for empty or `auto`.
    ///
    /// # Errors
    ///
    /// There is no such kind.
    pub(crate) fn named(requested: &str) -> Result<Option<BackendKind>, Refusal> {
        match requested {
            "" | "auto" => Ok(None),
            word => word.parse().map(Some).map_err(Refusal::invalid),
        }
    }

    /// Returns the backend that a request names and the kind to make; empty or `auto` is the strongest that works.
    ///
    /// # Errors
    ///
    /// None works, the named one does not, or this host does not serve it: the reason is in the message.
    pub(crate) fn pick(&self, requested: &str) -> Result<(&Arc<dyn Backend>, BackendKind), Refusal> {
        let capabilities = self.capabilities.borrow();
        let offered = self.offered();
        let Some(kind) = Self::named(requested)? else {
            return offered.into_iter().find(|(_, kind)| works(&capabilities, *kind)).ok_or_else(|| {
                Refusal::invalid(format!("no backend of this host works: {}", failures(&capabilities)))
            });
        };
        let found = offered.iter().find(|(_, offered)| *offered == kind).copied().ok_or_else(|| {
            let served: Vec<&str> = offered.iter().map(|(_, kind)| kind.as_str()).collect();
            Refusal::invalid(format!(
                "this host does not serve backend `{kind}`, only `{}`",
                served.join("`, `")
            ))
        })?;
        if works(&capabilities, kind) {
            Ok(found)
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
