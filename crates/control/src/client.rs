//! [`ControlClient`]: makes the calls of the control plane.

use std::io;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use base::thread::ThreadClass;
use futures::future::BoxFuture;
use hyper_util::rt::TokioIo;
use identity::{IdentityError, Protocol, Trust, server_name, server_refused};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};
use wire::{AccountRequest, AdminReply, AdminRequest, Error, PoolInfo, PoolLoss, UserInfo};

use crate::calls::{
    BadAnswer, faults, pool_info, pool_loss, session_info, stripe_unit, tenant_info, user_info,
};
use crate::disks::call_disks;
use crate::gateway_orders::GatewayOrders;
use crate::proto::accounts_client::AccountsClient;
use crate::proto::capabilities_client::CapabilitiesClient;
use crate::proto::debug_client::DebugClient;
use crate::proto::node_client::NodeClient;
use crate::proto::pools_client::PoolsClient;
use crate::proto::sessions_client::SessionsClient;
use crate::proto::targets_client::TargetsClient;
use crate::proto::{self};
use crate::refusal::error_in;
use crate::server::KEEPALIVE;

/// Time limit for connecting.
const CONNECT_TIME: Duration = Duration::from_secs(5);

/// Time after the last call after which a client closes its connection.
const IDLE_TIME: Duration = Duration::from_secs(1);

fn lock(kept: &Mutex<KeptChannel>) -> MutexGuard<'_, KeptChannel> {
    // No code panics while it holds the mutex.
    kept.lock().unwrap_or_else(PoisonError::into_inner)
}

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
    /// The node has not told the address of a control plane.
    #[error("the node has no control plane; use a node of this program's version")]
    NotOffered,
    /// The client cannot connect from the local address that it was given.
    #[error("{0}; choose an address of this machine with which the endpoint can be reached")]
    LocalAddress(String),
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
    source: Option<IpAddr>,
    kept: Arc<Mutex<KeptChannel>>,
}

/// The connection that the next call uses.
#[derive(Debug, Default)]
struct KeptChannel {
    /// The connection, and its address.
    channel: Option<(String, Channel)>,
    /// Number of calls so far.
    calls: u64,
}

impl ControlClient {
    /// Creates a client that proves the identity of `trust`, and connects to the node that `trust`
    /// names.
    #[must_use]
    pub fn new(trust: Trust) -> ControlClient {
        ControlClient { trust, source: None, kept: Arc::default() }
    }

    /// Sets the local address from which the client connects; `None` lets the operating system choose
    /// one.
    #[must_use]
    pub fn connecting_from(self, source: Option<IpAddr>) -> ControlClient {
        ControlClient { source, ..self }
    }

