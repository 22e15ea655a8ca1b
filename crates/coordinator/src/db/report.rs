//! What a host says it has, against what the store says it should have.

use std::collections::BTreeMap;

use cloister_types::session::{Reason, SessionEvent, SessionState};
use cloister_types::{HostId, SandboxId, SessionId};

use super::fault::commit;
use super::session::session_query;
use super::transition::apply;
use super::{SessionRecord, Store, StoreError, TransitionParams};

/// One sandbox (or kept layer) on a host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SandboxReport {
    /// Its session.
    pub session_id: SessionId,
    /// The sandbox; `None` when only the layer is there.
    pub sandbox_id: Option<SandboxId>,
    /// The highest epoch the host saw for the session.
    pub epoch: u64,
    /// False when only the layer is there.
    pub running: bool,
    /// How `sandbox_id` ended, where the host knows.
    pub ended: Option<(Reason, String)>,
}

/// Why a host makes a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReportCause {
    /// Its link is new.
    Connected,
    /// The same, and its machine was started again since its last one.
    Rebooted,
    /// It is shut down, with its sandboxes.
    Stopped,
}

impl ReportCause {
    /// Returns why a sandbox that is not there any more has ended, when the host does not know better.
    fn end(self) -> (Reason, &'static str) {
        match self {
            Self::Connected => (
                Reason::HostRestarted,
                "the host came back without its sandbox; resume starts it on its kept files",
            ),
            Self::Rebooted => (
                Reason::HostRebooted,
                "the host's machine was started again; resume starts it on its kept files",
            ),
            Self::Stopped => {
                (Reason::HostStopped, "its host was shut down; resume starts it on its kept files")
            }
        }
    }
}

/// A sandbox that runs although the store says that it should not; its layer is wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StaleSandbox {
    /// Its session.
    pub session_id: SessionId,
    /// The sandbox to stop.
    pub sandbox_id: SandboxId,
    /// The epoch to stop it with.
    pub epoch: u64,
}

/// What follows from a report.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ReportOutcome {
    /// Unknown, deleted or failed sessions: the host removes everything of them.
    pub remove: Vec<SessionId>,
    /// Sandboxes to stop, keeping the layer.
    pub stop: Vec<StaleSandbox>,
    /// Sessions that went to `paused`, since their sandbox is gone.
    pub gone: Vec<SessionId>,
    /// Sessions that went from `host_lost` back to `active`.
    pub found: Vec<SessionId>,
}

impl Store {
    /// Compares a host's full report with the store and commits what follows for sessions. Where the host
    /// does not know how a sandbox ended, `cause` is the reason that its session gets. Operations under way are left to
    /// their executors.
    ///
    /// # Errors
    ///
    /// [`StoreError::Conflict`] when the host registered again meanwhile, [`StoreError::Unavailable`].
    pub async fn reconcile_report(
        &self,
        host_id: &HostId,
        link_epoch: u64,
        cause: ReportCause,
        sandboxes: &[SandboxReport],
    ) -> Result<ReportOutcome, StoreError> {
        self.observe("reconcile_report", async {
            let mut tx = self.pool.begin().await?;
            // The host row first: a second report of the same host waits, an outdated one ends here.
            let current = sqlx::query_scalar!(
                "SELECT link_epoch FROM hosts WHERE id = $1 AND connected FOR NO KEY UPDATE",
                host_id.as_str(),
            )
            .fetch_optional(&mut *tx)
            .await?;
            if current.map(i64::unsigned_abs) != Some(link_epoch) {
                return Err(StoreError::Conflict { kind: "host", id: host_id.to_string() }.into());
            }
            let reported: Vec<String> =
                sandboxes.iter().map(|report| report.session_id.to_string()).collect();
            // What should be there and what is there, in one order of locks. Reads `sessions_by_host` and
            // `sessions_pkey`.
            let rows = session_query!(
                "SELECT ",
                " FROM sessions s
                  WHERE (s.host_id = $1 AND s.state <> 'deleted') OR s.id = ANY($2) ORDER BY s.id FOR UPDATE",
                host_id.as_str(),
                &reported[..],
            )
            .fetch_all(&mut *tx)
            .await?;
            let mut outcome = ReportOutcome::default();
            let mut unknown: BTreeMap<&SessionId, Vec<&SandboxReport>> = BTreeMap::new();
            for report in sandboxes {
                unknown.entry(&report.session_id).or_default().push(report);
            }
            for row in rows {
                let session = SessionRecord::try_from(row)?;
                let reports = unknown.remove(&session.id).unwrap_or_default();
                let verdict = judge(&session, host_id, &reports);
                for report in &reports {
                    let Some(sandbox_id) = &report.sandbox_id else { continue };
                    let is_stale = report.running && verdict.keep.is_some_and(|kept| kept != sandbox_id);
                    let is_unwanted = report.running && verdict.stop_all;
                    if is_stale || is_unwanted {
                        outcome.stop.push(StaleSandbox {
                            session_id: session.id.clone(),
                            sandbox_id: sandbox_id.clone(),
                            epoch: session.epoch.max(report.epoch),
                        });
                    }
                }
                if verdict.remove && !reports.is_empty() {
                    outcome.remove.push(session.id.clone());
                }
                if let Some(event) = verdict.event {
                    let mut params = TransitionParams::new(session.id.clone(), event);
                    if event == SessionEvent::SandboxGone {
                        let (reason, message) = end_of(&session, cause, &reports);
                        params.reason = Some(reason);
                        params.message = message;
                        outcome.gone.push(session.id.clone());
                    } else {
                        outcome.found.push(session.id.clone());
                    }
                    apply(&mut tx, &session, &params).await?;
                }
            }
            outcome.remove.extend(unknown.into_keys().cloned());
            commit(tx, "reconcile_report").await?;
            Ok(outcome)
        })
        .await
    }
}

