//! One sandbox's life on a host: made, used, found again after a crash, and taken down without a trace.
//!
//! ```text
//!  host agent ──► Backend::create ──► Sandbox::start_exec, read_output, … ──► Sandbox::stop
//!                     │                       │                                   │
//!   intent.json ◄─────┤                       └── shim's socket (guest::client)    ├─► cgroups, loop device,
//!   cgroup, disk ◄────┤                                                           │   directories: gone
//!   shim (a process) ◄┘                                                           └─► session's layer and output: kept
//! ```
//!
//! [`Backend`] is the contract. [`local`] keeps it on this machine, behind namespaces or on gVisor, [`sim`] in memory; one suite
//! ([`conformance`], in builds with debug assertions) says what both must do. The parts below a backend stand for themselves:
//! [`cgroup`] limits, [`disk`] layers, [`id_range`] users, [`intent`] what is written down before anything is taken,
//! [`layout`] where it lies, [`guest_binary`] the static program that this crate carries.
//!
//! This crate knows nothing of the coordinator, of epochs or of networks. It never falls back to less isolation than was
//! asked for: what a machine cannot do is an error with the step that failed.

pub mod backend;
pub mod cgroup;
#[cfg(any(test, debug_assertions))]
pub mod conformance;
pub mod disk;
pub mod fault;
pub mod guest_binary;
pub mod id_range;
pub mod intent;
pub mod layout;
pub mod local;
pub mod sim;

pub use backend::{
    Backend, Created, Gone, HostPaths, OutputReader, Sandbox, SandboxError, SandboxSpec, StepTiming,
};
