//! `StreamsService`.

use cloister_api::app::attach_exec_request::Request;
use cloister_api::app::{
    AttachExecRequest, AttachExecResponse, ChannelDone, ChannelReady, DialPortRequest, DialPortResponse,
    ReadOutputRequest, ReadOutputResponse, StreamsService, TransferFilesRequest, TransferFilesResponse,
    WatchSessionRequest, WatchSessionResponse, dial_port_request, dial_port_response, transfer_files_request,
    transfer_files_response,
};
use cloister_api::host::{FilesTarget, PortTarget};
use connectrpc::{
    ConnectError, InboundStream, RequestContext, Response, ServiceRequest, ServiceResult, ServiceStream,
};
use futures::{Stream, StreamExt as _, TryStreamExt as _};

use super::exec::spec;
use super::session::event_to_proto;
use super::{Api, auth, field};
use crate::app::Resource;
use crate::app::channel::Carried;
use crate::app::exec::AttachTo;
use crate::app::relay::Attached;
use crate::db::TokenHash;
use crate::error::{self, AppError};
use crate::link::first_message;

/// Most bytes of a user's name.
const USER_MAX_BYTES: usize = 64;

impl Api {
    /// Ends a stream with an error once its caller's token is none any more.
    fn while_valid<T: Send + 'static>(
        &self,
        ctx: &RequestContext,
        stream: impl Stream<Item = Result<T, ConnectError>> + Send + 'static,
    ) -> ServiceStream<T> {
        let Some(token) = ctx.extensions().get::<TokenHash>() else { return Box::pin(stream) };
        let state = Some((Box::pin(stream), Box::pin(self.app.until_revoked(*token))));
        Box::pin(futures::stream::unfold(state, |state| async move {
            let (mut stream, mut revoked) = state?;
            tokio::select! {
                biased;
                () = &mut revoked => Some((Err(auth::revoked().into()), None)),
                item = stream.next() => item.map(|item| (item, Some((stream, revoked)))),
            }
        }))
    }
}

#[allow(refining_impl_trait, reason = "the generated trait hides the response type; naming it is clearer")]
impl StreamsService for Api {
    async fn watch_session(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, WatchSessionRequest>,
    ) -> ServiceResult<ServiceStream<WatchSessionResponse>> {
        let request = request.to_owned_message();
        let authorized = self.authorize(&ctx, "", Resource::OwnOrganization)?;
        let reference = field::reference("session", &request.session)?;
        let events = self.app.watch_session(&authorized, reference, request.after_cursor).await?;
        let stream = events.map_ok(|event| WatchSessionResponse {
            event: event_to_proto(&event).into(),
            ..Default::default()
        });
        Ok(Response::new(self.while_valid(&ctx, stream)))
    }

    async fn read_output(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, ReadOutputRequest>,
    ) -> ServiceResult<ServiceStream<ReadOutputResponse>> {
        let request = request.to_owned_message();
        let authorized = self.authorize(&ctx, "", Resource::OwnOrganization)?;
        let reference = field::reference("session", &request.session)?;
        let exec_id = field::exec_id(&request.exec_id)?;
        let relay = self
            .app
            .read_output(&authorized, reference, &exec_id, request.from_offset, request.no_follow)
            .await?;
        let stream = futures::stream::unfold(relay, |mut relay| async move {
            let item = relay.next().await?;
            let item = item
                .map(|frame| ReadOutputResponse { frame: frame.into(), ..Default::default() })
                .map_err(ConnectError::from);
            Some((item, relay))
        });
        Ok(Response::new(self.while_valid(&ctx, stream)))
    }

