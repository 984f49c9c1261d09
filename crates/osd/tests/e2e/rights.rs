//! Every request and every call, by every kind of caller, gets the answer that the tables in
//! SECURITY.md state. The tables are kept apart from the code that decides.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use base::block::Payload;
use base::clock::WallClock;
use bytes::Bytes;
use client::engine::NativeEngine;
use client::{Client, Options};
use control::{ControlClient, ControlError, ControlListener, ControlServer};
use identity::{Caller, Credentials, Identity, KeyHash, NODE_ADMIN, Trust, UserDirectory, UserName};
use messenger::{
    ConnectOptions, Connection, ConnectionConfig, ConnectionEvent, Incoming, Message, MessengerError,
    NetworkStack, StackOptions, UseAs,
};
use osd::{Directory, OsdAdministrator, OsdConfig, OsdServer};
use wire::AccountRequest::{
    CreateTenant, CreateUser, Grant, ListTenants, ListUsers, RemoveTenant, RemoveUser, Revoke,
};
use wire::{
    AdminReply, AdminRequest, BulkDescriptor, BulkDirection, BulkOwner, BulkSegment, Condition, Data, Error,
    List, MemoryKind, Mutate, Mutation, ObjectRequest, OpBytes, Query, QueryOp, Read, RequestBody,
    RequestHead, SessionId, Verbs, WireName,
};

use crate::common::{Node, network};
use crate::raw::head;

const TABLES: &str = include_str!("../../../../SECURITY.md");

/// The callers, in the order of the tables' columns.
const CALLERS: [&str; 10] = [
    "no credential",
    "another node's",
    "another tenant",
    "another user",
    "read-only",
    "prefix-only",
    "expired",
    "revoked",
    "owner",
    "node admin",
];

/// Returns the rows of the table whose first column has this title.
fn table(title: &str) -> BTreeMap<String, Vec<String>> {
    let cells = |line: &str| -> Vec<String> {
        line.trim_matches('|').split('|').map(|cell| cell.trim().trim_matches('`').to_owned()).collect()
    };
    let mut lines = TABLES.lines().skip_while(|line| !line.starts_with(&format!("| {title} |")));
    assert_eq!(cells(lines.next().unwrap())[1..], CALLERS, "the columns of the table \"{title}\"");
    let rows = lines.skip(1).take_while(|line| line.starts_with('|'));
    rows.map(|line| {
        let mut row = cells(line);
        (row.remove(0), row)
    })
    .collect()
}

/// The administrator of the node, and the users in the node's map.
struct Users {
    admin: KeyHash,
    directory: Directory,
}

impl UserDirectory for Users {
    fn find(&self, key: &KeyHash) -> Option<UserName> {
        let admin = || UserName { id: NODE_ADMIN, tenant_id: 0, tenant: "main".into(), user: "admin".into() };
        if *key == self.admin { Some(admin()) } else { self.directory.find(key) }
    }
}

/// A node with a control plane, and the identities of its users.
pub(crate) struct World {
    node: Node,
    osd: Option<OsdServer>,
    administrator: OsdAdministrator,
    control: ControlServer,
    identity: Identity,
    admin: Identity,
    users: BTreeMap<&'static str, Identity>,
}

fn stack_of(trust: Trust, use_as: UseAs) -> Arc<dyn NetworkStack> {
    let connection = ConnectionConfig { trust, ..ConnectionConfig::default() };
    messenger::open(&network(), &StackOptions { connection, ..StackOptions::default() }, use_as).unwrap()
}

impl World {
    /// Starts a node with the tenants `films` and `rival`, and their users.
    pub(crate) async fn start() -> World {
        World::start_with(WallClock::default()).await
    }

