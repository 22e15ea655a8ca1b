//! One session of a round: created, used, looked at, deleted, whatever happens meanwhile.

use std::time::{Duration, Instant};

use cloister_api::app::{CreateSessionRequest, SessionState};
use cloister_api::common::{ExecExit, ExecSpec, ExitReason};
use connectrpc::ErrorCode;

use crate::client::{Client, limits, wait_ms};

/// How long a session may take to get where it goes.
const PATIENCE: Duration = Duration::from_secs(60);
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// A session that was acknowledged.
pub(crate) struct Worker<'a> {
    client: &'a Client,
    /// Sets this session's request ids and output apart from all others'.
    tag: String,
    pub(crate) id: String,
    ended: Vec<Ended>,
    resumes: usize,
    /// How often its sandbox had ended and nobody had asked for that.
    pub(crate) lost: usize,
}

/// An exec whose end was acknowledged.
struct Ended {
    id: String,
    exit: ExecExit,
    /// All that it printed, when it printed all.
    output: Option<String>,
}

impl<'a> Worker<'a> {
    pub(crate) async fn create(client: &'a Client, tag: String) -> Self {
        let request = CreateSessionRequest {
            request_id: format!("{tag}-create"),
            limits: limits().into(),
            wait_ms: wait_ms(),
            ..Default::default()
        };
        let id = client.create(request.clone()).await.id;
        let again = client.create(request).await.id;
        assert_eq!(id, again, "the same request made two sessions");
        let mut worker = Self { client, tag, id, ended: Vec::new(), resumes: 0, lost: 0 };
        worker.ensure_active().await;
        worker
    }

    /// Waits until its sandbox runs; one that a crash has stopped is started again.
    pub(crate) async fn ensure_active(&mut self) {
        let begin = Instant::now();
        loop {
            let session = self.client.get(&self.id).await;
            match session.state.as_known() {
                Some(SessionState::Active) => return,
                Some(SessionState::Paused) => {
                    self.lost += 1;
                    self.resume().await;
                }
                Some(SessionState::Failed | SessionState::Deleting | SessionState::Deleted) => {
                    panic!("`{}` is lost: {session:?}", self.tag)
                }
                _ => {
                    assert!(begin.elapsed() < PATIENCE, "`{}` does not get active: {session:?}", self.tag);
                    tokio::time::sleep(LOOK_AGAIN).await;
                }
            }
        }
    }

    /// Starts its sandbox again.
    pub(crate) async fn resume(&mut self) {
        self.resumes += 1;
        match self.client.resume(&self.id, format!("{}-resume-{}", self.tag, self.resumes)).await {
            Ok(_) => {}
            // It moved on by itself.
            Err(error) if error.code == ErrorCode::FailedPrecondition => {}
            Err(error) => panic!("`{}` cannot be resumed: {error:?}", self.tag),
        }
    }

    /// Stops its sandbox and starts another one on the same layer.
    pub(crate) async fn pause_and_resume(&mut self, round: usize) {
        match self.client.pause(&self.id, format!("{}-pause-{round}", self.tag)).await {
            Ok(_) => {}
            Err(error) if error.code == ErrorCode::FailedPrecondition => {}
            Err(error) => panic!("`{}` cannot be paused: {error:?}", self.tag),
        }
        self.resume().await;
        self.ensure_active().await;
    }

    /// Runs a program to its end; one that ended with its sandbox is run again.
    pub(crate) async fn run(&mut self, number: usize) {
        let text = format!("{} {number}", self.tag);
        let script = format!("echo '{text}' | tee -a log; sync; echo ok");
        for attempt in 0.. {
            assert!(attempt < 20, "`{text}` ends with its sandbox again and again");
            let spec =
                ExecSpec { argv: ["sh", "-c", &script].map(str::to_owned).to_vec(), ..Default::default() };
            let request_id = format!("{}-exec-{number}-{attempt}", self.tag);
            let started = match self.client.start_exec(&self.id, request_id, spec).await {
                Ok(exec) => exec,
                Err(error) if error.code == ErrorCode::FailedPrecondition => {
                    self.ensure_active().await;
                    continue;
                }
                Err(error) => panic!("`{text}` cannot be started: {error:?}"),
            };
            let exec = self.client.wait_exec(&self.id, &started.id).await;
            let exit = exec.exit.into_option().unwrap_or_else(|| panic!("`{text}` does not end"));
            let is_whole = exit.reason.as_known() == Some(ExitReason::Exited);
            assert!(!is_whole || exit.code == 0, "`{text}` failed: {exit:?}");
            let output = is_whole.then(|| format!("{text}\nok\n"));
            self.ended.push(Ended { id: exec.id, exit, output });
            if is_whole {
                return;
            }
            self.ensure_active().await;
        }
    }

    /// Checks that the session is where its log says and that no acknowledged end has changed.
    pub(crate) async fn look(&self) {
        let begin = Instant::now();
        loop {
            let before = self.client.get(&self.id).await;
            let log = self.client.log(&self.id).await;
            let after = self.client.get(&self.id).await;
            if before.generation == after.generation && before.state.as_known() == log.last().copied() {
                break;
            }
            assert!(begin.elapsed() < PATIENCE, "`{}` is {after:?}, its log says {log:?}", self.tag);
        }
        for ended in &self.ended {
            let exec = self.client.wait_exec(&self.id, &ended.id).await;
            let exit = exec.exit.into_option();
            assert_eq!(exit.as_ref(), Some(&ended.exit), "`{}` has another end than before", self.tag);
            let output = self.client.output(&self.id, &ended.id).await;
            if let Some(expected) = &ended.output {
                assert_eq!(String::from_utf8_lossy(&output), *expected, "`{}`", self.tag);
            }
        }
    }

    /// Deletes it and checks that its log ends there.
    pub(crate) async fn delete(&self) {
        self.client.delete(&self.id, &format!("{}-delete", self.tag)).await;
        let log = self.client.log(&self.id).await;
        assert_eq!(log.last(), Some(&SessionState::Deleted), "`{}`: {log:?}", self.tag);
    }
}
