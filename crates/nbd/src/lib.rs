//! A server of the NBD protocol (network block device), which offers disks to clients over TCP and
//! UNIX sockets.
//!
//! The gateway accepts connections and calls [`serve_connection`] for each. A connection has two
//! phases. In the *negotiation*, the client chooses an [`Export`] by its name. In the *transmission*,
//! the client sends requests, which the server executes concurrently on the [`disk::Disk`] of the
//! export, within [`NbdLimits`]. Replies are in the order in which requests complete.
//!
//! The server speaks the fixed newstyle negotiation, structured replies and the metadata context
//! `base:allocation`. It has no TLS. Offsets and lengths of requests are multiples of
//! [`disk::BLOCK`]. Each change is durable before its reply, so a flush has nothing to do. The
//! protocol has no message about a new size: a client sees the size at the time of its negotiation.
//!
//! The client is not trusted. Each length that it announces is checked against a limit before the
//! server reserves memory. A client that violates the protocol loses its own connection only.
//!
//! Source: <https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md>, called *the NBD
//! protocol* here. The bytes of a connection pass through these files:
//!
//! - `option` decodes options, `negotiation` answers them, and `handshake` does the input and output.
//! - `request` decodes requests, `receive` reads them and their payloads, `reservation` limits their
//!   number and size, `execution` runs them on the disk, `reply` encodes their replies, `reply_queue`
//!   sends the replies, and `connection` drives these parts.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::disallowed_methods, clippy::disallowed_types))]

mod connection;
mod error;
mod execution;
mod export;
mod failure;
mod handshake;
mod limits;
mod negotiation;
mod option;
mod receive;
mod reply;
mod reply_queue;
mod request;
mod reservation;

pub use connection::serve_connection;
pub use error::{Error, NbdViolation};
pub use export::{Export, Exports};
pub use limits::NbdLimits;
