//! [`SplitRing`]: the device's side of one split virtqueue (virtio 1.2, section 2.7).
//!
//! The ring takes requests from the available ring, puts completions into the used ring, and keeps
//! the record of requests in flight in step with both. A ring that is started with the record of an
//! earlier ring first returns the requests that were in flight, in the order in which they were
//! taken. So after a kill at any instruction, each request completes exactly once:
//!
//! - The index up to which requests were taken is not stored. It is the index of the used ring plus
//!   the number of requests in flight.
//! - The same descriptor cannot be taken twice, so at most as many requests are in flight as the ring
//!   has descriptors.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::volatile_memory::Error as VolatileError;
use vm_memory::{Bytes, GuestAddress};

use crate::chain::{BufferChain, ChainError, DescriptorTable};
use crate::inflight::{InflightRecord, RecordState};
use crate::memory::GuestRam;
use crate::stop_point::stop_point;

/// Largest number of descriptors in a ring.
pub const RING_SIZE_MAX: u16 = 1024;

/// Flag in the available ring: the driver needs no notifications (virtio 1.2, section 2.7.6).
const AVAIL_NO_INTERRUPT: u16 = 1;

/// Why a ring does not work any more. Only its own queue stops.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RingError {
    /// An address of the ring is not guest memory, or is not aligned.
    #[error("the rings are not in guest memory or not aligned: {0}")]
    Addresses(String),
    /// The available ring is invalid, or the rings cannot be accessed.
    #[error("the available ring is invalid: {0}")]
    Queue(#[from] virtio_queue::Error),
    /// A chain of descriptors is invalid.
    #[error("the request at descriptor {head} is invalid: {source}")]
    Chain {
        /// First descriptor of the chain.
        head: u16,
        /// The reason.
        source: ChainError,
    },
    /// The driver made a request available again, although it is in flight.
    #[error("descriptor {0} is already in flight")]
    Duplicate(u16),
    /// A request has no header or no byte for its status.
    #[error("the request at descriptor {0} has no header or no status byte")]
    Unframed(u16),
    /// The record of requests in flight cannot be accessed, or does not fit the ring.
    #[error("the record of requests in flight cannot be used: {0}")]
    Record(String),
}

impl From<VolatileError> for RingError {
    fn from(e: VolatileError) -> RingError {
        RingError::Record(e.to_string())
    }
}

/// Where a ring is, as guest addresses, and how it works.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RingPlace {
    pub size: u16,
    pub descriptors: GuestAddress,
    pub available: GuestAddress,
    pub used: GuestAddress,
    /// Whether both sides suppress notifications by indices (VIRTIO_F_EVENT_IDX).
    pub event_index: bool,
    /// Whether descriptors may refer to indirect tables (VIRTIO_F_INDIRECT_DESC).
    pub indirect: bool,
}

/// A request that was taken from a ring.
#[derive(Debug)]
pub(crate) struct TakenRequest {
    /// First descriptor of the request, which names it.
    pub head: u16,
    pub chain: BufferChain,
}

/// The device's side of one virtqueue. See the [module](self).
#[derive(Debug)]
pub(crate) struct SplitRing {
    queue: Queue,
    ram: Arc<GuestRam>,
    place: RingPlace,
    record: InflightRecord,
    /// Requests that an earlier ring has taken and not completed.
    resubmitted: VecDeque<u16>,
    in_flight: u16,
    /// Whether the driver may need a notification for completions of an earlier ring.
    owes_signal: bool,
    /// Whether the ring takes no new requests.
    is_closed: bool,
}

impl SplitRing {
    /// Starts a ring. `base` is the index of the next request to take, if the record is new.
    pub(crate) fn start(
        place: RingPlace,
        ram: Arc<GuestRam>,
        mut record: InflightRecord,
        base: u16,
    ) -> Result<SplitRing, RingError> {
        let mut queue = queue_at(&place, &ram)?;
        let used = queue.used_idx(&*ram, Ordering::Acquire)?.0;
        let state = record.recover(used)?;
        let is_new = state == RecordState::New;
        let (next, resubmitted) = match state {
            RecordState::New => (base, VecDeque::new()),
            RecordState::InFlight(heads) => (used.wrapping_add(heads.len() as u16), heads.into()),
        };
        queue.set_next_used(used);
        queue.set_next_avail(next);
        let in_flight = resubmitted.len() as u16;
        let owes_signal = !is_new;
        Ok(SplitRing { queue, ram, place, record, resubmitted, in_flight, owes_signal, is_closed: false })
    }

    /// Uses another memory table, in which the ring has other guest addresses.
    pub(crate) fn move_to(&mut self, place: RingPlace, ram: Arc<GuestRam>) -> Result<(), RingError> {
        let mut queue = queue_at(&place, &ram)?;
        queue.set_next_used(self.queue.next_used());
        queue.set_next_avail(self.queue.next_avail());
        (self.queue, self.place, self.ram) = (queue, place, ram);
        // The number of completions since the last notification is lost.
        self.owes_signal = true;
        Ok(())
    }

