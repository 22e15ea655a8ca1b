//! Hostile code, run inside as an exec. Each returns `ok` when it got what it wanted, else the name of the error.

use std::fs;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};

/// Runs the attack `name`.
pub(crate) fn run(name: &str, argument: &str) -> String {
    match name {
        "system_call" => {
            let mut words = argument.split(' ').map(|word| {
                word.strip_prefix("0x")
                    .map_or_else(|| word.parse::<i64>(), |hex| i64::from_str_radix(hex, 16))
                    .unwrap()
            });
            let number = words.next().unwrap();
            let mut arguments = [0_i64; 6];
            for (slot, word) in arguments.iter_mut().zip(words) {
                *slot = word;
            }
            let [a, b, c, d, e, f] = arguments;
            // SAFETY: a refused call does nothing; one that is not refused gets null pointers and small numbers.
            outcome(unsafe { libc::syscall(number, a, b, c, d, e, f) })
        }
        "mount_tmpfs" => {
            // SAFETY: constant strings.
            let result = unsafe {
                libc::mount(c"x".as_ptr(), c"/mnt".as_ptr(), c"tmpfs".as_ptr(), 0, std::ptr::null())
            };
            outcome(i64::from(result))
        }
        "mount_sys" => {
            // SAFETY: constant strings.
            let result = unsafe {
                libc::mount(c"sysfs".as_ptr(), c"/mnt".as_ptr(), c"sysfs".as_ptr(), 0, std::ptr::null())
            };
            outcome(i64::from(result))
        }
        "nested_mount" => match run("unshare_user", "").as_str() {
            "ok" => run("mount_tmpfs", ""),
            refused => format!("no nested namespace: {refused}"),
        },
        "umount_usr" => {
            // SAFETY: a constant string.
            outcome(i64::from(unsafe { libc::umount2(c"/usr".as_ptr(), libc::MNT_DETACH) }))
        }
        "umount_proc_mask" => {
            // SAFETY: a constant string.
            outcome(i64::from(unsafe { libc::umount2(c"/proc/sys".as_ptr(), libc::MNT_DETACH) }))
        }
        "mount_proc" => {
            // SAFETY: constant strings.
            let result = unsafe {
                libc::mount(c"proc".as_ptr(), c"/tmp".as_ptr(), c"proc".as_ptr(), 0, std::ptr::null())
            };
            outcome(i64::from(result))
        }
        "remount_usr_writable" => {
            let flags = libc::MS_REMOUNT | libc::MS_BIND | libc::MS_NOSUID | libc::MS_NODEV;
            // SAFETY: constant strings.
            let result = unsafe {
                libc::mount(c"x".as_ptr(), c"/usr".as_ptr(), std::ptr::null(), flags, std::ptr::null())
            };
            outcome(i64::from(result))
        }
        "unshare_user" => {
            // SAFETY: changes only this process.
            outcome(i64::from(unsafe { libc::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWNS) }))
        }
        "make_device" => {
            // `/dev/null`, which nobody could do harm with were it made.
            // SAFETY: a constant string.
            let result = unsafe {
                libc::mknod(c"/workspace/node".as_ptr(), libc::S_IFCHR | 0o666, libc::makedev(1, 3))
            };
            outcome(i64::from(result))
        }
        "signal" => {
            // SAFETY: signal 0 only asks.
            outcome(i64::from(unsafe { libc::kill(argument.parse().unwrap(), 0) }))
        }
        "limit_pid_1" => {
            let limit = libc::rlimit { rlim_cur: 3, rlim_max: 3 };
            // SAFETY: reads one structure.
            let result =
                unsafe { libc::prlimit(1, libc::RLIMIT_NOFILE, &raw const limit, std::ptr::null_mut()) };
            outcome(i64::from(result))
        }
        "slow_pid_1" => {
            // SAFETY: numbers only.
            outcome(i64::from(unsafe { libc::setpriority(libc::PRIO_PROCESS, 1, 19) }))
        }
        "trace" => trace(argument.parse().unwrap()),
        "trace_own_child" => {
            // What a program is after its exec; this one is a copy of pid 1, which is not.
            rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::Dumpable).unwrap();
            let child = fork_sleeper().unwrap();
            let outcome = trace(child);
            end(&[child]);
            outcome
        }
        "give_away" => result(
            fs::write(argument, "x")
                .and_then(|()| std::os::unix::fs::chown(argument, Some(1000), Some(1000))),
        ),
        "type_into_terminal" => {
            // SAFETY: TIOCSTI reads one byte of a constant.
            outcome(i64::from(unsafe { libc::ioctl(0, libc::TIOCSTI, c"x".as_ptr()) }))
        }
        "connect_abstract" => {
            let address = SocketAddr::from_abstract_name(argument).unwrap();
            result(UnixStream::connect_addr(&address).map(|_| ()))
        }
        "own_abstract_socket" => {
            let address = SocketAddr::from_abstract_name(argument).unwrap();
            let _listener = UnixListener::bind_addr(&address).unwrap();
            result(UnixStream::connect_addr(&address).map(|_| ()))
        }
        "own_tcp_connection" => {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            result(std::net::TcpStream::connect(listener.local_addr().unwrap()).map(|_| ()))
        }
        "connect_tcp" => result(std::net::TcpStream::connect(argument).map(|_| ())),
        "bind_tcp" => result(std::net::TcpListener::bind(argument).map(|_| ())),
        "write_file" => result(fs::write(argument, "x")),
        "write_to_existing" => result(fs::File::options().write(true).open(argument).and_then(|mut file| {
            use std::io::Write;
            file.write_all(b"x")
        })),
        "hog_memory" => {
            let bytes = argument.parse::<usize>().unwrap() << 20;
            // Not zeros, which could come without a page.
            std::hint::black_box(vec![0x5a_u8; bytes]);
            "ok".to_owned()
        }
        "fork" => fork_bomb(argument.parse().unwrap()),
        "read_file" => match fs::read(argument) {
            Ok(bytes) if bytes.is_empty() => "empty".to_owned(),
            Ok(_) => "ok".to_owned(),
            Err(error) => name_of(&error),
        },
        "hold_inotify" => hold_inotify(argument.parse().unwrap()),
        "fill" => fill(argument),
        "become_agent" => {
            // SAFETY: changes only this process.
            outcome(i64::from(unsafe { libc::setuid(65_533) }))
        }
        "gain_root_ids" => {
            // SAFETY: changes only this process.
            outcome(i64::from(unsafe { libc::setuid(0) }))
        }
        other => panic!("no attack `{other}`"),
    }
}

