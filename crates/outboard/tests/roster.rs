//! Tests of the node's roster (`node.json`): which targets a node uses if files of its directory
//! are lost, drives are not mounted, or other drives are mounted in their place.

mod common;

use std::fs;

use common::Node;
use serde_json::Value;

/// Number of bytes of the object that the tests store.
const OBJECT: usize = 300_000;

/// Creates a node with `targets` targets, stores an object, and stops the node.
fn stopped(placement: &str, targets: usize, redundancy: &[&str]) -> Node {
    let count = targets.to_string();
    let node = Node::up(&["--placement", placement, "--targets", &count, "--target-size", "48MiB"]);
    node.ok(&[&["pool", "create", "p", "--pg-count", "8"], redundancy].concat());
    node.write("object", &[7; OBJECT]);
    node.ok(&["put", "p/o", &node.path("object")]);
    node.ok(&["down"]);
    node
}

fn starts_with_its_object(node: &Node) {
    node.ok(&["up", "--detach"]);
    assert!(node.ok(&["get", "p/o", "-"]) == [7; OBJECT]);
}

/// Starts the node, which must do without target 1. Requests wait until the target returns, because
/// the node cannot know whether this target alone has newer changes.
fn starts_without_target_1(node: &Node) {
    let output = node.run(&["up", "--detach"]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && said.contains("starts without a target: "), "{said}");
    assert!(said.contains("targets/1.img"), "{said}");
    let states = node.text(&["target", "ls"]);
    let failed: Vec<bool> = states.lines().skip(1).map(|line| line.contains("failed")).collect();
    assert_eq!(failed, [false, true, false], "{states}");
}

/// Moves the file `away` to the path of target 1, and waits until the running node uses the target.
fn target_1_returns(node: &Node) {
    fs::rename(node.path("away"), target(node, 1)).unwrap();
    node.wait("the target is used again", || node.is_whole());
    assert!(node.ok(&["get", "p/o", "-"]) == [7; OBJECT]);
}

fn roster(node: &Node) -> Value {
    serde_json::from_slice(&fs::read(node.path("node/node.json")).unwrap()).unwrap()
}

/// Returns the UUIDs that the roster names, in the order of the configuration.
fn uuids(node: &Node) -> Vec<String> {
    let targets = roster(node)["targets"].as_array().unwrap().clone();
    targets.iter().map(|target| target["uuid"].as_str().unwrap().to_owned()).collect()
}

fn lose_run(node: &Node) {
    fs::remove_dir_all(node.path("node/run")).unwrap();
}

fn target(node: &Node, n: usize) -> String {
    node.path(&format!("node/targets/{n}.img"))
}

#[test]
fn a_node_loses_nothing_with_its_directory_run() {
    for placement in ["dpu", "host"] {
        let node = stopped(placement, 2, &[]);
        let before = roster(&node);
        lose_run(&node);
        node.ok(&["fsck", "node"]);
        let status = node.status();
        assert!(status["problems"].to_string().contains("the node is down"), "{status:#}");
        assert_eq!(status["targets"].as_array().unwrap().len(), 2, "{status:#}");
        lose_run(&node);
        starts_with_its_object(&node);
        assert_eq!(roster(&node), before);
        assert!(before["node"].is_string(), "{before:#}");
        assert_eq!(node.status()["problems"], Value::Array(vec![]));
    }
}

#[test]
fn no_empty_target_replaces_an_absent_target_after_the_loss_of_run() {
    let node = stopped("host", 1, &[]);
    lose_run(&node);
    fs::rename(target(&node, 0), node.path("away")).unwrap();
    for _ in 0..2 {
        let said = node.fails(&["up", "--detach"]);
        assert!(said.contains("0.img is missing") && said.contains("mount its drive"), "{said}");
        assert!(!node.has("node/targets/0.img") && !node.has("node/targets/0.img.unfinished"));
        lose_run(&node);
    }
    fs::rename(node.path("away"), target(&node, 0)).unwrap();
    starts_with_its_object(&node);
}

