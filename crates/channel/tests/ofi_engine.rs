//! Tests of the engine `ofi` with both ends on one machine. They run over `tcp` on the loopback
//! interface, unless `OUTBOARD_TEST_FABRIC` names another provider and address. Example:
//! `verbs@192.0.2.1`, with the address of a network device that supports RDMA.

use std::future::poll_fn;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use base::fault::{Faults, Site};
use base::mem::{Arena, OutsideAccess};
use outboard_channel::conformance::{self, JoinedEngine, LEN};
use outboard_channel::ofi::{OfiEngine, OfiGrant, OfiHost, OfiHostOptions, OfiOffer, OfiOptions};
use outboard_channel::{
    Bell, Chain, ChainCompletion, ChannelError, DmaAddress, DmaEngine, DmaRegion, Doorbell, EnginePeer,
    MemoryAccess, MemoryFds, Transfer, URGENT,
};
use rustix::process::{Resource, getrlimit, setrlimit};

const PATIENCE: Duration = Duration::from_secs(60);
/// Locked by tests that count this process's file descriptors, or that open many.
static DESCRIPTORS: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// The provider to test, and an address of this machine that it can use.
fn provider() -> (String, IpAddr) {
    let chosen = std::env::var("OUTBOARD_TEST_FABRIC").unwrap_or_else(|_| "tcp@127.0.0.1".to_owned());
    let (provider, address) = chosen.split_once('@').expect("OUTBOARD_TEST_FABRIC must be PROVIDER@ADDRESS");
    (provider.to_owned(), address.parse().expect("OUTBOARD_TEST_FABRIC must contain an IP address"))
}

/// Returns the result, or panics with the remedy if libfabric cannot be used.
fn with_libfabric<T>(result: outboard_channel::Result<T>) -> T {
    result.unwrap_or_else(|e| panic!("libfabric cannot be used: {e}; run \"scripts/setup test\""))
}

fn host() -> OfiHost {
    host_with(&Faults::default())
}

fn host_with(faults: &Faults) -> OfiHost {
    let ((provider, address), faults) = (provider(), faults.clone());
    let options = OfiHostOptions::new(&provider, SocketAddr::new(address, 0));
    with_libfabric(OfiHost::start(OfiHostOptions { faults, ..options }))
}

fn engine() -> Arc<OfiEngine> {
    engine_with(&Faults::default())
}

fn engine_with(faults: &Faults) -> Arc<OfiEngine> {
    let faults = faults.clone();
    start(OfiOptions { faults, ..OfiOptions::default() })
}

/// An engine whose reads use bounce buffers, as they always do over iWARP.
fn bouncing_engine_with(faults: &Faults) -> Arc<OfiEngine> {
    let faults = faults.clone();
    start(OfiOptions { always_bounce: true, faults, ..OfiOptions::default() })
}

fn start(options: OfiOptions) -> Arc<OfiEngine> {
    let (provider, attach_timeout) = (provider().0, PATIENCE);
    with_libfabric(OfiEngine::start(OfiOptions { provider, attach_timeout, ..options }))
}

/// Access to memory that the tests use only by copies.
fn all_of(arena: &Arc<Arena>) -> OutsideAccess {
    OutsideAccess::of_copied(arena).unwrap()
}

struct Rig {
    engine: Arc<OfiEngine>,
    here: Arc<Arena>,
    there: Arc<Arena>,
    local: DmaRegion,
    grant: OfiGrant,
}

impl Rig {
    fn new(host: &OfiHost) -> Rig {
        Rig::with(host, engine())
    }

    fn with(host: &OfiHost, engine: Arc<OfiEngine>) -> Rig {
        let there = Arena::shared("there", LEN).unwrap();
        let here = Arena::shared("here", LEN).unwrap();
        let local = engine.register_local(&all_of(&here)).unwrap();
        let grant = host.grant(&all_of(&there)).unwrap();
        Rig { engine, here, there, local, grant }
    }

