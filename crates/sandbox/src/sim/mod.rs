//! The `sim` backend: sandboxes in memory under a virtual clock, with switches for faults.
//!
//! It passes the same conformance suite as the real backends and fails with the same typed errors, so that everything
//! above it can be tested without a kernel, in no time, with faults that are hard to have otherwise. It isolates
//! nothing and runs nothing but the few programs in [`program`].

mod exec;
mod machine;
mod program;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use cloister_types::exec::{ExecRecord, TerminalSize};
use cloister_types::session::Reason;
use cloister_types::{
    BackendKind, Capability, ExecId, ExecSpec, ExitReason, IsolationFact, OutputFrame, SessionId,
};

pub use machine::{SimFaults, SimMachine};

use crate::backend::{
    Backend, Created, Gone, KeptSession, OutputReader, Sandbox, SandboxError, SandboxSpec, StepTiming,
};
use exec::{END_OF_INPUT, SimExec};
use machine::{Running, SimSession};
use program::ParseError;

/// The steps of making a sandbox, at each of which it can be made to fail.
pub const CREATE_STEPS: [&str; 5] = ["intent", "cgroups", "layer", "shim", "agent"];

/// Sandboxes of one [`SimMachine`].
#[derive(Clone)]
pub struct SimBackend {
    machine: SimMachine,
}

impl SimBackend {
    /// Returns a backend for a machine; what runs on it already can be adopted.
    pub fn new(machine: SimMachine) -> Self {
        Self { machine }
    }

    fn handle(&self, spec: &SandboxSpec) -> Arc<dyn Sandbox> {
        Arc::new(SimSandbox { machine: self.machine.clone(), spec: spec.clone() })
    }

    fn created(&self, spec: &SandboxSpec) -> Created {
        let fact = |name: &str, value: &str| IsolationFact { name: name.to_owned(), value: value.to_owned() };
        let timing = |step: &str| StepTiming { step: step.to_owned(), elapsed: Duration::ZERO };
        Created {
            sandbox: self.handle(spec),
            facts: vec![fact("backend", "sim"), fact("isolation", "none")],
            timings: CREATE_STEPS.map(timing).to_vec(),
        }
    }
}

#[async_trait]
impl Backend for SimBackend {
    fn kinds(&self) -> Vec<BackendKind> {
        vec![BackendKind::Sim]
    }

    async fn probe(&self, _kind: BackendKind) -> Vec<Capability> {
        if self.machine.lock().faults.fail_probe {
            return vec![Capability::failed("backend.sim", "the fault switch is on", "switch it off")];
        }
        vec![Capability::ok("backend.sim", "in memory; isolates nothing")]
    }

    async fn create(&self, spec: &SandboxSpec) -> Result<Created, SandboxError> {
        check_spec(spec)?;
        let mut seen = self.machine.watch();
        let ready_at = {
            let state = self.machine.lock();
            state.now() + state.faults.slow_create
        };
        loop {
            {
                let mut state = self.machine.lock();
                if state.now() >= ready_at {
                    if let Some(resource) = state.faults.exhausted.clone() {
                        return Err(SandboxError::Exhausted(resource));
                    }
                    if let Some(running) =
                        state.sessions.get(&spec.session_id).and_then(|session| session.running.as_ref())
                    {
                        return if running.spec == *spec {
                            Ok(self.created(spec))
                        } else {
                            Err(SandboxError::Conflict(format!("session `{}`", spec.session_id)))
                        };
                    }
                    if let Some(step) = state.faults.fail_create_at.clone() {
                        return Err(SandboxError::failed(
                            format!("sandbox step `{step}`"),
                            "the fault switch is on",
                        ));
                    }
                    let session: &mut SimSession = state.sessions.entry(spec.session_id.clone()).or_default();
                    session.limits = Some(spec.limits);
                    session.running = Some(Running { spec: spec.clone() });
                    state.gone.remove(&spec.sandbox_id);
                    break;
                }
            }
            self.machine.wait(&mut seen, Some(ready_at)).await;
        }
        self.machine.changed();
        Ok(self.created(spec))
    }

    async fn adopt(&self) -> Result<(Vec<Arc<dyn Sandbox>>, Vec<Gone>), SandboxError> {
        let mut state = self.machine.lock();
        let running = state.sessions.values().filter_map(|session| session.running.as_ref());
        let sandboxes = running.map(|running| self.handle(&running.spec)).collect();
        let unreported = std::mem::take(&mut state.unreported);
        let gone = unreported.iter().filter_map(|id| state.gone.get(id).cloned()).collect();
        Ok((sandboxes, gone))
    }

