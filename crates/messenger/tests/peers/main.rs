//! Tests with badly behaved peers: hostile peers over raw sockets, and processes that are killed.

mod crowd;
mod hostile;
mod life;
mod raw;
