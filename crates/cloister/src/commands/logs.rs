//! `cloister logs`: the output of an exec, from any offset, by any process.

use std::time::Duration;

use clap::Args;
use cloister_api::app::{ListExecsRequest, ReadOutputRequest};
use connectrpc::client::CallOptions;
use connectrpc::{ConnectError, ErrorCode};

use crate::attach;
use crate::cli::Invocation;
use crate::client::{self, Client, unary};
use crate::error::CliError;
use crate::terminal::Terminal;

/// Pauses before a cut stream is taken up again; they start over whenever output arrived.
const RETRY_PAUSES_MS: [u64; 6] = [50, 200, 500, 1000, 2000, 4000];

/// Print the output of an exec
#[derive(Debug, Args)]
pub(crate) struct LogsArgs {
    /// Wait for more output until the exec has ended
    #[arg(short, long)]
    follow: bool,
    /// Offset of the first byte to print; both streams are counted together
    #[arg(long, value_name = "OFFSET", default_value_t = 0)]
    from: u64,
    /// Id, unique prefix of it, or name of the session
    session: String,
    /// Id of the exec; the latest one when it is left out
    exec: Option<String>,
}

impl LogsArgs {
    /// Prints what is kept, and follows with `-f`.
    ///
    /// # Errors
    ///
    /// When there is no such exec, or the stream was cut for good.
    pub(crate) async fn run(self, invocation: &Invocation) -> Result<u8, CliError> {
        let client = invocation.client().await?;
        let exec_id = match self.exec {
            Some(exec_id) => exec_id,
            None => latest(&client, &self.session).await?,
        };
        let mut request = ReadOutputRequest {
            session: self.session,
            exec_id,
            from_offset: self.from,
            no_follow: !self.follow,
            ..Default::default()
        };
        let mut cuts = 0;
        loop {
            let before = request.from_offset;
            let Some(cut) = stream(&client, invocation.terminal, &mut request).await? else { return Ok(0) };
            if request.from_offset > before {
                cuts = 0;
            }
            let Some(pause) = RETRY_PAUSES_MS.get(cuts).filter(|_| attach::is_cut(&cut)) else {
                return Err(client.error(&cut));
            };
            cuts += 1;
            tokio::time::sleep(Duration::from_millis(*pause)).await;
        }
    }
}

async fn latest(client: &Client, session: &str) -> Result<String, CliError> {
    let request = ListExecsRequest { session: session.to_owned(), ..Default::default() };
    let answer = unary!(client, execs, list_execs_with_options, request, client::quick())?;
    answer.execs.last().map(|exec| exec.id.clone()).ok_or_else(|| {
        CliError::refused(
            format!("session `{session}` has run nothing yet"),
            format!("start something: `cloister exec {session} -- COMMAND`"),
        )
    })
}

/// Prints one stream; returns the cut, or nothing when it came to its end. Moves the request's offset along.
async fn stream(
    client: &Client,
    terminal: Terminal,
    request: &mut ReadOutputRequest,
) -> Result<Option<ConnectError>, CliError> {
    let streams = client.api().streams();
    let mut stream = match streams.read_output_with_options(request.clone(), CallOptions::default()).await {
        Ok(stream) => stream,
        Err(error) => return Ok(Some(error)),
    };
    loop {
        let message = match stream.message().await {
            Ok(Some(message)) => message.to_owned_message(),
            // Only a reader that does not wait may see an end without an exit record.
            Ok(None) if request.no_follow => return Ok(None),
            Ok(None) => {
                return Ok(Some(ConnectError::new(
                    ErrorCode::Unavailable,
                    "the output ended without an exit record",
                )));
            }
            Err(error) => return Ok(Some(error)),
        };
        if terminal.json {
            terminal.json_line(&message)?;
        }
        let Some(frame) = message.frame.into_option() else { continue };
        let exit = if terminal.json {
            attach::advance(&frame, &mut request.from_offset);
            attach::exit_of(frame)
        } else {
            attach::print_frame(terminal, frame, &mut request.from_offset).await?
        };
        if exit.is_some() {
            return Ok(None);
        }
    }
}
