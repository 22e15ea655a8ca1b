//! Every exec of the session that is still kept, running or ended, and how one comes into the list.
//!
//! Their output shares one bound: those that run have an equal part of it each (at most the bound of an exec), and those
//! that have ended what is left. Beyond it the oldest that nobody reads lose their output and keep their records.

use std::cell::RefCell;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use buffa::Message as _;
use cloister_api::guest::{self, ErrorKind};
use cloister_types::exec::ExecRecord;
use cloister_types::name::validate_request_id;
use cloister_types::{ExecId, ExecSpec, ExitReason};
use tokio::time::timeout;

use super::config::{Defence, ShimConfig};
use super::exec::{Exec, follow, not_taken};
use super::lifecycle::{Shim, unix_ms};
use crate::convert;
use crate::fault::POINTS;
use crate::frames::{Body, FRAME_MAX_BYTES};
use crate::spool::{self, Writer};

/// Execs that run at the same time. The guest agent has buffers for each, and memory for this many and as much again.
const RUNNING_MAX: usize = 256;
/// Room that an answer with the spec needs for everything else in it.
const ANSWER_RESERVE_BYTES: usize = 16 * 1024;
/// How long the guest agent may take for an answer that depends on nothing but itself.
pub(super) const GUEST_DEADLINE: Duration = Duration::from_secs(30);

/// Why a request was refused; sent as it is.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) kind: ErrorKind,
    pub(super) message: String,
}

impl Refusal {
    pub(super) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }

    pub(super) fn internal(error: &dyn std::error::Error) -> Self {
        Self::new(ErrorKind::Internal, super::chain(error))
    }
}

/// The execs, in the order in which they were started.
#[derive(Default)]
pub(super) struct ExecTable {
    execs: RefCell<Vec<Rc<Exec>>>,
}

impl ExecTable {
    /// Returns the table with what earlier sandboxes of the session left. An exec without an exit ended with its
    /// sandbox.
    pub(super) fn load(exec_dir: &Path) -> Self {
        let mut execs = Vec::new();
        for record in spool::read_records(exec_dir).unwrap_or_default() {
            let dir = exec_dir.join(record.exec_id.as_str());
            let sealed = spool::seal(&dir, "the sandbox ended before the program did", unix_ms());
            if let Ok(ExecRecord { exit: Some(exit), .. }) = sealed {
                execs.push(Rc::new(Exec::ended(&record, dir, exit)));
            }
        }
        Self { execs: RefCell::new(execs) }
    }

    /// Returns the exec with this id.
    ///
    /// # Errors
    ///
    /// `NOT_FOUND`.
    pub(super) fn find(&self, exec_id: &str) -> Result<Rc<Exec>, Refusal> {
        let execs = self.execs.borrow();
        execs.iter().find(|exec| exec.id.as_str() == exec_id).map(Rc::clone).ok_or_else(|| {
            let shown: String = exec_id.chars().take(64).collect();
            Refusal::new(ErrorKind::NotFound, format!("exec `{shown}`"))
        })
    }

    /// Returns all execs, oldest first.
    pub(super) fn all(&self) -> Vec<Rc<Exec>> {
        self.execs.borrow().clone()
    }

    /// Returns how many run.
    fn running(&self) -> usize {
        self.execs.borrow().iter().filter(|exec| exec.exit().is_none()).count()
    }

    /// Gives each exec that runs its part of the session's bound.
    pub(super) fn share_bound(&self, config: &ShimConfig) {
        if config.defences_off.contains(&Defence::SpoolBound) {
            return;
        }
        let execs = self.execs.borrow();
        let running = execs.iter().filter(|exec| exec.exit().is_none());
        let count = u64::try_from(running.clone().count()).unwrap_or(u64::MAX).max(1);
        let share = config.spool_max_bytes.min(config.session_spool_max_bytes / count);
        for exec in running {
            exec.set_max_bytes(share);
        }
        drop(execs);
        self.trim(config);
    }

