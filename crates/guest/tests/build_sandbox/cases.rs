//! The cases, in the order they run.

use std::fs;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::{Path, PathBuf};
use std::process::Command;

use cloister_guest::shim::config::{Defence, DiskConfig};

use crate::cgroup::{Cgroup, Limit};
use crate::controls::{self, every_defence_has_a_control};
use crate::sandbox::{Report, Sandbox, wait_until};

pub(crate) type Case = (&'static str, fn());

macro_rules! cases {
    ($($name:ident),* $(,)?) => { &[$((stringify!($name), $name as fn())),*] };
}

pub(crate) const ALL: &[Case] = cases![
    namespaces_and_privileges_are_what_the_facts_say,
    build_steps_are_timed,
    system_directories_are_read_only,
    etc_is_synthesised,
    writable_places_can_be_written_by_root_and_user,
    proc_is_masked,
    mount_tree_cannot_be_changed,
    refused_system_calls_fail,
    exotic_sockets_fail,
    setuid_bits_and_devices_have_no_effect,
    host_processes_are_invisible,
    pid_1_cannot_be_touched,
    one_exec_ends_what_another_started,
    network_is_refused_at_once,
    host_abstract_sockets_are_unreachable,
    disk_limit_of_tmpfs_is_enospc,
    disk_limit_of_image_is_enospc,
    layer_survives_the_sandbox,
    links_planted_in_the_layer_are_not_followed,
    a_layer_takes_the_name_it_is_resumed_under,
    a_new_name_is_not_written_through_what_a_guest_planted,
    nothing_is_left_after_shim_is_killed,
    nothing_is_left_after_failed_build,
    processes_join_their_cgroups,
    facts_say_what_is_off,
    every_defence_has_a_control,
    control_seccomp,
    control_landlock,
    control_capabilities,
    control_no_new_privileges,
    control_locked_mounts,
    control_memory_cgroup,
    control_pids_cgroup,
    control_network_namespace,
    control_pid_namespace,
    control_user_namespace,
    control_mount_flags,
    control_proc_masks,
    control_spool_bound,
    control_frame_bound,
    control_disk_limit,
    control_own_account,
    common_programs_work,
];

macro_rules! controls {
    ($($name:ident: $defence:ident),* $(,)?) => {
        $(fn $name() {
            match controls::missing(Defence::$defence) {
                Some(reason) => println!("SKIP: {reason}"),
                None => controls::prove(Defence::$defence),
            }
        })*
    };
}

controls! {
    control_seccomp: Seccomp,
    control_landlock: Landlock,
    control_capabilities: Capabilities,
    control_no_new_privileges: NoNewPrivileges,
    control_locked_mounts: LockedMounts,
    control_memory_cgroup: MemoryCgroup,
    control_pids_cgroup: PidsCgroup,
    control_network_namespace: NetworkNamespace,
    control_pid_namespace: PidNamespace,
    control_user_namespace: UserNamespace,
    control_mount_flags: MountFlags,
    control_proc_masks: ProcMasks,
    control_spool_bound: SpoolBound,
    control_frame_bound: FrameBound,
    control_disk_limit: DiskLimit,
    control_own_account: OwnAccount,
}

fn namespaces_and_privileges_are_what_the_facts_say() {
    let sandbox = Sandbox::start();
    let facts = sandbox.facts();
    for name in ["cgroup", "ipc", "mnt", "net", "pid", "user", "uts"] {
        let host = fs::read_link(format!("/proc/self/ns/{name}")).unwrap();
        let outside = fs::read_link(format!("/proc/{}/ns/{name}", sandbox.pid)).unwrap();
        assert_ne!(host, outside, "{name}");
        assert!(outside.to_str().unwrap().contains(&facts[&format!("namespace.{name}")]), "{name}");
    }
    assert_eq!(facts["uid_map"], format!("0 {} 65536", sandbox.config.id_base));
    assert_eq!(facts["gid_map"], facts["uid_map"]);
    assert_eq!(facts["guest_agent_pid"], "1");
    assert_eq!(facts["hostname"], "inside");
    assert_eq!(facts["seccomp_mode"], "2");
    assert_eq!(facts["no_new_privs"], "1");
    // KILL, SETGID, SETUID.
    assert_eq!(facts["guest_agent_capabilities"], "00000000000000e0");
    assert_eq!(facts["capability_bounding_set"], "0000000000000000");
    assert!(facts["landlock_abi"].parse::<u32>().unwrap() >= 2);
    for uid in [0, 1000] {
        let (_, status) = sandbox.shell_as(uid, "cat /proc/self/status");
        for line in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            assert!(status.contains(&format!("{line}:\t0000000000000000")), "{uid}: {status}");
        }
        assert!(status.contains("NoNewPrivs:\t1") && status.contains("Seccomp:\t2"), "{status}");
        assert!(status.contains(&format!("Uid:\t{uid}\t{uid}\t{uid}\t{uid}")), "{status}");
    }
    assert_eq!(sandbox.shell("cat /proc/self/cgroup | cut -d: -f3 | sort -u"), "/");
}

