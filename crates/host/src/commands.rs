//! What a coordinator can ask of this host, each with a typed answer.
//!
//! A command waits for its session's turn and shows its epoch; only then does it have an effect. Everything is
//! safe to ask twice: create, stop and remove by their ids, `StartExec` by its request id, standard input by its
//! offset. So an answer that was lost with a link is had by asking again.
//!
//! A command that changes a sandbox is never abandoned half-way: it runs to its end even when the link that
//! brought it is gone. One that only waits or reads is dropped when the agent stops.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use buffa::Message as _;
use cloister_api::common::Exec;
use cloister_api::connection::MAX_MESSAGE_BYTES;
use cloister_api::convert::{
    exec_spec_from_proto, exec_to_proto, facts_to_proto, isolation_to_proto, limits_from_proto,
    terminal_size_from_proto,
};
use cloister_api::host::command::Command as Kind;
use cloister_api::host::command_result::Result as Answer;
use cloister_api::host::{
    Command, CommandResult, CreateSandbox, ExecList, HostErrorKind, Resized, SandboxCreated, SandboxRemoved,
    SandboxStopped, Signaled, StartExec, StdinWritten, StepTiming, StopSandbox, WriteStdin,
};
use cloister_sandbox::backend::{Backend, Gone, OutputReader, Sandbox, SandboxError, SandboxSpec};
use cloister_types::exec::ExecRecord;
use cloister_types::{BackendKind, ExecId, ExecSpec, Limits, SandboxId, SessionId};

use crate::agent::{Agent, Live};
use crate::backends::Backends;
use crate::fault::POINTS;
use crate::refusal::Refusal;
use crate::turns::Turn;

/// What a list has of an exec's command line, and of a message.
const LISTED_ARGUMENTS_BYTES: usize = 256;
const LISTED_MESSAGE_CHARS: usize = 256;
/// What an answer needs around itself.
const ANSWER_RESERVE_BYTES: usize = 4096;
/// Longest time that one `WaitExec` waits.
const WAIT_MAX: Duration = Duration::from_secs(300);
/// Longest time between SIGTERM and SIGKILL of a stop.
const GRACE_MAX: Duration = Duration::from_secs(60);
/// How long a write to a program that does not read is waited for. The answer is then the offset it began at:
/// what was taken in the meantime is skipped when it comes again.
const STDIN_PATIENCE: Duration = Duration::from_secs(20);

impl Agent {
    /// Does what a command asks and returns its answer.
    pub(crate) async fn execute(self: &Arc<Self>, command: Command, turn: Turn) -> CommandResult {
        let id = command.id;
        let result = match self.try_execute(command, turn).await {
            Ok(answer) => answer,
            Err(refusal) => refusal.into_proto().into(),
        };
        let answer = CommandResult { id, result: Some(result), ..Default::default() };
        // The coordinator takes no larger message, and would end the link of all sessions for it.
        if usize::try_from(answer.encoded_len())
            .is_ok_and(|bytes| bytes + ANSWER_RESERVE_BYTES <= MAX_MESSAGE_BYTES)
        {
            return answer;
        }
        let refusal = Refusal::new(HostErrorKind::Internal, "the answer is larger than a message may be");
        let result: Answer = refusal.into_proto().into();
        CommandResult { id, result: Some(result), ..Default::default() }
    }

    async fn try_execute(self: &Arc<Self>, command: Command, turn: Turn) -> Result<Answer, Refusal> {
        let session_id: SessionId = command.session_id.parse()?;
        let kind = command.command.ok_or_else(|| {
            Refusal::invalid("the command is of a kind that this version of the host does not know")
        })?;
        let turn = turn.taken().await;
        self.epochs.admit(&session_id, command.epoch).await?;
        match kind {
            Kind::Create(create) => {
                let answer = self.create(&session_id, &create).await.map(Into::into);
                drop(turn);
                answer
            }
            Kind::Stop(stop) => {
                let answer = self.stop(&session_id, &stop).await.map(Into::into);
                drop(turn);
                answer
            }
            Kind::Remove(_) => {
                let answer = self.remove(&session_id).await.map(|()| SandboxRemoved::default().into());
                drop(turn);
                answer
            }
            Kind::StartExec(start) => {
                let found = self.find(&session_id);
                drop(turn);
                let exec = self.start_exec(&session_id, found, &start).await?;
                Ok(exec_to_proto(&session_id, &exec).into())
            }
            reading => {
                drop(turn);
                let token = self.tasks.token();
                tokio::select! {
                    answer = self.read(&session_id, reading) => answer,
                    () = token.cancelled() => Err(Refusal::stopping()),
                }
            }
        }
    }

