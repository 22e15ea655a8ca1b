//! What this host can do, found by making a sandbox the way every other is made.
//!
//! The outcome is kept in `<data>/probe-<kind>.json` for this very guest binary (and `runsc`) under this very boot, so that a restarted host
//! agent need not try again; a failure is not kept, so that a remedy shows at once.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use cloister_types::{
    BackendKind, ByteCount, Capability, CpuMillis, ExecId, ExecSpec, ExitReason, IsolationFact, Limits,
    SandboxId, SessionId,
};
use serde::{Deserialize, Serialize};

use super::{LocalBackend, chain};
use crate::backend::{Backend, Sandbox, SandboxError, SandboxSpec};
use crate::disk::DiskKind;
use crate::guest_binary;
use crate::intent::{read_record, write_record};

/// How long the whole trial may take.
const DEADLINE: Duration = Duration::from_secs(45);
/// How long its one command may take.
const COMMAND_DEADLINE: Duration = Duration::from_secs(10);

#[derive(Serialize, Deserialize)]
struct ProbeRecord {
    guest_digest: String,
    boot_id: String,
    /// Of the `runsc` that was tried.
    #[serde(default)]
    runsc: Option<FileIdentity>,
    capabilities: Vec<Capability>,
}

/// By what a program that was replaced is told from the one before.
#[derive(PartialEq, Eq, Serialize, Deserialize)]
struct FileIdentity {
    path: PathBuf,
    bytes: u64,
    modified: SystemTime,
}

impl FileIdentity {
    fn of(path: &Path) -> Option<Self> {
        let metadata = std::fs::metadata(path).ok()?;
        Some(Self { path: path.to_path_buf(), bytes: metadata.len(), modified: metadata.modified().ok()? })
    }
}

pub(super) async fn probe(backend: &LocalBackend, kind: BackendKind) -> Vec<Capability> {
    let inner = &backend.inner;
    let file = inner.paths().data_dir.join(format!("probe-{kind}.json"));
    let runsc = inner.config.runsc.as_deref().filter(|_| kind == BackendKind::Gvisor);
    let identity = runsc.and_then(FileIdentity::of);
    if let Ok(Some(kept)) = read_record::<ProbeRecord>(&file)
        && kept.guest_digest == guest_binary::digest()
        && kept.boot_id == inner.boot_id
        && kept.runsc == identity
    {
        return kept.capabilities;
    }
    let session_id = SessionId::generate();
    let started = Instant::now();
    let outcome = match tokio::time::timeout(DEADLINE, try_sandbox(backend, kind, &session_id)).await {
        Ok(outcome) => outcome,
        Err(_) => Err(SandboxError::failed("probe", format!("it took longer than {} s", DEADLINE.as_secs()))),
    };
    if let Err(error) = backend.remove(&session_id).await {
        tracing::warn!(%session_id, error = %chain(&error), "the probe's session is still here");
    }
    let mut capabilities = capabilities(backend, kind, &outcome, started.elapsed());
    if let Some(runsc) = runsc {
        capabilities.push(version(runsc).await);
    }
    if outcome.is_ok() {
        let record = ProbeRecord {
            guest_digest: guest_binary::digest().to_owned(),
            boot_id: inner.boot_id.clone(),
            runsc: identity,
            capabilities: capabilities.clone(),
        };
        if let Err(error) = write_record(&file, &record, false) {
            tracing::warn!(error = %chain(&error), "the probe's outcome cannot be kept");
        }
    }
    capabilities
}

async fn try_sandbox(
    backend: &LocalBackend,
    kind: BackendKind,
    session_id: &SessionId,
) -> Result<Vec<IsolationFact>, SandboxError> {
    let spec = SandboxSpec {
        session_id: session_id.clone(),
        sandbox_id: SandboxId::generate(),
        backend: kind,
        image: "host".to_owned(),
        limits: Limits {
            memory: ByteCount::mib(64),
            cpus: CpuMillis(1000),
            pids: 32,
            disk: ByteCount::mib(16),
        },
        hostname: "probe".to_owned(),
    };
    let created = backend.create(&spec).await?;
    let outcome = run_true(created.sandbox.as_ref()).await;
    created.sandbox.stop(Duration::ZERO).await?;
    outcome.map(|()| created.facts)
}

