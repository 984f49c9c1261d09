//! The osd's side of the rings and the data region. It writes into the mirror of host memory and
//! lets the engine move the bytes.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use base::mem::Arena;
use bytes::Bytes;
use channel::ring::{self, MAX_ENTRY};
use channel::{
    Chain, ChannelEntry, ChannelError, DmaAddress, DmaEngine, DmaRegion, DpuMemory, EnginePeer, EntryHeader,
    MemoryLayout, PeerId, QueueId, RegionId, RejectedChain, Transfer, URGENT,
};

use super::host_ranges::HeldRange;
use super::job::Job;
use super::regions::OpenedWindow;

/// Length in bytes above which a chain is posted at once. Shorter chains may wait and be posted
/// together.
const GATHERED: usize = 64 << 10;
/// Tag of the chain that fetches replies. Request numbers count from 1 and never reach it.
pub(super) const FETCH: u64 = u64::MAX;

/// The host memory that the engine is attached to.
struct AttachedHost {
    peer: EnginePeer,
    /// The registered region with the rings.
    rings: DmaRegion,
}

/// Region number in place of the rings while no host is attached. Chains that name it fail.
const NOWHERE: RegionId = RegionId::NONE;

/// Memory, engine and ring positions of one incarnation.
pub(crate) struct RingSide {
    memory: DpuMemory,
    engine: Arc<dyn DmaEngine>,
    local: RegionId,
    /// The host, if the engine is attached to it.
    host: Option<AttachedHost>,
    queues: usize,
    max_outstanding: usize,
    outstanding: usize,
    /// `head` counts the bytes written into the inbound ring, and `consumed` the bytes that the
    /// host has taken from it.
    head: u64,
    consumed: u64,
    /// Bytes of the outbox that are reserved for expected replies.
    reserved: usize,
    /// Bytes taken from the outbox.
    taken: u64,
    /// Chains that were not handed to the engine yet.
    unposted: VecDeque<(QueueId, Chain)>,
    engine_full: bool,
    failed: Option<String>,
    /// Bytes of payload that were copied into the mirror, and from the mirror.
    copied: metrics::Counter,
    landed: metrics::Counter,
    /// Counts payload that is copied into and out of ring entries.
    entries_copied: metrics::Counter,
}

impl RingSide {
    /// Creates empty rings without a host. `local` is the registered DPU memory.
    pub(crate) fn new(
        memory: DpuMemory,
        engine: Arc<dyn DmaEngine>,
        local: RegionId,
        max_outstanding: usize,
        queues: usize,
    ) -> RingSide {
        RingSide {
            memory,
            engine,
            local,
            host: None,
            queues: queues.max(1),
            max_outstanding,
            outstanding: 0,
            head: 0,
            consumed: 0,
            reserved: 0,
            taken: 0,
            unposted: VecDeque::new(),
            engine_full: false,
            failed: None,
            copied: metrics::counter!("outboard_proxy_staging_copy_bytes"),
            landed: metrics::counter!("outboard_proxy_landing_copy_bytes"),
            entries_copied: metrics::counter!("outboard_proxy_entry_copy_bytes"),
        }
    }

    pub(super) fn layout(&self) -> MemoryLayout {
        self.memory.layout()
    }

    pub(super) fn memory(&self) -> &DpuMemory {
        &self.memory
    }

    pub(super) fn arena(&self) -> &Arc<Arena> {
        self.memory.arena()
    }

    pub(super) fn engine(&self) -> &Arc<dyn DmaEngine> {
        &self.engine
    }

    pub(super) fn max_transfer(&self) -> usize {
        self.engine.max_transfer()
    }

    /// Number of unanswered requests.
    pub(super) fn outstanding(&self) -> usize {
        self.outstanding
    }

    /// Whether one more request may be sent: the inbound ring has room, and the agreed limit of
    /// outstanding requests is not reached.
    pub(super) fn has_credit(&self) -> bool {
        let used = self.head.checked_sub(self.consumed).expect("the host takes only what was sent") as usize;
        self.outstanding < self.max_outstanding
            && used + ring::footprint(MAX_ENTRY) <= self.layout().inbound().len
    }

