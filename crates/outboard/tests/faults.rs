//! Tests of a whole node under load, with injected faults: the node continues to serve, loses no
//! acknowledged change, and uses DMA again after each fault.

use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(60);

struct Node {
    dir: tempfile::TempDir,
}

impl Node {
    fn up() -> Node {
        Node::up_with("dpu")
    }

    fn up_with(placement: &str) -> Node {
        let node = Node { dir: tempfile::tempdir().unwrap() };
        let up = ["up", "--detach", "--listen", "127.0.0.1:0", "--targets", "1", "--target-size", "192MiB"];
        node.ok(&[&up[..], &["--placement", placement]].concat());
        node.ok(&["pool", "create", "p"]);
        node
    }

    /// Runs a command on another machine, which has only a credential file.
    fn remote(&self, credentials: &str, args: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_outboard"));
        command.args(args).env("OUTBOARD_ENDPOINT", self.status()["endpoint"].as_str().unwrap());
        command.env("OUTBOARD_CREDENTIALS", self.dir.path().join(credentials));
        command.env("OUTBOARD_DIR", self.dir.path().join("nowhere")).output().unwrap()
    }

    fn remote_ok(&self, args: &[&str]) -> Output {
        let output = self.remote("credentials.toml", args);
        assert!(output.status.success(), "{args:?}: {}", said(&output));
        output
    }

    fn outboard(&self, args: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_outboard"));
        command.args(args).env("OUTBOARD_DIR", self.dir.path()).env_remove("OUTBOARD_ENDPOINT");
        for (key, value) in [("OVERDUE", "200ms"), ("COOL_DOWN", "200ms")] {
            command.env(format!("OUTBOARD_CHANNEL_{key}"), value);
        }
        command.output().unwrap()
    }

    fn ok(&self, args: &[&str]) -> String {
        let output = self.outboard(args);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(output.status.success(), "{args:?}: {}{}", text(&output.stdout), text(&output.stderr));
        text(&output.stdout)
    }

    fn json(&self, args: &[&str]) -> Value {
        serde_json::from_str(&self.ok(args)).unwrap()
    }

    fn status(&self) -> Value {
        self.json(&["status", "--json"])
    }

