//! `cloister coordinator`: the control plane as a process of its own.

use clap::Args;

use crate::cli::Invocation;
use crate::error::CliError;
use crate::supervisor::role::RoleArgs;

/// Run the coordinator on this machine
///
/// Configured by the environment (see docs/reference/configuration.md), until `SIGTERM`. It needs no root.
#[derive(Debug, Args)]
pub(crate) struct CoordinatorArgs {
    #[command(flatten)]
    role: RoleArgs,
}

impl CoordinatorArgs {
    /// Runs it.
    ///
    /// # Errors
    ///
    /// See [`RoleArgs::run_coordinator`].
    pub(crate) async fn run(self, _invocation: &Invocation) -> Result<u8, CliError> {
        self.role.run_coordinator().await
    }
}
