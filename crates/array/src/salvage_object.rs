//! Salvages one object: chooses the content that the group keeps, and copies it to the members of the
//! salvage that lack it.
//!
//! Nothing is replaced or removed before everything that the copies need was read: a copy replaces
//! another content, which would be the next choice. A read may fail although the stored data is intact,
//! so data counts as damaged only if several reads fail.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::time::Duration;

use bytes::Bytes;
use store::{ObjectId, Op, StoreCalls, StoreError, Transaction};

use crate::copy::ReceivingMember;
use crate::group::Group;
use crate::interval::{Interval, over};
use crate::member_link::MemberLink;
use crate::read::WholeObject;
use crate::record::{GroupRecord, SIZE_XATTR, Standing, UNFINISHED_XATTR};
use crate::view::MemberView;

/// Number of attempts after which stored data counts as damaged.
const ATTEMPTS: usize = 3;
/// Pause between these attempts.
const PAUSE: Duration = Duration::from_millis(100);

/// A member's position, and what the member has stored.
pub(crate) type PlacedView<'a> = (usize, &'a MemberView);

/// The members of a salvage.
#[derive(Clone, Copy)]
pub(crate) struct Salvaged<'a> {
    /// Number of the interval that is being opened.
    pub(crate) number: u64,
    pub(crate) record: &'a GroupRecord,
    /// All members: those in sync, and then the stale members, the newest first.
    pub(crate) sources: &'a [PlacedView<'a>],
    pub(crate) in_sync: &'a [PlacedView<'a>],
    /// Stale members that receive objects.
    pub(crate) stale: &'a [PlacedView<'a>],
}

impl<'a> Salvaged<'a> {
    /// Returns the members that receive objects.
    fn receivers(&self) -> impl Iterator<Item = PlacedView<'a>> {
        self.in_sync.iter().chain(self.stale).copied()
    }

    /// Whether the member at a position receives objects.
    pub(crate) fn receives(&self, position: usize) -> bool {
        self.receivers().any(|(at, _)| at == position)
    }

    fn is_in_sync(&self, position: usize) -> bool {
        self.in_sync.iter().any(|(at, _)| *at == position)
    }

    /// Returns an interval of only these members, from which objects are copied.
    fn interval(&self, members: &[PlacedView<'_>]) -> Interval {
        let mut links = vec![None; self.record.members.len()];
        members.iter().for_each(|(position, view)| links[*position] = Some(view.link.clone()));
        let (undone, leftovers) = (BTreeSet::new(), RefCell::default());
        // A read must not wait for the rebuild of a member.
        let mut record = self.record.clone();
        record.members.iter_mut().for_each(|member| member.standing = Standing::InSync);
        Interval { number: self.number, links, record, undone, leftovers }
    }
}

/// A content of an object, and the members that have it.
struct HeldContent<'a> {
    /// The xattrs, which differ between any two contents. `None` if the object does not exist.
    xattrs: Option<Vec<(Bytes, Bytes)>>,
    holders: Vec<PlacedView<'a>>,
}

impl<'a> HeldContent<'a> {
    /// Returns the number of members that must have this content.
    fn needed(&self, k: usize) -> usize {
        let is_size = |(name, size): &(Bytes, Bytes)| *name == SIZE_XATTR && size[..] != 0_u64.to_be_bytes();
        match &self.xattrs {
            None => 0,
            Some(xattrs) if xattrs.iter().any(is_size) => k,
            Some(_) => 1,
        }
    }

