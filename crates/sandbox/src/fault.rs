//! The fault points of the `namespace` backend: the process that dies is the host agent.

use cloister_fault::FaultPoints;

/// In the order in which a sandbox's life passes them.
pub const POINTS: FaultPoints = FaultPoints::new(&[
    // A session's directory without its record.
    "sandbox_after_session_dir",
    // A session's record without a sandbox.
    "sandbox_after_session_record",
    // A sandbox's directory without its intent.
    "sandbox_after_sandbox_dir",
    // An intent and nothing of what it names.
    "sandbox_after_intent",
    // Some of the groups.
    "sandbox_between_cgroups",
    // All groups, no layer.
    "sandbox_after_cgroups",
    // A template of a new size under another name.
    "sandbox_before_template_rename",
    // Half a layer under another name.
    "sandbox_before_layer_rename",
    // A layer that nobody mounts.
    "sandbox_after_layer",
    // A shim's configuration and no shim.
    "sandbox_after_shim_config",
    // A shim that builds.
    "sandbox_after_spawn",
    // A sandbox that runs, known to nobody but its shim.
    "sandbox_after_report",
    // The sandbox has ended as it was asked to; everything of it but its processes is there.
    "sandbox_after_stop_answer",
    // Its processes are gone.
    "sandbox_after_kill",
    // Its groups too.
    "sandbox_after_groups_removed",
    // Its layer is detached and its execs have no exit.
    "sandbox_after_detach",
    // They have one.
    "sandbox_after_seal",
    // Its socket is gone.
    "sandbox_after_socket_removed",
    // A directory under the name of the dead, with everything in it.
    "sandbox_after_tombstone",
    // Nothing is left but the session's layer and output.
    "sandbox_after_sandbox_removed",
    // The session is gone too.
    "sandbox_after_session_removed",
    // A warm sandbox's session is written down, below the warm ones still.
    "warm_after_record",
    // Its intent names the session too.
    "warm_after_intent",
    // The session has its layer, and the sandbox is below the warm ones.
    "warm_after_session_rename",
    // The directories are the session's, and the shim does not know.
    "warm_after_sandbox_rename",
    // The shim knows, and nobody was told.
    "warm_after_claim",
    // One of several sandboxes that an earlier host agent left is taken over.
    "sandbox_during_adoption",
]);
