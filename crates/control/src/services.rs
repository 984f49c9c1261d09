//! The services of the control plane: each call becomes an administrative request.

use std::sync::Arc;

use base::fault::Fault;
use bytes::Bytes;
use identity::Caller;
use tonic::{Request, Response, Status};
use wire::{AccessGrant, AccountName, AccountRequest, AdminReply, AdminRequest, Error, Scope, Verbs};

use crate::calls::{redundancy, unexpected};
use crate::gateways::GatewayRegistry;
use crate::proto::{
    self, accounts_server, capabilities_server, debug_server, node_server, pools_server, sessions_server,
    targets_server,
};
use crate::refusal::status_of;
use crate::server::Administrator;

/// All services.
#[derive(Clone)]
pub(crate) struct Services {
    /// The osd that they administer.
    pub(crate) administrator: Arc<dyn Administrator>,
    /// The connected gateways.
    pub(crate) gateways: GatewayRegistry,
}

pub(crate) type GrpcAnswer<T> = Result<Response<T>, Status>;

impl Services {
    /// Executes a request of a caller. `is_repeated` says whether an earlier attempt may have taken
    /// effect.
    pub(crate) async fn ask(
        &self,
        caller: Caller,
        request: AdminRequest,
        is_repeated: bool,
    ) -> Result<AdminReply, Status> {
        self.administrator.administer(caller, request, is_repeated).await.map_err(|e| status_of(&e))
    }

    /// Executes a request that has no result.
    async fn order(&self, caller: Caller, request: AdminRequest, is_repeated: bool) -> Result<(), Status> {
        match self.ask(caller, request.clone(), is_repeated).await? {
            AdminReply::Done => Ok(()),
            other => Err(status_of(&unexpected(&request, &other))),
        }
    }
}

/// Returns who makes a call.
pub(crate) fn caller_of<T>(call: &Request<T>) -> Result<Caller, Status> {
    let caller = call.extensions().get::<Caller>().cloned();
    caller.ok_or_else(|| Status::unauthenticated("the client has proved no key"))
}

fn json<T: serde::Serialize>(value: &T) -> String {
    serde_json::to_string(value).expect("plain data has a JSON form")
}

fn bad(e: impl std::fmt::Display, what: &str) -> Status {
    status_of(&Error::BadRequest(format!("{what}: {e}")))
}

#[tonic::async_trait]
impl node_server::Node for Services {
    async fn get_status(
        &self,
        call: Request<proto::GetStatusRequest>,
    ) -> GrpcAnswer<proto::GetStatusResponse> {
        match self.ask(caller_of(&call)?, AdminRequest::Status, false).await? {
            AdminReply::Status(status) => Ok(Response::new(proto::GetStatusResponse { json: json(&status) })),
            other => Err(status_of(&unexpected(&AdminRequest::Status, &other))),
        }
    }

    async fn get_usage(&self, call: Request<proto::GetUsageRequest>) -> GrpcAnswer<proto::GetUsageResponse> {
        match self.ask(caller_of(&call)?, AdminRequest::Usage, false).await? {
            AdminReply::Usage(usage) => Ok(Response::new(proto::GetUsageResponse { json: json(&usage) })),
            other => Err(status_of(&unexpected(&AdminRequest::Usage, &other))),
        }
    }

    async fn set_rebuild_rate(
        &self,
        call: Request<proto::SetRebuildRateRequest>,
    ) -> GrpcAnswer<proto::SetRebuildRateResponse> {
        let caller = caller_of(&call)?;
        self.order(caller, AdminRequest::SetRebuildRate(call.into_inner().bytes_per_second), false).await?;
        Ok(Response::new(proto::SetRebuildRateResponse {}))
    }

    async fn set_coding_mode(
        &self,
        call: Request<proto::SetCodingModeRequest>,
    ) -> GrpcAnswer<proto::SetCodingModeResponse> {
        let caller = caller_of(&call)?;
        let mode = call.into_inner().mode.parse().map_err(|e| bad(e, "coding mode"))?;
        self.order(caller, AdminRequest::SetCodingMode(mode), false).await?;
        Ok(Response::new(proto::SetCodingModeResponse {}))
    }

