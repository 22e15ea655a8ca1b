//! The control plane: the public API, the session engine, and the store that both stand on.
//!
//! ```text
//!            HTTP: Connect, gRPC, gRPC-Web                        the host dials
//!  people ──► server ──► api ──► app ──► db ◄── reconcile ──► link ◄──────────── host agent
//!                                 └──────────────────────────► link
//! ```
//!
//! - [`server`]: the port and the socket. - [`api`]: messages. - [`app`]: who may do what, and the verbs.
//! - [`db`]: the store, the only authority on what sessions exist. - [`postgres`]: the private server of one machine.
//! - [`link`]: commands and byte streams to hosts. - [`reconcile`]: background work.
//! - [`error`]: what callers are told. - [`config`], [`metrics`].
//!
//! [`run`] puts them together. It is stateless beside the store: it can be killed at any point, and another one goes
//! on. It never runs a sandbox.

pub(crate) mod api;
pub mod app;
pub mod config;
pub mod db;
pub mod error;
pub mod link;
pub mod metrics;
pub mod postgres;
pub(crate) mod reconcile;
pub mod server;
#[cfg(any(test, debug_assertions))]
pub mod test_support;

mod run;
#[cfg(test)]
mod tests;

pub use config::{Config, Database};
pub use run::{CoordinatorError, Listening, run, run_with};
