//! The same rounds with more sessions, in an order from a seed, several times, and with kills that no point asks for.
//!
//! `just torture` runs it: with `--write` its figures go into `bench/results.md`. The seed is printed first, and the
//! same seed gives the same order and the same choices; when a process dies at a moment of its own, the moment differs.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;
use rand::{RngExt as _, SeedableRng as _};

use crate::rig::{Case, Rig, Round, Victim};
use crate::{commit_points, host_points, results, shim_points};

const VARIABLE: &str = "TORTURE_ARGUMENTS";
/// Kills without a point, a pass.
const UNASKED: usize = 30;
/// Rounds in which the listener is cut, a pass.
const CUTS: usize = 3;

struct Arguments {
    seed: u64,
    passes: usize,
    sessions: usize,
    write: bool,
}

impl Arguments {
    /// Returns what was asked for; nothing when nobody asked.
    fn read() -> Option<Self> {
        let text = std::env::var(VARIABLE).ok()?;
        let mut arguments =
            Self { seed: rand::random::<u32>().into(), passes: 2, sessions: 20, write: false };
        let mut words = text.split_whitespace();
        while let Some(word) = words.next() {
            let mut number = || {
                let word = words.next().unwrap_or_else(|| panic!("`{word}` needs a number"));
                word.parse::<u64>().unwrap_or_else(|_| panic!("`{word}` is no number"))
            };
            match word {
                "--seed" => arguments.seed = number(),
                "--passes" => arguments.passes = usize::try_from(number()).unwrap(),
                "--sessions" => arguments.sessions = usize::try_from(number()).unwrap(),
                "--write" => arguments.write = true,
                other => panic!("`{other}`: accepted are --seed N, --passes N, --sessions N, --write"),
            }
        }
        Some(arguments)
    }
}

/// What came of all rounds of one kind.
#[derive(Default)]
struct Row {
    points: usize,
    rounds: usize,
    kills: usize,
    recoveries: Vec<Duration>,
    leaks: usize,
    failed: Vec<String>,
}

/// Not one of the tests: it takes many minutes and runs when `just torture` asks for it.
#[test]
fn torture() {
    let Some(arguments) = Arguments::read() else { return };
    println!("seed {}", arguments.seed);
    let mut random = StdRng::seed_from_u64(arguments.seed);
    let begin = Instant::now();
    let mut rows: BTreeMap<&'static str, Row> = BTreeMap::new();
    let mut rig = None;
    for pass in 0..arguments.passes {
        let mut cases = cases(&mut random);
        if pass == 0 {
            for (kind, _) in &cases {
                rows.entry(kind).or_default().points += 1;
            }
        }
        cases.shuffle(&mut random);
        for (number, (kind, case)) in cases.iter().enumerate() {
            if rig.is_none() {
                rig = Rig::start();
            }
            let Some(running) = &mut rig else { return };
            let row = rows.entry(kind).or_default();
            row.rounds += 1;
            match catch_unwind(AssertUnwindSafe(|| running.round(case, arguments.sessions))) {
                Ok(Round { name, recovery, elapsed, kills, differences }) => {
                    println!(
                        "{}.{number:03} {name:<52} {kills} killed, recovered in {:>5} ms, round {:>6} ms",
                        pass + 1,
                        recovery.as_millis(),
                        elapsed.as_millis()
                    );
                    row.kills += kills;
                    if kills > 0 {
                        row.recoveries.push(recovery);
                    }
                    row.leaks += differences.len();
                    if !differences.is_empty() {
                        println!("{}", differences.join("\n"));
                        rig = None;
                    }
                }
                Err(_) => {
                    row.failed.push(format!("{case:?}"));
                    rig = None;
                }
            }
        }
    }
    rig.into_iter().for_each(Rig::finish);
    let section = section(&arguments, &rows, begin.elapsed());
    println!("{section}");
    let failed: Vec<&String> = rows.values().flat_map(|row| &row.failed).collect();
    let leaks: usize = rows.values().map(|row| row.leaks).sum();
    if arguments.write {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench/results.md");
        results::write_section(&path, &section).expect("write the results");
    }
    assert!(failed.is_empty() && leaks == 0, "{leaks} leaks; went wrong: {failed:#?}");
}

/// Returns every round of one pass with the kind that it counts to.
fn cases(random: &mut StdRng) -> Vec<(&'static str, Case)> {
    let of = |kind, points: Vec<String>, victim| {
        points.into_iter().map(move |point| (kind, Case::at(point, victim)))
    };
    let mut cases: Vec<_> = of("coordinator, at its commits", commit_points(), Victim::WhoGetsThere)
        .chain(of("database, at the coordinator's commits", commit_points(), Victim::Postgres))
        .chain(of("host agent, at its steps", host_points(), Victim::WhoGetsThere))
        .chain(of("shim, at its steps", shim_points(), Victim::WhoGetsThere))
        .collect();
    cases.extend((0..CUTS).map(|_| ("listening connection, all the time", Case::cut_listener())));
    cases
        .extend((0..UNASKED).map(|_| ("one to three of any, at any moment", Case::unasked(random.random()))));
    cases
}

fn section(arguments: &Arguments, rows: &BTreeMap<&'static str, Row>, elapsed: Duration) -> String {
    let mut text = String::from("# Torture\n\n");
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let minutes = elapsed.as_secs().div_ceil(60);
    writeln!(
        text,
        "Processes killed with SIGKILL while {} sessions are created, used, paused and deleted; {cpus} CPUs, Linux {}, a \
         debug build, {minutes} min. Made by:\n\n```\njust torture --seed {} --passes {} --sessions {}\n```\n",
        arguments.sessions,
        kernel.trim(),
        arguments.seed,
        arguments.passes,
        arguments.sessions
    )
    .unwrap();
    text.push_str(
        "Recovery is from the kill to the answer of the last call that was under way, or of the next one when there was none;\n\
         leaks are what the kernel and the directories have after a round and had not before.\n\n\
         | who is killed | points | rounds | kills | recovery p50 ms | max ms | wrong | leaks |\n\
         |---|---|---|---|---|---|---|---|\n",
    );
    for (kind, row) in rows {
        let mut recoveries = row.recoveries.clone();
        recoveries.sort();
        let show = |duration: Option<&Duration>| {
            duration.map_or_else(|| "–".to_owned(), |duration| duration.as_millis().to_string())
        };
        writeln!(
            text,
            "| {kind} | {} | {} | {} | {} | {} | {} | {} |",
            row.points,
            row.rounds,
            row.kills,
            show(recoveries.get(recoveries.len() / 2)),
            show(recoveries.last()),
            row.failed.len(),
            row.leaks
        )
        .unwrap();
    }
    text
}
