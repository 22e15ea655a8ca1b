//! Which uids and gids of the host stand for those inside a session's sandboxes.
//!
//! Each session has 65,536 of its own, recorded in its `session.json`, which is the only authority on what is taken.
//! They come from `0x7000_0000..0x7fff_0000`, which systemd's allocation table leaves to nobody
//! (<https://systemd.io/UIDS-GIDS/>), minus what `/etc/subuid` and `/etc/subgid` give away. The search starts at a
//! place derived from the session's id, so that several hosts on one machine seldom pick the same range; if
//! they do, their sandboxes still see neither each other's processes nor each other's files.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use cloister_types::SessionId;
use serde::{Deserialize, Serialize};

use crate::backend::HostPaths;
use crate::intent::{RecordError, SESSION_FILE, SessionRecord, read_record};
use crate::layout;

/// Ids of one range: what a system inside expects to have.
pub const IDS_PER_SESSION: u32 = 65_536;
const FIRST: u32 = 0x7000_0000;
/// Ranges between `FIRST` and `0x7fff_0000`.
const SLOTS: u32 = 4095;

/// Consecutive uids and the gids of the same numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdRange {
    /// The host's number of the sandbox's 0.
    pub base: u32,
    /// How many.
    pub count: u32,
}

impl IdRange {
    fn overlaps(self, start: u64, count: u64) -> bool {
        u64::from(self.base) < start.saturating_add(count)
            && start < u64::from(self.base) + u64::from(self.count)
    }
}

/// Why no range was given.
#[derive(Debug, thiserror::Error)]
pub enum IdRangeError {
    /// Every range belongs to a session or to somebody in `/etc/subuid`.
    #[error("all {SLOTS} ranges of user ids are taken")]
    Exhausted,
    /// The lock could not be taken.
    #[error("lock `{}`", path.display())]
    Lock {
        /// The file.
        path: PathBuf,
        /// Its error.
        #[source]
        source: io::Error,
    },
    /// The sessions could not be listed.
    #[error("list sessions")]
    List(#[source] io::Error),
    /// A session's record could not be read.
    #[error(transparent)]
    Record(#[from] RecordError),
}

/// Gives ranges away. One lock file in the data directory makes several allocators agree.
#[derive(Debug)]
pub struct IdRangeAllocator {
    paths: HostPaths,
    reserved: Vec<(u64, u64)>,
    /// Ranges of sessions whose record was read before: a range never changes while the record is there.
    known: Mutex<BTreeMap<SessionId, IdRange>>,
}

impl IdRangeAllocator {
    /// Returns an allocator that leaves out what the machine's subordinate id files name.
    pub fn new(paths: HostPaths) -> Self {
        let mut reserved = Vec::new();
        for file in ["/etc/subuid", "/etc/subgid"] {
            // Where the file is missing, nobody has subordinate ids.
            reserved.extend(subordinate_ranges(&fs::read_to_string(file).unwrap_or_default()));
        }
        Self { paths, reserved, known: Mutex::new(BTreeMap::new()) }
    }

    /// Returns the session's range; for a new session, a free one, after `record` has written it down under the
    /// lock.
    ///
    /// # Errors
    ///
    /// [`IdRangeError::Exhausted`], or what could not be read or written.
    pub fn ensure(
        &self,
        session_id: &SessionId,
        record: impl FnOnce(IdRange) -> Result<(), RecordError>,
    ) -> Result<IdRange, IdRangeError> {
        let path = self.paths.data_dir.join("id-ranges.lock");
        let lock = |source| IdRangeError::Lock { path: path.clone(), source };
        let file =
            fs::OpenOptions::new().write(true).create(true).truncate(false).open(&path).map_err(lock)?;
        rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive)
            .map_err(|errno| lock(errno.into()))?;
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        self.refresh(&mut known)?;
        if let Some(range) = known.get(session_id) {
            if self.paths.session_dir(session_id).join(SESSION_FILE).exists() {
                return Ok(*range);
            }
            // The directory was removed and made again since: only what is written down counts.
            known.remove(session_id);
        }
        let range = free_range(session_id, &known, &self.reserved).ok_or(IdRangeError::Exhausted)?;
        record(range)?;
        known.insert(session_id.clone(), range);
        Ok(range)
    }

    fn refresh(&self, known: &mut BTreeMap<SessionId, IdRange>) -> Result<(), IdRangeError> {
        // The warm ones first: one that gets its owner between the two listings is in both, and never in none.
        let mut listed = Vec::new();
        for paths in [self.paths.warm(), self.paths.clone()] {
            let sessions: Vec<SessionId> =
                layout::ids_in(&paths.sessions_dir()).map_err(IdRangeError::List)?;
            listed.extend(sessions.into_iter().map(|session| {
                let file = paths.session_dir(&session).join(SESSION_FILE);
                (session, file)
            }));
        }
        known.retain(|session, _| listed.iter().any(|(listed, _)| listed == session));
        for (session, file) in listed {
            if known.contains_key(&session) {
                continue;
            }
            if let Some(record) = read_record::<SessionRecord>(&file)? {
                known.insert(session, record.ids);
            }
        }
        Ok(())
    }
}

fn free_range(
    session_id: &SessionId,
    taken: &BTreeMap<SessionId, IdRange>,
    reserved: &[(u64, u64)],
) -> Option<IdRange> {
    let hash = blake3::hash(session_id.as_str().as_bytes());
    let start = hash.as_bytes()[..4].iter().fold(0_u32, |sum, byte| (sum << 8) | u32::from(*byte)) % SLOTS;
    (0..SLOTS)
        .map(|step| IdRange {
            base: FIRST + (start + step) % SLOTS * IDS_PER_SESSION,
            count: IDS_PER_SESSION,
        })
        .find(|range| {
            let others =
                taken.values().any(|other| range.overlaps(u64::from(other.base), u64::from(other.count)));
            !others && !reserved.iter().any(|(start, count)| range.overlaps(*start, *count))
        })
}

/// Reads `name:start:count` lines (subuid(5)).
fn subordinate_ranges(text: &str) -> Vec<(u64, u64)> {
    text.lines()
        .filter_map(|line| {
            let mut fields = line.trim().split(':').skip(1);
            Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
        })
        .collect()
}

/// Makes a session's directory if it is not there; returns whether it made it.
///
/// # Errors
///
/// When it cannot be made.
pub fn ensure_session_dir(path: &Path) -> io::Result<bool> {
    if path.is_dir() {
        return Ok(false);
    }
    layout::ensure_private_dir(path).map(|()| true)
}

#[cfg(test)]
mod tests {
    use cloister_types::Limits;

