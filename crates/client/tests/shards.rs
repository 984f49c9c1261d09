//! Tests of the native engine with a node of several shards. The test determines the node's
//! answers.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::block::Payload;
use client::engine::Capability;
use client::{Client, Error, Object, Options};
use messenger::{Connection, ConnectionEvent, Incoming, Message, NetworkStack, StackChoice, TcpStack};
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use wire::{
    Error as NodeError, Listed, Mutated, ObjectReply, ObjectRequest, Query, QueryOp, Reply, ReplyBody,
    RequestBody, RequestHead, SessionId, placement,
};

/// Number of placement groups of the pool.
const GROUPS: u32 = 16;
const MUTATED: Mutated = Mutated { version: 1, size: 1, appended_at: 0 };
/// Time limit of each wait of a test, longer than any pause of the client.
const PATIENCE: Duration = Duration::from_secs(20);

fn session(number: u32) -> SessionId {
    SessionId::new(SessionId::FIRST_GENERATION, number, 1)
}

/// A request that has arrived at a shard.
struct Arrived {
    shard: u16,
    head: RequestHead,
    body: RequestBody,
    connection: Arc<dyn Connection>,
}

impl Arrived {
    async fn answer(&self, result: wire::Result<ReplyBody>) {
        let header = wire::encode_reply(&Reply { strand: self.head.strand, seq: self.head.seq, result });
        self.connection.send(Message { header, payload: Payload::default() }).await.unwrap();
    }

    async fn refuse(&self, groups: u32, shards: u16) {
        self.answer(Err(NodeError::WrongShard { groups, shards })).await;
    }

    async fn carry_out(&self) {
        let reply = match &self.body {
            RequestBody::Object(ObjectRequest::Mutate(_)) => ReplyBody::Object(ObjectReply::Mutated(MUTATED)),
            RequestBody::Object(ObjectRequest::List(_)) => {
                let listed = Listed { names: vec![], cursor: Default::default(), groups: 1, skipped: None };
                ReplyBody::Object(ObjectReply::Listed(listed))
            }
            other => panic!("{other:?}"),
        };
        self.answer(Ok(reply)).await;
    }
}

/// How the node answers requests to open a session.
#[derive(Default)]
struct Policy {
    ports: Vec<u16>,
    /// Number of the newest session.
    sessions: u32,
    refused: Option<SessionId>,
    /// Version of the node; `None` for the newest.
    version: Option<u16>,
}

/// State that all tasks of the node share.
#[derive(Clone)]
struct Desk {
    policy: Arc<Mutex<Policy>>,
    openings: UnboundedSender<(u16, Option<SessionId>)>,
    requests: UnboundedSender<Arrived>,
    closed: UnboundedSender<u16>,
}

/// A shard of the node: a listener with its connections.
struct FakeShard {
    port: u16,
    accepting: JoinHandle<()>,
    connections: Arc<Mutex<Vec<Arc<dyn Connection>>>>,
}

impl FakeShard {
    async fn start(shard: u16, desk: Desk) -> FakeShard {
        let mut listener = TcpStack::default().listen("127.0.0.1:0").await.unwrap();
        let port = listener.endpoint().rsplit_once(':').unwrap().1.parse().unwrap();
        let connections = Arc::new(Mutex::new(Vec::new()));
        let accepted = Arc::clone(&connections);
        let accepting = tokio::spawn(async move {
            loop {
                let (connection, incoming) = listener.accept().await.unwrap();
                accepted.lock().unwrap().push(Arc::clone(&connection));
                tokio::spawn(serve(shard, desk.clone(), connection, incoming));
            }
        });
        FakeShard { port, accepting, connections }
    }

    async fn cut(&self) {
        let connections = std::mem::take(&mut *self.connections.lock().unwrap());
        for connection in connections {
            connection.close().await;
        }
    }

    /// Ends the shard. Its port then refuses connections.
    async fn stop(self) {
        self.accepting.abort();
        self.cut().await;
    }
}

