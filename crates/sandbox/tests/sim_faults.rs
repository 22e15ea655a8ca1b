//! Proves that each fault switch of the `sim` backend gives the typed error that a real backend's failure gives, and
//! leaves nothing behind once it is off.

use std::sync::Arc;
use std::time::Duration;

use chrono::TimeDelta;
use cloister_sandbox::sim::{CREATE_STEPS, SimBackend, SimMachine};
use cloister_sandbox::{Backend, Sandbox, SandboxError, SandboxSpec};
use cloister_types::session::Reason;
use cloister_types::{
    BackendKind, Clock, ExecId, ExecSpec, ExitReason, Limits, OutputFrame, SandboxId, SessionId,
};

fn spec() -> SandboxSpec {
    SandboxSpec {
        session_id: SessionId::generate(),
        sandbox_id: SandboxId::generate(),
        backend: BackendKind::Sim,
        image: "host".to_owned(),
        limits: Limits::DEFAULT,
        hostname: "sim".to_owned(),
    }
}

async fn sandbox(backend: &SimBackend) -> Arc<dyn Sandbox> {
    backend.create(&spec()).await.expect("create").sandbox
}

async fn start(sandbox: &dyn Sandbox, line: &str) -> ExecId {
    let exec_id = ExecId::generate();
    let spec = ExecSpec { argv: line.split(' ').map(str::to_owned).collect(), ..ExecSpec::default() };
    sandbox.start_exec(&exec_id, exec_id.as_str(), &spec).await.expect("start");
    exec_id
}

#[tokio::test]
async fn create_fails_at_every_step_and_leaves_no_session() {
    let machine = SimMachine::new();
    let backend = SimBackend::new(machine.clone());
    for step in CREATE_STEPS {
        machine.set_faults(|faults| faults.fail_create_at = Some(step.to_owned()));
        let Err(error) = backend.create(&spec()).await else { panic!("step {step} did not fail") };
        assert!(
            matches!(&error, SandboxError::Failed { operation, .. } if operation.contains(step)),
            "{error}"
        );
        assert!(error.is_retryable());
    }
    machine.set_faults(|faults| faults.fail_create_at = None);
    assert!(backend.sessions().await.expect("list").is_empty());
    sandbox(&backend).await;
}

#[tokio::test]
async fn a_used_up_resource_is_named() {
    let machine = SimMachine::new();
    let backend = SimBackend::new(machine.clone());
    machine.set_faults(|faults| faults.exhausted = Some("loop devices".to_owned()));
    let Err(error) = backend.create(&spec()).await else { panic!("it was not exhausted") };
    assert_eq!(error.to_string(), "the host has no loop devices left");
}

#[tokio::test]
async fn a_slow_create_takes_virtual_time_and_no_real_one() {
    let machine = SimMachine::new();
    let backend = SimBackend::new(machine.clone());
    machine.set_faults(|faults| faults.slow_create = Duration::from_secs(3600));
    let before = machine.now();
    let wanted = spec();
    let (created, ()) = tokio::join!(backend.create(&wanted), async {
        assert!(backend.sessions().await.expect("list").is_empty(), "it is there before its time");
        machine.advance(Duration::from_secs(3599));
        assert!(backend.sessions().await.expect("list").is_empty(), "it is there before its time");
        machine.advance(Duration::from_secs(1));
    });
    assert_eq!(*created.expect("create").sandbox.spec(), wanted);
    assert_eq!(machine.now() - before, TimeDelta::hours(1));
}

#[tokio::test]
async fn a_lost_sandbox_ends_its_execs_and_says_why_once() {
    let machine = SimMachine::new();
    let backend = SimBackend::new(machine.clone());
    let lost = sandbox(&backend).await;
    let exec_id = start(lost.as_ref(), "echo words && sleep 600").await;
    let session_id = lost.spec().session_id.clone();
    assert!(machine.lose_sandbox(&session_id, Reason::OutOfMemory, "pid 1 was killed for its memory"));
    assert!(!machine.lose_sandbox(&session_id, Reason::OutOfMemory, "again"));
    let refused = lost.exec(&exec_id).await;
    assert!(matches!(refused, Err(SandboxError::NotRunning(_))), "{refused:?}");
    let execs = backend.ended_execs(&session_id).await.expect("list");
    assert_eq!(execs[0].exit.as_ref().map(|exit| exit.reason), Some(ExitReason::SandboxGone));
    // A backend that comes later is told; the next one is not told again.
    let (running, gone) = SimBackend::new(machine.clone()).adopt().await.expect("adopt");
    assert!(running.is_empty());
    assert_eq!((gone.len(), gone[0].reason), (1, Reason::OutOfMemory));
    assert_eq!(SimBackend::new(machine).adopt().await.expect("adopt").1, []);
    assert_eq!(lost.wait_gone().await.reason, Reason::OutOfMemory);
}

#[tokio::test]
async fn a_reboot_ends_every_sandbox_and_keeps_every_session() {
    let machine = SimMachine::new();
    let backend = SimBackend::new(machine.clone());
    let sandboxes = [sandbox(&backend).await, sandbox(&backend).await];
    machine.reboot();
    for one in sandboxes {
        assert_eq!(one.wait_gone().await.reason, Reason::HostRebooted);
    }
    let sessions = backend.sessions().await.expect("list");
    assert_eq!(sessions.len(), 2);
    assert!(sessions.iter().all(|(_, running)| running.is_none()));
}

#[tokio::test]
async fn a_cut_stream_is_an_error_and_reading_goes_on() {
    let machine = SimMachine::new();
    let backend = SimBackend::new(machine.clone());
    let one = sandbox(&backend).await;
    let exec_id = start(one.as_ref(), "echo a && echo b").await;
    machine.set_faults(|faults| faults.cut_output_after_frames = Some(1));
    let mut reader = one.read_output(&exec_id, 0, false).await.expect("read");
    assert!(matches!(reader.next().await, Ok(Some(OutputFrame::Data { offset: 0, .. }))));
    assert!(matches!(reader.next().await, Err(SandboxError::Failed { .. })));
    machine.set_faults(|faults| faults.cut_output_after_frames = None);
    let mut reader = one.read_output(&exec_id, 2, false).await.expect("read on");
    assert!(matches!(reader.next().await, Ok(Some(OutputFrame::Data { offset: 2, .. }))));
    assert!(matches!(reader.next().await, Ok(Some(OutputFrame::Exit(exit))) if exit.code == 0));
}

#[tokio::test]
async fn stop_remove_and_probe_fail_when_told_to() {
    let machine = SimMachine::new();
    let backend = SimBackend::new(machine.clone());
    let one = sandbox(&backend).await;
    machine
        .set_faults(|faults| (faults.fail_stop, faults.fail_remove, faults.fail_probe) = (true, true, true));
    assert!(one.stop(Duration::ZERO).await.is_err());
    assert!(backend.remove(&one.spec().session_id).await.is_err());
    let probe = backend.probe(BackendKind::Sim).await;
    assert!(!probe[0].is_ok() && !probe[0].remedy.is_empty());
    machine.set_faults(|faults| {
        (faults.fail_stop, faults.fail_remove, faults.fail_probe) = (false, false, false)
    });
    one.stop(Duration::ZERO).await.expect("stop");
    backend.remove(&one.spec().session_id).await.expect("remove");
    assert!(backend.probe(BackendKind::Sim).await[0].is_ok());
}
