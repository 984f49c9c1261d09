//! The services `Disks` and `Gateways`: operators send commands about disks, and gateways receive them.

use std::pin::Pin;
use std::time::Duration;

use base::thread::ThreadClass;
use futures::Stream;
use identity::Caller;
use tonic::{Request, Response, Status, Streaming};
use wire::{AdminReply, AdminRequest, DiskCommand, DiskReply, DiskRequest, Error, check_account};

use crate::calls::unexpected;
use crate::disks::{front_end, front_end_message};
use crate::gateways::GatewayConnection;
use crate::proto::gateway_report::Report;
use crate::proto::{self, disks_server, gateways_server};
use crate::refusal::status_of;
use crate::services::{GrpcAnswer, Services, caller_of};

/// Time limit of a gateway's first report.
const HELLO_TIME: Duration = Duration::from_secs(5);

/// Pause between two checks whether a gateway still has the right to serve.
const CHECK_PAUSE: Duration = Duration::from_secs(5);

impl Services {
    /// Asks for the execution of a command about disks. `is_repeated` says whether an earlier attempt may
    /// have taken effect.
    async fn ask_disk(
        &self,
        caller: Caller,
        (pool, command): (String, DiskCommand),
        is_repeated: bool,
    ) -> Result<DiskReply, Status> {
        let request = AdminRequest::Disk(DiskRequest { pool, command });
        match self.ask(caller, request.clone(), is_repeated).await? {
            AdminReply::Disk(reply) => Ok(reply),
            other => Err(status_of(&unexpected(&request, &other))),
        }
    }

    /// Asks for the execution of a command that has no result.
    async fn change_disk(
        &self,
        caller: Caller,
        command: (String, DiskCommand),
        is_repeated: bool,
    ) -> Result<(), Status> {
        match self.ask_disk(caller, command, is_repeated).await? {
            DiskReply::Done => Ok(()),
            other => Err(wrong_reply(&other)),
        }
    }

    /// Returns the tenant that a caller may serve as a gateway. `is_repeated` says whether the gateway
    /// serves already.
    async fn gateway_tenant(&self, caller: &Caller, name: &str, is_repeated: bool) -> wire::Result<u32> {
        let request = AdminRequest::ServeGateway { name: name.to_owned() };
        match self.administrator.administer(caller.clone(), request.clone(), is_repeated).await? {
            AdminReply::Gateway(tenant) => Ok(tenant),
            other => Err(unexpected(&request, &other)),
        }
    }

    /// Returns the reason when a gateway loses the right to serve a tenant.
    async fn gateway_loses_right(&self, caller: &Caller, name: &str, tenant: u32) -> Error {
        loop {
            tokio::time::sleep(CHECK_PAUSE).await;
            match self.gateway_tenant(caller, name, true).await {
                Ok(now) if now == tenant => {}
                Ok(_) => return Error::CommandRefused("the user belongs to another tenant now".into()),
                // The osd has not decided.
                Err(e) if e.is_transient() || matches!(e, Error::Busy { .. }) => {}
                Err(e) => return e,
            }
        }
    }
}

/// Returns the status for a reply of a gateway that does not match its command.
fn wrong_reply(reply: &DiskReply) -> Status {
    let why = format!("the gateway answers {reply:?}; use a gateway of the node's version");
    status_of(&Error::CommandRefused(why))
}

#[tonic::async_trait]
impl disks_server::Disks for Services {
    async fn create_disk(
        &self,
        call: Request<proto::CreateDiskRequest>,
    ) -> GrpcAnswer<proto::CreateDiskResponse> {
        let caller = caller_of(&call)?;
        let proto::CreateDiskRequest { pool, disk, size, chunk, repeated } = call.into_inner();
        self.change_disk(caller, (pool, DiskCommand::Create { disk, size, chunk }), repeated).await?;
        Ok(Response::new(proto::CreateDiskResponse {}))
    }

    async fn list_disks(
        &self,
        call: Request<proto::ListDisksRequest>,
    ) -> GrpcAnswer<proto::ListDisksResponse> {
        let caller = caller_of(&call)?;
        match self.ask_disk(caller, (call.into_inner().pool, DiskCommand::List), false).await? {
            DiskReply::Disks(disks) => {
                let disks = disks.into_iter().map(proto::Disk::from).collect();
                Ok(Response::new(proto::ListDisksResponse { disks }))
            }
            other => Err(wrong_reply(&other)),
        }
    }

