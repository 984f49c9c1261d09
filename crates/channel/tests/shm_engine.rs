//! Tests of the engine `shm`: the conformance suite that all engines pass (`channel::conformance`),
//! and the behaviour that only this engine has.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use base::clock::Instant;
use base::fault::{Faults, Site};
use base::mem::{Arena, OutsideAccess};
use outboard_channel::conformance::{self, JoinedEngine};
use outboard_channel::ofi::OfiOffer;
use outboard_channel::{
    Bell, Chain, ChainCompletion, ChainTimes, ChannelError, DmaAddress, DmaEngine, DmaRegion, Doorbell,
    EnginePeer, EngineTuning, MemoryAccess, MemoryFds, Profile, RejectedChain, Ringer, ShmEngine, ShmOptions,
    Transfer, URGENT,
};

/// The queue on which the tests post payload.
const BULK: usize = 1;
/// Time limit for each wait. It is far longer than any wait takes, even on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

struct Rig {
    engine: Arc<ShmEngine>,
    here: Arc<Arena>,
    there: Arc<Arena>,
    local: DmaRegion,
    host: DmaRegion,
    peer: EnginePeer,
    _bell: Box<dyn Bell>,
}

const LEN: usize = 8 << 20;

async fn rig() -> Rig {
    rig_with(ShmOptions::default()).await
}

async fn rig_with(options: ShmOptions) -> Rig {
    let engine = ShmEngine::start(options).unwrap();
    let (here, there) = (Arena::shared("here", LEN).unwrap(), Arena::shared("there", LEN).unwrap());
    let local = engine.register_local(&OutsideAccess::of_copied(&here).unwrap()).unwrap();
    // No test here checks the doorbells, so the engine gets the same eventfd as both doorbells.
    let bell = Doorbell::create().unwrap();
    let descriptors = MemoryFds {
        memory: there.share_fd().unwrap().unwrap(),
        host_doorbell: bell.try_clone().unwrap(),
        osd_doorbell: bell,
    };
    let (peer, bell) = engine.attach(MemoryAccess::Descriptors(descriptors), LEN).await.unwrap();
    let host = engine.register_peer(&peer, 0..LEN).unwrap();
    Rig { engine, here, there, local, host, peer, _bell: bell }
}

fn faults(text: &str) -> (Faults, ShmOptions) {
    let faults = Faults::default();
    faults.arm(text.parse().unwrap()).unwrap();
    (faults.clone(), ShmOptions { faults, ..ShmOptions::default() })
}

impl Rig {
    fn to_peer(&self, offset: usize, len: usize) -> Transfer {
        Transfer {
            src: DmaAddress { region: self.local.id(), offset },
            dst: DmaAddress { region: self.host.id(), offset },
            len,
        }
    }

