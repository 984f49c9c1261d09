//! The host–DPU channel: how bytes get from the memory of one side into that of the other.
//!
//! Two processes, each with memory of its own: *DPU memory* belongs to the osd's process, *host memory* to the
//! store's. Neither maps the other's. What crosses is moved by a [`DmaEngine`] in transfers of at most
//! [`DmaEngine::max_transfer`] bytes; small entries travel through two [`ring`]s with [`Doorbell`]s, and a control
//! socket ([`Control`]) carries the rest. This crate knows nothing of stores: what the entries mean is the business of
//! the `proxy` crate, its only user. `docs/channel.md` draws the memories, the rings and the entries.

#![forbid(unsafe_code)]

pub mod conformance;
mod control;
mod dma;
mod doorbell;
mod error;
mod farewell;
mod frame;
mod handshake;
mod memory;
pub mod ofi;
pub mod ring;
mod shm;

pub use control::{Control, MAX_FRAME};
pub use dma::{
    Bell, Chain, Completion, Counters, DmaEngine, Failed, Joined, OnDrop, Peer, PeerId, Place, QueueId,
    Region, RegionId, Transfer, Tuning, URGENT, Unposted,
};
pub use doorbell::Doorbell;
pub use error::{ChannelError, Result};
pub use frame::{Frame, HEADER_LEN, Header, Kind, VERIFY};
pub use handshake::{
    Descriptors, Hello, MemoryAccess, MemoryAnswer, MemoryRequest, Reach, Socket, TargetInfo, VERSION,
    Welcome, accept, join,
};
pub use memory::{DpuMemory, HostMemory, Layout, MemoryOptions};
pub use shm::{MAX_TRANSFER, Profile, ShmEngine, ShmOptions};
