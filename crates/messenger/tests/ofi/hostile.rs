//! Attacks on a server's endpoint by a client that calls libfabric directly. Each attack ends only
//! the attacker's own connection.

mod domains;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use base::block::Payload;
use base::mem::Arena;
use fabric::{
    Access, CompletionQueue, Domain, Endpoint, EndpointAddress, EndpointQueues, EventQueue, ExposedMemory,
    Fabric, FabricError, FabricEvent, Info, Library, MemoryRegion, Operation, PostError, ProviderQuery,
    RemoteRegion,
};
use identity::ProofKey;
use outboard_messenger::conformance::{Buffer, Rig, pool};
use outboard_messenger::frame::{self, Body, Frame, FrameHeader, FrameKind, HEADER_LEN, Resume};
use outboard_messenger::transport::ConnectTicket;
use outboard_messenger::transport::ofi::OfiControl;
use outboard_messenger::{
    ConnectOptions, ConnectionEvent, Ends, Limits, Message, MessengerError, ReceiveQueueKind,
};
use wire::{BulkDescriptor, BulkDirection, BulkOwner, BulkSegment, MemoryKind, RemoteMemory};

use super::begin::{Beginning, hello, proof};
use super::users::Users;

const PATIENCE: Duration = Duration::from_secs(40);
const PACKET: usize = 16 << 10;
const RECEIVES: usize = 32;
const LIMITS: Limits =
    Limits { max_header: 65_536, max_inline: 65_536, max_bulk: 1 << 20, eager: 4096, one_sided: true };

/// The attacker's side of a connection. Packets move only in [`Attacker::poll`].
struct Attacker {
    endpoint: Endpoint,
    events: EventQueue,
    completions: CompletionQueue,
    memory: MemoryRegion,
    domain: Domain,
    /// The token that packets to the server must carry.
    token: u64,
    nonce: [u8; 16],
    frames: Vec<Frame>,
    reads: Vec<bool>,
    granted: u32,
    received: u32,
    is_closed: bool,
}

impl Attacker {
    /// Begins a connection over TCP at `endpoint`, and moves it to libfabric.
    fn connect(user: &str, endpoint: &str) -> Attacker {
        let begun = Begun::of_user(user, endpoint);
        let mut attacker = Attacker::dial(&begun);
        attacker.resume(&begun);
        let answer = attacker.frame();
        assert!(matches!(answer.body, Body::Resumed(_)), "{answer:?}");
        attacker
    }

    /// Resumes a connection with the right proof.
    fn resume(&mut self, begun: &Begun) {
        self.resume_with(&begun.key, begun);
    }

    /// Resumes a connection with a proof by this key.
    fn resume_with(&mut self, key: &ProofKey, begun: &Begun) {
        let resume = begun.resume(self.nonce);
        self.send(&Body::Resume(resume.clone()), 0, &Payload::default());
        let Body::Challenge(challenge) = self.frame().body else { panic!("no challenge") };
        self.send(&proof(key, &resume, &challenge), 0, &Payload::default());
    }

    /// Connects over libfabric with a ticket of the connection.
    fn dial(begun: &Begun) -> Attacker {
        // Over iWARP, the kernel may choose a port that a TCP socket already uses.
        let dial = |number| Attacker::try_dial(&begun.path, &ConnectTicket::new(&begun.key, number)).ok()?;
        (1..=10).find_map(dial).expect("a connection")
    }

