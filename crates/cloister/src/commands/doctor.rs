//! `cloister doctor`: each capability with what was tried, what came of it, and the remedy.
//!
//! Local checks need nothing to be running. With a coordinator that answers, each host's own findings follow: a
//! host finds its capabilities by using them, a sandbox included.

use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;
use cloister_api::app::{Host, ListHostsRequest};
use cloister_types::{ByteCount, Capability, CapabilityStatus};

use crate::cli::Invocation;
use crate::client::{self, Client};
use crate::error::{CliError, EXIT_FAILED, sudo};
use crate::supervisor::layout::{Layout, LayoutArgs};
use crate::supervisor::record::UpRecord;
use crate::terminal::{Terminal, Tone, one_line, word};

/// Free space below which a data directory is called full: the default layer of one session and the database.
const LEAST_FREE: ByteCount = ByteCount::gib(2);
/// Least major version of PostgreSQL.
const POSTGRES_LEAST: u32 = 14;

/// Check what this machine and its hosts can do
///
/// Works without a running coordinator. The exit code is 1 when something is broken.
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    #[command(flatten)]
    layout: LayoutArgs,
    /// Address and port that the API is to have
    #[arg(
        long,
        value_name = "ADDRESS:PORT",
        env = "CLOISTER_LISTEN",
        hide_env_values = true,
        default_value = "127.0.0.1:8080"
    )]
    listen: SocketAddr,
}

impl DoctorArgs {
    /// Checks everything and prints all findings.
    ///
    /// # Errors
    ///
    /// Only when nothing can be printed; what is broken is a finding.
    pub(crate) async fn run(self, invocation: &Invocation) -> Result<u8, CliError> {
        let terminal = invocation.terminal;
        let layout = self.layout.layout()?;
        let progress = terminal.progress("checking this machine");
        let up = UpRecord::load(&layout).ok().flatten().filter(UpRecord::is_alive);
        let mut checks = local_checks(&layout, self.listen, up.as_ref());
        progress.say("asking the coordinator");
        let (coordinator, hosts) = ask_coordinator(invocation, up.is_some()).await;
        checks.push(coordinator);
        drop(progress);
        let is_broken = checks.iter().any(|check| check.status == CapabilityStatus::Failed);
        if terminal.json {
            terminal.json(&serde_json::json!({"checks": checks, "hosts": hosts}))?;
        } else {
            for check in &checks {
                let status = match check.status {
                    CapabilityStatus::Ok => "ok",
                    CapabilityStatus::Failed => "failed",
                    CapabilityStatus::NotApplicable => "not_applicable",
                };
                terminal.line(finding_text(terminal, &check.name, status, &check.detail, &check.remedy))?;
            }
            for host in &hosts {
                let state = if host.connected { "connected" } else { "disconnected" };
                terminal.line(format!("\nhost {} ({}), {state}", host.id, one_line(&host.name)))?;
                for found in &host.capabilities {
                    let status = word(&found.status, "CAPABILITY_STATUS_");
                    terminal.line(finding_text(
                        terminal,
                        &found.name,
                        &status,
                        &found.detail,
                        &found.remedy,
                    ))?;
                }
            }
        }
        Ok(if is_broken { EXIT_FAILED } else { 0 })
    }
}

/// Returns a finding as people see it, one line and one for the remedy.
pub(crate) fn finding_text(
    terminal: Terminal,
    name: &str,
    status: &str,
    detail: &str,
    remedy: &str,
) -> String {
    let (mark, tone) = match status {
        "ok" => ("ok    ", Tone::Good),
        "not_applicable" => ("n/a   ", Tone::Quiet),
        _ => ("FAILED", Tone::Bad),
    };
    let mut text = format!("{}  {:<24} {}", terminal.paint(mark, tone), one_line(name), one_line(detail));
    if !remedy.is_empty() {
        text.push_str(&format!(
            "\n        {:<24} {} {}",
            "",
            terminal.paint("→", Tone::Quiet),
            one_line(remedy)
        ));
    }
    text
}

