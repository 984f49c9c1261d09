//! Tests of pools with redundancy: events while a target is unavailable or is being rebuilt.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use client::{Error, NodeError};
use osd::OsdConfig;
use store::simulation::{RecordedDrive, SimStore};
use store::{ObjectId, Op, StoreCalls, Transaction};
use uuid::Uuid;
use wire::{AccountRequest, AdminReply, AdminRequest};

use crate::common::{FaultStore, Node, data, moment, seed};
use crate::redundancy::{Rig, config, wait_until_whole};

/// Waits until `is_so` returns `true`.
pub(super) async fn until(what: &str, is_so: impl AsyncFn() -> bool) {
    let wait = async {
        while !is_so().await {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), wait).await.unwrap_or_else(|_| panic!("timed out: {what}"));
}

impl Rig {
    /// Puts an object, and remembers its new content.
    async fn put(&mut self, number: usize, len: usize, salt: u64) {
        let (name, bytes) = (format!("o{number}"), data(len, salt));
        self.pool.object(&name).unwrap().put(bytes.clone()).await.unwrap();
        self.objects.retain(|(other, _)| *other != name);
        self.objects.push((name, bytes));
    }

    async fn rebuilt(&self) -> u64 {
        self.client.status().await.unwrap().rebuild.objects
    }

    async fn is_degraded(&self) -> bool {
        self.client.status().await.unwrap().health.iter().any(|h| h.degraded + h.unavailable > 0)
    }

    /// Returns the targets that store data of a pool in addition to the node's map.
    async fn with_groups(&self) -> Vec<usize> {
        let mut some = vec![];
        for (number, store) in self.node.stores.iter().enumerate() {
            let collections = store.inner.collections().await.unwrap();
            some.extend((collections.len() > 1).then_some(number));
        }
        some
    }

    /// Returns the number of dirty notes in the collection that has most of them.
    async fn notes(&self) -> usize {
        let mut most = 0;
        for store in &self.node.stores {
            for cid in store.inner.collections().await.unwrap() {
                let (ids, _) = store.inner.list(&cid, None, 1).await.unwrap();
                let Some(own) = ids.first() else { continue };
                let from = Bytes::from_static(b"d");
                let (entries, _) = store.inner.omap_iterate(&cid, own, from, 1000).await.unwrap();
                most = most.max(entries.iter().filter(|(key, _)| key.starts_with(b"d")).count());
            }
        }
        most
    }

    /// Fails target 1, and brings target 0 back.
    async fn lose_the_newest(&self) {
        self.set_down(&[1], true);
        self.pool.object("other").unwrap().put("x").await.unwrap_err();
        self.set_down(&[0], false);
        self.client.set_target_out(0, false).await.unwrap();
    }

    /// Checks all objects without each of these targets, one target at a time.
    async fn check_without_each(&self, targets: &[usize]) {
        for &lost in targets {
            self.set_down(&[lost], true);
            self.check(&format!("without {lost}")).await;
            self.bring_back(&[lost]).await;
        }
    }
}

const OBJECTS: usize = 120;

/// Creates an `ec:2+1` pool whose rebuild takes more than a second.
async fn slow_rig(targets: usize, config: OsdConfig) -> Rig {
    let config = OsdConfig { rebuild_rate: 1 << 20, ..config };
    let mut rig = Rig::of("ec:2+1", 1, targets, config).await;
    for number in 0..OBJECTS {
        rig.put(number, 20_000 + 100 * number, number as u64).await;
    }
    rig
}

/// Restarts the osd when some objects are rebuilt, and changes objects before and after the
/// restart.
async fn restart_amid_rebuild(rig: &mut Rig) {
    until("a few objects are rebuilt", async || rig.rebuilt().await >= 20).await;
    for number in (0..OBJECTS).step_by(10) {
        rig.put(number, 30_000, 1000 + number as u64).await;
    }
    let rebuilt = rig.rebuilt().await;
    assert!(rebuilt < OBJECTS as u64 && rig.is_degraded().await, "{rebuilt} objects are rebuilt already");
    rig.node.restart();
    for number in (5..OBJECTS).step_by(10) {
        rig.put(number, 30_000, 2000 + number as u64).await;
    }
    assert!(rig.is_degraded().await, "the rebuild ended too early for the test");
    wait_until_whole(&rig.client).await;
    assert!(rig.rebuilt().await > 0);
}