    /// Starts a node with this clock. See [`start`](Self::start).
    pub(crate) async fn start_with(clock: WallClock) -> World {
        let (identity, admin) = (Identity::generate(), Identity::generate());
        let directory = Directory::default();
        let users = Arc::new(Users { admin: admin.key(), directory: directory.clone() });
        let trust = Trust::server(&identity, users);
        let listener = ControlListener::bind("127.0.0.1:0").unwrap();
        let config = OsdConfig {
            users: directory,
            clock,
            control: Some(listener.address().to_string()),
            ..OsdConfig::default()
        };
        let mut node = Node::new(config);
        let stack = stack_of(trust.clone(), UseAs::Server);
        let osd = OsdServer::start(node.resources(), stack, &node.endpoint).unwrap();
        let administrator = osd.administrator().clone();
        node.endpoint = osd.endpoint().to_owned();
        let osd = Some(osd);
        let serving = administrator.clone();
        let administer = move |caller, request, is_repeated| serving.administer(caller, request, is_repeated);
        let control = ControlServer::start(listener, trust, Arc::new(administer)).unwrap();
        let mut world = World { node, osd, administrator, control, identity, admin, users: BTreeMap::new() };
        world.populate().await;
        world
    }

    /// Makes a request of the node's own administrator.
    async fn order(&self, request: AdminRequest) {
        let user = UserName { id: NODE_ADMIN, tenant_id: 0, tenant: "main".into(), user: "admin".into() };
        let caller = Caller { key: self.admin.key(), user };
        self.administrator.administer(caller, request, false).await.unwrap();
    }

    async fn account(&self, request: wire::AccountRequest) {
        self.order(AdminRequest::Accounts(request)).await;
    }

    pub(crate) async fn create(&mut self, name: &'static str, is_node_admin: bool, grants: &[(&str, &str)]) {
        let identity = Identity::generate();
        let key = *identity.key().as_bytes();
        self.account(CreateUser { user: name.parse().unwrap(), key, is_node_admin }).await;
        for (scope, verbs) in grants {
            let grant = wire::AccessGrant { scope: scope.parse().unwrap(), verbs: verbs.parse().unwrap() };
            self.account(Grant { user: name.parse().unwrap(), grant }).await;
        }
        self.users.insert(name, identity);
    }

    /// Removes a user.
    pub(crate) async fn remove(&self, name: &str) {
        self.account(RemoveUser { user: name.parse().unwrap() }).await;
    }

    pub(crate) fn identity_of(&self, user: &str) -> &Identity {
        &self.users[user]
    }

    pub(crate) fn endpoint(&self) -> &str {
        &self.node.endpoint
    }

    /// Returns the network stack of a user.
    pub(crate) fn stack(&self, user: &str) -> Arc<dyn NetworkStack> {
        stack_of(Trust::client(&self.users[user], self.identity.key()), UseAs::Client)
    }

    /// Gets a capability with the rights of a user for the holder of another key.
    pub(crate) async fn delegated(&self, user: &str, key: [u8; 32]) -> Bytes {
        let request = AdminRequest::IssueCapability { grants: None, key: Some(key), lifetime_s: 0 };
        let client = ControlClient::new(Trust::client(&self.users[user], self.identity.key()));
        match client.administer(&self.control_endpoint(), request, false).await {
            Ok(AdminReply::Capability(capability)) => capability,
            other => panic!("{other:?}"),
        }
    }

    async fn populate(&mut self) {
        for tenant in ["films", "rival"] {
            self.account(CreateTenant { name: tenant.into() }).await;
            let (redundancy, tenant) = (wire::Redundancy::Single, Some(tenant.to_owned()));
            let name = if tenant.as_deref() == Some("films") { "p" } else { "r" };
            let pool = AdminRequest::PoolCreate { name: name.into(), pg_count: 1, redundancy, tenant };
            self.order(pool).await;
        }
        self.create("films/owner", false, &[("*", "read,write,list,admin")]).await;
        self.create("films/other", false, &[]).await;
        self.create("films/reader", false, &[("p", "read,list")]).await;
        self.create("films/prefix", false, &[("p/a/", "read,write,list"), ("p/c/", "write")]).await;
        self.create("films/gone", false, &[("p", "read,write,list,admin")]).await;
        self.create("rival/owner", false, &[("*", "read,write,list,admin")]).await;
        self.create("main/operator", true, &[]).await;
    }

