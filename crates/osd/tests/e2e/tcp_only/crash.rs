//! Tests of power loss in pools with redundancy. All drives stop at the same random moment, each
//! drive keeps a random part of the data that was not flushed, and some drives may be lost. Other
//! drives may have gone back to an earlier moment, because the end of their log was damaged or an
//! older copy replaced their content.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use client::{Client, Options};
use osd::OsdConfig;
use rand::rngs::StdRng;
use rand::seq::IteratorRandom;
use rand::{Rng, SeedableRng};
use store::simulation::{Crashes, RecordedDrive, SimStore};
use uuid::Uuid;

use crate::common::{FaultStore, Node, Watch, data, seed};
use crate::redundancy::{config, redundancy, scrub, wait_until_whole, wait_until_whole_but};

const SIZE: usize = 12 << 20;
const OBJECTS: usize = 4;
const CHANGES: usize = 12;

/// A moment at which the power may fail.
struct Cut {
    /// Number of events that each drive had recorded.
    positions: Vec<usize>,
    /// Number of acknowledged changes of each object.
    acknowledged: Vec<usize>,
}

/// History of a run without a power loss, from which power losses at any moment are derived.
struct Story {
    images: Vec<Vec<u8>>,
    drives: Vec<Arc<RecordedDrive>>,
    /// Content of each object after each of its changes; `None` if the object did not exist.
    versions: Vec<Vec<Option<Bytes>>>,
    cuts: Vec<Cut>,
}

/// Returns the images of newly formatted targets of a pool.
fn images(count: usize) -> Vec<Vec<u8>> {
    let format = |n| SimStore::format(vec![0xa5; SIZE], Uuid::from_u128(n as u128 + 1)).unwrap();
    (0..count).map(format).collect()
}

fn drives(images: &[Vec<u8>]) -> Vec<Arc<RecordedDrive>> {
    images.iter().map(|image| RecordedDrive::new(image.clone())).collect()
}

/// Starts a node on drives. The `lost` drives fail before the node starts.
fn start(drives: &[Arc<RecordedDrive>], lost: &[usize], seed: u64, watch: Option<Watch>) -> Node {
    let mount = |drive| Arc::new(SimStore::mount(drive, seed).unwrap());
    let stores: Vec<_> = drives.iter().map(|drive| FaultStore::over(mount(drive), watch.clone())).collect();
    lost.iter().for_each(|&drive| stores[drive].set_down(true));
    let mut node = Node::over(stores, config());
    node.restart();
    node
}

async fn tell(text: &str, seed: u64) -> Story {
    let redundancy = redundancy(text);
    let images = images(redundancy.targets());
    let drives = drives(&images);
    let acknowledged: Arc<Vec<AtomicUsize>> = Arc::new((0..OBJECTS).map(|_| AtomicUsize::new(0)).collect());
    let cuts = Arc::new(Mutex::new(Vec::new()));
    let watch: Watch = {
        let (drives, acknowledged, cuts) = (drives.clone(), Arc::clone(&acknowledged), Arc::clone(&cuts));
        // The callback runs on the only thread that uses the drives, so it sees all drives at the
        // same moment.
        Arc::new(move || {
            let acknowledged = acknowledged.iter().map(|a| a.load(Ordering::SeqCst)).collect();
            let positions = drives.iter().map(|drive| drive.position()).collect();
            cuts.lock().unwrap().push(Cut { positions, acknowledged });
        })
    };
    let node = start(&drives, &[], seed, Some(watch));
    let client = node.client().await;
    client.create_pool_with("pool", 2, redundancy).await.unwrap();
    // Moments before the pool exists are not tested.
    cuts.lock().unwrap().clear();
    let histories = (0..OBJECTS).map(|number| change(&client, number, seed, &acknowledged[number]));
    let versions = futures::future::join_all(histories).await;
    let cuts = std::mem::take(&mut *cuts.lock().unwrap());
    drop(node);
    Story { images, drives, versions, cuts }
}

