//! [`DriverBackend`]: the I/O ring and the workers of a driver.

use std::io;
use std::sync::Arc;
use std::task::Context;

use base::mem::Arena;

use super::io::{IoDone, IoRequest};
use super::messages::BlockingWork;

/// The I/O ring and the workers of a driver: io_uring and threads in the product, simulated time in
/// a simulation. The workers return their results through the mailbox.
pub(super) trait DriverBackend: Sized {
    /// Prepares the ring for use by the current thread. Called once, before all other methods.
    ///
    /// # Errors
    /// If the ring is unusable.
    fn enable(&mut self) -> io::Result<()>;

    /// Prepares the notifications that [`poll`](Self::poll) uses. Called once, before the first
    /// call of `poll`.
    ///
    /// # Errors
    /// If the ring is unusable.
    fn listen(&mut self) -> io::Result<()>;

    /// Registers the driver's task, which is woken at the next completion of a request.
    fn poll(&mut self, cx: &mut Context<'_>);

    /// Called when the driver has found no more work.
    fn rest(&mut self, _cx: &mut Context<'_>) {}

    /// Registers the memory of `arena`, which makes requests faster.
    fn register(&mut self, arena: &Arc<Arena>);

    /// Queues a request, which [`start`](Self::start) starts at the latest.
    ///
    /// # Errors
    /// If the ring is unusable.
    fn submit(&mut self, request: IoRequest) -> io::Result<()>;

    /// Starts the queued requests. Returns whether completions or requests remain to be processed.
    ///
    /// # Errors
    /// If the ring is unusable.
    fn start(&mut self) -> io::Result<bool>;

    /// Returns the requests that have completed since the last call.
    fn completions(&mut self) -> Vec<IoDone>;

    /// Returns the number of requests that have not completed.
    fn in_flight(&self) -> usize;

    /// Gives loads of the index to a worker.
    ///
    /// # Errors
    /// If the workers have ended.
    fn load(&mut self, loads: Vec<BlockingWork>) -> io::Result<()>;

    /// Gives a checkpoint, or the changes of one, to a worker. Checkpoints run one after another.
    ///
    /// # Errors
    /// If the worker has ended.
    fn checkpoint(&mut self, checkpoint: BlockingWork) -> io::Result<()>;

    /// Ends the ring, after its outstanding requests. The future waits for the workers, which
    /// complete their current work.
    fn close(self) -> impl Future<Output = ()>;
}
