//! What the cloned child does from its first instruction to the exec of the guest agent.
//!
//! It starts as host root in new process, mount, ipc and uts namespaces, with its working directory at the finished root,
//! and gives power away step by step: cgroups, `/proc`, pivot, then the user namespace with a second mount namespace.
//! That order is the point: whatever is mounted when the less privileged mount namespace is made is locked in it for good.

#![expect(unsafe_code, reason = "runs between clone and exec")]

use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Instant;

use rustix::fs::{CWD, Mode};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{
    Resource, Rlimit, Signal, chdir, pivot_root, set_parent_process_death_signal, setrlimit, umask,
};
use rustix::thread::{
    Gid, Uid, UnshareFlags, capabilities, configure_capability_in_ambient_set, set_capabilities,
    set_keep_capabilities, unshare_unsafe,
};

use super::link::{self, ChildMessage};
use super::mounts::{self, last_errno};
use super::proc_mount;
use crate::harden::AGENT_ID;
use crate::shim::config::Defence;

/// Descriptors are parked above this number before they get their final ones, so that no target is still a source.
const PARKING_FD: RawFd = 400;

/// Signals and POSIX timers that may wait in one sandbox; each is kernel memory.
const QUEUED_SIGNALS_MAX: u64 = 4096;

/// Everything the child uses, opened by the shim.
#[derive(Debug)]
pub(super) struct ChildPlan<'a> {
    /// The child's end of the link.
    pub(super) link: OwnedFd,
    /// This program.
    pub(super) executable: OwnedFd,
    /// `/dev/null`.
    pub(super) null: OwnedFd,
    /// The guest agent's cgroups.
    pub(super) agent_join: Vec<OwnedFd>,
    /// What the agent inherits, and at which number.
    pub(super) inherited: Vec<(BorrowedFd<'a>, RawFd)>,
    /// The sandbox's own name.
    pub(super) hostname: &'a str,
    /// First host id of the sandbox's range.
    pub(super) id_base: u32,
    /// Defences left off.
    pub(super) defences_off: &'a [Defence],
}

/// A step of the child that failed.
struct Failure {
    step: &'static str,
    path: Option<String>,
    errno: Errno,
}

trait Step<T> {
    fn step(self, step: &'static str) -> Result<T, Failure>;
}

impl<T> Step<T> for Result<T, Errno> {
    fn step(self, step: &'static str) -> Result<T, Failure> {
        self.map_err(|errno| Failure { step, path: None, errno })
    }
}

impl ChildPlan<'_> {
    /// Becomes pid 1 of the sandbox; returns never.
    pub(super) fn run(self) -> ! {
        let Err(failure) = self.become_agent();
        let message = ChildMessage::Failed {
            step: failure.step.to_owned(),
            path: failure.path,
            errno: failure.errno.raw_os_error(),
        };
        // A shim that cannot be told is dead, and waits for nothing.
        let _ = link::say(self.link.as_fd(), &message);
        // SAFETY: `_exit` ends the process without running handlers that belong to the shim's copy of memory.
        // JUSTIFICATION: `std::process::exit` would run them.
        unsafe { libc::_exit(127) }
    }

    fn become_agent(&self) -> Result<std::convert::Infallible, Failure> {
        let mut clock = Instant::now();
        for file in &self.agent_join {
            rustix::io::write(file.as_fd(), b"0").step("join cgroup of the guest agent")?;
        }
        self.done(&mut clock, "cgroup")?;
        rustix::system::sethostname(self.hostname.as_bytes()).step("set hostname")?;
        self.mount_proc()?;
        self.done(&mut clock, "proc")?;
        self.enter_root_and_user_namespace()?;
        self.done(&mut clock, "user_namespace")?;
        link::say(self.link.as_fd(), &ChildMessage::NeedsMaps).step("ask for id maps")?;
        link::wait_for_release(self.link.as_fd()).step("wait for id maps")?;
        // It is root of its user namespace now, and leaving that would cost it every capability.
        set_keep_capabilities(true).step("keep capabilities")?;
        become_agent_user()?;
        // Changing ids clears it, so not before.
        set_parent_process_death_signal(Some(Signal::KILL)).step("die with the shim")?;
        if link::is_abandoned(self.link.as_fd()).step("look for the shim")? {
            return Err(Errno::PIPE).step("look for the shim");
        }
        self.exec()
    }