    /// Returns the members that must receive this content.
    fn receivers(&self, salvaged: &Salvaged<'a>) -> Vec<PlacedView<'a>> {
        let is_holder = |position| self.holders.iter().any(|(at, _)| *at == position);
        salvaged.receivers().filter(|(position, _)| !is_holder(*position)).collect()
    }
}

/// What a member has of the owner's metadata object.
enum MetadataCopy {
    Absent,
    /// The copy to this member was interrupted.
    Incomplete,
    /// All of it is readable, and these are the xattrs.
    Complete(Vec<(Bytes, Bytes)>),
    Damaged(StoreError),
}

/// Whether an error may mean that stored data is damaged.
fn may_be_damage(e: &StoreError) -> bool {
    matches!(e, StoreError::Corrupt { .. } | StoreError::Io(_) | StoreError::TooFewTargets { .. })
}

/// Repeats a call that finds damage.
async fn repeated<T>(call: impl AsyncFn() -> store::Result<T>) -> store::Result<T> {
    for _ in 1..ATTEMPTS {
        match call().await {
            Err(e) if may_be_damage(&e) => tokio::time::sleep(PAUSE).await,
            outcome => return outcome,
        }
    }
    call().await
}

impl Group {
    /// Makes the members agree about an object that may differ. Returns false if the object is lost.
    ///
    /// # Errors
    /// If a member fails.
    pub(crate) async fn salvage_object(
        &self,
        salvaged: &Salvaged<'_>,
        oid: &ObjectId,
    ) -> store::Result<bool> {
        for content in self.contents(salvaged, oid).await? {
            if self.is_complete(salvaged, &content, oid).await? {
                self.copy_content(salvaged, &content, oid).await?;
                return Ok(true);
            }
        }
        tracing::warn!(cid = %self.cid, %oid, "an object is lost, because too few members have the same content");
        for placed in salvaged.receivers() {
            self.remove_from(salvaged, placed, oid).await?;
        }
        Ok(false)
    }

