//! `cloister session`: sessions, the durable unit of work.

mod text;

use std::time::{Duration, SystemTime};

use buffa::Enumeration;
use clap::{Args, Subcommand};
use cloister_api::app::{
    DeleteSessionRequest, DeleteSessionResponse, GetSessionRequest, ListSessionsRequest,
    ListSessionsResponse, PauseSessionRequest, ResumeSessionRequest, Session, SessionState,
    WatchSessionRequest,
};
use cloister_types::session::Reason;
use connectrpc::client::CallOptions;

use crate::args::{SandboxArgs, millis, parse_pair};
use crate::attach;
use crate::cli::Invocation;
use crate::client::{self, Client, unary};
use crate::error::CliError;
use crate::interrupt::Interrupts;
use crate::terminal::{Progress, Terminal, one_line, word};

/// How long one call waits for a session to get where it goes; longer waits are several calls.
const CALL_WAIT: Duration = Duration::from_secs(20);
/// Pause between looks at a session that has not got there.
const LOOK_PAUSE: Duration = Duration::from_millis(200);
/// Sessions per page.
const PAGE_SIZE: u32 = 500;

/// Create, inspect, pause, resume and delete sessions
#[derive(Debug, Subcommand)]
pub(crate) enum SessionCommand {
    /// Create a session and wait until its sandbox runs
    Create(CreateArgs),
    /// Show a session with what its sandbox gives
    Get(OneArgs),
    /// List sessions, newest first
    List(ListArgs),
    /// Delete sessions with everything in them
    Delete(DeleteArgs),
    /// Stop the sandbox and keep its files
    Pause(ChangeArgs),
    /// Start a paused session again on its files
    Resume(ChangeArgs),
    /// Print a session's events as they happen
    Watch(WatchArgs),
}

/// Flags of `session create`.
#[derive(Debug, Args)]
pub(crate) struct CreateArgs {
    #[command(flatten)]
    sandbox: SandboxArgs,
    /// Return at once instead of waiting for the sandbox
    #[arg(long)]
    no_wait: bool,
}

/// A command about one session.
#[derive(Debug, Args)]
pub(crate) struct OneArgs {
    /// Id, unique prefix of it, or name
    session: String,
}

/// Flags of `session list`.
#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    /// Only sessions with this label `KEY=VALUE`; may be given again
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = parse_pair)]
    labels: Vec<(String, String)>,
    /// Only sessions in this state, for example `active`; may be given again
    #[arg(long = "state", value_name = "STATE")]
    states: Vec<cloister_types::SessionState>,
}

/// Flags of `session delete`.
#[derive(Debug, Args)]
pub(crate) struct DeleteArgs {
    /// Ids, unique prefixes of them, or names
    #[arg(required = true)]
    sessions: Vec<String>,
    /// Return at once instead of waiting until they are gone
    #[arg(long)]
    no_wait: bool,
}

/// Flags of `session pause` and `session resume`.
#[derive(Debug, Args)]
pub(crate) struct ChangeArgs {
    /// Id, unique prefix of it, or name
    session: String,
    /// Return at once instead of waiting for the end of it
    #[arg(long)]
    no_wait: bool,
}

/// Flags of `session watch`.
#[derive(Debug, Args)]
pub(crate) struct WatchArgs {
    /// Id, unique prefix of it, or name
    session: String,
    /// The last cursor already seen; events after it are printed
    #[arg(long, value_name = "CURSOR", default_value_t = 0)]
    after: u64,
}

/// Which sessions to list.
#[derive(Debug, Default)]
pub(crate) struct ListFilter {
    labels: Vec<(String, String)>,
    states: Vec<SessionState>,
}

