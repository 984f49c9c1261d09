//! A group at work: its objects, its session, and what its members are told.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;
use std::sync::{self, Arc, MutexGuard, PoisonError};
use std::time::Duration;

use base::pool::BufferPool;
use store::{CollectionId, ObjectId, StageId, StoreError};
use tokio::sync::{Mutex, OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};
use tokio::time::Instant;
use uuid::Uuid;
use wire::Redundancy;

use crate::coder::Coder;
use crate::coding::Coding;
use crate::layout::Layout;
use crate::member::Member;
use crate::rebuild::Rebuild;
use crate::record::{GroupRecord, Standing};
use crate::stage::Staged;

/// Objects whose size is kept in memory.
const OBJECTS_MAX: usize = 4096;

/// So long a session that could not be opened is not tried again with the same targets.
const REFUSED_FOR: Duration = Duration::from_millis(20);

/// What a group is made of.
pub struct GroupOptions {
    /// The group's collection.
    pub cid: CollectionId,
    /// Pool and number, by which targets are ranked for the group ([`wire::placement::ranked`]).
    pub place: (u32, u32),
    /// The object of the group's owner in the collection. Its omap has records of all objects, so it is rebuilt first.
    pub meta: ObjectId,
    /// Whether an object is the owner's own, which transactions change without a lock.
    pub is_internal: fn(&ObjectId) -> bool,
    /// How the group keeps objects.
    pub redundancy: Redundancy,
    /// All targets of the node.
    pub targets: Rc<Vec<Rc<dyn Member>>>,
    /// Memory for parity and staged data.
    pub pool: BufferPool,
    /// After that long the group goes on without a member that has not answered, if it can.
    pub member_timeout: Duration,
    /// So long a call waits for a member that the group cannot do without.
    pub patience: Duration,
    /// Objects noted as dirty at most.
    pub dirty_max: usize,
    /// What takes stripes to the targets.
    pub coding: Rc<Coding>,
}

/// What is known of an object's size; inside: `None` if there is no such object.
#[derive(Debug, Default)]
pub(crate) struct Known {
    /// In which session it was learnt, and what. Whoever only looks at the object may learn it, too.
    size: sync::Mutex<Option<(u64, Option<u64>)>>,
}

impl Known {
    /// The size, if it is known in this session.
    pub(crate) fn get(&self, session: &Session) -> Option<Option<u64>> {
        self.lock().filter(|(learnt, _)| *learnt == session.number).map(|(_, size)| size)
    }

    pub(crate) fn set(&self, session: &Session, size: Option<u64>) {
        *self.lock() = Some((session.number, size));
    }

    /// Something of it failed: to be read again.
    pub(crate) fn forget(&self) {
        *self.lock() = None;
    }

    fn lock(&self) -> MutexGuard<'_, Option<(u64, Option<u64>)>> {
        self.size.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A member, as it takes part in a session.
#[derive(Clone)]
pub(crate) struct Link {
    pub(crate) target: Rc<dyn Member>,
    /// Session with the target's store.
    pub(crate) session: u64,
}

/// A time in which the same members take part.
pub struct Session {
    /// See [`Group::number`].
    pub(crate) number: u64,
    /// In sync, by position.
    pub(crate) links: Vec<Option<Link>>,
    pub(crate) record: GroupRecord,
    /// Targets that have something which nobody needs any more.
    pub(crate) leftovers: RefCell<Vec<Rc<dyn Member>>>,
}

impl Session {
    /// The target of the member at a position.
    pub fn target(&self, position: usize) -> Uuid {
        self.record.members[position].target
    }

    /// Whether the group could go on without a target.
    pub fn can_spare(&self, uuid: Uuid, needed: usize) -> bool {
        let others = self.links.iter().flatten().filter(|link| link.target.uuid() != uuid).count();
        others >= needed || self.links.iter().flatten().count() == others
    }

    /// Whether a target is a member that is not in sync.
    pub fn lacks_target(&self, uuid: Uuid) -> bool {
        self.record.members.iter().any(|m| m.target == uuid && m.standing != Standing::InSync)
    }

