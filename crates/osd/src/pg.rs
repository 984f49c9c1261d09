//! Placement groups: object versions, request results, session marks and cached object states.
//!
//! A group keeps its durable state in the omap of one object in its collection (the meta object).
//! The transaction that changes the data also changes this state:
//!
//! ```text
//! g                                  sessions whose results were forgotten (`gone`)
//! r session (16 bytes) seq (8)       result of a request (postcard)
//! s session (16 bytes)               mark of a session (postcard)
//! v                                  versions below this may have been assigned (8 bytes)
//! ```
//!
//! The group executes a retry without a recorded result only if it knows that it has forgotten no
//! result of that session. It knows this from the session's mark, or, if there is no mark, from the
//! absence of the session in `g`. One transaction removes results and updates the mark or `g`.
//! Older versions of the node stored a time under `h` instead of `g`; the first write of `g`
//! removes `h`.

use std::cell::{Cell, RefCell};
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;

use base::clock::WallClock;
use base::collections::HashMap;
use bytes::{BufMut, Bytes, BytesMut};
use serde::{Deserialize, Serialize};
use store::{CollectionId, ObjectId, Op, StoreCalls, StoreError, Transaction};
use tokio::sync::{Mutex, Notify};
use wire::limits::REQUEST_WINDOW;
use wire::{Mutated, SessionId};

use crate::age::Age;
use crate::backing::Backing;
use crate::expectation::Expectation;
use crate::fail::{Fail, StepResult};
use crate::gone::{Gone, Living};
use crate::ids;
use crate::object::{INFO_XATTR, ObjectInfo, ObjectState};
use crate::sole_target::SoleTarget;
use crate::turnstile::{Ticket, Turn};

/// Number of object versions that one durable reservation covers.
const VERSION_BATCH: u64 = 1024;
/// Number of new results of a session after which the group trims (removes) the session's old
/// results.
const TRIM_BATCH: u64 = 64;
/// Age of a session's mark, in milliseconds, after which the session's next change writes the mark
/// again.
const MARK_REFRESH_MS: u64 = 3_600_000;
/// Maximum number of closed sessions whose results the transaction of a change also removes.
const CARRIED: usize = 4;
/// Maximum number of results of a closed session that the transaction of a change removes. The
/// collector removes the results of closed sessions with more results, so that the transactions of
/// changes stay small.
const CARRIED_RESULTS: usize = 16;
/// Maximum number of sessions that one transaction of the collector forgets.
pub(crate) const EXPIRED_SESSIONS: usize = 32;
/// Maximum number of results that one transaction of the collector removes.
const EXPIRED_RESULTS: usize = 1024;
/// Value of [`Mark::low_water`] for a session whose results the collector is removing.
const FORGOTTEN: u64 = u64::MAX;

/// A placement group.
pub(crate) struct Pg {
    pub(crate) backing: Rc<Backing>,
    /// The target; `None` with redundancy.
    sole: Option<SoleTarget>,
    pub(crate) cid: CollectionId,
    pub(crate) meta: ObjectId,
    objects: RefCell<HashMap<ObjectId, Rc<ObjectState>>>,
    objects_max: usize,
    loading: Mutex<()>,
    /// Incarnation in which `state` was read; 0 if it was never read.
    loaded: Cell<u64>,
    /// Incarnation in which [`Pg::settle`] has finished, so that no change of an earlier
    /// incarnation can be lost any more; 0 if it never finished.
    settled: Cell<u64>,
    /// Number of barriers asked for. The group may be used only after the store has executed or refused
    /// all transactions of earlier incarnations, because a session that has ended may have lost one.
    barriers_wanted: Cell<u64>,
    /// Number of the barriers asked for that the store has executed.
    barriers: Cell<u64>,
    /// Whether the store has executed a barrier since the osd has started.
    had_barrier: Cell<bool>,
    state: RefCell<State>,
    commits: OpenCommits,
    age: Arc<Age>,
    /// Supplies the modification times of objects.
    pub(crate) clock: WallClock,
    /// Predicts whether an uncached object is new.
    pub(crate) expects_new: Expectation,
}

