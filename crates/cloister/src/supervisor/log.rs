//! Logs of the children: what they print goes into a file that is rotated by size.
//!
//! Each child has a pipe and a thread here that copies it. The thread ends with the last writer of the pipe.

use std::fs::{self, File, OpenOptions};
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::error::CliError;

/// A log of this size is put aside.
const ROTATE_BYTES: u64 = 16 * 1024 * 1024;
/// Logs put aside per child: `<name>.log.1` is the newest.
const KEPT: u32 = 3;
/// What is shown of a log when its child does not start.
const TAIL_BYTES: usize = 4096;

/// A file that is put aside when it is large.
struct RotatingLog {
    path: PathBuf,
    file: File,
    size: u64,
    limit: u64,
}

impl RotatingLog {
    fn open(path: &Path, limit: u64) -> io::Result<Self> {
        let file = OpenOptions::new().append(true).create(true).mode(0o600).open(path)?;
        let size = file.metadata()?.len();
        Ok(Self { path: path.to_owned(), file, size, limit })
    }

    /// Appends; rotation happens between writes that end a line, so that no line is cut.
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)?;
        self.size += u64::try_from(bytes.len()).expect("a length fits 64 bits");
        if self.size >= self.limit && (bytes.ends_with(b"\n") || self.size >= 2 * self.limit) {
            self.rotate()?;
        }
        Ok(())
    }

    fn rotate(&mut self) -> io::Result<()> {
        let aside = |number: u32| {
            let mut name = self.path.clone().into_os_string();
            name.push(format!(".{number}"));
            PathBuf::from(name)
        };
        for number in (1..KEPT).rev() {
            match fs::rename(aside(number), aside(number + 1)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        fs::rename(&self.path, aside(1))?;
        *self = Self::open(&self.path, self.limit)?;
        Ok(())
    }
}

/// Starts the log of one child and returns the pipe to give it as standard output and error.
///
/// # Errors
///
/// [`CliError::Io`] naming the file.
pub(crate) fn start(directory: &Path, name: &str) -> Result<PipeWriter, CliError> {
    let path = directory.join(format!("{name}.log"));
    let action = format!("write the log `{}`", path.display());
    let started = RotatingLog::open(&path, ROTATE_BYTES).and_then(|log| {
        let (reader, writer) = io::pipe()?;
        std::thread::Builder::new().name(format!("log-{name}")).spawn(move || copy(reader, log))?;
        Ok(writer)
    });
    started.map_err(CliError::io(action))
}

fn copy(mut reader: PipeReader, mut log: RotatingLog) {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        match reader.read(&mut buffer) {
            Ok(0) => return,
            // A full disk must not stop the child that is being logged: what cannot be written is dropped.
            Ok(count) => {
                let _ = log.append(&buffer[..count]);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

/// Returns the last lines of a log; empty when there is none.
pub(crate) fn tail(directory: &Path, name: &str, lines: usize) -> String {
    let bytes = fs::read(directory.join(format!("{name}.log"))).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes[bytes.len().saturating_sub(TAIL_BYTES)..]).into_owned();
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_are_put_aside_whole_lines_only_and_the_oldest_goes() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.log");
        let mut log = RotatingLog::open(&path, 10).unwrap();
        for number in 0..6 {
            log.append(format!("line {number} ").as_bytes()).unwrap();
            log.append(b"end\n").unwrap();
        }
        let read = |name: &str| fs::read_to_string(directory.path().join(name)).unwrap();
        assert_eq!(read("x.log"), "");
        assert_eq!(read("x.log.1"), "line 5 end\n");
        assert_eq!(read("x.log.3"), "line 3 end\n");
        assert!(!directory.path().join("x.log.4").exists());
    }

    #[test]
    fn what_a_child_prints_is_in_its_log() {
        let directory = tempfile::tempdir().unwrap();
        let mut pipe = start(directory.path(), "child").unwrap();
        pipe.write_all(b"one\ntwo\nthree\n").unwrap();
        drop(pipe);
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while tail(directory.path(), "child", 2) != "two\nthree" {
            assert!(std::time::Instant::now() < deadline, "log is `{}`", tail(directory.path(), "child", 9));
            std::thread::yield_now();
        }
        assert_eq!(tail(directory.path(), "nothing", 2), "");
    }
}
