//! A real `cloister up` in directories of its own, and the command line that speaks to it.
//!
//! Each test starts its own; ports are free ones, the client's configuration is a file of the test's. What the test
//! leaves running is stopped when [`Up`] is dropped.

#![allow(dead_code, reason = "each test file uses a part")]

pub(crate) mod memory;

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

/// The binary under test.
pub(crate) const CLOISTER: &str = env!("CARGO_BIN_EXE_cloister");
/// How long anything may take on a busy machine.
pub(crate) const DEADLINE: Duration = Duration::from_secs(120);

/// A running `cloister up`.
pub(crate) struct Up {
    directory: TempDir,
    child: Option<Child>,
    environment: Vec<(&'static str, String)>,
}

/// Prints why a test does not run.
pub(crate) fn skip(reason: &str) {
    println!("SKIP: {reason}");
}

/// Returns whether sandboxes can be made here; prints the skip line when not.
pub(crate) fn can_run() -> bool {
    if !rustix::process::geteuid().is_root() {
        skip("`cloister up` needs root");
        return false;
    }
    let has_postgres = fs::read_dir("/usr/lib/postgresql").is_ok() || which("initdb");
    if !has_postgres {
        skip("PostgreSQL is not installed");
    }
    has_postgres
}

/// Returns whether a program is in the path.
pub(crate) fn which(program: &str) -> bool {
    std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default())
        .any(|directory| directory.join(program).exists())
}

