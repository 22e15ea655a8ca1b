//! An installation with fault points, and rounds played on it.

use std::cell::Cell;
use std::fmt;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures::future::join_all;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use rustix::process::Signal;
use tokio::runtime::Runtime;

use crate::action::{Action, HOST_MEMORY_MIB, sql, wait_until};
use crate::client::Client;
use crate::session::Worker;
use crate::support::{Up, can_run, kill};
use crate::sweep::{KernelState, Sweep, pids};

const LOOK_AGAIN: Duration = Duration::from_millis(2);

/// Who dies at a point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Victim {
    /// The process that gets there.
    WhoGetsThere,
    /// The database server, while the process that got there stands still.
    Postgres,
}

/// One round.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    /// Where somebody dies, if that is part of the round.
    point: Option<(String, Victim)>,
    action: Action,
    /// The seed of kills at any moment.
    unasked: Option<u64>,
}

impl Case {
    /// A kill at a point.
    pub(crate) fn at(point: String, victim: Victim) -> Self {
        let action = Action::to(&point);
        Self { point: Some((point, victim)), action, unasked: None }
    }

    /// Nobody dies, but nobody hears of anything either.
    pub(crate) fn cut_listener() -> Self {
        Self { point: None, action: Action::CutListener, unasked: None }
    }

    /// One to three die at any moment.
    pub(crate) fn unasked(seed: u64) -> Self {
        Self { point: None, action: Action::None, unasked: Some(seed) }
    }
}

/// What came of a round.
#[derive(Debug, Clone)]
pub(crate) struct Round {
    pub(crate) name: String,
    /// From the kill to the answer of the last call that was under way, or of the next one.
    pub(crate) recovery: Duration,
    pub(crate) elapsed: Duration,
    pub(crate) kills: usize,
    /// What the kernel and the directories have otherwise than before: leaks.
    pub(crate) differences: Vec<String>,
}

impl fmt::Display for Round {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:<48} recovered in {:>5} ms, round {:>6} ms",
            self.name,
            self.recovery.as_millis(),
            self.elapsed.as_millis()
        )
    }
}

/// A running installation.
pub(crate) struct Rig {
    pub(crate) up: Up,
    pub(crate) client: Client,
    runtime: Arc<Runtime>,
    sweep: Sweep,
    before: KernelState,
    rounds: usize,
    sizes: Cell<u64>,
}

impl Rig {
    /// Starts one and lets it make what is made once; nothing, after saying why, where none can run.
    pub(crate) fn start() -> Option<Self> {
        Self::start_with_warm(0)
    }

    /// The same on a host that keeps sandboxes ready.
    pub(crate) fn start_with_warm(warm: usize) -> Option<Self> {
        if !can_run() {
            return None;
        }
        let up = Up::start_with(|directory| {
            // A directory of its own, which the coordinator's account can remove the file from.
            let faults = directory.join("fault");
            fs::create_dir(&faults).unwrap();
            fs::set_permissions(&faults, fs::Permissions::from_mode(0o777)).unwrap();
            vec![
                (cloister_fault::FILE_VARIABLE, faults.join("point").display().to_string()),
                ("CLOISTER_COORDINATOR_FALLBACK_POLL_SECS", "3600".to_owned()),
                ("CLOISTER_COORDINATOR_HEARTBEAT_SECS", "1".to_owned()),
                ("CLOISTER_HOST_WARM_SANDBOXES", warm.to_string()),
                ("CLOISTER_HOST_MEMORY_BYTES", (HOST_MEMORY_MIB * 1024 * 1024).to_string()),
            ]
        });
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let endpoint = up.json(&["status"])["up"]["endpoint"].as_str().unwrap().to_owned();
        let token = fs::read_to_string(up.path("data/tokens/owner")).unwrap();
        let client = runtime.block_on(Client::connect(&endpoint, token.trim()));
        runtime.block_on(async {
            let worker = Worker::create(&client, "warm".to_owned()).await;
            worker.delete().await;
        });
        let sweep = Sweep::new(up.directory(), warm);
        let before = sweep.look_settled();
        let runtime = Arc::new(runtime);
        Some(Self { up, client, runtime, sweep, before, rounds: 0, sizes: Cell::new(0) })
    }

