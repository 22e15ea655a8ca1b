//! What differs between the kernels that a sandbox can run on; everything else of its life is the same.

use std::path::Path;

use cloister_guest::shim::config::KernelConfig;
use cloister_types::{BackendKind, Limits};

use crate::backend::SandboxError;
use crate::cgroup::GroupLimits;

/// What a sentry and its gofer take beside the programs: 46 MiB of proportional set size were measured at rest, and file
/// caches of the gofer come on top. The limit of the group is this much above the sandbox's own.
const SENTRY_MEMORY_BYTES: u64 = 64 * 1024 * 1024;
/// Threads of the host that stand for one of a sandbox on gVisor at most. The sentry counts the sandbox's own; the group's
/// limit only has to hold a sentry that has gone mad, since reaching it ends the whole sandbox.
const HOST_TASKS_EACH: u32 = 8;
/// Threads of an idle sentry and gofer, many times over.
const HOST_TASKS_BASE: u32 = 512;

/// Returns the limits of a sandbox's control groups.
pub(super) fn group_limits(kind: BackendKind, limits: &Limits) -> GroupLimits {
    let plain = GroupLimits::from(limits);
    match kind {
        BackendKind::Gvisor => GroupLimits {
            work_memory_bytes: plain.work_memory_bytes.saturating_add(SENTRY_MEMORY_BYTES),
            work_pids: plain.work_pids.saturating_mul(HOST_TASKS_EACH).saturating_add(HOST_TASKS_BASE),
            ..plain
        },
        BackendKind::Namespace | BackendKind::Sim => plain,
    }
}

/// Returns the part of a shim's configuration that says which kernel to start.
///
/// # Errors
///
/// `Invalid` for a kind that is not made here, so that nothing ever gets less than was asked for.
pub(super) fn config(
    kind: BackendKind,
    runsc: Option<&Path>,
    limits: &Limits,
) -> Result<KernelConfig, SandboxError> {
    match (kind, runsc) {
        (BackendKind::Namespace, _) => Ok(KernelConfig::Host),
        (BackendKind::Gvisor, Some(runsc)) => Ok(KernelConfig::Gvisor {
            runsc: runsc.to_path_buf(),
            memory_bytes: limits.memory.0,
            pids: limits.pids,
        }),
        _ => Err(SandboxError::Invalid(format!("backend `{kind}` is not offered here"))),
    }
}
