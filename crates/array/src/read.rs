//! Reads objects. If a fragment cannot be read, reconstructs it from other fragments.

use std::cell::Cell;
use std::ops::Range;

use base::block::{self, BLOCK, BLOCK_SIZE, Payload, ZERO_BLOCK_CRC};
use base::mem::ArenaBuf;
use bytes::{Bytes, BytesMut};
use futures::future::join_all;
use store::{MAX_READ, ObjectId, ReadData, StoreCalls, StoreError};

use crate::ask::is_damage;
use crate::coder::{Buffer, RecoverError};
use crate::group::Group;
use crate::interval::Interval;
use crate::member_link::MemberLink;
use crate::objects::{ObjectPlace, Rows};
use crate::plan::{FragmentSpan, ReadPlan};

/// An object whose fragments are read.
#[derive(Clone, Copy)]
pub(crate) struct WholeObject<'a> {
    pub(crate) oid: &'a ObjectId,
    /// Size of the object in bytes, which determines the length of each fragment.
    pub(crate) size: u64,
}

/// Maximum number of times that a read reads fragments again that were damaged in memory.
const REREADS: usize = 3;

/// Bytes that were read from a fragment, with their checksums.
#[derive(Clone)]
pub(crate) struct FragmentRead {
    /// The bytes of the requested range, up to the fragment's end.
    pub(crate) bytes: Bytes,
    /// Stored checksums, one per block.
    pub(crate) checksums: Vec<u32>,
}

/// Why the ranges that a read needs cannot be computed.
enum ComputeError {
    /// The bytes that were read of this fragment were damaged in memory.
    Damaged(usize),
    Store(StoreError),
}

/// Determines which copy of a mirrored object the next read uses.
#[derive(Debug, Default)]
pub(crate) struct CopyTurns(Cell<usize>);

impl CopyTurns {
    /// Returns the number of the next turn.
    fn next(&self) -> usize {
        self.0.replace(self.0.get().wrapping_add(1))
    }
}

impl Group {
    /// Reads the blocks that cover a range of an object.
    pub(crate) async fn read(
        &self,
        number: u64,
        oid: &ObjectId,
        offset: u64,
        len: u64,
        dest: Option<ArenaBuf>,
    ) -> store::Result<ReadData> {
        let interval = self.interval(number).await?;
        // This place is held until all fragments are read, so that all fragments belong to the same
        // version of the object.
        let rows = Rows::Range(self.layout.rows(offset, len));
        let held = self.objects.read(oid, rows).await;
        let size = self.size(&interval, oid, &held).await?;
        let Some(size) = size else { return Err(StoreError::NoSuchObject(oid.to_string())) };
        let start = block::align_down(offset);
        let end = block::align_up(offset.saturating_add(len)).unwrap_or(u64::MAX).min(size);
        let mut data = ReadData { offset: start, object_size: size, verified: true, ..ReadData::default() };
        if offset >= size || len == 0 {
            return Ok(data);
        }
        if end - start > MAX_READ {
            return Err(StoreError::TooLarge { what: "read".into(), size: end - start, limit: MAX_READ });
        }
        let (bytes, checksums) =
            self.read_range(&interval, &held, WholeObject { oid, size }, start..end, dest).await?;
        if bytes.len() as u64 != end - start {
            let detail = format!("its fragments contain {} bytes instead of {}", bytes.len(), end - start);
            return Err(StoreError::Corrupt { what: format!("object {oid}"), detail });
        }
        (data.data, data.checksums) = (vec![bytes], checksums);
        drop(held);
        Ok(data)
    }

    async fn read_range(
        &self,
        interval: &Interval,
        held: &ObjectPlace,
        whole: WholeObject<'_>,
        range: Range<u64>,
        dest: Option<ArenaBuf>,
    ) -> store::Result<(Bytes, Vec<u32>)> {
        let held = Some(held);
        let links = self.live_links(interval, whole.oid);
        if self.layout.is_mirror() {
            let copy = self.next_copy(&links);
            let read = self.read_one(interval, held, links, whole, (copy, range), dest).await?;
            return Ok((read.bytes, read.checksums));
        }
        let spans = self.layout.spans(range.start, range.end - range.start);
        let wanted: Vec<FragmentSpan> =
            (0..).zip(spans).filter_map(|(fragment, span)| Some((fragment, span?))).collect();
        if let [span] = &wanted[..] {
            let read = self.read_one(interval, held, links, whole, span.clone(), dest).await?;
            return Ok((read.bytes, read.checksums));
        }
        let reads = self.read_fragments(interval, held, links, whole, &wanted, None).await?;
        let mut fragments: Vec<Option<(u64, FragmentRead)>> = vec![None; self.layout.k];
        for ((fragment, span), read) in wanted.into_iter().zip(reads) {
            fragments[fragment] = Some((span.start, read));
        }
        Ok(self.assemble(range, &fragments, dest))
    }

