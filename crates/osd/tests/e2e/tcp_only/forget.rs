//! Tests of losses that exceed the redundancy: the operator accepts them, and the node serves what is
//! left.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::future::join_all;
use osd::{OsdConfig, OsdServer, ShardResources, StartError};
use store::simulation::{RecordedDrive, SimStore};
use store::{MetadataQuery, RemountedStore, StoreCalls, StoreError, StoreRequest};
use uuid::Uuid;

use crate::common::{FaultStore, Node, data, seed};
use crate::redundancy::{Rig, config, redundancy, wait_until_whole};
use crate::tcp_only::recovery::until;
use crate::tcp_only::witness;

/// Starts the node, which must refuse to start.
fn refusal_to_start(rig: &Rig) -> StartError {
    let stack = crate::common::stack(messenger::UseAs::Server);
    let (targets, staging) = (rig.node.targets(), rig.node.staging.clone());
    OsdServer::start(
        vec![ShardResources { config: rig.node.config.clone(), targets, staging }],
        stack,
        "127.0.0.1:0",
    )
    .unwrap_err()
}

/// Stops the node, and starts it again with the targets `there`, after the operator has accepted the
/// loss of the targets `forgotten`.
async fn restart_without(rig: &mut Rig, forgotten: &[usize], there: &[usize]) {
    let uuids = forgotten.iter().map(|&target| rig.node.targets()[target].0);
    rig.node.config.forgotten = uuids.collect();
    witness::restart_with(rig, there).await;
    rig.node.config.forgotten.clear();
}

#[tokio::test]
async fn a_stopped_node_continues_with_an_outdated_copy_once_the_loss_of_the_newest_is_accepted() {
    let (mut rig, _witness) = witness::rig("mirror:2").await;
    let old = rig.objects.clone();
    // Target 0 continues alone. It also has a newer map.
    witness::restart_with(&mut rig, &[0]).await;
    witness::change(&mut rig, 1).await;
    rig.client.create_pool_with("new", 1, redundancy("single")).await.unwrap();
    rig.node.osd.take().unwrap().stop();
    rig.set_down(&[0], true);
    rig.set_down(&[1], false);
    let refused = refusal_to_start(&rig);
    assert!(matches!(&refused, StartError::OutdatedMap { .. }), "{refused}");
    assert!(refused.to_string().contains("outboard target forget"), "{refused}");
    restart_without(&mut rig, &[0], &[1]).await;
    rig.objects = old;
    rig.check("with the outdated copy").await;
    let is_over = async || !rig.client.status().await.unwrap().targets[0].forgotten;
    until("the acceptance has ended, although target 0 is still missing", is_over).await;
    witness::change(&mut rig, 2).await;
    // The next start needs no word of the operator.
    witness::restart_with(&mut rig, &[1]).await;
    rig.check("after the next start").await;
    // The lost copy has newer changes, but the node has gone on without them.
    rig.bring_back(&[0]).await;
    rig.check("after the lost copy returned").await;
    witness::restart_with(&mut rig, &[0]).await;
    rig.check("with the copy that was lost").await;
}

#[tokio::test]
async fn a_node_without_a_witness_starts_once_the_loss_of_a_missing_copy_is_accepted() {
    let (mut rig, witness) = witness::rig("mirror:2").await;
    rig.node.osd.take().unwrap().stop();
    witness.forget();
    rig.set_down(&[0], true);
    let refused = refusal_to_start(&rig).to_string();
    assert!(refused.contains("outboard target forget"), "{refused}");
    restart_without(&mut rig, &[0], &[1]).await;
    rig.check("without target 0").await;
    let is_over = async || !rig.client.status().await.unwrap().targets[0].forgotten;
    until("the acceptance has ended, although target 0 is still missing", is_over).await;
    witness::change(&mut rig, 1).await;
    rig.bring_back(&[0]).await;
    rig.check("after target 0 returned").await;
}

