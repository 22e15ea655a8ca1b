//! The control of each defence: with it the attack is stopped, under a name; without it, and only then, the same attack
//! succeeds. And a positive twin: the honest use that looks most like the attack works with every defence up.
//!
//! Defences overlap. Where others stop an attack too, they are off in both halves of the experiment, so that what it
//! shows is the one defence alone; with all of them up the attack is stopped in any case, which is tried first.

use std::fs;
use std::os::fd::FromRawFd as _;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command};

use cloister_guest::shim::config::{Defence, DiskConfig};

use crate::cgroup::{Cgroup, Limit};
use crate::sandbox::Sandbox;
use crate::shim_controls;

/// What an attack, or a twin, says when it got what it wanted.
pub(crate) const SUCCEEDED: &str = "ok";

/// One experiment.
pub(crate) struct Control {
    pub(crate) defence: Defence,
    /// What is tried.
    pub(crate) attack: &'static str,
    /// Other defences that stop the same attack.
    pub(crate) others: &'static [Defence],
    /// How the attack's end may be named where the defence stops it.
    pub(crate) stopped_as: &'static [&'static str],
    /// Runs the attack in a sandbox without these defences and returns [`SUCCEEDED`] or what stopped it.
    pub(crate) run: fn(&[Defence]) -> String,
    /// Runs the honest use with every defence; [`SUCCEEDED`] or what went wrong.
    pub(crate) twin: fn() -> String,
}

use Defence as D;