#[derive(Default)]
struct State {
    next_version: u64,
    /// Versions below this number are reserved. `reserved_durably` says whether the store has the
    /// reservation.
    reserved: u64,
    reserved_durably: bool,
    gone: Gone,
    /// Whether the meta object still has the key `h` of an older version of the node.
    has_horizon: bool,
    marks: HashMap<SessionId, Mark>,
    /// Closed sessions whose results the next changes remove.
    closed: VecDeque<SessionId>,
}

/// The group's record of one session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Mark {
    /// The results of requests with numbers below this one may have been removed. The group refuses
    /// a retry below this number if it has no recorded result.
    low_water: u64,
    /// Approximate node age, in milliseconds, of the session's last change in this group. Marks of
    /// older versions of the node hold milliseconds since 1970.
    active_ms: u64,
    /// Numbers of the requests that have a result in the store. `None` if the numbers are unknown,
    /// or if there are more than `CARRIED_RESULTS` of them.
    #[serde(skip)]
    results: Option<Vec<u64>>,
    /// Whether the client has closed the session.
    #[serde(skip)]
    closed: bool,
    /// Number of results recorded since the last trim. `TRIM_BATCH` if the number is unknown.
    #[serde(skip)]
    untrimmed: u64,
    /// Lowest request number that may still have a result in the store; at most `low_water`.
    #[serde(skip)]
    kept_from: u64,
    #[serde(skip)]
    durable: bool,
}

/// The group's transactions in flight. Listings wait for them, because a listing must not show
/// objects that are not durable yet. A fence waits for those of its session.
#[derive(Default)]
struct OpenCommits {
    next: Cell<u64>,
    /// The transactions by their numbers, each with the session of its request.
    outstanding: RefCell<BTreeMap<u64, Option<SessionId>>>,
    /// Sessions with transactions that may still take effect although they were lost, and the last
    /// incarnation in which such a transaction was queued.
    unsure: RefCell<BTreeMap<SessionId, u64>>,
    changed: Notify,
}

/// The request that a change belongs to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Origin {
    pub(crate) session: SessionId,
    pub(crate) seq: u64,
    pub(crate) acked_through: u64,
}

/// Changes of the group's own state that one transaction contains. The caller returns this note to
/// the group once the transaction is durable or has failed.
#[derive(Debug, Default)]
pub(crate) struct MetaNote {
    reserved: Option<u64>,
    /// Session, low water and time of the mark that the transaction writes.
    marked: Option<(SessionId, u64, u64)>,
    /// A session, and the lowest request number whose result the transaction removes.
    trimmed: Option<(SessionId, u64)>,
    /// Closed sessions whose results the transaction removes.
    carried: Vec<(SessionId, Mark)>,
}

/// Rule by which the collector forgets sessions. Besides closed sessions, it forgets idle sessions
/// that are not alive.
pub(crate) struct Expiry<'a> {
    /// A session is idle if it has changed nothing for this time, in milliseconds.
    pub(crate) idle_ms: u64,
    /// Returns whether a session is alive: connected now, or until recently.
    pub(crate) alive: &'a dyn Fn(SessionId) -> bool,
}

impl Pg {
    pub(crate) fn new(
        backing: Rc<Backing>,
        sole: Option<SoleTarget>,
        (pool, pg): (u32, u32),
        objects_max: usize,
        times: (Arc<Age>, WallClock),
    ) -> Pg {
        Pg {
            backing,
            sole,
            cid: ids::collection(pool, pg),
            meta: ids::meta_object(),
            objects: RefCell::default(),
            objects_max,
            loading: Mutex::default(),
            loaded: Cell::new(0),
            settled: Cell::new(0),
            barriers_wanted: Cell::new(0),
            barriers: Cell::new(0),
            had_barrier: Cell::new(false),
            state: RefCell::default(),
            commits: OpenCommits::default(),
            age: times.0,
            clock: times.1,
            expects_new: Expectation::default(),
        }
    }