impl SessionCommand {
    /// Does it.
    ///
    /// # Errors
    ///
    /// What the coordinator answered.
    pub(crate) async fn run(self, invocation: &Invocation) -> Result<u8, CliError> {
        let terminal = invocation.terminal;
        let client = invocation.client().await?;
        match self {
            Self::Create(args) if args.no_wait => {
                let request = args.sandbox.create_request(Duration::ZERO);
                let answer = unary!(client, sessions, create_session_with_options, request, client::quick())?;
                terminal.either(&answer, || answer.session.id.clone())?;
            }
            Self::Create(args) => {
                let mut interrupts = Interrupts::listen()?;
                let session = create(&client, terminal, &args.sandbox, &mut interrupts).await?;
                let answer = cloister_api::app::CreateSessionResponse {
                    session: session.into(),
                    ..Default::default()
                };
                terminal.either(&answer, || answer.session.id.clone())?;
            }
            Self::Get(args) => {
                let request = GetSessionRequest { session: args.session, ..Default::default() };
                let answer = unary!(client, sessions, get_session_with_options, request, client::quick())?;
                terminal.either(&answer, || text::describe(&answer.session, terminal))?;
            }
            Self::List(args) => {
                let states = args.states.iter().filter_map(|state| state_of(*state)).collect();
                let filter = ListFilter { labels: args.labels, states };
                return print_list(&client, terminal, filter).await;
            }
            Self::Delete(args) => return delete_all(&client, terminal, args).await,
            Self::Pause(args) => pause(&client, terminal, args).await?,
            Self::Resume(args) => resume(&client, terminal, args).await?,
            Self::Watch(args) => watch(&client, terminal, args).await?,
        }
        Ok(0)
    }
}

/// Creates a session and waits until its sandbox runs. On an interrupt, or when it comes to nothing, nothing is left
/// behind; when the coordinator cannot be asked any more, the session goes on without us and its id is said.
///
/// # Errors
///
/// Why there is no running sandbox.
pub(crate) async fn create(
    client: &Client,
    terminal: Terminal,
    sandbox: &SandboxArgs,
    interrupts: &mut Interrupts,
) -> Result<Session, CliError> {
    let request = sandbox.create_request(CALL_WAIT);
    let progress = terminal.progress("creating the session");
    let created = interrupts
        .or_interrupted(async {
            unary!(client, sessions, create_session_with_options, request.clone(), client::waiting(CALL_WAIT))
        })
        .await;
    let session = match created {
        Ok(answer) => answer.session.into_option().unwrap_or_default(),
        Err(CliError::Interrupted) => {
            // It may have been made. The same request id returns it instead of making another one.
            let again = cloister_api::app::CreateSessionRequest { wait_ms: 0, ..request };
            if let Ok(answer) = unary!(client, sessions, create_session_with_options, again, client::quick())
            {
                delete_quietly(client, terminal, &answer.session.id, Duration::ZERO).await;
            }
            return Err(CliError::Interrupted);
        }
        Err(error) => return Err(error),
    };
    let id = session.id.clone();
    let settled = interrupts
        .or_interrupted(settle(client, session, |session| {
            progress.say(format!(
                "{} {}",
                word(&session.state, "SESSION_STATE_"),
                one_line(&session.message)
            ));
        }))
        .await;
    drop(progress);
    let error = match settled {
        Ok(session) if session.state.as_known() == Some(SessionState::Active) => return Ok(session),
        Ok(session) => not_active(&session),
        Err(CliError::Interrupted) => {
            terminal.note(format!("cloister: interrupted; session {id} is deleted"));
            CliError::Interrupted
        }
        // Somebody else has deleted it.
        Err(error) if error.is_not_found() => return Err(error),
        Err(error) => {
            terminal.warn(format!("session {id} was asked for and may still become active"));
            terminal.hint(format!(
                "`cloister session get {id}` shows it, `cloister session delete {id}` ends it"
            ));
            return Err(error);
        }
    };
    delete_quietly(client, terminal, &id, Duration::ZERO).await;
    Err(error)
}

/// Waits until a session is in a state that it does not leave by itself.
async fn settle(
    client: &Client,
    mut session: Session,
    mut look: impl FnMut(&Session),
) -> Result<Session, CliError> {
    loop {
        match session.state.as_known() {
            Some(
                SessionState::Pending
                | SessionState::Queued
                | SessionState::Starting
                | SessionState::Resuming
                | SessionState::Pausing
                | SessionState::HostLost,
            ) => {}
            _ => return Ok(session),
        }
        look(&session);
        tokio::time::sleep(LOOK_PAUSE).await;
        let request = GetSessionRequest { session: session.id.clone(), ..Default::default() };
        let answer = unary!(client, sessions, get_session_with_options, request, client::quick())?;
        session = answer.session.into_option().unwrap_or_default();
    }
}

