//! The task that takes what comes back from the host.

use std::collections::HashMap;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};

use channel::{Bell, Chain, ChannelError, Completion, Control};

use super::jobs::Route;
use super::replies::{Fetching, Leftover};
use super::ring_side::{FENCE, FETCH};
use super::{Landing, Link};

/// Most frames taken from the control socket in one turn, so that the doorbell is looked at, too.
const FRAMES_PER_TURN: usize = 64;

/// Takes replies from doorbell, DMA completions and control socket until the session ends.
pub(crate) struct Driver {
    link: Arc<Link>,
    control: Control,
    doorbell: Option<Box<dyn Bell>>,
    /// Bytes of replies announced and not asked for yet.
    announced: usize,
    /// Bytes of replies that are being fetched.
    asked: usize,
    fetching: HashMap<u64, Fetching>,
    completions: Vec<Completion>,
    /// What DMA may still use after the session's end.
    kept: Kept,
    drained: bool,
}

/// Memory of calls that have failed, while transfers to or from it may be under way.
#[derive(Default)]
struct Kept {
    requests: Vec<Leftover>,
    landings: Vec<Landing>,
}

impl Driver {
    /// For a link over `control`, whose store rings `doorbell`.
    pub(crate) fn new(link: Arc<Link>, control: Control, doorbell: Option<Box<dyn Bell>>) -> Driver {
        Driver {
            link,
            control,
            doorbell,
            announced: 0,
            asked: 0,
            fetching: HashMap::new(),
            completions: Vec::new(),
            kept: Kept::default(),
            drained: false,
        }
    }

    /// Runs until the session ends or `stop` is ready, then fails what has no answer and returns once no DMA of the
    /// session is under way. `on_end` is called first, with the reason.
    pub(crate) async fn run(mut self, stop: impl Future<Output = ()>, on_end: impl FnOnce(&str)) -> String {
        let mut stop = std::pin::pin!(stop);
        let why = poll_fn(|cx| {
            if stop.as_mut().poll(cx).is_ready() {
                return Poll::Ready("the session was closed".to_owned());
            }
            self.poll(cx).map(|e| e.to_string())
        })
        .await;
        on_end(&why);
        self.fail_all(&why);
        self.drain().await;
        self.drained = true;
        self.link.lock().ring = None;
        why
    }

    fn fail_all(&mut self, why: &str) {
        self.kept.requests.extend(self.link.end(why));
        let fetching = std::mem::take(&mut self.fetching);
        self.kept.landings.extend(fetching.into_values().map(|read| read.fail(why)));
    }

