//! `cloister token`: bearers for the API.

use std::time::{Duration, SystemTime};

use clap::Subcommand;
use cloister_api::app::{CreateTokenRequest, ListTokensRequest, RevokeTokenRequest, Token};

use crate::args::{millis, parse_duration};
use crate::cli::Invocation;
use crate::client::{self, unary};
use crate::error::CliError;
use crate::terminal::{Table, age, date, is_past};

/// Create, list and revoke API tokens
#[derive(Debug, Subcommand)]
pub(crate) enum TokenCommand {
    /// Create a token and print its secret, which is shown only now
    Create {
        /// Name of the token
        name: String,
        /// The token expires after this long, for example `30d`
        #[arg(long, value_name = "TIME", value_parser = parse_duration)]
        ttl: Option<Duration>,
    },
    /// List your tokens
    List,
    /// Revoke a token at once
    Revoke {
        /// Id or name of the token
        token: String,
    },
}

impl TokenCommand {
    /// Does it.
    ///
    /// # Errors
    ///
    /// What the coordinator answered.
    pub(crate) async fn run(self, invocation: &Invocation) -> Result<u8, CliError> {
        let terminal = invocation.terminal;
        let client = invocation.client().await?;
        match self {
            Self::Create { name, ttl } => {
                let request = CreateTokenRequest {
                    request_id: client::request_id(),
                    name,
                    ttl_ms: ttl.map_or(0, millis),
                    ..Default::default()
                };
                let answer = unary!(client, tokens, create_token_with_options, request, client::quick())?;
                terminal.either(&answer, || answer.secret.clone())?;
            }
            Self::List => {
                let answer = unary!(
                    client,
                    tokens,
                    list_tokens_with_options,
                    ListTokensRequest::default(),
                    client::quick()
                )?;
                terminal.either(&answer, || token_table(&answer.tokens, SystemTime::now()))?;
            }
            Self::Revoke { token } => {
                let request =
                    RevokeTokenRequest { request_id: client::request_id(), token, ..Default::default() };
                let answer = unary!(client, tokens, revoke_token_with_options, request, client::quick())?;
                terminal.either(&answer, || answer.token.id.clone())?;
            }
        }
        Ok(0)
    }
}

fn token_table(tokens: &[Token], now: SystemTime) -> String {
    let mut table = Table::new(["TOKEN", "NAME", "STATE", "AGE", "LAST USED", "EXPIRES"]);
    for token in tokens {
        let state = if token.revoked_at.is_set() {
            "revoked"
        } else if is_past(token.expires_at.as_option(), now) {
            "expired"
        } else {
            "live"
        };
        table.row([
            token.id.clone(),
            token.name.clone(),
            state.to_owned(),
            age(token.created_at.as_option(), now),
            age(token.last_used_at.as_option(), now),
            date(token.expires_at.as_option()),
        ]);
    }
    table.render()
}
