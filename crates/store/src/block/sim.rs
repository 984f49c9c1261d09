//! A drive that records its history, and a target on it that runs in the test's own thread. A seed
//! determines the order of events. There is no time: an event happens when the test asks for it.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use futures::channel::oneshot;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use uuid::Uuid;

use super::checkpoint::CheckpointPart;
use super::core::{Core, MemoryLimits};
use super::drive::Drive;
use super::index::Index;
use super::io::{IoDone, IoOp, IoRequest};
use super::messages::{BlockingWork, CoreCommand, CoreEvent, load};
use super::mount::mount;
use super::recovery::{TargetSizes, mkfs};
use crate::{Result, StoreFuture, StoreRequest, Submit};

/// An event in the history of a drive.
#[derive(Debug, Clone)]
enum Entry {
    /// From this event on, any part of the write may be on the drive.
    Submit {
        id: u64,
        offset: u64,
        data: Bytes,
    },
    Complete(u64),
    /// The flush covers all writes that completed before this event.
    FlushStart(u64),
    FlushDone(u64),
}

/// A drive in memory that records its complete history.
#[derive(Debug)]
pub struct RecordedDrive {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    image: Vec<u8>,
    history: Vec<Entry>,
    next: u64,
    /// Number of writes and flushes before the injected failures begin; `None` if no failures are
    /// injected.
    fail_after: Option<u64>,
    /// Number of failures that are still to be injected.
    fail_count: u64,
    /// Number of failures that were injected.
    failed: u64,
}

impl RecordedDrive {
    /// Creates a drive with the given content.
    #[must_use]
    pub fn new(image: Vec<u8>) -> Arc<RecordedDrive> {
        let state = State { image, history: Vec::new(), next: 0, fail_after: None, fail_count: 0, failed: 0 };
        Arc::new(RecordedDrive { state: Mutex::new(state) })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the current content, as if the power did not fail.
    #[must_use]
    pub fn image(&self) -> Vec<u8> {
        self.lock().image.clone()
    }

    /// Returns the number of events so far.
    pub fn position(&self) -> usize {
        self.lock().history.len()
    }

    /// Makes all writes and flushes fail after `count` more writes and flushes have succeeded.
    #[cfg(test)]
    pub(crate) fn fail_after(&self, count: u64) {
        let mut state = self.lock();
        (state.fail_after, state.fail_count) = (Some(count), u64::MAX);
    }

    /// Makes one write or flush fail after `count` more writes and flushes have succeeded.
    #[cfg(test)]
    pub(crate) fn fail_once_after(&self, count: u64) {
        let mut state = self.lock();
        (state.fail_after, state.fail_count) = (Some(count), 1);
    }

    /// Returns the number of failures that were injected.
    #[cfg(test)]
    pub(crate) fn failures(&self) -> u64 {
        self.lock().failed
    }

    #[cfg(test)]
    pub(crate) fn flip_bit(&self, bit: usize) {
        self.lock().image[bit / 8] ^= 1 << (bit % 8);
    }

    /// Returns the positions directly before and after the completion of each flush.
    #[cfg(test)]
    pub(crate) fn flush_boundaries(&self) -> Vec<usize> {
        let state = self.lock();
        let flushes = state.history.iter().enumerate().filter(|(_, e)| matches!(e, Entry::FlushDone(_)));
        flushes.flat_map(|(i, _)| [i, i + 1]).collect()
    }
}

impl State {
    fn may_fail(&mut self) -> io::Result<()> {
        if let Some(left) = &mut self.fail_after {
            if *left == 0 && self.fail_count > 0 {
                self.fail_count -= 1;
                self.failed += 1;
                return Err(io::Error::other("injected failure"));
            }
            *left = left.saturating_sub(1);
        }
        Ok(())
    }

    fn submit(&mut self, offset: u64, data: Bytes) -> u64 {
        self.next += 1;
        self.history.push(Entry::Submit { id: self.next, offset, data });
        self.next
    }

