//! Proves: whatever process is killed, and wherever, every session that was acknowledged is afterwards where its log
//! says, every exec that was acknowledged keeps its end and its output, deletions are complete, and the kernel and the
//! directories are as they were before.
//!
//! ```text
//!  arm a point ─► sessions are created ─► used ─► [the action that reaches the point] ─► looked at ─► deleted
//!       │                                                                                              │
//!       └─► somebody gets there: SIGKILL ─► restarted by `up` ─► everything goes on                     ▼
//!                                                     the kernel's state compared with the one before: 0 leaks
//! ```
//!
//! A round is one point. It fails when nobody got there. Fallback polling is at one hour, so that nothing comes right
//! only because somebody looked again. Clients do what clients should: they repeat a call that was cut, with the same
//! request id.

#![cfg(debug_assertions)]
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test states what it expects by unwrapping it"
)]

mod action;
mod client;
#[path = "../../../../bench/src/results.rs"]
mod results;
mod rig;
mod session;
#[path = "../support/mod.rs"]
mod support;
mod sweep;
mod torture;

use std::panic::{AssertUnwindSafe, catch_unwind};

use rig::{Case, Rig, Victim};

/// Sessions of a round.
const SESSIONS: usize = 5;

/// Points of commits that no call of the product reaches yet; the store's own tests kill a process there.
const OF_STORE_TESTS: [&str; 1] = ["cordon_host"];

fn commit_points() -> Vec<String> {
    cloister_coordinator::db::fault::COMMITS
        .iter()
        .filter(|operation| !OF_STORE_TESTS.contains(operation))
        .flat_map(|operation| [format!("before_commit_{operation}"), format!("after_commit_{operation}")])
        .collect()
}

fn host_points() -> Vec<String> {
    let all = [cloister_host::fault::POINTS.names(), cloister_sandbox::fault::POINTS.names()];
    all.concat().into_iter().filter(|name| !is_of_warm(name)).map(str::to_owned).collect()
}

fn shim_points() -> Vec<String> {
    let all = cloister_guest::fault::POINTS.names().iter();
    all.filter(|name| !is_of_warm(name)).map(|name| (*name).to_owned()).collect()
}

/// The points that are passed only where sandboxes are kept ready.
fn is_of_warm(name: &str) -> bool {
    name.starts_with("warm_") || name == "shim_after_claim"
}

fn warm_points() -> Vec<(String, Victim)> {
    let all = [cloister_sandbox::fault::POINTS.names(), cloister_guest::fault::POINTS.names()].concat();
    let warm = all.into_iter().filter(|name| is_of_warm(name));
    warm.map(|name| (name.to_owned(), Victim::WhoGetsThere)).collect()
}

/// Plays a round for each point, all of them whatever happens, and fails with what went wrong.
fn play(points: Vec<(String, Victim)>, warm: usize) {
    // For whoever looks for the cause of a failure.
    let only = std::env::var("CRASH_POINT").ok();
    let mut rig = None;
    let mut failed = Vec::new();
    for (point, victim) in
        points.into_iter().filter(|(point, _)| only.as_ref().is_none_or(|only| point == only))
    {
        if rig.is_none() {
            rig = Rig::start_with_warm(warm);
        }
        let Some(running) = &mut rig else { return };
        let case = Case::at(point.clone(), victim);
        match catch_unwind(AssertUnwindSafe(|| running.round(&case, SESSIONS))) {
            Ok(round) => {
                println!("{round}");
                if !round.differences.is_empty() {
                    println!("{}\n{}", round.differences.join("\n"), running.up.logs());
                    failed.push(point);
                    rig = None;
                }
            }
            Err(_) => {
                failed.push(point);
                // Nothing is known of this one any more.
                rig = None;
            }
        }
    }
    rig.into_iter().for_each(Rig::finish);
    assert!(failed.is_empty(), "went wrong: {failed:?}");
}

/// Returns both lists in turns: who dies again and again within a second is started more slowly each time, as it should
/// be, and nobody would wait for the tests.
fn in_turns(
    (points, victim): (Vec<String>, Victim),
    (others, other): (Vec<String>, Victim),
) -> Vec<(String, Victim)> {
    let mut longer: Vec<_> = points.into_iter().map(|point| (point, victim)).collect();
    let mut shorter: Vec<_> = others.into_iter().map(|point| (point, other)).collect();
    if shorter.len() > longer.len() {
        std::mem::swap(&mut longer, &mut shorter);
    }
    let (all, some) = (longer.len(), shorter.len());
    let mut shorter = shorter.into_iter();
    let mut mixed = Vec::with_capacity(all + some);
    for (number, case) in longer.into_iter().enumerate() {
        mixed.push(case);
        // As evenly as whole numbers allow.
        if (number + 1) * some / all > number * some / all {
            mixed.extend(shorter.next());
        }
    }
    mixed
}

#[test]
fn coordinator_and_shims_may_be_killed_at_every_commit_and_step() {
    play(in_turns((commit_points(), Victim::WhoGetsThere), (shim_points(), Victim::WhoGetsThere)), 0);
}

#[test]
fn database_and_host_agent_may_be_killed_at_every_commit_and_step() {
    play(in_turns((commit_points(), Victim::Postgres), (host_points(), Victim::WhoGetsThere)), 0);
}

#[test]
fn a_host_agent_may_be_killed_while_it_gives_a_ready_sandbox_away() {
    play(warm_points(), 2);
}

#[test]
fn the_listening_connection_may_be_cut_again_and_again() {
    let Some(mut rig) = Rig::start() else { return };
    for _ in 0..3 {
        let round = rig.round(&Case::cut_listener(), SESSIONS);
        println!("{round}");
        assert!(round.differences.is_empty(), "{:#?}", round.differences);
    }
    rig.finish();
}
