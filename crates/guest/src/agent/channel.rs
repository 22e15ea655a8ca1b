//! Channels: a connection that stops being an exchange of messages and becomes a way to the files, or to a port.
//!
//! Files are served by a child that is forked without an exec and hardened like a program of the channel's user. It is
//! not among the work's processes, so that a sandbox full of processes or out of memory can still be looked into.

#![expect(unsafe_code, reason = "forks a child that serves files")]

use std::net::Ipv6Addr;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::net::UnixStream as StdStream;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use cloister_api::guest::open_channel::Target;
use cloister_api::guest::{self, ErrorKind};
use tokio::io::Interest;
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::oneshot;

use super::launch::{BlockedSignals, reset_signals};
use super::serve::{Reader, Writer};
use super::{Agent, Hardening, user};
use crate::files::{self, FileLink, Root};
use crate::frames::{self, FrameError, error};
use crate::harden::{self, AgentConfig, PreparedExec};

/// Most processes that serve files; another channel waits.
pub(super) const FILE_WORKERS_MAX: usize = 16;
/// How long the loopback may take to answer: it refuses at once, but for a full queue of a listener.
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);
/// What is held of one direction of a port.
const PORT_BUFFER_BYTES: usize = 64 * 1024;
/// How long a program may take to read what a dialler that has gone had sent.
const LINGER: Duration = Duration::from_secs(20);
/// The descriptor of the channel in the child.
const CHANNEL_FD: i32 = 3;

/// Opens the channel, says so, and serves it to its end.
pub(super) async fn open(
    agent: Rc<Agent>,
    request: guest::OpenChannel,
    reader: Reader,
    mut writer: Writer,
) -> Result<(), FrameError> {
    match request.target {
        Some(Target::Files(target)) => {
            let Ok(_permit) = agent.file_workers.acquire().await else { return Err(FrameError::Closed) };
            let user = Some(target.user.as_str()).filter(|user| !user.is_empty());
            let prepared = match prepare(&agent, user) {
                Ok(prepared) => prepared,
                Err(message) => return writer.send(error(ErrorKind::Invalid, message)).await,
            };
            writer.send(guest::ChannelOpened::default()).await?;
            let exited = match fork(&agent, join(reader, writer)?, prepared.as_ref()) {
                Ok(exited) => exited,
                // The dialler finds the channel closed.
                Err(source) => return Err(FrameError::Write(source)),
            };
            let _ = exited.await;
            Ok(())
        }
        Some(Target::Port(target)) => {
            let mut port = match connect(target.port).await {
                Ok(port) => port,
                Err((kind, message)) => return writer.send(error(kind, message)).await,
            };
            writer.send(guest::ChannelOpened::default()).await?;
            let mut channel = join(reader, writer)?;
            let dialler_gone = hung_up(&channel);
            let copy = tokio::io::copy_bidirectional_with_sizes(
                &mut channel,
                &mut port,
                PORT_BUFFER_BYTES,
                PORT_BUFFER_BYTES,
            );
            tokio::select! {
                // Either side that breaks off ends both.
                _ = copy => {}
                // Bytes that wait for a program which does not read would hide it. One that reads gets them.
                () = async {
                    let _ = dialler_gone.await;
                    tokio::time::sleep(LINGER).await;
                } => {}
            }
            Ok(())
        }
        None => writer.send(error(ErrorKind::Invalid, "a channel leads to files or to a port")).await,
    }
}

/// Returns the bare connection.
fn join(reader: Reader, writer: Writer) -> Result<UnixStream, FrameError> {
    let (stream, early) = frames::join(reader, writer);
    if early.is_empty() { Ok(stream) } else { Err(FrameError::Unexpected("nothing before `ChannelOpened`")) }
}

async fn connect(port: u32) -> Result<TcpStream, (ErrorKind, String)> {
    let Some(port) = u16::try_from(port).ok().filter(|port| *port != 0) else {
        return Err((ErrorKind::Invalid, format!("{port} is no port: accepted is 1 to 65535")));
    };
    let mut last = std::io::ErrorKind::ConnectionRefused.into();
    for address in [std::net::Ipv4Addr::LOCALHOST.into(), std::net::IpAddr::from(Ipv6Addr::LOCALHOST)] {
        match tokio::time::timeout(CONNECT_DEADLINE, TcpStream::connect((address, port))).await {
            Ok(Ok(stream)) => {
                // What a program writes in small pieces is not to wait for more.
                let _ = stream.set_nodelay(true);
                return Ok(stream);
            }
            // The answer of the first address says more than that of one that does not exist.
            Ok(Err(error)) if address.is_ipv4() => last = error,
            Ok(Err(_)) => {}
            Err(_) => last = std::io::ErrorKind::TimedOut.into(),
        }
    }
    if last.kind() == std::io::ErrorKind::ConnectionRefused {
        return Err((ErrorKind::NotFound, format!("nothing listens on port {port}")));
    }
    Err((ErrorKind::Internal, format!("connect to port {port}: {last}")))
}

