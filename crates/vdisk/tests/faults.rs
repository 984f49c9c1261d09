//! Disks under faults: answers are lost, sessions are killed, callers drop their requests, and workers
//! replace each other at any time. The content must agree with a model all the time.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use base::clock::WallClock;
use client::engine::{FaultRates, FaultyEngine, MemEngine, OwnerName};
use client::{Client, Options};
use disk::{BLOCK, Disk};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::time::{sleep, timeout};
use vdisk::{
    AttachOptions, AttachedDisk, CreateOptions, DiskWorker, Disks, Error, OpenSession, SnapshotReader,
};

const MIB: u64 = 1 << 20;
const RATES: FaultRates = FaultRates {
    refuse: 0.03,
    lose_answer: 0.03,
    unknown: 0.05,
    delay: 0.5,
    delay_max: Duration::from_millis(4),
};

/// Counts what happened, so that the test can assert that its faults fired.
#[derive(Debug, Default)]
struct Seen {
    dropped: u64,
    killed: u64,
    fenced_workers: u64,
    uncertain_snapshots: u64,
    merged: u64,
}

struct World {
    client: Client,
    disks: Disks,
    open_session: OpenSession,
    model: Vec<u8>,
    snapshots: BTreeMap<String, Vec<u8>>,
    seen: Seen,
}

impl World {
    async fn new(seed: u64) -> World {
        let root = Arc::new(MemEngine::new());
        let client = Client::over(Arc::clone(&root) as _, Options::default());
        client.create_pool("pool").await.unwrap();
        let disks = Disks::open(&client, "pool", WallClock::default()).unwrap();
        let next = AtomicU64::new(seed << 32);
        let open_session: OpenSession = Arc::new(move || {
            let engine =
                FaultyEngine::new(Arc::new(root.sibling()), RATES, next.fetch_add(1, Ordering::Relaxed));
            let client = Client::over(Arc::new(engine), Options::default());
            Box::pin(async move { Ok(client) })
        });
        let options = CreateOptions { size: 3 * MIB, chunk: MIB };
        disks.create("vm", options).await.unwrap();
        let model = vec![0; options.size as usize];
        World { client, disks, open_session, model, snapshots: BTreeMap::new(), seen: Seen::default() }
    }

    async fn attach(&self) -> AttachedDisk {
        loop {
            let options = AttachOptions {
                gateway: "gateway".into(),
                takes_over: false,
                open_session: Arc::clone(&self.open_session),
                clock: WallClock::default(),
            };
            if let Ok(disk) = AttachedDisk::attach("pool", "vm", options).await {
                return disk;
            }
        }
    }

    /// Fences the session of the disk's owner, as an operator does who kills it.
    async fn kill_session(&self) {
        let header = self.disks.stat("vm").await.unwrap();
        let owner = header.owner.expect("the disk is attached").name;
        self.client.fence(&OwnerName::from_bytes(owner).unwrap()).await.unwrap();
    }

    /// Does upkeep until there is no more work.
    async fn upkeep(&self) -> u64 {
        let worker = DiskWorker { gateway: "gateway".into(), open_session: Arc::clone(&self.open_session) };
        let mut failed = 0;
        loop {
            match self.disks.upkeep(&worker).await {
                Ok(false) => return failed,
                Ok(true) => {}
                Err(_) => failed += 1,
            }
        }
    }

    async fn change(&mut self, disk: &AttachedDisk, rng: &mut StdRng) {
        let blocks = self.model.len() as u64 / BLOCK;
        let from = rng.random_range(0..blocks);
        let most = if rng.random_bool(0.3) { blocks } else { 20 };
        let len = rng.random_range(1..=(blocks - from).min(most));
        let (offset, len) = (from * BLOCK, len * BLOCK);
        let span = offset as usize..(offset + len) as usize;
        let byte = if rng.random_bool(0.3) { 0 } else { rng.random_range(1..=255) };
        let change = match byte {
            0 => disk.discard(offset, len),
            _ => disk.write(offset, vec![vec![byte; len as usize].into()]),
        };
        let patience = if rng.random_bool(0.2) { Duration::from_millis(2) } else { Duration::MAX };
        match timeout(patience, change).await {
            Ok(done) => {
                done.unwrap();
                self.model[span].fill(byte);
            }
            Err(_) => {
                self.seen.dropped += 1;
                // After this, the change has taken effect or never will.
                disk.quiesce().await;
                let now = disk.read(offset, len).await.unwrap().concat();
                let is_either = |(at, is): (usize, &u8)| *is == byte || *is == self.model[span.start + at];
                assert!(now.iter().enumerate().all(is_either));
                self.model[span].copy_from_slice(&now);
            }
        }
    }

