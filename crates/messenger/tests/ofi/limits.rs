//! Tenants have domains of their own, and cannot use up the domains and the receive buffers of other
//! tenants. A client without a domain stays on TCP.

use std::sync::Arc;
use std::time::Duration;

use outboard_messenger::transport::ofi::{OfiConfig, OfiControl};
use outboard_messenger::transport::tcp::Tcp;
use outboard_messenger::{
    ConnectOptions, ConnectionConfig, Ends, Listener, Message, NetworkStack, Path, StreamStack,
};

use super::paths::{PATIENCE, is_well, message, until};
use super::users::Users;

const COOL_DOWN: Duration = Duration::from_millis(400);

type Stack = StreamStack<Tcp>;

fn stack(trust: identity::Trust, change: impl FnOnce(&mut OfiConfig)) -> (Stack, Arc<OfiControl>) {
    let (provider, _) = super::provider();
    let mut config = OfiConfig::new(&provider);
    change(&mut config);
    let ofi = super::load(config);
    let control = ofi.control();
    let path = Path::new(&format!("ofi:{provider}"), Arc::new(ofi), COOL_DOWN);
    let (heartbeat, grace) = super::patience(&provider);
    let config = ConnectionConfig { heartbeat, grace, trust, ..ConnectionConfig::default() };
    (StreamStack::over(Tcp::default(), config).with_path(path), control)
}

/// A server with limits, and stacks of its users.
struct World {
    listener: Box<dyn Listener>,
    control: Arc<OfiControl>,
    _server: Stack,
}

impl World {
    async fn new(change: impl FnOnce(&mut OfiConfig)) -> World {
        let (server, control) = stack(Users::node(), change);
        let listener = server.listen(&super::provider().1).await.expect("listens");
        World { listener, control, _server: server }
    }

    fn user(name: &str) -> Stack {
        stack(Users::trust(name), |_| {}).0
    }

    async fn connect(&mut self, user: &Stack) -> (Ends, Ends) {
        let endpoint = self.listener.endpoint();
        let connecting = user.connect(&endpoint, ConnectOptions::default());
        let (client, server) = tokio::join!(connecting, self.listener.accept());
        (client.expect("connects"), server.expect("accepts"))
    }
}

/// Checks that a message arrives. A bulk transfer would register more memory than the test needs.
async fn is_heard((client, server): &mut (Ends, Ends)) {
    client.0.send(Message { header: "hello".into(), ..Message::default() }).await.expect("sent");
    assert_eq!(message(&mut *server.1).await.header, "hello");
}

fn failures(user: &Stack) -> u64 {
    user.paths().next().expect("the stack has a path").1.failures
}

/// Waits until the connection uses a link, or an attempt to use one has failed. Returns whether it
/// uses a link.
async fn has_link(user: &Stack, ends: &Ends, failures_before: u64) -> bool {
    let decided = async {
        while !ends.0.limits().one_sided && failures(user) == failures_before {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        ends.0.limits().one_sided
    };
    tokio::time::timeout(PATIENCE, decided).await.expect("the path is used or refused")
}

/// Waits until the server's tenants hold this many domains.
async fn until_domains(control: &OfiControl, count: usize) {
    let reached = async {
        while control.domains() != count {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let found = tokio::time::timeout(PATIENCE, reached).await;
    assert!(found.is_ok(), "{} domains instead of {count}", control.domains());
}

#[tokio::test]
async fn a_tenant_without_a_domain_stays_on_tcp_until_another_tenant_has_left() {
    let mut world = World::new(|config| config.domains_max = 2).await;
    let users = ["attacker", "double", "bystander"].map(World::user);
    let mut first = world.connect(&users[0]).await;
    until(&first.0.0, true).await;
    let mut again = world.connect(&users[0]).await;
    until(&again.0.0, true).await;
    assert_eq!(world.control.domains(), 1, "a tenant's connections share a domain");
    // The tenant `films` was removed, and there is a new one of the same name.
    let mut second = world.connect(&users[1]).await;
    until(&second.0.0, true).await;
    assert_eq!(world.control.domains(), 2, "a tenant of the same name has another domain");
    assert_ne!(Users::tenant_of("attacker"), Users::tenant_of("double"));

    let mut third = world.connect(&users[2]).await;
    assert!(!has_link(&users[2], &third.0, 0).await, "all domains are in use");
    for connection in [&mut first, &mut again, &mut second, &mut third] {
        is_heard(connection).await;
    }
    assert!(first.0.0.limits().one_sided && again.0.0.limits().one_sided && second.0.0.limits().one_sided);

    for (client, server) in [first, again] {
        client.0.close().await;
        server.0.close().await;
    }
    until(&third.0.0, true).await;
    is_well(&mut third.0, &mut third.1).await;
    is_well(&mut second.0, &mut second.1).await;
    assert_eq!(world.control.domains(), 2);
    for (client, server) in [second, third] {
        client.0.close().await;
        server.0.close().await;
    }
    until_domains(&world.control, 0).await;
}

#[tokio::test]
async fn a_tenant_with_many_connections_leaves_receive_buffers_to_other_tenants() {
    // There are 112 receive buffers, and each link needs three to begin.
    let mut world = World::new(|config| config.packet_memory_bytes = 2 << 20).await;
    let (crowd, other) = (World::user("crowd"), World::user("bystander"));
    let mut connections = Vec::new();
    for _ in 0..4 {
        let mut connection = world.connect(&crowd).await;
        until(&connection.0.0, true).await;
        is_heard(&mut connection).await;
        connections.push(connection);
    }
    let mut refused = loop {
        assert!(connections.len() <= 112 / 3, "the tenant has no limit");
        let before = failures(&crowd);
        let mut connection = world.connect(&crowd).await;
        if !has_link(&crowd, &connection.0, before).await {
            break connection;
        }
        is_heard(&mut connection).await;
        connections.push(connection);
    };
    let mut bystander = world.connect(&other).await;
    until(&bystander.0.0, true).await;
    is_well(&mut bystander.0, &mut bystander.1).await;
    is_heard(&mut refused).await;
    for connection in &mut connections {
        is_heard(connection).await;
    }
    assert!(bystander.0.0.limits().one_sided);
    // The buffers of a closed connection are free again.
    for (client, server) in connections {
        client.0.close().await;
        server.0.close().await;
    }
    until(&refused.0.0, true).await;
    is_well(&mut refused.0, &mut refused.1).await;
}
