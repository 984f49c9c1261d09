//! Metadata queries that any member can answer: an object's size and metadata, and the list of
//! objects.

use std::rc::Rc;

use bytes::Bytes;
use store::{ObjectId, StoreCalls, StoreError};

use crate::group::Group;
use crate::interval::Interval;
use crate::member::Member;
use crate::member_link::MemberLink;
use crate::objects::{ObjectPlace, Rows};
use crate::record::{SIZE_XATTR, Standing, is_own, own_object};

impl Group {
    /// Asks any member a question about an object's metadata, in the interval with the given
    /// number.
    pub(crate) async fn ask_in<T>(
        &self,
        number: u64,
        oid: &ObjectId,
        question: impl AsyncFn(&MemberLink) -> store::Result<T>,
    ) -> store::Result<T> {
        let interval = self.interval(number).await?;
        // The query sees the transactions on the object that were submitted before it, and no
        // others.
        let _held = self.objects.read(oid, Rows::All).await;
        self.ask(&interval, oid, question).await
    }

    /// Asks any member a question about an object. If the member answers that the object does not
    /// exist, a second member must confirm this answer: the first member may have lost the object.
    pub(crate) async fn ask<T>(
        &self,
        interval: &Interval,
        oid: &ObjectId,
        question: impl AsyncFn(&MemberLink) -> store::Result<T>,
    ) -> store::Result<T> {
        let mut links = self.live_links(interval, oid);
        let asked = self.ask_one_of(&links, oid, &question).await;
        let asked = match asked {
            Err(e @ StoreError::TooFewTargets { .. }) => Err(self.unless_awaited(interval, oid, false, e)),
            asked => asked,
        };
        let first = links.iter().position(Option::is_some);
        let (Err(StoreError::NoSuchObject(_)), Some(first)) = (&asked, first) else { return asked };
        links[first] = None;
        match self.ask_one_of(&links, oid, &question).await {
            Err(StoreError::TooFewTargets { .. } | StoreError::NoSuchObject(_)) => asked,
            Err(e) if !matches!(e, StoreError::NoSuchXattr(_)) => Err(e),
            found => {
                tracing::warn!(%oid, position = first, "a member has lost an object that another member still has");
                self.damaged.add(oid, first);
                found
            }
        }
    }

    /// Asks the members one after another, until one of them can read the requested data.
    pub(crate) async fn ask_one_of<T>(
        &self,
        links: &[Option<MemberLink>],
        oid: &ObjectId,
        question: impl AsyncFn(&MemberLink) -> store::Result<T>,
    ) -> store::Result<T> {
        let (mut failures, mut unreadable) = (Vec::new(), Vec::new());
        for link in links.iter().flatten() {
            match self.calls.answer(link, question(link)).await {
                Err(e @ (StoreError::Io(_) | StoreError::Corrupt { .. })) => {
                    tracing::warn!(%oid, target_uuid = %link.target.uuid(), error = %e, "a member cannot read its data; asking the next member");
                    failures.push(e.to_string());
                    if matches!(e, StoreError::Io(_)) {
                        unreadable.push(link.clone());
                    }
                }
                outcome => return link.still().and(outcome).map_err(|e| link.classified_read(e)),
            }
        }
        let e = StoreError::TooFewTargets { there: 0, needed: 1, detail: failures.join("; ") };
        // If only one member cannot read its data, the caller may still ask other members.
        if unreadable.len() < 2 {
            return Err(e);
        }
        Err(self.unless_failing(&unreadable, e).await)
    }

    /// Returns the size that an object has once all queued changes have committed, or `None` if the
    /// object does not exist then. Asks the members if the size is not cached.
    pub(crate) async fn size(
        &self,
        interval: &Interval,
        oid: &ObjectId,
        place: &ObjectPlace,
    ) -> store::Result<Option<u64>> {
        if let Some(size) = place.size(interval) {
            return Ok(size);
        }
        let asked = async |link: &MemberLink| link.target.store().get_xattr(&self.cid, oid, SIZE_XATTR).await;
        let size = size_of(oid, self.ask(interval, oid, asked).await)?;
        place.set_size(interval, size);
        Ok(size)
    }

    /// Returns an object's size from the first given member that has the object. Replaces the
    /// entries of `members` before that member with `None`. A member may have lost the object, so
    /// its answer alone does not prove that the object was removed. If all members lack the object,
    /// it was removed.
    pub(crate) async fn size_by_any(
        &self,
        members: &mut [Option<MemberLink>],
        oid: &ObjectId,
    ) -> store::Result<Option<u64>> {
        let mut asked = Err(StoreError::TooFewTargets {
            there: 0,
            needed: 1,
            detail: "no member is available; bring missing targets back".into(),
        });
        for member in members {
            let Some(link) = member else { continue };
            let asked_for = link.target.store().get_xattr(&self.cid, oid, SIZE_XATTR);
            let found = size_of(oid, self.calls.answer(link, asked_for).await);
            link.still()?;
            match found {
                Ok(None) => asked = Ok(None),
                Err(e @ (StoreError::Io(_) | StoreError::Corrupt { .. })) => asked = asked.or(Err(e)),
                outcome => return outcome.map_err(|e| link.classified_read(e)),
            }
            *member = None;
        }
        asked
    }

