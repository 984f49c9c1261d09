//! Tests of groups that continue with what is left after too many losses: the power fails at a random
//! moment after the operator has accepted the loss. Then the node starts again, without the lost
//! targets or with them.

use std::sync::{Arc, Mutex};

use bytes::Bytes;
use client::{Client, Error, NodeError};
use osd::OsdConfig;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::IteratorRandom;
use store::StoreCalls;
use store::simulation::{Crashes, RecordedDrive, SimStore};
use uuid::Uuid;

use crate::common::{FaultStore, Node, Watch, data, seed};
use crate::redundancy::{config, redundancy, scrub, wait_until_whole, wait_until_whole_but};
use crate::tcp_only::full::{free_blocks, take_every_block};
use crate::tcp_only::recovery::until;
use crate::tcp_only::witness::{Memory, config_with};

const SIZE: usize = 12 << 20;
const OBJECTS: usize = 8;
const KEY: Bytes = Bytes::from_static(b"key");
/// Number of moments at which the power fails.
const CHECKS: usize = 40;

/// A moment at which the power may fail: how much each drive had recorded, and the witness.
struct Moment {
    positions: Vec<usize>,
    witness: Option<Vec<u8>>,
}

/// What happens to the targets of a group.
struct Losses {
    scheme: &'static str,
    /// Number of targets that are not members.
    spares: usize,
    /// Targets that miss changes, one after the other.
    stale: &'static [usize],
    /// Targets that are lost.
    lost: &'static [usize],
    /// A target that other data fills.
    full: Option<usize>,
    /// Maximum number of dirty notes.
    notes: usize,
    /// Minimum number of moments at which the power may fail.
    moments: usize,
}

const SALVAGE: Losses =
    Losses { scheme: "ec:2+1", spares: 0, stale: &[2], lost: &[0], full: None, notes: 1000, moments: 20 };

struct Story {
    images: Vec<Vec<u8>>,
    drives: Vec<Arc<RecordedDrive>>,
    lost: Vec<usize>,
    /// All contents that each object has had: the data, and the value in the omap.
    versions: Vec<Vec<(Bytes, Bytes)>>,
    moments: Vec<Moment>,
}

fn start(drives: &[Arc<RecordedDrive>], config: OsdConfig, seed: u64, watch: Option<&Watch>) -> Node {
    let mount = |drive| Arc::new(SimStore::mount(drive, seed).unwrap());
    let stores = drives.iter().map(|drive| FaultStore::over(mount(drive), watch.cloned()));
    let mut node = Node::over(stores.collect(), config);
    node.restart();
    node
}

/// Puts new versions of some objects.
async fn change(
    client: &Client,
    versions: &mut [Vec<(Bytes, Bytes)>],
    which: impl Iterator<Item = usize>,
    salt: u64,
) {
    let pool = client.pool("pool").unwrap();
    for n in which {
        let (bytes, value) = (data(3000 + 9000 * n, salt + n as u64), Bytes::from(salt.to_string()));
        let object = pool.object(&format!("o{n}")).unwrap();
        object.put(bytes.clone()).await.unwrap();
        object.omap_set(vec![(KEY, value.clone())]).await.unwrap();
        versions[n].push((bytes, value));
    }
}

async fn until_it_continues(client: &Client) {
    let continues = async || match client.pool("pool").unwrap().object("o0").unwrap().get().await {
        Err(e) => e.is_not_found(),
        Ok(_) => true,
    };
    until("the group continues", continues).await;
}

type Moments = Arc<Mutex<Vec<Moment>>>;

/// Returns a witness, and a callback that records the moments at which the power may fail.
fn watched(drives: &[Arc<RecordedDrive>]) -> (Arc<Memory>, Watch, Moments) {
    let (memory, moments) = (Arc::new(Memory::default()), Moments::default());
    let watch = {
        let (drives, memory, moments) = (drives.to_vec(), Arc::clone(&memory), Arc::clone(&moments));
        Arc::new(move || {
            let positions = drives.iter().map(|drive| drive.position()).collect();
            moments.lock().unwrap().push(Moment { positions, witness: memory.content() });
        })
    };
    (memory, watch, moments)
}

/// Whether a target still has content that changes have replaced.
pub(super) async fn keeps_older_content(store: &FaultStore) -> bool {
    for cid in store.inner().collections().await.unwrap() {
        let (objects, _) = store.inner().list(&cid, None, 10_000).await.unwrap();
        if objects.iter().any(|oid| oid.as_bytes().windows(4).any(|part| part == b"undo")) {
            return true;
        }
    }
    false
}

