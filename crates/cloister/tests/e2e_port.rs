//! `cloister port-forward` on the real binary: what docs/guides/ports.md says.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test states what it expects by unwrapping it"
)]

mod support;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::process::{Child, Stdio};

use support::{Up, can_run, wait_for, which};

/// Echoes each connection when its client has said everything: only a half-closed connection gets an answer.
const ECHO: &str = "
import socketserver
class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        data = b''
        while True:
            piece = self.request.recv(65536)
            if not piece: break
            data += piece
        self.request.sendall(data)
class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    request_queue_size = 512
    daemon_threads = True
Server(('127.0.0.1', 7000), Echo).serve_forever()
";

struct Forwarded(Child);

impl Drop for Forwarded {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Forwards ports and returns the addresses here.
fn forward(up: &Up, ports: &[&str]) -> (Forwarded, Vec<String>) {
    let arguments = [&["port-forward", "--json", "box"], ports].concat();
    let mut child = up.command(&arguments).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let addresses = ports.iter().map(|_| {
        let line: serde_json::Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        line["local"].as_str().unwrap().to_owned()
    });
    let addresses = addresses.collect();
    (Forwarded(child), addresses)
}

fn echo(address: &str, text: &[u8]) -> Vec<u8> {
    let mut connection = TcpStream::connect(address).unwrap();
    let mut writing = connection.try_clone().unwrap();
    let sent = text.to_vec();
    let writer = std::thread::spawn(move || {
        let _ = writing.write_all(&sent);
        let _ = writing.shutdown(Shutdown::Write);
    });
    let mut answer = Vec::new();
    let _ = connection.read_to_end(&mut answer);
    writer.join().unwrap();
    answer
}

#[test]
fn a_port_of_the_sandbox_is_reached_here_with_half_close_and_many_at_once() {
    if !can_run() {
        return;
    }
    if !which("python3") {
        support::skip("there is no python3 for a server in the sandbox");
        return;
    }
    let up = Up::start();
    up.run(&["session", "create", "--name", "box", "--pids", "1024"]).expect(0);
    let (_forwarding, addresses) = forward(&up, &["0:7000", "0:7001"]);
    // Nobody listens yet: the connection is closed, and the reason is said where the forwarding runs.
    assert_eq!(echo(&addresses[0], b"early"), b"");
    up.run(&["exec", "-d", "box", "--", "python3", "-c", ECHO]).expect(0);
    wait_for("the server", || match echo(&addresses[0], b"there?") {
        answer if answer == b"there?" => Ok(()),
        answer => Err(format!("{answer:?}")),
    });
    let megabytes = vec![7_u8; 8 * 1024 * 1024];
    assert_eq!(echo(&addresses[0], &megabytes).len(), megabytes.len());
    assert_eq!(echo(&addresses[1], b"another port"), b"", "nothing listens on 7001");

    let many: Vec<_> = (0..200)
        .map(|number: u32| {
            let address = addresses[0].clone();
            std::thread::spawn(move || echo(&address, &number.to_le_bytes()) == number.to_le_bytes())
        })
        .collect();
    let echoed =
        many.into_iter().filter(|_| true).map(|one| one.join().unwrap()).filter(|echoed| *echoed).count();
    assert_eq!(echoed, 200);
}
