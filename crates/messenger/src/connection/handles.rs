//! The handles of a connection, through which users call it.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use base::BoxFuture;
use base::block::{BLOCK, Payload};
use base::mem::ArenaBuf;
use tokio::sync::oneshot;
use tokio::time::timeout;
use wire::{BulkDescriptor, BulkDirection};

use super::batch::PushDestination;
use super::connection_end::CloseReason;
use super::exposed::Offered;
use super::inbound::charge;
use super::one_sided::NotPulled;
use super::outbound::Chunk;
use super::pulls::PullWaiter;
use super::range::{OfferRange, chunk_len, locate};
use super::{ConnectionState, Shared};
use crate::config::BULK_SLOTS;
use crate::frame::{Body, Push};
use crate::transport::packets::packet::EAGER_BYTES;
use crate::{
    BulkRegion, BulkSink, BulkSource, Connection, ConnectionEvent, Incoming, Limits, Message, MessengerError,
    PeerInfo, Pulled, Result,
};

/// Closes the connection when its last handle is dropped.
struct Lifetime(Arc<Shared>);

impl Drop for Lifetime {
    fn drop(&mut self) {
        self.0.close_soon(CloseReason::User);
    }
}

/// The sending half of a connection.
pub(crate) struct ConnectionHandle {
    shared: Arc<Shared>,
    _lifetime: Arc<Lifetime>,
}

/// The receiving half of a connection.
pub(crate) struct IncomingHandle {
    shared: Arc<Shared>,
    _lifetime: Arc<Lifetime>,
}

impl Shared {
    /// Creates the handles of the connection. Must be called only once.
    pub(crate) fn handles(self: &Arc<Self>) -> (Arc<dyn Connection>, Box<dyn Incoming>) {
        let lifetime = Arc::new(Lifetime(Arc::clone(self)));
        let connection = ConnectionHandle { shared: Arc::clone(self), _lifetime: Arc::clone(&lifetime) };
        let incoming = IncomingHandle { shared: Arc::clone(self), _lifetime: lifetime };
        (Arc::new(connection), Box::new(incoming))
    }

    async fn send_message(&self, message: Message) -> Result<()> {
        let checks =
            [(message.header.len(), self.limits.max_header), (message.payload.len(), self.limits.max_inline)];
        if let Some(&(size, limit)) = checks.iter().find(|(size, limit)| size > limit) {
            return Err(MessengerError::TooLarge { size, limit });
        }
        let credit = self.send_limits.message_credit(charge(&message) as u32).await;
        let credit = credit.map_err(|_| self.loss())?;
        let mut state = self.lock();
        Self::check_open(&state)?;
        state.outbound.push_message(message);
        drop(state);
        credit.spend();
        self.metrics.queue_depth.increment(1);
        self.wake_writer.notify_one();
        Ok(())
    }

    async fn pull(&self, at: OfferRange, dest: ArenaBuf) -> Result<Pulled> {
        let _slot = self.send_limits.pull_slot().await.map_err(|_| self.loss())?;
        let (done, answer) = oneshot::channel();
        let _guard = self.begin_pull(&at, dest, done)?;
        answer.await.unwrap_or_else(|_| Err(self.loss()))
    }

    fn begin_pull(&self, at: &OfferRange, dest: ArenaBuf, done: PullWaiter) -> Result<PullGuard<'_>> {
        let mut state = self.lock();
        Self::check_open(&state)?;
        let request = state.pulls.begin(at.key, at.offset, at.block_offset, dest, done);
        let guard = PullGuard { shared: self, pull: request.pull };
        let queued = state.outbound.push_control(Body::PullRequest(request));
        // Release the mutex first: dropping the guard locks it again.
        drop(state);
        queued?;
        self.metrics.pulls.increment(1);
        self.wake_writer.notify_one();
        Ok(guard)
    }

    /// Pulls by one-sided reads of the peer's memory if possible, and otherwise in frames.
    async fn pull_any(
        &self,
        from: &BulkDescriptor,
        at: OfferRange,
        dest: ArenaBuf,
        limit: Duration,
    ) -> Result<Pulled> {
        match self.pull_one_sided(from, &at, dest, limit).await {
            Ok(pulled) => Ok(pulled),
            Err(NotPulled::Framed(dest)) => self.pull(at, dest).await,
            Err(NotPulled::Lost(why)) => Err(why),
        }
    }

    async fn push(&self, to: &BulkDescriptor, mut at: OfferRange, payload: Payload) -> Result<()> {
        let (data, checksums) = payload.into_parts();
        let (mut data, mut checksums) = (data, checksums.as_slice());
        // A dropped receiver tells the writer that this call no longer waits for the chunk.
        let mut placed = VecDeque::new();
        let mut turn = self.turns.turn(at.key, data.len() as u64);
        while !data.is_empty() {
            let chunk = data.split_to(chunk_len(at.block_offset, data.len() as u64));
            turn.take(chunk.len()).await.map_err(|_| self.loss())?;
            let pieces = base::block::piece_count(at.block_offset, chunk.len() as u64) as usize;
            let (sums, rest) = checksums.split_at(pieces);
            checksums = rest;
            let len = chunk.len() as u64;
            let payload = Payload::from_parts(at.block_offset, chunk, sums.to_vec())
                .map_err(|e| MessengerError::BulkRefused(e.to_string()))?;
            let (tell, told) = oneshot::channel();
            let target = self.target(to, at.offset, len);
            let push = Push { offer: at.key, offset: at.offset };
            placed.push_back(told);
            self.push_chunk(push, payload, target, tell).await?;
            if placed.len() > BULK_SLOTS {
                // The queue has only `BULK_SLOTS` slots, so the earliest chunk has left it.
                placed.pop_front();
            }
            at.offset += len;
            at.block_offset = (at.block_offset + len) % BLOCK;
        }
        match placed.pop_back() {
            Some(placed) => placed.await.map_err(|_| self.loss()),
            None => Ok(()),
        }
    }

    async fn push_chunk(
        &self,
        push: Push,
        payload: Payload,
        target: Option<PushDestination>,
        tell: oneshot::Sender<()>,
    ) -> Result<()> {
        let room = self.send_limits.push_room(payload.len() as u32).await.map_err(|_| self.loss())?;
        let slot = self.send_limits.bulk_slot().await.map_err(|_| self.loss())?;
        let mut state = self.lock();
        Self::check_open(&state)?;
        if let Some(reason) = state.offers.refusal(push.offer) {
            return Err(MessengerError::BulkRefused(reason.to_owned()));
        }
        state.outbound.push_chunk(Chunk::Push(push, payload, target, Some(tell)));
        drop(state);
        room.spend();
        slot.spend();
        self.wake_writer.notify_one();
        Ok(())
    }

    async fn end(&self) {
        self.close_soon(CloseReason::User);
        // The connection's task ends within a second of this request.
        self.end.ended().await;
    }

    fn poll_event(&self, cx: &Context<'_>) -> Poll<ConnectionEvent> {
        let mut state = self.lock();
        match state.inbound.pop() {
            Some((event, grant)) => {
                if grant && state.status == ConnectionState::Open {
                    state.outbound.want_window();
                    drop(state);
                    self.wake_writer.notify_one();
                }
                Poll::Ready(event)
            }
            None => {
                state.inbound.set_waker(cx.waker());
                Poll::Pending
            }
        }
    }
}

