//! Copies an object to one member: its fragment, reconstructed from the other members, and its
//! metadata.

use base::block::{BLOCK_SIZE, Payload, crc_without_padding};
use bytes::Bytes;
use futures::stream::{self, StreamExt, TryStreamExt};
use store::{ObjectId, Op, StoreCalls, StoreError, Transaction, WriteSource};

use crate::group::Group;
use crate::interval::Interval;
use crate::member_link::MemberLink;
use crate::page::page_by;
use crate::read::{FragmentRead, WholeObject};
use crate::record::{SIZE_XATTR, UNFINISHED_XATTR};
use crate::stage::FragmentStage;

/// The member that receives a copy of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReceivingMember {
    /// The member is in sync, and only its data is damaged. It keeps its omap, and may use the reserve.
    Damaged,
    /// The member takes part in a salvage. It never lacks the object meanwhile, because a salvage could
    /// take that for a removal. Damage that prevents the copy is an error of the call, and the member's
    /// target does not fail.
    Salvaged {
        /// Whether the copy may use the reserve.
        uses_reserve: bool,
    },
    /// The member is being rebuilt, so its old fragment is not needed.
    NotInSync,
}

/// Number of bytes of a fragment that are reconstructed and copied at a time.
pub(crate) const SEGMENT: u64 = 1 << 20;
/// Number of segments of one fragment that are copied concurrently.
const SEGMENTS: usize = 3;
/// Number of omap entries that are read at a time.
const OMAP_PAGE: usize = 1024;

impl Group {
    /// Replaces a member's fragment of an object, and returns the length of the fragment in bytes.
    /// The caller must be alone on the object. Only a complete copy has the xattrs of the object,
    /// with two exceptions: in a mirror, and on a member in sync that had lost the object, the omap
    /// is copied last.
    ///
    /// # Errors
    /// If the interval has ended, or a member fails.
    pub(crate) async fn copy_object(
        &self,
        interval: &Interval,
        link: &MemberLink,
        position: usize,
        oid: &ObjectId,
        receiver: ReceivingMember,
    ) -> store::Result<u64> {
        let _copying = self.copies.read().await;
        self.still(interval)?;
        let there = self.is_there(interval, link, position, oid).await?;
        self.copy_from_sources(interval, link, position, oid, (there, receiver)).await
    }

    /// Returns whether the member at a position has a fragment of an object.
    pub(crate) async fn is_there(
        &self,
        sources: &Interval,
        link: &MemberLink,
        position: usize,
        oid: &ObjectId,
    ) -> store::Result<bool> {
        match self.calls.answer(link, link.target.store().stat(&self.cid, oid)).await {
            Ok(_) => Ok(true),
            Err(StoreError::NoSuchObject(_)) => Ok(false),
            Err(e) => {
                // A member that cannot even answer this query cannot receive data. The other
                // members continue without this member if they can.
                let peers = self.live_links(sources, oid).into_iter().enumerate();
                let peers = peers.filter(|(at, peer)| *at != position && peer.is_some()).count();
                if matches!(e, StoreError::Io(_)) && peers >= self.layout.k {
                    link.fail(&e);
                }
                Err(e)
            }
        }
    }

