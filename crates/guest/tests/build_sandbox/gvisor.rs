//! The same on gVisor. What the two kernels have in common runs as it is; where they differ, the case is here.
//!
//! A sentry is a second wall: whatever a program does to it, the process outside has no privilege, sees none of the host's
//! files, and is in namespaces of its own. That is read from the host.

use std::fs;
use std::path::PathBuf;
use std::sync::OnceLock;

use cloister_guest::shim::config::{Defence, DiskConfig, KernelConfig};

use crate::cases::{self, Case};
use crate::controls::{self, Control, SUCCEEDED};
use crate::sandbox::{Report, Sandbox, wait_until};

/// Set by a case of this file, which has its process for itself.
static KERNEL: OnceLock<KernelConfig> = OnceLock::new();

/// What sandboxes of this process run on.
pub(crate) fn kernel() -> KernelConfig {
    KERNEL.get().cloned().unwrap_or_default()
}

/// Runs a case on gVisor, or says why not.
fn on_gvisor(case: fn()) {
    let named = std::env::var_os("CLOISTER_RUNSC").map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = named.or_else(|| {
        std::env::split_paths(&path).map(|place| place.join("runsc")).find(|file| file.is_file())
    });
    let Some(runsc) = found else {
        return println!("SKIP: there is no `runsc` in PATH or CLOISTER_RUNSC: `just gvisor` builds one");
    };
    KERNEL.get_or_init(|| KernelConfig::Gvisor { runsc, memory_bytes: 256 << 20, pids: 20 });
    case();
}

macro_rules! cases {
    ($($name:ident: $case:path),* $(,)?) => { &[$((stringify!($name), || on_gvisor($case))),*] };
}

pub(crate) const ALL: &[Case] = cases![
    gvisor_facts: facts,
    gvisor_sentry_is_walled_in: sentry_is_walled_in,
    gvisor_system_directories_are_read_only: system_directories_are_read_only,
    gvisor_etc_is_synthesised: cases::etc_is_synthesised,
    gvisor_writable_places: cases::writable_places_can_be_written_by_root_and_user,
    gvisor_mount_tree_cannot_be_changed: mount_tree_cannot_be_changed,
    gvisor_refused_system_calls_fail: refused_system_calls_fail,
    gvisor_sockets: sockets,
    gvisor_setuid_bits_and_devices_have_no_effect: cases::setuid_bits_and_devices_have_no_effect,
    gvisor_host_processes_are_invisible: host_processes_are_invisible,
    gvisor_pid_1_cannot_be_touched: pid_1_cannot_be_touched,
    gvisor_control_groups_are_out_of_reach: control_groups_are_out_of_reach,
    gvisor_one_exec_ends_what_another_started: cases::one_exec_ends_what_another_started,
    gvisor_disk_limit_of_image_is_enospc: cases::disk_limit_of_image_is_enospc,
    gvisor_layer_survives_the_sandbox: cases::layer_survives_the_sandbox,
    gvisor_links_planted_in_the_layer_are_not_followed: cases::links_planted_in_the_layer_are_not_followed,
    gvisor_a_layer_takes_the_name_it_is_resumed_under: cases::a_layer_takes_the_name_it_is_resumed_under,
    gvisor_nothing_is_left_after_shim_is_killed: cases::nothing_is_left_after_shim_is_killed,
    gvisor_nothing_is_left_after_failed_build: nothing_is_left_after_failed_build,
    gvisor_common_programs_work: cases::common_programs_work,
    gvisor_controls: prove_controls,
];

fn facts() {
    let sandbox = Sandbox::start();
    let facts = sandbox.facts();
    assert_eq!(facts["guest_agent_pid"], "1");
    assert_eq!(facts["hostname"], "inside");
    // KILL, SETGID, SETUID.
    assert_eq!(facts["guest_agent_capabilities"], "00000000000000e0");
    assert_eq!(facts["seccomp_mode"], "2");
    assert_eq!(facts["no_new_privs"], "1");
    // What the sentry makes up about namespaces is not passed on.
    assert!(facts.keys().all(|name| !name.starts_with("namespace.") && name != "uid_map"), "{facts:?}");
    for uid in [0, 1000] {
        let (_, status) = sandbox.shell_as(uid, "cat /proc/self/status");
        assert!(status.contains("CapEff:\t0000000000000000"), "{uid}: {status}");
        assert!(status.contains("Seccomp:\t2"), "{status}");
    }
}