fn build_steps_are_timed() {
    let sandbox = Sandbox::start();
    let steps: Vec<&str> = sandbox.timings.iter().map(|(step, _)| step.as_str()).collect();
    println!("timings (microseconds): {:?}", sandbox.timings);
    for step in ["network", "layer", "root", "clone", "proc", "user_namespace", "id_maps", "exec"] {
        assert!(steps.contains(&step), "{step} in {steps:?}");
    }
}

fn system_directories_are_read_only() {
    let sandbox = Sandbox::start();
    for place in ["/usr/x", "/usr/bin/x", "/x", "/dev/x", "/opt/x"] {
        assert_eq!(sandbox.attack("write_file", place), "EROFS", "{place}");
    }
    // Landlock answers first here; in the control without it the mount does.
    let (code, _) = sandbox.shell_as(0, "chmod 777 /usr/bin/env || rm /usr/bin/env || mv /usr /usr2");
    assert_ne!(code, 0);
    assert_ne!(sandbox.attack("write_file", "/etc/ssl/certs/ca-certificates.crt"), "ok");
    let mounts = sandbox.shell("cat /proc/self/mountinfo");
    for line in mounts.lines() {
        let fields: Vec<&str> = line.split(' ').collect();
        assert!(fields[5].contains("nosuid"), "{line}");
        if fields[4].starts_with("/usr") {
            assert!(fields[5].starts_with("ro,"), "{line}");
        }
        if !fields[4].starts_with("/dev/") && !fields[4].starts_with("/proc") {
            assert!(fields[5].contains("nodev"), "{line}");
        }
    }
    // No trace of where things are on the host, and nothing of its other filesystems.
    assert!(!mounts.contains(sandbox.path().to_str().unwrap()), "{mounts}");
    assert_eq!(
        sandbox.shell("ls / | tr '\\n' ' '").replace("lib32 ", "").replace("libx32 ", ""),
        "bin dev etc home lib lib64 mnt opt proc root run sbin srv tmp usr var workspace"
    );
}

pub(crate) fn etc_is_synthesised() {
    let sandbox = Sandbox::start();
    assert_eq!(sandbox.shell("id"), "uid=0(root) gid=0(root) groups=0(root)");
    assert_eq!(sandbox.shell_as(1000, "id -un; echo ~user").1, "user\n/home/user");
    assert_eq!(sandbox.shell("hostname; cat /etc/hostname"), "inside\ninside");
    assert_eq!(sandbox.shell("getent hosts inside localhost | wc -l"), "2");
    for secret in ["shadow", "gshadow", "sudoers", "ssh", "ssl/private", "machine-id", "npmrc", "pip.conf"] {
        assert_eq!(sandbox.attack("read_file", &format!("/etc/{secret}")), "ENOENT", "{secret}");
    }
    if Path::new("/etc/ssl/certs/ca-certificates.crt").exists() {
        assert_eq!(sandbox.attack("read_file", "/etc/ssl/certs/ca-certificates.crt"), "ok");
    }
    sandbox.shell("echo 'x:x:77:77::/:/bin/sh' >> /etc/passwd && getent passwd x");
    sandbox.shell("git config --system a.b c 2>/dev/null || [ ! -e /usr/bin/git ]");
}

pub(crate) fn writable_places_can_be_written_by_root_and_user() {
    let sandbox = Sandbox::start();
    for place in [
        "/home/x",
        "/root/x",
        "/var/x",
        "/var/log/x",
        "/tmp/x",
        "/workspace/x",
        "/etc/x",
        "/run/x",
        "/dev/shm/x",
    ] {
        assert_eq!(sandbox.attack("write_file", place), "ok", "{place}");
    }
    for place in ["/tmp/y", "/home/user/y", "/var/tmp/y", "/run/lock/y", "/dev/shm/y"] {
        assert_eq!(sandbox.attack_as(1000, "write_file", place), "ok", "{place}");
    }
    assert_eq!(sandbox.attack_as(1000, "write_file", "/etc/y"), "EACCES");
    assert_eq!(sandbox.shell("pwd; stat -c %U /workspace / /home/user"), "/workspace\nroot\nroot\nuser");
    sandbox
        .shell("cd /tmp && mkdir a b && echo 1 > a/f && mv a/f b/f && ln b/f a/g && mkfifo p && rm -r a b p");
    sandbox.shell("echo x > /dev/null; head -c 4 /dev/urandom | wc -c; [ -c /dev/full ] && [ -d /dev/pts ]");
}

