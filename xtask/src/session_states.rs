//! `docs/reference/session-states.md`, written from the state machine itself.
//!
//! The page calls [`transition`] for every pair of state and event, so that it cannot say something else than the
//! code does; `gen --check` fails when somebody changes the one without the other.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use cloister_types::session::{Action, Reason, SessionEvent, SessionState, transition};

const PAGE: &str = "docs/reference/session-states.md";

/// Writes the page, or with `check` compares and fails when it differs.
pub(crate) fn run(check: bool) -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("xtask has a parent directory")?;
    let path = root.join(PAGE);
    let fresh = page()?;
    if check {
        let committed = fs::read_to_string(&path).with_context(|| format!("read `{PAGE}`"))?;
        ensure!(
            committed == fresh,
            "`{PAGE}` is not what `cargo xtask gen` writes: run it and commit the result"
        );
        return Ok(());
    }
    fs::create_dir_all(path.parent().context("the page has a parent directory")?)?;
    fs::write(&path, fresh).with_context(|| format!("write `{PAGE}`"))
}

fn page() -> Result<String> {
    let mut text = String::from(
        "# Session states\n\n\
         <!-- Written by `cargo xtask gen` from crates/types/src/session.rs. Change that file, not this one. -->\n\n\
         A session is in one of the states below. What moves it is an *event*; the events that a state can take are\n\
         the rows of its section, and every other event is refused and changes nothing. A deletion is accepted in\n\
         every state.\n\n\
         ## States\n\n\
         | state | lasts at most | counts against its host |\n|---|---|---|\n",
    );
    for &state in SessionState::ALL {
        let deadline =
            state.deadline().map_or_else(|| "as long as it likes".to_owned(), |limit| format!("{limit:?}"));
        let capacity = if state.holds_host_capacity() { "yes" } else { "no" };
        writeln!(text, "| `{state}` | {deadline} | {capacity} |")?;
    }
    text.push_str(
        "\nA state that lasts at most some time is waiting for somebody. When the time is over, `deadline_passed`\n\
         happens to it, so that no session hangs.\n\n## What moves a session\n",
    );
    for &state in SessionState::ALL {
        writeln!(text, "\n### `{state}`\n")?;
        if SessionState::TERMINAL.contains(&state) {
            text.push_str("Nothing leaves this state.\n\n");
        }
        text.push_str("| event | leads to | with it, in the same transaction |\n|---|---|---|\n");
        for &event in SessionEvent::ALL {
            if let Ok(next) = transition(state, event) {
                let actions: Vec<&str> = next.actions.iter().copied().map(action_words).collect();
                let actions = if actions.is_empty() { "–".to_owned() } else { actions.join("; ") };
                writeln!(text, "| `{event}` | `{}` | {actions} |", next.state)?;
            }
        }
    }
    text.push_str("\n## The whole table\n\nEmpty: the event is refused in that state.\n\n| |");
    for &event in SessionEvent::ALL {
        write!(text, " {event} |")?;
    }
    text.push_str("\n|---|");
    text.push_str(&"---|".repeat(SessionEvent::ALL.len()));
    text.push('\n');
    for &state in SessionState::ALL {
        write!(text, "| **{state}** |")?;
        for &event in SessionEvent::ALL {
            match transition(state, event) {
                Ok(next) => write!(text, " {} |", next.state)?,
                Err(_) => text.push_str(" |"),
            }
        }
        text.push('\n');
    }
    text.push_str("\n## Reasons\n\nThe words that `reason` of a session can hold: ");
    let reasons: Vec<String> = Reason::ALL.iter().map(|reason| format!("`{reason}`")).collect();
    text.push_str(&reasons.join(", "));
    text.push_str(".\n");
    Ok(text)
}

fn action_words(action: Action) -> &'static str {
    match action {
        Action::StartOp => "an operation that makes the sandbox is written",
        Action::PauseOp => "an operation that stops the sandbox is written",
        Action::DeleteOp => "an operation that removes everything is written, in place of a running one",
        Action::ReleaseCapacity => "the host's capacity is given back",
        Action::FinishOp => "the running operation is over",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_a_section_for_every_state_and_a_delete_row_in_each() {
        let text = page().expect("writing to a string does not fail");
        for state in SessionState::ALL {
            let section = text.split(&format!("\n### `{state}`\n")).nth(1).expect("each state has a section");
            let section = section.split("\n### ").next().expect("split yields one part at least");
            assert!(section.contains("| `delete` |"), "`{state}` does not list `delete`");
        }
    }
}
