//! Rust code and the descriptor set from `proto/`, and the table of what each RPC asks of its caller.
//!
//! The `.proto` files are compiled in this process (no `protoc`). Generation fails on an RPC of
//! `cloister.app.v1` without a `cloister.common.v1.access` option: since the Rust traits come from here, an RPC
//! that nobody decided about cannot be compiled.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use prost::Message as _;
use prost_reflect::{DescriptorPool, DynamicMessage, Kind, Value};

const RPC_FILES: &[&str] = &[
    "cloister/common/v1/options.proto",
    "cloister/common/v1/sandbox.proto",
    "cloister/app/v1/errors.proto",
    "cloister/app/v1/sessions.proto",
    "cloister/app/v1/execs.proto",
    "cloister/app/v1/streams.proto",
    "cloister/app/v1/hosts.proto",
    "cloister/app/v1/tokens.proto",
    "cloister/app/v1/audit.proto",
    "cloister/host/v1/link.proto",
];
const GUEST_FILES: &[&str] = &["cloister/guest/v1/guest.proto"];

/// Generates into `crates/api/src/generated`, or with `check` compares and fails on the first difference.
pub(crate) fn run(check: bool) -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("xtask has a parent directory")?;
    let target = root.join("crates/api/src/generated");
    let scratch = root.join("target/xtask-gen");
    let _ = fs::remove_dir_all(&scratch);
    generate(root, &scratch)?;
    let fresh = read_tree(&scratch)?;
    if check {
        let committed = read_tree(&target)?;
        for name in fresh.keys().chain(committed.keys()) {
            ensure!(
                fresh.get(name) == committed.get(name),
                "generated file `{}` is not what `cargo xtask gen` writes: run it and commit the result",
                target.join(name).display()
            );
        }
        return Ok(());
    }
    let _ = fs::remove_dir_all(&target);
    for (name, content) in &fresh {
        let path = target.join(name);
        fs::create_dir_all(path.parent().context("generated file has a parent")?)?;
        fs::write(&path, content).with_context(|| format!("write `{}`", path.display()))?;
    }
    Ok(())
}

fn generate(root: &Path, out: &Path) -> Result<()> {
    for (part, files) in [("rpc", RPC_FILES), ("guest", GUEST_FILES)] {
        let directory = out.join(part);
        fs::create_dir_all(&directory)?;
        let mut compiler = protox::Compiler::new([root.join("proto")])?;
        compiler.include_imports(true).include_source_info(true).open_files(files.iter().copied())?;
        let encoded = compiler.encode_file_descriptor_set();
        let descriptor = out.join(format!("{part}.descriptor.bin"));
        fs::write(&descriptor, &encoded)?;
        let guest = part == "guest";
        connectrpc_build::Config::new()
            .descriptor_set(&descriptor)
            .files(files)
            .out_dir(&directory)
            .include_file("mod.rs")
            .file_per_package(true)
            .generate_json(!guest)
            .gate_client_feature(true)
            .emit_rerun_directives(false)
            .compile()
            .with_context(|| format!("generate `{part}`"))?;
        if guest {
            // Nothing reflects on the guest's protocol.
            fs::remove_file(&descriptor)?;
        } else {
            fs::write(out.join("access.rs"), access_table(&encoded)?)?;
            fs::write(out.join("json_fields.rs"), json_table(&encoded)?)?;
        }
    }
    Ok(())
}

