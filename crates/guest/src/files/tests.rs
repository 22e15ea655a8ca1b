//! Proves what `docs/concepts/files.md` says of transfers: trees arrive equal, cut ones go on, hostile ones stay inside.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::os::unix::net::UnixStream;
use std::path::Path;

use cloister_api::guest;

use super::*;
use crate::frames::Body;

fn open(path: &Path) -> OwnedFd {
    fs::File::open(path).unwrap().into()
}

/// Carries `from` to `top` below `to`, through both roles.
fn carry(from: &Path, to: &Path, top: &[u8]) -> (Report, Report) {
    let (one, other) = UnixStream::pair().unwrap();
    let (from, to) = (open(from), open(to));
    let options = ReceiverOptions { top: top.to_vec(), ..ReceiverOptions::default() };
    let receiving = std::thread::spawn(move || {
        let mut link = FileLink::new(other).unwrap();
        Receiver::new(&mut link, to, options, &mut |_| {}).run().unwrap()
    });
    let mut link = FileLink::new(one).unwrap();
    let sent = Sender::new(&mut link, None, &mut |_| {}).run(from, b"").unwrap();
    (sent, receiving.join().unwrap())
}

/// Lets `messages` be said to a receiver into `to`; returns what became of it.
fn receive(to: &Path, messages: Vec<Body>) -> Result<Report, FilesError> {
    let (one, other) = UnixStream::pair().unwrap();
    let to = open(to);
    let receiving = std::thread::spawn(move || {
        let mut link = FileLink::new(other).unwrap();
        Receiver::new(&mut link, to, ReceiverOptions::default(), &mut |_| {}).run()
    });
    let mut link = FileLink::new(one).unwrap();
    for message in messages {
        if link.queue(message).is_err() {
            break;
        }
    }
    let _ = link.flush();
    // What it says is of no interest, but must not keep it from going on.
    while let Ok(Some(_)) = link.receive() {}
    receiving.join().unwrap()
}

fn entry(path: &str, kind: guest::FileKind, size: u64, link_target: &str) -> Body {
    let info = guest::FileInfo {
        kind: kind.into(),
        mode: 0o755,
        size,
        link_target: link_target.as_bytes().to_vec(),
        ..Default::default()
    };
    guest::FileEntry { path: path.as_bytes().to_vec(), info: info.into(), ..Default::default() }.into()
}

fn file(path: &str, content: &[u8]) -> Vec<Body> {
    let size = u64::try_from(content.len()).unwrap();
    vec![
        entry(path, guest::FileKind::FILE_KIND_FILE, size, ""),
        guest::FileData { data: content.to_vec(), ..Default::default() }.into(),
        guest::FileEnd { hash: blake3::hash(content).as_bytes().to_vec(), ..Default::default() }.into(),
    ]
}

fn end() -> Body {
    guest::TransferEnd::default().into()
}

#[test]
fn a_tree_arrives_with_modes_times_links_and_holes() {
    let scratch = tempfile::tempdir().unwrap();
    let (from, to) = (scratch.path().join("from"), scratch.path().join("to"));
    fs::create_dir_all(from.join("closed/empty")).unwrap();
    fs::create_dir(&to).unwrap();
    fs::write(from.join("closed/program"), b"#!/bin/sh\n").unwrap();
    fs::set_permissions(from.join("closed/program"), fs::Permissions::from_mode(0o751)).unwrap();
    symlink("../elsewhere", from.join("link")).unwrap();
    let sparse = fs::File::create(from.join("sparse")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&sparse, b"end", 40 * 1024 * 1024).unwrap();
    fs::set_permissions(from.join("closed"), fs::Permissions::from_mode(0o550)).unwrap();

    let (sent, received) = carry(&from, &to, b"copy");

    assert_eq!((sent.problem_count, sent.entries, received.entries), (0, 6, 6), "{sent:?}");
    let copy = to.join("copy");
    let program = fs::metadata(copy.join("closed/program")).unwrap();
    assert_eq!(program.mode() & 0o7777, 0o751);
    assert_eq!(program.mtime_nsec(), fs::metadata(from.join("closed/program")).unwrap().mtime_nsec());
    assert_eq!(fs::metadata(copy.join("closed")).unwrap().mode() & 0o7777, 0o550);
    assert!(copy.join("closed/empty").is_dir());
    assert_eq!(fs::read_link(copy.join("link")).unwrap(), Path::new("../elsewhere"));
    let sparse = fs::metadata(copy.join("sparse")).unwrap();
    assert_eq!(sparse.len(), 40 * 1024 * 1024 + 3);
    assert!(sparse.blocks() * 512 < 1024 * 1024, "{} blocks", sparse.blocks());
    assert_eq!(fs::read(copy.join("sparse")).unwrap(), fs::read(from.join("sparse")).unwrap());
}

