//! The host's end of a channel into a sandbox: dialled to the guest agent itself, so that its bytes pass no shim.

use std::path::Path;
use std::time::Duration;

use cloister_api::guest;
use cloister_types::ChannelTarget;
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::client::ClientError;
use crate::connection::OpenError;
use crate::frames::{self, Body, FrameError};
use crate::shim::config::{CONFIG_FILE, ShimConfig};
use crate::shim::lifecycle::dial;

/// An open channel.
#[derive(Debug)]
pub struct Channel {
    /// Bytes that came before anybody read.
    pub early: Vec<u8>,
    /// The rest.
    pub stream: UnixStream,
}

/// Opens a channel into the sandbox of `sandbox_dir`.
///
/// # Errors
///
/// [`ClientError::Gone`] when nobody listens there, [`ClientError::NotFound`] when nothing listens on the port,
/// [`ClientError::Invalid`] for a user that does not exist.
pub async fn open(
    sandbox_dir: &Path,
    target: &ChannelTarget,
    deadline: Duration,
) -> Result<Channel, ClientError> {
    let socket = sandbox_dir.to_owned();
    let config: ShimConfig = match tokio::fs::read(sandbox_dir.join(CONFIG_FILE)).await {
        Ok(bytes) => serde_json::from_slice(&bytes)
            .map_err(|error| ClientError::Connect { socket: socket.clone(), source: error.into() })?,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Err(ClientError::Gone(socket)),
        Err(source) => return Err(ClientError::Connect { socket, source }),
    };
    let target = match target {
        ChannelTarget::Files { user } => {
            guest::FilesTarget { user: user.clone().unwrap_or_default(), ..guest::FilesTarget::default() }
                .into()
        }
        ChannelTarget::Port(port) => {
            guest::PortTarget { port: u32::from(*port), ..guest::PortTarget::default() }.into()
        }
    };
    let request = guest::OpenChannel { target: Some(target), ..guest::OpenChannel::default() };
    let opened = async {
        let mut connection = dial(&config, sandbox_dir, request).await?;
        let answer = connection.reader.expect().await?;
        Ok::<_, OpenError>((connection, answer))
    };
    let gone = |error: &std::io::Error| {
        matches!(error.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::ConnectionRefused)
    };
    match timeout(deadline, opened).await {
        Err(_) => Err(ClientError::Deadline { socket, after: deadline }),
        Ok(Ok((connection, Body::ChannelOpened(_)))) => {
            let (stream, early) = frames::join(connection.reader, connection.writer);
            Ok(Channel { early, stream })
        }
        Ok(Ok((_, Body::Error(error)))) => Err(ClientError::from_wire(*error)),
        Ok(Err(OpenError::Refused(error))) => Err(ClientError::from_wire(error)),
        Ok(Ok(_)) => Err(FrameError::Unexpected("`ChannelOpened`").into()),
        Ok(Err(OpenError::Connect(source))) if gone(&source) => Err(ClientError::Gone(socket)),
        Ok(Err(OpenError::Connect(source))) => Err(ClientError::Connect { socket, source }),
        Ok(Err(OpenError::Frame(error))) => Err(error.into()),
    }
}
