//! The state of a node's rebuilds and scrubs, from `outboard status`.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::Deserialize;

use crate::Result;
use crate::evaluation::processes::Threads;
use crate::node::Node;

/// The fields of `outboard status --json` about redundancy.
#[derive(Debug, Deserialize)]
pub struct WatchedState {
    targets: Vec<WatchedTarget>,
    pools: Vec<WatchedPool>,
    rebuild: Option<WatchedRebuild>,
}

#[derive(Debug, Deserialize)]
struct WatchedRebuild {
    objects: u64,
}

#[derive(Debug, Deserialize)]
struct WatchedTarget {
    state: Option<WatchedTargetState>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum WatchedTargetState {
    In,
    Out,
    Slow,
    Failing,
    Failed,
    #[serde(rename = "catching up")]
    CatchingUp,
}

#[derive(Debug, Deserialize)]
struct WatchedPool {
    degraded: u32,
    unavailable: u32,
}

impl WatchedState {
    /// Queries the node's state.
    ///
    /// # Errors
    /// If the node does not answer.
    pub fn of(node: &Node) -> Result<WatchedState> {
        node.json(&["status", "--json"])
    }

    /// Whether all objects have all their fragments, no rebuild is in progress, and no target is
    /// still receiving changes that it missed.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        let settled =
            |t: &WatchedTarget| matches!(t.state, Some(WatchedTargetState::In | WatchedTargetState::Out));
        self.rebuild.is_none()
            && self.pools.iter().all(|p| p.degraded == 0 && p.unavailable == 0)
            && self.targets.iter().all(settled)
    }

    /// Whether objects lack a fragment and no rebuild is in progress.
    #[must_use]
    pub fn is_degraded_and_idle(&self) -> bool {
        self.rebuild.is_none() && self.pools.iter().any(|p| p.degraded > 0)
    }

    /// Number of fragments that were rebuilt since the osd's start. `None` if no rebuild is in
    /// progress.
    #[must_use]
    pub fn rebuilt_fragments(&self) -> Option<u64> {
        self.rebuild.as_ref().map(|rebuild| rebuild.objects)
    }
}

/// Waits up to `patience` until `is` returns true for the node's state. Returns this state. `what`
/// describes the state in the error message.
///
/// # Errors
/// If the node does not reach the state in time.
pub fn wait_until(
    node: &Node,
    patience: Duration,
    what: &str,
    is: impl Fn(&WatchedState) -> bool,
) -> Result<WatchedState> {
    let deadline = Instant::now() + patience;
    loop {
        let state = WatchedState::of(node)?;
        if is(&state) {
            return Ok(state);
        }
        if Instant::now() > deadline {
            return Err(format!("the node was not {what} within {} s: {state:?}", patience.as_secs()).into());
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Waits until all objects have all their fragments.
///
/// # Errors
/// If fragments are still missing after five minutes.
pub fn wait_until_whole(node: &Node) -> Result<()> {
    wait_until(node, Duration::from_secs(300), "free of missing fragments", WatchedState::is_whole).map(drop)
}

/// The resource use of the node's processes so far.
#[derive(Debug)]
pub struct UsageSnapshot {
    at: Instant,
    roles: BTreeMap<String, (u32, Threads)>,
    drive: [u64; 2],
}

impl UsageSnapshot {
    /// Reads the resource use of all processes of the node.
    ///
    /// # Errors
    /// If the node does not report its processes.
    pub fn of(node: &Node) -> Result<UsageSnapshot> {
        let mut usage = UsageSnapshot { at: Instant::now(), roles: BTreeMap::new(), drive: [0; 2] };
        for process in node.status()?.processes {
            let Some(pid) = process.pid else { continue };
            let moved = drive_bytes(pid);
            usage.drive = [usage.drive[0] + moved[0], usage.drive[1] + moved[1]];
            usage.roles.insert(process.role, (pid, Threads::of(pid)));
        }
        usage.at = Instant::now();
        Ok(usage)
    }

    /// Returns the seconds between two snapshots.
    #[must_use]
    pub fn seconds_since(&self, earlier: &UsageSnapshot) -> f64 {
        self.at.duration_since(earlier.at).as_secs_f64()
    }

    /// Returns the average number of cores that the process with the role `role` used between two
    /// snapshots.
    #[must_use]
    pub fn cores_since(&self, earlier: &UsageSnapshot, role: &str) -> f64 {
        let both = self.roles.get(role).zip(earlier.roles.get(role));
        both.map_or(0.0, |(now, then)| now.1.cpu_seconds_since(&then.1)) / self.seconds_since(earlier)
    }

    /// Returns the bytes read from and written to the drive between two snapshots, as the kernel
    /// counts them for the node's processes.
    #[must_use]
    pub fn drive_bytes_since(&self, earlier: &UsageSnapshot) -> [u64; 2] {
        [0, 1].map(|i| self.drive[i].saturating_sub(earlier.drive[i]))
    }
}

/// Returns the numbers of bytes that a process has read from and written to drives since its start.
/// Returns zeros if the counts cannot be read.
fn drive_bytes(pid: u32) -> [u64; 2] {
    let io = std::fs::read_to_string(format!("/proc/{pid}/io")).unwrap_or_default();
    let of = |key| io.lines().find_map(|l| l.strip_prefix(key)?.trim().parse().ok()).unwrap_or(0);
    [of("read_bytes:"), of("write_bytes:")]
}

#[cfg(test)]
mod tests {
    use super::WatchedTargetState::{CatchingUp, In, Out};
    use super::*;

    fn state(rebuilt: Option<u64>, degraded: u32, target: WatchedTargetState) -> WatchedState {
        WatchedState {
            targets: vec![WatchedTarget { state: Some(target) }],
            pools: vec![WatchedPool { degraded, unavailable: 0 }],
            rebuild: rebuilt.map(|objects| WatchedRebuild { objects }),
        }
    }

    #[test]
    fn targets_and_rebuild_progress_are_read_from_the_output_of_status() {
        let said = r#"{"targets":[{"state":"catching up"},{"state":null}],"pools":[],"rebuild":{"target":"5f1df28b-aa3c-4a13-906b-feba84174cff","pool":"ec",
            "groups_left":3,"objects":116,"bytes":121634816,"rate_limit":0,"last_failure":null}}"#;
        let state: WatchedState = serde_json::from_str(said).unwrap();
        assert_eq!(state.rebuilt_fragments(), Some(116));
        let states: Vec<_> = state.targets.iter().map(|target| target.state).collect();
        assert_eq!(states, [Some(CatchingUp), None]);
        let state: WatchedState =
            serde_json::from_str(r#"{"targets":[],"pools":[],"rebuild":null}"#).unwrap();
        assert_eq!(state.rebuilt_fragments(), None);
    }

    #[test]
    fn a_node_is_whole_if_no_pool_is_degraded_and_no_target_catches_up() {
        assert!(state(None, 0, Out).is_whole());
        assert!(!state(None, 1, In).is_whole() && state(None, 1, In).is_degraded_and_idle());
        assert!(!state(None, 0, CatchingUp).is_whole());
        assert!(!state(Some(7), 1, In).is_degraded_and_idle());
    }
}