/// Every process of the sandbox as the host has it, by pid.
fn processes(sandbox: &Sandbox) -> Vec<i32> {
    let mut found = vec![sandbox.pid];
    let mut next = 0;
    while let Some(pid) = found.get(next).copied() {
        next += 1;
        for task in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
            let children = fs::read_to_string(task.path().join("children")).unwrap_or_default();
            found.extend(children.split_whitespace().map(|pid| pid.parse::<i32>().unwrap()));
        }
    }
    found
}

fn sentry_is_walled_in() {
    let sandbox = Sandbox::start();
    sandbox.shell("true");
    let all = processes(&sandbox);
    assert!(all.len() >= 3, "keeper, sentry and gofer: {all:?}");
    let base = sandbox.config.id_base;
    for pid in &all[1..] {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.unwrap_or_else(|| panic!("{name} in {status}")).trim().to_owned()
        };
        let uid: u32 = field("Uid").split_whitespace().next().unwrap().parse().unwrap();
        assert!((base..base + 65_536).contains(&uid), "{pid} runs as {uid} on the host");
        assert_eq!((field("NoNewPrivs").as_str(), field("Seccomp").as_str()), ("1", "2"), "{status}");
        // What it has is over its own user namespace, whose map is this sandbox's.
        let map = fs::read_to_string(format!("/proc/{pid}/uid_map")).unwrap();
        assert_eq!(map.split_whitespace().collect::<Vec<_>>(), ["0", &base.to_string(), "65536"], "{pid}");
        for name in ["ipc", "mnt", "net", "pid", "user", "uts"] {
            let link = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/{name}")).unwrap();
            assert_ne!(link(&pid.to_string()), link("self"), "{name} of {pid}");
        }
        // Nothing of the host can be named from there, such as the files of this very test.
        for file in [sandbox.path().join("shim.json"), "/etc/shadow".into()] {
            let seen_from =
                |pid: &str| fs::symlink_metadata(format!("/proc/{pid}/root{}", file.display())).is_ok();
            assert!(seen_from("self"), "{}", file.display());
            assert!(!seen_from(&pid.to_string()), "{pid} sees {}", file.display());
        }
    }
}

fn system_directories_are_read_only() {
    let sandbox = Sandbox::start();
    for place in ["/usr/x", "/usr/bin/x", "/x", "/dev/x", "/opt/x", "/sys/x", "/.cloister/x"] {
        let outcome = sandbox.attack("write_file", place);
        assert!(["EROFS", "EACCES", "EPERM", "ENOENT"].contains(&outcome.as_str()), "{place}: {outcome}");
    }
    let (code, _) =
        sandbox.shell_as(0, "chmod 777 /usr/bin/env || rm /usr/bin/env || mv /usr /usr2 || rm /dev/null");
    assert_ne!(code, 0);
    assert_ne!(sandbox.attack("write_file", "/etc/ssl/certs/ca-certificates.crt"), "ok");
    assert_ne!(sandbox.attack("write_file", "/proc/sys/kernel/hostname"), "ok");
    assert_ne!(sandbox.attack("write_file", "/.cloister/guest"), "ok");
    // What is ours there tells nothing about the host.
    let seen = sandbox.shell("cat /.cloister/agent.json /proc/self/mountinfo");
    assert!(!seen.contains(sandbox.path().to_str().unwrap()), "{seen}");
}

fn mount_tree_cannot_be_changed() {
    let sandbox = Sandbox::start();
    for attack in ["mount_tmpfs", "umount_usr", "mount_proc", "remount_usr_writable", "unshare_user"] {
        assert_eq!(sandbox.attack(attack, ""), "EPERM", "{attack}");
    }
    let (code, _) =
        sandbox.shell_as(0, "unshare -Urm true || umount /sys/fs/cgroup || umount /.cloister/link");
    assert_ne!(code, 0);
}

fn refused_system_calls_fail() {
    let sandbox = Sandbox::start();
    for (name, number, arguments) in cases::REFUSED {
        let outcome = sandbox.attack("system_call", &format!("{number} {arguments}"));
        assert!(["EPERM", "ENOSYS"].contains(&outcome.as_str()), "{name}: {outcome}");
    }
}

