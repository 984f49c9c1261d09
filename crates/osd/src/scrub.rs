//! Scrubs of pools. A scrub compares the members of groups with redundancy, and verifies the
//! objects of other groups.

use std::rc::Rc;
use std::time::Duration;

use array::{Findings, Group};
use store::{ObjectId, StoreCalls, StoreError};
use tokio::time::Instant;
use wire::{Error, ScrubStatus};

use crate::fail::refusal;
use crate::ids;
use crate::list::{after, objects};
use crate::osd::Osd;
use crate::patience::patiently;
use crate::pg::Pg;
use crate::pool::{ActivePool, ObjectLocation};
use crate::scrubs::ScrubKind;
use crate::shard::Shard;
use crate::task::spawn;

/// Maximum number of objects that one listing returns to the scrub.
const PAGE: usize = 128;
/// Number of bytes of an object without redundancy that are verified at a time.
const SEGMENT: u64 = 1 << 20;

impl Osd {
    /// Returns the progress of a pool's scrub. With `start`, starts a scrub if none is running.
    /// `repair` says whether the new scrub repairs objects of the wrong size.
    ///
    /// # Errors
    /// If `repair` is set and a scrub without repair is running.
    pub(crate) async fn scrub(
        &self,
        pool: &ActivePool,
        start: bool,
        repair: bool,
    ) -> wire::Result<ScrubStatus> {
        let (id, name) = (pool.record.id, pool.label.clone());
        if start {
            let _only_one = self.scrub_start.lock().await;
            let pool = name.clone();
            let running = self.shard.each(async move |shard: Rc<Shard>| shard.scrubs.running(&pool)).await?;
            let running: Vec<ScrubKind> = running.into_iter().flatten().collect();
            if repair && running.contains(&ScrubKind::Check) {
                let advice = "a scrub without --repair is running, wait until it ends".into();
                return Err(Error::Busy { what: format!("scrubs of pool {name}"), limit: 1, advice });
            }
            if running.is_empty() {
                let kind = if repair { ScrubKind::Repair } else { ScrubKind::Check };
                self.shard.tell_each(move |shard| shard.start_scrub(id, kind)).await?;
            }
        }
        let shares = self.shard.each(async move |shard: Rc<Shard>| shard.scrubs.status(&name)).await?;
        let mut sum = ScrubStatus::default();
        shares.into_iter().for_each(|share| sum += share);
        Ok(sum)
    }
}

impl Shard {
    /// Starts a scrub of the shard's share of a pool, unless one is running.
    fn start_scrub(self: &Rc<Self>, id: u32, kind: ScrubKind) {
        let Ok(pool) = self.open_pool(id) else { return };
        if self.scrubs.begin(&pool.label, pool.pgs.len() as u32, kind) {
            let shard = Rc::clone(self);
            spawn(async move {
                let failure = shard.scrub_pool(&pool, kind == ScrubKind::Repair).await.err();
                shard.scrubs.end(&pool.label, failure.map(|e| e.to_string()));
            });
        }
    }

    async fn scrub_pool(&self, pool: &ActivePool, repair: bool) -> wire::Result<()> {
        for (number, pg) in pool.pgs.iter().enumerate() {
            match pool.groups.get(number) {
                Some(group) => self.scrub_group(pool, pg, group, repair).await?,
                None => self.verify_group(pool, pg, repair).await?,
            }
            self.scrubs.group_done(&pool.label);
        }
        Ok(())
    }

    async fn scrub_group(
        &self,
        pool: &ActivePool,
        pg: &Rc<Pg>,
        group: &Rc<Group>,
        repair: bool,
    ) -> wire::Result<()> {
        let refused = |e: StoreError| refusal(e.into());
        self.insist(async || group.compare_records().await).await.map_err(refused)?;
        let mut from: Option<ObjectId> = None;
        loop {
            let page = self.insist(async || group.scrub_page(from.clone(), PAGE).await).await;
            let (ids, more) = page.map_err(refused)?;
            for oid in ids.iter().filter(|oid| ids::parse(oid).is_some()) {
                let began = Instant::now();
                let mut found = self.insist(async || group.scrub(oid).await).await.map_err(refused)?;
                let place = ObjectLocation { pg: Rc::clone(pg), oid: oid.clone() };
                found.add(&self.audit(&place, repair).await?);
                self.scrubs.found(&pool.label, &found);
                self.pace.after(found.bytes, began.elapsed()).await;
            }
            match ids.last() {
                Some(last) if more => from = Some(after(last).map_err(refusal)?),
                _ => return Ok(()),
            }
        }
    }

    /// Repeats an attempt that fails because a group's interval ended, for at most as long as
    /// requests wait for the store.
    async fn insist<T>(&self, attempt: impl AsyncFn() -> store::Result<T>) -> store::Result<T> {
        let until = Instant::now() + self.config.store_patience;
        loop {
            match attempt().await {
                Err(StoreError::Disconnected(_)) if Instant::now() < until => {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                outcome => return outcome,
            }
        }
    }

    /// Reads and verifies all data of a placement group without redundancy. Damaged data can be
    /// reported, but not repaired.
    async fn verify_group(&self, pool: &ActivePool, pg: &Rc<Pg>, repair: bool) -> wire::Result<()> {
        let place = ObjectLocation { pg: Rc::clone(pg), oid: ids::meta_object() };
        let patience = self.config.store_patience;
        let mut from = None;
        loop {
            let page = patiently(&place, patience, async || objects(&place, from.clone(), PAGE).await).await;
            let (ids, more) = page.map_err(refusal)?;
            for oid in ids.iter().filter(|oid| ids::parse(oid).is_some()) {
                let began = Instant::now();
                let place = ObjectLocation { pg: Rc::clone(pg), oid: oid.clone() };
                let mut found = verify(&place).await.map_err(|e| refusal(e.into()))?;
                found.add(&self.audit(&place, repair).await?);
                self.scrubs.found(&pool.label, &found);
                self.pace.after(found.bytes, began.elapsed()).await;
            }
            match ids.last() {
                Some(last) if more => from = Some(after(last).map_err(refusal)?),
                _ => return Ok(()),
            }
        }
    }
}

/// Verifies an object's data by its checksums.
async fn verify(place: &ObjectLocation) -> store::Result<Findings> {
    let mut found = Findings { objects: 1, ..Findings::default() };
    let (store, cid, oid) = (&place.pg.backing, &place.pg.cid, &place.oid);
    let mut at = 0;
    loop {
        let read = match store.read(cid, oid, at, SEGMENT, None).await {
            Ok(read) => read,
            Err(StoreError::NoSuchObject(_)) => return Ok(found),
            Err(StoreError::Corrupt { .. } | StoreError::Io(_) | StoreError::Absent(_)) => {
                found.damaged = 1;
                return Ok(found);
            }
            Err(e) => return Err(e),
        };
        found.bytes += read.len();
        if read.verify().is_err() {
            found.damaged = 1;
        }
        at += SEGMENT;
        if at >= read.object_size {
            return Ok(found);
        }
    }
}
