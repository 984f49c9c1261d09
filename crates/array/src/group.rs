//! [`Group`]: the state of a group, and which members take part for an object.
//!
//! Other files carry out the group's work. Each piece of state that has rules of its own is an
//! object with operations: [`Calls`], [`Intervals`], [`Intents`], [`Terms`], [`Objects`],
//! [`Stages`], [`Damaged`].

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use base::pool::BufferPool;
use store::{CollectionId, ObjectId};
use tokio::sync::RwLock;
use uuid::Uuid;
use wire::Redundancy;

use crate::calls::Calls;
use crate::coder::Coder;
use crate::coding::CodingDispatcher;
use crate::damaged::Damaged;
use crate::intents::Intents;
use crate::interval::{Interval, Intervals, over};
use crate::layout::StripeLayout;
use crate::member::Member;
use crate::member_link::MemberLink;
use crate::objects::Objects;
use crate::rebuilding::Rebuilding;
use crate::stage::Stages;
use crate::terms::Terms;

/// What a group is made of.
pub struct GroupOptions {
    /// The group's collection.
    pub cid: CollectionId,
    /// Pool and number, by which targets are ranked for the group ([`wire::placement::ranked`]).
    pub place: (u32, u32),
    /// The object of the group's owner in the collection. Its omap has records of all objects, so
    /// it is rebuilt first.
    pub meta: ObjectId,
    /// Whether an object is the owner's own, which transactions change without a lock.
    pub is_internal: fn(&ObjectId) -> bool,
    /// How the group keeps objects.
    pub redundancy: Redundancy,
    /// All targets of the node.
    pub targets: Rc<Vec<Rc<dyn Member>>>,
    /// Memory for parity and staged data.
    pub staging: BufferPool,
    /// After that long the group goes on without a member that has not answered, if it can.
    pub member_timeout: Duration,
    /// So long a call waits for a member that the group cannot do without.
    pub patience: Duration,
    /// Objects noted as dirty at most.
    pub dirty_max: usize,
    /// What takes stripes to the targets.
    pub coding: Rc<CodingDispatcher>,
}

/// See the [module](self) documentation.
pub struct Group {
    pub(crate) cid: CollectionId,
    /// See [`GroupOptions::place`].
    pub(crate) place: (u32, u32),
    /// See [`GroupOptions::meta`].
    pub(crate) meta: ObjectId,
    /// See [`GroupOptions::is_internal`].
    pub(crate) is_internal: fn(&ObjectId) -> bool,
    pub(crate) redundancy: Redundancy,
    pub(crate) layout: StripeLayout,
    pub(crate) coder: Coder,
    pub(crate) coding: Rc<CodingDispatcher>,
    pub(crate) targets: Rc<Vec<Rc<dyn Member>>>,
    pub(crate) calls: Calls,
    pub(crate) intervals: Intervals,
    pub(crate) terms: Terms,
    pub(crate) dirty_max: usize,
    /// The next interval forgets the objects noted as dirty, and calls the members blank that need
    /// the notes.
    pub(crate) drops_notes: Cell<bool>,
    /// Targets on which there was no room for a blank member: others take their places, if there
    /// are some.
    pub(crate) no_room: RefCell<BTreeSet<Uuid>>,
    /// Held for reading by transactions, for writing while members come back.
    pub(crate) gate: RwLock<()>,
    pub(crate) intents: RefCell<Intents>,
    pub(crate) objects: Objects,
    pub(crate) stages: Stages,
    pub(crate) damaged: Damaged,
    pub(crate) rebuilding: RefCell<Option<Rebuilding>>,
    /// The position from which on a member to be rebuilt is looked for.
    pub(crate) rebuild_next: Cell<usize>,
    pub(crate) trim_scheduled: Cell<bool>,
    /// Counts reads of copies.
    pub(crate) copies_read: Cell<usize>,
}

