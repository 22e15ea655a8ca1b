//! An exec's standard input: written at offsets, so that a write can be repeated after a cut; a terminal's also
//! wherever it stands, because several may type.

use tokio::sync::Mutex;

use super::streams::Input;

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
    input: Option<Input>,
    written: u64,
}

impl Stdin {
    pub(super) fn new(input: Option<Input>) -> Self {
        Self { open: input.is_some(), state: Mutex::new(State { input, written: 0 }) }
    }

    /// Writes at `offset`, or without one where the last write ended, and returns the next offset. Bytes that were
    /// written before are skipped. Waits while the program does not read.
    ///
    /// # Errors
    ///
    /// [`StdinError`]. What was written before the error stays written.
    ///
    /// # Cancel safety
    ///
    /// May be dropped: what was written is counted.
    pub(super) async fn write(&self, offset: Option<u64>, data: &[u8], eof: bool) -> Result<u64, StdinError> {
        if !self.open {
            return Err(StdinError::None);
        }
        let mut state = self.state.lock().await;
        let offset = offset.unwrap_or(state.written);
        let Some(repeated) = state.written.checked_sub(offset) else {
            return Err(StdinError::Hole { written: state.written, offset });
        };
        let mut rest = usize::try_from(repeated).ok().and_then(|count| data.get(count..)).unwrap_or_default();
        while !rest.is_empty() {
            let Some(input) = state.input.as_mut() else { return Err(StdinError::Closed) };
            match input.write(rest).await {
                Ok(count) if count > 0 => {
                    rest = &rest[count..];
                    state.written += u64::try_from(count).unwrap_or(u64::MAX);
                }
                _ => {
                    state.input = None;
                    return Err(StdinError::Closed);
                }
            }
        }
        if eof && let Some(input) = state.input.take() {
            state.input = input.end().await;
        }
        Ok(state.written)
    }
}
