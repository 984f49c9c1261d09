//! The table of operations in progress.
//!
//! An operation's context is the number that libfabric returns with its completion. The number is
//! an index into this table, never an address. So a late or repeated completion finds no entry and
//! does no harm. The entry keeps the operation's memory registered.

use bytes::Bytes;

use crate::{FabricError, MemoryRegion, PeerBuffer};

/// The kind of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// A message was sent.
    Send,
    /// A message was received.
    Receive,
    /// Remote memory was read.
    Read,
    /// Remote memory was written.
    Write,
}

/// The report that an operation has ended.
#[derive(Debug, Clone)]
pub struct Completion {
    /// Token of the endpoint, or of the [shared receive queue](crate::ReceiveQueue), to which the
    /// operation was posted.
    pub endpoint: u64,
    /// The token that the caller gave to the operation.
    pub token: u64,
    /// The kind of the operation.
    pub operation: Operation,
    /// Number of bytes received, for [`Operation::Receive`]. For other kinds, the number of bytes
    /// requested.
    pub len: usize,
    /// The error, if the operation failed. The endpoint of a failed operation cannot be used any
    /// more.
    pub result: Result<(), FabricError>,
}

/// An operation in progress.
pub(crate) struct PendingOperation {
    /// Process-wide number of the endpoint or receive queue to which the operation was posted.
    pub(crate) serial: u64,
    pub(crate) endpoint: u64,
    pub(crate) token: u64,
    pub(crate) operation: Operation,
    pub(crate) len: usize,
    /// Numbers of earlier operations of the same endpoint that were posted without a request for a
    /// completion. The completion of this operation implies that they have ended.
    pub(crate) earlier: Vec<u64>,
    /// The memory of the operation. It stays registered as long as this entry exists.
    pub(crate) memory: Held,
}

/// The memory that an operation in progress uses.
pub(crate) enum Held {
    /// The provider has copied the memory. The caller gets no completion for this operation.
    Copied,
    /// A region, and the buffer in it that the operation uses, if the caller named one.
    Region(
        #[expect(dead_code, reason = "held so that it stays registered")] MemoryRegion,
        #[expect(dead_code, reason = "held so that this process does not access it")] Option<PeerBuffer>,
    ),
    Parts(Vec<GatherBytes>),
}

impl Held {
    /// Returns the parts of the message or write. The list is empty for other operations.
    pub(crate) fn into_parts(self) -> Vec<GatherBytes> {
        match self {
            Held::Parts(parts) => parts,
            Held::Copied | Held::Region(..) => Vec::new(),
        }
    }
}

/// One part of a message, or of data to write to remote memory.
#[derive(Debug, Clone)]
pub struct GatherBytes {
    /// The bytes.
    pub bytes: Bytes,
    /// The region that contains the bytes. Only providers that require
    /// [`local`](crate::MrMode::local) registration need it.
    pub region: Option<MemoryRegion>,
}

/// The operations in progress of one completion queue. Their number is limited to the queue's
/// depth.
pub(crate) struct Operations<P = PendingOperation> {
    slots: Vec<Slot<P>>,
    free: Vec<u32>,
    capacity: usize,
}

struct Slot<P> {
    /// Counts the uses of the slot, so that the number of an earlier operation does not match a
    /// later operation in the same slot.
    generation: u32,
    pending: Option<P>,
}

impl<P> Operations<P> {
    pub(crate) fn new(capacity: usize) -> Operations<P> {
        Operations { slots: Vec::new(), free: Vec::new(), capacity: capacity.min(u32::MAX as usize) }
    }

    /// Adds an operation and returns its number, which is never 0. If the table is full, returns
    /// the operation as the error.
    pub(crate) fn insert(&mut self, pending: P) -> Result<u64, P> {
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.slots.len() < self.capacity => {
                self.slots.push(Slot { generation: 1, pending: None });
                self.slots.len() as u32 - 1
            }
            None => return Err(pending),
        };
        let slot = &mut self.slots[index as usize];
        slot.pending = Some(pending);
        Ok(u64::from(slot.generation) << 32 | u64::from(index))
    }

    /// Removes and returns the operation `number`. Returns `None` if the table does not contain it.
    pub(crate) fn remove(&mut self, number: u64) -> Option<P> {
        let index = number as u32;
        let slot = self.slots.get_mut(index as usize)?;
        if u64::from(slot.generation) != number >> 32 {
            return None;
        }
        let pending = slot.pending.take()?;
        slot.generation = slot.generation.checked_add(1).unwrap_or(1);
        self.free.push(index);
        Some(pending)
    }

    /// Removes and returns all operations for which `which` returns true.
    pub(crate) fn remove_all(&mut self, which: impl Fn(&P) -> bool) -> Vec<P> {
        let numbers: Vec<u64> = self
            .slots
            .iter()
            .enumerate()
            .filter(|(_, slot)| slot.pending.as_ref().is_some_and(&which))
            .map(|(index, slot)| u64::from(slot.generation) << 32 | index as u64)
            .collect();
        numbers.into_iter().filter_map(|number| self.remove(number)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operation_numbers_are_unique_and_the_table_of_operations_is_bounded() {
        let mut table = Operations::new(2);
        let a = table.insert('a').unwrap();
        let b = table.insert('b').unwrap();
        assert_eq!(table.insert('c'), Err('c'));
        assert_eq!(table.remove(a), Some('a'));
        assert_eq!(table.remove(a), None);
        let c = table.insert('c').unwrap();
        assert_ne!(a, c);
        assert_eq!(table.remove(a), None);
        assert_eq!(table.remove_all(|p| *p != 'b'), ['c']);
        assert_eq!(table.remove(b), Some('b'));
        assert_eq!(table.remove(0), None);
        assert_eq!(table.remove(u64::MAX), None);
    }
}
