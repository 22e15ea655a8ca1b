//! What every backend must do, one function a claim of DESIGN §7.
//!
//! [`CASES`] names them; a backend's test runs each against a [`Subject`] of its own. The suite asks for programs by what
//! they do ([`Program`]) and each subject says how that is spelt, since the simulated backend has no shell. Time-outs are
//! provoked through [`Subject::elapse`], which moves a virtual clock and does nothing on a real one. Nothing here
//! sleeps: it waits for what must happen, at most [`PATIENCE`].
//!
//! The matrix of cases and backends is in `docs/reference/backends.md`; a test compares its names with [`CASES`].

mod channel;
mod exec;
mod life;
mod limits;
mod output;
mod program;
mod terminal;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use cloister_types::exec::ExecRecord;
use cloister_types::{
    BackendKind, ByteCount, CpuMillis, ExecId, ExecSpec, Exit, Limits, OutputFrame, OutputStream, SandboxId,
    SessionId,
};

pub use program::{Program, real_argv, sim_argv};

use crate::backend::{Backend, HostPaths, OutputReader, Sandbox, SandboxSpec};
use crate::intent::{INTENT_FILE, Intent, read_record};
use crate::layout;

/// How long anything may take before the case fails with what it waited for.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A backend under test.
#[async_trait]
pub trait Subject: Send + Sync {
    /// Returns the backend.
    fn backend(&self) -> Arc<dyn Backend>;

    /// Returns how its sandboxes are isolated.
    fn kind(&self) -> BackendKind;

    /// Returns another backend on the same data, as a host agent has after a restart.
    fn second_backend(&self) -> Arc<dyn Backend>;

    /// Returns the command line of a program.
    fn argv(&self, program: &Program) -> Vec<String>;

    /// Returns the time that a sandbox has had on processors, counted outside of it; `None` where it has none.
    fn cpu_time(&self, sandbox_id: &SandboxId) -> Option<Duration>;

    /// Lets this much time pass for the sandboxes, where time does not pass by itself.
    async fn elapse(&self, time: Duration);

    /// Returns whether an exec is told that a fork of its programs met the limit of processes. gVisor enforces that limit
    /// and counts nothing.
    fn counts_refused_forks(&self) -> bool {
        self.kind() != BackendKind::Gvisor
    }

    /// Returns whether a program that the kernel killed for its memory is seen to have been killed. On the gVisor of 2024 it
    /// exits with 1; that the limit was met is told all the same.
    fn sees_memory_kills(&self) -> bool {
        true
    }

    /// Returns how many bytes of output are kept for each exec.
    fn spool_max_bytes(&self) -> u64;
}

/// The future of one case.
pub type CaseFuture<'a> = Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

/// One claim: its name and the function that tries it.
#[derive(Clone, Copy)]
pub struct Case {
    /// Stable name, as in `docs/reference/backends.md`.
    pub name: &'static str,
    /// Panics with what is wrong.
    pub run: for<'a> fn(&'a dyn Subject) -> CaseFuture<'a>,
}

macro_rules! cases {
    ($($module:ident :: $name:ident,)*) => {
        /// Every case.
        pub const CASES: &[Case] = &[$(Case {
            name: stringify!($name),
            run: |subject| Box::pin($module::$name(subject)),
        },)*];
    };
}