    /// Connects over libfabric with this ticket. Returns `None` if the kernel has no port, and the
    /// reason if the server refuses the ticket.
    fn try_dial(address: &str, ticket: &ConnectTicket) -> Result<Option<Attacker>, String> {
        let to: SocketAddr = address.parse().expect("an address");
        let info = info(EndpointAddress::Connect(to));
        let fabric = Fabric::open(&info).expect("a fabric");
        let domain = Domain::open(&fabric, info.duplicate().expect("memory")).expect("a domain");
        let completions = CompletionQueue::open(&domain, 256).expect("a queue");
        let events = EventQueue::open(&fabric).expect("a queue");
        let endpoint =
            Endpoint::connecting(&info, EndpointQueues::new(&events, &completions), 1).expect("an endpoint");
        let arena = Arena::anonymous(2 * RECEIVES * PACKET).expect("memory");
        let memory = MemoryRegion::register(&domain, &arena, Access::Messages).expect("registered");
        for slot in 0..RECEIVES {
            endpoint
                .receive(memory.slice(slot * PACKET, PACKET).expect("inside"), slot as u64)
                .expect("posted");
        }
        endpoint.establish(&ticket.encode()).expect("connecting");
        let deadline = Instant::now() + PATIENCE;
        let token = loop {
            match events.read().expect("events") {
                Some(FabricEvent::Connected { data, .. }) => {
                    break u64::from_le_bytes(data[..8].try_into().expect("8 bytes"));
                }
                Some(FabricEvent::SomeFailed { error: FabricError::Call { code, .. } })
                    if code == rustix::io::Errno::ADDRINUSE.raw_os_error() =>
                {
                    return Ok(None);
                }
                Some(other) => return Err(format!("{other:?}")),
                None => completions.poll(&mut Vec::new()).expect("completions"),
            }
            assert!(Instant::now() < deadline, "no connection");
        };
        let (frames, reads) = (Vec::new(), Vec::new());
        let granted = RECEIVES as u32;
        Ok(Some(Attacker {
            endpoint,
            events,
            completions,
            memory,
            domain,
            token,
            nonce: ticket.nonce,
            frames,
            reads,
            granted,
            received: 0,
            is_closed: false,
        }))
    }

    /// Handles all events and completions that have arrived.
    fn poll(&mut self) {
        if let Some(FabricEvent::Closed { .. } | FabricEvent::Failed { .. }) =
            self.events.read().expect("events")
        {
            self.is_closed = true;
        }
        let mut completions = Vec::new();
        self.completions.poll(&mut completions).expect("completions");
        for completion in completions {
            match (completion.operation, completion.result) {
                (Operation::Read | Operation::Write, result) => self.reads.push(result.is_ok()),
                (Operation::Receive, Ok(())) => self.packet(completion.token as usize, completion.len),
                _ => {}
            }
        }
    }

    fn packet(&mut self, slot: usize, len: usize) {
        let mut packet = vec![0; len];
        assert!(self.memory.arena().expect("an arena").copy_out(slot * PACKET, &mut packet));
        self.received += 1;
        assert_eq!(packet[..8], self.nonce[..8], "packets to this side carry its token");
        let mut content = bytes::Bytes::from(packet).slice(16..);
        while let Ok(Some((frame, len))) = frame::decode(&content, &LIMITS) {
            self.frames.push(frame);
            content = content.slice(len..);
        }
        let again = self.memory.slice(slot * PACKET, PACKET).expect("inside");
        if self.endpoint.receive(again, slot as u64).is_ok() {
            self.granted += 1;
        }
    }

    fn until(&mut self, what: &str, mut done: impl FnMut(&mut Attacker) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !done(self) {
            assert!(Instant::now() < deadline, "no {what}");
            self.poll();
        }
    }

    fn frame(&mut self) -> Frame {
        self.until("frame", |a| !a.frames.is_empty() || a.is_closed);
        self.frames.remove(0)
    }

    fn is_ended(&mut self) {
        self.until("end", |a| a.is_closed || a.reads.contains(&false));
    }

    fn send(&mut self, body: &Body, seq: u64, payload: &Payload) {
        let token = self.token;
        self.send_as(token, body, seq, payload).expect("posted");
    }

    fn send_as(&mut self, token: u64, body: &Body, seq: u64, payload: &Payload) -> Result<(), PostError> {
        let mut packet = [&token.to_le_bytes()[..], &self.granted.to_le_bytes(), &[0; 4]].concat();
        frame::encode_head(&mut packet, body.kind(), seq, 0, payload, |out| body.encode(out));
        packet.extend_from_slice(payload.data());
        let at = RECEIVES * PACKET;
        assert!(self.memory.arena().expect("an arena").copy_in(at, &packet));
        self.endpoint.send(self.memory.slice(at, packet.len()).expect("inside"), 99)?;
        let sent = Instant::now();
        // Wait until the packet is sent, because the next packet reuses its memory.
        while sent.elapsed() < Duration::from_millis(5) {
            self.poll();
        }
        Ok(())
    }