#[tokio::test]
async fn the_rebuild_of_a_spare_target_continues_after_a_restart_of_the_osd() {
    let mut rig = slow_rig(4, config()).await;
    let lost = rig.with_groups().await[0];
    rig.client.set_target_out(lost as u32, true).await.unwrap();
    restart_amid_rebuild(&mut rig).await;
    let members: Vec<usize> = (0..4).filter(|&target| target != lost).collect();
    rig.client.set_rebuild_rate(0).await.unwrap();
    rig.check_without_each(&members).await;
    // The target that was out is no longer needed.
    rig.client.set_target_out(lost as u32, false).await.unwrap();
    until("the target that was out is emptied", async || rig.with_groups().await == members).await;
}

#[tokio::test]
async fn a_target_that_was_full_once_can_later_replace_a_lost_target() {
    let mut rig = Rig::of("mirror:2", 1, 3, config()).await;
    rig.put(0, 30_000, 0).await;
    let members = rig.with_groups().await;
    let spare = (0..3).find(|target| !members.contains(target)).unwrap();
    let fired = rig.node.fired();
    rig.node.stores[spare].set_full(u64::MAX);
    rig.client.set_target_out(members[1] as u32, true).await.unwrap();
    until("the spare is full", async || rig.node.fired() > fired).await;
    rig.client.set_target_out(members[1] as u32, false).await.unwrap();
    wait_until_whole(&rig.client).await;
    until("the copy is on its old targets", async || rig.with_groups().await == members).await;
    rig.node.stores[spare].set_full(0);
    rig.client.set_target_out(members[1] as u32, true).await.unwrap();
    wait_until_whole(&rig.client).await;
    rig.check_without_each(&[members[0], spare]).await;
}

#[tokio::test]
async fn an_interrupted_removal_of_old_data_is_finished_although_the_group_is_degraded() {
    let mut rig = Rig::of("mirror:3", 1, 4, config()).await;
    rig.put(0, 30_000, 0).await;
    let members = rig.with_groups().await;
    let other = (0..4).find(|target| !members.contains(target)).unwrap();
    let collections = rig.node.stores[members[0]].inner.collections().await.unwrap();
    let cid = collections.into_iter().find(|cid| *cid.as_bytes() != b"N"[..]).unwrap();
    // A removal deletes the membership record first, so this collection looks partly removed.
    let oid = ObjectId::new("left").unwrap();
    let remains = Transaction::new(cid).with(Op::CreateCollection).with(Op::Touch { oid });
    rig.node.stores[other].inner.queue_transaction(remains).await.unwrap();
    rig.set_down(&[members[1]], true);
    rig.put(0, 30_000, 1).await;
    assert!(rig.is_degraded().await);
    until("the remaining data is removed", async || rig.with_groups().await == members).await;
}

#[tokio::test]
async fn the_rebuild_of_a_returned_target_continues_after_a_restart_of_the_osd() {
    let mut rig = slow_rig(3, config()).await;
    rig.set_down(&[0], true);
    for number in 0..OBJECTS {
        rig.put(number, 25_000 + 100 * number, 500 + number as u64).await;
    }
    rig.set_down(&[0], false);
    rig.client.set_target_out(0, false).await.unwrap();
    restart_amid_rebuild(&mut rig).await;
    rig.client.set_rebuild_rate(0).await.unwrap();
    rig.check_without_each(&[1, 2]).await;
}

/// Length of data, in bytes, that is staged regardless of the number of requests in progress.
const STAGED: usize = (5 << 20) + 12_345;

#[tokio::test]
async fn large_writes_succeed_while_targets_are_down() {
    for redundancy in ["ec:4+2", "mirror:3"] {
        let mut rig = Rig::new(redundancy, 1).await;
        rig.put(0, STAGED, 1).await;
        let all = rig.node.stores.len();
        let lost = [1, all - 1];
        for (number, &target) in lost.iter().enumerate() {
            rig.set_down(&[target], true);
            let before = rig.node.stores[0].stages.load(Ordering::SeqCst);
            rig.put(1 + number, STAGED, 2 + number as u64).await;
            // Write over existing data and beyond its end.
            let (mut old, new) = (data(STAGED, 1).to_vec(), data(STAGED, 10 + number as u64));
            let at = 1 << 20;
            old.resize(at + STAGED, 0);
            old[at..].copy_from_slice(&new);
            rig.put(0, STAGED, 1).await;
            rig.pool.object("o0").unwrap().write(at as u64, new).await.unwrap();
            rig.objects.retain(|(name, _)| name != "o0");
            rig.objects.push(("o0".into(), old.into()));
            rig.check(&format!("without {:?}", &lost[..=number])).await;
            let stages = rig.node.stores[0].stages.load(Ordering::SeqCst) - before;
            assert!(stages >= 3, "{redundancy}: {stages} writes were staged");
        }
        rig.bring_back(&lost).await;
        // The targets that were down must have the data, too.
        let others: Vec<usize> = (0..all).filter(|target| !lost.contains(target)).take(2).collect();
        rig.set_down(&others, true);
        rig.check(&format!("without {others:?}")).await;
    }
}

