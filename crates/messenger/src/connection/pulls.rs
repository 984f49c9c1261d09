//! Pulls of this side: transfers of data from the peer's offers into local buffers.
//!
//! A destination buffer belongs to its pull, except while the reader fills it. During that time the
//! reader owns the buffer, and a caller that cancels the pull only removes the pull's entry. The
//! reader notices the missing entry, stops, and drops the buffer. So a buffer never returns to its
//! memory pool while the reader may still write to it.

use std::collections::BTreeMap;

use base::block::{BLOCK, ChecksumMismatch, piece_count};
use base::mem::ArenaBuf;
use tokio::sync::oneshot;

use super::{Shared, State};
use crate::frame::{Body, PullCancel, PullData, PullRefused, PullRequest, Refusal};
use crate::{MessengerError, Pulled};

/// Delivers the outcome of a pull to the caller that waits for it.
pub(super) type PullWaiter = oneshot::Sender<Result<Pulled, MessengerError>>;

/// Maximum number of attempts at a pull, including the first. On the wire, an attempt is identified
/// by the sum of the pull's number and the attempt's number. So the receiver recognizes and drops
/// late data of an earlier attempt.
const ATTEMPTS: u64 = 8;

struct Pull {
    /// Number of times that damaged data arrived and was requested again.
    attempt: u64,
    offer: u64,
    /// Offset of the first byte within the offer.
    start: u64,
    /// Offset of the first byte within the object, modulo 4096.
    block_offset: u64,
    len: usize,
    filled: usize,
    /// `None` while the reader owns the buffer.
    dest: Option<ArenaBuf>,
    checksums: Vec<u32>,
    done: PullWaiter,
}

/// The pulls in progress.
#[derive(Default)]
pub(super) struct Pulls {
    last: u64,
    active: BTreeMap<u64, Pull>,
    /// Number of bytes that were pulled and verified since the connection began.
    pulled_bytes: u64,
}

/// The part of a pull that a data frame fills.
pub(super) struct Filling {
    pub(super) pull: u64,
    /// Index of the first byte in the buffer to fill.
    pub(super) at: usize,
    pub(super) len: usize,
}

impl Pulls {
    pub(super) fn is_empty(&self) -> bool {
        self.active.is_empty()
    }

    /// Number of bytes that were pulled and verified since the connection began.
    pub(super) fn pulled_bytes(&self) -> u64 {
        self.pulled_bytes
    }

    /// Records that bytes were pulled and verified.
    pub(super) fn on_pulled(&mut self, len: usize) {
        self.pulled_bytes += len as u64;
    }

    /// Registers a pull and returns the request to send.
    pub(super) fn begin(
        &mut self,
        offer: u64,
        start: u64,
        block_offset: u64,
        dest: ArenaBuf,
        done: PullWaiter,
    ) -> PullRequest {
        self.last += ATTEMPTS;
        let len = dest.len();
        let checksums = Vec::with_capacity(piece_count(block_offset, len as u64) as usize);
        let dest = Some(dest);
        let pull = Pull { attempt: 0, offer, start, block_offset, len, filled: 0, dest, checksums, done };
        let request = pull.request(self.last);
        self.active.insert(self.last, pull);
        request
    }

    /// The requests that must be sent again on a new transport.
    pub(super) fn requests(&self) -> Vec<PullRequest> {
        self.active.iter().map(|(id, pull)| pull.request(*id)).collect()
    }

    /// Finds the pull for a number on the wire. `None` if the pull was cancelled, or if the number
    /// names an earlier attempt.
    fn find(&mut self, on_wire: u64) -> Option<(u64, &mut Pull)> {
        let id = on_wire - on_wire % ATTEMPTS;
        let pull = self.active.get_mut(&id)?;
        (id + pull.attempt == on_wire).then_some((id, pull))
    }

