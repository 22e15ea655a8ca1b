//! From what a program prints to frames: one frame at a time, so that a peer that does not read stops the program.

use std::cell::Cell;
use std::io;

use cloister_api::guest;
use cloister_types::OutputStream;
use cloister_types::exec::OUTPUT_FRAME_MAX_BYTES;
use tokio::net::unix::OwnedWriteHalf;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::streams::Output;
use crate::convert::stream_to_wire;
use crate::frames::{FrameError, FrameWriter};

/// What the exec's task sees of the pump, and how it tells it to come to an end.
pub(super) struct PumpState {
    last_output: Cell<Instant>,
    /// A frame waits for the peer: then it is not the program that is silent.
    sending: Cell<bool>,
    draining: Cell<bool>,
    drain: Notify,
}

impl PumpState {
    pub(super) fn new() -> Self {
        Self {
            last_output: Cell::new(Instant::now()),
            sending: Cell::new(false),
            draining: Cell::new(false),
            drain: Notify::new(),
        }
    }

    /// Returns since when the program has been silent; `None` while its output waits for the peer.
    pub(super) fn silent_since(&self) -> Option<Instant> {
        (!self.sending.get()).then(|| self.last_output.get())
    }

    /// Ends the pump once what waits now has been sent, whoever still holds them open.
    pub(super) fn drain(&self) {
        self.draining.set(true);
        self.drain.notify_one();
    }
}

/// One pipe or terminal and, once the end is near, what may still be read from it.
struct Source {
    stream: OutputStream,
    output: Option<Output>,
    left: Option<u64>,
}

impl Source {
    /// Waits until there is something to read; forever where the end was reached.
    async fn readable(&self) {
        match &self.output {
            Some(output) => output.readable().await,
            None => std::future::pending().await,
        }
    }

    fn begin_drain(&mut self) {
        self.left = self.output.as_ref().map(Output::waiting);
        if self.left == Some(0) {
            self.output = None;
        }
    }

    /// Reads what is there, at most a frame; `None` when there is nothing.
    fn read(&mut self) -> Option<Vec<u8>> {
        let output = self.output.as_ref()?;
        let most = self.left.map_or(OUTPUT_FRAME_MAX_BYTES, |left| {
            usize::try_from(left).unwrap_or(usize::MAX).min(OUTPUT_FRAME_MAX_BYTES)
        });
        let mut data = vec![0; most.min(usize::try_from(output.waiting()).unwrap_or(most).max(1))];
        match output.try_read(&mut data) {
            Ok(count) if count > 0 => {
                data.truncate(count);
                if let Some(left) = &mut self.left {
                    *left = left.saturating_sub(u64::try_from(count).unwrap_or(u64::MAX));
                    if *left == 0 {
                        self.output = None;
                    }
                }
                Some(data)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if self.left.is_some() {
                    self.output = None;
                }
                None
            }
            // The end, or what is as good as the end.
            _ => {
                self.output = None;
                None
            }
        }
    }
}

/// Sends both streams until they are at their end, or drained; returns how many bytes there were.
///
/// # Errors
///
/// When the peer is gone.
pub(super) async fn pump(
    stdout: Output,
    stderr: Option<Output>,
    writer: &mut FrameWriter<OwnedWriteHalf>,
    state: &PumpState,
) -> Result<u64, FrameError> {
    let mut sources = [
        Source { stream: OutputStream::Stdout, output: Some(stdout), left: None },
        Source { stream: OutputStream::Stderr, output: stderr, left: None },
    ];
    let mut offset = 0;
    while sources.iter().any(|source| source.output.is_some()) {
        if state.draining.get() {
            if sources.iter().any(|source| source.output.is_some() && source.left.is_none()) {
                sources.iter_mut().for_each(Source::begin_drain);
            }
        } else {
            let [stdout, stderr] = &sources;
            tokio::select! {
                () = stdout.readable() => {}
                () = stderr.readable() => {}
                () = state.drain.notified() => continue,
            }
        }
        for source in &mut sources {
            let Some(data) = source.read() else { continue };
            let count = u64::try_from(data.len()).unwrap_or(u64::MAX);
            let frame = guest::Output {
                stream: u32::from(stream_to_wire(source.stream)),
                offset,
                data,
                ..guest::Output::default()
            };
            offset += count;
            state.sending.set(true);
            writer.send(frame).await?;
            state.sending.set(false);
            state.last_output.set(Instant::now());
        }
    }
    Ok(offset)
}
