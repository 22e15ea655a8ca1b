//! A backend in memory whose every step a test can hold: what stands below a real host agent here.
//!
//! Its programs are named by `argv[0]`: `count N` prints N bytes, `hold` runs until a signal, `cat` prints what
//! it reads. Output is made only when a reader asks, so that what was asked for can be counted.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use cloister_sandbox::backend::{
    Backend, Created, Gone, KeptSession, OutputReader, Sandbox, SandboxError, SandboxSpec, StepTiming,
};
use cloister_types::exec::TerminalSize;
use cloister_types::exec::{ExecRecord, OUTPUT_FRAME_MAX_BYTES};
use cloister_types::session::Reason;
use cloister_types::{
    BackendKind, Capability, ExecId, ExecSpec, Exit, ExitReason, IsolationFact, OutputFrame, OutputStream,
    SessionId,
};
use tokio::sync::{Semaphore, watch};

/// The backend; lives on when a host agent ends, as sandboxes do.
pub(crate) struct HeldBackend {
    sessions: Mutex<BTreeMap<SessionId, SessionRecord>>,
    dead: Mutex<Vec<Gone>>,
    /// Calls that changed something, in order.
    pub(crate) calls: Mutex<Vec<String>>,
    /// Sessions whose creation waits for a permit.
    pub(crate) gates: Mutex<BTreeMap<SessionId, Arc<Semaphore>>>,
    /// Makes every probe fail.
    pub(crate) broken: AtomicBool,
    kind: BackendKind,
}

struct SessionRecord {
    sandbox: Option<Arc<HeldSandbox>>,
    execs: Arc<Execs>,
}

impl SessionRecord {
    fn running(&self) -> Option<Arc<HeldSandbox>> {
        self.sandbox.clone().filter(|sandbox| sandbox.alive().is_ok())
    }
}

/// The execs of one session, which outlive its sandboxes.
#[derive(Default)]
pub(crate) struct Execs {
    all: Mutex<Vec<Arc<Exec>>>,
}

/// One program.
pub(crate) struct Exec {
    record: Mutex<ExecRecord>,
    output: watch::Sender<Output>,
    /// Frames that a reader asked for and got.
    pub(crate) asked: AtomicU64,
    /// Readers that exist now.
    pub(crate) readers: AtomicU64,
}

#[derive(Default)]
struct Output {
    /// Bytes that are there to be read; their values follow from the offset.
    bytes: Vec<u8>,
    counted: u64,
    stdin: u64,
    stdin_closed: bool,
    exit: Option<Exit>,
}

impl HeldBackend {
    pub(crate) fn new(kind: BackendKind) -> Arc<Self> {
        Arc::new(Self {
            sessions: Mutex::default(),
            dead: Mutex::default(),
            calls: Mutex::default(),
            gates: Mutex::default(),
            broken: AtomicBool::new(false),
            kind,
        })
    }

    /// Makes the creation of this session wait until the returned semaphore has a permit.
    pub(crate) fn hold(&self, session_id: &SessionId) -> Arc<Semaphore> {
        let gate = Arc::new(Semaphore::new(0));
        self.gates.lock().unwrap().insert(session_id.clone(), Arc::clone(&gate));
        gate
    }

    /// Ends a sandbox as the kernel would.
    pub(crate) fn kill(&self, session_id: &SessionId, reason: Reason) {
        let sandbox = {
            let mut sessions = self.sessions.lock().unwrap();
            sessions.get_mut(session_id).and_then(|record| record.sandbox.take()).expect("a sandbox runs")
        };
        sandbox.end(reason);
    }

    /// Ends a sandbox while no agent runs: the next adoption reports it.
    pub(crate) fn kill_unseen(&self, session_id: &SessionId) {
        let spec = self.sandbox(session_id).expect("a sandbox runs").spec.clone();
        self.kill(session_id, Reason::HostRebooted);
        self.dead.lock().unwrap().push(gone(&spec, Reason::HostRebooted));
    }

    /// Returns the running sandbox of a session.
    pub(crate) fn sandbox(&self, session_id: &SessionId) -> Option<Arc<HeldSandbox>> {
        self.sessions.lock().unwrap().get(session_id).and_then(SessionRecord::running)
    }

    /// Returns an exec of a session.
    pub(crate) fn exec(&self, session_id: &SessionId, exec_id: &ExecId) -> Arc<Exec> {
        self.sessions.lock().unwrap()[session_id].execs.find(exec_id).expect("an exec of this id")
    }

    pub(crate) fn called(&self) -> Vec<String> {
        self.calls.lock().unwrap().clone()
    }

    fn call(&self, text: String) {
        self.calls.lock().unwrap().push(text);
    }
}

fn gone(spec: &SandboxSpec, reason: Reason) -> Gone {
    Gone {
        session_id: spec.session_id.clone(),
        sandbox_id: spec.sandbox_id.clone(),
        reason,
        message: format!("ended: {reason}"),
    }
}

