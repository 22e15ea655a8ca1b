//! A client that behaves as clients should: it repeats a call that was cut, with the same request id.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use cloister_api::app::{
    CreateSessionRequest, CreateTokenRequest, DeleteSessionRequest, GetSessionRequest, PauseSessionRequest,
    ReadOutputRequest, ResumeSessionRequest, RevokeTokenRequest, Session, SessionState, StartExecRequest,
    WaitExecRequest, WatchSessionRequest,
};
use cloister_api::common::output_frame::Frame;
use cloister_api::common::{Exec, ExecSpec, Limits};
use cloister_api::connection::{Connection, error_detail, is_unanswered};
use connectrpc::client::CallOptions;
use connectrpc::{ConnectError, ErrorCode};

/// How long a call is repeated. Recovery takes seconds at most.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long a call asks the coordinator to wait.
const WAIT: Duration = Duration::from_secs(20);
const AGAIN: Duration = Duration::from_millis(20);

/// A connection, and when its calls began and ended.
pub(crate) struct Client {
    connection: Connection,
    calls: Mutex<Vec<(Instant, Instant)>>,
}

/// Makes a call again and again until it is answered.
macro_rules! call {
    ($self:ident, $service:ident, $method:ident, $request:expr) => {{
        let request = $request;
        let service = $self.connection.$service();
        let options = || CallOptions::default().with_timeout(WAIT + Duration::from_secs(15));
        $self
            .until_answered(async || {
                service.$method(request.clone(), options()).await.map(|answer| answer.into_owned())
            })
            .await
    }};
}

impl Client {
    pub(crate) async fn connect(endpoint: &str, token: &str) -> Self {
        let connection = Connection::dial(&endpoint.parse().unwrap(), Some(token)).await.unwrap();
        Self { connection, calls: Mutex::default() }
    }

