//! `docs/reference/configuration.md`, written from the `EnvVar` constants of the crates, and from the command line's
//! own `…_ENV` constants, whose documentation is their comment.
//!
//! The constants are read as text and not by linking the crates: that would put a database driver into the build
//! of a tool that formats a page, and turn ARCHITECTURE.md's edges around. The price is that a declaration must be
//! of string literals; one that is not is an error here, never a missing row.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};

const PAGE: &str = "docs/reference/configuration.md";
const HEAD: &str = "# Configuration\n\n\
    <!-- Written by `cargo xtask gen` from the `EnvVar` constants in crates/. Change those, not this page. -->\n\n\
    Cloister is configured by the environment. Everything is read and checked before a port is bound or a file is touched,\n\
    and all problems are reported together. An empty variable counts as unset; a misspelt one with a role's prefix is an error.\n\
    `cloister up` passes its environment on to the roles that it starts; a flag of the command line wins over a variable.\n\n\
    `DATABASE_URL` and `RUST_LOG` keep the names that other programs know them by.\n";

/// One declaration.
#[derive(Debug, PartialEq, Eq)]
struct Variable {
    name: String,
    doc: String,
    default: Option<String>,
    unit: Option<String>,
    since: String,
}

/// Writes the page, or with `check` compares and fails when it differs.
pub(crate) fn run(check: bool) -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("xtask has a parent directory")?;
    let path = root.join(PAGE);
    let fresh = page(&declared(root)?)?;
    if check {
        let committed = fs::read_to_string(&path).with_context(|| format!("read `{PAGE}`"))?;
        ensure!(
            committed == fresh,
            "`{PAGE}` is not what `cargo xtask gen` writes: run it and commit the result"
        );
        return Ok(());
    }
    fs::write(&path, fresh).with_context(|| format!("write `{PAGE}`"))
}

/// Every variable, by crate, then by name.
fn declared(root: &Path) -> Result<BTreeMap<String, BTreeMap<String, Variable>>> {
    let mut crates = BTreeMap::new();
    for entry in fs::read_dir(root.join("crates"))? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let mut variables = BTreeMap::new();
        let mut pending = vec![entry.path().join("src")];
        while let Some(directory) = pending.pop() {
            let Ok(entries) = fs::read_dir(&directory) else { continue };
            for entry in entries {
                let path = entry?.path();
                if path.is_dir() {
                    pending.push(path);
                } else if path.extension().is_some_and(|extension| extension == "rs") {
                    let text =
                        fs::read_to_string(&path).with_context(|| format!("read `{}`", path.display()))?;
                    for variable in
                        parse(&text).with_context(|| format!("read the variables of `{}`", path.display()))?
                    {
                        variables.insert(variable.name.clone(), variable);
                    }
                }
            }
        }
        if !variables.is_empty() {
            crates.insert(name, variables);
        }
    }
    Ok(crates)
}

/// Reads `pub const NAME: EnvVar = EnvVar { … };` and the like. Private constants stand for another role's
/// variables and are left out, and so are those of a file's tests.
fn parse(text: &str) -> Result<Vec<Variable>> {
    let code = text.split("#[cfg(test)]").next().unwrap_or(text);
    let mut variables = Vec::new();
    for (at, _) in code.match_indices("EnvVar = EnvVar {") {
        let line = code[..at].lines().next_back().unwrap_or_default().trim_start();
        if !line.starts_with("pub") {
            continue;
        }
        let body = &code[at + "EnvVar = EnvVar {".len()..];
        let field = |name: &str| -> Result<Option<String>> {
            let key = format!("{name}:");
            let Some(value) = body.split_once(&key).map(|(_, rest)| rest.trim_start()) else {
                bail!("`{line}` has no `{name}`");
            };
            if value.starts_with("None") {
                return Ok(None);
            }
            let literal = value.strip_prefix("Some(").unwrap_or(value).trim_start();
            match literal.strip_prefix('"') {
                Some(rest) => string(rest).map(Some),
                None => bail!("`{name}` of `{line}` is not a string literal"),
            }
        };
        let required = |name| field(name)?.with_context(|| format!("`{name}` of `{line}` is `None`"));
        variables.push(Variable {
            name: required("name")?,
            doc: required("doc")?,
            default: field("default")?,
            unit: field("unit")?,
            since: required("since")?,
        });
    }
    variables.extend(plain(code));
    Ok(variables)
}

