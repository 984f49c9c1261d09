//! The requests of operators about disks.

use vdisk::{CHUNK_DEFAULT, CreateOptions, DiskHeader, SnapshotName};
use wire::{DiskCommand, DiskInfo, DiskReply, DiskRequest, DiskSpace, Error, SnapshotInfo};

use crate::attachments::DiskAttachment;
use crate::gateway::{Gateway, GatewayError};

impl Gateway {
    /// Executes a request of an operator, whose rights the node has checked.
    ///
    /// # Errors
    /// [`Error::CommandRefused`] with the reason, or the error of the node.
    pub async fn execute(&self, request: DiskRequest) -> wire::Result<DiskReply> {
        self.run(request).await.map_err(wire_error)
    }

    /// Returns the answer for a disk that another gateway may have attached.
    fn elsewhere(&self, result: vdisk::Result<()>) -> Result<DiskReply, GatewayError> {
        match result {
            Ok(()) => Ok(DiskReply::Done),
            Err(vdisk::Error::Attached { owner, .. }) if owner != self.name() => Ok(DiskReply::NotHere),
            Err(e) => Err(e.into()),
        }
    }

    async fn run(&self, DiskRequest { pool, command }: DiskRequest) -> Result<DiskReply, GatewayError> {
        let disks = self.disks(&pool)?;
        let place = |disk: &str| format!("{pool}/{disk}");
        let snapshot = |disk: &str, snapshot: &str| format!("{disk}@{snapshot}").parse::<SnapshotName>();
        match command {
            DiskCommand::Create { disk, size, chunk } => {
                let chunk = if chunk == 0 { CHUNK_DEFAULT } else { chunk };
                disks.create(&disk, CreateOptions { size, chunk }).await?;
            }
            DiskCommand::List => {
                return Ok(DiskReply::Disks(disks.list().await?.iter().map(info).collect()));
            }
            DiskCommand::Stat { disk } => {
                return Ok(DiskReply::Disks(vec![info(&disks.stat(&disk).await?)]));
            }
            DiskCommand::Remove { disk, with_snapshots } => {
                disks.remove(&disk, with_snapshots).await?;
                self.wake_upkeep();
            }
            DiskCommand::Resize { disk, size, shrinks } => match self.attached(&place(&disk)) {
                Some(attached) => attached.resize(size, shrinks).await?,
                None => {
                    let resized = disks.resize(&disk, size, shrinks).await;
                    self.wake_upkeep();
                    return self.elsewhere(resized);
                }
            },
            DiskCommand::Snapshot { disk, snapshot: name } => match self.attached(&place(&disk)) {
                Some(attached) => attached.snapshot(&name).await?,
                None => return self.elsewhere(disks.snapshot(&snapshot(&disk, &name)?).await),
            },
            DiskCommand::RemoveSnapshot { disk, snapshot: name } => {
                disks.remove_snapshot(&snapshot(&disk, &name)?).await?;
                self.wake_upkeep();
            }
            DiskCommand::Clone { disk, snapshot: name, clone } => {
                disks.clone_snapshot(&snapshot(&disk, &name)?, &clone).await?;
            }
            DiskCommand::Flatten { disk } => {
                disks.flatten(&disk).await?;
                self.wake_upkeep();
            }
            DiskCommand::Usage { disk } => {
                let usage = disks.usage(&disk).await?;
                return Ok(DiskReply::Usage(DiskSpace { size: usage.size, allocated: usage.allocated }));
            }
            DiskCommand::Attach { disk, front_end, gateway: _, takes_over, is_read_only } => {
                let attachment = DiskAttachment { pool, disk, front_end, is_read_only };
                return self.attach(attachment, takes_over).await;
            }
            DiskCommand::Detach { disk } => match self.detach(&pool, &disk).await {
                Err(GatewayError::NotHere(_)) => return Ok(DiskReply::NotHere),
                detached => detached?,
            },
            other => {
                let why = format!("this gateway does not know {other:?}; use one of the node's version");
                return Err(vdisk::Error::Argument(why).into());
            }
        }
        Ok(DiskReply::Done)
    }
}

fn wire_error(e: GatewayError) -> Error {
    match e {
        GatewayError::Disk(vdisk::Error::Client(client::Error::Node(e))) => e,
        e => Error::CommandRefused(e.to_string()),
    }
}

/// Returns what operators see of a disk.
fn info(header: &DiskHeader) -> DiskInfo {
    let snapshot = |one: &vdisk::DiskSnapshot| SnapshotInfo {
        name: one.name.clone(),
        size: one.size,
        created_ms: one.created_ms,
        is_removing: one.is_removing,
    };
    DiskInfo {
        name: header.name.clone(),
        size: header.size,
        chunk: header.chunk,
        created_ms: header.created_ms,
        serial: header.serial.clone(),
        nguid: header.nguid.iter().map(|byte| format!("{byte:02x}")).collect(),
        snapshots: header.snapshots.iter().map(snapshot).collect(),
        parent: header.parent.as_ref().map(|parent| parent.name.clone()),
        is_flattening: header.is_flattening,
        gateway: header.owner.as_ref().map(|owner| owner.gateway.clone()),
        attached_ms: header.owner.as_ref().map(|owner| owner.since_ms),
    }
}
