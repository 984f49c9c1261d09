//! The table of operations in progress.
//!
//! An operation's context is the number that libfabric returns with its completion. It is an index
//! into this table, never an address. So a late or repeated completion finds no entry and does no
//! harm. The entry keeps the operation's memory registered.

use bytes::Bytes;

use crate::{FabricError, MemoryRegion};

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

/// The end of an operation.
#[derive(Debug, Clone)]
pub struct Completion {
    /// Token of the operation's endpoint.
    pub endpoint: u64,
    /// The token that was given when the operation was posted.
    pub token: u64,
    /// The kind of the operation.
    pub operation: Operation,
    /// Number of bytes received, for [`Operation::Receive`]. For other kinds, the number of bytes
    /// requested.
    pub len: usize,
    /// The error of a failed operation. Its endpoint cannot be used any more.
    pub result: Result<(), FabricError>,
}

/// An operation that was posted.
pub(crate) struct PendingOperation {
    /// Process-wide number of its endpoint.
    pub(crate) serial: u64,
    pub(crate) endpoint: u64,
    pub(crate) token: u64,
    pub(crate) operation: Operation,
    pub(crate) len: usize,
    /// Operations of the same endpoint that were posted before this one without asking for a completion: they have ended
    /// when this one has.
    pub(crate) earlier: Vec<u64>,
    /// Registered, and kept, as long as the entry is there.
    pub(crate) memory: Held,
}

/// The memory of an operation.
pub(crate) enum Held {
    /// Copied by the provider. Nobody is told that the operation has ended.
    Copied,
    Region(#[expect(dead_code, reason = "held so that it stays registered")] MemoryRegion),
    Parts(Vec<GatherBytes>),
}

impl Held {
    /// The parts, if it was made of parts.
    pub(crate) fn into_parts(self) -> Vec<GatherBytes> {
        match self {
            Held::Parts(parts) => parts,
            Held::Copied | Held::Region(_) => Vec::new(),
        }
    }
}

/// Bytes to send or to write to remote memory.
#[derive(Debug, Clone)]
pub struct GatherBytes {
    /// The bytes.
    pub bytes: Bytes,
    /// The region that contains the bytes. Only providers that require
    /// [`local`](crate::MrMode::local) registration need it.
    pub region: Option<MemoryRegion>,
}

/// The operations of one completion queue, at most as many as it has room for.
pub(crate) struct Operations<P = PendingOperation> {
    slots: Vec<Slot<P>>,
    free: Vec<u32>,
    capacity: usize,
}

struct Slot<P> {
    /// Counts the uses of the slot, so that a stale number does not name its next user.
    generation: u32,
    pending: Option<P>,
}

impl<P> Operations<P> {
    pub(crate) fn new(capacity: usize) -> Operations<P> {
        Operations { slots: Vec::new(), free: Vec::new(), capacity: capacity.min(u32::MAX as usize) }
    }

    /// Enters an operation and gives its number, never 0; gives it back if there is no room.
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

    /// Takes out the operation of that number, if it is (still) there.
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

    /// Takes out all that `which` is true of.
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
    fn numbers_are_used_once_and_room_is_bounded() {
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
