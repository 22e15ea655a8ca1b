//! Sessions: create, read, pause, resume, delete, watch.
//!
//! A mutation commits and hands its operation, already claimed, to the executor, so that nothing waits for a
//! reconciler. Whoever waits for the outcome waits on the operation or on the change feed, never on a timer.

use std::collections::VecDeque;
use std::time::Duration;

use cloister_types::SessionState;
use connectrpc::ConnectError;
use futures::Stream;
use tokio::sync::oneshot;

use super::{App, Authorized};
use crate::db::{
    Change, ChangeReceiver, ClaimedOp, CreateSession, PayloadHash, Resumed, SessionEventRecord,
    SessionFilter, SessionPage, SessionRecord, Store,
};
use crate::error::{self, AppError};

/// Events that a watcher reads at once.
const WATCH_PAGE: u32 = 100;
/// A watcher looks again after this long even without a change: a notice can be lost.
const WATCH_FALLBACK: Duration = Duration::from_secs(60);

impl App {
    pub(crate) async fn create_session(
        &self,
        authorized: &Authorized,
        payload: &PayloadHash,
        params: &CreateSession,
        wait: Duration,
    ) -> Result<SessionRecord, AppError> {
        let changes = self.feed.subscribe();
        let created = self.store.create_session(authorized.context(), payload, &self.holder, params).await?;
        let done = |state| !matches!(state, SessionState::Pending | SessionState::Starting);
        self.settle(created.session, created.op, changes, wait, done).await
    }

    pub(crate) async fn get_session(
        &self,
        authorized: &Authorized,
        reference: &str,
    ) -> Result<SessionRecord, AppError> {
        Ok(self.store.resolve_session(authorized.organization_id(), reference).await?)
    }

    pub(crate) async fn list_sessions(
        &self,
        authorized: &Authorized,
        filter: &SessionFilter,
        page_size: u32,
        page_token: Option<&str>,
    ) -> Result<SessionPage, AppError> {
        Ok(self.store.list_sessions(authorized.organization_id(), filter, page_size, page_token).await?)
    }

    pub(crate) async fn delete_session(
        &self,
        authorized: &Authorized,
        payload: &PayloadHash,
        reference: &str,
        wait: Duration,
    ) -> Result<SessionRecord, AppError> {
        let changes = self.feed.subscribe();
        let asked = self.store.request_delete(authorized.context(), payload, &self.holder, reference).await?;
        self.settle(asked.session, asked.op, changes, wait, |state| state == SessionState::Deleted).await
    }

    pub(crate) async fn pause_session(
        &self,
        authorized: &Authorized,
        payload: &PayloadHash,
        reference: &str,
        wait: Duration,
    ) -> Result<SessionRecord, AppError> {
        let changes = self.feed.subscribe();
        let asked = self.store.request_pause(authorized.context(), payload, &self.holder, reference).await?;
        self.settle(asked.session, asked.op, changes, wait, |state| state != SessionState::Pausing).await
    }

    pub(crate) async fn resume_session(
        &self,
        authorized: &Authorized,
        payload: &PayloadHash,
        reference: &str,
        wait: Duration,
    ) -> Result<SessionRecord, AppError> {
        let changes = self.feed.subscribe();
        match self.store.request_resume(authorized.context(), payload, &self.holder, reference).await? {
            Resumed::Accepted(asked) => {
                self.settle(asked.session, asked.op, changes, wait, |state| state != SessionState::Resuming)
                    .await
            }
            // Not an error of the call: the session stays paused, and says why.
            Resumed::Refused(session) => Ok(session),
        }
    }