    async fn attach(&self) -> (EnginePeer, Box<dyn Bell>, DmaRegion) {
        let (peer, bell) =
            self.engine.attach(MemoryAccess::Offer(self.grant.offer.clone()), LEN).await.unwrap();
        let host = self.engine.register_peer(&peer, 0..LEN).unwrap();
        (peer, bell, host)
    }

    fn to_peer(&self, host: &DmaRegion, len: usize) -> Transfer {
        let (src, dst) =
            (DmaAddress { region: self.local.id(), offset: 0 }, DmaAddress { region: host.id(), offset: 0 });
        Transfer { src, dst, len }
    }

    async fn copy(&self, host: &DmaRegion, len: usize) -> ChainCompletion {
        self.carry_out(self.to_peer(host, len)).await
    }

    async fn fetch(&self, host: &DmaRegion, len: usize) -> ChainCompletion {
        let Transfer { src, dst, len } = self.to_peer(host, len);
        self.carry_out(Transfer { src: dst, dst: src, len }).await
    }

    async fn carry_out(&self, transfer: Transfer) -> ChainCompletion {
        self.engine
            .post(URGENT, Chain { transfers: vec![transfer], tag: Some(1), ..Chain::default() })
            .unwrap();
        self.completion().await
    }

    async fn completion(&self) -> ChainCompletion {
        self.completions(1).await.remove(0)
    }

    /// Waits for at least `count` completions.
    async fn completions(&self, count: usize) -> Vec<ChainCompletion> {
        let mut done = Vec::new();
        let all = poll_fn(|cx| {
            self.engine.poll_completions(cx, &mut done);
            if done.len() < count { Poll::Pending } else { Poll::Ready(()) }
        });
        tokio::time::timeout(PATIENCE, all).await.expect("completions did not arrive in time");
        done
    }

    /// Waits until the engine reports that the connection was lost. No chain may be in progress.
    async fn lost(&self) {
        let lost = self.completion().await;
        assert!(lost.tag == 0 && lost.result.is_err(), "{lost:?}");
    }

    fn content(&self) -> Vec<u8> {
        let mut out = vec![0; LEN];
        assert!(self.there.copy_out(0, &mut out));
        out
    }
}

#[tokio::test]
async fn the_engine_passes_the_conformance_suite() {
    every_check(engine).await;
}

#[tokio::test]
async fn the_engine_passes_the_conformance_suite_with_bounce_buffers() {
    every_check(|| bouncing_engine_with(&Faults::default())).await;
}

async fn every_check(engine: impl Fn() -> Arc<OfiEngine>) {
    let host = Arc::new(host());
    conformance::run(async || {
        let (engine, there) = (engine(), Arena::shared("there", LEN).unwrap());
        let grant = host.grant(&all_of(&there)).unwrap();
        let (peer, bell) = engine.attach(MemoryAccess::Offer(grant.offer.clone()), LEN).await.unwrap();
        JoinedEngine {
            engine,
            peer,
            bell,
            there,
            host_doorbell: Doorbell::new(grant.host_doorbell.try_clone().unwrap()).unwrap(),
            osd_doorbell: grant.osd_doorbell.try_clone().unwrap().into(),
            keep: Box::new((grant, Arc::clone(&host))),
        }
    })
    .await;
}

#[tokio::test]
async fn an_offer_admits_only_one_engine_that_knows_the_offers_secret() {
    let host = host();
    let rig = Rig::new(&host);
    let wrong = OfiOffer { secret: rig.grant.offer.secret ^ 1, ..rig.grant.offer.clone() };
    let refused =
        rig.engine.attach(MemoryAccess::Offer(wrong), LEN).await.err().expect("refused").to_string();
    assert!(refused.contains("no such attachment"), "{refused}");
    let (_peer, _bell, region) = rig.attach().await;
    let second = engine()
        .attach(MemoryAccess::Offer(rig.grant.offer.clone()), LEN)
        .await
        .err()
        .expect("refused")
        .to_string();
    assert!(second.contains("taken"), "{second}");
    assert_eq!(rig.copy(&region, 4096).await.result, Ok(()), "the first attachment still works");
    let other = OfiOffer { provider: "another".to_owned(), ..rig.grant.offer.clone() };
    assert!(matches!(engine().attach(MemoryAccess::Offer(other), LEN).await, Err(ChannelError::Refused(_))));
}