    async fn get_disk(&self, call: Request<proto::GetDiskRequest>) -> GrpcAnswer<proto::GetDiskResponse> {
        let caller = caller_of(&call)?;
        let proto::GetDiskRequest { pool, disk } = call.into_inner();
        match self.ask_disk(caller, (pool, DiskCommand::Stat { disk }), false).await? {
            DiskReply::Disks(mut disks) if disks.len() == 1 => {
                let disk = disks.pop().map(proto::Disk::from);
                Ok(Response::new(proto::GetDiskResponse { disk }))
            }
            other => Err(wrong_reply(&other)),
        }
    }

    async fn remove_disk(
        &self,
        call: Request<proto::RemoveDiskRequest>,
    ) -> GrpcAnswer<proto::RemoveDiskResponse> {
        let caller = caller_of(&call)?;
        let proto::RemoveDiskRequest { pool, disk, with_snapshots, repeated } = call.into_inner();
        self.change_disk(caller, (pool, DiskCommand::Remove { disk, with_snapshots }), repeated).await?;
        Ok(Response::new(proto::RemoveDiskResponse {}))
    }

    async fn resize_disk(
        &self,
        call: Request<proto::ResizeDiskRequest>,
    ) -> GrpcAnswer<proto::ResizeDiskResponse> {
        let caller = caller_of(&call)?;
        let proto::ResizeDiskRequest { pool, disk, size, shrink: shrinks } = call.into_inner();
        self.change_disk(caller, (pool, DiskCommand::Resize { disk, size, shrinks }), false).await?;
        Ok(Response::new(proto::ResizeDiskResponse {}))
    }

    async fn snapshot_disk(
        &self,
        call: Request<proto::SnapshotDiskRequest>,
    ) -> GrpcAnswer<proto::SnapshotDiskResponse> {
        let caller = caller_of(&call)?;
        let proto::SnapshotDiskRequest { pool, disk, snapshot, repeated } = call.into_inner();
        self.change_disk(caller, (pool, DiskCommand::Snapshot { disk, snapshot }), repeated).await?;
        Ok(Response::new(proto::SnapshotDiskResponse {}))
    }

    async fn remove_snapshot(
        &self,
        call: Request<proto::RemoveSnapshotRequest>,
    ) -> GrpcAnswer<proto::RemoveSnapshotResponse> {
        let caller = caller_of(&call)?;
        let proto::RemoveSnapshotRequest { pool, disk, snapshot, repeated } = call.into_inner();
        self.change_disk(caller, (pool, DiskCommand::RemoveSnapshot { disk, snapshot }), repeated).await?;
        Ok(Response::new(proto::RemoveSnapshotResponse {}))
    }

    async fn clone_snapshot(
        &self,
        call: Request<proto::CloneSnapshotRequest>,
    ) -> GrpcAnswer<proto::CloneSnapshotResponse> {
        let caller = caller_of(&call)?;
        let proto::CloneSnapshotRequest { pool, disk, snapshot, clone, repeated } = call.into_inner();
        self.change_disk(caller, (pool, DiskCommand::Clone { disk, snapshot, clone }), repeated).await?;
        Ok(Response::new(proto::CloneSnapshotResponse {}))
    }

    async fn flatten_disk(
        &self,
        call: Request<proto::FlattenDiskRequest>,
    ) -> GrpcAnswer<proto::FlattenDiskResponse> {
        let caller = caller_of(&call)?;
        let proto::FlattenDiskRequest { pool, disk } = call.into_inner();
        self.change_disk(caller, (pool, DiskCommand::Flatten { disk }), false).await?;
        Ok(Response::new(proto::FlattenDiskResponse {}))
    }

    async fn get_disk_usage(
        &self,
        call: Request<proto::GetDiskUsageRequest>,
    ) -> GrpcAnswer<proto::GetDiskUsageResponse> {
        let caller = caller_of(&call)?;
        let proto::GetDiskUsageRequest { pool, disk } = call.into_inner();
        match self.ask_disk(caller, (pool, DiskCommand::Usage { disk }), false).await? {
            DiskReply::Usage(space) => Ok(Response::new(proto::GetDiskUsageResponse {
                size: space.size,
                allocated: space.allocated,
            })),
            other => Err(wrong_reply(&other)),
        }
    }

