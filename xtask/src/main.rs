//! Developer tasks that need more than a shell line: generated files, drift checks, and the tidy rules.
//!
//! `cargo xtask gen` writes every generated file; `cargo xtask gen --check` writes nothing and fails when one
//! differs from what it would write.

mod gen_api;

use anyhow::{Result, bail};

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["gen"] => gen_api::run(false),
        ["gen", "--check"] => gen_api::run(true),
        _ => bail!("usage: cargo xtask gen [--check]"),
    }
}