    /// Plays one round; panics when anything is not as it should be.
    pub(crate) fn round(&mut self, case: &Case, sessions: usize) -> Round {
        self.rounds += 1;
        let begin = Instant::now();
        let tag = format!("r{}", self.rounds);
        let name = match (&case.point, case.unasked) {
            (Some((point, Victim::WhoGetsThere)), _) => point.clone(),
            (Some((point, Victim::Postgres)), _) => format!("postgres at {point}"),
            (None, Some(_)) => "at any moment".to_owned(),
            (None, None) => format!("{:?}", case.action),
        };
        self.client.begin_round();
        let killer = match (&case.point, case.unasked) {
            (Some((point, victim)), _) => {
                self.arm(point, *victim);
                Some(Killer::at_point(self, *victim))
            }
            (None, Some(seed)) => Some(Killer::unasked(self, seed)),
            (None, None) => None,
        };
        let cutter = (case.action == Action::CutListener).then(|| Cutter::start(&self.up));
        let runtime = Arc::clone(&self.runtime);
        let played = catch_unwind(AssertUnwindSafe(|| runtime.block_on(self.play(case, &tag, sessions))));
        let kills = killer.map(Killer::end).unwrap_or_default();
        let cuts = cutter.map(Cutter::end);
        let lost = match played {
            Ok(lost) => lost,
            Err(panic) => {
                println!("went wrong at {name}, {} killed\n{}", kills.len(), self.up.logs());
                resume_unwind(panic);
            }
        };
        assert!(cuts.is_none_or(|cuts| cuts > 2), "the listener was hardly ever cut");
        let is_point = case.point.is_some();
        assert!(!is_point || !kills.is_empty(), "nobody got to `{name}`\n{}", self.up.logs());
        // The sandbox of a shim that dies ends with it; everybody else's death is not noticed inside.
        let shims = kills.iter().filter(|kill| kill.is_shim).count()
            + usize::from(is_point && name.starts_with("shim_"))
            + usize::from(case.action == Action::KillShim);
        assert!(
            lost <= shims,
            "{lost} sandboxes ended that nobody had stopped or killed\n{}",
            self.up.logs()
        );
        let recovery =
            kills.iter().map(|kill| self.client.answered_after(kill.moment)).max().unwrap_or_default();
        let differences = self.sweep.expect(&self.before).err().unwrap_or_default();
        Round { name, recovery, elapsed: begin.elapsed(), kills: kills.len(), differences }
    }

    /// Ends the installation's last round; panics when something is left that nobody waits for.
    pub(crate) fn finish(self) {
        if let Err(orphans) = self.sweep.expect_no_orphans() {
            panic!("{}", orphans.join("\n"));
        }
    }

    /// Returns how many sandboxes ended that nobody had asked to.
    async fn play(&self, case: &Case, tag: &str, sessions: usize) -> usize {
        let tags = (0..sessions).map(|number| format!("{tag}s{number}"));
        let mut workers = join_all(tags.map(|tag| Worker::create(&self.client, tag))).await;
        join_all(workers.iter_mut().map(|worker| worker.run(1))).await;
        workers[0].pause_and_resume(1).await;
        case.action.perform(self, tag, &mut workers).await;
        join_all(workers.iter_mut().map(Worker::ensure_active)).await;
        workers[0].run(2).await;
        join_all(workers.iter().map(Worker::look)).await;
        join_all(workers.iter().map(Worker::delete)).await;
        workers.iter().map(|worker| worker.lost).sum()
    }

    fn file(&self) -> PathBuf {
        self.up.path("fault/point")
    }

    fn arm(&self, point: &str, victim: Victim) {
        let text = match victim {
            Victim::WhoGetsThere => point.to_owned(),
            Victim::Postgres => format!("{point} {}", cloister_fault::STOP),
        };
        // Whole or not at all: somebody may look at any moment.
        let new = self.up.path("fault/new");
        fs::write(&new, text).unwrap();
        fs::set_permissions(&new, fs::Permissions::from_mode(0o644)).unwrap();
        fs::rename(new, self.file()).unwrap();
    }

    /// Waits until the point that is armed was reached.
    pub(crate) async fn wait_until_reached(&self) {
        let file = self.file();
        wait_until("somebody to get to the point", || async { !file.exists() }).await;
    }

    /// Returns a size that no layer had.
    pub(crate) fn new_disk_bytes(&self) -> u64 {
        self.sizes.set(self.sizes.get() + 1);
        (33 * 1024 + self.sizes.get() * 64) * 1024
    }
}

/// Somebody was killed.
struct Kill {
    moment: Instant,
    is_shim: bool,
}

/// Kills beside the round, or sees who dies.
struct Killer {
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<Vec<Kill>>,
}

