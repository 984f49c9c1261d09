//! The conformance suite over the simulated network, which produces random faults from a seed.
//! `OUTBOARD_SEED=… cargo test` repeats a run. The clock is simulated, so simulated hours take only
//! seconds.

#![expect(clippy::print_stdout, reason = "the report of a failed test needs the seeds")]

mod chaos;
mod hosts;
mod packets;

use std::sync::Arc;
use std::time::Duration;

use base::entropy::{SeededThread, seed_this_thread};
use outboard_messenger::conformance::{self, Rig};
use outboard_messenger::transport::sim::{SimFaults, SimNetwork, SimRoute};
use outboard_messenger::{ConnectOptions, ConnectionConfig, ConnectionEvent, Message, SimStack};
use tokio::time::timeout;

const GRACE: Duration = Duration::from_secs(8);

/// Returns the [`Rig::patience`] for a network. If transports stall, many attempts to resume a
/// connection may fail one after the other.
fn patience(faults: &SimFaults) -> Duration {
    if faults.stall_one_in > 0 { 5 * Rig::PATIENCE } else { Rig::PATIENCE }
}

/// Limits of a connection. Both sides keep it for the same time after its transport broke.
fn config(faults: &SimFaults) -> ConnectionConfig {
    ConnectionConfig { grace: GRACE, hold: patience(faults) / 4, ..ConnectionConfig::default() }
}

fn rig(faults: SimFaults, seed: u64) -> (Rig, SimNetwork, SeededThread) {
    let seeded = seed_this_thread(seed);
    let (stack, network) = SimStack::simulated(seed, faults, config(&faults));
    let (cut, freeze) = (network.clone(), network.clone());
    let rig = Rig {
        stack: Arc::new(stack),
        address: "*".into(),
        cut: Box::new(move || cut.break_all()),
        freeze: Box::new(move |frozen| freeze.freeze(frozen)),
        grace: GRACE,
        patience: patience(&faults),
        slow: false,
        seed,
    };
    (rig, network, seeded)
}

const fn jitter(most_ms: u64) -> SimRoute {
    SimRoute { latency: Duration::ZERO, jitter: Duration::from_millis(most_ms), bandwidth: None }
}

/// Faults of a slow network: only delays. The whole suite runs over this network.
const SLOW: SimFaults = SimFaults { route: jitter(2), piece_max: 20_000, ..SimFaults::NONE };

/// All kinds of faults together.
const HOSTILE: SimFaults = SimFaults {
    route: jitter(3),
    piece_max: 30_000,
    break_after_bytes: 800_000,
    stall_one_in: 300,
    stall: Duration::from_secs(6),
    flip_one_in: 400,
    refuse_one_in: 4,
    ignore_one_in: 10,
    ..SimFaults::NONE
};

macro_rules! simulated {
    ($check:ident) => {
        #[tokio::test(start_paused = true)]
        async fn $check() {
            let (rig, _network, _seeded) = rig(SLOW, conformance::seed());
            let check = conformance::$check(&rig);
            tokio::time::timeout(Duration::from_secs(36_000), check).await.expect("the check hangs");
        }
    };
}

outboard_messenger::for_each_conformance_check!(simulated);

/// Runs the check with the most transfers and broken transports on the network with all faults, for
/// several seeds. Every kind of fault must have occurred.
#[tokio::test(start_paused = true)]
async fn messages_arrive_exactly_once_on_a_network_with_all_faults() {
    let first = conformance::seed();
    let mut fired = std::collections::BTreeMap::new();
    for seed in first..first + 4 {
        println!("seed {seed}");
        let (rig, network, _seeded) = rig(HOSTILE, seed);
        let check = conformance::messages_arrive_exactly_once_across_broken_transports(&rig);
        tokio::time::timeout(Duration::from_secs(36_000), check).await.expect("the check hangs");
        for (name, count) in network.counts().all() {
            *fired.entry(name).or_insert(0) += count;
        }
    }
    let kinds = ["delays", "stalls", "breaks", "half_breaks", "cuts", "flips", "refusals", "ignored", "late"];
    fired.retain(|name, _| kinds.contains(name));
    assert!(fired.values().all(|n| *n > 0), "a kind of fault never occurred: {fired:?}");
}

/// While neither side has outstanding work, the pauses between heartbeats grow, and the loss of the
/// peer is detected late. A side with outstanding work detects the loss within the usual grace
/// period.
#[tokio::test(start_paused = true)]
async fn an_idle_connection_sends_rare_heartbeats_until_work_begins() {
    let (rig, _network, _seeded) = rig(SLOW, conformance::seed());
    let rest = ConnectionConfig::default().rest;
    let mut listener = rig.listen().await;
    let endpoint = listener.endpoint();
    let (client, server) =
        tokio::join!(rig.stack.connect(&endpoint, ConnectOptions::default()), listener.accept());
    let ((client, mut from_server), (_server, mut from_client)) = (client.unwrap(), server.unwrap());
    for wants in [true, false] {
        let idle = timeout(20 * rest, from_server.next()).await;
        assert!(idle.is_err(), "an idle connection reported {idle:?}");
        (rig.freeze)(true);
        let still = timeout(2 * GRACE, from_server.next()).await;
        assert!(still.is_err(), "the silence was detected too early: {still:?}");
        let most = if wants {
            client.send(Message::default()).await.unwrap();
            GRACE + 2 * ConnectionConfig::default().heartbeat
        } else {
            2 * rest + GRACE
        };
        let event = timeout(most, from_server.next()).await;
        assert!(matches!(event, Ok(ConnectionEvent::Interrupted)), "{event:?}, wants: {wants}");
        (rig.freeze)(false);
        assert!(matches!(from_server.next().await, ConnectionEvent::Resumed));
    }
    loop {
        match from_client.next().await {
            ConnectionEvent::Message(message) => break assert_eq!(message, Message::default()),
            ConnectionEvent::Interrupted | ConnectionEvent::Resumed => {}
            ConnectionEvent::Lost(why) => panic!("{why}"),
        }
    }
}

/// Two runs with the same seed deliver the same data at the same times.
#[test]
fn the_same_seed_replays_the_same_simulated_run() {
    let run = || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .expect("a runtime");
        runtime.block_on(async {
            let (rig, network, _seeded) = rig(HOSTILE, 42);
            conformance::messages_arrive_exactly_once_across_broken_transports(&rig).await;
            (network.trace(), network.counts().all())
        })
    };
    assert_eq!(run(), run());
}