    /// Chooses the copy to read next. The available copies take turns, so that the drives of all
    /// members share the load.
    fn next_copy(&self, links: &[Option<MemberLink>]) -> usize {
        let there: Vec<usize> = (0..links.len()).filter(|&copy| links[copy].is_some()).collect();
        let turn = self.copy_turns.next();
        if there.is_empty() { 0 } else { there[turn % there.len()] }
    }

    /// Arranges the units of several fragments in the object's order.
    fn assemble(
        &self,
        range: Range<u64>,
        fragments: &[Option<(u64, FragmentRead)>],
        dest: Option<ArenaBuf>,
    ) -> (Bytes, Vec<u32>) {
        let len = (range.end - range.start) as usize;
        let mut out = match dest {
            Some(mut dest) if dest.len() >= len => {
                dest.truncate(len);
                Buffer::Arena(dest)
            }
            _ => Buffer::Heap(BytesMut::zeroed(len)),
        };
        let mut checksums = Vec::with_capacity(len.div_ceil(BLOCK_SIZE));
        for piece in self.layout.pieces(range.start, range.end - range.start) {
            let Some((from, read)) = &fragments[piece.fragment] else { continue };
            let at = (piece.at - from) as usize;
            let to = (piece.offset - range.start) as usize;
            let len = (piece.len as usize).min(read.bytes.len().saturating_sub(at));
            out[to..to + len].copy_from_slice(&read.bytes[at..at + len]);
            let count = block::piece_count(0, piece.len) as usize;
            checksums.extend(read.checksums.iter().skip(at / BLOCK_SIZE).take(count));
        }
        (out.freeze(), checksums)
    }

    /// Reads a range of a fragment for a change of the fragment. The range must start at a block
    /// boundary. Verifies the bytes once more, because the change computes new checksums.
    pub(crate) async fn read_fragment(
        &self,
        interval: &Interval,
        whole: WholeObject<'_>,
        fragment: usize,
        range: Range<u64>,
    ) -> store::Result<FragmentRead> {
        let links = self.live_links(interval, whole.oid);
        let fragment = if self.layout.is_mirror() { self.next_copy(&links) } else { fragment };
        let FragmentRead { bytes, checksums } =
            self.read_one(interval, None, links, whole, (fragment, range), None).await?;
        let read = ReadData { data: vec![bytes.clone()], checksums, ..ReadData::default() };
        read.verify().map_err(|e| {
            StoreError::Disconnected(format!("a fragment was damaged in memory after it was read: {e}"))
        })?;
        Ok(FragmentRead { bytes, checksums: read.checksums })
    }

    /// Reconstructs a range of a fragment from other fragments. The result has the length of the
    /// range; zeros follow the fragment's end.
    pub(crate) async fn reconstruct(
        &self,
        interval: &Interval,
        whole: WholeObject<'_>,
        fragment: usize,
        range: Range<u64>,
    ) -> store::Result<FragmentRead> {
        let mut links = self.live_links(interval, whole.oid);
        links[fragment] = None;
        self.read_one(interval, None, links, whole, (fragment, range), None).await
    }

    async fn read_one(
        &self,
        interval: &Interval,
        held: Option<&ObjectPlace>,
        links: Vec<Option<MemberLink>>,
        whole: WholeObject<'_>,
        span: FragmentSpan,
        dest: Option<ArenaBuf>,
    ) -> store::Result<FragmentRead> {
        Ok(self.read_fragments(interval, held, links, whole, &[span], dest).await?.remove(0))
    }