    /// Executes an administrative request at the control plane with the address `endpoint`
    /// (`host:port`). Makes one attempt. `is_repeated` says whether an earlier attempt may have taken
    /// effect.
    ///
    /// # Errors
    /// If the node refuses the request or cannot be reached.
    pub fn administer<'a>(
        &'a self,
        endpoint: &'a str,
        request: AdminRequest,
        is_repeated: bool,
    ) -> BoxFuture<'a, Result<AdminReply, ControlError>> {
        // The future is boxed, so that its code is generated only in this crate.
        Box::pin(async move {
            let channel = self.channel(endpoint).await?;
            let called = call(channel, request, is_repeated).await;
            self.close_when_idle();
            called.map_err(|e| match e {
                FailedCall::Status(status) => self.failed(endpoint, &status),
                FailedCall::Answer(e) => ControlError::BadAnswer(e.0),
                FailedCall::Refused(e) => ControlError::Refused(e),
            })
        })
    }

    /// Connects to the control plane with the address `endpoint` (`host:port`) as the gateway `name` of the
    /// client's tenant. The connection serves nothing else, and stays open. Both sides notice within 30 s
    /// that the other side is dead.
    ///
    /// # Errors
    /// If the node refuses the gateway or cannot be reached.
    pub fn serve_gateway<'a>(
        &'a self,
        endpoint: &'a str,
        name: &'a str,
    ) -> BoxFuture<'a, Result<GatewayOrders, ControlError>> {
        Box::pin(async move {
            let channel = self.open(endpoint).await?;
            let began = tokio::time::timeout(CONNECT_TIME, GatewayOrders::begin(channel, endpoint, name));
            match began.await {
                Ok(began) => began.map_err(|status| error_of(endpoint, &status)),
                Err(_) => Err(ControlError::Unreachable {
                    endpoint: endpoint.to_owned(),
                    reason: "it does not answer in time".into(),
                }),
            }
        })
    }

    /// Closes the connection if no call follows soon. A node serves few connections of the control
    /// plane at a time, and a client of the data path needs one only once in a while.
    fn close_when_idle(&self) {
        let calls = {
            let mut kept = lock(&self.kept);
            kept.calls += 1;
            kept.calls
        };
        let kept = Arc::downgrade(&self.kept);
        base::task::spawn(ThreadClass::Client, async move {
            tokio::time::sleep(IDLE_TIME).await;
            let Some(kept) = kept.upgrade() else { return };
            let mut kept = lock(&kept);
            if kept.calls == calls {
                kept.channel = None;
            }
        });
    }

    /// Returns a connection to the control plane with the address `endpoint` (`host:port`), for the
    /// calls that are no administrative requests: those of the health service and of reflection.
    ///
    /// # Errors
    /// If the node cannot be reached, or has another identity.
    pub async fn channel(&self, endpoint: &str) -> Result<Channel, ControlError> {
        let known = lock(&self.kept).channel.clone();
        if let Some((_, channel)) = known.filter(|(at, _)| at == endpoint) {
            return Ok(channel);
        }
        let channel = self.open(endpoint).await?;
        lock(&self.kept).channel = Some((endpoint.to_owned(), channel.clone()));
        Ok(channel)
    }

    /// Opens another connection to the control plane.
    async fn open(&self, endpoint: &str) -> Result<Channel, ControlError> {
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
        let node = Endpoint::from_static("http://node")
            .http2_keep_alive_interval(KEEPALIVE.0)
            .keep_alive_timeout(KEEPALIVE.1);
        node.connect_with_connector(connector).await.map_err(|e| unreachable(e.to_string()))
    }

    async fn connect(&self, endpoint: &str) -> Result<TlsStream<TcpStream>, ControlError> {
        let unreachable =
            |e: io::Error| ControlError::Unreachable { endpoint: endpoint.to_owned(), reason: e.to_string() };
        let config = self.trust.client_config(Protocol::Control).ok_or(IdentityError::NoRole("client"))?;
        let stream = base::dial::tcp(endpoint, self.source).await.map_err(|e| match e.kind() {
            io::ErrorKind::AddrNotAvailable if self.source.is_some() => {
                ControlError::LocalAddress(e.to_string())
            }
            _ => unreachable(e),
        })?;
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
        let error = error_of(endpoint, status);
        if matches!(error, ControlError::Unreachable { .. }) {
            lock(&self.kept).channel = None;
        }
        error
    }
}

/// Returns the error for a status.
pub(crate) fn error_of(endpoint: &str, status: &Status) -> ControlError {
    if let Some(error) = error_in(status) {
        return ControlError::Refused(error);
    }
    match status.code() {
        Code::Unauthenticated | Code::PermissionDenied => {
            ControlError::NotPermitted(status.message().to_owned())
        }
        _ => {
            let reason = format!("{}: {}", status.code().description(), status.message());
            ControlError::Unreachable { endpoint: endpoint.to_owned(), reason }
        }
    }
}

pub(crate) enum FailedCall {
    Status(Status),
    Answer(BadAnswer),
    /// The client cannot make the call.
    Refused(Error),
}

