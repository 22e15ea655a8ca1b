//! `cloister status`: what runs on this machine.

use clap::Args;
use cloister_api::app::WhoAmIRequest;
use serde::Serialize;

use crate::cli::Invocation;
use crate::client::{self, Client};
use crate::error::{CliError, EXIT_NOT_RUNNING};
use crate::supervisor::layout::LayoutArgs;
use crate::supervisor::record::UpRecord;
use crate::terminal::{Table, Terminal, Tone};

/// Show what runs on this machine
///
/// The exit code is 0 when everything runs and the API answers, 3 when not.
#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    layout: LayoutArgs,
}

#[derive(Debug, Serialize)]
struct Status {
    running: bool,
    up: Option<UpRecord>,
    api: Api,
}

/// Whether the coordinator answers us.
#[derive(Debug, Serialize)]
struct Api {
    endpoint: Option<String>,
    reachable: bool,
    version: Option<String>,
    error: Option<String>,
}

impl StatusArgs {
    /// Prints it.
    ///
    /// # Errors
    ///
    /// Only when `up.json` is there and cannot be read.
    pub(crate) async fn run(self, invocation: &Invocation) -> Result<u8, CliError> {
        let terminal = invocation.terminal;
        let layout = self.layout.layout()?;
        let up = UpRecord::load(&layout)?.filter(UpRecord::is_alive);
        let running =
            up.as_ref().is_some_and(|up| up.ready && up.roles.iter().all(|role| role.pid.is_some()));
        let api = api(invocation, up.as_ref()).await;
        let status = Status { running, up, api };
        terminal.either(&status, || describe(terminal, &status))?;
        let elsewhere =
            invocation.target().ok().filter(|target| status.api.endpoint.as_ref() != Some(&target.endpoint));
        if let (Some(elsewhere), Some(up)) = (elsewhere, &status.up) {
            terminal.warn(format!(
                "commands go to `{}`, which is not the one that runs here",
                elsewhere.endpoint
            ));
            terminal.hint(format!("`cloister context use {}` chooses this one", up.context));
        }
        Ok(if status.running && status.api.reachable { 0 } else { EXIT_NOT_RUNNING })
    }
}

async fn api(invocation: &Invocation, up: Option<&UpRecord>) -> Api {
    let target = match invocation.target_here(up) {
        Ok(target) => target,
        Err(error) => {
            return Api { endpoint: None, reachable: false, version: None, error: Some(error.to_string()) };
        }
    };
    let asked = async {
        let client = Client::connect_once(&target).await?;
        let answer =
            client.api().tokens().who_am_i_with_options(WhoAmIRequest::default(), client::quick()).await;
        answer.map(|answer| answer.into_owned().version).map_err(|error| client.error(&error))
    };
    let (version, error) = match asked.await {
        Ok(version) => (Some(version), None),
        Err(error) => (None, Some(error.to_string())),
    };
    Api { endpoint: Some(target.endpoint), reachable: version.is_some(), version, error }
}

fn describe(terminal: Terminal, status: &Status) -> String {
    let mut lines = Vec::new();
    match &status.up {
        None => lines.push(terminal.paint("Cloister does not run on this machine", Tone::Warning)),
        Some(up) => {
            let state = if status.running {
                terminal.paint("runs", Tone::Good)
            } else {
                terminal.paint("is starting, stopping or has lost a role", Tone::Warning)
            };
            lines.push(format!("Cloister {} {state} as process {}", up.version, up.pid));
            lines.push(format!("  API       {}", up.endpoint));
            lines.push(format!("  data      {}", up.data_dir.display()));
            lines.push(format!("  run       {}", up.run_dir.display()));
            lines.push(format!("  logs      {}", up.logs_dir.display()));
            let socket = up.database_socket_dir().map(|path| format!(", sockets in {}", path.display()));
            lines.push(format!("  database  {}{}", up.database, socket.unwrap_or_default()));
            let mut table = Table::new(["ROLE", "PID", "RESTARTS"]);
            for role in &up.roles {
                let pid = role.pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string());
                table.row([role.name.clone(), pid, role.restarts.to_string()]);
            }
            lines.push(table.render());
        }
    }
    let api = &status.api;
    let answer = match (&api.version, &api.error) {
        (Some(version), _) => format!("answers, version {version}"),
        (None, Some(error)) => error.clone(),
        (None, None) => "not asked".to_owned(),
    };
    lines.push(format!("API {}: {answer}", api.endpoint.as_deref().unwrap_or("(none configured)")));
    lines.join("\n")
}
