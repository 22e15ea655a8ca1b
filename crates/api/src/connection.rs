//! Connections to a coordinator, for the command line and for host agents.
//!
//! One HTTP/2 connection carries every call. Windows are fixed, 256 KiB a stream and 64 MiB the connection, so
//! that no number of stalled streams below 256 can block the others; adaptive windows let one stalled upload do
//! that. Nothing is compressed: a compressor lets a stalled reader's producer run far ahead. Pings find a peer
//! that has stopped.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use buffa::Message as _;
use connectrpc::client::{ClientConfig, Http2Connection, SharedHttp2Connection};
use connectrpc::{CompressionRegistry, ConnectError, ErrorCode};
use http::{HeaderMap, HeaderValue, Uri};

use crate::app::{
    AuditServiceClient, ErrorDetail, ExecsServiceClient, HostsServiceClient, SessionsServiceClient,
    StreamsServiceClient, TokensServiceClient,
};
use crate::host::HostLinkServiceClient;

/// Bytes that one stream may have on the way, on both ends.
pub const STREAM_WINDOW_BYTES: u32 = 256 * 1024;
/// Bytes that all streams of a connection may have on the way together: 256 stalled streams' worth.
pub const CONNECTION_WINDOW_BYTES: u32 = 64 * 1024 * 1024;
/// Most streams of one connection: [`CONNECTION_WINDOW_BYTES`] over [`STREAM_WINDOW_BYTES`], less one for control.
pub const MAX_CONCURRENT_STREAMS: u32 = 255;
/// Largest message that either side accepts; frames of output have at most 64 KiB, writes at most 1 MiB.
pub const MAX_MESSAGE_BYTES: usize = 4 * 1024 * 1024;
/// Version of the host link's protocol: a coordinator serves this one and the one before.
pub const HOST_WIRE_VERSION: u32 = 1;
/// Pause between pings.
pub const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// How long a ping may stay unanswered.
pub const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// Calls that may wait in this process for the connection.
const QUEUED_CALLS: usize = 1024;

/// Where a coordinator listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Endpoint {
    /// `http://host:port`
    Tcp(Uri),
    /// `unix:///path`
    Unix(PathBuf),
}

/// Why a text is no endpoint.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not an endpoint: {reason}")]
pub struct EndpointError {
    text: String,
    reason: &'static str,
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, EndpointError> {
        let error = |reason| EndpointError { text: text.chars().take(128).collect(), reason };
        if let Some(path) = text.strip_prefix("unix://") {
            return if path.starts_with('/') {
                Ok(Self::Unix(PathBuf::from(path)))
            } else {
                Err(error("the path after `unix://` is not absolute"))
            };
        }
        if text.starts_with("https://") {
            return Err(error(
                "this version has no TLS; put a proxy that ends TLS in front and use `http://`",
            ));
        }
        let expected = "give `http://host:port` or `unix:///path`";
        let uri: Uri = text.parse().map_err(|_| error(expected))?;
        let plain = uri.scheme_str() == Some("http") && uri.host().is_some_and(|host| !host.is_empty());
        if plain && matches!(uri.path(), "" | "/") && uri.query().is_none() {
            Ok(Self::Tcp(uri))
        } else {
            Err(error(expected))
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(uri) => write!(f, "{}", uri.to_string().trim_end_matches('/')),
            Self::Unix(path) => write!(f, "unix://{}", path.display()),
        }
    }
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectionError {
    /// The bearer has characters that no header can carry.
    #[error("the token has characters that an HTTP header cannot carry")]
    Token,
    /// Nothing answers there, or not with HTTP/2.
    #[error("connect to `{endpoint}`")]
    Connect {
        /// Where.
        endpoint: String,
        /// What happened.
        source: connectrpc::ConnectError,
    },
}

/// One HTTP/2 connection to a coordinator; cheap to clone. It is made again by itself when it breaks; calls that
/// were under way fail.
#[derive(Clone)]
pub struct Connection {
    transport: SharedHttp2Connection,
    config: ClientConfig,
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The configuration holds the bearer.
        f.debug_struct("Connection").field("base_uri", self.config.base_uri()).finish_non_exhaustive()
    }
}

