//! The shims that this process started, and the sandboxes that it is making.
//!
//! Whoever starts a process has to wait for it, or it stays as a zombie. A handle may be dropped and its sandbox
//! adopted by another backend of the same process, so the children are kept here, by sandbox, and not in the handles.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Child;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cloister_types::SandboxId;

static CHILDREN: Mutex<BTreeMap<SandboxId, Child>> = Mutex::new(BTreeMap::new());
static MAKING: Mutex<BTreeSet<SandboxId>> = Mutex::new(BTreeSet::new());

/// A sandbox that is being made, while this lives.
pub(super) struct Making(SandboxId);

impl Making {
    /// Counts a sandbox in, before its directory is made.
    pub(super) fn begin(sandbox_id: &SandboxId) -> Self {
        making().insert(sandbox_id.clone());
        Self(sandbox_id.clone())
    }
}

impl Drop for Making {
    fn drop(&mut self) {
        making().remove(&self.0);
    }
}

/// Returns whether a sandbox is being made by this process.
pub(super) fn is_making(sandbox_id: &SandboxId) -> bool {
    making().contains(sandbox_id)
}

fn making() -> MutexGuard<'static, BTreeSet<SandboxId>> {
    MAKING.lock().unwrap_or_else(PoisonError::into_inner)
}

fn children() -> MutexGuard<'static, BTreeMap<SandboxId, Child>> {
    CHILDREN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps a shim that was just started.
pub(super) fn keep(sandbox_id: &SandboxId, child: Child) {
    children().insert(sandbox_id.clone(), child);
}

/// Keeps a sandbox's shim under the id that the sandbox has from now on.
pub(super) fn rename(from: &SandboxId, to: &SandboxId) {
    let mut children = children();
    if let Some(child) = children.remove(from) {
        children.insert(to.clone(), child);
    }
}

/// Returns whether this process started the sandbox's shim and has not waited for its end yet.
pub(super) fn has(sandbox_id: &SandboxId) -> bool {
    children().contains_key(sandbox_id)
}

/// Kills a sandbox's shim, if it is a child that lives.
pub(super) fn kill(sandbox_id: &SandboxId) {
    if let Some(child) = children().get_mut(sandbox_id) {
        // It may have ended by itself, which is what was wanted.
        let _ = child.kill();
    }
}

/// Waits for the end of a sandbox's shim, so that no zombie is left; returns whether there is none now.
pub(super) fn wait(sandbox_id: &SandboxId, deadline: Instant) -> bool {
    let mut pause = Duration::from_micros(200);
    loop {
        {
            let mut children = children();
            let Some(child) = children.get_mut(sandbox_id) else { return true };
            // An error means that it is no child any more.
            if !matches!(child.try_wait(), Ok(None)) {
                children.remove(sandbox_id);
                return true;
            }
        }
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}
