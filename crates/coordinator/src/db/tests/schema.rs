//! Proves: the tables are those of `schema.sql`, and their words are those of the types crate.

use std::process::Command;

use cloister_types::BackendKind;
use cloister_types::session::Reason;

use super::*;

#[tokio::test]
async fn the_check_constraints_list_the_words_of_the_types_crate() {
    let test = store!();
    let mut connection = test.connection().await;
    let states: Vec<&str> = SessionState::ALL.iter().map(|state| state.as_str()).collect();
    let reasons: Vec<&str> = Reason::ALL.iter().map(|reason| reason.as_str()).collect();
    let backends: Vec<&str> = BackendKind::ALL.iter().map(|kind| kind.as_str()).collect();
    let levels: Vec<&str> = Isolation::ALL.iter().map(|level| level.as_str()).collect();
    let kinds: Vec<&str> = OpKind::ALL.iter().map(|kind| kind.as_str()).collect();
    let op_states: Vec<&str> = OpState::ALL.iter().map(|state| state.as_str()).collect();
    let expected = [
        ("sessions_state_check", &states),
        ("sessions_reason_check", &reasons),
        ("sessions_requested_backend_check", &backends),
        ("sessions_backend_check", &backends),
        ("sessions_isolation_floor_check", &levels),
        ("sessions_isolation_check", &levels),
        ("session_events_state_check", &states),
        ("session_events_reason_check", &reasons),
        ("session_ops_kind_check", &kinds),
        ("session_ops_state_check", &op_states),
    ];
    for (constraint, words) in expected {
        let definition: String =
            sqlx::query_scalar("SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conname = $1")
                .bind(constraint)
                .fetch_one(&mut connection)
                .await
                .unwrap_or_else(|error| panic!("{constraint}: {error}"));
        assert_eq!(quoted(&definition), *words, "{constraint}");
    }
    let holding: Vec<&str> = SessionState::HOLDS_HOST_CAPACITY.iter().map(|state| state.as_str()).collect();
    let index: String = sqlx::query_scalar("SELECT pg_get_indexdef('sessions_holding_capacity'::regclass)")
        .fetch_one(&mut connection)
        .await
        .unwrap();
    assert_eq!(quoted(&index), holding, "what admission adds up");
}

/// Returns the words between single quotes.
fn quoted(definition: &str) -> Vec<&str> {
    definition.split('\'').skip(1).step_by(2).collect()
}

#[tokio::test]
async fn every_migration_together_makes_the_committed_schema() {
    let test = store!();
    let options = test.options();
    let socket = options.get_socket().expect("the test server has a socket");
    let output = Command::new("pg_dump")
        .args(["--schema-only", "--no-owner", "--no-privileges", "--exclude-table=_sqlx_migrations", "-h"])
        .arg(socket)
        .args(["-U", options.get_username(), "-d", options.get_database().unwrap()])
        .output();
    let output = match output {
        Ok(output) => output,
        Err(error) => {
            println!("SKIP: pg_dump is not installed: {error}");
            return;
        }
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let dump = String::from_utf8(output.stdout).unwrap();
    let statements = |text: &str| -> Vec<String> {
        let is_noise = |line: &str| {
            line.is_empty()
                || ["--", "\\", "SET ", "SELECT pg_catalog.set_config"]
                    .iter()
                    .any(|start| line.starts_with(start))
        };
        text.lines().filter(|line| !is_noise(line)).map(str::to_owned).collect()
    };
    let committed = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/schema.sql"));
    assert_eq!(statements(&dump), statements(committed), "run `cargo xtask sqlx`");
}

#[tokio::test]
async fn migrating_again_changes_nothing_and_a_later_release_is_refused() {
    let test = store!();
    test.another().await;
    let mut connection = test.connection().await;
    sqlx::query(
        "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time)
         VALUES (99999999999999, 'of a later release', true, '', 0)",
    )
    .execute(&mut connection)
    .await
    .unwrap();
    let error = Store::connect(test.options(), StoreConfig::default()).await.unwrap_err();
    assert!(matches!(error, StoreError::Migrate(_)), "{error}");
}

#[tokio::test]
async fn queries_use_the_index_that_they_name() {
    let test = store!();
    let mut connection = test.connection().await;
    // With few rows the planner rightly reads the table: ask what it can do, not what it prefers.
    sqlx::query("SET enable_seqscan = off").execute(&mut connection).await.unwrap();
    let expected = [
        ("SELECT 1 FROM sessions WHERE deadline_at <= cloister_now()", "sessions_by_deadline"),
        (
            "SELECT 1 FROM sessions WHERE expires_at <= cloister_now() AND state NOT IN ('deleting', 'deleted')",
            "sessions_by_expiry",
        ),
        (
            "SELECT 1 FROM session_ops WHERE state IN ('pending', 'running')
             AND coalesce(lease_expires_at, not_before) <= cloister_now()",
            "session_ops_due",
        ),
        ("SELECT 1 FROM sessions WHERE state = 'queued' ORDER BY queue_seq LIMIT 5", "sessions_queue_key"),
        (
            "SELECT sum(memory_bytes) FROM sessions WHERE host_id = 'x'
             AND state IN ('starting', 'active', 'pausing', 'resuming', 'host_lost')",
            "sessions_holding_capacity",
        ),
        (
            "SELECT 1 FROM hosts WHERE connected AND last_heartbeat_at < cloister_now() - interval '15 seconds'",
            "hosts_by_heartbeat",
        ),
    ];
    for (query, index) in expected {
        let plan: Vec<String> = sqlx::query_scalar(sqlx::AssertSqlSafe(format!("EXPLAIN {query}")))
            .fetch_all(&mut connection)
            .await
            .unwrap();
        let plan = plan.join("\n");
        assert!(
            plan.contains(&format!("using {index}")) || plan.contains(&format!("on {index}")),
            "{query}\n{plan}"
        );
    }
}
