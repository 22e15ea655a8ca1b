//! Which crate may depend on which: the table in ARCHITECTURE.md, held against what cargo sees.
//!
//! The table is read from the page itself, so that the page cannot say something else than what is checked.
//! Development dependencies are exempt: a test may stand several layers together, and nothing of it ships.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;

/// What a row allows.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Allowed {
    All,
    These(BTreeSet<String>),
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    /// `None` for a normal dependency, else `dev` or `build`.
    kind: Option<String>,
    /// Set for members of this workspace.
    path: Option<String>,
    features: Vec<String>,
}

/// Returns what is wrong with the crates' dependencies on each other.
///
/// # Errors
///
/// When cargo or ARCHITECTURE.md cannot be read.
pub(super) fn problems(root: &Path) -> Result<Vec<String>> {
    let page = fs::read_to_string(root.join("ARCHITECTURE.md")).context("read `ARCHITECTURE.md`")?;
    let table = table(&page);
    ensure!(!table.is_empty(), "ARCHITECTURE.md has no table with a column `may depend on`");
    let output = Command::new(std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned()))
        .args(["metadata", "--format-version", "1", "--no-deps"])
        .current_dir(root)
        .output()
        .context("run `cargo metadata`")?;
    ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    let metadata: Metadata = serde_json::from_slice(&output.stdout).context("parse `cargo metadata`")?;
    Ok(compare(&metadata, &table))
}

fn compare(metadata: &Metadata, table: &BTreeMap<String, Allowed>) -> Vec<String> {
    let mut problems = Vec::new();
    let mut seen = BTreeSet::new();
    for package in &metadata.packages {
        let name = short(&package.name);
        seen.insert(name.to_owned());
        let Some(allowed) = table.get(name) else {
            problems.push(format!("ARCHITECTURE.md: crate `{name}` is not in the table"));
            continue;
        };
        for dependency in &package.dependencies {
            if dependency.path.is_none() || dependency.kind.as_deref() == Some("dev") {
                continue;
            }
            let target = short(&dependency.name);
            if let Allowed::These(these) = allowed
                && !these.contains(target)
            {
                problems.push(format!(
                    "crate `{name}` depends on `{target}`, which ARCHITECTURE.md does not allow"
                ));
            }
            if name == "guest" && target == "api" && !dependency.features.is_empty() {
                problems.push(format!(
                    "crate `guest` takes features {:?} of `api`: it must have the messages only, or the static \
                     binary grows by a server",
                    dependency.features
                ));
            }
        }
    }
    for name in table.keys().filter(|name| !seen.contains(*name)) {
        problems.push(format!("ARCHITECTURE.md: the table names `{name}`, which is no crate"));
    }
    problems
}

fn short(package: &str) -> &str {
    package.strip_prefix("cloister-").unwrap_or(package)
}

/// Reads the rows of the table whose last column is `may depend on`.
fn table(page: &str) -> BTreeMap<String, Allowed> {
    let mut rows = BTreeMap::new();
    let mut in_table = false;
    for line in page.lines() {
        let cells: Vec<&str> = line.trim().trim_matches('|').split('|').map(str::trim).collect();
        if !line.starts_with('|') {
            in_table = false;
        } else if cells.last() == Some(&"may depend on") {
            in_table = true;
        } else if in_table
            && let [name, .., allowed] = cells.as_slice()
            && let Some(name) = name.strip_prefix('`').and_then(|name| name.strip_suffix('`'))
        {
            let allowed = match *allowed {
                "all" => Allowed::All,
                "–" | "-" => Allowed::These(BTreeSet::new()),
                list => Allowed::These(
                    list.split(',').map(|word| word.trim().trim_matches('`').to_owned()).collect(),
                ),
            };
            rows.insert(name.to_owned(), allowed);
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "# A\n\n| other | table |\n|---|---|\n| `x` | y |\n\n\
        | crate | what | may depend on |\n|---|---|---|\n\
        | `types` | values | – |\n| `api` | messages | types |\n| `guest` | inside | api, types |\n\
        | `cloister` | binary | all |\n";

    fn package(name: &str, dependencies: &[(&str, Option<&str>)]) -> Package {
        let dependencies = dependencies
            .iter()
            .map(|(name, kind)| Dependency {
                name: format!("cloister-{name}"),
                kind: kind.map(str::to_owned),
                path: Some(format!("crates/{name}")),
                features: Vec::new(),
            })
            .collect();
        Package { name: name.to_owned(), dependencies }
    }

    fn workspace(api_depends_on: &[(&str, Option<&str>)]) -> Metadata {
        Metadata {
            packages: vec![
                package("cloister-types", &[]),
                package("cloister-api", api_depends_on),
                package("cloister-guest", &[("api", None), ("types", None)]),
                package("cloister", &[("guest", None), ("api", None)]),
            ],
        }
    }

    #[test]
    fn the_right_table_is_read() {
        let table = table(PAGE);
        assert_eq!(table.len(), 4);
        assert_eq!(table["types"], Allowed::These(BTreeSet::new()));
        assert_eq!(table["guest"], Allowed::These(["api".to_owned(), "types".to_owned()].into()));
        assert_eq!(table["cloister"], Allowed::All);
    }

    #[test]
    fn an_edge_upwards_is_found_whatever_its_kind_but_a_test_may() {
        let table = table(PAGE);
        assert_eq!(compare(&workspace(&[("types", None)]), &table), Vec::<String>::new());
        assert_eq!(compare(&workspace(&[("guest", Some("dev"))]), &table), Vec::<String>::new());
        assert_eq!(compare(&workspace(&[("guest", None)]), &table).len(), 1);
        assert_eq!(compare(&workspace(&[("guest", Some("build"))]), &table).len(), 1);
    }

    #[test]
    fn a_crate_and_a_row_without_the_other_are_found() {
        let mut metadata = workspace(&[]);
        metadata.packages.push(package("cloister-extra", &[]));
        metadata.packages.remove(0);
        let problems = compare(&metadata, &table(PAGE));
        assert_eq!(problems.len(), 2, "{problems:?}");
    }

    #[test]
    fn the_guest_takes_only_messages() {
        let mut metadata = workspace(&[]);
        metadata.packages[2].dependencies[0].features.push("client".to_owned());
        assert_eq!(compare(&metadata, &table(PAGE)).len(), 1);
    }
}