    /// Returns the cached state of an object. The state is empty if the object was not cached.
    pub(crate) fn object(&self, oid: &ObjectId) -> Rc<ObjectState> {
        let mut objects = self.objects.borrow_mut();
        if let Some(known) = objects.get(oid) {
            return Rc::clone(known);
        }
        if objects.len() >= self.objects_max {
            // Evict half of the unreferenced entries at once, which keeps the average cost per
            // object low.
            let mut keep = false;
            objects.retain(|_, state| {
                keep = !keep;
                keep || Rc::strong_count(state) > 1
            });
        }
        Rc::clone(objects.entry(oid.clone()).or_default())
    }

    /// Reads the group's state unless it was read in the current incarnation. Creates the
    /// collection if it is missing. Returns the current incarnation.
    pub(crate) async fn load(&self) -> StepResult<u64> {
        if self.loaded.get() == self.backing.incarnation() {
            return Ok(self.loaded.get());
        }
        let _one_at_a_time = self.loading.lock().await;
        let incarnation = self.backing.incarnation();
        if self.loaded.get() != incarnation {
            let reading = async {
                self.settle().await?;
                self.read_state().await
            };
            let state = reading.await.inspect_err(|e| self.note_loss(e, incarnation))?;
            *self.state.borrow_mut() = state;
            self.loaded.set(incarnation);
        }
        Ok(incarnation)
    }

    /// Waits until no change of an earlier incarnation can be lost any more. Returns the current
    /// incarnation.
    pub(crate) async fn settle(&self) -> StepResult<u64> {
        let incarnation = self.backing.incarnation();
        while self.settled.get() != incarnation || self.barriers_wanted.get() != self.barriers.get() {
            // A fence may ask for another barrier during this one.
            let wanted = self.barriers_wanted.get();
            if self.backing.settle(&self.cid, wanted != self.barriers.get()).await? {
                self.commits.unsure.borrow_mut().retain(|_, lost| *lost >= incarnation);
                self.barriers.set(wanted.max(self.barriers.get()));
                self.had_barrier.set(true);
            }
            if let Some(sole) = &self.sole {
                sole.check().await?;
            }
            self.settled.set(incarnation);
        }
        Ok(incarnation)
    }

    /// Returns whether the group has no redundancy, and its target has failed so long ago that requests
    /// wait no longer.
    pub(crate) fn has_lost_target(&self) -> bool {
        self.sole.as_ref().is_some_and(SoleTarget::is_lost)
    }

    fn note_loss(&self, fail: &Fail, incarnation: u64) {
        if matches!(fail, Fail::Lost(_)) {
            self.backing.lost(incarnation);
        }
    }

    async fn read_state(&self) -> StepResult<State> {
        let store = &self.backing;
        let keys = vec![key_gone(), key_horizon(), key_versions()];
        let fixed = match store.omap_get(&self.cid, &self.meta, keys).await {
            Ok(fixed) => fixed,
            Err(e @ (StoreError::NoSuchCollection(_) | StoreError::NoSuchObject(_))) => {
                let mut create = Transaction::new(self.cid.clone());
                if matches!(e, StoreError::NoSuchCollection(_)) {
                    create = create.with(Op::CreateCollection);
                }
                let create = create.with(Op::Touch { oid: self.meta.clone() }).from_reserve();
                self.backing.queue(create).await?;
                Vec::new()
            }
            Err(e) => return Err(e.into()),
        };
        let find = |key: Bytes| fixed.iter().find(|(k, _)| *k == key).map(|(_, value)| value);
        let reserved = match find(key_versions()) {
            Some(value) => {
                u64::from_be_bytes(value[..].try_into().map_err(|_| self.corrupt("the version reservation"))?)
            }
            None => 0,
        };
        let decode =
            |value: &Bytes| Gone::decode(value).ok_or_else(|| self.corrupt("the set of forgotten sessions"));
        Ok(State {
            next_version: reserved,
            reserved,
            reserved_durably: true,
            gone: find(key_gone()).map(decode).transpose()?.unwrap_or_default(),
            has_horizon: find(key_horizon()).is_some(),
            marks: self.read_marks().await?,
            closed: VecDeque::new(),
        })
    }

