//! One file per noun or verb of the command line.

pub(crate) mod attach;
pub(crate) mod audit;
pub(crate) mod context;
pub(crate) mod coordinator;
pub(crate) mod cp;
pub(crate) mod doctor;
pub(crate) mod down;
pub(crate) mod exec;
pub(crate) mod host;
pub(crate) mod kill;
pub(crate) mod logs;
pub(crate) mod port_forward;
pub(crate) mod ps;
pub(crate) mod reference;
pub(crate) mod run;
pub(crate) mod session;
pub(crate) mod shell;
pub(crate) mod status;
pub(crate) mod token;
pub(crate) mod up;
pub(crate) mod version;
