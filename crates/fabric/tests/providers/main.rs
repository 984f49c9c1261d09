//! Tests of the fabric layer over one provider, on one machine. The default is `tcp` over the
//! loopback interface. The environment can choose another provider, for example
//! `OUTBOARD_TEST_FABRIC=verbs@192.0.2.1` with the address of a network device that supports RDMA.
#![allow(clippy::print_stderr, reason = "tests print details of the provider")]

mod connections;
mod memory;
mod pair;
mod parts;
