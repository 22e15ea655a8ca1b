//! Pid 1 of a test sandbox: hardens itself like the guest agent, then does one thing per connection, in a forked child
//! that went through `apply_exec`: an attack by name, or a program.

use std::ffi::CString;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::ExitCode;

use cloister_guest::agent::harden_on_sentry;
use cloister_guest::harden::{
    AgentConfig, apply_exec, isolation_facts, load_agent_config, pid1_apply, prepare_exec,
};
use serde::{Deserialize, Serialize};

use crate::attack;

/// What the test asks for.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    Facts,
    Attack { name: String, argument: String, uid: u32 },
    Program { argv: Vec<String>, uid: u32 },
}

/// What came of it: exit code (128 + signal), and standard output and error together.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Answer {
    pub(crate) code: i32,
    pub(crate) output: String,
}

/// Serves as pid 1, on gVisor with a file for its configuration.
pub(crate) fn run_agent(file: Option<&Path>) -> ExitCode {
    let config = match file {
        None => load_agent_config().expect("load agent config"),
        Some(file) => harden_on_sentry(file).expect("harden pid 1"),
    };
    // SAFETY: the builder left the listener at this number, and nothing else has taken it.
    let listener = unsafe { OwnedFd::from_raw_fd(config.listener_fd) };
    if file.is_none() {
        pid1_apply(&config).expect("harden pid 1");
    }
    let listener = UnixListener::from(listener);
    for stream in listener.incoming() {
        serve(&config, stream.expect("accept")).expect("serve");
    }
    ExitCode::SUCCESS
}

fn serve(config: &AgentConfig, stream: UnixStream) -> std::io::Result<()> {
    let mut line = String::new();
    BufReader::new(stream.try_clone()?).read_line(&mut line)?;
    let request: Request = serde_json::from_str(&line)?;
    let answer = match request {
        Request::Facts => {
            let facts = isolation_facts(config).expect("read facts");
            let lines: Vec<String> = facts.iter().map(|(name, value)| format!("{name}={value}")).collect();
            Answer { code: 0, output: lines.join("\n") }
        }
        Request::Attack { name, argument, uid } => in_child(config, uid, || {
            println!("{}", attack::run(&name, &argument));
            0
        }),
        Request::Program { argv, uid } => in_child(config, uid, || execute(config, &argv)),
    };
    let mut stream = stream;
    stream.write_all(serde_json::to_string(&answer)?.as_bytes())
}

fn in_child(config: &AgentConfig, uid: u32, action: impl FnOnce() -> i32) -> Answer {
    let prepared = prepare_exec(config, uid, uid, &[uid]).expect("prepare exec");
    let (mut reader, writer) = std::io::pipe().expect("pipe");
    // SAFETY: this process has one thread, so the child may do anything.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork: {}", std::io::Error::last_os_error());
    if pid == 0 {
        // SAFETY: plain descriptor numbers; the child is single-threaded and freshly forked.
        unsafe {
            libc::setsid();
            libc::dup2(writer.as_raw_fd(), 1);
            libc::dup2(writer.as_raw_fd(), 2);
            if let Err(errno) = apply_exec(&prepared) {
                println!("apply_exec: {errno}");
                libc::_exit(125);
            }
        }
        let code = action();
        let _ = std::io::stdout().flush();
        // SAFETY: ends the child without the parent's handlers.
        unsafe { libc::_exit(code) };
    }
    drop(writer);
    let mut output = Vec::new();
    reader.read_to_end(&mut output).expect("read output");
    let mut status = 0;
    // SAFETY: `pid` is our child. Orphans are left to whoever counts processes.
    unsafe { libc::waitpid(pid, &raw mut status, 0) };
    let code = if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { 128 + libc::WTERMSIG(status) };
    Answer { code, output: String::from_utf8_lossy(&output).into_owned() }
}

fn execute(config: &AgentConfig, argv: &[String]) -> i32 {
    let words: Vec<CString> = argv.iter().map(|word| CString::new(word.as_str()).unwrap()).collect();
    let mut pointers: Vec<*const libc::c_char> = words.iter().map(|word| word.as_ptr()).collect();
    pointers.push(std::ptr::null());
    let variables: Vec<CString> =
        config.env.iter().map(|(name, value)| CString::new(format!("{name}={value}")).unwrap()).collect();
    let mut environment: Vec<*const libc::c_char> = variables.iter().map(|word| word.as_ptr()).collect();
    environment.push(std::ptr::null());
    std::env::set_current_dir(&config.cwd).expect("enter working directory");
    // SAFETY: both lists end with NULL and outlive the call.
    unsafe { libc::execvpe(words[0].as_ptr(), pointers.as_ptr(), environment.as_ptr()) };
    println!("exec {}: {}", argv[0], std::io::Error::last_os_error());
    127
}
