//! A sandbox's beginning and end as the shim sees and writes them.

use std::time::Duration;

use cloister_guest::client::ClientError;
use cloister_guest::shim::config::{SandboxExitRecord, ShimReport};
use cloister_guest::spool;
use cloister_types::{ExecSpec, ExitReason};

use crate::peer::{Peer, argv, collect, run, sh, until};

fn exit_record(peer: &Peer) -> SandboxExitRecord {
    serde_json::from_slice(&std::fs::read(peer.config.sandbox_dir.join("exit.json")).unwrap()).unwrap()
}

fn lock_is_free(peer: &Peer) -> bool {
    let lock = std::fs::File::open(peer.config.sandbox_dir.join("lock")).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_ok()
}

#[test]
fn a_ready_shim_reports_serves_and_holds_its_lock() {
    run(async {
        let peer = Peer::start();
        let ShimReport::Ready { facts, timings } = &peer.report else { panic!("{:?}", peer.report) };
        assert_eq!(facts, &[("hardening".to_owned(), "off".to_owned())]);
        assert_eq!(timings.len(), 1);
        assert_eq!(&peer.client.sandbox().await.unwrap().facts, facts);
        assert!(!lock_is_free(&peer));
        let mode = std::os::unix::fs::PermissionsExt::mode(
            &std::fs::metadata(&peer.config.socket).unwrap().permissions(),
        );
        assert_eq!(mode & 0o777, 0o600);
        let stranger =
            cloister_guest::client::Client::new(&peer.config.socket, "sbx_other", Duration::from_secs(5));
        assert!(matches!(stranger.sandbox().await, Err(ClientError::NotFound(_))));
    });
}

#[test]
fn a_stop_gives_grace_ends_everything_and_leaves_the_records() {
    run(async {
        let mut peer = Peer::start();
        let polite =
            peer.spawn(sh("trap 'echo bye; exit 5' TERM; echo ready; while :; do sleep 0.01; done")).await;
        let stubborn = peer.spawn(sh("trap '' TERM; echo ready; while :; do sleep 0.01; done")).await;
        for record in [&polite, &stubborn] {
            let mut reader = peer.client.read_output(&record.exec_id, 0, false).await.unwrap();
            assert!(reader.next().await.unwrap().is_some());
        }
        let (_, mut watch) = peer.client.watch().await.unwrap();
        let stopped = peer.client.stop(Duration::from_millis(300)).await.unwrap();
        assert_eq!(stopped.reason, "stopped");
        assert_eq!(watch.wait().await.unwrap(), stopped);
        assert_eq!(exit_record(&peer), stopped);
        assert!(peer.shim.wait().unwrap().success());
        assert!(!peer.config.socket.exists());
        assert!(lock_is_free(&peer));
        assert!(matches!(peer.client.sandbox().await, Err(ClientError::Gone(_))));

        let exit = |id| spool::read_record(&peer.exec_path(id)).unwrap().exit.unwrap();
        let polite_exit = exit(&polite.exec_id);
        assert_eq!((polite_exit.reason, polite_exit.code), (ExitReason::Exited, 5));
        assert_eq!(exit(&stubborn.exec_id).reason, ExitReason::SandboxGone);
        let mut reader = spool::EndedReader::new(peer.exec_path(&polite.exec_id), 0, Some(polite_exit));
        let mut frames = Vec::new();
        while let Some(frame) = reader.next().unwrap() {
            frames.push(frame);
        }
        assert!(format!("{frames:?}").contains("Exit("), "{frames:?}");
    });
}

#[test]
fn an_exec_ends_as_sandbox_gone_when_the_guest_agent_dies() {
    run(async {
        let mut peer = Peer::start();
        let record = peer.spawn(sh("echo kept; exec sleep 5")).await;
        let mut reader = peer.client.read_output(&record.exec_id, 0, false).await.unwrap();
        assert!(reader.next().await.unwrap().is_some());
        let (_, mut watch) = peer.client.watch().await.unwrap();
        let agent = rustix::process::Pid::from_raw(i32::try_from(peer.agent_pid()).unwrap()).unwrap();
        rustix::process::kill_process(agent, rustix::process::Signal::KILL).unwrap();
        let (_, _, exit) = collect(&mut reader).await;
        assert_eq!((exit.reason, exit.output_bytes), (ExitReason::SandboxGone, 5));
        assert_eq!(watch.wait().await.unwrap().reason, "killed");
        assert!(peer.shim.wait().unwrap().success());
        assert_eq!(exit_record(&peer).reason, "killed");
        assert_eq!(spool::read_record(&peer.exec_path(&record.exec_id)).unwrap().exit, Some(exit));
    });
}

