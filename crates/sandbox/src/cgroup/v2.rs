//! Control groups version 2: one hierarchy, whose controllers must be handed down by `cgroup.subtree_control`.
//!
//! A group that hands controllers down may hold no processes itself (the root excepted). The host agent usually
//! starts in the very group that it should hand down from (a systemd unit with `Delegate=yes`), so it first moves itself
//! into the leaf `cloister-host`. When that does not help, because foreign processes are in the group too, the groups
//! are made below the root of the hierarchy instead, where the kernel allows both; foreign processes are never
//! moved. Kernel documentation: `admin-guide/cgroup-v2.rst`, "Delegation" and "No Internal Process Constraint".

use std::fs;
use std::path::{Path, PathBuf};

use cloister_types::Capability;

use super::{
    CgroupDriver, CgroupError, Controller, GroupLimits, GroupSet, Hierarchy, JoinFiles, base_path,
    cgroup_mounts, ensure_group, make_groups, read, visible_group, write,
};

/// Where the host agent goes so that its group can hand controllers down.
const LEAF: &str = "cloister-host";
const CPU_PERIOD_US: u64 = 100_000;

/// The driver for version 2.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct V2Driver {
    root: PathBuf,
    parent: PathBuf,
}

impl V2Driver {
    /// Finds this process's group from the texts of `/proc/self/cgroup` and `/proc/self/mountinfo`; `None` when
    /// version 2 is not mounted.
    pub fn resolve(own_groups: &str, mountinfo: &str) -> Option<Self> {
        let mount = cgroup_mounts(mountinfo).into_iter().find(|mount| mount.is_v2)?;
        let own = own_groups.lines().find_map(|line| line.strip_prefix("0::"))?;
        let group = visible_group(&mount, own);
        // An agent that a restarting one started from its own leaf belongs to the group above.
        let parent = match group.parent() {
            Some(above) if group.file_name().is_some_and(|name| name == LEAF) => above.to_path_buf(),
            _ => group,
        };
        Some(Self { root: mount.point, parent })
    }

    /// Makes the parent hand its controllers down, moving the process `own_pid` to a leaf if it is in the way.
    ///
    /// # Errors
    ///
    /// [`CgroupError::NoController`] when neither the own group nor the root has all three, [`CgroupError::Io`]
    /// when neither accepts that they are handed down.
    pub fn prepare(self, own_pid: u32) -> Result<Self, CgroupError> {
        match hand_down(&self.parent, own_pid) {
            Ok(()) => Ok(self),
            Err(error) if self.parent == self.root => Err(error),
            Err(_) => hand_down(&self.root, own_pid).map(|()| Self { parent: self.root.clone(), ..self }),
        }
    }
}

/// Lets `group` hand all three controllers down.
fn hand_down(group: &Path, own_pid: u32) -> Result<(), CgroupError> {
    let available = read(&group.join("cgroup.controllers"))?;
    for controller in Controller::ALL {
        if !has_word(&available, controller.as_str()) {
            let detail =
                format!("`{}` lists `{}`", group.join("cgroup.controllers").display(), available.trim());
            return Err(CgroupError::NoController { controller, detail });
        }
    }
    let control = group.join("cgroup.subtree_control");
    let handed = read(&control)?;
    if Controller::ALL.iter().all(|controller| has_word(&handed, controller.as_str())) {
        return Ok(());
    }
    if has_line(&read(&group.join("cgroup.procs"))?, &own_pid.to_string()) {
        let leaf = group.join(LEAF);
        ensure_group(&leaf).map_err(|error| CgroupError::io("make group", &leaf, error))?;
        write(&leaf.join("cgroup.procs"), &own_pid.to_string())?;
    }
    write(&control, "+memory +cpu +pids")
}

fn has_word(text: &str, word: &str) -> bool {
    text.split_whitespace().any(|found| found == word)
}

fn has_line(text: &str, line: &str) -> bool {
    text.lines().any(|found| found.trim() == line)
}