    fn eventually(&self, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let status = self.status();
            if holds(&status) {
                return status;
            }
            assert!(Instant::now() < deadline, "{what}: {status:#}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Writes objects for one second. Returns the number of writes.
    fn load(&self) -> u64 {
        let args =
            ["bench", "write", "--pool", "p", "--object-size", "1MiB", "--objects", "24", "--seconds", "1"];
        let report = self.json(&[&args[..], &["--in-flight", "8", "--json"]].concat());
        assert_eq!(report["errors"], 0, "{report:#}");
        report["ops"].as_u64().unwrap()
    }

    fn put(&self, name: &str, bytes: &[u8]) {
        let file = self.dir.path().join("in");
        std::fs::write(&file, bytes).unwrap();
        self.ok(&["put", name, file.to_str().unwrap()]);
    }

    fn is(&self, name: &str, bytes: &[u8]) {
        let file = self.dir.path().join("out");
        let _ = std::fs::remove_file(&file);
        self.ok(&["get", name, file.to_str().unwrap()]);
        assert!(std::fs::read(&file).unwrap() == bytes, "{name} differs from the data that was stored");
    }

    fn process(status: &Value, role: &str) -> (u64, u64) {
        let all = status["processes"].as_array().unwrap();
        let process = all.iter().find(|p| p["role"] == role).unwrap();
        (process["pid"].as_u64().unwrap_or(0), process["restarts"].as_u64().unwrap())
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.outboard(&["down"]);
    }
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn noise(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| ((i + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 41) as u8).collect()
}

fn descriptors(pid: u64) -> usize {
    std::fs::read_dir(Path::new("/proc").join(pid.to_string()).join("fd")).unwrap().count()
}

#[test]
fn transfer_and_doorbell_faults_lose_no_data_and_dma_is_used_again() {
    let node = Node::up();
    let mut kept = Vec::new();
    node.load();
    let before = node.status();
    let held = |status: &Value| ["store", "osd"].map(|role| descriptors(Node::process(status, role).0));
    for (n, fault) in [
        "dma.transfer=fail,after=20,count=2",
        "dma.transfer=stall,late=700ms,after=20,count=1",
        "dma.transfer=corrupt,after=20,count=1",
        "dma.doorbell=drop,after=20,count=1",
        "store.doorbell=drop,after=20,count=1",
    ]
    .into_iter()
    .enumerate()
    {
        node.ok(&["debug", "fault", fault]);
        let name = format!("p/{n}");
        let bytes = noise(n as u64, 5_000_000 + n);
        node.load();
        node.put(&name, &bytes);
        let faults = node.json(&["debug", "faults", "--json"]);
        assert!(faults[0]["fired"].as_u64().unwrap() > 0, "{fault} did not fire: {faults}");
        let role = if fault.starts_with("store") { "store" } else { "osd" };
        let problems = node.status()["problems"].to_string();
        assert!(problems.contains(&format!("FAULT ARMED in the {role}: {fault}")), "{fault}: {problems}");
        node.ok(&["debug", "clear"]);
        let recovered = |s: &Value| {
            s["offload"]["state"] == "active" && s["offload"]["recoveries"].as_u64() > Some(n as u64)
        };
        let status = node.eventually("DMA is not used again", recovered);
        assert!(status["offload"]["failures"].as_u64().unwrap() > n as u64);
        assert_eq!(Node::process(&status, "osd").1, 0, "no process was restarted");
        kept.push((name, bytes));
        kept.iter().for_each(|(name, bytes)| node.is(name, bytes));
    }
    assert_eq!(held(&node.status()), held(&before), "the store or the osd leaks descriptors");
}

#[test]
fn a_put_does_not_send_segments_again_that_arrived_before_dma_failed() {
    const LEN: u64 = 16 << 20;
    let node = Node::up();
    node.load();
    let bytes = |status: &Value, key: &str| status["offload"][key].as_u64().unwrap();
    let (mut kept_sum, mut sent_sum, data) = (0, 0, noise(5, LEN as usize));
    // The transfers of a segment are its payload, its entry and the fetch of its reply.
    for (n, after) in [5, 8, 11, 14, 17].into_iter().enumerate() {
        let before = node.status();
        node.ok(&["debug", "fault", &format!("dma.transfer=fail,after={after},count=1")]);
        node.put(&format!("p/{n}"), &data);
        let faults = node.json(&["debug", "faults", "--json"]);
        assert_eq!(faults[0]["fired"], 1, "the fault did not fire: {faults}");
        node.ok(&["debug", "clear"]);
        let after = node.status();
        let moved = |key| bytes(&after, key) - bytes(&before, key);
        let (kept, sent) = (moved("kept_bytes"), moved("fallback_bytes"));
        assert!(kept + sent <= LEN, "bytes were sent twice: {kept} kept, {sent} sent");
        kept_sum += kept;
        // Nothing is sent if the payload of all segments in flight had arrived before the failure.
        sent_sum += sent;
        node.is(&format!("p/{n}"), &data);
        node.eventually("DMA is not used again", |s| s["offload"]["state"] == "active");
    }
    assert!(kept_sum >= 4 << 20, "only {kept_sum} bytes were kept");
    assert!(sent_sum > 0, "no bytes were sent over the control socket");
}

#[test]
fn a_node_recovers_if_its_store_or_osd_is_killed_during_transfers() {
    let node = Node::up();
    let bytes = noise(1, 7_000_001);
    for (role, fault) in
        [("store", "store.call=kill,after=60,count=1"), ("osd", "osd.reply=kill,after=60,count=1")]
    {
        node.put("p/x", &bytes);
        let (_, restarts) = Node::process(&node.status(), role);
        node.ok(&["debug", "fault", fault]);
        assert!(node.load() > 0);
        let up_again = |s: &Value| {
            Node::process(s, role).1 == restarts + 1 && s["problems"].as_array().unwrap().is_empty()
        };
        node.eventually("the fault did not fire, or the role was not restarted", up_again);
        node.is("p/x", &bytes);
    }
}

#[test]
fn mechanisms_of_the_channel_can_be_switched_off_and_on_again() {
    let node = Node::up();
    let tune = |options: &[&str]| node.json(&[&["debug", "tune", "--json"], options].concat());
    let configured = tune(&[]);
    assert_eq!((&configured["pipeline"], &configured["dma_queues"]), (&true.into(), &5.into()));
    let tuned = tune(&["--no-pipeline", "--no-region-cache"]);
    assert_eq!((&tuned["pipeline"], &tuned["region_cache"]), (&false.into(), &0.into()));
    assert!(node.load() > 0);
    // Each call begins with the configured settings.
    let tuned = tune(&["--max-transfer", "64KiB", "--dma-queues", "1", "--poll", "0"]);
    assert_eq!((&tuned["pipeline"], &tuned["region_cache"]), (&true.into(), &configured["region_cache"]));
    assert_eq!((&tuned["dma_queues"], &tuned["poll_us"]), (&1.into(), &0.into()));
    assert!(node.load() > 0);
    let refused = node.outboard(&["debug", "tune", "--max-transfer", "5"]);
    assert_eq!(refused.status.code(), Some(2));
    assert_eq!(tune(&[]), configured);
    let log = std::fs::read_to_string(node.dir.path().join("log/osd.log")).unwrap();
    let last = log.lines().rfind(|l| l.contains("the tuning of the channel has changed")).unwrap();
    assert!(last.contains("pipeline: true") && last.contains("dma_queues: 5,"), "{last}");
}

#[test]
fn administrators_of_the_node_arm_faults_of_the_osd_from_other_machines() {
    let node = Node::up();
    let fault = "dma.transfer=fail,after=1000000,count=1";
    node.remote_ok(&["debug", "fault", fault]);
    node.ok(&["debug", "fault", "store.call=kill,after=1000000"]);
    let listed = |output: &Output| -> Vec<(String, String)> {
        let rows: Value = serde_json::from_slice(&output.stdout).unwrap();
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        rows.as_array().unwrap().iter().map(|row| (text(&row["role"]), text(&row["fault"]))).collect()
    };
    let there = node.remote_ok(&["debug", "faults", "--json"]);
    assert_eq!(listed(&there), [("osd".into(), fault.into())]);
    assert!(said(&there).contains("the faults of the store's process are not included"), "{}", said(&there));
    let here = node.outboard(&["debug", "faults", "--json"]);
    assert_eq!(
        listed(&here),
        [("store".into(), "store.call=kill,after=1000000".into()), ("osd".into(), fault.into())]
    );
    assert!(said(&here).is_empty(), "{}", said(&here));

    let refused = node.remote("credentials.toml", &["debug", "fault", "drive.write=fail,count=1"]);
    assert_eq!(refused.status.code(), Some(1));
    let run = "on the machine of the store, run \"outboard debug fault drive.write=fail,count=1 --dir DIR\"";
    assert!(said(&refused).contains(run), "{}", said(&refused));

    let guest = node.dir.path().join("guest.toml");
    node.ok(&["user", "create", "main/guest", "--credentials", guest.to_str().unwrap()]);
    node.ok(&["grant", "main/guest", "--pool", "p", "--rights", "read,write,list,admin"]);
    for (args, what) in [
        (&["debug", "fault", "osd.reply=kill"][..], "arm faults"),
        (&["debug", "faults"], "list armed faults"),
        (&["debug", "clear"], "disarm faults"),
        (&["debug", "tune"], "tune the channel"),
    ] {
        let refused = node.remote("guest.toml", args);
        assert_eq!(refused.status.code(), Some(3), "{args:?}: {}", said(&refused));
        let why = format!("main/guest may not {what}; only an administrator of the node may\n");
        assert!(said(&refused).contains(&why), "{args:?}: {}", said(&refused));
    }
    assert_eq!(Node::process(&node.status(), "osd").1, 0, "the osd was killed");

    node.remote_ok(&["debug", "tune", "--no-pipeline"]);
    node.remote_ok(&["debug", "clear"]);
    assert_eq!(listed(&node.outboard(&["debug", "faults", "--json"])).len(), 1, "the store's fault remains");
    node.ok(&["debug", "clear"]);
    assert_eq!(listed(&node.outboard(&["debug", "faults", "--json"])), []);
    let audit: Vec<Value> = serde_json::from_str(&node.ok(&["audit", "--json"])).unwrap();
    for (event, user, what) in [
        ("changed", "main/admin", &*format!("arm the fault {fault}")),
        ("failed", "main/admin", "arm the fault drive.write=fail,count=1"),
        ("refused", "main/guest", "arm the fault osd.reply=kill"),
        ("refused", "main/guest", "list armed faults"),
        ("changed", "main/admin", "tune the channel: pipeline=false"),
        ("changed", "main/admin", "disarm all faults"),
    ] {
        let is_noted =
            |entry: &Value| entry["event"] == event && entry["user"] == user && entry["what"] == what;
        assert!(audit.iter().any(is_noted), "{event}: {what}: {audit:#?}");
    }
}

#[test]
fn in_host_placement_the_control_plane_arms_faults_of_the_whole_node() {
    let node = Node::up_with("host");
    node.remote_ok(&["debug", "fault", "drive.write=fail,after=1000000"]);
    let shown = String::from_utf8(node.remote_ok(&["status"]).stdout).unwrap();
    assert!(shown.contains("FAULT ARMED in the node: drive.write=fail,after=1000000"), "{shown}");
    assert_eq!(node.json(&["debug", "faults", "--json"])[0]["role"], "node");
    for site in ["dma.transfer=fail", "store.call=kill"] {
        let refused = node.outboard(&["debug", "fault", site]);
        assert!(said(&refused).contains("exists only with placement dpu"), "{}", said(&refused));
    }
    assert!(said(&node.outboard(&["debug", "tune"])).contains("the osd uses no channel"));
    node.ok(&["debug", "clear"]);
    assert_eq!(node.status()["problems"], serde_json::json!([]));
}