    /// Whether the outbox has room for a reply of at most `len` bytes.
    pub(super) fn has_room_for_reply(&self, len: usize) -> bool {
        self.reserved + ring::footprint(len) <= self.layout().outbox().len
    }

    /// Sends a request. A short payload travels with the request; a longer payload is already in
    /// its range. Returns the position in the ring at which the entry ends.
    pub(super) fn send(&mut self, header: EntryHeader, control: &[u8], job: &mut Job) -> u64 {
        let reply_max = header.reply_max as usize;
        assert!(self.has_credit() && self.has_room_for_reply(reply_max), "the rings have no room");
        let mut chain = Chain { times: job.time_entry(), ..Chain::default() };
        if let Some((range, window)) = job.in_window() {
            chain.transfers = self.upload_transfers(job.upload(), range, window);
        }
        let inline = if job.range().is_none() { job.upload() } else { &[] };
        let data_len: usize = inline.iter().map(|(_, piece)| piece.len()).sum();
        let header =
            EntryHeader { data_len: data_len as u32, position: self.head, consumed: self.taken, ..header };
        let data: Vec<&[u8]> = inline.iter().map(|(_, piece)| &piece[..]).collect();
        let sealed = header.seal_whole(control, &data);
        let total = sealed.len() + data_len;
        assert!(total <= MAX_ENTRY, "an entry of {total} bytes exceeds the limit");
        let parts: Vec<&[u8]> = std::iter::once(&sealed[..]).chain(data).collect();
        let inbound = self.layout().inbound();
        inbound.write(self.memory.arena(), self.head, &parts);
        self.entries_copied.increment(data_len as u64);
        for span in inbound.spans(self.head, total).into_iter().filter(|span| !span.is_empty()) {
            chain.transfers.extend(self.rings_transfers(span, true));
        }
        let cells = ring::footprint(total);
        self.head += cells as u64;
        self.outstanding += 1;
        self.reserved += ring::footprint(reply_max);
        chain.ring = self.peer().map(|peer| (peer, cells as u64));
        self.post(URGENT, chain);
        self.head
    }

    /// Returns the offset in DPU memory from which DMA reads a piece of payload. A piece in DPU
    /// memory is used in place. Any other piece is copied into the mirror, at the offset of its
    /// destination.
    pub(super) fn source_of(&self, host_offset: usize, piece: &Bytes) -> usize {
        self.memory.offset_of(piece).unwrap_or_else(|| {
            let inside = self.memory.arena().copy_in(host_offset, piece);
            assert!(inside, "the range is inside the mirror");
            self.copied.increment(piece.len() as u64);
            host_offset
        })
    }

    /// Counts `len` bytes that are copied from the mirror.
    pub(super) fn count_landed(&self, len: usize) {
        self.landed.increment(len as u64);
    }

    /// The queue for the payload of the stage or request with the number `key`.
    pub(super) fn bulk_queue(&self, key: u64) -> QueueId {
        match self.queues().saturating_sub(1) {
            0 => URGENT,
            bulk => 1 + (key % bulk as u64) as usize,
        }
    }

    /// The transfers that move a job's payload into its range.
    pub(super) fn upload_transfers(
        &self,
        upload: &[(usize, Bytes)],
        range: &HeldRange,
        opened: &OpenedWindow,
    ) -> Vec<Transfer> {
        let mut transfers = Vec::new();
        for (at, piece) in upload.iter().filter(|(_, piece)| !piece.is_empty()) {
            let to = self.range_offset(range) + at;
            let from = self.source_of(to, piece);
            self.send_range(&mut transfers, from, to, piece.len(), opened);
        }
        transfers
    }

    /// Adds the transfers that move `len` bytes of DPU memory into an open window of host memory.
    pub(super) fn send_range(
        &self,
        transfers: &mut Vec<Transfer>,
        from: usize,
        to: usize,
        len: usize,
        opened: &OpenedWindow,
    ) {
        let dst = DmaAddress { region: opened.region.id(), offset: to - opened.origin };
        transfers.extend(segments(self.here(from), dst, len, self.max_transfer()));
    }

    /// Adds the transfers that move `len` bytes from `from` in an open window of host memory to
    /// `to` in DPU memory.
    pub(super) fn fetch_range(
        &self,
        transfers: &mut Vec<Transfer>,
        from: usize,
        to: usize,
        len: usize,
        opened: &OpenedWindow,
    ) {
        let src = DmaAddress { region: opened.region.id(), offset: from - opened.origin };
        transfers.extend(segments(src, self.here(to), len, self.max_transfer()));
    }

