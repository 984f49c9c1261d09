//! [`InFlightLimit`]: limits the requests of a connection that are in flight.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::limits::NbdLimits;

/// The number of requests, and of bytes of payload, that may still be in flight.
#[derive(Debug)]
pub(crate) struct InFlightLimit {
    requests: Arc<Semaphore>,
    bytes: Arc<Semaphore>,
    bytes_max: u32,
}

/// The share of a request in flight. Dropping it lets the connection receive another request.
#[derive(Debug)]
pub(crate) struct Reservation {
    _request: OwnedSemaphorePermit,
    _bytes: Option<OwnedSemaphorePermit>,
}

impl InFlightLimit {
    /// Creates the limit of one connection.
    pub fn new(limits: &NbdLimits) -> InFlightLimit {
        let bytes_max = limits.in_flight_bytes_max;
        InFlightLimit {
            requests: Arc::new(Semaphore::new(limits.requests_max)),
            bytes: Arc::new(Semaphore::new(bytes_max as usize)),
            bytes_max,
        }
    }

    /// Waits until a request that holds `bytes` bytes of memory may be in flight. Only one task
    /// reserves, so a large request cannot be overtaken.
    pub async fn reserve(&self, bytes: u32) -> Reservation {
        let open = "the semaphores are never closed";
        let request = Arc::clone(&self.requests).acquire_owned().await.expect(open);
        let bytes = match bytes.min(self.bytes_max) {
            0 => None,
            bytes => Some(Arc::clone(&self.bytes).acquire_many_owned(bytes).await.expect(open)),
        };
        Reservation { _request: request, _bytes: bytes }
    }
}
