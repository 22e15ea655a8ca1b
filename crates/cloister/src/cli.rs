//! The command line: what there is and how it is dispatched.

use clap::{Parser, Subcommand};

use crate::client::Client;
use crate::commands;
use crate::context::{self, ContextFile, Overrides, Target};
use crate::error::CliError;
use crate::supervisor::account::Account;
use crate::supervisor::record::UpRecord;
use crate::terminal::Terminal;

/// Runs programs and AI agents, each alone in a sandbox
#[derive(Debug, Parser)]
#[command(name = "cloister", version, propagate_version = true)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: GlobalArgs,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Flags that every command takes.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct GlobalArgs {
    /// Print the API's answer as JSON; errors too, on standard error
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// Context to use instead of the current one
    #[arg(long, global = true, env = context::CONTEXT_ENV, hide_env_values = true, value_name = "NAME")]
    pub(crate) context: Option<String>,
    /// Coordinator to speak to, for example `http://127.0.0.1:8080`
    #[arg(long, global = true, env = context::ENDPOINT_ENV, hide_env_values = true, value_name = "URL")]
    pub(crate) endpoint: Option<String>,
    /// Become this account before anything else
    #[arg(long, global = true, hide = true, value_name = "UID:GID")]
    pub(crate) run_as: Option<Account>,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Up(commands::up::UpArgs),
    Down(commands::down::DownArgs),
    Status(commands::status::StatusArgs),
    Run(commands::run::RunArgs),
    Exec(commands::exec::ExecArgs),
    Shell(commands::shell::ShellArgs),
    Attach(commands::attach::AttachArgs),
    Kill(commands::kill::KillArgs),
    Logs(commands::logs::LogsArgs),
    Cp(commands::cp::CpArgs),
    PortForward(commands::port_forward::PortForwardArgs),
    Ps(commands::ps::PsArgs),
    #[command(subcommand)]
    Session(commands::session::SessionCommand),
    Host(commands::host::HostArgs),
    #[command(subcommand)]
    Token(commands::token::TokenCommand),
    #[command(subcommand)]
    Audit(commands::audit::AuditCommand),
    #[command(subcommand)]
    Context(commands::context::ContextCommand),
    Doctor(commands::doctor::DoctorArgs),
    Version(commands::version::VersionArgs),
    Coordinator(commands::coordinator::CoordinatorArgs),
    #[command(hide = true, subcommand)]
    Reference(commands::reference::ReferenceCommand),
}

/// What every command gets.
#[derive(Debug, Clone)]
pub(crate) struct Invocation {
    /// How to print.
    pub(crate) terminal: Terminal,
    overrides: Overrides,
}

impl Invocation {
    /// Takes the flags and the environment together.
    pub(crate) fn new(global: &GlobalArgs) -> Self {
        let set = |value: Option<String>| value.filter(|text| !text.is_empty());
        Self {
            terminal: Terminal::new(global.json),
            overrides: Overrides {
                context: set(global.context.clone()),
                endpoint: set(global.endpoint.clone()),
                token: set(std::env::var(context::TOKEN_ENV).ok()),
            },
        }
    }

    /// Returns the context that was named instead of the current one.
    pub(crate) fn named_context(&self) -> Option<&str> {
        self.overrides.context.as_deref()
    }

    /// Returns where calls go.
    ///
    /// # Errors
    ///
    /// See [`ContextFile::resolve`].
    pub(crate) fn target(&self) -> Result<Target, CliError> {
        let file = match context::config_path() {
            Ok(path) => ContextFile::load(&path)?,
            // Without a home the environment can still say everything.
            Err(error) if self.overrides.endpoint.is_none() => return Err(error),
            Err(_) => ContextFile::default(),
        };
        file.resolve(&self.overrides)
    }

    /// Returns where calls go that are about what runs here: to it, unless another one is named.
    ///
    /// # Errors
    ///
    /// As [`Invocation::target`].
    pub(crate) fn target_here(&self, up: Option<&UpRecord>) -> Result<Target, CliError> {
        let Overrides { context, endpoint, token } = &self.overrides;
        let is_named = context.is_some() || endpoint.is_some() || token.is_some();
        let own = up.filter(|_| !is_named).and_then(|up| {
            let file = ContextFile::load(&context::config_path().ok()?).ok()?;
            file.of_endpoint(&up.context, &up.endpoint)
        });
        own.map_or_else(|| self.target(), Ok)
    }

    /// Returns a connection to the coordinator.
    ///
    /// # Errors
    ///
    /// See [`Client::connect`] and [`Invocation::target`].
    pub(crate) async fn client(&self) -> Result<Client, CliError> {
        Ok(Client::connect(&self.target()?).await?.speaking_on(self.terminal))
    }
}

impl Command {
    /// Returns whether the exit code belongs to the command in the sandbox.
    pub(crate) fn is_work(&self) -> bool {
        matches!(self, Self::Run(_) | Self::Exec(_) | Self::Shell(_) | Self::Attach(_))
    }

    /// Returns whether this process is to be one of the long-running roles.
    pub(crate) fn is_role(&self) -> bool {
        match self {
            Self::Coordinator(_) => true,
            Self::Host(args) => args.is_role(),
            _ => false,
        }
    }

    /// Does it and returns the exit code.
    ///
    /// # Errors
    ///
    /// Why it was not done.
    pub(crate) async fn run(self, invocation: &Invocation) -> Result<u8, CliError> {
        match self {
            Self::Up(args) => args.run(invocation).await,
            Self::Down(args) => args.run(invocation).await,
            Self::Status(args) => args.run(invocation).await,
            Self::Run(args) => args.run(invocation).await,
            Self::Exec(args) => args.run(invocation).await,
            Self::Shell(args) => args.run(invocation).await,
            Self::Attach(args) => args.run(invocation).await,
            Self::Kill(args) => args.run(invocation).await,
            Self::Logs(args) => args.run(invocation).await,
            Self::Cp(args) => args.run(invocation).await,
            Self::PortForward(args) => args.run(invocation).await,
            Self::Ps(args) => args.run(invocation).await,
            Self::Session(command) => command.run(invocation).await,
            Self::Host(args) => args.run(invocation).await,
            Self::Token(command) => command.run(invocation).await,
            Self::Audit(command) => command.run(invocation).await,
            Self::Context(command) => command.run(invocation),
            Self::Doctor(args) => args.run(invocation).await,
            Self::Version(args) => args.run(invocation).await,
            Self::Coordinator(args) => args.run(invocation).await,
            Self::Reference(command) => command.run(invocation),
        }
    }
}
