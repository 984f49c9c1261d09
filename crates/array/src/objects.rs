//! [`Objects`]: the order of the requests on each of a group's objects, and what is known about
//! each object's size.
//!
//! A request gets its place in the queue of its objects when it is submitted. A change then passes
//! three phases:
//!
//! ```text
//!   waiting ──▶ computing: reads old data, computes parity ──▶ queued: the members have its transactions
//! ```
//!
//! A change computes while earlier changes of other rows compute, too, but changes are queued on
//! the members in their order. A change that has a guard is computed while earlier changes are
//! queued and not committed. Its guard makes the members refuse it if an earlier change fails.
//!
//! One member may refuse a change that the other members accept. The fragments of the changed rows
//! then belong to different versions. A change that reads old data therefore waits until earlier
//! changes of its rows have committed: its parity would mix the versions, and the other members
//! would keep it.
//!
//! A read waits until all earlier changes of its rows are queued, because the members' answers then
//! show these changes. Later changes of these rows wait for the read. A read that reconstructs data
//! also waits until the earlier changes have committed ([`ObjectPlace::settled`]). A request that
//! reads data from the members waits until earlier changes of the object's size have ended: if such
//! a change failed, the fragments would not have the expected length. A request that is alone waits
//! for all earlier requests, and all later ones wait for it.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::ops::Range;
use std::rc::Rc;
use std::task::{Poll, Waker};

use base::collections::HashMap;
use store::ObjectId;

use crate::interval::Interval;
use crate::record::ChangeId;

/// Maximum number of objects whose size is cached.
const OBJECTS_MAX: usize = 4096;

/// The part of an object that a request concerns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Rows {
    /// Only metadata.
    Nothing,
    /// The bytes of this range of each fragment.
    Range(Range<u64>),
    /// All data, and the size and the existence of the object.
    All,
}

impl Rows {
    fn overlap(&self, other: &Rows) -> bool {
        match (self, other) {
            (Rows::All, _) | (_, Rows::All) => true,
            (Rows::Nothing, _) | (_, Rows::Nothing) => false,
            (Rows::Range(a), Rows::Range(b)) => a.start < b.end && b.start < a.end,
        }
    }

    /// Whether a request that reads these rows reads data that a change of `changed` changes.
    fn reads_of(&self, changed: &Rows) -> bool {
        *changed != Rows::Nothing && self.overlap(changed)
    }
}

/// What a request does with an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ObjectAccess {
    Read(Rows),
    Change {
        rows: Rows,
        /// Whether the members refuse the change if an earlier change of the object fails.
        has_guard: bool,
        /// Whether the change may need old data.
        reads: bool,
    },
    /// No other request is in progress on the object.
    Alone,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum AccessPhase {
    Waiting,
    Computing,
    Queued,
}

#[derive(Debug)]
struct QueuedAccess {
    access: ObjectAccess,
    phase: AccessPhase,
    /// The change, once it is queued.
    change: Option<ChangeId>,
    /// Whether the change has failed. Its request may still wait for the next interval.
    has_failed: bool,
    waker: Waker,
}

/// The requests in progress on one object, by their numbers, and the object's size.
#[derive(Debug, Default)]
struct ObjectQueue {
    next: Cell<u64>,
    entries: RefCell<BTreeMap<u64, QueuedAccess>>,
    /// Number of the interval in which the size was learnt, and the size that the object has once
    /// all queued changes have committed; `None` if the object does not exist.
    size: Cell<Option<(u64, Option<u64>)>>,
}

impl ObjectQueue {
    /// Whether the request may begin.
    fn may_begin(entries: &BTreeMap<u64, QueuedAccess>, number: u64) -> bool {
        let Some(own) = entries.get(&number) else { return true };
        entries.range(..number).all(|(_, earlier)| match (&own.access, &earlier.access) {
            (ObjectAccess::Alone, _) | (_, ObjectAccess::Alone) => false,
            (ObjectAccess::Read(_), ObjectAccess::Read(_)) => true,
            (ObjectAccess::Read(_), ObjectAccess::Change { rows: Rows::All, .. }) => false,
            (ObjectAccess::Read(rows), ObjectAccess::Change { rows: changed, .. }) => {
                earlier.phase == AccessPhase::Queued || !rows.overlap(changed)
            }
            (ObjectAccess::Change { rows, .. }, ObjectAccess::Read(read)) => !rows.overlap(read),
            (ObjectAccess::Change { rows, has_guard, reads }, ObjectAccess::Change { rows: changed, .. }) => {
                match earlier.phase {
                    // Changes begin in their order. Otherwise a change could hold the gate of the
                    // group while it waits for an earlier one that waits for the gate.
                    AccessPhase::Waiting => false,
                    AccessPhase::Computing => *has_guard && !rows.overlap(changed),
                    AccessPhase::Queued => *has_guard && !(*reads && rows.reads_of(changed)),
                }
            }
        })
    }

