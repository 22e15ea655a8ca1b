//! `cloister context`: which coordinator the command line speaks to.

use std::io::Read;
use std::path::PathBuf;

use clap::Subcommand;
use cloister_api::connection::Endpoint;

use crate::cli::Invocation;
use crate::context::{Context, ContextFile, config_path};
use crate::error::CliError;
use crate::terminal::Table;

/// Choose the coordinator that commands speak to
#[derive(Debug, Subcommand)]
pub(crate) enum ContextCommand {
    /// List contexts; the current one has a `*`
    List,
    /// Make a context the current one
    Use {
        /// Name of the context
        name: String,
    },
    /// Show where a context goes, without its token
    Show {
        /// Name of the context; the current one when it is left out
        name: Option<String>,
    },
    /// Add or replace a context and make it the current one
    Add {
        /// Name of the context
        name: String,
        /// URL of the coordinator, for example `http://127.0.0.1:8080`
        #[arg(long = "url", value_name = "URL")]
        url: Endpoint,
        /// File that holds the token; `-` reads standard input
        #[arg(long, value_name = "FILE")]
        token_file: PathBuf,
    },
    /// Remove a context
    Rm {
        /// Name of the context
        name: String,
    },
}

impl ContextCommand {
    /// Does it.
    ///
    /// # Errors
    ///
    /// When the file cannot be read or written, or there is no such context.
    pub(crate) fn run(self, invocation: &Invocation) -> Result<u8, CliError> {
        let terminal = invocation.terminal;
        let path = config_path()?;
        let mut file = ContextFile::load(&path)?;
        match self {
            Self::List => {
                let current = invocation.named_context().or(file.current.as_deref());
                let contexts: Vec<_> = file
                    .contexts
                    .iter()
                    .map(|(name, context)| {
                        serde_json::json!({
                            "name": name,
                            "endpoint": context.endpoint,
                            "current": Some(name.as_str()) == current,
                        })
                    })
                    .collect();
                terminal.either(&serde_json::json!({"contexts": contexts}), || {
                    let mut table = Table::new(["CURRENT", "NAME", "ENDPOINT"]);
                    for (name, context) in &file.contexts {
                        let mark = if Some(name.as_str()) == current { "*" } else { "" };
                        table.row([mark.to_owned(), name.clone(), context.endpoint.clone()]);
                    }
                    table.render()
                })?;
            }
            Self::Use { name } => {
                if !file.contexts.contains_key(&name) {
                    return Err(file.unknown(&name));
                }
                file.current = Some(name.clone());
                file.save(&path)?;
                terminal.either(&serde_json::json!({"current": name}), || name.clone())?;
            }
            Self::Show { name } => {
                let name = name
                    .or_else(|| invocation.named_context().map(str::to_owned))
                    .or_else(|| file.current.clone())
                    .ok_or_else(|| {
                        CliError::refused("no context is in use", "pick one with `cloister context use NAME`")
                    })?;
                let context = file.contexts.get(&name).ok_or_else(|| file.unknown(&name))?;
                let has_token = !context.token.is_empty();
                let shown = serde_json::json!({
                    "name": name,
                    "endpoint": context.endpoint,
                    "hasToken": has_token,
                    "file": path,
                });
                terminal.either(&shown, || {
                    let token = if has_token { "set" } else { "not set" };
                    format!(
                        "name      {name}\nendpoint  {}\ntoken     {token}\nfile      {}",
                        context.endpoint,
                        path.display()
                    )
                })?;
            }
            Self::Add { name, url, token_file } => {
                cloister_types::name::validate_name(&name)
                    .map_err(|error| CliError::refused(error.to_string(), ""))?;
                let token = read_token(&token_file)?;
                file.contexts.insert(name.clone(), Context { endpoint: url.to_string(), token });
                file.current = Some(name.clone());
                file.save(&path)?;
                terminal.either(&serde_json::json!({"current": name}), || name.clone())?;
            }
            Self::Rm { name } => {
                if file.contexts.remove(&name).is_none() {
                    return Err(file.unknown(&name));
                }
                if file.current.as_deref() == Some(&name) {
                    file.current = None;
                }
                file.save(&path)?;
                terminal.either(&serde_json::json!({"removed": name}), || name.clone())?;
            }
        }
        Ok(0)
    }
}

fn read_token(path: &std::path::Path) -> Result<String, CliError> {
    let action = || format!("read the token from `{}`", path.display());
    let mut text = String::new();
    if path.as_os_str() == "-" {
        std::io::stdin().lock().read_to_string(&mut text).map_err(CliError::io(action()))?;
    } else {
        text = std::fs::read_to_string(path).map_err(CliError::io(action()))?;
    }
    let token = text.trim().to_owned();
    if token.is_empty() {
        Err(CliError::refused("the token is empty", "create one with `cloister token create`"))
    } else {
        Ok(token)
    }
}
