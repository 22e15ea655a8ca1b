//! The fault points of the shim. Pid 1 has none: whoever kills it is a program inside, which the shim outlives.

use cloister_fault::FaultPoints;

/// In the order in which a sandbox's life passes them.
pub const POINTS: FaultPoints = FaultPoints::new(&[
    // The lock is held, nothing is built.
    "shim_after_lock",
    // A mount namespace of its own, nothing mounted in it.
    "shim_after_mount_namespace",
    // A loop device is attached and mounted.
    "shim_after_layer",
    // The root is complete, nobody is in it.
    "shim_after_root",
    // Pid 1 is cloned and has become the guest agent.
    "shim_after_pid_1",
    // The guest agent answered; the host agent cannot reach anybody.
    "shim_before_bind",
    // The socket is there, the line is not said.
    "shim_after_bind",
    // The line is said, nothing is accepted.
    "shim_after_report",
    // An exec's directory without its spec.
    "shim_after_exec_dir",
    // Its spec, and nobody asked to run it.
    "shim_after_exec_spec",
    // It runs; whoever asked for it has no answer.
    "shim_after_exec_started",
    // Some of its output is kept.
    "shim_after_output",
    // It has ended and no record says so.
    "shim_before_exit_record",
    // The record is there and nobody was told.
    "shim_after_exit_record",
    // A stop was asked for.
    "shim_after_stop_begun",
    // Pid 1 is dead and no file says why.
    "shim_after_pid_1_ended",
    // The file says why; whoever asked for the stop has no answer.
    "shim_after_exit_file",
    // Everybody was answered; nothing is left but the process.
    "shim_after_socket_removed",
    // A warm sandbox knows whose it is, and the host agent does not know that.
    "shim_after_claim",
]);
