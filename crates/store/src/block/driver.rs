//! [`Driver`]: runs a mounted target, on its own thread or as a task of another event loop.

use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Duration;

use base::clock::Instant;
use tokio::time::Sleep;
use uuid::Uuid;

use super::backend::DriverBackend;
use super::core::Core;
use super::hardware::{Hardware, join};
use super::mailbox::{Mailbox, MailboxState};
use super::messages::{BlockingWork, CoreEvent};
#[cfg(feature = "sim")]
use super::sim_drive::SimBackend;

/// After this idle time, the store records in the log that the whole log was flushed.
const IDLE: Duration = Duration::from_millis(5);
/// Maximum number of commands that one round of the driver takes from the mailbox.
const BATCH: usize = 256;
/// Maximum number of loads that one worker takes at once.
const LOADS_AT_ONCE: usize = 2;

/// Runs a mounted target. The driver owns the target's state and I/O ring.
///
/// While it runs, the driver never blocks on the drive, so a thread with other work can run it
/// ([`run`](Self::run)). Then calls from that thread, and their replies, need not wake another
/// thread. The target replies to calls only while its driver runs.
#[must_use = "a target replies to calls only while its driver runs"]
pub struct Driver(Kind);

enum Kind {
    Hardware(Box<DriverOn<Hardware>>),
    #[cfg(feature = "sim")]
    Simulated(Box<DriverOn<SimBackend>>),
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver").field("target", &self.target()).finish_non_exhaustive()
    }
}

impl Driver {
    /// Creates the driver of a target on a real drive.
    pub(super) fn on_hardware(core: Core, backend: Hardware, mailbox: Mailbox) -> Driver {
        Driver(Kind::Hardware(Box::new(DriverOn { core, backend, mailbox })))
    }

    /// Creates the driver of a target on a simulated drive.
    #[cfg(feature = "sim")]
    pub(super) fn simulated(core: Core, backend: SimBackend, mailbox: Mailbox) -> Driver {
        Driver(Kind::Simulated(Box::new(DriverOn { core, backend, mailbox })))
    }

    /// Returns the UUID of the target.
    #[must_use]
    pub fn target(&self) -> Uuid {
        match &self.0 {
            Kind::Hardware(driver) => driver.core.superblock.uuid,
            #[cfg(feature = "sim")]
            Kind::Simulated(driver) => driver.core.superblock.uuid,
        }
    }

    /// Runs the target as a task of a Tokio runtime with I/O and time enabled, until the target is
    /// unmounted or its handle is dropped. Once polled, the task must stay on its thread. At the
    /// end, the task waits for outstanding drive requests, and then for a running checkpoint and
    /// the closing of the index. The wait for drive requests blocks the thread. The wait for the
    /// checkpoint and the index does not block the thread, because closing the index of a failed
    /// drive may take as long as the drive's timeouts. On a simulated drive, the task never blocks
    /// and needs no I/O of the runtime.
    pub async fn run(self) {
        match self.0 {
            Kind::Hardware(driver) => driver.run().await,
            #[cfg(feature = "sim")]
            Kind::Simulated(driver) => driver.run().await,
        }
    }

    /// Runs the target on this thread, which does no other work, until the target is unmounted or
    /// its handle is dropped.
    pub(super) fn run_alone(self) {
        match self.0 {
            Kind::Hardware(driver) => driver.run_alone(),
            #[cfg(feature = "sim")]
            Kind::Simulated(_) => unreachable!("a simulated target has no thread"),
        }
    }
}

/// The driver of a target, with a certain backend.
struct DriverOn<B> {
    core: Core,
    backend: B,
    mailbox: Mailbox,
}

/// What a turn of the driver has done, and whether more work is ready.
enum TurnOutcome {
    /// Events were processed, or more events are ready.
    Events,
    /// There were no events, and steps of the scan of existing objects are due.
    Scan,
    /// There is nothing to do before the next event.
    None,
}

/// Measures how long the target has been idle.
struct IdleTimer {
    counting: bool,
    timer: Pin<Box<Sleep>>,
}

impl DriverOn<Hardware> {
    /// Runs the target on this thread, which does no other work, until the target is unmounted or
    /// its handle is dropped.
    fn run_alone(mut self) {
        let shared = Arc::clone(&self.mailbox.shared);
        self.begin();
        while !self.is_over() {
            if let Err(error) = self.turn_alone(&shared) {
                self.fail(&error);
            }
        }
        let (core, hardware) = self.end();
        let workers = hardware.stop();
        drop(core);
        join(workers);
    }

    /// Processes all new events, then sleeps until the next event if no work is left.
    fn turn_alone(&mut self, shared: &MailboxState) -> io::Result<()> {
        self.work()?;
        if self.core.lifecycle.is_closed() {
            return Ok(());
        }
        let timeout = self.is_quiet().then_some(IDLE);
        let has_work = || self.core.has_spare_time() || shared.is_ready();
        self.backend.ring.wait(timeout, has_work)?;
        if timeout.is_some() && !has_work() && !self.backend.ring.has_completions() {
            self.core.idle();
            self.hand_out()?;
        }
        Ok(())
    }
}

impl<B: DriverBackend> DriverOn<B> {
    async fn run(mut self) {
        self.begin();
        match self.backend.listen() {
            Ok(()) => {
                let mut idle = IdleTimer { counting: false, timer: Box::pin(tokio::time::sleep(IDLE)) };
                poll_fn(|cx| self.poll(cx, &mut idle)).await;
            }
            Err(error) => self.fail(&error),
        }
        let (core, backend) = self.end();
        let closed = backend.close();
        drop(core);
        closed.await;
    }