impl Execs {
    fn find(&self, exec_id: &ExecId) -> Result<Arc<Exec>, SandboxError> {
        let all = self.all.lock().unwrap();
        let found = all.iter().find(|exec| exec.record.lock().unwrap().exec_id == *exec_id);
        found.cloned().ok_or_else(|| SandboxError::NotFound(format!("exec `{exec_id}`")))
    }

    fn on_terminal(&self, exec_id: &ExecId) -> Result<Arc<Exec>, SandboxError> {
        let exec = self.find(exec_id)?;
        let has_terminal = exec.record.lock().unwrap().spec.terminal.is_some();
        has_terminal.then_some(exec).ok_or_else(|| SandboxError::Invalid("no terminal".to_owned()))
    }
}

#[async_trait]
impl Backend for HeldBackend {
    fn kinds(&self) -> Vec<BackendKind> {
        vec![self.kind]
    }

    async fn probe(&self, _kind: BackendKind) -> Vec<Capability> {
        let name = format!("backend.{}", self.kind);
        if self.broken.load(Ordering::SeqCst) {
            return vec![Capability::failed(name, "user namespaces are off", "set user.max_user_namespaces")];
        }
        vec![Capability::ok(name, "a command ran")]
    }

    async fn create(&self, spec: &SandboxSpec) -> Result<Created, SandboxError> {
        self.call(format!("create {}", spec.sandbox_id));
        let gate = self.gates.lock().unwrap().get(&spec.session_id).cloned();
        if let Some(gate) = gate {
            gate.acquire().await.expect("never closed").forget();
        }
        let mut sessions = self.sessions.lock().unwrap();
        let record = sessions
            .entry(spec.session_id.clone())
            .or_insert_with(|| SessionRecord { sandbox: None, execs: Arc::default() });
        record.sandbox.take_if(|sandbox| sandbox.alive().is_err());
        let sandbox = match &record.sandbox {
            Some(sandbox) if sandbox.spec == *spec => Arc::clone(sandbox),
            Some(sandbox) => {
                return Err(SandboxError::Conflict(format!("sandbox `{}`", sandbox.spec.sandbox_id)));
            }
            None => Arc::new(HeldSandbox {
                spec: spec.clone(),
                execs: Arc::clone(&record.execs),
                gone: watch::Sender::new(None),
            }),
        };
        record.sandbox = Some(Arc::clone(&sandbox));
        Ok(Created {
            sandbox,
            facts: vec![IsolationFact { name: "kernel".to_owned(), value: "none".to_owned() }],
            timings: vec![StepTiming { step: "memory".to_owned(), elapsed: Duration::from_micros(7) }],
        })
    }

    async fn adopt(&self) -> Result<(Vec<Arc<dyn Sandbox>>, Vec<Gone>), SandboxError> {
        let sessions = self.sessions.lock().unwrap();
        let running = sessions.values().filter_map(SessionRecord::running);
        let dead = std::mem::take(&mut *self.dead.lock().unwrap());
        Ok((running.map(|sandbox| sandbox as Arc<dyn Sandbox>).collect(), dead))
    }

    async fn remove(&self, session_id: &SessionId) -> Result<(), SandboxError> {
        self.call(format!("remove {session_id}"));
        let record = self.sessions.lock().unwrap().remove(session_id);
        if let Some(sandbox) = record.and_then(|record| record.sandbox) {
            sandbox.end(Reason::Requested);
        }
        Ok(())
    }

    async fn kept_session(&self, session_id: &SessionId) -> Result<Option<KeptSession>, SandboxError> {
        let sessions = self.sessions.lock().unwrap();
        let dead = self.dead.lock().unwrap();
        let last_end = dead.iter().rev().find(|gone| gone.session_id == *session_id).cloned();
        Ok(sessions.get(session_id).map(|_| KeptSession { has_layer: true, last_end }))
    }

    async fn sessions(&self) -> Result<Vec<(SessionId, Option<Arc<dyn Sandbox>>)>, SandboxError> {
        let sessions = self.sessions.lock().unwrap();
        let all = sessions.iter().map(|(session_id, record)| {
            (session_id.clone(), record.running().map(|sandbox| sandbox as Arc<dyn Sandbox>))
        });
        Ok(all.collect())
    }

    async fn ended_execs(&self, session_id: &SessionId) -> Result<Vec<ExecRecord>, SandboxError> {
        let sessions = self.sessions.lock().unwrap();
        let record = sessions.get(session_id).ok_or_else(|| SandboxError::NotFound("session".to_owned()))?;
        Ok(record.execs.all.lock().unwrap().iter().map(|exec| exec.record.lock().unwrap().clone()).collect())
    }

