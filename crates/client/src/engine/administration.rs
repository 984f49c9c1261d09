//! Administrative requests: pools, targets and the status of a node.

use tokio::time::Instant;
use wire::{AdminReply, AdminRequest};

use super::BoxCall;

/// Executes administrative requests of operators. An engine offers it through
/// [`Engine::administration`](super::Engine::administration).
pub trait Administration: Send + Sync {
    /// Executes an administrative request. The implementation may refuse some of the requests with
    /// [`Error::Unsupported`](crate::Error::Unsupported).
    fn administer(&self, request: AdminRequest, deadline: Instant) -> BoxCall<'_, AdminReply>;
}
