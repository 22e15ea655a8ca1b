//! Which system calls a sandbox has.

use std::collections::BTreeMap;

use super::program::Decision;

const EPERM: u16 = 1;
const ENOSYS: u16 = 38;
const EPROTONOSUPPORT: u16 = 93;
const EAFNOSUPPORT: u16 = 97;

const ALLOW: Decision = Decision::Allow;
const NOT_PERMITTED: Decision = Decision::Refuse(EPERM);

/// `CLONE_NEWTIME`, `NEWNS`, `NEWCGROUP`, `NEWUTS`, `NEWIPC`, `NEWUSER`, `NEWPID`, `NEWNET` (include/uapi/linux/sched.h).
const NEW_NAMESPACES: u32 = 0x7E02_0080;
/// For `clone` the low byte is the exit signal, and `CLONE_NEWTIME` does not exist.
const NEW_NAMESPACES_OF_CLONE: u32 = 0x7E02_0000;
const CLONE: Decision = Decision::IfAnyBit {
    argument: 0,
    mask: NEW_NAMESPACES_OF_CLONE,
    then: &NOT_PERMITTED,
    otherwise: &ALLOW,
};
const UNSHARE: Decision =
    Decision::IfAnyBit { argument: 0, mask: NEW_NAMESPACES, then: &NOT_PERMITTED, otherwise: &ALLOW };

/// Typing into a terminal (`TIOCSTI`), the console's selection (`TIOCLINUX`), taking over the console (`TIOCCONS`), and
/// loading line disciplines (`TIOCSETD`).
const IOCTL: Decision = Decision::If {
    argument: 1,
    mask: u32::MAX,
    values: &[0x5412, 0x541C, 0x541D, 0x5423],
    then: &NOT_PERMITTED,
    otherwise: &ALLOW,
};

/// Linux, 32-bit Linux, old version numbers, no address randomisation (debuggers), and asking.
const PERSONALITY: Decision = Decision::If {
    argument: 0,
    mask: u32::MAX,
    values: &[0, 0x8, 0x0002_0000, 0x0002_0008, 0x0004_0000, u32::MAX],
    then: &ALLOW,
    otherwise: &NOT_PERMITTED,
};

/// `S_IFCHR` and `S_IFBLK` under `S_IFMT`.
const DEVICE_MODES: &[u32] = &[0x2000, 0x6000];
const MODE_TYPE: u32 = 0xF000;
const MKNOD: Decision = Decision::If {
    argument: 1,
    mask: MODE_TYPE,
    values: DEVICE_MODES,
    then: &NOT_PERMITTED,
    otherwise: &ALLOW,
};
const MKNODAT: Decision = Decision::If {
    argument: 2,
    mask: MODE_TYPE,
    values: DEVICE_MODES,
    then: &NOT_PERMITTED,
    otherwise: &ALLOW,
};

/// Unix sockets; internet streams and datagrams of the usual protocols; netlink for routes and interfaces only, which
/// the C library asks. Not raw, packet, vsock, crypto, or any of the forty other families.
const SOCKET: Decision = Decision::If {
    argument: 0,
    mask: u32::MAX,
    values: &[1],
    then: &ALLOW,
    otherwise: &Decision::If {
        argument: 0,
        mask: u32::MAX,
        values: &[2, 10],
        then: &INTERNET_SOCKET,
        otherwise: &Decision::If {
            argument: 0,
            mask: u32::MAX,
            values: &[16],
            then: &Decision::If {
                argument: 2,
                mask: u32::MAX,
                values: &[0],
                then: &ALLOW,
                otherwise: &Decision::Refuse(EPROTONOSUPPORT),
            },
            otherwise: &Decision::Refuse(EAFNOSUPPORT),
        },
    },
};
const INTERNET_SOCKET: Decision = Decision::If {
    argument: 1,
    // `SOCK_TYPE_MASK`; the rest are flags.
    mask: 0xF,
    values: &[1, 2],
    then: &Decision::If {
        argument: 2,
        mask: u32::MAX,
        // Default, ICMP (echo sockets, if the namespace allows them), TCP, UDP, ICMPv6.
        values: &[0, 1, 6, 17, 58],
        then: &ALLOW,
        otherwise: &Decision::Refuse(EPROTONOSUPPORT),
    },
    otherwise: &NOT_PERMITTED,
};
const SOCKETPAIR: Decision = Decision::If {
    argument: 0,
    mask: u32::MAX,
    values: &[1],
    then: &ALLOW,
    otherwise: &Decision::Refuse(EAFNOSUPPORT),
};

