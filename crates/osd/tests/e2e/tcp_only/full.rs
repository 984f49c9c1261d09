//! Tests of nodes with full targets: objects can be read and removed, and all administrative
//! requests work.

use std::sync::Arc;

use base::block::Payload;
use client::{Error, NodeError, Pool, Redundancy};
use futures::future::{join_all, try_join_all};
use osd::OsdConfig;
use store::simulation::{RecordedDrive, SimStore};
use store::{CollectionId, ObjectId, ObjectStore, Op, StoreCalls, StoreError, Transaction, WriteSource};
use uuid::Uuid;

use crate::common::{FaultStore, Node, data};
use crate::raw::{Raw, append, head, mutate};

/// Creates a node with targets of `mib` MiB each, on drives in memory.
fn node(targets: usize, mib: usize) -> Node {
    let store = |number: usize| {
        let image = SimStore::format(vec![0; mib << 20], Uuid::from_u128(number as u128)).unwrap();
        FaultStore::over(Arc::new(SimStore::mount(&RecordedDrive::new(image), 7).unwrap()), None)
    };
    let config = OsdConfig { upkeep_interval: std::time::Duration::from_millis(50), ..OsdConfig::default() };
    let mut node = Node::over((1..=targets).map(store).collect(), config);
    node.restart();
    node
}

async fn pool(node: &Node, name: &str, groups: u32, redundancy: &str) -> Pool {
    let client = node.client().await;
    let redundancy: Redundancy = redundancy.parse().unwrap();
    client.create_pool_with(name, groups, redundancy).await.unwrap();
    client.pool(name).unwrap()
}

fn is_full<T: std::fmt::Debug>(result: &Result<T, Error>) -> bool {
    match result {
        Err(Error::Node(e @ NodeError::NoSpace { target, area, .. })) => {
            assert!(["0", "1", "2", "3"].contains(&target.as_str()), "{e}");
            assert_eq!(area, "data", "{e}");
            true
        }
        _ => false,
    }
}

/// Puts objects of length `len` until one does not fit. Returns the number of objects that fit.
async fn fill(pool: &Pool, prefix: &str, len: usize) -> usize {
    for n in 0.. {
        let put = pool.object(&format!("{prefix}{n}")).unwrap().put(data(len, n as u64)).await;
        if put.is_err() {
            assert!(is_full(&put), "{put:?}");
            return n;
        }
    }
    unreachable!("targets are finite")
}

async fn check(pool: &Pool, prefix: &str, len: usize, numbers: impl Iterator<Item = usize>) {
    for n in numbers {
        let got = pool.object(&format!("{prefix}{n}")).unwrap().get().await;
        assert!(got.as_ref().is_ok_and(|got| *got == data(len, n as u64)), "{prefix}{n}: {:?}", got.err());
    }
}

async fn assert_none_failed(node: &Node) {
    let status = node.client().await.status().await.unwrap();
    let failures: Vec<_> = status.targets.iter().filter_map(|t| t.failure.clone()).collect();
    assert!(failures.is_empty(), "{failures:?}");
}

async fn free(node: &Node) -> Vec<u64> {
    let status = node.client().await.status().await.unwrap();
    status.targets.iter().map(|t| t.space.as_ref().unwrap().free).collect()
}

const LARGE: usize = 512 << 10;

