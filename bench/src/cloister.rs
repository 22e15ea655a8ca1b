//! The Cloister under test: one connection to its API, which stays open, as a program that makes many sessions has it.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use cloister_api::app::attach_exec_request::Request;
use cloister_api::app::attach_exec_response::Response;
use cloister_api::app::{self, AttachExecRequest, AttachStart};
use cloister_api::common::output_frame::Frame;
use cloister_api::common::{ExecExit, ExecSpec, ExitReason, Limits};
use cloister_api::connection::{Connection, Endpoint};
use serde::Deserialize;

/// How long anything may take before the run is given up.
const PATIENCE: Duration = Duration::from_secs(60);

/// Where the coordinator is, from the environment or from the client's contexts.
pub(crate) struct Target {
    endpoint: Endpoint,
    token: String,
}

#[derive(Deserialize)]
struct ContextFile {
    current: Option<String>,
    #[serde(default)]
    contexts: std::collections::BTreeMap<String, Context>,
}

#[derive(Deserialize)]
struct Context {
    endpoint: String,
    #[serde(default)]
    token: String,
}

impl Target {
    /// Finds the target: `CLOISTER_ENDPOINT` with `CLOISTER_TOKEN`, else the current context of the command line.
    ///
    /// # Errors
    ///
    /// When there is neither.
    pub(crate) fn find() -> Result<Self> {
        let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        if let (Some(endpoint), Some(token)) = (set("CLOISTER_ENDPOINT"), set("CLOISTER_TOKEN")) {
            return Ok(Self { endpoint: endpoint.parse()?, token });
        }
        let path = match set("CLOISTER_CONFIG") {
            Some(path) => PathBuf::from(path),
            None => set("XDG_CONFIG_HOME")
                .map(PathBuf::from)
                .or_else(|| set("HOME").map(|home| PathBuf::from(home).join(".config")))
                .context("HOME is not set")?
                .join("cloister/config.toml"),
        };
        let text = std::fs::read_to_string(&path).with_context(|| {
            format!("read `{}`: is `cloister up` running? (`./run` starts it)", path.display())
        })?;
        let mut file: ContextFile = toml::from_str(&text).context("parse the client's contexts")?;
        let name = set("CLOISTER_CONTEXT").or(file.current.take()).context("no context is current")?;
        let context = file.contexts.remove(&name).with_context(|| format!("there is no context `{name}`"))?;
        Ok(Self { endpoint: context.endpoint.parse()?, token: context.token })
    }
}

/// The fact of a session that says whether its host had the sandbox ready.
const READY_FACT: &str = "made_ready_before";

/// A session that runs.
pub(crate) struct Made {
    /// Its id.
    pub(crate) id: String,
    /// The host had its sandbox ready.
    pub(crate) was_ready: bool,
}

/// A connection to the Cloister under test.
pub(crate) struct Cloister {
    connection: Connection,
    /// How its sandboxes are isolated.
    backend: &'static str,
}

/// The gVisor that a host uses.
pub(crate) struct Runsc {
    pub(crate) version: String,
    pub(crate) path: PathBuf,
}

impl Cloister {
    /// Connects.
    ///
    /// # Errors
    ///
    /// When nothing answers.
    pub(crate) async fn connect(target: &Target, backend: &'static str) -> Result<Self> {
        let connection = Connection::dial(&target.endpoint, Some(&target.token)).await.context("connect")?;
        Ok(Self { connection, backend })
    }

    /// Returns the gVisor of the first host that has one.
    ///
    /// # Errors
    ///
    /// When there is none.
    pub(crate) async fn runsc(&self) -> Result<Runsc> {
        let hosts = self
            .connection
            .hosts()
            .list_hosts(app::ListHostsRequest::default())
            .await
            .context("list hosts")?;
        let hosts = hosts.into_owned();
        let capabilities = hosts.hosts.iter().flat_map(|host| &host.capabilities);
        let found = capabilities.into_iter().find(|capability| capability.name == "gvisor.runsc");
        // `20240729.0 at `/usr/bin/runsc``
        let detail = &found.context("no host has gVisor: `just gvisor`, and start Cloister again")?.detail;
        let (version, path) = detail.split_once(" at `").context("the capability names version and path")?;
        Ok(Runsc { version: version.to_owned(), path: path.trim_end_matches('`').into() })
    }

