//! A program run inside a sandbox: what to run, what it printed, how it ended.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// What to run.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ExecSpec {
    /// Program and arguments; at least one element.
    pub argv: Vec<String>,
    /// Added to the image's environment; a key given here wins.
    pub env: BTreeMap<String, String>,
    /// Absolute directory inside the sandbox; the image's when `None`.
    pub cwd: Option<String>,
    /// Name or uid, optionally `:group`; the image's when `None`.
    pub user: Option<String>,
    /// Longest run time.
    pub timeout: Option<Duration>,
    /// Longest silence.
    pub no_output_timeout: Option<Duration>,
    /// Whether standard input stays open for writes.
    pub stdin: bool,
    /// Run on a terminal of this size. Standard input is open then, and everything is printed on standard output.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub terminal: Option<TerminalSize>,
}

/// The size of a terminal in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminalSize {
    /// Lines.
    pub rows: u16,
    /// Characters of a line.
    pub columns: u16,
}

impl TerminalSize {
    /// Most lines, and most characters of a line.
    pub const MAX: u16 = 4096;

    /// Returns a size.
    ///
    /// # Errors
    ///
    /// [`ExecSpecError::TerminalSize`] unless both are 1 to [`MAX`](Self::MAX).
    pub fn new(rows: u32, columns: u32) -> Result<Self, ExecSpecError> {
        let wrong = ExecSpecError::TerminalSize { rows, columns };
        let checked = |value: u32| {
            u16::try_from(value).ok().filter(|value| (1..=Self::MAX).contains(value)).ok_or(wrong.clone())
        };
        Ok(Self { rows: checked(rows)?, columns: checked(columns)? })
    }
}

/// Most bytes that all of `argv` and `env` may have together, counted as the kernel does: each text with its end and a
/// pointer to it. Less than a frame, which carries them.
pub const ARGUMENTS_MAX_BYTES: usize = 960 * 1024;
/// What a text costs besides its bytes.
const TEXT_COST_BYTES: usize = 9;
/// Most bytes of one frame of output.
pub const OUTPUT_FRAME_MAX_BYTES: usize = 64 * 1024;

/// Why a spec is not accepted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExecSpecError {
    /// There is nothing to run.
    #[error("`argv` is empty: give at least the program")]
    NoProgram,
    /// A string that no kernel takes.
    #[error("`{0}` has a NUL byte, which no program can be given")]
    Nul(&'static str),
    /// A name that cannot be an environment variable's.
    #[error("environment name `{0}` is empty or has a `=`")]
    EnvName(String),
    /// A directory that is not absolute.
    #[error("working directory `{0}` is not absolute")]
    RelativeDirectory(String),
    /// More than the kernel would take.
    #[error(
        "arguments and environment have {0} bytes together: at most 960 KiB, each text counted with 9 more"
    )]
    TooLarge(usize),
    /// No terminal has this size.
    #[error("a terminal of {rows} rows and {columns} columns: each is 1 to 4096")]
    TerminalSize {
        /// Lines.
        rows: u32,
        /// Characters of a line.
        columns: u32,
    },
}

impl ExecSpec {
    /// Returns whether standard input takes writes.
    pub fn has_stdin(&self) -> bool {
        self.stdin || self.terminal.is_some()
    }

    /// Checks what can be checked without a sandbox.
    ///
    /// # Errors
    ///
    /// The first thing that is wrong; nothing was started.
    pub fn validate(&self) -> Result<(), ExecSpecError> {
        if self.argv.first().is_none_or(String::is_empty) {
            return Err(ExecSpecError::NoProgram);
        }
        if self.argv.iter().any(|argument| argument.contains('\0')) {
            return Err(ExecSpecError::Nul("argv"));
        }
        for (name, value) in &self.env {
            if name.contains('\0') || value.contains('\0') {
                return Err(ExecSpecError::Nul("env"));
            }
            if name.is_empty() || name.contains('=') {
                return Err(ExecSpecError::EnvName(name.chars().take(64).collect()));
            }
        }
        for (field, value) in [("cwd", &self.cwd), ("user", &self.user)] {
            if value.as_ref().is_some_and(|text| text.contains('\0')) {
                return Err(ExecSpecError::Nul(field));
            }
        }
        if let Some(directory) = &self.cwd
            && !directory.starts_with('/')
        {
            return Err(ExecSpecError::RelativeDirectory(directory.chars().take(64).collect()));
        }
        let arguments: usize = self.argv.iter().map(|text| text.len() + TEXT_COST_BYTES).sum();
        let pair = |(name, value): (&String, &String)| name.len() + value.len() + 1 + TEXT_COST_BYTES;
        let environment: usize = self.env.iter().map(pair).sum();
        if arguments + environment > ARGUMENTS_MAX_BYTES {
            return Err(ExecSpecError::TooLarge(arguments + environment));
        }
        Ok(())
    }
}

