//! `AuditService`.

use cloister_api::app::{AuditEntry, AuditService, ListAuditRequest, ListAuditResponse};
use cloister_api::convert::timestamp_to_proto;
use connectrpc::{RequestContext, Response, ServiceRequest, ServiceResult};

use super::{Api, field};
use crate::app::Resource;

#[allow(refining_impl_trait, reason = "the generated trait hides the response type; naming it is clearer")]
impl AuditService for Api {
    async fn list_audit(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, ListAuditRequest>,
    ) -> ServiceResult<ListAuditResponse> {
        let request = request.to_owned_message();
        let authorized = self.authorize(&ctx, "", Resource::OwnOrganization)?;
        let resource = match request.resource.as_str() {
            "" => None,
            text => Some(field::reference("resource", text)?),
        };
        let size = field::page_size(request.page_size)?;
        let token = field::page_token(&request.page_token)?;
        let page = self.app.list_audit(&authorized, resource, size, token).await?;
        let entries = page
            .entries
            .into_iter()
            .map(|entry| AuditEntry {
                id: entry.id,
                at: timestamp_to_proto(entry.at).into(),
                principal: entry.principal,
                action: entry.action,
                resource: entry.resource,
                request_id: entry.request_id,
                source: entry.source,
                ..Default::default()
            })
            .collect();
        Response::ok(ListAuditResponse {
            entries,
            next_page_token: page.next_page_token.unwrap_or_default(),
            ..Default::default()
        })
    }
}
