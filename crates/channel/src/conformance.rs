//! The conformance suite that every [`DmaEngine`] must pass.
//!
//! [`run`] calls one check after the other, each with a newly attached engine. A check panics if
//! the engine violates the contract.

use std::any::Any;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use base::mem::{Arena, OutsideAccess};

use crate::{
    Bell, Chain, ChainCompletion, DmaAddress, DmaEngine, DmaRegion, Doorbell, EnginePeer, QueueId,
    RejectedChain, Ringer, Transfer, URGENT,
};

/// Length of each side's memory, in bytes.
pub const LEN: usize = 8 << 20;

/// Time limit for each wait in a check.
const PATIENCE: Duration = Duration::from_secs(60);
/// The queue on which the checks post payload.
const BULK: QueueId = 1;

/// An engine that is attached to a peer, with the peer's memory and doorbells.
pub struct JoinedEngine {
    /// The engine.
    pub engine: Arc<dyn DmaEngine>,
    /// The peer.
    pub peer: EnginePeer,
    /// The osd's doorbell, which the peer rings through `osd_doorbell`.
    pub bell: Box<dyn Bell>,
    /// The peer's memory, [`LEN`] bytes.
    pub there: Arc<Arena>,
    /// The host's doorbell, which the engine rings.
    pub host_doorbell: Doorbell,
    /// Rings the osd's doorbell.
    pub osd_doorbell: Ringer,
    /// Objects that must live as long as the attachment.
    pub keep: Box<dyn Any>,
}

/// Runs all checks, each with a new engine.
///
/// # Panics
/// Panics if the engine violates the contract. A timeout's message and the backtrace contain the
/// check's name.
pub async fn run(attach: impl AsyncFn() -> JoinedEngine) {
    type Check = fn(Rig) -> Pin<Box<dyn Future<Output = ()>>>;
    let checks: [(&str, Check); 13] = [
        ("transfers_move_bytes_in_both_directions", |rig| {
            Box::pin(transfers_move_bytes_in_both_directions(rig))
        }),
        ("bytes_arrive_before_the_doorbell", |rig| Box::pin(bytes_arrive_before_the_doorbell(rig))),
        ("doorbell_counts_add_up", |rig| Box::pin(doorbell_counts_add_up(rig))),
        ("invalid_chains_and_ranges_are_refused", |rig| Box::pin(invalid_chains_and_ranges_are_refused(rig))),
        ("a_failed_transfer_ends_its_chain", |rig| Box::pin(a_failed_transfer_ends_its_chain(rig))),
        ("a_failed_chain_keeps_the_bytes_of_completed_transfers", |rig| {
            Box::pin(a_failed_chain_keeps_the_bytes_of_completed_transfers(rig))
        }),
        ("the_chains_of_a_queue_run_in_order", |rig| Box::pin(the_chains_of_a_queue_run_in_order(rig))),
        ("an_empty_chain_completes_after_all_earlier_chains", |rig| {
            Box::pin(an_empty_chain_completes_after_all_earlier_chains(rig))
        }),
        ("a_dropped_region_still_serves_earlier_chains", |rig| {
            Box::pin(a_dropped_region_still_serves_earlier_chains(rig))
        }),
        ("regions_dropped_right_after_registration_are_unregistered", |rig| {
            Box::pin(regions_dropped_right_after_registration_are_unregistered(rig))
        }),
        ("a_caller_is_woken_when_a_full_queue_has_room", |rig| {
            Box::pin(a_caller_is_woken_when_a_full_queue_has_room(rig))
        }),
        ("offsets_in_a_partial_region_count_from_the_regions_start", |rig| {
            Box::pin(offsets_in_a_partial_region_count_from_the_regions_start(rig))
        }),
        ("a_reset_cancels_posted_chains", |rig| Box::pin(a_reset_cancels_posted_chains(rig))),
    ];
    for (name, check) in checks {
        let rig = Rig::new(attach().await);
        let done = tokio::time::timeout(2 * PATIENCE, check(rig)).await;
        assert!(done.is_ok(), "the check {name} did not end in time");
    }
}

