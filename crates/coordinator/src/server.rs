//! The port and the socket: one router for everything that is served.
//!
//! HTTP/1.1 and HTTP/2 by what the peer speaks, with the windows of [`cloister_api::connection`], pings that find a
//! peer that has stopped, and a bound on connections. `axum::serve` exposes none of these.
//!
//! A connection ends gracefully when the coordinator stops: no new calls, and those under way finish.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use axum::routing::get;
use cloister_api::connection::{
    CONNECTION_WINDOW_BYTES, KEEP_ALIVE_INTERVAL, KEEP_ALIVE_TIMEOUT, MAX_CONCURRENT_STREAMS,
    STREAM_WINDOW_BYTES,
};
use cloister_service::{CancellationToken, OnCancel, OnError, TaskKind, TaskRegistry};
use connectrpc::ConnectRpcService;
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{Semaphore, watch};
use tower::ServiceExt as _;
use tower_http::catch_panic::CatchPanicLayer;

use crate::api::{Peer, auth};
use crate::app::authenticate::Authenticator;
use crate::db::Store;
use crate::metrics::Metrics;

/// Most connections at one time; further ones wait in the kernel's queue.
const CONNECTIONS_MAX: usize = 4096;
/// How long a peer may take for the head of a request.
const HEADER_DEADLINE: Duration = Duration::from_secs(10);
/// How long a connection may stay open before its first request: hyper's own limit for the head of a request does not
/// cover a peer that says nothing, or only that it speaks HTTP/2.
const FIRST_REQUEST_DEADLINE: Duration = HEADER_DEADLINE;
/// Pause after the kernel refused a connection, for example for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

const ACCEPT: TaskKind = TaskKind::new("accept", OnCancel::Wait, OnError::Exit);
const CONNECTION: TaskKind = TaskKind::new("connection", OnCancel::Wait, OnError::Log);

/// Why nothing can be served.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// The address is taken, or not ours.
    #[error("cannot listen on `{address}`")]
    Tcp {
        /// The address.
        address: SocketAddr,
        /// What the kernel said.
        source: io::Error,
    },
    /// The socket cannot be made.
    #[error("cannot listen on the socket `{}`", path.display())]
    Unix {
        /// Its path.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// Another process serves the socket.
    #[error("another process listens on the socket `{}`", .0.display())]
    Taken(PathBuf),
}

/// The bound port and socket.
#[derive(Debug)]
pub(crate) struct Listeners {
    tcp: TcpListener,
    unix: Option<(UnixListener, PathBuf)>,
}

impl Listeners {
    /// Binds both.
    ///
    /// # Errors
    ///
    /// [`BindError`].
    pub(crate) async fn bind(listen: SocketAddr, socket: Option<&Path>) -> Result<Self, BindError> {
        let tcp =
            TcpListener::bind(listen).await.map_err(|source| BindError::Tcp { address: listen, source })?;
        let unix = match socket {
            None => None,
            Some(path) => {
                let listener = bind_unix(path).await?;
                Some((listener, path.to_owned()))
            }
        };
        Ok(Self { tcp, unix })
    }

    /// Returns the port's address, with the port that the kernel chose.
    pub(crate) fn address(&self) -> io::Result<SocketAddr> {
        self.tcp.local_addr()
    }

    /// Serves until the registry's token is cancelled.
    pub(crate) fn serve(self, tasks: &TaskRegistry, router: Router) {
        let room = || Arc::new(Semaphore::new(CONNECTIONS_MAX));
        let server = Server { router, tasks: tasks.clone(), room: room() };
        let token = tasks.token();
        // Room of its own: whoever fills up the port does not keep out a host agent of this machine.
        let (tcp_server, tcp_token) = (Server { room: room(), ..server.clone() }, token.clone());
        tasks.spawn(ACCEPT, async move {
            let tcp = self.tcp;
            loop {
                let Some(permit) = tcp_server.permit(&tcp_token).await else {
                    return Ok::<(), Infallible>(());
                };
                tokio::select! {
                    biased;
                    () = tcp_token.cancelled() => return Ok(()),
                    accepted = tcp.accept() => match accepted {
                        Ok((stream, peer)) => {
                            // Small messages must not wait for an acknowledgement of earlier ones.
                            let _ = stream.set_nodelay(true);
                            tcp_server.connection(stream, Peer(peer.ip().to_string().into()), permit);
                        }
                        Err(error) => pause(&error).await,
                    }
                }
            }
        });
        if let Some((unix, path)) = self.unix {
            tasks.spawn(ACCEPT, async move {
                let _remove = RemoveSocket(path);
                loop {
                    let Some(permit) = server.permit(&token).await else { return Ok::<(), Infallible>(()) };
                    tokio::select! {
                        biased;
                        () = token.cancelled() => return Ok(()),
                        accepted = unix.accept() => match accepted {
                            Ok((stream, _)) => server.connection(stream, Peer("unix".into()), permit),
                            Err(error) => pause(&error).await,
                        }
                    }
                }
            });
        }
    }
}

