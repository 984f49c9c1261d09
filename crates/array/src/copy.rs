//! Copies an object to one member: its fragment, reconstructed from the other members, and its
//! metadata.

use std::collections::BTreeMap;

use base::block::{BLOCK_SIZE, Payload, crc_without_padding};
use bytes::Bytes;
use futures::stream::{self, StreamExt, TryStreamExt};
use store::{ObjectId, Op, StoreCalls, StoreError, Transaction, WriteSource};

use crate::ask::is_damage;
use crate::group::Group;
use crate::interval::Interval;
use crate::member_link::MemberLink;
use crate::page::page_by;
use crate::read::{FragmentRead, WholeObject};
use crate::record::SIZE_XATTR;
use crate::stage::FragmentStage;

/// The member that receives a copy of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReceivingMember {
    /// The member is in sync, and only its data is damaged. It keeps its omap, and may use the reserve.
    Damaged,
    /// The member is in sync, and receives other content in a salvage. It may use the reserve, and never
    /// lacks the object meanwhile, because a salvage could take that for a removal.
    Salvaged,
    /// The member is not in sync, so its old fragment is not needed.
    NotInSync,
}

/// The xattr of an unfinished fragment that is written in several transactions. Its value is the UUID of the
/// member's target.
const UNFINISHED_XATTR: Bytes = Bytes::from_static(b"unfinished");

/// Number of bytes of a fragment that are reconstructed and copied at a time.
const SEGMENT: u64 = 1 << 20;
/// Number of segments of one fragment that are copied concurrently.
const SEGMENTS: usize = 3;

