//! Connections of the shim: greeting, one request, its answer.
//!
//! A dialler that goes away ends its own waiting, and nothing else: a start or a stop that has begun is finished.

use std::rc::Rc;
use std::time::Duration;

use buffa::Message as _;
use cloister_api::guest::{self, ErrorKind};
use cloister_types::exec::ExecRecord;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::{sleep, timeout};

use super::exec::Exec;
use super::exec_table::{GUEST_DEADLINE, Refusal, start};
use super::lifecycle::Shim;
use super::{identity, stream};
use crate::convert;
use crate::frames::{self, Body, FrameError, FrameReader, FrameWriter, error};

/// How long a dialler has for its greeting and its request.
const GREETING: Duration = Duration::from_secs(10);
/// Most connections at once; another waits in the listener's queue.
const CONNECTIONS_MAX: usize = 256;
/// A pause after a failed accept: descriptors come back when a connection ends.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);
/// A list is sent in pieces of about this size.
const LIST_PIECE_BYTES: usize = 256 * 1024;
/// What is said of a terminal that is none.
const NO_TERMINAL: &str = "the exec was started without a terminal";
/// The highest signal number.
const SIGNAL_MAX: i32 = 64;

pub(super) type Reader = FrameReader<OwnedReadHalf>;
pub(super) type Writer = FrameWriter<OwnedWriteHalf>;

/// Accepts for ever.
pub(super) async fn accept(shim: Rc<Shim>, listener: UnixListener) {
    loop {
        shim.serving.at_most(CONNECTIONS_MAX - 1).await;
        match listener.accept().await {
            Ok((stream, _)) => {
                let serving = Rc::clone(&shim);
                // The peer of a broken connection has seen it break; there is nobody else to tell.
                shim.serving.spawn(async move { drop(serve(serving, stream).await) });
            }
            Err(_) => sleep(ACCEPT_PAUSE).await,
        }
    }
}

async fn serve(shim: Rc<Shim>, stream: UnixStream) -> Result<(), FrameError> {
    let (mut reader, mut writer) = frames::split(stream);
    let greeting = async {
        let hello = reader.expect().await?;
        match (frames::check_hello(&hello), hello) {
            (Ok(reply), Body::Hello(hello)) if hello.sandbox_id == shim.identity.borrow().sandbox_id => {
                writer.queue(reply)?;
                reader.expect().await.map(Some)
            }
            (Ok(_), _) => {
                writer.send(error(ErrorKind::NotFound, "the sandbox that was named")).await?;
                Ok(None)
            }
            (Err(wrong), _) => {
                writer.send(error(ErrorKind::Invalid, wrong.to_string())).await?;
                Ok(None)
            }
        }
    };
    let Some(request) = timeout(GREETING, greeting).await.map_err(|_| FrameError::Closed)?? else {
        return Ok(());
    };
    match request {
        Body::StartExec(request) => {
            let started = start(&shim, *request).await.map(|(_, record)| record);
            writer.send(answer(started, exec_answer)).await
        }
        Body::AttachExec(request) => stream::attach(&shim, *request, reader, writer).await,
        Body::GetExec(request) => {
            let record = shim.execs.find(&request.exec_id).and_then(|exec| read_record(&exec));
            writer.send(answer(record, exec_answer)).await
        }
        Body::ListExecs(_) => list(&shim, &mut writer).await,
        Body::SignalExec(request) => {
            let signaled = signal(&shim, *request).await;
            writer.send(answer(signaled, |()| guest::Signaled::default().into())).await
        }
        Body::ResizeExec(request) => {
            let resized = resize(&shim, *request).await;
            writer.send(resize_answer(resized)).await
        }
        Body::WriteStdin(request) => write_stdin_until_closed(&shim, *request, reader, writer).await,
        Body::WaitExec(request) => {
            let exec = match shim.execs.find(&request.exec_id) {
                Ok(exec) => exec,
                Err(refusal) => return writer.send(answer(Err(refusal), exec_answer)).await,
            };
            let wait = Duration::from_millis(request.wait_ms);
            tokio::select! {
                // Either way the record says where it stands.
                _ = timeout(wait, exec.wait_ended()) => {
                    writer.send(answer(read_record(&exec), exec_answer)).await
                }
                _ = reader.next() => Ok(()),
            }
        }
        Body::GetSandbox(_) => writer.send(sandbox(&shim)).await,
        Body::WatchSandbox(_) => {
            writer.send(sandbox(&shim)).await?;
            tokio::select! {
                record = shim.gone() => writer.send(exit_answer(record)).await,
                _ = reader.next() => Ok(()),
            }
        }
        Body::StopSandbox(request) => {
            let record = shim.stop(Duration::from_millis(request.grace_ms)).await;
            writer.send(exit_answer(record)).await
        }
        Body::ClaimSandbox(request) => {
            let claimed = identity::claim(&shim, &request);
            writer.send(answer(claimed, |()| sandbox(&shim))).await
        }
        _ => writer.send(error(ErrorKind::Invalid, "a shim does not serve this")).await,
    }
}

