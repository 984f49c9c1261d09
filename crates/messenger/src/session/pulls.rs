//! Pulls of this side: data of the peer's offers on its way into our buffers.
//!
//! A destination buffer belongs to its pull, except while the reader fills it: then the reader has it, and whoever gives
//! the pull up only removes the pull. The reader notices, stops, and drops the buffer; so memory never goes back to its
//! pool while something may still write to it.

use std::collections::BTreeMap;

use base::block::{BLOCK, ChecksumMismatch, piece_count};
use base::mem::ArenaBuf;
use tokio::sync::oneshot;

use super::{Shared, State};
use crate::frame::{Body, PullCancel, PullData, PullRefused, PullRequest, Refusal};
use crate::{MessengerError, Pulled};

/// Who waits for a pull.
pub(super) type PullWaiter = oneshot::Sender<Result<Pulled, MessengerError>>;

/// Attempts at a pull, the first included. On the wire, an attempt is the pull's number plus its own: data of an earlier
/// attempt that is still on its way is told apart, and dropped.
const ATTEMPTS: u64 = 8;

struct Pull {
    /// How often data came damaged and was asked for again.
    attempt: u64,
    offer: u64,
    /// First byte within the offer.
    start: u64,
    /// Object offset of the first byte modulo 4096.
    phase: u64,
    len: usize,
    filled: usize,
    /// `None` while the reader has it.
    dest: Option<ArenaBuf>,
    checksums: Vec<u32>,
    done: PullWaiter,
}

/// The pulls under way.
#[derive(Default)]
pub(super) struct Pulls {
    last: u64,
    active: BTreeMap<u64, Pull>,
}

/// Which part of a pull a frame of data fills.
pub(super) struct Filling {
    pub(super) pull: u64,
    /// First byte of the buffer that is to be filled.
    pub(super) at: usize,
    pub(super) len: usize,
}

impl Pulls {
    pub(super) fn is_empty(&self) -> bool {
        self.active.is_empty()
    }

    /// Registers a pull. Returns its number and what it asks for.
    pub(super) fn begin(
        &mut self,
        offer: u64,
        start: u64,
        phase: u64,
        dest: ArenaBuf,
        done: PullWaiter,
    ) -> PullRequest {
        self.last += ATTEMPTS;
        let len = dest.len();
        let checksums = Vec::with_capacity(piece_count(phase, len as u64) as usize);
        let dest = Some(dest);
        let pull = Pull { attempt: 0, offer, start, phase, len, filled: 0, dest, checksums, done };
        let request = pull.request(self.last);
        self.active.insert(self.last, pull);
        request
    }

    /// What must be asked for again on a new transport.
    pub(super) fn requests(&self) -> Vec<PullRequest> {
        self.active.iter().map(|(id, pull)| pull.request(*id)).collect()
    }

    /// The pull that a number on the wire means, unless it was given up, or means an earlier attempt.
    fn find(&mut self, on_wire: u64) -> Option<(u64, &mut Pull)> {
        let id = on_wire - on_wire % ATTEMPTS;
        let pull = self.active.get_mut(&id)?;
        (id + pull.attempt == on_wire).then_some((id, pull))
    }

    /// The buffer that `data`, with a payload of `len` bytes at `phase`, goes to; `None` if nobody wants it any more.
    ///
    /// # Errors
    /// If that is not the next part of the pull.
    fn take_dest(
        &mut self,
        data: &PullData,
        phase: u16,
        len: usize,
    ) -> Result<Option<(Filling, ArenaBuf)>, MessengerError> {
        let Some((id, pull)) = self.find(data.pull) else { return Ok(None) };
        let at = pull.filled;
        let object_phase = (pull.phase + at as u64) % BLOCK;
        let end = at + len;
        let whole_pieces = end == pull.len || (pull.phase + end as u64).is_multiple_of(BLOCK);
        let fits = data.offset == pull.start + at as u64 && end <= pull.len && len > 0;
        if !fits || u64::from(phase) != object_phase || !whole_pieces {
            let range = format!("{}+{len} of pull {}", data.offset, data.pull);
            return Err(MessengerError::Protocol(format!(
                "data came for {range}, which is not its next part"
            )));
        }
        let dest = pull.dest.take();
        Ok(dest.map(|dest| (Filling { pull: id, at, len }, dest)))
    }

    /// Fails all of them.
    pub(super) fn fail_all(self, why: &MessengerError) {
        for pull in self.active.into_values() {
            // Whoever asked may have stopped waiting; here and below.
            let _ = pull.done.send(Err(why.clone()));
        }
    }
}

