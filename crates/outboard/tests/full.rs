//! Tests of a node with 0 B free on every target. Each command either works, or fails with an error
//! whose remedy works. The same applies after a restart.

mod common;

use std::fs;

use common::Node;

fn node(targets: &str, size: &str) -> Node {
    Node::up(&["--targets", targets, "--target-size", size])
}

impl Node {
    /// Runs a command that must fail because a target has no space. The error must say this, and
    /// what to do.
    fn no_space(&self, args: &[&str]) {
        let said = self.fails(args);
        assert!(said.contains("no space for data on target "), "outboard {args:?}: {said}");
        assert!(said.contains("remove objects, which works on a full target"), "outboard {args:?}: {said}");
    }

    fn targets(&self) -> Vec<serde_json::Value> {
        serde_json::from_slice(&self.ok(&["target", "ls", "--json"])).unwrap()
    }

    /// Returns the free bytes of each target, without the reserve.
    fn free(&self) -> Vec<u64> {
        self.targets().iter().map(|t| t["space"]["Ok"]["free"].as_u64().unwrap()).collect()
    }

    /// Stores copies of `file` as objects `name` + number until an object does not fit. Returns the
    /// number of stored objects.
    fn put_all(&self, name: &str, file: &str) -> usize {
        for n in 0.. {
            let put = self.run(&["put", &format!("{name}{n}"), file]);
            if !put.status.success() {
                let said = String::from_utf8_lossy(&put.stderr);
                assert!(said.contains("no space for data on target "), "{name}{n}: {said}");
                return n;
            }
        }
        unreachable!("targets are finite")
    }

    /// Fills the remaining space of each target with objects in the pool `rest`, which has no
    /// redundancy.
    fn top_up(&self, round: usize) {
        for n in 0..400 {
            let file = match self.free().into_iter().max() {
                Some(0) => return,
                Some(free) if free >= 8 << 20 => "huge",
                Some(free) if free >= LARGE as u64 => "large",
                _ => "small",
            };
            // The name of an object determines its target, so try several names.
            let names = (0..8).map(|k| format!("rest/{round}-{n}-{k}"));
            for name in names {
                let put = self.run(&["put", &name, file]);
                let said = String::from_utf8_lossy(&put.stderr);
                assert!(put.status.success() || said.contains("no space for data on target "), "{said}");
            }
        }
        panic!("the targets are not full: {:?}", self.free());
    }
}

