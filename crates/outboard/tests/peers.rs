//! Tests of a node that one address floods with connections: the node still serves clients at other
//! addresses, and loses no change.

#![allow(clippy::print_stdout, reason = "a test prints how long clients waited")]

use std::cell::Cell;
use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, TcpStream};
use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use client::{Client, Error, Options};
use futures::StreamExt;
use futures::future::{join, join_all};
use identity::{Credentials, Trust};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::Value;

/// Maximum time that a client may take to connect.
const PATIENCE: Duration = Duration::from_secs(60);
/// Maximum time until the first answer to a new client at the address [`OTHER`]. It suffices for a
/// machine that is busy with other tests. On an idle machine the answer takes less than a second;
/// the test prints the time.
const SERVED: Duration = Duration::from_secs(20);

/// Number of TCP connections that never send a byte.
const SILENT: usize = 600;
/// Default value of `osd.sessions`.
const SESSIONS: usize = 4096;

/// The flooding address. It is also the source address of clients that choose none.
const CROWD: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 1));
/// The address of the clients that the node must serve despite the flood.
const OTHER: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));

/// A node in a temporary directory. Dropping the value stops the node.
struct Node {
    dir: tempfile::TempDir,
}

impl Node {
    /// Starts a node with one target and the pool `p`. Each of its processes can open up to `files`
    /// files.
    fn up(placement: &str, files: u64) -> Node {
        Node::up_with(placement, files, &[])
    }

    /// Works like [`up`](Self::up), with additional environment variables.
    fn up_with(placement: &str, files: u64, variables: &[(&str, &str)]) -> Node {
        let node = Node { dir: tempfile::tempdir().unwrap() };
        let up = ["up", "--detach", "--targets", "1", "--target-size", "64MiB", "--placement", placement];
        // The shell sets the limit for the node only, and the processes of the node inherit it.
        let limit = format!("ulimit -n {files} && exec \"$0\" \"$@\"");
        let mut shell = Command::new("sh");
        shell.args(["-c", &limit, env!("CARGO_BIN_EXE_outboard")]).args(up);
        shell.envs(variables.iter().copied());
        checked(&up, node.run(&mut shell));
        node.ok(&["pool", "create", "p"]);
        node
    }

    fn run(&self, command: &mut Command) -> Output {
        command.env("OUTBOARD_DIR", self.dir.path()).env_remove("OUTBOARD_ENDPOINT").output().unwrap()
    }

    /// Runs a command that connects from the address [`OTHER`]. Returns its standard output.
    fn ok(&self, args: &[&str]) -> String {
        let mut command = Command::new(env!("CARGO_BIN_EXE_outboard"));
        checked(args, self.run(command.args(["--bind", &OTHER.to_string()]).args(args)))
    }

    fn status(&self) -> Value {
        serde_json::from_str(&self.ok(&["status", "--json"])).unwrap()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_outboard"));
        let _ = self.run(command.arg("down"));
    }
}

/// Checks that the command has succeeded. Returns its standard output.
fn checked(args: &[&str], output: Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{args:?}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

/// Raises this process's limit on open files to the hard limit. Returns the limit.
fn raise_limit() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    limit.maximum.unwrap_or(1 << 20)
}

/// The address of a node, and the identity with which clients connect to it.
struct NodeAt {
    endpoint: String,
    trust: Trust,
    dir: PathBuf,
}

impl NodeAt {
    fn of(node: &Node, status: &Value) -> NodeAt {
        let endpoint = status["endpoint"].as_str().unwrap().to_owned();
        let credentials = Credentials::load(&node.dir.path().join("credentials.toml")).unwrap();
        NodeAt { endpoint, trust: credentials.trust(), dir: node.dir.path().to_owned() }
    }