    /// Reads ranges of fragments according to a [`ReadPlan`], and returns the ranges in the order
    /// of `wanted`. Reconstructs fragments that cannot be read. `dest` is used only if `wanted` has
    /// a single entry. `held` is the place of a client's read; other callers must know that no change
    /// of these ranges is in progress.
    async fn read_fragments(
        &self,
        interval: &Interval,
        held: Option<&ObjectPlace>,
        mut links: Vec<Option<MemberLink>>,
        whole: WholeObject<'_>,
        wanted: &[FragmentSpan],
        mut dest: Option<ArenaBuf>,
    ) -> store::Result<Vec<FragmentRead>> {
        let mut have: Vec<Option<(Range<u64>, FragmentRead)>> = vec![None; links.len()];
        let mut unreadable = Vec::new();
        let mut is_degraded = false;
        let mut rereads = 0;
        loop {
            let plan =
                match ReadPlan::new(&self.layout, whole.size, wanted, |fragment| links[fragment].is_some()) {
                    Ok(plan) => plan,
                    Err(e) => {
                        let e = self.unless_awaited(interval, whole.oid, !unreadable.is_empty(), e);
                        return Err(self.unless_failing(&unreadable, e).await);
                    }
                };
            if !plan.computed.is_empty() && !std::mem::replace(&mut is_degraded, true) {
                metrics::counter!("outboard_osd_degraded_reads_total").increment(1);
                if let Some(held) = held {
                    // A member may have refused a change that the other members have accepted. The
                    // fragments would then belong to different versions.
                    held.settled().await;
                    self.still(interval)?;
                    have.iter_mut().for_each(|read| *read = None);
                }
            }
            // After a failure, reads a fragment again only if the new plan needs more of it.
            let is_covered = |fragment: usize, range: &Range<u64>| {
                have[fragment]
                    .as_ref()
                    .is_some_and(|(read, _)| read.start <= range.start && range.end <= read.end)
            };
            let due = plan.reads.iter().filter(|(fragment, range)| !is_covered(**fragment, range));
            let due: Vec<(usize, Range<u64>, MemberLink)> = due
                .filter_map(|(&fragment, range)| Some((fragment, range.clone(), links[fragment].clone()?)))
                .collect();
            if due.is_empty() {
                match self.take_wanted(wanted, &plan, &have).await {
                    Ok(taken) => return Ok(taken),
                    Err(ComputeError::Damaged(fragment)) if rereads < REREADS => {
                        metrics::counter!("outboard_osd_sources_damaged_total").increment(1);
                        tracing::warn!(oid = %whole.oid, fragment, "a fragment was damaged in memory after it was read; reading it again");
                        (rereads, have[fragment]) = (rereads + 1, None);
                        continue;
                    }
                    Err(ComputeError::Damaged(_)) => return Err(RecoverError::Damaged(0).into()),
                    Err(ComputeError::Store(e)) => return Err(e),
                }
            }
            let mut dest = dest.take().filter(|_| wanted.len() == 1 && plan.computed.is_empty());
            let reads = due.iter().map(|(fragment, range, link)| {
                self.read_from(link, whole, *fragment, range.clone(), dest.take())
            });
            let reads = join_all(reads).await;
            for ((fragment, range, link), read) in due.into_iter().zip(reads) {
                match read {
                    Ok(read) => have[fragment] = Some((range, read)),
                    Err(e) => {
                        if matches!(e, StoreError::Io(_)) {
                            unreadable.push(link.clone());
                        }
                        self.lost(fragment, whole.oid, &link, e)?;
                        (links[fragment], have[fragment]) = (None, None);
                    }
                }
            }
        }
    }

    /// Extracts the requested ranges from the data that was read, and reconstructs the ranges that
    /// could not be read.
    async fn take_wanted(
        &self,
        wanted: &[FragmentSpan],
        plan: &ReadPlan,
        have: &[Option<(Range<u64>, FragmentRead)>],
    ) -> Result<Vec<FragmentRead>, ComputeError> {
        let over = (plan.over.end - plan.over.start) as usize;
        let mut computed = Vec::new();
        if !plan.computed.is_empty() {
            let source = |fragment: &usize| match &have[*fragment] {
                Some((range, read)) => self.filled(&read.from(plan.over.start - range.start, over), over),
                // The fragment ends before the range, so the plan does not read it.
                None => self.coder.zero_blocks(over),
            };
            let blocks: Vec<Payload> = plan.sources.iter().map(source).collect();
            let recovered = self.recover(&plan.sources, &plan.computed, blocks).await;
            computed = recovered.map_err(|e| match e {
                RecoverError::Damaged(source) => ComputeError::Damaged(plan.sources[source]),
                RecoverError::Refused(e) => ComputeError::Store(e),
            })?;
        }
        let take = |(fragment, range): &FragmentSpan| {
            let len = (range.end - range.start) as usize;
            if let Some(at) = plan.computed.iter().position(|computed| computed == fragment) {
                let (bytes, checksums) = computed[at].clone().into_parts();
                return Some(FragmentRead { bytes, checksums }.from(range.start - plan.over.start, len));
            }
            let (from, read) = have[*fragment].as_ref().map(|(range, read)| (range.start, read))?;
            Some(read.from(range.start - from, len))
        };
        // The plan reads or reconstructs every requested range.
        let missing = || {
            let what = "a planned fragment was not read; this is a bug, please report it";
            ComputeError::Store(StoreError::Io(what.into()))
        };
        wanted.iter().map(|span| take(span).ok_or_else(missing)).collect()
    }

