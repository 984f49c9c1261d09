//! Calls of the control plane over loopback TCP, and attacks on its server.

use std::net::TcpStream;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use base::BoxFuture;
use base::fault::Armed;
use control::{Administrator, ControlClient, ControlError, ControlListener, ControlServer, GatewayRegistry};
use identity::{Caller, Identity, IdentityError, KeyHash, Trust, UserDirectory, UserName};
use wire::AccountRequest::{
    CreateTenant, CreateUser, Grant, ListTenants, ListUsers, RemoveTenant, RemoveUser, Revoke,
};
use wire::{
    AccountName, AdminReply, AdminRequest, ChannelTuning, DiskCommand, DiskInfo, DiskReply, DiskRequest,
    DiskSpace, Error, PoolInfo, PoolLoss, Redundancy, Role, ScrubStatus, SessionId, SessionInfo,
    SnapshotInfo, TenantInfo, TuningChange, UserInfo, Verbs,
};

/// An administrator that records the requests and answers from a list.
#[derive(Default)]
struct Recorder {
    seen: Mutex<Vec<(AdminRequest, bool)>>,
    answer: Mutex<Option<wire::Result<AdminReply>>>,
}

impl Administrator for Recorder {
    fn administer(
        &self,
        caller: Caller,
        request: AdminRequest,
        is_repeated: bool,
    ) -> BoxFuture<'static, wire::Result<AdminReply>> {
        assert_eq!(caller.user.to_string(), "main/admin");
        self.seen.lock().unwrap().push((request, is_repeated));
        let answer = self.answer.lock().unwrap().clone().unwrap_or(Ok(AdminReply::Done));
        Box::pin(std::future::ready(answer))
    }
}

/// The keys of the node's users, who may be removed. Each belongs to a tenant of its own.
struct Users(Mutex<Vec<KeyHash>>);

impl UserDirectory for Users {
    fn find(&self, key: &KeyHash) -> Option<UserName> {
        let known = self.0.lock().unwrap().iter().position(|user| user == key);
        known.map(|tenant| UserName {
            id: identity::NODE_ADMIN,
            tenant_id: tenant as u32,
            tenant: "main".into(),
            user: "admin".into(),
        })
    }
}

struct World {
    recorder: Arc<Recorder>,
    users: Arc<Users>,
    node: Identity,
    user: Identity,
    server: ControlServer,
}

impl World {
    fn new() -> World {
        let (node, user) = (Identity::generate(), Identity::generate());
        let users = Arc::new(Users(Mutex::new(vec![user.key()])));
        let recorder = Arc::<Recorder>::default();
        let listener = ControlListener::bind("127.0.0.1:0").unwrap();
        let trust = Trust::server(&node, Arc::clone(&users) as _);
        let server =
            ControlServer::start(listener, trust, Arc::clone(&recorder) as _, GatewayRegistry::default())
                .unwrap();
        World { recorder, users, node, user, server }
    }

    fn endpoint(&self) -> String {
        self.server.address().to_string()
    }

    fn client(&self) -> ControlClient {
        ControlClient::new(Trust::client(&self.user, self.node.key()))
    }

    async fn call(
        &self,
        request: AdminRequest,
        answer: wire::Result<AdminReply>,
    ) -> Result<AdminReply, ControlError> {
        *self.recorder.answer.lock().unwrap() = Some(answer);
        self.client().administer(&self.endpoint(), request, false).await
    }
}

