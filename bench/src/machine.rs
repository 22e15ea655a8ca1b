//! What the kernel says about this machine and about our processes on it.

use std::fs;
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

/// Returns the memory of the roles and the private database; `None` when it may not be read.
pub(crate) fn control_plane_memory() -> Option<Memory> {
    memory_of(|name, command| name == "cloister" || (name == "postgres" && command.contains("cloister")))
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
