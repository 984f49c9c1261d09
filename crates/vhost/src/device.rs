//! [`BlkDevice`]: one task that serves all queues of a device, and its front end.
//!
//! The task waits for messages of the front end, notifications of the driver, completed requests of
//! the disk, and changes of the disk's size. When a ring has requests, the task takes all of them,
//! starts them, and polls each once, because a fast disk completes it at once. Completions of a batch
//! share one notification. While requests keep coming, the task looks for the next one for a short
//! time before it sleeps (adaptive polling).
//!
//! A queue with a defective driver stops, and signals its error event. A front end that violates the
//! protocol or shrinks its memory ends its own device.

mod queue;

use std::future::poll_fn;
use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use base::BoxFuture;
use base::mem::guarded;
use base::spinner::Spinner;
use disk::{Disk, DiskError};
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use tokio::sync::watch;

use crate::blk::{BlkCompletion, BlkExecution, BlkStatus};
use crate::channel;
use crate::session::{DeviceView, ProtocolError, SessionAnswer, SessionEffect, VhostSession};
use queue::DeviceQueue;

/// Number of requests that the task takes from a ring before it looks after the other queues.
const BATCH_MAX: usize = 256;
/// Number of rounds over all queues before the task lets other tasks run.
const ROUNDS_MAX: usize = 16;

/// How a device works.
#[derive(Debug, Clone)]
pub struct DeviceOptions {
    /// Number of queues: 1 to [`QUEUES_MAX`](crate::QUEUES_MAX).
    pub queues: u16,
    /// Maximum time for which the device looks for the next request before it sleeps. Zero switches
    /// adaptive polling off.
    pub poll: Duration,
}

impl Default for DeviceOptions {
    fn default() -> DeviceOptions {
        DeviceOptions { queues: 4, poll: Duration::from_micros(20) }
    }
}

/// A message of the front end.
#[derive(Debug)]
pub struct VhostMessage {
    /// Header and payload.
    pub bytes: Vec<u8>,
    /// File descriptors that came with the message.
    pub fds: Vec<OwnedFd>,
}

/// The way from a device to its front end: a socket, or the process that owns the socket.
pub trait VhostControl: Send {
    /// Waits for the next message. Returns `None` if the front end has closed the connection. The
    /// future can be dropped without losing a message.
    fn receive(&mut self) -> impl Future<Output = io::Result<Option<VhostMessage>>> + Send;

    /// Stores the state and the file descriptors of an answer, and sends its reply. If this process
    /// is killed after the end of the call, the answer takes effect.
    fn answer(&mut self, answer: SessionAnswer) -> impl Future<Output = io::Result<()>> + Send;

    /// Waits until the front end has closed the connection. The device uses it while it completes
    /// requests for a message and receives no other message. Without an implementation, the device
    /// learns of the end only afterwards.
    fn disconnected(&mut self) -> impl Future<Output = ()> + Send {
        std::future::pending()
    }
}

