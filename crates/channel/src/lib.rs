//! The host–DPU channel: how bytes get from the memory of one side into that of the other.
//!
//! Two processes, each with memory of its own: *DPU memory* belongs to the osd's process, *host memory* to the
//! store's. Neither maps the other's. What crosses is moved by a [`DmaEngine`] in transfers of at most
//! [`DmaEngine::max_transfer`] bytes; small entries travel through two [`ring`]s with [`Doorbell`]s, and a control
//! socket ([`ControlSocket`]) carries the rest. This crate knows nothing of stores: what the entries mean is the business of
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

pub use control::{ControlSocket, MAX_FRAME};
pub use dma::{
    Bell, Chain, ChainCompletion, ChainFailure, Counters, DmaAddress, DmaEngine, DmaRegion, EnginePeer,
    EngineTuning, Joined, OnDrop, PeerId, QueueId, RegionId, RejectedChain, Transfer, URGENT,
};
pub use doorbell::Doorbell;
pub use error::{ChannelError, Result};
pub use frame::{ChannelEntry, EntryHeader, EntryKind, HEADER_LEN, VERIFY};
pub use handshake::{
    ChannelHello, ChannelWelcome, MemoryAccess, MemoryAnswer, MemoryFds, MemoryRequest, Reach, Socket,
    TargetInfo, VERSION, accept, join,
};
pub use memory::{DpuMemory, HostMemory, MemoryLayout, MemoryOptions};
pub use shm::{MAX_TRANSFER, Profile, ShmEngine, ShmOptions};
