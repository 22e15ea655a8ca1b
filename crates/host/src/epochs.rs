//! The highest epoch seen of each session: what keeps a coordinator that has lost its lease from acting here.
//!
//! An epoch is written *before* the effect that came with it, so that a restarted host agent refuses what its
//! predecessor would have refused; every one but a session's first is on the disk by then. The file `<data>/epochs` is a log of lines `<session id> <epoch>`; the highest
//! one counts. It is written anew at start and when most of its lines are old. A session that was removed stays
//! in it, since a late command of an old owner would otherwise make it again; of those the newest
//! [`REMOVED_KEPT`] are kept (ids sort by time).

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use cloister_types::SessionId;

use crate::data_dir::write_atomically;
use crate::fault::POINTS;

/// Removed sessions whose epoch is kept.
const REMOVED_KEPT: usize = 10_000;
/// Lines that are appended before the log is looked at for being mostly old.
const REWRITE_AFTER_LINES: usize = 20_000;

/// The epoch of a session that nobody has taken over yet: no valid one is lower.
const FIRST: u64 = 1;

/// Why an effect is refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EpochError {
    /// A newer owner was seen.
    #[error("epoch {given} of session `{session_id}` is older than {seen}, which this host has seen")]
    Fenced {
        /// The session.
        session_id: SessionId,
        /// What came.
        given: u64,
        /// The highest so far.
        seen: u64,
    },
    /// It could not be made durable, so nothing was done.
    #[error("write epoch to `{path}`")]
    Write {
        /// The log.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
}

/// The epochs of one data directory.
#[derive(Clone)]
pub(crate) struct Epochs {
    path: Arc<PathBuf>,
    seen: Arc<Mutex<Seen>>,
    log: Arc<Mutex<Log>>,
}

#[derive(Default)]
struct Seen {
    highest: BTreeMap<SessionId, u64>,
    removed: BTreeSet<SessionId>,
}

struct Log {
    file: File,
    lines: usize,
}

