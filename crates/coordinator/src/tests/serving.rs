//! Proves what the port serves: Connect, gRPC and gRPC-Web on it, probes, metrics, reflection, health, curl's JSON, the
//! socket; and that stopping ends open streams with a reason.

use std::time::Duration;

use cloister_api::app::{
    CreateTokenRequest, DeleteSessionRequest, GetSessionRequest, ListHostsRequest, RevokeTokenRequest,
    SessionState, SessionsServiceClient, StreamsServiceClient, WatchSessionRequest,
};
use cloister_api::connection::{Connection, Endpoint};
use connectrpc::client::{ClientConfig, Http2Connection};
use connectrpc::{ErrorCode, Protocol};

use super::host::FakeHost;
use super::support::{SOON, TestCoordinator, active_session, assert_code};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn probes_and_metrics_answer_without_a_bearer() {
    let Some(mut coordinator) = TestCoordinator::start().await else { return };
    let _host = FakeHost::connect(&coordinator, 8 << 30).await;
    for path in ["/healthz", "/readyz"] {
        let (status, _) = coordinator.http("GET", path, None, "text/plain", Vec::new()).await;
        assert_eq!(status, 200, "{path}");
    }
    let token = coordinator.owner_token().to_owned();
    let path = "/cloister.app.v1.HostsService/ListHosts";
    let (status, hosts) = coordinator.post(path, Some(&token), "{}").await;
    assert_eq!(status, 200);
    assert_eq!(hosts["hosts"][0]["connected"], true, "{hosts}");
    let (_, metrics) = coordinator.http("GET", "/metrics", None, "text/plain", Vec::new()).await;
    let metrics = String::from_utf8(metrics).unwrap();
    let expected =
        r#"cloister_coordinator_requests_total{rpc="/cloister.app.v1.HostsService/ListHosts",status="ok"}"#;
    assert!(metrics.contains(expected), "{metrics}");
    assert!(metrics.contains("cloister_coordinator_host_links"), "{metrics}");
    coordinator.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_asks_nothing_is_closed() {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let Some(mut coordinator) = TestCoordinator::start().await else { return };
    let connect = || tokio::net::TcpStream::connect(coordinator.listening.address);
    let (mut silent, mut preface) = (connect().await.unwrap(), connect().await.unwrap());
    // Says that it speaks HTTP/2, and no more.
    preface.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
    // One that has asked stays open for as long as it answers pings.
    let owner = coordinator.owner().await;
    owner.hosts().list_hosts(ListHostsRequest::default()).await.expect("list");
    let (mut nothing, mut settings) = (Vec::new(), Vec::new());
    let closed = async { tokio::join!(silent.read_to_end(&mut nothing), preface.read_to_end(&mut settings)) };
    let _ = tokio::time::timeout(Duration::from_secs(30), closed).await.expect("both are closed");
    assert!(nothing.is_empty());
    owner.hosts().list_hosts(ListHostsRequest::default()).await.expect("list again");
    coordinator.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restarted_coordinator_does_not_show_a_host_as_connected_before_it_dials() {
    let owner = || Some("owner-token-0123456789-0123456789".to_owned().into());
    let Some(mut first) = TestCoordinator::start_with(|config| config.owner_token = owner()).await else {
        return;
    };
    let host = FakeHost::connect(&first, 8 << 30).await;
    assert!(shows_connected(&first).await);
    first.stop().await;
    let second =
        TestCoordinator::start_on(first.options.clone(), |config| config.owner_token = owner()).await;
    assert!(!shows_connected(&second).await, "nobody holds its link");
    let host = host.reconnect(&second).await;
    assert!(shows_connected(&second).await);
    host.disconnect();
    let ends = async {
        while shows_connected(&second).await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(SOON, ends).await.expect("a broken link is seen before heartbeats are missed");
}

async fn shows_connected(coordinator: &TestCoordinator) -> bool {
    let answer = coordinator.owner().await.hosts().list_hosts(ListHostsRequest::default()).await;
    answer.expect("list hosts").into_owned().hosts[0].connected
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reflection_and_health_name_the_services() {
    let Some(coordinator) = TestCoordinator::start().await else { return };
    let body = br#"{"listServices":""}"#;
    let mut envelope = vec![0];
    envelope.extend_from_slice(&u32::try_from(body.len()).unwrap().to_be_bytes());
    envelope.extend_from_slice(body);
    let path = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo";
    let (status, answer) = coordinator.http("POST", path, None, "application/connect+json", envelope).await;
    let text = String::from_utf8_lossy(&answer);
    assert_eq!(status, 200, "{text}");
    for service in crate::api::SERVICES {
        assert!(text.contains(service), "`{service}` is not in {text}");
        let (status, answer) = coordinator
            .post("/grpc.health.v1.Health/Check", None, format!(r#"{{"service":"{service}"}}"#))
            .await;
        assert_eq!((status, answer["status"].as_str()), (200, Some("SERVING")), "{answer}");
    }
    let (status, answer) =
        coordinator.post("/grpc.health.v1.Health/Check", None, r#"{"service":"no.such"}"#).await;
    assert_eq!((status, answer["code"].as_str()), (404, Some("not_found")), "{answer}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_and_readiness_fall_with_the_database_and_come_back() {
    let Some(coordinator) = TestCoordinator::start().await else { return };
    let health = async || {
        let (_, answer) = coordinator.post("/grpc.health.v1.Health/Check", None, "{}").await;
        let (ready, _) = coordinator.http("GET", "/readyz", None, "text/plain", Vec::new()).await;
        (answer["status"].as_str().unwrap_or_default().to_owned(), ready)
    };
    assert_eq!(health().await, ("SERVING".to_owned(), 200));
    coordinator.allow_connections(false).await;
    assert_eq!(health().await, ("NOT_SERVING".to_owned(), 503));
    coordinator.allow_connections(true).await;
    let back = async {
        while health().await != ("SERVING".to_owned(), 200) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(SOON, back).await.expect("it serves again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_socket_serves_the_same_with_the_same_gate() {
    let Some(coordinator) = TestCoordinator::start().await else { return };
    let endpoint = Endpoint::Unix(coordinator.listening.socket.clone().expect("a socket"));
    let owner = Connection::dial(&endpoint, Some(coordinator.owner_token())).await.expect("connect");
    owner.hosts().list_hosts(ListHostsRequest::default()).await.expect("list");
    let nobody = Connection::dial(&endpoint, None).await.expect("connect");
    nobody.hosts().list_hosts(ListHostsRequest::default()).await.expect_err("no bearer");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grpc_and_grpc_web_are_served_on_the_same_port() {
    let Some(coordinator) = TestCoordinator::start().await else { return };
    let _host = FakeHost::connect(&coordinator, 8 << 30).await;
    let owner = coordinator.owner().await;
    let session = active_session(&owner, "c1").await;
    let base: http::Uri = coordinator.endpoint().to_string().parse().unwrap();
    for protocol in [Protocol::Grpc, Protocol::GrpcWeb, Protocol::Connect] {
        let transport = Http2Connection::builder().connect_plaintext(base.clone()).await.unwrap().shared(16);
        let config = ClientConfig::new(base.clone())
            .with_protocol(protocol)
            .with_default_header("authorization", format!("Bearer {}", coordinator.owner_token()));
        let sessions = SessionsServiceClient::new(transport.clone(), config.clone());
        let request = GetSessionRequest { session: session.id.clone(), ..Default::default() };
        let found = sessions.get_session(request).await.expect("get").into_owned().session;
        assert_eq!(found.state, SessionState::Active, "{protocol:?}");
        let missing = GetSessionRequest { session: "nothing".to_owned(), ..Default::default() };
        assert_code(sessions.get_session(missing).await, "CL1005", ErrorCode::NotFound);
        let streams = StreamsServiceClient::new(transport.clone(), config);
        let watch = WatchSessionRequest { session: session.id.clone(), ..Default::default() };
        let mut stream = streams.watch_session(watch).await.expect("watch");
        let first = stream.message().await.expect("an event").expect("one").to_owned_message();
        assert_eq!(first.event.cursor, 1, "{protocol:?}");
        // Without a bearer the gate answers in each protocol's own way.
        let nobody =
            SessionsServiceClient::new(transport, ClientConfig::new(base.clone()).with_protocol(protocol));
        let refused = nobody.get_session(GetSessionRequest::default()).await;
        assert_code(refused, "CL1001", ErrorCode::Unauthenticated);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_revocation_ends_the_streams_of_its_token_and_no_other() {
    let Some(coordinator) = TestCoordinator::start().await else { return };
    let _host = FakeHost::connect(&coordinator, 8 << 30).await;
    let owner = coordinator.owner().await;
    let session = active_session(&owner, "c1").await;
    let request =
        CreateTokenRequest { request_id: "t1".to_owned(), name: "ci".to_owned(), ..Default::default() };
    let created = owner.tokens().create_token(request).await.expect("create").into_owned();
    let other = coordinator.connect(&created.secret).await;
    let watch = WatchSessionRequest { session: session.id.clone(), ..Default::default() };
    let mut owners = owner.streams().watch_session(watch.clone()).await.expect("watch");
    let mut others = other.streams().watch_session(watch).await.expect("watch");
    others.message().await.expect("an event").expect("one");
    let revoke =
        RevokeTokenRequest { request_id: "v1".to_owned(), token: "ci".to_owned(), ..Default::default() };
    owner.tokens().revoke_token(revoke).await.expect("revoke");
    let error = loop {
        match others.message().await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("a clean end before `deleted`"),
            Err(error) => break error,
        }
    };
    assert_code::<()>(Err(error), "CL1001", ErrorCode::Unauthenticated);
    let delete = DeleteSessionRequest {
        request_id: "d1".to_owned(),
        session: session.id.clone(),
        wait_ms: 30_000,
        ..Default::default()
    };
    owner.sessions().delete_session(delete).await.expect("delete");
    let mut last = None;
    while let Some(message) = owners.message().await.expect("the owner's goes on") {
        last = message.to_owned_message().event.state.as_known();
    }
    assert_eq!(last, Some(SessionState::Deleted));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_list_in_the_place_of_a_message_and_what_cannot_be_decoded_have_a_code() {
    let Some(coordinator) = TestCoordinator::start().await else { return };
    let create = "/cloister.app.v1.SessionsService/CreateSession";
    for (body, field) in [
        (r#"["r1", "name"]"#, ""),
        (r#"{"requestId": "r1", "limits": [67108864]}"#, "limits"),
        (r#"{"requestId": "r1", "waitMs": "soon"}"#, ""),
        ("{", ""),
    ] {
        let (status, answer) = coordinator.post(create, Some(coordinator.owner_token()), body).await;
        assert_eq!(status, 400, "{body}: {answer}");
        let detail = &answer["details"][0]["debug"];
        assert_eq!(detail["code"], "CL1003", "{body}: {answer}");
        assert_eq!(detail["field"].as_str().unwrap_or_default(), field, "{body}: {answer}");
    }
    let list = "/cloister.app.v1.SessionsService/ListSessions";
    let (status, answer) = coordinator.post(list, Some(coordinator.owner_token()), "{}").await;
    assert_eq!((status, answer["sessions"].as_array().map_or(0, Vec::len)), (200, 0), "{answer}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopping_ends_open_streams_with_a_reason_and_takes_no_grace() {
    let Some(mut coordinator) = TestCoordinator::start().await else { return };
    let _host = FakeHost::connect(&coordinator, 8 << 30).await;
    let owner = coordinator.owner().await;
    let session = active_session(&owner, "c1").await;
    let watch = WatchSessionRequest { session: session.id.clone(), ..Default::default() };
    let mut stream = owner.streams().watch_session(watch).await.expect("watch");
    stream.message().await.expect("an event").expect("one");
    let started = std::time::Instant::now();
    coordinator.stop().await;
    assert!(started.elapsed() < std::time::Duration::from_secs(5), "{:?}", started.elapsed());
    let error = loop {
        match stream.message().await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("a clean end before `deleted`"),
            Err(error) => break error,
        }
    };
    assert_code::<()>(Err(error), "CL1022", ErrorCode::Unavailable);
}
