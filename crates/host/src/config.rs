//! What a host agent is told by its environment.
//!
//! Each variable is declared here once; the reference page is made from these constants. A configuration is read
//! and checked as a whole before anything is touched, and all problems come together.

use std::ffi::OsStr;
use std::path::PathBuf;

use cloister_api::connection::Endpoint;
use cloister_sandbox::backend::HostPaths;
use cloister_sandbox::local::runsc;
use cloister_service::{ConfigError, ConfigReader, EnvVar, Environment};
use cloister_types::{BackendKind, ByteCount, CpuMillis};
use secrecy::SecretString;

use crate::machine::{CapacityOverride, default_name};

/// Where the coordinator listens.
pub const COORDINATOR_ENDPOINT: EnvVar = EnvVar {
    name: "CLOISTER_COORDINATOR_ENDPOINT",
    doc: "Where the coordinator listens for hosts: `http://host:port` or `unix:///path`.",
    default: None,
    unit: None,
    since: "0.1.0",
};

/// What the host shows the coordinator.
pub const COORDINATOR_TOKEN: EnvVar = EnvVar {
    name: "CLOISTER_COORDINATOR_TOKEN",
    doc: "The bearer token of the host link: one of the coordinator's `CLOISTER_AUTH_TOKENS`; tokens of the API are none. It is never logged.",
    default: None,
    unit: None,
    since: "0.1.0",
};

/// Layers, intents and output.
pub const DATA_DIR: EnvVar = EnvVar {
    name: "CLOISTER_DATA_DIR",
    doc: "Directory of what survives a reboot: writable layers, output, the host's id. One host agent owns it.",
    default: Some("/var/lib/cloister"),
    unit: None,
    since: "0.1.0",
};

/// Sockets.
pub const RUN_DIR: EnvVar = EnvVar {
    name: "CLOISTER_RUN_DIR",
    doc: "Directory of what does not survive a reboot: the sockets of shims. Keep the path short: with the \
          socket's name it has at most 107 bytes.",
    default: Some("/run/cloister"),
    unit: None,
    since: "0.1.0",
};

/// How sandboxes are isolated.
pub const SANDBOX_BACKEND: EnvVar = EnvVar {
    name: "CLOISTER_SANDBOX_BACKEND",
    doc: "How sandboxes are isolated: `gvisor`, `namespace`, or `auto` for both, of which a session that names none \
          gets the stronger that works here. `sim` isolates nothing, is for tests, and is used only when named.",
    default: Some("auto"),
    unit: None,
    since: "0.1.0",
};

/// The program that starts gVisor.
pub const RUNSC: EnvVar = EnvVar {
    name: "CLOISTER_RUNSC",
    doc: "Absolute path of the `runsc` that starts sandboxes on gVisor. Unset means the first \
          beside this program, in `PATH`, `/usr/local/bin` and `/usr/bin`; where there is none, `auto` goes without gVisor.",
    default: None,
    unit: None,
    since: "0.1.0",
};

/// The name people see.
pub const HOST_NAME: EnvVar = EnvVar {
    name: "CLOISTER_HOST_NAME",
    doc: "The name that people see for this host. Unset means the machine's own name.",
    default: None,
    unit: None,
    since: "0.1.0",
};

/// Promised memory.
pub const HOST_MEMORY_BYTES: EnvVar = EnvVar {
    name: "CLOISTER_HOST_MEMORY_BYTES",
    doc: "Memory that all sandboxes together are promised. Unset means the machine's, less a tenth and at least \
          512 MiB.",
    default: None,
    unit: Some("bytes"),
    since: "0.1.0",
};

/// Promised CPUs.
pub const HOST_CPU_MILLIS: EnvVar = EnvVar {
    name: "CLOISTER_HOST_CPU_MILLIS",
    doc: "Sum of the CPU limits of all sandboxes. Unset means 16 times the machine's CPUs: a limit is a ceiling, \
          not a reservation.",
    default: None,
    unit: Some("thousandths of a CPU"),
    since: "0.1.0",
};

