//! What the kernel says about this machine and about our processes on it.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};

/// A kernel tick of `/proc/stat`: `USER_HZ` is 100 on every architecture that Linux supports.
const TICK: Duration = Duration::from_millis(10);

/// Returns how many CPUs this process may use.
pub(crate) fn cpus() -> u32 {
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    u32::try_from(cpus).unwrap_or(u32::MAX)
}

/// Returns one line about the machine.
pub(crate) fn describe() -> String {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "))
        .map(|(_, name)| name);
    format!("{} CPUs ({}), Linux {}", cpus(), model.unwrap_or("unknown model"), release.trim())
}

/// Returns the CPU time that all processes and the kernel have used since boot.
///
/// # Errors
///
/// When `/proc/stat` cannot be read.
pub(crate) fn busy_time() -> Result<Duration> {
    let text = fs::read_to_string("/proc/stat").context("read `/proc/stat`")?;
    let fields: Vec<u64> = text
        .lines()
        .next()
        .unwrap_or_default()
        .split_whitespace()
        .skip(1)
        .filter_map(|n| n.parse().ok())
        .collect();
    // user nice system idle iowait irq softirq steal: see proc(5).
    let ticks: u64 = [0, 1, 2, 5, 6].iter().filter_map(|at| fields.get(*at)).sum();
    Ok(TICK.saturating_mul(u32::try_from(ticks).unwrap_or(u32::MAX)))
}

/// Memory of some processes, in KiB.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Memory {
    /// How many processes.
    pub(crate) processes: u32,
    /// Each shared page counted by its share.
    pub(crate) pss_kib: u64,
    /// Of that, pages that nobody shares.
    pub(crate) private_kib: u64,
}

/// Returns the memory of all shims and guest agents; `None` when it may not be read.
pub(crate) fn sandbox_memory() -> Option<Memory> {
    memory_of(|name, _| name.starts_with("cloister-guest"))
}

/// Returns the memory of all shims, keepers, sentries, gofers and stubs; `None` when it may not be read.
pub(crate) fn gvisor_memory() -> Option<Memory> {
    memory_of(|name, command| {
        name == "exe"
            || name.starts_with("cloister-keeper")
            || command.starts_with("runsc-")
            || command.contains("/sandboxes/sbx_")
    })
}

/// Returns the memory of the roles and the private database; `None` when it may not be read.
pub(crate) fn control_plane_memory() -> Option<Memory> {
    memory_of(|name, command| {
        command.starts_with("cloister\0") || (name == "postgres" && command.contains("cloister"))
    })
}

/// CPU time of those who have part in an exec, since their start.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct CpuShares {
    pub(crate) client: Duration,
    pub(crate) coordinator: Duration,
    pub(crate) database: Duration,
    pub(crate) host_agent: Duration,
    /// Shims and guest agents; not the programs that they run.
    pub(crate) sandboxes: Duration,
}

impl CpuShares {
    /// Reads what the scheduler has counted. Processes of another user count only when this one is root.
    pub(crate) fn read() -> Self {
        let mut shares = Self::default();
        let own = std::process::id().to_string();
        for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
            let path = entry.path();
            let Ok(name) = fs::read_to_string(path.join("comm")) else { continue };
            let command = fs::read_to_string(path.join("cmdline")).unwrap_or_default();
            let share = if entry.file_name() == *own {
                &mut shares.client
            } else if command.starts_with("cloister\0coordinator\0") {
                &mut shares.coordinator
            } else if command.starts_with("cloister\0host\0") {
                &mut shares.host_agent
            } else if name.starts_with("cloister-guest") {
                &mut shares.sandboxes
            } else if name.trim() == "postgres" {
                &mut shares.database
            } else {
                continue;
            };
            *share += cpu_time(&path);
        }
        shares
    }

    /// What each used since `earlier`, divided by `count`, with its name.
    pub(crate) fn each_since(&self, earlier: &Self, count: u32) -> [(&'static str, Duration); 5] {
        let since = |now: Duration, then: Duration| now.saturating_sub(then) / count.max(1);
        [
            ("client", since(self.client, earlier.client)),
            ("coordinator", since(self.coordinator, earlier.coordinator)),
            ("database", since(self.database, earlier.database)),
            ("host agent", since(self.host_agent, earlier.host_agent)),
            ("shim and guest agent", since(self.sandboxes, earlier.sandboxes)),
        ]
    }
}

/// Returns the CPU time of a process's threads that are alive: `schedstat` counts nanoseconds, `stat` only ticks.
fn cpu_time(process: &Path) -> Duration {
    let mut time = Duration::ZERO;
    for task in fs::read_dir(process.join("task")).into_iter().flatten().flatten() {
        let text = fs::read_to_string(task.path().join("schedstat")).unwrap_or_default();
        let nanos = text.split_whitespace().next().and_then(|nanos| nanos.parse().ok());
        time += Duration::from_nanos(nanos.unwrap_or(0));
    }
    time
}

fn memory_of(is_wanted: impl Fn(&str, &str) -> bool) -> Option<Memory> {
    let mut memory = Memory::default();
    for entry in fs::read_dir("/proc").ok()?.flatten() {
        let path = entry.path();
        let Ok(name) = fs::read_to_string(path.join("comm")) else { continue };
        let command = fs::read_to_string(path.join("cmdline")).unwrap_or_default();
        if !is_wanted(name.trim(), &command) {
            continue;
        }
        let rollup = match fs::read_to_string(path.join("smaps_rollup")) {
            Ok(rollup) => rollup,
            // It may have ended meanwhile; one that is there and may not be read makes the sum worthless.
            Err(_) if !path.exists() => continue,
            Err(_) => return None,
        };
        let field = |key: &str| -> u64 {
            let line = rollup.lines().find_map(|line| line.strip_prefix(key));
            line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0)
        };
        memory.processes += 1;
        memory.pss_kib += field("Pss:");
        memory.private_kib += field("Private_Clean:") + field("Private_Dirty:");
    }
    Some(memory)
}
