//! Work on disks in the background: the removal of snapshots and disks, flattening, and the removal of
//! data after the end of a disk that was made smaller.
//!
//! Each step may be repeated, and several processes may do the same work at the same time: to copy a
//! chunk into a layer that has it changes nothing, and so does a copy whose source is gone. To keep it so,
//! the snapshots of a disk are removed one after the other, oldest first. Otherwise a late copy could
//! bring a chunk into a layer that has been removed.

use bytes::Bytes;
use futures::stream::TryStreamExt;
use wire::ObjectName;

use crate::disks::Disks;
use crate::header::{DiskHeader, DiskSnapshot};
use crate::layers::LayerStack;
use crate::names;
use crate::{Error, Result};

/// Number of chunks that are processed at a time.
const PARALLEL: usize = 16;

impl Disks {
    /// Does all work that removals and flattening have left. Returns whether there was any.
    ///
    /// # Errors
    /// Those of the storage. The caller repeats the call later.
    pub async fn upkeep(&self) -> Result<bool> {
        let mut was_busy = false;
        for disk in self.directory.removals().await? {
            self.finish_removal(disk).await?;
            was_busy = true;
        }
        for (name, disk) in self.directory.list().await? {
            match self.load_id(disk).await? {
                Some((header, _)) if header.is_removing => {
                    // A process has ended before the removal was certain.
                    match self.decide_on_disk(&name, &header).await {
                        Err(Error::InUse(_) | Error::NoSuchDisk(_)) => {}
                        decided => decided?,
                    }
                    was_busy = true;
                }
                Some(_) => was_busy |= self.upkeep_disk(&name).await?,
                None => {}
            }
        }
        Ok(was_busy)
    }

    /// Does the work on one disk. Returns whether there was any.
    ///
    /// # Errors
    /// Those of the storage.
    pub async fn upkeep_disk(&self, name: &str) -> Result<bool> {
        let mut was_busy = false;
        loop {
            let header = match self.load(name).await {
                Err(Error::NoSuchDisk(_)) => return Ok(was_busy),
                loaded => loaded?.0,
            };
            if header.owner.is_none() && header.trim_from.is_some() {
                self.trim(&header).await?;
            } else if let Some(snapshot) = header.snapshots.iter().find(|one| one.is_undecided()) {
                match self.decide_on_snapshot(name, &snapshot.name, snapshot.layer).await {
                    Err(Error::InUse(_)) => {}
                    decided => decided?,
                }
            } else if let Some(layer) = header.released_layer() {
                self.merge(&header, layer).await?;
            } else if header.is_flattening {
                self.copy_parent(&header).await?;
            } else {
                return Ok(was_busy);
            }
            was_busy = true;
        }
    }

    /// Removes what a removed disk has left.
    async fn finish_removal(&self, disk: u64) -> Result<()> {
        if let Some((header, _)) = self.load_id(disk).await? {
            for layer in header.layers.iter().filter(|layer| layer.is_own) {
                self.remove_chunks(layer.id).await?;
            }
            if let Some(parent) = &header.parent {
                self.directory.remove_clone(parent.layer, disk).await?;
            }
            match self.header_object(disk)?.remove().await {
                Err(e) if e.is_not_found() => {}
                removed => drop(removed?),
            }
        }
        self.directory.end_removal(disk).await
    }

    async fn remove_chunks(&self, layer: u64) -> Result<()> {
        let remove = |name: ObjectName| async move { self.remove_object(name.object()).await };
        self.chunks_of(layer).try_for_each_concurrent(PARALLEL, remove).await
    }

    async fn remove_object(&self, name: &str) -> Result<()> {
        match self.pool.object(name)?.remove().await {
            Err(e) if e.is_not_found() => Ok(()),
            removed => Ok(removed.map(drop)?),
        }
    }

    /// Moves the chunks of a layer, whose snapshot is being removed, into the next newer layer, unless that
    /// one has them or does not see them. Then removes the layer and the snapshot.
    async fn merge(&self, header: &DiskHeader, layer: u64) -> Result<()> {
        let Some(at) = header.layers.iter().position(|one| one.id == layer).filter(|at| *at > 0) else {
            let why = "the top layer of a disk belongs to a snapshot".into();
            return Err(Error::BadRecord { what: names::header(header.id), why });
        };
        let newer = header.layers[at - 1];
        let merge = |name: ObjectName| async move {
            let Some(index) = names::index_of(name.object()) else { return Ok(()) };
            if index < newer.visible_below {
                let copy = names::chunk(newer.id, header.root, index);
                self.copy_chunk(&copy, vec![Bytes::copy_from_slice(name.object().as_bytes())]).await?;
            }
            self.remove_object(name.object()).await
        };
        self.chunks_of(layer).try_for_each_concurrent(PARALLEL, merge).await?;
        let done = self.change(&header.name, |header| {
            let Some(at) = header.layers.iter().position(|one| one.id == layer).filter(|at| *at > 0) else {
                return Ok(());
            };
            let removed = header.layers.remove(at);
            let newer = &mut header.layers[at - 1];
            newer.visible_below = newer.visible_below.min(removed.visible_below);
            header.snapshots.retain(|snapshot| snapshot.layer != layer);
            Ok(())
        });
        done.await.map(drop)
    }