cases! {
    life::create_reports_facts_and_timings,
    life::create_is_idempotent_for_an_equal_spec,
    life::create_with_another_spec_conflicts,
    life::unknown_image_and_wrong_limits_are_refused,
    life::a_backend_that_is_not_offered_is_refused,
    life::stop_keeps_the_layer_for_the_next_sandbox,
    life::stop_of_a_stopped_sandbox_succeeds,
    life::requests_to_a_stopped_sandbox_say_so,
    life::two_sessions_live_side_by_side,
    life::a_second_backend_adopts_a_running_sandbox,
    life::a_second_backend_reports_nothing_after_a_stop,
    life::how_a_sandbox_ended_is_kept_with_its_layer,
    life::remove_works_from_every_state,
    life::ended_execs_and_output_are_kept_after_a_stop,
    exec::exit_codes_arrive,
    exec::a_signal_is_reported_as_one,
    exec::a_program_that_is_missing_is_not_started,
    exec::a_spec_that_cannot_run_is_refused,
    exec::environment_directory_and_user_are_set,
    exec::an_exec_has_its_own_descriptors_only,
    exec::start_is_idempotent_by_request_id,
    exec::start_with_another_payload_conflicts,
    exec::execs_are_listed_oldest_first,
    exec::wait_returns_a_running_exec_at_its_deadline,
    exec::signals_reach_the_program,
    exec::a_number_that_is_no_signal_is_refused,
    exec::what_is_not_there_is_not_found,
    exec::timeout_ends_the_exec_and_keeps_its_output,
    exec::silence_timeout_ends_only_a_silent_exec,
    output::stdout_and_stderr_are_kept_apart,
    output::standard_input_arrives_whole_and_once,
    output::standard_input_with_a_hole_is_refused,
    output::another_handle_reads_on_from_an_offset,
    output::a_reader_that_does_not_follow_ends_at_the_newest_byte,
    output::every_stream_ends_with_the_exit,
    output::large_output_arrives_equal,
    output::an_attached_reader_loses_nothing_beyond_the_spool,
    output::without_a_reader_the_oldest_output_is_a_gap,
    output::a_lost_sandbox_ends_streams_with_an_exit,
    terminal::a_terminal_has_its_size_from_the_first_byte,
    terminal::a_terminal_is_one_stream_and_takes_what_several_type,
    terminal::a_new_size_reaches_the_program,
    terminal::ctrl_c_and_ctrl_d_are_typed,
    terminal::an_exec_without_a_terminal_has_none,
    channel::files_are_written_as_the_channels_user,
    channel::a_port_where_nobody_listens_is_closed,
    limits::memory_limit_is_reported_by_name,
    limits::the_sandbox_survives_the_work_running_out_of_memory,
    limits::process_limit_is_reported_by_name,
    limits::execs_count_for_the_process_limit,
    limits::full_disk_is_reported_by_name,
    limits::cpu_limit_slows_the_program,
    limits::network_is_refused_at_once,
}

/// Kills and removes every sandbox that a data directory's intents name, for the end of a test that failed half-way. It
/// asks no backend, since that may be what failed.
pub fn clean_up(paths: &HostPaths) {
    let deadline = Instant::now() + PATIENCE;
    for id in layout::ids_in::<SandboxId>(&paths.sandboxes_dir()).unwrap_or_default() {
        let Ok(Some(intent)) = read_record::<Intent>(&paths.sandbox_dir(&id).join(INTENT_FILE)) else {
            continue;
        };
        // Best effort, in a destructor: the test has failed already.
        let _ = intent.groups.kill_all(deadline);
        let _ = intent.groups.remove(deadline);
    }
}

/// Returns the time that the processes of a sandbox and those that they have waited for have had on processors so far, as
/// `/proc` has it.
///
/// # Panics
///
/// When there is no such sandbox or its groups cannot be read.
pub fn cpu_time(paths: &HostPaths, sandbox_id: &SandboxId) -> Duration {
    let file = paths.sandbox_dir(sandbox_id).join(INTENT_FILE);
    let intent = read_record::<Intent>(&file).expect("read the intent").expect("the sandbox has an intent");
    let base = &intent.groups.hierarchies.first().expect("a hierarchy").base;
    let members = |group: &str| {
        std::fs::read_to_string(base.join(group).join("cgroup.procs")).expect("read the group's processes")
    };
    let ticks: u64 = (members("agent") + &members("work")).lines().map(ticks_of).sum();
    // Ticks of a hundredth of a second, see proc(5).
    Duration::from_millis(ticks * 10)
}

/// Returns `utime`, `stime`, `cutime` and `cstime` of a process together; nothing of one that is gone.
fn ticks_of(pid: &str) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name, which may hold anything, ends with the last `)`.
    let fields = stat.rsplit(')').next().unwrap_or_default();
    fields.split_whitespace().skip(11).take(4).filter_map(|field| field.parse::<u64>().ok()).sum()
}

/// A session with one sandbox, made by a case.
pub(crate) struct Fixture<'a> {
    pub(crate) subject: &'a dyn Subject,
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) sandbox: Arc<dyn Sandbox>,
    pub(crate) spec: SandboxSpec,
}

pub(crate) fn small_limits() -> Limits {
    Limits { memory: ByteCount::mib(64), cpus: CpuMillis(1000), pids: 64, disk: ByteCount::mib(32) }
}

pub(crate) fn sandbox_spec(subject: &dyn Subject, limits: Limits) -> SandboxSpec {
    SandboxSpec {
        session_id: SessionId::generate(),
        sandbox_id: SandboxId::generate(),
        backend: subject.kind(),
        image: "host".to_owned(),
        limits,
        hostname: "sandbox".to_owned(),
    }
}