/// Calls decided by their arguments.
const BY_ARGUMENT: &[(libc::c_long, Decision)] = &[
    (libc::SYS_clone, CLONE),
    // Its flags are in memory, out of a filter's sight; C libraries and runtimes fall back to `clone`.
    (libc::SYS_clone3, Decision::Refuse(ENOSYS)),
    (libc::SYS_ioctl, IOCTL),
    (libc::SYS_mknodat, MKNODAT),
    (libc::SYS_personality, PERSONALITY),
    (libc::SYS_socket, SOCKET),
    (libc::SYS_socketpair, SOCKETPAIR),
    (libc::SYS_unshare, UNSHARE),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_mknod, MKNOD),
];

/// Calls that exist and are refused by name. io_uring, the older asynchronous I/O (whose contexts are bounded for the
/// machine as a whole, `fs.aio-max-nr`), `statmount` and `listmount` are missing on purpose: they answer
/// `ENOSYS` like anything unknown, by which libraries take their other way.
const NOT_PERMITTED_CALLS: &[libc::c_long] = &[
    libc::SYS_acct,
    libc::SYS_add_key,
    libc::SYS_bpf,
    libc::SYS_chroot,
    libc::SYS_clock_adjtime,
    libc::SYS_clock_settime,
    libc::SYS_delete_module,
    libc::SYS_fanotify_init,
    libc::SYS_fanotify_mark,
    libc::SYS_finit_module,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fsopen,
    libc::SYS_fspick,
    libc::SYS_init_module,
    libc::SYS_kcmp,
    libc::SYS_kexec_file_load,
    libc::SYS_kexec_load,
    libc::SYS_keyctl,
    libc::SYS_lookup_dcookie,
    libc::SYS_mbind,
    libc::SYS_migrate_pages,
    libc::SYS_mount,
    libc::SYS_mount_setattr,
    libc::SYS_move_mount,
    libc::SYS_move_pages,
    libc::SYS_nfsservctl,
    libc::SYS_open_by_handle_at,
    libc::SYS_open_tree,
    libc::SYS_perf_event_open,
    libc::SYS_pidfd_getfd,
    libc::SYS_pivot_root,
    libc::SYS_quotactl,
    libc::SYS_quotactl_fd,
    libc::SYS_reboot,
    libc::SYS_request_key,
    libc::SYS_set_mempolicy,
    libc::SYS_set_mempolicy_home_node,
    libc::SYS_setdomainname,
    libc::SYS_sethostname,
    libc::SYS_setns,
    libc::SYS_settimeofday,
    libc::SYS_swapoff,
    libc::SYS_swapon,
    libc::SYS_syslog,
    libc::SYS_umount2,
    libc::SYS_userfaultfd,
    libc::SYS_vhangup,
    // open_tree_attr
    467,
];

#[cfg(target_arch = "x86_64")]
const NOT_PERMITTED_CALLS_HERE: &[libc::c_long] = &[
    libc::SYS__sysctl,
    libc::SYS_ioperm,
    libc::SYS_iopl,
    libc::SYS_modify_ldt,
    libc::SYS_sysfs,
    libc::SYS_uselib,
    libc::SYS_ustat,
];
#[cfg(not(target_arch = "x86_64"))]
const NOT_PERMITTED_CALLS_HERE: &[libc::c_long] = &[];