    /// Removes the output of the oldest ended execs that nobody reads while there is more than the session's bound.
    pub(super) fn trim(&self, config: &ShimConfig) {
        if config.defences_off.contains(&Defence::SpoolBound) {
            return;
        }
        let execs = self.execs.borrow();
        let mut kept: u64 = execs.iter().map(|exec| exec.kept_bytes()).sum();
        for exec in execs.iter() {
            if kept <= config.session_spool_max_bytes {
                return;
            }
            if exec.kept_bytes() > 0 && exec.exit().is_some() && !exec.has_readers() {
                kept -= exec.kept_bytes();
                exec.drop_output();
            }
        }
    }

    /// Makes room for one more by forgetting the oldest ended exec that nobody reads. Returns what is to be removed
    /// from the disk, which can wait until the new one has been asked for.
    fn evict(&self, max: usize) -> Result<Vec<PathBuf>, Refusal> {
        let mut evicted = Vec::new();
        let mut execs = self.execs.borrow_mut();
        while execs.len() >= max.max(1) {
            let Some(index) = execs.iter().position(|exec| exec.exit().is_some() && !exec.has_readers())
            else {
                return Err(Refusal::new(
                    ErrorKind::Exhausted,
                    format!("{max} execs run or are being read, which is all that a sandbox may have"),
                ));
            };
            evicted.push(execs.remove(index).dir.clone());
        }
        Ok(evicted)
    }
}

/// Starts an exec, or finds the one that the same request started before; returns it with its record.
///
/// # Errors
///
/// A program that cannot be started is no error: its exec has ended as `NotStarted`.
pub(super) async fn start(
    shim: &Rc<Shim>,
    start: guest::StartExec,
) -> Result<(Rc<Exec>, ExecRecord), Refusal> {
    let (exec_id, spec) = check(&start)?;
    let same_request = {
        let execs = shim.execs.execs.borrow();
        execs.iter().find(|exec| exec.request_id == start.request_id).map(Rc::clone)
    };
    if let Some(exec) = same_request {
        exec.started().await;
        let record = exec.record().map_err(|error| Refusal::internal(&error))?;
        if record.spec != spec {
            return Err(Refusal::new(ErrorKind::Conflict, format!("request id `{}`", start.request_id)));
        }
        return Ok((exec, record));
    }
    if shim.execs.find(exec_id.as_str()).is_ok() {
        return Err(Refusal::new(ErrorKind::Conflict, format!("exec id `{exec_id}`")));
    }
    if shim.is_stopping() || shim.has_ended() {
        return Err(Refusal::new(ErrorKind::NotRunning, "the sandbox is ending"));
    }
    if !shim.identity.borrow().is_claimed {
        // A program's files and processes would be there when the next owner comes.
        return Err(Refusal::new(ErrorKind::NotRunning, "the sandbox is nobody's yet"));
    }
    if shim.execs.running() >= RUNNING_MAX {
        return Err(Refusal::new(
            ErrorKind::Exhausted,
            format!("{RUNNING_MAX} execs run in this sandbox, which is all that it may have at a time"),
        ));
    }
    let evicted = shim.execs.evict(usize::try_from(shim.config.execs_max).unwrap_or(usize::MAX))?;
    for dir in evicted {
        // Runs while the guest agent forks. What cannot be removed now is removed with the session.
        shim.following.spawn(async move { drop(std::fs::remove_dir_all(dir)) });
    }

    let record = ExecRecord {
        exec_id: exec_id.clone(),
        request_id: start.request_id.clone(),
        spec,
        pid: 0,
        started_unix_ms: unix_ms(),
        exit: None,
    };
    let exec = Rc::new(create(shim, &record)?);
    shim.execs.execs.borrow_mut().push(Rc::clone(&exec));
    shim.execs.share_bound(&shim.config);
    launch(shim, &exec, &record.spec, start).await;
    let record = exec.record_with(record.spec);
    Ok((exec, record))
}

