//! `cloister up`: the roles of one machine as children of one process.
//!
//! ```text
//!  up (root) ─┬─ PostgreSQL    own account; adopted from a killed `up`; none with DATABASE_URL
//!             ├─ coordinator   account `cloister`; dies with `up`
//!             └─ host agent    root; dies with `up`; its sandboxes do not
//! ```
//!
//! Start: PostgreSQL, coordinator, host agent, each when the one before it answers. What dies later is started
//! again with growing pauses. Stop, in order: host agent, sandboxes (their files stay), coordinator, PostgreSQL.
//!
//! Invariants:
//! - One `up` per data directory, by a lock that the kernel drops with the process.
//! - Children are started on the main thread, because a child that dies with its parent dies with the thread.
//! - `up.json` names the children that are there now; it holds no secret.
//! - A killed `up` leaves PostgreSQL and sandboxes, which the next one takes over, and nothing else.

pub(crate) mod account;
pub(crate) mod child;
pub(crate) mod host;
pub(crate) mod layout;
pub(crate) mod log;
pub(crate) mod own_context;
pub(crate) mod postgres;
pub(crate) mod record;
pub(crate) mod role;
pub(crate) mod token;

use std::ffi::OsString;
use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use cloister_api::app::WhoAmIRequest;
use cloister_coordinator::postgres::PrivatePostgres;
use cloister_service::{CancellationToken, OnCancel, OnError, TaskKind, TaskRegistry, error_chain};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::client::{self, Client};
use crate::context::Target;
use crate::error::CliError;
use crate::supervisor::account::Account;
use crate::supervisor::child::{ChildSpec, ChildState};
use crate::supervisor::layout::{Layout, make_directory};
use crate::supervisor::record::{RoleRecord, UpLock, UpRecord, start_ticks};

/// How long a role may take to answer for the first time. The host agent tries every backend before it is there.
const READY_TIMEOUT: Duration = Duration::from_secs(90);
/// Pause between looks at a role that is starting.
const READY_PAUSE: Duration = Duration::from_millis(50);
/// How often what `up.json` says is compared with what there is.
const LOOK_PERIOD: Duration = Duration::from_secs(1);
/// A role that died this often before it was ready will not start.
const FAILED_STARTS: u32 = 3;
/// How long the coordinator and the host agent may take to stop.
const STOP_GRACE: Duration = Duration::from_secs(40);
/// Lines of a log that are shown when its role does not start.
const TAIL_LINES: usize = 12;

/// This program, by inode rather than by path: an upgrade may have replaced the file while we run, and children must
/// be of our version.
pub(crate) const OWN_PROGRAM: &str = "/proc/self/exe";

const CHILD: TaskKind = TaskKind::new("child", OnCancel::Wait, OnError::Log);
const POSTGRES: TaskKind = TaskKind::new("postgres", OnCancel::Wait, OnError::Log);

/// What `up` was asked for.
#[derive(Debug, Clone)]
pub(crate) struct UpOptions {
    /// Where things go.
    pub(crate) layout: Layout,
    /// Where the API listens.
    pub(crate) listen: SocketAddr,
    /// `auto`, `gvisor`, `namespace` or `sim`.
    pub(crate) backend: String,
    /// Name of the client context to write.
    pub(crate) context: String,
}

/// A role in a task of the registry.
struct Running {
    name: &'static str,
    stop: CancellationToken,
    state: watch::Receiver<ChildState>,
}

/// Everything that runs.
pub(crate) struct Supervisor {
    options: UpOptions,
    address: SocketAddr,
    owner: Target,
    tasks: TaskRegistry,
    postgres: Option<Running>,
    coordinator: Option<Running>,
    host: Option<Running>,
    host_spec: Option<ChildSpec>,
    outside_database: Option<OsString>,
    _lock: UpLock,
}

