//! Frames: how the host agent, the shim and the guest agent put [`cloister_api::guest`] messages on a unix socket.
//!
//! A frame is a four-byte little-endian length, at most [`FRAME_MAX_BYTES`], and one encoded message. A connection
//! carries one exchange: the dialler sends `Hello` and, without waiting, its request; the accepter answers
//! `HelloReply` and then the request. Sending both at once saves a round trip and is safe because a connection is
//! ordered: a refused greeting is answered with `Error` and the request is never looked at.
//!
//! What holds: bytes from a peer are hostile. A length beyond the limit, bytes that are no message, and a message
//! without content are a [`FrameError`], never a panic; memory grows only with bytes that really arrived, and the
//! decoder has its own budget for what they may expand into.

use std::io;

use buffa::{DecodeOptions, Message as _};
use cloister_api::guest;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

/// The content of a message.
pub use cloister_api::guest::message::Message as Body;

/// Most bytes of an encoded message.
pub const FRAME_MAX_BYTES: usize = 1024 * 1024;
/// The version of the protocol that this build speaks.
pub const VERSION: u32 = 1;
/// The oldest version that this build still serves: its own and the one before, from the first on.
pub const OLDEST_VERSION: u32 = if VERSION > 1 { VERSION - 1 } else { 1 };

/// Bytes of the length.
const HEADER_BYTES: usize = 4;
/// What one read asks for when nothing is known about what comes.
const READ_BYTES: usize = 8 * 1024;
/// A buffer that grew beyond this for one large message is given back after it.
const BUFFER_KEEP_BYTES: usize = 128 * 1024;
/// What one message may expand into: a spec of 1 MiB in many short arguments takes about half of it.
const ELEMENT_MEMORY_BYTES: usize = 16 * 1024 * 1024;
/// A message of the next version has few fields that this build does not know.
const UNKNOWN_FIELDS_MAX: usize = 256;
/// The deepest message is four levels: attach, start, spec, an entry of its environment.
const RECURSION_MAX: u32 = 8;