    /// Commands that make, stop or remove nothing.
    async fn read(&self, session_id: &SessionId, kind: Kind) -> Result<Answer, Refusal> {
        match kind {
            Kind::GetExec(get) => {
                let exec = self.exec(session_id, &get.exec_id.parse()?).await?;
                Ok(exec_to_proto(session_id, &exec).into())
            }
            Kind::ListExecs(_) => {
                let execs = self.execs(session_id).await?;
                let execs = execs.iter().map(|exec| shortened(exec_to_proto(session_id, exec))).collect();
                Ok(ExecList { execs, ..Default::default() }.into())
            }
            Kind::WriteStdin(write) => {
                let next_offset = self.write_stdin(session_id, &write).await?;
                Ok(StdinWritten { next_offset, ..Default::default() }.into())
            }
            Kind::SignalExec(signal) => {
                let exec_id: ExecId = signal.exec_id.parse()?;
                match self.running(session_id) {
                    Ok(sandbox) => sandbox.signal(&exec_id, signal.signal).await?,
                    // An exec that has ended takes any signal.
                    Err(_) => drop(self.exec(session_id, &exec_id).await?),
                }
                Ok(Signaled::default().into())
            }
            Kind::ResizeExec(resize) => {
                let exec_id: ExecId = resize.exec_id.parse()?;
                let size = terminal_size_from_proto(&resize.size)?;
                match self.running(session_id) {
                    Ok(sandbox) => sandbox.resize(&exec_id, size).await?,
                    // An exec that has ended takes any size.
                    Err(_) => drop(self.exec(session_id, &exec_id).await?),
                }
                Ok(Resized::default().into())
            }
            Kind::WaitExec(wait) => {
                let exec_id: ExecId = wait.exec_id.parse()?;
                let longest = Duration::from_millis(wait.wait_ms).min(WAIT_MAX);
                let begin = tokio::time::Instant::now();
                let exec = match self.running(session_id) {
                    Ok(sandbox) => match sandbox.wait_exec(&exec_id, longest).await {
                        Ok(exec) => exec,
                        Err(SandboxError::NotFound(_)) => self.exec(session_id, &exec_id).await?,
                        Err(SandboxError::NotRunning(_)) => {
                            // It gets its end when what is left of the sandbox is taken down. Without that there is
                            // none to tell, and the caller asks again.
                            let _ = tokio::time::timeout_at(begin + longest, sandbox.wait_gone()).await;
                            self.exec(session_id, &exec_id).await?
                        }
                        Err(error) => return Err(error.into()),
                    },
                    Err(_) => self.exec(session_id, &exec_id).await?,
                };
                Ok(exec_to_proto(session_id, &exec).into())
            }
            Kind::Create(_) | Kind::Stop(_) | Kind::Remove(_) | Kind::StartExec(_) => {
                unreachable!("these change something and are matched before")
            }
        }
    }

