//! One supervised child: started, started again with growing pauses when it dies, stopped when told.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use cloister_service::CancellationToken;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::process::{Child, Command};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::error::CliError;
use crate::supervisor::log;

/// First pause before a child is started again.
const BACKOFF_MIN: Duration = Duration::from_millis(100);
/// Longest pause.
const BACKOFF_MAX: Duration = Duration::from_secs(5);

/// How a child is started.
#[derive(Debug, Clone)]
pub(crate) struct ChildSpec {
    /// `coordinator` or `host`.
    pub(crate) name: &'static str,
    /// What is started.
    pub(crate) program: PathBuf,
    /// What it is called in lists of processes.
    pub(crate) shown_as: &'static str,
    /// Its arguments.
    pub(crate) arguments: Vec<OsString>,
    /// Variables on top of our own environment.
    pub(crate) set: Vec<(&'static str, OsString)>,
    /// Variables of ours that are not its business.
    pub(crate) unset: &'static [&'static str],
    /// Where its log goes.
    pub(crate) logs: PathBuf,
    /// How long it may take to stop.
    pub(crate) grace: Duration,
}

/// What is known about a child.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct ChildState {
    /// Its process; unset between two of them.
    pub(crate) pid: Option<i32>,
    /// How often it was started again.
    pub(crate) restarts: u32,
}

impl ChildSpec {
    /// Starts one process with its log.
    ///
    /// A child that is to die with us dies with the thread that calls this: call it on the main thread.
    ///
    /// # Errors
    ///
    /// [`CliError::Io`].
    pub(crate) fn spawn(&self) -> Result<Child, CliError> {
        let output = log::start(&self.logs, self.name)?;
        let action = format!("start the {}", self.name);
        let errors = output.try_clone().map_err(CliError::io(action.clone()))?;
        let mut command = Command::new(&self.program);
        command
            .arg0(self.shown_as)
            .args(&self.arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::from(std::os::fd::OwnedFd::from(output)))
            .stderr(Stdio::from(std::os::fd::OwnedFd::from(errors)))
            .current_dir("/")
            // Ctrl-C on our terminal is for us: we stop the children in order.
            .process_group(0)
            .kill_on_drop(true);
        for name in self.unset {
            command.env_remove(name);
        }
        for (name, value) in &self.set {
            command.env(name, value);
        }
        command.spawn().map_err(CliError::io(action))
    }

    /// Keeps the child running until `stop`, then ends it. `state` always says what there is.
    pub(crate) async fn supervise(self, stop: CancellationToken, state: watch::Sender<ChildState>) {
        let mut backoff = BACKOFF_MIN;
        loop {
            let started = Instant::now();
            match self.spawn() {
                Ok(mut child) => {
                    state.send_modify(|state| state.pid = child.id().and_then(|pid| i32::try_from(pid).ok()));
                    tokio::select! {
                        status = child.wait() => {
                            state.send_modify(|state| state.pid = None);
                            let status = status.map_or_else(|error| error.to_string(), |status| status.to_string());
                            tracing::warn!(role = self.name, status, "ended; it is started again");
                        }
                        () = stop.cancelled() => {
                            end(self.name, &mut child, self.grace).await;
                            state.send_modify(|state| state.pid = None);
                            return;
                        }
                    }
                }
                Err(error) => tracing::error!(role = self.name, %error, "not started"),
            }
            // `backoff` is twice the pause before this start. One that dies as it starts comes back slower and slower,
            // one that lived longer than it was waited for comes back at once.
            if started.elapsed() >= backoff / 2 {
                backoff = BACKOFF_MIN;
            }
            tokio::select! {
                () = tokio::time::sleep(backoff) => {}
                () = stop.cancelled() => return,
            }
            backoff = (backoff * 2).min(BACKOFF_MAX);
            state.send_modify(|state| state.restarts += 1);
        }
    }
}

/// Asks a child to end, and kills it when it takes too long.
pub(crate) async fn end(name: &str, child: &mut Child, grace: Duration) {
    let Some(pid) = child.id().and_then(|pid| i32::try_from(pid).ok()) else { return };
    // It may have just ended: then there is nobody to tell.
    let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
    if tokio::time::timeout(grace, child.wait()).await.is_err() {
        tracing::warn!(role = name, grace_secs = grace.as_secs(), "did not stop in time and is killed");
        let _ = child.kill().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(directory: &std::path::Path, script: &str) -> ChildSpec {
        ChildSpec {
            name: "child",
            program: "/bin/sh".into(),
            shown_as: "sh",
            arguments: vec!["-c".into(), script.into()],
            set: vec![("MARK", "set".into())],
            unset: &["HOME"],
            logs: directory.to_owned(),
            grace: Duration::from_secs(10),
        }
    }

    async fn lines(directory: &std::path::Path, count: usize) {
        while log::tail(directory, "child", 9).lines().count() < count {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_child_that_dies_is_started_again_and_ends_when_told() {
        let directory = tempfile::tempdir().unwrap();
        let script =
            "echo started $MARK ${HOME-none}; trap 'echo ended; exit 0' TERM; while :; do sleep 0.05; done";
        let (sender, mut state) = watch::channel(ChildState::default());
        let stop = CancellationToken::new();
        let supervise = spec(directory.path(), script).supervise(stop.clone(), sender);
        let test = async {
            let first = state.wait_for(|state| state.pid.is_some()).await.unwrap().pid.unwrap();
            lines(directory.path(), 1).await;
            kill(Pid::from_raw(first), Signal::SIGKILL).unwrap();
            let second = *state.wait_for(|state| state.pid.is_some_and(|pid| pid != first)).await.unwrap();
            assert_eq!(second.restarts, 1);
            // Told to end only once it listens.
            lines(directory.path(), 2).await;
            stop.cancel();
            state.wait_for(|state| state.pid.is_none()).await.unwrap();
        };
        tokio::time::timeout(Duration::from_secs(30), async { tokio::join!(supervise, test) }).await.unwrap();
        let log = log::tail(directory.path(), "child", 9);
        assert!(log.starts_with("started set none\nstarted set none"), "{log}");
    }

    #[tokio::test]
    async fn a_child_that_does_not_end_is_killed() {
        let directory = tempfile::tempdir().unwrap();
        let mut child =
            spec(directory.path(), "trap '' TERM; echo deaf; while :; do sleep 0.05; done").spawn().unwrap();
        while !log::tail(directory.path(), "child", 1).contains("deaf") {
            tokio::task::yield_now().await;
        }
        end("child", &mut child, Duration::from_millis(200)).await;
        assert!(child.try_wait().unwrap().is_some());
    }
}