    fn done(&self, clock: &mut Instant, step: &str) -> Result<(), Failure> {
        let elapsed_ns = u64::try_from(clock.elapsed().as_nanos()).unwrap_or(u64::MAX);
        *clock = Instant::now();
        link::say(self.link.as_fd(), &ChildMessage::Step { step: step.to_owned(), elapsed_ns })
            .step("report to the shim")
    }

    fn mount_proc(&self) -> Result<(), Failure> {
        // The working directory is the child's own copy of the root; the shim's descriptors of it lie in the shim's mount
        // namespace, where nothing of this process can be attached.
        let root = mounts::open_path(".").step("open root")?;
        #[cfg(debug_assertions)]
        if self.is_off(Defence::PidNamespace) {
            return proc_mount::bind_host(root.as_fd()).map_err(|(path, errno)| Failure {
                step: "bind proc",
                path: Some(path),
                errno,
            });
        }
        proc_mount::mount(root.as_fd(), !self.is_off(Defence::ProcMasks)).map_err(|(path, errno)| Failure {
            step: "mount proc",
            path: Some(path),
            errno,
        })
    }

    fn enter_root_and_user_namespace(&self) -> Result<(), Failure> {
        if self.is_off(Defence::LockedMounts) {
            // A tree cloned before and attached after the user namespace was made is the sandbox's own: not locked.
            let tree = mounts::clone_tree(CWD, ".", rustix::mount::MountAttrFlags::empty(), true)
                .step("clone unlocked root")?;
            self.unshare_user_namespace()?;
            let place = mounts::open_path(".").step("open locked root")?;
            mounts::attach(tree.as_fd(), place.as_fd()).step("attach unlocked root")?;
            rustix::process::fchdir(tree.as_fd()).step("enter unlocked root")?;
            return pivot();
        }
        pivot()?;
        self.unshare_user_namespace()
    }

    fn unshare_user_namespace(&self) -> Result<(), Failure> {
        const STEP: &str = "become the sandbox's first user";
        if !self.is_off(Defence::UserNamespace) && !self.is_off(Defence::OwnAccount) {
            // The kernel charges inotify instances, timers, queued signals and namespaces to whoever made the user namespace,
            // up to the host: to root they would all be one account, which one sandbox could empty for everybody.
            let queued = Some(QUEUED_SIGNALS_MAX);
            setrlimit(Resource::Sigpending, Rlimit { current: queued, maximum: queued }).step(STEP)?;
            let (uid, gid) = (Uid::from_raw(self.id_base), Gid::from_raw(self.id_base));
            set_keep_capabilities(true).step(STEP)?;
            rustix::thread::set_thread_res_gid(gid, gid, gid).step(STEP)?;
            rustix::thread::set_thread_res_uid(uid, uid, uid).step(STEP)?;
            let mut sets = capabilities(None).step(STEP)?;
            sets.effective = sets.permitted;
            set_capabilities(None, sets).step(STEP)?;
        }
        let mut flags = UnshareFlags::NEWUSER | UnshareFlags::NEWNS | UnshareFlags::NEWCGROUP;
        if self.is_off(Defence::UserNamespace) {
            flags -= UnshareFlags::NEWUSER;
        }
        // SAFETY: only CLONE_FILES makes unsharing unsafe; the child is alone in its process.
        // JUSTIFICATION: rustix marks the whole call unsafe.
        unsafe { unshare_unsafe(flags) }.step("make user namespace")
    }

    fn is_off(&self, defence: Defence) -> bool {
        self.defences_off.contains(&defence)
    }

