//! Processes that are killed in the middle of one-sided transfers.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use outboard_messenger::conformance::{self, Buffer};
use outboard_messenger::transport::ofi::{OfiConfig, OfiControl};
use outboard_messenger::transport::tcp::Tcp;
use outboard_messenger::{
    ConnectOptions, ConnectionConfig, ConnectionEvent, Ends, Incoming, Message, NetworkStack, StreamStack,
};
use rand::Rng;
use tokio::time::timeout;
use wire::BulkDescriptor;

const PATIENCE: Duration = Duration::from_secs(60);
const LEN: usize = 8 << 20;
const ROUNDS: u32 = 6;

/// Environment variable with the role of the child process: `client ENDPOINT` or `server`.
const ROLE: &str = "OUTBOARD_TEST_KILLED";

fn data() -> Vec<u8> {
    (0..LEN).map(|i| (i >> 5) as u8).collect()
}

/// How long the server of a killed client keeps the client's connection.
const SHORT_HOLD: Duration = Duration::from_millis(100);

/// Creates a stack whose connections move to links. Its server keeps a connection for `hold` after the
/// transport broke.
fn stack(hold: Duration) -> (Arc<dyn NetworkStack>, Arc<OfiControl>) {
    let (provider, _) = super::provider();
    let ofi = super::load(OfiConfig::new(&provider));
    let control = ofi.control();
    let (heartbeat, grace) = super::patience(&provider);
    let config = ConnectionConfig { heartbeat, grace, hold, ..ConnectionConfig::default() };
    let stack = StreamStack::over(Tcp::default(), config).with_path(super::required_path(&provider, ofi));
    (Arc::new(stack), control)
}

fn patient() -> ConnectOptions {
    ConnectOptions { timeout: PATIENCE }
}

/// The child process, which a test kills.
struct Other(Child);

impl Other {
    fn start(role: &str) -> Other {
        let child = Command::new(std::env::current_exe().expect("a program"))
            .args(["--ignored", "--exact", "killed::child_process_to_be_killed", "--nocapture"])
            .env(ROLE, role)
            .stdout(Stdio::piped())
            .spawn();
        Other(child.expect("started"))
    }

