//! Attacks on memory of the server by a client that knows keys and addresses: memory in the domain of
//! another tenant, memory beyond a region, and memory whose region is closed.
//!
//! The server registers memory for the peers of a tenant only in these tests. In the first test, a
//! client of the tenant uses such memory, which shows that the key and the address are right.

use super::*;

const LEN: usize = 4096;

/// The content of memory that no attack may read or change.
const SECRET: u8 = 7;

/// The content of the attacker's own memory.
const OWN: u8 = 0xa5;

/// Reads and writes, as arguments of [`Attacker::access`].
const BOTH: [bool; 2] = [true, false];

/// What an attack aims at. The region is open as long as this value exists.
struct Target {
    remote: RemoteRegion,
    memory: Option<(Arc<Arena>, MemoryRegion)>,
}

impl Attacker {
    /// Reads or writes the first bytes of `target`, which may be anything. Returns whether this had an
    /// effect: data was read, or the server has accepted the write.
    fn access(&mut self, target: RemoteRegion, is_read: bool) -> bool {
        let arena = Arena::anonymous(LEN).expect("memory");
        assert!(arena.copy_in(0, &[OWN; LEN]));
        let local = MemoryRegion::register(&self.domain, &arena, Access::Local).expect("registered");
        let (slice, to) = (local.slice(0, LEN).expect("inside"), target.slice(0, LEN).expect("inside"));
        self.reads.clear();
        let post = if is_read { Endpoint::read } else { Endpoint::write };
        post(&self.endpoint, slice, to, 1).expect("the access is posted");
        self.until("end of the access", |a| a.is_closed || !a.reads.is_empty());
        if is_read {
            let mut content = [0; LEN];
            return arena.copy_out(0, &mut content) && content != [OWN; LEN];
        }
        // Over iWARP, a write completes before the server has checked it. The server answers to a later
        // frame only if it has accepted the write.
        self.reads == [true] && self.is_alive()
    }

    /// Whether the server still answers on this connection: it refuses a pull.
    fn is_alive(&mut self) -> bool {
        let request = frame::PullRequest { pull: 8, offer: 1, offset: 0, len: 1 };
        let token = self.token;
        if self.send_as(token, &Body::PullRequest(request), 0, &Payload::default()).is_err() {
            return false;
        }
        let refused = |a: &Attacker| a.frames.iter().any(|f| f.header.kind == FrameKind::PullRefused);
        self.until("answer or end", |a| a.is_closed || refused(a));
        let is_alive = refused(self) && !self.is_closed;
        self.frames.clear();
        is_alive
    }
}

impl Victim {
    /// Lets the attacker read or write what `aim` returns once the attacker is connected. Checks that
    /// the server refuses, that this costs the attacker only its own connection, and that the memory
    /// has not changed.
    async fn withstands(&mut self, what: &str, accesses: &[bool], aim: impl Fn(&Victim) -> Target) {
        for is_read in accesses.iter().copied() {
            let (tell, told) = std::sync::mpsc::channel::<RemoteRegion>();
            let attack = move |mut attacker: Attacker| {
                attacker.access(told.recv_timeout(PATIENCE).expect("a target"), is_read)
            };
            let (mut connection, attack) = self.attacked_by("attacker", attack).await;
            let target = aim(self);
            tell.send(target.remote).expect("the receiver exists");
            let has_effect = attack.await.expect("the attack ends without a panic");
            assert!(!has_effect, "{what}, read: {is_read}");
            interrupted(&mut connection).await;
            assert!(target.memory.is_none_or(|(memory, _)| is_intact(&memory)), "{what} was changed");
            self.is_well().await;
        }
    }

    /// Registers memory for the peers of a user's tenant.
    fn exposed(&self, user: &str) -> (Arc<Arena>, MemoryRegion) {
        let arena = Arena::anonymous(LEN).expect("memory");
        assert!(arena.copy_in(0, &[SECRET; LEN]));
        let region = self.control.register(Users::tenant_of(user), &arena, Access::Remote);
        (arena, region.expect("registered"))
    }

    /// The first region that the server has registered for its own use in the domain of a user's tenant.
    fn own_region(&self, user: &str) -> Target {
        let registered = self.control.registered(Users::tenant_of(user));
        let remote = *registered.first().expect("the server has registered memory");
        Target { remote, memory: None }
    }
}

fn is_intact(arena: &Arena) -> bool {
    let mut content = [0; LEN];
    arena.copy_out(0, &mut content) && content == [SECRET; LEN]
}

/// Whether a peer can read all memory in the domain of its connection: the driver siw does not check
/// the right to read.
fn reads_are_unchecked(victim: &Victim) -> bool {
    let address = victim.endpoint.parse().expect("an address");
    info(EndpointAddress::Connect(address)).exposes_local_memory()
}

#[tokio::test]
async fn memory_in_the_domain_of_another_tenant_is_out_of_reach() {
    let mut victim = Victim::new(ReceiveQueueKind::Shared).await;
    let (memory, region) = victim.exposed("bystander");
    let remote = region.remote();
    let (_connection, user) = victim
        .attacked_by("bystander", move |mut user| BOTH.map(|is_read| user.access(remote, is_read)))
        .await;
    let has_effect = user.await.expect("the accesses end without a panic");
    assert_eq!(has_effect, [true, true], "a user of the tenant can use the memory");
    assert!(memory.copy_in(0, &[SECRET; LEN]));
    let aim = |_: &Victim| Target { remote, memory: Some((Arc::clone(&memory), region.clone())) };
    victim.withstands("memory of another tenant", &BOTH, aim).await;
}

