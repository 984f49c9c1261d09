//! libfabric as safe types: connections that move memory without the peer's processor (RDMA), where the machine has
//! hardware for it, and over TCP where it has not.
//!
//! The library `libfabric.so.1` is opened at run time ([`Library::load`]), so that building needs no headers and a
//! machine without it simply has no RDMA. What is wrapped is what Outboard uses: connected endpoints
//! ([`Endpoint`], `FI_EP_MSG`) that send, receive, read and write remote memory, found by IP address. This knows nothing of
//! channels or messages; its users are the DMA engine `ofi` of the `channel` crate and network stacks.
//!
//! ```text
//!   Library ── query ──▶ Info        what a provider can do, and limits to obey
//!   Fabric ─┬─ EventQueue            connection requests, established, shut down
//!           ├─ Listener
//!           └─ Domain ─┬─ MemoryRegion      an arena, registered
//!                      ├─ CompletionQueue   what has been done
//!                      └─ Endpoint          one connection
//! ```
//!
//! **Lifetimes.** A handle keeps what it was made from alive, and things are closed from the leaves to the root. An operation
//! keeps its memory registered until its completion was taken or its endpoint has been closed, whichever is first.
//!
//! **Threads.** Providers are asked for `FI_THREAD_SAFE`; everything here may be used from any thread and no call blocks, but for
//! [`wait`], which sleeps. Providers are asked for `FI_PROGRESS_MANUAL`, and `tcp` takes that literally: bytes move only while
//! somebody polls. Each side has one thread that polls its queues while there is something and sleeps in [`wait`] otherwise.
//!
//! **Trust.** A peer can read and write what was registered with [`Access::Remote`] and whose key it has, and nothing else, but over iWARP
//! ([`Info::exposes_local_memory`]), where the driver siw also sends whatever is registered to whoever has its key. A refused key or
//! range costs the endpoint on which it was tried. Providers do not check that a peer is who it says.

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
    FabricEvent, FabricListener, Info, Library, MemoryRegion, ReceiveQueue, Slice, Waitable,
};
pub use info::{EndpointAddress, MrMode, ProviderQuery};
pub use operations::{Completion, GatherBytes, Operation};
pub use region::{Access, RemoteRegion, RemoteSlice};
pub use wait::wait;
