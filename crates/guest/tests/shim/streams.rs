//! Output and input as streams: from any offset, at the reader's pace, within bounds.

use std::time::Duration;

use cloister_guest::client::ClientError;
use cloister_types::{ExecId, ExecSpec, ExitReason, OutputFrame, OutputStream};

use crate::peer::{Peer, argv, collect, rss_kib, run, sh};

#[test]
fn a_mebibyte_of_input_comes_back_equal() {
    run(async {
        let peer = Peer::start();
        let byte = |index: u64| u8::try_from(index.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56).unwrap();
        let input: Vec<u8> = (0..1_048_576).map(byte).collect();
        let record = peer.spawn(ExecSpec { stdin: true, ..argv(&["cat"]) }).await;
        let mut reader = peer.client.read_output(&record.exec_id, 0, false).await.unwrap();
        let writing = async {
            let next = peer.client.write_stdin(&record.exec_id, 0, &input, true).await.unwrap();
            assert_eq!(next, 1_048_576);
        };
        let ((), (stdout, _, exit)) = tokio::join!(writing, collect(&mut reader));
        assert_eq!(blake3::hash(&stdout), blake3::hash(&input));
        assert_eq!(exit.code, 0);
        let late = peer.client.write_stdin(&record.exec_id, 1_048_576, b"x", false).await;
        assert!(matches!(late, Err(ClientError::Invalid(_))), "{late:?}");
    });
}

#[test]
fn input_is_written_once_however_often_it_is_sent() {
    run(async {
        let peer = Peer::start();
        let record = peer.spawn(ExecSpec { stdin: true, ..argv(&["cat"]) }).await;
        let id = &record.exec_id;
        assert_eq!(peer.client.write_stdin(id, 0, b"hello ", false).await.unwrap(), 6);
        assert_eq!(peer.client.write_stdin(id, 0, b"hello ", false).await.unwrap(), 6);
        assert_eq!(peer.client.write_stdin(id, 3, b"lo world", false).await.unwrap(), 11);
        let hole = peer.client.write_stdin(id, 50, b"x", false).await;
        assert!(matches!(hole, Err(ClientError::Invalid(_))), "{hole:?}");
        assert_eq!(peer.client.write_stdin(id, 11, b"", true).await.unwrap(), 11);
        let mut reader = peer.client.read_output(id, 0, false).await.unwrap();
        assert_eq!(collect(&mut reader).await.0, b"hello world");

        let without = peer.spawn(sh("cat; sleep 0.1")).await;
        let refused = peer.client.write_stdin(&without.exec_id, 0, b"x", false).await;
        assert!(matches!(refused, Err(ClientError::Invalid(_))), "{refused:?}");
    });
}

#[test]
fn a_write_that_waits_can_be_given_up_and_repeated() {
    run(async {
        let peer = Peer::start();
        // Reads nothing until it is told to by a file.
        let gate = peer.dir.path().join("gate");
        let script = format!("while ! [ -e {} ]; do sleep 0.01; done; wc -c", gate.display());
        let record = peer.spawn(ExecSpec { stdin: true, ..sh(&script) }).await;
        let input = vec![b'x'; 300_000];
        let waiting = peer.client.write_stdin(&record.exec_id, 0, &input, true);
        assert!(tokio::time::timeout(Duration::from_millis(200), waiting).await.is_err());
        // Another command is not held up by it.
        assert_eq!(peer.run(argv(&["true"])).await.2.code, 0);
        std::fs::write(&gate, "").unwrap();
        assert_eq!(peer.client.write_stdin(&record.exec_id, 0, &input, true).await.unwrap(), 300_000);
        let mut reader = peer.client.read_output(&record.exec_id, 0, false).await.unwrap();
        assert_eq!(collect(&mut reader).await.0, b"300000\n");
    });
}

#[test]
fn reading_goes_on_at_any_offset_also_after_the_end() {
    run(async {
        let peer = Peer::start();
        let record = peer.spawn(ExecSpec { stdin: true, ..sh("seq 1 30000; read line; seq 1 30000") }).await;
        let expected: String = (1..=30_000).map(|number| format!("{number}\n")).collect();
        let mut first = peer.client.read_output(&record.exec_id, 0, false).await.unwrap();
        let mut seen = Vec::new();
        while seen.len() < expected.len() {
            let Some(OutputFrame::Data { data, .. }) = first.next().await.unwrap() else {
                panic!("the first half")
            };
            seen.extend(data);
        }
        assert_eq!(seen, expected.as_bytes());
        let half = first.position();
        drop(first);
        let mut ended = peer.client.read_output(&record.exec_id, half, true).await.unwrap();
        assert_eq!(ended.next().await.unwrap(), Some(OutputFrame::End { next_offset: half }));
        let mut second = peer.client.read_output(&record.exec_id, half - 1000, false).await.unwrap();
        peer.client.write_stdin(&record.exec_id, 0, b"\n", false).await.unwrap();
        let (stdout, _, exit) = collect(&mut second).await;
        let whole = format!("{expected}{expected}");
        assert_eq!(stdout, whole.as_bytes()[expected.len() - 1000..]);
        for from in [0, 1, 4096, whole.len() - 1, whole.len()] {
            let mut again =
                peer.client.read_output(&record.exec_id, u64::try_from(from).unwrap(), false).await.unwrap();
            let (stdout, _, same) = collect(&mut again).await;
            assert_eq!((stdout.as_slice(), &same), (&whole.as_bytes()[from..], &exit));
        }
        let beyond = peer.client.read_output(&record.exec_id, exit.output_bytes + 1, false).await;
        assert!(matches!(beyond, Err(ClientError::Invalid(_))), "{:?}", beyond.err());
    });
}