fn proc_is_masked() {
    let sandbox = Sandbox::start();
    for file in ["kallsyms", "keys", "kcore", "kmsg", "timer_list", "config.gz", "slabinfo"] {
        let outcome = sandbox.attack("read_file", &format!("/proc/{file}"));
        assert!(["empty", "ENOENT"].contains(&outcome.as_str()), "{file}: {outcome}");
    }
    for file in
        ["sys/kernel/core_pattern", "sys/kernel/hostname", "sys/vm/drop_caches", "sys/kernel/modprobe"]
    {
        let outcome = sandbox.attack("write_file", &format!("/proc/{file}"));
        assert!(["EROFS", "EACCES", "ENOENT"].contains(&outcome.as_str()), "{file}: {outcome}");
    }
    // Written to a null device if anything is there at all.
    let before = fs::read_to_string("/proc/uptime").unwrap();
    sandbox.shell("echo b > /proc/sysrq-trigger || true");
    assert_ne!(before, "");
    assert_eq!(sandbox.shell("ls /proc/acpi /proc/scsi 2>/dev/null | grep -v : | tr -d '\\n'"), "");
    sandbox.shell("cat /proc/cpuinfo /proc/meminfo /proc/self/maps /proc/sys/kernel/random/uuid >/dev/null");
    assert_eq!(sandbox.shell("ls -d /sys 2>/dev/null | wc -l"), "0");
}

fn mount_tree_cannot_be_changed() {
    let sandbox = Sandbox::start();
    for attack in [
        "mount_tmpfs",
        "umount_usr",
        "umount_proc_mask",
        "mount_proc",
        "remount_usr_writable",
        "unshare_user",
    ] {
        assert_eq!(sandbox.attack(attack, ""), "EPERM", "{attack}");
    }
    let (code, _) = sandbox.shell_as(0, "unshare -Urm true");
    assert_ne!(code, 0);
}

/// Refused calls, by name and arguments that would not crash were they allowed.
pub(crate) const REFUSED: &[(&str, libc::c_long, &str)] = &[
    ("bpf", libc::SYS_bpf, "0 0 0"),
    ("keyctl", libc::SYS_keyctl, "0 -3 1"),
    ("add_key", libc::SYS_add_key, "0 0 0 0 0"),
    ("io_uring_setup", libc::SYS_io_uring_setup, "1 0"),
    ("io_uring_enter", libc::SYS_io_uring_enter, "0 0 0 0"),
    ("userfaultfd", libc::SYS_userfaultfd, "1"),
    ("perf_event_open", libc::SYS_perf_event_open, "0 0 -1 -1 0"),
    ("open_by_handle_at", libc::SYS_open_by_handle_at, "0 0 0"),
    ("kexec_load", libc::SYS_kexec_load, "0 0 0 0"),
    ("init_module", libc::SYS_init_module, "0 0 0"),
    ("setns", libc::SYS_setns, "0 0"),
    ("pivot_root", libc::SYS_pivot_root, "0 0"),
    ("fsopen", libc::SYS_fsopen, "0 0"),
    ("open_tree", libc::SYS_open_tree, "-100 0 1"),
    ("mount_setattr", libc::SYS_mount_setattr, "-100 0 0 0 0"),
    ("clone3", libc::SYS_clone3, "0 0"),
    ("clone(NEWUSER)", libc::SYS_clone, "0x10000011 0 0 0 0"),
    ("personality(READ_IMPLIES_EXEC)", libc::SYS_personality, "0x0400000"),
    ("syslog", libc::SYS_syslog, "10 0 0"),
    ("io_setup", libc::SYS_io_setup, "1 0"),
    ("newer than the table", 1023, "0"),
];

