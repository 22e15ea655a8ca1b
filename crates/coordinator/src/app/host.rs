//! Hosts: reading them.

use super::{App, Authorized};
use crate::db::HostRecord;
use crate::error::AppError;

impl App {
    pub(crate) async fn list_hosts(&self, _authorized: &Authorized) -> Result<Vec<HostRecord>, AppError> {
        let hosts = self.store.list_hosts().await?;
        Ok(hosts.into_iter().map(|host| self.with_own_link(host)).collect())
    }

    pub(crate) async fn get_host(
        &self,
        _authorized: &Authorized,
        reference: &str,
    ) -> Result<HostRecord, AppError> {
        Ok(self.with_own_link(self.store.resolve_host(reference).await?))
    }

    /// What the store says of another coordinator's links this one cannot know better; of its own it does.
    fn with_own_link(&self, mut host: HostRecord) -> HostRecord {
        if host.link_holder.as_ref() == Some(self.store.holder()) {
            host.connected = self.links.is_connected(&host.id);
        }
        host
    }
}
