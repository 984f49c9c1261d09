//! [`RecordLayer`]: the place where a connection protects what it sends over one transport.
//!
//! Encryption of data in transit will be a record layer: with keys that derive from the key of the
//! handshake, new ones for each transport, because a connection may use several in turn. It belongs
//! between the frames and the transport, so that no other part of the connection knows of it. Until
//! then, the only record layer is [`PlainRecords`].

use std::fmt;

use identity::ProofKey;

use crate::transport::Road;

/// Protects the bytes of a connection on each of its transports.
pub trait RecordLayer: Send + Sync + fmt::Debug {
    /// Returns the road over which the connection sends and receives its frames from now on, after the
    /// handshake on this transport. Only the two sides of the connection have `key`.
    fn protect(&self, road: Road, key: &ProofKey) -> Road;
}

/// Sends frames as they are.
#[derive(Debug, Clone, Copy, Default)]
pub struct PlainRecords;

impl RecordLayer for PlainRecords {
    fn protect(&self, road: Road, _: &ProofKey) -> Road {
        road
    }
}
