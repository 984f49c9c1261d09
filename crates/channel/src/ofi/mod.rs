//! The engine `ofi`: one-sided reads and writes of host memory over libfabric. On a BlueField it runs over `verbs` between
//! the DPU's processors and the host, or to another machine; over `tcp` it runs anywhere.
//!
//! ```text
//!   osd's process                                        store's process
//!   OfiEngine, thread chan-ofi                           OfiHost, thread chan-ofi-host
//!     queue 0 ── endpoint ══ reads, writes, bells ══▶ endpoint ─┐
//!     queue 1 ── endpoint ═══════════════════════════▶ endpoint ─┼─▶ host memory (registered, one key)
//!       …                                                        └─▶ host's doorbell (eventfd)
//!     Bell ◀──── endpoint 0 ◀══════════ bells ════════ endpoint 0 ◀── osd's doorbell (eventfd)
//! ```
//!
//! **Joining.** The store's process registers the memory of an attachment and [grants](OfiHost::grant) it; the resulting
//! [`OfiOffer`] goes to the osd's process by the control socket, which [attaches](crate::DmaEngine::attach) to it: one connection
//! for each queue of the engine, so that queues do not wait for one another. Each connection request carries the offer's
//! secret. Dropping the grant closes the connections and then the registration.
//!
//! **Who may do what.** The osd's memory is registered for its own operations only: the store's process can send it messages of
//! 16 bytes and nothing else. Over iWARP that would not hold
//! ([`fabric::Info::exposes_local_memory`]), so the engine refuses it. The osd can read and write the memory granted, and no other.
//!
//! **Order.** A doorbell is a message sent after the writes it tells of, on the same endpoint. Endpoints are asked for
//! `FI_ORDER_SAW`: fi_cq(3) then guarantees that the message's arrival means that the writes are in place, whatever
//! their completions mean. These mean less than one might think: over `tcp` a write completes when it was handed to the socket.
//! So a chain with a tag is complete when a *read* that was posted after its last write has completed (`FI_ORDER_RAW`);
//! if no such read is under way the engine makes one of 8 bytes, one for all chains that wait. `FI_DELIVERY_COMPLETE`
//! would say the same, but `verbs` does not offer it.
//! What no provider orders, a write after a read or uses of the same local bytes, waits (module `hazards`).
//!
//! **Progress.** Over `tcp` bytes move only while both sides poll: each side's thread polls while there is something, spins for
//! a moment if that paid lately, and sleeps on the queues' descriptors otherwise.
//!
//! **End.** An error, a closed connection, a device that fails or [`reset`](crate::DmaEngine::reset) closes all endpoints of the
//! peer, after which nothing touches memory any more, and fails its chains; if there are none, a completion with tag 0 tells,
//! for doorbells and untagged writes may have got lost. Only of a reset it does not: whoever asked for that knows. The next chain for the peer connects again. The store's process takes the newer
//! connections for the older ones.

mod alarm;
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
mod worker;

use std::net::SocketAddr;

use fabric::RemoteRegion;
use serde::{Deserialize, Serialize};

pub use engine::{OfiEngine, OfiOptions};
pub use host::{OfiGrant, OfiHost, OfiHostOptions};

/// The urgent queue and those for payload; each has a connection of its own.
const QUEUES: usize = 5;

/// To be called first in `main` by a program that may use this engine or its host: see [`fabric::Library::prepare`].
pub fn prepare_process() {
    fabric::Library::prepare();
}

/// What the osd's process needs to reach an attachment's host memory. Whoever has it can: it is a secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfiOffer {
    /// libfabric's provider, e.g. `verbs` or `tcp`.
    pub provider: String,
    /// Where the store's process listens.
    pub address: SocketAddr,
    /// Names the attachment, and proves that the offer was received.
    pub secret: u128,
    /// The memory: key, base address and length in bytes.
    pub memory: RemoteRegion,
}
