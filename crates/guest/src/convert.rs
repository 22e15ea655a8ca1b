//! Conversions between the messages of [`cloister_api::guest`] and the values of [`cloister_types`].
//!
//! On the wire an empty string, a zero duration and a zero signal mean "not given". Everything that arrives is
//! checked here once: an id that is none, an unknown reason, a spec that no kernel would take are a
//! [`ConvertError`].

use std::time::Duration;

use cloister_api::guest;
use cloister_types::exec::{ExecRecord, ExecSpecError, TerminalSize};
use cloister_types::{ExecSpec, Exit, ExitReason, IdError, OutputStream};

/// Why a message does not mean anything.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConvertError {
    /// An id that is none.
    #[error(transparent)]
    Id(#[from] IdError),
    /// A spec that cannot be run.
    #[error(transparent)]
    Spec(#[from] ExecSpecError),
    /// A field that must be there.
    #[error("`{0}` is missing")]
    Missing(&'static str),
    /// A number outside of its list.
    #[error("`{field}` {value} is not known")]
    Unknown {
        /// The field.
        field: &'static str,
        /// Its number.
        value: u32,
    },
}

/// Returns the number of an exit reason, as in `cloister.common.v1.ExitReason`.
pub fn exit_reason_to_wire(reason: ExitReason) -> u32 {
    match reason {
        ExitReason::Exited => 1,
        ExitReason::Signaled => 2,
        ExitReason::OutOfMemory => 3,
        ExitReason::Timeout => 4,
        ExitReason::NoOutputTimeout => 5,
        ExitReason::NotStarted => 6,
        ExitReason::SandboxGone => 7,
    }
}

/// Returns the exit reason with this number.
///
/// # Errors
///
/// [`ConvertError::Unknown`].
pub fn exit_reason_from_wire(value: u32) -> Result<ExitReason, ConvertError> {
    ExitReason::ALL
        .into_iter()
        .find(|reason| exit_reason_to_wire(*reason) == value)
        .ok_or(ConvertError::Unknown { field: "reason", value })
}

/// Returns the number of a stream, in frames and in the spool.
pub fn stream_to_wire(stream: OutputStream) -> u8 {
    match stream {
        OutputStream::Stdout => 1,
        OutputStream::Stderr => 2,
    }
}

/// Returns the stream with this number.
///
/// # Errors
///
/// [`ConvertError::Unknown`].
pub fn stream_from_wire(value: u32) -> Result<OutputStream, ConvertError> {
    match value {
        1 => Ok(OutputStream::Stdout),
        2 => Ok(OutputStream::Stderr),
        _ => Err(ConvertError::Unknown { field: "stream", value }),
    }
}

/// Returns whole milliseconds, rounded up so that no limit becomes "none".
pub fn millis_to_wire(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

fn optional_millis(value: u64) -> Option<Duration> {
    (value != 0).then(|| Duration::from_millis(value))
}

fn optional_text(value: String) -> Option<String> {
    (!value.is_empty()).then_some(value)
}

/// Returns a spec as a message.
pub fn spec_to_wire(spec: &ExecSpec) -> guest::ExecSpec {
    guest::ExecSpec {
        argv: spec.argv.clone(),
        env: spec.env.iter().map(|(name, value)| (name.clone(), value.clone())).collect(),
        cwd: spec.cwd.clone().unwrap_or_default(),
        user: spec.user.clone().unwrap_or_default(),
        timeout_ms: spec.timeout.map_or(0, millis_to_wire),
        no_output_timeout_ms: spec.no_output_timeout.map_or(0, millis_to_wire),
        stdin: spec.stdin,
        terminal: spec.terminal.map(terminal_size_to_wire).into(),
        ..guest::ExecSpec::default()
    }
}

/// Returns a terminal's size as a message.
pub fn terminal_size_to_wire(size: TerminalSize) -> guest::TerminalSize {
    guest::TerminalSize {
        rows: u32::from(size.rows),
        columns: u32::from(size.columns),
        ..guest::TerminalSize::default()
    }
}

/// Returns a terminal's size.
///
/// # Errors
///
/// [`ConvertError::Spec`] when no terminal has it.
pub fn terminal_size_from_wire(size: &guest::TerminalSize) -> Result<TerminalSize, ConvertError> {
    Ok(TerminalSize::new(size.rows, size.columns)?)
}

/// Returns a checked spec.
///
/// # Errors
///
/// [`ConvertError::Spec`].
pub fn spec_from_wire(spec: guest::ExecSpec) -> Result<ExecSpec, ConvertError> {
    let spec = ExecSpec {
        argv: spec.argv,
        env: spec.env.into_iter().collect(),
        cwd: optional_text(spec.cwd),
        user: optional_text(spec.user),
        timeout: optional_millis(spec.timeout_ms),
        no_output_timeout: optional_millis(spec.no_output_timeout_ms),
        stdin: spec.stdin,
        terminal: spec.terminal.as_option().map(terminal_size_from_wire).transpose()?,
    };
    spec.validate()?;
    Ok(spec)
}

/// Returns an exit as a message.
pub fn exit_to_wire(exit: &Exit) -> guest::Exit {
    guest::Exit {
        reason: exit_reason_to_wire(exit.reason),
        code: exit.code,
        signal: exit.signal.unwrap_or(0),
        message: exit.message.clone(),
        output_bytes: exit.output_bytes,
        exited_unix_ms: exit.exited_unix_ms,
        pids_limit_hit: exit.pids_limit_hit,
        disk_full: exit.disk_full,
        memory_limit_hit: exit.memory_limit_hit,
        output_lost: exit.output_lost,
        disk_error: exit.disk_error,
        ..guest::Exit::default()
    }
}

/// Returns an exit.
///
/// # Errors
///
/// [`ConvertError::Unknown`] for a reason that this version does not know.
pub fn exit_from_wire(exit: guest::Exit) -> Result<Exit, ConvertError> {
    Ok(Exit {
        reason: exit_reason_from_wire(exit.reason)?,
        code: exit.code,
        signal: (exit.signal != 0).then_some(exit.signal),
        message: exit.message,
        output_bytes: exit.output_bytes,
        exited_unix_ms: exit.exited_unix_ms,
        pids_limit_hit: exit.pids_limit_hit,
        disk_full: exit.disk_full,
        memory_limit_hit: exit.memory_limit_hit,
        output_lost: exit.output_lost,
        disk_error: exit.disk_error,
    })
}

/// Returns a record as a message.
pub fn record_to_wire(record: &ExecRecord) -> guest::Exec {
    guest::Exec {
        exec_id: record.exec_id.to_string(),
        request_id: record.request_id.clone(),
        spec: spec_to_wire(&record.spec).into(),
        pid: record.pid,
        started_unix_ms: record.started_unix_ms,
        exit: record.exit.as_ref().map(exit_to_wire).into(),
        ..guest::Exec::default()
    }
}

/// Returns a record.
///
/// # Errors
///
/// [`ConvertError`].
pub fn record_from_wire(exec: guest::Exec) -> Result<ExecRecord, ConvertError> {
    Ok(ExecRecord {
        exec_id: exec.exec_id.parse()?,
        request_id: exec.request_id,
        spec: spec_from_wire(exec.spec.into_option().ok_or(ConvertError::Missing("spec"))?)?,
        pid: exec.pid,
        started_unix_ms: exec.started_unix_ms,
        exit: exec.exit.into_option().map(exit_from_wire).transpose()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_round_trips() {
        let record = ExecRecord {
            exec_id: cloister_types::ExecId::from_u128(7),
            request_id: "r".to_owned(),
            spec: ExecSpec {
                argv: vec!["sh".to_owned(), "-c".to_owned()],
                env: [("A".to_owned(), "b".to_owned())].into_iter().collect(),
                cwd: Some("/tmp".to_owned()),
                user: None,
                timeout: Some(Duration::from_millis(1500)),
                no_output_timeout: None,
                stdin: true,
                terminal: TerminalSize::new(24, 80).ok(),
            },
            pid: 12,
            started_unix_ms: 34,
            exit: None,
        };
        assert_eq!(record_from_wire(record_to_wire(&record)), Ok(record.clone()));
        for reason in ExitReason::ALL {
            let exit = Exit {
                reason,
                code: 137,
                signal: Some(9),
                message: "m".to_owned(),
                output_bytes: 5,
                exited_unix_ms: 6,
                pids_limit_hit: true,
                memory_limit_hit: true,
                output_lost: true,
                disk_error: true,
                disk_full: true,
            };
            let ended = ExecRecord { exit: Some(exit), ..record.clone() };
            assert_eq!(record_from_wire(record_to_wire(&ended)), Ok(ended));
        }
    }

    #[test]
    fn a_limit_below_a_millisecond_does_not_vanish() {
        assert_eq!(millis_to_wire(Duration::from_nanos(1)), 1);
        assert_eq!(millis_to_wire(Duration::MAX), u64::MAX);
    }

    #[test]
    fn what_is_not_known_is_refused() {
        assert!(exit_reason_from_wire(0).is_err());
        assert!(exit_reason_from_wire(8).is_err());
        assert!(stream_from_wire(0).is_err());
        assert!(stream_from_wire(3).is_err());
        assert!(record_from_wire(guest::Exec::default()).is_err());
    }
}
