//! gVisor through the real binary: it is what `auto` takes, its sandboxes outlive the host agent beside others, and when one
//! dies nothing of it is left.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test states what it expects by unwrapping it"
)]

mod support;

use std::fs;

use rustix::process::Signal;
use support::{Up, can_run, is_alive, kill, skip, wait_for, which};

/// An installation that offers both kinds; `None`, after saying so, without a `runsc`.
fn start() -> Option<Up> {
    if !can_run() {
        return None;
    }
    if std::env::var_os("CLOISTER_RUNSC").is_none() && !which("runsc") {
        skip("there is no `runsc` in PATH or CLOISTER_RUNSC: `just gvisor` builds one");
        return None;
    }
    // One that was warm has another place in its command line.
    Some(Up::start_with(|_| {
        vec![
            ("CLOISTER_SANDBOX_BACKEND", "auto".to_owned()),
            ("CLOISTER_HOST_WARM_SANDBOXES", "0".to_owned()),
        ]
    }))
}

/// Every process that has `pid` for a forebear, itself included.
fn family(pid: i32) -> Vec<i32> {
    let mut found = vec![pid];
    let mut next = 0;
    while let Some(parent) = found.get(next).copied() {
        next += 1;
        for task in fs::read_dir(format!("/proc/{parent}/task")).into_iter().flatten().flatten() {
            let children = fs::read_to_string(task.path().join("children")).unwrap_or_default();
            found.extend(children.split_whitespace().map(|pid| pid.parse::<i32>().unwrap()));
        }
    }
    found
}

/// The shim of each running sandbox, by sandbox id.
fn shims(up: &Up) -> Vec<(String, i32)> {
    let mark = format!("{}/", up.path("data/host/sandboxes").display());
    let mut found: Vec<(String, i32)> = Vec::new();
    for process in up.processes() {
        let Some((_, rest)) = process.split_once(&mark) else { continue };
        let pid: i32 = process.split(' ').next().unwrap().parse().unwrap();
        let parent = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let parent: i32 = parent
            .rsplit(')')
            .next()
            .unwrap()
            .split_whitespace()
            .nth(1)
            .map_or(0, |pid| pid.parse().unwrap());
        // A keeper is a copy of its shim.
        if fs::read_to_string(format!("/proc/{parent}/cmdline")).unwrap_or_default().contains(&mark) {
            continue;
        }
        found.push((rest.split('/').next().unwrap().to_owned(), pid));
    }
    found.sort();
    found
}

#[test]
fn auto_is_gvisor_and_a_session_keeps_its_files_and_its_kernel() {
    let Some(up) = start() else { return };
    let doctor = up.run(&["doctor"]).stdout();
    for line in ["backend.gvisor", "gvisor.runsc", "backend.namespace"] {
        assert!(doctor.contains(&format!("ok      {line}")), "{line} in {doctor}");
    }
    up.ok(&["session", "create", "--name", "box", "--memory", "128M", "--disk", "64M"]);
    let session = up.json(&["session", "get", "box"])["session"].clone();
    assert_eq!(
        (session["backend"].as_str(), session["isolation"].as_str()),
        (Some("gvisor"), Some("ISOLATION_GVISOR"))
    );
    let facts = session["facts"].to_string();
    for fact in ["sentry_pid", "sentry_capabilities", "uid_map", "namespace.user", "seccomp_mode"] {
        assert!(facts.contains(fact), "{fact} in {facts}");
    }
    assert!(up.ok(&["exec", "box", "--", "uname", "-r"]).contains("gvisor"));
    up.ok(&["exec", "box", "--", "sh", "-c", "echo kept > /workspace/f"]);
    up.run(&["exec", "box", "--", "perl", "-e", "$x = 'x' x (512 << 20); sleep 9"])
        .expect(137)
        .says(&["out of memory"]);
    up.run(&["exec", "box", "--", "dd", "if=/dev/zero", "of=/workspace/big", "bs=1M"])
        .expect(1)
        .says(&["disk full"]);
    up.ok(&["session", "pause", "box"]);
    up.ok(&["session", "resume", "box"]);
    assert_eq!(
        up.ok(&["exec", "box", "--", "sh", "-c", "cat /workspace/f; uname -r"]).lines().next(),
        Some("kept")
    );
    assert_eq!(up.json(&["session", "get", "box"])["session"]["backend"], "gvisor");
    // The other kind is for whoever names it, and who asks for this one does not get that.
    assert!(!up.ok(&["run", "--backend", "namespace", "--", "uname", "-r"]).contains("gvisor"));
    up.run(&["run", "--backend", "namespace", "--isolation", "gvisor", "--", "true"]).expect(125);
    up.ok(&["session", "delete", "box"]);
    wait_for("the sandbox to be gone", || {
        let left = shims(&up);
        if left.is_empty() { Ok(()) } else { Err(format!("{left:?}")) }
    });
}