    /// Returns the trust and the name of a caller.
    pub(crate) fn caller(&self, column: &str) -> Trust {
        let user = match column {
            "no credential" | "another node's" => {
                let stranger = Identity::generate();
                let pinned = if column == "no credential" { self.identity.key() } else { stranger.key() };
                return Trust::client(&stranger, pinned);
            }
            "another tenant" => "rival/owner",
            "another user" => "films/other",
            "read-only" => "films/reader",
            "prefix-only" => "films/prefix",
            "expired" | "owner" => "films/owner",
            "revoked" => "films/gone",
            "node admin" => "main/operator",
            other => panic!("{other}"),
        };
        Trust::client(&self.users[user], self.identity.key())
    }

    fn control_endpoint(&self) -> String {
        self.control.address().to_string()
    }

    /// Gets a capability for a caller; `None` if the control plane refuses.
    pub(crate) async fn capability(&self, trust: &Trust, lifetime_s: u32) -> Option<Bytes> {
        let request = AdminRequest::IssueCapability { grants: None, key: None, lifetime_s };
        let client = ControlClient::new(trust.clone());
        match client.administer(&self.control_endpoint(), request, false).await {
            Ok(AdminReply::Capability(capability)) => Some(capability),
            _ => None,
        }
    }

    /// Connects to the node; `None` if the handshake fails.
    pub(crate) async fn connect(&self, trust: Trust) -> Result<Line, MessengerError> {
        let stack = stack_of(trust, UseAs::Client);
        let timeout = Duration::from_secs(3);
        let (connection, incoming) = stack.connect(&self.node.endpoint, ConnectOptions { timeout }).await?;
        Ok(Line { connection, incoming, seq: 0 })
    }

    /// The sessions and capabilities with which the callers make the requests of the table.
    async fn lines(&self) -> BTreeMap<&'static str, Option<(Line, Bytes)>> {
        let mut lines = BTreeMap::new();
        for column in CALLERS {
            let trust = self.caller(column);
            let lifetime = if column == "expired" { 1 } else { 0 };
            let line = match self.capability(&trust, lifetime).await {
                None => self.connect(trust).await.map(|line| (line, Bytes::new())).ok(),
                Some(capability) => {
                    let mut line = self.connect(trust).await.unwrap();
                    line.ask(opening(None, capability.clone())).await.unwrap();
                    Some((line, capability))
                }
            };
            lines.insert(column, line);
        }
        self.account(Revoke { user: "films/gone".parse().unwrap(), scope: None, verbs: Verbs::ALL }).await;
        tokio::time::sleep(Duration::from_millis(1100)).await;
        lines
    }
}

/// A connection on which a test sends requests.
pub(crate) struct Line {
    connection: Arc<dyn Connection>,
    incoming: Box<dyn Incoming>,
    seq: u64,
}

impl Line {
    /// Leaves a strand that has no session, which needs no right and has no answer. Waits for the answer
    /// to another request on the connection.
    async fn leave(&mut self) -> &'static str {
        let leave = wire::encode_request(&RequestHead { strand: 1, ..head(0) }, &RequestBody::Leave);
        self.connection.send(Message { header: leave, payload: Payload::default() }).await.unwrap();
        drop(self.ask(query("a/x")).await);
        "yes"
    }

    pub(crate) async fn ask(&mut self, body: RequestBody) -> Result<wire::ReplyBody, Error> {
        self.seq += 1;
        let header = wire::encode_request(&head(self.seq), &body);
        self.connection.send(Message { header, payload: Payload::default() }).await.unwrap();
        loop {
            match self.incoming.next().await {
                ConnectionEvent::Message(message) => {
                    let reply = wire::decode_reply(&message.header).unwrap();
                    assert_eq!(reply.seq, self.seq);
                    return reply.result;
                }
                ConnectionEvent::Lost(e) => panic!("{e}"),
                ConnectionEvent::Interrupted | ConnectionEvent::Resumed => {}
            }
        }
    }
}

