//! Hostile code in a sandbox of a real `cloister up`, started through the command line. What it says of itself is not
//! believed: processes, files, sockets and mounts are looked at from outside. Each attack is contained and reported by
//! name, and nobody else notices: the roles run on as the same processes, and a bystander's counter has no hole.
//!
//! The controls, where one defence is off and the same attacks succeed, are in the tests of the `guest` crate
//! (`tests/build_sandbox/controls.rs`): no defence of a running host can be left off.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test states what it expects by unwrapping it"
)]

mod support;

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::Value;
use support::{Up, can_run, is_alive, skip, wait_for, which};

const ATTACKS: &str = include_str!("hostile/attacks.py");
const MIB: u64 = 1 << 20;

/// Returns whether these tests can run; prints the skip line when not.
fn has_all() -> bool {
    if !can_run() {
        return false;
    }
    if !which("python3") {
        skip("python3 is not installed");
        return false;
    }
    true
}

/// A Cloister with a session for the attacker, and another one that must not notice.
struct Scene {
    up: Up,
    roles: Vec<(&'static str, i32)>,
    bystander: String,
}

impl Scene {
    /// Starts everything; `limits` are the attacker's.
    fn start(limits: &[&str]) -> Self {
        let up = Up::start();
        let mut create = vec!["session", "create", "--name", "hostile"];
        create.extend_from_slice(limits);
        up.ok(&create);
        up.ok(&["session", "create", "--name", "bystander", "--memory", "64M"]);
        let count = "i=0; while :; do echo $i; i=$((i+1)); sleep 0.1; done";
        let bystander = up.ok(&["exec", "-d", "bystander", "--", "sh", "-c", count]);
        let roles =
            ["postgres", "coordinator", "host"].into_iter().map(|role| (role, up.pid_of(role))).collect();
        Self { up, roles, bystander }
    }

    /// Runs an attack as `user` and returns what it printed.
    fn attack_as(&self, user: &str, words: &[&str]) -> String {
        let mut arguments = vec!["exec", "-i", "-u", user, "hostile", "--", "python3", "-"];
        arguments.extend_from_slice(words);
        let outcome = self.up.run_with_input(&arguments, ATTACKS.as_bytes()).stdout();
        println!("{}: {outcome}", words.join(" "));
        outcome
    }

    fn attack(&self, words: &[&str]) -> String {
        self.attack_as("0", words)
    }

    /// Runs an attack and returns its exit as the API reports it.
    fn exit_of(&self, options: &[&str], words: &[&str]) -> Value {
        let mut arguments = vec!["--json", "exec", "-i"];
        arguments.extend_from_slice(options);
        arguments.extend_from_slice(&["hostile", "--", "python3", "-"]);
        arguments.extend_from_slice(words);
        let lines = self.up.run_with_input(&arguments, ATTACKS.as_bytes()).json_lines();
        let exit = lines.last().unwrap()["frame"]["exit"].clone();
        println!("{}: {exit}", words.join(" "));
        exit
    }

    /// The sandbox of the attacker.
    fn sandbox(&self) -> Sandbox {
        let session = self.up.json(&["session", "get", "hostile"])["session"].clone();
        let facts = session["facts"].as_array().unwrap();
        let map = facts.iter().find(|fact| fact["name"] == "uid_map").unwrap()["value"].as_str().unwrap();
        let id_base: u32 = map.split(' ').nth(1).unwrap().parse().unwrap();
        let id = session["id"].as_str().unwrap().to_owned();
        // Pid 1 has an id of its own in the range (see `docs/concepts/security.md`).
        let pid_1 = processes_of(id_base)
            .into_iter()
            .find(|process| process.name == "cloister-guest" && process.uid == id_base + 65_533);
        let session_dir = self.up.path("data/host/sessions").join(id);
        Sandbox { id_base, pid_1: pid_1.expect("pid 1 runs").pid, session_dir }
    }

