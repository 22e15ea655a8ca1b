//! Times: `chrono` in values, milliseconds in files, `Timestamp` in messages.

use buffa_types::google::protobuf::Timestamp;
use chrono::{DateTime, Utc};

/// Returns a time as a message.
pub fn timestamp_to_proto(time: DateTime<Utc>) -> Timestamp {
    let nanos = i32::try_from(time.timestamp_subsec_nanos()).unwrap_or(0);
    Timestamp::from_unix(time.timestamp(), nanos.min(999_999_999))
}

/// Returns milliseconds since the Unix epoch as a message.
pub fn unix_ms_to_timestamp(milliseconds: u64) -> Timestamp {
    let seconds = i64::try_from(milliseconds / 1000).unwrap_or(i64::MAX);
    let nanos = i32::try_from(milliseconds % 1000).expect("less than 1000") * 1_000_000;
    Timestamp::from_unix(seconds, nanos)
}

/// Returns a message as milliseconds since the Unix epoch; a time before it is the epoch.
pub fn timestamp_to_unix_ms(timestamp: &Timestamp) -> u64 {
    let seconds = u64::try_from(timestamp.seconds).unwrap_or(0);
    let nanos = u64::try_from(timestamp.nanos).unwrap_or(0);
    seconds.saturating_mul(1000).saturating_add(nanos / 1_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn milliseconds_round_trip() {
        for milliseconds in [0, 1, 999, 1000, 1_764_658_800_123] {
            assert_eq!(timestamp_to_unix_ms(&unix_ms_to_timestamp(milliseconds)), milliseconds);
        }
        let time = DateTime::from_timestamp_millis(1_764_658_800_123).expect("a time");
        assert_eq!(timestamp_to_unix_ms(&timestamp_to_proto(time)), 1_764_658_800_123);
        assert_eq!(timestamp_to_unix_ms(&Timestamp::from_unix(-5, 0)), 0);
    }
}
