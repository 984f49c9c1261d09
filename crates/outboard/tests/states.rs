//! Runs the commands that `docs/operations.md` names for each state of a target, on nodes with 2, 3
//! and 6 targets, while the node runs and while it is stopped.

mod common;

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::process::Output;
use std::time::Duration;

use client::{Client, Options};
use common::Node;
use identity::Credentials;
use rustix::process::{Pid, Signal, kill_process};

/// The target that gets into a state.
const ID: &str = "1";
/// The pools, and their numbers of objects. So many objects without redundancy are on all targets.
const OBJECTS: [(&str, usize); 2] = [("r", 12), ("s", 64)];
/// Number of objects in the pool without redundancy.
const SINGLE: usize = OBJECTS[1].1;

/// A state of a target, as the table in the document names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Missing,
    Foreign,
    Unreadable,
    Stale,
    Damaged,
    Full,
}

const STATES: [State; 6] =
    [State::Missing, State::Foreign, State::Unreadable, State::Stale, State::Damaged, State::Full];

impl State {
    /// The first word of the state's row.
    fn row(self) -> &'static str {
        match self {
            State::Missing => "missing",
            State::Foreign => "foreign",
            State::Unreadable => "unreadable",
            State::Stale => "stale",
            State::Damaged => "damaged",
            State::Full => "full",
        }
    }

    /// Whether the target loses its content.
    fn loses_all(self) -> bool {
        matches!(self, State::Missing | State::Foreign | State::Unreadable)
    }
}

/// Returns the commands in the state's row of the document.
fn documented(state: State) -> Vec<String> {
    let text = include_str!("../../../docs/operations.md");
    let start = text.find("### Commands for each state of a target").expect("the section exists");
    let rows: Vec<&str> = text[start..].lines().filter(|line| line.starts_with("| ")).take(7).collect();
    let row = rows.iter().position(|row| row.starts_with(&format!("| {}", state.row())));
    let mut row = row.unwrap_or_else(|| panic!("no row for {state:?}"));
    while rows[row].contains("the same commands") {
        row -= 1;
    }
    let cell = rows[row].split('|').nth(2).unwrap();
    cell.split('`').filter_map(|part| part.strip_prefix("outboard ")).map(str::to_owned).collect()
}

/// Bytes that no other object or version has.
fn content(name: &str, version: u64) -> Vec<u8> {
    let seed = name.bytes().fold(version, |hash, byte| hash.wrapping_mul(31).wrapping_add(u64::from(byte)));
    let word = |i: u64| (i.wrapping_add(seed << 20)).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    (0..12_500).flat_map(word).collect()
}

/// A node with a redundant pool `r`, a pool `s` without redundancy, and objects in both.
struct Rig {
    node: Node,
    placement: &'static str,
    objects: Vec<(String, u64)>,
}

impl Rig {
    fn new(targets: usize, redundancy: &str, placement: &'static str) -> Rig {
        let count = targets.to_string();
        let node = Node::up(&["--placement", placement, "--targets", &count, "--target-size", "64MiB"]);
        for (pool, redundancy) in [("r", redundancy), ("s", "single")] {
            node.ok(&["pool", "create", pool, "--redundancy", redundancy, "--pg-count", "64"]);
        }
        let objects =
            OBJECTS.iter().flat_map(|(pool, count)| (0..*count).map(move |n| format!("{pool}/{n}")));
        let mut rig = Rig { node, placement, objects: objects.map(|name| (name, 0)).collect() };
        rig.put_all(0);
        rig
    }

