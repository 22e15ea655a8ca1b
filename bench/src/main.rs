//! Measures a running Cloister beside what a user would pick instead, in one run, and prints a table with ratios.
//!
//! What is compared runs interleaved: one of ours, one of each peer, and again, so that a slow spell of the machine
//! hits all of them. Cloister is measured through its whole control plane (client, API, database, host link, shim),
//! over a connection that stays open; the peers are measured from starting their process to its end. Nothing is
//! left out of ours, and the peers enforce no limits.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program for people")]

mod cloister;
mod floor;
mod gvisor;
mod machine;
mod peer;
mod report;
mod results;
mod sample;

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Parser;
use cloister_api::common::Limits;

use crate::cloister::{Cloister, Target};
use crate::floor::Floor;
use crate::machine::CpuShares;
use crate::peer::Peer;
use crate::report::Report;
use crate::sample::{Sample, millis};

const RESULTS: &str = "bench/results.md";
const DISK_BYTES: u64 = 32 * 1024 * 1024;
const COMMAND: &str = "cargo run --release -p cloister-bench";
/// Pause before each measured exec, of ours as of theirs: the kernel goes on taking the one before down after its end.
const SETTLE_PAUSE: Duration = Duration::from_millis(30);
/// Pause before a create of the unhurried kind: longer than a host needs to refill what it keeps ready.
const UNHURRIED_PAUSE: Duration = Duration::from_millis(300);

/// Measure a running Cloister beside bubblewrap and crun or runc
#[derive(Parser)]
struct Arguments {
    /// Runs of each kind
    #[arg(long, default_value_t = 50)]
    runs: u32,
    /// Sandboxes made at once
    #[arg(long, default_value_t = 50)]
    burst: u32,
    /// Idle sandboxes whose memory is measured
    #[arg(long, default_value_t = 20)]
    idle: u32,
    /// Measure this part only
    #[arg(long, value_enum)]
    only: Option<Part>,
    /// Write the table to bench/results.md as well
    #[arg(long)]
    write: bool,
}

/// One part of the measurement.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Create → first command
    Create,
    /// Exec round trip
    Exec,
    /// Many creates at once
    Burst,
    /// Memory of idle sandboxes
    Memory,
    /// Create, exec and memory on gVisor, beside `runsc` itself; a section of its own for each version of `runsc`
    Gvisor,
}

fn main() -> Result<()> {
    peer::enter_mount_namespace()?;
    let arguments = Arguments::parse();
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("start the runtime")?;
    if arguments.write && arguments.only.is_some_and(|only| only != Part::Gvisor) {
        bail!("`--write` writes whole sections: leave `--only` out, or give `--only gvisor`");
    }
    let report = match arguments.only {
        Some(Part::Gvisor) => runtime.block_on(gvisor::measure(arguments.runs, arguments.idle))?,
        _ => runtime.block_on(measure(&arguments))?,
    };
    println!("{}", report.text());
    if arguments.write {
        results::write_section(Path::new(RESULTS), report.text())
            .with_context(|| format!("write `{RESULTS}`"))?;
        eprintln!("written to {RESULTS}");
    }
    Ok(())
}

async fn measure(arguments: &Arguments) -> Result<Report> {
    let cloister = Cloister::connect(&Target::find()?, "namespace").await?;
    let (mut peers, skipped) = Peer::find();
    let mut report = Report::default();
    report.line("# Benchmark\n");
    report.line(&format!("Cloister {} on {}. Made by:\n", cloister.version().await?, machine::describe()));
    report.line(&format!(
        "```\n{COMMAND} -- --runs {} --burst {} --idle {}\n```",
        arguments.runs, arguments.burst, arguments.idle
    ));
    for reason in skipped {
        report.line(&format!("\nLeft out: {reason}."));
    }
    let wanted = |part| arguments.only.is_none_or(|only| only == part);
    if wanted(Part::Create) {
        create(&cloister, &mut peers, arguments.runs, &mut report).await?;
    }
    if wanted(Part::Exec) {
        exec(&cloister, &mut peers, arguments.runs, &mut report).await?;
    }
    if wanted(Part::Burst) {
        burst(&cloister, arguments.burst, &mut report).await?;
    }
    if wanted(Part::Memory) {
        idle_memory(&cloister, arguments.idle, &mut report).await?;
    }
    Ok(report)
}

