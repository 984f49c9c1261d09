//! Several sessions on one connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use base::BoxFuture;
use base::block::Payload;
use bytes::Bytes;
use client::engine::SharedConnections;
use client::{Client, Options};
use futures::future::join_all;
use messenger::{
    ConnectOptions, Connection, ConnectionEvent, Ends, Incoming, Listener, Message, NetworkStack, UseAs,
};
use osd::OsdConfig;
use wire::limits::MAX_STRANDS;
use wire::{
    AdminReply, AdminRequest, Error, ObjectReply, ObjectRequest, Query, Reply, ReplyBody, RequestBody,
    RequestHead, SessionId, SessionInfo,
};

use crate::common::{Node, capability, data, moment, stack};
use crate::raw::{append, head};
use crate::rights::World;

/// Counts the connections that are opened.
struct Counting {
    inner: Arc<dyn NetworkStack>,
    opened: AtomicUsize,
}

impl NetworkStack for Counting {
    fn listen<'a>(&'a self, address: &'a str) -> BoxFuture<'a, messenger::Result<Box<dyn Listener>>> {
        self.inner.listen(address)
    }

    fn connect<'a>(
        &'a self,
        endpoint: &'a str,
        options: ConnectOptions,
    ) -> BoxFuture<'a, messenger::Result<Ends>> {
        self.opened.fetch_add(1, Ordering::Relaxed);
        self.inner.connect(endpoint, options)
    }
}

/// Connections that several clients share, and the number of connections that were opened.
fn shared() -> (SharedConnections, Arc<Counting>) {
    let counting = Arc::new(Counting { inner: stack(UseAs::Client), opened: AtomicUsize::new(0) });
    (SharedConnections::over(Arc::clone(&counting) as _), counting)
}

async fn connect(node: &Node, connections: &SharedConnections) -> Client {
    let options = node.options(Options::default());
    Client::connect_sharing(connections, &node.endpoint, options).await.unwrap()
}

async fn sessions(client: &Client) -> Vec<SessionInfo> {
    match client.administer(AdminRequest::ListSessions).await.unwrap() {
        AdminReply::Sessions(sessions) => sessions,
        other => panic!("{other:?}"),
    }
}