    fn kill(&mut self) {
        self.0.kill().expect("the child can be killed");
        self.0.wait().expect("the child ends");
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn offered(incoming: &mut dyn Incoming) -> BulkDescriptor {
    loop {
        match timeout(PATIENCE, incoming.next()).await.expect("an offer") {
            ConnectionEvent::Message(offer) => {
                return postcard::from_bytes(&offer.header).expect("a descriptor");
            }
            // On a slow machine, a silence may have exceeded the grace period.
            ConnectionEvent::Interrupted | ConnectionEvent::Resumed => {}
            ConnectionEvent::Lost(why) => panic!("connection lost: {why}"),
        }
    }
}

async fn offer(client: &Ends) -> outboard_messenger::BulkRegion {
    let region = client.0.offer_source(Buffer::in_memory(0, &data())).expect("offered");
    let header = postcard::to_allocvec(&region.descriptor).expect("encoded");
    client.0.send(Message { header: header.into(), ..Message::default() }).await.expect("sent");
    region
}

/// Not a test: the program of the child process.
#[tokio::test]
#[ignore = "runs as a child process of another test"]
async fn child_process_to_be_killed() {
    let role = std::env::var(ROLE).expect("the parent sets the role");
    match role.strip_prefix("client ") {
        Some(endpoint) => offer_until_killed(endpoint).await,
        None => read_until_killed().await,
    }
}

/// Offers memory to the server at `endpoint`.
async fn offer_until_killed(endpoint: &str) {
    let (stack, _) = stack(SHORT_HOLD);
    let client = stack.connect(endpoint, patient()).await.expect("connects");
    let region = offer(&client).await;
    tokio::time::sleep(2 * PATIENCE).await;
    drop(region);
}

/// Reads the memory of the first client again and again.
async fn read_until_killed() {
    let (stack, _) = stack(PATIENCE);
    let mut listener = stack.listen(&super::provider().1).await.expect("listens");
    tell(&format!("ENDPOINT {}", listener.endpoint()));
    let mut server = listener.accept().await.expect("accepts");
    let from = offered(&mut *server.1).await;
    let pool = conformance::pool();
    loop {
        let dest = pool.alloc(LEN).await.expect("a buffer");
        server.0.bulk_read(&from, 0, dest, PATIENCE).await.expect("pulled");
        tell("READ whole");
    }
}

#[expect(clippy::print_stdout, reason = "the parent reads the output")]
fn tell(line: &str) {
    println!("{line}");
}

/// A client is killed while the server reads its memory. The reads fail, their buffers return to
/// the pool, no link is left, and the server serves the next client.
#[tokio::test]
async fn a_client_killed_during_a_read_leaves_no_link_and_no_buffer_in_use() {
    let (stack, control) = stack(SHORT_HOLD);
    let mut listener = stack.listen(&super::provider().1).await.expect("listens");
    let pool = conformance::pool();
    let free = pool.free_bytes().0;
    let (mut whole, expected) = (0, data());
    for _ in 0..ROUNDS {
        let mut other = Other::start(&format!("client {}", listener.endpoint()));
        let mut server = timeout(PATIENCE, listener.accept()).await.expect("a client").expect("accepts");
        let from = offered(&mut *server.1).await;
        assert!(from.remote.is_some(), "the offer allows one-sided reads");
        // After at least one complete read, the client is killed while other reads are in progress.
        let (read, mut go) = tokio::sync::mpsc::channel(1);
        let reading = async {
            loop {
                let dest = pool.alloc(LEN).await.expect("a buffer");
                match server.0.bulk_read(&from, 0, dest, PATIENCE).await {
                    Ok(pulled) => assert!(pulled.buf[..] == expected[..]),
                    Err(why) => return why,
                }
                whole += 1;
                let _ = read.try_send(());
            }
        };
        let killing = async {
            go.recv().await.expect("a read completes");
            tokio::time::sleep(Duration::from_micros(rand::rng().random_range(0..20_000))).await;
            other.kill();
        };
        let (why, ()) =
            timeout(PATIENCE, async { tokio::join!(reading, killing) }).await.expect("the reads end");
        tracing::debug!(%why, "the read failed");
        server.0.close().await;
        drop(server);
        assert_eq!(pool.free_bytes().0, free, "all buffers returned to the pool");
    }
    assert!(whole >= ROUNDS, "each client served a complete read");
    assert_eq!(control.cut(), 0, "no link is left");
}

/// A server is killed while it reads a client's memory. The client detects the loss of the server,
/// and gets its memory back.
#[tokio::test]
async fn a_server_killed_while_it_reads_client_memory_leaves_no_link_at_the_client() {
    let (stack, control) = stack(SHORT_HOLD);
    for _ in 0..ROUNDS {
        let mut other = Other::start("server");
        let mut lines = BufReader::new(other.0.stdout.take().expect("piped")).lines();
        let endpoint = lines.find_map(|line| Some(line.ok()?.split_once("ENDPOINT ")?.1.to_owned()));
        let endpoint = endpoint.expect("the server listens");
        let mut client = stack.connect(&endpoint, patient()).await.expect("connects");
        let region = offer(&client).await;
        assert!(region.descriptor.remote.is_some(), "the offer allows one-sided reads");
        // After at least one complete read, the server is killed while other reads are in progress.
        // Over `tcp`, reads progress only while this thread polls.
        let reading = tokio::task::spawn_blocking(move || {
            lines.any(|line| line.is_ok_and(|line| line.ends_with("READ whole"))).then_some(lines)
        });
        let lines = timeout(PATIENCE, reading).await.expect("a read completes").expect("no panic");
        assert!(lines.is_some(), "the server ended before its first read");
        tokio::time::sleep(Duration::from_micros(rand::rng().random_range(0..20_000))).await;
        other.kill();
        let lost = async {
            loop {
                match client.1.next().await {
                    ConnectionEvent::Interrupted => return,
                    ConnectionEvent::Lost(why) => panic!("lost without an interruption: {why}"),
                    ConnectionEvent::Message(_) | ConnectionEvent::Resumed => {}
                }
            }
        };
        timeout(PATIENCE, lost).await.expect("the client detects the loss");
        region.finish();
        client.0.close().await;
    }
    assert_eq!(control.cut(), 0, "no link is left");
}
