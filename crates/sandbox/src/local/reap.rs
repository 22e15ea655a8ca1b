//! Taking a sandbox down to nothing but its session's layer and output: at its end, after a failed start, after a crash.
//!
//! There is one way down for all of them. It starts from the intent alone, blocks, and may be run again from any point.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

use cloister_guest::shim::config::{CONFIG_FILE, DiskConfig, SandboxExitRecord};
use cloister_guest::spool;
use cloister_types::SandboxId;
use cloister_types::session::Reason;
use rustix::fs::FlockOperation;
use rustix::process::{Pid, PidfdFlags, Signal};

use super::{chain, children, unix_ms};
use crate::backend::{Gone, HostPaths, SandboxError};
use crate::cgroup::GroupSet;
use crate::fault::POINTS;
use crate::intent::{INTENT_FILE, Intent, RecordError, read_record, write_record};
use crate::{disk, layout};

/// How long a shim may take to write how its sandbox ended once pid 1 is dead: it writes one small file.
const SHIM_GRACE: Duration = Duration::from_secs(2);
/// How long killed processes may take to go: the kernel frees their memory meanwhile.
const DEADLINE: Duration = Duration::from_secs(20);

/// Takes everything of a sandbox down and returns how it ended; `was_requested` when somebody asked for that, `told` what
/// the shim answered where it was asked.
///
/// # Errors
///
/// When something is left; running it again goes on.
pub(super) fn reap(
    paths: &HostPaths,
    intent: &Intent,
    boot_id: &str,
    was_requested: bool,
    told: Option<&SandboxExitRecord>,
) -> Result<Gone, SandboxError> {
    let directory = paths.sandbox_dir(&intent.sandbox_id);
    let is_this_boot = intent.boot_id == boot_id;
    if is_this_boot {
        end_processes(intent, &directory)?;
    }
    POINTS.reach("sandbox_after_detach");
    let gone = judge(intent, &directory, is_this_boot, was_requested, told);
    let is_sealed = seal_execs(paths, intent, &gone.message)?;
    let is_recorded = record_end(paths, &gone);
    POINTS.reach("sandbox_after_seal");
    layout::remove_file(&intent.socket)
        .map_err(|error| SandboxError::failed("remove the shim's socket", error))?;
    POINTS.reach("sandbox_after_socket_removed");
    layout::remove_dir(&directory)
        .map_err(|error| SandboxError::failed("remove the sandbox's directory", error))?;
    POINTS.reach("sandbox_after_sandbox_removed");
    // The disk was full, and what was removed made room. A removal of the whole session must not wait for more.
    if !is_sealed && !seal_execs(paths, intent, &gone.message)? {
        tracing::warn!(session_id = %gone.session_id, "the disk is full: an exec has no exit record until the session is resumed");
    }
    if !is_recorded && !record_end(paths, &gone) {
        // An earlier sandbox's end would be taken for this one's.
        let _ = fs::remove_file(paths.session_dir(&gone.session_id).join(layout::ENDED_FILE));
    }
    Ok(gone)
}

/// Keeps how the sandbox ended where it outlives the sandbox's directory: whoever was to be told may be killed before
/// anybody was; returns whether it is kept. What is lost without it is the reason, so that a full disk must not keep a
/// sandbox from being reaped.
fn record_end(paths: &HostPaths, gone: &Gone) -> bool {
    let directory = paths.session_dir(&gone.session_id);
    if directory.is_dir()
        && let Err(error) = write_record(&directory.join(layout::ENDED_FILE), gone, false)
    {
        tracing::warn!(session_id = %gone.session_id, error = %chain(&error), "how the sandbox ended is not kept");
        return false;
    }
    true
}

/// Returns whether the sandbox's shim lives: it holds a lock for life.
pub(super) fn is_shim_alive(sandbox_dir: &Path) -> bool {
    let Ok(file) = fs::File::open(sandbox_dir.join("lock")) else { return false };
    // The lock that is taken here for a moment goes with `file`.
    matches!(
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared),
        Err(rustix::io::Errno::WOULDBLOCK)
    )
}

