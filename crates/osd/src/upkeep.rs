//! Looking after redundancy: taking targets out and in, rebuilding what is missing, scrubbing.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use array::{Findings, Group, RETRY, Rebuilt};
use futures::future::join_all;
use store::{ObjectId, Space, StoreCalls, StoreError};
use tokio::time::Instant;
use uuid::Uuid;
use wire::{Error, PoolHealth, PoolName, RebuildStatus, ScrubStatus};

use crate::ids;
use crate::list::{after, objects};
use crate::map::{NodeMap, TargetRecord};
use crate::osd::{Osd, Place, Pool};
use crate::pg::Pg;
use crate::pools::refusal;
use crate::read::patiently;
use crate::target::Target;
use crate::task::spawn;

/// Objects scrubbed between two listings.
const PAGE: usize = 128;
/// Bytes of an object without redundancy that are verified at a time.
const SEGMENT: u64 = 1 << 20;

/// A pool that could not be emptied is tried again after so many intervals of the upkeep.
const REMOVAL_INTERVALS: u32 = 4;
/// An index with less than that part free is nearly full: changes are refused from half of that on.
const INDEX_LOW: u64 = 8;
/// Notes that take more than that part of an index are given up when it is nearly full.
const INDEX_NOTES: u64 = 16;
/// A target without room for the node's map is offered it again after so many intervals of the upkeep.
const MAP_INTERVALS: u32 = 4;

/// What is going on. See the [module](self) documentation.
#[derive(Default)]
pub(crate) struct Upkeep {
    rebuilt: RefCell<Rebuilt>,
    rebuilding: RefCell<Option<(String, Uuid)>>,
    last_failure: RefCell<Option<String>>,
    scrubs: RefCell<BTreeMap<String, Scrub>>,
    /// Pools that were removed while a target was not there.
    pub(crate) removed: RefCell<Vec<Rc<Pool>>>,
}

/// A scrub of one pool, under way or done.
#[derive(Debug, Clone, Default)]
struct Scrub {
    running: bool,
    /// Objects of the wrong size are repaired.
    repair: bool,
    groups: u32,
    groups_done: u32,
    findings: Findings,
    failure: Option<String>,
}

impl Osd {
    /// Runs for ever: keeps the map's word on targets true, tries targets again that have failed, and rebuilds.
    pub(crate) async fn look_after_redundancy(self: Rc<Osd>) {
        tokio::join!(
            self.rebuild_for_ever(),
            self.bound_notes_for_ever(),
            self.try_targets_for_ever(),
            self.give_map_for_ever(),
            self.finish_removals_for_ever()
        );
    }

    async fn try_targets_for_ever(&self) {
        loop {
            tokio::time::sleep(self.config.upkeep_interval).await;
            self.targets.iter().for_each(Target::probe_if_due);
            for target in self.targets.iter() {
                let (state, next_try) = target.state();
                let uuid = target.uuid.to_string();
                metrics::gauge!("outboard_osd_target_state", "target" => uuid.clone()).set(state as u8);
                let seconds = next_try.unwrap_or_default().as_secs_f64();
                metrics::gauge!("outboard_osd_target_next_try_seconds", "target" => uuid).set(seconds);
            }
        }
    }

    /// Gives the map to targets that had no room for it when the node started: they count as failed until they have it.
    async fn give_map_for_ever(&self) {
        loop {
            tokio::time::sleep(self.config.upkeep_interval * MAP_INTERVALS).await;
            for target in self.targets.iter().filter(|target| target.lacks_map()) {
                let _one_at_a_time = self.changing_map.lock().await;
                let map = self.map.borrow().clone();
                if map.give(target, self.config.target_timeout).await {
                    tracing::info!(target_uuid = %target.uuid, "the target has room for the node's map again");
                    target.try_again();
                }
            }
        }
    }

    async fn finish_removals_for_ever(&self) {
        loop {
            // Each attempt may say in the log why it came to nothing.
            tokio::time::sleep(self.config.upkeep_interval * REMOVAL_INTERVALS).await;
            self.finish_removals().await;
        }
    }

    async fn bound_notes_for_ever(&self) {
        loop {
            tokio::time::sleep(self.config.upkeep_interval).await;
            let groups = self.open_groups();
            let full = self.targets_full_of_notes(&groups).await;
            for (_, group) in groups {
                let index_is_full = full.iter().any(|target| group.is_in_sync_on(target));
                group.bound_notes(index_is_full).await;
            }
        }
    }