async fn ask_coordinator(invocation: &Invocation, is_up: bool) -> (Capability, Vec<Host>) {
    let name = "coordinator";
    let target = match invocation.target() {
        Ok(target) => target,
        Err(error) => {
            let remedy = error.hint().unwrap_or_default();
            return (
                Capability { remedy, ..Capability::not_applicable(name, error.to_string()) },
                Vec::new(),
            );
        }
    };
    let asked = async {
        let client = Client::connect_once(&target).await?;
        let answer =
            client.api().hosts().list_hosts_with_options(ListHostsRequest::default(), client::quick()).await;
        answer.map(|answer| answer.into_owned().hosts).map_err(|error| client.error(&error))
    };
    match asked.await {
        Ok(hosts) => {
            let connected = hosts.iter().filter(|host| host.connected).count();
            let found =
                format!("{} answers; {connected} of {} hosts connected", target.endpoint, hosts.len());
            if connected == 0 {
                let remedy = "start a host agent: `cloister up` runs one, `cloister host` runs one alone; its log says why not";
                (Capability::failed(name, found, remedy), hosts)
            } else {
                (Capability::ok(name, found), hosts)
            }
        }
        // The context of an `up` that was stopped: nothing is broken.
        Err(error @ CliError::Unreachable { .. }) if !is_up && is_local(&target.endpoint) => {
            let remedy = format!("`{}cloister up --detach` starts one", sudo());
            (Capability { remedy, ..Capability::not_applicable(name, error.to_string()) }, Vec::new())
        }
        Err(error) => {
            let remedy = error.hint().unwrap_or_default();
            (Capability::failed(name, error.to_string(), remedy), Vec::new())
        }
    }
}

/// Returns whether an endpoint is of this machine only.
fn is_local(endpoint: &str) -> bool {
    let authority = endpoint.split_once("://").map_or(endpoint, |(_, rest)| rest);
    authority.parse().is_ok_and(|address: SocketAddr| address.ip().is_loopback())
        || authority.starts_with("localhost:")
}

fn local_checks(layout: &Layout, listen: SocketAddr, up: Option<&UpRecord>) -> Vec<Capability> {
    vec![
        root(rustix::process::geteuid()),
        kernel(),
        user_namespaces(),
        seccomp(),
        landlock(),
        cgroups(),
        loop_devices(),
        postgres(),
        data_directory(&layout.data),
        port(listen, up),
        running(up, layout),
    ]
}

fn root(uid: rustix::process::Uid) -> Capability {
    let found = format!("effective uid is {}", uid.as_raw());
    if uid.is_root() {
        Capability::ok("root", found)
    } else {
        // Nothing is broken: most commands need no root, and where Cloister runs already none does.
        Capability::not_applicable("root", format!("{found}; `cloister up` and `cloister host` need root"))
    }
}

fn kernel() -> Capability {
    let name = rustix::system::uname();
    let found = format!("{} {}", name.sysname().to_string_lossy(), name.release().to_string_lossy());
    let release = name.release().to_string_lossy();
    let mut numbers =
        release.split(|character: char| !character.is_ascii_digit()).map_while(|part| part.parse().ok());
    let version: (u32, u32) = (numbers.next().unwrap_or_default(), numbers.next().unwrap_or_default());
    // Landlock came with 5.13 (kernel documentation, userspace-api/landlock); execs are confined by it.
    if version >= (5, 13) {
        Capability::ok("kernel", found)
    } else {
        Capability::failed("kernel", found, "use Linux 5.13 or later")
    }
}

fn read(path: &str) -> Result<String, String> {
    fs::read_to_string(path).map(|text| text.trim().to_owned()).map_err(|error| format!("`{path}`: {error}"))
}

fn user_namespaces() -> Capability {
    let path = "/proc/sys/user/max_user_namespaces";
    let remedy = "`sysctl -w user.max_user_namespaces=65536`, and keep it in /etc/sysctl.d";
    match read(path) {
        Ok(count) if count != "0" => Capability::ok("user_namespaces", format!("`{path}` is {count}")),
        Ok(count) => Capability::failed("user_namespaces", format!("`{path}` is {count}"), remedy),
        Err(error) => Capability::failed("user_namespaces", error, "use a kernel with CONFIG_USER_NS"),
    }
}

fn seccomp() -> Capability {
    let path = "/proc/sys/kernel/seccomp/actions_avail";
    match read(path) {
        Ok(actions) if actions.split_whitespace().any(|action| action == "errno") => {
            Capability::ok("seccomp", format!("`{path}` has {actions}"))
        }
        Ok(actions) => {
            Capability::failed("seccomp", format!("`{path}` has {actions}"), "use Linux 5.13 or later")
        }
        Err(error) => Capability::failed("seccomp", error, "use a kernel with CONFIG_SECCOMP_FILTER"),
    }
}