/// Promised disk.
pub const HOST_DISK_BYTES: EnvVar = EnvVar {
    name: "CLOISTER_HOST_DISK_BYTES",
    doc: "Sum of the disk limits of all sessions. Unset means what is free where the data directory is, with \
          what layers occupy already, less a tenth of it (2 GiB at least) for output, logs and the database.",
    default: None,
    unit: Some("bytes"),
    since: "0.1.0",
};

/// Kept output.
pub const HOST_EXEC_SPOOL_BYTES: EnvVar = EnvVar {
    name: "CLOISTER_HOST_EXEC_SPOOL_BYTES",
    doc: "Most bytes of output kept for each exec. A reader that is slower loses nothing; without a reader the \
          oldest bytes go first.",
    default: Some("16777216"),
    unit: Some("bytes"),
    since: "0.1.0",
};

/// Kept output of a session.
pub const HOST_SESSION_SPOOL_BYTES: EnvVar = EnvVar {
    name: "CLOISTER_HOST_SESSION_SPOOL_BYTES",
    doc: "Most bytes of output kept for all execs of a session. Those that run have an equal part of it each; beyond it \
          the oldest ended execs that nobody reads lose their output and keep their records.",
    default: Some("268435456"),
    unit: Some("bytes"),
    since: "0.1.0",
};

/// Ready sandboxes.
pub const HOST_WARM_SANDBOXES: EnvVar = EnvVar {
    name: "CLOISTER_HOST_WARM_SANDBOXES",
    doc: "Sandboxes of the `namespace` backend that are kept ready for sessions to come, so that a create takes one instead of building it. \
          Each costs about half a MiB of memory, a loop device and a range of user ids. 0 keeps none.",
    default: Some("4"),
    unit: None,
    since: "0.1.0",
};

/// Every variable of the host role.
pub const VARIABLES: [&EnvVar; 13] = [
    &COORDINATOR_ENDPOINT,
    &COORDINATOR_TOKEN,
    &DATA_DIR,
    &RUN_DIR,
    &SANDBOX_BACKEND,
    &RUNSC,
    &HOST_NAME,
    &HOST_MEMORY_BYTES,
    &HOST_CPU_MILLIS,
    &HOST_DISK_BYTES,
    &HOST_EXEC_SPOOL_BYTES,
    &HOST_SESSION_SPOOL_BYTES,
    &HOST_WARM_SANDBOXES,
];

/// Most sandboxes that are kept ready: beyond that, loop devices and ranges of ids are better left to sessions.
const WARM_SANDBOXES_MAX: usize = 256;

/// Least output kept for an exec: one segment of a spool and the one that is being written.
const EXEC_SPOOL_MIN: ByteCount = ByteCount::mib(2);

/// Which backends a host agent opens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackendChoice {
    /// The strongest that works; never `sim`.
    Auto,
    /// This one.
    Only(BackendKind),
}

/// The configuration of a host agent.
#[derive(Debug, Clone)]
pub struct HostConfig {
    /// Where the coordinator listens.
    pub endpoint: Endpoint,
    /// The bearer token.
    pub token: SecretString,
    /// Where the host agent keeps things.
    pub paths: HostPaths,
    /// How sandboxes are isolated.
    pub backend: BackendChoice,
    /// What starts gVisor, where that is wanted and there.
    pub runsc: Option<PathBuf>,
    /// The name people see.
    pub name: String,
    /// What replaces the measured capacity.
    pub capacity: CapacityOverride,
    /// Most bytes of output kept for each exec.
    pub exec_spool: ByteCount,
    /// Most bytes of output kept for all execs of a session.
    pub session_spool: ByteCount,
    /// Sandboxes that are kept ready.
    pub warm_sandboxes: usize,
}

impl HostConfig {
    /// Reads and checks the configuration of a process that runs as this user.
    ///
    /// # Errors
    ///
    /// Every problem, with what is accepted. Nothing was touched.
    pub fn read(environment: &Environment) -> Result<Self, ConfigError> {
        Self::read_as(environment, rustix::process::geteuid().is_root())
    }

