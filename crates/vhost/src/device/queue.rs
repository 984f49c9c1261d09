//! [`DeviceQueue`]: a running queue of a device, with its ring and its events.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::task::{Context, Poll};

use rustix::event::{PollFd, PollFlags, Timespec};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::blk::{BlkCompletion, BlkRequest, BlkStatus};
use crate::ring::{RingError, SplitRing};
use crate::session::{QueueEvents, VhostSession};

/// A running queue.
#[derive(Debug)]
pub(super) struct DeviceQueue {
    number: usize,
    ring: SplitRing,
    /// The driver's notifications. The counter of the event is never read: each notification makes
    /// the event ready again for an edge-triggered poll, which saves a system call.
    kick: AsyncFd<Arc<OwnedFd>>,
    events: QueueEvents,
    /// Whether the driver notifies the queue of requests.
    is_listening: bool,
    has_completions: bool,
    /// Whether the driver is defective, so that the queue takes no more requests.
    is_broken: bool,
    /// Number of requests that the disk executes.
    pub(super) executing: usize,
}

impl DeviceQueue {
    /// Starts a queue, if the session says that it runs. Returns `None` if it cannot be started. Then
    /// its error event is signalled.
    pub(super) fn start(number: usize, session: &VhostSession) -> Option<DeviceQueue> {
        let running = session.running(number)?;
        let started = DeviceQueue::try_start(number, session, running.kick, running.base);
        match started {
            Ok((ring, kick)) => {
                let events = running.events;
                let (is_listening, has_completions, is_broken) = (false, true, false);
                let executing = 0;
                Some(DeviceQueue {
                    number,
                    ring,
                    kick,
                    events,
                    is_listening,
                    has_completions,
                    is_broken,
                    executing,
                })
            }
            Err(e) => {
                tracing::warn!("queue {number} of a vhost-user device cannot start: {e}");
                signal(running.events.error.as_ref());
                None
            }
        }
    }

    fn try_start(
        number: usize,
        session: &VhostSession,
        kick: Arc<OwnedFd>,
        base: u16,
    ) -> Result<(SplitRing, AsyncFd<Arc<OwnedFd>>), RingError> {
        let place = session
            .ring_place(number)
            .ok_or_else(|| RingError::Addresses("an address is not in the memory table".into()))?;
        let record = session.inflight().and_then(|file| file.record(number, session.ring_size(number)));
        let record = record.ok_or_else(|| RingError::Record("it does not exist".into()))?;
        let ring = SplitRing::start(place, Arc::clone(session.memory()), record, base)?;
        #[expect(deprecated, reason = "the replacement is unsafe; an `Arc<OwnedFd>` keeps its contract")]
        let kick = AsyncFd::with_interest(kick, Interest::READABLE);
        let kick = kick.map_err(|e| RingError::Addresses(format!("its event cannot be polled: {e}")))?;
        Ok((ring, kick))
    }

    /// Uses the current memory table of the session.
    pub(super) fn move_to(&mut self, number: usize, session: &VhostSession) {
        let moved = match session.ring_place(number) {
            Some(place) => self.ring.move_to(place, Arc::clone(session.memory())),
            None => Err(RingError::Addresses("an address is not in the memory table".into())),
        };
        self.is_listening = false;
        self.has_completions = true;
        self.check(moved);
    }

    pub(super) fn set_events(&mut self, events: QueueEvents) {
        self.events = events;
    }

    /// Takes no new requests any more.
    pub(super) fn close(&mut self) {
        self.ring.close();
        self.is_listening = false;
    }

    /// Returns true if no request is in flight, or none of them can complete.
    pub(super) fn is_idle(&self) -> bool {
        self.executing == 0 && (self.is_broken || self.ring.in_flight() == 0)
    }

    /// Ends an idle queue. Returns the index of the next request.
    pub(super) fn end(mut self) -> u16 {
        assert!(self.is_idle(), "a queue ends after its requests");
        if self.is_broken
            && let Err(e) = self.ring.forget()
        {
            tracing::warn!("cannot clear the record of queue {}: {e}", self.number);
        }
        self.ring.next_available()
    }

    /// Returns true if the queue may have requests: after a notification, or while the driver sends
    /// none.
    pub(super) fn poll_requests(&mut self, cx: &mut Context<'_>) -> bool {
        // After the readiness was cleared, the event must be polled again to be woken.
        while let Poll::Ready(Ok(mut ready)) = self.kick.poll_read_ready(cx) {
            ready.clear_ready();
            if self.is_listening && !self.is_broken {
                self.is_listening = false;
                let stopped = self.ring.stop_listening();
                self.check(stopped);
            }
        }
        !self.is_listening && !self.is_broken
    }

    /// Takes the next request of a disk of `size` bytes.
    pub(super) fn take(&mut self, size: u64) -> Option<BlkRequest> {
        if self.is_broken {
            return None;
        }
        let taken = self.ring.take().transpose()?;
        let request = taken.and_then(|taken| BlkRequest::read(taken, size));
        self.check(request)
    }

    /// Completes a request that was taken.
    pub(super) fn complete(&mut self, completion: &BlkCompletion, status: BlkStatus) {
        // The memory of the status was validated. If it is lost, the device ends after this batch.
        let written = completion.finish(status).unwrap_or(0);
        let completed = self.ring.complete(completion.head(), written);
        self.check(completed);
        self.has_completions = true;
    }

    /// Notifies the driver of completions since the last call.
    pub(super) fn signal_completions(&mut self) {
        if std::mem::take(&mut self.has_completions) {
            let needed = self.ring.needs_signal();
            if self.check(needed) == Some(true) {
                signal(self.events.call.as_ref());
            }
        }
    }

    /// Returns true if the driver does not notify the queue of requests.
    pub(super) fn is_awake(&self) -> bool {
        !self.is_listening && !self.is_broken
    }

    /// Asks the driver to notify the queue. Returns true if there already is a request.
    pub(super) fn listen(&mut self) -> bool {
        let listened = self.ring.listen();
        self.is_listening = true;
        let has_more = self.check(listened) == Some(true) && !self.ring.is_closed();
        if has_more {
            self.is_listening = false;
            let stopped = self.ring.stop_listening();
            self.check(stopped);
        }
        has_more
    }

    /// Tells the front end that the queue is broken.
    pub(super) fn signal_error(&self) {
        signal(self.events.error.as_ref());
    }

    /// Returns the value, or breaks the queue.
    fn check<T>(&mut self, result: Result<T, RingError>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(e) => {
                if !self.is_broken {
                    self.is_broken = true;
                    tracing::warn!("queue {} of a vhost-user device stops: {e}", self.number);
                    self.signal_error();
                }
                None
            }
        }
    }
}

/// Adds 1 to the counter of an event. An event that cannot count further is already signalled.
///
/// The front end controls the event, and could make a write to it wait. So the event is polled first.
/// A front end that fills the counter between the two calls can still stop this thread.
fn signal(event: Option<&Arc<OwnedFd>>) {
    let Some(event) = event else { return };
    let mut polled = [PollFd::from_borrowed_fd(event.as_fd(), PollFlags::OUT)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    let is_writable = rustix::event::poll(&mut polled, Some(&at_once)).is_ok_and(|count| count > 0)
        && polled[0].revents().contains(PollFlags::OUT);
    if !is_writable {
        return;
    }
    if let Err(e) = rustix::io::write(event, &1u64.to_ne_bytes()).map_err(io::Error::from) {
        tracing::debug!("cannot signal an event of a front end: {e}");
    }
}
