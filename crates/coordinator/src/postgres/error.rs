//! Why the private server cannot be had, and what to do about it.

use std::io;
use std::path::{Path, PathBuf};

/// Why the private server cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum PostgresError {
    /// The socket's path is longer than the kernel takes.
    #[error("socket path `{}` has {} bytes, and the kernel takes {most}: choose a shorter run directory", .path.display(), .path.as_os_str().len())]
    SocketPath {
        /// The path.
        path: PathBuf,
        /// The most bytes.
        most: usize,
    },
    /// Another supervisor has the cluster.
    #[error("`{}` is locked: another `cloister` runs with this data directory", .path.display())]
    Locked {
        /// The lock file.
        path: PathBuf,
    },
    /// No PostgreSQL is installed.
    #[error(
        "no PostgreSQL {least} or later was found in /usr/lib/postgresql/*/bin or with `pg_config`: install `postgresql`, or set DATABASE_URL"
    )]
    NotInstalled {
        /// The least major version.
        least: u32,
    },
    /// The cluster was made by a version that is not installed, and others cannot read it.
    #[error("the cluster in `{}` is of PostgreSQL {cluster}, and installed is {}: install `postgresql-{cluster}`, or move it with a dump or `pg_upgrade`", .path.display(), list(.installed))]
    Version {
        /// The cluster.
        path: PathBuf,
        /// Its major version.
        cluster: u32,
        /// What is installed.
        installed: Vec<u32>,
    },
    /// The directory has other things in it.
    #[error("`{}` is not empty and no PostgreSQL cluster: choose another data directory", .path.display())]
    NotACluster {
        /// The directory.
        path: PathBuf,
    },
    /// The account cannot enter a directory above the cluster.
    #[error("user `{user}` cannot enter `{}`, which leads to the data: choose a data directory outside of it, or `chmod o+x` it", .path.display())]
    Unreachable {
        /// The account.
        user: String,
        /// The directory that it cannot enter.
        path: PathBuf,
    },
    /// The account could not be looked up or made.
    #[error("cannot find or create the system user `{user}`: {problem}")]
    Account {
        /// Its name.
        user: String,
        /// What happened.
        problem: String,
    },
    /// A file could not be read or written.
    #[error("cannot {verb} `{}`", .path.display())]
    File {
        /// What was tried.
        verb: &'static str,
        /// On what.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A program could not be run or failed.
    #[error("`{program}` failed: {output}")]
    Program {
        /// Its name.
        program: &'static str,
        /// What it printed, or why it could not be run.
        output: String,
    },
    /// The disk has too little room for a server to start and write its log.
    #[error("the disk of `{}` has {free_mib} MiB free, and the database needs {least_mib} MiB to start", .path.display())]
    NoRoom {
        /// A directory on it.
        path: PathBuf,
        /// What is free.
        free_mib: u64,
        /// What it takes.
        least_mib: u64,
    },
    /// The server ended before it was ready.
    #[error("the server ended before it was ready: {log}")]
    NotReady {
        /// What it printed.
        log: String,
    },
    /// The server neither ended nor became ready.
    #[error("the server was not ready after {seconds} s: {log}")]
    Slow {
        /// How long was waited.
        seconds: u64,
        /// What it printed.
        log: String,
    },
    /// The server on our socket serves another cluster.
    #[error("the server in `{}` has system identifier {found}, and the cluster has {expected}: stop that server", .path.display())]
    OtherCluster {
        /// The cluster's.
        expected: String,
        /// The server's.
        found: String,
        /// The socket directory.
        path: PathBuf,
    },
    /// The server could not be asked.
    #[error("cannot ask the server")]
    Ask(#[source] sqlx::Error),
    /// The server did not stop.
    #[error("the server with pid {pid} did not stop")]
    Stop {
        /// Its pid.
        pid: u32,
    },
}

fn list(versions: &[u32]) -> String {
    versions.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
}

impl PostgresError {
    /// Returns what a person can do about it.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::NotInstalled { .. } | Self::Version { .. } => {
                "install PostgreSQL 14 or later (`apt-get install postgresql`), or set DATABASE_URL to a server of yours"
            }
            Self::Locked { .. } | Self::OtherCluster { .. } => {
                "stop the other one, or give this one its own `--data-dir`, `--run-dir` and `--listen`"
            }
            Self::NoRoom { .. } => "free some room (`df` shows the disks), then start again",
            Self::SocketPath { .. } => "give `--run-dir` a shorter path",
            Self::NotACluster { .. } | Self::Unreachable { .. } => "give `--data-dir` another directory",
            Self::Account { .. }
            | Self::File { .. }
            | Self::Program { .. }
            | Self::NotReady { .. }
            | Self::Slow { .. }
            | Self::Ask(_)
            | Self::Stop { .. } => {
                "`postgres/log` in the data directory says more; with DATABASE_URL a server of yours is used instead"
            }
        }
    }

    pub(super) fn file(verb: &'static str, path: &Path, source: io::Error) -> Self {
        Self::File { verb, path: path.to_owned(), source }
    }
}
