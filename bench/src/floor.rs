//! What this machine takes for the parts that no sandbox can do without, measured beside the rest.
//!
//! On a noisy machine a time means little by itself: these rows say how much of it is the machine's.

use std::fs::File;
use std::io::{Seek as _, Write as _};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use crate::sample::Sample;

/// A page of a PostgreSQL write-ahead log.
const PAGE_BYTES: usize = 8192;

/// Both floors.
pub(crate) struct Floor {
    file: File,
    /// From starting `true` without any sandbox to its end.
    pub(crate) program: Sample,
    /// Overwriting one page of a file and `fdatasync`, which is what a commit waits for.
    pub(crate) commit: Sample,
}

impl Floor {
    /// Makes the file that is written.
    ///
    /// # Errors
    ///
    /// When `/var/tmp`, which is on a disk where `/tmp` may be memory, takes no file.
    pub(crate) fn new() -> Result<Self> {
        let mut file = tempfile::tempfile_in("/var/tmp").context("make a file in `/var/tmp`")?;
        file.write_all(&[0; PAGE_BYTES]).context("write")?;
        file.sync_all().context("sync")?;
        Ok(Self { file, program: Sample::default(), commit: Sample::default() })
    }

    /// Measures both once.
    ///
    /// # Errors
    ///
    /// When the program does not exit with 0, or the file is not written.
    pub(crate) fn measure(&mut self) -> Result<()> {
        let begin = Instant::now();
        let status = Command::new("true").stdin(Stdio::null()).status().context("start `true`")?;
        self.program.add(begin.elapsed());
        ensure!(status.success(), "`true` ended with {status}");
        let written = self.write_page().context("write a page")?;
        self.commit.add(written);
        Ok(())
    }

    fn write_page(&mut self) -> std::io::Result<Duration> {
        let begin = Instant::now();
        self.file.rewind()?;
        self.file.write_all(&[1; PAGE_BYTES])?;
        self.file.sync_data()?;
        Ok(begin.elapsed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_take_time() {
        let mut floor = Floor::new().unwrap();
        floor.measure().unwrap();
        assert!(floor.program.min() > Duration::ZERO && floor.commit.min() > Duration::ZERO);
    }
}
