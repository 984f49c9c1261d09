//! How an osd joins a store process: where it is, what memory and engine to use, and what can be tuned.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use base::fault::Faults;
use channel::{DmaEngine, MemoryOptions};

/// Where the store's process listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreEndpoint {
    /// A UNIX socket.
    Unix(PathBuf),
    /// A TCP address, `host:port`. Payload goes by DMA only if the engine reaches host memory over a network, as `ofi` does.
    /// Not authenticated: for trusted networks.
    Tcp(String),
}

/// How to join a store.
#[derive(Clone)]
pub struct AttachmentOptions {
    /// Sizes of DPU memory.
    pub memory: MemoryOptions,
    /// The engine that moves payload; `None` starts an emulated one (`shm`).
    pub engine: Option<Arc<dyn DmaEngine>>,
    /// Most requests unanswered on the ring.
    pub outstanding: usize,
    /// Longest payload of one request, in bytes: of one read, or one transaction. At most 16 MiB.
    pub largest_request: usize,
    /// How long calls wait for a store that is away, and how long [`Attachment::connect`] tries.
    pub wait_for_store: Duration,
    /// Use the control socket alone even where DMA is possible.
    pub socket_only: bool,
    /// After that long a transfer is overdue, and a reply is asked for.
    pub overdue: Duration,
    /// How long DMA is left alone after it has failed.
    pub cool_down: Duration,
    /// The host compares the payload of every so many requests with its checksums; 0 for none. After a failure it looks at
    /// the next 256 in any case.
    pub verify_every: u32,
    /// What can be changed while the attachment lasts.
    pub tuning: DmaTuning,
    /// What is to go wrong in this process.
    pub faults: Faults,
}

/// How DMA is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DmaTuning {
    /// Queues of the engine; 1 puts everything into one, so that short requests wait for long ones.
    pub queues: usize,
    /// Windows of host memory that stay open; 0 has each request negotiate its own.
    pub region_cache: usize,
    /// How long this side looks for completions after one has come, before it sleeps.
    pub poll: Duration,
    /// Longest transfer, in bytes; the engine may have a lower limit. `None` is the engine's.
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
            verify_every: 64,
            tuning: DmaTuning::default(),
            faults: Faults::default(),
        }
    }
}
