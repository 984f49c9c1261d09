//! What `outboard disk` prints. The JSON form is stable: fields are never removed, but new fields may be
//! added.

use serde::Serialize;
use wire::{DiskInfo, DiskSpace, FrontEnd, SnapshotInfo};

use super::names::DiskPath;
use crate::output;
use node::units::ByteSize;

/// A disk, as `--json` shows it.
#[derive(Debug, Serialize)]
pub struct ShownDisk {
    name: String,
    size: u64,
    chunk: u64,
    created_ms: u64,
    serial: String,
    nguid: String,
    /// The oldest snapshot is the first.
    snapshots: Vec<ShownSnapshot>,
    /// `DISK@SNAPSHOT`, if the disk is a clone.
    parent: Option<String>,
    flattening: bool,
    /// The gateway or program to which the disk is attached.
    gateway: Option<String>,
    attached_ms: Option<u64>,
}

/// A snapshot, as `--json` shows it.
#[derive(Debug, Serialize)]
struct ShownSnapshot {
    name: String,
    size: u64,
    created_ms: u64,
    removing: bool,
}

/// The space of a disk, as `--json` shows it.
#[derive(Debug, Serialize)]
pub struct ShownSpace {
    disk: String,
    size: u64,
    allocated: u64,
}

/// An attached disk, as `--json` shows it.
#[derive(Debug, Serialize)]
pub struct ShownAttachment {
    disk: String,
    front_end: String,
}

/// A disk that was created, changed or removed, as `--json` shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ChangedDisk {
    /// `POOL/DISK`.
    pub disk: String,
    /// The snapshot that was taken or removed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// The snapshot of which the disk is a clone: `POOL/DISK@SNAPSHOT`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// New size, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
}

impl ChangedDisk {
    /// Returns a change of a disk without details.
    pub fn of(disk: &DiskPath) -> ChangedDisk {
        ChangedDisk { disk: disk.to_string(), snapshot: None, parent: None, size: None }
    }
}

impl From<DiskInfo> for ShownDisk {
    fn from(info: DiskInfo) -> ShownDisk {
        ShownDisk {
            name: info.name,
            size: info.size,
            chunk: info.chunk,
            created_ms: info.created_ms,
            serial: info.serial,
            nguid: info.nguid,
            snapshots: info.snapshots.into_iter().map(ShownSnapshot::from).collect(),
            parent: info.parent,
            flattening: info.is_flattening,
            gateway: info.gateway,
            attached_ms: info.attached_ms,
        }
    }
}

impl From<SnapshotInfo> for ShownSnapshot {
    fn from(info: SnapshotInfo) -> ShownSnapshot {
        let SnapshotInfo { name, size, created_ms, is_removing } = info;
        ShownSnapshot { name, size, created_ms, removing: is_removing }
    }
}

/// Prints the disks of a pool.
pub fn list(disks: Vec<DiskInfo>, json: bool) {
    if json {
        return output::json(&disks.into_iter().map(ShownDisk::from).collect::<Vec<_>>());
    }
    let width = disks.iter().map(|disk| disk.name.len()).max().unwrap_or(0).max(4);
    output::line(format!("{:width$}  {:>10}  SNAPSHOTS  ATTACHED TO", "DISK", "SIZE"));
    for disk in disks {
        let (size, snapshots) = (ByteSize(disk.size).to_string(), disk.snapshots.len());
        let gateway = disk.gateway.as_deref().unwrap_or("-");
        output::line(format!(
            "{:width$}  {size:>10}  {snapshots:>9}  {}",
            output::name(&disk.name),
            output::name(gateway)
        ));
    }
}

