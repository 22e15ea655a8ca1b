//! API tokens: only a hash is kept.

use std::time::Duration;

use chrono::{DateTime, Utc};
use cloister_types::{TokenId, UserId};
use sha2::{Digest, Sha256};

use sqlx::PgConnection;

use super::audit::insert_audit;
use super::fault::commit;
use super::idempotency::{claim_key, first_answer};
use super::session::parse_word;
use super::store::{Failure, to_seconds};
use super::{AuditContext, PayloadHash, Store, StoreError};

/// A compile-checked query for tokens: the columns of a relation `t` between the two texts.
macro_rules! token_query {
    ($before:literal, $after:literal $(, $argument:expr)* $(,)?) => {
        sqlx::query_as!(
            TokenRow,
            $before
                + r#"t.id AS "id!", t.user_id AS "user_id!", t.name AS "name!", t.created_at AS "created_at!",
                     t.expires_at AS "expires_at?", t.last_used_at AS "last_used_at?", t.revoked_at AS "revoked_at?""#
                + $after
            $(, $argument)*
        )
    };
}

/// SHA-256 of a bearer. Tokens are random, so that a plain digest is as good as a slow one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct TokenHash(pub [u8; 32]);

impl TokenHash {
    /// Returns the hash of a bearer as it stands in the header.
    pub fn of(secret: &str) -> Self {
        Self(Sha256::digest(secret.as_bytes()).into())
    }
}

impl std::fmt::Debug for TokenHash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TokenHash(…)")
    }
}

/// One token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenRecord {
    /// Its id.
    pub id: TokenId,
    /// Whose it is.
    pub user_id: UserId,
    /// Its name.
    pub name: String,
    /// When it was made.
    pub created_at: DateTime<Utc>,
    /// When it stops to work by itself.
    pub expires_at: Option<DateTime<Utc>>,
    /// When it was last shown, to the minute.
    pub last_used_at: Option<DateTime<Utc>>,
    /// When somebody revoked it.
    pub revoked_at: Option<DateTime<Utc>>,
}

/// The answer to [`Store::create_token`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CreatedToken {
    /// The token.
    pub token: TokenRecord,
    /// The request id was seen before: the caller's new secret was not stored and must not be shown.
    pub repeated: bool,
}

