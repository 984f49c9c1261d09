//! The fabric layer over a provider, on one machine: `tcp` on the loopback unless the environment says otherwise, e.g.
//! `OUTBOARD_TEST_FABRIC=verbs@192.0.2.1` with an address of a network device that has RDMA.
#![allow(clippy::print_stderr, reason = "a skipped test says so")]

mod connections;
mod memory;
mod pair;
mod parts;
