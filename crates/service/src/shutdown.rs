//! From a signal to a token.

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::task::{OnCancel, OnError, TaskKind, TaskRegistry};

const SIGNALS: TaskKind = TaskKind::new("signals", OnCancel::Abort, OnError::Exit);

/// Cancels the registry's token at the first SIGTERM or SIGINT. Later ones are ignored: the role is ending, and
/// what it waits for has a bound of its own.
///
/// # Errors
///
/// The kernel refused to install a handler; the role must not start, since it could not be stopped cleanly.
pub fn on_signals(tasks: &TaskRegistry) -> std::io::Result<CancellationToken> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let token = tasks.token();
    let cancel = token.clone();
    tasks.spawn(SIGNALS, async move {
        tokio::select! {
            _ = terminate.recv() => tracing::info!(signal = "SIGTERM", "stopping"),
            _ = interrupt.recv() => tracing::info!(signal = "SIGINT", "stopping"),
        }
        cancel.cancel();
        Ok::<(), std::convert::Infallible>(())
    });
    Ok(token)
}
