//! `HostsService`.

use cloister_api::app::{
    GetHostRequest, GetHostResponse, Host, HostCapacity, HostsService, ListHostsRequest, ListHostsResponse,
};
use cloister_api::convert::{capabilities_to_proto, timestamp_to_proto};
use connectrpc::{RequestContext, Response, ServiceRequest, ServiceResult};

use super::{Api, field};
use crate::app::Resource;
use crate::db;

#[allow(refining_impl_trait, reason = "the generated trait hides the response type; naming it is clearer")]
impl HostsService for Api {
    async fn list_hosts(
        &self,
        ctx: RequestContext,
        _request: ServiceRequest<'_, ListHostsRequest>,
    ) -> ServiceResult<ListHostsResponse> {
        let authorized = self.authorize(&ctx, "", Resource::Hosts)?;
        let hosts = self.app.list_hosts(&authorized).await?;
        Response::ok(ListHostsResponse {
            hosts: hosts.iter().map(host_to_proto).collect(),
            ..Default::default()
        })
    }

    async fn get_host(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, GetHostRequest>,
    ) -> ServiceResult<GetHostResponse> {
        let request = request.to_owned_message();
        let authorized = self.authorize(&ctx, "", Resource::Hosts)?;
        let reference = field::reference("host", &request.host)?;
        let host = self.app.get_host(&authorized, reference).await?;
        Response::ok(GetHostResponse { host: host_to_proto(&host).into(), ..Default::default() })
    }
}

fn host_to_proto(host: &db::HostRecord) -> Host {
    Host {
        id: host.id.to_string(),
        name: host.name.clone(),
        connected: host.connected,
        cordoned: host.cordoned,
        capabilities: capabilities_to_proto(&host.capabilities),
        capacity: capacity_to_proto(&host.capacity).into(),
        allocated: capacity_to_proto(&host.allocated).into(),
        sandboxes: host.sandboxes,
        version: host.version.clone(),
        last_heartbeat_at: timestamp_to_proto(host.last_heartbeat_at).into(),
        ..Default::default()
    }
}

fn capacity_to_proto(capacity: &db::HostCapacity) -> HostCapacity {
    HostCapacity {
        memory_bytes: capacity.memory.0,
        cpu_millis: capacity.cpus.0,
        disk_bytes: capacity.disk.0,
        ..Default::default()
    }
}
