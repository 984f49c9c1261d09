//! Records of the requests in flight, which survive the death of this process.
//!
//! The record of a queue has a header and one entry per descriptor, in the layout for split rings of
//! section "Inflight I/O tracking" of QEMU's docs/interop/vhost-user.rst. Numbers are in the byte
//! order of the machine:
//!
//! | bytes | header | | bytes | entry |
//! |---|---|---|---|---|
//! | 0..8 | features, 0 | | 0 | 1 if the request is in flight |
//! | 8..10 | version: 1, or 0 in a new record | | 1..6 | padding |
//! | 10..12 | number of entries | | 6..8 | previous entry of its batch |
//! | 12..14 | last request that was completed | | 8..16 | number of the request |
//! | 14..16 | index of the used ring, after the last completion | | | |
//!
//! The record and the index of the used ring cannot change in one step. A completion therefore first
//! notes its descriptor as the last one, then increments the index of the used ring, then clears the
//! entry, and last copies the index. If the index of a record differs from the used ring after a
//! restart, the last completion took effect, but its entry may still be set. Each completion is a
//! batch of its own.
//!
//! The record is in memory that the front end shares, so its content is validated like input.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::{MemfdFlags, SealFlags};
use serde::{Deserialize, Serialize};
use vm_memory::Bytes;
use vm_memory::volatile_memory::Error as VolatileError;

use crate::memory::SharedRecord;
use crate::stop_point::stop_point;

const HEADER_LEN: usize = 16;
const ENTRY_LEN: usize = 16;
/// Alignment of the record of each queue.
const ALIGNMENT: u64 = 64;
const VERSION: u16 = 1;

/// The layout of the records of all queues in one file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RecordLayout {
    /// Start of the records in the file, in bytes.
    pub offset: u64,
    /// Length of all records, in bytes.
    pub len: u64,
    pub queues: u16,
    /// Number of entries per queue.
    pub entries: u16,
}

impl RecordLayout {
    /// Lays out records in a new file.
    pub(crate) fn new(queues: u16, entries: u16) -> RecordLayout {
        let each = RecordLayout::needed(entries).next_multiple_of(ALIGNMENT);
        RecordLayout { offset: 0, len: each * u64::from(queues), queues, entries }
    }

    /// Length of the record of a queue, in bytes.
    fn needed(entries: u16) -> u64 {
        HEADER_LEN as u64 + u64::from(entries) * ENTRY_LEN as u64
    }

    /// Distance between the records of two queues, in bytes, or `None` if the layout is invalid.
    fn distance(&self) -> Option<u64> {
        let distance = self.len.checked_div(self.queues.into())?;
        let fits = distance >= RecordLayout::needed(self.entries) && self.entries > 0;
        (fits && distance.is_multiple_of(8) && self.offset.is_multiple_of(8)).then_some(distance)
    }

    /// Whether all records are in `len` bytes, and do not overlap.
    pub(crate) fn is_valid(&self) -> bool {
        self.distance().is_some()
    }
}

/// Creates a file for records, whose size cannot change.
pub(crate) fn create(layout: RecordLayout) -> rustix::io::Result<OwnedFd> {
    let file = rustix::fs::memfd_create("inflight", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&file, layout.len)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

/// The records of all queues of a device.
#[derive(Debug, Clone)]
pub(crate) struct InflightFile {
    shared: Arc<SharedRecord>,
    layout: RecordLayout,
}

impl InflightFile {
    /// Maps records. Returns an error if the layout is invalid or does not fit the file.
    pub(crate) fn map(file: impl AsFd, layout: RecordLayout) -> Result<InflightFile, String> {
        if !layout.is_valid() {
            return Err(format!("the layout of the inflight records is invalid: {layout:?}"));
        }
        let shared = SharedRecord::map(file, layout.offset, layout.len).map_err(|e| e.to_string())?;
        Ok(InflightFile { shared: Arc::new(shared), layout })
    }

    /// Returns the record of a queue of `size` descriptors, or `None` if the file has no room for it.
    pub(crate) fn record(&self, queue: usize, size: u16) -> Option<InflightRecord> {
        if queue >= usize::from(self.layout.queues) || size > self.layout.entries {
            return None;
        }
        let start = usize::try_from(self.layout.distance()?).ok()?.checked_mul(queue)?;
        Some(InflightRecord { shared: Arc::clone(&self.shared), start, size, counter: 0 })
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.shared.is_broken()
    }
}

/// What a record says about a queue.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum RecordState {
    /// The record is new: no request was ever taken with it.
    New,
    /// These requests were taken and not completed, in the order in which they were taken.
    InFlight(Vec<u16>),
}

