//! `cloister host`: the machines that run sandboxes, and the role that makes this one such a machine.

use std::time::SystemTime;

use clap::{Args, Subcommand};
use cloister_api::app::{GetHostRequest, Host, HostCapacity, ListHostsRequest};
use cloister_types::{ByteCount, CpuMillis};

use crate::cli::Invocation;
use crate::client::{self, unary};
use crate::error::CliError;
use crate::supervisor::role::RoleArgs;
use crate::terminal::{Table, Terminal, age, one_line, word};

/// List hosts, or run the host agent on this machine
///
/// Without a subcommand it is the host agent: configured by the environment (see
/// docs/reference/configuration.md), as root, until `SIGTERM`. Its sandboxes outlive it.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct HostArgs {
    #[command(subcommand)]
    command: Option<HostCommand>,
    #[command(flatten)]
    role: RoleArgs,
}

/// What to do with hosts.
#[derive(Debug, Subcommand)]
enum HostCommand {
    /// List hosts
    List,
    /// Show a host with its capabilities
    Get {
        /// Id, unique prefix of it, or name
        host: String,
    },
}

impl HostArgs {
    /// Returns whether this is the host agent itself.
    pub(crate) fn is_role(&self) -> bool {
        self.command.is_none()
    }

    /// Does it.
    ///
    /// # Errors
    ///
    /// What the coordinator answered, or why the host agent ended.
    pub(crate) async fn run(self, invocation: &Invocation) -> Result<u8, CliError> {
        let terminal = invocation.terminal;
        match self.command {
            None => self.role.run_host().await,
            Some(HostCommand::List) => {
                let client = invocation.client().await?;
                let answer = unary!(
                    client,
                    hosts,
                    list_hosts_with_options,
                    ListHostsRequest::default(),
                    client::quick()
                )?;
                terminal.either(&answer, || host_table(&answer.hosts, SystemTime::now()))?;
                Ok(0)
            }
            Some(HostCommand::Get { host }) => {
                let client = invocation.client().await?;
                let request = GetHostRequest { host, ..Default::default() };
                let answer = unary!(client, hosts, get_host_with_options, request, client::quick())?;
                terminal.either(&answer, || describe(&answer.host, terminal))?;
                Ok(0)
            }
        }
    }
}

fn host_state(host: &Host) -> &'static str {
    match (host.connected, host.cordoned) {
        (false, _) => "disconnected",
        (true, true) => "cordoned",
        (true, false) => "connected",
    }
}

fn of(used: &HostCapacity, all: &HostCapacity) -> [String; 2] {
    [
        format!("{}/{}", ByteCount(used.memory_bytes), ByteCount(all.memory_bytes)),
        format!("{}/{}", CpuMillis(used.cpu_millis), CpuMillis(all.cpu_millis)),
    ]
}

fn host_table(hosts: &[Host], now: SystemTime) -> String {
    let mut table =
        Table::new(["HOST", "NAME", "STATE", "SANDBOXES", "MEMORY", "CPUS", "VERSION", "HEARTBEAT"]);
    for host in hosts {
        let [memory, cpus] = of(&host.allocated, &host.capacity);
        table.row([
            host.id.clone(),
            host.name.clone(),
            host_state(host).to_owned(),
            host.sandboxes.to_string(),
            memory,
            cpus,
            host.version.clone(),
            age(host.last_heartbeat_at.as_option(), now),
        ]);
    }
    table.render()
}

fn describe(host: &Host, terminal: Terminal) -> String {
    let [memory, cpus] = of(&host.allocated, &host.capacity);
    let mut lines = vec![
        format!("host       {} ({})", host.id, one_line(&host.name)),
        format!("state      {}", host_state(host)),
        format!("sandboxes  {}", host.sandboxes),
        format!("allocated  memory {memory}, cpus {cpus}"),
        format!("version    {}", one_line(&host.version)),
        "capabilities".to_owned(),
    ];
    for capability in &host.capabilities {
        let status = word(&capability.status, "CAPABILITY_STATUS_");
        lines.push(super::doctor::finding_text(
            terminal,
            &capability.name,
            &status,
            &capability.detail,
            &capability.remedy,
        ));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_without_a_link_is_disconnected_even_when_cordoned() {
        let host = |connected, cordoned| Host { connected, cordoned, ..Default::default() };
        assert_eq!(host_state(&host(true, false)), "connected");
        assert_eq!(host_state(&host(true, true)), "cordoned");
        assert_eq!(host_state(&host(false, true)), "disconnected");
    }
}