struct Rig {
    engine: Arc<dyn DmaEngine>,
    peer: EnginePeer,
    bell: Box<dyn Bell>,
    host_doorbell: Doorbell,
    osd_doorbell: Ringer,
    here: Arc<Arena>,
    there: Arc<Arena>,
    local: DmaRegion,
    host: DmaRegion,
    _keep: Box<dyn Any>,
}

impl Rig {
    fn new(attached: JoinedEngine) -> Rig {
        let JoinedEngine { engine, peer, bell, there, host_doorbell, osd_doorbell, keep } = attached;
        let here = Arena::shared("conformance", LEN).unwrap();
        let local = engine.register_local(&OutsideAccess::of_copied(&here).unwrap()).unwrap();
        let host = engine.register_peer(&peer, 0..LEN).unwrap();
        Rig { engine, peer, bell, host_doorbell, osd_doorbell, here, there, local, host, _keep: keep }
    }

    fn send(&self, offset: usize, len: usize) -> Transfer {
        self.transfer(&self.local, offset, &self.host, offset, len)
    }

    fn fetch(&self, from: usize, to: usize, len: usize) -> Transfer {
        self.transfer(&self.host, from, &self.local, to, len)
    }

    fn transfer(&self, from: &DmaRegion, src: usize, to: &DmaRegion, dst: usize, len: usize) -> Transfer {
        let place = |region: &DmaRegion, offset| DmaAddress { region: region.id(), offset };
        Transfer { src: place(from, src), dst: place(to, dst), len }
    }

    fn post(&self, queue: QueueId, transfers: Vec<Transfer>, tag: u64) {
        self.engine.post(queue, tagged(transfers, tag)).unwrap();
    }

    async fn completions(&self, count: usize) -> Vec<ChainCompletion> {
        let mut done = Vec::new();
        let all = poll_fn(|cx| {
            self.engine.poll_completions(cx, &mut done);
            if done.len() >= count { Poll::Ready(()) } else { Poll::Pending }
        });
        let all = tokio::time::timeout(PATIENCE, all).await;
        assert!(all.is_ok(), "{count} completions were expected, but only {done:?} arrived");
        done
    }

    async fn rung(&self) -> u64 {
        let rung = poll_fn(|cx| self.host_doorbell.poll_wait(cx));
        tokio::time::timeout(PATIENCE, rung).await.expect("the host's doorbell was not rung in time").unwrap()
    }

    /// Waits until the counts of the host's doorbell add up to `count`.
    async fn rung_in_all(&self, count: u64) {
        let mut sum = 0;
        while sum < count {
            sum += self.rung().await;
        }
        assert_eq!(sum, count);
    }
}

fn tagged(transfers: Vec<Transfer>, tag: u64) -> Chain {
    Chain { transfers, tag: Some(tag), ..Chain::default() }
}

fn fill(arena: &Arena, seed: usize) -> Vec<u8> {
    let bytes: Vec<u8> = (0..LEN).map(|i| (i ^ (i >> 8) ^ (i >> 16) ^ seed.wrapping_mul(37)) as u8).collect();
    assert!(arena.copy_in(0, &bytes));
    bytes
}

fn look(arena: &Arena, offset: usize, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    assert!(arena.copy_out(offset, &mut out));
    out
}

async fn transfers_move_bytes_in_both_directions(rig: Rig) {
    let most = rig.engine.max_transfer();
    let bytes = fill(&rig.here, 1);
    let pieces = |at: fn(&Rig, usize, usize) -> Transfer| -> Vec<Transfer> {
        (0..LEN).step_by(most).map(|offset| at(&rig, offset, most.min(LEN - offset))).collect()
    };
    rig.post(BULK, pieces(Rig::send), 3);
    let done = rig.completions(1).await;
    assert_eq!((done[0].tag, &done[0].result), (3, &Ok(())));
    assert!(done[0].started <= done[0].finished);
    assert!(look(&rig.there, 0, LEN) == bytes, "the bytes of a completed chain are in place");
    let bytes = fill(&rig.there, 2);
    rig.post(URGENT, pieces(|rig, offset, len| rig.fetch(offset, offset, len)), 4);
    assert_eq!(rig.completions(1).await[0].result, Ok(()));
    assert!(look(&rig.here, 0, LEN) == bytes);
    let counters = rig.engine.counters();
    assert_eq!((counters.bytes, counters.failed), (2 * LEN as u64, 0));
    assert_eq!(counters.transfers, 2 * LEN.div_ceil(most) as u64);
}

