//! The objects of libfabric. All `unsafe` of this crate is in this folder.
//!
//! What it rests on: objects are made by libfabric with the layouts in [`abi`]; each is owned by one [`Handle`] that closes
//! it once; who uses an object holds an `Arc` of it; providers are opened with `FI_THREAD_SAFE`; memory named in
//! an operation is kept mapped until the operation has completed or its endpoint is closed, and memory that peers can reach
//! until the endpoints that may be writing to it are closed.

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
mod receive_queue;
mod siw;

pub use completion::CompletionQueue;
pub use domain::{Domain, Fabric, Waitable};
pub use endpoint::{Endpoint, EndpointQueues};
pub use event_queue::EventQueue;
pub use events::FabricEvent;
pub use info::Info;
pub use library::Library;
pub use listener::{ConnectionRequest, FabricListener};
pub use memory::{ExposedMemory, MemoryRegion, Slice};
pub use receive_queue::ReceiveQueue;
