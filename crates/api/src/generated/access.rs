// Written by `cargo xtask gen` from the `access` options in `proto/`.

/// What each RPC of the app API asks of its caller, sorted by path.
pub const RPC_ACCESS: &[RpcAccess] = &[
    RpcAccess { path: "/cloister.app.v1.AuditService/ListAudit", action: "audit.list", mutation: false },
    RpcAccess { path: "/cloister.app.v1.ExecsService/GetExec", action: "exec.get", mutation: false },
    RpcAccess { path: "/cloister.app.v1.ExecsService/ListExecs", action: "exec.list", mutation: false },
    RpcAccess { path: "/cloister.app.v1.ExecsService/SignalExec", action: "exec.signal", mutation: true },
    RpcAccess { path: "/cloister.app.v1.ExecsService/StartExec", action: "exec.start", mutation: true },
    RpcAccess { path: "/cloister.app.v1.ExecsService/WaitExec", action: "exec.wait", mutation: false },
    RpcAccess { path: "/cloister.app.v1.ExecsService/WriteStdin", action: "exec.write", mutation: true },
    RpcAccess { path: "/cloister.app.v1.HostsService/GetHost", action: "host.get", mutation: false },
    RpcAccess { path: "/cloister.app.v1.HostsService/ListHosts", action: "host.list", mutation: false },
    RpcAccess { path: "/cloister.app.v1.SessionsService/CreateSession", action: "session.create", mutation: true },
    RpcAccess { path: "/cloister.app.v1.SessionsService/DeleteSession", action: "session.delete", mutation: true },
    RpcAccess { path: "/cloister.app.v1.SessionsService/GetSession", action: "session.get", mutation: false },
    RpcAccess { path: "/cloister.app.v1.SessionsService/ListSessions", action: "session.list", mutation: false },
    RpcAccess { path: "/cloister.app.v1.SessionsService/PauseSession", action: "session.pause", mutation: true },
    RpcAccess { path: "/cloister.app.v1.SessionsService/ResumeSession", action: "session.resume", mutation: true },
    RpcAccess { path: "/cloister.app.v1.StreamsService/AttachExec", action: "exec.start", mutation: true },
    RpcAccess { path: "/cloister.app.v1.StreamsService/ReadOutput", action: "exec.read", mutation: false },
    RpcAccess { path: "/cloister.app.v1.StreamsService/WatchSession", action: "session.watch", mutation: false },
    RpcAccess { path: "/cloister.app.v1.TokensService/CreateToken", action: "token.create", mutation: true },
    RpcAccess { path: "/cloister.app.v1.TokensService/ListTokens", action: "token.list", mutation: false },
    RpcAccess { path: "/cloister.app.v1.TokensService/RevokeToken", action: "token.revoke", mutation: true },
    RpcAccess { path: "/cloister.app.v1.TokensService/WhoAmI", action: "token.whoami", mutation: false },
];
