//! Reads what a target stores about a group, to decide which members are in sync.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use bytes::Bytes;
use store::{ObjectId, StoreCalls, StoreError, Transaction};

use crate::decision::MemberState;
use crate::group::Group;
use crate::member::Member;
use crate::member_link::MemberLink;
use crate::record::{ChangeId, GroupEntry, GroupRecord, IntentPlace, StoredIntent, own_object};

/// The records that one target stores about a group.
#[derive(Clone)]
pub(crate) struct MemberView {
    pub(crate) link: MemberLink,
    pub(crate) state: MemberState,
    /// The intents of changes that the member does not know to be settled.
    pub(crate) intents: BTreeMap<ChangeId, StoredIntent>,
    /// All other intents.
    settled: Vec<StoredIntent>,
    pub(crate) dirty: BTreeSet<ObjectId>,
}

/// The entries in which a target stores records about a group, decoded.
#[derive(Default)]
pub(crate) struct StoredRecords {
    pub(crate) record: Option<GroupRecord>,
    pub(crate) proposal: Option<GroupRecord>,
    /// A change up to which all changes are settled.
    pub(crate) settled: ChangeId,
    /// The intents of later changes.
    pub(crate) intents: BTreeMap<ChangeId, StoredIntent>,
    /// The intents of settled changes.
    pub(crate) settled_intents: Vec<StoredIntent>,
    pub(crate) dirty: BTreeSet<ObjectId>,
}

impl StoredRecords {
    /// Decodes omap entries.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`] if an entry is invalid.
    pub(crate) fn decode(entries: &[(Bytes, Bytes)]) -> store::Result<StoredRecords> {
        let mut found = StoredRecords::default();
        for (key, value) in entries {
            match GroupEntry::decode(key, value)? {
                GroupEntry::Record(record) => found.record = Some(record),
                GroupEntry::Proposal(proposal) => found.proposal = Some(proposal),
                GroupEntry::Settled(through) => found.settled = found.settled.max(through),
                GroupEntry::Intent(intent) => {
                    found.settled = found.settled.max(intent.settled);
                    found.intents.insert(intent.change, intent);
                }
                GroupEntry::Dirty(oid) => drop(found.dirty.insert(oid)),
            }
        }
        let mut later = found.intents.split_off(&found.settled);
        let last_settled = later.remove(&found.settled);
        let settled = std::mem::replace(&mut found.intents, later);
        found.settled_intents = settled.into_values().chain(last_settled).collect();
        Ok(found)
    }

    /// The last change that the member certainly has.
    pub(crate) fn last(&self) -> ChangeId {
        self.intents.last_key_value().map_or(self.settled, |(last, _)| *last)
    }
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

    /// All intents that the target stores.
    pub(crate) fn stored_intents(&self) -> impl Iterator<Item = &StoredIntent> {
        self.settled.iter().chain(self.intents.values())
    }

    /// The intent in a place.
    pub(crate) fn in_place(&self, place: IntentPlace) -> Option<&StoredIntent> {
        self.stored_intents().find(|intent| intent.place == place)
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
        let entries = self.calls.all_entries(link, &own_object(), &Bytes::new(), None).await?;
        let StoredRecords { record, proposal, settled, intents, settled_intents, dirty } =
            StoredRecords::decode(&entries)?;
        let record = record.ok_or_else(|| StoreError::NoSuchObject(own_object().to_string()))?;
        let (target, changes) = (link.target.uuid(), intents.keys().copied().collect());
        let state = MemberState { target, record, proposal, settled, changes };
        Ok(MemberView { link: link.clone(), state, intents, settled: settled_intents, dirty })
    }
}
