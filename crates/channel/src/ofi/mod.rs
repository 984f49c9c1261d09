//! The engine `ofi`: one-sided reads and writes of host memory over libfabric. On a BlueField, it
//! runs over `verbs`, between the DPU's processors and the host or another machine. Over `tcp`, it
//! runs on any machine.
//!
//! ```text
//!   osd's process                                        store's process
//!   OfiEngine, thread ofi-N                              OfiHost, thread ofi-host
//!     queue 0 ── endpoint ══ reads, writes, bells ══▶ endpoint ─┐
//!     queue 1 ── endpoint ═══════════════════════════▶ endpoint ─┼─▶ host memory (registered, one key)
//!       …                                                        └─▶ host's doorbell (eventfd)
//!     Bell ◀──── endpoint 0 ◀══════════ bells ════════ endpoint 0 ◀── osd's doorbell (eventfd)
//! ```
//!
//! **Attaching.** The store's process registers the memory of an attachment and
//! [grants](OfiHost::grant) it. The osd's process receives the resulting [`OfiOffer`] over the
//! control socket and [attaches](crate::DmaEngine::attach) to it. The engine opens one connection
//! for each of its queues, so that the queues do not wait for one another. Each connection request
//! carries the offer's secret. Dropping the grant closes the connections and then ends the
//! registration.
//!
//! **Access rights.** The osd can read and write only the granted memory. The store's process can
//! only send messages of 16 bytes to the osd: the osd's memory is registered only for the osd's own
//! operations. Over iWARP, however, a peer can write to memory that receives the data of a read
//! ([`fabric::Info::exposes_local_memory`]). There, reads move their data into a bounce buffer
//! (module `bounce`), and the engine's thread copies it to its destination. The osd's memory is then
//! registered only as the source of writes. The rights protect the memory, not its keys: the driver
//! of a `verbs` device chooses the keys, and some drivers choose keys that a peer can guess.
//!
//! **Order.** A doorbell is a message. The engine sends it after the writes that it announces, on
//! the same endpoint as these writes. The engine requests `FI_ORDER_SAW` for its endpoints.
//! According to fi_cq(3), all earlier writes are then in place when the message arrives. A write's
//! own completion proves less: over `tcp`, a write completes as soon as it is handed to the socket.
//! A chain with a tag is therefore complete only when a *read* that was posted after its last write
//! has completed (`FI_ORDER_RAW`). If no such read is in progress, the engine posts a read of 8
//! bytes, which confirms the writes of all waiting chains. `FI_DELIVERY_COMPLETE` would prove the
//! same, but `verbs` does not offer it. No provider orders a write after a read, or operations that
//! use the same local bytes. The engine itself delays these operations (module `hazards`).
//!
//! **Progress.** Over `tcp`, bytes move only while both sides poll. The thread of each side polls
//! while it has work. After that, it polls for a short time if such polling has found work
//! recently. Then it sleeps until a file descriptor of its device becomes readable.
//!
//! **End.** An error, a closed connection, a failed device or a [`reset`](crate::DmaEngine::reset)
//! closes all endpoints of the peer. After that, no transfer accesses memory, and the peer's chains
//! fail. If the peer has no chains, a completion with tag 0 reports the failure, because doorbells
//! and untagged writes may have been lost. A reset needs no report, because its caller knows of it.
//! For the next chain of the peer, the engine connects again. The store's process replaces older
//! connections with newer ones.
//!
//! **Preparation.** A program that may use this engine must call [`fabric::Library::prepare`] first
//! in `main`.

mod alarm;
mod bounce;
mod credits;
mod engine;
mod faults;
mod flow;
mod greeting;
mod hazards;
mod host;
mod lane;
mod line;
mod port;
mod rung;
mod shared;
mod token;
mod worker;

use std::net::SocketAddr;

use fabric::RemoteRegion;
use serde::{Deserialize, Serialize};

pub use engine::{OfiEngine, OfiOptions};
pub(crate) use greeting::Greeting;
pub use host::{OfiGrant, OfiHost, OfiHostOptions};

/// Number of queues: the urgent queue, and four queues for payload. Each has its own connection.
const QUEUES: usize = 5;

/// The data that the osd's process needs to reach an attachment's host memory. The offer is a
/// secret, since every process that has it can access the memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfiOffer {
    /// The libfabric provider, e.g. `verbs` or `tcp`.
    pub provider: String,
    /// The address on which the store's process listens.
    pub address: SocketAddr,
    /// A number that each connection request repeats. It identifies the attachment, and proves that
    /// the requester received the offer.
    pub secret: u128,
    /// The memory's key, base address and length in bytes.
    pub memory: RemoteRegion,
}