#[tokio::test]
async fn a_target_that_returns_while_a_large_write_is_staged_gets_the_data() {
    // The returned target counts as usable at once, but its rebuild starts only at the next upkeep.
    let config = OsdConfig { upkeep_interval: Duration::from_secs(1), ..config() };
    let mut rig = slow_rig(3, config).await;
    rig.set_down(&[0], true);
    for number in 0..OBJECTS {
        rig.put(number, 25_000, 500 + number as u64).await;
    }
    rig.set_down(&[0], false);
    rig.client.set_target_out(0, false).await.unwrap();
    // The data is staged without the target. When the transaction runs, the target is being
    // rebuilt.
    rig.node.stores[1].hold_stages(true);
    let (object, bytes) = (rig.pool.object("large").unwrap(), data(STAGED, 7));
    let put = tokio::spawn({
        let bytes = bytes.clone();
        async move { object.put(bytes).await }
    });
    let waited = tokio::time::timeout(Duration::from_secs(60), rig.node.waited(1));
    waited.await.expect("data is staged");
    let stages = |target: usize| rig.node.stores[target].stages.load(Ordering::SeqCst);
    assert_eq!((stages(0), stages(1)), (0, 1));
    until("the target is being rebuilt", async || rig.rebuilt().await > 0).await;
    rig.node.stores[1].hold_stages(false);
    put.await.unwrap().unwrap();
    assert!(stages(0) > 0, "the data was staged again, on all targets");
    assert!(rig.is_degraded().await, "the target was back too early for the test");
    rig.objects.push(("large".into(), bytes));
    // More objects are written during the rebuild.
    for number in 0..3 {
        rig.put(1000 + number, STAGED, 8 + number as u64).await;
    }
    rig.client.set_rebuild_rate(0).await.unwrap();
    wait_until_whole(&rig.client).await;
    rig.check_without_each(&[1, 2]).await;
}

/// Returns the number of collections and of used bytes of each target.
async fn taken(rig: &Rig) -> Vec<(usize, u64)> {
    let mut all = vec![];
    for store in &rig.node.stores {
        let (space, collections) =
            (store.inner.space().await.unwrap(), store.inner.collections().await.unwrap());
        all.push((collections.len(), space.total - space.free));
    }
    all
}

#[tokio::test]
async fn all_space_of_a_removed_pool_is_freed() {
    let mut rig = Rig::of("mirror:2", 1, 5, config()).await;
    let before = taken(&rig).await;
    for (name, redundancy) in [("wide", "ec:2+1"), ("copies", "mirror:3")] {
        rig.client.create_pool_with(name, 64, crate::redundancy::redundancy(redundancy)).await.unwrap();
        rig.pool = rig.client.pool(name).unwrap();
        for number in 0..200 {
            rig.put(number, 1 + 300 * number, number as u64).await;
        }
        rig.put(200, STAGED, 3).await;
        // Some overwritten data is kept for a while.
        for number in 0..50 {
            rig.pool.object(&format!("o{number}")).unwrap().write(0, data(10, 4)).await.unwrap();
        }
        assert!(taken(&rig).await.iter().zip(&before).all(|(now, then)| now.0 > then.0 && now.1 > then.1));
        assert!(rig.client.remove_pool(name, false).await.is_err(), "it is not empty");
        rig.client.remove_pool(name, true).await.unwrap();
        if name == "copies" {
            rig.node.restart();
        }
        until(&format!("{name} is removed"), async || taken(&rig).await == before).await;
    }
}