fn refused_system_calls_fail() {
    let sandbox = Sandbox::start();
    for (name, number, arguments) in REFUSED {
        let outcome = sandbox.attack("system_call", &format!("{number} {arguments}"));
        assert!(["EPERM", "ENOSYS"].contains(&outcome.as_str()), "{name}: {outcome}");
    }
    assert_eq!(sandbox.attack("system_call", "1023 0"), "ENOSYS");
    assert_eq!(sandbox.attack("system_call", &format!("{} 0 0", libc::SYS_clone3)), "ENOSYS");
    // No terminal there, so an answer other than ENOTTY is the filter's.
    assert_eq!(sandbox.attack("type_into_terminal", ""), "EPERM");
}

fn exotic_sockets_fail() {
    let sandbox = Sandbox::start();
    let socket = |domain: i32, kind: i32, protocol: i32| {
        sandbox.attack("system_call", &format!("{} {domain} {kind} {protocol}", libc::SYS_socket))
    };
    assert_eq!(socket(libc::AF_INET, libc::SOCK_RAW, 1), "EPERM");
    assert_eq!(socket(libc::AF_INET6, libc::SOCK_RAW, 58), "EPERM");
    assert_eq!(socket(libc::AF_PACKET, libc::SOCK_RAW, 3), "EAFNOSUPPORT");
    assert_eq!(socket(libc::AF_VSOCK, libc::SOCK_STREAM, 0), "EAFNOSUPPORT");
    assert_eq!(socket(libc::AF_ALG, libc::SOCK_SEQPACKET, 0), "EAFNOSUPPORT");
    assert_eq!(socket(libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_NETFILTER), "EPROTONOSUPPORT");
    assert_eq!(socket(libc::AF_INET, libc::SOCK_STREAM, 0), "ok");
    assert_eq!(socket(libc::AF_UNIX, libc::SOCK_STREAM, 0), "ok");
    assert_eq!(socket(libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_ROUTE), "ok");
}

pub(crate) fn setuid_bits_and_devices_have_no_effect() {
    let sandbox = Sandbox::start();
    sandbox.shell("cp /usr/bin/id /workspace/id && chmod 4755 /workspace/id && chmod 755 /workspace");
    assert_eq!(sandbox.shell_as(1000, "/workspace/id -u"), (0, "1000".to_owned()));
    assert_eq!(sandbox.attack_as(1000, "gain_root_ids", ""), "EPERM");
    assert_eq!(sandbox.attack("make_device", ""), "EPERM");
}

fn host_processes_are_invisible() {
    let sandbox = Sandbox::start();
    let seen = sandbox.shell("ls /proc | grep -c '^[0-9]'");
    assert!(seen.parse::<u32>().unwrap() <= 5, "{seen}");
    assert_eq!(sandbox.shell("cat /proc/1/comm"), "cloister-guest");
    let (_, output) = sandbox.shell_as(0, &format!("kill -9 {}", std::process::id()));
    assert!(output.contains("No such process"), "{output}");
}

pub(crate) fn pid_1_cannot_be_touched() {
    let sandbox = Sandbox::start();
    assert_eq!(sandbox.attack("trace", "1"), "EPERM");
    for file in ["mem", "maps", "environ", "root/etc/passwd", "fd/101"] {
        let outcome = sandbox.attack("read_file", &format!("/proc/1/{file}"));
        assert!(["EACCES", "EPERM", "ENOENT"].contains(&outcome.as_str()), "{file}: {outcome}");
    }
    for (attack, argument) in [("signal", "1"), ("limit_pid_1", ""), ("slow_pid_1", "")] {
        let outcome = sandbox.attack(attack, argument);
        assert!(["EPERM", "EACCES"].contains(&outcome.as_str()), "{attack}: {outcome}");
    }
    assert_eq!(sandbox.shell("grep Uid /proc/1/status"), "Uid:\t65533\t65533\t65533\t65533");
    for uid in [0, 1000] {
        for signal in ["KILL", "STOP", "TERM", "CONT", "SEGV", "RTMIN"] {
            let (code, output) = sandbox.shell_as(uid, &format!("kill -{signal} 1"));
            assert!(code != 0 && output.contains("not permitted"), "{uid} {signal}: {code} {output}");
        }
        let (code, _) = sandbox.shell_as(uid, "kill -9 -1; true");
        assert!([0, 137].contains(&code), "{code}");
    }
    // Nobody becomes the guest agent's user, whose processes it could signal.
    assert_eq!(sandbox.attack("become_agent", ""), "EPERM");
    assert!(!sandbox.shell("grep State /proc/1/status").contains('T'), "it is stopped");
    assert_eq!(sandbox.shell("echo alive"), "alive");
}

