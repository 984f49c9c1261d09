//! A target that is not there.

use crate::{StoreError, StoreFuture, StoreReply, StoreRequest, Submit, ready};

/// Stands for a target that cannot be mounted: every request fails with the reason, so a node with other targets goes
/// on without it.
#[derive(Debug, Clone)]
pub struct AbsentStore {
    why: String,
}

impl AbsentStore {
    /// `why` says what is wrong and what to do.
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
