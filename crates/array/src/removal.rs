//! Removes a group's data from targets: all of it, or the data of former members.

use std::rc::Rc;

use bytes::Bytes;
use futures::future::LocalBoxFuture;
use store::{ObjectId, Op, StoreCalls, StoreError, Transaction};

use crate::group::Group;
use crate::intents::Intents;
use crate::interval::Interval;
use crate::member::Member;
use crate::member_link::MemberLink;
use crate::page::page;
use crate::record::{GroupRecord, Standing, key_record, own_object};
use crate::view::MemberView;

/// Number of objects removed per transaction.
const OBJECTS: usize = 64;
/// Number of the group's records read per step.
const NOTES: usize = 1024;

/// Returns the targets that are not members and store data of the group that is no longer needed.
/// If all members are in sync, none of this data is needed. Otherwise, two kinds of data are not
/// needed: the data of an unfinished rebuild, and the data of an interrupted removal (`remains`).
pub(crate) fn leftovers(
    record: &GroupRecord,
    views: &[MemberView],
    members: &[Option<MemberView>],
    remains: &[Rc<dyn Member>],
) -> Vec<Rc<dyn Member>> {
    let is_whole = members.iter().all(Option::is_some);
    let standing = |record: &GroupRecord, target: &Rc<dyn Member>| {
        record.members.iter().find(|m| m.target == target.uuid()).map(|m| m.standing)
    };
    let is_needless = |view: &&MemberView| {
        is_whole || standing(&view.state.record, &view.link.target) == Some(Standing::Blank)
    };
    let needless = views.iter().filter(is_needless).map(|view| &view.link.target);
    needless.chain(remains).filter(|target| standing(record, target).is_none()).cloned().collect()
}

impl Group {
    /// Removes the data of former members, so that the group can never use it again.
    ///
    /// # Errors
    /// If a target cannot remove the data, or the interval ends.
    pub fn remove_leftovers<'a>(&'a self, interval: &'a Interval) -> LocalBoxFuture<'a, store::Result<()>> {
        Box::pin(async move {
            loop {
                let Some(target) = interval.leftovers.borrow().last().cloned() else { return Ok(()) };
                tracing::info!(cid = %self.cid, target_uuid = %target.uuid(), "removing the data of a former member");
                self.wipe_in(interval, &target).await?;
                interval.leftovers.borrow_mut().pop();
            }
        })
    }

    /// Removes everything that a target stores for the group. Stops if the interval ends.
    pub(crate) async fn wipe_in(&self, interval: &Interval, target: &Rc<dyn Member>) -> store::Result<()> {
        loop {
            let link = MemberLink::new(Rc::clone(target));
            match self.wipe_some(&link).await {
                Ok(false) => return Ok(()),
                Ok(true) => self.still(interval)?,
                Err(e) => {
                    if is_of_target(&e) {
                        link.fail(&e);
                    }
                    return Err(e);
                }
            }
        }
    }

    /// Removes everything that the available targets store for the group, including objects. Waits
    /// for requests in progress first. Returns whether all targets were available.
    ///
    /// # Errors
    /// If a target refuses to remove the data, or does not answer. A target that fails causes no
    /// error; it is marked as failed.
    pub fn remove(&self) -> LocalBoxFuture<'_, store::Result<bool>> {
        Box::pin(async move {
            let _closed = self.gate.write().await;
            let _alone = self.intervals.lock().await;
            self.replace_intents(Intents::default());
            self.rebuilds.end();
            if let Some(interval) = self.current() {
                self.end_interval(&interval);
            }
            let mut is_complete = true;
            for target in self.targets.iter() {
                if !target.is_usable() {
                    is_complete = false;
                    continue;
                }
                let link = MemberLink::new(Rc::clone(target));
                match self.wipe(target).await {
                    Err(e) if is_of_target(&e) => {
                        link.still()?;
                        link.fail(&e);
                        is_complete = false;
                    }
                    wiped => wiped?,
                }
            }
            Ok(is_complete)
        })
    }

    /// Removes everything that a target stores for the group.
    pub(crate) async fn wipe(&self, target: &Rc<dyn Member>) -> store::Result<()> {
        while self.wipe_some(&MemberLink::new(Rc::clone(target))).await? {}
        Ok(())
    }

    /// Removes some of the group's objects from a target or, if the target has no more objects of
    /// the group, the collection. Returns true if the target may still store data of the group.
    async fn wipe_some(&self, link: &MemberLink) -> store::Result<bool> {
        match self.calls.answer(link, self.wipe_step(&*link.target)).await {
            Ok(()) | Err(StoreError::NotEmpty(_) | StoreError::NoSuchObject(_)) => Ok(true),
            Err(StoreError::NoSuchCollection(_)) => Ok(false),
            Err(e) => Err(e),
        }
    }

    async fn wipe_step(&self, target: &dyn Member) -> store::Result<()> {
        let (ids, _) = target.store().list(&self.cid, None, OBJECTS).await?;
        let mut transaction = Transaction::new(self.cid.clone());
        let own = own_object();
        let notes = match ids.contains(&own) {
            true => target.store().omap_iterate(&self.cid, &own, Bytes::new(), NOTES).await?.0,
            false => Vec::new(),
        };
        if ids.is_empty() {
            transaction.ops.push(Op::RemoveCollection);
        } else if notes.is_empty() {
            transaction.ops.extend(ids.into_iter().map(|oid: ObjectId| Op::Remove { oid }));
        } else {
            // There may be more records than one transaction can remove. The membership record is
            // removed first, because the other records have no meaning without it.
            let mut keys = [key_record()].into_iter().chain(notes.into_iter().map(|(key, _)| key));
            let keys = page(&mut keys);
            transaction.ops.push(Op::OmapRemove { oid: own, keys });
        }
        target.store().queue_transaction(transaction).await
    }
}

/// Returns true if the error indicates a failure of the target.
fn is_of_target(e: &StoreError) -> bool {
    matches!(e, StoreError::Io(_) | StoreError::Poisoned(_) | StoreError::Absent(_))
}