    /// Nobody but the attacker noticed anything; ends the scene and looks for what is left.
    fn end(self) {
        for (role, pid) in &self.roles {
            assert_eq!(self.up.pid_of(role), *pid, "the {role} was started again");
        }
        let count = || {
            let text = self.up.ok(&["logs", "bystander", &self.bystander]);
            let numbers: Vec<&str> = text.lines().collect();
            let expected: Vec<String> = (0..numbers.len()).map(|number| number.to_string()).collect();
            assert_eq!(numbers, expected);
            numbers.len()
        };
        let before = count();
        wait_for("the bystander to count on", || {
            let now = count();
            if now > before { Ok(()) } else { Err(now.to_string()) }
        });
        let id_base = self.sandbox().id_base;
        self.up.ok(&["session", "delete", "hostile"]);
        wait_for("the attacker's processes to go", || {
            let left = processes_of(id_base);
            if left.is_empty() { Ok(()) } else { Err(format!("{left:?}")) }
        });
    }
}

struct Sandbox {
    id_base: u32,
    pid_1: i32,
    session_dir: PathBuf,
}

impl Sandbox {
    /// A file of the sandbox, seen from outside.
    fn path(&self, path: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{path}", self.pid_1))
    }

    fn mounts(&self) -> String {
        fs::read_to_string(format!("/proc/{}/mountinfo", self.pid_1)).unwrap()
    }
}

#[derive(Debug)]
struct Found {
    pid: i32,
    uid: u32,
    name: String,
    rss_kib: u64,
}

/// The processes of a sandbox, by its range of ids.
fn processes_of(id_base: u32) -> Vec<Found> {
    let field = |status: &str, name: &str| -> Option<String> {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next().map(str::to_owned)
    };
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse() else { continue };
        let Ok(status) = fs::read_to_string(entry.path().join("status")) else { continue };
        let uid: u32 = field(&status, "Uid:").unwrap().parse().unwrap();
        if (id_base..id_base + 65_536).contains(&uid) {
            let rss_kib = field(&status, "VmRSS:").map_or(0, |text| text.parse().unwrap());
            found.push(Found { pid, uid, name: field(&status, "Name:").unwrap(), rss_kib });
        }
    }
    found
}

/// A process of the host that an attack is aimed at; it has the same user id as root inside.
struct Victim(Child);

impl Victim {
    fn start(id: u32) -> Self {
        Self(Command::new("sleep").arg("600").uid(id).gid(id).stdin(Stdio::null()).spawn().unwrap())
    }

