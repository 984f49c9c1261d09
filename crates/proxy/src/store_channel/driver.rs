//! The task that receives the host's replies.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use base::clock::Instant;
use channel::{Bell, Chain, ChainCompletion, ChannelError, ControlSocket, Joined, MemoryAccess};
use futures::future::BoxFuture;
use tokio::time::Sleep;

use super::job::Route;
use super::replies::{Leftovers, ReplyTimes};
use super::ring_side::FETCH;
use super::{State, StoreChannel};
use crate::messages::NO_REPLY;
use crate::poller::Poller;

/// Maximum number of control-socket frames that one turn handles, so that a busy socket does not
/// delay the doorbell.
const FRAMES_PER_TURN: usize = 64;
/// Tag of the last chain that an incarnation posts on each queue.
const LAST: u64 = u64::MAX - 2;

/// Handles the doorbell, DMA completions and the control socket until the incarnation ends.
pub(crate) struct ChannelDriver {
    store_channel: Arc<StoreChannel>,
    control: ControlSocket,
    bell: Option<Box<dyn Bell>>,
    /// The running attempt to attach the engine again.
    attaching: Option<BoxFuture<'static, Result<Joined, ChannelError>>>,
    completions: Vec<ChainCompletion>,
    /// Fires when the driver must check for overdue transfers and replies.
    timer: Option<Pin<Box<Sleep>>>,
    poller: Poller,
    /// Memory that DMA may still use after the incarnation's end.
    kept: Leftovers,
    /// Whether no DMA of the incarnation is in progress any more.
    drained: bool,
}

impl ChannelDriver {
    /// Creates the driver of `link`. It reads replies from `control`; the store rings `bell`.
    pub(crate) fn new(
        store_channel: Arc<StoreChannel>,
        control: ControlSocket,
        bell: Option<Box<dyn Bell>>,
    ) -> ChannelDriver {
        ChannelDriver {
            store_channel,
            control,
            bell,
            attaching: None,
            completions: Vec::new(),
            timer: None,
            poller: Poller::default(),
            kept: Leftovers::default(),
            drained: false,
        }
    }

    /// Runs until the incarnation ends or `stop` is ready. Then it calls `on_end` with the reason,
    /// fails all unanswered calls, and returns once no DMA of the incarnation is in progress.
    pub(crate) async fn run(mut self, stop: impl Future<Output = ()>, on_end: impl FnOnce(&str)) -> String {
        let mut stop = std::pin::pin!(stop);
        let why = poll_fn(|cx| {
            if stop.as_mut().poll(cx).is_ready() {
                return Poll::Ready("the attachment was closed".to_owned());
            }
            self.poll(cx).map(|e| e.to_string())
        })
        .await;
        on_end(&why);
        self.attaching = None;
        self.kept = self.store_channel.end(&why);
        self.drain().await;
        self.drained = true;
        self.store_channel.lock().ring = None;
        why
    }

    /// Waits until every transfer of the incarnation has finished. Resets the engine if the
    /// transfers take too long.
    async fn drain(&mut self) {
        let overdue = self.store_channel.lock().overdue;
        if tokio::time::timeout(overdue, self.fence()).await.is_err() {
            tracing::warn!("transfers of the ended incarnation take too long: the engine is reset");
            let engine = self.store_channel.lock().ring.as_ref().map(|ring| Arc::clone(ring.engine()));
            if let Some(engine) = engine {
                engine.reset();
            }
            self.fence().await;
        }
    }

