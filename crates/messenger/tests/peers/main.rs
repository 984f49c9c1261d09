//! Tests with badly behaved peers: hostile peers over raw sockets, and processes that are killed.

#[path = "../support/begin.rs"]
mod begin;
mod crowd;
mod hostile;
mod life;
mod middle;
mod raw;
