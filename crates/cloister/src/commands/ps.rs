//! `cloister ps`: what runs.

use std::time::SystemTime;

use clap::Args;
use cloister_api::app::ListExecsRequest;
use cloister_api::common::Exec;

use crate::cli::Invocation;
use crate::client::{self, unary};
use crate::commands::session;
use crate::error::CliError;
use crate::exit;
use crate::terminal::{Table, age, word};

/// List sessions, or the execs of one session
#[derive(Debug, Args)]
pub(crate) struct PsArgs {
    /// Id, unique prefix of it, or name of the session whose execs to list
    session: Option<String>,
}

impl PsArgs {
    /// Prints the list.
    ///
    /// # Errors
    ///
    /// What the coordinator answered.
    pub(crate) async fn run(self, invocation: &Invocation) -> Result<u8, CliError> {
        let client = invocation.client().await?;
        let Some(session) = self.session else {
            return session::print_list(&client, invocation.terminal, session::ListFilter::default()).await;
        };
        let request = ListExecsRequest { session, ..Default::default() };
        let answer = unary!(client, execs, list_execs_with_options, request, client::quick())?;
        invocation.terminal.either(&answer, || exec_table(&answer.execs))?;
        Ok(0)
    }
}

fn exec_table(execs: &[Exec]) -> String {
    let mut table = Table::new(["EXEC", "STATE", "EXIT", "PID", "AGE", "COMMAND"]);
    let now = SystemTime::now();
    for exec in execs {
        let exit =
            exec.exit.as_option().map_or_else(|| "-".to_owned(), |exit| exit::exit_code(exit).to_string());
        let state = match exec.exit.as_option() {
            Some(exit) => word(&exit.reason, "EXIT_REASON_"),
            None => word(&exec.state, "EXEC_STATE_"),
        };
        let pid = if exec.pid == 0 { "-".to_owned() } else { exec.pid.to_string() };
        let command: String = exec.spec.argv.join(" ").chars().take(60).collect();
        table.row([exec.id.clone(), state, exit, pid, age(exec.started_at.as_option(), now), command]);
    }
    table.render()
}
