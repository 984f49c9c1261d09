//! Execution of calls, from their arrival to their reply.
//!
//! [`CallQueues`](super::queues::CallQueues) determines the order of the calls. A call that needs
//! data from the drive is tried again when the data has arrived.

use base::block::BLOCK;

use super::alloc::Purse;
use super::apply::{Apply, Context, Stop, TransactionEffect};
use super::core::{Core, CoreCall, Lifecycle, PendingCall, SCAN};
use super::extent::Extent;
use super::io::{IoDone, SplitBuffer};
use super::messages::{BlockingWork, CoreCommand, CoreEvent, NeedAnswer, ReplySender, refuse, send};
use super::need::Need;
use super::presence::Presence;
use super::reads::{Look, ReadRange};
use super::requests::Purpose;
use super::stages::PARKS_MAX;
use super::usage::{IndexSpace, SPREAD};
use super::view::Loaded;
use crate::{Area, CollectionId, Op, Result, StoreError, StoreRequest, Transaction, check_incarnation};

/// Maximum number of checkpoints that a call waits for before it fails for lack of index space. One
/// checkpoint may not suffice, because other calls may change the index again before this call's
/// turn.
const CHECKPOINTS_MAX: u32 = 8;

impl Core {
    /// Handles the result of one read of the scan of existing objects. The result shows the index
    /// at some time after the scan began. The filter already has every key that was put into the
    /// index since the scan began. `generation` is the generation of the index in which the read
    /// began.
    fn scanned(&mut self, found: Result<Vec<NeedAnswer>>, generation: u64) {
        match found.map(|mut answers| answers.pop()) {
            Ok(Some(NeedAnswer::Range(found))) => self.view.presence.scanned(found, generation),
            other => {
                // Calls that read the same part of the index will report the error.
                self.view.presence.scan_failed();
                tracing::warn!(?other, "the index cannot be scanned, so creating objects is slower");
            }
        }
    }

    /// Does one step of the scan of existing objects, if a step is due.
    fn scan_step(&mut self) {
        let pace = self.scan_pace();
        if self.lifecycle.is_open()
            && let Some(next) = self.view.scan_step(self.generation, pace)
        {
            self.scan(next);
        }
    }

    /// Accepts a command. Call [`advance`](Self::advance) after the last command of a batch.
    pub(crate) fn handle(&mut self, command: CoreCommand) {
        if !self.lifecycle.is_open() {
            let error = match &self.poisoned {
                Some(reason) => StoreError::Poisoned(reason.clone()),
                None => StoreError::Disconnected("the target is being unmounted".into()),
            };
            return refuse(command, &error);
        }
        match command {
            CoreCommand::StagePromised(id, len) => self.stage_promised(id, len),
            CoreCommand::StageRelease(id) => self.stage_release(id.0),
            CoreCommand::Request(request, reply) => self.request(request, reply),
        }
    }

    fn request(&mut self, request: StoreRequest, reply: ReplySender) {
        match request {
            StoreRequest::Stage { len } => self.stage(len, 0, reply),
            StoreRequest::StageWrite { stage, offset, payload } => {
                self.stage_write(stage, offset, payload, reply);
            }
            StoreRequest::StageRelease { stage } => {
                self.stage_release(stage.0);
                send(reply, Ok(()));
            }
            StoreRequest::Transact { transaction, incarnation } => {
                if let Err(e) = check_incarnation(incarnation, 0) {
                    return drop(reply.send(Err(e)));
                }
                let mut collections = vec![transaction.collection.clone()];
                for op in &transaction.ops {
                    if let Op::MoveRename { dst_collection: dst, .. } | Op::SplitCollection { dst, .. } = op
                        && !collections.contains(dst)
                    {
                        collections.push(dst.clone());
                    }
                }
                self.enqueue(CoreCall::Transaction(transaction, reply), collections);
            }
            StoreRequest::Read { cid, oid, offset, len, dest } => {
                let range = ReadRange { oid, offset, len, dest };
                self.enqueue(CoreCall::Look(cid, Look::Read(range), reply), Vec::new());
            }
            StoreRequest::Query { cid, query } => {
                self.enqueue(CoreCall::Look(cid, Look::Query(query), reply), Vec::new());
            }
            StoreRequest::Collections => self.enqueue(CoreCall::Collections(reply), Vec::new()),
            StoreRequest::Space => send(reply, Ok(self.space())),
            StoreRequest::Umount => {
                self.alloc.room().close();
                self.lifecycle = Lifecycle::Closing(reply);
                self.stages.ids().into_iter().for_each(|id| self.stage_release(id));
            }
        }
    }

