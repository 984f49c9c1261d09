//! Osd and store on one thread in simulated time, joined by a simulated DMA engine and simulated
//! control connections.

mod load;
mod world;

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use base::clock::Instant;
use base::fault::Site;
use channel::sim::{DeviceFailure, EngineFaults, SimEngineStats, WireStats};
use load::Load;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use store::ObjectStore;
use store::conformance::{random_operations, run};
use tokio::sync::oneshot;
use wire::OffloadState;
use world::{Settings, World, simulate};

/// Number of seeds of the test with random faults.
const SEEDS: u64 = 100;

async fn attached(world: &Rc<World>) -> Arc<dyn ObjectStore> {
    world.start_store();
    let (send, attached) = oneshot::channel();
    world.start_osd(async move |attachment| {
        let _ = send.send(attachment.store(0));
    });
    attached.await.expect("the osd attaches")
}

fn settings() -> impl Iterator<Item = Settings> {
    let ms = Duration::from_millis;
    let of = |answer_max, setup_cost, socket_only| Settings {
        answer_max,
        setup_cost,
        socket_only,
        ..Settings::default()
    };
    [of(ms(0), ms(0), false), of(ms(20), ms(3), false), of(ms(20), ms(0), true)].into_iter()
}

#[test]
fn a_proxy_store_passes_the_conformance_suite_in_simulated_time() {
    for settings in settings() {
        simulate(1, settings, async |world| {
            let first = std::cell::Cell::new(true);
            run(|| async {
                if !first.replace(false) {
                    // Each case needs an empty store.
                    world.kill_osd();
                    world.kill_store();
                    world.replace_disks();
                }
                attached(&world).await
            })
            .await;
        });
    }
}

#[test]
fn random_operations_match_the_model_in_simulated_time() {
    for (seed, settings) in settings().enumerate() {
        let trace = || {
            simulate(seed as u64, settings.clone(), async |world| {
                random_operations(attached(&world).await, seed as u64, 400).await;
                world.engine_stats()
            })
        };
        assert_eq!(trace(), trace());
    }
}

#[test]
fn a_stopped_server_ends_its_attachment_and_its_future() {
    simulate(1, Settings::default(), async |world| {
        let _store = attached(&world).await;
        let is_connected = || world.attachment.borrow().as_ref().is_some_and(|a| a.status().connected);
        assert!(is_connected() && world.is_serving.get());
        world.server.borrow().as_ref().expect("a server runs").stop();
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(!is_connected() && !world.is_serving.get());
    });
}

/// What happened in a simulation with random faults.
#[derive(Debug, Clone, Default, PartialEq)]
struct Outcome {
    engine: SimEngineStats,
    wire: WireStats,
    /// How often each event was injected.
    events: BTreeMap<&'static str, u64>,
    acknowledged: u64,
    unknown: u64,
    read: u64,
    recoveries: u64,
    dropped_osd_doorbells: u64,
    ended: Duration,
}

const EVENTS: [&str; 9] = [
    "kill the store",
    "kill the osd",
    "cut connections",
    "hold connections",
    "refuse connections",
    "pause the osd",
    "pause the store",
    "device failure",
    "remount a target",
];

fn faults(rng: &mut StdRng) -> EngineFaults {
    if rng.random_bool(0.2) {
        return EngineFaults::default();
    }
    let mut rate = |most: f64| if rng.random_bool(0.5) { rng.random_range(0.0..most) } else { 0.0 };
    EngineFaults {
        fail: rate(0.02),
        stall: rate(0.2),
        stall_max: Duration::from_secs_f64(0.5 + rate(10.0)),
        corrupt: rate(0.02),
        drop_doorbell: rate(0.02),
        device: rate(0.002),
        min_len: if rng.random_bool(0.3) { 32 << 10 } else { 0 },
    }
}

