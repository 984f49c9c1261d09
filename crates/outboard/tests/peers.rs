//! A node that one address floods with connections: clients at other addresses are served, and nothing is lost.

#![allow(clippy::print_stdout, reason = "a test says how long clients waited")]

use std::cell::Cell;
use std::net::{IpAddr, Ipv4Addr, TcpStream};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use client::{Client, Error, Options};
use futures::StreamExt;
use futures::future::{join, join_all};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(60);
/// Within that a new client at the other address is served, however busy the machine is with other tests. On an idle one
/// it takes less than a second; the test prints how long.
const SERVED: Duration = Duration::from_secs(20);

const SILENT: usize = 600;
const SESSIONS: usize = 4096;

/// Where everybody comes from whose source address nothing says.
const CROWD: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 1));
const OTHER: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));

struct Node {
    dir: tempfile::TempDir,
}

impl Node {
    /// A node whose processes can open `files` files each.
    fn up(placement: &str, files: u64) -> Node {
        Node::up_with(placement, files, &[])
    }

    /// The same, with variables in its environment.
    fn up_with(placement: &str, files: u64, variables: &[(&str, &str)]) -> Node {
        let node = Node { dir: tempfile::tempdir().unwrap() };
        let up = ["up", "--detach", "--targets", "1", "--target-size", "64MiB", "--placement", placement];
        // The limit is inherited. Other processes that tests start meanwhile can do with it, too.
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

    /// Runs a command from the other address.
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

fn checked(args: &[&str], output: Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{args:?}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

/// Lets this process open as many files as it may; returns how many.
fn raise_limit() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    limit.maximum.unwrap_or(1 << 20)
}

fn options(source: IpAddr) -> Options {
    let stack = messenger::StackChoice::TCP;
    Options { source: Some(source), connect_timeout: PATIENCE, stack, ..Options::default() }
}

async fn connect(endpoint: &str, source: IpAddr) -> Client {
    Client::connect(endpoint, options(source)).await.unwrap()
}

/// A new client at `source`, and how long it waited for its first answer.
async fn served(endpoint: &str, source: IpAddr) -> (Duration, Client) {
    let began = Instant::now();
    let serve = async {
        let client = connect(endpoint, source).await;
        let object = client.pool("p").unwrap().object("greeting").unwrap();
        assert_eq!(object.get().await.unwrap(), "hello");
        client
    };
    let client = tokio::time::timeout(SERVED, serve).await.expect("a client at the address is served");
    (began.elapsed(), client)
}

/// A client at the other address comes, appends to the log and ends its session.
async fn visit(endpoint: &str) {
    let (_, client) = served(endpoint, OTHER).await;
    client.pool("p").unwrap().object("log").unwrap().append("visit ").await.unwrap();
    client.close().await;
}

fn count(status: &Value, what: &str, reason: &str) -> u64 {
    status["osd"]["connections"][what][reason].as_u64().unwrap()
}

#[tokio::test]
async fn silent_connections_and_idle_sessions_of_one_address_keep_no_other_out() {
    let files = raise_limit();
    assert!(files >= 6000, "this test needs a hard limit of 6000 open files (ulimit -Hn), not {files}");
    let node = Node::up("dpu", files);
    let status = node.status();
    let endpoint = status["endpoint"].as_str().unwrap();
    assert_eq!(status["osd"]["connections"]["max_sessions"], SESSIONS as u64);

    let first = connect(endpoint, CROWD).await;
    let pool = first.pool("p").unwrap();
    pool.object("greeting").unwrap().put("hello").await.unwrap();
    let log = pool.object("log").unwrap();
    log.append("one,").await.unwrap();
    let rest = futures::stream::iter(1..SESSIONS).map(|_| connect(endpoint, CROWD));
    let crowd: Vec<Client> = rest.buffered(32).collect().await;
    let silent: Vec<TcpStream> = (0..SILENT).map(|_| TcpStream::connect(endpoint).unwrap()).collect();

    // They stay: each needs a place that one of the crowd has.
    let (mut waits, mut others) = (Vec::new(), Vec::new());
    for _ in 0..8 {
        let (wait, client) = served(endpoint, OTHER).await;
        waits.push(wait);
        others.push(client);
    }
    println!("clients at the other address were served after {waits:?}");
    let status = node.status();
    let reclaimed = count(&status, "reclaimed", "sessions");
    assert!(reclaimed >= others.len() as u64, "{:#}", status["osd"]["connections"]);
    assert!(count(&status, "reclaimed", "handshakes") > 0, "{:#}", status["osd"]["connections"]);

    // The longest silent lost their places. All go on with their sessions.
    log.append("two,").await.unwrap();
    for client in &crowd[..8] {
        client.pool("p").unwrap().object("log").unwrap().append("x").await.unwrap();
    }
    let (_, after) = served(endpoint, OTHER).await;
    assert_eq!(after.pool("p").unwrap().object("log").unwrap().get().await.unwrap(), "one,two,xxxxxxxx");
    drop((crowd, others, silent));
}

#[tokio::test]
async fn appends_under_way_in_reclaimed_sessions_take_effect_once() {
    raise_limit();
    let node = Node::up_with("host", 1024, &[("OUTBOARD_OSD_SESSIONS", "4")]);
    let status = node.status();
    let endpoint = status["endpoint"].as_str().unwrap();
    assert_eq!(status["osd"]["connections"]["max_sessions"], 4);
    let first = connect(endpoint, OTHER).await;
    first.pool("p").unwrap().object("greeting").unwrap().put("hello").await.unwrap();
    first.close().await;

    // Every session of the crowd is busy, so that those that lose their places have requests under way.
    let crowd = join_all((0..4).map(|_| connect(endpoint, CROWD))).await;
    let is_over = Cell::new(false);
    let writers = crowd.iter().enumerate().map(async |(writer, client)| {
        let log = client.pool("p").unwrap().object("log").unwrap();
        let mut appended = 0;
        while !is_over.get() {
            log.append(format!("{writer}.{appended} ")).await.unwrap();
            appended += 1;
        }
        appended
    });
    let others = async {
        for _ in 0..20 {
            // These change something, too, so that there is something to forget when their sessions end.
            join(visit(endpoint), visit(endpoint)).await;
            // Those of the crowd return.
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        is_over.set(true);
    };
    let (appended, ()) = join(join_all(writers), others).await;

    let status = node.status();
    assert!(count(&status, "reclaimed", "sessions") >= 20, "{:#}", status["osd"]["connections"]);
    let (_, after) = served(endpoint, OTHER).await;
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
async fn a_node_that_can_open_few_files_serves_every_address() {
    raise_limit();
    let node = Node::up("host", 320);
    let status = node.status();
    let endpoint = status["endpoint"].as_str().unwrap();
    let max_sessions = status["osd"]["connections"]["max_sessions"].as_u64().unwrap() as usize;
    assert!(max_sessions < 320, "the store's files have their reserve: {max_sessions}");
    connect(endpoint, OTHER).await.pool("p").unwrap().object("greeting").unwrap().put("hello").await.unwrap();

    let mut crowd = Vec::new();
    for _ in 0..2 * max_sessions {
        let patience = Duration::from_secs(2);
        match Client::connect(endpoint, Options { connect_timeout: patience, ..options(CROWD) }).await {
            Ok(client) => crowd.push(client),
            Err(Error::Network(_)) => break,
            Err(e) => panic!("{e}"),
        }
    }
    assert!(crowd.len() >= max_sessions / 2, "one address may have what no other wants: {}", crowd.len());
    let silent: Vec<TcpStream> = (0..SILENT).map(|_| TcpStream::connect(endpoint).unwrap()).collect();
    served(endpoint, OTHER).await;
    // The store still opens what it needs: its state is told, and objects are written.
    node.ok(&["pool", "create", "q"]);
    let status = node.status();
    assert!(count(&status, "refused", "sessions") > 0, "{:#}", status["osd"]["connections"]);
    assert_eq!(count(&status, "refused", "descriptors"), 0, "budgets keep descriptors free");
    drop((crowd, silent));
}