    async fn attach_exec(
        &self,
        ctx: RequestContext,
        mut requests: InboundStream<AttachExecRequest>,
    ) -> ServiceResult<ServiceStream<AttachExecResponse>> {
        let Some(Request::Start(start)) = first_message(&mut requests).await?.to_owned_message().request
        else {
            return Err(no_start().into());
        };
        let start = *start;
        let authorized = self.authorize(&ctx, &start.request_id, Resource::OwnOrganization)?;
        let reference = field::reference("start.session", &start.session)?;
        let to = match (start.spec.into_option(), start.exec_id.as_str()) {
            (Some(given), "") => {
                field::request_id(&start.request_id)?;
                if start.from_offset != 0 {
                    return Err(AppError::field("start.from_offset", "a new exec starts at 0").into());
                }
                AttachTo::Start {
                    request_id: start.request_id.clone(),
                    spec: spec("start.spec", Some(given))?,
                }
            }
            (None, exec_id) if !exec_id.is_empty() => {
                AttachTo::Existing { exec_id: field::exec_id(exec_id)?, from_offset: start.from_offset }
            }
            _ => {
                return Err(
                    AppError::field("start", "give either `spec` to start or `exec_id` to take up").into()
                );
            }
        };
        let attachment = self.app.attach_exec(&authorized, reference, to).await?;
        let stream = attachment.run(requests).map(|item| {
            item.map(|attached| match attached {
                Attached::Started(exec) => {
                    AttachExecResponse { response: Some((*exec).into()), ..Default::default() }
                }
                Attached::Frame(frame) => {
                    AttachExecResponse { response: Some(frame.into()), ..Default::default() }
                }
            })
            .map_err(ConnectError::from)
        });
        Ok(Response::new(self.while_valid(&ctx, stream)))
    }

    async fn transfer_files(
        &self,
        ctx: RequestContext,
        mut requests: InboundStream<TransferFilesRequest>,
    ) -> ServiceResult<ServiceStream<TransferFilesResponse>> {
        use transfer_files_request::Request;
        let Some(Request::Start(start)) = first_message(&mut requests).await?.to_owned_message().request
        else {
            return Err(no_start().into());
        };
        let authorized = self.authorize(&ctx, &start.request_id, Resource::OwnOrganization)?;
        let reference = field::reference("start.session", &start.session)?;
        if start.user.len() > USER_MAX_BYTES || start.user.chars().any(char::is_control) {
            return Err(AppError::field("start.user", "not a user's name or number").into());
        }
        let files = FilesTarget { user: start.user.clone(), ..Default::default() };
        let relay = self.app.open_channel(&authorized, reference, files).await?;
        let input = requests.map(|message| match message?.to_owned_message().request {
            Some(Request::Data(data)) => Ok(data),
            _ => Err(not_data().into()),
        });
        let stream = relay.run(input).map(|item| {
            let response: transfer_files_response::Response = match item? {
                Carried::Ready => ChannelReady::default().into(),
                Carried::Data(data) => transfer_files_response::Response::Data(data),
                Carried::Done => ChannelDone::default().into(),
            };
            Ok(TransferFilesResponse { response: Some(response), ..Default::default() })
        });
        Ok(Response::new(self.while_valid(&ctx, stream)))
    }

    async fn dial_port(
        &self,
        ctx: RequestContext,
        mut requests: InboundStream<DialPortRequest>,
    ) -> ServiceResult<ServiceStream<DialPortResponse>> {
        use dial_port_request::Request;
        let Some(Request::Start(start)) = first_message(&mut requests).await?.to_owned_message().request
        else {
            return Err(no_start().into());
        };
        let authorized = self.authorize(&ctx, &start.request_id, Resource::OwnOrganization)?;
        let reference = field::reference("start.session", &start.session)?;
        if !(1..=u32::from(u16::MAX)).contains(&start.port) {
            return Err(AppError::field("start.port", "a port is 1 to 65535").into());
        }
        let port = PortTarget { port: start.port, ..Default::default() };
        let relay = self.app.open_channel(&authorized, reference, port).await?;
        let input = requests.map(|message| match message?.to_owned_message().request {
            Some(Request::Data(data)) => Ok(data),
            _ => Err(not_data().into()),
        });
        let stream = relay.run(input).map(|item| {
            let response: dial_port_response::Response = match item? {
                Carried::Ready => ChannelReady::default().into(),
                Carried::Data(data) => dial_port_response::Response::Data(data),
                Carried::Done => ChannelDone::default().into(),
            };
            Ok(DialPortResponse { response: Some(response), ..Default::default() })
        });
        Ok(Response::new(self.while_valid(&ctx, stream)))
    }
}

fn no_start() -> AppError {
    AppError::new(&error::PROTOCOL, "the first message of the stream is `start`")
}

fn not_data() -> AppError {
    AppError::new(&error::PROTOCOL, "after `start` only `data` may come")
}