/// The record of one queue. See the [module](self).
#[derive(Debug)]
pub(crate) struct InflightRecord {
    shared: Arc<SharedRecord>,
    /// Start of the record, in bytes from the start of the mapping.
    start: usize,
    size: u16,
    /// Number of the next request.
    counter: u64,
}

type Accessed<T> = Result<T, VolatileError>;

impl InflightRecord {
    /// Repairs the record after a restart, given the index of the used ring, and reads it.
    pub(crate) fn recover(&mut self, used_index: u16) -> Accessed<RecordState> {
        if self.header(8)? == 0 {
            for head in 0..self.size {
                self.set_in_flight(head, false)?;
            }
            self.set_header(10, self.size)?;
            self.set_header(12, 0)?;
            self.set_header(14, used_index)?;
            stop_point();
            self.set_header(8, VERSION)?;
            return Ok(RecordState::New);
        }
        let last = self.header(12)?;
        if self.header(14)? != used_index && last < self.size {
            self.set_in_flight(last, false)?;
            stop_point();
        }
        self.set_header(14, used_index)?;
        stop_point();
        let mut taken = Vec::new();
        for head in 0..self.size {
            if self.is_in_flight(head)? {
                let number: u64 = self.load(self.entry(head) + 8)?;
                self.counter = self.counter.max(number.wrapping_add(1));
                taken.push((number, head));
            }
        }
        taken.sort_unstable();
        Ok(RecordState::InFlight(taken.into_iter().map(|(_, head)| head).collect()))
    }

    /// Returns true if the request with this head is in flight. `head` is less than the size.
    pub(crate) fn is_in_flight(&self, head: u16) -> Accessed<bool> {
        Ok(self.load::<u8>(self.entry(head))? != 0)
    }

    /// Records that a request was taken.
    pub(crate) fn take(&mut self, head: u16) -> Accessed<()> {
        self.store(self.entry(head) + 8, self.counter)?;
        self.counter = self.counter.wrapping_add(1);
        stop_point();
        self.set_in_flight(head, true)?;
        stop_point();
        Ok(())
    }

    /// Records that the used ring is about to contain the completion of a request.
    pub(crate) fn completing(&mut self, head: u16) -> Accessed<()> {
        let previous = self.header(12)?;
        self.store(self.entry(head) + 6, previous)?;
        stop_point();
        self.set_header(12, head)?;
        stop_point();
        Ok(())
    }

    /// Records that the used ring contains the completion of a request, and has this index.
    pub(crate) fn completed(&mut self, head: u16, used_index: u16) -> Accessed<()> {
        self.set_in_flight(head, false)?;
        stop_point();
        self.set_header(14, used_index)?;
        stop_point();
        Ok(())
    }

    /// Forgets all requests in flight, because the front end has stopped the queue.
    pub(crate) fn forget(&mut self) -> Accessed<()> {
        (0..self.size).try_for_each(|head| self.set_in_flight(head, false))
    }

    fn entry(&self, head: u16) -> usize {
        assert!(head < self.size, "descriptor {head} of {}", self.size);
        HEADER_LEN + usize::from(head) * ENTRY_LEN
    }