/// Makes targets miss changes, loses targets, and accepts this loss.
async fn tell(Losses { scheme, spares, stale, lost, full, notes, .. }: &Losses, seed: u64) -> Story {
    let redundancy = redundancy(scheme);
    let format = |n| SimStore::format(vec![0xa5; SIZE], Uuid::from_u128(n as u128 + 1)).unwrap();
    let images: Vec<Vec<u8>> = (0..redundancy.targets() + spares).map(format).collect();
    let drives: Vec<_> = images.iter().map(|image| RecordedDrive::new(image.clone())).collect();
    let (memory, watch, moments) = watched(&drives);
    let config = OsdConfig { missed_objects_per_pg: *notes, ..config() };
    let node = start(&drives, config_with(&memory, config), seed, Some(&watch));
    let client = node.client().await;
    client.create_pool_with("pool", 1, redundancy).await.unwrap();
    let mut versions = vec![Vec::new(); OBJECTS];
    change(&client, &mut versions, 0..OBJECTS, 1).await;
    for (step, target) in stale.iter().enumerate() {
        node.stores[*target].set_down(true);
        change(&client, &mut versions, (step..OBJECTS).step_by(3), 100 + step as u64).await;
    }
    if let Some(target) = full.filter(|full| !stale.contains(full)) {
        let store = &node.stores[target];
        until("the older content is removed", async || !keeps_older_content(store).await).await;
    }
    lost.iter().for_each(|target| node.stores[*target].set_down(true));
    let is_lost = async || {
        let put = client.pool("pool").unwrap().object("probe").unwrap().put("x").await;
        put.is_err_and(|e| e.to_string().contains("outboard target forget"))
    };
    until("the group waits", is_lost).await;
    for target in *stale {
        node.stores[*target].set_down(false);
        client.set_target_out(*target as u32, false).await.unwrap();
    }
    if let Some(target) = full {
        take_every_block(node.stores[*target].inner()).await;
    }
    moments.lock().unwrap().clear();
    for target in *lost {
        client.forget_target(*target as u32, true).await.unwrap();
    }
    until_it_continues(&client).await;
    let moments = std::mem::take(&mut *moments.lock().unwrap());
    drop(node);
    Story { images, drives, lost: lost.to_vec(), versions, moments }
}

/// Checks that each object has one of its contents, or is lost. Returns the contents.
async fn check(client: &Client, story: &Story, what: &str) -> Vec<Option<(Bytes, Bytes)>> {
    let pool = client.pool("pool").unwrap();
    let mut contents = Vec::new();
    for (n, versions) in story.versions.iter().enumerate() {
        let object = pool.object(&format!("o{n}")).unwrap();
        contents.push(match object.get().await {
            Ok(bytes) => {
                let value = object.omap_get(vec![KEY]).await.unwrap().pop().unwrap_or_default().1;
                let content = (bytes, value);
                assert!(versions.contains(&content), "object {n} has mixed content {what}: {:?}", content.1);
                Some(content)
            }
            Err(e) if e.is_not_found() => None,
            Err(e) => panic!("object {n} {what}: {e}"),
        });
    }
    contents
}

/// Returns images of the drives after a power failure at a moment.
fn crash(story: &Story, moment: &Moment, rng: &mut StdRng) -> Vec<Vec<u8>> {
    let image = |(n, image): (usize, &Vec<u8>)| {
        let mut crashes = Crashes::new(&story.drives[n], image.clone());
        crashes.image(moment.positions[n], rng)
    };
    story.images.iter().enumerate().map(image).collect()
}

/// Continues with a node that has lost power at a moment, without the lost targets.
async fn continue_from(story: &Story, moment: &Moment, seed: u64, rng: &mut StdRng) -> Story {
    let images = crash(story, moment, rng);
    let drives: Vec<_> = images.iter().map(|image| RecordedDrive::new(image.clone())).collect();
    let (memory, watch, moments) = watched(&drives);
    memory.set_content(moment.witness.clone());
    let forgotten = story.lost.iter().map(|n| Uuid::from_u128(*n as u128 + 1)).collect();
    let config = OsdConfig { forgotten, ..config_with(&memory, config()) };
    let mount = |drive| Arc::new(SimStore::mount(drive, seed).unwrap());
    let stores: Vec<_> =
        drives.iter().map(|drive| FaultStore::over(mount(drive), Some(watch.clone()))).collect();
    story.lost.iter().for_each(|target| stores[*target].set_down(true));
    let mut node = Node::over(stores, config);
    node.restart();
    until_it_continues(&node.client().await).await;
    drop(node);
    let moments = std::mem::take(&mut *moments.lock().unwrap());
    Story { images, drives, lost: story.lost.clone(), versions: story.versions.clone(), moments }
}