pub(crate) fn one_exec_ends_what_another_started() {
    let sandbox = Sandbox::start();
    let left = "sleep 1000 >/dev/null 2>&1 </dev/null & echo $!";
    let [roots, users] = [0, 1000].map(|uid| sandbox.shell_as(uid, left).1);
    let ended = |pid: &str| {
        wait_until("a signal of another exec", || {
            let (_, state) = sandbox.shell_as(0, &format!("grep State /proc/{pid}/status"));
            if state.contains("State:\tS") { Err(state) } else { Ok(()) }
        });
    };
    // As everywhere: of the same user, and not across users.
    assert_eq!(sandbox.attack_as(1000, "signal", &roots), "EPERM");
    assert_eq!(sandbox.attack("signal", &users), "EPERM", "root inside has no capability");
    assert_eq!(sandbox.shell_as(1000, &format!("kill {users}")).0, 0);
    ended(&users);
    assert_eq!(sandbox.shell_as(0, &format!("kill {roots}")).0, 0);
    ended(&roots);
}

fn network_is_refused_at_once() {
    let sandbox = Sandbox::start();
    assert_eq!(sandbox.attack("connect_tcp", "192.0.2.1:443"), "ENETUNREACH");
    assert_eq!(sandbox.attack("connect_tcp", "127.0.0.1:9"), "ECONNREFUSED");
    assert_eq!(sandbox.attack("bind_tcp", "127.0.0.1:80"), "ok");
}

fn abstract_listener(name: &str) -> UnixListener {
    UnixListener::bind_addr(&SocketAddr::from_abstract_name(name).unwrap()).unwrap()
}

fn host_abstract_sockets_are_unreachable() {
    let name = format!("cloister-test-{}", std::process::id());
    let _listener = abstract_listener(&name);
    let sandbox = Sandbox::start();
    assert_ne!(sandbox.attack("connect_abstract", &name), "ok");
}

fn disk_limit_of_tmpfs_is_enospc() {
    let sandbox = Sandbox::start_with(|config| config.disk = DiskConfig::Tmpfs { bytes: 8 << 20 });
    for directory in ["/workspace", "/tmp", "/var/tmp", "/etc"] {
        let outcome = sandbox.attack("fill", &format!("32 {directory}/big"));
        assert!(outcome.starts_with("ENOSPC after "), "{directory}: {outcome}");
        sandbox.shell(&format!("rm {directory}/big"));
    }
}

/// An ext4 image of `mib`, or `None` without the tool that makes one.
pub(crate) fn image(directory: &Path, mib: u64) -> Option<PathBuf> {
    let path = directory.join("layer.img");
    fs::File::create(&path).unwrap().set_len(mib << 20).unwrap();
    let made = Command::new("mkfs.ext4").args(["-q", "-F", "-m", "0"]).arg(&path).status();
    if made.is_ok_and(|status| status.success()) {
        return Some(path);
    }
    println!("SKIP: no mkfs.ext4 here");
    None
}

pub(crate) fn disk_limit_of_image_is_enospc() {
    let directory = tempfile::tempdir().unwrap();
    let Some(image) = image(directory.path(), 32) else { return };
    let sandbox = Sandbox::start_with(|config| config.disk = DiskConfig::Loop { image });
    println!("timings (microseconds): {:?}", sandbox.timings);
    let outcome = sandbox.attack("fill", "64 /workspace/big");
    assert!(outcome.starts_with("ENOSPC after "), "{outcome}");
    assert_eq!(sandbox.shell("rm /workspace/big; echo again > /workspace/f; cat /workspace/f"), "again");
}

pub(crate) fn layer_survives_the_sandbox() {
    let directory = tempfile::tempdir().unwrap();
    let Some(image) = image(directory.path(), 32) else { return };
    let disk = DiskConfig::Loop { image };
    let mut first = Sandbox::start_with(|config| config.disk = disk.clone());
    first.shell("echo kept > /workspace/f; echo 'x:x:77:77::/:/bin/sh' >> /etc/passwd; sync");
    let id_base = first.config.id_base;
    first.kill_shim();
    wait_for_death(first.pid);
    let second = Sandbox::start_with(|config| {
        config.disk = disk.clone();
        config.id_base = id_base;
    });
    assert_eq!(second.shell("cat /workspace/f; getent passwd x | cut -d: -f3"), "kept\n77");
    drop(second);
    let Err((Report::Failed { step, errno, .. }, mut shim, _directory)) =
        Sandbox::try_start(|config| config.disk = disk)
    else {
        panic!("a layer of another id range was taken");
    };
    assert_eq!((step.as_str(), errno), ("check owner of layer", libc::EPERM));
    drop(shim.stdin.take());
    shim.wait().unwrap();
}

