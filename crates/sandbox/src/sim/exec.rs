//! One simulated exec: its program, its standard input, and its output in a bounded spool.
//!
//! [`SimExec::pump`] runs the program until it waits for something: time, input, or a reader. With readers attached, output
//! waits for the slowest as soon as the spool is full; without any, the oldest bytes go, as on a real host.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use cloister_types::exec::{ExecRecord, OUTPUT_FRAME_MAX_BYTES, TerminalSize};
use cloister_types::{ExecSpec, Exit, ExitReason, Limits, OutputFrame, OutputStream};

use super::program::Step;

/// Bytes of standard input that wait for the program, like a pipe's.
const INPUT_MAX_BYTES: usize = 64 * 1024;
/// What a terminal takes for Ctrl-C and Ctrl-D.
const INTERRUPT: u8 = 3;
pub(super) const END_OF_INPUT: u8 = 4;
const NO_TERMINAL: &str = "the exec was started without a terminal";
/// Bytes of memory that a simulated program has before it asks for more.
const BASE_MEMORY_BYTES: u64 = 1024 * 1024;
/// Processes of an exec besides its children.
const BASE_PROCESSES: u64 = 1;

/// What of the sandbox a program can see and change.
pub(super) struct World<'a> {
    pub(super) now: Duration,
    pub(super) limits: &'a Limits,
    pub(super) files: &'a mut BTreeMap<String, Vec<u8>>,
    /// Bytes of the layer that were taken without contents being kept.
    pub(super) filled: &'a mut BTreeMap<String, u64>,
    pub(super) spool_max_bytes: u64,
    /// Virtual time zero, in milliseconds since the Unix epoch.
    pub(super) epoch_unix_ms: u64,
}

impl World<'_> {
    fn free_bytes(&self) -> u64 {
        let kept: u64 = self.files.values().map(|data| u64::try_from(data.len()).unwrap_or(u64::MAX)).sum();
        let filled: u64 = self.filled.values().sum();
        self.limits.disk.0.saturating_sub(kept).saturating_sub(filled)
    }

    pub(super) fn unix_ms(&self) -> u64 {
        self.epoch_unix_ms + u64::try_from(self.now.as_millis()).unwrap_or(u64::MAX)
    }
}

/// What the next moment of an exec is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Timer {
    Step,
    Timeout,
    NoOutput,
}

#[derive(Debug)]
pub(super) struct SimExec {
    pub(super) record: ExecRecord,
    steps: VecDeque<Step>,
    sleeps_until: Option<Duration>,
    started: Duration,
    last_output: Duration,
    input: VecDeque<u8>,
    input_offset: u64,
    is_input_closed: bool,
    chunks: VecDeque<(u64, OutputStream, Vec<u8>)>,
    kept_from: u64,
    next_offset: u64,
    /// Position of each attached reader.
    readers: BTreeMap<u64, u64>,
    /// Of its terminal, by now.
    size: Option<TerminalSize>,
}

impl SimExec {
    pub(super) fn new(record: ExecRecord, steps: VecDeque<Step>, now: Duration) -> Self {
        let size = record.spec.terminal;
        let is_input_closed = !record.spec.has_stdin();
        Self {
            record,
            steps,
            sleeps_until: None,
            started: now,
            last_output: now,
            input: VecDeque::new(),
            input_offset: 0,
            is_input_closed,
            chunks: VecDeque::new(),
            kept_from: 0,
            next_offset: 0,
            readers: BTreeMap::new(),
            size,
        }
    }

    pub(super) fn has_ended(&self) -> bool {
        self.record.exit.is_some()
    }

    fn spec(&self) -> &ExecSpec {
        &self.record.spec
    }

    /// Returns when time alone changes something, and what.
    pub(super) fn next_timer(&self) -> Option<(Duration, Timer)> {
        if self.has_ended() {
            return None;
        }
        let step = self.sleeps_until.map(|at| (at, Timer::Step));
        let timeout = self.spec().timeout.map(|limit| (self.started + limit, Timer::Timeout));
        let silence = self.spec().no_output_timeout.map(|limit| (self.last_output + limit, Timer::NoOutput));
        [step, timeout, silence].into_iter().flatten().min_by_key(|(at, _)| *at)
    }

