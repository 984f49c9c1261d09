//! [`DiskDirectory`]: the directory object of a pool's disks.
//!
//! Its omap has these entries. Integers are in hexadecimal in keys, and in postcard format in values.
//!
//! ```text
//! n/NAME            number of the disk, and whether its creation is complete
//! r/DISK            the disk is being removed
//! c/LAYER/DISK      the disk is a clone that uses the layer, and all older layers, of another disk
//! next              next free number for a disk or layer
//! ```

use bytes::Bytes;
use client::{Compound, Object, Pool};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use wire::limits::MAX_PAGE;

use crate::names::{DIRECTORY, name_key};
use crate::{Error, Result};

const NEXT: Bytes = Bytes::from_static(b"next");

/// The directory object of a pool's disks.
#[derive(Debug, Clone)]
pub(crate) struct DiskDirectory(Object);

/// The entry of a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NamedDisk {
    /// Number of the disk, which is followed by the number of its first layer.
    pub(crate) id: u64,
    /// Whether the creation of the disk is complete. Until then, the disk is visible if it has a record,
    /// and another creation may take the name if it has none.
    pub(crate) is_complete: bool,
}

fn encode<T: Serialize>(value: T) -> Bytes {
    postcard::to_stdvec(&value).expect("plain data can be encoded").into()
}

fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    postcard::from_bytes(bytes)
        .map_err(|e| Error::BadRecord { what: format!("the {DIRECTORY} of disks"), why: e.to_string() })
}

fn removal_key(disk: u64) -> Bytes {
    format!("r/{disk:x}").into()
}

fn clone_key(layer: u64, disk: u64) -> Bytes {
    format!("c/{layer:x}/{disk:x}").into()
}

/// Returns whether a compound has failed because one of its conditions does not hold.
pub(crate) fn is_conflict(e: &client::Error) -> bool {
    matches!(e, client::Error::Node(wire::Error::ConditionFailed { .. } | wire::Error::Exists(_)))
}

impl DiskDirectory {
    /// Opens the directory in the namespace of disks.
    pub(crate) fn new(pool: &Pool) -> Result<DiskDirectory> {
        Ok(DiskDirectory(pool.object(DIRECTORY)?))
    }

