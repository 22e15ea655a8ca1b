//! Component tests: a whole coordinator on a real PostgreSQL, real connections, and a scripted host agent that speaks
//! the real host link. What each file proves stands at its top.

mod access;
mod channels;
mod execs;
mod host;
mod hostile;
mod serving;
mod sessions;
mod support;
