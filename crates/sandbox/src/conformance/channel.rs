//! Channels: to the files as their user sees them, and to ports.

use cloister_api::guest::{self, FileKind};
use cloister_guest::frames::{Body, FrameReader, FrameWriter};
use cloister_types::{BackendKind, ChannelTarget};

use super::{Fixture, Program, Subject, within};
use crate::backend::{Channel, SandboxError};

const TEXT: &[u8] = b"through a channel";

/// Opens the files as `user`; `None`, after a look at how it is refused, on a backend that has no channels.
async fn open(fixture: &Fixture<'_>, user: Option<&str>) -> Option<Channel> {
    let target = ChannelTarget::Files { user: user.map(str::to_owned) };
    let opened = within("a channel", fixture.sandbox.open_channel(&target)).await;
    if fixture.subject.kind() == BackendKind::Sim {
        assert!(matches!(opened, Err(SandboxError::Invalid(_))), "the simulated backend has channels by now");
        return None;
    }
    Some(opened.expect("open a channel"))
}

/// Sends a file `name` into `path`; returns the problems that came back, or the refusal.
async fn write(channel: Channel, path: &str, name: &str) -> Result<Vec<String>, String> {
    let (read, write) = tokio::io::split(channel);
    let (mut reader, mut writer) = (FrameReader::new(read), FrameWriter::new(write));
    let receive = guest::ReceiveFiles { path: path.as_bytes().to_vec(), ..Default::default() };
    writer.send(receive).await.expect("ask");
    match within("an answer", reader.expect()).await.expect("an answer") {
        Body::FileDone(_) => {}
        Body::Error(error) => return Err(error.message),
        other => panic!("{other:?}"),
    }
    let info = guest::FileInfo {
        kind: FileKind::FILE_KIND_FILE.into(),
        mode: 0o640,
        size: u64::try_from(TEXT.len()).expect("a small number"),
        ..Default::default()
    };
    let entry = guest::FileEntry { path: name.as_bytes().to_vec(), info: info.into(), ..Default::default() };
    writer.queue(entry).expect("an entry");
    writer.queue(guest::FileData { data: TEXT.to_vec(), ..Default::default() }).expect("bytes");
    let hash = blake3::hash(TEXT).as_bytes().to_vec();
    writer.queue(guest::FileEnd { hash, ..Default::default() }).expect("the end of the file");
    writer.send(guest::TransferEnd::default()).await.expect("the end");
    let mut problems = Vec::new();
    loop {
        match within("the end", reader.expect()).await.expect("the end") {
            Body::FileProblem(problem) => problems.push(problem.message),
            Body::TransferEnd(_) => return Ok(problems),
            other => panic!("{other:?}"),
        }
    }
}

pub(super) async fn files_are_written_as_the_channels_user(subject: &dyn Subject) {
    let fixture = Fixture::new(subject).await;
    if let Some(channel) = open(&fixture, None).await {
        assert_eq!(write(channel, "/workspace", "given").await, Ok(Vec::new()));
        let (_, output) = fixture.run(&Program::ReadFile("/workspace/given".to_owned())).await;
        assert_eq!(output.stdout, TEXT);
        // Root's own directory, which is closed to others, and one that is not there.
        let channel = open(&fixture, Some("1000")).await.expect("channels");
        assert!(
            write(channel, "/root", "given").await != Ok(Vec::new()),
            "another user wrote to root's directory"
        );
        let channel = open(&fixture, None).await.expect("channels");
        assert!(write(channel, "/no/such", "given").await.is_err());
        let unknown = ChannelTarget::Files { user: Some("nobody-here".to_owned()) };
        let refused = within("a refusal", fixture.sandbox.open_channel(&unknown)).await;
        assert!(matches!(refused, Err(SandboxError::Invalid(_))), "an unknown user has files");
    }
    fixture.end().await;
}

pub(super) async fn a_port_where_nobody_listens_is_closed(subject: &dyn Subject) {
    let fixture = Fixture::new(subject).await;
    let refused = within("a refusal", fixture.sandbox.open_channel(&ChannelTarget::Port(7000))).await;
    match refused.map(drop) {
        Err(SandboxError::PortClosed(7000)) => assert_ne!(subject.kind(), BackendKind::Sim),
        Err(SandboxError::Invalid(_)) => assert_eq!(subject.kind(), BackendKind::Sim),
        other => panic!("{other:?}"),
    }
    fixture.end().await;
}
