//! The audit log: reading it. It is written by the store, in the transaction of each change.

use super::{App, Authorized};
use crate::db::AuditPage;
use crate::error::AppError;

impl App {
    pub(crate) async fn list_audit(
        &self,
        authorized: &Authorized,
        resource: Option<&str>,
        page_size: u32,
        page_token: Option<&str>,
    ) -> Result<AuditPage, AppError> {
        Ok(self.store.list_audit(authorized.organization_id(), resource, page_size, page_token).await?)
    }
}
