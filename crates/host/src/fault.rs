//! The fault points of the host agent beyond those of its backends.

use cloister_fault::FaultPoints;

/// In the order in which an agent's life passes them.
pub const POINTS: FaultPoints = FaultPoints::new(&[
    // A file of the host agent is written anew under another name.
    "host_before_file_rename",
    // What runs is adopted; the coordinator has not heard of it.
    "host_after_adoption",
    // The coordinator counts on this host; what it wants removed is here.
    "host_after_registration",
    // An epoch is on the disk and its effect has not begun.
    "host_after_epoch",
    // A sandbox runs, and no handle and no answer know of it.
    "host_after_create",
    // A sandbox has stopped, and the table has it.
    "host_after_stop",
    // A session is gone, and the table has it.
    "host_after_remove",
    // An exec runs and whoever asked for it has no answer.
    "host_after_exec_started",
    // The effect is complete and its answer is not sent.
    "host_before_answer",
    // A sandbox has ended by itself and the coordinator does not know.
    "host_before_event",
    // A byte stream is open and nothing was sent over it.
    "host_after_stream_opened",
]);
