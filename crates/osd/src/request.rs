//! [`RequestContext`]: what surrounds the body of a request.

use std::sync::Arc;
use std::time::Duration;

use messenger::Connection;
use wire::{RequestHead, SessionId};

use crate::config::OsdConfig;

/// A request's surroundings.
pub(crate) struct RequestContext {
    pub(crate) head: RequestHead,
    pub(crate) session: SessionId,
    pub(crate) connection: Arc<dyn Connection>,
}

impl RequestContext {
    /// How long the store may be waited for on behalf of the request.
    pub(crate) fn patience(&self, config: &OsdConfig) -> Duration {
        match self.head.deadline_ms {
            0 => config.store_patience,
            ms => config.store_patience.min(Duration::from_millis(ms.into())),
        }
    }
}
