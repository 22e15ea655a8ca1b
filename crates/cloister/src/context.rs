//! Where the coordinator is and who we are to it.
//!
//! A context is a name with an endpoint and a token, kept in `~/.config/cloister/config.toml` (mode 0600, its
//! folder 0700). `CLOISTER_CONTEXT` picks another one than the current; `CLOISTER_ENDPOINT` and `CLOISTER_TOKEN`
//! override its parts. A stored token is sent only to the endpoint that it is stored with: another endpoint
//! needs a token of its own.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{CliError, sudo};

/// Names another configuration file. Since 0.1.
pub(crate) const CONFIG_ENV: &str = "CLOISTER_CONFIG";
/// The bearer token of the call. Since 0.1.
pub(crate) const TOKEN_ENV: &str = "CLOISTER_TOKEN";
/// The URL of the coordinator. Since 0.1.
pub(crate) const ENDPOINT_ENV: &str = "CLOISTER_ENDPOINT";
/// The context to use instead of the current one. Since 0.1.
pub(crate) const CONTEXT_ENV: &str = "CLOISTER_CONTEXT";

/// One coordinator and our token for it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Context {
    /// `http://host:port`.
    pub(crate) endpoint: String,
    /// The bearer; may be empty.
    #[serde(default)]
    pub(crate) token: String,
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context").field("endpoint", &self.endpoint).finish_non_exhaustive()
    }
}

/// The whole file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ContextFile {
    /// The context that is used when none is named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) current: Option<String>,
    /// All of them by name.
    #[serde(default)]
    pub(crate) contexts: BTreeMap<String, Context>,
}

/// Where a call goes and with what token.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Target {
    /// The context it came from; `None` when the environment said it all.
    pub(crate) context: Option<String>,
    /// `http://host:port`.
    pub(crate) endpoint: String,
    /// The bearer.
    pub(crate) token: String,
}

/// What the command line and the environment say about the target.
#[derive(Debug, Clone, Default)]
pub(crate) struct Overrides {
    /// `--context` or `CLOISTER_CONTEXT`.
    pub(crate) context: Option<String>,
    /// `--endpoint` or `CLOISTER_ENDPOINT`.
    pub(crate) endpoint: Option<String>,
    /// `CLOISTER_TOKEN`.
    pub(crate) token: Option<String>,
}

/// Returns the path of the configuration file.
///
/// # Errors
///
/// [`CliError::Refused`] when neither `CLOISTER_CONFIG`, `XDG_CONFIG_HOME` nor `HOME` is set.
pub(crate) fn config_path() -> Result<PathBuf, CliError> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(path) = set(CONFIG_ENV) {
        return Ok(path);
    }
    let directory =
        set("XDG_CONFIG_HOME").or_else(|| set("HOME").map(|home| home.join(".config"))).ok_or_else(|| {
            CliError::refused("HOME is not set", format!("set HOME, or {CONFIG_ENV} to a file"))
        })?;
    Ok(directory.join("cloister/config.toml"))
}

