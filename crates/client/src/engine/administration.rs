//! Administrative requests: pools, targets and the status of a node.

use base::BoxFuture;
use control::{ControlClient, ControlError};
use tokio::time::Instant;
use wire::{AdminReply, AdminRequest};

use super::{BoxCall, Call};
use crate::{Error, Result};

/// Executes administrative requests of operators. An engine offers it through
/// [`Engine::administration`](super::Engine::administration).
pub trait Administration: Send + Sync {
    /// Executes an administrative request. The implementation may refuse some of the requests with
    /// [`Error::Unsupported`](crate::Error::Unsupported).
    fn administer(&self, request: AdminRequest, deadline: Instant) -> BoxCall<'_, AdminReply>;
}

/// The way to a node's control plane. [`ControlClient`] uses gRPC; a simulation has its own way.
pub trait ControlPlane: Send + Sync {
    /// Makes one attempt of an administrative request. `endpoint` is the address of the control plane,
    /// if the node has told one. `is_repeated` says whether an earlier attempt may have taken effect.
    fn administer<'a>(
        &'a self,
        endpoint: Option<&'a str>,
        request: AdminRequest,
        is_repeated: bool,
    ) -> BoxFuture<'a, Result<AdminReply, ControlError>>;
}

impl ControlPlane for ControlClient {
    fn administer<'a>(
        &'a self,
        endpoint: Option<&'a str>,
        request: AdminRequest,
        is_repeated: bool,
    ) -> BoxFuture<'a, Result<AdminReply, ControlError>> {
        let Some(endpoint) = endpoint else {
            return Box::pin(std::future::ready(Err(ControlError::NotOffered)));
        };
        Box::pin(self.administer(endpoint, request, is_repeated))
    }
}

/// The control plane of an osd in the same process, for tests, simulations and measurements. The
/// function executes a request of the process itself. Its second argument says whether an earlier
/// attempt may have taken effect.
pub struct InProcess<F>(pub F);

impl<F> ControlPlane for InProcess<F>
where
    F: Fn(AdminRequest, bool) -> BoxFuture<'static, wire::Result<AdminReply>> + Send + Sync,
{
    fn administer<'a>(
        &'a self,
        _: Option<&'a str>,
        request: AdminRequest,
        is_repeated: bool,
    ) -> BoxFuture<'a, Result<AdminReply, ControlError>> {
        let administered = (self.0)(request, is_repeated);
        Box::pin(async { Ok(administered.await?) })
    }
}

/// An administrative request, with its attempts. `find` returns the address of the control plane, and is
/// called for each attempt.
pub(super) struct AdminCall<'a, F> {
    plane: &'a dyn ControlPlane,
    find: F,
    request: AdminRequest,
    /// Whether an attempt was made, which may have taken effect.
    is_repeated: bool,
    /// Why the last attempt did not reach the control plane.
    obstacle: Option<String>,
}

impl<'a, F> AdminCall<'a, F> {
    pub(super) fn new(plane: &'a dyn ControlPlane, find: F, request: AdminRequest) -> AdminCall<'a, F> {
        AdminCall { plane, find, request, is_repeated: false, obstacle: None }
    }
}

impl<F> Call<AdminReply> for AdminCall<'_, F>
where
    F: Fn() -> Result<Option<String>> + Send + Sync,
{
    fn attempt(&mut self) -> BoxFuture<'_, Result<AdminReply>> {
        Box::pin(async {
            let endpoint = (self.find)()?;
            let is_repeated = std::mem::replace(&mut self.is_repeated, true);
            let answer = self.plane.administer(endpoint.as_deref(), self.request.clone(), is_repeated).await;
            answer.map_err(|e| match e {
                ControlError::Refused(error) => Error::Node(error),
                other => {
                    self.obstacle = Some(other.to_string());
                    Error::Control(other)
                }
            })
        })
    }

    fn obstacle(&self) -> Option<String> {
        self.obstacle.clone()
    }
}
