//! The conformance suite over the simulated network, which produces random faults from a seed.
//! `OUTBOARD_SEED=… cargo test` repeats a run. The clock is simulated, so simulated hours take only
//! seconds.

#![expect(clippy::print_stdout, reason = "the report of a failed test needs the seeds")]

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use outboard_messenger::conformance::{self, Rig};
use outboard_messenger::transport::faulty::{FaultControl, StreamFaults};
use outboard_messenger::{ConnectOptions, ConnectionConfig, ConnectionEvent, Entropy, Message, SimStack};
use tokio::time::timeout;

const GRACE: Duration = Duration::from_secs(8);

fn rig(faults: StreamFaults, seed: u64) -> (Rig, Arc<FaultControl>) {
    let config =
        ConnectionConfig { entropy: Entropy::seeded(seed), grace: GRACE, ..ConnectionConfig::default() };
    let (stack, control) = SimStack::simulated(seed, faults, config);
    let (cut, freeze) = (Arc::clone(&control), Arc::clone(&control));
    let rig = Rig {
        stack: Arc::new(stack),
        address: "*".into(),
        cut: Box::new(move || cut.cut()),
        freeze: Box::new(move |frozen| freeze.freeze(frozen)),
        grace: GRACE,
        slow: false,
        seed,
    };
    (rig, control)
}

/// Faults of a slow network: only delays. The whole suite runs over this network.
const SLOW: StreamFaults =
    StreamFaults { delay_max: Duration::from_millis(2), piece_max: 20_000, ..StreamFaults::NONE };

/// All kinds of faults together.
const HOSTILE: StreamFaults = StreamFaults {
    delay_max: Duration::from_millis(3),
    piece_max: 30_000,
    break_after_bytes: 800_000,
    stall_one_in: 300,
    stall: Duration::from_secs(3),
    flip_one_in: 400,
    refuse_one_in: 4,
    ignore_one_in: 10,
};

macro_rules! simulated {
    ($check:ident) => {
        #[tokio::test(start_paused = true)]
        async fn $check() {
            let (rig, _) = rig(SLOW, conformance::seed());
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
    let mut fired = [0; 7];
    for seed in first..first + 4 {
        println!("seed {seed}");
        let (rig, control) = rig(HOSTILE, seed);
        let check = conformance::messages_arrive_exactly_once_across_broken_transports(&rig);
        tokio::time::timeout(Duration::from_secs(36_000), check).await.expect("the check hangs");
        let c = &control.counts;
        let counts = [&c.delays, &c.breaks, &c.cuts, &c.stalls, &c.flips, &c.refusals, &c.ignored];
        for (sum, count) in fired.iter_mut().zip(counts) {
            *sum += count.load(Ordering::Relaxed);
        }
    }
    assert!(fired.iter().all(|n| *n > 0), "a kind of fault never occurred: {fired:?}");
}

/// While neither side has outstanding work, the pauses between heartbeats grow, and the loss of the
/// peer is detected late. A side with outstanding work detects the loss within the usual grace
/// period.
#[tokio::test(start_paused = true)]
async fn an_idle_connection_sends_rare_heartbeats_until_work_begins() {
    let (rig, _) = rig(SLOW, conformance::seed());
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

/// Two runs with the same seed have the same number of faults and the same duration.
#[test]
fn the_same_seed_replays_the_same_simulated_run() {
    let run = || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build()
            .expect("a runtime");
        runtime.block_on(async {
            let (rig, control) = rig(HOSTILE, 42);
            let began = tokio::time::Instant::now();
            conformance::messages_arrive_exactly_once_across_broken_transports(&rig).await;
            let c = &control.counts;
            let counts = [&c.delays, &c.breaks, &c.cuts, &c.stalls, &c.flips, &c.refusals, &c.ignored];
            (counts.map(|n| n.load(Ordering::Relaxed)), began.elapsed())
        })
    };
    assert_eq!(run(), run());
}
