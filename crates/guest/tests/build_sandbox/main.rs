//! Builds real sandboxes and attacks them from inside. Proves the containment that `docs/reference/backends.md` claims for
//! the `namespace` backend, and [`gvisor`] for that one: what root inside cannot do, that each defence is what stops its attack (the control leaves it
//! off), and that nothing is left after kill -9.
//!
//! The builder must be called by a process with one thread, and pid 1 is the same executable in mode `agent`; so this
//! target has its own `main` with three modes: `shim CONFIG`, `agent`, and the tests. Needs root.

#![expect(unsafe_code, reason = "attacks are system calls")]
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a test harness of its own")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod attack;
mod cases;
mod cgroup;
mod controls;
mod guest;
mod gvisor;
#[allow(dead_code, unreachable_pub, reason = "made for the tests of the shim; its control uses a part")]
#[path = "../shim/peer.rs"]
mod peer;
mod sandbox;
mod shim_controls;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.first().map(String::as_str) {
        Some("shim") => sandbox::run_shim(&arguments[1]),
        Some("agent") => guest::run_agent(arguments.get(2).map(Path::new)),
        _ => run_tests(&arguments),
    }
}

/// Understands what `cargo test` passes: a filter, `--exact`, `--list`; one test after the other.
fn run_tests(arguments: &[String]) -> ExitCode {
    let has = |flag: &str| arguments.iter().any(|argument| argument == flag);
    let filters: Vec<&String> =
        arguments.iter().filter(|argument| !argument.starts_with("--") && *argument != "terse").collect();
    let selected = cases::ALL.iter().chain(gvisor::ALL).filter(|(name, _)| {
        filters.is_empty()
            || filters.iter().any(|filter| {
                if has("--exact") { *name == filter.as_str() } else { name.contains(filter.as_str()) }
            })
    });
    if has("--list") {
        if !has("--ignored") {
            selected.for_each(|(name, _)| println!("{name}: test"));
        }
        return ExitCode::SUCCESS;
    }
    if has("--ignored") {
        return ExitCode::SUCCESS;
    }
    if !rustix::process::geteuid().is_root() {
        println!("SKIP: building sandboxes needs root");
        return ExitCode::SUCCESS;
    }
    let mut failed = Vec::new();
    for (name, case) in selected {
        let outcome = catch_unwind(AssertUnwindSafe(case));
        println!("test {name} ... {}", if outcome.is_ok() { "ok" } else { "FAILED" });
        if outcome.is_err() {
            failed.push(*name);
        }
    }
    if failed.is_empty() {
        println!("\ntest result: ok");
        ExitCode::SUCCESS
    } else {
        println!("\ntest result: FAILED: {}", failed.join(", "));
        ExitCode::from(101)
    }
}
