//! Sandboxes on gVisor beside what starts them: the same `runsc`, asked directly.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use cloister_api::common::Limits;

use crate::cloister::{Cloister, Target};
use crate::peer::Peer;
use crate::report::Report;
use crate::sample::Sample;
use crate::{COMMAND, SETTLE_PAUSE, machine, mebibytes};

fn limits() -> Limits {
    Limits { memory_bytes: 64 * 1024 * 1024, pids: 32, disk_bytes: 32 * 1024 * 1024, ..Default::default() }
}

/// Measures create, exec and memory with the `runsc` that the host uses.
pub(crate) async fn measure(runs: u32, idle: u32) -> Result<Report> {
    let cloister = Cloister::connect(&Target::find()?, "gvisor").await?;
    let runsc = cloister.runsc().await?;
    let mut peer = Peer::oci("runsc", runsc.path)?;
    let mut report = Report::default();
    report.line(&format!("# gVisor {}\n", runsc.version));
    report.line(&format!("Cloister {} on {}. Made by:\n", cloister.version().await?, machine::describe()));
    report.line(&format!("```\n{COMMAND} -- --only gvisor --runs {runs} --idle {idle}\n```"));
    create(&cloister, &mut peer, runs, &mut report).await?;
    exec(&cloister, &mut peer, runs, &mut report).await?;
    memory(&cloister, idle, &mut report).await?;
    Ok(report)
}

async fn create(cloister: &Cloister, peer: &mut Peer, runs: u32, report: &mut Report) -> Result<()> {
    eprintln!("create → first command on gVisor …");
    let (mut ours, mut theirs) = (Sample::default(), Sample::default());
    for _ in 0..runs {
        tokio::time::sleep(SETTLE_PAUSE).await;
        let begin = Instant::now();
        let session = cloister.create(limits()).await?;
        let result = cloister.exec(&session.id, &["true"]).await;
        ours.add(begin.elapsed());
        cloister.delete(&session.id).await?;
        result?;
        tokio::time::sleep(SETTLE_PAUSE).await;
        theirs.add(peer.create_and_run()?);
    }
    let (p50, aim) = (ours.p50(), theirs.p50() + Duration::from_millis(15));
    report.section("Create → first command");
    report.line("From asking for a sandbox to the end of `true` in it. `runsc run` has no cgroup, no disk of its own, and no users of its own.\n");
    report.times(&[("Cloister".to_owned(), ours), ("runsc run".to_owned(), theirs)], "runsc run");
    report.aim("p50 of create → first command, `runsc run` + 15 ms", p50, aim);
    Ok(())
}

async fn exec(cloister: &Cloister, peer: &mut Peer, runs: u32, report: &mut Report) -> Result<()> {
    eprintln!("exec round trip on gVisor …");
    let session = cloister.create(limits()).await?.id;
    let (mut ours, mut theirs) = (Sample::default(), Sample::default());
    for _ in 0..runs {
        tokio::time::sleep(SETTLE_PAUSE).await;
        let begin = Instant::now();
        cloister.exec(&session, &["true"]).await?;
        ours.add(begin.elapsed());
        tokio::time::sleep(SETTLE_PAUSE).await;
        if let Some(elapsed) = peer.exec()? {
            theirs.add(elapsed);
        }
    }
    cloister.delete(&session).await?;
    let (p50, aim) = (ours.p50(), theirs.p50() / 10);
    report.section("Exec round trip");
    report.line("From asking for `true` in a sandbox that runs to its exit record.\n");
    report.times(&[("Cloister exec".to_owned(), ours), ("runsc exec".to_owned(), theirs)], "runsc exec");
    report.aim("p50 of an exec round trip, a tenth of `runsc exec`", p50, aim);
    Ok(())
}

async fn memory(cloister: &Cloister, idle: u32, report: &mut Report) -> Result<()> {
    eprintln!("memory of {idle} idle sandboxes on gVisor …");
    report.section("Memory of an idle sandbox");
    let before = machine::gvisor_memory();
    let limits = Limits { cpu_millis: 10, ..limits() };
    let mut sessions = Vec::new();
    for _ in 0..idle {
        sessions.push(cloister.create(limits.clone()).await?.id);
    }
    let after = machine::gvisor_memory();
    for session in &sessions {
        cloister.delete(session).await?;
    }
    let (Some(before), Some(after)) = (before, after) else {
        report.line("Left out: the memory of root's processes can only be read by root.");
        return Ok(());
    };
    ensure!(after.processes > before.processes, "no sandbox is new");
    let each = |kib: u64| format!("{:.1}", mebibytes(kib) / f64::from(idle.max(1)));
    report.line(&format!("{idle} sandboxes: shim, keeper, sentry, gofer and stubs.\n"));
    report.line("| | MiB a sandbox |\n|---|---|");
    report.line(&format!("| shared pages by their share (PSS) | {} |", each(after.pss_kib - before.pss_kib)));
    report.line(&format!("| of that, private | {} |", each(after.private_kib - before.private_kib)));
    Ok(())
}
