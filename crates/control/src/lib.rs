//! The control plane of a node: administration over gRPC.
//!
//! [`ControlServer`] serves the calls of `proto/outboard/control/v1/control.proto`, on a thread of its
//! own in the process of the osd. It knows nothing of pools and targets: it passes each call as an
//! [`AdminRequest`](wire::AdminRequest) to an [`Administrator`], which the osd implements.
//! [`ControlClient`] makes the calls. Both ends prove their keys in the TLS handshake.
//!
//! A [`GatewayRegistry`] passes requests about disks from the osd to the gateways that are connected to the
//! control plane. A gateway receives them as [`GatewayOrders`].
//!
//! If the control plane is down, clients still read and write.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::disallowed_methods, clippy::disallowed_types))]

mod calls;
mod client;
mod disk_services;
mod disks;
mod gateway_orders;
mod gateways;
pub mod proto;
mod refusal;
mod server;
mod services;

pub use client::{ControlClient, ControlError};
pub use gateway_orders::{GatewayAnswers, GatewayOrders};
pub use gateways::GatewayRegistry;
pub use server::{Administrator, ControlListener, ControlServer};
