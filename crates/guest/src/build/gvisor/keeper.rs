//! The keeper: pid 1 of the process namespace that sentry and gofer run in. It starts them, reaps, and ends with the
//! sentry; the kernel ends it, and so all of them, with the shim.

#![expect(unsafe_code, reason = "runs in a cloned child, which must never return into the shim's code")]

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;
use rustix::mount::{MountAttrFlags, UnmountFlags, unmount};
use rustix::process::{Pid, Signal, WaitOptions, set_parent_process_death_signal, wait};

use super::super::link::{self, ChildMessage};
use super::super::mounts;
use super::LOG;

/// What the keeper returns when there was nothing to keep.
const EXIT_NOT_STARTED: i32 = 98;
/// The program in the keeper's root.
const RUNSC: &str = "runsc";
/// How readily the kernel kills the sentry's stubs, whose memory is the programs': well before the sentry, with which
/// the whole sandbox would go.
const STUB_OOM_SCORE_ADJ: &str = "1000";
/// The same of sentry and gofer. The programs' memory counts for the sentry as well, once it has looked at it, so that
/// nothing at all would be too little; much less would spare a sandbox when the whole machine runs out.
const SPARED_OOM_SCORE_ADJ: &str = "-100";
/// The same where lowering it is not permitted (CAP_SYS_RESOURCE).
const USUAL_OOM_SCORE_ADJ: &str = "0";

/// Everything the keeper uses.
pub(in super::super) struct Plan<'a> {
    /// Its end of the link.
    pub(in super::super) link: OwnedFd,
    pub(super) runsc: &'a Path,
    /// The filesystem that becomes the keeper's root: the bundle, and where runsc keeps its state.
    pub(super) state: &'a Path,
    /// What the sandbox shows, and the place in [`Plan::state`] where the bundle expects it.
    pub(super) views: Vec<(PathBuf, &'static str)>,
    /// The name runsc knows the sandbox by.
    pub(super) id: &'a str,
    /// Files by which the keeper joins its own cgroups.
    pub(super) own_join: Vec<OwnedFd>,
    /// Files by which runsc and everything that it starts joins the work's cgroups.
    pub(super) join: Vec<OwnedFd>,
    /// What the sandbox sees as its memory.
    pub(super) memory_bytes: u64,
}

struct Failure {
    step: String,
    errno: Errno,
}

fn failed(step: &str) -> impl FnOnce(Errno) -> Failure + use<'_> {
    move |errno| Failure { step: step.to_owned(), errno }
}

fn failed_io(step: &str) -> impl FnOnce(std::io::Error) -> Failure + use<'_> {
    move |error| Failure { step: step.to_owned(), errno: Errno::from_io_error(&error).unwrap_or(Errno::IO) }
}

