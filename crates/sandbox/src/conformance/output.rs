//! Standard input and output: whole, in order, once, and never a silent end.

use std::time::Duration;

use cloister_types::{ExecSpec, ExitReason, OutputFrame};

use super::{Fixture, Output, Program, Subject, within};
use crate::backend::SandboxError;

/// Returns what [`Program::Count`] prints.
fn counted(last: u64) -> Vec<u8> {
    let mut text = Vec::new();
    for number in 1..=last {
        text.extend(number.to_string().bytes());
        text.push(b'\n');
    }
    text
}

/// Returns a number whose count has a bit more than this many bytes.
fn last_for(bytes: u64) -> u64 {
    // Numbers of six and seven digits take at most eight bytes each, and those below a million 6,888,896 together.
    if bytes < 6_000_000 { bytes / 5 } else { 1_000_000 + (bytes - 6_000_000) / 7 }
}

pub(super) async fn stdout_and_stderr_are_kept_apart(subject: &dyn Subject) {
    let fixture = Fixture::new(subject).await;
    let (exit, output) = fixture.run(&Program::EchoBoth("to out".to_owned(), "to err".to_owned())).await;
    assert_eq!((output.stdout.as_slice(), output.stderr.as_slice()), (&b"to out\n"[..], &b"to err\n"[..]));
    assert_eq!((exit.output_bytes, output.next_offset), (14, 14));
    fixture.end().await;
}

pub(super) async fn standard_input_arrives_whole_and_once(subject: &dyn Subject) {
    let fixture = Fixture::new(subject).await;
    let input = counted(400_000);
    let total = u64::try_from(input.len()).expect("it is small");
    let exec_id = fixture.start_spec(ExecSpec { stdin: true, ..fixture.exec_spec(&Program::Cat) }).await;
    // Attached before anything is written: without a reader the oldest output would go.
    let reader = fixture.sandbox.read_output(&exec_id, 0, false).await.expect("read output");
    let write = async {
        let mut offset = 0;
        for piece in input.chunks(100_000) {
            let written =
                within("a write", fixture.sandbox.write_stdin(&exec_id, offset, piece, false)).await;
            let next = written.expect("write");
            assert_eq!(next, offset + u64::try_from(piece.len()).expect("it is small"));
            // A repetition, as after a lost answer, changes nothing.
            let repeated = fixture.sandbox.write_stdin(&exec_id, offset, piece, false).await;
            assert_eq!(repeated.expect("write again"), next);
            offset = next;
        }
        let closed = fixture.sandbox.write_stdin(&exec_id, offset, b"", true).await;
        assert_eq!(closed.expect("close"), total);
    };
    let ((), output) = tokio::join!(write, Output::collect(reader, 0));
    assert_eq!(output.exit.as_ref().map(|exit| exit.code), Some(0));
    assert_eq!(output.gaps, []);
    assert_eq!(blake3::hash(&output.stdout), blake3::hash(&input));
    let refused = fixture.sandbox.write_stdin(&exec_id, total, b"more", false).await;
    assert!(matches!(refused, Err(SandboxError::Invalid(_))), "{refused:?}");
    fixture.end().await;
}

pub(super) async fn standard_input_with_a_hole_is_refused(subject: &dyn Subject) {
    let fixture = Fixture::new(subject).await;
    let exec_id = fixture.start_spec(ExecSpec { stdin: true, ..fixture.exec_spec(&Program::Cat) }).await;
    let refused = fixture.sandbox.write_stdin(&exec_id, 5, b"late", false).await;
    assert!(matches!(refused, Err(SandboxError::Invalid(_))), "{refused:?}");
    assert_eq!(fixture.sandbox.write_stdin(&exec_id, 0, b"early", true).await.expect("write"), 5);
    assert_eq!(fixture.read(&exec_id, 0).await.text(), "early");
    // A program that was given no standard input reads its end at once.
    let (exit, output) = fixture.run(&Program::Cat).await;
    assert_eq!((exit.code, output.stdout.len()), (0, 0));
    fixture.end().await;
}

pub(super) async fn another_handle_reads_on_from_an_offset(subject: &dyn Subject) {
    let fixture = Fixture::new(subject).await;
    let exec_id = fixture
        .start_spec(ExecSpec {
            stdin: true,
            ..fixture.exec_spec(&Program::EchoReadEcho("first".to_owned(), "second".to_owned()))
        })
        .await;
    let mut output = Output::default();
    {
        let mut reader = fixture.sandbox.read_output(&exec_id, 0, false).await.expect("read output");
        let frame = within("the first line", reader.next()).await.expect("read a frame");
        output.add(frame.expect("the stream goes on"));
    }
    let offset = output.next_offset;
    assert_eq!(output.text(), "first\n");
    let second = subject.second_backend();
    let (adopted, _) = second.adopt().await.expect("adopt");
    let other = adopted
        .into_iter()
        .find(|sandbox| sandbox.spec().session_id == fixture.spec.session_id)
        .expect("the sandbox is adopted");
    other.write_stdin(&exec_id, 0, b"go\n", true).await.expect("write");
    let reader = other.read_output(&exec_id, offset, false).await.expect("read on");
    let rest = Output::collect(reader, offset).await;
    assert_eq!((rest.text().as_str(), rest.exit.map(|exit| exit.code)), ("second\n", Some(0)));
    fixture.end().await;
}

