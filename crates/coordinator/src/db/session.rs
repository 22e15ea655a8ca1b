//! Reading sessions: one, by what people call it, and many, page by page.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::str::FromStr;

use chrono::{DateTime, Utc};
use cloister_types::session::{Reason, SessionState};
use cloister_types::{
    BackendKind, ByteCount, CpuMillis, HostId, Isolation, IsolationFact, Limits, OrganizationId, SandboxId,
    SessionId,
};

use sqlx::PgConnection;
use sqlx::types::Json;

use super::store::{Failure, to_i64};
use super::{Store, StoreError};

/// Sorts after every id in byte order.
const AFTER_EVERY_ID: &str = "~";
/// Fewest characters of an id's body that count as a prefix.
const PREFIX_MIN_LEN: usize = 4;
/// Ids that an ambiguous prefix shows.
const CANDIDATES_MAX: usize = 5;

/// A compile-checked query for sessions: the columns of a relation `s` between the two texts. The overrides are
/// needed because a relation that is a CTE tells the macro nothing about NULLs.
macro_rules! session_query {
    ($before:literal, $after:literal $(, $argument:expr)* $(,)?) => {
        sqlx::query_as!(
            $crate::db::session::SessionRow,
            $before
                + r#"s.id AS "id!", s.organization_id AS "organization_id!", s.name AS "name?",
                     s.labels AS "labels!: crate::db::session::Labels",
                     s.state AS "state!", s.reason AS "reason?", s.message AS "message!", s.image AS "image!",
                     s.memory_bytes AS "memory_bytes!", s.cpu_millis AS "cpu_millis!", s.pids AS "pids!",
                     s.disk_bytes AS "disk_bytes!", s.requested_backend AS "requested_backend?",
                     s.isolation_floor AS "isolation_floor!", s.backend AS "backend?", s.isolation AS "isolation?",
                     s.host_id AS "host_id?", s.sandbox_id AS "sandbox_id?",
                     s.facts AS "facts!: crate::db::session::Facts",
                     s.network AS "network!", s.epoch AS "epoch!", s.generation AS "generation!",
                     s.last_cursor AS "last_cursor!", s.created_at AS "created_at!", s.updated_at AS "updated_at!",
                     s.expires_at AS "expires_at?", s.deadline_at AS "deadline_at?""#
                + $after
            $(, $argument)*
        )
    };
}
pub(super) use session_query;

/// One session as the store has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionRecord {
    /// Its id.
    pub id: SessionId,
    /// Whose it is.
    pub organization_id: OrganizationId,
    /// Unique among the organization's undeleted sessions.
    pub name: Option<String>,
    /// The caller's labels.
    pub labels: BTreeMap<String, String>,
    /// Where it stands.
    pub state: SessionState,
    /// Why; `None` when there is nothing to explain.
    pub reason: Option<Reason>,
    /// The same for people; may be empty.
    pub message: String,
    /// What it boots from.
    pub image: String,
    /// What its sandbox may use.
    pub limits: Limits,
    /// The backend that was asked for; `None` is `auto`.
    pub requested_backend: Option<BackendKind>,
    /// The least isolation it accepts.
    pub isolation_floor: Isolation,
    /// The backend it was placed with.
    pub backend: Option<BackendKind>,
    /// The isolation its running sandbox reported.
    pub isolation: Option<Isolation>,
    /// The host it was placed on; kept while paused, since its layer is there.
    pub host_id: Option<HostId>,
    /// Its current (or next) sandbox.
    pub sandbox_id: Option<SandboxId>,
    /// What was read inside the running sandbox.
    pub facts: Vec<IsolationFact>,
    /// Whether the sandbox has a network beyond its loopback.
    pub network: bool,
    /// Sent with every effect on a host; only grows.
    pub epoch: u64,
    /// Grows with each change.
    pub generation: u64,
    /// The position of its newest event.
    pub last_cursor: u64,
    /// When it was created.
    pub created_at: DateTime<Utc>,
    /// When it last changed.
    pub updated_at: DateTime<Utc>,
    /// When it is deleted by itself.
    pub expires_at: Option<DateTime<Utc>>,
    /// When the current step is given up.
    pub deadline_at: Option<DateTime<Utc>>,
}

