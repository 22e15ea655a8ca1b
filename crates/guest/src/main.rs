//! `cloister-guest`: `shim --config FILE` beside a sandbox, `agent` as pid 1 inside (`agent --config FILE` on gVisor), `--version`.

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

use cloister_guest::agent::{self, AgentError};
use cloister_guest::shim::{self, Isolation};

/// What the shell convention has for a wrong command line.
const EXIT_USAGE: u8 = 2;
const USAGE: &str = "usage: cloister-guest shim --config FILE | agent [--config FILE] | --version";

fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(|argument| argument.to_str().unwrap_or_default()).collect();
    match words.as_slice() {
        ["shim", "--config", _] => shim::run(Path::new(&arguments[2]), Isolation::Sandbox),
        ["agent"] => ended(agent::run_as_pid1()),
        ["agent", "--config", _] => ended(agent::run_on_sentry(Path::new(&arguments[2]))),
        #[cfg(debug_assertions)]
        ["shim", "--unisolated", "--config", _] => shim::run(Path::new(&arguments[3]), Isolation::Plain),
        #[cfg(debug_assertions)]
        ["agent", "--unhardened", _] => unhardened_agent(Path::new(&arguments[2])),
        ["--version"] => print(&mut std::io::stdout(), concat!("cloister-guest ", env!("CARGO_PKG_VERSION"))),
        _ => {
            print(&mut std::io::stderr(), USAGE);
            ExitCode::from(EXIT_USAGE)
        }
    }
}

fn print(to: &mut dyn std::io::Write, line: &str) -> ExitCode {
    match writeln!(to, "{line}") {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// The agent returns only when it could not begin.
fn ended(result: Result<std::convert::Infallible, AgentError>) -> ExitCode {
    let error = match result {
        Ok(never) => match never {},
        Err(error) => error,
    };
    let mut line = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(source) = cause {
        line = format!("{line}: {source}");
        cause = source.source();
    }
    print(&mut std::io::stderr(), &line);
    ExitCode::FAILURE
}

/// The agent as a plain process, its configuration in a file: for tests.
#[cfg(debug_assertions)]
fn unhardened_agent(config: &Path) -> ExitCode {
    let read = std::fs::read(config).and_then(|bytes| Ok(serde_json::from_slice(&bytes)?));
    match read {
        Ok(config) => ended(agent::run(config, agent::Hardening::Off)),
        Err(error) => {
            print(&mut std::io::stderr(), &error.to_string());
            ExitCode::FAILURE
        }
    }
}
