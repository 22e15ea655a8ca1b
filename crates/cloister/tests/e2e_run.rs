//! `cloister run` and `exec` on the real binary: exit codes, streams, input and limits are what docs/reference/cli.md
//! and docs/reference/exit-codes.md say.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test states what it expects by unwrapping it"
)]

mod support;

use std::io::{BufRead, BufReader, Read};
use std::os::unix::ffi::OsStrExt as _;
use std::process::Stdio;

use support::{Up, can_run, kill, wait_for};

#[test]
fn the_exit_code_is_the_commands_own_and_nothing_stays() {
    if !can_run() {
        return;
    }
    let up = Up::start();
    up.run(&["run", "--", "true"]).expect(0);
    up.run(&["run", "--", "false"]).expect(1);
    up.run(&["run", "--", "sh", "-c", "exit 42"]).expect(42);
    up.run(&["run", "--", "sh", "-c", "kill -TERM $$"]).expect(143);
    up.run(&["run", "--", "no-such-program"]).expect(127).says(&["not started", "hint:"]);
    up.run(&["run", "--", "/etc/passwd"]).expect(126).says(&["not started"]);
    // Our own failures are 125, a command line that makes no sense included.
    up.run(&["run", "true"]).expect(125).says(&["hint: put `--` before the command"]);
    let not_text = std::ffi::OsStr::from_bytes(b"\xff\xfe");
    let finished = up.command(&["run", "--", "echo"]).arg(not_text).output().unwrap();
    assert_eq!(finished.status.code(), Some(125), "{finished:?}");
    up.run(&["run", "--pids", "0", "--", "true"]).expect(125).says(&["leave the flag out"]);
    up.run(&["run", "-u", "nobody-here", "--", "true"]).expect(126).says(&["nobody-here", "`--user`"]);
    up.run(&["run", "--isolation", "microvm", "--", "true"]).expect(125).says(&["error:"]);
    up.run(&["exec", "nobody", "--", "true"]).expect(125).says(&["error:", "hint:"]);
    up.run(&["run", "--memory", "1", "--", "true"]).expect(125).says(&["memory"]);
    assert_eq!(up.json(&["session", "list"])["sessions"].as_array().map_or(0, Vec::len), 0);
}

#[test]
fn the_scene_that_a_newcomer_sees_ends_as_it_announces() {
    if !can_run() {
        return;
    }
    let up = Up::start();
    let scene = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/scene/scene.sh");
    let played = up.program("bash").arg(scene).env("CLOISTER", support::CLOISTER).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&played.stdout), String::from_utf8_lossy(&played.stderr));
    assert!(played.status.success(), "{out}{err}");
    assert_eq!(up.json(&["session", "list"])["sessions"].as_array().map_or(0, Vec::len), 0);
}

#[test]
fn a_program_cannot_make_the_guest_agent_wait_for_it() {
    if !can_run() {
        return;
    }
    let up = Up::start();
    up.run(&["session", "create", "--name", "box"]).expect(0);
    up.run(&["exec", "-u", "nobody", "box", "--", "true"]).expect(0);
    // The agent looks users up in this file, which belongs to the root inside.
    up.run(&["exec", "box", "--", "sh", "-c", "rm /etc/passwd && mkfifo /etc/passwd"]).expect(0);
    up.run(&["exec", "-u", "nobody", "box", "--", "true"])
        .expect(126)
        .says(&["/etc/passwd", "no regular file"]);
    up.run(&["exec", "box", "--", "true"]).expect(0);
}

#[test]
fn both_streams_arrive_apart_and_whole() {
    if !can_run() {
        return;
    }
    let up = Up::start();
    let finished = up.run(&["run", "--", "sh", "-c", "echo to-out; echo to-err >&2"]).expect(0);
    assert_eq!(finished.stdout(), "to-out");
    assert_eq!(finished.stderr().trim(), "to-err");

    let megabytes = 32;
    let script = format!("head -c {megabytes}M /dev/zero | tr '\\0' 'x'; head -c 1M /dev/zero >&2");
    let finished = up.run(&["run", "--", "sh", "-c", &script]).expect(0);
    assert_eq!(finished.bytes().len(), megabytes << 20);
    assert!(finished.bytes().iter().all(|byte| *byte == b'x'));
    assert_eq!(finished.stderr().len(), 1 << 20);
}

#[test]
fn input_arrives_whole_with_its_end() {
    if !can_run() {
        return;
    }
    let up = Up::start();
    let input: Vec<u8> = (0..3_000_000_u32).flat_map(|number| number.to_le_bytes()[..1].to_vec()).collect();
    let finished = up.run_with_input(&["run", "-i", "--", "cat"], &input).expect(0);
    assert_eq!(blake3::hash(finished.bytes()), blake3::hash(&input));
    let finished = up.run_with_input(&["run", "-i", "--", "wc", "-c"], b"").expect(0);
    assert_eq!(finished.stdout().trim(), "0");
    // A command that does not read must not hold anything up, and one that is given nothing reads the end.
    up.run_with_input(&["run", "-i", "--", "true"], &input).expect(0);
    let finished = up.run_with_input(&["run", "--", "cat"], b"not for it").expect(0);
    assert_eq!(finished.stdout(), "");
}

