-- The first tables. Ids are prefixed text with a time-ordered body; words are those of the types crate (a test compares).

-- The statement's time; tests override it with the setting `cloister.now`. STABLE and plain SQL, so that it is inlined
-- and can stand in an index condition. After a SET LOCAL has ended the setting is '' and not null, hence the nullif.
CREATE FUNCTION cloister_now() RETURNS timestamptz
    LANGUAGE sql STABLE PARALLEL SAFE
    AS $$ SELECT coalesce(nullif(current_setting('cloister.now', true), '')::timestamptz, statement_timestamp()) $$;

CREATE TABLE organizations (
    id text PRIMARY KEY,
    name text NOT NULL CONSTRAINT organizations_name_key UNIQUE,
    generation bigint NOT NULL DEFAULT 1,
    created_at timestamptz NOT NULL DEFAULT cloister_now()
);

CREATE TABLE users (
    id text PRIMARY KEY,
    organization_id text NOT NULL REFERENCES organizations (id),
    name text NOT NULL,
    generation bigint NOT NULL DEFAULT 1,
    created_at timestamptz NOT NULL DEFAULT cloister_now(),
    CONSTRAINT users_name_key UNIQUE (organization_id, name)
);

-- API tokens. `local_owner` is the one that `cloister up` keeps in its data directory.
CREATE TABLE tokens (
    id text PRIMARY KEY,
    user_id text NOT NULL REFERENCES users (id),
    name text NOT NULL,
    hash bytea NOT NULL CONSTRAINT tokens_hash_key UNIQUE CHECK (length(hash) = 32),
    local_owner boolean NOT NULL DEFAULT false,
    generation bigint NOT NULL DEFAULT 1,
    created_at timestamptz NOT NULL DEFAULT cloister_now(),
    expires_at timestamptz,
    last_used_at timestamptz,
    revoked_at timestamptz
);
CREATE UNIQUE INDEX tokens_live_name_key ON tokens (user_id, name) WHERE revoked_at IS NULL AND NOT local_owner;
CREATE UNIQUE INDEX tokens_local_owner_key ON tokens (user_id) WHERE local_owner;
CREATE INDEX tokens_by_user ON tokens (user_id, id DESC);

CREATE TABLE hosts (
    id text COLLATE "C" PRIMARY KEY,
    name text NOT NULL,
    version text NOT NULL,
    wire_version integer NOT NULL,
    boot_id text NOT NULL,
    capabilities jsonb NOT NULL,
    memory_bytes bigint NOT NULL CHECK (memory_bytes >= 0),
    cpu_millis bigint NOT NULL CHECK (cpu_millis >= 0),
    disk_bytes bigint NOT NULL CHECK (disk_bytes >= 0),
    connected boolean NOT NULL,
    cordoned boolean NOT NULL DEFAULT false,
    -- Number of the current link; a heartbeat over an earlier one is refused.
    link_epoch bigint NOT NULL DEFAULT 1,
    last_heartbeat_at timestamptz NOT NULL DEFAULT cloister_now(),
    generation bigint NOT NULL DEFAULT 1,
    created_at timestamptz NOT NULL DEFAULT cloister_now()
);
CREATE INDEX hosts_by_heartbeat ON hosts (last_heartbeat_at) WHERE connected;

-- First in, first out: drawn under the hosts' locks, so that the numbers have the order of the commits.
CREATE SEQUENCE session_queue_seq;

CREATE TABLE sessions (
    -- Byte order on every server, so that pages and prefixes follow the time of creation.
    id text COLLATE "C" PRIMARY KEY,
    organization_id text NOT NULL REFERENCES organizations (id),
    name text,
    labels jsonb NOT NULL DEFAULT '{}',
    state text NOT NULL CONSTRAINT sessions_state_check CHECK (state IN (
        'pending', 'queued', 'starting', 'active', 'pausing', 'paused', 'resuming', 'host_lost', 'failed',
        'deleting', 'deleted')),
    reason text CONSTRAINT sessions_reason_check CHECK (reason IN (
        'requested', 'no_capacity', 'no_host', 'start_failed', 'deadline_exceeded', 'out_of_memory', 'sandbox_gone',
        'host_restarted', 'host_rebooted', 'host_unreachable', 'expired')),
    message text NOT NULL DEFAULT '',
    image text NOT NULL,
    memory_bytes bigint NOT NULL CHECK (memory_bytes > 0),
    cpu_millis bigint NOT NULL CHECK (cpu_millis > 0),
    pids bigint NOT NULL CHECK (pids > 0),
    disk_bytes bigint NOT NULL CHECK (disk_bytes > 0),
    requested_backend text CONSTRAINT sessions_requested_backend_check CHECK (requested_backend IN ('sim', 'namespace')),
    backend text CONSTRAINT sessions_backend_check CHECK (backend IN ('sim', 'namespace')),
    isolation_floor text NOT NULL CONSTRAINT sessions_isolation_floor_check CHECK (isolation_floor IN (
        'none', 'emulated', 'container', 'gvisor', 'microvm')),
    isolation text CONSTRAINT sessions_isolation_check CHECK (isolation IN (
        'none', 'emulated', 'container', 'gvisor', 'microvm')),
    host_id text COLLATE "C" REFERENCES hosts (id),
    sandbox_id text,
    facts jsonb NOT NULL DEFAULT '[]',
    network boolean NOT NULL DEFAULT false,
    -- Who may act: grows with each claim of an operation, and with whatever takes the right to act away.
    epoch bigint NOT NULL DEFAULT 1,
    generation bigint NOT NULL DEFAULT 1,
    -- Position of the newest event.
    last_cursor bigint NOT NULL DEFAULT 0,
    queue_seq bigint,
    created_at timestamptz NOT NULL DEFAULT cloister_now(),
    updated_at timestamptz NOT NULL DEFAULT cloister_now(),
    expires_at timestamptz,
    deadline_at timestamptz,
    CONSTRAINT sessions_queue_check CHECK ((state = 'queued') = (queue_seq IS NOT NULL)),
    CONSTRAINT sessions_placed_check CHECK (
        state IN ('pending', 'queued', 'failed', 'deleting', 'deleted')
        OR (host_id IS NOT NULL AND sandbox_id IS NOT NULL AND backend IS NOT NULL))
);
CREATE UNIQUE INDEX sessions_live_name_key ON sessions (organization_id, name) WHERE state <> 'deleted';
-- Lists newest first, and prefixes of ids within an organization.
CREATE INDEX sessions_by_organization ON sessions (organization_id, id DESC);
CREATE INDEX sessions_live_by_organization ON sessions (organization_id, id DESC) WHERE state <> 'deleted';
CREATE INDEX sessions_by_labels ON sessions USING gin (labels jsonb_path_ops);
-- What a host has promised, read from the index alone. The states are HOLDS_HOST_CAPACITY.
CREATE INDEX sessions_holding_capacity ON sessions (host_id) INCLUDE (memory_bytes, cpu_millis, disk_bytes)
    WHERE state IN ('starting', 'active', 'pausing', 'resuming', 'host_lost');