#[tokio::test]
async fn a_dropped_grant_revokes_access_to_its_memory() {
    let host = host();
    let mut rig = Rig::new(&host);
    let (_peer, _bell, region) = rig.attach().await;
    assert!(rig.here.copy_in(0, &[1; 4096]));
    assert_eq!(rig.copy(&region, 4096).await.result, Ok(()));
    // Grant other memory under another secret. This drops the first grant.
    rig.grant = host.grant(&all_of(&Arena::shared("other", LEN).unwrap())).unwrap();
    rig.lost().await;
    assert!(rig.here.copy_in(0, &[2; 4096]));
    let refused = rig.copy(&region, 4096).await.result.unwrap_err();
    assert!(refused.why.contains("no such attachment"), "{refused}");
    assert_eq!(rig.content()[..4096], [1; 4096]);
    let (_peer, _bell, region) = rig.attach().await;
    assert_eq!(rig.copy(&region, 4096).await.result, Ok(()));
    assert_eq!(rig.content()[..4096], [1; 4096], "the second attachment wrote to the first memory");
}

#[tokio::test]
async fn a_wrong_memory_key_fails_only_the_attachment_that_uses_it() {
    let host = host();
    let (victim, rig) = (Rig::new(&host), Rig::new(&host));
    let (_victims_peer, _victims_bell, victims_region) = victim.attach().await;
    let mut offer = rig.grant.offer.clone();
    offer.memory.key ^= 1;
    let (peer, _bell) = rig.engine.attach(MemoryAccess::Offer(offer), LEN).await.unwrap();
    let region = rig.engine.register_peer(&peer, 0..LEN).unwrap();
    assert!(rig.here.copy_in(0, &[7; 4096]));
    let failed = rig.copy(&region, 4096).await;
    assert_eq!(failed.result.unwrap_err().done, 0);
    // The engine may connect again, but the next transfer fails again.
    assert!(rig.copy(&region, 4096).await.result.is_err());
    assert!(victim.content().iter().chain(&rig.content()).all(|byte| *byte == 0));
    assert_eq!(victim.copy(&victims_region, 4096).await.result, Ok(()), "the other attachment still works");
}

#[tokio::test]
async fn an_engine_notices_the_loss_of_a_host_and_can_attach_to_another_host() {
    let first = host();
    let rig = Rig::new(&first);
    let (peer, bell, region) = rig.attach().await;
    drop(first);
    rig.lost().await;
    assert!(rig.copy(&region, 4096).await.result.is_err());
    drop((peer, region));
    let end = poll_fn(|cx| bell.poll_wait(cx));
    assert!(
        tokio::time::timeout(PATIENCE, end).await.expect("the doorbell did not end in time").is_err(),
        "no more counts can arrive"
    );
    let second = host();
    let rig = Rig { grant: second.grant(&all_of(&rig.there)).unwrap(), ..rig };
    let (_peer, _bell, region) = rig.attach().await;
    assert_eq!(rig.copy(&region, 4096).await.result, Ok(()), "the engine works with the next host");
}