#[test]
fn a_cut_file_goes_on_where_it_was_cut_and_only_if_it_is_the_same() {
    let scratch = tempfile::tempdir().unwrap();
    let (from, to) = (scratch.path().join("big"), scratch.path().join("to"));
    let content: Vec<u8> = (0..24 * 1024 * 1024_u32).map(|index| (index % 251) as u8).collect();
    fs::write(&from, &content).unwrap();
    fs::create_dir(&to).unwrap();
    // What a killed receiver leaves: the beginning, under a name that says of what.
    let stat = rustix::fs::stat(&from).unwrap();
    let info = info::from_stat(&stat);
    let directory = open(&to);
    let name = c"copy";
    let mut left = part::Part::open(std::os::fd::AsFd::as_fd(&directory), name, &info, true).unwrap();
    left.write(0, &content[..10_000_000]).unwrap();
    drop(left);

    let (sent, _) = carry(&from, &to, b"copy");
    assert_eq!((sent.resumed_bytes, sent.problem_count), (10_000_000, 0));
    assert_eq!(fs::read(to.join("copy")).unwrap(), content);
    assert_eq!(fs::read_dir(&to).unwrap().count(), 1, "a part is left");

    let mut left = part::Part::open(std::os::fd::AsFd::as_fd(&directory), name, &info, true).unwrap();
    left.write(0, &[7; 5_000_000]).unwrap();
    drop(left);
    let (sent, _) = carry(&from, &to, b"copy");
    assert_eq!(sent.resumed_bytes, 0, "another file's beginning was taken up");
    assert_eq!(fs::read(to.join("copy")).unwrap(), content);
}

#[test]
fn a_part_that_somebody_else_laid_out_is_not_taken_up() {
    if !rustix::process::geteuid().is_root() {
        println!("SKIP: giving a file to another user needs root");
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let (from, to) = (scratch.path().join("big"), scratch.path().join("to"));
    fs::write(&from, vec![3; 9 * 1024 * 1024]).unwrap();
    fs::create_dir(&to).unwrap();
    let info = info::from_stat(&rustix::fs::stat(&from).unwrap());
    let mut left = part::Part::open(std::os::fd::AsFd::as_fd(&open(&to)), c"copy", &info, true).unwrap();
    left.write(0, &[3; 1024]).unwrap();
    let planted = fs::read_dir(&to).unwrap().next().unwrap().unwrap().path();
    std::os::unix::fs::chown(&planted, Some(1234), Some(1234)).unwrap();

    let (sent, _) = carry(&from, &to, b"copy");
    assert_eq!((sent.resumed_bytes, sent.problem_count), (0, 0));
    assert_eq!(fs::metadata(to.join("copy")).unwrap().uid(), 0);
}

#[test]
fn a_tree_goes_on_behind_the_last_path_that_was_written() {
    let scratch = tempfile::tempdir().unwrap();
    let (from, to) = (scratch.path().join("from"), scratch.path().join("to"));
    for file in ["a/1", "b/1", "b/2", "b/3", "b-/1", "c"] {
        fs::create_dir_all(from.join(file).parent().unwrap()).unwrap();
        fs::write(from.join(file), file).unwrap();
    }
    fs::create_dir(&to).unwrap();
    let (one, other) = UnixStream::pair().unwrap();
    let directory = open(&to);
    let receiving = std::thread::spawn(move || {
        let mut link = FileLink::new(other).unwrap();
        Receiver::new(&mut link, directory, ReceiverOptions::default(), &mut |_| {}).run().unwrap()
    });
    let mut link = FileLink::new(one).unwrap();
    Sender::new(&mut link, Some(b"b/2".to_vec()), &mut |_| {}).run(open(&from), b"").unwrap();
    receiving.join().unwrap();
    let arrived = |file: &str| to.join(file).exists();
    assert_eq!(["a", "b/1", "b/2"].map(arrived), [false; 3]);
    assert_eq!(["b/3", "b-/1", "c"].map(arrived), [true; 3]);
}

#[test]
fn a_file_without_a_size_is_no_empty_file() {
    let to = tempfile::tempdir().unwrap();
    let (sent, received) = carry(Path::new("/proc/version"), to.path(), b"copy");
    assert_eq!((sent.problem_count, received.problem_count), (1, 1), "{sent:?}");
    assert!(sent.problems[0].message.contains("no size"), "{sent:?}");
    assert_eq!(fs::read_dir(to.path()).unwrap().count(), 0);
}

#[test]
fn what_cannot_be_read_or_written_is_told_and_the_rest_arrives() {
    let scratch = tempfile::tempdir().unwrap();
    let (from, to) = (scratch.path().join("from"), scratch.path().join("to"));
    fs::create_dir_all(&from).unwrap();
    fs::create_dir_all(to.join("taken")).unwrap();
    fs::write(from.join("taken"), b"a directory stands in its place").unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, from.join("pipe"), rustix::fs::Mode::RWXU).unwrap();
    fs::write(from.join("zebra"), b"last").unwrap();

    let (sent, received) = carry(&from, &to, b"");

    assert_eq!(sent.problem_count, 2, "{sent:?}");
    assert_eq!(received.problem_count, 2, "{received:?}");
    let paths: Vec<&[u8]> = received.problems.iter().map(|problem| problem.path.as_slice()).collect();
    assert_eq!(paths, [&b"pipe"[..], b"taken"]);
    assert_eq!(fs::read(to.join("zebra")).unwrap(), b"last");
}