fn end_processes(intent: &Intent, directory: &Path) -> Result<(), SandboxError> {
    let deadline = Instant::now() + DEADLINE;
    let failed = |error| SandboxError::failed("end the sandbox's processes", error);
    let config = intent.shim_config.clone().unwrap_or_else(|| directory.join(CONFIG_FILE));
    if !children::has(&intent.sandbox_id) && !is_shim_alive(directory) {
        // One that an earlier process started may be starting still: without its parent it would build a sandbox that nobody knows.
        kill_shim(&config);
    }
    intent.groups.kill_all(deadline).map_err(failed)?;
    // Pid 1 is dead, and the shim ends by itself as soon as it has written why.
    if !wait_for_shim(directory, Instant::now() + SHIM_GRACE) {
        kill_shim(&config);
        if !wait_for_shim(directory, deadline) {
            return Err(SandboxError::failed("end the shim", "it still holds its lock after SIGKILL"));
        }
        // What the shim started in its last moment.
        intent.groups.kill_all(deadline).map_err(failed)?;
    }
    if !children::wait(&intent.sandbox_id, deadline) {
        return Err(SandboxError::failed("wait for the shim", "it has given up its lock and does not end"));
    }
    POINTS.reach("sandbox_after_kill");
    intent.groups.remove(deadline).map_err(|error| SandboxError::failed("remove control groups", error))?;
    POINTS.reach("sandbox_after_groups_removed");
    if let DiskConfig::Loop { image } = &intent.disk {
        disk::wait_detached(image, deadline)
            .map_err(|error| SandboxError::failed("detach the layer", error))?;
    }
    Ok(())
}

fn wait_for_shim(directory: &Path, deadline: Instant) -> bool {
    let mut pause = Duration::from_micros(500);
    while is_shim_alive(directory) {
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
    true
}

/// Kills the processes whose command line is this sandbox's shim. Its configuration's path has the sandbox's id in it,
/// which nobody else's has.
fn kill_shim(config: &Path) {
    let Ok(processes) = fs::read_dir("/proc") else { return };
    for entry in processes.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        if !is_shim_of(&entry.path(), config) {
            continue;
        }
        let Some(pid) = Pid::from_raw(pid) else { continue };
        let Ok(pinned) = rustix::process::pidfd_open(pid, PidfdFlags::empty()) else { continue };
        // The number may have gone to another process before it was pinned.
        if is_shim_of(&entry.path(), config) {
            // It may have ended by now, which is what was wanted.
            let _ = rustix::process::pidfd_send_signal(pinned.as_fd(), Signal::KILL);
        }
    }
}

fn is_shim_of(process: &Path, config: &Path) -> bool {
    let Ok(command_line) = fs::read(process.join("cmdline")) else { return false };
    let mut arguments = command_line.split(|byte| *byte == 0).skip(1);
    arguments.next() == Some(b"shim")
        && arguments.any(|argument| argument == config.as_os_str().as_encoded_bytes())
}

/// Returns why the sandbox ended, from what the shim wrote and what is known beside it.
fn judge(
    intent: &Intent,
    directory: &Path,
    is_this_boot: bool,
    was_requested: bool,
    told: Option<&SandboxExitRecord>,
) -> Gone {
    let gone = |reason, message: String| Gone {
        session_id: intent.session_id.clone(),
        sandbox_id: intent.sandbox_id.clone(),
        reason,
        message,
    };
    if let Some(record) = told {
        return gone(reason_of(&record.reason, was_requested), record.message.clone());
    }
    match read_record::<SandboxExitRecord>(&directory.join("exit.json")) {
        Ok(Some(record)) => gone(reason_of(&record.reason, was_requested), record.message),
        Ok(None) if !is_this_boot => {
            gone(Reason::HostRebooted, "the machine was started again while it ran".to_owned())
        }
        Ok(None) if was_requested => gone(Reason::Requested, "stopped as asked".to_owned()),
        Ok(None) => gone(Reason::SandboxGone, "the shim beside it was killed".to_owned()),
        Err(error) => gone(Reason::SandboxGone, format!("how it ended cannot be read: {}", chain(&error))),
    }
}

fn reason_of(word: &str, was_requested: bool) -> Reason {
    match word {
        "stopped" => Reason::Requested,
        "out_of_memory" => Reason::OutOfMemory,
        "disk_error" => Reason::DiskError,
        // Killed by us after it did not stop by itself.
        _ if was_requested => Reason::Requested,
        _ => Reason::SandboxGone,
    }
}

/// Gives every exec that the shim could not finish its exit record; `false` when a full disk did not take one.
fn seal_execs(paths: &HostPaths, intent: &Intent, message: &str) -> Result<bool, SandboxError> {
    let execs = paths.execs_dir(&intent.session_id);
    let ids = layout::ids_in::<cloister_types::ExecId>(&execs)
        .map_err(|error| SandboxError::failed("list execs", error))?;
    let mut is_sealed = true;
    for id in ids {
        match spool::seal(&execs.join(id.as_str()), message, unix_ms()) {
            Ok(_) => {}
            // A directory without a spec: nothing was started.
            Err(spool::RecordError::NotFound(_)) => {}
            Err(error) if error.is_disk_full() => is_sealed = false,
            Err(error) => return Err(SandboxError::failed("finish an exec's record", error)),
        }
    }
    Ok(is_sealed)
}

