//! The spool: what an exec printed, kept on the host's disk within a bound, and how it ended.
//!
//! ```text
//! <exec dir>/<exec id>/
//!     spec.json                    what was asked, written before the program is started
//!     00000000000000000000.seg     records from this offset on
//!     00000000000001048000.seg
//!     exit.json                    written once the program has ended
//! ```
//!
//! A segment is a run of records: stream (1 byte), length (4 bytes little endian), bytes. An offset counts the
//! bytes of both streams together, in the order in which they were read; the name of a segment is the offset of its
//! first byte. There is one [`Writer`] and any number of [`Reader`]s; they meet in the files alone, so that a reader
//! works the same beside a live writer and years after it.
//!
//! What holds:
//! - Reading from an offset gives every byte from there on, in order and once, or says with a gap which are gone.
//! - The segments of an exec take at most the bound on the disk. Beyond it the oldest are unlinked, but never one
//!   that an attached reader has not read: then the writer says so and nothing is written.
//! - The execs of a session share a bound as well: see the shim's list of execs.
//! - A record that a crash tore is no record: what lies before it reads well.
//! - Nothing is synced: output is as durable as the machine is up.

mod reader;
mod record;
mod writer;

pub use reader::{Chunk, EndedReader, Reader, drop_output, kept_bytes};
pub use record::{RecordError, read_record, read_records, seal, write_exit, write_spec};
pub use writer::{AppendError, Writer};

/// Most bytes of one segment; a smaller bound makes smaller segments.
pub const SEGMENT_MAX_BYTES: u64 = 1024 * 1024;
/// Stream and length before a record's bytes.
const RECORD_HEADER_BYTES: usize = 5;
/// What a segment's name ends in.
const SEGMENT_SUFFIX: &str = ".seg";

/// Returns the name of the segment that starts at `offset`: padded, so that names sort like offsets.
fn segment_name(offset: u64) -> String {
    format!("{offset:020}{SEGMENT_SUFFIX}")
}

/// Returns the offset in a segment's name.
fn segment_offset(name: &str) -> Option<u64> {
    let digits = name.strip_suffix(SEGMENT_SUFFIX)?;
    (digits.len() == 20).then(|| digits.parse().ok()).flatten()
}

/// Returns `count` as an offset; a count of bytes in memory always fits.
fn as_offset(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
