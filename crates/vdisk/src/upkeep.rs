//! Work on disks in the background: the removal of snapshots and disks, flattening, and the removal of
//! data after the end of a disk that was made smaller.
//!
//! One process at a time does this work on a disk: its worker ([`crate::owners`]). A worker that has shown no
//! sign of life for [`LEASE`] may be replaced. The time decides only when that happens: the successor fences
//! the worker first.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use client::engine::OwnerName;
use futures::stream::TryStreamExt;
use tokio::time::sleep;
use wire::ObjectName;

use crate::disks::Disks;
use crate::header::{DiskHeader, DiskOwner, DiskSnapshot};
use crate::layers::LayerStack;
use crate::names;
use crate::owners::{OpenSession, fence_all, take_role};
use crate::{Error, Result};

/// Number of chunks that are processed at a time.
const PARALLEL: usize = 16;
/// Time without a sign of life after which a worker may be replaced.
const LEASE: Duration = Duration::from_secs(60);
/// Time between two signs of life.
const RENEWAL: Duration = Duration::from_secs(15);

/// Who does the upkeep of disks.
#[derive(Clone)]
pub struct DiskWorker {
    /// The gateway. If it starts again, it replaces the worker that it was before at once.
    pub gateway: String,
    /// Opens the session of the worker of a disk.
    pub open_session: OpenSession,
}

impl fmt::Debug for DiskWorker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiskWorker").field("gateway", &self.gateway).finish_non_exhaustive()
    }
}

impl Disks {
    /// Does all work that removals, flattening and changes of sizes have left. Returns whether there was any.
    /// A disk with an error does not prevent the work on others.
    ///
    /// # Errors
    /// The first error of a disk: [`Error::InUse`] if another process does its upkeep, or one of the storage.
    /// The caller repeats the call later.
    pub async fn upkeep(&self, worker: &DiskWorker) -> Result<bool> {
        let mut result = Ok(false);
        let mut add = |done: Result<bool>| match (&mut result, done) {
            (Ok(was_busy), Ok(more)) => *was_busy |= more,
            (Ok(_), Err(e)) => result = Err(e),
            (Err(_), _) => {}
        };
        for (name, disk) in self.directory.list().await? {
            add(self.upkeep_disk(&name, disk, worker).await);
        }
        for disk in self.directory.removals().await? {
            add(self.finish_removal(disk).await.map(|()| true));
        }
        result
    }

    /// Does the work on one disk. Returns whether there was any.
    async fn upkeep_disk(&self, name: &str, disk: u64, worker: &DiskWorker) -> Result<bool> {
        let Some((header, _)) = self.load_id(disk).await? else { return Ok(false) };
        if header.is_removing {
            // A process has ended before the removal was certain.
            return match self.decide_on_disk(name, disk).await {
                Err(Error::InUse(_) | Error::NoSuchDisk(_)) => Ok(true),
                decided => decided.map(|()| true),
            };
        }
        for snapshot in header.snapshots.iter().filter(|one| one.is_undecided()) {
            match self.decide_on_snapshot(name, snapshot.layer).await {
                Err(Error::InUse(_)) => {}
                decided => decided?,
            }
        }
        match self.stat(name).await {
            Ok(header) if header.next_job().is_some() => {}
            Ok(_) | Err(Error::NoSuchDisk(_)) => return Ok(false),
            Err(e) => return Err(e),
        }
        let client = (worker.open_session)().await?;
        let done = self.work(name, worker, &client).await;
        client.close().await;
        match done {
            // The disk is being removed meanwhile.
            Err(Error::NoSuchDisk(_)) => Ok(true),
            done => done.map(|()| true),
        }
    }