/// Waits for a future, or fails the case with what it waited for.
pub(crate) async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, future).await {
        Ok(value) => value,
        Err(_) => panic!("waited {} s for {what}", PATIENCE.as_secs()),
    }
}

impl<'a> Fixture<'a> {
    pub(crate) async fn new(subject: &'a dyn Subject) -> Self {
        Self::with_limits(subject, small_limits()).await
    }

    pub(crate) async fn with_limits(subject: &'a dyn Subject, limits: Limits) -> Self {
        let backend = subject.backend();
        let spec = sandbox_spec(subject, limits);
        let created = within("a sandbox", backend.create(&spec)).await.expect("create a sandbox");
        Self { subject, backend, sandbox: created.sandbox, spec }
    }

    pub(crate) fn exec_spec(&self, program: &Program) -> ExecSpec {
        ExecSpec { argv: self.subject.argv(program), ..ExecSpec::default() }
    }

    pub(crate) async fn start(&self, program: &Program) -> ExecId {
        self.start_spec(self.exec_spec(program)).await
    }

    pub(crate) async fn start_spec(&self, spec: ExecSpec) -> ExecId {
        let exec_id = ExecId::generate();
        let started = self.sandbox.start_exec(&exec_id, exec_id.as_str(), &spec);
        within("an exec's start", started).await.expect("start an exec");
        exec_id
    }

    pub(crate) async fn wait(&self, exec_id: &ExecId) -> ExecRecord {
        let record = within("an exec's end", self.sandbox.wait_exec(exec_id, PATIENCE)).await;
        record.expect("wait for an exec")
    }

    pub(crate) async fn exit(&self, exec_id: &ExecId) -> Exit {
        self.wait(exec_id).await.exit.expect("the exec has ended")
    }

    /// Runs a program to its end; returns its exit and output.
    pub(crate) async fn run(&self, program: &Program) -> (Exit, Output) {
        self.run_spec(self.exec_spec(program)).await
    }

    pub(crate) async fn run_spec(&self, spec: ExecSpec) -> (Exit, Output) {
        let exec_id = self.start_spec(spec).await;
        let output = self.read(&exec_id, 0).await;
        (output.exit.clone().expect("a followed stream ends with an exit"), output)
    }

    pub(crate) async fn read(&self, exec_id: &ExecId, from_offset: u64) -> Output {
        let reader = self.sandbox.read_output(exec_id, from_offset, false).await.expect("read output");
        Output::collect(reader, from_offset).await
    }

    /// Removes the session, which proves that it can be.
    pub(crate) async fn end(self) {
        within("the session's removal", self.backend.remove(&self.spec.session_id))
            .await
            .expect("remove a session");
        let left = self.backend.sessions().await.expect("list sessions");
        assert!(left.iter().all(|(id, _)| *id != self.spec.session_id), "a removed session is still listed");
    }
}

/// Everything that came out of an exec.
#[derive(Debug, Default)]
pub(crate) struct Output {
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
    pub(crate) gaps: Vec<(u64, u64)>,
    pub(crate) exit: Option<Exit>,
    pub(crate) next_offset: u64,
}

impl Output {
    /// Reads to the end and checks that offsets are contiguous.
    pub(crate) async fn collect(mut reader: Box<dyn OutputReader>, from_offset: u64) -> Self {
        let mut output = Self { next_offset: from_offset, ..Self::default() };
        while let Some(frame) = within("output", reader.next()).await.expect("read a frame") {
            output.add(frame);
        }
        output
    }

    pub(crate) fn add(&mut self, frame: OutputFrame) {
        assert!(self.exit.is_none(), "a frame came after the exit");
        match frame {
            OutputFrame::Data { stream, offset, data } => {
                assert_eq!(offset, self.next_offset, "a frame does not start where the last one ended");
                self.next_offset += u64::try_from(data.len()).expect("a frame is small");
                match stream {
                    OutputStream::Stdout => self.stdout.extend(data),
                    OutputStream::Stderr => self.stderr.extend(data),
                }
            }
            OutputFrame::Gap { from, to } => {
                assert_eq!(from, self.next_offset, "a gap does not start where the last frame ended");
                assert!(to > from, "a gap is empty");
                self.next_offset = to;
                self.gaps.push((from, to));
            }
            OutputFrame::Exit(exit) => self.exit = Some(exit),
            OutputFrame::End { next_offset } => assert_eq!(next_offset, self.next_offset),
        }
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
}
