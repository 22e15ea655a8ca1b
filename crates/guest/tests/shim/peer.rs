//! A shim with its guest agent, and what tests ask of them.

use std::io::BufRead as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use cloister_guest::client::{Client, OutputReader};
use cloister_guest::shim::config::{
    CgroupConfig, DiskConfig, KernelConfig, RootConfig, ShimConfig, ShimReport,
};
use cloister_types::exec::ExecRecord;
use cloister_types::{ExecId, ExecSpec, Exit, OutputFrame, OutputStream};

/// Long enough for a loaded machine, short enough to fail.
pub const DEADLINE: Duration = Duration::from_secs(20);

pub fn run<T>(test: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime
        .block_on(async { tokio::time::timeout(Duration::from_secs(120), test).await })
        .expect("the test is done in time")
}

pub struct Peer {
    pub dir: tempfile::TempDir,
    pub shim: Child,
    pub client: Client,
    pub config: ShimConfig,
    pub report: ShimReport,
}

pub fn config(dir: &std::path::Path) -> ShimConfig {
    for name in ["sandbox", "execs"] {
        std::fs::create_dir_all(dir.join(name)).unwrap();
    }
    ShimConfig {
        kernel: KernelConfig::Host,
        sandbox_id: "sbx_test".to_owned(),
        hostname: "test".to_owned(),
        sandbox_dir: dir.join("sandbox"),
        exec_dir: dir.join("execs"),
        socket: dir.join("s.sock"),
        id_base: 100_000,
        id_count: 65_536,
        cgroup: CgroupConfig { agent_join: vec![], work_join: vec![], oom_file: None, pids_file: None },
        netns: None,
        disk: DiskConfig::Directory { path: dir.to_owned() },
        root: RootConfig::Host,
        env: [("PATH".to_owned(), "/usr/bin:/bin".to_owned()), ("FROM_IMAGE".to_owned(), "yes".to_owned())]
            .into(),
        cwd: "/".to_owned(),
        spool_max_bytes: 4 * 1024 * 1024,
        session_spool_max_bytes: 64 * 1024 * 1024,
        execs_max: 64,
        warm: false,
        defences_off: Vec::new(),
        fault_file: None,
    }
}

impl Peer {
    pub fn start() -> Self {
        Self::start_with(|_| {})
    }

    pub fn start_with(change: impl FnOnce(&mut ShimConfig)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut config = config(dir.path());
        change(&mut config);
        Self::start_in(dir, config)
    }

    pub fn start_in(dir: tempfile::TempDir, config: ShimConfig) -> Self {
        let file = dir.path().join("shim.json");
        std::fs::write(&file, serde_json::to_vec(&config).unwrap()).unwrap();
        let mut shim = Command::new(env!("CARGO_BIN_EXE_cloister-guest"))
            .args(["shim", "--unisolated", "--config"])
            .arg(&file)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = std::io::BufReader::new(shim.stdout.take().unwrap()).lines();
        let report = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        assert!(lines.next().is_none(), "one line and the end");
        let client = Client::new(&config.socket, &config.sandbox_id, DEADLINE);
        Self { dir, shim, client, config, report }
    }

    pub async fn spawn(&self, spec: ExecSpec) -> ExecRecord {
        let exec_id = ExecId::generate();
        self.client.start_exec(&exec_id, exec_id.as_str(), &spec).await.unwrap()
    }

    /// Runs to the end; returns standard output, standard error and the exit.
    pub async fn run(&self, spec: ExecSpec) -> (Vec<u8>, Vec<u8>, Exit) {
        let record = self.spawn(spec).await;
        let mut reader = self.client.read_output(&record.exec_id, 0, false).await.unwrap();
        collect(&mut reader).await
    }

    pub fn exec_path(&self, exec_id: &ExecId) -> PathBuf {
        self.config.exec_dir.join(exec_id.as_str())
    }

    /// The guest agent's process id.
    pub fn agent_pid(&self) -> u32 {
        let path = format!("/proc/{0}/task/{0}/children", self.shim.id());
        std::fs::read_to_string(path).unwrap().split_whitespace().next().unwrap().parse().unwrap()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // The guest agent dies with it, and without a process namespace the programs do not.
        let programs = descendants(self.shim.id());
        let _ = self.shim.kill();
        let _ = self.shim.wait();
        for pid in programs {
            let pid = rustix::process::Pid::from_raw(pid).expect("a process has a number");
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }
}

/// Everything that a process has started and that still runs.
fn descendants(pid: u32) -> Vec<i32> {
    let mut found = vec![i32::try_from(pid).unwrap()];
    let mut next = 0;
    while let Some(parent) = found.get(next).copied() {
        next += 1;
        let children = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children"));
        found.extend(children.unwrap_or_default().split_whitespace().map(|pid| pid.parse::<i32>().unwrap()));
    }
    found.split_off(1)
}

/// Reads to the end; checks that nothing is missing or doubled.
pub async fn collect(reader: &mut OutputReader) -> (Vec<u8>, Vec<u8>, Exit) {
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    loop {
        match reader.next().await.unwrap().expect("no end without an exit") {
            OutputFrame::Data { stream: OutputStream::Stdout, data, .. } => stdout.extend(data),
            OutputFrame::Data { stream: OutputStream::Stderr, data, .. } => stderr.extend(data),
            OutputFrame::Exit(exit) => {
                assert!(reader.next().await.unwrap().is_none());
                return (stdout, stderr, exit);
            }
            other => panic!("{other:?}"),
        }
    }
}

pub fn argv(words: &[&str]) -> ExecSpec {
    ExecSpec { argv: words.iter().map(|word| (*word).to_owned()).collect(), ..ExecSpec::default() }
}

pub fn sh(script: &str) -> ExecSpec {
    argv(&["sh", "-c", script])
}

/// Waits for a condition; fails with what was seen last.
pub async fn until<T: std::fmt::Debug>(what: &str, mut look: impl FnMut() -> (bool, T)) -> T {
    let deadline = Instant::now() + DEADLINE;
    loop {
        let (reached, seen) = look();
        if reached {
            return seen;
        }
        assert!(Instant::now() < deadline, "{what}: last seen {seen:?}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Resident memory of a process in KiB.
pub fn rss_kib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}
