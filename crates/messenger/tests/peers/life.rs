//! Tests with real time and real processes: killed peers, file descriptors, expired offers.

use std::sync::Arc;
use std::time::Duration;

use crate::raw::{PATIENCE, Raw, Zeros, lost};
use base::block::Payload;
use outboard_messenger::conformance::{self, Buffer, Rig};
use outboard_messenger::{
    BulkSource, ConnectOptions, ConnectionConfig, ConnectionEvent, Ends, MessengerError, NetworkStack,
    TcpStack,
};
use tokio::runtime::Builder;
use tokio::time::{sleep, timeout};

fn quick() -> ConnectionConfig {
    ConnectionConfig {
        heartbeat: Duration::from_millis(50),
        grace: Duration::from_millis(300),
        hold: Duration::from_millis(200),
        offer_ttl: Duration::from_millis(100),
        ..ConnectionConfig::default()
    }
}

async fn pair(stack: &TcpStack) -> (Ends, Ends) {
    let mut listener = stack.listen("127.0.0.1:0").await.unwrap();
    let endpoint = listener.endpoint();
    let (client, server) =
        tokio::join!(stack.connect(&endpoint, ConnectOptions::default()), listener.accept());
    (client.unwrap(), server.unwrap())
}

#[tokio::test]
async fn a_pull_from_an_expired_offer_is_refused() {
    let (client, server) = pair(&TcpStack::new(quick())).await;
    let source = client.0.offer_source(Arc::new(Zeros(10))).unwrap();
    let pool = conformance::pool();
    let dest = pool.alloc(10).await.unwrap();
    server.0.bulk_read(&source.descriptor, 0, dest, PATIENCE).await.unwrap();
    sleep(Duration::from_millis(120)).await;
    let dest = pool.alloc(10).await.unwrap();
    let late = server.0.bulk_read(&source.descriptor, 0, dest, PATIENCE).await;
    assert!(matches!(late, Err(MessengerError::BulkRefused(_))), "{late:?}");
}

#[tokio::test]
async fn a_listener_limits_its_connections_and_its_detached_connections() {
    let (heartbeat, grace) = (Duration::from_secs(1), Duration::from_secs(5));
    let config =
        ConnectionConfig { max_connections: 3, max_held: 1, hold: PATIENCE, heartbeat, grace, ..quick() };
    let mut listener = TcpStack::new(config).listen("127.0.0.1:0").await.unwrap();
    let endpoint = listener.endpoint();
    let mut peers = Vec::new();
    for _ in 0..3 {
        let (raw, _) = Raw::connection(&endpoint).await;
        peers.push((raw, listener.accept().await.unwrap()));
    }
    let refused = TcpStack::default().connect(&endpoint, ConnectOptions::default()).await;
    assert!(matches!(refused, Err(MessengerError::Refused(_))));
    let (raw, mut kept) = peers.remove(0);
    drop(raw);
    assert!(matches!(kept.1.next().await, ConnectionEvent::Interrupted));
    let (raw, mut lost_at_once) = peers.remove(0);
    drop(raw);
    let why = lost(&mut *lost_at_once.1).await;
    assert!(matches!(why, MessengerError::ConnectionLost(_)), "{why}");
    kept.0.close().await;
    drop((kept, lost_at_once));
    sleep(Duration::from_millis(50)).await;
    TcpStack::default().connect(&endpoint, ConnectOptions::default()).await.expect("a slot is free again");
}

