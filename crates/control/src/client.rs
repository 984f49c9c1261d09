//! [`ControlClient`]: makes the calls of the control plane.

use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use identity::{IdentityError, Protocol, Trust, server_name, server_refused};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};
use wire::{AdminReply, AdminRequest, PoolInfo, PoolLoss};

use crate::calls::{BadAnswer, pool_info, pool_loss};
use crate::proto::node_client::NodeClient;
use crate::proto::pools_client::PoolsClient;
use crate::proto::targets_client::TargetsClient;
use crate::proto::{self};
use crate::refusal::error_in;

/// Time limit for connecting.
const CONNECT_TIME: Duration = Duration::from_secs(5);

/// The reason why a call failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ControlError {
    /// The node has refused the request.
    #[error(transparent)]
    Refused(#[from] wire::Error),
    /// The node does not accept the client's key, or the user has no right to the call.
    #[error("{0}")]
    NotPermitted(String),
    /// The server has proved another identity than that of the node.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The call may or may not have taken effect.
    #[error("the control plane at {endpoint} cannot be reached: {reason}; retry")]
    Unreachable {
        /// The address.
        endpoint: String,
        /// The reason.
        reason: String,
    },
    /// The server's answer is not valid.
    #[error("the answer of the control plane is not valid: {0}; use a program of the node's version")]
    BadAnswer(String),
}

/// A client of the control plane. It connects when it makes the first call, and again after a
/// connection has ended. Any thread with a runtime may use it.
#[derive(Debug)]
pub struct ControlClient {
    trust: Trust,
    /// The current connection, and its address.
    channel: Mutex<Option<(String, Channel)>>,
}

impl ControlClient {
    /// Creates a client that proves the identity of `trust`, and connects to the node that `trust`
    /// names.
    #[must_use]
    pub fn new(trust: Trust) -> ControlClient {
        ControlClient { trust, channel: Mutex::default() }
    }

    /// Executes an administrative request at the control plane with the address `endpoint`
    /// (`host:port`). Makes one attempt. `is_repeated` says whether an earlier attempt may have taken
    /// effect.
    ///
    /// # Errors
    /// If the node refuses the request or cannot be reached.
    pub async fn administer(
        &self,
        endpoint: &str,
        request: AdminRequest,
        is_repeated: bool,
    ) -> Result<AdminReply, ControlError> {
        let channel = self.channel(endpoint).await?;
        let called = call(channel, request, is_repeated).await;
        called.map_err(|e| match e {
            FailedCall::Status(status) => self.failed(endpoint, &status),
            FailedCall::Answer(e) => ControlError::BadAnswer(e.0),
        })
    }

    async fn channel(&self, endpoint: &str) -> Result<Channel, ControlError> {
        let known = self.channel.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some((_, channel)) = known.filter(|(at, _)| at == endpoint) {
            return Ok(channel);
        }
        let unreachable =
            |reason: String| ControlError::Unreachable { endpoint: endpoint.to_owned(), reason };
        let connecting = tokio::time::timeout(CONNECT_TIME, self.connect(endpoint)).await;
        let stream = connecting.map_err(|_| unreachable("it does not answer in time".into()))??;
        let stream = Mutex::new(Some(TokioIo::new(stream)));
        // A channel uses one connection. When it ends, the next call makes another channel.
        let connector = tower::service_fn(move |_| {
            let stream = stream.lock().unwrap_or_else(PoisonError::into_inner).take();
            let gone = || io::Error::from(io::ErrorKind::NotConnected);
            std::future::ready(stream.ok_or_else(gone))
        });
        // The connection exists already, so the address only names it in messages.
        let channel = Endpoint::from_static("http://node").connect_with_connector(connector).await;
        let channel = channel.map_err(|e| unreachable(e.to_string()))?;
        let mut known = self.channel.lock().unwrap_or_else(PoisonError::into_inner);
        *known = Some((endpoint.to_owned(), channel.clone()));
        Ok(channel)
    }

    async fn connect(&self, endpoint: &str) -> Result<TlsStream<TcpStream>, ControlError> {
        let unreachable =
            |e: io::Error| ControlError::Unreachable { endpoint: endpoint.to_owned(), reason: e.to_string() };
        let config = self.trust.client_config(Protocol::Control).ok_or(IdentityError::NoRole("client"))?;
        let stream = TcpStream::connect(endpoint).await.map_err(unreachable)?;
        // Without this option, small messages wait for acknowledgements.
        stream.set_nodelay(true).map_err(unreachable)?;
        let connected = TlsConnector::from(config).connect(server_name(), stream).await;
        connected.map_err(|e| {
            let tls = e.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
            match tls.map(|tls| server_refused(tls, self.trust.server_key())) {
                Some(other @ IdentityError::OtherServer { .. }) => ControlError::Identity(other),
                _ => unreachable(e),
            }
        })
    }

