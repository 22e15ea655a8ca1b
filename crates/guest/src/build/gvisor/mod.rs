//! A sandbox on gVisor: a kernel of its own, the sentry, which is a process on the host without any privilege there.
//!
//! ```text
//!   shim, host root                        keeper, pid 1 of a process namespace         sentry, gofer
//!   ── layer, root (as for namespaces)
//!   ── tmpfs for runsc's state and bundle
//!   ── clone3(pid, mount)            ──▶   own root and /proc; runsc run --detach ──▶   user namespace of the sandbox's
//!                                          reaps; ends with the sentry                  ids; systrap; our seccomp inside
//!   ── `Started` on the link         ◀──   the sentry runs                              guest agent: pid 1 inside
//! ```
//!
//! What holds besides what holds for namespaces:
//!
//! - The keeper dies with the shim, and as pid 1 of its namespace takes sentry, gofer and stubs with it. Nobody asks
//!   runsc anything after the start: its state lies in the shim's mount namespace and goes with it.
//! - The guest agent makes its listener in a directory that only its own user may write. What lies there is dialled
//!   without following a link: a compromised sentry could put anything there.
//! - Keeper, sentry and gofer have a root in which nothing of the host lies but runsc and `/dev/null`.
//! - Facts are read from outside: what the sentry says about itself proves nothing.

mod bundle;
mod facts;
pub(super) mod keeper;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags, chmod, chown, fstat, open, openat};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};

pub(crate) use self::facts::{sentry_facts, spare_pid_1};
use super::error::{BuildError, StepContext};
use super::mounts::{self, WRITABLE};
use super::process::{self, ChildProcess};
use super::{StepTimer, link, owner};
use crate::harden::AGENT_ID;
use crate::shim::config::ShimConfig;

/// Where a gVisor sandbox finds what is ours: its program, its configuration, and the directory of its listener.
pub(crate) const PLACE: &str = "/.cloister";
/// The directory of the listener, below the sandbox's and below [`PLACE`].
const LINK: &str = "link";
const SOCKET: &str = "guest.sock";
/// What runsc and the guest agent print, in the keeper's root.
const LOG: &str = "log";
/// What of it is passed on.
const COMPLAINT_MAX_BYTES: usize = 600;
/// The keeper's root, below the sandbox's directory.
const STATE: &str = "state";
/// Bytes for runsc's state, its bundle and its log.
const STATE_BYTES: &str = "8388608";

/// What a sandbox on gVisor is started with, beside its configuration.
pub(super) struct Gvisor<'a> {
    pub(super) runsc: &'a Path,
    pub(super) memory_bytes: u64,
    pub(super) pids: u32,
    /// Files by which the keeper joins its cgroups.
    pub(super) own_join: Vec<OwnedFd>,
    /// Files by which runsc and all that it starts joins the work's.
    pub(super) join: Vec<OwnedFd>,
}

/// Returns where the keeper's root lies, as the shim sees it.
pub(crate) fn state_dir(sandbox_dir: &Path) -> PathBuf {
    sandbox_dir.join(STATE)
}

/// Returns where the guest agent of a gVisor sandbox listens, as seen from the host.
pub(crate) fn guest_socket(sandbox_dir: &Path) -> PathBuf {
    sandbox_dir.join(LINK).join(SOCKET)
}

/// Opens what lies where the guest agent listens. Its directory belongs to a sentry that may have been taken over: what lies
/// there is not followed anywhere, and is connected to through this descriptor (`/proc/self/fd/N`).
///
/// # Errors
///
/// There is nothing, or something else than a socket.
pub(crate) fn open_guest_socket(sandbox_dir: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory =
        open(sandbox_dir.join(LINK), flags | OFlags::DIRECTORY, Mode::empty()).map_err(io::Error::from)?;
    let socket = openat(&directory, SOCKET, flags, Mode::empty())?;
    if FileType::from_raw_mode(fstat(&socket)?.st_mode) != FileType::Socket {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the guest agent's socket is something else"));
    }
    Ok(socket)
}