CREATE INDEX sessions_by_host ON sessions (host_id) WHERE state <> 'deleted';
CREATE UNIQUE INDEX sessions_queue_key ON sessions (queue_seq) WHERE state = 'queued';
CREATE INDEX sessions_by_deadline ON sessions (deadline_at) WHERE deadline_at IS NOT NULL;
CREATE INDEX sessions_by_expiry ON sessions (expires_at)
    WHERE expires_at IS NOT NULL AND state NOT IN ('deleting', 'deleted');
CREATE INDEX sessions_deleted_by_time ON sessions (updated_at) WHERE state = 'deleted';

CREATE TABLE session_ops (
    id text PRIMARY KEY,
    session_id text COLLATE "C" NOT NULL REFERENCES sessions (id),
    kind text NOT NULL CONSTRAINT session_ops_kind_check CHECK (kind IN ('start', 'pause', 'delete')),
    state text NOT NULL CONSTRAINT session_ops_state_check CHECK (state IN ('pending', 'running', 'done', 'superseded')),
    -- The epoch of the last claim.
    epoch bigint NOT NULL,
    attempts bigint NOT NULL DEFAULT 0,
    not_before timestamptz NOT NULL DEFAULT cloister_now(),
    lease_holder text,
    lease_expires_at timestamptz,
    last_error text NOT NULL DEFAULT '',
    generation bigint NOT NULL DEFAULT 1,
    created_at timestamptz NOT NULL DEFAULT cloister_now(),
    finished_at timestamptz,
    CONSTRAINT session_ops_lease_check CHECK (
        (state = 'running') = (lease_holder IS NOT NULL) AND (state = 'running') = (lease_expires_at IS NOT NULL)),
    CONSTRAINT session_ops_finished_check CHECK ((state IN ('done', 'superseded')) = (finished_at IS NOT NULL))
);
-- A session has at most one unfinished operation.
CREATE UNIQUE INDEX session_ops_unfinished_key ON session_ops (session_id) WHERE state IN ('pending', 'running');
CREATE INDEX session_ops_due ON session_ops ((coalesce(lease_expires_at, not_before))) WHERE state IN ('pending', 'running');
CREATE INDEX session_ops_by_session ON session_ops (session_id);

CREATE TABLE session_events (
    session_id text COLLATE "C" NOT NULL REFERENCES sessions (id),
    cursor bigint NOT NULL CHECK (cursor > 0),
    kind text NOT NULL,
    state text NOT NULL CONSTRAINT session_events_state_check CHECK (state IN (
        'pending', 'queued', 'starting', 'active', 'pausing', 'paused', 'resuming', 'host_lost', 'failed',
        'deleting', 'deleted')),
    reason text CONSTRAINT session_events_reason_check CHECK (reason IN (
        'requested', 'no_capacity', 'no_host', 'start_failed', 'deadline_exceeded', 'out_of_memory', 'sandbox_gone',
        'host_restarted', 'host_rebooted', 'host_unreachable', 'expired')),
    message text NOT NULL DEFAULT '',
    at timestamptz NOT NULL DEFAULT cloister_now(),
    PRIMARY KEY (session_id, cursor)
);

-- Request ids and what their first use made.
CREATE TABLE idempotency_keys (
    user_id text NOT NULL REFERENCES users (id),
    request_id text NOT NULL,
    payload_hash bytea NOT NULL CHECK (length(payload_hash) = 32),
    resource_id text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT cloister_now(),
    PRIMARY KEY (user_id, request_id)
);
CREATE INDEX idempotency_keys_by_time ON idempotency_keys (created_at);

CREATE TABLE audit_log (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT cloister_now(),
    organization_id text NOT NULL REFERENCES organizations (id),
    principal text NOT NULL,
    action text NOT NULL,
    resource text NOT NULL,
    request_id text NOT NULL,
    source text NOT NULL
);
CREATE INDEX audit_log_by_organization ON audit_log (organization_id, id DESC);
CREATE INDEX audit_log_by_resource ON audit_log (organization_id, resource, id DESC);
