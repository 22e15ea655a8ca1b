//! Fork, harden, exec: the only place where the agent becomes something else.
//!
//! Everything that allocates happens before the fork. The child calls async-signal-safe functions only, reports the
//! step that failed through a close-on-exec pipe, and an end of that pipe without a byte says that the program runs.

#![expect(unsafe_code, reason = "fork and what a forked child may do have no safe form")]

use std::ffi::CString;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::ptr;

use cloister_types::ExecSpec;
use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe;
use tokio::sync::oneshot;

use super::environment::{candidates, environment};
use super::streams::{self, AgentEnds};
use super::user::{self, User};
use super::{Agent, Hardening};
use crate::harden::{self, PreparedExec};

/// The code of a program that is not there, as shells return it.
const CODE_NOT_FOUND: i32 = 127;
/// The code of a program that is there and cannot be run.
const CODE_NOT_RUNNABLE: i32 = 126;
/// One past the highest signal number.
const SIGNALS_END: i32 = 65;

/// A program that runs.
pub(super) struct Launched {
    pub(super) pid: i32,
    pub(super) ends: AgentEnds,
    pub(super) exited: oneshot::Receiver<i32>,
}

/// Why a program did not start.
#[derive(Debug)]
pub(super) struct NotStarted {
    pub(super) code: i32,
    pub(super) message: String,
    /// The sandbox has as many processes as it may.
    pub(super) pids_limit_hit: bool,
}

impl NotStarted {
    fn not_runnable(message: impl Into<String>) -> Self {
        Self { code: CODE_NOT_RUNNABLE, message: message.into(), pids_limit_hit: false }
    }

    fn no_resource(what: &str) -> impl FnOnce(std::io::Error) -> Self {
        move |error| Self::not_runnable(format!("the guest agent has no {what}: {error}"))
    }
}

/// Starts the program of `spec`.
///
/// # Errors
///
/// [`NotStarted`]; no process is left.
pub(super) async fn launch(agent: &Agent, spec: &ExecSpec) -> Result<Launched, NotStarted> {
    let program = Program::prepare(agent, spec)?;
    let (mut report, launched) = program.fork(agent, spec)?;
    let mut failure = [0; REPORT_BYTES];
    match report.read_exact(&mut failure).await {
        // The exec closed the pipe, or the child was killed before it: either way its status says the rest.
        Err(_) => Ok(launched),
        Ok(_) => {
            // Reaped first, so that the number is free when the caller hears of it.
            let _ = launched.exited.await;
            Err(explain(failure, spec, &program))
        }
    }
}

/// Everything a child needs, allocated.
struct Program {
    argv: Vec<CString>,
    env: Vec<CString>,
    candidates: Vec<CString>,
    cwd: CString,
    user: User,
    hardened: Option<PreparedExec>,
}

impl Program {
    fn prepare(agent: &Agent, spec: &ExecSpec) -> Result<Self, NotStarted> {
        let user = match &spec.user {
            Some(text) => {
                user::resolve(text, std::path::Path::new("/etc")).map_err(NotStarted::not_runnable)?
            }
            None => User { uid: 0, gid: 0, groups: Vec::new(), home: None },
        };
        let hardened = match agent.hardening {
            Hardening::Full => Some(
                harden::prepare_exec(&agent.config, user.uid, user.gid, &user.groups)
                    .map_err(|error| NotStarted::not_runnable(describe(&error)))?,
            ),
            #[cfg(debug_assertions)]
            Hardening::Off => None,
        };
        let env = environment(&agent.config.env, user.home.as_deref(), spec);
        let cwd = spec.cwd.as_deref().unwrap_or(&agent.config.cwd);
        let text = |text: String| {
            CString::new(text)
                .map_err(|_| NotStarted::not_runnable("a NUL byte cannot be given to a program"))
        };
        Ok(Self {
            argv: spec.argv.iter().cloned().map(text).collect::<Result<_, _>>()?,
            candidates: candidates(&spec.argv[0], &env),
            env: env
                .into_iter()
                .map(|(name, value)| text(format!("{name}={value}")))
                .collect::<Result<_, _>>()?,
            cwd: text(cwd.to_owned())?,
            user,
            hardened,
        })
    }

