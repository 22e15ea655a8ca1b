//! What is true of the sandbox, read by pid 1 from the kernel after its hardening, not from our own configuration.

use std::fs;

use super::{AgentConfig, GuestKernel, HardenError, landlock_abi};
use crate::shim::config::Defence;

/// Lines of `/proc/self/status` that are facts, and the names they get.
const STATUS_LINES: &[(&str, &str)] = &[
    ("CapBnd", "capability_bounding_set"),
    ("CapEff", "guest_agent_capabilities"),
    ("NoNewPrivs", "no_new_privs"),
    ("Seccomp", "seccomp_mode"),
    ("Seccomp_filters", "seccomp_filters"),
];

const NAMESPACES: &[&str] = &["cgroup", "ipc", "mnt", "net", "pid", "user", "uts"];

/// Returns name and value of each isolation fact: kernel, hostname, namespace inodes, id maps, seccomp mode, privileges,
/// capabilities, Landlock ABI. What `ShimReport::Ready` carries; call after [`pid1_apply`](super::pid1_apply).
///
/// # Errors
///
/// When `/proc/self` cannot be read.
pub fn isolation_facts(config: &AgentConfig) -> Result<Vec<(String, String)>, HardenError> {
    const STEP: &str = "read isolation facts";
    let read = |path: String| fs::read_to_string(path).map_err(|error| HardenError::new(STEP, error));
    let name = rustix::system::uname();
    let mut facts = vec![
        ("kernel".to_owned(), name.release().to_string_lossy().into_owned()),
        ("hostname".to_owned(), name.nodename().to_string_lossy().into_owned()),
        ("guest_agent_pid".to_owned(), std::process::id().to_string()),
    ];
    let is_host = config.kernel == GuestKernel::Host;
    // On gVisor namespaces and maps are the sentry's own invention; what holds is read from outside.
    if is_host {
        for namespace in NAMESPACES {
            let link = fs::read_link(format!("/proc/self/ns/{namespace}"))
                .map_err(|error| HardenError::new(STEP, error))?;
            facts.push((format!("namespace.{namespace}"), inode(&link.to_string_lossy())));
        }
        for map in ["uid_map", "gid_map"] {
            facts.push((map.to_owned(), words(&read(format!("/proc/self/{map}"))?)));
        }
    }
    let status = read("/proc/self/status".to_owned())?;
    for (line, fact) in STATUS_LINES {
        let value = status.lines().find_map(|text| text.strip_prefix(line)?.strip_prefix(':'));
        if let Some(value) = value {
            facts.push(((*fact).to_owned(), value.trim().to_owned()));
        }
    }
    if !is_host {
        return Ok(facts);
    }
    let abi = if config.is_off(Defence::Landlock) {
        "off".to_owned()
    } else {
        landlock_abi().map_err(|errno| HardenError::new(STEP, errno))?.to_string()
    };
    facts.push(("landlock_abi".to_owned(), abi));
    Ok(facts)
}

/// Returns `4026531835` of `user:[4026531835]`.
fn inode(link: &str) -> String {
    link.chars().filter(char::is_ascii_digit).collect()
}

/// Returns `text` with single spaces between words.
fn words(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
