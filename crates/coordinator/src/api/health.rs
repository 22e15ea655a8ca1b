//! `grpc.health.v1`: serving while the database answers, as `/readyz` has it.

use std::time::Duration;

use connectrpc::ConnectError;
use connectrpc_health::{Checker, Status, StatusStream};

use super::SERVICES;
use crate::db::Store;

/// Pause between two looks for one who watches.
const WATCH_PAUSE: Duration = Duration::from_secs(5);

/// Answers for the whole process (the empty name) and for each service of the app API; they stand and fall together.
#[derive(Debug, Clone)]
pub(crate) struct Health {
    store: Store,
}

impl Health {
    pub(crate) fn new(store: Store) -> Self {
        Self { store }
    }

    async fn status(&self) -> Status {
        if self.store.answers().await { Status::Serving } else { Status::NotServing }
    }
}

fn known(service: &str) -> Result<(), ConnectError> {
    if service.is_empty() || SERVICES.contains(&service) {
        return Ok(());
    }
    let shown: String = service.chars().filter(|letter| !letter.is_control()).take(64).collect();
    Err(ConnectError::not_found(format!("there is no service `{shown}`")))
}

impl Checker for Health {
    async fn check(&self, service: &str) -> Result<Status, ConnectError> {
        known(service)?;
        Ok(self.status().await)
    }

    async fn watch(&self, service: &str) -> Result<StatusStream, ConnectError> {
        known(service)?;
        Ok(StatusStream::new(futures::stream::unfold((self.clone(), None), |(health, told)| async move {
            loop {
                if told.is_some() {
                    tokio::time::sleep(WATCH_PAUSE).await;
                }
                let status = health.status().await;
                if told != Some(status) {
                    return Some((status, (health, Some(status))));
                }
            }
        })))
    }
}