    async fn read_marks(&self) -> StepResult<HashMap<SessionId, Mark>> {
        let mut marks = HashMap::default();
        let mut from = Bytes::from_static(b"s");
        loop {
            let (page, more) = self.backing.omap_iterate(&self.cid, &self.meta, from.clone(), 1024).await?;
            for (key, value) in &page {
                if key.first() != Some(&b's') {
                    return Ok(marks);
                }
                let session = key[1..].try_into().map_err(|_| self.corrupt("a session's key"))?;
                let mark: Mark = postcard::from_bytes(value).map_err(|_| self.corrupt("a session's mark"))?;
                let session = SessionId(u128::from_be_bytes(session));
                // The number of results is unknown, so the next change of the session trims old
                // results. A time later than the node's age was written by an older version of the
                // node, or before the node lost its age.
                let active_ms = mark.active_ms.min(self.age.ran_ms());
                marks.insert(session, Mark { active_ms, durable: true, untrimmed: TRIM_BATCH, ..mark });
            }
            match page.last() {
                Some((last, _)) if more => from = [last, &b"\0"[..]].concat().into(),
                _ => return Ok(marks),
            }
        }
    }

    fn corrupt(&self, what: &str) -> Fail {
        Fail::Refused(wire::Error::Corrupt(format!("{what} of placement group {}", self.cid)))
    }

    /// Returns the result of a request, if the group has one.
    ///
    /// # Errors
    /// [`RequestExpired`](wire::Error::RequestExpired) if the result may have been forgotten, so
    /// that the group cannot tell whether it executed the request.
    pub(crate) async fn result(&self, origin: &Origin) -> StepResult<Option<Mutated>> {
        let key = key_result(origin.session, origin.seq);
        let found = self.backing.omap_get(&self.cid, &self.meta, vec![key]).await?;
        // Check the mark only after the lookup, because the result may be forgotten during the
        // lookup.
        let state = self.state.borrow();
        let forgotten = match state.marks.get(&origin.session) {
            Some(mark) if mark.closed => true,
            Some(mark) => found.is_empty() && origin.seq < mark.low_water,
            None => state.gone.has(origin.session),
        };
        if forgotten {
            return Err(wire::Error::RequestExpired.into());
        }
        let Some((_, value)) = found.first() else { return Ok(None) };
        postcard::from_bytes(value).map(Some).map_err(|_| self.corrupt("a request's result"))
    }

    /// Returns the new version for a change of an object whose current version is `last`.
    pub(crate) fn next_version(&self, last: u64) -> u64 {
        let mut state = self.state.borrow_mut();
        let version = state.next_version.max(last) + 1;
        state.next_version = version;
        if version >= state.reserved {
            state.reserved = version + VERSION_BATCH;
            state.reserved_durably = false;
        }
        version
    }

    /// Adds to a transaction the group's record of the request: its result, the session's mark and
    /// the version reservation. Also adds the removal of the results of a few closed sessions.
    pub(crate) fn record(&self, ops: &mut Vec<Op>, origin: Option<&Origin>, result: &Mutated) -> MetaNote {
        let now_ms = self.age.ran_ms();
        let mut state = self.state.borrow_mut();
        let mut entries = Vec::new();
        let mut note = MetaNote::default();
        if !state.reserved_durably {
            note.reserved = Some(state.reserved);
            entries.push((key_versions(), number_value(state.reserved)));
        }
        if let Some(origin) = origin {
            if !base::mutant!(DropRequestRecord) {
                entries.push((key_result(origin.session, origin.seq), encode(result)));
            }
            let mark = state.mark(origin, now_ms);
            mark.note_result(origin.seq);
            if let Some((from, to)) = mark.trim(origin) {
                note.trimmed = Some((origin.session, from));
                let (from, to) = (key_result(origin.session, from), key_result(origin.session, to));
                ops.push(Op::OmapRemoveRange { oid: self.meta.clone(), from, to });
            }
            if now_ms.saturating_sub(mark.active_ms) > MARK_REFRESH_MS {
                mark.active_ms = now_ms;
                mark.durable = false;
            }
            if !mark.durable {
                note.marked = Some((origin.session, mark.low_water, mark.active_ms));
                entries.push((key_session(origin.session), encode(mark)));
            }
        }
        let (carried, mut keys) = state.take_closed();
        note.carried = carried;
        if !note.carried.is_empty() {
            entries.push((key_gone(), state.gone.encode()));
            keys.extend(std::mem::take(&mut state.has_horizon).then(key_horizon));
            ops.push(Op::OmapRemove { oid: self.meta.clone(), keys });
        }
        if !entries.is_empty() {
            ops.push(Op::OmapSet { oid: self.meta.clone(), entries });
        }
        note
    }

