//! The audit log: who changed what, written in the transaction of the change.

use chrono::{DateTime, Utc};
use cloister_types::session::SessionState;
use cloister_types::{BackendKind, HostId, OrganizationId, SandboxId, SessionId, UserId};

use sqlx::PgConnection;

use super::fault::{after_commit, before_commit};
use super::session::{parse_optional, parse_word, resolve};
use super::store::Failure;
use super::{Store, StoreError};

/// Who asks, for what, from where: becomes the audit row of the change.
#[derive(Debug, Clone)]
pub struct AuditContext {
    /// Whose objects are meant.
    pub organization_id: OrganizationId,
    /// Whose request ids are meant.
    pub user_id: UserId,
    /// Shown in the log, for example `usr_…/tok_…`.
    pub principal: String,
    /// The action of the RPC's annotation, for example `session.create`.
    pub action: String,
    /// The caller's request id; empty for a call without one.
    pub request_id: String,
    /// The peer's address.
    pub source: String,
}

/// One row of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditEntry {
    /// Grows.
    pub id: u64,
    /// When.
    pub at: DateTime<Utc>,
    /// Who.
    pub principal: String,
    /// What was done.
    pub action: String,
    /// The id of what it was done to.
    pub resource: String,
    /// The caller's request id.
    pub request_id: String,
    /// From where.
    pub source: String,
}

/// A page of the log, newest first.
#[derive(Debug, Clone)]
pub struct AuditPage {
    /// The entries.
    pub entries: Vec<AuditEntry>,
    /// Set when there are more.
    pub next_page_token: Option<String>,
}

/// Where an exec goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExecTarget {
    /// The session.
    pub session_id: SessionId,
    /// Its state: only an `active` session runs anything.
    pub state: SessionState,
    /// Why it is not active, for people.
    pub message: String,
    /// Its host.
    pub host_id: Option<HostId>,
    /// Its sandbox.
    pub sandbox_id: Option<SandboxId>,
    /// Sent with every command.
    pub epoch: u64,
    /// Its backend.
    pub backend: Option<BackendKind>,
}

impl Store {
    /// Writes one row that belongs to no change of the store, durably before it returns.
    ///
    /// # Errors
    ///
    /// [`StoreError::Unavailable`].
    pub async fn append_audit(&self, context: &AuditContext, resource: &str) -> Result<(), StoreError> {
        self.observe("append_audit", async {
            insert_audit(&mut *self.pool.acquire().await?, context, resource).await
        })
        .await
    }

    /// Lists the organization's rows, newest first; only those about `resource` when it is given.
    ///
    /// # Errors
    ///
    /// [`StoreError::PageToken`], [`StoreError::Unavailable`].
    pub async fn list_audit(
        &self,
        organization_id: &OrganizationId,
        resource: Option<&str>,
        page_size: u32,
        page_token: Option<&str>,
    ) -> Result<AuditPage, StoreError> {
        self.observe("list_audit", async {
            let before = match page_token {
                None => i64::MAX,
                Some(token) => token.parse().map_err(|_| StoreError::PageToken)?,
            };
            if resource.is_some_and(|resource| resource.contains('\0')) {
                return Ok(AuditPage { entries: Vec::new(), next_page_token: None });
            }
            let size = page_size.clamp(1, 500);
            // Reads `audit_log_by_organization`, or `audit_log_by_resource` when a resource is given.
            let rows = match resource {
                None => {
                    sqlx::query_as!(
                        AuditRow,
                        "SELECT id, at, principal, action, resource, request_id, source FROM audit_log
                         WHERE organization_id = $1 AND id < $2 ORDER BY id DESC LIMIT $3",
                        organization_id.as_str(),
                        before,
                        i64::from(size) + 1,
                    )
                    .fetch_all(&self.pool)
                    .await?
                }
                Some(resource) => {
                    sqlx::query_as!(
                        AuditRow,
                        "SELECT id, at, principal, action, resource, request_id, source FROM audit_log
                         WHERE organization_id = $1 AND resource = $2 AND id < $3 ORDER BY id DESC LIMIT $4",
                        organization_id.as_str(),
                        resource,
                        before,
                        i64::from(size) + 1,
                    )
                    .fetch_all(&self.pool)
                    .await?
                }
            };
            let mut entries = rows.into_iter().map(AuditEntry::try_from).collect::<Result<Vec<_>, _>>()?;
            let more = entries.len() > usize::try_from(size).unwrap_or(usize::MAX);
            if more {
                entries.pop();
            }
            let next_page_token = entries.last().filter(|_| more).map(|entry| entry.id.to_string());
            Ok(AuditPage { entries, next_page_token })
        })
        .await
    }