/// Waits until the other end of `channel` is closed in both directions.
fn hung_up(channel: &UnixStream) -> impl Future<Output = std::io::Result<()>> + use<> {
    // A descriptor of its own, since what is known of one to be writable is forgotten below.
    let watched = channel.as_fd().try_clone_to_owned().map(StdStream::from);
    async move {
        let watched = UnixStream::from_std(watched?)?;
        loop {
            if watched.ready(Interest::WRITABLE).await?.is_write_closed() {
                return Ok(());
            }
            // Wakes when something changes, and not because nothing has.
            let _ =
                watched.try_io(Interest::WRITABLE, || Err::<(), _>(std::io::ErrorKind::WouldBlock.into()));
        }
    }
}

/// Returns what the child becomes; nothing for a plain process of a test.
fn prepare(agent: &Agent, user: Option<&str>) -> Result<Option<PreparedExec>, String> {
    let (uid, gid, groups) = match user {
        Some(text) => {
            let user = user::resolve(text, Path::new("/etc"))?;
            (user.uid, user.gid, user.groups)
        }
        None => (0, 0, Vec::new()),
    };
    match agent.hardening {
        Hardening::Full => {
            // Beside the work, not among it.
            let config =
                AgentConfig { work_join_fds: Vec::new(), process_count_fds: None, ..agent.config.clone() };
            harden::prepare_exec(&config, uid, gid, &groups)
                .map(Some)
                .map_err(|error| error.source.to_string())
        }
        #[cfg(debug_assertions)]
        Hardening::Off => Ok(None),
    }
}

/// Starts the child that serves `channel`.
fn fork(
    agent: &Agent,
    channel: UnixStream,
    prepared: Option<&PreparedExec>,
) -> std::io::Result<oneshot::Receiver<i32>> {
    let channel = channel.into_std()?;
    let pid = {
        // No handler of the agent may run in the child before its dispositions are reset.
        let _blocked = BlockedSignals::new();
        // SAFETY: the process is single-threaded, so that the child's copy of the heap is in no half-changed state, and
        // may be used by ordinary code; the child leaves by `_exit` only and touches nothing of the runtime.
        // JUSTIFICATION: an exec of this program would need it in the sandbox's files, where Landlock has to allow it.
        match unsafe { libc::fork() } {
            0 => child(&channel, prepared),
            pid => pid,
        }
    };
    if pid < 0 {
        return Err(std::io::Error::last_os_error());
    }
    Ok(agent.reaper.watch(pid))
}

/// Serves files and exits.
fn child(channel: &StdStream, prepared: Option<&PreparedExec>) -> ! {
    let code = match become_worker(channel, prepared) {
        Ok((link, root)) => {
            // A panic must not run on into the agent's code.
            let served = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| files::serve(link, &root)));
            i32::from(served.is_err())
        }
        Err(_) => 1,
    };
    // SAFETY: ends the process without running handlers that belong to the agent's copy of memory.
    // JUSTIFICATION: `std::process::exit` would run them.
    unsafe { libc::_exit(code) }
}

fn become_worker(channel: &StdStream, prepared: Option<&PreparedExec>) -> std::io::Result<(FileLink, Root)> {
    // SAFETY: plain calls on this process and on descriptors of it; the child is single-threaded and was just forked, so
    // that nobody uses what is closed here, the runtime's descriptors included.
    // JUSTIFICATION: they are only known by number.
    let stream = unsafe {
        libc::setsid();
        reset_signals();
        libc::signal(libc::SIGPIPE, libc::SIG_IGN);
        libc::umask(0o022);
        if let Some(prepared) = prepared {
            harden::apply_exec(prepared)?;
        }
        if channel.as_raw_fd() != CHANNEL_FD && libc::dup2(channel.as_raw_fd(), CHANNEL_FD) < 0 {
            return Err(std::io::Error::last_os_error());
        }
        harden::close_range(CHANNEL_FD + 1, i32::MAX)?;
        <StdStream as std::os::fd::FromRawFd>::from_raw_fd(CHANNEL_FD)
    };
    std::env::set_current_dir("/")?;
    Ok((FileLink::new(stream)?, Root::own()?))
}