    /// Records that a transaction with changes from [`Pg::record`] is durable.
    pub(crate) fn recorded(&self, note: MetaNote) {
        let mut state = self.state.borrow_mut();
        if let Some(reserved) = note.reserved {
            // A later change may have reserved more versions since then. That reservation may not
            // be durable yet.
            state.reserved_durably = reserved == state.reserved;
        }
        if let Some((session, low_water, active_ms)) = note.marked
            && let Some(mark) = state.marks.get_mut(&session)
            && (mark.low_water, mark.active_ms) == (low_water, active_ms)
        {
            mark.durable = true;
        }
    }

    /// Records that a transaction with changes from [`Pg::record`] has failed.
    pub(crate) fn not_recorded(&self, note: MetaNote) {
        let mut state = self.state.borrow_mut();
        if let Some((session, from)) = note.trimmed
            && let Some(mark) = state.marks.get_mut(&session)
        {
            // The results are still in the store, so the next trim must remove them.
            mark.kept_from = mark.kept_from.min(from);
            mark.untrimmed = TRIM_BATCH;
            mark.results = None;
        }
        state.put_back(note.carried);
    }

    /// Returns false only if the group holds no results of the session.
    pub(crate) fn knows(&self, session: SessionId) -> bool {
        self.state.borrow().marks.contains_key(&session)
    }

    /// Records that the client has closed a session. From now on, the group refuses the session's
    /// retries. The next changes or the collector remove its results. `living` are the sessions
    /// that may still send retries.
    pub(crate) fn close_session(&self, session: SessionId, living: &Living) {
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        let Some(mark) = state.marks.get_mut(&session).filter(|mark| !mark.closed) else { return };
        mark.closed = true;
        state.gone.add(session, living);
        if mark.results.is_some() {
            state.closed.push_back(session);
        }
    }

    /// Returns the sessions that the collector must forget by the rule `expiry`.
    pub(crate) async fn expired(&self, expiry: &Expiry<'_>) -> StepResult<Vec<SessionId>> {
        self.load().await?;
        let now_ms = self.age.ran_ms();
        let state = self.state.borrow();
        let expired = state.marks.iter().filter(|(id, mark)| expiry.includes(**id, mark, now_ms));
        Ok(expired.map(|(id, _)| *id).collect())
    }

    /// Takes sessions from the end of `sessions` and forgets the expired ones, in one transaction
    /// of bounded size. Puts a session back into `sessions` if the transaction cannot remove all of
    /// its results. Returns the number of sessions forgotten completely. `living` are the sessions
    /// that may still send retries.
    pub(crate) async fn expire_some(
        &self,
        sessions: &mut Vec<SessionId>,
        expiry: &Expiry<'_>,
        living: impl FnOnce() -> Living,
    ) -> StepResult<usize> {
        let incarnation = self.load().await?;
        let listed = self.list_results(sessions).await.inspect_err(|e| self.note_loss(e, incarnation))?;
        self.backing.still(incarnation)?;
        let (mut keys, mut entries, mut removed) = (Vec::new(), Vec::new(), Vec::new());
        {
            let living = living();
            let now_ms = self.age.ran_ms();
            let mut state = self.state.borrow_mut();
            let state = &mut *state;
            for Results { session, keys: results, all } in listed {
                let Entry::Occupied(mut known) = state.marks.entry(session) else { continue };
                // The client may have reconnected while the results were listed.
                if !expiry.includes(session, known.get(), now_ms) {
                    continue;
                }
                // From here on, the group refuses the session's retries, even if the transaction
                // fails.
                state.gone.add(session, &living);
                keys.extend(results);
                if all {
                    keys.push(key_session(session));
                    removed.push((session, known.remove()));
                } else {
                    let mark = known.get_mut();
                    (mark.low_water, mark.durable) = (FORGOTTEN, false);
                    entries.push((key_session(session), encode(mark)));
                    sessions.push(session);
                }
            }
            if keys.is_empty() {
                return Ok(0);
            }
            entries.push((key_gone(), state.gone.encode()));
            keys.extend(std::mem::take(&mut state.has_horizon).then(key_horizon));
        }
        let count = removed.len();
        let transaction = Transaction::new(self.cid.clone())
            .with(Op::OmapRemove { oid: self.meta.clone(), keys })
            .with(Op::OmapSet { oid: self.meta.clone(), entries })
            .from_reserve();
        match self.backing.queue(transaction).await.map_err(Fail::from) {
            Ok(()) => Ok(count),
            Err(e) => {
                self.note_loss(&e, incarnation);
                // If the group's state was read again during the transaction, it already contains
                // the removed sessions.
                if self.loaded.get() == incarnation {
                    self.state.borrow_mut().put_back(removed);
                }
                Err(e)
            }
        }
    }