/// At least one for each defence; [`every_defence_has_a_control`] sees to that.
const CONTROLS: &[Control] = &[
    Control {
        defence: D::OwnAccount,
        attack: "holding inotify instances of the machine's root",
        others: &[],
        stopped_as: &["the machine has as many as before"],
        run: inotify_of_the_machine,
        twin: || Sandbox::start().attack("hold_inotify", "1"),
    },
    Control {
        defence: D::Seccomp,
        attack: "userfaultfd, to stop the kernel at a page of one's choice",
        others: &[],
        stopped_as: &["EPERM"],
        run: |off| system_call(off, &format!("{} 1", libc::SYS_userfaultfd)),
        twin: || system_call(&[], &format!("{} 0 0", libc::SYS_eventfd2)),
    },
    Control {
        defence: D::Seccomp,
        attack: "keyctl, to join a session's keyring",
        others: &[],
        stopped_as: &["EPERM", "ENOSYS"],
        run: |off| system_call(off, &format!("{} 0 -3 1", libc::SYS_keyctl)),
        twin: || system_call(&[], &format!("{}", libc::SYS_getpid)),
    },
    Control {
        defence: D::Seccomp,
        attack: "a nested user namespace",
        others: &[],
        stopped_as: &["EPERM"],
        run: |off| Sandbox::without(off).attack("unshare_user", ""),
        twin: || shell("sh -c 'exit 0' && (sleep 0) && echo ok"),
    },
    Control {
        defence: D::Landlock,
        attack: "mounting as root of a nested user namespace",
        others: &[D::Seccomp],
        stopped_as: &["EPERM"],
        run: |off| Sandbox::without(off).attack("nested_mount", ""),
        twin: || shell("mkdir /tmp/a && mv /tmp/a /tmp/b && echo ok"),
    },
    Control {
        defence: D::Landlock,
        attack: "reading another exec's environment",
        others: &[],
        stopped_as: &["EACCES"],
        run: |off| {
            on_other_exec(off, |sandbox, pid| sandbox.attack("read_file", &format!("/proc/{pid}/environ")))
        },
        twin: || Sandbox::start().attack("read_file", "/proc/self/environ"),
    },
    Control {
        defence: D::Landlock,
        attack: "tracing another exec's process",
        others: &[],
        stopped_as: &["EPERM"],
        run: |off| on_other_exec(off, |sandbox, pid| sandbox.attack("trace", pid)),
        twin: || Sandbox::start().attack("trace_own_child", ""),
    },
    Control {
        defence: D::Landlock,
        attack: "tracing pid 1",
        others: &[D::Capabilities],
        stopped_as: &["EPERM"],
        run: |off| Sandbox::without(off).attack("trace", "1"),
        twin: || Sandbox::start().attack("trace_own_child", ""),
    },
    Control {
        defence: D::Capabilities,
        attack: "tracing pid 1",
        others: &[D::Landlock],
        stopped_as: &["EPERM"],
        run: |off| Sandbox::without(off).attack("trace", "1"),
        twin: || Sandbox::start().attack("trace_own_child", ""),
    },
    Control {
        defence: D::Capabilities,
        attack: "giving a file to another user",
        others: &[],
        stopped_as: &["EPERM"],
        run: |off| Sandbox::without(off).attack("give_away", "/workspace/f"),
        twin: || shell("touch f && chown 0:0 f && chmod 600 f && echo ok"),
    },
    Control {
        defence: D::Capabilities,
        attack: "mounting",
        others: &[D::Seccomp, D::Landlock],
        stopped_as: &["EPERM"],
        run: |off| Sandbox::without(off).attack("mount_tmpfs", ""),
        twin: || shell("df /workspace >/dev/null && echo ok"),
    },
    Control {
        defence: D::NoNewPrivileges,
        attack: "a set-user-id program",
        others: &[D::MountFlags],
        stopped_as: &["still uid 1000"],
        run: set_user_id,
        twin: run_own_program,
    },
    Control {
        defence: D::MountFlags,
        attack: "a set-user-id program",
        others: &[D::NoNewPrivileges],
        stopped_as: &["still uid 1000"],
        run: set_user_id,
        twin: run_own_program,
    },
    Control {
        defence: D::MountFlags,
        attack: "a device node that came with the layer",
        others: &[],
        stopped_as: &["EACCES"],
        run: open_planted_device,
        twin: || shell("head -c 1 /dev/urandom >/dev/null && echo ok"),
    },
    Control {
        defence: D::LockedMounts,
        attack: "making /usr writable",
        others: &[D::Seccomp, D::Landlock, D::Capabilities],
        stopped_as: &["EPERM"],
        run: |off| Sandbox::without(off).attack("remount_usr_writable", ""),
        twin: || Sandbox::start().attack("write_file", "/workspace/x"),
    },
    Control {
        defence: D::LockedMounts,
        attack: "taking /usr off",
        others: &[D::Seccomp, D::Landlock, D::Capabilities],
        stopped_as: &["EINVAL"],
        run: |off| Sandbox::without(off).attack("umount_usr", ""),
        twin: || Sandbox::start().attack("read_file", "/usr/bin/env"),
    },
    Control {
        defence: D::LockedMounts,
        attack: "taking a mask of /proc off",
        others: &[D::Seccomp, D::Landlock, D::Capabilities],
        stopped_as: &["EINVAL"],
        run: |off| Sandbox::without(off).attack("umount_proc_mask", ""),
        twin: || Sandbox::start().attack("read_file", "/proc/cpuinfo"),
    },
    Control {
        defence: D::MemoryCgroup,
        attack: "a memory hog of 64 MiB where 32 are allowed",
        others: &[],
        stopped_as: &["killed for want of memory"],
        run: |off| hog_memory(off, "64"),
        twin: || hog_memory(&[], "8"),
    },
    Control {
        defence: D::PidsCgroup,
        attack: "a fork bomb of 40 where 20 are allowed",
        others: &[],
        stopped_as: &["EAGAIN"],
        run: |off| fork_bomb(off, "40"),
        twin: || fork_bomb(&[], "10"),
    },
    Control {
        defence: D::NetworkNamespace,
        attack: "the host's abstract sockets",
        others: &[D::Landlock],
        stopped_as: &["ECONNREFUSED"],
        run: connect_abstract,
        twin: || Sandbox::start().attack("own_abstract_socket", "twin"),
    },
    Control {
        defence: D::NetworkNamespace,
        attack: "the host's loopback",
        others: &[],
        stopped_as: &["ECONNREFUSED"],
        run: |off| {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            let address = listener.local_addr().unwrap().to_string();
            Sandbox::without(off).attack("connect_tcp", &address)
        },
        twin: || Sandbox::start().attack("own_tcp_connection", ""),
    },
    Control {
        defence: D::Landlock,
        attack: "the host's abstract sockets",
        others: &[D::NetworkNamespace],
        stopped_as: &["EPERM"],
        run: connect_abstract,
        twin: || Sandbox::start().attack("own_abstract_socket", "twin"),
    },
    Control {
        defence: D::PidNamespace,
        attack: "signalling a process outside",
        others: &[],
        stopped_as: &["ESRCH"],
        run: |off| on_outsider(off, "signal"),
        twin: || shell("sleep 60 & kill $! && echo ok"),
    },
    Control {
        defence: D::PidNamespace,
        attack: "tracing a process outside",
        others: &[D::Landlock, D::UserNamespace],
        stopped_as: &["ESRCH"],
        run: |off| on_outsider(off, "trace"),
        twin: || Sandbox::start().attack("trace_own_child", ""),
    },
    Control {
        defence: D::UserNamespace,
        attack: "tracing a process outside",
        others: &[D::Landlock, D::PidNamespace],
        stopped_as: &["EPERM"],
        run: |off| on_outsider(off, "trace"),
        twin: || Sandbox::start().attack("trace_own_child", ""),
    },
    Control {
        defence: D::Landlock,
        attack: "tracing a process outside",
        others: &[D::UserNamespace, D::PidNamespace],
        stopped_as: &["EPERM"],
        run: |off| on_outsider(off, "trace"),
        twin: || Sandbox::start().attack("trace_own_child", ""),
    },
    Control {
        defence: D::UserNamespace,
        attack: "making a device node",
        others: &[D::Seccomp, D::Landlock, D::Capabilities],
        stopped_as: &["EPERM"],
        run: |off| Sandbox::without(off).attack("make_device", ""),
        twin: || shell("mkfifo f && [ -p f ] && echo ok"),
    },
    Control {
        defence: D::UserNamespace,
        attack: "mounting /sys",
        others: &[D::Seccomp, D::Landlock, D::Capabilities],
        stopped_as: &["EPERM"],
        run: |off| Sandbox::without(off).attack("mount_sys", ""),
        twin: || shell("[ ! -e /sys ] && echo ok"),
    },
    Control {
        defence: D::UserNamespace,
        attack: "writing to /proc/sys",
        others: &[D::ProcMasks],
        stopped_as: &["EACCES"],
        run: write_hostname,
        twin: || Sandbox::start().attack("read_file", "/proc/sys/kernel/hostname"),
    },
    Control {
        defence: D::ProcMasks,
        attack: "writing to /proc/sys",
        others: &[D::UserNamespace],
        stopped_as: &["EROFS"],
        run: write_hostname,
        twin: || Sandbox::start().attack("read_file", "/proc/sys/kernel/hostname"),
    },
    Control {
        defence: D::ProcMasks,
        attack: "reading the kernel's symbols",
        others: &[],
        stopped_as: &["empty"],
        run: |off| Sandbox::without(off).attack("read_file", "/proc/kallsyms"),
        twin: || Sandbox::start().attack("read_file", "/proc/meminfo"),
    },
    Control {
        defence: D::SpoolBound,
        attack: "printing 64 MiB that nobody reads, where 1 is kept",
        others: &[],
        stopped_as: &["the oldest output went"],
        run: |off| shim_controls::print_unread(off, 64 << 20),
        twin: || shim_controls::print_unread(&[], 512 << 10),
    },
    Control {
        defence: D::FrameBound,
        attack: "a frame of 64 MiB from a guest agent that was taken over",
        others: &[],
        stopped_as: &["the guest agent sent nonsense: a frame of 67108864 bytes: at most 1048576"],
        run: |off| shim_controls::send_frame(off, 64 << 20),
        twin: shim_controls::print_a_line,
    },
    Control {
        defence: D::DiskLimit,
        attack: "writing 32 MiB where 8 are allowed",
        others: &[],
        stopped_as: &["ENOSPC after "],
        run: |off| fill_disk(off, "32"),
        twin: || fill_disk(&[], "4"),
    },
];

