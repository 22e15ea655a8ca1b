//! `cloister up`: everything on this machine, from one command.

use std::fs::OpenOptions;
use std::io::{Seek, SeekFrom};
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use clap::Args;
use cloister_service::telemetry::{self, LogFormat};
use cloister_types::BackendKind;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::process::{Child, Command};

use crate::cli::Invocation;
use crate::error::{CliError, EXIT_FAILED};
use crate::interrupt::Interrupts;
use crate::supervisor::layout::{Layout, LayoutArgs};
use crate::supervisor::record::UpRecord;
use crate::supervisor::{OWN_PROGRAM, Supervisor, UpOptions, own_context, require_root};
use crate::terminal::{Terminal, Tone};

/// Pause between looks at a detached `up` that is starting.
const LOOK_PAUSE: Duration = Duration::from_millis(50);
/// Name of the context when none is given.
const CONTEXT: &str = "local";

/// Start Cloister on this machine
///
/// Supervises PostgreSQL, the coordinator and the host agent until Ctrl-C, and starts again what dies. Needs root.
/// With DATABASE_URL that database is used instead of a private one.
#[derive(Debug, Args)]
pub(crate) struct UpArgs {
    #[command(flatten)]
    layout: LayoutArgs,
    /// Address and port of the API; port 0 takes a free one
    #[arg(
        long,
        value_name = "ADDRESS:PORT",
        env = "CLOISTER_LISTEN",
        hide_env_values = true,
        default_value = "127.0.0.1:8080"
    )]
    listen: SocketAddr,
    /// Backend of sandboxes: `auto`, `gvisor`, `namespace` or `sim`
    #[arg(
        long,
        value_name = "BACKEND", value_parser = parse_backend,
        env = "CLOISTER_SANDBOX_BACKEND",
        hide_env_values = true,
        default_value = "auto"
    )]
    backend: String,
    /// Return when everything is ready; `cloister down` stops it
    #[arg(short, long)]
    detach: bool,
    /// This is the process that `--detach` leaves behind
    #[arg(long, hide = true, conflicts_with = "detach")]
    detached: bool,
}

impl UpArgs {
    /// Runs until told to stop, or returns when ready with `--detach`.
    ///
    /// # Errors
    ///
    /// Why it does not start, with what to do.
    pub(crate) async fn run(self, invocation: &Invocation) -> Result<u8, CliError> {
        let terminal = invocation.terminal;
        require_root("up")?;
        let options = UpOptions {
            layout: self.layout.layout()?,
            listen: self.listen,
            backend: self.backend,
            context: invocation.named_context().unwrap_or(CONTEXT).to_owned(),
        };
        cloister_types::name::validate_name(&options.context)
            .map_err(|error| CliError::refused(error.to_string(), "give `--context` another name"))?;
        if self.detach {
            return detach(terminal, &options).await;
        }
        if self.detached {
            rustix::process::setsid().map_err(|errno| CliError::io("leave the terminal")(errno.into()))?;
        }
        // A second set-up is the only failure; this process has just begun.
        let _ = telemetry::init(LogFormat::Text);
        supervise(terminal, options).await
    }
}

async fn supervise(terminal: Terminal, options: UpOptions) -> Result<u8, CliError> {
    let began = Instant::now();
    let context = options.context.clone();
    let layout = options.layout.clone();
    let mut supervisor = Supervisor::claim(options)?;
    own_context::must_not_be_anothers(&context, &layout).await?;
    let mut interrupts = Interrupts::listen()?;
    let progress = terminal.progress("starting");
    let mut current: Option<(String, Instant)> = None;
    let started = interrupts
        .or_interrupted(supervisor.start(|text| {
            progress.say(text);
            finish_step(terminal, current.replace((text.to_owned(), Instant::now())));
        }))
        .await;
    if started.is_ok() {
        finish_step(terminal, current);
    }
    drop(progress);
    let ready = match started {
        Ok(()) => own_context::write(&context, supervisor.owner(), |text| terminal.warn(text)),
        Err(error) => Err(error),
    };
    let files = match ready {
        Ok(files) => files,
        Err(error) => {
            supervisor.stop(|_| {}).await;
            return Err(error);
        }
    };
    let record = supervisor.record(true);
    let printed = if terminal.json {
        terminal.json(&record)
    } else {
        terminal.line(describe(terminal, &record, &files, began.elapsed()))
    };
    let watched = match printed {
        Ok(()) => {
            supervisor
                .watch(async {
                    let _ = interrupts.next().await;
                })
                .await
        }
        Err(error) => Err(error),
    };
    let progress = terminal.progress("stopping");
    supervisor
        .stop(|text| {
            progress.say(text);
            if !terminal.json {
                terminal.note(format!("cloister: {text}"));
            }
        })
        .await;
    watched.map(|()| 0)
}

