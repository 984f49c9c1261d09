//! A safe interface to libfabric: connections that move memory without the peer's processor (RDMA)
//! if the machine has hardware for it, and over TCP otherwise.
//!
//! The library `libfabric.so.1` is opened at run time ([`Library::load`]). So building needs no
//! headers, and a machine without the library has no RDMA. The crate wraps only the functions that
//! Outboard uses: connected endpoints ([`Endpoint`], `FI_EP_MSG`), found by IP address, that send,
//! receive, and read and write remote memory. The crate knows nothing of channels or messages. Its
//! users are the DMA engine `ofi` of the `channel` crate, and network stacks.
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
//! **Lifetimes.** A handle keeps its parent objects alive, so objects are closed before their
//! parents. The memory of an operation stays registered until its completion is taken or its
//! endpoint is closed, whichever comes first.
//!
//! **Threads.** The crate requests `FI_THREAD_SAFE` from providers. Any thread may use all types.
//! No call blocks except [`wait`], which sleeps. The crate also requests `FI_PROGRESS_MANUAL`. With
//! the provider `tcp`, bytes then move only while a thread polls. Each side has one thread that
//! polls its queues while there are completions, and otherwise sleeps in [`wait`].
//!
//! **Trust.** A peer can read and write only memory that is registered with [`Access::Remote`] and
//! whose key it has. iWARP is an exception ([`Info::exposes_local_memory`]): the driver siw sends
//! any registered memory to a peer that has its key. An access with a wrong key or range breaks the
//! endpoint that it used. Providers do not verify the identity of a peer.

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