    /// Runs calls of a client.
    fn call<T>(&self, calls: impl AsyncFnOnce(&Client) -> T) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let endpoint = self.node.status()["endpoint"].as_str().unwrap().to_owned();
            let credentials = Credentials::load(self.node.path("node/credentials.toml").as_ref()).unwrap();
            let options = Options { trust: credentials.trust(), ..Options::default() };
            let client = Client::connect(&endpoint, options).await.unwrap();
            let result = calls(&client).await;
            client.close().await;
            result
        })
    }

    /// Puts a version of all objects.
    fn put_all(&mut self, version: u64) {
        self.objects.iter_mut().for_each(|(_, last)| *last = version);
        self.call(async |client| {
            for (name, version) in &self.objects {
                object(client, name).put(content(name, *version)).await.unwrap();
            }
        });
    }

    /// Reads the objects of a pool. Returns each with its last version.
    fn read_all(&self, pool: &str) -> Vec<(&str, u64, client::Result<Vec<u8>>)> {
        let prefix = format!("{pool}/");
        self.call(async |client| {
            let mut all = Vec::new();
            for (name, version) in self.objects.iter().filter(|(name, _)| name.starts_with(&prefix)) {
                let read = object(client, name).get().await.map(|bytes| bytes.to_vec());
                all.push((&**name, *version, read));
            }
            all
        })
    }

    fn image(&self) -> String {
        self.node.path(&format!("node/targets/{ID}.img"))
    }

    /// Kills the process that owns the targets. The supervisor starts it again.
    fn kill_owner(&self) {
        let role = if self.placement == "dpu" { "store" } else { "node" };
        let status = self.node.status();
        let processes = status["processes"].as_array().unwrap();
        let owner = processes.iter().find(|process| process["role"] == role).unwrap();
        let pid = Pid::from_raw(owner["pid"].as_i64().unwrap() as i32).unwrap();
        kill_process(pid, Signal::KILL).unwrap();
    }

    /// Changes the target while no process uses it, or shortly before its process is killed.
    fn harm(&self, state: State) {
        let image = self.image();
        match state {
            State::Missing => fs::rename(&image, self.node.path("lost")).unwrap(),
            State::Foreign => {
                let other = Node::up(&["--targets", "1", "--target-size", "64MiB"]);
                other.ok(&["down"]);
                fs::rename(&image, self.node.path("lost")).unwrap();
                fs::copy(other.path("node/targets/0.img"), &image).unwrap();
            }
            State::Unreadable => {
                let file = OpenOptions::new().write(true).open(&image).unwrap();
                file.write_all_at(&[0; 64 << 10], 0).unwrap();
            }
            State::Stale => fs::rename(self.node.path("older"), &image).unwrap(),
            State::Damaged => {
                let bytes = fs::read(&image).unwrap();
                let file = OpenOptions::new().write(true).open(&image).unwrap();
                let mut flipped = 0;
                for (name, version) in &self.objects {
                    let start = &content(name, *version)[..64];
                    // Data of a fragment begins at a block.
                    for at in (0..bytes.len()).step_by(4096).filter(|&at| bytes[at..].starts_with(start)) {
                        file.write_all_at(&[bytes[at] ^ 1], at as u64).unwrap();
                        flipped += 1;
                    }
                }
                assert!(flipped > 2, "{flipped} fragments are damaged");
            }
            State::Full => {}
        }
    }

    /// Puts objects until the node refuses one for lack of space. Returns their names.
    fn fill(&self) -> Vec<String> {
        self.node.write("big", &vec![7; 4 << 20]);
        let mut names = Vec::new();
        loop {
            let name = format!("r/filler-{}", names.len());
            let output = self.node.run(&["put", &name, &self.node.path("big")]);
            if !output.status.success() {
                assert!(errors(&output).contains("no space"), "{}", errors(&output));
                return names;
            }
            names.push(name);
        }
    }

    /// Checks that all objects with redundancy can be read.
    fn check_redundant(&self, what: &str) {
        for (name, version, read) in self.read_all("r") {
            assert!(read.unwrap() == content(name, version), "{name} {what}");
        }
    }

    /// Returns the objects without redundancy that cannot be read, with the errors. The other ones
    /// must have their last content, or, if `older` is allowed, an earlier content.
    fn check_single(&self, older: bool, what: &str) -> Vec<(String, client::Error)> {
        let mut lost = Vec::new();
        for (name, version, read) in self.read_all("s") {
            match read {
                Err(e) => lost.push((name.to_owned(), e)),
                Ok(bytes) => {
                    let is_known = |version: u64| bytes == content(name, version);
                    assert!(is_known(version) || older && (0..version).any(is_known), "{name} {what}");
                }
            }
        }
        lost
    }

    fn lists_all(&self) -> bool {
        ["r", "s"].iter().all(|pool| self.node.run(&["ls", pool]).status.success())
    }
}