    fn assert_untouched(&self) {
        let status = fs::read_to_string(format!("/proc/{}/status", self.0.id())).unwrap();
        assert!(status.contains("TracerPid:\t0\n") && status.contains("State:\tS"), "{status}");
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn every_way_out_is_refused_by_name() {
    if !has_all() {
        return;
    }
    let scene = Scene::start(&["--memory", "64M", "--pids", "32", "--disk", "64M"]);
    let sandbox = scene.sandbox();
    let host = |path: &str| fs::read_to_string(path).unwrap();

    let mounts = sandbox.mounts();
    assert_eq!(scene.attack(&["mount", "tmpfs", "/mnt"]), "EPERM");
    assert_eq!(scene.attack(&["mount", "proc", "/tmp"]), "EPERM");
    assert_eq!(scene.attack(&["mount", "sysfs", "/mnt"]), "EPERM");
    assert_eq!(scene.attack(&["make_writable", "/usr"]), "EPERM");
    assert_eq!(scene.attack(&["unmount", "/usr"]), "EPERM");
    assert_eq!(scene.attack(&["unmount", "/proc/sys"]), "EPERM");
    assert_eq!(scene.attack(&["nest", "now"]), "EPERM");
    assert_eq!(scene.attack(&["write", "/usr/evil", "x"]), "EROFS");
    assert_eq!(sandbox.mounts(), mounts);
    assert!(!Path::new("/usr/evil").exists());

    // Tracing and killing: what is outside has no number in there, and pid 1 is somebody else's.
    let victim = Victim::start(sandbox.id_base);
    let pid = victim.0.id().to_string();
    assert_eq!(scene.attack(&["trace", &pid]), "ESRCH");
    assert_eq!(scene.attack(&["kill", &pid]), "ESRCH");
    victim.assert_untouched();
    drop(victim);
    assert_eq!(scene.attack(&["trace", "1"]), "EPERM");
    assert_eq!(scene.attack(&["kill", "1"]), "EPERM");
    let status = host(&format!("/proc/{}/status", sandbox.pid_1));
    assert!(status.contains("TracerPid:\t0\n"), "{status}");

    // Values that do no harm should one arrive: what is there already, and a priority of swapping.
    let core_pattern = host("/proc/sys/kernel/core_pattern");
    let swappiness = host("/proc/sys/vm/swappiness");
    let other = if swappiness.trim() == "61" { "62" } else { "61" };
    assert_eq!(scene.attack(&["write", "/proc/sys/kernel/core_pattern", &core_pattern]), "EROFS");
    assert_eq!(scene.attack(&["write", "/proc/sys/vm/swappiness", other]), "EROFS");
    assert_eq!(host("/proc/sys/vm/swappiness"), swappiness);
    assert_eq!(scene.attack(&["write", "/sys/kernel/mm/ksm/run", "0"]), "ENOENT");

    assert_eq!(scene.attack(&["make_device", "/workspace/node"]), "EPERM");
    assert!(!sandbox.path("/workspace/node").exists());

    // Root of the sandbox leaves a set-user-id program; outside it belongs to nobody who matters, inside it has no effect.
    let plant = "cp /usr/bin/id /tmp/id && chmod 4755 /tmp/id";
    scene.up.ok(&["exec", "hostile", "--", "sh", "-c", plant]);
    let planted = fs::metadata(sandbox.path("/tmp/id")).unwrap();
    assert_eq!((planted.uid(), planted.mode() & 0o7777), (sandbox.id_base, 0o4755));
    assert_eq!(scene.up.ok(&["exec", "-u", "1000", "hostile", "--", "/tmp/id", "-u"]), "1000");

    let name = format!("cloister-e2e-{}", std::process::id());
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    listener.set_nonblocking(true).unwrap();
    assert_eq!(scene.attack(&["connect_abstract", &name]), "ECONNREFUSED");
    assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap().to_string();
    assert_eq!(scene.attack(&["connect_tcp", &address]), "ECONNREFUSED");
    assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
    assert_eq!(scene.attack(&["connect_tcp", "192.0.2.1:443"]), "ENETUNREACH");
    scene.end();
}

#[test]
fn a_fork_bomb_stays_within_its_limit() {
    if !has_all() {
        return;
    }
    let scene = Scene::start(&["--memory", "256M", "--pids", "32", "--cpus", "0.5"]);
    let id_base = scene.sandbox().id_base;
    let (exit, most) = std::thread::scope(|scope| {
        let bomb = scope.spawn(|| scene.exit_of(&["--timeout", "4s"], &["fork_bomb", "now"]));
        let mut most = 0;
        while !bomb.is_finished() {
            most = most.max(processes_of(id_base).len());
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        (bomb.join().unwrap(), most)
    });
    assert_eq!(exit["reason"], "EXIT_REASON_TIMEOUT");
    assert_eq!(exit["pidsLimitHit"], true);
    // Pid 1 has a group of its own beside the work's.
    println!("fork bomb: {most} processes at most");
    assert!((20..=33).contains(&most), "{most} processes");
    // Nothing of it is left to hinder the next one.
    let exit = scene.exit_of(&[], &["write", "/workspace/after", "x"]);
    assert_eq!((&exit["reason"], &exit["pidsLimitHit"]), (&Value::from("EXIT_REASON_EXITED"), &Value::Null));
    scene.end();
}

#[test]
fn a_memory_hog_and_a_full_disk_stay_within_their_limits() {
    if !has_all() {
        return;
    }
    let scene = Scene::start(&["--memory", "64M", "--disk", "64M"]);
    let sandbox = scene.sandbox();
    let (exit, most_kib) = std::thread::scope(|scope| {
        let hog = scope.spawn(|| scene.exit_of(&[], &["take_memory", "now"]));
        let mut most = 0;
        while !hog.is_finished() {
            let taken = processes_of(sandbox.id_base).iter().map(|process| process.rss_kib).sum();
            most = std::cmp::max::<u64>(most, taken);
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        (hog.join().unwrap(), most)
    });
    assert_eq!(exit["reason"], "EXIT_REASON_OUT_OF_MEMORY");
    assert_eq!(exit["code"], 137);
    // What is read of shared files counts in each process, so a bit more than the limit can be seen.
    println!("memory hog: {most_kib} KiB resident at most");
    assert!(most_kib < 96 * 1024, "{most_kib} KiB");

    let exit = scene.exit_of(&[], &["take_disk", "/workspace/fill"]);
    assert_eq!(
        (&exit["reason"], &exit["diskFull"]),
        (&Value::from("EXIT_REASON_EXITED"), &Value::from(true))
    );
    let image = fs::metadata(sandbox.session_dir.join("layer.img")).unwrap();
    println!("full disk: {} of {} bytes on the host", image.blocks() * 512, image.len());
    assert!(image.len() <= 64 * MIB && image.blocks() * 512 <= 64 * MIB);
    scene.end();
}

/// The frames of an honest guest agent up to the start of an exec: `HelloReply{version: 1}`, `Exec{pid: 7}`.
const STARTED: &[u8] = b"\x04\0\0\0\x12\x02\x08\x01\x05\0\0\0\xf2\x01\x02\x20\x07";

#[test]
fn a_guest_agent_that_was_taken_over_harms_only_its_session() {
    if !has_all() {
        return;
    }
    let scene = Scene::start(&[]);
    let sandboxes = fs::read_dir(scene.up.path("data/host/sandboxes")).unwrap();
    let sandbox_id = scene.up.json(&["session", "get", "hostile"])["session"]["id"].clone();
    let directory = sandboxes
        .flatten()
        .map(|entry| entry.path())
        .find(|path| {
            let intent = fs::read_to_string(path.join("intent.json")).unwrap_or_default();
            intent.contains(sandbox_id.as_str().unwrap())
        })
        .expect("the sandbox's directory");
    // From here on the test is the guest agent.
    let socket = directory.join("guest.sock");
    fs::remove_file(&socket).unwrap();
    let listener = UnixListener::bind(&socket).unwrap();
    let answer = |frames: Vec<u8>| -> Value {
        let listener = listener.try_clone().unwrap();
        let hostile = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 4096];
            assert!(stream.read(&mut request).unwrap() > 0);
            // Closed before it is all written, where it is refused.
            let _ = stream.write_all(&frames);
        });
        let lines = scene.up.run(&["--json", "exec", "hostile", "--", "true"]).json_lines();
        hostile.join().unwrap();
        lines.last().unwrap()["frame"]["exit"].clone()
    };
    let after_start = |more: &[u8]| [STARTED, more].concat();
    let mut long = after_start(&u32::MAX.to_le_bytes());
    long.extend(vec![0; 1 << 20]);
    for (what, frames, says) in [
        ("a frame of 4 GiB", long, "nonsense"),
        ("bytes that are no message", after_start(b"\x04\0\0\0\xff\xff\xff\xff"), "nonsense"),
        ("a message without content", after_start(b"\0\0\0\0"), "nonsense"),
        ("a greeting in the middle", after_start(STARTED), "another message than output"),
        ("half a frame", after_start(b"\x10\0\0\0\x12"), "ended before the program did"),
        ("no greeting", b"HTTP/1.1 200 OK\r\n\r\n".to_vec(), "could not be asked"),
        ("silence", Vec::new(), "could not be asked"),
    ] {
        let exit = answer(frames);
        println!("{what}: {exit}");
        assert_eq!(exit["reason"], "EXIT_REASON_SANDBOX_GONE", "{what}");
        assert!(exit["message"].as_str().unwrap().contains(says), "{what}: {exit}");
    }
    scene.end();
}

/// The roles are what the scene says they are, or its end proves nothing.
#[test]
fn the_scene_notices_a_role_that_was_started_again() {
    if !has_all() {
        return;
    }
    let scene = Scene::start(&[]);
    let host = scene.up.pid_of("host");
    scene.up.kill_role("host");
    assert!(!is_alive(host));
    let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| scene.end()));
    assert!(ended.is_err());
}