    fn message(&mut self, seq: u64, header: &[u8]) {
        let header = bytes::Bytes::copy_from_slice(header);
        self.send(&Body::Message(header), seq, &Payload::default());
    }
}

/// A connection that an attacker has begun over TCP.
struct Begun {
    key: ProofKey,
    connection: u128,
    /// The address of the server's libfabric endpoint.
    path: String,
    _tcp: TcpStream,
}

impl Begun {
    fn new(endpoint: &str) -> Begun {
        Begun::of_user("attacker", endpoint)
    }

    fn of_user(user: &str, endpoint: &str) -> Begun {
        let mut tcp = TcpStream::connect(endpoint).expect("connects");
        tcp.set_read_timeout(Some(PATIENCE)).expect("a socket");
        let mut beginning = Beginning::new(&Users::trust(user), hello());
        loop {
            tcp.write_all(&beginning.output()).expect("written");
            let mut bytes = vec![0; HEADER_LEN];
            tcp.read_exact(&mut bytes).expect("a header");
            let header =
                FrameHeader::decode(bytes.first_chunk().expect("a header"), &LIMITS).expect("a header");
            let mut body = vec![0; header.body_len()];
            tcp.read_exact(&mut body).expect("a body");
            let (body, _) = header.decode_body(body.into()).expect("a body");
            if let Some(Body::Welcome(welcome)) = beginning.frame(&body) {
                let path = welcome.paths[0].endpoint.clone();
                return Begun { key: beginning.key(), connection: welcome.connection, path, _tcp: tcp };
            }
        }
    }

    fn resume(&self, nonce: [u8; 16]) -> Resume {
        Resume { connection: self.connection, nonce, received: 0, granted: 1 << 20 }
    }
}

fn info(target: EndpointAddress) -> Info {
    let query = ProviderQuery { provider: Some(super::provider().0), target, shared_receive: false };
    Library::load().and_then(|library| library.query(&query)).expect("a provider").swap_remove(0)
}

/// A server under attack, and a connection of another client, which the attack must not affect.
struct Victim {
    endpoint: String,
    listener: Box<dyn outboard_messenger::Listener>,
    client: Ends,
    server: Ends,
    /// Control of the server's transport.
    control: Arc<OfiControl>,
    _rigs: [Rig; 2],
}

impl Victim {
    async fn new(queue: ReceiveQueueKind) -> Victim {
        // A long grace period, so that a busy machine does not look like a successful attack.
        let (rig, control) = super::controlled_rig(queue, 3, Users::node());
        let rigs = [rig, super::rig_with(queue, 3, Users::trust("bystander"))];
        let mut listener = rigs[0].listen().await;
        let endpoint = listener.endpoint();
        let connecting = rigs[1].stack.connect(&endpoint, ConnectOptions { timeout: PATIENCE });
        let (client, server) = tokio::join!(connecting, listener.accept());
        let (client, mut server) = (client.expect("connects"), server.expect("accepts"));
        moved(&mut server).await;
        Victim { endpoint, listener, client, server, control, _rigs: rigs }
    }

    /// Runs `attack` on a separate thread. Returns the server's end of the attacker's connection.
    async fn attacked(
        &mut self,
        attack: impl FnOnce(Attacker) + Send + 'static,
    ) -> (Ends, tokio::task::JoinHandle<()>) {
        self.attacked_by("attacker", attack).await
    }