/// The client runs on another thread. Its runtime ends during a pull, as in a killed process.
#[tokio::test]
async fn a_client_killed_during_a_pull_ends_only_its_connection() {
    let stack = TcpStack::new(quick());
    let mut listener = stack.listen("127.0.0.1:0").await.unwrap();
    let endpoint = listener.endpoint();
    let (offered, offers) = tokio::sync::oneshot::channel();
    let (kill, killed) = std::sync::mpsc::channel::<()>();
    let client = std::thread::spawn(move || {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let (ends, region) = runtime.block_on(async {
            let ends = TcpStack::new(quick()).connect(&endpoint, ConnectOptions::default()).await.unwrap();
            let slow = Buffer::slow(0, &vec![1; 8 << 20], Duration::from_millis(5));
            let region = ends.0.offer_source(Arc::new(slow)).unwrap();
            offered.send(region.descriptor.clone()).unwrap();
            while killed.try_recv().is_err() {
                sleep(Duration::from_millis(1)).await;
            }
            (ends, region)
        });
        drop(runtime);
        // Calls on handles that outlive their runtime do not block.
        let elsewhere = Builder::new_current_thread().build().unwrap();
        let late = elsewhere.block_on(ends.0.send(outboard_messenger::Message::default()));
        assert!(matches!(late, Err(MessengerError::ConnectionLost(_))), "{late:?}");
        elsewhere.block_on(ends.0.close());
        drop((ends, region));
    });
    let mut server = listener.accept().await.unwrap();
    let descriptor = offers.await.unwrap();
    let pool = conformance::pool();
    let dest = pool.alloc(8 << 20).await.unwrap();
    let pull = server.0.bulk_read(&descriptor, 0, dest, PATIENCE);
    let killer = async {
        sleep(Duration::from_millis(40)).await;
        kill.send(()).unwrap();
    };
    let (pulled, ()) = tokio::join!(pull, killer);
    assert!(matches!(pulled, Err(MessengerError::ConnectionLost(_))), "{pulled:?}");
    lost(&mut *server.1).await;
    assert_eq!(pool.free_bytes().0, 64 << 20, "the buffer returned to the pool");
    client.join().unwrap();
}

/// Three threads send and one thread receives, while a fourth thread serves the connection.
#[test]
fn connection_handles_can_be_used_from_other_threads() {
    let (give, take) = std::sync::mpsc::channel();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let config = ConnectionConfig { offer_ttl: PATIENCE, ..quick() };
    let home = std::thread::spawn(move || {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            give.send(pair(&TcpStack::new(config)).await).unwrap();
            stopped.await.unwrap();
        });
    });
    let (client, server) = take.recv().unwrap();
    let (mut requests, server) = (server.1, server.0);
    let senders: Vec<_> = (0..3u8)
        .map(|sender| {
            let connection = Arc::clone(&client.0);
            std::thread::spawn(move || {
                let runtime = Builder::new_current_thread().enable_time().build().unwrap();
                runtime.block_on(async {
                    for i in 0..2000u32 {
                        let mut header = vec![sender];
                        header.extend_from_slice(&i.to_le_bytes());
                        let message = outboard_messenger::Message {
                            header: header.into(),
                            payload: Payload::default(),
                        };
                        connection.send(message).await.unwrap();
                    }
                });
            })
        })
        .collect();
    let runtime = Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(async {
        let mut next = [0u32; 3];
        for _ in 0..6000 {
            let event = timeout(PATIENCE, requests.next()).await.expect("a message");
            let ConnectionEvent::Message(message) = event else { panic!("{event:?}") };
            let sender = usize::from(message.header[0]);
            assert_eq!(
                message.header[1..],
                next[sender].to_le_bytes(),
                "the messages of a sender are in order"
            );
            next[sender] += 1;
        }
        let pool = conformance::pool();
        let source = client.0.offer_source(Buffer::new(0, &[5; 1_000_000])).unwrap();
        let dest = pool.alloc(1_000_000).await.unwrap();
        let pulled = server.bulk_read(&source.descriptor, 0, dest, PATIENCE).await.unwrap();
        assert!(pulled.buf.iter().all(|b| *b == 5));
        client.0.close().await;
    });
    for sender in senders {
        sender.join().unwrap();
    }
    stop.send(()).unwrap();
    home.join().unwrap();
}