fn landlock() -> Capability {
    let path = "/sys/kernel/security/lsm";
    match read(path) {
        Ok(modules) if modules.split(',').any(|module| module == "landlock") => {
            Capability::ok("landlock", format!("`{path}` has {modules}"))
        }
        Ok(modules) => Capability::failed(
            "landlock",
            format!("`{path}` has {modules}"),
            "boot with `lsm=landlock,…` in front of the modules you have",
        ),
        // The file system may not be mounted in a container; a host tries Landlock itself.
        Err(error) => Capability::not_applicable(
            "landlock",
            format!("cannot be read here ({error}); a host tries it itself"),
        ),
    }
}

fn cgroups() -> Capability {
    let needed = ["cpu", "memory", "pids"];
    let missing = |found: &dyn Fn(&str) -> bool| -> Vec<&str> {
        needed.into_iter().filter(|name| !found(name)).collect()
    };
    let mounts = match read("/proc/self/mounts") {
        Ok(mounts) => mounts,
        Err(error) => return Capability::failed("cgroups", error, "mount /proc"),
    };
    let found = cgroup_mounts(&mounts);
    let unified = found.iter().find(|mount| mount.is_unified).and_then(|mount| {
        let controllers = read(&format!("{}/cgroup.controllers", mount.path)).ok()?;
        let has = |name: &str| controllers.split_whitespace().any(|controller| controller == name);
        missing(&has).is_empty().then(|| format!("v2 at `{}` with {controllers}", mount.path))
    });
    if let Some(detail) = unified {
        return Capability::ok("cgroups", detail);
    }
    let has = |name: &str| {
        found.iter().any(|mount| !mount.is_unified && mount.options.iter().any(|option| option == name))
    };
    match missing(&has).as_slice() {
        [] => Capability::ok("cgroups", "v1 with cpu, memory and pids".to_owned()),
        names => Capability::failed(
            "cgroups",
            format!("no {} among the mounts in /proc/self/mounts", names.join(", ")),
            "boot with cgroups v2 (`systemd.unified_cgroup_hierarchy=1`), or mount the missing v1 controllers",
        ),
    }
}

#[derive(Debug, PartialEq, Eq)]
struct CgroupMount {
    path: String,
    is_unified: bool,
    options: Vec<String>,
}

fn cgroup_mounts(mounts: &str) -> Vec<CgroupMount> {
    let parse = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let &[_, path, kind, options, ..] = fields.as_slice() else { return None };
        matches!(kind, "cgroup" | "cgroup2").then(|| CgroupMount {
            path: path.to_owned(),
            is_unified: kind == "cgroup2",
            options: options.split(',').map(str::to_owned).collect(),
        })
    };
    mounts.lines().filter_map(parse).collect()
}

fn loop_devices() -> Capability {
    let path = Path::new("/dev/loop-control");
    if path.exists() {
        Capability::ok("loop_devices", format!("`{}` is there", path.display()))
    } else {
        Capability::failed(
            "loop_devices",
            format!("`{}` is not there", path.display()),
            "`modprobe loop`; without it layers of limited size need project quotas",
        )
    }
}

fn postgres() -> Capability {
    let name = "postgres";
    if std::env::var_os("DATABASE_URL").is_some_and(|url| !url.is_empty()) {
        return Capability::not_applicable(name, "DATABASE_URL names a server of yours");
    }
    let remedy = "install PostgreSQL 14 or later (`apt-get install postgresql`), or set DATABASE_URL to a server of yours";
    let programs = postgres_programs();
    let mut tried = Vec::new();
    for program in &programs {
        let Some(version) = version_of(program) else { continue };
        let major = major_version(&version).unwrap_or_default();
        if major >= POSTGRES_LEAST {
            return Capability::ok(name, format!("`{} --version` printed `{version}`", program.display()));
        }
        tried.push(format!("`{}` printed `{version}`", program.display()));
    }
    let found = if tried.is_empty() {
        "no `postgres` with `initdb` beside it in PATH or /usr/lib/postgresql/*/bin".to_owned()
    } else {
        tried.join("; ")
    };
    Capability::failed(name, found, remedy)
}

fn postgres_programs() -> Vec<PathBuf> {
    let mut directories: Vec<PathBuf> = fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok().map(|entry| entry.path().join("bin")))
        .collect();
    directories.sort();
    directories.reverse();
    directories.extend(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()));
    directories
        .into_iter()
        .filter(|directory| directory.join("initdb").exists())
        .map(|directory| directory.join("postgres"))
        .filter(|program| program.exists())
        .collect()
}

