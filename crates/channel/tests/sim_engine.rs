//! Tests of the simulated engine: the conformance suite that all engines pass, its faults, and
//! severing. All tests run in simulated time on one thread.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use base::entropy::seed_this_thread;
use base::mem::{Arena, OutsideAccess};
use outboard_channel::conformance::{self, JoinedEngine, LEN};
use outboard_channel::sim::{
    ControlWire, DeviceFailure, EngineFaults, SimEngine, SimEngineOptions, WireOptions,
};
use outboard_channel::{
    Bell, Chain, ChainCompletion, DmaAddress, DmaEngine, DmaRegion, EnginePeer, HostDoorbells, MemoryAccess,
    Transfer,
};

/// The queue on which the tests post payload.
const BULK: usize = 1;

/// An engine, its host, and the host's ends of the doorbells.
struct Rig {
    engine: Arc<SimEngine>,
    here: Arc<Arena>,
    there: Arc<Arena>,
    local: DmaRegion,
    host: DmaRegion,
    peer: EnginePeer,
    bell: Box<dyn Bell>,
    doorbells: HostDoorbells,
    wire: ControlWire,
}

/// What a control connection carries for host memory `there`.
async fn share(wire: &ControlWire, there: &Arc<Arena>) -> (HostDoorbells, MemoryAccess) {
    let listener = wire.listen();
    let _osd = wire.connect().await.unwrap();
    let store = listener.accept().await.unwrap();
    store.carrier().share(&OutsideAccess::of_copied(there).unwrap()).unwrap()
}

async fn rig(options: SimEngineOptions) -> Rig {
    let (engine, running) = SimEngine::new(options);
    tokio::spawn(running);
    let (here, there) = (Arena::shared("here", LEN).unwrap(), Arena::shared("there", LEN).unwrap());
    let local = engine.register_local(&OutsideAccess::of_copied(&here).unwrap()).unwrap();
    let wire = ControlWire::new(WireOptions::default());
    let (doorbells, access) = share(&wire, &there).await;
    let (peer, bell) = engine.attach(access, LEN).await.unwrap();
    let host = engine.register_peer(&peer, 0..LEN).unwrap();
    Rig { engine, here, there, local, host, peer, bell, doorbells, wire }
}

impl Rig {
    fn send(&self, offset: usize, len: usize) -> Transfer {
        Transfer {
            src: DmaAddress { region: self.local.id(), offset },
            dst: DmaAddress { region: self.host.id(), offset },
            len,
        }
    }

    fn post(&self, transfers: Vec<Transfer>, tag: u64) {
        let ring = Some((self.peer.id, 64));
        self.engine.post(BULK, Chain { transfers, tag: Some(tag), ring, ..Chain::default() }).unwrap();
    }