    async fn attach_disk(
        &self,
        call: Request<proto::AttachDiskRequest>,
    ) -> GrpcAnswer<proto::AttachDiskResponse> {
        let caller = caller_of(&call)?;
        let proto::AttachDiskRequest { pool, disk, front_end: wanted, gateway, take_over, read_only } =
            call.into_inner();
        let command = DiskCommand::Attach {
            disk,
            front_end: front_end(wanted).map_err(|e| status_of(&e))?,
            gateway,
            takes_over: take_over,
            is_read_only: read_only,
        };
        match self.ask_disk(caller, (pool, command), false).await? {
            DiskReply::Attached(attached) => {
                let attached = front_end_message(attached).map_err(|e| status_of(&e))?;
                Ok(Response::new(proto::AttachDiskResponse { front_end: Some(attached) }))
            }
            other => Err(wrong_reply(&other)),
        }
    }

    async fn detach_disk(
        &self,
        call: Request<proto::DetachDiskRequest>,
    ) -> GrpcAnswer<proto::DetachDiskResponse> {
        let caller = caller_of(&call)?;
        let proto::DetachDiskRequest { pool, disk, repeated } = call.into_inner();
        self.change_disk(caller, (pool, DiskCommand::Detach { disk }), repeated).await?;
        Ok(Response::new(proto::DetachDiskResponse {}))
    }
}

/// Reads the first report of a gateway. Returns its name.
async fn hello(reports: &mut Streaming<proto::GatewayReport>) -> Result<String, Status> {
    let first = tokio::time::timeout(HELLO_TIME, reports.message()).await;
    let first =
        first.map_err(|_| Status::deadline_exceeded("the gateway has not sent its name in time"))??;
    match first.and_then(|first| first.report) {
        Some(Report::Hello(proto::GatewayHello { name })) => {
            check_account(&name).map_err(|e| status_of(&e.into()))?;
            Ok(name)
        }
        _ => Err(status_of(&Error::BadRequest("the first report of a gateway must be its name".into()))),
    }
}

#[tonic::async_trait]
impl gateways_server::Gateways for Services {
    type ServeStream = Pin<Box<dyn Stream<Item = Result<proto::GatewayOrder, Status>> + Send>>;

    async fn serve(&self, call: Request<Streaming<proto::GatewayReport>>) -> GrpcAnswer<Self::ServeStream> {
        let caller = caller_of(&call)?;
        let mut reports = call.into_inner();
        let name = hello(&mut reports).await?;
        let tenant = self.gateway_tenant(&caller, &name, false).await.map_err(|e| status_of(&e))?;
        let (connection, orders) = self.gateways.connect(tenant, &name).map_err(|e| status_of(&e))?;
        let services = self.clone();
        base::task::spawn(ThreadClass::Admin, async move {
            tracing::info!(gateway = name, tenant, "a gateway has connected");
            let why = tokio::select! {
                why = read_reports(&connection, &mut reports) => why,
                error = services.gateway_loses_right(&caller, &name, tenant) => Some(status_of(&error)),
            };
            tracing::info!(gateway = name, tenant, "a gateway has disconnected");
            connection.close(why);
        });
        let orders = futures::stream::unfold(orders, |mut orders| async {
            let next = orders.recv().await?;
            Some((next, orders))
        });
        Ok(Response::new(Box::pin(orders)))
    }
}

/// Reads the reports of a gateway until its stream ends. Returns the reason; `None` if the gateway has left.
async fn read_reports(
    gateway: &GatewayConnection,
    reports: &mut Streaming<proto::GatewayReport>,
) -> Option<Status> {
    loop {
        let report = tokio::select! {
            report = reports.message() => report,
            () = gateway.replaced() => return None,
        };
        let done = match report {
            Ok(Some(proto::GatewayReport { report: Some(Report::Done(done)) })) => done,
            Ok(Some(_)) => return Some(status_of(&Error::BadRequest("the report has no result".into()))),
            Ok(None) => return None,
            Err(status) => return Some(status),
        };
        if let Err(e) = gateway.report(done) {
            return Some(status_of(&e));
        }
    }
}