/// Small enough that many fit on a small machine at once; the CPU is not limited below one.
fn limits() -> Limits {
    Limits { memory_bytes: 32 * 1024 * 1024, pids: 32, disk_bytes: DISK_BYTES, ..Default::default() }
}

/// The same with another size of disk each time: a host keeps sandboxes ready with the size that was asked for last, so
/// that there is none of this one.
fn unexpected_limits(run: u32) -> Limits {
    let grain = u64::from(run % 2 + 1) * 1024 * 1024;
    Limits { disk_bytes: DISK_BYTES + grain, ..limits() }
}

/// Create → first command: with a sandbox ready, with none, and one after the other.
async fn create(cloister: &Cloister, peers: &mut [Peer], runs: u32, report: &mut Report) -> Result<()> {
    eprintln!("create → first command …");
    let mut unhurried = Sample::default();
    let mut empty = Sample::default();
    let mut hurried = Sample::default();
    let mut theirs: Vec<Sample> = peers.iter().map(|_| Sample::default()).collect();
    // The first one pays for connections, page cache and prepared statements on every side.
    create_once(cloister, limits()).await?;
    let mut not_ready = 0u32;
    for run in 0..runs {
        tokio::time::sleep(UNHURRIED_PAUSE).await;
        let ready = create_once(cloister, limits()).await?;
        if ready.was_ready {
            unhurried.add(ready.elapsed);
        } else {
            not_ready += 1;
        }
        for (peer, sample) in peers.iter_mut().zip(&mut theirs) {
            tokio::time::sleep(UNHURRIED_PAUSE).await;
            sample.add(peer.create_and_run()?);
        }
        tokio::time::sleep(UNHURRIED_PAUSE).await;
        let unready = create_once(cloister, unexpected_limits(run)).await?;
        if !unready.was_ready {
            empty.add(unready.elapsed);
        }
        // Not measured: tells the host which size to keep ready from now on.
        create_once(cloister, limits()).await?;
    }
    ensure!(unhurried.len() > 0, "no sandbox was ready within {} ms", UNHURRIED_PAUSE.as_millis());
    for _ in 0..runs {
        hurried.add(create_once(cloister, limits()).await?.elapsed);
    }

    let bubblewrap = peers.iter().position(|peer| peer.name == "bwrap").map(|at| theirs[at].p50());
    let ours = unhurried.p50();
    let mut rows = vec![
        ("Cloister, a sandbox ready".to_owned(), unhurried),
        ("Cloister, none ready".to_owned(), empty),
        ("Cloister, one after the other".to_owned(), hurried),
    ];
    rows.extend(peers.iter().map(|peer| peer.name.to_owned()).zip(theirs));
    report.section("Create → first command");
    report.line("From asking for a sandbox to the end of `true` in it. Peers make namespaces only: no cgroup, no disk of its own.\n");
    report.times(&rows, "bwrap");
    if let Some(bubblewrap) = bubblewrap {
        report.aim(
            "p50 of create → first command, bwrap + 6 ms",
            ours,
            bubblewrap + Duration::from_millis(6),
        );
    }
    if not_ready > 0 {
        report.line(&format!("\n{not_ready} of {runs} found none ready and are left out of the first row."));
    }
    Ok(())
}

/// Returns how long a call takes after a pause, so that it starts as cold as what it is compared with.
async fn timed<T>(call: impl Future<Output = Result<T>>) -> Result<Duration> {
    tokio::time::sleep(SETTLE_PAUSE).await;
    let begin = Instant::now();
    call.await.map(|_| begin.elapsed())
}

/// A session that was made, used and deleted.
struct Once {
    /// From asking for it to the end of its first command.
    elapsed: Duration,
    /// The host had its sandbox ready.
    was_ready: bool,
}

async fn create_once(cloister: &Cloister, limits: Limits) -> Result<Once> {
    let begin = Instant::now();
    let session = cloister.create(limits).await?;
    let result = cloister.exec(&session.id, &["true"]).await;
    let elapsed = begin.elapsed();
    cloister.delete(&session.id).await?;
    result.map(|_| Once { elapsed, was_ready: session.was_ready })
}

