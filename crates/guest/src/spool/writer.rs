//! The one writer of an exec's spool.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, IoSlice, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;

use cloister_types::OutputStream;

use super::{RECORD_HEADER_BYTES, SEGMENT_MAX_BYTES, as_offset, segment_name};
use crate::convert::stream_to_wire;

/// A bound is divided into this many segments, so that dropping the oldest drops a quarter at most.
const SEGMENTS_OF_A_BOUND: u64 = 4;
/// The smallest segment, so that a record of at least one byte always fits.
const SEGMENT_MIN_BYTES: u64 = 64;

/// Why bytes were not kept.
#[derive(Debug, thiserror::Error)]
pub enum AppendError {
    /// The bound is reached and an attached reader still needs the oldest segment: nothing was written.
    #[error("the spool is full of output that a reader has not read yet")]
    WouldBlock,
    /// The disk did not take them. They count as printed, and readers will see a gap.
    #[error("write output to the host's disk")]
    Lost(#[source] io::Error),
}

struct Segment {
    start: u64,
    file_bytes: u64,
}

/// Appends output and keeps it within a bound.
pub struct Writer {
    dir: PathBuf,
    max_bytes: u64,
    segment_max_bytes: u64,
    /// Finished segments, oldest first.
    closed: VecDeque<Segment>,
    closed_bytes: u64,
    open: Option<(Segment, File)>,
    next_offset: u64,
}

impl Writer {
    /// Returns the writer of a new spool in the existing directory `dir`.
    pub fn new(dir: PathBuf, max_bytes: u64) -> Self {
        Self {
            dir,
            max_bytes,
            segment_max_bytes: segment_max_bytes(max_bytes),
            closed: VecDeque::new(),
            closed_bytes: 0,
            open: None,
            next_offset: 0,
        }
    }

    /// Changes the bound. With `unread` nobody needs what is beyond it, and it goes at once; else at the next bytes.
    pub fn set_max_bytes(&mut self, max_bytes: u64, unread: bool) {
        self.max_bytes = max_bytes;
        self.segment_max_bytes = segment_max_bytes(max_bytes);
        if self.open.as_ref().is_some_and(|(open, _)| open.file_bytes > self.segment_max_bytes) {
            self.close();
        }
        if unread {
            self.drop_beyond_bound();
        }
    }

    /// Returns the offset of the next byte: how many were printed so far.
    pub fn next_offset(&self) -> u64 {
        self.next_offset
    }

    /// Returns the bytes that the segments take on the disk.
    pub fn kept_bytes(&self) -> u64 {
        self.closed_bytes + self.open.as_ref().map_or(0, |(segment, _)| segment.file_bytes)
    }

    /// Returns whether `bytes` more can be kept without dropping what a reader at `needed_from` has not read.
    /// A reader that has read everything never blocks the writer.
    pub fn has_room(&self, bytes: usize, needed_from: Option<u64>) -> bool {
        let Some(needed_from) = needed_from else { return true };
        if needed_from >= self.next_offset {
            return true;
        }
        let mut kept = self.kept_bytes().saturating_add(self.disk_bytes(bytes));
        for (index, segment) in self.closed.iter().enumerate() {
            if kept <= self.max_bytes || self.end_of_closed(index) > needed_from {
                break;
            }
            kept = kept.saturating_sub(segment.file_bytes);
        }
        kept <= self.max_bytes
    }

    /// Appends bytes of one stream. `needed_from` is the lowest offset that an attached reader still has to read.
    ///
    /// # Errors
    ///
    /// [`AppendError`]; the writer stays usable after either.
    pub fn append(
        &mut self,
        stream: OutputStream,
        data: &[u8],
        needed_from: Option<u64>,
    ) -> Result<(), AppendError> {
        if !self.has_room(data.len(), needed_from) {
            return Err(AppendError::WouldBlock);
        }
        let mut lost = None;
        for piece in data.chunks(self.piece_bytes()) {
            if let Err(error) = self.append_piece(stream, piece) {
                // A new segment starts after the hole, so that names keep saying where bytes belong.
                self.close();
                lost = Some(error);
            }
            self.next_offset += as_offset(piece.len());
            self.drop_beyond_bound();
        }
        lost.map_or(Ok(()), |error| Err(AppendError::Lost(error)))
    }

    /// Most bytes of one record, so that any record fits an empty segment.
    fn piece_bytes(&self) -> usize {
        usize::try_from(self.segment_max_bytes).unwrap_or(usize::MAX) - RECORD_HEADER_BYTES
    }

    /// What `bytes` of output take on the disk.
    fn disk_bytes(&self, bytes: usize) -> u64 {
        let records = bytes.div_ceil(self.piece_bytes());
        as_offset(bytes.saturating_add(records.saturating_mul(RECORD_HEADER_BYTES)))
    }

    fn end_of_closed(&self, index: usize) -> u64 {
        let next = self.closed.get(index + 1).map(|segment| segment.start);
        next.or_else(|| self.open.as_ref().map(|(segment, _)| segment.start)).unwrap_or(self.next_offset)
    }

    fn append_piece(&mut self, stream: OutputStream, piece: &[u8]) -> io::Result<()> {
        let record_bytes = as_offset(piece.len() + RECORD_HEADER_BYTES);
        if self.open.as_ref().is_some_and(|(open, _)| open.file_bytes + record_bytes > self.segment_max_bytes)
        {
            self.close();
        }
        if self.open.is_none() {
            let path = self.dir.join(segment_name(self.next_offset));
            let file = OpenOptions::new().append(true).create(true).mode(0o600).open(path)?;
            self.open = Some((Segment { start: self.next_offset, file_bytes: 0 }, file));
        }
        let Some((segment, file)) = self.open.as_mut() else { return Ok(()) };
        let mut header = [stream_to_wire(stream), 0, 0, 0, 0];
        let length = u32::try_from(piece.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        header[1..].copy_from_slice(&length.to_le_bytes());
        match write_record(file, &header, piece) {
            Ok(()) => {
                segment.file_bytes += record_bytes;
                Ok(())
            }
            Err(error) => {
                // Half a record in the middle would hide the ones that follow; when even this fails, the next
                // record goes to another segment and a reader takes the half for a torn end.
                let _ = file.set_len(segment.file_bytes);
                Err(error)
            }
        }
    }

    fn close(&mut self) {
        if let Some((segment, _)) = self.open.take() {
            self.closed_bytes += segment.file_bytes;
            self.closed.push_back(segment);
        }
    }

    fn drop_beyond_bound(&mut self) {
        while self.kept_bytes() > self.max_bytes
            && let Some(oldest) = self.closed.pop_front()
        {
            self.closed_bytes -= oldest.file_bytes;
            // A segment that stays is only unbounded disk, which the removal of the exec ends.
            let _ = std::fs::remove_file(self.dir.join(segment_name(oldest.start)));
        }
    }
}

/// Returns how large a segment may be under a bound.
fn segment_max_bytes(max_bytes: u64) -> u64 {
    (max_bytes / SEGMENTS_OF_A_BOUND).clamp(SEGMENT_MIN_BYTES, SEGMENT_MAX_BYTES)
}

fn write_record(file: &mut File, header: &[u8], data: &[u8]) -> io::Result<()> {
    let mut slices = [IoSlice::new(header), IoSlice::new(data)];
    let mut rest: &mut [IoSlice<'_>] = &mut slices;
    while !rest.is_empty() {
        match file.write_vectored(rest) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => IoSlice::advance_slices(&mut rest, count),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
