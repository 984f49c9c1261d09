//! The native engine: a session with an Outboard node.
//!
//! `session` maintains the session across lost connections and restarts of the node. `table` is the
//! session's table of unanswered requests, and `pending` its entries. `routes` decides to which
//! shard of the node a request belongs. `links` has one strand per shard, each of which a `link_task`
//! opens and serves; `opening` connects. A `strand` is a connection, or a part of one of the
//! `shared_connections`. `call` makes the attempts of one request.
//! `chunks` provides the memory that a read offers to the node, and `offered` the data that a
//! change offers. `administration` passes requests of operators to the control plane. `capabilities`
//! has the session's capability. `read_sizes` estimates how much of its memory a read
//! fills.

mod call;
mod capabilities;
mod chunks;
mod link_task;
mod links;
mod offered;
mod opening;
mod pending;
mod read_sizes;
mod routes;
mod session;
mod shared_connections;
mod strand;
mod table;

use std::sync::Arc;

use base::BoxFuture;
use messenger::NetworkStack;
use tokio::time::Instant;
use wire::{
    AdminReply, AdminRequest, List, Listed, Mutated, ObjectReply, ObjectRequest, Query, QueryAnswer, QueryOp,
    Read, ReadFirst, ReplyBody, RequestBody, SessionId, UploadId,
};

use super::administration::AdminCall;
use super::{
    Administration, BoxCall, Capabilities, Capability, ChangeRequest, Engine, EngineLimits, Fencing,
    NO_DESCRIPTORS, OwnerName, ReadReply, ReadRequest, Refused, Sink,
};
use crate::options::ControlWay;
use crate::requests::lacks;
use crate::{Error, Options, Result};
use call::NativeCall;
use chunks::BlockWindow;
use opening::SessionDialer;
use pending::{Answer, Bulk};
use session::ClientSession;
pub use shared_connections::SharedConnections;

/// A session with an Outboard node.
///
/// The engine reconnects by itself and then sends unanswered requests again. Each request takes
/// effect at most once, even if roles of the node restart meanwhile. Dropping the engine ends the
/// session. A task on the runtime on which the engine was connected then tells the node that the
/// session has ended. If that runtime is about to end, call [`close`](Engine::close) first. If the
/// node is not told, it removes the session when the session expires.
pub struct NativeEngine {
    session: ClientSession,
    control: ControlWay,
}

impl std::fmt::Debug for NativeEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NativeEngine").field("session", &self.session.session()).finish_non_exhaustive()
    }
}

impl NativeEngine {
    /// Connects to `host:port`, over the network stack that the options [select](Options::stack).
    /// Must be called on a tokio runtime.
    ///
    /// # Errors
    /// [`Error::Network`] if the node cannot be reached, [`Error::Node`] if it refuses this client.
    pub async fn connect(endpoint: &str, options: &Options) -> Result<NativeEngine> {
        NativeEngine::connect_over(shared_connections::stack(options)?, endpoint, options).await
    }

    /// Connects over the given network stack. Must be called on a tokio runtime, which then runs
    /// the connection.
    ///
    /// # Errors
    /// [`Error::Network`] if the node cannot be reached, [`Error::Node`] if it refuses this client.
    pub async fn connect_over(
        stack: Arc<dyn NetworkStack>,
        endpoint: &str,
        options: &Options,
    ) -> Result<NativeEngine> {
        let control = ControlWay::over_grpc(options);
        NativeEngine::connect_by(SessionDialer::Own(stack), control, endpoint, options).await
    }

    /// Opens a session on connections that it shares with other sessions. Must be called on a tokio
    /// runtime, which then runs the connections that are opened for this session. The options select
    /// no network stack, and name the same identity as the network stack.
    ///
    /// # Errors
    /// [`Error::Network`] if the node cannot be reached, [`Error::Node`] if it refuses this client.
    pub async fn connect_sharing(
        connections: &SharedConnections,
        endpoint: &str,
        options: &Options,
    ) -> Result<NativeEngine> {
        let control = connections.control(options);
        NativeEngine::connect_by(SessionDialer::Shared(connections.clone()), control, endpoint, options).await
    }

    /// Returns the address of the node's control plane, as the node has told it last; `None` if it has none.
    ///
    /// # Errors
    /// [`Error::Closed`] if the engine is closed.
    pub fn control_endpoint(&self) -> Result<Option<String>> {
        self.session.control()
    }

    async fn connect_by(
        dialer: SessionDialer,
        over_grpc: ControlWay,
        endpoint: &str,
        options: &Options,
    ) -> Result<NativeEngine> {
        let control = options.control.clone().unwrap_or(over_grpc);
        let session = ClientSession::open(dialer, endpoint, options.clone(), control.clone()).await?;
        Ok(NativeEngine { session, control })
    }

    fn call<T: Send + 'static>(
        &self,
        request: ObjectRequest,
        bulk: Bulk,
        deadline: Instant,
        finish: fn(Answer) -> Result<T>,
    ) -> BoxCall<'_, T> {
        Box::new(NativeCall::new(&self.session, request, bulk, deadline, finish))
    }
}