/// The server registers the memory of packets for itself only.
#[tokio::test]
async fn the_memory_of_packets_is_out_of_reach() {
    let mut victim = Victim::new(ReceiveQueueKind::Shared).await;
    victim.withstands("packets of another tenant", &BOTH, |victim| victim.own_region("bystander")).await;
    let accesses = if reads_are_unchecked(&victim) { &BOTH[1..] } else { &BOTH };
    victim.withstands("packets of the own tenant", accesses, |victim| victim.own_region("attacker")).await;
}

#[tokio::test]
async fn memory_beyond_a_region_is_out_of_reach() {
    let mut victim = Victim::new(ReceiveQueueKind::Shared).await;
    let half = LEN as u64 / 2;
    type Change = fn(&mut RemoteRegion, u64);
    let changes: [(&str, Change); 3] = [
        ("memory beyond a region", |region, half| region.base += half),
        ("memory before a region", |region, half| region.base = region.base.wrapping_sub(half)),
        ("memory with a guessed key", |region, _| region.key ^= 1),
    ];
    for (what, change) in changes {
        let aim = |victim: &Victim| {
            let (memory, region) = victim.exposed("attacker");
            let mut remote = region.remote();
            change(&mut remote, half);
            Target { remote, memory: Some((memory, region)) }
        };
        victim.withstands(what, &BOTH, aim).await;
    }
}

#[tokio::test]
async fn the_key_of_a_closed_region_is_stale() {
    let mut victim = Victim::new(ReceiveQueueKind::Shared).await;
    for is_read in BOTH {
        let (tell, told) = std::sync::mpsc::channel::<RemoteRegion>();
        let (close, closed) = std::sync::mpsc::channel();
        let attack = move |mut attacker: Attacker| {
            let target = told.recv_timeout(PATIENCE).expect("the region");
            let before = attacker.access(target, is_read);
            close.send(before).expect("the receiver exists");
            told.recv_timeout(PATIENCE).expect("the region is closed");
            attacker.access(target, is_read)
        };
        let (mut connection, attack) = victim.attacked_by("attacker", attack).await;
        let (memory, region) = victim.exposed("attacker");
        let target = region.remote();
        tell.send(target).expect("the receiver exists");
        let before = tokio::task::spawn_blocking(move || closed.recv_timeout(PATIENCE));
        let before = before.await.expect("no panic").expect("the first access ends");
        assert!(before, "the key was valid, read: {is_read}");
        drop(region);
        assert!(memory.copy_in(0, &[SECRET; LEN]));
        tell.send(target).expect("the receiver exists");
        assert!(!attack.await.expect("no panic"), "read: {is_read}");
        interrupted(&mut connection).await;
        assert!(is_intact(&memory));
        victim.is_well().await;
    }
}

/// The attacker names the memory that another client offers to the server: in accesses of its own, and
/// in a descriptor, so that the server accesses the memory.
#[tokio::test]
async fn memory_that_another_client_offers_is_out_of_reach() {
    let mut victim = Victim::new(ReceiveQueueKind::Shared).await;
    let data = vec![SECRET; 2 * LEN];
    let source = victim.client.0.offer_source(Buffer::in_memory(0, &data)).expect("offered");
    let offered = source.descriptor.remote.clone().expect("the client's memory is registered");
    let BulkSegment { address: base, key, len } = offered.segments[0];
    let remote = RemoteRegion { key, base, len };
    victim.withstands("another client's offer", &BOTH, |_| Target { remote, memory: None }).await;

    // The number of the transport is the attacker's own: otherwise, the server moves no data by RDMA.
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let (tell, told) = std::sync::mpsc::channel();
    let attack = move |mut attacker: Attacker| {
        tell.send(attacker.nonce).expect("the receiver exists");
        while stopped.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
            attacker.poll();
        }
    };
    let (connection, attack) = victim.attacked_by("attacker", attack).await;
    let nonce = told.recv_timeout(PATIENCE).expect("a connection");
    for transport in [u64::from_le_bytes(*nonce.last_chunk().expect("8 bytes")), offered.transport] {
        let remote = RemoteMemory { transport, ..offered.clone() };
        let descriptor = BulkDescriptor { remote: Some(remote), ..source.descriptor.clone() };
        let pool = pool();
        let dest = pool.alloc(data.len()).await.expect("a buffer");
        let pulled = connection.0.bulk_read(&descriptor, 0, dest, Duration::from_millis(500)).await;
        assert!(pulled.is_err(), "the server read memory of another client");
    }
    drop(stop);
    attack.await.expect("the attack ends without a panic");
    victim.is_well().await;
    let dest = pool().alloc(data.len()).await.expect("a buffer");
    let pulled = victim.server.0.bulk_read(&source.descriptor, 0, dest, PATIENCE).await;
    assert!(pulled.expect("the offer is still valid for its own connection").buf[..] == data[..]);
}
