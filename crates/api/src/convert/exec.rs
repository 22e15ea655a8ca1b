//! Execs: what to run, what it printed, how it ended.

use std::time::Duration;

use buffa::{EnumValue, MessageField};
use cloister_types::exec::{ExecRecord, OUTPUT_FRAME_MAX_BYTES, TerminalSize};
use cloister_types::{ExecSpec, Exit, ExitReason, OutputFrame, OutputStream, SessionId};

use super::{ConvertError, timestamp_to_unix_ms, unix_ms_to_timestamp};
use crate::common;
use crate::common::output_frame::Frame;

fn milliseconds(duration: Option<Duration>) -> u64 {
    duration.map_or(0, |duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX))
}

/// Returns a spec as a message.
pub fn exec_spec_to_proto(spec: &ExecSpec) -> common::ExecSpec {
    common::ExecSpec {
        argv: spec.argv.clone(),
        env: spec.env.iter().map(|(name, value)| (name.clone(), value.clone())).collect(),
        cwd: spec.cwd.clone().unwrap_or_default(),
        user: spec.user.clone().unwrap_or_default(),
        timeout_ms: milliseconds(spec.timeout),
        no_output_timeout_ms: milliseconds(spec.no_output_timeout),
        stdin: spec.stdin,
        terminal: spec.terminal.map(terminal_size_to_proto).into(),
        ..Default::default()
    }
}

/// Returns a terminal's size as a message.
pub fn terminal_size_to_proto(size: TerminalSize) -> common::TerminalSize {
    common::TerminalSize {
        rows: u32::from(size.rows),
        columns: u32::from(size.columns),
        ..Default::default()
    }
}

/// Returns a message as a terminal's size.
///
/// # Errors
///
/// No terminal has that size.
pub fn terminal_size_from_proto(size: &common::TerminalSize) -> Result<TerminalSize, ConvertError> {
    TerminalSize::new(size.rows, size.columns).map_err(|error| ConvertError::new("terminal", error))
}

/// Returns a message as a spec. It is not checked beyond its form: [`ExecSpec::validate`] does that.
///
/// # Errors
///
/// No terminal has the size that is asked for.
pub fn exec_spec_from_proto(spec: &common::ExecSpec) -> Result<ExecSpec, ConvertError> {
    let text = |text: &String| (!text.is_empty()).then(|| text.clone());
    let duration = |milliseconds| (milliseconds > 0).then(|| Duration::from_millis(milliseconds));
    Ok(ExecSpec {
        argv: spec.argv.clone(),
        env: spec.env.iter().map(|(name, value)| (name.clone(), value.clone())).collect(),
        cwd: text(&spec.cwd),
        user: text(&spec.user),
        timeout: duration(spec.timeout_ms),
        no_output_timeout: duration(spec.no_output_timeout_ms),
        stdin: spec.stdin,
        terminal: spec.terminal.as_option().map(terminal_size_from_proto).transpose()?,
    })
}

fn reason_to_proto(reason: ExitReason) -> common::ExitReason {
    match reason {
        ExitReason::Exited => common::ExitReason::Exited,
        ExitReason::Signaled => common::ExitReason::Signaled,
        ExitReason::OutOfMemory => common::ExitReason::OutOfMemory,
        ExitReason::Timeout => common::ExitReason::Timeout,
        ExitReason::NoOutputTimeout => common::ExitReason::NoOutputTimeout,
        ExitReason::NotStarted => common::ExitReason::NotStarted,
        ExitReason::SandboxGone => common::ExitReason::SandboxGone,
    }
}

/// Returns an exit record as a message.
pub fn exit_to_proto(exit: &Exit) -> common::ExecExit {
    common::ExecExit {
        reason: reason_to_proto(exit.reason).into(),
        code: exit.code,
        signal: exit.signal.unwrap_or(0),
        message: exit.message.clone(),
        output_bytes: exit.output_bytes,
        exited_at: MessageField::some(unix_ms_to_timestamp(exit.exited_unix_ms)),
        pids_limit_hit: exit.pids_limit_hit,
        disk_full: exit.disk_full,
        memory_limit_hit: exit.memory_limit_hit,
        output_lost: exit.output_lost,
        disk_error: exit.disk_error,
        ..Default::default()
    }
}

/// Returns a message as an exit record.
///
/// # Errors
///
/// The reason is unspecified or of a newer version.
pub fn exit_from_proto(exit: &common::ExecExit) -> Result<Exit, ConvertError> {
    let reason = ExitReason::ALL
        .into_iter()
        .find(|known| exit.reason.as_known() == Some(reason_to_proto(*known)))
        .ok_or_else(|| ConvertError::new("exit.reason", format!("`{}` is no exit reason", exit.reason)))?;
    Ok(Exit {
        reason,
        code: exit.code,
        signal: (exit.signal != 0).then_some(exit.signal),
        message: exit.message.clone(),
        output_bytes: exit.output_bytes,
        exited_unix_ms: exit.exited_at.as_option().map_or(0, timestamp_to_unix_ms),
        pids_limit_hit: exit.pids_limit_hit,
        disk_full: exit.disk_full,
        memory_limit_hit: exit.memory_limit_hit,
        output_lost: exit.output_lost,
        disk_error: exit.disk_error,
    })
}

/// Returns an exec as a message.
pub fn exec_to_proto(session_id: &SessionId, exec: &ExecRecord) -> common::Exec {
    let state = if exec.exit.is_some() { common::ExecState::Exited } else { common::ExecState::Running };
    common::Exec {
        id: exec.exec_id.to_string(),
        session_id: session_id.to_string(),
        spec: MessageField::some(exec_spec_to_proto(&exec.spec)),
        state: state.into(),
        started_at: MessageField::some(unix_ms_to_timestamp(exec.started_unix_ms)),
        exit: exec.exit.as_ref().map(exit_to_proto).into(),
        pid: exec.pid,
        ..Default::default()
    }
}

