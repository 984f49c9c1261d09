//! Messages and bulk transfers between two processes, over interchangeable network stacks.
//!
//! A [`NetworkStack`] makes [`Connection`]s. A connection carries ordered messages both ways, exactly once within its
//! session even when the transport below breaks and is made anew, and moves *bulk* data: one side offers memory as a
//! [`BulkDescriptor`] inside a message, and the **receiver of the descriptor** drives the transfer (pulls from it or
//! pushes into it), so flow control stays with the server and heartbeats never wait behind data.
//!
//! The messenger knows nothing of objects. What the header of a message means is its users' business.

#![forbid(unsafe_code)]

mod api;

pub use api::{
    BulkDescriptor, BulkDirection, BulkOwner, BulkRegion, BulkSegment, BulkSink, BulkSource, ConnectOptions,
    Connection, Event, Incoming, Limits, Listener, MemoryKind, Message, MessengerError, NetworkStack,
    PeerInfo, Pulled, Result,
};