    fn read_as(environment: &Environment, is_root: bool) -> Result<Self, ConfigError> {
        let mut reader = ConfigReader::new(environment);
        reader.refuse_unknown("CLOISTER_HOST_", &VARIABLES);
        let endpoint = match reader.text(&COORDINATOR_ENDPOINT) {
            Some(_) => reader.parse(&COORDINATOR_ENDPOINT),
            None => {
                reader.required(&COORDINATOR_ENDPOINT);
                None
            }
        };
        let token = SecretString::from(reader.required(&COORDINATOR_TOKEN));
        let mut directory = |variable: &EnvVar| {
            let path = PathBuf::from(reader.required(variable));
            if !path.as_os_str().is_empty() && !path.is_absolute() {
                reader.problem(format!("`{}` is `{}`: give an absolute path", variable.name, path.display()));
            }
            path
        };
        let paths = HostPaths { data_dir: directory(&DATA_DIR), run_dir: directory(&RUN_DIR) };
        let backend = match reader.text(&SANDBOX_BACKEND) {
            Some("auto") | None => BackendChoice::Auto,
            Some(_) => match reader.parse::<BackendKind>(&SANDBOX_BACKEND) {
                Some(kind) => BackendChoice::Only(kind),
                None => BackendChoice::Auto,
            },
        };
        let runsc = read_runsc(&mut reader, backend);
        if !is_root && backend != BackendChoice::Only(BackendKind::Sim) {
            reader.problem(
                "the host role makes namespaces and cgroups and needs root: start it with `sudo`, or as a \
                 system service",
            );
        }
        let name = reader.text(&HOST_NAME).map_or_else(default_name, str::to_owned);
        if let Err(error) = cloister_types::name::validate_name(&name) {
            reader.problem(format!("`{}`: {error}", HOST_NAME.name));
        }
        let capacity = CapacityOverride {
            memory: reader.parse::<ByteCount>(&HOST_MEMORY_BYTES),
            cpus: reader.parse::<u32>(&HOST_CPU_MILLIS).map(CpuMillis),
            disk: reader.parse::<ByteCount>(&HOST_DISK_BYTES),
        };
        let exec_spool = reader.parse::<ByteCount>(&HOST_EXEC_SPOOL_BYTES).unwrap_or(EXEC_SPOOL_MIN);
        if exec_spool < EXEC_SPOOL_MIN {
            reader.problem(format!(
                "`{}` is `{}`: at least {EXEC_SPOOL_MIN}",
                HOST_EXEC_SPOOL_BYTES.name, exec_spool.0
            ));
        }
        let session_spool = reader.parse::<ByteCount>(&HOST_SESSION_SPOOL_BYTES).unwrap_or(exec_spool);
        if session_spool < exec_spool {
            reader.problem(format!(
                "`{}` is `{}`: at least `{}`, which is {}",
                HOST_SESSION_SPOOL_BYTES.name, session_spool.0, HOST_EXEC_SPOOL_BYTES.name, exec_spool.0
            ));
        }
        let warm_sandboxes = reader.parse::<usize>(&HOST_WARM_SANDBOXES).unwrap_or_default();
        if warm_sandboxes > WARM_SANDBOXES_MAX {
            reader.problem(format!(
                "`{}` is `{warm_sandboxes}`: at most {WARM_SANDBOXES_MAX}",
                HOST_WARM_SANDBOXES.name
            ));
        }
        // Without an endpoint there is a problem, and `finish` returns nothing of this.
        let endpoint = endpoint.unwrap_or_else(|| Endpoint::Unix(PathBuf::new()));
        reader.finish(Self {
            endpoint,
            token,
            paths,
            backend,
            runsc,
            name,
            capacity,
            exec_spool,
            session_spool,
            warm_sandboxes,
        })
    }
}

