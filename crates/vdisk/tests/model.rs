//! Compares disks with a model: random requests, snapshots, clones, removals, changes of size and
//! takeovers.

use std::collections::BTreeMap;
use std::sync::Arc;

use base::clock::WallClock;
use bytes::Bytes;
use client::engine::MemEngine;
use client::{Client, Options};
use disk::{BLOCK, Disk, DiskError};
use futures::future::join_all;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use vdisk::{
    AttachOptions, AttachedDisk, CreateOptions, DiskWorker, Disks, Error, OpenSession, SnapshotReader,
};

const MIB: u64 = 1 << 20;

/// Storage in memory, and sessions of it.
struct World {
    root: Arc<MemEngine>,
    disks: Disks,
}

impl World {
    async fn new() -> World {
        let root = Arc::new(MemEngine::new());
        let client = Client::over(Arc::clone(&root) as _, Options::default());
        client.create_pool("pool").await.unwrap();
        let disks = Disks::open(&client, "pool", WallClock::default()).unwrap();
        World { root, disks }
    }

    fn open_session(&self) -> OpenSession {
        let root = Arc::clone(&self.root);
        Arc::new(move || {
            let client = Client::over(Arc::new(root.sibling()), Options::default());
            Box::pin(async move { Ok(client) })
        })
    }

    fn options(&self, gateway: &str, takes_over: bool) -> AttachOptions {
        let (gateway, open_session) = (gateway.to_owned(), self.open_session());
        AttachOptions { gateway, takes_over, open_session, clock: WallClock::default() }
    }

    fn worker(&self, gateway: &str) -> DiskWorker {
        DiskWorker { gateway: gateway.to_owned(), open_session: self.open_session() }
    }

    /// Repeats a change of a disk after the work that it must wait for.
    async fn after_upkeep(&self, change: impl AsyncFn() -> vdisk::Result<()>) {
        match change().await {
            Err(Error::InUse(_)) => {
                self.disks.upkeep(&self.worker("gateway")).await.unwrap();
                change().await.unwrap();
            }
            changed => changed.unwrap(),
        }
    }

    async fn attach(&self, name: &str) -> AttachedDisk {
        AttachedDisk::attach("pool", name, self.options("gateway", false)).await.unwrap()
    }

    async fn snapshot_reader(&self, of: &str) -> vdisk::Result<SnapshotReader> {
        let client = Client::over(Arc::clone(&self.root) as _, Options::default());
        SnapshotReader::open(&client, &self.disks, &of.parse().unwrap()).await
    }

    async fn objects(&self) -> Vec<String> {
        let client = Client::over(Arc::clone(&self.root) as _, Options::default());
        let pool = client.pool("pool").unwrap().namespace(vdisk::NAMESPACE).unwrap();
        let mut names: Vec<String> =
            pool.list("").collect().await.unwrap().iter().map(|name| name.object().to_owned()).collect();
        names.sort();
        names
    }
}

async fn content(disk: &AttachedDisk) -> Vec<u8> {
    let size = *disk.size().borrow();
    disk.read(0, size).await.unwrap().concat()
}

/// A disk of the model: its content and its snapshots.
#[derive(Clone, Default)]
struct ModelDisk {
    content: Vec<u8>,
    snapshots: BTreeMap<String, Vec<u8>>,
    /// The disk and snapshot of which it is a clone.
    parent: Option<(String, String)>,
}

fn filled(rng: &mut StdRng, len: usize) -> Bytes {
    let byte = rng.random_range(1..=255);
    vec![byte; len].into()
}

/// Returns a random range of whole blocks.
fn range(rng: &mut StdRng, size: u64) -> (u64, u64) {
    let blocks = size / BLOCK;
    let from = rng.random_range(0..blocks);
    let most = if rng.random_bool(0.3) { blocks } else { 40 };
    let len = rng.random_range(1..=(blocks - from).min(most));
    match rng.random_bool(0.2) {
        // Whole chunks.
        true => (
            from * BLOCK / MIB * MIB,
            (len * BLOCK).next_multiple_of(MIB).min(size - from * BLOCK / MIB * MIB),
        ),
        false => (from * BLOCK, len * BLOCK),
    }
}

