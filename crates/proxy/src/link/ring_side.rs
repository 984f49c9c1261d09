//! The osd's side of the rings and the data region: writes into the mirror, and has the engine move it.

use std::collections::VecDeque;
use std::sync::Arc;

use base::mem::Arena;
use bytes::Bytes;
use channel::ring::{self, MAX_ENTRY};
use channel::{
    Chain, ChannelError, DmaEngine, DpuMemory, Frame, Header, Layout, Peer, Place, Region, RegionId,
    Transfer, URGENT, Unposted,
};

use super::HeldRange;

/// Chains that are longer are posted at once, in bytes.
const GATHERED: usize = 64 << 10;
/// Tag of the chain that fetches replies. Requests have numbers from 1 on.
pub(super) const FETCH: u64 = u64::MAX;
/// Tag of the last chain of a session.
pub(super) const FENCE: u64 = u64::MAX - 1;

/// Memory, engine and positions of one session.
pub(crate) struct RingSide {
    memory: DpuMemory,
    engine: Arc<dyn DmaEngine>,
    local: RegionId,
    host: Region,
    peer: Peer,
    max_outstanding: usize,
    outstanding: usize,
    /// Bytes put into the inbound ring, and how far the host has come.
    head: u64,
    consumed: u64,
    /// Bytes of the outbox set aside for replies to come.
    reserved: usize,
    /// Bytes taken out of the outbox.
    taken: u64,
    /// Chains that the engine was not given yet.
    unposted: VecDeque<Chain>,
    engine_full: bool,
    failed: Option<String>,
    copied: metrics::Counter,
}

impl RingSide {
    /// Starts with empty rings. `local` is the registered DPU memory.
    pub(crate) fn new(
        memory: DpuMemory,
        engine: Arc<dyn DmaEngine>,
        local: RegionId,
        host: Region,
        peer: Peer,
        max_outstanding: usize,
    ) -> RingSide {
        RingSide {
            memory,
            engine,
            local,
            host,
            peer,
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
        }
    }