fn object(client: &Client, name: &str) -> client::Object {
    let (pool, name) = name.split_once('/').unwrap();
    client.pool(pool).unwrap().object(name).unwrap()
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Brings a target into a state, runs the documented commands, and checks what the node serves.
fn a_state(state: State, targets: usize, is_running: bool) {
    let redundancy = match targets {
        2 => "mirror:2",
        3 => "ec:2+1",
        _ => "ec:4+2",
    };
    let placement = if is_running ^ (targets == 3) { "dpu" } else { "host" };
    let what = format!("{state:?}, {targets} targets, running: {is_running}, {placement}");
    let mut rig = Rig::new(targets, redundancy, placement);
    if state == State::Stale {
        rig.node.ok(&["down"]);
        fs::copy(rig.image(), rig.node.path("older")).unwrap();
        rig.node.ok(&["up", "--detach"]);
        rig.put_all(1);
    }
    let mut fillers = Vec::new();
    if state == State::Full {
        fillers = rig.fill();
        if !is_running {
            rig.node.ok(&["down"]);
        }
    } else if is_running {
        // The process keeps a file open that is renamed, so it notices the loss when it starts again.
        rig.harm(state);
        rig.kill_owner();
    } else {
        rig.node.ok(&["down"]);
        rig.harm(state);
    }
    if !is_running {
        rig.node.ok(&["up", "--detach"]);
    }

    // Before the commands, pools with redundancy serve everything, and the loss is reported.
    rig.check_redundant(&what);
    let lost = rig.check_single(false, &what);
    let status = rig.node.text(&["status"]);
    match state {
        State::Full => assert!(lost.is_empty(), "{lost:?}, {what}"),
        State::Damaged => assert!(!lost.is_empty() && lost.len() < SINGLE, "{lost:?}, {what}"),
        _ => {
            assert!(!lost.is_empty() && lost.len() < SINGLE, "{lost:?}, {what}");
            assert!(status.contains("PROBLEMS"), "{what}: {status}");
            let listed = rig.node.run(&["ls", "s"]);
            let names = String::from_utf8(listed.stdout.clone()).unwrap();
            assert!(!listed.status.success() && errors(&listed).contains("incomplete"), "{what}");
            assert!(names.lines().count() >= SINGLE - lost.len(), "{what}: {names}");
        }
    }

    let commands = documented(state);
    assert!(!commands.is_empty(), "{what}");
    for command in commands {
        let command = command.replace("ID", ID);
        let words: Vec<&str> = command.split(' ').collect();
        match words[..] {
            ["scrub", "POOL"] => ["r", "s"].iter().for_each(|pool| {
                rig.node.run(&["scrub", pool]);
            }),
            ["rm", "POOL/OBJECT"] => fillers.iter().for_each(|name| drop(rig.node.ok(&["rm", name]))),
            _ => drop(rig.node.ok(&words)),
        }
    }

    rig.node.wait(&format!("the pools are whole, {what}"), || rig.node.is_whole());
    rig.check_redundant(&what);
    let left = rig.check_single(state == State::Stale, &what);
    let was_lost = |(name, _): &(String, client::Error)| lost.iter().any(|(lost, _)| lost == name);
    assert!(left.iter().all(was_lost), "{left:?} was readable before, {what}");
    if state == State::Stale {
        assert!(left.is_empty(), "{left:?}: the older copy is served, {what}");
    }
    if state.loses_all() {
        assert!(left.iter().all(|(_, e)| e.is_not_found()), "{left:?}, {what}");
    }
    assert!(rig.lists_all(), "{what}");
    rig.put_all(2);
    rig.check_redundant(&what);
    assert!(rig.check_single(false, &what).is_empty(), "{what}");
    rig.node.ok(&["scrub", "r"]);
    rig.node.ok(&["scrub", "s"]);
    let status = rig.node.text(&["status"]);
    assert!(!status.contains("PROBLEMS"), "{what}: {status}");
}

fn all_states(targets: usize) {
    for state in STATES {
        for is_running in [true, false] {
            a_state(state, targets, is_running);
        }
    }
}

#[test]
fn each_state_of_a_target_of_two_has_commands_that_help() {
    all_states(2);
}

#[test]
fn each_state_of_a_target_of_three_has_commands_that_help() {
    all_states(3);
}

#[test]
fn each_state_of_a_target_of_six_has_commands_that_help() {
    all_states(6);
}

/// More targets are lost than the pool tolerates, so all its objects are lost.
#[test]
fn a_pool_that_has_lost_too_many_targets_begins_empty_once_they_are_replaced() {
    let rig = Rig::new(3, "ec:2+1", "dpu");
    rig.node.ok(&["down"]);
    for id in ["1", "2"] {
        fs::remove_file(rig.node.path(&format!("node/targets/{id}.img"))).unwrap();
    }
    rig.node.ok(&["up", "--detach"]);
    let refused = rig.node.fails(&["get", "r/0", "-"]);
    assert!(refused.contains("outboard target forget"), "{refused}");
    let lost = rig.check_single(false, "two targets are missing");
    assert!(!lost.is_empty() && lost.len() < SINGLE, "{lost:?}");
    for id in ["1", "2"] {
        let loss = rig.node.run(&["target", "forget", id]);
        let printed = String::from_utf8(loss.stdout).unwrap();
        assert!(printed.contains("pool r (ec:2+1)") && printed.contains("pool s (single)"), "{printed}");
        assert!(printed.contains("all objects on 64 of them"), "{printed}");
        assert!(String::from_utf8(loss.stderr).unwrap().contains("nothing was changed"));
        rig.node.ok(&["target", "forget", id, "--accept-loss"]);
    }
    // The osd must not forget the operator's word meanwhile.
    std::thread::sleep(Duration::from_secs(2));
    for id in ["1", "2"] {
        rig.node.ok(&["target", "replace", id]);
    }
    rig.node.ok(&["down"]);
    rig.node.ok(&["up", "--detach"]);
    let refused = rig.node.fails(&["get", "r/0", "-"]);
    assert!(refused.contains("does not exist"), "{refused}");
    assert_eq!(rig.node.text(&["ls", "r"]), "");
    rig.node.write("file", &content("r/0", 1));
    rig.node.ok(&["put", "r/0", &rig.node.path("file")]);
    assert!(rig.node.ok(&["get", "r/0", "-"]) == content("r/0", 1));
    let left = rig.check_single(false, "two targets were replaced");
    assert!(left.len() == lost.len() && left.iter().all(|(_, e)| e.is_not_found()), "{left:?}");
    rig.node.wait("the pools are whole", || rig.node.is_whole());
    let status = rig.node.text(&["status"]);
    assert!(!status.contains("PROBLEMS"), "{status}");
}

/// The witness is lost together with a target, so the node does not start without the operator's
/// word.
#[test]
fn a_stopped_node_starts_once_the_loss_of_a_target_is_accepted() {
    for placement in ["dpu", "host"] {
        let rig = Rig::new(2, "mirror:2", placement);
        rig.node.ok(&["down"]);
        fs::remove_file(rig.node.path("node/witness")).unwrap();
        fs::remove_file(rig.image()).unwrap();
        let refused = rig.node.fails(&["up", "--detach"]);
        assert!(refused.contains("outboard target forget ID --accept-loss"), "{refused}");
        let said = rig.node.fails(&["target", "forget", ID]);
        assert!(said.contains("nothing was changed"), "{said}");
        assert!(rig.node.fails(&["target", "forget", "2", "--accept-loss"]).contains("targets 0 to 1"));
        rig.node.fails(&["up", "--detach"]);
        let said = rig.node.text(&["target", "forget", ID, "--accept-loss"]);
        assert!(said.contains("applies this when it starts"), "{said}");
        let roster = || fs::read_to_string(rig.node.path("node/node.json")).unwrap();
        assert!(roster().contains("forgotten"));
        rig.node.ok(&["up", "--detach"]);
        rig.node.wait("the osd knows", || !roster().contains("forgotten"));
        rig.check_redundant("after the loss was accepted");
        assert!(rig.node.status()["targets"][1]["forgotten"].as_bool().unwrap());
        // A later start needs no word.
        rig.node.ok(&["down"]);
        rig.node.ok(&["up", "--detach"]);
        rig.check_redundant("after another start");
        rig.node.ok(&["target", "replace", ID]);
        rig.node.ok(&["down"]);
        rig.node.ok(&["up", "--detach"]);
        rig.node.wait("the pools are whole", || rig.node.is_whole());
        let is_over = || !rig.node.status()["targets"][1]["forgotten"].as_bool().unwrap_or(false);
        rig.node.wait("the acceptance of the loss has ended", is_over);
        rig.check_redundant("after the replacement");
    }
}
