//! The fabric layer over the provider `tcp` on this machine's loopback.
#![allow(clippy::print_stderr, reason = "a skipped test says so")]

mod connections;
mod memory;
mod pair;