/// Serves a connection until the client closes it.
async fn serve(shard: u16, desk: Desk, connection: Arc<dyn Connection>, mut incoming: Box<dyn Incoming>) {
    loop {
        let message = match incoming.next().await {
            ConnectionEvent::Message(message) => message,
            ConnectionEvent::Interrupted | ConnectionEvent::Resumed => continue,
            ConnectionEvent::Lost(_) => break,
        };
        let (head, rest) = wire::decode_head(&message.header).unwrap();
        let request =
            Arrived { shard, head, body: wire::decode_body(rest).unwrap(), connection: connection.clone() };
        let RequestBody::Open { session: presented, .. } = request.body else {
            drop(desk.requests.send(request));
            continue;
        };
        let opened = {
            let mut policy = desk.policy.lock().unwrap();
            match presented {
                Some(session) if policy.refused == Some(session) => {
                    Err(NodeError::SessionRefused { session, why: "test".into() })
                }
                _ => {
                    policy.sessions += u32::from(presented.is_none());
                    let session = presented.unwrap_or(session(policy.sessions));
                    let (version, shards) = (policy.version.unwrap_or(wire::VERSION), policy.ports.clone());
                    Ok(ReplyBody::Opened { version, session, shard, shards, control: None })
                }
            }
        };
        request.answer(opened).await;
        let _ = desk.openings.send((shard, presented));
    }
    let _ = desk.closed.send(shard);
}

struct FakeNode {
    shards: Vec<FakeShard>,
    desk: Desk,
    openings: UnboundedReceiver<(u16, Option<SessionId>)>,
    requests: UnboundedReceiver<Arrived>,
    closed: UnboundedReceiver<u16>,
}

impl FakeNode {
    async fn start(shards: u16) -> FakeNode {
        let (opened, openings) = mpsc::unbounded_channel();
        let (arrived, requests) = mpsc::unbounded_channel();
        let (ended, closed) = mpsc::unbounded_channel();
        let desk = Desk { policy: Arc::default(), openings: opened, requests: arrived, closed: ended };
        let mut node = FakeNode { shards: Vec::new(), desk, openings, requests, closed };
        node.resize(shards).await;
        node
    }

    /// Gives the node another number of shards. From now on, it answers with the new list of
    /// shards.
    async fn resize(&mut self, shards: u16) {
        while self.shards.len() > usize::from(shards) {
            self.shards.pop().unwrap().stop().await;
        }
        for shard in self.shards.len() as u16..shards {
            self.shards.push(FakeShard::start(shard, self.desk.clone()).await);
        }
        self.policy().ports = self.shards.iter().map(|shard| shard.port).collect();
    }

    /// Restarts the node with another number of shards. The first shard keeps its port.
    async fn restart(&mut self, shards: u16) {
        while self.shards.len() > 1 {
            self.shards.pop().unwrap().stop().await;
        }
        self.resize(shards).await;
        self.shards[0].cut().await;
    }

    fn policy(&self) -> std::sync::MutexGuard<'_, Policy> {
        self.desk.policy.lock().unwrap()
    }

    fn endpoint(&self, shard: u16) -> String {
        format!("127.0.0.1:{}", self.shards[usize::from(shard)].port)
    }

    async fn client_at(&mut self, shard: u16) -> Client {
        let options = Options { stack: StackChoice::TCP, ..Options::default() };
        Client::connect(&self.endpoint(shard), options).await.unwrap()
    }

    /// Connects a client, and waits until it has opened its session on all shards.
    async fn client(&mut self) -> Client {
        let client = self.client_at(0).await;
        assert_eq!(self.opening().await, (0, None), "the client opens the session once");
        let mut others = Vec::new();
        for _ in 1..self.shards.len() {
            let (shard, presented) = self.opening().await;
            assert_eq!(presented, Some(session(1)), "the client resumes the session on the other shards");
            others.push(shard);
        }
        others.sort_unstable();
        assert_eq!(others, (1..self.shards.len() as u16).collect::<Vec<_>>());
        client
    }

    /// Connects a client, and teaches it the number of placement groups of the pool.
    async fn taught_client(&mut self) -> Client {
        let client = self.client().await;
        let shards = self.shards.len() as u16;
        let call = append(&object_of(&client, 1, shards));
        self.request().await.refuse(GROUPS, shards).await;
        self.request().await.carry_out().await;
        call.await.unwrap().unwrap();
        client
    }

    /// Lets the client append to an object of a shard, and carries out the request. Returns its head.
    async fn serve_append(&mut self, client: &Client, shard: u16) -> RequestHead {
        let call = append(&object_of(client, shard, self.shards.len() as u16));
        let request = self.request().await;
        assert_eq!(request.shard, shard);
        request.carry_out().await;
        call.await.unwrap().unwrap();
        request.head
    }

    async fn opening(&mut self) -> (u16, Option<SessionId>) {
        tokio::time::timeout(PATIENCE, self.openings.recv()).await.expect("the client connects").unwrap()
    }

    async fn request(&mut self) -> Arrived {
        tokio::time::timeout(PATIENCE, self.requests.recv()).await.expect("a request arrives").unwrap()
    }
}

