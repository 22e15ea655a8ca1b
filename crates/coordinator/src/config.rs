//! What a coordinator is configured with, checked before anything is bound or touched.

use std::net::SocketAddr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;
use std::str::FromStr as _;
use std::time::Duration;

use cloister_service::{ConfigError, ConfigReader, EnvVar, Environment};
use secrecy::{ExposeSecret as _, SecretString};
use sqlx::postgres::PgConnectOptions;

/// Fewest characters of a bearer: shorter ones can be guessed.
const BEARER_MIN_LEN: usize = 16;
/// Longest path of a unix socket.
const SOCKET_PATH_MAX_LEN: usize = 107;

/// Where the app API listens.
pub const LISTEN: EnvVar = EnvVar {
    name: "CLOISTER_LISTEN",
    doc: "Address and port of the API, health and metrics; port 0 takes a free one.",
    default: Some("127.0.0.1:8080"),
    unit: None,
    since: "0.1.0",
};
/// The unix socket.
pub const LINK_SOCKET: EnvVar = EnvVar {
    name: "CLOISTER_COORDINATOR_SOCKET",
    doc: "Path of a unix socket that serves the same as the port, for a host agent on the same machine; unset means \
          none.",
    default: None,
    unit: None,
    since: "0.1.0",
};
/// The database.
pub const DATABASE_URL: EnvVar = EnvVar {
    name: "DATABASE_URL",
    doc: "`postgres://…` of a PostgreSQL 14 or later; unset means a private one in the data directory.",
    default: None,
    unit: None,
    since: "0.1.0",
};
/// Where data lives.
pub const DATA_DIR: EnvVar = EnvVar {
    name: "CLOISTER_DATA_DIR",
    doc: "Directory of what must survive: the private database and the owner's token.",
    default: Some("/var/lib/cloister"),
    unit: None,
    since: "0.1.0",
};
/// Where sockets live.
pub const RUN_DIR: EnvVar = EnvVar {
    name: "CLOISTER_RUN_DIR",
    doc: "Directory of sockets.",
    default: Some("/run/cloister"),
    unit: None,
    since: "0.1.0",
};
/// Bearers of host agents.
pub const AUTH_TOKENS: EnvVar = EnvVar {
    name: "CLOISTER_AUTH_TOKENS",
    doc: "Comma-separated bearers of host agents, at least 16 characters each; without one no host can connect. They \
          never work for the app API.",
    default: None,
    unit: None,
    since: "0.1.0",
};
/// Bearers of machines that call the app API.
pub const APP_TOKENS: EnvVar = EnvVar {
    name: "CLOISTER_APP_TOKENS",
    doc: "Comma-separated bearers of machines that call the app API, at least 16 characters each. They never work for \
          host agents.",
    default: None,
    unit: None,
    since: "0.1.0",
};
/// The owner's token.
pub const OWNER_TOKEN: EnvVar = EnvVar {
    name: "CLOISTER_COORDINATOR_OWNER_TOKEN",
    doc: "Bearer of the default organization's owner; unset means one that is made at the first start and kept in \
          `owner-token` in the data directory.",
    default: None,
    unit: None,
    since: "0.1.0",
};
/// Fallback polling.
pub const FALLBACK_POLL: EnvVar = EnvVar {
    name: "CLOISTER_COORDINATOR_FALLBACK_POLL_SECS",
    doc: "How often everything is looked at without a notice from the database; only a lost notice needs it.",
    default: Some("10"),
    unit: Some("seconds"),
    since: "0.1.0",
};
/// Heartbeats of hosts.
pub const HEARTBEAT: EnvVar = EnvVar {
    name: "CLOISTER_COORDINATOR_HEARTBEAT_SECS",
    doc: "How often a host agent is heard; a host that misses three is lost.",
    default: Some("5"),
    unit: Some("seconds"),
    since: "0.1.0",
};
/// Grace of a shutdown.
pub const SHUTDOWN_GRACE: EnvVar = EnvVar {
    name: "CLOISTER_COORDINATOR_SHUTDOWN_GRACE_SECS",
    doc: "How long calls and steps under way may take when the coordinator stops.",
    default: Some("10"),
    unit: Some("seconds"),
    since: "0.1.0",
};

