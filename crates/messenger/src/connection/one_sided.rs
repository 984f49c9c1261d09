//! One-sided transfers: the server reads and writes memory that the client has exposed.
//!
//! The server decides which data moves and when. If a one-sided transfer is impossible or fails,
//! the data is sent in frames instead, which is always possible.

use std::sync::Arc;
use std::time::Duration;

use base::block::{BLOCK, piece_count, verify_pieces};
use base::clock::Instant;
use base::mem::ArenaBuf;
use futures::stream::{FuturesUnordered, StreamExt};
use wire::{BulkDescriptor, BulkOwner, BulkSegment, RemoteMemory};

use super::Shared;
use super::batch::PushDestination;
use super::range::OfferRange;
use super::reader::ReadFailure;
use crate::config::MAX_CHUNK;
use crate::frame::{Body, FrameError, PushRefused, Wrote};
use crate::transport::packets::{LandingBuffer, Link, LinkFailed};
use crate::{MessengerError, Pulled};

/// Maximum length of one read, in bytes. While the data of one read is verified, the next reads are
/// in progress.
const READ_BYTES: u64 = 512 << 10;

/// Maximum number of reads of one pull at a time.
const READS_AT_A_TIME: usize = 4;

/// Maximum amount of memory in quarantine, in bytes. An offer that is withdrawn while the peer can
/// still use its memory leaves the memory in quarantine until the transport ends.
const QUARANTINE_MAX_BYTES: usize = 64 << 20;

impl Shared {
    /// Ends the peer's access to expired offers. Returns a reason if the transport has to end,
    /// because only its end can reclaim memory of this side.
    pub(super) fn overstayed(&self, link: &Link) -> Option<String> {
        let expired = self.lock().offers.hide_expired();
        drop(expired);
        if link.is_overdue() {
            return Some("a read of the peer's memory is overdue".into());
        }
        let kept = link.quarantined_bytes();
        (kept > QUARANTINE_MAX_BYTES)
            .then(|| format!("{kept} bytes of withdrawn memory can be reclaimed only by a new transport"))
    }

    /// Handles the peer's statement that it has written to a sink. The peer must not change the
    /// written bytes afterwards.
    pub(super) fn on_landed(&self, wrote: &Wrote) -> Result<(), ReadFailure> {
        let place = self
            .lock()
            .offers
            .exposed_sink(wrote.offer)
            .and_then(|(exposed, block_offset)| exposed.place(wrote, block_offset));
        let (room, written) = match place {
            Ok(place) => place,
            Err(reason) => {
                self.metrics.refusals.increment(1);
                return Ok(self.control(Body::PushRefused(PushRefused { offer: wrote.offer, reason }))?);
            }
        };
        let verified = written.verify(&room);
        // Release the buffer here, because the caller that finishes the offer must be the buffer's
        // only owner.
        drop(room);
        // Damage ends the transport. The peer then sends the data again, in frames.
        verified.map_err(FrameError::Payload)?;
        if let Ok((exposed, _)) = self.lock().offers.exposed_sink(wrote.offer) {
            exposed.keep(written);
        }
        Ok(())
    }

    /// The link that reaches the memory of `offer`, and the description of that memory.
    fn reach<'a>(&self, offer: &'a BulkDescriptor) -> Option<(Arc<Link>, &'a RemoteMemory)> {
        let remote = offer.remote.as_ref().filter(|_| offer.owner == BulkOwner::Peer)?;
        let link = self.lock().link.clone()?;
        (link.transport_number() == remote.transport).then_some((link, remote))
    }

    /// The destination of a one-sided write of `len` bytes at `offset` of an offer. `None` if such
    /// a write is impossible.
    pub(super) fn target(&self, offer: &BulkDescriptor, offset: u64, len: u64) -> Option<PushDestination> {
        let (_, remote) = self.reach(offer)?;
        let (region, offset) = region_of(remote, offset, len)?;
        Some(PushDestination { transport: remote.transport, region, offset })
    }

    /// Pulls data by one-sided reads of the peer's memory. Returns [`NotPulled::Framed`] with the
    /// buffer if the peer has to send the data in frames.
    pub(super) async fn pull_one_sided(
        &self,
        offer: &BulkDescriptor,
        at: &OfferRange,
        dest: ArenaBuf,
        limit: Duration,
    ) -> Result<Pulled, NotPulled> {
        let Some((link, remote)) = self.reach(offer) else { return Err(NotPulled::Framed(dest)) };
        let Some(checksums) = checksums_of(remote, at, offer, dest.len()) else {
            return Err(NotPulled::Framed(dest));
        };
        let lost = |_| NotPulled::Lost(self.loss());
        let _slot = self.send_limits.pull_slot().await.map_err(lost)?;
        let len = dest.len();
        let landing = match link.land(dest) {
            Ok(landing) => landing,
            Err((dest, why)) => {
                tracing::debug!(why, "cannot register the buffer of a pull; the data is sent in frames");
                return Err(NotPulled::Framed(dest));
            }
        };
        self.metrics.pulls.increment(1);
        self.stir();
        let reads =
            PullReads { shared: self, link: &link, remote, at, landing: &landing, checksums: &checksums };
        match reads.all(len, Instant::now() + limit + self.config.grace).await {
            Ok(()) => match landing.into_buffer() {
                Some(buf) => Ok(Pulled { buf, checksums }),
                None => {
                    let why = "the buffer of a completed pull is still in use".into();
                    Err(NotPulled::Lost(MessengerError::ConnectionLost(why)))
                }
            },
            Err(why) => {
                metrics::counter!("outboard_messenger_one_sided_failures").increment(1);
                tracing::debug!(why, "a one-sided read failed; the data is sent in frames");
                match landing.into_buffer() {
                    Some(dest) => Err(NotPulled::Framed(dest)),
                    None => Err(NotPulled::Lost(self.loss())),
                }
            }
        }
    }
}