    pub(super) fn layout(&self) -> Layout {
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

    /// Whether one more request may be sent: it finds room in the inbound ring and does not exceed what was agreed.
    pub(super) fn has_credit(&self) -> bool {
        let used = (self.head - self.consumed) as usize;
        self.outstanding < self.max_outstanding
            && used + ring::footprint(MAX_ENTRY) <= self.layout().inbound().len
    }

    /// Whether the outbox has room for a reply of at most `len` bytes.
    pub(super) fn has_room_for_reply(&self, len: usize) -> bool {
        self.reserved + ring::footprint(len) <= self.layout().outbox().len
    }

    /// Sends a request with its payload: to its range if it has one, else in the entry.
    pub(super) fn send(
        &mut self,
        header: Header,
        control: &[u8],
        upload: &[(usize, Bytes)],
        range: Option<HeldRange>,
    ) {
        let mut chain = Chain::default();
        let inline: &[(usize, Bytes)] = match range {
            Some(range) => {
                for (at, piece) in upload {
                    self.upload(&mut chain, self.layout().data_offset() + range.offset + at, piece);
                }
                &[]
            }
            None => upload,
        };
        let data_len: usize = inline.iter().map(|(_, piece)| piece.len()).sum();
        let header =
            Header { data_len: data_len as u32, position: self.head, consumed: self.taken, ..header };
        let sealed = header.seal(control);
        let total = sealed.len() + data_len;
        debug_assert!(total <= MAX_ENTRY, "an entry of {total} bytes");
        let parts: Vec<&[u8]> =
            std::iter::once(&sealed[..]).chain(inline.iter().map(|(_, p)| &p[..])).collect();
        let inbound = self.layout().inbound();
        inbound.write(self.memory.arena(), self.head, &parts);
        for span in inbound.spans(self.head, total).into_iter().filter(|span| !span.is_empty()) {
            self.send_range(&mut chain, span.start, span.start, span.len());
        }
        let cells = ring::footprint(total);
        self.head += cells as u64;
        self.outstanding += 1;
        self.reserved += ring::footprint(header.reply_max as usize);
        chain.ring = Some((self.peer.id, cells as u64));
        self.post(chain);
    }

    /// Adds the transfers that bring `piece` to `host_offset`: from where it lies, if that is DPU memory, else from the
    /// mirror.
    fn upload(&self, chain: &mut Chain, host_offset: usize, piece: &Bytes) {
        if piece.is_empty() {
            return;
        }
        let from = self.memory.offset_of(piece).unwrap_or_else(|| {
            let inside = self.memory.arena().copy_in(host_offset, piece);
            debug_assert!(inside, "a range outside the mirror");
            self.copied.increment(piece.len() as u64);
            host_offset
        });
        self.send_range(chain, from, host_offset, piece.len());
    }

    fn send_range(&self, chain: &mut Chain, from: usize, to: usize, len: usize) {
        let (src, dst) = (self.here(from), self.there(to));
        chain.transfers.extend(segments(src, dst, len, self.max_transfer()));
    }

    /// Adds the transfers that bring `len` bytes at `from` of host memory to `to` of DPU memory.
    pub(super) fn fetch_range(&self, chain: &mut Chain, from: usize, to: usize, len: usize) {
        let (src, dst) = (self.there(from), self.here(to));
        chain.transfers.extend(segments(src, dst, len, self.max_transfer()));
    }

    fn here(&self, offset: usize) -> Place {
        Place { region: self.local, offset }
    }

    fn there(&self, offset: usize) -> Place {
        Place { region: self.host.id(), offset }
    }

    /// Hands a chain to the engine, in order. Short ones wait for the driver's next turn, so that the engine and the host
    /// are woken once for all that come together.
    pub(super) fn post(&mut self, chain: Chain) {
        let len: usize = chain.transfers.iter().map(|t| t.len).sum();
        self.unposted.push_back(chain);
        if len > GATHERED {
            self.post_waiting();
        }
    }

    /// Whether chains wait to be posted, and the engine has room for them.
    pub(super) fn has_unposted(&self) -> bool {
        !self.unposted.is_empty() && !self.engine_full
    }

    /// Hands over what waits.
    pub(super) fn post_waiting(&mut self) {
        self.engine_full = false;
        while let Some(chain) = self.unposted.pop_front() {
            match self.engine.post(URGENT, chain) {
                Ok(()) => {}
                Err(Unposted::Full(chain)) => {
                    self.unposted.push_front(chain);
                    self.engine_full = true;
                    return;
                }
                Err(Unposted::Refused(e)) => self.failed = Some(e.to_string()),
            }
        }
    }

    /// Why the engine refused something, if it did: the session cannot go on.
    pub(super) fn failure(&self) -> Option<&str> {
        self.failed.as_deref()
    }

    /// Fetches `len` bytes of new replies.
    pub(super) fn fetch(&mut self, len: usize) {
        let mut chain = Chain { tag: Some(FETCH), ..Chain::default() };
        for span in self.layout().outbox().spans(self.taken, len).into_iter().filter(|span| !span.is_empty())
        {
            self.fetch_range(&mut chain, span.start, span.start, span.len());
        }
        self.post(chain);
    }

    /// Takes the next reply out of the `available` bytes that were fetched, and says how many it took.
    pub(super) fn take(&mut self, available: usize) -> channel::Result<(Frame, usize)> {
        let frame = self.layout().outbox().read(self.memory.arena(), self.taken, available)?;
        let footprint = ring::footprint(frame.header.total_len());
        self.taken += footprint as u64;
        let consumed = frame.header.consumed;
        if consumed < self.consumed || consumed > self.head {
            let what = format!("the host says it took {consumed} bytes of {}", self.head);
            return Err(ChannelError::Protocol(what));
        }
        self.consumed = consumed;
        Ok((frame, footprint))
    }

    /// A reply was taken: gives back what its request had reserved.
    pub(super) fn answered(&mut self, reply_max: usize) {
        self.outstanding -= 1;
        self.reserved -= ring::footprint(reply_max);
    }

    /// Length of the data region's mirror that starts at `range`, from the start of the memory.
    pub(super) fn range_offset(&self, range: HeldRange) -> usize {
        self.layout().data_offset() + range.offset
    }
}

/// Cuts a copy into transfers of at most `most` bytes.
fn segments(src: Place, dst: Place, len: usize, most: usize) -> impl Iterator<Item = Transfer> {
    (0..len).step_by(most).map(move |at| Transfer {
        src: Place { offset: src.offset + at, ..src },
        dst: Place { offset: dst.offset + at, ..dst },
        len: most.min(len - at),
    })
}
