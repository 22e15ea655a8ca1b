//! One exec from its start to its last frame.
//!
//! ```text
//!  launch ──► running ──┬─ main process ended ──► pipes at their end, or 200 ms passed and drained ──► Exit
//!                       ├─ ran too long, or was silent too long ──► SIGKILL to the group ──────────────┘
//!                       └─ the shim went away ──► SIGKILL to the group, no frame
//! ```

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use cloister_api::guest::{self, ErrorKind};
use cloister_types::exec::TerminalSize;
use cloister_types::{ExecSpec, ExitReason};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, sleep_until};

use super::Agent;
use super::launch::{Launched, NotStarted, launch, signal_group};
use super::output::{PumpState, pump};
use super::stdin::Stdin;
use super::streams::AgentEnds;
use super::terminal::Terminal;
use crate::convert::{self, exit_reason_to_wire};
use crate::frames::{FrameError, FrameReader, FrameWriter, error};

/// How long a child that outlives the main process may hold the output open.
const OUTPUT_GRACE: Duration = Duration::from_millis(200);

/// An exec between its start and its last frame.
pub(super) struct RunningExec {
    pid: i32,
    /// The main process has been reaped: its number may be somebody else's.
    reaped: Cell<bool>,
    pub(super) stdin: Stdin,
    terminal: Option<Rc<Terminal>>,
    /// Told when the main process has been reaped.
    pub(super) ended: Notify,
}

impl RunningExec {
    /// Sends a signal to the process group, unless the main process has ended.
    ///
    /// # Errors
    ///
    /// When the kernel refuses, for example a number that is no signal.
    pub(super) fn signal(&self, signal: i32) -> std::io::Result<()> {
        if self.reaped.get() { Ok(()) } else { signal_group(self.pid, signal) }
    }

    /// Gives its terminal another size; returns whether it has one.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub(super) fn resize(&self, size: TerminalSize) -> std::io::Result<bool> {
        self.terminal.as_ref().map_or(Ok(false), |terminal| terminal.resize(size).map(|()| true))
    }

    /// Returns whether the main process has ended.
    pub(super) fn has_ended(&self) -> bool {
        self.reaped.get()
    }
}

/// Starts a program and serves its connection to the end.
///
/// # Errors
///
/// When the connection broke; the exec has been killed then.
pub(super) async fn run(
    agent: Rc<Agent>,
    start: guest::StartExec,
    mut reader: FrameReader<OwnedReadHalf>,
    mut writer: FrameWriter<OwnedWriteHalf>,
) -> Result<(), FrameError> {
    let exec_id = start.exec_id;
    let spec = match start.spec.into_option().map(convert::spec_from_wire) {
        Some(Ok(spec)) => spec,
        Some(Err(wrong)) => return writer.send(error(ErrorKind::Invalid, wrong.to_string())).await,
        None => return writer.send(error(ErrorKind::Invalid, "`spec` is missing")).await,
    };
    if agent.execs.borrow().contains_key(&exec_id) {
        return writer.send(error(ErrorKind::Conflict, format!("exec id `{exec_id}`"))).await;
    }
    let mut exec =
        guest::Exec { exec_id: exec_id.clone(), started_unix_ms: unix_ms(), ..guest::Exec::default() };
    let launched = match launch(&agent, &spec).await {
        Ok(launched) => launched,
        Err(NotStarted { code, message, pids_limit_hit }) => {
            writer.queue(exec)?;
            let exit = exit(ExitReason::NotStarted, code, 0, message, 0);
            return writer.send(guest::Exit { pids_limit_hit, ..exit }).await;
        }
    };
    exec.pid = u32::try_from(launched.pid).unwrap_or(0);
    let Launched { pid, ends, exited } = launched;
    let AgentEnds { stdin, stdout, stderr, terminal } = ends;
    let running = Rc::new(RunningExec {
        pid,
        reaped: Cell::new(false),
        stdin: Stdin::new(stdin),
        terminal,
        ended: Notify::new(),
    });
    agent.execs.borrow_mut().insert(exec_id.clone(), Rc::clone(&running));
    let _listed = Listed { agent: &agent, exec_id: &exec_id };

    let state = PumpState::new();
    let result = {
        let pumping = async {
            writer.send(exec).await?;
            pump(stdout, stderr, &mut writer, &state).await
        };
        supervise(&running, &spec, &state, pumping, exited, &mut reader).await
    };
    let Ended { status, forced, sent } = result;
    let output_bytes = sent?;
    let (reason, code, signal) = match (forced, signal_of(status)) {
        (Some(reason), Some(signal)) => (reason, 128 + signal, signal),
        // It ended by itself just before the kill arrived.
        (_, None) => (ExitReason::Exited, exit_code_of(status), 0),
        (None, Some(signal)) => (ExitReason::Signaled, 128 + signal, signal),
    };
    let message = message(reason, signal, &spec);
    writer.send(exit(reason, code, signal, message, output_bytes)).await
}

