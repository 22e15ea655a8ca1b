//! Standard input that goes to an exec: read on a thread, and passed on at offsets.

use std::io::{self, Read};
use std::time::Duration;

use cloister_api::app::WriteStdinRequest;
use connectrpc::ErrorCode;
use tokio::sync::{mpsc, watch};

use super::is_cut;
use crate::client::{self, Client};
use crate::error::CliError;

/// Bytes of input per call.
const STDIN_CHUNK_BYTES: usize = 64 * 1024;
/// Chunks of input read ahead.
const STDIN_QUEUE: usize = 4;
/// Pause before input is offered again to a program that does not read.
const STDIN_PAUSE: Duration = Duration::from_millis(20);

/// Reads standard input on a thread of its own: a read that blocks for ever must not hold up anything else. The
/// thread ends with the process.
pub(super) fn read_stdin() -> mpsc::Receiver<io::Result<Vec<u8>>> {
    let (sender, chunks) = mpsc::channel(STDIN_QUEUE);
    let read = move || {
        let mut stdin = io::stdin().lock();
        loop {
            let mut chunk = vec![0; STDIN_CHUNK_BYTES];
            let result = match stdin.read(&mut chunk) {
                Ok(count) => {
                    chunk.truncate(count);
                    Ok(chunk)
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => Err(error),
            };
            let is_last = result.as_ref().map_or(true, Vec::is_empty);
            if sender.blocking_send(result).is_err() || is_last {
                return;
            }
        }
    };
    std::thread::Builder::new().name("stdin".into()).spawn(read).expect("a process can have a second thread");
    chunks
}

/// Passes standard input on until its end, once the exec has started.
pub(super) async fn pump(
    client: &Client,
    session: String,
    mut started: watch::Receiver<Option<String>>,
) -> Result<(), CliError> {
    let Ok(exec_id) = started.wait_for(Option::is_some).await.map(|id| id.clone().unwrap_or_default()) else {
        return Ok(());
    };
    let execs = client.api().execs();
    let mut chunks = read_stdin();
    let mut offset = 0_u64;
    loop {
        let mut data = match chunks.recv().await {
            Some(chunk) => chunk.map_err(CliError::io("read standard input"))?,
            None => Vec::new(),
        };
        let eof = data.is_empty();
        loop {
            let request = WriteStdinRequest {
                session: session.clone(),
                exec_id: exec_id.clone(),
                offset,
                data: data.clone(),
                eof,
                ..Default::default()
            };
            let end = offset.saturating_add(u64::try_from(data.len()).expect("a length fits 64 bits"));
            match execs.write_stdin_with_options(request, client::quick()).await {
                Ok(answer) => {
                    let next = answer.into_owned().next_offset.clamp(offset, end);
                    if next == end {
                        offset = end;
                        break;
                    }
                    let arrived = usize::try_from(next - offset).expect("no longer than the chunk");
                    data.drain(..arrived);
                    offset = next;
                    if arrived == 0 {
                        // The program is not reading, and its host has buffered what it may.
                        tokio::time::sleep(STDIN_PAUSE).await;
                    }
                }
                // The program has closed its input or ended: there is nobody to write to.
                Err(error)
                    if matches!(error.code, ErrorCode::FailedPrecondition | ErrorCode::InvalidArgument) =>
                {
                    return Ok(());
                }
                Err(error) if is_cut(&error) || error.code == ErrorCode::ResourceExhausted => {
                    tokio::time::sleep(STDIN_PAUSE).await;
                }
                Err(error) => return Err(client.error(&error)),
            }
        }
        if eof {
            return Ok(());
        }
    }
}
