//! What a program reads from and prints to: three pipes, or a terminal. Each has the program's end and the agent's.

use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use cloister_types::ExecSpec;
use rustix::pipe::{PipeFlags, pipe_with};
use tokio::io::AsyncWriteExt as _;
use tokio::net::unix::pipe;

use super::launch::waiting_bytes;
use super::terminal::{READ_MAX_BYTES, Terminal};

/// The ends that become descriptors 0 to 2 of the program.
pub(super) struct ProgramEnds {
    /// None for a program that reads end-of-file at once.
    pub(super) stdin: Option<OwnedFd>,
    pub(super) stdout: OwnedFd,
    pub(super) stderr: OwnedFd,
    /// They are one terminal, which is to control the program's session.
    pub(super) is_terminal: bool,
}

/// The ends that the agent keeps.
pub(super) struct AgentEnds {
    pub(super) stdin: Option<Input>,
    pub(super) stdout: Output,
    /// None where everything is printed on one terminal.
    pub(super) stderr: Option<Output>,
    pub(super) terminal: Option<Rc<Terminal>>,
}

/// Where a program's input is written.
pub(super) enum Input {
    Pipe(pipe::Sender),
    Terminal(Rc<Terminal>),
}

/// Where a program's output is read.
pub(super) enum Output {
    Pipe(pipe::Receiver),
    Terminal(Rc<Terminal>),
}

/// Makes what `spec` asks for.
///
/// # Errors
///
/// When the agent, or the sandbox, has no more of them.
pub(super) fn make(spec: &ExecSpec) -> io::Result<(ProgramEnds, AgentEnds)> {
    if let Some(size) = spec.terminal {
        let (terminal, program) = Terminal::open(size)?;
        let terminal = Rc::new(terminal);
        let program = ProgramEnds {
            stdin: Some(program.try_clone()?),
            stdout: program.try_clone()?,
            stderr: program,
            is_terminal: true,
        };
        let agent = AgentEnds {
            stdin: Some(Input::Terminal(Rc::clone(&terminal))),
            stdout: Output::Terminal(Rc::clone(&terminal)),
            stderr: None,
            terminal: Some(terminal),
        };
        return Ok((program, agent));
    }
    let (stdin_read, stdin_write) = match spec.stdin {
        true => new_pipe().map(|(read, write)| (Some(read), Some(write)))?,
        false => (None, None),
    };
    let (stdout_read, stdout_write) = new_pipe()?;
    let (stderr_read, stderr_write) = new_pipe()?;
    let stdin = stdin_write.map(pipe::Sender::from_owned_fd).transpose()?.map(Input::Pipe);
    let program =
        ProgramEnds { stdin: stdin_read, stdout: stdout_write, stderr: stderr_write, is_terminal: false };
    let agent = AgentEnds {
        stdin,
        stdout: Output::Pipe(pipe::Receiver::from_owned_fd(stdout_read)?),
        stderr: Some(Output::Pipe(pipe::Receiver::from_owned_fd(stderr_read)?)),
        terminal: None,
    };
    Ok((program, agent))
}

/// Returns a new pipe's reading and writing end.
pub(super) fn new_pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(pipe_with(PipeFlags::CLOEXEC)?)
}

impl ProgramEnds {
    /// Returns each end that is there.
    pub(super) fn all(&self) -> impl Iterator<Item = &OwnedFd> {
        self.stdin.iter().chain([&self.stdout, &self.stderr])
    }

    /// Returns what becomes descriptors 0 to 2, where `null` stands for the input that is none.
    pub(super) fn in_order<'a>(&'a self, null: &'a OwnedFd) -> [std::os::fd::BorrowedFd<'a>; 3] {
        use std::os::fd::AsFd as _;
        let stdin = self.stdin.as_ref().map_or(null.as_fd(), |end| end.as_fd());
        [stdin, self.stdout.as_fd(), self.stderr.as_fd()]
    }
}

impl Input {
    /// Writes some of `data` and returns how much. Waits while the program does not read.
    ///
    /// # Errors
    ///
    /// When the program does not hold its end any more.
    ///
    /// # Cancel safety
    ///
    /// May be dropped: nothing was written then.
    pub(super) async fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        match self {
            Self::Pipe(pipe) => pipe.write(data).await,
            Self::Terminal(terminal) => terminal.write(data).await,
        }
    }

    /// Lets the program read the end of its input. A terminal stays open: others may go on to type.
    pub(super) async fn end(self) -> Option<Self> {
        match self {
            Self::Pipe(_) => None,
            Self::Terminal(terminal) => {
                terminal.write_end().await;
                Some(Self::Terminal(terminal))
            }
        }
    }
}

impl Output {
    /// Waits until there is something to read, or the end.
    pub(super) async fn readable(&self) {
        match self {
            // A failure is met again by the read that follows.
            Self::Pipe(pipe) => drop(pipe.readable().await),
            Self::Terminal(terminal) => terminal.readable().await,
        }
    }

    /// Reads what is there; 0 at the end.
    ///
    /// # Errors
    ///
    /// `WouldBlock` when there is nothing.
    pub(super) fn try_read(&self, data: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Pipe(pipe) => pipe.try_read(data),
            Self::Terminal(terminal) => terminal.try_read(data),
        }
    }

    /// Returns how many bytes wait to be read.
    pub(super) fn waiting(&self) -> u64 {
        match self {
            Self::Pipe(pipe) => waiting_bytes(pipe),
            // The kernel counts only a part of what waits in a terminal, whose buffer bounds it anyway.
            Self::Terminal(_) => u64::try_from(READ_MAX_BYTES).unwrap_or(u64::MAX),
        }
    }
}