/// Reads `/// Documentation. Since 0.1.` above `const X_ENV: &str = "NAME";`.
fn plain(code: &str) -> Vec<Variable> {
    let mut variables = Vec::new();
    let mut comment: Vec<&str> = Vec::new();
    for line in code.lines() {
        if let Some(text) = line.strip_prefix("/// ") {
            comment.push(text);
            continue;
        }
        if let Some((_, rest)) = line.split_once("_ENV: &str = \"")
            && let Some((name, _)) = rest.split_once('"')
        {
            let comment = comment.join(" ");
            let (doc, since) = comment.split_once(" Since ").unwrap_or((&comment, ""));
            variables.push(Variable {
                name: name.to_owned(),
                doc: doc.to_owned(),
                default: None,
                unit: None,
                since: since.trim_end_matches('.').to_owned(),
            });
        }
        comment.clear();
    }
    variables
}

/// Reads a string literal after its opening quote, with `\"`, `\\`, `\n` and continued lines.
fn string(rest: &str) -> Result<String> {
    let mut value = String::new();
    let mut characters = rest.chars().peekable();
    while let Some(character) = characters.next() {
        match character {
            '"' => return Ok(value),
            '\\' => match characters.next() {
                Some('\n') => while characters.next_if(|next| next.is_whitespace()).is_some() {},
                Some('n') => value.push('\n'),
                Some(escaped @ ('"' | '\\')) => value.push(escaped),
                other => bail!("escape {other:?} is not known here"),
            },
            other => value.push(other),
        }
    }
    bail!("a string literal does not end")
}

fn page(crates: &BTreeMap<String, BTreeMap<String, Variable>>) -> Result<String> {
    let mut text = HEAD.to_owned();
    for (name, variables) in crates {
        writeln!(text, "\n## {}\n", title(name))?;
        text.push_str("| variable | default | what it changes | since |\n|---|---|---|---|\n");
        for variable in variables.values() {
            let default = match (&variable.default, &variable.unit) {
                (Some(value), Some(unit)) => format!("`{value}` {unit}"),
                (Some(value), None) => format!("`{value}`"),
                (None, Some(unit)) => format!("– ({unit})"),
                (None, None) => "–".to_owned(),
            };
            let doc = variable.doc.replace('|', "\\|").replace('\n', " ");
            writeln!(text, "| `{}` | {default} | {doc} | {} |", variable.name, variable.since)?;
        }
    }
    Ok(text)
}

fn title(name: &str) -> String {
    match name {
        "cloister" => "Command line and `up`".to_owned(),
        "coordinator" => "Coordinator".to_owned(),
        "host" => "Host agent".to_owned(),
        "service" => "Every role".to_owned(),
        other => format!("`{other}`"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_declaration_is_read_with_continued_lines_and_absent_parts() {
        let text = "/// X.\npub const X: EnvVar = EnvVar {\n    name: \"CLOISTER_X_SECS\",\n    doc: \"One \\\"word\\\", \\\n          two.\",\n    \
            default: Some(\"10\"),\n    unit: None,\n    since: \"0.1.0\",\n};\n\
            const NOT_OURS: EnvVar = EnvVar { name: \"Y\", doc: \"\", default: None, unit: None, since: \"\" };\n";
        let expected = Variable {
            name: "CLOISTER_X_SECS".to_owned(),
            doc: "One \"word\", two.".to_owned(),
            default: Some("10".to_owned()),
            unit: None,
            since: "0.1.0".to_owned(),
        };
        assert_eq!(parse(text).expect("it is a declaration"), [expected]);
    }

    #[test]
    fn a_plain_constant_is_documented_by_its_comment() {
        let text = "/// The bearer.\n/// Of a call. Since 0.1.\npub(crate) const TOKEN_ENV: &str = \"CLOISTER_TOKEN\";\n";
        let found = parse(text).expect("nothing to fail on");
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].doc.as_str(), found[0].since.as_str()), ("The bearer. Of a call.", "0.1"));
    }

    #[test]
    fn what_cannot_be_read_is_an_error() {
        let text =
            "pub const X: EnvVar = EnvVar { name: NAME, doc: \"\", default: None, unit: None, since: \"\" };";
        assert!(parse(text).is_err());
        assert!(string("never ends").is_err());
    }
}
