//! [`DiskHeader`]: the record of a disk.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// Format of the record.
const FORMAT: u8 = 1;
/// Maximum number of snapshots of a disk.
pub(crate) const SNAPSHOTS_MAX: usize = 512;
/// Maximum number of layers of a disk, with those of the disks of which it is a clone.
const LAYERS_MAX: usize = wire::limits::MAX_FALLBACKS;

/// The record of a disk: the content of its header object, one format byte and then the fields in
/// postcard format.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskHeader {
    /// Number of the disk in its pool.
    pub id: u64,
    /// Name of the disk.
    pub name: String,
    /// Size, in bytes.
    pub size: u64,
    /// Size of a chunk, in bytes.
    pub chunk: u64,
    /// Number of the first disk of the family of clones, which is part of the placement keys.
    pub root: u64,
    /// The layers, newest first. The first one takes the writes.
    pub layers: Vec<DiskLayer>,
    /// The snapshots, oldest first.
    pub snapshots: Vec<DiskSnapshot>,
    /// The snapshot of which the disk is a clone, until the disk was flattened.
    pub parent: Option<Parent>,
    /// Number of the last attachment, or of the last change that made the disk smaller. While it stays the
    /// same and the disk is not attached, the content of the disk stays the same.
    pub epoch: u64,
    /// The owner of the disk; `None` if it is not attached.
    pub owner: Option<DiskOwner>,
    /// Names of earlier owners and workers that may not have been fenced.
    pub unfenced: Vec<Bytes>,
    /// The process that does the upkeep of the disk; `None` if none does. The time is that of its last
    /// sign of life.
    pub worker: Option<DiskOwner>,
    /// Namespace globally unique identifier (NVMe base specification, section 4.5).
    pub nguid: [u8; 16],
    /// Serial number.
    pub serial: String,
    /// Time of the creation, in milliseconds since 1970.
    pub created_ms: u64,
    /// Whether the disk is being flattened.
    pub is_flattening: bool,
    /// Whether the disk is being removed.
    pub is_removing: bool,
    /// Whether it is certain that there is no clone of a disk that is being removed.
    pub is_released: bool,
    /// Offset, in bytes, from which on old data has still to be removed, because the disk was made
    /// smaller.
    pub trim_from: Option<u64>,
}

/// A layer of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskLayer {
    /// Number of the layer in its pool.
    pub id: u64,
    /// Number of the first chunk of which older layers are not visible through this layer. A disk that
    /// was made smaller and then larger again reads zeros there.
    pub visible_below: u64,
    /// Whether the layer belongs to this disk, and not to the disk of which it is a clone.
    pub is_own: bool,
}

/// A snapshot of a disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskSnapshot {
    /// Name.
    pub name: String,
    /// Number of the newest layer of the snapshot.
    pub layer: u64,
    /// Size of the disk at the time of the snapshot, in bytes.
    pub size: u64,
    /// Time of the snapshot, in milliseconds since 1970.
    pub created_ms: u64,
    /// Whether the snapshot is being removed.
    pub is_removing: bool,
    /// Whether it is certain that there is no clone of a snapshot that is being removed, so that its chunks
    /// may be moved.
    pub is_released: bool,
}

/// The snapshot of which a disk is a clone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parent {
    /// Number of the disk.
    pub disk: u64,
    /// Name of the disk and of its snapshot at the time of the clone: `DISK@SNAPSHOT`.
    pub name: String,
    /// Number of the newest layer of the snapshot.
    pub layer: u64,
}

/// The owner of a disk, or its worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskOwner {
    /// Name of its engine, by which its successor fences it.
    pub name: Bytes,
    /// The gateway, for operators.
    pub gateway: String,
    /// Time, in milliseconds since 1970.
    pub since_ms: u64,
}

impl DiskHeader {
    /// Encodes the record.
    pub(crate) fn encode(&self) -> Bytes {
        // Encoding plain data into a growing vector cannot fail.
        postcard::to_extend(self, vec![FORMAT]).expect("plain data can be encoded").into()
    }

    /// Decodes the record of the object `what`.
    ///
    /// # Errors
    /// [`Error::BadRecord`] if it is damaged or of another format.
    pub(crate) fn decode(bytes: &[u8], what: &str) -> Result<DiskHeader> {
        let bad = |why: String| Error::BadRecord { what: what.to_owned(), why };
        let header: DiskHeader = match bytes.split_first() {
            Some((&FORMAT, rest)) => postcard::from_bytes(rest).map_err(|e| bad(e.to_string()))?,
            Some((format, _)) => return Err(bad(format!("its format is {format} instead of {FORMAT}"))),
            None => return Err(bad("it is empty".into())),
        };
        header.check().map_err(bad)?;
        Ok(header)
    }

    fn check(&self) -> Result<(), String> {
        use crate::names::{CHUNK_MAX, CHUNK_MIN, SIZE_MAX};
        let is_chunk = self.chunk.is_power_of_two() && (CHUNK_MIN..=CHUNK_MAX).contains(&self.chunk);
        if !is_chunk || self.size > SIZE_MAX || !self.size.is_multiple_of(disk::BLOCK) {
            return Err(format!("a disk of {} bytes with chunks of {} bytes", self.size, self.chunk));
        }
        let has_layer = |id: u64| self.layers.iter().any(|layer| layer.id == id);
        if self.layers.first().is_none_or(|top| !top.is_own) {
            return Err("the disk has no layer of its own".into());
        }
        if self.snapshots.iter().any(|snapshot| !has_layer(snapshot.layer)) {
            return Err("the layer of a snapshot is missing".into());
        }
        Ok(())
    }

