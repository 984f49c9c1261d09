//! The control plane of a node: administration over gRPC.
//!
//! [`ControlServer`] serves the calls of `proto/outboard/control/v1/control.proto`, on a thread of its
//! own in the process of the osd. It knows nothing of pools and targets: it passes each call as an
//! [`AdminRequest`](wire::AdminRequest) to an [`Administrator`], which the osd implements.
//! [`ControlClient`] makes the calls. Both ends prove their keys in the TLS handshake.
//!
//! If the control plane is down, clients still read and write.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::disallowed_methods, clippy::disallowed_types))]

mod calls;
mod client;
pub mod proto;
mod refusal;
mod server;
mod services;

pub use client::{ControlClient, ControlError};
pub use server::{Administrator, ControlListener, ControlServer};
