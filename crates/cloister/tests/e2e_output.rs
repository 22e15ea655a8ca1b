//! Output through the whole path: program, guest agent, shim, host agent, coordinator, command line. Whatever is printed
//! arrives equal by count and BLAKE3, and no process on the way grows by more than 32 MiB, read or unread.
//!
//! `CLOISTER_TEST_OUTPUT_GIB` makes the large one larger: `just torture-output` runs it with 10 GiB.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test states what it expects by unwrapping it"
)]

mod support;

use std::fs;
use std::io::Read;
use std::process::{Child, ChildStdout, Stdio};
use std::time::{Duration, Instant};

use support::memory::{MemoryWatch, Process, Usage};
use support::{Up, can_run, skip, wait_for, which};

const MIB: usize = 1 << 20;
/// By how much a process on the way may grow.
const GROWTH_MAX_KIB: u64 = 32 * 1024;
/// What the host keeps of an exec's output, unless it is told otherwise.
const SPOOL_MAX_BYTES: u64 = 16 << 20;

/// Prints `argv[1]` blocks of a MiB that all differ, and writes how many are out to a file.
const PRINT_BLOCKS: &str = "
import os, sys
filler = bytes((i * 2654435761 >> 24) & 255 for i in range((1 << 20) - 8))
progress = os.open('/workspace/progress', os.O_CREAT | os.O_WRONLY)
for number in range(int(sys.argv[1])):
    block = memoryview(number.to_bytes(8, 'little') + filler)
    while block:
        block = block[os.write(1, block):]
    os.pwrite(progress, b'%08d' % (number + 1), 0)
";

/// What the program prints, block by block.
struct Blocks(Vec<u8>);

impl Blocks {
    fn new() -> Self {
        let byte = |index: u64| u8::try_from(((index * 2_654_435_761) >> 24) & 255).unwrap();
        Self([0; 8].into_iter().chain((0..(1 << 20) - 8).map(byte)).collect())
    }

    fn block(&mut self, number: usize) -> &[u8] {
        self.0[..8].copy_from_slice(&u64::try_from(number).unwrap().to_le_bytes());
        &self.0
    }

    /// Returns the digest of the blocks from `first` up to `end`.
    fn hash(&mut self, first: usize, end: usize) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new();
        for number in first..end {
            hasher.update(self.block(number));
        }
        hasher.finalize()
    }
}

/// Counts and hashes what comes.
#[derive(Default)]
struct Sink {
    count: usize,
    hasher: blake3::Hasher,
}

impl Sink {
    fn read_to_end(&mut self, stdout: &mut ChildStdout) {
        while self.read(stdout) > 0 {}
    }

    fn read(&mut self, stdout: &mut ChildStdout) -> usize {
        let mut buffer = vec![0; 64 * 1024];
        let count = stdout.read(&mut buffer).unwrap();
        self.hasher.update(&buffer[..count]);
        self.count += count;
        count
    }

    fn end(self) -> (usize, blake3::Hash) {
        (self.count, self.hasher.finalize())
    }
}

/// Returns whether these tests can run; prints the skip line when not.
fn has_all() -> bool {
    if !can_run() {
        return false;
    }
    if !which("python3") {
        skip("python3 is not installed");
        return false;
    }
    true
}

/// Starts Cloister with one session named `out`, warmed up.
fn start() -> Up {
    let up = Up::start();
    up.ok(&["session", "create", "--name", "out", "--memory", "128M"]);
    // What is read in or allocated at first use is no growth by output.
    let warm = up.run(&["exec", "out", "--", "head", "-c", "4M", "/dev/zero"]).expect(0);
    assert_eq!(warm.bytes().len(), 4 * MIB);
    up
}

fn spawn(up: &Up, command: &[&str]) -> (Child, ChildStdout) {
    let mut arguments = vec!["exec", "out", "--"];
    arguments.extend_from_slice(command);
    let mut child = up.command(&arguments).stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let stdout = child.stdout.take().unwrap();
    (child, stdout)
}

/// Watches what stays between a program and a client.
fn watch(up: &Up) -> MemoryWatch {
    let (shim, agent) = up.sandbox_processes();
    let process = |name, pid| Process { name, pid, may_end: false };
    MemoryWatch::start(vec![
        process("guest agent", agent),
        process("shim", shim),
        process("host agent", up.pid_of("host")),
        process("coordinator", up.pid_of("coordinator")),
    ])
}

/// Watches the command line that reads.
fn watch_reader(reader: &Child) -> MemoryWatch {
    let pid = i32::try_from(reader.id()).unwrap();
    MemoryWatch::start(vec![Process { name: "command line", pid, may_end: true }])
}

fn assert_flat(watches: impl IntoIterator<Item = MemoryWatch>, what: &str) {
    let usages: Vec<Usage> = watches.into_iter().flat_map(|watch| watch.stop(what)).collect();
    for usage in usages {
        assert!(usage.growth_kib() <= GROWTH_MAX_KIB, "{usage:?}");
    }
}

/// Returns what the execs of the only session take on the host's disk.
fn kept_bytes(up: &Up) -> u64 {
    let mut total = 0;
    for session in fs::read_dir(up.path("data/host/sessions")).unwrap().flatten() {
        for exec in fs::read_dir(session.path().join("execs")).unwrap().flatten() {
            for file in fs::read_dir(exec.path()).into_iter().flatten().flatten() {
                // A segment that goes in this moment takes nothing.
                total += file.metadata().map_or(0, |metadata| metadata.len());
            }
        }
    }
    total
}

