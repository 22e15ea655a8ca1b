//! Proves the module's claims: every byte from an offset on or an announced gap, within the bound, after any crash.

use std::path::Path;

use cloister_types::exec::ExecRecord;
use cloister_types::{ExecId, ExecSpec, OutputFrame, OutputStream};
use proptest::prelude::*;

use super::*;

fn directory() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

/// The byte at an offset, so that a reader can be checked without keeping what was written.
fn byte_at(offset: u64) -> u8 {
    u8::try_from((offset.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) & 0xff).unwrap()
}

fn bytes_from(offset: u64, count: usize) -> Vec<u8> {
    (0..as_offset(count)).map(|index| byte_at(offset + index)).collect()
}

fn stream_of(index: usize) -> OutputStream {
    if index.is_multiple_of(3) { OutputStream::Stderr } else { OutputStream::Stdout }
}

/// Reads to the end, checks continuity and content; returns the bytes read and the bytes announced as gone.
fn drain(reader: &mut Reader, end: Option<u64>) -> (u64, u64) {
    let (mut data_bytes, mut gap_bytes) = (0, 0);
    let mut expected = reader.position();
    while let Some(chunk) = reader.next(end).unwrap() {
        match chunk {
            Chunk::Data { offset, data, .. } => {
                assert_eq!(offset, expected);
                assert!(!data.is_empty() && data.len() <= 64 * 1024);
                assert_eq!(data, bytes_from(offset, data.len()));
                expected += as_offset(data.len());
                data_bytes += as_offset(data.len());
            }
            Chunk::Gap { from, to } => {
                assert_eq!(from, expected);
                assert!(to > from);
                expected = to;
                gap_bytes += to - from;
            }
        }
    }
    assert_eq!(expected, reader.position());
    (data_bytes, gap_bytes)
}

fn disk_bytes(dir: &Path) -> u64 {
    std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum()
}

fn append(writer: &mut Writer, count: usize, needed_from: Option<u64>) -> Result<(), AppendError> {
    let offset = writer.next_offset();
    let stream = stream_of(usize::try_from(offset).unwrap());
    writer.append(stream, &bytes_from(offset, count), needed_from)
}

#[test]
fn the_oldest_bytes_go_and_the_gap_says_which() {
    let dir = directory();
    let mut writer = Writer::new(dir.path().to_owned(), 64 * 1024);
    for _ in 0..100 {
        append(&mut writer, 4000, None).unwrap();
        assert!(disk_bytes(dir.path()) <= 64 * 1024);
    }
    assert_eq!(writer.kept_bytes(), disk_bytes(dir.path()));
    let (data, gap) = drain(&mut Reader::new(dir.path(), 0), Some(writer.next_offset()));
    assert_eq!(data + gap, 400_000);
    assert!(data >= 40_000, "only {data} bytes are kept");
    assert!(gap > 0);
}

#[test]
fn an_attached_reader_stops_the_writer_and_reading_lets_it_go_on() {
    let dir = directory();
    let mut writer = Writer::new(dir.path().to_owned(), 64 * 1024);
    let mut reader = Reader::new(dir.path(), 0);
    let mut blocked = 0;
    let mut read = 0;
    while writer.next_offset() < 1_000_000 {
        match append(&mut writer, 4000, Some(reader.position())) {
            Ok(()) => {}
            Err(AppendError::WouldBlock) => {
                blocked += 1;
                let Some(Chunk::Data { data, .. }) = reader.next(Some(writer.next_offset())).unwrap() else {
                    panic!("a reader that stops the writer has something to read");
                };
                read += as_offset(data.len());
            }
            Err(error) => panic!("{error}"),
        }
        assert!(disk_bytes(dir.path()) <= 64 * 1024);
    }
    assert!(blocked > 100, "blocked {blocked} times");
    let (rest, gap) = drain(&mut reader, Some(writer.next_offset()));
    assert_eq!((read + rest, gap), (1_000_000, 0));
}

#[test]
fn a_torn_record_ends_the_output_and_a_live_one_goes_on() {
    let dir = directory();
    let mut writer = Writer::new(dir.path().to_owned(), 1024 * 1024);
    append(&mut writer, 1000, None).unwrap();
    append(&mut writer, 500, None).unwrap();
    let segment = dir.path().join(segment_name(0));
    let whole = std::fs::read(&segment).unwrap();
    for cut in 1006..whole.len() {
        std::fs::write(&segment, &whole[..cut]).unwrap();
        let mut reader = Reader::new(dir.path(), 10);
        assert_eq!(drain(&mut reader, None), (990, 0), "cut at {cut}");
        std::fs::write(&segment, &whole).unwrap();
        assert_eq!(drain(&mut reader, None), (500, 0), "cut at {cut}");
    }
}

#[test]
fn bytes_the_disk_did_not_take_are_a_gap() {
    let dir = directory();
    let lower = dir.path().join("spool");
    std::fs::create_dir(&lower).unwrap();
    let mut writer = Writer::new(lower.clone(), 256);
    append(&mut writer, 10, None).unwrap();
    // Without its directory no new segment can be made; a record that needs one is lost.
    std::fs::rename(&lower, dir.path().join("aside")).unwrap();
    assert!(matches!(append(&mut writer, 50, None), Err(AppendError::Lost(_))));
    std::fs::rename(dir.path().join("aside"), &lower).unwrap();
    append(&mut writer, 20, None).unwrap();
    assert_eq!(writer.next_offset(), 80);
    assert_eq!(drain(&mut Reader::new(&lower, 0), Some(80)), (30, 50));
}

