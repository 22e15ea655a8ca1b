//! Fault points: places in the code at which a test can kill the process that gets there.
//!
//! ```text
//!  test ── writes "point" or "point stop" ──► file ◄── looked at ── process at a point of that name
//!    ▲                                          │                        │
//!    └───────── waits until it is gone ◄── removed by the one ───────────┴──► SIGKILL, or SIGSTOP
//! ```
//!
//! A point that is reached looks for the file that `CLOISTER_FAULT_FILE` names. When its text is the point's name the
//! file is removed and the process gets SIGKILL; behind a name and ` stop` it gets SIGSTOP instead, so that a test can
//! kill another process at exactly that moment and let this one go on. Whoever removes the file is the one that dies:
//! two that arrive together die once, and the restarted process goes on. A test that waits for the file to go fails
//! when nobody came by, so that a point which the code no longer passes is found.
//!
//! Each crate lists its points in one [`FaultPoints`], which a test walks; reaching one that is not listed is a panic.
//! Points belong where something is half done: between a record and the effect that it announces, between two steps of
//! an effect, and between an effect and its answer. A build without debug assertions has none of this.

use std::path::PathBuf;

#[cfg(debug_assertions)]
use std::sync::OnceLock;

/// The variable that names the file.
pub const FILE_VARIABLE: &str = "CLOISTER_FAULT_FILE";
/// What stands behind a point's name when the process is to be stopped and not killed.
pub const STOP: &str = "stop";

#[cfg(debug_assertions)]
static FILE: OnceLock<Option<PathBuf>> = OnceLock::new();

/// The points of one crate.
#[derive(Debug)]
pub struct FaultPoints {
    names: &'static [&'static str],
}

impl FaultPoints {
    /// Returns the list of these points.
    pub const fn new(names: &'static [&'static str]) -> Self {
        Self { names }
    }

    /// Returns the names of all points.
    pub const fn names(&self) -> &'static [&'static str] {
        self.names
    }

    /// The process is at this point.
    ///
    /// # Panics
    ///
    /// When the point is not listed, in builds with debug assertions.
    #[cfg(debug_assertions)]
    pub fn reach(&self, name: &str) {
        assert!(self.names.contains(&name), "fault point `{name}` is not listed");
        reach(name);
    }

    /// The process is at this point, which means nothing in this build.
    #[cfg(not(debug_assertions))]
    #[inline(always)]
    pub fn reach(&self, _name: &str) {}
}

/// Looks for the file once, whoever lists the point.
///
/// For names that are made of parts; everything else calls [`FaultPoints::reach`].
#[cfg(debug_assertions)]
pub fn reach(name: &str) {
    use rustix::process::{Signal, getpid, kill_process};

    let Some(file) = FILE.get_or_init(file_of_environment) else { return };
    let Ok(wanted) = std::fs::read_to_string(file) else { return };
    let signal = match wanted.trim().strip_prefix(name).map(str::trim_start) {
        Some("") => Signal::KILL,
        Some(STOP) => Signal::STOP,
        _ => return,
    };
    if std::fs::remove_file(file).is_ok() {
        // Nothing follows a SIGKILL, and after a SIGSTOP somebody has sent SIGCONT.
        let _ = kill_process(getpid(), signal);
    }
}

/// Means nothing in this build.
#[cfg(not(debug_assertions))]
#[inline(always)]
pub fn reach(_name: &str) {}

/// Returns the file that points of this process look for, to be handed to a child whose environment is cleared.
pub fn file() -> Option<PathBuf> {
    #[cfg(debug_assertions)]
    return FILE.get_or_init(file_of_environment).clone();
    #[cfg(not(debug_assertions))]
    return None;
}

/// Sets the file of a process that was given it by other means than the environment. The first call counts, and only
/// before any point.
pub fn set_file(file: Option<PathBuf>) {
    #[cfg(debug_assertions)]
    let _ = FILE.set(file);
    #[cfg(not(debug_assertions))]
    let _ = file;
}

#[cfg(debug_assertions)]
fn file_of_environment() -> Option<PathBuf> {
    std::env::var_os(FILE_VARIABLE).map(PathBuf::from)
}

#[cfg(all(test, debug_assertions))]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::Command;

    use super::*;

    static POINTS: FaultPoints = FaultPoints::new(&["half_done", "half_done_too"]);

    /// Not a test of its own: the body of the processes that the others start.
    #[test]
    fn passing_process() {
        if std::env::var_os(FILE_VARIABLE).is_some() {
            POINTS.reach("half_done");
        }
    }

    fn pass(file: &std::path::Path) -> Option<i32> {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args(["--exact", "tests::passing_process"]).env(FILE_VARIABLE, file);
        command.output().expect("run it").status.signal()
    }

    #[test]
    fn the_process_at_the_named_point_dies_once() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("fault");
        for (text, signal) in [("half_done_too", None), ("half", None), ("half_done\n", Some(9))] {
            std::fs::write(&file, text).expect("arm");
            assert_eq!(pass(&file), signal, "{text}");
            assert_eq!(file.exists(), signal.is_none(), "{text}");
        }
        assert_eq!(pass(&file), None, "nothing is armed");
    }

    #[test]
    #[should_panic(expected = "not listed")]
    fn a_point_that_is_not_listed_is_a_defect() {
        POINTS.reach("elsewhere");
    }
}