    /// Takes sessions from the end of `sessions` and lists their results, up to the number that one
    /// transaction may remove.
    async fn list_results(&self, sessions: &mut Vec<SessionId>) -> StepResult<Vec<Results>> {
        let mut listed = Vec::new();
        let mut room = EXPIRED_RESULTS;
        while listed.len() < EXPIRED_SESSIONS && room > 0 {
            let Some(session) = sessions.pop() else { break };
            let from = key_result(session, 0);
            let (page, more) = self.backing.omap_iterate(&self.cid, &self.meta, from.clone(), room).await?;
            let of_session = |key: &Bytes| key.len() == from.len() && key[..17] == from[..17];
            let found = page.len();
            let keys: Vec<Bytes> = page.into_iter().map(|(key, _)| key).take_while(of_session).collect();
            let all = keys.len() < found || !more;
            room -= keys.len().min(room);
            listed.push(Results { session, keys, all });
        }
        Ok(listed)
    }

    /// Returns the latest record of an object, from memory or from the store; `None` if the object
    /// does not exist. The caller must hold the object's turn, and [`Turn::is_of`] must hold.
    pub(crate) async fn info(
        &self,
        oid: &ObjectId,
        turn: &Turn<'_>,
        incarnation: u64,
    ) -> StepResult<Option<ObjectInfo>> {
        if let Some(known) = turn.latest(incarnation) {
            return Ok(known);
        }
        let info = self.stored_info(oid).await?;
        turn.learn(incarnation, info);
        Ok(info)
    }

    /// Returns the first of several objects that exists, with its index and its latest state. Another
    /// request may change the object meanwhile.
    ///
    /// An object may move towards the start of the list meanwhile: it is copied there first and removed
    /// then. So if no object is found, they are looked up once more in the opposite order.
    pub(crate) async fn first_of(
        &self,
        oids: &[ObjectId],
        incarnation: u64,
    ) -> StepResult<Option<(usize, ObjectInfo)>> {
        for (index, oid) in oids.iter().enumerate() {
            if let Some(info) = self.look(oid, incarnation).await? {
                return Ok(Some((index, info)));
            }
        }
        if oids.len() == 1 {
            return Ok(None);
        }
        let mut found = None;
        for (index, oid) in oids.iter().enumerate().rev() {
            if let Some(info) = self.look(oid, incarnation).await? {
                found = Some((index, info));
            }
        }
        Ok(found)
    }

    /// Returns the latest record of an object outside of a turn; `None` if the object does not exist.
    async fn look(&self, oid: &ObjectId, incarnation: u64) -> StepResult<Option<ObjectInfo>> {
        let cached = self.objects.borrow().get(oid).and_then(|object| object.turnstile.latest(incarnation));
        match cached {
            Some(latest) => Ok(latest),
            None => self.stored_info(oid).await,
        }
    }

