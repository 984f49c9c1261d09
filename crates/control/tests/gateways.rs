//! Gateways that connect to the control plane over loopback TCP, and execute commands about disks.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::BoxFuture;
use control::proto::gateway_report::Report;
use control::proto::gateways_client::GatewaysClient;
use control::proto::order_done::Outcome;
use control::proto::{GatewayHello, GatewayReport, OrderDone};
use control::{
    Administrator, ControlClient, ControlError, ControlListener, ControlServer, GatewayOrders,
    GatewayRegistry,
};
use identity::{Caller, Identity, KeyHash, Trust, UserDirectory, UserName};
use tokio::task::JoinHandle;
use tonic::Code;
use wire::{AdminReply, AdminRequest, AdministratorOf, DiskCommand, DiskInfo, DiskReply, DiskRequest, Error};

/// Number of the tenant of all users.
const TENANT: u32 = 7;

/// Time limit of steps that must come to an end.
const PATIENCE: Duration = Duration::from_secs(20);

/// Decides like an osd that passes requests about disks to the gateways.
#[derive(Default)]
struct Decider {
    gateways: GatewayRegistry,
    refuses: AtomicBool,
    /// The requests to serve, and whether they were repetitions.
    served: Mutex<Vec<(String, bool)>>,
}

impl Administrator for Decider {
    fn administer(
        &self,
        caller: Caller,
        request: AdminRequest,
        is_repeated: bool,
    ) -> BoxFuture<'static, wire::Result<AdminReply>> {
        match request {
            AdminRequest::Disk(request) => {
                let executed = self.gateways.execute(caller.user.tenant_id, request);
                Box::pin(async { Ok(AdminReply::Disk(executed.await?)) })
            }
            AdminRequest::ServeGateway { name } => {
                self.served.lock().unwrap().push((name, is_repeated));
                let answer = match self.refuses.load(Ordering::Relaxed) {
                    true => Err(refusal()),
                    false => Ok(AdminReply::Gateway(caller.user.tenant_id)),
                };
                Box::pin(std::future::ready(answer))
            }
            other => panic!("{other:?}"),
        }
    }
}

fn refusal() -> Error {
    let of = AdministratorOf::TenantOrNode;
    Error::NotAdministrator { user: "t/u".into(), what: "serve as a gateway".into(), of }
}

/// Knows one user.
struct OneUser(KeyHash);

impl UserDirectory for OneUser {
    fn find(&self, key: &KeyHash) -> Option<UserName> {
        let user = || UserName { id: 1, tenant_id: TENANT, tenant: "t".into(), user: "u".into() };
        (*key == self.0).then(user)
    }
}

struct World {
    decider: Arc<Decider>,
    client: ControlClient,
    server: ControlServer,
}

impl World {
    fn new() -> World {
        let (node, user) = (Identity::generate(), Identity::generate());
        let decider = Arc::<Decider>::default();
        let listener = ControlListener::bind("127.0.0.1:0").unwrap();
        let trust = Trust::server(&node, Arc::new(OneUser(user.key())));
        let gateways = decider.gateways.clone();
        let server = ControlServer::start(listener, trust, Arc::clone(&decider) as _, gateways).unwrap();
        World { decider, client: ControlClient::new(Trust::client(&user, node.key())), server }
    }

    fn endpoint(&self) -> String {
        self.server.address().to_string()
    }

    async fn serve(&self, name: &str) -> Result<GatewayOrders, ControlError> {
        self.client.serve_gateway(&self.endpoint(), name).await
    }

    async fn execute(&self, command: DiskCommand) -> Result<AdminReply, ControlError> {
        let request = AdminRequest::Disk(DiskRequest { pool: "p".into(), command });
        let endpoint = self.endpoint();
        let executed = self.client.administer(&endpoint, request, false);
        tokio::time::timeout(PATIENCE, executed).await.expect("an answer in time")
    }