    /// Takes the buffer for `data`, whose payload has `len` bytes and starts at `block_offset` in
    /// its block. `None` if the pull was cancelled.
    ///
    /// # Errors
    /// If the data is not the next part of the pull.
    fn take_dest(
        &mut self,
        data: &PullData,
        block_offset: u16,
        len: usize,
    ) -> Result<Option<(Filling, ArenaBuf)>, MessengerError> {
        let Some((id, pull)) = self.find(data.pull) else { return Ok(None) };
        let at = pull.filled;
        let object_phase = (pull.block_offset + at as u64) % BLOCK;
        let end = at + len;
        let whole_pieces = end == pull.len || (pull.block_offset + end as u64).is_multiple_of(BLOCK);
        let fits = data.offset == pull.start + at as u64 && end <= pull.len && len > 0;
        if !fits || u64::from(block_offset) != object_phase || !whole_pieces {
            let range = format!("bytes {}+{len} of pull {}", data.offset, data.pull);
            return Err(MessengerError::Protocol(format!(
                "the peer sent data for {range}, which is not the next part of the pull"
            )));
        }
        let dest = pull.dest.take();
        Ok(dest.map(|dest| (Filling { pull: id, at, len }, dest)))
    }

    /// Fails all pulls.
    pub(super) fn fail_all(self, why: &MessengerError) {
        for pull in self.active.into_values() {
            // The caller may have stopped waiting; ignore the error, here and below.
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
    /// Takes the buffer for `data` from its pull, as [`Pulls::take_dest`] does. The buffer returns
    /// to the pull when the result is dropped.
    pub(super) fn take_dest<'a>(
        &'a self,
        data: &PullData,
        block_offset: u16,
        len: usize,
    ) -> Result<Option<PullBuffer<'a>>, MessengerError> {
        let taken = self.lock().pulls.take_dest(data, block_offset, len)?;
        Ok(taken.map(|(filling, dest)| PullBuffer { shared: self, filling, dest: Some(dest) }))
    }

    /// Whether the pull is still in progress: it has neither completed nor been cancelled.
    pub(super) fn wants_pull(&self, pull: u64) -> bool {
        self.lock().pulls.active.contains_key(&pull)
    }

    /// Handles the refusal of a pull: the peer will send no more data of the pull.
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

    /// Cancels a pull. The buffer of the pull returns to its memory pool as soon as the reader no
    /// longer writes to the buffer.
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

/// The buffer of a pull while the reader owns it. When this value is dropped, the buffer returns to
/// its pull, or to its pool if the pull was cancelled.
pub(super) struct PullBuffer<'a> {
    shared: &'a Shared,
    filling: Filling,
    dest: Option<ArenaBuf>,
}

impl PullBuffer<'_> {
    pub(super) fn pull(&self) -> u64 {
        self.filling.pull
    }

    /// The part of the buffer to fill.
    pub(super) fn bytes(&mut self) -> &mut [u8] {
        let Filling { at, len, .. } = self.filling;
        let dest = self.dest.as_mut().expect("the buffer is present until this value is dropped");
        &mut dest[at..at + len]
    }

    /// Records that the part was filled with correct data, whose pieces have the given checksums.
    pub(super) fn finish(mut self, checksums: &[u32]) {
        let mut state = self.shared.lock();
        state.pulls.on_pulled(self.filling.len);
        let Some(pull) = state.pulls.active.get_mut(&self.filling.pull) else { return drop(state) };
        pull.checksums.extend_from_slice(checksums);
        pull.filled += self.filling.len;
        if pull.filled < pull.len {
            return drop(state);
        }
        let pull = state.pulls.active.remove(&self.filling.pull).expect("the pull was just found");
        drop(state);
        let buf = self.dest.take().expect("the buffer is present until this value is dropped");
        let _ = pull.done.send(Ok(Pulled { buf, checksums: pull.checksums }));
    }

    /// Handles damaged data in the part: requests the data again, up to [`ATTEMPTS`] attempts in
    /// total.
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
        let pull = pulls.active.remove(&id).expect("the pull was just found");
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
