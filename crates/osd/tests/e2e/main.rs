//! End-to-end tests of the osd and its client, on stores in memory that can be made to fail. Client
//! and osd communicate over TCP, or over the network that `OUTBOARD_TEST_NETWORK` names. Modules
//! named `tcp_only` contain long tests that do not depend on the network. Runs over other networks
//! skip these tests (`--skip tcp_only::`).

mod attacks;
mod common;
mod engine;
mod fencing;
mod hostile;
mod model;
mod network;
mod ops;
mod pending;
mod raw;
mod redundancy;
mod renewal;
mod retry;
mod rights;
mod sessions;
mod staging;
mod strands;
mod striping;
mod tcp_only;
