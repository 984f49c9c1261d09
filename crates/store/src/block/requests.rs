//! [`DriveRequests`]: the requests to the drive that are in progress.

use base::collections::HashMap;

use super::extent::Extent;
use super::io::SplitBuffer;

/// Purpose of an I/O request.
#[derive(Debug)]
pub(crate) enum Purpose {
    /// Data of the transactions of a commit group.
    Data { blocks: Extent, group: u64 },
    /// Staged data, with the numbers of the commit groups that wait until it is written.
    Stage { blocks: Extent, write: u64, groups: Vec<u64> },
    /// A part of the log sectors of a commit group.
    Log { group: u64 },
    /// A flush.
    Flush,
    /// A run of blocks of a read.
    Read { read: u64 },
    /// A block that a call reads to merge new data into it.
    Block { op: u64, block: u64, whole: SplitBuffer },
}

/// The requests in progress with their purposes. Calls and reads get numbers from the same sequence.
#[derive(Debug)]
pub(crate) struct DriveRequests {
    purposes: HashMap<u64, Purpose>,
    last: u64,
}

impl DriveRequests {
    pub(crate) fn new() -> DriveRequests {
        DriveRequests { purposes: HashMap::default(), last: super::core::SCAN }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.purposes.is_empty()
    }

    /// Returns an unused number.
    pub(crate) fn next_id(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// Adds a request. Returns its number.
    pub(crate) fn add(&mut self, purpose: Purpose) -> u64 {
        let id = self.next_id();
        self.purposes.insert(id, purpose);
        id
    }

    /// Removes a request that has completed. Returns its purpose.
    pub(crate) fn complete(&mut self, id: u64) -> Option<Purpose> {
        self.purposes.remove(&id)
    }

    /// Lets a commit group wait for a write of staged data. Returns whether the group did not wait
    /// for it before.
    pub(crate) fn add_group(&mut self, id: u64, group: u64) -> bool {
        match self.purposes.get_mut(&id) {
            Some(Purpose::Stage { groups, .. }) if !groups.contains(&group) => {
                groups.push(group);
                true
            }
            _ => false,
        }
    }
}
