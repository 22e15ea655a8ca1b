//! Limits that hold, each reported by its name.

use std::time::{Duration, Instant};

use cloister_types::{ByteCount, CpuMillis, Exit, ExitReason, Limits};

use super::{Fixture, Program, Subject, small_limits};

pub(super) async fn memory_limit_is_reported_by_name(subject: &dyn Subject) {
    let fixture = Fixture::new(subject).await;
    let (exit, _) = fixture.run(&Program::Allocate(ByteCount::mib(256).0)).await;
    assert_memory_kill(subject, &exit);
    fixture.end().await;
}

fn assert_memory_kill(subject: &dyn Subject, exit: &Exit) {
    assert!(exit.memory_limit_hit, "{exit:?}");
    if subject.sees_memory_kills() {
        assert_eq!((exit.reason, exit.code), (ExitReason::OutOfMemory, 137), "{exit:?}");
        assert!(!exit.message.is_empty());
    } else {
        assert_eq!((exit.reason, exit.code), (ExitReason::Exited, 1), "{exit:?}");
    }
}

pub(super) async fn the_sandbox_survives_the_work_running_out_of_memory(subject: &dyn Subject) {
    let fixture = Fixture::new(subject).await;
    let bystander = fixture.start(&Program::Sleep(600)).await;
    for _ in 0..2 {
        let (exit, _) = fixture.run(&Program::Allocate(ByteCount::mib(256).0)).await;
        assert_memory_kill(subject, &exit);
    }
    let (exit, output) = fixture.run(&Program::Echo("alive".to_owned())).await;
    assert!(!exit.memory_limit_hit, "the next exec is told of an earlier one's limit");
    assert_eq!((exit.reason, output.text().as_str()), (ExitReason::Exited, "alive\n"));
    // The largest process goes, not any.
    assert_eq!(fixture.sandbox.exec(&bystander).await.expect("look").exit, None);
    fixture.end().await;
}

pub(super) async fn process_limit_is_reported_by_name(subject: &dyn Subject) {
    let fixture = Fixture::with_limits(subject, Limits { pids: 16, ..small_limits() }).await;
    let (exit, output) = fixture.run(&Program::Fork(256)).await;
    assert_eq!((exit.code, exit.pids_limit_hit), (1, subject.counts_refused_forks()), "{exit:?}");
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(message.contains("Resource temporarily unavailable"), "{message}");
    let (exit, _) = fixture.run(&Program::Fork(4)).await;
    assert_eq!(
        (exit.code, exit.pids_limit_hit),
        (0, false),
        "the next exec is told of an earlier one's limit"
    );
    fixture.end().await;
}

pub(super) async fn execs_count_for_the_process_limit(subject: &dyn Subject) {
    let fixture = Fixture::with_limits(subject, Limits { pids: 16, ..small_limits() }).await;
    let mut running = Vec::new();
    for _ in 0..16 {
        running.push(fixture.start(&Program::Sleep(600)).await);
    }
    let (exit, _) = fixture.run(&Program::Exit(0)).await;
    assert_eq!((exit.reason, exit.pids_limit_hit), (ExitReason::NotStarted, true), "{exit:?}");
    assert!(exit.message.contains("processes"), "{exit:?}");
    fixture.sandbox.signal(&running[0], 9).await.expect("signal");
    fixture.wait(&running[0]).await;
    let (exit, _) = fixture.run(&Program::Exit(0)).await;
    assert_eq!((exit.reason, exit.pids_limit_hit), (ExitReason::Exited, false), "{exit:?}");
    fixture.end().await;
}

pub(super) async fn full_disk_is_reported_by_name(subject: &dyn Subject) {
    let fixture = Fixture::new(subject).await;
    let (exit, _) = fixture.run(&Program::FillFile("/workspace/large".to_owned())).await;
    assert_eq!(exit.code, 1, "{exit:?}");
    assert!(exit.disk_full, "{exit:?}");
    // What succeeds on a full layer has nothing to be told.
    let (exit, _) = fixture.run(&Program::Exit(0)).await;
    assert_eq!((exit.code, exit.disk_full), (0, false), "{exit:?}");
    fixture.end().await;
}

pub(super) async fn cpu_limit_slows_the_program(subject: &dyn Subject) {
    let fixture = Fixture::with_limits(subject, Limits { cpus: CpuMillis(200), ..small_limits() }).await;
    let before = subject.cpu_time(&fixture.spec.sandbox_id);
    let exec_id = fixture.start(&Program::Burn(600)).await;
    subject.elapse(Duration::from_secs(10)).await;
    let record = fixture.wait(&exec_id).await;
    let exit = record.exit.expect("it has ended");
    assert_eq!(exit.code, 0, "{exit:?}");
    let elapsed = Duration::from_millis(exit.exited_unix_ms - record.started_unix_ms);
    let Some(before) = before else {
        assert!(elapsed >= Duration::from_millis(2_500), "600 ms of work at 0.2 processors took {elapsed:?}");
        return fixture.end().await;
    };
    // What the program itself takes for its time goes on on gVisor while the whole sandbox is held up. The first period of
    // 100 ms may be free, and so may part of the last.
    let used = subject.cpu_time(&fixture.spec.sandbox_id).expect("as before") - before;
    let allowed = elapsed / 5 + Duration::from_millis(150);
    assert!(used <= allowed, "{used:?} of a processor in {elapsed:?}, at a fifth");
    assert!(elapsed >= Duration::from_millis(600), "{elapsed:?}");
    fixture.end().await;
}

pub(super) async fn network_is_refused_at_once(subject: &dyn Subject) {
    let fixture = Fixture::new(subject).await;
    let started = Instant::now();
    let (exit, output) = fixture.run(&Program::Connect).await;
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(exit.code, 1, "{message}");
    assert!(message.contains("unreachable") || message.contains("No route to host"), "{message}");
    assert!(started.elapsed() < Duration::from_secs(5), "the refusal took {:?}", started.elapsed());
    fixture.end().await;
}
