//! Reads and writes of blocks in progress.

use std::collections::BTreeMap;

use base::mem::ArenaBuf;

use super::extent::Extent;
use super::io::{IoRequest, SplitBuffer};
use super::messages::{ReplySender, send};
use crate::{MetadataQuery, ObjectId, ReadData, StoreError};

/// A range of an object that is to be read.
#[derive(Debug)]
pub(crate) struct ReadRange {
    pub(crate) oid: ObjectId,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) dest: Option<ArenaBuf>,
}

/// A request about one collection that changes nothing.
#[derive(Debug)]
pub(crate) enum Look {
    Read(ReadRange),
    Query(MetadataQuery),
}

/// A read that waits for the drive.
#[derive(Debug)]
pub(super) struct PendingRead {
    pub(super) reply: ReplySender,
    pub(super) data: ReadData,
    /// Bytes to be returned.
    pub(super) len: usize,
    pub(super) wholes: Vec<SplitBuffer>,
    /// Where the data goes in the end, if the drive could not put it there.
    pub(super) copy_to: Option<ArenaBuf>,
    pub(super) left: usize,
    pub(super) period: u64,
    pub(super) failed: Option<StoreError>,
}

/// Reads and writes of blocks that are under way, and how they keep out of each other's way.
#[derive(Debug, Default)]
pub(crate) struct BlockAccess {
    pub(super) reads: BTreeMap<u64, PendingRead>,
    pub(super) period: u64,
    pub(super) periods: BTreeMap<u64, usize>,
    /// Blocks that are being written: first block to length and number of writes.
    pub(super) writing: BTreeMap<u64, u64>,
    pub(super) held_back: Vec<(Extent, IoRequest)>,
}

impl BlockAccess {
    pub(crate) fn is_empty(&self) -> bool {
        self.reads.is_empty()
    }

    /// Starts a new period; returns the last.
    pub(crate) fn next_period(&mut self) -> u64 {
        self.period += 1;
        self.period - 1
    }

    /// The period of the oldest read under way.
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

    /// A write has completed: returns the reads that waited for it.
    pub(crate) fn write_completed(&mut self, blocks: Extent) -> Vec<IoRequest> {
        self.writing.remove(&blocks.start);
        let held = std::mem::take(&mut self.held_back);
        let (wait, go): (Vec<_>, Vec<_>) = held.into_iter().partition(|(e, _)| self.is_being_written(*e));
        self.held_back = wait;
        go.into_iter().map(|(_, request)| request).collect()
    }

    /// Keeps a read back while its blocks are being written.
    pub(crate) fn hold_back(&mut self, blocks: Extent, request: IoRequest) -> Option<IoRequest> {
        if self.is_being_written(blocks) {
            self.held_back.push((blocks, request));
            return None;
        }
        Some(request)
    }
}

impl PendingRead {
    /// Answers the read.
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