#[test]
fn an_exit_record_is_written_once_the_disk_takes_it() {
    run(async {
        let peer = Peer::start();
        let flag = peer.config.socket.with_extension("flag");
        let script = format!("while [ ! -e '{}' ]; do sleep 0.05; done; exit 7", flag.display());
        let record = peer.spawn(sh(&script)).await;
        // Where the record is written first: a directory in its place refuses it as a full disk does.
        let obstacle = peer.exec_path(&record.exec_id).join("exit.tmp");
        std::fs::create_dir(&obstacle).unwrap();
        std::fs::write(&flag, "").unwrap();
        let ended = peer.client.wait_exec(&record.exec_id, Duration::from_secs(20)).await.unwrap();
        assert_eq!(ended.exit.unwrap().code, 7);
        let on_disk = || spool::read_record(&peer.exec_path(&record.exec_id)).unwrap().exit;
        assert_eq!(on_disk(), None);
        std::fs::remove_dir(&obstacle).unwrap();
        let written = until("the record is written", || {
            let exit = on_disk();
            (exit.is_some(), exit)
        });
        assert_eq!(written.await.unwrap().code, 7);
    });
}

#[test]
fn output_that_the_disk_does_not_take_is_named_on_the_exit() {
    run(async {
        let peer = Peer::start();
        let kept = peer.run(sh("echo kept")).await.2;
        assert!(!kept.output_lost);
        let flag = peer.config.socket.with_extension("flag");
        let script = format!("while [ ! -e '{}' ]; do sleep 0.05; done; echo gone", flag.display());
        let record = peer.spawn(sh(&script)).await;
        // A directory in the place of its first segment refuses it as a full disk does.
        let obstacle = peer.exec_path(&record.exec_id).join(format!("{:020}.seg", 0));
        std::fs::create_dir(&obstacle).unwrap();
        std::fs::write(&flag, "").unwrap();
        let ended = peer.client.wait_exec(&record.exec_id, Duration::from_secs(20)).await.unwrap();
        let exit = ended.exit.unwrap();
        assert_eq!((exit.code, exit.output_bytes, exit.output_lost), (0, 5, true), "{exit:?}");
    });
}

#[test]
fn a_time_limit_holds_even_when_the_guest_agent_hangs() {
    run(async {
        let mut peer = Peer::start();
        let spec = ExecSpec { timeout: Some(Duration::from_millis(300)), ..sh("echo kept; exec sleep 600") };
        let record = peer.spawn(spec).await;
        let mut reader = peer.client.read_output(&record.exec_id, 0, false).await.unwrap();
        assert!(reader.next().await.unwrap().is_some());
        let agent = rustix::process::Pid::from_raw(i32::try_from(peer.agent_pid()).unwrap()).unwrap();
        rustix::process::kill_process(agent, rustix::process::Signal::STOP).unwrap();
        let (_, _, exit) = collect(&mut reader).await;
        assert_eq!((exit.reason, exit.output_bytes), (ExitReason::Timeout, 5), "{exit:?}");
        assert!(peer.shim.wait().unwrap().success());
        assert_eq!(exit_record(&peer).reason, "crashed");
    });
}

#[test]
fn a_shim_ignores_what_is_sent_to_groups() {
    run(async {
        let peer = Peer::start();
        let shim = rustix::process::Pid::from_raw(i32::try_from(peer.shim.id()).unwrap()).unwrap();
        for signal in
            [rustix::process::Signal::TERM, rustix::process::Signal::INT, rustix::process::Signal::HUP]
        {
            rustix::process::kill_process(shim, signal).unwrap();
        }
        assert_eq!(peer.run(argv(&["true"])).await.2.code, 0);
    });
}

#[test]
fn a_killed_shim_takes_pid_1_along_and_its_execs_can_be_sealed() {
    run(async {
        let mut peer = Peer::start();
        let record = peer.spawn(sh("echo kept; exec sleep 5")).await;
        let mut reader = peer.client.read_output(&record.exec_id, 0, false).await.unwrap();
        assert!(reader.next().await.unwrap().is_some());
        let agent = peer.agent_pid();
        peer.shim.kill().unwrap();
        peer.shim.wait().unwrap();
        // A stream without an exit was cut.
        assert!(reader.next().await.is_err());
        until("the guest agent is gone", || {
            let state = std::fs::read_to_string(format!("/proc/{agent}/stat")).unwrap_or_default();
            (state.is_empty() || state.contains(") Z"), state)
        })
        .await;
        assert!(lock_is_free(&peer));
        assert!(peer.client.sandbox().await.unwrap_err().is_gone());
        let sealed = spool::seal(&peer.exec_path(&record.exec_id), "its shim is gone", 1).unwrap();
        let exit = sealed.exit.unwrap();
        assert_eq!((exit.reason, exit.output_bytes), (ExitReason::SandboxGone, 5));
    });
}

