//! Connections that begin over TCP, move to a link, and return to TCP when the link fails.

use std::sync::Arc;
use std::time::Duration;

use base::fault::{Faults, Site};
use base::health::HealthState;
use outboard_messenger::conformance::{self, Rig};
use outboard_messenger::transport::ofi::{OfiConfig, OfiControl};
use outboard_messenger::transport::tcp::Tcp;
use outboard_messenger::{
    ConnectOptions, Connection, ConnectionConfig, ConnectionEvent, Ends, Incoming, Listener, Message,
    NetworkStack, Path, StreamStack,
};

const COOL_DOWN: Duration = Duration::from_millis(400);
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

struct Network {
    stack: Arc<StreamStack<Tcp>>,
    control: Arc<OfiControl>,
    address: String,
}

/// Creates a network with TCP as the base transport and a link as a path.
fn network(required: bool) -> Network {
    network_with(&Faults::default(), required)
}

/// Creates a network into whose path `faults` are injected.
fn network_with(faults: &Faults, required: bool) -> Network {
    let (provider, address) = super::provider();
    let ofi = super::load(OfiConfig { faults: faults.clone(), ..OfiConfig::new(&provider) });
    let control = ofi.control();
    let path = Path::new(&format!("ofi:{provider}"), Arc::new(ofi), COOL_DOWN).required(required);
    let (heartbeat, grace) = super::patience(&provider);
    let config = ConnectionConfig { heartbeat, grace, ..ConnectionConfig::default() };
    let stack = Arc::new(StreamStack::over(Tcp::default(), config).with_path(path));
    Network { stack, control, address }
}

impl Network {
    async fn pair(&self) -> (Box<dyn Listener>, Ends, Ends) {
        let mut listener = self.stack.listen(&self.address).await.expect("listens");
        let endpoint = listener.endpoint();
        let connecting = self.stack.connect(&endpoint, ConnectOptions::default());
        let (client, server) = tokio::join!(connecting, listener.accept());
        (listener, client.expect("connects"), server.expect("accepts"))
    }

    fn state(&self) -> HealthState {
        self.stack.paths().next().expect("the stack has a path").1.state
    }

    fn failures(&self) -> u64 {
        self.stack.paths().next().expect("the stack has a path").1.failures
    }
}

