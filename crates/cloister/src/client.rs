//! The calls of this process to its coordinator.
//!
//! One connection carries them all (see `cloister_api::connection`). A call that found no coordinator is repeated
//! a few times with the same request id, so that a restart of the coordinator is not noticed and nothing is done
//! twice.

use std::time::Duration;

use cloister_api::connection::{Connection, Endpoint, is_unanswered};
use connectrpc::client::CallOptions;
use connectrpc::{ConnectError, ErrorCode};

use crate::context::Target;
use crate::error::{self, CliError};
use crate::terminal::Terminal;

/// Deadline of a call that does not wait for anything.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a call may take beyond the time that it asks the coordinator to wait.
const WAIT_MARGIN: Duration = Duration::from_secs(15);
/// Pauses between attempts while no coordinator answers.
const RETRY_PAUSES_MS: [u64; 4] = [100, 200, 500, 1000];

/// A connection with a token.
#[derive(Clone)]
pub(crate) struct Client {
    endpoint: String,
    connection: Connection,
    terminal: Option<Terminal>,
}

impl Client {
    /// Connects, trying again for two seconds: a coordinator that is being restarted comes back within them.
    ///
    /// # Errors
    ///
    /// [`CliError::Unreachable`], or [`CliError::Refused`] when the endpoint or the token makes no sense.
    pub(crate) async fn connect(target: &Target) -> Result<Self, CliError> {
        let mut pauses = RETRY_PAUSES_MS.iter();
        loop {
            match Self::connect_once(target).await {
                Err(CliError::Unreachable { endpoint, reason }) => match pauses.next() {
                    Some(pause) => tokio::time::sleep(Duration::from_millis(*pause)).await,
                    None => return Err(CliError::Unreachable { endpoint, reason }),
                },
                result => return result,
            }
        }
    }

    /// Connects, or says why not.
    ///
    /// # Errors
    ///
    /// As [`Client::connect`].
    pub(crate) async fn connect_once(target: &Target) -> Result<Self, CliError> {
        let endpoint: Endpoint =
            target.endpoint.parse().map_err(|error: cloister_api::connection::EndpointError| {
                CliError::refused(error.to_string(), "an endpoint looks like `http://127.0.0.1:8080`")
            })?;
        let bearer = Some(target.token.as_str()).filter(|token| !token.is_empty());
        match Connection::dial(&endpoint, bearer).await {
            Ok(connection) => Ok(Self { endpoint: target.endpoint.clone(), connection, terminal: None }),
            Err(cloister_api::connection::ConnectionError::Connect { source, .. }) => {
                Err(CliError::Unreachable {
                    endpoint: target.endpoint.clone(),
                    reason: error::chain(&source),
                })
            }
            Err(error) => Err(CliError::refused(error::chain(&error), "copy the token again")),
        }
    }

    /// Returns the client that says on `terminal` when an answer takes long.
    pub(crate) fn speaking_on(self, terminal: Terminal) -> Self {
        Self { terminal: Some(terminal), ..self }
    }

    /// Returns the connection, whose clients make the calls.
    pub(crate) fn api(&self) -> &Connection {
        &self.connection
    }

    /// Makes a call, again while no coordinator answers.
    ///
    /// `options` are the attempt's own; `attempt` must carry the same request id each time.
    ///
    /// # Errors
    ///
    /// What the coordinator answered, or [`CliError::Unreachable`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future may leave the call done or not done: repeat it with the same request id.
    pub(crate) async fn call<T, F>(
        &self,
        options: &CallOptions,
        attempt: impl FnMut() -> F,
    ) -> Result<T, CliError>
    where
        F: Future<Output = Result<T, ConnectError>>,
    {
        // Who makes a call that waits for something shows what it waits for.
        let answers_at_once = options.timeout().is_some_and(|timeout| timeout <= CALL_TIMEOUT);
        let _patience = self
            .terminal
            .filter(|_| answers_at_once)
            .map(|terminal| terminal.patience(format!("waiting for an answer of `{}`", self.endpoint)));
        repeat(attempt).await.map_err(|error| self.error(&error))
    }

    /// Returns the error of a call as this process reports it.
    pub(crate) fn error(&self, error: &ConnectError) -> CliError {
        CliError::from_connect(&self.endpoint, error)
    }
}

/// Makes an attempt, and again while it gets no answer or one that says so.
async fn repeat<T, F>(mut attempt: impl FnMut() -> F) -> Result<T, ConnectError>
where
    F: Future<Output = Result<T, ConnectError>>,
{
    let mut pauses = RETRY_PAUSES_MS.iter();
    loop {
        let answer = attempt().await;
        match answer {
            Err(error) if error.code == ErrorCode::Unavailable || is_unanswered(&error) => {
                match pauses.next() {
                    Some(pause) => tokio::time::sleep(Duration::from_millis(*pause)).await,
                    None => return Err(error),
                }
            }
            answer => return answer,
        }
    }
}

/// Makes a unary call of one of the API's clients and returns the owned answer.
///
/// `unary!(client, sessions, get_session, request, options)`
macro_rules! unary {
    ($client:expr, $service:ident, $method:ident, $request:expr, $options:expr) => {{
        let (client, request, options) = (&$client, $request, $options);
        let service = client.api().$service();
        let answer = client.call(&options, || service.$method(request.clone(), options.clone())).await;
        answer.map(|answer| answer.into_owned())
    }};
}
pub(crate) use unary;

/// Options of a call that answers at once.
pub(crate) fn quick() -> CallOptions {
    CallOptions::default().with_timeout(CALL_TIMEOUT)
}

/// Options of a call that asks the coordinator to wait.
pub(crate) fn waiting(wait: Duration) -> CallOptions {
    CallOptions::default().with_timeout(wait.saturating_add(WAIT_MARGIN))
}

/// Returns a new request id, which makes a mutation safe to repeat.
pub(crate) fn request_id() -> String {
    format!("cli-{}", uuid::Uuid::now_v7().simple())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_ids_are_accepted_by_the_coordinator_and_differ() {
        let (one, two) = (request_id(), request_id());
        assert_ne!(one, two);
        assert_eq!(cloister_types::name::validate_request_id(&one), Ok(()));
    }

    #[tokio::test]
    async fn a_torn_answer_is_asked_for_again_and_a_failure_of_the_coordinator_is_not() {
        let torn = || ConnectError::internal("failed to read response body");
        let mut answers = vec![Ok(7), Err(torn()), Err(ConnectError::unavailable("refused"))];
        let answer =
            repeat(|| std::future::ready(answers.pop().expect("no more attempts than answers"))).await;
        assert_eq!(answer.unwrap(), 7);
        let detail = cloister_api::app::ErrorDetail { code: "CL1099".into(), ..Default::default() };
        let detail = connectrpc::ErrorDetail::from_message("cloister.app.v1.ErrorDetail", &detail);
        let mut attempts = 0;
        let answer: Result<(), _> = repeat(|| {
            attempts += 1;
            std::future::ready(Err(torn().with_detail(detail.clone())))
        })
        .await;
        assert_eq!((answer.unwrap_err().code, attempts), (ErrorCode::Internal, 1));
    }

    #[tokio::test]
    async fn a_port_where_nobody_listens_is_named() {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let target =
            Target { context: None, endpoint: format!("http://127.0.0.1:{port}"), token: "t".into() };
        let Err(error) = Client::connect_once(&target).await else { panic!("somebody answered") };
        assert!(matches!(error, CliError::Unreachable { .. }), "{error:?}");
        assert!(error.to_string().contains(&target.endpoint), "{error}");
    }
}
