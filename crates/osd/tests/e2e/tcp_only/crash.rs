//! Loss of power under pools with redundancy: everything at once stops at any moment, drives keep any part of what was not
//! flushed, and some may not come back.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use client::{Client, Options};
use rand::rngs::StdRng;
use rand::seq::IteratorRandom;
use rand::{Rng, SeedableRng};
use store::simulation::{Crashes, SimDrive, SimStore};
use uuid::Uuid;

use crate::common::{FaultStore, Node, Watch, data, seed};
use crate::redundancy::{config, redundancy};

const SIZE: usize = 12 << 20;
const OBJECTS: usize = 4;
const CHANGES: usize = 12;

/// A moment at which the power may go.
struct Cut {
    /// How much had happened to each drive.
    positions: Vec<usize>,
    /// Changes of each object that had been acknowledged.
    acknowledged: Vec<usize>,
}

/// What has happened.
struct Story {
    images: Vec<Vec<u8>>,
    drives: Vec<Arc<SimDrive>>,
    /// What each object was, after each change; `None`: there was none.
    versions: Vec<Vec<Option<Bytes>>>,
    cuts: Vec<Cut>,
}

/// A pool's targets, new.
fn images(count: usize) -> Vec<Vec<u8>> {
    let format = |n| SimStore::format(vec![0xa5; SIZE], Uuid::from_u128(n as u128 + 1)).unwrap();
    (0..count).map(format).collect()
}

fn drives(images: &[Vec<u8>]) -> Vec<Arc<SimDrive>> {
    images.iter().map(|image| SimDrive::new(image.clone())).collect()
}

/// A node on drives; those that are `lost` are gone before it starts.
fn start(drives: &[Arc<SimDrive>], lost: &[usize], seed: u64, watch: Option<Watch>) -> Node {
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
        // Called on the thread on which all of this happens, so that it is one moment for all drives.
        Arc::new(move || {
            let acknowledged = acknowledged.iter().map(|a| a.load(Ordering::SeqCst)).collect();
            let positions = drives.iter().map(|drive| drive.position()).collect();
            cuts.lock().unwrap().push(Cut { positions, acknowledged });
        })
    };
    let node = start(&drives, &[], seed, Some(watch));
    let client = node.client().await;
    client.create_pool_with("pool", 2, redundancy).await.unwrap();
    // Before that there is nothing to be found.
    cuts.lock().unwrap().clear();
    let histories = (0..OBJECTS).map(|number| change(&client, number, seed, &acknowledged[number]));
    let versions = futures::future::join_all(histories).await;
    let cuts = std::mem::take(&mut *cuts.lock().unwrap());
    drop(node);
    Story { images, drives, versions, cuts }
}

/// Changes one object again and again; returns what it was in between.
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

/// Starts a node on what the drives may hold after a cut, without those that are `lost`, and looks whether all is well; returns
/// how many objects had lost a change that was not acknowledged.
async fn check(story: &Story, images: Vec<Vec<u8>>, cut: &Cut, lost: &[usize], seed: u64) -> usize {
    let node = start(&drives(&images), lost, seed, None);
    let client = node.client_with(Options::default()).await;
    let pool = client.pool("pool").unwrap();
    let mut unfinished = 0;
    for (number, versions) in story.versions.iter().enumerate() {
        let found = match pool.object(&format!("o{number}")).unwrap().get().await {
            Ok(bytes) => Some(bytes),
            Err(e) if e.is_not_found() => None,
            Err(e) => panic!("object {number} without {lost:?}: {e}"),
        };
        let least = cut.acknowledged[number];
        let fits = versions[least..].iter().take(2).position(|version| *version == found);
        let was = versions.iter().rposition(|version| *version == found);
        assert!(fits.is_some(), "object {number} is as after change {was:?}, not {least}; without {lost:?}");
        unfinished += usize::from(fits == Some(0) && least < CHANGES);
    }
    client.start_scrub("pool", false).await.unwrap();
    let scrub = loop {
        let scrub = client.scrub_status("pool").await.unwrap();
        if !scrub.running {
            break scrub;
        }
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    };
    assert_eq!((scrub.inconsistent, scrub.damaged, scrub.failure), (0, 0, None), "a mixed stripe");
    unfinished
}

async fn crash(text: &str, checks: usize) {
    let seed = seed();
    let mut rng = StdRng::seed_from_u64(seed);
    let story = tell(text, seed).await;
    assert!(story.cuts.len() >= OBJECTS * CHANGES, "{} moments", story.cuts.len());
    let tolerates = redundancy(text).tolerates();
    let (mut unfinished, mut checked) = (0, 0);
    // How much is under way at a time depends on the machine; some changes are to be cut off in any case.
    while checked < checks || (unfinished <= 5 && checked < 10 * checks) {
        checked += 1;
        let cut = story.cuts.iter().choose(&mut rng).unwrap();
        let both = story.drives.iter().zip(&story.images).zip(&cut.positions);
        let image = |((drive, image), position): ((&Arc<SimDrive>, &Vec<u8>), &usize)| {
            Crashes::new(drive, image.clone()).image(*position, &mut rng)
        };
        let images: Vec<Vec<u8>> = both.map(image).collect();
        // Of a mirror nobody can tell whether a drive that does not come back has gone on alone.
        let count = if text.starts_with("ec") { rng.random_range(0..=tolerates) } else { 0 };
        let lost = (0..images.len()).choose_multiple(&mut rng, count);
        unfinished += check(&story, images, cut, &lost, seed).await;
    }
    assert!(unfinished > 5, "{checked} crashes have cut off {unfinished} changes");
}

#[tokio::test]
async fn a_loss_of_power_leaves_no_mixed_stripe() {
    crash("ec:4+2", 40).await;
}

#[tokio::test]
async fn a_loss_of_power_leaves_copies_alike() {
    crash("mirror:2", 40).await;
}