/// Waits until the node has this number of sessions.
async fn until_sessions(client: &Client, expected: usize) {
    let mut found = 0;
    for _ in 0..400 {
        found = client.status().await.unwrap().sessions as usize;
        if found == expected {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("the node has {found} sessions instead of {expected}");
}

#[tokio::test]
async fn many_sessions_use_one_connection_per_shard_and_close_it_together() {
    let node = Node::start();
    let (operator, pool) = node.pool().await;
    // The links to all shards connect when they are needed.
    pool.object("first").unwrap().put("x").await.unwrap();
    let shards = operator.status().await.unwrap().shards.len();
    let (connections, counting) = shared();
    let clients = join_all((0..20).map(|_| connect(&node, &connections))).await;
    let copies = clients.iter().enumerate().map(|(n, client)| async move {
        // Inline data, pulled data and staged data.
        for (size, at) in [(100, 0), (300 << 10, 1), (5 << 20, 2)] {
            let object = client.pool("pool").unwrap().object(&format!("object {n} {at}")).unwrap();
            let content = data(size, n as u64);
            object.put(content.clone()).await.unwrap();
            assert_eq!(object.get().await.unwrap(), content);
        }
        let object = client.pool("pool").unwrap().object("log").unwrap();
        object.append("x").await.unwrap();
    });
    join_all(copies).await;
    let log = pool.object("log").unwrap().get().await.unwrap();
    assert_eq!(log.len(), 20, "each append took effect once");
    assert!(counting.opened.load(Ordering::Relaxed) <= shards, "the sessions share the connections");
    until_sessions(&operator, 21).await;
    let (ended, others) = clients.split_at(10);
    for client in ended {
        client.close().await;
    }
    until_sessions(&operator, 11).await;
    for client in others {
        assert_eq!(client.pool("pool").unwrap().object("log").unwrap().stat().await.unwrap().size, 20);
        client.close().await;
    }
    until_sessions(&operator, 1).await;
    let opened = counting.opened.load(Ordering::Relaxed);
    assert!(opened <= shards, "no session needed a new connection");
    // A connection closes soon after its last session. Then the next session opens a new one.
    let began = Instant::now();
    while counting.opened.load(Ordering::Relaxed) == opened {
        assert!(began.elapsed() < Duration::from_secs(20), "the connections of closed sessions stay open");
        let again = connect(&node, &connections).await;
        assert_eq!(again.pool("pool").unwrap().object("log").unwrap().stat().await.unwrap().size, 20);
        again.close().await;
        moment().await;
    }
}

#[tokio::test]
async fn a_lost_connection_delays_all_of_its_sessions_and_loses_none() {
    let mut node = Node::start();
    let (_operator, pool) = node.pool().await;
    let (connections, counting) = shared();
    let clients = join_all((0..8).map(|_| connect(&node, &connections))).await;
    let appends = |count: u32| {
        join_all(clients.iter().map(move |client| async move {
            for _ in 0..count {
                client.pool("pool").unwrap().object("log").unwrap().append("x").await.unwrap();
            }
        }))
    };
    appends(5).await;
    let before = counting.opened.load(Ordering::Relaxed);
    // The appends have been sent when the node restarts.
    let (_, ()) = tokio::join!(appends(20), async { node.restart() });
    assert_eq!(pool.object("log").unwrap().get().await.unwrap().len(), 8 * 25);
    assert!(counting.opened.load(Ordering::Relaxed) > before, "the connections were opened again");
}

#[tokio::test]
async fn a_session_that_an_operator_ends_leaves_the_other_sessions_of_its_connection_alone() {
    let node = Node::start();
    let (operator, pool) = node.pool().await;
    let (connections, counting) = shared();
    let [victim, other] = [connect(&node, &connections).await, connect(&node, &connections).await];
    for client in [&victim, &other] {
        client.pool("pool").unwrap().object("log").unwrap().append("x").await.unwrap();
    }
    let before = sessions(&operator).await;
    let opened = counting.opened.load(Ordering::Relaxed);
    // The operator connected first, and then the victim.
    let victims = before[1].id;
    operator.administer(AdminRequest::KillSession(victims)).await.unwrap();
    for client in [&victim, &other] {
        client.pool("pool").unwrap().object("log").unwrap().append("x").await.unwrap();
    }
    let after = sessions(&operator).await;
    assert!(after.iter().all(|session| session.id != victims), "the session was ended");
    assert!(after.iter().any(|session| session.id == before[2].id), "the other session goes on");
    assert_eq!(after.len(), 3, "the victim has a new session");
    assert_eq!(counting.opened.load(Ordering::Relaxed), opened, "on the same connection");
    assert_eq!(pool.object("log").unwrap().get().await.unwrap().len(), 4);
}

#[tokio::test]
async fn changes_in_flight_take_effect_once_when_an_operator_ends_their_session() {
    let node = Node::start();
    let (operator, pool) = node.pool().await;
    let (connections, counting) = shared();
    let other = connect(&node, &connections).await;
    let victim = connect(&node, &connections).await;
    other.pool("pool").unwrap().object("log").unwrap().append("x").await.unwrap();
    let victims = sessions(&operator).await[2].id;
    let unknown = AtomicUsize::new(0);
    let appends = join_all((0..8).map(|_| async {
        for _ in 0..30 {
            match victim.pool("pool").unwrap().object("log").unwrap().append("x").await {
                Ok(_) => {}
                Err(client::Error::OutcomeUnknown(_)) => drop(unknown.fetch_add(1, Ordering::Relaxed)),
                Err(e) => panic!("{e}"),
            }
        }
    }));
    let opened = counting.opened.load(Ordering::Relaxed);
    let (_, killed) = tokio::join!(appends, operator.administer(AdminRequest::KillSession(victims)));
    killed.unwrap();
    let after = sessions(&operator).await;
    assert!(after.iter().all(|session| session.id != victims), "the session was ended");
    let (length, unknown) = (pool.object("log").unwrap().get().await.unwrap().len(), unknown.into_inner());
    assert!((241 - unknown..=241).contains(&length), "{length} bytes, {unknown} changes of unknown outcome");
    // One shard answers all changes in flight before the client leaves the session. With several
    // shards, the first that refuses the session ends the wait for the others.
    let shards = operator.status().await.unwrap().shards.len();
    assert!(unknown == 0 || shards > 1, "{unknown} changes of unknown outcome");
    assert_eq!(counting.opened.load(Ordering::Relaxed), opened, "the connections stay");
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

#[tokio::test]
async fn sessions_outlive_the_runtime_of_their_connection() {
    let node = Node::start();
    let (_operator, pool) = node.pool().await;
    let (connections, counting) = shared();
    let options = node.options(Options::default());
    let (shared, endpoint) = (connections.clone(), node.endpoint.clone());
    let (connected, first) = tokio::sync::oneshot::channel();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let thread = std::thread::spawn(move || {
        runtime().block_on(async move {
            let client = Client::connect_sharing(&shared, &endpoint, options).await.unwrap();
            client.pool("pool").unwrap().object("log").unwrap().append("x").await.unwrap();
            connected.send(client).unwrap();
            let _ = stopped.await;
        });
    });
    let first = first.await.unwrap();
    let second = connect(&node, &connections).await;
    second.pool("pool").unwrap().object("log").unwrap().append("x").await.unwrap();
    let opened = counting.opened.load(Ordering::Relaxed);
    drop(stop);
    thread.join().unwrap();
    for _ in 0..3 {
        second.pool("pool").unwrap().object("log").unwrap().append("x").await.unwrap();
    }
    assert!(counting.opened.load(Ordering::Relaxed) > opened, "a new connection was opened");
    let third = connect(&node, &connections).await;
    third.pool("pool").unwrap().object("log").unwrap().append("x").await.unwrap();
    assert_eq!(pool.object("log").unwrap().get().await.unwrap().len(), 6);
    drop(first);
}

#[test]
fn a_closed_session_is_gone_although_the_runtime_of_its_client_ends_at_once() {
    let node = Node::start();
    let (connections, _) = shared();
    let (operating, used) = (runtime(), runtime());
    let (operator, _pool) = operating.block_on(node.pool());
    used.block_on(async {
        let client = connect(&node, &connections).await;
        client.pool("pool").unwrap().object("log").unwrap().append("x").await.unwrap();
        client.close().await;
    });
    drop(used);
    assert_eq!(operating.block_on(sessions(&operator)).len(), 1);
}

/// A connection on which a test chooses the strands.
pub(crate) struct Strands {
    connection: Arc<dyn Connection>,
    incoming: Box<dyn Incoming>,
}

impl Strands {
    pub(crate) async fn connect(stack: Arc<dyn NetworkStack>, endpoint: &str) -> Strands {
        let (connection, incoming) = stack.connect(endpoint, ConnectOptions::default()).await.unwrap();
        Strands { connection, incoming }
    }

    async fn send(&self, head: RequestHead, body: &RequestBody) {
        let header = wire::encode_request(&head, body);
        self.connection.send(Message { header, payload: Payload::default() }).await.unwrap();
    }

    async fn reply(&mut self) -> Reply {
        loop {
            match self.incoming.next().await {
                ConnectionEvent::Message(message) => return wire::decode_reply(&message.header).unwrap(),
                ConnectionEvent::Lost(e) => panic!("{e}"),
                ConnectionEvent::Interrupted | ConnectionEvent::Resumed => {}
            }
        }
    }

    /// Waits until the node has closed the connection.
    async fn lost(&mut self) {
        while !matches!(self.incoming.next().await, ConnectionEvent::Lost(_)) {}
    }

    pub(crate) async fn call(&mut self, strand: u32, seq: u64, body: RequestBody) -> wire::Result<ReplyBody> {
        self.send(RequestHead { strand, ..head(seq) }, &body).await;
        loop {
            let reply = self.reply().await;
            // The osd tells a strand without a request that its session has ended.
            if reply.strand == strand || !is_no_session(&reply.result) {
                assert_eq!((reply.strand, reply.seq), (strand, seq));
                return reply.result;
            }
        }
    }

    pub(crate) async fn open(
        &mut self,
        strand: u32,
        session: Option<SessionId>,
        capability: &Bytes,
    ) -> wire::Result<SessionId> {
        let (oldest, newest, capability) = (wire::VERSION_STRANDS, wire::VERSION, capability.clone());
        match self.call(strand, 0, RequestBody::Open { oldest, newest, session, capability }).await? {
            ReplyBody::Opened { session, .. } => Ok(session),
            other => panic!("{other:?}"),
        }
    }

    /// Appends one byte. Returns the new size.
    pub(crate) async fn append(&mut self, strand: u32, seq: u64) -> wire::Result<u64> {
        match self.call(strand, seq, append("log", "x")).await? {
            ReplyBody::Object(ObjectReply::Mutated(mutated)) => Ok(mutated.size),
            other => panic!("{other:?}"),
        }
    }
}

fn is_no_session<T>(result: &wire::Result<T>) -> bool {
    matches!(result, Err(Error::NoSession(_)))
}

/// Starts a node with one shard and a pool of one group, and opens a connection to it.
async fn strands_of(node: &Node) -> (Strands, Bytes) {
    (Strands::connect(stack(UseAs::Client), &node.endpoint).await, capability(&node.endpoint).await)
}

#[tokio::test]
async fn each_strand_has_its_own_session_request_numbers_and_end() {
    let node = Node::start();
    let (operator, _pool) = node.pool_of(1).await;
    let (mut strands, capability) = strands_of(&node).await;
    let first = strands.open(0, None, &capability).await.unwrap();
    let second = strands.open(7, None, &capability).await.unwrap();
    assert_ne!(first, second);
    // Both sessions number their requests from 1.
    assert_eq!(strands.append(0, 1).await.unwrap(), 1);
    assert_eq!(strands.append(7, 1).await.unwrap(), 2);
    let again = RequestHead { strand: 7, retry: true, ..head(1) };
    strands.send(again, &append("log", "x")).await;
    let repeated = strands.reply().await;
    let is_old = |reply: &Reply| match &reply.result {
        Ok(ReplyBody::Object(ObjectReply::Mutated(mutated))) => mutated.size == 2,
        _ => false,
    };
    assert!(is_old(&repeated) && repeated.strand == 7, "{repeated:?}");
    assert!(is_no_session(&strands.append(8, 1).await), "no session was opened on this strand");
    // The end of a session concerns its strand only.
    assert_eq!(strands.call(7, 2, RequestBody::CloseSession).await.unwrap(), ReplyBody::Closed);
    assert!(is_no_session(&strands.append(7, 3).await));
    assert_eq!(strands.append(0, 2).await.unwrap(), 3);
    // A session moves to another strand. Its former strand has no session any more.
    assert_eq!(strands.open(3, Some(first), &capability).await.unwrap(), first);
    assert!(is_no_session(&strands.append(0, 3).await));
    assert_eq!(strands.append(3, 3).await.unwrap(), 4);
    // It moves to another connection, and leaves that one.
    let (mut other, _) = strands_of(&node).await;
    assert_eq!(other.open(5, Some(first), &capability).await.unwrap(), first);
    assert!(is_no_session(&strands.append(3, 4).await));
    assert_eq!(other.append(5, 4).await.unwrap(), 5);
    other.send(RequestHead { strand: 5, ..head(0) }, &RequestBody::Leave).await;
    assert!(is_no_session(&other.append(5, 5).await));
    let left = sessions(&operator).await;
    let session = left.iter().find(|session| session.id == first).expect("a session outlives its strands");
    assert_eq!(session.connections, 0);
    assert_eq!(strands.open(9, Some(first), &capability).await.unwrap(), first);
    assert_eq!(strands.append(9, 5).await.unwrap(), 6);
}

#[tokio::test]
async fn a_connection_has_a_limited_number_of_strands_and_forgets_those_that_ended() {
    let node = Node::start_with(OsdConfig { sessions: MAX_STRANDS + 10, ..OsdConfig::default() });
    let (_operator, _pool) = node.pool_of(1).await;
    let (mut strands, capability) = strands_of(&node).await;
    let first = strands.open(0, None, &capability).await.unwrap();
    for strand in 1..MAX_STRANDS as u32 {
        strands.open(strand, None, &capability).await.unwrap();
    }
    let full = strands.open(u32::MAX, None, &capability).await.unwrap_err();
    assert!(matches!(full, Error::Busy { limit, .. } if limit == MAX_STRANDS as u64), "{full}");
    assert_eq!(strands.append(1, 1).await.unwrap(), 1, "the strands go on");
    // The first session moves away without leaving its strand.
    let (mut other, _) = strands_of(&node).await;
    other.open(0, Some(first), &capability).await.unwrap();
    strands.open(u32::MAX, None, &capability).await.unwrap();
}

#[tokio::test]
async fn stalled_requests_up_to_the_limit_of_a_session_do_not_stop_other_sessions_of_its_connection() {
    let limit = 4;
    let node = Node::start_with(OsdConfig { requests_per_connection: limit, ..OsdConfig::default() });
    let (_operator, _pool) = node.pool_of(1).await;
    let (mut strands, capability) = strands_of(&node).await;
    for strand in [1, 2, 3] {
        strands.open(strand, None, &capability).await.unwrap();
    }
    strands.call(2, 1, append("other", "x")).await.unwrap();
    node.hold(true);
    for seq in 1..=limit as u64 {
        strands.send(RequestHead { strand: 1, ..head(seq) }, &append("log", "x")).await;
    }
    let renew = RequestBody::Renew { capability: capability.clone() };
    assert_eq!(strands.call(1, 0, renew).await.unwrap(), ReplyBody::Renewed);
    let read =
        ObjectRequest::Query(Query { name: crate::raw::name("other"), conditions: vec![], ops: vec![] });
    assert!(strands.call(2, 2, read.into()).await.is_ok());
    assert_eq!(strands.call(3, 1, RequestBody::CloseSession).await.unwrap(), ReplyBody::Closed);
    strands.open(4, None, &capability).await.unwrap();
    node.hold(false);
    let mut answered: Vec<u64> = Vec::new();
    for _ in 0..limit {
        let reply = strands.reply().await;
        assert!(reply.strand == 1 && reply.result.is_ok(), "{reply:?}");
        answered.push(reply.seq);
    }
    answered.sort_unstable();
    assert_eq!(answered, (1..=limit as u64).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_session_may_take_the_slot_of_the_only_other_session_of_its_connection() {
    let node = Node::start_with(OsdConfig { sessions: 1, ..OsdConfig::default() });
    let (operator, _pool) = node.pool_of(1).await;
    operator.close().await;
    let (mut strands, capability) = strands_of(&node).await;
    strands.open(0, None, &capability).await.unwrap();
    // A session loses its slot when it has been silent for 10 s. The notice may arrive before the
    // answer to `Open` or after it.
    let began = Instant::now();
    let mut is_told = false;
    loop {
        let (oldest, newest, capability) = (wire::VERSION_STRANDS, wire::VERSION, capability.clone());
        let open = RequestBody::Open { oldest, newest, session: None, capability };
        strands.send(RequestHead { strand: 1, ..head(0) }, &open).await;
        let mut reply = strands.reply().await;
        if reply.strand == 0 {
            assert!(reply.seq == 0 && is_no_session(&reply.result));
            is_told = true;
            reply = strands.reply().await;
        }
        match reply.result {
            Ok(_) => break,
            Err(Error::Busy { .. }) => assert!(began.elapsed() < Duration::from_secs(30)),
            Err(e) => panic!("{e}"),
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    if !is_told {
        let notice = strands.reply().await;
        assert!((notice.strand, notice.seq) == (0, 0) && is_no_session(&notice.result));
    }
    assert_eq!(strands.append(1, 1).await.unwrap(), 1);
    assert!(is_no_session(&strands.append(0, 1).await));
}

/// A gateway with a key of its own acts for several users of its tenant on one connection.
#[tokio::test]
async fn sessions_of_several_users_share_a_connection_and_keep_their_own_rights() {
    let mut world = World::start().await;
    world.create("films/gateway", false, &[]).await;
    let key = *world.identity_of("films/gateway").key().as_bytes();
    let mut strands = Strands::connect(world.stack("films/gateway"), world.endpoint()).await;
    let [owner, reader, rival] = [
        world.delegated("films/owner", key),
        world.delegated("films/reader", key),
        world.delegated("rival/owner", key),
    ];
    let (owner, reader, rival) = (owner.await, reader.await, rival.await);
    let owners = strands.open(1, None, &owner).await.unwrap();
    strands.open(2, None, &reader).await.unwrap();
    let write = || crate::rights::write("b/x", vec![]);
    let query = || crate::rights::query("b/x");
    assert!(strands.call(1, 1, write()).await.is_ok());
    assert!(matches!(strands.call(2, 1, write()).await, Err(Error::NotPermitted { .. })));
    assert!(strands.call(2, 2, query()).await.is_ok());
    // A connection belongs to one tenant.
    let foreign = strands.open(3, None, &rival).await.unwrap_err();
    assert!(foreign.to_string().contains("another tenant"), "{foreign}");
    // A session belongs to the user for whom it was opened, though both users use the gateway's key.
    assert!(matches!(strands.open(4, Some(owners), &reader).await, Err(Error::SessionRefused { .. })));
    let swapped = strands.call(2, 0, RequestBody::Renew { capability: owner.clone() }).await.unwrap_err();
    assert!(swapped.to_string().contains("another user"), "{swapped}");
    assert!(matches!(strands.call(2, 3, write()).await, Err(Error::NotPermitted { .. })));
    // If one user is removed, the others continue.
    world.remove("films/reader").await;
    let notice = strands.reply().await;
    assert!((notice.strand, notice.seq) == (2, 0) && is_no_session(&notice.result));
    assert!(is_no_session(&strands.call(2, 4, query()).await));
    assert!(matches!(strands.open(2, None, &reader).await, Err(Error::CapabilityRefused { .. })));
    assert!(strands.call(1, 2, query()).await.is_ok());
    world.remove("films/gateway").await;
    strands.lost().await;
}