    /// Like [`copy_object`](Group::copy_object), but from the members that `sources` links. The caller
    /// must have locked `copies`, and knows from [`is_there`](Group::is_there) whether the member has a
    /// fragment.
    pub(crate) async fn copy_from_sources(
        &self,
        sources: &Interval,
        link: &MemberLink,
        position: usize,
        oid: &ObjectId,
        (there, receiver): (bool, ReceivingMember),
    ) -> store::Result<u64> {
        let mut peers = self.live_links(sources, oid);
        peers[position] = None;
        let Some(size) = self.size_by_any(&mut peers, oid).await? else {
            if there {
                self.apply_copy(link, vec![Op::Remove { oid: oid.clone() }], oid, receiver).await?;
            }
            return Ok(0);
        };
        let whole = WholeObject { oid, size };
        let put = self.put_fragment(sources, link, position, whole, &peers, (there, receiver)).await;
        match (put, receiver) {
            // The member is full, so remove its old fragment first.
            (Err(StoreError::NoSpace { .. }), ReceivingMember::NotInSync) if there => {
                self.apply_copy(link, vec![Op::Remove { oid: oid.clone() }], oid, receiver).await?;
                self.put_fragment(sources, link, position, whole, &peers, (false, receiver)).await?;
            }
            (Err(StoreError::NoSpace { .. }), ReceivingMember::Salvaged { .. }) => {
                let filled = self.refill_fragment(sources, link, position, whole, (&peers, receiver)).await;
                if let Err(StoreError::NoSpace { .. }) = filled {
                    // While the group waits for space, other groups can use this space. The member may not
                    // have room even for an empty fragment.
                    drop(self.empty_fragment(link, whole, true, receiver).await);
                }
                filled?;
            }
            (put, _) => put?,
        }
        Ok(self.layout.fragment_size(position, size))
    }

    /// Applies operations on an object to the member that receives its copy.
    async fn apply_copy(
        &self,
        link: &MemberLink,
        ops: Vec<Op>,
        oid: &ObjectId,
        receiver: ReceivingMember,
    ) -> store::Result<()> {
        // The copy of the owner's metadata object may use the reserve; otherwise a full member could
        // never be rebuilt.
        let uses_reserve = match (&ops[..], receiver) {
            ([Op::Remove { .. }], _) | (_, ReceivingMember::Damaged) => true,
            (_, ReceivingMember::Salvaged { uses_reserve: true }) => true,
            _ => *oid == self.meta,
        };
        let transaction = Transaction { collection: self.cid.clone(), ops, uses_reserve };
        match receiver {
            ReceivingMember::Salvaged { .. } => self.calls.apply_unless_damaged(link, transaction).await,
            _ => self.calls.apply_to(link, transaction).await,
        }
    }

    /// Replaces a fragment, the xattrs and the omap of a member after it has read the fragment and the
    /// xattrs from other members. `there`: the member has a fragment of the object.
    async fn put_fragment(
        &self,
        interval: &Interval,
        link: &MemberLink,
        position: usize,
        whole: WholeObject<'_>,
        peers: &[Option<MemberLink>],
        (there, receiver): (bool, ReceivingMember),
    ) -> store::Result<()> {
        let oid = || whole.oid.clone();
        let is_damaged = receiver == ReceivingMember::Damaged;
        let keeps_omap = is_damaged && there;
        // There is no salvage in a mirror, and the data of an interrupted copy is of use there.
        let is_omap_last = !keeps_omap && (is_damaged || self.layout.is_mirror());
        let (source, stage) = self.make_fragment(interval, link, position, whole).await?;
        let xattrs = self.xattrs_of_any(peers, whole.oid).await?;
        let mut ops = Vec::new();
        if keeps_omap {
            ops.extend([Op::Truncate { oid: oid(), size: 0 }, Op::RemoveXattrs { oid: oid() }]);
        } else if !is_omap_last && self.has_omap(peers, whole.oid).await? {
            self.empty_fragment(link, whole, there, receiver).await?;
            self.copy_omap(link, peers, whole.oid, receiver).await?;
            ops.push(Op::RemoveXattrs { oid: oid() });
        } else if there {
            ops.push(Op::Remove { oid: oid() });
        }
        ops.push(Op::Touch { oid: oid() });
        ops.extend(source.map(|source| Op::Write { oid: oid(), offset: 0, source }));
        ops.push(Op::SetXattrs { oid: oid(), xattrs });
        let written = self.apply_copy(link, ops, whole.oid, receiver).await;
        drop(stage);
        written?;
        match is_omap_last {
            true => self.copy_omap(link, peers, whole.oid, receiver).await,
            false => Ok(()),
        }
    }

