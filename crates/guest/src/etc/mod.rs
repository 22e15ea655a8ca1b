//! The sandbox's `/etc`: a few files of our own, and read-only views of a few of the host's.
//!
//! The files of our own are written once, to the layer, and belong to root inside, who may change them. The views are
//! an allow-list of what programs of `/usr` cannot work without: trusted certificates, the linker's cache, alternatives,
//! the configuration that Debian keeps in `/etc` for runtimes. Anything an administrator may have put a secret into
//! (`environment`, `gitconfig`, `npmrc`, `pip.conf`, `profile.d`, `ssh`) is ours or absent, never the host's.

use std::io::Read as _;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, openat, renameat, unlinkat};
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

/// What the sandbox's own name resolves to.
const OWN_ADDRESS: &str = "127.0.1.1";
/// Longest `/etc/hosts` that is rewritten.
const HOSTS_MAX: u64 = 1 << 20;

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
    let hosts = format!(
        "127.0.0.1\tlocalhost\n{OWN_ADDRESS}\t{}\n::1\tlocalhost ip6-localhost ip6-loopback\n",
        config.hostname
    );
    let hostname = format!("{}\n", config.hostname);
    for (name, content) in [
        ("passwd", PASSWD),
        ("group", GROUP),
        ("nsswitch.conf", NSSWITCH),
        ("hosts", hosts.as_str()),
        ("hostname", hostname.as_str()),
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

/// Writes a new name into the `etc` of a layer in which a guest has run: its `hostname`, and the line of its own address in
/// its `hosts`, whose other lines stay. Both are replaced as a whole, so that nothing is written through a link.
///
/// # Errors
///
/// What the kernel said: the layer is full, or the guest put something in the way that cannot be replaced.
pub(crate) fn rename_host(etc: BorrowedFd<'_>, hostname: &str, id_base: u32) -> Result<(), Errno> {
    replace_file(etc, "hostname", format!("{hostname}\n").as_bytes(), id_base)?;
    // Not blocking: a pipe may stand there.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let Ok(hosts) = openat(etc, "hosts", flags, Mode::empty()) else { return Ok(()) };
    let stat = rustix::fs::fstat(hosts.as_fd())?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Ok(());
    }
    let mut text = Vec::new();
    std::fs::File::from(hosts)
        .take(HOSTS_MAX + 1)
        .read_to_end(&mut text)
        .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
    let is_own = |line: &[u8]| {
        line.strip_prefix(OWN_ADDRESS.as_bytes())
            .is_some_and(|rest| rest.first().is_some_and(u8::is_ascii_whitespace))
    };
    let mut lines: Vec<&[u8]> = text.split(|byte| *byte == b'\n').collect();
    let Some(own) = lines.iter().position(|line| is_own(line)) else { return Ok(()) };
    if u64::try_from(text.len()).map_or(true, |length| length > HOSTS_MAX) {
        return Ok(());
    }
    let line = format!("{OWN_ADDRESS}\t{hostname}");
    lines[own] = line.as_bytes();
    replace_file(etc, "hosts", &lines.join(&b'\n'), id_base)
}

/// Puts a file of the sandbox's root in the place of whatever has this name, a directory excepted.
fn replace_file(etc: BorrowedFd<'_>, name: &str, content: &[u8], id_base: u32) -> Result<(), Errno> {
    let new = format!(".{name}.cloister");
    match unlinkat(etc, new.as_str(), AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(error) => return Err(error),
    }
    // Nothing has that name now, and no guest runs that could give it to something.
    write_file(etc, &new, content, 0o644, id_base)
        .and_then(|()| renameat(etc, new.as_str(), etc, name))
        .inspect_err(|_| {
            // What was made of it takes room that a full layer needs.
            let _ = unlinkat(etc, new.as_str(), AtFlags::empty());
        })
}

fn at(name: &str, source: Errno) -> EtcError {
    EtcError { path: Path::new("/etc").join(name), source }
}