    /// The transfers that move one span between the rings and their mirror.
    fn rings_transfers(&self, span: Range<usize>, to_host: bool) -> impl Iterator<Item = Transfer> + use<> {
        let there = DmaAddress { region: self.rings(), offset: span.start };
        let here = self.here(span.start);
        let (src, dst) = if to_host { (here, there) } else { (there, here) };
        segments(src, dst, span.len(), self.max_transfer())
    }

    /// One transfer between the rings and their mirror.
    pub(super) fn rings_transfer(&self, at: usize, len: usize, to_host: bool) -> Transfer {
        let (here, there) = (self.here(at), DmaAddress { region: self.rings(), offset: at });
        let (src, dst) = if to_host { (here, there) } else { (there, here) };
        Transfer { src, dst, len }
    }

    fn here(&self, offset: usize) -> DmaAddress {
        DmaAddress { region: self.local, offset }
    }

    /// Start of a window of the data region, in bytes from the start of host memory.
    pub(super) fn window_origin(&self, window: &Range<usize>) -> usize {
        self.layout().data_offset() + window.start
    }

    /// Registers a window of the data region that the host has opened.
    pub(super) fn open_window(&self, window: Range<usize>) -> channel::Result<OpenedWindow> {
        let origin = self.window_origin(&window);
        let host = self.host.as_ref();
        let host = host.ok_or_else(|| ChannelError::Transfer("the engine is not attached".to_owned()))?;
        let region = self.engine.register_peer(&host.peer, origin..origin + window.len())?;
        Ok(OpenedWindow { region: Arc::new(region), origin })
    }

    pub(super) fn peer(&self) -> Option<PeerId> {
        self.host.as_ref().map(|host| host.peer.id)
    }

    fn rings(&self) -> RegionId {
        self.host.as_ref().map_or(NOWHERE, |host| host.rings.id())
    }

    /// Bytes taken from the outbox.
    pub(super) fn taken(&self) -> u64 {
        self.taken
    }

    /// Number of engine queues in use.
    pub(super) fn queues(&self) -> usize {
        self.queues.min(self.engine.queues())
    }

    /// Limits the engine queues in use. With a single queue, short chains wait behind long ones.
    pub(super) fn set_queues(&mut self, queues: usize) {
        self.queues = queues.max(1);
    }

    /// Uses `peer` from now on. Regions registered with the previous peer become void.
    pub(crate) fn join(&mut self, peer: EnginePeer) -> channel::Result<()> {
        let rings = self.engine.register_peer(&peer, 0..self.layout().data_offset())?;
        self.host = Some(AttachedHost { peer, rings });
        Ok(())
    }

    /// Resets to empty rings.
    pub(super) fn start_over(&mut self) {
        (self.head, self.consumed, self.taken) = (0, 0, 0);
        (self.outstanding, self.reserved) = (0, 0);
    }

    /// Hands a chain to the engine, in order within its queue. A short chain on the urgent queue
    /// waits for the driver's next turn, so that several chains share one wake-up of the engine and
    /// the host.
    pub(super) fn post(&mut self, queue: QueueId, chain: Chain) {
        let gathers = queue == URGENT && chain.len() <= GATHERED;
        self.unposted.push_back((queue, chain));
        if !gathers {
            self.post_waiting();
        }
    }

    /// Whether chains wait to be posted and the engine has room for them.
    pub(super) fn has_unposted(&self) -> bool {
        !self.unposted.is_empty() && !self.engine_full
    }

    /// Hands the waiting chains to the engine.
    pub(super) fn post_waiting(&mut self) {
        self.engine_full = false;
        while let Some((queue, chain)) = self.unposted.pop_front() {
            match self.engine.post(queue, chain) {
                Ok(()) => {}
                Err(RejectedChain::Full(chain)) => {
                    self.unposted.push_front((queue, chain));
                    self.engine_full = true;
                    return;
                }
                Err(RejectedChain::Refused(e)) => self.failed = Some(e.to_string()),
            }
        }
    }

