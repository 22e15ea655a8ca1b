//! Frames on a blocking stream, written in large pieces and read when they are needed.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;

use cloister_api::guest;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::FilesError;
use crate::frames::{self, Body, FRAME_MAX_BYTES, FrameError};

/// What waits to be written together.
const WRITE_BYTES: usize = 256 * 1024;
/// What is read at once.
const READ_BYTES: usize = 256 * 1024;
const HEADER_BYTES: usize = 4;

/// One end of a channel to files.
#[derive(Debug)]
pub struct FileLink {
    stream: UnixStream,
    out: Vec<u8>,
    /// What arrived; `start` is the first byte that was not taken.
    arrived: Vec<u8>,
    start: usize,
}

impl FileLink {
    /// Returns an end of `stream`, which is made blocking.
    ///
    /// # Errors
    ///
    /// The socket's.
    pub fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(false)?;
        Ok(Self { stream, out: Vec::new(), arrived: Vec::new(), start: 0 })
    }

    /// Puts a message behind those that wait; sends them when there are enough.
    ///
    /// # Errors
    ///
    /// [`FilesError::Link`].
    pub fn queue(&mut self, body: impl Into<Body>) -> Result<(), FilesError> {
        let frame = frames::encode(body)?;
        self.out.extend_from_slice(&frame);
        if self.out.len() >= WRITE_BYTES { self.flush() } else { Ok(()) }
    }

    /// Sends what waits.
    ///
    /// # Errors
    ///
    /// [`FilesError::Link`].
    pub fn flush(&mut self) -> Result<(), FilesError> {
        let sent = self.stream.write_all(&self.out).map_err(FrameError::Write);
        self.out.clear();
        Ok(sent?)
    }

    /// Returns the next message; `None` when the other side closed after a whole one. Sends first what waits.
    ///
    /// # Errors
    ///
    /// [`FilesError::Link`].
    pub fn receive(&mut self) -> Result<Option<Body>, FilesError> {
        loop {
            if let Some(body) = self.take()? {
                return Ok(Some(body));
            }
            if !self.out.is_empty() {
                self.flush()?;
            }
            if self.fill()? == 0 {
                let torn = self.start < self.arrived.len();
                return if torn { Err(FrameError::Torn.into()) } else { Ok(None) };
            }
        }
    }

    /// Returns the next message where one is owed.
    ///
    /// # Errors
    ///
    /// [`FilesError::Refused`] when the other side says why there is none.
    pub fn expect(&mut self) -> Result<Body, FilesError> {
        match self.receive()?.ok_or(FrameError::Closed)? {
            Body::Error(error) => Err(FilesError::refused(*error)),
            body => Ok(body),
        }
    }

    /// Returns a message that has arrived, without waiting.
    ///
    /// # Errors
    ///
    /// As [`expect`](Self::expect).
    pub fn try_next(&mut self) -> Result<Option<Body>, FilesError> {
        loop {
            match self.take()? {
                Some(Body::Error(error)) => return Err(FilesError::refused(*error)),
                Some(body) => return Ok(Some(body)),
                None => {}
            }
            let mut wanted = [PollFd::new(&self.stream, PollFlags::IN)];
            let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
            match poll(&mut wanted, Some(&at_once)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => return Ok(None),
                Ok(_) if self.fill()? == 0 => return Err(FrameError::Closed.into()),
                Ok(_) => {}
                Err(errno) => return Err(FrameError::Read(errno.into()).into()),
            }
        }
    }

    /// Says why there is nothing more; the other side may be gone.
    pub fn refuse(&mut self, error: &FilesError) {
        let refusal =
            guest::Error { kind: error.kind().into(), message: error.to_string(), ..guest::Error::default() };
        let _ = self.queue(refusal).and_then(|()| self.flush());
    }

    fn take(&mut self) -> Result<Option<Body>, FrameError> {
        let waiting = &self.arrived[self.start..];
        let Some((header, rest)) = waiting.split_first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        let length = usize::try_from(u32::from_le_bytes(*header)).unwrap_or(usize::MAX);
        if length > FRAME_MAX_BYTES {
            return Err(FrameError::TooLarge(length));
        }
        let Some(message) = rest.get(..length) else { return Ok(None) };
        let body = frames::decode(message)?;
        self.start += HEADER_BYTES + length;
        if self.start == self.arrived.len() {
            self.start = 0;
            self.arrived.clear();
        }
        Ok(Some(body))
    }

    fn fill(&mut self) -> Result<usize, FrameError> {
        self.arrived.drain(..self.start);
        self.start = 0;
        let before = self.arrived.len();
        self.arrived.resize(before + READ_BYTES, 0);
        let count = loop {
            match self.stream.read(&mut self.arrived[before..]) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => break other,
            }
        };
        self.arrived.truncate(before + *count.as_ref().unwrap_or(&0));
        count.map_err(FrameError::Read)
    }
}
