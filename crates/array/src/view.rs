//! Reads what a target stores about a group, to decide which members are in sync.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use bytes::Bytes;
use store::{ObjectId, StoreCalls, StoreError, Transaction};

use crate::decision::MemberState;
use crate::group::Group;
use crate::member::Member;
use crate::member_link::MemberLink;
use crate::record::{ChangeId, GroupEntry, Intent, own_object};

/// The records that one target stores about a group.
#[derive(Clone)]
pub(crate) struct MemberView {
    pub(crate) link: MemberLink,
    pub(crate) state: MemberState,
    pub(crate) intents: BTreeMap<ChangeId, Intent>,
    pub(crate) dirty: BTreeSet<ObjectId>,
}

/// Result of looking for a group on a target.
pub(crate) enum MemberFinding {
    Nothing,
    /// Objects without a membership record, left by an interrupted removal.
    Remains,
    View(Box<MemberView>),
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
            MemberFinding::View(view) => self.views.push(*view),
        }
    }
}

impl MemberView {
    /// The highest term of the target's record and proposal.
    pub(crate) fn heard(&self) -> u64 {
        self.state.heard()
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
            Ok(view) => Ok(MemberFinding::View(Box::new(view))),
            Err(StoreError::NoSuchCollection(_)) => Ok(MemberFinding::Nothing),
            Err(StoreError::NoSuchObject(_)) => Ok(MemberFinding::Remains),
            Err(e) => Err(link.classified(e)),
        };
        (target, found)
    }

    /// Reads what a member stores about the group.
    pub(crate) async fn view(&self, link: &MemberLink) -> store::Result<MemberView> {
        let store = &link.target.store();
        // After this empty transaction, every transaction queued in earlier intervals has an
        // outcome.
        let settle = store.queue_transaction_in(link.incarnation, Transaction::new(self.cid.clone()));
        self.calls.answer(link, settle).await?;
        let (mut record, mut proposal, mut trimmed) = (None, None, ChangeId::default());
        let (mut intents, mut dirty) = (BTreeMap::new(), BTreeSet::new());
        for (key, value) in self.calls.all_entries(link, &own_object(), &Bytes::new(), None).await? {
            match GroupEntry::decode(&key, &value)? {
                GroupEntry::Record(found) => record = Some(found),
                GroupEntry::Proposal(found) => proposal = Some(found),
                GroupEntry::Trimmed(through) => trimmed = through,
                GroupEntry::Intent(change, intent) => drop(intents.insert(change, intent)),
                GroupEntry::Dirty(oid) => {
                    dirty.insert(oid);
                }
            }
        }
        let record = record.ok_or_else(|| StoreError::NoSuchObject(own_object().to_string()))?;
        let (target, changes) = (link.target.uuid(), intents.keys().copied().collect());
        let state = MemberState { target, record, proposal, trimmed, changes };
        Ok(MemberView { link: link.clone(), state, intents, dirty })
    }
}
