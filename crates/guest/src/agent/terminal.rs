//! The agent's end of a terminal that a program runs on.

use std::io;
use std::os::fd::OwnedFd;

use cloister_types::exec::TerminalSize;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, ptsname, unlockpt};
use rustix::termios::{InputModes, OptionalActions, Winsize, tcgetattr, tcsetattr, tcsetwinsize};
use tokio::io::Interest;
use tokio::io::unix::{AsyncFd, AsyncFdRegisterError};

/// Makes a new terminal of the sandbox's own instance; below `/dev` no program can put anything in its place.
const MULTIPLEXER: &str = "/dev/pts/ptmx";
/// What a terminal hands out at a time, at most.
pub(super) const READ_MAX_BYTES: usize = 4096;
/// Ctrl-D: how the end of input is typed.
const END_OF_INPUT: u8 = 4;

/// A terminal. What is typed is written to it, what the program prints is read from it.
pub(super) struct Terminal {
    master: AsyncFd<OwnedFd>,
}

impl Terminal {
    /// Makes a terminal and returns it with the program's end of it.
    ///
    /// # Errors
    ///
    /// The kernel's, for example when the sandbox has as many terminals as it may.
    pub(super) fn open(size: TerminalSize) -> io::Result<(Self, OwnedFd)> {
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let master = rustix::fs::open(MULTIPLEXER, flags, Mode::empty())?;
        unlockpt(&master)?;
        // Erasing a character that has several bytes takes the terminal to know of them.
        let mut modes = tcgetattr(&master)?;
        modes.input_modes |= InputModes::IUTF8;
        tcsetattr(&master, OptionalActions::Now, &modes)?;
        let program = open_program_end(&master)?;
        let master = register(master);
        let terminal = Self { master: master.map_err(io::Error::from)? };
        terminal.resize(size)?;
        Ok((terminal, program))
    }

    /// Gives it another size; programs on it are told (`SIGWINCH`).
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub(super) fn resize(&self, size: TerminalSize) -> io::Result<()> {
        let size = Winsize { ws_row: size.rows, ws_col: size.columns, ws_xpixel: 0, ws_ypixel: 0 };
        Ok(tcsetwinsize(&self.master, size)?)
    }

    /// Waits until there is something to read, or its end.
    pub(super) async fn readable(&self) {
        // A failure is met again by the read that follows.
        let _ = self.master.readable().await.map(|mut ready| ready.retain_ready());
    }

    /// Reads what is there. Once the last program has let go of it, that is `EIO`.
    ///
    /// # Errors
    ///
    /// `WouldBlock` when there is nothing.
    pub(super) fn try_read(&self, data: &mut [u8]) -> io::Result<usize> {
        self.master.try_io(Interest::READABLE, |master| Ok(rustix::io::read(master, &mut *data)?))
    }

    /// Types something and returns how many bytes were taken. Waits while the program does not read.
    ///
    /// # Errors
    ///
    /// When no program holds it any more.
    pub(super) async fn write(&self, data: &[u8]) -> io::Result<usize> {
        self.master.async_io(Interest::WRITABLE, |master| Ok(rustix::io::write(master, data)?)).await
    }

    /// Types the end of input, which a program that reads lines sees as one.
    pub(super) async fn write_end(&self) {
        // A program that is gone needs none.
        let _ = self.write(&[END_OF_INPUT]).await;
    }
}

/// Opens the program's end of a terminal.
fn open_program_end(master: &OwnedFd) -> rustix::io::Result<OwnedFd> {
    match ioctl_tiocgptpeer(master, OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC) {
        // The gVisor of 2024 has terminals by name only. As above, nothing else can stand there.
        Err(Errno::NOTTY) => {
            let name = ptsname(master, Vec::new())?;
            rustix::fs::open(name, OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty())
        }
        other => other,
    }
}

#[expect(unsafe_code, reason = "tokio has no type of its own for a terminal")]
fn register(master: OwnedFd) -> Result<AsyncFd<OwnedFd>, AsyncFdRegisterError<OwnedFd>> {
    // SAFETY: an `OwnedFd` names the same open descriptor until it is dropped, which the `AsyncFd` that owns it does after it
    // has let go; everybody else only borrows it.
    // JUSTIFICATION: a thread for each terminal is memory in every sandbox.
    unsafe { AsyncFd::register_with_interest(master, Interest::READABLE | Interest::WRITABLE) }
}
