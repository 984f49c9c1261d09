//! Every request and every call, by every kind of caller, gets the answer that the tables in
//! SECURITY.md state. The tables are kept apart from the code that decides.

mod calls;
mod requests;
mod table;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use base::block::Payload;
use base::clock::WallClock;
use bytes::Bytes;
use client::engine::NativeEngine;
use client::{Client, Options};
use control::{ControlClient, ControlListener, ControlServer, GatewayRegistry};
use identity::{Caller, Credentials, Identity, KeyHash, NODE_ADMIN, Trust, UserDirectory, UserName};
use messenger::{
    ConnectOptions, Connection, ConnectionConfig, ConnectionEvent, Incoming, Message, MessengerError,
    NetworkStack, StackOptions, UseAs,
};
use osd::{Directory, OsdAdministrator, OsdConfig, OsdServer};
use wire::AccountRequest::{CreateTenant, CreateUser, Grant, RemoveUser, Revoke};
use wire::{
    AdminReply, AdminRequest, BulkDescriptor, Condition, Data, Error, Mutate, Mutation, ObjectRequest,
    OpBytes, Query, QueryOp, Read, RequestBody, RequestHead, SessionId, WireName,
};

#[cfg(mutants)]
use self::{calls::wrong_calls, requests::wrong_requests};
use crate::common::{Node, network};
use crate::raw::head;

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
        let control =
            ControlServer::start(listener, trust, Arc::new(administer), GatewayRegistry::default()).unwrap();
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

    /// Returns the user who makes the requests of a column of the tables in SECURITY.md. Unknown
    /// callers have no user.
    fn user_of(column: &str) -> &'static str {
        match column {
            "no credential" | "another node's" => "",
            "another tenant" => "rival/owner",
            "another user" => "films/other",
            "read-only" => "films/reader",
            "prefix-only" => "films/prefix",
            "expired" | "owner" => "films/owner",
            "revoked" => "films/gone",
            "node admin" => "main/operator",
            other => panic!("{other}"),
        }
    }

    /// Returns the trust of the caller of a column.
    pub(crate) fn caller(&self, column: &str) -> Trust {
        match World::user_of(column) {
            "" => {
                let stranger = Identity::generate();
                let pinned = if column == "no credential" { self.identity.key() } else { stranger.key() };
                Trust::client(&stranger, pinned)
            }
            user => Trust::client(&self.users[user], self.identity.key()),
        }
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
}

/// A connection on which a test sends requests.
pub(crate) struct Line {
    connection: Arc<dyn Connection>,
    incoming: Box<dyn Incoming>,
    seq: u64,
}

impl Line {
    /// Sends a request on a strand.
    async fn send(&self, strand: u32, seq: u64, body: &RequestBody) {
        let header = wire::encode_request(&RequestHead { strand, ..head(seq) }, body);
        self.connection.send(Message { header, payload: Payload::default() }).await.unwrap();
    }

    pub(crate) async fn ask(&mut self, body: RequestBody) -> Result<wire::ReplyBody, Error> {
        self.seq += 1;
        self.send(0, self.seq, &body).await;
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

impl World {
    /// Returns a client of a user.
    pub(crate) async fn client(&self, column: &str) -> client::Result<Client> {
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

/// Each planted error in permissions changes an answer of the tables, for example the one that is
/// named here. The bugs are active in the whole process, so this test runs alone:
/// `make rights-mutants`.
#[cfg(mutants)]
#[tokio::test]
#[ignore = "needs the process for itself"]
async fn each_planted_error_in_permissions_is_found() {
    use base::mutant::{Mutant, plant_everywhere};
    let expected = |mutant| match mutant {
        Mutant::PermitReads => "Read a/x, another user: yes instead of no",
        Mutant::PermitWrites => "Mutate a/x, read-only: yes instead of no",
        Mutant::PermitLists => "List all namespaces, another user: yes instead of no",
        Mutant::CompareWithoutRead => "Mutate c/x if the data matches, prefix-only: yes instead of no",
        Mutant::IgnorePrefix => "Read b/x, prefix-only: yes instead of no",
        Mutant::PermitAdmin => "ListUsers, another user: yes instead of no",
        Mutant::PermitPoolAdmin => "ScrubPool, read-only: yes instead of no",
        Mutant::PermitNodeAdmin => "GetStatus, owner: yes instead of no",
        Mutant::IgnoreTenantName => "ListUsers, another tenant: yes instead of no",
        Mutant::WidenCapabilities => "IssueCapability with all rights, another user: yes instead of no",
        Mutant::NodeAdminReads => "IssueCapability with all rights, node admin: yes instead of no",
        Mutant::CrossTenants => "Read a/x, another tenant: yes instead of absent",
        Mutant::IgnoreExpiry => "Read a/x, expired: yes instead of stale",
        Mutant::IgnoreRevision => "Read a/x, revoked: yes instead of stale",
        Mutant::PermitForeignMemory => "Read into memory of a third party, owner: yes instead of no",
        Mutant::ServeUnknownKeys => "Health.Check, no credential: yes instead of refused",
        other => panic!("{} is no error in permissions", other.name()),
    };
    assert_eq!((wrong_requests().await, wrong_calls().await), (vec![], vec![]));
    for mutant in Mutant::PERMISSIONS {
        plant_everywhere(Some(mutant));
        let wrong = [wrong_requests().await, wrong_calls().await].concat();
        plant_everywhere(None);
        let expected = expected(mutant);
        println!("{}: {} cells, such as: {expected}", mutant.name(), wrong.len());
        assert!(wrong.iter().any(|cell| cell == expected), "{} is not found: {wrong:#?}", mutant.name());
    }
}
