//! What the host agent tells a shim, and what the shim answers when the sandbox is up: the seam between the
//! `sandbox` crate and this one. JSON, read once; an unknown key is an error.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::build::gvisor;

/// Name of a shim's configuration in its sandbox's directory.
pub const CONFIG_FILE: &str = "shim.json";
/// Name of the guest agent's socket in its sandbox's directory, on the host's kernel.
pub(crate) const GUEST_SOCKET: &str = "guest.sock";

/// Everything a shim needs to build one sandbox. Paths are absolute and on the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShimConfig {
    /// `sbx_…`
    pub sandbox_id: String,
    /// The name the sandbox sees as its own.
    pub hostname: String,
    /// Holds `lock`, `exit.json`, `guest.sock` and the shim's mount points.
    pub sandbox_dir: PathBuf,
    /// Holds a directory per exec.
    pub exec_dir: PathBuf,
    /// Where the shim listens.
    pub socket: PathBuf,
    /// First uid and gid outside of the sandbox's own range.
    pub id_base: u32,
    /// Size of the range.
    pub id_count: u32,
    /// Where the work and the guest agent are accounted.
    pub cgroup: CgroupConfig,
    /// A prepared network namespace to join; a fresh one with loopback only when `None`.
    pub netns: Option<PathBuf>,
    /// The writable layer.
    pub disk: DiskConfig,
    /// What the root filesystem is.
    pub root: RootConfig,
    /// Which kernel the programs run on.
    #[serde(default)]
    pub kernel: KernelConfig,
    /// Environment of every exec, before its own.
    pub env: BTreeMap<String, String>,
    /// Directory of an exec that names none.
    pub cwd: String,
    /// Most bytes of output kept for each exec.
    pub spool_max_bytes: u64,
    /// Most bytes of output kept for all execs together.
    pub session_spool_max_bytes: u64,
    /// Most execs kept, running and ended.
    pub execs_max: u32,
    /// Nobody's yet: it may be given an identity once, by `ClaimSandbox`, and runs nothing before.
    #[serde(default)]
    pub warm: bool,
    /// Defences left off, for the control of an attack. A build without debug assertions refuses any.
    #[serde(default)]
    pub defences_off: Vec<Defence>,
    /// What fault points look for. A build without debug assertions refuses any.
    #[serde(default)]
    pub fault_file: Option<PathBuf>,
}

impl ShimConfig {
    /// Returns where the guest agent listens.
    pub(crate) fn guest_socket(&self) -> PathBuf {
        match self.kernel {
            KernelConfig::Host => self.sandbox_dir.join(GUEST_SOCKET),
            KernelConfig::Gvisor { .. } => gvisor::guest_socket(&self.sandbox_dir),
        }
    }
}

impl KernelConfig {
    /// Returns the wait status of what the sandbox stands and falls with, from that of the shim's child: a keeper, which is
    /// pid 1 of a namespace and so cannot die of the sentry's signal, returns what a shell would.
    pub(crate) fn pid1_status(&self, status: i32) -> i32 {
        match self {
            Self::Gvisor { .. } if libc::WIFEXITED(status) && libc::WEXITSTATUS(status) > 128 => {
                libc::WEXITSTATUS(status) - 128
            }
            _ => status,
        }
    }
}

/// The cgroups of one sandbox, made by the host agent: siblings for the guest agent and for its work.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CgroupConfig {
    /// Files a process writes `0` to so that it joins the guest agent's group (one a hierarchy).
    pub agent_join: Vec<PathBuf>,
    /// The same for the work's group.
    pub work_join: Vec<PathBuf>,
    /// File with a line `oom_kill N` for the work (`memory.oom_control` on v1, `memory.events` on v2).
    pub oom_file: Option<PathBuf>,
    /// File with a line `max N` for the work (`pids.events`).
    pub pids_file: Option<PathBuf>,
}

/// How the writable layer is limited.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum DiskConfig {
    /// An ext4 image that the shim attaches to a loop device (autoclear) and mounts in its own mount namespace.
    Loop {
        /// The image; exclusively this session's.
        image: PathBuf,
    },
    /// A directory whose size the host's filesystem already limits (project quota).
    Directory {
        /// The directory.
        path: PathBuf,
    },
    /// Memory-backed; gone with the sandbox.
    Tmpfs {
        /// Its size.
        bytes: u64,
    },
}