    /// Returns the contents of an object, the newest first.
    async fn contents<'a>(
        &self,
        salvaged: &Salvaged<'a>,
        oid: &ObjectId,
    ) -> store::Result<Vec<HeldContent<'a>>> {
        let mut contents: Vec<HeldContent<'a>> = Vec::new();
        for &(position, view) in salvaged.sources {
            let xattrs = match repeated(async || self.xattrs_on(&view.link, oid).await).await {
                Ok(xattrs) => Some(xattrs),
                Err(StoreError::NoSuchObject(_)) => None,
                Err(e) => {
                    self.unless_damaged(&[(position, view)], e).await?;
                    continue;
                }
            };
            match contents.iter_mut().find(|content| content.xattrs == xattrs) {
                Some(content) => content.holders.push((position, view)),
                // If only stale members lack the object, it was created later.
                None if xattrs.is_none() && !salvaged.is_in_sync(position) => {}
                None => contents.push(HeldContent { xattrs, holders: vec![(position, view)] }),
            }
        }
        Ok(contents)
    }

    /// Returns the error of a call on members unless it means that stored data is damaged.
    async fn unless_damaged(&self, members: &[PlacedView<'_>], e: StoreError) -> store::Result<()> {
        if !may_be_damage(&e) {
            return Err(e);
        }
        let links: Vec<MemberLink> = members.iter().map(|(_, view)| view.link.clone()).collect();
        match self.unless_failing(&links, e).await {
            e @ StoreError::Disconnected(_) => Err(e),
            _ => Ok(()),
        }
    }

    /// Whether enough members have a content, and all data that the other members need can be read.
    async fn is_complete<'a>(
        &self,
        salvaged: &Salvaged<'a>,
        content: &HeldContent<'a>,
        oid: &ObjectId,
    ) -> store::Result<bool> {
        if content.holders.len() < content.needed(self.layout.k) {
            return Ok(false);
        }
        let receivers: Vec<usize> = content.receivers(salvaged).iter().map(|(at, _)| *at).collect();
        if receivers.is_empty() || content.xattrs.is_none() {
            return Ok(true);
        }
        let sources = salvaged.interval(&content.holders);
        match repeated(async || self.try_copies(&sources, &receivers, oid).await).await {
            Ok(()) => Ok(true),
            Err(e) => self.unless_damaged(&content.holders, e).await.map(|()| false),
        }
    }

    /// Copies a complete content to the members that lack it.
    ///
    /// # Errors
    /// If a member fails, or if too few members can receive the content.
    async fn copy_content<'a>(
        &self,
        salvaged: &Salvaged<'a>,
        content: &HeldContent<'a>,
        oid: &ObjectId,
    ) -> store::Result<()> {
        if content.xattrs.is_none() {
            for placed in content.receivers(salvaged) {
                self.remove_from(salvaged, placed, oid).await?;
            }
            return Ok(());
        }
        let sources = salvaged.interval(&content.holders);
        let mut there = content.holders.iter().filter(|(position, _)| salvaged.receives(*position)).count();
        for (position, view) in content.receivers(salvaged) {
            let receiver = ReceivingMember::Salvaged { uses_reserve: self.needs(salvaged, position) };
            let copied = repeated(async || {
                let was_there = self.is_there(&sources, &view.link, position, oid).await?;
                self.copy_from_sources(&sources, &view.link, position, oid, (was_there, receiver)).await
            });
            let mut e = match copied.await {
                Ok(_) => {
                    there += 1;
                    continue;
                }
                Err(e) => e,
            };
            if !matches!(e, StoreError::NoSpace { .. }) {
                self.unless_damaged(&[(position, view)], e.clone()).await?;
                let damage = match self.is_complete(salvaged, content, oid).await? {
                    true => self.damage_on(&view.link, oid, receiver).await?,
                    false => None,
                };
                // Otherwise the next attempt considers all contents again.
                e = damage.ok_or_else(|| StoreError::Disconnected(e.to_string()))?;
            }
            self.cannot_receive(salvaged, (position, view), oid, e).await?;
        }
        let needed = content.needed(self.layout.k);
        if there < needed {
            // Members that are only read have the content, and may have space by the next attempt.
            self.receivers.reconsider_unable();
            let detail = format!(
                "object {oid} is damaged on one target, and another target that has it cannot receive all objects, for example for lack of space; remove objects, or replace the damaged target"
            );
            return Err(StoreError::TooFewTargets { there, needed, detail });
        }
        Ok(())
    }

    /// Whether the group cannot go on if the member at a position receives no more objects.
    fn needs(&self, salvaged: &Salvaged<'_>, position: usize) -> bool {
        salvaged.is_in_sync(position) || salvaged.receivers().count() <= self.layout.k
    }

    /// Handles the error `e` of a member that cannot receive or remove an object, because it has no space,
    /// or because what it has stored about the object is damaged.
    ///
    /// # Errors
    /// Unless the member keeps a damaged object that it cannot read.
    async fn cannot_receive(
        &self,
        salvaged: &Salvaged<'_>,
        (position, view): PlacedView<'_>,
        oid: &ObjectId,
        e: StoreError,
    ) -> store::Result<()> {
        let target = view.link.target.uuid();
        let is_needed = self.needs(salvaged, position);
        let is_full = matches!(e, StoreError::NoSpace { .. });
        tracing::warn!(cid = %self.cid, %oid, target_uuid = %target, error = %e, is_needed, "a member cannot receive or remove an object as the other members do");
        if !is_full {
            let read = repeated(async || self.xattrs_on(&view.link, oid).await).await;
            if matches!(read, Err(StoreError::Corrupt { .. })) {
                // Reads find the damage, and use other members.
                return Ok(());
            }
        }
        if !is_needed {
            // The next attempt only reads this member.
            self.receivers.refuses(target);
            return Err(over(salvaged.number));
        }
        if is_full {
            // Other members may have space by the next attempt.
            self.receivers.reconsider_unable();
            return Err(e);
        }
        // Reads would mix the old content of this member with that of the other members.
        Err(view.link.classified(e))
    }

    async fn xattrs_on(&self, link: &MemberLink, oid: &ObjectId) -> store::Result<Vec<(Bytes, Bytes)>> {
        self.calls.answer(link, link.target.store().get_xattrs(&self.cid, oid)).await
    }

    /// Copies the owner's metadata object, which consists of an omap, to the members that lack it. Its xattrs
    /// show only whether the copy is complete.
    ///
    /// # Errors
    /// If a member fails. If no member in sync can read the object, the target of one of them fails, so that
    /// the operator can accept its loss: stale metadata does not fit the newest objects.
    pub(crate) async fn salvage_metadata(&self, salvaged: &Salvaged<'_>) -> store::Result<()> {
        let mut content = HeldContent { xattrs: None, holders: Vec::new() };
        let (mut damage, mut incomplete) = (None, None);
        for &placed in salvaged.in_sync {
            match self.metadata_on(placed).await? {
                MetadataCopy::Complete(xattrs) => {
                    content.xattrs = Some(xattrs);
                    content.holders.push(placed);
                }
                MetadataCopy::Incomplete => incomplete = Some(placed),
                MetadataCopy::Damaged(e) => damage = Some((placed, e)),
                MetadataCopy::Absent => {}
            }
        }
        if damage.is_none() && content.holders.is_empty() {
            // A member counts as in sync if it has the newest record, even if the rebuild was interrupted
            // that should give it the metadata. The metadata of other members may be older.
            for &(position, view) in salvaged.sources.iter().filter(|(at, _)| !salvaged.is_in_sync(*at)) {
                if let MetadataCopy::Complete(xattrs) = self.metadata_on((position, view)).await? {
                    content = HeldContent { xattrs: Some(xattrs), holders: vec![(position, view)] };
                    break;
                }
            }
            let (what, detail) = ("metadata of a group".into(), "no member has a complete copy".into());
            damage = incomplete.map(|placed| (placed, StoreError::Corrupt { what, detail }));
        }
        match damage {
            Some(((_, view), e)) if content.holders.is_empty() => Err(view.link.classified(e)),
            _ => self.copy_content(salvaged, &content, &self.meta).await,
        }
    }

    async fn metadata_on(&self, (position, view): PlacedView<'_>) -> store::Result<MetadataCopy> {
        let read = async || {
            let xattrs = self.xattrs_on(&view.link, &self.meta).await?;
            self.calls.all_entries(&view.link, &self.meta, &Bytes::new(), None).await?;
            Ok(xattrs)
        };
        match repeated(read).await {
            Ok(xattrs) if xattrs.iter().any(|(name, _)| *name == UNFINISHED_XATTR) => {
                Ok(MetadataCopy::Incomplete)
            }
            Ok(xattrs) => Ok(MetadataCopy::Complete(xattrs)),
            Err(StoreError::NoSuchObject(_)) => Ok(MetadataCopy::Absent),
            Err(e) => {
                self.unless_damaged(&[(position, view)], e.clone()).await?;
                Ok(MetadataCopy::Damaged(e))
            }
        }
    }

    /// Returns the error if damage prevents that a member replaces an object. Otherwise, the member then has
    /// an empty copy.
    async fn damage_on(
        &self,
        link: &MemberLink,
        oid: &ObjectId,
        receiver: ReceivingMember,
    ) -> store::Result<Option<StoreError>> {
        let empty = WholeObject { oid, size: 0 };
        match repeated(async || self.empty_fragment(link, empty, true, receiver).await).await {
            Ok(()) | Err(StoreError::NoSuchObject(_) | StoreError::NoSpace { .. }) => Ok(None),
            Err(e @ StoreError::Corrupt { .. }) => Ok(Some(e)),
            Err(e) => Err(e),
        }
    }

    /// Removes an object from a member that may not have it.
    async fn remove_from(
        &self,
        salvaged: &Salvaged<'_>,
        (position, view): PlacedView<'_>,
        oid: &ObjectId,
    ) -> store::Result<()> {
        let removed = repeated(async || {
            let remove = Transaction::new(self.cid.clone()).with(Op::Remove { oid: oid.clone() });
            self.calls.apply_unless_damaged(&view.link, remove.from_reserve()).await
        });
        match removed.await {
            Ok(()) | Err(StoreError::NoSuchObject(_)) => Ok(()),
            Err(e @ StoreError::Corrupt { .. }) => {
                self.cannot_receive(salvaged, (position, view), oid, e).await
            }
            Err(e) => Err(e),
        }
    }
}