impl Supervisor {
    /// Claims the directories and the port; nothing is started yet.
    ///
    /// # Errors
    ///
    /// [`CliError::Refused`] with what to do: not root, another `up`, a taken port.
    pub(crate) fn claim(options: UpOptions) -> Result<Self, CliError> {
        require_root("up")?;
        role::ensure_descriptors()?;
        if let Some(record) = UpRecord::load(&options.layout)? {
            record.must_be_of(&options.layout)?;
        }
        options.layout.make()?;
        let lock = UpLock::take(&options.layout)?;
        // Before anything is started: a variable that makes no sense would stop the host agent last of all.
        host::check_configuration(&options.layout, &options.backend)?;
        let address = claim_port(options.listen)?;
        let owner = token::ensure(&options.layout.tokens().join("owner"))?;
        let owner = Target {
            context: Some(options.context.clone()),
            endpoint: format!("http://{address}"),
            token: owner,
        };
        Ok(Self {
            options,
            address,
            owner,
            tasks: TaskRegistry::new(),
            postgres: None,
            coordinator: None,
            host: None,
            host_spec: None,
            outside_database: std::env::var_os("DATABASE_URL").filter(|url| !url.is_empty()),
            _lock: lock,
        })
    }

    /// Returns what calls to the new coordinator need.
    pub(crate) fn owner(&self) -> &Target {
        &self.owner
    }

    /// Starts all roles in order; `say` is told what begins.
    ///
    /// # Errors
    ///
    /// Why a role does not start, with the end of its log. What had started is still running: call
    /// [`Supervisor::stop`].
    pub(crate) async fn start(&mut self, mut say: impl FnMut(&str)) -> Result<(), CliError> {
        self.save(false)?;
        // Before PostgreSQL, which lets exactly this account through to its socket.
        let account = account::ensure(account::COORDINATOR_USER)?;
        let database = match self.outside_database.clone() {
            Some(url) => url,
            None => {
                say("starting PostgreSQL");
                self.start_postgres().await?
            }
        };
        say("starting the coordinator");
        self.start_coordinator(account, database)?;
        self.save(false)?;
        let target = self.owner.clone();
        self.wait_ready(self.coordinator.as_ref(), || async {
            let client = Client::connect_once(&target).await?;
            let answer =
                client.api().tokens().who_am_i_with_options(WhoAmIRequest::default(), client::quick()).await;
            answer.map(|_| ()).map_err(|error| client.error(&error))
        })
        .await?;
        say("starting the host agent, which tries each backend");
        self.start_host()?;
        self.save(false)?;
        self.wait_ready(self.host.as_ref(), || async {
            match host::own_host(&self.options.layout, &self.owner).await? {
                Some(host) if host.connected => Ok(()),
                _ => Err(CliError::refused("the host agent has not connected", "")),
            }
        })
        .await
    }

    /// Keeps `up.json` true until `stop` ends.
    pub(crate) async fn watch(&mut self, stop: impl Future<Output = ()>) -> Result<(), CliError> {
        tokio::pin!(stop);
        // PostgreSQL is restarted by its own supervisor, which does not say as which process: its pid file is looked at.
        let mut look = tokio::time::interval(LOOK_PERIOD);
        let mut saved = None;
        loop {
            let record = self.record(true);
            if saved.as_ref() != Some(&record) {
                record.save(&self.options.layout)?;
                saved = Some(record);
            }
            let (Some(coordinator), Some(host)) = (&mut self.coordinator, &mut self.host) else {
                return Ok(());
            };
            tokio::select! {
                () = &mut stop => return Ok(()),
                _ = coordinator.state.changed() => {}
                _ = host.state.changed() => {}
                _ = look.tick() => {}
            }
        }
    }

