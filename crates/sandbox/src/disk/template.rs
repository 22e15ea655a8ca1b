//! Ext4 images copied from templates.
//!
//! `mkfs.ext4` takes tens of milliseconds, copying the few blocks that it wrote half of one. A template is made
//! once for each size and kept below `<data>/templates`; the oldest goes when there are more than [`KEPT`].
//! Tables and journal are zeroed while the file is made, where zeroes are holes and cost nothing: else the kernel would
//! start a thread for each mount that writes them out, and the sparse image would grow by itself.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

use cloister_types::ByteCount;
use rustix::fs::SeekFrom;
use rustix::io::Errno;

use super::{DiskError, run};
use crate::fault::POINTS;
use crate::layout::unfinished_name;

/// Templates that are kept; sessions rarely have more different sizes.
const KEPT: usize = 16;
/// Images are a whole number of these, which is a multiple of every block size that ext4 has.
const GRAIN_BYTES: u64 = 64 * 1024;

/// Returns the program that makes filesystems. It lives outside of the path that unprivileged users have.
pub(super) fn mkfs() -> Command {
    e2fs("mkfs.ext4")
}

fn e2fs(program: &str) -> Command {
    let known = ["/usr/sbin", "/sbin"].map(|directory| Path::new(directory).join(program));
    Command::new(known.into_iter().find(|path| path.exists()).unwrap_or_else(|| PathBuf::from(program)))
}

fn image_bytes(limit: ByteCount) -> u64 {
    limit.0 / GRAIN_BYTES * GRAIN_BYTES
}

/// Makes `image`, an empty filesystem of `limit` bytes.
pub(super) fn copy_to(data_dir: &Path, image: &Path, limit: ByteCount) -> Result<(), DiskError> {
    let template = ensure(data_dir, image_bytes(limit))?;
    let temporary = image.with_extension("img.tmp");
    copy_sparse(&template, &temporary)?;
    POINTS.reach("sandbox_before_layer_rename");
    fs::rename(&temporary, image).map_err(|error| DiskError::io("rename to", image, error))
}

/// Checks a kept image that is not attached, and lets it have `limit` bytes.
pub(super) fn fit(image: &Path, actual: u64, limit: ByteCount) -> Result<(), DiskError> {
    let asked = image_bytes(limit);
    if asked < actual {
        return Err(DiskError::CannotShrink { actual, asked });
    }
    check(image, asked > actual)?;
    if asked == actual {
        return Ok(());
    }
    let open = File::options().write(true).open(image);
    open.and_then(|file| file.set_len(asked)).map_err(|error| DiskError::io("grow", image, error))?;
    run("resize2fs", e2fs("resize2fs").arg(image))
}

/// Brings a filesystem in order: what was under way in its journal is finished, and one that met errors is looked at
/// as a whole. `whole` looks whatever its state: resize2fs insists on that. One that was unmounted in order costs a few
/// milliseconds.
fn check(image: &Path, whole: bool) -> Result<(), DiskError> {
    let checked = e2fs("e2fsck").arg(if whole { "-fp" } else { "-p" }).arg(image).output();
    match checked {
        // 1 means "corrected".
        Ok(output) if output.status.code().is_some_and(|code| code <= 1) => Ok(()),
        Ok(output) => Err(DiskError::Program {
            program: "e2fsck",
            status: output.status.to_string(),
            output: String::from_utf8_lossy(&output.stdout).trim().chars().take(400).collect(),
        }),
        Err(error) => Err(DiskError::io("start", Path::new("e2fsck"), error)),
    }
}

/// Returns the template of a size, made if it is not there.
fn ensure(data_dir: &Path, bytes: u64) -> Result<PathBuf, DiskError> {
    let directory = data_dir.join("templates");
    let template = directory.join(format!("ext4-{bytes}.img"));
    if template.exists() {
        return Ok(template);
    }
    fs::create_dir_all(&directory).map_err(|error| DiskError::io("make", &directory, error))?;
    // Two sessions may want the same size at once: each makes one, and the last rename wins with an equal file.
    let temporary = directory.join(unfinished_name("ext4"));
    let made = File::create_new(&temporary)
        .and_then(|file| file.set_len(bytes))
        .map_err(|error| DiskError::io("make", &temporary, error))
        .and_then(|()| {
            let options = "lazy_itable_init=0,lazy_journal_init=0,nodiscard";
            run("mkfs.ext4", mkfs().args(["-q", "-F", "-m", "0", "-E", options]).arg(&temporary))
        })
        .and_then(|()| {
            POINTS.reach("sandbox_before_template_rename");
            fs::rename(&temporary, &template).map_err(|error| DiskError::io("rename to", &template, error))
        });
    if made.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    made?;
    drop_oldest(&directory);
    Ok(template)
}

/// Removes templates beyond those kept. Best effort: they are found again at the next new size.
fn drop_oldest(directory: &Path) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    let mut templates: Vec<(SystemTime, PathBuf)> = entries
        .flatten()
        .filter(|entry| entry.file_name().to_str().is_some_and(|name| name.starts_with("ext4-")))
        .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
        .collect();
    templates.sort();
    let surplus = templates.len().saturating_sub(KEPT);
    for (_, path) in &templates[..surplus] {
        let _ = fs::remove_file(path);
    }
}