/// Asks a `runsc` for its version: `runsc version release-20240729.0` is its first line.
async fn version(runsc: &Path) -> Capability {
    const NAME: &str = "gvisor.runsc";
    let asked = tokio::process::Command::new(runsc).arg("--version").output();
    let output = match tokio::time::timeout(COMMAND_DEADLINE, asked).await {
        Ok(Ok(output)) => output,
        Ok(Err(error)) => return Capability::failed(NAME, error.to_string(), "install `runsc` again"),
        Err(_) => return Capability::failed(NAME, "it did not say its version", "install `runsc` again"),
    };
    let text = String::from_utf8_lossy(&output.stdout);
    let version = text.lines().next().unwrap_or_default().trim_start_matches("runsc version ").trim();
    Capability::ok(NAME, format!("{version} at `{}`", runsc.display()))
}

async fn run_true(sandbox: &dyn Sandbox) -> Result<(), SandboxError> {
    let spec = ExecSpec { argv: vec!["/bin/true".to_owned()], ..ExecSpec::default() };
    let exec_id = ExecId::generate();
    sandbox.start_exec(&exec_id, exec_id.as_str(), &spec).await?;
    let record = sandbox.wait_exec(&exec_id, COMMAND_DEADLINE).await?;
    match record.exit {
        Some(exit) if exit.reason == ExitReason::Exited && exit.code == 0 => Ok(()),
        Some(exit) => Err(SandboxError::failed(
            "run `/bin/true`",
            format!("it ended as {:?} with code {} {}", exit.reason, exit.code, exit.message),
        )),
        None => Err(SandboxError::failed("run `/bin/true`", "it did not end within its deadline")),
    }
}

fn capabilities(
    backend: &LocalBackend,
    kind: BackendKind,
    outcome: &Result<Vec<IsolationFact>, SandboxError>,
    elapsed: Duration,
) -> Vec<Capability> {
    let inner = &backend.inner;
    let mut all = vec![match outcome {
        Ok(_) => Capability::ok(
            format!("backend.{kind}"),
            format!("made a sandbox and ran `/bin/true` in it in {} ms", elapsed.as_millis()),
        ),
        Err(error) => Capability::failed(format!("backend.{kind}"), chain(error), remedy(error)),
    }];
    match &inner.cgroups {
        Ok(driver) => all.extend(driver.probe()),
        Err(reason) => all.push(Capability::failed(
            "cgroup.memory",
            reason.clone(),
            "mount control groups with the memory, cpu and pids controllers",
        )),
    }
    all.extend(inner.disk.probes().iter().cloned());
    // What is read on gVisor is the sentry's, and says nothing about the host.
    if let Ok(facts) = outcome
        && kind == BackendKind::Namespace
    {
        all.extend(facts.iter().filter_map(fact_capability));
    }
    if inner.disk.kind() == Some(DiskKind::Loop)
        && let Some(quota) =
            all.iter_mut().find(|capability| capability.name == "disk.quota" && !capability.is_ok())
    {
        // Loop images are better and work: a missing quota is nothing to repair.
        *quota = Capability::not_applicable("disk.quota", format!("{}; `disk.loop` is used", quota.detail));
    }
    all
}

/// Turns a fact that was read inside the probe's sandbox into the capability that it proves.
fn fact_capability(fact: &IsolationFact) -> Option<Capability> {
    let is_zero = fact.value.is_empty() || fact.value == "0";
    let (name, remedy) = match fact.name.as_str() {
        "landlock_abi" => ("landlock", "boot a kernel of 5.13 or later with `landlock` in its list of LSMs"),
        "seccomp" | "seccomp_mode" => ("seccomp", "boot a kernel with CONFIG_SECCOMP_FILTER"),
        "no_new_privs" | "no_new_privileges" => {
            ("no_new_privileges", "boot a kernel that has it (3.5 or later)")
        }
        _ => return None,
    };
    let detail = format!("read inside the probe's sandbox: {} {}", fact.name, fact.value);
    Some(if is_zero { Capability::failed(name, detail, remedy) } else { Capability::ok(name, detail) })
}

fn remedy(error: &SandboxError) -> &'static str {
    let text = chain(error);
    if !rustix::process::geteuid().is_root() {
        "run the host agent as root"
    } else if text.contains("landlock") {
        "boot a kernel of 5.13 or later with `landlock` in its list of LSMs"
    } else if text.contains("disk limit") || text.contains("mkfs.ext4") {
        "install e2fsprogs and load the `loop` module"
    } else if text.contains("runsc") {
        "install a `runsc` of 2024 or later: `just gvisor` builds one, or name it with `CLOISTER_RUNSC`"
    } else if text.contains("control groups") {
        "mount control groups with the memory, cpu and pids controllers"
    } else if text.contains("namespace") || text.contains("clone") {
        "allow user namespaces: `sysctl user.max_user_namespaces` above 0"
    } else {
        "see `shim.log` and the kernel's log; the message names the step"
    }
}