    /// Lists up to `limit` object ids from `from` on, without the array's own objects. The returned
    /// flag is true if more objects may follow.
    pub(crate) async fn list_in(
        &self,
        interval: &Interval,
        from: Option<ObjectId>,
        limit: usize,
    ) -> store::Result<(Vec<ObjectId>, bool)> {
        self.list_of(&interval.links, from, limit).await
    }

    /// Lists object ids like [`Group::list_in`], from any of the given members.
    pub(crate) async fn list_of(
        &self,
        links: &[Option<MemberLink>],
        from: Option<ObjectId>,
        limit: usize,
    ) -> store::Result<(Vec<ObjectId>, bool)> {
        let mut from = from;
        loop {
            let question =
                async |link: &MemberLink| link.target.store().list(&self.cid, from.clone(), limit).await;
            let (mut ids, more) = self.ask_one_of(links, &own_object(), question).await?;
            let last = ids.last().cloned();
            ids.retain(|oid| !is_own(oid));
            match last {
                Some(last) if ids.is_empty() && more => from = Some(after(&last)?),
                _ => return Ok((ids, more)),
            }
        }
    }

    /// Chooses the error to report if too few fragments are readable. If one of the targets
    /// `unreadable` fails a probe but may recover, returns a temporary error. Otherwise returns
    /// `e`.
    pub(crate) async fn unless_failing(&self, unreadable: &[MemberLink], e: StoreError) -> StoreError {
        for link in unreadable {
            let fails = tokio::time::timeout(self.calls.member_timeout, link.target.fails());
            if fails.await.unwrap_or(true) && link.target.is_hopeful() {
                return StoreError::Disconnected(format!(
                    "{e}; target {} failed a probe",
                    link.target.uuid()
                ));
            }
        }
        e
    }

    /// Chooses the error to report if too few fragments of an object are readable. Returns a
    /// temporary error if a member that is about to be rebuilt may make the object readable: a stale
    /// member may have the current fragment of an object that has not changed since, and if drives
    /// have reported I/O errors (`may_recover`), the rebuild of any member may find them working
    /// again. Asks for the target of a stale member if the target is missing. Otherwise, or if the
    /// last rebuild of that member has failed, returns `e`.
    pub(crate) fn unless_awaited(
        &self,
        interval: &Interval,
        oid: &ObjectId,
        may_recover: bool,
        e: StoreError,
    ) -> StoreError {
        let standing = |position: usize| interval.record.members[position].standing;
        let behind = (0..interval.record.members.len()).filter(|&position| {
            standing(position) != Standing::InSync && self.takes_part(interval, position).is_none()
        });
        let awaited: Vec<(Standing, &Rc<dyn Member>)> = behind
            .filter_map(|position| {
                let target = self.targets.iter().find(|t| t.uuid() == interval.target(position))?;
                Some((standing(position), target))
            })
            .filter(|(_, t)| !t.is_out() && !self.receivers.has_failed(&t.uuid()))
            .collect();
        let has_changed = self.intents.borrow().dirty().oids().contains(oid);
        let may_have_it = |standing: &Standing| matches!(standing, Standing::Stale { .. }) && !has_changed;
        let helps = |standing: &Standing| may_recover || may_have_it(standing);
        let soon = awaited.iter().find(|(s, t)| helps(s) && (t.is_usable() || t.is_hopeful()));
        if let Some((_, target)) = soon {
            return StoreError::Disconnected(format!("{e}; target {} is not in sync yet", target.uuid()));
        }
        let Some((_, missing)) = awaited.iter().find(|(standing, _)| may_have_it(standing)) else { return e };
        StoreError::TooFewTargets {
            there: interval.links.iter().flatten().count(),
            needed: interval.links.iter().flatten().count() + 1,
            detail: format!("{e}; target {} may have another; bring it back", missing.uuid()),
        }
    }
}

/// Returns true if the error means that stored data is unreadable or missing. Other errors mean that
/// the store could not answer.
pub(crate) fn is_damage(e: &StoreError) -> bool {
    is_unreadable(e) || matches!(e, StoreError::NoSuchObject(_))
}

/// Returns true if the error means that stored data cannot be read.
pub(crate) fn is_unreadable(e: &StoreError) -> bool {
    matches!(e, StoreError::Corrupt { .. } | StoreError::Io(_))
}

/// Decodes an object's size from a member's answer.
fn size_of(oid: &ObjectId, found: store::Result<Bytes>) -> store::Result<Option<u64>> {
    match found {
        Ok(bytes) => match bytes[..].try_into() {
            Ok(size) => Ok(Some(u64::from_be_bytes(size))),
            Err(_) => {
                let detail = "the xattr that stores the object's size is not 8 bytes long".into();
                Err(StoreError::Corrupt { what: format!("object {oid}"), detail })
            }
        },
        Err(StoreError::NoSuchObject(_)) => Ok(None),
        // The object was created by a change of its omap alone, so it has no xattr with a size.
        Err(StoreError::NoSuchXattr(_)) => Ok(Some(0)),
        Err(e) => Err(e),
    }
}

/// Returns the lowest id that is greater than `oid`.
pub(crate) fn after(oid: &ObjectId) -> store::Result<ObjectId> {
    ObjectId::new([oid.as_bytes(), &b"\0"[..]].concat())
}
