//! Proves who gets in: no RPC without a bearer, the two kinds of bearers apart, machines without tokens, a revocation
//! at once, old and new host agents.

use cloister_api::access::RPC_ACCESS;
use cloister_api::app::{
    CreateTokenRequest, ListSessionsRequest, ListTokensRequest, RevokeTokenRequest, WhoAmIRequest,
};
use cloister_api::connection::HOST_WIRE_VERSION;
use cloister_api::host::{ControlRequest, Register};
use cloister_types::HostId;
use connectrpc::ErrorCode;

use super::support::{APP_TOKEN, HOST_TOKEN, TestCoordinator, assert_code};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_rpc_answers_without_a_valid_bearer() {
    let Some(coordinator) = TestCoordinator::start().await else { return };
    for access in RPC_ACCESS {
        for token in [None, Some("clt_0000000000000000"), Some(HOST_TOKEN)] {
            let (status, body) = coordinator.post(access.path, token, "{}").await;
            assert_eq!(status, 401, "{} with {token:?}: {body}", access.path);
            assert_eq!(body["details"][0]["debug"]["code"], "CL1001", "{body}");
        }
    }
    for token in [None, Some(APP_TOKEN), Some(coordinator.owner_token())] {
        let path = "/cloister.host.v1.HostLinkService/Control";
        let (status, _) = coordinator.http("POST", path, token, "application/json", b"{}".to_vec()).await;
        assert_eq!(status, 401, "{token:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_configured_bearers_no_host_and_no_machine_gets_in() {
    let Some(coordinator) = TestCoordinator::start_with(|config| {
        config.auth_tokens.clear();
        config.app_tokens.clear();
    })
    .await
    else {
        return;
    };
    for token in ["", HOST_TOKEN, APP_TOKEN] {
        let path = "/cloister.host.v1.HostLinkService/Control";
        let (status, _) =
            coordinator.http("POST", path, Some(token), "application/json", b"{}".to_vec()).await;
        assert_eq!(status, 401, "`{token}`");
        let (status, _) =
            coordinator.post("/cloister.app.v1.HostsService/ListHosts", Some(token), "{}").await;
        assert_eq!(status, 401, "`{token}`");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_revoked_token_stops_to_work_at_once() {
    let Some(coordinator) = TestCoordinator::start().await else { return };
    let owner = coordinator.owner().await;
    let request =
        CreateTokenRequest { request_id: "t1".to_owned(), name: "ci".to_owned(), ..Default::default() };
    let created = owner.tokens().create_token(request.clone()).await.expect("create").into_owned();
    assert!(created.secret.starts_with("clt_"));
    let repeated = owner.tokens().create_token(request).await.expect("repeat").into_owned();
    assert_eq!((repeated.secret.as_str(), &repeated.token.id), ("", &created.token.id));

    let other = coordinator.connect(&created.secret).await;
    let who = other.tokens().who_am_i(WhoAmIRequest::default()).await.expect("who").into_owned();
    assert_eq!(who.token_id, created.token.id);
    assert!(!who.organization_name.is_empty() && !who.version.is_empty());
    let revoke =
        RevokeTokenRequest { request_id: "v1".to_owned(), token: "ci".to_owned(), ..Default::default() };
    owner.tokens().revoke_token(revoke).await.expect("revoke");
    let refused = other.sessions().list_sessions(ListSessionsRequest::default()).await;
    assert_code(refused, "CL1001", ErrorCode::Unauthenticated);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_machine_uses_the_api_and_manages_no_tokens() {
    let Some(coordinator) = TestCoordinator::start().await else { return };
    let machine = coordinator.connect(APP_TOKEN).await;
    machine.sessions().list_sessions(ListSessionsRequest::default()).await.expect("list");
    let who = machine.tokens().who_am_i(WhoAmIRequest::default()).await.expect("who").into_owned();
    assert_eq!(who.token_id, "");
    let request =
        CreateTokenRequest { request_id: "t1".to_owned(), name: "ci".to_owned(), ..Default::default() };
    assert_code(machine.tokens().create_token(request).await, "CL1002", ErrorCode::PermissionDenied);
    let owner = coordinator.owner().await;
    let tokens = owner.tokens().list_tokens(ListTokensRequest::default()).await.expect("list").into_owned();
    assert_eq!(tokens.tokens.len(), 1, "only the owner's own");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_agent_of_another_age_or_without_a_name_is_refused() {
    let Some(coordinator) = TestCoordinator::start().await else { return };
    let connection = coordinator.connect(HOST_TOKEN).await;
    let good = Register {
        host_id: HostId::generate().to_string(),
        name: "host".to_owned(),
        version: "0.1.0".to_owned(),
        wire_version: HOST_WIRE_VERSION,
        boot_id: "boot".to_owned(),
        ..Default::default()
    };
    let wrong = [
        (
            Register { wire_version: HOST_WIRE_VERSION + 1, ..good.clone() },
            "CL1021",
            ErrorCode::FailedPrecondition,
        ),
        (Register { wire_version: 0, ..good.clone() }, "CL1021", ErrorCode::FailedPrecondition),
        (Register { host_id: "hst_1".to_owned(), ..good.clone() }, "CL1003", ErrorCode::InvalidArgument),
        (Register { name: "a\0b".to_owned(), ..good.clone() }, "CL1003", ErrorCode::InvalidArgument),
        (Register { boot_id: String::new(), ..good }, "CL1003", ErrorCode::InvalidArgument),
    ];
    for (register, code, status) in wrong {
        let mut stream = connection.host_link().control().await.expect("open");
        stream
            .send(ControlRequest { message: Some(register.into()), ..Default::default() })
            .await
            .expect("send");
        assert_code(stream.message().await, code, status);
    }
}