/// Every variable that a coordinator reads.
pub const VARIABLES: &[&EnvVar] = &[
    &LISTEN,
    &LINK_SOCKET,
    &DATABASE_URL,
    &DATA_DIR,
    &RUN_DIR,
    &AUTH_TOKENS,
    &APP_TOKENS,
    &OWNER_TOKEN,
    &FALLBACK_POLL,
    &HEARTBEAT,
    &SHUTDOWN_GRACE,
];

/// Where the store is.
#[derive(Debug, Clone)]
pub enum Database {
    /// A server of the operator's.
    Outside(Box<PgConnectOptions>),
    /// One that this process starts and supervises in its data directory.
    Private,
}

/// The configuration of a coordinator.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where the API listens.
    pub listen: SocketAddr,
    /// A unix socket that serves the same.
    pub socket: Option<PathBuf>,
    /// Where the store is.
    pub database: Database,
    /// What must survive.
    pub data_dir: PathBuf,
    /// Sockets.
    pub run_dir: PathBuf,
    /// Bearers of host agents.
    pub auth_tokens: Vec<SecretString>,
    /// Bearers of machine callers.
    pub app_tokens: Vec<SecretString>,
    /// The owner's bearer, when it is given.
    pub owner_token: Option<SecretString>,
    /// Fallback interval of the reconcilers.
    pub fallback_poll: Duration,
    /// Interval of heartbeats.
    pub heartbeat: Duration,
    /// Grace of a shutdown.
    pub shutdown_grace: Duration,
}

impl Config {
    /// Reads a configuration.
    ///
    /// # Errors
    ///
    /// Every problem at once.
    pub fn from_environment(environment: &Environment) -> Result<Self, ConfigError> {
        let mut reader = ConfigReader::new(environment);
        reader.refuse_unknown("CLOISTER_COORDINATOR_", &client_variables());
        let listen = reader.parse(&LISTEN).unwrap_or_else(|| SocketAddr::from(([127, 0, 0, 1], 0)));
        let socket = reader.text(&LINK_SOCKET).map(PathBuf::from);
        if let Some(path) = &socket {
            let length = path.as_os_str().as_bytes().len();
            if !path.is_absolute() || length > SOCKET_PATH_MAX_LEN {
                reader.problem(format!(
                    "`{}` is `{}` ({length} bytes): accepted is an absolute path of at most {SOCKET_PATH_MAX_LEN} bytes",
                    LINK_SOCKET.name,
                    path.display()
                ));
            }
        }
        let database = match reader.text(&DATABASE_URL) {
            None => Database::Private,
            Some(url) => match PgConnectOptions::from_str(url) {
                Ok(options) if url.starts_with("postgres://") || url.starts_with("postgresql://") => {
                    Database::Outside(Box::new(options))
                }
                // The text may hold a password: it is not shown.
                Ok(_) | Err(_) => {
                    reader.problem(format!("`{}` is not of the form `postgres://…`", DATABASE_URL.name));
                    Database::Private
                }
            },
        };
        let auth_tokens = bearers(&mut reader, &AUTH_TOKENS);
        let app_tokens = bearers(&mut reader, &APP_TOKENS);
        let owner_token = bearers(&mut reader, &OWNER_TOKEN).pop();
        let same = |left: &SecretString, right: &SecretString| left.expose_secret() == right.expose_secret();
        if auth_tokens.iter().any(|auth| app_tokens.iter().chain(&owner_token).any(|app| same(auth, app))) {
            reader.problem(format!(
                "`{}` shares a bearer with `{}` or `{}`: a host's bearer must not work for the app API",
                AUTH_TOKENS.name, APP_TOKENS.name, OWNER_TOKEN.name
            ));
        }
        let data_dir = PathBuf::from(reader.required(&DATA_DIR));
        let run_dir = PathBuf::from(reader.required(&RUN_DIR));
        for (variable, path) in [(&DATA_DIR, &data_dir), (&RUN_DIR, &run_dir)] {
            if !path.is_absolute() {
                reader.problem(format!("`{}` is `{}`: give an absolute path", variable.name, path.display()));
            }
        }
        let fallback_poll = reader.seconds(&FALLBACK_POLL, 1..=86_400);
        let heartbeat = reader.seconds(&HEARTBEAT, 1..=300);
        let shutdown_grace = reader.seconds(&SHUTDOWN_GRACE, 1..=600);
        reader.finish(Self {
            listen,
            socket,
            database,
            data_dir,
            run_dir,
            auth_tokens,
            app_tokens,
            owner_token,
            fallback_poll,
            heartbeat,
            shutdown_grace,
        })
    }
}