fn answer<T>(result: Result<T, Refusal>, body: impl FnOnce(T) -> Body) -> Body {
    match result {
        Ok(value) => body(value),
        Err(refusal) => error(refusal.kind, refusal.message).into(),
    }
}

pub(super) fn exec_answer(record: ExecRecord) -> Body {
    convert::record_to_wire(&record).into()
}

fn exit_answer(record: super::config::SandboxExitRecord) -> Body {
    guest::SandboxExit {
        reason: record.reason,
        message: record.message,
        status: record.status,
        exited_unix_ms: record.exited_unix_ms,
        ..guest::SandboxExit::default()
    }
    .into()
}

pub(super) fn read_record(exec: &Exec) -> Result<ExecRecord, Refusal> {
    exec.record().map_err(|error| Refusal::internal(&error))
}

fn sandbox(shim: &Shim) -> Body {
    let fact = |(name, value): &(String, String)| guest::Fact {
        name: name.clone(),
        value: value.clone(),
        ..guest::Fact::default()
    };
    let timing = |(step, elapsed_us): &(String, u64)| guest::StepTiming {
        step: step.clone(),
        elapsed_us: *elapsed_us,
        ..guest::StepTiming::default()
    };
    guest::Sandbox {
        sandbox_id: shim.identity.borrow().sandbox_id.clone(),
        facts: shim.facts.borrow().iter().map(fact).collect(),
        timings: shim.timings.iter().map(timing).collect(),
        ..guest::Sandbox::default()
    }
    .into()
}

/// Sends every exec in pieces that fit a frame, then `End`. One whose record cannot be read is passed over.
async fn list(shim: &Shim, writer: &mut Writer) -> Result<(), FrameError> {
    let mut piece = guest::ExecList::default();
    let mut piece_bytes = 0;
    for exec in shim.execs.all() {
        let Ok(record) = exec.record() else { continue };
        let exec = convert::record_to_wire(&record);
        let exec_bytes = usize::try_from(exec.encoded_len()).unwrap_or(usize::MAX);
        if piece_bytes > 0 && exec_bytes.saturating_add(piece_bytes) > LIST_PIECE_BYTES {
            writer.send(std::mem::take(&mut piece)).await?;
            piece_bytes = 0;
        }
        piece_bytes += exec_bytes;
        piece.execs.push(exec);
    }
    writer.queue(piece)?;
    writer.send(guest::End::default()).await
}

/// Sends a signal to an exec's process group, through the guest agent that knows whether it still is one.
pub(super) async fn signal(shim: &Shim, request: guest::SignalExec) -> Result<(), Refusal> {
    let exec = shim.execs.find(&request.exec_id)?;
    if !(1..=SIGNAL_MAX).contains(&request.signal) {
        return Err(Refusal::new(ErrorKind::Invalid, format!("{} is no signal", request.signal)));
    }
    ask_guest(shim, &exec, request).await
}

/// Gives an exec's terminal another size.
pub(super) async fn resize(shim: &Shim, request: guest::ResizeExec) -> Result<(), Refusal> {
    let exec = shim.execs.find(&request.exec_id)?;
    if let Err(wrong) = convert::terminal_size_from_wire(&request.size) {
        return Err(Refusal::new(ErrorKind::Invalid, wrong.to_string()));
    }
    if !exec.has_terminal {
        return Err(Refusal::new(ErrorKind::Invalid, NO_TERMINAL));
    }
    ask_guest(shim, &exec, request).await
}

