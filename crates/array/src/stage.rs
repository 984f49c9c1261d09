//! Staged data: data that the members have stored, but that no transaction refers to yet.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use base::block::Payload;
use base::collections::HashMap;
use store::{StageId, StoreCalls, StoreError};

use crate::member_link::MemberLink;

/// A stage of the array: whole stripes on the members, with parity, and the remaining bytes in
/// memory.
pub(crate) struct StagedStripes {
    /// Number of bytes in whole stripes.
    pub(crate) full: u64,
    /// Total number of bytes.
    pub(crate) len: u64,
    /// Number of the interval in which the stage was created.
    pub(crate) interval: u64,
    /// The stage of each member, by position. `None` if the member is unavailable, or if the stage
    /// contains no whole stripe.
    pub(crate) fragments: Vec<Option<FragmentStage>>,
    /// The bytes after the last whole stripe. `None` until the client has sent them.
    pub(crate) tail: RefCell<Option<Payload>>,
}

/// A member's part of staged data. Dropping it releases the member's stage.
pub(crate) struct FragmentStage {
    pub(crate) link: MemberLink,
    pub(crate) id: StageId,
}

impl Drop for FragmentStage {
    fn drop(&mut self) {
        self.link.target.store().stage_release(self.id);
    }
}

/// All stages of a group, by id.
#[derive(Default)]
pub(crate) struct Stages {
    by_id: RefCell<HashMap<StageId, Rc<StagedStripes>>>,
    next: Cell<u64>,
}

impl Stages {
    pub(crate) fn add(&self, staged: StagedStripes) -> StageId {
        let id = StageId(self.next.get());
        self.next.set(id.0 + 1);
        self.by_id.borrow_mut().insert(id, Rc::new(staged));
        id
    }

    /// # Errors
    /// [`StoreError::NoSuchStage`] if no stage has this id.
    pub(crate) fn get(&self, id: StageId) -> store::Result<Rc<StagedStripes>> {
        self.by_id.borrow().get(&id).cloned().ok_or(StoreError::NoSuchStage(id.0))
    }

    pub(crate) fn remove(&self, id: StageId) {
        self.by_id.borrow_mut().remove(&id);
    }
}
