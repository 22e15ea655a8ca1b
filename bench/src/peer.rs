//! What a user would pick instead: bubblewrap, and an OCI runtime with a bundle like Cloister's image `host`.
//!
//! A peer that is missing, or that cannot run the empty command here, is left out with the reason. None of them
//! gets a cgroup, a seccomp filter or a disk limit, so that the comparison is in their favour. On a machine whose
//! cgroups are the version 1 hybrid, crun runs only where a version 2 hierarchy is mounted on `/sys/fs/cgroup`: the
//! whole benchmark starts itself again in a mount namespace of its own that has it.

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

const INSIDE_ENV: &str = "CLOISTER_BENCH_INSIDE";

/// Another program that makes sandboxes.
pub(crate) struct Peer {
    /// The name of the program.
    pub(crate) name: &'static str,
    program: PathBuf,
    bundle: Option<Bundle>,
}

/// An OCI bundle, and the container in it that `exec` goes to.
struct Bundle {
    directory: tempfile::TempDir,
    running: bool,
    count: u32,
}

impl Peer {
    /// Returns the peers that work here, and why the others do not.
    pub(crate) fn find() -> (Vec<Self>, Vec<String>) {
        let mut found = Vec::new();
        let mut skipped = Vec::new();
        match Self::bubblewrap() {
            Ok(peer) => found.push(peer),
            Err(error) => skipped.push(format!("bwrap: {error:#}")),
        }
        for runtime in ["crun", "runc"] {
            match Self::oci(runtime, runtime.into()) {
                Ok(peer) => {
                    found.push(peer);
                    break;
                }
                Err(error) => skipped.push(format!("{runtime}: {error:#}")),
            }
        }
        (found, skipped)
    }

    fn bubblewrap() -> Result<Self> {
        let mut peer = Self { name: "bwrap", program: "bwrap".into(), bundle: None };
        peer.create_and_run()?;
        Ok(peer)
    }

    /// Returns an OCI runtime as a peer.
    ///
    /// # Errors
    ///
    /// When it does not run the empty command here.
    pub(crate) fn oci(name: &'static str, program: PathBuf) -> Result<Self> {
        let bundle = Bundle { directory: bundle(&program)?, running: false, count: 0 };
        let mut peer = Self { name, program, bundle: Some(bundle) };
        peer.create_and_run()?;
        Ok(peer)
    }

    /// Makes a sandbox, runs the empty command in it to its end, and returns how long that took.
    ///
    /// # Errors
    ///
    /// When the command does not exit with 0.
    pub(crate) fn create_and_run(&mut self) -> Result<Duration> {
        let mut command = match &mut self.bundle {
            None => bubblewrap_command(),
            Some(bundle) => {
                bundle.count += 1;
                let id = format!("cloister-bench-{}-{}", std::process::id(), bundle.count);
                let mut command = runtime(self.name, &self.program);
                command.arg("run").arg("--bundle").arg(bundle.directory.path()).arg(id);
                command
            }
        };
        time(&mut command)
    }

    /// Runs the empty command in a container that already runs; `None` when this peer has no such thing.
    ///
    /// # Errors
    ///
    /// When the command does not exit with 0.
    pub(crate) fn exec(&mut self) -> Result<Option<Duration>> {
        let Some(bundle) = &mut self.bundle else { return Ok(None) };
        let id = format!("cloister-bench-{}-exec", std::process::id());
        if !bundle.running {
            let path = bundle.directory.path().join("config.json");
            let mut config: Value = serde_json::from_slice(&fs::read(&path)?)?;
            config["process"]["args"] = json!(["sleep", "3600"]);
            fs::write(&path, serde_json::to_vec(&config)?)?;
            let mut command = runtime(self.name, &self.program);
            command.arg("run").arg("--detach").arg("--bundle").arg(bundle.directory.path()).arg(&id);
            time(&mut command)?;
            bundle.running = true;
        }
        let mut command = runtime(self.name, &self.program);
        command.arg("exec").arg(&id).arg("true");
        time(&mut command).map(Some)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        if self.bundle.as_ref().is_some_and(|bundle| bundle.running) {
            let id = format!("cloister-bench-{}-exec", std::process::id());
            let _ = time(runtime(self.name, &self.program).arg("delete").arg("--force").arg(id));
        }
    }
}