/// Returns the numbers of objects that were found and that were lost.
async fn interrupt(losses: Losses) -> (usize, usize) {
    let seed = seed();
    let mut rng = StdRng::seed_from_u64(seed);
    let story = tell(&losses, seed).await;
    assert!(story.moments.len() > losses.moments, "{} moments", story.moments.len());
    let tolerates = redundancy(losses.scheme).tolerates();
    let (mut found, mut gone) = (0, 0);
    for number in 0..CHECKS {
        // In a part of the checks, the power fails twice, first just after the witness has changed.
        let changes = story.moments.windows(2).filter(|pair| pair[0].witness != pair[1].witness);
        let first = changes.map(|pair| &pair[1]).choose(&mut rng).filter(|_| number % 4 == 0);
        let again = match first {
            Some(first) => Some(continue_from(&story, first, seed, &mut rng).await),
            None => None,
        };
        let story = again.as_ref().filter(|again| !again.moments.is_empty()).unwrap_or(&story);
        let moment = story.moments.iter().choose(&mut rng).unwrap();
        let drives: Vec<_> = crash(story, moment, &mut rng).into_iter().map(RecordedDrive::new).collect();
        let memory = Arc::new(Memory::default());
        memory.set_content(moment.witness.clone());
        let returns = number % 2 == 0;
        let mut config = config_with(&memory, config());
        if !returns {
            config.forgotten = story.lost.iter().map(|n| Uuid::from_u128(*n as u128 + 1)).collect();
        }
        let mount = |drive| Arc::new(SimStore::mount(drive, seed).unwrap());
        let stores: Vec<_> = drives.iter().map(|drive| FaultStore::over(mount(drive), None)).collect();
        if let Some(target) = losses.full {
            // Otherwise the target could not be rebuilt later.
            free_blocks(stores[target].inner()).await;
        }
        story.lost.iter().for_each(|target| stores[*target].set_down(!returns));
        let mut node = Node::over(stores, config);
        node.restart();
        let client = node.client().await;
        let what = if returns { "after the lost targets returned" } else { "without the lost targets" };
        let contents = check(&client, story, what).await;
        found += contents.iter().flatten().count();
        gone += contents.iter().filter(|content| content.is_none()).count();
        if returns {
            wait_until_whole(&client).await;
        } else {
            wait_until_whole_but(&client, story.lost.len()).await;
        }
        let scrub = scrub(&client, false).await;
        assert_eq!((scrub.inconsistent, scrub.damaged, scrub.failure), (0, 0, None), "{what}");
        if returns {
            // Each member has the same content.
            for first in 0..story.images.len() {
                let count = story.images.len();
                let down = (first..first + tolerates).map(|target| target % count).collect::<Vec<_>>();
                down.iter().for_each(|target| node.stores[*target].set_down(true));
                let again = check(&client, story, "with other targets").await;
                assert!(again == contents, "the content changed when other drives failed");
                down.iter().for_each(|target| node.stores[*target].set_down(false));
                for target in &down {
                    client.set_target_out(*target as u32, false).await.unwrap();
                }
                wait_until_whole(&client).await;
            }
        }
    }
    (found, gone)
}

#[tokio::test]
async fn an_interrupted_salvage_with_one_stale_target_mixes_nothing() {
    interrupt(SALVAGE).await;
    // Metadata is read from the first target.
    interrupt(Losses { stale: &[0], lost: &[2], ..SALVAGE }).await;
}

#[tokio::test]
async fn an_interrupted_salvage_with_targets_of_different_ages_mixes_nothing() {
    interrupt(Losses { scheme: "ec:2+2", stale: &[2, 3], lost: &[0], ..SALVAGE }).await;
    // Metadata is read from the only target that is left in sync.
    interrupt(Losses { scheme: "ec:2+2", stale: &[1, 3], lost: &[0], ..SALVAGE }).await;
    interrupt(Losses { scheme: "ec:4+2", stale: &[4, 5], lost: &[0, 1], ..SALVAGE }).await;
}