impl Plan<'_> {
    /// Keeps the sandbox to its end; returns never.
    pub(in super::super) fn run(self) -> ! {
        let code = match self.start() {
            Ok(sentry) => {
                // Its end is closed by the exit: the shim hears of the start by this word.
                let _ = link::say(self.link.as_fd(), &ChildMessage::Started);
                drop(self);
                keep(sentry)
            }
            Err(failure) => {
                let message = ChildMessage::Failed {
                    step: failure.step,
                    path: None,
                    errno: failure.errno.raw_os_error(),
                };
                // A shim that cannot be told is dead, and waits for nothing.
                let _ = link::say(self.link.as_fd(), &message);
                EXIT_NOT_STARTED
            }
        };
        // SAFETY: `_exit` ends the process without running handlers that belong to the shim's copy of memory.
        // JUSTIFICATION: `std::process::exit` would run them.
        unsafe { libc::_exit(code) }
    }

    fn start(&self) -> Result<Pid, Failure> {
        set_parent_process_death_signal(Some(Signal::KILL)).map_err(failed("die with the shim"))?;
        if link::is_abandoned(self.link.as_fd()).map_err(failed("look for the shim"))? {
            return Err(Failure { step: "find the shim alive".to_owned(), errno: Errno::CHILD });
        }
        // What a list of processes shows: it is a copy of the shim.
        let _ = rustix::thread::set_name(c"cloister-keeper");
        for file in &self.own_join {
            rustix::io::write(file, b"0").map_err(failed("join the agent's cgroups"))?;
        }
        self.own_root()?;
        let began = Instant::now();
        let starter = self.spawn()?;
        let elapsed_ns = |began: Instant| u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let status = loop {
            match wait(WaitOptions::empty()) {
                Ok(Some((pid, status))) if pid == starter => break status,
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(failed("wait for runsc")(errno)),
            }
        };
        if !status.exited() || status.exit_status() != Some(0) {
            return Err(Failure {
                step: format!("start runsc ({})", super::complaint(Path::new("/"))),
                errno: Errno::CHILD,
            });
        }
        let step = ChildMessage::Step { step: "runsc".to_owned(), elapsed_ns: elapsed_ns(began) };
        let _ = link::say(self.link.as_fd(), &step);
        let text = std::fs::read_to_string("/pid").map_err(failed_io("read the sentry's pid"))?;
        let sentry = text.trim().parse().ok().and_then(Pid::from_raw);
        let sentry =
            sentry.ok_or(Failure { step: "read the sentry's pid".to_owned(), errno: Errno::BADMSG })?;
        spare_own_children().map_err(failed_io("spare the sentry when memory runs out"))?;
        Ok(sentry)
    }

    /// Makes a root of its own, with nothing in it but what runsc needs: none of the host's files can be reached from
    /// sentry and gofer, and every path down to the sandbox's is open to its unprivileged users.
    fn own_root(&self) -> Result<(), Failure> {
        const STEP: &str = "make the keeper's root";
        let state = mounts::open_path(self.state).map_err(failed(STEP))?;
        let view = |source: &Path, place: &str, attributes, is_tree| {
            let step = || format!("show `{}`", source.display());
            let fail = |errno| Failure { step: step(), errno };
            let view = mounts::clone_tree(CWD, source, attributes, is_tree).map_err(fail)?;
            let target = mounts::open_beneath(state.as_fd(), place).map_err(fail)?;
            mounts::attach(view.as_fd(), target.as_fd()).map_err(fail)
        };
        for (source, place) in &self.views {
            view(source, place, MountAttrFlags::empty(), true)?;
        }
        view(self.runsc, RUNSC, mounts::READ_ONLY, false)?;
        view(Path::new("/dev/null"), "dev/null", mounts::DEVICE, false)?;
        self.own_proc(state.as_fd())?;
        rustix::process::fchdir(&state).map_err(failed(STEP))?;
        rustix::process::pivot_root(".", ".").map_err(failed(STEP))?;
        unmount(".", UnmountFlags::DETACH).map_err(failed(STEP))?;
        rustix::process::chdir("/").map_err(failed(STEP))
    }

    /// Shows this process namespace at `/proc`, with the sandbox's memory as the machine's: the sentry takes it for its own.
    fn own_proc(&self, state: BorrowedFd<'_>) -> Result<(), Failure> {
        const STEP: &str = "mount /proc of the keeper";
        let attributes = mounts::DEVICE;
        let proc = mounts::make_filesystem(
            "proc",
            &[],
            attributes - rustix::mount::MountAttrFlags::MOUNT_ATTR_RDONLY,
        )
        .map_err(failed(STEP))?;
        let target = mounts::open_beneath(state, "proc").map_err(failed(STEP))?;
        mounts::attach(proc.as_fd(), target.as_fd()).map_err(failed(STEP))?;
        let kib = self.memory_bytes / 1024;
        let file = self.state.join("meminfo");
        let text = format!("MemTotal:       {kib} kB\nMemFree:        {kib} kB\nMemAvailable:   {kib} kB\n");
        std::fs::write(&file, text).map_err(failed_io(STEP))?;
        let view = mounts::clone_tree(CWD, &file, mounts::READ_ONLY, false).map_err(failed(STEP))?;
        let target =
            openat(&proc, "meminfo", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).map_err(failed(STEP))?;
        mounts::attach(view.as_fd(), target.as_fd()).map_err(failed(STEP))
    }

    fn spawn(&self) -> Result<Pid, Failure> {
        const STEP: &str = "run runsc, a static program";
        let log = File::options()
            .create(true)
            .append(true)
            .open(Path::new("/").join(LOG))
            .map_err(failed_io("open runsc's log"))?;
        let join: Vec<i32> = self.join.iter().map(AsRawFd::as_raw_fd).collect();
        let mut command = Command::new(format!("/{RUNSC}"));
        command
            .args([
                "--root=/run",
                "--network=none",
                "--host-uds=create",
                "--overlay2=none",
                "--ignore-cgroups",
            ])
            .args([
                "--file-access-mounts=exclusive",
                "run",
                "--detach",
                "--pid-file=/pid",
                "--bundle=/",
                self.id,
            ])
            .env_clear()
            .env("TMPDIR", "/tmp")
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        // SAFETY: writes one byte of a constant to descriptors that outlive the spawn; neither allocates nor locks.
        // JUSTIFICATION: whatever runsc starts must be in the cgroups from its first instruction.
        unsafe {
            command.pre_exec(move || {
                for fd in &join {
                    if libc::write(*fd, c"0".as_ptr().cast(), 1) != 1 {
                        return Err(std::io::Error::last_os_error());
                    }
                }
                Ok(())
            });
        }
        std::fs::write("/proc/self/oom_score_adj", STUB_OOM_SCORE_ADJ).map_err(failed_io(STEP))?;
        let child = command.spawn().map_err(failed_io(STEP))?;
        i32::try_from(child.id())
            .ok()
            .and_then(Pid::from_raw)
            .ok_or(Failure { step: STEP.to_owned(), errno: Errno::INVAL })
    }
}

/// Lets the kernel prefer the sentry's stubs when memory runs out: everything was started as a stub is, and what the
/// keeper has for children, the sentry and the gofer, is brought back. The first stub, from which all others are forked,
/// is older than this.
fn spare_own_children() -> std::io::Result<()> {
    let children = std::fs::read_to_string("/proc/1/task/1/children")?;
    for process in children.split_whitespace().chain(["self"]) {
        let file = format!("/proc/{process}/oom_score_adj");
        std::fs::write(&file, SPARED_OOM_SCORE_ADJ)
            .or_else(|_| std::fs::write(&file, USUAL_OOM_SCORE_ADJ))?;
    }
    Ok(())
}

/// Reaps until the sentry has ended, and returns what a shell would for its end.
fn keep(sentry: Pid) -> i32 {
    loop {
        match wait(WaitOptions::empty()) {
            Ok(Some((pid, status))) if pid == sentry => {
                let signal = status.terminating_signal().map(|signal| 128 + signal);
                return status.exit_status().or(signal).unwrap_or(EXIT_NOT_STARTED);
            }
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return EXIT_NOT_STARTED,
        }
    }
}