    async fn completions(&self, count: usize) -> Vec<ChainCompletion> {
        let mut done = Vec::new();
        let all = std::future::poll_fn(|cx| {
            self.engine.poll_completions(cx, &mut done);
            if done.len() >= count { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
        });
        tokio::time::timeout(PATIENCE, all).await.expect("completions did not arrive in time");
        done
    }
}

fn tagged(transfers: Vec<Transfer>, tag: u64) -> Chain {
    Chain { transfers, tag: Some(tag), ..Chain::default() }
}

#[tokio::test]
async fn memory_without_a_seal_against_shrinking_is_refused() {
    let engine = ShmEngine::start(ShmOptions::default()).unwrap();
    let loose = rustix::fs::memfd_create("loose", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&loose, 8192).unwrap();
    let bell = Doorbell::create().unwrap();
    let descriptors =
        MemoryFds { memory: loose, host_doorbell: bell.try_clone().unwrap(), osd_doorbell: bell };
    assert!(engine.attach(MemoryAccess::Descriptors(descriptors), 8192).await.is_err());
}

#[tokio::test]
async fn a_peers_doorbell_must_be_an_eventfd_and_never_blocks_the_engine() {
    let engine = ShmEngine::start(ShmOptions::default()).unwrap();
    let there = Arena::shared("there", LEN).unwrap();
    let attach = async |host_doorbell: OwnedFd, osd_doorbell: OwnedFd| {
        let memory = there.share_fd().unwrap().unwrap();
        let descriptors = MemoryFds { memory, host_doorbell, osd_doorbell };
        engine.attach(MemoryAccess::Descriptors(descriptors), LEN).await
    };
    let bell = || Doorbell::create().unwrap();
    let (_out, pipe) = rustix::pipe::pipe().unwrap();
    for (host, osd) in [(pipe.try_clone().unwrap(), bell()), (bell(), pipe)] {
        let refused = attach(host, osd).await.err().expect("a pipe was accepted as a doorbell").to_string();
        assert!(refused.contains("must be an eventfd"), "{refused}");
    }
    // Use a blocking eventfd whose count is full.
    let full = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
    Doorbell::ring(full.as_fd(), u64::MAX - 1).unwrap();
    let (peer, _bell) = attach(full, bell()).await.unwrap();
    engine.post(URGENT, Chain { ring: Some((peer.id, 64)), ..tagged(Vec::new(), 1) }).unwrap();
    engine.post(URGENT, tagged(Vec::new(), 2)).unwrap();
    let mut done = Vec::new();
    let both = std::future::poll_fn(|cx| {
        engine.poll_completions(cx, &mut done);
        if done.len() >= 2 { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    });
    tokio::time::timeout(PATIENCE, both).await.expect("the engine is blocked");
}

#[tokio::test]
async fn tuning_cannot_exceed_the_configured_transfer_limit() {
    let rig = rig_with(ShmOptions { max_transfer: 64 << 10, ..ShmOptions::default() }).await;
    let tune = |max_transfer| {
        rig.engine.tune(EngineTuning { max_transfer: Some(max_transfer), spin: None });
        rig.engine.max_transfer()
    };
    assert_eq!((tune(1 << 20), tune(8192), tune(0)), (64 << 10, 8192, 4096));
    // A transfer that was prepared before the tuning is accepted.
    rig.engine.post(BULK, tagged(vec![rig.to_peer(0, 64 << 10)], 1)).unwrap();
    assert_eq!(rig.completions(1).await[0].result, Ok(()));
    let long = rig.engine.post(BULK, tagged(vec![rig.to_peer(0, (64 << 10) + 1)], 2));
    assert!(matches!(long, Err(RejectedChain::Refused(_))));
}

#[tokio::test]
async fn short_chains_overtake_long_chains_of_other_queues() {
    let rig = rig().await;
    let long = vec![rig.to_peer(0, 2 << 20); 200];
    rig.engine.post(BULK, tagged(long.clone(), 1)).unwrap();
    rig.engine.post(BULK + 1, tagged(long, 2)).unwrap();
    rig.engine.post(BULK + 2, tagged(vec![rig.to_peer(0, 2 << 20)], 3)).unwrap();
    rig.engine.post(URGENT, tagged(vec![rig.to_peer(0, 64)], 4)).unwrap();
    let done = rig.completions(4).await;
    let order: Vec<u64> = done.iter().map(|c| c.tag).collect();
    assert_eq!(
        order[..2],
        [4, 3],
        "the urgent chain completes first, then the shortest, because queues take turns"
    );
}

#[tokio::test]
async fn a_failed_chain_reports_how_many_transfers_were_complete() {
    let (faults, options) = faults("dma.transfer=fail,after=2,count=1");
    let rig = rig_with(options).await;
    assert!(rig.here.copy_in(0, &[7; 4096]));
    let transfers = (0..4).map(|i| rig.to_peer(i * 1024, 1024)).collect();
    rig.engine.post(BULK, tagged(transfers, 1)).unwrap();
    let done = rig.completions(1).await;
    assert_eq!(done[0].result.as_ref().unwrap_err().done, 2, "{done:?}");
    assert_eq!(faults.fired(Site::DmaTransfer), 1);
    let mut out = [0; 4096];
    assert!(rig.there.copy_out(0, &mut out));
    assert!(out[..2048].iter().all(|b| *b == 7) && out[2048..].iter().all(|b| *b == 0));
}

#[tokio::test]
async fn an_injected_corruption_is_not_reported_by_the_engine() {
    let (faults, options) = faults("dma.transfer=corrupt,count=1");
    let rig = rig_with(options).await;
    assert!(rig.here.copy_in(0, &[7; 4096]));
    rig.engine.post(BULK, tagged(vec![rig.to_peer(0, 4096)], 1)).unwrap();
    assert_eq!(rig.completions(1).await[0].result, Ok(()));
    let mut out = [0; 4096];
    assert!(rig.there.copy_out(0, &mut out));
    assert_eq!(out.iter().filter(|b| **b != 7).count(), 1);
    assert_eq!(faults.fired(Site::DmaTransfer), 1);
}

#[tokio::test]
async fn a_stalled_transfer_delays_only_its_queue_until_a_reset_cancels_it() {
    let (faults, options) = faults("dma.transfer=stall,late=200ms,count=2");
    let rig = rig_with(options).await;
    rig.engine.post(BULK, tagged(vec![rig.to_peer(0, 64)], 1)).unwrap();
    // The transfer of this queue stalls, too. The empty chain behind it has no transfer to stall.
    rig.engine.post(BULK + 1, tagged(vec![rig.to_peer(0, 64)], 2)).unwrap();
    rig.engine.post(BULK + 1, tagged(Vec::new(), 3)).unwrap();
    rig.engine.post(URGENT, tagged(Vec::new(), 4)).unwrap();
    let order: Vec<u64> = rig.completions(4).await.iter().map(|c| c.tag).collect();
    assert_eq!(order, [4, 1, 2, 3]);
    assert_eq!(faults.fired(Site::DmaTransfer), 2);

    faults.clear();
    faults.arm("dma.transfer=stall,late=3600000ms,count=1".parse().unwrap()).unwrap();
    assert!(rig.here.copy_in(0, &[9; 64]));
    rig.engine.post(BULK, tagged(vec![rig.to_peer(64, 64)], 5)).unwrap();
    rig.engine.post(BULK, tagged(Vec::new(), 6)).unwrap();
    while faults.fired(Site::DmaTransfer) == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    rig.engine.reset();
    let done = rig.completions(2).await;
    assert!(done.iter().all(|c| c.result.as_ref().unwrap_err().why.contains("reset")), "{done:?}");
    rig.engine.post(BULK, tagged(vec![rig.to_peer(0, 64)], 7)).unwrap();
    assert_eq!(rig.completions(1).await[0].result, Ok(()), "the engine works again after the reset");
}

#[tokio::test]
async fn an_injected_fault_drops_a_doorbell() {
    let (faults, options) = faults("dma.doorbell=drop,count=1");
    let rig = rig_with(options).await;
    let ring = Some((rig.peer.id, 64));
    rig.engine.post(URGENT, Chain { ring, ..tagged(vec![rig.to_peer(0, 64)], 1) }).unwrap();
    assert_eq!(rig.completions(1).await[0].result, Ok(()));
    assert_eq!((rig.engine.counters().doorbells, faults.fired(Site::DmaDoorbell)), (0, 1));
}

#[tokio::test]
async fn the_paced_profile_runs_payload_chains_one_at_a_time() {
    let rig = rig_with(ShmOptions { profile: Profile::Bf3Paper, ..ShmOptions::default() }).await;
    let payload = || vec![rig.to_peer(0, 1_000_000)];
    // Use the urgent queue as well: the length of a chain decides whether it is payload.
    for (queue, tag) in [(BULK, 1), (URGENT, 2)] {
        rig.engine.post(queue, tagged(payload(), tag)).unwrap();
    }
    let mut done = rig.completions(2).await;
    done.sort_by_key(|completion| completion.started);
    let cost = Duration::from_micros(2400 + 380);
    for completion in &done {
        assert!(completion.finished - completion.started >= cost, "{completion:?}");
    }
    assert!(done[1].started >= done[0].finished, "the second chain starts after the first has completed");
    assert!(rig.engine.setup_cost() > Duration::ZERO);
}

#[tokio::test]
async fn the_serial_profile_takes_the_fixed_time_once_per_request() {
    let rig = rig_with(ShmOptions { profile: Profile::Bf3Serial, ..ShmOptions::default() }).await;
    let of_request = |tag, request| Chain { request, ..tagged(vec![rig.to_peer(0, 1_000_000)], tag) };
    for (tag, request) in [(1, Some(7)), (2, Some(7)), (3, Some(8)), (4, None), (5, None)] {
        rig.engine.post(BULK, of_request(tag, request)).unwrap();
    }
    let done = rig.completions(5).await;
    let (fixed, by_length) = (Duration::from_micros(2400), Duration::from_micros(380));
    for completion in done {
        let took = completion.finished - completion.started;
        match completion.tag {
            // A later segment of the same request.
            2 => assert!((by_length..fixed).contains(&took), "{completion:?}"),
            _ => assert!(took >= fixed + by_length, "{completion:?}"),
        }
    }
    assert_eq!(rig.engine.setup_cost(), Duration::ZERO, "a longer chain saves nothing");
}

#[tokio::test]
async fn the_times_of_a_chain_are_known_without_a_completion() {
    let rig = rig_with(ShmOptions::default()).await;
    let (times, posted) = (Arc::new(ChainTimes::default()), Instant::now());
    let untagged =
        Chain { transfers: vec![rig.to_peer(0, 4096)], times: Some(Arc::clone(&times)), ..Chain::default() };
    rig.engine.post(URGENT, untagged).unwrap();
    rig.engine.post(URGENT, tagged(vec![rig.to_peer(0, 64)], 1)).unwrap();
    let completion = rig.completions(1).await.remove(0);
    let (started, finished) = times.get().unwrap();
    assert!(posted <= started && started <= finished && finished <= completion.finished);
}

#[tokio::test]
async fn the_engine_passes_the_conformance_suite() {
    conformance::run(async || {
        let engine = ShmEngine::start(ShmOptions::default()).unwrap();
        let there = Arena::shared("there", conformance::LEN).unwrap();
        let (host_doorbell, osd_doorbell) = (Doorbell::create().unwrap(), Doorbell::create().unwrap());
        let descriptors = MemoryFds {
            memory: there.share_fd().unwrap().unwrap(),
            host_doorbell: host_doorbell.try_clone().unwrap(),
            osd_doorbell: osd_doorbell.try_clone().unwrap(),
        };
        let (peer, bell) =
            engine.attach(MemoryAccess::Descriptors(descriptors), conformance::LEN).await.unwrap();
        let (host_doorbell, osd_doorbell) =
            (Doorbell::new(host_doorbell).unwrap(), Ringer::from(osd_doorbell));
        JoinedEngine { engine, peer, bell, there, host_doorbell, osd_doorbell, keep: Box::new(()) }
    })
    .await;
}

#[tokio::test]
async fn an_engine_refuses_memory_access_meant_for_another_engine() {
    let engine = ShmEngine::start(ShmOptions::default()).unwrap();
    let memory = fabric::RemoteRegion { key: 1, base: 0, len: LEN as u64 };
    let address = ([127, 0, 0, 1], 1).into();
    let offer = OfiOffer { provider: "tcp".to_owned(), address, secret: 1, memory };
    let refused = engine.attach(MemoryAccess::Offer(offer), LEN).await.err();
    assert!(matches!(refused, Some(ChannelError::WrongMemoryAccess { .. })));
}
