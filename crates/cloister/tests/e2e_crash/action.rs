//! What it takes to get to a point that sessions alone do not pass.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use cloister_api::app::{CreateSessionRequest, SessionState};
use rustix::process::Signal;

use crate::client::{Client, limits, wait_ms};
use crate::rig::Rig;
use crate::session::Worker;
use crate::support::{Up, kill};
use crate::sweep::pids;

/// How long something may take that is seconds away.
const PATIENCE: Duration = Duration::from_secs(30);
const LOOK_AGAIN: Duration = Duration::from_millis(10);
/// Memory that sessions on the test's host are promised, in MiB.
pub(crate) const HOST_MEMORY_MIB: u64 = 2048;
const MIB: u64 = 1024 * 1024;

/// What is done between the use of the sessions and their deletion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    /// Nothing: sessions pass the point.
    None,
    /// The coordinator is started again, with rows in its store that are old enough to go.
    RestartCoordinator,
    /// The host agent is started again while sandboxes run.
    RestartHost,
    /// A sandbox ends by itself.
    KillShim,
    /// A session waits for capacity and gets it.
    Queue,
    /// A session cannot be resumed for want of capacity.
    RefuseResume,
    /// A token is made and revoked.
    Tokens,
    /// A session's time runs out.
    Expire,
    /// A step takes too long.
    PassDeadline,
    /// The host agent falls silent for three heartbeats and comes back.
    SilenceHost,
    /// An operation finds no host and is tried again later.
    LoseHost,
    /// A layer of a size that no session had.
    NewDiskSize,
    /// The connection that listens for changes is terminated, again and again.
    CutListener,
}

impl Action {
    /// Returns what leads to a point.
    pub(crate) fn to(point: &str) -> Self {
        let operation = point.strip_prefix("before_commit_").or_else(|| point.strip_prefix("after_commit_"));
        match operation.unwrap_or(point) {
            "bootstrap" | "prune" => Self::RestartCoordinator,
            "register_host" | "reconcile_report" => Self::RestartHost,
            "host_before_file_rename" | "host_after_adoption" | "host_after_registration" => {
                Self::RestartHost
            }
            "sandbox_during_adoption" => Self::RestartHost,
            "host_before_event" => Self::KillShim,
            "admit_queued" => Self::Queue,
            "resume_refused" => Self::RefuseResume,
            "create_token" | "revoke_token" => Self::Tokens,
            "expire_ttl" => Self::Expire,
            "pass_deadlines" => Self::PassDeadline,
            "mark_lost_hosts" => Self::SilenceHost,
            "retry_op" | "claim_ops" => Self::LoseHost,
            "sandbox_before_template_rename" => Self::NewDiskSize,
            _ => Self::None,
        }
    }

