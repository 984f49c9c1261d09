//! How a client behaves.

use std::time::Duration;

use crate::engine::EngineLimits;

/// How a client behaves. The defaults suit a node on the same network.
#[derive(Debug, Clone)]
pub struct Options {
    /// What the client calls itself; at most 32 bytes.
    pub name: String,
    /// How long to try to reach the node at first.
    pub connect_timeout: Duration,
    /// How long one request may take, repeats and reconnections included.
    pub request_timeout: Duration,
    /// Most requests in flight (1..=512); more wait.
    pub requests_in_flight: usize,
    /// Objects larger than that, in bytes, are striped. At most 128 MiB.
    pub stripe_threshold: u64,
    /// Size of a part of a striped object, in bytes: a multiple of 4096, at most 128 MiB. A stream of unknown length
    /// is buffered up to one part before it is striped.
    pub part_size: u64,
    /// How many parts of one object are sent at a time. A stream takes that many parts of memory, and one more.
    pub parts_in_flight: usize,
    /// How much of an object one read request brings, in bytes: a multiple of 4096. The first one brings as much as all
    /// in flight together, up to 16 MiB.
    pub read_size: u64,
    /// How many read requests of one object are in flight at a time.
    pub reads_in_flight: usize,
    /// Data up to that size, in bytes, is sent inside messages. What is read comes so up to 64 KiB, as the node decides.
    pub inline_max: usize,
    /// Which network stack to use.
    pub stack: messenger::StackChoice,
    /// Address of this machine to connect from over TCP; `None` leaves the choice to the system.
    pub source: Option<std::net::IpAddr>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            name: String::from("client"),
            connect_timeout: Duration::from_secs(5),
            request_timeout: Duration::from_secs(60),
            requests_in_flight: 128,
            stripe_threshold: 128 << 20,
            part_size: 16 << 20,
            parts_in_flight: 2,
            read_size: 4 << 20,
            reads_in_flight: 4,
            inline_max: 64 << 10,
            stack: messenger::StackChoice::default(),
            source: None,
        }
    }
}

impl Options {
    /// Brings every value into its range.
    pub(crate) fn clamped(mut self, limits: &EngineLimits) -> Options {
        let largest = limits.object_bytes_max;
        let aligned = |size: u64| (size / 4096 * 4096).clamp(4096, largest);
        self.requests_in_flight = self.requests_in_flight.clamp(1, 512);
        self.stripe_threshold = self.stripe_threshold.min(largest);
        self.part_size = aligned(self.part_size);
        self.parts_in_flight = self.parts_in_flight.clamp(1, 64);
        self.read_size = aligned(self.read_size);
        self.reads_in_flight = self.reads_in_flight.clamp(1, 64);
        self
    }
}
