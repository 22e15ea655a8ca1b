//! The `cloister` binary: the command line, and the roles that it starts.
//!
//! [`cli`] parses and dispatches; each noun has one file in [`commands`]. What a person asks for goes through
//! [`client`] to the coordinator; `up` is the [`supervisor`] of the roles on one machine. Everything printed goes
//! through [`terminal`], every failure through [`error`], a command line that makes no sense through [`usage`].

mod args;
mod attach;
mod channel;
mod cli;
mod client;
mod commands;
mod context;
mod error;
mod exit;
mod interrupt;
mod supervisor;
mod terminal;
mod transfer;
mod usage;

use std::process;

use clap::Parser;

use crate::cli::{Cli, Invocation};
use crate::error::CliError;
use crate::supervisor::account::Account;
use crate::terminal::Terminal;

fn main() {
    // The roles are started by inode, so that the kernel would call them `exe`. A name that cannot be set is only that.
    let _ = rustix::thread::set_name(c"cloister");
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            process::exit(i32::from(usage::report(&error)));
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
