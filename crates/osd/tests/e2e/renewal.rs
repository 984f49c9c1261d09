//! A session replaces its capability before the capability expires. Everything runs in one thread and on
//! simulated time.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, UNIX_EPOCH};

use base::BoxFuture;
use base::clock::WallClock;
use client::engine::ControlPlane;
use client::{Client, ControlWay, Error, Object, Options};
use control::ControlError;
use futures::future::{join_all, ready};
use identity::Caller;
use messenger::transport::sim::SimFaults;
use messenger::{
    ConnectOptions, Connection, ConnectionConfig, Incoming, Listener, MessengerError, NetworkStack, SimStack,
};
use osd::{
    AuditAt, AuditEvent, AuditKind, AuditSink, OsdAdministrator, OsdConfig, OsdServer, OsdStarted,
    ShardResources,
};
use tokio::sync::oneshot;
use tokio::task::LocalSet;
use tokio::time::Instant;
use wire::{AdminReply, AdminRequest, SessionInfo};

use crate::common::{Node, seed};

/// Lifetime of each capability.
const LIFETIME: Duration = Duration::from_secs(600);
/// Pause between two requests of one task.
const PAUSE: Duration = Duration::from_secs(5);
/// Time limit of a request.
const TIMEOUT: Duration = Duration::from_secs(20);

/// The control plane of the osd, which may be down.
struct Plane {
    administrator: OsdAdministrator,
    is_down: AtomicBool,
    /// Number of requests while the control plane was down.
    missed: AtomicU64,
}

impl ControlPlane for Plane {
    fn administer<'a>(
        &'a self,
        _: Option<&'a str>,
        mut request: AdminRequest,
        is_repeated: bool,
    ) -> BoxFuture<'a, Result<AdminReply, ControlError>> {
        if self.is_down.load(Ordering::SeqCst) {
            self.missed.fetch_add(1, Ordering::SeqCst);
            let (endpoint, reason) = ("plane".into(), "it is down".into());
            return Box::pin(ready(Err(ControlError::Unreachable { endpoint, reason })));
        }
        if let AdminRequest::IssueCapability { lifetime_s, .. } = &mut request {
            *lifetime_s = LIFETIME.as_secs() as u32;
        }
        let administered = self.administrator.administer(Caller::process(), request, is_repeated);
        Box::pin(async { Ok(administered.await?) })
    }
}

/// The audit log of the osd.
#[derive(Default)]
struct Log(Mutex<Vec<AuditEvent>>);

impl Log {
    /// Returns the times of the events of a kind, in milliseconds.
    fn times(&self, kind: AuditKind) -> Vec<u64> {
        let events = self.0.lock().unwrap();
        events.iter().filter(|event| event.event == kind).map(|event| event.at_ms).collect()
    }
}

impl AuditSink for Log {
    fn record(&self, event: AuditEvent) {
        self.0.lock().unwrap().push(event);
    }

    fn recent(&self, _: usize) -> BoxFuture<'static, Vec<String>> {
        Box::pin(ready(Vec::new()))
    }
}

/// A network stack that counts its attempts to connect.
struct Counted {
    stack: SimStack,
    connects: AtomicU64,
}

impl NetworkStack for Counted {
    fn listen<'a>(&'a self, address: &'a str) -> BoxFuture<'a, Result<Box<dyn Listener>, MessengerError>> {
        self.stack.listen(address)
    }

    fn connect<'a>(
        &'a self,
        endpoint: &'a str,
        options: ConnectOptions,
    ) -> BoxFuture<'a, Result<(Arc<dyn Connection>, Box<dyn Incoming>), MessengerError>> {
        self.connects.fetch_add(1, Ordering::SeqCst);
        self.stack.connect(endpoint, options)
    }
}

/// A client with a session of a node.
struct World {
    client: Client,
    plane: Arc<Plane>,
    log: Arc<Log>,
    stack: Arc<Counted>,
    /// Start of the session.
    began: Instant,
}

impl World {
    fn object(&self, name: &str) -> Object {
        self.client.pool("pool").unwrap().object(name).unwrap()
    }

    async fn sessions(&self) -> Vec<SessionInfo> {
        let list = self.plane.administrator.administer(Caller::process(), AdminRequest::ListSessions, false);
        match list.await.unwrap() {
            AdminReply::Sessions(sessions) => sessions,
            other => panic!("{other:?}"),
        }
    }
}