/// Why a device has ended. Its front end must be disconnected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VhostError {
    /// The front end has violated the protocol.
    #[error(transparent)]
    Protocol(#[from] ProtocolError),
    /// The way to the front end has failed.
    #[error("the connection to the front end has failed: {0}")]
    Control(#[source] io::Error),
    /// The front end has shrunk memory that it shares.
    #[error("the device has stopped: {0}")]
    Memory(DiskError),
}

/// A block device with one front end: the task that serves its queues and messages.
#[derive(Debug)]
pub struct BlkDevice {
    disk: Arc<dyn Disk>,
    /// Size of the disk that the device reports, in bytes.
    size: u64,
    session: VhostSession,
    queues: Vec<Option<DeviceQueue>>,
    executing: FuturesUnordered<ExecutingRequest>,
    spinner: Spinner,
    poll: Duration,
    /// Number of broken mappings in the process when the device last looked for its own.
    broken_seen: u64,
    /// Whether the front end does not know yet that the size of the disk has changed.
    owes_config_change: bool,
}

enum DeviceEvent {
    Message(Option<VhostMessage>),
    Resized(u64),
}

impl BlkDevice {
    /// Creates the device of a front end that has just connected.
    #[must_use]
    pub fn new(disk: Arc<dyn Disk>, options: &DeviceOptions) -> BlkDevice {
        BlkDevice::with(disk, VhostSession::new(options.queues), options)
    }

    /// Creates a device that continues a session ([`VhostSession::restore`]). Requests that were in
    /// flight are executed again.
    #[must_use]
    pub fn with(disk: Arc<dyn Disk>, session: VhostSession, options: &DeviceOptions) -> BlkDevice {
        let queues = (0..session.queue_count()).map(|_| None).collect();
        let size = *disk.size().borrow();
        BlkDevice {
            disk,
            size,
            session,
            queues,
            executing: FuturesUnordered::new(),
            spinner: Spinner::default(),
            poll: options.poll,
            // A mapping of the session may have broken before.
            broken_seen: u64::MAX,
            // The size may have changed while no process served the device.
            owes_config_change: true,
        }
    }

    /// Serves the front end until it disconnects. Must run in a tokio runtime with I/O enabled. A
    /// dropped call leaves the outcome of requests in flight open.
    ///
    /// # Errors
    /// If the front end violates the protocol or shrinks its memory, or `control` fails.
    pub async fn run<C: VhostControl>(mut self, control: &mut C) -> Result<(), VhostError> {
        let result = self.serve(control).await;
        if let Err(e) = &result {
            tracing::warn!("a vhost-user device ends: {e}");
            self.queues.iter().flatten().for_each(DeviceQueue::signal_error);
        }
        result
    }

    async fn serve<C: VhostControl>(&mut self, control: &mut C) -> Result<(), VhostError> {
        // Requests of an earlier front end must not take effect after those of this one.
        self.disk.quiesce().await;
        let mut sizes = self.disk.size();
        self.size = *sizes.borrow_and_update();
        self.apply((0..self.queues.len()).map(SessionEffect::QueueStarted));
        loop {
            if self.owes_config_change {
                self.announce_size();
            }
            let event = tokio::select! {
                biased;
                lost = poll_fn(|cx| self.poll_work(cx)) => return Err(lost),
                message = control.receive() => DeviceEvent::Message(message.map_err(VhostError::Control)?),
                size = next_size(&mut sizes) => DeviceEvent::Resized(size),
            };
            match event {
                DeviceEvent::Message(Some(message)) => {
                    if !self.handle(message, control).await? {
                        return Ok(());
                    }
                }
                DeviceEvent::Message(None) => return Ok(()),
                DeviceEvent::Resized(size) => {
                    self.size = size;
                    self.owes_config_change = true;
                }
            }
        }
    }

    /// Handles a message. Returns false if the front end has disconnected meanwhile.
    async fn handle<C: VhostControl>(
        &mut self,
        message: VhostMessage,
        control: &mut C,
    ) -> Result<bool, VhostError> {
        let stops = self.session.stops(&message.bytes);
        let stopped = tokio::select! {
            biased;
            stopped = self.stop(&stops) => stopped?,
            () = control.disconnected() => return Ok(false),
        };
        let view = DeviceView { size: self.size, stopped };
        let mut answer = self.session.handle(&message.bytes, message.fds, &view)?;
        let effects = std::mem::take(&mut answer.effects);
        control.answer(answer).await.map_err(VhostError::Control)?;
        // From here on, a restarted device has the records of requests in flight. So the queues may
        // take requests.
        self.apply(effects);
        Ok(true)
    }

    /// Stops queues after all their requests are complete. Returns for each of them that was running
    /// the index of the next request.
    async fn stop(
        &mut self,
        numbers: &[usize],
    ) -> Result<std::collections::BTreeMap<usize, u16>, VhostError> {
        for number in numbers {
            if let Some(queue) = &mut self.queues[*number] {
                queue.close();
            }
        }
        let is_idle = |queue: &Option<DeviceQueue>| queue.as_ref().is_none_or(DeviceQueue::is_idle);
        poll_fn(|cx| match self.poll_work(cx) {
            Poll::Ready(lost) => Poll::Ready(Err(lost)),
            Poll::Pending if numbers.iter().all(|number| is_idle(&self.queues[*number])) => {
                Poll::Ready(Ok(()))
            }
            Poll::Pending => Poll::Pending,
        })
        .await?;
        let stopped = numbers.iter().filter_map(|number| {
            let queue = self.queues[*number].take()?;
            Some((*number, queue.end()))
        });
        Ok(stopped.collect())
    }

    fn apply(&mut self, effects: impl IntoIterator<Item = SessionEffect>) {
        for effect in effects {
            match effect {
                SessionEffect::Memory => {
                    self.broken_seen = u64::MAX;
                    for (number, queue) in self.queues.iter_mut().enumerate() {
                        match queue {
                            Some(queue) => queue.move_to(number, &self.session),
                            // The rings of a queue may have become guest memory.
                            None => *queue = DeviceQueue::start(number, &self.session),
                        }
                    }
                }
                SessionEffect::QueueStopped(number) => self.queues[number] = None,
                SessionEffect::QueueStarted(number) => {
                    self.queues[number] = DeviceQueue::start(number, &self.session);
                    self.broken_seen = u64::MAX;
                }
                SessionEffect::QueueEvents(number) => {
                    if let Some(queue) = &mut self.queues[number] {
                        queue.set_events(self.session.events(number));
                    }
                }
                SessionEffect::Channel => {}
            }
        }
    }

    /// Tells the front end to read the size of the disk, if it has a channel for requests.
    fn announce_size(&mut self) {
        let Some(channel) = self.session.channel() else {
            self.owes_config_change = false;
            return;
        };
        match channel::send_config_change(channel) {
            // The front end is busy. The next event of the device is another opportunity.
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Ok(()) => self.owes_config_change = false,
            Err(e) => {
                tracing::warn!("cannot tell a front end that the size of its disk has changed: {e}");
                self.owes_config_change = false;
            }
        }
    }

    /// Does all work that is there. Returns only if the device must end.
    fn poll_work(&mut self, cx: &mut Context<'_>) -> Poll<VhostError> {
        for _ in 0..ROUNDS_MAX {
            let mut has_worked = false;
            for number in 0..self.queues.len() {
                let has_requests = self.queues[number].as_mut().is_some_and(|queue| queue.poll_requests(cx));
                has_worked |= has_requests && self.take_requests(number, cx);
            }
            while let Poll::Ready(Some((number, completion, result))) = self.executing.poll_next_unpin(cx) {
                has_worked = true;
                let queue = self.queues[number].as_mut().expect("a queue stops after its requests");
                queue.executing -= 1;
                queue.complete(&completion, status_of(&result));
            }
            self.queues.iter_mut().flatten().for_each(DeviceQueue::signal_completions);
            if let Some(lost) = self.lost_memory() {
                return Poll::Ready(lost);
            }
            if has_worked {
                self.spinner.worked();
                continue;
            }
            let mut awake = self.queues.iter_mut().flatten().filter(|queue| queue.is_awake()).peekable();
            let is_awake = awake.peek().is_some();
            if is_awake && self.executing.is_empty() && self.spinner.look_again(self.poll) {
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            // A request may have arrived before the driver knew that it must notify the device.
            let mut more = false;
            awake.for_each(|queue| more |= queue.listen());
            if !more {
                return Poll::Pending;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Takes requests of a queue and starts them. Returns false if there was none.
    fn take_requests(&mut self, number: usize, cx: &mut Context<'_>) -> bool {
        let queue = self.queues[number].as_mut().expect("a queue with requests runs");
        for count in 0..BATCH_MAX {
            let Some(request) = queue.take(self.size) else { return count > 0 };
            let (completion, execution) = request.start(&self.disk);
            match execution {
                BlkExecution::Done(result) => queue.complete(&completion, status_of(&result)),
                BlkExecution::Refused(status) => queue.complete(&completion, status),
                BlkExecution::Waiting(mut future) => match future.as_mut().poll(cx) {
                    Poll::Ready(result) => queue.complete(&completion, status_of(&result)),
                    Poll::Pending => {
                        queue.executing += 1;
                        self.executing.push(ExecutingRequest {
                            queue: number,
                            completion: Some(completion),
                            future: ExecutingFuture(future),
                        });
                    }
                },
            }
        }
        true
    }

    /// Returns the end of the device if the front end has shrunk memory of it.
    fn lost_memory(&mut self) -> Option<VhostError> {
        let broken = guarded::broken_count();
        if broken == self.broken_seen {
            return None;
        }
        self.broken_seen = broken;
        let is_lost = self.session.memory().is_broken()
            || self.session.inflight().is_some_and(|inflight| inflight.is_broken());
        let reason = "the front end has shrunk a file of its memory while it was in use";
        is_lost.then(|| VhostError::Memory(DiskError::Memory(reason.into())))
    }
}

/// A request that the disk executes.
#[derive(Debug)]
struct ExecutingRequest {
    queue: usize,
    completion: Option<BlkCompletion>,
    future: ExecutingFuture,
}

struct ExecutingFuture(BoxFuture<'static, disk::Result<()>>);

impl std::fmt::Debug for ExecutingFuture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ExecutingFuture")
    }
}

impl Future for ExecutingRequest {
    /// Number of the queue, how to complete the request, and its result.
    type Output = (usize, BlkCompletion, disk::Result<()>);

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        this.future.0.as_mut().poll(cx).map(|result| {
            let completion = this.completion.take().expect("a completed request is not polled again");
            (this.queue, completion, result)
        })
    }
}

fn status_of(result: &disk::Result<()>) -> BlkStatus {
    match result {
        Ok(()) => BlkStatus::Ok,
        Err(e) => {
            // A guest can cause these errors at any rate, so they are not warnings.
            tracing::debug!("a request of a vhost-user device fails: {e}");
            BlkStatus::IoError
        }
    }
}

/// Waits for the next change of the size.
async fn next_size(sizes: &mut watch::Receiver<u64>) -> u64 {
    if sizes.changed().await.is_err() {
        // The disk is gone, so its size does not change any more.
        std::future::pending::<()>().await;
    }
    *sizes.borrow_and_update()
}
