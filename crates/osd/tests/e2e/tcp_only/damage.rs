//! Tests that damaged fragments count as lost, and are repaired.

use std::time::Duration;

use base::block::Payload;
use bytes::Bytes;
use store::{CollectionId, ObjectId, ObjectStore, Op, StoreCalls, Transaction, WriteSource};

use crate::common::data;
use crate::redundancy::{Rig, UNIT, scrub, wait_until_whole};

const SIZES: [usize; 6] = [1, 4096, 5000, 70_001, 300_000, 5_000_001];

/// Kind of damage to a fragment.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Damage {
    /// A bit of the fragment is flipped.
    Flipped,
    /// The end of the fragment is missing, and the target does not know that.
    CutOff,
    /// The target has no record of the fragment.
    Forgotten,
}

/// Returns the users' objects with data on a target, with their sizes.
pub(super) async fn fragments(store: &dyn ObjectStore) -> Vec<(CollectionId, ObjectId, u64)> {
    let mut found = Vec::new();
    let mut collections = store.collections().await.unwrap();
    collections.retain(|cid| cid.as_bytes().starts_with(b"P"));
    for cid in collections {
        let (ids, more) = store.list(&cid, None, 1000).await.unwrap();
        assert!(!more);
        for oid in ids.into_iter().filter(|oid| !oid.as_bytes().starts_with(&[0; 5])) {
            let size = store.stat(&cid, &oid).await.unwrap().size;
            if size > 0 {
                found.push((cid.clone(), oid, size));
            }
        }
    }
    found
}

/// Damages every fragment on a target. Returns the number of fragments.
async fn damage_all(store: &dyn ObjectStore, damage: Damage) -> u64 {
    let fragments = fragments(store).await;
    for (collection, oid, size) in fragments.iter().cloned() {
        let op = match damage {
            Damage::Forgotten => Op::Remove { oid },
            Damage::CutOff => Op::Truncate { oid, size: size - 1 },
            Damage::Flipped => {
                let read = store.read(&collection, &oid, 0, 1, None).await.unwrap();
                let mut bytes = read.contiguous().to_vec();
                bytes[0] ^= 1;
                let payload = Payload::from_parts(0, bytes.into(), read.checksums).unwrap();
                Op::Write { oid, offset: 0, source: WriteSource::Inline(payload) }
            }
        };
        store.queue_transaction(Transaction::new(collection).with(op)).await.unwrap();
    }
    fragments.len() as u64
}

/// Flips a bit of every fragment on a target. Returns the number of fragments.
pub(super) async fn flip_all(store: &dyn ObjectStore) -> u64 {
    damage_all(store, Damage::Flipped).await
}

/// Returns the contents of all fragments on a target; `None` if a fragment cannot be verified.
async fn content(store: &dyn ObjectStore) -> Option<Vec<(ObjectId, Bytes)>> {
    let mut all = Vec::new();
    for (cid, oid, size) in fragments(store).await {
        let read = store.read(&cid, &oid, 0, size, None).await.unwrap();
        read.verify().ok()?;
        all.push((oid, read.contiguous()));
    }
    Some(all)
}

/// Returns whether a target of an `ec:4+2` pool stores data of an object instead of parity.
async fn has_data_of(store: &dyn ObjectStore, object: &Bytes) -> bool {
    let content = content(store).await.unwrap();
    let starts_like = |unit: &[u8]| content.iter().any(|(_, fragment)| fragment.starts_with(unit));
    object.chunks(UNIT as usize).take(4).any(starts_like)
}