    /// Like [`put_fragment`](Group::put_fragment), but needs little more space than the larger of both
    /// fragments: removes the old fragment, and writes the new one in several transactions.
    async fn refill_fragment(
        &self,
        interval: &Interval,
        link: &MemberLink,
        position: usize,
        whole: WholeObject<'_>,
        (peers, receiver): (&[Option<MemberLink>], ReceivingMember),
    ) -> store::Result<()> {
        let oid = || whole.oid.clone();
        let there = self.is_there(interval, link, position, whole.oid).await?;
        self.empty_fragment(link, whole, there, receiver).await?;
        self.copy_omap(link, peers, whole.oid, receiver).await?;
        let len = self.layout.fragment_size(position, whole.size);
        for offset in (0..len).step_by(SEGMENT as usize) {
            let range = offset..(offset + SEGMENT).min(len);
            let source = payload(self.reconstruct(interval, whole, position, range).await?)?;
            let write = Op::Write { oid: oid(), offset, source: WriteSource::Inline(source) };
            self.apply_copy(link, vec![write], whole.oid, receiver).await?;
        }
        let xattrs = self.xattrs_of_any(peers, whole.oid).await?;
        let finish = [Op::RemoveXattrs { oid: oid() }, Op::SetXattrs { oid: oid(), xattrs }];
        self.apply_copy(link, finish.into(), whole.oid, receiver).await
    }

    /// Replaces a member's fragment, if it is `there`, by an empty one with [`UNFINISHED_XATTR`]. A salvage
    /// recognises by the xattrs that the copy is incomplete.
    pub(crate) async fn empty_fragment(
        &self,
        link: &MemberLink,
        WholeObject { oid, size }: WholeObject<'_>,
        there: bool,
        receiver: ReceivingMember,
    ) -> store::Result<()> {
        let uuid = Bytes::copy_from_slice(link.target.uuid().as_bytes());
        let size = Bytes::copy_from_slice(&size.max(1).to_be_bytes());
        let xattrs = vec![(UNFINISHED_XATTR, uuid), (SIZE_XATTR, size)];
        let make = [Op::Touch { oid: oid.clone() }, Op::SetXattrs { oid: oid.clone(), xattrs }];
        let remove = there.then(|| Op::Remove { oid: oid.clone() });
        self.apply_copy(link, remove.into_iter().chain(make).collect(), oid, receiver).await
    }

    pub(crate) async fn xattrs_of_any(
        &self,
        peers: &[Option<MemberLink>],
        oid: &ObjectId,
    ) -> store::Result<Vec<(Bytes, Bytes)>> {
        let asked = async |peer: &MemberLink| peer.target.store().get_xattrs(&self.cid, oid).await;
        self.ask_one_of(peers, oid, asked).await
    }

    /// Returns whether an object has entries in its omap.
    pub(crate) async fn has_omap(&self, peers: &[Option<MemberLink>], oid: &ObjectId) -> store::Result<bool> {
        let (entries, _) = self.omap_page(peers, oid, Bytes::new(), 1).await?;
        Ok(!entries.is_empty())
    }

    /// Returns entries of an object's omap from `from` on, and whether more follow, from the first of
    /// `peers` that can read them.
    async fn omap_page(
        &self,
        peers: &[Option<MemberLink>],
        oid: &ObjectId,
        from: Bytes,
        limit: usize,
    ) -> store::Result<(Vec<(Bytes, Bytes)>, bool)> {
        let asked = async |peer: &MemberLink| {
            peer.target.store().omap_iterate(&self.cid, oid, from.clone(), limit).await
        };
        self.ask_one_of(peers, oid, asked).await
    }