/// Finds `runsc`, unless the choice has no use for it.
fn read_runsc(reader: &mut ConfigReader<'_>, backend: BackendChoice) -> Option<PathBuf> {
    if !matches!(backend, BackendChoice::Auto | BackendChoice::Only(BackendKind::Gvisor)) {
        return None;
    }
    let named = reader.text(&RUNSC).map(PathBuf::from);
    if let Some(named) = named.filter(|path| !path.is_absolute() || !path.is_file()) {
        reader.problem(format!(
            "`{}` is `{}`: give the absolute path of the program",
            RUNSC.name,
            named.display()
        ));
    }
    let found = runsc::find(reader.text(&RUNSC).map(OsStr::new));
    if found.is_none() && backend == BackendChoice::Only(BackendKind::Gvisor) {
        reader.problem(format!(
            "`{}` is `gvisor` and there is no `runsc` beside this program or in `PATH`: `just gvisor` builds one, `{}` names one elsewhere",
            SANDBOX_BACKEND.name, RUNSC.name
        ));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(pairs: &[(&'static str, &'static str)]) -> Environment {
        let mut all = vec![
            ("CLOISTER_COORDINATOR_ENDPOINT", "unix:///run/cloister/hosts.sock"),
            ("CLOISTER_COORDINATOR_TOKEN", "a-secret"),
        ];
        all.extend_from_slice(pairs);
        Environment::of(all)
    }

    #[test]
    fn defaults_are_enough_with_endpoint_and_token_and_the_token_is_not_shown() {
        let config = HostConfig::read_as(&environment(&[]), true).expect("no problem");
        assert_eq!(config.backend, BackendChoice::Auto);
        assert_eq!(config.paths.data_dir, PathBuf::from("/var/lib/cloister"));
        assert_eq!((config.exec_spool, config.session_spool), (ByteCount::mib(16), ByteCount::mib(256)));
        assert_eq!(config.warm_sandboxes, 4);
        assert_eq!(config.capacity, CapacityOverride::default());
        assert!(!format!("{config:?}").contains("a-secret"));
    }

    #[test]
    fn all_problems_are_reported_together() {
        let environment = Environment::of([
            ("CLOISTER_COORDINATOR_ENDPOINT", "127.0.0.1:80"),
            ("CLOISTER_DATA_DIR", "relative"),
            ("CLOISTER_SANDBOX_BACKEND", "docker"),
            ("CLOISTER_RUNSC", "no/runsc"),
            ("CLOISTER_HOST_NAME", "Not A Name"),
            ("CLOISTER_HOST_MEMORY_BYTES", "much"),
            ("CLOISTER_HOST_EXEC_SPOOL_BYTES", "1"),
            ("CLOISTER_HOST_SESSION_SPOOL_BYTES", "0"),
            ("CLOISTER_HOST_WARM_SANDBOXES", "257"),
            ("CLOISTER_HOST_MEMORY_BYTE", "1"),
        ]);
        let error = HostConfig::read_as(&environment, true).expect_err("problems");
        for name in [
            "CLOISTER_COORDINATOR_ENDPOINT",
            "CLOISTER_COORDINATOR_TOKEN",
            "CLOISTER_DATA_DIR",
            "CLOISTER_SANDBOX_BACKEND",
            "CLOISTER_RUNSC` is `no/runsc`",
            "CLOISTER_HOST_NAME",
            "CLOISTER_HOST_MEMORY_BYTES",
            "CLOISTER_HOST_EXEC_SPOOL_BYTES",
            "CLOISTER_HOST_SESSION_SPOOL_BYTES` is",
            "CLOISTER_HOST_WARM_SANDBOXES",
            "CLOISTER_HOST_MEMORY_BYTE`",
        ] {
            let count = error.problems.iter().filter(|problem| problem.contains(name)).count();
            assert!(count >= 1, "`{name}` is missing in {:#?}", error.problems);
        }
    }

    #[test]
    fn without_root_only_the_simulation_starts() {
        let error = HostConfig::read_as(&environment(&[]), false).expect_err("refused");
        assert!(error.to_string().contains("sudo"), "{error}");
        let sim = environment(&[("CLOISTER_SANDBOX_BACKEND", "sim")]);
        HostConfig::read_as(&sim, false).expect("needs nothing of the kernel");
    }
}