#[test]
fn without_a_reader_the_oldest_output_goes_and_is_announced() {
    run(async {
        let peer = Peer::start_with(|config| config.spool_max_bytes = 512 * 1024);
        let record = peer.spawn(sh("head -c 3000000 /dev/zero")).await;
        let ended = peer.client.wait_exec(&record.exec_id, Duration::from_secs(20)).await.unwrap();
        assert_eq!(ended.exit.unwrap().output_bytes, 3_000_000);
        let kept: u64 = std::fs::read_dir(peer.exec_path(&record.exec_id))
            .unwrap()
            .map(|entry| entry.unwrap())
            .filter(|entry| entry.path().extension().is_some_and(|extension| extension == "seg"))
            .map(|entry| entry.metadata().unwrap().len())
            .sum();
        assert!(kept <= 512 * 1024, "{kept}");
        let mut reader = peer.client.read_output(&record.exec_id, 0, false).await.unwrap();
        let Some(OutputFrame::Gap { from: 0, to }) = reader.next().await.unwrap() else { panic!("no gap") };
        let (stdout, _, _) = collect(&mut reader).await;
        assert_eq!(to + u64::try_from(stdout.len()).unwrap(), 3_000_000);
    });
}

/// Bytes of output on the disk of one exec.
fn output_on_disk(peer: &Peer, exec_id: &ExecId) -> u64 {
    std::fs::read_dir(peer.exec_path(exec_id))
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.path().extension().is_some_and(|extension| extension == "seg"))
        .map(|entry| entry.metadata().unwrap().len())
        .sum()
}

#[test]
fn the_execs_of_a_session_share_a_bound() {
    const MIB: u64 = 1024 * 1024;
    run(async {
        let peer = Peer::start_with(|config| {
            config.spool_max_bytes = MIB;
            config.session_spool_max_bytes = 2 * MIB;
        });
        // Each fits its own bound; five are more than the session's.
        let mut records = Vec::new();
        for _ in 0..5 {
            let record = peer.spawn(sh("head -c 800000 /dev/zero")).await;
            peer.client.wait_exec(&record.exec_id, Duration::from_secs(20)).await.unwrap();
            records.push(record);
            let kept: u64 = records.iter().map(|record| output_on_disk(&peer, &record.exec_id)).sum();
            assert!(kept <= 2 * MIB, "{kept} bytes are kept");
        }
        let kept: Vec<bool> =
            records.iter().map(|record| output_on_disk(&peer, &record.exec_id) > 0).collect();
        assert_eq!(kept, [false, false, false, true, true], "the oldest go first");
        // Its record stays, and its reader is told.
        let oldest = peer.client.exec(&records[0].exec_id).await.unwrap();
        assert_eq!(oldest.exit.unwrap().output_bytes, 800_000);
        let mut reader = peer.client.read_output(&records[0].exec_id, 0, false).await.unwrap();
        assert_eq!(reader.next().await.unwrap(), Some(OutputFrame::Gap { from: 0, to: 800_000 }));
        assert!(matches!(reader.next().await.unwrap(), Some(OutputFrame::Exit(_))));

        // Eight that run have a quarter of a MiB each, also the one that had printed more before.
        let first = peer.spawn(sh("head -c 800000 /dev/zero; exec sleep 100")).await;
        while output_on_disk(&peer, &first.exec_id) < 800_000 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let mut running = vec![first];
        for _ in 0..7 {
            running.push(peer.spawn(sh("head -c 800000 /dev/zero; echo end >&2; exec sleep 100")).await);
        }
        for record in &running[1..] {
            let mut reader = peer.client.read_output(&record.exec_id, 0, false).await.unwrap();
            while !matches!(
                reader.next().await.unwrap(),
                Some(OutputFrame::Data { stream: OutputStream::Stderr, .. })
            ) {}
        }
        for record in &running {
            let kept = output_on_disk(&peer, &record.exec_id);
            assert!(kept <= MIB / 4 + 4096, "{kept} bytes are kept of one of eight");
        }
        for record in &running {
            peer.client.signal(&record.exec_id, 9).await.unwrap();
        }
    });
}