/// Changes one object repeatedly. Returns the object's initial content and its content after each
/// change.
async fn change(client: &Client, number: usize, seed: u64, acknowledged: &AtomicUsize) -> Vec<Option<Bytes>> {
    let mut rng = StdRng::seed_from_u64(seed.wrapping_add(number as u64));
    let object = client.pool("pool").unwrap().object(&format!("o{number}")).unwrap();
    let mut now: Option<Vec<u8>> = None;
    let mut versions = vec![None];
    for step in 0..CHANGES {
        let bytes = data(rng.random_range(1..60_000), seed ^ (number * CHANGES + step) as u64);
        let old = now.clone().unwrap_or_default();
        match rng.random_range(0..6) {
            0 | 1 => {
                now = Some(bytes.to_vec());
                object.put(bytes).await.unwrap();
            }
            2 | 3 => {
                let at = rng.random_range(0..=old.len());
                let mut new = old;
                new.resize(new.len().max(at + bytes.len()), 0);
                new[at..at + bytes.len()].copy_from_slice(&bytes);
                now = Some(new);
                object.write(at as u64, bytes).await.unwrap();
            }
            4 => {
                let size = rng.random_range(0..70_000);
                let mut new = old;
                new.resize(size, 0);
                now = Some(new);
                object.truncate(size as u64).await.unwrap();
            }
            _ if now.is_some() => {
                now = None;
                object.remove().await.unwrap();
            }
            _ => {
                now = Some(Vec::new());
                object.truncate(0).await.unwrap();
            }
        }
        versions.push(now.clone().map(Bytes::from));
        acknowledged.store(step + 1, Ordering::SeqCst);
    }
    versions
}

/// The drives that a power loss affects in addition.
struct Faults {
    /// Drives that fail before the node starts.
    lost: Vec<usize>,
    /// Drives that have gone back to an earlier moment.
    back: Vec<usize>,
}

/// Checks all objects. Returns their contents, and the number of objects that lost a change that was
/// not acknowledged.
async fn check_objects(story: &Story, cut: &Cut, client: &Client, what: &str) -> (Vec<Option<Bytes>>, usize) {
    let pool = client.pool("pool").unwrap();
    let (mut contents, mut unfinished) = (Vec::new(), 0);
    for (number, versions) in story.versions.iter().enumerate() {
        let found = match pool.object(&format!("o{number}")).unwrap().get().await {
            Ok(bytes) => Some(bytes),
            Err(e) if e.is_not_found() => None,
            Err(e) => panic!("object {number} {what}: {e}"),
        };
        let least = cut.acknowledged[number];
        let fits = versions[least..].iter().take(2).position(|version| *version == found);
        let was = versions.iter().rposition(|version| *version == found);
        assert!(fits.is_some(), "object {number} is as after change {was:?}, not {least}, {what}");
        unfinished += usize::from(fits == Some(0) && least < CHANGES);
        contents.push(found);
    }
    (contents, unfinished)
}

/// Starts a node on the possible contents of the drives after a power loss, and checks all objects.
/// Returns the number of objects that lost a change that was not acknowledged.
async fn check(story: &Story, images: Vec<Vec<u8>>, cut: &Cut, faults: &Faults, seed: u64) -> usize {
    let Faults { lost, back } = faults;
    let node = start(&drives(&images), lost, seed, None);
    let client = node.client_with(Options::default()).await;
    let what = format!("without {lost:?}, after {back:?} went back");
    let (contents, unfinished) = check_objects(story, cut, &client, &what).await;
    let scrub = scrub(&client, false).await;
    assert_eq!(
        (scrub.inconsistent, scrub.damaged, scrub.failure),
        (0, 0, None),
        "a stripe mixes old and new data"
    );
    if !back.is_empty() {
        // The drives that went back have all changes again: other drives may fail.
        wait_until_whole_but(&client, lost.len()).await;
        let count = redundancy_of(&client).await.tolerates() - lost.len();
        let others = (0..images.len()).filter(|drive| !lost.contains(drive) && !back.contains(drive));
        others.take(count).for_each(|drive| node.stores[drive].set_down(true));
        let again = check_objects(story, cut, &client, &format!("{what} and other drives failed")).await;
        assert!(again.0 == contents, "{what}: the content changed when other drives failed");
    }
    unfinished
}

async fn redundancy_of(client: &Client) -> client::Redundancy {
    client.pools().await.unwrap()[0].redundancy
}

/// Returns an earlier moment at which clients knew of fewer changes, if there is one.
fn earlier<'a>(story: &'a Story, cut: &Cut, rng: &mut StdRng) -> Option<&'a Cut> {
    let known = |cut: &Cut| cut.acknowledged.iter().sum::<usize>();
    story.cuts.iter().filter(|earlier| known(earlier) < known(cut)).choose(rng)
}

