//! A host agent that hangs: what waits for it goes on waiting, says so, and ends as it would have.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test states what it expects by unwrapping it"
)]

mod support;

use std::io::{BufRead as _, BufReader};
use std::process::Stdio;

use rustix::process::Signal;
use support::{Up, can_run, kill, wait_for};

/// Whether a process has a handler of its own for SIGINT.
fn handles_interrupts(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap_or("0");
    let caught = u64::from_str_radix(caught.trim(), 16).unwrap_or(0);
    caught & (1 << (Signal::INT.as_raw() - 1)) != 0
}

#[test]
fn ctrl_c_before_a_command_has_started_reaches_it_when_it_has() {
    if !can_run() {
        return;
    }
    let up = Up::start();
    up.ok(&["session", "create", "--name", "box"]);
    let host = up.pid_of("host");
    kill(host, Signal::STOP);
    let mut exec = up
        .command(&["exec", "box", "--", "sleep", "600"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    wait_for("the command line to handle interrupts", || {
        if handles_interrupts(exec.id()) { Ok(()) } else { Err("it does not".to_owned()) }
    });
    kill(i32::try_from(exec.id()).unwrap(), Signal::INT);
    let mut said = String::new();
    BufReader::new(exec.stderr.take().unwrap()).read_line(&mut said).unwrap();
    assert!(said.contains("has not started"), "{said}");
    kill(host, Signal::CONT);
    // `sleep` has no handler: the signal ends it, long before its time.
    assert_eq!(exec.wait().unwrap().code(), Some(130));
}
