//! Reads what a target stores about a group, to decide which members are in sync.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use bytes::Bytes;
use store::{ObjectId, StoreCalls, StoreError, Transaction};

use crate::group::Group;
use crate::member::Member;
use crate::member_link::MemberLink;
use crate::record::{GroupEntry, GroupRecord, Intent, own_object};

/// The records that one target stores about a group.
#[derive(Clone)]
pub(crate) struct MemberView {
    pub(crate) link: MemberLink,
    pub(crate) record: GroupRecord,
    /// The highest term of the target's membership record and proposal.
    pub(crate) heard: u64,
    pub(crate) trimmed: u64,
    pub(crate) intents: BTreeMap<u64, Intent>,
    pub(crate) dirty: BTreeSet<ObjectId>,
}

/// Result of looking for a group on a target.
pub(crate) enum MemberFinding {
    Nothing,
    /// Objects without a membership record, left by an interrupted removal.
    Remains,
    View(MemberView),
}

/// Results of looking for a group on all targets.
#[derive(Default)]
pub(crate) struct Views {
    pub(crate) views: Vec<MemberView>,
    /// Targets that have objects of the group but no membership record.
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
    /// Returns true if the target has committed the transaction. All transactions up to `trimmed`
    /// count as committed.
    pub(crate) fn has(&self, number: u64) -> bool {
        number <= self.finished() || self.intents.contains_key(&number)
    }

    /// All members have the transactions up to this number.
    pub(crate) fn finished(&self) -> u64 {
        if base::mutant!(RollBackAcknowledged) { 0 } else { self.trimmed }
    }
}

impl Group {
    /// Reads what a target stores about the group.
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
        // After this empty transaction, every transaction queued in earlier intervals has an
        // outcome.
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
