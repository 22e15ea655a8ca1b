//! A host agent that hangs, a coordinator that goes away: what waits for them waits on, or says what becomes of it.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test states what it expects by unwrapping it"
)]

mod support;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
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

/// Returns the coordinator's metrics.
fn metrics(up: &Up) -> String {
    let status = up.json(&["status"]);
    let endpoint = status["api"]["endpoint"].as_str().unwrap().trim_start_matches("http://").to_owned();
    let mut stream = TcpStream::connect(&endpoint).unwrap();
    write!(stream, "GET /metrics HTTP/1.1\r\nhost: {endpoint}\r\nconnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn a_deletion_is_waited_for_while_the_host_hangs() {
    if !can_run() {
        return;
    }
    let up = Up::start();
    let session = up.ok(&["session", "create"]);
    let host = up.pid_of("host");
    kill(host, Signal::STOP);
    let mut delete = up.command(&["session", "delete", &session]).stdout(Stdio::null()).spawn().unwrap();
    // A call waits for 20 s. Once one was answered, the session is known not to be gone yet.
    wait_for("a call to delete to be answered", || {
        let metrics = metrics(&up);
        let answered = r#"requests_total{rpc="/cloister.app.v1.SessionsService/DeleteSession",status="ok"}"#;
        if metrics.contains(answered) { Ok(()) } else { Err(metrics) }
    });
    let state = &up.json(&["session", "get", &session])["session"]["state"];
    assert_eq!(state, "SESSION_STATE_DELETING");
    assert!(delete.try_wait().unwrap().is_none(), "it ended before the session was gone");
    kill(host, Signal::CONT);
    assert!(delete.wait().unwrap().success());
    assert!(up.json(&["session", "list"])["sessions"].is_null());
}

#[test]
fn a_session_that_waits_for_room_outlives_a_coordinator_that_goes_away() {
    if !can_run() {
        return;
    }
    const MIB: u64 = 1 << 20;
    let mut up = Up::start_with(|_| vec![("CLOISTER_HOST_MEMORY_BYTES", (256 * MIB).to_string())]);
    up.ok(&["session", "create", "--name", "first", "--memory", "256M"]);
    let create = up
        .command(&["session", "create", "--name", "second", "--memory", "256M"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let queued = || up.json(&["session", "list", "--state", "queued"])["sessions"][0]["id"].clone();
    let id = wait_for("the session to be queued", || match queued() {
        serde_json::Value::String(id) => Ok(id),
        other => Err(other.to_string()),
    });
    up.interrupt();
    let output = create.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains(&id) && said.contains("may still become active"), "{said}");
    up.start_again();
    up.ok(&["session", "delete", "first"]);
    wait_for("the session to get its room", || {
        let session = up.json(&["session", "get", "second"]);
        if session["session"]["state"] == "SESSION_STATE_ACTIVE" { Ok(()) } else { Err(session.to_string()) }
    });
}
