//! The guest agent: pid 1 of a sandbox. It starts programs, streams what they print, and reaps every child.
//!
//! ```text
//!  shim ──connect──► listener ── one task a connection
//!                                  ├─ StartExec     fork, harden, exec; then Output… Exit        (exec)
//!                                  ├─ WriteStdin…   into the exec's pipe, answered by offset     (stdin)
//!                                  ├─ SignalExec    to the exec's process group
//!                                  ├─ ResizeExec    of the exec's terminal
//!                                  ├─ OpenChannel   files: a process of its own; a port: its bytes (channel)
//!                                  ├─ GetSandbox    the isolation facts
//!                                  └─ StopSandbox   SIGTERM, grace, SIGKILL, exit
//! ```
//!
//! One thread, no thread pool. What holds:
//! - An exec belongs to its connection: when the shim goes away, the exec's process group is killed.
//! - Of a program's output at most one frame is in memory. While the shim does not read, the pipe fills and the
//!   program waits; signals and time limits still reach it, because they do not travel behind the output.
//! - A program that cannot be started is an exec that ended as `NotStarted`, never an error of the agent.
//! - A malformed frame closes its connection and nothing else.
//! - It signals a process group only while the group's leader has not been reaped, so that the number cannot belong
//!   to a stranger.

mod channel;
mod environment;
mod exec;
mod launch;
mod output;
mod reaper;
pub(crate) mod sentry;
mod serve;
mod stdin;
mod stop;
mod streams;
mod terminal;
mod user;

use std::cell::RefCell;
use std::collections::HashMap;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::net::UnixListener as StdListener;
use std::rc::Rc;

use rustix::fs::{Mode, OFlags};
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Notify, Semaphore};
use tokio::task::LocalSet;

use crate::harden::{self, AgentConfig, HardenError};

use self::exec::RunningExec;
use self::reaper::Reaper;
pub use self::sentry::{harden_on_sentry, run_on_sentry};

/// Why the agent could not begin to serve.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// A defence is missing: nothing may run.
    #[error("harden the guest agent")]
    Harden(#[from] HardenError),
    /// The kernel refused something the agent needs.
    #[error("{operation}")]
    Start {
        /// What was tried.
        operation: &'static str,
        /// Why.
        source: std::io::Error,
    },
}

impl AgentError {
    fn start(operation: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Start { operation, source }
    }
}

/// Whether execs are hardened. Only a build with debug assertions can be told not to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hardening {
    /// Every defence, as configured.
    Full,
    /// None at all: tests of what does not depend on them, as a plain process.
    #[cfg(debug_assertions)]
    Off,
}

/// What every task of the agent shares.
struct Agent {
    config: AgentConfig,
    hardening: Hardening,
    reaper: Reaper,
    execs: RefCell<HashMap<String, Rc<RunningExec>>>,
    /// Told whenever an exec has left `execs`.
    exec_ended: Notify,
    dev_null: OwnedFd,
    /// Room for processes that serve files.
    file_workers: Semaphore,
}

/// Reads what the builder left, hardens this process and serves until a stop. Returns only on an error.
///
/// # Errors
///
/// [`AgentError`]: nothing was accepted, and the process must exit.
pub fn run_as_pid1() -> Result<std::convert::Infallible, AgentError> {
    let config = harden::load_agent_config()?;
    harden::pid1_apply(&config)?;
    // Fails here and not at the first exec when the kernel cannot harden one.
    harden::prepare_exec(&config, 0, 0, &[])?;
    run(config, Hardening::Full)
}

/// Serves the listener of `config` until a stop. Returns only on an error.
///
/// # Errors
///
/// [`AgentError::Start`].
pub fn run(config: AgentConfig, hardening: Hardening) -> Result<std::convert::Infallible, AgentError> {
    ensure_standard_descriptors()?;
    let listener = take_listener(config.listener_fd)?;
    let dev_null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        .map_err(|errno| AgentError::start("open `/dev/null`")(errno.into()))?;
    #[cfg(debug_assertions)]
    if hardening == Hardening::Off {
        // As the builder does for pid 1.
        rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
            .map_err(|errno| AgentError::start("die with the shim")(errno.into()))?;
    }
    if std::process::id() != 1 {
        // Without a process namespace of its own the agent still reaps what its execs leave behind.
        rustix::process::set_child_subreaper(rustix::process::Pid::from_raw(1))
            .map_err(|errno| AgentError::start("become a subreaper")(errno.into()))?;
    }
    let agent = Rc::new(Agent {
        config,
        hardening,
        reaper: Reaper::default(),
        execs: RefCell::default(),
        exec_ended: Notify::new(),
        dev_null,
        file_workers: Semaphore::new(channel::FILE_WORKERS_MAX),
    });
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build()
        .map_err(AgentError::start("start the runtime"))?;
    LocalSet::new().block_on(&runtime, async move {
        let listener = UnixListener::from_std(listener).map_err(AgentError::start("watch the listener"))?;
        let mut child_ended =
            signal(SignalKind::child()).map_err(AgentError::start("watch for ended children"))?;
        let reaping = Rc::clone(&agent);
        tokio::task::spawn_local(async move {
            while child_ended.recv().await.is_some() {
                reaping.reaper.reap();
            }
        });
        serve::accept(agent, listener).await
    })
}

/// Descriptors 0 to 2 are never used for anything else, so that an exec can put its own there.
fn ensure_standard_descriptors() -> Result<(), AgentError> {
    loop {
        let fd = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .map_err(|errno| AgentError::start("open `/dev/null`")(errno.into()))?;
        if std::os::fd::AsRawFd::as_raw_fd(&fd) > 2 {
            return Ok(());
        }
        // It filled a hole below 3 and stays there.
        let _ = std::os::fd::IntoRawFd::into_raw_fd(fd);
    }
}

#[expect(unsafe_code, reason = "the listener is inherited as a number")]
fn take_listener(fd: std::os::fd::RawFd) -> Result<StdListener, AgentError> {
    // SAFETY: `fd` is at or above 100 by the config's contract and no other value of this process owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC)
        .map_err(|errno| AgentError::start("take over the listener")(errno.into()))?;
    let listener = StdListener::from(fd);
    listener.set_nonblocking(true).map_err(AgentError::start("take over the listener"))?;
    Ok(listener)
}
