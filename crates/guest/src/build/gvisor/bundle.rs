//! What runsc reads: the OCI bundle, and beside it what the guest agent reads.

use std::path::Path;

use rustix::io::Errno;
use serde_json::{Value, json};

use super::super::error::{BuildError, StepContext};
use super::{LINK, PLACE, SOCKET};
use crate::agent::sentry::SentryConfig;
use crate::harden::{AgentConfig, GuestKernel};
use crate::shim::config::ShimConfig;

/// What the guest agent needs until it has hardened itself: to become its own user, to name the sandbox, and to cover
/// the control groups.
const CAPABILITIES: [&str; 9] = [
    "CAP_SETUID",
    "CAP_SETGID",
    "CAP_KILL",
    "CAP_SETPCAP",
    "CAP_DAC_OVERRIDE",
    "CAP_CHOWN",
    "CAP_FOWNER",
    "CAP_SYS_ADMIN",
    "CAP_SYS_RESOURCE",
];
/// Where the keeper's root has what the bundle names.
pub(super) const ROOT: &str = "root";
pub(super) const TMP: &str = "layer-tmp";
pub(super) const GUEST: &str = "guest";
pub(super) const LISTENER: &str = "listener";
const AGENT: &str = "agent.json";
const STEP: &str = "write the bundle";
const OPEN_FILES: u64 = 65_536;
const SHM_SIZE: &str = "size=268435456";
const RUN_SIZE: &str = "size=16777216";

/// Writes `config.json` and `agent.json` into `state`.
pub(super) fn write(pids: u32, config: &ShimConfig, state: &Path) -> Result<(), BuildError> {
    let agent = SentryConfig {
        agent: AgentConfig {
            sandbox_id: config.sandbox_id.clone(),
            listener_fd: -1,
            work_join_fds: Vec::new(),
            process_count_fds: None,
            env: config.env.clone(),
            cwd: config.cwd.clone(),
            id_count: config.id_count,
            kernel: GuestKernel::Gvisor,
            defences_off: config.defences_off.clone(),
        },
        socket: format!("{PLACE}/{LINK}/{SOCKET}").into(),
        pids,
    };
    let agent = serde_json::to_value(&agent).map_err(|_| BuildError::new(STEP, Errno::INVAL))?;
    put(&state.join(AGENT), &agent)?;
    put(&state.join("config.json"), &spec(config))
}

fn put(path: &Path, value: &Value) -> Result<(), BuildError> {
    std::fs::write(path, value.to_string()).step_at(STEP, path)?;
    // The gofer reads it as the sandbox's own user.
    rustix::fs::chmod(path, rustix::fs::Mode::from_raw_mode(0o644)).step_at(STEP, path)
}

/// Returns the runtime spec. Its mounts come on top of the root's own, which the gofer serves as they are.
fn spec(config: &ShimConfig) -> Value {
    let bind = |source: &str, destination: String, mode: &str| {
        let options = ["bind", mode, "nosuid", "nodev"];
        json!({"destination": destination, "type": "bind", "source": format!("/{source}"), "options": options})
    };
    let made = |destination: &str, kind: &str, options: &[&str]| json!({"destination": destination, "type": kind, "source": kind, "options": options});
    let mapping = json!([{"containerID": 0, "hostID": config.id_base, "size": config.id_count}]);
    let limit = |kind: &str, value: u64| json!({"type": kind, "hard": value, "soft": value});
    let namespaces = ["pid", "ipc", "uts", "mount", "network", "user"].map(|kind| json!({"type": kind}));
    let sets = ["bounding", "effective", "permitted"];
    let capabilities: serde_json::Map<String, Value> =
        sets.iter().map(|set| ((*set).to_owned(), json!(CAPABILITIES))).collect();
    json!({
        "ociVersion": "1.0.2",
        "process": {
            "terminal": false,
            "user": {"uid": 0, "gid": 0},
            "args": [format!("{PLACE}/guest"), "agent", "--config", format!("{PLACE}/agent.json")],
            "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
            "cwd": "/",
            "capabilities": capabilities,
            "noNewPrivileges": true,
            "rlimits": [limit("RLIMIT_CORE", 0), limit("RLIMIT_NOFILE", OPEN_FILES)],
        },
        "root": {"path": format!("/{ROOT}"), "readonly": false},
        "hostname": config.hostname,
        "mounts": [
            made("/proc", "proc", &["nosuid", "nodev", "noexec"]),
            made("/dev", "tmpfs", &["ro", "nosuid", "mode=755", "size=65536k"]),
            made("/dev/pts", "devpts", &["nosuid", "noexec"]),
            made("/dev/shm", "tmpfs", &["nosuid", "nodev", "mode=1777", SHM_SIZE]),
            made("/run", "tmpfs", &["nosuid", "nodev", "mode=755", RUN_SIZE]),
            made("/sys", "sysfs", &["ro", "nosuid", "nodev", "noexec"]),
            made("/sys/fs/cgroup", "cgroup", &["rw", "nosuid", "nodev", "noexec"]),
            bind(GUEST, format!("{PLACE}/guest"), "ro"),
            bind(AGENT, format!("{PLACE}/agent.json"), "ro"),
            bind(LISTENER, format!("{PLACE}/{LINK}"), "rw"),
            // Without a mount there runsc puts a tmpfs of half the host's memory over an empty /tmp.
            bind(TMP, "/tmp".to_owned(), "rw"),
        ],
        "linux": {
            "namespaces": namespaces,
            "uidMappings": mapping.clone(),
            "gidMappings": mapping,
        },
    })
}