    /// Waits until every transfer of the session is done.
    async fn drain(&mut self) {
        let engine = {
            let mut state = self.link.lock();
            let Some(ring) = &mut state.ring else { return };
            ring.post(Chain { tag: Some(FENCE), ..Chain::default() });
            ring.post_waiting();
            Arc::clone(ring.engine())
        };
        poll_fn(|cx| {
            engine.poll_completions(cx, &mut self.completions);
            let mut state = self.link.lock();
            let Some(ring) = &mut state.ring else { return Poll::Ready(()) };
            ring.post_waiting();
            // An engine that refuses work has stopped and moves nothing any more.
            let done = self.completions.drain(..).any(|c| c.tag == FENCE) || ring.failure().is_some();
            if done { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    /// Ready when the session must end.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<ChannelError> {
        match self.turns(cx) {
            Ok(()) => Poll::Pending,
            Err(e) => Poll::Ready(e),
        }
    }

    fn turns(&mut self, cx: &mut Context<'_>) -> Result<(), ChannelError> {
        self.link.driver.register(cx.waker());
        loop {
            let mut progress = self.take_completions(cx)?;
            progress |= self.hear_doorbell(cx)?;
            progress |= self.take_frames(cx)?;
            self.write_control(cx)?;
            if !progress {
                return self.post();
            }
        }
    }

    /// Has everything that is ready posted.
    fn post(&mut self) -> Result<(), ChannelError> {
        match &mut self.link.lock().ring {
            Some(ring) => {
                ring.post_waiting();
                ring.failure().map_or(Ok(()), |why| Err(ChannelError::Transfer(why.to_owned())))
            }
            None => Ok(()),
        }
    }

    fn take_completions(&mut self, cx: &mut Context<'_>) -> Result<bool, ChannelError> {
        let link = Arc::clone(&self.link);
        let mut state = link.lock();
        let Some(ring) = &mut state.ring else { return Ok(false) };
        ring.engine().poll_completions(cx, &mut self.completions);
        ring.post_waiting();
        if let Some(why) = ring.failure() {
            return Err(ChannelError::Transfer(why.to_owned()));
        }
        let progress = !self.completions.is_empty();
        for completion in std::mem::take(&mut self.completions) {
            completion.result.map_err(|failed| ChannelError::Transfer(failed.to_string()))?;
            if completion.tag == FETCH {
                self.take_replies(&mut state)?;
            } else if let Some(read) = self.fetching.remove(&completion.tag) {
                state.fetched(read);
            }
        }
        if progress {
            state.pump();
        }
        Ok(progress)
    }

    fn take_replies(&mut self, state: &mut super::State) -> Result<(), ChannelError> {
        let mut available = std::mem::take(&mut self.asked);
        while available > 0 {
            let Some(ring) = &mut state.ring else { break };
            let (frame, footprint) = ring.take(available)?;
            available -= footprint;
            state.reply(frame, Route::Ring, &mut self.fetching)?;
        }
        if self.announced > 0 {
            self.fetch(state);
        }
        Ok(())
    }

    fn fetch(&mut self, state: &mut super::State) {
        if let Some(ring) = &mut state.ring {
            self.asked = std::mem::take(&mut self.announced);
            ring.fetch(self.asked);
        }
    }

    fn hear_doorbell(&mut self, cx: &mut Context<'_>) -> Result<bool, ChannelError> {
        let Some(doorbell) = &self.doorbell else { return Ok(false) };
        let Poll::Ready(count) = doorbell.poll_wait(cx) else { return Ok(false) };
        let link = Arc::clone(&self.link);
        let mut state = link.lock();
        let limit = state.ring.as_ref().map_or(0, |ring| ring.layout().outbox().len);
        let count = usize::try_from(count?).unwrap_or(usize::MAX);
        let fits = self.announced.checked_add(count).filter(|sum| sum + self.asked <= limit);
        self.announced = fits.filter(|sum| sum.is_multiple_of(channel::ring::CELL)).ok_or_else(|| {
            ChannelError::Protocol(format!("the doorbell announced {count} bytes, the outbox has {limit}"))
        })?;
        if self.asked == 0 {
            self.fetch(&mut state);
        }
        Ok(true)
    }

    fn take_frames(&mut self, cx: &mut Context<'_>) -> Result<bool, ChannelError> {
        let mut progress = false;
        for _ in 0..FRAMES_PER_TURN {
            let Poll::Ready(frame) = self.control.poll_frame(cx) else { break };
            let frame = frame?;
            let mut state = self.link.lock();
            if frame.header.kind != channel::Kind::Reply {
                return Err(ChannelError::Protocol("the store sent something else than replies".into()));
            }
            state.reply(frame, Route::Socket, &mut self.fetching)?;
            state.pump();
            progress = true;
        }
        Ok(progress)
    }

    fn write_control(&mut self, cx: &mut Context<'_>) -> Result<(), ChannelError> {
        let output = std::mem::take(&mut self.link.lock().control_out);
        for (header, control, data) in output {
            self.control.push(header, &control, data);
        }
        match self.control.poll_flush(cx) {
            Poll::Ready(result) => result,
            Poll::Pending => Ok(()),
        }
    }
}

impl Drop for Driver {
    /// If the runtime was dropped under the session, its calls fail, and memory that DMA may still be using is given up
    /// rather than given back.
    fn drop(&mut self) {
        if !self.drained {
            self.fail_all("the runtime of the session has ended");
            std::mem::forget(std::mem::take(&mut self.kept));
        }
    }
}