    /// Reads where an exec goes and, when the session is `active`, writes its audit row, durably, in one round trip.
    /// `reference` is an id, a unique prefix of one, or a name (the latter two cost a second round trip).
    ///
    /// # Errors
    ///
    /// [`StoreError::NotFound`], [`StoreError::Ambiguous`], [`StoreError::Unavailable`].
    pub async fn begin_exec(
        &self,
        context: &AuditContext,
        reference: &str,
    ) -> Result<ExecTarget, StoreError> {
        self.observe("begin_exec", async {
            if !reference.contains('\0')
                && let Some(target) = self.exec_target(context, reference).await?
            {
                return Ok(target);
            }
            let mut connection = self.pool.acquire().await?;
            let session = resolve(&mut connection, &context.organization_id, reference).await?;
            drop(connection);
            let target = self.exec_target(context, session.id.as_str()).await?;
            Ok(target.ok_or_else(|| StoreError::not_found("session", reference))?)
        })
        .await
    }
}

impl Store {
    /// Reads `sessions_pkey` and `sessions_live_name_key`. The row is written from the row that was read, so that an
    /// audit row exists exactly for what may run.
    async fn exec_target(
        &self,
        context: &AuditContext,
        reference: &str,
    ) -> Result<Option<ExecTarget>, Failure> {
        before_commit("begin_exec");
        let row = sqlx::query!(
            r#"WITH s AS (
                   SELECT id, state, message, host_id, sandbox_id, epoch, backend FROM sessions
                   WHERE organization_id = $1 AND (id = $2 OR (name = $2 AND state <> 'deleted'))
                   LIMIT 1),
               written AS (
                   INSERT INTO audit_log (organization_id, principal, action, resource, request_id, source)
                   SELECT $1, $3, $4, s.id, $5, $6 FROM s WHERE s.state = 'active')
               SELECT id, state, message, host_id, sandbox_id, epoch, backend FROM s"#,
            context.organization_id.as_str(),
            reference,
            context.principal,
            context.action,
            context.request_id,
            context.source,
        )
        .fetch_optional(&self.pool)
        .await?;
        after_commit("begin_exec");
        let Some(row) = row else { return Ok(None) };
        let id = row.id.as_str();
        Ok(Some(ExecTarget {
            session_id: parse_word("sessions", id, "id", id)?,
            state: parse_word("sessions", id, "state", &row.state)?,
            message: row.message,
            host_id: parse_optional("sessions", id, "host_id", row.host_id.as_deref())?,
            sandbox_id: parse_optional("sessions", id, "sandbox_id", row.sandbox_id.as_deref())?,
            epoch: row.epoch.unsigned_abs(),
            backend: parse_optional("sessions", id, "backend", row.backend.as_deref())?,
        }))
    }
}

struct AuditRow {
    id: i64,
    at: DateTime<Utc>,
    principal: String,
    action: String,
    resource: String,
    request_id: String,
    source: String,
}

impl TryFrom<AuditRow> for AuditEntry {
    type Error = StoreError;

    fn try_from(row: AuditRow) -> Result<Self, StoreError> {
        Ok(Self {
            id: row.id.unsigned_abs(),
            at: row.at,
            principal: row.principal,
            action: row.action,
            resource: row.resource,
            request_id: row.request_id,
            source: row.source,
        })
    }
}

/// Writes the audit row of a change, in its transaction.
pub(super) async fn insert_audit(
    connection: &mut PgConnection,
    context: &AuditContext,
    resource: &str,
) -> Result<(), Failure> {
    sqlx::query!(
        "INSERT INTO audit_log (organization_id, principal, action, resource, request_id, source)
         VALUES ($1, $2, $3, $4, $5, $6)",
        context.organization_id.as_str(),
        context.principal,
        context.action,
        resource,
        context.request_id,
        context.source,
    )
    .execute(connection)
    .await?;
    Ok(())
}
