//! The host–DPU channel: it moves bytes between the memory of the osd and the memory of the store.
//!
//! The osd's process owns *DPU memory*, and the store's process owns *host memory*. Neither process
//! maps the other's memory. A [`DmaEngine`] moves data between them, in transfers of at most
//! [`DmaEngine::max_transfer`] bytes. Requests and replies travel as small entries through two
//! [`ring`]s with [`Doorbell`]s, and a control socket ([`ControlSocket`]) carries all other
//! messages. This crate does not interpret the entries. Their meaning is defined in the crate
//! `proxy`, the only user of this crate. `docs/channel.md` shows the memories, the rings and the
//! entries.

#![deny(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::disallowed_methods, clippy::disallowed_types))]

#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
mod control;
mod dma;
mod doorbell;
mod error;
mod farewell;
mod frame;
pub mod fuzz;
mod handshake;
mod memory;
pub mod ofi;
pub mod ring;
mod seat;
mod shm;
#[cfg(feature = "sim")]
pub mod sim;

pub use control::{ControlSocket, MAX_FRAME};
pub use dma::{
    Bell, Chain, ChainCompletion, ChainFailure, ChainTimes, Counters, DmaAddress, DmaEngine, DmaRegion,
    EnginePeer, EngineTuning, Joined, OnDrop, PeerId, QueueId, RegionId, RejectedChain, Transfer, URGENT,
};
pub use doorbell::{Doorbell, Ringer};
pub use error::{ChannelError, Result};
pub use frame::{ChannelEntry, EntryHeader, EntryKind, HEADER_LEN, REFUSE, VERIFY};
pub use handshake::{
    Carrier, ChannelHello, ChannelWelcome, DetachedSocket, HostDoorbells, MemoryAccess, MemoryAnswer,
    MemoryFds, MemoryRequest, Reach, Socket, TargetInfo, VERSION, accept, join,
};
pub use memory::{DpuMemory, HostMemory, MemoryLayout, MemoryOptions};
pub use seat::{MAX_SEATS, SeatClaim};
pub use shm::{MAX_TRANSFER, Profile, ShmEngine, ShmOptions};
