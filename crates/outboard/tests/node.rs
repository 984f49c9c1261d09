//! Tests of whole nodes from the outside. They use real processes, real signals and the `outboard`
//! program only.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// A node in a temporary directory. Dropping the value stops the node.
struct Node {
    dir: tempfile::TempDir,
}

/// Maximum time to wait for a condition. It suffices for a loaded machine; a successful test waits
/// much less.
const PATIENCE: Duration = Duration::from_secs(60);

/// Address for the nodes of tests, which run concurrently. Each start of a node takes any free
/// port.
const ANY_PORT: &str = "127.0.0.1:0";

fn outboard(dir: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_outboard"));
    command.args(args).env("OUTBOARD_DIR", dir).env_remove("OUTBOARD_ENDPOINT");
    command.env("OUTBOARD_SUPERVISE_STEADY_AFTER", "1s").env("OUTBOARD_LISTEN", ANY_PORT);
    command.output().unwrap()
}

fn said(output: &Output) -> String {
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    format!("{:?}\n{}{}", output.status.code(), text(&output.stdout), text(&output.stderr))
}

impl Node {
    fn new() -> Node {
        Node { dir: tempfile::tempdir().unwrap() }
    }

    fn up(&self, placement: &str, targets: &str) -> String {
        let output = self.try_up(&["--placement", placement, "--targets", targets]);
        assert!(output.status.success(), "{}\n{}", said(&output), self.logs());
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    fn try_up(&self, more: &[&str]) -> Output {
        outboard(self.dir.path(), &[&["up", "--detach", "--target-size", "32MiB"], more].concat())
    }

    fn down(&self) -> Output {
        outboard(self.dir.path(), &["down"])
    }

    fn status(&self) -> Value {
        let output = outboard(self.dir.path(), &["status", "--json"]);
        assert!(output.status.success(), "{}", said(&output));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Waits until `what` returns true for the process of `role`. Returns this process.
    fn process(&self, role: &str, what: impl Fn(&Value) -> bool) -> Value {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let status = self.status();
            let all = status["processes"].as_array().cloned().unwrap_or_default();
            if let Some(found) = all.into_iter().find(|p| p["role"] == role && what(p)) {
                return found;
            }
            assert!(
                Instant::now() < deadline,
                "the {role} did not reach the expected state: {status:#}\n{}",
                self.logs()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Kills the process of `role`, and waits until the role runs again. Returns the number of
    /// restarts of the role.
    fn kill(&self, role: &str) -> u64 {
        let before = self.process(role, |p| p["state"] == "running");
        signal(&before, Signal::KILL);
        let after = self.process(role, |p| p["state"] == "running" && p["pid"] != before["pid"]);
        assert_eq!(after["last_exit"], "killed by signal 9", "{after:#}");
        assert!(after["restarts"].as_u64() > before["restarts"].as_u64(), "{after:#}");
        after["restarts"].as_u64().unwrap()
    }

    fn logs(&self) -> String {
        let log = |role: &str| {
            let text = std::fs::read_to_string(self.dir.path().join(format!("log/{role}.log")));
            format!("--- {role}\n{}", text.unwrap_or_default())
        };
        ["supervisor", "store", "osd", "node"].map(log).concat()
    }

    fn target(&self, n: u32) -> PathBuf {
        self.dir.path().join(format!("targets/{n}.img"))
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.down();
    }
}

fn pid(process: &Value) -> u32 {
    u32::try_from(process["pid"].as_u64().expect("a running process has a pid")).unwrap()
}

fn signal(process: &Value, signal: Signal) {
    kill_process(Pid::from_raw(pid(process) as i32).unwrap(), signal).unwrap();
}

/// Returns true if the process has ended.
fn is_gone(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_none_or(|(_, rest)| rest.trim_start().starts_with('Z'))
}

/// Waits until `holds` returns true. Fails after [`PATIENCE`]; `what` then describes the condition.
fn eventually(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn metrics_of(process: &Value) -> String {
    let address = process["metrics"].as_str().expect("a running process serves metrics");
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
    let mut page = String::new();
    stream.read_to_string(&mut page).unwrap();
    page
}

#[test]
fn a_node_in_dpu_placement_restarts_killed_roles_and_stops_completely() {
    let node = Node::new();
    let endpoint = node.up("dpu", "2");
    let status = node.status();
    assert_eq!(status["endpoint"], endpoint.as_str());
    assert_eq!((&status["placement"], &status["emulated"]), (&"dpu".into(), &true.into()), "{status:#}");
    assert_eq!(status["targets"].as_array().unwrap().len(), 2);
    assert!(status["targets"][1]["free"].as_u64() > Some(0), "{status:#}");
    assert_eq!(status["problems"], Value::Array(vec![]), "{status:#}");

    assert_eq!(node.kill("store"), 1);
    assert_eq!(node.kill("osd"), 1);
    assert_eq!(node.status()["endpoint"], endpoint.as_str(), "a restarted osd keeps its address");
    eventually("the targets answer again", || node.status()["targets"][0]["free"].as_u64() > Some(0));
    for role in ["supervisor", "store", "osd"] {
        let process = node.process(role, |p| p["state"] == "running");
        let page = metrics_of(&process);
        assert!(page.contains("outboard_process_cpu_seconds"), "{page}");
        let hard = rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum;
        assert_eq!(process["max_fds"].as_u64(), hard.or(Some(u64::MAX)), "{process:#}");
        assert!(process["open_fds"].as_u64() > Some(2), "{process:#}");
        assert!(page.contains("outboard_process_open_fds") && page.contains("outboard_process_max_fds"));
    }

    let pids: Vec<u32> = node.status()["processes"].as_array().unwrap().iter().map(pid).collect();
    assert_eq!(pids.len(), 3);
    let output = node.down();
    assert!(output.status.success(), "{}", said(&output));
    assert!(pids.iter().all(|pid| is_gone(*pid)));
    let output = node.down();
    assert!(output.status.success() && said(&output).contains("was down already"), "{}", said(&output));
    let status = node.status();
    assert_eq!((&status["up"], &status["endpoint"]), (&false.into(), &Value::Null));
    let output = outboard(node.dir.path(), &["fsck"]);
    assert!(output.status.success(), "{}", said(&output));
}

#[test]
fn a_node_in_host_placement_runs_one_role_and_can_switch_to_dpu_placement() {
    let node = Node::new();
    node.up("host", "1");
    let status = node.status();
    let roles: Vec<&Value> = status["processes"].as_array().unwrap().iter().map(|p| &p["role"]).collect();
    assert_eq!(roles, ["supervisor", "node"]);
    assert_eq!((&status["placement"], &status["emulated"]), (&"host".into(), &false.into()));
    node.kill("node");
    let uuid = status["targets"][0]["uuid"].clone();
    node.down();
    node.up("dpu", "1");
    assert_eq!(node.status()["targets"][0]["uuid"], uuid, "both placements use the same targets");
}

/// The sizes are the minimum of `channel.window`, and a size that together with the rings exceeds
/// the default memory limit of a server. The minimum must suffice for a change whose data is part
/// of its transaction.
#[test]
fn nodes_work_with_a_small_and_a_large_channel_window() {
    for window in ["8MiB", "256MiB"] {
        let node = Node::new();
        let with = |args: &[&str]| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_outboard"));
            command.args(args).env("OUTBOARD_DIR", node.dir.path()).env_remove("OUTBOARD_ENDPOINT");
            command.env("OUTBOARD_LISTEN", ANY_PORT);
            let output = command.env("OUTBOARD_CHANNEL_WINDOW", window).output().unwrap();
            assert!(output.status.success(), "{window}: {args:?}: {}\n{}", said(&output), node.logs());
        };
        with(&["up", "--detach", "--target-size", "64MiB", "--placement", "dpu", "--targets", "1"]);
        assert_eq!(node.status()["offload"]["state"], "active", "{window}");
        with(&["pool", "create", "p"]);
        for (name, len) in [("whole", 2 << 20), ("large", 4 << 20), ("staged", 5 << 20)] {
            let (given, got) = (node.dir.path().join("given"), node.dir.path().join(name));
            let bytes: Vec<u8> = (0..len).map(|i: u32| (i.wrapping_mul(0x9e37_79b9) >> 13) as u8).collect();
            std::fs::write(&given, &bytes).unwrap();
            let object = format!("p/{name}");
            with(&["put", &object, given.to_str().unwrap()]);
            with(&["get", &object, got.to_str().unwrap()]);
            assert!(std::fs::read(&got).unwrap() == bytes, "{window}: {object}");
        }
    }
}

#[test]
fn a_directory_and_a_target_belong_to_one_node_only() {
    let node = Node::new();
    node.up("host", "1");
    let output = node.try_up(&[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("a node is running in"), "{}", said(&output));

    let other = Node::new();
    let config = format!("targets = [{:?}]\n", node.target(0));
    std::fs::write(other.dir.path().join("outboard.toml"), config).unwrap();
    let output = other.try_up(&[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("is in use by another process"), "{}", said(&output));
    assert_eq!(
        node.process("node", |p| p["state"] == "running")["restarts"],
        0,
        "the first node was not disturbed"
    );
    assert_eq!(other.status()["up"], false);
    let output = outboard(node.dir.path(), &["fsck"]);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
}

/// A shell starts the node with a soft limit of descriptors that is lower than the hard limit.
#[test]
fn roles_raise_their_soft_limit_of_descriptors_to_the_hard_limit() {
    let node = Node::new();
    let hard = rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum;
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -Sn 256 && exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_outboard")]);
    command.args(["up", "--detach", "--target-size", "32MiB"]).env("OUTBOARD_DIR", node.dir.path());
    let output = command.env("OUTBOARD_LISTEN", ANY_PORT).output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    for role in ["supervisor", "store", "osd"] {
        let process = node.process(role, |p| p["state"] == "running");
        assert_eq!(process["max_fds"].as_u64(), hard.or(Some(u64::MAX)), "{process:#}");
    }
    assert!(node.logs().contains("limit of open file descriptors"), "{}", node.logs());
}

#[test]
fn commands_wait_until_a_restarting_osd_is_ready() {
    let node = Node::new();
    let run = |args: &[&str]| {
        let output = outboard(node.dir.path(), args);
        assert!(output.status.success(), "{args:?}: {}\n{}", said(&output), node.logs());
    };
    let mut up = Command::new(env!("CARGO_BIN_EXE_outboard"));
    up.args(["up", "--detach", "--target-size", "32MiB", "--placement", "dpu"]);
    up.env("OUTBOARD_DIR", node.dir.path()).env("OUTBOARD_LISTEN", ANY_PORT);
    // The osd stays down longer than one attempt of a client to connect takes.
    for key in ["BACKOFF_MIN", "BACKOFF_MAX"] {
        up.env(format!("OUTBOARD_SUPERVISE_{key}"), "7s");
    }
    assert!(up.output().unwrap().status.success(), "{}", node.logs());
    run(&["pool", "create", "p"]);
    for command in [&["ls", "p"][..], &["debug", "faults"]] {
        let before = node.process("osd", |p| p["state"] == "running");
        signal(&before, Signal::KILL);
        node.process("osd", |p| p["pid"].is_null());
        run(command);
        let after = node.process("osd", |p| p["state"] == "running");
        assert!(after["restarts"].as_u64() > before["restarts"].as_u64(), "{after:#}");
    }
    node.down();
    let output = outboard(node.dir.path(), &["ls", "p"]);
    assert!(
        said(&output).contains("is down"),
        "a command does not wait for a node that is down: {}",
        said(&output)
    );
}

#[test]
fn target_files_outside_the_node_directory_are_accessible_to_their_owner_only() {
    use std::os::unix::fs::PermissionsExt;
    let node = Node::new();
    let elsewhere = tempfile::tempdir().unwrap();
    let target = elsewhere.path().join("0.img");
    let up = || {
        let mut command = Command::new("sh");
        command.args(["-c", "umask 0; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_outboard"), "up"]);
        command.args(["--detach", "--target-size", "32MiB"]).env("OUTBOARD_TARGETS", &target);
        command.env("OUTBOARD_DIR", node.dir.path()).env("OUTBOARD_LISTEN", ANY_PORT);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", said(&output));
        node.down();
    };
    let mode = || std::fs::metadata(&target).unwrap().permissions().mode() & 0o777;
    up();
    assert_eq!(mode(), 0o600);
    // Earlier versions created targets with this mode.
    std::fs::set_permissions(&target, std::fs::Permissions::from_mode(0o644)).unwrap();
    up();
    assert_eq!(mode(), 0o600);
}

#[test]
fn the_death_of_the_supervisor_ends_its_roles() {
    let node = Node::new();
    node.up("dpu", "1");
    let status = node.status();
    let pids: Vec<u32> = status["processes"].as_array().unwrap().iter().map(pid).collect();
    signal(&node.process("supervisor", |_| true), Signal::KILL);
    node.up("dpu", "1");
    assert!(pids.iter().all(|pid| is_gone(*pid)), "the next start has waited for the old processes");
    assert_eq!(node.status()["problems"], Value::Array(vec![]));
}

#[test]
fn invalid_flags_and_configurations_are_refused() {
    let node = Node::new();
    let output = node.try_up(&["--targets", "0"]);
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    std::fs::write(node.dir.path().join("outboard.toml"), "plaecment = \"dpu\"\n").unwrap();
    let output = node.try_up(&[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("unknown key `plaecment`"), "{}", said(&output));

    let other = Node::new();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let output = other.try_up(&["--listen", &address]);
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains(&address), "{}", said(&output));
    assert!(!outboard(Path::new("/nonexistent"), &["status"]).status.success());
}

#[test]
fn after_a_failed_first_up_the_number_of_targets_can_still_be_chosen() {
    let node = Node::new();
    let output = outboard(node.dir.path(), &["up", "--detach", "--target-size", "1"]);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(!node.dir.path().join("outboard.toml").exists());
    node.up("host", "2");
}

#[test]
fn a_missing_target_is_not_created_again() {
    let node = Node::new();
    node.up("host", "1");
    let uuid = node.status()["targets"][0]["uuid"].clone();
    node.down();
    let away = node.dir.path().join("away");
    std::fs::rename(node.target(0), &away).unwrap();
    // Try twice, because the files of a failed start must not hide that the node has run before.
    for _ in 0..2 {
        let output = node.try_up(&[]);
        assert_eq!(output.status.code(), Some(1), "{}", said(&output));
        assert!(said(&output).contains("is missing"), "{}", said(&output));
        assert!(!node.target(0).exists());
    }
    std::fs::write(node.target(0), "no target").unwrap();
    assert!(!node.try_up(&[]).status.success());
    std::fs::remove_file(node.target(0)).unwrap();
    assert!(said(&node.try_up(&[])).contains("is missing"));
    std::fs::rename(&away, node.target(0)).unwrap();
    node.up("host", "1");
    assert_eq!(node.status()["targets"][0]["uuid"], uuid);
}

#[test]
fn fsck_reports_damaged_data_and_cannot_repair_it() {
    let node = Node::new();
    node.up("host", "1");
    let payload = node.dir.path().join("payload");
    std::fs::write(&payload, vec![7; 1 << 20]).unwrap();
    for args in [&["pool", "create", "p"][..], &["put", "p/object", payload.to_str().unwrap()]] {
        let output = outboard(node.dir.path(), args);
        assert!(output.status.success(), "{}", said(&output));
    }
    node.down();
    let mut image = std::fs::read(node.target(0)).unwrap();
    let at = image
        .windows(4096)
        .position(|block| block.iter().all(|b| *b == 7))
        .expect("the target contains the data");
    image[at + 100] ^= 1;
    std::fs::write(node.target(0), image).unwrap();

    let output = outboard(node.dir.path(), &["fsck", "--json"]);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(found["clean"], false);
    assert_eq!(found["targets"][0]["report"]["problem_count"], 1, "{found:#}");
    let output = outboard(node.dir.path(), &["fsck", node.target(0).to_str().unwrap(), "--repair"]);
    assert_eq!(output.status.code(), Some(1), "lost data cannot be repaired: {}", said(&output));
}

/// Starts an `outboard` process that runs until it gets a signal. Returns the process and the first
/// line of its standard output.
fn start(dir: &Path, args: &[&str]) -> (Child, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_outboard"));
    command.args(args).current_dir(dir).env("OUTBOARD_DIR", dir).env_remove("OUTBOARD_ENDPOINT");
    command.env("OUTBOARD_LISTEN", ANY_PORT);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    (child, line)
}

/// Sends the signal, and checks that the process ends successfully.
fn stop(mut child: Child, signal: Signal) {
    kill_process(Pid::from_child(&child), signal).unwrap();
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_node_in_the_foreground_runs_until_ctrl_c() {
    let node = Node::new();
    let (supervisor, endpoint) = start(node.dir.path(), &["up", "--target-size", "32MiB"]);
    let status = node.status();
    assert_eq!(status["endpoint"], endpoint.trim());
    let pids: Vec<u32> = status["processes"].as_array().unwrap().iter().map(pid).collect();
    assert_eq!(pids[0], supervisor.id());
    stop(supervisor, Signal::INT);
    assert!(pids.iter().all(|pid| is_gone(*pid)));
    assert_eq!(node.status()["up"], false);
}

#[test]
fn roles_work_without_a_supervisor_over_unix_and_tcp_sockets() {
    let node = Node::new();
    node.up("host", "1");
    node.down();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    for address in ["by-hand.sock".to_owned(), format!("tcp:127.0.0.1:{port}")] {
        let (store, said) =
            start(node.dir.path(), &["store", "--target", "targets/0.img", "--socket", &address]);
        assert!(said.contains("\"ready\""), "{said}");
        let osd = ["osd", "--store-socket", &address, "--listen", "127.0.0.1:0"];
        let (osd, said) = start(node.dir.path(), &osd);
        let said: Value = serde_json::from_str(&said).unwrap();
        let endpoint = said["ready"]["endpoint"].as_str().expect("the osd announces its endpoint").to_owned();
        let output = outboard(node.dir.path(), &["--endpoint", &endpoint, "status", "--json"]);
        let status: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(status["targets"][0]["free"].as_u64() > Some(0), "{status:#}");
        stop(osd, Signal::TERM);
        stop(store, Signal::TERM);
    }
}

/// A full file system that contains the logs stops no role. The roles omit the messages that they
/// cannot write.
#[test]
fn a_node_serves_clients_while_its_logs_cannot_be_written() {
    let node = Node::new();
    std::fs::create_dir_all(node.dir.path().join("log")).unwrap();
    for role in ["supervisor", "store", "osd"] {
        let log = node.dir.path().join(format!("log/{role}.log"));
        std::os::unix::fs::symlink("/dev/full", log).unwrap();
    }
    node.up("dpu", "1");
    assert_eq!(node.kill("osd"), 1);
    assert_eq!(node.kill("store"), 1);
    let file = node.dir.path().join("file");
    std::fs::write(&file, "content").unwrap();
    for args in [&["pool", "create", "p"][..], &["put", "p/o", file.to_str().unwrap()]] {
        let output = outboard(node.dir.path(), args);
        assert!(output.status.success(), "{args:?}: {}", said(&output));
    }
    assert_eq!(outboard(node.dir.path(), &["get", "p/o", "-"]).stdout, b"content");
    assert!(node.down().status.success());
}

#[test]
fn the_control_plane_keeps_its_port_until_another_program_uses_it() {
    let node = Node::new();
    let port = || -> u16 {
        let port = std::fs::read_to_string(node.dir.path().join("run/control.port")).unwrap();
        let port = port.trim().parse().unwrap();
        let bound = std::net::TcpListener::bind(("127.0.0.1", port));
        assert_eq!(bound.unwrap_err().kind(), std::io::ErrorKind::AddrInUse, "the osd listens at the port");
        let pools = outboard(node.dir.path(), &["pool", "ls"]);
        assert!(pools.status.success(), "{}", said(&pools));
        port
    };
    node.up("dpu", "1");
    let first = port();
    let before = node.process("osd", |p| p["state"] == "running");
    signal(&before, Signal::KILL);
    node.process("osd", |p| p["state"] == "running" && p["pid"] != before["pid"]);
    assert_eq!(port(), first, "after a crash of the osd");
    node.down();
    node.up("dpu", "1");
    assert_eq!(port(), first, "after a restart of the node");
    node.down();
    let taken = std::net::TcpListener::bind(("127.0.0.1", first)).unwrap();
    node.up("dpu", "1");
    let second = port();
    assert_ne!(second, first);
    drop(taken);
    node.down();
    node.up("dpu", "1");
    assert_eq!(port(), second, "the new port is remembered");
    node.down();
}
