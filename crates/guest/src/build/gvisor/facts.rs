//! What is true of a sentry, read from the host's `/proc`.

use std::fs;
use std::path::Path;

use rustix::process::Pid;

const STATUS_LINES: &[(&str, &str)] = &[
    ("CapEff", "sentry_capabilities"),
    ("Seccomp", "sentry_seccomp_mode"),
    ("NoNewPrivs", "sentry_no_new_privs"),
];
/// How often a sentry's stubs are looked for: there are two at least.
const LOOKS: usize = 10;
const NAMESPACES: &[&str] = &["ipc", "mnt", "net", "pid", "user", "uts"];

/// Lets the kernel leave pid 1 of the sandbox alone when memory runs out, before any program was started: its stubs are the
/// sentry's children but the first, from which all others are forked. One that cannot be written changes only that.
pub(crate) fn spare_pid_1(keeper: Pid, state: &Path) {
    let Some(sentry) = find(keeper, state) else { return };
    // While other processes come and go, the kernel may leave some out of a list of children.
    let stubs = std::iter::repeat_with(|| stubs(sentry)).take(LOOKS).find(|stubs| stubs.len() > 1);
    for stub in stubs.iter().flatten().skip(1) {
        // A stub has a child of its own.
        let own = fs::read_to_string(format!("/proc/{stub}/task/{stub}/children")).unwrap_or_default();
        for process in own.split_whitespace().chain([stub.to_string().as_str()]) {
            let _ = fs::write(format!("/proc/{process}/oom_score_adj"), "0");
        }
    }
}

/// Returns the children of a sentry, oldest first.
fn stubs(sentry: i32) -> Vec<i32> {
    let mut children: Vec<(u64, i32)> = Vec::new();
    for task in fs::read_dir(format!("/proc/{sentry}/task")).into_iter().flatten().flatten() {
        let listed = fs::read_to_string(task.path().join("children")).unwrap_or_default();
        children.extend(listed.split_whitespace().filter_map(|pid| {
            let pid = pid.parse().ok()?;
            Some((started(pid)?, pid))
        }));
    }
    children.sort_unstable();
    children.into_iter().map(|(_, pid)| pid).collect()
}

/// Returns when a process was started, in ticks since the boot (proc(5), `stat`, field 22).
fn started(pid: i32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit(')').next()?.split_whitespace().nth(19)?.parse().ok()
}

/// Returns name and value of each fact of the sentry that `keeper` keeps; none of one that is gone.
pub(crate) fn sentry_facts(keeper: Pid, state: &Path) -> Vec<(String, String)> {
    let Some(sentry) = find(keeper, state) else { return Vec::new() };
    let mut facts = vec![("sentry_pid".to_owned(), sentry.to_string())];
    for namespace in NAMESPACES {
        if let Ok(link) = fs::read_link(format!("/proc/{sentry}/ns/{namespace}")) {
            let inode = link.to_string_lossy().chars().filter(char::is_ascii_digit).collect();
            facts.push((format!("namespace.{namespace}"), inode));
        }
    }
    for map in ["uid_map", "gid_map"] {
        if let Ok(text) = fs::read_to_string(format!("/proc/{sentry}/{map}")) {
            facts.push((map.to_owned(), text.split_whitespace().collect::<Vec<_>>().join(" ")));
        }
    }
    let status = fs::read_to_string(format!("/proc/{sentry}/status")).unwrap_or_default();
    for (line, fact) in STATUS_LINES {
        let value = status.lines().find_map(|text| text.strip_prefix(line)?.strip_prefix(':'));
        facts.extend(value.map(|value| ((*fact).to_owned(), value.trim().to_owned())));
    }
    facts
}

/// Returns the sentry's pid as the host has it: the keeper's child that has, in the keeper's namespace, the number that
/// runsc wrote down.
fn find(keeper: Pid, state: &Path) -> Option<i32> {
    let inner: i32 = fs::read_to_string(state.join("pid")).ok()?.trim().parse().ok()?;
    let keeper = keeper.as_raw_nonzero().get();
    // The keeper is pid 1 of the innermost namespace that it is in; the sentry is in one more.
    let level = numbers(keeper)?.len().checked_sub(1)?;
    let children = fs::read_to_string(format!("/proc/{keeper}/task/{keeper}/children")).ok()?;
    let mut children = children.split_whitespace().filter_map(|child| child.parse().ok());
    children.find(|child: &i32| numbers(*child).is_some_and(|numbers| numbers.get(level) == Some(&inner)))
}

/// Returns the numbers of a process in each process namespace that it is in, the outermost first.
fn numbers(pid: i32) -> Option<Vec<i32>> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    line.split_whitespace().map(|number| number.parse().ok()).collect()
}