    async fn remove(&self, session_id: &SessionId) -> Result<(), SandboxError> {
        {
            let mut state = self.machine.lock();
            if state.faults.fail_remove {
                return Err(SandboxError::failed("remove session", "the fault switch is on"));
            }
            state.end_sandbox(session_id, Reason::Requested, "the session was removed");
            state.unreported.clear();
            state.sessions.remove(session_id);
        }
        self.machine.changed();
        Ok(())
    }

    async fn kept_session(&self, session_id: &SessionId) -> Result<Option<KeptSession>, SandboxError> {
        let state = self.machine.lock();
        // Ids are ordered by time: the latest is the last.
        let last_end = state.gone.values().rev().find(|gone| gone.session_id == *session_id).cloned();
        let kept = state.sessions.contains_key(session_id);
        Ok(kept.then_some(KeptSession { has_layer: true, last_end }))
    }

    async fn sessions(&self) -> Result<Vec<(SessionId, Option<Arc<dyn Sandbox>>)>, SandboxError> {
        let state = self.machine.lock();
        let entry = |(id, session): (&SessionId, &SimSession)| {
            (id.clone(), session.running.as_ref().map(|running| self.handle(&running.spec)))
        };
        Ok(state.sessions.iter().map(entry).collect())
    }

    async fn ended_execs(&self, session_id: &SessionId) -> Result<Vec<ExecRecord>, SandboxError> {
        let state = self.machine.lock();
        let session = state.sessions.get(session_id).ok_or_else(|| session_not_found(session_id))?;
        Ok(session.execs.iter().map(|exec| exec.record.clone()).collect())
    }

    async fn ended_output(
        &self,
        session_id: &SessionId,
        exec_id: &ExecId,
        from_offset: u64,
    ) -> Result<Box<dyn OutputReader>, SandboxError> {
        let mut state = self.machine.lock();
        let session = state.sessions.get_mut(session_id).ok_or_else(|| session_not_found(session_id))?;
        session.exec(exec_id).ok_or_else(|| exec_not_found(exec_id))?;
        let cut_after = state.faults.cut_output_after_frames;
        drop(state);
        Ok(Box::new(SimReader {
            machine: self.machine.clone(),
            session_id: session_id.clone(),
            exec_id: exec_id.clone(),
            reader: None,
            position: from_offset,
            is_following: false,
            is_done: false,
            cut_after,
        }))
    }
}

fn session_not_found(id: &SessionId) -> SandboxError {
    SandboxError::NotFound(format!("session `{id}`"))
}

fn exec_not_found(id: &ExecId) -> SandboxError {
    SandboxError::NotFound(format!("exec `{id}`"))
}

fn check_spec(spec: &SandboxSpec) -> Result<(), SandboxError> {
    if spec.backend != BackendKind::Sim {
        return Err(SandboxError::Invalid(format!("backend `{}` is not offered here", spec.backend)));
    }
    if spec.image != "host" {
        return Err(SandboxError::Invalid(format!(
            "image `{}` is not known: this version has `host`",
            spec.image
        )));
    }
    spec.limits.validate().map(drop).map_err(|error| SandboxError::Invalid(error.to_string()))
}

struct SimSandbox {
    machine: SimMachine,
    spec: SandboxSpec,
}

#[async_trait]
impl Sandbox for SimSandbox {
    fn spec(&self) -> &SandboxSpec {
        &self.spec
    }

    async fn start_exec(
        &self,
        exec_id: &ExecId,
        request_id: &str,
        spec: &ExecSpec,
    ) -> Result<ExecRecord, SandboxError> {
        spec.validate().map_err(|error| SandboxError::Invalid(error.to_string()))?;
        let record = {
            let mut state = self.machine.lock();
            let (now, unix_ms) = (state.now(), state.unix_ms());
            let session = state.running(&self.spec)?;
            if let Some(first) = session.execs.iter().find(|exec| exec.record.request_id == request_id) {
                return if first.record.spec == *spec {
                    Ok(first.record.clone())
                } else {
                    Err(SandboxError::Conflict(format!("request id `{request_id}`")))
                };
            }
            if session.exec(exec_id).is_some() {
                return Err(SandboxError::Conflict(format!("exec `{exec_id}`")));
            }
            let pid = u32::try_from(session.execs.len()).unwrap_or(u32::MAX - 2) + 2;
            let running = session.execs.iter().filter(|exec| !exec.has_ended()).count();
            let parsed = program::parse(&spec.argv);
            let record = ExecRecord {
                exec_id: exec_id.clone(),
                request_id: request_id.to_owned(),
                spec: spec.clone(),
                pid: if parsed.is_ok() { pid } else { 0 },
                started_unix_ms: unix_ms,
                exit: None,
            };
            session.execs.push(SimExec::new(record, parsed.clone().unwrap_or_default(), now));
            state.on_exec(&self.spec, exec_id, |exec, world| match parsed {
                Ok(_) if running >= usize::try_from(self.spec.limits.pids).unwrap_or(usize::MAX) => {
                    exec.turn_back(world);
                }
                Ok(_) => {}
                Err(ParseError::Unknown(name)) => {
                    let message = format!("`{name}` was not found");
                    exec.end(ExitReason::NotStarted, 127, None, message, world);
                }
                Err(ParseError::Usage(line)) => {
                    exec.end(ExitReason::Exited, 2, None, format!("`{line}` means nothing here"), world);
                }
            })?;
            state.on_exec(&self.spec, exec_id, |exec, _| exec.record.clone())?
        };
        self.machine.changed();
        Ok(record)
    }

