//! Creates a group on the targets of a node.

use std::collections::BTreeSet;
use std::rc::Rc;

use futures::future::{LocalBoxFuture, try_join_all};
use store::{Op, StoreCalls, StoreError, Transaction};

use crate::group::Group;
use crate::member::Member;
use crate::member_link::MemberLink;
use crate::record::{GroupRecord, MemberRecord, Standing, key_record, own_object};

impl Group {
    /// Creates the group on the node's targets. `ranked` contains indices of targets, in the order
    /// of preference. The first usable targets in this order become the members.
    ///
    /// # Errors
    /// [`StoreError::TooFewTargets`] if there are too few usable targets.
    pub fn create<'a>(&'a self, ranked: &'a [usize]) -> LocalBoxFuture<'a, store::Result<()>> {
        Box::pin(async move {
            let usable = ranked.iter().map(|&i| &self.targets[i]).filter(|t| t.is_usable());
            let needed = self.layout.fragments();
            let chosen: Vec<&Rc<dyn Member>> = usable.take(needed).collect();
            if chosen.len() < needed {
                let detail = format!(
                    "{} needs this number of targets, and the node has no other usable targets; bring missing targets back",
                    self.redundancy
                );
                let e = StoreError::TooFewTargets { there: chosen.len(), needed, detail };
                return Err(self.calls.unless_hopeful(e));
            }
            let members = chosen
                .iter()
                .map(|t| MemberRecord { target: t.uuid(), standing: Standing::InSync })
                .collect();
            let record = GroupRecord { term: 1, members, undone: BTreeSet::new() };
            self.calls.set_in_sync(chosen.iter().map(|target| Rc::clone(target)).collect());
            let create = |target: &&Rc<dyn Member>| {
                let (target, record) = (Rc::clone(target), &record);
                async move {
                    // A failed attempt to create a pool may have left objects behind.
                    self.wipe(&target).await?;
                    self.create_on(&target, record).await
                }
            };
            try_join_all(chosen.iter().map(create)).await?;
            // No interval has begun yet, so no member can have accepted changes without the other
            // members.
            self.terms.testify(&record).await?;
            Ok(())
        })
    }

    /// Creates the collection and the membership record on one target.
    pub(crate) async fn create_on(&self, target: &Rc<dyn Member>, record: &GroupRecord) -> store::Result<()> {
        let link = MemberLink::new(Rc::clone(target));
        self.create_collection(&link).await?;
        let entries = vec![(key_record(), record.encode())];
        let write = Transaction::new(self.cid.clone()).with(Op::OmapSet { oid: own_object(), entries });
        self.calls.answer(&link, target.store().queue_transaction(write.from_reserve())).await
    }

    /// Creates the collection on one target, unless the target has it.
    pub(crate) async fn create_collection(&self, link: &MemberLink) -> store::Result<()> {
        let create = Transaction::new(self.cid.clone()).with(Op::CreateCollection).from_reserve();
        match self.calls.answer(link, link.target.store().queue_transaction(create)).await {
            Ok(()) | Err(StoreError::Exists(_)) => Ok(()),
            Err(e) => Err(e),
        }
    }
}