impl Killer {
    /// Waits for somebody to get to the point.
    fn at_point(rig: &Rig, victim: Victim) -> Self {
        let (file, up) = (rig.file(), rig.up.pid());
        let server = rig.up.path("data/postgres/postmaster.pid");
        Self::start(move |stop| {
            while file.exists() {
                if stop.load(Ordering::SeqCst) {
                    let _ = fs::remove_file(&file);
                    return Vec::new();
                }
                std::thread::sleep(LOOK_AGAIN);
            }
            let moment = Instant::now();
            if victim == Victim::Postgres {
                kill_server_and_go_on(up, &server);
            }
            vec![Kill { moment, is_shim: false }]
        })
    }

    /// Kills one to three processes within the round's first seconds.
    fn unasked(rig: &Rig, seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let server = rig.up.path("data/postgres/postmaster.pid");
        let root = rig.up.directory().to_owned();
        Self::start(move |stop| {
            let mut kills = Vec::new();
            for _ in 0..random.random_range(1..=3) {
                let pause = Duration::from_millis(random.random_range(0..1500));
                let wanted = random.random_range(0..4);
                let until = Instant::now() + pause;
                while Instant::now() < until && !stop.load(Ordering::SeqCst) {
                    std::thread::sleep(LOOK_AGAIN);
                }
                let of_role = |role: &[u8]| pids().find(|pid| is_of(*pid, &root) && argument(*pid) == role);
                let victim = match wanted {
                    0 => of_role(b"coordinator"),
                    1 => of_role(b"host"),
                    2 => read_pid(&server),
                    _ => of_role(b"shim"),
                };
                // It may be between two lives, or there is no sandbox now.
                let Some(pid) = victim.and_then(rustix::process::Pid::from_raw) else { continue };
                if rustix::process::kill_process(pid, Signal::KILL).is_ok() {
                    kills.push(Kill { moment: Instant::now(), is_shim: wanted == 3 });
                }
            }
            kills
        })
    }

    fn start(work: impl FnOnce(&AtomicBool) -> Vec<Kill> + Send + 'static) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        Self { stop, thread: std::thread::spawn(move || work(&stopped)) }
    }

    /// Returns who was killed.
    fn end(self) -> Vec<Kill> {
        self.stop.store(true, Ordering::SeqCst);
        self.thread.join().expect("the killer")
    }
}

/// Returns whether a process belongs to an installation, by its environment or its command line.
fn is_of(pid: i32, root: &Path) -> bool {
    let root = root.as_os_str().as_encoded_bytes();
    ["environ", "cmdline"].iter().any(|file| {
        let bytes = fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
        bytes.windows(root.len()).any(|window| window == root)
    })
}

/// Returns the first argument of a process.
fn argument(pid: i32) -> Vec<u8> {
    let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    command.split(|byte| *byte == 0).nth(1).unwrap_or_default().to_vec()
}

/// Returns the process that a server's pid file names.
fn read_pid(file: &Path) -> Option<i32> {
    fs::read_to_string(file).ok()?.lines().next()?.trim().parse().ok()
}

/// Kills the server while the coordinator stands still at its point, then lets the coordinator go on.
fn kill_server_and_go_on(up: i32, pid_file: &Path) {
    let deadline = Instant::now() + Duration::from_secs(20);
    let wait = |what: &str| {
        assert!(Instant::now() < deadline, "waited for {what}");
        std::thread::sleep(LOOK_AGAIN);
    };
    let coordinator = loop {
        // The host agent may stand still as well, for another reason.
        match pids().find(|pid| state_and_parent(*pid) == Some(('T', up)) && argument(*pid) == b"coordinator")
        {
            Some(pid) => break pid,
            None => wait("the coordinator to stand still"),
        }
    };
    let server = loop {
        match read_pid(pid_file) {
            Some(pid) => break pid,
            None => wait("the server's number"),
        }
    };
    kill(server, Signal::KILL);
    while state_and_parent(server).is_some_and(|(state, _)| state != 'Z') {
        wait("the server to die");
    }
    kill(coordinator, Signal::CONT);
}

/// Returns the state of a process and its parent.
fn state_and_parent(pid: i32) -> Option<(char, i32)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    Some((fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}

/// Terminates the connection that listens for changes for as long as a round lasts.
struct Cutter {
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<usize>,
}

impl Cutter {
    fn start(up: &Up) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, run) = (Arc::clone(&stop), up.path("run/postgres"));
        let thread = std::thread::spawn(move || {
            let mut cut = 0;
            while !stopped.load(Ordering::SeqCst) {
                let text = sql(
                    &run,
                    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE query LIKE 'LISTEN %'",
                );
                cut += text.parse::<usize>().expect("a count");
            }
            cut
        });
        Self { stop, thread }
    }

    /// Returns how often it was terminated.
    fn end(self) -> usize {
        self.stop.store(true, Ordering::SeqCst);
        self.thread.join().expect("the cutter")
    }
}