    /// Takes the next request, if there is one.
    pub(crate) fn take(&mut self) -> Result<Option<TakenRequest>, RingError> {
        let Some(head) = self.take_head()? else { return Ok(None) };
        let table = DescriptorTable {
            address: self.place.descriptors,
            size: self.place.size,
            may_be_indirect: self.place.indirect,
        };
        let chain = BufferChain::read(&self.ram, table, head);
        chain
            .map(|chain| Some(TakenRequest { head, chain }))
            .map_err(|source| RingError::Chain { head, source })
    }

    fn take_head(&mut self) -> Result<Option<u16>, RingError> {
        if let Some(head) = self.resubmitted.pop_front() {
            return Ok(Some(head));
        }
        if self.is_closed {
            return Ok(None);
        }
        let ram = &*self.ram;
        let Some(chain) = self.queue.iter(ram)?.next() else { return Ok(None) };
        let head = chain.head_index();
        if head >= self.place.size {
            return Err(RingError::Chain { head, source: ChainError::Index(head) });
        }
        if self.record.is_in_flight(head)? {
            return Err(RingError::Duplicate(head));
        }
        // The front end could clear entries of the record.
        if self.in_flight >= self.place.size {
            return Err(RingError::Record("it lacks requests in flight".into()));
        }
        self.record.take(head)?;
        self.in_flight += 1;
        Ok(Some(head))
    }

    /// Puts the completion of a request into the used ring. `written` is the number of bytes that
    /// the device has written.
    pub(crate) fn complete(&mut self, head: u16, written: u32) -> Result<(), RingError> {
        self.record.completing(head)?;
        self.queue.add_used(&*self.ram, head, written)?;
        stop_point();
        self.record.completed(head, self.queue.next_used())?;
        self.in_flight = self.in_flight.checked_sub(1).expect("a request in flight completes");
        Ok(())
    }

    /// Returns true if the driver needs a notification of the completions since the last call.
    pub(crate) fn needs_signal(&mut self) -> Result<bool, RingError> {
        let is_needed = self.queue.needs_notification(&*self.ram)?;
        if std::mem::take(&mut self.owes_signal) {
            return Ok(true);
        }
        if self.place.event_index {
            return Ok(is_needed);
        }
        let flags: u16 = self
            .ram
            .load(self.place.available, Ordering::Relaxed)
            .map_err(virtio_queue::Error::GuestMemory)?;
        Ok(u16::from_le(flags) & AVAIL_NO_INTERRUPT == 0)
    }

    /// Takes no new requests any more, only those of an earlier ring.
    pub(crate) fn close(&mut self) {
        self.is_closed = true;
    }

    /// Returns true if the ring takes no new requests.
    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// Asks the driver to notify the device of requests. Returns true if there already is one.
    pub(crate) fn listen(&mut self) -> Result<bool, RingError> {
        Ok(self.queue.enable_notification(&*self.ram)?)
    }

    /// Tells the driver that the device looks for requests without notifications.
    pub(crate) fn stop_listening(&mut self) -> Result<(), RingError> {
        Ok(self.queue.disable_notification(&*self.ram)?)
    }

    /// Index of the next request to take, if none is in flight.
    pub(crate) fn next_available(&self) -> u16 {
        self.queue.next_avail().wrapping_sub(self.resubmitted.len() as u16)
    }

    /// Number of requests that were taken and not completed. Includes requests of an earlier ring
    /// that are still to be resubmitted.
    pub(crate) fn in_flight(&self) -> u16 {
        self.in_flight
    }

    /// Forgets the requests in flight, because the front end has stopped the queue.
    pub(crate) fn forget(&mut self) -> Result<(), RingError> {
        Ok(self.record.forget()?)
    }
}

fn queue_at(place: &RingPlace, ram: &GuestRam) -> Result<Queue, RingError> {
    let refused = |e: virtio_queue::Error| RingError::Addresses(e.to_string());
    let mut queue = Queue::new(RING_SIZE_MAX)?;
    queue.try_set_size(place.size).map_err(refused)?;
    queue.try_set_desc_table_address(place.descriptors).map_err(refused)?;
    queue.try_set_avail_ring_address(place.available).map_err(refused)?;
    queue.try_set_used_ring_address(place.used).map_err(refused)?;
    queue.set_event_idx(place.event_index);
    queue.set_ready(true);
    if !queue.is_valid(ram) || place.available.0 == 0 {
        return Err(RingError::Addresses(format!("{place:x?}")));
    }
    Ok(queue)
}

#[cfg(test)]
mod tests;
