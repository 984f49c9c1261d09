//! Tests of sessions that begin, end, expire and are replaced, even if clocks step. No request may
//! be executed twice.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use base::block::Payload;
use base::clock::WallClock;
use bytes::{BufMut, Bytes, BytesMut};
use client::{Client, Options};
use identity::ProofKey;
use messenger::{Connection, ConnectionEvent, Incoming, Listener, Message, UseAs};
use osd::{OsdConfig, SessionOwner};
use store::simulation::{RecordedDrive, SimStore};
use store::{CollectionId, ObjectId, Op, StoreCalls, StoreError, Transaction};
use uuid::Uuid;
use wire::{
    Error, Mutated, Mutation, ObjectReply, ObjectRequest, OpBytes, PartId, Query, QueryAnswer, QueryOp,
    Reply, ReplyBody, RequestBody, RequestHead, SessionId, UploadId,
};

use crate::common::{FaultStore, Node, Watch, network, stack};
use crate::raw::{Raw, append, head, mutate};
use crate::redundancy::redundancy;

const TWO_DAYS_S: i64 = 48 * 3600;

/// A wall clock that a test can step.
#[derive(Clone, Default)]
struct Steps(Arc<AtomicI64>);

impl Steps {
    fn step(&self, seconds: i64) {
        self.0.fetch_add(seconds, Ordering::SeqCst);
    }

    fn clock(&self) -> WallClock {
        let steps = Arc::clone(&self.0);
        WallClock::new(move || {
            let seconds = steps.load(Ordering::SeqCst);
            let step = Duration::from_secs(seconds.unsigned_abs());
            if seconds < 0 { SystemTime::now() - step } else { SystemTime::now() + step }
        })
    }
}

fn again(seq: u64) -> RequestHead {
    RequestHead { retry: true, ..head(seq) }
}

/// Returns the collection of a placement group, and the object that stores the group's own records.
fn group(pool: u32, number: u32) -> (CollectionId, ObjectId) {
    let mut id = BytesMut::new();
    id.put_u8(b'P');
    id.put_u32(pool);
    id.put_u32(number);
    (CollectionId::new(id).unwrap(), ObjectId::new(Bytes::from_static(b"\0\0\0\0\0meta")).unwrap())
}

/// Returns the keys of the records of all placement groups, on all targets.
pub(crate) async fn records(stores: &[Arc<FaultStore>]) -> Vec<Bytes> {
    let mut keys = Vec::new();
    for store in stores {
        for cid in store.inner().collections().await.unwrap() {
            let (_, meta) = group(1, 0);
            if cid.as_bytes().first() != Some(&b'P') {
                continue;
            }
            let mut from = Bytes::new();
            loop {
                let (page, more) = match store.inner().omap_iterate(&cid, &meta, from.clone(), 1000).await {
                    Err(StoreError::NoSuchObject(_)) => break,
                    page => page.unwrap(),
                };
                keys.extend(page.iter().map(|(key, _)| key.clone()));
                match page.last() {
                    Some((last, _)) if more => from = [last, &b"\0"[..]].concat().into(),
                    _ => break,
                }
            }
        }
    }
    keys
}

pub(crate) fn of_session(keys: &[Bytes], session: SessionId) -> usize {
    let id = session.0.to_be_bytes();
    keys.iter().filter(|key| key.get(1..17) == Some(&id[..])).count()
}

impl Raw {
    async fn close_session(&mut self) {
        assert_eq!(self.call(head(1 << 40), RequestBody::CloseSession).await, Ok(ReplyBody::Closed));
    }