    /// Targets whose index is nearly full and largely filled by notes of dirty objects.
    async fn targets_full_of_notes(&self, groups: &[(String, Rc<Group>)]) -> Vec<Uuid> {
        let mut full = Vec::new();
        for target in self.targets.iter().filter(|target| target.is_usable()) {
            let noted = || groups.iter().filter(|(_, group)| group.is_in_sync_on(&target.uuid));
            if !noted().any(|(_, group)| group.has_notes()) {
                continue;
            }
            let notes = || noted().map(|(_, group)| group.notes_bytes()).sum::<u64>();
            let asked = tokio::time::timeout(self.config.target_timeout, target.store.space());
            let Ok(Ok(Space { index_free, index_total, .. })) = asked.await else { continue };
            if index_free < index_total / INDEX_LOW && notes() > index_total / INDEX_NOTES {
                full.push(target.uuid);
            }
        }
        full
    }

    async fn rebuild_for_ever(&self) {
        loop {
            tokio::time::sleep(self.config.upkeep_interval).await;
            let groups = self.open_groups();
            if groups.is_empty() {
                continue;
            }
            if let Err(e) = self.note_lost_targets().await {
                tracing::warn!(error = %e, "the map does not say yet which targets are lost");
            }
            for (pool, group) in groups {
                self.rebuild_group(&pool, &group).await;
            }
        }
    }

    /// Removes, once all targets are there, what pools have left that were removed before.
    async fn finish_removals(&self) {
        if self.upkeep.removed.borrow().is_empty() || !self.has_all_targets() {
            return;
        }
        for pool in self.upkeep.removed.take() {
            self.empty_or_wait(pool).await;
        }
    }

    /// Whether all targets of the node are there and may be used.
    pub(crate) fn has_all_targets(&self) -> bool {
        let is_there = |uuid| self.targets.iter().any(|t| t.uuid == uuid && t.is_usable());
        self.map.borrow().targets.iter().all(|record| is_there(record.uuid))
    }

    /// Groups of pools in use, with the pool's name.
    pub(crate) fn open_groups(&self) -> Vec<(String, Rc<Group>)> {
        let pools = self.pools.borrow();
        let open = pools.values().filter(|pool| !pool.closed.get());
        open.flat_map(|pool| pool.groups.iter().map(|g| (pool.record.name.clone(), Rc::clone(g)))).collect()
    }

    async fn rebuild_group(&self, pool: &str, group: &Rc<Group>) {
        let Some(interval) = group.opened(self.config.target_timeout).await else { return };
        if let Err(e) = group.remove_leftovers(&interval).await {
            tracing::warn!(pool, error = %e, "what a former member has is removed later");
        }
        let Some(position) = group.to_rebuild(&interval) else { return };
        let target = interval.target(position);
        *self.upkeep.rebuilding.borrow_mut() = Some((pool.to_owned(), target));
        let rebuilt = group.rebuild(position, &self.pace, &self.upkeep.rebuilt).await;
        *self.upkeep.rebuilding.borrow_mut() = None;
        if let Err(e) = rebuilt {
            tracing::warn!(pool, position, error = %e, "a placement group's rebuild starts again");
            *self.upkeep.last_failure.borrow_mut() = Some(e.to_string());
            tokio::time::sleep(RETRY.min(self.config.upkeep_interval * 10)).await;
        }
    }

    /// Notes in the map which targets do not have it: after a restart that tells whether the others have the newest one.
    async fn note_lost_targets(&self) -> wire::Result<()> {
        let lost = |record: &TargetRecord| {
            let target = self.targets.iter().find(|t| t.uuid == record.uuid);
            target.map_or(record.lost, |t| t.failure().is_some() || t.lacks_map())
        };
        let lost: Vec<bool> = self.map.borrow().targets.iter().map(lost).collect();
        self.change_targets(|map| {
            map.targets.iter_mut().zip(lost).for_each(|(record, lost)| record.lost = lost);
        })
        .await
    }

    /// Changes what the map says of the targets, if that is something else.
    async fn change_targets(&self, change: impl FnOnce(&mut NodeMap)) -> wire::Result<()> {
        let _one_at_a_time = self.changing_map.lock().await;
        let mut map = self.map.borrow().clone();
        change(&mut map);
        if map == *self.map.borrow() && !self.map_is_uncertain.get() {
            return Ok(());
        }
        let saved = self.save_map(map).await;
        self.map.borrow().tell(&self.targets);
        saved
    }

