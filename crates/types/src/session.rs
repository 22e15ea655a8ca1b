//! The life of a session: its states, what may happen to it, and what follows.
//!
//! ```text
//!             ┌──────── queued ◄────────────┐ no room
//!  create ──► pending ──► starting ──► active ──► pausing ──► paused ──► resuming ──► active
//!                 │           │          │                       ▲           │
//!                 ▼           ▼          ├─► host_lost ──────────┤           ▼
//!              failed      failed        │        └─► resuming   └──── no room, failed start
//!                                        └─► paused (the sandbox is gone, its layer is kept)
//!
//!  every state but deleted ──► deleting ──► deleted
//! ```
//!
//! [`transition`] is the whole rule: pure, total over (state, event), without a wildcard arm on states. The store
//! commits what it returns; nothing else changes a state. The table in `docs/reference/session-states.md` is
//! generated from it.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::isolation::UnknownWord;

macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $word:literal,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub enum $name { $($(#[$variant_doc])* $variant,)* }

        impl $name {
            /// Every value, in the order of the definition.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// Returns the word used in the store, in messages and on the command line.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $word,)* }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl FromStr for $name {
            type Err = UnknownWord;

            fn from_str(text: &str) -> Result<Self, UnknownWord> {
                Self::ALL
                    .iter()
                    .copied()
                    .find(|value| value.as_str() == text)
                    .ok_or_else(|| UnknownWord::new(text, Self::ALL.iter().map(|value| value.as_str())))
            }
        }
    };
}

words! {
    /// Where a session stands.
    SessionState {
        /// Accepted, not placed yet.
        Pending = "pending",
        /// No host has room; placed as soon as one has, first in first out.
        Queued = "queued",
        /// A host makes its sandbox.
        Starting = "starting",
        /// Its sandbox runs.
        Active = "active",
        /// Its sandbox is being stopped; the layer stays.
        Pausing = "pausing",
        /// No sandbox; the writable layer is kept on its host.
        Paused = "paused",
        /// Its host makes a sandbox on the kept layer.
        Resuming = "resuming",
        /// Its host does not answer; whether the sandbox runs is not known.
        HostLost = "host_lost",
        /// It never ran and will not.
        Failed = "failed",
        /// Everything of it is being removed.
        Deleting = "deleting",
        /// Gone.
        Deleted = "deleted",
    }
}

words! {
    /// Why a session is in the state it is in.
    Reason {
        /// As asked by a caller.
        Requested = "requested",
        /// No host has room for it now.
        NoCapacity = "no_capacity",
        /// No connected host can do what it asks for.
        NoHost = "no_host",
        /// The host could not make the sandbox.
        StartFailed = "start_failed",
        /// The step took longer than its deadline.
        DeadlineExceeded = "deadline_exceeded",
        /// The sandbox was killed for its memory.
        OutOfMemory = "out_of_memory",
        /// The sandbox ended by itself or was killed.
        SandboxGone = "sandbox_gone",
        /// The host agent came back without the sandbox.
        HostRestarted = "host_restarted",
        /// The host's machine was started again.
        HostRebooted = "host_rebooted",
        /// The host missed its heartbeats.
        HostUnreachable = "host_unreachable",
        /// Its time to live ran out.
        Expired = "expired",
        /// Its host was shut down.
        HostStopped = "host_stopped",
        /// Its kept files are no longer on its host.
        LayerMissing = "layer_missing",
        /// The host's disk did not take what was written to its layer.
        DiskError = "disk_error",
    }
}

words! {
    /// What can happen to a session.
    SessionEvent {
        /// A host has room: its sandbox is to be made there.
        Place = "place",
        /// No host has room.
        Enqueue = "enqueue",
        /// The host made the sandbox.
        Started = "started",
        /// The host could not make the sandbox, and trying again would not help.
        StartFailed = "start_failed",
        /// Somebody asked for a pause.
        Pause = "pause",
        /// The host stopped the sandbox and kept the layer.
        PauseDone = "pause_done",
        /// Somebody asked to go on.
        Resume = "resume",
        /// The sandbox ended without being asked to; its layer is kept.
        SandboxGone = "sandbox_gone",
        /// The host stopped answering.
        HostLost = "host_lost",
        /// The host answers again, and the sandbox still runs on it.
        HostFound = "host_found",
        /// The step's deadline has passed; of a pause only while its host answers, else [`Self::HostLost`].
        DeadlinePassed = "deadline_passed",
        /// Somebody asked for deletion, or its time to live ran out.
        Delete = "delete",
        /// The host removed everything.
        Removed = "removed",
    }
}

/// What the store has to do together with a change of state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Write an operation that makes the sandbox.
    StartOp,
    /// Write an operation that stops the sandbox.
    PauseOp,
    /// Write an operation that removes everything; it supersedes a running one.
    DeleteOp,
    /// Give the host's capacity back and look at the queue.
    ReleaseCapacity,
    /// Write that the running operation has ended.
    FinishOp,
}

