//! [`Group`]: the state of a placement group, and which members take part in requests on an object.
//!
//! Other modules implement the operations of the group. State that follows rules of its own has its
//! own type: [`Calls`], [`Intervals`], [`Intents`], [`Terms`], [`Objects`], [`Stages`],
//! [`Damaged`], [`Receivers`], [`RebuildInProgress`], [`Obstacle`].

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use base::clock::WallClock;
use base::pool::BufferPool;
use bytes::Bytes;
use store::{CollectionId, ObjectId};
use tokio::sync::{Notify, RwLock};
use uuid::Uuid;
use wire::Redundancy;

use crate::calls::Calls;
use crate::coder::Coder;
use crate::coding::CodingDispatcher;
use crate::damaged::Damaged;
use crate::damaged_changes::DamagedChanges;
use crate::intents::Intents;
use crate::interval::{Interval, Intervals, over};
use crate::layout::StripeLayout;
use crate::member::Member;
use crate::member_link::MemberLink;
use crate::objects::Objects;
use crate::obstacle::Obstacle;
use crate::read::CopyTurns;
use crate::rebuilding::RebuildInProgress;
use crate::receivers::Receivers;
use crate::stage::Stages;
use crate::task::TaskFlag;
use crate::terms::Terms;
use crate::witness::Witness;
use crate::word::OperatorsWord;

/// Options of a new [`Group`].
pub struct GroupOptions {
    /// The group's collection.
    pub cid: CollectionId,
    /// Pool id and group number, which determine the ranking of targets
    /// ([`wire::placement::ranked`]).
    pub place: (u32, u32),
    /// The object in which the array's owner (the osd) keeps metadata about this group. Its omap
    /// has records about all objects, so a rebuild copies it first.
    pub meta: ObjectId,
    /// Returns true if an object is one of the metadata objects of the array's owner. Transactions
    /// change these objects without a lock.
    pub is_internal: fn(&ObjectId) -> bool,
    /// Name of the xattr that the owner sets with each change of an object, to a value that it
    /// never uses again. A guard on this xattr shows that a transaction was computed from the
    /// object's latest state.
    pub state_xattr: Bytes,
    /// Redundancy scheme of the group.
    pub redundancy: Redundancy,
    /// All targets of the node.
    pub targets: Rc<Vec<Rc<dyn Member>>>,
    /// Memory for parity and staged data.
    pub staging: BufferPool,
    /// Time after which the group continues without a member that has not answered a call, if the
    /// other members suffice.
    pub member_timeout: Duration,
    /// Timeout of a call on a member without which the group cannot continue.
    pub patience: Duration,
    /// Maximum number of objects with dirty notes. If more objects have dirty notes, stale members
    /// become blank.
    pub dirty_max: usize,
    /// Computes parity and writes stripes to the targets.
    pub coding: Rc<CodingDispatcher>,
    /// Time of day, which orders the decisions of operators to accept the loss of members.
    pub clock: WallClock,
    /// Knows the group's last term.
    pub witness: Rc<dyn Witness>,
    /// Returns true if an operator has accepted the loss of a target.
    pub is_forgotten: Rc<dyn Fn(&Uuid) -> bool>,
    /// Returns true if a target has left the node.
    pub has_left: Rc<dyn Fn(&Uuid) -> bool>,
}

/// The state of a placement group with redundancy: its members and what is known about each.
///
/// Whenever the owner changes the data of an object, it also changes an xattr of the object, and never
/// to an earlier value. Salvage (`salvage.rs`) recognises the same content by that.
pub struct Group {
    pub(crate) cid: CollectionId,
    /// See [`GroupOptions::place`].
    pub(crate) place: (u32, u32),
    /// See [`GroupOptions::meta`].
    pub(crate) meta: ObjectId,
    /// See [`GroupOptions::is_internal`].
    pub(crate) is_internal: fn(&ObjectId) -> bool,
    /// See [`GroupOptions::state_xattr`].
    pub(crate) state_xattr: Bytes,
    pub(crate) redundancy: Redundancy,
    pub(crate) layout: StripeLayout,
    pub(crate) coder: Coder,
    pub(crate) coding: Rc<CodingDispatcher>,
    pub(crate) targets: Rc<Vec<Rc<dyn Member>>>,
    pub(crate) calls: Calls,
    pub(crate) intervals: Intervals,
    pub(crate) terms: Terms,
    pub(crate) word: OperatorsWord,
    pub(crate) dirty_max: usize,
    pub(crate) receivers: Receivers,
    /// Each transaction holds this lock for reading while it runs. The group holds the lock for
    /// writing during steps that must not overlap transactions, for example the admission of a
    /// member.
    pub(crate) gate: RwLock<()>,
    /// Each copy of an object to a member holds this lock for reading. A salvage holds it for writing,
    /// because copies of the last interval may still be in progress.
    pub(crate) copies: RwLock<()>,
    pub(crate) intents: RefCell<Intents>,
    /// Notified when a change ends, and when the intents are replaced.
    pub(crate) change_ended: Notify,
    pub(crate) objects: Objects,
    pub(crate) stages: Stages,
    pub(crate) damaged: Damaged,
    pub(crate) damaged_changes: DamagedChanges,
    pub(crate) rebuilds: RebuildInProgress,
    pub(crate) obstacle: Obstacle,
    /// The task that trims the slots when the group is idle.
    pub(crate) idle_trim: TaskFlag,
    pub(crate) copy_turns: CopyTurns,
}