/// All requests about disks, with their replies.
fn disk_calls() -> Vec<(AdminRequest, AdminReply)> {
    let snapshot = SnapshotInfo { name: "s".into(), size: 4096, created_ms: 3, is_removing: true };
    let clone = DiskInfo {
        name: "clone".into(),
        size: 1 << 40,
        chunk: 4 << 20,
        created_ms: 1,
        serial: "serial".into(),
        nguid: "0123456789abcdef0123456789abcdef".into(),
        snapshots: vec![snapshot],
        parent: Some("d@s".into()),
        is_flattening: true,
        gateway: Some("g".into()),
        attached_ms: Some(2),
    };
    let plain = DiskInfo {
        snapshots: vec![],
        parent: None,
        is_flattening: false,
        gateway: None,
        attached_ms: None,
        ..clone.clone()
    };
    let (disk, snapshot) = (|| "d".to_owned(), || "s".to_owned());
    let attach = |front_end: &str, gateway: Option<&str>| DiskCommand::Attach {
        disk: disk(),
        front_end: front_end.parse().unwrap(),
        gateway: gateway.map(str::to_owned),
        takes_over: gateway.is_some(),
        is_read_only: gateway.is_none(),
    };
    let attached = |front_end: &str| DiskReply::Attached(front_end.parse().unwrap());
    let commands = [
        (DiskCommand::Create { disk: disk(), size: 1 << 40, chunk: 1 << 20 }, DiskReply::Done),
        (DiskCommand::List, DiskReply::Disks(vec![clone, plain.clone()])),
        (DiskCommand::Stat { disk: disk() }, DiskReply::Disks(vec![plain])),
        (DiskCommand::Remove { disk: disk(), with_snapshots: true }, DiskReply::Done),
        (DiskCommand::Resize { disk: disk(), size: 1 << 41, shrinks: true }, DiskReply::Done),
        (DiskCommand::Snapshot { disk: disk(), snapshot: snapshot() }, DiskReply::Done),
        (DiskCommand::RemoveSnapshot { disk: disk(), snapshot: snapshot() }, DiskReply::Done),
        (DiskCommand::Clone { disk: disk(), snapshot: snapshot(), clone: "c".into() }, DiskReply::Done),
        (DiskCommand::Flatten { disk: disk() }, DiskReply::Done),
        (
            DiskCommand::Usage { disk: disk() },
            DiskReply::Usage(DiskSpace { size: 1 << 40, allocated: 1 << 30 }),
        ),
        (attach("vhost-user:/run/vm.sock", Some("g")), attached("vhost-user:/run/vm.sock")),
        (attach("nbd:127.0.0.1:0", None), attached("nbd:127.0.0.1:10809")),
        (DiskCommand::Detach { disk: disk() }, DiskReply::Done),
    ];
    let pool = || "films".to_owned();
    let call = |(command, reply)| {
        (AdminRequest::Disk(DiskRequest { pool: pool(), command }), AdminReply::Disk(reply))
    };
    commands.into_iter().map(call).collect()
}

#[tokio::test]
async fn repetitions_of_commands_about_disks_are_marked_and_wrong_replies_are_errors() {
    let world = World::new();
    let client = world.client();
    for (request, reply) in disk_calls() {
        let AdminRequest::Disk(DiskRequest { command, .. }) = &request else { panic!("{request:?}") };
        let is_marked = matches!(
            command,
            DiskCommand::Create { .. }
                | DiskCommand::Remove { .. }
                | DiskCommand::Snapshot { .. }
                | DiskCommand::RemoveSnapshot { .. }
                | DiskCommand::Clone { .. }
                | DiskCommand::Detach { .. }
        );
        *world.recorder.answer.lock().unwrap() = Some(Ok(reply.clone()));
        let answer = client.administer(&world.endpoint(), request.clone(), true).await;
        assert_eq!(answer, Ok(reply));
        assert_eq!(world.recorder.seen.lock().unwrap().pop(), Some((request.clone(), is_marked)));
        for wrong in [AdminReply::Done, AdminReply::Disk(DiskReply::NotHere)] {
            let answer = world.call(request.clone(), Ok(wrong)).await;
            assert!(
                matches!(answer, Err(ControlError::Refused(Error::BadRequest(_) | Error::CommandRefused(_)))),
                "{request:?}: {answer:?}"
            );
        }
    }
    let serve = AdminRequest::ServeGateway { name: "g".into() };
    let refused = client.administer(&world.endpoint(), serve, false).await;
    assert!(matches!(refused, Err(ControlError::Refused(Error::BadRequest(_)))), "{refused:?}");
}