    /// Whether no earlier change of the request's rows is in progress.
    fn is_settled(entries: &BTreeMap<u64, QueuedAccess>, number: u64) -> bool {
        let Some(ObjectAccess::Read(own)) = entries.get(&number).map(|own| &own.access) else { return true };
        entries.range(..number).all(|(_, earlier)| match &earlier.access {
            ObjectAccess::Change { rows, .. } => earlier.has_failed || !own.reads_of(rows),
            ObjectAccess::Read(_) | ObjectAccess::Alone => true,
        })
    }

    /// Whether all earlier changes are queued or have ended.
    fn may_queue(entries: &BTreeMap<u64, QueuedAccess>, number: u64) -> bool {
        let is_change = |entry: &QueuedAccess| matches!(entry.access, ObjectAccess::Change { .. });
        entries
            .range(..number)
            .all(|(_, earlier)| !is_change(earlier) || earlier.phase == AccessPhase::Queued)
    }

    /// Wakes the requests that may go on.
    fn wake(&self) {
        let entries = self.entries.borrow();
        for (number, entry) in entries.iter() {
            let goes_on = match entry.phase {
                AccessPhase::Waiting => Self::may_begin(&entries, *number),
                AccessPhase::Computing => Self::may_queue(&entries, *number),
                AccessPhase::Queued => false,
            };
            if goes_on {
                entry.waker.wake_by_ref();
            }
        }
    }
}

/// The place of a request in the queue of an object. Dropping it ends the request.
#[derive(Debug)]
pub(crate) struct ObjectPlace {
    queue: Rc<ObjectQueue>,
    number: u64,
}

impl ObjectPlace {
    async fn wait(&self, until: impl Fn(&BTreeMap<u64, QueuedAccess>, u64) -> bool) {
        poll_fn(|cx| {
            let mut entries = self.queue.entries.borrow_mut();
            if until(&entries, self.number) {
                return Poll::Ready(());
            }
            if let Some(own) = entries.get_mut(&self.number) {
                own.waker.clone_from(cx.waker());
            }
            Poll::Pending
        })
        .await;
    }

    /// Waits until the request may begin.
    pub(crate) async fn begin(&self) {
        self.wait(ObjectQueue::may_begin).await;
    }

    /// Waits until the earlier changes of a read's rows have committed or failed. If one has failed
    /// on some members only, the interval has ended.
    pub(crate) async fn settled(&self) {
        self.wait(ObjectQueue::is_settled).await;
    }

    /// Records that a change has begun, and holds the gate of the group.
    pub(crate) fn computes(&self) {
        self.advance(AccessPhase::Computing);
    }

    /// Waits until the change may be queued, because all earlier changes are.
    pub(crate) async fn may_queue(&self) {
        self.wait(ObjectQueue::may_queue).await;
    }

    /// Records that the change is queued on the members, and gives the object this size; `None` if
    /// it removes the object.
    pub(crate) fn queued(&self, change: ChangeId, interval: &Interval, size: Option<u64>) {
        self.set_size(interval, size);
        self.is_queued(change);
    }

    /// Whether no earlier change of the object is in progress.
    pub(crate) fn is_first_change(&self) -> bool {
        let entries = self.queue.entries.borrow();
        entries.range(..self.number).all(|(_, earlier)| matches!(earlier.access, ObjectAccess::Read(_)))
    }

    fn is_queued(&self, change: ChangeId) {
        let last = self.queue.entries.borrow().values().filter_map(|entry| entry.change).max();
        assert!(last < Some(change), "changes of an object are queued in the order of their ids");
        if let Some(own) = self.queue.entries.borrow_mut().get_mut(&self.number) {
            own.change = Some(change);
        }
        self.advance(AccessPhase::Queued);
    }

    fn advance(&self, phase: AccessPhase) {
        if let Some(own) = self.queue.entries.borrow_mut().get_mut(&self.number) {
            assert!(own.phase < phase, "the phases of a change have an order");
            own.phase = phase;
        }
        self.queue.wake();
    }