    /// Does it. What it makes is deleted when it returns.
    pub(crate) async fn perform(self, rig: &Rig, tag: &str, workers: &mut [Worker<'_>]) {
        let (up, client) = (&rig.up, &rig.client);
        match self {
            Self::None => {}
            Self::RestartCoordinator => {
                age_rows(up);
                kill(up.pid_of("coordinator"), Signal::KILL);
                rig.wait_until_reached().await;
            }
            Self::RestartHost => {
                kill(up.pid_of("host"), Signal::KILL);
                rig.wait_until_reached().await;
            }
            Self::KillShim => {
                kill(shim_of(up, &client.get(&workers[0].id).await.sandbox_id), Signal::KILL);
                rig.wait_until_reached().await;
                // The client sees it paused and starts it again.
                wait_until("the session to be known as stopped", || async {
                    client.get(&workers[0].id).await.state.as_known() != Some(SessionState::Active)
                })
                .await;
                workers[0].ensure_active().await;
            }
            Self::Queue => {
                let used = u64::try_from(workers.len()).unwrap() * limits().memory_bytes / MIB;
                let big = (HOST_MEMORY_MIB - used) * 3 / 4;
                let first = create(client, format!("{tag}-first"), big, 0, true).await;
                let second = create(client, format!("{tag}-second"), big, 0, false).await;
                wait_for_state(client, &second, SessionState::Queued).await;
                client.delete(&first, &format!("{tag}-first-delete")).await;
                wait_for_state(client, &second, SessionState::Active).await;
                client.delete(&second, &format!("{tag}-second-delete")).await;
            }
            Self::RefuseResume => {
                let used = u64::try_from(workers.len()).unwrap() * limits().memory_bytes / MIB;
                let paused = workers[0].id.clone();
                client.pause(&paused, format!("{tag}-refuse-pause")).await.expect("pause");
                wait_for_state(client, &paused, SessionState::Paused).await;
                let rest = HOST_MEMORY_MIB - used + limits().memory_bytes / MIB;
                let hog = create(client, format!("{tag}-hog"), rest, 0, true).await;
                let refused = client.resume(&paused, format!("{tag}-refuse-resume")).await.expect("resume");
                assert_eq!(refused.state.as_known(), Some(SessionState::Paused), "{refused:?}");
                client.delete(&hog, &format!("{tag}-hog-delete")).await;
                workers[0].resume().await;
            }
            Self::Tokens => client.make_and_revoke_token(&format!("{tag}-token")).await,
            Self::Expire => {
                let id = create(client, format!("{tag}-short"), 64, 500, false).await;
                wait_for_state(client, &id, SessionState::Deleted).await;
            }
            Self::PassDeadline => {
                let host = up.pid_of("host");
                kill(host, Signal::STOP);
                let id = create(client, format!("{tag}-late"), 64, 0, false).await;
                // As if it had been starting for minutes.
                sql(
                    &up.path("run/postgres"),
                    &format!(
                        "UPDATE sessions SET deadline_at = cloister_now() WHERE id = '{id}'; NOTIFY cloister_changes, '{id}'"
                    ),
                );
                wait_for_state(client, &id, SessionState::Failed).await;
                kill(host, Signal::CONT);
                client.delete(&id, &format!("{tag}-late-delete")).await;
            }
            Self::SilenceHost => {
                let host = up.pid_of("host");
                kill(host, Signal::STOP);
                rig.wait_until_reached().await;
                kill(host, Signal::CONT);
            }
            Self::LoseHost => {
                kill(up.pid(), Signal::STOP);
                kill(up.pid_of("host"), Signal::KILL);
                let id = create(client, format!("{tag}-early"), 64, 0, false).await;
                rig.wait_until_reached().await;
                kill(up.pid(), Signal::CONT);
                wait_for_state(client, &id, SessionState::Active).await;
                client.delete(&id, &format!("{tag}-early-delete")).await;
            }
            Self::NewDiskSize => {
                let id = create_with_disk(client, format!("{tag}-odd"), rig.new_disk_bytes()).await;
                client.delete(&id, &format!("{tag}-odd-delete")).await;
            }
            Self::CutListener => {}
        }
    }
}

/// Creates a session of the action's own.
async fn create(client: &Client, tag: String, memory_mib: u64, ttl_ms: u64, wait: bool) -> String {
    let request = CreateSessionRequest {
        request_id: format!("{tag}-create"),
        limits: cloister_api::common::Limits { memory_bytes: memory_mib * MIB, ..limits() }.into(),
        ttl_ms,
        wait_ms: if wait { wait_ms() } else { 0 },
        ..Default::default()
    };
    let id = client.create(request).await.id;
    if wait {
        wait_for_state(client, &id, SessionState::Active).await;
    }
    id
}

async fn create_with_disk(client: &Client, tag: String, disk_bytes: u64) -> String {
    let request = CreateSessionRequest {
        request_id: format!("{tag}-create"),
        limits: cloister_api::common::Limits { disk_bytes, ..limits() }.into(),
        wait_ms: wait_ms(),
        ..Default::default()
    };
    let id = client.create(request).await.id;
    wait_for_state(client, &id, SessionState::Active).await;
    id
}

async fn wait_for_state(client: &Client, id: &str, state: SessionState) {
    let begin = Instant::now();
    loop {
        let session = client.get(id).await;
        if session.state.as_known() == Some(state) {
            return;
        }
        assert!(begin.elapsed() < PATIENCE, "{session:?} does not become {state:?}");
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}

/// Waits for a condition on the installation.
pub(crate) async fn wait_until<F: Future<Output = bool>>(what: &str, mut reached: impl FnMut() -> F) {
    let begin = Instant::now();
    while !reached().await {
        assert!(begin.elapsed() < PATIENCE, "waited for {what}");
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}

/// Returns the process of a sandbox's shim: the one whose command line names its configuration.
pub(crate) fn shim_of(up: &Up, sandbox_id: &str) -> i32 {
    let wanted = format!("{sandbox_id}/shim.json");
    let found = pids().find(|pid| {
        let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let mut arguments = command.split(|byte| *byte == 0);
        arguments.any(|argument| argument.ends_with(wanted.as_bytes()))
    });
    found.unwrap_or_else(|| panic!("no shim of `{sandbox_id}`\n{}", up.logs()))
}

/// Makes what was deleted old enough to be pruned.
fn age_rows(up: &Up) {
    sql(
        &up.path("run/postgres"),
        "UPDATE sessions SET updated_at = updated_at - interval '8 days' WHERE state = 'deleted'; \
         UPDATE idempotency_keys SET created_at = created_at - interval '8 days' \
         WHERE resource_id IN (SELECT id FROM sessions WHERE state = 'deleted')",
    );
}

/// Runs statements on the installation's database and returns what they print. Repeated while there is no server.
pub(crate) fn sql(socket_directory: &Path, text: &str) -> String {
    let begin = Instant::now();
    loop {
        let output = Command::new(psql())
            .args(["--no-psqlrc", "--quiet", "--tuples-only", "--no-align", "--set", "ON_ERROR_STOP=1"])
            .args(["--username", "cloister", "--dbname", "cloister", "--host"])
            .arg(socket_directory)
            .args(["--command", text])
            .output()
            .expect("run psql");
        if output.status.success() {
            return String::from_utf8_lossy(&output.stdout).trim().to_owned();
        }
        assert!(begin.elapsed() < PATIENCE, "{text}: {}", String::from_utf8_lossy(&output.stderr));
        std::thread::sleep(LOOK_AGAIN);
    }
}

/// Returns the client program that comes with the server.
fn psql() -> std::path::PathBuf {
    let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let mut found: Vec<_> =
        versions.map(|entry| entry.path().join("bin/psql")).filter(|path| path.exists()).collect();
    found.sort();
    found.pop().unwrap_or_else(|| Path::new("psql").to_owned())
}
