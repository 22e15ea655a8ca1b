//! Reaps every child of pid 1: the execs' main processes, and the orphans that their families leave behind.

#![expect(unsafe_code, reason = "ptrace has no safe wrapper")]

use std::cell::RefCell;
use std::collections::HashMap;

use rustix::process::{Pid, WaitOptions};
use tokio::sync::{Notify, oneshot};

/// Whom to tell when a child has ended.
#[derive(Default)]
pub(super) struct Reaper {
    waiting: RefCell<HashMap<i32, oneshot::Sender<i32>>>,
    /// Told after each round that reaped something.
    reaped: Notify,
}

impl Reaper {
    /// Returns where the raw wait status of `pid` will arrive. Call between the fork and the next await, so that the
    /// child cannot be reaped unseen.
    pub(super) fn watch(&self, pid: i32) -> oneshot::Receiver<i32> {
        let (tell, told) = oneshot::channel();
        self.waiting.borrow_mut().insert(pid, tell);
        told
    }

    /// Reaps whatever has ended; returns whether any child is left.
    pub(super) fn reap(&self) -> bool {
        loop {
            match rustix::process::wait(WaitOptions::NOHANG) {
                // A child that asked to be traced by its parent. It has not ended, and nobody here traces.
                Ok(Some((pid, status))) if status.stopped() => let_go(pid, status.stopping_signal()),
                Ok(Some((pid, status))) => {
                    if let Some(tell) = self.waiting.borrow_mut().remove(&Pid::as_raw(Some(pid))) {
                        // A receiver that went away has no use for it.
                        let _ = tell.send(status.as_raw());
                    }
                    self.reaped.notify_waiters();
                }
                Ok(None) => return true,
                Err(rustix::io::Errno::INTR) => {}
                // No child is left.
                Err(_) => return false,
            }
        }
    }

    /// Waits until no child is left.
    pub(super) async fn none_left(&self) {
        loop {
            let reaped = self.reaped.notified();
            if !self.reap() {
                return;
            }
            reaped.await;
        }
    }
}

/// Stops being the tracer of a stopped child, which goes on with the signal that stopped it. SIGTRAP is what the kernel
/// stops a traced program with that executes another one, and would end it.
fn let_go(pid: Pid, signal: Option<i32>) {
    let signal = signal.filter(|signal| *signal != libc::SIGTRAP).unwrap_or(0);
    let data = std::ptr::without_provenance_mut::<libc::c_void>(usize::try_from(signal).unwrap_or(0));
    // SAFETY: the request takes a number in place of a pointer and touches no memory of this process. The child cannot be
    // somebody else's: it is stopped and not reaped.
    // JUSTIFICATION: no safe wrapper is among the crates.
    let result = unsafe {
        libc::ptrace(
            libc::PTRACE_DETACH,
            pid.as_raw_nonzero().get(),
            std::ptr::null_mut::<libc::c_void>(),
            data,
        )
    };
    if result < 0 {
        // Not to be traced any more, or in a stop of another kind: what cannot go on must not stay for ever.
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
}