#[test]
fn a_gibibyte_arrives_equal_and_nobody_on_the_way_grows() {
    if !has_all() {
        return;
    }
    let gib: usize = std::env::var("CLOISTER_TEST_OUTPUT_GIB").map_or(1, |text| text.parse().unwrap());
    let mib = gib * 1024;
    let up = start();
    let hops = watch(&up);
    let started = Instant::now();
    let (mut child, mut stdout) = spawn(&up, &["python3", "-c", PRINT_BLOCKS, &mib.to_string()]);
    let mut sink = Sink::default();
    sink.read(&mut stdout);
    let reader = watch_reader(&child);
    sink.read_to_end(&mut stdout);
    let seconds = started.elapsed().as_secs_f64();
    assert_flat([hops, reader], &format!("{gib} GiB"));
    let (count, hash) = sink.end();
    println!("{gib} GiB: {count} bytes in {seconds:.1} s, blake3 {hash}");
    assert_eq!(child.wait().unwrap().code(), Some(0), "{}", up.logs());
    assert_eq!(count, mib * MIB);
    assert_eq!(hash, Blocks::new().hash(0, mib));
}

#[test]
fn an_endless_line_is_only_bytes() {
    if !has_all() {
        return;
    }
    let up = start();
    let mib = 256;
    let script = format!("head -c {mib}M /dev/zero | tr '\\0' x");
    let hops = watch(&up);
    let (mut child, mut stdout) = spawn(&up, &["sh", "-c", &script]);
    let mut sink = Sink::default();
    sink.read(&mut stdout);
    let reader = watch_reader(&child);
    sink.read_to_end(&mut stdout);
    assert_flat([hops, reader], "endless line");
    assert_eq!(child.wait().unwrap().code(), Some(0), "{}", up.logs());
    let piece = vec![b'x'; MIB];
    let mut expected = blake3::Hasher::new();
    for _ in 0..mib {
        expected.update(&piece);
    }
    assert_eq!(sink.end(), (mib * MIB, expected.finalize()));
}

#[test]
fn a_reader_that_stands_still_holds_the_program_up() {
    if !has_all() {
        return;
    }
    let up = start();
    let mib = 96;
    let hops = watch(&up);
    let (mut child, mut stdout) = spawn(&up, &["python3", "-c", PRINT_BLOCKS, &mib.to_string()]);
    let mut sink = Sink::default();
    sink.read(&mut stdout);
    let reader = watch_reader(&child);
    let progress =
        || -> usize { up.ok(&["exec", "out", "--", "cat", "/workspace/progress"]).parse().unwrap() };
    // The same figure over a second in which other execs ran.
    let mut since = (0, Instant::now());
    let stands_at = wait_for("the program to stand still", || {
        let now = progress();
        if now != since.0 {
            since = (now, Instant::now());
        }
        if since.1.elapsed() > Duration::from_secs(1) && now > 0 {
            Ok(now)
        } else {
            Err(format!("{now} MiB"))
        }
    });
    println!("slow reader: the program stands at {stands_at} MiB of {mib}");
    // The bound on kept output, and what is in windows, pipes and sockets on the way.
    assert!(stands_at <= 24, "{stands_at} MiB are out");
    assert!(kept_bytes(&up) <= SPOOL_MAX_BYTES + 8 * 1024 * 1024, "{}", kept_bytes(&up));
    sink.read_to_end(&mut stdout);
    assert_flat([hops, reader], "slow reader");
    assert_eq!(child.wait().unwrap().code(), Some(0), "{}", up.logs());
    assert_eq!(sink.end(), (mib * MIB, Blocks::new().hash(0, mib)));
}

#[test]
fn output_that_nobody_reads_is_bounded_on_the_disk_too() {
    if !has_all() {
        return;
    }
    let up = start();
    let mib = 128;
    let before = kept_bytes(&up);
    let hops = watch(&up);
    let exec = up.ok(&["exec", "-d", "out", "--", "python3", "-c", PRINT_BLOCKS, &mib.to_string()]);
    wait_for("the program to end", || {
        // Never more than the bound, at any moment that is looked at.
        let kept = kept_bytes(&up) - before;
        assert!(kept <= SPOOL_MAX_BYTES + 64 * 1024, "{kept} bytes are kept");
        let execs = up.json(&["ps", "out"]);
        let listed = execs["execs"].as_array().unwrap();
        let found = listed.iter().find(|found| found["id"] == exec.as_str()).unwrap();
        if found["state"] == "EXEC_STATE_RUNNING" { Err(found.to_string()) } else { Ok(()) }
    });
    assert_flat([hops], "unread");
    let finished = up.run(&["logs", "out", &exec]).expect(0);
    let kept = finished.bytes().len();
    println!("unread: {kept} of {} bytes are kept; {}", mib * MIB, finished.stderr().trim());
    assert!(kept > 8 * MIB && kept < 17 * MIB, "{kept}");
    // What is kept is the end, and what is missing is said.
    let whole = kept / MIB;
    let end = &finished.bytes()[kept - whole * MIB..];
    assert_eq!(blake3::hash(end), Blocks::new().hash(mib - whole, mib));
    let missing = (mib * MIB - kept).to_string();
    assert!(finished.stderr().contains(&missing), "{missing} is not in: {}", finished.stderr());
}