    /// Sends these reports as a gateway without the client's checks. Returns the code of the end of the
    /// stream.
    async fn send(&self, reports: Vec<GatewayReport>) -> Code {
        let channel = self.client.channel(&self.endpoint()).await.unwrap();
        let reports = futures::StreamExt::chain(futures::stream::iter(reports), futures::stream::pending());
        let mut orders = match GatewaysClient::new(channel).serve(reports).await {
            Ok(orders) => orders.into_inner(),
            Err(status) => return status.code(),
        };
        loop {
            let next = tokio::time::timeout(PATIENCE, orders.message()).await.expect("the stream ends");
            match next {
                Ok(Some(_)) => {}
                Ok(None) => return Code::Ok,
                Err(status) => return status.code(),
            }
        }
    }
}

fn detach() -> DiskCommand {
    DiskCommand::Detach { disk: "d".into() }
}

fn hello(name: &str) -> GatewayReport {
    GatewayReport { report: Some(Report::Hello(GatewayHello { name: name.into() })) }
}

/// Answers all orders with the same reply.
fn answer_with(mut orders: GatewayOrders, reply: wire::Result<DiskReply>) -> JoinHandle<ControlError> {
    tokio::spawn(async move {
        loop {
            match orders.next().await {
                Ok((id, _)) => orders.done(id, reply.clone()).await,
                Err(e) => return e,
            }
        }
    })
}

#[tokio::test]
async fn the_gateway_that_has_the_disk_executes_a_command() {
    let world = World::new();
    let refused = world.execute(detach()).await;
    assert!(
        matches!(&refused, Err(ControlError::Refused(Error::CommandRefused(why))) if why.contains("no gateway")),
        "{refused:?}"
    );
    let _a = answer_with(world.serve("a").await.unwrap(), Ok(DiskReply::NotHere));
    let mut b = world.serve("b").await.unwrap();
    let second = tokio::spawn(async move {
        let answers = b.answers();
        let (id, request) = b.next().await.unwrap();
        answers.done(id, Ok(DiskReply::Done)).await;
        let (id, _) = b.next().await.unwrap();
        answers.done(id, Err(Error::CommandRefused("no".into()))).await;
        (b, request)
    });
    assert_eq!(world.execute(detach()).await, Ok(AdminReply::Disk(DiskReply::Done)));
    let refused = world.execute(detach()).await;
    assert_eq!(refused, Err(ControlError::Refused(Error::CommandRefused("no".into()))));
    let (_b, request) = second.await.unwrap();
    assert_eq!(request, DiskRequest { pool: "p".into(), command: detach() });
    assert_eq!(*world.decider.served.lock().unwrap(), [("a".into(), false), ("b".into(), false)]);
}

#[tokio::test]
async fn a_long_listing_arrives_and_an_excessive_one_is_an_error() {
    let world = World::new();
    let disk = |number: usize| DiskInfo {
        name: format!("disk{number}"),
        size: 1 << 30,
        chunk: 4 << 20,
        created_ms: 1,
        serial: "s".repeat(20),
        nguid: "0".repeat(32),
        snapshots: Vec::new(),
        parent: None,
        is_flattening: false,
        gateway: None,
        attached_ms: None,
    };
    let disks: Vec<DiskInfo> = (0..3000).map(disk).collect();
    let serving = answer_with(world.serve("a").await.unwrap(), Ok(DiskReply::Disks(disks.clone())));
    let listed = world.execute(DiskCommand::List).await;
    assert!(listed == Ok(AdminReply::Disk(DiskReply::Disks(disks))), "the list differs");
    let excessive = (0..20_000).map(disk).collect();
    let _serving = answer_with(world.serve("a").await.unwrap(), Ok(DiskReply::Disks(excessive)));
    let refused = world.execute(DiskCommand::List).await;
    assert!(matches!(refused, Err(ControlError::Refused(Error::TooLarge { .. }))), "{refused:?}");
    let replaced = serving.await.unwrap();
    assert!(
        matches!(&replaced, ControlError::Refused(Error::CommandRefused(why)) if why.contains("another gateway")),
        "{replaced:?}"
    );
}

