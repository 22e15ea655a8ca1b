//! `cloister attach`: back to a command that runs.

use clap::Args;
use cloister_api::app::{GetExecRequest, ListExecsRequest};
use cloister_api::common::Exec;

use crate::args::DetachKeysArg;
use crate::attach::Attachment;
use crate::attach::keyboard::Keyboard;
use crate::cli::Invocation;
use crate::client::{self, Client, unary};
use crate::commands::exec;
use crate::error::CliError;
use crate::interrupt::Interrupts;

/// Come back to a command that runs in a session
///
/// Prints what is kept of its output, then what comes. Where the command has a terminal, what is typed goes to it and it
/// takes the size of this one; several may be attached at once. The exit code is the command's own.
#[derive(Debug, Args)]
pub(crate) struct AttachArgs {
    /// Only watch: type nothing, and leave the terminal's size alone
    #[arg(long)]
    read_only: bool,
    /// Offset of the first byte to print; what was printed before is left out
    #[arg(long, value_name = "OFFSET", default_value_t = 0)]
    from: u64,
    #[command(flatten)]
    detach_keys: DetachKeysArg,
    /// Id, unique prefix of it, or name of the session
    session: String,
    /// Id of the exec; the latest one that runs when it is left out
    exec: Option<String>,
}

impl AttachArgs {
    /// Watches the exec and returns its exit code.
    ///
    /// # Errors
    ///
    /// When there is no such exec, or its end is not known.
    pub(crate) async fn run(self, invocation: &Invocation) -> Result<u8, CliError> {
        let terminal = invocation.terminal;
        let client = invocation.client().await?;
        let found = match self.exec {
            Some(exec_id) => {
                let request = GetExecRequest { session: self.session.clone(), exec_id, ..Default::default() };
                let answer = unary!(client, execs, get_exec_with_options, request, client::quick())?;
                answer.exec.into_option().unwrap_or_default()
            }
            None => latest_running(&client, &self.session).await?,
        };
        let mut interrupts = Interrupts::listen()?;
        let has_terminal = found.spec.terminal.is_set() && found.exit.is_unset();
        let keyboard = if has_terminal && !self.read_only {
            Some(Keyboard::take(terminal, self.detach_keys.detach_keys, true)?.without_end())
        } else {
            None
        };
        let attachment =
            Attachment::existing(&client, terminal, &self.session, found, self.from).with_keyboard(keyboard);
        exec::watch(attachment, terminal, &self.session, &mut interrupts).await
    }
}

/// Returns the exec that was started last of those that run.
///
/// # Errors
///
/// When nothing runs.
pub(super) async fn latest_running(client: &Client, session: &str) -> Result<Exec, CliError> {
    let request = ListExecsRequest { session: session.to_owned(), ..Default::default() };
    let answer = unary!(client, execs, list_execs_with_options, request, client::quick())?;
    answer.execs.into_iter().rfind(|exec| exec.exit.is_unset()).ok_or_else(|| {
        CliError::refused(
            format!("nothing runs in session `{session}`"),
            format!("`cloister shell {session}` starts a shell; `cloister logs {session}` prints what the latest command said"),
        )
    })
}
