//! `cloister port-forward`: ports of a session, reached on this machine.

use std::net::{IpAddr, Ipv4Addr};
use std::str::FromStr;

use clap::Args;
use cloister_api::app::DialPortStart;
use futures::StreamExt as _;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use serde::Serialize;
use tokio::net::{TcpListener, TcpStream};

use crate::channel::carry_port;
use crate::cli::Invocation;
use crate::client::{self, Client};
use crate::error::CliError;
use crate::interrupt::Interrupts;

/// Reach ports of a session on this machine
///
/// Each connection to the local port becomes one to the port in the sandbox, until Ctrl-C.
#[derive(Debug, Args)]
#[command(override_usage = "cloister port-forward [OPTIONS] SESSION [LOCAL:]REMOTE…")]
pub(crate) struct PortForwardArgs {
    /// Address to listen on
    #[arg(long, value_name = "ADDRESS", default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    address: IpAddr,
    /// Id, unique prefix of it, or name of the session
    session: String,
    /// Port here and port in the sandbox; the same where only one is given, any free one here for `0:REMOTE`
    #[arg(required = true, value_name = "[LOCAL:]REMOTE")]
    ports: Vec<Ports>,
}

/// A port here and one in the sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Ports {
    local: u16,
    remote: u16,
}

impl FromStr for Ports {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let port = |text: &str| {
            text.parse::<u16>().map_err(|_| format!("`{text}` is no port: accepted is 1 to 65535"))
        };
        let (local, remote) = text.split_once(':').unwrap_or((text, text));
        let ports = Self { local: port(local)?, remote: port(remote)? };
        if ports.remote == 0 { Err("the port in the sandbox is 1 to 65535".to_owned()) } else { Ok(ports) }
    }
}

/// A port that is listened on, as `--json` has it.
#[derive(Debug, Serialize)]
struct Forwarding {
    local: String,
    remote: u16,
}

impl PortForwardArgs {
    /// Forwards until it is interrupted.
    ///
    /// # Errors
    ///
    /// A port cannot be listened on.
    pub(crate) async fn run(self, invocation: &Invocation) -> Result<u8, CliError> {
        let terminal = invocation.terminal;
        let client = invocation.client().await?;
        let mut interrupts = Interrupts::listen()?;
        let mut listeners = Vec::new();
        for ports in &self.ports {
            let at = format!("listen on {}:{}", self.address, ports.local);
            let listener =
                TcpListener::bind((self.address, ports.local)).await.map_err(CliError::io(at.clone()))?;
            let local = listener.local_addr().map_err(CliError::io(at))?.to_string();
            let line = format!("forwarding {local} to port {} of {}", ports.remote, self.session);
            if terminal.json {
                terminal.json_line(&Forwarding { local, remote: ports.remote })?;
            } else {
                terminal.line(line)?;
            }
            listeners.push((listener, ports.remote));
        }
        let mut accepting: FuturesUnordered<_> =
            listeners.iter().enumerate().map(|(index, _)| accept(&listeners, index)).collect();
        let mut carried: FuturesUnordered<BoxFuture<'_, ()>> = FuturesUnordered::new();
        loop {
            tokio::select! {
                Some((index, accepted)) = accepting.next() => {
                    accepting.push(accept(&listeners, index));
                    match accepted {
                        Ok(connection) => {
                            let port = listeners[index].1;
                            let (client, session) = (&client, self.session.as_str());
                            carried.push(Box::pin(async move {
                                if let Err(error) = forward(client, session, port, connection).await {
                                    terminal.error(&error);
                                }
                            }));
                        }
                        Err(error) => {
                            terminal.warn(format!("a connection was not accepted: {error}"));
                            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
                        }
                    }
                }
                Some(()) = carried.next() => {}
                _ = interrupts.next() => return Ok(0),
            }
        }
    }
}

async fn accept(listeners: &[(TcpListener, u16)], index: usize) -> (usize, std::io::Result<TcpStream>) {
    (index, listeners[index].0.accept().await.map(|(connection, _)| connection))
}

async fn forward(client: &Client, session: &str, port: u16, connection: TcpStream) -> Result<(), CliError> {
    // Small writes of either side must not wait for an acknowledgement of earlier ones.
    let _ = connection.set_nodelay(true);
    let start = DialPortStart {
        request_id: client::request_id(),
        session: session.to_owned(),
        port: u32::from(port),
        ..Default::default()
    };
    match carry_port(client, start, connection).await {
        Ok(()) => Ok(()),
        // The local program went away.
        Err(error) if error.code == connectrpc::ErrorCode::Aborted => Ok(()),
        Err(error) => Err(client.error(&error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_one_or_two_numbers() {
        assert_eq!("8080".parse(), Ok(Ports { local: 8080, remote: 8080 }));
        assert_eq!("0:80".parse(), Ok(Ports { local: 0, remote: 80 }));
        for wrong in ["", "80:", "80:0", "70000", "a:b", "1:2:3"] {
            assert!(wrong.parse::<Ports>().is_err(), "{wrong}");
        }
    }
}