#[test]
fn a_node_starts_without_an_absent_target_after_the_loss_of_run() {
    for placement in ["dpu", "host"] {
        let node = stopped(placement, 3, &["--redundancy", "mirror:2"]);
        let before = roster(&node);
        lose_run(&node);
        fs::rename(target(&node, 1), node.path("away")).unwrap();
        starts_without_target_1(&node);
        assert!(!node.has("node/targets/1.img"));
        target_1_returns(&node);
        assert_eq!(roster(&node), before);
    }
}

#[test]
fn a_node_without_any_record_of_an_absent_target_is_refused() {
    let node = stopped("host", 2, &[]);
    lose_run(&node);
    fs::remove_file(node.path("node/node.json")).unwrap();
    fs::rename(target(&node, 1), node.path("away")).unwrap();
    let said = node.fails(&["up", "--detach"]);
    assert!(said.contains("1.img") && said.contains("node.json") && said.contains("mount"), "{said}");
    assert!(!node.has("node/targets/1.img") && !node.has("node/node.json"));
    // The same applies if no target is left.
    fs::rename(target(&node, 0), node.path("away0")).unwrap();
    let said = node.fails(&["up", "--detach"]);
    assert!(said.contains("0.img"), "{said}");
    assert!(!node.has("node/targets/0.img"));
    fs::rename(node.path("away0"), target(&node, 0)).unwrap();
    fs::rename(node.path("away"), target(&node, 1)).unwrap();
    starts_with_its_object(&node);
    assert_eq!(uuids(&node).len(), 2);
}

#[test]
fn a_target_of_another_node_is_not_used() {
    for placement in ["dpu", "host"] {
        let node = stopped(placement, 3, &["--redundancy", "mirror:2"]);
        let other = stopped("host", 1, &[]);
        let before = roster(&node);
        fs::rename(target(&node, 1), node.path("away")).unwrap();
        fs::copy(target(&other, 0), target(&node, 1)).unwrap();
        let foreign = fs::read(target(&node, 1)).unwrap();
        starts_without_target_1(&node);
        let said = node.text(&["status"]);
        assert!(said.contains(&uuids(&other)[0]) && said.contains(&uuids(&node)[1]), "{said}");
        assert!(fs::read(target(&node, 1)).unwrap() == foreign, "nothing was written to the foreign target");
        target_1_returns(&node);
        assert_eq!(roster(&node), before);
    }
    let (node, other) = (stopped("host", 1, &[]), stopped("host", 1, &[]));
    fs::rename(target(&node, 0), node.path("away")).unwrap();
    fs::copy(target(&other, 0), target(&node, 0)).unwrap();
    let said = node.fails(&["up", "--detach"]);
    assert!(said.contains(&uuids(&other)[0]) && said.contains(&uuids(&node)[0]), "{said}");
    fs::rename(node.path("away"), target(&node, 0)).unwrap();
    starts_with_its_object(&node);
}

#[test]
fn targets_whose_paths_are_exchanged_are_recognised() {
    let node = stopped("dpu", 3, &[]);
    let mut before = uuids(&node);
    fs::rename(target(&node, 0), node.path("away")).unwrap();
    fs::rename(target(&node, 2), target(&node, 0)).unwrap();
    fs::rename(node.path("away"), target(&node, 2)).unwrap();
    starts_with_its_object(&node);
    before.swap(0, 2);
    assert_eq!(uuids(&node), before);
}

/// Target 0 is lost, and target 1 has moved to its path.
#[test]
fn commands_mean_the_target_that_target_ls_shows_after_targets_have_moved() {
    let node = stopped("dpu", 2, &["--redundancy", "mirror:2"]);
    let before = uuids(&node);
    fs::rename(target(&node, 1), target(&node, 0)).unwrap();
    starts_with_its_object(&node);
    let listed = || {
        let listed = node.text(&["target", "ls"]);
        let uuid = |line: &str| before.iter().position(|uuid| line.contains(uuid.as_str()));
        listed.lines().skip(1).map(uuid).collect::<Vec<_>>()
    };
    assert_eq!(listed(), [Some(0), Some(1)], "a target keeps its number");
    node.ok(&["down"]);
    let forgotten = node.text(&["target", "forget", "0", "--accept-loss"]);
    assert!(forgotten.contains(&before[0]) && forgotten.contains("1.img"), "{forgotten}");
    starts_with_its_object(&node);
    let replaced = node.text(&["target", "replace", "0"]);
    assert!(replaced.contains("targets/1.img"), "{replaced}");
    assert_eq!(listed(), [None, Some(1)]);
    node.ok(&["down"]);
    starts_with_its_object(&node);
    node.wait("the new target is rebuilt", || node.is_whole());
    assert_eq!(uuids(&node)[0], before[1]);
}

