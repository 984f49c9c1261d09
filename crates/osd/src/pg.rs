//! Placement groups: versions, results of requests, sessions' marks, and the objects in use.
//!
//! A group's own durable state is the omap of one object in its collection, changed by the same transactions as the
//! data:
//!
//! ```text
//! g                                  sessions whose results were forgotten (`gone`)
//! r session (16 bytes) seq (8)       result of a request (postcard)
//! s session (16 bytes)               mark of a session (postcard)
//! v                                  versions below that may have been given out (8 bytes)
//! ```
//!
//! A repeat whose result is not there is carried out only if its session's mark, or the absence of
//! the session from `g`, says that no result was forgotten. Results are removed in the same
//! transaction that changes the mark or `g`. Older versions of the node had a time `h` instead of
//! `g`; it is removed when `g` is first written.

use std::cell::{Cell, RefCell};
use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::rc::Rc;

use bytes::{BufMut, Bytes, BytesMut};
use serde::{Deserialize, Serialize};
use store::{CollectionId, ObjectId, Op, StoreCalls, StoreError, Transaction};
use tokio::sync::{Mutex, Notify};
use wire::limits::REQUEST_WINDOW;
use wire::{Mutated, SessionId};

use crate::age::Age;
use crate::backing::Backing;
use crate::clock::WallClock;
use crate::fail::{Fail, StepResult};
use crate::gone::{Gone, Living};
use crate::ids;
use crate::object::{INFO_XATTR, ObjectInfo, ObjectState};

/// Versions are reserved in the store that many at a time.
const VERSION_BATCH: u64 = 1024;
/// Results are trimmed when that many can be at once.
const TRIM_BATCH: u64 = 64;
/// A session's mark is written again when its time is that old, in milliseconds.
const MARK_REFRESH_MS: u64 = 3_600_000;
/// Most closed sessions that one change forgets on its way.
const CARRIED: usize = 4;
/// Closed sessions with more results than that are left to the collector, so that changes stay
/// small.
const CARRIED_RESULTS: usize = 16;
/// Most sessions that one transaction of the collector forgets.
pub(crate) const EXPIRED_SESSIONS: usize = 32;
/// Most results that one transaction of the collector forgets.
const EXPIRED_RESULTS: usize = 1024;
/// Low water mark of a session whose results are being forgotten.
const FORGOTTEN: u64 = u64::MAX;

/// A placement group.
pub(crate) struct Pg {
    pub(crate) backing: Rc<Backing>,
    pub(crate) cid: CollectionId,
    pub(crate) meta: ObjectId,
    objects: RefCell<HashMap<ObjectId, Rc<ObjectState>>>,
    objects_max: usize,
    loading: Mutex<()>,
    /// Epoch that `state` was read in; 0 for never.
    loaded: Cell<u64>,
    /// Epoch in which what earlier ones had left behind was settled; 0 for none.
    settled: Cell<u64>,
    state: RefCell<State>,
    commits: OpenCommits,
    age: Rc<Age>,
    /// Stamps objects.
    pub(crate) clock: WallClock,
    pub(crate) expects_new: Expectation,
}

/// Whether objects of which nothing is known tend to be new: a two-bit counter, as of a branch predictor.
pub(crate) struct Expectation(Cell<u8>);

impl Expectation {
    /// Whether to take the next one for new.
    pub(crate) fn guess(&self) -> bool {
        self.0.get() >= 2
    }

    /// Says how it was.
    pub(crate) fn learn(&self, was_new: bool) {
        let count = self.0.get();
        self.0.set(if was_new { (count + 1).min(3) } else { count.saturating_sub(1) });
    }
}

#[derive(Default)]
struct State {
    next_version: u64,
    /// Versions below are reserved, durably if `reserved_durably`.
    reserved: u64,
    reserved_durably: bool,
    gone: Gone,
    /// The horizon of an older version of the node is still there.
    has_horizon: bool,
    marks: HashMap<SessionId, Mark>,
    /// Closed sessions that the next changes forget.
    closed: VecDeque<SessionId>,
}