/// The only copy with the newest changes is lost while another copy receives these changes.
#[tokio::test]
async fn a_mirror_continues_with_a_copy_that_was_being_rebuilt_once_the_loss_is_accepted() {
    let slow = OsdConfig { rebuild_rate: 100 << 10, ..config() };
    let mut rig = Rig::of("mirror:2", 1, 2, slow).await;
    rig.fill(&(0..20).map(|n| 20_000 + n).collect::<Vec<_>>()).await;
    let old = rig.objects.clone();
    rig.set_down(&[1], true);
    for (name, bytes) in &mut rig.objects {
        *bytes = data(20_000, bytes.len() as u64 + 7);
        rig.pool.object(&*name).unwrap().put(bytes.clone()).await.unwrap();
    }
    rig.set_down(&[1], false);
    rig.client.set_target_out(1, false).await.unwrap();
    let copied = async || rig.client.status().await.unwrap().rebuild.objects;
    until("some objects are copied", async || copied().await > 3).await;
    rig.set_down(&[0], true);
    let is_refused = async || {
        let read = rig.pool.object("o20019").unwrap().get().await;
        read.is_err_and(|e| e.to_string().contains("outboard target forget"))
    };
    until("the group waits for the newest copy", is_refused).await;
    rig.client.forget_target(0, true).await.unwrap();
    let (mut newer, mut older) = (0, 0);
    for ((name, new), (_, old)) in rig.objects.iter().zip(&old) {
        let read = rig.pool.object(name).unwrap().get().await.unwrap();
        assert!(read == *new || read == *old, "{name} has mixed content");
        if read == *new { newer += 1 } else { older += 1 }
    }
    assert!(newer > 0 && older > 0, "{newer} objects are new, {older} are old");
    rig.pool.object("o20000").unwrap().put("later").await.unwrap();
    // The lost copy is rebuilt if it returns.
    rig.client.set_rebuild_rate(0).await.unwrap();
    rig.bring_back(&[0]).await;
    assert_eq!(rig.pool.object("o20000").unwrap().get().await.unwrap(), "later");
}

/// Two of four targets are lost. The groups that have no other copies begin without objects, and all
/// other objects are served.
#[tokio::test]
async fn groups_without_any_copy_begin_without_objects_once_the_loss_is_accepted() {
    let mut rig = Rig::of("mirror:2", 16, 4, config()).await;
    rig.fill(&(0..60).map(|n| 1000 + n).collect::<Vec<_>>()).await;
    rig.set_down(&[0, 1], true);
    let put = async |name: &str| rig.pool.object(name).unwrap().put("new").await;
    let mut refused = Vec::new();
    for n in 0..60 {
        if let Err(e) = put(&format!("new{n}")).await {
            assert!(e.to_string().contains("outboard target forget"), "{e}");
            refused.push(n);
        }
    }
    assert!(!refused.is_empty() && refused.len() < 40, "{} of 60 objects are refused", refused.len());
    let loss = rig.client.forget_target(0, true).await.unwrap();
    assert!(loss[0].emptied > 0 && loss[0].emptied == loss[0].waiting, "{loss:?}");
    assert!(put(&format!("new{}", refused[0])).await.is_err(), "target 1 may have a copy");
    rig.client.forget_target(1, true).await.unwrap();
    for n in &refused {
        put(&format!("new{n}")).await.unwrap();
    }
    let (mut kept, mut lost) = (Vec::new(), 0);
    for (name, bytes) in &rig.objects {
        match rig.pool.object(name).unwrap().get().await {
            Ok(read) => {
                assert!(read == *bytes, "{name}");
                kept.push((name.clone(), bytes.clone()));
            }
            Err(e) => {
                assert!(e.is_not_found(), "{name}: {e}");
                lost += 1;
            }
        }
    }
    assert!(kept.len() > 20 && lost > 2, "{} objects are kept, {lost} are lost", kept.len());
    let listed = rig.pool.list("o").collect().await.unwrap();
    assert_eq!(listed.len(), kept.len());
    let is_over = async || {
        let status = rig.client.status().await.unwrap();
        status.targets.iter().all(|target| !target.forgotten) && status.health[0].unavailable == 0
    };
    until("the acceptance has ended, although the targets are still missing", is_over).await;
    // The lost objects do not come back with the targets.
    rig.objects = kept;
    rig.bring_back(&[0, 1]).await;
    rig.check("after the lost targets returned").await;
    assert_eq!(rig.pool.list("o").collect().await.unwrap().len(), rig.objects.len());
    let scrub = crate::redundancy::scrub(&rig.client, false).await;
    assert_eq!((scrub.inconsistent, scrub.damaged, scrub.failure), (0, 0, None));
}

