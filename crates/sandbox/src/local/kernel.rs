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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_made_as_another_kind_than_asked_for() {
        let runsc = Path::new("/runsc");
        let kind = |kind, runsc| config(kind, runsc, &Limits::DEFAULT);
        assert_eq!(kind(BackendKind::Namespace, Some(runsc)).unwrap(), KernelConfig::Host);
        let gvisor = KernelConfig::Gvisor {
            runsc: runsc.into(),
            memory_bytes: Limits::DEFAULT.memory.0,
            pids: Limits::DEFAULT.pids,
        };
        assert_eq!(kind(BackendKind::Gvisor, Some(runsc)).unwrap(), gvisor);
        for refused in [kind(BackendKind::Gvisor, None), kind(BackendKind::Sim, Some(runsc))] {
            assert!(matches!(refused, Err(SandboxError::Invalid(_))), "{refused:?}");
        }
    }

    #[test]
    fn a_sentry_has_room_beside_the_sandboxs_own_limit() {
        let plain = group_limits(BackendKind::Namespace, &Limits::DEFAULT);
        assert_eq!(plain, GroupLimits::from(&Limits::DEFAULT));
        let gvisor = group_limits(BackendKind::Gvisor, &Limits::DEFAULT);
        assert_eq!(gvisor.work_memory_bytes, plain.work_memory_bytes + SENTRY_MEMORY_BYTES);
        assert!(gvisor.work_pids > plain.work_pids && gvisor.cpu_millis == plain.cpu_millis);
    }
}
