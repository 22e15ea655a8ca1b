//! An exec's standard input: a pipe that is written at offsets, so that a write can be repeated after a cut.

use tokio::io::AsyncWriteExt as _;
use tokio::net::unix::pipe;
use tokio::sync::Mutex;

/// Why bytes were not taken.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum StdinError {
    /// The exec was started without one.
    #[error("the exec was started without standard input")]
    None,
    /// It was closed by an end, or the program closed it.
    #[error("standard input is closed")]
    Closed,
    /// Bytes between what was written and the offset are missing.
    #[error("standard input was written up to offset {written}, not to {offset}")]
    Hole {
        /// What was written.
        written: u64,
        /// Where the write would begin.
        offset: u64,
    },
}

/// One exec's standard input.
pub(super) struct Stdin {
    open: bool,
    state: Mutex<State>,
}

struct State {
    pipe: Option<pipe::Sender>,
    written: u64,
}

impl Stdin {
    pub(super) fn new(pipe: Option<pipe::Sender>) -> Self {
        Self { open: pipe.is_some(), state: Mutex::new(State { pipe, written: 0 }) }
    }

    /// Writes at `offset` and returns the next one. Bytes that were written before are skipped. Waits while the
    /// program does not read.
    ///
    /// # Errors
    ///
    /// [`StdinError`]. What was written before the error stays written.
    ///
    /// # Cancel safety
    ///
    /// May be dropped: what was written is counted.
    pub(super) async fn write(&self, offset: u64, data: &[u8], eof: bool) -> Result<u64, StdinError> {
        if !self.open {
            return Err(StdinError::None);
        }
        let mut state = self.state.lock().await;
        let Some(repeated) = state.written.checked_sub(offset) else {
            return Err(StdinError::Hole { written: state.written, offset });
        };
        let mut rest = usize::try_from(repeated).ok().and_then(|count| data.get(count..)).unwrap_or_default();
        while !rest.is_empty() {
            let Some(pipe) = state.pipe.as_mut() else { return Err(StdinError::Closed) };
            match pipe.write(rest).await {
                Ok(count) if count > 0 => {
                    rest = &rest[count..];
                    state.written += u64::try_from(count).unwrap_or(u64::MAX);
                }
                _ => {
                    state.pipe = None;
                    return Err(StdinError::Closed);
                }
            }
        }
        if eof {
            state.pipe = None;
        }
        Ok(state.written)
    }
}
