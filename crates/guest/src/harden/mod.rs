//! What pid 1 and every exec give up before any foreign instruction runs.
//!
//! ```text
//!   builder ──memfd──▶ load_agent_config        pid 1, single-threaded
//!                      pid1_apply               once: bounding set, seccomp, capabilities, undumpable, limits
//!                      isolation_facts          read back from the kernel
//!   each exec:         prepare_exec             allocates, opens; the Landlock ruleset is made once
//!                      fork ─▶ apply_exec       cgroup, no_new_privs, Landlock, ids, capabilities
//!                              execve
//! ```
//!
//! The seccomp filter and the emptied bounding set are put up once in pid 1 and inherited, so that no exec pays for loading
//! a filter. Landlock is entered by each exec and not by pid 1, and that difference is what
//! keeps the programs from tracing pid 1 or reading its memory.
//!
//! Pid 1 has a user of its own ([`AGENT_ID`]), which no exec may be: root of the sandbox is a stranger to it.
//!
//! Invariants: what runs in an exec has no capability and cannot regain one; nothing here is skipped because a kernel
//! lacks it; a release build leaves no defence off.

pub(crate) mod exec;
mod facts;
mod landlock_domain;
mod pid1;
mod seccomp;

use std::collections::BTreeMap;
use std::os::fd::RawFd;

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

pub use self::exec::{PreparedExec, apply_exec, prepare_exec};
pub use self::facts::isolation_facts;
pub use self::landlock_domain::{REQUIRED_ABI, landlock_abi};
pub(crate) use self::pid1::{become_agent_user, close_range};
pub use self::pid1::{load_agent_config, pid1_apply};
use crate::shim::config::Defence;

/// The descriptor at which pid 1 finds its [`AgentConfig`] (a sealed memfd).
pub const CONFIG_FD: RawFd = 100;

/// The uid and gid of pid 1, reserved for it.
pub const AGENT_ID: u32 = 65_533;

/// What pid 1 is told by the builder of its sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AgentConfig {
    /// `sbx_…`
    pub sandbox_id: String,
    /// Descriptor of the unix listener (at or above 100).
    pub listener_fd: RawFd,
    /// Descriptors of the files that a forked child writes `0` to so that it joins the work's cgroups.
    pub work_join_fds: Vec<RawFd>,
    /// Descriptors of the files that hold how many processes the work has, and how many it may have.
    pub process_count_fds: Option<(RawFd, RawFd)>,
    /// Environment of every exec, before its own.
    pub env: BTreeMap<String, String>,
    /// Directory of an exec that names none.
    pub cwd: String,
    /// Number of uids and gids that exist in the sandbox: `0..id_count`.
    pub id_count: u32,
    /// The kernel below.
    #[serde(default)]
    pub kernel: GuestKernel,
    /// Defences left off; empty in a release build.
    pub defences_off: Vec<Defence>,
}

/// The kernel that pid 1 finds below itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GuestKernel {
    /// The host's, of which every defence is required.
    #[default]
    Host,
    /// gVisor's, which has no Landlock and hides what the host knows.
    Gvisor,
}

impl AgentConfig {
    /// Returns whether `defence` is left off.
    pub(crate) fn is_off(&self, defence: Defence) -> bool {
        self.defences_off.contains(&defence)
    }

    /// Returns whether each exec enters a Landlock domain.
    pub(crate) fn has_landlock(&self) -> bool {
        self.kernel == GuestKernel::Host && !self.is_off(Defence::Landlock)
    }
}

/// Why pid 1 could not read its configuration or harden itself.
#[derive(Debug, thiserror::Error)]
#[error("{step} failed")]
pub struct HardenError {
    /// The operation, as a verb and its object.
    pub step: &'static str,
    /// What the kernel or the parser said.
    #[source]
    pub source: Box<dyn std::error::Error + Send + Sync>,
}

impl HardenError {
    fn new(step: &'static str, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self { step, source: source.into() }
    }
}

/// Refuses leaving defences off in a build that is not for tests.
pub(crate) fn check_defences_off(off: &[Defence]) -> Result<(), Errno> {
    if cfg!(debug_assertions) || off.is_empty() { Ok(()) } else { Err(Errno::PERM) }
}

/// Returns the error number of the system call that has just failed.
fn last_errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}
