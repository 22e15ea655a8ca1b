//! Control groups of a test: siblings for agent and work with one limit on the work, by version 1 or 2.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use cloister_guest::shim::config::{CgroupConfig, Defence};

use crate::sandbox::wait_until;

/// What is limited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Limit {
    Processes(u32),
    MemoryBytes(u64),
}

impl Limit {
    fn controller(self) -> &'static str {
        match self {
            Self::Processes(_) => "pids",
            Self::MemoryBytes(_) => "memory",
        }
    }

    fn defence(self) -> Defence {
        match self {
            Self::Processes(_) => Defence::PidsCgroup,
            Self::MemoryBytes(_) => Defence::MemoryCgroup,
        }
    }

    fn files(self, is_v2: bool) -> Vec<(&'static str, String)> {
        match (self, is_v2) {
            (Self::Processes(count), _) => vec![("pids.max", count.to_string())],
            (Self::MemoryBytes(bytes), true) => {
                vec![("memory.max", bytes.to_string()), ("memory.swap.max", "0".to_owned())]
            }
            (Self::MemoryBytes(bytes), false) => vec![
                ("memory.limit_in_bytes", bytes.to_string()),
                ("memory.memsw.limit_in_bytes", bytes.to_string()),
            ],
        }
    }
}

/// The groups; removed when dropped, after every sandbox in them.
pub(crate) struct Cgroup {
    base: PathBuf,
    is_v2: bool,
}

impl Cgroup {
    /// Makes the groups with a limit. With version 2 there is one hierarchy for all limits, so a limit that is among
    /// `off` is not written; with version 1 the builder leaves the hierarchy away.
    pub(crate) fn new(limit: Limit, off: &[Defence]) -> Result<Self, String> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let (parent, is_v2) = parent_of(limit.controller())?;
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let base = parent.join(format!("cloister-test-{}-{number}", std::process::id()));
        let failed = |error: std::io::Error| format!("no group can be made in {}: {error}", parent.display());
        fs::create_dir(&base).map_err(failed)?;
        let group = Self { base, is_v2 };
        if is_v2 {
            fs::write(group.base.join("cgroup.subtree_control"), "+memory +pids").map_err(failed)?;
        }
        for name in ["agent", "work"] {
            fs::create_dir(group.base.join(name)).map_err(failed)?;
        }
        if !(is_v2 && off.contains(&limit.defence())) {
            for (name, value) in limit.files(is_v2) {
                let path = group.base.join("work").join(name);
                // A kernel without swap accounting has no swap to limit.
                if path.exists() {
                    fs::write(path, value).map_err(failed)?;
                }
            }
        }
        Ok(group)
    }

    pub(crate) fn config(&self) -> CgroupConfig {
        let file = if self.is_v2 { "cgroup.procs" } else { "tasks" };
        CgroupConfig {
            agent_join: vec![self.base.join("agent").join(file)],
            work_join: vec![self.base.join("work").join(file)],
            oom_file: None,
            pids_file: None,
        }
    }

    /// Processes in the guest agent's group.
    pub(crate) fn agents(&self) -> String {
        fs::read_to_string(self.base.join("agent/cgroup.procs")).unwrap().trim().to_owned()
    }

    /// How many processes the kernel has killed for want of memory.
    pub(crate) fn oom_kills(&self) -> u64 {
        let file = if self.is_v2 { "memory.events" } else { "memory.oom_control" };
        let text = fs::read_to_string(self.base.join("work").join(file)).unwrap();
        text.lines().find_map(|line| line.strip_prefix("oom_kill ")).unwrap().parse().unwrap()
    }
}

/// The hierarchy that has a controller: version 1's own one, or version 2's.
fn parent_of(controller: &str) -> Result<(PathBuf, bool), String> {
    let root = Path::new("/sys/fs/cgroup");
    let own = root.join(controller);
    if own.join("cgroup.procs").exists() {
        return Ok((own, false));
    }
    let handed = fs::read_to_string(root.join("cgroup.subtree_control")).unwrap_or_default();
    if handed.split_whitespace().any(|word| word == controller) {
        return Ok((root.to_owned(), true));
    }
    Err(format!("no hierarchy of control groups here has `{controller}`"))
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        for path in [self.base.join("agent"), self.base.join("work"), self.base.clone()] {
            if path.exists() {
                wait_until("cgroup is empty", || fs::remove_dir(&path).map_err(|error| error.to_string()));
            }
        }
    }
}