/// Returns why a session's sandbox is gone: what the host knows of its end, else what the report was made for.
fn end_of(session: &SessionRecord, cause: ReportCause, reports: &[&SandboxReport]) -> (Reason, String) {
    let known = reports
        .iter()
        .filter(|report| !report.running && report.sandbox_id == session.sandbox_id)
        .find_map(|report| report.ended.clone());
    match known {
        // Nobody asked this session to stop: its host stopped all.
        Some((Reason::Requested, _)) if session.state != SessionState::Pausing => {
            let (reason, message) = ReportCause::Stopped.end();
            (reason, message.to_owned())
        }
        Some(known) => known,
        None => {
            let (reason, message) = cause.end();
            (reason, message.to_owned())
        }
    }
}

/// What a report means for one session.
#[derive(Default)]
struct Verdict<'a> {
    /// What happened to it.
    event: Option<SessionEvent>,
    /// Its sandbox; others of the session are stopped. `None` leaves all to an operation under way.
    keep: Option<&'a SandboxId>,
    /// Nothing of it should run, but its layer is wanted.
    stop_all: bool,
    /// Nothing of it should be there.
    remove: bool,
}

fn judge<'a>(session: &'a SessionRecord, host_id: &HostId, reports: &[&SandboxReport]) -> Verdict<'a> {
    if session.host_id.as_ref() != Some(host_id) {
        return Verdict { remove: true, ..Verdict::default() };
    }
    let runs = reports.iter().any(|report| {
        report.running && report.sandbox_id.is_some() && session.sandbox_id == report.sandbox_id
    });
    match session.state {
        SessionState::Active | SessionState::HostLost => Verdict {
            event: match (runs, session.state) {
                (true, SessionState::HostLost) => Some(SessionEvent::HostFound),
                (true, _) => None,
                (false, _) => Some(SessionEvent::SandboxGone),
            },
            keep: session.sandbox_id.as_ref(),
            ..Verdict::default()
        },
        // The stop that was asked for has nothing left to do.
        SessionState::Pausing if !runs => Verdict {
            event: Some(SessionEvent::SandboxGone),
            keep: session.sandbox_id.as_ref(),
            ..Verdict::default()
        },
        // An operation is under way and decides; it is repeatable.
        SessionState::Pausing | SessionState::Starting | SessionState::Resuming | SessionState::Deleting => {
            Verdict::default()
        }
        SessionState::Paused => Verdict { stop_all: true, ..Verdict::default() },
        SessionState::Pending | SessionState::Queued | SessionState::Failed | SessionState::Deleted => {
            Verdict { remove: true, ..Verdict::default() }
        }
    }
}
