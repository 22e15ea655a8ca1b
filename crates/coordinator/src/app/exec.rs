//! Execs: small calls to the host that has the session.
//!
//! Nothing of an exec is stored here: the host is the only authority on what runs on it. A call that changes
//! something leaves its audit row before the host is asked.

use std::time::Duration;

use cloister_api::common::{Exec, ExecSpec, TerminalSize};
use cloister_api::host::command::Command as CommandKind;
use cloister_api::host::command_result::Result as ResultKind;
use cloister_api::host::{
    GetExec, ListExecs, OpenStream, ResizeExec, SignalExec, StartExec, WaitExec, WriteStdin,
};
use cloister_types::{ExecId, HostId, SessionId, SessionState};

use super::relay::{Attachment, OutputRelay};
use super::{App, Authorized};
use crate::db::SessionRecord;
use crate::error::{self, AppError};
use crate::link::LinkError;

/// How long a host may take for a small command.
const COMMAND_DEADLINE: Duration = Duration::from_secs(15);

/// Where an exec's commands go.
pub(super) struct Target {
    pub(super) session_id: SessionId,
    pub(super) host_id: HostId,
    epoch: u64,
}

/// What to attach to.
pub(crate) enum AttachTo {
    /// A new exec.
    Start {
        /// The caller's request id.
        request_id: String,
        /// What to run.
        spec: ExecSpec,
    },
    /// One that exists.
    Existing {
        /// Its id.
        exec_id: ExecId,
        /// Where to go on.
        from_offset: u64,
    },
}

impl App {
    /// Where a call that changes something goes: the session must be active, and the audit row is written.
    pub(super) async fn exec_target(
        &self,
        authorized: &Authorized,
        reference: &str,
    ) -> Result<Target, AppError> {
        let target = self.store.begin_exec(authorized.context(), reference).await?;
        match (target.state, target.host_id) {
            (SessionState::Active, Some(host_id)) => {
                Ok(Target { session_id: target.session_id, host_id, epoch: target.epoch })
            }
            (state, _) => Err(not_active(&target.session_id, state, &target.message)),
        }
    }

    /// Where a call that only reads goes: a paused session's host answers from its disk.
    async fn read_target(&self, authorized: &Authorized, reference: &str) -> Result<Target, AppError> {
        let session: SessionRecord =
            self.store.resolve_session(authorized.organization_id(), reference).await?;
        match (session.state, session.host_id) {
            (SessionState::Deleting | SessionState::Deleted, _) | (_, None) => Err(AppError::new(
                &error::EXEC_NOT_FOUND,
                format!("session `{}` is `{}` and has no execs", session.id, session.state),
            )),
            (_, Some(host_id)) => Ok(Target { session_id: session.id, host_id, epoch: session.epoch }),
        }
    }

    async fn ask(
        &self,
        target: &Target,
        command: impl Into<CommandKind>,
        deadline: Duration,
    ) -> Result<ResultKind, LinkError> {
        self.links.command(&target.host_id, &target.session_id, target.epoch, command, deadline).await
    }

    pub(crate) async fn start_exec(
        &self,
        authorized: &Authorized,
        reference: &str,
        spec: ExecSpec,
    ) -> Result<Exec, AppError> {
        let target = self.exec_target(authorized, reference).await?;
        let start = StartExec {
            exec_id: ExecId::generate().to_string(),
            request_id: authorized.context().request_id.clone(),
            spec: spec.into(),
            ..Default::default()
        };
        exec_answer(&target, self.ask(&target, start, COMMAND_DEADLINE).await)
    }

    pub(crate) async fn get_exec(
        &self,
        authorized: &Authorized,
        reference: &str,
        exec_id: &ExecId,
    ) -> Result<Exec, AppError> {
        let target = self.read_target(authorized, reference).await?;
        let get = GetExec { exec_id: exec_id.to_string(), ..Default::default() };
        exec_answer(&target, self.ask(&target, get, COMMAND_DEADLINE).await)
    }

    pub(crate) async fn list_execs(
        &self,
        authorized: &Authorized,
        reference: &str,
    ) -> Result<Vec<Exec>, AppError> {
        let session = self.store.resolve_session(authorized.organization_id(), reference).await?;
        let Some(host_id) = session.host_id else { return Ok(Vec::new()) };
        if matches!(session.state, SessionState::Deleting | SessionState::Deleted) {
            return Ok(Vec::new());
        }
        let target = Target { session_id: session.id, host_id, epoch: session.epoch };
        match self.ask(&target, ListExecs::default(), COMMAND_DEADLINE).await? {
            ResultKind::Execs(list) => Ok(list.execs),
            _ => Err(LinkError::Malformed(target.host_id).into()),
        }
    }

    pub(crate) async fn wait_exec(
        &self,
        authorized: &Authorized,
        reference: &str,
        exec_id: &ExecId,
        wait: Duration,
    ) -> Result<Exec, AppError> {
        let target = self.read_target(authorized, reference).await?;
        let command = WaitExec {
            exec_id: exec_id.to_string(),
            wait_ms: u64::try_from(wait.as_millis()).unwrap_or(u64::MAX),
            ..Default::default()
        };
        exec_answer(&target, self.ask(&target, command, wait + COMMAND_DEADLINE).await)
    }