    async fn fence(&mut self) {
        let (engine, mut left) = {
            let mut state = self.store_channel.lock();
            let Some(ring) = &mut state.ring else { return };
            let queues = ring.engine().queues();
            for queue in 0..queues {
                ring.post(queue, Chain { tag: Some(LAST), ..Chain::default() });
            }
            ring.post_waiting();
            (Arc::clone(ring.engine()), queues)
        };
        poll_fn(|cx| {
            engine.poll_completions(cx, &mut self.completions);
            let mut state = self.store_channel.lock();
            let Some(ring) = &mut state.ring else { return Poll::Ready(()) };
            ring.post_waiting();
            left = left.saturating_sub(self.completions.drain(..).filter(|c| c.tag == LAST).count());
            // An engine that refuses work has stopped, so it moves no more data.
            if left == 0 || ring.failure().is_some() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    /// Handles everything that is ready. Completes with the reason when the incarnation must end.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<ChannelError> {
        match self.turns(cx) {
            Ok(progress) => {
                let poll = self.store_channel.lock().poll;
                self.poller.after_turn(progress, poll, cx);
                Poll::Pending
            }
            Err(e) => Poll::Ready(e),
        }
    }

    fn turns(&mut self, cx: &mut Context<'_>) -> Result<bool, ChannelError> {
        self.store_channel.driver.register(cx.waker());
        let mut any = false;
        loop {
            let mut progress = self.take_completions(cx)?;
            progress |= self.hear_bell(cx)?;
            progress |= self.take_frames(cx)?;
            self.attach(cx)?;
            self.tick(cx)?;
            self.write_control(cx)?;
            if !progress {
                self.post()?;
                return Ok(any);
            }
            any = true;
        }
    }

    /// Posts all chains that are ready.
    fn post(&mut self) -> Result<(), ChannelError> {
        let mut state = self.store_channel.lock();
        if let Some(why) = &state.fatal {
            return Err(ChannelError::Protocol(why.clone()));
        }
        match &mut state.ring {
            Some(ring) => {
                ring.post_waiting();
                ring.failure().map_or(Ok(()), |why| Err(ChannelError::Transfer(why.to_owned())))
            }
            None => Ok(()),
        }
    }

    fn take_completions(&mut self, cx: &mut Context<'_>) -> Result<bool, ChannelError> {
        let completions = &mut self.completions;
        self.store_channel.driver_turn(|state| {
            let Some(ring) = &mut state.ring else { return Ok(false) };
            ring.engine().poll_completions(cx, completions);
            ring.post_waiting();
            if let Some(why) = ring.failure() {
                return Err(ChannelError::Transfer(why.to_owned()));
            }
            let progress = !completions.is_empty();
            completions.drain(..).try_for_each(|completion| state.completed(&completion))?;
            Ok(progress)
        })
    }

    fn hear_bell(&mut self, cx: &mut Context<'_>) -> Result<bool, ChannelError> {
        let Some(bell) = &self.bell else { return Ok(false) };
        let Poll::Ready(count) = bell.poll_wait(cx) else { return Ok(false) };
        let count = count?;
        self.store_channel.driver_turn(|state| state.heard_bell(count))?;
        Ok(true)
    }

    /// Attaches the engine again when the host has made an offer.
    fn attach(&mut self, cx: &mut Context<'_>) -> Result<(), ChannelError> {
        let store_channel = Arc::clone(&self.store_channel);
        let mut state = store_channel.lock();
        if !state.is_attaching() {
            self.attaching = None;
            return Ok(());
        }
        if let (Some(offer), Some(ring)) = (state.take_offer(), &state.ring) {
            let (engine, len) = (Arc::clone(ring.engine()), ring.layout().len());
            self.attaching =
                Some(Box::pin(async move { engine.attach(MemoryAccess::Offer(offer), len).await }));
        }
        drop(state);
        let Some(attaching) = &mut self.attaching else { return Ok(()) };
        let Poll::Ready(joined) = attaching.as_mut().poll(cx) else { return Ok(()) };
        self.attaching = None;
        if let Some(bell) = self.store_channel.driver_turn(|state| Ok(state.attached(joined)))? {
            self.bell = Some(bell);
        }
        Ok(())
    }

    fn take_frames(&mut self, cx: &mut Context<'_>) -> Result<bool, ChannelError> {
        let mut progress = false;
        for _ in 0..FRAMES_PER_TURN {
            let Poll::Ready(frame) = self.control.poll_frame(cx) else { break };
            let frame = frame?;
            if frame.header.kind != channel::EntryKind::Reply {
                return Err(ChannelError::Protocol("the store sent a frame that is not a reply".into()));
            }
            self.store_channel.driver_turn(|state| {
                if frame.header.id == NO_REPLY {
                    state.dma_failed("the host found an invalid entry in its ring");
                    return Ok(());
                }
                state.reply(frame, Route::Socket, None)
            })?;
            progress = true;
        }
        Ok(progress)
    }

    /// Checks for overdue transfers and replies when the timer has expired.
    fn tick(&mut self, cx: &mut Context<'_>) -> Result<(), ChannelError> {
        let expired = match &mut self.timer {
            Some(timer) => timer.as_mut().poll(cx).is_ready(),
            None => self.store_channel.lock().has_work(),
        };
        if !expired {
            return Ok(());
        }
        let now = Instant::now();
        self.store_channel.driver_turn(|state| {
            state.tick(now);
            Ok(())
        })?;
        let next = self.store_channel.lock().watch(now);
        self.timer = next.map(|at| Box::pin(tokio::time::sleep_until(at)));
        if let Some(timer) = &mut self.timer {
            // Registers the waker. If the timer has expired meanwhile, the next turn handles it.
            if timer.as_mut().poll(cx).is_ready() {
                cx.waker().wake_by_ref();
            }
        }
        Ok(())
    }

    fn write_control(&mut self, cx: &mut Context<'_>) -> Result<(), ChannelError> {
        let output = self.store_channel.lock().output.take();
        for frame in output {
            self.control.push(frame.header, &frame.control, frame.data);
        }
        match self.control.poll_flush(cx) {
            Poll::Ready(result) => result,
            Poll::Pending => Ok(()),
        }
    }
}

impl State {
    fn completed(&mut self, completion: &ChainCompletion) -> Result<(), ChannelError> {
        if completion.tag == FETCH {
            return self.fetched_replies(completion);
        }
        if self.payload_completed(completion) || self.recovery_completed(completion) {
            return Ok(());
        }
        // The engine reports a chain without a tag only if the chain fails.
        if let Err(failed) = &completion.result {
            self.dma_failed(&failed.to_string());
        }
        Ok(())
    }

    fn fetched_replies(&mut self, completion: &ChainCompletion) -> Result<(), ChannelError> {
        if !self.is_open() {
            // The host sends these replies over the control socket as well.
            return Ok(());
        }
        if let Err(failed) = &completion.result {
            self.dma_failed(&failed.to_string());
            return Ok(());
        }
        let (mut available, since) = self.replies.end_fetch();
        let fetched = ReplyTimes { since, started: completion.started, finished: completion.finished };
        // If DMA fails during the loop, the remaining replies arrive over the control socket.
        while available > 0 && self.is_open() {
            let Some(ring) = &mut self.ring else { break };
            let (frame, footprint) = match ring.take(available) {
                Ok(taken) => taken,
                Err(e) => {
                    // Assume that DMA damaged the entry. If the host wrote an invalid entry, its
                    // copy on the control socket is invalid as well.
                    self.dma_failed(&format!("replies were damaged during their transfer: {e}"));
                    return Ok(());
                }
            };
            available -= footprint;
            self.reply(frame, Route::Ring, Some(&fetched))?;
        }
        if self.is_open() {
            self.fetch();
        }
        Ok(())
    }

    /// Starts to fetch the announced replies, unless a fetch is running.
    fn fetch(&mut self) {
        if let Some(ring) = &mut self.ring
            && let Some(len) = self.replies.begin_fetch(Instant::now())
        {
            ring.fetch(len);
        }
    }

    fn heard_bell(&mut self, count: u64) -> Result<(), ChannelError> {
        if !self.is_open() {
            // The doorbell was rung before the rings were closed, or it answers a probe.
            self.replies.ring_in_probe(count);
            self.bell_during_probe();
            return Ok(());
        }
        let limit = self.ring.as_ref().map_or(0, |ring| ring.layout().outbox().len);
        self.replies.announce(count, limit)?;
        self.fetch();
        Ok(())
    }

    /// Returns when the driver must check for overdue transfers and replies next; `None` if nothing
    /// can become overdue.
    fn watch(&mut self, now: Instant) -> Option<Instant> {
        let next = self.next_tick(now);
        self.watched = next.is_some();
        next
    }

    /// Whether anything is in progress that could become overdue.
    pub(super) fn has_work(&self) -> bool {
        let Some(ring) = &self.ring else { return false };
        !self.is_open() || ring.outstanding() > 0 || !self.dma.is_idle()
    }
}

impl Drop for ChannelDriver {
    /// The runtime may drop the driver before the incarnation ends. The calls then fail, and the
    /// memory that DMA may still use is leaked instead of freed, unless the engine has stopped.
    fn drop(&mut self) {
        if self.drained {
            return;
        }
        let left = self.store_channel.end("the runtime of the attachment has ended");
        if !self.store_channel.engine.as_ref().is_some_and(|engine| engine.has_stopped()) {
            std::mem::forget(std::mem::take(&mut self.kept));
            std::mem::forget(left);
        }
    }
}