    /// Accepts an event: the completion of a drive request, of a load or of a checkpoint. Call
    /// [`advance`](Self::advance) afterwards.
    pub(crate) fn complete(&mut self, event: CoreEvent) {
        match event {
            CoreEvent::Io(done) => self.io_done(done),
            CoreEvent::Loaded { op, generation, needs, found } => self.loaded(op, generation, needs, found),
            CoreEvent::CheckpointAdvanced(progress) => self.commits.checkpoint_advanced(progress),
            CoreEvent::Checkpointed(result) => self.checkpointed(result),
        }
    }

    /// Does all work that does not have to wait for an event, and one step of the scan of existing
    /// objects. If [`has_spare_time`](Self::has_spare_time), more steps are due.
    pub(crate) fn advance(&mut self) {
        loop {
            while let Some((op, pending)) = self.calls.next_runnable() {
                self.run(op, pending);
            }
            self.commit_step();
            self.reclaim();
            let (has_log_progress, has_space_progress) = self.commits.take_progress();
            if has_log_progress {
                self.calls.run_log_queue();
            }
            if has_space_progress {
                self.calls.run_starved();
                for waiting in self.stages.take_waiting() {
                    self.stage(waiting.len, waiting.parked, waiting.reply);
                }
            }
            if !has_log_progress && !has_space_progress {
                break;
            }
        }
        self.make_log_room();
        self.scan_step();
        self.try_close();
    }

    fn enqueue(&mut self, call: CoreCall, collections: Vec<CollectionId>) {
        let op = self.requests.next_id();
        let mut stages = Vec::new();
        if let CoreCall::Transaction(transaction, _) = &call {
            for id in transaction.ops.iter().filter_map(named_stage) {
                if let Some(stage) = self.stages.get_mut(id).filter(|s| !s.released && !stages.contains(&id))
                {
                    stage.users += 1;
                    stages.push(id);
                }
            }
        }
        self.calls.add(op, PendingCall::new(call, collections, stages));
    }

    /// Executes a call whose data is loaded and whose turn it is.
    fn run(&mut self, op: u64, mut pending: PendingCall) {
        match pending.call {
            CoreCall::Transaction(..) => self.run_transaction(op, pending),
            CoreCall::Collections(reply) => {
                send(reply, Ok(self.collections.keys().cloned().collect::<Vec<_>>()));
            }
            CoreCall::Look(cid, look, reply) => {
                self.calls.finished_look(op, &cid);
                let number = match pending.failed.take().or_else(|| self.doubt(&cid)) {
                    Some(error) => Err(error),
                    None => match self.collections.get(&cid) {
                        Some(number) => Ok(*number),
                        None => Err(StoreError::NoSuchCollection(cid.to_string())),
                    },
                };
                match number {
                    Err(error) => {
                        drop(look);
                        drop(reply.send(Err(error)));
                    }
                    Ok(number) => {
                        if let Some((look, reply, needs)) = self.look(number, look, reply, &pending.loaded) {
                            pending.call = CoreCall::Look(cid, look, reply);
                            self.wait_for(op, pending, needs);
                        }
                    }
                }
            }
        }
    }

    /// Returns an error if a collection must not be read because its state in memory may never
    /// become durable.
    fn doubt(&self, cid: &CollectionId) -> Option<StoreError> {
        let reason = self.poisoned.as_ref()?;
        let group = self.changed_in.get(cid)?;
        (!self.commits.is_durable(*group)).then(|| StoreError::Poisoned(reason.clone()))
    }