/// The drive of one of the two remaining targets cannot read an index page.
#[tokio::test]
async fn a_group_begins_without_a_target_that_cannot_list_its_objects() {
    let rig = Rig::of("mirror:2", 1, 4, config()).await;
    rig.pool.object("o0").unwrap().put("old").await.unwrap();
    let mut members = Vec::new();
    for (n, store) in rig.node.stores.iter().enumerate() {
        let collections = store.inner().collections().await.unwrap();
        if collections.iter().any(|cid| cid.as_bytes().starts_with(b"P")) {
            members.push(n);
        }
    }
    let [first, second] = members[..] else { panic!("{members:?}") };
    let unreadable = (0..4).find(|n| !members.contains(n)).unwrap();
    let store = &rig.node.stores[unreadable];
    store.refuse(Some(Box::new(|request| {
        let StoreRequest::Query { query: MetadataQuery::List { .. }, .. } = request else { return None };
        Some(StoreError::Io("injected: an index page cannot be read".into()))
    })));
    rig.set_down(&members, true);
    rig.pool.object("o0").unwrap().put("new").await.unwrap_err();
    let before = store.fired.load(Ordering::SeqCst);
    rig.client.forget_target(first as u32, true).await.unwrap();
    rig.client.forget_target(second as u32, true).await.unwrap();
    rig.pool.object("o0").unwrap().put("new").await.unwrap();
    assert!(store.fired.load(Ordering::SeqCst) > before, "no listing was refused");
    assert_eq!(rig.pool.object("o0").unwrap().get().await.unwrap(), "new");
}

/// The node has not yet recorded the loss of half of its targets when the operator accepts it.
#[tokio::test]
async fn a_loss_can_be_accepted_before_the_map_records_the_failed_targets() {
    // Without upkeep, only commands change the map.
    let config = OsdConfig { upkeep_interval: Duration::from_secs(3600), ..config() };
    let rig = Rig::of("mirror:2", 16, 4, config).await;
    rig.set_down(&[0, 1], true);
    let object = |n: u32| rig.pool.object(&format!("o{n}")).unwrap();
    assert!(join_all((0..60).map(async |n| object(n).put("new").await)).await.iter().any(Result::is_err));
    let targets = rig.client.status().await.unwrap().targets;
    assert!(targets[..2].iter().all(|target| target.failure.is_some()), "{targets:?}");
    let loss = rig.client.forget_target(0, true).await.unwrap();
    assert!(loss[0].emptied > 0, "{loss:?}");
}

