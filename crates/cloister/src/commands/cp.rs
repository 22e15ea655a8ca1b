//! `cloister cp`: files between this machine and a session.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Args;
use cloister_api::guest::{FileInfo, FileKind};
use cloister_guest::files::Report;
use rustix::fs::{CWD, Mode, OFlags, openat};
use serde::Serialize;

use crate::cli::Invocation;
use crate::error::CliError;
use crate::terminal::{Terminal, one_line};
use crate::transfer::{SessionFiles, describe};

/// Where a path of a session begins that does not begin with `/`.
const WORK_DIRECTORY: &str = "/workspace";

/// Copy files between this machine and a session
///
/// One of the two is `SESSION:PATH`; a PATH without a leading `/` is below `/workspace`. Directories are copied with all
/// that is in them. Where the destination is a directory, the copy comes to stand in it under its own name; a source that
/// ends in `/.` is copied as the destination itself. Modes, times, links and holes are kept. A copy that was cut or killed
/// goes on where it was when it is made again.
#[derive(Debug, Args)]
#[command(
    override_usage = "cloister cp [OPTIONS] PATH SESSION:PATH\n       cloister cp [OPTIONS] SESSION:PATH PATH"
)]
pub(crate) struct CpArgs {
    /// User of the sandbox who reads or writes: a name or a number
    #[arg(short, long, value_name = "USER")]
    user: Option<String>,
    /// Refuse to replace files that are there
    #[arg(short = 'n', long)]
    no_clobber: bool,
    /// What to copy
    #[arg(value_name = "FROM")]
    from: String,
    /// Where to
    #[arg(value_name = "TO")]
    to: String,
}

/// One side of a copy.
#[derive(Debug, PartialEq, Eq)]
enum Place {
    Local(PathBuf),
    Session { session: String, path: String },
}

impl Place {
    /// A colon makes it a session's, unless a `/` comes before it.
    fn parse(text: &str) -> Self {
        match text.split_once(':') {
            Some((session, path)) if !session.is_empty() && !session.contains('/') => {
                let path =
                    if path.starts_with('/') { path.to_owned() } else { format!("{WORK_DIRECTORY}/{path}") };
                Self::Session { session: session.to_owned(), path }
            }
            _ => Self::Local(PathBuf::from(text)),
        }
    }
}

/// What was copied, as `--json` has it.
#[derive(Debug, Serialize)]
struct Copied {
    entries: u64,
    bytes: u64,
    resumed_bytes: u64,
    problem_count: u64,
    problems: Vec<PathProblem>,
}

#[derive(Debug, Serialize)]
struct PathProblem {
    path: String,
    message: String,
}

impl CpArgs {
    /// Copies, and returns 1 when something could not be.
    ///
    /// # Errors
    ///
    /// Why nothing was copied, or the copy is not complete.
    pub(crate) async fn run(self, invocation: &Invocation) -> Result<u8, CliError> {
        let terminal = invocation.terminal;
        let begun = Instant::now();
        let report = match (Place::parse(&self.from), Place::parse(&self.to)) {
            (Place::Local(from), Place::Session { session, path }) => {
                let top = open(&from, OFlags::NONBLOCK | OFlags::NOCTTY)?;
                let client = invocation.client().await?;
                let files = SessionFiles::new(&client, terminal, &session, self.user.as_deref());
                let name = source_name(&from);
                let is_directory = is_directory(&top)?;
                let there = files.stat(path.as_bytes()).await?;
                let there = there.map(|info| is(&info, FileKind::FILE_KIND_DIRECTORY));
                let (directory, name) = destination(&path, there, name, is_directory)?;
                files.upload(top, directory.as_bytes(), name.as_bytes(), self.no_clobber).await?
            }
            (Place::Session { session, path }, Place::Local(to)) => {
                let client = invocation.client().await?;
                let files = SessionFiles::new(&client, terminal, &session, self.user.as_deref());
                let Some(info) = files.stat(path.as_bytes()).await? else {
                    return Err(CliError::refused(
                        format!("`{}` is not in session `{session}`", one_line(&path)),
                        format!("`cloister exec {session} -- ls {WORK_DIRECTORY}` shows what is there"),
                    ));
                };
                let name = source_name(Path::new(&path));
                let there = std::fs::metadata(&to).ok().map(|there| there.is_dir());
                let text = to.as_os_str().to_string_lossy().into_owned();
                let is_directory = is(&info, FileKind::FILE_KIND_DIRECTORY);
                let (directory, name) = destination(&text, there, name, is_directory)?;
                let into = open(Path::new(&directory), OFlags::DIRECTORY)?;
                files.download(path.as_bytes(), into, name.as_bytes(), self.no_clobber).await?
            }
            (Place::Local(_), Place::Local(_)) => {
                return Err(CliError::refused(
                    "neither side is in a session",
                    "write one of the two as `SESSION:PATH`",
                ));
            }
            (Place::Session { .. }, Place::Session { .. }) => {
                return Err(CliError::refused(
                    "both sides are in a session",
                    "copy to this machine first, then into the other session",
                ));
            }
        };
        finish(terminal, &report, begun)
    }
}

