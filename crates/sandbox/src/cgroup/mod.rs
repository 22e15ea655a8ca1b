//! Limits of memory, cpu and processes, by control groups of either version behind one trait.
//!
//! A sandbox has two groups beside each other: `agent` for the guest agent and `work` for everything it starts, so that
//! the agent survives when the work runs out of memory. Both lie under `<parent>/cloister-<instance>/<sandbox id>/`:
//! names follow from ids, and [`GroupSet`], which the intent records before any of it exists, says all that is needed
//! to kill and remove them later, also by a process that runs in other groups than the one that made them.
//!
//! ```text
//!  plan (pure) ──► intent on disk ──► create ──► the child joins by itself ──► kill_all ──► remove
//! ```
//!
//! A process joins by writing `0` to each of [`JoinFiles`]: moving a process from outside takes a lock that
//! costs milliseconds after an idle spell. Nothing here kills a process that is not in one of the set's groups at
//! the moment of the signal.

pub mod v1;
pub mod v2;

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cloister_types::{Capability, Limits};
use rustix::process::{Pid, PidfdFlags, Signal};
use serde::{Deserialize, Serialize};

use crate::fault::POINTS;

/// Memory of the guest agent's own group: it holds 2 MiB at rest and bounded buffers for each exec, of which a shim lets
/// 256 run at a time. 190 that all printed without end took 64 MiB.
const AGENT_MEMORY_BYTES: u64 = 192 * 1024 * 1024;
/// Processes of the guest agent's own group: itself, and the moment between fork and joining the work's group.
const AGENT_PIDS: u32 = 256;

/// What went wrong with a control group.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// A file of the kernel could not be read or written.
    #[error("{operation} `{}`", path.display())]
    Io {
        /// A verb, for example `write`.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// Its error.
        #[source]
        source: io::Error,
    },
    /// The kernel or whoever set up the hierarchy does not offer a controller.
    #[error("the `{controller}` controller is not available: {detail}")]
    NoController {
        /// `memory`, `cpu` or `pids`.
        controller: Controller,
        /// Where it was looked for.
        detail: String,
    },
    /// Processes are still in a group that should be empty.
    #[error("{count} processes are still in `{}`", path.display())]
    Busy {
        /// The group.
        path: PathBuf,
        /// How many.
        count: usize,
    },
}

impl CgroupError {
    fn io(operation: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { operation, path: path.to_path_buf(), source }
    }
}

/// The controllers that a sandbox needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Controller {
    /// Memory, and swap where there is some.
    Memory,
    /// Time on the processors.
    Cpu,
    /// Processes and threads.
    Pids,
}

impl Controller {
    /// Every controller.
    pub const ALL: [Self; 3] = [Self::Memory, Self::Cpu, Self::Pids];

    /// Returns the kernel's name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Cpu => "cpu",
            Self::Pids => "pids",
        }
    }
}

impl std::fmt::Display for Controller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The limits as the drivers write them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupLimits {
    /// Memory of the work.
    pub work_memory_bytes: u64,
    /// Memory of the guest agent.
    pub agent_memory_bytes: u64,
    /// Thousandths of a processor, for both together.
    pub cpu_millis: u32,
    /// Processes and threads of the work.
    pub work_pids: u32,
    /// Processes and threads of the guest agent.
    pub agent_pids: u32,
}

impl GroupLimits {
    /// Returns the same limits with every processor of the machine.
    #[must_use]
    pub fn unhurried(self) -> Self {
        let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let all = u32::try_from(cpus).unwrap_or(u32::MAX).saturating_mul(1000);
        Self { cpu_millis: self.cpu_millis.max(all), ..self }
    }
}

impl From<&Limits> for GroupLimits {
    fn from(limits: &Limits) -> Self {
        Self {
            work_memory_bytes: limits.memory.0,
            agent_memory_bytes: AGENT_MEMORY_BYTES,
            cpu_millis: limits.cpus.0,
            work_pids: limits.pids,
            agent_pids: AGENT_PIDS,
        }
    }
}