    pub(super) fn fire(&mut self, timer: Timer, world: &mut World<'_>) {
        let killed = |reason, message: String| (reason, 137, Some(9), message);
        let (reason, code, signal, message) = match timer {
            Timer::Step => {
                self.sleeps_until = None;
                self.steps.pop_front();
                return self.pump(world);
            }
            Timer::Timeout => killed(ExitReason::Timeout, "it ran longer than its timeout".to_owned()),
            Timer::NoOutput => {
                killed(ExitReason::NoOutputTimeout, "it printed nothing for longer than its limit".to_owned())
            }
        };
        self.end(reason, code, signal, message, world);
    }

    /// Runs the program until it ends or waits.
    pub(super) fn pump(&mut self, world: &mut World<'_>) {
        while !self.has_ended() && self.sleeps_until.is_none() {
            let Some(step) = self.steps.front().cloned() else {
                self.end(ExitReason::Exited, 0, None, String::new(), world);
                return;
            };
            if !self.run(step, world) {
                return;
            }
        }
    }

    /// Runs a part of the first step; returns whether it makes sense to go on now.
    fn run(&mut self, step: Step, world: &mut World<'_>) -> bool {
        match step {
            Step::Write(stream, data) => {
                let room = self.room(world).min(data.len());
                self.print(stream, &data[..room], world);
                if room < data.len() {
                    self.steps[0] = Step::Write(stream, data[room..].to_vec());
                    return false;
                }
            }
            Step::Count { mut next, last } => {
                let mut block = Vec::new();
                let room = self.room(world).min(OUTPUT_FRAME_MAX_BYTES);
                while next <= last && block.len() + 21 <= room {
                    block.extend_from_slice(format!("{next}\n").as_bytes());
                    next += 1;
                }
                if block.is_empty() && next <= last {
                    return false;
                }
                self.print(OutputStream::Stdout, &block, world);
                if next <= last {
                    self.steps[0] = Step::Count { next, last };
                    return true;
                }
            }
            Step::CopyInput => {
                let room = self.room(world).min(self.input.len());
                let data: Vec<u8> = self.input.drain(..room).collect();
                self.print(OutputStream::Stdout, &data, world);
                if !self.input.is_empty() || !self.is_input_closed {
                    return false;
                }
            }
            Step::ReadLine => match self.input.iter().position(|byte| *byte == b'\n') {
                Some(end) => drop(self.input.drain(..=end)),
                None if self.is_input_closed => return self.fail(1, "", world),
                None => return false,
            },
            Step::CopyFile(path) => match world.files.get(&path).cloned() {
                Some(data) => return self.replace(Step::Write(OutputStream::Stdout, data)),
                None => return self.fail(1, &format!("{path}: No such file or directory"), world),
            },
            Step::PrintEnv(name) => match self.spec().env.get(&name).cloned() {
                Some(value) => {
                    return self
                        .replace(Step::Write(OutputStream::Stdout, format!("{value}\n").into_bytes()));
                }
                None => return self.fail(1, "", world),
            },
            Step::PrintDirectory => {
                let directory = self.spec().cwd.clone().unwrap_or_else(|| "/workspace".to_owned());
                return self
                    .replace(Step::Write(OutputStream::Stdout, format!("{directory}\n").into_bytes()));
            }
            Step::PrintUser => {
                let user = self.spec().user.clone().unwrap_or_else(|| "0".to_owned());
                return self.replace(Step::Write(OutputStream::Stdout, format!("{user}\n").into_bytes()));
            }
            Step::PrintSize => match self.size {
                Some(size) => {
                    let text = format!("{} {}\r\n", size.rows, size.columns);
                    return self.replace(Step::Write(OutputStream::Stdout, text.into_bytes()));
                }
                None => return self.fail(1, "standard input: Inappropriate ioctl for device", world),
            },
            Step::Sleep(time) => {
                self.sleeps_until = Some(world.now + time);
                return false;
            }
            Step::Burn(time) => {
                // A program has one thread: more than one processor does not help it.
                let millis = world.limits.cpus.0.clamp(1, 1000);
                self.sleeps_until = Some(world.now + time * 1000 / millis);
                return false;
            }
            Step::Signal(signal) => {
                self.end_by_signal(signal, world);
                return false;
            }
            Step::Exit(code) => {
                self.end(ExitReason::Exited, code, None, String::new(), world);
                return false;
            }
            Step::WriteFile(path, data) => {
                if u64::try_from(data.len()).unwrap_or(u64::MAX) > world.free_bytes() {
                    return self.fail(1, "No space left on device", world);
                }
                world.files.insert(path, data);
            }
            Step::FillFile(path) => {
                let free = world.free_bytes();
                *world.filled.entry(path).or_default() += free;
                return self.fail(1, "No space left on device", world);
            }
            Step::Allocate(bytes) => {
                if bytes.saturating_add(BASE_MEMORY_BYTES) > world.limits.memory.0 {
                    let message = format!("killed at the memory limit of {}", world.limits.memory);
                    self.end(ExitReason::OutOfMemory, 137, Some(9), message, world);
                    return false;
                }
            }
            Step::Fork(count) => {
                if count + BASE_PROCESSES > u64::from(world.limits.pids) {
                    self.print(OutputStream::Stderr, b"fork: Resource temporarily unavailable\n", world);
                    self.end(ExitReason::Exited, 1, None, String::new(), world);
                    if let Some(exit) = &mut self.record.exit {
                        exit.pids_limit_hit = true;
                    }
                    return false;
                }
            }
            Step::Connect => return self.fail(1, "connect: Network is unreachable", world),
        }
        self.steps.pop_front();
        true
    }