    /// Returns a snapshot that is not being removed.
    ///
    /// # Errors
    /// [`Error::NoSuchSnapshot`].
    pub(crate) fn snapshot(&self, name: &str) -> Result<&DiskSnapshot> {
        let found = self.snapshots.iter().find(|snapshot| snapshot.name == name && !snapshot.is_removing);
        found.ok_or_else(|| Error::NoSuchSnapshot { disk: self.name.clone(), snapshot: name.to_owned() })
    }

    /// Adds a snapshot of the top layer, and puts a new layer on top.
    ///
    /// # Errors
    /// [`Error::Exists`] if there is a snapshot with this name, and [`Error::InUse`] if there are too many.
    pub(crate) fn add_snapshot(&mut self, name: &str, layer: u64, now_ms: u64) -> Result<()> {
        if self.snapshots.iter().any(|snapshot| snapshot.name == name) {
            return Err(Error::Exists(format!("the snapshot \"{}@{name}\"", self.name)));
        }
        if self.trim_from.is_some() {
            let why = format!("old data of the disk \"{}\" is being removed; try again", self.name);
            return Err(Error::InUse(why));
        }
        if self.snapshots.len() >= SNAPSHOTS_MAX {
            let why = format!("the disk \"{}\" has {SNAPSHOTS_MAX} snapshots; remove one first", self.name);
            return Err(Error::InUse(why));
        }
        self.check_depth()?;
        let snapshot = DiskSnapshot {
            name: name.to_owned(),
            layer: self.layers[0].id,
            size: self.size,
            created_ms: now_ms,
            is_removing: false,
            is_released: false,
        };
        self.snapshots.push(snapshot);
        self.layers.insert(0, DiskLayer { id: layer, visible_below: u64::MAX, is_own: true });
        Ok(())
    }

    /// Checks that a layer can be put on top.
    ///
    /// # Errors
    /// [`Error::InUse`] if there are too many layers.
    pub(crate) fn check_depth(&self) -> Result<()> {
        if self.layers.len() < LAYERS_MAX {
            return Ok(());
        }
        Err(Error::InUse(format!(
            "the disk \"{}\" consists of {LAYERS_MAX} layers of snapshots and clones; flatten it, or remove \
             snapshots first",
            self.name
        )))
    }

    /// Returns whether chunks are being moved or copied between layers.
    pub(crate) fn is_moving(&self) -> bool {
        self.is_flattening || self.snapshots.iter().any(|snapshot| snapshot.is_removing)
    }

    /// Returns the number of chunks of the disk.
    pub(crate) fn chunks(&self) -> u64 {
        self.size.div_ceil(self.chunk)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    pub(crate) fn example() -> DiskHeader {
        DiskHeader {
            id: 1,
            name: "vm".into(),
            size: 1 << 30,
            chunk: 4 << 20,
            root: 1,
            layers: vec![DiskLayer { id: 2, visible_below: u64::MAX, is_own: true }],
            snapshots: vec![],
            parent: None,
            epoch: 0,
            owner: None,
            unfenced: vec![],
            worker: None,
            nguid: [7; 16],
            serial: "s".into(),
            created_ms: 5,
            is_flattening: false,
            is_removing: false,
            is_released: false,
            trim_from: None,
        }
    }

    #[test]
    fn a_record_is_decoded_as_it_was_encoded() {
        let mut header = example();
        header.add_snapshot("monday", 9, 6).unwrap();
        assert!(matches!(header.add_snapshot("monday", 10, 7), Err(Error::Exists(_))));
        header.owner = Some(DiskOwner { name: "x".into(), gateway: "gateway 1".into(), since_ms: 8 });
        let bytes = header.encode();
        assert_eq!(DiskHeader::decode(&bytes, "it").unwrap(), header);
        assert_eq!(header.snapshot("monday").unwrap().layer, 2);
        assert!(matches!(header.snapshot("friday"), Err(Error::NoSuchSnapshot { .. })));
        let later = [&[9], &bytes[1..]].concat();
        assert!(DiskHeader::decode(&later, "it").unwrap_err().to_string().contains("later version"));
    }

    #[test]
    fn impossible_records_are_refused() {
        let refused = |change: fn(&mut DiskHeader)| {
            let mut header = example();
            change(&mut header);
            assert!(matches!(DiskHeader::decode(&header.encode(), "it"), Err(Error::BadRecord { .. })));
        };
        refused(|header| header.chunk = 3 << 20);
        refused(|header| header.size = u64::MAX - 511);
        refused(|header| header.size = 100);
        refused(|header| header.layers.clear());
        refused(|header| header.layers[0].is_own = false);
        refused(|header| {
            header.add_snapshot("s", 9, 1).unwrap();
            header.layers.pop();
        });
    }

    proptest! {
        #[test]
        fn decoding_arbitrary_bytes_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = DiskHeader::decode(&[&[FORMAT], &bytes[..]].concat(), "it");
        }
    }
}
