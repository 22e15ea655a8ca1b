//! Rules about the tree that no compiler checks.
//!
//! [`run`] reads every text file of the repository once and collects *all* problems before it fails. The rules:
//!
//! - crates depend on each other only as the table in ARCHITECTURE.md allows ([`dependencies`]);
//! - no file or module is a drawer for leftovers (`utils`, `helpers`, …);
//! - a Rust file opens with a `//!` essay, a script with a comment that says what it does;
//! - no marker of unfinished work, no test that is switched off;
//! - no path of somebody's home or work directory;
//! - no Rust file beyond [`LINES_MAX`] lines, but for those in [`LONG_FILES`] with a reason;
//! - a relative link in a page leads somewhere.
//!
//! Generated files are exempt from the rules of form, never from the one about paths.

mod dependencies;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

/// Past this, a file has more than one noun in it.
const LINES_MAX: usize = 900;
/// Files that may be longer, each with why.
const LONG_FILES: &[(&str, &str)] = &[];

/// Directories that hold no source of ours.
const SKIPPED_DIRECTORIES: &[&str] = &["target", ".git", ".cache", "node_modules", ".venv"];
const DRAWER_NAMES: &[&str] = &["utils", "util", "helpers", "helper", "misc", "common"];
/// Spelt in two halves each, so that this file passes its own rule.
const UNFINISHED: &[&str] = &[
    concat!("TO", "DO"),
    concat!("FIX", "ME"),
    concat!("to", "do!("),
    concat!("unimpl", "emented!("),
    concat!("#[ig", "nore"),
];
const TEXT_EXTENSIONS: &[&str] =
    &["rs", "sh", "py", "proto", "sql", "toml", "yaml", "yml", "json", "md", "txt", "service"];

/// One text file of the tree.
struct SourceFile {
    /// Relative to the root, with `/`.
    path: String,
    text: String,
}

/// Checks every rule.
///
/// # Errors
///
/// When a file cannot be read, or with the list of all problems.
pub(crate) fn run() -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("xtask has a parent directory")?;
    let mut problems = dependencies::problems(root)?;
    let own_paths = own_paths(root);
    for path in text_files(root)? {
        let text = fs::read(&path).with_context(|| format!("read `{}`", path.display()))?;
        let Ok(text) = String::from_utf8(text) else { continue };
        let relative = path.strip_prefix(root)?.to_string_lossy().into_owned();
        let file = SourceFile { path: relative, text };
        check_file(&file, &own_paths, &mut problems);
        if file.path.ends_with(".md") {
            check_links(&file, root, &mut problems);
        }
    }
    if problems.is_empty() {
        return Ok(());
    }
    problems.sort();
    bail!("{} problem(s):\n  {}", problems.len(), problems.join("\n  "));
}

fn check_file(file: &SourceFile, own_paths: &[String], problems: &mut Vec<String>) {
    check_paths(file, own_paths, problems);
    if is_generated(&file.path) {
        return;
    }
    check_name(&file.path, problems);
    check_header(file, problems);
    check_unfinished(file, problems);
    check_length(file, problems);
}

fn is_generated(path: &str) -> bool {
    path.contains("/generated/") || path.contains("/.sqlx/") || path.starts_with(".sqlx/")
}

fn is_script(file: &SourceFile) -> bool {
    file.path.ends_with(".sh") || file.path.ends_with(".py") || file.text.starts_with("#!")
}

fn check_name(path: &str, problems: &mut Vec<String>) {
    let in_code = path.ends_with(".rs") || path.ends_with(".py") || path.ends_with(".sh");
    if !in_code {
        return;
    }
    for part in path.split('/') {
        let stem = part.split('.').next().unwrap_or(part);
        if DRAWER_NAMES.contains(&stem) {
            problems.push(format!("{path}: `{stem}` says nothing: name the file after the noun in it"));
        }
    }
}

fn check_header(file: &SourceFile, problems: &mut Vec<String>) {
    let path = &file.path;
    if path.ends_with(".rs") {
        if !file.text.starts_with("//! ") {
            problems.push(format!("{path}: does not open with a `//!` paragraph that says what it is for"));
        }
    } else if is_script(file) {
        // After an interpreter or a shellcheck line, which are directives and say nothing.
        let first = file
            .text
            .lines()
            .find(|line| !line.is_empty() && !line.starts_with("#!") && !line.starts_with("# shellcheck"));
        let is_comment = first.is_some_and(|line| line.starts_with("# ") || line.starts_with("\"\"\""));
        if !is_comment {
            problems.push(format!("{path}: does not open with a comment that says what it does"));
        }
    }
}