#[test]
fn environment_directory_and_user_are_as_asked() {
    if !can_run() {
        return;
    }
    let up = Up::start();
    let script = "echo \"$A|$B|$(pwd)|$(id -u)\"";
    let finished = up
        .run(&["run", "-e", "A=one", "-e", "B=x=y", "-w", "/usr", "-u", "1", "--", "sh", "-c", script])
        .expect(0);
    assert_eq!(finished.stdout(), "one|x=y|/usr|1");
}

#[test]
fn each_limit_that_was_hit_is_named() {
    if !can_run() {
        return;
    }
    let up = Up::start();
    let hog = "x=$(head -c 300M /dev/zero | tr '\\0' 'x'); echo ${#x}";
    up.run(&["run", "--memory", "48M", "--", "sh", "-c", hog])
        .expect(137)
        .says(&["out of memory", "--memory"]);

    let fork = "i=0; while [ $i -lt 64 ]; do sleep 2 & i=$((i+1)); done; wait";
    let finished =
        up.run(&["run", "--pids", "16", "--", "sh", "-c", fork]).says(&["process limit", "--pids"]);
    assert_ne!(finished.stderr(), "");

    let fill = "yes > /root/fill || exit 9";
    up.run(&["run", "--disk", "32M", "--", "sh", "-c", fill]).expect(9).says(&["disk full", "--disk"]);
    // A write that does not fit as a whole leaves room that it did not want.
    let fill = "dd if=/dev/zero of=/root/fill bs=1M 2>/dev/null || exit 9";
    up.run(&["run", "--disk", "64M", "--", "sh", "-c", fill]).expect(9).says(&["disk full", "--disk"]);

    let finished = up.run(&["run", "--timeout", "1s", "--", "sh", "-c", "echo kept; sleep 60"]).expect(124);
    assert_eq!(finished.stdout(), "kept");
    finished.says(&["timed out"]);
    up.run(&["run", "--no-output-timeout", "1s", "--", "sleep", "60"]).expect(124).says(&["without output"]);
}

#[test]
fn json_is_one_message_a_line_and_ends_with_the_exit() {
    if !can_run() {
        return;
    }
    let up = Up::start();
    let finished = up.run(&["--json", "run", "--", "sh", "-c", "echo hi; exit 3"]).expect(3);
    let lines = finished.json_lines();
    assert!(lines[0]["started"]["id"].as_str().is_some_and(|id| id.starts_with("exe_")), "{lines:?}");
    assert_eq!(lines[1]["frame"]["data"]["stream"], "OUTPUT_STREAM_STDOUT");
    assert_eq!(lines[1]["frame"]["data"]["data"], "aGkK");
    let exit = &lines.last().unwrap()["frame"]["exit"];
    assert_eq!(exit["reason"], "EXIT_REASON_EXITED");
    assert_eq!(exit["code"], 3);
    let finished = up.run(&["--json", "exec", "nobody", "--", "true"]).expect(125);
    let error: serde_json::Value = serde_json::from_str(&finished.stderr()).unwrap();
    assert_eq!(error["error"]["code"], "CL1005");
    assert_eq!(error["error"]["exitCode"], 125);
}

#[test]
fn an_interrupt_is_for_the_command_and_a_second_one_deletes() {
    if !can_run() {
        return;
    }
    let up = Up::start();
    let start = |script: &str| {
        let mut child = up
            .command(&["run", "--", "sh", "-c", script])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        stdout.read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n", "{}", up.logs());
        (child, stdout)
    };
    let (mut child, mut stdout) =
        start("trap 'echo told; exit 7' INT; echo ready; while :; do sleep 0.1; done");
    kill(i32::try_from(child.id()).unwrap(), rustix::process::Signal::INT);
    let mut rest = String::new();
    stdout.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "told\n");
    assert_eq!(child.wait().unwrap().code(), Some(7));

    let (mut child, mut stdout) = start("trap 'echo deaf' INT; echo ready; while :; do sleep 0.1; done");
    let pid = i32::try_from(child.id()).unwrap();
    kill(pid, rustix::process::Signal::INT);
    let mut line = String::new();
    stdout.read_line(&mut line).unwrap();
    assert_eq!(line, "deaf\n");
    kill(pid, rustix::process::Signal::INT);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    wait_for("the session to be deleted", || {
        let sessions = up.json(&["session", "list"]);
        if sessions["sessions"].is_null() { Ok(()) } else { Err(sessions.to_string()) }
    });
}

#[test]
fn a_reader_that_goes_away_ends_the_command() {
    if !can_run() {
        return;
    }
    let up = Up::start();
    let mut child =
        up.command(&["run", "--", "yes"]).stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    stdout.read_line(&mut line).unwrap();
    assert_eq!(line, "y\n");
    drop(stdout);
    assert_eq!(child.wait().unwrap().code(), Some(141));
    assert!(up.json(&["session", "list"])["sessions"].is_null());
}
