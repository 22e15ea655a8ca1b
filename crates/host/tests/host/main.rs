//! A real host agent between a coordinator that serves the real host link on a port, and a backend in memory.

#![expect(clippy::unwrap_used, reason = "a test says what it expects by unwrapping it")]

mod link;
mod real;
mod stream;
mod support;