fn not_active(session: &Session) -> CliError {
    let state = word(&session.state, "SESSION_STATE_");
    let reason =
        if session.reason.is_empty() { String::new() } else { format!(" ({})", one_line(&session.reason)) };
    let message = one_line(&session.message);
    CliError::refused(
        format!("session `{}` is {state}{reason}", session.id),
        if message.is_empty() {
            format!("`cloister session watch {}` shows how it got there", session.id)
        } else {
            message
        },
    )
}

/// Deletes a session; a failure is a warning, for callers that have something more important to report.
pub(crate) async fn delete_quietly(client: &Client, terminal: Terminal, session: &str, wait: Duration) {
    if let Err(error) = delete(client, session, wait).await
        && !error.is_not_found()
    {
        terminal.warn(format!("session {session} was not deleted: {error}"));
        terminal.hint(format!("delete it with `cloister session delete {session}`"));
    }
}

async fn delete(client: &Client, session: &str, wait: Duration) -> Result<DeleteSessionResponse, CliError> {
    let request = DeleteSessionRequest {
        request_id: client::request_id(),
        session: session.to_owned(),
        wait_ms: millis(wait),
        ..Default::default()
    };
    unary!(client, sessions, delete_session_with_options, request, client::waiting(wait))
}

/// Waits until a session that is being deleted is gone: a host that does not answer may take its time.
async fn until_deleted(
    client: &Client,
    progress: &Progress,
    session: &str,
    mut answer: DeleteSessionResponse,
) -> Result<DeleteSessionResponse, CliError> {
    while answer.session.state.as_known() == Some(SessionState::Deleting) {
        progress.say(format!(
            "deleting {session}: {}",
            one_line(match answer.session.message.as_str() {
                "" => "its host has not answered yet",
                message => message,
            })
        ));
        tokio::time::sleep(LOOK_PAUSE).await;
        // By its id: a name may be somebody else's by now.
        answer = delete(client, &answer.session.id, CALL_WAIT).await?;
    }
    Ok(answer)
}

async fn delete_all(client: &Client, terminal: Terminal, args: DeleteArgs) -> Result<u8, CliError> {
    let wait = if args.no_wait { Duration::ZERO } else { CALL_WAIT };
    let mut failed = None;
    for session in &args.sessions {
        let progress = terminal.progress(format!("deleting {session}"));
        let result = match delete(client, session, wait).await {
            Ok(answer) if !args.no_wait => until_deleted(client, &progress, session, answer).await,
            other => other,
        };
        drop(progress);
        match result {
            Ok(answer) if terminal.json => terminal.json_line(&answer)?,
            Ok(answer) => terminal.line(&answer.session.id)?,
            // The others are deleted all the same; the last failure decides the exit code.
            Err(error) => {
                if let Some(earlier) = failed.replace(error) {
                    terminal.error(&earlier);
                }
            }
        }
    }
    failed.map_or(Ok(0), Err)
}

async fn pause(client: &Client, terminal: Terminal, args: ChangeArgs) -> Result<(), CliError> {
    let wait = if args.no_wait { Duration::ZERO } else { CALL_WAIT };
    let progress = terminal.progress(format!("pausing {}", args.session));
    let request = PauseSessionRequest {
        request_id: client::request_id(),
        session: args.session,
        wait_ms: millis(wait),
        ..Default::default()
    };
    let mut answer = unary!(client, sessions, pause_session_with_options, request, client::waiting(wait))?;
    if !args.no_wait {
        answer.session =
            settle(client, answer.session.into_option().unwrap_or_default(), |_| {}).await?.into();
    }
    drop(progress);
    finish_change(terminal, &answer, &answer.session, args.no_wait, SessionState::Paused)
}