    async fn entry<T: DeserializeOwned>(&self, key: Bytes) -> Result<Option<T>> {
        match self.0.omap_get(vec![key]).await {
            Ok(found) => found.first().map(|(_, value)| decode(value)).transpose(),
            Err(e) if e.is_not_found() => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    /// Returns the entries with a prefix, without it.
    async fn entries(&self, prefix: &str) -> Result<Vec<(String, Bytes)>> {
        let end = Bytes::from(
            [&prefix.as_bytes()[..prefix.len() - 1], &[prefix.as_bytes()[prefix.len() - 1] + 1]].concat(),
        );
        let (mut from, mut all) = (Bytes::copy_from_slice(prefix.as_bytes()), Vec::new());
        loop {
            let page = self.0.omap_range(from, Some(end.clone()), MAX_PAGE).await;
            let client::OmapPage { entries, more } = match page {
                Err(e) if e.is_not_found() => return Ok(all),
                page => page?,
            };
            let last = entries.last().map(|(key, _)| [key, &b"\0"[..]].concat().into());
            for (key, value) in entries {
                let key = String::from_utf8_lossy(&key[prefix.len()..]).into_owned();
                all.push((key, value));
            }
            match last {
                Some(next) if more => from = next,
                _ => return Ok(all),
            }
        }
    }

    /// Returns the entry of a name.
    pub(crate) async fn named(&self, name: &str) -> Result<Option<NamedDisk>> {
        self.entry(name_key(name)).await
    }

    /// Returns the number of a disk.
    pub(crate) async fn lookup(&self, name: &str) -> Result<Option<u64>> {
        Ok(self.named(name).await?.map(|named| named.id))
    }

    /// Returns the names and numbers of all disks.
    pub(crate) async fn list(&self) -> Result<Vec<(String, u64)>> {
        let entries = self.entries("n/").await?;
        entries.into_iter().map(|(name, value)| Ok((name, decode::<NamedDisk>(&value)?.id))).collect()
    }

    /// Takes `count` numbers, and makes other changes of the directory in the same step. Returns the first
    /// of the numbers; `None` if the conditions of these changes do not hold.
    async fn take(
        &self,
        count: u64,
        with: impl Fn(Compound, u64) -> Compound,
        holds: impl AsyncFn() -> Result<bool>,
    ) -> Result<Option<u64>> {
        loop {
            let next: Option<u64> = self.entry(NEXT).await?;
            let first = next.unwrap_or(1);
            let compound = self.0.compound().if_omap(NEXT, next.map(encode));
            let compound = with(compound, first).omap_set(vec![(NEXT, encode(first + count))]);
            match compound.commit().await {
                Ok(_) => return Ok(Some(first)),
                Err(e) if is_conflict(&e) => {
                    if !holds().await? {
                        return Ok(None);
                    }
                }
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Takes `count` numbers. Returns the first of them.
    pub(crate) async fn allocate(&self, count: u64) -> Result<u64> {
        let first = self.take(count, |compound, _| compound, async || Ok(true)).await?;
        Ok(first.expect("there are no other conditions"))
    }

    /// Gives a name to a new disk, whose creation is not complete. The name must be free, or have the entry
    /// `before`. Returns the new entry; `None` if the name has another entry.
    pub(crate) async fn add(&self, name: &str, before: Option<NamedDisk>) -> Result<Option<NamedDisk>> {
        let key = name_key(name);
        let new = |id| NamedDisk { id, is_complete: false };
        let with = |compound: Compound, first: u64| {
            let compound = compound.if_omap(key.clone(), before.map(encode));
            compound.omap_set(vec![(key.clone(), encode(new(first)))])
        };
        Ok(self.take(2, with, async || Ok(self.named(name).await? == before)).await?.map(new))
    }

    /// Records that the creation of a disk is complete. Returns false if another creation has taken the name.
    pub(crate) async fn complete(&self, name: &str, named: NamedDisk) -> Result<bool> {
        let complete = NamedDisk { is_complete: true, ..named };
        let compound = self.0.compound().if_omap(name_key(name), Some(encode(named)));
        match compound.omap_set(vec![(name_key(name), encode(complete))]).commit().await {
            // The name has another entry.
            Err(e) if is_conflict(&e) => Ok(self.named(name).await? == Some(complete)),
            done => Ok(done.map(|_| true)?),
        }
    }

    /// Frees the name of a disk whose creation has failed, unless another creation has taken it.
    pub(crate) async fn give_up(&self, name: &str, named: NamedDisk) -> Result<()> {
        let compound = self.0.compound().if_omap(name_key(name), Some(encode(named)));
        match compound.omap_remove(vec![name_key(name)]).commit().await {
            Err(e) if is_conflict(&e) => Ok(()),
            done => Ok(done.map(drop)?),
        }
    }

    /// Frees the name of a disk, and records that the disk is being removed.
    pub(crate) async fn begin_removal(&self, name: &str, disk: u64) -> Result<()> {
        loop {
            let named = self.named(name).await?.filter(|named| named.id == disk);
            let named = named.ok_or_else(|| Error::NoSuchDisk(name.to_owned()))?;
            let compound = self.0.compound().if_omap(name_key(name), Some(encode(named)));
            let compound = compound.omap_remove(vec![name_key(name)]);
            match compound.omap_set(vec![(removal_key(disk), Bytes::new())]).commit().await {
                Err(e) if is_conflict(&e) => {}
                done => return Ok(done.map(drop)?),
            }
        }
    }

    /// Records that a disk was removed.
    pub(crate) async fn end_removal(&self, disk: u64) -> Result<()> {
        Ok(self.0.omap_remove(vec![removal_key(disk)]).await.map(drop)?)
    }

    /// Returns the numbers of the disks that are being removed.
    pub(crate) async fn removals(&self) -> Result<Vec<u64>> {
        let entries = self.entries("r/").await?;
        Ok(entries.iter().filter_map(|(disk, _)| u64::from_str_radix(disk, 16).ok()).collect())
    }

    /// Records that a disk uses a layer of another disk.
    pub(crate) async fn add_clone(&self, layer: u64, disk: u64, name: &str) -> Result<()> {
        let entry = (clone_key(layer, disk), Bytes::copy_from_slice(name.as_bytes()));
        Ok(self.0.omap_set(vec![entry]).await.map(drop)?)
    }

    /// Records that a disk no longer uses a layer of another disk.
    pub(crate) async fn remove_clone(&self, layer: u64, disk: u64) -> Result<()> {
        Ok(self.0.omap_remove(vec![clone_key(layer, disk)]).await.map(drop)?)
    }

    /// Returns the numbers and names of the clones that use a layer.
    pub(crate) async fn clones(&self, layer: u64) -> Result<Vec<(u64, String)>> {
        let entries = self.entries(&format!("c/{layer:x}/")).await?;
        let clone = |(disk, name): (String, Bytes)| {
            Some((u64::from_str_radix(&disk, 16).ok()?, String::from_utf8_lossy(&name).into_owned()))
        };
        Ok(entries.into_iter().filter_map(clone).collect())
    }
}