pub(crate) fn opening(session: Option<SessionId>, capability: Bytes) -> RequestBody {
    RequestBody::Open { oldest: wire::VERSION_OLDEST, newest: wire::VERSION, session, capability }
}

pub(crate) fn name(object: &str) -> WireName {
    WireName { pool: "p".into(), namespace: Bytes::new(), object: Bytes::copy_from_slice(object.as_bytes()) }
}

pub(crate) fn read(object: &str, sink: Option<BulkDescriptor>) -> RequestBody {
    ObjectRequest::Read(Read { name: name(object), part: None, offset: 0, len: 1, if_version: None, sink })
        .into()
}

pub(crate) fn write(object: &str, conditions: Vec<Condition>) -> RequestBody {
    let ops = vec![Mutation::WriteFull(OpBytes::Embedded("x".into()))];
    ObjectRequest::Mutate(Mutate { name: name(object), part: None, conditions, ops, data: Data::None }).into()
}

pub(crate) fn query(object: &str) -> RequestBody {
    ObjectRequest::Query(Query { name: name(object), conditions: vec![], ops: vec![QueryOp::Stat] }).into()
}

fn list(namespace: Option<&'static str>, prefix: &'static str) -> RequestBody {
    ObjectRequest::List(List {
        pool: "p".into(),
        namespace: namespace.map(Bytes::from),
        prefix: prefix.into(),
        group: None,
        cursor: Bytes::new(),
        limit: 10,
        skip_unavailable: false,
    })
    .into()
}

/// Memory of a third party.
fn foreign() -> BulkDescriptor {
    BulkDescriptor {
        owner: BulkOwner::Fabric(vec![1, 2, 3]),
        memory: MemoryKind::Host,
        segments: vec![BulkSegment { address: 0, key: 7, len: 4096 }],
        direction: BulkDirection::Write,
        block_offset: 0,
        expires_ms: 0,
        remote: None,
    }
}

/// Returns the name of a request's row. A new request does not compile without its row.
fn row_of(request: &RequestBody) -> String {
    let place = |object: &WireName| String::from_utf8(object.object.to_vec()).unwrap();
    match request {
        RequestBody::Open { .. } => "Open".into(),
        RequestBody::Renew { .. } => "Renew".into(),
        RequestBody::CloseSession => "CloseSession".into(),
        RequestBody::Leave => "Leave".into(),
        RequestBody::Object(request) => match request {
            ObjectRequest::Read(Read { sink: Some(_), .. }) => "Read into memory of a third party".into(),
            ObjectRequest::Read(read) => format!("Read {}", place(&read.name)),
            ObjectRequest::Query(query) => format!("Query {}", place(&query.name)),
            ObjectRequest::Mutate(mutate) => {
                let conditional = if mutate.conditions.is_empty() { "" } else { " if the data matches" };
                format!("Mutate {}{conditional}", place(&mutate.name))
            }
            ObjectRequest::List(list) => {
                let prefix = String::from_utf8(list.prefix.to_vec()).unwrap();
                match (&list.namespace, &*prefix) {
                    (None, _) => "List all namespaces".into(),
                    (Some(_), "") => "List the default namespace".into(),
                    (Some(_), prefix) => format!("List {prefix}"),
                }
            }
        },
    }
}

/// What a request's answer says about its right.
fn verdict<T>(answer: &Result<T, Error>) -> &'static str {
    match answer {
        Err(Error::NotPermitted { .. } | Error::NotAdministrator { .. }) => "no",
        Err(Error::CapabilityRefused { .. } | Error::NoSession(_)) => "stale",
        Err(Error::NoSuchPool(_)) => "absent",
        // Other refusals come after the right was checked.
        Ok(_) | Err(_) => "yes",
    }
}

