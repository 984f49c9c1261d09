//! Named hosts that are cut off from each other, or whose processes end.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::Ordering;
use std::time::Duration;

use base::entropy::{SeededThread, seed_this_thread};
use outboard_messenger::transport::sim::{CutKind, SimFaults, SimNetwork};
use outboard_messenger::{
    ConnectOptions, ConnectionConfig, ConnectionEvent, Ends, Incoming, Listener, Message, MessengerError,
    NetworkStack,
};
use tokio::task::LocalSet;
use tokio::time::{sleep, timeout};

const FIVE_SECONDS: Duration = Duration::from_secs(5);

/// A network whose hosts `client` and `osd` are connected.
async fn connected() -> (SimNetwork, Box<dyn Listener>, Ends, Ends, SeededThread) {
    let seeded = seed_this_thread(1);
    let network = SimNetwork::new(1, SimFaults::NONE);
    let stack = |name| network.host(name).stack(ConnectionConfig::default());
    let mut listener = stack("osd").listen("osd:7700").await.expect("listens");
    let client_stack = stack("client");
    let connecting = client_stack.connect("osd:7700", ConnectOptions::default());
    let (client, server) = tokio::join!(biased; connecting, listener.accept());
    (network, listener, client.expect("connects"), server.expect("accepts"), seeded)
}

fn message(text: &'static str) -> Message {
    Message { header: text.into(), ..Message::default() }
}

/// The next event within five seconds, as text.
async fn event(incoming: &mut dyn Incoming) -> String {
    match timeout(FIVE_SECONDS, incoming.next()).await {
        Err(_) => "nothing".into(),
        Ok(ConnectionEvent::Message(message)) => String::from_utf8_lossy(&message.header).into_owned(),
        Ok(ConnectionEvent::Interrupted) => "interrupted".into(),
        Ok(ConnectionEvent::Resumed) => "resumed".into(),
        Ok(ConnectionEvent::Lost(_)) => "lost".into(),
    }
}

#[tokio::test(start_paused = true)]
async fn a_short_silent_cut_delays_messages_and_a_long_one_interrupts_the_connection() {
    let (network, _listener, (client, mut from_server), (_server, mut from_client), _seeded) =
        connected().await;
    network.cut("client", "osd", CutKind::Silent);
    client.send(message("delayed")).await.expect("sent");
    assert_eq!(event(&mut *from_client).await, "nothing");
    network.heal("client", "osd");
    assert_eq!(event(&mut *from_client).await, "delayed");

    network.cut_one_way("client", "osd", CutKind::Silent);
    client.send(message("resumed")).await.expect("sent");
    sleep(Duration::from_secs(15)).await;
    assert_eq!(event(&mut *from_server).await, "interrupted");
    assert_eq!(event(&mut *from_client).await, "interrupted");
    network.heal_all();
    assert_eq!(event(&mut *from_server).await, "resumed");
    assert_eq!(event(&mut *from_client).await, "resumed");
    assert_eq!(event(&mut *from_client).await, "resumed");
    assert!(network.counts().held.load(Ordering::Relaxed) > 1);
}

#[tokio::test(start_paused = true)]
async fn a_reset_cut_breaks_transports_at_once_and_refuses_others_until_it_is_healed() {
    let (network, _listener, (_client, mut from_server), (_server, mut from_client), _seeded) =
        connected().await;
    network.cut("client", "osd", CutKind::Reset);
    assert_eq!(event(&mut *from_server).await, "interrupted");
    assert_eq!(event(&mut *from_client).await, "interrupted");
    let stack = network.host("client").stack(ConnectionConfig::default());
    let options = ConnectOptions { timeout: Duration::from_secs(2) };
    let refused = stack.connect("osd:7700", options).await;
    assert!(matches!(refused, Err(MessengerError::Unreachable { .. })));
    network.heal_all();
    assert_eq!(event(&mut *from_server).await, "resumed");
    assert_eq!(network.counts().cuts.load(Ordering::Relaxed), 1);
}