/// Two stale targets have older content of some objects, and the only target in sync receives it.
#[tokio::test]
async fn an_interrupted_salvage_with_a_full_target_in_sync_mixes_nothing() {
    let full = Losses { scheme: "ec:2+2", stale: &[2, 3], lost: &[0], full: Some(1), ..SALVAGE };
    let (found, gone) = interrupt(full).await;
    assert_eq!((found, gone), (OBJECTS * CHECKS, 0));
}

/// The older content of an object needs more space than the newer content.
#[tokio::test]
async fn a_salvage_waits_until_a_full_target_in_sync_has_room_for_older_content() {
    let seed = seed();
    let drive = |n: u128| SimStore::format(vec![0; 16 << 20], Uuid::from_u128(n + 1)).unwrap();
    let drives: Vec<_> = (0..4).map(|n| RecordedDrive::new(drive(n))).collect();
    let memory = Arc::new(Memory::default());
    let node = start(&drives, config_with(&memory, config()), seed, None);
    let client = node.client().await;
    client.create_pool_with("pool", 1, redundancy("ec:2+2")).await.unwrap();
    let object = client.pool("pool").unwrap().object("object").unwrap();
    let older = data(5_000_000, 1);
    object.put(older.clone()).await.unwrap();
    [2, 3].iter().for_each(|n: &usize| node.stores[*n].set_down(true));
    object.put("newer").await.unwrap();
    until("the older content is removed", async || !keeps_older_content(&node.stores[1]).await).await;
    node.stores[0].set_down(true);
    let is_lost = async || {
        let put = client.pool("pool").unwrap().object("probe").unwrap().put("x").await;
        put.is_err_and(|e| e.to_string().contains("outboard target forget"))
    };
    until("the group waits", is_lost).await;
    take_every_block(node.stores[1].inner()).await;
    for target in [2, 3] {
        node.stores[target].set_down(false);
        client.set_target_out(target as u32, false).await.unwrap();
    }
    client.forget_target(0, true).await.unwrap();
    let is_full = async || matches!(object.get().await, Err(Error::Node(NodeError::NoSpace { .. })));
    until("the group waits for space", is_full).await;
    assert!(is_full().await);
    free_blocks(node.stores[1].inner()).await;
    until("the group continues", async || object.get().await.is_ok_and(|bytes| bytes == older)).await;
    wait_until_whole_but(&client, 1).await;
    let scrub = scrub(&client, false).await;
    assert_eq!((scrub.inconsistent, scrub.damaged, scrub.failure), (0, 0, None));
}

/// The full target has older content of some objects, which the group needs.
#[tokio::test]
async fn an_interrupted_salvage_with_a_full_stale_target_loses_nothing_that_the_target_has() {
    let full = Losses { scheme: "ec:2+2", stale: &[3, 2], lost: &[0], full: Some(3), ..SALVAGE };
    let (found, gone) = interrupt(full).await;
    assert_eq!((found, gone), (OBJECTS * CHECKS, 0));
}

#[tokio::test]
async fn an_interrupted_salvage_with_a_target_that_lacks_too_many_changes_mixes_nothing() {
    let (found, gone) = interrupt(Losses { notes: 1, ..SALVAGE }).await;
    // Three of the eight objects have changed while the target was missing.
    assert!(found >= 5 * CHECKS && gone > 0, "{found} objects were found, and {gone} were lost");
    interrupt(Losses { scheme: "ec:4+2", stale: &[4, 5], lost: &[0, 1], notes: 1, ..SALVAGE }).await;
}

#[tokio::test]
async fn an_interrupted_salvage_without_any_target_in_sync_mixes_nothing() {
    let stale = Losses { scheme: "ec:2+2", stale: &[2, 3], lost: &[0, 1], ..SALVAGE };
    for losses in [Losses { notes: 1, ..stale }, stale] {
        let (found, _) = interrupt(losses).await;
        assert!(found >= 3 * CHECKS, "{found} objects were found");
    }
}

#[tokio::test]
async fn a_group_that_is_interrupted_while_it_begins_without_objects_brings_none_of_them_back() {
    let empty = Losses { spares: 1, stale: &[], moments: 10, ..SALVAGE };
    let (found, gone) = interrupt(Losses { scheme: "mirror:2", lost: &[0, 2], ..empty }).await;
    assert!(found > 0 && gone > 0, "{found} objects were found, and {gone} were lost");
    interrupt(Losses { lost: &[0, 2], ..empty }).await;
}