#[tokio::test]
async fn the_space_of_a_removed_pool_is_freed_on_a_target_that_returns_later() {
    let mut rig = Rig::of("mirror:2", 1, 4, config()).await;
    let before = taken(&rig).await;
    rig.client.create_pool_with("wide", 16, crate::redundancy::redundancy("ec:2+1")).await.unwrap();
    rig.pool = rig.client.pool("wide").unwrap();
    for number in 0..50 {
        rig.put(number, 20_000, number as u64).await;
    }
    rig.set_down(&[1], true);
    rig.put(0, 20_000, 100).await;
    rig.client.remove_pool("wide", true).await.unwrap();
    let others = async || {
        let now = taken(&rig).await;
        [0, 2, 3].iter().all(|&target| now[target] == before[target])
    };
    until("the pool is removed from the present targets", others).await;
    rig.set_down(&[1], false);
    rig.client.set_target_out(1, false).await.unwrap();
    until("the pool is removed from all targets", async || taken(&rig).await == before).await;
}

#[tokio::test]
async fn a_tenant_can_be_removed_before_the_space_of_its_pool_is_freed() {
    let mut rig = Rig::of("mirror:2", 1, 4, config()).await;
    let order = async |rig: &Rig, request: AdminRequest| {
        let administrator = rig.node.osd.as_ref().unwrap().administrator().clone();
        administrator.administer(identity::Caller::process(), request, false).await
    };
    let (name, tenant, redundancy) = ("wide", Some("films".to_owned()), "ec:2+1");
    let redundancy = crate::redundancy::redundancy(redundancy);
    let create = || AdminRequest::Accounts(AccountRequest::CreateTenant { name: "films".into() });
    let remove = || AdminRequest::Accounts(AccountRequest::RemoveTenant { name: "films".into() });
    order(&rig, create()).await.unwrap();
    let before = taken(&rig).await;
    let (pg_count, pool) = (16, name);
    let request =
        AdminRequest::PoolCreate { name: pool.into(), pg_count, redundancy, tenant: tenant.clone() };
    order(&rig, request).await.unwrap();
    let refused = order(&rig, remove()).await.unwrap_err().to_string();
    assert!(refused.contains("remove its pools first"), "{refused}");
    rig.set_down(&[1], true);
    order(&rig, AdminRequest::PoolRemove { name: name.into(), force: true, tenant }).await.unwrap();
    order(&rig, remove()).await.unwrap();
    // The new tenant of this name has nothing of the old one.
    order(&rig, create()).await.unwrap();
    let list = AdminRequest::PoolList { tenant: Some("films".into()) };
    assert!(matches!(order(&rig, list).await.unwrap(), AdminReply::Pools(pools) if pools.is_empty()));
    assert_ne!(taken(&rig).await[1], before[1], "the space on target 1 is free already");
    rig.node.restart();
    rig.set_down(&[1], false);
    rig.client.set_target_out(1, false).await.unwrap();
    until("the pool is removed from all targets", async || taken(&rig).await == before).await;
    order(&rig, remove()).await.unwrap();
}

#[tokio::test]
async fn reads_return_no_old_data_after_a_restart_without_the_only_newest_copy() {
    let mut rig = Rig::of("mirror:2", 16, 3, config()).await;
    for number in 0..60 {
        rig.put(number, 9000, number as u64).await;
    }
    // Some groups continue with target 1 alone.
    rig.set_down(&[0], true);
    for number in 0..60 {
        rig.put(number, 10_000, 100 + number as u64).await;
    }
    // When the node starts, only target 0 is back, which lacks the latest changes.
    rig.set_down(&[1], true);
    rig.set_down(&[0], false);
    rig.node.restart();
    let uuid = rig.node.targets()[1].0.to_string();
    let mut there = 0;
    for (name, bytes) in &rig.objects {
        let object = rig.pool.object(name).unwrap();
        match object.get().await {
            Ok(read) => {
                assert!(read == *bytes, "{name} has old content");
                there += 1;
            }
            Err(e) => {
                let e = e.to_string();
                assert!(e.contains("bring") && e.contains(&uuid), "{name}: {e}");
                let e = object.put("x").await.unwrap_err().to_string();
                assert!(e.contains("bring"), "{name}: {e}");
            }
        }
    }
    assert!((1..60).contains(&there), "{there} objects were readable");
    rig.bring_back(&[1]).await;
    rig.check("after all targets returned").await;
    rig.check_without_each(&[0, 1, 2]).await;
}

fn hold_records(rig: &Rig, held: bool) {
    rig.node.stores.iter().for_each(|store| store.hold_records(held));
}