/// A target of an erasure code is missing for a while, and then another one is lost. Objects that have
/// changed meanwhile are lost, and all others are served.
#[tokio::test]
async fn an_erasure_code_continues_with_a_stale_target_once_the_loss_of_another_is_accepted() {
    for (scheme, stale, lost) in [("ec:2+1", &[2][..], &[0][..]), ("ec:4+2", &[4, 5], &[0, 1])] {
        let mut rig = Rig::new(scheme, 2).await;
        rig.fill(&(0..12).map(|n| 1000 + 9000 * n).collect::<Vec<_>>()).await;
        rig.pool.object("empty").unwrap().put("").await.unwrap();
        rig.set_down(stale, true);
        let is_noticed = async || rig.client.status().await.unwrap().health[0].degraded == 2;
        rig.pool.object("empty").unwrap().put("").await.unwrap();
        let names: Vec<String> = rig.objects.iter().map(|(name, _)| name.clone()).collect();
        for (n, (name, bytes)) in rig.objects.iter_mut().enumerate().take(6) {
            *bytes = data(5000 + 8000 * n, 77);
            rig.pool.object(&*name).unwrap().put(bytes.clone()).await.unwrap();
        }
        rig.pool.object("new").unwrap().put(data(4000, 1)).await.unwrap();
        rig.pool.object(&names[6]).unwrap().remove().await.unwrap();
        let empty = rig.pool.object("empty").unwrap();
        empty.set_xattr("user", "later").await.unwrap();
        until("both groups go on without the target", is_noticed).await;
        rig.set_down(lost, true);
        rig.set_down(stale, false);
        let read = async |name: &str| rig.pool.object(name).unwrap().get().await;
        for &target in stale {
            rig.client.set_target_out(target as u32, false).await.unwrap();
        }
        let refused = read(&names[8]).await.unwrap_err().to_string();
        assert!(refused.contains("outboard target forget"), "{refused}");
        for &target in lost {
            rig.client.forget_target(target as u32, true).await.unwrap();
        }
        for (n, (name, bytes)) in rig.objects.iter().enumerate() {
            match read(name).await {
                Ok(read) => {
                    assert!(n >= 7 && read == *bytes, "{scheme}: {name} was not lost, or is not the same")
                }
                Err(e) => assert!(n < 7 && e.is_not_found(), "{scheme}: {name}: {e}"),
            }
        }
        assert!(read("new").await.unwrap_err().is_not_found());
        assert_eq!(empty.xattr("user").await.unwrap().unwrap(), "later");
        let listed = rig.pool.list("").collect().await.unwrap().len();
        assert_eq!(listed, 6, "five objects with data and the empty one");
        // The group is as good as new once the lost targets are back.
        rig.objects.drain(..7);
        rig.pool.object(&names[0]).unwrap().put(data(30_000, 5)).await.unwrap();
        rig.objects.push((names[0].clone(), data(30_000, 5)));
        rig.bring_back(lost).await;
        rig.check("after the lost targets returned").await;
        rig.set_down(stale, true);
        rig.check("without the targets that were stale").await;
    }
}

/// Too few targets are left to begin without objects. The acceptance of the loss lasts until the operator
/// replaces the targets.
#[tokio::test]
async fn the_targets_of_a_lost_pool_can_be_replaced_long_after_their_loss_is_accepted() {
    let (rig, _witness) = witness::rig("ec:2+1").await;
    rig.set_down(&[1, 2], true);
    let put = async |name: &str| match rig.pool.object(name).unwrap().put("x").await {
        Ok(_) => String::new(),
        Err(e) => e.to_string(),
    };
    until("the groups wait", async || put("new").await.contains("outboard target forget")).await;
    for target in [1, 2] {
        rig.client.forget_target(target, true).await.unwrap();
    }
    tokio::time::sleep(rig.node.config.upkeep_interval * 10).await;
    let refused = put("new").await;
    assert!(refused.contains("bring missing targets back, or replace them"), "{refused}");
    let status = rig.client.status().await.unwrap();
    assert_eq!(status.targets.iter().map(|t| t.forgotten).collect::<Vec<_>>(), [false, true, true]);
    for target in [1, 2] {
        rig.client.replace_target(target, Uuid::from_u128(90 + u128::from(target))).await.unwrap();
    }
}

