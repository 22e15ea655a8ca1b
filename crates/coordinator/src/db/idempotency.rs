//! Request ids: the same id with the same payload gives the first answer, with another payload a refusal.
//!
//! The key is written in the transaction of the change, so that it exists exactly when the change does. A second
//! request with the same id that comes while the first is under way waits for it on the key's index entry.

use sha2::{Digest, Sha256};
use sqlx::PgConnection;

use super::store::Failure;
use super::{AuditContext, StoreError};

/// SHA-256 of what a caller asked for, without its request id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PayloadHash(pub [u8; 32]);

impl PayloadHash {
    /// Returns the hash of an encoded request; the action goes in, so that two verbs with equal bytes differ.
    pub fn of(action: &str, payload: &[u8]) -> Self {
        let mut hash = Sha256::new();
        hash.update(action.as_bytes());
        hash.update([0]);
        hash.update(payload);
        Self(hash.finalize().into())
    }
}

/// Returns the id of what this request made earlier; `None` when it is new. Reads `idempotency_keys_pkey`.
pub(super) async fn first_answer(
    connection: &mut PgConnection,
    context: &AuditContext,
    payload: &PayloadHash,
) -> Result<Option<String>, Failure> {
    let key = sqlx::query!(
        "SELECT payload_hash, resource_id FROM idempotency_keys WHERE user_id = $1 AND request_id = $2",
        context.user_id.as_str(),
        context.request_id,
    )
    .fetch_optional(connection)
    .await?;
    match key {
        None => Ok(None),
        Some(key) if key.payload_hash == payload.0 => Ok(Some(key.resource_id)),
        Some(_) => Err(StoreError::IdempotencyMismatch { request_id: context.request_id.clone() }.into()),
    }
}

/// Writes the key of a request and returns whether it is new; waits for a transaction that uses the same key.
/// Writes `idempotency_keys_pkey`.
pub(super) async fn claim_key(
    connection: &mut PgConnection,
    context: &AuditContext,
    payload: &PayloadHash,
    resource_id: &str,
) -> Result<bool, Failure> {
    let written = sqlx::query!(
        "INSERT INTO idempotency_keys (user_id, request_id, payload_hash, resource_id) VALUES ($1, $2, $3, $4)
         ON CONFLICT DO NOTHING",
        context.user_id.as_str(),
        context.request_id,
        &payload.0[..],
        resource_id,
    )
    .execute(connection)
    .await?;
    Ok(written.rows_affected() == 1)
}
