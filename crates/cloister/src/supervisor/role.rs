//! The child's side of the supervision: a role in a process of its own.
//!
//! Started by hand, a role is configured by the environment and lives until SIGTERM. Started by `up` it also dies
//! with it: a supervisor that is killed must leave nothing that the next one would have to fight.

use clap::Args;
use cloister_coordinator::Config;
use cloister_host::HostConfig;
use cloister_service::telemetry::{self, LOG_FORMAT, LogFormat};
use cloister_service::{ConfigReader, Environment, TaskRegistry, error_chain, shutdown};
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

use crate::error::CliError;

/// What `up` tells its children; of no use to anybody else.
#[derive(Debug, Clone, Args)]
pub(crate) struct RoleArgs {
    /// Process of the supervisor: die with it
    #[arg(long, hide = true, value_name = "PID")]
    pub(crate) supervised_by: Option<i32>,
    /// Stop all sandboxes of a host agent that does not run, and end
    #[arg(long, hide = true)]
    pub(crate) stop_sandboxes: bool,
}

/// Lets this process open as many descriptors as it may: the usual soft limit of 1024, there for programs that use
/// `select`, is fewer than the connections that a coordinator takes. Not for a host agent, whose children inherit it.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let most = getrlimit(Resource::Nofile).maximum;
    // Refused by nothing that we know of; then fewer connections are served at a time, and the log says so.
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most }) {
        tracing::warn!(error = %error, "the limit of open files cannot be raised");
    }
}

/// Open files that a role cannot work without: a host agent has several for each sandbox and program that it starts.
const DESCRIPTORS_MIN: u64 = 1024;

/// Ensures that this process and its children may open [`DESCRIPTORS_MIN`] files; root may also raise a hard limit.
///
/// # Errors
///
/// [`CliError::Refused`] when that is not allowed.
pub(crate) fn ensure_descriptors() -> Result<(), CliError> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let at_least = |limit: Option<u64>| limit.map(|most| most.max(DESCRIPTORS_MIN));
    if limit.current.is_none_or(|most| most >= DESCRIPTORS_MIN) {
        return Ok(());
    }
    let raised = Rlimit { current: Some(DESCRIPTORS_MIN), maximum: at_least(limit.maximum) };
    setrlimit(Resource::Nofile, raised).map_err(|errno| {
        CliError::refused(
            format!(
                "at most {} files may be open at a time, and {DESCRIPTORS_MIN} are needed: {errno}",
                limit.current.unwrap_or_default()
            ),
            format!(
                "raise the limit with `ulimit -n {DESCRIPTORS_MIN}`, or `LimitNOFILE=` in a systemd unit"
            ),
        )
    })
}

impl RoleArgs {
    /// Runs the coordinator until it is told to stop.
    ///
    /// # Errors
    ///
    /// Every problem of the configuration together, or what it could not go on without.
    pub(crate) async fn run_coordinator(self) -> Result<u8, CliError> {
        let environment = self.begin()?;
        let config = Config::from_environment(&environment).map_err(configuration)?;
        raise_descriptor_limit();
        let tasks = TaskRegistry::new();
        let token = shutdown::on_signals(&tasks).map_err(CliError::io("listen for signals"))?;
        cloister_coordinator::run(config, token).await.map_err(|error| failed("coordinator", &error))?;
        Ok(0)
    }

    /// Runs the host agent until it is told to stop; its sandboxes run on.
    ///
    /// # Errors
    ///
    /// Every problem of the configuration together, or what it could not go on without.
    pub(crate) async fn run_host(self) -> Result<u8, CliError> {
        let environment = self.begin()?;
        let config = HostConfig::read(&environment).map_err(configuration)?;
        if self.stop_sandboxes {
            let stopped =
                cloister_host::stop_all(config).await.map_err(|error| failed("host agent", &error))?;
            tracing::info!(stopped, "sandboxes stopped");
            return Ok(0);
        }
        let tasks = TaskRegistry::new();
        let token = shutdown::on_signals(&tasks).map_err(CliError::io("listen for signals"))?;
        cloister_host::run(config, token).await.map_err(|error| failed("host agent", &error))?;
        Ok(0)
    }

    /// Ties this process to its supervisor, starts telemetry, and returns the environment to be configured by.
    fn begin(&self) -> Result<Environment, CliError> {
        if let Some(supervisor) = self.supervised_by {
            // SIGKILL: an agent that took its time would meet the next supervisor's.
            set_parent_process_death_signal(Some(Signal::KILL))
                .map_err(|errno| CliError::io("tie this process to its supervisor")(errno.into()))?;
            // It may have died before that call, and then no signal comes.
            if getppid().map(Pid::as_raw_pid) != Some(supervisor) {
                return Err(CliError::refused("the supervisor is gone", "start it again with `cloister up`"));
            }
        }
        ensure_descriptors()?;
        let environment = Environment::of_process();
        let mut reader = ConfigReader::new(&environment);
        let format: Option<LogFormat> = reader.parse(&LOG_FORMAT);
        let format = reader.finish(format.unwrap_or_default()).map_err(configuration)?;
        telemetry::init(format)
            .map_err(|error| CliError::refused(error_chain(&error), "correct `RUST_LOG`"))?;
        Ok(environment)
    }
}

pub(super) fn configuration(error: cloister_service::ConfigError) -> CliError {
    CliError::refused(error.to_string(), "docs/reference/configuration.md lists the variables")
}

fn failed(role: &str, error: &(dyn std::error::Error + 'static)) -> CliError {
    CliError::refused(format!("the {role} ended: {}", error_chain(error)), "its log says what went before")
}