async fn bytes_arrive_before_the_doorbell(rig: Rig) {
    for round in 0..100 {
        let bytes = fill(&rig.here, round);
        let transfers = vec![rig.send(4096, 1 << 20), rig.send(0, 64)];
        let chain = Chain { transfers, ring: Some((rig.peer.id, 64)), ..Chain::default() };
        rig.engine.post(round % rig.engine.queues(), chain).unwrap();
        assert_eq!(rig.rung().await, 64);
        assert!(look(&rig.there, 4096, 1 << 20) == bytes[4096..][..1 << 20], "round {round}");
        assert!(look(&rig.there, 0, 64) == bytes[..64], "round {round}");
    }
}

async fn doorbell_counts_add_up(rig: Rig) {
    // No task waits on either doorbell while both are rung.
    for i in 0..500 {
        let chain =
            Chain { transfers: vec![rig.send(i * 64, 64)], ring: Some((rig.peer.id, 3)), ..Chain::default() };
        rig.engine.post(URGENT, chain).unwrap();
        rig.osd_doorbell.ring(2).unwrap();
    }
    rig.rung_in_all(1500).await;
    let mut sum = 0;
    while sum < 1000 {
        let rung = poll_fn(|cx| rig.bell.poll_wait(cx));
        sum += tokio::time::timeout(PATIENCE, rung)
            .await
            .expect("the osd's doorbell was not rung in time")
            .unwrap();
    }
    assert_eq!(sum, 1000);
    // Ring one doorbell at a time, in alternating directions.
    for _ in 0..100 {
        let ring = Chain { ring: Some((rig.peer.id, 1)), ..Chain::default() };
        rig.engine.post(URGENT, ring).unwrap();
        assert_eq!(rig.rung().await, 1);
        rig.osd_doorbell.ring(5).unwrap();
        let rung = poll_fn(|cx| rig.bell.poll_wait(cx));
        assert_eq!(
            tokio::time::timeout(PATIENCE, rung)
                .await
                .expect("the osd's doorbell was not rung in time")
                .unwrap(),
            5
        );
    }
}

async fn invalid_chains_and_ranges_are_refused(rig: Rig) {
    let most = rig.engine.max_transfer();
    rig.post(BULK, vec![rig.send(0, most)], 1);
    let long = rig.engine.post(BULK, tagged(vec![rig.send(0, most + 1)], 2));
    assert!(matches!(long, Err(RejectedChain::Refused(_))));
    let nowhere = rig.engine.post(rig.engine.queues(), tagged(Vec::new(), 3));
    assert!(matches!(nowhere, Err(RejectedChain::Refused(_))));
    assert!(rig.engine.register_peer(&rig.peer, 0..LEN + 1).is_err());
    assert!(rig.engine.register_peer(&rig.peer, 5..5).is_err());
    let done = rig.completions(1).await;
    assert_eq!((done.len(), done[0].tag), (1, 1));
}

async fn a_failed_transfer_ends_its_chain(rig: Rig) {
    fill(&rig.here, 9);
    let transfers = vec![rig.send(LEN - 5, 10), rig.send(0, 10)];
    // A failure is reported even for a chain without a tag.
    rig.engine.post(BULK, Chain { transfers, ring: Some((rig.peer.id, 64)), ..Chain::default() }).unwrap();
    let done = rig.completions(1).await;
    let failed = done[0].result.as_ref().unwrap_err();
    assert!(failed.why.contains("outside") && failed.done == 0 && done[0].tag == 0, "{done:?}");
    assert_eq!(look(&rig.there, 0, 10), [0; 10], "the transfer after the failure was not performed");
    let counters = rig.engine.counters();
    assert_eq!((counters.doorbells, counters.failed), (0, 1));
    rig.post(BULK, vec![rig.send(0, 10)], 5);
    assert_eq!(rig.completions(1).await[0].result, Ok(()), "the next chain succeeds");
}

