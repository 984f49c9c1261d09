//! Placement groups: versions, results of requests, sessions' marks, and the objects in use.
//!
//! A group's own durable state is the omap of one object in its collection, changed by the same transactions as the
//! data:
//!
//! ```text
//! h                                  horizon, ms: sessions made until then and unknown here have expired (8 bytes)
//! r session (16 bytes) seq (8)       result of a request (postcard)
//! s session (16 bytes)               mark of a session (postcard)
//! v                                  versions below that may have been given out (8 bytes)
//! ```

use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;

use bytes::{BufMut, Bytes, BytesMut};
use proto::limits::REQUEST_WINDOW;
use proto::{Mutated, SessionId};
use serde::{Deserialize, Serialize};
use store::{CollectionId, ObjectId, Op, StoreError, Transaction};
use tokio::sync::{Mutex, Notify};

use crate::clock::now_ms;
use crate::fail::{Fail, Step};
use crate::ids;
use crate::object::{INFO_XATTR, ObjectInfo, ObjectState};
use crate::target::Target;

/// Versions are reserved in the store that many at a time.
const VERSION_BATCH: u64 = 1024;
/// Results are trimmed when that many can be at once.
const TRIM_BATCH: u64 = 64;
/// A session's mark is written again when its time is that old, in milliseconds.
const MARK_REFRESH_MS: u64 = 3_600_000;

/// A placement group.
pub(crate) struct Pg {
    pub(crate) target: Rc<Target>,
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
    commits: Commits,
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
    horizon_ms: u64,
    marks: HashMap<SessionId, Mark>,
}

