//! What each RPC of the app API asks of its caller, from the `access` options in `proto/`.

include!("generated/access.rs");

/// One RPC and the action it performs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RpcAccess {
    /// The HTTP path of the RPC, `/package.Service/Method`.
    pub path: &'static str,
    /// The action as `noun.verb`.
    pub action: &'static str,
    /// Whether the call changes something.
    pub mutation: bool,
    /// Full name of the request message.
    pub request: &'static str,
}

/// Returns what the RPC at `path` asks, or `None` for a path that is no RPC of the app API.
pub fn rpc_access(path: &str) -> Option<&'static RpcAccess> {
    RPC_ACCESS.binary_search_by(|row| row.path.cmp(path)).ok().map(|index| &RPC_ACCESS[index])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_is_sorted_and_every_row_is_found() {
        assert!(RPC_ACCESS.is_sorted_by(|a, b| a.path < b.path));
        for row in RPC_ACCESS {
            assert_eq!(rpc_access(row.path), Some(row));
        }
        assert_eq!(rpc_access("/cloister.app.v1.SessionsService/Nothing"), None);
    }
}