/// Starts the sandbox on its finished root, and returns its keeper.
///
/// # Errors
///
/// The step that failed, with what runsc printed; nothing of the attempt runs by then.
pub(super) fn start(
    gvisor: Gvisor<'_>,
    config: &ShimConfig,
    root: &Path,
    timer: &mut StepTimer,
) -> Result<ChildProcess, BuildError> {
    let link_dir = make_link_directory(config)?;
    let state = state_dir(&config.sandbox_dir);
    mount_state(&state)?;
    bundle::write(gvisor.pids, config, &state)?;
    let executable = std::fs::read_link("/proc/self/exe").step_at("find own executable", "/proc/self/exe")?;
    timer.done("bundle");
    let (link, child_link) = link::pair().step("make link to keeper")?;
    let plan = keeper::Plan {
        link: child_link,
        runsc: gvisor.runsc,
        state: &state,
        views: vec![
            (root.to_path_buf(), bundle::ROOT),
            (config.sandbox_dir.join("layer/tmp"), bundle::TMP),
            (executable, bundle::GUEST),
            (link_dir, bundle::LISTENER),
        ],
        id: &config.sandbox_id,
        own_join: gvisor.own_join,
        join: gvisor.join,
        memory_bytes: gvisor.memory_bytes,
    };
    process::start_keeper(plan, link, timer)
}

/// Returns the end of what runsc and the guest agent printed, on one line; `state` is the keeper's root.
pub(crate) fn complaint(state: &Path) -> String {
    let bytes = std::fs::read(state.join(LOG)).unwrap_or_default();
    let tail = &bytes[bytes.len().saturating_sub(COMPLAINT_MAX_BYTES)..];
    String::from_utf8_lossy(tail).split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Removes what an attempt that failed has made in the sandbox's directory. What cannot be removed goes with the directory.
pub(super) fn clear(sandbox_dir: &Path) {
    let state = state_dir(sandbox_dir);
    let _ = unmount(&state, UnmountFlags::DETACH);
    let _ = std::fs::remove_dir(&state);
    let _ = std::fs::remove_dir_all(sandbox_dir.join(LINK));
}

/// Makes the directory of the guest agent's listener, which only the agent's own user may enter.
fn make_link_directory(config: &ShimConfig) -> Result<PathBuf, BuildError> {
    const STEP: &str = "make directory of the listener";
    let path = config.sandbox_dir.join(LINK);
    match rustix::fs::mkdir(&path, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(error) => return Err(error).step_at(STEP, &path),
    }
    let (uid, gid) = owner(config.id_base, AGENT_ID);
    chown(&path, Some(uid), Some(gid)).step_at(STEP, &path)?;
    chmod(&path, Mode::RWXU).step_at(STEP, &path)?;
    Ok(path)
}

/// Mounts what runsc writes beside a sandbox, in the shim's own mount namespace only.
fn mount_state(path: &Path) -> Result<OwnedFd, BuildError> {
    const STEP: &str = "mount state of runsc";
    match rustix::fs::mkdir(path, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(error) => return Err(error).step_at(STEP, path),
    }
    let options = [("size", STATE_BYTES), ("nr_inodes", "1024"), ("mode", "0755")];
    let target = mounts::open_path(path).step_at(STEP, path)?;
    let filesystem = mounts::make_filesystem("tmpfs", &options, WRITABLE).step_at(STEP, path)?;
    mounts::attach(filesystem.as_fd(), target.as_fd()).step_at(STEP, path)?;
    for directory in ["dev", "proc", "run", "tmp", bundle::ROOT, bundle::TMP, bundle::LISTENER] {
        rustix::fs::mkdir(path.join(directory), Mode::from_raw_mode(0o755)).step_at(STEP, path)?;
    }
    for file in ["dev/null", "runsc", bundle::GUEST] {
        std::fs::write(path.join(file), b"").step_at(STEP, path)?;
    }
    Ok(filesystem)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn what_a_taken_over_sentry_leaves_in_the_listeners_place_is_not_dialled() {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path().join(LINK);
        let open = || open_guest_socket(directory.path()).map(drop).map_err(|error| error.kind());
        let hosts = directory.path().join("host.sock");
        let _listener = UnixListener::bind(&hosts).unwrap();
        assert_eq!(open(), Err(io::ErrorKind::NotFound));
        std::fs::create_dir(&place).unwrap();
        assert_eq!(open(), Err(io::ErrorKind::NotFound));
        symlink(&hosts, place.join(SOCKET)).unwrap();
        assert_eq!(open(), Err(io::ErrorKind::InvalidData), "a link to a socket of the host");
        std::fs::remove_file(place.join(SOCKET)).unwrap();
        std::fs::write(place.join(SOCKET), "").unwrap();
        assert_eq!(open(), Err(io::ErrorKind::InvalidData), "a file");
        std::fs::remove_file(place.join(SOCKET)).unwrap();
        let _own = UnixListener::bind(place.join(SOCKET)).unwrap();
        assert_eq!(open(), Ok(()));
        // Nor may the directory itself lead elsewhere.
        std::fs::rename(&place, directory.path().join("elsewhere")).unwrap();
        symlink(directory.path().join("elsewhere"), &place).unwrap();
        assert!(open().is_err(), "a link in the place of the directory");
    }
}
