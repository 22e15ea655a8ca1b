//! A coordinator to test, and what tests ask of it.

use std::collections::HashMap;
use std::time::Duration;

use cloister_api::app::{CreateSessionRequest, GetSessionRequest, Session, SessionState};
use cloister_api::common::ExecSpec;
use cloister_api::connection::{Connection, Endpoint, error_detail};
use cloister_service::{CancellationToken, OnCancel, OnError, TaskKind, TaskRegistry};
use connectrpc::{ConnectError, ErrorCode};
use secrecy::{ExposeSecret as _, SecretString};
use tokio::sync::oneshot;

use crate::config::{Config, Database};
use crate::run::{Listening, run_with};
use crate::test_support::TestStore;

/// Bearer of host agents.
pub(super) const HOST_TOKEN: &str = "host-token-0123456789";
/// Bearer of a machine.
pub(super) const APP_TOKEN: &str = "app-token-0123456789";
/// Longest that any test waits for something that should happen at once.
pub(super) const SOON: Duration = Duration::from_secs(20);

pub(super) const TASK: TaskKind = TaskKind::new("test", OnCancel::Abort, OnError::Log);

/// A coordinator on a database of its own.
pub(super) struct TestCoordinator {
    pub(super) listening: Listening,
    pub(super) options: sqlx::postgres::PgConnectOptions,
    pub(super) tasks: TaskRegistry,
    shutdown: CancellationToken,
    ended: Option<oneshot::Receiver<Result<(), String>>>,
    _directory: tempfile::TempDir,
}

impl TestCoordinator {
    /// Starts one; `None` after a `SKIP:` line.
    pub(super) async fn start() -> Option<Self> {
        Self::start_with(|_| {}).await
    }

    pub(super) async fn start_with(change: impl FnOnce(&mut Config)) -> Option<Self> {
        let options = TestStore::create_database().await?;
        Some(Self::start_on(options, change).await)
    }

    /// Starts one on a database that exists.
    pub(super) async fn start_on(
        options: sqlx::postgres::PgConnectOptions,
        change: impl FnOnce(&mut Config),
    ) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let mut config = Config {
            listen: "127.0.0.1:0".parse().expect("an address"),
            socket: Some(directory.path().join("c.sock")),
            database: Database::Outside(Box::new(options.clone())),
            data_dir: directory.path().join("data"),
            run_dir: directory.path().join("run"),
            auth_tokens: vec![SecretString::from(HOST_TOKEN.to_owned())],
            app_tokens: vec![SecretString::from(APP_TOKEN.to_owned())],
            owner_token: None,
            // Notices and due times must be enough.
            fallback_poll: Duration::from_secs(3600),
            heartbeat: Duration::from_secs(5),
            shutdown_grace: Duration::from_secs(10),
        };
        change(&mut config);
        let tasks = TaskRegistry::new();
        let shutdown = CancellationToken::new();
        let (ready, listening) = oneshot::channel();
        let (end, ended) = oneshot::channel();
        let token = shutdown.clone();
        tasks.spawn(TASK, async move {
            let result = run_with(config, token, |listening| {
                let _ = ready.send(listening);
            })
            .await;
            let _ = end.send(result.map_err(|error| cloister_service::error_chain(&error)));
            Ok::<(), String>(())
        });
        let listening = match tokio::time::timeout(Duration::from_secs(60), listening).await {
            Ok(Ok(listening)) => listening,
            Ok(Err(_)) => panic!("the coordinator did not start: {:?}", ended.await),
            Err(_) => panic!("the coordinator did not start in time"),
        };
        Self { listening, options, tasks, shutdown, ended: Some(ended), _directory: directory }
    }

    /// Stops it and returns when it has ended.
    pub(super) async fn stop(&mut self) {
        self.shutdown.cancel();
        let ended = self.ended.take().expect("stopped once");
        let result = tokio::time::timeout(Duration::from_secs(30), ended).await;
        result.expect("it stops in time").expect("it says how it ended").expect("it ends well");
    }

    /// Lets the database take connections or not; those that are there end.
    pub(super) async fn allow_connections(&self, allowed: bool) {
        use sqlx::{AssertSqlSafe, ConnectOptions as _, Connection as _};
        let name = self.options.get_database().expect("a database of its own").to_owned();
        let mut admin = self.options.clone().database("postgres").connect().await.expect("connect");
        let alter = format!("ALTER DATABASE \"{name}\" ALLOW_CONNECTIONS {allowed}");
        sqlx::query(AssertSqlSafe(alter)).execute(&mut admin).await.expect("alter");
        if !allowed {
            let end = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = $1";
            sqlx::query(end).bind(name).execute(&mut admin).await.expect("terminate");
        }
        admin.close().await.expect("close");
    }

    pub(super) fn endpoint(&self) -> Endpoint {
        format!("http://{}", self.listening.address).parse().expect("an endpoint")
    }

    pub(super) fn owner_token(&self) -> &str {
        self.listening.owner_token.expose_secret()
    }

    /// Connects as the owner.
    pub(super) async fn owner(&self) -> Connection {
        self.connect(self.owner_token()).await
    }

    pub(super) async fn connect(&self, token: &str) -> Connection {
        Connection::dial(&self.endpoint(), Some(token)).await.expect("connect")
    }

    /// Sends JSON as curl does, and returns status and body.
    pub(super) async fn post(
        &self,
        path: &str,
        token: Option<&str>,
        body: impl Into<String>,
    ) -> (u16, serde_json::Value) {
        let (status, body) =
            self.http("POST", path, token, "application/json", body.into().into_bytes()).await;
        let value = serde_json::from_slice(&body)
            .unwrap_or_else(|_| serde_json::Value::String(String::from_utf8_lossy(&body).into_owned()));
        (status, value)
    }

    /// One HTTP/1.1 exchange.
    pub(super) async fn http(
        &self,
        method: &str,
        path: &str,
        token: Option<&str>,
        content_type: &str,
        body: Vec<u8>,
    ) -> (u16, Vec<u8>) {
        use http_body_util::BodyExt as _;
        let stream = tokio::net::TcpStream::connect(self.listening.address).await.expect("connect");
        let io = hyper_util::rt::TokioIo::new(stream);
        let (mut sender, connection) = hyper::client::conn::http1::handshake(io).await.expect("handshake");
        self.tasks.spawn(TASK, async move {
            // Ends when the peer closes.
            let _ = connection.await;
            Ok::<(), String>(())
        });
        let mut request = http::Request::builder()
            .method(method)
            .uri(path)
            .header("host", "test")
            .header("content-type", content_type);
        if let Some(token) = token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let body = http_body_util::Full::new(bytes::Bytes::from(body));
        let response = sender.send_request(request.body(body).expect("a request")).await.expect("an answer");
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.expect("a body").to_bytes();
        (status, body.to_vec())
    }
}