#[test]
fn a_hostile_sender_writes_nowhere_else() {
    let scratch = tempfile::tempdir().unwrap();
    let (to, outside) = (scratch.path().join("to"), scratch.path().join("outside"));
    fs::create_dir(&to).unwrap();
    fs::create_dir(&outside).unwrap();
    let link = guest::FileKind::FILE_KIND_SYMLINK;
    let out = outside.to_str().unwrap();
    let escapes = [
        file("../outside/a", b"x"),
        file("/tmp/cloister-escape", b"x"),
        file("b/../../outside/b", b"x"),
        // Through a link that it made itself, as a directory and as the file's place.
        [vec![entry("link", link, 0, out)], file("link/c", b"x")].concat(),
        [vec![entry("d", link, 0, &format!("{out}/d"))], file("d", b"harmless")].concat(),
        [
            vec![entry("e", link, 0, out)],
            vec![entry("e", guest::FileKind::FILE_KIND_DIRECTORY, 0, "")],
            file("e/e", b"x"),
        ]
        .concat(),
    ];
    for mut messages in escapes {
        messages.push(end());
        let _ = receive(&to, messages);
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
        assert!(!Path::new("/tmp/cloister-escape").exists());
    }
    // The same without the trick works.
    let report = receive(
        &to,
        [vec![entry("f", guest::FileKind::FILE_KIND_DIRECTORY, 0, "")], file("f/f", b"x"), vec![end()]]
            .concat(),
    );
    assert_eq!(report.unwrap().problem_count, 0);
    assert_eq!(fs::read(to.join("f/f")).unwrap(), b"x");
    assert_eq!(fs::read(to.join("d")).unwrap(), b"harmless");
}

#[test]
fn content_of_another_hash_or_size_is_put_nowhere() {
    let to = tempfile::tempdir().unwrap();
    let mut forged = file("a", b"what was announced");
    forged[1] = guest::FileData { data: b"something else now".to_vec(), ..Default::default() }.into();
    forged.push(end());
    let report = receive(to.path(), forged).unwrap();
    assert_eq!((report.problem_count, report.entries), (1, 0));

    let too_much = vec![
        entry("b", guest::FileKind::FILE_KIND_FILE, 3, ""),
        guest::FileData { data: b"four".to_vec(), ..Default::default() }.into(),
    ];
    assert!(receive(to.path(), too_much).is_err());
    let left: Vec<_> = fs::read_dir(to.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_root_is_not_left() {
    let scratch = tempfile::tempdir().unwrap();
    let inside = scratch.path().join("root");
    fs::create_dir_all(inside.join("etc")).unwrap();
    fs::write(scratch.path().join("secret"), b"outside").unwrap();
    fs::write(inside.join("secret"), b"inside").unwrap();
    symlink("/secret", inside.join("etc/absolute")).unwrap();
    symlink("../../../../secret", inside.join("etc/up")).unwrap();
    let root = Root::at(&inside).unwrap();
    for path in ["/secret", "/../secret", "/etc/absolute", "/etc/up", "etc/../../secret"] {
        let fd = root.open(path.as_bytes(), rustix::fs::OFlags::RDONLY).unwrap();
        assert_eq!(std::io::read_to_string(fs::File::from(fd)).unwrap(), "inside", "{path}");
    }
}