/// The two groups in one hierarchy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hierarchy {
    /// What it controls.
    pub controllers: Vec<Controller>,
    /// `<parent>/cloister-<instance>/<sandbox id>`; `agent` and `work` lie in it.
    pub base: PathBuf,
}

/// Every group of one sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupSet {
    /// One for each mounted hierarchy: several on version 1, one on version 2.
    pub hierarchies: Vec<Hierarchy>,
}

/// How processes get into the groups, and where the kernel counts what it refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JoinFiles {
    /// A process that writes `0` to each joins the guest agent's groups.
    pub agent: Vec<PathBuf>,
    /// The same for the work's.
    pub work: Vec<PathBuf>,
    /// Has a line `oom_kill N` for the work.
    pub oom_file: PathBuf,
    /// Has a line `max N` for the work.
    pub pids_file: PathBuf,
}

/// One version of control groups.
pub trait CgroupDriver: Send + Sync {
    /// Returns `v1` or `v2`.
    fn version(&self) -> &'static str;

    /// Returns a capability `cgroup.<controller>` for each controller.
    fn probe(&self) -> Vec<Capability>;

    /// Returns the groups a sandbox will have, without making any.
    fn plan(&self, instance: &str, sandbox_id: &str) -> GroupSet;

    /// Makes the groups of a plan with their limits.
    ///
    /// # Errors
    ///
    /// What the kernel refused; the caller removes the plan's groups.
    fn create(&self, groups: &GroupSet, limits: &GroupLimits) -> Result<JoinFiles, CgroupError>;

    /// Gives groups that exist these limits.
    ///
    /// # Errors
    ///
    /// What the kernel refused, for example less memory than is in use.
    fn limit(&self, groups: &GroupSet, limits: &GroupLimits) -> Result<(), CgroupError>;
}

/// Returns the driver for this machine's control groups.
///
/// # Errors
///
/// [`CgroupError::NoController`] names the first controller that no mounted hierarchy has.
pub fn detect() -> Result<Box<dyn CgroupDriver>, CgroupError> {
    let own = read(Path::new("/proc/self/cgroup"))?;
    let mounts = read(Path::new("/proc/self/mountinfo"))?;
    match v1::V1Driver::resolve(&own, &mounts) {
        Ok(driver) => Ok(Box::new(driver)),
        // On a machine that mounts version 2 only, none of the three is in a version 1 hierarchy.
        Err(missing_on_v1) => match v2::V2Driver::resolve(&own, &mounts) {
            Some(driver) => Ok(Box::new(driver.prepare(std::process::id())?)),
            None => Err(missing_on_v1),
        },
    }
}

impl GroupSet {
    /// Returns the processes that are in any of the groups now.
    pub fn pids(&self) -> BTreeSet<i32> {
        self.leaves().flat_map(|leaf| procs(&leaf)).collect()
    }

    /// Kills until no process is left in any group.
    ///
    /// # Errors
    ///
    /// [`CgroupError::Busy`] when some are left at the deadline.
    pub fn kill_all(&self, deadline: Instant) -> Result<(), CgroupError> {
        let mut pause = Duration::from_micros(500);
        loop {
            for hierarchy in &self.hierarchies {
                // Version 2 kills a whole tree at once; on version 1 there is no such file.
                let kill = hierarchy.base.join("cgroup.kill");
                if kill.exists() {
                    let _ = fs::write(&kill, "1");
                }
            }
            let pids = self.pids();
            if pids.is_empty() {
                return Ok(());
            }
            for pid in &pids {
                self.kill_member(*pid);
            }
            if Instant::now() >= deadline {
                let path = self.hierarchies.first().map(|first| first.base.clone()).unwrap_or_default();
                return Err(CgroupError::Busy { path, count: pids.len() });
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(20));
        }
    }

