//! Peers as they are: hostile ones over raw sockets, and processes that die.

mod crowd;
mod hostile;
mod life;
mod raw;
