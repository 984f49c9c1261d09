//! [`RequestContext`]: the head, session and connection of a request.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use messenger::Connection;
use wire::{RequestHead, SessionId};

use crate::authorize::SessionRights;
use crate::config::OsdConfig;

/// Context of a request: its head, session and connection.
pub(crate) struct RequestContext {
    pub(crate) head: RequestHead,
    pub(crate) session: SessionId,
    pub(crate) connection: Arc<dyn Connection>,
    /// The rights of the session.
    pub(crate) rights: Rc<SessionRights>,
}

impl RequestContext {
    /// Returns the maximum time that the request may wait for the store.
    pub(crate) fn patience(&self, config: &OsdConfig) -> Duration {
        match self.head.deadline_ms {
            0 => config.store_patience,
            ms => config.store_patience.min(Duration::from_millis(ms.into())),
        }
    }
}