    /// Copies a chunk from the first of `sources` that exists, unless it exists.
    async fn copy_chunk(&self, name: &str, sources: Vec<Bytes>) -> Result<()> {
        Ok(self.pool.object(name)?.compound().inherit(sources).commit().await.map(drop)?)
    }

    /// Copies the chunks of the parent of a clone into the clone's oldest layer. Then the clone no longer
    /// uses the parent.
    async fn copy_parent(&self, header: &DiskHeader) -> Result<()> {
        let own = header.layers.iter().take_while(|layer| layer.is_own).count();
        let oldest = header.layers[own - 1].id;
        let stack = LayerStack::of_snapshot(header, oldest);
        for layer in &header.layers[own..] {
            let copy = |name: ObjectName| {
                let stack = &stack;
                async move {
                    let Some(index) = names::index_of(name.object()) else { return Ok(()) };
                    match stack.older(index) {
                        sources if sources.is_empty() => Ok(()),
                        sources => self.copy_chunk(&stack.top(index), sources).await,
                    }
                }
            };
            self.chunks_of(layer.id).try_for_each_concurrent(PARALLEL, copy).await?;
        }
        let done = self.change(&header.name, |header| {
            header.layers.retain(|layer| layer.is_own);
            header.is_flattening = false;
            header.parent = None;
            Ok(())
        });
        done.await?;
        match &header.parent {
            Some(parent) => self.directory.remove_clone(parent.layer, header.id).await,
            None => Ok(()),
        }
    }

    /// Removes the data after the end of a disk that was made smaller.
    pub(crate) async fn trim(&self, header: &DiskHeader) -> Result<()> {
        let Some(from) = header.trim_from else { return Ok(()) };
        let stack = LayerStack::of_disk(header);
        let (last, within) = (from / header.chunk, from % header.chunk);
        if within > 0 {
            let object = self.pool.object(&stack.top(last))?;
            let compound = object.compound().inherit(stack.older(last));
            let compound = compound.truncate(header.chunk).zero(within, header.chunk - within);
            compound.commit().await?;
        }
        let remove = |name: ObjectName| async move {
            match names::index_of(name.object()) {
                Some(index) if index >= from.div_ceil(header.chunk) => {
                    self.remove_object(name.object()).await
                }
                _ => Ok(()),
            }
        };
        self.chunks_of(stack.top_layer().id).try_for_each_concurrent(PARALLEL, remove).await?;
        let done = self.change(&header.name, |header| {
            header.trim_from = header.trim_from.filter(|one| *one != from);
            Ok(())
        });
        done.await.map(drop)
    }
}

impl DiskHeader {
    /// Returns the layer of the oldest snapshot whose chunks may be moved.
    fn released_layer(&self) -> Option<u64> {
        let released = |layer: u64| {
            self.snapshots.iter().any(|snapshot| snapshot.layer == layer && snapshot.is_released)
        };
        self.layers.iter().rev().map(|layer| layer.id).find(|layer| released(*layer))
    }
}

impl DiskSnapshot {
    /// Returns whether a process has ended before the removal of the snapshot was certain.
    fn is_undecided(&self) -> bool {
        self.is_removing && !self.is_released
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use base::clock::WallClock;
    use client::engine::MemEngine;
    use client::{Client, Options};

    use super::*;
    use crate::CreateOptions;

    async fn disks() -> Disks {
        let client = Client::over(Arc::new(MemEngine::new()), Options::default());
        client.create_pool("pool").await.unwrap();
        let disks = Disks::open(&client, "pool", WallClock::default()).unwrap();
        disks.create("vm", CreateOptions::of_size(1 << 30)).await.unwrap();
        disks
    }

    #[tokio::test]
    async fn a_removal_whose_process_has_ended_is_decided_later() {
        let disks = disks().await;
        for (snapshot, clone) in [("used", Some("clone")), ("free", None)] {
            let name = format!("vm@{snapshot}").parse().unwrap();
            disks.snapshot(&name).await.unwrap();
            if let Some(clone) = clone {
                disks.clone_snapshot(&name, clone).await.unwrap();
            }
        }
        let mark = |header: &mut DiskHeader| {
            header.snapshots.iter_mut().for_each(|one| one.is_removing = true);
            Ok(())
        };
        disks.change("vm", mark).await.unwrap();
        assert!(disks.upkeep().await.unwrap());
        let header = disks.stat("vm").await.unwrap();
        let left: Vec<(&str, bool)> =
            header.snapshots.iter().map(|one| (&*one.name, one.is_removing)).collect();
        assert_eq!(left, [("used", false)], "a snapshot with a clone stays");

        let mark = |header: &mut DiskHeader| {
            header.is_removing = true;
            Ok(())
        };
        disks.change("vm", mark).await.unwrap();
        disks.upkeep().await.unwrap();
        assert!(disks.stat("vm").await.is_ok(), "a disk with a clone stays");
        disks.change("clone", mark).await.unwrap();
        disks.upkeep().await.unwrap();
        let name = disks.list().await.unwrap().into_iter().map(|header| header.name);
        assert_eq!(name.collect::<Vec<_>>(), ["vm"]);
        disks.create("clone", CreateOptions::of_size(512)).await.unwrap();
        assert!(disks.upkeep().await.is_ok());
    }
}