/// Returns a message as an exec. The request id is not part of the message and comes back empty.
///
/// # Errors
///
/// The id or the exit is not of the known form.
pub fn exec_from_proto(exec: &common::Exec) -> Result<ExecRecord, ConvertError> {
    Ok(ExecRecord {
        exec_id: exec.id.parse().map_err(|error| ConvertError::new("exec.id", error))?,
        request_id: String::new(),
        spec: exec_spec_from_proto(&exec.spec)?,
        pid: exec.pid,
        started_unix_ms: exec.started_at.as_option().map_or(0, timestamp_to_unix_ms),
        exit: exec.exit.as_option().map(exit_from_proto).transpose()?,
    })
}

/// Returns an output stream as its message value.
pub fn output_stream_to_proto(stream: OutputStream) -> common::OutputStream {
    match stream {
        OutputStream::Stdout => common::OutputStream::Stdout,
        OutputStream::Stderr => common::OutputStream::Stderr,
    }
}

/// Returns a message value as an output stream.
///
/// # Errors
///
/// The value is unspecified or of a newer version.
pub fn output_stream_from_proto(
    stream: EnumValue<common::OutputStream>,
) -> Result<OutputStream, ConvertError> {
    match stream.as_known() {
        Some(common::OutputStream::Stdout) => Ok(OutputStream::Stdout),
        Some(common::OutputStream::Stderr) => Ok(OutputStream::Stderr),
        Some(common::OutputStream::Unspecified) | None => {
            Err(ConvertError::new("frame.data.stream", format!("`{stream}` is no output stream")))
        }
    }
}

/// Returns a frame as a message; `None` for [`OutputFrame::End`], which each protocol says in its own way (the
/// host link with `StreamEnd`, the app API by ending the stream).
pub fn output_frame_to_proto(frame: OutputFrame) -> Option<common::OutputFrame> {
    let frame: Frame = match frame {
        OutputFrame::Data { stream, offset, data } => common::OutputData {
            stream: output_stream_to_proto(stream).into(),
            offset,
            data,
            ..Default::default()
        }
        .into(),
        OutputFrame::Gap { from, to } => common::OutputGap { from, to, ..Default::default() }.into(),
        OutputFrame::Exit(exit) => exit_to_proto(&exit).into(),
        OutputFrame::End { .. } => return None,
    };
    Some(common::OutputFrame { frame: Some(frame), ..Default::default() })
}

/// Returns a message as a frame.
///
/// # Errors
///
/// It is empty, too large, or has a value of a newer version.
pub fn output_frame_from_proto(frame: common::OutputFrame) -> Result<OutputFrame, ConvertError> {
    match frame.frame {
        Some(Frame::Data(data)) if data.data.len() > OUTPUT_FRAME_MAX_BYTES => Err(ConvertError::new(
            "frame.data.data",
            format!("{} bytes are more than 64 KiB", data.data.len()),
        )),
        Some(Frame::Data(data)) => Ok(OutputFrame::Data {
            stream: output_stream_from_proto(data.stream)?,
            offset: data.offset,
            data: data.data,
        }),
        Some(Frame::Gap(gap)) => Ok(OutputFrame::Gap { from: gap.from, to: gap.to }),
        Some(Frame::Exit(exit)) => Ok(OutputFrame::Exit(exit_from_proto(&exit)?)),
        None => Err(ConvertError::new("frame", "it is empty")),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use cloister_types::ExecId;

    use super::*;

    #[test]
    fn an_exec_round_trips() {
        let spec = ExecSpec {
            argv: vec!["sh".to_owned(), "-c".to_owned()],
            env: BTreeMap::from([("A".to_owned(), "b".to_owned())]),
            cwd: Some("/tmp".to_owned()),
            user: None,
            timeout: Some(Duration::from_millis(1500)),
            no_output_timeout: None,
            stdin: true,
            terminal: TerminalSize::new(24, 80).ok(),
        };
        let exit = Exit {
            reason: ExitReason::Signaled,
            code: 137,
            signal: Some(9),
            message: "killed".to_owned(),
            output_bytes: 12,
            exited_unix_ms: 1_764_658_800_123,
            pids_limit_hit: true,
            memory_limit_hit: true,
            output_lost: true,
            disk_error: true,
            disk_full: false,
        };
        let record = ExecRecord {
            exec_id: ExecId::from_u128(7),
            request_id: String::new(),
            spec,
            pid: 12,
            started_unix_ms: 5,
            exit: Some(exit),
        };
        let proto = exec_to_proto(&SessionId::from_u128(1), &record);
        assert_eq!(exec_from_proto(&proto), Ok(record));
    }

    #[test]
    fn frames_round_trip_and_hostile_ones_are_refused() {
        let frame = OutputFrame::Data { stream: OutputStream::Stderr, offset: 3, data: vec![1, 2] };
        let proto = output_frame_to_proto(frame.clone()).expect("it has a message");
        assert_eq!(output_frame_from_proto(proto), Ok(frame));
        assert!(output_frame_from_proto(common::OutputFrame::default()).is_err());
        let large = common::OutputData {
            stream: common::OutputStream::Stdout.into(),
            data: vec![0; OUTPUT_FRAME_MAX_BYTES + 1],
            ..Default::default()
        };
        let large = common::OutputFrame { frame: Some(large.into()), ..Default::default() };
        assert!(output_frame_from_proto(large).is_err());
        let no_reason =
            common::OutputFrame { frame: Some(common::ExecExit::default().into()), ..Default::default() };
        assert!(output_frame_from_proto(no_reason).is_err());
    }
}