    fn exec(&self) -> Result<std::convert::Infallible, Failure> {
        umask(Mode::from_raw_mode(0o022));
        rustix::process::setsid().step("make process session")?;
        // The shim inherited descriptors of its own starter; none of them may come along.
        // SAFETY: marks descriptors close-on-exec, and closes none.
        // JUSTIFICATION: there is no safe wrapper.
        let marked = unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
        if marked != 0 {
            return Err(last_errno()).step("mark descriptors");
        }
        let executable = park(self.executable.as_fd())?;
        let standard = [(self.null.as_fd(), 0), (self.null.as_fd(), 1)];
        let mut parked = Vec::with_capacity(self.inherited.len() + standard.len());
        for (fd, number) in self.inherited.iter().chain(&standard) {
            parked.push((park(*fd)?, *number));
        }
        for (fd, number) in parked {
            // SAFETY: both are plain numbers, and what stood at `number` is a copy that nothing here uses again.
            // JUSTIFICATION: the safe form wants to own the target.
            if unsafe { libc::dup2(fd, number) } < 0 {
                return Err(last_errno()).step("place inherited descriptor");
            }
        }
        exec_agent(executable)
    }
}

/// Makes the working directory the root, and drops everything else.
fn pivot() -> Result<(), Failure> {
    pivot_root(".", ".").step("pivot root")?;
    unmount(".", UnmountFlags::DETACH).step("detach host root")?;
    chdir("/").step("enter root")
}

/// Switches to the guest agent's own user, keeping every capability over the user namespace across the exec. No program of
/// the sandbox runs as that user, so none, root included, may signal pid 1 or change its limits and priority.
fn become_agent_user() -> Result<(), Failure> {
    const STEP: &str = "become guest agent's user";
    let (uid, gid) = (Uid::from_raw(AGENT_ID), Gid::from_raw(AGENT_ID));
    rustix::thread::set_thread_groups(&[]).step(STEP)?;
    rustix::thread::set_thread_res_gid(gid, gid, gid).step(STEP)?;
    rustix::thread::set_thread_res_uid(uid, uid, uid).step(STEP)?;
    let mut sets = capabilities(None).step(STEP)?;
    sets.effective = sets.permitted;
    sets.inheritable = sets.permitted;
    set_capabilities(None, sets).step(STEP)?;
    for capability in sets.permitted.iter() {
        // Only what is ambient survives the exec of a user that is not root.
        configure_capability_in_ambient_set(capability, true).step(STEP)?;
    }
    Ok(())
}

/// Duplicates a descriptor above [`PARKING_FD`], close-on-exec. The copy is closed by the exec or the exit.
fn park(fd: BorrowedFd<'_>) -> Result<RawFd, Failure> {
    // SAFETY: duplicates an open descriptor to a free number.
    // JUSTIFICATION: the copy must not be closed when a value goes out of scope.
    let copy = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, PARKING_FD) };
    if copy < 0 { Err(last_errno()).step("park descriptor") } else { Ok(copy) }
}

fn exec_agent(executable: RawFd) -> Result<std::convert::Infallible, Failure> {
    let arguments: [*const libc::c_char; 3] =
        [c"cloister-guest".as_ptr(), c"agent".as_ptr(), std::ptr::null()];
    let path: &CStr = c"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    let environment: [*const libc::c_char; 2] = [path.as_ptr(), std::ptr::null()];
    // SAFETY: the path is an empty NUL-terminated string, both lists are NULL-terminated lists of such strings, and all
    // of it lives until the call replaces the process.
    // JUSTIFICATION: the program lies outside of the new root, so it can only be named by its descriptor.
    unsafe {
        libc::syscall(
            libc::SYS_execveat,
            executable,
            c"".as_ptr(),
            arguments.as_ptr(),
            environment.as_ptr(),
            libc::AT_EMPTY_PATH,
        )
    };
    Err(last_errno()).step("exec guest agent")
}
