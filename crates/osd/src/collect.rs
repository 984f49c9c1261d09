//! The collector: a background task with a limited rate.
//!
//! It removes orphans, and the results of sessions that are closed or have been idle for too long.

use std::rc::Rc;
use std::time::Duration;

use store::{StoreCalls, StoreError};
use wire::{Error, PartId, UploadId};

use crate::fail::{Fail, StepResult, refusal};
use crate::ids::{self, StoredName};
use crate::list::{after, objects};
use crate::object::{COMMITTED_XATTR, INFO_XATTR, ObjectInfo};
use crate::patience::{in_turn, info_of, patiently};
use crate::pg::{Expiry, Pg};
use crate::pool::{ActivePool, ObjectLocation};
use crate::shard::Shard;

/// Number of object ids that the collector checks between two pauses.
const STEP: usize = 256;
/// Length of each pause, which gives users' requests priority.
const PAUSE: Duration = Duration::from_millis(5);

/// What a head object has to do with an upload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum UploadUse {
    /// The head object's manifest names the upload.
    Current,
    /// The upload was the last one that was committed to the head object, and its manifest was
    /// removed since.
    Former,
    /// The head object does not refer to the upload.
    None,
}

/// A head object, for a query on the shard that serves it.
struct HeadName {
    pool_id: u32,
    namespace: String,
    object: String,
}

impl Shard {
    /// Runs the collector of the shard's placement groups until the osd stops.
    pub(crate) async fn collect_for_ever(self: Rc<Shard>) {
        loop {
            tokio::time::sleep(self.config.collect_interval).await;
            let grace = self.config.orphan_grace;
            // Clients that were connected before this start of the osd need time to reconnect.
            if self.age.ran() >= grace {
                Rc::clone(&self).collect_orphans(grace).await;
            }
            self.expire_sessions().await;
        }
    }

    /// Removes orphans from the shard's placement groups. Returns the number of removed parts. A part
    /// is an orphan if its upload was committed and then replaced. A part is also an orphan if it is
    /// at least `grace` old and its uploader has been disconnected for at least `grace`.
    pub(crate) async fn collect_orphans(self: Rc<Self>, grace: Duration) -> u64 {
        let mut removed = 0;
        for pool in &self.pools.all_open() {
            for pg in &pool.pgs {
                let place = ObjectLocation { pg: Rc::clone(pg), oid: ids::meta_object() };
                match self.collect_group(pool, &place, grace).await {
                    Ok(count) => removed += count,
                    Err(e) => {
                        tracing::warn!(error = ?e, "removing orphans failed; the collector tries again")
                    }
                }
            }
        }
        metrics::counter!("outboard_osd_orphans_removed_total").increment(removed);
        removed
    }

