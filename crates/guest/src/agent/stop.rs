//! The end of a sandbox: SIGTERM to everything, a grace, SIGKILL, and the end of pid 1 with all that is left.

use std::time::Duration;

use tokio::time::timeout;

use super::Agent;
use super::launch::signal_all;

/// How long the last output of killed execs may take to be sent.
const FLUSH: Duration = Duration::from_millis(500);

/// Ends everything and then this process. As pid 1 its end is the end of the process namespace.
pub(super) async fn stop(agent: &Agent, grace: Duration) -> ! {
    signal(agent, libc::SIGTERM);
    // An exec whose children outlive it is not all that may run: the grace ends early only when nothing does.
    let quiet = timeout(grace, agent.reaper.none_left()).await.is_ok();
    if !quiet {
        signal(agent, libc::SIGKILL);
    }
    // A peer that does not read must not keep the sandbox alive.
    let _ = timeout(FLUSH, no_exec_left(agent)).await;
    std::process::exit(0)
}

/// Signals everything of the sandbox; without a process namespace only the groups the agent started itself.
fn signal(agent: &Agent, signal: i32) {
    if !signal_all(signal) {
        for exec in agent.execs.borrow().values() {
            // One that cannot be signalled has ended.
            let _ = exec.signal(signal);
        }
    }
}

async fn no_exec_left(agent: &Agent) {
    loop {
        let ended = agent.exec_ended.notified();
        if agent.execs.borrow().is_empty() {
            return;
        }
        ended.await;
    }
}
