//! `cloister cp` on the real binary: what docs/concepts/files.md and docs/guides/files.md say.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test states what it expects by unwrapping it"
)]

mod support;

use std::fs;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _, symlink};
use std::path::Path;
use std::process::Stdio;

use support::{Up, can_run, kill, wait_for};

const MIB: u64 = 1024 * 1024;

fn hash(path: &Path) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    std::io::copy(&mut fs::File::open(path).unwrap(), &mut hasher).unwrap();
    hasher.finalize()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Makes a file that no compression and no hole helps with.
fn make_big(path: &Path, bytes: u64) {
    let file = fs::File::create(path).unwrap();
    let mut piece = vec![0; usize::try_from(MIB).unwrap()];
    let mut stream = blake3::Hasher::new().update(b"big").finalize_xof();
    for at in 0..bytes / MIB {
        stream.fill(&mut piece);
        file.write_all_at(&piece, at * MIB).unwrap();
    }
}

#[test]
fn a_tree_goes_in_and_comes_back_equal() {
    if !can_run() {
        return;
    }
    let up = Up::start();
    up.run(&["session", "create", "--name", "box"]).expect(0);
    let tree = up.path("tree");
    fs::create_dir_all(tree.join("sub/empty")).unwrap();
    fs::write(tree.join("sub/program"), "#!/bin/sh\necho ran\n").unwrap();
    fs::set_permissions(tree.join("sub/program"), fs::Permissions::from_mode(0o755)).unwrap();
    fs::write(tree.join("Ünïcode name"), "x").unwrap();
    symlink("sub/program", tree.join("link")).unwrap();
    fs::File::create(tree.join("sparse")).unwrap().write_all_at(b"end", 64 * MIB).unwrap();

    up.run(&["cp", text(&tree), "box:"]).expect(0).says(&["copied"]);
    assert_eq!(up.ok(&["exec", "box", "--", "/workspace/tree/link"]), "ran");
    let blocks = up.ok(&["exec", "box", "--", "stat", "-c", "%s %b", "tree/sparse"]);
    let (size, blocks) = blocks.trim().split_once(' ').unwrap();
    assert_eq!(size.parse::<u64>().unwrap(), 64 * MIB + 3);
    assert!(blocks.parse::<u64>().unwrap() < 1024, "a hole was filled: {blocks} blocks");

    up.run(&["cp", "box:tree", text(&up.path("back"))]).expect(0);
    let back = up.path("back");
    for name in ["sub/program", "Ünïcode name", "sparse"] {
        let (one, other) = (fs::metadata(tree.join(name)).unwrap(), fs::metadata(back.join(name)).unwrap());
        assert_eq!(
            (one.mode(), one.mtime(), one.mtime_nsec()),
            (other.mode(), other.mtime(), other.mtime_nsec())
        );
        assert_eq!(hash(&tree.join(name)), hash(&back.join(name)), "{name}");
    }
    assert_eq!(fs::read_link(back.join("link")).unwrap(), Path::new("sub/program"));
    assert!(back.join("sub/empty").is_dir());

    // What is in the directory, into one that is there.
    up.run(&["cp", "box:tree/sub/.", text(&back)]).expect(0);
    assert!(back.join("program").is_file());
    // A file under another name, and what is refused says so.
    up.run(&["cp", text(&tree.join("link")), "box:/tmp/renamed"]).expect(0);
    assert_eq!(up.ok(&["exec", "box", "--", "sh", "/tmp/renamed"]), "ran");
    up.run(&["cp", "-n", text(&tree.join("link")), "box:/tmp/renamed"])
        .expect(1)
        .says(&["it is there already"]);
    up.run(&["cp", "box:/no/such", text(&back)]).expect(1).says(&["`/no/such` is not in session"]);
    up.run(&["cp", text(&tree), "box:/tmp/renamed"]).expect(1).says(&["is a file"]);
    up.run(&["cp", text(&tree), "box:/no/such/parent"]).expect(1).says(&["no such file or directory"]);
    up.run(&["cp", "-u", "nobody", text(&tree), "box:/root/x"]).expect(1).says(&["permission denied"]);
    up.run(&["cp", "-u", "nobody-here", text(&tree), "box:"]).expect(1).says(&["nobody-here"]);
    up.run(&["cp", "a", "b"]).expect(1).says(&["session:path"]);
    let report = up.json(&["cp", "--json", text(&tree), "box:/tmp/json"]);
    assert_eq!(
        (report["entries"].as_u64(), report["problem_count"].as_u64()),
        (Some(7), Some(0)),
        "{report}"
    );
}

