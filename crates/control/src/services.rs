//! The services of the control plane: each call becomes an administrative request.

use std::sync::Arc;

use bytes::Bytes;
use tonic::{Request, Response, Status};
use wire::{AdminReply, AdminRequest, Error};

use crate::calls::{redundancy, unexpected};
use crate::proto::{self, node_server, pools_server, targets_server};
use crate::refusal::status_of;
use crate::server::Administrator;

/// All services, with the osd that they administer.
#[derive(Clone)]
pub(crate) struct Services(pub(crate) Arc<dyn Administrator>);

type GrpcAnswer<T> = Result<Response<T>, Status>;

impl Services {
    /// Executes a request. `is_repeated` says whether an earlier attempt may have taken effect.
    async fn ask(&self, request: AdminRequest, is_repeated: bool) -> Result<AdminReply, Status> {
        self.0.administer(request, is_repeated).await.map_err(|e| status_of(&e))
    }

    /// Executes a request that has no result.
    async fn order(&self, request: AdminRequest, is_repeated: bool) -> Result<(), Status> {
        match self.ask(request.clone(), is_repeated).await? {
            AdminReply::Done => Ok(()),
            other => Err(status_of(&unexpected(&request, &other))),
        }
    }
}

fn json<T: serde::Serialize>(value: &T) -> String {
    serde_json::to_string(value).expect("plain data has a JSON form")
}

fn bad(e: impl std::fmt::Display, what: &str) -> Status {
    status_of(&Error::BadRequest(format!("{what}: {e}")))
}

#[tonic::async_trait]
impl node_server::Node for Services {
    async fn get_status(&self, _: Request<proto::GetStatusRequest>) -> GrpcAnswer<proto::GetStatusResponse> {
        match self.ask(AdminRequest::Status, false).await? {
            AdminReply::Status(status) => Ok(Response::new(proto::GetStatusResponse { json: json(&status) })),
            other => Err(status_of(&unexpected(&AdminRequest::Status, &other))),
        }
    }

    async fn get_usage(&self, _: Request<proto::GetUsageRequest>) -> GrpcAnswer<proto::GetUsageResponse> {
        match self.ask(AdminRequest::Usage, false).await? {
            AdminReply::Usage(usage) => Ok(Response::new(proto::GetUsageResponse { json: json(&usage) })),
            other => Err(status_of(&unexpected(&AdminRequest::Usage, &other))),
        }
    }

    async fn set_rebuild_rate(
        &self,
        request: Request<proto::SetRebuildRateRequest>,
    ) -> GrpcAnswer<proto::SetRebuildRateResponse> {
        self.order(AdminRequest::SetRebuildRate(request.into_inner().bytes_per_second), false).await?;
        Ok(Response::new(proto::SetRebuildRateResponse {}))
    }

    async fn set_coding_mode(
        &self,
        request: Request<proto::SetCodingModeRequest>,
    ) -> GrpcAnswer<proto::SetCodingModeResponse> {
        let mode = request.into_inner().mode.parse().map_err(|e| bad(e, "coding mode"))?;
        self.order(AdminRequest::SetCodingMode(mode), false).await?;
        Ok(Response::new(proto::SetCodingModeResponse {}))
    }

    async fn collect_orphans(
        &self,
        request: Request<proto::CollectOrphansRequest>,
    ) -> GrpcAnswer<proto::CollectOrphansResponse> {
        let request = AdminRequest::CollectOrphans { older_than_ms: request.into_inner().older_than_ms };
        match self.ask(request.clone(), false).await? {
            AdminReply::Collected(removed) => Ok(Response::new(proto::CollectOrphansResponse { removed })),
            other => Err(status_of(&unexpected(&request, &other))),
        }
    }
}

#[tonic::async_trait]
impl pools_server::Pools for Services {
    async fn create_pool(
        &self,
        request: Request<proto::CreatePoolRequest>,
    ) -> GrpcAnswer<proto::CreatePoolResponse> {
        let proto::CreatePoolRequest { name, pg_count, redundancy: scheme, repeated } = request.into_inner();
        let redundancy = redundancy(&scheme).map_err(|e| status_of(&e))?;
        let request = AdminRequest::PoolCreate { name: Bytes::from(name), pg_count, redundancy };
        self.order(request, repeated).await?;
        Ok(Response::new(proto::CreatePoolResponse {}))
    }

    async fn list_pools(&self, _: Request<proto::ListPoolsRequest>) -> GrpcAnswer<proto::ListPoolsResponse> {
        match self.ask(AdminRequest::PoolList, false).await? {
            AdminReply::Pools(pools) => {
                let pools = pools.into_iter().map(proto::Pool::from).collect();
                Ok(Response::new(proto::ListPoolsResponse { pools }))
            }
            other => Err(status_of(&unexpected(&AdminRequest::PoolList, &other))),
        }
    }

    async fn remove_pool(
        &self,
        request: Request<proto::RemovePoolRequest>,
    ) -> GrpcAnswer<proto::RemovePoolResponse> {
        let proto::RemovePoolRequest { name, force, repeated } = request.into_inner();
        self.order(AdminRequest::PoolRemove { name: Bytes::from(name), force }, repeated).await?;
        Ok(Response::new(proto::RemovePoolResponse {}))
    }

    async fn scrub_pool(
        &self,
        request: Request<proto::ScrubPoolRequest>,
    ) -> GrpcAnswer<proto::ScrubPoolResponse> {
        let proto::ScrubPoolRequest { name, start, repair } = request.into_inner();
        let request = AdminRequest::Scrub { pool: Bytes::from(name), start, repair };
        match self.ask(request.clone(), false).await? {
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
        request: Request<proto::SetTargetOutRequest>,
    ) -> GrpcAnswer<proto::SetTargetOutResponse> {
        let proto::SetTargetOutRequest { index, out } = request.into_inner();
        self.order(AdminRequest::TargetSetOut { index, out }, false).await?;
        Ok(Response::new(proto::SetTargetOutResponse {}))
    }

    async fn replace_target(
        &self,
        request: Request<proto::ReplaceTargetRequest>,
    ) -> GrpcAnswer<proto::ReplaceTargetResponse> {
        let proto::ReplaceTargetRequest { index, uuid } = request.into_inner();
        let uuid = uuid.parse().map_err(|e| bad(e, "UUID of the new target"))?;
        self.order(AdminRequest::TargetReplace { index, uuid }, false).await?;
        Ok(Response::new(proto::ReplaceTargetResponse {}))
    }

    async fn forget_target(
        &self,
        request: Request<proto::ForgetTargetRequest>,
    ) -> GrpcAnswer<proto::ForgetTargetResponse> {
        let proto::ForgetTargetRequest { index, accept_loss } = request.into_inner();
        let request = AdminRequest::TargetForget { index, accept_loss };
        match self.ask(request.clone(), false).await? {
            AdminReply::Loss(pools) => {
                let pools = pools.into_iter().map(proto::PoolLoss::from).collect();
                Ok(Response::new(proto::ForgetTargetResponse { pools }))
            }
            other => Err(status_of(&unexpected(&request, &other))),
        }
    }
}