async fn random_requests(disk: &AttachedDisk, model: &mut ModelDisk, rng: &mut StdRng) {
    let size = model.content.len() as u64;
    let (offset, len) = range(rng, size);
    let span = offset as usize..(offset + len) as usize;
    match rng.random_range(0..10) {
        0..4 => {
            let data = filled(rng, len as usize);
            let cut = rng.random_range(0..=len / BLOCK) * BLOCK;
            let pieces = vec![data.slice(..cut as usize), data.slice(cut as usize..)];
            disk.write(offset, pieces).await.unwrap();
            model.content[span].copy_from_slice(&data);
        }
        4..6 => {
            match rng.random_bool(0.5) {
                true => disk.discard(offset, len).await.unwrap(),
                false => disk.write_zeroes(offset, len, rng.random_bool(0.5)).await.unwrap(),
            }
            model.content[span].fill(0);
        }
        6 => {
            let extents = disk.extents(offset, len).await.unwrap();
            let mut at = offset as usize;
            for extent in &extents {
                let end = at + extent.len as usize;
                let is_zero = model.content[at..end].iter().all(|byte| *byte == 0);
                assert!(extent.has_data || is_zero, "a hole has data: {extents:?}");
                at = end;
            }
            assert!(at as u64 >= (offset + len).min((offset / MIB + 1) * MIB));
        }
        _ => {
            let read = disk.read(offset, len).await.unwrap().concat();
            assert!(read == model.content[span], "{offset} + {len}");
        }
    }
}

#[tokio::test]
async fn random_operations_agree_with_the_model() {
    for seed in 0..30 {
        random_operations(seed).await;
    }
}

async fn random_operations(seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    let world = World::new().await;
    let mut models: BTreeMap<String, ModelDisk> = BTreeMap::new();
    let mut attached: BTreeMap<String, AttachedDisk> = BTreeMap::new();
    let options = CreateOptions { size: 3 * MIB + 1536, chunk: MIB };
    world.disks.create("d0", options).await.unwrap();
    models.insert("d0".into(), ModelDisk { content: vec![0; options.size as usize], ..ModelDisk::default() });
    for step in 0..150 {
        let names: Vec<String> = models.keys().cloned().collect();
        let name = names[rng.random_range(0..names.len())].clone();
        let count = models.len();
        let model = models.get_mut(&name).unwrap();
        match rng.random_range(0..100) {
            // A new attachment takes the disk over; the old one is fenced.
            0..6 => {
                let new = world.attach(&name).await;
                if let Some(old) = attached.insert(name.clone(), new)
                    && let Err(e) = old.write(0, vec![vec![9; 512].into()]).await
                {
                    assert!(matches!(e, DiskError::Detached(_)), "{e}");
                } else if let Some(new) = attached.get(&name) {
                    model.content = content(new).await;
                }
            }
            6..9 => {
                if let Some(disk) = attached.remove(&name) {
                    disk.detach().await.unwrap();
                }
            }
            9..14 => {
                let snapshot = format!("s{step}");
                let full = format!("{name}@{snapshot}").parse().unwrap();
                let take = async || match attached.get(&name) {
                    Some(disk) => disk.snapshot(&snapshot).await,
                    None => world.disks.snapshot(&full).await,
                };
                world.after_upkeep(take).await;
                model.snapshots.insert(snapshot, model.content.clone());
            }
            14..18 => {
                let Some((snapshot, content)) = model.snapshots.iter().next_back() else { continue };
                let (of, clone) = (format!("{name}@{snapshot}"), format!("d{step}"));
                let parent = Some((name.clone(), snapshot.clone()));
                let new = ModelDisk { content: content.clone(), parent, ..ModelDisk::default() };
                world.disks.clone_snapshot(&of.parse().unwrap(), &clone).await.unwrap();
                models.insert(clone, new);
            }
            18..23 => {
                let keys: Vec<String> = model.snapshots.keys().cloned().collect();
                if keys.is_empty() {
                    continue;
                }
                let snapshot = keys[rng.random_range(0..keys.len())].clone();
                let is_used = models.values().any(|m| m.parent == Some((name.clone(), snapshot.clone())));
                let removed =
                    world.disks.remove_snapshot(&format!("{name}@{snapshot}").parse().unwrap()).await;
                match removed {
                    Err(Error::InUse(_)) => assert!(is_used, "{name}@{snapshot} has no clones"),
                    removed => {
                        removed.unwrap();
                        assert!(!is_used);
                        models.get_mut(&name).unwrap().snapshots.remove(&snapshot);
                    }
                }
            }
            23..25 => {
                if model.parent.is_some() {
                    world.disks.flatten(&name).await.unwrap();
                    // It is a clone until the upkeep has ended.
                    world.disks.upkeep(&world.worker("gateway")).await.unwrap();
                    models.get_mut(&name).unwrap().parent = None;
                }
            }
            25..29 => {
                let size = rng.random_range(1..=5 * MIB / BLOCK) * BLOCK;
                let shrinks = size < model.content.len() as u64;
                let resize = async || match attached.get(&name) {
                    Some(disk) => disk.resize(size, shrinks).await,
                    None => world.disks.resize(&name, size, shrinks).await,
                };
                world.after_upkeep(resize).await;
                model.content.resize(size as usize, 0);
            }
            29..33 => assert!(world.disks.upkeep(&world.worker("gateway")).await.is_ok()),
            33..35 if count > 1 => {
                let removed = world.disks.remove(&name, true).await;
                match (attached.contains_key(&name), removed) {
                    (true, removed) => assert!(matches!(removed, Err(Error::Attached { .. })), "{removed:?}"),
                    (false, Err(Error::InUse(_))) => {
                        let is_used =
                            |m: &ModelDisk| m.parent.as_ref().is_some_and(|(disk, _)| *disk == name);
                        assert!(models.values().any(is_used));
                    }
                    (false, removed) => {
                        removed.unwrap();
                        models.remove(&name);
                    }
                }
            }
            _ => {
                let disk = match attached.get(&name) {
                    Some(disk) => disk.clone(),
                    None => attached.entry(name.clone()).or_insert(world.attach(&name).await).clone(),
                };
                random_requests(&disk, model, &mut rng).await;
            }
        }
    }
    for disk in attached.values() {
        disk.detach().await.unwrap();
    }
    check_all(&world, &models, seed).await;
    world.disks.upkeep(&world.worker("gateway")).await.unwrap();
    check_all(&world, &models, seed).await;
    remove_all(&world, &models, seed).await;
}