#[tokio::test]
async fn a_gateway_that_disconnects_leaves_the_outcome_of_its_orders_unknown() {
    let world = World::new();
    let mut orders = world.serve("a").await.unwrap();
    let (executed, _) = tokio::join!(world.execute(detach()), async move {
        orders.next().await.unwrap();
        drop(orders);
    });
    assert!(matches!(executed, Err(ControlError::Refused(Error::OutcomeUnknown(_)))), "{executed:?}");
    let refused = world.execute(detach()).await;
    assert!(matches!(refused, Err(ControlError::Refused(Error::CommandRefused(_)))), "{refused:?}");
}

#[tokio::test]
async fn a_stop_of_the_node_ends_the_streams_of_gateways() {
    let world = World::new();
    let serving = answer_with(world.serve("a").await.unwrap(), Ok(DiskReply::Done));
    let waiting = world.decider.gateways.execute(TENANT, DiskRequest { pool: "p".into(), command: detach() });
    assert_eq!(waiting.await, Ok(DiskReply::Done));
    let gateways = world.decider.gateways.clone();
    drop(world);
    let ended = tokio::time::timeout(PATIENCE, serving).await.expect("the stream ends").unwrap();
    assert!(matches!(ended, ControlError::Unreachable { .. }), "{ended:?}");
    let left = gateways.execute(TENANT, DiskRequest { pool: "p".into(), command: detach() }).await;
    assert!(matches!(left, Err(Error::CommandRefused(_))), "{left:?}");
}

#[tokio::test]
async fn only_users_with_the_right_serve_and_only_as_long_as_they_have_it() {
    let world = World::new();
    let mut orders = world.serve("a").await.unwrap();
    world.decider.refuses.store(true, Ordering::Relaxed);
    let refused = world.serve("b").await.unwrap_err();
    assert_eq!(refused, ControlError::Refused(refusal()));
    let ended = tokio::time::timeout(PATIENCE, orders.next()).await.expect("the stream ends");
    assert_eq!(ended, Err(ControlError::Refused(refusal())));
    assert_eq!(world.decider.served.lock().unwrap().last(), Some(&("a".into(), true)), "it was a check");
    let refused = world.serve("a name").await.unwrap_err();
    assert!(matches!(refused, ControlError::Refused(Error::BadName(_))), "{refused:?}");
    let stranger = Identity::generate();
    let node = Identity::generate().key();
    let stranger = ControlClient::new(Trust::client(&stranger, node));
    let refused = stranger.serve_gateway(&world.endpoint(), "a").await.unwrap_err();
    assert!(matches!(refused, ControlError::Identity(_)), "{refused:?}");
}

#[tokio::test]
async fn a_gateway_that_sends_rubbish_loses_its_own_stream_only() {
    let world = World::new();
    let _good = answer_with(world.serve("good").await.unwrap(), Ok(DiskReply::Done));
    let done = |order, outcome| {
        let done = OrderDone { order, outcome, continues: false };
        GatewayReport { report: Some(Report::Done(done)) }
    };
    let result = || Some(Outcome::Result(b"\"Done\"".to_vec()));
    let large = done(1, Some(Outcome::Result(vec![b' '; 100 << 10])));
    for (reports, expected) in [
        (vec![GatewayReport { report: None }], Code::InvalidArgument),
        (vec![done(1, result())], Code::InvalidArgument),
        (vec![hello("x y")], Code::InvalidArgument),
        (vec![hello("bad"), hello("bad")], Code::InvalidArgument),
        (vec![hello("bad"), done(1, result())], Code::InvalidArgument),
        (vec![hello("bad"), done(0, None)], Code::InvalidArgument),
        (vec![hello("bad"), large], Code::OutOfRange),
    ] {
        assert_eq!(world.send(reports.clone()).await, expected, "{reports:?}");
    }
    // A gateway that does not send its name does not wait for ever.
    assert_eq!(world.send(Vec::new()).await, Code::DeadlineExceeded);
    assert_eq!(world.execute(detach()).await, Ok(AdminReply::Disk(DiskReply::Done)));
}
