//! Sessions on the real binary: what one process starts another one reads, files outlive a pause, a deletion is
//! complete, every answer is JSON on demand.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test states what it expects by unwrapping it"
)]

mod support;

use support::{Up, can_run, wait_for};

#[test]
fn output_is_read_contiguously_by_another_process() {
    if !can_run() {
        return;
    }
    let up = Up::start();
    let session = up.ok(&["session", "create", "--name", "reader"]);
    assert!(session.starts_with("ses_"), "{session}");
    let script = "i=0; while [ $i -lt 200000 ]; do echo line $i; i=$((i+1)); done";
    let exec = up.ok(&["exec", "-d", "reader", "--", "sh", "-c", script]);
    let expected: String = (0..200_000).map(|number| format!("line {number}\n")).collect();

    let followed = up.run(&["logs", "-f", "reader"]).expect(0);
    assert_eq!(blake3::hash(followed.bytes()), blake3::hash(expected.as_bytes()));
    let again = up.run(&["logs", &session, &exec]).expect(0);
    assert_eq!(again.bytes(), expected.as_bytes());
    let from = up.run(&["logs", "--from", "7", &session, &exec]).expect(0);
    assert_eq!(from.bytes(), &expected.as_bytes()[7..]);

    let execs = up.json(&["ps", "reader"]);
    assert_eq!(execs["execs"][0]["id"], exec.as_str());
    assert_eq!(execs["execs"][0]["exit"]["reason"], "EXIT_REASON_EXITED");
    assert!(up.ok(&["ps", "reader"]).contains("exited"));
}

#[test]
fn a_pause_keeps_files_and_a_delete_keeps_nothing() {
    if !can_run() {
        return;
    }
    let up = Up::start();
    let session = up.ok(&["session", "create", "--name", "keeper", "--label", "team=a"]);
    up.run(&["exec", "keeper", "--", "sh", "-c", "echo precious > /root/file"]).expect(0);
    up.ok(&["session", "pause", "keeper"]);
    assert_eq!(up.json(&["session", "get", "keeper"])["session"]["state"], "SESSION_STATE_PAUSED");
    up.run(&["exec", "keeper", "--", "true"]).expect(125).says(&["error:", "hint:"]);
    up.ok(&["session", "resume", "keeper"]);
    assert_eq!(up.ok(&["exec", "keeper", "--", "cat", "/root/file"]), "precious");

    let listed = up.json(&["session", "list", "--label", "team=a", "--state", "active"]);
    assert_eq!(listed["sessions"][0]["id"], session.as_str());
    assert!(up.json(&["session", "list", "--label", "team=b"])["sessions"].is_null());

    // By a prefix that only one session has.
    up.ok(&["session", "delete", &session[..session.len() - 2]]);
    up.run(&["session", "get", "keeper"]).expect(1).says(&["cl1005", "hint:"]);
    wait_for("the session's directory to go", || {
        let directory = up.path("data/host/sessions").join(&session);
        if directory.exists() { Err(format!("{} is there", directory.display())) } else { Ok(()) }
    });
    let events = up.run(&["--json", "session", "watch", &session]).expect(0).json_lines();
    let kinds: Vec<&str> = events.iter().filter_map(|event| event["event"]["state"].as_str()).collect();
    assert_eq!(kinds.last(), Some(&"SESSION_STATE_DELETED"), "{kinds:?}");
    assert!(
        kinds.contains(&"SESSION_STATE_PAUSED") && kinds.contains(&"SESSION_STATE_RESUMING"),
        "{kinds:?}"
    );
    let cursors: Vec<String> = events.iter().map(|event| event["event"]["cursor"].to_string()).collect();
    let expected: Vec<String> = (1..=cursors.len()).map(|cursor| format!("\"{cursor}\"")).collect();
    assert_eq!(cursors, expected, "cursors have no holes");
}

