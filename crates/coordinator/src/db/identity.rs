//! Organizations and users, and who the bearer of a token is.

use chrono::{DateTime, Utc};
use cloister_types::{OrganizationId, TokenId, UserId};

use super::fault::commit;
use super::session::parse_word;
use super::{Store, StoreError, TokenHash};

/// Name of the organization that exists from the start.
const DEFAULT_ORGANIZATION: &str = "default";
/// Name of its first user.
const OWNER: &str = "owner";
/// Name of the token that `cloister up` keeps in its data directory.
const LOCAL_OWNER_TOKEN: &str = "local-owner";

/// What exists before the first request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bootstrap {
    /// The default organization.
    pub organization_id: OrganizationId,
    /// Its owner.
    pub user_id: UserId,
    /// The owner's local token.
    pub token_id: TokenId,
}

/// Who calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Principal {
    /// The organization.
    pub organization_id: OrganizationId,
    /// Its name.
    pub organization_name: String,
    /// The user.
    pub user_id: UserId,
    /// The user's name.
    pub user_name: String,
    /// The token that was shown.
    pub token_id: TokenId,
    /// When that token stops to work.
    pub expires_at: Option<DateTime<Utc>>,
}

impl Store {
    /// Ensures the default organization, its owner, and that the owner's local token is the one with this hash (an
    /// earlier one stops to work). Called at each start; safe on several coordinators.
    ///
    /// # Errors
    ///
    /// [`StoreError::Unavailable`].
    pub async fn bootstrap(&self, owner_token: &TokenHash) -> Result<Bootstrap, StoreError> {
        self.observe("bootstrap", async {
            let (new_organization, new_user, new_token) =
                (OrganizationId::generate(), UserId::generate(), TokenId::generate());
            let mut tx = self.pool.begin().await?;
            // Two coordinators may start at once: the second waits here and finds everything.
            sqlx::query!("SELECT pg_advisory_xact_lock(hashtext('cloister.bootstrap'))")
                .execute(&mut *tx)
                .await?;
            sqlx::query!(
                "INSERT INTO organizations (id, name) VALUES ($1, $2) ON CONFLICT (name) DO NOTHING",
                new_organization.as_str(),
                DEFAULT_ORGANIZATION,
            )
            .execute(&mut *tx)
            .await?;
            let organization =
                sqlx::query_scalar!("SELECT id FROM organizations WHERE name = $1", DEFAULT_ORGANIZATION)
                    .fetch_one(&mut *tx)
                    .await?;
            sqlx::query!(
                "INSERT INTO users (id, organization_id, name) VALUES ($1, $2, $3)
                 ON CONFLICT (organization_id, name) DO NOTHING",
                new_user.as_str(),
                organization,
                OWNER,
            )
            .execute(&mut *tx)
            .await?;
            let user = sqlx::query_scalar!(
                "SELECT id FROM users WHERE organization_id = $1 AND name = $2",
                organization,
                OWNER,
            )
            .fetch_one(&mut *tx)
            .await?;
            // The file beside the data is the authority on this token: whoever can read it owns the store anyway.
            let token = sqlx::query_scalar!(
                "INSERT INTO tokens (id, user_id, name, hash, local_owner) VALUES ($1, $2, $3, $4, true)
                 ON CONFLICT (user_id) WHERE local_owner
                 DO UPDATE SET hash = excluded.hash, revoked_at = NULL, generation = tokens.generation + 1
                 RETURNING id",
                new_token.as_str(),
                user,
                LOCAL_OWNER_TOKEN,
                &owner_token.0[..],
            )
            .fetch_one(&mut *tx)
            .await?;
            commit(tx, "bootstrap").await?;
            Ok(Bootstrap {
                organization_id: parse_word("organizations", &organization, "id", &organization)?,
                user_id: parse_word("users", &user, "id", &user)?,
                token_id: parse_word("tokens", &token, "id", &token)?,
            })
        })
        .await
    }

    /// Returns who bears the token with this hash; `None` for an unknown, expired or revoked one. Its `last_used_at`
    /// is brought up to date at most once a minute, without a synchronous commit.
    ///
    /// # Errors
    ///
    /// [`StoreError::Unavailable`].
    pub async fn authenticate(&self, token: &TokenHash) -> Result<Option<Principal>, StoreError> {
        self.observe("authenticate", async {
            // Reads `tokens_hash_key`.
            let row = sqlx::query!(
                r#"SELECT t.id AS token_id, t.expires_at, u.id AS user_id, u.name AS user_name,
                          o.id AS organization_id, o.name AS organization_name,
                          coalesce(t.last_used_at < cloister_now() - interval '1 minute', true) AS "stale!"
                   FROM tokens t JOIN users u ON u.id = t.user_id JOIN organizations o ON o.id = u.organization_id
                   WHERE t.hash = $1 AND t.revoked_at IS NULL
                     AND (t.expires_at IS NULL OR t.expires_at > cloister_now())"#,
                &token.0[..],
            )
            .fetch_optional(&self.pool)
            .await?;
            let Some(row) = row else { return Ok(None) };
            if row.stale {
                // Losing this in a crash loses nothing: no wait for the disk.
                sqlx::query!(
                    "WITH setting AS (SELECT set_config('synchronous_commit', 'off', true) AS value)
                     UPDATE tokens SET last_used_at = cloister_now() FROM setting
                     WHERE id = $1 AND setting.value = 'off'",
                    row.token_id,
                )
                .execute(&self.pool)
                .await?;
            }
            let id = row.token_id.as_str();
            Ok(Some(Principal {
                organization_id: parse_word("organizations", id, "id", &row.organization_id)?,
                organization_name: row.organization_name,
                user_id: parse_word("users", id, "id", &row.user_id)?,
                user_name: row.user_name,
                token_id: parse_word("tokens", id, "id", id)?,
                expires_at: row.expires_at,
            }))
        })
        .await
    }
}
