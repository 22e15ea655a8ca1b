// Written by `cargo xtask gen` from the `access` options in `proto/`.

/// What each RPC of the app API asks of its caller, sorted by path.
pub const RPC_ACCESS: &[RpcAccess] = &[
    RpcAccess { path: "/cloister.app.v1.AuditService/ListAudit", action: "audit.list", mutation: false, request: "cloister.app.v1.ListAuditRequest" },
    RpcAccess { path: "/cloister.app.v1.ExecsService/GetExec", action: "exec.get", mutation: false, request: "cloister.app.v1.GetExecRequest" },
    RpcAccess { path: "/cloister.app.v1.ExecsService/ListExecs", action: "exec.list", mutation: false, request: "cloister.app.v1.ListExecsRequest" },
    RpcAccess { path: "/cloister.app.v1.ExecsService/ResizeExec", action: "exec.resize", mutation: true, request: "cloister.app.v1.ResizeExecRequest" },
    RpcAccess { path: "/cloister.app.v1.ExecsService/SignalExec", action: "exec.signal", mutation: true, request: "cloister.app.v1.SignalExecRequest" },
    RpcAccess { path: "/cloister.app.v1.ExecsService/StartExec", action: "exec.start", mutation: true, request: "cloister.app.v1.StartExecRequest" },
    RpcAccess { path: "/cloister.app.v1.ExecsService/WaitExec", action: "exec.wait", mutation: false, request: "cloister.app.v1.WaitExecRequest" },
    RpcAccess { path: "/cloister.app.v1.ExecsService/WriteStdin", action: "exec.write", mutation: true, request: "cloister.app.v1.WriteStdinRequest" },
    RpcAccess { path: "/cloister.app.v1.HostsService/GetHost", action: "host.get", mutation: false, request: "cloister.app.v1.GetHostRequest" },
    RpcAccess { path: "/cloister.app.v1.HostsService/ListHosts", action: "host.list", mutation: false, request: "cloister.app.v1.ListHostsRequest" },
    RpcAccess { path: "/cloister.app.v1.SessionsService/CreateSession", action: "session.create", mutation: true, request: "cloister.app.v1.CreateSessionRequest" },
    RpcAccess { path: "/cloister.app.v1.SessionsService/DeleteSession", action: "session.delete", mutation: true, request: "cloister.app.v1.DeleteSessionRequest" },
    RpcAccess { path: "/cloister.app.v1.SessionsService/GetSession", action: "session.get", mutation: false, request: "cloister.app.v1.GetSessionRequest" },
    RpcAccess { path: "/cloister.app.v1.SessionsService/ListSessions", action: "session.list", mutation: false, request: "cloister.app.v1.ListSessionsRequest" },
    RpcAccess { path: "/cloister.app.v1.SessionsService/PauseSession", action: "session.pause", mutation: true, request: "cloister.app.v1.PauseSessionRequest" },
    RpcAccess { path: "/cloister.app.v1.SessionsService/ResumeSession", action: "session.resume", mutation: true, request: "cloister.app.v1.ResumeSessionRequest" },
    RpcAccess { path: "/cloister.app.v1.StreamsService/AttachExec", action: "exec.start", mutation: true, request: "cloister.app.v1.AttachExecRequest" },
    RpcAccess { path: "/cloister.app.v1.StreamsService/ReadOutput", action: "exec.read", mutation: false, request: "cloister.app.v1.ReadOutputRequest" },
    RpcAccess { path: "/cloister.app.v1.StreamsService/WatchSession", action: "session.watch", mutation: false, request: "cloister.app.v1.WatchSessionRequest" },
    RpcAccess { path: "/cloister.app.v1.TokensService/CreateToken", action: "token.create", mutation: true, request: "cloister.app.v1.CreateTokenRequest" },
    RpcAccess { path: "/cloister.app.v1.TokensService/ListTokens", action: "token.list", mutation: false, request: "cloister.app.v1.ListTokensRequest" },
    RpcAccess { path: "/cloister.app.v1.TokensService/RevokeToken", action: "token.revoke", mutation: true, request: "cloister.app.v1.RevokeTokenRequest" },
    RpcAccess { path: "/cloister.app.v1.TokensService/WhoAmI", action: "token.whoami", mutation: false, request: "cloister.app.v1.WhoAmIRequest" },
];
