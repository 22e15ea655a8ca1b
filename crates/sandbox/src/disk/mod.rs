//! The writable layer of a session and its limit.
//!
//! ```text
//!  loop    an ext4 image as large as the limit, copied from a template; the shim mounts it    ENOSPC inside
//!  quota   a directory with a project quota of the host's filesystem                          ENOSPC inside
//!  tmpfs   memory; gone with the sandbox, counted against its memory                           ENOSPC inside
//! ```
//!
//! What works is found by trying. `loop` comes first: the limit is exact, removal is one unlink, and the layer is one
//! file that later can be chunked. `tmpfs` is taken only when an operator asks for it, since a session would lose its
//! layer at every stop, which no caller could see. The layer lies in the session's directory and outlives the
//! sandbox. An image that is attached twice destroys itself: [`wait_detached`] is called before it is used again.

mod quota;
mod template;

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use cloister_guest::shim::config::DiskConfig;
use cloister_types::{ByteCount, Capability};

/// Name of the image in a session's directory.
pub const LAYER_IMAGE: &str = "layer.img";
/// Name of the directory in a session's directory, under a project quota.
const LAYER_DIR: &str = "layer";

/// What went wrong with a layer.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// A file could not be read or written.
    #[error("{operation} `{}`", path.display())]
    Io {
        /// A verb, for example `copy`.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// Its error.
        #[source]
        source: io::Error,
    },
    /// A program of e2fsprogs failed.
    #[error("`{program}` ended with {status}: {output}")]
    Program {
        /// Its name.
        program: &'static str,
        /// How it ended.
        status: String,
        /// What it printed.
        output: String,
    },
    /// The layer is larger than the limit now asked for.
    #[error("the layer has {} and cannot shrink to {}", ByteCount(*actual), ByteCount(*asked))]
    CannotShrink {
        /// Its size.
        actual: u64,
        /// The new limit.
        asked: u64,
    },
    /// The image is still attached.
    #[error("`{}` is still attached to a loop device", path.display())]
    Attached {
        /// The image.
        path: PathBuf,
    },
    /// No way to limit a layer works here.
    #[error("no disk limit works on this host: {0}")]
    NoDriver(String),
}

impl DiskError {
    fn io(operation: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { operation, path: path.to_path_buf(), source }
    }
}

/// How layers are limited on a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskKind {
    /// Images on loop devices.
    Loop,
    /// Project quotas.
    Quota,
    /// Memory.
    Tmpfs,
}

/// Makes layers.
#[derive(Debug, Clone)]
pub struct DiskDriver {
    data_dir: PathBuf,
    kind: Option<DiskKind>,
    probes: Vec<Capability>,
}

impl DiskDriver {
    /// Tries each way below `data_dir`; with `allow_tmpfs`, memory is taken when nothing else works.
    pub fn detect(data_dir: &Path, allow_tmpfs: bool) -> Self {
        let probes = vec![probe_loop(), quota::probe(data_dir), probe_tmpfs(allow_tmpfs)];
        let kinds = [DiskKind::Loop, DiskKind::Quota, DiskKind::Tmpfs];
        let kind = kinds.into_iter().zip(&probes).find(|(_, probe)| probe.is_ok()).map(|(kind, _)| kind);
        Self { data_dir: data_dir.to_path_buf(), kind, probes }
    }

    /// Returns what each way's trial came to: `disk.loop`, `disk.quota`, `disk.tmpfs`.
    pub fn probes(&self) -> &[Capability] {
        &self.probes
    }

    /// Returns which way is used, if any works.
    pub fn kind(&self) -> Option<DiskKind> {
        self.kind
    }

    /// Returns where a session's layer will be, without making it.
    ///
    /// # Errors
    ///
    /// [`DiskError::NoDriver`].
    pub fn plan(&self, session_dir: &Path, limit: ByteCount) -> Result<DiskConfig, DiskError> {
        match self.kind {
            Some(DiskKind::Loop) => Ok(DiskConfig::Loop { image: session_dir.join(LAYER_IMAGE) }),
            Some(DiskKind::Quota) => Ok(DiskConfig::Directory { path: session_dir.join(LAYER_DIR) }),
            Some(DiskKind::Tmpfs) => Ok(DiskConfig::Tmpfs { bytes: limit.0 }),
            None => {
                let details: Vec<_> = self.probes.iter().map(|probe| probe.detail.as_str()).collect();
                Err(DiskError::NoDriver(details.join("; ")))
            }
        }
    }

