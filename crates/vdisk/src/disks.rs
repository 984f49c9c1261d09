//! [`Disks`]: manages the disks of a pool.

use base::clock::WallClock;
use client::{Client, Object, Pool};
use futures::stream::{self, Stream, StreamExt, TryStreamExt};
use uuid::Uuid;
use wire::ObjectName;

use crate::directory::{DiskDirectory, is_conflict};
use crate::header::{DiskHeader, DiskLayer, DiskSnapshot, Parent};
use crate::names::{
    self, CHUNK_DEFAULT, CHUNK_MAX, CHUNK_MIN, NAMESPACE, SIZE_MAX, SnapshotName, check_name,
};
use crate::{Error, Result};

/// Number of objects that are queried at a time.
const PARALLEL: usize = 32;
/// Number of attempts to change the record of a disk that others change, too.
const ATTEMPTS: usize = 16;

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
        Ok(Disks { directory: DiskDirectory::new(&pool)?, pool, clock })
    }

    /// Creates a disk that reads as zeros.
    ///
    /// # Errors
    /// [`Error::Argument`], [`Error::Exists`].
    pub async fn create(&self, name: &str, options: CreateOptions) -> Result<DiskHeader> {
        check_name("disk", name)?;
        options.check()?;
        let id = self.take_name(name).await?;
        let header = self.new_header(id, name, options);
        self.make_header(&header).await?;
        Ok(header)
    }

    /// Gives a name to a new disk. A disk with this name that was not completely created counts as new.
    async fn take_name(&self, name: &str) -> Result<u64> {
        if let Some(id) = self.directory.add(name).await? {
            return Ok(id);
        }
        let id = self.directory.lookup(name).await?.ok_or_else(|| Error::Conflict(name.to_owned()))?;
        match self.header_object(id)?.stat().await {
            Err(e) if e.is_not_found() => Ok(id),
            found => {
                found?;
                Err(Error::Exists(format!("the disk \"{name}\"")))
            }
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
            nguid: *uuid.as_bytes(),
            // Serial numbers of virtio-blk and NVMe have at most 20 characters.
            serial: uuid.simple().to_string()[..20].to_owned(),
            created_ms: self.clock.now_ms(),
            is_flattening: false,
            is_removing: false,
            trim_from: None,
        }
    }

    async fn make_header(&self, header: &DiskHeader) -> Result<()> {
        let object = self.header_object(header.id)?;
        match object.compound().create().write_full(header.encode()).commit().await {
            Err(e) if is_conflict(&e) => Err(Error::Exists(format!("the disk \"{}\"", header.name))),
            made => Ok(made.map(drop)?),
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
        let add = |header: &mut DiskHeader| {
            check_detached(header)?;
            header.add_snapshot(snapshot, layer, now_ms)
        };
        self.change(disk, add).await.map(drop)
    }

    /// Begins to remove a snapshot, which is no longer visible then. [`upkeep`](Self::upkeep) does the rest.
    ///
    /// # Errors
    /// [`Error::NoSuchSnapshot`], and [`Error::InUse`] if it has clones.
    pub async fn remove_snapshot(&self, SnapshotName { disk, snapshot }: &SnapshotName) -> Result<()> {
        let layer = self.stat(disk).await?.snapshot(snapshot)?.layer;
        let mark = |one: &mut DiskSnapshot| one.is_removing = true;
        self.change_snapshot(disk, layer, mark).await?;
        self.decide_on_snapshot(disk, snapshot, layer).await
    }

    async fn change_snapshot(
        &self,
        disk: &str,
        layer: u64,
        change: impl Fn(&mut DiskSnapshot),
    ) -> Result<()> {
        let changed = self.change(disk, |header| {
            header.snapshots.iter_mut().filter(|one| one.layer == layer).for_each(&change);
            Ok(())
        });
        changed.await.map(drop)
    }

    /// Decides whether a snapshot that is marked as being removed can be removed: a clone that is being made
    /// sees the mark, or is seen here. Only then its chunks may be moved. The decision may be repeated.
    pub(crate) async fn decide_on_snapshot(&self, disk: &str, snapshot: &str, layer: u64) -> Result<()> {
        let clones = self.directory.clones(layer).await?;
        let is_used = !clones.is_empty();
        let decide = |one: &mut DiskSnapshot| match is_used {
            true => one.is_removing = one.is_released,
            false => one.is_released = one.is_removing,
        };
        self.change_snapshot(disk, layer, decide).await?;
        match is_used {
            true => Err(in_use(&format!("the snapshot \"{disk}@{snapshot}\""), &clones)),
            false => Ok(()),
        }
    }

    /// Creates a disk that begins with the content of a snapshot.
    ///
    /// # Errors
    /// [`Error::NoSuchSnapshot`], [`Error::Exists`].
    pub async fn clone_snapshot(&self, of: &SnapshotName, name: &str) -> Result<DiskHeader> {
        check_name("disk", name)?;
        let source = self.stat(&of.disk).await?;
        let layer = source.snapshot(&of.snapshot)?.layer;
        let id = self.take_name(name).await?;
        self.directory.add_clone(layer, id, name).await?;
        let made = async {
            // The snapshot may have been removed before the entry of the clone was visible.
            let source = self.stat(&of.disk).await?;
            let snapshot = source.snapshot(&of.snapshot)?;
            let options = CreateOptions { size: snapshot.size, chunk: source.chunk };
            let mut header = self.new_header(id, name, options);
            header.root = source.root;
            header.layers[0].visible_below = header.chunks();
            let older = source.layers.iter().skip_while(|one| one.id != snapshot.layer);
            header.layers.extend(older.map(|one| DiskLayer { is_own: false, ..*one }));
            header.parent =
                Some(Parent { disk: source.id, name: format!("{}@{}", of.disk, of.snapshot), layer });
            self.make_header(&header).await?;
            Ok(header)
        };
        let made = made.await;
        if made.is_err() {
            let dropped = self.directory.remove_clone(layer, id).await;
            dropped.and(self.directory.begin_removal(name, id).await)?;
            self.directory.end_removal(id).await?;
        }
        made
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
        let set = |is_removing: bool| {
            move |header: &mut DiskHeader| {
                check_detached(header)?;
                if header.snapshots.iter().any(|snapshot| !snapshot.is_removing) && !with_snapshots {
                    let why =
                        format!("the disk \"{name}\" has snapshots; remove them, too, with --snapshots");
                    return Err(Error::InUse(why));
                }
                header.is_removing = is_removing;
                Ok(())
            }
        };
        let header = self.change(name, set(true)).await?;
        self.decide_on_disk(name, &header).await
    }

    /// Decides whether a disk that is marked as being removed can be removed, as
    /// [`decide_on_snapshot`](Self::decide_on_snapshot) does.
    pub(crate) async fn decide_on_disk(&self, name: &str, header: &DiskHeader) -> Result<()> {
        let mut clones = Vec::new();
        for layer in header.layers.iter().filter(|layer| layer.is_own) {
            clones.extend(self.directory.clones(layer.id).await?);
        }
        if !clones.is_empty() {
            let (mut header, version) =
                self.load_id(header.id).await?.ok_or_else(|| Error::Conflict(name.to_owned()))?;
            header.is_removing = false;
            self.store(&header, version).await?;
            return Err(in_use(&format!("the disk \"{name}\""), &clones));
        }
        self.directory.begin_removal(name, header.id).await
    }

    /// Changes the size of a disk that is not attached.
    ///
    /// # Errors
    /// [`Error::Attached`] if it is attached: then its owner changes the size. [`Error::Argument`] if the
    /// size is invalid, or smaller than now and `shrinks` is not set.
    pub async fn resize(&self, name: &str, size: u64, shrinks: bool) -> Result<()> {
        check_size(size)?;
        let set = |header: &mut DiskHeader| {
            check_detached(header)?;
            set_size(header, size, shrinks)
        };
        let header = self.change(name, set).await?;
        self.trim(&header).await
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

fn check_detached(header: &DiskHeader) -> Result<()> {
    match &header.owner {
        Some(owner) => Err(Error::Attached { disk: header.name.clone(), owner: owner.gateway.clone() }),
        None => Ok(()),
    }
}

fn in_use(what: &str, clones: &[(u64, String)]) -> Error {
    let names: Vec<&str> = clones.iter().map(|(_, name)| name.as_str()).collect();
    Error::InUse(format!("{what} has clones: {}; flatten or remove them first", names.join(", ")))
}
