//! The conformance suite over simulated packets and one-sided transfers, and faults of links.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use base::entropy::{SeededThread, seed_this_thread};
use futures::future::LocalBoxFuture;
use outboard_messenger::conformance::{self, Rig};
use outboard_messenger::transport::sim::{SimFaults, SimNetwork};
use outboard_messenger::{ConnectOptions, ConnectionEvent, Message, NetworkStack};

use super::{GRACE, HOSTILE, SLOW, config, patience};

/// Which transports a stack uses.
#[derive(Debug, Clone, Copy)]
enum Kind {
    /// Packets, except at the start of a connection and immediately after a failure of its link.
    Packets,
    /// Packets if possible; streams for 2 s after a failure.
    Both,
}

fn rig(kind: Kind, faults: SimFaults, seed: u64) -> (Rig, SimNetwork, SeededThread) {
    let seeded = seed_this_thread(seed);
    let network = SimNetwork::new(seed, faults);
    let host = network.host("host");
    let stack: Arc<dyn NetworkStack> = match kind {
        Kind::Packets => Arc::new(host.stack_with_packets(config(&faults), Duration::from_millis(1), false)),
        Kind::Both => Arc::new(host.stack_with_packets(config(&faults), Duration::from_secs(2), false)),
    };
    let (cut, freeze) = (network.clone(), network.clone());
    let rig = Rig {
        stack,
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

/// Runs a check on a runtime with simulated time. Returns the trace and the counters.
fn run(kind: Kind, faults: SimFaults, seed: u64, check: AsyncCheck) -> (u64, Vec<(&'static str, u64)>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        let (rig, network, _seeded) = rig(kind, faults, seed);
        let check = check(&rig);
        tokio::time::timeout(Duration::from_secs(36_000), check).await.expect("the check hangs");
        (network.trace(), network.counts().all())
    })
}

type AsyncCheck = for<'a> fn(&'a Rig) -> LocalBoxFuture<'a, ()>;

macro_rules! over_packets {
    ($check:ident) => {
        #[test]
        fn $check() {
            super::run(super::Kind::Packets, super::SLOW, super::conformance::seed(), |rig| {
                Box::pin(super::conformance::$check(rig))
            });
        }
    };
}

mod mostly_packets {
    outboard_messenger::for_each_conformance_check!(over_packets);
}

macro_rules! over_both {
    ($check:ident) => {
        #[test]
        fn $check() {
            super::run(super::Kind::Both, super::SLOW, super::conformance::seed(), |rig| {
                Box::pin(super::conformance::$check(rig))
            });
        }
    };
}

mod both {
    outboard_messenger::for_each_conformance_check!(over_both);
}

/// All kinds of faults of links together.
const HARSH: SimFaults = SimFaults {
    break_after_bytes: 2_000_000,
    lose_one_in: 200,
    report_late_one_in: 100,
    refuse_memory_one_in: 5,
    flip_one_in: 1000,
    ..HOSTILE
};

/// The faults of [`HARSH`], so rarely that transfers with a deadline can end in time.
pub(crate) const MODERATE: SimFaults = SimFaults {
    break_after_bytes: 20_000_000,
    stall: Duration::from_secs(1),
    flip_one_in: 3000,
    ignore_one_in: 0,
    ..HARSH
};

/// The checks with the most transfers and broken transports.
const CHECKS: [(SimFaults, AsyncCheck); 4] = [
    (HARSH, |rig| Box::pin(conformance::messages_arrive_exactly_once_across_broken_transports(rig))),
    (HARSH, |rig| Box::pin(conformance::pushes_survive_broken_transports(rig))),
    (MODERATE, |rig| Box::pin(conformance::concurrent_transfers_and_messages_all_complete(rig))),
    (MODERATE, |rig| Box::pin(conformance::cancelled_pulls_never_write_to_reused_buffers(rig))),
];

/// Kinds of faults that are too rare for [`data_survives_all_faults_of_links`].
const RARE: [&str; 5] = ["held", "given_up", "withdrawn_accesses", "not_ready", "refused_operations"];

/// Runs the checks on a network with all faults, for several seeds (`OUTBOARD_SEEDS`, at least 4),
/// and for up to 12 more until each kind of fault has occurred.
#[test]
fn data_survives_all_faults_of_links() {
    let seeds: u64 = std::env::var("OUTBOARD_SEEDS").map_or(4, |n| n.parse().expect("a number")).max(4);
    let first = conformance::seed();
    let mut fired = BTreeMap::new();
    let has_occurred = |(name, count): (&&str, &u64)| *count > 0 || RARE.contains(name);
    for seed in first..first + seeds + 12 {
        if seed >= first + seeds
            && fired.iter().all(|(name, count)| *name == "released_accesses" || has_occurred((name, count)))
        {
            break;
        }
        for kind in [Kind::Packets, Kind::Both] {
            for (at, (faults, check)) in CHECKS.into_iter().enumerate() {
                println!("seed {seed}, {kind:?}, check {at}");
                for (name, count) in run(kind, faults, seed, check).1 {
                    *fired.entry(name).or_insert(0) += count;
                }
            }
        }
    }
    println!("{fired:?}");
    let errors = fired.remove("released_accesses");
    assert_eq!(errors, Some(0), "memory was released during an access: {fired:?}");
    assert!(fired.iter().all(has_occurred), "a kind of fault never occurred: {fired:?}");
}

