//! One exec as the shim keeps it: its spool, its readers, and how it ended.
//!
//! ```text
//!  Starting ──► Running ──► Ended(exit)
//! ```
//!
//! The task of [`follow`] owns the guest's connection and is the only writer of the spool. A reader holds a position;
//! the lowest one is what the spool may not drop. While the spool is full and a reader still needs its oldest
//! segment, the connection is not read, and so the program waits.

use std::cell::{Cell, RefCell};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use cloister_api::guest;
use cloister_types::exec::{ExecRecord, OUTPUT_FRAME_MAX_BYTES};
use cloister_types::{ExecId, ExecSpec, Exit, ExitReason};
use tokio::sync::{Mutex, Notify};

use super::counters::Counts;
use super::lifecycle::{Shim, unix_ms};
use crate::connection::Connection;
use crate::convert;
use crate::fault::POINTS;
use crate::frames::{Body, FrameError};
use crate::spool::{self, AppendError, RecordError, Writer};

/// Most characters of a message that the guest may put into a record.
const MESSAGE_MAX_CHARS: usize = 1024;
/// How often a disk that did not take an exit record is asked again.
const EXIT_RECORD_PAUSE: Duration = Duration::from_secs(1);
/// What a shell returns for a child that SIGKILL ended.
const CODE_KILLED: i32 = 128 + libc::SIGKILL;

/// Where an exec stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ExecState {
    /// The guest agent was asked and has not answered.
    Starting,
    /// The program runs, or its output is still arriving.
    Running,
    /// Nothing more comes.
    Ended(Exit),
}

/// One exec of the sandbox, or of an earlier one of the same session.
pub(super) struct Exec {
    pub(super) id: ExecId,
    pub(super) request_id: String,
    pub(super) dir: PathBuf,
    pub(super) has_stdin: bool,
    pub(super) has_terminal: bool,
    started_unix_ms: u64,
    pid: Cell<u32>,
    state: RefCell<ExecState>,
    /// Gone with the exec's end: an ended exec holds no descriptor.
    spool: RefCell<Option<Writer>>,
    next_offset: Cell<u64>,
    /// Bytes of its output on the disk.
    kept_bytes: Cell<u64>,
    readers: RefCell<Vec<Rc<Cell<u64>>>>,
    /// Told at every change of state and after every piece of output.
    pub(super) changed: Notify,
    /// Told when a reader has moved on or left.
    room: Notify,
    /// The guest connection of standard input, dialled at the first write.
    pub(super) stdin: Mutex<Option<Connection>>,
}

impl Exec {
    /// Returns an exec that is about to start.
    pub(super) fn starting(record: &ExecRecord, dir: PathBuf, spool: Writer) -> Self {
        Self::new(record, dir, ExecState::Starting, Some(spool), 0)
    }

    /// Returns an exec of an earlier sandbox.
    pub(super) fn ended(record: &ExecRecord, dir: PathBuf, exit: Exit) -> Self {
        let (next_offset, kept) = (exit.output_bytes, spool::kept_bytes(&dir));
        let exec = Self::new(record, dir, ExecState::Ended(exit), None, next_offset);
        exec.kept_bytes.set(kept);
        exec
    }

    fn new(
        record: &ExecRecord,
        dir: PathBuf,
        state: ExecState,
        spool: Option<Writer>,
        next_offset: u64,
    ) -> Self {
        Self {
            id: record.exec_id.clone(),
            request_id: record.request_id.clone(),
            dir,
            has_stdin: record.spec.has_stdin(),
            has_terminal: record.spec.terminal.is_some(),
            started_unix_ms: record.started_unix_ms,
            pid: Cell::new(record.pid),
            state: RefCell::new(state),
            spool: RefCell::new(spool),
            next_offset: Cell::new(next_offset),
            kept_bytes: Cell::new(0),
            readers: RefCell::default(),
            changed: Notify::new(),
            room: Notify::new(),
            stdin: Mutex::new(None),
        }
    }

