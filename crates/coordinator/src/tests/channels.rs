//! Proves what the API says of channels: bytes go both ways, an end is said, a cut is an error, and only an active session
//! has them.

use cloister_api::app::dial_port_request::Request;
use cloister_api::app::dial_port_response::Response;
use cloister_api::app::{DialPortRequest, DialPortStart, ListAuditRequest, PauseSessionRequest};
use cloister_api::connection::Connection;
use connectrpc::{ConnectError, ErrorCode};

use super::host::{BREAKS, CLOSED, FakeHost};
use super::support::{TestCoordinator, active_session, assert_code};

fn request(request: Request) -> DialPortRequest {
    DialPortRequest { request: Some(request), ..Default::default() }
}

/// Sends `pieces` to `port`, ends, and returns what came and how it ended.
async fn dial(
    owner: &Connection,
    session: &str,
    port: u32,
    pieces: &[&[u8]],
) -> (Vec<u8>, Result<(), ConnectError>) {
    let stream = owner.streams().dial_port().await.expect("open a stream");
    let (mut send, mut receive) = stream.into_split();
    let start = DialPortStart {
        request_id: "dial-1".to_owned(),
        session: session.to_owned(),
        port,
        ..Default::default()
    };
    let _ = send.send(request(start.into())).await;
    let mut came = Vec::new();
    let mut pieces = pieces.iter();
    loop {
        match receive.message().await {
            Ok(Some(message)) => match message.to_owned_message().response {
                Some(Response::Ready(_)) => {
                    for piece in pieces.by_ref() {
                        let _ = send.send(request(Request::Data(piece.to_vec()))).await;
                    }
                    send.close_send();
                }
                Some(Response::Data(data)) => came.extend_from_slice(&data),
                Some(Response::Done(_)) => return (came, Ok(())),
                None => panic!("an empty message"),
            },
            Ok(None) => return (came, Err(ConnectError::internal("no end was said"))),
            Err(error) => return (came, Err(error)),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_go_both_ways_and_every_end_is_told() {
    let Some(coordinator) = TestCoordinator::start().await else { return };
    let _host = FakeHost::connect(&coordinator, 8 << 30).await;
    let owner = coordinator.owner().await;
    let session = active_session(&owner, "c1").await;

    let (came, ended) = dial(&owner, &session.id, 7, &[b"one ", b"two"]).await;
    assert_eq!((came.as_slice(), ended.is_ok()), (&b"one two"[..], true));

    let (came, ended) = dial(&owner, &session.id, BREAKS, &[]).await;
    assert_eq!(came, b"half");
    assert_code(ended, "CL1018", ErrorCode::Unavailable);
    assert_code(dial(&owner, &session.id, CLOSED, &[]).await.1, "CL1028", ErrorCode::FailedPrecondition);
    assert_code(dial(&owner, &session.id, 0, &[]).await.1, "CL1003", ErrorCode::InvalidArgument);
    assert_code(dial(&owner, &session.id, 65_536, &[]).await.1, "CL1003", ErrorCode::InvalidArgument);
    assert_code(
        dial(&owner, &session.id, 7, &[&vec![0; 1024 * 1024 + 1]]).await.1,
        "CL1003",
        ErrorCode::InvalidArgument,
    );

    let audit = owner.audit().list_audit(ListAuditRequest::default()).await.unwrap().into_owned();
    let dialled = audit.entries.iter().filter(|entry| entry.action == "port.dial");
    assert!(dialled.clone().count() >= 3, "{:?}", dialled.count());

    let pause = PauseSessionRequest {
        request_id: "pause-1".to_owned(),
        session: session.id.clone(),
        wait_ms: 10_000,
        ..Default::default()
    };
    owner.sessions().pause_session(pause).await.unwrap();
    assert_code(dial(&owner, &session.id, 7, &[]).await.1, "CL1013", ErrorCode::FailedPrecondition);
}