    /// Stops everything in order; `say` is told about each step. Sandboxes stop and keep their files.
    pub(crate) async fn stop(mut self, mut say: impl FnMut(&str)) {
        if let Some(host) = self.host.take() {
            say("stopping the host agent");
            host.end().await;
        }
        if let Some(spec) = self.host_spec.take() {
            say("stopping sandboxes; their files stay");
            host::stop_sandboxes(spec).await;
        }
        if let Some(coordinator) = self.coordinator.take() {
            say("stopping the coordinator");
            coordinator.end().await;
        }
        if let Some(postgres) = self.postgres.take() {
            say("stopping PostgreSQL");
            postgres.end().await;
        } else if self.outside_database.is_none() {
            // Interrupted while it was starting: then there is a server that no task has.
            if let Err(error) = postgres::stop_leftover(&self.options.layout).await {
                tracing::warn!(%error, "PostgreSQL is left running; the next `up` takes it over");
            }
        }
        if let Err(error) = self.tasks.shutdown(STOP_GRACE).await {
            tracing::warn!(error = error_chain(&error), "tasks were dropped");
        }
        // Last of all: whoever waits for us sees the file go when nothing runs any more.
        let _ = std::fs::remove_file(self.options.layout.record());
    }

    /// Returns what runs, for `up.json`.
    pub(crate) fn record(&self, ready: bool) -> UpRecord {
        let pid = i32::try_from(std::process::id()).unwrap_or_default();
        let layout = &self.options.layout;
        let mut roles = Vec::new();
        if let Some(running) = &self.postgres {
            roles.push(RoleRecord {
                name: "postgres".into(),
                pid: postgres::postmaster_pid(layout),
                restarts: running.state.borrow().restarts,
            });
        }
        for running in [&self.coordinator, &self.host].into_iter().flatten() {
            let ChildState { pid, restarts } = *running.state.borrow();
            roles.push(RoleRecord { name: running.name.into(), pid, restarts });
        }
        UpRecord {
            version: env!("CARGO_PKG_VERSION").into(),
            pid,
            start_ticks: start_ticks(pid).unwrap_or_default(),
            ready,
            endpoint: format!("http://{}", self.address),
            data_dir: layout.data.clone(),
            run_dir: layout.run.clone(),
            logs_dir: layout.logs(),
            database: if self.outside_database.is_some() { "outside" } else { "private" }.into(),
            context: self.options.context.clone(),
            roles,
        }
    }

    fn save(&self, ready: bool) -> Result<(), CliError> {
        self.record(ready).save(&self.options.layout)
    }

    async fn start_postgres(&mut self) -> Result<OsString, CliError> {
        let layout = &self.options.layout;
        let postgres = PrivatePostgres::start(postgres::config(layout)).await.map_err(|error| {
            CliError::refused(format!("PostgreSQL does not start: {}", error_chain(&error)), error.hint())
        })?;
        let url = postgres::url(layout);
        let stop = CancellationToken::new();
        let (sender, state) = watch::channel(ChildState::default());
        let token = stop.clone();
        self.tasks.spawn(POSTGRES, async move {
            let mut restarts = postgres.restarts();
            let supervised = postgres.supervise(token);
            tokio::pin!(supervised);
            let result = loop {
                tokio::select! {
                    result = &mut supervised => break result,
                    Ok(()) = restarts.changed() => {
                        let count = *restarts.borrow_and_update();
                        sender.send_modify(|state| state.restarts = count);
                    }
                }
            };
            drop(sender);
            result.map_err(|error| error_chain(&error))
        });
        self.postgres = Some(Running { name: "postgres", stop, state });
        Ok(url)
    }

    fn start_coordinator(&mut self, account: Account, database: OsString) -> Result<(), CliError> {
        let layout = &self.options.layout;
        for directory in [layout.data_of("coordinator"), layout.run_of("coordinator")] {
            make_directory(&directory, 0o700)?;
            account::give(&directory, account)?;
        }
        // A socket of a killed coordinator would make the new one fail to bind.
        let _ = std::fs::remove_file(layout.link_socket());
        let host_token = token::ensure(&layout.tokens().join("host"))?;
        let spec = ChildSpec {
            name: "coordinator",
            program: OWN_PROGRAM.into(),
            shown_as: "cloister",
            arguments: role_arguments("coordinator", Some(account)),
            set: vec![
                ("DATABASE_URL", database),
                ("CLOISTER_LISTEN", self.address.to_string().into()),
                ("CLOISTER_COORDINATOR_SOCKET", layout.link_socket().into()),
                ("CLOISTER_DATA_DIR", layout.data_of("coordinator").into()),
                ("CLOISTER_RUN_DIR", layout.run_of("coordinator").into()),
                ("CLOISTER_AUTH_TOKENS", host_token.into()),
                ("CLOISTER_COORDINATOR_OWNER_TOKEN", self.owner.token.clone().into()),
            ],
            unset: &["HOME", "CLOISTER_TOKEN", "CLOISTER_ENDPOINT", "CLOISTER_CONTEXT", "CLOISTER_CONFIG"],
            logs: layout.logs(),
            grace: STOP_GRACE,
        };
        self.coordinator = Some(self.spawn(spec));
        Ok(())
    }