async fn inject(world: &Rc<World>, load: &Rc<Load>, event: &'static str, rng: &mut StdRng) {
    let mut up_to = |seconds: f64| Duration::from_secs_f64(rng.random_range(0.0..seconds));
    match event {
        "kill the store" => {
            world.kill_store();
            tokio::time::sleep(up_to(3.0)).await;
            world.start_store();
        }
        "kill the osd" => {
            world.kill_osd();
            load.abandon();
            tokio::time::sleep(up_to(3.0)).await;
            load.start(world);
        }
        "cut connections" => world.wire.cut(),
        "hold connections" => {
            world.wire.hold(true);
            tokio::time::sleep(up_to(10.0)).await;
            world.wire.hold(false);
        }
        "refuse connections" => {
            world.wire.refuse(true);
            world.wire.cut();
            tokio::time::sleep(up_to(5.0)).await;
            world.wire.refuse(false);
        }
        "pause the osd" | "pause the store" => {
            let length = up_to(60.0);
            let role = if event == "pause the osd" { &world.osd } else { &world.store };
            role.pause(length);
            tokio::time::sleep(length).await;
        }
        "device failure" => {
            let hangs = rng.random_bool(0.5);
            world.engine().fail_device(if hangs { DeviceFailure::Hangs } else { DeviceFailure::Fails });
        }
        "remount a target" => {
            let target = rng.random_range(0..world::TARGETS);
            let server = world.server.borrow();
            server.as_ref().expect("a server runs").replace(World::uuid(target), &world.slow_store(target));
        }
        _ => unreachable!("{event} is not an event"),
    }
}