/// Credits prevent that a packet arrives before its receiver has posted a buffer, unless a packet
/// that grants credits is damaged.
#[test]
fn every_intact_packet_finds_a_posted_buffer() {
    let faults = SimFaults { flip_one_in: 0, ..HARSH };
    for seed in 0..4 {
        let (_, counts) = run(Kind::Packets, faults, seed, CHECKS[0].1);
        let count = |wanted| counts.iter().find(|(name, _)| *name == wanted).map(|(_, count)| *count);
        assert_eq!(count("not_ready"), Some(0), "seed {seed}");
        assert!(count("breaks") > Some(0) && count("losses") > Some(0), "seed {seed}: {counts:?}");
    }
}

/// Written data that arrives damaged is sent again, although its announcement arrived intact.
#[test]
fn damaged_one_sided_writes_are_sent_again() {
    let faults = SimFaults { flip_one_in: 100, ..SLOW };
    let check: AsyncCheck = |rig| Box::pin(conformance::pushes_survive_broken_transports(rig));
    for seed in 0..10 {
        let (_, counts) = run(Kind::Packets, faults, seed, check);
        assert!(counts.iter().any(|(name, count)| *name == "flips" && *count > 0), "seed {seed}");
    }
}

/// Damage ends a connection only if it occurs on several transports in a row. Data that was pulled
/// between the damaged frames counts as a success.
#[test]
fn damage_between_successful_pulls_does_not_end_the_connection() {
    let faults = SimFaults { flip_one_in: 400, ..SLOW };
    let check: AsyncCheck = |rig| Box::pin(conformance::cancelled_pulls_never_write_to_reused_buffers(rig));
    for seed in 0..4 {
        let (_, counts) = run(Kind::Packets, faults, seed, check);
        assert!(counts.iter().any(|(name, count)| *name == "flips" && *count > 5), "seed {seed}: {counts:?}");
    }
}

/// The receiver keeps all messages, and fills the packet memory (64 MiB). A side can still send on
/// both kinds of devices: with packets that are sent from a copy, and without.
#[test]
fn a_reader_that_keeps_all_packet_buffers_blocks_no_senders() {
    const COUNT: usize = 20_000;
    let check: AsyncCheck = |rig| {
        Box::pin(async {
            let mut listener = rig.listen().await;
            let endpoint = listener.endpoint();
            let (mut kept, mut ends) = (Vec::new(), Vec::new());
            for _ in 0..2 {
                let connecting = rig.stack.connect(&endpoint, ConnectOptions::default());
                let (client, server) = tokio::join!(connecting, listener.accept());
                ends.push((client.expect("connects"), server.expect("accepts")));
            }
            for ((client, mut replies), (server, mut requests)) in ends {
                let payload = || base::block::Payload::compute(0, vec![7; 4096].into());
                let send = async {
                    for _ in 0..COUNT {
                        let message = Message { payload: payload(), ..Message::default() };
                        client.send(message).await.expect("sent");
                    }
                };
                let receive = async {
                    let end = kept.len() + COUNT;
                    while kept.len() < end {
                        match requests.next().await {
                            ConnectionEvent::Message(message) => kept.push(message),
                            // The connection moves from a stream to packets.
                            ConnectionEvent::Interrupted | ConnectionEvent::Resumed => {}
                            other => panic!("after {} messages: {other:?}", kept.len()),
                        }
                    }
                };
                tokio::join!(send, receive);
                server.send(Message { header: "all".into(), ..Message::default() }).await.expect("sent");
                assert!(matches!(replies.next().await, ConnectionEvent::Message(_)));
            }
            assert!(kept.iter().all(|message| message.payload.data().iter().all(|byte| *byte == 7)));
        })
    };
    run(Kind::Packets, SLOW, 1, check);
}

/// Two runs with the same seed deliver the same data at the same times.
#[test]
fn the_same_seed_replays_the_same_run_over_packets() {
    for kind in [Kind::Packets, Kind::Both] {
        let (faults, check) = CHECKS[0];
        assert_eq!(run(kind, faults, 42, check), run(kind, faults, 42, check));
    }
}
