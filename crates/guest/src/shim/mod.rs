//! The shim: one process beside each sandbox, which outlives the host agent that started it.
//!
//! ```text
//!  lock ──► build (mounts, namespaces, pid 1) ──► pid 1 answers ──► socket ──► `ShimReport` on stdout ──► serve
//!                                                                                                          │
//!      exit ◄── socket removed ◄── watchers answered ◄── exit.json ◄── execs ended ◄── pid 1 ended ◄────────┘
//! ```
//!
//! It keeps three promises to whoever looks later: an exec's output and exit are in its [`crate::spool`], how the
//! sandbox ended is in `exit.json`, and a `lock` that can be taken proves that the shim is gone, and with it the
//! sandbox, because pid 1 dies with its parent.
//!
//! One thread. The build comes before the async runtime, because a process may change its namespaces only alone.
//! Signals that a terminal or a service manager sends to a group are ignored: the sandbox ends by a request, or by
//! itself.

pub mod config;
mod counters;
mod exec;
mod exec_table;
mod identity;
pub(crate) mod lifecycle;
#[cfg(debug_assertions)]
mod plain;
mod serve;
mod stdio;
mod stream;

use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::ExitCode;

use rustix::fs::{FlockOperation, Mode, OFlags};

use self::config::{ShimConfig, ShimReport};
use crate::build::{self, StartedSandbox};
use crate::fault::POINTS;

/// How the sandbox is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isolation {
    /// By [`build::build_and_start`].
    Sandbox,
    /// Not at all: pid 1 is a plain child, for tests of what does not depend on isolation.
    #[cfg(debug_assertions)]
    Plain,
}

/// A step of the start that failed.
struct StartError {
    step: String,
    message: String,
}

impl StartError {
    fn new(step: &str, error: &dyn std::error::Error) -> Self {
        let mut message = error.to_string();
        let mut cause = error.source();
        while let Some(source) = cause {
            message = format!("{message}: {source}");
            cause = source.source();
        }
        Self { step: step.to_owned(), message }
    }

    fn at(step: &'static str) -> impl FnOnce(rustix::io::Errno) -> Self {
        move |errno| Self::new(step, &io::Error::from(errno))
    }
}

/// Runs a shim to the end of its sandbox.
pub fn run(config: &Path, isolation: Isolation) -> ExitCode {
    match start(config, isolation) {
        Ok((config, sandbox, lock)) => {
            let code = lifecycle::run(config, sandbox);
            drop(lock);
            code
        }
        Err(error) => {
            report(&ShimReport::Failed { step: error.step, message: error.message });
            ExitCode::FAILURE
        }
    }
}

fn start(path: &Path, isolation: Isolation) -> Result<(ShimConfig, StartedSandbox, OwnedFd), StartError> {
    stdio::detach();
    let bytes = std::fs::read(path).map_err(|error| StartError::new("read the configuration", &error))?;
    let config: ShimConfig =
        serde_json::from_slice(&bytes).map_err(|error| StartError::new("read the configuration", &error))?;
    let is_for_tests = !config.defences_off.is_empty() || config.fault_file.is_some();
    if is_for_tests && !cfg!(debug_assertions) {
        return Err(StartError {
            step: "read the configuration".to_owned(),
            message: "this build leaves no defence off and has no fault points".to_owned(),
        });
    }
    cloister_fault::set_file(config.fault_file.clone());
    let lock = take_lock(&config.sandbox_dir.join("lock"))?;
    POINTS.reach("shim_after_lock");
    let started = match isolation {
        Isolation::Sandbox => build::build_and_start(&config)
            .map_err(|error| StartError { message: chain(&error), step: error.step })?,
        #[cfg(debug_assertions)]
        Isolation::Plain => {
            plain::start(&config).map_err(|error| StartError::new("start a plain agent", &error))?
        }
    };
    Ok((config, started, lock))
}

fn chain(error: &dyn std::error::Error) -> String {
    StartError::new("", error).message
}

/// Takes the lock that says a shim lives; the kernel gives it back however this process ends.
fn take_lock(path: &Path) -> Result<OwnedFd, StartError> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let lock =
        rustix::fs::open(path, flags, Mode::from_raw_mode(0o600)).map_err(StartError::at("open the lock"))?;
    rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive)
        .map_err(StartError::at("take the lock"))?;
    Ok(lock)
}

/// Prints the one line that the host agent waits for, and lets go of the standard descriptors.
fn report(report: &ShimReport) {
    let mut line = serde_json::to_vec(report).unwrap_or_default();
    line.push(b'\n');
    // A host agent that died meanwhile finds the socket, or the failure's absence of one.
    let _ = io::stdout().write_all(&line).and_then(|()| io::stdout().flush());
    stdio::let_go();
}