    async fn stored_info(&self, oid: &ObjectId) -> StepResult<Option<ObjectInfo>> {
        match self.backing.get_xattr(&self.cid, oid, INFO_XATTR).await {
            Ok(bytes) => {
                let corrupt = || Fail::Refused(wire::Error::Corrupt(format!("the record of object {oid}")));
                Ok(Some(ObjectInfo::decode(&bytes).ok_or_else(corrupt)?))
            }
            // The collection may not exist yet, because reading an object does not create it.
            Err(StoreError::NoSuchObject(_) | StoreError::NoSuchCollection(_)) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    /// Waits for a ticket's turn on an object. Returns the turn and the current incarnation.
    /// `begin` makes the group usable in the current incarnation: [`Pg::load`] or [`Pg::settle`].
    pub(crate) async fn enter<'a>(
        &self,
        ticket: &Ticket<'a>,
        begin: impl AsyncFn() -> StepResult<u64>,
    ) -> StepResult<(Turn<'a>, u64)> {
        loop {
            let turn = ticket.enter(|| self.backing.incarnation()).await;
            let incarnation = begin().await?;
            if turn.is_of(incarnation) {
                return Ok((turn, incarnation));
            }
            // A new incarnation has begun, so the pending changes of the object must be settled
            // first.
            ticket.keep_place();
        }
    }

    /// Records that a transaction was queued for a request of `session`. The transaction counts as in
    /// flight until the returned guard is dropped.
    pub(crate) fn committing(&self, session: Option<SessionId>) -> Committing<'_> {
        let commits = &self.commits;
        let number = commits.next.get();
        commits.next.set(number + 1);
        commits.outstanding.borrow_mut().insert(number, session);
        Committing { commits, number }
    }

    /// Waits until no transaction of an ended session is in flight any more. One that was lost may still
    /// take effect, but only before anything that the group does after this call: the group then begins
    /// with a barrier.
    pub(crate) async fn drained(&self, session: SessionId) {
        loop {
            let changed = self.commits.changed.notified();
            if !self.commits.outstanding.borrow().values().any(|of| *of == Some(session)) {
                break;
            }
            changed.await;
        }
        let has_lost = self.commits.unsure.borrow_mut().remove(&session).is_some();
        // An earlier start of the osd may have lost a transaction, too.
        let is_earlier = session.generation() < self.age.generation();
        if has_lost || (is_earlier && !self.had_barrier.get()) {
            self.barriers_wanted.set(self.barriers_wanted.get() + 1);
            // A group that has settled already settles again.
            self.backing.lost(self.settled.get());
        }
    }

    /// Waits until each transaction queued so far is durable or has failed.
    pub(crate) async fn all_committed(&self) {
        let end = self.commits.next.get();
        loop {
            let changed = self.commits.changed.notified();
            if self.commits.outstanding.borrow().first_key_value().is_none_or(|(oldest, _)| *oldest >= end) {
                return;
            }
            changed.await;
        }
    }
}

/// Guard for one of the group's transactions in flight.
pub(crate) struct Committing<'a> {
    commits: &'a OpenCommits,
    number: u64,
}

impl Committing<'_> {
    /// Ends the transaction. `unsure` is the incarnation in which it was queued, if it was lost and may
    /// still take effect.
    pub(crate) fn ended(self, unsure: Option<u64>) {
        let session = self.commits.outstanding.borrow().get(&self.number).copied().flatten();
        if let (Some(session), Some(incarnation)) = (session, unsure) {
            self.commits.unsure.borrow_mut().insert(session, incarnation);
        }
    }
}

impl Drop for Committing<'_> {
    fn drop(&mut self) {
        self.commits.outstanding.borrow_mut().remove(&self.number);
        self.commits.changed.notify_waiters();
    }
}

/// Keys of a session's results.
struct Results {
    session: SessionId,
    keys: Vec<Bytes>,
    /// Whether `keys` contains all of the session's results.
    all: bool,
}

impl Expiry<'_> {
    fn includes(&self, session: SessionId, mark: &Mark, now_ms: u64) -> bool {
        // A client of an older version of the node cannot resume its session.
        let of_older_version = session.generation() < SessionId::FIRST_GENERATION;
        let is_idle = now_ms.saturating_sub(mark.active_ms) >= self.idle_ms;
        mark.closed || of_older_version || (is_idle && !(self.alive)(session))
    }
}