/// A change of state and what comes with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transition {
    /// The state after the event.
    pub state: SessionState,
    /// To be done in the same transaction.
    pub actions: &'static [Action],
}

/// An event that cannot happen in a state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a session that is `{state}` cannot take `{event}`")]
pub struct IllegalTransition {
    /// The state it was in.
    pub state: SessionState,
    /// What was tried.
    pub event: SessionEvent,
}

impl SessionState {
    /// States that nothing leaves.
    pub const TERMINAL: &'static [Self] = &[Self::Deleted];

    /// States in which the session's limits count against its host.
    pub const HOLDS_HOST_CAPACITY: &'static [Self] =
        &[Self::Starting, Self::Active, Self::Pausing, Self::Resuming, Self::HostLost];

    /// States that wait for somebody; each has a [`deadline`](Self::deadline).
    pub const TRANSITIONAL: &'static [Self] =
        &[Self::Pending, Self::Starting, Self::Pausing, Self::Resuming, Self::Deleting];

    /// Returns whether the session's limits count against its host.
    pub fn holds_host_capacity(self) -> bool {
        Self::HOLDS_HOST_CAPACITY.contains(&self)
    }

    /// Returns how long a session may stay in a transitional state before [`SessionEvent::DeadlinePassed`];
    /// `None` for a state that may last.
    pub fn deadline(self) -> Option<Duration> {
        match self {
            Self::Pending => Some(Duration::from_secs(10)),
            Self::Starting | Self::Resuming => Some(Duration::from_secs(60)),
            // A deletion never gives up, nor a pause while its host answers: the deadline starts them over.
            Self::Pausing | Self::Deleting => Some(Duration::from_secs(60)),
            Self::Queued | Self::Active | Self::Paused | Self::HostLost | Self::Failed | Self::Deleted => {
                None
            }
        }
    }
}

