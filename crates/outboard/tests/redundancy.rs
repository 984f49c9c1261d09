//! Tests of a node with redundant pools from an operator's view: drives are lost, replaced, damaged
//! or slow.

mod common;

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use common::Node;
use rustix::process::{Pid, Signal, kill_process};

fn node(placement: &str) -> Node {
    Node::up(&["--placement", placement, "--targets", "4", "--target-size", "128MiB"])
}

impl Node {
    fn wait_until_whole(&self) {
        self.wait("the pools are whole", || self.is_whole());
    }
}

fn content(len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

/// Loses a drive, replaces it, and checks that no data is lost.
fn a_lost_drive(placement: &str) {
    let node = node(placement);
    let bytes = content(5_000_000);
    fs::write(node.path("file"), &bytes).unwrap();
    let pools = [("e", "ec:2+1"), ("m", "mirror:2")];
    for (pool, redundancy) in pools {
        node.ok(&["pool", "create", pool, "--redundancy", redundancy, "--pg-count", "8"]);
        node.ok(&["put", &format!("{pool}/before"), &node.path("file")]);
    }
    node.ok(&["down"]);
    let drive = node.path("node/targets/1.img");
    fs::rename(&drive, node.path("lost")).unwrap();
    node.ok(&["up", "--detach"]);
    assert!(node.text(&["target", "ls"]).contains("failed"));
    // The witness knows that the other drives have all acknowledged changes.
    node.fails(&["target", "forget", "1"]);
    for (pool, _) in pools {
        assert!(node.ok(&["get", &format!("{pool}/before"), "-"]) == bytes, "{pool} without a drive");
        node.ok(&["put", &format!("{pool}/after"), &node.path("file")]);
    }
    node.ok(&["target", "replace", "1"]);
    node.ok(&["down"]);
    node.ok(&["up", "--detach"]);
    node.wait_until_whole();
    for name in ["e/before", "e/after", "m/before", "m/after"] {
        assert!(node.ok(&["get", name, "-"]) == bytes, "{name} with the new drive");
    }
    for (pool, redundancy) in pools {
        assert!(node.text(&["status"]).contains(redundancy));
        let scrub: serde_json::Value = serde_json::from_slice(&node.ok(&["scrub", pool, "--json"])).unwrap();
        assert_eq!(
            (&scrub["objects"], &scrub["damaged"], &scrub["inconsistent"]),
            (&2.into(), &0.into(), &0.into())
        );
    }
}

#[test]
fn a_lost_drive_can_be_replaced() {
    a_lost_drive("dpu");
}

#[test]
fn a_lost_drive_can_be_replaced_in_host_placement() {
    a_lost_drive("host");
}

/// Creates a pool of each redundancy scheme, with eight objects each. Returns the names of the
/// objects.
fn fill(node: &Node) -> Vec<String> {
    let pools = [("e", "ec:2+1"), ("m", "mirror:2"), ("s", "single")];
    // The placement groups of `s` are spread over all four targets.
    for (pool, redundancy) in pools {
        node.ok(&["pool", "create", pool, "--redundancy", redundancy, "--pg-count", "8"]);
    }
    let names: Vec<String> =
        pools.iter().flat_map(|(p, _)| (0..8).map(move |n| format!("{p}/{n}"))).collect();
    for name in &names {
        node.ok(&["put", name, &node.path("file")]);
    }
    names
}

/// Returns the pids of all processes of the node except the supervisor.
fn processes(node: &Node) -> Vec<u64> {
    let status = node.status();
    let roles = status["processes"].as_array().unwrap().iter().filter(|p| p["role"] != "supervisor");
    roles.map(|p| p["pid"].as_u64().unwrap()).collect()
}

/// Checks that every object can be read and overwritten, and that no process was restarted since
/// `before`.
fn assert_serves(node: &Node, names: &[String], bytes: &[u8], before: &[u64]) {
    for name in names {
        assert!(node.ok(&["get", name, "-"]) == bytes, "{name}");
        node.ok(&["put", name, &node.path("file")]);
    }
    assert!(!node.text(&["target", "ls"]).contains("failed"));
    assert_eq!(processes(node), before, "no role was restarted");
}

/// Starts a node without one drive, and puts the drive back while the node runs.
fn an_absent_drive_that_returns(placement: &str) {
    let node = node(placement);
    let bytes = content(300_000);
    fs::write(node.path("file"), &bytes).unwrap();
    let names = fill(&node);
    node.ok(&["down"]);
    let (drive, away) = (node.path("node/targets/1.img"), node.path("away"));
    fs::rename(&drive, &away).unwrap();
    node.ok(&["up", "--detach"]);
    assert!(node.text(&["target", "ls"]).contains("failed"));
    let before = processes(&node);

    // In place of the absent drive, offer a copy of another target, which has another uuid.
    fs::copy(node.path("node/targets/2.img"), &drive).unwrap();
    let log = node.path(if placement == "dpu" { "node/log/store.log" } else { "node/log/node.log" });
    node.wait("another drive is refused", || {
        fs::read_to_string(&log).unwrap().contains("check that the path names the right drive")
    });
    assert!(node.text(&["target", "ls"]).contains("failed"));

    fs::rename(&away, &drive).unwrap();
    node.wait_until_whole();
    assert_serves(&node, &names, &bytes, &before);
}

#[test]
fn an_absent_drive_that_returns_is_used_again_automatically() {
    an_absent_drive_that_returns("dpu");
}

#[test]
fn an_absent_drive_that_returns_is_used_again_in_host_placement() {
    an_absent_drive_that_returns("host");
}

/// Returns the number of failed targets.
fn failed(node: &Node) -> usize {
    failed_targets(node).len()
}

/// Makes the writes of one target and then of all targets fail, and checks that no data is lost.
fn drives_whose_writes_fail(placement: &str) {
    let node = node(placement);
    let bytes = content(300_000);
    fs::write(node.path("file"), &bytes).unwrap();
    let names = fill(&node);
    let before = processes(&node);

    // One write fails. The other targets continue to serve.
    node.ok(&["debug", "fault", "drive.write=fail,count=1"]);
    node.ok(&["put", "e/0", &node.path("file")]);
    node.wait("a target refuses writes", || failed(&node) == 1);
    assert!(node.ok(&["get", "e/1", "-"]) == bytes, "a read does not need the target");
    node.wait("the target is remounted", || failed(&node) == 0);
    node.wait_until_whole();
    assert_serves(&node, &names, &bytes, &before);

    // All writes of all targets fail. No target can be remounted before the fault is cleared, and
    // puts wait for the targets.
    let bytes = content(400_000);
    fs::write(node.path("file"), &bytes).unwrap();
    node.ok(&["debug", "fault", "drive.write=fail"]);
    let mut puts: Vec<_> =
        names.iter().map(|name| node.command(&["put", name, &node.path("file")]).spawn().unwrap()).collect();
    node.wait("all targets refuse writes", || failed(&node) == 4);
    let armed: serde_json::Value = serde_json::from_slice(&node.ok(&["debug", "faults", "--json"])).unwrap();
    assert!(armed[1]["fired"].as_u64() > Some(3), "{armed}");
    node.ok(&["debug", "clear"]);
    for (put, name) in puts.iter_mut().zip(&names) {
        assert!(put.wait().unwrap().success(), "{name}");
    }
    node.wait("no target refuses writes", || failed(&node) == 0);
    node.wait_until_whole();
    assert_serves(&node, &names, &bytes, &before);
}

#[test]
fn targets_are_used_again_after_failed_writes_with_the_osd_on_the_dpu() {
    drives_whose_writes_fail("dpu");
}

#[test]
fn targets_are_used_again_after_failed_writes_with_the_osd_on_the_host() {
    drives_whose_writes_fail("host");
}

/// Returns the numbers of the failed targets.
fn failed_targets(node: &Node) -> Vec<usize> {
    let targets: serde_json::Value = serde_json::from_slice(&node.ok(&["target", "ls", "--json"])).unwrap();
    let targets = targets.as_array().or(targets["targets"].as_array()).unwrap();
    (0..targets.len()).filter(|n| targets[*n]["state"] == "failed").collect()
}

#[test]
fn a_dead_drive_stays_failed_while_another_drive_is_remounted_and_the_osd_restarts() {
    let node = node("dpu");
    let bytes = content(300_000);
    fs::write(node.path("file"), &bytes).unwrap();
    let names = fill(&node);
    let drive = |n: usize| node.path(&format!("node/targets/{n}.img"));
    let away = |n: usize| node.path(&format!("away{n}"));
    // Without their files, the target that fails next cannot be remounted. The other targets keep
    // their open files and continue.
    (0..4).for_each(|n| fs::rename(drive(n), away(n)).unwrap());
    node.ok(&["debug", "fault", "drive.write=fail,count=1"]);
    // The failed write may be one of the store's own, for example of a checkpoint. The osd notices the
    // failure when the next object of one of the target's groups changes.
    node.wait("a target refuses writes", || {
        (0..8).for_each(|n| drop(node.ok(&["put", &format!("e/{n}"), &node.path("file")])));
        failed(&node) == 1
    });
    let dead = failed_targets(&node)[0];
    (0..4).filter(|n| *n != dead).for_each(|n| fs::rename(away(n), drive(n)).unwrap());
    let assert_reads = |pools: &[&str], when: &str| {
        for name in names.iter().filter(|name| pools.contains(&&name[..1])) {
            assert!(node.ok(&["get", name, "-"]) == bytes, "{name} {when}");
        }
    };
    assert_reads(&["e", "m"], "without the target");

    node.ok(&["debug", "fault", "drive.write=fail,count=1"]);
    node.ok(&["put", "e/1", &node.path("file")]);
    let log = node.path("node/log/store.log");
    node.wait("another target is remounted", || {
        fs::read_to_string(&log).unwrap().contains("was remounted target_uuid")
            && failed_targets(&node) == [dead]
    });
    assert_reads(&["e", "m"], "after another target's remount");

    let processes = node.status()["processes"].clone();
    let osd = processes.as_array().unwrap().iter().find(|p| p["role"] == "osd").unwrap();
    kill_process(Pid::from_raw(osd["pid"].as_i64().unwrap() as i32).unwrap(), Signal::KILL).unwrap();
    assert_reads(&["e"], "after a restart of the osd");
    assert_eq!(failed_targets(&node), [dead]);

    fs::rename(away(dead), drive(dead)).unwrap();
    node.wait_until_whole();
    assert_reads(&["e", "m", "s"], "after the drive's return");
}

/// Flips a bit in each block of the file `drive` that equals a block of `content`. Returns the
/// number of damaged blocks.
fn damage(drive: &str, content: &[u8]) -> usize {
    let blocks: HashSet<&[u8]> = content.chunks_exact(4096).collect();
    let mut image = fs::read(drive).unwrap();
    let found = image.chunks_exact_mut(4096).filter(|block| blocks.contains(&**block));
    let found = found.map(|block| block[100] ^= 1).count();
    fs::write(drive, image).unwrap();
    found
}

#[test]
fn a_scrub_repairs_a_damaged_drive() {
    let node = node("dpu");
    let bytes = content(5_000_000);
    fs::write(node.path("file"), &bytes).unwrap();
    for (pool, redundancy) in [("e", "ec:2+1"), ("m", "mirror:2"), ("s", "single")] {
        node.ok(&["pool", "create", pool, "--redundancy", redundancy, "--pg-count", "1"]);
        node.ok(&["put", &format!("{pool}/file"), &node.path("file")]);
    }
    let scrub =
        |pool| -> serde_json::Value { serde_json::from_slice(&node.ok(&["scrub", pool, "--json"])).unwrap() };
    let mut mended = [0, 0];
    for drive in 0..4 {
        node.ok(&["down"]);
        let damaged = damage(&node.path(&format!("node/targets/{drive}.img")), &bytes);
        node.ok(&["up", "--detach"]);
        for (pool, mended) in ["e", "m"].into_iter().zip(&mut mended) {
            let found = scrub(pool);
            assert_eq!(found["damaged"], found["repaired"], "{pool}, drive {drive}: {found}");
            assert_eq!(found["inconsistent"], 0, "{pool}, drive {drive}: {found}");
            *mended += found["damaged"].as_u64().unwrap();
            assert!(damaged > 0 || found["damaged"] == 0, "{pool}, drive {drive}: {found}");
            assert!(node.ok(&["get", &format!("{pool}/file"), "-"]) == bytes, "{pool}, drive {drive}");
            assert_eq!(scrub(pool)["damaged"], 0, "{pool}, drive {drive}");
        }
    }
    // The scrubs repaired two data fragments, which contain blocks of the file unchanged, and two
    // copies. The pool `s` stores only one copy, so its damage cannot be repaired.
    assert_eq!(mended, [2, 2]);
    assert!(node.fails(&["scrub", "s"]).contains("not repaired"));
    assert!(node.text(&["scrub", "e", "--repair"]).contains("0 fragments damaged"));
    let said = node.fails(&["get", "s/file", "-"]);
    assert!(said.contains("checksum mismatch"), "{said}");
}

/// A process that SIGSTOP has paused. Dropping the value continues the process.
struct Stopped(Pid);

impl Stopped {
    fn new(pid: Pid) -> Stopped {
        kill_process(pid, Signal::STOP).unwrap();
        Stopped(pid)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        kill_process(self.0, Signal::CONT).unwrap();
    }
}

/// The pause is longer than `osd.target_timeout`, so every call on every target times out.
#[test]
fn redundant_pools_survive_a_store_process_that_is_paused_for_13_seconds() {
    let node = node("dpu");
    let bytes = content(5_000_000);
    fs::write(node.path("file"), &bytes).unwrap();
    let pools = [("e", "ec:2+1"), ("m", "mirror:2"), ("s", "single")];
    for (pool, redundancy) in pools {
        node.ok(&["pool", "create", pool, "--redundancy", redundancy, "--pg-count", "8"]);
        node.ok(&["put", &format!("{pool}/before"), &node.path("file")]);
    }
    let processes = node.status()["processes"].clone();
    let store = processes.as_array().unwrap().iter().find(|p| p["role"] == "store").unwrap();
    let pid = Pid::from_raw(store["pid"].as_i64().unwrap() as i32).unwrap();
    let stopped = Stopped::new(pid);
    let began = Instant::now();
    std::thread::scope(|scope| {
        let put = |pool: &str| {
            node.ok(&["put", &format!("{pool}/during"), &node.path("file")]);
            began.elapsed()
        };
        let puts = pools.map(|(pool, _)| scope.spawn(move || put(pool)));
        std::thread::sleep(Duration::from_secs(13));
        drop(stopped);
        for put in puts {
            let took = put.join().unwrap();
            assert!(took > Duration::from_secs(13), "a put ended while the store was paused: {took:?}");
        }
    });
    for (pool, _) in pools {
        for name in ["before", "during"] {
            assert!(node.ok(&["get", &format!("{pool}/{name}"), "-"]) == bytes, "{pool}/{name}");
        }
        node.ok(&["put", &format!("{pool}/after"), &node.path("file")]);
        assert!(node.ok(&["get", &format!("{pool}/after"), "-"]) == bytes, "{pool}/after");
    }
    node.wait_until_whole();
    let until = Instant::now() + Duration::from_secs(30);
    while node.status()["problems"] != serde_json::json!([]) {
        assert!(Instant::now() < until, "the node still has problems: {:#}", node.status()["problems"]);
        std::thread::sleep(Duration::from_millis(200));
    }
    let listed: serde_json::Value = serde_json::from_slice(&node.ok(&["target", "ls", "--json"])).unwrap();
    for target in listed.as_array().unwrap() {
        assert_eq!((&target["state"], &target["failure"]), (&"up".into(), &serde_json::Value::Null));
    }
    for (pool, _) in pools {
        let scrub: serde_json::Value = serde_json::from_slice(&node.ok(&["scrub", pool, "--json"])).unwrap();
        assert_eq!((&scrub["damaged"], &scrub["inconsistent"]), (&0.into(), &0.into()), "{pool}: {scrub}");
    }
}

/// Kills the process of a role, and waits until the restarted role is ready.
fn kill(node: &Node, role: &str) {
    let process = |status: &serde_json::Value| {
        let all = status["processes"].as_array().unwrap();
        all.iter().find(|p| p["role"] == role).unwrap().clone()
    };
    let before = process(&node.status());
    let pid = Pid::from_raw(before["pid"].as_i64().unwrap() as i32).unwrap();
    kill_process(pid, Signal::KILL).unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let now = process(&node.status());
        if now["state"] == "running" && now["pid"] != before["pid"] {
            assert!(now["restarts"].as_u64() > before["restarts"].as_u64(), "{now:#}");
            return;
        }
        let log = fs::read_to_string(node.path(&format!("node/log/{role}.log"))).unwrap_or_default();
        assert!(Instant::now() < until, "the {role} is not restarted: {now:#}\n{log}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_store_restarts_without_a_drive_that_was_lost_in_the_first_run() {
    let node = node("dpu");
    let bytes = content(1_000_000);
    fs::write(node.path("file"), &bytes).unwrap();
    node.ok(&["pool", "create", "m", "--redundancy", "mirror:2", "--pg-count", "8"]);
    node.ok(&["put", "m/before", &node.path("file")]);
    fs::remove_file(node.path("node/targets/1.img")).unwrap();
    kill(&node, "store");
    assert!(node.ok(&["get", "m/before", "-"]) == bytes);
    node.ok(&["put", "m/after", &node.path("file")]);
    assert!(node.ok(&["get", "m/after", "-"]) == bytes);
    assert!(node.text(&["target", "ls"]).contains("failed"));
}

#[test]
fn a_node_restarts_without_a_drive_that_was_damaged_in_the_first_run() {
    let node = node("host");
    node.ok(&["pool", "create", "m", "--redundancy", "mirror:2", "--pg-count", "8"]);
    fs::write(node.path("file"), content(100_000)).unwrap();
    node.ok(&["put", "m/before", &node.path("file")]);
    let drive = fs::OpenOptions::new().write(true).open(node.path("node/targets/1.img")).unwrap();
    drive.write_all_at(&[0; 1 << 16], 0).unwrap();
    kill(&node, "node");
    assert!(node.text(&["target", "ls"]).contains("failed"));
    node.ok(&["target", "out", "1"]);
    assert!(node.ok(&["get", "m/before", "-"]) == content(100_000));
    node.ok(&["put", "m/after", &node.path("file")]);
}

#[test]
fn the_coding_mode_can_be_shown_and_changed() {
    let node = node("dpu");
    assert!(node.text(&["ec", "mode"]).starts_with("async, offload dpu; host "));
    assert!(node.text(&["ec", "mode", "hybrid:3:1"]).starts_with("hybrid:3:1"));
    let mode: serde_json::Value = serde_json::from_slice(&node.ok(&["ec", "mode", "--json"])).unwrap();
    assert_eq!((&mode["mode"], &mode["engine"]), (&"hybrid:3:1".into(), &"dpu".into()));
    assert_eq!(node.status()["coding"]["mode"], "hybrid:3:1");
    let said = node.fails(&["ec", "mode", "hybrid:0:0"]);
    assert!(said.contains("not both 0"), "{said}");
}

#[test]
fn errors_about_pools_and_targets_state_the_reason() {
    let node = node("dpu");
    let create = |args: &[&str]| node.fails(&[&["pool", "create", "p"], args].concat());
    assert!(create(&["--redundancy", "ec:6+3"]).contains("9 are needed"));
    assert!(create(&["--redundancy", "raid5"]).contains("mirror:N"));
    assert!(create(&["--redundancy", "ec:2+1", "--stripe-unit", "5000"]).contains("multiples of 4096"));
    assert!(create(&["--stripe-unit", "8KiB"]).contains("no stripe unit"));
    assert!(node.fails(&["target", "out", "4"]).contains("0 to 3"));
    assert!(node.fails(&["scrub", "p"]).contains("does not exist"));
    assert_eq!(node.text(&["target", "ls"]).lines().count(), 5);
}

/// The restarted store mounts the new target, which the running osd does not know. The osd
/// therefore restarts.
#[test]
fn the_osd_accepts_a_restarted_store_with_a_replaced_target() {
    let node = node("dpu");
    let bytes = content(1_000_000);
    fs::write(node.path("file"), &bytes).unwrap();
    node.ok(&["pool", "create", "m", "--redundancy", "mirror:2", "--pg-count", "8"]);
    node.ok(&["put", "m/before", &node.path("file")]);
    fs::remove_file(node.path("node/targets/1.img")).unwrap();
    kill(&node, "store");
    let until = Instant::now() + Duration::from_secs(30);
    while !node.text(&["target", "ls"]).contains("failed") {
        assert!(Instant::now() < until, "the lost drive is not detected");
        std::thread::sleep(Duration::from_millis(100));
    }
    node.ok(&["target", "out", "1"]);
    node.ok(&["target", "replace", "1"]);
    kill(&node, "store");
    assert!(node.ok(&["get", "m/before", "-"]) == bytes);
    node.ok(&["put", "m/after", &node.path("file")]);
    node.wait_until_whole();
    assert!(!node.text(&["target", "ls"]).contains("failed"));
    assert!(node.ok(&["get", "m/after", "-"]) == bytes);
}