pub(crate) fn links_planted_in_the_layer_are_not_followed() {
    let layer = tempfile::tempdir().unwrap();
    let outside = tempfile::tempdir().unwrap();
    fs::create_dir(outside.path().join("certs")).unwrap();
    let disk = DiskConfig::Directory { path: layer.path().to_owned() };
    let mut first = Sandbox::start_with(|config| config.disk = disk.clone());
    let id_base = first.config.id_base;
    first.kill_shim();
    wait_for_death(first.pid);
    // What a hostile guest could leave in the directories that it owns.
    fs::remove_dir_all(layer.path().join("etc/ssl")).unwrap();
    std::os::unix::fs::symlink(outside.path(), layer.path().join("etc/ssl")).unwrap();
    fs::remove_file(layer.path().join("etc/ld.so.conf")).unwrap();
    std::os::unix::fs::symlink("/etc/shadow", layer.path().join("etc/ld.so.conf")).unwrap();
    let second = Sandbox::start_with(|config| {
        config.disk = disk.clone();
        config.id_base = id_base;
    });
    let mounts = fs::read_to_string(format!("/proc/{}/mountinfo", second.shim_pid())).unwrap();
    assert!(!mounts.contains(outside.path().to_str().unwrap()), "{mounts}");
    assert_eq!(second.attack("read_file", "/etc/ld.so.conf"), "ENOENT");
}

/// A sandbox on this layer under this name, which has run `script` when it returns.
fn run_on_layer(layer: &Path, id_base: u32, hostname: &str, script: &str) -> String {
    let mut sandbox = Sandbox::start_with(|config| {
        config.disk = DiskConfig::Directory { path: layer.to_owned() };
        config.id_base = id_base;
        config.hostname = hostname.to_owned();
    });
    let output = sandbox.shell(script);
    sandbox.kill_shim();
    wait_for_death(sandbox.pid);
    output
}

pub(crate) fn a_layer_takes_the_name_it_is_resumed_under() {
    let layer = tempfile::tempdir().unwrap();
    let own = tempfile::tempdir().unwrap();
    let id_base = crate::sandbox::config(own.path()).id_base;
    let run = |hostname: &str, script: &str| run_on_layer(layer.path(), id_base, hostname, script);
    run("first", "echo '192.0.2.7 mine' >> /etc/hosts");
    let names = "hostname; cat /etc/hostname; getent hosts second | wc -l; grep -c first /etc/hosts; \
                 getent hosts mine | wc -l; stat -c '%u %a' /etc/hostname /etc/hosts";
    assert_eq!(run("second", names), "second\nsecond\n1\n0\n1\n0 644\n0 644");
    run("second", "echo own > /etc/hostname; rm /etc/hosts");
    let kept = "cat /etc/hostname; ls /etc/hosts 2>&1 | grep -c 'No such'";
    assert_eq!(run("second", kept), "own\n1", "what was changed inside stays, under the same name");
}

pub(crate) fn a_new_name_is_not_written_through_what_a_guest_planted() {
    let layer = tempfile::tempdir().unwrap();
    let own = tempfile::tempdir().unwrap();
    let id_base = crate::sandbox::config(own.path()).id_base;
    let outside = own.path().join("outside");
    fs::write(&outside, "127.0.1.1 outside\n").unwrap();
    run_on_layer(layer.path(), id_base, "first", "true");
    let etc = layer.path().join("etc");
    for name in ["hostname", "hosts"] {
        fs::remove_file(etc.join(name)).unwrap();
        std::os::unix::fs::symlink(&outside, etc.join(name)).unwrap();
    }
    assert_eq!(
        run_on_layer(layer.path(), id_base, "second", "hostname; cat /etc/hostname"),
        "second\nsecond"
    );
    assert_eq!(fs::read_to_string(&outside).unwrap(), "127.0.1.1 outside\n");
    assert!(etc.join("hosts").is_symlink(), "it is the guest's own, and nothing of ours is in it");
    // What cannot be replaced does not keep a session from its resume, nor a pipe from its builder.
    fs::remove_file(etc.join("hosts")).unwrap();
    let fifo = Command::new("mkfifo").arg(etc.join("hosts")).status().unwrap();
    assert!(fifo.success());
    fs::remove_file(etc.join("hostname")).unwrap();
    fs::create_dir_all(etc.join("hostname/full")).unwrap();
    assert_eq!(run_on_layer(layer.path(), id_base, "third", "hostname"), "third");
}