    /// Returns how it ended, once it has.
    pub(super) fn exit(&self) -> Option<Exit> {
        match &*self.state.borrow() {
            ExecState::Ended(exit) => Some(exit.clone()),
            ExecState::Starting | ExecState::Running => None,
        }
    }

    /// Returns the offset after the newest byte.
    pub(super) fn next_offset(&self) -> u64 {
        self.next_offset.get()
    }

    /// Returns the bytes of its output that are on the disk.
    pub(super) fn kept_bytes(&self) -> u64 {
        self.kept_bytes.get()
    }

    /// Bounds what is kept of it from now on; an ended exec keeps what it has.
    pub(super) fn set_max_bytes(&self, max_bytes: u64) {
        if let Some(writer) = self.spool.borrow_mut().as_mut() {
            writer.set_max_bytes(max_bytes, !self.has_readers());
            self.kept_bytes.set(writer.kept_bytes());
        }
        self.room.notify_waiters();
    }

    /// Removes the output of an ended exec.
    pub(super) fn drop_output(&self) {
        spool::drop_output(&self.dir);
        self.kept_bytes.set(0);
    }

    /// Returns whether somebody reads it.
    pub(super) fn has_readers(&self) -> bool {
        !self.readers.borrow().is_empty()
    }

    /// Reads the whole record; the spec is kept on the disk only, so that many large ones cost no memory.
    ///
    /// # Errors
    ///
    /// When its file is gone or damaged.
    pub(super) fn record(&self) -> Result<ExecRecord, RecordError> {
        let record = spool::read_record(&self.dir)?;
        Ok(ExecRecord { pid: self.pid.get(), exit: self.exit(), ..record })
    }

    /// Returns the record where the spec is at hand.
    pub(super) fn record_with(&self, spec: ExecSpec) -> ExecRecord {
        ExecRecord {
            exec_id: self.id.clone(),
            request_id: self.request_id.clone(),
            spec,
            pid: self.pid.get(),
            started_unix_ms: self.started_unix_ms,
            exit: self.exit(),
        }
    }

    /// Waits until the guest agent has answered whether it runs.
    pub(super) async fn started(&self) {
        self.wait_for(|| *self.state.borrow() != ExecState::Starting).await;
    }

    /// Waits until it has ended.
    pub(super) async fn wait_ended(&self) {
        self.wait_for(|| matches!(&*self.state.borrow(), ExecState::Ended(_))).await;
    }

    async fn wait_for(&self, reached: impl Fn() -> bool) {
        loop {
            let changed = self.changed.notified();
            if reached() {
                return;
            }
            changed.await;
        }
    }

    /// The guest agent has started it.
    pub(super) fn set_running(&self, pid: u32) {
        self.pid.set(pid);
        *self.state.borrow_mut() = ExecState::Running;
        self.changed.notify_waiters();
    }

    /// Writes the exit record and tells everybody. A disk that does not take it is asked again until it does: without
    /// it the end that was told would be another one in the sandbox's next life.
    pub(super) fn set_ended(self: &Rc<Self>, shim: &Rc<Shim>, exit: Exit) {
        POINTS.reach("shim_before_exit_record");
        if spool::write_exit(&self.dir, self.pid.get(), &exit).is_err() {
            shim.following.spawn(write_exit_later(Rc::clone(shim), Rc::clone(self), exit.clone()));
        }
        POINTS.reach("shim_after_exit_record");
        self.spool.borrow_mut().take();
        *self.state.borrow_mut() = ExecState::Ended(exit);
        self.changed.notify_waiters();
        shim.execs.share_bound(&shim.config);
    }

    /// Counts a reader in from `from_offset` on; it counts until the guard is dropped.
    pub(super) fn attach(self: &Rc<Self>, from_offset: u64) -> Attached {
        let position = Rc::new(Cell::new(from_offset));
        self.readers.borrow_mut().push(Rc::clone(&position));
        Attached { exec: Rc::clone(self), position }
    }

    fn needed_from(&self) -> Option<u64> {
        self.readers.borrow().iter().map(|position| position.get()).min()
    }

