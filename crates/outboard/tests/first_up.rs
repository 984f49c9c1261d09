//! Tests of a node's first `up`: it creates the node completely or not at all, even if it is
//! interrupted, and the node keeps its first port.

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Maximum time to wait for a condition. It suffices for a loaded machine; a successful test waits
/// much less.
const PATIENCE: Duration = Duration::from_secs(60);

/// A temporary directory for a node. Dropping the value stops the node.
struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    fn new() -> Place {
        Place { dir: tempfile::tempdir().unwrap() }
    }

    /// Returns the node's directory, which does not exist at first.
    fn node(&self) -> std::path::PathBuf {
        self.dir.path().join("node")
    }

    fn command(&self, args: &[&str]) -> Command {
        // A shell makes its background jobs ignore these signals. The command would inherit this
        // setting, so `env` restores the default actions.
        let mut command = Command::new("env");
        command.args(["--default-signal=INT,QUIT,HUP", env!("CARGO_BIN_EXE_outboard")]);
        command.args(args).env("OUTBOARD_DIR", self.node());
        command.env_remove("OUTBOARD_ENDPOINT").env_remove("OUTBOARD_LISTEN").stdin(Stdio::null());
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    fn ok(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert!(output.status.success(), "outboard {args:?}: {}\n{}", said(&output), self.logs());
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    fn logs(&self) -> String {
        let log = |role: &str| {
            std::fs::read_to_string(self.node().join(format!("log/{role}.log"))).unwrap_or_default()
        };
        ["supervisor", "store", "osd", "node"].map(log).concat()
    }

    fn status(&self) -> Value {
        serde_json::from_str(&self.ok(&["status", "--json"])).unwrap()
    }

    fn has(&self, path: &str) -> bool {
        self.node().join(path).exists()
    }

    /// Waits until `holds` returns true. Fails after [`PATIENCE`]; `what` then describes the
    /// condition.
    fn until(&self, what: &str, holds: impl Fn() -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !holds() {
            assert!(Instant::now() < deadline, "{what}\n{}", self.logs());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Starts a first `up`, and sends it a signal as soon as the file `path` of the node exists.
    fn interrupt_at(&self, path: &str, signal: Signal, more: &[&str]) {
        let up = ["up", "--targets", "2", "--target-size", "192MiB", "--placement", "dpu"];
        let mut command = self.command(&[&up[..], &["--listen", "127.0.0.1:0"], more].concat());
        let mut up = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        self.until(path, || self.has(path));
        kill_process(Pid::from_child(&up), signal).unwrap();
        let status = up.wait().unwrap();
        assert!(!status.success(), "an interrupted `up` fails");
    }

    /// Creates a node with other flags than [`interrupt_at`](Self::interrupt_at), and checks that
    /// the node contains nothing of an earlier attempt.
    fn makes_another(&self, when: &str) {
        let up = ["up", "--detach", "--targets", "3", "--target-size", "32MiB", "--placement", "host"];
        let up = [&up[..], &["--listen", "127.0.0.1:0"]].concat();
        // The supervisor of an interrupted `up --detach` may still be stopping.
        let deadline = Instant::now() + PATIENCE;
        loop {
            let output = self.run(&up);
            if output.status.success() {
                break;
            }
            let said = said(&output);
            assert!(said.contains("a node is running"), "{when}: {said}\n{}", self.logs());
            assert!(Instant::now() < deadline, "{when}: {said}");
            std::thread::sleep(Duration::from_millis(100));
        }
        let status = self.status();
        assert_eq!(status["placement"], "host", "{when}");
        assert_eq!(status["problems"], Value::Array(vec![]), "{when}: {status:#}");
        let paths: Vec<&Value> = status["targets"].as_array().unwrap().iter().map(|t| &t["path"]).collect();
        assert_eq!(paths, ["targets/0.img", "targets/1.img", "targets/2.img"], "{when}");
        let mut files: Vec<(String, u64)> = std::fs::read_dir(self.node().join("targets"))
            .unwrap()
            .map(|entry| entry.unwrap())
            .map(|entry| (entry.file_name().into_string().unwrap(), entry.metadata().unwrap().len()))
            .collect();
        files.sort();
        let made = ["0.img", "1.img", "2.img"].map(|name| (name.to_owned(), 32 << 20));
        assert_eq!(files, made, "{when}");
        let config = std::fs::read_to_string(self.node().join("outboard.toml")).unwrap();
        assert!(config.contains("\ntarget_size = \"32MiB\""), "{when}: {config}");
        assert!(!self.has("making.json") && self.has("node.json"), "{when}");
        self.ok(&["pool", "create", "p"]);
        self.ok(&["down"]);
        self.ok(&["up", "--detach"]);
        assert!(self.ok(&["pool", "ls"]).contains('p'), "{when}");
        self.ok(&["down"]);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.run(&["down"]);
    }
}

fn said(output: &Output) -> String {
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    format!("{:?}\n{}{}", output.status.code(), text(&output.stdout), text(&output.stderr))
}

/// Files whose appearance marks the points at which a first `up` is interrupted: while it creates
/// the first target, while it creates the second target, when all targets are complete, and when the
/// configuration is complete.
const POINTS: [&str; 4] = ["targets/0.img.unfinished", "targets/0.img", "node.json", "outboard.toml"];

#[test]
fn the_next_up_works_after_the_first_up_was_killed() {
    for point in POINTS {
        let place = Place::new();
        place.interrupt_at(point, Signal::KILL, &[]);
        assert!(place.has("making.json"), "{point}: `up` was killed too late");
        place.makes_another(point);
    }
}

#[test]
fn the_next_up_works_after_ctrl_c_interrupted_the_first_up() {
    for point in POINTS {
        let place = Place::new();
        place.interrupt_at(point, Signal::INT, &[]);
        place.makes_another(point);
    }
}

#[test]
fn interrupting_up_detach_also_stops_the_node_in_the_background() {
    for signal in [Signal::INT, Signal::KILL] {
        let place = Place::new();
        place.interrupt_at("outboard.toml", signal, &["--detach"]);
        place.until("the record of the first `up` exists, or the node is removed", || {
            !place.has("outboard.toml") || place.has("making.json")
        });
        place.makes_another(&format!("{signal:?}"));
    }
}

#[test]
fn a_refused_first_up_leaves_no_files() {
    let place = Place::new();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    let refused = |env: (&str, &str), args: &[&str], reason: &str| {
        let output = place.command(&[&["up", "--detach"], args].concat()).env(env.0, env.1).output().unwrap();
        assert!(!output.status.success() && said(&output).contains(reason), "{args:?}: {}", said(&output));
        assert!(!place.node().exists(), "{args:?} {env:?}");
    };
    let none = ("OUTBOARD_UNUSED", "");
    refused(none, &["--target-size", "9999GiB"], "are free; choose a smaller --target-size");
    refused(none, &["--target-size", "1MiB"], "--target-size");
    refused(none, &["--target-size", "32MiB", "--listen", &taken], &taken);
    refused(none, &["--target-size", "32MiB", "--listen", "192.0.2.1:7400"], "choose another address");
    refused(("OUTBOARD_LOG", "=,="), &["--target-size", "32MiB"], "log.level");
    refused(("OUTBOARD_METRICS_LISTEN", &taken), &["--target-size", "32MiB"], "metrics.listen");
    refused(("OUTBOARD_TARGETS", "/nonexistent/0.img"), &[], "its directory cannot be written");
    // The same applies if the operator has written the configuration and the targets do not exist
    // yet.
    std::fs::create_dir(place.node()).unwrap();
    let config = "targets = [\"0.img\"]\ntarget_size = \"9999GiB\"\n";
    std::fs::write(place.node().join("outboard.toml"), config).unwrap();
    let output = place.run(&["up", "--detach"]);
    assert!(said(&output).contains("are free"), "{}", said(&output));
    assert!(!place.has("0.img") && !place.has("0.img.unfinished"));
    std::fs::remove_dir_all(place.node()).unwrap();
    place.makes_another("after refusals");
}

fn port(endpoint: &str) -> u16 {
    endpoint.rsplit_once(':').unwrap().1.parse().unwrap()
}

/// This is the only test of this file that starts nodes without --listen, because such nodes choose
/// their ports from the same small range.
#[test]
fn nodes_started_concurrently_choose_different_ports_and_keep_them() {
    let places = [Place::new(), Place::new(), Place::new()];
    // The third node has a configuration without a port, written by an operator or by an older
    // version.
    std::fs::create_dir(places[2].node()).unwrap();
    std::fs::write(places[2].node().join("outboard.toml"), "targets = [\"0.img\"]\n").unwrap();
    let start = |place: &Place| {
        let mut command = place.command(&["up", "--detach", "--target-size", "32MiB"]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let starting: Vec<Child> = places.iter().map(start).collect();
    let endpoints: Vec<String> = starting
        .into_iter()
        .zip(&places)
        .map(|(child, place)| {
            let output = child.wait_with_output().unwrap();
            assert!(output.status.success(), "{}\n{}", said(&output), place.logs());
            String::from_utf8(output.stdout).unwrap().trim().to_owned()
        })
        .collect();
    let mut ports: Vec<u16> = endpoints.iter().map(|endpoint| port(endpoint)).collect();
    ports.sort_unstable();
    ports.dedup();
    assert_eq!(ports.len(), places.len(), "{endpoints:?}");
    assert!(ports[0] >= 7400, "{endpoints:?}");
    for (place, endpoint) in places.iter().zip(&endpoints) {
        place.ok(&["down"]);
        assert_eq!(place.ok(&["up", "--detach"]), *endpoint, "the same port after a restart");
    }
    let text = |place: &Path| std::fs::read_to_string(place.join("outboard.toml")).unwrap();
    for (place, endpoint) in places.iter().zip(&endpoints) {
        assert!(text(&place.node()).contains(&format!("listen = \"{endpoint}\"\n")));
        // Now another program uses the port.
        place.ok(&["down"]);
        let taken = std::net::TcpListener::bind(endpoint).unwrap();
        let refused = place.run(&["up", "--detach"]);
        assert!(!refused.status.success() && said(&refused).contains(endpoint), "{}", said(&refused));
        drop(taken);
        assert_eq!(place.ok(&["up", "--detach"]), *endpoint, "the same port again");
    }
}

/// The directory has an owner at every moment, even while `up --detach` hands the node over to the
/// background process.
#[test]
fn two_concurrent_first_ups_in_one_directory_create_one_node() {
    let up = ["up", "--detach", "--targets", "2", "--target-size", "32MiB", "--placement", "host"];
    let up = [&up[..], &["--listen", "127.0.0.1:0"]].concat();
    for round in 0..4 {
        let place = Place::new();
        let start = || {
            let mut command = place.command(&up);
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        let outputs = [start(), start()].map(|child| child.wait_with_output().unwrap());
        let (won, lost): (Vec<_>, Vec<_>) = outputs.iter().partition(|output| output.status.success());
        let all = || outputs.iter().map(said).collect::<String>();
        assert_eq!((won.len(), lost.len()), (1, 1), "round {round}: {}", all());
        assert!(said(lost[0]).contains("a node is running"), "round {round}: {}", all());
        assert_eq!(place.status()["problems"], Value::Array(vec![]), "round {round}");
        place.ok(&["pool", "create", "p"]);
    }
}

/// The role that serves clients fails after the targets are complete and before it serves a client.
#[test]
fn a_first_up_whose_last_role_fails_creates_no_node() {
    let place = Place::new();
    for placement in ["dpu", "host"] {
        let up = ["up", "--detach", "--targets", "2", "--target-size", "32MiB", "--listen", "127.0.0.1:0"];
        let mut command = place.command(&[&up[..], &["--placement", placement]].concat());
        let output = command.env("OUTBOARD_NETWORK_STACKS", "ofi:verbs@192.0.2.1:0").output().unwrap();
        let said = said(&output);
        assert!(!output.status.success() && said.contains("does not start"), "{placement}: {said}");
        assert!(!place.has("outboard.toml") && !place.has("targets/0.img"), "{placement}: {said}");
    }
    place.makes_another("after a role that failed");
}
