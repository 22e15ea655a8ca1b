//! Everything that is printed: text, tables, JSON, colours and progress.
//!
//! Results go to standard output, everything else to standard error. Colours and progress appear only on a
//! terminal, colours never with `NO_COLOR`. Writing to a closed pipe is [`CliError::BrokenPipe`], which ends the
//! process quietly.

use std::io::{self, IsTerminal, Write};
use std::sync::mpsc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use buffa_types::google::protobuf::Timestamp;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::error::CliError;

/// A colour with a meaning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tone {
    /// Works.
    Good,
    /// Needs attention.
    Warning,
    /// Is broken.
    Bad,
    /// Less important.
    Quiet,
    /// Stands out.
    Strong,
}

/// How this invocation prints.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Terminal {
    /// Print JSON instead of text.
    pub(crate) json: bool,
    color_stdout: bool,
    color_stderr: bool,
    progress: bool,
}

impl Terminal {
    /// Looks at where standard output and error go.
    pub(crate) fn new(json: bool) -> Self {
        let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let dumb = std::env::var_os("TERM").is_some_and(|value| value == "dumb");
        let plain = no_color || dumb;
        Self {
            json,
            color_stdout: !plain && io::stdout().is_terminal(),
            color_stderr: !plain && io::stderr().is_terminal(),
            progress: !json && !dumb && io::stderr().is_terminal(),
        }
    }

    /// Prints a line of a result.
    pub(crate) fn line(&self, text: impl AsRef<str>) -> Result<(), CliError> {
        let mut out = io::stdout().lock();
        writeln!(out, "{}", text.as_ref())
            .and_then(|()| out.flush())
            .map_err(CliError::io("write standard output"))
    }

    /// Prints a message as the proto JSON of the API, indented.
    pub(crate) fn json<T: Serialize>(&self, message: &T) -> Result<(), CliError> {
        let text = serde_json::to_string_pretty(message).expect("API messages have string keys only");
        self.line(text)
    }

    /// Prints a message as proto JSON on one line: one line per message of a stream.
    pub(crate) fn json_line<T: Serialize>(&self, message: &T) -> Result<(), CliError> {
        let text = serde_json::to_string(message).expect("API messages have string keys only");
        self.line(text)
    }

    /// Prints `message` as JSON with `--json`, and `text` otherwise.
    pub(crate) fn either<T: Serialize>(
        &self,
        message: &T,
        text: impl FnOnce() -> String,
    ) -> Result<(), CliError> {
        if self.json { self.json(message) } else { self.line(text()) }
    }

    /// Says something that is not a result. A closed standard error is not worth failing for.
    pub(crate) fn note(&self, text: impl AsRef<str>) {
        let _ = writeln!(io::stderr().lock(), "{}", text.as_ref());
    }

    /// Says something that a person should know, without failing.
    pub(crate) fn warn(&self, text: impl AsRef<str>) {
        let word = paint("warning:", Tone::Warning, self.color_stderr);
        self.note(format!("{word} {}", text.as_ref()));
    }

    /// Says what went wrong and what to do.
    pub(crate) fn error(&self, error: &CliError) {
        if self.json {
            self.note(error.to_json().to_string());
            return;
        }
        let word = paint("error:", Tone::Bad, self.color_stderr);
        let code = error.code().map(|code| format!(" ({code})")).unwrap_or_default();
        self.note(format!("{word} {error}{code}"));
        if let Some(hint) = error.hint() {
            self.hint(hint);
        }
    }

    /// Says what a person can do.
    pub(crate) fn hint(&self, text: impl AsRef<str>) {
        let word = paint("hint:", Tone::Quiet, self.color_stderr);
        self.note(format!("{word} {}", text.as_ref()));
    }

    /// Says why work ended the way it did, in the form of an error.
    pub(crate) fn work_error(&self, text: impl AsRef<str>) {
        let word = paint("error:", Tone::Bad, self.color_stderr);
        self.note(format!("{word} {}", text.as_ref()));
    }

