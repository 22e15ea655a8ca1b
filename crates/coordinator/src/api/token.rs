//! `TokensService`.

use cloister_api::app::{
    CreateTokenRequest, CreateTokenResponse, ListTokensRequest, ListTokensResponse, RevokeTokenRequest,
    RevokeTokenResponse, Token, TokensService, WhoAmIRequest, WhoAmIResponse,
};
use cloister_api::convert::timestamp_to_proto;
use cloister_types::name::validate_name;
use connectrpc::{RequestContext, Response, ServiceRequest, ServiceResult};
use serde_json::json;

use super::{Api, field};
use crate::app::Resource;
use crate::db::{PayloadHash, TokenRecord};
use crate::error::AppError;

#[allow(refining_impl_trait, reason = "the generated trait hides the response type; naming it is clearer")]
impl TokensService for Api {
    async fn create_token(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, CreateTokenRequest>,
    ) -> ServiceResult<CreateTokenResponse> {
        let request = request.to_owned_message();
        let authorized = self.authorize(&ctx, &request.request_id, Resource::OwnTokens)?;
        field::request_id(&request.request_id)?;
        validate_name(&request.name).map_err(|error| AppError::field("name", error))?;
        let ttl = field::ttl(request.ttl_ms)?;
        let payload = json!({ "name": request.name, "ttl_ms": request.ttl_ms }).to_string();
        let payload = PayloadHash::of("token.create", payload.as_bytes());
        let created = self.app.create_token(&authorized, &payload, &request.name, ttl).await?;
        Response::ok(CreateTokenResponse {
            token: token_to_proto(&created.token).into(),
            secret: created.secret,
            ..Default::default()
        })
    }

    async fn list_tokens(
        &self,
        ctx: RequestContext,
        _request: ServiceRequest<'_, ListTokensRequest>,
    ) -> ServiceResult<ListTokensResponse> {
        let authorized = self.authorize(&ctx, "", Resource::OwnTokens)?;
        let tokens = self.app.list_tokens(&authorized).await?;
        Response::ok(ListTokensResponse {
            tokens: tokens.iter().map(token_to_proto).collect(),
            ..Default::default()
        })
    }

    async fn revoke_token(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, RevokeTokenRequest>,
    ) -> ServiceResult<RevokeTokenResponse> {
        let request = request.to_owned_message();
        let authorized = self.authorize(&ctx, &request.request_id, Resource::OwnTokens)?;
        field::request_id(&request.request_id)?;
        let reference = field::reference("token", &request.token)?;
        let payload = PayloadHash::of("token.revoke", reference.as_bytes());
        let token = self.app.revoke_token(&authorized, &payload, reference).await?;
        Response::ok(RevokeTokenResponse { token: token_to_proto(&token).into(), ..Default::default() })
    }

    async fn who_am_i(
        &self,
        ctx: RequestContext,
        _request: ServiceRequest<'_, WhoAmIRequest>,
    ) -> ServiceResult<WhoAmIResponse> {
        let authorized = self.authorize(&ctx, "", Resource::OwnOrganization)?;
        let principal = authorized.principal();
        Response::ok(WhoAmIResponse {
            organization_id: principal.organization_id.to_string(),
            organization_name: principal.organization_name.clone(),
            user_id: principal.user_id.to_string(),
            user_name: principal.user_name.clone(),
            token_id: principal.token_id.as_ref().map(ToString::to_string).unwrap_or_default(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            ..Default::default()
        })
    }
}

fn token_to_proto(token: &TokenRecord) -> Token {
    Token {
        id: token.id.to_string(),
        name: token.name.clone(),
        created_at: timestamp_to_proto(token.created_at).into(),
        expires_at: token.expires_at.map(timestamp_to_proto).into(),
        last_used_at: token.last_used_at.map(timestamp_to_proto).into(),
        revoked_at: token.revoked_at.map(timestamp_to_proto).into(),
        ..Default::default()
    }
}
