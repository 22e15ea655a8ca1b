//! Flags that several commands share, and the words they are written in.

use std::time::Duration;

use clap::Args;
use cloister_api::{app, common};
use cloister_types::{ByteCount, CpuMillis, Isolation};

use crate::attach::keyboard::{self, DetachKeys, Keyboard};
use crate::client;
use crate::error::CliError;
use crate::terminal::Terminal;

/// What a sandbox may use and how it is made.
#[derive(Debug, Clone, Args)]
pub(crate) struct SandboxArgs {
    /// Name of the session, to use instead of its id
    #[arg(long, value_parser = parse_name)]
    pub(crate) name: Option<String>,
    /// Label `KEY=VALUE`; may be given again
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = parse_pair)]
    pub(crate) labels: Vec<(String, String)>,
    /// Memory the work may use, for example `512M` or `2G`
    #[arg(long, value_name = "SIZE", value_parser = limit::<ByteCount>)]
    pub(crate) memory: Option<ByteCount>,
    /// CPUs the work may use, for example `2` or `0.5`
    #[arg(long, value_name = "NUMBER", value_parser = limit::<CpuMillis>)]
    pub(crate) cpus: Option<CpuMillis>,
    /// Processes and threads at one time
    #[arg(long, value_name = "NUMBER", value_parser = limit::<u32>)]
    pub(crate) pids: Option<u32>,
    /// Size of the writable layer, for example `1G`
    #[arg(long, value_name = "SIZE", value_parser = limit::<ByteCount>)]
    pub(crate) disk: Option<ByteCount>,
    /// Backend: `auto`, `gvisor`, `namespace` or `sim`
    #[arg(long, value_name = "BACKEND")]
    pub(crate) backend: Option<String>,
    /// Weakest isolation to accept: `none`, `emulated`, `container`, `gvisor` or `microvm`. Not given it is `container`,
    /// or what the backend has that `--backend` names
    #[arg(long, value_name = "LEVEL")]
    pub(crate) isolation: Option<Isolation>,
    /// Delete the session by itself after this long, for example `2h`
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub(crate) ttl: Option<Duration>,
}

impl SandboxArgs {
    /// Returns the request that creates the session, waiting at most this long for its sandbox.
    pub(crate) fn create_request(&self, wait: Duration) -> app::CreateSessionRequest {
        let limits = common::Limits {
            memory_bytes: self.memory.unwrap_or_default().0,
            cpu_millis: self.cpus.unwrap_or_default().0,
            pids: self.pids.unwrap_or_default(),
            disk_bytes: self.disk.unwrap_or_default().0,
            ..Default::default()
        };
        app::CreateSessionRequest {
            request_id: client::request_id(),
            name: self.name.clone().unwrap_or_default(),
            labels: self.labels.iter().cloned().collect(),
            limits: limits.into(),
            backend: self.backend.clone().unwrap_or_default(),
            isolation_floor: self.isolation.map_or(common::Isolation::Unspecified, isolation).into(),
            ttl_ms: self.ttl.map_or(0, millis),
            wait_ms: millis(wait),
            ..Default::default()
        }
    }
}

/// What runs and how.
#[derive(Debug, Clone, Args)]
pub(crate) struct WorkArgs {
    /// Environment variable `NAME=VALUE`; may be given again
    #[arg(short, long = "env", value_name = "NAME=VALUE", value_parser = parse_pair)]
    pub(crate) env: Vec<(String, String)>,
    /// Directory to start in, inside the sandbox
    #[arg(short, long, value_name = "DIR")]
    pub(crate) workdir: Option<String>,
    /// User to run as: a name or uid, optionally `:group`
    #[arg(short, long, value_name = "USER")]
    pub(crate) user: Option<String>,
    /// Kill the command after this long, for example `30s`; the exit code is 124
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub(crate) timeout: Option<Duration>,
    /// Kill the command when it prints nothing for this long; the exit code is 124
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub(crate) no_output_timeout: Option<Duration>,
    /// Pass standard input on to the command
    #[arg(short, long)]
    pub(crate) interactive: bool,
    /// Run the command on a terminal of its own, as large as this one; with `-i` what is typed goes to it
    #[arg(short, long, visible_alias = "terminal")]
    pub(crate) tty: bool,
    #[command(flatten)]
    pub(crate) detach_keys: DetachKeysArg,
    /// Start the command, print its ids and return; `run` leaves its session then, until it is deleted
    #[arg(short, long, conflicts_with = "interactive")]
    pub(crate) detach: bool,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub(crate) command: Vec<String>,
}

/// Keys that leave a terminal and let its program run on.
#[derive(Debug, Clone, Args)]
pub(crate) struct DetachKeysArg {
    /// Keys that leave the terminal and let the command run on; empty for none
    #[arg(
        long,
        value_name = "KEYS",
        env = "CLOISTER_DETACH_KEYS",
        hide_env_values = true,
        default_value = "ctrl-p,ctrl-q"
    )]
    pub(crate) detach_keys: DetachKeys,
}

