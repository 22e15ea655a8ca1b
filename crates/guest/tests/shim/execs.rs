//! Starting programs: what they are given, what they return, what ends them.

use std::time::{Duration, Instant};

use cloister_guest::client::ClientError;
use cloister_types::{ExecId, ExecSpec, ExitReason};

use crate::peer::{Peer, argv, collect, run, sh, until};

#[test]
fn stdout_and_stderr_stay_apart_and_the_code_arrives() {
    run(async {
        let peer = Peer::start();
        let (stdout, stderr, exit) = peer.run(sh("echo out; echo err >&2; echo out2; exit 7")).await;
        assert_eq!((stdout.as_slice(), stderr.as_slice()), (&b"out\nout2\n"[..], &b"err\n"[..]));
        assert_eq!((exit.reason, exit.code, exit.signal), (ExitReason::Exited, 7, None));
        assert_eq!(exit.output_bytes, 13);
    });
}

#[test]
fn a_program_gets_its_environment_directory_and_user() {
    run(async {
        let peer = Peer::start();
        let mut spec = sh("echo $FROM_IMAGE $MINE $HOME; pwd; id -u; id -g");
        spec.env.insert("MINE".to_owned(), "it is".to_owned());
        spec.cwd = Some("/usr".to_owned());
        spec.user = Some("nobody".to_owned());
        let (stdout, stderr, exit) = peer.run(spec).await;
        let text = String::from_utf8(stdout).unwrap();
        assert_eq!(
            text,
            "yes it is /nonexistent\n/usr\n65534\n65534\n",
            "{}",
            String::from_utf8_lossy(&stderr)
        );
        assert_eq!(exit.code, 0);
    });
}

#[test]
fn a_program_that_cannot_start_has_ended_as_not_started() {
    run(async {
        let peer = Peer::start();
        let file = peer.dir.path().join("data");
        std::fs::write(&file, "no program").unwrap();
        let file = file.to_str().unwrap().to_owned();
        let wrong_cwd = ExecSpec { cwd: Some("/no/such".to_owned()), ..sh("true") };
        let wrong_user = ExecSpec { user: Some("no-such-user".to_owned()), ..sh("true") };
        for (spec, code, says) in [
            (argv(&["no-such-program"]), 127, "not found in `PATH`"),
            (argv(&["/no/such/program"]), 127, "not found"),
            (argv(&[&file]), 126, "cannot be run"),
            (argv(&["/usr"]), 126, "cannot be run"),
            (wrong_cwd, 126, "/no/such"),
            (wrong_user, 126, "no-such-user"),
        ] {
            let (stdout, stderr, exit) = peer.run(spec).await;
            assert_eq!((exit.reason, exit.code), (ExitReason::NotStarted, code), "{}", exit.message);
            assert!(exit.message.contains(says), "{}", exit.message);
            assert!(stdout.is_empty() && stderr.is_empty());
        }
    });
}

#[test]
fn signals_reach_the_whole_group_and_are_not_inherited_as_ignored() {
    run(async {
        let peer = Peer::start();
        // A child of the shell holds the output open: only a signal to the group ends it in time.
        let record = peer.spawn(sh("sleep 600 & echo $!; wait")).await;
        let mut reader = peer.client.read_output(&record.exec_id, 0, false).await.unwrap();
        let Some(cloister_types::OutputFrame::Data { data, .. }) = reader.next().await.unwrap() else {
            panic!("no number of the child")
        };
        peer.client.signal(&record.exec_id, libc::SIGINT).await.unwrap();
        let (_, _, exit) = collect(&mut reader).await;
        // A background child of a shell ignores SIGINT by the shell's own doing; the shell does not.
        assert_eq!((exit.reason, exit.code, exit.signal), (ExitReason::Signaled, 130, Some(2)));
        end(&data);
        // An exec that has ended takes signals as a matter of course.
        peer.client.signal(&record.exec_id, libc::SIGKILL).await.unwrap();

        let (stdout, _, _) = peer.run(sh("grep -E 'Sig(Ign|Blk)' /proc/self/status")).await;
        let text = String::from_utf8(stdout).unwrap();
        assert_eq!(text.matches("0000000000000000").count(), 2, "{text}");

        let record = peer.spawn(sh("sleep 600 & echo $!; sleep 600")).await;
        let mut reader = peer.client.read_output(&record.exec_id, 0, false).await.unwrap();
        let frame = reader.next().await.unwrap();
        let Some(cloister_types::OutputFrame::Data { data, .. }) = frame else { panic!("{frame:?}") };
        let background: u32 = String::from_utf8(data).unwrap().trim().parse().unwrap();
        peer.client.signal(&record.exec_id, libc::SIGKILL).await.unwrap();
        assert_eq!(collect(&mut reader).await.2.signal, Some(9));
        // Reaped too, though its parent never waited for it.
        until("the child is gone", || {
            let there = std::path::Path::new(&format!("/proc/{background}")).exists();
            (!there, there)
        })
        .await;
    });
}

