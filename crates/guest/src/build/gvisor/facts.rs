//! What is true of a sentry, read from the host's `/proc`.

use std::fs;
use std::path::Path;

use rustix::process::Pid;

const STATUS_LINES: &[(&str, &str)] = &[
    ("CapEff", "sentry_capabilities"),
    ("Seccomp", "sentry_seccomp_mode"),
    ("NoNewPrivs", "sentry_no_new_privs"),
];
const NAMESPACES: &[&str] = &["ipc", "mnt", "net", "pid", "user", "uts"];

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
    let inner = fs::read_to_string(state.join("pid")).ok()?;
    let keeper = keeper.as_raw_nonzero();
    let children = fs::read_to_string(format!("/proc/{keeper}/task/{keeper}/children")).ok()?;
    children.split_whitespace().filter_map(|child| child.parse().ok()).find(|child: &i32| {
        let status = fs::read_to_string(format!("/proc/{child}/status")).unwrap_or_default();
        let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap_or_default();
        numbers.split_whitespace().last() == Some(inner.trim())
    })
}
