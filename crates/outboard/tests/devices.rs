//! Tests of targets on raw block devices. The tests create loop devices, which needs root.
//! `make test` runs them if it can create loop devices.

mod common;

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use rustix::fs::{Mode, OFlags};

use common::Node;

/// A loop device that is backed by a temporary file. Dropping the value removes the device.
struct LoopDevice {
    path: PathBuf,
    file: tempfile::NamedTempFile,
}

impl LoopDevice {
    fn new(size: u64) -> LoopDevice {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(size).unwrap();
        let made = Command::new("losetup").args(["--find", "--show"]).arg(file.path()).output().unwrap();
        assert!(made.status.success(), "losetup failed: {}", said(&made));
        LoopDevice { path: String::from_utf8(made.stdout).unwrap().trim().into(), file }
    }

    /// Returns true if the device contains only zeros, so nothing has been written to it.
    fn is_untouched(&self) -> bool {
        std::fs::read(self.file.path()).unwrap().iter().all(|byte| *byte == 0)
    }

    /// Opens the device exclusively, as a mounted file system does.
    fn hold(&self) -> OwnedFd {
        rustix::fs::open(&self.path, OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC, Mode::empty()).unwrap()
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.path).output();
    }
}

fn said(output: &Output) -> String {
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    format!("{:?}\n{}{}", output.status.code(), text(&output.stdout), text(&output.stderr))
}

/// Runs an `outboard` command for a node that is configured with these targets.
fn run(node: &Node, targets: &[&Path], args: &[&str]) -> Output {
    let targets = targets.iter().map(|path| path.to_str().unwrap()).collect::<Vec<_>>().join(":");
    let mut command = node.command(args);
    command.env("OUTBOARD_TARGETS", targets).env("OUTBOARD_LISTEN", "127.0.0.1:0").output().unwrap()
}

#[test]
#[ignore = "needs root and loop devices"]
fn a_raw_block_device_becomes_a_target_only_with_the_flag_format() {
    let device = LoopDevice::new(64 << 20);
    let node = Node::new();
    let refused = run(&node, &[&device.path], &["up", "--detach"]);
    assert!(!refused.status.success() && said(&refused).contains("--format"), "{}", said(&refused));
    let made = run(&node, &[&device.path], &["up", "--detach", "--format"]);
    assert!(made.status.success(), "{}", said(&made));
    let again = run(&Node::new(), &[&device.path], &["up", "--detach"]);
    assert!(!again.status.success() && said(&again).contains("in use"), "{}", said(&again));

    node.write("file", &vec![7; 5_000_000]);
    node.ok(&["pool", "create", "p"]);
    node.ok(&["put", "p/o", "file"]);
    node.ok(&["down"]);
    // The next commands take the device from the configuration file instead of the environment.
    node.ok(&["fsck", "node"]);
    node.ok(&["up", "--detach"]);
    assert!(node.ok(&["get", "p/o", "-"]) == vec![7; 5_000_000]);
}

#[test]
#[ignore = "needs root and loop devices"]
fn a_device_in_use_is_not_formatted() {
    let device = LoopDevice::new(64 << 20);
    let node = Node::new();
    let held = device.hold();
    let refused = run(&node, &[&device.path], &["up", "--detach", "--format"]);
    assert!(!refused.status.success() && said(&refused).contains("in use"), "{}", said(&refused));
    assert!(device.is_untouched() && !node.has("node"));
    drop(held);
    let made = run(&node, &[&device.path], &["up", "--detach", "--format"]);
    assert!(made.status.success(), "{}", said(&made));
}

#[test]
#[ignore = "needs root and loop devices"]
fn all_devices_are_checked_before_the_first_is_formatted() {
    let (large, small) = (LoopDevice::new(64 << 20), LoopDevice::new(1 << 20));
    let node = Node::new();
    let targets = [&*large.path, &*small.path];
    let refused = run(&node, &targets, &["up", "--detach", "--format"]);
    assert!(!refused.status.success() && said(&refused).contains("at least"), "{}", said(&refused));
    assert!(large.is_untouched() && !node.has("node"));
    // The same applies to a configuration that an operator has written.
    std::fs::create_dir(node.path("node")).unwrap();
    node.write("node/outboard.toml", format!("targets = {targets:?}\n").as_bytes());
    let refused = run(&node, &targets, &["up", "--detach", "--format"]);
    assert!(!refused.status.success() && said(&refused).contains("at least"), "{}", said(&refused));
    assert!(large.is_untouched());
}