#[test]
fn nothing_is_left_of_a_gvisor_sandbox_whatever_is_killed() {
    let Some(up) = start() else { return };
    for victim in ["shim", "keeper", "sentry", "gofer"] {
        up.ok(&["session", "create", "--name", victim, "--memory", "128M"]);
        up.ok(&["exec", "-d", victim, "--", "sh", "-c", "sleep 1000 & setsid sleep 1000 & wait"]);
        let (_, shim) = shims(&up).pop().expect("it runs");
        let all = family(shim);
        let command = |pid: i32| fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let named = |word: &str| *all.iter().find(|pid| command(**pid).starts_with(word)).unwrap();
        let pid = match victim {
            "shim" => shim,
            "keeper" => all[1],
            "sentry" => named("runsc-sandbox"),
            _ => named("runsc-gofer"),
        };
        kill(pid, Signal::KILL);
        wait_for("the session to be paused", || {
            let state = up.json(&["session", "get", victim])["session"]["state"].clone();
            if state == "SESSION_STATE_PAUSED" { Ok(()) } else { Err(state.to_string()) }
        });
        wait_for("every process to be gone", || {
            let left: Vec<i32> = all.iter().copied().filter(|pid| is_alive(*pid)).collect();
            if left.is_empty() { Ok(()) } else { Err(format!("{victim}: {left:?}")) }
        });
        up.ok(&["session", "resume", victim]);
        up.run(&["exec", victim, "--", "true"]).expect(0);
        up.ok(&["session", "delete", victim]);
    }
    assert_eq!(up.mounts(), Vec::<String>::new());
}

#[test]
fn thirty_sandboxes_of_both_kinds_outlive_their_host_agent() {
    const EACH: usize = 15;
    let Some(up) = start() else { return };
    let count = "i=0; while :; do echo $i; i=$((i+1)); sleep 0.2; done";
    let mut execs = Vec::new();
    for number in 0..EACH {
        for backend in ["gvisor", "namespace"] {
            let name = format!("{backend}-{number}");
            up.ok(&[
                "session",
                "create",
                "--name",
                &name,
                "--backend",
                backend,
                "--memory",
                "64M",
                "--disk",
                "32M",
                "--cpus",
                "0.1",
            ]);
            let exec = up.ok(&["exec", "-d", &name, "--", "sh", "-c", count]);
            execs.push((name, exec.trim().to_owned()));
        }
    }
    let before = shims(&up);
    assert_eq!(before.len(), 2 * EACH);
    let pids = |up: &Up| {
        execs
            .iter()
            .map(|(name, _)| up.json(&["ps", name])["execs"][0]["pid"].to_string())
            .collect::<Vec<_>>()
    };
    let inside = pids(&up);
    let lines = |name: &str, exec: &str| {
        let text = up.ok(&["logs", name, exec]);
        let numbers: Vec<&str> = text.lines().collect();
        let expected: Vec<String> = (0..numbers.len()).map(|number| number.to_string()).collect();
        assert_eq!(numbers, expected, "the output of {name} has a hole");
        numbers.len()
    };
    let printed: Vec<usize> = execs.iter().map(|(name, exec)| lines(name, exec)).collect();
    up.kill_role("host");
    for ((name, exec), before) in execs.iter().zip(printed) {
        wait_for("the counter to count on", || {
            let now = up.run(&["logs", name, exec]).stdout().lines().count();
            if now > before + 2 { Ok(()) } else { Err(format!("{name}: {now} after {before}")) }
        });
        lines(name, exec);
    }
    assert_eq!(shims(&up), before, "they are the same processes");
    assert_eq!(pids(&up), inside, "inside too");
    for (name, _) in &execs {
        up.ok(&["session", "delete", name]);
    }
}

