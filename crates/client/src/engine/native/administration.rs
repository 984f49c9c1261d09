//! Administrative requests to the control plane of the node.

use base::BoxFuture;
use control::ControlError;
use wire::{AdminReply, AdminRequest};

use super::session::ClientSession;
use crate::engine::{Call, ControlPlane};
use crate::{Error, Result};

/// An administrative request, with its attempts.
pub(super) struct ControlCall<'a> {
    pub(super) session: &'a ClientSession,
    pub(super) plane: &'a dyn ControlPlane,
    pub(super) request: AdminRequest,
    /// Whether an attempt was made, which may have taken effect.
    pub(super) is_repeated: bool,
}

impl Call<AdminReply> for ControlCall<'_> {
    fn attempt(&mut self) -> BoxFuture<'_, Result<AdminReply>> {
        Box::pin(async {
            let endpoint = self.session.control()?;
            let is_repeated = std::mem::replace(&mut self.is_repeated, true);
            let answer = self.plane.administer(endpoint.as_deref(), self.request.clone(), is_repeated).await;
            answer.map_err(|e| match e {
                ControlError::Refused(error) => Error::Node(error),
                other => Error::Control(other),
            })
        })
    }
}
