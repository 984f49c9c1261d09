//! [`LinkEndpoint`]: the operations that a link needs from the endpoint below it.

use std::sync::Arc;

use base::mem::{Arena, ArenaBuf};
use bytes::Bytes;
use fabric::{ExposedMemory, GatherBytes, MemoryRegion, PeerBuffer, PostError, RemoteRegion};

use super::reads::LandingBuffer;
use super::{Buffers, Landings, Link, Registration};
use crate::transport::ofi::OfiEndpoint;
use crate::transport::sim::SimEndpoint;

/// An endpoint that is connected to a peer. The functions that post an operation return `None` if
/// the endpoint is closed.
#[expect(clippy::large_enum_variant, reason = "a box would cost an indirection per operation of libfabric")]
pub(crate) enum LinkEndpoint {
    Ofi(OfiEndpoint),
    Sim(SimEndpoint),
}

/// The result of posting an operation.
pub(super) type Posted = Option<Result<(), PostError>>;

/// A range of a peer's region.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RemoteRange {
    pub(crate) region: RemoteRegion,
    pub(crate) offset: usize,
    pub(crate) len: usize,
}

/// Calls the same function of either kind of endpoint.
macro_rules! either {
    ($self:expr, $endpoint:ident => $call:expr) => {
        match $self {
            LinkEndpoint::Ofi($endpoint) => $call,
            LinkEndpoint::Sim($endpoint) => $call,
        }
    };
}

impl LinkEndpoint {
    /// Number of the endpoint, which its completions carry.
    pub(in crate::transport) fn id(&self) -> u64 {
        either!(self, endpoint => endpoint.id())
    }

    /// Name of the provider.
    pub(super) fn provider(&self) -> &str {
        either!(self, endpoint => endpoint.provider())
    }

    /// Memory for packets.
    pub(super) fn buffers(&self) -> &Buffers {
        either!(self, endpoint => endpoint.buffers())
    }

    /// Memory that peers write to.
    pub(super) fn landings(&self) -> &Landings {
        either!(self, endpoint => endpoint.landings())
    }

    /// Maximum length of a packet that needs no registered memory, in bytes.
    pub(super) fn inject_max(&self) -> usize {
        either!(self, endpoint => endpoint.inject_max())
    }

    /// Maximum number of memory areas of a packet.
    pub(super) fn parts_max(&self) -> usize {
        either!(self, endpoint => endpoint.parts_max())
    }

    /// Records the link to which the endpoint's completions belong. Packets from the peer carry
    /// `own_token`.
    pub(super) fn enter(&self, own_token: u64, link: &Arc<Link>) {
        either!(self, endpoint => endpoint.enter(own_token, link));
    }

    /// Records that the link has ended, while the peer could still send `outstanding` packets.
    pub(super) fn leave(&self, own_token: u64, outstanding: u32) {
        either!(self, endpoint => endpoint.leave(own_token, outstanding));
    }

    /// Closes the endpoint. When this returns, the endpoint no longer accesses memory of this side.
    /// Returns `false` if the endpoint was closed before.
    pub(super) fn close(&self) -> bool {
        either!(self, endpoint => endpoint.close())
    }

    /// Whether `more` additional receive buffers may be posted.
    pub(super) fn may_grow(&self, more: u32) -> bool {
        either!(self, endpoint => endpoint.may_grow(more))
    }

    /// Records that `link` owes its peer credits. [`Link::grant`] is called soon.
    pub(super) fn is_due(&self, link: &Arc<Link>) {
        either!(self, endpoint => endpoint.is_due(link));
    }

    /// Posts a buffer for one packet.
    pub(in crate::transport) fn post_receive(&self, buf: ArenaBuf) -> Result<(), String> {
        either!(self, endpoint => endpoint.post_receive(buf))
    }

    /// Sends a copy of a short packet.
    pub(super) fn inject(&self, packet: &[u8]) -> Posted {
        either!(self, endpoint => endpoint.inject(packet))
    }

    /// Sends a packet. If the operation is posted, it takes the parts. `notify` requests a
    /// completion.
    pub(super) fn send_parts(&self, parts: &mut Vec<GatherBytes>, notify: bool) -> Posted {
        either!(self, endpoint => endpoint.send_parts(parts, notify))
    }

    /// Writes to memory of the peer. The data arrives before any packet that is sent later. If the
    /// operation is posted, it takes the parts. `notify` requests a completion.
    pub(super) fn write_parts(&self, parts: &mut Vec<GatherBytes>, to: RemoteRange, notify: bool) -> Posted {
        either!(self, endpoint => endpoint.write_parts(parts, to, notify))
    }

    /// Reads memory of the peer into `landing`, from its byte `at` on. The completion carries
    /// `token`.
    pub(super) fn read(&self, landing: &LandingBuffer, at: usize, from: RemoteRange, token: u64) -> Posted {
        either!(self, endpoint => endpoint.read(landing, at, from, token))
    }

    /// The registration of an arena of packets, if the endpoint needs one for sending.
    pub(super) fn packet_region(&self, arena: &Arc<Arena>) -> Result<Option<MemoryRegion>, String> {
        either!(self, endpoint => endpoint.packet_region(arena))
    }

    /// The registration of the memory of `bytes`, for sending. `Ok(None)` if the endpoint needs
    /// none.
    ///
    /// # Errors
    /// If the memory cannot be registered.
    pub(super) fn region_of(&self, bytes: &Bytes) -> Result<Option<MemoryRegion>, NotRegistered> {
        either!(self, endpoint => endpoint.region_of(bytes))
    }

    /// Registers a buffer as a destination of this side's reads.
    pub(super) fn land(&self, buf: &PeerBuffer, arena: &Arc<Arena>) -> Result<Registration, String> {
        either!(self, endpoint => endpoint.land(buf, arena))
    }

    /// Exposes memory to the peer: bytes for reading, or a buffer for writing.
    pub(super) fn expose(&self, memory: ExposedMemory) -> Result<Registration, String> {
        either!(self, endpoint => endpoint.expose(memory))
    }

    /// Amount of memory that is kept because a peer might still use it, in bytes.
    pub(super) fn quarantined_bytes(&self) -> usize {
        either!(self, endpoint => endpoint.quarantined_bytes())
    }
}

/// Error: the bytes are in memory that cannot be registered.
pub(crate) struct NotRegistered;
