//! The two defences that are the shim's own: the bound on kept output, and the bound on what the guest agent may send. The
//! real shim, without a sandbox around its guest agent, which neither depends on.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixListener;
use std::time::Duration;

use cloister_api::guest;
use cloister_guest::frames;
use cloister_guest::shim::config::Defence;
use cloister_types::ExecId;

use crate::controls::SUCCEEDED;
use crate::peer::{Peer, argv, run, sh};

/// What is kept of an exec's output.
const SPOOL_MAX_BYTES: u64 = 1 << 20;

/// Prints `bytes` that nobody reads; succeeds when all of them are on the host's disk.
pub(crate) fn print_unread(off: &[Defence], bytes: u64) -> String {
    run(async {
        let peer = Peer::start_with(|config| {
            config.spool_max_bytes = SPOOL_MAX_BYTES;
            config.defences_off = off.to_vec();
        });
        let record = peer.spawn(sh(&format!("head -c {bytes} /dev/zero"))).await;
        let ended = peer.client.wait_exec(&record.exec_id, Duration::from_secs(60)).await.unwrap();
        assert_eq!(ended.exit.unwrap().output_bytes, bytes);
        let kept: u64 = std::fs::read_dir(peer.exec_path(&record.exec_id))
            .unwrap()
            .map(Result::unwrap)
            .filter(|entry| entry.path().extension().is_some_and(|extension| extension == "seg"))
            .map(|entry| entry.metadata().unwrap().len())
            .sum();
        if kept >= bytes {
            return SUCCEEDED.to_owned();
        }
        assert!(kept <= SPOOL_MAX_BYTES, "{kept} bytes are kept");
        "the oldest output went".to_owned()
    })
}

/// Takes the guest agent's place and answers the next exec with one frame of `bytes`; succeeds when the shim took it
/// into its memory.
pub(crate) fn send_frame(off: &[Defence], bytes: u32) -> String {
    run(async {
        let peer = Peer::start_with(|config| config.defences_off = off.to_vec());
        let socket = peer.config.sandbox_dir.join("guest.sock");
        std::fs::remove_file(&socket).unwrap();
        let listener = UnixListener::bind(&socket).unwrap();
        let hostile = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = vec![0; 64 * 1024];
            // The greeting and the request come in one write.
            assert!(stream.read(&mut request).unwrap() > 0);
            let mut answer = frames::encode(guest::HelloReply { version: 1, ..Default::default() }).unwrap();
            answer.extend(frames::encode(guest::Exec { pid: 7, ..Default::default() }).unwrap());
            answer.extend(bytes.to_le_bytes());
            stream.write_all(&answer).unwrap();
            let piece = vec![0; 1 << 20];
            for _ in 0..bytes >> 20 {
                // The shim that refuses it closes.
                if stream.write_all(&piece).is_err() {
                    break;
                }
            }
        });
        let shim = peer.shim.id();
        std::fs::write(format!("/proc/{shim}/clear_refs"), "5").unwrap();
        let before = peak_kib(shim);
        let exec_id = ExecId::generate();
        peer.client.start_exec(&exec_id, exec_id.as_str(), &argv(&["true"])).await.unwrap();
        let ended = peer.client.wait_exec(&exec_id, Duration::from_secs(60)).await.unwrap();
        hostile.join().unwrap();
        let grown = peak_kib(shim) - before;
        // The kernel counts resident pages in batches, so that a few of them may be missing.
        if grown >= u64::from(bytes >> 10) / 2 {
            return SUCCEEDED.to_owned();
        }
        assert!(grown < 2 * 1024, "the shim grew by {grown} KiB");
        ended.exit.unwrap().message
    })
}

/// An honest guest agent's frames.
pub(crate) fn print_a_line() -> String {
    run(async {
        let peer = Peer::start();
        let (stdout, _, _) = peer.run(sh("echo ok")).await;
        String::from_utf8(stdout).unwrap().trim().to_owned()
    })
}

/// The most that was resident since `clear_refs` (proc(5)).
fn peak_kib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}
