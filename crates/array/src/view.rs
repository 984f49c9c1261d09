//! What a target stores of a group, as far as it matters who counts.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use bytes::Bytes;
use store::{ObjectId, StoreCalls, StoreError, Transaction};

use crate::group::Group;
use crate::member::Member;
use crate::member_link::MemberLink;
use crate::record::{GroupEntry, GroupRecord, Intent, own_object};

/// What a target has of a group.
#[derive(Clone)]
pub(crate) struct MemberView {
    pub(crate) link: MemberLink,
    pub(crate) record: GroupRecord,
    /// Highest term ever heard of.
    pub(crate) heard: u64,
    pub(crate) trimmed: u64,
    pub(crate) intents: BTreeMap<u64, Intent>,
    pub(crate) dirty: BTreeSet<ObjectId>,
}

/// What a target has of a group.
pub(crate) enum MemberFinding {
    Nothing,
    /// Objects without a group record: an interrupted removal.
    Remains,
    View(MemberView),
}

/// What the targets have of a group.
#[derive(Default)]
pub(crate) struct Views {
    pub(crate) views: Vec<MemberView>,
    /// Targets with objects but without a group record.
    pub(crate) remains: Vec<Rc<dyn Member>>,
}

impl Views {
    pub(crate) fn add(&mut self, target: Rc<dyn Member>, found: MemberFinding) {
        match found {
            MemberFinding::Nothing => {}
            MemberFinding::Remains => self.remains.push(target),
            MemberFinding::View(view) => self.views.push(view),
        }
    }
}

impl MemberView {
    /// Whether a transaction is there, or was and is settled.
    pub(crate) fn has(&self, number: u64) -> bool {
        number <= self.trimmed || self.intents.contains_key(&number)
    }
}

impl Group {
    /// What a target has of the group.
    pub(crate) async fn look(
        &self,
        target: Rc<dyn Member>,
    ) -> (Rc<dyn Member>, store::Result<MemberFinding>) {
        let link = MemberLink::new(Rc::clone(&target));
        let found = match self.view(&link).await {
            Ok(view) => Ok(MemberFinding::View(view)),
            Err(StoreError::NoSuchCollection(_)) => Ok(MemberFinding::Nothing),
            Err(StoreError::NoSuchObject(_)) => Ok(MemberFinding::Remains),
            Err(e) => Err(link.classified(e)),
        };
        (target, found)
    }

    async fn view(&self, link: &MemberLink) -> store::Result<MemberView> {
        let store = &link.target.store();
        // Whatever earlier intervals have left queued has an outcome after this.
        let settle = store.queue_transaction_in(link.incarnation, Transaction::new(self.cid.clone()));
        self.calls.answer(link, settle).await?;
        let (mut record, mut trimmed, mut heard) = (None, 0, 0);
        let (mut intents, mut dirty) = (BTreeMap::new(), BTreeSet::new());
        for (key, value) in self.calls.all_entries(link, &own_object(), &Bytes::new(), None).await? {
            match GroupEntry::decode(&key, &value)? {
                GroupEntry::Record(found) => {
                    heard = heard.max(found.term);
                    record = Some(found);
                }
                GroupEntry::Proposal(found) => heard = heard.max(found.term),
                GroupEntry::Trimmed(through) => trimmed = through,
                GroupEntry::Intent(number, intent) => drop(intents.insert(number, intent)),
                GroupEntry::Dirty(oid) => {
                    dirty.insert(oid);
                }
            }
        }
        let record = record.ok_or_else(|| StoreError::NoSuchObject(own_object().to_string()))?;
        Ok(MemberView { link: link.clone(), record, heard, trimmed, intents, dirty })
    }
}
