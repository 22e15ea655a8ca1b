//! Clients that other people wrote, against a real `cloister up`: `curl` with JSON, and gRPC for Python, which learns
//! the API from the server's reflection. What the README and ADR 6 say about clients holds for these.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test states what it expects by unwrapping it"
)]

mod support;

use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;
use support::{Up, can_run, skip, which};

/// The root of the repository, where the scripts expect to be sourced.
const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// Returns `http://ADDRESS:PORT` of the API, and a token for it.
fn way_in(up: &Up) -> (String, String) {
    let endpoint = up.json(&["status"])["up"]["endpoint"].as_str().unwrap().to_owned();
    let token = up.json(&["token", "create", "client"])["secret"].as_str().unwrap().to_owned();
    (endpoint, token)
}

/// Runs curl as the README has it and returns the HTTP status and what the body holds.
fn curl(url: &str, authorization: &[&str]) -> (String, Value) {
    let output = Command::new("curl")
        .args(["-sS", "--write-out", "\n%{http_code} %{content_type}"])
        .args(["-d", "{}", "-H", "content-type: application/json"])
        .args(authorization)
        .arg(url)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let (body, status) = text.rsplit_once('\n').unwrap();
    (status.to_owned(), serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {body}")))
}

#[test]
fn curl_lists_hosts_as_the_readme_has_it() {
    if !can_run() {
        return;
    }
    if !which("curl") {
        return skip("curl is not installed");
    }
    let up = Up::start();
    let (endpoint, token) = way_in(&up);
    let url = format!("{endpoint}/cloister.app.v1.HostsService/ListHosts");
    let bearer = format!("authorization: Bearer {token}");
    let (status, answer) = curl(&url, &["-H", &bearer]);
    println!("curl: {status} {answer}");
    assert_eq!(status, "200 application/json");
    assert_eq!(answer["hosts"].as_array().unwrap().len(), 1, "{answer}");
    assert_eq!(answer["hosts"][0]["connected"], true);
    assert!(answer["hosts"][0]["id"].as_str().unwrap().starts_with("hst_"));
    let (status, answer) = curl(&url, &[]);
    assert_eq!(status, "401 application/json", "{answer}");
    assert_eq!(answer["code"], "unauthenticated");
}

/// Returns the Python that has the clients, installing them where ./test has not; `None`, after saying so, where
/// Python or what installs packages is missing.
fn python() -> Option<String> {
    let has = |arguments: &[&str]| {
        let mut command = Command::new("python3");
        command.args(arguments).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    if !has(&["--version"]) {
        skip("python3 is not installed");
        return None;
    }
    if !has(&["-c", "import ensurepip, venv"]) {
        skip("python3 has no venv or no pip here");
        return None;
    }
    let output = Command::new("bash")
        .args(["-c", ". scripts/test_clients.sh && ensure_test_clients && echo \"$TEST_CLIENTS_PYTHON\""])
        .current_dir(ROOT)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    Some(String::from_utf8(output.stdout).unwrap().trim().to_owned())
}

#[test]
fn a_client_that_knows_only_reflection_uses_the_whole_api() {
    if !can_run() {
        return;
    }
    let Some(python) = python() else { return };
    let up = Up::start();
    let (endpoint, token) = way_in(&up);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients/reflect.py");
    let output = Command::new(python)
        .arg(script)
        .arg(endpoint.strip_prefix("http://").unwrap())
        .env("CLOISTER_TOKEN", token)
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}\n{}", up.logs());
    let seen: Value = serde_json::from_slice(&output.stdout).unwrap();
    println!("{seen}");
    assert_eq!(seen["services"], seen["services_v1"]);
    let services: Vec<&str> = seen["services"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    for name in ["Audit", "Execs", "Hosts", "Sessions", "Streams", "Tokens"] {
        assert!(services.contains(&format!("cloister.app.v1.{name}Service").as_str()), "{services:?}");
    }
    assert_eq!(seen["methods"]["cloister.app.v1.HostsService"], serde_json::json!(["GetHost", "ListHosts"]));
    let hosts = &seen["hosts"];
    let host = &up.json(&["host", "list"])["hosts"][0];
    assert_eq!(hosts["grpc"].as_array().unwrap().len(), 1, "{hosts}");
    assert_eq!((&hosts["grpc"][0]["id"], &hosts["grpc"][0]["name"]), (&host["id"], &host["name"]));
    assert_eq!(hosts["grpc"][0]["connected"], true);
    assert_eq!(hosts["grpc"][0]["memory"].to_string(), host["capacity"]["memoryBytes"].as_str().unwrap());
    assert_eq!((&hosts["connect"], &hosts["grpc_web"]), (&hosts["grpc"], &hosts["grpc"]));
    assert_eq!(seen["contents"], serde_json::json!(["application/json", "application/grpc-web+proto"]));
    assert!(seen["grpc_web_trailers"].as_str().unwrap().contains("grpc-status: 0"), "{seen}");
    assert_eq!(seen["refused"], "UNAUTHENTICATED");
    assert_eq!(seen["exec"], serde_json::json!({"output": "hello\n", "code": 0}));
    let cursors = seen["cursors"].as_array().unwrap();
    let expected: Vec<Value> = (1..=cursors.len()).map(Value::from).collect();
    assert!(cursors.len() >= 4 && *cursors == expected, "{cursors:?}");
}