impl Group {
    /// Replaces a member's fragment of an object, and returns the length of the fragment in bytes.
    /// The caller must hold the object's lock. Unless the member keeps its omap, the omap is incomplete
    /// until the copy is finished.
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
                self.calls.apply_to(link, self.removal(oid)).await?;
            }
            return Ok(0);
        };
        let whole = WholeObject { oid, size };
        let put = self.put_fragment(sources, link, position, whole, &peers, (there, receiver)).await;
        match put {
            // The member is full, so remove its old fragment first.
            Err(StoreError::NoSpace { .. }) if there && receiver == ReceivingMember::NotInSync => {
                self.calls.apply_to(link, self.removal(oid)).await?;
                self.put_fragment(sources, link, position, whole, &peers, (false, receiver)).await?;
            }
            Err(StoreError::NoSpace { .. }) if receiver == ReceivingMember::Salvaged => {
                self.refill_fragment(sources, link, position, whole, (&peers, there)).await?;
            }
            put => put?,
        }
        if !(there && receiver == ReceivingMember::Damaged) {
            self.copy_omap(link, &peers, oid, receiver).await?;
        }
        Ok(self.layout.fragment_size(position, size))
    }

    fn removal(&self, oid: &ObjectId) -> Transaction {
        Transaction::new(self.cid.clone()).with(Op::Remove { oid: oid.clone() }).from_reserve()
    }

    /// Writes a fragment and the xattrs to a member. `there`: the member has a fragment of the
    /// object.
    async fn put_fragment(
        &self,
        interval: &Interval,
        link: &MemberLink,
        position: usize,
        whole: WholeObject<'_>,
        peers: &[Option<MemberLink>],
        (there, receiver): (bool, ReceivingMember),
    ) -> store::Result<()> {
        let oid = whole.oid;
        let mut transaction = Transaction::new(self.cid.clone());
        transaction.uses_reserve = receiver != ReceivingMember::NotInSync;
        if there && receiver == ReceivingMember::Damaged {
            transaction.ops.push(Op::Truncate { oid: oid.clone(), size: 0 });
            transaction.ops.push(Op::RemoveXattrs { oid: oid.clone() });
        } else if there {
            transaction.ops.push(Op::Remove { oid: oid.clone() });
        }
        let (source, stage) = self.make_fragment(interval, link, position, whole).await?;
        transaction.ops.push(Op::Touch { oid: oid.clone() });
        transaction.ops.extend(source.map(|source| Op::Write { oid: oid.clone(), offset: 0, source }));
        let xattrs = self.xattrs_of_any(peers, oid).await?;
        transaction.ops.push(Op::SetXattrs { oid: oid.clone(), xattrs });
        let written = self.calls.apply_to(link, transaction).await;
        drop(stage);
        written
    }

    /// Replaces a member's fragment and xattrs in several transactions, which need little more space than
    /// the larger of both fragments. Until the last transaction, the xattrs differ from those of all
    /// other members, so that a salvage recognises that the fragment has no usable content. `there`: the
    /// member has a fragment of the object.
    ///
    /// # Errors
    /// If a member fails. If the data does not fit, the member then has an empty fragment.
    async fn refill_fragment(
        &self,
        interval: &Interval,
        link: &MemberLink,
        position: usize,
        whole: WholeObject<'_>,
        (peers, there): (&[Option<MemberLink>], bool),
    ) -> store::Result<()> {
        self.empty_fragment(link, whole, there).await?;
        let oid = || whole.oid.clone();
        let len = self.layout.fragment_size(position, whole.size);
        for offset in (0..len).step_by(SEGMENT as usize) {
            let range = offset..(offset + SEGMENT).min(len);
            let source = payload(self.reconstruct(interval, whole, position, range).await?)?;
            let write = Op::Write { oid: oid(), offset, source: WriteSource::Inline(source) };
            match self.calls.apply_to(link, self.with_reserve(vec![write])).await {
                Err(e @ StoreError::NoSpace { .. }) => {
                    // While the group waits for space, other groups can use this space.
                    self.empty_fragment(link, whole, true).await?;
                    return Err(e);
                }
                written => written?,
            }
        }
        let xattrs = self.xattrs_of_any(peers, whole.oid).await?;
        let finish = [Op::RemoveXattrs { oid: oid() }, Op::SetXattrs { oid: oid(), xattrs }];
        self.calls.apply_to(link, self.with_reserve(finish.into())).await
    }

    /// Replaces a member's fragment, if it is `there`, by an empty one with xattrs that no other member has.
    async fn empty_fragment(
        &self,
        link: &MemberLink,
        WholeObject { oid, size }: WholeObject<'_>,
        there: bool,
    ) -> store::Result<()> {
        let uuid = Bytes::copy_from_slice(link.target.uuid().as_bytes());
        let size = Bytes::copy_from_slice(&size.max(1).to_be_bytes());
        let xattrs = vec![(UNFINISHED_XATTR, uuid), (SIZE_XATTR, size)];
        let make = [Op::Touch { oid: oid.clone() }, Op::SetXattrs { oid: oid.clone(), xattrs }];
        let remove = there.then(|| Op::Remove { oid: oid.clone() });
        self.calls.apply_to(link, self.with_reserve(remove.into_iter().chain(make).collect())).await
    }

    fn with_reserve(&self, ops: Vec<Op>) -> Transaction {
        Transaction { collection: self.cid.clone(), ops, uses_reserve: true }
    }

    async fn xattrs_of_any(
        &self,
        peers: &[Option<MemberLink>],
        oid: &ObjectId,
    ) -> store::Result<Vec<(Bytes, Bytes)>> {
        let asked = async |peer: &MemberLink| peer.target.store().get_xattrs(&self.cid, oid).await;
        self.ask_one_of(peers, oid, asked).await
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
            let asked = async |peer: &MemberLink| {
                peer.target.store().omap_iterate(&self.cid, oid, from.clone(), 1024).await
            };
            let (entries, more) = self.ask_one_of(peers, oid, asked).await?;
            let Some((last, _)) = entries.last() else { return Ok(()) };
            let next = Bytes::from([last, &b"\0"[..]].concat());
            self.set_omap(link, oid, entries, receiver).await?;
            if !more {
                return Ok(());
            }
            from = next;
        }
    }

    /// Copies those entries of an object's omap from another member that a member lacks. Does nothing if one
    /// of the omaps is damaged, because reads report the damage, or if the object does not exist.
    pub(crate) async fn copy_missing_omap(
        &self,
        to: &MemberLink,
        from: &MemberLink,
        oid: &ObjectId,
    ) -> store::Result<()> {
        let mut start = Bytes::new();
        loop {
            let asked = from.target.store().omap_iterate(&self.cid, oid, start, 1024);
            let (mut entries, more) = match self.calls.answer(from, asked).await {
                Err(e) if is_damage(&e) => return Ok(()),
                page => page?,
            };
            let Some((last, _)) = entries.last() else { return Ok(()) };
            start = Bytes::from([last, &b"\0"[..]].concat());
            let keys = entries.iter().map(|(key, _)| key.clone()).collect();
            let asked = to.target.store().omap_get(&self.cid, oid, keys);
            let known: BTreeMap<Bytes, Bytes> = match self.calls.answer(to, asked).await {
                Err(e) if is_damage(&e) => return Ok(()),
                known => known?.into_iter().collect(),
            };
            entries.retain(|(key, value)| known.get(key) != Some(value));
            self.set_omap(to, oid, entries, ReceivingMember::Salvaged).await?;
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
            let mut set = Transaction::new(self.cid.clone()).with(Op::OmapSet { oid: oid.clone(), entries });
            // The copy of the owner's metadata object may use the reserve; otherwise a full member could
            // never be rebuilt.
            set.uses_reserve = *oid == self.meta || receiver != ReceivingMember::NotInSync;
            self.calls.apply_to(link, set).await?;
        }
        Ok(())
    }
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
