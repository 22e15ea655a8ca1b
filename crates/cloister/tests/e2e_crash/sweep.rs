//! What the kernel and the filesystem hold of one installation, to be compared with what they held before.
//!
//! It asks the kernel and never a record of ours. What a restart may replace by its like (a role's process, a server's
//! workers, a socket's inode) is named by what it is and not by its number.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long what was killed may take to be gone: a killed server's workers end by themselves.
const PATIENCE: Duration = Duration::from_secs(30);
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// Everything that belongs to one installation.
pub(crate) struct Sweep {
    root: String,
    /// What the control groups of its host are named by.
    instance: String,
    /// Sandboxes that are kept ready. Each is as good as another one, so that with any, things are told apart by what they
    /// are and not by their ids.
    warm: usize,
}

/// What there is, each thing with how often.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct KernelState {
    things: BTreeMap<String, usize>,
}

impl KernelState {
    fn shims(&self) -> usize {
        let is_shim =
            |(thing, _): &(&String, &usize)| thing.starts_with("process") && thing.contains(" shim ");
        self.things.iter().filter(is_shim).map(|(_, count)| count).sum()
    }

    fn add(&mut self, thing: String) {
        *self.things.entry(thing).or_default() += 1;
    }

    /// Returns what is there beyond `before`, and what is missing; nothing when they are equal.
    fn differences(&self, before: &Self) -> Vec<String> {
        let count = |state: &Self, thing: &String| state.things.get(thing).copied().unwrap_or(0);
        let all: BTreeSet<&String> = self.things.keys().chain(before.things.keys()).collect();
        all.into_iter()
            .filter(|thing| count(self, thing) != count(before, thing))
            .map(|thing| format!("{} → {} × {thing}", count(before, thing), count(self, thing)))
            .collect()
    }
}

/// One process as `/proc` has it.
struct Process {
    pid: i32,
    parent: i32,
    name: String,
    state: char,
    command: String,
    is_marked: bool,
}

impl Sweep {
    pub(crate) fn new(root: &Path, warm: usize) -> Self {
        let root = fs::canonicalize(root).expect("find the installation");
        let host = root.join("data/host");
        let digest = blake3::hash(host.as_os_str().as_encoded_bytes()).to_hex();
        Self { root: root.display().to_string(), instance: format!("cloister-{}", &digest[..12]), warm }
    }

    /// Looks at everything once.
    pub(crate) fn look(&self) -> KernelState {
        let mut state = KernelState::default();
        self.add_processes(&mut state);
        self.add_groups(&mut state);
        self.add_loops(&mut state);
        self.add_sockets(&mut state);
        self.add_files(&mut state);
        if self.warm == 0 {
            return state;
        }
        let mut nameless = KernelState::default();
        for (thing, count) in state.things {
            *nameless.things.entry(without_ids(&thing)).or_default() += count;
        }
        nameless
    }

