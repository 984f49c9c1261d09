//! [`SimBackend`]: the I/O ring and the workers of a target on a simulated drive.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use base::block::BLOCK_SIZE;
use base::clock::Instant;
use base::fault::{Action, Faults, Site};
use base::mem::Arena;
use rand::Rng;
use tokio::time::Sleep;

use super::super::backend::DriverBackend;
use super::super::checkpoint::{Checkpoint, CheckpointOutcome, CheckpointPart};
use super::super::drive::Drive;
use super::super::index::Index;
use super::super::io::{IoDone, IoOp, IoRequest, Segment};
use super::super::mailbox::Mailbox;
use super::super::messages::{BlockingWork, CoreEvent, load};
use super::state::{Completed, State, io_error};
use super::{SimDrive, image};
use crate::{Result, StoreError};

/// A mount's access to a simulated drive. Its access ends when the mount ends.
#[derive(Debug)]
pub(in crate::block) struct SimMount {
    drive: Arc<SimDrive>,
    number: u64,
    faults: Faults,
}

impl SimMount {
    /// Begins a mount; `None` while another mount is in progress.
    pub(super) fn begin(drive: &Arc<SimDrive>, faults: Faults) -> Option<SimMount> {
        let mut state = drive.now();
        if state.mounted {
            return None;
        }
        // The earlier mount has ended without waiting for its requests.
        while let Some(request) = state.take_in_flight() {
            state.complete_last(request);
        }
        state.end_mount();
        state.mounted = true;
        let number = state.mount;
        drop(state);
        Some(SimMount { drive: Arc::clone(drive), number, faults })
    }

    /// Fails if an injected fault hits this write or flush.
    fn injected(&self) -> io::Result<()> {
        match self.faults.hit(Site::DriveWrite) {
            Some(Action::Fail) => Err(io_error()),
            _ => Ok(()),
        }
    }

    /// Fails if the mount has lost its access to the drive.
    pub(super) fn check(&self) -> io::Result<()> {
        self.drive.lock().check_access(self.number)
    }

    /// Waits until the drive has executed the mount's blocking operations.
    pub(super) async fn drained(&self) {
        while let Some(due) = self.next_due() {
            tokio::time::sleep_until(due).await;
        }
    }

    /// Returns the time at which the drive completes a request, while the queue is not empty.
    fn next_due(&self) -> Option<Instant> {
        let mut state = self.drive.now();
        if state.mount != self.number || state.queue.entered == state.queue.executed {
            return None;
        }
        state.next_due(Instant::now())
    }
}

impl Drop for SimMount {
    fn drop(&mut self) {
        let mut state = self.drive.lock();
        if state.mount == self.number {
            state.mounted = false;
        }
    }
}

impl Drive for SimMount {
    fn size(&self) -> u64 {
        self.drive.size()
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.drive.lock().read_now(self.number, offset, out)
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.injected()?;
        self.drive.lock().write_later(self.number, offset, data)
    }

    fn flush(&self) -> io::Result<()> {
        self.injected()?;
        self.drive.lock().flush_later(self.number)
    }
}

/// Work that begins or ends at a certain time.
#[derive(Debug)]
enum SimJob {
    Load(BlockingWork),
    Loaded(CoreEvent),
    Checkpoint(Box<Checkpoint>),
}

/// A checkpoint whose operations are in the drive's queue.
struct WrittenCheckpoint {
    /// Number of operations that the drive must have executed.
    operations: u64,
    /// The reports of the checkpoint that were not handed over yet, in their order: the number of
    /// operations that the drive must have executed before, and the progress in thousandths.
    reports: Vec<(u64, u64)>,
    result: Result<CheckpointOutcome>,
}

/// The I/O ring and the workers of a target on a simulated drive. Everything runs in the driver's
/// task.
pub(in crate::block) struct SimBackend {
    mount: Arc<SimMount>,
    index: Arc<Index>,
    mailbox: Mailbox,
    /// The memory of the reads in progress, by their ids.
    reads: BTreeMap<u64, Segment>,
    /// Ids of the requests in progress.
    in_flight: BTreeSet<u64>,
    done: Vec<IoDone>,
    jobs: BTreeMap<(Instant, u64), SimJob>,
    next_job: u64,
    written: Option<WrittenCheckpoint>,
    /// Number of blocking operations that the drive had executed at the last look.
    executed: u64,
    timer: Pin<Box<Sleep>>,
}

impl SimBackend {
    /// Creates the backend of a mounted target. Must be called inside a Tokio runtime.
    pub(super) fn new(mount: Arc<SimMount>, index: Arc<Index>, mailbox: Mailbox) -> SimBackend {
        let executed = mount.drive.lock().queue.executed;
        SimBackend {
            mount,
            index,
            mailbox,
            reads: BTreeMap::new(),
            in_flight: BTreeSet::new(),
            done: Vec::new(),
            jobs: BTreeMap::new(),
            next_job: 0,
            written: None,
            executed,
            timer: Box::pin(tokio::time::sleep(Duration::ZERO)),
        }
    }