/// The only target with the newest changes is replaced by an older copy of itself.
#[tokio::test]
async fn an_older_copy_is_used_once_the_loss_of_its_changes_is_accepted() {
    let format = |n: u128| SimStore::format(vec![0; 24 << 20], Uuid::from_u128(n)).unwrap();
    let mount = |image: Vec<u8>| {
        let store = SimStore::mount(&RecordedDrive::new(image), seed()).unwrap();
        FaultStore::over(Arc::new(store), None)
    };
    let drives = [1, 2].map(|n| RecordedDrive::new(format(n)));
    let stores = drives
        .each_ref()
        .map(|drive| FaultStore::over(Arc::new(SimStore::mount(drive, seed()).unwrap()), None));
    let memory = witness::Memory::default();
    let config = witness::config_with(&Arc::new(memory), config());
    let mut node = Node::over(stores.to_vec(), config);
    node.restart();
    let client = node.client().await;
    client.create_pool_with("pool", 2, redundancy("mirror:2")).await.unwrap();
    let pool = client.pool("pool").unwrap();
    let mut rig = Rig { node, client, pool, objects: Vec::new() };
    rig.fill(&[1, 5000, 70_001]).await;
    let old = rig.objects.clone();
    rig.node.osd.take().unwrap().stop();
    let older = drives[0].image();
    rig.node.restart();
    rig.client = rig.node.client().await;
    rig.pool = rig.client.pool("pool").unwrap();
    rig.set_down(&[1], true);
    witness::change(&mut rig, 1).await;
    // The map changes, too.
    rig.client.create_pool_with("later", 1, redundancy("single")).await.unwrap();
    rig.node.osd.take().unwrap().stop();
    let outdated = drives[1].image();
    rig.node.stores = vec![mount(older), mount(outdated)];
    let refused = refusal_to_start(&rig);
    assert!(matches!(&refused, StartError::OldCopies { .. }), "{refused}");
    restart_without(&mut rig, &[0], &[0, 1]).await;
    rig.objects = old;
    rig.check("with older copies").await;
    wait_until_whole(&rig.client).await;
    // The operator has not accepted a later loss.
    let is_over = async || !rig.client.status().await.unwrap().targets[0].forgotten;
    until("the acceptance of the loss has ended", is_over).await;
}

#[tokio::test]
async fn a_target_that_no_group_waits_for_cannot_be_forgotten() {
    let mut rig = Rig::new("mirror:2", 4).await;
    rig.fill(&[5000]).await;
    let refused = rig.client.forget_target(0, true).await.unwrap_err().to_string();
    assert!(refused.contains("no loss to accept"), "{refused}");
    assert!(rig.client.forget_target(2, true).await.unwrap_err().to_string().contains("targets 0 to 1"));
    assert!(!rig.client.status().await.unwrap().targets[0].forgotten);
}

