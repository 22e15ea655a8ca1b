//! What this machine is and how much of it sandboxes may use.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use cloister_types::{ByteCount, CpuMillis};

/// Left to the machine itself, whatever its size: host agent, shims, page tables, a shell to log in with.
const MEMORY_RESERVE: ByteCount = ByteCount::mib(512);

/// Left free where the data directory is: output of execs, logs and the private database grow beside the layers, and
/// a layer that the disk has no room for loses what was written to it.
const DISK_RESERVE: ByteCount = ByteCount::mib(2048);

/// CPU limits are ceilings that are rarely reached together, not reservations: this many times the machine's
/// CPUs are promised, so that with default limits memory, which cannot be shared out twice, decides.
const CPU_OVERCOMMIT: u32 = 16;

/// How much of the machine sandboxes may be promised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// Memory of all sandboxes together.
    pub memory: ByteCount,
    /// CPU limits of all sandboxes together.
    pub cpus: CpuMillis,
    /// Writable layers of all sessions together.
    pub disk: ByteCount,
}

/// What replaces a measured capacity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CapacityOverride {
    /// Memory.
    pub memory: Option<ByteCount>,
    /// CPUs.
    pub cpus: Option<CpuMillis>,
    /// Disk.
    pub disk: Option<ByteCount>,
}

impl Capacity {
    /// Measures the machine and the filesystem of `data_dir`. Blocks.
    pub(crate) fn measure(data_dir: &Path, given: CapacityOverride) -> io::Result<Self> {
        let memory = match given.memory {
            Some(memory) => memory,
            None => {
                let total = total_memory()?;
                let reserve = MEMORY_RESERVE.0.max(total / 10).min(total / 2);
                ByteCount(total - reserve)
            }
        };
        let cpus = match given.cpus {
            Some(cpus) => cpus,
            None => {
                let count = u32::try_from(std::thread::available_parallelism()?.get()).unwrap_or(u32::MAX);
                CpuMillis(count.saturating_mul(1000).saturating_mul(CPU_OVERCOMMIT))
            }
        };
        let disk = match given.disk {
            Some(disk) => disk,
            None => {
                let total = free_disk(data_dir)?.saturating_add(used_by_sessions(data_dir)?);
                let reserve = DISK_RESERVE.0.max(total / 10).min(total / 2);
                ByteCount(total - reserve)
            }
        };
        Ok(Self { memory, cpus, disk })
    }
}

/// Returns the smaller of the machine's memory and the limit of the agent's own cgroup: in a container the
/// machine's figure is a promise that the container cannot keep.
fn total_memory() -> io::Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let kib = text
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"))
        .and_then(|rest| rest.trim().trim_end_matches("kB").trim().parse::<u64>().ok())
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "`/proc/meminfo` has no `MemTotal`"))?;
    let machine = kib.saturating_mul(1024);
    let limits = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
    let limit = limits
        .iter()
        .filter_map(|path| std::fs::read_to_string(path).ok())
        .filter_map(|text| text.trim().parse::<u64>().ok())
        .min();
    Ok(limit.map_or(machine, |limit| limit.min(machine)))
}

fn free_disk(data_dir: &Path) -> io::Result<u64> {
    let stat = rustix::fs::statvfs(data_dir)?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Returns what existing layers occupy: it is free for the sessions that own it.
fn used_by_sessions(data_dir: &Path) -> io::Result<u64> {
    let sessions = match std::fs::read_dir(data_dir.join("sessions")) {
        Ok(sessions) => sessions,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        Err(error) => return Err(error),
    };
    let mut bytes = 0u64;
    for session in sessions {
        if let Ok(layer) = std::fs::metadata(session?.path().join("layer.img")) {
            bytes = bytes.saturating_add(layer.blocks().saturating_mul(512));
        }
    }
    Ok(bytes)
}

/// Returns an id that changes with each boot of the machine.
pub(crate) fn boot_id() -> io::Result<String> {
    Ok(std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

/// Returns the machine's own name in the form that names have here, or `host`.
pub(crate) fn default_name() -> String {
    let uname = rustix::system::uname();
    let name: String = uname
        .nodename()
        .to_string_lossy()
        .split('.')
        .next()
        .unwrap_or_default()
        .to_ascii_lowercase()
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '-' })
        .skip_while(|c| !c.is_ascii_lowercase())
        .take(cloister_types::name::NAME_MAX_LEN)
        .collect();
    let name = name.trim_end_matches('-');
    if name.is_empty() { "host".to_owned() } else { name.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measured_capacity_is_below_the_machine_and_overrides_win() {
        let directory = tempfile::tempdir().expect("temporary directory");
        let measured = Capacity::measure(directory.path(), CapacityOverride::default()).expect("measure");
        assert!(measured.memory.0 > 0 && measured.memory.0 < total_memory().expect("memory"));
        assert!(measured.cpus.0 >= 1000);
        // The rest is for output, logs and the database, which grow beside the layers.
        let free = free_disk(directory.path()).expect("free disk");
        assert!(measured.disk.0 > 0 && measured.disk.0 < free / 100 * 95, "{} of {free}", measured.disk.0);
        let given = CapacityOverride {
            memory: Some(ByteCount::gib(1)),
            cpus: Some(CpuMillis(500)),
            disk: Some(ByteCount::gib(2)),
        };
        let capacity = Capacity::measure(directory.path(), given).expect("measure");
        assert_eq!(
            (capacity.memory, capacity.cpus, capacity.disk),
            (ByteCount::gib(1), CpuMillis(500), ByteCount::gib(2))
        );
    }

    #[test]
    fn the_default_name_is_a_name() {
        assert_eq!(cloister_types::name::validate_name(&default_name()), Ok(()));
    }

    #[test]
    fn the_boot_id_is_the_same_twice() {
        let first = boot_id().expect("read");
        assert!(!first.is_empty());
        assert_eq!(boot_id().expect("read"), first);
    }
}