/// Which of the two output streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OutputStream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// Why an exec ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExitReason {
    /// The program returned a code.
    Exited,
    /// The program died of a signal.
    Signaled,
    /// The kernel killed it at the sandbox's memory limit.
    OutOfMemory,
    /// It ran too long.
    Timeout,
    /// It was silent too long.
    NoOutputTimeout,
    /// It could not be started: code 127 when it was not found, 126 when it cannot be run.
    NotStarted,
    /// The sandbox ended first.
    SandboxGone,
}

impl ExitReason {
    /// Every reason.
    pub const ALL: [Self; 7] = [
        Self::Exited,
        Self::Signaled,
        Self::OutOfMemory,
        Self::Timeout,
        Self::NoOutputTimeout,
        Self::NotStarted,
        Self::SandboxGone,
    ];
}

/// How an exec ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exit {
    /// Why.
    pub reason: ExitReason,
    /// The exit code; 128 + signal when a signal ended it, as shells report it.
    pub code: i32,
    /// The signal number, when one ended it.
    pub signal: Option<i32>,
    /// One sentence for people; empty for a plain exit.
    pub message: String,
    /// Bytes of output in all, both streams together, kept or not.
    pub output_bytes: u64,
    /// When, in milliseconds since the Unix epoch.
    pub exited_unix_ms: u64,
    /// The process limit was reached while it ran.
    pub pids_limit_hit: bool,
    /// It failed, and the writable layer was full when it ended.
    pub disk_full: bool,
    /// The kernel killed a process of the sandbox, not necessarily of this exec, at the memory limit while it ran.
    #[serde(default)]
    pub memory_limit_hit: bool,
    /// The host's own disk did not take all of its output.
    #[serde(default)]
    pub output_lost: bool,
    /// The host's own disk is full or failed below the layer: what was written may be lost.
    #[serde(default)]
    pub disk_error: bool,
}

impl Exit {
    /// Returns whether it ended in any other way than with exit code 0.
    pub fn failed(&self) -> bool {
        self.reason != ExitReason::Exited || self.code != 0
    }
}

/// One exec as its host knows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecRecord {
    /// Its id.
    pub exec_id: crate::ExecId,
    /// The request id it was started with.
    pub request_id: String,
    /// What runs.
    pub spec: ExecSpec,
    /// The process id inside the sandbox; 0 when it never started.
    pub pid: u32,
    /// When, in milliseconds since the Unix epoch.
    pub started_unix_ms: u64,
    /// Set once it ended.
    pub exit: Option<Exit>,
}

/// A piece of an exec's output, in order. Offsets count both streams together in the order they were read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OutputFrame {
    /// Bytes of one stream.
    Data {
        /// Which stream.
        stream: OutputStream,
        /// Offset of the first byte.
        offset: u64,
        /// At most [`OUTPUT_FRAME_MAX_BYTES`].
        data: Vec<u8>,
    },
    /// Bytes that are no longer kept.
    Gap {
        /// First missing offset.
        from: u64,
        /// First offset that follows.
        to: u64,
    },
    /// The last frame of every complete stream.
    Exit(Exit),
    /// The last frame of a stream that does not follow.
    End {
        /// Where to go on.
        next_offset: u64,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spec_that_no_kernel_would_take_is_refused() {
        let good = ExecSpec { argv: vec!["true".to_owned()], ..ExecSpec::default() };
        assert_eq!(good.validate(), Ok(()));
        let env = |name: &str| BTreeMap::from([(name.to_owned(), String::new())]);
        let wrong = [
            (ExecSpec::default(), ExecSpecError::NoProgram),
            (ExecSpec { argv: vec![String::new()], ..good.clone() }, ExecSpecError::NoProgram),
            (ExecSpec { argv: vec!["a\0b".to_owned()], ..good.clone() }, ExecSpecError::Nul("argv")),
            (ExecSpec { env: env("a=b"), ..good.clone() }, ExecSpecError::EnvName("a=b".to_owned())),
            (ExecSpec { env: env(""), ..good.clone() }, ExecSpecError::EnvName(String::new())),
            (
                ExecSpec { cwd: Some("tmp".to_owned()), ..good.clone() },
                ExecSpecError::RelativeDirectory("tmp".to_owned()),
            ),
            (ExecSpec { user: Some("\0".to_owned()), ..good.clone() }, ExecSpecError::Nul("user")),
            (
                ExecSpec { argv: vec!["x".repeat(ARGUMENTS_MAX_BYTES)], ..good.clone() },
                ExecSpecError::TooLarge(ARGUMENTS_MAX_BYTES + TEXT_COST_BYTES),
            ),
            // Many short ones take more room on the way than they have bytes.
            (
                ExecSpec { argv: vec!["true".to_owned(); 100_000], ..good.clone() },
                ExecSpecError::TooLarge(100_000 * (4 + TEXT_COST_BYTES)),
            ),
        ];
        for (spec, error) in wrong {
            assert_eq!(spec.validate(), Err(error));
        }
    }
}