/// Goes on with removals that a crash cut, and removes what was made before it had its name: directories of sandboxes
/// without an intent that can be read, and half-written files. One process owns a data directory, so that what this one is
/// not making is made by nobody. `plan` names the control groups that a sandbox has.
///
/// # Errors
///
/// When a directory cannot be read or removed, or a sandbox without an intent cannot be ended.
pub(super) fn sweep(paths: &HostPaths, plan: impl Fn(&SandboxId) -> Option<GroupSet>) -> io::Result<()> {
    layout::sweep_tombstones(&paths.sandboxes_dir())?;
    layout::sweep_tombstones(&paths.sessions_dir())?;
    for sandbox_id in layout::ids_in::<SandboxId>(&paths.sandboxes_dir())? {
        let directory = paths.sandbox_dir(&sandbox_id);
        // In this order: one whose making ends between the two looks has its intent.
        if !children::is_making(&sandbox_id) && !has_intent(&directory) {
            end_unknown(&directory, plan(&sandbox_id))?;
            layout::remove_file(&paths.shim_socket(&sandbox_id))?;
            layout::remove_dir(&directory)?;
        }
    }
    layout::sweep_unfinished(&paths.data_dir)?;
    layout::sweep_unfinished(&paths.data_dir.join("templates"))?;
    layout::sweep_unfinished(&paths.data_dir.join("bin"))
}

/// Returns whether what a sandbox has taken is written down. A disk that does not answer says nothing about that.
fn has_intent(directory: &Path) -> bool {
    match read_record::<Intent>(&directory.join(INTENT_FILE)) {
        Ok(intent) => intent.is_some(),
        Err(RecordError::Parse { path, source }) => {
            tracing::warn!(path = %path.display(), error = %source, "a sandbox's intent makes no sense: it is ended");
            false
        }
        Err(_) => true,
    }
}

/// Ends a sandbox of which nothing is known but its directory. Its shim is who holds the lock there.
fn end_unknown(directory: &Path, groups: Option<GroupSet>) -> io::Result<()> {
    let deadline = Instant::now() + DEADLINE;
    let lock = directory.join("lock");
    if is_shim_alive(directory) {
        if let Some(shim) = lock_holder(&lock)? {
            tracing::warn!(directory = %directory.display(), pid = shim.as_raw_nonzero(), "a sandbox without an intent runs: killing it");
            if let Ok(pinned) = rustix::process::pidfd_open(shim, PidfdFlags::empty())
                && lock_holder(&lock)? == Some(shim)
            {
                // It may have ended by now, which is what was wanted.
                let _ = rustix::process::pidfd_send_signal(pinned.as_fd(), Signal::KILL);
            }
        }
        if !wait_for_shim(directory, deadline) {
            return Err(io::Error::other(format!("the shim that holds `{}` does not end", lock.display())));
        }
    }
    if let Some(groups) = groups {
        groups.kill_all(deadline).and_then(|()| groups.remove(deadline)).map_err(io::Error::other)?;
    }
    Ok(())
}

/// Returns who holds a lock of flock(2) on a file, as `/proc/locks` has it: `1: FLOCK ADVISORY WRITE 42 08:01:77 0 EOF`.
fn lock_holder(path: &Path) -> io::Result<Option<Pid>> {
    let inode = match fs::metadata(path) {
        Ok(metadata) => std::os::unix::fs::MetadataExt::ino(&metadata).to_string(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let locks = fs::read_to_string("/proc/locks")?;
    let mut holders = locks.lines().filter_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let is_it = words.get(1) == Some(&"FLOCK") && words.get(5)?.rsplit(':').next() == Some(&inode);
        is_it.then(|| words.get(4)?.parse().ok()).flatten().and_then(Pid::from_raw)
    });
    // Inode numbers are a filesystem's own, and several may have this one: the holder also has the file open.
    Ok(holders.find(|holder| {
        let fds = fs::read_dir(format!("/proc/{}/fd", holder.as_raw_nonzero()));
        fds.into_iter().flatten().flatten().any(|fd| fs::read_link(fd.path()).is_ok_and(|to| to == path))
    }))
}

#[cfg(test)]
mod tests {
    use cloister_types::{Limits, SessionId};

    use super::*;
    use crate::id_range::IdRange;
    use crate::intent::write_record;

    fn intent(paths: &HostPaths, boot_id: &str) -> Intent {
        let sandbox_id = SandboxId::generate();
        Intent {
            session_id: SessionId::generate(),
            sandbox_id: sandbox_id.clone(),
            boot_id: boot_id.to_owned(),
            backend: cloister_types::BackendKind::Namespace,
            image: "host".to_owned(),
            limits: Limits::DEFAULT,
            hostname: "h".to_owned(),
            ids: IdRange { base: 1, count: 1 },
            groups: GroupSet { hierarchies: Vec::new() },
            socket: paths.shim_socket(&sandbox_id),
            disk: DiskConfig::Tmpfs { bytes: 1 },
            guest: "/nonexistent".into(),
            shim_config: None,
            created_unix_ms: 0,
        }
    }

