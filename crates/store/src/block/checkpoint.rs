//! Checkpoints: bring the index up to a position of the log.

use std::collections::BTreeMap;
use std::sync::Arc;

use base::block::BLOCK;
use bytes::Bytes;

use super::drive::Drive;
use super::index::{Changes, Index};
use super::records::{Meta, key};
use super::superblock::Superblock;
use crate::Result;

/// Most blocks written at once.
const RUN_BLOCKS: usize = 256;

/// Content of blocks that the data region does not have yet.
pub(crate) type Deferred = BTreeMap<u64, Bytes>;

/// State at one position of the log, set apart to be brought to the drive.
#[derive(Debug)]
pub(crate) struct Checkpoint {
    pub(crate) changes: Arc<Changes>,
    pub(crate) bitmap: Vec<(u64, Bytes)>,
    pub(crate) deferred: Arc<Deferred>,
    pub(crate) meta: Meta,
    pub(crate) superblock: Superblock,
}

/// What a checkpoint leaves: where the index stands, the superblock as written, bytes of the index in all and free.
pub(crate) type CheckpointOutcome = (Meta, Superblock, (u64, u64));

impl Checkpoint {
    /// Does it. Blocks; may be interrupted anywhere: until the index has committed, the log still has everything.
    ///
    /// # Errors
    /// If the drive fails or the index is damaged or full. The state on the drive is then the one before or after.
    pub(crate) fn run(mut self, drive: &dyn Drive, index: &Index) -> Result<CheckpointOutcome> {
        self.write_deferred(drive)?;
        let bitmap: Changes =
            self.bitmap.drain(..).map(|(page, bytes)| (key::bitmap(page), Some(bytes))).collect();
        index.apply(&self.changes, &bitmap, &self.meta)?;
        self.superblock.write(drive)?;
        Ok((self.meta, self.superblock, index.space()))
    }

    /// Writes deferred blocks to their places and makes them durable, neighbours together.
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
