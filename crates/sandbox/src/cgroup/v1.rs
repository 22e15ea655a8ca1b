//! Control groups version 1, also where version 2 is mounted beside it without controllers (the hybrid layout).
//!
//! Each controller may be mounted alone or together with others, and this process may sit in another group of each: the
//! parent is resolved for every hierarchy by itself. Kernel documentation: `admin-guide/cgroup-v1/`.

use std::path::{Path, PathBuf};

use cloister_types::Capability;

use super::{
    CgroupDriver, CgroupError, Controller, GroupLimits, GroupSet, Hierarchy, JoinFiles, base_path,
    cgroup_mounts, make_groups, read, visible_group, write,
};

/// Length of the period in which a group may use its share of the processors.
const CPU_PERIOD_US: u64 = 100_000;

/// One mounted hierarchy and where this process is in it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Parent {
    controllers: Vec<Controller>,
    group: PathBuf,
}

/// The driver for version 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct V1Driver {
    parents: Vec<Parent>,
}

impl V1Driver {
    /// Finds the parent group in each hierarchy from the texts of `/proc/self/cgroup` and `/proc/self/mountinfo`.
    ///
    /// # Errors
    ///
    /// [`CgroupError::NoController`] when a controller is in no version 1 hierarchy.
    pub fn resolve(own_groups: &str, mountinfo: &str) -> Result<Self, CgroupError> {
        let mounts: Vec<_> = cgroup_mounts(mountinfo).into_iter().filter(|mount| !mount.is_v2).collect();
        let mut parents: Vec<Parent> = Vec::new();
        for controller in Controller::ALL {
            let own = own_groups
                .lines()
                .filter_map(|line| {
                    let mut fields = line.splitn(3, ':').skip(1);
                    Some((fields.next()?, fields.next()?))
                })
                .find(|(names, _)| names.split(',').any(|name| name == controller.as_str()))
                .map(|(_, path)| path);
            let mount =
                mounts.iter().find(|mount| mount.options.iter().any(|name| name == controller.as_str()));
            let (Some(own), Some(mount)) = (own, mount) else {
                let detail = "no version 1 hierarchy in `/proc/self/mountinfo` has it".to_owned();
                return Err(CgroupError::NoController { controller, detail });
            };
            let group = visible_group(mount, own);
            match parents.iter_mut().find(|parent| parent.group == group) {
                Some(parent) => parent.controllers.push(controller),
                None => parents.push(Parent { controllers: vec![controller], group }),
            }
        }
        Ok(Self { parents })
    }
}

