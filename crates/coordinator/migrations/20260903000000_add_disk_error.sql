-- One more word for why a session is in its state: the disk of its host did not take what was written.
ALTER TABLE sessions DROP CONSTRAINT sessions_reason_check, ADD CONSTRAINT sessions_reason_check CHECK (reason IN (
    'requested', 'no_capacity', 'no_host', 'start_failed', 'deadline_exceeded', 'out_of_memory', 'sandbox_gone',
    'host_restarted', 'host_rebooted', 'host_unreachable', 'expired', 'host_stopped', 'layer_missing',
    'disk_error'));
ALTER TABLE session_events DROP CONSTRAINT session_events_reason_check,
    ADD CONSTRAINT session_events_reason_check CHECK (reason IN (
    'requested', 'no_capacity', 'no_host', 'start_failed', 'deadline_exceeded', 'out_of_memory', 'sandbox_gone',
    'host_restarted', 'host_rebooted', 'host_unreachable', 'expired', 'host_stopped', 'layer_missing',
    'disk_error'));
