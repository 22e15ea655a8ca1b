//! A byte stream that is a channel into a sandbox: to its files, or to a port.
//!
//! Each direction is copied on its own, a piece when the one before was taken, so that whoever does not read stops
//! whoever writes. The stream is complete when both directions have ended; one may end long before the other.

use cloister_api::host::channel_target::Target;
use cloister_api::host::{self, ChannelEnd, ChannelOpened, stream_request, stream_response};
use cloister_sandbox::backend::Sandbox;
use cloister_types::ChannelTarget;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, ReadHalf, WriteHalf};

use crate::refusal::Refusal;
use crate::stream::{Cut, Receiving, Sending, send};

/// Bytes of one piece.
const PIECE_BYTES: usize = 128 * 1024;

type Reading = ReadHalf<cloister_sandbox::backend::Channel>;
type Writing = WriteHalf<cloister_sandbox::backend::Channel>;

/// Returns what a message names.
pub(crate) fn target(message: &host::ChannelTarget) -> Result<ChannelTarget, Refusal> {
    match &message.target {
        Some(Target::Files(files)) => {
            let user = Some(files.user.clone()).filter(|user| !user.is_empty());
            Ok(ChannelTarget::Files { user })
        }
        Some(Target::Port(port)) => match u16::try_from(port.port) {
            Ok(port) if port != 0 => Ok(ChannelTarget::Port(port)),
            _ => Err(Refusal::invalid(format!("{} is no port: accepted is 1 to 65535", port.port))),
        },
        None => Err(Refusal::invalid("a channel leads to files or to a port")),
    }
}

/// Opens the channel and carries its bytes until both directions have ended.
pub(crate) async fn serve(
    sandbox: &dyn Sandbox,
    target: &ChannelTarget,
    sending: &mut Sending,
    receiving: &mut Receiving,
) -> Result<(), Cut> {
    let channel = sandbox.open_channel(target).await.map_err(Refusal::from)?;
    let (reading, writing) = tokio::io::split(channel);
    send(sending, ChannelOpened::default()).await?;
    tokio::try_join!(outwards(reading, sending), inwards(writing, receiving)).map(drop)
}

async fn outwards(mut reading: Reading, sending: &mut Sending) -> Result<(), Cut> {
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        match reading.read(&mut piece).await {
            Ok(0) => return send(sending, ChannelEnd::default()).await,
            Ok(count) => send(sending, stream_request::Message::Data(piece[..count].to_vec())).await?,
            Err(error) => return Err(broken(&error).into()),
        }
    }
}

/// Ends when the coordinator has ended its direction; a program that takes no more is told by its own direction.
async fn inwards(mut writing: Writing, receiving: &mut Receiving) -> Result<(), Cut> {
    let mut takes = true;
    loop {
        let message = match receiving.message().await {
            Ok(Some(message)) => message.to_owned_message().message,
            // Without an end of the bytes: nobody is there any more.
            Ok(None) | Err(_) => return Err(Cut::ConsumerGone),
        };
        match message {
            Some(stream_response::Message::Data(data)) => {
                takes = takes && writing.write_all(&data).await.is_ok();
            }
            Some(stream_response::Message::DataEnd(_)) => {
                // As above.
                let _ = writing.shutdown().await;
                return Ok(());
            }
            _ => return Err(Refusal::invalid("only bytes belong on a channel").into()),
        }
    }
}

fn broken(error: &std::io::Error) -> Refusal {
    Refusal::new(host::HostErrorKind::Internal, format!("the channel broke: {error}"))
}