/// Returns what `event` makes of a session that is in `state`.
///
/// # Errors
///
/// [`IllegalTransition`]: nothing changes; a caller's request is refused with it, a late report is dropped.
pub fn transition(state: SessionState, event: SessionEvent) -> Result<Transition, IllegalTransition> {
    use Action::{DeleteOp, FinishOp, PauseOp, ReleaseCapacity, StartOp};
    use SessionEvent as E;
    use SessionState as S;

    let to = |state, actions| Ok(Transition { state, actions });
    let illegal = Err(IllegalTransition { state, event });
    match event {
        E::Place => match state {
            S::Pending | S::Queued => to(S::Starting, &[StartOp]),
            S::Starting | S::Active | S::Pausing | S::Paused | S::Resuming | S::HostLost => illegal,
            S::Failed | S::Deleting | S::Deleted => illegal,
        },
        E::Enqueue => match state {
            S::Pending => to(S::Queued, &[]),
            S::Queued | S::Starting | S::Active | S::Pausing | S::Paused | S::Resuming | S::HostLost => {
                illegal
            }
            S::Failed | S::Deleting | S::Deleted => illegal,
        },
        E::Started => match state {
            S::Starting | S::Resuming => to(S::Active, &[FinishOp]),
            S::Pending | S::Queued | S::Active | S::Pausing | S::Paused | S::HostLost => illegal,
            S::Failed | S::Deleting | S::Deleted => illegal,
        },
        E::StartFailed => match state {
            S::Starting => to(S::Failed, &[FinishOp, ReleaseCapacity]),
            S::Resuming => to(S::Paused, &[FinishOp, ReleaseCapacity]),
            S::Pending | S::Queued | S::Active | S::Pausing | S::Paused | S::HostLost => illegal,
            S::Failed | S::Deleting | S::Deleted => illegal,
        },
        E::Pause => match state {
            S::Active => to(S::Pausing, &[PauseOp]),
            S::Pending | S::Queued | S::Starting | S::Pausing | S::Paused | S::Resuming => illegal,
            S::HostLost | S::Failed | S::Deleting | S::Deleted => illegal,
        },
        E::PauseDone => match state {
            S::Pausing => to(S::Paused, &[FinishOp, ReleaseCapacity]),
            S::Pending | S::Queued | S::Starting | S::Active | S::Paused | S::Resuming => illegal,
            S::HostLost | S::Failed | S::Deleting | S::Deleted => illegal,
        },
        E::Resume => match state {
            S::Paused => to(S::Resuming, &[StartOp]),
            S::Pending | S::Queued | S::Starting | S::Active | S::Pausing | S::Resuming => illegal,
            S::HostLost | S::Failed | S::Deleting | S::Deleted => illegal,
        },
        E::SandboxGone => match state {
            S::Active | S::HostLost => to(S::Paused, &[ReleaseCapacity]),
            // The stop that was asked for found nothing left to stop.
            S::Pausing => to(S::Paused, &[FinishOp, ReleaseCapacity]),
            S::Pending | S::Queued | S::Starting | S::Paused | S::Resuming => illegal,
            S::Failed | S::Deleting | S::Deleted => illegal,
        },
        E::HostLost => match state {
            S::Active => to(S::HostLost, &[]),
            // Only when its deadline has passed as well: the host's next report says whether the sandbox stopped.
            S::Pausing => to(S::HostLost, &[FinishOp]),
            // Operations in progress are retried until their deadline decides.
            S::Pending | S::Queued | S::Starting | S::Paused | S::Resuming => illegal,
            S::HostLost | S::Failed | S::Deleting | S::Deleted => illegal,
        },
        E::HostFound => match state {
            S::HostLost => to(S::Active, &[]),
            S::Pending | S::Queued | S::Starting | S::Active | S::Pausing | S::Paused => illegal,
            S::Resuming | S::Failed | S::Deleting | S::Deleted => illegal,
        },
        E::DeadlinePassed => match state {
            S::Pending => to(S::Queued, &[]),
            S::Starting => to(S::Failed, &[FinishOp, ReleaseCapacity]),
            S::Resuming => to(S::Paused, &[FinishOp, ReleaseCapacity]),
            // Its host answers, so what the host says of the stop decides: it is asked again. Giving up would leave a
            // sandbox of which nobody knows whether it runs.
            S::Pausing => to(S::Pausing, &[PauseOp]),
            S::Deleting => to(S::Deleting, &[DeleteOp]),
            S::Queued | S::Active | S::Paused | S::HostLost | S::Failed | S::Deleted => illegal,
        },
        E::Delete => match state {
            S::Starting | S::Active | S::Pausing | S::Resuming | S::HostLost => {
                to(S::Deleting, &[DeleteOp, ReleaseCapacity])
            }
            S::Pending | S::Queued | S::Paused | S::Failed => to(S::Deleting, &[DeleteOp]),
            S::Deleting => to(S::Deleting, &[]),
            S::Deleted => to(S::Deleted, &[]),
        },
        E::Removed => match state {
            S::Deleting => to(S::Deleted, &[FinishOp]),
            S::Pending | S::Queued | S::Starting | S::Active | S::Pausing | S::Paused | S::Resuming => {
                illegal
            }
            S::HostLost | S::Failed | S::Deleted => illegal,
        },
    }
}
