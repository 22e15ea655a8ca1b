//! Connections of the guest agent: greeting, one request, its answer.

use std::rc::Rc;
use std::time::Duration;

use cloister_api::guest::{self, ErrorKind};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::{sleep, timeout};

use super::exec::{self, RunningExec};
use super::{Agent, AgentError, Hardening, channel, stop};
use crate::convert;
use crate::frames::{self, Body, FrameError, FrameReader, FrameWriter, error};
use crate::harden;

/// How long a dialler has for its greeting and its request.
const GREETING: Duration = Duration::from_secs(10);
/// A pause after a failed accept: descriptors come back when an exec ends.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

pub(super) type Reader = FrameReader<OwnedReadHalf>;
pub(super) type Writer = FrameWriter<OwnedWriteHalf>;

/// Accepts for ever.
pub(super) async fn accept(
    agent: Rc<Agent>,
    listener: UnixListener,
) -> Result<std::convert::Infallible, AgentError> {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let agent = Rc::clone(&agent);
                tokio::task::spawn_local(async move {
                    // The peer of a broken connection has seen it break; there is nobody else to tell.
                    let _ = serve(agent, stream).await;
                });
            }
            Err(_) => sleep(ACCEPT_PAUSE).await,
        }
    }
}

async fn serve(agent: Rc<Agent>, stream: UnixStream) -> Result<(), FrameError> {
    let (mut reader, mut writer) = frames::split(stream);
    let greeting = timeout(GREETING, async {
        let hello = reader.expect().await?;
        let reply = frames::check_hello(&hello);
        match (reply, hello) {
            (Ok(reply), Body::Hello(hello)) if hello.sandbox_id == agent.config.sandbox_id => {
                writer.queue(reply)?;
            }
            (Ok(_), _) => {
                return refuse(&mut writer, ErrorKind::NotFound, "the sandbox that was named").await;
            }
            (Err(wrong), _) => return refuse(&mut writer, ErrorKind::Invalid, &wrong.to_string()).await,
        }
        reader.expect().await.map(Some)
    });
    let Ok(Some(request)) = greeting.await.map_err(|_| FrameError::Closed)? else { return Ok(()) };
    match request {
        Body::StartExec(start) => exec::run(agent, *start, reader, writer).await,
        Body::WriteStdin(first) => write_stdin(&agent, *first, reader, writer).await,
        Body::SignalExec(request) => {
            let answer: Body = match find(&agent, &request.exec_id) {
                None => error(ErrorKind::NotFound, format!("exec `{}`", request.exec_id)).into(),
                Some(running) => match running.signal(request.signal) {
                    Ok(()) => guest::Signaled::default().into(),
                    Err(refused) => error(ErrorKind::Invalid, refused.to_string()).into(),
                },
            };
            writer.send(answer).await
        }
        Body::ResizeExec(request) => writer.send(resize(&agent, &request)).await,
        Body::OpenChannel(request) => channel::open(agent, *request, reader, writer).await,
        Body::GetSandbox(_) => writer.send(facts(&agent)).await,
        Body::StopSandbox(request) => {
            // The answer says that it has begun; its end is the end of this process.
            let _ = writer.send(guest::Signaled::default()).await;
            stop::stop(&agent, Duration::from_millis(request.grace_ms)).await
        }
        _ => refuse(&mut writer, ErrorKind::Invalid, "the guest agent does not serve this").await.map(drop),
    }
}

/// Answers with an error; the caller has nothing more to do.
async fn refuse(writer: &mut Writer, kind: ErrorKind, message: &str) -> Result<Option<Body>, FrameError> {
    writer.send(error(kind, message)).await?;
    Ok(None)
}

fn resize(agent: &Agent, request: &guest::ResizeExec) -> Body {
    let size = match convert::terminal_size_from_wire(&request.size) {
        Ok(size) => size,
        Err(wrong) => return error(ErrorKind::Invalid, wrong.to_string()).into(),
    };
    let Some(running) = find(agent, &request.exec_id) else {
        return error(ErrorKind::NotFound, format!("exec `{}`", request.exec_id)).into();
    };
    match running.resize(size) {
        Ok(true) => guest::Resized::default().into(),
        Ok(false) => error(ErrorKind::Invalid, "the exec was started without a terminal").into(),
        Err(refused) => error(ErrorKind::Internal, refused.to_string()).into(),
    }
}

fn find(agent: &Agent, exec_id: &str) -> Option<Rc<RunningExec>> {
    agent.execs.borrow().get(exec_id).map(Rc::clone)
}

/// Writes to an exec's standard input until the dialler has no more. One write at a time: the next may be sent when
/// the one before was answered. A dialler that goes away takes its unfinished write back.
async fn write_stdin(
    agent: &Agent,
    first: guest::WriteStdin,
    mut reader: Reader,
    mut writer: Writer,
) -> Result<(), FrameError> {
    let mut write = first;
    loop {
        let answer: Body = match find(agent, &write.exec_id) {
            None => error(ErrorKind::NotFound, format!("exec `{}`", write.exec_id)).into(),
            Some(running) => {
                let ended = running.ended.notified();
                tokio::pin!(ended);
                ended.as_mut().enable();
                let closed = running.has_ended();
                let offset = (!write.append).then_some(write.offset);
                tokio::select! {
                    biased;
                    result = running.stdin.write(offset, &write.data, write.eof) => match result {
                        Ok(next_offset) => {
                            guest::StdinWritten { next_offset, ..guest::StdinWritten::default() }.into()
                        }
                        Err(wrong) => error(ErrorKind::Invalid, wrong.to_string()).into(),
                    },
                    () = async { if !closed { ended.await } } => {
                        error(ErrorKind::Invalid, "standard input is closed").into()
                    }
                    next = reader.next() => match next? {
                        None => return Ok(()),
                        Some(_) => return Err(FrameError::Unexpected("nothing before an answer")),
                    },
                }
            }
        };
        writer.send(answer).await?;
        write = match reader.next().await? {
            None => return Ok(()),
            Some(Body::WriteStdin(next)) => *next,
            Some(_) => return Err(FrameError::Unexpected("`WriteStdin`")),
        };
    }
}

fn facts(agent: &Agent) -> Body {
    let facts = match agent.hardening {
        Hardening::Full => match harden::isolation_facts(&agent.config) {
            Ok(facts) => facts,
            Err(wrong) => return error(ErrorKind::Internal, wrong.to_string()).into(),
        },
        #[cfg(debug_assertions)]
        Hardening::Off => vec![("hardening".to_owned(), "off".to_owned())],
    };
    guest::Sandbox {
        sandbox_id: agent.config.sandbox_id.clone(),
        facts: facts
            .into_iter()
            .map(|(name, value)| guest::Fact { name, value, ..guest::Fact::default() })
            .collect(),
        ..guest::Sandbox::default()
    }
    .into()
}