    /// Returns the version of the coordinator.
    ///
    /// # Errors
    ///
    /// When the call fails.
    pub(crate) async fn version(&self) -> Result<String> {
        let answer =
            self.connection.tokens().who_am_i(app::WhoAmIRequest::default()).await.context("ask who I am")?;
        Ok(answer.into_owned().version)
    }

    /// Asks for a session: one read of the store.
    ///
    /// # Errors
    ///
    /// When the call fails.
    pub(crate) async fn get_session(&self, session: &str) -> Result<()> {
        let request = app::GetSessionRequest { session: session.to_owned(), ..Default::default() };
        self.connection.sessions().get_session(request).await.context("get a session")?;
        Ok(())
    }

    /// Asks for an exec: a read of the store, and a question to the shim by way of the host agent.
    ///
    /// # Errors
    ///
    /// When the call fails.
    pub(crate) async fn get_exec(&self, session: &str, exec_id: &str) -> Result<()> {
        let request = app::GetExecRequest {
            session: session.to_owned(),
            exec_id: exec_id.to_owned(),
            ..Default::default()
        };
        self.connection.execs().get_exec(request).await.context("get an exec")?;
        Ok(())
    }

    /// Creates a session and returns it once its sandbox runs.
    ///
    /// # Errors
    ///
    /// When it does not become active.
    pub(crate) async fn create(&self, limits: Limits) -> Result<Made> {
        let request = app::CreateSessionRequest {
            request_id: request_id(),
            backend: self.backend.to_owned(),
            limits: limits.into(),
            ttl_ms: 600_000,
            wait_ms: millis(PATIENCE),
            ..Default::default()
        };
        let answer = self.connection.sessions().create_session(request).await.context("create a session")?;
        let session = answer.into_owned().session;
        ensure!(
            session.state.as_known() == Some(app::SessionState::Active),
            "session `{}` is not active: {} {}",
            session.id,
            session.reason,
            session.message
        );
        let was_ready = session.facts.iter().any(|fact| fact.name == READY_FACT && fact.value == "true");
        Ok(Made { id: session.id.clone(), was_ready })
    }

    /// Runs a command to its end and returns the exec's id.
    ///
    /// # Errors
    ///
    /// When it does not exit with 0.
    pub(crate) async fn exec(&self, session: &str, argv: &[&str]) -> Result<String> {
        let spec = ExecSpec { argv: argv.iter().map(ToString::to_string).collect(), ..Default::default() };
        let start = AttachStart {
            request_id: request_id(),
            session: session.to_owned(),
            spec: spec.into(),
            ..Default::default()
        };
        let stream = self.connection.streams().attach_exec().await.context("open an exec stream")?;
        let (mut sender, mut receiver) = stream.into_split();
        let first = AttachExecRequest { request: Some(Request::from(start)), ..Default::default() };
        // When this fails, the receiving half says why.
        let _ = sender.send(first).await;
        let mut id = String::new();
        loop {
            let message = receiver.message().await.context("read an exec stream")?;
            let Some(message) = message else { bail!("the exec's stream was cut") };
            match message.to_owned_message().response {
                Some(Response::Started(exec)) => id.clone_from(&exec.id),
                Some(Response::Frame(frame)) => {
                    if let Some(Frame::Exit(exit)) = frame.frame {
                        check(&exit)?;
                        return Ok(id);
                    }
                }
                None => {}
            }
        }
    }

    /// Deletes a session and waits until it is gone.
    ///
    /// # Errors
    ///
    /// When it is not deleted.
    pub(crate) async fn delete(&self, session: &str) -> Result<()> {
        let request = app::DeleteSessionRequest {
            request_id: request_id(),
            session: session.to_owned(),
            wait_ms: millis(PATIENCE),
            ..Default::default()
        };
        let answer = self.connection.sessions().delete_session(request).await.context("delete a session")?;
        let session = answer.into_owned().session;
        ensure!(
            session.state.as_known() == Some(app::SessionState::Deleted),
            "session `{}` is not deleted",
            session.id
        );
        Ok(())
    }
}

fn check(exit: &ExecExit) -> Result<()> {
    let is_good = exit.reason.as_known() == Some(ExitReason::Exited) && exit.code == 0;
    ensure!(is_good, "the command ended with {}: {}", exit.code, exit.message);
    Ok(())
}

fn request_id() -> String {
    format!("bench-{}", uuid::Uuid::now_v7().simple())
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).expect("it is a constant of a minute")
}
