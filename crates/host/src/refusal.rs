//! Why the host does not do something, in the words of the host link.

use cloister_api::convert::ConvertError;
use cloister_api::host::{HostError, HostErrorKind};
use cloister_sandbox::backend::SandboxError;
use cloister_service::error_chain;

use crate::epochs::EpochError;

/// Most characters of a message; part of it can come from a guest.
const MESSAGE_MAX_CHARS: usize = 2048;

/// A typed refusal or failure, on its way to the coordinator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    /// What the coordinator decides by.
    pub(crate) kind: HostErrorKind,
    /// What a person reads.
    pub(crate) message: String,
}

impl Refusal {
    pub(crate) fn new(kind: HostErrorKind, message: impl ToString) -> Self {
        Self { kind, message: message.to_string().chars().take(MESSAGE_MAX_CHARS).collect() }
    }

    /// It can never be done as asked.
    pub(crate) fn invalid(message: impl ToString) -> Self {
        Self::new(HostErrorKind::Invalid, message)
    }

    /// It is not here.
    pub(crate) fn not_found(message: impl ToString) -> Self {
        Self::new(HostErrorKind::NotFound, message)
    }

    /// The agent ends; asking the next one helps.
    pub(crate) fn stopping() -> Self {
        Self::new(HostErrorKind::Internal, "the host agent is stopping: ask again when it is back")
    }

    /// Returns the message of the host link.
    pub(crate) fn into_proto(self) -> HostError {
        HostError { kind: self.kind.into(), message: self.message, ..Default::default() }
    }
}

impl From<SandboxError> for Refusal {
    fn from(error: SandboxError) -> Self {
        let kind = match &error {
            SandboxError::NotFound(_) | SandboxError::PortClosed(_) => HostErrorKind::NotFound,
            SandboxError::Conflict(_) => HostErrorKind::Conflict,
            SandboxError::Invalid(_) => HostErrorKind::Invalid,
            SandboxError::NotRunning(_) => HostErrorKind::NotRunning,
            SandboxError::Exhausted(_) => HostErrorKind::Exhausted,
            SandboxError::Failed { .. } => HostErrorKind::Internal,
        };
        Self::new(kind, error_chain(&error))
    }
}

impl From<EpochError> for Refusal {
    fn from(error: EpochError) -> Self {
        let kind = match &error {
            EpochError::Fenced { .. } => HostErrorKind::Fenced,
            EpochError::Write { .. } => HostErrorKind::Internal,
        };
        Self::new(kind, error_chain(&error))
    }
}

impl From<cloister_types::IdError> for Refusal {
    fn from(error: cloister_types::IdError) -> Self {
        Self::invalid(error)
    }
}

impl From<ConvertError> for Refusal {
    fn from(error: ConvertError) -> Self {
        Self::invalid(error)
    }
}
