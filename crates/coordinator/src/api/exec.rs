//! `ExecsService`.

use cloister_api::app::{
    ExecsService, GetExecRequest, GetExecResponse, ListExecsRequest, ListExecsResponse, ResizeExecRequest,
    ResizeExecResponse, SignalExecRequest, SignalExecResponse, StartExecRequest, StartExecResponse,
    WaitExecRequest, WaitExecResponse, WriteStdinRequest, WriteStdinResponse,
};
use cloister_api::common;
use cloister_api::convert::exec_spec_from_proto;
use cloister_api::host::WriteStdin;
use cloister_types::exec::ExecSpecError;
use connectrpc::{RequestContext, Response, ServiceRequest, ServiceResult};

use super::{Api, EXEC_WAIT_MAX, field};
use crate::app::Resource;
use crate::app::relay::{STDIN_MAX_BYTES, check_signal, check_size};
use crate::error::AppError;

#[allow(refining_impl_trait, reason = "the generated trait hides the response type; naming it is clearer")]
impl ExecsService for Api {
    async fn start_exec(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, StartExecRequest>,
    ) -> ServiceResult<StartExecResponse> {
        let request = request.to_owned_message();
        let authorized = self.authorize(&ctx, &request.request_id, Resource::OwnOrganization)?;
        field::request_id(&request.request_id)?;
        let reference = field::reference("session", &request.session)?;
        let spec = spec("spec", request.spec.into_option())?;
        let exec = self.app.start_exec(&authorized, reference, spec).await?;
        Response::ok(StartExecResponse { exec: exec.into(), ..Default::default() })
    }

    async fn get_exec(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, GetExecRequest>,
    ) -> ServiceResult<GetExecResponse> {
        let request = request.to_owned_message();
        let authorized = self.authorize(&ctx, "", Resource::OwnOrganization)?;
        let reference = field::reference("session", &request.session)?;
        let exec_id = field::exec_id(&request.exec_id)?;
        let exec = self.app.get_exec(&authorized, reference, &exec_id).await?;
        Response::ok(GetExecResponse { exec: exec.into(), ..Default::default() })
    }

    async fn list_execs(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, ListExecsRequest>,
    ) -> ServiceResult<ListExecsResponse> {
        let request = request.to_owned_message();
        let authorized = self.authorize(&ctx, "", Resource::OwnOrganization)?;
        let reference = field::reference("session", &request.session)?;
        let execs = self.app.list_execs(&authorized, reference).await?;
        Response::ok(ListExecsResponse { execs, ..Default::default() })
    }

    async fn write_stdin(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, WriteStdinRequest>,
    ) -> ServiceResult<WriteStdinResponse> {
        let request = request.to_owned_message();
        let authorized = self.authorize(&ctx, "", Resource::OwnOrganization)?;
        let reference = field::reference("session", &request.session)?;
        let exec_id = field::exec_id(&request.exec_id)?;
        if request.data.len() > STDIN_MAX_BYTES {
            return Err(AppError::field("data", "at most 1 MiB at a time").into());
        }
        let write = WriteStdin {
            exec_id: exec_id.to_string(),
            offset: request.offset,
            data: request.data,
            eof: request.eof,
            append: request.append,
            ..Default::default()
        };
        let next_offset = self.app.write_stdin(&authorized, reference, write).await?;
        Response::ok(WriteStdinResponse { next_offset, ..Default::default() })
    }

    async fn signal_exec(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, SignalExecRequest>,
    ) -> ServiceResult<SignalExecResponse> {
        let request = request.to_owned_message();
        let authorized = self.authorize(&ctx, "", Resource::OwnOrganization)?;
        let reference = field::reference("session", &request.session)?;
        let exec_id = field::exec_id(&request.exec_id)?;
        check_signal("signal", request.signal)?;
        self.app.signal_exec(&authorized, reference, &exec_id, request.signal).await?;
        Response::ok(SignalExecResponse::default())
    }

    async fn resize_exec(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, ResizeExecRequest>,
    ) -> ServiceResult<ResizeExecResponse> {
        let request = request.to_owned_message();
        let authorized = self.authorize(&ctx, "", Resource::OwnOrganization)?;
        let reference = field::reference("session", &request.session)?;
        let exec_id = field::exec_id(&request.exec_id)?;
        let size = request.size.into_option().ok_or_else(|| AppError::field("size", "it is missing"))?;
        check_size("size", &size)?;
        self.app.resize_exec(&authorized, reference, &exec_id, size).await?;
        Response::ok(ResizeExecResponse::default())
    }

    async fn wait_exec(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, WaitExecRequest>,
    ) -> ServiceResult<WaitExecResponse> {
        let request = request.to_owned_message();
        let authorized = self.authorize(&ctx, "", Resource::OwnOrganization)?;
        let reference = field::reference("session", &request.session)?;
        let exec_id = field::exec_id(&request.exec_id)?;
        let wait = field::wait(request.wait_ms, EXEC_WAIT_MAX);
        let exec = self.app.wait_exec(&authorized, reference, &exec_id, wait).await?;
        Response::ok(WaitExecResponse { exec: exec.into(), ..Default::default() })
    }
}

/// Checks what to run; it goes on as it came.
pub(super) fn spec(field: &str, spec: Option<common::ExecSpec>) -> Result<common::ExecSpec, AppError> {
    let spec = spec.ok_or_else(|| AppError::field(field, "it is missing: say what to run"))?;
    if let Some(size) = spec.terminal.as_option() {
        check_size(&format!("{field}.terminal"), size)?;
    }
    let checked = exec_spec_from_proto(&spec).map_err(|error| AppError::field(field, error))?;
    checked.validate().map_err(|error| {
        let part = match &error {
            ExecSpecError::NoProgram | ExecSpecError::TooLarge(_) => "argv",
            ExecSpecError::Nul(part) => part,
            ExecSpecError::EnvName(_) => "env",
            ExecSpecError::RelativeDirectory(_) => "cwd",
            ExecSpecError::TerminalSize { .. } => "terminal",
        };
        AppError::field(format!("{field}.{part}"), error)
    })?;
    Ok(spec)
}