    async fn completions(&self, count: usize) -> Vec<ChainCompletion> {
        let mut done = Vec::new();
        poll_fn(|cx| {
            self.engine.poll_completions(cx, &mut done);
            if done.len() >= count { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        done
    }

    /// Takes the completions that are there now.
    async fn ready_completions(&self) -> Vec<ChainCompletion> {
        let mut done = Vec::new();
        poll_fn(|cx| {
            self.engine.poll_completions(cx, &mut done);
            Poll::Ready(())
        })
        .await;
        done
    }

    fn seen(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        assert!(self.there.copy_out(offset, &mut out));
        out
    }

    /// Takes the count of the host's doorbell, if it was rung.
    async fn heard(&self) -> Option<u64> {
        poll_fn(|cx| match self.doorbells.host.poll_wait(cx) {
            Poll::Ready(count) => Poll::Ready(Some(count.unwrap())),
            Poll::Pending => Poll::Ready(None),
        })
        .await
    }
}

fn faulty(faults: EngineFaults) -> SimEngineOptions {
    SimEngineOptions { seed: 7, faults, ..SimEngineOptions::default() }
}

#[tokio::test(start_paused = true)]
async fn the_engine_passes_the_conformance_suite() {
    for setup in [Duration::ZERO, Duration::from_millis(3)] {
        conformance::run(async || {
            let options = SimEngineOptions { setup, ..SimEngineOptions::default() };
            let Rig { engine, peer, bell, there, doorbells, wire, .. } = rig(options).await;
            let HostDoorbells { host, osd } = doorbells;
            let keep = Box::new(wire);
            JoinedEngine { engine, peer, bell, there, host_doorbell: host, osd_doorbell: osd, keep }
        })
        .await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_failed_transfer_ends_its_chain_and_is_counted() {
    let rig = rig(faulty(EngineFaults { fail: 0.2, ..EngineFaults::default() })).await;
    for tag in 1..=100 {
        rig.post(vec![rig.send(0, 4096); 3], tag);
    }
    let done = rig.completions(100).await;
    let failed = done.iter().filter(|c| c.result.is_err()).count() as u64;
    assert_eq!((rig.engine.stats().failed, rig.engine.counters().failed), (failed, failed));
    assert!((20..90).contains(&failed), "{failed}");
    assert!(done.iter().any(|c| c.result.as_ref().is_err_and(|e| e.done == 2)), "partial chains");
    assert_eq!(rig.engine.counters().doorbells, 100 - failed);
}

#[tokio::test(start_paused = true)]
async fn a_late_transfer_moves_its_bytes_at_the_start_or_the_end_of_the_delay() {
    let hour = Duration::from_secs(3600);
    let rig = rig(faulty(EngineFaults { stall: 1.0, stall_max: hour, ..EngineFaults::default() })).await;
    assert!(rig.here.copy_in(0, &[1; 64]));
    let (mut early, mut late) = (0, 0);
    for tag in 1..=20 {
        assert!(rig.there.copy_in(0, &[0; 64]));
        let (moved, begun) = (rig.engine.stats().moved_late, tokio::time::Instant::now());
        rig.post(vec![rig.send(0, 64)], tag);
        tokio::time::sleep(Duration::from_millis(10)).await;
        let is_there = rig.seen(0, 64) == [1; 64];
        let done = rig.completions(1).await;
        assert_eq!(done[0].result, Ok(()));
        assert_eq!(rig.seen(0, 64), [1; 64]);
        let took = begun.elapsed();
        if rig.engine.stats().moved_late > moved {
            assert!(!is_there || took < Duration::from_millis(11));
            late += 1;
        } else {
            assert!(is_there);
            early += 1;
        }
    }
    assert!(early > 3 && late > 3 && rig.engine.stats().stalled == 20, "{early} {late}");
}

#[tokio::test(start_paused = true)]
async fn a_reset_cancels_late_transfers() {
    let hour = Duration::from_secs(3600);
    let rig = rig(faulty(EngineFaults { stall: 1.0, stall_max: hour, ..EngineFaults::default() })).await;
    for offset in 0..20 {
        assert!(rig.here.copy_in(offset * 64, &[1; 64]));
        rig.post(vec![rig.send(offset * 64, 64)], 1 + offset as u64);
    }
    tokio::time::sleep(Duration::from_millis(50)).await;
    rig.engine.reset();
    let done = rig.completions(20).await;
    assert!(done.iter().all(|c| c.result.as_ref().is_err_and(|e| e.why.contains("reset"))), "{done:?}");
    let before = rig.seen(0, 20 * 64);
    tokio::time::sleep(hour).await;
    assert_eq!(rig.seen(0, 20 * 64), before, "a cancelled transfer moves no bytes");
}

#[tokio::test(start_paused = true)]
async fn a_corruption_damages_one_bit_and_is_not_reported() {
    let rig = rig(faulty(EngineFaults { corrupt: 1.0, ..EngineFaults::default() })).await;
    rig.post(vec![rig.send(0, 4096)], 1);
    assert_eq!(rig.completions(1).await[0].result, Ok(()));
    let damaged: u32 = rig.seen(0, 4096).iter().map(|b| b.count_ones()).sum();
    assert_eq!((damaged, rig.engine.stats().corrupted), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn a_dropped_doorbell_is_not_rung() {
    let rig = rig(faulty(EngineFaults { drop_doorbell: 1.0, ..EngineFaults::default() })).await;
    rig.post(vec![rig.send(0, 64)], 1);
    assert_eq!(rig.completions(1).await[0].result, Ok(()));
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!((rig.heard().await, rig.engine.stats().dropped_doorbells), (None, 1));
    rig.engine.set_faults(EngineFaults::default());
    rig.post(vec![rig.send(0, 64)], 2);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(rig.heard().await, Some(64));
}

#[tokio::test(start_paused = true)]
async fn a_failed_device_works_again_after_a_reset() {
    let rig = rig(faulty(EngineFaults::default())).await;
    for (n, failure) in [DeviceFailure::Fails, DeviceFailure::Hangs].into_iter().enumerate() {
        rig.engine.fail_device(failure);
        rig.post(vec![rig.send(0, 64)], 1);
        tokio::time::sleep(Duration::from_secs(60)).await;
        match failure {
            DeviceFailure::Fails => {
                let done = rig.ready_completions().await;
                assert!(done[0].result.as_ref().unwrap_err().why.contains("device"), "{done:?}");
                rig.engine.reset();
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            DeviceFailure::Hangs => {
                assert!(rig.ready_completions().await.is_empty(), "no chain completes");
                rig.engine.reset();
                assert!(rig.completions(1).await[0].result.is_err());
            }
        }
        rig.post(vec![rig.send(0, 64)], 2);
        assert_eq!(rig.completions(1).await[0].result, Ok(()), "{failure:?}");
        assert_eq!(rig.engine.stats().resets, n as u64 + 1);
    }
    let stats = rig.engine.stats();
    assert_eq!((stats.device_failures, stats.device_hangs), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn a_severed_engine_has_no_effect_any_more() {
    let rig = rig(faulty(EngineFaults::default())).await;
    assert!(rig.here.copy_in(0, &[1; 64]));
    rig.post(vec![rig.send(0, 64)], 1);
    rig.engine.sever();
    rig.post(vec![rig.send(0, 64)], 2);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(rig.engine.has_stopped() && rig.ready_completions().await.is_empty());
    assert_eq!((rig.seen(0, 64), rig.heard().await), (vec![0; 64], None));
    // The destructors of the killed role have no effect either.
    let Rig { local, host, peer, bell, .. } = rig;
    drop((local, host, peer, bell));
}

#[tokio::test(start_paused = true)]
async fn a_severed_store_rings_no_doorbell() {
    let rig = rig(faulty(EngineFaults::default())).await;
    rig.doorbells.osd.ring(5).unwrap();
    rig.wire.sever_store();
    rig.doorbells.osd.ring(7).unwrap();
    let rung = poll_fn(|cx| rig.bell.poll_wait(cx)).await.unwrap();
    assert_eq!(rung, 5, "only the ring before the death arrives");
    // The engine may still move bytes into the memory, which has no user.
    rig.post(vec![rig.send(0, 64)], 1);
    assert_eq!(rig.completions(1).await[0].result, Ok(()));
}

#[test]
fn a_seed_repeats_all_operations_with_their_times() {
    let run = |seed| {
        let _seeded = seed_this_thread(seed);
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let faults = EngineFaults {
                fail: 0.05,
                stall: 0.1,
                stall_max: Duration::from_secs(5),
                corrupt: 0.05,
                drop_doorbell: 0.1,
                device: 0.01,
                ..EngineFaults::default()
            };
            let rig = rig(SimEngineOptions { seed, faults, ..SimEngineOptions::default() }).await;
            for tag in 1..=200 {
                let chain = Chain {
                    transfers: vec![rig.send(0, 4096), rig.send(8192, 100_000)],
                    tag: Some(tag),
                    ring: Some((rig.peer.id, 64)),
                    ..Chain::default()
                };
                rig.engine.post(tag as usize % rig.engine.queues(), chain).unwrap();
                tokio::time::sleep(Duration::from_millis(tag % 7)).await;
                if tag % 50 == 0 {
                    tokio::time::sleep(Duration::from_secs(20)).await;
                    rig.engine.reset();
                }
            }
            let done = rig.completions(200).await;
            assert_eq!(done.len(), 200);
            rig.engine.stats()
        })
    };
    let (first, second, other) = (run(1), run(1), run(2));
    assert_eq!(first, second);
    assert_ne!(first.trace, other.trace);
    assert!(first.failed > 0 && first.stalled > 0 && first.corrupted > 0 && first.dropped_doorbells > 0);
}