#[test]
fn the_next_sandbox_of_a_session_still_has_the_execs() {
    run(async {
        let mut peer = Peer::start();
        let record = peer.spawn(sh("echo first life")).await;
        peer.client.wait_exec(&record.exec_id, Duration::from_secs(10)).await.unwrap();
        let cut = peer.spawn(sh("echo cut; exec sleep 5")).await;
        let mut reader = peer.client.read_output(&cut.exec_id, 0, false).await.unwrap();
        assert!(reader.next().await.unwrap().is_some());
        peer.shim.kill().unwrap();
        peer.shim.wait().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let mut config = crate::peer::config(dir.path());
        config.exec_dir = peer.config.exec_dir.clone();
        let next = Peer::start_in(dir, config);
        let mut reader = next.client.read_output(&record.exec_id, 0, false).await.unwrap();
        assert_eq!(collect(&mut reader).await.0, b"first life\n");
        let again = next.client.start_exec(&cut.exec_id, cut.exec_id.as_str(), &cut.spec).await.unwrap();
        assert_eq!(again.exit.unwrap().reason, ExitReason::SandboxGone);
        assert_eq!(next.client.execs().await.unwrap().len(), 2);
    });
}

#[test]
fn what_cannot_start_says_so_and_leaves_nothing() {
    run(async {
        let peer = Peer::start();
        // A second shim on the same directory finds the lock taken and touches nothing.
        let second = std::process::Command::new(env!("CARGO_BIN_EXE_cloister-guest"))
            .args(["shim", "--unisolated", "--config"])
            .arg(peer.dir.path().join("shim.json"))
            .output()
            .unwrap();
        let report: ShimReport = serde_json::from_slice(&second.stdout).unwrap();
        assert!(matches!(&report, ShimReport::Failed { step, .. } if step == "take the lock"), "{report:?}");
        assert!(!second.status.success());
        assert_eq!(peer.run(argv(&["true"])).await.2.code, 0);
        let unread = std::process::Command::new(env!("CARGO_BIN_EXE_cloister-guest"))
            .args(["shim", "--config", "/no/such/file"])
            .output()
            .unwrap();
        assert!(String::from_utf8(unread.stdout).unwrap().contains("read the configuration"));
    });
}

#[test]
fn a_limit_that_the_kernel_counted_is_named() {
    run(async {
        let counts = tempfile::tempdir().unwrap();
        let (oom, pids) = (counts.path().join("memory.oom_control"), counts.path().join("pids.events"));
        std::fs::write(&oom, "oom_kill 0\n").unwrap();
        std::fs::write(&pids, "max 0\n").unwrap();
        let peer = Peer::start_with(|config| {
            config.cgroup.oom_file = Some(oom.clone());
            config.cgroup.pids_file = Some(pids.clone());
        });
        // The program does to the files what the kernel does: truncated in place, so that open files see it.
        let script = format!("echo 'oom_kill 1' > {}; kill -KILL $$", oom.display());
        let exit = peer.run(sh(&script)).await.2;
        assert_eq!((exit.reason, exit.signal), (ExitReason::OutOfMemory, Some(9)));
        // A shell that reports its child's death.
        let script = format!("echo 'oom_kill 2' > {}; exit 137", oom.display());
        assert_eq!(peer.run(sh(&script)).await.2.reason, ExitReason::OutOfMemory);
        // A program that ended well beside somebody else's death is told of it.
        let script = format!("echo 'oom_kill 3' > {}", oom.display());
        let exit = peer.run(sh(&script)).await.2;
        assert_eq!((exit.reason, exit.memory_limit_hit), (ExitReason::Exited, true));
        assert!(!peer.run(argv(&["true"])).await.2.memory_limit_hit);
        // A kill that the limit did not do.
        assert_eq!(peer.run(sh("kill -KILL $$")).await.2.reason, ExitReason::Signaled);
        let exit = peer.run(sh(&format!("echo 'max 2' > {}", pids.display()))).await.2;
        assert!(exit.pids_limit_hit);
        assert!(!peer.run(argv(&["true"])).await.2.pids_limit_hit);
        let spec = ExecSpec { timeout: Some(Duration::from_millis(50)), ..sh("sleep 600") };
        assert_eq!(peer.run(spec).await.2.reason, ExitReason::Timeout);
    });
}
