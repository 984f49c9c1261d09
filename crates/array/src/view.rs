//! What a target stores of a group, as far as it matters who counts.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use bytes::Bytes;
use store::{ObjectId, StoreCalls, StoreError, Transaction};

use crate::group::Group;
use crate::member::Member;
use crate::member_link::MemberLink;
use crate::record::{Entry, GroupRecord, Intent, own_object};

/// What a target has of a group.
#[derive(Clone)]
pub(crate) struct View {
    pub(crate) link: MemberLink,
    pub(crate) record: GroupRecord,
    /// Highest term ever heard of.
    pub(crate) heard: u64,
    pub(crate) trimmed: u64,
    pub(crate) intents: BTreeMap<u64, Intent>,
    pub(crate) dirty: BTreeSet<ObjectId>,
}

/// What a target has of a group.
pub(crate) enum Found {
    Nothing,
    /// Objects without a group record: an interrupted removal.
    Remains,
    View(View),
}

/// What the targets have of a group.
#[derive(Default)]
pub(crate) struct Views {
    pub(crate) views: Vec<View>,
    /// Targets with objects but without a group record.
    pub(crate) remains: Vec<Rc<dyn Member>>,
}

impl Views {
    pub(crate) fn add(&mut self, target: Rc<dyn Member>, found: Found) {
        match found {
            Found::Nothing => {}
            Found::Remains => self.remains.push(target),
            Found::View(view) => self.views.push(view),
        }
    }
}

impl View {
    /// Whether a transaction is there, or was and is settled.
    pub(crate) fn has(&self, number: u64) -> bool {
        number <= self.trimmed || self.intents.contains_key(&number)
    }
}

impl Group {
    /// What a target has of the group.
    pub(crate) async fn look(&self, target: Rc<dyn Member>) -> (Rc<dyn Member>, store::Result<Found>) {
        let link = MemberLink::new(Rc::clone(&target));
        let found = match self.view(&link).await {
            Ok(view) => Ok(Found::View(view)),
            Err(StoreError::NoSuchCollection(_)) => Ok(Found::Nothing),
            Err(StoreError::NoSuchObject(_)) => Ok(Found::Remains),
            Err(e) => Err(link.classified(e)),
        };
        (target, found)
    }

    async fn view(&self, link: &MemberLink) -> store::Result<View> {
        let store = &link.target.store();
        // Whatever earlier intervals have left queued has an outcome after this.
        let settle = store.queue_transaction_in(link.incarnation, Transaction::new(self.cid.clone()));
        self.calls.answer(link, settle).await?;
        let (mut record, mut trimmed, mut heard) = (None, 0, 0);
        let (mut intents, mut dirty) = (BTreeMap::new(), BTreeSet::new());
        for (key, value) in self.calls.all_entries(link, &own_object(), &Bytes::new(), None).await? {
            match Entry::decode(&key, &value)? {
                Entry::Record(found) => {
                    heard = heard.max(found.term);
                    record = Some(found);
                }
                Entry::Proposal(found) => heard = heard.max(found.term),
                Entry::Trimmed(through) => trimmed = through,
                Entry::Intent(number, intent) => drop(intents.insert(number, intent)),
                Entry::Dirty(oid) => {
                    dirty.insert(oid);
                }
            }
        }
        let record = record.ok_or_else(|| StoreError::NoSuchObject(own_object().to_string()))?;
        Ok(View { link: link.clone(), record, heard, trimmed, intents, dirty })
    }
}