    fn run_transaction(&mut self, op: u64, mut pending: PendingCall) {
        let failed = pending.failed.take().or_else(|| self.poisoned.clone().map(StoreError::Poisoned));
        let CoreCall::Transaction(transaction, reply) = pending.call else { return };
        let purse = purse(&transaction);
        let result = match failed {
            Some(error) => Err(Stop::Fail(error)),
            None if self.calls.is_behind_in_log_queue(op) || !self.commits.admits(0) => Err(Stop::Log),
            None => self.apply(&transaction, &pending.loaded, &pending.stages),
        };
        pending.call = CoreCall::Transaction(transaction, reply);
        if let Err(Stop::Log) = result {
            return self.calls.wait_for_log(op, pending);
        }
        self.calls.leave_log_queue(op, &mut pending);
        match result {
            Err(Stop::Need(needs)) => self.wait_for(op, pending, needs),
            Err(Stop::Space(need)) if self.will_have(need, purse) && pending.parked < PARKS_MAX => {
                pending.parked += 1;
                self.calls.wait_for_space(op, pending);
            }
            Err(Stop::Checkpoint(_)) if self.may_ask_for_checkpoint(&mut pending) => {
                // The call is tried again when the checkpoint in progress has ended.
                if !self.commits.has_checkpoint() {
                    self.commits.request_checkpoint();
                }
                self.calls.wait_for_space(op, pending);
            }
            other => {
                self.calls.finished_transaction(op, &pending.collections);
                let CoreCall::Transaction(_, reply) = pending.call else { return };
                match other {
                    Ok((effect, record)) => {
                        let group = self.commits.next_group();
                        self.changed_in.extend(pending.collections.into_iter().map(|cid| (cid, group)));
                        self.commit(effect, record, reply);
                    }
                    Err(Stop::Fail(error) | Stop::Checkpoint(error)) => drop(reply.send(Err(error))),
                    Err(Stop::Space(need)) => drop(reply.send(Err(self.no_space(need, purse)))),
                    Err(Stop::Need(_) | Stop::Log) => {}
                }
                for id in pending.stages {
                    if let Some(stage) = self.stages.get_mut(id) {
                        stage.users -= 1;
                    }
                    self.drop_stage(id);
                }
            }
        }
    }

    /// Whether a call may wait for another checkpoint. Counts each checkpoint only once, even if
    /// the call is tried several times before the checkpoint ends.
    fn may_ask_for_checkpoint(&self, pending: &mut PendingCall) -> bool {
        if pending.asked_in.replace(self.generation) != Some(self.generation) {
            pending.checkpoints += 1;
        }
        pending.checkpoints <= CHECKPOINTS_MAX
    }

    /// Computes the effects of a transaction, and allocates its blocks. Returns the effects and the
    /// encoded record for the log.
    fn apply(
        &mut self,
        transaction: &Transaction,
        loaded: &Loaded,
        usable: &[u64],
    ) -> std::result::Result<(TransactionEffect, Vec<u8>), Stop> {
        let commits = &self.commits;
        let deferred = |block| commits.deferred(block);
        let context = Context {
            view: &self.view,
            loaded,
            collections: &self.collections,
            stages: &self.stages,
            usable_stages: usable,
            deferred: &deferred,
            data_blocks: self.superblock.data_blocks(),
            max_record: self.commits.log().max_record(),
        };
        let mut apply = Apply::new(context, &mut self.alloc, purse(transaction), self.next_nid);
        let result = apply.run(transaction);
        let (allocated, changed) = (std::mem::take(&mut apply.allocated), apply.changed_bytes());
        let result = result.and_then(|effect| {
            self.admit(transaction, changed)?;
            let record = effect.record.encode();
            if !self.commits.can_ever_admit(record.len()) {
                let (size, limit) = (record.len() as u64, self.commits.log().ring_bytes());
                let what = "size in bytes of the log record of a transaction".to_owned();
                return Err(StoreError::TooLarge { what, size, limit }.into());
            }
            if self.commits.admits(record.len()) { Ok((effect, record)) } else { Err(Stop::Log) }
        });
        if result.is_err() {
            allocated.into_iter().for_each(|e| self.alloc.free(e));
        }
        result
    }

    /// Returns the maximum memory of all changes that are not on the drive yet, in bytes. Very small
    /// changes take more memory than space in the log.
    pub(super) fn changes_limit(&self) -> u64 {
        self.superblock.log.len
    }