#[test]
fn the_last_frame_of_an_ended_exec_is_its_exit() {
    let dir = directory();
    let record = ExecRecord {
        exec_id: ExecId::from_u128(1),
        request_id: "r".to_owned(),
        spec: ExecSpec { argv: vec!["true".to_owned()], ..ExecSpec::default() },
        pid: 0,
        started_unix_ms: 5,
        exit: None,
    };
    write_spec(dir.path(), &record).unwrap();
    assert_eq!(read_record(dir.path()).unwrap(), record);
    let mut writer = Writer::new(dir.path().to_owned(), 1024);
    append(&mut writer, 100, None).unwrap();
    let mut open = EndedReader::new(dir.path(), 100, None);
    assert_eq!(open.next().unwrap(), Some(OutputFrame::End { next_offset: 100 }));
    assert_eq!(open.next().unwrap(), None);

    let sealed = seal(dir.path(), "the shim is gone", 9).unwrap();
    assert_eq!(read_record(dir.path()).unwrap(), sealed);
    assert_eq!(seal(dir.path(), "again", 10).unwrap(), sealed);
    let exit = sealed.exit.clone().unwrap();
    assert_eq!(exit.output_bytes, 100);
    let mut reader = EndedReader::new(dir.path(), 0, sealed.exit);
    let mut frames = Vec::new();
    while let Some(frame) = reader.next().unwrap() {
        frames.push(frame);
    }
    assert_eq!(frames.last(), Some(&OutputFrame::Exit(exit)));
}

#[test]
fn records_are_listed_oldest_first_and_strangers_are_passed_over() {
    let dir = directory();
    for (body, started) in [(1, 30), (2, 10), (3, 20)] {
        let record = ExecRecord {
            exec_id: ExecId::from_u128(body),
            request_id: String::new(),
            spec: ExecSpec::default(),
            pid: 0,
            started_unix_ms: started,
            exit: None,
        };
        let exec = dir.path().join(record.exec_id.as_str());
        std::fs::create_dir(&exec).unwrap();
        write_spec(&exec, &record).unwrap();
    }
    std::fs::create_dir(dir.path().join("stranger")).unwrap();
    std::fs::create_dir(dir.path().join(ExecId::from_u128(4).as_str())).unwrap();
    let started: Vec<u64> =
        read_records(dir.path()).unwrap().iter().map(|record| record.started_unix_ms).collect();
    assert_eq!(started, [10, 20, 30]);
    assert!(read_records(&dir.path().join("none")).unwrap().is_empty());
}

#[derive(Debug, Clone)]
enum Step {
    Write(usize),
    Read(usize),
    Attach(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (1_usize..9000).prop_map(Step::Write),
        4 => (1_usize..6).prop_map(Step::Read),
        1 => any::<u64>().prop_map(Step::Attach),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn any_reader_sees_every_byte_or_a_gap(
        steps in proptest::collection::vec(step(), 1..80),
        bound in prop_oneof![Just(300_u64), 1_000_u64..100_000],
        holds in any::<bool>(),
    ) {
        let dir = directory();
        let mut writer = Writer::new(dir.path().to_owned(), bound);
        let mut reader = Reader::new(dir.path(), 0);
        let mut attached_at = 0;
        for step in steps {
            match step {
                Step::Write(count) => {
                    let needed = holds.then(|| reader.position());
                    match append(&mut writer, count, needed) {
                        Ok(()) => prop_assert!(writer.kept_bytes() <= bound),
                        Err(AppendError::WouldBlock) => prop_assert!(holds && reader.position() < writer.next_offset()),
                        Err(error) => prop_assert!(false, "{error}"),
                    }
                    prop_assert_eq!(disk_bytes(dir.path()), writer.kept_bytes());
                }
                Step::Read(count) => {
                    for _ in 0..count {
                        let before = reader.position();
                        match reader.next(Some(writer.next_offset())).unwrap() {
                            Some(Chunk::Data { offset, data, .. }) => {
                                prop_assert_eq!(offset, before);
                                prop_assert_eq!(&data, &bytes_from(offset, data.len()));
                                prop_assert_eq!(reader.position(), before + as_offset(data.len()));
                            }
                            Some(Chunk::Gap { from, to }) => {
                                prop_assert_eq!(from, before);
                                prop_assert!(to > from);
                                // Only a bound smaller than one write can overtake a reader that is held for.
                                prop_assert!(!holds || bound < 9100 || attached_at == before);
                            }
                            None => prop_assert_eq!(before, writer.next_offset()),
                        }
                    }
                }
                Step::Attach(at) => {
                    attached_at = at % (writer.next_offset() + 1);
                    reader = Reader::new(dir.path(), attached_at);
                }
            }
        }
        drain(&mut Reader::new(dir.path(), 0), Some(writer.next_offset()));
    }
}