    fn complete(&mut self, id: u64, offset: u64, data: &[u8]) {
        self.image[offset as usize..offset as usize + data.len()].copy_from_slice(data);
        self.history.push(Entry::Complete(id));
    }
}

impl Drive for RecordedDrive {
    fn size(&self) -> u64 {
        self.lock().image.len() as u64
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        out.copy_from_slice(&self.lock().image[offset as usize..offset as usize + out.len()]);
        Ok(())
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut state = self.lock();
        state.may_fail()?;
        let id = state.submit(offset, Bytes::copy_from_slice(data));
        state.complete(id, offset, data);
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        let mut state = self.lock();
        state.may_fail()?;
        state.next += 1;
        let id = state.next;
        state.history.extend([Entry::FlushStart(id), Entry::FlushDone(id)]);
        Ok(())
    }
}

/// Creates the drive images that a power failure can leave. Request the images in ascending order
/// of their positions.
pub struct Crashes {
    history: Vec<Entry>,
    /// The drive's content with all writes that are certainly durable.
    base: Vec<u8>,
    at: usize,
    submitted: BTreeMap<u64, (u64, Bytes)>,
    completed: BTreeSet<u64>,
    covered: BTreeMap<u64, Vec<u64>>,
}

impl Crashes {
    /// Starts before the first event in the history of `drive`. `base` is the content of the drive
    /// at that time.
    pub fn new(drive: &RecordedDrive, base: Vec<u8>) -> Crashes {
        let history = drive.lock().history.clone();
        let (submitted, completed, covered) = (BTreeMap::new(), BTreeSet::new(), BTreeMap::new());
        Crashes { history, base, at: 0, submitted, completed, covered }
    }

    /// Returns an image as of `position`. It contains a random choice of the 512-byte sectors that
    /// were written but not yet flushed.
    pub fn image(&mut self, position: usize, rng: &mut StdRng) -> Vec<u8> {
        while self.at < position {
            match self.history[self.at].clone() {
                Entry::Submit { id, offset, data } => drop(self.submitted.insert(id, (offset, data))),
                Entry::Complete(id) => drop(self.completed.insert(id)),
                Entry::FlushStart(id) => {
                    drop(self.covered.insert(id, self.completed.iter().copied().collect()))
                }
                Entry::FlushDone(id) => {
                    for write in self.covered.remove(&id).unwrap_or_default() {
                        self.completed.remove(&write);
                        if let Some((offset, data)) = self.submitted.remove(&write) {
                            self.base[offset as usize..offset as usize + data.len()].copy_from_slice(&data);
                        }
                    }
                }
            }
            self.at += 1;
        }
        let mut image = self.base.clone();
        let style = rng.random_range(0..4);
        for (offset, data) in self.submitted.values() {
            let chance = match style {
                0 => 0.0,
                1 => 1.0,
                2 => f64::from(rng.random_range(0..=1u8)),
                _ => 0.5,
            };
            for (i, sector) in data.chunks(512).enumerate() {
                if rng.random_bool(chance) {
                    let at = *offset as usize + i * 512;
                    image[at..at + sector.len()].copy_from_slice(sector);
                }
            }
        }
        image
    }
}

/// A target whose requests complete in an order that a seed determines.
pub(crate) struct SimTarget {
    core: Core,
    index: Arc<Index>,
    drive: Arc<RecordedDrive>,
    rng: StdRng,
    requests: Vec<(IoRequest, u64)>,
    work: Vec<BlockingWork>,
}

impl SimTarget {
    pub(crate) fn mount(drive: &Arc<RecordedDrive>, seed: u64) -> Result<SimTarget> {
        let limits = MemoryLimits::new(2 << 20, 1 << 20);
        let shared: Arc<dyn Drive> = Arc::clone(drive) as Arc<dyn Drive>;
        let (core, index) = mount(&shared, None, &limits)?;
        let rng = StdRng::seed_from_u64(seed);
        Ok(SimTarget { core, index, drive: Arc::clone(drive), rng, requests: Vec::new(), work: Vec::new() })
    }

    /// Starts the work that the core requests.
    fn collect(&mut self) {
        for request in std::mem::take(&mut self.core.output.io) {
            let mut state = self.drive.lock();
            let id = match &request.op {
                IoOp::Write(pieces) => state.submit(request.offset, pieces.concat().into()),
                IoOp::Flush => {
                    state.next += 1;
                    let id = state.next;
                    state.history.push(Entry::FlushStart(id));
                    id
                }
                IoOp::Read(_) => 0,
            };
            drop(state);
            self.requests.push((request, id));
        }
        self.work.append(&mut self.core.output.work);
    }

    /// Processes one event. Returns `false` if no event is left.
    pub(crate) fn step(&mut self) -> bool {
        self.collect();
        let choices = self.requests.len() + self.work.len();
        if choices == 0 {
            if self.core.has_spare_time() {
                self.core.advance();
                return true;
            }
            if !self.core.wants_idle() {
                return false;
            }
            self.core.idle();
            return true;
        }
        let choice = self.rng.random_range(0..choices);
        let event = if choice < self.requests.len() {
            let (request, id) = self.requests.swap_remove(choice);
            CoreEvent::Io(IoDone { id: request.id, result: self.perform(request, id) })
        } else {
            match self.work.swap_remove(choice - self.requests.len()) {
                BlockingWork::Load { op, generation, needs } => {
                    let found = load(&self.index, &needs);
                    CoreEvent::Loaded { op, generation, needs, found }
                }
                BlockingWork::Checkpoint(checkpoint) => {
                    let whole = CheckpointPart::silent();
                    CoreEvent::Checkpointed(checkpoint.run(self.drive.as_ref(), &self.index, &whole))
                }
                BlockingWork::Discard(_) => return true,
            }
        };
        self.core.complete(event);
        self.core.advance();
        true
    }