/// Runs every control of a defence.
pub(crate) fn prove(defence: Defence) {
    prove_all(CONTROLS.iter().filter(|control| control.defence == defence));
}

/// Runs experiments, one after the other.
pub(crate) fn prove_all<'a>(controls: impl IntoIterator<Item = &'a Control>) {
    for control in controls {
        let defence = control.defence;
        let contained = (control.run)(&[]);
        assert_ne!(contained, SUCCEEDED, "{} with every defence", control.attack);
        let mut off = control.others.to_vec();
        let alone = (control.run)(&off);
        let is_named = control.stopped_as.iter().any(|name| alone.contains(name));
        assert!(is_named, "{} against {defence:?} alone: {alone}", control.attack);
        off.push(defence);
        assert_eq!((control.run)(&off), SUCCEEDED, "{} without {off:?}", control.attack);
        assert_eq!((control.twin)(), SUCCEEDED, "the twin of: {}", control.attack);
        println!(
            "{defence:?}: {}: `{contained}` with every defence; `{alone}` with it and without {:?}; without it \
             too it succeeds",
            control.attack, control.others
        );
    }
}

/// Every member of the list of defences has an attack that it stops, and a case that runs it.
pub(crate) fn every_defence_has_a_control() {
    for defence in Defence::ALL {
        assert!(CONTROLS.iter().any(|control| control.defence == defence), "{defence:?} has no control");
        let name = serde_json::to_string(&defence).unwrap();
        let case = format!("control_{}", name.trim_matches('"'));
        assert!(crate::cases::ALL.iter().any(|(name, _)| *name == case), "no case `{case}`");
    }
}