    fn set_in_flight(&self, head: u16, is_in_flight: bool) -> Accessed<()> {
        self.store(self.entry(head), u8::from(is_in_flight))
    }

    fn header(&self, at: usize) -> Accessed<u16> {
        self.load(at)
    }

    fn set_header(&self, at: usize, value: u16) -> Accessed<()> {
        self.store(at, value)
    }

    fn load<T: vm_memory::AtomicAccess>(&self, at: usize) -> Accessed<T> {
        self.shared.slice(self.start + at, size_of::<T>())?.load(0, Ordering::Acquire)
    }

    /// Stores a value after all earlier stores. The kill of this process therefore never leaves a
    /// later store without the earlier ones.
    fn store<T: vm_memory::AtomicAccess>(&self, at: usize, value: T) -> Accessed<()> {
        self.shared.slice(self.start + at, size_of::<T>())?.store(value, 0, Ordering::Release)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records(queues: u16, entries: u16) -> (OwnedFd, InflightFile) {
        let layout = RecordLayout::new(queues, entries);
        let file = create(layout).unwrap();
        let mapped = InflightFile::map(&file, layout).unwrap();
        (file, mapped)
    }

    #[test]
    fn requests_in_flight_are_found_in_the_order_of_their_numbers() {
        let (_file, records) = records(2, 8);
        let mut record = records.record(1, 8).unwrap();
        assert_eq!(record.recover(100).unwrap(), RecordState::New);
        for head in [5, 2, 7] {
            record.take(head).unwrap();
        }
        record.completing(2).unwrap();
        record.completed(2, 101).unwrap();
        let mut record = records.record(1, 8).unwrap();
        assert_eq!(record.recover(101).unwrap(), RecordState::InFlight(vec![5, 7]));
        record.take(0).unwrap();
        let mut record = records.record(1, 8).unwrap();
        assert_eq!(record.recover(101).unwrap(), RecordState::InFlight(vec![5, 7, 0]));
        let mut other = records.record(0, 8).unwrap();
        assert_eq!(other.recover(0).unwrap(), RecordState::New);
    }

    #[test]
    fn a_completion_in_the_used_ring_counts_even_if_its_entry_is_still_set() {
        let (_file, records) = records(1, 4);
        let mut record = records.record(0, 4).unwrap();
        record.recover(65535).unwrap();
        record.take(3).unwrap();
        record.take(1).unwrap();
        record.completing(3).unwrap();
        let mut restarted = records.record(0, 4).unwrap();
        assert_eq!(restarted.recover(0).unwrap(), RecordState::InFlight(vec![1]));
        assert_eq!(restarted.recover(0).unwrap(), RecordState::InFlight(vec![1]));
    }

    #[test]
    fn a_layout_without_room_for_its_entries_is_refused() {
        let valid = RecordLayout::new(4, 128);
        assert!(valid.is_valid());
        for invalid in [
            RecordLayout { queues: 0, ..valid },
            RecordLayout { entries: 0, ..valid },
            RecordLayout { entries: 129 + 4, ..valid },
            RecordLayout { len: valid.len - 64 * 4, ..valid },
            RecordLayout { offset: 4, ..valid },
        ] {
            assert!(!invalid.is_valid(), "{invalid:?}");
        }
        let (_file, records) = records(4, 128);
        assert!(records.record(4, 128).is_none());
        assert!(records.record(3, 256).is_none());
    }

    #[test]
    fn an_invalid_record_is_survived() {
        let (file, records) = records(1, 4);
        rustix::io::pwrite(&file, &[0xff; 80], 0).unwrap();
        let mut record = records.record(0, 4).unwrap();
        let RecordState::InFlight(heads) = record.recover(7).unwrap() else { panic!("a used record") };
        assert_eq!(heads, [0, 1, 2, 3]);
        record.forget().unwrap();
        assert_eq!(record.recover(7).unwrap(), RecordState::InFlight(vec![]));
    }
}
