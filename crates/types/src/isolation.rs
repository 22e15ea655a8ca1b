//! How strongly a sandbox is separated from the machine, and the backends that do it.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Isolation levels, weakest first: the order is the order of strength.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Isolation {
    /// No boundary at all: the simulated backend.
    None,
    /// A machine emulated in software. It satisfies no floor and `auto` never picks it.
    Emulated,
    /// The host's kernel behind namespaces, seccomp, Landlock and cgroups.
    Container,
    /// A kernel in user space between the work and the host's kernel.
    Gvisor,
    /// A guest kernel of its own under hardware virtualisation.
    Microvm,
}

impl Isolation {
    /// Every level, weakest first.
    pub const ALL: [Self; 5] = [Self::None, Self::Emulated, Self::Container, Self::Gvisor, Self::Microvm];

    /// Returns the word used in the store, in messages and on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Emulated => "emulated",
            Self::Container => "container",
            Self::Gvisor => "gvisor",
            Self::Microvm => "microvm",
        }
    }

    /// Returns the floor of a session that sets none: `container`, so that nothing runs without isolation by
    /// oversight. Whoever names a backend that has less has asked for what it has.
    pub fn default_floor(backend: Option<BackendKind>) -> Self {
        backend.map_or(Self::Container, |kind| kind.isolation().min(Self::Container))
    }

    /// Returns whether a sandbox with this isolation may run a session that asks for at least `floor`.
    pub fn satisfies(self, floor: Self) -> bool {
        match self {
            Self::None | Self::Emulated => floor == Self::None,
            Self::Container | Self::Gvisor | Self::Microvm => self >= floor,
        }
    }
}

impl fmt::Display for Isolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A word that is none of the accepted ones.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not one of {accepted}")]
pub struct UnknownWord {
    text: String,
    accepted: String,
}

impl UnknownWord {
    pub(crate) fn new<'a>(text: &str, accepted: impl IntoIterator<Item = &'a str>) -> Self {
        let accepted: Vec<String> = accepted.into_iter().map(|word| format!("`{word}`")).collect();
        Self { text: text.chars().take(64).collect(), accepted: accepted.join(", ") }
    }
}

impl FromStr for Isolation {
    type Err = UnknownWord;

    fn from_str(text: &str) -> Result<Self, UnknownWord> {
        Self::ALL
            .into_iter()
            .find(|level| level.as_str() == text)
            .ok_or_else(|| UnknownWord::new(text, Self::ALL.map(Self::as_str)))
    }
}

/// The ways to isolate a sandbox that this version has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BackendKind {
    /// Everything in memory, for tests of what stands above.
    Sim,
    /// Linux namespaces, seccomp, Landlock and cgroups.
    Namespace,
    /// gVisor: a kernel in user space, started by `runsc`.
    Gvisor,
}

impl BackendKind {
    /// Every backend, weakest first.
    pub const ALL: [Self; 3] = [Self::Sim, Self::Namespace, Self::Gvisor];

    /// Returns the word used in the store, in messages and on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Sim => "sim",
            Self::Namespace => "namespace",
            Self::Gvisor => "gvisor",
        }
    }

    /// Returns the isolation that a sandbox of this backend has.
    pub fn isolation(self) -> Isolation {
        match self {
            Self::Sim => Isolation::None,
            Self::Namespace => Isolation::Container,
            Self::Gvisor => Isolation::Gvisor,
        }
    }
}

impl fmt::Display for BackendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for BackendKind {
    type Err = UnknownWord;

    fn from_str(text: &str) -> Result<Self, UnknownWord> {
        Self::ALL
            .into_iter()
            .find(|kind| kind.as_str() == text)
            .ok_or_else(|| UnknownWord::new(text, Self::ALL.map(Self::as_str)))
    }
}

/// Something true of a running sandbox, read from inside it after all hardening.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IsolationFact {
    /// Stable name, for example `landlock_abi`.
    pub name: String,
    /// What was read.
    pub value: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn emulated_and_none_satisfy_no_floor() {
        for floor in [Isolation::Emulated, Isolation::Container, Isolation::Gvisor, Isolation::Microvm] {
            assert!(!Isolation::None.satisfies(floor));
            assert!(!Isolation::Emulated.satisfies(floor));
        }
        assert!(Isolation::Gvisor.satisfies(Isolation::Container));
        assert!(!Isolation::Container.satisfies(Isolation::Gvisor));
        assert!(Isolation::Container.satisfies(Isolation::Container));
    }

    #[test]
    fn a_session_that_sets_no_floor_gets_a_container_unless_it_names_less() {
        assert_eq!(Isolation::default_floor(None), Isolation::Container);
        assert_eq!(Isolation::default_floor(Some(BackendKind::Namespace)), Isolation::Container);
        assert_eq!(Isolation::default_floor(Some(BackendKind::Gvisor)), Isolation::Container);
        assert_eq!(Isolation::default_floor(Some(BackendKind::Sim)), Isolation::None);
    }

    #[test]
    fn words_round_trip_and_an_unknown_one_lists_the_accepted() {
        for level in Isolation::ALL {
            assert_eq!(level.as_str().parse(), Ok(level));
        }
        for kind in BackendKind::ALL {
            assert_eq!(kind.as_str().parse(), Ok(kind));
        }
        let error = "docker".parse::<BackendKind>().expect_err("no such backend");
        assert_eq!(error.to_string(), "`docker` is not one of `sim`, `namespace`, `gvisor`");
    }
}