fn wait_for_death(pid: i32) {
    wait_until("pid 1 dies with its shim", || {
        if Path::new(&format!("/proc/{pid}")).exists() { Err(format!("{pid} is there")) } else { Ok(()) }
    });
}

/// Loop devices that an image below `directory` is attached to.
pub(crate) fn attached(directory: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for device in fs::read_dir("/sys/block").unwrap().map(Result::unwrap) {
        let file = device.path().join("loop/backing_file");
        let Ok(image) = fs::read_to_string(file) else { continue };
        if image.starts_with(directory.to_str().unwrap()) {
            found.push(image);
        }
    }
    found
}

pub(crate) fn processes_of(id_base: u32) -> Vec<String> {
    let range = id_base..id_base + 65_536;
    fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| {
            let path = entry.unwrap().path();
            let status = fs::read_to_string(path.join("status")).ok()?;
            let uid = status
                .lines()
                .find_map(|line| line.strip_prefix("Uid:\t"))?
                .split('\t')
                .next()?
                .parse()
                .ok()?;
            range.contains(&uid).then(|| status.lines().next().unwrap().to_owned())
        })
        .collect()
}

pub(crate) fn nothing_is_left_after_shim_is_killed() {
    let directory = tempfile::tempdir().unwrap();
    let Some(image) = image(directory.path(), 32) else { return };
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let mut sandbox = Sandbox::start_with(|config| config.disk = DiskConfig::Loop { image });
    sandbox.shell(
        "setsid sleep 1000 >/dev/null 2>&1 & (trap '' TERM HUP; setsid -f sleep 1000 >/dev/null 2>&1); true",
    );
    let id_base = sandbox.config.id_base;
    assert!(processes_of(id_base).len() >= 3, "{:?}", processes_of(id_base));
    assert_eq!(attached(directory.path()).len(), 1);
    sandbox.kill_shim();
    wait_until("everything is gone", || {
        let left = (processes_of(id_base), attached(directory.path()));
        if left.0.is_empty() && left.1.is_empty() { Ok(()) } else { Err(format!("{left:?}")) }
    });
    assert_eq!(fs::read_to_string("/proc/self/mountinfo").unwrap(), mounts);
}

fn nothing_is_left_after_failed_build() {
    let directory = tempfile::tempdir().unwrap();
    let Some(image) = image(directory.path(), 32) else { return };
    // Everything is mounted and the child runs by the time its cgroup refuses it.
    let outcome = Sandbox::try_start(|config| {
        config.disk = DiskConfig::Loop { image: image.clone() };
        config.cgroup.agent_join = vec!["/dev/full".into()];
    });
    let Err((Report::Failed { step, errno, .. }, mut shim, sandbox_dir)) = outcome else {
        panic!("a process that joins no cgroup was started");
    };
    assert_eq!((step.as_str(), errno), ("join cgroup of the guest agent", libc::ENOSPC));
    let left: Vec<_> =
        fs::read_dir(sandbox_dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["shim.json"]);
    let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", shim.id())).unwrap_or_default();
    assert_eq!(children, "");
    // The shim that failed still runs here.
    wait_until("loop device is gone", || {
        let left = attached(directory.path());
        if left.is_empty() { Ok(()) } else { Err(format!("{left:?}")) }
    });
    drop(shim.stdin.take());
    shim.wait().unwrap();

    let outcome =
        Sandbox::try_start(|config| config.disk = DiskConfig::Loop { image: "/nonexistent".into() });
    let Err((Report::Failed { step, path, errno }, mut shim, _)) = outcome else {
        panic!("a sandbox without its disk was started");
    };
    assert_eq!((step.as_str(), path, errno), ("open disk image", Some("/nonexistent".into()), libc::ENOENT));
    drop(shim.stdin.take());
    shim.wait().unwrap();
}

fn processes_join_their_cgroups() {
    let cgroup = match Cgroup::new(Limit::Processes(20), &[]) {
        Ok(cgroup) => cgroup,
        Err(reason) => return println!("SKIP: {reason}"),
    };
    let sandbox = Sandbox::start_with(|config| config.cgroup = cgroup.config());
    assert_eq!(cgroup.agents(), sandbox.pid.to_string());
    let (_, output) = sandbox.shell_as(0, "for i in $(seq 40); do sleep 3 & done; jobs -p | wc -l");
    assert!(output.contains("Resource temporarily unavailable"), "{output}");
    assert_eq!(cgroup.agents(), sandbox.pid.to_string());
}