/// Removes an exec from the agent's list however its task ends.
struct Listed<'a> {
    agent: &'a Agent,
    exec_id: &'a str,
}

impl Drop for Listed<'_> {
    fn drop(&mut self) {
        self.agent.execs.borrow_mut().remove(self.exec_id);
        self.agent.exec_ended.notify_waiters();
    }
}

struct Ended {
    /// Raw wait status of the main process.
    status: i32,
    /// Why the agent killed it, if it did.
    forced: Option<ExitReason>,
    /// Bytes sent, or that the peer was gone.
    sent: Result<u64, FrameError>,
}

/// Waits for the end of the main process and of its output, whatever has to be done for it.
async fn supervise(
    running: &RunningExec,
    spec: &ExecSpec,
    state: &PumpState,
    pumping: impl Future<Output = Result<u64, FrameError>>,
    mut exited: oneshot::Receiver<i32>,
    reader: &mut FrameReader<OwnedReadHalf>,
) -> Ended {
    tokio::pin!(pumping);
    let started = Instant::now();
    let timeout_at = spec.timeout.map(|timeout| started + timeout);
    let mut status = None;
    let mut forced = None;
    let mut sent = None;
    let mut drain_at = None;
    let mut peer_gone = false;
    let kill = || drop(running.signal(libc::SIGKILL));
    loop {
        if let (Some(status), true) = (status, sent.is_some()) {
            return Ended { status, forced, sent: sent.unwrap_or(Ok(0)) };
        }
        // While its output waits for the peer, the program is not silent: look again after the whole time.
        let silent_until =
            spec.no_output_timeout.map(|silence| state.silent_since().unwrap_or_else(Instant::now) + silence);
        let limited = status.is_none() && forced.is_none();
        tokio::select! {
            biased;
            result = &mut exited, if status.is_none() => {
                // The reaper drops no sender before it has sent; a missing status would be a killed process.
                status = Some(result.unwrap_or(libc::SIGKILL));
                running.reaped.set(true);
                running.ended.notify_waiters();
                drain_at = Some(Instant::now() + OUTPUT_GRACE);
            }
            result = &mut pumping, if sent.is_none() => {
                if result.is_err() {
                    kill();
                }
                sent = Some(result);
            }
            () = at(timeout_at), if limited => {
                forced = Some(ExitReason::Timeout);
                kill();
            }
            () = at(silent_until), if limited => {
                let silence = spec.no_output_timeout.unwrap_or_default();
                // It may have printed, or be waiting for the peer, since the time was set.
                if state.silent_since().is_some_and(|since| since + silence <= Instant::now()) {
                    forced = Some(ExitReason::NoOutputTimeout);
                    kill();
                }
            }
            () = at(drain_at), if sent.is_none() => {
                drain_at = None;
                state.drain();
            }
            // Nothing more may come on this connection: anything is as good as its end.
            _ = reader.next(), if !peer_gone => {
                peer_gone = true;
                sent.get_or_insert(Err(FrameError::Closed));
                kill();
            }
        }
    }
}

/// Waits until an instant; forever without one.
async fn at(instant: Option<Instant>) {
    match instant {
        Some(instant) => sleep_until(instant).await,
        None => std::future::pending().await,
    }
}

fn exit(reason: ExitReason, code: i32, signal: i32, message: String, output_bytes: u64) -> guest::Exit {
    guest::Exit {
        reason: exit_reason_to_wire(reason),
        code,
        signal,
        message,
        output_bytes,
        exited_unix_ms: unix_ms(),
        ..guest::Exit::default()
    }
}

fn message(reason: ExitReason, signal: i32, spec: &ExecSpec) -> String {
    // As it was asked for: `1s`, `1.5s`, `250ms`.
    let limit = |limit: Option<Duration>| format!("{:?}", limit.unwrap_or_default());
    match reason {
        ExitReason::Signaled => format!("the program was ended by signal {signal}"),
        ExitReason::Timeout => {
            format!("the program ran longer than {} and was killed", limit(spec.timeout))
        }
        ExitReason::NoOutputTimeout => {
            format!("the program printed nothing for {} and was killed", limit(spec.no_output_timeout))
        }
        ExitReason::Exited | ExitReason::OutOfMemory | ExitReason::NotStarted | ExitReason::SandboxGone => {
            String::new()
        }
    }
}

fn signal_of(status: i32) -> Option<i32> {
    libc::WIFSIGNALED(status).then(|| libc::WTERMSIG(status))
}

fn exit_code_of(status: i32) -> i32 {
    libc::WEXITSTATUS(status)
}

fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
