//! Hosts: reading them.

use super::{App, Authorized};
use crate::db::HostRecord;
use crate::error::AppError;

impl App {
    pub(crate) async fn list_hosts(&self, _authorized: &Authorized) -> Result<Vec<HostRecord>, AppError> {
        Ok(self.store.list_hosts().await?)
    }

    pub(crate) async fn get_host(
        &self,
        _authorized: &Authorized,
        reference: &str,
    ) -> Result<HostRecord, AppError> {
        Ok(self.store.resolve_host(reference).await?)
    }
}