    fn replace(&mut self, step: Step) -> bool {
        self.steps[0] = step;
        true
    }

    fn fail(&mut self, code: i32, message: &str, world: &mut World<'_>) -> bool {
        if !message.is_empty() {
            self.print(OutputStream::Stderr, format!("{message}\n").as_bytes(), world);
        }
        self.end(ExitReason::Exited, code, None, String::new(), world);
        false
    }

    pub(super) fn end_by_signal(&mut self, signal: i32, world: &mut World<'_>) {
        let message = format!("killed by signal {signal}");
        self.end(ExitReason::Signaled, 128 + signal, Some(signal), message, world);
    }

    pub(super) fn end(
        &mut self,
        reason: ExitReason,
        code: i32,
        signal: Option<i32>,
        message: String,
        world: &World<'_>,
    ) {
        if self.has_ended() {
            return;
        }
        self.steps.clear();
        self.sleeps_until = None;
        self.record.exit = Some(Exit {
            reason,
            code,
            signal,
            message,
            output_bytes: self.next_offset,
            exited_unix_ms: world.unix_ms(),
            pids_limit_hit: false,
            memory_limit_hit: reason == ExitReason::OutOfMemory,
            output_lost: false,
            disk_error: false,
            disk_full: (reason != ExitReason::Exited || code != 0) && world.free_bytes() == 0,
        });
    }

    /// Ends an exec that would be one process too many.
    pub(super) fn turn_back(&mut self, world: &World<'_>) {
        let message = "the sandbox has as many processes as it may".to_owned();
        self.record.pid = 0;
        self.end(ExitReason::NotStarted, 126, None, message, world);
        if let Some(exit) = &mut self.record.exit {
            exit.pids_limit_hit = true;
        }
    }

    /// Returns how many bytes may be printed now.
    fn room(&self, world: &World<'_>) -> usize {
        match self.readers.values().min() {
            None => usize::MAX,
            Some(slowest) => {
                let ahead = self.next_offset.saturating_sub(*slowest);
                usize::try_from(world.spool_max_bytes.saturating_sub(ahead)).unwrap_or(usize::MAX)
            }
        }
    }

    fn print(&mut self, stream: OutputStream, data: &[u8], world: &World<'_>) {
        // A terminal is one stream.
        let stream = if self.size.is_some() { OutputStream::Stdout } else { stream };
        for piece in data.chunks(OUTPUT_FRAME_MAX_BYTES) {
            self.chunks.push_back((self.next_offset, stream, piece.to_vec()));
            self.next_offset += u64::try_from(piece.len()).unwrap_or(u64::MAX);
            self.last_output = world.now;
        }
        while self.next_offset - self.kept_from > world.spool_max_bytes {
            let Some((offset, _, dropped)) = self.chunks.pop_front() else { break };
            self.kept_from = offset + u64::try_from(dropped.len()).unwrap_or(u64::MAX);
        }
    }