fn finish(terminal: Terminal, report: &Report, begun: Instant) -> Result<u8, CliError> {
    let text = |bytes: &[u8]| one_line(&String::from_utf8_lossy(bytes));
    if terminal.json {
        terminal.json(&Copied {
            entries: report.entries,
            bytes: report.bytes,
            resumed_bytes: report.resumed_bytes,
            problem_count: report.problem_count,
            problems: report
                .problems
                .iter()
                .map(|problem| PathProblem { path: text(&problem.path), message: one_line(&problem.message) })
                .collect(),
        })?;
    } else {
        for problem in &report.problems {
            let path = if problem.path.is_empty() { ".".to_owned() } else { text(&problem.path) };
            terminal.warn(format!("{path}: {}", one_line(&problem.message)));
        }
        let more = report.problem_count.saturating_sub(u64::try_from(report.problems.len()).unwrap_or(0));
        if more > 0 {
            terminal.warn(format!("and {more} more that could not be copied"));
        }
        let resumed = match report.resumed_bytes {
            0 => String::new(),
            bytes => {
                format!(" ({} were there already)", describe(0, bytes).trim_start_matches("0 entries, "))
            }
        };
        let seconds = begun.elapsed().as_secs_f64();
        let copied = describe(report.entries, report.bytes);
        terminal.note(format!("cloister: copied {copied}{resumed} in {seconds:.1} s"));
    }
    Ok(u8::from(report.problem_count > 0))
}

/// Returns the name that a copy of `path` has in a directory; none when it is what is in the directory that is meant.
fn source_name(path: &Path) -> Option<String> {
    if path.as_os_str().as_bytes().ends_with(b"/.") || path.as_os_str() == OsStr::new(".") {
        return None;
    }
    // `..` and `/` have no name of their own.
    path.file_name().map(|name| name.to_string_lossy().into_owned())
}

/// Returns the directory that a copy goes into and the name that it gets there: no name when it is that directory itself.
/// `there` says whether something is at the destination, and whether that is a directory.
fn destination(
    path: &str,
    there: Option<bool>,
    name: Option<String>,
    is_directory: bool,
) -> Result<(String, String), CliError> {
    let refused =
        |what: &str, hint: &str| Err(CliError::refused(format!("`{}` {what}", one_line(path)), hint));
    match there {
        Some(true) => match name {
            Some(name) => Ok((path.to_owned(), name)),
            None if is_directory => Ok((path.to_owned(), String::new())),
            None => {
                refused("is a directory, and the source has no name to stand there under", "name the file")
            }
        },
        Some(false) if is_directory => {
            refused("is a file, and the source is a directory", "choose another destination")
        }
        None if path.ends_with('/') && !is_directory => {
            refused("does not exist", "make the directory first, or leave out the `/` at the end")
        }
        Some(false) | None => {
            let trimmed = path.trim_end_matches('/');
            let (directory, name) = trimmed.rsplit_once('/').unwrap_or((".", trimmed));
            if matches!(name, "" | "." | "..") {
                return refused("does not exist", "make the directory first");
            }
            let directory = if directory.is_empty() { "/" } else { directory };
            Ok((directory.to_owned(), name.to_owned()))
        }
    }
}

fn open(path: &Path, flags: OFlags) -> Result<OwnedFd, CliError> {
    openat(CWD, path, flags | OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|errno| CliError::io(format!("open `{}`", path.display()))(errno.into()))
}

fn is_directory(fd: &OwnedFd) -> Result<bool, CliError> {
    let stat = rustix::fs::fstat(fd).map_err(|errno| CliError::io("look at the source")(errno.into()))?;
    Ok(rustix::fs::FileType::from_raw_mode(stat.st_mode) == rustix::fs::FileType::Directory)
}

fn is(info: &FileInfo, kind: FileKind) -> bool {
    info.kind.as_known() == Some(kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_colon_names_a_session_unless_a_slash_comes_first() {
        let session = |path: &str| Place::Session { session: "ses_1".to_owned(), path: path.to_owned() };
        assert_eq!(Place::parse("ses_1:/etc/hosts"), session("/etc/hosts"));
        assert_eq!(Place::parse("ses_1:out.txt"), session("/workspace/out.txt"));
        assert_eq!(Place::parse("ses_1:"), session("/workspace/"));
        for local in ["./a:b", "/a:b", "a", ":x"] {
            assert_eq!(Place::parse(local), Place::Local(local.into()));
        }
    }

    #[test]
    fn a_copy_stands_in_a_directory_under_its_name_and_elsewhere_under_the_new_one() {
        let to = |path: &str, there, name: Option<&str>, is_directory| {
            destination(path, there, name.map(str::to_owned), is_directory).ok()
        };
        let is = |directory: &str, name: &str| Some((directory.to_owned(), name.to_owned()));
        assert_eq!(to("/tmp", Some(true), Some("a"), false), is("/tmp", "a"));
        assert_eq!(to("/tmp", Some(true), None, true), is("/tmp", ""));
        assert_eq!(to("/tmp/b", None, Some("a"), true), is("/tmp", "b"));
        assert_eq!(to("/b", Some(false), Some("a"), false), is("/", "b"));
        assert_eq!(to("b", None, None, true), is(".", "b"));
        assert_eq!(to("/tmp/b", Some(false), Some("a"), true), None, "a directory over a file");
        assert_eq!(to("/tmp/b/", None, Some("a"), false), None, "a file in a directory that is not there");
        assert_eq!(to("/tmp", Some(true), None, false), None, "a file without a name");
    }
}
