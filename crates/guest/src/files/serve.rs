//! What a channel to files is asked for, one request after the other.

use cloister_api::guest;
use rustix::fs::{OFlags, fstat};
use rustix::io::Errno;

use super::info;
use super::{FileLink, FilesError, Receiver, ReceiverOptions, Report, Root, Sender};
use crate::frames::{Body, FrameError};

/// Serves a channel until the other side closes it.
pub fn serve(mut link: FileLink, root: &Root) {
    loop {
        let served = match link.receive() {
            Ok(None) | Err(_) => return,
            Ok(Some(request)) => answer(&mut link, root, request),
        };
        if let Err(error) = served {
            link.refuse(&error);
            // Only a request that was refused as a whole leaves the stream where the next one begins.
            if !matches!(error, FilesError::Kernel { .. }) {
                return;
            }
        }
    }
}

fn answer(link: &mut FileLink, root: &Root, request: Body) -> Result<(), FilesError> {
    match request {
        Body::StatFile(request) => {
            let info = stat(root, &request.path)
                .map_err(FilesError::kernel(format!("look at `{}`", text(&request.path))))?;
            link.queue(info)?;
            link.flush()
        }
        Body::SendFiles(request) => send(link, root, *request),
        Body::ReceiveFiles(request) => receive(link, root, *request),
        _ => Err(FrameError::Unexpected("a request about files").into()),
    }
}

fn stat(root: &Root, path: &[u8]) -> Result<guest::FileInfo, Errno> {
    Ok(info::from_stat(&fstat(root.open(path, OFlags::PATH)?)?))
}

fn send(link: &mut FileLink, root: &Root, request: guest::SendFiles) -> Result<(), FilesError> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY;
    let top = root
        .open(&request.path, flags)
        .map_err(FilesError::kernel(format!("read `{}`", text(&request.path))))?;
    link.queue(guest::FileDone::default())?;
    let mut silent = |_: &Report| {};
    let after = request.has_after.then_some(request.after);
    Sender::new(link, after, &mut silent).run(top, b"").map(drop)
}

fn receive(link: &mut FileLink, root: &Root, request: guest::ReceiveFiles) -> Result<(), FilesError> {
    let directory = root
        .open(&request.path, OFlags::PATH | OFlags::DIRECTORY)
        .map_err(FilesError::kernel(format!("open `{}`", text(&request.path))))?;
    link.queue(guest::FileDone::default())?;
    link.flush()?;
    let options = ReceiverOptions { keep_existing: request.keep_existing, ..ReceiverOptions::default() };
    let mut silent = |_: &Report| {};
    Receiver::new(link, directory, options, &mut silent).run().map(drop)
}

fn text(path: &[u8]) -> String {
    String::from_utf8_lossy(path).chars().take(256).collect()
}