impl Group {
    /// # Errors
    /// [`StoreError::InvalidArgument`](store::StoreError::InvalidArgument) if the redundancy is not
    /// possible.
    pub fn new(options: GroupOptions) -> store::Result<Group> {
        let layout = StripeLayout::new(&options.redundancy);
        let (timeout, patience) = (options.member_timeout, options.patience);
        Ok(Group {
            coder: Coder::new(layout, options.staging)?,
            calls: Calls::new(options.cid.clone(), Rc::clone(&options.targets), layout.k, timeout, patience),
            cid: options.cid,
            place: options.place,
            meta: options.meta,
            is_internal: options.is_internal,
            redundancy: options.redundancy,
            layout,
            coding: options.coding,
            targets: options.targets,
            intervals: Intervals::default(),
            terms: Terms::default(),
            dirty_max: options.dirty_max,
            drops_notes: Cell::new(false),
            no_room: RefCell::default(),
            gate: RwLock::default(),
            intents: RefCell::default(),
            objects: Objects::default(),
            stages: Stages::default(),
            damaged: Damaged::default(),
            rebuilding: RefCell::default(),
            rebuild_next: Cell::new(0),
            trim_scheduled: Cell::new(false),
            copies_read: Cell::new(0),
        })
    }

    /// The options' [`place`](GroupOptions::place).
    pub fn place(&self) -> (u32, u32) {
        self.place
    }

    /// The number of members that the group cannot do without.
    pub fn needed(&self) -> usize {
        self.layout.k
    }

    /// Number of the interval. It changes when a store's incarnation does, when a target fails or
    /// comes back, and when a transaction is left on some members only.
    pub fn number(&self) -> u64 {
        let changes = |target: &Rc<dyn Member>| target.store().incarnation() + target.generation();
        self.targets.iter().map(changes).sum::<u64>() + self.intervals.ended()
    }

    /// The interval that there is.
    pub fn current(&self) -> Option<Rc<Interval>> {
        let number = self.number();
        self.last_interval().filter(|interval| interval.number == number)
    }

    /// The interval that there is, or was.
    pub fn last_interval(&self) -> Option<Rc<Interval>> {
        self.intervals.latest()
    }

    /// Whether the member on a target is in sync.
    pub fn is_in_sync_on(&self, target: &Uuid) -> bool {
        self.current().is_some_and(|s| s.links.iter().flatten().any(|link| link.target.uuid() == *target))
    }

    /// Whether objects are noted as dirty.
    pub fn has_notes(&self) -> bool {
        !self.intents.borrow().dirty().is_empty()
    }

    /// Bytes of the ids of all objects noted as dirty.
    pub fn notes_bytes(&self) -> u64 {
        self.intents.borrow().dirty().iter().map(|oid| oid.as_bytes().len() as u64).sum()
    }

    /// Fails if the interval is over.
    pub(crate) fn still(&self, interval: &Interval) -> store::Result<()> {
        match self.current() {
            Some(current) if current.number == interval.number => Ok(()),
            _ => Err(over(interval.number)),
        }
    }

    /// Ends an interval in which a transaction may be on some members only.
    pub(crate) fn end_interval(&self, interval: &Interval) {
        if self.still(interval).is_ok() {
            self.intervals.end();
        }
    }

    /// The member at a position if it is told of transactions: in sync, or being rebuilt.
    pub(crate) fn takes_part(&self, interval: &Interval, position: usize) -> Option<MemberLink> {
        interval.links[position].clone().or_else(|| self.rebuilt_at(interval, position, |_| true))
    }

    /// The member at a position, if it has the object as it is: in sync, or already rebuilt as far
    /// as that.
    pub(crate) fn live(&self, interval: &Interval, position: usize, oid: &ObjectId) -> Option<MemberLink> {
        interval.links[position].clone().or_else(|| self.rebuilt_at(interval, position, |r| !r.lacks(oid)))
    }

    fn rebuilt_at(
        &self,
        interval: &Interval,
        position: usize,
        which: impl FnOnce(&Rebuilding) -> bool,
    ) -> Option<MemberLink> {
        let rebuilding = self.rebuilding.borrow();
        let one = rebuilding.as_ref();
        let one = one.filter(|r| r.position == position && r.interval == interval.number)?;
        which(one).then(|| one.link.clone())
    }

    /// By position, as [`Group::live`].
    pub(crate) fn live_links(&self, interval: &Interval, oid: &ObjectId) -> Vec<Option<MemberLink>> {
        (0..self.layout.fragments()).map(|position| self.live(interval, position, oid)).collect()
    }
}