/// Compares all disks and snapshots with the model.
async fn check_all(world: &World, models: &BTreeMap<String, ModelDisk>, seed: u64) {
    for (name, model) in models {
        let disk = world.attach(name).await;
        assert!(content(&disk).await == model.content, "seed {seed}: disk {name}");
        disk.detach().await.unwrap();
        let header = world.disks.stat(name).await.unwrap();
        for (snapshot, expected) in &model.snapshots {
            check_reader(world, &format!("{name}@{snapshot}"), expected, seed).await;
            let clone = format!("{name}-{snapshot}");
            world.disks.clone_snapshot(&format!("{name}@{snapshot}").parse().unwrap(), &clone).await.unwrap();
            let disk = world.attach(&clone).await;
            assert!(content(&disk).await == *expected, "seed {seed}: snapshot {name}@{snapshot}, {header:?}");
            disk.detach().await.unwrap();
            world.disks.remove(&clone, false).await.unwrap();
        }
    }
    world.disks.upkeep(&world.worker("gateway")).await.unwrap();
}

/// Compares what a reader of a snapshot returns with the model: all bytes, a random range, and the extents.
async fn check_reader(world: &World, of: &str, expected: &[u8], seed: u64) {
    let reader = world.snapshot_reader(of).await.unwrap();
    let size = reader.snapshot().size;
    assert_eq!(size, expected.len() as u64, "seed {seed}: {of}");
    assert!(reader.read(0, size).await.unwrap().concat() == expected, "seed {seed}: {of}");
    let (offset, len) = range(&mut StdRng::seed_from_u64(seed), size);
    let span = offset as usize..(offset + len) as usize;
    let read = reader.read(offset, len).await.unwrap().concat();
    assert!(read == expected[span], "seed {seed}: {of} at {offset} + {len}");
    let mut at = offset as usize;
    for extent in reader.extents(offset, len).await.unwrap() {
        let end = at + extent.len as usize;
        let is_zero = expected[at..end].iter().all(|byte| *byte == 0);
        assert!(extent.has_data || is_zero, "seed {seed}: a hole of {of} has data");
        at = end;
    }
    assert_eq!(at as u64, offset + len, "seed {seed}: the extents cover the range");
    reader.check().await.unwrap();
}

