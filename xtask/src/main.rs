//! Developer tasks that need more than a shell line: generated files, drift checks, and the tidy rules.
//!
//! `cargo xtask gen` writes every generated file; `cargo xtask gen --check` writes nothing and fails when one
//! differs from what it would write. `cargo xtask tidy` checks the rules of the tree that no compiler knows.
//! `cargo xtask sqlx [--check]` does for the store's metadata what `gen` does for the rest; it needs PostgreSQL's programs.

mod configuration;
mod gen_api;
mod session_states;
mod sqlx_metadata;
mod tidy;

use anyhow::{Result, bail};

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["gen"] => generate(false),
        ["gen", "--check"] => generate(true),
        ["tidy"] => tidy::run(),
        ["sqlx"] => sqlx_metadata::run(false),
        ["sqlx", "--check"] => sqlx_metadata::run(true),
        _ => bail!("usage: cargo xtask gen|sqlx [--check] | tidy"),
    }
}

fn generate(check: bool) -> Result<()> {
    gen_api::run(check)?;
    session_states::run(check)?;
    configuration::run(check)
}
