//! Calls on stages: allocation, writes and release.

use base::block::{BLOCK, Payload};

use super::alloc::Purse;
use super::core::Core;
use super::messages::{ReplySender, send};
use super::requests::Purpose;
use super::staged::{Stage, StageWrite, StagedBlock, WaitingStage};
use crate::stage::check_stage_write;
use crate::{Area, StageId, StoreError};

/// Maximum number of times that a call waits for free blocks before it fails. Without a limit,
/// other calls could take the freed blocks again and again, and later calls of the same collection
/// would queue behind the waiting call.
pub(super) const PARKS_MAX: u32 = 64;

impl Core {
    /// Allocates the blocks that were promised to a stage.
    pub(super) fn stage_promised(&mut self, id: StageId, len: u64) {
        let extents = self.alloc.alloc_promised(len.div_ceil(BLOCK));
        self.stages.insert(id, Stage::new(len, extents));
    }

    /// Allocates a stage. `parked` is the number of times that the call has already waited for
    /// blocks.
    pub(super) fn stage(&mut self, len: u64, parked: u32, reply: ReplySender) {
        if let Some(reason) = &self.poisoned {
            return drop(reply.send(Err(StoreError::Poisoned(reason.clone()))));
        }
        if len == 0 {
            return drop(
                reply.send(Err(StoreError::InvalidArgument("a stage must have at least one byte".into()))),
            );
        }
        let blocks = len.div_ceil(BLOCK);
        match self.alloc.alloc(blocks, Purse::Ordinary) {
            Some(extents) => {
                let id = self.stages.add(Stage::new(len, extents));
                if reply.send(Ok(id.into())).is_err() {
                    // The caller no longer waits, and nothing else knows the stage.
                    self.stage_release(id.0);
                }
            }
            None if self.will_have(blocks, Purse::Ordinary) && parked < PARKS_MAX => {
                self.stages.wait(WaitingStage { len, parked: parked + 1, reply });
            }
            None => drop(reply.send(Err(self.no_space(blocks, Purse::Ordinary)))),
        }
    }

    /// Whether at least `blocks` blocks will be free when all freed blocks have left the
    /// quarantine. Waiting calls are tried again whenever blocks leave the quarantine.
    pub(super) fn will_have(&self, blocks: u64, purse: Purse) -> bool {
        let on_their_way = self.commits.reclaimable();
        on_their_way > 0 && self.alloc.free_blocks(purse, on_their_way) >= blocks
    }

    pub(super) fn no_space(&self, blocks: u64, purse: Purse) -> StoreError {
        let free = self.alloc.free_blocks(purse, self.commits.reclaimable()) * BLOCK;
        let target = self.superblock.uuid;
        StoreError::NoSpace { target, area: Area::Data, needed: blocks * BLOCK, free }
    }

    pub(super) fn stage_write(&mut self, id: StageId, offset: u64, payload: Payload, reply: ReplySender) {
        if let Some(reason) = &self.poisoned {
            return drop(reply.send(Err(StoreError::Poisoned(reason.clone()))));
        }
        let Some(stage) = self.stages.get_mut(id.0).filter(|s| !s.released) else {
            return drop(reply.send(Err(StoreError::NoSuchStage(id.0))));
        };
        if let Err(error) = check_stage_write(stage.len, offset, &payload) {
            return drop(reply.send(Err(error)));
        }
        let (first, count) = (offset / BLOCK, payload.checksums().len() as u64);
        let range = first as usize..(first + count) as usize;
        if stage.blocks[range.clone()].contains(&StagedBlock::Taken) {
            let error = StoreError::InvalidArgument("the staged bytes already belong to an object".into());
            return drop(reply.send(Err(error)));
        }
        let runs = stage.runs(first, count);
        if runs.iter().any(|run| self.reads.is_being_written(*run)) {
            let error = StoreError::InvalidArgument(
                "an earlier write of the same staged bytes is still in progress".into(),
            );
            return drop(reply.send(Err(error)));
        }
        let (data, checksums) = payload.into_parts();
        let last = data.len() - (checksums.len() - 1).min(data.len()) * BLOCK as usize;
        for (slot, (i, crc)) in stage.blocks[range].iter_mut().zip(checksums.iter().enumerate()) {
            let len = if i + 1 == checksums.len() { last } else { BLOCK as usize };
            *slot = StagedBlock::Written(base::block::pad_to_block(*crc, len));
        }
        let write = self.requests.next_id();
        let mut left = 0;
        let mut rest = data;
        for run in runs {
            let part = rest.split_to(rest.len().min((run.len * BLOCK) as usize));
            for (blocks, pieces) in self.pieces(run.start, &part) {
                left += 1;
                let io =
                    self.submit_write(blocks, pieces, Purpose::Stage { blocks, write, groups: Vec::new() });
                if let Some(stage) = self.stages.get_mut(id.0) {
                    stage.in_flight.insert(io);
                }
            }
        }
        if left == 0 {
            return send(reply, Ok(()));
        }
        self.stages.add_write(write, StageWrite { stage: id.0, left, reply });
    }

    pub(super) fn stage_write_done(&mut self, write: u64, io: u64, result: &std::io::Result<()>) {
        let Some((stage, reply)) = self.stages.write_completed(write, io) else { return };
        if let Some(reply) = reply {
            let result = match (&self.poisoned, result) {
                (None, Ok(())) => Ok(()),
                (Some(reason), _) => Err(StoreError::Poisoned(reason.clone())),
                (None, Err(e)) => Err(StoreError::Io(e.to_string())),
            };
            send(reply, result);
        }
        self.drop_stage(stage);
    }

    /// Marks a stage as released. The blocks that no transaction has named become free when all
    /// writes to the stage have completed and no queued transaction names the stage.
    pub(super) fn stage_release(&mut self, id: u64) {
        if let Some(stage) = self.stages.get_mut(id) {
            stage.released = true;
        }
        self.drop_stage(id);
    }

    pub(super) fn drop_stage(&mut self, id: u64) {
        for extent in self.stages.remove_unused(id) {
            self.alloc.free(extent);
            self.commits.blocks_freed();
        }
    }

    /// Records that blocks of a stage now belong to an object. The group with the transaction waits
    /// for all writes to the stage that are in progress.
    pub(super) fn take_staged(&mut self, id: u64, first: u64, count: u64) {
        let Some(stage) = self.stages.get_mut(id) else { return };
        stage.blocks[first as usize..(first + count) as usize].fill(StagedBlock::Taken);
        let group = self.commits.next_group();
        for io in &stage.in_flight {
            if self.requests.add_group(*io, group) {
                self.commits.add_io(group);
            }
        }
    }
}