    /// Like [`attacked`](Self::attacked), with a connection of this user.
    async fn attacked_by<T: Send + 'static>(
        &mut self,
        user: &'static str,
        attack: impl FnOnce(Attacker) -> T + Send + 'static,
    ) -> (Ends, tokio::task::JoinHandle<T>) {
        let endpoint = self.endpoint.clone();
        let attack = tokio::task::spawn_blocking(move || attack(Attacker::connect(user, &endpoint)));
        let accepted = async {
            loop {
                // The other client, or this one, may have needed several attempts.
                if let Ok(connection) = self.listener.accept().await {
                    break connection;
                }
            }
        };
        let mut connection = tokio::time::timeout(PATIENCE, accepted).await.expect("a connection");
        moved(&mut connection).await;
        (connection, attack)
    }

    /// Checks that the other client's connection still works, on the same transport.
    async fn is_well(&mut self) {
        self.client.0.send(Message { header: "well".into(), ..Message::default() }).await.expect("sent");
        match tokio::time::timeout(PATIENCE, self.server.1.next()).await.expect("in time") {
            ConnectionEvent::Message(message) => assert_eq!(message.header, "well"),
            other => panic!("the attack affected another client: {other:?}"),
        }
        let data = vec![3; 100_000];
        let source = self.client.0.offer_source(Buffer::in_memory(0, &data)).expect("offered");
        let dest = pool().alloc(data.len()).await.expect("a buffer");
        let pulled = self.server.0.bulk_read(&source.descriptor, 0, dest, PATIENCE).await.expect("pulled");
        assert!(pulled.buf[..] == data[..]);
        source.finish();
    }
}

/// Waits until a new connection has moved from TCP to libfabric.
async fn moved(ends: &mut Ends) {
    for _ in 0..2 {
        let event = tokio::time::timeout(PATIENCE, ends.1.next()).await.expect("in time");
        assert!(matches!(event, ConnectionEvent::Interrupted | ConnectionEvent::Resumed), "{event:?}");
    }
}

/// Waits until the connection has lost its transport.
async fn interrupted(ends: &mut Ends) {
    let ended = async {
        loop {
            match ends.1.next().await {
                ConnectionEvent::Interrupted | ConnectionEvent::Lost(_) => return,
                ConnectionEvent::Message(_) | ConnectionEvent::Resumed => {}
            }
        }
    };
    tokio::time::timeout(PATIENCE, ended).await.expect("the attacker's transport ends");
}

/// The attacker guesses keys of memory regions. The addresses are those of the server's process,
/// which is also the test's process.
#[tokio::test]
async fn a_client_cannot_reach_the_memory_of_its_server() {
    let mut victim = Victim::new(ReceiveQueueKind::Shared).await;
    let arena = Arena::anonymous(1 << 20).expect("memory");
    let (start, _) = arena.as_raw();
    let start = start as u64;
    for (i, key) in [0, 1, 2, 3, 0x100, 0x1000, u64::from(u32::MAX), rand::random()].into_iter().enumerate() {
        let (mut connection, attack) = victim
            .attacked(move |mut attacker| {
                let local = Arena::anonymous(4096).expect("memory");
                let local =
                    MemoryRegion::register(&attacker.domain, &local, Access::Local).expect("registered");
                let target = RemoteRegion { key, base: start, len: 4096 }.slice(0, 4096).expect("inside");
                let into = local.slice(0, 4096).expect("inside");
                let posted = match i % 2 {
                    0 => attacker.endpoint.read(into, target, 1),
                    _ => attacker.endpoint.write(into, target, 1),
                };
                posted.expect("posted");
                attacker.is_ended();
                assert!(!attacker.reads.contains(&true) || i % 2 == 1, "key {key} gave access to memory");
            })
            .await;
        interrupted(&mut connection).await;
        attack.await.expect("the attack ends without a panic");
        victim.is_well().await;
    }
    let mut content = vec![1; 4096];
    assert!(arena.copy_out(0, &mut content));
    assert!(content.iter().all(|byte| *byte == 0), "an attack changed the memory");
}

