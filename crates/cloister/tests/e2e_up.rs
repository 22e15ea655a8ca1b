//! `cloister up` and `down` on the real binary: one per data directory, what dies comes back, sandboxes outlive the
//! host agent and a killed supervisor, a clean stop leaves nothing running.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test states what it expects by unwrapping it"
)]

mod support;

use std::net::TcpListener;
use std::os::unix::process::CommandExt;

use support::{CLOISTER, Up, can_run, is_alive, skip, wait_for};

/// Starts a program that counts, and returns its session and exec.
fn start_counter(up: &Up, name: &str) -> String {
    up.ok(&["session", "create", "--name", name]);
    up.ok(&["exec", "-d", name, "--", "sh", "-c", "i=0; while :; do echo $i; i=$((i+1)); sleep 0.05; done"])
}

/// Returns what the counter has printed; it must be 0, 1, 2, … without a hole.
fn count(up: &Up, name: &str, exec: &str) -> usize {
    let text = up.ok(&["logs", name, exec]);
    let numbers: Vec<&str> = text.lines().collect();
    let expected: Vec<String> = (0..numbers.len()).map(|number| number.to_string()).collect();
    assert_eq!(numbers, expected, "the output has a hole");
    numbers.len()
}

fn wait_until_it_counts_on(up: &Up, name: &str, exec: &str, from: usize) {
    wait_for("the counter to count on", || {
        let finished = up.run(&["logs", name, exec]);
        let lines = finished.stdout().lines().count();
        if lines > from { Ok(()) } else { Err(format!("{lines} lines: {finished:?}")) }
    });
    count(up, name, exec);
}

#[test]
fn a_host_agent_that_was_killed_adopts_what_runs() {
    if !can_run() {
        return;
    }
    let up = Up::start();
    let exec = start_counter(&up, "counter");
    wait_until_it_counts_on(&up, "counter", &exec, 3);
    let inside = up.json(&["ps", "counter"])["execs"][0]["pid"].clone();
    let before = count(&up, "counter", &exec);
    up.kill_role("host");
    wait_until_it_counts_on(&up, "counter", &exec, before + 5);
    let execs = up.json(&["ps", "counter"]);
    assert_eq!(execs["execs"][0]["pid"], inside, "it is the same process");
    assert_eq!(execs["execs"][0]["state"], "EXEC_STATE_RUNNING");
    up.run(&["exec", "counter", "--", "true"]).expect(0);
    up.ok(&["session", "delete", "counter"]);
}

#[test]
fn a_coordinator_that_was_killed_comes_back_with_everything() {
    if !can_run() {
        return;
    }
    let up = Up::start();
    let exec = start_counter(&up, "counter");
    wait_until_it_counts_on(&up, "counter", &exec, 3);
    let before = count(&up, "counter", &exec);
    up.kill_role("coordinator");
    wait_until_it_counts_on(&up, "counter", &exec, before + 5);
    up.run(&["run", "--", "true"]).expect(0);
    let status = up.json(&["status"]);
    assert_eq!(status["running"], true, "{status}");
}

#[test]
fn a_database_that_was_killed_comes_back_and_nothing_acknowledged_is_lost() {
    if !can_run() {
        return;
    }
    let up = Up::start();
    let session = up.ok(&["session", "create", "--name", "acknowledged"]);
    up.kill_role("postgres");
    assert_eq!(up.json(&["session", "get", "acknowledged"])["session"]["id"], session.as_str());
    up.run(&["exec", "acknowledged", "--", "true"]).expect(0);
    up.run(&["run", "--", "true"]).expect(0);
    wait_for("the restart to be counted", || {
        let status = up.json(&["status"]);
        let roles = status["up"]["roles"].as_array().unwrap();
        let postgres = roles.iter().find(|role| role["name"] == "postgres").unwrap();
        if postgres["restarts"] == 1 { Ok(()) } else { Err(status.to_string()) }
    });
}

#[test]
fn roles_have_their_name_and_the_coordinator_may_open_many_files() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    if !can_run() {
        return;
    }
    let most = getrlimit(Resource::Nofile).maximum;
    // As a login shell has it.
    setrlimit(Resource::Nofile, Rlimit { current: Some(1024), maximum: most }).unwrap();
    let up = Up::start();
    for role in ["coordinator", "host"] {
        let name = std::fs::read_to_string(format!("/proc/{}/comm", up.pid_of(role))).unwrap();
        assert_eq!(name.trim(), "cloister", "{role}");
    }
    let open_files = |role| {
        let limits = std::fs::read_to_string(format!("/proc/{}/limits", up.pid_of(role))).unwrap();
        let line = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
        line.split_whitespace().next().unwrap().to_owned()
    };
    assert_eq!(open_files("coordinator"), most.map_or("unlimited".to_owned(), |most| most.to_string()));
    assert_eq!(open_files("host"), "1024", "programs in sandboxes inherit the host agent's");
}