fn system_call(off: &[Defence], words: &str) -> String {
    Sandbox::without(off).attack("system_call", words)
}

/// What a script of root inside prints, with every defence.
fn shell(script: &str) -> String {
    Sandbox::start().shell_as(0, script).1
}

/// Runs an attack on a process that another exec left.
fn on_other_exec(off: &[Defence], attack: fn(&Sandbox, &str) -> String) -> String {
    let sandbox = Sandbox::without(off);
    // While it is still becoming `sleep`, it has no environment for anybody.
    let pid = sandbox.shell(
        "sleep 1000 >/dev/null 2>&1 </dev/null & until grep -q . /proc/$!/environ; do :; done; echo $!",
    );
    attack(&sandbox, &pid)
}

/// A process of the host with the same uid as the attacker's: only what is between the two can stop an attack on it.
struct Outsider(Child);

impl Drop for Outsider {
    fn drop(&mut self) {
        // Already dead if an attack went further than it says.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn on_outsider(off: &[Defence], attack: &str) -> String {
    const USER: u32 = 4321;
    let sandbox = Sandbox::without(off);
    let base = if off.contains(&D::UserNamespace) { 0 } else { sandbox.config.id_base };
    let id = base + USER;
    let mut outsider = Outsider(Command::new("sleep").arg("60").uid(id).gid(id).spawn().unwrap());
    let outcome = sandbox.attack_as(USER, attack, &outsider.0.id().to_string());
    assert!(outsider.0.try_wait().unwrap().is_none(), "the attack only asks");
    outcome
}

fn connect_abstract(off: &[Defence]) -> String {
    let name = format!("cloister-control-{}", std::process::id());
    let _listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    Sandbox::without(off).attack("connect_abstract", &name)
}

/// The name is that of the sandbox's own namespace, so that a write that gets through hurts nobody.
fn write_hostname(off: &[Defence]) -> String {
    Sandbox::without(off).attack("write_file", "/proc/sys/kernel/hostname")
}

/// Root inside leaves a set-user-id program, and a user runs it.
fn set_user_id(off: &[Defence]) -> String {
    let sandbox = Sandbox::without(off);
    sandbox.shell("cp /usr/bin/id /tmp/id && chmod 4755 /tmp/id");
    match sandbox.shell_as(1000, "/tmp/id -u") {
        (0, uid) if uid == "0" => SUCCEEDED.to_owned(),
        (0, uid) => format!("still uid {uid}"),
        other => format!("{other:?}"),
    }
}

fn run_own_program() -> String {
    Sandbox::start().shell_as(1000, "cp /usr/bin/echo /tmp/echo && chmod 700 /tmp/echo && /tmp/echo ok").1
}

/// A node of `/dev/null` in the layer, as an image from somebody else could bring it.
fn open_planted_device(off: &[Defence]) -> String {
    let sandbox = Sandbox::without(off);
    let node = format!("/proc/{}/root/workspace/node", sandbox.pid);
    let mode = rustix::fs::Mode::from_raw_mode(0o666);
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &node,
        rustix::fs::FileType::CharacterDevice,
        mode,
        rustix::fs::makedev(1, 3),
    )
    .unwrap();
    fs::set_permissions(&node, std::os::unix::fs::PermissionsExt::from_mode(0o666)).unwrap();
    sandbox.attack("write_to_existing", "/workspace/node")
}

