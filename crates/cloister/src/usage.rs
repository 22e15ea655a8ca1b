//! A command line that was not understood: what is said about it, and the exit code.

use clap::CommandFactory as _;
use clap::error::ErrorKind;

use crate::cli::Cli;
use crate::error::{EXIT_CLOISTER, EXIT_FAILED, EXIT_USAGE};
use crate::terminal::Terminal;

/// Prints the error, or the help that was asked for, and returns the exit code.
pub(crate) fn report(error: &clap::Error) -> u8 {
    // What is no text in it is in clap's own message.
    let arguments: Vec<String> =
        std::env::args_os().skip(1).map(|argument| argument.to_string_lossy().into_owned()).collect();
    // A closed standard error is no reason to exit otherwise.
    let _ = error.print();
    if let Some(hint) = hint(error, &arguments) {
        Terminal::new(false).hint(hint);
    }
    exit_code(error, &arguments)
}

fn exit_code(error: &clap::Error, arguments: &[String]) -> u8 {
    if !error.use_stderr() {
        return 0;
    }
    if error.exit_code() != 2 {
        return EXIT_FAILED;
    }
    // The codes of `run` and `exec` are the command's own: a usage error must not look like one of those.
    if verb_of_work(arguments).is_some() { EXIT_CLOISTER } else { EXIT_USAGE }
}

/// Returns `run` or `exec` when the command line is one of theirs.
fn verb_of_work(arguments: &[String]) -> Option<&str> {
    let command = Cli::command();
    let takes_value = |flag: &str| {
        let long = flag.strip_prefix("--");
        command.get_arguments().any(|known| known.get_long() == long && known.get_action().takes_values())
    };
    let mut arguments = arguments.iter().map(String::as_str);
    while let Some(argument) = arguments.next() {
        if !argument.starts_with('-') {
            return Some(argument).filter(|verb| matches!(*verb, "run" | "exec"));
        }
        if takes_value(argument) {
            arguments.next();
        }
    }
    None
}

/// Returns what to do where people leave out the `--` that other tools do not ask for.
fn hint(error: &clap::Error, arguments: &[String]) -> Option<String> {
    let verb = verb_of_work(arguments)?;
    let is_of_command =
        matches!(error.kind(), ErrorKind::UnknownArgument | ErrorKind::MissingRequiredArgument);
    if !is_of_command || arguments.iter().any(|argument| argument == "--") {
        return None;
    }
    let before = if verb == "exec" { "exec SESSION" } else { "run" };
    Some(format!("put `--` before the command that is to run inside: `cloister {before} -- ls -la`"))
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    fn parsed(line: &str) -> (clap::Error, Vec<String>) {
        let arguments: Vec<String> = line.split(' ').map(str::to_owned).collect();
        let error = Cli::try_parse_from(std::iter::once("cloister".to_owned()).chain(arguments.clone()));
        (error.unwrap_err(), arguments)
    }

    #[test]
    fn a_command_without_dashes_before_it_gets_the_hint_and_other_mistakes_do_not() {
        let said = |line| {
            let (error, arguments) = parsed(line);
            hint(&error, &arguments)
        };
        assert!(said("exec box ls").is_some_and(|hint| hint.contains("exec SESSION -- ")));
        assert!(said("--json run ls -la").is_some_and(|hint| hint.contains("run -- ")));
        assert!(said("run").is_some());
        assert_eq!(said("run --no-such-flag -- ls"), None);
        assert_eq!(said("run --timeout never -- ls"), None);
        assert_eq!(said("session create box"), None);
    }

    #[test]
    fn mistakes_of_run_and_exec_have_a_code_of_their_own_wherever_the_verb_stands() {
        let code = |line| {
            let (error, arguments) = parsed(line);
            exit_code(&error, &arguments)
        };
        for line in ["run", "exec box ls", "--json run ls", "--context other run ls", "--endpoint=x exec"] {
            assert_eq!(code(line), EXIT_CLOISTER, "{line}");
        }
        for line in ["session", "--context run session", "no-such", "status run"] {
            assert_eq!(code(line), EXIT_USAGE, "{line}");
        }
        assert_eq!(code("run --help"), 0);
    }
}