    async fn create(
        self: &Arc<Self>,
        session_id: &SessionId,
        create: &CreateSandbox,
    ) -> Result<SandboxCreated, Refusal> {
        let mut spec = SandboxSpec {
            session_id: session_id.clone(),
            sandbox_id: create.sandbox_id.parse()?,
            // Until one is picked below: what runs already is compared first, whatever works by now.
            backend: Backends::named(&create.backend)?.unwrap_or(BackendKind::Namespace),
            image: create.image.clone(),
            limits: limits_from_proto(&create.limits, &Limits::DEFAULT)
                .validate()
                .map_err(Refusal::invalid)?,
            hostname: create.hostname.clone(),
        };
        if let Some(live) = self.find(session_id) {
            let found = live.sandbox.spec();
            if found.sandbox_id == spec.sandbox_id {
                if Backends::named(&create.backend)?.is_none() {
                    spec.backend = found.backend;
                }
                if *found != spec {
                    return Err(Refusal::new(
                        HostErrorKind::Conflict,
                        format!("sandbox `{}` was made with another payload", spec.sandbox_id),
                    ));
                }
                if let Some(answer) = live.answer {
                    return Ok(answer);
                }
            } else {
                // The epoch was let in, so its sandbox is the one that counts: an earlier one whose answer was
                // lost would hold the session's layer for ever.
                tracing::info!(
                    session_id = %session_id, sandbox_id = %found.sandbox_id, successor = %spec.sandbox_id,
                    "sandbox is replaced by its successor"
                );
                self.end(&live, Duration::ZERO).await?;
            }
        }
        let (backend, kind) = self.backends.pick(&create.backend)?;
        spec.backend = kind;
        if create.resumes && !backend.kept_session(session_id).await?.is_some_and(|kept| kept.has_layer) {
            // An empty layer in its place would look like success, with the session's files gone.
            return Err(Refusal::new(
                HostErrorKind::LayerMissing,
                format!(
                    "the files of session `{session_id}` are no longer on this host: put its directory below \
                     `sessions` of the host's data directory back, or delete the session"
                ),
            ));
        }
        let waiting = tokio::time::Instant::now();
        let permit = self.creating.acquire().await.map_err(|_| Refusal::stopping())?;
        let waited = waiting.elapsed();
        let started = tokio::time::Instant::now();
        let created = backend.create(&spec).await?;
        POINTS.reach("host_after_create");
        drop(permit);
        let timing = |step: &str, elapsed: Duration| StepTiming {
            step: step.to_owned(),
            elapsed_us: u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX),
            ..Default::default()
        };
        let mut timings = vec![timing("host_queue", waited)];
        timings.extend(created.timings.iter().map(|step| timing(&step.step, step.elapsed)));
        let answer = SandboxCreated {
            isolation: isolation_to_proto(kind.isolation()).into(),
            facts: facts_to_proto(&created.facts),
            timings,
            ..Default::default()
        };
        tracing::info!(
            session_id = %session_id, sandbox_id = %spec.sandbox_id, backend = %kind,
            elapsed_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX), "sandbox created"
        );
        self.insert(created.sandbox, Some(answer.clone()));
        Ok(answer)
    }

    async fn stop(&self, session_id: &SessionId, stop: &StopSandbox) -> Result<SandboxStopped, Refusal> {
        let wanted: Option<SandboxId> = match stop.sandbox_id.as_str() {
            "" => None,
            text => Some(text.parse()?),
        };
        match self.find(session_id) {
            Some(live) if wanted.is_none_or(|wanted| live.sandbox.spec().sandbox_id == wanted) => {
                let gone = self.end(&live, Duration::from_millis(stop.grace_ms).min(GRACE_MAX)).await?;
                Ok(SandboxStopped {
                    reason: gone.reason.to_string(),
                    message: gone.message,
                    ..Default::default()
                })
            }
            // It has ended, or another one runs that nobody asked to stop.
            Some(_) | None => Ok(SandboxStopped::default()),
        }
    }

    async fn end(&self, live: &Live, grace: Duration) -> Result<Gone, Refusal> {
        let spec = live.sandbox.spec();
        live.ending.store(true, Ordering::SeqCst);
        if let Err(error) = live.sandbox.stop(grace).await {
            live.ending.store(false, Ordering::SeqCst);
            return Err(error.into());
        }
        POINTS.reach("host_after_stop");
        self.forget(&live.sandbox);
        // It has ended: this says how, and does not wait.
        let gone = live.sandbox.wait_gone().await;
        tracing::info!(
            session_id = %spec.session_id, sandbox_id = %spec.sandbox_id, reason = %gone.reason, "sandbox stopped"
        );
        Ok(gone)
    }

    /// Removes all of a session from this host. The caller holds its turn.
    pub(crate) async fn remove(&self, session_id: &SessionId) -> Result<(), Refusal> {
        let live = self.find(session_id);
        if let Some(live) = &live {
            live.ending.store(true, Ordering::SeqCst);
        }
        for backend in self.backends.all() {
            backend.remove(session_id).await?;
        }
        POINTS.reach("host_after_remove");
        if let Some(live) = live {
            self.forget(&live.sandbox);
        }
        self.epochs.removed(session_id);
        tracing::info!(session_id = %session_id, "session removed");
        Ok(())
    }

    /// Starts a program in the sandbox that was found in the session's turn.
    pub(crate) async fn start_exec(
        &self,
        session_id: &SessionId,
        found: Option<Live>,
        start: &StartExec,
    ) -> Result<ExecRecord, Refusal> {
        let (exec_id, spec) = checked(start)?;
        let live = found.ok_or_else(|| not_running(session_id))?;
        let exec = live.sandbox.start_exec(&exec_id, &start.request_id, &spec).await?;
        POINTS.reach("host_after_exec_started");
        Ok(exec)
    }

    /// Does the same, and reads the output from its beginning.
    pub(crate) async fn start_and_read(
        &self,
        session_id: &SessionId,
        found: Option<Live>,
        start: &StartExec,
    ) -> Result<(ExecRecord, Box<dyn OutputReader>), Refusal> {
        let (exec_id, spec) = checked(start)?;
        let live = found.ok_or_else(|| not_running(session_id))?;
        Ok(live.sandbox.start_and_read(&exec_id, &start.request_id, &spec).await?)
    }

    async fn write_stdin(&self, session_id: &SessionId, write: &WriteStdin) -> Result<u64, Refusal> {
        let exec_id: ExecId = write.exec_id.parse()?;
        let sandbox = self.running(session_id)?;
        if write.append {
            let typing = sandbox.type_input(&exec_id, &write.data, write.eof);
            return match tokio::time::timeout(STDIN_PATIENCE, typing).await {
                Ok(typed) => Ok(typed.map(|()| 0)?),
                Err(_) => Err(Refusal::invalid(
                    "the program does not read its terminal; a part of what was typed may have arrived",
                )),
            };
        }
        let writing = sandbox.write_stdin(&exec_id, write.offset, &write.data, write.eof);
        match tokio::time::timeout(STDIN_PATIENCE, writing).await {
            Ok(written) => Ok(written?),
            Err(_) => Ok(write.offset),
        }
    }

    fn running(&self, session_id: &SessionId) -> Result<Arc<dyn Sandbox>, Refusal> {
        self.find(session_id).map(|live| live.sandbox).ok_or_else(|| not_running(session_id))
    }

    /// Returns one exec of a session, whether its sandbox runs or not.
    pub(crate) async fn exec(&self, session_id: &SessionId, exec_id: &ExecId) -> Result<ExecRecord, Refusal> {
        if let Some(live) = self.find(session_id) {
            match live.sandbox.exec(exec_id).await {
                // It may be of an earlier sandbox, or the sandbox is just ending.
                Err(SandboxError::NotFound(_) | SandboxError::NotRunning(_)) => {}
                other => return Ok(other?),
            }
        }
        let execs = self.kept(session_id).await?.ended_execs(session_id).await?;
        execs
            .into_iter()
            .find(|exec| exec.exec_id == *exec_id)
            .ok_or_else(|| Refusal::not_found(format!("exec `{exec_id}` is not on this host")))
    }

    async fn execs(&self, session_id: &SessionId) -> Result<Vec<ExecRecord>, Refusal> {
        if let Some(live) = self.find(session_id) {
            match live.sandbox.execs().await {
                Err(SandboxError::NotRunning(_)) => {}
                other => return Ok(other?),
            }
        }
        Ok(self.kept(session_id).await?.ended_execs(session_id).await?)
    }

    /// Returns the backend that keeps the session's layer and output.
    pub(crate) async fn kept(&self, session_id: &SessionId) -> Result<&Arc<dyn Backend>, Refusal> {
        let keeper = self.backends.keeper(session_id).await?;
        keeper.ok_or_else(|| Refusal::not_found(format!("session `{session_id}` is not on this host")))
    }
}

