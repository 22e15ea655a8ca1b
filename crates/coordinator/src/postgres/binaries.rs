//! Which PostgreSQL: the one that made the cluster, else the newest that is installed.

use std::path::{Path, PathBuf};

use tokio::process::Command;

use super::PostgresError;

/// The least major version that the store's SQL runs on.
const LEAST_MAJOR: u32 = 14;
/// Debian keeps each major version in a directory of its own here.
const DEBIAN_ROOT: &str = "/usr/lib/postgresql";

/// The programs of one major version.
#[derive(Debug, Clone)]
pub(super) struct Binaries {
    pub(super) major: u32,
    directory: PathBuf,
}

impl Binaries {
    /// Returns the programs for the cluster in `data_dir`, or for a new one when there is none.
    pub(super) async fn for_cluster(data_dir: &Path) -> Result<Self, PostgresError> {
        let installed = installed(Path::new(DEBIAN_ROOT)).await;
        choose(installed, cluster_major(data_dir)?, data_dir)
    }

    /// Returns the path of one program.
    pub(super) fn program(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Returns the identifier that `initdb` gave the cluster, from its control file.
    pub(super) async fn system_identifier(&self, data_dir: &Path) -> Result<String, PostgresError> {
        let fail = |output: String| PostgresError::Program { program: "pg_controldata", output };
        let output = Command::new(self.program("pg_controldata"))
            .arg("-D")
            .arg(data_dir)
            .env("LC_ALL", "C")
            .output()
            .await
            .map_err(|error| fail(error.to_string()))?;
        let text = String::from_utf8_lossy(&output.stdout);
        let line = text.lines().find_map(|line| line.strip_prefix("Database system identifier:"));
        line.map(|value| value.trim().to_owned())
            .ok_or_else(|| fail(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
    }
}

/// Returns the major version of a cluster; `None` when there is none yet.
fn cluster_major(data_dir: &Path) -> Result<Option<u32>, PostgresError> {
    let path = data_dir.join("PG_VERSION");
    match std::fs::read_to_string(&path) {
        Ok(text) => match text.trim().parse() {
            Ok(major) => Ok(Some(major)),
            Err(_) => Err(PostgresError::NotACluster { path: data_dir.to_owned() }),
        },
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(PostgresError::file("read", &path, error)),
    }
}

fn choose(
    mut installed: Vec<Binaries>,
    cluster: Option<u32>,
    data_dir: &Path,
) -> Result<Binaries, PostgresError> {
    installed.retain(|binaries| binaries.major >= LEAST_MAJOR);
    installed.sort_by_key(|binaries| binaries.major);
    let versions = installed.iter().map(|binaries| binaries.major).collect::<Vec<_>>();
    match cluster {
        None => installed.pop().ok_or(PostgresError::NotInstalled { least: LEAST_MAJOR }),
        Some(_) if installed.is_empty() => Err(PostgresError::NotInstalled { least: LEAST_MAJOR }),
        // A server reads only clusters of its own major version.
        Some(major) => installed.into_iter().find(|binaries| binaries.major == major).ok_or_else(|| {
            PostgresError::Version { path: data_dir.to_owned(), cluster: major, installed: versions }
        }),
    }
}

async fn installed(root: &Path) -> Vec<Binaries> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(root).into_iter().flatten().flatten() {
        let major = entry.file_name().to_str().and_then(|name| name.parse().ok());
        let directory = entry.path().join("bin");
        if let Some(major) = major
            && is_complete(&directory)
        {
            found.push(Binaries { major, directory });
        }
    }
    if let Some(binaries) = from_pg_config().await
        && found.iter().all(|other| other.major != binaries.major)
    {
        found.push(binaries);
    }
    found
}

fn is_complete(directory: &Path) -> bool {
    ["initdb", "postgres", "pg_controldata"].iter().all(|program| directory.join(program).is_file())
}

async fn from_pg_config() -> Option<Binaries> {
    let output = Command::new("pg_config").args(["--bindir", "--version"]).output().await.ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let mut lines = text.lines();
    let directory = PathBuf::from(lines.next()?.trim());
    // `PostgreSQL 15.18 (Debian …)`
    let version = lines.next()?.split_whitespace().nth(1)?;
    let major = version.split(|letter: char| !letter.is_ascii_digit()).next()?.parse().ok()?;
    is_complete(&directory).then_some(Binaries { major, directory })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn versions(majors: &[u32]) -> Vec<Binaries> {
        majors.iter().map(|major| Binaries { major: *major, directory: PathBuf::from("/x") }).collect()
    }

    #[test]
    fn the_clusters_own_version_is_used_and_a_newer_cluster_is_refused_with_what_to_do() {
        let path = Path::new("/data");
        assert_eq!(choose(versions(&[17, 15]), None, path).expect("installed").major, 17);
        assert_eq!(choose(versions(&[17, 15]), Some(15), path).expect("installed").major, 15);
        let error = choose(versions(&[15, 13]), Some(18), path).expect_err("a newer cluster");
        let text = error.to_string();
        assert!(text.contains("PostgreSQL 18") && text.contains("install `postgresql-18`"), "{text}");
        assert!(matches!(choose(versions(&[13]), None, path), Err(PostgresError::NotInstalled { .. })));
        assert!(matches!(choose(versions(&[15]), Some(14), path), Err(PostgresError::Version { .. })));
    }
}
