//! From a started pid 1 to the end of the shim.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener as StdListener;
use std::path::Path;
use std::process::ExitCode;
use std::rc::Rc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use cloister_api::guest;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions};
use tokio::io::unix::AsyncFd;
use tokio::net::UnixListener;
use tokio::sync::{Notify, watch};
use tokio::task::LocalSet;
use tokio::time::timeout;

use super::config::{GUEST_SOCKET, KernelConfig, SandboxExitRecord, ShimConfig, ShimReport};
use super::counters::{Counters, Counts};
use super::exec_table::ExecTable;
use super::identity::Identity;
use super::{StartError, report, serve};
use crate::build::{StartedSandbox, gvisor};
use crate::connection::{Connection, OpenError};
use crate::fault::POINTS;
use crate::frames::Body;

/// How long pid 1 may take from its start to its first answer.
const AGENT_START: Duration = Duration::from_secs(20);
/// How long ended execs and open connections may take to be written out once pid 1 has ended.
const FLUSH: Duration = Duration::from_secs(2);
/// What pid 1 gets beyond a stop's grace before it is killed from outside.
const STOP_SLACK: Duration = Duration::from_millis(1500);
/// How long the guest agent may take for an answer once an exec is past its time limit.
const AGENT_ANSWER: Duration = Duration::from_secs(5);
/// A pause before a guest agent that has yet to listen is dialled again.
const FIRST_DIAL_PAUSE: Duration = Duration::from_millis(2);
/// A pause before a guest agent that could not be dialled is dialled again.
const DIAL_PAUSE: Duration = Duration::from_millis(100);
/// How far past it is past: what the guest agent needs to enforce it.
const LIMIT_SLACK: Duration = Duration::from_secs(1);

/// What every task of the shim shares.
pub(super) struct Shim {
    pub(super) config: ShimConfig,
    /// Who the sandbox is; a claim changes it.
    pub(super) identity: RefCell<Identity>,
    pub(super) counters: Counters,
    pub(super) execs: ExecTable,
    /// Tasks that write output down.
    pub(super) following: Tasks,
    /// Tasks that serve a connection.
    pub(super) serving: Tasks,
    pub(super) facts: RefCell<Vec<(String, String)>>,
    pub(super) timings: Vec<(String, u64)>,
    /// The host's name is not this process's.
    pub(super) shares_name: bool,
    pidfd: AsyncFd<OwnedFd>,
    stopping: Cell<bool>,
    /// The guest agent no longer answered and was killed for it.
    unanswering: Cell<bool>,
    pid1_ended: watch::Sender<bool>,
    gone: watch::Sender<Option<SandboxExitRecord>>,
}

