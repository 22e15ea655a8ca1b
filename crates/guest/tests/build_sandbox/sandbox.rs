//! One sandbox of a test: its directory, its shim process, and asking its pid 1.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use cloister_guest::build::build_and_start;
use cloister_guest::shim::config::{CgroupConfig, Defence, DiskConfig, RootConfig, ShimConfig};
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

use crate::guest::{Answer, Request};
use crate::gvisor;

/// The one line that the test's shim prints.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Report {
    Started { pid: i32, guest_socket: PathBuf, timings: Vec<(String, u64)> },
    Failed { step: String, path: Option<PathBuf>, errno: i32 },
}

/// Builds, reports, and stays until pid 1 has ended.
pub(crate) fn run_shim(config: &str) -> ExitCode {
    let config: ShimConfig = serde_json::from_slice(&std::fs::read(config).unwrap()).unwrap();
    let report = |report: &Report| println!("{}", serde_json::to_string(report).unwrap());
    match build_and_start(&config) {
        Ok(started) => {
            report(&Report::Started {
                pid: started.pid.as_raw_nonzero().get(),
                guest_socket: started.guest_socket.clone(),
                timings: started
                    .timings
                    .iter()
                    .map(|(step, elapsed)| (step.clone(), u64::try_from(elapsed.as_micros()).unwrap()))
                    .collect(),
            });
            let status = rustix::process::waitpid(Some(started.pid), rustix::process::WaitOptions::empty());
            eprintln!("pid 1 ended: {status:?}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            report(&Report::Failed {
                step: error.step.clone(),
                path: error.path.clone(),
                errno: error.source.raw_os_error(),
            });
            // Stays, so that the test sees that the failure itself left nothing, not the exit.
            let _ = std::io::stdin().read(&mut [0]);
            ExitCode::FAILURE
        }
    }
}

pub(crate) struct Sandbox {
    pub(crate) config: ShimConfig,
    pub(crate) timings: Vec<(String, u64)>,
    pub(crate) pid: i32,
    shim: Child,
    guest_socket: PathBuf,
    directory: TempDir,
}

/// A config with a tmpfs layer and no cgroups, in a directory of its own.
pub(crate) fn config(directory: &Path) -> ShimConfig {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    // The runner starts a process a case, several at once: sandboxes must not share a range, or one case counts the
    // processes of another. 4096 × 15 ranges end below the largest uid.
    let own = std::process::id() % 4096;
    let id_base = 1_000_000 + 65_536 * (own + 4096 * (NEXT.fetch_add(1, Ordering::Relaxed) % 15));
    ShimConfig {
        kernel: gvisor::kernel(),
        sandbox_id: "sbx_test".to_owned(),
        hostname: "inside".to_owned(),
        sandbox_dir: directory.to_owned(),
        exec_dir: directory.join("execs"),
        socket: directory.join("shim.sock"),
        id_base,
        id_count: 65_536,
        cgroup: CgroupConfig { agent_join: vec![], work_join: vec![], oom_file: None, pids_file: None },
        netns: None,
        disk: DiskConfig::Tmpfs { bytes: 64 << 20 },
        root: RootConfig::Host,
        env: BTreeMap::from([
            ("PATH".to_owned(), "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin".to_owned()),
            ("HOME".to_owned(), "/workspace".to_owned()),
            ("LANG".to_owned(), "C.UTF-8".to_owned()),
        ]),
        cwd: "/workspace".to_owned(),
        spool_max_bytes: 1 << 20,
        session_spool_max_bytes: 16 << 20,
        execs_max: 16,
        warm: false,
        defences_off: vec![],
        fault_file: None,
    }
}

impl Sandbox {
    pub(crate) fn start() -> Self {
        Self::start_with(|_| {})
    }

    pub(crate) fn without(defences: &[Defence]) -> Self {
        Self::start_with(|config| config.defences_off = defences.to_vec())
    }

    pub(crate) fn start_with(change: impl FnOnce(&mut ShimConfig)) -> Self {
        Self::try_start(change).unwrap_or_else(|(report, _, _)| panic!("{report:?}"))
    }