#[tokio::test]
async fn connections_closed_by_a_reset_are_opened_again() {
    let host = host();
    let rig = Rig::new(&host);
    let (_peer, bell, region) = rig.attach().await;
    let mut given_up = 0;
    for round in 0..20 {
        assert!(rig.here.copy_in(0, &[round; 4096]));
        assert_eq!(rig.copy(&region, 4096).await.result, Ok(()), "round {round}");
        assert_eq!(rig.content()[..4096], [round; 4096]);
        Doorbell::ring(rig.grant.osd_doorbell.as_fd(), 3).unwrap();
        let rung = poll_fn(|cx| bell.poll_wait(cx));
        assert_eq!(
            tokio::time::timeout(PATIENCE, rung)
                .await
                .expect("the osd's doorbell was not rung in time")
                .unwrap(),
            3
        );
        for _ in 0..8 {
            let chain = Chain {
                transfers: vec![rig.to_peer(&region, 1 << 20)],
                tag: Some(1),
                ring: None,
                ..Chain::default()
            };
            rig.engine.post(1, chain).unwrap();
        }
        rig.engine.reset();
        given_up += rig.completions(8).await.iter().filter(|c| c.result.is_err()).count();
    }
    assert!(given_up > 0, "no reset cancelled a chain");
}

/// Over iWARP, rdma_cm chooses a local port without knowing which ports TCP uses.
#[tokio::test]
async fn connections_are_opened_although_tcp_uses_some_local_ports() {
    let _alone = DESCRIPTORS.lock().await;
    // One of eight ports, so that most attempts to open five connections need another attempt.
    let address = provider().1;
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap();
    let mut range = range.split_whitespace().map(|port| port.parse::<u16>().unwrap());
    let (first, last) = (range.next().unwrap(), range.next().unwrap());
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).unwrap();
    let allowed = limit.maximum.map_or(usize::MAX, |most| most.saturating_sub(300) as usize);
    let wanted = usize::from(last - first) / 8;
    let ports = (first..=last).step_by(8).take(allowed);
    let taken: Vec<TcpListener> = ports.filter_map(|port| TcpListener::bind((address, port)).ok()).collect();
    assert!(taken.len() > wanted.min(allowed) / 2, "only {} ports are in use", taken.len());
    let host = host();
    let rig = Rig::new(&host);
    let (_peer, _bell, region) = rig.attach().await;
    for round in 0..20 {
        rig.engine.reset();
        assert_eq!(rig.fetch(&region, 4096).await.result, Ok(()), "round {round}");
    }
    if rig.engine.counters().bounced > 0 {
        assert!(rig.engine.ports_in_use() > 0, "over iWARP, no attempt met a port that TCP uses");
    }
}