    /// Reads all that copies of an object to the members at `positions` need from the members that
    /// `sources` links, and discards it.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`] or [`StoreError::TooFewTargets`] if too many of these members have damaged
    /// data.
    pub(crate) async fn try_copies(
        &self,
        sources: &Interval,
        positions: &[usize],
        oid: &ObjectId,
    ) -> store::Result<()> {
        let mut peers = self.live_links(sources, oid);
        let Some(size) = self.size_by_any(&mut peers, oid).await? else { return Ok(()) };
        let whole = WholeObject { oid, size };
        for &position in positions {
            let len = self.layout.fragment_size(position, size);
            for offset in (0..len).step_by(SEGMENT as usize) {
                let range = offset..(offset + SEGMENT).min(len);
                self.reconstruct(sources, whole, position, range).await?;
            }
        }
        self.xattrs_of_any(&peers, oid).await?;
        let mut from = Bytes::new();
        loop {
            let (entries, more) = self.omap_page(&peers, oid, from, OMAP_PAGE).await?;
            match entries.last() {
                Some((last, _)) if more => from = following(last),
                _ => return Ok(()),
            }
        }
    }

    /// Reconstructs a fragment. Stages the fragment on its member if it is longer than `SEGMENT`.
    async fn make_fragment(
        &self,
        interval: &Interval,
        link: &MemberLink,
        position: usize,
        whole: WholeObject<'_>,
    ) -> store::Result<(Option<WriteSource>, Option<FragmentStage>)> {
        let len = self.layout.fragment_size(position, whole.size);
        if len == 0 {
            return Ok((None, None));
        }
        if len <= SEGMENT {
            let read = self.reconstruct(interval, whole, position, 0..len).await?;
            return Ok((Some(WriteSource::Inline(payload(read)?)), None));
        }
        let store = &link.target.store();
        let id = self.calls.answer(link, store.stage(len)).await?;
        let stage = FragmentStage { link: link.clone(), id };
        let write = |at: u64| async move {
            let range = at..(at + SEGMENT).min(len);
            let read = self.reconstruct(interval, whole, position, range).await?;
            self.calls.answer(link, store.stage_write(id, at, payload(read)?)).await
        };
        let segments = stream::iter((0..len).step_by(SEGMENT as usize)).map(Ok);
        segments.try_for_each_concurrent(SEGMENTS, write).await?;
        Ok((Some(WriteSource::Staged { stage: id, offset: 0, len }), Some(stage)))
    }

    /// Copies the entries of an object's omap from one of `peers` to a member.
    async fn copy_omap(
        &self,
        link: &MemberLink,
        peers: &[Option<MemberLink>],
        oid: &ObjectId,
        receiver: ReceivingMember,
    ) -> store::Result<()> {
        let mut from = Bytes::new();
        loop {
            let (entries, more) = self.omap_page(peers, oid, from, OMAP_PAGE).await?;
            let Some((last, _)) = entries.last() else { return Ok(()) };
            from = following(last);
            self.set_omap(link, oid, entries, receiver).await?;
            if !more {
                return Ok(());
            }
        }
    }

    /// Sets entries of an object's omap on a member.
    async fn set_omap(
        &self,
        link: &MemberLink,
        oid: &ObjectId,
        entries: Vec<(Bytes, Bytes)>,
        receiver: ReceivingMember,
    ) -> store::Result<()> {
        let mut entries = entries.into_iter().peekable();
        while entries.peek().is_some() {
            let entries = page_by(&mut entries, |(key, value)| key.len() + value.len());
            self.apply_copy(link, vec![Op::OmapSet { oid: oid.clone(), entries }], oid, receiver).await?;
        }
        Ok(())
    }
}

/// Returns the key that follows a key.
fn following(key: &Bytes) -> Bytes {
    Bytes::from([key, &b"\0"[..]].concat())
}

/// Returns a fragment's bytes with their checksums. The last checksum is of the bytes alone,
/// without padding.
pub(crate) fn payload(read: FragmentRead) -> store::Result<Payload> {
    let FragmentRead { bytes, mut checksums } = read;
    checksums.truncate(bytes.len().div_ceil(BLOCK_SIZE));
    let tail = bytes.len() % BLOCK_SIZE;
    if let (Some(last), true) = (checksums.last_mut(), tail > 0) {
        *last = crc_without_padding(&bytes[bytes.len() - tail..], *last);
    }
    Payload::from_parts(0, bytes, checksums).map_err(|e| StoreError::InvalidArgument(e.to_string()))
}
