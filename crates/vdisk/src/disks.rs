//! [`Disks`]: manages the disks of a pool.

use base::clock::WallClock;
use client::{Client, Object, Pool};
use futures::stream::{self, Stream, StreamExt, TryStreamExt};
use uuid::Uuid;
use wire::ObjectName;

use crate::directory::{DiskDirectory, NamedDisk, is_conflict};
use crate::header::{DiskHeader, DiskLayer, Parent};
use crate::names::{
    self, CHUNK_DEFAULT, CHUNK_MAX, CHUNK_MIN, NAMESPACE, SIZE_MAX, SnapshotName, check_name,
};
use crate::owners::{ATTEMPTS, fence_all};
use crate::{Error, Result};

/// Number of objects that are queried at a time.
const PARALLEL: usize = 32;
/// Content of a record that only prevents that a disk with this number is created.
const BLOCKED: &[u8] = &[0];

/// Properties of a new disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CreateOptions {
    /// Size in bytes: a multiple of 512, at most 64 TiB.
    pub size: u64,
    /// Size of a chunk in bytes: a power of two from 1 to 16 MiB.
    pub chunk: u64,
}

impl CreateOptions {
    /// Returns the options of a disk of `size` bytes.
    #[must_use]
    pub fn of_size(size: u64) -> CreateOptions {
        CreateOptions { size, chunk: CHUNK_DEFAULT }
    }

    fn check(self) -> Result<()> {
        check_size(self.size)?;
        if !self.chunk.is_power_of_two() || !(CHUNK_MIN..=CHUNK_MAX).contains(&self.chunk) {
            let why = format!("a chunk of {} bytes: use a power of two from 1 to 16 MiB", self.chunk);
            return Err(Error::Argument(why));
        }
        Ok(())
    }
}

/// Space of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DiskUsage {
    /// Size, in bytes.
    pub size: u64,
    /// Drive space of the disk's own chunks, without copies and parity, in bytes. Data that the disk shares
    /// with its snapshots or with clones counts once for each of them that has a chunk of its own.
    pub allocated: u64,
    /// Number of the disk's own chunks.
    pub chunks: u64,
}

/// The disks of a pool.
#[derive(Debug, Clone)]
pub struct Disks {
    pub(crate) client: Client,
    pub(crate) pool: Pool,
    pub(crate) directory: DiskDirectory,
    pub(crate) clock: WallClock,
}

impl Disks {
    /// Opens the disks of a pool.
    ///
    /// # Errors
    /// [`client::Error::Unsupported`] if the engine lacks a capability, [`client::Error::Name`] if the name
    /// of the pool is invalid.
    pub fn open(client: &Client, pool: &str, clock: WallClock) -> Result<Disks> {
        use client::engine::Capability;
        client.require(&[Capability::SameGroup, Capability::Inherit])?;
        let pool = client.pool(pool)?.namespace(NAMESPACE)?;
        Ok(Disks { client: client.clone(), directory: DiskDirectory::new(&pool)?, pool, clock })
    }

    /// Creates a disk that reads as zeros.
    ///
    /// # Errors
    /// [`Error::Argument`], [`Error::Exists`].
    pub async fn create(&self, name: &str, options: CreateOptions) -> Result<DiskHeader> {
        check_name("disk", name)?;
        options.check()?;
        let named = self.take_name(name).await?;
        let header = self.new_header(named.id, name, options);
        self.complete(&header, named).await?;
        Ok(header)
    }

    /// Gives a name to a new disk. The name of a disk that was not completely created counts as free.
    async fn take_name(&self, name: &str) -> Result<NamedDisk> {
        let before = self.directory.named(name).await?;
        let exists = || Error::Exists(format!("the disk \"{name}\""));
        if let Some(named) = before
            && (named.is_complete || self.load_id(named.id).await?.is_some())
        {
            return Err(exists());
        }
        // A number is never used twice, because its first creation may still be in progress.
        self.directory.add(name, before).await?.ok_or_else(exists)
    }

