//! The faults of a simulated network, their frequency, and how often they have occurred.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The properties of the way from one host to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SimRoute {
    /// Minimum time that data needs.
    pub latency: Duration,
    /// Maximum random time that is added to the latency of each piece of data.
    pub jitter: Duration,
    /// Bytes per second of each transport. `None` for no limit.
    pub bandwidth: Option<u64>,
}

/// The random faults of a network, and their frequency. A frequency of 0 means never.
#[derive(Debug, Clone, Copy)]
pub struct SimFaults {
    /// The route between two hosts for which [`SimNetwork::set_route`](super::SimNetwork::set_route)
    /// was not called.
    pub route: SimRoute,
    /// Maximum number of bytes of a stream that travel together.
    pub piece_max: usize,
    /// Average number of bytes after which a transport breaks, in each direction.
    pub break_after_bytes: u64,
    /// On average, one in this many pieces of data stalls.
    pub stall_one_in: u32,
    /// Maximum duration of a stall.
    pub stall: Duration,
    /// On average, one bit is flipped in one of this many pieces of data.
    pub flip_one_in: u32,
    /// On average, one in this many attempts to connect is refused.
    pub refuse_one_in: u32,
    /// On average, one in this many attempts to connect is never answered.
    pub ignore_one_in: u32,
    /// On average, one in this many operations of a link is lost and sent again. If it is lost too
    /// often, the link fails.
    pub lose_one_in: u32,
    /// On average, one in this many completions of a link is reported late.
    pub report_late_one_in: u32,
    /// On average, one in this many offers cannot be exposed to one-sided transfers.
    pub refuse_memory_one_in: u32,
}

impl SimFaults {
    /// No random faults. Faults occur only on request, and data arrives at once.
    pub const NONE: SimFaults = SimFaults {
        route: SimRoute { latency: Duration::ZERO, jitter: Duration::ZERO, bandwidth: None },
        piece_max: 64 << 10,
        break_after_bytes: 0,
        stall_one_in: 0,
        stall: Duration::ZERO,
        flip_one_in: 0,
        refuse_one_in: 0,
        ignore_one_in: 0,
        lose_one_in: 0,
        report_late_one_in: 0,
        refuse_memory_one_in: 0,
    };
}

macro_rules! counts {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Number of faults that have occurred, by kind.
        #[derive(Debug, Default)]
        pub struct SimCounts {
            $($(#[$doc])* pub $name: AtomicU64,)*
        }

        impl SimCounts {
            /// The counters and their names.
            #[must_use]
            pub fn all(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name.load(Ordering::Relaxed)),)*]
            }
        }
    };
}

counts! {
    /// Pieces of data with a random delay.
    delays,
    /// Stalled pieces of data.
    stalls,
    /// Streams that broke at random.
    breaks,
    /// Breaks that only one of the two ends noticed at first.
    half_breaks,
    /// Transports that were broken on request.
    cuts,
    /// Pieces of data that were held back by a cut or frozen network.
    held,
    /// Flipped bits.
    flips,
    /// Refused attempts to connect.
    refusals,
    /// Attempts to connect that were never answered.
    ignored,
    /// Pieces of data that arrived after the receiver had closed the transport.
    late,
    /// Operations of links that were lost and sent again.
    losses,
    /// Completions of links that were reported late.
    late_reports,
    /// Links that failed because they could not reach the peer for too long.
    given_up,
    /// Offers that could not be exposed.
    refused_memory,
    /// Operations that were refused because the queue of a link was full.
    full_queues,
    /// One-sided accesses to memory whose registration had ended while they were in progress.
    withdrawn_accesses,
    /// One-sided accesses to memory that the owner had released although they were in progress. An
    /// error of the owner or of the peer.
    released_accesses,
    /// Packets for which the receiver had posted no buffer. An error of the sender or of the
    /// receiver, unless credits were damaged in flight.
    not_ready,
    /// Operations that the peer's endpoint refused. The link then fails.
    refused_operations,
}

/// Adds one to a counter.
pub(super) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}