impl Shim {
    /// Returns whether a stop was asked for.
    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.get()
    }

    /// Returns whether pid 1 has ended.
    pub(super) fn has_ended(&self) -> bool {
        *self.pid1_ended.borrow()
    }

    /// Waits until pid 1 has ended; its execs' last output may still be in flight.
    pub(super) async fn pid1_ended(&self) {
        let mut ended = self.pid1_ended.subscribe();
        // The sender lives as long as `self`.
        let _ = ended.wait_for(|ended| *ended).await;
    }

    /// Waits until the sandbox has ended and everything about it is on the disk.
    pub(super) async fn gone(&self) -> SandboxExitRecord {
        let mut gone = self.gone.subscribe();
        loop {
            if let Some(record) = gone.borrow_and_update().clone() {
                return record;
            }
            // The sender lives as long as `self`.
            let _ = gone.changed().await;
        }
    }

    /// Ends the sandbox and returns how it ended. Asking twice ends it once, by the shorter grace.
    pub(super) async fn stop(&self, grace: Duration) -> SandboxExitRecord {
        self.stopping.set(true);
        POINTS.reach("shim_after_stop_begun");
        let asked = timeout(STOP_SLACK, async {
            let request = guest::StopSandbox {
                grace_ms: crate::convert::millis_to_wire(grace),
                ..guest::StopSandbox::default()
            };
            self.dial_guest(request).await.is_ok()
        });
        let patience =
            if asked.await == Ok(true) { grace.saturating_add(STOP_SLACK) } else { Duration::ZERO };
        if timeout(patience, self.pid1_ended()).await.is_err() {
            self.kill();
        }
        self.gone().await
    }

    /// Opens a connection to the guest agent, which knows the id that it was started with.
    pub(super) async fn dial_guest(&self, request: impl Into<Body>) -> Result<Connection, OpenError> {
        let sandbox_dir = self.identity.borrow().sandbox_dir.clone();
        dial(&self.config, &sandbox_dir, request).await
    }

    /// Waits until the guest agent no longer answers, which is looked at from `limit` on, again and again: a program that
    /// is past its limit may still be waiting for a slow reader to take its output.
    pub(super) async fn until_unanswered(&self, limit: Duration) {
        loop {
            tokio::time::sleep(limit.max(AGENT_ANSWER).saturating_add(LIMIT_SLACK)).await;
            let answered = async {
                // An error is none: the kernel refuses more connections than an agent that hangs has taken.
                while self.dial_guest(guest::GetSandbox::default()).await.is_err() {
                    tokio::time::sleep(DIAL_PAUSE).await;
                }
            };
            if timeout(AGENT_ANSWER, answered).await.is_err() {
                return;
            }
        }
    }

    /// Kills a sandbox whose guest agent no longer answers.
    pub(super) fn kill_unanswering(&self) {
        self.unanswering.set(true);
        self.kill();
    }

    fn kill(&self) {
        // A pid 1 that has ended cannot be signalled and need not be.
        let _ = rustix::process::pidfd_send_signal(self.pidfd.get_ref(), Signal::KILL);
    }
}

/// Tasks of one kind, counted so that their end can be waited for.
#[derive(Default)]
pub(super) struct Tasks {
    running: Rc<Cell<usize>>,
    ended: Rc<Notify>,
}

impl Tasks {
    /// Runs a task on this thread.
    pub(super) fn spawn(&self, task: impl Future<Output = ()> + 'static) {
        let (running, ended) = (Rc::clone(&self.running), Rc::clone(&self.ended));
        running.set(running.get() + 1);
        tokio::task::spawn_local(async move {
            task.await;
            running.set(running.get() - 1);
            ended.notify_waiters();
        });
    }

    /// Waits until at most `count` run.
    pub(super) async fn at_most(&self, count: usize) {
        loop {
            let ended = self.ended.notified();
            if self.running.get() <= count {
                return;
            }
            ended.await;
        }
    }
}

/// Serves the sandbox until it has ended.
pub(super) fn run(config: ShimConfig, started: StartedSandbox) -> ExitCode {
    let pid = started.pid;
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(pid, &StartError::new("start the runtime", &error)),
    };
    LocalSet::new().block_on(&runtime, async move {
        match prepare(config, started).await {
            Ok((shim, listener)) => serve_to_the_end(shim, listener, pid).await,
            Err(error) => fail(pid, &error),
        }
    })
}

/// Opens a connection to the guest agent of the sandbox that has this directory by now.
pub(crate) async fn dial(
    config: &ShimConfig,
    sandbox_dir: &Path,
    request: impl Into<Body>,
) -> Result<Connection, OpenError> {
    match config.kernel {
        KernelConfig::Host => {
            Connection::open(&sandbox_dir.join(GUEST_SOCKET), &config.sandbox_id, request).await
        }
        KernelConfig::Gvisor { .. } => {
            let socket = gvisor::open_guest_socket(sandbox_dir).map_err(OpenError::Connect)?;
            let path = format!("/proc/self/fd/{}", socket.as_raw_fd());
            Connection::open(Path::new(&path), &config.sandbox_id, request).await
        }
    }
}

/// Ends a sandbox that never served, so that nothing is left of it.
fn fail(pid: Pid, error: &StartError) -> ExitCode {
    // Its number is its own until it is reaped here.
    let _ = rustix::process::kill_process(pid, Signal::KILL);
    let _ = rustix::process::waitpid(Some(pid), WaitOptions::empty());
    report(&ShimReport::Failed { step: error.step.clone(), message: error.message.clone() });
    ExitCode::FAILURE
}