    async fn exec(&self, exec_id: &ExecId) -> Result<ExecRecord, SandboxError> {
        self.machine.lock().on_exec(&self.spec, exec_id, |exec, _| exec.record.clone())
    }

    async fn execs(&self) -> Result<Vec<ExecRecord>, SandboxError> {
        let mut state = self.machine.lock();
        Ok(state.running(&self.spec)?.execs.iter().map(|exec| exec.record.clone()).collect())
    }

    async fn write_stdin(
        &self,
        exec_id: &ExecId,
        offset: u64,
        data: &[u8],
        eof: bool,
    ) -> Result<u64, SandboxError> {
        let end = offset.saturating_add(u64::try_from(data.len()).unwrap_or(u64::MAX));
        let mut seen = self.machine.watch();
        loop {
            let next = {
                let mut state = self.machine.lock();
                let taken =
                    state.on_exec(&self.spec, exec_id, |exec, _| exec.take_input(offset, data, eof))?;
                taken.map_err(SandboxError::Invalid)?
            };
            self.machine.changed();
            if next >= end {
                return Ok(next);
            }
            seen.mark_unchanged();
            // What was taken may have been read by the program at once.
            if self.machine.lock().on_exec(&self.spec, exec_id, |exec, _| exec.can_take_input())? {
                continue;
            }
            self.machine.wait(&mut seen, None).await;
        }
    }

    async fn type_input(&self, exec_id: &ExecId, data: &[u8], end: bool) -> Result<(), SandboxError> {
        let mut data = data.to_vec();
        if end {
            data.push(END_OF_INPUT);
        }
        let mut seen = self.machine.watch();
        loop {
            let taken = self
                .machine
                .lock()
                .on_exec(&self.spec, exec_id, |exec, world| exec.type_input(&data, world))?;
            data.drain(..taken.map_err(SandboxError::Invalid)?);
            self.machine.changed();
            if data.is_empty() {
                return Ok(());
            }
            seen.mark_unchanged();
            if self.machine.lock().on_exec(&self.spec, exec_id, |exec, _| exec.can_take_input())? {
                continue;
            }
            self.machine.wait(&mut seen, None).await;
        }
    }

    async fn resize(&self, exec_id: &ExecId, size: TerminalSize) -> Result<(), SandboxError> {
        let resized = self.machine.lock().on_exec(&self.spec, exec_id, |exec, _| exec.resize(size))?;
        resized.map_err(SandboxError::Invalid)
    }

    async fn signal(&self, exec_id: &ExecId, signal: i32) -> Result<(), SandboxError> {
        if !(1..=64).contains(&signal) {
            return Err(SandboxError::Invalid(format!("{signal} is no signal")));
        }
        // What a program that handles none survives: CHLD, CONT, URG, WINCH.
        let is_ignored = [17, 18, 23, 28].contains(&signal);
        self.machine.lock().on_exec(&self.spec, exec_id, |exec, world| {
            if !is_ignored {
                exec.end_by_signal(signal, world);
            }
        })?;
        self.machine.changed();
        Ok(())
    }

    async fn wait_exec(&self, exec_id: &ExecId, wait: Duration) -> Result<ExecRecord, SandboxError> {
        let mut seen = self.machine.watch();
        let deadline = self.machine.lock().now().saturating_add(wait);
        loop {
            {
                let mut state = self.machine.lock();
                let record = state.on_exec(&self.spec, exec_id, |exec, _| exec.record.clone())?;
                if record.exit.is_some() || state.now() >= deadline {
                    return Ok(record);
                }
            }
            self.machine.wait(&mut seen, Some(deadline)).await;
        }
    }

