//! Proves that each backend does what `docs/reference/backends.md` says: every case on every backend.
#![cfg(debug_assertions)]
#![expect(clippy::print_stdout, reason = "a skipped test says so")]

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use cloister_sandbox::backend::{
    Created, Gone, KeptSession, OutputReader, Sandbox, SandboxError, SandboxSpec,
};
use cloister_sandbox::conformance::{CASES, Program, Subject, clean_up, cpu_time, real_argv, sim_argv};
use cloister_sandbox::local::{LocalBackend, LocalConfig, runsc};
use cloister_sandbox::sim::{SimBackend, SimMachine};
use cloister_sandbox::{Backend, HostPaths};
use cloister_types::exec::ExecRecord;
use cloister_types::{BackendKind, Capability, ExecId, SandboxId, SessionId};

const SPOOL_MAX_BYTES: u64 = 2 * 1024 * 1024;

struct SimSubject(SimMachine);

#[async_trait]
impl Subject for SimSubject {
    fn backend(&self) -> Arc<dyn Backend> {
        Arc::new(SimBackend::new(self.0.clone()))
    }

    fn kind(&self) -> BackendKind {
        BackendKind::Sim
    }

    fn second_backend(&self) -> Arc<dyn Backend> {
        self.backend()
    }

    fn argv(&self, program: &Program) -> Vec<String> {
        sim_argv(program)
    }

    fn cpu_time(&self, _sandbox_id: &SandboxId) -> Option<Duration> {
        None
    }

    async fn elapse(&self, time: Duration) {
        self.0.advance(time);
    }

    fn spool_max_bytes(&self) -> u64 {
        SPOOL_MAX_BYTES
    }
}

/// The ways in which this machine makes sandboxes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Local {
    Namespace,
    Warm,
    Gvisor,
    GvisorOfDebian,
}

impl Local {
    fn kind(self) -> BackendKind {
        match self {
            Self::Namespace | Self::Warm => BackendKind::Namespace,
            Self::Gvisor | Self::GvisorOfDebian => BackendKind::Gvisor,
        }
    }
}

struct LocalSubject {
    backend: LocalBackend,
    kind: BackendKind,
    config: LocalConfig,
    is_warm: bool,
    is_debian: bool,
    _directory: tempfile::TempDir,
}

impl LocalSubject {
    /// Returns a host of its own in a temporary directory; `None`, after saying so, where there can be none.
    fn new(subject: Local) -> Option<Self> {
        let kind = subject.kind();
        if !rustix::process::geteuid().is_root() {
            println!("SKIP: the {kind} backend needs root");
            return None;
        }
        let found = match subject {
            Local::Namespace | Local::Warm => Ok(None),
            Local::Gvisor => runsc::find(std::env::var_os("CLOISTER_RUNSC").as_deref())
                .map(Some)
                .ok_or("there is no `runsc` in PATH or CLOISTER_RUNSC: `just gvisor` builds one"),
            Local::GvisorOfDebian => std::env::var_os("CLOISTER_TEST_RUNSC_DEBIAN")
                .map(|path| Some(path.into()))
                .ok_or("CLOISTER_TEST_RUNSC_DEBIAN names no `runsc` of Debian; `./test` fetches one"),
        };
        let runsc = match found {
            Ok(runsc) => runsc,
            Err(reason) => {
                println!("SKIP: {reason}");
                return None;
            }
        };
        let is_warm = subject == Local::Warm;
        let directory = tempfile::tempdir().expect("make a temporary directory");
        let paths =
            HostPaths { data_dir: directory.path().join("data"), run_dir: directory.path().join("run") };
        let mut config = LocalConfig::new(paths);
        config.spool_max_bytes = SPOOL_MAX_BYTES;
        config.warm_sandboxes = usize::from(is_warm);
        config.runsc = runsc;
        let backend = LocalBackend::open(config.clone()).expect("open the backend");
        let is_debian = subject == Local::GvisorOfDebian;
        Some(Self { backend, kind, config, is_warm, is_debian, _directory: directory })
    }
}

