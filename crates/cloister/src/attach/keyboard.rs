//! The terminal of the person at this end: raw, so that every key goes to the sandbox, and its size.

use std::io::{self, IsTerminal as _};
use std::str::FromStr;

use cloister_api::common::TerminalSize;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;

use super::input::read_stdin;
use crate::error::CliError;
use crate::terminal::Terminal;

/// The size of a terminal where ours is none.
const DEFAULT_SIZE: (u32, u32) = (24, 80);
/// The most that a program's terminal can have of rows, and of columns.
const SIZE_MAX: u16 = 4096;

/// What came from the keyboard.
#[derive(Debug, PartialEq)]
pub(crate) enum Typed {
    /// Keys.
    Bytes(Vec<u8>),
    /// Standard input is at its end.
    End,
    /// The window has another size.
    Size(TerminalSize),
    /// The detach keys.
    Detach,
}

/// Standard input as a keyboard.
pub(crate) struct Keyboard {
    chunks: Option<mpsc::Receiver<io::Result<Vec<u8>>>>,
    resized: Signal,
    detach: DetachKeys,
    has_detached: bool,
    ends: bool,
    _raw: Option<RawMode>,
}

impl Keyboard {
    /// Takes the keyboard. Where standard input is a terminal it is raw until this is dropped. Without `types` only the
    /// window's size is passed on.
    ///
    /// # Errors
    ///
    /// [`CliError::Io`] when the terminal cannot be made raw.
    pub(crate) fn take(terminal: Terminal, detach: DetachKeys, types: bool) -> Result<Self, CliError> {
        let resized =
            signal(SignalKind::window_change()).map_err(CliError::io("listen for the window's size"))?;
        // Lines of JSON are for a program, which reads them as they are.
        let is_raw = types && !terminal.json;
        let raw =
            if is_raw { RawMode::enter().map_err(CliError::io("make the terminal raw"))? } else { None };
        let chunks = types.then(read_stdin);
        Ok(Self { chunks, resized, detach, has_detached: false, ends: true, _raw: raw })
    }

    /// Keeps the end of our standard input to ourselves: others may type on.
    pub(crate) fn without_end(self) -> Self {
        Self { ends: false, ..self }
    }

    /// Returns the window's size; nothing where there is no window.
    pub(crate) fn size(&self) -> Option<TerminalSize> {
        window_size()
    }

    /// Returns what comes next.
    ///
    /// # Errors
    ///
    /// [`CliError::Io`] when standard input cannot be read.
    ///
    /// # Cancel safety
    ///
    /// May be dropped and called again: nothing is lost.
    pub(crate) async fn next(&mut self) -> Result<Typed, CliError> {
        if self.has_detached {
            return Ok(Typed::Detach);
        }
        loop {
            let chunk = async {
                match &mut self.chunks {
                    Some(chunks) => chunks.recv().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                chunk = chunk => {
                    let data = chunk.transpose().map_err(CliError::io("read standard input"))?.unwrap_or_default();
                    if data.is_empty() {
                        self.chunks = None;
                        if self.ends {
                            return Ok(Typed::End);
                        }
                        continue;
                    }
                    let (keys, is_detach) = self.detach.filter(data);
                    self.has_detached = is_detach;
                    if !keys.is_empty() {
                        return Ok(Typed::Bytes(keys));
                    }
                    if is_detach {
                        return Ok(Typed::Detach);
                    }
                }
                _ = self.resized.recv() => {
                    if let Some(size) = window_size() {
                        return Ok(Typed::Size(size));
                    }
                }
            }
        }
    }
}

/// Returns the size of the window that standard output, input or error is.
pub(crate) fn window_size() -> Option<TerminalSize> {
    let sizes = [tcgetwinsize(io::stdout()), tcgetwinsize(io::stdin()), tcgetwinsize(io::stderr())];
    let size = sizes.into_iter().flatten().find(|size| size.ws_row > 0 && size.ws_col > 0)?;
    let bounded = |value: u16| u32::from(value.min(SIZE_MAX));
    Some(TerminalSize { rows: bounded(size.ws_row), columns: bounded(size.ws_col), ..Default::default() })
}

/// Returns which kind of terminal standard output is; nothing where it is none.
pub(crate) fn kind() -> Option<String> {
    io::stdout().is_terminal().then(|| std::env::var("TERM").ok()).flatten().filter(|kind| !kind.is_empty())
}

/// Returns the size that a program's terminal begins with.
pub(crate) fn first_size() -> TerminalSize {
    let (rows, columns) = DEFAULT_SIZE;
    window_size().unwrap_or(TerminalSize { rows, columns, ..Default::default() })
}

/// Raw until dropped.
struct RawMode {
    before: Termios,
}

impl RawMode {
    /// Makes standard input raw, if it is a terminal.
    fn enter() -> io::Result<Option<Self>> {
        let stdin = io::stdin();
        if !stdin.is_terminal() {
            return Ok(None);
        }
        let before = tcgetattr(&stdin)?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(&stdin, OptionalActions::Now, &raw)?;
        Ok(Some(Self { before }))
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        // The terminal may be gone, and nothing is left to be done then.
        let _ = tcsetattr(io::stdin(), OptionalActions::Drain, &self.before);
    }
}

/// Keys that end the watching and not the program, typed one after the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DetachKeys {
    keys: Vec<u8>,
    matched: usize,
}

