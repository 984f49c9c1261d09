//! The gateway: serves front ends, such as vhost-user and NBD, on disks of a node.
//!
//! A [`Gateway`] executes the requests of operators about disks, which the control plane passes to it. An
//! attached disk has an exclusive session of its own, and one front end. The list of attachments is in a
//! file, so that the gateway attaches its disks again when it starts.
//!
//! ```text
//!   guest ── vhost-user ──▶ holder ──┐
//!                                    ├──▶ gateway ── sessions on shared connections ──▶ osd
//!   client ──────── NBD ─────────────┘
//! ```
//!
//! The [holder](holder) keeps the connections of vhost-user front ends while the gateway restarts.

#![forbid(unsafe_code)]

mod attachments;
mod front_end;
mod gateway;
mod nbd_server;
mod orders;
mod vhost_devices;

pub use attachments::{AttachmentFile, DiskAttachment};
pub use gateway::{Gateway, GatewayConfig, GatewayError};