    /// Requests a checkpoint, which starts as soon as possible.
    #[cfg(test)]
    pub(crate) fn request_checkpoint(&mut self) {
        self.core.commits.request_checkpoint();
        self.core.advance();
    }

    /// Processes one event other than a checkpoint. Returns `false` if no such event is left.
    #[cfg(test)]
    pub(crate) fn step_without_checkpoints(&mut self) -> bool {
        self.step_without(|work| matches!(work, BlockingWork::Checkpoint(_)))
    }

    /// Processes one event other than a load from the index. Returns `false` if no such event is
    /// left.
    #[cfg(test)]
    pub(crate) fn step_without_loads(&mut self) -> bool {
        self.step_without(|work| matches!(work, BlockingWork::Load { .. }))
    }

    #[cfg(test)]
    fn step_without(&mut self, is_held: impl Fn(&BlockingWork) -> bool) -> bool {
        self.collect();
        let (held, work) = std::mem::take(&mut self.work).into_iter().partition(is_held);
        self.work = work;
        let something = !self.requests.is_empty() || !self.work.is_empty();
        if something {
            self.step();
        }
        self.work.extend::<Vec<BlockingWork>>(held);
        something
    }

    /// Returns the number of checkpoints since the target was created.
    #[cfg(test)]
    pub(crate) fn checkpoints(&self) -> u64 {
        self.core.superblock.checkpoint
    }

    fn perform(&self, request: IoRequest, id: u64) -> io::Result<()> {
        let mut state = self.drive.lock();
        match request.op {
            IoOp::Read(mut segment) => {
                let start = request.offset as usize;
                let len = segment.len();
                segment.copy_from_slice(&state.image[start..start + len]);
            }
            IoOp::Write(pieces) => {
                state.may_fail()?;
                state.complete(id, request.offset, &pieces.concat());
            }
            IoOp::Flush => {
                state.may_fail()?;
                state.history.push(Entry::FlushDone(id));
            }
        }
        Ok(())
    }
}

/// A store on a [`SimTarget`]. When a caller waits for a reply, the store processes the events of
/// the target.
#[derive(Clone)]
pub struct SimStore {
    target: Arc<Mutex<SimTarget>>,
}

impl SimStore {
    /// Creates a small target with the given uuid on a drive with content `image`. Returns the new
    /// content of the drive.
    ///
    /// # Errors
    /// If the image is too small.
    pub fn format(image: Vec<u8>, uuid: Uuid) -> Result<Vec<u8>> {
        let drive = RecordedDrive::new(image);
        let shared: Arc<dyn Drive> = drive.clone();
        let sizes = TargetSizes { uuid: Some(uuid), log_bytes: Some(1 << 20), index_bytes: Some(4 << 20) };
        mkfs(&shared, &sizes, &mut |_, _| {})?;
        Ok(drive.image())
    }

    /// Mounts the target on a drive. `seed` determines the order of later events.
    ///
    /// # Errors
    /// Those of [`BlockStore::mount`](crate::BlockStore::mount).
    pub fn mount(drive: &Arc<RecordedDrive>, seed: u64) -> Result<SimStore> {
        Ok(SimStore { target: Arc::new(Mutex::new(SimTarget::mount(drive, seed)?)) })
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, SimTarget> {
        self.target.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of calls that wait for their turn, for a load, for free blocks or for a checkpoint.
    #[cfg(test)]
    pub(crate) fn queue_len(&self) -> usize {
        self.lock().core.queue_len()
    }

    /// Processes events until every queued transaction has been applied or has failed, durable or
    /// not.
    #[cfg(test)]
    pub(crate) fn settle_queue(&self) {
        let mut target = self.lock();
        while target.core.queue_len() > 0 {
            assert!(target.step(), "a queued call waits, but no event is left");
        }
    }
}

impl Submit for SimStore {
    type Reply = StoreFuture;

    fn submit(&self, request: StoreRequest) -> StoreFuture {
        let (reply, mut answer) = oneshot::channel();
        let mut target = self.lock();
        target.core.handle(CoreCommand::Request(request, reply));
        target.core.advance();
        drop(target);
        let this = self.clone();
        Box::pin(async move {
            loop {
                match answer.try_recv() {
                    Ok(Some(result)) => return result,
                    Ok(None) => {
                        assert!(this.lock().step(), "a call waits for its reply, but no event is left")
                    }
                    Err(_) => panic!("a call was dropped without a reply"),
                }
            }
        })
    }
}