    /// Returns `text` in a colour when standard output is a terminal.
    pub(crate) fn paint(&self, text: &str, tone: Tone) -> String {
        paint(text, tone, self.color_stdout)
    }

    /// Says `text` once if what is begun now takes long, until the answer is dropped. With `--json` nothing.
    pub(crate) fn patience(&self, text: String) -> Option<Patience> {
        (!self.json).then(|| Patience::start(*self, text))
    }

    /// Starts a spinner on standard error. Where that is no terminal a line says what is waited for once that takes long.
    pub(crate) fn progress(&self, text: impl Into<String>) -> Progress {
        let text = text.into();
        let patience = if self.progress { None } else { self.patience(text.clone()) };
        let bar = if self.progress { ProgressBar::new_spinner() } else { ProgressBar::hidden() };
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} {elapsed}") {
            bar.set_style(style);
        }
        bar.set_message(text);
        bar.enable_steady_tick(Duration::from_millis(120));
        Progress { bar, patience }
    }
}

/// How long something is waited for in silence where no spinner can be shown.
const PATIENCE: Duration = Duration::from_secs(5);

/// Says what is being waited for when it takes longer than [`PATIENCE`]; each text once.
#[derive(Debug)]
pub(crate) struct Patience {
    texts: mpsc::Sender<String>,
}

impl Patience {
    fn start(terminal: Terminal, text: String) -> Self {
        let (texts, changes) = mpsc::channel();
        // A thread, so that it speaks also while the only one of the runtime is blocked.
        std::thread::spawn(move || {
            Self::listen(PATIENCE, text, &changes, |text| terminal.note(format!("cloister: {text} …")));
        });
        Self { texts }
    }

    /// Tells each text that stays for `patience`, until there is no sender any more.
    fn listen(
        patience: Duration,
        mut text: String,
        changes: &mpsc::Receiver<String>,
        mut tell: impl FnMut(&str),
    ) {
        let mut told = String::new();
        loop {
            match changes.recv_timeout(patience) {
                Ok(newer) => text = newer,
                Err(mpsc::RecvTimeoutError::Timeout) if told != text => {
                    tell(&text);
                    told.clone_from(&text);
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => return,
            }
        }
    }
}

/// A spinner that disappears when it is dropped.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
    patience: Option<Patience>,
}

impl Progress {
    /// Says what is being waited for now.
    pub(crate) fn say(&self, text: impl Into<String>) {
        let text = text.into();
        if let Some(patience) = &self.patience {
            let _ = patience.texts.send(text.clone());
        }
        self.bar.set_message(text);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

fn paint(text: &str, tone: Tone, color: bool) -> String {
    if !color {
        return text.to_owned();
    }
    let code = match tone {
        Tone::Good => "32",
        Tone::Warning => "33",
        Tone::Bad => "31",
        Tone::Quiet => "2",
        Tone::Strong => "1",
    };
    format!("\x1b[{code}m{text}\x1b[0m")
}

/// Rows of text in aligned columns.
#[derive(Debug)]
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Starts a table with these headings.
    pub(crate) fn new<const N: usize>(headings: [&str; N]) -> Self {
        Self { rows: vec![headings.iter().map(|heading| (*heading).to_owned()).collect()] }
    }

    /// Adds a row. Control characters are shown as spaces, so that data of others cannot steer a terminal.
    pub(crate) fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.rows.push(cells.iter().map(|cell| one_line(cell)).collect());
    }

    /// Returns the lines, columns two spaces apart, nothing padded at the end.
    pub(crate) fn render(&self) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or_default();
        let width = |column: usize| {
            self.rows
                .iter()
                .filter_map(|row| row.get(column))
                .map(|cell| cell.chars().count())
                .max()
                .unwrap_or_default()
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let mut text = String::new();
        for (index, row) in self.rows.iter().enumerate() {
            let mut line = String::new();
            for (cell, width) in row.iter().zip(&widths) {
                line.push_str(&format!("{cell:<width$}  "));
            }
            if index > 0 {
                text.push('\n');
            }
            text.push_str(line.trim_end());
        }
        text
    }
}

