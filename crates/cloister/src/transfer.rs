//! Copies between this machine and a session: one role of [`cloister_guest::files`] runs here on a thread, the other in the
//! sandbox, and their stream goes through the coordinator.
//!
//! A copy that is cut goes on where it was cut, a few times; what one path refuses is told at the end.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdStream;
use std::time::Duration;

use cloister_api::app::TransferStart;
use cloister_api::guest::{self, FileInfo};
use cloister_guest::files::{FileLink, FilesError, Receiver, ReceiverOptions, Report, Sender};
use cloister_guest::frames::{Body, FrameError};
use connectrpc::{ConnectError, ErrorCode};
use tokio::net::UnixStream;
use tokio::sync::watch;

use crate::channel::carry_files;
use crate::client::{self, Client};
use crate::error::CliError;
use crate::terminal::Terminal;

/// Pauses before a cut copy is taken up again; they start over whenever it got further.
const RESUME_PAUSES_MS: [u64; 6] = [100, 500, 1000, 2000, 4000, 8000];

/// The files of one session.
pub(crate) struct SessionFiles<'a> {
    client: &'a Client,
    terminal: Terminal,
    session: String,
    user: String,
}

/// Why a conversation over a channel ended early.
enum Ended {
    /// The channel, as the coordinator says.
    Channel(ConnectError),
    /// The other role.
    Files(FilesError),
}

impl<'a> SessionFiles<'a> {
    /// Returns the files of `session` as `user` sees them.
    pub(crate) fn new(client: &'a Client, terminal: Terminal, session: &str, user: Option<&str>) -> Self {
        Self { client, terminal, session: session.to_owned(), user: user.unwrap_or_default().to_owned() }
    }

    /// Returns what is at `path`, links followed; `None` when nothing is.
    ///
    /// # Errors
    ///
    /// Why it cannot be known.
    pub(crate) async fn stat(&self, path: &[u8]) -> Result<Option<FileInfo>, CliError> {
        let request = guest::StatFile { path: path.to_vec(), ..guest::StatFile::default() };
        let asked = self.converse(move |link| {
            link.queue(request)?;
            match link.expect()? {
                Body::FileInfo(info) => Ok(*info),
                _ => Err(FrameError::Unexpected("what is at the path").into()),
            }
        });
        match asked.await {
            Ok(info) => Ok(Some(info)),
            Err(Ended::Files(FilesError::Refused {
                kind: guest::ErrorKind::ERROR_KIND_NOT_FOUND, ..
            })) => Ok(None),
            Err(ended) => Err(self.error(ended)),
        }
    }

    /// Sends the tree `top` into the directory `path` of the session, under `name`.
    ///
    /// # Errors
    ///
    /// It was cut and could not be taken up again, or was refused as a whole.
    pub(crate) async fn upload(
        &self,
        top: OwnedFd,
        path: &[u8],
        name: &[u8],
        keep_existing: bool,
    ) -> Result<Report, CliError> {
        self.resuming(|after, progress| {
            let top = top.try_clone();
            let (path, name) = (path.to_vec(), name.to_vec());
            self.converse(move |link| {
                let request = guest::ReceiveFiles { path, keep_existing, ..guest::ReceiveFiles::default() };
                link.queue(request)?;
                expect_begun(link)?;
                let top = top.map_err(FrameError::Read)?;
                let mut tell = |report: &Report| drop(progress.send_replace(report.clone()));
                Sender::new(link, after, &mut tell).run(top, &name)
            })
        })
        .await
    }

    /// Receives the tree at `path` of the session into the directory `into`, under `name`.
    ///
    /// # Errors
    ///
    /// As [`upload`](Self::upload).
    pub(crate) async fn download(
        &self,
        path: &[u8],
        into: OwnedFd,
        name: &[u8],
        keep_existing: bool,
    ) -> Result<Report, CliError> {
        self.resuming(|after, progress| {
            let into = into.try_clone();
            let (path, name) = (path.to_vec(), name.to_vec());
            self.converse(move |link| {
                let has_after = after.is_some();
                let after = after.unwrap_or_default();
                link.queue(guest::SendFiles { path, after, has_after, ..guest::SendFiles::default() })?;
                expect_begun(link)?;
                let into = into.map_err(FrameError::Write)?;
                let mut tell = |report: &Report| drop(progress.send_replace(report.clone()));
                // A program of the sandbox gives nobody here another's rights.
                let options = ReceiverOptions { top: name, keep_existing, mode_mask: 0o777 };
                Receiver::new(link, into, options, &mut tell).run()
            })
        })
        .await
    }

