//! The sandbox's `/etc`: a few files of our own, and read-only views of a few of the host's.
//!
//! The files of our own are written once, to the layer, and belong to root inside, who may change them. The views are
//! an allow-list of what programs of `/usr` cannot work without: trusted certificates, the linker's cache, alternatives,
//! the configuration that Debian keeps in `/etc` for runtimes. Anything an administrator may have put a secret into
//! (`environment`, `gitconfig`, `npmrc`, `pip.conf`, `profile.d`, `ssh`) is ours or absent, never the host's.

use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;

use crate::build::layer::{make_directory, make_symlink, write_file};
use crate::shim::config::ShimConfig;

/// The unprivileged user that every sandbox has.
pub(crate) const USER_ID: u32 = 1000;
/// Its home, relative to the layer.
pub(crate) const USER_HOME_IN_LAYER: &str = "home/user";
/// Exists in every sandbox, so a range of ids must reach it.
pub(crate) const NOBODY_ID: u32 = 65_534;

/// What of the host's `/etc` is shown read-only, when it exists. A link is copied as a link.
pub(crate) const HOST_VIEWS: &[&str] = &[
    "X11",
    "alternatives",
    "ca-certificates",
    "ca-certificates.conf",
    "debian_version",
    "fonts",
    "groff",
    "gss",
    "host.conf",
    "inputrc",
    "java-11-openjdk",
    "java-17-openjdk",
    "java-21-openjdk",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "locale.alias",
    "localtime",
    "magic",
    "magic.mime",
    "manpath.config",
    "maven",
    "mime.types",
    "os-release",
    "perl",
    "protocols",
    "python3",
    "python3.11",
    "python3.12",
    "python3.13",
    "rpc",
    "services",
    "ssl/certs",
    "ssl/openssl.cnf",
    "terminfo",
    "timezone",
    "vim",
];

const PASSWD: &str = "root:x:0:0:root:/root:/bin/bash\n\
    daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin\n\
    user:x:1000:1000:user:/home/user:/bin/bash\n\
    cloister:x:65533:65533:guest agent:/nonexistent:/usr/sbin/nologin\n\
    nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n";

const GROUP: &str = "root:x:0:\n\
    daemon:x:1:\n\
    adm:x:4:\n\
    tty:x:5:\n\
    mail:x:8:\n\
    utmp:x:43:\n\
    staff:x:50:\n\
    users:x:100:\n\
    user:x:1000:\n\
    cloister:x:65533:\n\
    nogroup:x:65534:\n";

const NSSWITCH: &str = "passwd: files\n\
    group: files\n\
    shadow: files\n\
    hosts: files dns\n\
    networks: files\n\
    protocols: files\n\
    services: files\n\
    ethers: files\n\
    rpc: files\n";

const PROFILE: &str = "if [ \"$(id -u)\" -eq 0 ]; then\n\
    \x20 PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n\
    else\n\
    \x20 PATH=/usr/local/bin:/usr/bin:/bin\n\
    fi\n\
    export PATH\n\
    if [ -n \"$BASH\" ] && [ -r /etc/bash.bashrc ]; then . /etc/bash.bashrc; fi\n\
    if [ -d /etc/profile.d ]; then\n\
    \x20 for i in /etc/profile.d/*.sh; do [ -r \"$i\" ] && . \"$i\"; done\n\
    \x20 unset i\n\
    fi\n";

const BASHRC: &str = "[ -z \"$PS1\" ] && return\n\
    shopt -s checkwinsize\n\
    PS1='\\u@\\h:\\w\\$ '\n";

/// A file of `/etc` that could not be made.
#[derive(Debug)]
pub(crate) struct EtcError {
    /// The file.
    pub(crate) path: PathBuf,
    /// What the kernel said.
    pub(crate) source: Errno,
}

/// Writes the files of our own to the empty directory `etc`, and makes a place for each of the host's that exists.
pub(crate) fn write(etc: BorrowedFd<'_>, config: &ShimConfig) -> Result<(), EtcError> {
    let base = config.id_base;
    write_names_in(etc, &config.hostname, base)?;
    for (name, content) in [
        ("passwd", PASSWD),
        ("group", GROUP),
        ("nsswitch.conf", NSSWITCH),
        ("profile", PROFILE),
        ("bash.bashrc", BASHRC),
        ("shells", "/bin/sh\n/bin/bash\n"),
        // No network, no resolver; and empty files that programs insist on opening.
        ("resolv.conf", ""),
        ("environment", ""),
        ("gitconfig", ""),
        ("fstab", ""),
    ] {
        write_file(etc, name, content.as_bytes(), 0o644, base).map_err(|source| at(name, source))?;
    }
    for name in ["profile.d", "ssl", "opt"] {
        make_directory(etc, name, 0o755, base, 0).map_err(|source| at(name, source))?;
    }
    make_symlink(etc, "mtab", "../proc/self/mounts", base).map_err(|source| at("mtab", source))?;
    for name in HOST_VIEWS {
        let host = Path::new("/etc").join(name);
        let Ok(metadata) = std::fs::symlink_metadata(&host) else { continue };
        let result = match FileType::from_raw_mode(std::os::unix::fs::MetadataExt::mode(&metadata)) {
            FileType::Symlink => match std::fs::read_link(&host) {
                Ok(target) => make_symlink(etc, name, target, base),
                Err(_) => continue,
            },
            FileType::Directory => make_directory(etc, name, 0o755, base, 0),
            FileType::RegularFile => write_file(etc, name, b"", 0o644, base),
            _ => continue,
        };
        result.map_err(|source| at(name, source))?;
    }
    Ok(())
}

/// Writes the files that hold the sandbox's own name. Only while no guest has run on the layer: a later one may have put
/// a link in their place.
pub(crate) fn write_names(layer: BorrowedFd<'_>, hostname: &str, id_base: u32) -> Result<(), Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let etc = rustix::fs::openat(layer, "etc", flags, Mode::empty())?;
    write_names_in(etc.as_fd(), hostname, id_base).map_err(|error| error.source)
}

fn write_names_in(etc: BorrowedFd<'_>, hostname: &str, id_base: u32) -> Result<(), EtcError> {
    let hosts =
        format!("127.0.0.1\tlocalhost\n127.0.1.1\t{hostname}\n::1\tlocalhost ip6-localhost ip6-loopback\n");
    for (name, content) in [("hosts", hosts), ("hostname", format!("{hostname}\n"))] {
        write_file(etc, name, content.as_bytes(), 0o644, id_base).map_err(|source| at(name, source))?;
    }
    Ok(())
}

fn at(name: &str, source: Errno) -> EtcError {
    EtcError { path: Path::new("/etc").join(name), source }
}