/// Returns text without control characters.
pub(crate) fn one_line(text: &str) -> String {
    text.chars().map(|character| if character.is_control() { ' ' } else { character }).collect()
}

/// Returns how long ago a time of the API was, in one unit; `-` when it is unset.
pub(crate) fn age(time: Option<&Timestamp>, now: SystemTime) -> String {
    let Some(time) = time else { return "-".to_owned() };
    let now = i64::try_from(now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()).unwrap_or(i64::MAX);
    let seconds = now.saturating_sub(time.seconds).max(0);
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m", seconds / 60),
        3600..86_400 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// Returns a time of the API as RFC 3339 in UTC; `-` when it is unset.
pub(crate) fn date(time: Option<&Timestamp>) -> String {
    time.and_then(|time| chrono::DateTime::from_timestamp(time.seconds, u32::try_from(time.nanos).ok()?))
        .map_or_else(|| "-".to_owned(), |time| time.to_rfc3339_opts(chrono::SecondsFormat::Millis, true))
}

/// Returns whether a time of the API has come; one that is unset never comes.
pub(crate) fn is_past(time: Option<&Timestamp>, now: SystemTime) -> bool {
    let Some(time) = time else { return false };
    let now =
        i64::try_from(now.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis()).unwrap_or(i64::MAX);
    time.seconds.saturating_mul(1000).saturating_add(i64::from(time.nanos) / 1_000_000) <= now
}

/// Returns the word of an enum value as people see it: `SESSION_STATE_HOST_LOST` is `host_lost`.
pub(crate) fn word<E: buffa::Enumeration>(value: &buffa::EnumValue<E>, prefix: &str) -> String {
    match value.as_known() {
        Some(known) => match known.proto_name().strip_prefix(prefix).unwrap_or_default() {
            "UNSPECIFIED" => "-".to_owned(),
            name => name.to_ascii_lowercase(),
        },
        None => format!("unknown({})", value.to_i32()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_waited_for_is_said_once_it_takes_long_and_only_once() {
        let (texts, changes) = mpsc::channel();
        let (told, heard) = mpsc::channel();
        let listener = std::thread::spawn(move || {
            Patience::listen(Duration::from_millis(20), "queued".into(), &changes, |text| {
                told.send(text.to_owned()).unwrap();
            });
        });
        assert_eq!(heard.recv().unwrap(), "queued");
        texts.send("queued".into()).unwrap();
        texts.send("starting".into()).unwrap();
        assert_eq!(heard.recv().unwrap(), "starting");
        drop(texts);
        listener.join().unwrap();
        assert!(heard.recv().is_err(), "nothing is said twice");
    }

    #[test]
    fn columns_are_aligned_and_control_characters_do_not_reach_the_terminal() {
        let mut table = Table::new(["ID", "NAME"]);
        table.row(["ses_1".into(), "a\x1b[2Jb".into()]);
        table.row(["s".into(), String::new()]);
        assert_eq!(table.render(), "ID     NAME\nses_1  a [2Jb\ns");
    }

    #[test]
    fn ages_have_one_unit_and_words_are_lower_case() {
        let now = UNIX_EPOCH + Duration::from_secs(1_000_000);
        let at = |seconds| Timestamp { seconds, ..Default::default() };
        assert_eq!(age(Some(&at(999_941)), now), "59s");
        assert_eq!(age(Some(&at(999_000)), now), "16m");
        assert_eq!(age(Some(&at(1_000_100)), now), "0s");
        assert_eq!(age(None, now), "-");
        assert_eq!(date(Some(&at(0))), "1970-01-01T00:00:00.000Z");
        let state = buffa::EnumValue::from(8);
        assert_eq!(word::<cloister_api::app::SessionState>(&state, "SESSION_STATE_"), "host_lost");
    }

    #[test]
    fn nothing_is_coloured_away_from_a_terminal() {
        assert_eq!(paint("x", Tone::Bad, false), "x");
        assert_eq!(paint("x", Tone::Bad, true), "\x1b[31mx\x1b[0m");
    }
}