impl Drop for LocalSubject {
    fn drop(&mut self) {
        clean_up(&self.config.paths);
    }
}

#[async_trait]
impl Subject for LocalSubject {
    fn backend(&self) -> Arc<dyn Backend> {
        let inner = self.backend.clone();
        if self.is_warm { Arc::new(Warm { inner }) } else { Arc::new(inner) }
    }

    fn kind(&self) -> BackendKind {
        self.kind
    }

    fn second_backend(&self) -> Arc<dyn Backend> {
        Arc::new(LocalBackend::open(self.config.clone()).expect("open a second backend"))
    }

    fn argv(&self, program: &Program) -> Vec<String> {
        real_argv(program)
    }

    fn sees_memory_kills(&self) -> bool {
        !self.is_debian
    }

    fn cpu_time(&self, sandbox_id: &SandboxId) -> Option<Duration> {
        Some(cpu_time(&self.config.paths, sandbox_id))
    }

    async fn elapse(&self, _time: Duration) {}

    fn spool_max_bytes(&self) -> u64 {
        SPOOL_MAX_BYTES
    }
}

/// A host that has a sandbox ready before each is asked for.
struct Warm {
    inner: LocalBackend,
}

#[async_trait]
impl Backend for Warm {
    fn kinds(&self) -> Vec<BackendKind> {
        self.inner.kinds()
    }

    async fn probe(&self, kind: BackendKind) -> Vec<Capability> {
        self.inner.probe(kind).await
    }

    async fn create(&self, spec: &SandboxSpec) -> Result<Created, SandboxError> {
        // A session that has a layer takes none.
        let is_new = self.inner.sessions().await?.iter().all(|(session, _)| *session != spec.session_id);
        let is_made = is_new
            && spec.limits.validate().is_ok()
            && spec.image == "host"
            && spec.backend == BackendKind::Namespace;
        if is_made {
            self.inner.warm_for(spec.limits.disk);
            self.inner.make_warm().await?;
        }
        let created = self.inner.create(spec).await?;
        let steps: Vec<&str> = created.timings.iter().map(|timing| timing.step.as_str()).collect();
        assert!(!is_made || steps.contains(&"claim"), "the ready sandbox was not taken: {steps:?}");
        Ok(created)
    }

    async fn adopt(&self) -> Result<(Vec<Arc<dyn Sandbox>>, Vec<Gone>), SandboxError> {
        self.inner.adopt().await
    }

    async fn remove(&self, session_id: &SessionId) -> Result<(), SandboxError> {
        self.inner.remove(session_id).await
    }

    async fn sessions(&self) -> Result<Vec<(SessionId, Option<Arc<dyn Sandbox>>)>, SandboxError> {
        self.inner.sessions().await
    }

    async fn kept_session(&self, session_id: &SessionId) -> Result<Option<KeptSession>, SandboxError> {
        self.inner.kept_session(session_id).await
    }

    async fn ended_execs(&self, session_id: &SessionId) -> Result<Vec<ExecRecord>, SandboxError> {
        self.inner.ended_execs(session_id).await
    }

    async fn ended_output(
        &self,
        session_id: &SessionId,
        exec_id: &ExecId,
        from_offset: u64,
    ) -> Result<Box<dyn OutputReader>, SandboxError> {
        self.inner.ended_output(session_id, exec_id, from_offset).await
    }
}

async fn on_sim(name: &str) {
    let machine = SimMachine::new();
    machine.set_spool_max_bytes(SPOOL_MAX_BYTES);
    run(name, &SimSubject(machine)).await;
}

async fn on_local(name: &str, subject: Local) {
    if let Some(subject) = LocalSubject::new(subject) {
        run(name, &subject).await;
    }
}

