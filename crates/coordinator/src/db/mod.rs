//! The store: the only authority on what sessions exist, and the only code that speaks SQL.
//!
//! [`Store`] exports operations, never a pool or a query: each is one transaction that leaves the tables in a state
//! that the rest of the program may meet after a crash. Callers hand in domain values and get domain values back.
//!
//! ```text
//!  api, app ──► Store operation ──► one transaction: state + event + audit row + op + NOTIFY
//!                                             │
//!  reconcilers ◄── Change (feed.rs) ◄─────────┘ LISTEN; a lost notice costs one fallback interval, never more
//! ```
//!
//! Invariants:
//! - A session's state changes only by what [`cloister_types::session::transition`] returns, in `transition.rs`.
//! - SQL takes time only from `cloister_now()`; leases, deadlines and expiry are decided there.
//! - Every mutable row has a `generation` that grows with each change.
//! - Claiming an operation bumps the session's `epoch`; an effect or a result with an older one is refused.
//! - Locks are taken in one order: idempotency key, host rows by id, session rows, op rows. So nothing deadlocks.
//! - Nobody is placed before an earlier queued session that waits for the same host (`admission.rs`).
//!
//! It does not retry: a caller sees [`StoreError::Unavailable`] and decides; reconcilers run again anyway.

mod admission;
mod audit;
mod create;
mod error;
mod event;
pub mod fault;
mod feed;
mod host;
mod idempotency;
mod identity;
mod op;
mod reconcile;
mod report;
mod request;
mod session;
mod store;
mod token;
mod transition;

pub use admission::{AdmissionPolicy, Refusal};
pub use audit::{AuditContext, AuditEntry, AuditPage, ExecTarget};
pub use create::{CreateSession, Created};
pub use error::StoreError;
pub use event::SessionEventRecord;
pub use feed::{Change, ChangeFeed, ChangeFeedRunner, ChangeReceiver};
pub use host::{HostCapacity, HostRecord, HostRegistration, RegisteredHost};
pub use idempotency::PayloadHash;
pub use identity::{Bootstrap, Principal};
pub use op::{ClaimedOp, LeaseHolder, OpKind, OpState};
pub use reconcile::{Admitted, DeadlinePassed, LostHost};
pub use report::{ReportCause, ReportOutcome, SandboxReport, StaleSandbox};
pub use request::{Requested, Resumed};
pub use session::{SessionFilter, SessionPage, SessionRecord};
pub use store::{Store, StoreConfig};
pub use token::{CreatedToken, TokenHash, TokenRecord};
pub use transition::{StartedFacts, TransitionParams};

#[cfg(test)]
mod tests;