impl Pull {
    fn request(&self, id: u64) -> PullRequest {
        let offset = self.start + self.filled as u64;
        PullRequest {
            pull: id + self.attempt,
            offer: self.offer,
            offset,
            len: (self.len - self.filled) as u64,
        }
    }
}

impl Shared {
    /// See [`Pulls::take_dest`].
    pub(super) fn take_dest<'a>(
        &'a self,
        data: &PullData,
        phase: u16,
        len: usize,
    ) -> Result<Option<PullBuffer<'a>>, MessengerError> {
        let taken = self.lock().pulls.take_dest(data, phase, len)?;
        Ok(taken.map(|(filling, dest)| PullBuffer { shared: self, filling, dest: Some(dest) }))
    }

    /// Whether somebody still waits for the pull.
    pub(super) fn wants_pull(&self, pull: u64) -> bool {
        self.lock().pulls.active.contains_key(&pull)
    }

    /// The peer will send nothing (more).
    pub(super) fn on_pull_refused(&self, refused: PullRefused) {
        let mut state = self.lock();
        let id = state.pulls.find(refused.pull).map(|(id, _)| id);
        let pull = id.and_then(|id| state.pulls.active.remove(&id));
        drop(state);
        if let Some(pull) = pull {
            self.metrics.refusals.increment(1);
            let why = match refused.refusal {
                Refusal::Offer => MessengerError::BulkRefused(refused.reason),
                Refusal::Source => MessengerError::Source(refused.reason),
            };
            let _ = pull.done.send(Err(why));
        }
    }

    /// Nobody waits for the pull any more: its buffer goes back as soon as nothing writes to it.
    pub(super) fn drop_pull(&self, id: u64) {
        let mut state = self.lock();
        let Some(pull) = state.pulls.active.remove(&id) else { return };
        let cancel = PullCancel { pull: id + pull.attempt };
        let overflow = state.outbound.push_control(Body::PullCancel(cancel));
        drop(state);
        drop(pull);
        if let Err(why) = overflow {
            self.lose(why);
        }
        self.pull_dropped.notify_one();
        self.wake_writer.notify_one();
    }
}

/// The buffer of a pull while the reader has it. Dropped, it goes back to its pull, or to its pool if that was given up.
pub(super) struct PullBuffer<'a> {
    shared: &'a Shared,
    filling: Filling,
    dest: Option<ArenaBuf>,
}

impl PullBuffer<'_> {
    pub(super) fn pull(&self) -> u64 {
        self.filling.pull
    }

    /// The part that is to be filled.
    pub(super) fn bytes(&mut self) -> &mut [u8] {
        let Filling { at, len, .. } = self.filling;
        let dest = self.dest.as_mut().expect("the buffer is here until this is dropped");
        &mut dest[at..at + len]
    }

    /// The part was filled with the right data, whose pieces have these checksums.
    pub(super) fn finish(mut self, checksums: &[u32]) {
        let mut state = self.shared.lock();
        let Some(pull) = state.pulls.active.get_mut(&self.filling.pull) else { return drop(state) };
        pull.checksums.extend_from_slice(checksums);
        pull.filled += self.filling.len;
        if pull.filled < pull.len {
            return drop(state);
        }
        let pull = state.pulls.active.remove(&self.filling.pull).expect("it was just seen");
        drop(state);
        let buf = self.dest.take().expect("the buffer is here until this is dropped");
        let _ = pull.done.send(Ok(Pulled { buf, checksums: pull.checksums }));
    }

    /// The part was filled with wrong data: it is asked for again, a few times.
    pub(super) fn damaged(self, how: ChecksumMismatch) -> Result<(), MessengerError> {
        let mut state = self.shared.lock();
        let State { pulls, outbound, .. } = &mut *state;
        let id = self.filling.pull;
        let Some(pull) = pulls.active.get_mut(&id) else { return Ok(()) };
        outbound.push_control(Body::PullCancel(PullCancel { pull: id + pull.attempt }))?;
        self.shared.wake_writer.notify_one();
        pull.attempt += 1;
        if pull.attempt < ATTEMPTS {
            outbound.push_control(Body::PullRequest(pull.request(id)))?;
            return Ok(());
        }
        let pull = pulls.active.remove(&id).expect("it was just seen");
        drop(state);
        let _ = pull.done.send(Err(MessengerError::Damaged(how.to_string())));
        Ok(())
    }
}

impl Drop for PullBuffer<'_> {
    fn drop(&mut self) {
        let Some(dest) = self.dest.take() else { return };
        let mut state = self.shared.lock();
        match state.pulls.active.get_mut(&self.filling.pull) {
            Some(pull) => pull.dest = Some(dest),
            None => {
                drop(state);
                drop(dest);
            }
        }
    }
}
