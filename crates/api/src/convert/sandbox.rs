//! Limits, isolation, facts and capabilities.

use buffa::EnumValue;
use cloister_types::{ByteCount, Capability, CapabilityStatus, CpuMillis, Isolation, IsolationFact, Limits};

use super::ConvertError;
use crate::common;

/// Returns limits as a message.
pub fn limits_to_proto(limits: &Limits) -> common::Limits {
    common::Limits {
        memory_bytes: limits.memory.0,
        cpu_millis: limits.cpus.0,
        pids: limits.pids,
        disk_bytes: limits.disk.0,
        ..Default::default()
    }
}

/// Returns a message as limits, each zero as the default. Ranges are [`Limits::validate`]'s.
pub fn limits_from_proto(limits: &common::Limits, default: &Limits) -> Limits {
    fn or<T: PartialEq + Default>(value: T, default: T) -> T {
        if value == T::default() { default } else { value }
    }
    Limits {
        memory: or(ByteCount(limits.memory_bytes), default.memory),
        cpus: or(CpuMillis(limits.cpu_millis), default.cpus),
        pids: or(limits.pids, default.pids),
        disk: or(ByteCount(limits.disk_bytes), default.disk),
    }
}

/// Returns an isolation level as its message value.
pub fn isolation_to_proto(isolation: Isolation) -> common::Isolation {
    match isolation {
        Isolation::None => common::Isolation::None,
        Isolation::Emulated => common::Isolation::Emulated,
        Isolation::Container => common::Isolation::Container,
        Isolation::Gvisor => common::Isolation::Gvisor,
        Isolation::Microvm => common::Isolation::Microvm,
    }
}

/// Returns a message value as an isolation level, `None` when it is unspecified.
///
/// # Errors
///
/// The value is of a newer version.
pub fn isolation_from_proto(
    field: &str,
    isolation: EnumValue<common::Isolation>,
) -> Result<Option<Isolation>, ConvertError> {
    if isolation.to_i32() == 0 {
        return Ok(None);
    }
    Isolation::ALL
        .into_iter()
        .find(|known| isolation.as_known() == Some(isolation_to_proto(*known)))
        .map(Some)
        .ok_or_else(|| ConvertError::new(field, format!("`{isolation}` is no isolation level")))
}

/// Returns a fact as a message.
pub fn fact_to_proto(fact: &IsolationFact) -> common::IsolationFact {
    common::IsolationFact { name: fact.name.clone(), value: fact.value.clone(), ..Default::default() }
}

/// Returns a message as a fact.
pub fn fact_from_proto(fact: &common::IsolationFact) -> IsolationFact {
    IsolationFact { name: fact.name.clone(), value: fact.value.clone() }
}

/// Returns facts as messages.
pub fn facts_to_proto(facts: &[IsolationFact]) -> Vec<common::IsolationFact> {
    facts.iter().map(fact_to_proto).collect()
}

/// Returns messages as facts.
pub fn facts_from_proto(facts: &[common::IsolationFact]) -> Vec<IsolationFact> {
    facts.iter().map(fact_from_proto).collect()
}

/// Returns capabilities as messages.
pub fn capabilities_to_proto(capabilities: &[Capability]) -> Vec<common::Capability> {
    capabilities
        .iter()
        .map(|capability| common::Capability {
            name: capability.name.clone(),
            status: match capability.status {
                CapabilityStatus::Ok => common::CapabilityStatus::Ok,
                CapabilityStatus::Failed => common::CapabilityStatus::Failed,
                CapabilityStatus::NotApplicable => common::CapabilityStatus::NotApplicable,
            }
            .into(),
            detail: capability.detail.clone(),
            remedy: capability.remedy.clone(),
            ..Default::default()
        })
        .collect()
}

/// Returns messages as capabilities. A status of a newer version counts as failed: what is not known to work is
/// not used.
pub fn capabilities_from_proto(capabilities: &[common::Capability]) -> Vec<Capability> {
    capabilities
        .iter()
        .map(|capability| Capability {
            name: capability.name.clone(),
            status: match capability.status.as_known() {
                Some(common::CapabilityStatus::Ok) => CapabilityStatus::Ok,
                Some(common::CapabilityStatus::NotApplicable) => CapabilityStatus::NotApplicable,
                Some(_) | None => CapabilityStatus::Failed,
            },
            detail: capability.detail.clone(),
            remedy: capability.remedy.clone(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_limits_are_the_defaults() {
        let asked = common::Limits { pids: 7, ..Default::default() };
        let limits = limits_from_proto(&asked, &Limits::DEFAULT);
        assert_eq!(limits, Limits { pids: 7, ..Limits::DEFAULT });
        assert_eq!(limits_from_proto(&limits_to_proto(&limits), &Limits::MINIMUM), limits);
    }

    #[test]
    fn isolation_round_trips_and_an_unknown_one_is_refused() {
        for level in Isolation::ALL {
            assert_eq!(isolation_from_proto("i", isolation_to_proto(level).into()), Ok(Some(level)));
        }
        assert_eq!(isolation_from_proto("i", EnumValue::from(0)), Ok(None));
        assert!(isolation_from_proto("i", EnumValue::from(77)).is_err());
    }
}
