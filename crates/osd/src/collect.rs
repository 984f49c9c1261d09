//! The collector: a background task with a limited rate.
//!
//! It removes orphans, and the results of sessions that are closed or have been idle for too long.

use std::rc::Rc;
use std::time::Duration;

use store::{StoreCalls, StoreError};
use wire::{Manifest, PartId, UploadId};

use crate::fail::{Fail, StepResult, refusal};
use crate::ids::{self, StoredName};
use crate::list::{after, objects};
use crate::object::{COMMITTED_XATTR, INFO_XATTR, ObjectInfo};
use crate::osd::Osd;
use crate::patience::{in_turn, info_of, patiently};
use crate::pg::{Expiry, Pg};
use crate::pool::{ActivePool, ObjectLocation};

/// Number of object ids that the collector checks between two pauses.
const STEP: usize = 256;
/// Length of each pause, which gives users' requests priority.
const PAUSE: Duration = Duration::from_millis(5);

/// The uploads that a head object refers to.
struct Head {
    /// Upload in the current manifest of the head object.
    named: Option<UploadId>,
    /// Upload of the last manifest that was committed to the head object, even if the object has no
    /// manifest now.
    committed: Option<UploadId>,
}

impl Osd {
    /// Runs the collector until the osd stops.
    pub(crate) async fn collect_for_ever(self: Rc<Osd>) {
        loop {
            tokio::time::sleep(self.config.collect_interval).await;
            let grace = self.config.orphan_grace;
            // Clients that were connected before this start of the osd need time to reconnect.
            if self.age.ran() >= grace {
                self.collect_orphans(grace).await;
            }
            self.expire_sessions().await;
            self.save_age().await;
        }
    }

    /// Removes orphans. Returns the number of removed parts. A part is an orphan if its upload was
    /// committed and then replaced. A part is also an orphan if it is at least `grace` old and its
    /// uploader has been disconnected for at least `grace`.
    pub(crate) async fn collect_orphans(&self, grace: Duration) -> u64 {
        let pools: Vec<Rc<ActivePool>> = self.pools.borrow().values().cloned().collect();
        let mut removed = 0;
        for pool in pools.iter().filter(|pool| !pool.closed.get()) {
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
        &self,
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
                    let place = pool.place(name.namespace, name.object, Some(&part));
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
        &self,
        pool: &ActivePool,
        name: &StoredName<'_>,
        part: PartId,
        grace: Duration,
    ) -> StepResult<bool> {
        let head_place = pool.place(name.namespace, name.object, None);
        let names = |manifest: Option<Manifest>| manifest.is_some_and(|m| m.upload == part.upload);
        // For an object in use, the cached record saves one query to the store per part.
        if names(info_of(&head_place, self.config.store_patience).await?.and_then(|info| info.manifest)) {
            return Ok(false);
        }
        let head = self.head_of(&head_place).await?;
        if head.named == Some(part.upload) {
            return Ok(false);
        }
        let alive = || self.sessions.borrow().is_alive(part.upload.session, grace);
        if head.committed == Some(part.upload) {
            return Ok(true);
        }
        // The client may reconnect while the collector checks the part.
        Ok(!alive() && self.is_old(pool, name, part, grace).await? && !alive())
    }

    async fn is_old(
        &self,
        pool: &ActivePool,
        name: &StoredName<'_>,
        part: PartId,
        grace: Duration,
    ) -> StepResult<bool> {
        let part_place = pool.place(name.namespace, name.object, Some(&part));
        let part_info = info_of(&part_place, self.config.store_patience).await?;
        let grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        let now_ms = self.config.clock.now_ms();
        // A part whose time lies in the future was written before the wall clock stepped back. The
        // part then counts as old, so that only the time since the uploader disconnected decides.
        let is_old = |stamp: u64| stamp > now_ms || stamp.saturating_add(grace_ms) <= now_ms;
        Ok(part_info.is_some_and(|info| is_old(info.modified_ms)))
    }

    /// Returns the uploads to which the durable state of a head object refers.
    async fn head_of(&self, place: &ObjectLocation) -> StepResult<Head> {
        in_turn(place, self.config.store_patience, async |_, _| {
            let xattrs = match place.pg.backing.get_xattrs(&place.pg.cid, &place.oid).await {
                Ok(xattrs) => xattrs,
                Err(StoreError::NoSuchObject(_)) => Vec::new(),
                Err(e) => return Err(e.into()),
            };
            let find = |name| xattrs.iter().find(|(n, _)| *n == name).map(|(_, value)| value);
            let info = find(INFO_XATTR).and_then(|bytes| ObjectInfo::decode(bytes));
            let committed = find(COMMITTED_XATTR).and_then(|bytes| UploadId::from_bytes(bytes));
            Ok(Head { named: info.and_then(|info| info.manifest).map(|manifest| manifest.upload), committed })
        })
        .await
    }

    /// Forgets sessions that are closed or have been idle for too long. The collector forgets a few
    /// sessions at a time, so that requests can run in between.
    async fn expire_sessions(&self) {
        let grace = self.config.session_expiry;
        let alive = |session| self.sessions.borrow().is_alive(session, grace);
        let idle_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        let expiry = Expiry { idle_ms, alive: &alive };
        let pools: Vec<Rc<ActivePool>> = self.pools.borrow().values().cloned().collect();
        for pg in pools.iter().filter(|pool| !pool.closed.get()).flat_map(|pool| &pool.pgs) {
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
            let living = || self.sessions.borrow().living(self.config.session_expiry);
            let count = pg.expire_some(&mut expired, expiry, living).await?;
            metrics::counter!("outboard_osd_sessions_expired_total").increment(count as u64);
            tokio::time::sleep(PAUSE).await;
        }
        Ok(())
    }
}
