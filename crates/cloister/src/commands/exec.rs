//! `cloister exec`: a command in a session that is there already.

use clap::Args;
use cloister_api::app::StartExecRequest;
use cloister_api::common::ExecExit;

use crate::args::WorkArgs;
use crate::attach::Attachment;
use crate::cli::Invocation;
use crate::client::{self, unary};
use crate::error::CliError;
use crate::exit;
use crate::interrupt::Interrupts;
use crate::terminal::Terminal;

/// Run a command in a session
///
/// The exit code is the command's own. Ctrl-C is passed on to the command; a second one leaves it running.
#[derive(Debug, Args)]
#[command(override_usage = "cloister exec [OPTIONS] SESSION -- COMMAND…")]
pub(crate) struct ExecArgs {
    /// Id, unique prefix of it, or name of the session
    session: String,
    #[command(flatten)]
    work: WorkArgs,
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
        let mut attachment = Attachment::new(&client, terminal, &self.session, self.work.spec());
        let result = attachment.run(&mut interrupts).await;
        if let (Err(CliError::Interrupted), Some(exec)) = (&result, attachment.exec()) {
            terminal.note(format!(
                "cloister: {} runs on; `cloister logs -f {} {}` shows it",
                exec.id, self.session, exec.id
            ));
        }
        Ok(report(terminal, &result?))
    }
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