async fn a_failed_chain_keeps_the_bytes_of_completed_transfers(rig: Rig) {
    let bytes = fill(&rig.here, 9);
    let transfers = vec![rig.send(0, 4096), rig.send(8192, 4096), rig.send(LEN, 1)];
    rig.post(BULK, transfers, 6);
    let done = rig.completions(1).await;
    assert_eq!(done[0].result.as_ref().unwrap_err().done, 2, "{done:?}");
    assert!(look(&rig.there, 8192, 4096) == bytes[8192..][..4096]);
}

async fn the_chains_of_a_queue_run_in_order(rig: Rig) {
    for round in 0..50 {
        let bytes = fill(&rig.here, round);
        assert!(rig.there.copy_in(0, &[0xee; 4096]));
        let half = LEN / 2;
        // Fetch the old bytes, overwrite them, and fetch the new bytes.
        rig.post(BULK, vec![rig.fetch(0, half, 4096)], 1);
        rig.post(BULK, vec![rig.send(0, 4096), rig.fetch(0, half + 4096, 4096)], 2);
        // Overwrite memory that was sent before, and send memory that was fetched before.
        let back = rig.transfer(&rig.local, half, &rig.host, 8192, 4096);
        rig.post(BULK, vec![rig.fetch(half, 0, 4096), back], 3);
        let done = rig.completions(3).await;
        assert_eq!(
            done.iter().map(|c| (c.tag, c.result.is_ok())).collect::<Vec<_>>(),
            [(1, true), (2, true), (3, true)]
        );
        assert!(
            look(&rig.here, half, 4096) == [0xee; 4096],
            "round {round}: the first fetch returns the old bytes"
        );
        assert!(
            look(&rig.here, half + 4096, 4096) == bytes[..4096],
            "round {round}: the second fetch returns the new bytes"
        );
        assert!(look(&rig.there, 8192, 4096) == [0xee; 4096], "round {round}: the fetched bytes are sent");
    }
}

async fn an_empty_chain_completes_after_all_earlier_chains(rig: Rig) {
    let len = rig.engine.max_transfer().min(1 << 20);
    for tag in 1..=20 {
        rig.post(BULK, vec![rig.send(0, len)], tag);
    }
    let bytes = fill(&rig.here, 5);
    rig.engine.post(BULK, Chain { transfers: vec![rig.send(0, len)], ..Chain::default() }).unwrap();
    rig.post(BULK, Vec::new(), 99);
    let done = rig.completions(21).await;
    assert_eq!(done.iter().map(|c| c.tag).collect::<Vec<_>>(), (1..=20).chain([99]).collect::<Vec<_>>());
    assert!(look(&rig.there, 0, len) == bytes[..len], "the bytes of the untagged chain are in place, too");
}

async fn a_dropped_region_still_serves_earlier_chains(mut rig: Rig) {
    for tag in 1..=10 {
        rig.post(BULK, vec![rig.send(0, 1 << 18)], tag);
    }
    let late = tagged(vec![rig.send(0, 8)], 11);
    let other = rig.engine.register_peer(&rig.peer, 0..LEN).unwrap();
    drop(std::mem::replace(&mut rig.host, other));
    rig.engine.post(BULK, late).unwrap();
    rig.post(BULK, vec![rig.send(0, 8)], 12);
    let done = rig.completions(12).await;
    assert!(
        done[..10].iter().all(|c| c.result.is_ok()),
        "chains that were posted before the drop succeed: {done:?}"
    );
    assert!(done[10].result.as_ref().unwrap_err().why.contains("not registered"), "{done:?}");
    assert!(done[11].result.is_ok());
}

