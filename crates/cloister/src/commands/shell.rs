//! `cloister shell`: an interactive shell in a session.

use clap::Args;

use crate::args::{DetachKeysArg, WorkArgs};
use crate::cli::Invocation;
use crate::commands::exec::ExecArgs;
use crate::error::CliError;

/// Takes the better shell of those that are there. As a login shell it reads the profile of its user.
const FIND_SHELL: &str = "command -v bash >/dev/null 2>&1 && exec bash -l; exec sh -l";

/// Open a shell in a session
///
/// On a terminal of its own, as `exec -it` has it. The shell is bash where there is one, else sh. The detach keys leave it
/// running: `cloister attach` comes back.
#[derive(Debug, Args)]
pub(crate) struct ShellArgs {
    /// Environment variable `NAME=VALUE`; may be given again
    #[arg(short, long = "env", value_name = "NAME=VALUE", value_parser = crate::args::parse_pair)]
    env: Vec<(String, String)>,
    /// Directory to start in, inside the sandbox
    #[arg(short, long, value_name = "DIR")]
    workdir: Option<String>,
    /// User to run as: a name or uid, optionally `:group`
    #[arg(short, long, value_name = "USER")]
    user: Option<String>,
    #[command(flatten)]
    detach_keys: DetachKeysArg,
    /// Id, unique prefix of it, or name of the session
    session: String,
}

impl ShellArgs {
    /// Runs the shell and returns its exit code.
    ///
    /// # Errors
    ///
    /// As `exec`.
    pub(crate) async fn run(self, invocation: &Invocation) -> Result<u8, CliError> {
        let work = WorkArgs {
            env: self.env,
            workdir: self.workdir,
            user: self.user,
            timeout: None,
            no_output_timeout: None,
            interactive: true,
            tty: true,
            detach_keys: self.detach_keys,
            detach: false,
            command: ["sh", "-c", FIND_SHELL].map(str::to_owned).to_vec(),
        };
        ExecArgs { session: self.session, work }.run(invocation).await
    }
}
