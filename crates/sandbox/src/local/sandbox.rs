//! The handle of one running sandbox: requests go to its shim, the end is waited for and cleaned up after.

use std::io::Cursor;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use cloister_guest::client::{self, Client, ClientError};
use cloister_guest::shim::config::SandboxExitRecord;
use cloister_guest::spool::{self, EndedReader};
use cloister_types::exec::{ExecRecord, TerminalSize};
use cloister_types::{ChannelTarget, ExecId, ExecSpec, IsolationFact, OutputFrame};
use tokio::io::AsyncReadExt as _;

use super::reap;
use super::{Inner, blocking, chain, open_output, read_exec};
use crate::backend::{Channel, Created, Gone, OutputReader, Sandbox, SandboxError, SandboxSpec, StepTiming};
use crate::fault::POINTS;
use crate::intent::Intent;

/// How long a shim may take for an answer that does not depend on what the program does.
const ANSWER_DEADLINE: Duration = Duration::from_secs(10);

pub(super) struct LocalSandbox {
    inner: Arc<Inner>,
    spec: SandboxSpec,
    intent: Intent,
    client: Client,
    end: Arc<End>,
}

/// How a sandbox ends, shared with the thread that takes it down.
#[derive(Default)]
struct End {
    /// Somebody asked for it.
    was_requested: AtomicBool,
    /// What the shim said itself: a full disk may have kept it from writing that down.
    told: OnceLock<SandboxExitRecord>,
    /// Held while it is taken down.
    releasing: Mutex<()>,
    /// Set when nothing is left.
    gone: OnceLock<Gone>,
}

impl LocalSandbox {
    pub(super) fn new(inner: Arc<Inner>, intent: Intent) -> Self {
        let client = Client::new(&intent.socket, intent.sandbox_id.as_str(), ANSWER_DEADLINE);
        Self { inner, spec: intent.spec(), intent, client, end: Arc::default() }
    }

    /// Returns whether the sandbox was made from `spec`.
    pub(super) fn is_for(&self, spec: &SandboxSpec) -> bool {
        self.spec == *spec
    }

    /// Returns whether everything of it has been taken down.
    pub(super) fn is_released(&self) -> bool {
        self.end.gone.get().is_some()
    }

    /// Returns whether its shim lives.
    pub(super) fn is_alive(&self) -> bool {
        !self.is_released() && reap::is_shim_alive(&self.inner.paths().sandbox_dir(&self.intent.sandbox_id))
    }

    /// Returns whether its shim answers.
    pub(super) async fn answers(&self) -> Result<(), ClientError> {
        self.client.sandbox().await.map(drop)
    }

    /// Returns what its creation returned.
    pub(super) async fn created(self: Arc<Self>) -> Result<Created, SandboxError> {
        let report = self.client.sandbox().await.map_err(|error| self.error(error))?;
        let facts = report.facts.into_iter().map(|(name, value)| IsolationFact { name, value }).collect();
        let timings =
            report.timings.into_iter().map(|(step, elapsed)| StepTiming { step, elapsed }).collect();
        Ok(Created { sandbox: self, facts, timings })
    }

    /// Takes down what is left of it and returns how it ended. It is done once, whoever asks and goes away meanwhile:
    /// the work runs to its end on its thread, and a second caller gets what the first one found.
    pub(super) async fn release(&self) -> Result<Gone, SandboxError> {
        if let Some(gone) = self.end.gone.get() {
            return Ok(gone.clone());
        }
        let inner = Arc::clone(&self.inner);
        let end = Arc::clone(&self.end);
        let intent = self.intent.clone();
        blocking("release sandbox", move || {
            let _alone = end.releasing.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(gone) = end.gone.get() {
                return Ok(gone.clone());
            }
            let was_requested = end.was_requested.load(Ordering::Acquire);
            let gone = reap::reap(inner.paths(), &intent, &inner.boot_id, was_requested, end.told.get())?;
            inner.forget(&intent.spec());
            Ok(end.gone.get_or_init(|| gone).clone())
        })
        .await
    }

