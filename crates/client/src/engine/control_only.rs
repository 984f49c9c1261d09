//! [`ControlEngine`]: administers a node over its control plane, without a session.

use base::BoxFuture;
use tokio::time::Instant;
use wire::{AdminReply, AdminRequest, List, Listed, Mutated, Query, QueryAnswer, UploadId};

use super::administration::AdminCall;
use super::{
    Administration, BoxCall, Capabilities, ChangeRequest, Engine, EngineLimits, ReadReply, ReadRequest,
    Refused,
};
use crate::options::ControlWay;
use crate::{Error, Options, Result};

/// A function that returns the current address of a node's control plane.
type FindControl = Box<dyn Fn() -> Option<String> + Send + Sync>;

/// An engine for operators who know the address of the control plane. It opens no session on the data
/// path, so it refuses all requests about objects.
pub struct ControlEngine {
    plane: ControlWay,
    find: FindControl,
}

impl ControlEngine {
    /// Creates an engine for the node whose control plane is at the address that `find` returns.
    /// Each attempt of a request asks again, because the address may change when the osd restarts.
    pub fn new(
        options: &Options,
        find: impl Fn() -> Option<String> + Send + Sync + 'static,
    ) -> ControlEngine {
        ControlEngine {
            plane: options.control.clone().unwrap_or_else(|| ControlWay::over_grpc(options)),
            find: Box::new(find),
        }
    }
}

impl std::fmt::Debug for ControlEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ControlEngine").field("control", &(self.find)()).finish_non_exhaustive()
    }
}

fn no_objects() -> Error {
    Error::Unsupported("the client only administers the node; open a session to access objects".into())
}

impl Engine for ControlEngine {
    fn name(&self) -> &'static str {
        "control"
    }

    fn mutate(&self, _: ChangeRequest, _: Instant) -> BoxCall<'_, Mutated> {
        Box::new(Refused(no_objects))
    }

    fn read(&self, _: ReadRequest, _: Instant) -> BoxCall<'_, ReadReply> {
        Box::new(Refused(no_objects))
    }

    fn query(&self, _: Query, _: Instant) -> BoxCall<'_, Vec<QueryAnswer>> {
        Box::new(Refused(no_objects))
    }

    fn list(&self, _: List, _: Instant) -> BoxCall<'_, Listed> {
        Box::new(Refused(no_objects))
    }

    fn next_upload(&self) -> Result<UploadId> {
        Err(no_objects())
    }

    fn limits(&self) -> EngineLimits {
        EngineLimits::PROTOCOL
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::NONE
    }

    fn administration(&self) -> Option<&dyn Administration> {
        Some(self)
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }
}

impl Administration for ControlEngine {
    fn administer(&self, request: AdminRequest, _: Instant) -> BoxCall<'_, AdminReply> {
        Box::new(AdminCall::new(&*self.plane.0, || Ok((self.find)()), request))
    }
}