const ALLOWED_CALLS: &[libc::c_long] = &[
    // Files.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_statfs,
    libc::SYS_fstatfs,
    libc::SYS_lseek,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_fcntl,
    libc::SYS_flock,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_sync,
    libc::SYS_syncfs,
    libc::SYS_sync_file_range,
    libc::SYS_truncate,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_fadvise64,
    libc::SYS_readahead,
    libc::SYS_copy_file_range,
    libc::SYS_sendfile,
    libc::SYS_splice,
    libc::SYS_tee,
    libc::SYS_vmsplice,
    libc::SYS_getdents64,
    libc::SYS_getcwd,
    libc::SYS_chdir,
    libc::SYS_fchdir,
    libc::SYS_mkdirat,
    libc::SYS_unlinkat,
    libc::SYS_renameat2,
    libc::SYS_linkat,
    libc::SYS_symlinkat,
    libc::SYS_readlinkat,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchmodat2,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_umask,
    libc::SYS_utimensat,
    libc::SYS_getxattr,
    libc::SYS_lgetxattr,
    libc::SYS_fgetxattr,
    libc::SYS_setxattr,
    libc::SYS_lsetxattr,
    libc::SYS_fsetxattr,
    libc::SYS_listxattr,
    libc::SYS_llistxattr,
    libc::SYS_flistxattr,
    libc::SYS_removexattr,
    libc::SYS_lremovexattr,
    libc::SYS_fremovexattr,
    libc::SYS_name_to_handle_at,
    libc::SYS_inotify_init1,
    libc::SYS_inotify_add_watch,
    libc::SYS_inotify_rm_watch,
    libc::SYS_pipe2,
    // Memory.
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_msync,
    libc::SYS_mincore,
    libc::SYS_madvise,
    libc::SYS_process_madvise,
    libc::SYS_brk,
    libc::SYS_mlock,
    libc::SYS_mlock2,
    libc::SYS_mlockall,
    libc::SYS_munlock,
    libc::SYS_munlockall,
    libc::SYS_memfd_create,
    libc::SYS_memfd_secret,
    libc::SYS_membarrier,
    libc::SYS_pkey_alloc,
    libc::SYS_pkey_free,
    libc::SYS_pkey_mprotect,
    libc::SYS_remap_file_pages,
    libc::SYS_get_mempolicy,
    libc::SYS_mseal,
    // Processes. Tracing is limited to the exec's own by Landlock.
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_wait4,
    libc::SYS_waitid,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_gettid,
    libc::SYS_getpgid,
    libc::SYS_setpgid,
    libc::SYS_getsid,
    libc::SYS_setsid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_getresuid,
    libc::SYS_getresgid,
    libc::SYS_getgroups,
    libc::SYS_setuid,
    libc::SYS_setgid,
    libc::SYS_setreuid,
    libc::SYS_setregid,
    libc::SYS_setresuid,
    libc::SYS_setresgid,
    libc::SYS_setgroups,
    libc::SYS_setfsuid,
    libc::SYS_setfsgid,
    libc::SYS_capget,
    libc::SYS_capset,
    libc::SYS_prctl,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_mrelease,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_send_signal,
    libc::SYS_seccomp,
    libc::SYS_landlock_create_ruleset,
    libc::SYS_landlock_add_rule,
    libc::SYS_landlock_restrict_self,
    libc::SYS_set_tid_address,
    libc::SYS_set_robust_list,
    libc::SYS_get_robust_list,
    libc::SYS_rseq,
    libc::SYS_futex,
    libc::SYS_futex_waitv,
    libc::SYS_getpriority,
    libc::SYS_setpriority,
    libc::SYS_ioprio_get,
    libc::SYS_ioprio_set,
    libc::SYS_getrusage,
    libc::SYS_prlimit64,
    libc::SYS_getrlimit,
    libc::SYS_setrlimit,
    libc::SYS_times,
    libc::SYS_sysinfo,
    libc::SYS_uname,
    libc::SYS_getcpu,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_setaffinity,
    libc::SYS_sched_getattr,
    libc::SYS_sched_setattr,
    libc::SYS_sched_getparam,
    libc::SYS_sched_setparam,
    libc::SYS_sched_getscheduler,
    libc::SYS_sched_setscheduler,
    libc::SYS_sched_get_priority_max,
    libc::SYS_sched_get_priority_min,
    libc::SYS_sched_rr_get_interval,
    // Signals.
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigsuspend,
    libc::SYS_rt_sigpending,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_rt_sigqueueinfo,
    libc::SYS_rt_tgsigqueueinfo,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
    libc::SYS_kill,
    libc::SYS_tkill,
    libc::SYS_tgkill,
    libc::SYS_signalfd4,
    // Time; reading the clock's discipline is `adjtimex` with nothing to set, which setting needs a capability for.
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_gettimeofday,
    libc::SYS_adjtimex,
    libc::SYS_getitimer,
    libc::SYS_setitimer,
    libc::SYS_timer_create,
    libc::SYS_timer_delete,
    libc::SYS_timer_getoverrun,
    libc::SYS_timer_gettime,
    libc::SYS_timer_settime,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_gettime,
    libc::SYS_timerfd_settime,
    // Waiting.
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_eventfd2,
    // Sockets; making one is decided by argument.
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_bind,
    libc::SYS_connect,
    libc::SYS_listen,
    libc::SYS_shutdown,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_sendto,
    libc::SYS_recvfrom,
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
    libc::SYS_sendmmsg,
    libc::SYS_recvmmsg,
    // Interprocess communication, in a namespace of its own.
    libc::SYS_shmget,
    libc::SYS_shmat,
    libc::SYS_shmctl,
    libc::SYS_shmdt,
    libc::SYS_semget,
    libc::SYS_semop,
    libc::SYS_semctl,
    libc::SYS_semtimedop,
    libc::SYS_msgget,
    libc::SYS_msgsnd,
    libc::SYS_msgrcv,
    libc::SYS_msgctl,
    libc::SYS_mq_open,
    libc::SYS_mq_unlink,
    libc::SYS_mq_timedsend,
    libc::SYS_mq_timedreceive,
    libc::SYS_mq_notify,
    libc::SYS_mq_getsetattr,
    libc::SYS_getrandom,
    // Newer than the constants: cachestat, map_shadow_stack, futex_wake, futex_wait, futex_requeue, lsm_get_self_attr,
    // lsm_list_modules, setxattrat, getxattrat, listxattrat, removexattrat, file_getattr, file_setattr.
    451,
    453,
    454,
    455,
    456,
    459,
    461,
    463,
    464,
    465,
    466,
    468,
    469,
];