    fn has_room(&self) -> bool {
        let spool = self.spool.borrow();
        spool.as_ref().is_none_or(|spool| spool.has_room(OUTPUT_FRAME_MAX_BYTES, self.needed_from()))
    }

    /// Waits until a frame can be kept without dropping what a reader needs.
    async fn wait_room(&self) {
        loop {
            let room = self.room.notified();
            if self.has_room() {
                return;
            }
            room.await;
        }
    }

    fn append(&self, output: &guest::Output, needed_from: Option<u64>) -> Result<(), String> {
        let stream = convert::stream_from_wire(output.stream).map_err(|error| error.to_string())?;
        if output.data.len() > OUTPUT_FRAME_MAX_BYTES {
            return Err("a frame of output is larger than 64 KiB".to_owned());
        }
        let mut spool = self.spool.borrow_mut();
        let Some(writer) = spool.as_mut() else { return Ok(()) };
        let lost = match writer.append(stream, &output.data, needed_from) {
            Ok(()) => false,
            // Room was waited for; what does not fit even so is counted and announced like any lost bytes.
            Err(AppendError::WouldBlock) => writer.append(stream, &output.data, None).is_err(),
            Err(AppendError::Lost(_)) => true,
        };
        self.next_offset.set(writer.next_offset());
        self.kept_bytes.set(writer.kept_bytes());
        POINTS.reach("shim_after_output");
        drop(spool);
        self.changed.notify_waiters();
        if lost { Err(String::new()) } else { Ok(()) }
    }
}

/// Tries again to write an exit record, for the last time when the sandbox has ended.
async fn write_exit_later(shim: Rc<Shim>, exec: Rc<Exec>, exit: Exit) {
    loop {
        let is_last = tokio::select! {
            () = tokio::time::sleep(EXIT_RECORD_PAUSE) => false,
            () = shim.pid1_ended() => true,
        };
        if spool::write_exit(&exec.dir, exec.pid.get(), &exit).is_ok() || is_last || !exec.dir.exists() {
            return;
        }
    }
}

/// A reader, counted while this lives.
pub(super) struct Attached {
    exec: Rc<Exec>,
    position: Rc<Cell<u64>>,
}

impl Attached {
    /// The reader has taken everything below `position`.
    pub(super) fn advance(&self, position: u64) {
        self.position.set(position);
        self.exec.room.notify_waiters();
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.exec.readers.borrow_mut().retain(|position| !Rc::ptr_eq(position, &self.position));
        self.exec.room.notify_waiters();
    }
}

/// Spools a running exec's output until its end and writes how it ended.
///
/// The guest agent keeps the time limits; `limit` is the shorter of them, from which on it is looked after.
pub(super) async fn follow(
    shim: Rc<Shim>,
    exec: Rc<Exec>,
    connection: Connection,
    before: Counts,
    limit: Option<Duration>,
) {
    let unanswered = Cell::new(false);
    let look_after = async {
        let Some(limit) = limit else { return std::future::pending().await };
        shim.until_unanswered(limit).await;
        unanswered.set(true);
        // Its connections end with it, and so does the gathering.
        shim.kill_unanswering();
        std::future::pending().await
    };
    let (ended, lost) = tokio::select! {
        gathered = gather(&shim, &exec, connection) => gathered,
        never = look_after => match never {},
    };
    let mut exit = conclude(&shim, ended, before);
    if unanswered.get() && exit.reason == ExitReason::SandboxGone {
        exit.reason = ExitReason::Timeout;
        exit.message = "the time limit passed, and the guest agent, which keeps it, no longer answered: the sandbox was killed"
            .to_owned();
    }
    exit.output_bytes = exec.next_offset();
    exit.output_lost = lost;
    exec.set_ended(&shim, exit);
    // A write that still waits sees the end and lets go.
    exec.stdin.lock().await.take();
}