/// The root filesystem.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum RootConfig {
    /// This machine's `/usr`, read-only, and a synthesised `/etc`; `/home`, `/root`, `/var`, `/tmp`, `/workspace` writable.
    Host,
}

/// Which kernel the sandbox's programs run on.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum KernelConfig {
    /// The host's, behind namespaces.
    #[default]
    Host,
    /// gVisor's: a process of its own on the host.
    Gvisor {
        /// The program that starts it.
        runsc: PathBuf,
        /// What the sandbox sees as its memory; the limit is the cgroup's.
        memory_bytes: u64,
        /// Most processes of the work.
        pids: u32,
    },
}

/// One defence that a control experiment can leave off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Defence {
    /// The system call filter.
    Seccomp,
    /// The Landlock rules on each exec.
    Landlock,
    /// Dropping capabilities.
    Capabilities,
    /// No new privileges.
    NoNewPrivileges,
    /// Building the mount tree before the user namespace.
    LockedMounts,
    /// The memory limit's cgroup.
    MemoryCgroup,
    /// The process limit's cgroup.
    PidsCgroup,
    /// The network namespace.
    NetworkNamespace,
    /// The process namespace.
    PidNamespace,
    /// The user namespace: root inside is root of the machine.
    UserNamespace,
    /// The flags `nosuid` and `nodev` of the mounts that can be written.
    MountFlags,
    /// The masks over parts of `/proc`.
    ProcMasks,
    /// The bound on kept output.
    SpoolBound,
    /// The bound on what the guest agent may send as one frame.
    FrameBound,
    /// The disk limit.
    DiskLimit,
    /// What the kernel counts for a user is counted for the sandbox's own, not for the machine's root.
    OwnAccount,
}

impl Defence {
    /// Every defence, for tests that want a control of each.
    pub const ALL: [Self; 16] = [
        Self::Seccomp,
        Self::Landlock,
        Self::Capabilities,
        Self::NoNewPrivileges,
        Self::LockedMounts,
        Self::MemoryCgroup,
        Self::PidsCgroup,
        Self::NetworkNamespace,
        Self::PidNamespace,
        Self::UserNamespace,
        Self::MountFlags,
        Self::ProcMasks,
        Self::SpoolBound,
        Self::FrameBound,
        Self::DiskLimit,
        Self::OwnAccount,
    ];
}

/// The one line a shim prints when it has finished starting, for better or worse.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "result", rename_all = "snake_case")]
pub enum ShimReport {
    /// Pid 1 answered and the socket serves.
    Ready {
        /// Name and value of each isolation fact, read by pid 1 after its hardening.
        facts: Vec<(String, String)>,
        /// Step and microseconds.
        timings: Vec<(String, u64)>,
    },
    /// Nothing runs and nothing is left.
    Failed {
        /// The step that failed.
        step: String,
        /// Its error.
        message: String,
    },
}

/// What `exit.json` in the sandbox directory holds once pid 1 has ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxExitRecord {
    /// `stopped`, `out_of_memory`, `killed`, `crashed`, or `disk_error`: however it ended, files of it were lost.
    pub reason: String,
    /// One sentence for people.
    pub message: String,
    /// Raw wait status of pid 1.
    pub status: i32,
    /// Milliseconds since the Unix epoch.
    pub exited_unix_ms: u64,
}

#[cfg(test)]
mod tests {
    use super::Defence;

    #[test]
    fn the_list_of_defences_has_each_of_them() {
        // The parser knows every variant, and names them when it is given another.
        let error = serde_json::from_str::<Defence>("\"\"").unwrap_err().to_string();
        let known: Vec<&str> = error.split('`').skip(3).step_by(2).collect();
        let listed: Vec<String> = Defence::ALL
            .iter()
            .map(|defence| serde_json::to_string(defence).unwrap().trim_matches('"').to_owned())
            .collect();
        assert_eq!(listed, known, "{error}");
    }
}