    /// Removes the groups, and the instance's group when it was the last in it. Succeeds when there are none.
    ///
    /// # Errors
    ///
    /// [`CgroupError::Io`] for a group that cannot be removed until the deadline.
    pub fn remove(&self, deadline: Instant) -> Result<(), CgroupError> {
        for hierarchy in &self.hierarchies {
            for path in [hierarchy.base.join("work"), hierarchy.base.join("agent"), hierarchy.base.clone()] {
                remove_group(&path, deadline)?;
            }
            if let Some(instance) = hierarchy.base.parent() {
                // Other sandboxes are in it, or it is gone: both are fine.
                let _ = fs::remove_dir(instance);
            }
        }
        Ok(())
    }

    /// Returns whether any of the groups exists.
    pub fn exists(&self) -> bool {
        self.hierarchies.iter().any(|hierarchy| hierarchy.base.exists())
    }

    fn leaves(&self) -> impl Iterator<Item = PathBuf> + '_ {
        self.hierarchies
            .iter()
            .flat_map(|hierarchy| [hierarchy.base.join("work"), hierarchy.base.join("agent")])
    }

    /// Kills one process if it is still a member: the number may have been given to another one meanwhile, so it is
    /// pinned by a pidfd first and checked after.
    fn kill_member(&self, pid: i32) {
        let Some(pinned) = pin(pid) else { return };
        if self.leaves().any(|leaf| procs(&leaf).contains(&pid)) {
            // It may have ended by now, which is what was wanted.
            let _ = rustix::process::pidfd_send_signal(pinned.as_fd(), Signal::KILL);
        }
    }
}

fn pin(pid: i32) -> Option<OwnedFd> {
    rustix::process::pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()
}

/// Returns the processes of one group; none when the group is gone.
fn procs(group: &Path) -> BTreeSet<i32> {
    let text = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
    text.lines().filter_map(|line| line.trim().parse().ok()).collect()
}

fn remove_group(path: &Path, deadline: Instant) -> Result<(), CgroupError> {
    let mut pause = Duration::from_micros(500);
    loop {
        match fs::remove_dir(path) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            // A process that has ended leaves its group a moment after it is seen as ended.
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy && Instant::now() < deadline => {
                std::thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_millis(20));
            }
            Err(error) => return Err(CgroupError::io("remove", path, error)),
        }
    }
}

/// Makes `base` with `agent` and `work` in it. The instance's group may vanish between two steps when its last other
/// sandbox ends, so that it is made again.
fn make_groups(base: &Path) -> Result<(), CgroupError> {
    let mut tries = 0;
    loop {
        let made = base
            .parent()
            .map_or(Ok(()), ensure_group)
            .and_then(|()| ensure_group(base))
            .and_then(|()| ensure_group(&base.join("agent")))
            .inspect(|()| POINTS.reach("sandbox_between_cgroups"))
            .and_then(|()| ensure_group(&base.join("work")));
        match made {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound && tries < 100 => tries += 1,
            Err(error) => return Err(CgroupError::io("make group", base, error)),
        }
    }
}

fn ensure_group(path: &Path) -> io::Result<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}

fn read(path: &Path) -> Result<String, CgroupError> {
    fs::read_to_string(path).map_err(|error| CgroupError::io("read", path, error))
}

fn write(path: &Path, value: &str) -> Result<(), CgroupError> {
    fs::write(path, value).map_err(|error| CgroupError::io("write", path, error))
}

/// Returns `<parent>/cloister-<instance>/<sandbox id>`.
fn base_path(parent: &Path, instance: &str, sandbox_id: &str) -> PathBuf {
    parent.join(format!("cloister-{instance}")).join(sandbox_id)
}

/// One line of `/proc/self/mountinfo` (proc(5)) of a control group hierarchy.
#[derive(Debug, Clone, PartialEq, Eq)]
struct CgroupMount {
    root: String,
    point: PathBuf,
    is_v2: bool,
    options: Vec<String>,
}