/// Spools output until its end. Returns what the guest agent said of it, or why it did not, and whether output was lost.
async fn gather(shim: &Shim, exec: &Exec, mut connection: Connection) -> (Result<guest::Exit, String>, bool) {
    let mut lost = false;
    let ended = loop {
        tokio::select! {
            biased;
            () = exec.wait_room() => {}
            // Nobody is left to be slowed down: what is in the socket is kept whoever reads.
            () = shim.pid1_ended() => {}
        }
        match connection.reader.next().await {
            Ok(Some(Body::Output(output))) => match exec.append(&output, exec.needed_from()) {
                Ok(()) => shim.execs.trim(&shim.config),
                Err(reason) if reason.is_empty() => lost = true,
                Err(reason) => break Err(format!("the guest agent sent nonsense: {reason}")),
            },
            Ok(Some(Body::Exit(exit))) => break Ok(*exit),
            Ok(Some(_)) => break Err("the guest agent sent another message than output".to_owned()),
            Ok(None) | Err(FrameError::Read(_) | FrameError::Torn) => {
                break Err("the sandbox ended before the program did".to_owned());
            }
            Err(error) => break Err(format!("the guest agent sent nonsense: {}", super::chain(&error))),
        }
    };
    (ended, lost)
}

/// Returns the exit record from what the guest agent said and what the kernel counted.
fn conclude(shim: &Shim, ended: Result<guest::Exit, String>, before: Counts) -> Exit {
    let after = shim.counters.read();
    let said = ended.and_then(|exit| {
        convert::exit_from_wire(exit).map_err(|error| format!("the guest agent sent nonsense: {error}"))
    });
    let mut exit = said.unwrap_or_else(|message| Exit {
        reason: ExitReason::SandboxGone,
        code: CODE_KILLED,
        signal: None,
        message,
        output_bytes: 0,
        exited_unix_ms: 0,
        pids_limit_hit: false,
        disk_full: false,
        memory_limit_hit: false,
        output_lost: false,
        disk_error: false,
    });
    exit.message = exit.message.chars().take(MESSAGE_MAX_CHARS).collect();
    // Times, counts and limits are the host's own; the guest's clock and word do not matter.
    exit.exited_unix_ms = unix_ms();
    // A process that would be one too many is turned back by the guest agent: the kernel counts only forks.
    let is_turned_back = exit.reason == ExitReason::NotStarted && exit.pids_limit_hit;
    exit.pids_limit_hit = is_turned_back || after.pids_limit_hits > before.pids_limit_hits;
    exit.memory_limit_hit = after.oom_kills > before.oom_kills;
    exit.disk_full = exit.failed() && shim.counters.disk_full();
    // Whatever it returned: what it wrote may never have reached the disk.
    exit.disk_error = shim.counters.disk_error();
    let killed = match exit.reason {
        ExitReason::Signaled => exit.signal == Some(libc::SIGKILL),
        ExitReason::Exited => exit.code == CODE_KILLED,
        ExitReason::OutOfMemory
        | ExitReason::Timeout
        | ExitReason::NoOutputTimeout
        | ExitReason::NotStarted
        | ExitReason::SandboxGone => false,
    };
    if killed && exit.memory_limit_hit {
        exit.reason = ExitReason::OutOfMemory;
        exit.message = "the sandbox reached its memory limit and the kernel killed the program".to_owned();
    } else if ended_by_stop(&exit) && shim.is_stopping() {
        exit.reason = ExitReason::SandboxGone;
        exit.message = "the sandbox was stopped before the program ended".to_owned();
    }
    exit
}

/// Returns whether the program died of what a stop sends: SIGTERM first, then SIGKILL.
fn ended_by_stop(exit: &Exit) -> bool {
    exit.reason == ExitReason::Signaled && matches!(exit.signal, Some(libc::SIGTERM | libc::SIGKILL))
}

/// Returns the exit of an exec that the guest agent did not take.
pub(super) fn not_taken(reason: ExitReason, code: i32, message: String) -> Exit {
    Exit {
        reason,
        code,
        signal: None,
        message: message.chars().take(MESSAGE_MAX_CHARS).collect(),
        output_bytes: 0,
        exited_unix_ms: unix_ms(),
        pids_limit_hit: false,
        disk_full: false,
        memory_limit_hit: false,
        output_lost: false,
        disk_error: false,
    }
}
