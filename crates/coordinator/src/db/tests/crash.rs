//! Proves: a process that is killed before or after the commit of a creation leaves nothing half done, and its request
//! id leads to one session either way; the same for what no call of the product commits yet. All other commits have
//! their kills in `crates/cloister/tests/e2e_crash`.

use std::process::Stdio;

use sqlx::ConnectOptions as _;

use super::*;

/// Not a test of its own: the body of the process that
/// `a_creation_that_was_killed_at_its_commit_is_repeated_with_one_session` starts.
#[tokio::test]
async fn creating_process() {
    let Ok(url) = std::env::var("CLOISTER_TEST_CREATE_URL") else { return };
    let store = Store::connect(url.parse().unwrap(), StoreConfig::default()).await.unwrap();
    let owner = store.authenticate(&TokenHash::of("test-owner")).await.unwrap().unwrap();
    let context = AuditContext {
        organization_id: owner.organization_id,
        user_id: owner.user_id,
        principal: "test".to_owned(),
        action: "session.create".to_owned(),
        request_id: "same".to_owned(),
        source: String::new(),
    };
    let params = session_params(ByteCount::mib(100));
    store.create_session(&context, &payload("create"), &holder(), &params).await.unwrap();
}

#[tokio::test]
async fn a_creation_that_was_killed_at_its_commit_is_repeated_with_one_session() {
    for side in ["before_commit", "after_commit"] {
        let test = store!();
        test.host("a", ByteCount::gib(1)).await;
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("fault");
        std::fs::write(&file, format!("{side}_create_session\n")).unwrap();
        let run = || {
            std::process::Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "db::tests::crash::creating_process"])
                .env("CLOISTER_TEST_CREATE_URL", test.options().to_url_lossy().as_str())
                .env("CLOISTER_FAULT_FILE", &file)
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .status()
                .unwrap()
        };
        use std::os::unix::process::ExitStatusExt as _;
        assert_eq!(run().signal(), Some(9), "{side}: the process was to be killed");
        assert!(!file.exists(), "once");
        let sessions = || async {
            let all = SessionFilter::default();
            test.store.list_sessions(&test.bootstrap.organization_id, &all, 10, None).await.unwrap().sessions
        };
        assert_eq!(sessions().await.len(), usize::from(side == "after_commit"));
        assert!(run().success(), "{side}: the same request again");
        let made = sessions().await;
        assert_eq!(made.len(), 1, "{side}");
        assert_eq!(made[0].state, SessionState::Starting);
        // The killed process still holds the operation; it is claimed when the lease runs out.
        test.clock.advance(SECOND * 16);
        let ops = test.store.claim_due_ops(&holder(), 10).await.unwrap();
        assert_eq!(ops.len(), 1, "{side}");
        test.started(&ops[0]).await;
        test.assert_not_oversubscribed().await;
    }
}

/// Not a test of its own: the body of the process that `a_cordon_that_was_killed_at_its_commit_is_whole_or_not_at_all`
/// starts.
#[tokio::test]
async fn cordoning_process() {
    let Ok(url) = std::env::var("CLOISTER_TEST_CORDON_URL") else { return };
    let host: cloister_types::HostId = std::env::var("CLOISTER_TEST_CORDON_HOST").unwrap().parse().unwrap();
    let store = Store::connect(url.parse().unwrap(), StoreConfig::default()).await.unwrap();
    store.cordon_host(&host, true).await.unwrap();
}

#[tokio::test]
async fn a_cordon_that_was_killed_at_its_commit_is_whole_or_not_at_all() {
    use std::os::unix::process::ExitStatusExt as _;
    for side in ["before_commit", "after_commit"] {
        let test = store!();
        let (host, _) = test.host("a", ByteCount::gib(1)).await;
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("fault");
        std::fs::write(&file, format!("{side}_cordon_host\n")).unwrap();
        let run = || {
            std::process::Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "db::tests::crash::cordoning_process"])
                .env("CLOISTER_TEST_CORDON_URL", test.options().to_url_lossy().as_str())
                .env("CLOISTER_TEST_CORDON_HOST", host.as_str())
                .env("CLOISTER_FAULT_FILE", &file)
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .status()
                .unwrap()
        };
        let is_cordoned = || async { test.store.resolve_host(host.as_str()).await.unwrap().cordoned };
        assert_eq!(run().signal(), Some(9), "{side}: the process was to be killed");
        assert!(!file.exists(), "once");
        assert_eq!(is_cordoned().await, side == "after_commit");
        assert!(run().success(), "{side}: again");
        assert!(is_cordoned().await);
    }
}
