//! The values that every part of Cloister shares: ids, quantities, states and what they may become.
//!
//! Pure: no input or output, no async, no clock of its own ([`Clock`] is handed in). What is here means the same
//! in the store, in a message, on the command line and in a log line; each concept has one name (see
//! `docs/concepts/words.md`).

pub mod capability;
pub mod channel;
pub mod clock;
pub mod exec;
pub mod ids;
pub mod isolation;
pub mod limits;
pub mod name;
pub mod session;

pub use capability::{Capability, CapabilityStatus};
pub use channel::ChannelTarget;
pub use clock::{Clock, SystemClock};
pub use exec::{ExecSpec, Exit, ExitReason, OutputFrame, OutputStream};
pub use ids::{
    EventCursor, ExecId, HostId, IdError, OpId, OrganizationId, SandboxId, SessionId, TokenId, UserId,
};
pub use isolation::{BackendKind, Isolation, IsolationFact};
pub use limits::{ByteCount, CpuMillis, Limits};
pub use session::{SessionEvent, SessionState};
