//! States of a session.

use buffa::EnumValue;
use cloister_types::SessionState;

use super::ConvertError;
use crate::app;

/// Returns a state as its message value.
pub fn session_state_to_proto(state: SessionState) -> app::SessionState {
    match state {
        SessionState::Pending => app::SessionState::Pending,
        SessionState::Queued => app::SessionState::Queued,
        SessionState::Starting => app::SessionState::Starting,
        SessionState::Active => app::SessionState::Active,
        SessionState::Pausing => app::SessionState::Pausing,
        SessionState::Paused => app::SessionState::Paused,
        SessionState::Resuming => app::SessionState::Resuming,
        SessionState::HostLost => app::SessionState::HostLost,
        SessionState::Failed => app::SessionState::Failed,
        SessionState::Deleting => app::SessionState::Deleting,
        SessionState::Deleted => app::SessionState::Deleted,
    }
}

/// Returns a message value as a state.
///
/// # Errors
///
/// The value is unspecified or of a newer version.
pub fn session_state_from_proto(
    field: &str,
    state: EnumValue<app::SessionState>,
) -> Result<SessionState, ConvertError> {
    SessionState::ALL
        .iter()
        .copied()
        .find(|known| state.as_known() == Some(session_state_to_proto(*known)))
        .ok_or_else(|| ConvertError::new(field, format!("`{state}` is no session state")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_round_trip_and_unspecified_is_none() {
        for state in SessionState::ALL {
            let proto = EnumValue::from(session_state_to_proto(*state));
            assert_eq!(session_state_from_proto("state", proto), Ok(*state));
        }
        assert!(session_state_from_proto("state", EnumValue::from(0)).is_err());
        assert!(session_state_from_proto("state", EnumValue::from(99)).is_err());
    }
}