    /// Returns the error for a status, and forgets a connection that has ended.
    fn failed(&self, endpoint: &str, status: &Status) -> ControlError {
        if let Some(error) = error_in(status) {
            return ControlError::Refused(error);
        }
        match status.code() {
            Code::Unauthenticated | Code::PermissionDenied => {
                ControlError::NotPermitted(status.message().to_owned())
            }
            _ => {
                *self.channel.lock().unwrap_or_else(PoisonError::into_inner) = None;
                let reason = format!("{}: {}", status.code().description(), status.message());
                ControlError::Unreachable { endpoint: endpoint.to_owned(), reason }
            }
        }
    }
}

enum FailedCall {
    Status(Status),
    Answer(BadAnswer),
}

impl From<Status> for FailedCall {
    fn from(status: Status) -> FailedCall {
        FailedCall::Status(status)
    }
}

impl From<BadAnswer> for FailedCall {
    fn from(e: BadAnswer) -> FailedCall {
        FailedCall::Answer(e)
    }
}

fn from_json<T: serde::de::DeserializeOwned>(json: &str) -> Result<T, BadAnswer> {
    serde_json::from_str(json).map_err(BadAnswer::of)
}

fn text(name: &[u8]) -> String {
    // The node refuses a name with a replacement character.
    String::from_utf8_lossy(name).into_owned()
}

async fn call(channel: Channel, request: AdminRequest, repeated: bool) -> Result<AdminReply, FailedCall> {
    let mut node = NodeClient::new(channel.clone());
    let mut pools = PoolsClient::new(channel.clone());
    let mut targets = TargetsClient::new(channel);
    Ok(match request {
        AdminRequest::PoolCreate { name, pg_count, redundancy } => {
            let (name, redundancy) = (text(&name), redundancy.to_string());
            pools.create_pool(proto::CreatePoolRequest { name, pg_count, redundancy, repeated }).await?;
            AdminReply::Done
        }
        AdminRequest::PoolList => {
            let answer = pools.list_pools(proto::ListPoolsRequest {}).await?.into_inner();
            let listed: Result<Vec<PoolInfo>, BadAnswer> = answer.pools.into_iter().map(pool_info).collect();
            AdminReply::Pools(listed?)
        }
        AdminRequest::PoolRemove { name, force } => {
            pools.remove_pool(proto::RemovePoolRequest { name: text(&name), force, repeated }).await?;
            AdminReply::Done
        }
        AdminRequest::Scrub { pool, start, repair } => {
            let request = proto::ScrubPoolRequest { name: text(&pool), start, repair };
            let answer = pools.scrub_pool(request).await?.into_inner();
            AdminReply::Scrub(from_json(&answer.json)?)
        }
        AdminRequest::TargetSetOut { index, out } => {
            targets.set_target_out(proto::SetTargetOutRequest { index, out }).await?;
            AdminReply::Done
        }
        AdminRequest::TargetReplace { index, uuid } => {
            let uuid = uuid.to_string();
            targets.replace_target(proto::ReplaceTargetRequest { index, uuid }).await?;
            AdminReply::Done
        }
        AdminRequest::TargetForget { index, accept_loss } => {
            let request = proto::ForgetTargetRequest { index, accept_loss };
            let answer = targets.forget_target(request).await?.into_inner();
            let loss: Result<Vec<PoolLoss>, BadAnswer> = answer.pools.into_iter().map(pool_loss).collect();
            AdminReply::Loss(loss?)
        }
        AdminRequest::SetRebuildRate(bytes_per_second) => {
            node.set_rebuild_rate(proto::SetRebuildRateRequest { bytes_per_second }).await?;
            AdminReply::Done
        }
        AdminRequest::SetCodingMode(mode) => {
            node.set_coding_mode(proto::SetCodingModeRequest { mode: mode.to_string() }).await?;
            AdminReply::Done
        }
        AdminRequest::CollectOrphans { older_than_ms } => {
            let answer = node.collect_orphans(proto::CollectOrphansRequest { older_than_ms }).await?;
            AdminReply::Collected(answer.into_inner().removed)
        }
        AdminRequest::Status => {
            let answer = node.get_status(proto::GetStatusRequest {}).await?.into_inner();
            AdminReply::Status(from_json(&answer.json)?)
        }
        AdminRequest::Usage => {
            let answer = node.get_usage(proto::GetUsageRequest {}).await?.into_inner();
            AdminReply::Usage(from_json(&answer.json)?)
        }
        other => return Err(BadAnswer(format!("this program cannot send {other:?}")).into()),
    })
}