#[cfg(target_arch = "x86_64")]
const ALLOWED_CALLS_HERE: &[libc::c_long] = &[
    libc::SYS_open,
    libc::SYS_creat,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_access,
    libc::SYS_getdents,
    libc::SYS_mkdir,
    libc::SYS_rmdir,
    libc::SYS_unlink,
    libc::SYS_rename,
    libc::SYS_renameat,
    libc::SYS_link,
    libc::SYS_symlink,
    libc::SYS_readlink,
    libc::SYS_chmod,
    libc::SYS_chown,
    libc::SYS_lchown,
    libc::SYS_utime,
    libc::SYS_utimes,
    libc::SYS_futimesat,
    libc::SYS_pipe,
    libc::SYS_dup2,
    libc::SYS_inotify_init,
    libc::SYS_eventfd,
    libc::SYS_signalfd,
    libc::SYS_epoll_create,
    libc::SYS_epoll_wait,
    libc::SYS_poll,
    libc::SYS_select,
    libc::SYS_fork,
    libc::SYS_vfork,
    libc::SYS_getpgrp,
    libc::SYS_pause,
    libc::SYS_alarm,
    libc::SYS_time,
    libc::SYS_arch_prctl,
    libc::SYS_set_thread_area,
    libc::SYS_get_thread_area,
];
#[cfg(not(target_arch = "x86_64"))]
const ALLOWED_CALLS_HERE: &[libc::c_long] = &[];

/// Returns the decision of each call that has one.
pub(super) fn rules() -> BTreeMap<u32, Decision> {
    let all = |calls: &'static [libc::c_long], decision| calls.iter().map(move |call| (*call, decision));
    all(ALLOWED_CALLS, ALLOW)
        .chain(all(ALLOWED_CALLS_HERE, ALLOW))
        .chain(all(NOT_PERMITTED_CALLS, NOT_PERMITTED))
        .chain(all(NOT_PERMITTED_CALLS_HERE, NOT_PERMITTED))
        .chain(BY_ARGUMENT.iter().copied())
        .map(|(call, decision)| (u32::try_from(call).expect("call numbers are small"), decision))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_call_is_listed_twice() {
        let listed = ALLOWED_CALLS.len()
            + ALLOWED_CALLS_HERE.len()
            + NOT_PERMITTED_CALLS.len()
            + NOT_PERMITTED_CALLS_HERE.len()
            + BY_ARGUMENT.len();
        assert_eq!(rules().len(), listed);
    }

    #[test]
    fn error_numbers_are_those_of_the_c_library() {
        for (number, expected) in [
            (EPERM, libc::EPERM),
            (ENOSYS, libc::ENOSYS),
            (EPROTONOSUPPORT, libc::EPROTONOSUPPORT),
            (EAFNOSUPPORT, libc::EAFNOSUPPORT),
        ] {
            assert_eq!(i32::from(number), expected);
        }
    }
}