    async fn collect_group(
        self: &Rc<Self>,
        pool: &ActivePool,
        place: &ObjectLocation,
        grace: Duration,
    ) -> StepResult<u64> {
        let mut from = pool.record.ids.first_part();
        let mut removed = 0;
        let patience = self.config.store_patience;
        loop {
            let page = patiently(place, patience, async || objects(place, from.clone(), STEP).await).await?;
            for name in page.0.iter().filter_map(ids::parse) {
                if let Some(part) = name.part
                    && self.is_orphan(pool, &name, part, grace).await?
                {
                    let place = pool.place(name.namespace, name.object, Some(&part))?;
                    self.remove_object(&place, name.object).await?;
                    removed += 1;
                }
            }
            match page.0.last() {
                Some(last) if page.1 => from = Some(after(last)?),
                _ => return Ok(removed),
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Returns whether a part is an orphan: its head object does not refer to its upload, and never
    /// will.
    async fn is_orphan(
        self: &Rc<Self>,
        pool: &ActivePool,
        name: &StoredName<'_>,
        part: PartId,
        grace: Duration,
    ) -> StepResult<bool> {
        let head = HeadName {
            pool_id: pool.record.id,
            namespace: name.namespace.to_owned(),
            object: name.object.to_owned(),
        };
        let alive = || self.presence.is_alive(part.upload.session, grace);
        let was_alive = alive();
        let owner = pool.owner(name.namespace, name.object, None);
        let used = self.on(owner, move |shard| shard.use_of(head, part.upload)).await;
        match used.map_err(Error::from)?? {
            UploadUse::Current => return Ok(false),
            UploadUse::Former => return Ok(true),
            UploadUse::None => {}
        }
        // The client may reconnect while the collector checks the part.
        Ok(!was_alive && !alive() && self.is_old(pool, name, part, grace).await? && !alive())
    }

    /// Returns what a head object of this shard has to do with an upload.
    async fn use_of(self: Rc<Self>, head: HeadName, upload: UploadId) -> StepResult<UploadUse> {
        // If the pool is being removed, its parts are removed with it.
        let pool = self.pools.get(head.pool_id);
        let Some(pool) = pool else { return Ok(UploadUse::Current) };
        let place = pool.place(&head.namespace, &head.object, None)?;
        // For an object in use, the cached record saves one query to the store per part.
        let info = info_of(&place, self.config.store_patience).await?;
        if info.and_then(|info| info.manifest).is_some_and(|manifest| manifest.upload == upload) {
            return Ok(UploadUse::Current);
        }
        in_turn(&place, self.config.store_patience, async |_, _| {
            let xattrs = match place.pg.backing.get_xattrs(&place.pg.cid, &place.oid).await {
                Ok(xattrs) => xattrs,
                Err(StoreError::NoSuchObject(_)) => Vec::new(),
                Err(e) => return Err(e.into()),
            };
            let find = |name| xattrs.iter().find(|(n, _)| *n == name).map(|(_, value)| value);
            let info = find(INFO_XATTR).and_then(|bytes| ObjectInfo::decode(bytes));
            let named = info.and_then(|info| info.manifest).map(|manifest| manifest.upload);
            // The last manifest that was committed to the head object, even if the object has no
            // manifest now.
            let committed = find(COMMITTED_XATTR).and_then(|bytes| UploadId::from_bytes(bytes));
            Ok(match (named, committed) {
                (Some(named), _) if named == upload => UploadUse::Current,
                (_, Some(committed)) if committed == upload => UploadUse::Former,
                _ => UploadUse::None,
            })
        })
        .await
    }

    async fn is_old(
        &self,
        pool: &ActivePool,
        name: &StoredName<'_>,
        part: PartId,
        grace: Duration,
    ) -> StepResult<bool> {
        let part_place = pool.place(name.namespace, name.object, Some(&part))?;
        let part_info = info_of(&part_place, self.config.store_patience).await?;
        let grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        let now_ms = self.config.clock.now_ms();
        // A part whose time lies in the future was written before the wall clock stepped back. The
        // part then counts as old, so that only the time since the uploader disconnected decides.
        let is_old = |stamp: u64| stamp > now_ms || stamp.saturating_add(grace_ms) <= now_ms;
        Ok(part_info.is_some_and(|info| is_old(info.modified_ms)))
    }

    /// Forgets sessions that are closed or have been idle for too long. The collector forgets a few
    /// sessions at a time, so that requests can run in between.
    async fn expire_sessions(&self) {
        let grace = self.config.session_expiry;
        let alive = |session| self.presence.is_alive(session, grace);
        let idle_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        let expiry = Expiry { idle_ms, alive: &alive };
        for pg in self.pools.all_open().iter().flat_map(|pool| &pool.pgs) {
            match self.expire_sessions_of(pg, &expiry).await {
                Ok(()) => {}
                Err(Fail::Lost(why)) => {
                    tracing::debug!(why, "expiring sessions failed; the collector tries again")
                }
                Err(fail) => {
                    tracing::warn!(error = %refusal(fail), "expiring sessions failed; the collector tries again")
                }
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn expire_sessions_of(&self, pg: &Pg, expiry: &Expiry<'_>) -> StepResult<()> {
        let mut expired = pg.expired(expiry).await?;
        while !expired.is_empty() {
            let living = || self.presence.living(self.config.session_expiry);
            let count = pg.expire_some(&mut expired, expiry, living).await?;
            metrics::counter!("outboard_osd_sessions_expired_total").increment(count as u64);
            tokio::time::sleep(PAUSE).await;
        }
        Ok(())
    }
}