/// Which sessions to list.
#[derive(Debug, Clone, Default)]
pub struct SessionFilter {
    /// All of these labels.
    pub labels: BTreeMap<String, String>,
    /// One of these states; empty means every one but `deleted`.
    pub states: Vec<SessionState>,
}

/// A page of sessions, newest first.
#[derive(Debug, Clone)]
pub struct SessionPage {
    /// The sessions.
    pub sessions: Vec<SessionRecord>,
    /// Set when there are more.
    pub next_page_token: Option<String>,
}

impl Store {
    /// Returns the session with exactly this id, of any organization: for reconcilers.
    ///
    /// # Errors
    ///
    /// [`StoreError::NotFound`], [`StoreError::Unavailable`].
    pub async fn session(&self, id: &SessionId) -> Result<SessionRecord, StoreError> {
        self.observe("session", async {
            let mut connection = self.pool.acquire().await?;
            let session = read(&mut connection, id.as_str()).await?;
            Ok(session.ok_or_else(|| StoreError::not_found("session", id.as_str()))?)
        })
        .await
    }

    /// Returns the organization's session that `reference` means: an id (of a deleted session too), the name of an
    /// undeleted one, or a prefix of an undeleted one's id that no other has (`ses_` may be left out; at least four
    /// characters of the body).
    ///
    /// # Errors
    ///
    /// [`StoreError::NotFound`], [`StoreError::Ambiguous`], [`StoreError::Unavailable`].
    pub async fn resolve_session(
        &self,
        organization_id: &OrganizationId,
        reference: &str,
    ) -> Result<SessionRecord, StoreError> {
        self.observe("resolve_session", async {
            resolve(&mut *self.pool.acquire().await?, organization_id, reference).await
        })
        .await
    }

    /// Lists sessions, newest first. A page token goes on after the last session seen: what is created or deleted
    /// meanwhile neither repeats nor hides others.
    ///
    /// # Errors
    ///
    /// [`StoreError::PageToken`], [`StoreError::Unavailable`].
    pub async fn list_sessions(
        &self,
        organization_id: &OrganizationId,
        filter: &SessionFilter,
        page_size: u32,
        page_token: Option<&str>,
    ) -> Result<SessionPage, StoreError> {
        self.observe("list_sessions", async {
            let before = match page_token {
                None => AFTER_EVERY_ID.to_owned(),
                Some(token) => token.parse::<SessionId>().map_err(|_| StoreError::PageToken)?.into(),
            };
            let size = page_size.clamp(1, 500);
            let labels = Json(&filter.labels);
            let rows = if filter.states.is_empty() {
                // Reads `sessions_live_by_organization`, or `sessions_by_labels` when labels pick few.
                session_query!(
                    "SELECT ",
                    " FROM sessions s WHERE s.organization_id = $1 AND s.id < $2 AND s.state <> 'deleted'
                      AND ($3::jsonb = '{}' OR s.labels @> $3) ORDER BY s.id DESC LIMIT $4",
                    organization_id.as_str(),
                    before,
                    labels as _,
                    i64::from(size) + 1,
                )
                .fetch_all(&self.pool)
                .await?
            } else {
                let states: Vec<String> =
                    filter.states.iter().map(|state| state.as_str().to_owned()).collect();
                // Reads `sessions_by_organization`, or `sessions_by_labels` when labels pick few.
                session_query!(
                    "SELECT ",
                    " FROM sessions s WHERE s.organization_id = $1 AND s.id < $2 AND s.state = ANY($3)
                      AND ($4::jsonb = '{}' OR s.labels @> $4) ORDER BY s.id DESC LIMIT $5",
                    organization_id.as_str(),
                    before,
                    &states[..],
                    labels as _,
                    i64::from(size) + 1,
                )
                .fetch_all(&self.pool)
                .await?
            };
            let mut sessions =
                rows.into_iter().map(SessionRecord::try_from).collect::<Result<Vec<_>, _>>()?;
            let more = sessions.len() > usize::try_from(size).unwrap_or(usize::MAX);
            if more {
                sessions.pop();
            }
            let next_page_token = sessions.last().filter(|_| more).map(|session| session.id.to_string());
            Ok(SessionPage { sessions, next_page_token })
        })
        .await
    }
}