    fn poll(&mut self, cx: &mut Context<'_>, idle: &mut IdleTimer) -> Poll<()> {
        // From here on, a command, an event or a completion wakes this task.
        self.mailbox.waker.listen(cx.waker());
        self.backend.poll(cx);
        match self.turn() {
            Err(error) => self.fail(&error),
            // Lets the other tasks of the thread run first, because they may add work for the next
            // round.
            Ok(TurnOutcome::Events) => {
                idle.counting = false;
                cx.waker().wake_by_ref();
            }
            // Lets the runtime look for I/O first, too. The runtime rarely looks for I/O while tasks
            // are ready, and a scan of many objects takes seconds.
            Ok(TurnOutcome::Scan) => {
                idle.counting = false;
                let _ = pin!(tokio::task::yield_now()).poll(cx);
            }
            Ok(TurnOutcome::None) => {
                self.backend.rest(cx);
                self.rest(cx, idle);
            }
        }
        if self.is_over() { Poll::Ready(()) } else { Poll::Pending }
    }

    /// Processes new events, and does a step of the scan of existing objects if a step is due.
    fn turn(&mut self) -> io::Result<TurnOutcome> {
        let had_events = self.work()?;
        let has_completions = self.backend.start()?;
        Ok(if had_events || has_completions || self.mailbox.shared.is_ready() {
            TurnOutcome::Events
        } else if self.core.has_spare_time() {
            TurnOutcome::Scan
        } else {
            TurnOutcome::None
        })
    }

    /// Calls [`Core::idle`] when the target has been idle for [`IDLE`].
    fn rest(&mut self, cx: &mut Context<'_>, idle: &mut IdleTimer) {
        if !self.is_quiet() {
            return;
        }
        if !std::mem::replace(&mut idle.counting, true) {
            idle.timer.as_mut().reset(Instant::now() + IDLE);
        }
        if idle.timer.as_mut().poll(cx).is_ready() {
            idle.counting = false;
            self.core.idle();
            cx.waker().wake_by_ref();
        }
    }

    fn begin(&mut self) {
        if let Err(error) = self.backend.enable() {
            self.fail(&error);
        }
    }

    /// Handles a failure after which the I/O ring is unusable.
    fn fail(&mut self, error: &io::Error) {
        self.core.poison(&format!("operation of the I/O ring ({error})"));
        self.tell_failure();
        self.mailbox.shared.abandoned.store(true, Ordering::SeqCst);
    }

    /// Publishes the reason for which the target refuses writes, if it refuses them.
    fn tell_failure(&self) {
        if let Some(reason) = &self.core.poisoned {
            let is_news =
                |told: &mut Option<String>| told.is_none() && told.replace(reason.clone()).is_none();
            self.mailbox.shared.failure.send_if_modified(is_news);
        }
    }

    fn is_over(&self) -> bool {
        self.core.lifecycle.is_closed() || self.mailbox.shared.abandoned.load(Ordering::SeqCst)
    }

    /// Whether no work is in progress, but the log does not record yet that the whole log was
    /// flushed.
    fn is_quiet(&self) -> bool {
        self.core.wants_idle() && self.backend.in_flight() == 0
    }

    /// Refuses all further calls. Returns the backend, which must be closed before the core is
    /// dropped, because calls end when the core is dropped.
    fn end(self) -> (Core, B) {
        self.core.alloc.room().close();
        self.mailbox.shared.gone.store(true, Ordering::SeqCst);
        self.mailbox.shared.awaits_checkpoint.store(false, Ordering::Relaxed);
        self.mailbox.shared.refuse_all();
        (self.core, self.backend)
    }

    /// Processes new events, does a step of the scan of existing objects if a step is due, and hands
    /// out the resulting work. Returns whether there were events.
    fn work(&mut self) -> io::Result<bool> {
        let shared = Arc::clone(&self.mailbox.shared);
        let mut had_events = false;
        while let Some(arena) = shared.arenas.pop() {
            self.backend.register(&arena);
        }
        for done in self.backend.completions() {
            self.core.complete(CoreEvent::Io(done));
            had_events = true;
        }
        while let Some(event) = shared.events.pop() {
            self.core.complete(event);
            had_events = true;
        }
        for command in std::iter::from_fn(|| shared.commands.pop()).take(BATCH) {
            self.core.handle(command);
            had_events = true;
        }
        if had_events || self.core.has_spare_time() {
            self.core.advance();
        }
        shared.starved.store(self.core.is_starved(), Ordering::SeqCst);
        self.tell_failure();
        shared.awaits_checkpoint.store(self.core.awaits_checkpoint(), Ordering::Relaxed);
        self.hand_out()?;
        Ok(had_events)
    }

    fn hand_out(&mut self) -> io::Result<()> {
        for request in std::mem::take(&mut self.core.output.io) {
            self.backend.submit(request)?;
        }
        let is_load = |work: &BlockingWork| matches!(work, BlockingWork::Load { .. });
        let (mut loads, rest): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.core.output.work).into_iter().partition(is_load);
        while !loads.is_empty() {
            // Send loads in batches, so that one wake-up serves several loads. Limit the batches,
            // so that several workers share the loads.
            let later = loads.split_off(loads.len().min(LOADS_AT_ONCE));
            self.backend.load(std::mem::replace(&mut loads, later))?;
        }
        for work in rest {
            self.backend.checkpoint(work)?;
        }
        Ok(())
    }
}