    fn start_host(&mut self) -> Result<(), CliError> {
        let spec = host::host_spec(&self.options.layout, &self.options.backend)?;
        self.host_spec = Some(spec.clone());
        self.host = Some(self.spawn(spec));
        Ok(())
    }

    fn spawn(&self, spec: ChildSpec) -> Running {
        let name = spec.name;
        let stop = CancellationToken::new();
        let (sender, state) = watch::channel(ChildState::default());
        let token = stop.clone();
        self.tasks.spawn(CHILD, async move {
            spec.supervise(token, sender).await;
            Ok::<(), std::convert::Infallible>(())
        });
        Running { name, stop, state }
    }

    /// Waits until a role answers.
    async fn wait_ready<F>(
        &self,
        role: Option<&Running>,
        mut answers: impl FnMut() -> F,
    ) -> Result<(), CliError>
    where
        F: Future<Output = Result<(), CliError>>,
    {
        let Some(role) = role else { return Ok(()) };
        let deadline = Instant::now() + READY_TIMEOUT;
        loop {
            let error = match answers().await {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            let restarts = role.state.borrow().restarts;
            if restarts >= FAILED_STARTS || Instant::now() >= deadline {
                let logs = self.options.layout.logs();
                let tail = log::tail(&logs, role.name, TAIL_LINES);
                return Err(CliError::refused(
                    format!("the {} does not start ({error}); the end of its log:\n{tail}", role.name),
                    format!("the whole log is `{}`", logs.join(format!("{}.log", role.name)).display()),
                ));
            }
            tokio::time::sleep(READY_PAUSE).await;
        }
    }
}

impl Running {
    /// Ends the role and waits for it: the state's sender goes with its task.
    async fn end(mut self) {
        self.stop.cancel();
        while self.state.changed().await.is_ok() {}
    }
}

/// Refuses everybody but root, with the remedy.
///
/// # Errors
///
/// [`CliError::Refused`].
pub(crate) fn require_root(verb: &str) -> Result<(), CliError> {
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    Err(CliError::refused(
        format!("`cloister {verb}` needs root: sandboxes are made of namespaces, cgroups and mounts"),
        format!("run `sudo cloister {verb}`; commands about sessions and hosts need none"),
    ))
}

/// Returns the address that the API will have, with a free port in place of 0.
fn claim_port(listen: SocketAddr) -> Result<SocketAddr, CliError> {
    // Freed again at once: the coordinator binds it, and after a restart binds the same one again.
    let taken = |error: std::io::Error| {
        CliError::refused(
            format!("cannot listen on {listen}: {error}"),
            "give `--listen` another address and port, or stop what listens there (`ss -ltnp` shows it)",
        )
    };
    TcpListener::bind(listen).and_then(|listener| listener.local_addr()).map_err(taken)
}

fn role_arguments(role: &str, account: Option<Account>) -> Vec<OsString> {
    let mut arguments = vec![role.into(), "--supervised-by".into(), std::process::id().to_string().into()];
    if let Some(account) = account {
        arguments.extend(["--run-as".into(), account.to_string().into()]);
    }
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_taken_port_names_the_flag() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let error = claim_port(address).unwrap_err();
        assert!(error.to_string().contains(&address.to_string()), "{error}");
        assert!(error.hint().is_some_and(|hint| hint.contains("--listen")));
        drop(listener);
        assert_eq!(claim_port(address).unwrap(), address);
        assert_ne!(claim_port(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap().port(), 0);
    }
}