    /// Takes a target out, or in again.
    pub(crate) async fn set_target_out(&self, index: u32, out: bool) -> wire::Result<()> {
        let target = self.target(index)?;
        // What goes on without it has to be known before it can come back.
        let groups = self.open_groups();
        drop(join_all(groups.iter().map(|(_, group)| group.any_interval())).await);
        if out {
            self.can_spare(&target).await?;
        }
        if !out {
            target.try_again();
        }
        self.change_targets(|map| map.targets[index as usize].out = out).await
    }

    /// Gives a target's number to another one, which the node has from its next start on.
    pub(crate) async fn replace_target(&self, index: u32, uuid: Uuid) -> wire::Result<()> {
        self.can_spare(&*self.target(index)?).await?;
        if self.map.borrow().record(&uuid).is_some() {
            return Err(Error::BadRequest(format!("target {uuid} is one of the node's already")));
        }
        if self.pools.borrow().values().any(|pool| pool.groups.is_empty()) {
            let what =
                "a pool without redundancy may have objects on it; remove the pool, or restore the target";
            return Err(Error::BadRequest(what.into()));
        }
        self.change_targets(|map| {
            map.targets[index as usize] = TargetRecord { uuid, out: false, lost: true };
        })
        .await
    }

    /// Fails if a target that is there has what no others have, or too few: to say that it is lost would lose data.
    async fn can_spare(&self, target: &Target) -> wire::Result<()> {
        // A group that cannot be opened may need the target.
        let needs = async |(pool, group): (String, Rc<Group>)| {
            let interval = group.any_interval().await;
            let can_spare = interval.is_ok_and(|interval| interval.can_spare(target.uuid, group.needed()));
            (!can_spare).then_some(pool)
        };
        let groups = self.open_groups().into_iter().map(needs);
        let pools: BTreeSet<String> = join_all(groups).await.into_iter().flatten().collect();
        if pools.is_empty() {
            return Ok(());
        }
        // That it is gone may not have been noticed yet: something is written to it.
        let written = {
            let _one_at_a_time = self.changing_map.lock().await;
            let map = self.map.borrow().clone();
            self.save_map(map).await
        };
        if !target.is_usable() {
            tracing::info!(target_uuid = %target.uuid, ?written, "the target is gone");
            return Ok(());
        }
        let pools = pools.into_iter().collect::<Vec<_>>().join(", ");
        Err(Error::BadRequest(format!(
            "too few other targets are up to date for {pools}; bring those back and wait until they have caught up"
        )))
    }

    fn target(&self, index: u32) -> wire::Result<Rc<Target>> {
        let map = self.map.borrow();
        let uuid = map.targets.get(index as usize).map(|record| record.uuid);
        let found = self.targets.iter().find(|t| Some(t.uuid) == uuid);
        found.cloned().ok_or_else(|| {
            let detail =
                format!("{index}; the node has targets 0 to {}", map.targets.len().saturating_sub(1));
            Error::OutOfRange { what: "target".into(), detail }
        })
    }

    /// Whether a target is a member of a placement group somewhere and has not caught up.
    pub(crate) fn is_behind(&self, uuid: Uuid) -> bool {
        // While members come and go, the last that was known of them.
        let intervals = self.open_groups().into_iter().filter_map(|(_, group)| group.last_interval());
        intervals.into_iter().any(|interval| interval.lacks_target(uuid))
    }

    /// How the pools with redundancy are.
    pub(crate) fn health(&self) -> Vec<PoolHealth> {
        let health = |pool: &Rc<Pool>| {
            let mut health = PoolHealth { pool: pool.record.name.clone(), ..PoolHealth::default() };
            for group in &pool.groups {
                health.groups += 1;
                match group.current() {
                    Some(interval) => health.degraded += u32::from(!interval.is_whole()),
                    None => health.unavailable += 1,
                }
            }
            health
        };
        let pools = self.pools.borrow();
        pools.values().filter(|pool| !pool.groups.is_empty()).map(health).collect()
    }

    /// What is being rebuilt.
    pub(crate) fn rebuild_status(&self) -> RebuildStatus {
        let rebuilt = *self.upkeep.rebuilt.borrow();
        let (pool, target) = self.upkeep.rebuilding.borrow().clone().unzip();
        RebuildStatus {
            target,
            pool,
            objects: rebuilt.objects,
            bytes: rebuilt.bytes,
            rate_limit: self.pace.rate(),
            last_failure: self.upkeep.last_failure.borrow().clone(),
        }
    }