/// A session in this group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Mark {
    /// Results of requests below may be gone: a repeat of one that has none is refused.
    low_water: u64,
    /// About when the session last changed something here, as the node's age in milliseconds. In
    /// marks of older versions of the node, a time since 1970.
    active_ms: u64,
    /// Numbers of the requests whose results are there, as long as those are few; `None`: not
    /// known.
    #[serde(skip)]
    results: Option<Vec<u64>>,
    /// The session's client has closed it.
    #[serde(skip)]
    closed: bool,
    /// Results recorded since the last trim, as far as known.
    #[serde(skip)]
    untrimmed: u64,
    /// Where results that are still there may begin; at most `low_water`.
    #[serde(skip)]
    kept_from: u64,
    #[serde(skip)]
    durable: bool,
}

/// Transactions of the group under way, for those who must not see what is not durable.
#[derive(Default)]
struct OpenCommits {
    next: Cell<u64>,
    outstanding: RefCell<BTreeSet<u64>>,
    changed: Notify,
}

/// Which request a change is for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Origin {
    pub(crate) session: SessionId,
    pub(crate) seq: u64,
    pub(crate) acked_through: u64,
}

/// What to tell the group once a transaction's outcome is known.
#[derive(Debug, Default)]
pub(crate) struct MetaNote {
    reserved: Option<u64>,
    /// Session, low water and time of the mark that was written.
    marked: Option<(SessionId, u64, u64)>,
    /// Results from that number on are trimmed.
    trimmed: Option<(SessionId, u64)>,
    /// Closed sessions that are forgotten.
    carried: Vec<(SessionId, Mark)>,
}

/// When the collector forgets a session.
pub(crate) struct Expiry<'a> {
    /// It has changed nothing for that long, in milliseconds…
    pub(crate) idle_ms: u64,
    /// … and is not alive.
    pub(crate) alive: &'a dyn Fn(SessionId) -> bool,
}

impl Pg {
    pub(crate) fn new(
        backing: Rc<Backing>,
        (pool, pg): (u32, u32),
        objects_max: usize,
        times: (Rc<Age>, WallClock),
    ) -> Pg {
        Pg {
            backing,
            cid: ids::collection(pool, pg),
            meta: ids::meta_object(),
            objects: RefCell::default(),
            objects_max,
            loading: Mutex::default(),
            loaded: Cell::new(0),
            settled: Cell::new(0),
            state: RefCell::default(),
            commits: OpenCommits::default(),
            age: times.0,
            clock: times.1,
            expects_new: Expectation(Cell::new(3)),
        }
    }

    /// The state of one object.
    pub(crate) fn object(&self, oid: &ObjectId) -> Rc<ObjectState> {
        let mut objects = self.objects.borrow_mut();
        if let Some(known) = objects.get(oid) {
            return Rc::clone(known);
        }
        if objects.len() >= self.objects_max {
            // Half of what nobody uses goes, whichever half: so it costs little per object.
            let mut keep = false;
            objects.retain(|_, state| {
                keep = !keep;
                keep || Rc::strong_count(state) > 1
            });
        }
        Rc::clone(objects.entry(oid.clone()).or_default())
    }

    /// Reads the group's state if that has not been done in this incarnation; makes the collection if there is none.
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