#[tokio::test]
async fn every_request_and_every_reply_arrives_unchanged() {
    let world = World::new();
    let redundancy = "ec:4+2".parse::<Redundancy>().unwrap().with_stripe_unit(12 << 10).unwrap();
    let pool = PoolInfo { id: 3, name: "films".into(), pg_count: 8, redundancy, made_ms: 5 };
    let loss = PoolLoss { pool: "films".into(), redundancy, groups: 8, waiting: 2, emptied: 1 };
    let name = || bytes::Bytes::from_static(b"films");
    let name_of = || "t/u".parse::<AccountName>().unwrap();
    let grant =
        || wire::AccessGrant { scope: "films:n/a".parse().unwrap(), verbs: "read,list".parse().unwrap() };
    let tenant = TenantInfo { name: "t".into(), made_ms: 1, pools: 2, users: 3 };
    let user =
        || UserInfo { user: name_of(), key: [9; 32], is_node_admin: true, made_ms: 5, grants: vec![grant()] };
    let accounts = AdminRequest::Accounts;
    let session = SessionInfo {
        id: SessionId(1 << 100),
        user: "t/u".into(),
        peer: "192.0.2.1:5".into(),
        opened_ms: 3,
        connections: 2,
    };
    let fault = "dma.transfer=stall,late=20ms,after=3,count=2,probability=0.25,seed=9";
    let armed = Armed { fault: fault.into(), fired: 5 };
    let tuning =
        ChannelTuning { pipeline: true, region_cache: 64, max_transfer: 1 << 21, dma_queues: 5, poll_us: 50 };
    let change = TuningChange {
        pipeline: Some(false),
        region_cache: Some(0),
        max_transfer: Some(4096),
        dma_queues: Some(1),
        poll_us: Some(0),
    };
    let calls = [
        (
            AdminRequest::PoolCreate { name: name(), pg_count: 8, redundancy, tenant: Some("t".into()) },
            AdminReply::Done,
        ),
        (AdminRequest::PoolList { tenant: None }, AdminReply::Pools(vec![pool])),
        (AdminRequest::PoolRemove { name: name(), force: true, tenant: Some("t".into()) }, AdminReply::Done),
        (
            AdminRequest::Scrub { pool: name(), start: true, repair: false, tenant: None },
            AdminReply::Scrub(Box::<ScrubStatus>::default()),
        ),
        (AdminRequest::TargetSetOut { index: 2, out: true }, AdminReply::Done),
        (AdminRequest::TargetReplace { index: 2, uuid: uuid::Uuid::from_u128(7) }, AdminReply::Done),
        (AdminRequest::TargetForget { index: 2, accept_loss: true }, AdminReply::Loss(vec![loss])),
        (AdminRequest::SetRebuildRate(1 << 40), AdminReply::Done),
        (AdminRequest::SetCodingMode("hybrid:1:3".parse().unwrap()), AdminReply::Done),
        (AdminRequest::CollectOrphans { older_than_ms: 9 }, AdminReply::Collected(4)),
        (AdminRequest::Usage, AdminReply::Usage(Vec::new())),
        (
            AdminRequest::IssueCapability { grants: Some(vec![grant()]), key: Some([3; 32]), lifetime_s: 7 },
            AdminReply::Capability("signed".into()),
        ),
        (
            AdminRequest::IssueCapability { grants: None, key: None, lifetime_s: 0 },
            AdminReply::Capability("signed".into()),
        ),
        (AdminRequest::ListSessions, AdminReply::Sessions(vec![session])),
        (AdminRequest::KillSession(SessionId(7)), AdminReply::Done),
        (AdminRequest::Audit { limit: 3 }, AdminReply::Audit(vec!["{}".into()])),
        (AdminRequest::WhoAmI, AdminReply::Me(Box::new(user()))),
        (AdminRequest::ArmFault(fault.parse().unwrap()), AdminReply::Done),
        (AdminRequest::ListFaults, AdminReply::Faults { role: Role::Node, armed: vec![] }),
        (AdminRequest::ClearFaults, AdminReply::Faults { role: Role::Osd, armed: vec![armed] }),
        (AdminRequest::TuneChannel(change), AdminReply::Tuned(tuning)),
        (AdminRequest::TuneChannel(TuningChange::default()), AdminReply::Tuned(tuning)),
        (accounts(CreateTenant { name: "t".into() }), AdminReply::Done),
        (accounts(RemoveTenant { name: "t".into() }), AdminReply::Done),
        (accounts(ListTenants), AdminReply::Tenants(vec![tenant])),
        (accounts(CreateUser { user: name_of(), key: [4; 32], is_node_admin: true }), AdminReply::Done),
        (accounts(RemoveUser { user: name_of() }), AdminReply::Done),
        (accounts(ListUsers { tenant: None }), AdminReply::Users(vec![user()])),
        (accounts(ListUsers { tenant: Some("t".into()) }), AdminReply::Users(Vec::new())),
        (accounts(Grant { user: name_of(), grant: grant() }), AdminReply::Done),
        (accounts(Revoke { user: name_of(), scope: None, verbs: Verbs::ALL }), AdminReply::Done),
        (
            accounts(Revoke { user: name_of(), scope: Some(grant().scope), verbs: Verbs::ALL }),
            AdminReply::Done,
        ),
    ];
    for (request, reply) in calls.into_iter().chain(disk_calls()) {
        let answer = world.call(request.clone(), Ok(reply.clone())).await;
        assert_eq!(answer, Ok(reply));
        assert_eq!(world.recorder.seen.lock().unwrap().pop(), Some((request, false)));
    }
}