/// Returns all differences between the answers and a table.
fn compare(title: &str, found: &BTreeMap<String, Vec<&'static str>>) -> Vec<String> {
    let expected = table(title);
    let mut wrong = Vec::new();
    for (row, answers) in found {
        let Some(cells) = expected.get(row) else {
            wrong.push(format!("the table has no row {row}; found {answers:?}"));
            continue;
        };
        for ((caller, answer), cell) in CALLERS.iter().zip(answers).zip(cells) {
            if answer != cell {
                wrong.push(format!("{row}, {caller}: {answer} instead of {cell}"));
            }
        }
    }
    wrong.extend(
        expected.keys().filter(|row| !found.contains_key(*row)).map(|row| format!("untested row {row}")),
    );
    wrong
}

#[tokio::test]
async fn every_request_of_the_data_path_gets_the_answer_of_the_table() {
    assert_eq!(wrong_requests().await, Vec::<String>::new());
}

/// Makes every request as every caller. Returns the differences from the table.
async fn wrong_requests() -> Vec<String> {
    let world = World::start().await;
    let mut lines = world.lines().await;
    let same = Condition::Bytes(0, "x".into());
    let requests = [
        write("a/x", vec![]),
        write("b/x", vec![]),
        write("a/x", vec![same.clone()]),
        write("c/x", vec![]),
        write("c/x", vec![same]),
        read("a/x", None),
        read("b/x", None),
        query("a/x"),
        query("b/x"),
        list(None, ""),
        list(Some(""), ""),
        list(Some(""), "a/"),
        list(Some(""), "a/x"),
        read("a/x", Some(foreign())),
        RequestBody::Renew { capability: Bytes::new() },
        opening(None, Bytes::new()),
        RequestBody::Leave,
        RequestBody::CloseSession,
    ];
    let mut found = BTreeMap::<String, Vec<&'static str>>::new();
    for request in &requests {
        for column in CALLERS {
            let answer = match lines.get_mut(column).unwrap() {
                None => "refused",
                Some((line, _)) if matches!(request, RequestBody::Leave) => line.leave().await,
                Some((line, capability)) => {
                    let request = match request.clone() {
                        RequestBody::Renew { .. } => RequestBody::Renew { capability: capability.clone() },
                        RequestBody::Open { .. } => opening(None, capability.clone()),
                        other => other,
                    };
                    verdict(&line.ask(request).await)
                }
            };
            found.entry(row_of(request)).or_default().push(answer);
        }
    }
    compare("request", &found)
}

/// Returns the name of a call's row. A new request of an operator does not compile without its row.
fn call_of(request: &AdminRequest) -> &'static str {
    match request {
        AdminRequest::PoolCreate { .. } => "CreatePool",
        AdminRequest::PoolList { tenant: None } => "ListPools",
        AdminRequest::PoolList { .. } => "ListPools of the tenant",
        AdminRequest::PoolRemove { .. } => "RemovePool",
        AdminRequest::Scrub { .. } => "ScrubPool",
        AdminRequest::TargetSetOut { .. } => "SetTargetOut",
        AdminRequest::TargetReplace { .. } => "ReplaceTarget",
        AdminRequest::TargetForget { .. } => "ForgetTarget",
        AdminRequest::SetRebuildRate(_) => "SetRebuildRate",
        AdminRequest::SetCodingMode(_) => "SetCodingMode",
        AdminRequest::Status => "GetStatus",
        AdminRequest::Usage => "GetUsage",
        AdminRequest::CollectOrphans { .. } => "CollectOrphans",
        AdminRequest::IssueCapability { grants: None, .. } => "IssueCapability",
        AdminRequest::IssueCapability { .. } => "IssueCapability with all rights",
        AdminRequest::WhoAmI => "GetCaller",
        AdminRequest::ListSessions => "ListSessions",
        AdminRequest::KillSession(_) => "KillSession",
        AdminRequest::Audit { .. } => "GetAudit",
        AdminRequest::ArmFault(_) => "ArmFault",
        AdminRequest::ListFaults => "ListFaults",
        AdminRequest::ClearFaults => "ClearFaults",
        AdminRequest::TuneChannel(_) => "TuneChannel",
        AdminRequest::Accounts(request) => match request {
            CreateTenant { .. } => "CreateTenant",
            ListTenants => "ListTenants",
            RemoveTenant { .. } => "RemoveTenant",
            CreateUser { is_node_admin: true, .. } => "CreateUser who administers the node",
            CreateUser { .. } => "CreateUser",
            ListUsers { .. } => "ListUsers",
            RemoveUser { .. } => "RemoveUser",
            Grant { .. } => "GrantRights",
            Revoke { .. } => "RevokeRights",
        },
    }
}