    /// Runs a copy, again from where it was cut, and shows how far it is.
    async fn resuming<F>(
        &self,
        attempt: impl Fn(Option<Vec<u8>>, watch::Sender<Report>) -> F,
    ) -> Result<Report, CliError>
    where
        F: Future<Output = Result<Report, Ended>>,
    {
        let shown = self.terminal.progress("copying");
        let mut before = Report::default();
        let mut pauses = RESUME_PAUSES_MS.iter();
        loop {
            let (progress, mut seen) = watch::channel(Report::default());
            let copying = attempt(before.written.clone(), progress);
            tokio::pin!(copying);
            let outcome = loop {
                tokio::select! {
                    outcome = &mut copying => break outcome,
                    Ok(()) = seen.changed() => {
                        let now = seen.borrow_and_update().clone();
                        shown.say(describe(before.entries + now.entries, before.bytes + now.bytes));
                        // Every piece changes it: a look ten times a second is enough.
                        tokio::select! {
                            outcome = &mut copying => break outcome,
                            () = tokio::time::sleep(Duration::from_millis(100)) => {}
                        }
                    }
                }
            };
            let reached = seen.borrow().clone();
            match outcome {
                Ok(report) => return Ok(sum(before, report)),
                Err(ended) if ended.is_cut() => {
                    if reached.bytes > 0 || reached.entries > 0 {
                        pauses = RESUME_PAUSES_MS.iter();
                    }
                    let Some(pause) = pauses.next() else { return Err(self.error(ended)) };
                    shown.say("cut; going on where it was cut");
                    before = sum(before, reached);
                    tokio::time::sleep(Duration::from_millis(*pause)).await;
                }
                Err(ended) => return Err(self.error(ended)),
            }
        }
    }

    /// Opens a channel and lets `role` speak on it, on a thread of its own.
    async fn converse<T: Send + 'static>(
        &self,
        role: impl FnOnce(&mut FileLink) -> Result<T, FilesError> + Send + 'static,
    ) -> Result<T, Ended> {
        let pair = UnixStream::pair().and_then(|(ours, theirs)| Ok((ours, theirs.into_std()?)));
        let (ours, theirs): (UnixStream, StdStream) =
            pair.map_err(|error| Ended::Files(FrameError::Read(error).into()))?;
        let start = TransferStart {
            request_id: client::request_id(),
            session: self.session.clone(),
            user: self.user.clone(),
            ..Default::default()
        };
        let speaking = tokio::task::spawn_blocking(move || {
            let mut link = FileLink::new(theirs).map_err(FrameError::Read)?;
            role(&mut link)
        });
        let (carried, spoken) = tokio::join!(carry_files(self.client, start, ours), speaking);
        let spoken = match spoken {
            Ok(spoken) => spoken,
            Err(panicked) => std::panic::resume_unwind(panicked.into_panic()),
        };
        match (spoken, carried) {
            (Ok(value), _) => Ok(value),
            // A role whose stream was closed knows less than the channel, which knows why.
            (Err(error), Err(channel)) if error.is_cut() => Err(Ended::Channel(channel)),
            (Err(error), _) => Err(Ended::Files(error)),
        }
    }

    fn error(&self, ended: Ended) -> CliError {
        match ended {
            Ended::Channel(error) => self.client.error(&error),
            Ended::Files(FilesError::Refused { message, .. }) => CliError::refused(message, ""),
            Ended::Files(error) => {
                CliError::refused(crate::error::chain(&error), "copy it again: it goes on where it was cut")
            }
        }
    }
}

impl Ended {
    fn is_cut(&self) -> bool {
        match self {
            Self::Channel(error) => {
                matches!(error.code, ErrorCode::Unavailable | ErrorCode::Aborted)
                    || cloister_api::connection::is_unanswered(error)
            }
            Self::Files(error) => error.is_cut(),
        }
    }
}

fn expect_begun(link: &mut FileLink) -> Result<(), FilesError> {
    match link.expect()? {
        Body::FileDone(_) => Ok(()),
        _ => Err(FrameError::Unexpected("that the copy begins").into()),
    }
}

fn sum(before: Report, now: Report) -> Report {
    let mut problems = before.problems;
    problems.extend(now.problems);
    Report {
        entries: before.entries + now.entries,
        bytes: before.bytes + now.bytes,
        resumed_bytes: before.resumed_bytes + now.resumed_bytes,
        problem_count: before.problem_count + now.problem_count,
        problems,
        written: now.written.or(before.written),
    }
}

/// Returns how far a copy is, for people.
pub(crate) fn describe(entries: u64, bytes: u64) -> String {
    let noun = if entries == 1 { "entry" } else { "entries" };
    format!("{entries} {noun}, {}", size(bytes))
}

fn size(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    let mut unit = None;
    let (mut whole, mut tenth) = (bytes, 0);
    for next in UNITS {
        if whole < 1024 {
            break;
        }
        (whole, tenth, unit) = (whole / 1024, whole % 1024 * 10 / 1024, Some(next));
    }
    match unit {
        None => format!("{bytes} bytes"),
        Some(unit) => format!("{whole}.{tenth} {unit}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_said_in_the_unit_that_fits() {
        let said = [0, 1023, 1536, 5 * 1024 * 1024, 4 << 30].map(size);
        assert_eq!(said, ["0 bytes", "1023 bytes", "1.5 KiB", "5.0 MiB", "4.0 GiB"]);
    }
}
