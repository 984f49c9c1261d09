//! The objects of libfabric. All `unsafe` code of this crate is in this folder.
//!
//! The soundness of this code depends on these rules:
//!
//! - libfabric creates objects with the layouts in [`abi`].
//! - One [`Handle`] owns each object and closes it once.
//! - Every user of an object holds an `Arc` of the object.
//! - Providers are opened with `FI_THREAD_SAFE`.
//! - The memory of an operation stays mapped until the operation has completed or its endpoint is
//!   closed.
//! - Memory that peers can access stays mapped until all endpoints that may be writing to it are
//!   closed.
//! - Peers and operations access only memory to which this process has no references
//!   ([`base::mem::Arena::admit`], [`PeerBuffer`]), memory that they only read ([`bytes::Bytes`]),
//!   or memory for which an `unsafe` contract provides the same guarantee
//!   ([`base::mem::OutsideAccess`], [`MemoryRegion::slice_of_lent`]).

mod abi;
mod completion;
mod domain;
mod endpoint;
mod event_queue;
mod events;
mod handle;
mod info;
mod library;
mod listener;
mod memory;
mod opening;
mod peer_buffer;
mod posting;
mod receive_queue;
mod registered;
mod siw;

pub use completion::CompletionQueue;
pub use domain::{Domain, Fabric, Waitable};
pub use endpoint::{Endpoint, EndpointQueues};
pub use event_queue::EventQueue;
pub use events::FabricEvent;
pub use info::Info;
pub use library::Library;
pub use listener::{ConnectionRequest, FabricListener};
pub use memory::{MemoryRegion, Slice};
pub use peer_buffer::PeerBuffer;
pub use receive_queue::ReceiveQueue;
pub use registered::ExposedMemory;
