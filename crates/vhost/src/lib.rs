//! A vhost-user back end that serves a disk as a virtio block device.
//!
//! A *front end*, such as QEMU, runs a virtual machine. It shares the memory of the virtual machine
//! with this process, and tells it by messages where the rings of the device are. The driver in the
//! guest then sends requests by the rings, without the front end.
//!
//! - [`message`] decodes messages, and encodes replies.
//! - [`VhostSession`] is the protocol with one front end, as a state machine without sockets. Its
//!   state can be stored outside of this process, which may be killed at any time.
//! - [`memory`] maps and accesses the memory of the guest.
//! - [`BlkDevice`] executes the requests of the rings on a [`disk::Disk`].
//! - [`direct`] serves a front end on a socket, for tests and simple set-ups.
//!
//! Rings are split virtqueues of virtio 1.2. Front ends and guests are not trusted: a defective one
//! costs its own device only. All `unsafe` code is in `memory::region`, and in `base::mem::guarded`,
//! which handles the loss of a front end's memory.

#![deny(unsafe_code)]

mod blk;
mod chain;
mod channel;
mod device;
pub mod direct;
mod inflight;
pub mod memory;
pub mod message;
mod ring;
mod session;
mod stop_point;

pub use chain::ChainError;
pub use device::{BlkDevice, DeviceOptions, VhostControl, VhostError, VhostMessage};
pub use ring::{RING_SIZE_MAX, RingError};
pub use session::{
    DeviceView, ProtocolError, QUEUES_MAX, RestoreError, SessionAnswer, SessionEffect, VhostSession,
};
