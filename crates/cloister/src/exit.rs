//! How an exec's end becomes the exit code of this process, and what is said about it.
//!
//! The table is documented in `docs/reference/exit-codes.md`.

use cloister_api::common::{ExecExit, ExitReason};

use crate::error::EXIT_CLOISTER;

/// Exit code of a command that ran into `--timeout` or `--no-output-timeout`.
pub(crate) const EXIT_TIMEOUT: u8 = 124;
/// Exit code of a command that the kernel killed for its memory: 128 + `SIGKILL`.
pub(crate) const EXIT_OUT_OF_MEMORY: u8 = 137;

/// Returns the exit code that stands for this end.
pub(crate) fn exit_code(exit: &ExecExit) -> u8 {
    let low_byte = |code: i32| u8::try_from(code & 0xff).expect("masked to a byte");
    match exit.reason.as_known() {
        Some(ExitReason::Exited) => low_byte(exit.code),
        Some(ExitReason::Signaled) => low_byte(128 + (exit.signal & 0x7f)),
        Some(ExitReason::OutOfMemory) => EXIT_OUT_OF_MEMORY,
        Some(ExitReason::Timeout | ExitReason::NoOutputTimeout) => EXIT_TIMEOUT,
        // 126 or 127, never 0: a command that did not start must not look like one that succeeded.
        Some(ExitReason::NotStarted) => match low_byte(exit.code) {
            0 => 126,
            code => code,
        },
        Some(ExitReason::SandboxGone | ExitReason::Unspecified) | None => EXIT_CLOISTER,
    }
}

/// Something to say on standard error after the command's own output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Notice {
    /// What happened.
    pub(crate) text: String,
    /// What to do.
    pub(crate) hint: &'static str,
}