    /// Makes sure that nothing of an earlier incarnation can vanish any more; returns the incarnation.
    pub(crate) async fn settle(&self) -> StepResult<u64> {
        let incarnation = self.backing.incarnation();
        if self.settled.get() != incarnation {
            self.backing.settle(&self.cid).await?;
            self.settled.set(incarnation);
        }
        Ok(incarnation)
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
                u64::from_be_bytes(value[..].try_into().map_err(|_| self.corrupt("the number of versions"))?)
            }
            None => 0,
        };
        let decode =
            |value: &Bytes| Gone::decode(value).ok_or_else(|| self.corrupt("the forgotten sessions"));
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
        let mut marks = HashMap::new();
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
                // How many results there are is not known; the next trim finds out. A time that the
                // node has not reached is an older version's, or the node has lost its age.
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

    /// The result of a request that may have been carried out before.
    ///
    /// # Errors
    /// [`RequestExpired`](wire::Error::RequestExpired) if that can no longer be told.
    pub(crate) async fn result(&self, origin: &Origin) -> StepResult<Option<Mutated>> {
        let key = key_result(origin.session, origin.seq);
        let found = self.backing.omap_get(&self.cid, &self.meta, vec![key]).await?;
        // Only now: while the result was looked for, it may have been forgotten.
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

    /// A version for a change of an object that has version `last` now.
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

    /// Adds to a transaction what the group has to remember of it, and the removal of what a few
    /// closed sessions have left.
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
            entries.push((key_result(origin.session, origin.seq), encode(result)));
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

    /// Says that the transaction which [`Pg::record`] added to is durable.
    pub(crate) fn recorded(&self, note: MetaNote) {
        let mut state = self.state.borrow_mut();
        if let Some(reserved) = note.reserved {
            // An older one, whose transaction was overtaken, is written over.
            state.reserved_durably = reserved == state.reserved;
        }
        if let Some((session, low_water, active_ms)) = note.marked
            && let Some(mark) = state.marks.get_mut(&session)
            && (mark.low_water, mark.active_ms) == (low_water, active_ms)
        {
            mark.durable = true;
        }
    }

    /// Says that it has failed.
    pub(crate) fn not_recorded(&self, note: MetaNote) {
        let mut state = self.state.borrow_mut();
        if let Some((session, from)) = note.trimmed
            && let Some(mark) = state.marks.get_mut(&session)
        {
            // The results are still there: the next trim takes them, too.
            mark.kept_from = mark.kept_from.min(from);
            mark.untrimmed = TRIM_BATCH;
            mark.results = None;
        }
        state.put_back(note.carried);
    }

    /// Whether the group has results of a session.
    pub(crate) fn knows(&self, session: SessionId) -> bool {
        self.state.borrow().marks.contains_key(&session)
    }

    /// Says that a session's client has closed it: its repeats are refused from now on, and its
    /// results go with the next changes, or when the collector comes by. `living` are the sessions
    /// that may still send repeats.
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

    /// Sessions that the collector is to forget.
    pub(crate) async fn expired(&self, expiry: &Expiry<'_>) -> StepResult<Vec<SessionId>> {
        self.load().await?;
        let now_ms = self.age.ran_ms();
        let state = self.state.borrow();
        let expired = state.marks.iter().filter(|(id, mark)| expiry.includes(**id, mark, now_ms));
        Ok(expired.map(|(id, _)| *id).collect())
    }

    /// Forgets the last ones of `sessions` that are still to be forgotten, in one transaction of
    /// bounded size, and takes them out of the list; returns how many. `living` are the sessions
    /// that may still send repeats.
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
                // Its client may have come back while the results were listed.
                if !expiry.includes(session, known.get(), now_ms) {
                    continue;
                }
                // From here on its repeats are refused, whether the transaction succeeds or not.
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
                // A state that was read again since then says itself what is still there.
                if self.loaded.get() == incarnation {
                    self.state.borrow_mut().put_back(removed);
                }
                Err(e)
            }
        }
    }

    /// The results of the last ones of `sessions`, as many as one transaction may remove. Takes the
    /// sessions out.
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

    /// What is known of an object now, read if need be. To be called in turn.
    pub(crate) async fn info(
        &self,
        oid: &ObjectId,
        object: &ObjectState,
        incarnation: u64,
    ) -> StepResult<Option<ObjectInfo>> {
        if let Some(known) = object.known(incarnation) {
            return Ok(known);
        }
        let info = match self.backing.get_xattr(&self.cid, oid, INFO_XATTR).await {
            Ok(bytes) => {
                let corrupt = || Fail::Refused(wire::Error::Corrupt(format!("information on object {oid}")));
                Some(ObjectInfo::decode(&bytes).ok_or_else(corrupt)?)
            }
            // Reading does not make the collection.
            Err(StoreError::NoSuchObject(_) | StoreError::NoSuchCollection(_)) => None,
            Err(e) => return Err(e.into()),
        };
        object.learn(incarnation, info);
        Ok(info)
    }

    /// Says that a transaction was queued; it is under way until the result is dropped.
    pub(crate) fn committing(&self) -> Committing<'_> {
        let commits = &self.commits;
        let number = commits.next.get();
        commits.next.set(number + 1);
        commits.outstanding.borrow_mut().insert(number);
        Committing { commits, number }
    }

    /// Waits until everything queued so far is durable or has failed.
    pub(crate) async fn all_committed(&self) {
        let end = self.commits.next.get();
        loop {
            let changed = self.commits.changed.notified();
            if self.commits.outstanding.borrow().first().is_none_or(|oldest| *oldest >= end) {
                return;
            }
            changed.await;
        }
    }
}