    async fn get_audit(&self, call: Request<proto::GetAuditRequest>) -> GrpcAnswer<proto::GetAuditResponse> {
        let caller = caller_of(&call)?;
        let request = AdminRequest::Audit { limit: call.into_inner().limit };
        match self.ask(caller, request.clone(), false).await? {
            AdminReply::Audit(entries) => Ok(Response::new(proto::GetAuditResponse { entries })),
            other => Err(status_of(&unexpected(&request, &other))),
        }
    }

    async fn collect_orphans(
        &self,
        call: Request<proto::CollectOrphansRequest>,
    ) -> GrpcAnswer<proto::CollectOrphansResponse> {
        let caller = caller_of(&call)?;
        let request = AdminRequest::CollectOrphans { older_than_ms: call.into_inner().older_than_ms };
        match self.ask(caller, request.clone(), false).await? {
            AdminReply::Collected(removed) => Ok(Response::new(proto::CollectOrphansResponse { removed })),
            other => Err(status_of(&unexpected(&request, &other))),
        }
    }
}

#[tonic::async_trait]
impl sessions_server::Sessions for Services {
    async fn list_sessions(
        &self,
        call: Request<proto::ListSessionsRequest>,
    ) -> GrpcAnswer<proto::ListSessionsResponse> {
        match self.ask(caller_of(&call)?, AdminRequest::ListSessions, false).await? {
            AdminReply::Sessions(sessions) => {
                let sessions = sessions.into_iter().map(proto::Session::from).collect();
                Ok(Response::new(proto::ListSessionsResponse { sessions }))
            }
            other => Err(status_of(&unexpected(&AdminRequest::ListSessions, &other))),
        }
    }

    async fn kill_session(
        &self,
        call: Request<proto::KillSessionRequest>,
    ) -> GrpcAnswer<proto::KillSessionResponse> {
        let caller = caller_of(&call)?;
        let id = call.into_inner().id.parse().map_err(|e: String| bad(e, "session"))?;
        self.order(caller, AdminRequest::KillSession(id), false).await?;
        Ok(Response::new(proto::KillSessionResponse {}))
    }
}

#[tonic::async_trait]
impl pools_server::Pools for Services {
    async fn create_pool(
        &self,
        call: Request<proto::CreatePoolRequest>,
    ) -> GrpcAnswer<proto::CreatePoolResponse> {
        let caller = caller_of(&call)?;
        let proto::CreatePoolRequest { name, pg_count, redundancy: scheme, repeated, stripe_unit, tenant } =
            call.into_inner();
        let redundancy = redundancy(&scheme, stripe_unit).map_err(|e| status_of(&e))?;
        let request = AdminRequest::PoolCreate { name: Bytes::from(name), pg_count, redundancy, tenant };
        self.order(caller, request, repeated).await?;
        Ok(Response::new(proto::CreatePoolResponse {}))
    }

    async fn list_pools(
        &self,
        call: Request<proto::ListPoolsRequest>,
    ) -> GrpcAnswer<proto::ListPoolsResponse> {
        let caller = caller_of(&call)?;
        let request = AdminRequest::PoolList { tenant: call.into_inner().tenant };
        match self.ask(caller, request.clone(), false).await? {
            AdminReply::Pools(pools) => {
                let pools = pools.into_iter().map(proto::Pool::from).collect();
                Ok(Response::new(proto::ListPoolsResponse { pools }))
            }
            other => Err(status_of(&unexpected(&request, &other))),
        }
    }

