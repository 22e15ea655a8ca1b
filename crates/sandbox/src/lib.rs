//! One sandbox's life on a host.

pub mod backend;

pub use backend::{Backend, Created, Gone, OutputReader, Sandbox, SandboxError, SandboxSpec, StepTiming};
