//! The program inside a sandbox and the one beside it.

pub mod shim;