/// Returns an exec as it is listed: with as much of what a caller chose as a list of all execs has room for.
fn shortened(mut exec: Exec) -> Exec {
    if let Some(spec) = exec.spec.as_option_mut() {
        let mut room = LISTED_ARGUMENTS_BYTES;
        let mut listed = Vec::new();
        for text in std::mem::take(&mut spec.argv) {
            let is_whole = text.len() < room;
            let mut end = text.len().min(room);
            while !text.is_char_boundary(end) {
                end -= 1;
            }
            listed.push(if is_whole { text } else { format!("{}…", &text[..end]) });
            if !is_whole {
                break;
            }
            room -= end + 1;
        }
        spec.argv = listed;
        spec.env = Default::default();
    }
    if let Some(exit) = exec.exit.as_option_mut() {
        exit.message = exit.message.chars().take(LISTED_MESSAGE_CHARS).collect();
    }
    exec
}

fn checked(start: &StartExec) -> Result<(ExecId, ExecSpec), Refusal> {
    let exec_id: ExecId = start.exec_id.parse()?;
    cloister_types::name::validate_request_id(&start.request_id).map_err(Refusal::invalid)?;
    let spec = exec_spec_from_proto(&start.spec)?;
    spec.validate().map_err(Refusal::invalid)?;
    Ok((exec_id, spec))
}

fn not_running(session_id: &SessionId) -> Refusal {
    Refusal::new(
        HostErrorKind::NotRunning,
        format!("session `{session_id}` has no running sandbox on this host"),
    )
}