/// Variables with the coordinator's prefix that other roles read from the same environment.
fn client_variables() -> Vec<&'static EnvVar> {
    const OF_HOST_AGENT: EnvVar =
        EnvVar { name: "CLOISTER_COORDINATOR_ENDPOINT", doc: "", default: None, unit: None, since: "0.1.0" };
    const OF_HOST_AGENT_TOKEN: EnvVar =
        EnvVar { name: "CLOISTER_COORDINATOR_TOKEN", doc: "", default: None, unit: None, since: "0.1.0" };
    VARIABLES.iter().copied().chain([&OF_HOST_AGENT, &OF_HOST_AGENT_TOKEN]).collect()
}

fn bearers(reader: &mut ConfigReader<'_>, variable: &EnvVar) -> Vec<SecretString> {
    let Some(text) = reader.text(variable) else { return Vec::new() };
    let mut bearers = Vec::new();
    for (index, bearer) in text.split(',').map(str::trim).enumerate() {
        if bearer.len() < BEARER_MIN_LEN || !bearer.bytes().all(|byte| byte.is_ascii_graphic()) {
            reader.problem(format!(
                "`{}`: bearer {} is not accepted: at least {BEARER_MIN_LEN} printable ASCII characters without spaces",
                variable.name,
                index + 1
            ));
        } else {
            bearers.push(SecretString::from(bearer.to_owned()));
        }
    }
    bearers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_problem_is_reported_and_no_secret_is_shown() {
        let environment = Environment::of([
            ("CLOISTER_LISTEN", "localhost"),
            ("CLOISTER_AUTH_TOKENS", "short,0123456789abcdef"),
            ("CLOISTER_APP_TOKENS", "0123456789abcdef"),
            ("DATABASE_URL", "mysql://user:hunter2@db"),
            ("CLOISTER_COORDINATOR_FALLBACK_POLL_SEC", "1"),
            ("CLOISTER_DATA_DIR", "data"),
            ("CLOISTER_COORDINATOR_HEARTBEAT_SECS", "0"),
            ("CLOISTER_COORDINATOR_ENDPOINT", "http://127.0.0.1:1"),
        ]);
        let error = Config::from_environment(&environment).expect_err("it is full of mistakes");
        let text = error.to_string();
        assert_eq!(error.problems.len(), 7, "{text}");
        for expected in [
            "CLOISTER_LISTEN",
            "bearer 1",
            "shares a bearer",
            "postgres://",
            "did you mean `CLOISTER_COORDINATOR_FALLBACK_POLL_SECS`",
            "`CLOISTER_DATA_DIR` is `data`",
            "CLOISTER_COORDINATOR_HEARTBEAT_SECS",
        ] {
            assert!(text.contains(expected), "`{expected}` is not in {text}");
        }
        for secret in ["hunter2", "0123456789abcdef", "short"] {
            assert!(!text.contains(secret), "`{secret}` is in {text}");
        }
    }

    #[test]
    fn the_defaults_are_accepted() {
        let config = Config::from_environment(&Environment::default()).expect("defaults");
        assert!(matches!(config.database, Database::Private));
        assert!(config.auth_tokens.is_empty());
        assert_eq!(config.fallback_poll, Duration::from_secs(10));
    }
}