#[tokio::test]
async fn a_full_erasure_coded_pool_can_be_read_and_emptied_after_a_restart() {
    let mut node = node(3, 24);
    let films = pool(&node, "films", 4, "ec:2+1").await;
    let many = fill(&films, "f", LARGE).await;
    assert!(many > 20, "{many} objects fit");
    let few = fill(&films, "small", 4096).await;
    let long = films.object("f0").unwrap();
    assert!(is_full(&long.write(LARGE as u64 - 5000, data(200_000, 3)).await));
    check(&films, "f", LARGE, 0..many).await;
    check(&films, "small", 4096, 0..few).await;
    assert_none_failed(&node).await;
    node.restart();
    let client = node.client().await;
    let films = client.pool("films").unwrap();
    check(&films, "f", LARGE, 0..many).await;
    assert!(matches!(
        films.object("none").unwrap().get().await,
        Err(Error::Node(NodeError::NoSuchObject(_)))
    ));
    // An object can also be truncated to any size.
    films.object("f1").unwrap().truncate(1234).await.unwrap();
    assert_eq!(films.object("f1").unwrap().get().await.unwrap(), data(LARGE, 1).slice(..1234));
    for n in 2..many {
        films.object(&format!("f{n}")).unwrap().remove().await.unwrap();
    }
    assert_none_failed(&node).await;
    // Removed data is kept for a moment, so that the removal can be undone. The puts wait for the
    // space of this data.
    for n in 2..many {
        films.object(&format!("f{n}")).unwrap().put(data(LARGE, n as u64)).await.unwrap();
    }
    check(&films, "f", LARGE, 2..many).await;
}