    /// Adds work that is due after a random time.
    fn schedule(&mut self, job: SimJob) {
        let delay = {
            let mut state = self.mount.drive.lock();
            let longest = (state.times.read + state.times.jitter).as_nanos() as u64;
            Duration::from_nanos(state.rng.random_range(0..=2 * longest))
        };
        self.next_job += 1;
        self.jobs.insert((Instant::now() + delay, self.next_job), job);
    }

    fn run_job(&mut self, job: SimJob) {
        match job {
            SimJob::Load(BlockingWork::Load { op, generation, needs }) => {
                let found = load(&self.index, &needs);
                self.schedule(SimJob::Loaded(CoreEvent::Loaded { op, generation, needs, found }));
            }
            SimJob::Load(_) => {}
            SimJob::Loaded(event) => self.mailbox.shared.events.push(event),
            SimJob::Checkpoint(checkpoint) => {
                let (reports, mount) = (Arc::new(Mutex::new(Vec::new())), Arc::clone(&self.mount));
                let reported = Arc::clone(&reports);
                let whole = CheckpointPart::whole(Arc::new(move |progress| {
                    let operations = mount.drive.lock().queue.entered;
                    reported.lock().unwrap_or_else(PoisonError::into_inner).push((operations, progress));
                }));
                let result = checkpoint.run(self.mount.as_ref(), &self.index, &whole);
                let operations = self.mount.drive.lock().queue.entered;
                let mut reports = reports.lock().unwrap_or_else(PoisonError::into_inner);
                let reports = std::mem::take(&mut *reports);
                self.written = Some(WrittenCheckpoint { operations, reports, result });
            }
        }
    }

    /// Takes the completed requests from the drive, and runs the work that is due. Returns the time
    /// of the next event.
    fn turn(&mut self) -> Option<Instant> {
        let now = Instant::now();
        loop {
            let (completed, has_access, due) = {
                let mut state = self.mount.drive.lock();
                state.advance(now);
                let has_access = self.has_access(&state);
                if !has_access && state.mount != self.mount.number {
                    (Vec::new(), false, None)
                } else {
                    let executed = state.queue.executed.saturating_sub(self.executed);
                    self.mailbox.shared.checkpoint_calls.add(executed);
                    self.executed = state.queue.executed;
                    (std::mem::take(&mut state.done), has_access, state.next_due(now))
                }
            };
            completed.into_iter().for_each(|completed| self.finish(completed));
            if !has_access {
                self.fail_all();
            }
            self.finish_checkpoint(has_access);
            let next = self.jobs.first_key_value().map(|((at, _), _)| *at);
            if next.is_some_and(|at| at <= now) {
                if let Some((_, job)) = self.jobs.pop_first() {
                    self.run_job(job);
                }
                continue;
            }
            return [next, due].into_iter().flatten().min();
        }
    }

    fn has_access(&self, state: &State) -> bool {
        state.mount == self.mount.number && state.mounted && !state.lost
    }

    fn finish(&mut self, completed: Completed) {
        let Completed { id, result, pages } = completed;
        if !self.in_flight.remove(&id) {
            return;
        }
        if let Some(mut segment) = self.reads.remove(&id)
            && result.is_ok()
        {
            for (block, page) in segment.chunks_exact_mut(BLOCK_SIZE).zip(&pages) {
                block.copy_from_slice(image::bytes(page));
            }
        }
        self.done.push(IoDone { id, result });
    }

    /// Fails all requests in progress, because the mount has lost its access to the drive.
    fn fail_all(&mut self) {
        self.reads.clear();
        let failed = std::mem::take(&mut self.in_flight);
        self.done.extend(failed.into_iter().map(|id| IoDone { id, result: Err(io_error()) }));
    }

    fn finish_checkpoint(&mut self, has_access: bool) {
        let executed = self.executed;
        let is_over = |written: &mut WrittenCheckpoint| !has_access || written.operations <= executed;
        if let Some(WrittenCheckpoint { operations, result, .. }) = self.written.take_if(is_over) {
            let result = match result {
                Ok(_) if operations > executed => {
                    Err(StoreError::Io("the drive was removed during the checkpoint".into()))
                }
                Ok(_) if self.mount.drive.lock().queue.has_failed => {
                    Err(StoreError::Io("an earlier flush of the drive has failed".into()))
                }
                result => result,
            };
            self.mailbox.shared.events.push(CoreEvent::Checkpointed(result));
        }
        // A real checkpoint makes its reports while the drive executes its operations.
        if let Some(WrittenCheckpoint { reports, .. }) = &mut self.written {
            let due = reports.partition_point(|(operations, _)| *operations <= executed);
            if let Some((_, progress)) = reports.drain(..due).next_back() {
                self.mailbox.shared.events.push(CoreEvent::CheckpointAdvanced(progress));
            }
        }
    }

