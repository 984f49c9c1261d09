//! The holder: a small process that keeps the connections of front ends, so that the gateway can be
//! killed and restarted under a running guest.
//!
//! A *front end* is a program that uses a device of the gateway over a UNIX socket, such as QEMU over
//! vhost-user. The holder owns these sockets. It cuts the byte stream of a front end into messages,
//! whose meaning only the gateway knows. For each connection of a front end, the holder keeps a *state*
//! (bytes), descriptors under keys, and the oldest message that the gateway has not answered (the
//! *pending message*).
//!
//! ```text
//!  front end            holder                          gateway
//!     │ connect ──────────▶│ connection 7                  │
//!     │                    │ Connected 7 ─────────────────▶│
//!     │ message, fds ─────▶│ Message 7/1, fds ────────────▶│
//!     │                    │                               X  killed
//!     │                    │◀──────────────────── Hello ───│  restarted
//!     │                    │ Device: 7, state, kept fds ──▶│
//!     │                    │ InventoryComplete ───────────▶│
//!     │                    │ Message 7/1, fds ────────────▶│  the same message again
//!     │                    │◀── Done 7/1: state, fds, reply│
//!     │                    │ apply all at once             │
//!     │◀───────────── reply│ Answer ──────────────────────▶│
//!     │ disconnect ───────▶│ drop state, fds, messages     │
//!     │                    │ Disconnected 7 ──────────────▶│
//! ```
//!
//! Each message takes effect exactly once: the answer of the gateway changes state and descriptors, and
//! sends the reply, in one step. A gateway that is killed before has changed nothing, and its successor
//! gets the same message. Effects outside the holder must therefore be idempotent. While no gateway is
//! connected, front ends wait, and nothing is lost.
//!
//! The holder trusts no front end. A front end that violates the framing, stalls, or floods the holder
//! costs only its own device: each device has limits for messages, state and descriptors, and reserves
//! its descriptors. One gateway is connected at a time; a newer one replaces it. Gateway and holder run
//! as the same user.
//!
//! Limitations: if the holder dies, all front ends are disconnected (QEMU connects again with
//! `reconnect=`), and the gateway adds its devices to a new holder. A descriptor of a front end whose
//! `close` blocks, such as a file of a hostile FUSE file system, blocks the holder.
//!
//! The role `holder` calls [`Holder::run`]. The gateway uses [`HolderClient`].

#![forbid(unsafe_code)]

mod client;
mod device;
mod devices;
mod error;
mod framing;
mod front_end;
#[doc(hidden)]
pub mod fuzz;
mod gateway;
mod held_device;
mod holder;
mod link;
mod protocol;
mod socket;
mod socket_file;

pub use client::{
    Deposit, Done, FrontEndReply, HeldConnection, HeldMessage, HolderAnswer, HolderClient, HolderEvent,
    HolderEvents, InventoryDevice,
};
pub use error::{ClientError, HolderError, HolderRefusal, SocketFileError};
pub use framing::{Framing, FramingError, HEADER_BYTES_MAX, MESSAGE_BYTES_MAX, MESSAGE_FDS_MAX};
pub use holder::{Holder, HolderConfig, HolderLimits, Stopped};
pub use protocol::{
    CALL_FDS_MAX, CALLS_MAX, DEVICE_NAME_BYTES_MAX, DROP_KEYS_MAX, OUTBOX_MAX, PATH_BYTES_MAX,
    REPLY_BYTES_MAX, STATE_BYTES_MAX, SharedFd, Versions,
};