/// The reason why a one-sided pull failed.
pub(super) enum NotPulled {
    /// The peer has to send the data in frames, into this buffer.
    Framed(ArenaBuf),
    Lost(MessengerError),
}

/// Returns the registered region that holds the bytes `offset..offset + len` of an offer, and the
/// offset of these bytes in the region.
fn region_of(remote: &RemoteMemory, offset: u64, len: u64) -> Option<(fabric::RemoteRegion, usize)> {
    let (BulkSegment { address, key, len }, start) = remote.find(offset, len)?;
    Some((fabric::RemoteRegion { key, base: address, len }, usize::try_from(start).ok()?))
}

/// The checksums of the data to pull. `None` if the descriptor lacks the checksums of these pieces.
fn checksums_of(
    remote: &RemoteMemory,
    at: &OfferRange,
    offer: &BulkDescriptor,
    len: usize,
) -> Option<Vec<u32>> {
    let block_offset = u64::from(offer.block_offset);
    let start = at.offset - offer.segments.first()?.address;
    let first = if start == 0 { 0 } else { piece_count(block_offset, start) };
    remote.checksums(first as usize, piece_count(at.block_offset, len as u64) as usize)
}

/// The reads of one pull.
struct PullReads<'a> {
    shared: &'a Shared,
    link: &'a Link,
    remote: &'a RemoteMemory,
    at: &'a OfferRange,
    landing: &'a Arc<LandingBuffer>,
    checksums: &'a [u32],
}

impl PullReads<'_> {
    /// Reads all `len` bytes, with several reads in progress at a time. When this returns, no read
    /// is in progress, unless the link has failed.
    async fn all(&self, len: usize, deadline: Instant) -> Result<(), String> {
        let mut turn = self.shared.turns.turn(self.at.key, len as u64);
        let mut under_way = FuturesUnordered::new();
        let mut at = 0;
        let mut result = Ok(());
        loop {
            while at < len && under_way.len() < READS_AT_A_TIME && result.is_ok() {
                let chunk = chunk_len((self.at.block_offset + at as u64) % BLOCK, (len - at) as u64);
                if turn.take(chunk).await.is_err() {
                    result = Err("the connection has ended".to_owned());
                    break;
                }
                under_way.push(self.one(at, chunk, deadline));
                at += chunk;
            }
            match under_way.next().await {
                Some(read) => result = result.and(read),
                None => return result,
            }
        }
    }

    async fn one(&self, at: usize, len: usize, deadline: Instant) -> Result<(), String> {
        let (region, offset) = region_of(self.remote, self.at.offset + at as u64, len as u64)
            .ok_or("no segment of the descriptor holds the data")?;
        let read = self.link.read(self.landing, at, region, (offset, len), deadline).await;
        read.map_err(|LinkFailed(why)| why)?;
        self.shared.metrics.received_bytes.increment(len as u64);
        let block_offset = (self.at.block_offset + at as u64) % BLOCK;
        let first = if at == 0 { 0 } else { piece_count(self.at.block_offset, at as u64) as usize };
        let count = piece_count(block_offset, len as u64) as usize;
        let bytes = self.landing.bytes(at..at + len);
        verify_pieces(block_offset, bytes, &self.checksums[first..first + count])
            .map_err(|e| e.to_string())?;
        self.shared.lock().pulls.on_pulled(len);
        Ok(())
    }
}

/// Length of the next read, which starts at `block_offset` in its block, when `left` bytes remain.
/// Every read but the last ends at a piece boundary.
fn chunk_len(block_offset: u64, left: u64) -> usize {
    const { assert!(READ_BYTES.is_multiple_of(BLOCK) && READ_BYTES >= MAX_CHUNK as u64) };
    (READ_BYTES - block_offset).min(left) as usize
}