/// The type of `sessions.labels`: an alias, since PostgreSQL cuts a column's name at 63 bytes.
pub(super) type Labels = Json<BTreeMap<String, String>>;
/// The type of `sessions.facts`.
pub(super) type Facts = Json<Vec<IsolationFact>>;

/// A row of `sessions`.
pub(super) struct SessionRow {
    pub(super) id: String,
    pub(super) organization_id: String,
    pub(super) name: Option<String>,
    pub(super) labels: Labels,
    pub(super) state: String,
    pub(super) reason: Option<String>,
    pub(super) message: String,
    pub(super) image: String,
    pub(super) memory_bytes: i64,
    pub(super) cpu_millis: i64,
    pub(super) pids: i64,
    pub(super) disk_bytes: i64,
    pub(super) requested_backend: Option<String>,
    pub(super) isolation_floor: String,
    pub(super) backend: Option<String>,
    pub(super) isolation: Option<String>,
    pub(super) host_id: Option<String>,
    pub(super) sandbox_id: Option<String>,
    pub(super) facts: Facts,
    pub(super) network: bool,
    pub(super) epoch: i64,
    pub(super) generation: i64,
    pub(super) last_cursor: i64,
    pub(super) created_at: DateTime<Utc>,
    pub(super) updated_at: DateTime<Utc>,
    pub(super) expires_at: Option<DateTime<Utc>>,
    pub(super) deadline_at: Option<DateTime<Utc>>,
}

impl TryFrom<SessionRow> for SessionRecord {
    type Error = StoreError;

    fn try_from(row: SessionRow) -> Result<Self, StoreError> {
        let id = row.id.as_str();
        Ok(Self {
            id: parse_word("sessions", id, "id", id)?,
            organization_id: parse_word("sessions", id, "organization_id", &row.organization_id)?,
            name: row.name,
            labels: row.labels.0,
            state: parse_word("sessions", id, "state", &row.state)?,
            reason: parse_optional("sessions", id, "reason", row.reason.as_deref())?,
            message: row.message,
            image: row.image,
            limits: Limits {
                memory: ByteCount(row.memory_bytes.unsigned_abs()),
                cpus: CpuMillis(parse_number(id, "cpu_millis", row.cpu_millis)?),
                pids: parse_number(id, "pids", row.pids)?,
                disk: ByteCount(row.disk_bytes.unsigned_abs()),
            },
            requested_backend: parse_optional(
                "sessions",
                id,
                "requested_backend",
                row.requested_backend.as_deref(),
            )?,
            isolation_floor: parse_word("sessions", id, "isolation_floor", &row.isolation_floor)?,
            backend: parse_optional("sessions", id, "backend", row.backend.as_deref())?,
            isolation: parse_optional("sessions", id, "isolation", row.isolation.as_deref())?,
            host_id: parse_optional("sessions", id, "host_id", row.host_id.as_deref())?,
            sandbox_id: parse_optional("sessions", id, "sandbox_id", row.sandbox_id.as_deref())?,
            facts: row.facts.0,
            network: row.network,
            epoch: row.epoch.unsigned_abs(),
            generation: row.generation.unsigned_abs(),
            last_cursor: row.last_cursor.unsigned_abs(),
            created_at: row.created_at,
            updated_at: row.updated_at,
            expires_at: row.expires_at,
            deadline_at: row.deadline_at,
        })
    }
}

/// Returns the value that a text column stands for.
pub(super) fn parse_word<T>(
    table: &'static str,
    id: &str,
    column: &'static str,
    text: &str,
) -> Result<T, StoreError>
where
    T: FromStr,
    T::Err: Display,
{
    text.parse().map_err(|error: T::Err| StoreError::Corrupt {
        table,
        id: id.to_owned(),
        column,
        problem: error.to_string(),
    })
}

/// Returns the value that a nullable text column stands for.
pub(super) fn parse_optional<T>(
    table: &'static str,
    id: &str,
    column: &'static str,
    text: Option<&str>,
) -> Result<Option<T>, StoreError>
where
    T: FromStr,
    T::Err: Display,
{
    text.map(|text| parse_word(table, id, column, text)).transpose()
}

