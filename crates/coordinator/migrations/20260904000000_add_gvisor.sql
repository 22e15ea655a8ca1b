-- One more way to isolate a sandbox.
ALTER TABLE sessions
    DROP CONSTRAINT sessions_requested_backend_check,
    ADD CONSTRAINT sessions_requested_backend_check CHECK (requested_backend IN ('sim', 'namespace', 'gvisor')),
    DROP CONSTRAINT sessions_backend_check,
    ADD CONSTRAINT sessions_backend_check CHECK (backend IN ('sim', 'namespace', 'gvisor'));
