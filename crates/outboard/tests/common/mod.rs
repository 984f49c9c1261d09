//! A node in a temporary directory, which tests operate by `outboard` commands.

#![allow(dead_code, reason = "each test program uses only some of these functions")]

use std::fs;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// A temporary directory that contains the node in its folder `node`. All commands run in the
/// temporary directory. Dropping the value stops the node.
pub struct Node {
    dir: tempfile::TempDir,
}

impl Node {
    /// Creates the temporary directory only; no node exists yet.
    pub fn new() -> Node {
        Node { dir: tempfile::tempdir().unwrap() }
    }

    /// Creates and starts a node with these flags of `outboard up`.
    pub fn up(flags: &[&str]) -> Node {
        let node = Node::new();
        node.ok(&[&["up", "--detach", "--listen", "127.0.0.1:0"], flags].concat());
        node
    }

    /// Prepares an `outboard` command for the node.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_outboard"));
        command.args(args).env("OUTBOARD_DIR", self.dir.path().join("node")).env_remove("OUTBOARD_ENDPOINT");
        command.current_dir(self.dir.path()).stdin(Stdio::null());
        command
    }

    pub fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    /// Runs a command that must succeed. Returns its standard output.
    pub fn ok(&self, args: &[&str]) -> Vec<u8> {
        let output = self.run(args);
        assert!(output.status.success(), "outboard {args:?}: {}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    }

    pub fn text(&self, args: &[&str]) -> String {
        String::from_utf8(self.ok(args)).unwrap()
    }

    /// Runs a command that must fail. Returns its standard error.
    pub fn fails(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert!(!output.status.success(), "outboard {args:?}: {}", String::from_utf8_lossy(&output.stdout));
        String::from_utf8(output.stderr).unwrap()
    }

    /// Returns the path of a file in the temporary directory.
    pub fn path(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().unwrap().to_owned()
    }

    /// Returns true if the file exists in the temporary directory.
    pub fn has(&self, name: &str) -> bool {
        self.dir.path().join(name).exists()
    }

    pub fn write(&self, name: &str, bytes: &[u8]) {
        fs::write(self.dir.path().join(name), bytes).unwrap();
    }

    pub fn status(&self) -> Value {
        serde_json::from_slice(&self.ok(&["status", "--json"])).unwrap()
    }

    /// Waits until `is_so` returns true. Fails after a minute; `what` then describes the condition.
    pub fn wait(&self, what: &str, is_so: impl Fn() -> bool) {
        let until = Instant::now() + Duration::from_secs(60);
        while !is_so() {
            assert!(Instant::now() < until, "{what}: {}", self.text(&["status", "--json"]));
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Returns true if the node has pools, and all their placement groups have all their targets.
    pub fn is_whole(&self) -> bool {
        let status = self.status();
        let pools = status["pools"].as_array().unwrap();
        let number = |value: &Value| value.as_u64().unwrap_or(0);
        !pools.is_empty() && pools.iter().all(|p| number(&p["degraded"]) + number(&p["unavailable"]) == 0)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.run(&["down"]);
    }
}
