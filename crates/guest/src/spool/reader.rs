//! Reading a spool from any offset, beside its writer or long after it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use cloister_types::exec::OUTPUT_FRAME_MAX_BYTES;
use cloister_types::{Exit, OutputFrame, OutputStream};

use super::{RECORD_HEADER_BYTES, SEGMENT_MAX_BYTES, as_offset, segment_name, segment_offset};
use crate::convert::stream_from_wire;

/// What one read of a segment asks for when no record says more.
const READ_BYTES: usize = 4096;

/// A piece of a spool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Chunk {
    /// Bytes of one stream, at most 64 KiB.
    Data {
        /// Which stream.
        stream: OutputStream,
        /// Offset of the first byte.
        offset: u64,
        /// The bytes.
        data: Vec<u8>,
    },
    /// Bytes that are not kept.
    Gap {
        /// First missing offset.
        from: u64,
        /// First offset that follows.
        to: u64,
    },
}

/// Reads a spool in order. It holds one file open and a buffer of at most one record.
pub struct Reader {
    dir: PathBuf,
    position: u64,
    open: Option<OpenSegment>,
}

struct OpenSegment {
    start: u64,
    file: File,
    /// Where in the file the buffer's first byte stands, and at which offset of the output.
    at: u64,
    offset: u64,
    buffer: Vec<u8>,
    taken: usize,
}

impl Reader {
    /// Returns a reader of the spool in `dir` that starts at `from_offset`. Nothing is opened yet.
    pub fn new(dir: impl Into<PathBuf>, from_offset: u64) -> Self {
        Self { dir: dir.into(), position: from_offset, open: None }
    }

    /// Returns the offset of the next byte.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Returns what follows; `None` when there is nothing more now. `end` is the offset after the newest byte where
    /// it is known (the writer's next offset, or the exit record's count): bytes below it that are in no segment are
    /// announced as a gap.
    ///
    /// # Errors
    ///
    /// When the directory or a segment cannot be read. A spool without a directory has no output.
    pub fn next(&mut self, end: Option<u64>) -> io::Result<Option<Chunk>> {
        loop {
            if end.is_some_and(|end| self.position >= end) {
                return Ok(None);
            }
            let Some(open) = self.open.as_mut() else {
                match self.open_segment_at_position()? {
                    Found::Opened => continue,
                    Found::Gap(to) => return Ok(Some(self.skip_to(to))),
                    Found::Nothing => return Ok(end.map(|end| self.skip_to(end))),
                }
            };
            if let Some((stream, offset, data)) = open.next_record(self.position)? {
                self.position = offset + as_offset(data.len());
                return Ok(Some(Chunk::Data { stream, offset, data }));
            }
            // The segment has no more: either a later one goes on, or this is the newest byte.
            let current = open.start;
            let later = segment_starts(&self.dir)?.into_iter().filter(|start| *start > current).min();
            match later {
                Some(start) => {
                    self.open = None;
                    if start > self.position {
                        return Ok(Some(self.skip_to(start)));
                    }
                }
                None => return Ok(end.map(|end| self.skip_to(end))),
            }
        }
    }

    fn skip_to(&mut self, to: u64) -> Chunk {
        let from = self.position;
        self.position = to;
        Chunk::Gap { from, to }
    }