fn parse_backend(text: &str) -> Result<String, String> {
    if text != "auto" {
        text.parse::<BackendKind>().map_err(|error| format!("{error}, `auto`"))?;
    }
    Ok(text.to_owned())
}

/// Says how long a step took.
fn finish_step(terminal: Terminal, step: Option<(String, Instant)>) {
    if let Some((text, since)) = step.filter(|_| !terminal.json) {
        terminal.note(format!("cloister: {:>6} ms  {text}", since.elapsed().as_millis()));
    }
}

fn describe(terminal: Terminal, record: &UpRecord, files: &[std::path::PathBuf], took: Duration) -> String {
    let files: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
    [
        format!("{} after {:.1} s", terminal.paint("Cloister is up", Tone::Good), took.as_secs_f64()),
        format!("  API       {}", record.endpoint),
        format!("  data      {}", record.data_dir.display()),
        format!("  run       {}", record.run_dir.display()),
        format!("  logs      {}", record.logs_dir.display()),
        format!("  database  {}", record.database),
        format!("  context   {} in {}", record.context, files.join(", ")),
        "  try       cloister run -- echo hello".to_owned(),
    ]
    .join("\n")
}

/// Leaves an `up` behind and returns when it is ready.
async fn detach(terminal: Terminal, options: &UpOptions) -> Result<u8, CliError> {
    let layout = &options.layout;
    layout.make()?;
    let path = layout.logs().join("up.log");
    let action = || format!("write the log `{}`", path.display());
    let mut log = OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(&path)
        .map_err(CliError::io(action()))?;
    let before = log.seek(SeekFrom::End(0)).map_err(CliError::io(action()))?;
    let output = log.try_clone().map_err(CliError::io(action()))?;
    let mut child = Command::new(OWN_PROGRAM)
        .arg0("cloister")
        .args(["up", "--detached", "--backend", &options.backend, "--context", &options.context])
        .args(["--listen", &options.listen.to_string()])
        .arg("--data-dir")
        .arg(&layout.data)
        .arg("--run-dir")
        .arg(&layout.run)
        .stdin(Stdio::null())
        .stdout(Stdio::from(output))
        .stderr(Stdio::from(log))
        .spawn()
        .map_err(CliError::io("start this program in the background"))?;
    let mut interrupts = Interrupts::listen()?;
    let progress = terminal.progress("starting; the first time takes some seconds");
    let result = interrupts.or_interrupted(wait_ready(layout, &mut child)).await;
    drop(progress);
    match result {
        Ok(Some(record)) => {
            let text = || describe_detached(terminal, &record);
            terminal.either(&record, text)?;
            Ok(0)
        }
        // What it said is the error message, hint included.
        Ok(None) => {
            let bytes = std::fs::read(&path).unwrap_or_default();
            let start = usize::try_from(before).unwrap_or(usize::MAX).min(bytes.len());
            terminal.note(String::from_utf8_lossy(&bytes[start..]).trim_end());
            Ok(EXIT_FAILED)
        }
        Err(error) => {
            if let Some(pid) = child.id().and_then(|pid| i32::try_from(pid).ok()) {
                let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
                let _ = child.wait().await;
            }
            Err(error)
        }
    }
}

/// Returns the record of the child once it is ready, or nothing when it has ended.
async fn wait_ready(layout: &Layout, child: &mut Child) -> Result<Option<UpRecord>, CliError> {
    loop {
        if let Some(record) = UpRecord::load(layout).ok().flatten()
            && record.ready
            && child.id().is_some_and(|pid| i64::from(pid) == i64::from(record.pid))
        {
            return Ok(Some(record));
        }
        match tokio::time::timeout(LOOK_PAUSE, child.wait()).await {
            Err(_) => {}
            Ok(Ok(_)) => return Ok(None),
            Ok(Err(error)) => return Err(CliError::io("wait for the background process")(error)),
        }
    }
}

/// Returns the flags that name these directories; none for the usual ones.
fn layout_flags(record: &UpRecord) -> String {
    let usual = Layout::usual();
    let flag = |name: &str, path: &Path, usual: &Path| {
        if path == usual { String::new() } else { format!(" {name} {}", path.display()) }
    };
    flag("--data-dir", &record.data_dir, &usual.data) + &flag("--run-dir", &record.run_dir, &usual.run)
}

fn describe_detached(terminal: Terminal, record: &UpRecord) -> String {
    [
        format!("{} as process {}", terminal.paint("Cloister is up", Tone::Good), record.pid),
        format!("  API       {}", record.endpoint),
        format!("  data      {}", record.data_dir.display()),
        format!("  run       {}", record.run_dir.display()),
        format!("  logs      {}", record.logs_dir.display()),
        format!("  database  {}", record.database),
        format!("  context   {}", record.context),
        "  try       cloister run -- echo hello".to_owned(),
        format!("  stop      cloister down{}", layout_flags(record)),
    ]
    .join("\n")
}
