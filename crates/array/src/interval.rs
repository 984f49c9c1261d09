//! [`Interval`]: a period in which the same members of a group take part in transactions.
//! [`Intervals`] keeps track of a group's current interval.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use store::StoreError;
use tokio::sync::{Mutex, MutexGuard};
use tokio::time::Instant;
use uuid::Uuid;

use crate::member::Member;
use crate::member_link::MemberLink;
use crate::record::{ChangeId, GroupRecord, Standing};

/// Pause after a failed attempt to open an interval, before the next attempt with the same targets.
const REFUSED_FOR: Duration = Duration::from_millis(20);
/// The pause if a salvage failed after it had changed objects, for example because a member has too little
/// space.
const SALVAGE_FAILED_FOR: Duration = Duration::from_secs(1);

/// A period in which the same members of a group take part in transactions.
pub struct Interval {
    /// See [`Group::number`](crate::Group::number).
    pub(crate) number: u64,
    /// Members in sync, by position. `None` for a member that is not in sync.
    pub(crate) links: Vec<Option<MemberLink>>,
    pub(crate) record: GroupRecord,
    /// The changes that were undone when the interval began.
    pub(crate) undone: BTreeSet<ChangeId>,
    /// Targets that are not members, but still store data of the group that is no longer needed.
    pub(crate) leftovers: RefCell<Vec<Rc<dyn Member>>>,
}

impl Interval {
    /// The target of the member at a position.
    pub fn target(&self, position: usize) -> Uuid {
        self.record.members[position].target
    }

    /// Returns true if at least `needed` members in sync remain without the target `uuid`, or if
    /// the target is not a member in sync.
    pub fn can_spare(&self, uuid: Uuid, needed: usize) -> bool {
        let others = self.links.iter().flatten().filter(|link| link.target.uuid() != uuid).count();
        others >= needed || self.links.iter().flatten().count() == others
    }

    /// Returns true if a target is a member that is not in sync.
    pub fn lacks_target(&self, uuid: Uuid) -> bool {
        self.record.members.iter().any(|m| m.target == uuid && m.standing != Standing::InSync)
    }

    /// Returns true if all members are in sync.
    pub fn is_whole(&self) -> bool {
        self.links.iter().all(Option::is_some)
    }
}

/// A failed attempt to open the next interval.
struct OpeningFailure {
    /// Number of the interval that could not be opened.
    number: u64,
    /// Time before which the group does not try to open the interval again.
    until: Instant,
    error: StoreError,
}

/// The intervals of a group.
#[derive(Default)]
pub(crate) struct Intervals {
    /// The newest interval, which may have ended.
    latest: RefCell<Option<Rc<Interval>>>,
    /// Number of intervals that ended by a call of [`Intervals::end`].
    ended: Cell<u64>,
    refusal: RefCell<Option<OpeningFailure>>,
    /// Locked while an interval is opened, and while members receive a new membership record.
    opening: Mutex<()>,
    has_opening_task: Cell<bool>,
}

impl Intervals {
    /// The newest interval, which may have ended.
    pub(crate) fn latest(&self) -> Option<Rc<Interval>> {
        self.latest.borrow().clone()
    }

    pub(crate) fn begin(&self, interval: Interval) {
        *self.latest.borrow_mut() = Some(Rc::new(interval));
    }

    /// Number of intervals that the group itself has ended, by calls of [`Intervals::end`].
    pub(crate) fn ended(&self) -> u64 {
        self.ended.get()
    }

    /// Counts one more interval as ended. This changes the result of
    /// [`Group::number`](crate::Group::number).
    pub(crate) fn end(&self) {
        self.ended.set(self.ended.get() + 1);
    }

    /// Prevents other tasks from opening intervals or distributing membership records, until the
    /// returned guard is dropped.
    pub(crate) async fn lock(&self) -> MutexGuard<'_, ()> {
        self.opening.lock().await
    }

    /// Records that interval `number` could not be opened, and why.
    pub(crate) fn refuse(&self, number: u64, error: StoreError) {
        let is_disconnected = matches!(error, StoreError::Disconnected(_));
        let pause = if is_disconnected { REFUSED_FOR } else { SALVAGE_FAILED_FOR };
        *self.refusal.borrow_mut() = Some(OpeningFailure { number, until: Instant::now() + pause, error });
    }

    /// Returns the error of a recent failed attempt to open interval `number`. Returns `None` if
    /// the caller may try to open it.
    pub(crate) fn refusal(&self, number: u64) -> Option<StoreError> {
        let refusal = self.refusal.borrow();
        let refusal = refusal.as_ref().filter(|r| r.number == number && Instant::now() < r.until)?;
        Some(refusal.error.clone())
    }

    /// Tries to become the only task that opens an interval. Returns true on success.
    pub(crate) fn claim_opening_task(&self) -> bool {
        !self.has_opening_task.replace(true)
    }

    /// Allows another task to open an interval.
    pub(crate) fn release_opening_task(&self) {
        self.has_opening_task.set(false);
    }
}

/// The error of a request whose interval has ended.
pub(crate) fn over(number: u64) -> StoreError {
    StoreError::Disconnected(format!("interval {number} of the group has ended"))
}