impl Connection {
    /// Returns a connection that is established; `bearer` goes with every call.
    ///
    /// # Errors
    ///
    /// [`ConnectionError`]; trying again later can help for [`ConnectionError::Connect`].
    pub async fn dial(endpoint: &Endpoint, bearer: Option<&str>) -> Result<Self, ConnectionError> {
        let mut headers = HeaderMap::new();
        if let Some(bearer) = bearer {
            let mut value =
                HeaderValue::from_str(&format!("Bearer {bearer}")).map_err(|_| ConnectionError::Token)?;
            value.set_sensitive(true);
            headers.insert(http::header::AUTHORIZATION, value);
        }
        let builder = Http2Connection::builder()
            .establishment_timeout(Duration::from_secs(5))
            .keep_alive_interval(KEEP_ALIVE_INTERVAL)
            .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
            .keep_alive_while_idle(true)
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES);
        let failed = |source| ConnectionError::Connect { endpoint: endpoint.to_string(), source };
        let (connection, base) = match endpoint {
            Endpoint::Tcp(uri) => {
                (builder.connect_plaintext(uri.clone()).await.map_err(failed)?, uri.clone())
            }
            Endpoint::Unix(path) => {
                let authority = Uri::from_static("http://cloister");
                (builder.connect_unix(path, authority.clone()).await.map_err(failed)?, authority)
            }
        };
        let config = ClientConfig::new(base)
            .with_compression(CompressionRegistry::new())
            .with_default_max_message_size(MAX_MESSAGE_BYTES)
            .with_default_headers(headers);
        Ok(Self { transport: connection.shared(QUEUED_CALLS), config })
    }

    /// Returns a client of the sessions service.
    pub fn sessions(&self) -> SessionsServiceClient<SharedHttp2Connection> {
        SessionsServiceClient::new(self.transport.clone(), self.config.clone())
    }

    /// Returns a client of the execs service.
    pub fn execs(&self) -> ExecsServiceClient<SharedHttp2Connection> {
        ExecsServiceClient::new(self.transport.clone(), self.config.clone())
    }

    /// Returns a client of the streams service.
    pub fn streams(&self) -> StreamsServiceClient<SharedHttp2Connection> {
        StreamsServiceClient::new(self.transport.clone(), self.config.clone())
    }

    /// Returns a client of the hosts service.
    pub fn hosts(&self) -> HostsServiceClient<SharedHttp2Connection> {
        HostsServiceClient::new(self.transport.clone(), self.config.clone())
    }

    /// Returns a client of the tokens service.
    pub fn tokens(&self) -> TokensServiceClient<SharedHttp2Connection> {
        TokensServiceClient::new(self.transport.clone(), self.config.clone())
    }

    /// Returns a client of the audit service.
    pub fn audit(&self) -> AuditServiceClient<SharedHttp2Connection> {
        AuditServiceClient::new(self.transport.clone(), self.config.clone())
    }

    /// Returns a client of the host link.
    pub fn host_link(&self) -> HostLinkServiceClient<SharedHttp2Connection> {
        HostLinkServiceClient::new(self.transport.clone(), self.config.clone())
    }
}

/// Returns whether a call got no answer of Cloister, so that the same call with the same request id may be sent again.
///
/// A connection that breaks before the headers of the answer is `unavailable`; one that breaks after them is `internal` to
/// the library (`failed to read response body`). What a coordinator answers always carries an [`ErrorDetail`].
pub fn is_unanswered(error: &ConnectError) -> bool {
    matches!(error.code, ErrorCode::Unavailable | ErrorCode::Internal) && error_detail(error).is_none()
}

/// Returns the detail that every error of the app API carries; `None` for errors that arose on the way.
pub fn error_detail(error: &ConnectError) -> Option<ErrorDetail> {
    let detail =
        error.details.iter().find(|detail| detail.type_url.ends_with("cloister.app.v1.ErrorDetail"))?;
    let bytes = base64(detail.value.as_deref()?)?;
    ErrorDetail::decode_from_slice(&bytes).ok()
}

/// Decodes standard base 64, padded or not, as Connect sends details.
fn base64(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut bits = 0u32;
    let mut count = 0;
    for character in text.trim_end_matches('=').bytes() {
        let value = match character {
            b'A'..=b'Z' => character - b'A',
            b'a'..=b'z' => character - b'a' + 26,
            b'0'..=b'9' => character - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = (bits << 6) | u32::from(value);
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push(u8::try_from((bits >> count) & 0xff).expect("eight bits"));
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_parsed_strictly_and_say_what_is_accepted() {
        assert_eq!("unix:///run/x.sock".parse(), Ok(Endpoint::Unix(PathBuf::from("/run/x.sock"))));
        let tcp: Endpoint = "http://127.0.0.1:8080".parse().expect("an endpoint");
        assert_eq!(tcp.to_string(), "http://127.0.0.1:8080");
        for bad in [
            "",
            "127.0.0.1:8080",
            "unix://x",
            "https://a",
            "http://",
            "http://a/b",
            "http://a?x=1",
            "ftp://a",
        ] {
            assert!(bad.parse::<Endpoint>().is_err(), "`{bad}` was accepted");
        }
    }

    #[test]
    fn a_detail_is_read_and_a_broken_one_is_none() {
        let detail =
            ErrorDetail { code: "CL1003".to_owned(), field: "limits.pids".to_owned(), ..Default::default() };
        let sent = connectrpc::ErrorDetail::from_message("cloister.app.v1.ErrorDetail", &detail);
        let error = ConnectError::invalid_argument("no").with_detail(sent.clone());
        assert_eq!(error_detail(&error), Some(detail));
        let broken = connectrpc::ErrorDetail { value: Some("!".to_owned()), ..sent };
        assert_eq!(error_detail(&ConnectError::invalid_argument("no").with_detail(broken)), None);
        assert_eq!(error_detail(&ConnectError::invalid_argument("no")), None);
    }
}