/// Returns the placement hash of an object.
fn hash(object: &str) -> u32 {
    placement::hash("", object, None)
}

fn home(object: &str, groups: u32, shards: u16) -> u16 {
    placement::shard(placement::group(hash(object), groups), shards)
}

/// Returns an object of the pool that the given shard serves.
fn object_of(client: &Client, shard: u16, shards: u16) -> Object {
    let name = (0..).map(|n| format!("object{n}")).find(|name| home(name, GROUPS, shards) == shard).unwrap();
    client.pool("pool").unwrap().object(&name).unwrap()
}

fn append(object: &Object) -> JoinHandle<client::Result<Mutated>> {
    let object = object.clone();
    tokio::spawn(async move { object.append("x").await })
}

/// Lists all groups of a pool, which needs no certain shard.
fn ask(client: &Client) -> JoinHandle<client::Result<Vec<wire::ObjectName>>> {
    let listing = client.pool("pool").unwrap().list("");
    tokio::spawn(async move { listing.collect().await })
}

#[tokio::test]
async fn one_refusal_teaches_the_shards_of_all_objects_of_a_pool() {
    let mut node = FakeNode::start(3).await;
    let client = node.client().await;
    let call = append(&object_of(&client, 2, 3));
    let first = node.request().await;
    assert_eq!(first.shard, 0, "the first connected shard, because the right one is unknown");
    first.refuse(GROUPS, 3).await;
    let second = node.request().await;
    assert_eq!((second.shard, second.head.seq), (2, first.head.seq));
    assert!(!second.head.retry, "the refused attempt had no effect");
    second.carry_out().await;
    assert_eq!(call.await.unwrap().unwrap(), MUTATED);

    let mut numbers = vec![second.head.seq];
    for shard in [1, 0, 2, 2, 1] {
        numbers.push(node.serve_append(&client, shard).await.seq);
    }
    let asked = ask(&client);
    let request = node.request().await;
    assert_eq!(request.shard, 0, "requests without a group go to the first shard");
    request.carry_out().await;
    asked.await.unwrap().unwrap();
    numbers.push(request.head.seq);
    assert_eq!(numbers, (1..=7).collect::<Vec<_>>(), "all shards share the request numbers");
}