#[tokio::test]
async fn a_pool_without_redundancy_serves_what_is_left_and_its_lost_target_can_be_replaced() {
    let mut rig = Rig::of("single", 16, 3, config()).await;
    let other = redundancy("mirror:2");
    rig.client.create_pool_with("mirrored", 4, other).await.unwrap();
    let sizes: Vec<usize> = (0..40).map(|n| 1000 + 997 * n).collect();
    rig.fill(&sizes).await;
    let mirrored = rig.client.pool("mirrored").unwrap().object("o").unwrap();
    mirrored.put(data(9000, 3)).await.unwrap();
    let refused = rig.client.replace_target(1, Uuid::from_u128(9)).await.unwrap_err().to_string();
    assert!(refused.contains("works and has objects of pool pool"), "{refused}");
    // Pools without redundancy also use a target that is out.
    rig.client.set_target_out(1, true).await.unwrap();
    let refused = rig.client.replace_target(1, Uuid::from_u128(9)).await.unwrap_err().to_string();
    assert!(refused.contains("works and has objects of pool pool"), "{refused}");
    let refused = rig.client.forget_target(1, true).await.unwrap_err().to_string();
    assert!(refused.contains("no loss to accept"), "{refused}");
    rig.client.set_target_out(1, false).await.unwrap();
    wait_until_whole(&rig.client).await;

    rig.set_down(&[1], true);
    let (mut left, mut lost) = (Vec::new(), Vec::new());
    for (name, bytes) in rig.objects.clone() {
        match rig.pool.object(&name).unwrap().get().await {
            Ok(read) => left.push((name, read == bytes)),
            Err(e) => {
                assert!(e.to_string().contains("the drive is removed"), "{e}");
                lost.push(name);
            }
        }
    }
    assert!(left.len() > 5 && lost.len() > 5 && left.iter().all(|(_, same)| *same), "{left:?}, {lost:?}");
    // The rest can be listed, and the loss is reported.
    let names = async |skip: bool| {
        let listing = rig.pool.list("");
        let mut listing = if skip { listing.skip_unavailable() } else { listing };
        let mut names = Vec::new();
        while let Some(name) = listing.next().await? {
            names.push(name.object().to_owned());
        }
        names.sort();
        client::Result::<(Vec<String>, u32)>::Ok((
            names,
            listing.skipped().map_or(0, |skipped| skipped.groups),
        ))
    };
    names(false).await.unwrap_err();
    let (listed, skipped) = names(true).await.unwrap();
    let mut expected: Vec<String> = left.iter().map(|(name, _)| name.clone()).collect();
    expected.sort();
    assert_eq!(listed, expected);
    let unavailable = async || {
        let status = rig.client.status().await.unwrap();
        status.health.iter().find(|health| health.pool == "pool").unwrap().unavailable
    };
    assert!(skipped > 0, "the pool has groups on the lost target");
    until("the status shows the lost target", async || unavailable().await == skipped).await;

    // The operator must accept the loss before the target can be replaced.
    let new = Uuid::from_u128(9);
    let refused = rig.client.replace_target(1, new).await.unwrap_err().to_string();
    assert!(refused.contains("pool") && refused.contains("outboard target forget 1"), "{refused}");
    let loss = rig.client.forget_target(1, false).await.unwrap();
    assert_eq!((loss.len(), &*loss[0].pool, loss[0].groups, loss[0].waiting), (1, "pool", 16, skipped));
    rig.client.replace_target(1, new).await.unwrap_err();
    assert_eq!(rig.client.forget_target(1, true).await.unwrap(), loss);
    // The command may be repeated.
    assert_eq!(rig.client.forget_target(1, true).await.unwrap(), loss);
    rig.client.replace_target(1, new).await.unwrap();
    // Changes on the old target would be lost.
    rig.set_down(&[1], false);
    let refused = rig.pool.object(&lost[0]).unwrap().put("x").await.unwrap_err().to_string();
    assert!(refused.contains("was replaced"), "{refused}");
    if let Some(osd) = rig.node.osd.take() {
        osd.stop();
    }
    rig.node.stores[1] = FaultStore::new();
    rig.node.uuids[1] = new;
    rig.node.restart();
    rig.client = rig.node.client().await;
    rig.pool = rig.client.pool("pool").unwrap();

    rig.objects.retain(|(name, _)| !lost.contains(name));
    rig.check("after the replacement").await;
    let mut listed: Vec<String> =
        rig.pool.list("").collect().await.unwrap().iter().map(|name| name.object().to_owned()).collect();
    listed.sort();
    assert_eq!(listed, expected, "no placement group has moved");
    for name in &lost {
        assert!(rig.pool.object(name).unwrap().get().await.unwrap_err().is_not_found());
        rig.pool.object(name).unwrap().put(data(3000, 5)).await.unwrap();
        rig.objects.push((name.clone(), data(3000, 5)));
    }
    wait_until_whole(&rig.client).await;
    rig.check("after new puts").await;
    let mirrored = rig.client.pool("mirrored").unwrap().object("o").unwrap();
    assert!(mirrored.get().await.unwrap() == data(9000, 3));
}

