//! `cloister down`: stops what `up` started.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, BufRead, IsTerminal, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use clap::Args;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::cli::Invocation;
use crate::error::CliError;
use crate::supervisor::layout::{Layout, LayoutArgs};
use crate::supervisor::record::{UpLock, UpRecord};
use crate::supervisor::{host, postgres, require_root};
use crate::terminal::Terminal;

/// How long a stop is waited for: the sum of what `up` gives its children.
const STOP_TIMEOUT: Duration = Duration::from_secs(200);
/// Pause between looks.
const LOOK_PAUSE: Duration = Duration::from_millis(50);

/// Stop Cloister on this machine
///
/// Sandboxes stop and keep their files: the next `up` finds their sessions paused.
#[derive(Debug, Args)]
pub(crate) struct DownArgs {
    #[command(flatten)]
    layout: LayoutArgs,
    /// Remove all data: sessions, database, tokens, logs
    #[arg(long)]
    purge: bool,
    /// Do not ask before removing data
    #[arg(long)]
    yes: bool,
}

impl DownArgs {
    /// Stops it and waits for the end.
    ///
    /// # Errors
    ///
    /// When it does not stop, or data cannot be removed.
    pub(crate) async fn run(self, invocation: &Invocation) -> Result<u8, CliError> {
        let terminal = invocation.terminal;
        require_root("down")?;
        let layout = self.layout.layout()?;
        if self.purge && !self.yes {
            confirm(terminal, &layout)?;
        }
        let was_running = stop(terminal, &layout).await?;
        let left = host::running_shims(&layout);
        if !left.is_empty() {
            let pids: Vec<String> = left.iter().map(i32::to_string).collect();
            return Err(CliError::refused(
                format!(
                    "{} sandboxes still run (shims {}); nothing was removed",
                    left.len(),
                    pids.join(", ")
                ),
                format!(
                    "`{}` says why they did not stop; `kill -9 {}` ends them, and the next `cloister up` tidies up",
                    layout.logs().join("host.log").display(),
                    pids.join(" ")
                ),
            ));
        }
        if self.purge {
            purge(&layout)?;
        }
        let answer = serde_json::json!({"wasRunning": was_running, "purged": self.purge});
        terminal.either(&answer, || {
            let stopped = if was_running && !self.purge {
                "Cloister is down; sessions that ran are paused, `cloister up` finds their files"
            } else if was_running {
                "Cloister is down"
            } else {
                "Cloister was not running"
            };
            if self.purge { format!("{stopped}; its data is removed") } else { stopped.to_owned() }
        })?;
        Ok(0)
    }
}

/// Stops a running `up`, or what a killed one left. Returns whether one ran.
async fn stop(terminal: Terminal, layout: &Layout) -> Result<bool, CliError> {
    if let Some(record) = UpRecord::load(layout)?.filter(UpRecord::is_alive) {
        record.must_be_of(layout)?;
        let progress = terminal.progress(format!("stopping process {}", record.pid));
        kill(Pid::from_raw(record.pid), Signal::SIGTERM)
            .map_err(|errno| CliError::io(format!("stop process {}", record.pid))(errno.into()))?;
        let deadline = Instant::now() + STOP_TIMEOUT;
        while record.is_alive() {
            if Instant::now() >= deadline {
                return Err(CliError::refused(
                    format!("process {} has not stopped after {} s", record.pid, STOP_TIMEOUT.as_secs()),
                    format!(
                        "its logs are in `{}`; `kill -9 {}` ends it, and `cloister down` then cleans up",
                        record.logs_dir.display(),
                        record.pid
                    ),
                ));
            }
            tokio::time::sleep(LOOK_PAUSE).await;
        }
        drop(progress);
        return Ok(true);
    }
    if layout.lock().exists() {
        let _lock = UpLock::take(layout)?;
        stop_leftovers(terminal, layout).await?;
    }
    Ok(false)
}

/// Stops the sandboxes and the PostgreSQL of an `up` that was killed.
async fn stop_leftovers(terminal: Terminal, layout: &Layout) -> Result<(), CliError> {
    let progress = terminal.progress("stopping what a killed `cloister up` left");
    if layout.data_of("host").exists() {
        host::stop_sandboxes(host::host_spec(layout, "auto")?).await;
    }
    postgres::stop_leftover(layout).await?;
    drop(progress);
    let _ = fs::remove_file(layout.record());
    Ok(())
}

fn confirm(terminal: Terminal, layout: &Layout) -> Result<(), CliError> {
    let question = format!("Remove everything in {} and {}?", layout.data.display(), layout.run.display());
    if terminal.json || !io::stdin().is_terminal() {
        return Err(CliError::refused(format!("{question} There is nobody to ask"), "add `--yes`"));
    }
    let mut stderr = io::stderr().lock();
    write!(stderr, "{question} [y/N] ").and_then(|()| stderr.flush()).map_err(CliError::io("ask"))?;
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer).map_err(CliError::io("read the answer"))?;
    if matches!(answer.trim(), "y" | "Y" | "yes") {
        Ok(())
    } else {
        Err(CliError::refused("nothing was removed", ""))
    }
}

/// Removes both directories, if they are ours.
fn purge(layout: &Layout) -> Result<(), CliError> {
    if !layout.data.exists() {
        return Ok(());
    }
    // A mistyped `--data-dir` must not cost somebody's files.
    if !layout.lock().exists() || !layout.tokens().exists() {
        return Err(CliError::refused(
            format!("`{}` is no data directory of `cloister up`: nothing was removed", layout.data.display()),
            "check `--data-dir`",
        ));
    }
    let _lock = UpLock::take(layout)?;
    let remove = |path: &Path| {
        let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
        removed.map_err(CliError::io(format!("remove `{}`", path.display())))
    };
    // Only what `up` and its children made: the directories may be shared with other things.
    for directory in [&layout.run, &layout.data] {
        let entries = match fs::read_dir(directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            entries => entries.map_err(CliError::io(format!("read `{}`", directory.display())))?,
        };
        for entry in entries.flatten().filter(|entry| is_ours(&entry.file_name())) {
            remove(&entry.path())?;
        }
    }
    let _ = fs::remove_dir(&layout.run);
    fs::remove_file(layout.lock()).map_err(CliError::io(format!("remove `{}`", layout.lock().display())))?;
    let _ = fs::remove_dir(&layout.data);
    Ok(())
}

/// Returns whether an entry of the data or run directory was made by `up` or a child: PostgreSQL has files beside its
/// directory too.
fn is_ours(name: &OsStr) -> bool {
    let Some(name) = name.to_str() else { return false };
    let first = name.split('.').next().unwrap_or_default();
    first == "postgres"
        || matches!(name, "coordinator" | "host" | "logs" | "tokens" | "up.json" | "up.json.new")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_data_directory_is_removed_and_only_what_is_ours() {
        let directory = tempfile::tempdir().unwrap();
        let layout = Layout { data: directory.path().join("data"), run: directory.path().join("run") };
        purge(&layout).unwrap();
        fs::create_dir(&layout.data).unwrap();
        fs::write(layout.data.join("mine"), "x").unwrap();
        let error = purge(&layout).unwrap_err();
        assert!(error.to_string().contains("nothing was removed"), "{error}");
        layout.make().unwrap();
        drop(UpLock::take(&layout).unwrap());
        purge(&layout).unwrap();
        assert!(!layout.run.exists());
        assert_eq!(fs::read_dir(&layout.data).unwrap().count(), 1, "a file that is not ours stays");
    }
}
