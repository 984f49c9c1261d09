//! [`MemberLink`]: a member and the incarnation of its store to which a group's calls belong.

use std::rc::Rc;

use store::{ObjectId, StoreError};

use crate::member::Member;

/// A member in one incarnation of its target's store.
#[derive(Clone)]
pub(crate) struct MemberLink {
    pub(crate) target: Rc<dyn Member>,
    pub(crate) incarnation: u64,
}

impl MemberLink {
    /// A link to a target in the incarnation that its store has now.
    pub(crate) fn new(target: Rc<dyn Member>) -> MemberLink {
        let incarnation = target.store().incarnation();
        MemberLink { target, incarnation }
    }

    /// Fails if the store of the target has another incarnation: it may have repeated the call, and
    /// have answered from data that is not durable.
    pub(crate) fn still(&self) -> store::Result<()> {
        if self.target.store().incarnation() == self.incarnation {
            return Ok(());
        }
        Err(StoreError::Disconnected("the target's store has another incarnation".into()))
    }

    /// The error that the fragment of an object on this target is corrupt.
    pub(crate) fn corrupt(&self, oid: &ObjectId, detail: String) -> StoreError {
        StoreError::Corrupt { what: format!("object {oid} on target {}", self.target.uuid()), detail }
    }

    /// Classifies an error of a call on this member. A refusal and a lost connection stay as they
    /// are. After any other error the target has failed: the interval is over, and the caller tries
    /// again without the target.
    pub(crate) fn classified(&self, e: StoreError) -> StoreError {
        if is_refusal(&e) || matches!(e, StoreError::Disconnected(_)) {
            return e;
        }
        self.target.fail(&e);
        StoreError::Disconnected(e.to_string())
    }
}

/// Whether a member has refused a request, rather than failed.
pub(crate) fn is_refusal(e: &StoreError) -> bool {
    use StoreError as E;
    matches!(
        e,
        E::NoSuchObject(_)
            | E::NoSuchXattr(_)
            | E::NoSuchCollection(_)
            | E::Exists(_)
            | E::NotEmpty(_)
            | E::NoSpace { .. }
            | E::InvalidArgument(_)
            | E::TooLarge { .. }
            | E::BadPayload(_)
            | E::NoSuchStage(_)
    )
}