    fn host() -> (tempfile::TempDir, HostPaths) {
        let directory = tempfile::tempdir().unwrap();
        let paths =
            HostPaths { data_dir: directory.path().join("data"), run_dir: directory.path().join("run") };
        paths.ensure().unwrap();
        (directory, paths)
    }

    fn reaped(paths: &HostPaths, intent: &Intent, boot_id: &str, exit: Option<&str>, asked: bool) -> Gone {
        let directory = paths.sandbox_dir(&intent.sandbox_id);
        fs::create_dir(&directory).unwrap();
        write_record(&directory.join(INTENT_FILE), intent, false).unwrap();
        if let Some(reason) = exit {
            let record = SandboxExitRecord {
                reason: reason.to_owned(),
                message: String::new(),
                status: 0,
                exited_unix_ms: 0,
            };
            write_record(&directory.join("exit.json"), &record, false).unwrap();
        }
        let gone = reap(paths, intent, boot_id, asked, None).unwrap();
        assert!(!directory.exists());
        // Again, as after a crash at the very end.
        reap(paths, intent, boot_id, asked, None).unwrap();
        gone
    }

    #[test]
    fn each_end_has_its_reason() {
        let (_directory, paths) = host();
        let cases = [
            ("now", Some("stopped"), false, Reason::Requested),
            ("now", Some("out_of_memory"), true, Reason::OutOfMemory),
            ("now", Some("crashed"), false, Reason::SandboxGone),
            ("now", Some("killed"), true, Reason::Requested),
            ("now", None, false, Reason::SandboxGone),
            ("now", None, true, Reason::Requested),
            ("before", None, false, Reason::HostRebooted),
            ("before", Some("stopped"), false, Reason::Requested),
        ];
        for (boot_id, exit, asked, reason) in cases {
            let intent = intent(&paths, boot_id);
            assert_eq!(
                reaped(&paths, &intent, "now", exit, asked).reason,
                reason,
                "{boot_id} {exit:?} {asked}"
            );
        }
    }

    #[test]
    fn a_lock_held_by_another_process_means_alive() {
        let (directory, _) = host();
        assert!(!is_shim_alive(directory.path()));
        let lock = fs::File::create(directory.path().join("lock")).unwrap();
        assert!(!is_shim_alive(directory.path()));
        rustix::fs::flock(&lock, FlockOperation::LockExclusive).unwrap();
        assert!(is_shim_alive(directory.path()));
        drop(lock);
        assert!(!is_shim_alive(directory.path()));
    }

    #[test]
    fn a_sandbox_without_an_intent_is_ended_before_its_directory_goes() {
        let (_directory, paths) = host();
        for intent in [None, Some("{ torn")] {
            let directory = paths.sandbox_dir(&SandboxId::generate());
            fs::create_dir(&directory).unwrap();
            if let Some(text) = intent {
                fs::write(directory.join(INTENT_FILE), text).unwrap();
            }
            let lock = directory.join("lock");
            let mut shim = std::process::Command::new("flock");
            let mut shim = shim.arg("--no-fork").arg(&lock).args(["sleep", "600"]).spawn().unwrap();
            while !is_shim_alive(&directory) {
                std::thread::sleep(Duration::from_millis(1));
            }
            let holder = lock_holder(&lock).unwrap().expect("somebody holds it");
            assert_eq!(holder.as_raw_nonzero().get(), i32::try_from(shim.id()).unwrap());
            sweep(&paths, |_| None).unwrap();
            assert!(!directory.exists());
            shim.wait().unwrap();
        }
    }

    #[test]
    fn only_the_process_with_this_configuration_is_taken_for_the_shim() {
        let config = Path::new("/data/sandboxes/sbx_1/shim.json");
        assert!(!is_shim_of(Path::new("/proc/self"), config));
        let directory = tempfile::tempdir().unwrap();
        let write = |text: &str| fs::write(directory.path().join("cmdline"), text).unwrap();
        write("/bin/guest\0shim\0--config\0/data/sandboxes/sbx_1/shim.json\0");
        assert!(is_shim_of(directory.path(), config));
        write("/bin/guest\0shim\0--config\0/data/sandboxes/sbx_2/shim.json\0");
        assert!(!is_shim_of(directory.path(), config));
        write("less\0/data/sandboxes/sbx_1/shim.json\0");
        assert!(!is_shim_of(directory.path(), config));
    }
}
