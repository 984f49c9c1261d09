//! [`AbsentStore`]: the substitute for the store of a target that cannot be mounted.

use crate::{StoreError, StoreFuture, StoreReply, StoreRequest, Submit, ready};

/// Substitute for the store of a target that cannot be mounted. Requests fail with the reason, so a
/// node with other targets can run without this target. Only requests to release a stage or to
/// unmount the target succeed.
#[derive(Debug, Clone)]
pub struct AbsentStore {
    why: String,
}

impl AbsentStore {
    /// Creates the store. `why` says why the target cannot be mounted and what to do.
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