/// Returns what a person should know about this end; nothing for a plain exit.
pub(crate) fn notices(exit: &ExecExit) -> Vec<Notice> {
    let mut notices = Vec::new();
    let mut add = |text: &str, detail: &str, hint: &'static str| {
        // The host's sentence may say the same words: then it alone is enough.
        let text = if detail.is_empty() {
            text.to_owned()
        } else if detail.to_lowercase().contains(&text.to_lowercase()) {
            crate::terminal::one_line(detail)
        } else {
            format!("{text}: {}", crate::terminal::one_line(detail))
        };
        notices.push(Notice { text, hint });
    };
    let message = exit.message.as_str();
    match exit.reason.as_known() {
        Some(ExitReason::Exited | ExitReason::Signaled) => {}
        Some(ExitReason::OutOfMemory) => {
            add(
                "out of memory",
                message,
                "give the session more with `--memory`, or make the command use less",
            );
        }
        Some(ExitReason::Timeout) => add("timed out", message, "raise `--timeout`, or leave it out"),
        Some(ExitReason::NoOutputTimeout) => {
            add("timed out without output", message, "raise `--no-output-timeout`, or leave it out");
        }
        Some(ExitReason::NotStarted) => {
            // 127 is a program that is not there; anything else may be the program, its directory or its user.
            let hint = if exit.code == 127 {
                "check the command's path inside the sandbox: `cloister exec SESSION -- ls /usr/bin`"
            } else {
                "program, interpreter, `--workdir` and `--user` are looked up inside the sandbox"
            };
            add("not started", message, hint);
        }
        Some(ExitReason::SandboxGone) => {
            add(
                "the sandbox ended before the command",
                message,
                "`cloister session get` says why; the output up to here is kept in `cloister logs`",
            );
        }
        Some(ExitReason::Unspecified) | None => {
            add(
                "the command's end was not understood",
                message,
                "use a `cloister` of the coordinator's version",
            );
        }
    }
    // A program that lost a child to the limit and went on, or failed in its own way.
    if exit.memory_limit_hit && exit.reason.as_known() != Some(ExitReason::OutOfMemory) {
        add(
            "memory limit reached: the kernel killed a process of the sandbox while the command ran",
            "",
            "give the session more with `--memory`, or make the command use less",
        );
    }
    if exit.pids_limit_hit {
        add(
            "process limit reached while the command ran",
            "",
            "end processes that were left in the background (`cloister exec SESSION -- ps aux`), or create a session with more `--pids`",
        );
    }
    if exit.disk_full {
        add(
            "disk full: the writable layer had no space left",
            "",
            "give the session more with `--disk`, or delete files",
        );
    }
    if exit.disk_error {
        add(
            "disk error: files that were written in the sandbox may be lost",
            "",
            "make room on the host, where its data directory is, then pause and resume the session, which checks its files",
        );
    }
    if exit.output_lost {
        add(
            "output was lost: the host's disk did not take it",
            "",
            "make room on the host, where its data directory is, and run the command again if you need the output",
        );
    }
    notices
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exit(reason: ExitReason, code: i32, signal: i32) -> ExecExit {
        ExecExit { reason: reason.into(), code, signal, ..Default::default() }
    }

    #[test]
    fn exit_codes_are_those_of_shells() {
        let cases = [
            (exit(ExitReason::Exited, 0, 0), 0),
            (exit(ExitReason::Exited, 42, 0), 42),
            (exit(ExitReason::Exited, 256 + 3, 0), 3),
            (exit(ExitReason::Signaled, 143, 15), 143),
            (exit(ExitReason::Signaled, 0, 2), 130),
            (exit(ExitReason::OutOfMemory, 137, 9), 137),
            (exit(ExitReason::OutOfMemory, 1, 0), 137),
            (exit(ExitReason::Timeout, 137, 9), 124),
            (exit(ExitReason::NoOutputTimeout, 137, 9), 124),
            (exit(ExitReason::NotStarted, 127, 0), 127),
            (exit(ExitReason::NotStarted, 126, 0), 126),
            (exit(ExitReason::NotStarted, 0, 0), 126),
            (exit(ExitReason::SandboxGone, 0, 0), 125),
            (exit(ExitReason::Unspecified, 0, 0), 125),
            (ExecExit { reason: buffa::EnumValue::from(99), ..Default::default() }, 125),
        ];
        for (exit, code) in cases {
            assert_eq!(exit_code(&exit), code, "{exit:?}");
        }
    }

    #[test]
    fn limits_are_named_and_a_plain_exit_says_nothing() {
        assert_eq!(notices(&exit(ExitReason::Exited, 1, 0)), []);
        let text = |exit: &ExecExit| notices(exit).into_iter().map(|notice| notice.text).collect::<Vec<_>>();
        assert_eq!(text(&exit(ExitReason::OutOfMemory, 137, 9)), ["out of memory"]);
        let said =
            ExecExit { message: "Out of memory at 64 MiB".into(), ..exit(ExitReason::OutOfMemory, 137, 9) };
        assert_eq!(text(&said), ["Out of memory at 64 MiB"]);
        let said = ExecExit { message: "killed at 64 MiB".into(), ..exit(ExitReason::OutOfMemory, 137, 9) };
        assert_eq!(text(&said), ["out of memory: killed at 64 MiB"]);
        let both = ExecExit { pids_limit_hit: true, disk_full: true, ..exit(ExitReason::Exited, 1, 0) };
        assert_eq!(
            text(&both),
            [
                "process limit reached while the command ran",
                "disk full: the writable layer had no space left"
            ]
        );
        let lost = ExecExit { output_lost: true, ..exit(ExitReason::Signaled, 143, 15) };
        assert_eq!(text(&lost), ["output was lost: the host's disk did not take it"]);
        let broken = ExecExit { disk_error: true, ..exit(ExitReason::Exited, 0, 0) };
        assert_eq!(text(&broken), ["disk error: files that were written in the sandbox may be lost"]);
        let survived = ExecExit { memory_limit_hit: true, ..exit(ExitReason::Exited, 0, 0) };
        assert_eq!(
            text(&survived),
            ["memory limit reached: the kernel killed a process of the sandbox while the command ran"]
        );
        let main = ExecExit { memory_limit_hit: true, ..exit(ExitReason::OutOfMemory, 137, 9) };
        assert_eq!(text(&main), ["out of memory"]);
    }
}