/// Files and ports go through the kernel of the sandbox, which here is gVisor's own.
#[test]
fn files_are_copied_and_ports_forwarded_on_gvisor() {
    let Some(up) = start() else { return };
    up.run(&["session", "create", "--name", "box", "--backend", "gvisor"]).expect(0);
    let tree = up.path("tree");
    fs::create_dir_all(tree.join("sub")).unwrap();
    fs::write(tree.join("sub/program"), "#!/bin/sh\necho ran\n").unwrap();
    fs::set_permissions(tree.join("sub/program"), std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .unwrap();
    std::os::unix::fs::symlink("sub/program", tree.join("link")).unwrap();
    let big: Vec<u8> = (0..20 * 1024 * 1024_u32).map(|index| index.to_le_bytes()[1]).collect();
    fs::write(tree.join("big"), &big).unwrap();
    up.run(&["cp", tree.to_str().unwrap(), "box:"]).expect(0);
    assert_eq!(up.ok(&["exec", "box", "--", "/workspace/tree/link"]), "ran");
    let back = up.path("back");
    up.run(&["cp", "box:tree", back.to_str().unwrap()]).expect(0);
    assert_eq!(fs::read(back.join("big")).unwrap(), big);
    assert_eq!(fs::read_link(back.join("link")).unwrap(), std::path::Path::new("sub/program"));
    // As a user who may not, and a link that leads to the host's files leads to the sandbox's.
    up.run(&["cp", "-u", "nobody", "box:/root/.", up.path("root").to_str().unwrap()]).expect(1);
    up.run(&["exec", "box", "--", "ln", "-s", "/etc/hostname", "name"]).expect(0);
    up.run(&["cp", "-n", "box:name", up.path("name").to_str().unwrap()]).expect(0);
    let name = up.ok(&["exec", "box", "--", "cat", "/etc/hostname"]);
    assert_eq!(fs::read_to_string(up.path("name")).unwrap().trim(), name);
    assert_ne!(name, fs::read_to_string("/etc/hostname").unwrap().trim());
    // Not replacing a file takes a call that this kernel must have.
    let program = tree.join("sub/program");
    up.run(&["cp", "-n", program.to_str().unwrap(), "box:once"]).expect(0);
    up.run(&["cp", "-n", program.to_str().unwrap(), "box:once"]).expect(1).says(&["it is there already"]);

    let server = "import socket\ns=socket.create_server(('127.0.0.1',7000))\nwhile True:\n c,_=s.accept()\n c.sendall(b'first word')\n c.recv(1)\n c.close()";
    if !which("python3") {
        skip("there is no python3 for a server in the sandbox");
        return;
    }
    up.run(&["exec", "-d", "box", "--", "python3", "-c", server]).expect(0);
    let mut forwarding = up
        .command(&["port-forward", "--json", "box", "0:7000"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(forwarding.stdout.take().unwrap()), &mut line)
        .unwrap();
    let line: serde_json::Value = serde_json::from_str(&line).unwrap();
    let address = line["local"].as_str().unwrap();
    // A server that speaks first.
    wait_for("the server's word", || {
        let mut word = [0; 10];
        let mut connection = std::net::TcpStream::connect(address).map_err(|error| error.to_string())?;
        std::io::Read::read_exact(&mut connection, &mut word).map_err(|error| error.to_string())?;
        if &word == b"first word" { Ok(()) } else { Err(format!("{word:?}")) }
    });
    forwarding.kill().unwrap();
    forwarding.wait().unwrap();
}
