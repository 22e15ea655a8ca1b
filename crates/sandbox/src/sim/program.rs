//! The programs that simulated sandboxes know: enough to show every way in which an exec can end.
//!
//! A command line is one or more of these, joined by an argument `&&`; the first that fails ends the line:
//!
//! ```text
//!  true   false   exit N   echo TEXT…   echo-err TEXT…   seq FIRST LAST   cat [PATH]   read
//!  env NAME   pwd   id   uname   size   sleep SECONDS   kill SIGNAL   burn SECONDS   connect
//!  write PATH TEXT   fill PATH   allocate BYTES   fork COUNT
//! ```

use std::collections::VecDeque;
use std::time::Duration;

use cloister_types::OutputStream;

/// One thing that a simulated program does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Step {
    /// Print bytes.
    Write(OutputStream, Vec<u8>),
    /// Print the numbers from the first to the last, a line each.
    Count { next: u64, last: u64 },
    /// Copy standard input to standard output until it is closed.
    CopyInput,
    /// Wait for one line of standard input.
    ReadLine,
    /// Print a file.
    CopyFile(String),
    /// Print a variable of the environment.
    PrintEnv(String),
    /// Print the working directory.
    PrintDirectory,
    /// Print the user.
    PrintUser,
    /// Print the terminal's size.
    PrintSize,
    /// Let time pass.
    Sleep(Duration),
    /// Use this much time of a processor.
    Burn(Duration),
    /// Die of a signal.
    Signal(i32),
    /// End.
    Exit(i32),
    /// Write a file.
    WriteFile(String, Vec<u8>),
    /// Write a file that is larger than any disk.
    FillFile(String),
    /// Use memory.
    Allocate(u64),
    /// Have this many children at once.
    Fork(u64),
    /// Try to reach another machine.
    Connect,
}

/// Why a command line cannot be started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ParseError {
    /// There is no such program: code 127.
    Unknown(String),
    /// Its arguments mean nothing: code 2.
    Usage(String),
}

/// Returns what a command line does.
pub(super) fn parse(argv: &[String]) -> Result<VecDeque<Step>, ParseError> {
    argv.split(|argument| argument == "&&").map(parse_one).collect()
}

fn parse_one(argv: &[String]) -> Result<Step, ParseError> {
    let Some((program, arguments)) = argv.split_first() else {
        return Err(ParseError::Unknown(String::new()));
    };
    let usage = || ParseError::Usage(argv.join(" "));
    let text = |index: usize| arguments.get(index).cloned().ok_or_else(usage);
    let number =
        |index: usize| arguments.get(index).and_then(|text| text.parse::<u64>().ok()).ok_or_else(usage);
    let signed =
        |index: usize| arguments.get(index).and_then(|text| text.parse::<i32>().ok()).ok_or_else(usage);
    let seconds = |index: usize| {
        let parsed = arguments.get(index).and_then(|text| text.parse::<f64>().ok());
        parsed.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()).ok_or_else(usage)
    };
    let line = || format!("{}\n", arguments.join(" ")).into_bytes();
    // As a path would name it.
    let name = program.rsplit('/').next().unwrap_or(program);
    match name {
        "true" => Ok(Step::Write(OutputStream::Stdout, Vec::new())),
        "false" => Ok(Step::Exit(1)),
        "exit" => Ok(Step::Exit(signed(0)? & 0xff)),
        "echo" => Ok(Step::Write(OutputStream::Stdout, line())),
        "echo-err" => Ok(Step::Write(OutputStream::Stderr, line())),
        "uname" => Ok(Step::Write(OutputStream::Stdout, b"sim\n".to_vec())),
        "seq" => Ok(Step::Count { next: number(0)?, last: number(1)? }),
        "cat" if arguments.is_empty() => Ok(Step::CopyInput),
        "cat" => Ok(Step::CopyFile(text(0)?)),
        "read" => Ok(Step::ReadLine),
        "env" => Ok(Step::PrintEnv(text(0)?)),
        "pwd" => Ok(Step::PrintDirectory),
        "id" => Ok(Step::PrintUser),
        "size" => Ok(Step::PrintSize),
        "sleep" => Ok(Step::Sleep(seconds(0)?)),
        "burn" => Ok(Step::Burn(seconds(0)?)),
        "kill" => Ok(Step::Signal(signed(0)?)),
        "connect" => Ok(Step::Connect),
        "write" => Ok(Step::WriteFile(text(0)?, text(1)?.into_bytes())),
        "fill" => Ok(Step::FillFile(text(0)?)),
        "allocate" => Ok(Step::Allocate(number(0)?)),
        "fork" => Ok(Step::Fork(number(0)?)),
        _ => Err(ParseError::Unknown(program.clone())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_text(text: &str) -> Result<Vec<Step>, ParseError> {
        let argv: Vec<String> = text.split(' ').map(str::to_owned).collect();
        parse(&argv).map(Vec::from)
    }

    #[test]
    fn lines_are_parsed_whole_before_anything_runs() {
        assert_eq!(
            parse_text("echo a b && sleep 0.5 && /bin/exit 258"),
            Ok(vec![
                Step::Write(OutputStream::Stdout, b"a b\n".to_vec()),
                Step::Sleep(Duration::from_millis(500)),
                Step::Exit(2),
            ])
        );
        assert_eq!(parse_text("echo a && nosuch"), Err(ParseError::Unknown("nosuch".to_owned())));
        assert_eq!(parse_text("sleep -1"), Err(ParseError::Usage("sleep -1".to_owned())));
        assert_eq!(parse_text("echo a &&"), Err(ParseError::Unknown(String::new())));
    }
}