type Put = tokio::task::JoinHandle<client::Result<wire::Mutated>>;

/// Returns an `ec:2+1` pool without target 0. A change waits for the other targets. They have
/// stored the proposal of a membership record without target 0, which is not in force on any target
/// yet.
async fn proposed() -> (Rig, Put) {
    let mut rig = Rig::new("ec:2+1", 1).await;
    for number in 0..10 {
        rig.put(number, 50_000, number as u64).await;
    }
    rig.set_down(&[0], true);
    hold_records(&rig, true);
    let (object, bytes) = (rig.pool.object("o0").unwrap(), data(60_000, 100));
    rig.objects[0].1 = bytes.clone();
    let put = tokio::spawn(async move { object.put(bytes).await });
    let waited = tokio::time::timeout(Duration::from_secs(60), rig.node.waited(2));
    waited.await.expect("a record is proposed");
    moment().await;
    assert!(!put.is_finished(), "nothing is acknowledged before the record is in force");
    (rig, put)
}

/// Brings a target back, with a new incarnation.
fn comes_back(rig: &Rig, target: usize) {
    rig.set_down(&[target], false);
    rig.node.stores[target].end_session();
}

async fn all_is_well(mut rig: Rig) {
    wait_until_whole(&rig.client).await;
    rig.put(5, 70_000, 101).await;
    rig.check("after all targets returned").await;
    rig.check_without_each(&[0, 1, 2]).await;
    rig.client.start_scrub("pool", false).await.unwrap();
    until("the scrub ends", async || !rig.client.scrub_status("pool").await.unwrap().running).await;
    let scrub = rig.client.scrub_status("pool").await.unwrap();
    assert_eq!((scrub.objects, scrub.damaged, scrub.inconsistent), (10, 0, 0));
}

#[tokio::test]
async fn a_target_may_return_before_the_membership_record_without_it_is_in_force() {
    let (rig, put) = proposed().await;
    comes_back(&rig, 0);
    tokio::time::sleep(Duration::from_millis(20)).await;
    hold_records(&rig, false);
    put.await.unwrap().unwrap();
    all_is_well(rig).await;
}

#[tokio::test]
async fn a_restart_resolves_a_proposal_that_excludes_a_returned_target() {
    let (mut rig, put) = proposed().await;
    comes_back(&rig, 0);
    rig.node.restart();
    hold_records(&rig, false);
    put.await.unwrap().unwrap();
    all_is_well(rig).await;
}

/// Returns a target's membership record of the only group of a pool.
async fn record(rig: &Rig, target: usize) -> Bytes {
    let (store, oid) = (&rig.node.stores[target].inner, ObjectId::new(&b"\0\0\0\0\0array"[..]).unwrap());
    for cid in store.collections().await.unwrap() {
        if let Ok(found) = store.omap_get(&cid, &oid, vec!["e".into()]).await {
            return found[0].1.clone();
        }
    }
    panic!("target {target} has no record");
}

/// A membership record comes into force on only one target, which is then lost. The targets on
/// which the record is not in force continue without the lost target.
#[tokio::test]
async fn a_membership_record_in_force_only_on_a_lost_target_is_ignored() {
    for restart in [false, true] {
        let mut rig = Rig::new("ec:2+1", 1).await;
        for number in 0..10 {
            rig.put(number, 50_000, number as u64).await;
        }
        // A record comes into force on the targets in the order of the record.
        let (found, targets) = (record(&rig, 0).await, rig.node.targets());
        let place = |target: &usize| found.windows(16).position(|part| part == targets[*target].0.as_bytes());
        let mut order = [0, 1, 2];
        order.sort_by_key(place);
        let [first, lost, last] = order;
        rig.set_down(&[lost], true);
        rig.node.stores[last].arm_gone_at_record();
        let (object, bytes) = (rig.pool.object("o0").unwrap(), data(60_000, 100));
        let put = tokio::spawn({
            let bytes = bytes.clone();
            async move { object.put(bytes).await }
        });
        until("the last target is lost", async || rig.node.stores[last].is_down()).await;
        rig.set_down(&[first], true);
        let records = (record(&rig, first).await, record(&rig, lost).await, record(&rig, last).await);
        assert!(
            records.1 == records.2 && records.0 != records.1,
            "the record is in force on one target: {records:?}"
        );
        comes_back(&rig, lost);
        comes_back(&rig, last);
        if restart {
            rig.node.restart();
        }
        // The put may have been tried while only one of the targets was present.
        match put.await.unwrap() {
            Ok(_) => rig.objects[0].1 = bytes,
            Err(e) => assert!(e.to_string().contains("bring back one of"), "{e}"),
        }
        for number in 1..10 {
            rig.put(number, 40_000, 200 + number as u64).await;
        }
        rig.check("while two targets continue").await;
        comes_back(&rig, first);
        all_is_well(rig).await;
    }
}

