//! Frames round-trip, and hostile bytes are an error, never a panic or an unbounded buffer.

use proptest::prelude::*;

use super::*;

fn run<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

fn output(data: Vec<u8>) -> Body {
    guest::Output { stream: 1, offset: 7, data, ..guest::Output::default() }.into()
}

/// Gives out `bytes` in pieces of `step`.
struct Pieces {
    bytes: Vec<u8>,
    at: usize,
    step: usize,
}

impl AsyncRead for Pieces {
    fn poll_read(
        mut self: std::pin::Pin<&mut Self>,
        _context: &mut std::task::Context<'_>,
        buffer: &mut tokio::io::ReadBuf<'_>,
    ) -> std::task::Poll<io::Result<()>> {
        let count = self.step.min(self.bytes.len() - self.at).min(buffer.remaining());
        let at = self.at;
        buffer.put_slice(&self.bytes[at..at + count]);
        self.at += count;
        std::task::Poll::Ready(Ok(()))
    }
}

fn read_all(bytes: Vec<u8>, step: usize) -> (Vec<Body>, Option<FrameError>, usize) {
    run(async {
        let mut reader = FrameReader::new(Pieces { bytes, at: 0, step });
        let mut bodies = Vec::new();
        loop {
            match reader.next().await {
                Ok(Some(body)) => bodies.push(body),
                Ok(None) => return (bodies, None, reader.buffer.capacity()),
                Err(error) => return (bodies, Some(error), reader.buffer.capacity()),
            }
        }
    })
}

#[test]
fn messages_arrive_whole_however_the_bytes_are_cut() {
    let sent = [output(vec![1; 3]), hello("sbx").into(), output(vec![2; 200_000]), output(Vec::new())];
    let bytes: Vec<u8> = sent.iter().flat_map(|body| encode(body.clone()).unwrap()).collect();
    for step in [1, 3, 5, 1000, 8192, usize::MAX] {
        let (bodies, error, capacity) = read_all(bytes.clone(), step);
        assert!(error.is_none(), "{error:?}");
        assert_eq!(bodies, sent);
        assert!(capacity <= BUFFER_KEEP_BYTES, "{capacity} bytes are kept");
    }
}

#[test]
fn hostile_bytes_are_an_error_and_allocate_nothing() {
    for length in [1024 * 1024 + 1, u32::MAX] {
        let (_, error, capacity) = read_all(length.to_le_bytes().to_vec(), usize::MAX);
        assert!(matches!(error, Some(FrameError::TooLarge(_))), "{error:?}");
        assert!(capacity <= 2 * READ_BYTES, "{capacity}");
    }
    // A length that promises a mebibyte and brings three bytes.
    let mut promise = 1_000_000_u32.to_le_bytes().to_vec();
    promise.extend([1, 2, 3]);
    let (_, error, capacity) = read_all(promise, usize::MAX);
    assert!(matches!(error, Some(FrameError::Torn)), "{error:?}");
    assert!(capacity <= 4 * READ_BYTES, "{capacity}");
    let (_, error, _) = read_all(vec![0, 0, 0, 0], usize::MAX);
    assert!(matches!(error, Some(FrameError::Empty)), "{error:?}");
    let (_, error, _) = read_all(vec![3, 0, 0, 0, 0xff, 0xff, 0xff], usize::MAX);
    assert!(matches!(error, Some(FrameError::Decode(_))), "{error:?}");
}

#[test]
fn a_message_beyond_the_limit_is_not_sent_and_the_writer_stays_usable() {
    let written = run(async {
        let mut writer = FrameWriter::new(Vec::new());
        let refused = writer.send(output(vec![0; FRAME_MAX_BYTES])).await;
        assert!(matches!(refused, Err(FrameError::TooLarge(_))), "{refused:?}");
        writer.send(output(vec![9])).await.unwrap();
        writer.io
    });
    let (bodies, error, _) = read_all(written, usize::MAX);
    assert!(error.is_none());
    assert_eq!(bodies, [output(vec![9])]);
}

#[test]
fn a_small_message_that_expands_into_a_large_one_is_refused() {
    // A list of empty execs costs two bytes each on the wire and some hundred in memory.
    let list = guest::ExecList { execs: vec![guest::Exec::default(); 400_000], ..guest::ExecList::default() };
    let bytes = encode(list).unwrap();
    assert!(matches!(decode(&bytes[4..]), Err(FrameError::Decode(_))));
}

#[test]
fn only_own_version_and_neighbours_are_greeted() {
    let greet = |version| check_hello(&guest::Hello { version, ..guest::Hello::default() }.into());
    assert_eq!(greet(VERSION).unwrap().version, VERSION);
    assert_eq!(greet(VERSION + 1).unwrap().version, VERSION);
    assert!(matches!(greet(0), Err(FrameError::Version(0))));
    assert!(matches!(greet(VERSION + 2), Err(FrameError::Version(_))));
    assert!(matches!(check_hello(&output(Vec::new())), Err(FrameError::Unexpected(_))));
    assert!(check_hello_reply(&guest::HelloReply { version: VERSION + 1, ..Default::default() }).is_err());
}

proptest! {
    #[test]
    fn any_bytes_are_a_message_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..4096), step in 1_usize..64) {
        let (bodies, _, capacity) = read_all(bytes.clone(), step);
        prop_assert!(bodies.len() <= bytes.len());
        prop_assert!(capacity <= BUFFER_KEEP_BYTES);
        let _ = decode(&bytes);
    }

    #[test]
    fn a_damaged_frame_never_panics(at in 0_usize..600, flip in 1_u8..) {
        let mut bytes = encode(guest::StartExec {
            exec_id: "exe".to_owned(),
            spec: guest::ExecSpec {
                argv: vec!["x".repeat(300), "y".repeat(200)],
                env: [("A".to_owned(), "b".repeat(50))].into_iter().collect(),
                ..Default::default()
            }.into(),
            ..Default::default()
        }).unwrap();
        let at = at % bytes.len();
        bytes[at] ^= flip;
        let _ = read_all(bytes, usize::MAX);
    }
}