#[tokio::test]
async fn every_call_of_the_control_plane_gets_the_answer_of_the_table() {
    assert_eq!(wrong_calls().await, Vec::<String>::new());
}

/// Makes every call as every caller. Returns the differences from the table.
async fn wrong_calls() -> Vec<String> {
    let world = World::start().await;
    world.account(RemoveUser { user: "films/gone".parse().unwrap() }).await;
    let tenant = || Some("films".to_owned());
    let missing = || "films/nobody".parse::<wire::AccountName>().unwrap();
    let all = || wire::AccessGrant { scope: wire::Scope::ALL, verbs: Verbs::ALL };
    let user = |name: &str| name.parse::<wire::AccountName>().unwrap();
    let accounts = AdminRequest::Accounts;
    // None of the requests changes what other requests see: where the right suffices, there is another
    // reason for a refusal, or the change does nothing.
    let redundancy = wire::Redundancy::Single;
    let requests = [
        AdminRequest::PoolCreate { name: "p".into(), pg_count: 1, redundancy, tenant: tenant() },
        AdminRequest::PoolList { tenant: None },
        AdminRequest::PoolList { tenant: tenant() },
        AdminRequest::Scrub { pool: "p".into(), start: false, repair: false, tenant: tenant() },
        AdminRequest::TargetSetOut { index: 99, out: true },
        AdminRequest::TargetReplace { index: 99, uuid: uuid::Uuid::nil() },
        AdminRequest::TargetForget { index: 99, accept_loss: false },
        AdminRequest::SetRebuildRate(0),
        AdminRequest::SetCodingMode("latency-sensitive".parse().unwrap()),
        AdminRequest::Status,
        AdminRequest::Usage,
        AdminRequest::CollectOrphans { older_than_ms: 1 << 40 },
        AdminRequest::IssueCapability { grants: None, key: None, lifetime_s: 0 },
        AdminRequest::IssueCapability { grants: Some(vec![all()]), key: None, lifetime_s: 0 },
        AdminRequest::WhoAmI,
        AdminRequest::ListSessions,
        AdminRequest::KillSession(SessionId(1)),
        AdminRequest::Audit { limit: 1 },
        AdminRequest::ArmFault("dma.transfer=fail".parse().unwrap()),
        AdminRequest::ListFaults,
        AdminRequest::ClearFaults,
        AdminRequest::TuneChannel(wire::TuningChange::default()),
        accounts(CreateTenant { name: "main".into() }),
        accounts(ListTenants),
        accounts(RemoveTenant { name: "main".into() }),
        accounts(CreateUser { user: user("films/other"), key: [1; 32], is_node_admin: false }),
        accounts(CreateUser { user: user("films/other"), key: [1; 32], is_node_admin: true }),
        accounts(ListUsers { tenant: tenant() }),
        accounts(RemoveUser { user: missing() }),
        accounts(Grant { user: missing(), grant: all() }),
        accounts(Revoke { user: missing(), scope: None, verbs: Verbs::ALL }),
        AdminRequest::PoolRemove { name: "p".into(), force: true, tenant: tenant() },
    ];
    let mut found = BTreeMap::<String, Vec<&'static str>>::new();
    for request in &requests {
        for column in CALLERS {
            // Removing the pool must not take the pool from the next caller.
            let request = match request.clone() {
                AdminRequest::PoolRemove { tenant, .. } => {
                    let pool = AdminRequest::PoolCreate {
                        name: format!("victim-{}", column.len()).into(),
                        pg_count: 1,
                        redundancy,
                        tenant: tenant.clone(),
                    };
                    let name = format!("victim-{}", column.len()).into();
                    world.order_unless_present(pool).await;
                    AdminRequest::PoolRemove { name, force: true, tenant }
                }
                other => other,
            };
            let row = call_of(&request).to_owned();
            let client = ControlClient::new(world.caller(column));
            let answer = match client.administer(&world.control_endpoint(), request, false).await {
                Err(ControlError::Refused(e)) => verdict::<()>(&Err(e)),
                Err(
                    ControlError::NotPermitted(_)
                    | ControlError::Identity(_)
                    | ControlError::Unreachable { .. },
                ) => "refused",
                Err(other) => panic!("{row}, {column}: {other}"),
                Ok(_) => "yes",
            };
            found.entry(row).or_default().push(answer);
        }
    }
    compare("call", &found)
}