fn check_unfinished(file: &SourceFile, problems: &mut Vec<String>) {
    let is_source = !file.path.ends_with(".md") && !file.path.ends_with(".json") && file.path != "Cargo.lock";
    if !is_source {
        return;
    }
    for (number, line) in file.text.lines().enumerate() {
        for &marker in UNFINISHED {
            if has_word(line, marker) {
                problems.push(format!("{}:{}: `{marker}` marks unfinished work", file.path, number + 1));
            }
        }
    }
}

/// Finds `marker` where no letter or digit stands before it.
fn has_word(line: &str, marker: &str) -> bool {
    line.match_indices(marker).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        let after = line[at + marker.len()..].chars().next();
        let in_word = |neighbour: Option<char>| neighbour.is_some_and(|c| c.is_alphanumeric() || c == '_');
        !in_word(before) && (marker.ends_with('(') || !in_word(after))
    })
}

fn check_length(file: &SourceFile, problems: &mut Vec<String>) {
    if !file.path.ends_with(".rs") || LONG_FILES.iter().any(|(path, _)| *path == file.path) {
        return;
    }
    let lines = file.text.lines().count();
    if lines > LINES_MAX {
        problems.push(format!("{}: {lines} lines; more than {LINES_MAX} is more than one noun", file.path));
    }
}

/// Paths of the machine this runs on, which no committed file may name.
fn own_paths(root: &Path) -> Vec<String> {
    let mut paths = vec![root.to_string_lossy().into_owned()];
    for variable in ["CARGO_HOME", "RUSTUP_HOME"] {
        paths.extend(std::env::var(variable));
    }
    if let Ok(home) = std::env::var("HOME") {
        paths.push(format!("{home}/.cargo"));
        // `/root` is a directory of every sandbox as well; somebody's home is not.
        if home.starts_with("/home/") {
            paths.push(format!("{home}/"));
        }
    }
    paths.retain(|path| path.len() > 3);
    paths
}

fn check_paths(file: &SourceFile, own_paths: &[String], problems: &mut Vec<String>) {
    for (number, line) in file.text.lines().enumerate() {
        let own = own_paths
            .iter()
            .find(|path| line.match_indices(path.as_str()).any(|(at, _)| starts_path(line, at)));
        let foreign = [concat!("/wo", "rk/"), concat!("/Us", "ers/")]
            .into_iter()
            .find(|prefix| line.match_indices(prefix).any(|(at, _)| starts_path(line, at)));
        if let Some(path) = own.map(String::as_str).or(foreign) {
            problems.push(format!("{}:{}: names `{path}`, a path of one machine", file.path, number + 1));
        }
    }
}

/// Whether an absolute path can start at this offset: `/a/b` does, the `/b` in it does not.
fn starts_path(line: &str, at: usize) -> bool {
    line[..at].chars().next_back().is_none_or(|before| {
        !before.is_alphanumeric() && !matches!(before, '/' | '_' | '-' | '.' | '}' | '>' | '*' | '~')
    })
}

fn check_links(file: &SourceFile, root: &Path, problems: &mut Vec<String>) {
    let directory = Path::new(&file.path).parent().unwrap_or(Path::new(""));
    for (number, line) in file.text.lines().enumerate() {
        for link in links(line) {
            let target = link.split('#').next().unwrap_or(link);
            let is_external = target.contains("://") || target.starts_with("mailto:");
            if target.is_empty() || is_external || root.join(directory).join(target).exists() {
                continue;
            }
            problems.push(format!("{}:{}: the link to `{target}` leads nowhere", file.path, number + 1));
        }
    }
}

/// The targets of `[text](target)` in a line of Markdown, outside of code spans.
fn links(line: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut in_code = false;
    for (at, character) in line.char_indices() {
        if character == '`' {
            in_code = !in_code;
        }
        if !in_code
            && let Some(rest) = line[at..].strip_prefix("](")
            && let Some((target, _)) = rest.split_once(')')
        {
            found.push(target);
        }
    }
    found
}