    async fn check(&self, disk: &AttachedDisk, seed: u64) {
        let now = disk.read(0, self.model.len() as u64).await.unwrap().concat();
        let wrong = now.iter().zip(&self.model).position(|(is, was)| is != was);
        assert!(wrong.is_none() && now.len() == self.model.len(), "seed {seed}: byte {wrong:?} is wrong");
    }
}

#[tokio::test(start_paused = true)]
async fn nothing_is_lost_under_faults() {
    let mut seen = Seen::default();
    for seed in 0..25 {
        let one = run(seed).await;
        seen.dropped += one.dropped;
        seen.killed += one.killed;
        seen.fenced_workers += one.fenced_workers;
        seen.uncertain_snapshots += one.uncertain_snapshots;
        seen.merged += one.merged;
    }
    let Seen { dropped, killed, fenced_workers, uncertain_snapshots, merged } = seen;
    assert!(
        [dropped, killed, fenced_workers, uncertain_snapshots, merged].iter().all(|n| *n > 10),
        "{seen:?}"
    );
}

async fn run(seed: u64) -> Seen {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut world = World::new(seed).await;
    let mut disk = world.attach().await;
    for step in 0..120 {
        match rng.random_range(0..20) {
            0..2 => {
                // A snapshot, while the session may be killed.
                let (name, delay) = (format!("s{step}"), Duration::from_millis(rng.random_range(0..12)));
                let kills = rng.random_bool(0.5);
                let kill = async {
                    sleep(delay).await;
                    if kills {
                        world.kill_session().await;
                    }
                };
                let (taken, ()) = tokio::join!(disk.snapshot(&name), kill);
                world.seen.killed += u64::from(kills);
                if taken.is_err() {
                    world.seen.uncertain_snapshots += 1;
                }
                // Requests find out what has happened.
                world.check(&disk, seed).await;
                let header = world.disks.stat("vm").await.unwrap();
                let exists = header.snapshots.iter().any(|one| one.name == name);
                assert!(exists || taken.is_err(), "seed {seed}: a snapshot is missing");
                if exists {
                    world.snapshots.insert(name, world.model.clone());
                }
            }
            2 => {
                world.kill_session().await;
                world.seen.killed += 1;
            }
            3 => {
                if let Some((name, _)) = world.snapshots.pop_first() {
                    world.disks.remove_snapshot(&format!("vm@{name}").parse().unwrap()).await.unwrap();
                    world.seen.merged += 1;
                }
            }
            4 => {
                // Two workers replace each other, while the disk is in use.
                let size = world.model.len() as u64;
                let read = disk.read(0, size);
                let (first, second, read) = tokio::join!(world.upkeep(), world.upkeep(), read);
                world.seen.fenced_workers += first + second;
                assert!(read.unwrap().concat() == world.model, "seed {seed}");
            }
            5 => {
                let size = rng.random_range(1..=4 * MIB / BLOCK) * BLOCK;
                let resized = disk.resize(size, true).await;
                // Requests find out what has happened.
                disk.read(0, BLOCK).await.unwrap();
                let now = world.disks.stat("vm").await.unwrap().size;
                match resized {
                    Ok(()) => assert_eq!(now, size),
                    Err(Error::InUse(_)) => {}
                    Err(_) => assert!(now == size || now == world.model.len() as u64),
                }
                world.model.resize(now as usize, 0);
            }
            6 => {
                // The process ends with a write under way, and another one attaches the disk.
                let (at, len) =
                    (rng.random_range(0..world.model.len() as u64 / BLOCK) * BLOCK, BLOCK as usize);
                let write = disk.write(at, vec![vec![rng.random(); len].into()]);
                let patience = Duration::from_micros(rng.random_range(0..4000));
                drop(timeout(patience, write).await);
                drop(disk);
                disk = world.attach().await;
                // From now on, the write cannot take effect any more.
                let now = disk.read(at, BLOCK).await.unwrap().concat();
                world.model[at as usize..at as usize + len].copy_from_slice(&now);
            }
            7 => {
                drop(disk.detach().await);
                disk = world.attach().await;
            }
            8 => world.check(&disk, seed).await,
            _ => world.change(&disk, &mut rng).await,
        }
    }
    world.check(&disk, seed).await;
    world.upkeep().await;
    world.check(&disk, seed).await;
    for (name, expected) in &world.snapshots {
        let reader =
            SnapshotReader::open(&world.client, &world.disks, &format!("vm@{name}").parse().unwrap())
                .await
                .unwrap();
        let size = reader.snapshot().size;
        assert!(reader.read(0, size).await.unwrap().concat() == *expected, "seed {seed}: snapshot {name}");
    }
    world.seen
}