/// Returns the CPU time that one create costs the machine, with making the next sandbox ready.
async fn cpu_per_create(cloister: &Cloister, count: u32, limits: &Limits) -> Result<Duration> {
    let measure = async |sessions: &mut Vec<String>, count: u32| {
        let (busy, begin) = (machine::busy_time()?, Instant::now());
        for _ in 0..count {
            sessions.push(cloister.create(limits.clone()).await?.id);
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
        anyhow::Ok((machine::busy_time()?.saturating_sub(busy), begin.elapsed()))
    };
    let mut sessions = Vec::new();
    let (idle, idle_elapsed) = measure(&mut sessions, 0).await?;
    let (busy, elapsed) = measure(&mut sessions, count).await?;
    for session in &sessions {
        cloister.delete(session).await?;
    }
    let background = idle.mul_f64(elapsed.as_secs_f64() / idle_elapsed.as_secs_f64());
    Ok(busy.saturating_sub(background) / count.max(1))
}

async fn exec(cloister: &Cloister, peers: &mut [Peer], runs: u32, report: &mut Report) -> Result<()> {
    eprintln!("exec round trip …");
    let session = cloister.create(limits()).await?.id;
    let mut ours = Sample::default();
    let mut theirs: Vec<(String, Sample)> = Vec::new();
    let mut floor = Floor::new()?;
    let (mut nothing, mut read, mut hop) = (Sample::default(), Sample::default(), Sample::default());
    let earlier = cloister.exec(&session, &["true"]).await?;
    for _ in 0..runs {
        tokio::time::sleep(SETTLE_PAUSE).await;
        floor.measure()?;
        nothing.add(timed(cloister.version()).await?);
        read.add(timed(cloister.get_session(&session)).await?);
        hop.add(timed(cloister.get_exec(&session, &earlier)).await?);
        ours.add(timed(cloister.exec(&session, &["true"])).await?);
        for peer in peers.iter_mut() {
            tokio::time::sleep(SETTLE_PAUSE).await;
            let Some(elapsed) = peer.exec()? else { continue };
            let name = format!("{} exec", peer.name);
            match theirs.iter_mut().find(|(known, _)| *known == name) {
                Some((_, sample)) => sample.add(elapsed),
                None => {
                    let mut sample = Sample::default();
                    sample.add(elapsed);
                    theirs.push((name, sample));
                }
            }
        }
    }
    let mut hurried = Sample::default();
    let before = CpuShares::read();
    for _ in 0..runs {
        let begin = Instant::now();
        cloister.exec(&session, &["true"]).await?;
        hurried.add(begin.elapsed());
    }
    let shares = CpuShares::read().each_since(&before, runs);
    cloister.delete(&session).await?;
    let (p50, floor_p50) = (ours.p50(), floor.program.p50() + floor.commit.p50());
    let baseline = theirs.first().map_or_else(String::new, |(name, _)| name.clone());
    let mut rows =
        vec![("Cloister exec".to_owned(), ours), ("Cloister exec, one after the other".to_owned(), hurried)];
    rows.extend(theirs);
    rows.push(("part: a call that asks nobody".to_owned(), nothing));
    rows.push(("part: the same, and a read of the store".to_owned(), read));
    rows.push(("part: the same, and a question to the shim".to_owned(), hop));
    rows.push(("floor: `true`, started bare".to_owned(), floor.program));
    rows.push(("floor: 8 KiB on the disk, as of one commit".to_owned(), floor.commit));
    report.section("Exec round trip");
    report.line("From asking for `true` in a sandbox that runs to its exit record.\n");
    report.times(&rows, &baseline);
    report.aim("p50 of an exec round trip", p50, Duration::from_micros(1500));
    report.line(&format!(
        "\nOf a round trip, {} ms are the two floors: starting the program, and the audit entry that is durable before it \
         starts. {} ms are Cloister's own.",
        millis(floor_p50),
        millis(p50.saturating_sub(floor_p50))
    ));
    let shares: Vec<String> =
        shares.iter().map(|(name, time)| format!("{name} {} ms", millis(*time))).collect();
    report.line(&format!(
        "\nCPU time of one of those one after the other: {}. The rest is the program itself, the disk, and the kernel's \
         waking of one process by the next.",
        shares.join(", ")
    ));
    Ok(())
}

async fn burst(cloister: &Cloister, count: u32, report: &mut Report) -> Result<()> {
    eprintln!("burst of {count} …");
    let limits = Limits { cpu_millis: 10, ..limits() };
    let cpu_per_create = cpu_per_create(cloister, count, &limits).await?;
    let begin = Instant::now();
    let creates = (0..count).map(|_| cloister.create(limits.clone()));
    let results = futures::future::join_all(creates).await;
    let elapsed = begin.elapsed();
    let (created, failed): (Vec<_>, Vec<_>) = results.into_iter().partition(Result::is_ok);
    let sessions: Vec<String> = created.into_iter().flatten().map(|session| session.id).collect();
    let deletes = futures::future::join_all(sessions.iter().map(|session| cloister.delete(session))).await;
    deletes.into_iter().collect::<Result<()>>().context("delete the burst")?;
    report.section(&format!("Burst of {count} creates at once"));
    report.line(&format!(
        "{} of {count} became active, all within {} ms ({} ms each).",
        sessions.len(),
        millis(elapsed),
        millis(elapsed / count.max(1))
    ));
    if let Some(error) = failed.into_iter().find_map(Result::err) {
        report.line(&format!("\nThe first that failed: {error:#}."));
    }
    report.line(&format!(
        "\nCPU time of one create, everything on the machine, with making the next one ready: {} ms.",
        millis(cpu_per_create)
    ));
    let aim = (cpu_per_create * count / machine::cpus()).mul_f64(1.3);
    report.aim(&format!("1.3 × ({count} × CPU per create ÷ {} CPUs)", machine::cpus()), elapsed, aim);
    Ok(())
}

async fn idle_memory(cloister: &Cloister, count: u32, report: &mut Report) -> Result<()> {
    eprintln!("memory of {count} idle sandboxes …");
    report.section("Memory of an idle sandbox");
    let (before, roles_before) = (machine::sandbox_memory(), machine::control_plane_memory());
    let limits = Limits { cpu_millis: 10, ..limits() };
    let mut sessions = Vec::new();
    for _ in 0..count {
        sessions.push(cloister.create(limits.clone()).await?.id);
    }
    let (after, roles_after) = (machine::sandbox_memory(), machine::control_plane_memory());
    for session in &sessions {
        cloister.delete(session).await?;
    }
    let (Some(before), Some(after), Some(roles_before), Some(roles_after)) =
        (before, after, roles_before, roles_after)
    else {
        report.line("Left out: the memory of root's processes can only be read by root.");
        return Ok(());
    };
    // Those that the host kept ready were there before and have an owner now: fewer are new than were asked for.
    let pairs = after.processes.saturating_sub(before.processes) / 2;
    ensure!(pairs > 0, "no shim and guest agent are new: ask for more than a host keeps ready (`--idle`)");
    let share = |kib: u64, of: u32| format!("{:.2}", mebibytes(kib) / f64::from(of));
    let grown = after.pss_kib.saturating_sub(before.pss_kib);
    report.line(&format!(
        "{count} sandboxes, of which {pairs} were not ready before. A shim and its guest agent, beyond the work:\n"
    ));
    report.line("| | MiB a sandbox |\n|---|---|");
    report.line(&format!(
        "| shim and guest agent, shared pages by their share (PSS) | {} |",
        share(grown, pairs)
    ));
    report.line(&format!(
        "| of that, private | {} |",
        share(after.private_kib.saturating_sub(before.private_kib), pairs)
    ));
    report.line(&format!(
        "| growth of host agent, coordinator and database (PSS) | {} |",
        share(roles_after.pss_kib.saturating_sub(roles_before.pss_kib), count.max(1))
    ));
    let verdict = if mebibytes(grown) <= 4.0 * f64::from(pairs) { "met" } else { "missed" };
    report.line(&format!(
        "\nAim: shim and guest agent ≤ 4 MiB: **{verdict}** with {} MiB.",
        share(grown, pairs)
    ));
    Ok(())
}

fn mebibytes(kib: u64) -> f64 {
    f64::from(u32::try_from(kib).unwrap_or(u32::MAX)) / 1024.0
}