/// Copies the parts of a file that have data, and leaves its holes holes.
fn copy_sparse(from: &Path, to: &Path) -> Result<(), DiskError> {
    let copy = || -> io::Result<()> {
        let source = File::open(from)?;
        let length = source.metadata()?.len();
        let target = File::options().write(true).create(true).truncate(true).open(to)?;
        target.set_len(length)?;
        let mut position = 0;
        loop {
            let start = match rustix::fs::seek(&source, SeekFrom::Data(position)) {
                Ok(start) => start,
                // There is no data after the position.
                Err(Errno::NXIO) => return Ok(()),
                Err(error) => return Err(error.into()),
            };
            let end = rustix::fs::seek(&source, SeekFrom::Hole(start))?;
            let (mut read_at, mut write_at) = (start, start);
            while read_at < end {
                let left = usize::try_from(end - read_at).unwrap_or(usize::MAX);
                let copied = rustix::fs::copy_file_range(
                    &source,
                    Some(&mut read_at),
                    &target,
                    Some(&mut write_at),
                    left,
                )?;
                if copied == 0 {
                    return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
                }
            }
            position = end;
        }
    };
    copy().map_err(|error| DiskError::io("copy to", to, error))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    fn is_missing_mkfs() -> bool {
        let missing = mkfs().arg("-V").output().is_err();
        if missing {
            println!("SKIP: mkfs.ext4 is not installed");
        }
        missing
    }

    #[test]
    fn a_layer_is_as_large_as_its_limit_sparse_and_whole() {
        if is_missing_mkfs() {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("layer.img");
        copy_to(directory.path(), &image, ByteCount(ByteCount::mib(256).0 + 5)).unwrap();
        let metadata = fs::metadata(&image).unwrap();
        assert_eq!(metadata.len(), ByteCount::mib(256).0);
        assert!(
            metadata.blocks() * 512 < ByteCount::mib(8).0,
            "{} blocks are on the disk",
            metadata.blocks()
        );
        run("e2fsck", e2fs("e2fsck").arg("-fn").arg(&image)).unwrap();
        // The second of a size is a copy only.
        copy_to(directory.path(), &directory.path().join("other.img"), ByteCount::mib(256)).unwrap();
        assert_eq!(fs::read_dir(directory.path().join("templates")).unwrap().count(), 1);
    }

    #[test]
    fn a_kept_layer_grows_and_never_shrinks() {
        if is_missing_mkfs() {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("layer.img");
        copy_to(directory.path(), &image, ByteCount::mib(16)).unwrap();
        fit(&image, ByteCount::mib(16).0, ByteCount::mib(64)).unwrap();
        assert_eq!(fs::metadata(&image).unwrap().len(), ByteCount::mib(64).0);
        run("e2fsck", e2fs("e2fsck").arg("-fn").arg(&image)).unwrap();
        let error = fit(&image, ByteCount::mib(64).0, ByteCount::mib(16)).unwrap_err();
        assert_eq!(error.to_string(), "the layer has 64 MiB and cannot shrink to 16 MiB");
    }

    #[test]
    fn a_kept_layer_is_mended_before_it_is_used_again_and_one_that_cannot_be_is_refused() {
        if is_missing_mkfs() {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("layer.img");
        let limit = ByteCount::mib(16);
        copy_to(directory.path(), &image, limit).unwrap();
        // The mark that ext4 leaves when its disk failed.
        run("debugfs", e2fs("debugfs").args(["-w", "-R", "set_super_value state 2"]).arg(&image)).unwrap();
        let state = || {
            let shown = e2fs("dumpe2fs").arg("-h").arg(&image).output().unwrap();
            let text = String::from_utf8_lossy(&shown.stdout).into_owned();
            text.lines().find_map(|line| line.strip_prefix("Filesystem state:")).unwrap().trim().to_owned()
        };
        assert_ne!(state(), "clean");
        fit(&image, limit.0, limit).unwrap();
        assert_eq!(state(), "clean");

        fs::write(&image, vec![0; usize::try_from(limit.0).unwrap()]).unwrap();
        let error = fit(&image, limit.0, limit).unwrap_err();
        assert!(matches!(error, DiskError::Program { program: "e2fsck", .. }), "{error}");
    }

    #[test]
    fn only_so_many_templates_are_kept() {
        let directory = tempfile::tempdir().unwrap();
        for number in 0..KEPT + 3 {
            let file = File::create(directory.path().join(format!("ext4-{number}.img"))).unwrap();
            let seconds = u64::try_from(number).unwrap();
            file.set_modified(SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(seconds)).unwrap();
        }
        drop_oldest(directory.path());
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), KEPT);
        assert!(
            !directory.path().join("ext4-2.img").exists() && directory.path().join("ext4-3.img").exists()
        );
    }
}