fn check(start: &guest::StartExec) -> Result<(ExecId, ExecSpec), Refusal> {
    let invalid = |error: &dyn std::error::Error| Refusal::new(ErrorKind::Invalid, error.to_string());
    let exec_id: ExecId = start.exec_id.parse().map_err(|error| invalid(&error))?;
    validate_request_id(&start.request_id).map_err(|error| invalid(&error))?;
    let Some(spec) = start.spec.as_option() else {
        return Err(Refusal::new(ErrorKind::Invalid, "`spec` is missing"));
    };
    let spec_bytes = usize::try_from(spec.encoded_len()).unwrap_or(usize::MAX);
    if spec_bytes > FRAME_MAX_BYTES - ANSWER_RESERVE_BYTES {
        return Err(Refusal::new(
            ErrorKind::Invalid,
            format!("the spec has {spec_bytes} bytes: at most {}", FRAME_MAX_BYTES - ANSWER_RESERVE_BYTES),
        ));
    }
    let spec = convert::spec_from_wire(spec.clone()).map_err(|error| invalid(&error))?;
    Ok((exec_id, spec))
}

/// Makes the exec's directory and writes what is asked of it before anything runs.
fn create(shim: &Shim, record: &ExecRecord) -> Result<Exec, Refusal> {
    let dir = shim.identity.borrow().exec_dir.join(record.exec_id.as_str());
    let result = DirBuilder::new().recursive(true).mode(0o700).create(&dir);
    result.map_err(|error| Refusal::internal(&error))?;
    POINTS.reach("shim_after_exec_dir");
    spool::write_spec(&dir, record).map_err(|error| {
        let _ = std::fs::remove_dir_all(&dir);
        Refusal::internal(&error)
    })?;
    POINTS.reach("shim_after_exec_spec");
    let bounded = !shim.config.defences_off.contains(&Defence::SpoolBound);
    let max_bytes = if bounded { shim.config.spool_max_bytes } else { u64::MAX };
    let spool = Writer::new(dir.clone(), max_bytes);
    Ok(Exec::starting(record, dir, spool))
}

/// Asks the guest agent to start it and leaves its output to a task of its own.
async fn launch(shim: &Rc<Shim>, exec: &Rc<Exec>, spec: &ExecSpec, start: guest::StartExec) {
    let gone = |message: String| not_taken(ExitReason::SandboxGone, 137, message);
    let limits = [spec.timeout, spec.no_output_timeout];
    let limit = limits.into_iter().flatten().min();
    // The counts from before it could do anything.
    let before = shim.counters.read();
    let opened = timeout(GUEST_DEADLINE, async {
        let mut connection = shim.dial_guest(start).await?;
        #[cfg(debug_assertions)]
        if shim.config.defences_off.contains(&Defence::FrameBound) {
            connection.reader.leave_bound_off();
        }
        let answer = connection.reader.expect().await?;
        Ok::<_, crate::connection::OpenError>((connection, answer))
    });
    let (connection, answer) = match opened.await {
        Ok(Ok(opened)) => opened,
        Ok(Err(error)) => {
            let message = format!("the guest agent could not be asked: {}", super::chain(&error));
            return exec.set_ended(shim, gone(message));
        }
        Err(_) => return exec.set_ended(shim, gone("the guest agent did not answer".to_owned())),
    };
    match answer {
        Body::Exec(started) => {
            POINTS.reach("shim_after_exec_started");
            exec.set_running(started.pid);
            let following = follow(Rc::clone(shim), Rc::clone(exec), connection, before, limit);
            shim.following.spawn(following);
        }
        Body::Error(error) => exec.set_ended(shim, not_taken(ExitReason::NotStarted, 126, error.message)),
        _ => exec.set_ended(shim, gone("the guest agent sent nonsense".to_owned())),
    }
}