    async fn remove_pool(
        &self,
        call: Request<proto::RemovePoolRequest>,
    ) -> GrpcAnswer<proto::RemovePoolResponse> {
        let caller = caller_of(&call)?;
        let proto::RemovePoolRequest { name, force, repeated, tenant } = call.into_inner();
        self.order(caller, AdminRequest::PoolRemove { name: Bytes::from(name), force, tenant }, repeated)
            .await?;
        Ok(Response::new(proto::RemovePoolResponse {}))
    }

    async fn scrub_pool(
        &self,
        call: Request<proto::ScrubPoolRequest>,
    ) -> GrpcAnswer<proto::ScrubPoolResponse> {
        let caller = caller_of(&call)?;
        let proto::ScrubPoolRequest { name, start, repair, tenant } = call.into_inner();
        let request = AdminRequest::Scrub { pool: Bytes::from(name), start, repair, tenant };
        match self.ask(caller, request.clone(), false).await? {
            AdminReply::Scrub(progress) => {
                Ok(Response::new(proto::ScrubPoolResponse { json: json(&progress) }))
            }
            other => Err(status_of(&unexpected(&request, &other))),
        }
    }
}

#[tonic::async_trait]
impl targets_server::Targets for Services {
    async fn set_target_out(
        &self,
        call: Request<proto::SetTargetOutRequest>,
    ) -> GrpcAnswer<proto::SetTargetOutResponse> {
        let caller = caller_of(&call)?;
        let proto::SetTargetOutRequest { index, out } = call.into_inner();
        self.order(caller, AdminRequest::TargetSetOut { index, out }, false).await?;
        Ok(Response::new(proto::SetTargetOutResponse {}))
    }

    async fn replace_target(
        &self,
        call: Request<proto::ReplaceTargetRequest>,
    ) -> GrpcAnswer<proto::ReplaceTargetResponse> {
        let caller = caller_of(&call)?;
        let proto::ReplaceTargetRequest { index, uuid } = call.into_inner();
        let uuid = uuid.parse().map_err(|e| bad(e, "UUID of the new target"))?;
        self.order(caller, AdminRequest::TargetReplace { index, uuid }, false).await?;
        Ok(Response::new(proto::ReplaceTargetResponse {}))
    }

    async fn forget_target(
        &self,
        call: Request<proto::ForgetTargetRequest>,
    ) -> GrpcAnswer<proto::ForgetTargetResponse> {
        let caller = caller_of(&call)?;
        let proto::ForgetTargetRequest { index, accept_loss } = call.into_inner();
        let request = AdminRequest::TargetForget { index, accept_loss };
        match self.ask(caller, request.clone(), false).await? {
            AdminReply::Loss(pools) => {
                let pools = pools.into_iter().map(proto::PoolLoss::from).collect();
                Ok(Response::new(proto::ForgetTargetResponse { pools }))
            }
            other => Err(status_of(&unexpected(&request, &other))),
        }
    }
}

fn account(name: &str) -> Result<AccountName, Status> {
    name.parse().map_err(|e: wire::NameError| status_of(&e.into()))
}

fn key(bytes: &[u8]) -> Result<[u8; 32], Status> {
    bytes.try_into().map_err(|_| bad("it does not have 32 bytes", "hash of the key"))
}

fn verbs(text: &str) -> Result<Verbs, Status> {
    text.parse().map_err(|e| bad(e, "rights"))
}

fn scope(text: &str) -> Result<Scope, Status> {
    text.parse().map_err(|e| bad(e, "scope"))
}

fn grant(grant: &proto::Grant) -> Result<AccessGrant, Status> {
    Ok(AccessGrant { scope: scope(&grant.scope)?, verbs: verbs(&grant.rights)? })
}

#[tonic::async_trait]
impl accounts_server::Accounts for Services {
    async fn create_tenant(
        &self,
        call: Request<proto::CreateTenantRequest>,
    ) -> GrpcAnswer<proto::CreateTenantResponse> {
        let caller = caller_of(&call)?;
        let proto::CreateTenantRequest { name, repeated } = call.into_inner();
        let request = AdminRequest::Accounts(AccountRequest::CreateTenant { name });
        self.order(caller, request, repeated).await?;
        Ok(Response::new(proto::CreateTenantResponse {}))
    }