impl DetachKeys {
    /// Takes the detach keys out of what was typed; returns the rest, and whether they were there. The beginning of
    /// the keys is held back until it is known not to be them; what follows them is dropped.
    fn filter(&mut self, data: Vec<u8>) -> (Vec<u8>, bool) {
        if self.keys.is_empty() {
            return (data, false);
        }
        let mut rest = Vec::with_capacity(data.len());
        for byte in data {
            if byte == self.keys[self.matched] {
                self.matched += 1;
                if self.matched == self.keys.len() {
                    self.matched = 0;
                    return (rest, true);
                }
                continue;
            }
            rest.extend_from_slice(&self.keys[..self.matched]);
            self.matched = usize::from(byte == self.keys[0]);
            if self.matched == 0 {
                rest.push(byte);
            }
        }
        (rest, false)
    }
}

impl FromStr for DetachKeys {
    type Err = String;

    /// Reads keys with commas between: letters, or `ctrl-` with a letter or one of `@[\\]^_`. Nothing is no keys.
    fn from_str(text: &str) -> Result<Self, String> {
        let key = |text: &str| -> Option<u8> {
            let one = |text: &str| match text.as_bytes() {
                [byte] if byte.is_ascii_graphic() => Some(*byte),
                _ => None,
            };
            match text.strip_prefix("ctrl-") {
                Some(name) => one(name)
                    .filter(|byte| byte.is_ascii_lowercase() || b"@[\\]^_".contains(byte))
                    .map(|byte| byte & 0x1f),
                None => one(text),
            }
        };
        if text.is_empty() {
            return Ok(Self { keys: Vec::new(), matched: 0 });
        }
        let keys: Option<Vec<u8>> = text.split(',').map(key).collect();
        let keys = keys.ok_or_else(|| {
            format!("`{text}` are no keys: letters or `ctrl-` and a letter, with commas between, as `ctrl-p,ctrl-q`")
        })?;
        Ok(Self { keys, matched: 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(text: &str) -> DetachKeys {
        text.parse().unwrap()
    }

    #[test]
    fn detach_keys_are_found_across_chunks_and_their_beginning_is_not_lost() {
        let mut detach = keys("ctrl-p,ctrl-q");
        assert_eq!(detach.filter(b"ls\x10".to_vec()), (b"ls".to_vec(), false));
        assert_eq!(detach.filter(b"\x11rest".to_vec()), (Vec::new(), true));
        assert_eq!(detach.filter(b"\x10".to_vec()), (Vec::new(), false));
        assert_eq!(
            detach.filter(b"\x10".to_vec()),
            (b"\x10".to_vec(), false),
            "the second may begin them too"
        );
        assert_eq!(detach.filter(b"x".to_vec()), (b"\x10x".to_vec(), false));
        assert_eq!(detach.filter(b"a\x10\x11b".to_vec()), (b"a".to_vec(), true));
    }

    #[test]
    fn keys_are_spelled_as_people_know_them() {
        assert_eq!(keys("ctrl-@,a,ctrl-]").keys, [0, b'a', 0x1d]);
        assert_eq!(keys("").filter(b"\x10\x11".to_vec()), (b"\x10\x11".to_vec(), false));
        for wrong in ["ctrl-P", "ctrl-", "p,,q", "\u{e9}", "ctrl-1"] {
            assert!(wrong.parse::<DetachKeys>().is_err(), "`{wrong}` was accepted");
        }
    }
}