#[test]
fn isolation_is_shown_with_facts_and_names_are_unique() {
    if !can_run() {
        return;
    }
    let up = Up::start();
    up.ok(&["session", "create", "--name", "one", "--memory", "128M", "--cpus", "0.5", "--pids", "64"]);
    let session = &up.json(&["session", "get", "one"])["session"];
    assert_eq!(session["limits"]["memoryBytes"], "134217728");
    assert_eq!(session["limits"]["cpuMillis"], 500);
    assert_eq!(session["isolation"], "ISOLATION_CONTAINER");
    assert!(session["facts"].as_array().is_some_and(|facts| facts.len() >= 3), "{session}");
    let text = up.ok(&["session", "get", "one"]);
    assert!(text.contains("facts, read after all hardening"), "{text}");
    up.run(&["session", "create", "--name", "one"]).expect(1).says(&["error:", "hint:"]);
}

#[test]
fn tokens_work_until_they_are_revoked_and_changes_are_audited() {
    if !can_run() {
        return;
    }
    let up = Up::start();
    let created = up.json(&["token", "create", "robot", "--ttl", "1h"]);
    let secret = created["secret"].as_str().unwrap();
    let endpoint = up.json(&["status"])["up"]["endpoint"].as_str().unwrap().to_owned();
    let as_robot = |arguments: &[&str]| {
        up.command(arguments)
            .env("CLOISTER_CONFIG", "/dev/null")
            .env("CLOISTER_ENDPOINT", &endpoint)
            .env("CLOISTER_TOKEN", secret)
            .output()
            .unwrap()
    };
    assert!(as_robot(&["session", "list"]).status.success());
    up.ok(&["token", "revoke", "robot"]);
    let refused = as_robot(&["session", "list"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("CL1001"), "{refused:?}");
    assert!(up.ok(&["token", "list"]).contains("revoked"));
    let audit = up.json(&["audit", "list", "--limit", "50"]);
    let actions: Vec<&str> =
        audit["entries"].as_array().unwrap().iter().filter_map(|entry| entry["action"].as_str()).collect();
    assert!(actions.contains(&"token.create") && actions.contains(&"token.revoke"), "{actions:?}");
    assert!(!audit.to_string().contains(secret));
}

#[test]
fn a_command_is_signalled_by_name_and_a_pause_is_told_from_a_signal() {
    if !can_run() {
        return;
    }
    let up = Up::start();
    up.ok(&["session", "create", "--name", "box", "--disk", "32M"]);
    let watch = |script: &str| {
        let command = up
            .command(&["exec", "box", "--", "sh", "-c", script])
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        wait_for("the command to run", || {
            let execs = up.json(&["ps", "box"]);
            let last = execs["execs"].as_array().and_then(|execs| execs.last().cloned()).unwrap_or_default();
            let runs = last["exit"].is_null() && last["spec"]["argv"][2] == script;
            if runs { Ok(()) } else { Err(execs.to_string()) }
        });
        command
    };
    let watched = watch("exec sleep 601");
    up.run(&["kill", "-s", "int", "box"]).expect(0);
    assert_eq!(watched.wait_with_output().unwrap().status.code(), Some(130));
    up.run(&["kill", "box"]).expect(1).says(&["nothing runs", "cloister shell box"]);

    // The smallest disks are full by name too.
    up.run(&["exec", "box", "--", "dd", "if=/dev/zero", "of=/workspace/big", "bs=1M", "count=200"])
        .expect(1)
        .says(&["disk full"]);
    up.run(&["exec", "-u", "user", "box", "--", "sh", "-c", "rm -f /workspace/big"])
        .expect(1)
        .says(&["not permitted"]);
    up.run(&["exec", "box", "--", "rm", "/workspace/big"]).expect(0);
    up.run(&["exec", "-u", "user", "box", "--", "touch", "/workspace/mine"]).expect(0);

    let watched = watch("exec sleep 602");
    up.ok(&["session", "pause", "box"]);
    let output = watched.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(125), "{stderr}");
    assert!(stderr.contains("the sandbox"), "{stderr}");
}
