//! The messages that Cloister's parts say to each other, generated from `proto/`.
//!
//! - [`guest`] needs no feature: frames between guest agent, shim and host agent. The static guest binary is
//!   built with this alone.
//! - `rpc` brings the app API ([`app`]), the host link ([`host`]) and the values they share ([`common`]) as
//!   messages and service traits, the conversions to and from `cloister-types`, and [`access`]: what each RPC
//!   asks of its caller.
//! - `client` adds the generated clients and [`connection`], what they speak through.
//!
//! Generated code is committed under `src/generated` and written by `cargo xtask gen` (see ADR 0003).

#[allow(
    clippy::all,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    unreachable_pub,
    reason = "generated code"
)]
mod guest_generated {
    include!("generated/guest/mod.rs");
}
pub use guest_generated::cloister::guest::v1 as guest;

#[cfg(feature = "rpc")]
pub mod access;
#[cfg(feature = "client")]
pub mod connection;
#[cfg(feature = "rpc")]
pub mod convert;
#[cfg(feature = "rpc")]
pub mod json;

#[cfg(feature = "rpc")]
#[allow(
    clippy::all,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    unreachable_pub,
    refining_impl_trait,
    reason = "generated code"
)]
mod rpc_generated {
    include!("generated/rpc/mod.rs");
}
#[cfg(feature = "rpc")]
pub use rpc_generated::cloister::{app::v1 as app, common::v1 as common, host::v1 as host};

/// The compiled `proto/` files with their comments, for gRPC server reflection.
#[cfg(feature = "rpc")]
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!("generated/rpc.descriptor.bin");