fn trace(pid: i32) -> String {
    let none = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: attaching passes no memory.
    outcome(unsafe { libc::ptrace(libc::PTRACE_SEIZE, pid, none, none) })
}

/// Starts a child that waits to be killed.
fn fork_sleeper() -> std::io::Result<i32> {
    // SAFETY: this process has one thread, and the child does nothing but wait.
    match unsafe { libc::fork() } {
        0 => loop {
            // SAFETY: waits for a signal.
            unsafe { libc::pause() };
        },
        pid if pid > 0 => Ok(pid),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// Leaves a child behind that holds inotify instances until the sandbox ends, and nothing that the answer is read from.
fn hold_inotify(count: u32) -> String {
    let (mut told, tell) = std::io::pipe().unwrap();
    // SAFETY: this process has one thread, and the child uses only what is its own.
    if unsafe { libc::fork() } == 0 {
        let kept = std::os::fd::AsRawFd::as_raw_fd(&tell);
        let kept = u32::try_from(kept).unwrap();
        // SAFETY: numbers only; what is closed here is used no more.
        unsafe {
            libc::close_range(0, kept - 1, 0);
            libc::close_range(kept + 1, u32::MAX, 0);
        }
        let held = (0..count).all(|_| inotify_instance() >= 0);
        let error = std::io::Error::last_os_error();
        let word = if held { "ok".to_owned() } else { name_of(&error) };
        let _ = std::io::Write::write_all(&mut &tell, word.as_bytes());
        drop(tell);
        loop {
            // SAFETY: waits for a signal.
            unsafe { libc::pause() };
        }
    }
    drop(tell);
    let mut word = String::new();
    std::io::Read::read_to_string(&mut told, &mut word).unwrap();
    word
}

/// Returns the descriptor of a new inotify instance, or -1.
pub(crate) fn inotify_instance() -> i32 {
    // SAFETY: takes a number only.
    unsafe { libc::inotify_init1(libc::IN_CLOEXEC) }
}

fn end(children: &[i32]) {
    for child in children {
        // SAFETY: a child of ours that has not been waited for.
        unsafe {
            libc::kill(*child, libc::SIGKILL);
            libc::waitpid(*child, std::ptr::null_mut(), 0);
        }
    }
}

/// Has `count` children at a time, if it may.
fn fork_bomb(count: usize) -> String {
    let mut children = Vec::new();
    let outcome = loop {
        if children.len() == count {
            break "ok".to_owned();
        }
        match fork_sleeper() {
            Ok(pid) => children.push(pid),
            Err(error) => break name_of(&error),
        }
    };
    end(&children);
    outcome
}

/// Writes so many MiB to a file, as in `32 /tmp/file`; says how it ended and how many there are.
fn fill(argument: &str) -> String {
    use std::io::Write;
    let (mib, path) = argument.split_once(' ').unwrap();
    let block = vec![0x5a_u8; 1 << 20];
    let mut file = match fs::File::create(path) {
        Ok(file) => file,
        Err(error) => return name_of(&error),
    };
    for count in 0..mib.parse::<u32>().unwrap() {
        if let Err(error) = file.write_all(&block).and_then(|()| file.sync_data()) {
            return format!("{} after {count} MiB", name_of(&error));
        }
    }
    "ok".to_owned()
}

fn outcome(value: i64) -> String {
    if value >= 0 { "ok".to_owned() } else { name_of(&std::io::Error::last_os_error()) }
}

fn result(value: std::io::Result<()>) -> String {
    value.map_or_else(|error| name_of(&error), |()| "ok".to_owned())
}

fn name_of(error: &std::io::Error) -> String {
    let names = [
        (libc::EPERM, "EPERM"),
        (libc::ENOENT, "ENOENT"),
        (libc::ESRCH, "ESRCH"),
        (libc::EAGAIN, "EAGAIN"),
        (libc::EACCES, "EACCES"),
        (libc::EINVAL, "EINVAL"),
        (libc::EROFS, "EROFS"),
        (libc::ENOSPC, "ENOSPC"),
        (libc::ENOSYS, "ENOSYS"),
        (libc::EFAULT, "EFAULT"),
        (libc::EAFNOSUPPORT, "EAFNOSUPPORT"),
        (libc::EPROTONOSUPPORT, "EPROTONOSUPPORT"),
        (libc::ECONNREFUSED, "ECONNREFUSED"),
        (libc::ENETUNREACH, "ENETUNREACH"),
    ];
    let number = error.raw_os_error().unwrap_or(0);
    names
        .iter()
        .find(|(known, _)| *known == number)
        .map_or_else(|| error.to_string(), |(_, name)| (*name).to_owned())
}