    /// Executes what the caller's commit claimed, and waits until the session's state is `done`.
    async fn settle(
        &self,
        session: SessionRecord,
        op: Option<ClaimedOp>,
        mut changes: ChangeReceiver,
        wait: Duration,
        done: impl Fn(SessionState) -> bool,
    ) -> Result<SessionRecord, AppError> {
        let outcome = op.map(|op| self.executor.spawn(op));
        if wait.is_zero() || done(session.state) {
            return Ok(session);
        }
        let mut latest = session;
        let waited = tokio::time::timeout(wait, async {
            if let Some(session) = first_answer(outcome, &mut changes, &latest, &self.store).await?
                && done(session.state)
            {
                return Ok::<_, AppError>(session);
            }
            loop {
                let session = self.store.session(&latest.id).await?;
                if done(session.state) {
                    return Ok(session);
                }
                latest = session;
                changed(&mut changes, &latest).await;
            }
        });
        match waited.await {
            Ok(result) => result,
            Err(_) => Ok(latest),
        }
    }

    /// Returns the session's log from a cursor on, followed until it is deleted.
    pub(crate) async fn watch_session(
        &self,
        authorized: &Authorized,
        reference: &str,
        after_cursor: u64,
    ) -> Result<impl Stream<Item = Result<SessionEventRecord, ConnectError>> + Send + use<>, AppError> {
        struct Watch {
            store: Store,
            session: SessionRecord,
            cursor: u64,
            ready: VecDeque<SessionEventRecord>,
            changes: ChangeReceiver,
            stopping: cloister_service::CancellationToken,
            ended: bool,
        }
        let changes = self.feed.subscribe();
        let session = self.store.resolve_session(authorized.organization_id(), reference).await?;
        if after_cursor > session.last_cursor {
            return Err(AppError::field(
                "after_cursor",
                format!("the log of `{}` ends at {}", session.id, session.last_cursor),
            ));
        }
        let watch = Watch {
            store: self.store.clone(),
            session,
            cursor: after_cursor,
            ready: VecDeque::new(),
            changes,
            stopping: self.stopping(),
            ended: false,
        };
        Ok(futures::stream::unfold(watch, |mut watch| async move {
            loop {
                if let Some(event) = watch.ready.pop_front() {
                    watch.cursor = event.cursor;
                    watch.ended |= event.state == SessionState::Deleted;
                    return Some((Ok(event), watch));
                }
                if watch.ended {
                    return None;
                }
                match watch.store.session_events_after(&watch.session.id, watch.cursor, WATCH_PAGE).await {
                    Ok(events) if events.is_empty() => {
                        let stopping = watch.stopping.clone();
                        tokio::select! {
                            () = stopping.cancelled() => {
                                watch.ended = true;
                                return Some((Err(stopped()), watch));
                            }
                            () = changed(&mut watch.changes, &watch.session) => {}
                        }
                    }
                    Ok(events) => watch.ready.extend(events),
                    Err(error) => {
                        watch.ended = true;
                        return Some((Err(AppError::from(error).into()), watch));
                    }
                }
            }
        }))
    }
}

pub(super) fn stopped() -> ConnectError {
    AppError::new(&error::STOPPING, "the coordinator is stopping").into()
}

/// Waits for the caller's own operation, which is the shortest way to the answer; without one, for a change.
async fn first_answer(
    outcome: Option<oneshot::Receiver<SessionRecord>>,
    changes: &mut ChangeReceiver,
    latest: &SessionRecord,
    store: &Store,
) -> Result<Option<SessionRecord>, AppError> {
    match outcome {
        // The sender goes without a word when the operation is tried again later.
        Some(outcome) => Ok(outcome.await.ok()),
        None => {
            let session = store.session(&latest.id).await?;
            if session.generation == latest.generation {
                changed(changes, latest).await;
            }
            Ok(None)
        }
    }
}

/// Waits until the session may have changed.
async fn changed(changes: &mut ChangeReceiver, session: &SessionRecord) {
    let wait = async {
        loop {
            match changes.recv().await {
                Some(Change::Session(id)) if id == session.id => return,
                Some(Change::Session(_) | Change::Host(_)) => {}
                Some(Change::Rescan) => return,
                // The feed has ended: the coordinator is stopping, and the caller's deadline decides.
                None => std::future::pending().await,
            }
        }
    };
    // Running out is not an error: the caller reads the session again either way.
    let _ = tokio::time::timeout(WATCH_FALLBACK, wait).await;
}
