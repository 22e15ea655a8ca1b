//! `cloister run`: a session for one command, deleted afterwards.

use std::time::{Duration, Instant};

use clap::Args;
use cloister_api::app::{Session, StartExecRequest};
use cloister_api::common::{Exec, ExecExit};

use crate::args::{SandboxArgs, WorkArgs};
use crate::attach::{Attachment, Ended};
use crate::cli::Invocation;
use crate::client::{self, Client, unary};
use crate::commands::{exec, session};
use crate::error::CliError;
use crate::interrupt::Interrupts;
use crate::terminal::{self, Terminal};

/// How long the end of a deletion is waited for; it goes on by itself after that.
const DELETE_WAIT: Duration = Duration::from_secs(20);

/// Run a command in a session of its own and delete it afterwards
///
/// The exit code is the command's own. Ctrl-C is passed on to the command; a second one deletes the session.
#[derive(Debug, Args)]
#[command(override_usage = "cloister run [OPTIONS] -- COMMAND…")]
pub(crate) struct RunArgs {
    /// Keep the session when the command has ended
    #[arg(long)]
    keep: bool,
    /// Say how long each step took, on standard error
    #[arg(short, long)]
    verbose: bool,
    #[command(flatten)]
    sandbox: SandboxArgs,
    #[command(flatten)]
    work: WorkArgs,
}

/// Names each step with its time, with `--verbose`.
struct Steps {
    terminal: Terminal,
    verbose: bool,
    since: Instant,
}

impl Steps {
    fn step(&mut self, text: &str) {
        if self.verbose {
            let micros = self.since.elapsed().as_micros();
            self.terminal.note(format!("cloister: {:>6}.{} ms  {text}", micros / 1000, micros % 1000 / 100));
        }
        self.since = Instant::now();
    }
}

impl RunArgs {
    /// Runs the command and returns its exit code.
    ///
    /// # Errors
    ///
    /// Why it did not run or its end is not known; the session is deleted all the same.
    pub(crate) async fn run(self, invocation: &Invocation) -> Result<u8, CliError> {
        let terminal = invocation.terminal;
        let mut steps = Steps { terminal, verbose: self.verbose, since: Instant::now() };
        let client = invocation.client().await?;
        steps.step("connected");
        let mut interrupts = Interrupts::listen()?;
        let session = session::create(&client, terminal, &self.sandbox, &mut interrupts).await?;
        let isolation = terminal::word(&session.isolation, "ISOLATION_");
        steps.step(&format!("session {} active ({}, isolation {isolation})", session.id, session.backend));

        if self.work.detach {
            return self.start(&client, terminal, &session).await;
        }
        let mut attachment = Attachment::new(&client, terminal, &session.id, self.work.spec())
            .with_keyboard(self.work.keyboard(terminal)?);
        let result = attachment.run(&mut interrupts).await;
        let exec = attachment.exec().cloned();
        // With it the keyboard is given back, before anything is said.
        drop(attachment);
        let result = match result {
            Ok(Ended::Exit(exit)) => Ok(*exit),
            Ok(Ended::Detached) => {
                exec::detached(terminal, &session.id, exec.as_ref().map(|exec| exec.id.as_str()));
                terminal.note(format!(
                    "cloister: the session stays; `cloister session delete {}` ends it",
                    session.id
                ));
                return Ok(0);
            }
            Err(error) => Err(error),
        };
        steps.step(&ended(exec.as_ref(), &result));
        if self.keep {
            terminal.note(format!("cloister: kept session {}", session.id));
        } else {
            session::delete_quietly(&client, terminal, &session.id, DELETE_WAIT).await;
            steps.step("session deleted");
        }
        Ok(exec::report(terminal, &result?))
    }

    /// Starts the command without waiting for it; the session stays.
    async fn start(self, client: &Client, terminal: Terminal, session: &Session) -> Result<u8, CliError> {
        let request = StartExecRequest {
            request_id: client::request_id(),
            session: session.id.clone(),
            spec: self.work.spec().into(),
            ..Default::default()
        };
        match unary!(client, execs, start_exec_with_options, request, client::quick()) {
            Ok(answer) => {
                let text = || format!("{} {}", session.id, answer.exec.id);
                terminal.either(&answer, text)?;
                Ok(0)
            }
            Err(error) => {
                if !self.keep {
                    session::delete_quietly(client, terminal, &session.id, DELETE_WAIT).await;
                }
                Err(error)
            }
        }
    }
}

fn ended(exec: Option<&Exec>, result: &Result<ExecExit, CliError>) -> String {
    let id = exec.map_or("the command", |exec| exec.id.as_str());
    match result {
        Ok(exit) => format!("{id} {} with code {}", terminal::word(&exit.reason, "EXIT_REASON_"), exit.code),
        Err(error) => format!("{id}: {error}"),
    }
}