    fn open_segment_at_position(&mut self) -> io::Result<Found> {
        loop {
            let starts = segment_starts(&self.dir)?;
            let holding = starts.iter().copied().filter(|start| *start <= self.position).max();
            let Some(start) = holding else {
                return Ok(starts.into_iter().min().map_or(Found::Nothing, Found::Gap));
            };
            match File::open(self.dir.join(segment_name(start))) {
                Ok(file) => {
                    self.open =
                        Some(OpenSegment { start, file, at: 0, offset: start, buffer: Vec::new(), taken: 0 });
                    return Ok(Found::Opened);
                }
                // The writer unlinked it just now: look again.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
    }
}

enum Found {
    Opened,
    /// The oldest kept byte lies further on.
    Gap(u64),
    Nothing,
}

impl OpenSegment {
    /// Returns the next record's bytes from `position` on; `None` when no whole record follows.
    fn next_record(&mut self, position: u64) -> io::Result<Option<(OutputStream, u64, Vec<u8>)>> {
        loop {
            if !self.fill(RECORD_HEADER_BYTES)? {
                return Ok(None);
            }
            let header = &self.buffer[self.taken..self.taken + RECORD_HEADER_BYTES];
            let stream = stream_from_wire(u32::from(header[0]));
            let mut length = [0; 4];
            length.copy_from_slice(&header[1..]);
            let length = usize::try_from(u32::from_le_bytes(length)).unwrap_or(usize::MAX);
            // Damage reads like a torn end: what follows in this segment cannot be placed any more.
            let Ok(stream) = stream else { return Ok(None) };
            if as_offset(length) > SEGMENT_MAX_BYTES {
                return Ok(None);
            }
            let start = self.offset;
            let end = start + as_offset(length);
            if end <= position {
                if !self.skip(RECORD_HEADER_BYTES + length)? {
                    return Ok(None);
                }
                self.offset = end;
                continue;
            }
            if !self.fill(RECORD_HEADER_BYTES + length)? {
                return Ok(None);
            }
            let from = position.max(start);
            let skipped = usize::try_from(from - start).unwrap_or(usize::MAX);
            let taken = (length - skipped).min(OUTPUT_FRAME_MAX_BYTES);
            let first = self.taken + RECORD_HEADER_BYTES + skipped;
            let data = self.buffer[first..first + taken].to_vec();
            if skipped + taken == length {
                self.taken += RECORD_HEADER_BYTES + length;
                self.offset = end;
            }
            return Ok(Some((stream, from, data)));
        }
    }

    /// Makes at least `count` bytes available; says whether the file has them.
    fn fill(&mut self, count: usize) -> io::Result<bool> {
        while self.buffer.len() - self.taken < count {
            self.buffer.drain(..self.taken);
            self.at += as_offset(self.taken);
            self.taken = 0;
            let have = self.buffer.len();
            self.buffer.resize(count.max(READ_BYTES).max(have), 0);
            let read = self.file.read_at(&mut self.buffer[have..], self.at + as_offset(have));
            self.buffer.truncate(have + *read.as_ref().unwrap_or(&0));
            match read {
                Ok(0) => return Ok(false),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Passes over `count` bytes without reading them all; says whether the file has them.
    fn skip(&mut self, count: usize) -> io::Result<bool> {
        let available = self.buffer.len() - self.taken;
        if count <= available {
            self.taken += count;
            return Ok(true);
        }
        let target = self.at + as_offset(self.taken + count);
        if self.file.metadata()?.len() < target {
            return Ok(false);
        }
        self.at = target;
        self.buffer.clear();
        self.taken = 0;
        Ok(true)
    }
}

/// Returns the first offsets of the segments in `dir`, in no order.
fn segment_starts(dir: &Path) -> io::Result<Vec<u64>> {
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut starts = Vec::new();
    for entry in entries {
        starts.extend(entry?.file_name().to_str().and_then(segment_offset));
    }
    Ok(starts)
}

/// Returns the bytes that an ended exec's output takes on the disk.
pub fn kept_bytes(dir: &Path) -> u64 {
    let starts = segment_starts(dir).unwrap_or_default();
    let sizes = starts.into_iter().filter_map(|start| std::fs::metadata(dir.join(segment_name(start))).ok());
    sizes.map(|metadata| metadata.len()).sum()
}

/// Removes an ended exec's output; its records stay, and readers are told of the gap.
pub fn drop_output(dir: &Path) {
    for start in segment_starts(dir).unwrap_or_default() {
        // One that stays is removed with the exec.
        let _ = std::fs::remove_file(dir.join(segment_name(start)));
    }
}

/// Reads the output of an exec whose writer is gone, up to and with its last frame.
pub struct EndedReader {
    reader: Reader,
    exit: Option<Exit>,
    done: bool,
}

impl EndedReader {
    /// Returns a reader of the spool in `dir`; `exit` is the exec's exit record, where there is one.
    pub fn new(dir: impl Into<PathBuf>, from_offset: u64, exit: Option<Exit>) -> Self {
        Self { reader: Reader::new(dir, from_offset), exit, done: false }
    }

    /// Returns the next frame; `None` after [`OutputFrame::Exit`], or after [`OutputFrame::End`] where there is no
    /// exit record.
    ///
    /// # Errors
    ///
    /// When the spool cannot be read.
    #[expect(clippy::should_implement_trait, reason = "an iterator cannot end with an error as `?` wants it")]
    pub fn next(&mut self) -> io::Result<Option<OutputFrame>> {
        if self.done {
            return Ok(None);
        }
        let end = self.exit.as_ref().map(|exit| exit.output_bytes);
        Ok(Some(match self.reader.next(end)? {
            Some(Chunk::Data { stream, offset, data }) => OutputFrame::Data { stream, offset, data },
            Some(Chunk::Gap { from, to }) => OutputFrame::Gap { from, to },
            None => {
                self.done = true;
                match self.exit.take() {
                    Some(exit) => OutputFrame::Exit(exit),
                    None => OutputFrame::End { next_offset: self.reader.position() },
                }
            }
        }))
    }
}