impl CgroupDriver for V2Driver {
    fn version(&self) -> &'static str {
        "v2"
    }

    fn probe(&self) -> Vec<Capability> {
        let handed = fs::read_to_string(self.parent.join("cgroup.subtree_control")).unwrap_or_default();
        Controller::ALL
            .iter()
            .map(|controller| {
                let name = format!("cgroup.{controller}");
                if has_word(&handed, controller.as_str()) {
                    Capability::ok(name, format!("version 2, groups are made in `{}`", self.parent.display()))
                } else {
                    Capability::failed(
                        name,
                        format!("`{}` hands down only `{}`", self.parent.display(), handed.trim()),
                        "run the host agent as root, under systemd with `Delegate=yes`",
                    )
                }
            })
            .collect()
    }

    fn plan(&self, instance: &str, sandbox_id: &str) -> GroupSet {
        let base = base_path(&self.parent, instance, sandbox_id);
        GroupSet { hierarchies: vec![Hierarchy { controllers: Controller::ALL.to_vec(), base }] }
    }

    fn create(&self, groups: &GroupSet, limits: &GroupLimits) -> Result<JoinFiles, CgroupError> {
        let mut files = JoinFiles {
            agent: Vec::new(),
            work: Vec::new(),
            oom_file: PathBuf::new(),
            pids_file: PathBuf::new(),
        };
        for hierarchy in &groups.hierarchies {
            let base = &hierarchy.base;
            make_groups(base)?;
            if let Some(instance) = base.parent() {
                write(&instance.join("cgroup.subtree_control"), "+memory +cpu +pids")?;
            }
            write(&base.join("cgroup.subtree_control"), "+memory +cpu +pids")?;
            let (agent, work) = (base.join("agent"), base.join("work"));
            files.agent.push(agent.join("cgroup.procs"));
            files.oom_file = work.join("memory.events");
            files.pids_file = work.join("pids.events");
            files.work.push(work.join("cgroup.procs"));
        }
        self.limit(groups, limits)?;
        Ok(files)
    }

    fn limit(&self, groups: &GroupSet, limits: &GroupLimits) -> Result<(), CgroupError> {
        for hierarchy in &groups.hierarchies {
            let base = &hierarchy.base;
            let quota = u64::from(limits.cpu_millis) * CPU_PERIOD_US / 1000;
            write(&base.join("cpu.max"), &format!("{quota} {CPU_PERIOD_US}"))?;
            // Weight 100 is one processor; the kernel takes 1 to 10,000.
            let weight = (limits.cpu_millis / 10).clamp(1, 10_000);
            write(&base.join("cpu.weight"), &weight.to_string())?;
            for (group, bytes, pids) in [
                (base.join("agent"), limits.agent_memory_bytes, limits.agent_pids),
                (base.join("work"), limits.work_memory_bytes, limits.work_pids),
            ] {
                write(&group.join("memory.max"), &bytes.to_string())?;
                // Absent on a kernel without swap accounting, where there is then nothing to limit.
                let swap = group.join("memory.swap.max");
                if swap.exists() {
                    write(&swap, "0")?;
                }
                write(&group.join("pids.max"), &pids.to_string())?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mountinfo(root: &Path) -> String {
        format!("41 31 0:38 / {} rw - cgroup2 cgroup2 rw\n", root.display())
    }

    fn fake_group(path: &Path, controllers: &str, procs: &str) {
        fs::create_dir_all(path).unwrap();
        fs::write(path.join("cgroup.controllers"), controllers).unwrap();
        fs::write(path.join("cgroup.subtree_control"), "").unwrap();
        fs::write(path.join("cgroup.procs"), procs).unwrap();
    }

    #[test]
    fn the_agent_leaves_the_group_that_hands_down() {
        let directory = tempfile::tempdir().unwrap();
        let unit = directory.path().join("system.slice/cloister.service");
        fake_group(&unit, "cpuset cpu io memory pids\n", "41\n42\n");
        let driver =
            V2Driver::resolve("0::/system.slice/cloister.service\n", &mountinfo(directory.path())).unwrap();
        let driver = driver.prepare(42).unwrap();
        assert_eq!(driver.parent, unit);
        assert_eq!(fs::read_to_string(unit.join("cloister-host/cgroup.procs")).unwrap(), "42");
        assert_eq!(fs::read_to_string(unit.join("cgroup.subtree_control")).unwrap(), "+memory +cpu +pids");
    }

    #[test]
    fn a_restarted_agent_in_the_leaf_uses_the_group_above() {
        let driver = V2Driver::resolve("0::/a/cloister-host\n", &mountinfo(Path::new("/cg"))).unwrap();
        assert_eq!(driver.parent, Path::new("/cg/a"));
    }

    #[test]
    fn without_controllers_of_its_own_the_root_is_used_and_nobody_moved() {
        let directory = tempfile::tempdir().unwrap();
        let scope = directory.path().join("user.slice");
        fake_group(&scope, "memory pids\n", "42\n");
        fake_group(directory.path(), "cpu memory pids\n", "1\n");
        let driver = V2Driver::resolve("0::/user.slice\n", &mountinfo(directory.path())).unwrap();
        let driver = driver.prepare(42).unwrap();
        assert_eq!(driver.parent, directory.path());
        assert!(!scope.join("cloister-host").exists() && !directory.path().join("cloister-host").exists());
    }

    #[test]
    fn a_controller_that_nobody_has_is_named() {
        let directory = tempfile::tempdir().unwrap();
        fake_group(directory.path(), "cpu memory\n", "");
        let driver = V2Driver::resolve("0::/\n", &mountinfo(directory.path())).unwrap();
        let error = driver.prepare(42).unwrap_err();
        assert!(matches!(error, CgroupError::NoController { controller: Controller::Pids, .. }), "{error}");
    }

    #[test]
    fn limits_land_in_the_files_of_their_group() {
        let directory = tempfile::tempdir().unwrap();
        fake_group(directory.path(), "cpu memory pids\n", "");
        let driver = V2Driver::resolve("0::/\n", &mountinfo(directory.path())).unwrap().prepare(42).unwrap();
        let plan = driver.plan("i1", "sbx_1");
        let base = plan.hierarchies[0].base.clone();
        fs::create_dir_all(base.join("work")).unwrap();
        fs::write(base.join("work/memory.swap.max"), "max").unwrap();
        let limits = GroupLimits {
            work_memory_bytes: 1 << 20,
            agent_memory_bytes: 2 << 20,
            cpu_millis: 1500,
            work_pids: 7,
            agent_pids: 3,
        };
        let files = driver.create(&plan, &limits).unwrap();
        let text = |path: &str| fs::read_to_string(base.join(path)).unwrap();
        assert_eq!(text("cpu.max"), "150000 100000");
        assert_eq!(text("cpu.weight"), "150");
        assert_eq!(text("work/memory.max"), "1048576");
        assert_eq!(text("work/memory.swap.max"), "0");
        assert!(!base.join("agent/memory.swap.max").exists());
        assert_eq!(text("agent/memory.max"), "2097152");
        assert_eq!(text("work/pids.max"), "7");
        assert_eq!(files.work, [base.join("work/cgroup.procs")]);
        assert!(files.oom_file.ends_with("work/memory.events"));
    }
}