    /// Refuses a transaction that would leave too little free space in the index, or too little memory
    /// for changes. While a checkpoint runs, it may use only a part of the room, as of the log
    /// ([`LogSpace`](super::log_space::LogSpace)).
    ///
    /// Ordinary transactions must leave the [index reserve](IndexSpace::reserve) free. Ordinary
    /// transactions that remove objects must leave half of the index reserve free. Transactions that
    /// may use the reserve must leave a quarter of it free, which checkpoints need to rewrite pages.
    /// Transactions that only remove data need no space in the index.
    fn admit(&self, transaction: &Transaction, changed: usize) -> std::result::Result<(), Stop> {
        let shrinks = |op: &Op| {
            matches!(
                op,
                Op::Remove { .. } | Op::Truncate { .. } | Op::OmapClear { .. } | Op::OmapRemove { .. }
            ) || matches!(op, Op::OmapRemoveRange { .. } | Op::RemoveCollection | Op::RemoveXattrs { .. })
        };
        let IndexSpace { free, may_be_more, .. } = self.index_space;
        let ((_, active), frozen) = (self.view.active(), self.view.frozen());
        if self.commits.has_checkpoint() {
            // After a mount, the recovered changes may take all of the memory.
            let limit = self.changes_limit();
            let room = limit.saturating_sub(frozen.memory as u64).max(limit / 4);
            if (active.memory + changed) as u64 > self.commits.log().usable_now(room) {
                return Err(Stop::Log);
            }
        }
        let removes = transaction.ops.iter().any(|op| matches!(op, Op::Remove { .. } | Op::RemoveCollection));
        let part = match (purse(transaction), removes) {
            (Purse::Reserve, _) => 4,
            (Purse::Ordinary, true) => 2,
            (Purse::Ordinary, false) => 1,
        };
        let free = free.saturating_sub(self.index_space.reserve() / part);
        let room = free.saturating_sub(SPREAD * frozen.growth());
        let needed = SPREAD * (active.growth() + changed as u64);
        if needed <= self.commits.log().usable_now(room) || transaction.ops.iter().all(shrinks) {
            return Ok(());
        }
        if needed <= room {
            return Err(Stop::Log);
        }
        let needed = needed + SPREAD * frozen.growth();
        let error = StoreError::NoSpace { target: self.superblock.uuid, area: Area::Index, needed, free };
        // The growth by changes that are not on the drive yet is overestimated, so the transaction may
        // fit after a checkpoint.
        let may_fit_later = may_be_more || !self.view.is_unchanged();
        Err(if may_fit_later { Stop::Checkpoint(error) } else { error.into() })
    }

    /// Makes a transaction's effects visible and starts their writes.
    fn commit(&mut self, effect: TransactionEffect, record: Vec<u8>, reply: ReplySender) {
        self.commits.push(&effect, record, reply);
        for (cid, number) in effect.collections {
            match number {
                Some(number) => drop(self.collections.insert(cid, number)),
                None => drop(self.collections.remove(&cid)),
            }
        }
        self.next_nid = effect.record.next_nid;
        for (id, first, count) in &effect.taken {
            self.take_staged(id.0, *first, *count);
        }
        for extent in &effect.record.allocs {
            self.taken.set(*extent, true);
        }
        for extent in &effect.record.frees {
            self.taken.set(*extent, false);
        }
        let leaves = effect.leaves.into_iter().map(|(key, leaf)| (key, Some(leaf.into())));
        self.view.apply(effect.record.puts.into_iter().chain(leaves));
        if self.view.presence_outgrown() {
            self.scan(Presence::first_piece());
        }
    }

    fn wait_for(&mut self, op: u64, mut pending: PendingCall, needs: Vec<Need>) {
        let (blocks, index): (Vec<_>, Vec<_>) = needs.into_iter().partition(|n| matches!(n, Need::Block(_)));
        for need in blocks {
            if let Need::Block(block) = need {
                pending.loading += 1;
                self.read_block(op, block);
            }
        }
        if !index.is_empty() {
            pending.loading += 1;
            metrics::counter!("outboard_store_index_loads_total").increment(1);
            self.output.work.push(BlockingWork::Load { op, generation: self.generation, needs: index });
        }
        self.calls.wait_for_loads(op, pending);
    }

