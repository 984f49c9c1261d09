//! Checks and removes parts of striped objects.

use std::rc::Rc;

use wire::{Error, Manifest, Mutation, ObjectName, PartId};

use crate::fail::StepResult;
use crate::gather::Gathered;
use crate::mutate::Change;
use crate::patience::info_of;
use crate::pool::{ActivePool, ObjectLocation};
use crate::shard::Shard;
use crate::task::spawn;

/// Number of parts of other shards after which a shard lets its other tasks run.
const PARTS_AT_A_TIME: u64 = 1024;

impl Shard {
    /// Checks that all parts of a new manifest exist and have the right size. If the client was
    /// disconnected for a long time, the collector may have removed its parts.
    pub(crate) async fn check_parts(
        self: &Rc<Self>,
        pool: u32,
        name: &ObjectName,
        ops: &[Mutation],
    ) -> StepResult<()> {
        for op in ops {
            let Mutation::SetManifest(manifest) = *op else { continue };
            let name = name.clone();
            let checked = self.each(move |shard| shard.check_own_parts(pool, name, manifest)).await;
            checked.map_err(Error::from)?.into_iter().collect::<StepResult<()>>()?;
        }
        Ok(())
    }

    /// Checks the parts of a new manifest that this shard serves.
    async fn check_own_parts(
        self: Rc<Self>,
        pool: u32,
        name: ObjectName,
        manifest: Manifest,
    ) -> StepResult<()> {
        let Manifest { upload, part_size, size } = manifest;
        let pool = self.open_pool(pool)?;
        if pool.pgs.is_empty() {
            return Ok(());
        }
        for (index, start) in (0..).zip((0..size).step_by(part_size as usize)) {
            let place = own_part(&pool, &name, PartId { upload, index })?;
            let Some(place) = place else {
                give_way(u64::from(index)).await;
                continue;
            };
            let found = info_of(&place, self.config.store_patience).await?;
            if found.is_none_or(|info| info.size != part_size.min(size - start)) {
                let what = format!(
                    "part {index} of the upload is missing or has the wrong size; upload the object again"
                );
                return Err(Error::BadRequest(what).into());
            }
        }
        Ok(())
    }

    /// Removes the parts of a manifest in the background. No head object may refer to this manifest
    /// any more. If a part cannot be removed, the collector removes it later.
    pub(crate) fn drop_parts(self: &Rc<Self>, pool: u32, name: ObjectName, manifest: Manifest) {
        let told = self.tell_each(move |shard| {
            drop(spawn(Rc::clone(shard).drop_own_parts(pool, name.clone(), manifest)));
        });
        drop(told);
    }

    /// Removes the parts of a manifest that this shard serves.
    async fn drop_own_parts(self: Rc<Self>, pool: u32, name: ObjectName, manifest: Manifest) {
        let Some(pool) = self.open_pool(pool).ok().filter(|pool| !pool.pgs.is_empty()) else { return };
        for number in 0..manifest.parts() {
            let Ok(index) = u32::try_from(number) else { return };
            let part = PartId { upload: manifest.upload, index };
            let Ok(place) = own_part(&pool, &name, part) else { return };
            let Some(place) = place else {
                give_way(number).await;
                continue;
            };
            if let Err(e) = self.remove_object(&place, &name.to_string()).await {
                tracing::warn!(%name, index, error = %e, "an unused part was not removed; the collector removes it later");
            }
        }
    }

    /// Removes an object without a request of a client. Also succeeds if the object does not exist.
    pub(crate) async fn remove_object(
        self: &Rc<Self>,
        place: &ObjectLocation,
        name: &str,
    ) -> wire::Result<()> {
        let ops = [wire::Mutation::Remove];
        let patience = self.config.store_patience;
        let (conditions, sources) = (&[], &[]);
        let change =
            Change { shard: self, place, name, conditions, ops: &ops, sources, origin: None, patience };
        match change.run(false, async || Ok(Gathered::None)).await {
            Ok(_) | Err(Error::NoSuchObject(_)) => Ok(()),
            Err(e) => Err(e),
        }
    }
}

/// Returns the location of a part; `None` if another shard serves it.
fn own_part(pool: &ActivePool, name: &ObjectName, part: PartId) -> wire::Result<Option<ObjectLocation>> {
    match pool.place(name.namespace(), name.object(), Some(&part)) {
        Ok(place) => Ok(Some(place)),
        Err(Error::WrongShard { .. }) => Ok(None),
        Err(e) => Err(e),
    }
}

/// Lets the shard's other tasks run after each [`PARTS_AT_A_TIME`] parts.
async fn give_way(part: u64) {
    if part % PARTS_AT_A_TIME == PARTS_AT_A_TIME - 1 {
        tokio::task::yield_now().await;
    }
}
