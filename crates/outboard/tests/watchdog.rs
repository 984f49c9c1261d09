//! Tests of the watchdog: the supervisor detects and restarts roles that hang. It does not mistake
//! a pause of the whole node for a hang.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Maximum time to wait for a condition. It suffices for a loaded machine; a successful test waits
/// much less.
const PATIENCE: Duration = Duration::from_secs(120);
/// Value of `supervise.hung_after` in these tests.
const HUNG_AFTER: Duration = Duration::from_secs(3);

/// A node in a temporary directory. Dropping the value stops the node.
struct Node {
    dir: tempfile::TempDir,
}

impl Node {
    fn up(placement: &str) -> Node {
        let node = Node { dir: tempfile::tempdir().unwrap() };
        let up = ["up", "--detach", "--listen", "127.0.0.1:0", "--placement", placement];
        node.ok(&[&up[..], &["--targets", "2", "--target-size", "64MiB"]].concat());
        node.ok(&["pool", "create", "p"]);
        node
    }

    fn run(&self, args: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_outboard"));
        command.args(args).env("OUTBOARD_DIR", self.dir.path()).env_remove("OUTBOARD_ENDPOINT");
        let limit = format!("{}ms", HUNG_AFTER.as_millis());
        command.env("OUTBOARD_SUPERVISE_HUNG_AFTER", limit).stdin(Stdio::null()).output().unwrap()
    }

    fn ok(&self, args: &[&str]) -> Vec<u8> {
        let output = self.run(args);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "outboard {args:?}: {said}\n{}", self.log());
        output.stdout
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log/supervisor.log")).unwrap_or_default()
    }

    fn status(&self) -> Value {
        serde_json::from_slice(&self.ok(&["status", "--json"])).unwrap()
    }

    fn processes(&self) -> Vec<Value> {
        self.status()["processes"].as_array().unwrap().clone()
    }

    fn process(&self, role: &str) -> Value {
        self.processes().into_iter().find(|p| p["role"] == role).unwrap()
    }

    /// Waits until `what` returns true for the process of `role`. Returns this process.
    fn until(&self, role: &str, what: impl Fn(&Value) -> bool) -> Value {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let process = self.process(role);
            if what(&process) {
                return process;
            }
            assert!(Instant::now() < deadline, "{process:#}\n{}", self.log());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Pauses the process of `role` with SIGSTOP, so that it hangs, and waits until the watchdog
    /// has restarted the role.
    fn hang(&self, role: &str) {
        let before = self.process(role);
        signal(&before, Signal::STOP);
        let after = self.until(role, |p| p["state"] == "running" && p["pid"] != before["pid"]);
        assert_eq!(after["hangs"].as_u64(), before["hangs"].as_u64().map(|n| n + 1), "{after:#}");
        assert_eq!(after["restarts"].as_u64(), before["restarts"].as_u64().map(|n| n + 1), "{after:#}");
        assert!(after["last_exit"].as_str().unwrap().contains("no heartbeat of"), "{after:#}");
        let hangs = format!("outboard_supervisor_hangs{{role=\"{role}\"}} {}", after["hangs"]);
        let page = metrics_of(&self.process("supervisor"));
        assert!(page.contains(&hangs), "{hangs}: {page}");
    }

    /// Checks that the node stores an object and returns it.
    fn serves(&self, name: &str) {
        let file = self.dir.path().join("file");
        std::fs::write(&file, name).unwrap();
        let object = format!("p/{name}");
        self.ok(&["put", &object, file.to_str().unwrap()]);
        assert_eq!(self.ok(&["get", &object, "-"]), name.as_bytes());
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.run(&["down"]);
    }
}

fn signal(process: &Value, signal: Signal) {
    let pid = process["pid"].as_i64().expect("it has a pid") as i32;
    kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
}

fn metrics_of(process: &Value) -> String {
    let mut stream = TcpStream::connect(process["metrics"].as_str().unwrap()).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
    let mut page = String::new();
    stream.read_to_string(&mut page).unwrap();
    page
}

#[test]
fn a_hanging_store_and_a_hanging_osd_are_restarted() {
    let node = Node::up("dpu");
    node.hang("store");
    node.serves("after-the-store");
    node.hang("osd");
    node.serves("after-the-osd");
    assert!(node.log().contains("hung: no heartbeat of chan-0 for 3s"), "{}", node.log());
    assert!(node.log().contains("hung: no heartbeat of osd-0 for 3s"), "{}", node.log());
    assert_eq!(node.process("supervisor")["hangs"], 0);
}

#[test]
fn a_hanging_node_in_host_placement_is_restarted() {
    let node = Node::up("host");
    node.hang("node");
    node.serves("after");
}

#[test]
fn a_pause_of_the_whole_node_restarts_no_role() {
    let node = Node::up("dpu");
    let before = node.processes();
    before.iter().for_each(|process| signal(process, Signal::STOP));
    std::thread::sleep(3 * HUNG_AFTER);
    before.iter().for_each(|process| signal(process, Signal::CONT));
    // Wait long enough that a watchdog which counted the pause would act.
    std::thread::sleep(2 * HUNG_AFTER);
    let counted = |processes: &[Value]| -> Vec<[Value; 4]> {
        processes.iter().map(|p| ["role", "pid", "restarts", "hangs"].map(|key| p[key].clone())).collect()
    };
    assert_eq!(counted(&node.processes()), counted(&before), "{}", node.log());
    node.serves("after-the-pause");
    // The watchdog works after the pause.
    node.hang("osd");
}