#[test]
fn a_slow_reader_stops_the_program_and_nothing_is_lost() {
    run(async {
        let peer = Peer::start_with(|config| config.spool_max_bytes = 1024 * 1024);
        let record =
            peer.spawn(ExecSpec { stdin: true, ..sh("read line; head -c 50000000 /dev/zero") }).await;
        let mut reader = peer.client.read_output(&record.exec_id, 0, false).await.unwrap();
        peer.client.write_stdin(&record.exec_id, 0, b"\n", false).await.unwrap();
        // It stands still within the spool, the sockets and the pipe.
        let newest = async || {
            let mut look = peer.client.read_output(&record.exec_id, 0, true).await.unwrap();
            loop {
                if let OutputFrame::End { next_offset } = look.next().await.unwrap().unwrap() {
                    return next_offset;
                }
            }
        };
        let mut last = newest().await;
        let mut same = 0;
        while same < 20 {
            let now = newest().await;
            // What the reader's socket took counts as read.
            assert!(now <= 2 * 1024 * 1024, "{now} bytes beyond a reader that does not read");
            same = if now == last && now > 500_000 { same + 1 } else { 0 };
            last = now;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        // Signals and other execs get through meanwhile.
        assert_eq!(peer.run(argv(&["true"])).await.2.code, 0);
        let (stdout, _, exit) = collect(&mut reader).await;
        assert_eq!((stdout.len(), exit.code), (50_000_000, 0));
    });
}

#[test]
fn a_program_that_waits_for_its_reader_still_takes_signals_and_limits() {
    run(async {
        let peer = Peer::start_with(|config| config.spool_max_bytes = 256 * 1024);
        let limited = ExecSpec { timeout: Some(Duration::from_millis(300)), ..argv(&["cat", "/dev/zero"]) };
        let record = peer.spawn(limited).await;
        assert!(std::path::Path::new(&format!("/proc/{}", record.pid)).exists(), "a pid of this namespace");
        let mut reader = peer.client.read_output(&record.exec_id, 0, false).await.unwrap();
        // It runs out of time while nobody reads; reading then finds the kept output and the end.
        let program = format!("/proc/{}/cmdline", record.pid);
        let deadline = std::time::Instant::now() + Duration::from_secs(20);
        // A killed process that nobody has reaped yet has none.
        while std::fs::read(&program).is_ok_and(|command_line| !command_line.is_empty()) {
            assert!(std::time::Instant::now() < deadline, "it runs on beyond its time");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let exit = loop {
            if let Some(OutputFrame::Exit(exit)) = reader.next().await.unwrap() {
                break exit;
            }
        };
        assert_eq!(exit.reason, ExitReason::Timeout);

        let record = peer.spawn(argv(&["cat", "/dev/zero"])).await;
        let mut reader = peer.client.read_output(&record.exec_id, 0, false).await.unwrap();
        peer.client.signal(&record.exec_id, libc::SIGTERM).await.unwrap();
        let exit = loop {
            if let Some(OutputFrame::Exit(exit)) = reader.next().await.unwrap() {
                break exit;
            }
        };
        assert_eq!((exit.reason, exit.signal), (ExitReason::Signaled, Some(15)));
    });
}

#[test]
fn memory_stays_flat_whatever_is_printed() {
    run(async {
        let peer = Peer::start();
        peer.run(sh("head -c 1000000 /dev/zero")).await;
        let (shim, agent) = (peer.shim.id(), peer.agent_pid());
        let before = (rss_kib(shim), rss_kib(agent));
        // One endless line, with a reader and without.
        let record = peer.spawn(sh("head -c 268435456 /dev/zero | tr '\\0' x")).await;
        let mut reader = peer.client.read_output(&record.exec_id, 0, false).await.unwrap();
        let mut hash = blake3::Hasher::new();
        let mut count = 0_u64;
        let exit = loop {
            match reader.next().await.unwrap().unwrap() {
                OutputFrame::Data { data, .. } => {
                    count += u64::try_from(data.len()).unwrap();
                    hash.update(&data);
                }
                OutputFrame::Exit(exit) => break exit,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!((count, exit.output_bytes, exit.code), (268_435_456, 268_435_456, 0));
        let mut expected = blake3::Hasher::new();
        let piece = vec![b'x'; 1024 * 1024];
        for _ in 0..256 {
            expected.update(&piece);
        }
        assert_eq!(hash.finalize(), expected.finalize());
        let unread = peer.spawn(sh("head -c 268435456 /dev/zero")).await;
        let ended = peer.client.wait_exec(&unread.exec_id, Duration::from_secs(60)).await.unwrap();
        assert_eq!(ended.exit.unwrap().output_bytes, 268_435_456);
        let after = (rss_kib(shim), rss_kib(agent));
        println!("resident KiB before {before:?} after {after:?}");
        assert!(after.0 < before.0 + 1024 && after.1 < before.1 + 1024, "{before:?} {after:?}");
    });
}

#[test]
fn many_small_writes_arrive_in_order() {
    run(async {
        let peer = Peer::start();
        let (stdout, stderr, _) =
            peer.run(sh("i=0; while [ $i -lt 2000 ]; do echo $i; echo $i >&2; i=$((i+1)); done")).await;
        let expected: String = (0..2000).map(|number| format!("{number}\n")).collect();
        assert_eq!(stdout, expected.as_bytes());
        assert_eq!(stderr, expected.as_bytes());
    });
}