    async fn list_tenants(
        &self,
        call: Request<proto::ListTenantsRequest>,
    ) -> GrpcAnswer<proto::ListTenantsResponse> {
        let request = AdminRequest::Accounts(AccountRequest::ListTenants);
        match self.ask(caller_of(&call)?, request.clone(), false).await? {
            AdminReply::Tenants(tenants) => {
                let tenants = tenants.into_iter().map(proto::Tenant::from).collect();
                Ok(Response::new(proto::ListTenantsResponse { tenants }))
            }
            other => Err(status_of(&unexpected(&request, &other))),
        }
    }

    async fn remove_tenant(
        &self,
        call: Request<proto::RemoveTenantRequest>,
    ) -> GrpcAnswer<proto::RemoveTenantResponse> {
        let caller = caller_of(&call)?;
        let proto::RemoveTenantRequest { name, repeated } = call.into_inner();
        let request = AdminRequest::Accounts(AccountRequest::RemoveTenant { name });
        self.order(caller, request, repeated).await?;
        Ok(Response::new(proto::RemoveTenantResponse {}))
    }

    async fn create_user(
        &self,
        call: Request<proto::CreateUserRequest>,
    ) -> GrpcAnswer<proto::CreateUserResponse> {
        let caller = caller_of(&call)?;
        let proto::CreateUserRequest { name, key: hash, node_admin, repeated } = call.into_inner();
        let (user, key) = (account(&name)?, key(&hash)?);
        let create = AccountRequest::CreateUser { user, key, is_node_admin: node_admin };
        self.order(caller, AdminRequest::Accounts(create), repeated).await?;
        Ok(Response::new(proto::CreateUserResponse {}))
    }

    async fn list_users(
        &self,
        call: Request<proto::ListUsersRequest>,
    ) -> GrpcAnswer<proto::ListUsersResponse> {
        let caller = caller_of(&call)?;
        let request = AdminRequest::Accounts(AccountRequest::ListUsers { tenant: call.into_inner().tenant });
        match self.ask(caller, request.clone(), false).await? {
            AdminReply::Users(users) => {
                let users = users.into_iter().map(proto::User::from).collect();
                Ok(Response::new(proto::ListUsersResponse { users }))
            }
            other => Err(status_of(&unexpected(&request, &other))),
        }
    }

    async fn remove_user(
        &self,
        call: Request<proto::RemoveUserRequest>,
    ) -> GrpcAnswer<proto::RemoveUserResponse> {
        let caller = caller_of(&call)?;
        let proto::RemoveUserRequest { name, repeated } = call.into_inner();
        let request = AdminRequest::Accounts(AccountRequest::RemoveUser { user: account(&name)? });
        self.order(caller, request, repeated).await?;
        Ok(Response::new(proto::RemoveUserResponse {}))
    }

    async fn grant_rights(
        &self,
        call: Request<proto::GrantRightsRequest>,
    ) -> GrpcAnswer<proto::GrantRightsResponse> {
        let caller = caller_of(&call)?;
        let proto::GrantRightsRequest { name, grant: rights } = call.into_inner();
        let (user, grant) = (account(&name)?, grant(&rights.unwrap_or_default())?);
        self.order(caller, AdminRequest::Accounts(AccountRequest::Grant { user, grant }), false).await?;
        Ok(Response::new(proto::GrantRightsResponse {}))
    }

    async fn revoke_rights(
        &self,
        call: Request<proto::RevokeRightsRequest>,
    ) -> GrpcAnswer<proto::RevokeRightsResponse> {
        let caller = caller_of(&call)?;
        let proto::RevokeRightsRequest { name, scope: within, rights } = call.into_inner();
        let (user, verbs) = (account(&name)?, verbs(&rights)?);
        let scope = within.as_deref().map(scope).transpose()?;
        let revoke = AccountRequest::Revoke { user, scope, verbs };
        self.order(caller, AdminRequest::Accounts(revoke), false).await?;
        Ok(Response::new(proto::RevokeRightsResponse {}))
    }
}