    /// Why the engine refused a chain, if it did. The incarnation cannot continue after that.
    pub(super) fn failure(&self) -> Option<&str> {
        self.failed.as_deref()
    }

    /// Fetches `len` bytes of new replies.
    pub(super) fn fetch(&mut self, len: usize) {
        let mut chain = Chain { tag: Some(FETCH), ..Chain::default() };
        for span in self.layout().outbox().spans(self.taken, len).into_iter().filter(|span| !span.is_empty())
        {
            chain.transfers.extend(self.rings_transfers(span, false));
        }
        self.post(URGENT, chain);
    }

    /// Takes the next reply from the `available` fetched bytes, and returns it with its length in
    /// the ring. An invalid reply is not taken; the host sends it again over the control socket.
    pub(super) fn take(&mut self, available: usize) -> channel::Result<(ChannelEntry, usize)> {
        let frame = self.layout().outbox().read(self.memory.arena(), self.taken, available)?;
        self.entries_copied.increment(frame.data.len() as u64);
        let consumed = frame.header.consumed;
        if consumed < self.consumed || consumed > self.head {
            let what = format!("it reports {consumed} bytes as taken, but the osd has sent {}", self.head);
            return Err(ChannelError::Protocol(what));
        }
        self.consumed = consumed;
        let footprint = ring::footprint(frame.header.total_len());
        self.taken += footprint as u64;
        Ok((frame, footprint))
    }

    /// Frees the credit and the outbox space that a request had reserved, after its reply was
    /// taken.
    pub(super) fn answered(&mut self, reply_max: usize) {
        self.outstanding = self.outstanding.checked_sub(1).expect("an answered request was sent");
        let reserved = self.reserved.checked_sub(ring::footprint(reply_max));
        self.reserved = reserved.expect("a request reserves the space of its reply");
    }

    /// Offset of a range in host memory, in bytes. It is the same in the mirror.
    pub(super) fn range_offset(&self, range: &HeldRange) -> usize {
        self.layout().data_offset() + range.offset()
    }
}

/// Splits a copy into transfers of at most `most` bytes.
fn segments(src: DmaAddress, dst: DmaAddress, len: usize, most: usize) -> impl Iterator<Item = Transfer> {
    (0..len).step_by(most).map(move |at| Transfer {
        src: DmaAddress { offset: src.offset + at, ..src },
        dst: DmaAddress { offset: dst.offset + at, ..dst },
        len: most.min(len - at),
    })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use base::mem::OutsideAccess;
    use channel::{EntryKind, MemoryOptions, ShmEngine, ShmOptions};

    /// Rings without a host, and a data region of 1 MiB.
    pub(in crate::store_channel) fn ring_without_host() -> RingSide {
        let layout = MemoryLayout { ring_len: 64 << 10, data_len: 1 << 20 };
        let memory = DpuMemory::new(MemoryOptions { layout, pool_len: 64 << 10, largest_buffer: 64 << 10 });
        let memory = memory.unwrap();
        let engine: Arc<dyn DmaEngine> = ShmEngine::start(ShmOptions::default()).unwrap();
        let rings = Arena::shared("rings", layout.len()).unwrap();
        let local = engine.register_local(&OutsideAccess::of_copied(&rings).unwrap()).unwrap();
        RingSide::new(memory, engine, local.id(), 8, 1)
    }

    #[test]
    fn a_reply_with_an_impossible_count_of_taken_bytes_is_refused() {
        let mut ring = ring_without_host();
        let reply =
            |consumed| EntryHeader { consumed, ..EntryHeader::new(EntryKind::Reply, 0, 1) }.seal(b"answer");
        let put = |ring: &RingSide, bytes: &[u8]| ring.layout().outbox().write(ring.arena(), 0, &[bytes]);
        put(&ring, &reply(64));
        assert!(
            ring.take(ring::footprint(reply(64).len())).is_err(),
            "the host cannot have taken bytes that were never sent"
        );
        assert_eq!((ring.taken(), ring.consumed), (0, 0));
        put(&ring, &reply(0));
        let (frame, footprint) = ring.take(ring::footprint(reply(0).len())).unwrap();
        assert_eq!((&frame.control[..], ring.taken()), (&b"answer"[..], footprint as u64));
    }
}
