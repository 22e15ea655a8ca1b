//! Conversions between messages and the values of `cloister-types`.
//!
//! Into a message every value converts. Out of a message a value is checked: what an enum or an id does not know
//! is a [`ConvertError`] that names the field, never a default, except where the `.proto` comment gives zero or
//! empty a meaning of its own.
//!
//! Names follow one pattern: `x_to_proto`, `x_from_proto`.

mod exec;
mod sandbox;
mod session;
mod time;

pub use exec::{
    exec_from_proto, exec_spec_from_proto, exec_spec_to_proto, exec_to_proto, exit_from_proto, exit_to_proto,
    output_frame_from_proto, output_frame_to_proto, output_stream_from_proto, output_stream_to_proto,
    terminal_size_from_proto, terminal_size_to_proto,
};
pub use sandbox::{
    capabilities_from_proto, capabilities_to_proto, fact_from_proto, fact_to_proto, facts_from_proto,
    facts_to_proto, isolation_from_proto, isolation_to_proto, limits_from_proto, limits_to_proto,
};
pub use session::{session_state_from_proto, session_state_to_proto};
pub use time::{timestamp_to_proto, timestamp_to_unix_ms, unix_ms_to_timestamp};

/// A field of a message that is not accepted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("field `{field}`: {message}")]
pub struct ConvertError {
    /// The field, in the names of the `.proto` file, for example `spec.argv`.
    pub field: String,
    /// What is wrong with it.
    pub message: String,
}

impl ConvertError {
    /// Returns an error about a field.
    pub fn new(field: impl Into<String>, message: impl ToString) -> Self {
        Self { field: field.into(), message: message.to_string() }
    }
}