    fn fork(&self, agent: &Agent, spec: &ExecSpec) -> Result<(pipe::Receiver, Launched), NotStarted> {
        let (program_ends, ends) = streams::make(spec).map_err(match spec.terminal {
            Some(_) => NotStarted::no_resource("terminal"),
            None => NotStarted::no_resource("pipe"),
        })?;
        let (report_read, report_write) = streams::new_pipe().map_err(NotStarted::no_resource("pipe"))?;
        let report = pipe::Receiver::from_owned_fd(report_read).map_err(NotStarted::no_resource("pipe"))?;
        for end in program_ends.all() {
            self.give_to_user(end);
        }

        let pointers = |texts: &[CString]| -> Vec<*const libc::c_char> {
            texts.iter().map(|text| text.as_ptr()).chain([ptr::null()]).collect()
        };
        let child = Child {
            argv: pointers(&self.argv),
            env: pointers(&self.env),
            candidates: pointers(&self.candidates),
            program: self,
            standard: program_ends.in_order(&agent.dev_null).map(|end| end.as_raw_fd()),
            is_terminal: program_ends.is_terminal,
            report: report_write.as_raw_fd(),
        };
        let pid = {
            // No handler of the agent may run in the child before its dispositions are reset.
            let _blocked = BlockedSignals::new();
            // SAFETY: the process is single-threaded, so that the child's copy of the heap is in no half-changed
            // state; the child calls async-signal-safe functions only and never returns from `become_program`.
            match unsafe { libc::fork() } {
                0 => unsafe { child.become_program() },
                pid => pid,
            }
        };
        if pid < 0 {
            return Err(NotStarted::no_resource("process")(std::io::Error::last_os_error()));
        }
        let exited = agent.reaper.watch(pid);
        Ok((report, Launched { pid, ends, exited }))
    }

    /// Lets the program open `/dev/stdout` and the like under its own user.
    fn give_to_user(&self, end: &OwnedFd) {
        if (self.user.uid, self.user.gid) != (0, 0) {
            let uid = rustix::fs::Uid::from_raw(self.user.uid);
            let gid = rustix::fs::Gid::from_raw(self.user.gid);
            // Without it only programs that open their output by name fail, and they say so.
            let _ = rustix::fs::fchown(end, Some(uid), Some(gid));
        }
    }
}

/// All signals blocked until dropped.
pub(super) struct BlockedSignals(libc::sigset_t);

impl BlockedSignals {
    pub(super) fn new() -> Self {
        // SAFETY: both sets are plain memory of this frame and valid for the calls.
        unsafe {
            let mut all: libc::sigset_t = std::mem::zeroed();
            let mut before: libc::sigset_t = std::mem::zeroed();
            libc::sigfillset(&raw mut all);
            libc::sigprocmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
            Self(before)
        }
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        // SAFETY: the set was filled by `new`.
        unsafe { libc::sigprocmask(libc::SIG_SETMASK, &raw const self.0, ptr::null_mut()) };
    }
}

/// A step of the child, as its report names it.
#[derive(Clone, Copy)]
#[repr(u8)]
enum Step {
    Descriptors = 1,
    Harden = 2,
    Directory = 3,
    Execute = 4,
}

/// The step and the error number.
const REPORT_BYTES: usize = 5;

struct Child<'a> {
    argv: Vec<*const libc::c_char>,
    env: Vec<*const libc::c_char>,
    candidates: Vec<*const libc::c_char>,
    program: &'a Program,
    /// What becomes descriptors 0 to 2.
    standard: [RawFd; 3],
    is_terminal: bool,
    report: RawFd,
}

impl Child<'_> {
    /// Turns the forked child into the program.
    ///
    /// # Safety
    ///
    /// Only in a freshly forked child. Does not allocate, does not return, does not unwind.
    unsafe fn become_program(&self) -> ! {
        // SAFETY: all calls are async-signal-safe; the pointers are to NUL-terminated strings and arrays that end
        // with null, all made before the fork and alive in this copy of the memory.
        unsafe {
            libc::setsid();
            for (from, to) in self.standard.into_iter().zip(0..) {
                if libc::dup2(from, to) < 0 {
                    self.fail(Step::Descriptors, errno());
                }
            }
            // Ctrl-C, job control and `/dev/tty` are of the terminal that controls the session.
            if self.is_terminal && libc::ioctl(0, libc::TIOCSCTTY, 0) < 0 {
                self.fail(Step::Descriptors, errno());
            }
            reset_signals();
            libc::umask(0o022);
            match &self.program.hardened {
                Some(prepared) => {
                    if let Err(errno) = harden::apply_exec(prepared) {
                        self.fail(Step::Harden, errno.raw_os_error());
                    }
                }
                None => self.become_user(),
            }
            // As the user, so that a directory is entered only by who may.
            if libc::chdir(self.program.cwd.as_ptr()) < 0 {
                self.fail(Step::Directory, errno());
            }
            let mut failure = libc::ENOENT;
            for candidate in &self.candidates {
                if candidate.is_null() {
                    break;
                }
                libc::execve(*candidate, self.argv.as_ptr(), self.env.as_ptr());
                match errno() {
                    // Looked for further on, as a shell does; a file that may not be run is remembered.
                    libc::ENOENT | libc::ENOTDIR => {}
                    libc::EACCES => failure = libc::EACCES,
                    other => {
                        failure = other;
                        break;
                    }
                }
            }
            self.fail(Step::Execute, failure)
        }
    }

    /// Switches user where nothing else is hardened.
    unsafe fn become_user(&self) {
        let user = &self.program.user;
        if (user.uid, user.gid) == (0, 0) {
            return;
        }
        // SAFETY: plain system calls; the pointer is to `groups.len()` ids.
        unsafe {
            if libc::setgroups(user.groups.len(), user.groups.as_ptr()) < 0
                || libc::setresgid(user.gid, user.gid, user.gid) < 0
                || libc::setresuid(user.uid, user.uid, user.uid) < 0
            {
                self.fail(Step::Harden, errno());
            }
        }
    }

    unsafe fn fail(&self, step: Step, errno: i32) -> ! {
        let [a, b, c, d] = errno.to_le_bytes();
        let step = match step {
            Step::Descriptors => 1,
            Step::Harden => 2,
            Step::Directory => 3,
            Step::Execute => 4,
        };
        let report = [step, a, b, c, d];
        // SAFETY: the descriptor is the report pipe's, which has room for its first bytes.
        unsafe {
            libc::write(self.report, report.as_ptr().cast(), report.len());
            libc::_exit(CODE_NOT_FOUND)
        }
    }
}