    fn options(&self, source: IpAddr) -> Options {
        let (stack, trust) = (messenger::StackChoice::TCP, self.trust.clone());
        // Only the first client of a user gets a capability from the control plane.
        let capability_file = Some(self.dir.join(format!("{}.capability", trust.key())));
        Options {
            trust,
            capability_file,
            source: Some(source),
            connect_timeout: PATIENCE,
            stack,
            ..Options::default()
        }
    }
}

async fn connect(node: &NodeAt, source: IpAddr) -> Client {
    Client::connect(&node.endpoint, node.options(source)).await.unwrap()
}

/// Connects a new client at `source` and reads an object. Returns the time until the answer, and
/// the client.
async fn served(node: &NodeAt, source: IpAddr) -> (Duration, Client) {
    let began = Instant::now();
    let serve = async {
        let client = connect(node, source).await;
        let object = client.pool("p").unwrap().object("greeting").unwrap();
        assert_eq!(object.get().await.unwrap(), "hello");
        client
    };
    let client =
        tokio::time::timeout(SERVED, serve).await.expect("the node answers a client at the address in time");
    (began.elapsed(), client)
}

/// Connects a client at the address [`OTHER`], appends to the object `log`, and ends the session.
async fn visit(node: &NodeAt) {
    let (_, client) = served(node, OTHER).await;
    client.pool("p").unwrap().object("log").unwrap().append("visit ").await.unwrap();
    client.close().await;
}

/// Returns the counter `osd.connections.WHAT.REASON` of the status.
fn count(status: &Value, what: &str, reason: &str) -> u64 {
    status["osd"]["connections"][what][reason].as_u64().unwrap()
}

#[tokio::test]
async fn one_address_cannot_lock_out_other_addresses_with_connections_or_idle_sessions() {
    let files = raise_limit();
    assert!(files >= 6000, "this test needs a hard limit of 6000 open files (ulimit -Hn), not {files}");
    let node = Node::up("dpu", files);
    let status = node.status();
    let at = &NodeAt::of(&node, &status);
    assert_eq!(status["osd"]["connections"]["max_connections"], SESSIONS as u64);

    let first = connect(at, CROWD).await;
    let pool = first.pool("p").unwrap();
    pool.object("greeting").unwrap().put("hello").await.unwrap();
    let log = pool.object("log").unwrap();
    log.append("one,").await.unwrap();
    let rest = futures::stream::iter(1..SESSIONS).map(|_| connect(at, CROWD));
    let crowd: Vec<Client> = rest.buffered(32).collect().await;
    let silent: Vec<TcpStream> = (0..SILENT).map(|_| TcpStream::connect(&*at.endpoint).unwrap()).collect();

    // These clients stay connected. Each needs a connection slot that a client of the flooding
    // address holds.
    let (mut waits, mut others) = (Vec::new(), Vec::new());
    for _ in 0..8 {
        let (wait, client) = served(at, OTHER).await;
        waits.push(wait);
        others.push(client);
    }
    println!("clients at {OTHER} were served after {waits:?}");
    let status = node.status();
    // A session that loses its slot also frees its connection's slot, which the next client then
    // takes.
    let reclaimed = count(&status, "reclaimed", "connections") + count(&status, "reclaimed", "sessions");
    assert!(reclaimed >= others.len() as u64, "{:#}", status["osd"]["connections"]);
    assert!(count(&status, "reclaimed", "handshakes") > 0, "{:#}", status["osd"]["connections"]);

    // The clients that were silent longest have lost their connections. All clients can continue in
    // their sessions.
    log.append("two,").await.unwrap();
    for client in &crowd[..8] {
        client.pool("p").unwrap().object("log").unwrap().append("x").await.unwrap();
    }
    let (_, after) = served(at, OTHER).await;
    assert_eq!(after.pool("p").unwrap().object("log").unwrap().get().await.unwrap(), "one,two,xxxxxxxx");
    drop((crowd, others, silent));
}

