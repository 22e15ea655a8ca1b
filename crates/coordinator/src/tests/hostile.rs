//! Proves that wrong, missing, oversized, unknown and hostile input gets a typed error and changes nothing.

use cloister_api::app::{ListAuditRequest, ListSessionsRequest};
use serde_json::json;

use super::host::FakeHost;
use super::support::{TestCoordinator, active_session};

const CREATE: &str = "/cloister.app.v1.SessionsService/CreateSession";
const GET: &str = "/cloister.app.v1.SessionsService/GetSession";
const LIST: &str = "/cloister.app.v1.SessionsService/ListSessions";
const DELETE: &str = "/cloister.app.v1.SessionsService/DeleteSession";
const START: &str = "/cloister.app.v1.ExecsService/StartExec";
const SIGNAL: &str = "/cloister.app.v1.ExecsService/SignalExec";
const WRITE: &str = "/cloister.app.v1.ExecsService/WriteStdin";
const AUDIT: &str = "/cloister.app.v1.AuditService/ListAudit";
const TOKEN: &str = "/cloister.app.v1.TokensService/CreateToken";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_input_gets_a_typed_error_and_changes_nothing() {
    let Some(coordinator) = TestCoordinator::start().await else { return };
    let _host = FakeHost::connect(&coordinator, 8 << 30).await;
    let owner = coordinator.owner().await;
    let session = active_session(&owner, "c1").await;
    let count = || async {
        let sessions =
            owner.sessions().list_sessions(ListSessionsRequest::default()).await.unwrap().into_owned();
        let audit = owner.audit().list_audit(ListAuditRequest::default()).await.unwrap().into_owned();
        (sessions.sessions.len(), sessions.sessions[0].generation, audit.entries.len())
    };
    let before = count().await;
    let exec = cloister_types::ExecId::generate().to_string();
    let many: serde_json::Map<String, serde_json::Value> =
        (0..65).map(|index| (format!("k{index}"), json!("v"))).collect();
    let id = session.id.as_str();
    let cases = [
        (CREATE, json!({}), "CL1003", "request_id"),
        (CREATE, json!({"requestId": "a b"}), "CL1003", "request_id"),
        (CREATE, json!({"requestId": "x".repeat(129)}), "CL1003", "request_id"),
        (CREATE, json!({"requestId": "x", "name": "Nope"}), "CL1003", "name"),
        (CREATE, json!({"requestId": "x", "name": "a\u{0}b"}), "CL1003", "name"),
        (CREATE, json!({"requestId": "x", "labels": {"": "v"}}), "CL1003", "labels"),
        (CREATE, json!({"requestId": "x", "labels": {"k": "a\u{0}"}}), "CL1003", "labels"),
        (CREATE, json!({"requestId": "x", "labels": many}), "CL1003", "labels"),
        (CREATE, json!({"requestId": "x", "image": "ubuntu\u{0}"}), "CL1003", "image"),
        (CREATE, json!({"requestId": "x", "backend": "docker"}), "CL1003", "backend"),
        (CREATE, json!({"requestId": "x", "isolationFloor": 77}), "CL1003", "isolation_floor"),
        (CREATE, json!({"requestId": "x", "limits": {"memoryBytes": "1"}}), "CL1003", "limits.memory_bytes"),
        (CREATE, json!({"requestId": "x", "limits": {"pids": 1}}), "CL1003", "limits.pids"),
        (
            CREATE,
            json!({"requestId": "x", "limits": {"cpuMillis": 4_000_000_000u32}}),
            "CL1003",
            "limits.cpu_millis",
        ),
        (
            CREATE,
            json!({"requestId": "x", "limits": {"diskBytes": "18446744073709551615"}}),
            "CL1003",
            "limits.disk_bytes",
        ),
        (CREATE, json!({"requestId": "x", "ttlMs": "18446744073709551615"}), "CL1003", "ttl_ms"),
        (CREATE, json!({"requestId": "x", "limit": {"pids": 10}}), "CL1004", "limit"),
        (CREATE, json!({"requestId": "x", "limits": {"memoryByte": "1"}}), "CL1004", "limits.memoryByte"),
        (GET, json!({}), "CL1003", "session"),
        (GET, json!({"session": "'; DROP TABLE sessions; --"}), "CL1003", "session"),
        (GET, json!({"session": "a\u{0}b"}), "CL1003", "session"),
        (GET, json!({"session": "x".repeat(1000)}), "CL1003", "session"),
        (GET, json!({"session": "nothing"}), "CL1005", ""),
        (GET, json!({"session": "ses_zzzzzzzzzzzzzzzzzzzzzzzzzz"}), "CL1005", ""),
        (GET, json!({"session": "%"}), "CL1005", ""),
        (LIST, json!({"pageSize": 501}), "CL1003", "page_size"),
        (LIST, json!({"pageToken": "abc"}), "CL1025", ""),
        (LIST, json!({"pageToken": "\u{1}"}), "CL1025", ""),
        (LIST, json!({"states": ["SESSION_STATE_UNSPECIFIED"]}), "CL1003", "states"),
        (LIST, json!({"labels": {"a": "\u{0}"}}), "CL1003", "labels"),
        (DELETE, json!({"session": id}), "CL1003", "request_id"),
        (START, json!({"requestId": "x", "session": id}), "CL1003", "spec"),
        (START, json!({"requestId": "x", "session": id, "spec": {"argv": []}}), "CL1003", "spec.argv"),
        (
            START,
            json!({"requestId": "x", "session": id, "spec": {"argv": ["a\u{0}"]}}),
            "CL1003",
            "spec.argv",
        ),
        (
            START,
            json!({"requestId": "x", "session": id, "spec": {"argv": ["a"], "env": {"A=B": ""}}}),
            "CL1003",
            "spec.env",
        ),
        (
            START,
            json!({"requestId": "x", "session": id, "spec": {"argv": ["a"], "cwd": "tmp"}}),
            "CL1003",
            "spec.cwd",
        ),
        (
            START,
            json!({"requestId": "x", "session": id, "spec": {"argv": ["x".repeat(1 << 20)]}}),
            "CL1003",
            "spec.argv",
        ),
        (
            START,
            json!({"requestId": "x", "session": id, "spec": {"argv": ["a"], "timeoutMS": 1}}),
            "CL1004",
            "spec.timeoutMS",
        ),
        (SIGNAL, json!({"session": id, "execId": exec, "signal": 0}), "CL1003", "signal"),
        (SIGNAL, json!({"session": id, "execId": exec, "signal": 65}), "CL1003", "signal"),
        (SIGNAL, json!({"session": id, "execId": "../../etc", "signal": 9}), "CL1003", "exec_id"),
        (WRITE, json!({"session": id, "execId": exec, "data": "AAAA".repeat(400_000)}), "CL1003", "data"),
        (AUDIT, json!({"resource": "a b"}), "CL1003", "resource"),
        (TOKEN, json!({"requestId": "x", "name": ""}), "CL1003", "name"),
    ];
    for (path, body, code, field) in cases {
        let text = body.to_string();
        let shown: String = text.chars().take(120).collect();
        let (status, answer) = coordinator.post(path, Some(coordinator.owner_token()), text).await;
        assert!((400..500).contains(&status), "{path} {shown}: {status} {answer}");
        let debug = &answer["details"][0]["debug"];
        assert_eq!(debug["code"], code, "{path} {shown}: {answer}");
        assert_eq!(debug["field"], field, "{path} {shown}: {answer}");
        assert_ne!(debug["remedy"], "", "{path} {shown}: {answer}");
    }
    assert_eq!(count().await, before, "something changed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unknown_field_is_refused_with_the_nearest_one() {
    let Some(coordinator) = TestCoordinator::start().await else { return };
    let token = Some(coordinator.owner_token());
    let (_, answer) = coordinator.post(CREATE, token, r#"{"requestId":"x","lables":{"a":"b"}}"#).await;
    let message = answer["message"].as_str().unwrap();
    assert!(message.contains("`lables`") && message.contains("`labels`"), "{message}");
    // Both spellings of a name are good.
    for body in [r#"{"page_size":1}"#, r#"{"pageSize":1}"#] {
        let (status, answer) = coordinator.post(LIST, token, body).await;
        assert_eq!(status, 200, "{answer}");
    }
    // On streams too: one enveloped message, as a browser sends it.
    let body = br#"{"session":"x","afterCurser":"1"}"#;
    let mut envelope = vec![0];
    envelope.extend_from_slice(&u32::try_from(body.len()).unwrap().to_be_bytes());
    envelope.extend_from_slice(body);
    let path = "/cloister.app.v1.StreamsService/WatchSession";
    let (status, answer) = coordinator.http("POST", path, token, "application/connect+json", envelope).await;
    assert_eq!(status, 200, "errors of streams are in their last frame");
    let text = String::from_utf8_lossy(&answer);
    assert!(text.contains("CL1004") && text.contains("afterCursor"), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_no_request_is_refused_by_the_protocol() {
    let Some(coordinator) = TestCoordinator::start().await else { return };
    let token = Some(coordinator.owner_token());
    let (status, _) = coordinator.post(GET, token, "{").await;
    assert_eq!(status, 400);
    let (status, _) = coordinator.post(GET, token, r#"{"session": 5}"#).await;
    assert_eq!(status, 400);
    let (status, _) = coordinator.post("/cloister.app.v1.SessionsService/Nothing", token, "{}").await;
    assert_eq!(status, 404);
    let (status, _) = coordinator.http("GET", CREATE, token, "application/json", Vec::new()).await;
    assert_eq!(status, 405);
    let (status, _) = coordinator.http("POST", GET, token, "text/plain", b"{}".to_vec()).await;
    assert_eq!(status, 415);
    let large = format!(r#"{{"session":"{}"}}"#, "x".repeat(5 << 20));
    let (status, _) = coordinator.post(GET, token, large).await;
    assert_eq!(status, 429, "too large");
}
