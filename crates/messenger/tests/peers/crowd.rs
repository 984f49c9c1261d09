//! One address opens as many connections as it can. Clients at other addresses are still served.

use std::io::Write;
use std::time::Duration;

use crate::raw::{Begun, PATIENCE, Raw, hello, lost};
use identity::Trust;
use outboard_messenger::frame::Body;
use outboard_messenger::{
    ConnectionConfig, ConnectionEvent, Ends, Listener, NetworkStack, Shortage, TcpStack,
};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::time::timeout;

const CROWD: &str = "127.0.0.1";
const OTHER: &str = "127.0.0.2";

/// Creates a configuration in which handshakes and detached connections time out only after the end
/// of the test. So only a budget can free their slots.
fn config() -> ConnectionConfig {
    ConnectionConfig { handshake_timeout: 6 * PATIENCE, hold: 6 * PATIENCE, ..ConnectionConfig::default() }
}

async fn listen(config: ConnectionConfig) -> Box<dyn Listener> {
    TcpStack::new(config).listen("127.0.0.1:0").await.unwrap()
}

/// Waits for the next accepted connection. Skips failed handshakes.
async fn accepted(listener: &mut dyn Listener) -> Ends {
    loop {
        if let Ok(ends) = timeout(PATIENCE, listener.accept()).await.expect("a connection") {
            return ends;
        }
    }
}

/// Begins a connection from the address `source`. Also returns the server's end of it.
async fn connection(source: &str, listener: &mut dyn Listener) -> (Raw, Begun, Ends) {
    let endpoint = listener.endpoint();
    let began = async { Raw::connect_from(source, &endpoint).await.begin().await };
    let (began, ends) = tokio::join!(timeout(PATIENCE, began), accepted(listener));
    let (raw, begun) = began.expect("a connection in time");
    (raw, begun, ends)
}

#[tokio::test]
async fn silent_handshakes_of_one_address_do_not_block_another_address() {
    let mut listener = listen(config()).await;
    let endpoint = listener.endpoint();
    let mut silent = Vec::new();
    for _ in 0..600 {
        silent.push(Raw::connect_from(CROWD, &endpoint).await);
    }
    let (_raw, _, _ends) = connection(OTHER, &mut *listener).await;
    let (_raw, _, _ends) = connection(CROWD, &mut *listener).await;
    // The longest-silent handshakes lost their slots.
    timeout(PATIENCE, silent[0].closed()).await.expect("the oldest handshake is ended");
}

#[tokio::test]
async fn the_longest_silent_connections_lose_their_slots_to_another_address() {
    let mut listener = listen(ConnectionConfig { max_connections: 4, ..config() }).await;
    let mut crowd = Vec::new();
    for _ in 0..4 {
        crowd.push(connection(CROWD, &mut *listener).await);
    }
    let (_first, _, mut first_ends) = connection(OTHER, &mut *listener).await;
    let (_second, _, mut second_ends) = connection(OTHER, &mut *listener).await;
    for (raw, _, ends) in &mut crowd[..2] {
        let reason = loop {
            match raw.next().await.expect("a reason").body {
                Body::Close(close) => break close.reason,
                _ => continue,
            }
        };
        assert!(reason.contains("another client"), "{reason}");
        lost(&mut *ends.1).await;
    }
    // Each address has its fair share now, so neither loses a connection to the other.
    let mut refused = Raw::connect_from(OTHER, &listener.endpoint()).await;
    let (answer, _) = refused.begin_as(&Trust::default(), hello()).await;
    assert!(matches!(answer, Some(Body::Reject(_))), "{answer:?}");
    for ends in crowd[2..].iter_mut().map(|c| &mut c.2).chain([&mut first_ends, &mut second_ends]) {
        let quiet = timeout(Duration::from_millis(50), ends.1.next()).await;
        assert!(quiet.is_err(), "{quiet:?}");
    }
}

#[tokio::test]
async fn a_detached_connection_loses_its_slot_to_another_address() {
    let mut listener = listen(ConnectionConfig { max_held: 2, ..config() }).await;
    let mut crowd = Vec::new();
    for _ in 0..2 {
        let (raw, _, mut ends) = connection(CROWD, &mut *listener).await;
        drop(raw);
        assert!(matches!(ends.1.next().await, ConnectionEvent::Interrupted));
        crowd.push(ends);
    }
    let (raw, begun, mut ends) = connection(OTHER, &mut *listener).await;
    drop(raw);
    assert!(matches!(ends.1.next().await, ConnectionEvent::Interrupted));
    let mut again = Raw::connect_from(OTHER, &listener.endpoint()).await;
    let answer = again.resume(&begun.key, begun.resume(0)).await;
    assert!(matches!(answer, Some(Body::Resumed(_))), "{answer:?}");
    assert!(matches!(ends.1.next().await, ConnectionEvent::Resumed));
    lost(&mut *crowd[0].1).await;
}

/// The listener is a child process. Its limit on open files is low, but its configuration expects a
/// high limit.
#[tokio::test]
async fn a_listener_without_free_descriptors_disconnects_silent_peers_and_continues() {
    let mut child = tokio::process::Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "crowd::child_process_with_few_descriptors", "--nocapture"])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut said = async |what: &str| loop {
        let line = timeout(PATIENCE, lines.next_line()).await.expect("the child prints a line").unwrap();
        let line = line.expect("the child still runs");
        if let Some((_, rest)) = line.split_once(what) {
            break rest.to_owned();
        }
    };
    let endpoint = said("endpoint=").await;
    let mut silent = Vec::new();
    for _ in 0..100 {
        silent.push(Raw::connect_from(CROWD, &endpoint).await);
    }
    for _ in 0..3 {
        let began = async { Raw::connect_from(OTHER, &endpoint).await.begin().await };
        timeout(PATIENCE, began).await.expect("a connection in time");
    }
    drop(child.stdin.take());
    let refused: u64 = said("refused=").await.parse().unwrap();
    assert!(refused > 0, "the listener never ran out of descriptors");
    assert!(child.wait().await.unwrap().success());
}

/// Not a test: a child process that limits itself to 48 open files, and listens until its standard
/// input ends.
#[tokio::test]
#[ignore = "runs as a child process of another test"]
async fn child_process_with_few_descriptors() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, rustix::process::Rlimit { current: Some(48), ..limit }).unwrap();
    let many = ConnectionConfig { max_descriptors: Some(100_000), max_handshakes: 10_000, ..config() };
    let mut listener = listen(many).await;
    let admissions = listener.admissions();
    #[allow(clippy::explicit_write, reason = "the test harness captures the output of println!")]
    let say = |what: String| writeln!(std::io::stdout(), "{what}").unwrap();
    say(format!("endpoint={}", listener.endpoint()));
    let mut kept = Vec::new();
    let mut end = tokio::io::stdin();
    loop {
        tokio::select! {
            accepted = listener.accept() => kept.extend(accepted),
            _ = end.read_u8() => break,
        }
    }
    let refused = admissions.refused(Shortage::Descriptors);
    say(format!("refused={refused}"));
}
