//! The program inside a sandbox and the one beside it.
//!
//! One static binary has two modes. [`agent`] is pid 1 inside: it starts programs, streams what they print and reaps
//! them. [`shim`] runs beside the sandbox on the host: it builds the sandbox ([`build`]), starts pid 1, keeps every
//! exec's output in a [`spool`], writes how things ended, and serves a socket that outlives the host agent.
//!
//! ```text
//! host agent ──client──► shim ──one connection an exec──► agent ──pipes──► program
//!                         │
//!                         └──► spool (files)
//! ```
//!
//! What both ends share is here as a library: [`frames`] puts messages on a socket, [`convert`] checks what they
//! mean, [`client`] asks a shim, [`channel`] dials the agent for bytes, and [`files`] is what both ends of a copy do. Both programs are single-threaded, and neither keeps more of what a program prints
//! than one frame: a peer that does not read stops the program.

pub mod agent;
pub mod build;
pub mod channel;
pub mod client;
mod connection;
pub mod convert;
mod etc;
pub mod fault;
pub mod files;
pub mod frames;
pub mod harden;
pub mod shim;
pub mod spool;