    async fn ended_output(
        &self,
        session_id: &SessionId,
        exec_id: &ExecId,
        from_offset: u64,
    ) -> Result<Box<dyn OutputReader>, SandboxError> {
        let sessions = self.sessions.lock().unwrap();
        let record = sessions.get(session_id).ok_or_else(|| SandboxError::NotFound("session".to_owned()))?;
        Ok(Box::new(Reader::new(record.execs.find(exec_id)?, from_offset, false, None)))
    }
}

/// One sandbox.
pub(crate) struct HeldSandbox {
    spec: SandboxSpec,
    execs: Arc<Execs>,
    gone: watch::Sender<Option<Reason>>,
}

impl HeldSandbox {
    fn end(&self, reason: Reason) {
        for exec in self.execs.all.lock().unwrap().iter() {
            exec.exit(ExitReason::SandboxGone, 137);
        }
        self.gone.send_replace(Some(reason));
    }

    fn alive(&self) -> Result<(), SandboxError> {
        match *self.gone.borrow() {
            None => Ok(()),
            Some(_) => Err(SandboxError::NotRunning(self.spec.sandbox_id.clone())),
        }
    }
}

impl Exec {
    fn exit(&self, reason: ExitReason, code: i32) {
        self.output.send_modify(|output| {
            if output.exit.is_none() {
                let exit = Exit {
                    reason,
                    code,
                    signal: None,
                    message: String::new(),
                    output_bytes: output.counted + u64::try_from(output.bytes.len()).unwrap(),
                    exited_unix_ms: 1,
                    pids_limit_hit: false,
                    disk_full: false,
                    memory_limit_hit: false,
                    output_lost: false,
                    disk_error: false,
                };
                output.exit = Some(exit.clone());
                self.record.lock().unwrap().exit = Some(exit);
            }
        });
    }
}

#[async_trait]
impl Sandbox for HeldSandbox {
    fn spec(&self) -> &SandboxSpec {
        &self.spec
    }

    async fn start_exec(
        &self,
        exec_id: &ExecId,
        request_id: &str,
        spec: &ExecSpec,
    ) -> Result<ExecRecord, SandboxError> {
        self.alive()?;
        let mut all = self.execs.all.lock().unwrap();
        for exec in all.iter() {
            let record = exec.record.lock().unwrap();
            if record.request_id == request_id {
                let same = record.spec == *spec;
                return if same {
                    Ok(record.clone())
                } else {
                    Err(SandboxError::Conflict("request".to_owned()))
                };
            }
        }
        let record = ExecRecord {
            exec_id: exec_id.clone(),
            request_id: request_id.to_owned(),
            spec: spec.clone(),
            pid: 7,
            started_unix_ms: 1,
            exit: None,
        };
        let exec = Arc::new(Exec {
            record: Mutex::new(record.clone()),
            output: watch::Sender::new(Output { stdin_closed: !spec.has_stdin(), ..Output::default() }),
            asked: AtomicU64::new(0),
            readers: AtomicU64::new(0),
        });
        if spec.argv[0] == "count" {
            exec.output.send_modify(|output| output.counted = spec.argv[1].parse().unwrap());
            exec.exit(ExitReason::Exited, 0);
        }
        all.push(exec);
        Ok(record)
    }

    async fn exec(&self, exec_id: &ExecId) -> Result<ExecRecord, SandboxError> {
        self.alive()?;
        Ok(self.execs.find(exec_id)?.record.lock().unwrap().clone())
    }

    async fn execs(&self) -> Result<Vec<ExecRecord>, SandboxError> {
        self.alive()?;
        Ok(self.execs.all.lock().unwrap().iter().map(|exec| exec.record.lock().unwrap().clone()).collect())
    }

    async fn write_stdin(
        &self,
        exec_id: &ExecId,
        offset: u64,
        data: &[u8],
        eof: bool,
    ) -> Result<u64, SandboxError> {
        self.alive()?;
        let exec = self.execs.find(exec_id)?;
        let program = exec.record.lock().unwrap().spec.argv[0].clone();
        if program == "hold" && !data.is_empty() {
            // It never reads.
            std::future::pending::<()>().await;
        }
        let mut result = Ok(0);
        exec.output.send_modify(|output| {
            result = if output.stdin_closed {
                Err(SandboxError::Invalid("standard input is closed".to_owned()))
            } else if offset > output.stdin {
                Err(SandboxError::Invalid(format!("offset {offset} leaves a hole")))
            } else {
                let skip = usize::try_from(output.stdin - offset).unwrap().min(data.len());
                output.bytes.extend_from_slice(&data[skip..]);
                output.stdin += u64::try_from(data.len() - skip).unwrap();
                output.stdin_closed = eof;
                Ok(output.stdin)
            };
        });
        if eof && result.is_ok() {
            exec.exit(ExitReason::Exited, 0);
        }
        result
    }