    /// The failure comes with the shim that still runs, and its directory.
    pub(crate) fn try_start(change: impl FnOnce(&mut ShimConfig)) -> Result<Self, (Report, Child, TempDir)> {
        let directory = tempfile::tempdir().unwrap();
        let mut config = config(directory.path());
        change(&mut config);
        let path = directory.path().join("shim.json");
        std::fs::write(&path, serde_json::to_vec(&config).unwrap()).unwrap();
        let mut shim = Command::new(std::env::current_exe().unwrap())
            .arg("shim")
            .arg(&path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(shim.stdout.take().unwrap()).read_line(&mut line).unwrap();
        match serde_json::from_str(&line).unwrap() {
            Report::Started { pid, guest_socket, timings } => {
                Ok(Self { config, timings, pid, shim, guest_socket, directory })
            }
            failed @ Report::Failed { .. } => Err((failed, shim, directory)),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }

    pub(crate) fn shim_pid(&self) -> u32 {
        self.shim.id()
    }

    fn ask(&self, request: &Request) -> Answer {
        self.try_ask(request).unwrap_or_else(|| panic!("pid 1 ended at {request:?}"))
    }

    /// `None` when the sandbox has ended meanwhile.
    fn try_ask(&self, request: &Request) -> Option<Answer> {
        let connected = OnceCell::new();
        // On gVisor the agent has yet to make its socket.
        wait_until("the guest agent's socket", || {
            let stream = UnixStream::connect(&self.guest_socket).map_err(|error| error.to_string())?;
            connected.set(stream).map_err(|_| "twice".to_owned())
        });
        let mut stream = connected.into_inner().unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut line = serde_json::to_string(request).unwrap();
        line.push('\n');
        stream.write_all(line.as_bytes()).unwrap();
        let mut answer = String::new();
        if stream.read_to_string(&mut answer).is_err() || answer.is_empty() {
            return None;
        }
        Some(
            serde_json::from_str(&answer)
                .unwrap_or_else(|error| panic!("{error}: `{answer}` to {request:?}")),
        )
    }

    /// Facts by name, as pid 1 reads them.
    pub(crate) fn facts(&self) -> BTreeMap<String, String> {
        self.ask(&Request::Facts)
            .output
            .lines()
            .map(|line| line.split_once('=').unwrap())
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect()
    }

    /// What became of an attack by root inside.
    pub(crate) fn attack(&self, name: &str, argument: &str) -> String {
        self.attack_as(0, name, argument)
    }

    pub(crate) fn attack_as(&self, uid: u32, name: &str, argument: &str) -> String {
        let request = Request::Attack { name: name.to_owned(), argument: argument.to_owned(), uid };
        let Some(answer) = self.try_ask(&request) else { return "the sandbox ended".to_owned() };
        // An attack that says nothing was killed.
        if answer.output.is_empty() {
            format!("signal {}", answer.code - 128)
        } else {
            answer.output.trim().to_owned()
        }
    }

    /// Exit code and output of a shell script run by `uid`.
    pub(crate) fn shell_as(&self, uid: u32, script: &str) -> (i32, String) {
        let argv = ["bash", "-c", script].map(str::to_owned).to_vec();
        let answer = self.ask(&Request::Program { argv, uid });
        (answer.code, answer.output.trim().to_owned())
    }

    /// Output of a shell script run by root, which must succeed.
    pub(crate) fn shell(&self, script: &str) -> String {
        let (code, output) = self.shell_as(0, script);
        assert_eq!(code, 0, "`{script}` printed: {output}");
        output
    }

    pub(crate) fn kill_shim(&mut self) {
        self.shim.kill().unwrap();
        self.shim.wait().unwrap();
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        // Already dead in the tests about that.
        let _ = self.shim.kill();
        let _ = self.shim.wait();
    }
}

/// Waits until `condition` holds.
///
/// # Panics
///
/// After ten seconds, with the last of what `status` returned.
pub(crate) fn wait_until(what: &str, condition: impl Fn() -> Result<(), String>) {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        match condition() {
            Ok(()) => return,
            Err(status) if Instant::now() > deadline => panic!("{what}: {status}"),
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}
