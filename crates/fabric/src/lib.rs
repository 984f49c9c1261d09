//! A safe interface to libfabric, for connections with access to the peer's memory. On machines
//! with RDMA hardware, the peer's processor takes no part in the access. Other machines use TCP.
//!
//! The library `libfabric.so.1` is opened at run time ([`Library::load`]). Building therefore needs
//! no headers, and a machine without the library has no RDMA. The crate wraps only the functions
//! that Outboard uses. Its endpoints ([`Endpoint`], `FI_EP_MSG`) connect to IP addresses. They send
//! and receive messages, and read and write remote memory. The crate does not implement the rings
//! of the channel or the protocol of the messenger. Its users are the DMA engine `ofi` of the
//! `channel` crate, and the network stack `ofi` of the `messenger` crate.
//!
//! ```text
//!   Library ── query ──▶ Info        capabilities and limits of a provider
//!   Fabric ─┬─ EventQueue            connection requests, established, shut down
//!           ├─ Listener
//!           └─ Domain ─┬─ MemoryRegion      registered memory
//!                      ├─ CompletionQueue   completed operations
//!                      └─ Endpoint          one connection
//! ```
//!
//! **Lifetimes.** A handle keeps its parent objects alive, so objects are closed before their
//! parents. The memory of an operation stays registered until the caller has read the operation's
//! completion or closed its endpoint.
//!
//! **Threads.** The crate requests `FI_THREAD_SAFE` from providers. Any thread may use any type.
//! Only [`wait`] blocks. The crate also requests `FI_PROGRESS_MANUAL`. With the provider `tcp`,
//! bytes then move only while a thread polls. Each side of a connection therefore has one thread
//! that polls its queues while completions arrive, and sleeps in [`wait`] otherwise.
//!
//! **Trust.** A peer can access memory only if the memory is registered for remote access
//! ([`Access`]) and the peer has its key. iWARP is an exception ([`Info::exposes_local_memory`]):
//! the driver siw sends any registered memory to a peer that has the memory's key. An access with a
//! wrong key or range ends the connection over which it was attempted. Providers do not verify the
//! identity of a peer. With iWARP, a local safe caller can also reach memory that is registered only
//! for local use, because [`MemoryRegion::remote`] returns the key of every region.

#![deny(unsafe_code)]

mod address;
mod error;
#[allow(unsafe_code)]
mod ffi;
mod info;
mod operations;
mod quarantine;
mod region;
mod wait;

pub use error::{FabricError, PostError, Result};
pub use ffi::{
    CompletionQueue, ConnectionRequest, Domain, Endpoint, EndpointQueues, EventQueue, ExposedMemory, Fabric,
    FabricEvent, FabricListener, Info, Library, MemoryRegion, PeerBuffer, ReceiveQueue, Slice, Waitable,
};
pub use info::{EndpointAddress, MrMode, ProviderQuery};
pub use operations::{Completion, GatherBytes, Operation};
pub use region::{Access, RemoteRegion, RemoteSlice};
pub use wait::wait;
