//! Who the bearer of a call is.
//!
//! An answer of the store is kept for a few seconds, so that a burst of calls does not ask for each. A revocation
//! through this coordinator empties what is kept at once; one through another takes effect here within
//! [`KEPT`]. A lookup that was under way during a revocation keeps nothing. A stream asks again while it lasts
//! ([`Authenticator::until_revoked`]).

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use secrecy::{ExposeSecret as _, SecretString};
use tokio::sync::watch;
use tokio::time::Instant;

use super::authorize::Principal;
use crate::db::{Store, StoreError, TokenHash};

/// How long an answer is kept.
const KEPT: Duration = Duration::from_secs(5);
/// Most answers that are kept; beyond it everything is forgotten.
const KEPT_MAX: usize = 4096;

/// Knows bearers.
pub(crate) struct Authenticator {
    store: Store,
    machines: HashMap<[u8; 32], Arc<Principal>>,
    hosts: Vec<[u8; 32]>,
    kept: Mutex<Kept>,
    /// Tells of each revocation through this coordinator.
    revocations: watch::Sender<()>,
}

#[derive(Default)]
struct Kept {
    generation: u64,
    answers: HashMap<[u8; 32], (Instant, Arc<Principal>)>,
}

impl Authenticator {
    /// Returns an authenticator whose machine bearers act for `owner`.
    pub(crate) fn new(
        store: Store,
        owner: &Principal,
        app_tokens: &[SecretString],
        auth_tokens: &[SecretString],
    ) -> Self {
        let machines = app_tokens
            .iter()
            .enumerate()
            .map(|(index, bearer)| {
                let principal = Principal::machine(owner, index + 1);
                (TokenHash::of(bearer.expose_secret()).0, Arc::new(principal))
            })
            .collect();
        let hosts = auth_tokens.iter().map(|bearer| TokenHash::of(bearer.expose_secret()).0).collect();
        Self { store, machines, hosts, kept: Mutex::default(), revocations: watch::Sender::new(()) }
    }

    /// Returns whose bearer this is; `None` for an unknown, expired or revoked one.
    ///
    /// # Errors
    ///
    /// The store does not answer.
    pub(crate) async fn caller(&self, bearer: &str) -> Result<Option<Arc<Principal>>, StoreError> {
        self.caller_of(&TokenHash::of(bearer)).await
    }

    /// Waits until nobody may call with this token any more: it was revoked or has expired. A store that does not answer
    /// revokes nothing.
    ///
    /// # Cancel safety
    ///
    /// It may be dropped at any time.
    pub(crate) async fn until_revoked(&self, token: TokenHash) {
        let mut revocations = self.revocations.subscribe();
        // Looked at before the first wait: it may have been revoked since the call was let in.
        while !matches!(self.caller_of(&token).await, Ok(None)) {
            // Through another coordinator, or by its time, nobody is told: then the answer that is kept is the measure.
            let _ = tokio::time::timeout(KEPT, revocations.changed()).await;
        }
    }

    async fn caller_of(&self, hash: &TokenHash) -> Result<Option<Arc<Principal>>, StoreError> {
        if let Some(machine) = self.machines.get(&hash.0) {
            return Ok(Some(Arc::clone(machine)));
        }
        let generation = {
            let kept = self.kept();
            if let Some((until, principal)) = kept.answers.get(&hash.0)
                && *until > Instant::now()
            {
                return Ok(Some(Arc::clone(principal)));
            }
            kept.generation
        };
        let Some(found) = self.store.authenticate(hash).await? else { return Ok(None) };
        // One that expires before the answer would be forgotten is asked for each time.
        let lasts = found.expires_at.is_none_or(|at| at > chrono::Utc::now() + KEPT);
        let principal = Arc::new(Principal::from(found));
        let mut kept = self.kept();
        if lasts && kept.generation == generation {
            if kept.answers.len() >= KEPT_MAX {
                kept.answers.clear();
            }
            kept.answers.insert(hash.0, (Instant::now() + KEPT, Arc::clone(&principal)));
        }
        Ok(Some(principal))
    }

    /// Returns whether this is a host agent's bearer; never when none is configured.
    pub(crate) fn is_host(&self, bearer: &str) -> bool {
        let hash = TokenHash::of(bearer).0;
        self.hosts.contains(&hash)
    }

    /// Forgets every answer: called after a revocation.
    pub(crate) fn forget(&self) {
        let mut kept = self.kept();
        kept.generation = kept.generation.wrapping_add(1);
        kept.answers.clear();
        drop(kept);
        self.revocations.send_replace(());
    }

    fn kept(&self) -> std::sync::MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
