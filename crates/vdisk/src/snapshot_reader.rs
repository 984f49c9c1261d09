//! [`SnapshotReader`]: reads a snapshot of a disk, which may be attached elsewhere.

use bytes::Bytes;
use client::engine::{ReadReply, ReadRequest, Sink};
use client::{Client, Pool};
use disk::{DiskError, DiskExtent};
use futures::future::try_join_all;

use crate::attached::zeros;
use crate::chunk_piece::ChunkPiece;
use crate::disks::Disks;
use crate::error::disk_error;
use crate::header::DiskSnapshot;
use crate::layers::LayerStack;
use crate::names::SnapshotName;
use crate::{Error, Result};

/// A read-only view of a snapshot. It needs no owner, because a snapshot never changes.
///
/// If the snapshot is removed, its chunks vanish, and reads return zeros. The data that was read is valid
/// if a later [`check`](SnapshotReader::check) succeeds. Any thread may use a reader.
#[derive(Debug)]
pub struct SnapshotReader {
    client: Client,
    pool: Pool,
    disks: Disks,
    of: SnapshotName,
    nguid: [u8; 16],
    snapshot: DiskSnapshot,
    chunk: u64,
    stack: LayerStack,
}

impl SnapshotReader {
    /// Opens a snapshot.
    ///
    /// # Errors
    /// [`Error::NoSuchDisk`], [`Error::NoSuchSnapshot`].
    pub async fn open(client: &Client, disks: &Disks, of: &SnapshotName) -> Result<SnapshotReader> {
        let header = disks.stat(&of.disk).await?;
        let snapshot = header.snapshot(&of.snapshot)?.clone();
        Ok(SnapshotReader {
            client: client.clone(),
            pool: disks.pool.clone(),
            disks: disks.clone(),
            of: of.clone(),
            nguid: header.nguid,
            stack: LayerStack::of_snapshot(&header, snapshot.layer),
            snapshot,
            chunk: header.chunk,
        })
    }

    /// Returns the record of the snapshot, with its size.
    #[must_use]
    pub fn snapshot(&self) -> &DiskSnapshot {
        &self.snapshot
    }

    /// Returns the identifier of the disk.
    #[must_use]
    pub fn nguid(&self) -> [u8; 16] {
        self.nguid
    }

    /// Returns the size of a chunk, in bytes.
    #[must_use]
    pub fn chunk(&self) -> u64 {
        self.chunk
    }

    /// Checks that the snapshot still exists, so that all earlier reads were valid.
    ///
    /// # Errors
    /// [`Error::NoSuchDisk`] or [`Error::NoSuchSnapshot`] if it was removed meanwhile.
    pub async fn check(&self) -> Result<()> {
        let header = self.disks.stat(&self.of.disk).await?;
        let is_same = |one: &DiskSnapshot| one.layer == self.snapshot.layer && header.nguid == self.nguid;
        match header.snapshot(&self.of.snapshot) {
            Ok(one) if is_same(one) => Ok(()),
            _ => {
                Err(Error::NoSuchSnapshot { disk: self.of.disk.clone(), snapshot: self.of.snapshot.clone() })
            }
        }
    }

    /// Reads `len` bytes. The result has exactly this length.
    ///
    /// # Errors
    /// [`DiskError::OutOfRange`], or an error of the storage.
    pub async fn read(&self, offset: u64, len: u64) -> disk::Result<Vec<Bytes>> {
        let parts = ChunkPiece::cut(offset, len, self.snapshot.size, self.chunk)?;
        Ok(try_join_all(parts.into_iter().map(|part| self.read_part(part))).await?.concat())
    }

    async fn read_part(&self, part: ChunkPiece) -> disk::Result<Vec<Bytes>> {
        let ChunkPiece { index, within, len, .. } = part;
        let request = ReadRequest {
            name: self.pool.object(&self.stack.top(index)).map_err(|e| disk_error(&e))?.name().clone(),
            part: None,
            offset: within,
            len,
            if_version: None,
            sink: Sink::Bytes,
            fallbacks: self.stack.older(index),
        };
        match self.client.read(request).await {
            Ok(ReadReply::Data { len: read, mut chunks, .. }) => {
                if read < len {
                    chunks.extend(zeros(None, 0, len - read)?);
                }
                Ok(chunks)
            }
            Ok(ReadReply::Striped { .. }) => {
                Err(DiskError::Damaged(format!("the object {} is striped", self.stack.top(index))))
            }
            Err(client::Error::Node(wire::Error::NoSuchObject(_))) => zeros(None, 0, len),
            Err(e) => Err(disk_error(&e)),
        }
    }

    /// Returns which parts of a range have data, as consecutive extents in the order of their offsets.
    /// The first begins at `offset`, and the extents cover the range.
    ///
    /// # Errors
    /// As for [`read`](SnapshotReader::read).
    pub async fn extents(&self, offset: u64, len: u64) -> disk::Result<Vec<DiskExtent>> {
        let mut all = Vec::new();
        for part in ChunkPiece::cut(offset, len, self.snapshot.size, self.chunk)? {
            part.append_extents(self.ranges_of(part).await?, &mut all);
        }
        Ok(all)
    }

    /// Returns the ranges of a chunk with data.
    ///
    /// The removal of an older snapshot may move the chunk into a newer layer between two queries, so that
    /// queries from the newest to the oldest layer may miss it. Queries from the oldest to the newest layer
    /// cannot, because the chunk is copied before it is removed.
    async fn ranges_of(&self, part: ChunkPiece) -> disk::Result<Vec<std::ops::Range<u64>>> {
        let top = Bytes::from(self.stack.top(part.index));
        let names: Vec<Bytes> = std::iter::once(top).chain(self.stack.older(part.index)).collect();
        for name in &names {
            if let Some(ranges) = self.ranges_in(name, part).await? {
                return Ok(ranges);
            }
        }
        let mut found = Vec::new();
        if names.len() > 1 {
            for name in names.iter().rev() {
                found = self.ranges_in(name, part).await?.unwrap_or(found);
            }
        }
        Ok(found)
    }

    /// Returns the ranges with data of one object of a chunk; `None` if there is no object.
    async fn ranges_in(
        &self,
        name: &Bytes,
        part: ChunkPiece,
    ) -> disk::Result<Option<Vec<std::ops::Range<u64>>>> {
        let name = std::str::from_utf8(name).expect("names of chunks are ASCII");
        let object = self.pool.object(name).map_err(|e| disk_error(&e))?;
        match object.extents(part.within, part.len).await {
            Ok(ranges) => Ok(Some(ranges)),
            Err(client::Error::Node(wire::Error::NoSuchObject(_))) => Ok(None),
            Err(e) => Err(disk_error(&e)),
        }
    }
}