/// The kernel's own form of a signal's action; all zero is the default one.
#[repr(C)]
struct KernelAction {
    handler: usize,
    flags: libc::c_ulong,
    restorer: usize,
    mask: u64,
}

/// Gives every signal its default action and blocks none: an ignored SIGINT or SIGPIPE would be inherited.
pub(super) unsafe fn reset_signals() {
    // The C library refuses the two signals that it keeps for itself, which somebody may have ignored all the same.
    let default = KernelAction { handler: libc::SIG_DFL, flags: 0, restorer: 0, mask: 0 };
    for signal in 1..SIGNALS_END {
        // SAFETY: the structure is the one `rt_sigaction(2)` reads on 64-bit machines, the last argument the size of
        // its mask; numbers that cannot be changed are refused by the kernel.
        unsafe {
            libc::syscall(
                libc::SYS_rt_sigaction,
                signal,
                &raw const default,
                ptr::null_mut::<KernelAction>(),
                size_of::<u64>(),
            )
        };
    }
    // SAFETY: the set is plain memory of this frame.
    unsafe {
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut());
    }
}

fn errno() -> i32 {
    // SAFETY: the location is this thread's own.
    unsafe { *libc::__errno_location() }
}

/// Returns what a child's report means to people.
fn explain(report: [u8; REPORT_BYTES], spec: &ExecSpec, program: &Program) -> NotStarted {
    let [step, number @ ..] = report;
    let errno = i32::from_le_bytes(number);
    let error = std::io::Error::from_raw_os_error(errno);
    let name: String = spec.argv[0].chars().take(256).collect();
    if step == Step::Directory as u8 {
        let cwd = program.cwd.to_string_lossy();
        return NotStarted::not_runnable(format!("the working directory `{cwd}` cannot be entered: {error}"));
    }
    if step == Step::Harden as u8 && errno == libc::EAGAIN {
        let message = "the sandbox has as many processes as it may";
        return NotStarted { pids_limit_hit: true, ..NotStarted::not_runnable(message) };
    }
    if step != Step::Execute as u8 {
        return NotStarted::not_runnable(format!("the exec could not be hardened: {error}"));
    }
    match errno {
        libc::ENOENT | libc::ENOTDIR if name.contains('/') => {
            NotStarted { code: CODE_NOT_FOUND, ..NotStarted::not_runnable(format!("`{name}` was not found")) }
        }
        libc::ENOENT | libc::ENOTDIR => {
            let message = format!("`{name}` was not found in `PATH`");
            NotStarted { code: CODE_NOT_FOUND, ..NotStarted::not_runnable(message) }
        }
        _ => NotStarted::not_runnable(format!("`{name}` cannot be run: {error}")),
    }
}

/// Returns an error with its causes.
fn describe(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(source) = cause {
        text = format!("{text}: {source}");
        cause = source.source();
    }
    text
}

/// Sends a signal to the process group of `pid`; a group that has ended is no error.
pub(super) fn signal_group(pid: i32, signal: i32) -> std::io::Result<()> {
    // SAFETY: no memory is involved. `pid` is a child's and positive, so that its negation is a group and never the
    // special values 0 and -1.
    let result = unsafe { libc::kill(-pid, signal) };
    let error = std::io::Error::last_os_error();
    if result == 0 || error.raw_os_error() == Some(libc::ESRCH) { Ok(()) } else { Err(error) }
}

/// Sends a signal to everything in the process namespace but the caller. Refused to all but a pid 1, whose namespace
/// is its own.
pub(super) fn signal_all(signal: i32) -> bool {
    if std::process::id() != 1 {
        return false;
    }
    // SAFETY: no memory is involved, and as pid 1 the call reaches this namespace only.
    unsafe { libc::kill(-1, signal) };
    true
}

/// Returns how many bytes wait in a pipe.
pub(super) fn waiting_bytes(pipe: &pipe::Receiver) -> u64 {
    // SAFETY: the descriptor is open as long as the borrow of `pipe`.
    let fd = unsafe { BorrowedFd::borrow_raw(pipe.as_raw_fd()) };
    rustix::io::ioctl_fionread(fd).unwrap_or(0)
}