    /// Forgets the calls so far.
    pub(crate) fn begin_round(&self) {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Returns how long after `moment` the last call that was under way then had its answer, or when there was none, the
    /// next call.
    pub(crate) fn answered_after(&self, moment: Instant) -> Duration {
        let calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        let under_way = calls.iter().filter(|(begin, end)| *begin <= moment && *end >= moment);
        let next = || calls.iter().filter(|(begin, _)| *begin > moment).map(|(_, end)| *end - moment).min();
        under_way.map(|(_, end)| *end - moment).max().or_else(next).unwrap_or_default()
    }

    async fn until_answered<T>(
        &self,
        attempt: impl AsyncFn() -> Result<T, ConnectError>,
    ) -> Result<T, ConnectError> {
        let begin = Instant::now();
        loop {
            let answer = attempt().await;
            match answer {
                Err(error) if is_cut(&error) && begin.elapsed() < PATIENCE => tokio::time::sleep(AGAIN).await,
                answer => {
                    let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
                    calls.push((begin, Instant::now()));
                    return answer;
                }
            }
        }
    }

    pub(crate) async fn create(&self, request: CreateSessionRequest) -> Session {
        let answer = call!(self, sessions, create_session_with_options, request);
        answer.expect("create a session").session.into_option().expect("a session")
    }

    pub(crate) async fn get(&self, session: &str) -> Session {
        let request = GetSessionRequest { session: session.to_owned(), ..Default::default() };
        let answer = call!(self, sessions, get_session_with_options, request);
        answer.expect("get an acknowledged session").session.into_option().expect("a session")
    }

    pub(crate) async fn pause(&self, session: &str, request_id: String) -> Result<Session, ConnectError> {
        let request = PauseSessionRequest {
            session: session.to_owned(),
            request_id,
            wait_ms: wait_ms(),
            ..Default::default()
        };
        let answer = call!(self, sessions, pause_session_with_options, request)?;
        Ok(answer.session.into_option().expect("a session"))
    }

    pub(crate) async fn resume(&self, session: &str, request_id: String) -> Result<Session, ConnectError> {
        let request = ResumeSessionRequest {
            session: session.to_owned(),
            request_id,
            wait_ms: wait_ms(),
            ..Default::default()
        };
        let answer = call!(self, sessions, resume_session_with_options, request)?;
        Ok(answer.session.into_option().expect("a session"))
    }

    /// Deletes a session and returns when it is deleted.
    pub(crate) async fn delete(&self, session: &str, request_id: &str) {
        let begin = Instant::now();
        loop {
            let request = DeleteSessionRequest {
                session: session.to_owned(),
                request_id: request_id.to_owned(),
                wait_ms: wait_ms(),
                ..Default::default()
            };
            let answer =
                call!(self, sessions, delete_session_with_options, request).expect("delete a session");
            let session = answer.session.into_option().expect("a session");
            if session.state.as_known() == Some(SessionState::Deleted) {
                return;
            }
            assert!(begin.elapsed() < PATIENCE, "a deletion does not end: {session:?}");
        }
    }

    pub(crate) async fn start_exec(
        &self,
        session: &str,
        request_id: String,
        spec: ExecSpec,
    ) -> Result<Exec, ConnectError> {
        let request = StartExecRequest {
            request_id,
            session: session.to_owned(),
            spec: spec.into(),
            ..Default::default()
        };
        let answer = call!(self, execs, start_exec_with_options, request)?;
        Ok(answer.exec.into_option().expect("an exec"))
    }

    /// Returns an acknowledged exec once it has ended, or as it is after the longest wait.
    pub(crate) async fn wait_exec(&self, session: &str, exec_id: &str) -> Exec {
        let request = WaitExecRequest {
            session: session.to_owned(),
            exec_id: exec_id.to_owned(),
            wait_ms: wait_ms(),
            ..Default::default()
        };
        let answer = call!(self, execs, wait_exec_with_options, request);
        answer.expect("wait for an acknowledged exec").exec.into_option().expect("an exec")
    }

    /// Returns the whole output of an exec that has ended; panics on a gap.
    pub(crate) async fn output(&self, session: &str, exec_id: &str) -> Vec<u8> {
        let request = ReadOutputRequest {
            session: session.to_owned(),
            exec_id: exec_id.to_owned(),
            ..Default::default()
        };
        let read = self.until_answered(async || {
            let mut output = Vec::new();
            let streams = self.connection.streams();
            let mut stream =
                streams.read_output_with_options(request.clone(), CallOptions::default()).await?;
            while let Some(message) = stream.message().await? {
                match message.to_owned_message().frame.into_option().and_then(|frame| frame.frame) {
                    Some(Frame::Data(data)) => output.extend_from_slice(&data.data),
                    Some(Frame::Exit(_)) => return Ok(output),
                    other => panic!("exec `{exec_id}` has {other:?} where output should be"),
                }
            }
            Err(ConnectError::new(ErrorCode::Unavailable, "the output ended without an exit"))
        });
        read.await.expect("read output")
    }

    /// Returns the states in a session's log so far, or to its end when it is deleted.
    pub(crate) async fn log(&self, session: &str) -> Vec<SessionState> {
        /// A log is one message after the other: a pause this long is its end for now.
        const QUIET: Duration = Duration::from_millis(100);
        let request = WatchSessionRequest { session: session.to_owned(), ..Default::default() };
        let read = self.until_answered(async || {
            let streams = self.connection.streams();
            let mut stream =
                streams.watch_session_with_options(request.clone(), CallOptions::default()).await?;
            let mut states = Vec::new();
            loop {
                let message = match tokio::time::timeout(QUIET, stream.message()).await {
                    Ok(message) => message?,
                    Err(_) if states.is_empty() => continue,
                    Err(_) => return Ok(states),
                };
                let Some(message) = message else { return Ok(states) };
                let event = message.to_owned_message().event.into_option().expect("an event");
                states.push(event.state.as_known().expect("a known state"));
                assert_eq!(event.cursor, u64::try_from(states.len()).unwrap(), "the log has a hole");
            }
        });
        read.await.expect("read a log")
    }

    pub(crate) async fn make_and_revoke_token(&self, name: &str) {
        let request = CreateTokenRequest {
            request_id: format!("{name}-make"),
            name: name.to_owned(),
            ..Default::default()
        };
        call!(self, tokens, create_token_with_options, request).expect("make a token");
        let request = RevokeTokenRequest {
            request_id: format!("{name}-revoke"),
            token: name.to_owned(),
            ..Default::default()
        };
        call!(self, tokens, revoke_token_with_options, request).expect("revoke a token");
    }
}

/// What a session of a round may use.
pub(crate) fn limits() -> Limits {
    const MIB: u64 = 1024 * 1024;
    Limits { memory_bytes: 32 * MIB, cpu_millis: 500, pids: 64, disk_bytes: 32 * MIB, ..Default::default() }
}

pub(crate) fn wait_ms() -> u64 {
    u64::try_from(WAIT.as_millis()).unwrap()
}

/// Returns whether a call may be repeated: it was cut, or its answer says so.
fn is_cut(error: &ConnectError) -> bool {
    let host_failed = error_detail(error).is_some_and(|detail| detail.code == "CL1017");
    matches!(error.code, ErrorCode::Unavailable | ErrorCode::DeadlineExceeded | ErrorCode::Aborted)
        || is_unanswered(error)
        || host_failed
}