impl World {
    async fn order_unless_present(&self, request: AdminRequest) {
        let user = UserName { id: NODE_ADMIN, tenant_id: 0, tenant: "main".into(), user: "admin".into() };
        let caller = Caller { key: self.admin.key(), user };
        match self.administrator.administer(caller, request, false).await {
            Ok(_) | Err(Error::PoolExists(_)) => {}
            Err(e) => panic!("{e}"),
        }
    }

    /// Returns a client of a user.
    async fn client(&self, column: &str) -> client::Result<Client> {
        let options = Options { stack: network(), trust: self.caller(column), ..Options::default() };
        let engine = NativeEngine::connect(&self.node.endpoint, &options).await?;
        Ok(Client::over(Arc::new(engine), options))
    }
}

#[tokio::test]
async fn a_session_follows_the_rights_of_its_user() {
    let world = World::start().await;
    let client = world.client("another user").await.unwrap();
    let object = client.pool("p").unwrap().object("a/x").unwrap();
    let refused = object.put("1").await.unwrap_err();
    assert!(
        matches!(&refused, client::Error::Node(Error::NotPermitted { verb, .. }) if verb == "write"),
        "{refused}"
    );
    let user = || "films/other".parse::<wire::AccountName>().unwrap();
    let grant =
        |verbs: &str| wire::AccessGrant { scope: "p".parse().unwrap(), verbs: verbs.parse().unwrap() };
    world.account(Grant { user: user(), grant: grant("write") }).await;
    object.put("1").await.unwrap();
    assert!(object.get().await.is_err());
    world.account(Grant { user: user(), grant: grant("read") }).await;
    assert_eq!(object.get().await.unwrap(), "1");
    world.account(Revoke { user: user(), scope: None, verbs: "write".parse().unwrap() }).await;
    assert!(object.put("2").await.unwrap_err().is_refusal());
    assert_eq!(object.get().await.unwrap(), "1");
    world.account(RemoveUser { user: user() }).await;
    let refused = object.get().await.unwrap_err();
    assert!(refused.is_refusal(), "{refused}");
    assert!(world.client("another user").await.unwrap_err().is_refusal());
    // Others go on.
    world.client("owner").await.unwrap().pool("p").unwrap().object("a/x").unwrap().get().await.unwrap();
}

#[tokio::test]
async fn tenants_have_pools_of_the_same_name_and_see_only_their_own() {
    let world = World::start().await;
    let (films, rival) =
        (world.client("owner").await.unwrap(), world.client("another tenant").await.unwrap());
    let missing = rival.pool("p").unwrap().object("x").unwrap();
    let absent = rival.pool("nowhere").unwrap().object("x").unwrap();
    let text = |e: client::Error| e.to_string();
    let (foreign, nowhere) = (text(missing.get().await.unwrap_err()), text(absent.get().await.unwrap_err()));
    assert_eq!(foreign, nowhere.replace("nowhere", "p"), "another tenant's pool looks like a missing one");
    rival.create_pool("p").await.unwrap();
    missing.put("theirs").await.unwrap();
    let ours = films.pool("p").unwrap().object("x").unwrap();
    assert!(ours.get().await.unwrap_err().is_not_found());
    ours.put("ours").await.unwrap();
    assert_eq!((ours.get().await.unwrap(), missing.get().await.unwrap()), ("ours".into(), "theirs".into()));
    let names = |pools: Vec<client::PoolInfo>| pools.into_iter().map(|pool| pool.name).collect::<Vec<_>>();
    assert_eq!(names(films.pools().await.unwrap()), ["p"]);
    assert_eq!(names(rival.pools().await.unwrap()), ["p", "r"]);
    let operator = world.client("node admin").await.unwrap();
    assert_eq!(names(operator.pools().await.unwrap()), [""; 0]);
    assert_eq!(names(operator.in_tenant(Some("films".into())).pools().await.unwrap()), ["p"]);
    rival.remove_pool("p", true).await.unwrap();
    assert_eq!(ours.get().await.unwrap(), "ours");
}

