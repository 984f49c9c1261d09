//! Packets and one-sided transfers between two connected endpoints, whose kind may differ:
//! libfabric ([`super::ofi`]), or simulated ([`super::sim`]).
//!
//! A [`Link`] is one connection of this kind. It implements what both kinds share: credits, the
//! assembly of packets, reads in progress and exposed memory. A [`LinkEndpoint`] below the link
//! posts single operations and reports their completions.
//!
//! **Credits.** A side sends a packet only if the peer has posted a buffer for it. Every packet
//! grants further credits. The last credit is reserved for packets that only grant credits, so the
//! two sides never deadlock.

mod buffers;
mod endpoint;
mod landings;
mod link;
pub(crate) mod packet;
mod reads;
mod registration;
mod rma;

pub(super) use buffers::Buffers;
pub(crate) use endpoint::{LinkEndpoint, NotRegistered, RemoteRange};
pub(super) use landings::Landings;
pub use link::Link;
pub(crate) use link::{LinkFailed, PacketContent};
pub(crate) use reads::LandingBuffer;
pub(crate) use registration::Registration;