#[tokio::test]
async fn appends_in_flight_take_effect_once_when_their_connection_is_reclaimed() {
    raise_limit();
    let node = Node::up_with("host", 1024, &[("OUTBOARD_OSD_SESSIONS", "4")]);
    let status = node.status();
    let at = &NodeAt::of(&node, &status);
    assert_eq!(status["osd"]["connections"]["max_connections"], 4);
    let first = connect(at, OTHER).await;
    first.pool("p").unwrap().object("greeting").unwrap().put("hello").await.unwrap();
    first.close().await;

    // Every session of the flooding address is busy, so each session whose connection is reclaimed
    // has requests in flight.
    let crowd = join_all((0..4).map(|_| connect(at, CROWD))).await;
    let is_over = Cell::new(false);
    // The placement group knows a session from its first change on. It refuses the retries of a session
    // that has lost its slot before.
    join_all(crowd.iter().enumerate().map(async |(writer, client)| {
        let log = client.pool("p").unwrap().object("log").unwrap();
        log.append(format!("{writer}.0 ")).await.unwrap();
    }))
    .await;
    let writers = crowd.iter().enumerate().map(async |(writer, client)| {
        let log = client.pool("p").unwrap().object("log").unwrap();
        let mut appended = 1;
        while !is_over.get() {
            log.append(format!("{writer}.{appended} ")).await.unwrap();
            appended += 1;
        }
        appended
    });
    let others = async {
        for _ in 0..20 {
            // These clients change an object, so the node has results to discard when their
            // sessions end.
            join(visit(at), visit(at)).await;
            // Wait until the clients of the flooding address have reconnected.
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        is_over.set(true);
    };
    let (appended, ()) = join(join_all(writers), others).await;

    let status = node.status();
    assert!(count(&status, "reclaimed", "connections") >= 20, "{:#}", status["osd"]["connections"]);
    let (_, after) = served(at, OTHER).await;
    let log = after.pool("p").unwrap().object("log").unwrap().get().await.unwrap();
    let log = String::from_utf8(log.to_vec()).unwrap();
    for (writer, appended) in appended.into_iter().enumerate() {
        let prefix = format!("{writer}.");
        let found: Vec<&str> = log.split(' ').filter_map(|entry| entry.strip_prefix(&*prefix)).collect();
        let expected: Vec<String> = (0..appended).map(|number| number.to_string()).collect();
        assert!(appended > 0 && found == expected, "writer {writer} appended {appended}: {found:?}");
    }
}

#[tokio::test]
async fn a_node_with_few_file_descriptors_serves_every_address() {
    raise_limit();
    let node = Node::up("host", 320);
    let status = node.status();
    let at = &NodeAt::of(&node, &status);
    let max_connections = status["osd"]["connections"]["max_connections"].as_u64().unwrap() as usize;
    assert!(max_connections < 320, "descriptors are reserved for the store: {max_connections}");
    connect(at, OTHER).await.pool("p").unwrap().object("greeting").unwrap().put("hello").await.unwrap();

    let mut crowd = Vec::new();
    for _ in 0..2 * max_connections {
        let patience = Duration::from_secs(2);
        match Client::connect(&at.endpoint, Options { connect_timeout: patience, ..at.options(CROWD) }).await
        {
            Ok(client) => crowd.push(client),
            Err(Error::Network(_)) => break,
            Err(e) => panic!("{e}"),
        }
    }
    assert!(
        crowd.len() >= max_connections / 2,
        "one address may use the connection slots that no other address needs: {}",
        crowd.len()
    );
    let silent: Vec<TcpStream> = (0..SILENT).map(|_| TcpStream::connect(&*at.endpoint).unwrap()).collect();
    served(at, OTHER).await;
    // The store still has enough descriptors to create a pool and to report its state.
    node.ok(&["pool", "create", "q"]);
    let status = node.status();
    assert!(count(&status, "refused", "connections") > 0, "{:#}", status["osd"]["connections"]);
    assert_eq!(
        count(&status, "refused", "descriptors"),
        0,
        "the limits on connections keep descriptors free"
    );
    drop((crowd, silent));
}

/// Number of connections that send the beginning of a handshake only.
const HALF_SHAKEN: usize = 300;

/// Opens connections that never send a byte, and connections that begin a TLS handshake and stop.
fn flood(endpoint: &str) -> Vec<TcpStream> {
    let connect = || TcpStream::connect(endpoint).unwrap();
    let mut flood: Vec<TcpStream> = (0..SILENT).map(|_| connect()).collect();
    flood.extend((0..HALF_SHAKEN).map(|_| {
        let mut stream = connect();
        // The header of a TLS record, and the first bytes of a ClientHello.
        stream.write_all(&[22, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3]).unwrap();
        stream
    }));
    flood
}

/// A flood of unproven connections from one address, and another tenant with all sessions: a tenant's
/// command still answers in time, also from the address of the other tenant.
#[tokio::test]
async fn a_tenant_is_served_although_strangers_and_another_tenant_take_all_slots() {
    let files = raise_limit();
    assert!(files >= 12_000, "this test needs a hard limit of 12000 open files (ulimit -Hn), not {files}");
    // The listener is dropped at once, so that the node can use the port.
    let control = std::net::TcpListener::bind((CROWD, 0)).unwrap().local_addr().unwrap().to_string();
    let node = Node::up_with("dpu", files, &[("OUTBOARD_CONTROL_LISTEN", &control)]);
    node.ok(&["tenant", "create", "rival"]);
    node.ok(&["tenant", "create", "films"]);
    let file = |name: &str| node.dir.path().join(name);
    for user in ["rival/crowd", "films/viewer"] {
        let name = file(&format!("{}.toml", user.replace('/', "-")));
        node.ok(&["user", "create", user, "--credentials", name.to_str().unwrap()]);
    }
    node.ok(&["pool", "create", "p", "--tenant", "films"]);
    node.ok(&["grant", "films/viewer", "--pool", "p", "--rights", "read"]);
    let status = node.status();
    let endpoint = status["endpoint"].as_str().unwrap().to_owned();
    // The best of three, because other tests use the machine at the same time.
    let listed = |what: &str| {
        let times: Vec<Duration> = (0..3)
            .map(|_| {
                let mut command = Command::new(env!("CARGO_BIN_EXE_outboard"));
                command.args(["--bind", &OTHER.to_string(), "--endpoint", &endpoint, "pool", "ls"]);
                command.env("OUTBOARD_CREDENTIALS", file("films-viewer.toml"));
                let began = Instant::now();
                let pools = checked(&["pool", "ls"], command.output().unwrap());
                assert_eq!(pools, "p\n");
                began.elapsed()
            })
            .collect();
        println!("{what}: a listing took {times:?}");
        let best = times.iter().min().unwrap();
        assert!(*best < Duration::from_secs(1), "{what}: {times:?}");
    };
    listed("no flood");

    let unproven = (flood(&endpoint), flood(&control));
    listed("600 silent and 300 half-shaken connections to each port");
    drop(unproven);

    let crowd = Credentials::load(&file("rival-crowd.toml")).unwrap();
    let dir = node.dir.path().to_owned();
    let at = &NodeAt { endpoint: endpoint.clone(), trust: crowd.trust(), dir };
    // The crowd is at the same address as the other tenant's user.
    let crowd: Vec<Client> =
        futures::stream::iter(0..SESSIONS).map(|_| connect(at, OTHER)).buffered(32).collect().await;
    assert_eq!(crowd.len(), SESSIONS);
    listed("4096 idle sessions of another tenant at the same address");
    let status = node.status();
    let reclaimed = count(&status, "reclaimed", "connections") + count(&status, "reclaimed", "sessions");
    assert!(reclaimed > 0, "the listing has needed a slot of the crowd: {:#}", status["osd"]["connections"]);
}