/// A transaction of a group under way.
pub(crate) struct Committing<'a> {
    commits: &'a OpenCommits,
    number: u64,
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
    /// There are no others.
    all: bool,
}

impl Expiry<'_> {
    fn includes(&self, session: SessionId, mark: &Mark, now_ms: u64) -> bool {
        // Clients of older versions of the node cannot come back with their sessions.
        let of_older_version = session.generation() < SessionId::FIRST_GENERATION;
        let is_idle = now_ms.saturating_sub(mark.active_ms) >= self.idle_ms;
        mark.closed || of_older_version || (is_idle && !(self.alive)(session))
    }
}

impl State {
    /// The mark of a request's session, made if there is none.
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
            // The session has come back. Whatever it sent before it was forgotten has a number
            // below the end of the window that this request is in; of those, repeats without a
            // result are refused.
            let low_water = origin.seq.saturating_add(REQUEST_WINDOW);
            *mark = Mark { low_water, results: None, untrimmed: TRIM_BATCH, ..fresh };
        }
        mark
    }

    /// Takes a few closed sessions out; their marks, and the keys that are to be removed.
    fn take_closed(&mut self) -> (Vec<(SessionId, Mark)>, Vec<Bytes>) {
        let (mut taken, mut keys) = (Vec::new(), Vec::new());
        for _ in 0..CARRIED {
            let Some(session) = self.closed.pop_front() else { break };
            let Entry::Occupied(known) = self.marks.entry(session) else { continue };
            // Not if it has come back.
            let Some(results) = known.get().results.as_ref().filter(|_| known.get().closed) else { continue };
            keys.extend(results.iter().map(|seq| key_result(session, *seq)));
            keys.push(key_session(session));
            taken.push((session, known.remove()));
        }
        (taken, keys)
    }

    /// Takes sessions back whose results are still there after all.
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
    /// Remembers the number of one more result, as long as there are few.
    fn note_result(&mut self, seq: u64) {
        match &mut self.results {
            Some(few) if few.len() < CARRIED_RESULTS => few.push(seq),
            results => *results = None,
        }
    }

    /// Counts one more result; says which results can go, if it is time for that.
    fn trim(&mut self, origin: &Origin) -> Option<(u64, u64)> {
        self.untrimmed += 1;
        let unwanted = origin.acked_through.saturating_add(1).min(origin.seq);
        // An honest client never has its oldest unanswered request further back than that.
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
    // Growing a vector cannot fail, and the types are plain data.
    postcard::to_allocvec(value).expect("plain data can be encoded").into()
}

fn number_value(number: u64) -> Bytes {
    Bytes::copy_from_slice(&number.to_be_bytes())
}

fn key_gone() -> Bytes {
    Bytes::from_static(b"g")
}

/// Older versions of the node had it.
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