pub(super) async fn a_reader_that_does_not_follow_ends_at_the_newest_byte(subject: &dyn Subject) {
    let fixture = Fixture::new(subject).await;
    let exec_id = fixture.start(&Program::EchoAndSleep("so far".to_owned(), 600)).await;
    fixture.wait_for_output(&exec_id).await;
    let reader = fixture.sandbox.read_output(&exec_id, 0, true).await.expect("read output");
    let output = Output::collect(reader, 0).await;
    assert_eq!((output.text().as_str(), output.exit.as_ref()), ("so far\n", None));
    let reader = fixture.sandbox.read_output(&exec_id, output.next_offset, true).await.expect("read output");
    assert_eq!(Output::collect(reader, output.next_offset).await.stdout, b"");
    fixture.end().await;
}

pub(super) async fn every_stream_ends_with_the_exit(subject: &dyn Subject) {
    let fixture = Fixture::new(subject).await;
    let exec_id = fixture.start(&Program::Exit(9)).await;
    fixture.wait(&exec_id).await;
    for _ in 0..2 {
        let mut reader = fixture.sandbox.read_output(&exec_id, 0, false).await.expect("read output");
        let frame = within("the exit", reader.next()).await.expect("read a frame");
        assert!(matches!(&frame, Some(OutputFrame::Exit(exit)) if exit.code == 9), "{frame:?}");
        assert_eq!(within("the end", reader.next()).await.expect("read past the end"), None);
    }
    fixture.end().await;
}

pub(super) async fn large_output_arrives_equal(subject: &dyn Subject) {
    let fixture = Fixture::new(subject).await;
    // As much as is kept without a reader.
    let expected = counted(last_for(subject.spool_max_bytes() / 4 * 3));
    let last = last_for(subject.spool_max_bytes() / 4 * 3);
    let (exit, output) = fixture.run(&Program::Count(last)).await;
    assert_eq!(output.gaps, []);
    assert_eq!(exit.output_bytes, u64::try_from(expected.len()).expect("it fits"));
    assert_eq!(blake3::hash(&output.stdout), blake3::hash(&expected));
    fixture.end().await;
}

pub(super) async fn an_attached_reader_loses_nothing_beyond_the_spool(subject: &dyn Subject) {
    let fixture = Fixture::new(subject).await;
    let last = last_for(subject.spool_max_bytes() * 4);
    let exec_id =
        fixture.start_spec(ExecSpec { stdin: true, ..fixture.exec_spec(&Program::ReadAndCount(last)) }).await;
    let reader = fixture.sandbox.read_output(&exec_id, 0, false).await.expect("read output");
    fixture.sandbox.write_stdin(&exec_id, 0, b"go\n", true).await.expect("write");
    // Only now does somebody read: the program had to wait.
    let output = Output::collect(reader, 0).await;
    assert_eq!(output.gaps, []);
    assert_eq!(blake3::hash(&output.stdout), blake3::hash(&counted(last)));
    fixture.end().await;
}

pub(super) async fn without_a_reader_the_oldest_output_is_a_gap(subject: &dyn Subject) {
    let fixture = Fixture::new(subject).await;
    let last = last_for(subject.spool_max_bytes() * 3);
    let exec_id = fixture.start(&Program::Count(last)).await;
    let exit = fixture.exit(&exec_id).await;
    let expected = counted(last);
    assert_eq!(exit.output_bytes, u64::try_from(expected.len()).expect("it fits"));
    let output = fixture.read(&exec_id, 0).await;
    let [(0, to)] = output.gaps[..] else { panic!("not one gap at the start: {:?}", output.gaps) };
    let kept = exit.output_bytes - to;
    assert!(kept <= subject.spool_max_bytes() && kept > 0, "{kept} bytes are kept");
    assert_eq!(output.stdout, expected[usize::try_from(to).expect("it fits")..]);
    fixture.end().await;
}

pub(super) async fn a_lost_sandbox_ends_streams_with_an_exit(subject: &dyn Subject) {
    let fixture = Fixture::new(subject).await;
    let exec_id = fixture.start(&Program::EchoAndSleep("last words".to_owned(), 600)).await;
    let mut reader = fixture.sandbox.read_output(&exec_id, 0, false).await.expect("read output");
    let mut output = Output::default();
    output.add(within("the line", reader.next()).await.expect("read a frame").expect("it goes on"));
    let (stopped, end) = tokio::join!(fixture.sandbox.stop(Duration::ZERO), async {
        loop {
            match within("the stream's end", reader.next()).await {
                Ok(Some(OutputFrame::Exit(exit))) => break Some(exit),
                Ok(Some(frame)) => output.add(frame),
                // A cut stream is an error and not an end.
                Err(_) => break None,
                Ok(None) => panic!("the stream ended without an exit"),
            }
        }
    });
    stopped.expect("stop");
    let exit = match end {
        Some(exit) => exit,
        None => {
            let kept = fixture.backend.ended_output(&fixture.spec.session_id, &exec_id, output.next_offset);
            let rest = Output::collect(kept.await.expect("read kept output"), output.next_offset).await;
            rest.exit.expect("the kept stream ends with an exit")
        }
    };
    assert!(matches!(exit.reason, ExitReason::SandboxGone | ExitReason::Signaled), "{exit:?}");
    assert_ne!(exit.code, 0);
    fixture.end().await;
}
