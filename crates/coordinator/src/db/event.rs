//! A session's append-only log. Positions start at 1 and have no holes.

use chrono::{DateTime, Utc};
use cloister_types::session::{Reason, SessionState};
use cloister_types::{EventCursor, SessionId};

use sqlx::PgConnection;

use super::session::{parse_optional, parse_word};
use super::store::{Failure, storable, to_i64};
use super::{Store, StoreError};

/// One entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionEventRecord {
    /// The session.
    pub session_id: SessionId,
    /// Its position.
    pub cursor: EventCursor,
    /// `session.created`, `session.<state>` for a change of state, or a note such as `session.resume_refused`.
    pub kind: String,
    /// The state after it.
    pub state: SessionState,
    /// Why.
    pub reason: Option<Reason>,
    /// The same for people.
    pub message: String,
    /// When.
    pub at: DateTime<Utc>,
}

impl Store {
    /// Returns up to `limit` entries after `cursor` (0 reads from the start), oldest first. Empty means that there is
    /// nothing newer yet: wait for a [`super::Change`] of the session and read again.
    ///
    /// # Errors
    ///
    /// [`StoreError::Unavailable`].
    pub async fn session_events_after(
        &self,
        session_id: &SessionId,
        cursor: EventCursor,
        limit: u32,
    ) -> Result<Vec<SessionEventRecord>, StoreError> {
        self.observe("session_events_after", async {
            // Reads `session_events_pkey`.
            let rows = sqlx::query!(
                "SELECT cursor, kind, state, reason, message, at FROM session_events
                 WHERE session_id = $1 AND cursor > $2 ORDER BY cursor LIMIT $3",
                session_id.as_str(),
                to_i64(cursor),
                i64::from(limit.clamp(1, 1000)),
            )
            .fetch_all(&self.pool)
            .await?;
            let records = rows.into_iter().map(|row| {
                Ok(SessionEventRecord {
                    session_id: session_id.clone(),
                    cursor: row.cursor.unsigned_abs(),
                    kind: row.kind,
                    state: parse_word("session_events", session_id.as_str(), "state", &row.state)?,
                    reason: parse_optional(
                        "session_events",
                        session_id.as_str(),
                        "reason",
                        row.reason.as_deref(),
                    )?,
                    message: row.message,
                    at: row.at,
                })
            });
            records.collect::<Result<Vec<_>, Failure>>()
        })
        .await
    }

    /// Appends an entry that changes no state, for example `session.no_network`, and returns its position.
    ///
    /// # Errors
    ///
    /// [`StoreError::NotFound`], [`StoreError::Unavailable`].
    pub async fn append_session_event(
        &self,
        session_id: &SessionId,
        kind: &str,
        message: &str,
    ) -> Result<EventCursor, StoreError> {
        self.observe("append_session_event", async {
            append(&mut *self.pool.acquire().await?, session_id, kind, None, message).await
        })
        .await
    }
}

/// Appends an entry that changes no state, and tells about it. The session row gives out the position, so that there
/// are no holes. Reads `sessions_pkey`.
pub(super) async fn append(
    connection: &mut PgConnection,
    session_id: &SessionId,
    kind: &str,
    reason: Option<Reason>,
    message: &str,
) -> Result<EventCursor, Failure> {
    let cursor = sqlx::query_scalar!(
        r#"WITH s AS (
               UPDATE sessions SET last_cursor = last_cursor + 1, generation = generation + 1
               WHERE id = $1 RETURNING id, last_cursor, state),
           event AS (
               INSERT INTO session_events (session_id, cursor, kind, state, reason, message)
               SELECT s.id, s.last_cursor, $2, s.state, $3, $4 FROM s),
           notice AS (SELECT pg_notify('cloister_changes', s.id) FROM s)
           SELECT s.last_cursor AS "cursor!" FROM s, notice"#,
        session_id.as_str(),
        kind,
        reason.map(Reason::as_str),
        storable(message),
    )
    .fetch_optional(connection)
    .await?;
    let cursor = cursor.ok_or_else(|| StoreError::not_found("session", session_id.as_str()))?;
    Ok(cursor.unsigned_abs())
}
