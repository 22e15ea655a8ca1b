//! An attached reader: output from an offset to the last frame, and what the dialler sends meanwhile.

use std::rc::Rc;

use cloister_api::guest::{self, ErrorKind};
use tokio::sync::Mutex;

use super::exec::{Attached, Exec};
use super::exec_table::{Refusal, start};
use super::lifecycle::Shim;
use super::serve::{
    Reader, Writer, exec_answer, read_record, refusal_answer, resize, resize_answer, signal, signal_answer,
    write_stdin, written_answer,
};
use crate::convert::{exit_to_wire, stream_to_wire};
use crate::frames::{Body, FrameError};
use crate::spool::{self, Chunk};

/// Serves `AttachExec`. The connection's end in either direction is the reader's end.
pub(super) async fn attach(
    shim: &Rc<Shim>,
    mut request: guest::AttachExec,
    mut reader: Reader,
    mut writer: Writer,
) -> Result<(), FrameError> {
    let found = match request.start.take() {
        Some(request) => start(shim, request).await,
        None => shim.execs.find(&request.exec_id).and_then(|exec| {
            let record = read_record(&exec)?;
            Ok((exec, record))
        }),
    };
    let (exec, record) = match found {
        Ok(found) => found,
        Err(refusal) => return writer.send(refusal_answer(refusal)).await,
    };
    if request.from_offset > exec.next_offset() {
        let message =
            format!("offset {} lies beyond the newest byte, {}", request.from_offset, exec.next_offset());
        return writer.send(refusal_answer(Refusal::new(ErrorKind::Invalid, message))).await;
    }
    // Counted from here on, so that nothing it has yet to read is dropped.
    let attached = exec.attach(request.from_offset);
    writer.queue(exec_answer(record))?;
    let writer = Mutex::new(writer);
    tokio::select! {
        sent = send_output(&exec, &attached, &request, &writer) => sent,
        taken = take_requests(shim, &exec, &mut reader, &writer) => taken,
    }
}

async fn send_output(
    exec: &Exec,
    attached: &Attached,
    request: &guest::AttachExec,
    writer: &Mutex<Writer>,
) -> Result<(), FrameError> {
    let mut spooled = spool::Reader::new(&exec.dir, request.from_offset);
    loop {
        let changed = exec.changed.notified();
        let ended = exec.exit();
        let chunk = match spooled.next(Some(exec.next_offset())) {
            Ok(chunk) => chunk,
            Err(error) => {
                return writer.lock().await.send(refusal_answer(Refusal::internal(&error))).await;
            }
        };
        // What was read is in memory, so that its segment may go.
        attached.advance(spooled.position());
        let (body, last): (Body, bool) = match (chunk, ended) {
            (Some(Chunk::Data { stream, offset, data }), _) => (
                guest::Output {
                    stream: u32::from(stream_to_wire(stream)),
                    offset,
                    data,
                    ..guest::Output::default()
                }
                .into(),
                false,
            ),
            (Some(Chunk::Gap { from, to }), _) => {
                (guest::Gap { from, to, ..guest::Gap::default() }.into(), false)
            }
            (None, Some(exit)) => (exit_to_wire(&exit).into(), true),
            (None, None) if request.no_follow => {
                let next_offset = spooled.position();
                (guest::End { next_offset, ..guest::End::default() }.into(), true)
            }
            (None, None) => {
                writer.lock().await.flush().await?;
                changed.await;
                continue;
            }
        };
        writer.lock().await.send(body).await?;
        if last {
            return Ok(());
        }
    }
}

/// Takes writes, signals and sizes until the dialler closes.
async fn take_requests(
    shim: &Shim,
    exec: &Exec,
    reader: &mut Reader,
    writer: &Mutex<Writer>,
) -> Result<(), FrameError> {
    loop {
        let answer = match reader.next().await? {
            None => return Ok(()),
            Some(Body::WriteStdin(request)) if request.exec_id == exec.id.as_str() => {
                written_answer(write_stdin(shim, *request).await)
            }
            Some(Body::SignalExec(request)) if request.exec_id == exec.id.as_str() => {
                signal_answer(signal(shim, *request).await)
            }
            Some(Body::ResizeExec(request)) if request.exec_id == exec.id.as_str() => {
                resize_answer(resize(shim, *request).await)
            }
            Some(_) => {
                return Err(FrameError::Unexpected("a write, a signal or a size for the attached exec"));
            }
        };
        writer.lock().await.send(answer).await?;
    }
}