impl WorkArgs {
    /// Returns the keyboard that goes with the command's terminal, if it has one.
    ///
    /// # Errors
    ///
    /// See [`Keyboard::take`].
    pub(crate) fn keyboard(&self, terminal: Terminal) -> Result<Option<Keyboard>, CliError> {
        if !self.tty {
            return Ok(None);
        }
        Keyboard::take(terminal, self.detach_keys.detach_keys.clone(), self.interactive).map(Some)
    }

    /// Returns the message that says what runs.
    pub(crate) fn spec(&self) -> common::ExecSpec {
        let mut env: std::collections::HashMap<String, String> = self.env.iter().cloned().collect();
        if self.tty
            && !env.contains_key("TERM")
            && let Some(term) = keyboard::kind()
        {
            env.insert("TERM".to_owned(), term);
        }
        common::ExecSpec {
            argv: self.command.clone(),
            env: env.into_iter().collect(),
            terminal: self.tty.then(keyboard::first_size).into(),
            cwd: self.workdir.clone().unwrap_or_default(),
            user: self.user.clone().unwrap_or_default(),
            timeout_ms: self.timeout.map_or(0, millis),
            no_output_timeout_ms: self.no_output_timeout.map_or(0, millis),
            stdin: self.interactive,
            ..Default::default()
        }
    }
}

/// Returns whole milliseconds; longer than the number can hold is the longest.
pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn isolation(level: Isolation) -> common::Isolation {
    match level {
        Isolation::None => common::Isolation::None,
        Isolation::Emulated => common::Isolation::Emulated,
        Isolation::Container => common::Isolation::Container,
        Isolation::Gvisor => common::Isolation::Gvisor,
        Isolation::Microvm => common::Isolation::Microvm,
    }
}

fn parse_name(text: &str) -> Result<String, String> {
    cloister_types::name::validate_name(text).map(|()| text.to_owned()).map_err(|error| error.to_string())
}

/// Parses `NAME=VALUE`; the value may be empty and may hold more `=`.
pub(crate) fn parse_pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("expected a name and a value with `=` between them".to_owned()),
    }
}

/// Parses a quantity. Zero means "the default" on the wire: a limit of nothing must not become the usual one.
fn limit<Q>(text: &str) -> Result<Q, String>
where
    Q: std::str::FromStr<Err: std::fmt::Display> + Default + PartialEq,
{
    let quantity: Q = text.parse().map_err(|error: Q::Err| error.to_string())?;
    if quantity == Q::default() {
        return Err("a sandbox cannot do without: leave the flag out for the default".to_owned());
    }
    Ok(quantity)
}

/// Parses a length of time: numbers with `ms`, `s`, `m`, `h` or `d`, added up; a bare number is seconds.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    let error = || format!("`{text}` is not a time such as `30s`, `5m`, `1h30m` or `500ms`");
    if let Ok(seconds) = text.parse::<u64>() {
        return Ok(Duration::from_secs(seconds)).and_then(|time| nonzero(time, text));
    }
    let mut total = Duration::ZERO;
    let mut rest = text;
    while !rest.is_empty() {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let number: u64 = rest[..digits].parse().map_err(|_| error())?;
        rest = &rest[digits..];
        let letters = rest.bytes().take_while(u8::is_ascii_alphabetic).count();
        let unit_ms: u64 = match &rest[..letters] {
            "ms" => 1,
            "s" => 1000,
            "m" => 60_000,
            "h" => 3_600_000,
            "d" => 86_400_000,
            _ => return Err(error()),
        };
        rest = &rest[letters..];
        let part = number.checked_mul(unit_ms).map(Duration::from_millis).ok_or_else(error)?;
        total = total.checked_add(part).ok_or_else(error)?;
    }
    nonzero(total, text)
}

fn nonzero(time: Duration, text: &str) -> Result<Duration, String> {
    // Zero means "never" on the wire: a limit of nothing must not become no limit.
    if time.is_zero() {
        Err(format!("`{text}` is no time at all: leave the flag out for no limit"))
    } else {
        Ok(time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units_and_zero_is_refused() {
        assert_eq!(parse_duration("30"), Ok(Duration::from_secs(30)));
        assert_eq!(parse_duration("1h30m"), Ok(Duration::from_secs(5400)));
        assert_eq!(parse_duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(parse_duration("2d"), Ok(Duration::from_secs(172_800)));
        for bad in ["", "0", "0s", "s", "1x", "-1s", "1.5s", "99999999999999999999s", "1 s"] {
            assert!(parse_duration(bad).is_err(), "`{bad}` was accepted");
        }
    }

    #[test]
    fn a_limit_of_nothing_is_refused_not_taken_for_the_default() {
        assert_eq!(limit::<CpuMillis>("0.5"), Ok(CpuMillis(500)));
        assert_eq!(limit::<u32>("7"), Ok(7));
        assert!(limit::<CpuMillis>("0").is_err() && limit::<CpuMillis>("0.000").is_err());
        assert!(limit::<ByteCount>("0M").is_err() && limit::<u32>("0").is_err());
    }

    #[test]
    fn pairs_keep_everything_after_the_first_equals_sign() {
        assert_eq!(parse_pair("A=b=c"), Ok(("A".into(), "b=c".into())));
        assert_eq!(parse_pair("A="), Ok(("A".into(), String::new())));
        assert!(parse_pair("=b").is_err());
        assert!(parse_pair("A").is_err());
    }
}