/// Why a frame could not be sent or received.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The socket failed.
    #[error("read from the socket")]
    Read(#[source] io::Error),
    /// The socket failed.
    #[error("write to the socket")]
    Write(#[source] io::Error),
    /// A length beyond the limit.
    #[error("a frame of {0} bytes: at most {FRAME_MAX_BYTES}")]
    TooLarge(usize),
    /// Bytes that are no message.
    #[error("decode a frame")]
    Decode(#[source] buffa::DecodeError),
    /// A message that says nothing, or something this version does not know.
    #[error("a frame has no message that this version knows")]
    Empty,
    /// The peer went away before the end of a frame.
    #[error("the peer closed the connection inside a frame")]
    Torn,
    /// The peer went away where an answer was due.
    #[error("the peer closed the connection before it answered")]
    Closed,
    /// A version that this build does not serve.
    #[error(
        "the peer speaks version {0} of the guest protocol: this build serves {OLDEST_VERSION} to {VERSION}"
    )]
    Version(u32),
    /// Another message than the exchange allows here.
    #[error("the peer sent another message than {0}")]
    Unexpected(&'static str),
}

/// Returns `body` as a frame.
///
/// # Errors
///
/// [`FrameError::TooLarge`].
pub fn encode(body: impl Into<Body>) -> Result<Vec<u8>, FrameError> {
    let mut frame = Vec::new();
    encode_into(&mut frame, body.into())?;
    Ok(frame)
}

/// Appends `body` as a frame to `buffer`, which is left as it was on an error.
fn encode_into(buffer: &mut Vec<u8>, body: Body) -> Result<(), FrameError> {
    let message = guest::Message { message: Some(body), ..guest::Message::default() };
    let start = buffer.len();
    buffer.extend_from_slice(&[0; HEADER_BYTES]);
    if message.try_encode(buffer).is_err() {
        buffer.truncate(start);
        return Err(FrameError::TooLarge(usize::MAX));
    }
    let length = buffer.len() - start - HEADER_BYTES;
    match u32::try_from(length) {
        Ok(header) if length <= FRAME_MAX_BYTES => {
            buffer[start..start + HEADER_BYTES].copy_from_slice(&header.to_le_bytes());
            Ok(())
        }
        _ => {
            buffer.truncate(start);
            Err(FrameError::TooLarge(length))
        }
    }
}

/// Returns the message in the bytes after a frame's length.
///
/// # Errors
///
/// [`FrameError::TooLarge`], [`FrameError::Decode`], [`FrameError::Empty`].
pub fn decode(bytes: &[u8]) -> Result<Body, FrameError> {
    decode_within(bytes, FRAME_MAX_BYTES)
}

fn decode_within(bytes: &[u8], max_bytes: usize) -> Result<Body, FrameError> {
    if bytes.len() > max_bytes {
        return Err(FrameError::TooLarge(bytes.len()));
    }
    let message: guest::Message = DecodeOptions::new()
        .with_max_message_size(max_bytes)
        .with_recursion_limit(RECURSION_MAX)
        .with_unknown_field_limit(UNKNOWN_FIELDS_MAX)
        .with_element_memory_limit(ELEMENT_MEMORY_BYTES)
        .decode_from_slice(bytes)
        .map_err(FrameError::Decode)?;
    message.message.ok_or(FrameError::Empty)
}

/// Reads frames.
#[derive(Debug)]
pub struct FrameReader<R> {
    io: R,
    /// Bytes that arrived and were not taken: `start` is the first.
    buffer: Vec<u8>,
    start: usize,
    max_bytes: usize,
}

impl<R: AsyncRead + Unpin> FrameReader<R> {
    /// Returns a reader of `io`.
    pub fn new(io: R) -> Self {
        Self { io, buffer: Vec::new(), start: 0, max_bytes: FRAME_MAX_BYTES }
    }

    /// Takes frames of any length from now on: what the bound is there for, shown by leaving it off.
    #[cfg(debug_assertions)]
    pub(crate) fn leave_bound_off(&mut self) {
        // The most that the decoder can be told.
        self.max_bytes = 0x7fff_ffff;
    }

    /// Returns the next message; `None` when the peer closed after a whole frame.
    ///
    /// # Errors
    ///
    /// After any error the connection is of no more use.
    ///
    /// # Cancel safety
    ///
    /// May be dropped: what arrived is kept for the next call.
    pub async fn next(&mut self) -> Result<Option<Body>, FrameError> {
        loop {
            let available = self.buffer.len() - self.start;
            let mut missing = READ_BYTES;
            if available >= HEADER_BYTES {
                let mut header = [0; HEADER_BYTES];
                header.copy_from_slice(&self.buffer[self.start..self.start + HEADER_BYTES]);
                let length = usize::try_from(u32::from_le_bytes(header)).unwrap_or(usize::MAX);
                if length > self.max_bytes {
                    return Err(FrameError::TooLarge(length));
                }
                if available - HEADER_BYTES >= length {
                    let from = self.start + HEADER_BYTES;
                    let body = decode_within(&self.buffer[from..from + length], self.max_bytes);
                    self.start = from + length;
                    self.compact();
                    return body.map(Some);
                }
                // The buffer grows by what has arrived, not by what a length promises.
                missing = (length + HEADER_BYTES - available).min(READ_BYTES.max(available));
            }
            self.compact();
            self.buffer.reserve(missing);
            if self.io.read_buf(&mut self.buffer).await.map_err(FrameError::Read)? == 0 {
                return if self.buffer.is_empty() { Ok(None) } else { Err(FrameError::Torn) };
            }
        }
    }

    /// Returns the next message where the peer owes one.
    ///
    /// # Errors
    ///
    /// [`FrameError::Closed`] when the peer closed instead.
    ///
    /// # Cancel safety
    ///
    /// As [`next`](Self::next).
    pub async fn expect(&mut self) -> Result<Body, FrameError> {
        self.next().await?.ok_or(FrameError::Closed)
    }

    /// Moves what is left to the front and gives an outsized buffer back.
    fn compact(&mut self) {
        if self.start == self.buffer.len() {
            self.start = 0;
            self.buffer.clear();
            if self.buffer.capacity() > BUFFER_KEEP_BYTES {
                self.buffer = Vec::new();
            }
        } else if self.start > 0 && self.start >= self.buffer.len() / 2 {
            self.buffer.drain(..self.start);
            self.start = 0;
        }
    }
}

/// Writes frames.
#[derive(Debug)]
pub struct FrameWriter<W> {
    io: W,
    buffer: Vec<u8>,
}

impl<W: AsyncWrite + Unpin> FrameWriter<W> {
    /// Returns a writer to `io`.
    pub fn new(io: W) -> Self {
        Self { io, buffer: Vec::new() }
    }

    /// Sends a message; waits while the peer does not read.
    ///
    /// # Errors
    ///
    /// [`FrameError::TooLarge`] leaves the connection usable, [`FrameError::Write`] does not.
    ///
    /// # Cancel safety
    ///
    /// None: a dropped call may leave half a frame on the wire.
    pub async fn send(&mut self, body: impl Into<Body>) -> Result<(), FrameError> {
        self.queue(body)?;
        self.flush().await
    }

    /// Encodes a message without sending it; the next [`send`](Self::send) or [`flush`](Self::flush) does.
    ///
    /// # Errors
    ///
    /// [`FrameError::TooLarge`].
    pub fn queue(&mut self, body: impl Into<Body>) -> Result<(), FrameError> {
        encode_into(&mut self.buffer, body.into())
    }

    /// Sends what was queued.
    ///
    /// # Errors
    ///
    /// [`FrameError::Write`].
    ///
    /// # Cancel safety
    ///
    /// None.
    pub async fn flush(&mut self) -> Result<(), FrameError> {
        let sent = self.io.write_all(&self.buffer).await.map_err(FrameError::Write);
        self.buffer.clear();
        if self.buffer.capacity() > BUFFER_KEEP_BYTES {
            self.buffer = Vec::new();
        }
        sent
    }
}

/// Returns both directions of a connection.
pub fn split(stream: UnixStream) -> (FrameReader<OwnedReadHalf>, FrameWriter<OwnedWriteHalf>) {
    let (read, write) = stream.into_split();
    (FrameReader::new(read), FrameWriter::new(write))
}

/// Returns the connection of two halves, and what came behind the last message.
pub(crate) fn join(
    reader: FrameReader<OwnedReadHalf>,
    writer: FrameWriter<OwnedWriteHalf>,
) -> (UnixStream, Vec<u8>) {
    let early = reader.buffer[reader.start..].to_vec();
    (reader.io.reunite(writer.io).expect("both halves are of one connection"), early)
}

/// Returns the greeting of a dialler.
pub fn hello(sandbox_id: &str) -> guest::Hello {
    guest::Hello { version: VERSION, sandbox_id: sandbox_id.to_owned(), ..guest::Hello::default() }
}

/// Returns the accepter's answer to the first message of a connection: the version both will speak.
///
/// # Errors
///
/// [`FrameError::Unexpected`] when it is no greeting, [`FrameError::Version`].
pub fn check_hello(body: &Body) -> Result<guest::HelloReply, FrameError> {
    let Body::Hello(hello) = body else {
        return Err(FrameError::Unexpected("`Hello`"));
    };
    // A newer dialler that still serves our version says so by accepting the lower number in the answer.
    if hello.version < OLDEST_VERSION || hello.version > VERSION + 1 {
        return Err(FrameError::Version(hello.version));
    }
    Ok(guest::HelloReply { version: hello.version.min(VERSION), ..guest::HelloReply::default() })
}

/// Checks the accepter's version.
///
/// # Errors
///
/// [`FrameError::Version`].
pub fn check_hello_reply(reply: &guest::HelloReply) -> Result<(), FrameError> {
    if (OLDEST_VERSION..=VERSION).contains(&reply.version) {
        Ok(())
    } else {
        Err(FrameError::Version(reply.version))
    }
}

/// Returns an `Error` answer.
pub fn error(kind: guest::ErrorKind, message: impl Into<String>) -> guest::Error {
    guest::Error { kind: kind.into(), message: message.into(), ..guest::Error::default() }
}

#[cfg(test)]
mod tests;