/// Starts a node and a client, and runs `work` with them.
async fn with_session(work: impl AsyncFnOnce(World)) {
    let seed = seed();
    let _seeded = base::entropy::seed_this_thread(seed);
    let (stack, _network) = SimStack::simulated(seed, SimFaults::NONE, ConnectionConfig::default());
    let stack = Arc::new(Counted { stack, connects: AtomicU64::new(0) });
    let start = Instant::now();
    let clock = WallClock::new(move || UNIX_EPOCH + Duration::from_secs(1_800_000_000) + start.elapsed());
    let log = Arc::new(Log::default());
    let audit = AuditAt(Some(Arc::clone(&log) as Arc<dyn AuditSink>));
    let config = OsdConfig { clock: clock.clone(), audit, ..OsdConfig::default() };
    let node = Node::new(config.clone());
    let (targets, staging, listening) = (node.targets(), node.staging.clone(), stack.clone());
    let (started, endpoint) = oneshot::channel();
    let (_stop, stopped) = oneshot::channel::<()>();
    let local = LocalSet::new();
    local.spawn_local(async move {
        let ready = |announcement| drop(started.send(announcement));
        let stop = async { drop(stopped.await) };
        let resources = vec![ShardResources { config, targets, staging }];
        OsdServer::serve_on_one_thread(resources, listening, "*", ready, stop).await;
    });
    let with_client = async {
        let OsdStarted { endpoint, administrator, .. } = endpoint.await.unwrap().unwrap();
        let (is_down, missed) = (AtomicBool::new(false), AtomicU64::new(0));
        let plane = Arc::new(Plane { administrator, is_down, missed });
        let control = Some(ControlWay(Arc::clone(&plane) as Arc<dyn ControlPlane>));
        let options = Options { control, clock, request_timeout: TIMEOUT, ..Options::default() };
        let client = Client::connect_over(stack.clone(), &endpoint, options).await.unwrap();
        client.create_pool("pool").await.unwrap();
        work(World { client, plane, log, stack, began: Instant::now() }).await;
    };
    local.run_until(with_client).await;
}

#[tokio::test(start_paused = true)]
async fn a_session_outlives_its_capabilities_without_a_refused_request() {
    with_session(async |world| {
        let connects = world.stack.connects.load(Ordering::SeqCst);
        let writers = (0..4).map(async |number: u64| {
            let object = world.object(&number.to_string());
            let mut requests = 0;
            while world.began.elapsed() < 4 * LIFETIME {
                object.append("x").await.unwrap();
                requests += 1;
                assert_eq!(object.get().await.unwrap().len(), requests);
                tokio::time::sleep(PAUSE).await;
            }
            requests
        });
        let requests: usize = join_all(writers).await.into_iter().sum();
        assert!(requests > 1500, "{requests}");
        assert_eq!(world.stack.connects.load(Ordering::SeqCst), connects, "the connection has lasted");
        assert_eq!(world.log.times(AuditKind::SessionOpened).len(), 1);
        assert!(world.log.times(AuditKind::Refused).is_empty(), "the node has refused no capability");
        // Each capability was replaced when a quarter of its lifetime was left.
        let issued = world.log.times(AuditKind::Issued);
        let gaps: Vec<u64> = issued.windows(2).map(|pair| (pair[1] - pair[0]).div_ceil(1000)).collect();
        assert_eq!(gaps.len(), 5, "{gaps:?}");
        let in_time = LIFETIME.as_secs() * 3 / 4;
        assert!(gaps.iter().all(|gap| (in_time - 2..=in_time + 2).contains(gap)), "{gaps:?}");
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn without_a_control_plane_a_session_works_until_its_capability_expires_and_then_waits() {
    with_session(async |world| {
        let before = world.sessions().await;
        let object = world.object("object");
        world.plane.is_down.store(true, Ordering::SeqCst);
        let mut worked = Duration::ZERO;
        let error = loop {
            match object.append("x").await {
                Ok(_) => worked = world.began.elapsed(),
                Err(e) => break e,
            }
            assert!(world.began.elapsed() < 2 * LIFETIME, "the capability does not expire");
            tokio::time::sleep(PAUSE).await;
        };
        assert!((LIFETIME - 2 * PAUSE..=LIFETIME).contains(&worked), "{worked:?}");
        assert!(matches!(&error, Error::TimedOut(waited) if waited.after == TIMEOUT), "{error}");
        let text = error.to_string();
        assert!(text.contains("the capability has expired") && text.contains("control plane"), "{text}");
        assert!(world.plane.missed.load(Ordering::SeqCst) > 5, "the client has tried to replace it");
        assert!(object.get().await.is_err(), "reads fail, too");

        world.plane.is_down.store(false, Ordering::SeqCst);
        let length = object.get().await.unwrap().len();
        assert_eq!(length as u64, object.append("x").await.unwrap().appended_at);
        let after = world.sessions().await;
        assert_eq!((after.len(), after[0].id), (1, before[0].id), "the session goes on");
        assert_eq!(world.log.times(AuditKind::SessionOpened).len(), 1);
    })
    .await;
}
