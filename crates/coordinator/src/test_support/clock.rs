//! The time that a store under test sees.

use std::sync::{Arc, Mutex};

use chrono::{DateTime, Duration, Utc};
use sqlx::PgConnection;

/// Sets `cloister_now()` for every statement of a store. Until it is set the store has the server's time.
#[derive(Debug, Clone, Default)]
pub struct StoreClock {
    now: Arc<Mutex<Option<DateTime<Utc>>>>,
}

impl StoreClock {
    /// Stops the store's time at `now`.
    pub fn set(&self, now: DateTime<Utc>) {
        *self.now.lock().expect("no holder panics") = Some(now);
    }

    /// Moves the store's time forward (from the machine's, when it was not set).
    pub fn advance(&self, by: std::time::Duration) {
        let mut now = self.now.lock().expect("no holder panics");
        let by = Duration::from_std(by).expect("a duration that a test can mean");
        *now = Some(now.unwrap_or_else(Utc::now) + by);
    }

    fn setting(&self) -> String {
        let now = self.now.lock().expect("no holder panics");
        now.map(|now| now.to_rfc3339()).unwrap_or_default()
    }

    /// Hands the time to a connection that an operation takes.
    pub(crate) async fn apply(&self, connection: &mut PgConnection) -> Result<(), sqlx::Error> {
        sqlx::query("SELECT set_config('cloister.now', $1, false)")
            .bind(self.setting())
            .execute(connection)
            .await?;
        Ok(())
    }
}