#[tokio::test]
async fn a_peer_that_exceeds_its_credit_or_sends_invalid_packets_loses_its_link() {
    for queue in [ReceiveQueueKind::Shared, ReceiveQueueKind::PerConnection] {
        let mut victim = Victim::new(queue).await;
        let attacks: [fn(&mut Attacker); 4] = [
            // More packets than the server granted: the attacker does not wait for grants.
            |a| {
                for seq in 1..400 {
                    let header = bytes::Bytes::from_static(b"flood");
                    let token = a.token;
                    if a.is_closed
                        || a.send_as(token, &Body::Message(header), seq, &Payload::default()).is_err()
                    {
                        return;
                    }
                    a.granted = a.granted.wrapping_add(1 << 20);
                }
            },
            |a| {
                a.granted = a.granted.wrapping_sub(1000);
                a.message(1, b"the grant decreases");
            },
            |a| a.send(&Body::Message(bytes::Bytes::new()), 77, &Payload::default()),
            |a| {
                let at = RECEIVES * PACKET;
                let packet = [&a.token.to_le_bytes()[..], &a.granted.to_le_bytes(), &[7; 4000]].concat();
                assert!(a.memory.arena().expect("an arena").copy_in(at, &packet));
                let slice = a.memory.slice(at, packet.len()).expect("inside");
                a.endpoint.send(slice, 99).expect("posted");
            },
        ];
        for attack in attacks {
            let (mut connection, attack) = victim
                .attacked(move |mut attacker| {
                    attack(&mut attacker);
                    attacker.until("end", |a| a.is_closed);
                })
                .await;
            interrupted(&mut connection).await;
            attack.await.expect("the attack ends without a panic");
            victim.is_well().await;
        }
    }
}

/// The server delivers only the packet with the right token.
#[tokio::test]
async fn packets_with_a_wrong_token_are_dropped() {
    let mut victim = Victim::new(ReceiveQueueKind::Shared).await;
    let (mut connection, attack) = victim
        .attacked(|mut attacker| {
            for wrong in [0, 1, attacker.token ^ 1, u64::MAX] {
                let forged = Body::Message("forged".into());
                attacker.send_as(wrong, &forged, 1, &Payload::default()).expect("posted");
            }
            attacker.message(1, b"mine");
            attacker.until("answer", |a| a.frames.iter().any(|f| f.header.kind == FrameKind::Message));
        })
        .await;
    match tokio::time::timeout(PATIENCE, connection.1.next()).await.expect("in time") {
        ConnectionEvent::Message(message) => {
            assert_eq!(message.header, "mine", "a forged packet was delivered")
        }
        other => panic!("{other:?}"),
    }
    connection.0.send(Message { header: "answer".into(), ..Message::default() }).await.expect("sent");
    attack.await.expect("the attack ends without a panic");
    victim.is_well().await;
}

/// The client resumes another connection than its ticket is for, has another nonce than its ticket, or
/// uses the ticket of a client of another tenant, without this client's key.
#[tokio::test]
async fn a_resumption_that_differs_from_the_ticket_is_rejected() {
    let mut victim = Victim::new(ReceiveQueueKind::Shared).await;
    let endpoint = victim.endpoint.clone();
    let attack = tokio::task::spawn_blocking(move || {
        let (first, second) = (Begun::new(&endpoint), Begun::new(&endpoint));
        let mut attacker = Attacker::dial(&first);
        attacker.resume(&second);
        let answer = attacker.frame();
        assert!(matches!(answer.body, Body::Reject(_)), "{answer:?}");
        let mut attacker = Attacker::dial(&Begun::new(&endpoint));
        attacker.nonce[15] ^= 1;
        attacker.resume(&second);
        let answer = attacker.frame();
        assert!(matches!(answer.body, Body::Reject(_)), "{answer:?}");
        let bystander = Begun::of_user("bystander", &endpoint);
        let mut attacker = Attacker::dial(&bystander);
        attacker.resume_with(&first.key, &bystander);
        let answer = attacker.frame();
        assert!(matches!(answer.body, Body::Reject(_)), "{answer:?}");
    });
    attack.await.expect("the attack ends without a panic");
    victim.is_well().await;
}