/// What a session shows is read from the kernel, so a defence that is not there is not shown either.
fn facts_say_what_is_off() {
    let facts = Sandbox::without(&[Defence::Seccomp]).facts();
    assert_eq!((facts["seccomp_mode"].as_str(), facts["no_new_privs"].as_str()), ("0", "1"));
    assert_eq!(Sandbox::without(&[Defence::NoNewPrivileges]).facts()["no_new_privs"], "0");
    assert_eq!(Sandbox::without(&[Defence::Landlock]).facts()["landlock_abi"], "off");
    assert_ne!(Sandbox::without(&[Defence::PidNamespace]).facts()["guest_agent_pid"], "1");
    let capabilities = Sandbox::without(&[Defence::Capabilities]).facts();
    assert_ne!(capabilities["capability_bounding_set"], "0000000000000000");
    assert_eq!(Sandbox::without(&[Defence::UserNamespace]).facts()["uid_map"], "0 0 4294967295");
}

/// A program that must work inside, if the host has it: its name, and a script whose last line must be `works`.
const PROGRAMS: &[(&str, &str)] = &[
    ("bash", "[[ $(echo {1..3}) == '1 2 3' ]] && cat <(echo works)"),
    (
        "python3",
        "cat > p.py <<'X'\nimport ssl, multiprocessing, multiprocessing.shared_memory, tempfile, pty, sqlite3, socket\n\
         def f(x): return x * x\n\
         if __name__ == '__main__':\n  ssl.create_default_context()\n  \
         s = multiprocessing.shared_memory.SharedMemory(create=True, size=100); s.close(); s.unlink()\n  \
         assert multiprocessing.Pool(2).map(f, [1, 2]) == [1, 4]\n  pty.openpty()\n  \
         socket.if_nameindex()\n  print('works')\nX\n/usr/bin/python3 p.py",
    ),
    ("python3-venv", "/usr/bin/python3 -m venv --without-pip v && v/bin/python -c 'print(\"works\")'"),
    (
        "git",
        "git init -q r && cd r && git config user.email a@b && git config user.name a && echo x > f && git add f \
         && git commit -qm m && git log --oneline | grep -q m && git clone -q . ../c && echo works",
    ),
    (
        "node",
        "node -e 'require(\"os\").networkInterfaces(); require(\"worker_threads\"); console.log(\"works\")'",
    ),
    ("npm", "npm --version > /dev/null && echo works"),
    ("gcc", "echo 'int main(){return 0;}' > a.c && gcc a.c -o a && ./a && echo works"),
    ("vim", "vim -es -u NONE -c 'put =41+1' -c 'w out' -c 'q!' f; grep -q 42 out && echo works"),
    (
        "gdb",
        "gdb -batch -ex 'break main' -ex run -ex 'print 1' /usr/bin/env 2>&1 | grep -q . ; \
             echo 'int main(){return 0;}' > g.c && gcc -g g.c -o g && gdb -batch -ex 'break main' -ex run ./g 2>&1 \
             | grep -q 'Breakpoint 1, main' && echo works",
    ),
    ("strace", "strace -f -o t true && grep -q exit_group t && echo works"),
    ("java", "java -version 2>&1 | grep -qi version && echo works"),
    ("perl", "perl -MSocket -e 'print \"works\"'"),
    ("openssl", "openssl rand -hex 4 >/dev/null && echo works"),
];

pub(crate) fn common_programs_work() {
    let sandbox = Sandbox::start_with(|config| config.disk = DiskConfig::Tmpfs { bytes: 512 << 20 });
    let mut broken = Vec::new();
    for (name, script) in PROGRAMS {
        let program = name.split('-').next().unwrap();
        if !Path::new("/usr/bin").join(program).exists() {
            println!("SKIP: no {program} here");
            continue;
        }
        for (uid, home) in [(0, "/workspace"), (1000, "/home/user")] {
            let place = format!("export HOME={home}; cd $HOME && mkdir -p {name} && cd {name} && {script}");
            let (_, output) = sandbox.shell_as(uid, &place);
            if output.lines().last() != Some("works") {
                broken.push(format!("{name} as {uid}: {output}"));
            }
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n---\n"));
}
