//! The messages and services of `proto/outboard/control/v1/control.proto`. The code is generated, and
//! checked in. The test `generated` checks that it is current, and writes it with `UPDATE_GENERATED=1`.

#![allow(missing_docs, clippy::all, clippy::pedantic)]

include!("generated/outboard.control.v1.rs");

/// The description of the services, for reflection.
pub(crate) const DESCRIPTORS: &[u8] = include_bytes!("generated/control.fds");
