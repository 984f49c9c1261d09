//! The reads and the writes of blocks that are in progress.

use std::collections::BTreeMap;

use base::collections::HashMap;
use base::mem::ArenaBuf;

use super::extent::Extent;
use super::io::{IoRequest, SplitBuffer};
use super::messages::{ReplySender, send};
use crate::{CollectionId, MetadataQuery, ObjectId, ReadData, StoreError, Transaction};

/// A range of an object to read.
#[derive(Debug)]
pub(crate) struct ReadRange {
    pub(crate) oid: ObjectId,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) dest: Option<ArenaBuf>,
}

/// A read or query of one collection.
#[derive(Debug)]
pub(crate) enum Look {
    Read(ReadRange),
    Query(MetadataQuery),
}

impl Look {
    /// The object that the call concerns; `None` for a query about a collection.
    pub(crate) fn oid(&self) -> Option<&ObjectId> {
        match self {
            Look::Read(range) => Some(&range.oid),
            Look::Query(query) => query.oid(),
        }
    }
}

/// A read that waits for requests to the drive.
#[derive(Debug)]
pub(super) struct PendingRead {
    pub(super) reply: ReplySender,
    pub(super) data: ReadData,
    /// Number of bytes to return.
    pub(super) len: usize,
    pub(super) wholes: Vec<SplitBuffer>,
    /// The caller's destination if the drive cannot write to it directly. The data is copied to
    /// this destination when the read is complete.
    pub(super) copy_to: Option<ArenaBuf>,
    pub(super) left: usize,
    pub(super) period: u64,
    pub(super) failed: Option<StoreError>,
}

/// The reads and queries of objects that wait for an earlier transaction or for metadata. A later
/// transaction that changes the object of such a call waits for the call, because the call must not
/// see the transaction. Other transactions do not wait.
#[derive(Debug, Default)]
pub(crate) struct LoadingLooks {
    /// Call numbers and objects, by collection.
    looks: HashMap<CollectionId, Vec<(u64, ObjectId)>>,
}

impl LoadingLooks {
    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.looks.is_empty()
    }

    pub(crate) fn insert(&mut self, op: u64, cid: &CollectionId, oid: &ObjectId) {
        self.looks.entry(cid.clone()).or_default().push((op, oid.clone()));
    }

    /// Removes a read or query. Returns whether it was there.
    pub(crate) fn remove(&mut self, op: u64, cid: &CollectionId) -> bool {
        let Some(looks) = self.looks.get_mut(cid) else { return false };
        let Some(at) = looks.iter().position(|(look, _)| *look == op) else { return false };
        looks.swap_remove(at);
        if looks.is_empty() {
            self.looks.remove(cid);
        }
        true
    }

    /// Whether transaction `op` on these collections must wait for an earlier read or query.
    pub(crate) fn hold_up(&self, op: u64, transaction: &Transaction, collections: &[CollectionId]) -> bool {
        !self.looks.is_empty()
            && collections.iter().any(|cid| {
                let looks = self.looks.get(cid);
                looks.is_some_and(|looks| {
                    looks.iter().any(|(look, oid)| *look < op && transaction.changes(cid, oid))
                })
            })
    }
}

/// The reads and the writes of blocks that are in progress. A read of a block waits for writes of
/// that block.
#[derive(Debug, Default)]
pub(crate) struct BlockAccess {
    pub(super) reads: BTreeMap<u64, PendingRead>,
    /// Number of the current period. Freed blocks stay in quarantine until all reads that started
    /// in the period of their release, or earlier, have ended.
    pub(super) period: u64,
    /// Number of reads in progress, by the period in which they started.
    pub(super) periods: BTreeMap<u64, usize>,
    /// Blocks that are being written: first block of each run, and the run's length in blocks.
    pub(super) writing: BTreeMap<u64, u64>,
    pub(super) held_back: Vec<(Extent, IoRequest)>,
}

impl BlockAccess {
    pub(crate) fn is_empty(&self) -> bool {
        self.reads.is_empty()
    }

    /// Starts a new period. Returns the number of the previous period.
    pub(crate) fn next_period(&mut self) -> u64 {
        self.period += 1;
        self.period - 1
    }

    /// Returns the period of the oldest read in progress.
    pub(crate) fn oldest_period(&self) -> Option<u64> {
        self.periods.keys().next().copied()
    }

    pub(crate) fn write_started(&mut self, blocks: Extent) {
        self.writing.insert(blocks.start, blocks.len);
    }

    pub(crate) fn is_being_written(&self, blocks: Extent) -> bool {
        let before = self.writing.range(..blocks.end()).next_back();
        before.is_some_and(|(start, len)| start + len > blocks.start)
    }

    /// Records that a write has completed. Returns the reads that no longer need to wait.
    pub(crate) fn write_completed(&mut self, blocks: Extent) -> Vec<IoRequest> {
        self.writing.remove(&blocks.start);
        let held = std::mem::take(&mut self.held_back);
        let (wait, go): (Vec<_>, Vec<_>) = held.into_iter().partition(|(e, _)| self.is_being_written(*e));
        self.held_back = wait;
        go.into_iter().map(|(_, request)| request).collect()
    }

    /// Holds a read back if its blocks are being written. Otherwise returns the read.
    pub(crate) fn hold_back(&mut self, blocks: Extent, request: IoRequest) -> Option<IoRequest> {
        if self.is_being_written(blocks) {
            self.held_back.push((blocks, request));
            return None;
        }
        Some(request)
    }
}

impl PendingRead {
    /// Replies to the read with its data or its error.
    pub(super) fn finish(self) {
        let PendingRead { reply, mut data, len, wholes, copy_to, failed, .. } = self;
        if let Some(error) = failed {
            return drop(reply.send(Err(error)));
        }
        let mut left = len;
        for whole in wholes {
            let Some(mut buffer) = whole.into_buffer() else {
                return drop(reply.send(Err(StoreError::Io("a read buffer is still in use".into()))));
            };
            buffer.truncate(left);
            left -= buffer.len();
            data.data.push(buffer.freeze());
        }
        if let Some(mut dest) = copy_to {
            let mut at = 0;
            for part in data.data.drain(..) {
                dest[at..at + part.len()].copy_from_slice(&part);
                at += part.len();
            }
            dest.truncate(at);
            data.data.push(dest.freeze());
        }
        send(reply, Ok(data));
    }
}