/// All targets are replaced by empty targets with the same UUIDs, as if they were copies from before
/// the first start.
#[test]
fn no_empty_node_is_made_of_targets_that_have_lost_everything() {
    let node = Node::up(&["--targets", "2", "--target-size", "48MiB"]);
    let uuids = uuids(&node);
    node.ok(&["down"]);
    for (n, uuid) in uuids.iter().enumerate() {
        let options = store::MkfsOptions {
            size: Some(48 << 20),
            uuid: Some(uuid.parse().unwrap()),
            ..store::MkfsOptions::default()
        };
        fs::remove_file(target(&node, n)).unwrap();
        store::BlockStore::mkfs(target(&node, n).as_ref(), &options, |_, _| ()).unwrap();
    }
    let refused = node.fails(&["up", "--detach"]);
    assert!(refused.contains("no target has the map of node"), "{refused}");
}

/// Older versions of Outboard record the targets only in `run/state.json`.
#[test]
fn a_node_of_an_older_version_gets_a_roster_at_its_next_start() {
    for is_absent in [false, true] {
        let node = stopped("dpu", 3, &["--redundancy", "mirror:2"]);
        let before = uuids(&node);
        fs::remove_file(node.path("node/node.json")).unwrap();
        if is_absent {
            fs::rename(target(&node, 1), node.path("away")).unwrap();
            starts_without_target_1(&node);
        } else {
            starts_with_its_object(&node);
        }
        assert_eq!(uuids(&node), before, "{is_absent}");
        if is_absent {
            assert!(!node.has("node/targets/1.img"));
            target_1_returns(&node);
        }
    }
}

#[test]
fn a_damaged_roster_is_reported_and_can_be_rebuilt() {
    let node = stopped("host", 2, &[]);
    let before = uuids(&node);
    let file = node.path("node/node.json");
    for (text, remedy) in [("{", "remove it"), ("{\"format\": 99}", "use the version of Outboard")] {
        fs::write(&file, text).unwrap();
        let said = node.fails(&["up", "--detach"]);
        assert!(said.contains("node.json") && said.contains(remedy), "{said}");
        let status = node.status();
        assert!(status["problems"].to_string().contains("node.json"), "{status:#}");
        let doctor = node.run(&["doctor"]);
        let said = String::from_utf8(doctor.stdout).unwrap();
        assert!(!doctor.status.success() && said.contains(remedy), "{said}");
        assert_eq!(fs::read_to_string(&file).unwrap(), text);
    }
    lose_run(&node);
    fs::remove_file(&file).unwrap();
    starts_with_its_object(&node);
    assert_eq!(uuids(&node), before);
}

#[test]
fn the_roster_names_the_replacement_of_a_lost_target() {
    let node = stopped("host", 3, &["--redundancy", "mirror:2"]);
    let before = uuids(&node);
    fs::remove_file(target(&node, 1)).unwrap();
    starts_without_target_1(&node);
    node.ok(&["target", "out", "1"]);
    node.ok(&["target", "replace", "1"]);
    let now = uuids(&node);
    assert!(now[1] != before[1] && now[0] == before[0] && now[2] == before[2], "{before:?} {now:?}");
    node.ok(&["down"]);
    // A power cut during `target replace` leaves no file at the path.
    fs::remove_file(target(&node, 1)).unwrap();
    starts_with_its_object(&node);
    node.ok(&["target", "replace", "1"]);
    node.ok(&["down"]);
    lose_run(&node);
    starts_with_its_object(&node);
    node.wait("the new target is rebuilt", || node.is_whole());
}
