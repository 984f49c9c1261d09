//! Offers of this side: memory that the peer may pull from or push into. This module also serves
//! the peer's pulls.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Weak};
use std::time::Duration;

use base::block::{BLOCK, Payload};
use base::collections::HashMap;
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout};
use wire::{BulkDescriptor, BulkDirection, BulkOwner, BulkSegment, MemoryKind};

use super::exposed::{ExposedOffer, Offered};
use super::outbound::Chunk;
use super::range::{check_range, chunk_len};
use super::{ConnectionSide, ConnectionState, Shared};
use crate::config::MAX_PULLS;
use crate::frame::{Body, PullData, PullRefused, PullRequest, Push, PushRefused, Refusal};
use crate::transport::packets::Registration;
use crate::{BulkRegion, BulkSink, BulkSource, MessengerError};

/// Maximum number of the peer's offers that this side remembers because the peer refused a push to
/// them.
const MAX_REFUSED: usize = 64;

/// Maximum number of offers of one connection at a time.
const MAX_OFFERS: usize = 65_536;

/// If a source takes longer than this to read a chunk, its transfer gives its slot in the line to
/// another transfer.
const SOURCE_PATIENCE: Duration = Duration::from_millis(10);

struct Offer {
    what: Offered,
    expires: Instant,
    /// The memory of the offer that the peer can access by one-sided transfers, if there is any.
    exposed: Option<ExposedOffer>,
}

/// This side's offers, and the pulls that it serves.
#[derive(Default)]
pub(super) struct Offers {
    active: HashMap<u64, Offer>,
    serving: BTreeMap<u64, AbortHandle>,
    /// Offers of the peer to which the peer recently refused a push, each with the peer's reason,
    /// the latest first.
    refused: VecDeque<(u64, String)>,
}

impl Drop for Offers {
    fn drop(&mut self) {
        self.stop_serving();
    }
}

impl Offers {
    pub(super) fn is_empty(&self) -> bool {
        self.active.is_empty()
    }

    /// Ends the peer's access to memory that was exposed on a transport that has ended. The memory
    /// may be reused at once, because only the peer on that transport had the keys. Data that the
    /// peer wrote stays valid.
    pub(super) fn hide(&mut self) -> Vec<Registration> {
        self.active.values_mut().filter_map(|offer| offer.exposed.as_mut()?.hide_settled()).collect()
    }

    /// Ends the peer's access to the memory of expired offers.
    pub(super) fn hide_expired(&mut self) -> Vec<Registration> {
        let now = Instant::now();
        let expired = self.active.values_mut().filter(|offer| offer.expires <= now);
        expired.filter_map(|offer| offer.exposed.as_mut()?.hide()).collect()
    }

    /// Finds the exposed sink with the key `offer`. Also returns the sink's block_offset.
    pub(super) fn exposed_sink(&mut self, offer: u64) -> Result<(&mut ExposedOffer, u64), String> {
        self.live(offer)?;
        match self.active.get_mut(&offer) {
            Some(Offer { what: Offered::Sink(_, block_offset), exposed: Some(exposed), .. }) => {
                Ok((exposed, u64::from(*block_offset)))
            }
            _ => Err("the offer was not exposed for writing".into()),
        }
    }

    pub(super) fn stop_serving(&mut self) {
        for serving in std::mem::take(&mut self.serving).into_values() {
            serving.abort();
        }
    }

    fn source(&self, request: &PullRequest) -> Result<Arc<dyn BulkSource>, String> {
        match &self.live(request.offer)?.what {
            Offered::Source(source) => Ok(Arc::clone(source)),
            Offered::Sink(..) => Err("the offer is for pushing only".into()),
        }
    }

    fn sink(&self, push: &Push) -> Result<(Arc<dyn BulkSink>, u16), String> {
        match &self.live(push.offer)?.what {
            Offered::Sink(sink, block_offset) => Ok((Arc::clone(sink), *block_offset)),
            Offered::Source(_) => Err("the offer is for pulling only".into()),
        }
    }

    fn live(&self, offer: u64) -> Result<&Offer, String> {
        let offer = self.active.get(&offer).ok_or("the offer does not exist or was withdrawn")?;
        if offer.expires <= Instant::now() { Err("the offer has expired".into()) } else { Ok(offer) }
    }