/// The server creates no endpoint for a peer whose ticket was used before, is older than a used one, is
/// guessed, changed, or made with another key.
#[tokio::test]
async fn a_connect_request_without_a_valid_ticket_is_refused() {
    let mut victim = Victim::new(ReceiveQueueKind::Shared).await;
    let endpoint = victim.endpoint.clone();
    let attack = tokio::task::spawn_blocking(move || {
        let (begun, other) = (Begun::new(&endpoint), Begun::of_user("bystander", &endpoint));
        let used = (2..10).map(|number| ConnectTicket::new(&begun.key, number)).find(|ticket| {
            Attacker::try_dial(&begun.path, ticket).expect("a valid ticket is accepted").is_some()
        });
        let used = used.expect("a connection");
        let fresh = ConnectTicket::new(&begun.key, 20);
        // The connection of another tenant, with the proof of the own one.
        let foreign = ConnectTicket::connection_in_tickets(&other.key);
        let foreign = ConnectTicket { connection: foreign, ..ConnectTicket::new(&begun.key, 20) };
        let other = ConnectTicket { connection: fresh.connection, ..ConnectTicket::new(&other.key, 20) };
        let guessed = ConnectTicket { connection: 7, ..fresh.clone() };
        let mut changed = fresh.clone();
        changed.nonce[0] ^= 1;
        let older = ConnectTicket::new(&begun.key, 1);
        for (name, ticket) in [
            ("used", used),
            ("older", older),
            ("other key", other),
            ("another tenant's", foreign),
            ("guessed", guessed),
            ("changed", changed),
        ] {
            let refused = Attacker::try_dial(&begun.path, &ticket);
            assert!(refused.is_err(), "{name}");
        }
        assert!(Attacker::try_dial(&begun.path, &fresh).is_ok(), "the refusals cost no valid ticket");
    });
    attack.await.expect("the attack ends without a panic");
    victim.is_well().await;
}

/// The client exposes memory and then polls no more. Over a provider that needs the client's
/// polling, a read of this memory never ends. The server's buffer still returns to its pool, and
/// other clients do not wait.
#[tokio::test]
async fn a_pull_from_a_stalled_client_returns_its_buffer() {
    let mut victim = Victim::new(ReceiveQueueKind::Shared).await;
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let (tell, told) = std::sync::mpsc::channel();
    let (connection, attack) = victim
        .attacked(move |attacker| {
            let source = ExposedMemory::Bytes(vec![9; 1 << 20].into());
            let source = MemoryRegion::expose(&attacker.domain, source, Access::RemoteRead).expect("exposed");
            tell.send((source.remote(), attacker.nonce)).expect("the receiver exists");
            // The client polls no more from here on.
            let _ = stopped.recv();
        })
        .await;
    let (remote, nonce) = told.recv_timeout(PATIENCE).expect("the attacker exposes memory");
    let RemoteRegion { key, base, len } = remote;
    let checksums = Payload::compute(0, vec![9; 1 << 20].into());
    let descriptor = BulkDescriptor {
        owner: BulkOwner::Peer,
        memory: MemoryKind::Host,
        segments: vec![BulkSegment { address: 0, key: 1, len }],
        direction: BulkDirection::Read,
        block_offset: 0,
        expires_ms: 1000,
        remote: Some(RemoteMemory {
            transport: u64::from_le_bytes(nonce[8..].try_into().expect("8 bytes")),
            segments: vec![BulkSegment { address: base, key, len }],
            checksums: checksums.checksums().iter().flat_map(|sum| sum.to_le_bytes()).collect(),
        }),
    };
    let pool = pool();
    let all = pool.free_bytes().0;
    let dest = pool.alloc(1 << 20).await.expect("a buffer");
    let limit = Duration::from_millis(200);
    let pulled = connection.0.bulk_read(&descriptor, 0, dest, limit).await;
    match super::provider().0.as_str() {
        // Over `tcp`, data moves only while both sides poll.
        "tcp" => assert_eq!(pulled.err(), Some(MessengerError::TimedOut(limit))),
        // An RDMA device moves data without the client's polling.
        _ => drop(pulled),
    }
    let came_back = async {
        while pool.free_bytes().0 < all {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE, came_back).await.expect("the buffer returns to the pool");
    victim.is_well().await;
    drop(stop);
    drop(connection);
    attack.await.expect("the attack ends without a panic");
}