/// Checks the node after power losses at random moments. If `go_back` is true, a drive has also gone
/// back to an earlier moment.
async fn crash(text: &str, checks: usize, go_back: bool) {
    let seed = seed();
    let mut rng = StdRng::seed_from_u64(seed);
    let story = tell(text, seed).await;
    assert!(story.cuts.len() >= OBJECTS * CHANGES, "{} moments", story.cuts.len());
    let tolerates = redundancy(text).tolerates();
    let (mut unfinished, mut checked, mut went_back) = (0, 0, 0);
    // The number of changes in flight depends on the machine. The loop continues until enough
    // changes were cut off.
    while checked < checks || (unfinished <= 5 && checked < 10 * checks) {
        checked += 1;
        let cut = story.cuts.iter().choose(&mut rng).unwrap();
        // A mirror loses no drive here, because the other copies cannot know whether the lost drive
        // has accepted further changes alone.
        let most = if text.starts_with("ec") { tolerates } else { 0 };
        let mut faulty = (0..story.images.len()).choose_multiple(&mut rng, tolerates);
        let before = if go_back { earlier(&story, cut, &mut rng) } else { None };
        let back = faulty.split_off(faulty.len() - usize::from(before.is_some()));
        faulty.truncate(rng.random_range(0..=most.min(faulty.len())));
        let faults = Faults { lost: faulty, back };
        went_back += faults.back.len();
        let mut images = Vec::new();
        for (number, (drive, image)) in story.drives.iter().zip(&story.images).enumerate() {
            let moment = if faults.back.contains(&number) { before.unwrap_or(cut) } else { cut };
            let mut crashes = Crashes::new(drive, image.clone());
            images.push(crashes.image(moment.positions[number], &mut rng));
        }
        unfinished += check(&story, images, cut, &faults, seed).await;
    }
    assert!(!go_back || went_back > checks / 2, "a drive went back only {went_back} times");
    assert!(unfinished > 5, "{checked} crashes cut off only {unfinished} changes");
}

#[tokio::test]
async fn a_power_loss_leaves_no_stripe_that_mixes_old_and_new_data() {
    crash("ec:4+2", 40, false).await;
}

#[tokio::test]
async fn a_power_loss_leaves_identical_copies_in_a_mirror() {
    crash("mirror:2", 40, false).await;
}

#[tokio::test]
async fn a_drive_that_goes_back_costs_a_code_no_acknowledged_change() {
    crash("ec:4+2", 40, true).await;
}

#[tokio::test]
async fn a_drive_that_goes_back_costs_a_mirror_no_acknowledged_change() {
    crash("mirror:2", 40, true).await;
}

/// A stale member has gone back, so that the dirty notes do not name all objects that it lacks. The
/// rebuild of all objects is interrupted.
#[tokio::test]
async fn a_stale_member_that_went_back_is_rebuilt_completely_after_an_interruption() {
    let images = images(3);
    let drives = drives(&images);
    let slow = OsdConfig { rebuild_rate: 200 << 10, ..config() };
    let mut node = start(&drives, &[], seed(), None);
    let client = node.client().await;
    client.create_pool_with("pool", 1, redundancy("ec:2+1")).await.unwrap();
    let put = async |node: &Node, from: usize, to: usize, salt: u64| {
        let pool = node.client().await.pool("pool").unwrap();
        for number in from..to {
            pool.object(&format!("o{number}")).unwrap().put(data(40_000, salt)).await.unwrap();
        }
    };
    put(&node, 0, 10, 1).await;
    let older = drives[0].image();
    put(&node, 10, 20, 1).await;
    node.stores[0].set_down(true);
    put(&node, 0, 1, 2).await;
    node.osd.take().unwrap().stop();
    let mount = |drive: &Arc<RecordedDrive>| Arc::new(SimStore::mount(drive, seed()).unwrap());
    node.stores[0] = FaultStore::over(mount(&RecordedDrive::new(older)), None);
    // The rebuild is interrupted twice, before and after it has copied the first objects.
    for objects in [0, 3] {
        node.config = slow.clone();
        node.restart();
        let client = node.client().await;
        while client.status().await.unwrap().rebuild.objects < objects {
            tokio::time::sleep(std::time::Duration::from_millis(2)).await;
        }
        client.close().await;
    }
    node.config = config();
    node.restart();
    let client = node.client().await;
    wait_until_whole(&client).await;
    for lost in 0..3 {
        node.stores[lost].set_down(true);
        let pool = client.pool("pool").unwrap();
        for number in 0..20 {
            let read = pool.object(&format!("o{number}")).unwrap().get().await.unwrap();
            let salt = if number == 0 { 2 } else { 1 };
            assert!(read == data(40_000, salt), "o{number} without target {lost}");
        }
        assert_eq!(pool.list("").collect().await.unwrap().len(), 20, "without target {lost}");
        node.stores[lost].set_down(false);
        client.set_target_out(lost as u32, false).await.unwrap();
        wait_until_whole(&client).await;
    }
}