    /// Stores the record of a new disk, which exists then.
    async fn complete(&self, header: &DiskHeader, named: NamedDisk) -> Result<()> {
        let object = self.header_object(header.id)?;
        match object.compound().create().write_full(header.encode()).commit().await {
            // The record is blocked.
            Err(e) if is_conflict(&e) => return Err(Error::Conflict(header.name.clone())),
            made => drop(made?),
        }
        if self.directory.complete(&header.name, named).await? {
            return Ok(());
        }
        // Another disk has the name, so nobody can have used this one.
        object.remove().await?;
        Err(Error::Exists(format!("the disk \"{}\"", header.name)))
    }

    /// Prevents that a disk with this number is created. Returns false if it exists.
    async fn block(&self, id: u64) -> Result<bool> {
        let blocked = self.header_object(id)?.compound().create().write_full(BLOCKED).commit().await;
        match blocked {
            Err(e) if is_conflict(&e) => Ok(self.load_id(id).await?.is_none()),
            blocked => Ok(blocked.map(|_| true)?),
        }
    }

    fn new_header(&self, id: u64, name: &str, CreateOptions { size, chunk }: CreateOptions) -> DiskHeader {
        let uuid = Uuid::new_v4();
        DiskHeader {
            id,
            name: name.to_owned(),
            size,
            chunk,
            root: id,
            layers: vec![DiskLayer { id: id + 1, visible_below: u64::MAX, is_own: true }],
            snapshots: Vec::new(),
            parent: None,
            epoch: 0,
            owner: None,
            unfenced: Vec::new(),
            worker: None,
            nguid: *uuid.as_bytes(),
            // Serial numbers of virtio-blk and NVMe have at most 20 characters.
            serial: uuid.simple().to_string()[..20].to_owned(),
            created_ms: self.clock.now_ms(),
            is_flattening: false,
            is_removing: false,
            is_released: false,
            trim_from: None,
        }
    }

    /// Removes the record of a disk, if there is one.
    pub(crate) async fn remove_header(&self, id: u64) -> Result<()> {
        match self.header_object(id)?.remove().await {
            Err(e) if e.is_not_found() => Ok(()),
            removed => Ok(removed.map(drop)?),
        }
    }

    pub(crate) fn header_object(&self, id: u64) -> Result<Object> {
        Ok(self.pool.object(&names::header(id))?)
    }

    /// Returns the record of a disk.
    ///
    /// # Errors
    /// [`Error::NoSuchDisk`], [`Error::BadRecord`].
    pub async fn stat(&self, name: &str) -> Result<DiskHeader> {
        Ok(self.load(name).await?.0)
    }

    /// Returns the record of a disk, and the version of its object.
    pub(crate) async fn load(&self, name: &str) -> Result<(DiskHeader, u64)> {
        check_name("disk", name)?;
        let missing = || Error::NoSuchDisk(name.to_owned());
        let id = self.directory.lookup(name).await?.ok_or_else(missing)?;
        self.load_id(id).await?.filter(|(header, _)| !header.is_removing).ok_or_else(missing)
    }