/// Every text file below `root`, by extension, or by an interpreter line where there is none.
fn text_files(root: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut pending = vec![root.to_path_buf()];
    while let Some(directory) = pending.pop() {
        for entry in fs::read_dir(&directory).with_context(|| format!("list `{}`", directory.display()))? {
            let entry = entry?;
            let path = entry.path();
            let kind = entry.file_type()?;
            // By name also where it is a file, as `.git` is in a second work tree.
            let name = entry.file_name();
            if SKIPPED_DIRECTORIES.contains(&name.to_string_lossy().as_ref()) {
                continue;
            }
            if kind.is_dir() {
                pending.push(path);
            } else if kind.is_file() && is_text(&path) {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}

fn is_text(path: &Path) -> bool {
    match path.extension() {
        Some(extension) => TEXT_EXTENSIONS.contains(&extension.to_string_lossy().as_ref()),
        // `run`, `test`, `justfile`, `.ci/run` and the like.
        None => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems_of(path: &str, text: &str) -> Vec<String> {
        let file = SourceFile { path: path.to_owned(), text: text.to_owned() };
        let mut problems = Vec::new();
        check_file(&file, &["/srv/somebody/cloister".to_owned()], &mut problems);
        problems
    }

    #[test]
    fn a_clean_file_has_no_problem() {
        assert_eq!(
            problems_of("crates/a/src/noun.rs", "//! What it is for.\nfn main() {}\n"),
            Vec::<String>::new()
        );
        assert_eq!(
            problems_of("scripts/a.sh", "# shellcheck shell=bash\n# What it does.\n"),
            Vec::<String>::new()
        );
        assert_eq!(problems_of("run", "#!/usr/bin/env bash\n# What it does.\n"), Vec::<String>::new());
        assert_eq!(
            problems_of("a.py", "#!/usr/bin/env python3\n\"\"\"What it does.\"\"\"\n"),
            Vec::<String>::new()
        );
    }

    #[test]
    fn each_rule_finds_its_own_problem() {
        let long = format!("//! Long.\n{}", "\n".repeat(LINES_MAX));
        let cases = [
            ("crates/a/src/utils.rs", "//! Leftovers.\n".to_owned(), "says nothing"),
            ("crates/a/src/helpers/noun.rs", "//! Leftovers.\n".to_owned(), "says nothing"),
            ("crates/a/src/noun.rs", "fn main() {}\n".to_owned(), "does not open"),
            ("crates/a/build.rs", "// Not an essay.\n".to_owned(), "does not open"),
            ("scripts/a.sh", "set -e\n".to_owned(), "does not open"),
            ("run", "#!/bin/sh\nset -e\n".to_owned(), "does not open"),
            ("a.rs", format!("//! A.\n// {}: later\n", UNFINISHED[0]), "unfinished"),
            ("a.rs", format!("//! A.\n    {})\n", UNFINISHED[2]), "unfinished"),
            ("a.rs", format!("//! A.\n{}]\n", UNFINISHED[4]), "unfinished"),
            ("a.rs", long, "more than one noun"),
            ("a.toml", "x = \"/srv/somebody/cloister/target\"\n".to_owned(), "a path of one machine"),
            ("a.md", format!("see {}x/y\n", concat!("/wo", "rk/")), "a path of one machine"),
        ];
        for (path, text, expected) in cases {
            let problems = problems_of(path, &text);
            assert!(
                problems.len() == 1 && problems[0].contains(expected),
                "`{path}` should have one problem with `{expected}`: {problems:?}"
            );
        }
    }

    #[test]
    fn generated_files_keep_their_form_but_may_name_no_path() {
        assert!(problems_of("crates/a/src/generated/x.rs", "fn main() {}\n").is_empty());
        assert_eq!(problems_of("crates/a/src/generated/x.rs", "// /srv/somebody/cloister\n").len(), 1);
    }

    #[test]
    fn a_marker_inside_a_word_is_none_and_a_path_inside_a_path_neither() {
        assert!(!has_word("MASTODON", UNFINISHED[0]));
        assert!(!has_word(&format!("my_{}", UNFINISHED[2]), UNFINISHED[2]));
        assert!(problems_of("a.rs", &format!("//! A layer{}upper.\n", concat!("/wo", "rk/"))).is_empty());
    }

    #[test]
    fn links_are_found_outside_of_code() {
        assert_eq!(links("see [a](b.md) and [c](../d.md#e)"), ["b.md", "../d.md#e"]);
        assert!(links("`[a](b.md)`").is_empty());
    }
}