    /// Becomes the worker of a disk, and does its work with the session of `client`.
    async fn work(&self, name: &str, worker: &DiskWorker, client: &client::Client) -> Result<()> {
        client.require(&[client::engine::Capability::Fence])?;
        let own = client.owner()?;
        let disks = Disks::open(client, self.pool.name(), self.clock.clone())?;
        take_role(client, &disks, name, |header| {
            if let Some(other) = &header.worker
                && other.gateway != worker.gateway
                && self.clock.now_ms().saturating_sub(other.since_ms) < LEASE.as_millis() as u64
            {
                let why = format!("the upkeep of the disk \"{name}\" is done by {}", other.gateway);
                return Err(Error::InUse(why));
            }
            header.unfenced.extend(header.worker.take().map(|one| one.name));
            let (name, gateway, since_ms) =
                (own.as_bytes().clone(), worker.gateway.clone(), self.clock.now_ms());
            header.worker = Some(DiskOwner { name, gateway, since_ms });
            Ok(())
        })
        .await?;
        let work = async {
            loop {
                let header = disks.load_for_work(name, &own).await?;
                match header.next_job() {
                    Some(UpkeepStep::Trim) => disks.trim(&header).await?,
                    Some(UpkeepStep::Merge(layer)) => disks.merge(&header, layer).await?,
                    Some(UpkeepStep::Flatten) => disks.copy_parent(&header).await?,
                    None => return Ok::<_, Error>(()),
                }
            }
        };
        tokio::select! {
            done = work => done?,
            lost = disks.renew(name, &own) => return Err(lost),
        }
        let leave = |header: &mut DiskHeader| {
            header.worker.take_if(|one| one.name == *own.as_bytes());
            Ok(())
        };
        disks.change(name, leave).await.map(drop)
    }

    /// Loads the record of a disk that has this worker.
    async fn load_for_work(&self, name: &str, own: &OwnerName) -> Result<DiskHeader> {
        let header = self.stat(name).await?;
        match header.worker.as_ref().is_some_and(|one| one.name == *own.as_bytes()) {
            true => Ok(header),
            false => Err(Error::InUse(format!("another process does the upkeep of the disk \"{name}\""))),
        }
    }

    /// Shows signs of life until the worker was replaced, or one fails.
    async fn renew(&self, name: &str, own: &OwnerName) -> Error {
        loop {
            sleep(RENEWAL).await;
            let now_ms = self.clock.now_ms();
            let renew = |header: &mut DiskHeader| match &mut header.worker {
                Some(one) if one.name == *own.as_bytes() => {
                    one.since_ms = now_ms;
                    Ok(())
                }
                _ => Err(Error::InUse(format!("another process does the upkeep of the disk \"{name}\""))),
            };
            if let Err(e) = self.change(name, renew).await {
                return e;
            }
        }
    }

