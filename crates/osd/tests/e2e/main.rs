//! The OSD and its client as users see them, on stores in memory that can be made to fail. They talk over TCP, or over the
//! network that `OUTBOARD_TEST_NETWORK` names. Modules named `tcp_only` have the tests that are long and do not depend on the
//! network: runs over other networks skip them (`--skip tcp_only::`).

mod common;
mod engine;
mod hostile;
mod model;
mod network;
mod ops;
mod pending;
mod raw;
mod redundancy;
mod retry;
mod sessions;
mod staging;
mod striping;
mod tcp_only;