async fn regions_dropped_right_after_registration_are_unregistered(rig: Rig) {
    let memory = OutsideAccess::of_copied(&Arena::shared("short", 4096).unwrap()).unwrap();
    for tag in 1..=500 {
        rig.post(BULK, vec![rig.send(0, 64)], tag);
        for _ in 0..4 {
            drop(rig.engine.register_local(&memory).unwrap());
        }
    }
    rig.completions(500).await;
    for queue in 0..rig.engine.queues() {
        rig.post(queue, Vec::new(), 501);
    }
    rig.completions(rig.engine.queues()).await;
    assert_eq!(Arc::strong_count(memory.arena()), 1, "dropped regions are still registered");
}

async fn a_caller_is_woken_when_a_full_queue_has_room(rig: Rig) {
    let (mut full, mut posted) = (0, 0);
    // Each chain takes some time, so the queue fills up.
    while posted < 2 * rig.engine.queue_depth() {
        let chain = Chain { transfers: vec![rig.send(0, 256 << 10)], ..Chain::default() };
        match rig.engine.post(BULK, chain) {
            Ok(()) => posted += 1,
            Err(RejectedChain::Full(chain)) => {
                full += 1;
                assert_eq!(chain.transfers.len(), 1);
                let mut polled = false;
                let room = poll_fn(|cx| {
                    rig.engine.poll_completions(cx, &mut Vec::new());
                    if std::mem::replace(&mut polled, true) { Poll::Ready(()) } else { Poll::Pending }
                });
                tokio::time::timeout(PATIENCE, room).await.expect("the caller was not woken");
            }
            Err(RejectedChain::Refused(e)) => panic!("{e}"),
        }
    }
    assert!(full > 0, "the queue was never full");
}

async fn offsets_in_a_partial_region_count_from_the_regions_start(rig: Rig) {
    let part = rig.engine.register_peer(&rig.peer, 4096..12288).unwrap();
    assert!(rig.here.copy_in(0, b"part"));
    rig.post(BULK, vec![rig.transfer(&rig.local, 0, &part, 4096, 4)], 1);
    rig.post(BULK, vec![rig.transfer(&rig.local, 0, &part, 8190, 4)], 2);
    let done = rig.completions(2).await;
    assert!(done[0].result.is_ok() && done[1].result.is_err(), "{done:?}");
    assert_eq!(look(&rig.there, 8192, 4), b"part");
    assert_eq!(look(&rig.there, 12286, 4), [0; 4]);
}

async fn a_reset_cancels_posted_chains(rig: Rig) {
    fill(&rig.there, 3);
    let len = rig.engine.max_transfer();
    let mut given_up = false;
    // If this thread is delayed for long, all chains may complete before the reset. Repeat the test
    // until the reset cancels a chain.
    for _ in 0..10 {
        for tag in 1..=200 {
            rig.post(BULK + tag as usize % 2, vec![rig.fetch(0, 0, len)], tag);
        }
        rig.engine.reset();
        let done = rig.completions(200).await;
        assert_eq!(done.len(), 200, "each chain completes exactly once");
        given_up = done.iter().any(|completion| completion.result.is_err());
        if given_up {
            break;
        }
    }
    assert!(given_up, "the reset never cancelled a chain");
    assert!(rig.here.copy_in(0, &vec![0x55; LEN]));
    rig.post(BULK, Vec::new(), 51);
    rig.completions(1).await;
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert!(look(&rig.here, 0, LEN).iter().all(|b| *b == 0x55), "a cancelled chain writes nothing later");
    let bytes = fill(&rig.here, 4);
    let ring = Some((rig.peer.id, 7));
    rig.engine.post(URGENT, Chain { ring, ..tagged(vec![rig.send(0, 4096)], 52) }).unwrap();
    assert_eq!(rig.completions(1).await[0].result, Ok(()), "the engine works again after a reset");
    assert_eq!(rig.rung().await, 7);
    assert!(look(&rig.there, 0, 4096) == bytes[..4096]);
}