    /// Opens another session on the same connection.
    async fn open_another(&mut self) {
        let open = self.opening(None);
        match self.call(head(0), open).await.unwrap() {
            ReplyBody::Opened { session, .. } => self.session = session,
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn a_closed_session_leaves_no_records_and_its_retries_are_refused() {
    let mut node = Node::start();
    let (_client, pool) = node.pool_of(1).await;
    let object = pool.object("object").unwrap();
    let mut raw = Raw::connect(&node.endpoint, None).await;
    raw.changed(head(1), append("object", "once")).await.unwrap();
    let closed = raw.session;
    raw.close_session().await;
    assert!(matches!(raw.changed(head(2), append("object", "late")).await, Err(Error::NoSession(_))));
    let resume = raw.opening(Some(closed));
    let refused = raw.call(head(0), resume).await;
    assert!(
        matches!(refused, Err(Error::SessionRefused { session, .. }) if session == closed),
        "{refused:?}"
    );
    assert_eq!(
        of_session(&records(&node.stores).await, closed),
        2,
        "the mark and the result stay until the next change"
    );

    object.append("+").await.unwrap();
    assert_eq!(of_session(&records(&node.stores).await, closed), 0);
    node.restart();
    let mut late = Raw::connect(&node.endpoint, Some(closed)).await;
    assert_eq!(late.changed(again(1), append("object", "once")).await, Err(Error::RequestExpired));
    // The restarted osd does not know that the client has closed the session. It executes a new request,
    // exactly once.
    late.changed(head(7), append("object", "new")).await.unwrap();
    assert!(late.changed(again(7), append("object", "new")).await.is_ok());
    assert_eq!(late.changed(again(8), append("object", "?")).await, Err(Error::RequestExpired));
    assert_eq!(object.get().await.unwrap(), "once+new");
}

#[tokio::test]
async fn no_request_runs_twice_if_the_osd_restarts_right_after_a_session_is_closed() {
    let mut node = Node::start();
    let (_client, pool) = node.pool_of(1).await;
    let object = pool.object("object").unwrap();
    let mut raw = Raw::connect(&node.endpoint, None).await;
    let first = raw.changed(head(1), append("object", "once")).await.unwrap();
    let closed = raw.session;
    raw.close_session().await;
    // The records were not removed yet. The restarted osd does not know that the session was
    // closed, and still has its result.
    node.restart();
    let mut late = Raw::connect(&node.endpoint, Some(closed)).await;
    assert_eq!(late.changed(again(1), append("object", "once")).await, Ok(first));
    assert_eq!(object.get().await.unwrap(), "once");
}

#[tokio::test]
async fn a_group_that_forgets_closed_sessions_does_not_forget_open_sessions() {
    let mut node = Node::start();
    let (_client, pool) = node.pool_of(1).await;
    let object = pool.object("object").unwrap();
    let mut old = Raw::connect(&node.endpoint, None).await;
    for _ in 0..3 {
        let mut short = Raw::connect(&node.endpoint, None).await;
        short.changed(head(1), append("object", "s")).await.unwrap();
        short.close_session().await;
    }
    // The younger sessions' results were removed; the older session has not changed anything in
    // this group yet.
    let first = old.changed(again(1), append("object", "old")).await.unwrap();
    assert_eq!(old.changed(again(1), append("object", "old")).await, Ok(first));
    let mut unseen = Raw::connect(&node.endpoint, None).await;
    let mut short = Raw::connect(&node.endpoint, None).await;
    short.changed(head(1), append("object", "s")).await.unwrap();
    short.close_session().await;
    object.append("+").await.unwrap();
    node.restart();
    let mut unseen =
        Raw::connect(&node.endpoint, Some(std::mem::replace(&mut unseen.session, SessionId(0)))).await;
    unseen.changed(again(1), append("object", "unseen")).await.unwrap();
    assert_eq!(object.get().await.unwrap(), "sssolds+unseen");
}

#[tokio::test]
async fn clients_that_were_closed_or_dropped_leave_no_records() {
    for kind in ["single", "mirror:2", "ec:2+1"] {
        clients_end_and_leave_no_records(kind).await;
    }
}

async fn clients_end_and_leave_no_records(kind: &str) {
    let mut node = Node::of(3, OsdConfig::default());
    node.restart();
    let client = node.client().await;
    client.create_pool_with("pool", 1, redundancy(kind)).await.unwrap();
    let object = client.pool("pool").unwrap().object("object").unwrap();
    object.put("x").await.unwrap();
    for round in 0..40 {
        let other = node.client().await;
        other.pool("pool").unwrap().object("object").unwrap().put("y").await.unwrap();
        if round % 2 == 0 {
            other.close().await;
        } else {
            drop(other);
        }
    }
    // Dropped clients close their sessions in the background, and each change removes the records
    // of up to four closed sessions.
    let mut left = usize::MAX;
    for _ in 0..500 {
        object.put("z").await.unwrap();
        let keys = records(&node.stores).await;
        let marks = keys.into_iter().filter(|key| key.first() == Some(&b's'));
        left = marks.collect::<BTreeSet<Bytes>>().len();
        if left <= 1 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(left, 1, "{kind}: only the open session has a mark");
    client.close().await;
}

/// Returns a session's mark in its stored form: low water, and time of the last change.
fn mark(active_ms: u64) -> Bytes {
    #[derive(serde::Serialize)]
    struct Mark {
        low_water: u64,
        active_ms: u64,
    }
    postcard::to_allocvec(&Mark { low_water: 0, active_ms }).unwrap().into()
}

/// Adds the records that an earlier osd would have left: the session's mark, and the results of its
/// first `results` requests.
fn leave_records(entries: &mut Vec<(Bytes, Bytes)>, session: SessionId, active_ms: u64, results: u64) {
    let id = session.0.to_be_bytes();
    let result = postcard::to_allocvec(&Mutated { version: 1, size: 1, appended_at: 0 }).unwrap();
    entries.push(([&b"s"[..], &id].concat().into(), mark(active_ms)));
    for seq in 1..=results {
        let key = [&b"r"[..], &id, &seq.to_be_bytes()].concat();
        entries.push((key.into(), result.clone().into()));
    }
}

#[tokio::test]
async fn thousands_of_sessions_expire_in_small_steps_while_requests_continue() {
    let expiry = Duration::from_millis(300);
    let config = OsdConfig {
        session_expiry: expiry,
        collect_interval: Duration::from_millis(50),
        ..OsdConfig::default()
    };
    let mut node = Node::start_with(config);
    let (client, pool) = node.pool_of(1).await;
    let object = pool.object("object").unwrap();
    object.append("x").await.unwrap();
    node.osd.take().unwrap().stop();
    let made = |number| {
        let owner = SessionOwner { key: identity::Trust::default().key(), for_user: None };
        osd::session_id(&ProofKey::default(), (SessionId::FIRST_GENERATION, number), &owner)
    };
    // Half of the sessions have ids of this version. The other half have ids of the previous
    // version, which contain times. One more session has many results.
    let (now_ms, many) = (1_800_000_000_000u64, made(9999));
    let mut entries = vec![(Bytes::from_static(b"h"), Bytes::copy_from_slice(&now_ms.to_be_bytes()))];
    let sessions: Vec<SessionId> = (0..2000)
        .flat_map(|n| {
            let legacy = SessionId((u128::from(now_ms) << 80) + u128::from(n));
            [legacy, made(n + 100)]
        })
        .collect();
    for session in &sessions {
        leave_records(&mut entries, *session, if session.0 >> 127 == 0 { now_ms } else { 0 }, 1);
    }
    leave_records(&mut entries, many, 0, 3000);
    let mut store = None;
    for candidate in &node.stores {
        if candidate.inner().collections().await.unwrap().contains(&group(1, 0).0) {
            store = Some(Arc::clone(candidate));
        }
    }
    let store = store.unwrap();
    for page in entries.chunks(500) {
        let set = Op::OmapSet { oid: group(1, 0).1, entries: page.to_vec() };
        store.inner().queue_transaction(Transaction::new(group(1, 0).0).with(set)).await.unwrap();
    }
    store.watch_transactions();
    node.restart();
    let mut appended = 1u64;
    loop {
        object.append("x").await.unwrap();
        appended += 1;
        let keys = records(&node.stores).await;
        let of_sessions = keys.iter().filter(|key| matches!(key.first(), Some(b's' | b'r')));
        let left: BTreeSet<&[u8]> = of_sessions.map(|key| &key[1..17]).collect();
        if left.len() == 1 {
            assert!(keys.contains(&Bytes::from_static(b"g")) && !keys.contains(&Bytes::from_static(b"h")));
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let (transactions, largest) = store.watched();
    assert!(transactions >= 4001 / 32, "{transactions} transactions removed the records of the sessions");
    assert!(largest <= 1024 + 32 + 2, "a transaction removed {largest} entries");
    for session in [sessions[1], many] {
        let mut late = Raw::connect(&node.endpoint, Some(session)).await;
        assert_eq!(late.changed(again(1), append("object", "?")).await, Err(Error::RequestExpired));
    }
    assert_eq!(object.stat().await.unwrap().size, appended);
    client.close().await;
}

#[tokio::test]
async fn clients_continue_although_the_wall_clock_of_the_osd_steps() {
    let steps = Steps::default();
    let config = OsdConfig {
        clock: steps.clock(),
        collect_interval: Duration::from_millis(20),
        ..OsdConfig::default()
    };
    let mut node = Node::start_with(config);
    let (client, pool) = node.pool_of(1).await;
    let object = pool.object("object").unwrap();
    let session = format!("{client:?}");
    let mut expected = String::new();
    let mut raw = Raw::connect(&node.endpoint, None).await;
    let mut results = Vec::new();
    let steps_s = [-TWO_DAYS_S, TWO_DAYS_S, TWO_DAYS_S, -TWO_DAYS_S, -2 * TWO_DAYS_S];
    for (number, (step, restarts)) in steps_s.iter().flat_map(|s| [(*s, false), (*s, true)]).enumerate() {
        let seq = number as u64 + 1;
        results.push(raw.changed(head(seq), append("object", "r")).await.unwrap());
        steps.step(step);
        if restarts {
            node.restart();
        }
        // The collector runs several times during this pause.
        tokio::time::sleep(Duration::from_millis(100)).await;
        object.append("c").await.unwrap();
        expected += "rc";
        raw = Raw::connect(&node.endpoint, Some(raw.session)).await;
        for (result, seq) in results.iter().zip(1..) {
            assert_eq!(
                raw.changed(again(seq), append("object", "r")).await.as_ref(),
                Ok(result),
                "after {step} s"
            );
        }
        // Open a new session whose first attempt at a request was lost, and then close the session.
        let mut fresh = Raw::connect(&node.endpoint, None).await;
        let first = fresh.changed(again(1), append("object", "f")).await;
        assert!(first.is_ok(), "after a step of {step} s: {first:?}");
        fresh.close_session().await;
        expected += "f";
        assert_eq!(object.get().await.unwrap(), expected);
    }
    assert_eq!(format!("{client:?}"), session, "the client still has its session");
    let stamp = object.stat().await.unwrap().modified_ms;
    let now_ms = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_millis() as u64;
    assert!(stamp < now_ms - 24 * 3600 * 1000, "the osd uses the stepped clock");
}

#[tokio::test]
async fn orphaned_parts_are_removed_although_the_clock_stepped_back_after_they_were_written() {
    let steps = Steps::default();
    let node = Node::start_with(OsdConfig { clock: steps.clock(), ..OsdConfig::default() });
    let (client, _pool) = node.pool_of(1).await;
    let mut raw = Raw::connect(&node.endpoint, None).await;
    let upload = UploadId { session: raw.session, number: 1 };
    let ops = vec![Mutation::WriteFull(OpBytes::Embedded("part".into()))];
    let RequestBody::Object(ObjectRequest::Mutate(mut part)) = mutate("object", ops, wire::Data::None) else {
        unreachable!()
    };
    part.part = Some(PartId { upload, index: 0 });
    raw.changed(head(1), RequestBody::Object(ObjectRequest::Mutate(part))).await.unwrap();
    steps.step(-TWO_DAYS_S);
    assert_eq!(client.collect_orphans(Duration::from_millis(1)).await.unwrap(), 0, "its client is connected");
    raw.close_session().await;
    assert_eq!(client.collect_orphans(Duration::from_millis(1)).await.unwrap(), 1);
}

#[tokio::test]
async fn many_sessions_opened_on_one_connection_do_not_block_other_clients() {
    let node = Node::start_with(OsdConfig { sessions: 4, ..OsdConfig::default() });
    let mut raw = Raw::connect(&node.endpoint, None).await;
    for _ in 0..10 {
        raw.open_another().await;
    }
    node.client().await;
}

#[tokio::test]
async fn a_client_waits_for_its_session_while_the_node_has_too_many_sessions() {
    let node = Node::start_with(OsdConfig { sessions: 1, ..OsdConfig::default() });
    let first = Raw::connect(&node.endpoint, None).await;
    let second = node.client();
    let freed = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        first.connection.close().await;
    };
    let (second, ()) = tokio::join!(second, freed);
    assert!(second.pools().await.is_ok());
    let hurried = Options { connect_timeout: Duration::from_secs(2), ..Options::default() };
    let third = Client::connect(&node.endpoint, node.options(hurried)).await;
    assert!(matches!(third, Err(client::Error::Node(Error::Busy { .. }))), "{third:?}");
}

#[tokio::test]
async fn a_client_whose_session_is_unknown_to_the_node_opens_a_new_session() {
    let mut node = Node::start();
    node.restart();
    let (client, pool) = node.pool_of(1).await;
    let object = pool.object("object").unwrap();
    object.append("before").await.unwrap();
    let session = format!("{client:?}");
    node.osd.take().unwrap().stop();
    // Without its stored age, the node starts as if for the first time.
    for store in &node.stores {
        let (cid, oid) = (CollectionId::new("N").unwrap(), ObjectId::new("runs").unwrap());
        store.inner().queue_transaction(Transaction::new(cid).with(Op::Remove { oid })).await.unwrap();
    }
    node.restart();
    // The query can be repeated in a new session, so its answer shows that the client has one. A
    // change that was sent in the old session would have an unknown outcome.
    ask(&client).await.unwrap().unwrap();
    object.append("after").await.unwrap();
    assert_ne!(format!("{client:?}"), session, "the client has a new session");
    assert_eq!(object.get().await.unwrap(), "beforeafter");
}

/// A node whose replies the test determines.
struct Script {
    listener: Box<dyn Listener>,
    connection: Option<(Arc<dyn Connection>, Box<dyn Incoming>)>,
}

impl Script {
    async fn start() -> (Script, String) {
        let listener = stack(UseAs::Server).listen("127.0.0.1:0").await.unwrap();
        let endpoint = listener.endpoint();
        (Script { listener, connection: None }, endpoint)
    }

    /// Accepts a connection with a request to open a session. Returns the session that the client
    /// presents.
    async fn opening(&mut self) -> Option<SessionId> {
        self.connection = Some(self.listener.accept().await.unwrap());
        match self.request().await {
            (_, RequestBody::Open { session, .. }) => session,
            other => panic!("{other:?}"),
        }
    }

    async fn request(&mut self) -> (RequestHead, RequestBody) {
        let (_, incoming) = self.connection.as_mut().unwrap();
        loop {
            match incoming.next().await {
                ConnectionEvent::Message(message) => {
                    let (head, rest) = wire::decode_head(&message.header).unwrap();
                    return (head, wire::decode_body(rest).unwrap());
                }
                ConnectionEvent::Lost(e) => panic!("{e}"),
                ConnectionEvent::Interrupted | ConnectionEvent::Resumed => {}
            }
        }
    }

    async fn answer(&self, seq: u64, result: wire::Result<ReplyBody>) {
        let (connection, _) = self.connection.as_ref().unwrap();
        let header = wire::encode_reply(&Reply { strand: 0, seq, result });
        connection.send(Message { header, payload: Payload::default() }).await.unwrap();
    }

    async fn open(&self, session: SessionId) {
        let opened =
            ReplyBody::Opened { version: wire::VERSION, session, shard: 0, shards: vec![1], control: None };
        self.answer(0, Ok(opened)).await;
    }

    async fn cut(&mut self) {
        self.connection.take().unwrap().0.close().await;
    }
}

fn session(number: u32) -> SessionId {
    SessionId::new(SessionId::FIRST_GENERATION, number, 1)
}

const MUTATED: Mutated = Mutated { version: 1, size: 1, appended_at: 0 };

/// Sends a query.
fn ask(client: &Client) -> tokio::task::JoinHandle<client::Result<Vec<QueryAnswer>>> {
    let client = client.clone();
    let name = "pool/object".parse::<wire::ObjectName>().unwrap().to_wire();
    let query = Query { name, conditions: vec![], ops: vec![QueryOp::Stat] };
    tokio::spawn(async move { client.query(query).await })
}

/// Connects a client to the scripted node with a session, and sends a change and a query that the
/// node does not answer yet.
async fn two_under_way(
    script: &mut Script,
    endpoint: &str,
) -> (
    Client,
    tokio::task::JoinHandle<client::Result<Mutated>>,
    tokio::task::JoinHandle<client::Result<Vec<QueryAnswer>>>,
) {
    let options = Options { stack: network(), ..Options::default() };
    let connecting = Client::connect(endpoint, options);
    let opening = async {
        assert_eq!(script.opening().await, None);
        script.open(session(1)).await;
    };
    let (client, ()) = tokio::join!(connecting, opening);
    let client = client.unwrap();
    let object = client.pool("pool").unwrap().object("object").unwrap();
    let change = tokio::spawn(async move { object.append("x").await });
    assert!(matches!(script.request().await, (_, RequestBody::Object(ObjectRequest::Mutate(_)))));
    let question = ask(&client);
    assert!(matches!(script.request().await, (_, RequestBody::Object(ObjectRequest::Query(_)))));
    (client, change, question)
}

#[tokio::test]
async fn when_a_session_is_refused_sent_changes_fail_as_unknown_and_queries_are_resent() {
    let (mut script, endpoint) = Script::start().await;
    let (client, change, question) = two_under_way(&mut script, &endpoint).await;
    script.cut().await;
    // After a temporary refusal, the client keeps its session.
    assert_eq!(script.opening().await, Some(session(1)));
    let (what, advice) = ("sessions".to_owned(), "wait".to_owned());
    script.answer(0, Err(Error::Busy { what, limit: 1, advice })).await;
    assert_eq!(script.opening().await, Some(session(1)));
    assert!(!change.is_finished() && !question.is_finished());
    let refused = Error::SessionRefused { session: session(1), why: "test".into() };
    script.answer(0, Err(refused.clone())).await;
    let unknown = change.await.unwrap().unwrap_err();
    assert!(unknown.may_have_taken_effect(), "{unknown}");
    let client::Error::OutcomeUnknown(why) = unknown else { panic!("{unknown}") };
    assert!(matches!(*why, client::Error::Node(e) if e == refused));

    assert_eq!(script.opening().await, None, "the client asks for a new session");
    script.open(session(2)).await;
    let (asked, body) = script.request().await;
    let is_query = matches!(body, RequestBody::Object(ObjectRequest::Query(_)));
    assert!(is_query, "the query is sent again, the change is not");
    script.answer(asked.seq, Ok(ReplyBody::Object(ObjectReply::Queried(Vec::new())))).await;
    assert_eq!(question.await.unwrap().unwrap(), []);
    let object = client.pool("pool").unwrap().object("object").unwrap();
    let next = tokio::spawn(async move { object.append("y").await });
    let (sent, body) = script.request().await;
    assert!(matches!(body, RequestBody::Object(ObjectRequest::Mutate(_))) && !sent.retry);
    script.answer(sent.seq, Ok(ReplyBody::Object(ObjectReply::Mutated(MUTATED)))).await;
    assert_eq!(next.await.unwrap().unwrap(), MUTATED);
    drop(client);
    assert!(
        matches!(script.request().await, (_, RequestBody::CloseSession)),
        "dropping the last handle closes the session"
    );
}

#[tokio::test]
async fn a_change_that_waits_for_its_retry_is_not_sent_in_a_new_session() {
    let (mut script, endpoint) = Script::start().await;
    let (_client, change, question) = two_under_way(&mut script, &endpoint).await;
    // This error says that the request may or may not take effect. The client pauses and then sends
    // a retry. Several of these errors make the pause long.
    for round in 0..6 {
        script.answer(1, Err(Error::Unavailable(format!("test {round}")))).await;
        if round < 5 {
            let (repeat, _) = script.request().await;
            assert!(repeat.retry && repeat.seq == 1);
        }
    }
    script.cut().await;
    assert_eq!(script.opening().await, Some(session(1)));
    let refused = Error::SessionRefused { session: session(1), why: "test".into() };
    script.answer(0, Err(refused)).await;
    assert_eq!(script.opening().await, None);
    script.open(session(2)).await;
    assert!(matches!(script.request().await.1, RequestBody::Object(ObjectRequest::Query(_))));
    assert!(matches!(change.await.unwrap(), Err(client::Error::OutcomeUnknown(_))));
    question.abort();
}

#[tokio::test]
async fn a_client_refused_for_its_version_works_once_the_node_supports_the_version() {
    let (mut script, endpoint) = Script::start().await;
    let (client, change, question) = two_under_way(&mut script, &endpoint).await;
    script.cut().await;
    assert_eq!(script.opening().await, Some(session(1)));
    script.answer(0, Err(Error::WrongVersion { oldest: 90, newest: 91 })).await;
    let unknown = change.await.unwrap().unwrap_err();
    assert!(unknown.may_have_taken_effect(), "{unknown}");
    let refused = question.await.unwrap().unwrap_err();
    assert!(matches!(refused, client::Error::Node(Error::WrongVersion { .. })), "{refused}");
    assert_eq!(script.opening().await, Some(session(1)), "the client keeps its session to ask for results");
    script.open(session(1)).await;
    let question = ask(&client);
    let (asked, _) = script.request().await;
    script.answer(asked.seq, Ok(ReplyBody::Object(ObjectReply::Queried(Vec::new())))).await;
    assert_eq!(question.await.unwrap().unwrap(), []);
}

/// The result of the first attempt was removed with the pool.
#[tokio::test]
async fn the_outcome_of_a_retry_in_a_removed_pool_is_unknown() {
    let (mut script, endpoint) = Script::start().await;
    let (_client, change, question) = two_under_way(&mut script, &endpoint).await;
    script.cut().await;
    assert_eq!(script.opening().await, Some(session(1)));
    script.open(session(1)).await;
    let (sent, body) = script.request().await;
    assert!(matches!(body, RequestBody::Object(ObjectRequest::Mutate(_))) && sent.retry);
    script.answer(sent.seq, Err(Error::NoSuchPool("pool".into()))).await;
    let unknown = change.await.unwrap().unwrap_err();
    assert!(unknown.may_have_taken_effect(), "{unknown}");
    assert!(unknown.to_string().contains("pool pool does not exist"), "{unknown}");
    question.abort();
}

#[tokio::test]
async fn a_change_sent_once_to_a_missing_pool_has_not_taken_effect() {
    let (mut script, endpoint) = Script::start().await;
    let (_client, change, question) = two_under_way(&mut script, &endpoint).await;
    script.answer(1, Err(Error::NoSuchPool("pool".into()))).await;
    let refused = change.await.unwrap().unwrap_err();
    assert!(refused.is_not_found() && !refused.may_have_taken_effect(), "{refused}");
    question.abort();
}

/// Tests that are long and do not depend on the network.
mod tcp_only {
    use super::*;

    /// Without `CloseSession`, 5,535 short sessions would fill the index of a target of this size.
    #[tokio::test]
    async fn thousands_of_short_sessions_do_not_fill_a_small_target() {
        let image = SimStore::format(vec![0; 16 << 20], Uuid::from_u128(1)).unwrap();
        let store = SimStore::mount(&RecordedDrive::new(image), 1).unwrap();
        let commits = Arc::new(AtomicU64::new(0));
        let watch: Watch = {
            let commits = Arc::clone(&commits);
            Arc::new(move || {
                commits.fetch_add(1, Ordering::SeqCst);
            })
        };
        // The osd also commits its age from time to time.
        let config = OsdConfig { age_interval: Duration::from_secs(3600), ..OsdConfig::default() };
        let mut node = Node::over(vec![FaultStore::over(Arc::new(store), Some(watch))], config);
        node.restart();
        let (_client, pool) = node.pool_of(1).await;
        pool.object("object").unwrap().put("x").await.unwrap();
        let commits_before = commits.load(Ordering::SeqCst);
        let mut raw = Raw::connect(&node.endpoint, None).await;
        let put = || {
            let ops = vec![Mutation::WriteFull(OpBytes::Embedded(vec![7; 100].into()))];
            mutate("object", ops, wire::Data::None)
        };
        let mut most = 0;
        for round in 0..8000 {
            raw.changed(head(1), put()).await.unwrap();
            raw.close_session().await;
            raw.open_another().await;
            if round % 500 == 499 {
                most = most.max(records(&node.stores).await.len());
            }
        }
        assert!(most < 16, "{most} records remained");
        let commits = commits.load(Ordering::SeqCst) - commits_before;
        assert_eq!(commits, 8000, "each session causes only the commit of its change");
    }
}
