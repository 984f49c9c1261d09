//! [`NbdLimits`]: bounds on what one client can hold.

use std::time::Duration;

use disk::BLOCK;

/// Block size that the server recommends to clients, in bytes.
pub(crate) const PREFERRED_BLOCK: u32 = 4096;

/// Bounds on the time, the memory and the requests that one connection can hold.
#[derive(Debug, Clone)]
pub struct NbdLimits {
    /// Time in which a client must complete the negotiation.
    pub negotiation_timeout: Duration,
    /// Time in which a client must receive the replies that are left when its last request has been
    /// executed.
    pub close_timeout: Duration,
    /// Maximum number of requests in flight, at least 1. A request is in flight until the server has
    /// written its reply to the socket.
    pub requests_max: usize,
    /// Maximum sum of the payloads of the requests in flight, in bytes, at least
    /// `payload_bytes_max`.
    pub in_flight_bytes_max: u32,
    /// Maximum payload of a request to read or to write, in bytes: a multiple of [`BLOCK`], at least
    /// 64 KiB, because clients may rely on reads of this size.
    pub payload_bytes_max: u32,
}

impl Default for NbdLimits {
    /// Returns 10 s for the negotiation and for the last replies, 64 requests with 64 MiB in flight,
    /// and payloads of up to 32 MiB. Clients that do not ask for block sizes assume 32 MiB.
    fn default() -> NbdLimits {
        NbdLimits {
            negotiation_timeout: Duration::from_secs(10),
            close_timeout: Duration::from_secs(10),
            requests_max: 64,
            in_flight_bytes_max: 64 << 20,
            payload_bytes_max: 32 << 20,
        }
    }
}

impl NbdLimits {
    /// Panics if the limits contradict each other.
    pub(crate) fn assert_consistent(&self) {
        assert!(self.requests_max > 0, "a connection needs a request in flight");
        assert!(self.payload_bytes_max >= 64 << 10, "clients rely on reads of 64 KiB");
        assert!(u64::from(self.payload_bytes_max).is_multiple_of(BLOCK), "payloads consist of blocks");
        assert!(self.in_flight_bytes_max >= self.payload_bytes_max, "the largest request must fit");
    }
}