    async fn type_input(&self, exec_id: &ExecId, data: &[u8], end: bool) -> Result<(), SandboxError> {
        self.alive()?;
        let exec = self.execs.on_terminal(exec_id)?;
        exec.output.send_modify(|output| output.bytes.extend_from_slice(data));
        if end {
            exec.exit(ExitReason::Exited, 0);
        }
        Ok(())
    }

    async fn resize(&self, exec_id: &ExecId, size: TerminalSize) -> Result<(), SandboxError> {
        self.alive()?;
        let exec = self.execs.on_terminal(exec_id)?;
        let seen = format!("{}x{}\n", size.columns, size.rows);
        exec.output.send_modify(|output| output.bytes.extend_from_slice(seen.as_bytes()));
        Ok(())
    }

    async fn signal(&self, exec_id: &ExecId, signal: i32) -> Result<(), SandboxError> {
        self.alive()?;
        self.execs.find(exec_id)?.exit(ExitReason::Signaled, 128 + signal);
        Ok(())
    }

    async fn wait_exec(&self, exec_id: &ExecId, wait: Duration) -> Result<ExecRecord, SandboxError> {
        self.alive()?;
        let exec = self.execs.find(exec_id)?;
        let mut output = exec.output.subscribe();
        let _ = tokio::time::timeout(wait, output.wait_for(|output| output.exit.is_some())).await;
        Ok(exec.record.lock().unwrap().clone())
    }

    async fn read_output(
        &self,
        exec_id: &ExecId,
        from_offset: u64,
        no_follow: bool,
    ) -> Result<Box<dyn OutputReader>, SandboxError> {
        self.alive()?;
        let exec = self.execs.find(exec_id)?;
        Ok(Box::new(Reader::new(exec, from_offset, no_follow, Some(self.gone.subscribe()))))
    }

    async fn stop(&self, _grace: Duration) -> Result<(), SandboxError> {
        self.end(Reason::Requested);
        Ok(())
    }

    async fn wait_gone(&self) -> Gone {
        let reason =
            self.gone.subscribe().wait_for(Option::is_some).await.expect("the sender is ours").unwrap();
        gone(&self.spec, reason)
    }
}

struct Reader {
    exec: Arc<Exec>,
    offset: u64,
    no_follow: bool,
    /// A reader of a live sandbox is cut when it ends, like a socket.
    gone: Option<watch::Receiver<Option<Reason>>>,
    ended: bool,
}

impl Reader {
    fn new(
        exec: Arc<Exec>,
        offset: u64,
        no_follow: bool,
        gone: Option<watch::Receiver<Option<Reason>>>,
    ) -> Self {
        exec.readers.fetch_add(1, Ordering::SeqCst);
        Self { exec, offset, no_follow, gone, ended: false }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.exec.readers.fetch_sub(1, Ordering::SeqCst);
    }
}

#[async_trait]
impl OutputReader for Reader {
    async fn next(&mut self) -> Result<Option<OutputFrame>, SandboxError> {
        if self.ended {
            return Ok(None);
        }
        let mut output = self.exec.output.subscribe();
        loop {
            if self.gone.as_ref().is_some_and(|gone| gone.borrow().is_some()) {
                return Err(SandboxError::failed("read output", "connection reset"));
            }
            let frame = {
                let output = output.borrow_and_update();
                let most = u64::try_from(OUTPUT_FRAME_MAX_BYTES).unwrap();
                let typed = u64::try_from(output.bytes.len()).unwrap();
                let data = if self.offset < output.counted {
                    vec![b'x'; usize::try_from(most.min(output.counted - self.offset)).unwrap()]
                } else if self.offset < output.counted + typed {
                    output.bytes[usize::try_from(self.offset - output.counted).unwrap()..].to_vec()
                } else {
                    Vec::new()
                };
                match (&output.exit, data.is_empty()) {
                    (_, false) => {
                        Some(OutputFrame::Data { stream: OutputStream::Stdout, offset: self.offset, data })
                    }
                    (Some(exit), true) => Some(OutputFrame::Exit(exit.clone())),
                    (None, true) if self.no_follow => Some(OutputFrame::End { next_offset: self.offset }),
                    (None, true) => None,
                }
            };
            if let Some(frame) = frame {
                match &frame {
                    OutputFrame::Data { data, .. } => {
                        self.exec.asked.fetch_add(1, Ordering::SeqCst);
                        self.offset += u64::try_from(data.len()).unwrap();
                    }
                    _ => self.ended = true,
                }
                return Ok(Some(frame));
            }
            match &mut self.gone {
                Some(gone) => {
                    tokio::select! {
                        _ = output.changed() => {}
                        _ = gone.changed() => {}
                    }
                }
                None => output.changed().await.map_err(|error| SandboxError::failed("wait", error))?,
            }
        }
    }
}