/// Runs `run` in a sandbox whose work has a limit.
fn limited(off: &[Defence], limit: Limit, run: impl FnOnce(&Sandbox, &Cgroup) -> String) -> String {
    let cgroup = Cgroup::new(limit, off).unwrap();
    let sandbox = Sandbox::start_with(|config| {
        config.cgroup = cgroup.config();
        config.defences_off = off.to_vec();
    });
    run(&sandbox, &cgroup)
}

fn hog_memory(off: &[Defence], mib: &str) -> String {
    hog_memory_of(off, 32 << 20, mib)
}

/// Takes memory where `bytes` are allowed.
pub(crate) fn hog_memory_of(off: &[Defence], bytes: u64, mib: &str) -> String {
    limited(off, Limit::MemoryBytes(bytes), |sandbox, cgroup| {
        let before = cgroup.oom_kills();
        let outcome = sandbox.attack("hog_memory", mib);
        if cgroup.oom_kills() == before { outcome } else { format!("killed for want of memory {outcome}") }
    })
}

fn fork_bomb(off: &[Defence], count: &str) -> String {
    limited(off, Limit::Processes(20), |sandbox, _| sandbox.attack("fork", count))
}

pub(crate) fn fill_disk(off: &[Defence], mib: &str) -> String {
    let sandbox = Sandbox::start_with(|config| {
        config.disk = DiskConfig::Tmpfs { bytes: 8 << 20 };
        config.defences_off = off.to_vec();
    });
    sandbox.attack("fill", &format!("{mib} /workspace/big"))
}

/// Why the controls of a defence cannot be run here.
pub(crate) fn missing(defence: Defence) -> Option<String> {
    match defence {
        D::MemoryCgroup => Cgroup::new(Limit::MemoryBytes(32 << 20), &[]).err(),
        D::PidsCgroup => Cgroup::new(Limit::Processes(20), &[]).err(),
        D::ProcMasks => {
            let has_symbols = Path::new("/proc/kallsyms").exists();
            (!has_symbols).then(|| "the kernel shows no symbols".to_owned())
        }
        D::Landlock | D::NetworkNamespace | D::PidNamespace => {
            let abi = cloister_guest::harden::landlock_abi().unwrap();
            (abi < 6).then(|| format!("Landlock {abi} has no scopes yet"))
        }
        _ => None,
    }
}

/// Holds some inotify instances inside, and looks how many the machine's root has left.
fn inotify_of_the_machine(off: &[Defence]) -> String {
    const HELD: usize = 40;
    let room = || {
        let instances: Vec<i32> = std::iter::repeat_with(crate::attack::inotify_instance)
            .take(4096)
            .take_while(|fd| *fd >= 0)
            .collect();
        // SAFETY: each is open, ours, and used no more.
        instances.iter().for_each(|fd| drop(unsafe { std::os::fd::OwnedFd::from_raw_fd(*fd) }));
        instances.len()
    };
    let sandbox = Sandbox::without(off);
    let before = room();
    assert_eq!(sandbox.attack("hold_inotify", &HELD.to_string()), SUCCEEDED);
    let after = room();
    if after + HELD / 2 < before {
        SUCCEEDED.to_owned()
    } else {
        "the machine has as many as before".to_owned()
    }
}