    /// Runs the work that is due, and sets the timer for the next event. Returns whether the driver
    /// has new events.
    fn turn_and_wait(&mut self, cx: &mut Context<'_>) -> bool {
        while let Some(at) = self.turn() {
            if self.timer.deadline() != at {
                self.timer.as_mut().reset(at);
            }
            if self.timer.as_mut().poll(cx).is_pending() {
                break;
            }
        }
        !self.done.is_empty() || !self.mailbox.shared.events.is_empty()
    }

    /// Whether no request and no checkpoint is in progress.
    fn is_idle(&self) -> bool {
        self.in_flight.is_empty() && self.jobs.is_empty() && self.written.is_none()
    }
}

impl DriverBackend for SimBackend {
    fn enable(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn listen(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn poll(&mut self, cx: &mut Context<'_>) {
        self.turn_and_wait(cx);
    }

    fn rest(&mut self, cx: &mut Context<'_>) {
        // The timer must cover the requests that the driver has just submitted.
        if self.turn_and_wait(cx) {
            cx.waker().wake_by_ref();
        }
    }

    /// Does nothing: memory need not be registered with a simulated drive.
    fn register(&mut self, _arena: &Arc<Arena>) {}

    fn submit(&mut self, request: IoRequest) -> io::Result<()> {
        if !matches!(request.op, IoOp::Read(_))
            && let Err(error) = self.mount.injected()
        {
            self.done.push(IoDone { id: request.id, result: Err(error) });
            return Ok(());
        }
        let submitted = {
            let mut state = self.mount.drive.lock();
            match state.check_access(self.mount.number) {
                Ok(()) => state.submit(&request, Instant::now()),
                Err(error) => Err(error),
            }
        };
        match submitted {
            Err(error) => self.done.push(IoDone { id: request.id, result: Err(error) }),
            Ok(()) => {
                self.in_flight.insert(request.id);
                if let IoOp::Read(segment) = request.op {
                    self.reads.insert(request.id, segment);
                }
            }
        }
        Ok(())
    }

    fn start(&mut self) -> io::Result<bool> {
        Ok(!self.done.is_empty())
    }

    fn completions(&mut self) -> Vec<IoDone> {
        std::mem::take(&mut self.done)
    }

    fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    fn load(&mut self, loads: Vec<BlockingWork>) -> io::Result<()> {
        loads.into_iter().for_each(|load| self.schedule(SimJob::Load(load)));
        Ok(())
    }

    fn checkpoint(&mut self, checkpoint: BlockingWork) -> io::Result<()> {
        if let BlockingWork::Checkpoint(checkpoint) = checkpoint {
            self.schedule(SimJob::Checkpoint(checkpoint));
        }
        Ok(())
    }

    async fn close(mut self) {
        self.jobs.retain(|_, job| matches!(job, SimJob::Checkpoint(_)));
        let ended = |cx: &mut Context<'_>| {
            self.turn_and_wait(cx);
            if self.is_idle() { Poll::Ready(()) } else { Poll::Pending }
        };
        std::future::poll_fn(ended).await;
        self.mount.drained().await;
    }
}

#[cfg(test)]
mod tests {
    use base::block::BLOCK;
    use rand::SeedableRng;
    use rand::rngs::StdRng;

    use super::super::DriveTimes;
    use super::*;

    /// The drive sorts writes, but a later write overwrites earlier ones.
    #[test]
    fn of_overlapping_writes_the_last_one_counts() {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let drive = SimDrive::new(1 << 20, StdRng::seed_from_u64(1), DriveTimes::default());
            let mount = SimMount::begin(&drive, Faults::default()).unwrap();
            let write = |first: u64, blocks: usize, byte: u8| {
                mount.write_at(first * BLOCK, &vec![byte; blocks * BLOCK as usize]).unwrap();
            };
            write(6, 1, 1);
            write(5, 2, 2);
            write(9, 1, 3);
            write(8, 3, 4);
            write(9, 1, 5);
            mount.flush().unwrap();
            mount.drained().await;
            let mut content = vec![0; 6 * BLOCK as usize];
            mount.read_at(5 * BLOCK, &mut content).unwrap();
            let blocks: Vec<u8> = content.chunks(BLOCK as usize).map(|block| block[0]).collect();
            assert_eq!(blocks, [2, 2, 0, 4, 5, 4]);
        });
    }
}