impl State {
    /// Returns the mark of a request's session, and creates it if it is missing.
    fn mark(&mut self, origin: &Origin, now_ms: u64) -> &mut Mark {
        let is_forgotten = match self.marks.get(&origin.session) {
            Some(mark) => mark.closed || mark.low_water == FORGOTTEN,
            None => self.gone.has(origin.session),
        };
        let fresh = Mark {
            low_water: 0,
            active_ms: now_ms,
            results: Some(Vec::new()),
            closed: false,
            untrimmed: 0,
            kept_from: 0,
            durable: false,
        };
        let mark = self.marks.entry(origin.session).or_insert_with(|| fresh.clone());
        if is_forgotten {
            // The client uses the session again after the group forgot it. All earlier requests of
            // the session have numbers below the end of this request's window. The group therefore
            // refuses retries below this end if they have no result.
            let low_water = origin.seq.saturating_add(REQUEST_WINDOW);
            *mark = Mark { low_water, results: None, untrimmed: TRIM_BATCH, ..fresh };
        }
        mark
    }

    /// Removes a few closed sessions from the state. Returns the sessions with their marks, and the
    /// keys that the caller must remove from the store.
    fn take_closed(&mut self) -> (Vec<(SessionId, Mark)>, Vec<Bytes>) {
        let (mut taken, mut keys) = (Vec::new(), Vec::new());
        for _ in 0..CARRIED {
            let Some(session) = self.closed.pop_front() else { break };
            let Entry::Occupied(known) = self.marks.entry(session) else { continue };
            // A session that its client uses again is no longer closed; skip it.
            let Some(results) = known.get().results.as_ref().filter(|_| known.get().closed) else { continue };
            keys.extend(results.iter().map(|seq| key_result(session, *seq)));
            keys.push(key_session(session));
            taken.push((session, known.remove()));
        }
        (taken, keys)
    }

    /// Restores sessions whose results could not be removed.
    fn put_back(&mut self, taken: Vec<(SessionId, Mark)>) {
        for (session, mark) in taken {
            let Entry::Vacant(free) = self.marks.entry(session) else { continue };
            if mark.closed && mark.results.is_some() {
                self.closed.push_back(session);
            }
            free.insert(mark);
        }
    }
}

impl Mark {
    /// Records the number of a new result. Beyond `CARRIED_RESULTS` results, the mark keeps no
    /// numbers.
    fn note_result(&mut self, seq: u64) {
        match &mut self.results {
            Some(few) if few.len() < CARRIED_RESULTS => few.push(seq),
            results => *results = None,
        }
    }

    /// Counts one more result of the session. If old results must be trimmed now, returns their
    /// range: the first request number, and the number after the last one.
    fn trim(&mut self, origin: &Origin) -> Option<(u64, u64)> {
        self.untrimmed += 1;
        let unwanted = origin.acked_through.saturating_add(1).min(origin.seq);
        // The oldest unanswered request of a correct client is at most `REQUEST_WINDOW` numbers
        // behind its newest request.
        let end = unwanted.max(origin.seq.saturating_sub(REQUEST_WINDOW));
        if self.untrimmed < TRIM_BATCH || end <= self.low_water {
            return None;
        }
        let range = (self.kept_from, end);
        (self.low_water, self.kept_from) = (end, end);
        self.untrimmed = 1;
        self.durable = false;
        Some(range)
    }
}

fn encode<T: Serialize>(value: &T) -> Bytes {
    // Encoding plain data into a growing vector cannot fail.
    postcard::to_allocvec(value).expect("plain data can be encoded").into()
}

fn number_value(number: u64) -> Bytes {
    Bytes::copy_from_slice(&number.to_be_bytes())
}

fn key_gone() -> Bytes {
    Bytes::from_static(b"g")
}

/// Returns the key under which older versions of the node stored a time.
fn key_horizon() -> Bytes {
    Bytes::from_static(b"h")
}

fn key_versions() -> Bytes {
    Bytes::from_static(b"v")
}

fn key_session(session: SessionId) -> Bytes {
    let mut key = BytesMut::with_capacity(17);
    key.put_u8(b's');
    key.put_u128(session.0);
    key.freeze()
}

fn key_result(session: SessionId, seq: u64) -> Bytes {
    let mut key = BytesMut::with_capacity(25);
    key.put_u8(b'r');
    key.put_u128(session.0);
    key.put_u64(seq);
    key.freeze()
}