/// Waits until the connection uses a link if `one_sided` is true, and otherwise until it uses no
/// link.
pub(super) async fn until(connection: &Arc<dyn Connection>, one_sided: bool) {
    let reached = async {
        while connection.limits().one_sided != one_sided {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, reached)
        .await
        .unwrap_or_else(|_| panic!("`one_sided` never became {one_sided}"));
}

pub(super) async fn message(incoming: &mut dyn Incoming) -> Message {
    loop {
        match tokio::time::timeout(PATIENCE, incoming.next()).await.expect("a message") {
            ConnectionEvent::Message(message) => return message,
            ConnectionEvent::Lost(why) => panic!("connection lost: {why}"),
            ConnectionEvent::Interrupted | ConnectionEvent::Resumed => {}
        }
    }
}

/// Checks that a message to the server and a pull from the client succeed.
pub(super) async fn is_well(client: &mut Ends, server: &mut Ends) {
    let data = vec![5; 600_000];
    let source = client.0.offer_source(conformance::Buffer::in_memory(0, &data)).expect("offered");
    client.0.send(Message { header: "hello".into(), ..Message::default() }).await.expect("sent");
    assert_eq!(message(&mut *server.1).await.header, "hello");
    let dest = conformance::pool().alloc(data.len()).await.expect("a buffer");
    let pulled = server.0.bulk_read(&source.descriptor, 0, dest, PATIENCE).await.expect("pulled");
    assert!(pulled.buf[..] == data[..]);
    source.finish();
}

#[tokio::test]
async fn a_connection_leaves_a_failed_link_and_returns_to_it_after_a_probe() {
    let network = network(false);
    let (_listener, mut client, mut server) = network.pair().await;
    until(&client.0, true).await;
    until(&server.0, true).await;
    is_well(&mut client, &mut server).await;

    network.control.refuse(true);
    assert!(network.control.cut() > 0);
    until(&client.0, false).await;
    is_well(&mut client, &mut server).await;
    assert_ne!(network.state(), HealthState::Active, "the path cools down");
    assert!(!server.0.limits().one_sided);

    network.control.refuse(false);
    until(&client.0, true).await;
    until(&server.0, true).await;
    assert_eq!(network.state(), HealthState::Active, "a probe made the path active again");
    is_well(&mut client, &mut server).await;
    let report = network.stack.paths().next().expect("the stack has a path").1;
    assert!(report.failures >= 1 && report.recoveries >= 1, "{report:?}");
}

#[tokio::test]
async fn without_a_link_connections_begin_over_tcp_unless_the_link_is_required() {
    let optional = network(false);
    optional.control.refuse(true);
    let (_listener, mut client, mut server) = optional.pair().await;
    assert!(!client.0.limits().one_sided);
    is_well(&mut client, &mut server).await;

    let required = network(true);
    required.control.refuse(true);
    let listener = required.stack.listen(&required.address).await.expect("listens");
    let refused = required.stack.connect(&listener.endpoint(), ConnectOptions::default()).await;
    let why = refused.err().expect("the client cannot connect").to_string();
    assert!(why.contains("ofi:"), "{why}");

    // A client that requires a path cannot connect to a server without this path.
    let plain = StreamStack::over(Tcp::default(), ConnectionConfig::default());
    let listener = plain.listen(&required.address).await.expect("listens");
    required.control.refuse(false);
    let refused = required.stack.connect(&listener.endpoint(), ConnectOptions::default()).await;
    assert!(refused.is_err());
}

/// A path on which no data arrives counts as failed, like a path that breaks.
#[tokio::test]
async fn a_silent_path_is_avoided_during_its_cool_down_and_then_used_again() {
    let network = network(false);
    let (_listener, mut client, mut server) = network.pair().await;
    until(&server.0, true).await;
    network.control.freeze(true);
    client.0.send(Message { header: "lost?".into(), ..Message::default() }).await.expect("queued");
    until(&client.0, false).await;
    assert_ne!(network.state(), HealthState::Active, "the path cools down");
    assert_eq!(message(&mut *server.1).await.header, "lost?");
    network.control.freeze(false);
    until(&client.0, true).await;
    is_well(&mut client, &mut server).await;
}

/// The faults hit only the server, which is a network of its own.
#[tokio::test]
async fn injected_faults_of_a_path_move_its_connection_to_tcp_until_they_are_disarmed() {
    let faults = Faults::default();
    let (serving, dialing) = (network_with(&faults, false), network(false));
    let mut listener = serving.stack.listen(&serving.address).await.expect("listens");
    let endpoint = listener.endpoint();
    let connecting = dialing.stack.connect(&endpoint, ConnectOptions::default());
    let (client, server) = tokio::join!(connecting, listener.accept());
    let (mut client, mut server) = (client.expect("connects"), server.expect("accepts"));
    for fault in ["fail", "stall,late=3600000ms", "drop"] {
        until(&server.0, true).await;
        is_well(&mut client, &mut server).await;
        let failures = dialing.failures();
        faults.arm(format!("messenger.path={fault}").parse().expect("a fault")).expect("armed");
        client.0.send(Message { header: "late".into(), ..Message::default() }).await.expect("queued");
        assert_eq!(message(&mut *server.1).await.header, "late", "{fault}");
        assert!(dialing.failures() > failures, "the path did not fail because of {fault}");
        assert!(!server.0.limits().one_sided, "the message arrived over the path despite {fault}");
        assert!(faults.fired(Site::MessengerPath) > 0, "{fault}");
        is_well(&mut client, &mut server).await;
        faults.clear();
        until(&client.0, true).await;
    }
    // One link loses everything. Its successor is not affected, although the fault is still armed.
    until(&server.0, true).await;
    faults.arm("messenger.path=drop,count=1".parse().expect("a fault")).expect("armed");
    is_well(&mut client, &mut server).await;
    until(&client.0, true).await;
    until(&server.0, true).await;
    is_well(&mut client, &mut server).await;
    assert_eq!(faults.fired(Site::MessengerPath), 1);
}

/// Queues that have failed are opened again on both sides. Connections continue, and return to the
/// link.
#[tokio::test]
async fn failed_event_and_completion_queues_are_reopened() {
    let network = network(false);
    let (mut listener, mut client, mut server) = network.pair().await;
    until(&server.0, true).await;
    for of_events in [true, false] {
        assert!(network.control.fail_queues(of_events) >= 2, "both the client and the server have a queue");
        is_well(&mut client, &mut server).await;
        until(&client.0, true).await;
        until(&server.0, true).await;
        is_well(&mut client, &mut server).await;
        let endpoint = listener.endpoint();
        let connecting = network.stack.connect(&endpoint, ConnectOptions::default());
        let (new_client, new_server) = tokio::join!(connecting, listener.accept());
        let (mut new_client, mut new_server) = (new_client.expect("connects"), new_server.expect("accepts"));
        until(&new_client.0, true).await;
        is_well(&mut new_client, &mut new_server).await;
    }
}

/// If no memory can be locked, connections use TCP. If lockable memory runs out later, bulk data is
/// sent in frames. The environment variable `OUTBOARD_TEST_MEMLOCK` says that this process has a
/// low limit on locked memory.
#[tokio::test]
async fn connections_without_registered_memory_fall_back_to_tcp_or_frames() {
    let network = network(false);
    if std::env::var_os("OUTBOARD_TEST_MEMLOCK").is_none() {
        let (_listener, mut client, mut server) = network.pair().await;
        until(&server.0, true).await;
        network.control.refuse_memory(true);
        is_well(&mut client, &mut server).await;
        assert!(
            client.0.limits().one_sided && server.0.limits().one_sided,
            "the link still works, because its packets have memory"
        );
    }
    // From here on, even packets get no memory.
    network.control.cut();
    let (_listener, mut client, mut server) = network.pair().await;
    assert!(!client.0.limits().one_sided);
    is_well(&mut client, &mut server).await;
    assert_ne!(network.state(), HealthState::Active);
}

/// Runs the checks that break transports on connections that repeatedly change between TCP and a
/// link.
#[tokio::test]
async fn no_message_or_push_is_lost_while_connections_change_transports() {
    let network = network(false);
    let (cut, freeze) = (Arc::clone(&network.control), Arc::clone(&network.control));
    let turn = std::sync::atomic::AtomicU32::new(0);
    let rig = Rig {
        stack: network.stack.clone(),
        address: network.address.clone(),
        cut: Box::new(move || {
            // After one in four cuts, the link cannot be established until the next cut.
            cut.refuse(turn.fetch_add(1, std::sync::atomic::Ordering::Relaxed).is_multiple_of(4));
            cut.cut()
        }),
        freeze: Box::new(move |frozen| freeze.freeze(frozen)),
        grace: super::patience(&super::provider().0).1,
        patience: Rig::PATIENCE,
        slow: super::provider().0 != "tcp",
        seed: conformance::seed(),
    };
    let checks = async {
        conformance::messages_arrive_exactly_once_across_broken_transports(&rig).await;
        conformance::pushes_survive_broken_transports(&rig).await;
    };
    tokio::time::timeout(Duration::from_secs(200), checks).await.expect("the checks hang");
    let report = network.stack.paths().next().expect("the stack has a path").1;
    assert!(report.failures > 0, "the link never failed: {report:?}");
}