#[tokio::test]
async fn extents_are_not_queried_from_a_node_of_an_earlier_version() {
    let mut node = FakeNode::start(1).await;
    node.policy().version = Some(wire::VERSION_EXTENTS - 1);
    let client = node.client().await;
    let missing = client.require(&[Capability::Extents]).unwrap_err();
    let object = client.pool("pool").unwrap().object("object").unwrap();
    let query = Query { name: object.name().to_wire(), conditions: vec![], ops: vec![QueryOp::Allocated] };
    let asked = client.engine().query(query, Instant::now() + PATIENCE).attempt().await.unwrap_err();
    let errors =
        [missing, object.allocated().await.unwrap_err(), object.extents(0, 1).await.unwrap_err(), asked];
    for error in errors {
        assert!(matches!(&error, Error::Unsupported(why) if why.contains("extents")), "{error}");
    }
    let call = append(&object);
    node.request().await.carry_out().await;
    call.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_pool_that_was_created_again_with_other_groups_is_learned_again() {
    let mut node = FakeNode::start(2).await;
    let client = node.taught_client().await;
    // An object that belongs to shard 1 among 16 groups, and to shard 0 in a pool of one group.
    let call = append(&object_of(&client, 1, 2));
    let request = node.request().await;
    assert_eq!(request.shard, 1);
    request.refuse(1, 2).await;
    let request = node.request().await;
    assert_eq!(request.shard, 0);
    request.carry_out().await;
    call.await.unwrap().unwrap();
}

#[tokio::test]
async fn only_the_requests_of_a_lost_shard_are_sent_again() {
    let mut node = FakeNode::start(2).await;
    let client = node.taught_client().await;
    let calls = [append(&object_of(&client, 0, 2)), append(&object_of(&client, 1, 2))];
    let mut sent = [node.request().await, node.request().await];
    sent.sort_by_key(|request| request.shard);
    assert_eq!([sent[0].shard, sent[1].shard], [0, 1]);
    node.shards[1].cut().await;
    assert_eq!(node.opening().await, (1, Some(session(1))));
    let again = node.request().await;
    assert_eq!((again.shard, again.head.seq), (1, sent[1].head.seq));
    assert!(again.head.retry, "the lost attempt may have taken effect");
    again.carry_out().await;
    sent[0].carry_out().await;
    for call in calls {
        call.await.unwrap().unwrap();
    }
    assert!(node.requests.try_recv().is_err(), "the other shard received its request once");
}

#[tokio::test]
async fn a_refusal_of_a_retry_by_the_wrong_shard_leaves_it_a_retry() {
    let mut node = FakeNode::start(2).await;
    let client = node.client().await;
    let call = append(&object_of(&client, 1, 2));
    let first = node.request().await;
    assert_eq!(first.shard, 0);
    node.shards[0].cut().await;
    assert_eq!(node.opening().await.0, 0);
    // The client may send the retry to either shard, because it does not know the right one yet.
    let mut again = node.request().await;
    assert!(again.head.retry && again.head.seq == first.head.seq);
    if again.shard == 0 {
        again.refuse(GROUPS, 2).await;
        again = node.request().await;
        assert!(again.head.retry && again.head.seq == first.head.seq);
    }
    assert_eq!(again.shard, 1);
    again.carry_out().await;
    call.await.unwrap().unwrap();
}

#[tokio::test]
async fn requests_move_when_the_osd_restarts_with_another_number_of_shards() {
    let mut node = FakeNode::start(2).await;
    let client = node.taught_client().await;
    let call = append(&object_of(&client, 1, 2));
    assert_eq!(node.request().await.shard, 1);

    node.restart(1).await;
    let again = node.request().await;
    assert_eq!(again.shard, 0, "the osd no longer has the shard of the request");
    assert!(again.head.retry);
    again.carry_out().await;
    call.await.unwrap().unwrap();

    let call = append(&object_of(&client, 2, 3));
    assert_eq!(node.request().await.shard, 0);
    node.restart(3).await;
    let again = node.request().await;
    assert_eq!(again.shard, 2, "the number of groups is still known");
    assert!(again.head.retry);
    again.carry_out().await;
    call.await.unwrap().unwrap();
    for shard in [0, 1, 2] {
        assert!(!node.serve_append(&client, shard).await.retry);
    }
}

/// The idle link to the first shard would reconnect only after a minute.
#[tokio::test]
async fn a_request_whose_shard_moved_to_another_port_makes_an_idle_link_learn_the_port() {
    let mut node = FakeNode::start(2).await;
    let client = node.taught_client().await;
    node.restart(2).await;
    let call = append(&object_of(&client, 1, 2));
    let request = node.request().await;
    assert_eq!(request.shard, 1);
    request.carry_out().await;
    call.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_shard_that_refuses_its_own_requests_violates_the_protocol() {
    let mut node = FakeNode::start(2).await;
    let client = node.taught_client().await;
    let call = append(&object_of(&client, 1, 2));
    node.request().await.refuse(GROUPS, 2).await;
    let error = call.await.unwrap().unwrap_err();
    assert!(matches!(error, Error::Protocol(_)), "{error}");
    assert!(!error.may_have_taken_effect());
    // The client continues to work.
    let call = append(&object_of(&client, 1, 2));
    node.request().await.carry_out().await;
    call.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_node_whose_shards_all_refuse_a_request_violates_the_protocol() {
    let mut node = FakeNode::start(2).await;
    let client = node.taught_client().await;
    let mut call = append(&object_of(&client, 1, 2));
    let mut refusals = 0;
    let error = loop {
        tokio::select! {
            request = node.requests.recv() => {
                let request = request.unwrap();
                // Each shard names a number of groups with which the other shard has the object.
                request.refuse(if request.shard == 0 { GROUPS } else { 1 }, 2).await;
                refusals += 1;
            }
            outcome = &mut call => break outcome.unwrap().unwrap_err(),
        }
    };
    assert!(matches!(error, Error::Protocol(_)), "{error}");
    assert!((2..20).contains(&refusals), "{refusals} refusals");
}

#[tokio::test]
async fn the_port_of_any_shard_leads_to_all_shards() {
    let mut node = FakeNode::start(3).await;
    let client = node.client_at(1).await;
    assert_eq!(node.opening().await, (1, None));
    let mut others = [node.opening().await, node.opening().await];
    others.sort_unstable();
    assert_eq!(others, [(0, Some(session(1))), (2, Some(session(1)))]);
    let asked = ask(&client);
    let request = node.request().await;
    assert_eq!(request.shard, 0);
    request.carry_out().await;
    asked.await.unwrap().unwrap();
    for shard in [2, 1] {
        let call = append(&object_of(&client, shard, 3));
        let mut request = node.request().await;
        if request.shard != shard {
            request.refuse(GROUPS, 3).await;
            request = node.request().await;
        }
        assert_eq!(request.shard, shard);
        request.carry_out().await;
        call.await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn closing_tells_one_shard_and_ends_all_connections() {
    for is_dropped in [false, true] {
        let mut node = FakeNode::start(3).await;
        let client = node.taught_client().await;
        let call = append(&object_of(&client, 2, 3));
        let request = node.request().await;
        if is_dropped {
            call.abort();
            drop((call.await, client));
        } else {
            client.close().await;
            assert!(matches!(call.await.unwrap(), Err(Error::Closed)));
        }
        let close = node.request().await;
        assert_eq!(close.body, RequestBody::CloseSession);
        assert_eq!((close.head.seq, close.head.acked_through), (request.head.seq + 1, request.head.seq));
        let mut closed = Vec::new();
        for _ in 0..3 {
            let shard = tokio::time::timeout(PATIENCE, node.closed.recv()).await;
            closed.push(shard.expect("the client closes its connections").unwrap());
        }
        closed.sort_unstable();
        assert_eq!(closed, [0, 1, 2]);
        assert!(node.requests.try_recv().is_err(), "the session is closed once");
    }
}

#[tokio::test]
async fn a_session_ends_although_the_first_shard_is_unreachable() {
    let mut node = FakeNode::start(3).await;
    let client = node.taught_client().await;
    node.shards.remove(0).stop().await;
    assert_eq!(tokio::time::timeout(PATIENCE, node.closed.recv()).await, Ok(Some(0)));
    client.close().await;
    let close = node.request().await;
    assert!(close.shard > 0);
    assert_eq!(close.body, RequestBody::CloseSession);
}

#[tokio::test]
async fn an_idle_client_stops_to_connect_to_an_unreachable_shard() {
    let mut node = FakeNode::start(2).await;
    let connect_timeout = Duration::from_millis(100);
    let options = Options { stack: StackChoice::TCP, connect_timeout, ..Options::default() };
    let client = Client::connect(&node.endpoint(0), options).await.unwrap();
    let call = append(&object_of(&client, 1, 2));
    node.request().await.refuse(GROUPS, 2).await;
    node.request().await.carry_out().await;
    call.await.unwrap().unwrap();
    // In place of the shard, this listener ends each connection at once.
    let unreachable = node.shards.pop().unwrap();
    let port = unreachable.port;
    unreachable.stop().await;
    let listener = loop {
        match tokio::net::TcpListener::bind(("127.0.0.1", port)).await {
            Ok(listener) => break listener,
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    };
    let (came, mut attempts) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            drop(stream);
            let _ = came.send(());
        }
    });
    let call = append(&object_of(&client, 1, 2));
    for _ in 0..3 {
        tokio::time::timeout(PATIENCE, attempts.recv()).await.expect("a request needs the shard").unwrap();
    }
    call.abort();
    let _ = call.await;
    // The pause between attempts is at most half a second while a request needs the shard.
    let idle = async { while tokio::time::timeout(Duration::from_secs(3), attempts.recv()).await.is_ok() {} };
    tokio::time::timeout(PATIENCE, idle).await.expect("the client stops");
    let call = append(&object_of(&client, 1, 2));
    tokio::time::timeout(PATIENCE, attempts.recv()).await.expect("a request needs the shard again").unwrap();
    call.abort();
}

#[tokio::test]
async fn a_session_that_one_shard_refuses_is_replaced_once_on_all_shards() {
    let mut node = FakeNode::start(3).await;
    let client = node.taught_client().await;
    let (change, question) = (append(&object_of(&client, 0, 3)), ask(&client));
    let sent = [node.request().await, node.request().await];
    node.policy().refused = Some(session(1));
    node.shards[2].cut().await;
    // A request makes the link to shard 2 reconnect. The node then refuses the session.
    let unsent = append(&object_of(&client, 2, 3));
    let unknown = change.await.unwrap().unwrap_err();
    assert!(unknown.may_have_taken_effect(), "{unknown}");
    let mut moved = [node.request().await, node.request().await];
    moved.sort_by_key(|request| request.shard);
    let is_listing = matches!(moved[0].body, RequestBody::Object(ObjectRequest::List(_)));
    assert_eq!((moved[0].shard, is_listing), (0, true));
    assert!(sent.iter().any(|request| request.head.seq == moved[0].head.seq));
    assert!(moved[1].shard == 2 && !moved[1].head.retry, "the request was not sent in the old session");
    for request in &moved {
        request.carry_out().await;
    }
    question.await.unwrap().unwrap();
    unsent.await.unwrap().unwrap();
    for shard in [0, 1, 2] {
        let call = append(&object_of(&client, shard, 3));
        let request = node.request().await;
        assert_eq!(request.shard, shard);
        assert!(!request.head.retry);
        request.carry_out().await;
        call.await.unwrap().unwrap();
    }
    let mut presented = Vec::new();
    while let Ok((_, session)) = node.openings.try_recv() {
        presented.push(session);
    }
    assert_eq!(presented.iter().filter(|presented| presented.is_none()).count(), 1, "{presented:?}");
    assert!(format!("{client:?}").contains(&format!("{:?}", session(2))), "{client:?}");
}

#[tokio::test]
async fn requests_to_an_unreachable_shard_fail_in_time_and_others_continue() {
    let mut node = FakeNode::start(2).await;
    let options =
        Options { stack: StackChoice::TCP, request_timeout: Duration::from_secs(2), ..Options::default() };
    let teacher = node.taught_client().await;
    let client = Client::connect(&node.endpoint(0), options).await.unwrap();
    let call = append(&object_of(&client, 1, 2));
    node.request().await.refuse(GROUPS, 2).await;
    node.request().await.carry_out().await;
    call.await.unwrap().unwrap();
    // The list of shards still names the port of the stopped shard.
    node.shards.pop().unwrap().stop().await;
    let stuck = append(&object_of(&client, 1, 2));
    assert!(matches!(stuck.await.unwrap(), Err(Error::TimedOut(_))));
    let call = append(&object_of(&teacher, 0, 2));
    node.request().await.carry_out().await;
    call.await.unwrap().unwrap();
}
