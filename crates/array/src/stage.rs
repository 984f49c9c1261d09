//! Data on its way to an object of which the members do not know yet.

use std::cell::RefCell;

use base::block::Payload;
use store::{StageId, StoreCalls};

use crate::group::MemberLink;

/// Staged bytes: whole stripes on the members, with their parity, and what is left over here.
pub(crate) struct Staged {
    /// Bytes in whole stripes.
    pub(crate) full: u64,
    /// All bytes.
    pub(crate) len: u64,
    /// Interval of the group in which it was made.
    pub(crate) interval: u64,
    /// By position; `None` where a member is away, or there are no whole stripes.
    pub(crate) fragments: Vec<Option<FragmentStage>>,
    /// What follows the last whole stripe, once it has come.
    pub(crate) tail: RefCell<Option<Payload>>,
}

/// A member's part of it; given back when dropped.
pub(crate) struct FragmentStage {
    pub(crate) link: MemberLink,
    pub(crate) id: StageId,
}

impl Drop for FragmentStage {
    fn drop(&mut self) {
        self.link.target.store().stage_release(self.id);
    }
}