#[tonic::async_trait]
impl capabilities_server::Capabilities for Services {
    async fn issue_capability(
        &self,
        call: Request<proto::IssueCapabilityRequest>,
    ) -> GrpcAnswer<proto::IssueCapabilityResponse> {
        let caller = caller_of(&call)?;
        let proto::IssueCapabilityRequest { grants, narrow, key: holder, lifetime_s } = call.into_inner();
        let grants = grants.iter().map(grant).collect::<Result<Vec<AccessGrant>, Status>>()?;
        let key = if holder.is_empty() { None } else { Some(key(&holder)?) };
        let grants = narrow.then_some(grants);
        let request = AdminRequest::IssueCapability { grants, key, lifetime_s };
        match self.ask(caller, request.clone(), false).await? {
            AdminReply::Capability(capability) => {
                Ok(Response::new(proto::IssueCapabilityResponse { capability: capability.into() }))
            }
            other => Err(status_of(&unexpected(&request, &other))),
        }
    }

    async fn get_caller(
        &self,
        call: Request<proto::GetCallerRequest>,
    ) -> GrpcAnswer<proto::GetCallerResponse> {
        match self.ask(caller_of(&call)?, AdminRequest::WhoAmI, false).await? {
            AdminReply::Me(user) => {
                Ok(Response::new(proto::GetCallerResponse { user: Some(proto::User::from(*user)) }))
            }
            other => Err(status_of(&unexpected(&AdminRequest::WhoAmI, &other))),
        }
    }
}

#[tonic::async_trait]
impl debug_server::Debug for Services {
    async fn arm_fault(&self, call: Request<proto::ArmFaultRequest>) -> GrpcAnswer<proto::ArmFaultResponse> {
        let caller = caller_of(&call)?;
        let proto::ArmFaultRequest { fault, repeated } = call.into_inner();
        let fault = fault.parse::<Fault>().map_err(|e| bad(e, "fault"))?;
        self.order(caller, AdminRequest::ArmFault(fault), repeated).await?;
        Ok(Response::new(proto::ArmFaultResponse {}))
    }

    async fn list_faults(
        &self,
        call: Request<proto::ListFaultsRequest>,
    ) -> GrpcAnswer<proto::ListFaultsResponse> {
        match self.ask(caller_of(&call)?, AdminRequest::ListFaults, false).await? {
            AdminReply::Faults { role, armed } => {
                let faults = armed.into_iter().map(proto::ArmedFault::from).collect();
                Ok(Response::new(proto::ListFaultsResponse { role: role.as_str().to_owned(), faults }))
            }
            other => Err(status_of(&unexpected(&AdminRequest::ListFaults, &other))),
        }
    }

    async fn clear_faults(
        &self,
        call: Request<proto::ClearFaultsRequest>,
    ) -> GrpcAnswer<proto::ClearFaultsResponse> {
        match self.ask(caller_of(&call)?, AdminRequest::ClearFaults, false).await? {
            AdminReply::Faults { role, armed } => {
                let faults = armed.into_iter().map(proto::ArmedFault::from).collect();
                Ok(Response::new(proto::ClearFaultsResponse { role: role.as_str().to_owned(), faults }))
            }
            other => Err(status_of(&unexpected(&AdminRequest::ClearFaults, &other))),
        }
    }

    async fn tune_channel(
        &self,
        call: Request<proto::TuneChannelRequest>,
    ) -> GrpcAnswer<proto::TuneChannelResponse> {
        let caller = caller_of(&call)?;
        let request = AdminRequest::TuneChannel(call.into_inner().into());
        match self.ask(caller, request.clone(), false).await? {
            AdminReply::Tuned(tuning) => Ok(Response::new(tuning.into())),
            other => Err(status_of(&unexpected(&request, &other))),
        }
    }
}