impl ContextFile {
    /// Reads the file; one that is not there is empty.
    ///
    /// # Errors
    ///
    /// [`CliError::Io`] when it cannot be read, [`CliError::Refused`] when it makes no sense.
    pub(crate) fn load(path: &Path) -> Result<Self, CliError> {
        match fs::read_to_string(path) {
            Ok(text) => toml::from_str(&text).map_err(|error| {
                CliError::refused(
                    format!("`{}` is not a configuration: {}", path.display(), error.message()),
                    "correct the file, or remove it and add the contexts again",
                )
            }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(CliError::io(format!("read `{}`", path.display()))(error)),
        }
    }

    /// Writes the file in place of the old one, readable by its owner only.
    ///
    /// # Errors
    ///
    /// [`CliError::Io`]; the old file is untouched then.
    pub(crate) fn save(&self, path: &Path) -> Result<(), CliError> {
        let action = || format!("write `{}`", path.display());
        let directory = path.parent().unwrap_or(Path::new("."));
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)
            .map_err(CliError::io(action()))?;
        let text = toml::to_string(self).expect("the file has string keys only");
        let new = path.with_extension(format!("new-{}", std::process::id()));
        let written = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&new)
            .and_then(|mut file| file.write_all(text.as_bytes()).and_then(|()| file.sync_all()))
            .and_then(|()| fs::rename(&new, path));
        if written.is_err() {
            // Best effort: the error that matters is the one being returned.
            let _ = fs::remove_file(&new);
        }
        written.map_err(CliError::io(action()))
    }

    /// Returns where a call goes.
    ///
    /// # Errors
    ///
    /// [`CliError::Refused`] when no context is named, or the named one is not there, or the endpoint has no
    /// token of its own.
    pub(crate) fn resolve(&self, overrides: &Overrides) -> Result<Target, CliError> {
        let named = overrides.context.clone().or_else(|| self.current.clone());
        let found = match &named {
            Some(name) => Some(self.contexts.get(name).ok_or_else(|| self.unknown(name))?),
            None => None,
        };
        let endpoint = match (&overrides.endpoint, found) {
            (Some(endpoint), _) => endpoint.trim_end_matches('/').to_owned(),
            (None, Some(context)) => context.endpoint.trim_end_matches('/').to_owned(),
            (None, None) => {
                if !self.contexts.is_empty() {
                    let names: Vec<&str> = self.contexts.keys().map(String::as_str).collect();
                    return Err(CliError::refused(
                        "no context is the current one",
                        format!(
                            "choose one with `cloister context use NAME`; there is: {}",
                            names.join(", ")
                        ),
                    ));
                }
                return Err(CliError::refused(
                    "no coordinator is configured",
                    format!(
                        "start one with `{}cloister up --detach`. Is there one already? `cloister context add NAME --url URL --token-file FILE` with a token from its owner (`cloister token create`), or CLOISTER_ENDPOINT and CLOISTER_TOKEN",
                        sudo()
                    ),
                ));
            }
        };
        let stored = found.filter(|context| context.endpoint.trim_end_matches('/') == endpoint);
        let token = match (&overrides.token, stored) {
            (Some(token), _) => token.clone(),
            (None, Some(context)) => context.token.clone(),
            (None, None) => {
                return Err(CliError::refused(
                    format!("there is no token for `{endpoint}`"),
                    "set CLOISTER_TOKEN: the token of a context is only sent to that context's endpoint",
                ));
            }
        };
        Ok(Target { context: stored.and(named), endpoint, token })
    }

    /// Returns where calls go that are about the coordinator at `endpoint`, if the context `name` knows it.
    pub(crate) fn of_endpoint(&self, name: &str, endpoint: &str) -> Option<Target> {
        let context = self.contexts.get(name).filter(|context| context.endpoint == endpoint)?;
        Some(Target {
            context: Some(name.to_owned()),
            endpoint: context.endpoint.clone(),
            token: context.token.clone(),
        })
    }

    /// Returns the error that names what there is.
    pub(crate) fn unknown(&self, name: &str) -> CliError {
        let names: Vec<&str> = self.contexts.keys().map(String::as_str).collect();
        let hint = if names.is_empty() {
            format!("there is none yet: `{}cloister up` writes one, `cloister context add` too", sudo())
        } else {
            format!("there is: {}", names.join(", "))
        };
        CliError::refused(format!("there is no context `{name}`"), hint)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn file() -> ContextFile {
        let context =
            |endpoint: &str, token: &str| Context { endpoint: endpoint.into(), token: token.into() };
        ContextFile {
            current: Some("local".into()),
            contexts: BTreeMap::from([
                ("local".into(), context("http://127.0.0.1:8080", "one")),
                ("far".into(), context("http://far:1/", "two")),
            ]),
        }
    }

    #[test]
    fn the_environment_overrides_the_current_context() {
        let resolve = |context: Option<&str>, endpoint: Option<&str>, token: Option<&str>| {
            let text = |value: Option<&str>| value.map(str::to_owned);
            file()
                .resolve(&Overrides { context: text(context), endpoint: text(endpoint), token: text(token) })
                .map(|target| (target.endpoint, target.token))
                .map_err(|error| error.to_string())
        };
        let ok = |endpoint: &str, token: &str| Ok((endpoint.to_owned(), token.to_owned()));
        assert_eq!(resolve(None, None, None), ok("http://127.0.0.1:8080", "one"));
        assert_eq!(resolve(Some("far"), None, None), ok("http://far:1", "two"));
        assert_eq!(resolve(None, None, Some("t")), ok("http://127.0.0.1:8080", "t"));
        assert_eq!(resolve(None, Some("http://x:1/"), Some("t")), ok("http://x:1", "t"));
        assert_eq!(resolve(None, Some("http://127.0.0.1:8080/"), None), ok("http://127.0.0.1:8080", "one"));
        assert_eq!(resolve(Some("no"), None, None), Err("there is no context `no`".into()));
    }

    #[test]
    fn a_stored_token_is_not_sent_to_another_endpoint() {
        let overrides = Overrides { endpoint: Some("http://evil:1".into()), ..Overrides::default() };
        let error = file().resolve(&overrides).err().map(|error| error.to_string());
        assert_eq!(error.as_deref(), Some("there is no token for `http://evil:1`"));
        let error =
            ContextFile::default().resolve(&Overrides::default()).err().map(|error| error.to_string());
        assert_eq!(error.as_deref(), Some("no coordinator is configured"));
    }

    #[test]
    fn the_file_is_private_and_comes_back_as_it_was_written() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("deep/er/config.toml");
        assert_eq!(ContextFile::load(&path).unwrap(), ContextFile::default());
        file().save(&path).unwrap();
        file().save(&path).unwrap();
        assert_eq!(ContextFile::load(&path).unwrap(), file());
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::metadata(path.parent().unwrap()).unwrap().permissions().mode() & 0o777, 0o700);
        fs::write(&path, "current = \"local\"\nnonsense = 1\n").unwrap();
        let error = ContextFile::load(&path).unwrap_err().to_string();
        assert!(error.contains("is not a configuration"), "{error}");
    }
}