/// Removes all disks. No object but the directory must remain.
async fn remove_all(world: &World, models: &BTreeMap<String, ModelDisk>, seed: u64) {
    let mut left: Vec<&String> = models.keys().collect();
    for _ in 0..100 {
        let mut kept = Vec::new();
        for name in left {
            match world.disks.remove(name, true).await {
                Ok(()) => {}
                Err(Error::InUse(_)) => kept.push(name),
                Err(e) => panic!("{e}"),
            }
        }
        world.disks.upkeep(&world.worker("gateway")).await.unwrap();
        left = kept;
        if left.is_empty() {
            break;
        }
    }
    assert_eq!(world.objects().await, ["directory"], "seed {seed}");
}

#[tokio::test]
async fn a_disk_of_another_gateway_is_attached_only_by_force() {
    let world = World::new().await;
    world.disks.create("vm", CreateOptions::of_size(MIB)).await.unwrap();
    let first = world.attach("vm").await;
    let other = |takes_over| AttachedDisk::attach("pool", "vm", world.options("other", takes_over));
    let refused = other(false).await.unwrap_err();
    assert!(matches!(&refused, Error::Attached { owner, .. } if owner == "gateway"), "{refused}");
    first.write(0, vec![vec![1; 512].into()]).await.unwrap();
    let second = other(true).await.unwrap();
    let fenced = first.write(0, vec![vec![2; 512].into()]).await.unwrap_err();
    assert!(matches!(fenced, DiskError::Detached(_)), "{fenced}");
    assert!(first.snapshot("s").await.is_err() && first.end().is_some());
    assert_eq!(second.read(0, 512).await.unwrap().concat(), [1; 512]);
    second.detach().await.unwrap();
    assert!(second.read(0, 512).await.is_err());
    assert!(world.disks.stat("vm").await.unwrap().owner.is_none());
}

#[tokio::test]
async fn snapshots_are_atomic_with_respect_to_requests_in_progress() {
    let world = World::new().await;
    world.disks.create("vm", CreateOptions { size: 2 * MIB, chunk: MIB }).await.unwrap();
    let disk = world.attach("vm").await;
    for round in 0..20_u8 {
        let writes = (0..8_u64).map(|block| disk.write(block * 512, vec![vec![round; 512].into()]));
        let name = format!("s{round}");
        let (written, taken) = tokio::join!(join_all(writes), disk.snapshot(&name));
        taken.unwrap();
        written.into_iter().for_each(|written| written.unwrap());
    }
    assert_eq!(world.disks.stat("vm").await.unwrap().snapshots.len(), 20);
    let taken = disk.snapshot("s3").await.unwrap_err();
    assert!(matches!(taken, Error::Exists(_)), "{taken}");
}

#[tokio::test]
async fn a_disk_that_was_not_completely_created_can_be_created_again() {
    let world = World::new().await;
    world.disks.create("vm", CreateOptions::of_size(MIB)).await.unwrap();
    let client = Client::over(Arc::clone(&world.root) as _, Options::default());
    let pool = client.pool("pool").unwrap().namespace(vdisk::NAMESPACE).unwrap();
    pool.object("header/1").unwrap().remove().await.unwrap();
    // The entry of disk 1, whose creation is not complete.
    let entry = (Bytes::from("n/vm"), Bytes::from_static(&[1, 0]));
    pool.object("directory").unwrap().omap_set(vec![entry]).await.unwrap();
    assert!(matches!(world.disks.stat("vm").await, Err(Error::NoSuchDisk(_))));
    assert!(world.disks.list().await.unwrap().is_empty());
    world.disks.create("vm", CreateOptions::of_size(2 * MIB)).await.unwrap();
    assert_eq!(world.disks.stat("vm").await.unwrap().size, 2 * MIB);
    let again = world.disks.create("vm", CreateOptions::of_size(MIB)).await.unwrap_err();
    assert!(matches!(again, Error::Exists(_)), "{again}");
    for (name, size, chunk) in
        [("/", MIB, MIB), ("x", 100, MIB), ("x", 0, MIB), ("x", MIB, 100), ("x", 1 << 50, MIB)]
    {
        let refused = world.disks.create(name, CreateOptions { size, chunk }).await.unwrap_err();
        assert!(matches!(refused, Error::Argument(_)), "{refused}");
    }
}