fn sockets() {
    let sandbox = Sandbox::start();
    let socket = |domain: i32, kind: i32, protocol: i32| {
        sandbox.attack("system_call", &format!("{} {domain} {kind} {protocol}", libc::SYS_socket))
    };
    assert_eq!(socket(libc::AF_INET, libc::SOCK_RAW, 1), "EPERM");
    assert_ne!(socket(libc::AF_PACKET, libc::SOCK_RAW, 3), "ok");
    assert_ne!(socket(libc::AF_VSOCK, libc::SOCK_STREAM, 0), "ok");
    assert_eq!(socket(libc::AF_INET, libc::SOCK_STREAM, 0), "ok");
    assert_eq!(socket(libc::AF_UNIX, libc::SOCK_STREAM, 0), "ok");
    let away = sandbox.attack("connect_tcp", "192.0.2.1:443");
    assert!(["ENETUNREACH", "EHOSTUNREACH"].contains(&away.as_str()), "{away}");
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let hosts = listener.local_addr().unwrap().to_string();
    assert_eq!(sandbox.attack("connect_tcp", &hosts), "ECONNREFUSED");
    assert_eq!(sandbox.attack("own_tcp_connection", ""), SUCCEEDED);
    assert_eq!(sandbox.attack("own_abstract_socket", "twin"), SUCCEEDED);
    let socket = sandbox.path().join("host.sock");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let (code, _) = sandbox.shell_as(0, &format!("test -e {}", socket.display()));
    assert_ne!(code, 0, "a socket of the host can be named");
}

fn host_processes_are_invisible() {
    let sandbox = Sandbox::start();
    let seen = sandbox.shell("ls /proc | grep -c '^[0-9]'");
    assert!(seen.parse::<u32>().unwrap() <= 6, "{seen}");
    let (_, output) = sandbox.shell_as(0, &format!("kill -9 {}", std::process::id()));
    assert!(output.contains("No such process"), "{output}");
}

fn pid_1_cannot_be_touched() {
    let sandbox = Sandbox::start();
    assert_eq!(sandbox.attack("trace", "1"), "EPERM");
    for file in ["mem", "maps", "environ", "fd/101"] {
        let outcome = sandbox.attack("read_file", &format!("/proc/1/{file}"));
        assert!(["EACCES", "EPERM", "ENOENT"].contains(&outcome.as_str()), "{file}: {outcome}");
    }
    for (attack, argument) in [("signal", "1"), ("limit_pid_1", ""), ("slow_pid_1", "")] {
        let outcome = sandbox.attack(attack, argument);
        assert!(["EPERM", "EACCES"].contains(&outcome.as_str()), "{attack}: {outcome}");
    }
    for uid in [0, 1000] {
        for signal in ["KILL", "STOP", "TERM", "CONT", "SEGV"] {
            let (code, output) = sandbox.shell_as(uid, &format!("kill -{signal} 1"));
            assert!(code != 0 && output.contains("not permitted"), "{uid} {signal}: {code} {output}");
        }
    }
    assert_eq!(sandbox.attack("become_agent", ""), "EPERM");
    // Nor can anybody speak in its place: the listener's directory is its own.
    for uid in [0, 1000] {
        let (code, _) = sandbox.shell_as(uid, "ls /.cloister/link || rm -f /.cloister/link/guest.sock");
        assert_ne!(code, 0, "{uid}");
    }
    assert_eq!(sandbox.shell("echo alive"), "alive");
}

/// The work's limit is the sentry's own control group, whose files are inside. It counts approximately: some 20 more were seen.
fn control_groups_are_out_of_reach() {
    let sandbox = Sandbox::start();
    assert_eq!(sandbox.shell("ls -A /sys/fs/cgroup"), "");
    let (code, _) = sandbox.shell_as(0, "umount -l /sys/fs/cgroup || mount -t cgroup -o pids none /tmp");
    assert_ne!(code, 0);
    assert_eq!(sandbox.attack("fork", "400"), "EAGAIN");
    assert_eq!(sandbox.attack("fork", "10"), SUCCEEDED);
}

