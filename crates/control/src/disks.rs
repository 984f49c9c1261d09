//! The calls of the service `Disks` as the client makes them, and the conversion between disks and the
//! messages of gRPC.

use tonic::transport::Channel;
use wire::{
    AdminReply, DiskCommand, DiskInfo, DiskReply, DiskRequest, DiskSpace, Error, FrontEnd, SnapshotInfo,
};

use crate::calls::BadAnswer;
use crate::client::FailedCall;
use crate::proto;
use crate::proto::disks_client::DisksClient;
use crate::proto::front_end::Kind;

impl From<DiskInfo> for proto::Disk {
    fn from(disk: DiskInfo) -> proto::Disk {
        proto::Disk {
            name: disk.name,
            size: disk.size,
            chunk: disk.chunk,
            created_ms: disk.created_ms,
            serial: disk.serial,
            nguid: disk.nguid,
            snapshots: disk.snapshots.into_iter().map(proto::Snapshot::from).collect(),
            parent: disk.parent,
            flattening: disk.is_flattening,
            gateway: disk.gateway,
            attached_ms: disk.attached_ms,
        }
    }
}

impl From<proto::Disk> for DiskInfo {
    fn from(disk: proto::Disk) -> DiskInfo {
        DiskInfo {
            name: disk.name,
            size: disk.size,
            chunk: disk.chunk,
            created_ms: disk.created_ms,
            serial: disk.serial,
            nguid: disk.nguid,
            snapshots: disk.snapshots.into_iter().map(SnapshotInfo::from).collect(),
            parent: disk.parent,
            is_flattening: disk.flattening,
            gateway: disk.gateway,
            attached_ms: disk.attached_ms,
        }
    }
}

impl From<SnapshotInfo> for proto::Snapshot {
    fn from(snapshot: SnapshotInfo) -> proto::Snapshot {
        let SnapshotInfo { name, size, created_ms, is_removing: removing } = snapshot;
        proto::Snapshot { name, size, created_ms, removing }
    }
}

impl From<proto::Snapshot> for SnapshotInfo {
    fn from(snapshot: proto::Snapshot) -> SnapshotInfo {
        let proto::Snapshot { name, size, created_ms, removing: is_removing } = snapshot;
        SnapshotInfo { name, size, created_ms, is_removing }
    }
}

/// Returns the message of a front end.
///
/// # Errors
/// [`Error::BadRequest`] if the messages have no such kind of front end.
pub(crate) fn front_end_message(front_end: FrontEnd) -> Result<proto::FrontEnd, Error> {
    let kind = match front_end {
        FrontEnd::VhostUser(path) => Kind::VhostUser(path),
        FrontEnd::Nbd(address) => Kind::Nbd(address),
        other => return Err(Error::BadRequest(format!("the front end {other} is unknown"))),
    };
    Ok(proto::FrontEnd { kind: Some(kind) })
}

/// Reads the front end of a message.
///
/// # Errors
/// [`Error::BadRequest`] if it is missing, or of an unknown kind.
pub(crate) fn front_end(message: Option<proto::FrontEnd>) -> Result<FrontEnd, Error> {
    match message.and_then(|message| message.kind) {
        Some(Kind::VhostUser(path)) => Ok(FrontEnd::VhostUser(path)),
        Some(Kind::Nbd(address)) => Ok(FrontEnd::Nbd(address)),
        None => Err(Error::BadRequest("the message names no front end of a known kind".into())),
    }
}

/// Makes the call for a request about disks.
pub(crate) async fn call_disks(
    channel: Channel,
    request: DiskRequest,
    repeated: bool,
) -> Result<AdminReply, FailedCall> {
    let mut disks = DisksClient::new(channel);
    let DiskRequest { pool, command } = request;
    match command {
        DiskCommand::Create { disk, size, chunk } => {
            disks.create_disk(proto::CreateDiskRequest { pool, disk, size, chunk, repeated }).await?;
        }
        DiskCommand::List => {
            let answer = disks.list_disks(proto::ListDisksRequest { pool }).await?.into_inner();
            let disks = answer.disks.into_iter().map(DiskInfo::from).collect();
            return Ok(AdminReply::Disk(DiskReply::Disks(disks)));
        }
        DiskCommand::Stat { disk } => {
            let answer = disks.get_disk(proto::GetDiskRequest { pool, disk }).await?.into_inner();
            let disk = answer.disk.ok_or_else(|| BadAnswer("the disk is missing".into()))?;
            return Ok(AdminReply::Disk(DiskReply::Disks(vec![disk.into()])));
        }
        DiskCommand::Remove { disk, with_snapshots } => {
            let request = proto::RemoveDiskRequest { pool, disk, with_snapshots, repeated };
            disks.remove_disk(request).await?;
        }
        DiskCommand::Resize { disk, size, shrinks: shrink } => {
            disks.resize_disk(proto::ResizeDiskRequest { pool, disk, size, shrink }).await?;
        }
        DiskCommand::Snapshot { disk, snapshot } => {
            disks.snapshot_disk(proto::SnapshotDiskRequest { pool, disk, snapshot, repeated }).await?;
        }
        DiskCommand::RemoveSnapshot { disk, snapshot } => {
            let request = proto::RemoveSnapshotRequest { pool, disk, snapshot, repeated };
            disks.remove_snapshot(request).await?;
        }
        DiskCommand::Clone { disk, snapshot, clone } => {
            let request = proto::CloneSnapshotRequest { pool, disk, snapshot, clone, repeated };
            disks.clone_snapshot(request).await?;
        }
        DiskCommand::Flatten { disk } => {
            disks.flatten_disk(proto::FlattenDiskRequest { pool, disk }).await?;
        }
        DiskCommand::Usage { disk } => {
            let answer = disks.get_disk_usage(proto::GetDiskUsageRequest { pool, disk }).await?;
            let proto::GetDiskUsageResponse { size, allocated } = answer.into_inner();
            return Ok(AdminReply::Disk(DiskReply::Usage(DiskSpace { size, allocated })));
        }
        DiskCommand::Attach { disk, front_end: wanted, gateway, takes_over, is_read_only } => {
            let request = proto::AttachDiskRequest {
                pool,
                disk,
                front_end: Some(front_end_message(wanted)?),
                gateway,
                take_over: takes_over,
                read_only: is_read_only,
            };
            let answer = disks.attach_disk(request).await?.into_inner();
            let attached = front_end(answer.front_end).map_err(BadAnswer::of)?;
            return Ok(AdminReply::Disk(DiskReply::Attached(attached)));
        }
        DiskCommand::Detach { disk } => {
            disks.detach_disk(proto::DetachDiskRequest { pool, disk, repeated }).await?;
        }
        other => return Err(Error::BadRequest(format!("the control plane has no call for {other:?}")).into()),
    }
    Ok(AdminReply::Disk(DiskReply::Done))
}
