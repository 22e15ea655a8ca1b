//! Peers that send anything: their connection ends, and nothing else does.

use std::time::Duration;

use cloister_api::guest;
use cloister_guest::frames::{self, Body};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::peer::{Peer, argv, rss_kib, run};

async fn send(socket: &std::path::Path, bytes: &[u8]) -> Vec<u8> {
    let mut stream = UnixStream::connect(socket).await.unwrap();
    // The peer may close before it has taken everything.
    let _ = stream.write_all(bytes).await;
    let _ = stream.shutdown().await;
    let mut answer = Vec::new();
    let _ = timeout(Duration::from_secs(15), stream.read_to_end(&mut answer)).await.expect("it closes");
    answer
}

fn hello(body: impl Into<Body>) -> Vec<u8> {
    let mut bytes = frames::encode(frames::hello("sbx_test")).unwrap();
    bytes.extend(frames::encode(body).unwrap());
    bytes
}

#[test]
fn malformed_frames_end_their_connection_only() {
    run(async {
        let peer = Peer::start();
        let agent_socket = peer.config.sandbox_dir.join("guest.sock");
        let exec_id = "exe_00000000000000000000000000".to_owned();
        let start = |argv: Vec<String>| guest::StartExec {
            exec_id: exec_id.clone(),
            request_id: "r".to_owned(),
            spec: guest::ExecSpec { argv, ..guest::ExecSpec::default() }.into(),
            ..guest::StartExec::default()
        };
        let mut torn = hello(start(vec!["true".to_owned()]));
        torn.truncate(torn.len() - 3);
        let payloads: Vec<Vec<u8>> = vec![
            vec![],
            vec![0xff; 4],
            vec![0xff; 100_000],
            vec![0, 0, 0, 0],
            b"GET / HTTP/1.1\r\n\r\n".to_vec(),
            frames::encode(guest::Hello { version: 99, ..guest::Hello::default() }).unwrap(),
            frames::encode(guest::GetSandbox::default()).unwrap(),
            hello(guest::HelloReply::default()),
            hello(guest::Output { data: vec![7; 70_000], ..guest::Output::default() }),
            hello(guest::StartExec::default()),
            hello(start(vec![])),
            hello(start(vec!["a\0b".to_owned()])),
            hello(guest::StartExec { exec_id: "../../x".to_owned(), ..start(vec!["true".to_owned()]) }),
            hello(guest::SignalExec { exec_id: exec_id.clone(), signal: -1, ..guest::SignalExec::default() }),
            hello(guest::WriteStdin {
                exec_id: exec_id.clone(),
                offset: u64::MAX,
                ..guest::WriteStdin::default()
            }),
            hello(guest::WaitExec {
                exec_id: exec_id.clone(),
                wait_ms: u64::MAX,
                ..guest::WaitExec::default()
            }),
            hello(guest::AttachExec { exec_id, from_offset: u64::MAX, ..guest::AttachExec::default() }),
            torn,
        ];
        for socket in [&peer.config.socket, &agent_socket] {
            for payload in &payloads {
                send(socket, payload).await;
            }
        }
        assert_eq!(peer.run(argv(&["true"])).await.2.code, 0);
        assert!(!peer.config.exec_dir.join("../x").exists());
    });
}

#[test]
fn a_signal_that_is_none_and_ids_that_are_none_are_refused() {
    run(async {
        let peer = Peer::start();
        let record = peer.spawn(argv(&["sleep", "600"])).await;
        for signal in [0, -9, 65, i32::MIN, i32::MAX] {
            assert!(peer.client.signal(&record.exec_id, signal).await.is_err(), "signal {signal}");
        }
        let none = cloister_types::ExecId::generate();
        assert!(peer.client.signal(&none, 9).await.is_err());
        assert!(peer.client.exec(&none).await.is_err());
        assert!(peer.client.read_output(&none, 0, false).await.is_err());
        assert!(peer.client.write_stdin(&none, 0, b"", true).await.is_err());
        assert!(peer.client.start_exec(&none, "", &argv(&["true"])).await.is_err());
        let large = cloister_types::ExecSpec {
            env: [("A".to_owned(), "x".repeat(1_040_000))].into(),
            ..argv(&["true"])
        };
        assert!(peer.client.start_exec(&none, "large", &large).await.is_err());
        peer.client.signal(&record.exec_id, 9).await.unwrap();
        peer.client.wait_exec(&record.exec_id, Duration::from_secs(10)).await.unwrap();
    });
}

#[test]
fn many_connections_that_say_nothing_do_not_stop_the_others() {
    run(async {
        let peer = Peer::start();
        let mut idle = Vec::new();
        for _ in 0..200 {
            idle.push(UnixStream::connect(&peer.config.socket).await.unwrap());
        }
        assert_eq!(peer.run(argv(&["true"])).await.2.code, 0);
        drop(idle);
        assert!(rss_kib(peer.shim.id()) < 32 * 1024);
    });
}

#[test]
fn an_exec_of_many_arguments_is_carried_whole() {
    run(async {
        let peer = Peer::start();
        let words: Vec<String> = (0..20_000).map(|number| format!("argument-{number:06}")).collect();
        let mut spec = argv(&["sh", "-c", "echo $#", "sh"]);
        spec.argv.extend(words);
        assert_eq!(peer.run(spec.clone()).await.0, b"20000\n");
        let listed = peer.client.execs().await.unwrap();
        assert_eq!(listed[0].spec, spec);
        // More than the kernel takes in one argument, less than a frame.
        let long = argv(&["true", &"x".repeat(200_000)]);
        let exit = peer.run(long).await.2;
        assert_eq!(
            (exit.code, exit.reason),
            (126, cloister_types::ExitReason::NotStarted),
            "{}",
            exit.message
        );
    });
}
