//! Checkpoints. A checkpoint has a position in the log, and applies to the index all changes that
//! the log records before this position.

use std::collections::BTreeMap;
use std::sync::Arc;

use base::block::BLOCK;
use bytes::Bytes;

use super::drive::Drive;
use super::index::{Changes, Index};
use super::records::{Meta, key};
use super::superblock::Superblock;
use super::usage::IndexSpace;
use crate::Result;

/// Maximum number of blocks per write.
const RUN_BLOCKS: usize = 256;

/// Content of blocks that was not written to the data area yet, by block number.
pub(crate) type Deferred = BTreeMap<u64, Bytes>;

/// The state of a target at one position of the log, which the checkpoint writes to the drive.
#[derive(Debug)]
pub(crate) struct Checkpoint {
    pub(crate) changes: Arc<Changes>,
    pub(crate) bitmap: Vec<(u64, Bytes)>,
    pub(crate) deferred: Arc<Deferred>,
    pub(crate) meta: Meta,
    pub(crate) superblock: Superblock,
}

/// Result of a checkpoint: the index's meta record, the written superblock, and the space of the
/// index.
pub(crate) type CheckpointOutcome = (Meta, Superblock, IndexSpace);

impl Checkpoint {
    /// Runs the checkpoint and blocks the calling thread. A crash at any time is harmless, because
    /// the log keeps all changes until the index has committed them.
    ///
    /// # Errors
    /// If the drive fails, or the index is damaged or full. The index may then have some of the
    /// changes, but the log still has all of them.
    pub(crate) fn run(mut self, drive: &dyn Drive, index: &Index) -> Result<CheckpointOutcome> {
        self.write_deferred(drive)?;
        let bitmap: Changes =
            self.bitmap.drain(..).map(|(page, bytes)| (key::bitmap(page), Some(bytes))).collect();
        index.apply(&self.changes, &bitmap, &self.meta)?;
        self.superblock.index_header = index.header_number();
        self.superblock.write(drive)?;
        Ok((self.meta, self.superblock, index.space()))
    }

    /// Writes the deferred blocks to the data area and makes them durable. Writes adjacent blocks
    /// together.
    fn write_deferred(&self, drive: &dyn Drive) -> Result<()> {
        if self.deferred.is_empty() {
            return Ok(());
        }
        let mut run: (u64, Vec<u8>) = (0, Vec::new());
        let write = |(start, data): &(u64, Vec<u8>)| match data.is_empty() {
            true => Ok(()),
            false => drive.write_at(self.superblock.data.offset + start * BLOCK, data),
        };
        for (&block, content) in &*self.deferred {
            let len = run.1.len() / BLOCK as usize;
            if run.0 + len as u64 != block || len >= RUN_BLOCKS {
                write(&run)?;
                run = (block, Vec::new());
            }
            run.1.extend_from_slice(content);
        }
        write(&run)?;
        Ok(drive.flush()?)
    }
}
