// Written by `cargo xtask gen` from `proto/`.

/// Every message that a request of the app API can hold, sorted by name.
pub const JSON_MESSAGES: &[JsonMessage] = &[
    JsonMessage {
        name: "cloister.app.v1.AttachExecRequest",
        fields: &[
            JsonField { json: "resize", proto: "resize", shape: JsonShape::Message("cloister.common.v1.TerminalSize") },
            JsonField { json: "signal", proto: "signal", shape: JsonShape::Scalar },
            JsonField { json: "start", proto: "start", shape: JsonShape::Message("cloister.app.v1.AttachStart") },
            JsonField { json: "stdin", proto: "stdin", shape: JsonShape::Message("cloister.app.v1.AttachStdin") },
        ],
    },
    JsonMessage {
        name: "cloister.app.v1.AttachStart",
        fields: &[
            JsonField { json: "execId", proto: "exec_id", shape: JsonShape::Scalar },
            JsonField { json: "fromOffset", proto: "from_offset", shape: JsonShape::Scalar },
            JsonField { json: "requestId", proto: "request_id", shape: JsonShape::Scalar },
            JsonField { json: "session", proto: "session", shape: JsonShape::Scalar },
            JsonField { json: "spec", proto: "spec", shape: JsonShape::Message("cloister.common.v1.ExecSpec") },
        ],
    },
    JsonMessage {
        name: "cloister.app.v1.AttachStdin",
        fields: &[
            JsonField { json: "append", proto: "append", shape: JsonShape::Scalar },
            JsonField { json: "data", proto: "data", shape: JsonShape::Scalar },
            JsonField { json: "eof", proto: "eof", shape: JsonShape::Scalar },
            JsonField { json: "offset", proto: "offset", shape: JsonShape::Scalar },
        ],
    },
    JsonMessage {
        name: "cloister.app.v1.CreateSessionRequest",
        fields: &[
            JsonField { json: "backend", proto: "backend", shape: JsonShape::Scalar },
            JsonField { json: "image", proto: "image", shape: JsonShape::Scalar },
            JsonField { json: "isolationFloor", proto: "isolation_floor", shape: JsonShape::Scalar },
            JsonField { json: "labels", proto: "labels", shape: JsonShape::Scalar },
            JsonField { json: "limits", proto: "limits", shape: JsonShape::Message("cloister.common.v1.Limits") },
            JsonField { json: "name", proto: "name", shape: JsonShape::Scalar },
            JsonField { json: "requestId", proto: "request_id", shape: JsonShape::Scalar },
            JsonField { json: "ttlMs", proto: "ttl_ms", shape: JsonShape::Scalar },
            JsonField { json: "waitMs", proto: "wait_ms", shape: JsonShape::Scalar },
        ],
    },
    JsonMessage {
        name: "cloister.app.v1.CreateTokenRequest",
        fields: &[
            JsonField { json: "name", proto: "name", shape: JsonShape::Scalar },
            JsonField { json: "requestId", proto: "request_id", shape: JsonShape::Scalar },
            JsonField { json: "ttlMs", proto: "ttl_ms", shape: JsonShape::Scalar },
        ],
    },
    JsonMessage {
        name: "cloister.app.v1.DeleteSessionRequest",
        fields: &[
            JsonField { json: "requestId", proto: "request_id", shape: JsonShape::Scalar },
            JsonField { json: "session", proto: "session", shape: JsonShape::Scalar },
            JsonField { json: "waitMs", proto: "wait_ms", shape: JsonShape::Scalar },
        ],
    },
    JsonMessage {
        name: "cloister.app.v1.DialPortRequest",
        fields: &[
            JsonField { json: "data", proto: "data", shape: JsonShape::Scalar },
            JsonField { json: "start", proto: "start", shape: JsonShape::Message("cloister.app.v1.DialPortStart") },
        ],
    },
    JsonMessage {
        name: "cloister.app.v1.DialPortStart",
        fields: &[
            JsonField { json: "port", proto: "port", shape: JsonShape::Scalar },
            JsonField { json: "requestId", proto: "request_id", shape: JsonShape::Scalar },
            JsonField { json: "session", proto: "session", shape: JsonShape::Scalar },
        ],
    },
    JsonMessage {
        name: "cloister.app.v1.GetExecRequest",
        fields: &[
            JsonField { json: "execId", proto: "exec_id", shape: JsonShape::Scalar },
            JsonField { json: "session", proto: "session", shape: JsonShape::Scalar },
        ],
    },
    JsonMessage {
        name: "cloister.app.v1.GetHostRequest",
        fields: &[
            JsonField { json: "host", proto: "host", shape: JsonShape::Scalar },
        ],
    },
    JsonMessage {
        name: "cloister.app.v1.GetSessionRequest",
        fields: &[
            JsonField { json: "session", proto: "session", shape: JsonShape::Scalar },
        ],
    },
    JsonMessage {
        name: "cloister.app.v1.ListAuditRequest",
        fields: &[
            JsonField { json: "pageSize", proto: "page_size", shape: JsonShape::Scalar },
            JsonField { json: "pageToken", proto: "page_token", shape: JsonShape::Scalar },
            JsonField { json: "resource", proto: "resource", shape: JsonShape::Scalar },
        ],
    },
    JsonMessage {
        name: "cloister.app.v1.ListExecsRequest",
        fields: &[
            JsonField { json: "session", proto: "session", shape: JsonShape::Scalar },
        ],
    },
    JsonMessage {
        name: "cloister.app.v1.ListHostsRequest",
        fields: &[
        ],
    },
    JsonMessage {
        name: "cloister.app.v1.ListSessionsRequest",
        fields: &[
            JsonField { json: "labels", proto: "labels", shape: JsonShape::Scalar },
            JsonField { json: "pageSize", proto: "page_size", shape: JsonShape::Scalar },
            JsonField { json: "pageToken", proto: "page_token", shape: JsonShape::Scalar },
            JsonField { json: "states", proto: "states", shape: JsonShape::Scalar },
        ],
    },
    JsonMessage {
        name: "cloister.app.v1.ListTokensRequest",
        fields: &[
        ],
    },
    JsonMessage {
        name: "cloister.app.v1.PauseSessionRequest",
        fields: &[
            JsonField { json: "requestId", proto: "request_id", shape: JsonShape::Scalar },
            JsonField { json: "session", proto: "session", shape: JsonShape::Scalar },
            JsonField { json: "waitMs", proto: "wait_ms", shape: JsonShape::Scalar },
        ],
    },
    JsonMessage {
        name: "cloister.app.v1.ReadOutputRequest",
        fields: &[
            JsonField { json: "execId", proto: "exec_id", shape: JsonShape::Scalar },
            JsonField { json: "fromOffset", proto: "from_offset", shape: JsonShape::Scalar },
            JsonField { json: "noFollow", proto: "no_follow", shape: JsonShape::Scalar },
            JsonField { json: "session", proto: "session", shape: JsonShape::Scalar },
        ],
    },
    JsonMessage {
        name: "cloister.app.v1.ResizeExecRequest",
        fields: &[
            JsonField { json: "execId", proto: "exec_id", shape: JsonShape::Scalar },
            JsonField { json: "session", proto: "session", shape: JsonShape::Scalar },
            JsonField { json: "size", proto: "size", shape: JsonShape::Message("cloister.common.v1.TerminalSize") },
        ],
    },
    JsonMessage {
        name: "cloister.app.v1.ResumeSessionRequest",
        fields: &[
            JsonField { json: "requestId", proto: "request_id", shape: JsonShape::Scalar },
            JsonField { json: "session", proto: "session", shape: JsonShape::Scalar },
            JsonField { json: "waitMs", proto: "wait_ms", shape: JsonShape::Scalar },
        ],
    },
    JsonMessage {
        name: "cloister.app.v1.RevokeTokenRequest",
        fields: &[
            JsonField { json: "requestId", proto: "request_id", shape: JsonShape::Scalar },
            JsonField { json: "token", proto: "token", shape: JsonShape::Scalar },
        ],
    },
    JsonMessage {
        name: "cloister.app.v1.SignalExecRequest",
        fields: &[
            JsonField { json: "execId", proto: "exec_id", shape: JsonShape::Scalar },
            JsonField { json: "session", proto: "session", shape: JsonShape::Scalar },
            JsonField { json: "signal", proto: "signal", shape: JsonShape::Scalar },
        ],
    },
    JsonMessage {
        name: "cloister.app.v1.StartExecRequest",
        fields: &[
            JsonField { json: "requestId", proto: "request_id", shape: JsonShape::Scalar },
            JsonField { json: "session", proto: "session", shape: JsonShape::Scalar },
            JsonField { json: "spec", proto: "spec", shape: JsonShape::Message("cloister.common.v1.ExecSpec") },
        ],
    },
    JsonMessage {
        name: "cloister.app.v1.TransferFilesRequest",
        fields: &[
            JsonField { json: "data", proto: "data", shape: JsonShape::Scalar },
            JsonField { json: "start", proto: "start", shape: JsonShape::Message("cloister.app.v1.TransferStart") },
        ],
    },
    JsonMessage {
        name: "cloister.app.v1.TransferStart",
        fields: &[
            JsonField { json: "requestId", proto: "request_id", shape: JsonShape::Scalar },
            JsonField { json: "session", proto: "session", shape: JsonShape::Scalar },
            JsonField { json: "user", proto: "user", shape: JsonShape::Scalar },
        ],
    },
    JsonMessage {
        name: "cloister.app.v1.WaitExecRequest",
        fields: &[
            JsonField { json: "execId", proto: "exec_id", shape: JsonShape::Scalar },
            JsonField { json: "session", proto: "session", shape: JsonShape::Scalar },
            JsonField { json: "waitMs", proto: "wait_ms", shape: JsonShape::Scalar },
        ],
    },
    JsonMessage {
        name: "cloister.app.v1.WatchSessionRequest",
        fields: &[
            JsonField { json: "afterCursor", proto: "after_cursor", shape: JsonShape::Scalar },
            JsonField { json: "session", proto: "session", shape: JsonShape::Scalar },
        ],
    },
    JsonMessage {
        name: "cloister.app.v1.WhoAmIRequest",
        fields: &[
        ],
    },
    JsonMessage {
        name: "cloister.app.v1.WriteStdinRequest",
        fields: &[
            JsonField { json: "append", proto: "append", shape: JsonShape::Scalar },
            JsonField { json: "data", proto: "data", shape: JsonShape::Scalar },
            JsonField { json: "eof", proto: "eof", shape: JsonShape::Scalar },
            JsonField { json: "execId", proto: "exec_id", shape: JsonShape::Scalar },
            JsonField { json: "offset", proto: "offset", shape: JsonShape::Scalar },
            JsonField { json: "session", proto: "session", shape: JsonShape::Scalar },
        ],
    },
    JsonMessage {
        name: "cloister.common.v1.ExecSpec",
        fields: &[
            JsonField { json: "argv", proto: "argv", shape: JsonShape::Scalar },
            JsonField { json: "cwd", proto: "cwd", shape: JsonShape::Scalar },
            JsonField { json: "env", proto: "env", shape: JsonShape::Scalar },
            JsonField { json: "noOutputTimeoutMs", proto: "no_output_timeout_ms", shape: JsonShape::Scalar },
            JsonField { json: "stdin", proto: "stdin", shape: JsonShape::Scalar },
            JsonField { json: "terminal", proto: "terminal", shape: JsonShape::Message("cloister.common.v1.TerminalSize") },
            JsonField { json: "timeoutMs", proto: "timeout_ms", shape: JsonShape::Scalar },
            JsonField { json: "user", proto: "user", shape: JsonShape::Scalar },
        ],
    },
    JsonMessage {
        name: "cloister.common.v1.Limits",
        fields: &[
            JsonField { json: "cpuMillis", proto: "cpu_millis", shape: JsonShape::Scalar },
            JsonField { json: "diskBytes", proto: "disk_bytes", shape: JsonShape::Scalar },
            JsonField { json: "memoryBytes", proto: "memory_bytes", shape: JsonShape::Scalar },
            JsonField { json: "pids", proto: "pids", shape: JsonShape::Scalar },
        ],
    },
    JsonMessage {
        name: "cloister.common.v1.TerminalSize",
        fields: &[
            JsonField { json: "columns", proto: "columns", shape: JsonShape::Scalar },
            JsonField { json: "rows", proto: "rows", shape: JsonShape::Scalar },
        ],
    },
];