impl Store {
    /// Creates a token of the context's user.
    ///
    /// # Errors
    ///
    /// [`StoreError::NameTaken`] by a live token of the user, [`StoreError::IdempotencyMismatch`],
    /// [`StoreError::Unavailable`].
    pub async fn create_token(
        &self,
        context: &AuditContext,
        payload: &PayloadHash,
        name: &str,
        hash: &TokenHash,
        ttl: Option<Duration>,
    ) -> Result<CreatedToken, StoreError> {
        let created = self
            .observe("create_token", async {
                let mut tx = self.pool.begin().await?;
                let id = TokenId::generate();
                if !claim_key(&mut tx, context, payload, id.as_str()).await? {
                    return Ok(None);
                }
                // An expired token is dead, but only a revoked one gives its name back: an index knows no time.
                sqlx::query!(
                    "UPDATE tokens SET revoked_at = expires_at, generation = generation + 1
                     WHERE user_id = $1 AND name = $2 AND revoked_at IS NULL AND expires_at <= cloister_now()
                       AND NOT local_owner",
                    context.user_id.as_str(),
                    name,
                )
                .execute(&mut *tx)
                .await?;
                let holder = sqlx::query_scalar!(
                    "SELECT id FROM tokens WHERE user_id = $1 AND name = $2 AND revoked_at IS NULL",
                    context.user_id.as_str(),
                    name,
                )
                .fetch_optional(&mut *tx)
                .await?;
                if let Some(holder) = holder {
                    return Err(StoreError::NameTaken { kind: "token", name: name.to_owned(), holder }.into());
                }
                let row = token_query!(
                    "WITH t AS (
                         INSERT INTO tokens (id, user_id, name, hash, expires_at)
                         VALUES ($1, $2, $3, $4, cloister_now() + make_interval(secs => $5)) RETURNING *)
                     SELECT ",
                    " FROM t",
                    id.as_str(),
                    context.user_id.as_str(),
                    name,
                    &hash.0[..],
                    ttl.map(to_seconds),
                )
                .fetch_one(&mut *tx)
                .await;
                let row = match row {
                    // Another request took the name between the look and the write.
                    Err(sqlx::Error::Database(error))
                        if error.constraint() == Some("tokens_live_name_key") =>
                    {
                        let holder = "another token".to_owned();
                        return Err(
                            StoreError::NameTaken { kind: "token", name: name.to_owned(), holder }.into()
                        );
                    }
                    other => other?,
                };
                insert_audit(&mut tx, context, id.as_str()).await?;
                commit(tx, "create_token").await?;
                Ok(Some(TokenRecord::try_from(row)?))
            })
            .await?;
        if let Some(token) = created {
            return Ok(CreatedToken { token, repeated: false });
        }
        let token = self.repeated_token(context, payload).await?;
        Ok(CreatedToken { token, repeated: true })
    }

    /// Lists a user's tokens, newest first, revoked ones too; at most 500.
    ///
    /// # Errors
    ///
    /// [`StoreError::Unavailable`].
    pub async fn list_tokens(&self, user_id: &UserId) -> Result<Vec<TokenRecord>, StoreError> {
        self.observe("list_tokens", async {
            // Reads `tokens_by_user`.
            let rows = token_query!(
                "SELECT ",
                " FROM tokens t WHERE t.user_id = $1 ORDER BY t.id DESC LIMIT 500",
                user_id.as_str(),
            )
            .fetch_all(&self.pool)
            .await?;
            Ok(rows.into_iter().map(TokenRecord::try_from).collect::<Result<Vec<_>, _>>()?)
        })
        .await
    }

    /// Revokes one of the context user's tokens, by id or name, at once. Idempotent.
    ///
    /// # Errors
    ///
    /// [`StoreError::NotFound`], [`StoreError::IdempotencyMismatch`], [`StoreError::Unavailable`].
    pub async fn revoke_token(
        &self,
        context: &AuditContext,
        payload: &PayloadHash,
        reference: &str,
    ) -> Result<TokenRecord, StoreError> {
        self.observe("revoke_token", async {
            if reference.contains('\0') {
                return Err(StoreError::not_found("token", reference).into());
            }
            let mut tx = self.pool.begin().await?;
            if let Some(id) = first_answer(&mut tx, context, payload).await? {
                return read_token(&mut tx, context, &id).await;
            }
            // The live token of that name, else the newest that had it. Reads `tokens_by_user`.
            let found = sqlx::query!(
                "SELECT id, revoked_at FROM tokens WHERE user_id = $1 AND (id = $2 OR name = $2)
                 ORDER BY (id = $2) DESC, (revoked_at IS NULL) DESC, id DESC LIMIT 1 FOR UPDATE",
                context.user_id.as_str(),
                reference,
            )
            .fetch_optional(&mut *tx)
            .await?;
            let Some(found) = found else { return Err(StoreError::not_found("token", reference).into()) };
            if !claim_key(&mut tx, context, payload, &found.id).await? {
                drop(tx);
                let mut connection = self.pool.acquire().await?;
                first_answer(&mut connection, context, payload).await?;
                return read_token(&mut connection, context, &found.id).await;
            }
            if found.revoked_at.is_none() {
                sqlx::query!(
                    "UPDATE tokens SET revoked_at = cloister_now(), generation = generation + 1 WHERE id = $1",
                    found.id,
                )
                .execute(&mut *tx)
                .await?;
                insert_audit(&mut tx, context, &found.id).await?;
            }
            let token = read_token(&mut tx, context, &found.id).await?;
            commit(tx, "revoke_token").await?;
            Ok(token)
        })
        .await
    }
}

impl Store {
    async fn repeated_token(
        &self,
        context: &AuditContext,
        payload: &PayloadHash,
    ) -> Result<TokenRecord, StoreError> {
        self.observe("repeated_token", async {
            let mut connection = self.pool.acquire().await?;
            let id = first_answer(&mut connection, context, payload).await?;
            let id =
                id.ok_or_else(|| StoreError::Conflict { kind: "request", id: context.request_id.clone() })?;
            read_token(&mut connection, context, &id).await
        })
        .await
    }
}

struct TokenRow {
    id: String,
    user_id: String,
    name: String,
    created_at: DateTime<Utc>,
    expires_at: Option<DateTime<Utc>>,
    last_used_at: Option<DateTime<Utc>>,
    revoked_at: Option<DateTime<Utc>>,
}

impl TryFrom<TokenRow> for TokenRecord {
    type Error = StoreError;

    fn try_from(row: TokenRow) -> Result<Self, StoreError> {
        Ok(Self {
            id: parse_word("tokens", &row.id, "id", &row.id)?,
            user_id: parse_word("tokens", &row.id, "user_id", &row.user_id)?,
            name: row.name,
            created_at: row.created_at,
            expires_at: row.expires_at,
            last_used_at: row.last_used_at,
            revoked_at: row.revoked_at,
        })
    }
}

/// Reads `tokens_pkey`.
async fn read_token(
    connection: &mut PgConnection,
    context: &AuditContext,
    id: &str,
) -> Result<TokenRecord, Failure> {
    let row = token_query!(
        "SELECT ",
        " FROM tokens t WHERE t.id = $1 AND t.user_id = $2",
        id,
        context.user_id.as_str(),
    )
    .fetch_optional(connection)
    .await?;
    let row = row.ok_or_else(|| StoreError::not_found("token", id))?;
    Ok(TokenRecord::try_from(row)?)
}