/// Runs a load with random faults, and checks that nothing acknowledged is lost and that the service
/// comes back.
fn with_faults(seed: u64) -> Outcome {
    let mut rng = StdRng::seed_from_u64(seed);
    let settings = Settings {
        overdue: Duration::from_millis(500),
        faults: faults(&mut rng),
        answer_max: Duration::from_millis(rng.random_range(0..200)),
        reads_late: true,
        // A long cool-down gives late transfers time to hit memory that was given up.
        cool_down: Duration::from_secs_f64(rng.random_range(0.1..10.0)),
        setup_cost: if rng.random_bool(0.2) { Duration::from_millis(3) } else { Duration::ZERO },
        socket_only: false,
        poll: if rng.random_bool(0.5) { Duration::from_micros(100) } else { Duration::ZERO },
        drop_osd_doorbell: if rng.random_bool(0.5) { 0.02 } else { 0.0 },
        late_doorbell: if rng.random_bool(0.3) { 0.03 } else { 0.0 },
    };
    simulate(seed, settings, async move |world| {
        let began = Instant::now();
        let load = Load::new(Duration::from_millis(600));
        world.start_store();
        load.start(&world);
        let mut events = BTreeMap::new();
        for _ in 0..rng.random_range(3..10) {
            tokio::time::sleep(Duration::from_secs_f64(rng.random_range(0.0..3.0))).await;
            let event = EVENTS[rng.random_range(0..EVENTS.len())];
            *events.entry(event).or_default() += 1;
            inject(&world, &load, event, &mut rng).await;
        }
        world.engine().set_faults(EngineFaults::default());
        let dropped_osd_doorbells = world.store_faults.fired(Site::StoreDoorbell);
        world.store_faults.clear();
        let healed = Instant::now();
        let (before, is_back) = (load.acknowledged(), |world: &World| {
            let attachment = world.attachment.borrow();
            attachment.as_ref().is_some_and(|attachment| {
                let status = attachment.status();
                let offload = &status.offload;
                status.connected
                    && offload.health.state == OffloadState::Active
                    && offload.quarantined_bytes == 0
            })
        });
        while !is_back(&world) || load.acknowledged() < before + 20 {
            assert!(
                healed.elapsed() < Duration::from_secs(120),
                "seed {seed}: the service did not come back: {:?} {:?}",
                world.attachment.borrow().as_ref().map(outboard_proxy::Attachment::status),
                world.server.borrow().as_ref().map(outboard_proxy::LocalServer::status),
            );
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        load.stop().await;
        load.check(&world).await;
        let recoveries = world.attachment.borrow().as_ref().map(|a| a.status().offload.health.recoveries);
        Outcome {
            engine: world.engine_stats(),
            wire: world.wire.stats(),
            events,
            acknowledged: load.acknowledged(),
            unknown: load.unknown(),
            read: load.read(),
            recoveries: recoveries.unwrap_or(0),
            dropped_osd_doorbells,
            ended: began.elapsed(),
        }
    })
}

/// Late transfers hit only memory that is in quarantine: neither ranges of host memory nor staging
/// buffers with a new owner.
#[test]
fn late_transfers_hit_no_memory_with_a_new_owner() {
    let (mut late, mut quarantined) = (0, 0);
    for seed in 0..10 {
        // Only payload is late, so several payload transfers are late together.
        let (stall, stall_max, min_len) = (0.5, Duration::from_secs(10), 32 << 10);
        let faults = EngineFaults { stall, stall_max, min_len, ..EngineFaults::default() };
        let settings = Settings {
            faults,
            answer_max: Duration::from_millis(300),
            reads_late: true,
            // Many transfers wait behind a late transfer before it is overdue.
            overdue: Duration::from_secs(2),
            cool_down: Duration::from_secs(8),
            ..Settings::default()
        };
        simulate(seed, settings, async |world| {
            world.start_store();
            let load = Load::new(Duration::from_millis(20));
            load.start(&world);
            for tenth in 0..400 {
                if seed % 2 == 1 && tenth % 30 == 29 {
                    world.wire.cut();
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
                let attachment = world.attachment.borrow();
                let status = attachment.as_ref().map(outboard_proxy::Attachment::status);
                quarantined += status.map_or(0, |status| status.offload.quarantined_bytes);
            }
            late += world.engine_stats().moved_late;
            load.stop().await;
            load.check(&world).await;
        });
    }
    assert!(late > 20 && quarantined > 0, "{late} transfers were late");
}

/// The test prints its seeds, so that a failure can be repeated.
#[test]
#[expect(clippy::print_stdout, reason = "the test harness shows the seeds when the test fails")]
fn nothing_acknowledged_is_lost_and_the_service_comes_back() {
    let first: u64 = std::env::var("OUTBOARD_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(0);
    let mut sum = Outcome::default();
    for seed in first..first + SEEDS {
        println!("OUTBOARD_SEED={seed}");
        let outcome = with_faults(seed);
        if seed % 10 == 0 {
            assert_eq!(outcome, with_faults(seed), "the seed repeats all that happened");
        }
        for (event, count) in outcome.events {
            *sum.events.entry(event).or_default() += count;
        }
        let (of, engine) = (outcome.engine, &mut sum.engine);
        engine.operations += of.operations;
        engine.failed += of.failed;
        engine.stalled += of.stalled;
        engine.moved_late += of.moved_late;
        engine.corrupted += of.corrupted;
        engine.dropped_doorbells += of.dropped_doorbells;
        engine.device_failures += of.device_failures;
        engine.device_hangs += of.device_hangs;
        engine.resets += of.resets;
        sum.wire.refused += outcome.wire.refused;
        sum.wire.cut += outcome.wire.cut;
        sum.wire.severed += outcome.wire.severed;
        sum.wire.held += outcome.wire.held;
        sum.wire.late_doorbells += outcome.wire.late_doorbells;
        sum.dropped_osd_doorbells += outcome.dropped_osd_doorbells;
        sum.acknowledged += outcome.acknowledged;
        sum.unknown += outcome.unknown;
        sum.read += outcome.read;
        sum.recoveries += outcome.recoveries;
    }
    println!("{sum:#?}");
    let SimEngineStats { failed, stalled, moved_late, corrupted, .. } = sum.engine;
    assert!(failed > 0 && stalled > 0 && moved_late > 0 && corrupted > 0);
    let SimEngineStats { dropped_doorbells, device_failures, device_hangs, resets, .. } = sum.engine;
    assert!(dropped_doorbells > 0 && device_failures > 0 && device_hangs > 0 && resets > 0);
    assert!(sum.wire.refused > 0 && sum.wire.cut > 0 && sum.wire.severed > 0);
    assert!(sum.wire.held > 0 && sum.wire.late_doorbells > 0 && sum.dropped_osd_doorbells > 0);
    assert!(EVENTS.iter().all(|event| sum.events.get(event).is_some_and(|count| *count > 0)));
    assert!(sum.acknowledged > 10 * SEEDS && sum.unknown > 0 && sum.read > 0 && sum.recoveries > 0);
}