    /// Makes the target refuse writes if a read of the index has found that an earlier write has failed.
    /// Returns the error of the read.
    fn poisoned_by(&mut self, error: StoreError) -> StoreError {
        let StoreError::Poisoned(reason) = error else { return error };
        self.poison(&reason);
        StoreError::Io(format!("index: {reason}"))
    }

    fn loaded(&mut self, op: u64, generation: u64, needs: Vec<Need>, found: Result<Vec<NeedAnswer>>) {
        let found = found.map_err(|error| self.poisoned_by(error));
        if op == SCAN {
            return self.scanned(found, generation);
        }
        if generation != self.generation {
            self.output.work.push(BlockingWork::Load { op, generation: self.generation, needs });
            return;
        }
        let Some(pending) = self.calls.get_mut(op) else { return };
        pending.loading -= 1;
        match found {
            Err(error) => pending.failed = Some(error),
            Ok(answers) => {
                for (need, answer) in needs.into_iter().zip(answers) {
                    match (need, answer) {
                        (Need::Key(key), NeedAnswer::Key(value)) => {
                            self.view.remember(key.clone(), value.clone());
                            pending.loaded.insert_key(key, value);
                        }
                        (Need::Range { from, to, .. }, NeedAnswer::Range(found)) => {
                            pending.loaded.insert_range(from, to, found);
                        }
                        _ => {}
                    }
                }
            }
        }
        self.calls.run_again(op);
    }

    fn read_block(&mut self, op: u64, block: u64) {
        let (whole, mut segments) = SplitBuffer::split(self.buffer(BLOCK as usize), &[BLOCK as usize]);
        let id = self.requests.add(Purpose::Block { op, block, whole });
        if let Some(segment) = segments.pop() {
            self.submit_read(id, Extent { start: block, len: 1 }, segment);
        }
    }

    fn io_done(&mut self, IoDone { id, result }: IoDone) {
        let Some(purpose) = self.requests.complete(id) else { return };
        match purpose {
            Purpose::Read { read } => self.read_done(read, result),
            Purpose::Block { op, block, whole } => {
                let Some(pending) = self.calls.get_mut(op) else { return };
                pending.loading -= 1;
                match (result, whole.into_buffer()) {
                    (Ok(()), Some(buffer)) => drop(pending.loaded.blocks.insert(block, buffer.freeze())),
                    (Err(e), _) => {
                        pending.failed = Some(StoreError::Io(format!("reading block {block} failed: {e}")))
                    }
                    (Ok(()), None) => {
                        pending.failed = Some(StoreError::Io("a read buffer is still in use".into()))
                    }
                }
                self.calls.run_again(op);
            }
            Purpose::Data { blocks, group } => {
                self.write_done(blocks, &result);
                self.commits.io_done(group);
            }
            Purpose::Stage { blocks, write, groups } => {
                self.write_done(blocks, &result);
                groups.into_iter().for_each(|group| self.commits.io_done(group));
                self.stage_write_done(write, id, &result);
            }
            Purpose::Log { group } => {
                if let Err(e) = &result {
                    self.poison(&format!("write of the log ({e})"));
                }
                self.commits.io_done(group);
            }
            Purpose::Flush => match result {
                Ok(()) => self.commits.flushed(),
                Err(e) => self.poison(&format!("flush ({e})")),
            },
        }
    }

    fn write_done(&mut self, blocks: Extent, result: &std::io::Result<()>) {
        self.output.io.extend(self.reads.write_completed(blocks));
        if let Err(e) = result {
            self.poison(&format!("write ({e})"));
        }
    }

    /// Records in the log that the whole log was flushed. The driver calls this method after a
    /// short idle time.
    pub(crate) fn idle(&mut self) {
        if self.commits.wants_witness() && self.poisoned.is_none() {
            self.form_group();
        }
        self.advance();
    }
}

/// Returns the purse of a transaction, which says whether it may use the reserve.
fn purse(transaction: &Transaction) -> Purse {
    if transaction.uses_reserve { Purse::Reserve } else { Purse::Ordinary }
}

fn named_stage(op: &Op) -> Option<u64> {
    match op {
        Op::Write { source: crate::WriteSource::Staged { stage, .. }, .. } => Some(stage.0),
        _ => None,
    }
}