/// Cancels a pull when the future that waits for it is dropped.
struct PullGuard<'a> {
    shared: &'a Shared,
    pull: u64,
}

impl Drop for PullGuard<'_> {
    fn drop(&mut self) {
        self.shared.drop_pull(self.pull);
    }
}

impl Connection for ConnectionHandle {
    fn peer(&self) -> &PeerInfo {
        &self.shared.peer
    }

    fn limits(&self) -> Limits {
        let limits = self.shared.limits;
        match self.shared.lock().link {
            Some(_) => Limits { eager: limits.eager.min(EAGER_BYTES), one_sided: true, ..limits },
            None => limits,
        }
    }

    fn send(&self, message: Message) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.shared.send_message(message))
    }

    fn offer_source(&self, source: Arc<dyn BulkSource>) -> Result<BulkRegion> {
        self.shared.offer(Offered::Source(source), BulkDirection::Read)
    }

    fn offer_sink(&self, sink: Arc<dyn BulkSink>, block_offset: u16) -> Result<BulkRegion> {
        self.shared.offer(Offered::Sink(sink, block_offset), BulkDirection::Write)
    }

    fn bulk_read<'a>(
        &'a self,
        from: &'a BulkDescriptor,
        offset: u64,
        dest: ArenaBuf,
        limit: Duration,
    ) -> BoxFuture<'a, Result<Pulled>> {
        Box::pin(async move {
            let range = locate(from, BulkDirection::Read, offset, dest.len() as u64)?;
            if dest.len() > self.shared.limits.max_bulk {
                return Err(MessengerError::TooLarge {
                    size: dest.len(),
                    limit: self.shared.limits.max_bulk,
                });
            }
            if dest.is_empty() {
                return Ok(Pulled { buf: dest, checksums: Vec::new() });
            }
            timeout(limit, self.shared.pull_any(from, range, dest, limit))
                .await
                .unwrap_or(Err(MessengerError::TimedOut(limit)))
        })
    }

    fn bulk_write<'a>(
        &'a self,
        to: &'a BulkDescriptor,
        offset: u64,
        payload: Payload,
        limit: Duration,
    ) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            let range = locate(to, BulkDirection::Write, offset, payload.len() as u64)?;
            if payload.len() > self.shared.limits.max_bulk {
                return Err(MessengerError::TooLarge {
                    size: payload.len(),
                    limit: self.shared.limits.max_bulk,
                });
            }
            if !payload.is_empty() && payload.block_offset() != range.block_offset {
                let why = "the payload and the offer have different piece boundaries";
                return Err(MessengerError::BulkRefused(why.into()));
            }
            timeout(limit, self.shared.push(to, range, payload))
                .await
                .unwrap_or(Err(MessengerError::TimedOut(limit)))
        })
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(self.shared.end())
    }
}

impl Incoming for IncomingHandle {
    fn next(&mut self) -> BoxFuture<'_, ConnectionEvent> {
        Box::pin(poll_fn(|cx| self.shared.poll_event(cx)))
    }
}

impl Drop for IncomingHandle {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        let dropped = state.inbound.deafen();
        state.outbound.want_window();
        drop(state);
        drop(dropped);
        self.shared.wake_writer.notify_one();
    }
}