/// A session in this group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Mark {
    /// Results of requests below are gone.
    low_water: u64,
    /// About when the session last changed something here.
    active_ms: u64,
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
struct Commits {
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
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct MetaNote {
    reserved: Option<u64>,
    marked: Option<(SessionId, Mark)>,
    /// Results from that number on are trimmed.
    trimmed: Option<(SessionId, u64)>,
}

impl Pg {
    pub(crate) fn new(target: Rc<Target>, pool: u32, pg: u32, objects_max: usize) -> Pg {
        Pg {
            target,
            cid: ids::collection(pool, pg),
            meta: ids::meta_object(),
            objects: RefCell::default(),
            objects_max,
            loading: Mutex::default(),
            loaded: Cell::new(0),
            settled: Cell::new(0),
            state: RefCell::default(),
            commits: Commits::default(),
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

    /// Reads the group's state if that has not been done in this epoch; makes the collection if there is none.
    pub(crate) async fn load(&self) -> Step<u64> {
        if self.loaded.get() == self.target.epoch() {
            return Ok(self.loaded.get());
        }
        let _one_at_a_time = self.loading.lock().await;
        let epoch = self.target.epoch();
        if self.loaded.get() != epoch {
            let reading = async {
                self.settle().await?;
                self.read_state().await
            };
            let state = reading.await.inspect_err(|e| self.note_loss(e, epoch))?;
            *self.state.borrow_mut() = state;
            self.loaded.set(epoch);
        }
        Ok(epoch)
    }

    /// Makes sure that nothing of an earlier epoch can vanish any more; returns the epoch.
    pub(crate) async fn settle(&self) -> Step<u64> {
        let epoch = self.target.epoch();
        if self.settled.get() != epoch {
            self.target.settle(&self.cid).await?;
            self.settled.set(epoch);
        }
        Ok(epoch)
    }

    fn note_loss(&self, fail: &Fail, epoch: u64) {
        if matches!(fail, Fail::Lost(_)) {
            self.target.lost(epoch);
        }
    }

    async fn read_state(&self) -> Step<State> {
        let store = &self.target.store;
        let fixed = match store.omap_get(&self.cid, &self.meta, vec![key_horizon(), key_versions()]).await {
            Ok(fixed) => fixed,
            Err(e @ (StoreError::NoSuchCollection(_) | StoreError::NoSuchObject(_))) => {
                let mut create = Transaction::new(self.cid.clone());
                if matches!(e, StoreError::NoSuchCollection(_)) {
                    create = create.with(Op::CreateCollection);
                }
                self.target.queue(create.with(Op::Touch { oid: self.meta.clone() })).await?;
                Vec::new()
            }
            Err(e) => return Err(e.into()),
        };
        let number = |key: Bytes| -> Step<u64> {
            let Some((_, value)) = fixed.iter().find(|(k, _)| *k == key) else { return Ok(0) };
            let value: [u8; 8] = value[..].try_into().map_err(|_| self.corrupt("a number"))?;
            Ok(u64::from_be_bytes(value))
        };
        let reserved = number(key_versions())?;
        Ok(State {
            next_version: reserved,
            reserved,
            reserved_durably: true,
            horizon_ms: number(key_horizon())?,
            marks: self.read_marks().await?,
        })
    }

    async fn read_marks(&self) -> Step<HashMap<SessionId, Mark>> {
        let mut marks = HashMap::new();
        let mut from = Bytes::from_static(b"s");
        loop {
            let (page, more) =
                self.target.store.omap_iterate(&self.cid, &self.meta, from.clone(), 1024).await?;
            for (key, value) in &page {
                if key.first() != Some(&b's') {
                    return Ok(marks);
                }
                let session = key[1..].try_into().map_err(|_| self.corrupt("a session's key"))?;
                let mark: Mark = postcard::from_bytes(value).map_err(|_| self.corrupt("a session's mark"))?;
                let session = SessionId(u128::from_be_bytes(session));
                // How many results there are is not known; the next trim finds out.
                marks.insert(session, Mark { durable: true, untrimmed: TRIM_BATCH, ..mark });
            }
            match page.last() {
                Some((last, _)) if more => from = [last, &b"\0"[..]].concat().into(),
                _ => return Ok(marks),
            }
        }
    }

    fn corrupt(&self, what: &str) -> Fail {
        Fail::Refused(proto::Error::Corrupt(format!("{what} of placement group {}", self.cid)))
    }

    /// The result of a request that may have been carried out before.
    ///
    /// # Errors
    /// [`RequestExpired`](proto::Error::RequestExpired) if that can no longer be told.
    pub(crate) async fn result(&self, origin: &Origin) -> Step<Option<Mutated>> {
        let expired = {
            let state = self.state.borrow();
            match state.marks.get(&origin.session) {
                Some(mark) => origin.seq < mark.low_water,
                None => origin.session.made_ms() <= state.horizon_ms,
            }
        };
        if expired {
            return Err(proto::Error::RequestExpired.into());
        }
        let key = key_result(origin.session, origin.seq);
        let found = self.target.store.omap_get(&self.cid, &self.meta, vec![key]).await?;
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

    /// Adds to a transaction what the group has to remember of it.
    pub(crate) fn record(&self, ops: &mut Vec<Op>, origin: Option<&Origin>, result: &Mutated) -> MetaNote {
        let mut state = self.state.borrow_mut();
        let mut entries = Vec::new();
        let mut note = MetaNote::default();
        if !state.reserved_durably {
            note.reserved = Some(state.reserved);
            entries.push((key_versions(), number_value(state.reserved)));
        }
        if let Some(origin) = origin {
            entries.push((key_result(origin.session, origin.seq), encode(result)));
            let mark = state.marks.entry(origin.session).or_insert(Mark {
                low_water: 0,
                active_ms: now_ms(),
                untrimmed: 0,
                kept_from: 0,
                durable: false,
            });
            if let Some((from, to)) = mark.trim(origin) {
                note.trimmed = Some((origin.session, from));
                let (from, to) = (key_result(origin.session, from), key_result(origin.session, to));
                ops.push(Op::OmapRemoveRange { oid: self.meta.clone(), from, to });
            }
            if now_ms().saturating_sub(mark.active_ms) > MARK_REFRESH_MS {
                mark.active_ms = now_ms();
                mark.durable = false;
            }
            if !mark.durable {
                note.marked = Some((origin.session, *mark));
                entries.push((key_session(origin.session), encode(mark)));
            }
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
        if let Some((session, written)) = note.marked
            && let Some(mark) = state.marks.get_mut(&session)
            && (mark.low_water, mark.active_ms) == (written.low_water, written.active_ms)
        {
            mark.durable = true;
        }
    }

    /// Says that it has failed.
    pub(crate) fn not_recorded(&self, note: MetaNote) {
        if let Some((session, from)) = note.trimmed
            && let Some(mark) = self.state.borrow_mut().marks.get_mut(&session)
        {
            // The results are still there: the next trim takes them, too.
            mark.kept_from = mark.kept_from.min(from);
            mark.untrimmed = TRIM_BATCH;
        }
    }

    /// Forgets sessions that have done nothing here since `before_ms` and are not `alive`; returns how many.
    pub(crate) async fn expire_sessions(
        &self,
        before_ms: u64,
        alive: impl Fn(SessionId) -> bool,
    ) -> Step<usize> {
        let epoch = self.load().await?;
        let mut transaction = Transaction::new(self.cid.clone());
        let (expired, horizon) = {
            let state = self.state.borrow();
            let old = |(id, mark): &(&SessionId, &Mark)| mark.active_ms < before_ms && !alive(**id);
            let expired: Vec<SessionId> = state.marks.iter().filter(old).map(|(id, _)| *id).collect();
            let newest = expired.iter().map(|id| id.made_ms()).max().unwrap_or(0);
            (expired, newest.max(state.horizon_ms))
        };
        if expired.is_empty() {
            return Ok(0);
        }
        for id in &expired {
            let (oid, from, to) = (self.meta.clone(), key_result(*id, 0), key_result(*id, u64::MAX));
            transaction.ops.push(Op::OmapRemoveRange { oid, from, to });
        }
        let keys = expired.iter().map(|id| key_session(*id)).collect();
        transaction.ops.push(Op::OmapRemove { oid: self.meta.clone(), keys });
        let entries = vec![(key_horizon(), number_value(horizon))];
        transaction.ops.push(Op::OmapSet { oid: self.meta.clone(), entries });
        {
            // From here on they are unknown, and by the horizon expired, whether the transaction succeeds or not.
            let mut state = self.state.borrow_mut();
            state.horizon_ms = horizon;
            state.marks.retain(|id, _| !expired.contains(id));
        }
        let queued = self.target.queue(transaction).await.map_err(Fail::from);
        queued.inspect_err(|e| self.note_loss(e, epoch))?;
        Ok(expired.len())
    }

    /// What is known of an object now, read if need be. To be called in turn.
    pub(crate) async fn info(
        &self,
        oid: &ObjectId,
        object: &ObjectState,
        epoch: u64,
    ) -> Step<Option<ObjectInfo>> {
        if let Some(known) = object.known(epoch) {
            return Ok(known);
        }
        let info = match self.target.store.get_xattr(&self.cid, oid, INFO_XATTR).await {
            Ok(bytes) => {
                let corrupt = || Fail::Refused(proto::Error::Corrupt(format!("information on object {oid}")));
                Some(ObjectInfo::decode(&bytes).ok_or_else(corrupt)?)
            }
            Err(StoreError::NoSuchObject(_)) => None,
            Err(e) => return Err(e.into()),
        };
        object.learn(epoch, info);
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
    commits: &'a Commits,
    number: u64,
}

impl Drop for Committing<'_> {
    fn drop(&mut self) {
        self.commits.outstanding.borrow_mut().remove(&self.number);
        self.commits.changed.notify_waiters();
    }
}

impl Mark {
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