    async fn read_output(
        &self,
        exec_id: &ExecId,
        from_offset: u64,
        no_follow: bool,
    ) -> Result<Box<dyn OutputReader>, SandboxError> {
        let mut state = self.machine.lock();
        state.next_reader += 1;
        let reader = state.next_reader;
        let cut_after = state.faults.cut_output_after_frames;
        state.on_exec(&self.spec, exec_id, |exec, _| {
            if !no_follow {
                exec.attach(reader, from_offset);
            }
        })?;
        drop(state);
        Ok(Box::new(SimReader {
            machine: self.machine.clone(),
            session_id: self.spec.session_id.clone(),
            exec_id: exec_id.clone(),
            reader: Some(reader),
            position: from_offset,
            is_following: !no_follow,
            is_done: false,
            cut_after,
        }))
    }

    async fn stop(&self, _grace: Duration) -> Result<(), SandboxError> {
        {
            let mut state = self.machine.lock();
            if state.faults.fail_stop {
                return Err(SandboxError::failed("stop sandbox", "the fault switch is on"));
            }
            if state.running(&self.spec).is_ok() {
                state.end_sandbox(&self.spec.session_id, Reason::Requested, "stopped as asked");
                state.unreported.retain(|id| *id != self.spec.sandbox_id);
            }
        }
        self.machine.changed();
        Ok(())
    }

    async fn wait_gone(&self) -> Gone {
        let mut seen = self.machine.watch();
        loop {
            {
                let mut state = self.machine.lock();
                if let Some(gone) = state.gone.get(&self.spec.sandbox_id).cloned() {
                    state.unreported.retain(|id| *id != self.spec.sandbox_id);
                    return gone;
                }
            }
            self.machine.wait(&mut seen, None).await;
        }
    }
}

struct SimReader {
    machine: SimMachine,
    session_id: SessionId,
    exec_id: ExecId,
    /// Set while the program has to wait for this reader.
    reader: Option<u64>,
    position: u64,
    is_following: bool,
    is_done: bool,
    cut_after: Option<u64>,
}

#[async_trait]
impl OutputReader for SimReader {
    async fn next(&mut self) -> Result<Option<OutputFrame>, SandboxError> {
        if self.is_done {
            return Ok(None);
        }
        match &mut self.cut_after {
            Some(0) => return Err(SandboxError::failed("read output", "the fault switch cut the stream")),
            Some(left) => *left -= 1,
            None => {}
        }
        let mut seen = self.machine.watch();
        loop {
            let frame = {
                let mut state = self.machine.lock();
                let (now, bound) = (state.now(), state.spool_max_bytes);
                let session = state
                    .sessions
                    .get_mut(&self.session_id)
                    .ok_or_else(|| session_not_found(&self.session_id))?;
                let index = session.execs.iter().position(|exec| exec.record.exec_id == self.exec_id);
                let (reader, position, is_following) = (self.reader, self.position, self.is_following);
                let is_running = session.running.is_some();
                index
                    .and_then(|index| {
                        session.with_exec(index, now, bound, |exec, world| {
                            let frame = exec.frame(reader.unwrap_or(0), position, is_following);
                            if is_running {
                                exec.pump(world);
                            }
                            frame
                        })
                    })
                    .ok_or_else(|| exec_not_found(&self.exec_id))?
            };
            if let Some(frame) = frame {
                match &frame {
                    OutputFrame::Data { offset, data, .. } => {
                        self.position = offset + u64::try_from(data.len()).unwrap_or(u64::MAX);
                    }
                    OutputFrame::Gap { to, .. } => self.position = *to,
                    OutputFrame::Exit(_) | OutputFrame::End { .. } => self.is_done = true,
                }
                // The program may have room to go on, and whoever waits for it should know.
                self.machine.changed();
                return Ok(Some(frame));
            }
            self.machine.wait(&mut seen, None).await;
        }
    }
}

impl Drop for SimReader {
    fn drop(&mut self) {
        let Some(reader) = self.reader else { return };
        {
            let mut state = self.machine.lock();
            let (now, bound) = (state.now(), state.spool_max_bytes);
            if let Some(session) = state.sessions.get_mut(&self.session_id)
                && let Some(index) = session.execs.iter().position(|exec| exec.record.exec_id == self.exec_id)
            {
                session.with_exec(index, now, bound, |exec, world| {
                    exec.detach(reader);
                    exec.pump(world);
                });
            }
        }
        self.machine.changed();
    }
}