struct RemoveSocket(PathBuf);

impl Drop for RemoveSocket {
    fn drop(&mut self) {
        // A socket that stays is found dead and removed at the next start.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Binds a socket that only our own uid can open. One that a killed predecessor left is removed; one that somebody
/// serves is not.
async fn bind_unix(path: &Path) -> Result<UnixListener, BindError> {
    let failed = |source| BindError::Unix { path: path.to_owned(), source };
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).map_err(failed)?;
    }
    match UnixListener::bind(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            if tokio::net::UnixStream::connect(path).await.is_ok() {
                return Err(BindError::Taken(path.to_owned()));
            }
            std::fs::remove_file(path).map_err(failed)?;
        }
        Err(error) => return Err(failed(error)),
        Ok(listener) => return restrict(path, listener).map_err(failed),
    }
    let listener = UnixListener::bind(path).map_err(failed)?;
    restrict(path, listener).map_err(failed)
}

fn restrict(path: &Path, listener: UnixListener) -> io::Result<UnixListener> {
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

async fn pause(error: &io::Error) {
    tracing::warn!(error = %error, "a connection was not accepted");
    tokio::time::sleep(ACCEPT_PAUSE).await;
}

#[derive(Clone)]
struct Server {
    router: Router,
    tasks: TaskRegistry,
    room: Arc<Semaphore>,
}

impl Server {
    async fn permit(&self, token: &CancellationToken) -> Option<tokio::sync::OwnedSemaphorePermit> {
        tokio::select! {
            biased;
            () = token.cancelled() => None,
            permit = Arc::clone(&self.room).acquire_owned() => permit.ok(),
        }
    }

    fn connection<S>(&self, stream: S, peer: Peer, permit: tokio::sync::OwnedSemaphorePermit)
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let router = self.router.clone();
        let token = self.tasks.token();
        self.tasks.spawn(CONNECTION, async move {
            let _permit = permit;
            let (asked, has_asked) = watch::channel(false);
            let service = hyper::service::service_fn(move |mut request: hyper::Request<Incoming>| {
                asked.send_replace(true);
                request.extensions_mut().insert(peer.clone());
                router.clone().oneshot(request.map(Body::new))
            });
            let builder = builder();
            let connection = builder.serve_connection(TokioIo::new(stream), service);
            tokio::pin!(connection);
            let result = tokio::select! {
                result = connection.as_mut() => result,
                () = silence(has_asked) => return Ok(()),
                () = token.cancelled() => {
                    connection.as_mut().graceful_shutdown();
                    connection.await
                }
            };
            // A peer that breaks off is none of an operator's business.
            if let Err(error) = result {
                tracing::debug!(error = %error, "connection ended");
            }
            Ok::<(), Infallible>(())
        });
    }
}

/// Waits until a connection has been open too long without a request; for ever once there was one.
async fn silence(mut has_asked: watch::Receiver<bool>) {
    let asked = has_asked.wait_for(|asked| *asked);
    if tokio::time::timeout(FIRST_REQUEST_DEADLINE, asked).await.is_ok() {
        std::future::pending().await
    }
}

fn builder() -> Builder<TokioExecutor> {
    let mut builder = Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEADER_DEADLINE).keep_alive(true);
    builder
        .http2()
        .timer(TokioTimer::new())
        .adaptive_window(false)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_concurrent_streams(MAX_CONCURRENT_STREAMS)
        .keep_alive_interval(KEEP_ALIVE_INTERVAL)
        .keep_alive_timeout(KEEP_ALIVE_TIMEOUT);
    builder
}

#[derive(Clone)]
struct Probes {
    store: Store,
    metrics: Metrics,
}

/// Returns the router: probes and metrics without a bearer, and the services behind the gate.
pub(crate) fn router(
    service: ConnectRpcService,
    authenticator: Arc<Authenticator>,
    store: Store,
    metrics: Metrics,
) -> Router {
    let probes = Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics_page))
        .with_state(Probes { store, metrics });
    let services = Router::new()
        .fallback_service(service)
        .layer(axum::middleware::from_fn_with_state(authenticator, auth::gate));
    // A handler that panics answers 500 and takes nothing with it but its own call.
    probes.fallback_service(services).layer(CatchPanicLayer::new())
}

async fn readyz(State(probes): State<Probes>) -> impl IntoResponse {
    if probes.store.answers().await {
        (StatusCode::OK, "ok\n")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "the database does not answer\n")
    }
}

async fn metrics_page(State(probes): State<Probes>) -> impl IntoResponse {
    ([(http::header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], probes.metrics.render())
}
