//! Channels into a session, carried between a local stream and the coordinator.

use cloister_api::app::{
    DialPortRequest, DialPortStart, TransferFilesRequest, TransferStart, dial_port_request,
    dial_port_response, transfer_files_request, transfer_files_response,
};
use connectrpc::ConnectError;
use connectrpc::client::CallOptions;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

use crate::client::Client;

/// Bytes of one piece.
const PIECE_BYTES: usize = 128 * 1024;

fn cut() -> ConnectError {
    ConnectError::unavailable("the stream ended before its end was said")
}

/// Makes the function for one RPC: all of them have a start, a word that it is ready, bytes both ways, and an end.
macro_rules! carry {
    ($(#[$doc:meta])* $name:ident, $method:ident, $start:ty, $message:ident, $request:ident, $response:ident) => {
        $(#[$doc])*
        ///
        /// # Errors
        ///
        /// Why it could not be opened, or that it was cut.
        pub(crate) async fn $name(
            client: &Client,
            start: $start,
            local: impl AsyncRead + AsyncWrite,
        ) -> Result<(), ConnectError> {
            use $request::Request;
            use $response::Response;
            let message = |request| $message { request: Some(request), ..Default::default() };
            let stream = client.api().streams().$method(CallOptions::default()).await?;
            let (mut sender, mut receiver) = stream.into_split();
            // The receiving half knows why, when the server has closed the stream.
            let _ = sender.send(message(Request::from(start))).await;
            let first = receiver.message().await?.ok_or_else(cut)?;
            if !matches!(first.to_owned_message().response, Some(Response::Ready(_))) {
                return Err(cut());
            }
            let (mut reading, mut writing) = tokio::io::split(local);
            let out = async {
                let mut piece = vec![0; PIECE_BYTES];
                loop {
                    match reading.read(&mut piece).await {
                        Ok(0) => {
                            sender.close_send();
                            return Ok(());
                        }
                        Ok(count) => {
                            if sender.send(message(Request::Data(piece[..count].to_vec()))).await.is_err() {
                                // As above.
                                return Ok(());
                            }
                        }
                        Err(error) => return Err(ConnectError::aborted(error.to_string())),
                    }
                }
            };
            let back = async {
                let mut is_done = false;
                loop {
                    let message = match receiver.message().await? {
                        Some(message) => message.to_owned_message(),
                        // Not before: what was sent last would be cut off with the call.
                        None if is_done => return Ok(()),
                        None => return Err(cut()),
                    };
                    match message.response {
                        Some(Response::Data(data)) => {
                            writing
                                .write_all(&data)
                                .await
                                .map_err(|error| ConnectError::aborted(error.to_string()))?;
                        }
                        Some(Response::Done(_)) => {
                            // Whoever reads there may have gone.
                            let _ = writing.shutdown().await;
                            is_done = true;
                        }
                        Some(Response::Ready(_)) | None => return Err(cut()),
                    }
                }
            };
            tokio::try_join!(out, back).map(drop)
        }
    };
}

carry! {
    /// Carries a channel to the files of a session.
    carry_files, transfer_files_with_options, TransferStart, TransferFilesRequest, transfer_files_request,
    transfer_files_response
}
carry! {
    /// Carries one connection to a port of a session.
    carry_port, dial_port_with_options, DialPortStart, DialPortRequest, dial_port_request, dial_port_response
}