    pub(crate) async fn write_stdin(
        &self,
        authorized: &Authorized,
        reference: &str,
        write: WriteStdin,
    ) -> Result<u64, AppError> {
        let target = self.exec_target(authorized, reference).await?;
        match self.ask(&target, write, COMMAND_DEADLINE).await? {
            ResultKind::StdinWritten(written) => Ok(written.next_offset),
            _ => Err(LinkError::Malformed(target.host_id).into()),
        }
    }

    pub(crate) async fn signal_exec(
        &self,
        authorized: &Authorized,
        reference: &str,
        exec_id: &ExecId,
        signal: i32,
    ) -> Result<(), AppError> {
        let target = self.exec_target(authorized, reference).await?;
        let command = SignalExec { exec_id: exec_id.to_string(), signal, ..Default::default() };
        match self.ask(&target, command, COMMAND_DEADLINE).await? {
            ResultKind::Signaled(_) => Ok(()),
            _ => Err(LinkError::Malformed(target.host_id).into()),
        }
    }

    pub(crate) async fn resize_exec(
        &self,
        authorized: &Authorized,
        reference: &str,
        exec_id: &ExecId,
        size: TerminalSize,
    ) -> Result<(), AppError> {
        let target = self.exec_target(authorized, reference).await?;
        let command = ResizeExec { exec_id: exec_id.to_string(), size: size.into(), ..Default::default() };
        match self.ask(&target, command, COMMAND_DEADLINE).await? {
            ResultKind::Resized(_) => Ok(()),
            _ => Err(LinkError::Malformed(target.host_id).into()),
        }
    }

    /// Opens the output of an exec.
    pub(crate) async fn read_output(
        &self,
        authorized: &Authorized,
        reference: &str,
        exec_id: &ExecId,
        from_offset: u64,
        no_follow: bool,
    ) -> Result<OutputRelay, AppError> {
        let target = self.read_target(authorized, reference).await?;
        let open = OpenStream {
            session_id: target.session_id.to_string(),
            exec_id: exec_id.to_string(),
            from_offset,
            no_follow,
            ..Default::default()
        };
        let stream = self.links.open_stream(&target.host_id, open).await?;
        Ok(OutputRelay::new(target.host_id, stream, from_offset, no_follow, self.stopping()))
    }

    /// Starts an exec (or takes one up) and returns it with its streams: one exchange with the host.
    pub(crate) async fn attach_exec(
        &self,
        authorized: &Authorized,
        reference: &str,
        to: AttachTo,
    ) -> Result<Attachment, AppError> {
        let (target, open, from_offset) = match to {
            AttachTo::Start { request_id, spec } => {
                let target = self.exec_target(authorized, reference).await?;
                let exec_id = ExecId::generate().to_string();
                let start = StartExec {
                    exec_id: exec_id.clone(),
                    request_id,
                    spec: spec.into(),
                    ..Default::default()
                };
                let open = OpenStream { start: start.into(), exec_id, ..Default::default() };
                (target, open, 0)
            }
            AttachTo::Existing { exec_id, from_offset } => {
                let target = self.read_target(authorized, reference).await?;
                let open = OpenStream { exec_id: exec_id.to_string(), from_offset, ..Default::default() };
                (target, open, from_offset)
            }
        };
        let open = OpenStream { session_id: target.session_id.to_string(), ..open };
        let stream = self.links.open_stream(&target.host_id, open).await?;
        let relay = OutputRelay::new(target.host_id, stream, from_offset, false, self.stopping());
        Attachment::open(relay, self.tasks.clone()).await
    }
}

fn not_active(session_id: &SessionId, state: SessionState, message: &str) -> AppError {
    let why = if message.is_empty() { String::new() } else { format!(": {message}") };
    let text = format!("session `{session_id}` is `{state}`{why}");
    match state {
        SessionState::Paused => AppError::new(&error::SANDBOX_NOT_RUNNING, text)
            .with_remedy(format!("`cloister session resume {session_id}`, then try again")),
        SessionState::Pending | SessionState::Queued | SessionState::Starting | SessionState::Resuming => {
            AppError::new(&error::SANDBOX_NOT_RUNNING, text)
                .with_remedy("wait until the session is `active`, then try again")
        }
        SessionState::Pausing => AppError::new(&error::SANDBOX_NOT_RUNNING, text).with_remedy(format!(
            "wait until it is `paused`, then `cloister session resume {session_id}` and try again"
        )),
        SessionState::HostLost => AppError::new(&error::SANDBOX_NOT_RUNNING, text)
            .with_remedy("wait until its host is back: `cloister host list` shows whether it is connected"),
        SessionState::Active => AppError::new(&error::SANDBOX_NOT_RUNNING, text),
        SessionState::Failed | SessionState::Deleting | SessionState::Deleted => {
            AppError::new(&error::WRONG_STATE, text).with_remedy("create a new session")
        }
    }
}

fn exec_answer(target: &Target, answer: Result<ResultKind, LinkError>) -> Result<Exec, AppError> {
    match answer? {
        ResultKind::Exec(exec) => Ok(*exec),
        _ => Err(LinkError::Malformed(target.host_id.clone()).into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_that_cannot_be_resumed_is_not_told_to_be() {
        let id = SessionId::from_u128(1);
        let remedy = |state| not_active(&id, state, "").remedy.unwrap_or_default();
        assert!(remedy(SessionState::Paused).starts_with("`cloister session resume"));
        assert!(remedy(SessionState::Pausing).starts_with("wait until it is `paused`"));
        assert!(remedy(SessionState::HostLost).contains("`cloister host list`"));
        assert!(!remedy(SessionState::HostLost).contains("resume"));
    }
}