/// Both ends are killed in the middle, one after the other; the same command made again goes on.
#[test]
fn a_copy_that_is_killed_at_either_end_goes_on_where_it_was() {
    if !can_run() {
        return;
    }
    let up = Up::start();
    up.run(&["session", "create", "--name", "box", "--disk", "4GiB"]).expect(0);
    let big = up.path("big");
    make_big(&big, 768 * MIB);
    let parts = |directory: &str| {
        let script = format!("cat {directory}/.big*cloister-* 2>/dev/null | wc -c");
        up.ok(&["exec", "box", "--", "sh", "-c", &script]).trim().parse::<u64>().unwrap()
    };

    // Up: the command line is killed, then the host agent during the second attempt, which goes on by itself.
    let mut copying = up.command(&["cp", text(&big), "box:big"]).stderr(Stdio::null()).spawn().unwrap();
    wait_for("a part of the file", || {
        if parts("/workspace") > 32 * MIB { Ok(()) } else { Err("none".to_owned()) }
    });
    copying.kill().unwrap();
    copying.wait().unwrap();
    let kept = parts("/workspace");
    assert!(kept > 32 * MIB && kept < 768 * MIB, "{kept}");
    let again = up.command(&["cp", "--json", text(&big), "box:big"]).stdout(Stdio::piped()).spawn().unwrap();
    wait_for("more of the file", || {
        if parts("/workspace") > kept + 32 * MIB { Ok(()) } else { Err("no more yet".to_owned()) }
    });
    up.kill_role("host");
    let output = again.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(report["resumed_bytes"].as_u64().unwrap() > kept, "{report}");
    assert_eq!(up.ok(&["exec", "box", "--", "sh", "-c", "ls -A /workspace"]), "big");

    // Down: the same two.
    let to = up.path("down");
    let local = || {
        fs::read_dir(up.directory())
            .unwrap()
            .filter_map(Result::ok)
            .find(|entry| entry.file_name().to_string_lossy().starts_with(".down.cloister-"))
            .map_or(0, |entry| entry.metadata().map_or(0, |metadata| metadata.len()))
    };
    let mut copying = up.command(&["cp", "box:big", text(&to)]).stderr(Stdio::null()).spawn().unwrap();
    wait_for("a part of the file", || if local() > 32 * MIB { Ok(()) } else { Err("none".to_owned()) });
    kill(i32::try_from(copying.id()).unwrap(), rustix::process::Signal::KILL);
    copying.wait().unwrap();
    let kept = local();
    let again = up.command(&["cp", "--json", "box:big", text(&to)]).stdout(Stdio::piped()).spawn().unwrap();
    wait_for("more of the file", || if local() > kept { Ok(()) } else { Err("no more yet".to_owned()) });
    up.kill_role("coordinator");
    let output = again.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(report["resumed_bytes"].as_u64().unwrap() >= kept, "{report}");
    assert_eq!(hash(&to), hash(&big));
}

/// A program of the sandbox swaps a directory for a link, in a loop, while files are copied into it and out of it. Neither
/// goes through the link.
#[test]
fn a_directory_that_is_swapped_for_a_link_meanwhile_leads_nowhere() {
    if !can_run() {
        return;
    }
    let up = Up::start();
    up.run(&["session", "create", "--name", "box"]).expect(0);
    // Where the link leads is there on both sides, to be written to by whoever follows it.
    let outside = up.path("outside");
    fs::create_dir(&outside).unwrap();
    let outside = text(&outside);
    let script = format!(
        "mkdir -p /tmp/outside t/d t/e; echo inside > t/d/name; ln -s /tmp/outside t/in; ln -s {outside} t/out; cd t; \
         while :; do mv d e/d; cp -P in d; rm d; cp -P out d; rm d; mv e/d d; done"
    );
    up.run(&["exec", "-d", "box", "--", "sh", "-c", &script]).expect(0);
    let upload = up.path("upload");
    fs::create_dir_all(upload.join("d")).unwrap();
    fs::write(upload.join("d/planted"), "planted").unwrap();
    let (mut through, mut refused) = (0, 0);
    for round in 0..300 {
        if through >= 20 && refused >= 3 {
            break;
        }
        // Names come and go while it looks, so that problems are expected.
        let _ = up.run(&["cp", "box:t", text(&up.path(&format!("round-{round}")))]);
        let copied = up.command(&["cp", &format!("{}/.", text(&upload)), "box:t"]).output().unwrap();
        if copied.status.success() { through += 1 } else { refused += 1 }
    }
    println!("{through} copies met the directory, {refused} the link or nothing");
    assert!(through >= 20 && refused >= 3, "the race was not met: {through} and {refused}");
    assert_eq!(up.ok(&["exec", "box", "--", "ls", "-A", "/tmp/outside"]), "");
    assert_eq!(fs::read_dir(outside).unwrap().count(), 0);
}
