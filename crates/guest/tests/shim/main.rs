//! The real shim and the real guest agent, as processes, without a sandbox around them: everything that does not
//! depend on isolation. The sandbox itself is tested by the `sandbox` crate.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    unreachable_pub,
    reason = "a test states what it expects, and is no library"
)]

mod execs;
mod hostile;
mod lifecycle;
mod peer;
mod streams;