impl CgroupDriver for V1Driver {
    fn version(&self) -> &'static str {
        "v1"
    }

    fn probe(&self) -> Vec<Capability> {
        let capability = |controller: Controller, group: &PathBuf| {
            let name = format!("cgroup.{controller}");
            let marker = match controller {
                Controller::Memory => "memory.limit_in_bytes",
                Controller::Cpu => "cpu.cfs_period_us",
                Controller::Pids => "cgroup.procs",
            };
            match rustix::fs::access(group.join(marker), rustix::fs::Access::WRITE_OK) {
                Ok(()) => {
                    Capability::ok(name, format!("version 1, groups are made in `{}`", group.display()))
                }
                Err(error) => Capability::failed(
                    name,
                    format!("`{}` cannot be written: {error}", group.join(marker).display()),
                    "run the host agent as root in a group whose hierarchies it may write",
                ),
            }
        };
        self.parents
            .iter()
            .flat_map(|parent| {
                parent.controllers.iter().map(|controller| capability(*controller, &parent.group))
            })
            .collect()
    }

    fn plan(&self, instance: &str, sandbox_id: &str) -> GroupSet {
        let hierarchy = |parent: &Parent| Hierarchy {
            controllers: parent.controllers.clone(),
            base: base_path(&parent.group, instance, sandbox_id),
        };
        GroupSet { hierarchies: self.parents.iter().map(hierarchy).collect() }
    }

    fn create(&self, groups: &GroupSet, limits: &GroupLimits) -> Result<JoinFiles, CgroupError> {
        let mut files = JoinFiles {
            agent: Vec::new(),
            work: Vec::new(),
            oom_file: PathBuf::new(),
            pids_file: PathBuf::new(),
        };
        for hierarchy in &groups.hierarchies {
            make_groups(&hierarchy.base)?;
            let (agent, work) = (hierarchy.base.join("agent"), hierarchy.base.join("work"));
            for controller in &hierarchy.controllers {
                match controller {
                    Controller::Memory => files.oom_file = work.join("memory.oom_control"),
                    Controller::Pids => files.pids_file = work.join("pids.events"),
                    Controller::Cpu => {}
                }
            }
            // `tasks` and not `cgroup.procs`: a process that moves only itself needs no lock of the thread group.
            files.agent.push(agent.join("tasks"));
            files.work.push(work.join("tasks"));
        }
        self.limit(groups, limits)?;
        Ok(files)
    }

    fn limit(&self, groups: &GroupSet, limits: &GroupLimits) -> Result<(), CgroupError> {
        for hierarchy in &groups.hierarchies {
            let (agent, work) = (hierarchy.base.join("agent"), hierarchy.base.join("work"));
            for controller in &hierarchy.controllers {
                match controller {
                    Controller::Memory => {
                        limit_memory(&agent, limits.agent_memory_bytes)?;
                        limit_memory(&work, limits.work_memory_bytes)?;
                    }
                    Controller::Cpu => {
                        // On the parent of both, so that output through the agent counts too.
                        let quota = u64::from(limits.cpu_millis) * CPU_PERIOD_US / 1000;
                        let shares = (u64::from(limits.cpu_millis) * 1024 / 1000).max(2);
                        write(&hierarchy.base.join("cpu.cfs_period_us"), &CPU_PERIOD_US.to_string())?;
                        write(&hierarchy.base.join("cpu.cfs_quota_us"), &quota.to_string())?;
                        write(&hierarchy.base.join("cpu.shares"), &shares.to_string())?;
                    }
                    Controller::Pids => {
                        write(&agent.join("pids.max"), &limits.agent_pids.to_string())?;
                        write(&work.join("pids.max"), &limits.work_pids.to_string())?;
                    }
                }
            }
        }
        Ok(())
    }
}