/// An older copy replaces the content of a target, while the osd is stopped or while it runs. A pool
/// without redundancy has no other copy of the lost changes.
#[tokio::test]
async fn a_pool_without_redundancy_does_not_use_an_older_copy_until_its_loss_is_accepted() {
    for (is_running, stopped_word) in [(false, false), (false, true), (true, false)] {
        let drives = [1, 2]
            .map(|n| RecordedDrive::new(SimStore::format(vec![0; 24 << 20], Uuid::from_u128(n)).unwrap()));
        let mount = |drive: &Arc<RecordedDrive>| Arc::new(SimStore::mount(drive, seed()).unwrap());
        let stores = drives.each_ref().map(|drive| Arc::new(RemountedStore::new(mount(drive))));
        let over = |store: &Arc<RemountedStore>| FaultStore::over(Arc::clone(store) as _, None);
        let memory = Arc::new(witness::Memory::default());
        let config = OsdConfig { age_interval: Duration::from_millis(5), ..config() };
        let mut node = Node::over(stores.iter().map(over).collect(), witness::config_with(&memory, config));
        node.restart();
        let client = node.client().await;
        client.create_pool_with("pool", 16, redundancy("single")).await.unwrap();
        let pool = client.pool("pool").unwrap();
        let mut rig = Rig { node, client, pool, objects: Vec::new() };
        rig.fill(&(0..20).map(|n| 3000 + 100 * n).collect::<Vec<_>>()).await;
        let before = rig.objects.clone();
        if !is_running {
            rig.node.osd.take().unwrap().stop();
        }
        let older = drives[0].image();
        if !is_running {
            rig.node.restart();
        }
        rig.client = rig.node.client().await;
        rig.pool = rig.client.pool("pool").unwrap();
        for (name, bytes) in &mut rig.objects {
            *bytes = data(5000, bytes.len() as u64);
            rig.pool.object(&*name).unwrap().put(bytes.clone()).await.unwrap();
        }
        // The witness learns that the target has stored a later age.
        let known = memory.writes();
        let is_known = async || {
            rig.pool.object("more").unwrap().put("x").await.unwrap();
            memory.writes() >= known + 2
        };
        until("the age is stored again", is_known).await;
        if !is_running {
            rig.node.osd.take().unwrap().stop();
        }
        stores[0].replace(mount(&RecordedDrive::new(older)));
        rig.node.stores[0].end_session();
        if !is_running {
            if stopped_word {
                rig.node.config.forgotten = vec![Uuid::from_u128(1)];
            }
            rig.node.restart();
            rig.client = rig.node.client().await;
            rig.pool = rig.client.pool("pool").unwrap();
        }
        if !stopped_word {
            let (mut whole, mut refused) = (0, 0);
            for (name, bytes) in &rig.objects {
                match rig.pool.object(name).unwrap().get().await {
                    Ok(read) => {
                        assert!(read == *bytes, "{name} has old content");
                        whole += 1;
                    }
                    Err(e) => {
                        assert!(
                            e.to_string().contains("gone back") && e.to_string().contains("forget"),
                            "{e}"
                        );
                        let put = rig.pool.object(name).unwrap().put("x").await;
                        assert!(put.unwrap_err().to_string().contains("gone back"));
                        refused += 1;
                    }
                }
            }
            assert!(whole > 3 && refused > 3, "{whole} and {refused} objects");
            let status = rig.client.status().await.unwrap();
            let went_back: Vec<bool> = status.targets.iter().map(|target| target.went_back).collect();
            assert_eq!(went_back, [true, false]);
            assert!(status.health[0].unavailable > 0);
            let loss = rig.client.forget_target(0, true).await.unwrap();
            assert_eq!(loss[0].waiting, status.health[0].unavailable);
        }
        for restarts in [false, true] {
            if restarts {
                rig.node.restart();
                rig.client = rig.node.client().await;
                rig.pool = rig.client.pool("pool").unwrap();
            }
            for ((name, new), (_, old)) in rig.objects.iter().zip(&before) {
                let read = rig.pool.object(name).unwrap().get().await.unwrap();
                assert!(read == *new || read == *old, "{name} after the loss was accepted");
            }
            let status = rig.client.status().await.unwrap();
            assert!(status.targets.iter().all(|target| !target.went_back), "{status:?}");
        }
    }
}
