//! The options of a client.

use std::sync::Arc;
use std::time::Duration;

use base::clock::WallClock;
use control::ControlClient;
use identity::Trust;

use crate::engine::{ControlPlane, EngineLimits};

/// A way to the node's control plane.
#[derive(Clone)]
pub struct ControlWay(pub Arc<dyn ControlPlane>);

impl ControlWay {
    /// The way over gRPC, with the identity and the local address of a client.
    pub(crate) fn over_grpc(options: &Options) -> ControlWay {
        let client = ControlClient::new(options.trust.clone()).connecting_from(options.source);
        ControlWay(Arc::new(client))
    }
}

impl std::fmt::Debug for ControlWay {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ControlWay")
    }
}

/// The options of a client. The defaults suit a node on the same network.
#[derive(Debug, Clone)]
pub struct Options {
    /// The identity of the client, and the node to which it connects. By default, the client
    /// connects only to an osd in its own process.
    pub trust: Trust,
    /// Time limit for reaching the node when the client starts.
    pub connect_timeout: Duration,
    /// Time limit of one request, including retries and reconnections.
    pub request_timeout: Duration,
    /// Maximum number of requests in flight (1..=512). Further requests wait.
    pub requests_in_flight: usize,
    /// Objects larger than this size, in bytes, are striped. At most 128 MiB.
    pub stripe_threshold: u64,
    /// Size of a part of a striped object, in bytes: a multiple of 4096, at most 128 MiB. A stream
    /// of unknown length is buffered up to one part before it is striped.
    pub part_size: u64,
    /// Maximum number of parts of one object in flight. A put from a stream needs memory for one
    /// more part.
    pub parts_in_flight: usize,
    /// Maximum number of bytes that one read request reads: a multiple of 4096. The first request
    /// of a read may read as much as all later concurrent requests together, up to 16 MiB.
    pub read_size: u64,
    /// Maximum number of read requests of one object in flight.
    pub reads_in_flight: usize,
    /// Data of a request up to this size, in bytes, is sent inside a message. For replies, the node
    /// chooses the limit, which is at most 64 KiB.
    pub inline_max: usize,
    /// Network stack for the connection.
    pub stack: messenger::StackChoice,
    /// The capability of the session. With `None`, the client gets one from the control plane, and a new
    /// one before it expires.
    pub capability: Option<bytes::Bytes>,
    /// File in which the client keeps its capability, so that the next process need not get one.
    pub capability_file: Option<std::path::PathBuf>,
    /// The clock by which the client replaces its capability in time.
    pub clock: WallClock,
    /// The way to the node's control plane. `None` means gRPC.
    pub control: Option<ControlWay>,
    /// Whether the client is the exclusive owner of what it changes. When the node refuses its session,
    /// because another client has fenced it, all calls fail. Other clients open a new session then.
    pub exclusive: bool,
    /// Local address of TCP connections, also of those to the control plane; `None` lets the operating
    /// system choose one.
    pub source: Option<std::net::IpAddr>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            trust: Trust::default(),
            connect_timeout: Duration::from_secs(5),
            request_timeout: Duration::from_secs(60),
            requests_in_flight: 128,
            stripe_threshold: 128 << 20,
            part_size: 16 << 20,
            parts_in_flight: 2,
            read_size: 4 << 20,
            reads_in_flight: 4,
            inline_max: 256 << 10,
            stack: messenger::StackChoice::default(),
            capability: None,
            capability_file: None,
            clock: WallClock::default(),
            control: None,
            exclusive: false,
            source: None,
        }
    }
}

impl Options {
    /// Limits every value to its valid range.
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