#[tokio::test]
async fn a_refusal_arrives_as_the_nodes_error_and_a_repetition_is_marked() {
    let world = World::new();
    let error = Error::PoolNotEmpty("films".into());
    let request = AdminRequest::PoolRemove { name: "films".into(), force: false, tenant: None };
    let answer = world.call(request.clone(), Err(error.clone())).await;
    assert_eq!(answer, Err(ControlError::Refused(error)));
    let client = world.client();
    client.administer(&world.endpoint(), request.clone(), true).await.unwrap_err();
    assert_eq!(world.recorder.seen.lock().unwrap().pop(), Some((request, true)));
    // An answer of another kind is an error of one call.
    let wrong = world.call(AdminRequest::PoolList { tenant: None }, Ok(AdminReply::Done)).await;
    assert!(matches!(wrong, Err(ControlError::Refused(Error::BadRequest(_)))), "{wrong:?}");
}

#[tokio::test]
async fn only_users_of_the_node_administer_it_and_only_that_node() {
    let world = World::new();
    let stranger = ControlClient::new(Trust::client(&Identity::generate(), world.node.key()));
    let refused =
        stranger.administer(&world.endpoint(), AdminRequest::PoolList { tenant: None }, false).await;
    assert!(matches!(refused, Err(ControlError::NotPermitted(_))), "{refused:?}");
    let (expected, found) = (Identity::generate().key(), world.node.key());
    let misled = ControlClient::new(Trust::client(&world.user, expected));
    let refused = misled.administer(&world.endpoint(), AdminRequest::PoolList { tenant: None }, false).await;
    assert_eq!(refused, Err(ControlError::Identity(IdentityError::OtherServer { expected, found })));
    assert!(world.recorder.seen.lock().unwrap().is_empty(), "no call has reached the osd");
    // A user who is removed loses the right to further calls of an open connection.
    let client = world.client();
    client.administer(&world.endpoint(), AdminRequest::SetRebuildRate(0), false).await.unwrap();
    world.users.0.lock().unwrap().clear();
    let refused = client.administer(&world.endpoint(), AdminRequest::SetRebuildRate(1), false).await;
    assert!(matches!(refused, Err(ControlError::NotPermitted(_))), "{refused:?}");
    assert_eq!(world.recorder.seen.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn a_client_continues_with_a_server_that_restarts() {
    let mut world = World::new();
    let client = world.client();
    client.administer(&world.endpoint(), AdminRequest::SetRebuildRate(0), false).await.unwrap();
    let endpoint = world.endpoint();
    let trust = Trust::server(&world.node, Arc::clone(&world.users) as _);
    let spare = ControlListener::bind("127.0.0.1:0").unwrap();
    let unused = ControlServer::start(
        spare,
        trust.clone(),
        Arc::clone(&world.recorder) as _,
        GatewayRegistry::default(),
    )
    .unwrap();
    drop(std::mem::replace(&mut world.server, unused));
    let down = client.administer(&endpoint, AdminRequest::SetRebuildRate(0), false).await;
    assert!(matches!(down, Err(ControlError::Unreachable { .. })), "{down:?}");
    let listener = ControlListener::bind(&endpoint).unwrap();
    let _again =
        ControlServer::start(listener, trust, Arc::clone(&world.recorder) as _, GatewayRegistry::default())
            .unwrap();
    let began = Instant::now();
    while client.administer(&endpoint, AdminRequest::SetRebuildRate(0), false).await.is_err() {
        assert!(began.elapsed() < Duration::from_secs(10), "the client does not connect again");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn silent_connections_of_one_address_do_not_keep_clients_of_another_out() {
    let world = World::new();
    let silent: Vec<TcpStream> =
        (0..300).map(|_| TcpStream::connect(world.server.address()).unwrap()).collect();
    let began = Instant::now();
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.2:0".parse().unwrap()).unwrap();
    let other = socket.connect(world.server.address()).await.unwrap();
    let config = Trust::client(&world.user, world.node.key());
    let config = config.client_config(identity::Protocol::Control).unwrap();
    let shaken = tokio_rustls::TlsConnector::from(config).connect(identity::server_name(), other);
    let shaken = tokio::time::timeout(Duration::from_secs(3), shaken).await;
    shaken.expect("a handshake in time").unwrap();
    assert!(began.elapsed() < Duration::from_secs(3));
    drop(silent);
}

#[tokio::test]
async fn connections_of_a_tenant_keep_no_other_tenant_out_and_end_when_the_user_is_removed() {
    use tokio::io::AsyncReadExt;
    let world = World::new();
    let crowd = Identity::generate();
    world.users.0.lock().unwrap().push(crowd.key());
    let config = Trust::client(&crowd, world.node.key()).client_config(identity::Protocol::Control);
    let connector = tokio_rustls::TlsConnector::from(config.unwrap());
    let mut open = Vec::new();
    for _ in 0..150 {
        let stream = tokio::net::TcpStream::connect(world.server.address()).await.unwrap();
        // At its limit, the server refuses the tenant's further connections.
        open.extend(connector.connect(identity::server_name(), stream).await.ok());
    }
    assert!(open.len() >= 120, "{} connections", open.len());
    let client = world.client();
    let endpoint = world.endpoint();
    let call = client.administer(&endpoint, AdminRequest::SetRebuildRate(0), false);
    tokio::time::timeout(Duration::from_secs(5), call).await.expect("an answer in time").unwrap();
    world.users.0.lock().unwrap().truncate(1);
    for mut stream in open {
        let mut received = Vec::new();
        let ended = stream.read_to_end(&mut received);
        let _ = tokio::time::timeout(Duration::from_secs(10), ended).await.expect("the connection ends");
    }
    client.administer(&endpoint, AdminRequest::SetRebuildRate(0), false).await.unwrap();
}

#[tokio::test]
async fn garbage_costs_its_own_connection_only() {
    use std::io::{Read, Write};
    let world = World::new();
    for garbage in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        &[0; 5000],
        &[22, 3, 1, 255, 255],
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ] {
        let mut raw = TcpStream::connect(world.server.address()).unwrap();
        raw.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        // The server may close the connection while the bytes are being written.
        let _ = raw.write_all(garbage);
        let mut answer = Vec::new();
        let _ = raw.take(4096).read_to_end(&mut answer);
        assert!(answer.len() < 100, "the server answers garbage with {answer:?}");
    }
    world.client().administer(&world.endpoint(), AdminRequest::SetRebuildRate(0), false).await.unwrap();
}