fn content(len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

/// Runs every command that leaves the targets full. `first` and `second` are objects with the
/// content of the file `large`.
fn walk(node: &Node, pool: &str, first: &str, second: &str, round: usize) {
    let large = content(LARGE);
    node.text(&["status"]);
    node.text(&["doctor"]);
    assert!(node.text(&["pool", "ls"]).contains(pool));
    assert_eq!(node.text(&["target", "ls"]).lines().count(), 1 + node.targets().len());
    assert!(node.text(&["ls", pool]).lines().count() > 10);
    assert!(node.text(&["stat", first]).contains("524288"));
    assert!(node.ok(&["get", first, "-"]) == large, "an object of a full node can be read");
    assert!(node.fails(&["get", &format!("{pool}/none"), "-"]).contains("does not exist"));
    assert!(node.fails(&["rm", &format!("{pool}/none")]).contains("does not exist"));
    node.ok(&["cp", &format!("outboard:{first}"), "copy"]);
    assert!(fs::read(node.path("copy")).unwrap() == large);
    node.ok(&["scrub", pool]);
    node.ok(&["ec", "mode"]);
    node.ok(&["ec", "encode", "--k", "2", "--m", "1", "--out", &format!("fragments{round}"), "large"]);
    let [a, b] = [0, 2].map(|n| format!("fragments{round}/large.{n:03}.fragment"));
    let decoded = format!("decoded{round}");
    node.ok(&["ec", "decode", "--out", &decoded, &a, &b]);
    assert!(fs::read(node.path(&decoded)).unwrap() == large);
    node.ok(&["debug", "fault", "dma.transfer=fail,count=1"]);
    node.ok(&["debug", "faults"]);
    node.ok(&["debug", "clear"]);
    node.ok(&["target", "rate", "0"]);
    // Commands that need space fail.
    node.no_space(&["put", &format!("{pool}/more"), "large"]);
    node.no_space(&["put", second, "huge"]);
    let said = node.fails(&["cp", "large", &format!("outboard:{pool}/more")]);
    assert!(said.contains("no space for data on target "), "{said}");
    let bench = ["bench", "write", "--pool", pool, "--object-size", "512KiB", "--seconds", "1"];
    assert!(node.fails(&bench).contains("no space for data on target "));
    // Pools can be created and removed.
    let made = format!("made{round}");
    node.ok(&["pool", "create", &made, "--pg-count", "4"]);
    node.no_space(&["put", &format!("{made}/x"), "small"]);
    node.ok(&["pool", "rm", &made]);
    let said = node.fails(&["pool", "rm", pool]);
    assert!(said.contains("remove its objects first, or force the removal"), "{said}");
    let failed: Vec<_> = node.targets().into_iter().filter(|t| !t["failure"].is_null()).collect();
    assert!(failed.is_empty(), "{failed:?}");
    // The remedy works: the space of a removed object is available at once.
    node.ok(&["rm", second]);
    node.ok(&["put", second, "large"]);
    assert!(node.ok(&["get", second, "-"]) == large);
}

const LARGE: usize = 512 << 10;

fn files(node: &Node) {
    node.write("large", &content(LARGE));
    node.write("huge", &content(8 << 20));
    node.write("small", &content(4096));
}

#[test]
fn an_erasure_coded_node_without_free_space_executes_all_commands_also_after_a_restart() {
    let node = node("3", "24MiB");
    files(&node);
    node.ok(&["pool", "create", "films", "--redundancy", "ec:2+1", "--pg-count", "4"]);
    node.ok(&["pool", "create", "rest", "--pg-count", "32"]);
    let many = node.put_all("films/f", "large");
    assert!(many > 40, "{many} objects fit");
    for round in 0..2 {
        node.top_up(round);
        walk(&node, "films", "films/f0", "films/f1", round);
        node.top_up(10 + round);
        // A target that is taken out and in again catches up with the removal of an object.
        node.ok(&["target", "out", "1"]);
        assert!(node.text(&["target", "ls"]).contains("out"));
        node.ok(&["rm", &format!("films/f{}", 2 + round)]);
        assert!(node.ok(&["get", "films/f0", "-"]) == content(LARGE));
        node.ok(&["target", "in", "1"]);
        node.wait("the target catches up", || node.is_whole());
        node.ok(&["put", &format!("films/f{}", 2 + round), "large"]);
        node.top_up(20 + round);
        node.ok(&["down"]);
        node.ok(&["fsck"]);
        node.ok(&["up", "--detach"]);
        assert_eq!(node.free(), [0, 0, 0], "the node has restarted with no free space");
    }
    let said = node.fails(&["target", "replace", "2"]);
    assert!(said.contains("has objects of pool rest"), "{said}");
    node.ok(&["pool", "rm", "--force", "rest"]);
    node.ok(&["target", "replace", "2"]);
    node.ok(&["down"]);
    node.ok(&["up", "--detach"]);
    node.wait("the replaced target is rebuilt", || node.is_whole());
    for n in 0..many {
        assert!(node.ok(&["get", &format!("films/f{n}"), "-"]) == content(LARGE), "films/f{n}");
    }
    node.ok(&["pool", "rm", "--force", "films"]);
    node.wait("the space of the removed objects is free again", || {
        node.free().iter().all(|free| *free > 16 << 20)
    });
}

#[test]
fn a_full_node_restarts_and_can_be_emptied() {
    let node = node("2", "64MiB");
    files(&node);
    node.ok(&["pool", "create", "photos", "--pg-count", "8"]);
    node.ok(&["pool", "create", "rest", "--pg-count", "32"]);
    for n in 0..12 {
        node.ok(&["put", &format!("photos/f{n}"), "large"]);
    }
    for round in 0..2 {
        node.top_up(round);
        walk(&node, "photos", "photos/f0", "photos/f1", round);
        node.top_up(10 + round);
        node.ok(&["target", "out", "0"]);
        // Restart the node with one target out and the other target full.
        node.ok(&["down"]);
        node.ok(&["up", "--detach"]);
        node.ok(&["target", "in", "0"]);
        assert_eq!(node.free(), [0, 0], "the node has restarted with no free space");
    }
    for pool in ["photos", "rest"] {
        node.ok(&["pool", "rm", "--force", pool]);
    }
    node.wait("the space of the removed objects is free again", || {
        node.free().iter().all(|free| *free > 48 << 20)
    });
}