impl Epochs {
    /// Reads the log and writes it anew. Blocks.
    ///
    /// # Errors
    ///
    /// The log cannot be read or written; the host must not start, since it could not refuse an old owner.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let text = match std::fs::read(path) {
            Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(error),
        };
        let mut seen = Seen::default();
        for line in text.split_inclusive('\n') {
            // A line without its end was being written when the machine stopped: its effect has not begun.
            let Some((session_id, epoch)) = line.strip_suffix('\n').and_then(|line| line.split_once(' '))
            else {
                continue;
            };
            if let (Ok(session_id), Ok(epoch)) = (session_id.parse::<SessionId>(), epoch.parse::<u64>()) {
                let highest = seen.highest.entry(session_id).or_default();
                *highest = epoch.max(*highest);
            }
        }
        let log = rewrite(path, &seen.highest)?;
        Ok(Self {
            path: Arc::new(path.to_owned()),
            seen: Arc::new(Mutex::new(seen)),
            log: Arc::new(Mutex::new(log)),
        })
    }

    /// Returns the highest epoch seen of a session, 0 when none was.
    pub(crate) fn highest(&self, session_id: &SessionId) -> u64 {
        self.seen().highest.get(session_id).copied().unwrap_or(0)
    }

    /// Keeps in mind which sessions are here; every other one counts as removed.
    pub(crate) fn set_present(&self, present: &BTreeSet<SessionId>) {
        let mut seen = self.seen();
        seen.removed = seen.highest.keys().filter(|id| !present.contains(*id)).cloned().collect();
    }

    /// Keeps in mind that a session was removed.
    pub(crate) fn removed(&self, session_id: &SessionId) {
        let mut seen = self.seen();
        if seen.highest.contains_key(session_id) {
            seen.removed.insert(session_id.clone());
        }
    }

    /// Lets an effect with this epoch happen, after the epoch is on disk.
    ///
    /// # Errors
    ///
    /// [`EpochError::Fenced`]: the effect must not happen, now or later. [`EpochError::Write`]: not now.
    pub(crate) async fn admit(&self, session_id: &SessionId, epoch: u64) -> Result<(), EpochError> {
        let fenced =
            |seen: u64| Err(EpochError::Fenced { session_id: session_id.clone(), given: epoch, seen });
        match self.highest(session_id) {
            seen if seen > epoch => return fenced(seen),
            // Most effects come with the epoch of the one before: nothing to write.
            seen if seen == epoch => return Ok(()),
            _ => {}
        }
        let line = format!("{session_id} {epoch}\n");
        let outcome = if epoch <= FIRST {
            // What a power failure can lose of it fences nobody off, so that it need not be waited for. A later
            // process of this boot sees it either way.
            self.append(&line, false)
        } else {
            let this = self.clone();
            let write = move || this.append(&line, true);
            tokio::task::spawn_blocking(write).await.unwrap_or_else(|error| Err(io::Error::other(error)))
        };
        outcome.map_err(|source| EpochError::Write { path: self.path.as_ref().clone(), source })?;
        POINTS.reach("host_after_epoch");

        let mut seen = self.seen();
        let highest = seen.highest.entry(session_id.clone()).or_default();
        if *highest > epoch {
            let highest = *highest;
            return fenced(highest);
        }
        *highest = epoch;
        seen.removed.remove(session_id);
        Ok(())
    }

    fn append(&self, line: &str, durable: bool) -> io::Result<()> {
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        if log.lines >= REWRITE_AFTER_LINES {
            let kept = {
                let mut seen = self.seen();
                let excess = seen.removed.len().saturating_sub(REMOVED_KEPT);
                let oldest: Vec<SessionId> = seen.removed.iter().take(excess).cloned().collect();
                for session_id in oldest {
                    seen.removed.remove(&session_id);
                    seen.highest.remove(&session_id);
                }
                seen.highest.clone()
            };
            *log = rewrite(&self.path, &kept)?;
        }
        log.file.write_all(line.as_bytes())?;
        if durable {
            log.file.sync_data()?;
        }
        log.lines += 1;
        Ok(())
    }

    fn seen(&self) -> std::sync::MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn rewrite(path: &Path, highest: &BTreeMap<SessionId, u64>) -> io::Result<Log> {
    let text: String = highest.iter().map(|(session_id, epoch)| format!("{session_id} {epoch}\n")).collect();
    write_atomically(path, text.as_bytes())?;
    Ok(Log { file: File::options().append(true).open(path)?, lines: 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_older_epoch_is_refused_by_the_next_process_too() {
        let directory = tempfile::tempdir().expect("temporary directory");
        let path = directory.path().join("epochs");
        let session_id = SessionId::generate();
        let epochs = Epochs::open(&path).expect("open");
        epochs.admit(&session_id, 3).await.expect("first");
        epochs.admit(&session_id, 3).await.expect("same");
        epochs.admit(&session_id, 5).await.expect("newer");
        epochs.removed(&session_id);
        assert!(matches!(
            epochs.admit(&session_id, 4).await,
            Err(EpochError::Fenced { given: 4, seen: 5, .. })
        ));

        let epochs = Epochs::open(&path).expect("open again");
        assert_eq!(epochs.highest(&session_id), 5);
        assert!(matches!(epochs.admit(&session_id, 4).await, Err(EpochError::Fenced { seen: 5, .. })));
        epochs.admit(&session_id, 5).await.expect("the same owner goes on");
    }

    #[tokio::test]
    async fn a_torn_last_line_is_as_if_never_written() {
        let directory = tempfile::tempdir().expect("temporary directory");
        let path = directory.path().join("epochs");
        let (whole, torn) = (SessionId::generate(), SessionId::generate());
        std::fs::write(&path, format!("{whole} 7\nnonsense\n{torn} 12")).expect("write");
        let epochs = Epochs::open(&path).expect("open");
        assert_eq!((epochs.highest(&whole), epochs.highest(&torn)), (7, 0));
        epochs.admit(&torn, 1).await.expect("admitted");
        let epochs = Epochs::open(&path).expect("open again");
        assert_eq!((epochs.highest(&whole), epochs.highest(&torn)), (7, 1));
    }

    #[tokio::test]
    async fn an_epoch_that_cannot_be_written_lets_nothing_happen() {
        let directory = tempfile::tempdir().expect("temporary directory");
        let path = directory.path().join("epochs");
        let epochs = Epochs::open(&path).expect("open");
        // A log opened for reading refuses every write, whoever asks.
        *epochs.log.lock().expect("no panic") = Log { file: File::open(&path).expect("open"), lines: 0 };
        let session_id = SessionId::generate();
        assert!(matches!(epochs.admit(&session_id, 1).await, Err(EpochError::Write { .. })));
        assert_eq!(epochs.highest(&session_id), 0);
    }
}