/// Waits for pid 1's first answer, binds the socket, and tells the host agent.
async fn prepare(
    config: ShimConfig,
    started: StartedSandbox,
) -> Result<(Rc<Shim>, UnixListener), StartError> {
    let begin = Instant::now();
    let pidfd = watch_pidfd(started.pidfd).map_err(|error| StartError::new("watch pid 1", &error))?;
    const STEP: &str = "wait for the guest agent";
    let state = gvisor::state_dir(&config.sandbox_dir);
    let failed = |message: &str| StartError {
        step: STEP.to_owned(),
        message: match gvisor::complaint(&state) {
            printed if printed.is_empty() => message.to_owned(),
            printed => format!("{message}: {printed}"),
        },
    };
    let asking = async {
        loop {
            let request = guest::GetSandbox::default();
            match dial(&config, &config.sandbox_dir, request).await {
                Ok(mut connection) => return Ok::<_, OpenError>(connection.reader.expect().await?),
                // On gVisor the agent has yet to make its listener.
                Err(OpenError::Connect(_)) if config.kernel != KernelConfig::Host => {
                    tokio::time::sleep(FIRST_DIAL_PAUSE).await;
                }
                Err(error) => return Err(error),
            }
        }
    };
    let answer = tokio::select! {
        biased;
        answer = timeout(AGENT_START, asking) => answer,
        _ = pidfd.readable() => return Err(failed("pid 1 ended before it answered")),
    };
    let mut facts = match answer {
        Ok(Ok(Body::Sandbox(sandbox))) => {
            sandbox.facts.into_iter().map(|fact| (fact.name, fact.value)).collect::<Vec<_>>()
        }
        Ok(Ok(Body::Error(error))) => return Err(failed(&error.message)),
        Ok(Ok(_)) => return Err(failed("it sent another message than its facts")),
        Ok(Err(error)) => return Err(failed(&StartError::new(STEP, &error).message)),
        Err(_) => return Err(failed("it did not answer in time")),
    };
    if config.kernel != KernelConfig::Host {
        facts.extend(gvisor::sentry_facts(started.pid, &state));
        gvisor::spare_pid_1(started.pid, &state);
    }
    POINTS.reach("shim_before_bind");
    let listener = bind(&config).map_err(|error| StartError::new("bind the socket", &error))?;
    POINTS.reach("shim_after_bind");
    let micros = |elapsed: Duration| u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX);
    let mut timings: Vec<(String, u64)> =
        started.timings.into_iter().map(|(step, elapsed)| (step, micros(elapsed))).collect();
    timings.push(("guest_agent".to_owned(), micros(begin.elapsed())));
    let shim = Rc::new(Shim {
        identity: RefCell::new(Identity::of(&config)),
        counters: Counters::open(&config, started.layer_fd),
        execs: ExecTable::load(&config.exec_dir),
        following: Tasks::default(),
        serving: Tasks::default(),
        facts: RefCell::new(facts),
        timings,
        shares_name: started.shares_name,
        pidfd,
        stopping: Cell::new(false),
        unanswering: Cell::new(false),
        pid1_ended: watch::Sender::new(false),
        gone: watch::Sender::new(None),
        config,
    });
    report(&ShimReport::Ready { facts: shim.facts.borrow().clone(), timings: shim.timings.clone() });
    POINTS.reach("shim_after_report");
    Ok((shim, listener))
}