    use super::*;
    use crate::intent::write_record;

    fn host(directory: &Path) -> HostPaths {
        let paths = HostPaths { data_dir: directory.join("data"), run_dir: directory.join("run") };
        paths.ensure().unwrap();
        paths
    }

    fn ensure(allocator: &IdRangeAllocator, session_id: &SessionId) -> IdRange {
        let directory = allocator.paths.session_dir(session_id);
        ensure_session_dir(&directory).unwrap();
        allocator
            .ensure(session_id, |ids| {
                let record = SessionRecord { session_id: session_id.clone(), ids, limits: Limits::DEFAULT };
                write_record(&directory.join(SESSION_FILE), &record, false)
            })
            .unwrap()
    }

    #[test]
    fn ranges_of_two_allocators_do_not_overlap_and_stay_with_their_session() {
        let directory = tempfile::tempdir().unwrap();
        let allocators = [(); 2].map(|()| IdRangeAllocator::new(host(directory.path())));
        let mut bases = std::collections::BTreeSet::new();
        for number in 0..200_u128 {
            let session = SessionId::from_u128(number);
            let [first, second] = [0, 1].map(|which| ensure(&allocators[which], &session));
            assert_eq!(first, second);
            assert!(first.base >= FIRST && first.base.is_multiple_of(IDS_PER_SESSION));
            assert!(bases.insert(first.base), "range {} was given twice", first.base);
        }
    }

    #[test]
    fn a_session_whose_directory_was_removed_and_made_again_is_written_down_again() {
        let directory = tempfile::tempdir().unwrap();
        let allocator = IdRangeAllocator::new(host(directory.path()));
        let session = SessionId::from_u128(7);
        for _ in 0..2 {
            let range = ensure(&allocator, &session);
            let kept = allocator.paths.session_dir(&session);
            // As a create that failed leaves it; nobody asks for another session's range before it is tried again.
            let record = read_record::<SessionRecord>(&kept.join(SESSION_FILE)).unwrap();
            assert_eq!(record.map(|record| record.ids), Some(range));
            layout::remove_dir(&kept).unwrap();
        }
    }

    #[test]
    fn subordinate_ids_of_people_are_left_out_and_a_full_table_is_an_error() {
        let session = SessionId::from_u128(1);
        let reserved = subordinate_ranges("ada:1879048192:65536\n# x\nbob:x:1\n");
        assert_eq!(reserved, [(1_879_048_192, 65_536)]);
        let nobody = BTreeMap::new();
        let all_but_last = [(u64::from(FIRST), u64::from(SLOTS - 1) * u64::from(IDS_PER_SESSION))];
        let last = free_range(&session, &nobody, &all_but_last).unwrap();
        assert_eq!(last.base, FIRST + (SLOTS - 1) * IDS_PER_SESSION);
        assert_eq!(free_range(&session, &nobody, &[(0, u64::MAX)]), None);
    }
}
