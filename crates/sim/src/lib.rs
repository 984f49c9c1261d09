//! A whole node in one process, on one thread, from one seed.
//!
//! The simulator runs clients, the osd, the store, the channel and the drives of a node with
//! simulated time, network and drives. A seed determines the requests, the faults and their times,
//! so a failure can be repeated exactly.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::disallowed_methods, clippy::disallowed_types))]

pub mod coverage;
pub mod history;
pub mod identities;
pub mod memory;
pub mod node;
pub mod output;
pub mod plan;
pub mod role;
pub mod simulation;
pub mod trace;
mod witness;
pub mod workload;