/// The Rust source of the table RPC path → action.
fn access_table(encoded: &[u8]) -> Result<String> {
    let set = prost_reflect::prost_types::FileDescriptorSet::decode(encoded)?;
    let _ = set;
    let pool = DescriptorPool::decode(encoded)?;
    let extension = pool
        .get_extension_by_name("cloister.common.v1.access")
        .context("the `access` option is declared in options.proto")?;
    let mut rows = BTreeMap::new();
    let mut missing = Vec::new();
    for service in pool.services().filter(|s| s.parent_file().package_name() == "cloister.app.v1") {
        for method in service.methods() {
            let path = format!("/{}/{}", service.full_name(), method.name());
            let options = method.options();
            let value = options.get_extension(&extension);
            match access(&value) {
                Some((action, mutation)) => {
                    rows.insert(path, (action, mutation, method.input().full_name().to_owned()));
                }
                None => missing.push(path),
            }
        }
    }
    if !missing.is_empty() {
        bail!("RPC without a `(cloister.common.v1.access)` option: {}", missing.join(", "));
    }
    let mut source = String::from(
        "// Written by `cargo xtask gen` from the `access` options in `proto/`.\n\n\
         /// What each RPC of the app API asks of its caller, sorted by path.\n\
         pub const RPC_ACCESS: &[RpcAccess] = &[\n",
    );
    for (path, (action, mutation, request)) in rows {
        writeln!(
            source,
            "    RpcAccess {{ path: {path:?}, action: {action:?}, mutation: {mutation}, request: {request:?} }},"
        )?;
    }
    source.push_str("];\n");
    Ok(source)
}

/// The Rust source of the table message → fields as JSON names them, for every message that a request can hold.
fn json_table(encoded: &[u8]) -> Result<String> {
    let pool = DescriptorPool::decode(encoded)?;
    let mut pending: Vec<_> = pool
        .services()
        .filter(|service| service.parent_file().package_name() == "cloister.app.v1")
        .flat_map(|service| service.methods().map(|method| method.input()).collect::<Vec<_>>())
        .collect();
    let mut messages = BTreeMap::new();
    while let Some(message) = pending.pop() {
        if messages.contains_key(message.full_name()) {
            continue;
        }
        let mut fields = BTreeMap::new();
        for field in message.fields() {
            // A map is a message with the fields `key` and `value` on the wire; in JSON its keys are data.
            let (shape, inner) = match field.kind() {
                Kind::Message(entry) if field.is_map() => match entry.map_entry_value_field().kind() {
                    Kind::Message(value) => ("Map", Some(value)),
                    _ => ("Scalar", None),
                },
                Kind::Message(inner) if field.is_list() => ("List", Some(inner)),
                Kind::Message(inner) => ("Message", Some(inner)),
                _ => ("Scalar", None),
            };
            // Well-known types have JSON forms of their own: their decoder checks them.
            let shape = match inner {
                Some(inner) if !inner.full_name().starts_with("google.protobuf.") => {
                    let text = format!("{shape}({:?})", inner.full_name());
                    pending.push(inner);
                    text
                }
                _ => "Scalar".to_owned(),
            };
            fields.insert(field.json_name().to_owned(), (field.name().to_owned(), shape));
        }
        messages.insert(message.full_name().to_owned(), fields);
    }
    let mut source = String::from(
        "// Written by `cargo xtask gen` from `proto/`.\n\n\
         /// Every message that a request of the app API can hold, sorted by name.\n\
         pub const JSON_MESSAGES: &[JsonMessage] = &[\n",
    );
    for (message, fields) in messages {
        writeln!(source, "    JsonMessage {{\n        name: {message:?},\n        fields: &[")?;
        for (json, (proto, shape)) in fields {
            writeln!(
                source,
                "            JsonField {{ json: {json:?}, proto: {proto:?}, shape: JsonShape::{shape} }},"
            )?;
        }
        source.push_str("        ],\n    },\n");
    }
    source.push_str("];\n");
    Ok(source)
}

fn access(value: &Value) -> Option<(String, bool)> {
    let message: &DynamicMessage = value.as_message()?;
    let action = message.get_field_by_name("action")?.as_str()?.to_owned();
    let mutation = message.get_field_by_name("mutation")?.as_bool()?;
    (!action.is_empty()).then_some((action, mutation))
}

fn read_tree(directory: &Path) -> Result<BTreeMap<PathBuf, Vec<u8>>> {
    let mut files = BTreeMap::new();
    let mut pending = vec![directory.to_path_buf()];
    while let Some(current) = pending.pop() {
        if !current.exists() {
            continue;
        }
        for entry in fs::read_dir(&current)? {
            let path = entry?.path();
            if path.is_dir() {
                pending.push(path);
            } else {
                files.insert(path.strip_prefix(directory)?.to_path_buf(), fs::read(&path)?);
            }
        }
    }
    Ok(files)
}