impl Drop for TestCoordinator {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

/// Returns the code of an error's detail.
pub(super) fn code(error: &ConnectError) -> String {
    error_detail(error).map(|detail| detail.code).unwrap_or_default()
}

/// Returns a request to create a session that waits for it.
pub(super) fn create(request_id: &str) -> CreateSessionRequest {
    CreateSessionRequest { request_id: request_id.to_owned(), wait_ms: 20_000, ..Default::default() }
}

/// Creates a session that must become active.
pub(super) async fn active_session(connection: &Connection, request_id: &str) -> Session {
    let answer = connection.sessions().create_session(create(request_id)).await.expect("create a session");
    let session = answer.into_owned().session.into_option().expect("an answer has a session");
    assert_eq!(session.state, SessionState::Active, "{session:?}");
    session
}

pub(super) async fn get(connection: &Connection, session: &str) -> Session {
    let request = GetSessionRequest { session: session.to_owned(), ..Default::default() };
    let answer = connection.sessions().get_session(request).await.expect("get a session");
    answer.into_owned().session.into_option().expect("an answer has a session")
}

/// Waits until a session is in a state, and fails with what it was last.
pub(super) async fn until(connection: &Connection, session: &str, state: SessionState) -> Session {
    let mut last = None;
    let wait = async {
        loop {
            let now = get(connection, session).await;
            if now.state == state {
                return now;
            }
            last = Some(now);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    match tokio::time::timeout(SOON, wait).await {
        Ok(session) => session,
        Err(_) => panic!("`{session}` never was {state:?}; last: {last:?}"),
    }
}

pub(super) fn spec(argv: &[&str]) -> ExecSpec {
    ExecSpec { argv: argv.iter().map(|text| (*text).to_owned()).collect(), stdin: true, ..Default::default() }
}

/// Asserts that a call was refused with a code.
pub(super) fn assert_code<T>(result: Result<T, ConnectError>, expected: &str, status: ErrorCode) {
    match result {
        Ok(_) => panic!("it was accepted instead of refused with {expected}"),
        Err(error) => {
            assert_eq!(code(&error), expected, "{error}");
            assert_eq!(error.code, status, "{error}");
        }
    }
}

/// The labels of a request.
pub(super) fn labels(pairs: &[(&str, &str)]) -> HashMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}