/// After its server was killed, the client tries to resume until its timeout. Then the connection
/// is lost.
#[tokio::test]
async fn a_connection_to_a_killed_server_is_lost_after_the_clients_timeout() {
    let (told, endpoint) = tokio::sync::oneshot::channel();
    let (kill, killed) = std::sync::mpsc::channel::<()>();
    let server = std::thread::spawn(move || {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut listener = TcpStack::new(quick()).listen("127.0.0.1:0").await.unwrap();
            told.send(listener.endpoint()).unwrap();
            let _ends = listener.accept().await.unwrap();
            while killed.try_recv().is_err() {
                sleep(Duration::from_millis(1)).await;
            }
        });
    });
    let options = ConnectOptions { timeout: Duration::from_millis(300) };
    let mut client = TcpStack::new(quick()).connect(&endpoint.await.unwrap(), options).await.unwrap();
    client.0.send(outboard_messenger::Message::default()).await.unwrap();
    kill.send(()).unwrap();
    server.join().unwrap();
    assert!(matches!(timeout(PATIENCE, client.1.next()).await.unwrap(), ConnectionEvent::Interrupted));
    client.0.send(outboard_messenger::Message::default()).await.expect("queued for the resumption");
    let why = lost(&mut *client.1).await;
    assert!(matches!(why, MessengerError::ConnectionLost(_)), "{why}");
}

/// A source whose checksums are wrong. A pull of its data fails after a bounded number of attempts.
struct Liar;

impl BulkSource for Liar {
    fn len(&self) -> u64 {
        4096
    }

    fn block_offset(&self) -> u64 {
        0
    }

    fn read(&self, offset: u64, len: usize) -> base::BoxFuture<'_, Result<Payload, String>> {
        let payload = Payload::from_parts(offset, vec![0; len].into(), vec![1]);
        Box::pin(std::future::ready(payload.map_err(|e| e.to_string())))
    }
}

#[tokio::test]
async fn wrong_checksums_of_a_source_fail_only_the_pull_from_it() {
    let (mut client, server) =
        pair(&TcpStack::new(ConnectionConfig { offer_ttl: PATIENCE, ..quick() })).await;
    let pool = conformance::pool();
    let liar = client.0.offer_source(Arc::new(Liar)).unwrap();
    let dest = pool.alloc(4096).await.unwrap();
    let damaged = server.0.bulk_read(&liar.descriptor, 0, dest, PATIENCE).await;
    assert!(matches!(damaged, Err(MessengerError::Damaged(_))), "{damaged:?}");
    let dest = pool.alloc(10).await.unwrap();
    let failed = server.0.bulk_read(&liar.descriptor, 0, dest, PATIENCE).await;
    assert!(matches!(failed, Err(MessengerError::Damaged(_))), "{failed:?}");
    let nothing_wrong = timeout(Duration::from_millis(50), client.1.next()).await;
    assert!(nothing_wrong.is_err(), "the connection reported {nothing_wrong:?}");
}

/// The child process counts file descriptors, so it runs no other test.
#[test]
fn a_thousand_closed_connections_leave_no_open_file_descriptor() {
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "life::child_process_that_counts_descriptors"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success() && said.contains("1 passed"), "{said}");
}

/// Not a test: the child process of
/// [`a_thousand_closed_connections_leave_no_open_file_descriptor`].
#[test]
#[ignore = "runs as a child process of another test"]
fn child_process_that_counts_descriptors() {
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = descriptors();
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    let with_runtime = descriptors();
    runtime.block_on(async {
        let rig = Rig {
            stack: Arc::new(TcpStack::new(ConnectionConfig::default())),
            address: "127.0.0.1:0".into(),
            cut: Box::new(|| 0),
            freeze: Box::new(|_| {}),
            grace: Duration::from_secs(8),
            patience: Rig::PATIENCE,
            slow: false,
            seed: 0,
        };
        conformance::a_thousand_closed_connections_leave_no_task_behind(&rig).await;
        sleep(Duration::from_millis(50)).await;
        // The runtime opens a few descriptors when it is first used, for example its signal pipe.
        assert!(descriptors() <= with_runtime + 4, "{with_runtime} before, {} after", descriptors());
    });
    drop(runtime);
    assert!(descriptors() <= before + 2);
}
