//! Proves: a change is told at once, and a lost notice costs a rescan, never a wait for the next change.

use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::*;

const LONG: Duration = Duration::from_secs(20);
/// Longer than any test: what is told is told by notices and reconnections alone.
const NEVER: Duration = Duration::from_secs(3600);

async fn wait_for(changes: &mut ChangeReceiver, wanted: &Change) {
    timeout(LONG, async { while changes.recv().await.as_ref() != Some(wanted) {} })
        .await
        .unwrap_or_else(|_| panic!("nobody told {wanted:?}"));
}

#[tokio::test]
async fn a_change_is_told_and_a_terminated_listener_makes_everybody_look_again() {
    let test = store!();
    let (feed, runner) = ChangeFeed::new(test.store.clone(), NEVER);
    let mut changes = feed.subscribe();
    let cancel = CancellationToken::new();
    let story = async {
        wait_for(&mut changes, &Change::Rescan).await;
        let (host, _) = test.host("a", ByteCount::gib(1)).await;
        wait_for(&mut changes, &Change::Host(host)).await;
        let session = test.create_one("one", &session_params(ByteCount::mib(100))).await;
        wait_for(&mut changes, &Change::Session(session.session.id.clone())).await;

        // The listening connection dies; what is sent before the next one listens is lost.
        let mut connection = test.connection().await;
        let killed: Vec<bool> = sqlx::query_scalar(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
             WHERE datname = current_database() AND query LIKE 'LISTEN%'",
        )
        .fetch_all(&mut connection)
        .await
        .unwrap();
        assert_eq!(killed, [true]);
        test.started(&session.op.unwrap()).await;
        wait_for(&mut changes, &Change::Rescan).await;
        // And it listens again.
        test.delete(&session.session.id, "delete").await;
        wait_for(&mut changes, &Change::Session(session.session.id.clone())).await;
        cancel.cancel();
    };
    let (ended, ()) = tokio::join!(runner.run(cancel.clone()), story);
    ended.unwrap();
    drop(feed);
    // What was sent is still read; then the subscription ends, since the runner has.
    timeout(LONG, async { while changes.recv().await.is_some() {} }).await.expect("the subscription goes on");
}

#[tokio::test]
async fn without_any_notice_the_fallback_timer_makes_everybody_look() {
    let test = store!();
    let (feed, runner) = ChangeFeed::new(test.store.clone(), Duration::from_millis(50));
    let mut changes = feed.subscribe();
    let cancel = CancellationToken::new();
    let story = async {
        for _ in 0..3 {
            wait_for(&mut changes, &Change::Rescan).await;
        }
        cancel.cancel();
    };
    let (ended, ()) = tokio::join!(runner.run(cancel.clone()), story);
    ended.unwrap();
}

/// Asks until the store answers; only "later" may be said before.
async fn until_available(store: &Store) {
    timeout(LONG, async {
        while let Err(error) = store.ping().await {
            assert!(error.is_retryable(), "{error}");
        }
    })
    .await
    .expect("the store never came back");
}

#[tokio::test]
async fn connections_that_the_server_ended_are_replaced() {
    let Some(test) = TestStore::create_with(|config| config.clock = None).await else { return };
    test.host("a", ByteCount::gib(1)).await;
    let mut connection = test.connection().await;
    sqlx::query(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
         WHERE datname = current_database() AND pid <> pg_backend_pid()",
    )
    .execute(&mut connection)
    .await
    .unwrap();
    until_available(&test.store).await;
    // None of the ended ones is handed out any more.
    futures::future::join_all((0..24).map(|_| until_available(&test.store))).await;
    let session = test.active("one").await;
    assert_eq!(session.state, SessionState::Active);
    test.store.close().await;
    let error = test.store.ping().await.unwrap_err();
    assert!(error.is_retryable(), "{error}");
}

#[tokio::test]
async fn a_full_disk_of_the_database_is_told_from_a_database_that_does_not_answer() {
    let Some(test) = TestStore::create_with(|config| config.clock = None).await else { return };
    let mut connection = test.connection().await;
    let mut refused = async |state: &str| {
        let raise = format!("DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '{state}'; END $$");
        let error =
            sqlx::query(sqlx::AssertSqlSafe(raise)).execute(&mut connection).await.expect_err("it raises");
        let error = StoreError::from_sqlx("test", error);
        assert!(error.is_retryable(), "{error}");
        crate::error::AppError::from(error).code.code
    };
    assert_eq!(refused("53100").await, "CL1027");
    assert_eq!(refused("53200").await, "CL1016");
}