    /// Returns the record of the disk with this number, and the version of its object.
    pub(crate) async fn load_id(&self, id: u64) -> Result<Option<(DiskHeader, u64)>> {
        let object = self.header_object(id)?;
        loop {
            let read = async {
                let version = object.stat().await?.version;
                Ok((object.get().await?, version, object.stat().await?.version))
            };
            match read.await {
                Ok((bytes, before, after)) if before == after => {
                    if bytes == BLOCKED {
                        return Ok(None);
                    }
                    return Ok(Some((DiskHeader::decode(&bytes, &names::header(id))?, before)));
                }
                Ok(_) => {}
                Err(e) if client::Error::is_not_found(&e) => return Ok(None),
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Replaces the record of a disk, if its object still has this version. Returns its new version.
    ///
    /// # Errors
    /// [`Error::Conflict`] if it has another version.
    pub(crate) async fn store(&self, header: &DiskHeader, version: u64) -> Result<u64> {
        let object = self.header_object(header.id)?;
        match object.compound().if_version(version).write_full(header.encode()).commit().await {
            Err(e) if is_conflict(&e) => Err(Error::Conflict(header.name.clone())),
            stored => Ok(stored?.version),
        }
    }

    /// Changes the record of a disk. Returns the new one.
    pub(crate) async fn change(
        &self,
        name: &str,
        change: impl Fn(&mut DiskHeader) -> Result<()>,
    ) -> Result<DiskHeader> {
        for _ in 0..ATTEMPTS {
            let (mut header, version) = self.load(name).await?;
            change(&mut header)?;
            match self.store(&header, version).await {
                Err(Error::Conflict(_)) => {}
                stored => return stored.map(|_| header),
            }
        }
        Err(Error::Conflict(name.to_owned()))
    }

    /// Changes the record of a disk that is not attached, after its last owner is fenced.
    async fn change_detached(
        &self,
        name: &str,
        change: impl Fn(&mut DiskHeader) -> Result<()>,
    ) -> Result<DiskHeader> {
        for _ in 0..ATTEMPTS {
            let (mut header, version) = self.load(name).await?;
            if let Some(owner) = &header.owner {
                let (disk, owner) = (name.to_owned(), owner.gateway.clone());
                return Err(Error::Attached { disk, owner });
            }
            change(&mut header)?;
            fence_all(&self.client, &header.unfenced).await?;
            header.unfenced.clear();
            match self.store(&header, version).await {
                Err(Error::Conflict(_)) => {}
                stored => return stored.map(|_| header),
            }
        }
        Err(Error::Conflict(name.to_owned()))
    }

    /// Returns the records of all disks, ordered by name.
    ///
    /// # Errors
    /// Those of the storage.
    pub async fn list(&self) -> Result<Vec<DiskHeader>> {
        let named = self.directory.list().await?;
        let load = |(_, id)| async move { self.load_id(id).await };
        let found = stream::iter(named).map(load).buffered(PARALLEL).try_collect::<Vec<_>>().await?;
        Ok(found
            .into_iter()
            .flatten()
            .map(|(header, _)| header)
            .filter(|header| !header.is_removing)
            .collect())
    }

    /// Takes a snapshot of a disk that is not attached.
    ///
    /// # Errors
    /// [`Error::Attached`] if it is attached: then its owner takes the snapshot.
    pub async fn snapshot(&self, SnapshotName { disk, snapshot }: &SnapshotName) -> Result<()> {
        let layer = self.directory.allocate(1).await?;
        let now_ms = self.clock.now_ms();
        let add = |header: &mut DiskHeader| header.add_snapshot(snapshot, layer, now_ms);
        self.change_detached(disk, add).await.map(drop)
    }

    /// Begins to remove a snapshot, which is no longer visible then. [`upkeep`](Self::upkeep) does the rest.
    ///
    /// # Errors
    /// [`Error::NoSuchSnapshot`], and [`Error::InUse`] if it has clones.
    pub async fn remove_snapshot(&self, SnapshotName { disk, snapshot }: &SnapshotName) -> Result<()> {
        let layer = self.stat(disk).await?.snapshot(snapshot)?.layer;
        let mark = |header: &mut DiskHeader| {
            let marked = header.snapshots.iter_mut().filter(|one| one.layer == layer);
            marked.for_each(|one| one.is_removing = true);
            Ok(())
        };
        self.change(disk, mark).await?;
        self.decide_on_snapshot(disk, layer).await
    }

    /// Decides whether a snapshot that is marked as being removed can be removed: a clone that is being made
    /// sees the mark, or is seen here. Only then its chunks may be moved. The decision may be repeated. It
    /// counts only if the record has not changed meanwhile, because another process may have decided
    /// otherwise.
    pub(crate) async fn decide_on_snapshot(&self, disk: &str, layer: u64) -> Result<()> {
        for _ in 0..ATTEMPTS {
            let (mut header, version) = self.load(disk).await?;
            let Some(one) = header.snapshots.iter_mut().find(|one| one.layer == layer) else {
                return Ok(());
            };
            if !one.is_removing || one.is_released {
                return Ok(());
            }
            let clones = self.clones(layer).await?;
            (one.is_removing, one.is_released) = (clones.is_empty(), clones.is_empty());
            let what = format!("the snapshot \"{disk}@{}\"", one.name);
            match self.store(&header, version).await {
                Err(Error::Conflict(_)) => {}
                stored => {
                    stored?;
                    return if clones.is_empty() { Ok(()) } else { Err(in_use(&what, &clones)) };
                }
            }
        }
        Err(Error::Conflict(disk.to_owned()))
    }

    /// Returns the clones that use a layer. Ends the creation of those that have no record yet. Removes the
    /// entries of those that were made independent.
    async fn clones(&self, layer: u64) -> Result<Vec<(u64, String)>> {
        let mut clones = Vec::new();
        for (id, name) in self.directory.clones(layer).await? {
            if self.load_id(id).await?.is_none() && !self.block(id).await? {
                // It was created meanwhile.
                clones.push((id, name));
                continue;
            }
            match self.load_id(id).await? {
                Some((header, _)) if header.parent.as_ref().is_some_and(|parent| parent.layer == layer) => {
                    clones.push((id, name));
                }
                _ => self.directory.remove_clone(layer, id).await?,
            }
        }
        Ok(clones)
    }

    /// Creates a disk that begins with the content of a snapshot.
    ///
    /// # Errors
    /// [`Error::NoSuchSnapshot`], [`Error::Exists`].
    pub async fn clone_snapshot(&self, of: &SnapshotName, name: &str) -> Result<DiskHeader> {
        check_name("disk", name)?;
        let source = self.stat(&of.disk).await?;
        let layer = source.snapshot(&of.snapshot)?.layer;
        let named = self.take_name(name).await?;
        let made = async {
            self.directory.add_clone(layer, named.id, name).await?;
            // The snapshot may have been removed before the entry of the clone was visible.
            let header = self.clone_header(of, layer, named.id, name).await?;
            self.complete(&header, named).await?;
            Ok(header)
        };
        let made = made.await;
        if let Err(e) = &made {
            let is_certain = !matches!(e, Error::Client(e) if e.may_have_taken_effect());
            if is_certain && self.load_id(named.id).await?.is_none() {
                self.directory.remove_clone(layer, named.id).await?;
                self.directory.give_up(name, named).await?;
                self.remove_header(named.id).await?;
            }
        }
        made
    }

    /// Returns the record of a new clone.
    async fn clone_header(&self, of: &SnapshotName, layer: u64, id: u64, name: &str) -> Result<DiskHeader> {
        let source = self.stat(&of.disk).await?;
        let snapshot = source.snapshot(&of.snapshot)?;
        if snapshot.layer != layer {
            return Err(Error::NoSuchSnapshot { disk: of.disk.clone(), snapshot: of.snapshot.clone() });
        }
        let options = CreateOptions { size: snapshot.size, chunk: source.chunk };
        let mut header = self.new_header(id, name, options);
        header.root = source.root;
        header.layers[0].visible_below = header.chunks();
        let older = source.layers.iter().skip_while(|one| one.id != layer);
        header.layers.extend(older.map(|one| DiskLayer { is_own: false, ..*one }));
        header.check_depth()?;
        header.parent = Some(Parent { disk: source.id, name: format!("{}@{}", of.disk, of.snapshot), layer });
        Ok(header)
    }

    /// Begins to make a clone independent of the disk of which it is a clone. [`upkeep`](Self::upkeep) does
    /// the rest.
    ///
    /// # Errors
    /// [`Error::Argument`] if it is no clone.
    pub async fn flatten(&self, name: &str) -> Result<()> {
        let mark = |header: &mut DiskHeader| {
            if header.parent.is_none() {
                return Err(Error::Argument(format!("the disk \"{name}\" is not a clone")));
            }
            header.is_flattening = true;
            Ok(())
        };
        self.change(name, mark).await.map(drop)
    }

    /// Begins to remove a disk, whose name is free then. [`upkeep`](Self::upkeep) does the rest.
    ///
    /// # Errors
    /// [`Error::Attached`]; [`Error::InUse`] if it has snapshots and `with_snapshots` is not set, or if there
    /// are clones of it.
    pub async fn remove(&self, name: &str, with_snapshots: bool) -> Result<()> {
        let mark = |header: &mut DiskHeader| {
            if header.snapshots.iter().any(|snapshot| !snapshot.is_removing) && !with_snapshots {
                let why = format!("the disk \"{name}\" has snapshots; remove them, too, with --snapshots");
                return Err(Error::InUse(why));
            }
            header.is_removing = true;
            Ok(())
        };
        let header = self.change_detached(name, mark).await?;
        self.decide_on_disk(name, header.id).await
    }

    /// Decides whether a disk that is marked as being removed can be removed, as
    /// [`decide_on_snapshot`](Self::decide_on_snapshot) does.
    pub(crate) async fn decide_on_disk(&self, name: &str, id: u64) -> Result<()> {
        for _ in 0..ATTEMPTS {
            let Some((mut header, version)) = self.load_id(id).await? else { return Ok(()) };
            if !header.is_removing {
                return Ok(());
            }
            if header.is_released {
                return self.directory.begin_removal(name, id).await;
            }
            let mut clones = Vec::new();
            for layer in header.layers.iter().filter(|layer| layer.is_own) {
                clones.extend(self.clones(layer.id).await?);
            }
            (header.is_removing, header.is_released) = (clones.is_empty(), clones.is_empty());
            match self.store(&header, version).await {
                Err(Error::Conflict(_)) => {}
                stored => {
                    stored?;
                    if !clones.is_empty() {
                        return Err(in_use(&format!("the disk \"{name}\""), &clones));
                    }
                }
            }
        }
        Err(Error::Conflict(name.to_owned()))
    }

    /// Changes the size of a disk that is not attached. If it is smaller then, [`upkeep`](Self::upkeep)
    /// removes the rest of the data.
    ///
    /// # Errors
    /// [`Error::Attached`] if it is attached: then its owner changes the size. [`Error::Argument`] if the
    /// size is invalid, or smaller than now and `shrinks` is not set.
    pub async fn resize(&self, name: &str, size: u64, shrinks: bool) -> Result<()> {
        check_size(size)?;
        self.change_detached(name, |header| set_size(header, size, shrinks)).await.map(drop)
    }

    /// Gives up the ownership of a disk whose owner on record is a gateway that does not have it attached.
    /// Has no effect if the disk has another owner, or does not exist.
    ///
    /// # Errors
    /// Those of the storage.
    pub async fn release(&self, name: &str, gateway: &str) -> Result<()> {
        let release = |header: &mut DiskHeader| {
            if header.owner.as_ref().is_some_and(|owner| owner.gateway == gateway) {
                header.unfenced.extend(header.owner.take().map(|owner| owner.name));
            }
            Ok(())
        };
        match self.change(name, release).await {
            Err(Error::NoSuchDisk(_)) => Ok(()),
            released => released.map(drop),
        }
    }

    /// Lists the objects of a layer's chunks.
    pub(crate) fn chunks_of(&self, layer: u64) -> impl Stream<Item = Result<ObjectName>> + use<> {
        let listing = self.pool.list(&names::layer_prefix(layer));
        stream::try_unfold(listing, |mut listing| async move {
            Ok(listing.next().await?.map(|name| (name, listing)))
        })
    }

    /// Returns the space of a disk.
    ///
    /// # Errors
    /// Those of the storage.
    pub async fn usage(&self, name: &str) -> Result<DiskUsage> {
        let header = self.stat(name).await?;
        let mut usage = DiskUsage { size: header.size, ..DiskUsage::default() };
        for layer in header.layers.iter().filter(|layer| layer.is_own) {
            let ask = |name: ObjectName| async move {
                match self.pool.object(name.object())?.allocated().await {
                    Err(e) if e.is_not_found() => Ok(0),
                    found => Ok(found?),
                }
            };
            let found = self.chunks_of(layer.id).map_ok(ask).try_buffer_unordered(PARALLEL);
            let add = |(chunks, sum), bytes| async move { Ok((chunks + 1, sum + bytes)) };
            let (chunks, allocated) = found.try_fold((0, 0), add).await?;
            usage.chunks += chunks;
            usage.allocated += allocated;
        }
        Ok(usage)
    }
}

/// Changes the size in the record of a disk.
pub(crate) fn set_size(header: &mut DiskHeader, size: u64, shrinks: bool) -> Result<()> {
    if size == header.size {
        return Ok(());
    }
    if header.trim_from.is_some() {
        return Err(Error::InUse(format!(
            "old data of the disk \"{}\" is being removed; try again",
            header.name
        )));
    }
    if size < header.size {
        if !shrinks {
            let why = format!(
                "the disk \"{}\" has {} bytes, and would lose data; confirm with --shrink",
                header.name, header.size
            );
            return Err(Error::Argument(why));
        }
        if header.is_moving() {
            // A chunk that is moved later must not bring back what the change of the size removes.
            let why = format!(
                "chunks of the disk \"{}\" are being moved, because a snapshot is removed or the disk is \
                 flattened; try again",
                header.name
            );
            return Err(Error::InUse(why));
        }
        let top = &mut header.layers[0];
        top.visible_below = top.visible_below.min(size.div_ceil(header.chunk));
        header.trim_from = Some(size);
        header.epoch += 1;
    }
    header.size = size;
    Ok(())
}

pub(crate) fn check_size(size: u64) -> Result<()> {
    if size == 0 || size > SIZE_MAX || !size.is_multiple_of(disk::BLOCK) {
        let why = format!("a disk of {size} bytes: use a multiple of 512 bytes, from 512 bytes to 64 TiB");
        return Err(Error::Argument(why));
    }
    Ok(())
}

fn in_use(what: &str, clones: &[(u64, String)]) -> Error {
    let names: Vec<&str> = clones.iter().map(|(_, name)| name.as_str()).collect();
    Error::InUse(format!("{what} has clones: {}; flatten or remove them first", names.join(", ")))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use client::Options;
    use client::engine::MemEngine;

    use super::*;

    async fn disks() -> Disks {
        let client = Client::over(Arc::new(MemEngine::new()), Options::default());
        client.create_pool("pool").await.unwrap();
        Disks::open(&client, "pool", WallClock::default()).unwrap()
    }

    #[tokio::test]
    async fn of_two_creations_with_the_same_name_one_takes_effect() {
        let disks = disks().await;
        let options = CreateOptions::of_size(1 << 20);
        let first = disks.take_name("vm").await.unwrap();
        let second = disks.take_name("vm").await.unwrap();
        assert_ne!(first.id, second.id);
        disks.complete(&disks.new_header(second.id, "vm", options), second).await.unwrap();
        let late = disks.complete(&disks.new_header(first.id, "vm", options), first).await;
        assert!(matches!(late, Err(Error::Exists(_))), "{late:?}");
        disks.directory.give_up("vm", first).await.unwrap();
        assert_eq!(disks.stat("vm").await.unwrap().id, second.id);
        assert!(disks.load_id(first.id).await.unwrap().is_none());
        assert!(matches!(disks.take_name("vm").await, Err(Error::Exists(_))));
    }

    #[tokio::test]
    async fn a_disk_is_not_made_smaller_while_its_chunks_move() {
        let disks = disks().await;
        disks.create("vm", CreateOptions::of_size(8 << 20)).await.unwrap();
        let snapshot = "vm@s".parse().unwrap();
        disks.snapshot(&snapshot).await.unwrap();
        disks.remove_snapshot(&snapshot).await.unwrap();
        let refused = disks.resize("vm", 4 << 20, true).await;
        assert!(matches!(refused, Err(Error::InUse(_))), "{refused:?}");
        disks.resize("vm", 16 << 20, false).await.unwrap();
    }

    #[tokio::test]
    async fn a_disk_is_released_only_for_its_owner() {
        let disks = disks().await;
        disks.create("vm", CreateOptions::of_size(8 << 20)).await.unwrap();
        let own = |header: &mut DiskHeader| {
            let (name, gateway) = (b"\0\0\0\0\0\0\0\x09"[..].into(), "gateway".into());
            header.owner = Some(crate::header::DiskOwner { name, gateway, since_ms: 1 });
            Ok(())
        };
        disks.change("vm", own).await.unwrap();
        disks.release("vm", "other").await.unwrap();
        assert!(disks.stat("vm").await.unwrap().owner.is_some());
        disks.release("vm", "gateway").await.unwrap();
        let header = disks.stat("vm").await.unwrap();
        assert!(header.owner.is_none() && header.unfenced.len() == 1);
        disks.resize("vm", 16 << 20, false).await.unwrap();
        assert!(disks.stat("vm").await.unwrap().unfenced.is_empty(), "the last owner is fenced first");
        disks.release("none", "gateway").await.unwrap();
    }
}
