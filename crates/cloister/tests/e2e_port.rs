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
fn forward(up: &Up, flags: &[&str], ports: &[&str]) -> (Forwarded, Vec<String>) {
    let arguments = [&["port-forward", "--json"], flags, &["box"], ports].concat();
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
    if !can_run() || !has_python() {
        return;
    }
    let up = Up::start();
    up.run(&["session", "create", "--name", "box", "--pids", "1024"]).expect(0);
    let (_forwarding, addresses) = forward(&up, &[], &["0:7000", "0:7001"]);
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

    let ask = |number: u32| {
        let address = addresses[0].clone();
        std::thread::spawn(move || echo(&address, &number.to_le_bytes()) == number.to_le_bytes())
    };
    let many: Vec<_> = (0..200).map(ask).collect();
    assert!(many.into_iter().all(|one| one.join().unwrap()));
}

/// Says everything first, and only then listens: what comes is kept in a file.
const SPEAKS_FIRST: &str = "
import socket
server = socket.create_server(('127.0.0.1', 7000))
connection, _ = server.accept()
connection.sendall(b'first')
connection.shutdown(socket.SHUT_WR)
heard = b''
while True:
    piece = connection.recv(65536)
    if not piece: break
    heard += piece
open('/workspace/heard', 'wb').write(heard)
";

#[test]
fn a_program_that_ended_its_side_still_hears_the_other() {
    if !can_run() || !has_python() {
        return;
    }
    let up = Up::start();
    up.run(&["session", "create", "--name", "box"]).expect(0);
    up.run(&["exec", "-d", "box", "--", "python3", "-c", SPEAKS_FIRST]).expect(0);
    let (_forwarding, addresses) = forward(&up, &["--address", "127.0.0.2"], &["0:7000"]);
    assert!(addresses[0].starts_with("127.0.0.2:"), "{addresses:?}");
    let mut connection = wait_for("the program's word", || {
        let mut connection = TcpStream::connect(&addresses[0]).map_err(|error| error.to_string())?;
        let mut word = [0; 5];
        connection.read_exact(&mut word).map_err(|error| error.to_string())?;
        Ok(connection)
    });
    assert_eq!(connection.read(&mut [0; 1]).unwrap(), 0, "the end of the program's side");
    connection.write_all(b"and then I spoke").unwrap();
    connection.shutdown(Shutdown::Write).unwrap();
    wait_for("what the program heard", || {
        let heard = up.run(&["exec", "box", "--", "cat", "/workspace/heard"]).stdout();
        if heard == "and then I spoke" { Ok(()) } else { Err(heard) }
    });
}

/// Accepts and never reads.
const DEAF: &str = "
import socket, time
server = socket.create_server(('127.0.0.1', 7000))
kept = []
while True: kept.append(server.accept())
";

/// A connection whose caller has gone does not stay because its program does not read.
#[test]
fn a_caller_that_goes_away_takes_a_stuck_connection_along() {
    if !can_run() || !has_python() {
        return;
    }
    let up = Up::start();
    up.run(&["session", "create", "--name", "box"]).expect(0);
    up.run(&["exec", "-d", "box", "--", "python3", "-c", DEAF]).expect(0);
    // Those that the platform made: to port 7000, established. What the program makes of its own end is its business.
    let made = || {
        let table = up.ok(&["exec", "box", "--", "cat", "/proc/net/tcp"]);
        table.lines().filter(|line| line.contains(":1B58 01 ")).count()
    };
    wait_for("the program", || {
        let table = up.ok(&["exec", "box", "--", "cat", "/proc/net/tcp"]);
        if table.contains(":1B58 00000000:0000 0A") { Ok(()) } else { Err(table) }
    });
    let (forwarding, addresses) = forward(&up, &[], &["0:7000"]);
    let address = addresses[0].clone();
    let _writer = std::thread::spawn(move || {
        let mut connection = TcpStream::connect(address).unwrap();
        // Ends when the forwarding does.
        while connection.write_all(&[0; 65536]).is_ok() {}
    });
    wait_for("the connection", || if made() == 1 { Ok(()) } else { Err(made().to_string()) });
    let mut before = 0;
    wait_for("everything on the way to be full", || {
        let table = up.ok(&["exec", "box", "--", "cat", "/proc/net/tcp"]);
        let waiting: u64 = table
            .lines()
            .filter(|line| line.contains(" 01 "))
            .filter_map(|line| line.split_whitespace().nth(4))
            .flat_map(|queues| queues.split(':').map(|queue| u64::from_str_radix(queue, 16).unwrap()))
            .sum();
        let is_full = waiting > 0 && waiting == before;
        before = waiting;
        if is_full { Ok(()) } else { Err(format!("{waiting} bytes wait")) }
    });
    drop(forwarding);
    wait_for("the connection to end", || if made() == 0 { Ok(()) } else { Err(format!("{} stay", made())) });
}

fn has_python() -> bool {
    let found = which("python3");
    if !found {
        support::skip("there is no python3 for a server in the sandbox");
    }
    found
}
