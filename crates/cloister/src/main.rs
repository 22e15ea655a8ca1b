//! The `cloister` binary: the command line, and the roles that it starts.
//!
//! [`cli`] parses and dispatches; each noun has one file in [`commands`]. What a person asks for goes through
//! [`client`] to the coordinator; `up` is the [`supervisor`] of the roles on one machine. Everything printed goes
//! through [`terminal`], every failure through [`error`].

mod args;
mod attach;
mod cli;
mod client;
mod commands;
mod context;
mod error;
mod exit;
mod interrupt;
mod supervisor;
mod terminal;

use std::process;

use clap::Parser;
use clap::error::ErrorKind;

use crate::cli::{Cli, Invocation};
use crate::error::{CliError, EXIT_CLOISTER, EXIT_FAILED, EXIT_USAGE};
use crate::supervisor::account::Account;
use crate::terminal::Terminal;

fn main() {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // A closed standard error is no reason to exit otherwise.
            let _ = error.print();
            if let Some(hint) = usage_hint(&error, &arguments()) {
                Terminal::new(false).hint(hint);
            }
            process::exit(i32::from(usage_exit_code(&error)));
        }
    };
    let invocation = Invocation::new(&cli.global);
    let is_work = cli.command.is_work();
    if let Some(Err(error)) = cli.global.run_as.map(Account::become_it) {
        process::exit(i32::from(finish(invocation.terminal, is_work, Err(error))));
    }
    // The main thread is where children are started: a child that dies with its parent dies with the *thread*
    // that started it, and only this one lives as long as the process.
    let runtime = if cli.command.is_role() {
        tokio::runtime::Builder::new_multi_thread().enable_all().build()
    } else {
        tokio::runtime::Builder::new_current_thread().enable_all().build()
    };
    let code = match runtime {
        Ok(runtime) => {
            let result = runtime.block_on(cli.command.run(&invocation));
            finish(invocation.terminal, is_work, result)
        }
        Err(source) => finish(invocation.terminal, is_work, Err(CliError::io("start the runtime")(source))),
    };
    // Not by returning: a thread that waits for standard input would hold the process up.
    process::exit(i32::from(code));
}

/// Says what went wrong and returns the exit code.
fn finish(terminal: Terminal, is_work: bool, result: Result<u8, CliError>) -> u8 {
    match result {
        Ok(code) => code,
        Err(error) => {
            let error = if is_work { error.of_work() } else { error };
            if !matches!(error, CliError::BrokenPipe | CliError::Interrupted) {
                terminal.error(&error);
            }
            error.exit_code()
        }
    }
}

/// Returns the exit code of a command line that was not understood, or of `--help`.
fn usage_exit_code(error: &clap::Error) -> u8 {
    if !error.use_stderr() {
        return 0;
    }
    if error.exit_code() != 2 {
        return EXIT_FAILED;
    }
    // The codes of `run` and `exec` are the command's own: a usage error must not look like one of those.
    if verb_of_work(&arguments()).is_some() { EXIT_CLOISTER } else { EXIT_USAGE }
}

/// Returns the command line; what is no text in it is shown as what it is not.
fn arguments() -> Vec<String> {
    std::env::args_os().map(|argument| argument.to_string_lossy().into_owned()).collect()
}

/// Returns `run` or `exec` when the command line begins with it.
fn verb_of_work(arguments: &[String]) -> Option<&str> {
    let verb = arguments.iter().skip(1).find(|argument| !argument.starts_with('-'));
    verb.map(String::as_str).filter(|verb| matches!(*verb, "run" | "exec"))
}

/// Returns what to do where people leave out the `--` that other tools do not ask for.
fn usage_hint(error: &clap::Error, arguments: &[String]) -> Option<String> {
    let verb = verb_of_work(arguments)?;
    let is_of_command =
        matches!(error.kind(), ErrorKind::UnknownArgument | ErrorKind::MissingRequiredArgument);
    if !is_of_command || arguments.iter().any(|argument| argument == "--") {
        return None;
    }
    let before = if verb == "exec" { "exec SESSION" } else { "run" };
    Some(format!("put `--` before the command that is to run inside: `cloister {before} -- ls -la`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_without_dashes_before_it_gets_the_hint_and_other_mistakes_do_not() {
        let hint = |arguments: &[&str]| {
            let arguments: Vec<String> = arguments.iter().map(|argument| (*argument).to_owned()).collect();
            let error = Cli::try_parse_from(&arguments).unwrap_err();
            usage_hint(&error, &arguments)
        };
        assert!(
            hint(&["cloister", "exec", "box", "ls"]).is_some_and(|hint| hint.contains("exec SESSION -- "))
        );
        assert!(
            hint(&["cloister", "--json", "run", "ls", "-la"]).is_some_and(|hint| hint.contains("run -- "))
        );
        assert!(hint(&["cloister", "run"]).is_some());
        assert_eq!(hint(&["cloister", "run", "--no-such-flag", "--", "ls"]), None);
        assert_eq!(hint(&["cloister", "run", "--timeout", "never", "--", "ls"]), None);
        assert_eq!(hint(&["cloister", "session", "create", "box"]), None);
    }
}