/// The tasks of the killed process are dropped after its end. Their destructors close connections
/// and the listener, and the next process listens at the same address.
#[tokio::test(start_paused = true)]
async fn destructors_of_a_severed_process_do_not_affect_its_successor() {
    let _seeded = seed_this_thread(1);
    let network = SimNetwork::new(1, SimFaults::NONE);
    let serve = |network: &SimNetwork| {
        let stack = network.host("osd").stack(ConnectionConfig::default());
        let role = LocalSet::new();
        role.spawn_local(async move {
            let mut listener = stack.listen("osd:7700").await.expect("listens");
            let mut kept = Vec::new();
            loop {
                kept.extend(listener.accept().await);
            }
        });
        role
    };
    let run = async |role: &mut LocalSet, time: Duration| {
        let mut until = pin!(sleep(time));
        poll_fn(|cx| {
            let ended = base::task::in_role(|| std::pin::Pin::new(&mut *role).poll(cx));
            assert!(ended.is_pending());
            until.as_mut().poll(cx)
        })
        .await;
    };
    let mut first = serve(&network);
    let stack = network.host("client").stack(ConnectionConfig::default());
    let options = ConnectOptions::default();
    let connecting = stack.connect("osd:7700", options.clone());
    let (client, ()) = tokio::join!(biased; connecting, run(&mut first, Duration::from_millis(50)));
    let (_client, mut from_server) = client.expect("connects");
    network.sever("osd");
    let mut second = serve(&network);
    run(&mut second, Duration::from_millis(5)).await;
    drop(first);
    let connecting = stack.connect("osd:7700", options);
    let (other, ()) = tokio::join!(biased; connecting, run(&mut second, Duration::from_millis(50)));
    let (other, _from_second) = other.expect("connects to the second process");
    other.send(message("hello")).await.expect("sent");
    assert_eq!(event(&mut *from_server).await, "interrupted");
    run(&mut second, Duration::from_secs(1)).await;
    // The second process does not know the connection.
    assert_eq!(event(&mut *from_server).await, "lost");
}

/// A connection uses packets while links work, streams while they do not, and packets again after
/// the cool-down of the path.
#[tokio::test(start_paused = true)]
async fn a_connection_falls_back_to_streams_while_links_are_down() {
    let _seeded = seed_this_thread(1);
    let network = SimNetwork::new(1, SimFaults::NONE);
    let cool_down = Duration::from_secs(10);
    let stack = |name| network.host(name).stack_with_packets(ConnectionConfig::default(), cool_down, true);
    let (osd, client) = (stack("osd"), stack("client"));
    let mut listener = osd.listen("osd:7700").await.expect("listens");
    let connecting = client.connect("osd:7700", ConnectOptions::default());
    let (client, server) = tokio::join!(biased; connecting, listener.accept());
    let ((client, mut from_server), (_server, mut from_client)) =
        (client.expect("connects"), server.expect("accepts"));
    assert!(client.limits().one_sided, "the connection begins over packets");
    network.links_down(true);
    client.send(message("over a stream")).await.expect("sent");
    for expected in ["interrupted", "resumed"] {
        assert_eq!(event(&mut *from_server).await, expected);
    }
    assert!(!client.limits().one_sided, "the connection fell back to a stream");
    network.links_down(false);
    sleep(cool_down * 2).await;
    assert!(client.limits().one_sided, "the connection moved to packets again");
    client.send(message("over packets")).await.expect("sent");
    let mut messages = Vec::new();
    while messages.len() < 2 {
        match event(&mut *from_client).await.as_str() {
            "interrupted" | "resumed" => {}
            text => messages.push(text.to_owned()),
        }
    }
    assert_eq!(messages, ["over a stream", "over packets"]);
    assert!(network.counts().cuts.load(Ordering::Relaxed) > 0);
}

/// When a process ends, its peers can no longer access its memory, and its own operations have no
/// effect, although its tasks are dropped only later.
#[tokio::test(start_paused = true)]
async fn a_severed_process_loses_its_links() {
    let _seeded = seed_this_thread(1);
    let network = SimNetwork::new(1, SimFaults::NONE);
    let stack = |name| {
        let config = ConnectionConfig::default();
        network.host(name).stack_with_packets(config, Duration::from_secs(10), true)
    };
    let (osd, client_stack) = (stack("osd"), stack("client"));
    let mut listener = osd.listen("osd:7700").await.expect("listens");
    let connecting = client_stack.connect("osd:7700", ConnectOptions::default());
    let (client, server) = tokio::join!(biased; connecting, listener.accept());
    let ((client, _from_server), (server, mut from_client)) =
        (client.expect("connects"), server.expect("accepts"));
    let pool = outboard_messenger::conformance::pool();
    let data = vec![3; 1 << 20];
    let buffer = outboard_messenger::conformance::Buffer::in_memory(0, &data);
    let source = client.offer_source(buffer).expect("offered");
    assert!(source.descriptor.remote.is_some(), "the source is exposed");
    network.sever("client");
    client.send(message("from a dead process")).await.expect("queued");
    let dest = pool.alloc(data.len()).await.expect("a buffer");
    let pulled = server.bulk_read(&source.descriptor, 0, dest, Duration::from_secs(1)).await;
    assert!(matches!(pulled, Err(MessengerError::TimedOut(_))), "{pulled:?}");
    drop((client, client_stack, source));
    // The first two events are the move from the stream to packets.
    for expected in ["interrupted", "resumed", "interrupted", "nothing"] {
        assert_eq!(event(&mut *from_client).await, expected);
    }
}