    /// Takes bytes of standard input from `offset` on; returns the next offset that is wanted, or why not.
    pub(super) fn take_input(&mut self, offset: u64, data: &[u8], eof: bool) -> Result<u64, String> {
        let end = offset.saturating_add(u64::try_from(data.len()).unwrap_or(u64::MAX));
        if offset > self.input_offset {
            return Err(format!("standard input has a hole: {offset} follows {}", self.input_offset));
        }
        if self.is_input_closed || self.has_ended() {
            // A repetition of what was taken before is no error.
            return if end <= self.input_offset && self.spec().has_stdin() {
                Ok(self.input_offset)
            } else {
                Err("standard input is closed".to_owned())
            };
        }
        let skip = usize::try_from(self.input_offset - offset).unwrap_or(usize::MAX).min(data.len());
        let fresh = &data[skip..];
        let taken = fresh.len().min(INPUT_MAX_BYTES.saturating_sub(self.input.len()));
        self.input.extend(&fresh[..taken]);
        self.input_offset += u64::try_from(taken).unwrap_or(u64::MAX);
        if eof && taken == fresh.len() {
            self.is_input_closed = true;
        }
        Ok(self.input_offset)
    }

    /// Types into the terminal: Ctrl-C interrupts, Ctrl-D ends the input. Returns how many bytes were taken.
    pub(super) fn type_input(&mut self, data: &[u8], world: &mut World<'_>) -> Result<usize, String> {
        if self.spec().terminal.is_none() {
            return Err(NO_TERMINAL.to_owned());
        }
        if self.is_input_closed || self.has_ended() {
            return Err("standard input is closed".to_owned());
        }
        for (count, byte) in data.iter().enumerate() {
            match *byte {
                INTERRUPT => self.end_by_signal(2, world),
                END_OF_INPUT => self.is_input_closed = true,
                _ if self.input.len() >= INPUT_MAX_BYTES => return Ok(count),
                byte => {
                    self.input.push_back(byte);
                    self.input_offset += 1;
                }
            }
            if self.is_input_closed || self.has_ended() {
                break;
            }
        }
        // What follows an end has no reader.
        Ok(data.len())
    }

    /// Gives the terminal another size.
    pub(super) fn resize(&mut self, size: TerminalSize) -> Result<(), String> {
        if self.record.spec.terminal.is_none() {
            return Err(NO_TERMINAL.to_owned());
        }
        self.size = Some(size);
        Ok(())
    }

    /// Returns whether some of more input would be taken now.
    pub(super) fn can_take_input(&self) -> bool {
        !self.is_input_closed && !self.has_ended() && self.input.len() < INPUT_MAX_BYTES
    }

    pub(super) fn attach(&mut self, reader: u64, position: u64) {
        self.readers.insert(reader, position.min(self.next_offset));
    }

    pub(super) fn detach(&mut self, reader: u64) {
        self.readers.remove(&reader);
    }

    /// Returns the next frame from `position` on, or `None` when a follower has to wait.
    pub(super) fn frame(&mut self, reader: u64, position: u64, is_following: bool) -> Option<OutputFrame> {
        if position < self.kept_from {
            return Some(OutputFrame::Gap { from: position, to: self.kept_from });
        }
        let found = self
            .chunks
            .iter()
            .find(|(offset, _, data)| position < offset + u64::try_from(data.len()).unwrap_or(u64::MAX));
        if let Some((offset, stream, data)) = found {
            let skip = usize::try_from(position - offset).unwrap_or(0);
            let frame = OutputFrame::Data { stream: *stream, offset: position, data: data[skip..].to_vec() };
            if self.readers.contains_key(&reader) {
                self.readers.insert(reader, offset + u64::try_from(data.len()).unwrap_or(u64::MAX));
            }
            return Some(frame);
        }
        match &self.record.exit {
            Some(exit) => Some(OutputFrame::Exit(exit.clone())),
            None if is_following => None,
            None => Some(OutputFrame::End { next_offset: self.next_offset }),
        }
    }
}