fn parse_number(id: &str, column: &'static str, value: i64) -> Result<u32, StoreError> {
    u32::try_from(value).map_err(|error| StoreError::Corrupt {
        table: "sessions",
        id: id.to_owned(),
        column,
        problem: error.to_string(),
    })
}

/// Returns the session with this id. Reads `sessions_pkey`.
pub(super) async fn read(connection: &mut PgConnection, id: &str) -> Result<Option<SessionRecord>, Failure> {
    let row =
        session_query!("SELECT ", " FROM sessions s WHERE s.id = $1", id).fetch_optional(connection).await?;
    Ok(row.map(SessionRecord::try_from).transpose()?)
}

/// Returns the session with this id, locked until the transaction ends. Reads `sessions_pkey`.
pub(super) async fn lock(connection: &mut PgConnection, id: &SessionId) -> Result<SessionRecord, Failure> {
    let row = session_query!("SELECT ", " FROM sessions s WHERE s.id = $1 FOR UPDATE", id.as_str())
        .fetch_optional(connection)
        .await?;
    let row = row.ok_or_else(|| StoreError::not_found("session", id.as_str()))?;
    Ok(SessionRecord::try_from(row)?)
}

/// Finds what a caller means. Reads `sessions_pkey` and `sessions_live_name_key`, then
/// `sessions_live_by_organization` for a prefix.
pub(super) async fn resolve(
    connection: &mut PgConnection,
    organization_id: &OrganizationId,
    reference: &str,
) -> Result<SessionRecord, Failure> {
    if reference.contains('\0') {
        return Err(StoreError::not_found("session", reference).into());
    }
    // No id can be a name: names have no underscore.
    let exact = session_query!(
        "SELECT ",
        " FROM sessions s
          WHERE s.organization_id = $1 AND (s.id = $2 OR (s.name = $2 AND s.state <> 'deleted')) LIMIT 1",
        organization_id.as_str(),
        reference,
    )
    .fetch_optional(&mut *connection)
    .await?;
    if let Some(row) = exact {
        return Ok(SessionRecord::try_from(row)?);
    }
    let Some((from, to)) = prefix_range(SessionId::PREFIX, reference) else {
        return Err(StoreError::not_found("session", reference).into());
    };
    let mut rows = session_query!(
        "SELECT ",
        " FROM sessions s WHERE s.organization_id = $1 AND s.id >= $2 AND s.id < $3 AND s.state <> 'deleted'
          ORDER BY s.id DESC LIMIT $4",
        organization_id.as_str(),
        from,
        to,
        to_i64(CANDIDATES_MAX.try_into().unwrap_or(u64::MAX)),
    )
    .fetch_all(connection)
    .await?;
    if rows.len() > 1 {
        let candidates = rows.into_iter().map(|row| row.id).collect();
        let reference = reference.chars().take(64).collect();
        return Err(StoreError::Ambiguous { kind: "session", reference, candidates }.into());
    }
    match rows.pop() {
        Some(row) => Ok(SessionRecord::try_from(row)?),
        None => Err(StoreError::not_found("session", reference).into()),
    }
}

/// Returns the range of ids, in byte order, that start with `reference`; `None` when it is no prefix of an id.
pub(super) fn prefix_range(prefix: &str, reference: &str) -> Option<(String, String)> {
    let body = reference.strip_prefix(prefix).and_then(|rest| rest.strip_prefix('_')).unwrap_or(reference);
    let is_body = body.len() >= PREFIX_MIN_LEN
        && body.bytes().all(|byte| byte.is_ascii_digit() || byte.is_ascii_lowercase());
    is_body.then(|| (format!("{prefix}_{body}"), format!("{prefix}_{body}~")))
}

#[cfg(test)]
mod tests {
    use super::prefix_range;

    #[test]
    fn a_prefix_needs_four_characters_of_the_body() {
        let range = Some(("ses_01ab".to_owned(), "ses_01ab~".to_owned()));
        assert_eq!(prefix_range("ses", "01ab"), range);
        assert_eq!(prefix_range("ses", "ses_01ab"), range);
        for bad in ["", "ses_", "01a", "ses_01a", "01AB", "01a%", "ses_01a_"] {
            assert_eq!(prefix_range("ses", bad), None, "`{bad}` was accepted");
        }
    }
}
