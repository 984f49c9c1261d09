//! Names of disks and snapshots on the command line.

use std::fmt;
use std::str::FromStr;

use vdisk::{SnapshotName, check_name};
use wire::PoolName;

/// A disk, written `POOL/DISK`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskPath {
    /// Name of the pool.
    pub pool: String,
    /// Name of the disk.
    pub disk: String,
}

/// A snapshot of a disk, written `POOL/DISK@SNAPSHOT`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotPath {
    /// The disk.
    pub of: DiskPath,
    /// Name of the snapshot.
    pub snapshot: String,
}

/// A disk or a snapshot, written `POOL/DISK` or `POOL/DISK@SNAPSHOT`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskOrSnapshot {
    /// The disk.
    pub of: DiskPath,
    /// Name of the snapshot; `None` for the disk itself.
    pub snapshot: Option<String>,
}

impl FromStr for DiskOrSnapshot {
    type Err = String;

    fn from_str(text: &str) -> Result<DiskOrSnapshot, String> {
        let Some((pool, rest)) = text.split_once('/') else {
            return Err(format!("\"{text}\" contains no '/'; write POOL/DISK"));
        };
        if pool.contains(':') {
            return Err("disks have no namespaces; write POOL/DISK".into());
        }
        PoolName::new(pool).map_err(|e| e.to_string())?;
        let (disk, snapshot) = match rest.split_once('@') {
            Some((disk, snapshot)) => (disk, Some(snapshot)),
            None => (rest, None),
        };
        check_name("disk", disk).map_err(|e| e.to_string())?;
        if let Some(snapshot) = snapshot {
            check_name("snapshot", snapshot).map_err(|e| e.to_string())?;
        }
        let of = DiskPath { pool: pool.to_owned(), disk: disk.to_owned() };
        Ok(DiskOrSnapshot { of, snapshot: snapshot.map(str::to_owned) })
    }
}

impl FromStr for DiskPath {
    type Err = String;

    fn from_str(text: &str) -> Result<DiskPath, String> {
        match text.parse()? {
            DiskOrSnapshot { of, snapshot: None } => Ok(of),
            _ => Err(format!("\"{text}\" names a snapshot; write POOL/DISK")),
        }
    }
}

impl FromStr for SnapshotPath {
    type Err = String;

    fn from_str(text: &str) -> Result<SnapshotPath, String> {
        match text.parse()? {
            DiskOrSnapshot { of, snapshot: Some(snapshot) } => Ok(SnapshotPath { of, snapshot }),
            _ => Err(format!("\"{text}\" names no snapshot; write POOL/DISK@SNAPSHOT")),
        }
    }
}

impl From<&SnapshotPath> for SnapshotName {
    fn from(path: &SnapshotPath) -> SnapshotName {
        SnapshotName { disk: path.of.disk.clone(), snapshot: path.snapshot.clone() }
    }
}

impl fmt::Display for DiskPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.pool, self.disk)
    }
}

impl fmt::Display for SnapshotPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.of, self.snapshot)
    }
}

impl fmt::Display for DiskOrSnapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.snapshot {
            Some(snapshot) => write!(f, "{}@{snapshot}", self.of),
            None => self.of.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_disks_and_snapshots_are_read_as_they_are_shown() {
        for text in ["p/vm", "p/vm@monday", "p.1/a_b-c"] {
            assert_eq!(text.parse::<DiskOrSnapshot>().unwrap().to_string(), text);
        }
        assert_eq!("p/vm".parse::<DiskPath>().unwrap().to_string(), "p/vm");
        assert_eq!("p/vm@s".parse::<SnapshotPath>().unwrap().to_string(), "p/vm@s");
    }

    #[test]
    fn names_that_are_no_disks_are_refused_with_the_right_form() {
        for (text, hint) in [
            ("vm", "POOL/DISK"),
            ("p:ns/vm", "namespaces"),
            ("p/vm@s", "names a snapshot"),
            ("p/", "letters"),
            ("p/a/b", "letters"),
            ("/vm", ""),
        ] {
            let refused = text.parse::<DiskPath>().unwrap_err();
            assert!(refused.contains(hint), "{text}: {refused}");
        }
        for text in ["p/vm", "p/vm@", "p/vm@a@b", "p/@s"] {
            assert!(text.parse::<SnapshotPath>().is_err(), "{text}");
        }
    }
}