#[tokio::test]
async fn a_host_with_a_failed_device_frees_memory_and_blocks_no_caller() {
    let faults = Faults::default();
    let host = host_with(&faults);
    let memory = all_of(&Arena::shared("there", LEN).unwrap());
    let grants: Vec<OfiGrant> = (0..100).map(|_| host.grant(&memory).unwrap()).collect();
    faults.arm("store.device=fail,count=1".parse().unwrap()).unwrap();
    // This wakes the host's thread, which then fails before or after it handles the grant.
    drop(host.grant(&memory));
    let ended = async {
        while host.is_running() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(PATIENCE, ended).await.expect("the host did not stop in time");
    assert!(matches!(host.grant(&memory), Err(ChannelError::EngineStopped(_))));
    // The thread discards the last commands after it is marked as stopped.
    let freed = async {
        while Arc::strong_count(memory.arena()) > 1 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(PATIENCE, freed).await.expect("a registration did not end");
    let revoked = tokio::task::spawn_blocking(|| grants.into_iter().for_each(|g| g.revoke().unwrap()));
    tokio::time::timeout(PATIENCE, revoked)
        .await
        .expect("a revocation blocks after the host has stopped")
        .unwrap();
}

#[tokio::test]
async fn a_device_failure_is_reported_and_the_device_is_opened_again() {
    let host = host();
    let faults = Faults::default();
    let rig = Rig::with(&host, engine_with(&faults));
    let (_peer, _bell, region) = rig.attach().await;
    assert_eq!(rig.copy(&region, 4096).await.result, Ok(()));
    for _ in 0..2 {
        faults.clear();
        faults.arm("dma.device=fail,count=1".parse().unwrap()).unwrap();
        // This wakes the thread. No chain is in progress that could report the failure.
        drop(rig.engine.register_local(&all_of(&rig.here)).unwrap());
        rig.lost().await;
        assert_eq!(faults.fired(Site::DmaDevice), 1);
        // No device is open now. A delayed transfer still completes.
        faults.arm("dma.transfer=stall,late=50ms,count=1".parse().unwrap()).unwrap();
        assert_eq!(rig.copy(&region, 4096).await.result, Ok(()));
    }
}

#[tokio::test]
async fn attaching_to_a_stopped_host_fails() {
    let host = host();
    let rig = Rig::new(&host);
    drop(host);
    assert!(rig.engine.attach(MemoryAccess::Offer(rig.grant.offer.clone()), LEN).await.is_err());
}

#[tokio::test]
async fn ended_attachments_leave_no_file_descriptors_open() {
    let _alone = DESCRIPTORS.lock().await;
    let host = host();
    let rig = Rig::new(&host);
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = open();
    for _ in 0..50 {
        let grant = host.grant(&all_of(&rig.there)).unwrap();
        let (peer, _bell) = rig.engine.attach(MemoryAccess::Offer(grant.offer.clone()), LEN).await.unwrap();
        let region = rig.engine.register_peer(&peer, 0..LEN).unwrap();
        assert_eq!(rig.copy(&region, 4096).await.result, Ok(()));
    }
    // Each attachment had the ends of five connections, ten in total. Other tests of this process
    // have open descriptors, too.
    assert!(open() < before + 250, "{before} before, {} after", open());
}

#[tokio::test]
async fn no_transfer_arrives_after_its_grant_was_revoked() {
    let host = host();
    let mut rig = Rig::new(&host);
    let (_peer, _bell, region) = rig.attach().await;
    assert!(rig.here.copy_in(0, &[1; LEN]));
    // Revoke the grant when many transfers are in progress and the first byte has arrived.
    const CHAINS: usize = 100;
    for _ in 0..CHAINS {
        let chain = Chain {
            transfers: vec![rig.to_peer(&region, 1 << 20)],
            tag: Some(1),
            ring: None,
            ..Chain::default()
        };
        rig.engine.post(1, chain).unwrap();
    }
    let other = host.grant(&all_of(&Arena::shared("other", LEN).unwrap())).unwrap();
    let mut first = [0];
    let begun = async {
        while first != [1] {
            tokio::task::yield_now().await;
            assert!(rig.there.copy_out(0, &mut first));
        }
    };
    tokio::time::timeout(PATIENCE, begun).await.expect("the first byte did not arrive in time");
    std::mem::replace(&mut rig.grant, other).revoke().unwrap();
    assert!(rig.there.copy_in(0, &[9; LEN]));
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(rig.content().iter().all(|byte| *byte == 9), "late bytes have arrived");
    let done = rig.completions(CHAINS).await;
    assert!(done.iter().any(|c| c.result.is_err()), "all transfers were complete before the revocation");
}

#[tokio::test]
async fn an_engine_refuses_memory_access_meant_for_another_engine() {
    let fd = || Doorbell::create().unwrap();
    let descriptors = MemoryFds { memory: fd(), host_doorbell: fd(), osd_doorbell: fd() };
    let refused = engine().attach(MemoryAccess::Descriptors(descriptors), LEN).await.err();
    assert!(matches!(refused, Some(ChannelError::WrongMemoryAccess { .. })));
}

#[tokio::test]
async fn reads_through_bounce_buffers_deliver_every_byte_once() {
    let host = host();
    let rig = Rig::with(&host, bouncing_engine_with(&Faults::default()));
    let (_peer, _bell, region) = rig.attach().await;
    assert_eq!(rig.copy(&region, 4096).await.result, Ok(()));
    assert_eq!(rig.engine.counters().bounced, 0, "writes need no bounce buffer");
    let bytes: Vec<u8> = (0..LEN).map(|at| (at / 100) as u8).collect();
    assert!(rig.there.copy_in(0, &bytes));
    // Together, the reads are longer than the buffer, and their lengths do not divide its length.
    let (mut offset, mut chains) = (0, 0);
    for len in [1, 63, 64, 4096, 70_000, 1 << 20, 2 << 20, 3, 1_300_000, 900_001, 2 << 20, 5000] {
        let place = |region: &DmaRegion| DmaAddress { region: region.id(), offset };
        let transfer = Transfer { src: place(&region), dst: place(&rig.local), len };
        rig.engine.post(1, Chain { transfers: vec![transfer], tag: Some(1), ..Chain::default() }).unwrap();
        offset += len;
        chains += 1;
    }
    let done = rig.completions(chains).await;
    assert!(done.iter().all(|chain| chain.result.is_ok()), "{done:?}");
    let mut here = vec![0; LEN];
    assert!(rig.here.copy_out(0, &mut here));
    assert!(here[..offset] == bytes[..offset] && here[offset..].iter().all(|byte| *byte == 0));
    assert_eq!(rig.engine.counters().bounced, offset as u64);
}

#[tokio::test]
async fn injected_faults_have_their_documented_effects() {
    for start in [engine_with, bouncing_engine_with] {
        faults_have_their_effects(start).await;
    }
}

async fn faults_have_their_effects(engine: fn(&Faults) -> Arc<OfiEngine>) {
    let host = host();
    let faults = Faults::default();
    let rig = Rig::with(&host, engine(&faults));
    let (peer, _bell, region) = rig.attach().await;
    let arm = |text: &str| {
        faults.clear();
        faults.arm(text.parse().unwrap()).unwrap();
    };
    assert!(rig.here.copy_in(0, &[1; 4096]));

    arm("dma.transfer=fail,count=1");
    assert_eq!(rig.copy(&region, 4096).await.result.unwrap_err().done, 0);
    assert_eq!(rig.copy(&region, 4096).await.result, Ok(()), "the next transfer succeeds");

    arm("dma.transfer=stall,late=200ms,count=1");
    let posted = std::time::Instant::now();
    assert_eq!(rig.copy(&region, 4096).await.result, Ok(()));
    assert!(posted.elapsed() >= Duration::from_millis(200));

    arm("dma.transfer=corrupt,count=1");
    assert_eq!(rig.copy(&region, 4096).await.result, Ok(()));
    let wrong = |bytes: &[u8]| bytes.iter().filter(|byte| **byte != 1).count();
    assert_eq!(wrong(&rig.content()[..4096]), 1, "one byte of host memory is damaged");
    let mut here = [0; 4096];
    assert!(rig.here.copy_out(0, &mut here));
    assert_eq!(wrong(&here), 0, "no byte of DPU memory is damaged");
    assert_eq!(rig.copy(&region, 4096).await.result, Ok(()));
    arm("dma.transfer=corrupt,count=1");
    assert_eq!(rig.fetch(&region, 4096).await.result, Ok(()));
    assert!(rig.here.copy_out(0, &mut here));
    assert_eq!((wrong(&here), wrong(&rig.content()[..4096])), (1, 0), "one fetched byte is damaged");

    arm("dma.doorbell=drop,count=1");
    for count in [64, 128] {
        let chain =
            Chain { ring: Some((peer.id, count)), tag: Some(2), transfers: Vec::new(), ..Chain::default() };
        rig.engine.post(URGENT, chain).unwrap();
    }
    let bell = Doorbell::new(rig.grant.host_doorbell.try_clone().unwrap()).unwrap();
    let rung = tokio::time::timeout(PATIENCE, poll_fn(|cx| bell.poll_wait(cx))).await.unwrap();
    assert_eq!(
        (rung.unwrap(), faults.fired(Site::DmaDoorbell)),
        (128, 1),
        "only the second doorbell arrives"
    );
}