impl From<Error> for FailedCall {
    fn from(e: Error) -> FailedCall {
        FailedCall::Refused(e)
    }
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
    let mut targets = TargetsClient::new(channel.clone());
    Ok(match request {
        AdminRequest::PoolCreate { name, pg_count, redundancy, tenant } => {
            pools
                .create_pool(proto::CreatePoolRequest {
                    name: text(&name),
                    pg_count,
                    redundancy: redundancy.to_string(),
                    repeated,
                    stripe_unit: stripe_unit(&redundancy),
                    tenant,
                })
                .await?;
            AdminReply::Done
        }
        AdminRequest::PoolList { tenant } => {
            let answer = pools.list_pools(proto::ListPoolsRequest { tenant }).await?.into_inner();
            let listed: Result<Vec<PoolInfo>, BadAnswer> = answer.pools.into_iter().map(pool_info).collect();
            AdminReply::Pools(listed?)
        }
        AdminRequest::PoolRemove { name, force, tenant } => {
            let request = proto::RemovePoolRequest { name: text(&name), force, repeated, tenant };
            pools.remove_pool(request).await?;
            AdminReply::Done
        }
        AdminRequest::Scrub { pool, start, repair, tenant } => {
            let request = proto::ScrubPoolRequest { name: text(&pool), start, repair, tenant };
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
        AdminRequest::Accounts(request) => {
            let accounts = AccountsClient::new(channel);
            return call_accounts(accounts, request, repeated).await;
        }
        AdminRequest::IssueCapability { grants, key, lifetime_s } => {
            let request = proto::IssueCapabilityRequest {
                narrow: grants.is_some(),
                grants: grants.iter().flatten().map(proto::Grant::from).collect(),
                key: key.map_or_else(Vec::new, |key| key.to_vec()),
                lifetime_s,
            };
            let issued = CapabilitiesClient::new(channel).issue_capability(request).await?.into_inner();
            AdminReply::Capability(issued.capability.into())
        }
        AdminRequest::ListSessions => {
            let answer = SessionsClient::new(channel).list_sessions(proto::ListSessionsRequest {}).await?;
            let sessions = answer.into_inner().sessions.into_iter().map(session_info);
            AdminReply::Sessions(sessions.collect::<Result<_, BadAnswer>>()?)
        }
        AdminRequest::KillSession(id) => {
            let request = proto::KillSessionRequest { id: id.to_string() };
            SessionsClient::new(channel).kill_session(request).await?;
            AdminReply::Done
        }
        AdminRequest::Audit { limit } => {
            let answer = node.get_audit(proto::GetAuditRequest { limit }).await?.into_inner();
            AdminReply::Audit(answer.entries)
        }
        AdminRequest::Disk(request) => return call_disks(channel, request, repeated).await,
        AdminRequest::ServeGateway { .. } => {
            return Err(Error::BadRequest("a gateway serves with ControlClient::serve_gateway".into()).into());
        }
        AdminRequest::WhoAmI => {
            let answer = CapabilitiesClient::new(channel).get_caller(proto::GetCallerRequest {}).await?;
            let user = answer.into_inner().user.ok_or_else(|| BadAnswer("the user is missing".into()))?;
            AdminReply::Me(Box::new(user_info(user)?))
        }
        AdminRequest::ArmFault(fault) => {
            let request = proto::ArmFaultRequest { fault: fault.to_string(), repeated };
            DebugClient::new(channel).arm_fault(request).await?;
            AdminReply::Done
        }
        AdminRequest::ListFaults => {
            let answer = DebugClient::new(channel).list_faults(proto::ListFaultsRequest {}).await?;
            let proto::ListFaultsResponse { role, faults: armed } = answer.into_inner();
            faults(&role, armed)?
        }
        AdminRequest::ClearFaults => {
            let answer = DebugClient::new(channel).clear_faults(proto::ClearFaultsRequest {}).await?;
            let proto::ClearFaultsResponse { role, faults: armed } = answer.into_inner();
            faults(&role, armed)?
        }
        AdminRequest::TuneChannel(change) => {
            let request = proto::TuneChannelRequest::from(change);
            let answer = DebugClient::new(channel).tune_channel(request).await?;
            AdminReply::Tuned(answer.into_inner().into())
        }
    })
}

async fn call_accounts(
    mut accounts: AccountsClient<Channel>,
    request: AccountRequest,
    repeated: bool,
) -> Result<AdminReply, FailedCall> {
    match request {
        AccountRequest::CreateTenant { name } => {
            accounts.create_tenant(proto::CreateTenantRequest { name, repeated }).await?;
        }
        AccountRequest::ListTenants => {
            let answer = accounts.list_tenants(proto::ListTenantsRequest {}).await?.into_inner();
            return Ok(AdminReply::Tenants(answer.tenants.into_iter().map(tenant_info).collect()));
        }
        AccountRequest::RemoveTenant { name } => {
            accounts.remove_tenant(proto::RemoveTenantRequest { name, repeated }).await?;
        }
        AccountRequest::CreateUser { user, key, is_node_admin } => {
            let (name, key, node_admin) = (user.to_string(), key.to_vec(), is_node_admin);
            accounts.create_user(proto::CreateUserRequest { name, key, node_admin, repeated }).await?;
        }
        AccountRequest::ListUsers { tenant } => {
            let answer = accounts.list_users(proto::ListUsersRequest { tenant }).await?.into_inner();
            let users: Result<Vec<UserInfo>, BadAnswer> = answer.users.into_iter().map(user_info).collect();
            return Ok(AdminReply::Users(users?));
        }
        AccountRequest::RemoveUser { user } => {
            let name = user.to_string();
            accounts.remove_user(proto::RemoveUserRequest { name, repeated }).await?;
        }
        AccountRequest::Grant { user, grant } => {
            let (name, grant) = (user.to_string(), Some(proto::Grant::from(&grant)));
            accounts.grant_rights(proto::GrantRightsRequest { name, grant }).await?;
        }
        AccountRequest::Revoke { user, scope, verbs } => {
            let (name, scope, rights) =
                (user.to_string(), scope.map(|scope| scope.to_string()), verbs.to_string());
            accounts.revoke_rights(proto::RevokeRightsRequest { name, scope, rights }).await?;
        }
    }
    Ok(AdminReply::Done)
}
