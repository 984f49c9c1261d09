//! A store in place of a target that cannot be mounted.

use crate::{StoreError, StoreFuture, StoreReply, StoreRequest, Submit, ready};

/// A store in place of a target that cannot be mounted. Every request fails with the reason, so a
/// node with other targets can continue without this one.
#[derive(Debug, Clone)]
pub struct AbsentStore {
    why: String,
}

impl AbsentStore {
    /// Creates the store. `why` says what is wrong and what to do.
    #[must_use]
    pub fn new(why: impl Into<String>) -> AbsentStore {
        AbsentStore { why: why.into() }
    }
}

impl Submit for AbsentStore {
    type Reply = StoreFuture;

    fn submit(&self, request: StoreRequest) -> StoreFuture {
        ready(match request {
            StoreRequest::StageRelease { .. } | StoreRequest::Umount => Ok(StoreReply::Done),
            _ => Err(StoreError::Absent(self.why.clone())),
        })
    }
}