fn bubblewrap_command() -> Command {
    let mut command = Command::new("bwrap");
    command.args([
        "--ro-bind",
        "/usr",
        "/usr",
        "--symlink",
        "usr/bin",
        "/bin",
        "--symlink",
        "usr/lib",
        "/lib",
    ]);
    command.args(["--symlink", "usr/lib64", "/lib64", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]);
    command.args(["--unshare-all", "--die-with-parent", "--", "true"]);
    command
}

fn runtime(name: &str, program: &Path) -> Command {
    let mut command = Command::new(program);
    if name == "runsc" {
        command.args(["--network=none", "--ignore-cgroups", "--overlay2=none"]);
    }
    if name == "crun" && is_hybrid() {
        command.arg("--cgroup-manager=disabled");
    }
    command
}

/// Makes a bundle with the host's `/usr`, as the runtime's own `spec` has the rest.
fn bundle(program: &Path) -> Result<tempfile::TempDir> {
    let directory = tempfile::tempdir().context("make a directory for the bundle")?;
    time(Command::new(program).arg("spec").current_dir(directory.path()))?;
    let root = directory.path().join("rootfs");
    fs::create_dir_all(root.join("usr"))?;
    for link in ["bin", "lib", "lib64", "sbin"] {
        symlink(Path::new("usr").join(link), root.join(link))?;
    }
    let path: PathBuf = directory.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path)?).context("parse the runtime's spec")?;
    config["process"]["terminal"] = json!(false);
    config["process"]["args"] = json!(["true"]);
    let mounts = config["mounts"].as_array_mut().context("the runtime's spec has mounts")?;
    mounts.retain(|mount| mount["destination"] != "/sys/fs/cgroup");
    mounts.push(json!({"destination": "/usr", "type": "bind", "source": "/usr", "options": ["bind", "ro"]}));
    fs::write(&path, serde_json::to_vec(&config)?)?;
    Ok(directory)
}

fn time(command: &mut Command) -> Result<Duration> {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let begin = Instant::now();
    // A detached container keeps the error pipe open: only the status is waited for.
    let mut child = command.spawn().context("start it")?;
    let status = child.wait()?;
    let elapsed = begin.elapsed();
    ensure!(status.success(), "{command:?} ended with {status}");
    Ok(elapsed)
}

fn is_hybrid() -> bool {
    Path::new("/sys/fs/cgroup/unified").is_dir() || std::env::var_os(INSIDE_ENV).is_some()
}

/// Starts this program again where crun can run, if that needs a mount namespace; returns otherwise.
///
/// # Errors
///
/// When the program cannot be started again.
pub(crate) fn enter_mount_namespace() -> Result<()> {
    let wanted = is_hybrid() && std::env::var_os(INSIDE_ENV).is_none();
    let probe = Command::new("unshare").args(["--mount", "true"]).stderr(Stdio::null()).status();
    if !wanted || !probe.is_ok_and(|status| status.success()) {
        return Ok(());
    }
    let program = std::env::current_exe().context("find this program")?;
    let error = Command::new("unshare")
        .args(["--mount", "sh", "-c", "mount -t cgroup2 none /sys/fs/cgroup; exec \"$0\" \"$@\""])
        .arg(program)
        .args(std::env::args_os().skip(1))
        .env(INSIDE_ENV, "1")
        .exec();
    Err(error).context("start again in a mount namespace")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_that_was_found_runs_commands_and_leaves_nothing_running() {
        let (peers, skipped) = Peer::find();
        if peers.is_empty() {
            println!("SKIP: no peer works here: {}", skipped.join("; "));
            return;
        }
        for mut peer in peers {
            assert!(peer.create_and_run().expect("the probe did the same") > Duration::ZERO);
            let is_oci = peer.bundle.is_some();
            assert_eq!(peer.exec().expect("exec in a running container").is_some(), is_oci, "{}", peer.name);
            let name = peer.program.clone();
            drop(peer);
            if is_oci {
                let id = format!("cloister-bench-{}-exec", std::process::id());
                let state = Command::new(&name).arg("state").arg(id).output().expect("the runtime is there");
                assert!(!state.status.success(), "{name:?} still knows the container");
            }
        }
    }
}
