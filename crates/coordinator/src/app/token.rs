//! Tokens: the caller's own.

use std::time::Duration;

use super::{App, Authorized};
use crate::db::{PayloadHash, TokenHash, TokenRecord};
use crate::error::AppError;

/// A token and, the first time, its bearer.
pub(crate) struct NewToken {
    pub(crate) token: TokenRecord,
    /// Empty for a repeated request: only a hash was kept.
    pub(crate) secret: String,
}

impl App {
    pub(crate) async fn create_token(
        &self,
        authorized: &Authorized,
        payload: &PayloadHash,
        name: &str,
        ttl: Option<Duration>,
    ) -> Result<NewToken, AppError> {
        // The prefix lets scanners of leaked secrets know it.
        let secret = format!("clt_{:032x}{:032x}", rand::random::<u128>(), rand::random::<u128>());
        let hash = TokenHash::of(&secret);
        let created = self.store.create_token(authorized.context(), payload, name, &hash, ttl).await?;
        let secret = if created.repeated { String::new() } else { secret };
        Ok(NewToken { token: created.token, secret })
    }

    pub(crate) async fn list_tokens(&self, authorized: &Authorized) -> Result<Vec<TokenRecord>, AppError> {
        Ok(self.store.list_tokens(&authorized.principal().user_id).await?)
    }

    pub(crate) async fn revoke_token(
        &self,
        authorized: &Authorized,
        payload: &PayloadHash,
        reference: &str,
    ) -> Result<TokenRecord, AppError> {
        let token = self.store.revoke_token(authorized.context(), payload, reference).await;
        // Even when the answer was lost the revocation may have been committed.
        self.authenticator.forget();
        Ok(token?)
    }
}
