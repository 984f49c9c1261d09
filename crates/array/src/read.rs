//! Reading: from the fragments that have the bytes, or from others if those cannot be read.

use std::ops::Range;

use base::block::{self, BLOCK, BLOCK_SIZE};
use base::mem::ArenaBuf;
use bytes::{Bytes, BytesMut};
use futures::future::join_all;
use store::{MAX_READ, ObjectId, ReadData, StoreCalls, StoreError};

use crate::coder::Buffer;
use crate::group::{Group, Known, Link, Session};
use crate::plan::{ReadPlan, Span};
use crate::record::SIZE_XATTR;

/// An object whose fragments are read.
#[derive(Clone, Copy)]
pub(super) struct Whole<'a> {
    pub(super) oid: &'a ObjectId,
    /// Its bytes: each fragment has a length that follows from that.
    pub(super) size: u64,
}

/// Bytes of a fragment.
#[derive(Clone)]
pub(super) struct FragmentRead {
    /// As many as the fragment has of the range.
    pub(super) bytes: Bytes,
    /// One for each block, as stored.
    pub(super) checksums: Vec<u32>,
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
        if len > MAX_READ {
            return Err(StoreError::TooLarge { what: "read".into(), size: len, limit: MAX_READ });
        }
        let session = self.session(number).await?;
        // Held until all is read: every fragment shows the same version.
        let held = self.shared_object(oid).await;
        let size = self.size(&session, oid, &held).await?;
        let Some(size) = size else { return Err(StoreError::NoSuchObject(oid.to_string())) };
        let start = block::align_down(offset);
        let end = block::align_up(offset.saturating_add(len)).unwrap_or(u64::MAX).min(size);
        let mut data = ReadData { offset: start, object_size: size, verified: true, ..ReadData::default() };
        if start >= end || len == 0 {
            return Ok(data);
        }
        let (bytes, checksums) = self.read_range(&session, Whole { oid, size }, start..end, dest).await?;
        if bytes.len() as u64 != end - start {
            let detail = format!("{} bytes instead of {}", bytes.len(), end - start);
            return Err(StoreError::Corrupt { what: format!("object {oid}"), detail });
        }
        (data.data, data.checksums) = (vec![bytes], checksums);
        drop(held);
        Ok(data)
    }

    async fn read_range(
        &self,
        session: &Session,
        whole: Whole<'_>,
        range: Range<u64>,
        dest: Option<ArenaBuf>,
    ) -> store::Result<(Bytes, Vec<u32>)> {
        let links = self.live_links(session, whole.oid);
        if self.layout.is_mirror() {
            let copy = self.next_copy(&links);
            let read = self.read_one(links, whole, (copy, range), dest).await?;
            return Ok((read.bytes, read.checksums));
        }
        let spans = self.layout.spans(range.start, range.end - range.start);
        let wanted: Vec<Span> =
            (0..).zip(spans).filter_map(|(fragment, span)| Some((fragment, span?))).collect();
        if let [span] = &wanted[..] {
            let read = self.read_one(links, whole, span.clone(), dest).await?;
            return Ok((read.bytes, read.checksums));
        }
        let reads = self.read_fragments(links, whole, &wanted, None).await?;
        let mut fragments: Vec<Option<(u64, FragmentRead)>> = vec![None; self.layout.k];
        for ((fragment, span), read) in wanted.into_iter().zip(reads) {
            fragments[fragment] = Some((span.start, read));
        }
        Ok(self.assemble(range, &fragments, dest))
    }

    /// The copy to be read next, one after the other, so that all members' drives take part.
    fn next_copy(&self, links: &[Option<Link>]) -> usize {
        let there: Vec<usize> = (0..links.len()).filter(|&copy| links[copy].is_some()).collect();
        let turn = self.copies_read.get();
        self.copies_read.set(turn.wrapping_add(1));
        if there.is_empty() { 0 } else { there[turn % there.len()] }
    }

    /// An object's size, read if it is not known.
    pub(super) async fn size(
        &self,
        session: &Session,
        oid: &ObjectId,
        known: &Known,
    ) -> store::Result<Option<u64>> {
        if let Some(size) = known.get(session) {
            return Ok(size);
        }
        let asked = async |link: &Link| link.target.store().get_xattr(&self.cid, oid, SIZE_XATTR).await;
        let size = size_of(oid, self.ask(session, oid, asked).await)?;
        known.set(session, size);
        Ok(size)
    }

    /// An object's size, by the first of some members that has the object; those before it are left out from then on. One that has lost
    /// an object does not speak for the others: what all of them lack was removed.
    pub(super) async fn size_by_any(
        &self,
        members: &mut [Option<Link>],
        oid: &ObjectId,
    ) -> store::Result<Option<u64>> {
        let mut asked =
            Err(StoreError::TooFewTargets { there: 0, needed: 1, detail: "none is there".into() });
        for member in members {
            let Some(link) = member else { continue };
            let asked_for = link.target.store().get_xattr(&self.cid, oid, SIZE_XATTR);
            let found = size_of(oid, self.answer(link, asked_for).await);
            link.still()?;
            match found {
                Ok(None) => asked = Ok(None),
                Err(e @ (StoreError::Io(_) | StoreError::Corrupt { .. })) => asked = asked.or(Err(e)),
                outcome => return outcome,
            }
            *member = None;
        }
        asked
    }

    /// Puts the units of several fragments in the order that they have in the object.
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

    /// Reads a range of a fragment, which starts at a block.
    pub(super) async fn read_fragment(
        &self,
        session: &Session,
        whole: Whole<'_>,
        fragment: usize,
        range: Range<u64>,
    ) -> store::Result<FragmentRead> {
        let links = self.live_links(session, whole.oid);
        let fragment = if self.layout.is_mirror() { self.next_copy(&links) } else { fragment };
        self.read_one(links, whole, (fragment, range), None).await
    }

    /// Computes a range of a fragment from others; as long as the range, filled up with zeros.
    pub(super) async fn reconstruct(
        &self,
        session: &Session,
        whole: Whole<'_>,
        fragment: usize,
        range: Range<u64>,
    ) -> store::Result<FragmentRead> {
        let mut links = self.live_links(session, whole.oid);
        links[fragment] = None;
        self.read_one(links, whole, (fragment, range), None).await
    }

    async fn read_one(
        &self,
        links: Vec<Option<Link>>,
        whole: Whole<'_>,
        span: Span,
        dest: Option<ArenaBuf>,
    ) -> store::Result<FragmentRead> {
        Ok(self.read_fragments(links, whole, &[span], dest).await?.remove(0))
    }

    /// Reads ranges of fragments, by [`ReadPlan`], in the order in which they are wanted. Those that cannot be read are computed
    /// from others. `dest` is for a single one.
    async fn read_fragments(
        &self,
        mut links: Vec<Option<Link>>,
        whole: Whole<'_>,
        wanted: &[Span],
        mut dest: Option<ArenaBuf>,
    ) -> store::Result<Vec<FragmentRead>> {
        let mut have: Vec<Option<(Range<u64>, FragmentRead)>> = vec![None; links.len()];
        let mut unreadable = Vec::new();
        let mut is_degraded = false;
        loop {
            let plan =
                match ReadPlan::new(&self.layout, whole.size, wanted, |fragment| links[fragment].is_some()) {
                    Ok(plan) => plan,
                    Err(e) => return Err(self.unless_failing(&unreadable, e).await),
                };
            if !plan.computed.is_empty() && !std::mem::replace(&mut is_degraded, true) {
                metrics::counter!("outboard_osd_degraded_reads_total").increment(1);
            }
            // After a failure, what was read before is read again only if more of its fragment is needed now.
            let is_covered = |fragment: usize, range: &Range<u64>| {
                have[fragment]
                    .as_ref()
                    .is_some_and(|(read, _)| read.start <= range.start && range.end <= read.end)
            };
            let due = plan.reads.iter().filter(|(fragment, range)| !is_covered(**fragment, range));
            let due: Vec<(usize, Range<u64>, Link)> = due
                .filter_map(|(&fragment, range)| Some((fragment, range.clone(), links[fragment].clone()?)))
                .collect();
            if due.is_empty() {
                return self.take_wanted(wanted, &plan, &have);
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

    /// Takes the wanted ranges out of what was read, and computes the others.
    fn take_wanted(
        &self,
        wanted: &[Span],
        plan: &ReadPlan,
        have: &[Option<(Range<u64>, FragmentRead)>],
    ) -> store::Result<Vec<FragmentRead>> {
        let over = (plan.over.end - plan.over.start) as usize;
        let mut computed = Vec::new();
        if !plan.computed.is_empty() {
            let source = |fragment: &usize| match &have[*fragment] {
                Some((range, read)) => {
                    let bytes = part(&read.bytes, plan.over.start - range.start, over);
                    self.filled(bytes, over as u64)
                }
                // The plan does not read what lies behind the fragment's end.
                None => self.coder.zeros(over),
            };
            let bytes: Vec<Bytes> = plan.sources.iter().map(source).collect();
            computed = self.coder.recover(&plan.sources, &plan.computed, &bytes)?;
        }
        let take = |(fragment, range): &Span| {
            let len = (range.end - range.start) as usize;
            if let Some(at) = plan.computed.iter().position(|computed| computed == fragment) {
                let aligned = len.next_multiple_of(BLOCK_SIZE);
                let blocks = part(&computed[at], range.start - plan.over.start, aligned);
                let checksums = block::piece_checksums(0, &blocks);
                return Some(FragmentRead { bytes: blocks.slice(..len), checksums });
            }
            let (from, read) = have[*fragment].as_ref().map(|(range, read)| (range.start, read))?;
            let bytes = part(&read.bytes, range.start - from, len);
            let first = ((range.start - from) / BLOCK) as usize;
            let checksums = read.checksums.iter().skip(first).take(bytes.len().div_ceil(BLOCK_SIZE));
            Some(FragmentRead { checksums: checksums.copied().collect(), bytes })
        };
        // The plan reads or computes all that is wanted.
        let missing =
            || StoreError::Io("a planned fragment was not read; this is a bug, please report it".into());
        wanted.iter().map(|span| take(span).ok_or_else(missing)).collect()
    }

    /// Reads from the member at a position, and verifies what it says.
    pub(super) async fn read_from(
        &self,
        link: &Link,
        Whole { oid, size }: Whole<'_>,
        position: usize,
        range: Range<u64>,
        dest: Option<ArenaBuf>,
    ) -> store::Result<FragmentRead> {
        let len = range.end - range.start;
        let read =
            self.answer(link, link.target.store().read(&self.cid, oid, range.start, len, dest)).await?;
        read.verify().map_err(|e| link.corrupt(oid, e.to_string()))?;
        self.expect_len(link, Whole { oid, size }, position, read.object_size)?;
        link.still()?;
        let bytes = read.contiguous();
        let bytes = bytes.slice(..bytes.len().min(len as usize));
        Ok(FragmentRead { bytes, checksums: read.checksums })
    }

    /// Fails if a fragment does not have the length that follows from its object's.
    pub(super) fn expect_len(
        &self,
        link: &Link,
        whole: Whole<'_>,
        position: usize,
        len: u64,
    ) -> store::Result<()> {
        let expected = self.layout.fragment_size(position, whole.size);
        if len == expected {
            return Ok(());
        }
        Err(link.corrupt(whole.oid, format!("its fragment has {len} bytes instead of {expected}")))
    }

    /// Takes note that a fragment could not be read.
    ///
    /// # Errors
    /// If that says nothing of the fragment.
    fn lost(&self, position: usize, oid: &ObjectId, link: &Link, e: StoreError) -> store::Result<()> {
        if !is_damage(&e) {
            return Err(e);
        }
        metrics::counter!("outboard_osd_fragments_lost_total").increment(1);
        tracing::warn!(%oid, target_uuid = %link.target.uuid(), error = %e, "a fragment cannot be read; others make up for it");
        self.damaged.borrow_mut().insert((oid.clone(), position));
        Ok(())
    }

    /// The error that too few fragments of an object can be read, or one that passes if that is so
    /// because a whole target fails, rather than blocks of it, and is tried again.
    async fn unless_failing(&self, unreadable: &[Link], e: StoreError) -> StoreError {
        for link in unreadable {
            let fails = tokio::time::timeout(self.member_timeout, link.target.fails());
            if fails.await.unwrap_or(true) && link.target.is_hopeful() {
                return StoreError::Disconnected(format!("{e}; target {} fails", link.target.uuid()));
            }
        }
        e
    }

    /// Bytes, filled up with zeros.
    pub(super) fn filled(&self, bytes: Bytes, len: u64) -> Bytes {
        let len = len as usize;
        if bytes.len() == len {
            return bytes;
        }
        if bytes.is_empty() {
            return self.coder.zeros(len);
        }
        let mut filled = BytesMut::with_capacity(len);
        filled.extend_from_slice(&bytes);
        filled.resize(len, 0);
        filled.freeze()
    }

    /// Asks a member that has the object; the answer is the same whichever it is. Where one says that there is no such object, a
    /// second one has to say so, too: it may have lost what it had.
    pub(super) async fn ask<T>(
        &self,
        session: &Session,
        oid: &ObjectId,
        question: impl AsyncFn(&Link) -> store::Result<T>,
    ) -> store::Result<T> {
        let mut links = self.live_links(session, oid);
        let asked = self.ask_one_of(&links, oid, &question).await;
        let first = links.iter().position(Option::is_some);
        let (Err(StoreError::NoSuchObject(_)), Some(first)) = (&asked, first) else { return asked };
        links[first] = None;
        match self.ask_one_of(&links, oid, &question).await {
            Err(StoreError::TooFewTargets { .. } | StoreError::NoSuchObject(_)) => asked,
            Err(e) if !matches!(e, StoreError::NoSuchXattr(_)) => Err(e),
            found => {
                tracing::warn!(%oid, position = first, "a member has lost an object that another one has");
                self.damaged.borrow_mut().insert((oid.clone(), first));
                found
            }
        }
    }

    /// Asks one of several members, the next one if the first cannot read what it has.
    pub(super) async fn ask_one_of<T>(
        &self,
        links: &[Option<Link>],
        oid: &ObjectId,
        question: impl AsyncFn(&Link) -> store::Result<T>,
    ) -> store::Result<T> {
        let (mut failures, mut unreadable) = (Vec::new(), Vec::new());
        for link in links.iter().flatten() {
            match self.answer(link, question(link)).await {
                Err(e @ (StoreError::Io(_) | StoreError::Corrupt { .. })) => {
                    tracing::warn!(%oid, target_uuid = %link.target.uuid(), error = %e, "another member is asked");
                    failures.push(e.to_string());
                    if matches!(e, StoreError::Io(_)) {
                        unreadable.push(link.clone());
                    }
                }
                outcome => return link.still().and(outcome),
            }
        }
        let e = StoreError::TooFewTargets { there: 0, needed: 1, detail: failures.join("; ") };
        // Of a single one another member is asked next.
        if unreadable.len() < 2 {
            return Err(e);
        }
        Err(self.unless_failing(&unreadable, e).await)
    }

    /// A question about an object's metadata, in the session of that number.
    pub(crate) async fn ask_in<T>(
        &self,
        number: u64,
        oid: &ObjectId,
        question: impl AsyncFn(&Link) -> store::Result<T>,
    ) -> store::Result<T> {
        let session = self.session(number).await?;
        // It takes its place behind transactions on the object that were queued before.
        let _held = self.shared_object(oid).await;
        self.ask(&session, oid, question).await
    }
}

impl Link {
    /// What is wrong with the fragment that the target has of an object.
    fn corrupt(&self, oid: &ObjectId, detail: String) -> StoreError {
        StoreError::Corrupt { what: format!("object {oid} on target {}", self.target.uuid()), detail }
    }

    /// Fails if the target has another session: it may have repeated what was asked of it, and have seen what is not durable.
    pub(super) fn still(&self) -> store::Result<()> {
        if self.target.store().incarnation() == self.session {
            return Ok(());
        }
        Err(StoreError::Disconnected("the target's session has changed".into()))
    }
}

/// Up to `len` bytes from `at` on.
fn part(bytes: &Bytes, at: u64, len: usize) -> Bytes {
    let start = bytes.len().min(at as usize);
    bytes.slice(start..bytes.len().min(start + len))
}

/// Whether an error says that what is stored cannot be read, rather than that the store cannot be asked.
pub(super) fn is_damage(e: &StoreError) -> bool {
    matches!(e, StoreError::Corrupt { .. } | StoreError::Io(_) | StoreError::NoSuchObject(_))
}

/// An object's size, from what a member said of it.
pub(super) fn size_of(oid: &ObjectId, found: store::Result<Bytes>) -> store::Result<Option<u64>> {
    match found {
        Ok(bytes) => match bytes[..].try_into() {
            Ok(size) => Ok(Some(u64::from_be_bytes(size))),
            Err(_) => {
                let detail = "its size cannot be read".into();
                Err(StoreError::Corrupt { what: format!("object {oid}"), detail })
            }
        },
        Err(StoreError::NoSuchObject(_)) => Ok(None),
        // Made by a change of its omap alone.
        Err(StoreError::NoSuchXattr(_)) => Ok(Some(0)),
        Err(e) => Err(e),
    }
}