    /// Whether all members are in sync.
    pub fn is_whole(&self) -> bool {
        self.links.iter().all(Option::is_some)
    }
}

/// Intents: which are under way, which are done and to be trimmed.
#[derive(Default)]
pub(crate) struct Log {
    /// Number of the session that it is of.
    pub(crate) session: u64,
    pub(crate) next: u64,
    pub(crate) under_way: BTreeSet<u64>,
    /// Undo objects of those that are done, by position: the intent's object numbers.
    pub(crate) done: BTreeMap<u64, Vec<Vec<usize>>>,
    /// A transaction that trims is under way.
    pub(crate) trimming: bool,
    /// Objects changed while a member is away.
    pub(crate) dirty: BTreeSet<ObjectId>,
}

impl Log {
    /// All intents up to that one are done.
    pub(crate) fn settled(&self) -> u64 {
        self.under_way.first().copied().unwrap_or(self.next).saturating_sub(1)
    }
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
    pub(crate) layout: Layout,
    pub(crate) coder: Coder,
    pub(crate) coding: Rc<Coding>,
    pub(crate) targets: Rc<Vec<Rc<dyn Member>>>,
    /// Sessions that ended because a transaction was left on some members only.
    ended: Cell<u64>,
    pub(crate) member_timeout: Duration,
    pub(crate) patience: Duration,
    /// The members in sync of the session, or of the one that is being opened.
    pub(crate) in_sync: RefCell<Vec<Rc<dyn Member>>>,
    pub(crate) dirty_max: usize,
    /// Held for reading by transactions, for writing while members come back.
    pub(crate) gate: RwLock<()>,
    pub(crate) log: RefCell<Log>,
    pub(crate) stages: RefCell<HashMap<StageId, Rc<Staged>>>,
    pub(crate) next_stage: Cell<u64>,
    pub(crate) rebuild: RefCell<Option<Rebuild>>,
    /// The position from which on a member to be rebuilt is looked for.
    pub(crate) rebuild_next: Cell<usize>,
    /// Transactions that were taken back when the session began.
    pub(crate) undone: RefCell<BTreeSet<u64>>,
    pub(crate) trim_scheduled: Cell<bool>,
    /// Counts reads of copies.
    pub(crate) copies_read: Cell<usize>,
    /// Targets on which there was no room for a blank member: others take their places, if there are some.
    pub(crate) no_room: RefCell<BTreeSet<Uuid>>,
    /// The next session forgets the objects noted as dirty, and calls the members blank that need the notes.
    pub(crate) drops_notes: Cell<bool>,
    /// Fragments that could not be read, by object and position.
    pub(crate) damaged: RefCell<BTreeSet<(ObjectId, usize)>>,
    /// Highest epoch that was ever heard of, or proposed: each new one is beyond that.
    pub(crate) highest: Cell<u64>,
    /// Record of the last session: up to that one nothing can have happened elsewhere.
    pub(crate) lineage: RefCell<Option<GroupRecord>>,
    objects: RefCell<HashMap<ObjectId, Arc<RwLock<Known>>>>,
    session: RefCell<Option<Rc<Session>>>,
    /// The last session could not be opened: its number, until when that is not tried again, and why.
    refused: RefCell<Option<(u64, Instant, String)>>,
    /// Held while a session is opened, and while members are told of a new record.
    pub(crate) opening: Mutex<()>,
    /// See [`Group::opened`].
    has_opening_task: Cell<bool>,
}

impl Group {
    /// # Errors
    /// [`StoreError::InvalidArgument`] if the redundancy is not possible.
    pub fn new(options: GroupOptions) -> store::Result<Group> {
        let layout = Layout::new(&options.redundancy);
        Ok(Group {
            cid: options.cid,
            place: options.place,
            meta: options.meta,
            is_internal: options.is_internal,
            redundancy: options.redundancy,
            coder: Coder::new(layout, options.pool)?,
            coding: options.coding,
            layout,
            targets: options.targets,
            ended: Cell::new(0),
            member_timeout: options.member_timeout,
            patience: options.patience,
            in_sync: RefCell::default(),
            dirty_max: options.dirty_max,
            gate: RwLock::default(),
            log: RefCell::default(),
            stages: RefCell::default(),
            next_stage: Cell::new(0),
            rebuild: RefCell::default(),
            rebuild_next: Cell::new(0),
            undone: RefCell::default(),
            trim_scheduled: Cell::new(false),
            copies_read: Cell::new(0),
            no_room: RefCell::default(),
            drops_notes: Cell::new(false),
            damaged: RefCell::default(),
            highest: Cell::new(0),
            lineage: RefCell::default(),
            objects: RefCell::default(),
            session: RefCell::default(),
            refused: RefCell::default(),
            opening: Mutex::default(),
            has_opening_task: Cell::new(false),
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

    /// Number of the session. It changes when a target's session does, when one fails or comes back, and when a
    /// transaction is left on some members only.
    pub fn number(&self) -> u64 {
        let changes = |target: &Rc<dyn Member>| target.store().incarnation() + target.generation();
        self.targets.iter().map(changes).sum::<u64>() + self.ended.get()
    }

    /// The session with that number, opened if need be: then whatever earlier ones have left is settled.
    ///
    /// # Errors
    /// [`StoreError::Disconnected`] if it is over; others if it cannot be opened.
    pub(crate) async fn session(&self, number: u64) -> store::Result<Rc<Session>> {
        if let Some(session) = self.current() {
            return if session.number == number { Ok(session) } else { Err(over(number)) };
        }
        let _one_at_a_time = self.opening.lock().await;
        if self.current().is_none() {
            // Many requests may wait for the same member.
            if let Some((refused, until, why)) = &*self.refused.borrow()
                && *refused == self.number()
                && Instant::now() < *until
            {
                return Err(StoreError::Disconnected(why.clone()));
            }
            let tried = self.number();
            let opened = self.open().await;
            if let Err(StoreError::Disconnected(why)) = &opened {
                *self.refused.borrow_mut() = Some((tried, Instant::now() + REFUSED_FOR, why.clone()));
            }
            *self.session.borrow_mut() = Some(Rc::new(opened?));
        }
        match self.current() {
            Some(session) if session.number == number => Ok(session),
            _ => Err(over(number)),
        }
    }

    /// The session that there is.
    pub fn current(&self) -> Option<Rc<Session>> {
        let number = self.number();
        self.last_session().filter(|session| session.number == number)
    }

    /// The session that there is, or was.
    pub fn last_session(&self) -> Option<Rc<Session>> {
        self.session.borrow().clone()
    }

    /// Whether the member on a target is in sync.
    pub fn is_in_sync_on(&self, target: &Uuid) -> bool {
        self.current().is_some_and(|s| s.links.iter().flatten().any(|link| link.target.uuid() == *target))
    }

    /// Whether objects are noted as dirty.
    pub fn has_notes(&self) -> bool {
        !self.log.borrow().dirty.is_empty()
    }

    /// Bytes of the ids of all objects noted as dirty.
    pub fn notes_bytes(&self) -> u64 {
        self.log.borrow().dirty.iter().map(|oid| oid.as_bytes().len() as u64).sum()
    }

    /// The session that there is, or one that a task opens now, if that takes no longer than `patience`. The task goes on
    /// by itself after that, and there is only one at a time.
    pub async fn opened(self: &Rc<Self>, patience: Duration) -> Option<Rc<Session>> {
        if let Some(session) = self.current() {
            return Some(session);
        }
        if self.has_opening_task.replace(true) {
            return None;
        }
        let group = Rc::clone(self);
        let opening = crate::spawn(async move {
            // If the session cannot be opened now, the caller tries again later.
            drop(group.any_session().await);
            group.has_opening_task.set(false);
        });
        drop(tokio::time::timeout(patience, opening).await);
        self.current()
    }

    /// Any session, the one that there is or a new one. A few attempts: members may fail while one is opened.
    pub async fn any_session(&self) -> store::Result<Rc<Session>> {
        let mut last = over(0);
        for _ in 0..self.layout.fragments() + 2 {
            match self.session(self.number()).await {
                Err(e @ StoreError::Disconnected(_)) => last = e,
                outcome => return outcome,
            }
        }
        Err(last)
    }

    /// Fails if the session is over.
    pub(crate) fn still(&self, session: &Session) -> store::Result<()> {
        match self.current() {
            Some(current) if current.number == session.number => Ok(()),
            _ => Err(over(session.number)),
        }
    }

    /// Ends a session in which a transaction may be on some members only.
    pub(crate) fn end_session(&self, session: &Session) {
        if self.still(session).is_ok() {
            self.ended.set(self.ended.get() + 1);
        }
    }

    /// An object, to be looked at.
    pub(crate) async fn shared_object(&self, oid: &ObjectId) -> OwnedRwLockReadGuard<Known> {
        self.object(oid).read_owned().await
    }

    /// An object, to be changed.
    pub(crate) async fn exclusive_object(&self, oid: &ObjectId) -> OwnedRwLockWriteGuard<Known> {
        self.object(oid).write_owned().await
    }

    fn object(&self, oid: &ObjectId) -> Arc<RwLock<Known>> {
        let mut objects = self.objects.borrow_mut();
        if let Some(known) = objects.get(oid) {
            return Arc::clone(known);
        }
        if objects.len() >= OBJECTS_MAX {
            // Half of what nobody uses goes, whichever half.
            let mut keep = false;
            objects.retain(|_, entry| {
                keep = !keep;
                keep || Arc::strong_count(entry) > 1
            });
        }
        Arc::clone(objects.entry(oid.clone()).or_default())
    }

    /// The member at a position if it is told of transactions: in sync, or being rebuilt.
    pub(crate) fn takes_part(&self, session: &Session, position: usize) -> Option<Link> {
        session.links[position].clone().or_else(|| self.rebuilding(session, position, |_| true))
    }

    /// The member at a position, if it has the object as it is: in sync, or already rebuilt as far as that.
    pub(crate) fn live(&self, session: &Session, position: usize, oid: &ObjectId) -> Option<Link> {
        session.links[position].clone().or_else(|| self.rebuilding(session, position, |r| !r.lacks(oid)))
    }

    fn rebuilding(
        &self,
        session: &Session,
        position: usize,
        which: impl FnOnce(&Rebuild) -> bool,
    ) -> Option<Link> {
        let rebuild = self.rebuild.borrow();
        let rebuild = rebuild.as_ref().filter(|r| r.position == position && r.session == session.number)?;
        which(rebuild).then(|| rebuild.link.clone())
    }

    /// By position, as [`Group::live`].
    pub(crate) fn live_links(&self, session: &Session, oid: &ObjectId) -> Vec<Option<Link>> {
        (0..self.layout.fragments()).map(|position| self.live(session, position, oid)).collect()
    }
}

pub(crate) fn over(number: u64) -> StoreError {
    StoreError::Disconnected(format!("session {number} of the group is over"))
}