/// Limits memory, and memory and swap together: without that, whatever swap the host has comes on top. The kernel
/// refuses a moment in which memory alone may be more than both, so that the order depends on the direction.
fn limit_memory(group: &Path, bytes: u64) -> Result<(), CgroupError> {
    let (memory, with_swap) =
        (group.join("memory.limit_in_bytes"), group.join("memory.memsw.limit_in_bytes"));
    let text = bytes.to_string();
    if !with_swap.exists() {
        return write(&memory, &text);
    }
    let raises = read(&with_swap)?.trim().parse().is_ok_and(|now: u64| now < bytes);
    let order = if raises { [with_swap, memory] } else { [memory, with_swap] };
    order.iter().try_for_each(|file| write(file, &text))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;
    use std::time::{Duration, Instant};

    use super::*;

    const OWN: &str = "8:pids:/\n4:memory:/agents/a1\n2:cpuacct:/\n1:cpu:/\n0::/\n";

    fn mountinfo(root: &Path) -> String {
        let root = root.display();
        format!(
            "32 31 0:29 / {root}/cpu rw - cgroup cgroup rw,cpu\n\
             35 31 0:32 / {root}/memory rw - cgroup cgroup rw,memory\n\
             39 31 0:36 / {root}/pids rw - cgroup cgroup rw,pids\n\
             41 31 0:38 / {root}/unified rw - cgroup2 cgroup2 rw\n"
        )
    }

    #[test]
    fn each_controller_has_its_own_parent() {
        let driver = V1Driver::resolve(OWN, &mountinfo(Path::new("/cg"))).unwrap();
        let plan = driver.plan("i1", "sbx_1");
        let bases: Vec<_> = plan.hierarchies.iter().map(|hierarchy| hierarchy.base.clone()).collect();
        assert_eq!(
            bases,
            [
                "/cg/memory/agents/a1/cloister-i1/sbx_1",
                "/cg/cpu/cloister-i1/sbx_1",
                "/cg/pids/cloister-i1/sbx_1"
            ]
            .map(PathBuf::from)
        );
    }

    #[test]
    fn controllers_mounted_together_share_one_group() {
        let own = "3:cpu,memory,pids:/x\n";
        let mounts = "1 2 0:1 / /cg/all rw - cgroup cgroup rw,cpu,memory,pids\n";
        let plan = V1Driver::resolve(own, mounts).unwrap().plan("i1", "sbx_1");
        assert_eq!(plan.hierarchies.len(), 1);
        assert_eq!(plan.hierarchies[0].controllers, Controller::ALL);
    }

    #[test]
    fn a_missing_controller_is_named() {
        let error = V1Driver::resolve("0::/\n", "41 31 0:38 / /cg rw - cgroup2 cgroup2 rw\n").unwrap_err();
        assert!(error.to_string().contains("`memory`"), "{error}");
    }

    #[test]
    fn limits_land_in_the_files_of_their_group() {
        let directory = tempfile::tempdir().unwrap();
        for path in ["cpu", "memory/agents/a1", "pids"] {
            fs::create_dir_all(directory.path().join(path)).unwrap();
        }
        let driver = V1Driver::resolve(OWN, &mountinfo(directory.path())).unwrap();
        let plan = driver.plan("i1", "sbx_1");
        let limits = GroupLimits {
            work_memory_bytes: 1 << 20,
            agent_memory_bytes: 2 << 20,
            cpu_millis: 500,
            work_pids: 7,
            agent_pids: 3,
        };
        let files = driver.create(&plan, &limits).unwrap();
        let text = |path: &str| fs::read_to_string(directory.path().join(path)).unwrap();
        assert_eq!(text("memory/agents/a1/cloister-i1/sbx_1/work/memory.limit_in_bytes"), "1048576");
        assert_eq!(text("memory/agents/a1/cloister-i1/sbx_1/agent/memory.limit_in_bytes"), "2097152");
        assert_eq!(text("cpu/cloister-i1/sbx_1/cpu.cfs_quota_us"), "50000");
        assert_eq!(text("pids/cloister-i1/sbx_1/work/pids.max"), "7");
        assert_eq!(text("pids/cloister-i1/sbx_1/agent/pids.max"), "3");
        assert_eq!(files.work.len(), 3);
        assert!(files.oom_file.ends_with("sbx_1/work/memory.oom_control"));
    }

    #[test]
    fn real_groups_hold_limit_count_kill_and_vanish() {
        let (own, mounts) = ["/proc/self/cgroup", "/proc/self/mountinfo"]
            .map(|path| fs::read_to_string(path).unwrap())
            .into();
        let driver = match V1Driver::resolve(&own, &mounts) {
            Ok(driver) if driver.probe().iter().all(Capability::is_ok) => driver,
            _ => {
                println!("SKIP: no writable control groups of version 1 here");
                return;
            }
        };
        let id = format!("sbx_test_{:016x}", rand::random::<u64>());
        let plan = driver.plan("unit-test", &id);
        let limits = GroupLimits {
            work_memory_bytes: 64 << 20,
            agent_memory_bytes: 64 << 20,
            cpu_millis: 1000,
            work_pids: 2,
            agent_pids: 8,
        };
        let files = driver.create(&plan, &limits).unwrap();
        let joins: Vec<String> =
            files.work.iter().map(|path| format!("echo 0 > {}", path.display())).collect();
        let script = format!("{}; sleep 60 & sleep 60 & sleep 60 & wait", joins.join(" && "));
        let mut child = std::process::Command::new("sh").args(["-c", &script]).spawn().unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        let refused = || fs::read_to_string(&files.pids_file).unwrap().contains("max 0");
        while refused() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(!refused(), "the third process was not refused");
        plan.kill_all(deadline).unwrap();
        child.wait().unwrap();
        assert!(plan.pids().is_empty());
        plan.remove(deadline).unwrap();
        assert!(!plan.exists());
    }
}
