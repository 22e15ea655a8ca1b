//! Builds the static guest binary with a nested cargo and leaves it, with its digest, for `guest_binary.rs` to embed.
//!
//! The nested build has a target directory of its own (`<target>/guest`), so that it never waits for the lock that the
//! outer cargo holds, and names its target explicitly, so that `+crt-static` reaches the binary but not the build
//! scripts and macros. Everything that the outer cargo put into the environment for this script is taken out again:
//! under clippy, for example, `RUSTC_WORKSPACE_WRAPPER` would have the guest checked and not built.

use std::env;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() -> Result<(), Box<dyn Error>> {
    let manifest_dir = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?);
    let out_dir = PathBuf::from(env::var("OUT_DIR")?);
    let host = env::var("HOST")?;
    let workspace = manifest_dir
        .ancestors()
        .nth(2)
        .ok_or("the crate is not two levels below its workspace")?
        .to_path_buf();

    for path in [
        "Cargo.lock",
        "crates/guest/src",
        "crates/guest/Cargo.toml",
        "crates/fault/src",
        "crates/fault/Cargo.toml",
        "crates/types/src",
        "crates/types/Cargo.toml",
        "crates/api/src",
        "crates/api/Cargo.toml",
    ] {
        println!("cargo::rerun-if-changed={}", workspace.join(path).display());
    }
    println!("cargo::rerun-if-changed=build.rs");

    // A release build gets the small binary without assertions; a debug build one that compiles quickly and that
    // accepts the controls of the hostile tests.
    let profile = if env::var("PROFILE")? == "release" { "guest" } else { "guest-dev" };
    let target_dir = target_directory(&out_dir, &workspace).join("guest");

    let mut cargo = Command::new(env::var("CARGO")?);
    cargo
        .current_dir(&workspace)
        .args(["build", "--quiet", "--package", "cloister-guest", "--bin", "cloister-guest"])
        .args(["--profile", profile, "--target", &host])
        .arg("--target-dir")
        .arg(&target_dir);
    for (name, _) in env::vars_os() {
        let Some(name) = name.to_str() else { continue };
        if is_from_outer_build(name) {
            cargo.env_remove(name);
        }
    }
    cargo.env("RUSTFLAGS", "-C target-feature=+crt-static");
    let status = cargo.status()?;
    if !status.success() {
        return Err(format!("the nested build of `cloister-guest` ended with {status}").into());
    }

    let built = target_dir.join(&host).join(profile).join("cloister-guest");
    let bytes = fs::read(&built).map_err(|error| format!("read `{}`: {error}", built.display()))?;
    fs::write(out_dir.join("cloister-guest"), &bytes)?;
    println!("cargo::rustc-env=CLOISTER_GUEST_DIGEST={}", blake3::hash(&bytes).to_hex());
    Ok(())
}

/// Returns the outer build's target directory: the nearest one above `out_dir` that cargo has tagged.
fn target_directory(out_dir: &Path, workspace: &Path) -> PathBuf {
    out_dir
        .ancestors()
        .find(|directory| directory.join("CACHEDIR.TAG").exists())
        .map_or_else(|| workspace.join("target"), Path::to_path_buf)
}

/// Returns whether an environment variable describes the outer build and would mislead the nested one.
fn is_from_outer_build(name: &str) -> bool {
    // What a person sets for every cargo on the machine stays.
    let kept =
        ["CARGO_HOME", "CARGO_NET_", "CARGO_HTTP_", "CARGO_REGISTR", "CARGO_INCREMENTAL", "CARGO_TERM_"];
    if kept.iter().any(|prefix| name.starts_with(prefix)) {
        return false;
    }
    name.starts_with("CARGO")
        || name.starts_with("CLIPPY")
        || matches!(
            name,
            "RUSTC"
                | "RUSTDOC"
                | "RUSTFLAGS"
                | "RUSTDOCFLAGS"
                | "RUSTC_WORKSPACE_WRAPPER"
                | "RUSTC_LINKER"
                | "TARGET"
                | "HOST"
                | "OUT_DIR"
                | "PROFILE"
                | "OPT_LEVEL"
                | "DEBUG"
                | "NUM_JOBS"
                | "MAKEFLAGS"
                | "MFLAGS"
                | "LD_LIBRARY_PATH"
        )
}