async fn resume(client: &Client, terminal: Terminal, args: ChangeArgs) -> Result<(), CliError> {
    let wait = if args.no_wait { Duration::ZERO } else { CALL_WAIT };
    let progress = terminal.progress(format!("resuming {}", args.session));
    let request = ResumeSessionRequest {
        request_id: client::request_id(),
        session: args.session,
        wait_ms: millis(wait),
        ..Default::default()
    };
    let mut answer = unary!(client, sessions, resume_session_with_options, request, client::waiting(wait))?;
    if !args.no_wait {
        answer.session =
            settle(client, answer.session.into_option().unwrap_or_default(), |_| {}).await?.into();
    }
    drop(progress);
    finish_change(terminal, &answer, &answer.session, args.no_wait, SessionState::Active)
}

fn finish_change<T: serde::Serialize>(
    terminal: Terminal,
    answer: &T,
    session: &Session,
    no_wait: bool,
    wanted: SessionState,
) -> Result<(), CliError> {
    if !no_wait && session.state.as_known() != Some(wanted) {
        return Err(not_active(session));
    }
    // It is paused, and not all is well.
    if session.state.as_known() == Some(SessionState::Paused) && session.reason == Reason::DiskError.as_str()
    {
        terminal.warn(&session.message);
    }
    terminal.either(answer, || format!("{} {}", session.id, word(&session.state, "SESSION_STATE_")))
}

async fn watch(client: &Client, terminal: Terminal, args: WatchArgs) -> Result<(), CliError> {
    let mut request =
        WatchSessionRequest { session: args.session, after_cursor: args.after, ..Default::default() };
    let mut cuts = 0_u32;
    loop {
        let cut = match client
            .api()
            .streams()
            .watch_session_with_options(request.clone(), CallOptions::default())
            .await
        {
            Err(error) => error,
            Ok(mut stream) => loop {
                match stream.message().await {
                    Ok(Some(message)) => {
                        cuts = 0;
                        let message = message.to_owned_message();
                        request.after_cursor = message.event.cursor;
                        if terminal.json {
                            terminal.json_line(&message)?;
                        } else {
                            terminal.line(text::event_line(&message.event))?;
                        }
                        if message.event.state.as_known() == Some(SessionState::Deleted) {
                            return Ok(());
                        }
                    }
                    Ok(None) => {
                        break connectrpc::ConnectError::unavailable(
                            "the stream ended before the session was deleted",
                        );
                    }
                    Err(error) => break error,
                }
            },
        };
        if cuts >= 6 || !attach::is_cut(&cut) {
            return Err(client.error(&cut));
        }
        tokio::time::sleep(Duration::from_millis(100 << cuts)).await;
        cuts += 1;
    }
}

/// Prints all pages of a list as one.
///
/// # Errors
///
/// What the coordinator answered.
pub(crate) async fn print_list(
    client: &Client,
    terminal: Terminal,
    filter: ListFilter,
) -> Result<u8, CliError> {
    let mut request = ListSessionsRequest {
        labels: filter.labels.into_iter().collect(),
        states: filter.states.into_iter().map(Into::into).collect(),
        page_size: PAGE_SIZE,
        ..Default::default()
    };
    let mut all = ListSessionsResponse::default();
    loop {
        let page = unary!(client, sessions, list_sessions_with_options, request.clone(), client::quick())?;
        all.sessions.extend(page.sessions);
        if page.next_page_token.is_empty() {
            break;
        }
        request.page_token = page.next_page_token;
    }
    terminal.either(&all, || text::table(&all.sessions, SystemTime::now()))?;
    Ok(0)
}

fn state_of(state: cloister_types::SessionState) -> Option<SessionState> {
    SessionState::from_proto_name(&format!("SESSION_STATE_{}", state.as_str().to_ascii_uppercase()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_state_has_its_message_value() {
        for state in cloister_types::SessionState::ALL {
            let value = state_of(*state).expect("a value of the API");
            assert_eq!(word(&value.into(), "SESSION_STATE_"), state.as_str());
        }
    }
}
