//! Ctrl-C and its relatives while something is waited for.
//!
//! The first `SIGINT` or `SIGTERM` is for the command in the sandbox, the second for us: then we stop waiting and
//! clean up. With a keyboard Ctrl-C is a key like any other, and `SIGTERM` and `SIGHUP` are for us.

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::attach::Interrupt;
use crate::error::CliError;

/// Listens for the signals of a terminal.
pub(crate) struct Interrupts {
    interrupt: Signal,
    terminate: Signal,
    hangup: Signal,
    count: u32,
    hangup_leaves: bool,
}

impl Interrupts {
    /// Starts listening; from now on the signals do not end this process.
    ///
    /// # Errors
    ///
    /// [`CliError::Io`] when the system has no handler to give.
    pub(crate) fn listen() -> Result<Self, CliError> {
        let listen = |kind| signal(kind).map_err(CliError::io("listen for signals"));
        Ok(Self {
            interrupt: listen(SignalKind::interrupt())?,
            terminate: listen(SignalKind::terminate())?,
            hangup: listen(SignalKind::hangup())?,
            count: 0,
            hangup_leaves: false,
        })
    }

    /// From now on the end of our own terminal, or a request to end, leaves the command and does not reach it: what runs
    /// on a terminal of its own is there to come back to.
    pub(crate) fn leave_on_hangup(&mut self) {
        self.hangup_leaves = true;
    }

    /// Returns what the next signal asks for.
    ///
    /// # Cancel safety
    ///
    /// May be dropped and called again: no signal is lost.
    pub(crate) async fn next(&mut self) -> Interrupt {
        let kind = tokio::select! {
            _ = self.interrupt.recv() => SignalKind::interrupt(),
            _ = self.terminate.recv() => SignalKind::terminate(),
            _ = self.hangup.recv() => SignalKind::hangup(),
        };
        self.count += 1;
        if self.count > 1 || (self.hangup_leaves && kind != SignalKind::interrupt()) {
            Interrupt::Leave
        } else {
            Interrupt::Forward(kind.as_raw_value())
        }
    }

    /// Runs `work` unless a signal comes first: for waits that have nothing to pass a signal on to.
    ///
    /// # Errors
    ///
    /// [`CliError::Interrupted`], or what `work` says.
    pub(crate) async fn or_interrupted<T>(
        &mut self,
        work: impl Future<Output = Result<T, CliError>>,
    ) -> Result<T, CliError> {
        tokio::select! {
            result = work => result,
            _ = self.next() => Err(CliError::Interrupted),
        }
    }
}