    /// Returns whether a session's layer is where [`plan`](Self::plan) puts it.
    pub fn has_layer(&self, session_dir: &Path) -> bool {
        match self.kind {
            Some(DiskKind::Loop) => session_dir.join(LAYER_IMAGE).is_file(),
            Some(DiskKind::Quota) => session_dir.join(LAYER_DIR).is_dir(),
            // One in memory is made anew for each sandbox; without a driver the creation says so.
            Some(DiskKind::Tmpfs) | None => true,
        }
    }

    /// Makes a planned layer, or takes the one that the session has. `project` is the session's number for a quota.
    ///
    /// # Errors
    ///
    /// [`DiskError::CannotShrink`] for a kept layer that is larger than the limit; otherwise what failed.
    pub fn ensure_layer(&self, disk: &DiskConfig, limit: ByteCount, project: u32) -> Result<(), DiskError> {
        match disk {
            DiskConfig::Loop { image } => match fs::metadata(image) {
                Ok(metadata) => {
                    wait_detached(image, Instant::now() + Duration::from_secs(10))?;
                    template::fit(image, metadata.len(), limit)
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    template::copy_to(&self.data_dir, image, limit)
                }
                Err(error) => Err(DiskError::io("look at", image, error)),
            },
            DiskConfig::Directory { path } => {
                fs::create_dir_all(path).map_err(|error| DiskError::io("make", path, error))?;
                fs::set_permissions(path, fs::Permissions::from_mode(0o700))
                    .map_err(|error| DiskError::io("protect", path, error))?;
                quota::limit(path, project, limit)
            }
            DiskConfig::Tmpfs { .. } => Ok(()),
        }
    }
}

fn probe_loop() -> Capability {
    const NAME: &str = "disk.loop";
    let control = Path::new("/dev/loop-control");
    if let Err(error) = fs::OpenOptions::new().read(true).write(true).open(control) {
        let remedy = "load the `loop` module and run the host agent as root";
        return Capability::failed(NAME, format!("open `{}`: {error}", control.display()), remedy);
    }
    let filesystems = fs::read_to_string("/proc/filesystems").unwrap_or_default();
    if !filesystems.lines().any(|line| line.trim() == "ext4") {
        let detail = "`/proc/filesystems` does not list ext4";
        return Capability::failed(NAME, detail, "load the `ext4` module");
    }
    match template::mkfs().arg("-V").output() {
        Ok(output) if output.status.success() => {
            let text = String::from_utf8_lossy(&output.stderr);
            Capability::ok(
                NAME,
                format!("loop devices and {}", text.lines().next().unwrap_or("mkfs.ext4").trim()),
            )
        }
        Ok(output) => {
            Capability::failed(NAME, format!("`mkfs.ext4 -V` ended with {}", output.status), REMEDY_E2FS)
        }
        Err(error) => Capability::failed(NAME, format!("start `mkfs.ext4`: {error}"), REMEDY_E2FS),
    }
}

const REMEDY_E2FS: &str = "install e2fsprogs";

fn probe_tmpfs(is_allowed: bool) -> Capability {
    if is_allowed {
        Capability::ok("disk.tmpfs", "allowed by the operator; a session's layer ends with its sandbox")
    } else {
        Capability::not_applicable(
            "disk.tmpfs",
            "not used unless asked for: a layer in memory ends with its sandbox",
        )
    }
}

/// Returns the loop devices that `image` is attached to.
pub fn loop_devices_of(image: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir("/sys/block") else { return Vec::new() };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name.starts_with("loop"))
        .filter(|name| {
            let file = Path::new("/sys/block").join(name).join("loop/backing_file");
            fs::read_to_string(file).is_ok_and(|text| Path::new(text.trim_end()) == image)
        })
        .collect()
}

/// Waits until no loop device has `image`: the last mount of a dead sandbox goes a moment after its last process.
///
/// # Errors
///
/// [`DiskError::Attached`] at the deadline.
pub fn wait_detached(image: &Path, deadline: Instant) -> Result<(), DiskError> {
    let image = fs::canonicalize(image).unwrap_or_else(|_| image.to_path_buf());
    let mut pause = Duration::from_millis(1);
    while !loop_devices_of(&image).is_empty() {
        if Instant::now() >= deadline {
            return Err(DiskError::Attached { path: image });
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(50));
    }
    Ok(())
}

/// Runs a program of e2fsprogs to its end.
fn run(program: &'static str, command: &mut Command) -> Result<(), DiskError> {
    let output = command.output().map_err(|source| DiskError::Io {
        operation: "start",
        path: PathBuf::from(program),
        source,
    })?;
    if output.status.success() {
        return Ok(());
    }
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text).trim().chars().take(400).collect();
    Err(DiskError::Program { program, status: output.status.to_string(), output: text })
}