    /// Removes what a removed disk has left.
    async fn finish_removal(&self, disk: u64) -> Result<()> {
        if let Some((header, _)) = self.load_id(disk).await? {
            let mut earlier = header.unfenced.clone();
            earlier.extend(header.worker.map(|one| one.name));
            fence_all(&self.client, &earlier).await?;
            for layer in header.layers.iter().filter(|layer| layer.is_own) {
                self.remove_chunks(layer.id).await?;
            }
            if let Some(parent) = &header.parent {
                self.directory.remove_clone(parent.layer, disk).await?;
            }
            self.remove_header(disk).await?;
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
        // The oldest first: the parent may move chunks into newer layers meanwhile.
        for layer in header.layers[own..].iter().rev() {
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

/// Work on a disk.
enum UpkeepStep {
    /// Remove the data after the end of the disk.
    Trim,
    /// Move the chunks of this layer, whose snapshot is being removed, into the next newer one.
    Merge(u64),
    /// Copy the chunks of the parent.
    Flatten,
}

impl DiskHeader {
    /// Returns the next job of the worker. The layers of snapshots are moved one after the other, the oldest
    /// first. The data after the end of an attached disk is removed by its owner.
    fn next_job(&self) -> Option<UpkeepStep> {
        if self.trim_from.is_some() && self.owner.is_none() {
            return Some(UpkeepStep::Trim);
        }
        let released = |layer: u64| {
            self.snapshots.iter().any(|snapshot| snapshot.layer == layer && snapshot.is_released)
        };
        let layer = self.layers.iter().rev().map(|layer| layer.id).find(|layer| released(*layer));
        layer.map(UpkeepStep::Merge).or(self.is_flattening.then_some(UpkeepStep::Flatten))
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

    async fn disks() -> (Disks, DiskWorker) {
        let engine = Arc::new(MemEngine::new());
        let client = Client::over(Arc::clone(&engine) as _, Options::default());
        client.create_pool("pool").await.unwrap();
        let disks = Disks::open(&client, "pool", WallClock::default()).unwrap();
        disks.create("vm", CreateOptions::of_size(1 << 30)).await.unwrap();
        let open_session: OpenSession = Arc::new(move || {
            let client = Client::over(Arc::new(engine.sibling()), Options::default());
            Box::pin(async move { Ok(client) })
        });
        (disks, DiskWorker { gateway: "gateway".into(), open_session })
    }

    #[tokio::test]
    async fn a_removal_whose_process_has_ended_is_decided_later() {
        let (disks, worker) = disks().await;
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
        assert!(disks.upkeep(&worker).await.unwrap());
        let header = disks.stat("vm").await.unwrap();
        let left: Vec<(&str, bool)> =
            header.snapshots.iter().map(|one| (&*one.name, one.is_removing)).collect();
        assert_eq!(left, [("used", false)], "a snapshot with a clone stays");

        let mark = |header: &mut DiskHeader| {
            header.is_removing = true;
            Ok(())
        };
        disks.change("vm", mark).await.unwrap();
        disks.upkeep(&worker).await.unwrap();
        assert!(disks.stat("vm").await.is_ok(), "a disk with a clone stays");
        disks.change("clone", mark).await.unwrap();
        disks.upkeep(&worker).await.unwrap();
        let name = disks.list().await.unwrap().into_iter().map(|header| header.name);
        assert_eq!(name.collect::<Vec<_>>(), ["vm"]);
        disks.create("clone", CreateOptions::of_size(512)).await.unwrap();
        assert!(disks.upkeep(&worker).await.is_ok());
    }

    #[tokio::test]
    async fn a_worker_is_replaced_after_its_lease_and_fenced() {
        let (disks, worker) = disks().await;
        disks.snapshot(&"vm@s".parse().unwrap()).await.unwrap();
        disks.remove_snapshot(&"vm@s".parse().unwrap()).await.unwrap();
        let first = (worker.open_session)().await.unwrap();
        let set_worker = async |since_ms: u64| {
            let own = first.owner().unwrap().as_bytes().clone();
            let set = |header: &mut DiskHeader| {
                header.worker = Some(DiskOwner { name: own.clone(), gateway: "other".into(), since_ms });
                Ok(())
            };
            disks.change("vm", set).await.unwrap();
        };
        let now_ms = disks.clock.now_ms();
        set_worker(now_ms).await;
        let refused = disks.upkeep(&worker).await.unwrap_err();
        assert!(matches!(&refused, Error::InUse(why) if why.contains("other")), "{refused}");
        set_worker(now_ms - 2 * LEASE.as_millis() as u64).await;
        assert!(disks.upkeep(&worker).await.unwrap());
        let header = disks.stat("vm").await.unwrap();
        assert!(header.snapshots.is_empty() && header.worker.is_none() && header.unfenced.is_empty());
        let late = first.pool("pool").unwrap().object("late").unwrap().put("1").await.unwrap_err();
        assert!(matches!(late, client::Error::Fenced(_)), "{late}");
        assert!(!disks.upkeep(&worker).await.unwrap());
    }

    #[tokio::test]
    async fn a_clone_that_is_not_complete_does_not_keep_its_snapshot() {
        let (disks, worker) = disks().await;
        let snapshot = "vm@s".parse().unwrap();
        disks.snapshot(&snapshot).await.unwrap();
        let clone = disks.clone_snapshot(&snapshot, "clone").await.unwrap();
        let layer = clone.parent.unwrap().layer;
        // The process ends before it has stored the record.
        disks.remove_header(clone.id).await.unwrap();
        assert!(matches!(disks.stat("clone").await, Err(Error::NoSuchDisk(_))));
        disks.remove_snapshot(&snapshot).await.unwrap();
        assert!(disks.directory.clones(layer).await.unwrap().is_empty());
        disks.upkeep(&worker).await.unwrap();
        assert!(disks.stat("vm").await.unwrap().snapshots.is_empty());
        // A late record of the clone is refused.
        let object = disks.header_object(clone.id).unwrap();
        assert!(object.compound().create().write_full("late").commit().await.unwrap_err().is_conflict());
    }
}