    /// Reconstructs the fragments `wanted` from the `k` fragments `sources`, in a mirror from one
    /// copy. `blocks` contains whole blocks of each source, of all sources the same number.
    pub(crate) async fn recover(
        &self,
        sources: &[usize],
        wanted: &[usize],
        blocks: Vec<Payload>,
    ) -> Result<Vec<Payload>, RecoverError> {
        let task = self.coder.reconstruction(sources, wanted, blocks)?;
        self.coding.reconstruct(task, |task| self.coder.buffers_for(task)).await
    }

    /// Reads a range of the fragment of the member at a position. Verifies the fragment's length
    /// and the checksums.
    pub(crate) async fn read_from(
        &self,
        link: &MemberLink,
        WholeObject { oid, size }: WholeObject<'_>,
        position: usize,
        range: Range<u64>,
        dest: Option<ArenaBuf>,
    ) -> store::Result<FragmentRead> {
        let len = range.end - range.start;
        let read = link.target.store().read(&self.cid, oid, range.start, len, dest);
        let read = self.calls.answer(link, read).await.map_err(|e| link.classified_read(e))?;
        read.verify().map_err(|e| link.corrupt(oid, e.to_string()))?;
        self.expect_len(link, WholeObject { oid, size }, position, read.object_size)?;
        link.still()?;
        let bytes = read.contiguous();
        let bytes = bytes.slice(..bytes.len().min(len as usize));
        Ok(FragmentRead { bytes, checksums: read.checksums })
    }

    /// Fails if a fragment's length does not match the size of its object.
    pub(crate) fn expect_len(
        &self,
        link: &MemberLink,
        whole: WholeObject<'_>,
        position: usize,
        len: u64,
    ) -> store::Result<()> {
        let expected = self.layout.fragment_size(position, whole.size);
        if len == expected {
            return Ok(());
        }
        Err(link.corrupt(whole.oid, format!("the fragment has {len} bytes instead of {expected}")))
    }

    /// Records that a fragment cannot be read.
    ///
    /// # Errors
    /// Returns `e` if the error does not mean that the fragment is damaged.
    pub(crate) fn lost(
        &self,
        position: usize,
        oid: &ObjectId,
        link: &MemberLink,
        e: StoreError,
    ) -> store::Result<()> {
        if !is_damage(&e) {
            return Err(e);
        }
        metrics::counter!("outboard_osd_fragments_lost_total").increment(1);
        tracing::warn!(%oid, target_uuid = %link.target.uuid(), error = %e, "a fragment cannot be read; using other fragments instead");
        self.damaged.add(oid, position);
        Ok(())
    }

    /// Pads the bytes of a fragment with zeros to `len`, a multiple of the block size. The
    /// checksum of a fragment's last block covers the block padded with zeros.
    pub(crate) fn filled(&self, read: &FragmentRead, len: usize) -> Payload {
        if read.bytes.is_empty() {
            return self.coder.zero_blocks(len);
        }
        let mut bytes = read.bytes.clone();
        if bytes.len() < len {
            let mut filled = BytesMut::with_capacity(len);
            filled.extend_from_slice(&bytes);
            filled.resize(len, 0);
            bytes = filled.freeze();
        }
        let mut checksums = read.checksums.clone();
        checksums.resize(len / BLOCK_SIZE, ZERO_BLOCK_CRC);
        Payload::from_parts(0, bytes, checksums).expect("there is one checksum per block")
    }
}

impl FragmentRead {
    /// Returns up to `len` bytes from offset `at` on, which must be a multiple of the block size.
    fn from(&self, at: u64, len: usize) -> FragmentRead {
        let start = self.bytes.len().min(at as usize);
        let bytes = self.bytes.slice(start..self.bytes.len().min(start + len));
        let checksums = self.checksums.iter().skip((at / BLOCK) as usize);
        FragmentRead { checksums: checksums.take(bytes.len().div_ceil(BLOCK_SIZE)).copied().collect(), bytes }
    }
}