#[test]
fn a_time_limit_kills_and_keeps_the_output() {
    run(async {
        let peer = Peer::start();
        let spec = ExecSpec { timeout: Some(Duration::from_millis(150)), ..sh("echo before; sleep 600") };
        let (stdout, _, exit) = peer.run(spec).await;
        assert_eq!(stdout, b"before\n");
        assert_eq!((exit.reason, exit.signal), (ExitReason::Timeout, Some(9)));
        assert!(exit.message.contains("150ms"), "{}", exit.message);
    });
}

#[test]
fn silence_kills_and_a_chatty_program_lives() {
    run(async {
        let peer = Peer::start();
        let silent = ExecSpec {
            no_output_timeout: Some(Duration::from_millis(300)),
            ..sh("for i in 1 2 3 4; do echo $i; sleep 0.15; done; exec sleep 600")
        };
        let (stdout, _, exit) = peer.run(silent).await;
        assert_eq!(stdout, b"1\n2\n3\n4\n");
        assert_eq!(exit.reason, ExitReason::NoOutputTimeout);
        // A program that has closed its output is as silent as any.
        let closed = ExecSpec {
            no_output_timeout: Some(Duration::from_millis(100)),
            ..sh("exec >/dev/null 2>&1; sleep 600")
        };
        assert_eq!(peer.run(closed).await.2.reason, ExitReason::NoOutputTimeout);
    });
}

/// Ends a child that the guest agent has left alone: without a pid namespace it would outlive the test.
fn end(printed_pid: &[u8]) {
    let pid = String::from_utf8_lossy(printed_pid).trim().parse().unwrap();
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    // It may have ended with its group.
    let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
}

#[test]
fn a_child_that_outlives_the_program_does_not_hold_the_exec() {
    run(async {
        let peer = Peer::start();
        let begin = Instant::now();
        let script = "head -c 200000 /dev/zero; sleep 600 & echo $! >&2; exit 3";
        let (stdout, stderr, exit) = peer.run(sh(script)).await;
        end(&stderr);
        assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
        assert_eq!((exit.code, stdout.len()), (3, 200_000));
    });
}

#[test]
fn the_same_request_starts_once_and_another_payload_is_refused() {
    run(async {
        let peer = Peer::start();
        let (first, second) = (ExecId::generate(), ExecId::generate());
        let spec = sh("sleep 0.2; echo once");
        let (one, two) = tokio::join!(
            peer.client.start_exec(&first, "same", &spec),
            peer.client.start_exec(&second, "same", &spec),
        );
        let (one, two) = (one.unwrap(), two.unwrap());
        assert_eq!((&one.exec_id, one.pid), (&two.exec_id, two.pid));
        assert_eq!(peer.client.execs().await.unwrap().len(), 1);
        let other = peer.client.start_exec(&first, "same", &sh("echo twice")).await;
        assert!(matches!(other, Err(ClientError::Conflict(_))), "{other:?}");
        let reused = peer.client.start_exec(&one.exec_id, "another", &spec).await;
        assert!(matches!(reused, Err(ClientError::Conflict(_))), "{reused:?}");
        let ended = peer.client.wait_exec(&one.exec_id, Duration::from_secs(10)).await.unwrap();
        assert_eq!(ended.exit.unwrap().code, 0);
        let again = peer.client.start_exec(&first, "same", &spec).await.unwrap();
        assert_eq!((again.exec_id, again.exit.unwrap().code), (one.exec_id, 0));
    });
}

#[test]
fn waiting_ends_at_its_time_or_with_the_exec() {
    run(async {
        let peer = Peer::start();
        let record = peer.spawn(sh("read line; exit 4")).await;
        assert!(record.exit.is_some() || record.pid > 0);
        let with_stdin = ExecSpec { stdin: true, ..sh("read line; exit 4") };
        let record = peer.spawn(with_stdin).await;
        let early = peer.client.wait_exec(&record.exec_id, Duration::from_millis(30)).await.unwrap();
        assert_eq!(early.exit, None);
        peer.client.write_stdin(&record.exec_id, 0, b"go\n", false).await.unwrap();
        let late = peer.client.wait_exec(&record.exec_id, Duration::from_secs(10)).await.unwrap();
        assert_eq!(late.exit.unwrap().code, 4);
    });
}