#[test]
fn status_is_good_only_when_the_api_answers_its_caller() {
    if !can_run() {
        return;
    }
    let up = Up::start();
    up.run(&["status"]).expect(0);
    let output = up.command(&["--json", "status"]).env("CLOISTER_TOKEN", "clt_of_nobody").output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    let status: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&status["running"], &status["api"]["reachable"]), (&true.into(), &false.into()), "{status}");
}

#[test]
fn a_stream_that_is_cut_goes_on_where_it_was() {
    if !can_run() {
        return;
    }
    let up = Up::start();
    up.ok(&["session", "create", "--name", "long"]);
    let script = "i=0; while [ $i -lt 100 ]; do echo $i; i=$((i+1)); sleep 0.05; done";
    let reader = up
        .command(&["exec", "long", "--", "sh", "-c", script])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    wait_for("the exec to print", || {
        let finished = up.run(&["logs", "long"]);
        if finished.stdout().lines().count() > 5 { Ok(()) } else { Err(format!("{finished:?}")) }
    });
    up.kill_role("coordinator");
    let output = reader.wait_with_output().unwrap();
    let expected: String = (0..100).map(|number| format!("{number}\n")).collect();
    assert_eq!(String::from_utf8_lossy(&output.stdout), expected, "{}", up.logs());
    assert_eq!(output.status.code(), Some(0));
}

#[test]
fn a_supervisor_that_was_killed_leaves_what_the_next_one_takes_over() {
    if !can_run() {
        return;
    }
    let mut up = Up::start();
    let exec = start_counter(&up, "counter");
    wait_until_it_counts_on(&up, "counter", &exec, 3);
    let (postgres, coordinator, host) = (up.pid_of("postgres"), up.pid_of("coordinator"), up.pid_of("host"));
    up.kill();
    wait_for("the roles to die with it", || {
        let alive: Vec<i32> = [coordinator, host].into_iter().filter(|pid| is_alive(*pid)).collect();
        if alive.is_empty() { Ok(()) } else { Err(format!("{alive:?} live")) }
    });
    assert!(is_alive(postgres), "the database is left to be taken over");
    up.start_again();
    assert_eq!(up.pid_of("postgres"), postgres, "the same database server");
    let before = up.run(&["logs", "counter", &exec]).stdout().lines().count();
    wait_until_it_counts_on(&up, "counter", &exec, before + 5);
}

#[test]
fn a_clean_stop_leaves_no_process_and_pauses_sessions() {
    if !can_run() {
        return;
    }
    let mut up = Up::start();
    let exec = start_counter(&up, "counter");
    wait_until_it_counts_on(&up, "counter", &exec, 3);
    up.run(&["exec", "counter", "--", "sh", "-c", "echo kept > /root/file"]).expect(0);
    assert_eq!(up.interrupt(), Some(0), "{}", up.logs());
    assert_eq!(up.processes(), Vec::<String>::new());
    assert_eq!(up.mounts(), Vec::<String>::new());
    up.run(&["status"]).expect(3);
    up.run(&["doctor", "--listen", "127.0.0.1:0"]).expect(0);
    let down = std::process::Command::new("date").args(["-u", "+%Y-%m-%dT%H:%M:%S.%NZ"]).output().unwrap();
    let down = String::from_utf8(down.stdout).unwrap();
    up.start_again();
    let session = up.json(&["session", "get", "counter"])["session"].clone();
    assert_eq!(session["state"], "SESSION_STATE_PAUSED", "{session}");
    assert_eq!(session["reason"], "host_stopped", "{session}");
    // Known before the database stopped, not found out by the start: the times are text of the same form.
    let paused = session["updatedAt"].as_str().unwrap();
    assert!(paused < down.trim(), "paused at {paused}, down at {down}");
    up.ok(&["session", "resume", "counter"]);
    assert_eq!(up.ok(&["exec", "counter", "--", "cat", "/root/file"]), "kept");
}