/// Reads return the written data although one target has damaged fragments, and repair the damaged
/// fragments that they read.
#[tokio::test]
async fn damaged_fragments_count_as_lost_and_are_repaired_by_reads() {
    let mut rig = Rig::new("ec:4+2", 1).await;
    rig.fill(&SIZES).await;
    let object = rig.objects.last().unwrap().1.clone();
    let mut mended = 0;
    for damage in [Damage::Flipped, Damage::CutOff] {
        for target in 0..6 {
            let store = rig.node.stores[target].inner();
            let before = content(store).await.unwrap();
            let has_data = has_data_of(store, &object).await;
            assert!(damage_all(store, damage).await > 0);
            assert!(content(store).await.as_ref() != Some(&before), "the fault fired");
            rig.check(&format!("{damage:?} on {target}")).await;
            // Reads do not read parity, so only a scrub repairs damaged parity.
            if !has_data {
                scrub(&rig.client, false).await;
            }
            let whole = async {
                while content(store).await.as_ref() != Some(&before) {
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
            };
            let in_time = tokio::time::timeout(Duration::from_secs(30), whole).await;
            assert!(in_time.is_ok(), "{damage:?} on {target}");
            mended += u32::from(has_data);
        }
    }
    assert_eq!(mended, 8, "four of six targets have data");
}

/// Objects that one target has lost still exist on the other targets. A scrub restores the lost
/// fragments.
#[tokio::test]
async fn objects_that_one_target_has_lost_still_exist_and_are_restored() {
    for redundancy in ["ec:4+2", "mirror:2"] {
        let mut rig = Rig::new(redundancy, 1).await;
        rig.fill(&SIZES).await;
        for target in 0..rig.node.stores.len() {
            let lost = damage_all(rig.node.stores[target].inner(), Damage::Forgotten).await;
            assert!(lost > 0, "the fault fired");
            // The restarted osd has cached nothing.
            rig.node.restart();
            let what = format!("{redundancy}, lost on {target}");
            for (name, bytes) in &rig.objects {
                let stat = rig.pool.object(name).unwrap().stat().await.unwrap();
                assert_eq!(stat.size, bytes.len() as u64, "{name}, {what}");
            }
            rig.check(&what).await;
            let found = scrub(&rig.client, false).await;
            assert_eq!((found.damaged, found.inconsistent), (found.repaired, 0), "{what}");
            for (name, bytes) in &mut rig.objects {
                rig.pool.object(name).unwrap().append(Bytes::from_static(b"more")).await.unwrap();
                *bytes = [&bytes[..], b"more"].concat().into();
            }
            assert_eq!(scrub(&rig.client, false).await.damaged, 0, "{what}");
            rig.check(&what).await;
        }
    }
}

/// A scrub finds fragments with each kind of damage, and repairs them. A second scrub finds none.
#[tokio::test]
async fn a_scrub_finds_and_repairs_every_damaged_fragment() {
    for (redundancy, targets) in [("ec:4+2", &[0, 3][..]), ("ec:4+2", &[4, 5]), ("mirror:3", &[0, 1])] {
        for damage in [Damage::Flipped, Damage::CutOff, Damage::Forgotten] {
            let mut rig = Rig::new(redundancy, 2).await;
            rig.fill(&SIZES).await;
            let (mut before, mut damaged) = (Vec::new(), 0);
            for &target in targets {
                let store = rig.node.stores[target].inner();
                before.push(content(store).await.unwrap());
                damaged += damage_all(store, damage).await;
            }
            let found = scrub(&rig.client, false).await;
            let what = format!("{redundancy}, {damage:?} on {targets:?}");
            assert_eq!((found.damaged, found.repaired, found.inconsistent), (damaged, damaged, 0), "{what}");
            assert_eq!((found.objects, found.failure), (SIZES.len() as u64, None), "{what}");
            for (before, &target) in before.iter().zip(targets) {
                let now = content(rig.node.stores[target].inner()).await;
                assert!(
                    now.as_ref() == Some(before),
                    "{what}: target {target} has other content than before"
                );
            }
            let again = scrub(&rig.client, false).await;
            assert_eq!((again.damaged, again.repaired, again.inconsistent), (0, 0, 0), "{what}");
            rig.check(&what).await;
        }
    }
}

/// Returns the omap entries of the first object of a user's collection, in which the array keeps its
/// records.
async fn records(store: &dyn ObjectStore) -> (CollectionId, ObjectId, Vec<(Bytes, Bytes)>) {
    let (cid, ..) = fragments(store).await.remove(0);
    let own = store.list(&cid, None, 1).await.unwrap().0.remove(0);
    let (entries, more) = store.omap_iterate(&cid, &own, Bytes::new(), 1000).await.unwrap();
    assert!(!more && !entries.is_empty());
    (cid, own, entries)
}

/// The content of one target is replaced by an older copy while the node is running. The checksums
/// of the copy are correct, but its records show that it lacks changes.
#[tokio::test]
async fn a_scrub_rebuilds_a_target_with_older_content() {
    for redundancy in ["ec:2+1", "mirror:2"] {
        let mut rig = Rig::new(redundancy, 1).await;
        rig.fill(&[70_001]).await;
        let store = rig.node.stores[0].inner();
        let (cid, own, old) = records(store).await;
        let fragment = content(store).await.unwrap().remove(0);
        let new = data(70_001, 3);
        rig.pool.object("o70001").unwrap().put(new.clone()).await.unwrap();
        rig.objects[0].1 = new;
        let (oid, source) = (fragment.0, WriteSource::Inline(Payload::compute(0, fragment.1.clone())));
        let replace = Transaction::new(cid)
            .with(Op::OmapClear { oid: own.clone() })
            .with(Op::OmapSet { oid: own, entries: old })
            .with(Op::Write { oid, offset: 0, source });
        store.queue_transaction(replace).await.unwrap();
        assert!(content(store).await.unwrap()[0].1 == fragment.1, "the fault fired");
        let found = scrub(&rig.client, false).await;
        assert_eq!((found.inconsistent, found.failure), (0, None), "{redundancy}");
        wait_until_whole(&rig.client).await;
        assert!(content(store).await.unwrap()[0].1 != fragment.1, "{redundancy}: the target is rebuilt");
        rig.check(redundancy).await;
        assert_eq!(scrub(&rig.client, false).await.inconsistent, 0, "{redundancy}");
    }
}

/// Reads fail if there is more damage than the redundancy scheme tolerates. They never return wrong
/// data.
#[tokio::test]
async fn reads_fail_if_too_many_fragments_are_damaged() {
    for damage in [Damage::Flipped, Damage::CutOff] {
        let mut rig = Rig::new("ec:4+2", 1).await;
        rig.fill(&[70_001, 300_000]).await;
        for target in 0..3 {
            assert!(damage_all(rig.node.stores[target].inner(), damage).await > 0);
        }
        for (name, bytes) in &rig.objects {
            match rig.pool.object(name).unwrap().get().await {
                Ok(read) => panic!("{damage:?}: {name} has {} bytes of {}", read.len(), bytes.len()),
                Err(e) => assert!(e.to_string().contains("are needed"), "{damage:?}: {e}"),
            }
        }
        let found = scrub(&rig.client, false).await;
        assert_eq!((found.damaged, found.repaired), (6, 0), "{damage:?}");
    }
}

/// The test writes no data after the drive has failed, so that only reads can reveal the failure.
#[tokio::test]
async fn an_unreadable_drive_is_not_used_until_the_operator_brings_it_back() {
    for redundancy in ["ec:4+2", "mirror:2"] {
        let mut rig = Rig::new(redundancy, 2).await;
        rig.fill(&SIZES).await;
        rig.set_down(&[1], true);
        let found = scrub(&rig.client, false).await;
        assert_eq!((found.inconsistent, found.failure), (0, None), "{redundancy}");
        assert!(found.damaged > found.repaired, "{redundancy}: the fault fired");
        let failed = |status: client::NodeStatus| status.targets[1].failure.clone();
        assert!(failed(rig.client.status().await.unwrap()).is_some(), "{redundancy}");
        rig.check("without the failed drive").await;
        let again = scrub(&rig.client, false).await;
        assert_eq!((again.damaged, again.inconsistent, again.failure), (0, 0, None), "{redundancy}");
        rig.bring_back(&[1]).await;
        assert_eq!(failed(rig.client.status().await.unwrap()), None, "{redundancy}");
        rig.check("after the drive returned").await;
    }
}
