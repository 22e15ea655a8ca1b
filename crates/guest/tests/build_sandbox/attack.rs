//! Hostile code, run inside as an exec. Each returns `ok` when it got what it wanted, else the name of the error.

use std::fs;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};

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
            // SAFETY: a constant string.
            let result = unsafe {
                libc::mknod(c"/workspace/disk".as_ptr(), libc::S_IFBLK | 0o666, libc::makedev(254, 0))
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
        "trace_pid_1" => {
            // SAFETY: attaching passes no memory.
            let result = unsafe {
                libc::ptrace(
                    libc::PTRACE_SEIZE,
                    1,
                    std::ptr::null_mut::<libc::c_void>(),
                    std::ptr::null_mut::<libc::c_void>(),
                )
            };
            outcome(result)
        }
        "type_into_terminal" => {
            // SAFETY: TIOCSTI reads one byte of a constant.
            outcome(i64::from(unsafe { libc::ioctl(0, libc::TIOCSTI, c"x".as_ptr()) }))
        }
        "connect_abstract" => {
            let address = SocketAddr::from_abstract_name(argument).unwrap();
            result(UnixStream::connect_addr(&address).map(|_| ()))
        }
        "connect_tcp" => result(std::net::TcpStream::connect(argument).map(|_| ())),
        "bind_tcp" => result(std::net::TcpListener::bind(argument).map(|_| ())),
        "write_file" => result(fs::write(argument, "x")),
        "read_file" => match fs::read(argument) {
            Ok(bytes) if bytes.is_empty() => "empty".to_owned(),
            Ok(_) => "ok".to_owned(),
            Err(error) => name_of(&error),
        },
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

/// Writes to a file until that fails or 256 MiB are written; says how it ended and how many MiB there are.
fn fill(path: &str) -> String {
    use std::io::Write;
    let block = vec![0x5a_u8; 1 << 20];
    let mut file = match fs::File::create(path) {
        Ok(file) => file,
        Err(error) => return name_of(&error),
    };
    for count in 0..256 {
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