    /// Looks at everything once nothing is in flight any more: what just ended is gone.
    pub(crate) fn look_settled(&self) -> KernelState {
        let deadline = Instant::now() + PATIENCE;
        if self.warm > 0 {
            let mut last = KernelState::default();
            loop {
                let state = self.look();
                if state.shims() == self.warm && state == last {
                    return state;
                }
                assert!(Instant::now() < deadline, "{} sandboxes were never ready", self.warm);
                last = state;
                std::thread::sleep(LOOK_AGAIN * 10);
            }
        }
        loop {
            let state = self.look();
            let passing = |thing: &&String| {
                ["zombie", "mount", "loop", "group"].iter().any(|kind| thing.starts_with(kind))
                    || thing.contains("server that is dead")
            };
            match state.things.keys().find(passing) {
                None => return state,
                Some(thing) => assert!(Instant::now() < deadline, "{thing} stays"),
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    /// Waits until everything is as before.
    ///
    /// # Errors
    ///
    /// What differs at the end of the patience.
    pub(crate) fn expect(&self, before: &KernelState) -> Result<(), Vec<String>> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let differences = self.look().differences(before);
            if differences.is_empty() {
                return Ok(());
            }
            if Instant::now() >= deadline {
                return Err(differences);
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    /// Waits until no zombie of a shim or a sandbox is left that init has to reap because its parent was killed. Init takes
    /// its time: this is looked at once after all rounds.
    ///
    /// # Errors
    ///
    /// Those that stay.
    pub(crate) fn expect_no_orphans(&self) -> Result<(), Vec<String>> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let orphans: Vec<String> = pids()
                .filter_map(|pid| self.process(pid))
                .filter(|one| one.state == 'Z' && one.parent == 1 && one.name.starts_with("cloister-guest"))
                .map(|one| format!("zombie {} {}", one.pid, one.name))
                .collect();
            if orphans.is_empty() {
                return Ok(());
            }
            if Instant::now() >= deadline {
                return Err(orphans);
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    fn add_processes(&self, state: &mut KernelState) {
        let all: Vec<Process> = pids().filter_map(|pid| self.process(pid)).collect();
        let marked: BTreeSet<i32> = all.iter().filter(|one| one.is_marked).map(|one| one.pid).collect();
        let own = i32::try_from(std::process::id()).unwrap();
        let server = fs::read_to_string(Path::new(&self.root).join("data/postgres/postmaster.pid"))
            .ok()
            .and_then(|text| text.lines().next()?.trim().parse::<i32>().ok());
        let mut networks = BTreeSet::new();
        let mut mount_namespaces = BTreeSet::new();
        let mut mounts = BTreeSet::new();
        for one in &all {
            let directory = PathBuf::from(format!("/proc/{}", one.pid));
            let is_ours = one.is_marked || marked.contains(&one.parent);
            // A zombie has neither command line nor environment: it is ours as somebody's child, or by its name.
            let is_dead = matches!(one.state, 'Z' | 'X');
            if is_dead && (is_ours || one.parent == own) {
                state.add(format!("zombie {}", one.name));
            } else if is_ours && !is_dead {
                let thing = if Some(one.pid) == server {
                    "process postgres".to_owned()
                } else if one.name == "postgres" && server.is_some_and(|server| one.parent == server) {
                    // As many as there are connections.
                    continue;
                } else if one.name == "postgres" {
                    "process postgres, of a server that is dead".to_owned()
                } else {
                    format!("process {}", without_numbers(&one.command))
                };
                state.add(thing);
                if let Ok(network) = fs::read_link(directory.join("ns/net")) {
                    networks.insert(network);
                }
            }
            // Whoever has it mounted, ours or not.
            if let Ok(namespace) = fs::read_link(directory.join("ns/mnt"))
                && mount_namespaces.insert(namespace)
            {
                let table = fs::read_to_string(directory.join("mountinfo")).unwrap_or_default();
                mounts.extend(table.lines().filter(|line| line.contains(&self.root)).map(str::to_owned));
            }
        }
        for mount in mounts {
            state.add(format!("mount {mount}"));
        }
        for _ in networks {
            state.add("network namespace".to_owned());
        }
    }

    fn process(&self, pid: i32) -> Option<Process> {
        let directory = PathBuf::from(format!("/proc/{pid}"));
        let stat = fs::read_to_string(directory.join("stat")).ok()?;
        let (name, rest) = stat.split_once('(')?.1.rsplit_once(')')?;
        let mut fields = rest.split_whitespace();
        let state = fields.next()?.chars().next()?;
        let parent = fields.next()?.parse().ok()?;
        let read = |file: &str| {
            String::from_utf8_lossy(&fs::read(directory.join(file)).unwrap_or_default()).replace('\0', " ")
        };
        let command = read("cmdline");
        let home = fs::read_link(directory.join("cwd")).unwrap_or_default();
        let is_marked = pid != i32::try_from(std::process::id()).unwrap()
            && (command.contains(&self.root)
                || read("environ").contains(&self.root)
                || read("cgroup").contains(&self.instance)
                || home.starts_with(&self.root));
        Some(Process { pid, parent, name: name.to_owned(), state, command, is_marked })
    }

    fn add_groups(&self, state: &mut KernelState) {
        let mut left = vec![PathBuf::from("/sys/fs/cgroup")];
        while let Some(directory) = left.pop() {
            for path in directories(&directory) {
                if path.to_string_lossy().contains(&self.instance) {
                    state.add(format!("group {}", path.display()));
                }
                left.push(path);
            }
        }
    }

    fn add_loops(&self, state: &mut KernelState) {
        for entry in fs::read_dir("/sys/block").expect("list block devices").flatten() {
            let backing = fs::read_to_string(entry.path().join("loop/backing_file")).unwrap_or_default();
            if backing.starts_with(&self.root) {
                state.add(format!("loop device of {}", backing.trim()));
            }
        }
    }

    fn add_sockets(&self, state: &mut KernelState) {
        let table = fs::read_to_string("/proc/net/unix").expect("list sockets");
        // A listener and its connections have one path: as many lines as there are connections.
        let paths: BTreeSet<&str> = table
            .lines()
            .filter_map(|line| line.split_whitespace().nth(7))
            .filter(|path| path.starts_with(&self.root))
            .collect();
        for path in paths {
            state.add(format!("socket {path}"));
        }
    }

    fn add_files(&self, state: &mut KernelState) {
        let root = Path::new(&self.root);
        // A server's own files, logs, templates of layers (kept on purpose) and the test's own.
        let foreign =
            ["data/postgres", "data/logs", "run/up.json", "up.out", "fault"].map(|path| root.join(path));
        let is_template = |path: &Path| {
            path.parent().is_some_and(|parent| parent.ends_with("data/host/templates"))
                && path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("ext4-"))
        };
        let mut left = vec![root.to_owned()];
        while let Some(directory) = left.pop() {
            for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
                let path = entry.path();
                if foreign.contains(&path) || is_template(&path) {
                    continue;
                }
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    left.push(path.clone());
                }
                let mut thing = String::new();
                write!(thing, "file {}", path.display()).unwrap();
                state.add(thing);
            }
        }
    }
}

/// Returns the numbers of all processes.
pub(crate) fn pids() -> impl Iterator<Item = i32> {
    let entries = fs::read_dir("/proc").expect("list processes").flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

fn directories(path: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
        .collect()
}

/// Returns a thing without what sets it apart from another of its kind: ids, names of sockets, numbers of devices,
/// mounts and owners.
fn without_ids(thing: &str) -> String {
    let nameless = |part: &str| {
        let is_id = ["sbx_", "ses_", "exe_"].iter().any(|prefix| part.starts_with(prefix));
        let is_number =
            part.bytes().all(|byte| byte.is_ascii_digit() || byte == b':') || part.starts_with("loop");
        match part {
            part if part.ends_with(".sock") && part.len() > 20 => "*.sock".to_owned(),
            _ if is_id || is_number => "*".to_owned(),
            part => part.to_owned(),
        }
    };
    // The options of a mount name the owner by its number.
    let option = |option: &str| match option.split_once('=') {
        Some((name @ ("uid" | "gid"), _)) => format!("{name}=*"),
        _ => option.split('/').map(nameless).collect::<Vec<_>>().join("/"),
    };
    let words = thing.split(' ').map(|word| word.split(',').map(option).collect::<Vec<_>>().join(","));
    words.collect::<Vec<_>>().join(" ")
}

/// Returns a command line without the supervisor's number, which another `up` changes.
fn without_numbers(command: &str) -> String {
    let words = command.split_whitespace();
    words.filter(|word| word.parse::<u64>().is_err()).collect::<Vec<_>>().join(" ")
}