fn nothing_is_left_after_failed_build() {
    let directory = tempfile::tempdir().unwrap();
    let fails = |runsc: &str| {
        let image = cases::image(directory.path(), 32).expect("an image for the layer");
        let outcome = Sandbox::try_start(|config| {
            config.disk = DiskConfig::Loop { image: image.clone() };
            config.kernel = KernelConfig::Gvisor { runsc: runsc.into(), memory_bytes: 64 << 20, pids: 20 };
        });
        let Err((Report::Failed { step, .. }, mut shim, sandbox_dir)) = outcome else {
            panic!("`{runsc}` made a sandbox");
        };
        let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", shim.id())).unwrap();
        assert_eq!(children, "", "{step}");
        let left = fs::read_dir(sandbox_dir.path()).unwrap().map(|entry| entry.unwrap().file_name());
        assert_eq!(left.collect::<Vec<_>>(), ["shim.json"], "{step}");
        wait_until("loop device is gone", || {
            let left = cases::attached(directory.path());
            if left.is_empty() { Ok(()) } else { Err(format!("{left:?}")) }
        });
        drop(shim.stdin.take());
        shim.wait().unwrap();
        step
    };
    assert!(fails("/nonexistent").contains("/nonexistent"));
    // Not a static program, and nothing of the host's libraries is there.
    let step = fails("/bin/false");
    assert!(step.contains("run runsc"), "{step}");
    // Static, and refuses what it is told: it says so itself.
    if let Some(busybox) =
        ["/bin/busybox", "/usr/bin/busybox"].into_iter().find(|path| fs::metadata(path).is_ok())
    {
        let step = fails(busybox);
        assert!(step.contains("start runsc") && step.contains("applet not found"), "{step}");
    }
}

/// What stands inside beside the sentry itself. On gVisor there is no Landlock, and namespaces, masks and locked mounts are
/// the sentry's own.
const CONTROLS: &[Control] = &[
    Control {
        defence: Defence::Seccomp,
        attack: "a nested user namespace",
        others: &[],
        stopped_as: &["EPERM"],
        run: |off| Sandbox::without(off).attack("unshare_user", ""),
        twin: || Sandbox::start().shell_as(0, "(sleep 0) && echo ok").1,
    },
    Control {
        defence: Defence::Seccomp,
        attack: "mounting as root of a nested user namespace",
        others: &[],
        stopped_as: &["EPERM"],
        run: |off| Sandbox::without(off).attack("nested_mount", ""),
        twin: || Sandbox::start().shell_as(0, "mkdir /tmp/a && mv /tmp/a /tmp/b && echo ok").1,
    },
    Control {
        defence: Defence::Capabilities,
        attack: "giving a file to another user",
        others: &[],
        stopped_as: &["EPERM"],
        run: |off| Sandbox::without(off).attack("give_away", "/workspace/f"),
        twin: || Sandbox::start().shell_as(0, "touch f && chown 0:0 f && echo ok").1,
    },
    Control {
        defence: Defence::Capabilities,
        attack: "mounting",
        others: &[Defence::Seccomp],
        stopped_as: &["EPERM"],
        run: |off| Sandbox::without(off).attack("mount_tmpfs", ""),
        twin: || Sandbox::start().shell_as(0, "df /workspace >/dev/null && echo ok").1,
    },
    Control {
        defence: Defence::PidsCgroup,
        attack: "a fork bomb of 400 where about 20 are allowed",
        others: &[],
        stopped_as: &["EAGAIN"],
        run: |off| Sandbox::without(off).attack("fork", "400"),
        twin: || Sandbox::start().attack("fork", "10"),
    },
    Control {
        defence: Defence::DiskLimit,
        attack: "writing 32 MiB where 8 are allowed",
        others: &[],
        stopped_as: &["ENOSPC after "],
        run: |off| controls::fill_disk(off, "32"),
        twin: || controls::fill_disk(&[], "4"),
    },
    Control {
        defence: Defence::MemoryCgroup,
        attack: "a memory hog of 256 MiB where 160 are allowed",
        others: &[],
        // Without a shim to spare it, pid 1 may be what goes.
        stopped_as: &["killed for want of memory"],
        run: |off| controls::hog_memory_of(off, 160 << 20, "256"),
        twin: || controls::hog_memory_of(&[], 160 << 20, "8"),
    },
];

fn prove_controls() {
    controls::prove_all(CONTROLS);
}
