//! Tests of a holder with real sockets: front ends on the one side, gateways on the other.

#![allow(clippy::print_stdout, reason = "a randomized test prints its seed")]

mod exactly_once;
mod front_ends;
mod gateways;
mod idle;
mod processes;
mod sockets;
mod support;