/// Asks the guest agent for something that an exec which has ended needs no more.
async fn ask_guest(shim: &Shim, exec: &Exec, request: impl Into<Body>) -> Result<(), Refusal> {
    exec.started().await;
    if exec.exit().is_some() {
        return Ok(());
    }
    let asked = timeout(GUEST_DEADLINE, async {
        let mut connection = shim.dial_guest(request).await?;
        Ok::<_, crate::connection::OpenError>(connection.reader.expect().await?)
    });
    match asked.await {
        Ok(Ok(Body::Signaled(_) | Body::Resized(_))) => Ok(()),
        Ok(Ok(Body::Error(error))) => match error.kind.as_known() {
            // It ended between the look and the request.
            Some(ErrorKind::ERROR_KIND_NOT_FOUND) => Ok(()),
            Some(kind) => Err(Refusal::new(kind, error.message)),
            None => Err(Refusal::new(ErrorKind::Internal, error.message)),
        },
        Ok(Ok(_)) => Err(Refusal::new(ErrorKind::Internal, "the guest agent sent nonsense")),
        Ok(Err(_)) if shim.has_ended() => Ok(()),
        Ok(Err(error)) => Err(Refusal::internal(&error)),
        Err(_) => Err(Refusal::new(ErrorKind::Internal, "the guest agent did not answer")),
    }
}

/// Writes to an exec's standard input; returns the next offset. Waits while the program does not read. Dropped, it
/// takes back what the program has not taken.
pub(super) async fn write_stdin(shim: &Shim, request: guest::WriteStdin) -> Result<u64, Refusal> {
    let exec = shim.execs.find(&request.exec_id)?;
    let closed = || Refusal::new(ErrorKind::Invalid, "standard input is closed");
    if !exec.has_stdin {
        return Err(Refusal::new(ErrorKind::Invalid, "the exec was started without standard input"));
    }
    if request.append && !exec.has_terminal {
        return Err(Refusal::new(ErrorKind::Invalid, NO_TERMINAL));
    }
    exec.started().await;
    let mut kept = exec.stdin.lock().await;
    if exec.exit().is_some() {
        return Err(closed());
    }
    // Out of its place while it is used: an unfinished exchange must not be taken up by the next write.
    let exchange = async {
        let mut connection = match kept.take() {
            Some(mut connection) => {
                connection.writer.send(request).await?;
                connection
            }
            None => shim.dial_guest(request).await?,
        };
        let answer = connection.reader.expect().await?;
        Ok::<_, crate::connection::OpenError>((connection, answer))
    };
    let exchanged = tokio::select! {
        biased;
        exchanged = exchange => exchanged,
        // Whatever the guest agent says, or does not: nobody is left to read it.
        () = exec.wait_ended() => return Err(closed()),
    };
    match exchanged {
        Ok((connection, Body::StdinWritten(written))) => {
            *kept = Some(connection);
            Ok(written.next_offset)
        }
        Ok((connection, Body::Error(error))) => {
            *kept = Some(connection);
            match error.kind.as_known() {
                Some(ErrorKind::ERROR_KIND_NOT_FOUND) => Err(closed()),
                Some(kind) => Err(Refusal::new(kind, error.message)),
                None => Err(Refusal::new(ErrorKind::Internal, error.message)),
            }
        }
        Ok(_) => Err(Refusal::new(ErrorKind::Internal, "the guest agent sent nonsense")),
        Err(_) if shim.has_ended() => Err(closed()),
        Err(error) => Err(Refusal::internal(&error)),
    }
}

/// Serves writes until the dialler has no more.
async fn write_stdin_until_closed(
    shim: &Shim,
    first: guest::WriteStdin,
    mut reader: Reader,
    mut writer: Writer,
) -> Result<(), FrameError> {
    let mut request = first;
    loop {
        let written = tokio::select! {
            biased;
            written = write_stdin(shim, request) => written,
            next = reader.next() => match next? {
                None => return Ok(()),
                Some(_) => return Err(FrameError::Unexpected("nothing before an answer")),
            },
        };
        writer.send(answer(written, stdin_answer)).await?;
        request = match reader.next().await? {
            None => return Ok(()),
            Some(Body::WriteStdin(next)) => *next,
            Some(_) => return Err(FrameError::Unexpected("`WriteStdin`")),
        };
    }
}

pub(super) fn stdin_answer(next_offset: u64) -> Body {
    guest::StdinWritten { next_offset, ..guest::StdinWritten::default() }.into()
}

/// Returns the answer to a refused request.
pub(super) fn refusal_answer(refusal: Refusal) -> Body {
    error(refusal.kind, refusal.message).into()
}

/// Returns the answer to a signal.
pub(super) fn signal_answer(signaled: Result<(), Refusal>) -> Body {
    answer(signaled, |()| guest::Signaled::default().into())
}

/// Returns the answer to a new size.
pub(super) fn resize_answer(resized: Result<(), Refusal>) -> Body {
    answer(resized, |()| guest::Resized::default().into())
}

/// Returns the answer to a write.
pub(super) fn written_answer(written: Result<u64, Refusal>) -> Body {
    answer(written, stdin_answer)
}