    /// The peer's reason for refusing an earlier push to `offer`, if it refused one.
    pub(super) fn refusal(&self, offer: u64) -> Option<&str> {
        self.refused.iter().find(|(o, _)| *o == offer).map(|(_, reason)| reason.as_str())
    }

    pub(super) fn on_push_refused(&mut self, refused: PushRefused) {
        if self.refusal(refused.offer).is_none() {
            self.refused.truncate(MAX_REFUSED - 1);
            self.refused.push_front((refused.offer, refused.reason));
        }
    }
}

impl Shared {
    /// Registers an offer.
    pub(super) fn offer(
        self: &Arc<Self>,
        what: Offered,
        direction: BulkDirection,
    ) -> Result<BulkRegion, MessengerError> {
        let (len, block_offset) = match &what {
            Offered::Source(source) => (source.len(), source.block_offset()),
            Offered::Sink(sink, block_offset) => (sink.len(), u64::from(*block_offset)),
        };
        if block_offset >= BLOCK {
            return Err(MessengerError::BulkRefused(format!(
                "the block offset {block_offset} is not below 4096"
            )));
        }
        let ttl = self.config.offer_ttl;
        let key = base::entropy::random();
        let state = self.lock();
        Self::check_open(&state)?;
        if state.offers.active.len() >= MAX_OFFERS {
            return Err(MessengerError::BulkRefused(
                "the connection already has 65536 offers; finish some first".into(),
            ));
        }
        let link = state.link.clone();
        drop(state);
        // The mutex is not held while memory is registered, because registration is slow.
        let exposed = link
            .filter(|_| self.side == ConnectionSide::Client)
            .and_then(|link| ExposedOffer::of(&what, &link));
        let remote = exposed.as_ref().map(ExposedOffer::remote);
        let mut state = self.lock();
        Self::check_open(&state)?;
        let expires = Instant::now() + ttl;
        // If the transport changed during registration, the offer stays without one-sided access.
        let exposed =
            exposed.filter(|e| state.link.as_ref().is_some_and(|l| l.transport_number() == e.transport()));
        state.offers.active.insert(key, Offer { what, expires, exposed });
        self.watch.stir();
        drop(state);
        let descriptor = BulkDescriptor {
            owner: BulkOwner::Peer,
            memory: MemoryKind::Host,
            segments: vec![BulkSegment { address: 0, key, len }],
            direction,
            block_offset: block_offset as u16,
            expires_ms: u32::try_from(ttl.as_millis()).unwrap_or(u32::MAX),
            remote,
        };
        let connection = Arc::downgrade(self);
        Ok(BulkRegion::new(descriptor, Box::new(move |is_done| end_offer(&connection, key, is_done))))
    }

    /// Starts to serve a pull, or refuses it.
    ///
    /// # Errors
    /// If the peer violates the protocol.
    pub(super) fn on_pull_request(self: &Arc<Self>, request: PullRequest) -> Result<(), MessengerError> {
        let mut state = self.lock();
        let source = state.offers.source(&request).and_then(|source| {
            check_range(request.offset, request.len, source.len(), source.block_offset())?;
            if request.len == 0 { Err("the requested length is 0".into()) } else { Ok(source) }
        });
        let source = match source {
            Ok(source) => source,
            Err(reason) => {
                drop(state);
                return self.refuse_pull(request.pull, Refusal::Offer, &reason);
            }
        };
        if state.offers.serving.contains_key(&request.pull) || state.offers.serving.len() >= MAX_PULLS {
            let wrong =
                format!("pull {} is a duplicate, or the peer has too many active pulls", request.pull);
            return Err(MessengerError::Protocol(wrong));
        }
        // The task is spawned while the mutex is held, so that its entry in `serving` exists when
        // the task ends.
        let serving = crate::spawn(serve(Arc::clone(self), request, source)).abort_handle();
        state.offers.serving.insert(request.pull, serving);
        Ok(())
    }

    /// Stops serving a pull that the peer has cancelled.
    pub(super) fn on_pull_cancel(&self, pull: u64) {
        let mut state = self.lock();
        if let Some(serving) = state.offers.serving.remove(&pull) {
            serving.abort();
        }
        let dropped = state.outbound.drop_data(pull);
        drop(state);
        self.send_limits.free_bulk_slots(dropped.len());
    }