#[tokio::test]
async fn accounts_and_rights_survive_a_restart() {
    let mut world = World::start().await;
    world.client("read-only").await.unwrap().pools().await.unwrap();
    world.osd.take().unwrap().stop();
    let directory = Directory::default();
    world.node.config.users = directory.clone();
    let users = Arc::new(Users { admin: world.admin.key(), directory });
    let stack = stack_of(Trust::server(&world.identity, users), UseAs::Server);
    let osd = OsdServer::start(world.node.resources(), stack, &world.node.endpoint).unwrap();
    let trust = world.caller("read-only");
    let credentials = Credentials {
        user: "films/reader".into(),
        node: world.identity.key(),
        identity: world.users["films/reader"].clone(),
    };
    assert_eq!(credentials.trust().key(), trust.key());
    let stack = stack_of(trust, UseAs::Client);
    let connected = stack.connect(osd.endpoint(), ConnectOptions::default()).await;
    assert!(connected.is_ok(), "the osd knows its users from the map");
    osd.stop();
}

#[tokio::test]
async fn a_removed_administrator_changes_nothing_while_the_removal_is_saved() {
    let world = World::start().await;
    let operator = world.users["main/operator"].key();
    let caller = |key, user: UserName| Caller { key, user };
    let own = UserName { id: NODE_ADMIN, tenant_id: 0, tenant: "main".into(), user: "admin".into() };
    let users = |request| AdminRequest::Accounts(request);
    let known = world.node.config.users.find(&operator).unwrap();
    let remove = users(RemoveUser { user: "main/operator".parse().unwrap() });
    let backdoor = |name: &str| {
        users(CreateUser { user: name.parse().unwrap(), key: [name.len() as u8; 32], is_node_admin: true })
    };
    let pool = AdminRequest::PoolCreate {
        name: "q".into(),
        pg_count: 1,
        redundancy: wire::Redundancy::Single,
        tenant: Some("rival".into()),
    };
    // The requests arrive in this order, before the removal has been saved.
    let removed = world.administrator.administer(caller(world.admin.key(), own), remove, false);
    let late = [backdoor("main/back"), backdoor("films/door"), pool]
        .map(|request| world.administrator.administer(caller(operator, known.clone()), request, false));
    removed.await.unwrap();
    for request in late {
        let answer = request.await;
        assert!(matches!(answer, Err(Error::NotAdministrator { .. })), "{answer:?}");
    }
}

/// Each planted error in permissions turns a cell of the tables wrong. The bugs are active in the whole
/// process, so this test runs alone: `make rights-mutants`.
#[cfg(mutants)]
#[tokio::test]
#[ignore = "needs the process for itself"]
async fn each_planted_error_in_permissions_is_found() {
    use base::mutant::{Mutant, plant_everywhere};
    assert_eq!((wrong_requests().await, wrong_calls().await), (vec![], vec![]));
    for mutant in Mutant::PERMISSIONS {
        plant_everywhere(Some(mutant));
        let wrong = [wrong_requests().await, wrong_calls().await].concat();
        plant_everywhere(None);
        println!(
            "{}: {} cells, such as: {}",
            mutant.name(),
            wrong.len(),
            wrong.first().map_or("none", |cell| cell)
        );
        assert!(!wrong.is_empty(), "{} is not found", mutant.name());
    }
}