/// Waits until `look` finds something; says what was seen last when it does not.
pub(crate) fn wait_for<T>(what: &str, mut look: impl FnMut() -> Result<T, String>) -> T {
    let deadline = Instant::now() + DEADLINE;
    loop {
        match look() {
            Ok(found) => return found,
            Err(seen) => assert!(Instant::now() < deadline, "waited for {what}; last: {seen}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

impl Up {
    /// Starts one and waits until it is ready.
    pub(crate) fn start() -> Self {
        Self::start_with(|_| Vec::new())
    }

    /// The same with more variables, which may name the test's directory.
    pub(crate) fn start_with(environment: impl FnOnce(&Path) -> Vec<(&'static str, String)>) -> Self {
        let directory = tempfile::Builder::new().prefix("clo").tempdir().unwrap();
        // The coordinator's and PostgreSQL's accounts must pass through to what is theirs.
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let environment = environment(directory.path());
        let mut up = Self { directory, child: None, environment };
        up.start_again();
        up
    }

    /// Starts it (again) on the same directories and waits until it is ready.
    pub(crate) fn start_again(&mut self) {
        let log = File::options().create(true).append(true).open(self.path("up.out")).unwrap();
        let child = self
            .command(&["up", "--listen", "127.0.0.1:0"])
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let pid = i64::from(child.id());
        self.child = Some(child);
        wait_for("`cloister up` to be ready", || {
            if let Some(status) = self.child.as_mut().unwrap().try_wait().unwrap() {
                panic!("`cloister up` ended with {status}:\n{}", self.logs());
            }
            match self.try_record() {
                Some(record) if record["ready"] == true && record["pid"] == pid => Ok(()),
                record => Err(format!("{record:?}\n{}", self.logs())),
            }
        });
    }

    /// Returns a path in the test's directory.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Returns the test's directory.
    pub(crate) fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Returns a command of the binary that uses this installation.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.program(CLOISTER);
        command.args(arguments);
        command
    }

    /// Returns a command of another program, whose calls of the binary use this installation.
    pub(crate) fn program(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command
            .env("CLOISTER_CONFIG", self.path("config.toml"))
            .env("CLOISTER_DATA_DIR", self.path("data"))
            .env("CLOISTER_RUN_DIR", self.path("run"))
            // The same on every machine, whether it has gVisor or not.
            .env("CLOISTER_SANDBOX_BACKEND", "namespace")
            .env_remove("CLOISTER_ENDPOINT")
            .env_remove("CLOISTER_TOKEN")
            .env_remove("CLOISTER_CONTEXT")
            .env_remove("DATABASE_URL")
            .env_remove("SUDO_USER")
            .envs(self.environment.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Runs a command to its end.
    pub(crate) fn run(&self, arguments: &[&str]) -> Finished {
        self.run_with_input(arguments, b"")
    }

    /// Runs a command to its end with this standard input.
    pub(crate) fn run_with_input(&self, arguments: &[&str], input: &[u8]) -> Finished {
        let mut child = self
            .command(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        let input = input.to_vec();
        // On a thread: a command that does not read its input must not stop the test from reading its output.
        let writer = std::thread::spawn(move || drop(stdin.write_all(&input)));
        let output = child.wait_with_output().unwrap();
        writer.join().unwrap();
        Finished { arguments: arguments.join(" "), output, logs: self.logs() }
    }

    /// Runs a command that must succeed and returns its standard output.
    pub(crate) fn ok(&self, arguments: &[&str]) -> String {
        self.run(arguments).expect(0).stdout()
    }

    /// Runs a command with `--json` that must succeed and returns what it printed.
    pub(crate) fn json(&self, arguments: &[&str]) -> Value {
        let mut all = vec!["--json"];
        all.extend_from_slice(arguments);
        let text = self.ok(&all);
        serde_json::from_str(&text)
            .unwrap_or_else(|error| panic!("`{arguments:?}` printed no JSON ({error}): {text}"))
    }

    fn try_record(&self) -> Option<Value> {
        serde_json::from_slice(&fs::read(self.path("run/up.json")).ok()?).ok()
    }

    /// Returns the process of a role as `up.json` has it now, if there is one.
    pub(crate) fn try_pid_of(&self, role: &str) -> Option<i32> {
        let record = self.try_record()?;
        let role = record["roles"].as_array()?.iter().find(|found| found["name"] == role)?.clone();
        i32::try_from(role["pid"].as_i64()?).ok()
    }

    /// Returns the process of a role.
    pub(crate) fn pid_of(&self, role: &str) -> i32 {
        wait_for(role, || self.try_pid_of(role).ok_or_else(|| "no process".to_owned()))
    }

    /// Kills a role with SIGKILL and waits until another process has its place.
    pub(crate) fn kill_role(&self, role: &str) {
        let before = self.pid_of(role);
        kill(before, rustix::process::Signal::KILL);
        wait_for("the role to be started again", || match self.try_pid_of(role) {
            Some(pid) if pid != before => Ok(()),
            other => Err(format!("{other:?}")),
        });
    }

    /// Returns the supervisor's process.
    pub(crate) fn pid(&self) -> i32 {
        i32::try_from(self.child.as_ref().expect("it runs").id()).unwrap()
    }

    /// Kills the supervisor with SIGKILL and waits until it is gone.
    pub(crate) fn kill(&mut self) {
        let mut child = self.child.take().expect("it runs");
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Stops it as Ctrl-C does, and returns its exit code.
    pub(crate) fn interrupt(&mut self) -> Option<i32> {
        let mut child = self.child.take().expect("it runs");
        kill(i32::try_from(child.id()).unwrap(), rustix::process::Signal::INT);
        let code = wait_for("`cloister up` to end", || {
            child.try_wait().unwrap().ok_or_else(|| format!("it runs on\n{}", self.logs()))
        });
        code.code()
    }

    /// Returns the end of all logs.
    pub(crate) fn logs(&self) -> String {
        let mut text = String::new();
        for name in ["up.out", "data/logs/up.log", "data/logs/coordinator.log", "data/logs/host.log"] {
            let bytes = fs::read(self.path(name)).unwrap_or_default();
            let log = String::from_utf8_lossy(&bytes[bytes.len().saturating_sub(4000)..]).into_owned();
            if !log.is_empty() {
                text.push_str(&format!("--- {name}\n{log}\n"));
            }
        }
        text
    }

    /// Returns the shim and the guest agent (pid 1) of the only sandbox there is.
    pub(crate) fn sandbox_processes(&self) -> (i32, i32) {
        let mark = format!("{}/", self.path("data/host/sandboxes").display());
        let mut shims = self.processes().into_iter().filter(|process| process.contains(&mark));
        let shim = shims.next().expect("a sandbox runs");
        assert_eq!(shims.next(), None, "there is one sandbox");
        let shim: i32 = shim.split(' ').next().unwrap().parse().unwrap();
        let children = fs::read_to_string(format!("/proc/{shim}/task/{shim}/children")).unwrap();
        (shim, children.split_whitespace().next().expect("pid 1 runs").parse().unwrap())
    }

    /// Returns the processes that have this installation in their command line or environment.
    pub(crate) fn processes(&self) -> Vec<String> {
        let mark = self.directory.path().as_os_str().as_encoded_bytes();
        let has_mark = |bytes: &[u8]| bytes.windows(mark.len()).any(|window| window == mark);
        let mut found = Vec::new();
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if !name.bytes().all(|byte| byte.is_ascii_digit()) || name == std::process::id().to_string() {
                continue;
            }
            let read = |file: &str| fs::read(entry.path().join(file)).unwrap_or_default();
            let command = read("cmdline");
            if has_mark(&command) || has_mark(&read("environ")) {
                found.push(format!("{name} {}", String::from_utf8_lossy(&command).replace('\0', " ")));
            }
        }
        found
    }

    /// Returns the mounts of this process's namespace that lie in this installation.
    pub(crate) fn mounts(&self) -> Vec<String> {
        let mark = self.directory.path().display().to_string();
        fs::read_to_string("/proc/self/mounts")
            .unwrap()
            .lines()
            .filter(|line| line.contains(&mark))
            .map(str::to_owned)
            .collect()
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            // Nothing here may panic: the test may be unwinding already.
            if let Some(pid) = i32::try_from(child.id()).ok().and_then(rustix::process::Pid::from_raw) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
            }
            let deadline = Instant::now() + DEADLINE;
            while child.try_wait().is_ok_and(|status| status.is_none()) {
                if Instant::now() > deadline {
                    let _ = child.kill();
                    let _ = child.wait();
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        // What a killed one left; a test that failed half way too.
        let _ = self.command(&["down"]).output();
    }
}

/// Sends a signal to a process.
pub(crate) fn kill(pid: i32, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(pid).expect("a process id");
    rustix::process::kill_process(pid, signal).unwrap();
}

/// Returns whether a process is there and no zombie.
pub(crate) fn is_alive(pid: i32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| !stat.rsplit(')').next().unwrap_or_default().trim_start().starts_with(['Z', 'X']))
}

/// A command that has ended.
#[derive(Debug)]
pub(crate) struct Finished {
    arguments: String,
    output: Output,
    logs: String,
}

impl Finished {
    /// Returns this if the exit code is the expected one.
    #[track_caller]
    pub(crate) fn expect(self, code: i32) -> Self {
        assert_eq!(
            self.output.status.code(),
            Some(code),
            "`cloister {}`\n--- stdout\n{}\n--- stderr\n{}\n{}",
            self.arguments,
            self.stdout(),
            self.stderr(),
            self.logs
        );
        self
    }

    /// Returns this if standard error has all of these texts.
    #[track_caller]
    pub(crate) fn says(self, texts: &[&str]) -> Self {
        let stderr = self.stderr().to_lowercase();
        for text in texts {
            assert!(stderr.contains(text), "`{text}` is not in: {}", self.stderr());
        }
        self
    }

    /// Returns standard output as text, without the final line end.
    pub(crate) fn stdout(&self) -> String {
        String::from_utf8_lossy(&self.output.stdout).trim_end_matches('\n').to_owned()
    }

    /// Returns standard output as it is.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.output.stdout
    }

    /// Returns standard error as text.
    pub(crate) fn stderr(&self) -> String {
        String::from_utf8_lossy(&self.output.stderr).into_owned()
    }

    /// Returns standard output as one JSON value per line.
    #[track_caller]
    pub(crate) fn json_lines(&self) -> Vec<Value> {
        let parse = |line: &str| {
            serde_json::from_str(line).unwrap_or_else(|error| panic!("no JSON ({error}): {line}"))
        };
        self.stdout().lines().map(parse).collect()
    }
}