#[test]
fn a_second_up_is_refused_and_a_taken_port_names_the_flag() {
    if !can_run() {
        return;
    }
    let up = Up::start();
    let pid = up.pid().to_string();
    up.run(&["up", "--listen", "127.0.0.1:0"]).expect(1).says(&[&pid, "hint:", "cloister down"]);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let other = ["--data-dir", "/tmp/clo-never/data", "--run-dir", "/tmp/clo-never/run"];
    up.run(&["up", "--listen", &address, other[0], other[1], other[2], other[3]])
        .expect(1)
        .says(&["--listen", &address]);
    let _ = std::fs::remove_dir_all("/tmp/clo-never");
}

#[test]
fn a_context_is_written_privately_and_a_user_behind_sudo_that_is_not_there_is_named() {
    if !can_run() {
        return;
    }
    let mut up = Up::start();
    assert_eq!(up.interrupt(), Some(0));
    let home = up.path("home");
    std::fs::create_dir(&home).unwrap();
    let config = home.join(".config/cloister/config.toml");
    let detached = up
        .command(&["up", "--detach", "--listen", "127.0.0.1:0"])
        .env_remove("CLOISTER_CONFIG")
        .env("HOME", &home)
        .env("SUDO_USER", "no-such-user")
        .output()
        .unwrap();
    assert!(detached.status.success(), "{detached:?}\n{}", up.logs());
    assert!(up.logs().contains("the context for user `no-such-user` was not written"), "{}", up.logs());
    let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&config).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
    let listed = up.command(&["session", "list"]).env("CLOISTER_CONFIG", &config).output().unwrap();
    assert!(listed.status.success(), "{listed:?}");
}

#[test]
fn a_role_that_does_not_start_is_named_with_the_end_of_its_log() {
    if !can_run() {
        return;
    }
    let mut up = Up::start();
    assert_eq!(up.interrupt(), Some(0));
    let start = |name: &str, value: &str| {
        let output = up.command(&["up", "--listen", "127.0.0.1:0"]).env(name, value).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert_eq!(up.processes(), Vec::<String>::new());
        stderr
    };
    // What can be seen before anything starts is.
    let stderr = start("CLOISTER_HOST_NAME", "Not A Name");
    assert!(stderr.contains("Not A Name") && !stderr.contains("starting PostgreSQL"), "{stderr}");
    let stderr = start("DATABASE_URL", "postgres://nobody:secret@127.0.0.1:1/db");
    for text in ["127.0.0.1:1", "refused", "hint:"] {
        assert!(stderr.contains(text), "`{text}` is not in: {stderr}");
    }
    assert!(!stderr.contains("secret"), "{stderr}");
    // The coordinator remembers the host from before: that must not pass for a host agent that runs.
    let record = up.path("data/host/host.json");
    let kept = std::fs::read(&record).unwrap();
    std::fs::write(&record, "{").unwrap();
    let stderr = start("RUST_LOG", "info");
    for text in ["the host does not start", "host.json", "hint:", "host.log"] {
        assert!(stderr.contains(text), "`{text}` is not in: {stderr}");
    }
    std::fs::write(&record, kept).unwrap();
    up.run(&["up", "--backend", "docker"]).expect(2).says(&["docker", "`namespace`"]);
}

#[test]
fn without_root_up_is_refused_with_the_remedy() {
    if !can_run() {
        return;
    }
    // Started as root, it becomes nobody before it looks at anything.
    let output =
        std::process::Command::new(CLOISTER).args(["up", "--run-as", "65534:65534"]).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("needs root") && stderr.contains("sudo cloister up"), "{stderr}");
}

