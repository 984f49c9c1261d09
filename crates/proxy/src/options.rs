//! Options of an osd's attachment: the store's address, the memory, the engine, and the tunable
//! settings.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use base::fault::Faults;
use channel::{DmaEngine, MemoryOptions, SeatClaim};
use identity::Trust;

/// The address at which the store's process listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreEndpoint {
    /// A UNIX socket.
    Unix(PathBuf),
    /// A TCP address, `host:port`. DMA carries payload only if the engine reaches host memory over
    /// a network, as `ofi` does. Both ends prove their keys, but what follows is not encrypted.
    Tcp(String),
    /// A simulated wire.
    #[cfg(feature = "sim")]
    Sim(channel::sim::ControlWire),
}

/// Options of an attachment.
#[derive(Clone)]
pub struct AttachmentOptions {
    /// Sizes of DPU memory.
    pub memory: MemoryOptions,
    /// The DMA engine; `None` starts the emulated engine `shm`.
    pub engine: Option<Arc<dyn DmaEngine>>,
    /// Maximum number of unanswered requests on the ring.
    pub outstanding: usize,
    /// Maximum payload of one read or one transaction, in bytes. At most 16 MiB.
    pub largest_request: usize,
    /// How long calls wait for a store that is not connected, and how long
    /// [`Attachment::connect`](crate::Attachment::connect) tries to connect.
    pub wait_for_store: Duration,
    /// Whether to use the control socket alone, even if DMA is possible.
    pub socket_only: bool,
    /// Duration after which a transfer is overdue. If a call to the store gets no reply for this
    /// duration, the osd asks the host for the host's ring positions.
    pub overdue: Duration,
    /// The cool-down: how long DMA is not used after a failure.
    pub cool_down: Duration,
    /// The host verifies the payload checksums of every n-th request; 0 means no request. After a
    /// failure, the host verifies the next 256 requests in any case.
    pub verify_every: u32,
    /// Settings that can be changed during the attachment.
    pub tuning: DmaTuning,
    /// The seat at the store. Each shard of an osd opens its own attachment with its own seat, and
    /// all of them have the same id of the osd's run. The default is the only seat of a new run.
    pub seat: SeatClaim,
    /// The osd's identity, and the key of the store, for a store that is reached over TCP.
    pub trust: Trust,
    /// Faults to inject in this process.
    pub faults: Faults,
}

/// Settings of DMA that can change during an attachment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DmaTuning {
    /// Number of engine queues to use. With 1, short requests wait behind long requests.
    pub queues: usize,
    /// Maximum number of host-memory windows that stay open. With 0, every request opens its own
    /// window.
    pub region_cache: usize,
    /// How long the osd keeps polling for completions after the last completion, before it sleeps.
    pub poll: Duration,
    /// Maximum length of a transfer, in bytes. The engine may have a lower limit. `None` uses the
    /// engine's limit.
    pub max_transfer: Option<usize>,
}

impl Default for DmaTuning {
    fn default() -> Self {
        DmaTuning { queues: usize::MAX, region_cache: 64, poll: Duration::ZERO, max_transfer: None }
    }
}

impl Default for AttachmentOptions {
    fn default() -> Self {
        AttachmentOptions {
            memory: MemoryOptions::default(),
            engine: None,
            outstanding: 256,
            largest_request: 16 << 20,
            wait_for_store: Duration::from_secs(30),
            socket_only: false,
            overdue: Duration::from_secs(2),
            cool_down: Duration::from_secs(5),
            verify_every: 1,
            tuning: DmaTuning::default(),
            seat: SeatClaim::sole(),
            trust: Trust::default(),
            faults: Faults::default(),
        }
    }
}
