//! What processes take in memory while something runs: sampled, and at the end by the kernel's own high-water mark.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Time between two samples.
const INTERVAL: Duration = Duration::from_millis(50);

/// A process to look at.
#[derive(Debug, Clone)]
pub(crate) struct Process {
    /// What it is, for people.
    pub(crate) name: &'static str,
    /// Its process id.
    pub(crate) pid: i32,
    /// Whether it may end before the watch does.
    pub(crate) may_end: bool,
}

/// What one process took.
#[derive(Debug, Clone)]
pub(crate) struct Usage {
    pub(crate) name: &'static str,
    /// Resident before, in KiB.
    pub(crate) before_kib: u64,
    /// Most that was resident at any moment, in KiB: the kernel's mark, which misses nothing between two samples.
    pub(crate) peak_kib: u64,
    /// Proportional set size before and its highest sample, in KiB.
    pub(crate) pss_kib: (u64, u64),
    /// How many samples there are.
    pub(crate) samples: u32,
}

impl Usage {
    /// Returns by how much it grew at most, in KiB.
    pub(crate) fn growth_kib(&self) -> u64 {
        self.peak_kib.saturating_sub(self.before_kib)
    }
}

/// Samples processes until it is stopped.
pub(crate) struct MemoryWatch {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Vec<Usage>>,
}

impl MemoryWatch {
    /// Starts to watch; the processes' high-water marks are set back to what they have now.
    pub(crate) fn start(processes: Vec<Process>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let should_stop = Arc::clone(&stop);
        let mut usages: Vec<Usage> = processes.iter().map(begin).collect();
        let thread = std::thread::spawn(move || {
            while !should_stop.load(Ordering::Acquire) {
                for (process, usage) in processes.iter().zip(&mut usages) {
                    sample(process, usage);
                }
                std::thread::sleep(INTERVAL);
            }
            for (process, usage) in processes.iter().zip(&mut usages) {
                assert!(sample(process, usage) || process.may_end, "the {} has gone", process.name);
            }
            usages
        });
        Self { stop, thread }
    }

    /// Stops, prints what each process took, and returns it.
    ///
    /// # Panics
    ///
    /// When a process that may not end has gone: what restarts forgets what it took.
    pub(crate) fn stop(self, what: &str) -> Vec<Usage> {
        self.stop.store(true, Ordering::Release);
        let usages = self.thread.join().unwrap();
        for usage in &usages {
            println!(
                "{what}: {:<12} {:>6} KiB before, {:>6} at most (+{}); proportional {} to {}; {} samples",
                usage.name,
                usage.before_kib,
                usage.peak_kib,
                usage.growth_kib(),
                usage.pss_kib.0,
                usage.pss_kib.1,
                usage.samples
            );
        }
        usages
    }
}

fn begin(process: &Process) -> Usage {
    // "To reset the peak resident set size to the process's current value" (proc(5), clear_refs).
    fs::write(format!("/proc/{}/clear_refs", process.pid), "5").unwrap();
    let read = |file, name| field(process, file, name).expect("it runs");
    let pss_kib = read("smaps_rollup", "Pss:");
    Usage {
        name: process.name,
        before_kib: read("status", "VmRSS:"),
        peak_kib: 0,
        pss_kib: (pss_kib, pss_kib),
        samples: 0,
    }
}

/// Adds a sample; returns whether the process still runs.
fn sample(process: &Process, usage: &mut Usage) -> bool {
    let peak = field(process, "status", "VmHWM:");
    let pss = field(process, "smaps_rollup", "Pss:");
    let (Some(peak), Some(pss)) = (peak, pss) else { return false };
    usage.peak_kib = usage.peak_kib.max(peak);
    usage.pss_kib.1 = usage.pss_kib.1.max(pss);
    usage.samples += 1;
    true
}

/// Returns a figure in KiB of one of the process's files in `/proc`; `None` of a process that has ended.
fn field(process: &Process, file: &str, name: &str) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{}/{file}", process.pid)).ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_whitespace().nth(1)?.parse().unwrap())
}
