//! `cloister version`: what this is and what it speaks to.

use clap::Args;
use cloister_api::app::WhoAmIRequest;

use crate::cli::Invocation;
use crate::client::{self, Client};
use crate::error::CliError;

/// Print the versions of this program and of the coordinator
#[derive(Debug, Args)]
pub(crate) struct VersionArgs {}

impl VersionArgs {
    /// Prints them; a coordinator that does not answer is no failure.
    ///
    /// # Errors
    ///
    /// Only when nothing can be printed.
    pub(crate) async fn run(self, invocation: &Invocation) -> Result<u8, CliError> {
        let own = env!("CARGO_PKG_VERSION");
        let server = server_version(invocation).await.ok();
        let shown = serde_json::json!({"client": own, "server": server});
        invocation.terminal.either(&shown, || {
            let server = server.as_deref().unwrap_or("not reached");
            format!("cloister     {own}\ncoordinator  {server}")
        })?;
        Ok(0)
    }
}

async fn server_version(invocation: &Invocation) -> Result<String, CliError> {
    let client = Client::connect_once(&invocation.target()?).await?;
    let answer = client.api().tokens().who_am_i_with_options(WhoAmIRequest::default(), client::quick()).await;
    answer.map(|answer| answer.into_owned().version).map_err(|error| client.error(&error))
}