    /// Hands pushed data, already verified, to its sink. If the sink does not accept the data,
    /// tells the peer.
    ///
    /// # Errors
    /// If too many control frames are queued because the peer does not read them.
    pub(super) fn on_push(&self, push: Push, payload: Payload) -> Result<(), MessengerError> {
        let sink = self.lock().offers.sink(&push);
        let taken = sink.and_then(|(sink, block_offset)| {
            let block_offset = u64::from(block_offset);
            check_range(push.offset, payload.len() as u64, sink.len(), block_offset)?;
            if (block_offset + push.offset % BLOCK) % BLOCK != payload.block_offset() {
                return Err("the data and the offer have different piece boundaries".into());
            }
            if sink.write(push.offset, payload) { Ok(()) } else { Err("the sink refused the data".into()) }
        });
        let Err(reason) = taken else { return Ok(()) };
        self.metrics.refusals.increment(1);
        self.control(Body::PushRefused(PushRefused { offer: push.offer, reason }))
    }

    fn refuse_pull(&self, pull: u64, refusal: Refusal, reason: &str) -> Result<(), MessengerError> {
        self.metrics.refusals.increment(1);
        let reason = reason.chars().take(100).collect();
        self.control(Body::PullRefused(PullRefused { pull, refusal, reason }))
    }

    pub(super) fn control(&self, body: Body) -> Result<(), MessengerError> {
        self.lock().outbound.push_control(body)?;
        self.wake_writer.notify_one();
        Ok(())
    }

    /// Queues a chunk of a pull that this side serves. Returns `false` if the peer has cancelled
    /// the pull or the connection is lost.
    fn queue_data(&self, offer: u64, data: PullData, payload: Payload) -> Result<bool, String> {
        let mut state = self.lock();
        if matches!(state.status, ConnectionState::Lost(_)) || !state.offers.serving.contains_key(&data.pull)
        {
            return Ok(false);
        }
        state.offers.live(offer)?;
        state.outbound.push_chunk(Chunk::Data(data, payload));
        drop(state);
        self.wake_writer.notify_one();
        Ok(true)
    }
}

fn end_offer(connection: &Weak<Shared>, key: u64, is_done: bool) {
    let Some(connection) = connection.upgrade() else { return };
    let offer = connection.lock().offers.active.remove(&key);
    // The user's memory is dropped after the mutex is released, because dropping it may call back
    // into the connection.
    let Some(Offer { what, exposed: Some(exposed), .. }) = offer else { return };
    match what {
        Offered::Sink(sink, _) if is_done => exposed.deliver(&*sink),
        _ => exposed.end(is_done),
    }
}

/// Serves a pull: reads the source chunk by chunk, and sends each chunk when the transfer is
/// active.
async fn serve(connection: Arc<Shared>, request: PullRequest, source: Arc<dyn BulkSource>) {
    let failed = send_all(&connection, &request, &*source).await;
    connection.lock().offers.serving.remove(&request.pull);
    if let Err((refusal, reason)) = failed
        && let Err(why) = connection.refuse_pull(request.pull, refusal, &reason)
    {
        connection.lose(why);
    }
}

async fn send_all(
    connection: &Shared,
    request: &PullRequest,
    source: &dyn BulkSource,
) -> Result<(), (Refusal, String)> {
    let end = request.offset + request.len;
    let mut at = request.offset;
    let mut turn = connection.turns.turn(request.offer, request.len);
    while at < end {
        let block_offset = (source.block_offset() + at) % BLOCK;
        let len = chunk_len(block_offset, end - at);
        let mut reading = source.read(at, len);
        let read = match timeout(SOURCE_PATIENCE, &mut reading).await {
            Ok(read) => read,
            Err(_) => {
                turn.leave();
                reading.await
            }
        };
        let payload = read.map_err(|reason| (Refusal::Source, reason))?;
        if payload.len() != len || payload.block_offset() != block_offset {
            return Err((Refusal::Source, "the source returned a different range than requested".into()));
        }
        let Ok(()) = turn.take(len).await else { return Ok(()) };
        let Ok(slot) = connection.send_limits.bulk_slot().await else { return Ok(()) };
        let data = PullData { pull: request.pull, offset: at };
        let wanted = connection.queue_data(request.offer, data, payload).map_err(|r| (Refusal::Offer, r))?;
        if !wanted {
            return Ok(());
        }
        slot.spend();
        at += len as u64;
    }
    Ok(())
}