impl Engine for NativeEngine {
    fn name(&self) -> &'static str {
        "native"
    }

    fn mutate(&self, request: ChangeRequest, deadline: Instant) -> BoxCall<'_, Mutated> {
        Box::new(NativeCall::change(&self.session, request, deadline, |answer| mutated(answer.body)))
    }

    fn read(&self, request: ReadRequest, deadline: Instant) -> BoxCall<'_, ReadReply> {
        let ReadRequest { name, part, offset, len, if_version, sink, fallbacks } = request;
        let memory = match sink {
            Sink::Bytes => None,
            Sink::Memory(memory) => Some(memory),
            Sink::Descriptor(_) => {
                return Box::new(Refused(|| Error::Unsupported(NO_DESCRIPTORS.into())));
            }
        };
        let mut window = BlockWindow::new(offset, len, memory);
        // The length of other reads is known to be exact.
        if part.is_none() && if_version.is_none() {
            let start = base::block::align_down(offset);
            window = window.with_likely(self.session.likely_size(&name).saturating_sub(start));
        }
        let pushed = window.room > self.session.transfer(&name, part.as_ref()).inline_max;
        let read = Read { name: name.to_wire(), part, offset, len, if_version, sink: None };
        let request = match fallbacks.is_empty() {
            true => ObjectRequest::Read(read),
            false => ObjectRequest::ReadFirst(ReadFirst { read, fallbacks }),
        };
        self.call(request, Bulk::Read { window, pushed }, deadline, |answer| {
            let (len, chunks) = (answer.len, answer.data);
            match answer.body {
                ReplyBody::Object(ObjectReply::Read { version, object_size, .. }) => {
                    Ok(ReadReply::Data { found: 0, version, object_size, len, chunks })
                }
                ReplyBody::Object(ObjectReply::ReadFirst { found, version, object_size, .. }) => {
                    Ok(ReadReply::Data { found: found as usize, version, object_size, len, chunks })
                }
                ReplyBody::Object(ObjectReply::Striped { version, manifest }) => {
                    manifest.check()?;
                    Ok(ReadReply::Striped { version, manifest })
                }
                other => Err(unexpected(&other)),
            }
        })
    }

    fn query(&self, request: Query, deadline: Instant) -> BoxCall<'_, Vec<QueryAnswer>> {
        if let Err(e) = request.check() {
            return Box::new(Refused(move || e.clone().into()));
        }
        if request.ops.iter().any(QueryOp::needs_extents) && !self.session.can_query_extents() {
            let what = lacks(self, Capability::Extents);
            return Box::new(Refused(move || Error::Unsupported(what.clone())));
        }
        self.call(ObjectRequest::Query(request), Bulk::None, deadline, |answer| match answer.body {
            ReplyBody::Object(ObjectReply::Queried(answers)) => Ok(answers),
            other => Err(unexpected(&other)),
        })
    }

    fn list(&self, request: List, deadline: Instant) -> BoxCall<'_, Listed> {
        self.call(ObjectRequest::List(request), Bulk::None, deadline, |answer| match answer.body {
            ReplyBody::Object(ObjectReply::Listed(listed)) => Ok(listed),
            other => Err(unexpected(&other)),
        })
    }

    fn next_upload(&self) -> Result<UploadId> {
        self.session.next_upload()
    }

    fn limits(&self) -> EngineLimits {
        EngineLimits::PROTOCOL
    }

    fn capabilities(&self) -> Capabilities {
        let (owners, extents) = (self.session.supports_owners(), self.session.can_query_extents());
        let offered = [
            (Capability::Fence, owners),
            (Capability::SameGroup, owners),
            (Capability::Inherit, owners),
            (Capability::Extents, extents),
        ];
        let add =
            |all: Capabilities, (capability, is_offered)| if is_offered { all.with(capability) } else { all };
        offered.into_iter().fold(Capabilities::NONE, add)
    }

    fn fencing(&self) -> Option<&dyn Fencing> {
        self.session.supports_owners().then_some(self)
    }

    fn administration(&self) -> Option<&dyn Administration> {
        Some(self)
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(self.session.close())
    }
}

impl Administration for NativeEngine {
    fn administer(&self, request: AdminRequest, _: Instant) -> BoxCall<'_, AdminReply> {
        Box::new(AdminCall::new(&*self.control.0, || self.session.control(), request))
    }
}

impl Fencing for NativeEngine {
    fn owner(&self) -> Result<OwnerName> {
        OwnerName::from_bytes(self.session.owner()?.0.to_be_bytes().to_vec())
    }

    fn fence(&self, owner: &OwnerName, deadline: Instant) -> BoxCall<'_, ()> {
        let Ok(id) = <[u8; 16]>::try_from(&owner.as_bytes()[..]) else {
            return Box::new(Refused(|| Error::Argument("this is no name of a session with a node".into())));
        };
        let body = RequestBody::Fence { session: SessionId(u128::from_be_bytes(id)) };
        Box::new(NativeCall::new(&self.session, body, Bulk::None, deadline, |answer| match answer.body {
            ReplyBody::Fenced => Ok(()),
            other => Err(unexpected(&other)),
        }))
    }
}

/// Returns the error for an answer of the wrong kind.
fn unexpected(body: &ReplyBody) -> Error {
    Error::Protocol(format!("unexpected answer {body:?}"))
}

/// Returns the result of a change. The node may have executed the change even if its answer is of
/// the wrong kind.
fn mutated(body: ReplyBody) -> Result<Mutated> {
    match body {
        ReplyBody::Object(ObjectReply::Mutated(mutated)) => Ok(mutated),
        other => Err(unexpected(&other).of_unknown_outcome()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_has_an_unknown_outcome_if_its_answer_is_of_the_wrong_kind() {
        let done = Mutated { version: 7, size: 3, appended_at: 0 };
        assert_eq!(mutated(ReplyBody::Object(ObjectReply::Mutated(done))).unwrap(), done);
        let error = mutated(ReplyBody::Object(ObjectReply::Queried(vec![]))).unwrap_err();
        assert!(error.may_have_taken_effect(), "{error}");
        assert!(error.to_string().contains("unexpected answer"), "{error}");
    }
}