#[expect(unsafe_code, reason = "the reactor wants a promise about the descriptor")]
fn watch_pidfd(pidfd: OwnedFd) -> std::io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` is open, is always the same descriptor, and is closed only by its drop, which the
    // `AsyncFd` that owns it does after it has let go.
    unsafe { AsyncFd::register_with_interest(pidfd, tokio::io::Interest::READABLE) }
        .map_err(|error| error.into_parts().1)
}

/// Binds the socket that the host agent dials. What lies at its path is a dead shim's: the lock is ours.
fn bind(config: &ShimConfig) -> std::io::Result<UnixListener> {
    match std::fs::remove_file(&config.socket) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = StdListener::bind(&config.socket)?;
    std::fs::set_permissions(&config.socket, std::fs::Permissions::from_mode(0o600))?;
    listener.set_nonblocking(true)?;
    UnixListener::from_std(listener)
}

async fn serve_to_the_end(shim: Rc<Shim>, listener: UnixListener, pid: Pid) -> ExitCode {
    let before = shim.counters.read();
    let accepting = tokio::task::spawn_local(serve::accept(Rc::clone(&shim), listener));
    // An error of the wait is an end that cannot be waited for.
    let _ = shim.pidfd.readable().await.map(|mut ready| ready.retain_ready());
    let status = match rustix::process::waitpid(Some(pid), WaitOptions::empty()) {
        Ok(Some((_, status))) => shim.config.kernel.pid1_status(status.as_raw()),
        Ok(None) | Err(_) => libc::SIGKILL,
    };
    POINTS.reach("shim_after_pid_1_ended");
    shim.pid1_ended.send_replace(true);
    // Every guest connection is at its end now, so that this takes as long as the last bytes take to be written.
    let _ = timeout(FLUSH, shim.following.at_most(0)).await;
    let mut record = classify(&shim, status, before);
    if !layer_is_whole(&shim).await {
        record.reason = "disk_error".to_owned();
        record
            .message
            .push_str("; the host's disk did not take all of its files: make room there, then resume");
    }
    let directory = shim.identity.borrow().sandbox_dir.clone();
    let (path, unfinished) = (directory.join("exit.json"), directory.join("exit.json.tmp"));
    // Without the file the host agent finds a dead shim and says so.
    let _ = serde_json::to_vec(&record)
        .map_err(std::io::Error::from)
        .and_then(|bytes| std::fs::write(&unfinished, bytes))
        .and_then(|()| std::fs::rename(&unfinished, path));
    POINTS.reach("shim_after_exit_file");
    shim.gone.send_replace(Some(record));
    let _ = timeout(FLUSH, shim.serving.at_most(0)).await;
    let _ = std::fs::remove_file(&shim.config.socket);
    POINTS.reach("shim_after_socket_removed");
    accepting.abort();
    ExitCode::SUCCESS
}

/// Writes the layer out and returns whether all of it arrived. The unmount that follows would write it as well, and tell
/// nobody.
async fn layer_is_whole(shim: &Shim) -> bool {
    let Ok(layer) = shim.counters.layer() else { return true };
    let synced = tokio::task::spawn_blocking(move || rustix::fs::syncfs(layer)).await;
    let is_lost = matches!(synced, Ok(Err(Errno::IO | Errno::NOSPC | Errno::DQUOT | Errno::ROFS)));
    !is_lost && !shim.counters.layer_failed()
}

/// Returns the record of the sandbox's end.
fn classify(shim: &Shim, status: i32, before: Counts) -> SandboxExitRecord {
    let after = shim.counters.read();
    let killed = libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGKILL;
    let (reason, message) = if shim.is_stopping() {
        ("stopped", "the sandbox was stopped as asked".to_owned())
    } else if killed && after.oom_kills > before.oom_kills {
        ("out_of_memory", "the kernel killed the sandbox at its memory limit".to_owned())
    } else if killed && after.agent_oom_kills > before.agent_oom_kills {
        ("crashed", "the guest agent reached its own memory limit, and the sandbox ended with it".to_owned())
    } else if killed && shim.unanswering.get() {
        ("crashed", "the guest agent no longer answered, and the sandbox was killed".to_owned())
    } else if killed {
        ("killed", "the sandbox was killed from outside".to_owned())
    } else if libc::WIFSIGNALED(status) {
        ("crashed", format!("the guest agent died of signal {}", libc::WTERMSIG(status)))
    } else {
        ("crashed", format!("the guest agent exited with code {}", libc::WEXITSTATUS(status)))
    };
    SandboxExitRecord { reason: reason.to_owned(), message, status, exited_unix_ms: unix_ms() }
}

/// Returns the host's wall clock.
pub(super) fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