/// One target refuses a change, and the others fail before they have undone it.
#[tokio::test]
async fn a_change_that_was_refused_and_may_be_kept_has_an_unknown_outcome() {
    let mut rig = Rig::new("ec:2+1", 1).await;
    rig.put(0, 50_000, 1).await;
    let object = rig.pool.object("o0").unwrap();
    rig.node.stores[2].set_full(1);
    [0, 1].iter().for_each(|target: &usize| rig.node.stores[*target].arm_gone_at_record());
    let outcome = object.put("newer").await;
    assert!([0, 1].iter().any(|target: &usize| rig.node.stores[*target].is_down()));
    assert!(matches!(outcome, Err(Error::Node(NodeError::OutcomeUnknown(_)))), "{outcome:?}");
}

#[tokio::test]
async fn too_many_dirty_notes_are_dropped_and_the_rebuild_copies_everything() {
    for (limit, changed) in [(1000, 60), (20, 60)] {
        let config = OsdConfig { missed_objects_per_pg: limit, ..config() };
        let mut rig = Rig::of("ec:2+1", 1, 3, config).await;
        for number in 0..OBJECTS {
            rig.put(number, 20_000 + 100 * number, number as u64).await;
        }
        rig.set_down(&[0], true);
        for number in 0..changed {
            rig.put(number, 25_000, 500 + number as u64).await;
            // The pause gives the osd time to count the notes in between.
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let overflows = changed > limit;
        if overflows {
            until("the notes are dropped", async || rig.notes().await == 0).await;
        } else {
            assert!(rig.notes().await >= changed);
        }
        let before = rig.rebuilt().await;
        rig.bring_back(&[0]).await;
        let rebuilt = rig.rebuilt().await - before;
        assert_eq!(rebuilt >= OBJECTS as u64, overflows, "{rebuilt} objects were rebuilt");
        assert_eq!(rig.notes().await, 0);
        rig.check_without_each(&[1, 2]).await;
    }
}

#[tokio::test]
async fn a_member_that_cannot_be_rebuilt_does_not_block_other_rebuilds() {
    for (full, other) in [(0, 1), (1, 0)] {
        let mut rig = Rig::new("ec:4+2", 1).await;
        rig.set_down(&[0, 1], true);
        for number in 0..10 {
            rig.put(number, 50_000, number as u64).await;
        }
        rig.set_down(&[0, 1], false);
        rig.node.stores[full].set_full(u64::MAX);
        for target in [0, 1] {
            rig.client.set_target_out(target, false).await.unwrap();
        }
        let is_behind = async |target: usize| rig.client.status().await.unwrap().targets[target].behind;
        until("the other target is rebuilt", async || !is_behind(other).await).await;
        until("a rebuild of the full target was tried", async || {
            rig.node.stores[full].fired.load(Ordering::SeqCst) > 0
        })
        .await;
        assert!(is_behind(full).await);
        rig.node.stores[full].set_full(0);
        wait_until_whole(&rig.client).await;
        rig.check_without_each(&[0, 1, 2]).await;
    }
}

/// Returns a mirror in which only target 1 has the newest changes, and the old contents of the
/// objects, which target 0 has.
async fn one_copy_ahead(config: OsdConfig) -> (Rig, Vec<(String, Bytes)>) {
    let mut rig = Rig::of("mirror:2", 2, 2, config).await;
    for number in 0..20 {
        rig.put(number, 9000, number as u64).await;
    }
    let old = rig.objects.clone();
    rig.set_down(&[0], true);
    for number in 0..20 {
        rig.put(number, 10_000, 100 + number as u64).await;
    }
    (rig, old)
}

/// Right after a start, no group has determined yet which target has which changes.
#[tokio::test]
async fn the_only_target_with_the_newest_data_cannot_be_taken_out_after_a_start() {
    let config = OsdConfig { upkeep_interval: Duration::from_secs(2), ..config() };
    let (mut rig, _) = one_copy_ahead(config).await;
    rig.set_down(&[0], false);
    rig.node.restart();
    rig.client = rig.node.client().await;
    let e = rig.client.set_target_out(1, true).await.unwrap_err().to_string();
    assert!(e.contains("up to date"), "{e}");
    rig.bring_back(&[0]).await;
    rig.node.restart();
    rig.client = rig.node.client().await;
    rig.client.set_target_out(1, true).await.unwrap();
    rig.check("without target 1").await;
}

/// A returned copy with outdated data must not be used when the copy with all changes is lost.
#[tokio::test]
async fn an_outdated_copy_is_not_used_when_the_only_newest_copy_is_lost() {
    // The returned target counts as usable at once, but its rebuild starts only at the next upkeep.
    let config = OsdConfig { upkeep_interval: Duration::from_secs(2), ..config() };
    let (rig, _) = one_copy_ahead(config).await;
    rig.lose_the_newest().await;
    for (name, bytes) in &rig.objects {
        match rig.pool.object(name).unwrap().get().await {
            Ok(read) => assert!(read == *bytes, "{name} has old content"),
            Err(e) => assert!(e.to_string().contains("bring back"), "{name}: {e}"),
        }
    }
    let e = rig.pool.object("other").unwrap().put("x").await.unwrap_err().to_string();
    assert!(e.contains("bring back") && e.contains(&rig.node.targets()[1].0.to_string()), "{e}");
    rig.bring_back(&[1]).await;
    rig.check("after both targets returned").await;
    rig.check_without_each(&[0, 1]).await;
}

/// The operator accepts the loss of the copy with the newest changes, and the node continues with the
/// other copy. If the lost copy returns, it is rebuilt completely.
#[tokio::test]
async fn a_copy_whose_loss_was_accepted_is_rebuilt_when_it_returns() {
    for (restarts, limit) in [(false, 1000), (true, 1000), (false, 5), (true, 5)] {
        let config = OsdConfig { missed_objects_per_pg: limit, ..config() };
        let (mut rig, old) = one_copy_ahead(config).await;
        if limit < 20 {
            until("the notes are dropped", async || rig.notes().await == 0).await;
        }
        let e = rig.client.set_target_out(1, true).await.unwrap_err().to_string();
        assert!(e.contains("up to date"), "{e}");
        rig.lose_the_newest().await;
        let e = rig.pool.object("o0").unwrap().get().await.unwrap_err().to_string();
        assert!(e.contains("bring"), "{e}");
        rig.client.forget_target(1, true).await.unwrap();
        rig.objects = old;
        rig.check("with only the outdated copy").await;
        for number in 15..30 {
            rig.put(number, 11_000, 200 + number as u64).await;
        }
        if restarts {
            rig.node.restart();
        }
        rig.bring_back(&[1]).await;
        rig.check("after the lost copy returned").await;
        rig.check_without_each(&[0, 1]).await;
    }
}

/// There are more dirty notes than fit into one transaction of a target's store.
#[tokio::test]
async fn a_rebuild_processes_many_dirty_notes_about_objects_with_long_names() {
    const MISSED: usize = 500;
    for (limit, is_lost) in [(2 * MISSED, false), (2 * MISSED, true), (MISSED / 2, false)] {
        let config = OsdConfig { missed_objects_per_pg: limit, ..config() };
        let store = |number| {
            let image = SimStore::format(vec![0; 64 << 20], Uuid::from_u128(number)).unwrap();
            FaultStore::over(Arc::new(SimStore::mount(&RecordedDrive::new(image), seed()).unwrap()), None)
        };
        let mut node = Node::over(vec![store(1), store(2)], config);
        node.restart();
        let client = node.client().await;
        client.create_pool_with("pool", 1, "mirror:2".parse().unwrap()).await.unwrap();
        let pool = client.pool("pool").unwrap();
        let mut rig = Rig { node, client, pool, objects: Vec::new() };
        rig.put(0, 1000, 1).await;
        rig.set_down(&[0], true);
        let names: Vec<String> = (0..MISSED).map(|n| format!("{n:0>1000}")).collect();
        for few in names.chunks(16) {
            let put = async |name: &String| rig.pool.object(name).unwrap().put("x").await;
            futures::future::try_join_all(few.iter().map(put)).await.unwrap();
        }
        if limit < MISSED {
            until("the notes are dropped", async || rig.notes().await == 0).await;
        } else {
            assert!(rig.notes().await >= MISSED);
        }
        if is_lost {
            rig.lose_the_newest().await;
            rig.client.forget_target(1, true).await.unwrap();
            rig.bring_back(&[1]).await;
        } else {
            rig.bring_back(&[0]).await;
            let name = names.last().unwrap().clone();
            rig.objects.push((name, Bytes::from_static(b"x")));
        }
        until("no notes are left", async || rig.notes().await == 0).await;
        rig.check_without_each(&[0, 1]).await;
    }
}

/// When the osd and the rebuilt target fail, only this target has stored the membership record that
/// lists it as in sync. The other targets continue without this record, and their later changes
/// must be kept.
#[tokio::test]
async fn a_membership_record_that_only_a_lost_rebuilt_target_has_is_ignored() {
    let mut rig = Rig::new("ec:2+1", 1).await;
    for number in 0..10 {
        rig.put(number, 50_000, number as u64).await;
    }
    rig.set_down(&[0], true);
    rig.put(0, 50_000, 100).await;
    [1, 2].iter().for_each(|&target| rig.node.stores[target].hold_records(true));
    rig.set_down(&[0], false);
    rig.client.set_target_out(0, false).await.unwrap();
    let waited = tokio::time::timeout(Duration::from_secs(60), rig.node.waited(2));
    waited.await.expect("the targets receive the membership record that lists the rebuilt target as in sync");
    until("the rebuilt target has the record", async || has_newest(&rig).await).await;
    rig.set_down(&[0], true);
    rig.node.restart();
    [1, 2].iter().for_each(|&target| rig.node.stores[target].hold_records(false));
    for number in 1..10 {
        rig.put(number, 55_000, 200 + number as u64).await;
    }
    rig.set_down(&[0], false);
    rig.client.set_target_out(0, false).await.unwrap();
    wait_until_whole(&rig.client).await;
    rig.check("after the rebuilt target returned").await;
    rig.check_without_each(&[0, 1, 2]).await;
}

/// Returns whether target 0 alone has the newest membership record.
async fn has_newest(rig: &Rig) -> bool {
    let [first, second, third] = [record(rig, 0).await, record(rig, 1).await, record(rig, 2).await];
    second == third && first != second && first[1] > second[1]
}

/// The osd may start again after `outboard target replace`, before the operator has started the node
/// with the new target.
#[tokio::test]
async fn a_node_starts_with_a_target_that_was_replaced() {
    for (pool, count, works) in
        [("mirror:3", 3, true), ("mirror:3", 3, false), ("mirror:2", 2, true), ("mirror:2", 2, false)]
    {
        let replaced = count - 1;
        let mut rig = Rig::new(pool, 4).await;
        rig.fill(&[5000, 70_001]).await;
        rig.set_down(&[replaced], !works);
        // The operator may repeat the command, because its answer was lost.
        for new in [97, 98].map(Uuid::from_u128) {
            rig.client.replace_target(replaced as u32, new).await.unwrap();
        }
        rig.node.restart();
        rig.client = rig.node.client().await;
        rig.pool = rig.client.pool("pool").unwrap();
        rig.check("the replaced target is still there").await;
        rig.put(5000, 6000, 1).await;
        rig.check("after a change").await;
        let new = Uuid::from_u128(99);
        rig.client.replace_target(replaced as u32, new).await.unwrap();
        let refused = rig.client.set_target_out(replaced as u32, true).await.unwrap_err();
        assert!(refused.to_string().contains("restarted"), "{refused}");
        let uuids: Vec<Uuid> =
            rig.client.status().await.unwrap().targets.iter().map(|target| target.uuid).collect();
        let kept = (1..count as u128).map(Uuid::from_u128);
        assert_eq!(uuids, kept.chain([new]).collect::<Vec<_>>());
    }
}

/// A replaced target may be absent from the next start, so the map must be on most of the other
/// targets.
#[tokio::test]
async fn a_replaced_target_does_not_count_as_a_copy_of_the_map() {
    let rig = Rig::new("mirror:3", 1).await;
    rig.client.replace_target(2, Uuid::from_u128(99)).await.unwrap();
    rig.node.stores[0].set_full_for_map(true);
    let refused = rig.client.create_pool("more").await.unwrap_err();
    assert!(refused.to_string().contains("space"), "{refused}");
    rig.node.stores[0].set_full_for_map(false);
    rig.client.create_pool("more").await.unwrap();
}
