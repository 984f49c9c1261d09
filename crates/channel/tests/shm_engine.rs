//! The engine `shm`: what it moves, what it refuses, and in which order it tells.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use base::mem::Arena;
use outboard_channel::{
    Chain, Completion, DmaEngine, Doorbell, Place, Region, ShmEngine, ShmOptions, Transfer, Unposted,
};

struct Rig {
    engine: Arc<ShmEngine>,
    here: Arc<Arena>,
    there: Arc<Arena>,
    local: Region,
    peer: Region,
}

const LEN: usize = 8 << 20;

fn rig() -> Rig {
    let engine = ShmEngine::start(ShmOptions::default()).unwrap();
    let (here, there) = (Arena::shared("here", LEN).unwrap(), Arena::shared("there", LEN).unwrap());
    let local = engine.register_local(&here).unwrap();
    let peer = engine.register_peer(there.share_fd().unwrap().unwrap(), LEN).unwrap();
    Rig { engine, here, there, local, peer }
}

impl Rig {
    fn to_peer(&self, offset: usize, len: usize) -> Transfer {
        Transfer {
            src: Place { region: self.local.id(), offset },
            dst: Place { region: self.peer.id(), offset },
            len,
        }
    }

    async fn completions(&self, count: usize) -> Vec<Completion> {
        let mut done = Vec::new();
        let all = std::future::poll_fn(|cx| {
            self.engine.poll_completions(cx, &mut done);
            if done.len() >= count { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
        });
        tokio::time::timeout(Duration::from_secs(5), all).await.expect("the completions");
        done
    }
}

fn tagged(transfers: Vec<Transfer>, tag: u64) -> Chain {
    Chain { transfers, tag: Some(tag), ring: None }
}

#[tokio::test]
async fn bytes_arrive_before_the_doorbell_and_the_completion() {
    let rig = rig();
    let bell = Doorbell::create().unwrap();
    let id = rig.engine.register_doorbell(bell.try_clone().unwrap(), &rig.peer).unwrap();
    let bell = Doorbell::new(bell).unwrap();
    assert!(rig.here.copy_in(5000, b"payload"));
    rig.engine.post(Chain { ring: Some((id, 64)), ..tagged(vec![rig.to_peer(5000, 7)], 3) }).unwrap();
    let rung = std::future::poll_fn(|cx| bell.poll_wait(cx));
    assert_eq!(tokio::time::timeout(Duration::from_secs(5), rung).await.unwrap().unwrap(), 64);
    let mut out = [0; 7];
    assert!(rig.there.copy_out(5000, &mut out));
    assert_eq!(&out, b"payload");
    assert_eq!(rig.completions(1).await, [Completion { tag: 3, result: Ok(()) }]);
    let counters = rig.engine.counters();
    assert_eq!((counters.bytes, counters.transfers, counters.doorbells), (7, 1, 1));
    assert!(rig.engine.is_emulated());
}

#[tokio::test]
async fn a_transfer_longer_than_the_device_can_is_refused() {
    let rig = rig();
    let most = rig.engine.max_transfer();
    rig.engine.post(tagged(vec![rig.to_peer(0, most)], 1)).unwrap();
    let refused = rig.engine.post(tagged(vec![rig.to_peer(0, most + 1)], 2));
    assert!(matches!(refused, Err(Unposted::Refused(_))));
    assert_eq!(rig.completions(1).await.len(), 1);
}

#[tokio::test]
async fn a_failure_ends_its_chain_and_rings_nothing() {
    let rig = rig();
    let bell = Doorbell::create().unwrap();
    let id = rig.engine.register_doorbell(bell.try_clone().unwrap(), &rig.peer).unwrap();
    let transfers = vec![rig.to_peer(LEN - 5, 10), rig.to_peer(0, 10)];
    assert!(rig.here.copy_in(0, &[9; 10]));
    // Without a tag it is heard of all the same.
    rig.engine.post(Chain { transfers, ring: Some((id, 64)), tag: None }).unwrap();
    let done = rig.completions(1).await;
    assert!(done[0].result.as_ref().unwrap_err().contains("outside"), "{done:?}");
    let mut out = [1; 10];
    assert!(rig.there.copy_out(0, &mut out));
    assert_eq!(out, [0; 10], "what followed was not carried out");
    assert_eq!(rig.engine.counters().doorbells, 0);
    Doorbell::ring(bell.as_fd(), 1).unwrap();
}

#[tokio::test]
async fn an_empty_chain_is_a_fence_and_regions_end_after_their_transfers() {
    let rig = rig();
    for tag in 1..=20 {
        rig.engine.post(tagged(vec![rig.to_peer(0, 1 << 20)], tag)).unwrap();
    }
    rig.engine.post(tagged(Vec::new(), 99)).unwrap();
    let done = rig.completions(21).await;
    assert_eq!(done.iter().map(|c| c.tag).collect::<Vec<_>>(), (1..=20).chain([99]).collect::<Vec<_>>());
    let late = tagged(vec![rig.to_peer(0, 8)], 7);
    let Rig { engine, peer, local, here, there } = rig;
    drop(peer);
    engine.post(late).unwrap();
    let rig = Rig { peer: engine.register_local(&here).unwrap(), engine, local, here, there };
    let done = rig.completions(1).await;
    assert!(done[0].result.as_ref().unwrap_err().contains("not registered"), "{done:?}");
}

#[tokio::test]
async fn a_full_queue_gives_the_chain_back_and_wakes_when_there_is_room() {
    let rig = rig();
    let mut full = 0;
    let mut posted = 0;
    // Each takes a while, so that they pile up.
    while posted < 2000 {
        match rig.engine.post(Chain { transfers: vec![rig.to_peer(0, 256 << 10)], ..Chain::default() }) {
            Ok(()) => posted += 1,
            Err(Unposted::Full(chain)) => {
                full += 1;
                assert_eq!(chain.transfers.len(), 1);
                let engine = Arc::clone(&rig.engine);
                let mut polled = false;
                let room = std::future::poll_fn(|cx| {
                    engine.poll_completions(cx, &mut Vec::new());
                    if std::mem::replace(&mut polled, true) {
                        return std::task::Poll::Ready(());
                    }
                    std::task::Poll::Pending
                });
                tokio::time::timeout(Duration::from_secs(5), room).await.expect("nobody was woken");
            }
            Err(Unposted::Refused(e)) => panic!("{e}"),
        }
    }
    assert!(full > 0, "the queue was never full");
}

#[tokio::test]
async fn memory_that_could_shrink_is_not_registered() {
    let engine = ShmEngine::start(ShmOptions::default()).unwrap();
    let loose = rustix::fs::memfd_create("loose", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&loose, 8192).unwrap();
    assert!(engine.register_peer(loose, 8192).is_err());
}
