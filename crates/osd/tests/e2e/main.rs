//! The OSD and its client as users see them: over TCP, on stores in memory that can be made to fail.

mod coding;
mod common;
mod compounds;
mod crash;
mod damage;
mod full;
mod hostile;
mod model;
mod network;
mod ops;
mod pending;
mod raw;
mod recovery;
mod redundancy;
mod retry;
mod sessions;
mod staging;
mod stalls;
mod start;
mod striping;
mod times;