impl Group {
    /// Creates the state of a group. The group has no open interval yet.
    ///
    /// # Errors
    /// [`StoreError::InvalidArgument`](store::StoreError::InvalidArgument) if the redundancy scheme
    /// is invalid.
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
            state_xattr: options.state_xattr,
            redundancy: options.redundancy,
            layout,
            coding: options.coding,
            targets: options.targets,
            intervals: Intervals::default(),
            word: OperatorsWord::new(options.is_forgotten, options.has_left),
            terms: Terms::new(options.clock, options.witness, options.place),
            dirty_max: options.dirty_max,
            receivers: Receivers::default(),
            gate: RwLock::default(),
            copies: RwLock::default(),
            intents: RefCell::default(),
            change_ended: Notify::default(),
            objects: Objects::default(),
            stages: Stages::default(),
            damaged: Damaged::default(),
            damaged_changes: DamagedChanges::default(),
            rebuilds: RebuildInProgress::default(),
            obstacle: Obstacle::default(),
            idle_trim: TaskFlag::default(),
            copy_turns: CopyTurns::default(),
        })
    }

    /// Pool id and group number (see [`GroupOptions::place`]).
    pub fn place(&self) -> (u32, u32) {
        self.place
    }

    /// Minimum number of members with which the group can continue.
    pub fn needed(&self) -> usize {
        self.layout.k
    }

    /// Lets a group without an open interval act on the operator's word that targets are lost, until
    /// its next interval opens. A new group also does so until its first interval opens.
    pub fn heed_word(&self) {
        if self.current().is_none() {
            self.word.heed(true);
        }
    }

    /// Number of the current interval. The number changes when the incarnation of a store changes,
    /// when a target fails or returns, and when the group itself ends the interval. For example,
    /// the group ends the interval if only some members may have committed a transaction.
    pub fn number(&self) -> u64 {
        let changes = |target: &Rc<dyn Member>| target.store().incarnation() + target.generation();
        self.targets.iter().map(changes).sum::<u64>() + self.intervals.ended()
    }

    /// The current interval, if one is open.
    pub fn current(&self) -> Option<Rc<Interval>> {
        let number = self.number();
        self.last_interval().filter(|interval| interval.number == number)
    }

    /// The newest interval, which may have ended.
    pub fn last_interval(&self) -> Option<Rc<Interval>> {
        self.intervals.latest()
    }

    /// Returns true if the group has a current interval, and a target is one of its members in
    /// sync.
    pub fn is_in_sync_on(&self, target: &Uuid) -> bool {
        self.current().is_some_and(|s| s.links.iter().flatten().any(|link| link.target.uuid() == *target))
    }

    /// Returns true if the group has any dirty note, because an object changed while a member was
    /// unavailable.
    pub fn has_notes(&self) -> bool {
        !self.intents.borrow().dirty().oids().is_empty()
    }

    /// Total length in bytes of the ids of all objects with dirty notes.
    pub fn notes_bytes(&self) -> u64 {
        self.intents.borrow().dirty().bytes()
    }

    /// Fails if the interval has ended.
    pub(crate) fn still(&self, interval: &Interval) -> store::Result<()> {
        match self.current() {
            Some(current) if current.number == interval.number => Ok(()),
            _ => Err(over(interval.number)),
        }
    }

    /// Ends an interval, if it is still the current one. The next request opens a new interval.
    pub(crate) fn end_interval(&self, interval: &Interval) {
        if self.still(interval).is_ok() {
            self.intervals.end();
        }
    }

    /// Returns the member at a position if it receives transactions: it is in sync or being
    /// rebuilt.
    pub(crate) fn takes_part(&self, interval: &Interval, position: usize) -> Option<MemberLink> {
        interval.links[position].clone().or_else(|| self.rebuilds.member(interval.number, position, None))
    }

    /// Returns the member at a position if it has the current state of the object. The member is
    /// either in sync, or its rebuild has already copied the object.
    pub(crate) fn live(&self, interval: &Interval, position: usize, oid: &ObjectId) -> Option<MemberLink> {
        let rebuilt = || self.rebuilds.member(interval.number, position, Some(oid));
        interval.links[position].clone().or_else(rebuilt)
    }

    /// Returns the result of [`Group::live`] for each position.
    pub(crate) fn live_links(&self, interval: &Interval, oid: &ObjectId) -> Vec<Option<MemberLink>> {
        (0..self.layout.fragments()).map(|position| self.live(interval, position, oid)).collect()
    }
}
