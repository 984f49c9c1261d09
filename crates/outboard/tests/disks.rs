//! Tests of virtual disks on a whole node, whose processes are killed.

mod common;

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::{Duration, Instant};

use common::Node;
use serde_json::Value;

/// A request of this size goes through the DMA engine.
const BLOCK: usize = 64 << 10;

/// An NBD client without options (NBD protocol, fixed newstyle negotiation with NBD_OPT_EXPORT_NAME).
struct NbdClient {
    stream: UnixStream,
    cookie: u64,
}

impl NbdClient {
    fn connect(path: &str) -> io::Result<NbdClient> {
        let mut stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting)?;
        assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
        stream.write_all(&3_u32.to_be_bytes())?;
        stream.write_all(b"IHAVEOPT")?;
        stream.write_all(&[1_u32, 0].map(u32::to_be_bytes).concat())?;
        stream.read_exact(&mut [0; 10])?;
        Ok(NbdClient { stream, cookie: 0 })
    }

    /// Connects once the gateway serves the disk.
    fn connect_soon(path: &str) -> NbdClient {
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            match NbdClient::connect(path) {
                Ok(client) => return client,
                Err(e) => assert!(Instant::now() < until, "{path}: {e}"),
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn send(&mut self, command: u16, offset: u64, len: usize, data: &[u8]) -> io::Result<()> {
        self.cookie += 1;
        let mut request = 0x2560_9513_u32.to_be_bytes().to_vec();
        request.extend([0, command].map(u16::to_be_bytes).concat());
        request.extend([self.cookie, offset].map(u64::to_be_bytes).concat());
        request.extend((len as u32).to_be_bytes());
        request.extend(data);
        self.stream.write_all(&request)
    }

    fn receive(&mut self) -> io::Result<()> {
        let mut reply = [0; 16];
        self.stream.read_exact(&mut reply)?;
        assert_eq!(reply[..4], 0x6744_6698_u32.to_be_bytes());
        assert_eq!(reply[4..8], [0; 4], "the request has failed");
        assert_eq!(reply[8..], self.cookie.to_be_bytes());
        Ok(())
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.send(1, offset, data.len(), data)?;
        self.receive()
    }

    fn read(&mut self, offset: u64, len: usize) -> io::Result<Vec<u8>> {
        self.send(0, offset, len, &[])?;
        self.receive()?;
        let mut data = vec![0; len];
        self.stream.read_exact(&mut data)?;
        Ok(data)
    }
}

/// A node with a gateway, in a DPU that is emulated, and the path of an NBD disk of 16 MiB.
fn node_with_disk(redundancy: &str, targets: &str) -> (Node, String) {
    let node = Node::new();
    let mut up = node.command(&["up", "--detach", "--listen", "127.0.0.1:0", "--targets", targets]);
    up.args(["--target-size", "256MiB", "--placement", "dpu"]);
    up.env("OUTBOARD_GATEWAY_ENABLED", "true").env("OUTBOARD_CHANNEL_OVERDUE", "30s");
    let up = up.output().unwrap();
    assert!(up.status.success(), "{}", String::from_utf8_lossy(&up.stderr));
    node.ok(&["pool", "create", "p", "--redundancy", redundancy]);
    node.ok(&["disk", "create", "p/vm", "--size", "16MiB", "--chunk", "1MiB"]);
    let path = node.path("vm.sock");
    node.ok(&["disk", "attach", "p/vm", "--as", &format!("nbd:{path}")]);
    (node, path)
}

fn process(node: &Node, role: &str) -> (u64, u64) {
    let status = node.status();
    let all = status["processes"].as_array().unwrap();
    let process = all.iter().find(|p| p["role"] == role).unwrap();
    (process["pid"].as_u64().unwrap_or(0), process["restarts"].as_u64().unwrap())
}

/// Kills a process of the node, and waits until the supervisor has started it again.
fn kill(node: &Node, role: &str) {
    let (pid, restarts) = process(node, role);
    assert!(Command::new("kill").args(["-KILL", &pid.to_string()]).status().unwrap().success());
    node.wait(&format!("the {role} starts again"), || {
        let (pid, now) = process(node, role);
        now > restarts && pid != 0
    });
}

fn block(number: u8) -> Vec<u8> {
    vec![number; BLOCK]
}

/// A write of a gateway waits in the channel between osd and store. The gateway is killed, its successor
/// overwrites the block, and then the transfer ends.
#[test]
fn a_write_that_waited_in_the_channel_does_not_overwrite_the_write_of_a_successor() {
    for (redundancy, targets, kills_osd) in
        [("single", "1", false), ("mirror:2", "2", false), ("single", "1", true)]
    {
        let what = format!("{redundancy}, the osd is killed: {kills_osd}");
        let (node, path) = node_with_disk(redundancy, targets);
        let mut client = NbdClient::connect_soon(&path);
        client.write(0, &block(1)).unwrap();
        node.ok(&["debug", "fault", "dma.transfer=stall,late=5000ms,count=1"]);
        let stalled = Instant::now();
        client.send(1, 0, BLOCK, &block(2)).unwrap();
        node.wait("the transfer stalls", || {
            let faults: Value = serde_json::from_slice(&node.ok(&["debug", "faults", "--json"])).unwrap();
            faults[0]["fired"] == 1
        });
        kill(&node, "gateway");
        if kills_osd {
            kill(&node, "osd");
        }
        let mut client = NbdClient::connect_soon(&path);
        client.write(0, &block(3)).unwrap();
        assert!(client.read(0, BLOCK).unwrap() == block(3), "{what}");
        std::thread::sleep(Duration::from_secs(6).saturating_sub(stalled.elapsed()));
        assert!(client.read(0, BLOCK).unwrap() == block(3), "{what}: a late write took effect");
        kill(&node, "store");
        assert!(client.read(0, BLOCK).unwrap() == block(3), "{what}: a late write took effect");
    }
}

/// Requests wait while processes are killed, and the data is right afterwards.
#[test]
fn requests_wait_while_processes_are_killed() {
    let (node, path) = node_with_disk("mirror:2", "2");
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let load = std::thread::spawn(move || {
        let mut client = NbdClient::connect_soon(&path);
        let (mut round, mut connections, mut longest) = (0_u64, 1, Duration::ZERO);
        while stopped.try_recv().is_err() {
            round += 1;
            let offset = round * 7 % 200 * BLOCK as u64;
            let data: Vec<u8> = (0..BLOCK as u64).map(|at| (at / 512 + round) as u8).collect();
            let begun = Instant::now();
            // A request that was lost with its connection is repeated.
            while client.write(offset, &data).is_err() {
                client = NbdClient::connect_soon(&path);
                connections += 1;
            }
            let read = loop {
                match client.read(offset, BLOCK) {
                    Ok(read) => break read,
                    Err(_) => client = NbdClient::connect_soon(&path),
                }
            };
            assert!(read == data, "round {round}: other data than was written");
            longest = longest.max(begun.elapsed());
        }
        (round, connections, longest)
    });
    for role in ["gateway", "osd", "store", "holder", "gateway", "osd"] {
        kill(&node, role);
        std::thread::sleep(Duration::from_millis(300));
    }
    stop.send(()).unwrap();
    let (rounds, connections, longest) = load.join().unwrap();
    assert!(rounds > 10 && connections > 1, "{rounds} rounds over {connections} connections");
    assert!(longest < Duration::from_secs(20), "a request took {longest:?}");
}
