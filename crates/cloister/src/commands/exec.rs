//! `cloister exec`: a command in a session that is there already.

use clap::Args;
use cloister_api::app::StartExecRequest;
use cloister_api::common::ExecExit;

use crate::args::WorkArgs;
use crate::attach::{Attachment, Ended};
use crate::cli::Invocation;
use crate::client::{self, unary};
use crate::error::CliError;
use crate::exit;
use crate::interrupt::Interrupts;
use crate::terminal::Terminal;

/// Run a command in a session
///
/// The exit code is the command's own. Ctrl-C is passed on to the command; a second one leaves it running. With `-it` the
/// command has a terminal, and every key goes to it but the detach keys.
#[derive(Debug, Args)]
#[command(override_usage = "cloister exec [OPTIONS] SESSION -- COMMAND…")]
pub(crate) struct ExecArgs {
    /// Id, unique prefix of it, or name of the session
    pub(super) session: String,
    #[command(flatten)]
    pub(super) work: WorkArgs,
}

impl ExecArgs {
    /// Runs the command and returns its exit code.
    ///
    /// # Errors
    ///
    /// Why it did not run or its end is not known.
    pub(crate) async fn run(self, invocation: &Invocation) -> Result<u8, CliError> {
        let terminal = invocation.terminal;
        let client = invocation.client().await?;
        if self.work.detach {
            let request = StartExecRequest {
                request_id: client::request_id(),
                session: self.session.clone(),
                spec: self.work.spec().into(),
                ..Default::default()
            };
            let answer = unary!(client, execs, start_exec_with_options, request, client::quick())?;
            terminal.either(&answer, || answer.exec.id.clone())?;
            return Ok(0);
        }
        let mut interrupts = Interrupts::listen()?;
        let attachment = Attachment::new(&client, terminal, &self.session, self.work.spec())
            .with_keyboard(self.work.keyboard(terminal)?);
        watch(attachment, terminal, &self.session, &mut interrupts).await
    }
}

/// Watches an exec to its end and returns its exit code; one that is left is said to run on.
///
/// # Errors
///
/// [`CliError::Interrupted`] when it was left by a second signal, else why its end is not known.
pub(crate) async fn watch(
    mut attachment: Attachment<'_>,
    terminal: Terminal,
    session: &str,
    interrupts: &mut Interrupts,
) -> Result<u8, CliError> {
    let result = attachment.run(interrupts).await;
    let exec = attachment.exec().map(|exec| exec.id.clone());
    // With it the keyboard is given back, before anything is said.
    drop(attachment);
    if let (Err(CliError::Interrupted), Some(exec)) = (&result, &exec) {
        terminal.note(format!("cloister: {exec} runs on; `cloister logs -f {session} {exec}` shows it"));
    }
    match result? {
        Ended::Exit(exit) => Ok(report(terminal, &exit)),
        Ended::Detached => {
            detached(terminal, session, exec.as_deref());
            Ok(0)
        }
    }
}

/// Says how to come back.
pub(crate) fn detached(terminal: Terminal, session: &str, exec: Option<&str>) {
    let exec = exec.unwrap_or_default();
    terminal.note(format!("\ncloister: detached; `cloister attach {session} {exec}` comes back").trim_end());
}

/// Says on standard error what a person should know about the end, and returns the exit code.
pub(crate) fn report(terminal: Terminal, exit: &ExecExit) -> u8 {
    // With `--json` the exit record itself says it all.
    if !terminal.json {
        for notice in exit::notices(exit) {
            terminal.work_error(&notice.text);
            terminal.hint(notice.hint);
        }
    }
    exit::exit_code(exit)
}