#[test]
fn the_oldest_ended_execs_make_room_and_running_ones_do_not() {
    run(async {
        let peer = Peer::start_with(|config| config.execs_max = 3);
        let running = peer.spawn(sh("sleep 600")).await;
        let mut ended = Vec::new();
        for _ in 0..4 {
            let record = peer.spawn(argv(&["true"])).await;
            peer.client.wait_exec(&record.exec_id, Duration::from_secs(10)).await.unwrap();
            ended.push(record.exec_id);
        }
        let listed: Vec<ExecId> =
            peer.client.execs().await.unwrap().into_iter().map(|record| record.exec_id).collect();
        assert_eq!(listed, [running.exec_id.clone(), ended[2].clone(), ended[3].clone()]);
        assert!(!peer.exec_path(&ended[0]).exists());
        assert!(matches!(peer.client.exec(&ended[0]).await, Err(ClientError::NotFound(_))));
        for _ in 0..2 {
            peer.spawn(sh("sleep 600")).await;
        }
        let id = ExecId::generate();
        let refused = peer.client.start_exec(&id, "one-more", &argv(&["true"])).await;
        assert!(matches!(refused, Err(ClientError::Exhausted(_))), "{refused:?}");
        assert!(!peer.exec_path(&id).exists());
        peer.client.stop(Duration::ZERO).await.unwrap();
    });
}

#[test]
fn starting_reading_and_ending_takes_little_time() {
    run(async {
        let peer = Peer::start();
        let mut times = Vec::new();
        for _ in 0..60 {
            let begin = Instant::now();
            let id = ExecId::generate();
            let (_, mut reader) =
                peer.client.start_and_read(&id, id.as_str(), &argv(&["true"])).await.unwrap();
            assert_eq!(collect(&mut reader).await.2.code, 0);
            times.push(begin.elapsed());
        }
        times.sort();
        println!("exec of true: min {:?} p50 {:?} p90 {:?}", times[0], times[30], times[54]);
        // Far above what it takes, even for a build without optimisation on a busy machine.
        assert!(times[30] < Duration::from_millis(100), "{:?}", times[30]);
    });
}

#[test]
fn a_program_that_lets_its_parent_trace_it_has_not_ended() {
    if !std::path::Path::new("/usr/bin/python3").exists() {
        println!("SKIP: python3 is not installed");
        return;
    }
    run(async {
        let peer = Peer::start();
        // Stopped by a signal while pid 1 is its tracer: no exit, whatever the number looks like.
        let script = |signal: i32, then: &str| {
            format!(
                "import ctypes,os,signal,sys; signal.signal(signal.SIGUSR1, lambda *_: None)\n\
                 ctypes.CDLL(None).ptrace(0,0,0,0); os.kill(os.getpid(),{signal}); print('went on', flush=True)\n{then}"
            )
        };
        for signal in [5, 10, 17, 28] {
            let program = argv(&["/usr/bin/python3", "-c", &script(signal, "sys.exit(3)")]);
            let (stdout, stderr, exit) = peer.run(program).await;
            let text = String::from_utf8_lossy(&stdout).into_owned();
            assert_eq!(text, "went on\n", "{signal}: {}", String::from_utf8_lossy(&stderr));
            assert_eq!((exit.reason, exit.code), (ExitReason::Exited, 3), "{signal}");
        }
        // What would end it ends it, and its time limit reaches it.
        let (_, _, exit) = peer.run(argv(&["/usr/bin/python3", "-c", &script(15, "")])).await;
        assert_eq!((exit.reason, exit.signal), (ExitReason::Signaled, Some(15)));
        let timeout = Some(std::time::Duration::from_millis(500));
        let program = argv(&["/usr/bin/python3", "-c", &script(17, "import time; time.sleep(600)")]);
        let (_, _, exit) = peer.run(ExecSpec { timeout, ..program }).await;
        assert_eq!(exit.reason, ExitReason::Timeout);
    });
}

#[test]
fn more_execs_at_a_time_than_the_agent_has_memory_for_are_refused() {
    run(async {
        let peer = Peer::start_with(|config| config.execs_max = 1024);
        let mut records = Vec::new();
        for _ in 0..256 {
            records.push(peer.spawn(argv(&["sleep", "600"])).await);
        }
        let id = cloister_types::ExecId::generate();
        let refused = peer.client.start_exec(&id, id.as_str(), &argv(&["true"])).await;
        assert!(
            refused.as_ref().is_err_and(|error| error.to_string().contains("256 execs run")),
            "{refused:?}"
        );
        peer.client.signal(&records[0].exec_id, 9).await.unwrap();
        peer.client.wait_exec(&records[0].exec_id, std::time::Duration::from_secs(30)).await.unwrap();
        assert_eq!(peer.run(argv(&["true"])).await.2.code, 0);
    });
}