#[tokio::test]
async fn a_snapshot_is_read_while_its_disk_is_attached_and_changes() {
    let world = World::new().await;
    world.disks.create("vm", CreateOptions { size: 3 * MIB, chunk: MIB }).await.unwrap();
    let disk = world.attach("vm").await;
    disk.write(0, vec![vec![1; 4096].into()]).await.unwrap();
    disk.snapshot("old").await.unwrap();
    disk.write(MIB, vec![vec![2; 4096].into()]).await.unwrap();
    disk.snapshot("new").await.unwrap();
    disk.write(0, vec![vec![3; 8192].into()]).await.unwrap();
    let reader = world.snapshot_reader("vm@new").await.unwrap();
    let first = reader.read(0, 8192).await.unwrap().concat();
    assert!(first[..4096] == [1; 4096] && first[4096..] == [0; 4096]);
    let extents = reader.extents(0, 3 * MIB).await.unwrap();
    let shape: Vec<_> = extents.iter().map(|extent| (extent.len, extent.has_data)).collect();
    let (block, hole) = ((4096, true), (MIB - 4096, false));
    assert_eq!(shape, [block, hole, block, (hole.0 + MIB, false)]);
    let outside = reader.read(3 * MIB, 512).await.unwrap_err();
    assert!(matches!(outside, DiskError::OutOfRange { .. }), "{outside}");
    // The removal of the older snapshot moves its chunks.
    world.disks.remove_snapshot(&"vm@old".parse().unwrap()).await.unwrap();
    world.disks.upkeep(&world.worker("gateway")).await.unwrap();
    assert!(reader.read(0, 8192).await.unwrap().concat() == first);
    assert_eq!(reader.extents(0, 3 * MIB).await.unwrap(), extents);
    reader.check().await.unwrap();
    disk.detach().await.unwrap();
}

#[tokio::test]
async fn a_reader_notices_that_its_snapshot_was_removed_or_replaced() {
    let world = World::new().await;
    world.disks.create("vm", CreateOptions { size: MIB, chunk: MIB }).await.unwrap();
    let missing = world.snapshot_reader("vm@s").await.unwrap_err();
    assert!(matches!(missing, Error::NoSuchSnapshot { .. }), "{missing}");
    let snapshot = "vm@s".parse().unwrap();
    world.disks.snapshot(&snapshot).await.unwrap();
    let reader = world.snapshot_reader("vm@s").await.unwrap();
    world.disks.remove_snapshot(&snapshot).await.unwrap();
    assert!(matches!(reader.check().await, Err(Error::NoSuchSnapshot { .. })));
    world.disks.upkeep(&world.worker("gateway")).await.unwrap();
    world.disks.snapshot(&snapshot).await.unwrap();
    assert!(matches!(reader.check().await, Err(Error::NoSuchSnapshot { .. })));
    world.disks.remove("vm", true).await.unwrap();
    assert!(matches!(reader.check().await, Err(Error::NoSuchDisk(_))));
}

#[tokio::test]
async fn the_epoch_changes_with_each_attachment_and_when_a_disk_becomes_smaller() {
    let world = World::new().await;
    world.disks.create("vm", CreateOptions { size: 2 * MIB, chunk: MIB }).await.unwrap();
    let disk = world.attach("vm").await;
    let epoch = async || world.disks.stat("vm").await.unwrap().epoch;
    assert_eq!(disk.epoch(), epoch().await);
    disk.detach().await.unwrap();
    assert_eq!(disk.epoch(), epoch().await);
    world.disks.resize("vm", 3 * MIB, false).await.unwrap();
    assert_eq!(disk.epoch(), epoch().await);
    world.disks.resize("vm", MIB, true).await.unwrap();
    assert_ne!(disk.epoch(), epoch().await);
}