    fn error(&self, error: ClientError) -> SandboxError {
        match error {
            ClientError::Gone(_) | ClientError::NotRunning(_) => {
                SandboxError::NotRunning(self.spec.sandbox_id.clone())
            }
            ClientError::NotFound(what) => SandboxError::NotFound(what),
            ClientError::Invalid(message) => SandboxError::Invalid(message),
            ClientError::Conflict(message) => SandboxError::Conflict(message),
            ClientError::Exhausted(what) => SandboxError::Exhausted(what),
            // A connection that breaks because the sandbox ended is told by that.
            error if !self.is_alive() => {
                tracing::debug!(sandbox_id = %self.spec.sandbox_id, error = %chain(&error), "the shim went away");
                SandboxError::NotRunning(self.spec.sandbox_id.clone())
            }
            error => SandboxError::failed("ask the shim", error),
        }
    }

    fn exec_dir(&self, exec_id: &ExecId) -> std::path::PathBuf {
        self.inner.paths().exec_dir(&self.spec.session_id, exec_id)
    }
}

#[async_trait]
impl Sandbox for LocalSandbox {
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
        self.client.start_exec(exec_id, request_id, spec).await.map_err(|error| self.error(error))
    }

    async fn exec(&self, exec_id: &ExecId) -> Result<ExecRecord, SandboxError> {
        match self.client.exec(exec_id).await {
            // It may have run in an earlier sandbox of the session.
            Err(ClientError::NotFound(_)) => {
                let (directory, exec_id) = (self.exec_dir(exec_id), exec_id.clone());
                blocking("read exec", move || read_exec(&directory, &exec_id)).await
            }
            other => other.map_err(|error| self.error(error)),
        }
    }

    async fn execs(&self) -> Result<Vec<ExecRecord>, SandboxError> {
        let live = self.client.execs().await.map_err(|error| self.error(error))?;
        let directory = self.inner.paths().execs_dir(&self.spec.session_id);
        let kept = blocking("list execs", move || {
            spool::read_records(&directory).map_err(|error| SandboxError::failed("list execs", error))
        })
        .await?;
        let is_live = |record: &ExecRecord| live.iter().any(|exec| exec.exec_id == record.exec_id);
        let mut all: Vec<ExecRecord> =
            kept.into_iter().filter(|record| record.exit.is_some() && !is_live(record)).collect();
        all.extend(live);
        all.sort_by(|a, b| (a.started_unix_ms, &a.exec_id).cmp(&(b.started_unix_ms, &b.exec_id)));
        Ok(all)
    }

    async fn write_stdin(
        &self,
        exec_id: &ExecId,
        offset: u64,
        data: &[u8],
        eof: bool,
    ) -> Result<u64, SandboxError> {
        self.client.write_stdin(exec_id, offset, data, eof).await.map_err(|error| self.error(error))
    }

    async fn type_input(&self, exec_id: &ExecId, data: &[u8], end: bool) -> Result<(), SandboxError> {
        self.client.type_input(exec_id, data, end).await.map_err(|error| self.error(error))
    }

    async fn resize(&self, exec_id: &ExecId, size: TerminalSize) -> Result<(), SandboxError> {
        self.client.resize(exec_id, size).await.map_err(|error| self.error(error))
    }

    async fn signal(&self, exec_id: &ExecId, signal: i32) -> Result<(), SandboxError> {
        self.client.signal(exec_id, signal).await.map_err(|error| self.error(error))
    }

    async fn wait_exec(&self, exec_id: &ExecId, wait: Duration) -> Result<ExecRecord, SandboxError> {
        match self.client.wait_exec(exec_id, wait).await {
            Err(ClientError::NotFound(_)) => self.exec(exec_id).await,
            other => other.map_err(|error| self.error(error)),
        }
    }

    async fn read_output(
        &self,
        exec_id: &ExecId,
        from_offset: u64,
        no_follow: bool,
    ) -> Result<Box<dyn OutputReader>, SandboxError> {
        match self.client.read_output(exec_id, from_offset, no_follow).await {
            Ok(reader) => Ok(Box::new(LiveOutput(reader))),
            Err(ClientError::NotFound(_)) => {
                Ok(Box::new(open_output(self.exec_dir(exec_id), exec_id, from_offset).await?))
            }
            Err(error) => Err(self.error(error)),
        }
    }

    async fn start_and_read(
        &self,
        exec_id: &ExecId,
        request_id: &str,
        spec: &ExecSpec,
    ) -> Result<(ExecRecord, Box<dyn OutputReader>), SandboxError> {
        spec.validate().map_err(|error| SandboxError::Invalid(error.to_string()))?;
        match self.client.start_and_read(exec_id, request_id, spec).await {
            Ok((record, reader)) => Ok((record, Box::new(LiveOutput(reader)))),
            Err(error) => Err(self.error(error)),
        }
    }

    async fn open_channel(&self, target: &ChannelTarget) -> Result<Channel, SandboxError> {
        let directory = self.inner.paths().sandbox_dir(&self.spec.sandbox_id);
        let opened = cloister_guest::channel::open(&directory, target, ANSWER_DEADLINE).await;
        let opened = opened.map_err(|error| match (error, target) {
            (ClientError::NotFound(_), ChannelTarget::Port(port)) => SandboxError::PortClosed(*port),
            (error, _) => self.error(error),
        })?;
        let (read, write) = opened.stream.into_split();
        Ok(Box::new(tokio::io::join(Cursor::new(opened.early).chain(read), write)))
    }

    async fn stop(&self, grace: Duration) -> Result<(), SandboxError> {
        self.end.was_requested.store(true, Ordering::Release);
        if !self.is_released() {
            match self.client.stop(grace).await {
                Ok(record) => drop(self.end.told.set(record)),
                Err(error) if error.is_gone() => {}
                // What does not stop when asked is killed with its control groups below.
                Err(error) => {
                    tracing::warn!(sandbox_id = %self.spec.sandbox_id, error = %chain(&error), "the sandbox did not stop by itself");
                }
            }
        }
        POINTS.reach("sandbox_after_stop_answer");
        self.release().await.map(drop)
    }

    async fn wait_gone(&self) -> Gone {
        let mut pause = Duration::from_millis(20);
        loop {
            if let Some(gone) = self.end.gone.get() {
                return gone.clone();
            }
            let has_ended = match self.client.watch().await {
                Ok((_, mut watch)) => {
                    let exit = watch.wait().await;
                    pause = Duration::from_millis(20);
                    match exit {
                        Ok(record) => {
                            let _ = self.end.told.set(record);
                            true
                        }
                        Err(_) => !self.is_alive(),
                    }
                }
                Err(error) => error.is_gone() || !self.is_alive(),
            };
            if has_ended {
                match self.release().await {
                    Ok(gone) => return gone,
                    Err(error) => {
                        tracing::warn!(sandbox_id = %self.spec.sandbox_id, error = %chain(&error), "a dead sandbox is not released yet");
                    }
                }
            }
            // A shim that lives and does not answer, or something that cannot be released yet.
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_secs(2));
        }
    }
}

/// Output that comes from a shim.
struct LiveOutput(client::OutputReader);

#[async_trait]
impl OutputReader for LiveOutput {
    async fn next(&mut self) -> Result<Option<OutputFrame>, SandboxError> {
        self.0.next().await.map_err(|error| SandboxError::failed("read output", error))
    }
}

/// Output that is read from a spool nobody writes to any more.
pub(super) struct SpoolOutput {
    /// Away on another thread while a frame is read.
    reader: Option<EndedReader>,
}

impl SpoolOutput {
    pub(super) fn new(reader: EndedReader) -> Self {
        Self { reader: Some(reader) }
    }
}

#[async_trait]
impl OutputReader for SpoolOutput {
    async fn next(&mut self) -> Result<Option<OutputFrame>, SandboxError> {
        let mut reader = self
            .reader
            .take()
            .ok_or_else(|| SandboxError::failed("read output", "an earlier read was given up half-way"))?;
        let (reader, frame) = blocking("read output", move || {
            let frame = reader.next();
            Ok((reader, frame))
        })
        .await?;
        self.reader = Some(reader);
        frame.map_err(|error| SandboxError::failed("read output", error))
    }
}