#[tokio::test]
async fn pools_and_targets_can_be_managed_with_zero_bytes_free() {
    let mut node = node(3, 16);
    let copies = pool(&node, "copies", 4, "mirror:3").await;
    fill(&copies, "c", LARGE).await;
    fill(&copies, "small", 4096).await;
    for round in 0..2 {
        assert_eq!(free(&node).await, [0, 0, 0], "round {round}");
        let client = node.client().await;
        let name = format!("pool{round}");
        client.create_pool(&name).await.unwrap();
        let other = client.pool(&name).unwrap();
        assert!(is_full(&other.object("x").unwrap().put("x").await));
        other.object("empty").unwrap().put("").await.unwrap();
        client.set_target_out(1, true).await.unwrap();
        check(&client.pool("copies").unwrap(), "c", LARGE, 0..2).await;
        client.pool("copies").unwrap().object(&format!("small{round}")).unwrap().remove().await.unwrap();
        client.set_target_out(1, false).await.unwrap();
        // The target catches up with the removal.
        let health = async || client.status().await.unwrap().health.iter().map(|h| h.degraded).sum::<u32>();
        while health().await > 0 {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        client.pool("copies").unwrap().object(&format!("again{round}")).unwrap().put("x").await.unwrap();
        client.remove_pool(&name, true).await.unwrap();
        assert_none_failed(&node).await;
        node.restart();
    }
    let client = node.client().await;
    client.remove_pool("copies", true).await.unwrap();
    while free(&node).await.iter().any(|free| *free < 8 << 20) {
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}

/// Many clients overwrite the same objects at a time. One overwrite has space for its new data only
/// after other overwrites have freed their old data.
#[tokio::test]
async fn overwrites_that_fit_only_one_after_the_other_wait_for_each_other() {
    for (redundancy, targets, mib) in [("single", 2, 40), ("mirror:2", 2, 40), ("ec:2+1", 3, 24)] {
        let node = node(targets, mib);
        let pool = pool(&node, "pool", 1, redundancy).await;
        let len = 3 << 20;
        let put = async |n: usize, salt: usize| {
            pool.object(&format!("o{n}")).unwrap().put(data(len, salt as u64)).await
        };
        for n in 0..4 {
            put(n, n).await.unwrap();
        }
        for round in 0..3 {
            let outcomes = try_join_all((0..12).map(|n| put(n % 4, round))).await;
            outcomes.unwrap_or_else(|e| panic!("{redundancy}, round {round}: {e}"));
        }
        for n in 0..4 {
            assert!(pool.object(&format!("o{n}")).unwrap().get().await.unwrap() == data(len, 2));
        }
    }
}

/// Puts that wait for space give up when no other running change could free space.
#[tokio::test]
async fn puts_that_can_never_fit_are_all_refused() {
    let node = node(2, 16);
    let pool = pool(&node, "pool", 2, "mirror:2").await;
    fill(&pool, "f", LARGE).await;
    let put = async |n: usize| pool.object(&format!("new{n}")).unwrap().put(data(3 << 20, 1)).await;
    let outcomes = join_all((0..16).map(put)).await;
    assert!(outcomes.iter().all(is_full), "{outcomes:?}");
    assert_none_failed(&node).await;
}

/// The collection of [`take_every_block`].
const FILLER: &str = "filler";

/// Fills every block, including the blocks of the reserve.
pub(super) async fn take_every_block(store: &dyn ObjectStore) {
    let filler = CollectionId::new(FILLER).unwrap();
    let create = Transaction::new(filler.clone()).with(Op::CreateCollection);
    store.queue_transaction(create).await.unwrap();
    for n in 0..100_000 {
        let oid = ObjectId::new(format!("{n}")).unwrap();
        let source = WriteSource::Inline(Payload::compute(0, data(4096, n)));
        let write = Transaction::new(filler.clone()).with(Op::Write { oid, offset: 0, source });
        match store.queue_transaction(write.from_reserve()).await {
            Ok(()) => {}
            Err(StoreError::NoSpace { .. }) if n > 0 => return,
            Err(e) => panic!("{e}"),
        }
    }
    panic!("the target is not full");
}

/// Frees the blocks of [`take_every_block`].
pub(super) async fn free_blocks(store: &dyn ObjectStore) {
    let filler = CollectionId::new(FILLER).unwrap();
    let (objects, _) = store.list(&filler, None, 100_000).await.unwrap();
    assert!(!objects.is_empty());
    for oid in objects {
        let remove = Transaction::new(filler.clone()).with(Op::Remove { oid });
        store.queue_transaction(remove.from_reserve()).await.unwrap();
    }
}

/// The node is as full as a node could become before the reserve existed. A change of the map has
/// reached only one of two targets.
#[tokio::test]
async fn a_node_without_a_free_block_starts_and_can_be_read_and_emptied() {
    let mut node = node(2, 16);
    let copies = pool(&node, "copies", 4, "mirror:2").await;
    let many = fill(&copies, "c", LARGE).await;
    for store in &node.stores {
        take_every_block(store.inner()).await;
    }
    node.stores[1].set_full_for_map(true);
    let refused = node.client().await.create_pool("more").await;
    assert!(matches!(refused, Err(Error::Node(NodeError::NoSpace { .. }))), "{refused:?}");
    node.stores[1].set_full_for_map(false);
    node.restart();
    assert_none_failed(&node).await;
    let client = node.client().await;
    let copies = client.pool("copies").unwrap();
    check(&copies, "c", LARGE, 0..many).await;
    assert!(is_full(&copies.object("new").unwrap().put(data(4096, 1)).await));
    for n in 0..many {
        copies.object(&format!("c{n}")).unwrap().remove().await.unwrap();
    }
    copies.object("new").unwrap().put(data(LARGE, 1)).await.unwrap();
    assert!(copies.object("new").unwrap().get().await.unwrap() == data(LARGE, 1));
}

/// Returns the number of collections on all targets.
async fn collections(node: &Node) -> usize {
    let listed = join_all(node.stores.iter().map(|store| store.inner().collections())).await;
    listed.into_iter().map(|listed| listed.unwrap().len()).sum()
}

/// The other targets have no space for the data of the target that is taken out. Once this target
/// is used again, it is a member of its groups again.
#[tokio::test]
async fn a_rebuild_without_space_ends_when_the_target_taken_out_is_used_again() {
    let node = node(4, 24);
    let films = pool(&node, "films", 8, "mirror:2").await;
    let many = fill(&films, "f", LARGE).await;
    let left = free(&node).await;
    let fullest = (0..4).min_by_key(|&target| left[target]).unwrap();
    // Fill the targets that store few films, too.
    let others = pool(&node, "others", 32, "single").await;
    let put = async |n: usize| others.object(&format!("{n}")).unwrap().put(data(LARGE / 2, 1)).await;
    assert!(join_all((0..400).map(put)).await.iter().filter(|put| is_full(put)).count() > 100);
    // Free a little space.
    for n in 0..4 {
        films.object(&format!("f{n}")).unwrap().remove().await.unwrap();
    }
    let before = collections(&node).await;
    let client = node.client().await;
    client.set_target_out(fullest as u32, true).await.unwrap();
    let full = async {
        let failure = async || client.status().await.unwrap().rebuild.last_failure;
        while !failure().await.is_some_and(|why| why.contains("no space")) {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(60), full).await.expect("a target gets full");
    client.set_target_out(fullest as u32, false).await.unwrap();
    crate::redundancy::wait_until_whole(&client).await;
    check(&films, "f", LARGE, 4..many).await;
    // The copies of the unfinished rebuilds are removed, and so is the target's data of groups that
    // have moved to other targets.
    let gone = async {
        while collections(&node).await > before {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(30), gone).await.expect("no copies are left over");
    films.object("new").unwrap().put(data(LARGE / 4, 1)).await.unwrap();
    assert_none_failed(&node).await;
}

/// Uses target 0 again, of two targets, and waits until it has all data. Then only it is left.
async fn only_returned_target(node: &Node) {
    assert!(node.fired() > 0);
    node.stores[0].set_down(false);
    let client = node.client().await;
    client.set_target_out(0, false).await.unwrap();
    crate::redundancy::wait_until_whole(&client).await;
    node.stores[1].set_down(true);
}

/// Returns whether a change was refused for lack of space in the index.
fn has_full_index(put: &Result<client::Mutated, Error>) -> bool {
    match put {
        Ok(_) => false,
        Err(Error::Node(NodeError::NoSpace { area, .. })) if area == "the index" => true,
        Err(e) => panic!("{e}"),
    }
}

/// While a target is missing, the other target records in dirty notes which objects have changed,
/// including removed objects.
#[tokio::test]
async fn dirty_notes_about_a_missing_target_do_not_fill_the_index_for_good() {
    let node = node(2, 24);
    let pool = pool(&node, "pool", 2, "mirror:2").await;
    let kept = pool.object("kept").unwrap();
    kept.put(data(5000, 1)).await.unwrap();
    node.stores[0].set_down(true);
    for round in 0..8 {
        let name = |n: usize| format!("{round}-{n:0>1000}");
        let mut names: Vec<String> = Vec::new();
        loop {
            let few: Vec<String> = (names.len()..names.len() + 16).map(name).collect();
            let put = async |name: &String| pool.object(name).unwrap().put("x").await;
            let puts = join_all(few.iter().map(put)).await;
            names.extend(few);
            if puts.iter().any(has_full_index) {
                break;
            }
        }
        assert!(names.len() > 100, "round {round}: {} objects fit", names.len());
        for few in names.chunks(16) {
            let remove = async |name: &String| pool.object(name).unwrap().remove().await;
            for removed in join_all(few.iter().map(remove)).await {
                assert!(removed.as_ref().map_or_else(Error::is_not_found, |_| true), "{removed:?}");
            }
        }
    }
    only_returned_target(&node).await;
    assert!(kept.get().await.unwrap() == data(5000, 1), "the returned target has all data");
}

/// Fills the index except for the reserve.
async fn fill_index(store: &dyn ObjectStore) {
    let cid = CollectionId::new("filler").unwrap();
    store.queue_transaction(Transaction::new(cid.clone()).with(Op::CreateCollection)).await.unwrap();
    let mut refused = 0;
    for (n, len) in (0u32..2000).zip(std::iter::repeat([16 << 10, 200]).flatten()) {
        let entries = vec![(n.to_be_bytes().to_vec().into(), data(len, n.into()))];
        let set = Op::OmapSet { oid: ObjectId::new("filler").unwrap(), entries };
        match store.queue_transaction(Transaction::new(cid.clone()).with(set)).await {
            Ok(()) => {}
            Err(StoreError::NoSpace { area: store::Area::Index, .. }) => refused += 1,
            Err(e) => panic!("{e}"),
        }
    }
    assert!(refused > 1000, "the index is not full: {refused}");
}

/// The target has missed removals of objects, and more results of requests than fit into one
/// transaction.
#[tokio::test]
async fn a_returned_target_with_a_full_index_receives_the_removals_that_it_missed() {
    const APPENDS: u64 = 900;
    let node = node(2, 24);
    let pool = pool(&node, "pool", 1, "mirror:2").await;
    for n in 0..20 {
        pool.object(&format!("o{n}")).unwrap().put(data(5000, n)).await.unwrap();
    }
    node.stores[0].set_down(true);
    // The client never acknowledges results, so all results are kept.
    let mut raw = Raw::connect(&node.endpoint, None).await;
    for seq in 1..=APPENDS {
        raw.changed(head(seq), append("log", "x")).await.unwrap();
    }
    let remove = mutate("log", vec![wire::Mutation::Remove], wire::Data::None);
    raw.changed(head(APPENDS + 1), remove).await.unwrap();
    for n in 0..10 {
        pool.object(&format!("o{n}")).unwrap().remove().await.unwrap();
    }
    fill_index(node.stores[0].inner()).await;
    only_returned_target(&node).await;
    for n in 0..10 {
        assert!(pool.object(&format!("o{n}")).unwrap().get().await.unwrap_err().is_not_found());
    }
    for n in 10..20 {
        assert!(pool.object(&format!("o{n}")).unwrap().get().await.unwrap() == data(5000, n));
    }
}

/// The space of the removed objects is needed for the objects that the full target has missed.
#[tokio::test]
async fn a_full_target_that_returns_receives_removals_before_objects_that_need_their_space() {
    let node = node(2, 24);
    let pool = pool(&node, "pool", 1, "mirror:2").await;
    let count = fill(&pool, "old", LARGE).await;
    node.stores[0].set_down(true);
    for n in 0..count {
        pool.object(&format!("old{n}")).unwrap().remove().await.unwrap();
    }
    for n in 0..count {
        pool.object(&format!("new{n}")).unwrap().put(data(LARGE, n as u64)).await.unwrap();
    }
    only_returned_target(&node).await;
    check(&pool, "new", LARGE, 0..count).await;
}

/// A change that is refused for lack of space frees the space that it had taken. This must not wake
/// the other waiting changes.
#[tokio::test]
async fn changes_that_wait_for_space_do_not_wake_each_other() {
    for (redundancy, targets) in [("single", 1), ("mirror:2", 2)] {
        let config = OsdConfig { store_patience: std::time::Duration::from_secs(3), ..OsdConfig::default() };
        let mut node = Node::of(targets, config);
        node.restart();
        let pool = pool(&node, "pool", 1, redundancy).await;
        let put = async |n: usize, salt: u64| {
            // Every second put is staged.
            let len = if n.is_multiple_of(2) { 3 << 20 } else { 10_000 };
            pool.object(&format!("o{n}")).unwrap().put(data(len, salt)).await
        };
        try_join_all((0..8).map(|n| put(n, 0))).await.unwrap();
        let fired = node.fired();
        node.stores.iter().for_each(|store| store.set_full(u64::MAX));
        let outcomes = join_all((0..8).map(|n| put(n, 1))).await;
        assert!(
            outcomes.iter().all(|put| matches!(put, Err(Error::Node(NodeError::NoSpace { .. })))),
            "{outcomes:?}"
        );
        let refused = node.fired() - fired;
        assert!((8..400).contains(&refused), "{redundancy}: {refused} refusals");
    }
}
