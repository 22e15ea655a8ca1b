//! Reaps every child of pid 1: the execs' main processes, and the orphans that their families leave behind.

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
