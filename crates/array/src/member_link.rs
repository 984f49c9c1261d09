//! [`MemberLink`]: a member, and the incarnation of its store that a group's calls refer to.

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
    /// Creates a link to a target in the current incarnation of its store.
    pub(crate) fn new(target: Rc<dyn Member>) -> MemberLink {
        let incarnation = target.store().incarnation();
        MemberLink { target, incarnation }
    }

    /// Fails if the incarnation of the target's store has changed since this link was created. In
    /// that case, the store may have executed an earlier call twice, and the answer to that call
    /// may show data that was not durable.
    pub(crate) fn still(&self) -> store::Result<()> {
        if self.target.store().incarnation() == self.incarnation {
            return Ok(());
        }
        Err(StoreError::Disconnected(
            "the target's store began a new incarnation, so its answer may be outdated".into(),
        ))
    }

    /// The error that an object's fragment on this target is corrupt.
    pub(crate) fn corrupt(&self, oid: &ObjectId, detail: String) -> StoreError {
        StoreError::Corrupt { what: format!("object {oid} on target {}", self.target.uuid()), detail }
    }

    /// Marks the target as failed, because of the error `e` of a call through this link.
    pub(crate) fn fail(&self, e: &StoreError) {
        self.target.fail(self.incarnation, e);
    }

    /// Classifies an error of a call on this member. Returns a refusal or a lost connection
    /// unchanged. Any other error means that the target has failed. In that case, the interval
    /// ends, and the caller retries without the target.
    pub(crate) fn classified(&self, e: StoreError) -> StoreError {
        if is_refusal(&e) || matches!(e, StoreError::Disconnected(_)) {
            return e;
        }
        self.fail(&e);
        StoreError::Disconnected(e.to_string())
    }

    /// Classifies an error of a read on this member. Like [`classified`](Self::classified), but an I/O
    /// error or damage concerns only the data that was to be read.
    pub(crate) fn classified_read(&self, e: StoreError) -> StoreError {
        match e {
            StoreError::Io(_) | StoreError::Corrupt { .. } => e,
            e => self.classified(e),
        }
    }
}

/// Returns true if the member refused the request, as opposed to having failed.
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
            | E::GuardFailed(_)
    )
}