/// Prints one disk.
pub fn disk(info: DiskInfo, json: bool) {
    if json {
        return output::json(&ShownDisk::from(info));
    }
    let line = |key: &str, value: &str| output::line(format!("{key:<9} {}", output::name(value)));
    line("disk", &info.name);
    line("size", &format!("{} ({:.1})", info.size, ByteSize(info.size)));
    line("chunk", &ByteSize(info.chunk).to_string());
    line("created", &format!("{} ms since 1970", info.created_ms));
    line("serial", &info.serial);
    line("nguid", &info.nguid);
    if let Some(parent) = &info.parent {
        let flattening = if info.is_flattening { " (being flattened)" } else { "" };
        line("clone of", &format!("{parent}{flattening}"));
    }
    if let Some(gateway) = &info.gateway {
        let since = info.attached_ms.map_or(String::new(), |ms| format!(", since {ms} ms since 1970"));
        line("attached", &format!("to {gateway}{since}"));
    }
    for snapshot in &info.snapshots {
        let removing = if snapshot.is_removing { ", being removed" } else { "" };
        let (size, taken) = (ByteSize(snapshot.size), snapshot.created_ms);
        line("snapshot", &format!("{} ({size}, taken {taken} ms since 1970{removing})", snapshot.name));
    }
}

/// Prints the space of a disk.
pub fn space(disk: &DiskPath, DiskSpace { size, allocated }: DiskSpace, json: bool) {
    if json {
        return output::json(&ShownSpace { disk: disk.to_string(), size, allocated });
    }
    output::line(format!("size       {size} ({:.1})", ByteSize(size)));
    output::line(format!("allocated  {allocated} ({:.1})", ByteSize(allocated)));
}

/// Prints where front ends reach an attached disk.
pub fn attachment(disk: &DiskPath, front_end: &FrontEnd, json: bool) {
    if json {
        let (disk, front_end) = (disk.to_string(), front_end.to_string());
        return output::json(&ShownAttachment { disk, front_end });
    }
    output::line(front_end);
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_json_form_of_a_disk_is_stable() {
        let snapshot = SnapshotInfo { name: "monday".into(), size: 512, created_ms: 7, is_removing: true };
        let info = DiskInfo {
            name: "vm".into(),
            size: 1024,
            chunk: 4 << 20,
            created_ms: 5,
            serial: "s".into(),
            nguid: "0a".into(),
            snapshots: vec![snapshot],
            parent: Some("base@gold".into()),
            is_flattening: false,
            gateway: Some("gw1".into()),
            attached_ms: Some(9),
        };
        let expected = json!({
            "name": "vm", "size": 1024, "chunk": 4_194_304, "created_ms": 5, "serial": "s", "nguid": "0a",
            "snapshots": [{ "name": "monday", "size": 512, "created_ms": 7, "removing": true }],
            "parent": "base@gold", "flattening": false, "gateway": "gw1", "attached_ms": 9,
        });
        assert_eq!(serde_json::to_value(ShownDisk::from(info)).unwrap(), expected);
    }

    #[test]
    fn the_json_forms_of_changes_attachments_and_space_are_stable() {
        let disk: DiskPath = "p/vm".parse().unwrap();
        let changed = ChangedDisk::of(&disk);
        assert_eq!(serde_json::to_value(&changed).unwrap(), json!({ "disk": "p/vm" }));
        let all = ChangedDisk {
            snapshot: Some("s".into()),
            parent: Some("p/base@gold".into()),
            size: Some(512),
            ..changed
        };
        let expected = json!({ "disk": "p/vm", "snapshot": "s", "parent": "p/base@gold", "size": 512 });
        assert_eq!(serde_json::to_value(&all).unwrap(), expected);
        let space = ShownSpace { disk: "p/vm".into(), size: 10, allocated: 3 };
        let expected = json!({ "disk": "p/vm", "size": 10, "allocated": 3 });
        assert_eq!(serde_json::to_value(&space).unwrap(), expected);
        let attached = ShownAttachment { disk: "p/vm".into(), front_end: "nbd:h:1".into() };
        let expected = json!({ "disk": "p/vm", "front_end": "nbd:h:1" });
        assert_eq!(serde_json::to_value(&attached).unwrap(), expected);
    }
}