fn version_of(program: &Path) -> Option<String> {
    let output = Command::new(program).arg("--version").output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn major_version(text: &str) -> Option<u32> {
    text.split_whitespace()
        .find_map(|part| part.split(|character: char| !character.is_ascii_digit()).next()?.parse().ok())
}

fn data_directory(path: &Path) -> Capability {
    let name = "data_directory";
    // The nearest directory that is there already: the others would be made in it.
    let there = path.ancestors().find(|ancestor| ancestor.is_dir()).unwrap_or(Path::new("/"));
    match rustix::fs::statvfs(there) {
        Ok(space) => {
            let free = ByteCount(space.f_bavail.saturating_mul(space.f_frsize));
            let found = format!("{free} free for `{}`", path.display());
            if free >= LEAST_FREE {
                Capability::ok(name, found)
            } else {
                Capability::failed(name, found, "free some space, or give `--data-dir` a larger disk")
            }
        }
        Err(errno) => {
            Capability::failed(name, format!("statvfs `{}`: {errno}", there.display()), "check the disk")
        }
    }
}

fn port(listen: SocketAddr, up: Option<&UpRecord>) -> Capability {
    let name = "port";
    if let Some(up) = up {
        // Whichever it was given: the one that another `up` would take is not asked about.
        return Capability::ok(name, format!("{} is the running coordinator's", up.endpoint));
    }
    match TcpListener::bind(listen) {
        Ok(_) => Capability::ok(name, format!("{listen} can be bound")),
        Err(error) => Capability::failed(
            name,
            format!("bind {listen}: {error}"),
            "give `--listen` another address and port, or stop what listens there (`ss -ltnp` shows it)",
        ),
    }
}

fn running(up: Option<&UpRecord>, layout: &Layout) -> Capability {
    let name = "up";
    match up {
        Some(up) if up.ready => {
            Capability::ok(name, format!("runs as process {} on `{}`", up.pid, up.data_dir.display()))
        }
        Some(up) => Capability::ok(name, format!("is starting as process {}", up.pid)),
        None => Capability {
            remedy: format!("`{}cloister up --detach` starts it", sudo()),
            ..Capability::not_applicable(name, format!("does not run on `{}`", layout.data.display()))
        },
    }
}

#[cfg(test)]
mod tests {
    use rustix::process::Uid;

    use super::*;

    #[test]
    fn not_to_be_root_is_said_and_is_nothing_broken() {
        assert_eq!(root(Uid::ROOT).status, CapabilityStatus::Ok);
        let other = root(Uid::from_raw(1000));
        assert_eq!(other.status, CapabilityStatus::NotApplicable);
        assert!(other.detail.contains("1000"), "{other:?}");
    }

    #[test]
    fn versions_and_mounts_are_read_as_they_are_printed() {
        assert_eq!(major_version("postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)"), Some(15));
        assert_eq!(major_version("postgres (PostgreSQL) 18beta1"), Some(18));
        assert_eq!(major_version("nothing"), None);
        let mounts = "cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n\
                      cgroup /sys/fs/cgroup/pids cgroup rw,relatime,pids 0 0\nproc /proc proc rw 0 0\n";
        let found = cgroup_mounts(mounts);
        assert_eq!(found.len(), 2);
        assert!(found[0].is_unified);
        assert!(found[1].options.contains(&"pids".to_owned()));
    }

    #[test]
    fn a_taken_port_is_broken_unless_it_is_ours() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let found = port(address, None);
        assert_eq!(found.status, CapabilityStatus::Failed);
        assert!(found.remedy.contains("--listen"));
        drop(listener);
        assert!(port(address, None).is_ok());
    }

    #[test]
    fn only_loopback_is_of_this_machine() {
        for endpoint in ["http://127.0.0.1:8080", "http://[::1]:80", "http://localhost:8080"] {
            assert!(is_local(endpoint), "{endpoint}");
        }
        for endpoint in ["http://192.0.2.1:8080", "http://localhost.example:8080", "http://cloister:8080"] {
            assert!(!is_local(endpoint), "{endpoint}");
        }
    }

    #[test]
    fn every_finding_has_a_name_of_its_own_and_every_failure_a_remedy() {
        let directory = tempfile::tempdir().unwrap();
        let layout = Layout { data: directory.path().join("a"), run: directory.path().join("b") };
        let checks = local_checks(&layout, SocketAddr::from(([127, 0, 0, 1], 0)), None);
        let mut names: Vec<&str> = checks.iter().map(|check| check.name.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), checks.len());
        for check in checks {
            assert!(!check.detail.is_empty(), "{check:?}");
            assert!(check.status != CapabilityStatus::Failed || !check.remedy.is_empty(), "{check:?}");
        }
    }
}