    /// How a pool's scrub stands; with `start` one is begun if none is under way, which is to `repair` or not.
    ///
    /// # Errors
    /// If one is under way that does not repair, and the new one is to.
    pub(crate) fn scrub(self: &Rc<Osd>, name: &[u8], start: bool, repair: bool) -> wire::Result<ScrubStatus> {
        let name = PoolName::from_wire(name)?.to_string();
        let pool = self.open_pool(&name)?;
        let under_way = self.upkeep.scrubs.borrow().get(&name).filter(|scrub| scrub.running).cloned();
        if start && repair && under_way.as_ref().is_some_and(|scrub| !scrub.repair) {
            let advice = "one without --repair is under way, wait until it has ended".into();
            return Err(Error::Busy { what: format!("scrubs of pool {name}"), limit: 1, advice });
        }
        if start && under_way.is_none() {
            let scrub = Scrub { running: true, repair, groups: pool.record.pg_count, ..Scrub::default() };
            self.upkeep.scrubs.borrow_mut().insert(name.clone(), scrub);
            let osd = Rc::clone(self);
            spawn(async move {
                let failure = osd.scrub_pool(&pool, repair).await.err();
                osd.with_scrub(&pool, |scrub| {
                    scrub.running = false;
                    scrub.failure = failure.map(|e| e.to_string());
                });
            });
        }
        let scrub = self.upkeep.scrubs.borrow().get(&name).cloned().unwrap_or_default();
        let Findings { objects, bytes, damaged, repaired, inconsistent, wrong_size, resized } =
            scrub.findings;
        let Scrub { running, groups, groups_done, failure, .. } = scrub;
        Ok(ScrubStatus {
            running,
            groups,
            groups_done,
            objects,
            bytes,
            damaged,
            repaired,
            inconsistent,
            wrong_size,
            resized,
            failure,
        })
    }

    fn with_scrub(&self, pool: &Pool, change: impl FnOnce(&mut Scrub)) {
        if let Some(scrub) = self.upkeep.scrubs.borrow_mut().get_mut(&pool.record.name) {
            change(scrub);
        }
    }

    async fn scrub_pool(&self, pool: &Pool, repair: bool) -> wire::Result<()> {
        for (number, pg) in pool.pgs.iter().enumerate() {
            match pool.groups.get(number) {
                Some(group) => self.scrub_group(pool, pg, group, repair).await?,
                None => self.verify_group(pool, pg, repair).await?,
            }
            self.with_scrub(pool, |scrub| scrub.groups_done += 1);
        }
        Ok(())
    }

    async fn scrub_group(
        &self,
        pool: &Pool,
        pg: &Rc<Pg>,
        group: &Rc<Group>,
        repair: bool,
    ) -> wire::Result<()> {
        let refused = |e: StoreError| refusal(e.into());
        let mut from: Option<ObjectId> = None;
        loop {
            let page = self.insist(async || group.scrub_page(from.clone(), PAGE).await).await;
            let (ids, more) = page.map_err(refused)?;
            for oid in ids.iter().filter(|oid| ids::parse(oid).is_some()) {
                let began = Instant::now();
                let mut found = self.insist(async || group.scrub(oid).await).await.map_err(refused)?;
                let place = Place { pg: Rc::clone(pg), oid: oid.clone() };
                found.add(&self.audit(&place, repair).await?);
                self.with_scrub(pool, |scrub| scrub.findings.add(&found));
                self.pace.after(found.bytes, began.elapsed()).await;
            }
            match ids.last() {
                Some(last) if more => from = Some(after(last).map_err(refusal)?),
                _ => return Ok(()),
            }
        }
    }

    /// Repeats what fails with a group's interval.
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

    /// Reads all of a placement group without redundancy. Damaged data can only be told.
    async fn verify_group(&self, pool: &Pool, pg: &Rc<Pg>, repair: bool) -> wire::Result<()> {
        let place = Place { pg: Rc::clone(pg), oid: ids::meta_object() };
        let patience = self.config.store_patience;
        let mut from = None;
        loop {
            let page = patiently(&place, patience, async || objects(&place, from.clone(), PAGE).await).await;
            let (ids, more) = page.map_err(refusal)?;
            for oid in ids.iter().filter(|oid| ids::parse(oid).is_some()) {
                let began = Instant::now();
                let place = Place { pg: Rc::clone(pg), oid: oid.clone() };
                let mut found = verify(&place).await.map_err(|e| refusal(e.into()))?;
                found.add(&self.audit(&place, repair).await?);
                self.with_scrub(pool, |scrub| scrub.findings.add(&found));
                self.pace.after(found.bytes, began.elapsed()).await;
            }
            match ids.last() {
                Some(last) if more => from = Some(after(last).map_err(refusal)?),
                _ => return Ok(()),
            }
        }
    }
}

/// Compares an object's data with its checksums.
async fn verify(place: &Place) -> store::Result<Findings> {
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