/// Reads the control group hierarchies out of `/proc/self/mountinfo`.
fn cgroup_mounts(mountinfo: &str) -> Vec<CgroupMount> {
    mountinfo
        .lines()
        .filter_map(|line| {
            let (left, right) = line.split_once(" - ")?;
            let mut right = right.split(' ');
            let kind = right.next()?;
            let options = right.nth(1)?.split(',').map(str::to_owned).collect();
            if kind != "cgroup" && kind != "cgroup2" {
                return None;
            }
            let mut left = left.split(' ').skip(3);
            let root = unescape(left.next()?);
            let point = PathBuf::from(unescape(left.next()?));
            Some(CgroupMount { root, point, is_v2: kind == "cgroup2", options })
        })
        .collect()
}

/// Undoes the octal escapes of mountinfo.
fn unescape(text: &str) -> String {
    text.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
}

/// Returns where a process's own group is visible, given its path in the hierarchy and what part of that is mounted.
fn visible_group(mount: &CgroupMount, own: &str) -> PathBuf {
    let below = if mount.root == "/" { Some(own) } else { own.strip_prefix(mount.root.as_str()) };
    let below = below.unwrap_or("").trim_matches('/');
    // In a container whose own part alone is mounted, the path points outside of it.
    if below.is_empty() || below.starts_with("..") { mount.point.clone() } else { mount.point.join(below) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_group_is_found_below_what_is_mounted() {
        let mount = |root: &str| CgroupMount {
            root: root.to_owned(),
            point: PathBuf::from("/cg"),
            is_v2: false,
            options: Vec::new(),
        };
        assert_eq!(visible_group(&mount("/"), "/"), Path::new("/cg"));
        assert_eq!(visible_group(&mount("/"), "/a/b"), Path::new("/cg/a/b"));
        assert_eq!(visible_group(&mount("/docker/x"), "/docker/x"), Path::new("/cg"));
        assert_eq!(visible_group(&mount("/docker/x"), "/docker/x/y"), Path::new("/cg/y"));
        assert_eq!(visible_group(&mount("/docker/x"), "/other"), Path::new("/cg"));
        assert_eq!(visible_group(&mount("/"), "/../.."), Path::new("/cg"));
    }

    #[test]
    fn mounts_of_both_versions_are_read_and_others_skipped() {
        let text = "22 27 0:21 / /proc rw,relatime - proc proc rw\n\
                    32 31 0:29 / /sys/fs/cgroup/a\\040b rw,relatime shared:5 - cgroup cgroup rw,cpu,cpuacct\n\
                    41 31 0:38 /x /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n\
                    garbage\n";
        let mounts = cgroup_mounts(text);
        assert_eq!(mounts.len(), 2);
        assert_eq!(mounts[0].point, Path::new("/sys/fs/cgroup/a b"));
        assert!(mounts[0].options.contains(&"cpu".to_owned()) && !mounts[0].is_v2);
        assert_eq!(mounts[1].root, "/x");
        assert!(mounts[1].is_v2);
    }

    #[test]
    fn groups_that_are_gone_have_no_processes_and_are_removed_already() {
        let directory = tempfile::tempdir().unwrap();
        let groups = GroupSet {
            hierarchies: vec![Hierarchy {
                controllers: vec![Controller::Memory],
                base: directory.path().join("cloister-x/sbx_1"),
            }],
        };
        assert!(groups.pids().is_empty());
        groups.kill_all(Instant::now()).unwrap();
        groups.remove(Instant::now()).unwrap();
        assert!(!groups.exists());
    }

    #[test]
    fn a_process_number_listed_in_no_group_is_not_killed() {
        let directory = tempfile::tempdir().unwrap();
        let base = directory.path().join("cloister-x/sbx_1");
        fs::create_dir_all(base.join("work")).unwrap();
        let mut bystander = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let groups = GroupSet { hierarchies: vec![Hierarchy { controllers: vec![Controller::Pids], base }] };
        groups.kill_member(i32::try_from(bystander.id()).unwrap());
        assert!(bystander.try_wait().unwrap().is_none());
        bystander.kill().unwrap();
        bystander.wait().unwrap();
    }
}
