//! `cloister kill`: a signal for a command that runs.

use clap::Args;
use cloister_api::app::SignalExecRequest;
use nix::sys::signal::Signal;

use crate::cli::Invocation;
use crate::client::{self, unary};
use crate::commands::attach::latest_running;
use crate::error::CliError;

/// Send a signal to a command that runs in a session
///
/// It reaches the command and everything it started in the same process group. One that has ended is no error.
#[derive(Debug, Args)]
pub(crate) struct KillArgs {
    /// Name or number of the signal
    #[arg(short, long, value_name = "SIGNAL", value_parser = parse_signal, default_value = "TERM")]
    signal: i32,
    /// Id, unique prefix of it, or name of the session
    session: String,
    /// Id of the exec; the latest one that runs when it is left out
    exec: Option<String>,
}

impl KillArgs {
    /// Sends the signal and prints the exec's id.
    ///
    /// # Errors
    ///
    /// When there is no such exec.
    pub(crate) async fn run(self, invocation: &Invocation) -> Result<u8, CliError> {
        let client = invocation.client().await?;
        let exec_id = match self.exec {
            Some(exec_id) => exec_id,
            None => latest_running(&client, &self.session).await?.id,
        };
        let request = SignalExecRequest {
            session: self.session,
            exec_id: exec_id.clone(),
            signal: self.signal,
            ..Default::default()
        };
        let answer = unary!(client, execs, signal_exec_with_options, request, client::quick())?;
        invocation.terminal.either(&answer, || exec_id)?;
        Ok(0)
    }
}

/// Parses `TERM`, `SIGTERM`, `term` or `15`; real-time signals have numbers only.
fn parse_signal(text: &str) -> Result<i32, String> {
    if let Ok(number) = text.parse::<i32>() {
        let is_signal = (1..=64).contains(&number);
        return is_signal.then_some(number).ok_or_else(|| format!("{number} is no signal: 1 to 64 are"));
    }
    let name = text.to_uppercase();
    let name = if name.starts_with("SIG") { name } else { format!("SIG{name}") };
    name.parse::<Signal>()
        .map(|signal| signal as i32)
        .map_err(|_| format!("`{text}` is no signal: `kill -l` lists their names"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_named_as_people_do() {
        for text in ["TERM", "SIGTERM", "term", "15"] {
            assert_eq!(parse_signal(text), Ok(15), "{text}");
        }
        assert_eq!(parse_signal("34"), Ok(34));
        for text in ["0", "65", "-9", "NOPE", ""] {
            assert!(parse_signal(text).is_err(), "`{text}` was accepted");
        }
    }
}
