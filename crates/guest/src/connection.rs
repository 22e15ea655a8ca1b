//! A dialled connection after its greeting: the host agent's to a shim, and a shim's to the guest agent.

use std::io;
use std::path::Path;

use cloister_api::guest;
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

use crate::frames::{self, Body, FrameError, FrameReader, FrameWriter};

/// Both directions of a greeted connection.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) reader: FrameReader<OwnedReadHalf>,
    pub(crate) writer: FrameWriter<OwnedWriteHalf>,
}

/// Why a connection could not be opened.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OpenError {
    #[error("connect")]
    Connect(#[source] io::Error),
    #[error("the greeting was refused: {}", .0.message)]
    Refused(guest::Error),
    #[error("exchange greetings")]
    Frame(#[from] FrameError),
}

impl Connection {
    /// Connects, greets and sends the request in one write; the answer is the next message.
    pub(crate) async fn open(
        socket: &Path,
        sandbox_id: &str,
        request: impl Into<Body>,
    ) -> Result<Self, OpenError> {
        let stream = UnixStream::connect(socket).await.map_err(OpenError::Connect)?;
        let (mut reader, mut writer) = frames::split(stream);
        writer.queue(frames::hello(sandbox_id))?;
        writer.queue(request)?;
        writer.flush().await?;
        match reader.expect().await? {
            Body::HelloReply(reply) => frames::check_hello_reply(&reply)?,
            Body::Error(error) => return Err(OpenError::Refused(*error)),
            _ => return Err(FrameError::Unexpected("`HelloReply`").into()),
        }
        Ok(Self { reader, writer })
    }
}