#[test]
fn detached_up_returns_ready_and_down_purges_everything() {
    if !can_run() {
        return;
    }
    let mut up = Up::start();
    assert_eq!(up.interrupt(), Some(0));
    // With fewer open files than a sandbox takes, as `ulimit -Sn 64` leaves; it may raise them.
    let limited = up
        .program("prlimit")
        .args(["--nofile=64:4096", CLOISTER, "up", "--detach", "--listen", "127.0.0.1:0"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&limited.stdout);
    assert!(text.contains("Cloister is up"), "{text} {}", String::from_utf8_lossy(&limited.stderr));
    up.run(&["run", "--", "true"]).expect(0);
    // A second installation needs a run directory of its own, and must not stop this one.
    let other = up.path("other").display().to_string();
    for verb in ["up", "down"] {
        up.run(&[verb, "--data-dir", &other]).expect(1).says(&["--run-dir", "--data-dir"]);
    }
    assert!(!up.path("other").exists());
    // Nor may it take away the context by which this one is found.
    let run = up.path("other-run").display().to_string();
    let second = ["up", "--detach", "--listen", "127.0.0.1:0", "--data-dir", &other, "--run-dir", &run];
    up.run(&second).expect(1).says(&["context `local`", "--context"]);
    let second = up.run(&[&second[..], &["--context", "second"]].concat()).expect(0).stdout();
    let stop = format!("cloister down --data-dir {other} --run-dir {run}");
    assert!(second.contains(&stop), "{second}");
    let status = up.run(&["status"]).expect(0).says(&["context use local"]).stdout();
    assert!(status.contains(&up.path("run").display().to_string()), "{status}");
    up.run(&["--context", "second", "run", "--", "true"]).expect(0);
    up.run(&["down", "--purge", "--yes", "--data-dir", &other, "--run-dir", &run]).expect(0);
    up.run(&["context", "use", "local"]).expect(0);
    // The port of what runs is its own, whoever has the one that another would take.
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    up.run(&["doctor", "--listen", &taken.local_addr().unwrap().to_string()]).expect(0);
    let (status, sockets) = (up.ok(&["status"]), up.path("run/postgres"));
    assert!(status.contains(&format!("sockets in {}", sockets.display())) && sockets.is_dir(), "{status}");
    assert!(up.json(&["host", "list"])["hosts"][0]["connected"] == true);
    up.run(&["down", "--purge"]).expect(1).says(&["--yes"]);
    up.ok(&["down", "--purge", "--yes"]);
    assert_eq!(up.processes(), Vec::<String>::new());
    assert!(!up.path("data").exists() && !up.path("run").exists());
    up.run(&["down"]).expect(0);
}

#[test]
fn doctor_works_without_anything_running() {
    let directory = tempfile::tempdir().unwrap();
    let output = std::process::Command::new(CLOISTER)
        .args(["--json", "doctor", "--listen", "127.0.0.1:0"])
        .arg("--data-dir")
        .arg(directory.path().join("data"))
        .arg("--run-dir")
        .arg(directory.path().join("run"))
        .env("CLOISTER_CONFIG", directory.path().join("config.toml"))
        .env_remove("CLOISTER_ENDPOINT")
        .arg0("cloister")
        .output()
        .unwrap();
    let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let checks = found["checks"].as_array().unwrap();
    let by_name = |name: &str| checks.iter().find(|check| check["name"] == name).unwrap();
    assert_eq!(by_name("coordinator")["status"], "not_applicable");
    assert_eq!(by_name("port")["status"], "ok");
    if by_name("postgres")["status"] != "ok" {
        skip("PostgreSQL is not installed");
    }
}

#[test]
fn down_says_when_a_sandbox_does_not_stop_and_a_lost_intent_keeps_nothing_alive() {
    if !can_run() {
        return;
    }
    let mut up = Up::start_with(|_| vec![("CLOISTER_HOST_WARM_SANDBOXES", "0".to_owned())]);
    up.ok(&["session", "create", "--name", "box"]);
    let (shim, _) = up.sandbox_processes();
    let sandboxes = up.path("data/host/sandboxes");
    let intent = std::fs::read_dir(&sandboxes).unwrap().flatten().next().unwrap().path().join("intent.json");
    std::fs::remove_file(&intent).unwrap();
    up.kill_role("host");
    wait_for("the session to be paused", || {
        let session = up.json(&["session", "get", "box"])["session"]["state"].clone();
        if session == "SESSION_STATE_PAUSED" { Ok(()) } else { Err(session.to_string()) }
    });
    wait_for("the shim to end", || if support::is_alive(shim) { Err(shim.to_string()) } else { Ok(()) });
    up.ok(&["session", "resume", "box"]);
    up.run(&["exec", "box", "--", "true"]).expect(0);

    // What looks like a shim of ours and lives on after everything has stopped.
    assert_eq!(up.interrupt(), Some(0));
    let config = sandboxes.join("sbx_x/shim.json").display().to_string();
    // It ends with its standard input, so that it does not outlive this test either.
    std::fs::write(up.path("shim"), "while read line; do :; done").unwrap();
    let mut left = up.program("sh");
    let mut left = left
        .args(["shim", "--config", &config])
        .current_dir(up.directory())
        .stdin(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let pid = left.id().to_string();
    up.run(&["down", "--purge", "--yes"]).expect(1).says(&["1 sandboxes still run", &pid, "kill -9"]);
    assert!(up.path("data").exists());
    left.kill().unwrap();
    left.wait().unwrap();
    up.ok(&["up", "--detach", "--listen", "127.0.0.1:0"]);
    up.ok(&["session", "delete", "box"]);
    up.ok(&["down", "--purge", "--yes"]);
    assert_eq!(up.processes(), Vec::<String>::new());
}
