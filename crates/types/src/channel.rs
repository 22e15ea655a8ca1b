//! What a channel into a sandbox leads to.

/// The end of a channel inside a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ChannelTarget {
    /// The files, as one of the sandbox's users sees them.
    Files {
        /// Name or number, as in an exec; `None` is the user that execs have by default.
        user: Option<String>,
    },
    /// A TCP port that a program listens on.
    Port(u16),
}