async fn run(name: &str, subject: &dyn Subject) {
    let case = CASES.iter().find(|case| case.name == name).expect("the case is in the list");
    (case.run)(subject).await;
}

macro_rules! cases {
    ($($name:ident,)*) => {
        mod sim {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                super::on_sim(stringify!($name)).await;
            })*
        }

        mod namespace {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                super::on_local(stringify!($name), super::Local::Namespace).await;
            })*
        }

        mod gvisor {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                super::on_local(stringify!($name), super::Local::Gvisor).await;
            })*
        }

        mod gvisor_of_debian {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                super::on_local(stringify!($name), super::Local::GvisorOfDebian).await;
            })*
        }

        mod warm {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                super::on_local(stringify!($name), super::Local::Warm).await;
            })*
        }

        #[test]
        fn every_case_is_run() {
            let listed: Vec<&str> = CASES.iter().map(|case| case.name).collect();
            assert_eq!(listed, [$(stringify!($name),)*]);
        }
    };
}

cases! {
    create_reports_facts_and_timings,
    create_is_idempotent_for_an_equal_spec,
    create_with_another_spec_conflicts,
    unknown_image_and_wrong_limits_are_refused,
    a_backend_that_is_not_offered_is_refused,
    stop_keeps_the_layer_for_the_next_sandbox,
    stop_of_a_stopped_sandbox_succeeds,
    requests_to_a_stopped_sandbox_say_so,
    two_sessions_live_side_by_side,
    a_second_backend_adopts_a_running_sandbox,
    a_second_backend_reports_nothing_after_a_stop,
    how_a_sandbox_ended_is_kept_with_its_layer,
    remove_works_from_every_state,
    ended_execs_and_output_are_kept_after_a_stop,
    exit_codes_arrive,
    a_signal_is_reported_as_one,
    a_program_that_is_missing_is_not_started,
    a_spec_that_cannot_run_is_refused,
    environment_directory_and_user_are_set,
    an_exec_has_its_own_descriptors_only,
    start_is_idempotent_by_request_id,
    start_with_another_payload_conflicts,
    execs_are_listed_oldest_first,
    wait_returns_a_running_exec_at_its_deadline,
    signals_reach_the_program,
    a_number_that_is_no_signal_is_refused,
    what_is_not_there_is_not_found,
    timeout_ends_the_exec_and_keeps_its_output,
    silence_timeout_ends_only_a_silent_exec,
    stdout_and_stderr_are_kept_apart,
    standard_input_arrives_whole_and_once,
    standard_input_with_a_hole_is_refused,
    another_handle_reads_on_from_an_offset,
    a_reader_that_does_not_follow_ends_at_the_newest_byte,
    every_stream_ends_with_the_exit,
    large_output_arrives_equal,
    an_attached_reader_loses_nothing_beyond_the_spool,
    without_a_reader_the_oldest_output_is_a_gap,
    a_lost_sandbox_ends_streams_with_an_exit,
    a_terminal_has_its_size_from_the_first_byte,
    a_terminal_is_one_stream_and_takes_what_several_type,
    a_new_size_reaches_the_program,
    ctrl_c_and_ctrl_d_are_typed,
    an_exec_without_a_terminal_has_none,
    files_are_written_as_the_channels_user,
    a_port_where_nobody_listens_is_closed,
    memory_limit_is_reported_by_name,
    the_sandbox_survives_the_work_running_out_of_memory,
    process_limit_is_reported_by_name,
    execs_count_for_the_process_limit,
    full_disk_is_reported_by_name,
    cpu_limit_slows_the_program,
    network_is_refused_at_once,
}

#[test]
fn the_matrix_in_the_docs_names_every_case() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/backends.md");
    let text = std::fs::read_to_string(path).expect("read docs/reference/backends.md");
    let rows: Vec<&str> =
        text.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next()).collect();
    let cases: Vec<&str> = CASES.iter().map(|case| case.name).collect();
    assert_eq!(rows, cases);
}