    /// Returns the size that the object has once all queued changes have committed, if it was
    /// learnt in this interval. The inner value is `None` if the object does not exist.
    pub(crate) fn size(&self, interval: &Interval) -> Option<Option<u64>> {
        self.queue.size.get().filter(|(learnt, _)| *learnt == interval.number).map(|(_, size)| size)
    }

    pub(crate) fn set_size(&self, interval: &Interval, size: Option<u64>) {
        self.queue.size.set(Some((interval.number, size)));
    }

    /// Records that a change has failed.
    pub(crate) fn failed(&self) {
        self.forget();
        if let Some(own) = self.queue.entries.borrow_mut().get_mut(&self.number) {
            own.has_failed = true;
        }
        self.queue.wake();
    }

    /// Discards the cached size after a failure. The next request asks the members for the size
    /// again.
    pub(crate) fn forget(&self) {
        self.queue.size.set(None);
    }
}

impl Drop for ObjectPlace {
    fn drop(&mut self) {
        self.queue.entries.borrow_mut().remove(&self.number);
        self.queue.wake();
    }
}

/// The queues of a group's objects.
#[derive(Default)]
pub(crate) struct Objects(RefCell<HashMap<ObjectId, Rc<ObjectQueue>>>);

impl Objects {
    /// Gives a request a place in the queue of an object.
    pub(crate) fn enter(&self, oid: &ObjectId, access: ObjectAccess) -> ObjectPlace {
        let queue = self.queue(oid);
        let number = queue.next.get();
        queue.next.set(number + 1);
        let entry = QueuedAccess {
            access,
            phase: AccessPhase::Waiting,
            change: None,
            has_failed: false,
            waker: Waker::noop().clone(),
        };
        queue.entries.borrow_mut().insert(number, entry);
        ObjectPlace { queue, number }
    }

    /// Waits until no other request is in progress on an object.
    pub(crate) async fn alone(&self, oid: &ObjectId) -> ObjectPlace {
        let place = self.enter(oid, ObjectAccess::Alone);
        place.begin().await;
        place
    }

    /// Waits until a read of an object may begin.
    pub(crate) async fn read(&self, oid: &ObjectId, rows: Rows) -> ObjectPlace {
        let place = self.enter(oid, ObjectAccess::Read(rows));
        place.begin().await;
        place
    }

    /// Returns the size of an object, if it is known and no request in progress may change it.
    pub(crate) fn settled_size(&self, oid: &ObjectId, interval: &Interval) -> Option<u64> {
        let objects = self.0.borrow();
        let queue = objects.get(oid)?;
        let (learnt, size) = queue.size.get()?;
        // Even a queued change may still fail.
        let may_resize = |entry: &QueuedAccess| match &entry.access {
            ObjectAccess::Change { rows, .. } => *rows == Rows::All,
            ObjectAccess::Alone => true,
            ObjectAccess::Read(_) => false,
        };
        let is_settled = learnt == interval.number && !queue.entries.borrow().values().any(may_resize);
        size.filter(|_| is_settled)
    }

    fn queue(&self, oid: &ObjectId) -> Rc<ObjectQueue> {
        let mut objects = self.0.borrow_mut();
        if let Some(known) = objects.get(oid) {
            return Rc::clone(known);
        }
        if objects.len() >= OBJECTS_MAX {
            // Evict half of the entries that no request uses.
            let mut keep = false;
            objects.retain(|_, entry| {
                keep = !keep;
                keep || Rc::strong_count(entry) > 1
            });
        }
        Rc::clone(objects.entry(oid.clone()).or_default())
    }
}

#[cfg(test)]
mod tests {
    use std::task::Context;

    use super::*;

    fn oid() -> ObjectId {
        ObjectId::new("o").unwrap()
    }

    fn change(objects: &Objects, rows: Rows, has_guard: bool) -> ObjectPlace {
        objects.enter(&oid(), ObjectAccess::Change { rows, has_guard, reads: true })
    }

    fn read(objects: &Objects, rows: Range<u64>) -> ObjectPlace {
        objects.enter(&oid(), ObjectAccess::Read(Rows::Range(rows)))
    }

    fn begins(place: &ObjectPlace) -> bool {
        is_ready(place.begin())
    }

