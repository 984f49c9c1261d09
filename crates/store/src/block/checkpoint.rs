//! Checkpoints. A checkpoint has a position in the log, and applies to the index all changes that
//! the log records before this position.

use std::collections::BTreeMap;
use std::sync::Arc;

use base::block::BLOCK;
use bytes::Bytes;

use super::changes::Changes;
use super::drive::Drive;
use super::index::Index;
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

/// Receives the progress of a checkpoint, in thousandths. Any thread may call it.
pub(crate) type CheckpointReport = Arc<dyn Fn(u64) + Send + Sync>;

/// A part of a checkpoint, for reports of its progress.
#[derive(Clone)]
pub(crate) struct CheckpointPart {
    report: CheckpointReport,
    /// Progress of the checkpoint at the begin and at the end of the part, in thousandths.
    from: u64,
    to: u64,
}

impl std::fmt::Debug for CheckpointPart {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CheckpointPart").field("from", &self.from).field("to", &self.to).finish()
    }
}

impl CheckpointPart {
    /// The whole checkpoint.
    pub(crate) fn whole(report: CheckpointReport) -> CheckpointPart {
        CheckpointPart { report, from: 0, to: 1000 }
    }

    /// A checkpoint whose progress is of no interest.
    pub(crate) fn silent() -> CheckpointPart {
        CheckpointPart::whole(Arc::new(|_| {}))
    }

    /// The part from `from` to `to`, which are shares of this part in thousandths.
    pub(crate) fn part(&self, from: u64, to: u64) -> CheckpointPart {
        CheckpointPart { report: Arc::clone(&self.report), from: self.at(from, 1000), to: self.at(to, 1000) }
    }

    fn at(&self, done: u64, total: u64) -> u64 {
        self.from + (self.to - self.from) * done.min(total) / total.max(1)
    }

    /// Reports that `done` of `total` steps of this part are complete.
    pub(crate) fn report(&self, done: u64, total: u64) {
        (self.report)(self.at(done, total));
    }

    /// Like [`report`](Self::report), for many small steps: reports only the last step of each
    /// hundredth of the checkpoint. The caller reports each step.
    pub(crate) fn step(&self, done: u64, total: u64) {
        let hundredth = |done| self.at(done, total) / 10;
        if done > 0 && hundredth(done) > hundredth(done - 1) {
            self.report(done, total);
        }
    }
}

impl Checkpoint {
    /// Runs the checkpoint and blocks the calling thread. Reports the progress to `whole`. A crash at
    /// any time is harmless, because the log keeps all changes until the index has committed them.
    ///
    /// # Errors
    /// If the drive fails, or the index is damaged or full. The index may then have some of the
    /// changes, but the log still has all of them.
    pub(crate) fn run(
        mut self,
        drive: &dyn Drive,
        index: &Index,
        whole: &CheckpointPart,
    ) -> Result<CheckpointOutcome> {
        self.write_deferred(drive)?;
        let bitmap: Changes =
            self.bitmap.drain(..).map(|(page, bytes)| (key::bitmap(page), Some(bytes))).collect();
        index.apply(&self.changes, &bitmap, &self.meta, whole)?;
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