    fn is_ready(f: impl Future<Output = ()>) -> bool {
        Box::pin(f).as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    fn queue(place: &ObjectPlace, number: u64) {
        place.is_queued(ChangeId { term: 1, number });
    }

    #[test]
    fn changes_of_different_rows_compute_together_and_are_queued_in_their_order() {
        let objects = Objects::default();
        let first = change(&objects, Rows::Range(0..4096), true);
        let second = change(&objects, Rows::Range(4096..8192), true);
        let same = change(&objects, Rows::Range(0..4096), true);
        assert!(begins(&first) && !begins(&second), "changes begin in their order");
        first.computes();
        assert!(begins(&second) && !begins(&same));
        second.computes();
        assert!(!is_ready(second.may_queue()) && is_ready(first.may_queue()));
        assert!(!begins(&same), "the first change of these rows is still computed");
        queue(&first, 1);
        assert!(
            is_ready(second.may_queue()) && !begins(&same),
            "the first change may still fail on one member"
        );
        drop(first);
        assert!(begins(&same), "the second change has other rows");
    }

    #[test]
    fn a_change_that_reads_no_old_data_is_queued_behind_a_change_of_the_same_rows() {
        let objects = Objects::default();
        let access = |reads| ObjectAccess::Change { rows: Rows::Range(0..4096), has_guard: true, reads };
        let first = objects.enter(&oid(), access(false));
        first.computes();
        queue(&first, 1);
        assert!(begins(&objects.enter(&oid(), access(false))));
        assert!(!begins(&objects.enter(&oid(), access(true))));
    }

    #[test]
    fn a_read_that_reconstructs_data_waits_until_the_changes_of_its_rows_have_ended() {
        let objects = Objects::default();
        let (first, other) =
            (change(&objects, Rows::Range(0..4096), true), change(&objects, Rows::Range(4096..8192), true));
        first.computes();
        other.computes();
        queue(&first, 1);
        queue(&other, 2);
        let (reads, again) = (read(&objects, 0..100), read(&objects, 0..100));
        assert!(begins(&reads) && begins(&again) && !is_ready(reads.settled()));
        first.failed();
        assert!(is_ready(reads.settled()), "the change has failed");
        drop(first);
        assert!(is_ready(again.settled()), "the other change has other rows");
    }

    #[test]
    fn a_change_without_a_guard_waits_until_earlier_changes_have_ended() {
        let objects = Objects::default();
        let first = change(&objects, Rows::Nothing, false);
        first.computes();
        queue(&first, 1);
        let second = change(&objects, Rows::Nothing, false);
        assert!(!begins(&second));
        drop(first);
        assert!(begins(&second));
    }

    #[test]
    fn a_read_waits_for_earlier_changes_of_its_rows_to_be_queued() {
        let objects = Objects::default();
        let first = change(&objects, Rows::Range(0..4096), true);
        first.computes();
        let (same, other) = (read(&objects, 0..100), read(&objects, 4096..8192));
        assert!(!begins(&same) && begins(&other));
        queue(&first, 1);
        assert!(begins(&same));
        let later = change(&objects, Rows::Range(0..4096), true);
        drop(first);
        assert!(!begins(&later), "the read must not see a later change");
        drop(same);
        assert!(begins(&later));
    }

    #[test]
    fn a_change_of_everything_waits_for_all_reads_and_blocks_later_ones() {
        let objects = Objects::default();
        let first = read(&objects, 0..100);
        let all = change(&objects, Rows::All, true);
        let later = read(&objects, 4096..8192);
        assert!(begins(&first) && !begins(&all) && !begins(&later));
        drop(first);
        assert!(begins(&all));
        all.computes();
        queue(&all, 1);
        assert!(!begins(&later), "the size is uncertain until the change has committed");
        drop(all);
        assert!(begins(&later));
    }

    #[test]
    fn a_change_that_reads_no_data_is_computed_from_a_size_that_may_not_come() {
        let objects = Objects::default();
        let all = change(&objects, Rows::All, true);
        all.computes();
        queue(&all, 1);
        let access = |reads| ObjectAccess::Change { rows: Rows::Nothing, has_guard: true, reads };
        let without = objects.enter(&oid(), access(false));
        assert!(begins(&without));
        without.computes();
        assert!(!begins(&objects.enter(&oid(), access(true))));
    }

    #[test]
    fn a_request_that_is_alone_waits_for_all_others() {
        let objects = Objects::default();
        let queued = change(&objects, Rows::Nothing, true);
        queued.computes();
        queue(&queued, 1);
        let alone = objects.enter(&oid(), ObjectAccess::Alone);
        let later = read(&objects, 0..100);
        assert!(!begins(&alone) && !begins(&later));
        drop(queued);
        assert!(begins(&alone) && !begins(&later));
        drop(alone);
        assert!(begins(&later));
    }
}
